//! Compares a window with a sink with plain attention over the frames that it keeps.
//!
//! The director plans every call, and the ranks run its phases; only latents and timesteps come from the
//! fixture. The expected flows are those of diffusers, which receives the kept keys and values as a list
//! and knows no cache rows (fixtures/README.md).

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use support::{
    ScriptStep, TOLERANCE, assert_seals_under_every_policy, fixture, max_error, open_tensors, plan_mesh,
    run_script, text_step, tokens,
};
use tessera::engine::build_program_index;
use tessera::{Model, Overrides, Plan};
use tessera_device::Scalar;
use tessera_plan::{Numerics, Strategy};
use tessera_runtime::director::{ChunkRequest, DenoiseStep, Director, StepList, StreamSpec};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};
use tessera_runtime::wire::{PhaseCall, ScalarArg};
use tessera_weights::WeightSet;

const WINDOW: u64 = 12;

/// A chunk that follows others: how many, and what is particular about it.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Chunks before it.
    after: u32,
    /// Whether a new prompt takes effect with it.
    new_prompt: bool,
    /// Positions in the RoPE table.
    positions: u32,
}

const fn case(name: &'static str, after: u32) -> Case {
    Case { name, after, new_prompt: false, positions: 1024 }
}

/// Window 12 with a sink of 3: from chunk 4 on, each chunk evicts one.
const CASES: [Case; 10] = [
    case("win.c0.s0", 0),
    case("win.c1.s0", 1),
    case("win.c2.s0", 2),
    case("win.c3.s0", 3),
    case("win.c4.s0", 4),
    case("win.c5.s0", 5),
    case("win.c6.s0", 6),
    Case { positions: 21, ..case("win.rebase.s0", 7) },
    Case { new_prompt: true, ..case("win.recache.short.s0", 3) },
    Case { new_prompt: true, ..case("win.recache.s0", 7) },
];

fn model(dir: &str, sink: u64, recache: bool) -> Model {
    let mut m = Model::open(&fixture(dir), &Overrides::default()).unwrap_or_else(|d| panic!("{d:#?}"));
    let s = &mut m.video.stream;
    (s.window_frames, s.sink_frames, s.recache) = (WINDOW, sink, recache);
    assert!(s.find_contradictions("test", &m.video.wan).is_empty());
    m
}

fn stream_spec(m: &Model, positions: u32) -> StreamSpec {
    let s = &m.video.stream;
    StreamSpec {
        cache: CacheSpec {
            regime: CacheRegime::Resident,
            chunk_frames: s.chunk_frames as u32,
            window_frames: s.window_frames as u32,
            sink_frames: s.sink_frames as u32,
            table_frames: positions,
            tokens_per_frame: m.video.frame_tokens() as u32,
        },
        bias: 1.0,
        step_lists: vec![StepList::from_steps(vec![DenoiseStep { timestep: 1000.0, sigma: 1.0 }])],
    }
}

fn scalars(phase: &PhaseCall, t: Option<Vec<f32>>) -> Vec<(&'static str, Scalar)> {
    let names = ["t", "sigma", "start", "row", "shift"];
    let convert = |arg: &ScalarArg| match arg {
        ScalarArg::I64(v) => Scalar::I64(*v),
        ScalarArg::F32(v) => Scalar::F32(v.get()),
        ScalarArg::F32s(v) => Scalar::F32s(v.iter().map(|x| x.get()).collect()),
    };
    let given = names.iter().filter_map(|n| phase.scalar_arg(n).map(|arg| (*n, convert(arg))));
    given.map(|(n, v)| (n, t.clone().filter(|_| n == "t").map_or(v, Scalar::F32s))).collect()
}

/// Builds the script of a case: the calls of the chunks before it without their denoising steps, whose
/// rows the clean forward overwrites, and then the case's call up to its first step.
fn script(m: &Model, p: &Plan, set: &WeightSet, case: &Case) -> Vec<ScriptStep> {
    let index = build_program_index(&p.sealed);
    let mut director = Director::new(stream_spec(m, case.positions)).unwrap();
    let mut out = Vec::new();
    for chunk in 0..=case.after {
        let is_case = chunk == case.after;
        let prompt_change = chunk == 0 || (is_case && case.new_prompt);
        let request = ChunkRequest { prompt_change, ..ChunkRequest::default() };
        let call = director.plan_chunk(&request, &index).unwrap_or_else(|ds| panic!("{ds:#?}"));
        let phases = call.meta.unwrap().phases;
        let is_recalled = |at: usize| at > 0 && phases[at - 1].program.starts_with("recall");
        for (at, phase) in phases.iter().enumerate() {
            let run = |t| ScriptStep::Phase {
                name: phase.program.clone(),
                scalars: scalars(phase, t),
                inputs: vec![],
            };
            match phase.program.split('.').next().unwrap() {
                "text" => out.push(text_step(m, set, if chunk > 0 { "text2" } else { "text" })),
                "recall" | "rebase" => out.push(run(None)),
                "clean" if is_recalled(at) => out.push(run(None)),
                "denoise" if is_case => {
                    out.push(ScriptStep::Set("x", tokens(set, &format!("{}.x", case.name))));
                    out.push(run(Some(set.read_whole_f32(&format!("{}.t", case.name)).unwrap())));
                    out.push(ScriptStep::Emit);
                    return out;
                }
                "clean" => {
                    out.push(ScriptStep::Set("latent", tokens(set, &format!("win.c{chunk}.clean.x"))));
                    out.push(run(None));
                }
                "emit" => out.push(ScriptStep::Emit),
                "renoise" | "denoise" => {}
                other => panic!("a call of {other}"),
            }
        }
    }
    panic!("the call has no denoising step")
}

/// Returns the flow of a case: x − x0, because sigma is 1.
fn flow(m: &Model, p: &Plan, set: &WeightSet, case: &Case) -> Vec<f32> {
    let x0 = run_script(m, p, &script(m, p, set, case)).pop().unwrap();
    tokens(set, &format!("{}.x", case.name)).iter().zip(&x0).map(|(x, x0)| x - x0).collect()
}

fn flows(m: &Model, p: &Plan, set: &WeightSet) -> Vec<Vec<f32>> {
    CASES.iter().map(|case| flow(m, p, set, case)).collect()
}

fn one_rank(m: &Model) -> Plan {
    plan_mesh(m, "tp=1", Strategy::Ulysses, Numerics::Standard)
}

#[test]
fn a_sink_a_rebase_and_a_recache_equal_plain_attention_over_the_kept_frames() {
    for dir in ["wan-odd", "wan-even"] {
        let (m, set) = (model(dir, 3, true), open_tensors(&format!("{dir}/expected_window.safetensors")));
        for (case, flow) in CASES.iter().zip(flows(&m, &one_rank(&m), &set)) {
            let error = max_error(&flow, &tokens(&set, &format!("{}.flow", case.name)));
            assert!(error <= TOLERANCE, "{dir} {}: max abs error {error:e}", case.name);
        }
    }
}

/// Shows that the fixture tells a sink and a recache from their absence.
#[test]
fn without_the_sink_or_the_recache_the_flows_differ() {
    let set = open_tensors("wan-odd/expected_window.safetensors");
    // Without a sink, a recache writes the first chunk again too.
    for (sink, recache, first_case, differ) in [(0, true, 4, 6), (3, false, 8, 2)] {
        let m = model("wan-odd", sink, recache);
        let p = one_rank(&m);
        let mut found = 0;
        for (i, case) in CASES.iter().enumerate() {
            let error = max_error(&flow(&m, &p, &set, case), &tokens(&set, &format!("{}.flow", case.name)));
            let differs = error > 100.0 * TOLERANCE;
            assert_eq!(differs, i >= first_case, "sink {sink}, recache {recache}, {}: {error:e}", case.name);
            assert!(differs || error <= TOLERANCE, "{}: {error:e}", case.name);
            found += usize::from(differs);
        }
        assert_eq!(found, differ);
    }
}

#[test]
fn a_sink_and_a_recache_seal_under_every_policy() {
    assert_seals_under_every_policy(&model("wan-even", 3, true));
}

#[test]
fn a_sink_and_a_recache_have_the_same_bits_on_every_mesh() {
    for (dir, meshes) in
        [("wan-odd", &["tp=2", "tp=5", "pp=2", "tp=2,pp=2"][..]), ("wan-even", &["tp=4", "tp=3,pp=2"][..])]
    {
        let (m, set) = (model(dir, 3, true), open_tensors(&format!("{dir}/expected_window.safetensors")));
        let one = flows(&m, &one_rank(&m), &set);
        for mesh in meshes {
            let p = plan_mesh(&m, mesh, Strategy::Ulysses, Numerics::Standard);
            assert_eq!(flows(&m, &p, &set), one, "{dir} {mesh}");
        }
    }
    let (m, set) = (model("wan-even", 3, true), open_tensors("wan-even/expected_window.safetensors"));
    let plan_invariant = |mesh, strategy| plan_mesh(&m, mesh, strategy, Numerics::MeshInvariant);
    let one = flows(&m, &plan_invariant("tp=1", Strategy::Megatron), &set);
    for (mesh, strategy) in [("tp=2", Strategy::Megatron), ("tp=2", Strategy::Ulysses)] {
        assert_eq!(flows(&m, &plan_invariant(mesh, strategy), &set), one, "{mesh} {}", strategy.name());
    }
}
