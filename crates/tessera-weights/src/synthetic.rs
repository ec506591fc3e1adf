//! Weights that are computed from a seed, so that a model runs without its files.
//!
//! An element is a pure function of (seed, tensor name, shape, index of the element), so each rank
//! computes only its own slices, and every mesh and machine gets the same bits.

use std::ops::Range;

use tessera_base::random::{DrawKey, fill_normals};

use crate::byte_runs::{self, ByteRuns};
use crate::dtype::FileDtype;
use crate::resolve::{ExpectedTensor, ResolvedTensors};
use crate::stored_tensor::StoredTensor;
use crate::weight_set::WeightSet;

/// Name of the definition of the values. Whoever changes a value changes the name, and with it the
/// digest of all synthetic weights.
pub(crate) const DEFINITION: &str = "tessera synthetic weights 1";

/// Standard deviation of biases, and of norm weights around 1: large enough that a forgotten one
/// changes the output.
const VECTOR_STD: f32 = 0.02;

/// Number of elements that one thread computes at a time.
const PART_ELEMENTS: usize = 1 << 20;

impl WeightSet {
    /// Returns seeded f32 values for the expected tensors, under their canonical names.
    ///
    /// A tensor of two or more dims has a standard deviation of 1/√(fan-in), with all dims but the
    /// first as the fan-in, so activations keep their magnitude. The weights of norms are close to 1,
    /// and other vectors close to 0.
    #[must_use]
    pub fn synthetic(seed: u64, expected: &[ExpectedTensor]) -> WeightSet {
        let tensors = expected.iter().map(|e| {
            let generator = Generator::new(seed, &e.name, &e.shape);
            (e.name.clone(), (FileDtype::F32, StoredTensor::generated(generator, e.shape.clone())))
        });
        WeightSet::new(tensors.collect::<ResolvedTensors>())
    }
}

/// Computes the elements of one tensor.
#[derive(Debug, Clone)]
pub(crate) struct Generator {
    pub(crate) seed: u64,
    key: DrawKey,
    center: f32,
    std: f32,
}

impl Generator {
    fn new(seed: u64, name: &str, shape: &[u64]) -> Generator {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(tensors: &[(&str, &[u64])]) -> Vec<ExpectedTensor> {
        let one = |(name, shape): &(&str, &[u64])| ExpectedTensor {
            name: (*name).into(),
            aliases: Vec::new(),
            shape: shape.to_vec(),
        };
        tensors.iter().map(one).collect()
    }

    const SOME: &[(&str, &[u64])] = &[
        ("blocks.0.ffn.0.weight", &[301, 257]),
        ("blocks.0.ffn.0.bias", &[301]),
        ("blocks.0.norm3.weight", &[301]),
        ("decoder.norm.gamma", &[301, 1, 1, 1]),
        ("conv.weight", &[13, 5, 3, 3, 3]),
    ];

    #[test]
    fn a_slice_is_its_part_of_the_whole() {
        let set = WeightSet::synthetic(7, &expected(SOME));
        let whole = set.read_whole_f32("conv.weight").unwrap();
        let part = set.read_f32("conv.weight", &[3..11, 1..4, 0..3, 1..2, 0..3]).unwrap();
        let mut at = part.iter();
        for (a, b, c, e) in
            (3..11).flat_map(|a| (1..4).flat_map(move |b| (0..9).map(move |i| (a, b, i / 3, i % 3))))
        {
            let index = (((a * 5 + b) * 3 + c) * 3 + 1) * 3 + e;
            assert_eq!(at.next().unwrap().to_bits(), whole[index].to_bits());
        }
        assert_eq!(at.next(), None);
        assert_eq!(
            set.read_f32("conv.weight", &[0..14, 0..5, 0..3, 0..3, 0..3]).unwrap_err().code.id,
            "T0507"
        );
    }

    #[test]
    fn values_keep_activations_finite() {
        let set = WeightSet::synthetic(7, &expected(SOME));
        let moments = |name: &str| {
            let values = set.read_whole_f32(name).unwrap();
            let n = values.len() as f64;
            let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
            let std = (values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n).sqrt();
            (mean, std)
        };
        for (name, mean, std) in [
            ("blocks.0.ffn.0.weight", 0.0, 1.0 / 257_f64.sqrt()),
            ("blocks.0.ffn.0.bias", 0.0, 0.02),
            ("blocks.0.norm3.weight", 1.0, 0.02),
            ("decoder.norm.gamma", 1.0, 0.02),
            ("conv.weight", 0.0, 1.0 / 135_f64.sqrt()),
        ] {
            let found = moments(name);
            assert!((found.0 - mean).abs() < 0.01, "{name}: mean {}", found.0);
            assert!((found.1 / std - 1.0).abs() < 0.1, "{name}: deviation {}, not {std}", found.1);
        }
    }

    #[test]
    fn seeds_and_names_give_other_values_and_other_digests() {
        let [a, b] = [7, 8].map(|seed| WeightSet::synthetic(seed, &expected(SOME)));
        let bias = |set: &WeightSet, name: &str| set.read_whole_f32(name).unwrap();
        assert_ne!(bias(&a, "blocks.0.ffn.0.bias"), bias(&b, "blocks.0.ffn.0.bias"));
        let centered = |v: Vec<f32>| v.iter().map(|x| x - 1.0).collect::<Vec<f32>>();
        assert_ne!(bias(&a, "decoder.norm.gamma"), bias(&a, "blocks.0.norm3.weight"));
        assert_ne!(bias(&a, "blocks.0.ffn.0.bias"), centered(bias(&a, "blocks.0.norm3.weight")));
        assert_ne!(a.content_digest(2), b.content_digest(2));
        assert_ne!(a.sample_digest(), b.sample_digest());
        assert_eq!(a.content_digest(1), WeightSet::synthetic(7, &expected(SOME)).content_digest(3));
        assert!(a.check_replaceable_by(&b).is_ok());
        let other = WeightSet::synthetic(7, &expected(&SOME[1..]));
        assert_ne!(a.content_digest(2), other.content_digest(2));
        assert_eq!(a.check_replaceable_by(&other).unwrap_err().code.id, "T0506");
    }

    /// The values are part of the definition that the digest names. They agree with a computation of
    /// the definition in double precision: 0.0026136, 0.0645987, -0.0861196.
    #[test]
    fn the_first_values_of_a_seed_never_change() {
        let set = WeightSet::synthetic(1, &expected(SOME));
        let first = set.read_f32("blocks.0.ffn.0.weight", &[0..1, 0..3]).unwrap();
        assert_eq!(
            first.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            [992_692_468, 1_032_080_468, 3_182_452_606]
        );
    }
}
