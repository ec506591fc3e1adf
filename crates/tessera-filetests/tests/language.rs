//! Random language models under random plans: experts, all-to-all, paged attention, rotary positions, latent heads
//! and the choice of ids. Each runs through the verifier, the simulation of the oracle, the reference evaluator and CPU ranks.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod common;
#[path = "../../tessera-oracle/src/verifier.rs"]
mod verifier;

use std::collections::{BTreeMap, BTreeSet};

use common::open_cpu_backends;
use tessera_base::random::Rng;
use tessera_device::Fault;
use tessera_filetests::language::{
    Case, DRAWN_OPS, FAMILIES, Results, SEED, TokenCall, evaluate, measure_difference, planned_cases,
    programs_of_ranks, run_on_ranks,
};
use tessera_ir::{Attr, Bundle, Opcode, Program};
use tessera_mesh::Rank;
use tessera_models::TokenOutput;
use tessera_oracle::{ExecutionOutcome, Rewrite, apply_rewrite, compare_set};
use tessera_reference::Tensor;
use tessera_verify::{DeviceLimits, seal};

/// Runs the calls of a plan on CPU ranks and returns their output of this name.
fn run_on_cpus(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    calls: &[TokenCall],
    output: &str,
) -> Result<Results, Fault> {
    run_on_ranks(&open_cpu_backends, bundle, weights, calls, output)
}

#[test]
fn a_plan_computes_on_the_evaluator_and_on_cpu_ranks_what_one_rank_computes() {
    let (mut seen, mut worst) = (BTreeSet::new(), 0.0_f64);
    for (index, case, bundle) in planned_cases(60) {
        seal(bundle.clone(), &DeviceLimits::default()).unwrap_or_else(|ds| panic!("case {index}: {ds:#?}"));
        let (weights, calls) = (case.weights(u64::from(index)), case.calls(u64::from(index)));
        let whole = case.lower(&case.mapping_of_one_rank()).unwrap();
        let expected = evaluate(&whole, &weights, &calls, case.output_name());
        let parts = evaluate(&bundle, &weights, &calls, case.output_name());
        let found = run_on_cpus(&bundle, &weights, &calls, case.output_name())
            .unwrap_or_else(|f| panic!("case {index}: {f:?}"));
        let what = format!("case {index}, {}", case.mapping);
        if case.output == TokenOutput::Next {
            assert_eq!(parts, expected, "{what}");
            assert_eq!(found, expected, "{what}");
        } else {
            let (far, cpu) = (measure_difference(&parts, &expected), measure_difference(&found, &expected));
            assert!(far < 1e-11, "{what}: {far:e} between meshes");
            assert!(cpu < 2e-5, "{what}: {cpu:e} on CPU ranks");
            worst = worst.max(cpu);
        }
        let programs = bundle.phases.iter().flat_map(|phase| &phase.programs);
        seen.extend(programs.flat_map(|p| p.ops.iter().map(|o| o.opcode.name())));
    }
    println!("largest difference on CPU ranks: {worst:.1e}");
    for opcode in DRAWN_OPS.into_iter().chain([Opcode::AllToAll, Opcode::Send]) {
        assert!(seen.contains(opcode.name()), "no program has {}", opcode.name());
    }
}

#[test]
fn a_capacity_drops_choices_and_rerouting_changes_which() {
    let (mut dropped, mut moved) = (0, 0);
    for (index, case, _) in planned_cases(90).iter().filter(|(_, case, _)| !case.experts.is_empty()) {
        let (weights, calls) = (case.weights(u64::from(*index)), case.calls(u64::from(*index)));
        let run = |without: &[&str]| {
            let kept = case.experts.lines().filter(|line| !without.iter().any(|key| line.starts_with(key)));
            let whole = case.lower(&kept.collect::<Vec<_>>().join("\n")).unwrap();
            evaluate(&whole, &weights, &calls, case.output_name())
        };
        let stated = run(&[]);
        moved += usize::from(stated != run(&["reroute"]));
        dropped += usize::from(stated != run(&["reroute", "capacity"]));
    }
    assert!(moved >= 3 && dropped >= 6, "{moved} cases move choices, {dropped} drop some");
}

/// Returns the programs of all ranks in each phase, each with a role of its own, as the comparison expects them. The
/// name of a role states the coordinates of its rank, from which the lengths of its uneven shards follow.
fn sets_of(bundle: &Bundle) -> Vec<Vec<Program>> {
    let mesh = &bundle.mesh;
    let of_rank = |(rank, p): (Rank, &Program)| {
        let at = mesh.coord_of(rank);
        let coordinates: String = mesh.active_axes().map(|a| format!("@{a}{}", at.on_axis(a))).collect();
        Program { name: "denoise".to_string(), role: format!("r{rank}{coordinates}"), ..p.clone() }
    };
    let programs = |phase| mesh.iter().zip(programs_of_ranks(bundle, phase)).map(of_rank).collect();
    (0..bundle.phases.len()).map(programs).collect()
}

#[test]
fn the_oracle_completes_every_plan() {
    for (index, case, bundle) in planned_cases(150) {
        for programs in sets_of(&bundle) {
            let found = compare_set(&bundle.mesh, &programs, &verifier::verify_programs);
            assert!(found.is_accepted(), "case {index}, {}: {:?}", case.mapping, found.codes);
            assert_eq!(found.outcome, ExecutionOutcome::Completes, "case {index}, {}", case.mapping);
        }
    }
}

/// A change to one collective of one rank, as an error of a planner would make it.
const CHANGES: [&str; 4] = ["other axis", "other reduction", "other peer", "collectives swapped"];

/// Changes a collective of one rank. Returns the name of the change, or `None` if the program has no fitting one.
fn change_collective(d: &mut Rng, bundle: &Bundle, programs: &mut [Program]) -> Option<&'static str> {
    let at = d.next_below(programs.len());
    let p = &mut programs[at];
    let collectives: Vec<usize> = (0..p.ops.len()).filter(|i| p.ops[*i].opcode.is_collective()).collect();
    let change = d.pick_one(&CHANGES);
    let at = *collectives.get(d.next_below(collectives.len().max(1)))?;
    let op = &mut p.ops[at];
    let replace = |op: &mut tessera_ir::Op, key: &str, to: Attr| {
        (op.attrs.get(key).is_some_and(|was| *was != to)).then(|| op.attrs.insert(key.to_string(), to))
    };
    let done = match change {
        "other axis" => {
            let axes: Vec<&str> = bundle.mesh.active_axes().map(|a| a.name()).collect();
            replace(op, "axis", Attr::Str(d.pick_one(&axes).to_string())).is_some()
        }
        "other reduction" => replace(op, "reduction", Attr::Str("max".to_string())).is_some(),
        "other peer" => {
            let to = Attr::Int(d.next_below(2) as i64);
            ["to", "from", "root"].iter().any(|key| replace(op, key, to.clone()).is_some())
        }
        _ => {
            let other = *collectives.iter().find(|i| **i > at && p.ops[**i].opcode != p.ops[at].opcode)?;
            let (first, second) = (p.ops[at].clone(), p.ops[other].clone());
            // Each collective keeps its operands and results, so only the order over the wire differs.
            p.ops[at].opcode = second.opcode;
            p.ops[at].attrs = second.attrs;
            p.ops[other].opcode = first.opcode;
            p.ops[other].attrs = first.attrs;
            true
        }
    };
    done.then_some(change)
}

#[test]
fn verifier_and_oracle_agree_on_plans_with_one_mistake() {
    let mut d = Rng::new(SEED, [0, 2]);
    let mut outcomes: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (index, case, bundle) in planned_cases(150) {
        for (phase, programs) in sets_of(&bundle).into_iter().enumerate() {
            for turn in 0..6 {
                let mut changed = programs.clone();
                let name = if turn % 2 == 0 {
                    match change_collective(&mut d, &bundle, &mut changed) {
                        Some(name) => name,
                        None => continue,
                    }
                } else {
                    let rewrite = Rewrite::random(&mut d, &bundle.mesh);
                    apply_rewrite(&rewrite, &mut changed);
                    rewrite.kind.name()
                };
                if changed == programs {
                    continue;
                }
                let found = compare_set(&bundle.mesh, &changed, &verifier::verify_programs);
                assert_eq!(
                    found.disagreement(),
                    None,
                    "case {index}, phase {phase}, {name}, {}: {:?}\n{}",
                    case.mapping,
                    found.codes,
                    found.outcome
                );
                *outcomes.entry((name, found.outcome.kind())).or_default() += 1;
            }
        }
    }
    println!("{outcomes:?}");
    let total = |kind: &str| outcomes.iter().filter(|((_, k), _)| *k == kind).map(|(_, n)| n).sum::<usize>();
    for kind in ["completes", "hang", "mismatch", "race"] {
        assert!(total(kind) >= 20, "{kind}: {outcomes:?}");
    }
    for change in CHANGES {
        let failed = outcomes.iter().filter(|((name, kind), _)| *name == change && *kind != "completes");
        assert!(failed.map(|(_, n)| n).sum::<usize>() >= 5, "{change}: {outcomes:?}");
    }
}

#[test]
fn a_verifier_that_accepts_everything_disagrees() {
    let mut d = Rng::new(SEED, [0, 3]);
    let disagreements = planned_cases(30).into_iter().filter(|(_, _, bundle)| {
        let mut programs = sets_of(bundle).remove(0);
        change_collective(&mut d, bundle, &mut programs);
        compare_set(&bundle.mesh, &programs, &|_, _| Vec::new()).disagreement().is_some()
    });
    assert!(disagreements.count() >= 3);
}

#[test]
fn another_number_in_a_weight_or_in_a_page_table_changes_the_result() {
    let (index, case, bundle) =
        planned_cases(20).into_iter().find(|(_, case, _)| case.output == TokenOutput::Logits).unwrap();
    let (weights, calls) = (case.weights(u64::from(index)), case.calls(u64::from(index)));
    let expected = run_on_cpus(&bundle, &weights, &calls, case.output_name()).unwrap();
    for name in weights.keys().filter(|name| name.contains("layers.0")) {
        let mut other = weights.clone();
        other.get_mut(name).unwrap().data_mut().iter_mut().for_each(|x| *x *= 1.5);
        let far =
            measure_difference(&run_on_cpus(&bundle, &other, &calls, case.output_name()).unwrap(), &expected);
        assert!(far > 1e-4, "{name}: {far:e}");
    }
    let mut swapped = case.calls(u64::from(index));
    let last = swapped.len() - 1;
    swapped[last].scalars.insert("start".to_string(), calls[last - 1].scalars["start"].clone());
    assert!(
        measure_difference(&run_on_cpus(&bundle, &weights, &swapped, case.output_name()).unwrap(), &expected)
            > 1e-4
    );
}

#[test]
fn every_family_is_drawn_and_a_seed_gives_one_case() {
    let families: BTreeSet<usize> =
        planned_cases(60).iter().map(|(i, _, _)| *i as usize % FAMILIES.len()).collect();
    assert_eq!(families.len(), FAMILIES.len());
    let (a, b) = (Case::draw(SEED, 3), Case::draw(SEED, 3));
    assert_eq!((a.model, a.mapping), (b.model, b.mapping));
}
