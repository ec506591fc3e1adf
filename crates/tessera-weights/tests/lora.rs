//! Low-rank updates in the names of several tools, and files that do not fit.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use tessera_weights::{ExpectedTensor, Lora, WeightFiles, WeightSet};

const M: usize = 6;
const K: usize = 5;
const R: usize = 2;

/// Names and shapes of the tensors of a file.
type TensorShapes<'a> = Vec<(&'a str, &'a [usize])>;

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + seed * 13) % 11) as f32 / 4.0 - 1.0).collect()
}

fn write(path: &Path, tensors: &[(&str, &[usize], Vec<f32>)]) -> PathBuf {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, v)| v.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let views: BTreeMap<&str, TensorView<'_>> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), b)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), b).unwrap()))
        .collect();
    serialize_to_file(views, None, path).unwrap();
    path.to_path_buf()
}

fn expected() -> Vec<ExpectedTensor> {
    let shape = vec![M as u64, K as u64];
    vec![
        ExpectedTensor {
            name: "blocks.0.self_attn.q.weight".into(),
            aliases: vec!["blocks.0.attn1.to_q.weight".into()],
            shape: shape.clone(),
        },
        ExpectedTensor {
            name: "blocks.0.ffn.0.weight".into(),
            aliases: vec!["blocks.0.ffn.net.0.proj.weight".into()],
            shape,
        },
    ]
}

/// Returns the weights of a model with two matrices.
fn weights(dir: &Path) -> WeightSet {
    let model = [
        ("blocks.0.self_attn.q.weight", &[M, K][..], values(M * K, 1)),
        ("blocks.0.ffn.0.weight", &[M, K], values(M * K, 2)),
    ];
    WeightFiles::open_file(&write(&dir.join("model.safetensors"), &model))
        .unwrap()
        .resolve(&expected())
        .unwrap()
}

fn with_lora(dir: &Path, lora: &Path, strength: f32) -> WeightSet {
    let mut set = weights(dir);
    let lora = Lora::open(lora, &expected(), strength).unwrap_or_else(|ds| panic!("{ds:#?}"));
    assert_eq!(lora.tensor_count(), 1);
    set.add_lora(lora);
    set
}

#[test]
fn every_naming_gives_the_sum_of_the_formula() {
    let dir = tempfile::tempdir().unwrap();
    let (down, up) = (values(R * K, 3), values(M * R, 4));
    let base = values(M * K, 1);
    let (strength, alpha) = (0.5f32, 8.0f32);
    let changed: Vec<f64> = (0..M * K)
        .map(|i| {
            let sum: f64 =
                (0..R).map(|r| f64::from(up[i / K * R + r]) * f64::from(down[r * K + i % K])).sum();
            f64::from(base[i]) + f64::from(strength) * f64::from(alpha) / R as f64 * sum
        })
        .collect();
    for (module, down_end, up_end) in [
        ("blocks.0.self_attn.q", "lora_A.weight", "lora_B.weight"),
        ("base_model.model.blocks.0.self_attn.q", "lora_A.default.weight", "lora_B.default.weight"),
        ("diffusion_model.blocks.0.self_attn.q", "lora_down.weight", "lora_up.weight"),
        ("transformer.blocks.0.attn1.to_q", "lora_A.weight", "lora_B.weight"),
        ("lora_unet_blocks_0_self_attn_q", "lora_down.weight", "lora_up.weight"),
    ] {
        let names = [format!("{module}.{down_end}"), format!("{module}.{up_end}"), format!("{module}.alpha")];
        let lora = [
            (names[0].as_str(), &[R, K][..], down.clone()),
            (names[1].as_str(), &[M, R], up.clone()),
            (names[2].as_str(), &[], vec![alpha]),
        ];
        let set = with_lora(dir.path(), &write(&dir.path().join("lora.safetensors"), &lora), strength);
        let found = set.read_whole_f32("blocks.0.self_attn.q.weight").unwrap();
        for (found, changed) in found.iter().zip(&changed) {
            assert!((f64::from(*found) - changed).abs() < 1e-5, "{module}: {found} {changed}");
        }
        assert_eq!(set.read_whole_f32("blocks.0.ffn.0.weight").unwrap(), values(M * K, 2), "{module}");
        // A rank reads its slice alone, with the bits of the whole.
        let slice = set.read_f32("blocks.0.self_attn.q.weight", &[2..5, 1..4]).unwrap();
        let of_whole: Vec<f32> = (2..5).flat_map(|r| found[r * K + 1..r * K + 4].to_vec()).collect();
        assert_eq!(slice, of_whole, "{module}");
    }
}

#[test]
fn the_digests_cover_the_lora_and_its_strength() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = |seed| {
        [
            ("blocks.0.ffn.net.0.proj.lora_A.weight", &[R, K][..], values(R * K, seed)),
            ("blocks.0.ffn.net.0.proj.lora_B.weight", &[M, R], values(M * R, 4)),
        ]
    };
    let lora = write(&dir.path().join("lora.safetensors"), &tensors(3));
    let other = write(&dir.path().join("other.safetensors"), &tensors(5));
    let sets = [
        weights(dir.path()),
        with_lora(dir.path(), &lora, 1.0),
        with_lora(dir.path(), &lora, 0.5),
        with_lora(dir.path(), &other, 1.0),
    ];
    for digests in
        [sets.each_ref().map(WeightSet::sample_digest), sets.each_ref().map(|s| s.content_digest(2))]
    {
        for (i, a) in digests.iter().enumerate() {
            assert!(digests[..i].iter().all(|b| b != a), "set {i} has the digest of another");
        }
    }
    assert_eq!(with_lora(dir.path(), &lora, 1.0).content_digest(1), sets[1].content_digest(1));
}

#[test]
fn a_lora_that_does_not_fit_is_rejected_with_each_reason() {
    let dir = tempfile::tempdir().unwrap();
    let factors = |module: &str| [format!("{module}.lora_A.weight"), format!("{module}.lora_B.weight")];
    let [down, up] = factors("blocks.0.self_attn.q");
    let [strange_down, strange_up] = factors("blocks.0.self_attn.qq");
    let [encoder, encoder_up] = factors("lora_te_text_model_q");
    let cases: Vec<(&str, TensorShapes<'_>)> = vec![
        ("[r, 5] and [6, r], not [2, 4] and [6, 2]", vec![(&down, &[R, 4]), (&up, &[M, R])]),
        ("not [2, 5] and [6, 3]", vec![(&down, &[R, K]), (&up, &[M, 3])]),
        ("not [2, 5] and absent", vec![(&down, &[R, K])]),
        ("the file has no blocks.0.self_attn.q.lora_A.weight", vec![(&up, &[M, R])]),
        ("similar: blocks.0.self_attn.q.weight", vec![(&strange_down, &[R, K]), (&strange_up, &[M, R])]),
        (
            "lora_te_text_model_q: the generator has no such matrix",
            vec![(&encoder, &[R, K]), (&encoder_up, &[M, R])],
        ),
        ("blocks.0.self_attn.q.diff: neither a factor", vec![("blocks.0.self_attn.q.diff", &[M, K])]),
        ("no low-rank factors", vec![("blocks.0.self_attn.q.alpha", &[])]),
    ];
    for (words, tensors) in cases {
        let filled: Vec<(&str, &[usize], Vec<f32>)> =
            tensors.iter().map(|(n, s)| (*n, *s, values(s.iter().product(), 3))).collect();
        let path = write(&dir.path().join("bad.safetensors"), &filled);
        let ds = Lora::open(&path, &expected(), 1.0).unwrap_err();
        assert_eq!(ds[0].code.id, "T0514");
        assert!(ds[0].notes.iter().any(|n| n.contains(words)), "{words}: {:?}", ds[0].notes);
    }
    let lora =
        [(down.as_str(), &[R, K][..], vec![f32::NAN; R * K]), (up.as_str(), &[M, R], values(M * R, 1))];
    let ds = Lora::open(&write(&dir.path().join("nan.safetensors"), &lora), &expected(), 1.0).unwrap_err();
    assert!(ds[0].notes[0].contains("not finite"), "{:?}", ds[0].notes);
}
