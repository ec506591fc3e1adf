//! Low-rank updates of weights (LoRA), added to the weights as they are read.
//!
//! An update of W [m, k] is strength · alpha / r · up [m, r] · down [r, k]. Each element is summed over r in
//! order, so its bits depend neither on the slice nor on the mesh.

use std::collections::BTreeMap;
use std::ops::Range;

/// The low-rank updates of one file, by the canonical name of the tensor that each changes.
#[derive(Debug, Clone, Default)]
pub struct Lora {
    pub(crate) updates: BTreeMap<String, LowRankUpdate>,
    /// Digest of the file's content and the strength.
    pub(crate) digest: [u8; 32],
}

/// The low-rank update of one matrix.
#[derive(Debug, Clone)]
pub(crate) struct LowRankUpdate {
    /// [r, k].
    pub(crate) down: Vec<f32>,
    /// [m, r].
    pub(crate) up: Vec<f32>,
    pub(crate) rank: usize,
    /// alpha / r times the strength.
    pub(crate) scale: f32,
}

impl Lora {
    /// Returns the number of tensors that the LoRA changes.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.updates.len()
    }

    /// Returns the digest of the file's content and the strength.
    #[must_use]
    pub(crate) fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Adds the update of a tensor to a slice of it, if the LoRA changes the tensor. `out` has the rows
    /// and columns `ranges`, row-major.
    pub(crate) fn add_to_slice(&self, name: &str, ranges: &[Range<u64>], out: &mut [f32]) {
        let (Some(update), [rows, columns]) = (self.updates.get(name), ranges) else { return };
        let k = update.down.len() / update.rank;
        let columns = columns.start as usize..columns.end as usize;
        let mut sums = vec![0.0f32; columns.len()];
        for (row, out) in (rows.start as usize..).zip(out.chunks_exact_mut(columns.len().max(1))) {
            sums.fill(0.0);
            let factors = &update.up[row * update.rank..][..update.rank];
            for (factor, down) in factors.iter().zip(update.down.chunks_exact(k)) {
                for (sum, x) in sums.iter_mut().zip(&down[columns.clone()]) {
                    *sum += factor * x;
                }
            }
            for (out, sum) in out.iter_mut().zip(&sums) {
                *out += update.scale * sum;
            }
        }
    }
}
