//! Computes the elements of weights from a seed, so that a model runs without its files.
//!
//! An element is a pure function of (seed, tensor name, shape, index of the element), so each rank
//! computes only its own slices, and every mesh and machine gets the same bits.

use std::ops::Range;

use tessera_base::random::{DrawKey, fill_normals};

use crate::byte_runs::{self, ByteRuns};

/// Name of the definition of the values. Whoever changes a value changes the name, and with it the
/// digest of all synthetic weights.
pub(crate) const DEFINITION: &str = "tessera synthetic weights 1";

/// Standard deviation of biases, and of norm weights around 1: large enough that a forgotten one
/// changes the output.
const VECTOR_STD: f32 = 0.02;

/// Number of elements that one thread computes at a time.
const PART_ELEMENTS: usize = 1 << 20;

/// Computes the elements of one tensor.
#[derive(Debug, Clone)]
pub(crate) struct Generator {
    pub(crate) seed: u64,
    key: DrawKey,
    center: f32,
    std: f32,
}

impl Generator {
    pub(crate) fn new(seed: u64, name: &str, shape: &[u64]) -> Generator {
        let mut hash = blake3::Hasher::new();
        hash.update(DEFINITION.as_bytes()).update(&seed.to_le_bytes()).update(name.as_bytes());
        let hash = *hash.finalize().as_bytes();
        let key = hash.first_chunk::<8>().map_or(seed, |b| u64::from_le_bytes(*b));
        // Wan's decoder names its norm weights gamma, with dims of extent 1 behind the first.
        let is_vector = shape.iter().skip(1).all(|n| *n == 1);
        let is_norm = name.ends_with(".gamma") || name.contains("norm") && name.ends_with(".weight");
        let fan_in: u64 = shape.iter().skip(1).product();
        Generator {
            seed,
            key: DrawKey { seed: key, chunk: 0, draw: 0 },
            center: if is_vector && is_norm { 1.0 } else { 0.0 },
            std: if is_vector { VECTOR_STD } else { 1.0 / (fan_in.max(1) as f32).sqrt() },
        }
    }

    /// Computes a slice, row-major. `ranges` must fit `shape`.
    pub(crate) fn generate_slice(&self, shape: &[u64], ranges: &[Range<u64>]) -> Vec<f32> {
        let mut out = vec![0.0; byte_runs::element_count(ranges) as usize];
        let mut parts = Vec::new();
        let mut rest = out.as_mut_slice();
        for run in ByteRuns::new(shape, ranges, 1) {
            let (head, tail) = rest.split_at_mut(run.len());
            rest = tail;
            let firsts = (run.start as u64..).step_by(PART_ELEMENTS);
            parts.extend(firsts.zip(head.chunks_mut(PART_ELEMENTS)));
        }
        fill_parallel(parts, &|(first, part)| {
            fill_normals(self.key, first, part);
            part.iter_mut().for_each(|v| *v = self.center + self.std * *v);
        });
        out
    }
}

type Part<'a> = (u64, &'a mut [f32]);

/// Applies a function to every part on the cores of this host, with equal numbers of parts for each.
fn fill_parallel(mut parts: Vec<Part<'_>>, fill: &(dyn Fn(Part<'_>) + Sync)) {
    let elements: usize = parts.iter().map(|(_, part)| part.len()).sum();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(elements.div_ceil(PART_ELEMENTS)).max(1);
    let share = parts.len().div_ceil(threads).max(1);
    std::thread::scope(|s| {
        while parts.len() > share {
            let some = parts.split_off(parts.len() - share);
            s.spawn(move || some.into_iter().for_each(fill));
        }
        parts.into_iter().for_each(fill);
    });
}
