//! Weights that are computed from a seed: their slices, magnitudes and digests.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_weights::{ExpectedTensor, WeightSet};

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
    assert_eq!(set.read_f32("conv.weight", &[0..14, 0..5, 0..3, 0..3, 0..3]).unwrap_err().code.id, "T0507");
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
