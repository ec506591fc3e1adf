//! Runs random language models under random plans on GPUs: the cases that also run on CPU ranks. What the backend
//! refuses of them is checked without a GPU. Without one, the other test prints the reason and passes, unless
//! `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod gpu_ranks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpu_ranks::{find_gpus, open_ranks};
use tessera_cuda::CudaBackend;
use tessera_filetests::language::{difference, evaluate, planned_cases, run_on_ranks};
use tessera_ir::{Bundle, Opcode, Program};
use tessera_mesh::Mesh;
use tessera_models::TokenOutput;

/// Cases that are drawn, and how many of them must run at least on one GPU.
const CASES: u32 = 60;
const LEAST_RUNS: usize = 20;

/// The reasons for which the backend refuses drawn programs.
const EXPECTED_REFUSALS: &[&str] =
    &["a choice of experts by groups or with a correction", "groups of tokens with slots of their own"];

/// Ops that a run must have seen, unless the backend refuses every program that has them.
const WANTED: [Opcode; 15] = [
    Opcode::TopKExperts,
    Opcode::ExpertWeights,
    Opcode::ExpertSlots,
    Opcode::ExpertCounts,
    Opcode::ExpertPack,
    Opcode::ExpertReroute,
    Opcode::GroupedMatmul,
    Opcode::ExpertCombine,
    Opcode::Rotary,
    Opcode::HeadNorm,
    Opcode::HeadColumns,
    Opcode::HeadJoin,
    Opcode::HeadMatmul,
    Opcode::PagedAttention,
    Opcode::Sample,
];

fn programs_of(bundle: &Bundle) -> impl Iterator<Item = &Program> {
    bundle.phases.iter().flat_map(|phase| &phase.programs)
}

fn opcodes_of(bundle: &Bundle) -> impl Iterator<Item = Opcode> {
    programs_of(bundle).flat_map(|p| p.ops.iter().map(|op| op.opcode))
}

/// Returns why the backend refuses a plan: the first op of each program, without the program's name.
fn refusals_of(bundle: &Bundle) -> BTreeSet<String> {
    let reason = |p: &Program| {
        let message = CudaBackend::find_unsupported(p)?.message;
        Some(message.split_once(": ").map_or(message.clone(), |(_, why)| why.to_string()))
    };
    programs_of(bundle).filter_map(reason).collect()
}

#[test]
fn the_backend_refuses_drawn_programs_for_the_expected_reasons_alone() {
    let mut refusals: BTreeMap<String, usize> = BTreeMap::new();
    let (mut seen, mut supported) = (BTreeSet::new(), 0);
    for (_, case, bundle) in planned_cases(CASES) {
        let whole = case.lower(&case.mapping_of_one_rank()).unwrap();
        supported += usize::from(refusals_of(&whole).is_empty());
        for plan in [&bundle, &whole] {
            seen.extend(opcodes_of(plan).map(Opcode::name));
            refusals_of(plan).into_iter().for_each(|why| *refusals.entry(why).or_default() += 1);
        }
    }
    println!("{supported} plans of one rank are supported; {refusals:#?}");
    assert!(supported >= LEAST_RUNS, "{supported} plans of one rank are supported");
    assert!(refusals.keys().eq(EXPECTED_REFUSALS), "{refusals:#?}");
    let missing: Vec<Opcode> = WANTED.into_iter().filter(|opcode| !seen.contains(opcode.name())).collect();
    assert!(missing.is_empty(), "no drawn program has {missing:?}");
}

#[test]
fn a_plan_computes_on_gpus_what_the_evaluator_computes() {
    let Some((found, count)) = find_gpus(1) else { return };
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| open_ranks((&found, count), mesh, programs);
    let (mut seen, mut refused_ops) = (BTreeSet::new(), BTreeSet::new());
    let mut refusals: BTreeMap<String, usize> = BTreeMap::new();
    let (mut runs_by_ranks, mut worst) = (BTreeMap::<usize, usize>::new(), 0.0_f64);
    for (index, case, bundle) in planned_cases(CASES) {
        let whole = case.lower(&case.mapping_of_one_rank()).unwrap();
        let (weights, calls) = (case.weights(u64::from(index)), case.calls(u64::from(index)));
        let expected = evaluate(&whole, &weights, &calls, case.output_name());
        let ranks = bundle.mesh.iter().count();
        let on_several = (ranks > 1 && ranks <= count as usize).then_some(&bundle);
        for plan in [Some(&whole), on_several].into_iter().flatten() {
            let why = refusals_of(plan);
            if !why.is_empty() {
                refused_ops.extend(opcodes_of(plan).map(Opcode::name));
                why.into_iter().for_each(|why| *refusals.entry(why).or_default() += 1);
                continue;
            }
            let ranks = plan.mesh.iter().count();
            let what = format!("case {index} on {ranks} GPUs, {}", case.mapping);
            let found = run_on_ranks(&open, plan, &weights, &calls, case.output_name())
                .unwrap_or_else(|fault| panic!("{what}: {fault:?}"));
            if case.output == TokenOutput::Next {
                assert_eq!(found, expected, "{what}");
            } else {
                let far = difference(&found, &expected);
                assert!(far < 5e-5, "{what}: {far:e}");
                worst = worst.max(far);
            }
            seen.extend(opcodes_of(plan).map(Opcode::name));
            *runs_by_ranks.entry(ranks).or_default() += 1;
        }
    }
    println!(
        "cases by number of GPUs: {runs_by_ranks:?}, refused: {refusals:?}, largest difference: {worst:.1e}"
    );
    let on_one = runs_by_ranks.get(&1).copied().unwrap_or(0);
    assert!(on_one >= LEAST_RUNS, "{on_one} of {CASES} cases ran on one GPU: {refusals:#?}");
    for opcode in WANTED.map(Opcode::name) {
        let is_refused = !EXPECTED_REFUSALS.is_empty() && refused_ops.contains(opcode);
        assert!(seen.contains(opcode) || is_refused, "no GPU ran {opcode}");
    }
}
