//! Gives one rank other files of the same model: a LoRA that no other rank adds, or another tokenizer.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use safetensors::SafeTensorError;
use safetensors::tensor::{Dtype, TensorView};
use tessera_base::Diagnostic;
use tessera_runtime::drill::DrillFault;

use super::injector::FaultInjector;
use crate::files::write_error;
use crate::model::Model;
use crate::text_encoder::PromptEncoder;
use crate::weights_origin::LoraFile;

/// Name of the LoRA's file in the run directory.
const LORA_FILE: &str = "drill-lora.safetensors";

/// The matrix that the LoRA changes. Every generator has it.
const LORA_MODULE: &str = "blocks.0.self_attn.q";

/// Name in the run directory of the folder that differs from the model's in its tokenizer.
const OTHER_FOLDER: &str = "drill-model";

impl FaultInjector {
    /// Changes the files from which this rank reads the model, if that is the fault.
    ///
    /// # Errors
    /// T0014 if the changed files cannot be written.
    pub(crate) fn modify_model(&self, model: &mut Model) -> Result<(), Diagnostic> {
        if self.has_fault(DrillFault::LoraOnOne) {
            let path = self.run_dir().join(LORA_FILE);
            write_lora(&path, model.video.wan.dim as usize)?;
            model.weights.loras.push(LoraFile { path, strength: 1.0 });
        }
        if self.has_fault(DrillFault::OtherTokenizer)
            && let Some(file) = PromptEncoder::find_tokenizer(&model.dir, &model.video, model.weights.base)
        {
            model.dir = link_with_other_file(&model.dir, &file, &self.run_dir().join(OTHER_FOLDER))?;
        }
        Ok(())
    }
}

/// Writes a LoRA of rank 1 for a square matrix.
fn write_lora(path: &Path, dim: usize) -> Result<(), Diagnostic> {
    let values: Vec<u8> = (0..2 * dim).flat_map(|i| ((i % 7) as f32 / 7.0 - 0.5).to_le_bytes()).collect();
    let (down, up) = values.split_at(dim * 4);
    let factors = [("lora_A", [1, dim], down), ("lora_B", [dim, 1], up)].map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes)?;
        Ok((format!("{LORA_MODULE}.{name}.weight"), view))
    });
    let factors = factors.into_iter().collect::<Result<Vec<_>, SafeTensorError>>();
    let file = factors.and_then(|factors| safetensors::serialize(factors, None));
    let written = file.map_err(io::Error::other).and_then(|file| fs::write(path, file));
    written.map_err(|e| write_error(path, &e))
}

/// Creates a folder with links to everything in `dir`, except for one file of it that gets one byte more.
/// Returns the folder.
fn link_with_other_file(dir: &Path, file: &Path, into: &Path) -> Result<PathBuf, Diagnostic> {
    let inside = file.strip_prefix(dir).unwrap_or(file);
    let (mut from, mut to) = (dir.to_path_buf(), into.to_path_buf());
    let failed = |path: &Path, e: &std::io::Error| write_error(path, e);
    for part in inside {
        fs::create_dir(&to).map_err(|e| failed(&to, &e))?;
        for entry in fs::read_dir(&from).map_err(|e| failed(&from, &e))? {
            let entry = entry.map_err(|e| failed(&from, &e))?;
            if entry.file_name() != part {
                symlink(entry.path(), to.join(entry.file_name())).map_err(|e| failed(&to, &e))?;
            }
        }
        (from, to) = (from.join(part), to.join(part));
    }
    let mut bytes = fs::read(&from).map_err(|e| failed(&from, &e))?;
    bytes.push(b'\n');
    fs::write(&to, bytes).map_err(|e| failed(&to, &e))?;
    Ok(into.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_folder_differs_in_one_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (model, other) = (dir.path().join("model"), dir.path().join("other"));
        fs::create_dir_all(model.join("tokenizer")).unwrap();
        for (name, text) in [("config.json", "{}"), ("tokenizer/a.json", "a"), ("tokenizer/b.json", "b")] {
            fs::write(model.join(name), text).unwrap();
        }
        let found = link_with_other_file(&model, &model.join("tokenizer/b.json"), &other).unwrap();
        let read = |name: &str| fs::read_to_string(found.join(name)).unwrap();
        assert_eq!(["config.json", "tokenizer/a.json", "tokenizer/b.json"].map(read), ["{}", "a", "b\n"]);
        assert_eq!(fs::read_to_string(model.join("tokenizer/b.json")).unwrap(), "b", "the model is intact");
    }
}
