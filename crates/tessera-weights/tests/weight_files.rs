//! Weight files on disk: valid ones in both naming styles, damaged ones, shards, slices and
//! fingerprints.
#![allow(clippy::single_range_in_vec_init, clippy::unwrap_used)]

use std::ops::Range;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;
use tessera_base::{Bytes, Diagnostic, DiagnosticFormat, render};
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

/// Name, dtype, shape, bytes.
type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn f32_tensor(name: &'static str, shape: &[usize], first: f32) -> Tensor {
    let n: usize = shape.iter().product();
    let data = (0..n).flat_map(|i| (first + i as f32).to_le_bytes()).collect();
    (name, Dtype::F32, shape.to_vec(), data)
}

fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(n, d, s, b)| (*n, TensorView::new(*d, s.clone(), b).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn open_folder(tensors: &[Tensor]) -> (TempDir, WeightFiles) {
    let dir = TempDir::new().unwrap();
    write(&dir.path().join("model.safetensors"), tensors);
    let files = WeightFiles::open(dir.path()).unwrap();
    (dir, files)
}

fn expected_tensor(name: &str, aliases: &[&str], shape: &[u64]) -> ExpectedTensor {
    ExpectedTensor {
        name: name.into(),
        aliases: aliases.iter().map(ToString::to_string).collect(),
        shape: shape.into(),
    }
}

fn single_error<T: std::fmt::Debug>(result: Result<T, Vec<Diagnostic>>) -> Diagnostic {
    let mut ds = result.unwrap_err();
    assert_eq!(ds.len(), 1, "{ds:?}");
    ds.remove(0)
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

#[test]
fn both_naming_styles_give_one_set() {
    let model = [
        expected_tensor("a.q", &["x.to_q"], &[2, 3]),
        expected_tensor("a.o", &["x.to_out"], &[4]),
        expected_tensor("same", &[], &[1]),
    ];
    let original =
        [f32_tensor("a.q", &[2, 3], 0.0), f32_tensor("a.o", &[4], 9.0), f32_tensor("same", &[1], 5.0)];
    let renamed = [
        f32_tensor("x.to_q", &[2, 3], 0.0),
        f32_tensor("x.to_out", &[4], 9.0),
        f32_tensor("same", &[1], 5.0),
    ];
    let wrapped = [
        f32_tensor("generator.model.a.q", &[2, 3], 0.0),
        f32_tensor("generator.model.a.o", &[4], 9.0),
        f32_tensor("generator.model.same", &[1], 5.0),
    ];
    let sets: Vec<WeightSet> =
        [&original, &renamed, &wrapped].map(|t| open_folder(t).1.resolve(&model).unwrap()).into();
    for set in &sets {
        assert_eq!(set.tensor_names().collect::<Vec<_>>(), ["a.o", "a.q", "same"]);
        assert_eq!(set.read_whole_f32("a.o").unwrap(), [9.0, 10.0, 11.0, 12.0]);
        assert_eq!(set.header_digest(), sets[0].header_digest());
        assert_eq!(set.total_bytes(), Bytes(44));
    }
    let other = open_folder(&[f32_tensor("a", &[3, 2], 0.0)]).1.resolve_as_is().unwrap();
    let turned = open_folder(&[f32_tensor("a", &[2, 3], 0.0)]).1.resolve_as_is().unwrap();
    assert_ne!(other.header_digest(), turned.header_digest());
}

#[test]
fn a_name_may_denote_different_tensors_per_style() {
    let model = [
        expected_tensor("norm2", &["norm3"], &[2]),
        expected_tensor("norm3", &["norm2"], &[2]),
        expected_tensor("q", &["to_q"], &[2]),
    ];
    let tensors =
        |q| [f32_tensor("norm2", &[2], 20.0), f32_tensor("norm3", &[2], 30.0), f32_tensor(q, &[2], 0.0)];
    let norm2 = |q| open_folder(&tensors(q)).1.resolve(&model).unwrap().read_whole_f32("norm2").unwrap();
    assert_eq!(norm2("q"), [20.0, 21.0]);
    assert_eq!(norm2("to_q"), [30.0, 31.0]);
}

#[test]
fn an_expected_prefix_is_kept() {
    let (_dir, files) = open_folder(&[f32_tensor("model.a", &[2], 0.0), f32_tensor("model.b", &[2], 0.0)]);
    let kept = files
        .resolve(&[expected_tensor("model.a", &[], &[2]), expected_tensor("model.b", &[], &[2])])
        .unwrap();
    assert_eq!(kept.tensor_names().collect::<Vec<_>>(), ["model.a", "model.b"]);
}

#[test]
fn all_problems_are_listed_at_once() {
    let (_dir, files) = open_folder(&[
        f32_tensor("good", &[2], 0.0),
        f32_tensor("bent", &[3, 2], 0.0),
        f32_tensor("blocks.0.wieght", &[4], 0.0),
        ("wide", Dtype::F64, vec![1], vec![0; 8]),
    ]);
    let d = single_error(files.resolve(&[
        expected_tensor("good", &[], &[2]),
        expected_tensor("bent", &[], &[2, 3]),
        expected_tensor("blocks.0.weight", &[], &[4]),
        expected_tensor("wide", &[], &[1]),
        expected_tensor("gone", &[], &[7]),
    ]));
    assert_eq!(d.code.id, "T0506");
    assert!(
        d.message.ends_with("2 missing, 1 extra, 1 misshapen, 1 of an unsupported dtype"),
        "{}",
        d.message
    );
    assert_eq!(
        d.notes,
        [
            "missing: blocks.0.weight [4]; the files have blocks.0.wieght [4]",
            "missing: gone [7]",
            "extra: blocks.0.wieght F32 [4]",
            "misshapen: bent: expected [2, 3], found [3, 2]",
            "unsupported dtype: wide: expected F32, F16, BF16 or F8_E4M3 with scales, found F64",
        ]
    );
    let twice = single_error(
        files.resolve(&[expected_tensor("good", &[], &[2]), expected_tensor("good", &[], &[2])]),
    );
    assert!(twice.message.contains("1 expected twice"), "{}", twice.message);
}

#[test]
fn a_long_list_shows_every_kind_first_and_keeps_all() {
    let (_dir, files) = open_folder(&[f32_tensor("extra", &[1], 0.0)]);
    let many: Vec<ExpectedTensor> =
        (0..300).map(|i| expected_tensor(&format!("blocks.{i}.w"), &[], &[1])).collect();
    let d = single_error(files.resolve(&many));
    assert_eq!(d.notes.len(), 301);
    let text = render(&d, DiagnosticFormat::Text, &|_| None);
    assert!(text.contains("extra: extra F32 [1]") && text.contains("and 261 more"), "{text}");
    assert!(render(&d, DiagnosticFormat::Json, &|_| None).contains("blocks.299.w"));
}

#[test]
fn truncated_files_report_missing_bytes() {
    let (dir, _) = open_folder(&[f32_tensor("a", &[8, 8], 0.0), f32_tensor("b", &[16], 0.0)]);
    let path = dir.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for cut in [0, 1, 7, 8, 9, 40, whole.len() - 65, whole.len() - 64, whole.len() - 1] {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let d = single_error(WeightFiles::open(dir.path()));
        assert_eq!(d.code.id, "T0502", "{cut}");
        assert!(d.labels[0].message.contains(&format!("found {cut},")), "{d:?}");
        if cut > 100 {
            assert!(d.labels[0].message.contains(&format!("expected {} bytes", whole.len())), "{d:?}");
            let both = cut < whole.len() - 64;
            let note = if both {
                "2 of 2 tensors are truncated, the first is a"
            } else {
                "1 of 2 tensors are truncated"
            };
            assert!(d.notes[0].contains(note), "{cut} {d:?}");
        }
    }
    std::fs::write(&path, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n").unwrap();
    let d = single_error(WeightFiles::open(dir.path()));
    assert!(d.code.id == "T0513" && d.hint.unwrap().contains("git lfs pull"));
    std::fs::write(&path, [&20u64.to_le_bytes()[..], b"{\"a\": {\"dtype\": oops}"].concat()).unwrap();
    let d = single_error(WeightFiles::open(dir.path()));
    assert!(d.code.id == "T0503" && d.labels[0].message.contains("column"), "{d:?}");
}

#[test]
fn folders_are_searched_in_a_fixed_order() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let first = |d: &Path| {
        WeightFiles::open(d).map(|f| f.iter_tensors().next().map(|t| t.name.to_string()).unwrap_or_default())
    };
    write(&at("text_encoder.safetensors"), &[f32_tensor("words", &[1], 0.0)]);
    let d = single_error(first(dir.path()));
    assert!(d.code.id == "T0501" && d.labels[0].message.contains("found 0 files"), "{d:?}");
    write(&at("odd.safetensors"), &[f32_tensor("odd", &[1], 0.0)]);
    assert_eq!(first(dir.path()).unwrap(), "odd");
    write(&at("odder.safetensors"), &[f32_tensor("odder", &[1], 0.0)]);
    let d = single_error(first(dir.path()));
    assert_eq!((d.code.id, d.notes.len()), ("T0501", 2));
    assert_eq!(first(&at("odder.safetensors")).unwrap(), "odder");
    write(&at("diffusion_pytorch_model.safetensors"), &[f32_tensor("diffusers", &[1], 0.0)]);
    assert_eq!(first(dir.path()).unwrap(), "diffusers");
    write(&at("model.safetensors"), &[f32_tensor("model", &[1], 0.0)]);
    assert_eq!(first(dir.path()).unwrap(), "model");
    assert_eq!(single_error(first(&at("nowhere"))).code.id, "T0508");
    std::fs::remove_file(at("model.safetensors")).unwrap();
    std::fs::create_dir(at("model.safetensors")).unwrap();
    assert_eq!(single_error(first(dir.path())).code.id, "T0508");
}

#[test]
fn shards_follow_their_index() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let index = |map: &str| {
        let text = format!(r#"{{"metadata":{{"total_size":1}},"weight_map":{map}}}"#);
        std::fs::write(at("diffusion_pytorch_model.safetensors.index.json"), text).unwrap();
    };
    write(&at("m-1.safetensors"), &[f32_tensor("a", &[2], 1.0)]);
    write(&at("m-2.safetensors"), &[f32_tensor("b", &[2], 3.0), f32_tensor("c", &[2], 5.0)]);
    index(r#"{"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-2.safetensors"}"#);
    let files = WeightFiles::open(dir.path()).unwrap();
    assert_eq!(files.total_bytes(), Bytes(24));
    let set = files
        .resolve(&[
            expected_tensor("a", &[], &[2]),
            expected_tensor("b", &[], &[2]),
            expected_tensor("c", &[], &[2]),
        ])
        .unwrap();
    assert_eq!(set.read_whole_f32("c").unwrap(), [5.0, 6.0]);
    let merged =
        open_folder(&[f32_tensor("a", &[2], 1.0), f32_tensor("b", &[2], 3.0), f32_tensor("c", &[2], 5.0)]).1;
    assert_eq!(set.header_digest(), merged.resolve_as_is().unwrap().header_digest());

    index(r#"{"a":"m-2.safetensors","b":"m-2.safetensors","d":"m-1.safetensors"}"#);
    let d = single_error(WeightFiles::open(dir.path()));
    assert_eq!(d.code.id, "T0505");
    assert_eq!(
        d.notes,
        [
            "d: the index assigns it to m-1.safetensors, which does not contain it",
            "a: in m-1.safetensors, but the index assigns it to m-2.safetensors",
            "a: the index assigns it to m-2.safetensors, which does not contain it",
            "c: in m-2.safetensors, but not in the index",
        ]
    );

    index(r#"{"a":"m-1.safetensors","x":"m-3.safetensors","y":"m-4.safetensors"}"#);
    std::fs::write(at("m-1.safetensors"), b"cut").unwrap();
    let ds = WeightFiles::open(dir.path()).unwrap_err();
    assert_eq!(ds.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0501", "T0502"]);
    assert_eq!(ds[0].notes, ["missing: m-3.safetensors (1 tensors)", "missing: m-4.safetensors (1 tensors)"]);

    for map in
        [r#"{"a":"../m-1.safetensors"}"#, r#"{"a":""}"#, r#"{"a":"/etc/passwd"}"#, r#"{"a":".."}"#, "[]"]
    {
        index(map);
        assert_eq!(single_error(WeightFiles::open(dir.path())).code.id, "T0505", "{map}");
    }
}

#[test]
fn slices_equal_the_full_read() {
    let (_dir, files) = open_folder(&[
        f32_tensor("r0", &[], 7.0),
        f32_tensor("r1", &[7], 0.0),
        f32_tensor("r2", &[5, 7], 0.0),
        f32_tensor("r3", &[3, 5, 7], 0.0),
        f32_tensor("r4", &[2, 3, 5, 3], 0.0),
    ]);
    let set = files.resolve_as_is().unwrap();
    assert_eq!(set.read_f32("r0", &[]).unwrap(), [7.0]);
    let mut slices = 0;
    for name in ["r1", "r2", "r3", "r4"] {
        let shape = set.tensor_shape(name).unwrap();
        let whole = set.read_whole_f32(name).unwrap();
        for ranges in all_ranges(shape) {
            let expected = naive_slice(&whole, shape, &ranges);
            assert_eq!(set.read_f32(name, &ranges).unwrap(), expected, "{name} {ranges:?}");
            slices += 1;
        }
    }
    assert!(slices > 10_000, "{slices}");
    for (name, ranges) in [("r9", vec![]), ("r1", vec![]), ("r1", vec![0..8]), ("r2", vec![0..5, 8..8])] {
        assert_eq!(set.read_f32(name, &ranges).unwrap_err().code.id, "T0507");
    }
}

/// Returns every combination of ranges, including empty ones.
fn all_ranges(shape: &[u64]) -> Vec<Vec<Range<u64>>> {
    shape.iter().fold(vec![vec![]], |all, n| {
        let of_dim: Vec<Range<u64>> = (0..=*n).flat_map(|a| (a..=*n).map(move |b| a..b)).collect();
        all.iter()
            .flat_map(|head| of_dim.iter().map(move |r| [head.as_slice(), std::slice::from_ref(r)].concat()))
            .collect()
    })
}

/// Keeps the elements whose every coordinate lies in its range.
fn naive_slice(whole: &[f32], shape: &[u64], ranges: &[Range<u64>]) -> Vec<f32> {
    let inside = |index: usize| {
        let mut rest = index as u64;
        shape.iter().zip(ranges).rev().all(|(n, r)| {
            let at = rest % n;
            rest /= n;
            r.contains(&at)
        })
    };
    whole.iter().enumerate().filter(|(i, _)| inside(*i)).map(|(_, x)| *x).collect()
}

#[test]
fn halves_become_f32_exactly() {
    let bf16: Vec<u8> = [0x3f80u16, 0xc000, 0x7f80, 0x0001].iter().flat_map(|b| b.to_le_bytes()).collect();
    let f16: Vec<u8> = [0x3c00u16, 0xc000, 0x7c00, 0x0001].iter().flat_map(|b| b.to_le_bytes()).collect();
    let (_dir, files) =
        open_folder(&[("b", Dtype::BF16, vec![2, 2], bf16), ("h", Dtype::F16, vec![2, 2], f16)]);
    let set = files.resolve_as_is().unwrap();
    assert_eq!(set.read_whole_f32("b").unwrap(), [1.0, -2.0, f32::INFINITY, f32::from_bits(0x0001_0000)]);
    assert_eq!(set.read_whole_f32("h").unwrap(), [1.0, -2.0, f32::INFINITY, 2f32.powi(-24)]);
    assert_eq!(set.read_f32("h", &[0..2, 1..2]).unwrap(), [-2.0, 2f32.powi(-24)]);
}

#[test]
fn the_fixture_contains_one_model_in_two_styles() {
    let names = [
        expected_tensor("blocks.0.self_attn.q.weight", &["blocks.0.attn1.to_q.weight"], &[60, 60]),
        expected_tensor("blocks.1.norm3.bias", &["blocks.1.norm2.bias"], &[60]),
    ];
    let read = |path: &str| {
        let files = WeightFiles::open(&fixture(path)).unwrap();
        // This test ignores the fixture's other tensors.
        let extras = files
            .iter_tensors()
            .filter(|t| !names.iter().any(|e| e.name == t.name || e.aliases[0] == t.name));
        let all: Vec<ExpectedTensor> =
            extras.map(|t| expected_tensor(t.name, &[], t.shape)).chain(names.iter().cloned()).collect();
        files.resolve(&all).unwrap()
    };
    let (original, renamed) = (read("wan-odd"), read("wan-odd/diffusers"));
    for e in &names {
        assert_eq!(original.read_whole_f32(&e.name).unwrap(), renamed.read_whole_f32(&e.name).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Opening any file yields either tensors that can all be read, or a diagnostic.
    #[test]
    fn any_file_is_read_or_refused(
        noise in prop::collection::vec(any::<u8>(), 0..120),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        valid: bool,
    ) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("model.safetensors");
        let mut bytes = noise;
        if valid {
            write(&path, &[f32_tensor("a", &[3, 4], 0.0), ("h", Dtype::F16, vec![5], vec![1; 10])]);
            bytes = std::fs::read(&path).unwrap();
            for (at, byte) in edits {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(set) = WeightFiles::open(dir.path()).and_then(|f| f.resolve_as_is()) {
            for name in set.tensor_names() {
                let n: u64 = set.tensor_shape(name).unwrap().iter().product();
                prop_assert_eq!(set.read_whole_f32(name).unwrap().len() as u64, n);
            }
        }
    }
}

#[test]
fn sample_digests_distinguish_checkpoints() {
    let of = |first: f32| {
        open_folder(&[f32_tensor("a", &[300, 20], first), f32_tensor("b", &[3], first)])
            .1
            .resolve_as_is()
            .unwrap()
    };
    let (one, same, other) = (of(0.0), of(0.0), of(1.0));
    assert_eq!(one.header_digest(), other.header_digest());
    assert_eq!(one.sample_digest(), same.sample_digest());
    assert_ne!(one.sample_digest(), other.sample_digest());
}

#[test]
fn a_content_digest_covers_every_byte_on_any_number_of_threads() {
    let rows = 300_007;
    let of = |middle: f32| {
        let mut tensors = [f32_tensor("a", &[rows, 3], 0.0), f32_tensor("b", &[3], 1.0)];
        tensors[0].3[rows * 6..][..4].copy_from_slice(&middle.to_le_bytes());
        open_folder(&tensors).1.resolve_as_is().unwrap()
    };
    let (one, other) = (of(0.5), of(0.25));
    assert_eq!(one.sample_digest(), other.sample_digest(), "the middle of a tensor is not sampled");
    assert_ne!(one.content_digest(1), other.content_digest(1));
    for threads in [0, 2, 3, 100] {
        assert_eq!(one.content_digest(threads), one.content_digest(1), "{threads} threads");
    }
}

#[test]
fn an_element_that_is_not_finite_is_named_with_its_file_and_index() {
    for (dtype, width, bad) in [
        (Dtype::F32, 4, vec![0, 0, 0x80, 0xff]),
        (Dtype::F16, 2, vec![0, 0x7c]),
        (Dtype::BF16, 2, vec![0xc0, 0x7f]),
    ] {
        let mut data = vec![0; 70 * 90 * width];
        let set = |data: &[u8]| open_folder(&[("a", dtype, vec![70, 90], data.to_vec())]);
        set(&data).1.resolve_as_is().unwrap().check_finite("a").unwrap();
        data[(67 * 90 + 5) * width..][..width].copy_from_slice(&bad);
        let (dir, files) = set(&data);
        let d = files.resolve_as_is().unwrap().check_finite("a").unwrap_err();
        assert!(d.code.id == "T0509" && d.message.contains("`a`") && d.message.ends_with("[67, 5]"), "{d:?}");
        assert!(d.labels[0].location.starts_with(&dir.path().display().to_string()), "{d:?}");
    }
    let (_dir, files) = open_folder(&[f32_tensor("a", &[3], 0.0)]);
    assert_eq!(files.resolve_as_is().unwrap().check_finite("b").unwrap_err().code.id, "T0507");
}

#[test]
fn only_weights_with_equal_names_dtypes_and_shapes_are_replaceable() {
    let set = |tensors: &[Tensor]| open_folder(tensors).1.resolve_as_is().unwrap();
    let old = set(&[f32_tensor("a", &[2, 3], 0.0), f32_tensor("b", &[4], 0.0)]);
    assert!(
        old.check_replaceable_by(&set(&[f32_tensor("a", &[2, 3], 7.0), f32_tensor("b", &[4], 8.0)])).is_ok()
    );
    let half = ("b", Dtype::BF16, vec![4], vec![0; 8]);
    let d = old
        .check_replaceable_by(&set(&[f32_tensor("a", &[3, 2], 0.0), half, f32_tensor("c", &[1], 0.0)]))
        .unwrap_err();
    assert_eq!(d.code.id, "T0506");
    assert_eq!(
        d.notes,
        [
            "a: F32[2, 3] in use, F32[3, 2] in the new weights",
            "b: F32[4] in use, BF16[4] in the new weights",
            "c: missing in use, F32[1] in the new weights"
        ]
    );
}

#[test]
fn a_slice_that_passes_the_check_can_be_read() {
    let (_dir, files) = open_folder(&[f32_tensor("a", &[2, 3], 0.0)]);
    let set = files.resolve_as_is().unwrap();
    for rows in 0..3 {
        for end in 0..5 {
            let ranges = [0..rows, 1..end];
            assert_eq!(set.check("a", &ranges).is_ok(), set.read_f32("a", &ranges).is_ok(), "{ranges:?}");
        }
    }
    assert_eq!(set.check("b", &[0..1]).unwrap_err().code.id, "T0507");
}
