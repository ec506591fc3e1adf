//! The collectives that the example compares with a computation on the host.

use std::ops::Range;

use tessera_ir::DType;
use tessera_mesh::Reduction;

use crate::collectives::{CollectiveKind, GroupTransport};
use crate::values::{reference_reduce, split_extent, take_range, test_data};

/// One collective, from the view of one member.
pub(crate) struct CollectiveCase {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) kind: CollectiveKind,
    pub(crate) operand: Vec<f32>,
    pub(crate) want: Vec<f32>,
    /// Bytes by which operands and results are misaligned.
    pub(crate) misalignment: usize,
    /// Absolute tolerance for results of NCCL; `None` requires equal bits.
    pub(crate) tolerance: Option<f32>,
}

pub(crate) fn build_cases(me: usize, members: usize, way: GroupTransport) -> Vec<CollectiveCase> {
    let mut out = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        let (name, element) = (dtype.name(), dtype.element_bytes() as usize);
        let case = |name: String, kind: CollectiveKind, operand: Vec<f32>, want: Vec<f32>| {
            let near = None;
            CollectiveCase { name, dtype, kind, operand, want, misalignment: 0, tolerance: near }
        };
        for reduction in [Reduction::Sum, Reduction::Tree, Reduction::Max] {
            let near = match (way, reduction) {
                (GroupTransport::P2p, _) | (_, Reduction::Max) => None,
                _ if dtype == DType::F32 => Some(1e-6 * (members * members) as f32),
                _ => Some(8e-3 * (members * members) as f32),
            };
            let word = reduction.name();
            for (seed, elements) in
                [1, 7, 1000, 8192, 40_000, 65_536, 1_000_003, 1 << 21].into_iter().enumerate()
            {
                let strange = reduction == Reduction::Max && way == GroupTransport::P2p;
                let all: Vec<Vec<f32>> =
                    (0..members).map(|m| test_data(seed, m, elements, dtype, strange)).collect();
                let want = reference_reduce(&all, reduction, dtype);
                let name = format!("all_reduce {word} {name} of {elements}");
                let kind = CollectiveKind::AllReduce { elements, reduction };
                for askew in [0, element] {
                    let name = if askew > 0 { format!("{name} askew") } else { name.clone() };
                    out.push(CollectiveCase {
                        misalignment: askew,
                        tolerance: near,
                        ..case(name, kind.clone(), all[me].clone(), want.clone())
                    });
                }
            }
            for (shape, dim) in [((37, 24), 0), ((16, 64), 0), ((37, 24), 1), ((5, 17), 1), ((300, 1024), 1)]
            {
                for even in [false, true] {
                    let extent = [shape.0, shape.1][dim];
                    if even && extent % members != 0 {
                        continue;
                    }
                    let parts = split_extent(extent, members, even);
                    let all: Vec<Vec<f32>> =
                        (0..members).map(|m| test_data(90, m, shape.0 * shape.1, dtype, false)).collect();
                    let want = take_range(&reference_reduce(&all, reduction, dtype), shape, dim, &parts[me]);
                    let (rows, columns) = shape;
                    let kind = CollectiveKind::ReduceScatter { rows, columns, dim, parts, reduction };
                    let name = format!("reduce_scatter {word} {name} {shape:?} dim {dim} even {even}");
                    out.push(CollectiveCase { tolerance: near, ..case(name, kind, all[me].clone(), want) });
                }
            }
        }
        for (shape, dim) in
            [((37, 24), 0), ((16, 64), 0), ((37, 24), 1), ((5, 17), 1), ((560, 1024), 0), ((560, 1024), 1)]
        {
            for even in [false, true] {
                let extent = [shape.0, shape.1][dim];
                if even && extent % members != 0 {
                    continue;
                }
                let parts = split_extent(extent, members, even);
                let whole = test_data(91, 0, shape.0 * shape.1, dtype, false);
                let kind = CollectiveKind::all_gather(me, shape, dim, &parts, element);
                let name = format!("all_gather {name} {shape:?} dim {dim} even {even}");
                out.push(case(name, kind, take_range(&whole, shape, dim, &parts[me]), whole.clone()));
            }
        }
        for shape in [(37, 29), (64, 64), (17, 130), (2160, 2560)] {
            for (concat_dim, even) in [(0, false), (0, true), (1, false), (1, true)] {
                let extents = [shape.0, shape.1];
                if even && extents.iter().any(|e| e % members != 0) {
                    continue;
                }
                let concat = split_extent(extents[concat_dim], members, even);
                let split = split_extent(extents[1 - concat_dim], members, even);
                let whole = test_data(92, 0, shape.0 * shape.1, dtype, false);
                let kind = CollectiveKind::all_to_all(me, shape, concat_dim, &concat, &split, element);
                let name = format!("all_to_all {name} {shape:?} dim {concat_dim} even {even}");
                let operand = take_range(&whole, shape, concat_dim, &concat[me]);
                out.push(case(name, kind, operand, take_range(&whole, shape, 1 - concat_dim, &split[me])));
            }
        }
        // Rows of 3, of 24 and of 832 · 96 elements.
        for (frames, extent, row) in [(1, 13, 3), (3, 20, 24), (4, 30, 79_872)] {
            let parts = split_extent(extent, members, extent.is_multiple_of(members));
            if parts.iter().any(Range::is_empty) {
                continue;
            }
            let whole = test_data(94, 0, frames * extent * row, dtype, false);
            let line = |frame: usize, at: Option<usize>| match at.filter(|at| *at < extent) {
                Some(at) => whole[(frame * extent + at) * row..][..row].to_vec(),
                None => vec![0.0; row],
            };
            let own = &parts[me];
            let lines = (0..frames).flat_map(|f| own.clone().map(move |at| (f, Some(at))));
            let operand = lines.flat_map(|(f, at)| line(f, at)).collect();
            let beside = [own.start.checked_sub(1), Some(own.end)];
            let want = (0..frames).flat_map(|f| beside.map(|at| line(f, at))).flatten().collect();
            let rows: Vec<usize> = parts.iter().map(Range::len).collect();
            let kind = CollectiveKind::halo_exchange(me, &rows, frames, row * element);
            out.push(case(
                format!("halo_exchange {name} of {frames} x {extent} x {row}"),
                kind,
                operand,
                want,
            ));
        }
        for elements in [1, 999, 100_000] {
            let root = members - 1;
            let whole = test_data(93, root, elements, dtype, false);
            let kind = CollectiveKind::broadcast_from(me, members, root, elements * element);
            let operand = if me == root { whole.clone() } else { Vec::new() };
            out.push(case(format!("broadcast {name} of {elements}"), kind, operand, whole.clone()));
            if members == 2 {
                let kind = CollectiveKind::send_recv(me, elements * element);
                let (operand, want) = if me == 0 { (whole, Vec::new()) } else { (Vec::new(), whole) };
                out.push(case(format!("transfer {name} of {elements}"), kind, operand, want));
            }
        }
    }
    out
}
