//! Language models in bf16 and fp8 on CPU ranks: against transformers in f32, and the bits that the policies promise
//! over meshes.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::generate::{
    LanguagePlan, LanguageSettings, LogitDifference, PrecisionPolicy, TextModel, TokenOutput, TokenRun,
    check_parity, compare_logits, list_low_precision,
};
use tessera::{DtypePolicy, Mapping};
use tessera_plan::search::thresholds::Thresholds;
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
    let settings = LanguageSettings::new(64, 8, TokenOutput::Logits);
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
const MARGIN: f64 = 1.25;

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

/// Returns the logits of a folder for some ids, and the plan that computed them.
fn run_policy(dir: &Path, mesh: &str, policy: PrecisionPolicy, ids: &[u32]) -> (Arc<LanguagePlan>, Vec<f32>) {
    let model = TextModel::open(dir).unwrap().decoder;
    let mapping = policy.apply(&Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() });
    let settings = LanguageSettings::new(256, 64, TokenOutput::Logits);
    let plan = Arc::new(LanguagePlan::new(&model, &mapping, settings).unwrap());
    let logits = TokenRun::load(&plan, dir, 1).unwrap().compute_logits(ids).unwrap();
    (plan, logits)
}

/// Compares a policy with f32 on a mesh.
fn compare(
    dir: &Path,
    mesh: &str,
    policy: PrecisionPolicy,
    ids: &[u32],
) -> (LogitDifference, Arc<LanguagePlan>) {
    let (_, reference) = run_policy(dir, mesh, PrecisionPolicy::F32, ids);
    let (plan, found) = run_policy(dir, mesh, policy, ids);
    let vocabulary = plan.model.extents.vocab as usize;
    let difference = compare_logits(&reference, &found, vocabulary).unwrap();
    println!("{} {mesh} {}: {difference:?}", dir.file_name().unwrap().to_string_lossy(), policy.name());
    (difference, plan)
}

/// Returns the ids of the demo model's own tale.
fn read_tale(dir: &Path) -> Vec<u32> {
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("golden.json")).unwrap()).unwrap();
    let list = |key: &str| golden[key].as_array().unwrap().clone();
    let ids = list("ids").into_iter().chain(list("continuation"));
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn a_trained_model_passes_the_gate_of_every_policy() {
    let limits = Thresholds::default();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales");
    let tale = read_tale(&dir);
    for mesh in ["tp=1", "tp=2"] {
        for policy in [PrecisionPolicy::F32, PrecisionPolicy::Bf16, PrecisionPolicy::Fp8] {
            let (difference, plan) = compare(&dir, mesh, policy, &tale);
            assert_eq!(difference.positions, tale.len() as u64);
            assert_eq!(check_parity(policy, &difference, &limits), Ok(()));
            let listed = list_low_precision(&plan);
            let names: Vec<&str> = listed.keys().map(String::as_str).collect();
            match policy {
                PrecisionPolicy::Bf16 => assert_eq!(names, ["bf16"]),
                PrecisionPolicy::Fp8 => {
                    assert_eq!(names, ["bf16", "e4m3"]);
                    assert_eq!(listed["e4m3"]["model.layers.*.self_attn.q_proj.weight"], 4);
                    assert_eq!(listed["bf16"]["model.layers.*.mlp.down_proj.weight"], 4);
                    let strict =
                        Thresholds { max_fp8_mse: difference.normalised_mse * 0.99, ..limits.clone() };
                    assert_eq!(check_parity(policy, &difference, &strict).unwrap_err().code.id, "T0089");
                }
                _ => assert!(names.is_empty() && difference.mse == 0.0, "{difference:?}"),
            }
        }
    }
}

#[test]
fn tokens_in_e4m3_between_ranks_change_the_logits_and_no_matmul() {
    for family in ["mixtral", "qwen3-moe"] {
        let (ids, dir) = (read_reference(family).0, folder(family));
        let (difference, plan) = compare(&dir, "ep=2", PrecisionPolicy::Fp8Wire, &ids);
        let listed = list_low_precision(&plan);
        assert!((1e-5..5e-3).contains(&difference.normalised_mse), "{family}: {difference:?}");
        assert!(listed.keys().eq(["e4m3 on the wire"]), "{listed:?}");
    }
    for (family, mesh) in [("mixtral", "tp=2"), ("llama", "tp=2")] {
        let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        let refused = PrecisionPolicy::Fp8Wire.check(&mapping, family == "mixtral").unwrap_err();
        assert_eq!(refused.code.id, "T0088");
    }
}
