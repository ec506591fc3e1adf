//! The weights of a model's VAE.

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::Type;
use tessera_models::{VaeConfig, expected_vae_weights};
use tessera_weights::{ExpectedTensor, WeightSet};

use crate::checkpoint::{CheckpointFolder, Part};
use crate::weights_origin::WeightsBase;

/// Prefix of the names of the VAE's tensors in a program.
pub(crate) const PROGRAM_PREFIX: &str = "vae.";

/// The weights of a VAE, and the mean and standard deviation of its latents, which programs read as
/// weights.
#[derive(Debug, Clone)]
pub(crate) struct VaeWeights {
    set: WeightSet,
    config: VaeConfig,
}

impl VaeWeights {
    /// Opens the VAE of a model and compares it with what the config requires.
    ///
    /// # Errors
    /// As [`CheckpointFolder::open_part`].
    pub(crate) fn open(dir: &Path, config: &VaeConfig, base: WeightsBase) -> Result<VaeWeights, Diagnostics> {
        let expected: Vec<ExpectedTensor> = expected_vae_weights(config)
            .into_iter()
            .map(|w| {
                let original = w.name.trim_start_matches(PROGRAM_PREFIX).to_string();
                ExpectedTensor { aliases: vec![original, w.diffusers_name], name: w.name, shape: w.shape }
            })
            .collect();
        let set = match base {
            WeightsBase::Files => {
                let checkpoint = CheckpointFolder::recognise(dir).map_err(|d| vec![d])?;
                checkpoint.open_part(Part::Vae, &expected)?
            }
            WeightsBase::Synthetic(seed) => WeightSet::synthetic(seed, &expected),
        };
        Ok(VaeWeights { set, config: config.clone() })
    }

    /// Returns the digest of all weights.
    pub(crate) fn content_digest(&self, threads: usize) -> [u8; 32] {
        self.set.content_digest(threads)
    }
}

impl WeightSource for VaeWeights {
    fn read(
        &mut self,
        name: &str,
        _: &Type,
        load: Option<&str>,
        _: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        let setting = |values: &[f64]| Ok(values.iter().map(|x| *x as f32).collect());
        match name.strip_prefix(PROGRAM_PREFIX) {
            Some("latents_mean") => return setting(&self.config.latents_mean),
            Some("latents_std") => return setting(&self.config.latents_std),
            _ => {}
        }
        let raw = self.set.read_whole_f32(name)?;
        Ok(match (load, self.set.tensor_shape(name)) {
            (Some("conv"), Some([_, c, taps @ ..])) => {
                move_channels_last(&raw, *c as usize, taps.iter().product::<u64>() as usize)
            }
            _ => raw,
        })
    }

    fn check_finite(&mut self, name: &str) -> Result<(), Diagnostic> {
        match name.strip_prefix(PROGRAM_PREFIX) {
            Some("latents_mean" | "latents_std") => Ok(()),
            _ => self.set.check_finite(name),
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
