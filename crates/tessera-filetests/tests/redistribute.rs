//! A tensor from any layout on a mesh to any other and back, through collectives, exact to the bit.

#![allow(clippy::unwrap_used)]

mod common;

use proptest::prelude::*;
use tessera_filetests::{bless, conformance, run};
use tessera_ir::{Builder, DType, Opcode, Program, Type, ValueId, print};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Rank, Shard};

/// A tensor: extents, and how many elements of each dim stay together.
#[derive(Debug, Clone, Copy)]
struct Subject {
    extents: [u64; 2],
    units: [u64; 2],
}

/// Which dim each axis cuts: tp, then ep.
type Spec = [Option<usize>; 2];

const AXES: [Axis; 2] = [Axis::Tp, Axis::Ep];

fn mesh() -> Mesh {
    Mesh::new([2, 3, 1, 1]).unwrap()
}

/// All ways to lay two dims over two axes; a dim is cut over one axis at most.
fn specs() -> Vec<Spec> {
    let on = [None, Some(0), Some(1)];
    let all = on.iter().flat_map(|a| on.iter().map(|b| [*a, *b]));
    all.filter(|[a, b]| a.is_none() || a != b).collect()
}

fn layout(subject: &Subject, spec: Spec) -> Layout {
    AXES.into_iter().zip(spec).fold(Layout::REPLICATED, |l, (axis, dim)| match dim {
        None => l,
        Some(d) => {
            let shard = Shard::of(d, subject.extents[d], subject.units[d], mesh().size(axis)).unwrap();
            l.with(axis, AxisLayout::Shard(shard))
        }
    })
}

/// Emits what takes `x` from one layout to another.
fn redistribute(b: &mut Builder, subject: &Subject, mut x: ValueId, mut from: Spec, to: Spec) -> ValueId {
    let free = |spec: &Spec, axis: usize, dim: usize| spec[1 - axis] != Some(dim);
    while from != to {
        let direct = (0..2).find(|a| from[*a] != to[*a] && to[*a].is_none_or(|d| free(&from, *a, d)));
        // Where each axis stands in the other's way, the one that cuts rows steps back first.
        let (axis, target) = match direct {
            Some(a) => (a, to[a]),
            None => ((0..2).find(|a| from[*a] == Some(0)).unwrap(), None),
        };
        x = step(b, subject, x, axis, from[axis], target, &from);
        from[axis] = target;
    }
    x
}

fn step(
    b: &mut Builder,
    subject: &Subject,
    mut x: ValueId,
    axis: usize,
    from: Option<usize>,
    to: Option<usize>,
    spec: &Spec,
) -> ValueId {
    let name = AXES[axis].name();
    let parts = u64::from(mesh().size(AXES[axis]));
    let unit = |d: usize| subject.units[d];
    match (from, to) {
        (None, Some(d)) => {
            b.attr("axis", name).attr("dim", d as u64).attr("unit", unit(d)).op(Opcode::TakeShard, &[x])
        }
        (Some(a), Some(d)) => {
            b.attr("axis", name).attr("concat", a as u64).attr("split", d as u64).attr("unit", unit(d));
            b.op(Opcode::AllToAll, &[x])
        }
        (Some(a), None) => {
            let even = (subject.extents[a] / unit(a)).is_multiple_of(parts);
            if even {
                return b.attr("axis", name).attr("dim", a as u64).op(Opcode::AllGather, &[x]);
            }
            if a == 1 {
                // Padding is by rows; uneven columns are exchanged for rows first, which must be whole.
                if spec[1 - axis] == Some(0) {
                    x = step(b, subject, x, 1 - axis, Some(0), None, &[None, None]);
                    x = step(b, subject, x, axis, Some(1), None, &[None, None]);
                    return step(b, subject, x, 1 - axis, None, Some(0), &[None, None]);
                }
                x = step(b, subject, x, axis, Some(1), Some(0), spec);
                return step(b, subject, x, axis, Some(0), None, spec);
            }
            let rows = (subject.extents[0] / unit(0)).div_ceil(parts) * unit(0);
            x = b.attr("axis", name).attr("dim", 0u64).attr("rows", rows).op(Opcode::Pad, &[x]);
            x = b.attr("axis", name).attr("dim", 0u64).op(Opcode::AllGather, &[x]);
            b.attr("extent", subject.extents[0]).attr("parts", parts).attr("unit", unit(0));
            b.op(Opcode::Compact, &[x])
        }
        (None, None) => x,
    }
}

/// One rank's program: from a weight in one layout to another and back.
fn program(subject: &Subject, rank: Rank, from: Spec, to: Spec) -> Program {
    let coord = mesh().coord_of(rank);
    let role = format!("r@tp{}@ep{}", coord.on(Axis::Tp), coord.on(Axis::Ep));
    let mut b = Builder::role("p", &role, mesh(), &["compute"]);
    let layout = layout(subject, from);
    let ty = Type { dtype: DType::F32, shape: layout.local(&subject.extents, &mesh(), coord), layout };
    let x = b.weight("x", ty);
    let there = redistribute(&mut b, subject, x, from, to);
    let back = redistribute(&mut b, subject, there, to, from);
    b.output("there", there);
    b.output("back", back);
    b.finish().unwrap_or_else(|e| panic!("{from:?} to {to:?} of {subject:?}: {}", e[0].message))
}

/// The six programs as a file: each rank's outputs must be that piece of the whole.
fn text(subject: &Subject, from: Spec, to: Spec, test: &str) -> String {
    let [rows, columns] = subject.extents;
    let header = format!("// test: {test}\n// tolerance: 0\n// weight x: [{rows}, {columns}] = normal 7\n");
    let whole = "program @p {\n  %x = weight \"x\" : ";
    let shape = format!("f32[{rows}, {columns}]\n");
    let outputs = "  output \"there\", %x\n  output \"back\", %x\n}\n";
    let ranks: String = mesh().iter().map(|r| print(&program(subject, r, from, to))).collect();
    // The judge takes the programs of roles alone.
    if test == "check" { header + &ranks } else { header + &ranks + whole + &shape + outputs }
}

fn exact_and_accepted(subject: &Subject, from: Spec, to: Spec) -> Result<(), String> {
    let evaluation = text(subject, from, to, "eval");
    // Blessing fails where any rank holds another piece than the whole's.
    let blessed =
        bless(&evaluation, "redistribute").ok_or_else(|| run(&evaluation, "redistribute").join("; "))?;
    let pieces = blessed.lines().filter(|l| l.starts_with("// rank")).count();
    let judged = run(&text(subject, from, to, "check"), "redistribute");
    match (pieces, judged.is_empty()) {
        (12, true) => Ok(()),
        _ => Err(format!("{pieces} pieces; the judge says: {}", judged.join("; "))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_layout_to_any_other_and_back(
        counts in [3u64..9, 3u64..9], units in [1u64..3, 1u64..4], from in 0usize..7, to in 0usize..7,
    ) {
        let subject = Subject { extents: [counts[0] * units[0], counts[1] * units[1]], units };
        let result = exact_and_accepted(&subject, specs()[from], specs()[to]);
        prop_assert!(result.is_ok(), "{:?}", result);
    }
}

#[test]
fn every_pair_of_layouts_is_exact_on_the_reference_and_on_the_cpu() {
    let specs = specs();
    assert_eq!(specs.len(), 7);
    // Cut evenly by both axes, by none, and in units.
    let subjects = [
        Subject { extents: [6, 12], units: [1, 1] },
        Subject { extents: [7, 5], units: [1, 1] },
        Subject { extents: [10, 12], units: [2, 3] },
    ];
    let mut files = Vec::new();
    for subject in &subjects {
        for from in &specs {
            for to in &specs {
                let name = format!("{subject:?}: {from:?} to {to:?}");
                exact_and_accepted(subject, *from, *to).unwrap_or_else(|e| panic!("{name}: {e}"));
                files.push((name, text(subject, *from, *to, "eval")));
            }
        }
    }
    // Programs that only move elements leave no room for rounding.
    let report = conformance(&common::cpu("cpu"), &files);
    assert_eq!((report.passed.len(), report.worst), (3 * 49, 0.0), "{report}");
}

#[test]
fn a_column_and_a_row_parallel_product_need_one_reduction_at_the_end() {
    let file = common::texts().into_iter().find(|(n, _)| n == "eval/column_row_linear.tir").unwrap();
    let programs = tessera_ir::parse_all(&file.1, &file.0).unwrap();
    let of_roles: Vec<&Program> = programs.iter().filter(|p| !p.role.is_empty()).collect();
    assert_eq!(of_roles.len(), 2);
    for p in of_roles {
        let all: Vec<_> = p.collectives().map(|(_, op)| op).collect();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].opcode, Opcode::AllReduce);
        // What it reduces is the row-parallel product: the one whose weight is cut along the inner dim.
        let made = p.ops.iter().find(|o| o.results.contains(&all[0].operands[0])).unwrap();
        let weight = p.ty(made.operands[1]);
        assert!(made.opcode == Opcode::Matmul);
        assert!(matches!(weight.layout.on(Axis::Tp), AxisLayout::Shard(s) if s.dim == 1));
    }
}
