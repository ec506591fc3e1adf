//! What a collective moves: rectangles from one member's operand to another's result, or elements that become one.
//!
//! Matrices are row-major; a caller folds other dims into two. The same words as the CPU's collectives.

use std::ops::Range;

use tessera_ir::DType;
use tessera_mesh::Reduction;

/// A collective of a group, as one member takes part in it.
#[derive(Debug, Clone)]
pub(crate) struct Move {
    /// What it does.
    pub(crate) kind: Kind,
    /// Type of its elements.
    pub(crate) dtype: DType,
    /// Device address of this member's operand; of no meaning where it brings nothing.
    pub(crate) operand: u64,
    /// Device address of this member's result; of no meaning where it gets nothing.
    pub(crate) result: u64,
    /// Where every member's operand lies in its exchange memory. Told where peers read operands: by reductions.
    pub(crate) peers_operand: Vec<u64>,
    /// Where every member's result lies in its exchange memory.
    pub(crate) peers_result: Vec<u64>,
    /// Names the collective: the same on all members, and another for another collective.
    pub(crate) fingerprint: u32,
    /// Its number in reports; not `u32::MAX`.
    pub(crate) op: u32,
    /// By what it is moved.
    pub(crate) via: Via,
}

/// What moves a collective, where the program chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Via {
    /// Whatever is best for ranks that can reach one another's memory, NCCL for others.
    #[default]
    Best,
    /// A kernel of its own over peers' memory, NCCL for ranks that cannot reach one another's.
    Kernels,
    /// NCCL.
    Nccl,
}

/// Kinds of collectives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes change places.
    Copy {
        /// By member: what of this member's operand goes where in that member's result.
        to: Vec<Rect>,
        /// By member: what of that member's operand comes where in this member's result.
        from: Vec<Rect>,
        /// What NCCL would call it.
        verb: Verb,
    },
    /// Everybody gets the reduction of all.
    AllReduce {
        /// Of an operand.
        elements: usize,
        /// How.
        reduction: Reduction,
    },
    /// Member m gets `parts[m]` along `dim` of the reduction of all.
    ReduceScatter {
        /// Of an operand.
        rows: usize,
        /// Of an operand.
        columns: usize,
        /// 0 or 1.
        dim: usize,
        /// By member.
        parts: Vec<Range<usize>>,
        /// How.
        reduction: Reduction,
    },
}

/// A verb of NCCL that does the whole of a [`Kind::Copy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    /// Operands of so many bytes, one behind the other.
    AllGather(usize),
    /// So many bytes of one member.
    Broadcast(usize, usize),
    /// None: pieces are sent and received.
    Pieces,
}

/// Rows of equal length at two places. All in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rect {
    /// In the operand.
    pub(crate) from_offset: usize,
    /// From one row to the next in the operand.
    pub(crate) from_pitch: usize,
    /// In the result.
    pub(crate) to_offset: usize,
    /// From one row to the next in the result.
    pub(crate) to_pitch: usize,
    /// Of a row.
    pub(crate) row_bytes: usize,
    /// How many; none where nothing is moved.
    pub(crate) rows: usize,
}

impl Rect {
    /// Bytes behind one another on both sides.
    pub(crate) fn run(from_offset: usize, to_offset: usize, bytes: usize) -> Rect {
        let rows = usize::from(bytes > 0);
        Rect { from_offset, from_pitch: bytes, to_offset, to_pitch: bytes, row_bytes: bytes, rows }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }

    /// First byte behind it in the operand, and in the result.
    pub(crate) fn ends(&self) -> (usize, usize) {
        if self.bytes() == 0 {
            return (0, 0);
        }
        let end = |offset: usize, pitch: usize| offset + (self.rows - 1) * pitch + self.row_bytes;
        (end(self.from_offset, self.from_pitch), end(self.to_offset, self.to_pitch))
    }

    /// Whether its rows follow one another in the operand, and in the result.
    pub(crate) fn contiguous(&self) -> (bool, bool) {
        let one = self.rows <= 1;
        (one || self.from_pitch == self.row_bytes, one || self.to_pitch == self.row_bytes)
    }
}

impl Kind {
    /// `[rows, columns]` from parts: member m brings `parts[m]` of `dim`.
    pub(crate) fn all_gather(
        me: usize,
        (rows, columns): (usize, usize),
        dim: usize,
        parts: &[Range<usize>],
        element: usize,
    ) -> Kind {
        let rect = |m: usize| {
            let part = &parts[m];
            if dim == 0 {
                return Rect::run(0, part.start * columns * element, part.len() * columns * element);
            }
            Rect {
                from_offset: 0,
                from_pitch: part.len() * element,
                to_offset: part.start * element,
                to_pitch: columns * element,
                row_bytes: part.len() * element,
                rows: if part.is_empty() { 0 } else { rows },
            }
        };
        let first = rect(0).bytes();
        let behind = |m: usize| dim == 0 || rows == 1 || parts[m].len() == columns;
        let even =
            (0..parts.len()).all(|m| behind(m) && rect(m).bytes() == first && rect(m).to_offset == m * first);
        let verb = if even { Verb::AllGather(first) } else { Verb::Pieces };
        Kind::Copy { to: vec![rect(me); parts.len()], from: (0..parts.len()).map(rect).collect(), verb }
    }

    /// Exchanges which dim is cut. Before, member m holds `concat[m]` of dim `concat_dim` and all of the other; after, it
    /// holds `split[m]` of the other and all of `concat_dim`. `(rows, columns)` are those of the whole.
    pub(crate) fn all_to_all(
        me: usize,
        (rows, columns): (usize, usize),
        concat_dim: usize,
        concat: &[Range<usize>],
        split: &[Range<usize>],
        element: usize,
    ) -> Kind {
        let rect = |from: usize, to: usize| {
            let (held, got) = (&concat[from], &split[to]);
            let rect = if concat_dim == 0 {
                Rect {
                    from_offset: got.start,
                    from_pitch: columns,
                    to_offset: held.start * got.len(),
                    to_pitch: got.len(),
                    row_bytes: got.len(),
                    rows: held.len(),
                }
            } else {
                Rect {
                    from_offset: got.start * held.len(),
                    from_pitch: held.len(),
                    to_offset: held.start,
                    to_pitch: columns,
                    row_bytes: held.len(),
                    rows: got.len(),
                }
            };
            debug_assert!(rows >= held.len().min(got.len()));
            Rect {
                from_offset: rect.from_offset * element,
                from_pitch: rect.from_pitch * element,
                to_offset: rect.to_offset * element,
                to_pitch: rect.to_pitch * element,
                row_bytes: rect.row_bytes * element,
                rows: if rect.row_bytes == 0 { 0 } else { rect.rows },
            }
        };
        let members = 0..concat.len();
        Kind::Copy {
            to: members.clone().map(|m| rect(me, m)).collect(),
            from: members.map(|m| rect(m, me)).collect(),
            verb: Verb::Pieces,
        }
    }

    /// Everybody, the root too, gets what the root brings.
    pub(crate) fn broadcast(me: usize, members: usize, root: usize, bytes: usize) -> Kind {
        let whole = Rect::run(0, 0, bytes);
        let to = if me == root { whole } else { Rect::default() };
        let from = (0..members).map(|m| if m == root { whole } else { Rect::default() });
        Kind::Copy { to: vec![to; members], from: from.collect(), verb: Verb::Broadcast(root, bytes) }
    }

    /// In a group of two, member 0 sends and member 1 gets it.
    pub(crate) fn transfer(me: usize, bytes: usize) -> Kind {
        let (none, whole) = (Rect::default(), Rect::run(0, 0, bytes));
        let (to, from) =
            if me == 0 { (vec![none, whole], vec![none; 2]) } else { (vec![none; 2], vec![whole, none]) };
        Kind::Copy { to, from, verb: Verb::Pieces }
    }
}

impl Move {
    /// Memory that a group needs beside operands and results to do this through NCCL.
    pub(crate) fn staging_bytes(&self, me: usize) -> usize {
        let held = |bytes: usize| bytes.next_multiple_of(STAGING_ALIGN);
        match &self.kind {
            Kind::Copy { verb: Verb::AllGather(_) | Verb::Broadcast(..), .. } | Kind::AllReduce { .. } => 0,
            Kind::Copy { to, from, .. } => {
                let packed = |rects: &[Rect], side: fn(&Rect) -> bool| -> usize {
                    let others = rects.iter().enumerate().filter(|(m, r)| *m != me && !side(r));
                    others.map(|(_, r)| held(r.bytes())).sum()
                };
                packed(to, |r| r.contiguous().0) + packed(from, |r| r.contiguous().1)
            }
            Kind::ReduceScatter { rows, columns, dim, parts, .. } => {
                let Some(scatter) = Scatter::of((*rows, *columns), *dim, parts) else { return 0 };
                let bytes = scatter.largest * self.dtype.bytes() as usize;
                held(parts.len() * bytes) + held(bytes)
            }
        }
    }

    /// Whether every piece is worth a copy engine, which begins late.
    pub(crate) fn worth_engines(&self) -> bool {
        let worth =
            |r: &Rect| r.bytes() == 0 || (r.row_bytes >= ENGINE_ROW_BYTES && r.bytes() >= ENGINE_BYTES);
        matches!(&self.kind, Kind::Copy { to, .. } if to.iter().all(worth))
    }
}

/// Bytes of a piece, and of a row of it, from which copy engines are worth their start.
const ENGINE_BYTES: usize = 256 << 10;
const ENGINE_ROW_BYTES: usize = 512;

/// Alignment of a piece in staging memory, in bytes.
pub(crate) const STAGING_ALIGN: usize = 256;

/// A reduction whose parts do not lie as NCCL wants them, one behind the other and of equal length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scatter {
    /// Elements of the largest part.
    pub(crate) largest: usize,
}

impl Scatter {
    pub(crate) fn of((rows, columns): (usize, usize), dim: usize, parts: &[Range<usize>]) -> Option<Scatter> {
        let across = if dim == 0 { columns } else { rows };
        let largest = parts.iter().map(|p| p.len() * across).max().unwrap_or(0);
        let behind = dim == 0 || rows == 1;
        let even = parts
            .iter()
            .enumerate()
            .all(|(m, p)| p.len() * across == largest && p.start * across == m * largest);
        (!(behind && even)).then_some(Scatter { largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of `extent`, of lengths that differ, one of them empty where there are many.
    fn parts(extent: usize, members: usize) -> Vec<Range<usize>> {
        let cut = |m: usize| if members > 3 && m == 2 { extent / members } else { extent * m / members };
        (0..members).map(|m| cut(m)..if m + 1 == members { extent } else { cut(m + 1) }).collect()
    }

    /// What members get when every one does what its kind says, in bytes.
    fn play(kinds: &[Kind], operands: &[Vec<u8>], lens: &[usize]) -> Vec<Vec<u8>> {
        let mut out: Vec<Vec<u8>> = lens.iter().map(|l| vec![0; *l]).collect();
        for (i, kind) in kinds.iter().enumerate() {
            let Kind::Copy { to, .. } = kind else { panic!("{kind:?}") };
            for (j, r) in to.iter().enumerate() {
                let Kind::Copy { from, .. } = &kinds[j] else { panic!("{kind:?}") };
                assert_eq!(*r, from[i], "from {i} to {j}: both ends say the same");
                assert!(r.ends().0 <= operands[i].len() && r.ends().1 <= out[j].len());
                for row in 0..r.rows {
                    let piece = &operands[i][r.from_offset + row * r.from_pitch..][..r.row_bytes];
                    out[j][r.to_offset + row * r.to_pitch..][..r.row_bytes].copy_from_slice(piece);
                }
            }
        }
        out
    }

    /// `[rows, columns]` of bytes that say where they are, and the part of it that a range of a dim covers.
    fn whole(rows: usize, columns: usize) -> Vec<u8> {
        (0..rows * columns).map(|i| (i % 251) as u8 + 1).collect()
    }

    fn take(x: &[u8], (rows, columns): (usize, usize), dim: usize, range: &Range<usize>) -> Vec<u8> {
        let covered = |i: &usize| range.contains(&if dim == 0 { i / columns } else { i % columns });
        (0..rows * columns).filter(covered).map(|i| x[i]).collect()
    }

    #[test]
    fn parts_gathered_along_either_dim_are_the_whole() {
        for (members, dim, shape) in
            [(1, 0, (3, 4)), (2, 0, (7, 5)), (3, 1, (4, 10)), (5, 1, (3, 11)), (4, 1, (1, 8))]
        {
            let x = whole(shape.0, shape.1);
            let parts = parts([shape.0, shape.1][dim], members);
            let operands: Vec<Vec<u8>> = parts.iter().map(|p| take(&x, shape, dim, p)).collect();
            let kinds: Vec<Kind> = (0..members).map(|m| Kind::all_gather(m, shape, dim, &parts, 1)).collect();
            for got in play(&kinds, &operands, &vec![x.len(); members]) {
                assert_eq!(got, x, "{members} members, dim {dim}");
            }
        }
        // Equal parts that lie one behind the other are NCCL's own verb, and others are not.
        let verb = |shape, dim, parts: &[Range<usize>]| match Kind::all_gather(0, shape, dim, parts, 2) {
            Kind::Copy { verb, .. } => verb,
            other => panic!("{other:?}"),
        };
        assert_eq!(verb((4, 3), 0, &[0..2, 2..4]), Verb::AllGather(12));
        assert_eq!(verb((1, 4), 1, &[0..2, 2..4]), Verb::AllGather(4));
        assert_eq!(verb((4, 4), 1, &[0..2, 2..4]), Verb::Pieces);
        assert_eq!(verb((4, 3), 0, &[0..1, 1..4]), Verb::Pieces);
    }

    #[test]
    fn an_exchange_changes_which_dim_is_cut() {
        for (members, shape) in [(2, (6, 4)), (3, (7, 10)), (5, (5, 13))] {
            for concat_dim in [0, 1] {
                let x = whole(shape.0, shape.1);
                let extent = [shape.0, shape.1];
                let (concat, split) =
                    (parts(extent[concat_dim], members), parts(extent[1 - concat_dim], members));
                let operands: Vec<Vec<u8>> = concat.iter().map(|p| take(&x, shape, concat_dim, p)).collect();
                let want: Vec<Vec<u8>> = split.iter().map(|p| take(&x, shape, 1 - concat_dim, p)).collect();
                let kinds: Vec<Kind> = (0..members)
                    .map(|m| Kind::all_to_all(m, shape, concat_dim, &concat, &split, 1))
                    .collect();
                let lens: Vec<usize> = want.iter().map(Vec::len).collect();
                assert_eq!(play(&kinds, &operands, &lens), want, "{members} members, dim {concat_dim}");
            }
        }
    }

    #[test]
    fn one_member_tells_all_or_one() {
        let x = whole(3, 3);
        let kinds: Vec<Kind> = (0..3).map(|m| Kind::broadcast(m, 3, 1, 9)).collect();
        assert_eq!(play(&kinds, &[Vec::new(), x.clone(), Vec::new()], &[9; 3]), vec![x.clone(); 3]);
        let kinds: Vec<Kind> = (0..2).map(|m| Kind::transfer(m, 9)).collect();
        assert_eq!(play(&kinds, &[x.clone(), Vec::new()], &[0, 9]), vec![Vec::new(), x]);
    }

    #[test]
    fn staging_is_asked_for_what_is_not_in_one_piece() {
        let of = |kind: Kind, me: usize| {
            let dtype = DType::Bf16;
            let (peers_operand, peers_result) = (Vec::new(), Vec::new());
            let via = Via::Best;
            Move {
                kind,
                dtype,
                operand: 0,
                result: 0,
                peers_operand,
                peers_result,
                fingerprint: 0,
                op: 0,
                via,
            }
            .staging_bytes(me)
        };
        let (concat, split) = ([0..2, 2..4], [0..3, 3..6]);
        // Rows of 6 bytes out of rows of 12; they arrive one behind the other.
        assert_eq!(of(Kind::all_to_all(0, (4, 6), 0, &concat, &split, 2), 0), 256);
        assert_eq!(of(Kind::all_gather(0, (4, 3), 0, &[0..1, 1..4], 2), 0), 0);
        let scatter = |dim: usize, parts: Vec<Range<usize>>| Kind::ReduceScatter {
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
