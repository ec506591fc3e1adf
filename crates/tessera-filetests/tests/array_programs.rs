//! Random array programs with random layouts on random meshes: each is sealed by the verifier, and
//! every rank computes its shard of what one rank computes.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod common;
mod random_arrays;

use std::collections::{BTreeMap, BTreeSet};

use random_arrays::ArrayCase;
use tessera_filetests::run_conformance;
use tessera_ir::{Bundle, Opcode, Program, print};
use tessera_mesh::{Mesh, RankMap};
use tessera_plan::layouts::{StreamOverlap, lower_by_layouts};
use tessera_reference::{Evaluator, Tensor};
use tessera_verify::{DeviceLimits, seal};

/// Number of cases that the tests draw.
const CASES: u32 = 400;

fn lower(case: &ArrayCase) -> Bundle {
    let map = RankMap::from_device_kind(&case.mesh, "cpu");
    lower_by_layouts(std::slice::from_ref(&case.program), &case.mesh, map, &case.overlap)
        .unwrap_or_else(|ds| panic!("{}\n{ds:#?}", case.describe()))
}

/// Returns the outputs of every rank.
fn evaluate(case: &ArrayCase, mesh: Mesh, programs: &[&Program]) -> Vec<BTreeMap<String, Tensor>> {
    let mut evaluator = Evaluator::new(mesh);
    evaluator.load_weights(case.weights.clone());
    evaluator.run(programs, &case.call).unwrap_or_else(|e| panic!("{}\n{e}", case.describe()))
}

/// Checks that the outputs of every rank are its shards of the whole outputs, and returns the largest
/// difference relative to the largest element.
fn compare(case: &ArrayCase, bundle: &Bundle) -> f64 {
    let mesh = case.mesh;
    let whole = evaluate(case, Mesh::default(), &[&case.program.program]).remove(0);
    let program_of = |r| &bundle.phases[0].programs[bundle.role_index(r).unwrap()];
    let programs: Vec<&Program> = mesh.iter().map(program_of).collect();
    let mut worst = 0.0f64;
    for (rank, (p, outputs)) in mesh.iter().zip(programs.iter().zip(evaluate(case, mesh, &programs))) {
        assert_eq!(outputs.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::Output) {
            let name = op.name.clone().unwrap();
            let ty = p.type_of(op.operands[0]);
            if let Some(stated) = case.program.outputs.get(&name) {
                assert_eq!(ty.layout, *stated, "{}", case.describe());
            }
            let ranges = ty.layout.global_ranges(&ty.shape, &mesh, mesh.coord_of(rank));
            let expected = ranges.iter().enumerate().fold(whole[&name].clone(), |t, (dim, (start, n))| {
                t.slice(dim, *start as usize, *n as usize).unwrap()
            });
            let largest = whole[&name].data().iter().fold(1e-30_f64, |m, x| m.max(x.abs()));
            worst = worst.max(expected.distance(&outputs[&name]) / largest);
        }
    }
    worst
}

#[test]
fn every_rank_computes_its_shard_of_what_one_rank_computes() {
    let mut opcodes: BTreeSet<&str> = BTreeSet::new();
    let (mut several_roles, mut overlapped, mut free) = (0, 0, 0);
    for index in 0..CASES {
        let case = ArrayCase::draw(index);
        let bundle = lower(&case);
        seal(bundle.clone(), &DeviceLimits::default()).unwrap_or_else(|ds| {
            panic!("{}\n{}\n{ds:#?}", case.describe(), print(&bundle.phases[0].programs[0]))
        });
        let worst = compare(&case, &bundle);
        assert!(worst < 1e-9, "{}: {worst:e}\n{}", case.describe(), print(&bundle.phases[0].programs[0]));
        let p = &bundle.phases[0].programs[0];
        opcodes.extend(p.ops.iter().map(|op| op.opcode.name()));
        several_roles += usize::from(bundle.roles.len() > 1);
        let waits = p.ops.windows(2).filter(|pair| pair[0].issue && pair[1].opcode != Opcode::Wait).count();
        overlapped += usize::from(waits > 0);
        free += usize::from(p.collective_ops().next().is_none());
    }
    println!("{several_roles} with several roles, {overlapped} with overlap, {free} without collectives");
    for opcode in random_arrays::DRAWN_OPS {
        assert!(opcodes.contains(opcode.name()), "no program has {}", opcode.name());
    }
    for opcode in [Opcode::AllReduce, Opcode::AllGather, Opcode::ReduceScatter, Opcode::AllToAll] {
        assert!(opcodes.contains(opcode.name()), "no program has {}", opcode.name());
    }
    assert!(several_roles > 40 && overlapped > 20 && free > 20);
}

#[test]
fn programs_do_not_depend_on_the_run_and_read_back() {
    for index in 0..60 {
        let case = ArrayCase::draw(index);
        let (first, again) = (lower(&case), lower(&ArrayCase::draw(index)));
        assert_eq!(first, again);
        for p in &first.phases[0].programs {
            let text = print(p);
            assert_eq!(tessera_ir::parse(&text, "printed").unwrap().without_spans(), *p, "{text}");
        }
    }
}

#[test]
fn serial_streams_have_no_op_between_an_issue_and_its_wait() {
    for index in 0..100 {
        let case = ArrayCase { overlap: StreamOverlap::none(), ..ArrayCase::draw(index) };
        for p in &lower(&case).phases[0].programs {
            for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.issue) {
                assert_eq!(p.ops[i + 1].operands, op.results, "{}", print(p));
            }
        }
    }
}

#[test]
fn cpu_ranks_move_and_compute_shards_of_any_dim() {
    let mut files = Vec::new();
    for index in 0..60 {
        let case = ArrayCase::draw(index);
        let bundle = lower(&case);
        let text: String = bundle.phases[0].programs.iter().map(print).collect();
        files.push((case.describe(), case.header + &text));
    }
    let report = run_conformance(&common::cpu_backend("cpu"), &files);
    assert!(report.failed.is_empty(), "{report}");
    // CPU ranks have no softmax over other dims than the last.
    let is_softmax = |(_, why): &(String, String)| why.contains("softmax");
    assert!(report.skipped.iter().all(is_softmax) && report.passed.len() > 40, "{report}");
}
