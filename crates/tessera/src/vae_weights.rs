//! The weights of a model's VAE and of a tiny decoder.

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::dtype::{divide_by_row_scales, row_scales};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::Type;
use tessera_models::{
    PixelDecoder, StreamConfig, VaeConfig, WanConfig, expected_tiny_weights, expected_vae_weights,
};
use tessera_weights::{ExpectedTensor, WeightSet};

use crate::checkpoint::{CheckpointFolder, Part, tiny_decoder};
use crate::codes::T0016;
use crate::weights_origin::WeightsBase;

/// Prefix of the names of the VAE's tensors in a program.
pub(crate) const PROGRAM_PREFIX: &str = "vae.";

/// Prefix of the names of a tiny decoder's tensors in a program.
const TINY_PREFIX: &str = "vae.tiny.";

/// The scale and the shift of a tiny decoder's pixels, from 0..=1 to −1..=1.
const PIXEL_SCALE: f32 = 2.0;
const PIXEL_SHIFT: f32 = -1.0;

/// The weights that decode and encode pixels: those of a VAE, of a tiny decoder, or of both. Programs read the
/// mean and the standard deviation of the VAE's latents as weights too, and the scale of the decoder's pixels.
#[derive(Debug, Clone)]
pub(crate) struct VaeWeights {
    vae: Option<WeightSet>,
    tiny: Option<WeightSet>,
    config: VaeConfig,
}

impl VaeWeights {
    /// Opens the weights that a stream's decoder and encoder of pixels read, and compares them with what
    /// the settings require. `dir` is the model's folder or checkpoint.
    ///
    /// # Errors
    /// As [`CheckpointFolder::open_part`].
    pub(crate) fn open(
        dir: &Path,
        wan: &WanConfig,
        stream: &StreamConfig,
        base: WeightsBase,
    ) -> Result<VaeWeights, Diagnostics> {
        let open = |part: Part, expected: Vec<ExpectedTensor>| match base {
            WeightsBase::Files => {
                let checkpoint = CheckpointFolder::recognise(dir).map_err(|d| vec![d])?;
                checkpoint.with_decoder(&stream.decoder_file).open_part(part, &expected)
            }
            WeightsBase::Synthetic(seed) => Ok(WeightSet::synthetic(seed, &expected)),
        };
        let is_tiny = stream.decoder == PixelDecoder::Tiny;
        let tiny = is_tiny.then(|| open(Part::TinyDecoder, list_tiny_tensors(stream, wan))).transpose()?;
        let vae = stream.uses_vae().then(|| open(Part::Vae, list_vae_tensors(&stream.vae)));
        let vae = vae.transpose().map_err(|ds| if is_tiny { explain_encoder(ds) } else { ds })?;
        Ok(VaeWeights { vae, tiny, config: stream.vae.clone() })
    }

    /// Returns the digest of all weights.
    pub(crate) fn content_digest(&self, threads: usize) -> [u8; 32] {
        let sets = [&self.vae, &self.tiny].into_iter().flatten();
        let digests: Vec<[u8; 32]> = sets.map(|set| set.content_digest(threads)).collect();
        match digests[..] {
            [one] => one,
            _ => *blake3::hash(digests.as_flattened()).as_bytes(),
        }
    }

    /// Returns the set that holds a tensor of a program.
    fn find_set(&self, name: &str) -> Result<&WeightSet, Diagnostic> {
        let set = if name.starts_with(TINY_PREFIX) { &self.tiny } else { &self.vae };
        set.as_ref()
            .ok_or_else(|| Diagnostic::error(&T0016, format!("the decoder requires a weight `{name}`")))
    }

    /// Returns the value of a weight that is a setting, and no tensor.
    fn find_setting(&self, name: &str) -> Option<Vec<f32>> {
        let values = |values: &[f64]| values.iter().map(|x| *x as f32).collect();
        match name.strip_prefix(PROGRAM_PREFIX)? {
            "latents_mean" => Some(values(&self.config.latents_mean)),
            "latents_std" => Some(values(&self.config.latents_std)),
            "tiny.pixel_scale" => Some(vec![PIXEL_SCALE; 3]),
            "tiny.pixel_shift" => Some(vec![PIXEL_SHIFT; 3]),
            _ => None,
        }
    }
}

fn list_vae_tensors(config: &VaeConfig) -> Vec<ExpectedTensor> {
    expected_vae_weights(config)
        .into_iter()
        .map(|w| {
            let original = w.name.trim_start_matches(PROGRAM_PREFIX).to_string();
            ExpectedTensor { aliases: vec![original, w.diffusers_name], name: w.name, shape: w.shape }
        })
        .collect()
}

fn list_tiny_tensors(stream: &StreamConfig, wan: &WanConfig) -> Vec<ExpectedTensor> {
    let in_file = |name: &str| name.trim_start_matches(tiny_decoder::PREFIX).to_string();
    expected_tiny_weights(&stream.tiny, wan.channels)
        .into_iter()
        .map(|w| ExpectedTensor { aliases: vec![in_file(&w.diffusers_name)], name: w.name, shape: w.shape })
        .collect()
}

/// Adds to the diagnostics of a missing VAE why a stream with a tiny decoder reads it.
fn explain_encoder(ds: Diagnostics) -> Diagnostics {
    let explain = |d: Diagnostic| {
        d.with_note(
            "the tiny decoder has no encoder: the anchors of the recompute regime and an input video are encoded by the \
             VAE. `--cache resident` needs none",
        )
    };
    ds.into_iter().map(explain).collect()
}

impl WeightSource for VaeWeights {
    fn read(
        &mut self,
        name: &str,
        _: &Type,
        load: Option<&str>,
        _: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        if let Some(values) = self.find_setting(name) {
            return Ok(values);
        }
        let set = self.find_set(name)?;
        let raw = set.read_whole_f32(name)?;
        let cells = |taps: &[u64]| taps.iter().product::<u64>() as usize;
        let width = set.tensor_shape(name).map_or(1, |s| cells(s.get(1..).unwrap_or_default()));
        Ok(match (load, set.tensor_shape(name)) {
            (Some("conv.e4m3"), Some([_, c, taps @ ..])) => {
                let mut rows = move_channels_last(&raw, *c as usize, cells(taps));
                divide_by_row_scales(&mut rows, width);
                rows
            }
            // The order of a row's elements does not change its scale.
            (Some("conv.e4m3.scale"), Some(_)) => row_scales(&raw, width),
            (Some("conv"), Some([_, c, taps @ ..])) => move_channels_last(&raw, *c as usize, cells(taps)),
            (Some("conv.past"), Some([_, both, taps @ ..])) => {
                let c = *both as usize / 2;
                move_past_first(&move_channels_last(&raw, *both as usize, cells(taps)), c, cells(taps))
            }
            _ => raw,
        })
    }

    fn check_finite(&mut self, name: &str) -> Result<(), Diagnostic> {
        match self.find_setting(name) {
            Some(_) => Ok(()),
            None => self.find_set(name)?.check_finite(name),
        }
    }
}

/// Transposes rows of (channel, cell) to rows of (cell, channel): the weights of a convolution for values
/// with the channels last.
pub(crate) fn move_channels_last(raw: &[f32], channels: usize, cells: usize) -> Vec<f32> {
    let mut out = vec![0.0; raw.len()];
    for (from, to) in raw.chunks_exact(channels * cells).zip(out.chunks_exact_mut(channels * cells)) {
        for (cell, to) in to.chunks_exact_mut(channels).enumerate() {
            for (c, x) in to.iter_mut().enumerate() {
                *x = from[c * cells + cell];
            }
        }
    }
    out
}

/// Reorders rows of (cell, frame, channel), in which each frame is followed by the one before it, to rows of
/// (frame, cell, channel) with the frame before first.
fn move_past_first(raw: &[f32], channels: usize, cells: usize) -> Vec<f32> {
    raw.chunks_exact(2 * channels * cells)
        .flat_map(|row| {
            [channels, 0].into_iter().flat_map(move |first| {
                row.chunks_exact(2 * channels).flat_map(move |cell| &cell[first..][..channels])
            })
        })
        .copied()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_convolution_over_channels_of_two_frames_becomes_one_over_frames() {
        // One row of two channels per frame and three cells: the value is 100 · frame + 10 · channel + cell.
        let raw: Vec<f32> =
            [0, 10, 100, 110].iter().flat_map(|at| (0..3).map(move |cell| (at + cell) as f32)).collect();
        let rows = move_past_first(&move_channels_last(&raw, 4, 3), 2, 3);
        assert_eq!(rows, [100.0, 110.0, 101.0, 111.0, 102.0, 112.0, 0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
    }
}
