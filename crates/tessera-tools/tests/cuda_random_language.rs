//! Runs random language models under random plans on GPUs: the cases that also run on CPU ranks. What the backend
//! refuses of them is checked without a GPU. Without one, the other test prints the reason and passes, unless
//! `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod gpu_ranks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gpu_ranks::{Link, find_gpus, open_ranks};
use tessera_cuda::CudaBackend;
use tessera_filetests::language::{
    Case, DRAWN_OPS, evaluate, measure_difference, planned_cases, run_on_ranks,
};
use tessera_ir::{Bundle, Opcode, Program};
use tessera_mesh::Mesh;
use tessera_models::TokenOutput;

/// Cases that are drawn; the mapping of two thirds of them fits its model.
const CASES: u32 = 60;

/// Returns the plan of a case whose experts two ranks share, as its keys say; `None` without experts, or where two ranks do
/// not divide the token groups. Most drawn meshes with an exchange of tokens have more ranks.
fn plan_experts_on_two_ranks(case: &Case) -> Option<Bundle> {
    let axis = if case.experts.contains("axis = \"tp\"") { "tp" } else { "ep" };
    let mapping = format!("[mesh]\n{axis} = 2\n{}", case.experts);
    if case.experts.is_empty() { None } else { case.lower(&mapping).ok() }
}

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
fn the_backend_refuses_no_drawn_program() {
    let (mut refusals, mut seen, mut exchanges) = (BTreeMap::<String, usize>::new(), BTreeSet::new(), 0);
    for (_, case, bundle) in planned_cases(CASES) {
        let whole = case.lower(&case.mapping_of_one_rank()).unwrap();
        let on_two = plan_experts_on_two_ranks(&case);
        exchanges += usize::from(
            on_two.as_ref().is_some_and(|plan| opcodes_of(plan).any(|opcode| opcode == Opcode::AllToAll)),
        );
        for plan in [Some(&bundle), Some(&whole), on_two.as_ref()].into_iter().flatten() {
            seen.extend(opcodes_of(plan).map(Opcode::name));
            refusals_of(plan).into_iter().for_each(|why| *refusals.entry(why).or_default() += 1);
        }
    }
    assert!(refusals.is_empty(), "{refusals:#?}");
    assert!(exchanges >= 4, "{exchanges} plans of two ranks exchange tokens");
    let missing: Vec<Opcode> = DRAWN_OPS.into_iter().filter(|opcode| !seen.contains(opcode.name())).collect();
    assert!(missing.is_empty(), "no drawn program has {missing:?}");
}

#[test]
fn a_plan_computes_on_gpus_what_the_evaluator_computes() {
    let Some((found, count)) = find_gpus(1) else { return };
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| {
        open_ranks((&found, count), Link::PeerMemory, mesh, programs)
    };
    let mut seen = BTreeSet::new();
    let (mut runs_by_ranks, mut worst) = (BTreeMap::<usize, usize>::new(), 0.0_f64);
    for (index, case, bundle) in planned_cases(CASES) {
        let whole = case.lower(&case.mapping_of_one_rank()).unwrap();
        let (weights, calls) = (case.weights(u64::from(index)), case.calls(u64::from(index)));
        let expected = evaluate(&whole, &weights, &calls, case.output_name());
        let ranks = bundle.mesh.iter().count();
        let fits = |ranks: usize| ranks > 1 && ranks <= count as usize;
        let on_several = fits(ranks).then_some(&bundle);
        let on_two = plan_experts_on_two_ranks(&case).filter(|_| fits(2));
        for plan in [Some(&whole), on_several, on_two.as_ref()].into_iter().flatten() {
            let ranks = plan.mesh.iter().count();
            let what = format!("case {index} on {ranks} GPUs, {}", case.mapping);
            let found = run_on_ranks(&open, plan, &weights, &calls, case.output_name())
                .unwrap_or_else(|fault| panic!("{what}: {fault:?}"));
            if case.output == TokenOutput::Next {
                assert_eq!(found, expected, "{what}");
            } else {
                let far = measure_difference(&found, &expected);
                assert!(far < 5e-5, "{what}: {far:e}");
                worst = worst.max(far);
            }
            seen.extend(opcodes_of(plan).map(Opcode::name));
            *runs_by_ranks.entry(ranks).or_default() += 1;
        }
    }
    if count >= 2 {
        let on_two = runs_by_ranks.get(&2).copied().unwrap_or(0);
        assert!(on_two >= 16, "{runs_by_ranks:?}");
        for opcode in
            [Opcode::AllReduce, Opcode::AllGather, Opcode::AllToAll, Opcode::ReduceScatter, Opcode::Send]
        {
            assert!(seen.contains(opcode.name()), "no pair of GPUs ran {}", opcode.name());
        }
    }
    println!("cases by number of GPUs: {runs_by_ranks:?}, largest difference: {worst:.1e}");
    for opcode in DRAWN_OPS.map(Opcode::name) {
        assert!(seen.contains(opcode), "no GPU ran {opcode}");
    }
}
