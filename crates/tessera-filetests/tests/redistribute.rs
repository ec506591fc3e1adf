//! Redistributes a tensor from any layout on a mesh to any other and back with collectives, bit for
//! bit.

#![allow(clippy::unwrap_used)]

mod common;

use proptest::prelude::*;
use tessera_filetests::{bless, run, run_conformance};
use tessera_ir::{Builder, DType, Opcode, Program, Type, print};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Rank, Shard};
use tessera_plan::layouts::emit_redistribution;

/// A tensor: its extents, and the shard unit of each dim.
#[derive(Debug, Clone, Copy)]
struct TensorCase {
    extents: [u64; 2],
    units: [u64; 2],
}

/// The dim that each axis shards: tp, then ep.
type DimByAxis = [Option<usize>; 2];

const AXES: [Axis; 2] = [Axis::Tp, Axis::Ep];

fn test_mesh() -> Mesh {
    Mesh::new([2, 3, 1, 1]).unwrap()
}

/// Lists all layouts of two dims over two axes; at most one axis shards a dim.
fn all_layouts() -> Vec<DimByAxis> {
    let on = [None, Some(0), Some(1)];
    let all = on.iter().flat_map(|a| on.iter().map(|b| [*a, *b]));
    all.filter(|[a, b]| a.is_none() || a != b).collect()
}

fn to_layout(subject: &TensorCase, spec: DimByAxis) -> Layout {
    AXES.into_iter().zip(spec).fold(Layout::REPLICATED, |l, (axis, dim)| match dim {
        None => l,
        Some(d) => {
            let shard =
                Shard::new(d, subject.extents[d], subject.units[d], test_mesh().axis_size(axis)).unwrap();
            l.with_axis(axis, AxisLayout::Shard(shard))
        }
    })
}

/// Builds one rank's program: it converts a weight from one layout to another and back.
fn rank_program(subject: &TensorCase, rank: Rank, from: DimByAxis, to: DimByAxis) -> Program {
    let coord = test_mesh().coord_of(rank);
    let role = format!("r@tp{}@ep{}", coord.on_axis(Axis::Tp), coord.on_axis(Axis::Ep));
    let mut b = Builder::new_role("p", &role, test_mesh(), &["compute"]);
    let layout = to_layout(subject, from);
    let ty =
        Type { dtype: DType::F32, shape: layout.local_shape(&subject.extents, &test_mesh(), coord), layout };
    let x = b.add_weight("x", ty);
    let there = emit_redistribution(&mut b, x, &to_layout(subject, to)).unwrap();
    let back = emit_redistribution(&mut b, there, &to_layout(subject, from)).unwrap();
    b.add_output("there", there);
    b.add_output("back", back);
    b.finish().unwrap_or_else(|e| panic!("{from:?} to {to:?} of {subject:?}: {}", e[0].message))
}

/// Prints the six programs as a file: each rank's outputs must be its shard of the logical output.
fn file_text(subject: &TensorCase, from: DimByAxis, to: DimByAxis, test: &str) -> String {
    let [rows, columns] = subject.extents;
    let header = format!("// test: {test}\n// tolerance: 0\n// weight x: [{rows}, {columns}] = normal 7\n");
    let whole = "program @p {\n  %x = weight \"x\" : ";
    let shape = format!("f32[{rows}, {columns}]\n");
    let outputs = "  output \"there\", %x\n  output \"back\", %x\n}\n";
    let ranks: String = test_mesh().iter().map(|r| print(&rank_program(subject, r, from, to))).collect();
    // The verifier accepts role programs only.
    if test == "check" { header + &ranks } else { header + &ranks + whole + &shape + outputs }
}

fn check_exact_and_accepted(subject: &TensorCase, from: DimByAxis, to: DimByAxis) -> Result<(), String> {
    let evaluation = file_text(subject, from, to, "eval");
    // Blessing fails if any rank's output differs from its shard of the logical output.
    let blessed =
        bless(&evaluation, "redistribute").ok_or_else(|| run(&evaluation, "redistribute").join("; "))?;
    let shards = blessed.lines().filter(|l| l.starts_with("// rank")).count();
    let diagnostics = run(&file_text(subject, from, to, "check"), "redistribute");
    match (shards, diagnostics.is_empty()) {
        (12, true) => Ok(()),
        _ => Err(format!("{shards} shards; the verifier reports: {}", diagnostics.join("; "))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_layout_to_any_other_and_back(
        counts in [3u64..9, 3u64..9], units in [1u64..3, 1u64..4], from in 0usize..7, to in 0usize..7,
    ) {
        let subject = TensorCase { extents: [counts[0] * units[0], counts[1] * units[1]], units };
        let result = check_exact_and_accepted(&subject, all_layouts()[from], all_layouts()[to]);
        prop_assert!(result.is_ok(), "{:?}", result);
    }
}

#[test]
fn every_pair_of_layouts_is_exact_on_the_reference_and_on_the_cpu() {
    let specs = all_layouts();
    assert_eq!(specs.len(), 7);
    // Sizes that both axes divide, that no axis divides, and with a shard unit.
    let subjects = [
        TensorCase { extents: [6, 12], units: [1, 1] },
        TensorCase { extents: [7, 5], units: [1, 1] },
        TensorCase { extents: [10, 12], units: [2, 3] },
    ];
    let mut files = Vec::new();
    for subject in &subjects {
        for from in &specs {
            for to in &specs {
                let name = format!("{subject:?}: {from:?} to {to:?}");
                check_exact_and_accepted(subject, *from, *to).unwrap_or_else(|e| panic!("{name}: {e}"));
                files.push((name, file_text(subject, *from, *to, "eval")));
            }
        }
    }
    // Programs that only move elements round nothing.
    let report = run_conformance(&common::cpu_backend("cpu"), &files);
    assert_eq!((report.passed.len(), report.worst_error), (3 * 49, 0.0), "{report}");
}

#[test]
fn column_and_row_parallel_matmuls_need_one_reduction_at_the_end() {
    let file = common::read_files().into_iter().find(|(n, _)| n == "eval/column_row_linear.tir").unwrap();
    let programs = tessera_ir::parse_all(&file.1, &file.0).unwrap();
    let of_roles: Vec<&Program> = programs.iter().filter(|p| !p.role.is_empty()).collect();
    assert_eq!(of_roles.len(), 2);
    for p in of_roles {
        let all: Vec<_> = p.collective_ops().map(|(_, op)| op).collect();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].opcode, Opcode::AllReduce);
        // The reduction is of the row-parallel matmul, whose weight is sharded along the inner dim.
        let made = p.ops.iter().find(|o| o.results.contains(&all[0].operands[0])).unwrap();
        let weight = p.type_of(made.operands[1]);
        assert!(made.opcode == Opcode::Matmul);
        assert!(matches!(weight.layout.on_axis(Axis::Tp), AxisLayout::Shard(s) if s.dim == 1));
    }
}
