//! Writes the latents of a run to a safetensors file that grows by one chunk at a time.
//!
//! `docs/guides/outputs.md` states the layout for readers.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use tessera_base::Diagnostic;
use tessera_models::VideoModel;

use crate::files::write_error;
use crate::plan::Plan;

/// Name of the file with the latents of a run.
pub(crate) const LATENTS_FILE: &str = "latents.safetensors";
/// Name of the only tensor of the file.
pub(crate) const LATENTS_TENSOR: &str = "latents";
/// Version of the layout; any change of the tensor's dims or order raises it.
const LAYOUT_VERSION: &str = "tessera-latents-1";
/// Meaning of the dims, outermost first. A frame here is a latent frame.
const LAYOUT_DIMS: &str = "chunk frame row column patch_row patch_column channel";
/// The header is rewritten in place after each chunk, so the room for it is a multiple of a page
/// and is fixed when the file is created.
const HEADER_ROUNDING: usize = 4096;
/// Room for the digits of the counts that grow.
const COUNT_ROOM: usize = 64;

/// A safetensors file of one f32 tensor whose first dim is the number of chunks.
pub(crate) struct LatentsFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// Model, plan and layout, for the header's metadata.
    metadata: serde_json::Value,
    /// Extents of one chunk, without the dim of chunks.
    chunk_shape: [u64; 6],
    header_bytes: usize,
    chunks: u64,
}

impl LatentsFile {
    /// Creates the file without chunks; it is a valid safetensors file from here on.
    ///
    /// # Errors
    /// T0014.
    pub(crate) fn create(plan: &Plan, dir: &Path) -> Result<LatentsFile, Diagnostic> {
        let path = dir.join(LATENTS_FILE);
        let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
        let metadata = json!({
            "format": LAYOUT_VERSION,
            "dims": LAYOUT_DIMS,
            "model": plan.model,
            "plan": plan.sealed.digest_hex(),
            "fps": plan.video.stream.fps.to_string(),
        });
        let chunk_shape = chunk_shape(&plan.video);
        let mut out = LatentsFile { file, path, metadata, chunk_shape, header_bytes: 0, chunks: 0 };
        out.header_bytes = (out.header_text().len() + COUNT_ROOM + 8).next_multiple_of(HEADER_ROUNDING);
        out.write_header()?;
        Ok(out)
    }

    /// Appends the latents of one chunk, as the ranks deliver them. The header then counts the chunk,
    /// so a run that dies before leaves a file whose header covers the chunks before this one.
    ///
    /// # Errors
    /// T0014.
    pub(crate) fn append_chunk(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        let offset = self.header_bytes as u64 + self.chunks * self.chunk_bytes();
        self.file.write_all_at(bytes, offset).map_err(|e| write_error(&self.path, &e))?;
        self.chunks += 1;
        self.write_header()
    }

    fn chunk_bytes(&self) -> u64 {
        4 * self.chunk_shape.iter().product::<u64>()
    }

    fn header_text(&self) -> String {
        let shape: Vec<u64> = std::iter::once(self.chunks).chain(self.chunk_shape).collect();
        let end = self.chunks * self.chunk_bytes();
        let tensor = json!({ "dtype": "F32", "shape": shape, "data_offsets": [0, end] });
        json!({ "__metadata__": self.metadata, LATENTS_TENSOR: tensor }).to_string()
    }

    /// Writes the length of the header and the header, padded with spaces, as the format allows.
    fn write_header(&self) -> Result<(), Diagnostic> {
        let room = self.header_bytes - 8;
        let mut bytes = (room as u64).to_le_bytes().to_vec();
        bytes.extend(format!("{:room$}", self.header_text()).into_bytes());
        self.file.write_all_at(&bytes, 0).map_err(|e| write_error(&self.path, &e))
    }
}

/// Returns the extents of a chunk's latents in the order of memory: tokens lie by frame, row and
/// column, and the elements of a token by row, column and channel of its patch.
pub(crate) fn chunk_shape(video: &VideoModel) -> [u64; 6] {
    let [patch_rows, patch_columns] = video.wan.patch;
    let [_, rows, columns] = video.stream.token_grid(&video.wan);
    [video.stream.chunk_frames, rows, columns, patch_rows, patch_columns, video.wan.channels]
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;
    use tessera_plan::Mapping;

    use super::*;
    use crate::model::{Model, Overrides};

    #[test]
    fn the_file_is_valid_after_every_chunk_and_holds_the_chunks_in_order() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd");
        let (model, plan) =
            Model::open_and_plan(&fixture, &Overrides::default(), &Mapping::default()).unwrap();
        let values = (model.video.chunk_tokens() * model.video.wan.token_width()) as usize;
        let dir = tempfile::tempdir().unwrap();
        let mut file = LatentsFile::create(&plan, dir.path()).unwrap();
        let mut written = Vec::new();
        for chunk in 0..12_u16 {
            let bytes = std::fs::read(dir.path().join(LATENTS_FILE)).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            let parsed = SafeTensors::deserialize(&bytes).unwrap();
            let tensor = parsed.tensor(LATENTS_TENSOR).unwrap();
            let latents = tensor.data();
            assert!(latents == written, "after {chunk} chunks");
            let info = header.info(LATENTS_TENSOR).unwrap();
            assert_eq!(info.shape[0], usize::from(chunk));
            assert_eq!(info.shape[1..].iter().product::<usize>(), values);
            let noted = header.metadata().as_ref().unwrap();
            assert_eq!(noted["plan"], plan.sealed.digest_hex());
            let next: Vec<u8> =
                (0..values).flat_map(|i| (i as f32 + f32::from(chunk)).to_le_bytes()).collect();
            file.append_chunk(&next).unwrap();
            written.extend(next);
        }
    }
}
