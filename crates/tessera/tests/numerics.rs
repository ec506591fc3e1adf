//! Tests what the CPU ranks compute, against an external reference and against each other.
//!
//! The expected flows of the fixtures come from PyTorch (fixtures/README.md). Ranks are threads
//! here; the programs, arenas and kernels are those of a run.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use support::cases::{clean_pass, denoise, run_cases};
use support::{
    ScriptStep, TOLERANCE, fixture, max_error, open_tensors, plan_mesh, run_script, text_step, tokens,
};
use tessera::{Model, Overrides, Plan};
use tessera_device::Scalar;
use tessera_plan::{Numerics, Strategy};
use tessera_weights::WeightSet;

fn model(dir: &str, recompute: bool) -> Model {
    let overrides = Overrides { recompute: Some(recompute), ..Overrides::default() };
    let mut m = Model::open(&fixture(dir), &overrides).unwrap_or_else(|d| panic!("{d:#?}"));
    if recompute {
        m.video.stream.bias = 0.3;
    }
    m
}

fn expected(dir: &str) -> WeightSet {
    let name = dir.split('/').next().unwrap();
    open_tensors(&format!("{name}/expected.safetensors"))
}

fn flows(m: &Model, set: &WeightSet, recompute: bool, p: &Plan) -> Vec<(String, Vec<f32>)> {
    run_cases(m, set, recompute, p, text_step(m, set, "full.text"))
}

#[test]
fn one_rank_matches_the_reference_in_both_regimes() {
    for dir in ["wan-odd", "wan-even"] {
        for recompute in [false, true] {
            let (m, set) = (model(dir, recompute), expected(dir));
            let p = plan_mesh(&m, "tp=1", Strategy::Ulysses, Numerics::Standard);
            let found = flows(&m, &set, recompute, &p);
            assert!(found.len() >= 6, "{dir} {recompute}: {} cases", found.len());
            for (name, flow) in found {
                let error = max_error(&flow, &tokens(&set, &format!("{name}.flow")));
                assert!(error <= TOLERANCE, "{dir} {name}: max abs error {error:e}");
            }
        }
    }
}

#[test]
fn the_diffusers_spelling_is_the_same_model() {
    let (a, set) = (model("wan-odd", false), expected("wan-odd"));
    let mut b = a.clone();
    b.dir = fixture("wan-odd/diffusers");
    let p = plan_mesh(&a, "tp=1", Strategy::Ulysses, Numerics::Standard);
    assert_eq!(flows(&a, &set, false, &p), flows(&b, &set, false, &p));
}

// proves: V-08
#[test]
fn ulysses_and_stages_are_bit_identical_to_one_rank() {
    for (dir, meshes) in [
        ("wan-odd", &["tp=2", "tp=4", "tp=5", "pp=2", "tp=2,pp=2"][..]),
        ("wan-even", &["tp=2", "tp=4", "pp=2", "pp=3", "tp=3,pp=2"][..]),
    ] {
        for recompute in [false, true] {
            let (m, set) = (model(dir, recompute), expected(dir));
            let one =
                flows(&m, &set, recompute, &plan_mesh(&m, "tp=1", Strategy::Ulysses, Numerics::Standard));
            for mesh in meshes {
                let p = plan_mesh(&m, mesh, Strategy::Ulysses, Numerics::Standard);
                assert_eq!(flows(&m, &set, recompute, &p), one, "{dir} {mesh}");
            }
        }
    }
}

#[test]
fn megatron_agrees_within_rounding() {
    for (dir, meshes) in
        [("wan-odd", &["tp=2", "tp=4", "tp=2,pp=2"][..]), ("wan-even", &["tp=2", "tp=4"][..])]
    {
        let (m, set) = (model(dir, false), expected(dir));
        let one = flows(&m, &set, false, &plan_mesh(&m, "tp=1", Strategy::Megatron, Numerics::Standard));
        for mesh in meshes {
            let p = plan_mesh(&m, mesh, Strategy::Megatron, Numerics::Standard);
            for ((name, a), (_, b)) in flows(&m, &set, false, &p).iter().zip(&one) {
                let scale = b.iter().map(|x| x * x).sum::<f32>().sqrt();
                let error = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum::<f32>().sqrt() / scale;
                assert!(error <= 1e-5, "{dir} {mesh} {name}: relative error {error:e}");
            }
        }
    }
}

#[test]
fn mesh_invariant_numerics_do_not_depend_on_the_mesh() {
    for recompute in [false, true] {
        let (m, set) = (model("wan-even", recompute), expected("wan-even"));
        let one =
            flows(&m, &set, recompute, &plan_mesh(&m, "tp=1", Strategy::Megatron, Numerics::MeshInvariant));
        for (mesh, strategy) in [
            ("tp=2", Strategy::Megatron),
            ("tp=4", Strategy::Megatron),
            ("tp=8", Strategy::Megatron),
            ("tp=2", Strategy::Ulysses),
            ("tp=2,pp=2", Strategy::Megatron),
        ] {
            let p = plan_mesh(&m, mesh, strategy, Numerics::MeshInvariant);
            assert_eq!(flows(&m, &set, recompute, &p), one, "{mesh} {}", strategy.name());
        }
    }
}

#[test]
fn a_rebase_moves_positions_and_not_the_picture() {
    let (m, set) = (model("wan-odd", false), expected("wan-odd"));
    let p = plan_mesh(&m, "tp=1", Strategy::Ulysses, Numerics::Standard);
    let script = |rebase: bool| {
        let mut s = vec![text_step(&m, &set, "full.text")];
        s.extend(clean_pass(&m, &set, "res.c0", 0, 900, 0));
        let start = if rebase {
            s.push(ScriptStep::Phase {
                name: "rebase".into(),
                scalars: vec![("shift", Scalar::I64(-900))],
                inputs: vec![],
            });
            3
        } else {
            903
        };
        s.extend(denoise(&m, &set, "res.c1.s0", 3, start, 3, None));
        s
    };
    let error = max_error(&run_script(&m, &p, &script(true))[0], &run_script(&m, &p, &script(false))[0]);
    assert!(error <= TOLERANCE, "{error:e}");
}
