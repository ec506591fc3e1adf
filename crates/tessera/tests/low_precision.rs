//! Language models in bf16 and fp8 on CPU ranks: against transformers in f32, and the bits that the policies promise
//! over meshes.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::generate::{LanguagePlan, LanguageSettings, TextModel, TokenOutput, TokenRun};
use tessera::{DtypePolicy, Mapping};
use tessera_weights::WeightFiles;

const POLICIES: [DtypePolicy; 2] = [DtypePolicy::Bf16, DtypePolicy::Fp8];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm").join(family)
}

/// Returns a prompt of a folder, and the logits of transformers.
fn read_reference(family: &str) -> (Vec<u32>, Vec<f32>) {
    let file = folder(family).join("reference.safetensors");
    let set = WeightFiles::open_file(&file).unwrap().resolve_as_is().unwrap();
    let ids = set.read_whole_f32("prompt.1").unwrap().into_iter().map(|id| id as u32).collect();
    (ids, set.read_whole_f32("logits.1").unwrap())
}

fn compute_logits(family: &str, mesh: &str, dtype: DtypePolicy) -> Vec<f32> {
    let model = TextModel::open(&folder(family)).unwrap().decoder;
    let mapping = Mapping { mesh: mesh.parse().unwrap(), dtype, ..Mapping::default() };
    let settings =
        LanguageSettings { sequences: 1, positions: 64, prompt_rows: 8, output: TokenOutput::Logits };
    let plan = LanguagePlan::new(&model, &mapping, settings);
    let plan = plan.unwrap_or_else(|ds| panic!("{family} {mesh} {}: {ds:#?}", dtype.name()));
    let run = TokenRun::load(&Arc::new(plan), &folder(family), 1);
    let mut run = run.unwrap_or_else(|ds| panic!("{family} {mesh} {}: {ds:#?}", dtype.name()));
    run.compute_logits(&read_reference(family).0).unwrap()
}

/// Returns the root mean square of the difference, over that of the reference.
fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let far: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (far / expected.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

/// Families with the relative errors of transformers in bf16, and with the same GEMMs in e4m3 as under `fp8`. They
/// come from `tools/language/low_precision.py`.
const FAMILIES: [(&str, [f64; 2]); 7] = [
    ("llama", [2.67e-2, 1.64e-1]),
    ("qwen3", [2.59e-2, 1.68e-1]),
    ("qwen2", [1.25e-2, 8.83e-2]),
    ("mistral", [2.02e-2, 1.28e-1]),
    ("mixtral", [6.57e-2, 2.56e-1]),
    ("qwen3-moe", [4.21e-2, 1.86e-1]),
    ("deepseek-v3", [1.18e-1, 3.10e-1]),
];

/// How much farther than transformers logits may be: both errors are those of few roundings that chance decides.
const MARGIN: f64 = 1.15;

#[test]
fn logits_in_low_precision_are_as_near_to_f32_as_those_of_transformers() {
    for (family, of_transformers) in FAMILIES {
        let expected = read_reference(family).1;
        for mesh in ["tp=1", "tp=2"] {
            for (policy, theirs) in POLICIES.into_iter().zip(of_transformers) {
                let error = relative_error(&compute_logits(family, mesh, policy), &expected);
                println!("{family} {mesh} {}: {error:.2e}, transformers: {theirs:.2e}", policy.name());
                assert!(error <= MARGIN * theirs, "{family} {mesh} {}: {error:e}", policy.name());
                // Logits as near as this would not have been computed in the policy's dtypes.
                assert!(error >= theirs / 4.0, "{family} {mesh} {}: {error:e}", policy.name());
            }
        }
    }
}

// Stages add nothing over ranks, and the results of experts are added by ascending expert on every mesh. Only `tp`
// rounds partial sums.
#[test]
fn stages_and_ranks_that_share_experts_keep_the_bits_of_one_rank_in_low_precision() {
    let meshes = [
        ("llama", &["pp=2", "pp=3"][..]),
        ("mixtral", &["ep=5", "pp=2"]),
        ("qwen3-moe", &["ep=2", "ep=3", "ep=2,pp=2"]),
        ("deepseek-v3", &["ep=3", "pp=3"]),
    ];
    for (family, meshes) in meshes {
        for policy in POLICIES {
            let bits = |mesh| compute_logits(family, mesh, policy).into_iter().map(f32::to_bits);
            let alone: Vec<u32> = bits("tp=1").collect();
            for mesh in meshes {
                assert!(bits(mesh).eq(alone.iter().copied()), "{family} {mesh} {}", policy.name());
            }
        }
    }
}
