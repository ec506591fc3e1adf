//! Finds the files of each part by their published names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;

use super::{CheckpointFolder, Form, Part, PartFiles, tiny_decoder};
use crate::codes::T0010;

/// File names of a VAE in one file.
const VAE_FILES: [&str; 5] = [
    "Wan2.1_VAE.pth",
    "Wan2.1_VAE.safetensors",
    "wan_2.1_vae.safetensors",
    "Wan2.2_VAE.pth",
    "wan2.2_vae.safetensors",
];

/// File names of a text encoder in one file.
const TEXT_ENCODER_FILES: [&str; 4] = [
    "models_t5_umt5-xxl-enc-bf16.pth",
    "models_t5_umt5-xxl-enc-bf16.safetensors",
    "umt5_xxl_fp16.safetensors",
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
];

/// The weights of a word table, which has a name of its own.
const WORDS_FILE: &str = "text_encoder.safetensors";

/// Folders of a tokenizer, and the files of which it has at least one.
const TOKENIZER_FOLDERS: [&str; 2] = ["google/umt5-xxl", "tokenizer"];
const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "spiece.model"];

/// Stems of the usual names of weights in a folder.
const WEIGHT_STEMS: [&str; 2] = ["model", "diffusion_pytorch_model"];

/// Extensions of files that hold tensors.
const WEIGHT_EXTENSIONS: [&str; 5] = ["safetensors", "pt", "pth", "bin", "ckpt"];

/// Extensions that download programs give to a file until it is complete.
const INCOMPLETE_EXTENSIONS: [&str; 5] = ["incomplete", "part", "crdownload", "aria2", "download"];

/// Levels of folders in which incomplete files are searched: the cache of a download lies three deep.
const INCOMPLETE_DEPTH: usize = 4;

/// Maximum entries of a folder that are read.
const MAX_ENTRIES: usize = 10_000;

pub(super) fn recognise(path: &Path) -> Result<CheckpointFolder, Diagnostic> {
    if !path.exists() {
        return Err(Diagnostic::error(&T0010, format!("folder {} does not exist", path.display()))
            .with_hint("give the path of a model folder, for example models/demo"));
    }
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    let mut found = CheckpointFolder {
        path: path.to_path_buf(),
        form: Form::Unknown,
        config: None,
        stream: Some(dir.join("stream.toml")).filter(|p| path.is_dir() && p.exists()),
        candidates: Vec::new(),
        parts: BTreeMap::new(),
    };
    if path.is_dir() {
        find_generator(&mut found);
    } else {
        found.form = Form::Checkpoint;
        found.parts.insert(Part::Generator, PartFiles { source: path.to_path_buf() });
    }
    let bases = list_bases(dir, found.form);
    for (part, find) in [
        (Part::Vae, find_vae as fn(&Path) -> Option<PartFiles>),
        (Part::TinyDecoder, find_tiny_decoder),
        (Part::TextEncoder, find_text_encoder),
        (Part::Tokenizer, find_tokenizer),
    ] {
        found.parts.extend(bases.iter().find_map(|base| find(base)).map(|files| (part, files)));
    }
    Ok(found)
}

pub(super) fn list_incomplete(path: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    if path.is_dir() {
        collect_incomplete(path, INCOMPLETE_DEPTH, &mut out);
    }
    out
}

/// Determines the form of a folder, and its generator.
fn find_generator(found: &mut CheckpointFolder) {
    let dir = found.path.clone();
    let config = dir.join("config.json");
    if dir.join("model_index.json").exists() || dir.join("transformer/config.json").exists() {
        found.form = Form::DiffusersPipeline;
        let transformer = dir.join("transformer");
        found.config = Some(transformer.join("config.json")).filter(|p| p.exists());
        let source = find_usual_weights(&transformer);
        found.parts.extend(source.map(|source| (Part::Generator, PartFiles { source })));
        return;
    }
    let has_config = config.exists();
    found.config = Some(config.clone()).filter(|_| has_config);
    found.form = match (has_config, found.stream.is_some()) {
        (true, true) => Form::Tessera,
        (true, false) if is_diffusers_config(&config) => Form::DiffusersTransformer,
        (true, false) if has_wan_parts(&dir) || has_release_name(&dir) => Form::OriginalWan,
        _ => Form::Unknown,
    };
    let source = find_usual_weights(&dir).or_else(|| {
        found.candidates = list_checkpoints(&dir);
        found.candidates.first().filter(|_| found.candidates.len() == 1).cloned()
    });
    if let Some(source) = source {
        if found.form == Form::Unknown {
            found.form = Form::Checkpoint;
        }
        found.parts.insert(Part::Generator, PartFiles { source });
    } else if found.form == Form::Unknown && !found.candidates.is_empty() {
        found.form = Form::Checkpoint;
    }
}

/// Returns the file or the index of a folder's weights, if they have a usual name.
fn find_usual_weights(dir: &Path) -> Option<PathBuf> {
    let single = |stem: &str| {
        [format!("{stem}.safetensors"), format!("{stem}.safetensors.index.json")]
            .map(|name| dir.join(name))
            .into_iter()
            .find(|p| p.exists())
    };
    WEIGHT_STEMS.iter().find_map(|stem| single(stem))
}

/// Lists the files of a folder that could be a generator.
fn list_checkpoints(dir: &Path) -> Vec<PathBuf> {
    let other_parts = [&VAE_FILES[..], &TEXT_ENCODER_FILES, &tiny_decoder::FILES, &[WORDS_FILE]];
    let is_other_part = |name: &str| other_parts.iter().any(|files| files.contains(&name));
    list_files(dir)
        .into_iter()
        .filter(|p| has_extension(p, &WEIGHT_EXTENSIONS))
        .filter(|p| p.file_name().and_then(|n| n.to_str()).is_some_and(|name| !is_other_part(name)))
        .collect()
}

/// Returns whether a config has the key that only the diffusers format has.
fn is_diffusers_config(config: &Path) -> bool {
    crate::files::read_text_file(config).is_ok_and(|text| text.contains("\"attention_head_dim\""))
}

/// Returns whether a folder holds other parts of an original release.
fn has_wan_parts(dir: &Path) -> bool {
    find_vae(dir).is_some() || find_text_encoder(dir).is_some() || find_tokenizer(dir).is_some()
}

/// Returns whether the weights have the name that releases of Wan use, also where the other parts were
/// not downloaded.
fn has_release_name(dir: &Path) -> bool {
    let weights = find_usual_weights(dir);
    weights.is_some_and(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(WEIGHT_STEMS[1])))
}

/// Lists the folders in which parts are looked up, in this order.
fn list_bases(dir: &Path, form: Form) -> Vec<PathBuf> {
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).map(Path::to_path_buf);
    let parent = parent.unwrap_or_else(|| dir.join(".."));
    let mut bases = vec![dir.to_path_buf()];
    if form == Form::DiffusersTransformer {
        bases.push(parent.clone());
    }
    for place in [dir.to_path_buf(), dir.join("wan_models"), parent.clone(), parent.join("wan_models")] {
        let is_wan = |p: &PathBuf| {
            p.is_dir() && p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("Wan2.1-T2V-"))
        };
        bases.extend(list_entries(&place).into_iter().filter(is_wan));
    }
    bases
}

fn find_vae(base: &Path) -> Option<PartFiles> {
    find_one_file(base, &VAE_FILES).or_else(|| find_in_folder(&base.join("vae")))
}

fn find_tiny_decoder(base: &Path) -> Option<PartFiles> {
    find_one_file(base, &tiny_decoder::FILES)
}

fn find_text_encoder(base: &Path) -> Option<PartFiles> {
    find_one_file(base, &TEXT_ENCODER_FILES).or_else(|| find_in_folder(&base.join("text_encoder")))
}

fn find_tokenizer(base: &Path) -> Option<PartFiles> {
    TOKENIZER_FOLDERS
        .iter()
        .map(|folder| base.join(folder))
        .find(|folder| TOKENIZER_FILES.iter().any(|file| folder.join(file).exists()))
        .map(|source| PartFiles { source })
}

fn find_one_file(base: &Path, names: &[&str]) -> Option<PartFiles> {
    names.iter().map(|name| base.join(name)).find(|p| p.is_file()).map(|source| PartFiles { source })
}

fn find_in_folder(folder: &Path) -> Option<PartFiles> {
    find_usual_weights(folder).map(|source| PartFiles { source })
}

fn collect_incomplete(dir: &Path, depth: usize, out: &mut Vec<PathBuf>) {
    for path in list_entries(dir) {
        if path.is_dir() && depth > 0 && !path.is_symlink() {
            collect_incomplete(&path, depth - 1, out);
        } else if has_extension(&path, &INCOMPLETE_EXTENSIONS) {
            out.push(path);
        }
    }
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| extensions.contains(&e))
}

/// Lists the files of a folder in the order of their names.
#[must_use]
pub fn list_files(dir: &Path) -> Vec<PathBuf> {
    list_entries(dir).into_iter().filter(|p| p.is_file()).collect()
}

/// Lists the entries of a folder in the order of their names; a folder that cannot be read has none.
fn list_entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().take(MAX_ENTRIES);
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    paths
}
