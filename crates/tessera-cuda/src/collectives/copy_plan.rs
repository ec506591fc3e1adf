//! The copy plan of a collective: rectangles from one member's operand to another's result, or
//! elements to reduce.
//!
//! Matrices are row-major; callers fold other dims into two. The CPU backend's collectives use the
//! same terms.

use std::ops::Range;

use tessera_ir::{DType, Transport};
use tessera_mesh::Reduction;

/// Offset of an operand or a result that a member does not have in its exchange memory.
pub(crate) const NO_OFFSET: u64 = u64::MAX;

/// A collective of a group, from the view of one member.
#[derive(Debug, Clone)]
pub(crate) struct GroupCollective {
    /// Copies or reduction that the collective consists of.
    pub(crate) kind: CollectiveKind,
    /// Dtype of operand and result; reductions support only f32 and bf16.
    pub(crate) dtype: DType,
    /// Device address of this member's operand; unused if the member contributes nothing.
    pub(crate) operand: u64,
    /// Device address of this member's result; unused if the member receives nothing.
    pub(crate) result: u64,
    /// Offset of every member's operand in its exchange memory. Only reductions need it, because
    /// they read the operands of peers. [`NO_OFFSET`] for a member without one.
    pub(crate) peer_operand_offsets: Vec<u64>,
    /// Offset of every member's result in its exchange memory.
    pub(crate) peer_result_offsets: Vec<u64>,
    /// Fingerprint of the collective: equal on all members, different for different collectives.
    pub(crate) fingerprint: u32,
    /// Index of the op in its program, for progress and fault reports; `u32::MAX` would mean no op.
    pub(crate) op_index: u32,
    /// Transport that the op requests. P2P memory serves every collective that does not request NCCL,
    /// if the ranks can access it; NCCL serves the others, unless the group has no communicator.
    pub(crate) transport: Option<Transport>,
}

/// How a collective moves data between members: by copies alone, or with a reduction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CollectiveKind {
    /// Copies bytes between members.
    Copy {
        /// By member: the part of this member's operand that goes to that member's result.
        sends: Vec<CopyRect>,
        /// By member: the part of that member's operand that goes to this member's result.
        receives: Vec<CopyRect>,
        /// The NCCL calls with the same effect, for groups that use NCCL.
        nccl_call: NcclCall,
    },
    /// Every member gets the reduction of all operands.
    AllReduce {
        /// Number of elements in each member's operand.
        elements: usize,
        /// Operator that combines the operands element by element.
        reduction: Reduction,
    },
    /// Member m gets `parts[m]` along `dim` of the reduction of all operands.
    ReduceScatter {
        /// Number of rows of each member's operand, folded to a matrix.
        rows: usize,
        /// Number of columns of each member's operand, folded to a matrix.
        columns: usize,
        /// Scattered dim: 0 or 1.
        dim: usize,
        /// By member: its range along `dim`.
        parts: Vec<Range<usize>>,
        /// Operator that combines the operands element by element.
        reduction: Reduction,
    },
}

/// The NCCL calls that perform a whole [`CollectiveKind::Copy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NcclCall {
    /// All-gather of operands of this many bytes, in member order.
    AllGather(usize),
    /// Broadcast from a root (first field) of this many bytes (second field).
    Broadcast(usize, usize),
    /// Grouped sends and receives, because no single NCCL collective fits.
    SendRecv,
}

/// A rectangle of rows in an operand and its place in a result, in bytes but for `rows` and `is_zero`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CopyRect {
    /// Offset of the first row in the sender's operand.
    pub(crate) from_offset: usize,
    /// Distance between the starts of consecutive rows in the operand.
    pub(crate) from_pitch: usize,
    /// Offset of the first row in the receiver's result.
    pub(crate) to_offset: usize,
    /// Distance between the starts of consecutive rows in the result.
    pub(crate) to_pitch: usize,
    /// Bytes copied of each row, equal on both sides.
    pub(crate) row_bytes: usize,
    /// Number of rows; 0 for an empty rectangle.
    pub(crate) rows: usize,
    /// Whether the rows of the result become zeros and the operand is not read. Only for the part that a
    /// member has of its own.
    pub(crate) is_zero: bool,
}

impl CopyRect {
    /// Creates a rectangle of `bytes` contiguous bytes on both sides.
    pub(crate) fn contiguous_run(from_offset: usize, to_offset: usize, bytes: usize) -> CopyRect {
        let rows = usize::from(bytes > 0);
        let (pitch, is_zero) = (bytes, false);
        CopyRect {
            from_offset,
            from_pitch: pitch,
            to_offset,
            to_pitch: pitch,
            row_bytes: bytes,
            rows,
            is_zero,
        }
    }

    /// Creates the rectangle of a part along `dim` of a row-major matrix, which becomes contiguous in the
    /// result; `element` is the size of an element.
    pub(crate) fn packed_part(
        (rows, columns): (usize, usize),
        dim: usize,
        part: &Range<usize>,
        element: usize,
    ) -> CopyRect {
        if dim == 0 {
            let row = columns * element;
            return CopyRect::contiguous_run(part.start * row, 0, part.len() * row);
        }
        let row_bytes = part.len() * element;
        CopyRect {
            from_offset: part.start * element,
            from_pitch: columns * element,
            to_offset: 0,
            to_pitch: row_bytes,
            row_bytes,
            rows: if part.is_empty() { 0 } else { rows },
            is_zero: false,
        }
    }

    /// Returns the copy in the opposite direction.
    fn reversed(self) -> CopyRect {
        CopyRect {
            from_offset: self.to_offset,
            from_pitch: self.to_pitch,
            to_offset: self.from_offset,
            to_pitch: self.from_pitch,
            ..self
        }
    }

    pub(crate) fn total_bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// Returns the end offsets in the operand and in the result (exclusive).
    pub(crate) fn end_offsets(&self) -> (usize, usize) {
        if self.total_bytes() == 0 {
            return (0, 0);
        }
        let end = |offset: usize, pitch: usize| offset + (self.rows - 1) * pitch + self.row_bytes;
        (end(self.from_offset, self.from_pitch), end(self.to_offset, self.to_pitch))
    }

    /// Returns whether the rows are contiguous in the operand, and in the result.
    pub(crate) fn contiguous_sides(&self) -> (bool, bool) {
        let one = self.rows <= 1;
        (one || self.from_pitch == self.row_bytes, one || self.to_pitch == self.row_bytes)
    }
}

impl CollectiveKind {
    /// All-gather of a `[rows, columns]` matrix: member m contributes `parts[m]` along `dim`.
    pub(crate) fn all_gather(
        me: usize,
        (rows, columns): (usize, usize),
        dim: usize,
        parts: &[Range<usize>],
        element: usize,
    ) -> CollectiveKind {
        let rect = |m: usize| CopyRect::packed_part((rows, columns), dim, &parts[m], element).reversed();
        let first = rect(0).total_bytes();
        let behind = |m: usize| dim == 0 || rows == 1 || parts[m].len() == columns;
        let even = (0..parts.len())
            .all(|m| behind(m) && rect(m).total_bytes() == first && rect(m).to_offset == m * first);
        let nccl_call = if even { NcclCall::AllGather(first) } else { NcclCall::SendRecv };
        CollectiveKind::Copy {
            sends: vec![rect(me); parts.len()],
            receives: (0..parts.len()).map(rect).collect(),
            nccl_call,
        }
    }

    /// All-to-all that changes the sharded dim. Before it, member m holds `concat[m]` of
    /// `concat_dim` and all of the other dim; afterwards it holds `split[m]` of the other dim and
    /// all of `concat_dim`. `(rows, columns)` is the global shape.
    pub(crate) fn all_to_all(
        me: usize,
        (rows, columns): (usize, usize),
        concat_dim: usize,
        concat: &[Range<usize>],
        split: &[Range<usize>],
        element: usize,
    ) -> CollectiveKind {
        let rect = |from: usize, to: usize| {
            let (held, got) = (&concat[from], &split[to]);
            let rect = if concat_dim == 0 {
                CopyRect {
                    from_offset: got.start,
                    from_pitch: columns,
                    to_offset: held.start * got.len(),
                    to_pitch: got.len(),
                    row_bytes: got.len(),
                    rows: held.len(),
                    is_zero: false,
                }
            } else {
                CopyRect {
                    from_offset: got.start * held.len(),
                    from_pitch: held.len(),
                    to_offset: held.start,
                    to_pitch: columns,
                    row_bytes: held.len(),
                    rows: got.len(),
                    is_zero: false,
                }
            };
            debug_assert!(rows >= held.len().min(got.len()));
            CopyRect {
                from_offset: rect.from_offset * element,
                from_pitch: rect.from_pitch * element,
                to_offset: rect.to_offset * element,
                to_pitch: rect.to_pitch * element,
                row_bytes: rect.row_bytes * element,
                rows: if rect.row_bytes == 0 { 0 } else { rect.rows },
                is_zero: false,
            }
        };
        let members = 0..concat.len();
        CollectiveKind::Copy {
            sends: members.clone().map(|m| rect(me, m)).collect(),
            receives: members.map(|m| rect(m, me)).collect(),
            nccl_call: NcclCall::SendRecv,
        }
    }

    /// Halo exchange of frames that are sharded by picture rows: member m holds `rows[m]` rows of each of
    /// `frames` frames, and a row has `row_bytes` bytes. The result has two rows per frame, the last one of
    /// the member before and the first one of the member after. The first and the last member get zeros.
    pub(crate) fn halo_exchange(
        me: usize,
        rows: &[usize],
        frames: usize,
        row_bytes: usize,
    ) -> CollectiveKind {
        let last = rows.len().saturating_sub(1);
        let rect = |from: usize, to: usize| {
            let copied = |from_row: usize, to_row: usize, count: usize| CopyRect {
                from_offset: from_row * row_bytes,
                from_pitch: rows[from] * row_bytes,
                to_offset: to_row * row_bytes,
                to_pitch: 2 * row_bytes,
                row_bytes: count * row_bytes,
                rows: frames,
                is_zero: from == to,
            };
            match (from, to) {
                (0, 0) if last == 0 => copied(0, 0, 2),
                (0, 0) => copied(0, 0, 1),
                _ if from == to && from == last => copied(0, 1, 1),
                _ if to == from + 1 => copied(rows[from] - 1, 0, 1),
                _ if from == to + 1 => copied(0, 1, 1),
                _ => CopyRect::default(),
            }
        };
        let members = 0..rows.len();
        CollectiveKind::Copy {
            sends: members.clone().map(|m| rect(me, m)).collect(),
            receives: members.map(|m| rect(m, me)).collect(),
            nccl_call: NcclCall::SendRecv,
        }
    }

    /// Broadcast of the root's operand to every member, including the root.
    pub(crate) fn broadcast_from(me: usize, members: usize, root: usize, bytes: usize) -> CollectiveKind {
        let whole = CopyRect::contiguous_run(0, 0, bytes);
        let to = if me == root { whole } else { CopyRect::default() };
        let from = (0..members).map(|m| if m == root { whole } else { CopyRect::default() });
        CollectiveKind::Copy {
            sends: vec![to; members],
            receives: from.collect(),
            nccl_call: NcclCall::Broadcast(root, bytes),
        }
    }

    /// Send from member 0 to member 1 in a group of two.
    pub(crate) fn send_recv(me: usize, bytes: usize) -> CollectiveKind {
        let (none, whole) = (CopyRect::default(), CopyRect::contiguous_run(0, 0, bytes));
        let (sends, receives) =
            if me == 0 { (vec![none, whole], vec![none; 2]) } else { (vec![none; 2], vec![whole, none]) };
        CollectiveKind::Copy { sends, receives, nccl_call: NcclCall::SendRecv }
    }
}

impl GroupCollective {
    /// Returns the bytes of staging memory that NCCL needs for this collective, beside operands and
    /// results.
    pub(crate) fn staging_bytes(&self, me: usize) -> usize {
        let aligned = |bytes: usize| bytes.next_multiple_of(STAGING_ALIGN);
        match &self.kind {
            CollectiveKind::Copy { nccl_call: NcclCall::AllGather(_) | NcclCall::Broadcast(..), .. }
            | CollectiveKind::AllReduce { .. } => 0,
            CollectiveKind::Copy { sends: to, receives: from, .. } => {
                let packed = |rects: &[CopyRect], side: fn(&CopyRect) -> bool| -> usize {
                    let others = rects.iter().enumerate().filter(|(m, r)| *m != me && !side(r));
                    others.map(|(_, r)| aligned(r.total_bytes())).sum()
                };
                packed(to, |r| r.contiguous_sides().0) + packed(from, |r| r.contiguous_sides().1)
            }
            CollectiveKind::ReduceScatter { rows, columns, dim, parts, .. } => {
                let Some(scatter) = PaddedScatter::from_uneven_parts((*rows, *columns), *dim, parts) else {
                    return 0;
                };
                let bytes = scatter.part_elements * self.dtype.element_bytes() as usize;
                aligned(parts.len() * bytes) + aligned(bytes)
            }
        }
    }

    /// Returns whether every copy is large enough for the DMA copy engines, which have a high
    /// start-up cost.
    pub(crate) fn suits_copy_engines(&self) -> bool {
        let worth = |r: &CopyRect| {
            let is_large =
                r.row_bytes >= MIN_COPY_ENGINE_ROW_BYTES && r.total_bytes() >= MIN_COPY_ENGINE_BYTES;
            r.total_bytes() == 0 || (is_large && !r.is_zero)
        };
        matches!(&self.kind, CollectiveKind::Copy { sends, .. } if sends.iter().all(worth))
    }
}

/// Minimum bytes of a copy, and of one of its rows, for the DMA copy engines.
const MIN_COPY_ENGINE_BYTES: usize = 256 << 10;
const MIN_COPY_ENGINE_ROW_BYTES: usize = 512;

/// Alignment of a copy in staging memory, in bytes.
pub(crate) const STAGING_ALIGN: usize = 256;

/// A reduce-scatter whose parts are not contiguous and equal in size, as NCCL requires, so they are
/// padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PaddedScatter {
    /// Elements of the largest part, which all parts are padded to.
    pub(crate) part_elements: usize,
}

impl PaddedScatter {
    pub(crate) fn from_uneven_parts(
        (rows, columns): (usize, usize),
        dim: usize,
        parts: &[Range<usize>],
    ) -> Option<PaddedScatter> {
        let across = if dim == 0 { columns } else { rows };
        let largest = parts.iter().map(|p| p.len() * across).max().unwrap_or(0);
        let behind = dim == 0 || rows == 1;
        let even = parts
            .iter()
            .enumerate()
            .all(|(m, p)| p.len() * across == largest && p.start * across == m * largest);
        (!(behind && even)).then_some(PaddedScatter { part_elements: largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uneven parts of `extent`, one of them empty if there are more than three.
    fn uneven_parts(extent: usize, members: usize) -> Vec<Range<usize>> {
        let cut = |m: usize| if members > 3 && m == 2 { extent / members } else { extent * m / members };
        (0..members).map(|m| cut(m)..if m + 1 == members { extent } else { cut(m + 1) }).collect()
    }

    /// Returns the members' results, in bytes, after every member performs its copies.
    fn simulate_copies(kinds: &[CollectiveKind], operands: &[Vec<u8>], lens: &[usize]) -> Vec<Vec<u8>> {
        let mut out: Vec<Vec<u8>> = lens.iter().map(|l| vec![255; *l]).collect();
        for (i, kind) in kinds.iter().enumerate() {
            let CollectiveKind::Copy { sends: to, .. } = kind else { panic!("{kind:?}") };
            for (j, r) in to.iter().enumerate() {
                let CollectiveKind::Copy { receives: from, .. } = &kinds[j] else { panic!("{kind:?}") };
                assert_eq!(*r, from[i], "{i} to {j}: sender and receiver disagree");
                assert!(r.is_zero || r.end_offsets().0 <= operands[i].len());
                assert!(r.end_offsets().1 <= out[j].len());
                for row in 0..r.rows {
                    let zeros = vec![0; r.row_bytes];
                    let from = r.from_offset + row * r.from_pitch;
                    let piece = if r.is_zero { &zeros } else { &operands[i][from..][..r.row_bytes] };
                    out[j][r.to_offset + row * r.to_pitch..][..r.row_bytes].copy_from_slice(piece);
                }
            }
        }
        out
    }

    /// A byte matrix whose values depend on the position.
    fn test_matrix(rows: usize, columns: usize) -> Vec<u8> {
        (0..rows * columns).map(|i| (i % 251) as u8 + 1).collect()
    }

    fn take_range(x: &[u8], (rows, columns): (usize, usize), dim: usize, range: &Range<usize>) -> Vec<u8> {
        let covered = |i: &usize| range.contains(&if dim == 0 { i / columns } else { i % columns });
        (0..rows * columns).filter(covered).map(|i| x[i]).collect()
    }

    #[test]
    fn all_gather_along_either_dim_restores_the_matrix() {
        for (members, dim, shape) in
            [(1, 0, (3, 4)), (2, 0, (7, 5)), (3, 1, (4, 10)), (5, 1, (3, 11)), (4, 1, (1, 8))]
        {
            let x = test_matrix(shape.0, shape.1);
            let parts = uneven_parts([shape.0, shape.1][dim], members);
            let operands: Vec<Vec<u8>> = parts.iter().map(|p| take_range(&x, shape, dim, p)).collect();
            let kinds: Vec<CollectiveKind> =
                (0..members).map(|m| CollectiveKind::all_gather(m, shape, dim, &parts, 1)).collect();
            for got in simulate_copies(&kinds, &operands, &vec![x.len(); members]) {
                assert_eq!(got, x, "{members} members, dim {dim}");
            }
        }
        // Equal contiguous parts map to NCCL's all-gather, other parts do not.
        let verb =
            |shape, dim, parts: &[Range<usize>]| match CollectiveKind::all_gather(0, shape, dim, parts, 2) {
                CollectiveKind::Copy { nccl_call: verb, .. } => verb,
                other => panic!("{other:?}"),
            };
        assert_eq!(verb((4, 3), 0, &[0..2, 2..4]), NcclCall::AllGather(12));
        assert_eq!(verb((1, 4), 1, &[0..2, 2..4]), NcclCall::AllGather(4));
        assert_eq!(verb((4, 4), 1, &[0..2, 2..4]), NcclCall::SendRecv);
        assert_eq!(verb((4, 3), 0, &[0..1, 1..4]), NcclCall::SendRecv);
    }

    #[test]
    fn all_to_all_changes_the_sharded_dim() {
        for (members, shape) in [(2, (6, 4)), (3, (7, 10)), (5, (5, 13))] {
            for concat_dim in [0, 1] {
                let x = test_matrix(shape.0, shape.1);
                let extent = [shape.0, shape.1];
                let (concat, split) = (
                    uneven_parts(extent[concat_dim], members),
                    uneven_parts(extent[1 - concat_dim], members),
                );
                let operands: Vec<Vec<u8>> =
                    concat.iter().map(|p| take_range(&x, shape, concat_dim, p)).collect();
                let want: Vec<Vec<u8>> =
                    split.iter().map(|p| take_range(&x, shape, 1 - concat_dim, p)).collect();
                let kinds: Vec<CollectiveKind> = (0..members)
                    .map(|m| CollectiveKind::all_to_all(m, shape, concat_dim, &concat, &split, 1))
                    .collect();
                let lens: Vec<usize> = want.iter().map(Vec::len).collect();
                assert_eq!(
                    simulate_copies(&kinds, &operands, &lens),
                    want,
                    "{members} members, dim {concat_dim}"
                );
            }
        }
    }

    #[test]
    fn a_halo_exchange_delivers_the_rows_beside_a_shard() {
        // Two frames of 5 rows of 3 bytes over members with 2, 1 and 2 rows.
        let (rows, row, frames) = ([2, 1, 2], 3, 2);
        let x = test_matrix(frames * 5, row);
        let line = |frame: usize, at: usize| x[(frame * 5 + at) * row..][..row].to_vec();
        let starts = [0, 2, 3];
        let shard = |m: usize| {
            let lines = (0..frames).flat_map(|f| (0..rows[m]).map(move |r| (f, r)));
            lines.flat_map(|(f, r)| line(f, starts[m] + r)).collect::<Vec<u8>>()
        };
        let operands: Vec<Vec<u8>> = (0..3).map(shard).collect();
        let kinds: Vec<CollectiveKind> =
            (0..3).map(|m| CollectiveKind::halo_exchange(m, &rows, frames, row)).collect();
        let zeros = || vec![0; row];
        let halo = |above: [Vec<u8>; 2], below: [Vec<u8>; 2]| {
            above.into_iter().zip(below).flat_map(|(a, b)| [a, b]).flatten().collect::<Vec<u8>>()
        };
        let want = vec![
            halo([zeros(), zeros()], [line(0, 2), line(1, 2)]),
            halo([line(0, 1), line(1, 1)], [line(0, 3), line(1, 3)]),
            halo([line(0, 2), line(1, 2)], [zeros(), zeros()]),
        ];
        assert_eq!(simulate_copies(&kinds, &operands, &[frames * 2 * row; 3]), want);
        let alone = [CollectiveKind::halo_exchange(0, &[5], frames, row)];
        assert_eq!(simulate_copies(&alone, &[x], &[frames * 2 * row]), [vec![0; frames * 2 * row]]);
    }

    #[test]
    fn broadcast_and_send_recv_deliver_the_operand() {
        let x = test_matrix(3, 3);
        let kinds: Vec<CollectiveKind> = (0..3).map(|m| CollectiveKind::broadcast_from(m, 3, 1, 9)).collect();
        assert_eq!(
            simulate_copies(&kinds, &[Vec::new(), x.clone(), Vec::new()], &[9; 3]),
            vec![x.clone(); 3]
        );
        let kinds: Vec<CollectiveKind> = (0..2).map(|m| CollectiveKind::send_recv(m, 9)).collect();
        assert_eq!(simulate_copies(&kinds, &[x.clone(), Vec::new()], &[0, 9]), vec![Vec::new(), x]);
    }

    #[test]
    fn noncontiguous_copies_need_staging() {
        let of = |kind: CollectiveKind, me: usize| {
            let dtype = DType::Bf16;
            let (peers_operand, peers_result) = (Vec::new(), Vec::new());
            GroupCollective {
                kind,
                dtype,
                operand: 0,
                result: 0,
                peer_operand_offsets: peers_operand,
                peer_result_offsets: peers_result,
                fingerprint: 0,
                op_index: 0,
                transport: None,
            }
            .staging_bytes(me)
        };
        let (concat, split) = ([0..2, 2..4], [0..3, 3..6]);
        // Rows of 6 bytes with a pitch of 12, which are contiguous in the result.
        assert_eq!(of(CollectiveKind::all_to_all(0, (4, 6), 0, &concat, &split, 2), 0), 256);
        assert_eq!(of(CollectiveKind::all_gather(0, (4, 3), 0, &[0..1, 1..4], 2), 0), 0);
        let scatter = |dim: usize, parts: Vec<Range<usize>>| CollectiveKind::ReduceScatter {
            rows: 4,
            columns: 200,
            dim,
            parts,
            reduction: Reduction::Sum,
        };
        assert_eq!(of(scatter(0, vec![0..2, 2..4]), 0), 0);
        assert_eq!(of(scatter(0, vec![0..1, 1..4]), 0), 2560 + 1280);
        assert_eq!(of(scatter(1, vec![0..100, 100..200]), 0), 1792 + 1024);
    }
}
