//! Checkpoints that `torch.save` wrote: their tensors beside those that PyTorch stored as
//! safetensors, what is refused, and damaged files.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use safetensors::{Dtype, tensor::TensorView};
use tessera_base::Diagnostic;
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/torch-checkpoints").join(name)
}

fn open(name: &str) -> WeightFiles {
    WeightFiles::open_file(&fixture(name)).unwrap_or_else(|d| panic!("{d:#?}"))
}

fn refuse(name: &str) -> Diagnostic {
    WeightFiles::open_file(&fixture(name)).unwrap_err()
}

fn assert_equal_values(found: &WeightSet, expected: &WeightSet) {
    assert_eq!(found.tensor_names().collect::<Vec<_>>(), expected.tensor_names().collect::<Vec<_>>());
    for name in expected.tensor_names() {
        assert_eq!(found.tensor_shape(name), expected.tensor_shape(name), "{name}");
        assert_eq!(found.read_whole_f32(name).unwrap(), expected.read_whole_f32(name).unwrap(), "{name}");
    }
}

#[test]
fn every_readable_dtype_and_view_has_the_values_that_pytorch_stored() {
    let (found, expected) = (open("dtypes.pt").resolve_as_is().unwrap(), open("dtypes.safetensors"));
    let expected = expected.resolve_as_is().unwrap();
    assert_equal_values(&found, &expected);
    assert_eq!(found.content_digest(1), expected.content_digest(2), "the digest is that of the tensors");
    let nested = open("nested.pt");
    let names: Vec<&str> = nested.iter_tensors().map(|t| t.name).collect();
    assert!(names.contains(&"list.0") && names.contains(&"integers.step"), "{names:?}");
    assert!(nested.resolve_as_is().is_err(), "an integer is no weight");
    assert_equal_values(&nested.select("state.", &[]).resolve_as_is().unwrap(), &expected);
}

#[test]
fn fp8_weights_are_multiplied_by_their_scales() {
    let expected = open("fp8.safetensors").resolve_as_is().unwrap();
    let list: Vec<ExpectedTensor> = expected
        .tensor_names()
        .map(|name| ExpectedTensor {
            name: name.into(),
            aliases: Vec::new(),
            shape: expected.tensor_shape(name).unwrap().to_vec(),
        })
        .collect();
    let found = open("fp8.pt").resolve(&list).unwrap();
    assert_equal_values(&found, &expected);
    for name in ["one.weight", "row.weight"] {
        let whole = expected.read_whole_f32(name).unwrap();
        let part = found.read_f32(name, &[1..3, 2..4]).unwrap();
        assert_eq!(part, [whole[7], whole[8], whole[12], whole[13]], "{name}");
    }
}

#[test]
fn fp8_weights_without_a_fitting_scale_are_refused() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("fp8.safetensors");
    let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let refuse = |scale: Option<(&str, Vec<f32>)>| {
        let weight = TensorView::new(Dtype::F8_E4M3, vec![3, 2], &[0x38; 6]).unwrap();
        let bytes = scale.as_ref().map(|(_, values)| floats(values)).unwrap_or_default();
        let mut views = vec![("a.weight", weight)];
        if let Some((name, values)) = &scale {
            views.push((*name, TensorView::new(Dtype::F32, vec![values.len()], &bytes).unwrap()));
        }
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        let expected = ExpectedTensor { name: "a.weight".into(), aliases: Vec::new(), shape: vec![3, 2] };
        match WeightFiles::open_file(&path).unwrap().resolve(&[expected]) {
            Ok(set) => set.read_whole_f32("a.weight").unwrap().iter().map(ToString::to_string).collect(),
            Err(ds) => ds[0].notes.join("; "),
        }
    };
    assert_eq!(refuse(Some(("a.scale_weight", vec![0.5]))), "0.50.50.50.50.50.5");
    assert_eq!(refuse(Some(("a.weight_scale", vec![1.0, 2.0, 3.0]))), "112233");
    for (scale, says) in [
        (None, "F8_E4M3 without a scale: neither a.scale_weight nor a.weight_scale exists"),
        (Some(("a.scale_weight", vec![1.0, 2.0])), "expected 1 element or 3"),
        (Some(("a.scale_weight", vec![f32::NAN])), "holds NaN"),
        (Some(("b.scale_weight", vec![1.0])), "extra: b.scale_weight"),
    ] {
        let found = refuse(scale);
        assert!(found.contains(says), "{found}");
    }
}

#[test]
fn a_prefix_and_a_wrapper_are_removed_and_a_missing_tensor_has_the_files_spelling() {
    let expected = open("self_forcing.safetensors").resolve_as_is().unwrap();
    let list = |extra: &str| {
        let own = expected.tensor_names().map(String::from).chain((!extra.is_empty()).then(|| extra.into()));
        own.map(|name| {
            let shape = expected.tensor_shape(&name).unwrap_or(&[7]).to_vec();
            ExpectedTensor { name, aliases: Vec::new(), shape }
        })
        .collect::<Vec<_>>()
    };
    let ema = || open("self_forcing.pt").select("generator_ema.", &["_fsdp_wrapped_module."]);
    assert_equal_values(&ema().resolve(&list("")).unwrap(), &expected);
    let raw = open("self_forcing.pt").select("generator.", &[]).resolve(&list("")).unwrap();
    let (half, whole) = (raw.read_whole_f32("head.modulation"), expected.read_whole_f32("head.modulation"));
    assert_eq!(half.unwrap(), whole.unwrap().iter().map(|x| x / 2.0).collect::<Vec<_>>());
    let d = ema().resolve(&list("blocks.1.modulation")).unwrap_err().remove(0);
    assert_eq!(d.notes[1], "missing: generator_ema.model.blocks.1.modulation [7]", "{d:#?}");
}

#[test]
fn code_strides_and_the_old_format_are_refused_by_name() {
    let code = refuse("code.pt");
    assert!(code.code.id == "T0510" && code.message.contains("posix.system"), "{code:#?}");
    assert!(!Path::new("executed-by-a-checkpoint").exists());
    let strided = refuse("strided.pt");
    assert!(strided.code.id == "T0512" && strided.message.starts_with("2 of 3"), "{strided:#?}");
    assert_eq!(
        strided.notes,
        [
            "generator.repeated: shape [4] with strides [0]",
            "generator.turned: shape [2, 3] with strides [1, 2]"
        ]
    );
    let legacy = refuse("legacy.pt");
    assert!(legacy.code.id == "T0511" && legacy.hint.unwrap().contains("torch.save"));
}

/// xorshift64*, so that the same bytes are changed on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[test]
fn damaged_checkpoints_are_read_or_refused_without_a_panic() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("damaged.pt");
    let mut random = Random(0x7e55_e4a0);
    let mut refused = 0;
    for name in ["dtypes.pt", "nested.pt", "fp8.pt", "strided.pt"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        for round in 0..250 {
            let mut bytes = whole.clone();
            if round % 5 == 0 {
                bytes.truncate(random.below(whole.len()));
            }
            for _ in 0..=random.below(6) {
                let at = random.below(whole.len());
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.below(256) as u8;
                }
            }
            std::fs::write(&path, &bytes).unwrap();
            match WeightFiles::open_file(&path) {
                Ok(files) => {
                    for tensor in files.iter_tensors() {
                        assert!(!tensor.dtype.is_empty());
                    }
                    if let Ok(set) = files.resolve_as_is() {
                        let _ = set.content_digest(1);
                        let names: Vec<&str> = set.tensor_names().collect();
                        assert!(names.iter().all(|n| set.read_whole_f32(n).is_ok()));
                    }
                }
                Err(d) => {
                    refused += 1;
                    assert!(d.code.id.starts_with("T05") && d.hint.is_some(), "{d:#?}");
                }
            }
        }
    }
    assert!((250..1000).contains(&refused), "{refused} of 1000 files were refused");
}

#[test]
fn every_truncation_is_refused() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("short.pt");
    let whole = std::fs::read(fixture("dtypes.pt")).unwrap();
    for cut in (5..whole.len()).step_by(37) {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let d = WeightFiles::open_file(&path).unwrap_err();
        assert!(matches!(d.code.id, "T0502" | "T0511"), "{cut}: {d:#?}");
    }
}
