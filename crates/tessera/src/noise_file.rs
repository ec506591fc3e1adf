//! Reads the noise of each chunk's first step from a file, so that a reference run can be repeated.
//!
//! `docs/guides/outputs.md` states the layouts.

use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;
use tessera_models::VideoModel;
use tessera_runtime::wire::Tensor;
use tessera_weights::{WeightFiles, WeightSet};

use crate::codes::T0027;
use crate::latents_file::chunk_shape;

/// Name of the tensor in the file, and in the envelopes of calls.
const NOISE_TENSOR: &str = "noise";

/// A safetensors file with the noise of every chunk.
pub(crate) struct NoiseFile {
    path: PathBuf,
    set: WeightSet,
    /// Extents of the stored tensor; the first is the number of chunks.
    shape: Vec<u64>,
    /// Extents of a chunk in the order in which programs read it.
    chunk_shape: [u64; 6],
    /// Rows and columns of the tensor that a call carries.
    token_shape: [u64; 2],
}

impl NoiseFile {
    /// Opens a file and compares its shape with the model.
    ///
    /// # Errors
    /// T0027, or T05 codes for a file that is no safetensors file.
    pub(crate) fn open(path: &Path, video: &VideoModel) -> Result<NoiseFile, Diagnostic> {
        let set = WeightFiles::open_file(path)?.resolve_as_is().map_err(|ds| {
            ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0027, "the file cannot be read"))
        })?;
        let token_shape = [video.chunk_tokens(), video.wan.token_width()];
        let chunk_shape = chunk_shape(video);
        let accepted: [&[u64]; 3] = [&token_shape, &planar_shape(chunk_shape), &chunk_shape];
        let refuse = |found: String| {
            let forms: Vec<String> = accepted.iter().map(|s| format!("[chunks, {}]", join(s))).collect();
            Diagnostic::error(&T0027, format!("{} does not hold the noise of this model", path.display()))
                .with_label("the file", found)
                .with_label("the model", format!("takes {}", forms.join(" or ")))
                .with_hint("write one tensor `noise` with one of these shapes")
        };
        let Some(shape) = set.tensor_shape(NOISE_TENSOR).map(<[u64]>::to_vec) else {
            return Err(refuse(format!("has no tensor `{NOISE_TENSOR}`")));
        };
        if !shape.get(1..).is_some_and(|chunk| accepted.contains(&chunk)) {
            return Err(refuse(format!("has `{NOISE_TENSOR}` of shape [{}]", join(&shape))));
        }
        Ok(NoiseFile { path: path.to_path_buf(), set, shape, chunk_shape, token_shape })
    }

    /// Checks that the file has finite noise for a number of chunks.
    ///
    /// # Errors
    /// T0027, or T0509 with the first element that is not finite.
    pub(crate) fn check(&self, chunks: u32) -> Result<(), Diagnostic> {
        if self.shape[0] < u64::from(chunks) {
            let message = format!(
                "{} has noise for {} chunks, the stream has {chunks}",
                self.path.display(),
                self.shape[0]
            );
            return Err(Diagnostic::error(&T0027, message)
                .with_hint(format!("give --chunks {}, or a longer file", self.shape[0])));
        }
        self.set.check_finite(NOISE_TENSOR)
    }

    /// Describes the file for the record.
    pub(crate) fn describe(&self) -> String {
        let digest = blake3::Hash::from(self.set.content_digest(1)).to_hex();
        format!("{}, {} chunks, digest {digest}", self.path.display(), self.shape[0])
    }

    /// Reads the noise of a chunk, as its call carries it.
    ///
    /// # Errors
    /// T0507 for a chunk that the file does not have.
    pub(crate) fn read_chunk(&self, chunk: u32) -> Result<Tensor, Diagnostic> {
        let chunk = u64::from(chunk);
        let ranges: Vec<_> =
            std::iter::once(chunk..chunk + 1).chain(self.shape[1..].iter().map(|n| 0..*n)).collect();
        let mut values = self.set.read_f32(NOISE_TENSOR, &ranges)?;
        if self.shape.len() == 5 {
            values = planes_to_tokens(&values, self.chunk_shape);
        }
        Tensor::from_f32(NOISE_TENSOR, &self.token_shape, &values)
    }
}

/// Returns [channels, frames, height, width] in latent cells.
fn planar_shape([frames, rows, columns, patch_rows, patch_columns, channels]: [u64; 6]) -> [u64; 4] {
    [channels, frames, rows * patch_rows, columns * patch_columns]
}

/// Reorders values [channels, frames, height, width] as the tokens of a chunk.
fn planes_to_tokens(values: &[f32], shape: [u64; 6]) -> Vec<f32> {
    let [frames, rows, columns, patch_rows, patch_columns, channels] = shape.map(|n| n as usize);
    let (height, width) = (rows * patch_rows, columns * patch_columns);
    let mut out = Vec::with_capacity(values.len());
    for frame in 0..frames {
        for (row, column) in (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c))) {
            for (y, x) in (0..patch_rows).flat_map(|y| (0..patch_columns).map(move |x| (y, x))) {
                let cell = (frame * height + row * patch_rows + y) * width + column * patch_columns + x;
                out.extend((0..channels).map(|c| values[c * frames * height * width + cell]));
            }
        }
    }
    out
}

fn join(shape: &[u64]) -> String {
    shape.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Model, Overrides};

    /// Writes a safetensors file with one f32 tensor.
    fn write_tensor(path: &Path, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), &bytes);
        safetensors::serialize_to_file([(name, view.unwrap())], None, path).unwrap();
    }

    fn fixture() -> VideoModel {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd");
        Model::open(&dir, &Overrides::default()).unwrap().video
    }

    #[test]
    fn planes_and_tokens_of_one_noise_are_the_same_call() {
        let (video, dir) = (fixture(), tempfile::tempdir().unwrap());
        let [f, r, c, y, x, ch] = chunk_shape(&video).map(|n| n as usize);
        let count = f * r * c * y * x * ch;
        // Each value is unique and names its place: channel, frame, row, column.
        let place = |ch: usize, f: usize, row: usize, column: usize| {
            ((ch * 8 + f) * 64 + row) as f32 * 64.0 + column as f32
        };
        let mut planes = Vec::with_capacity(count);
        let mut tokens = vec![0.0; count];
        for i in 0..count {
            let (w, h) = (c * x, r * y);
            let (column, row, frame, channel) = (i % w, i / w % h, i / w / h % f, i / w / h / f);
            planes.push(place(channel, frame, row, column));
            let token = (frame * r + row / y) * c + column / x;
            let element = ((row % y) * x + column % x) * ch + channel;
            tokens[token * (y * x * ch) + element] = planes[i];
        }
        let second = |v: &[f32]| [vec![0.0; count], v.to_vec()].concat();
        for (name, shape, values) in [
            ("planes", vec![2, ch, f, r * y, c * x], second(&planes)),
            ("tokens", vec![2, f * r * c, y * x * ch], second(&tokens)),
            ("dims", vec![2, f, r, c, y, x, ch], second(&tokens)),
        ] {
            let path = dir.path().join(name);
            write_tensor(&path, "noise", &shape, &values);
            let file = NoiseFile::open(&path, &video).unwrap();
            file.check(2).unwrap();
            assert!(file.read_chunk(1).unwrap().to_f32().unwrap() == tokens, "{name}");
            assert!(file.read_chunk(0).unwrap().to_f32().unwrap().iter().all(|v| *v == 0.0), "{name}");
            assert_eq!(file.check(3).unwrap_err().code, &T0027);
        }
    }

    #[test]
    fn noise_of_another_model_and_noise_that_is_not_finite_are_refused() {
        let (video, dir) = (fixture(), tempfile::tempdir().unwrap());
        let path = dir.path().join("noise");
        let [rows, width] = [video.chunk_tokens() as usize, video.wan.token_width() as usize];
        let open = || NoiseFile::open(&path, &video);
        write_tensor(&path, "noise", &[1, width, rows], &vec![0.0; rows * width]);
        let refused = open().err().unwrap();
        assert_eq!(refused.code, &T0027);
        assert!(refused.labels[0].message.contains(&format!("[1, {width}, {rows}]")), "{refused:?}");
        write_tensor(&path, "latents", &[1, rows, width], &vec![0.0; rows * width]);
        assert_eq!(open().err().unwrap().code, &T0027);
        let mut values = vec![0.0; rows * width];
        values[7] = f32::NAN;
        write_tensor(&path, "noise", &[1, rows, width], &values);
        assert_eq!(open().unwrap().check(1).unwrap_err().code.id, "T0509");
    }
}
