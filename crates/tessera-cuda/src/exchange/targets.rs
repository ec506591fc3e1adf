//! Where members want what a kernel makes: a collective of pieces without a launch that moves them.

use super::launch::MOST;
use super::moves::Rect;

/// Along which dim of the operand its pieces follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Along {
    Rows,
    Columns,
}

/// As `Targets` of common.cuh.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Targets {
    of: [Target; MOST],
    going: u64,
    members: u64,
}

/// As `Target` of common.cuh.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct Target {
    to: u64,
    pitch: u64,
    first: u32,
    count: u32,
}

/// Bytes that a kernel writes at once: every piece must begin and end between two of them.
const UNIT: u64 = 16;

impl Targets {
    /// Pieces of an operand, by member, and where each result lies; `going` is the word that says that results may be
    /// written. None where a piece does not begin and end with whole words of 16 bytes.
    pub(super) fn of(
        rects: &[Rect],
        results: &[u64],
        along: Along,
        element: u64,
        going: u64,
    ) -> Option<Targets> {
        let mut out = Targets { going, members: rects.len() as u64, ..Targets::default() };
        for (target, (rect, result)) in out.of.iter_mut().zip(rects.iter().zip(results)) {
            if rect.bytes() == 0 {
                continue;
            }
            let (from, pitch) = (rect.from_offset as u64, rect.from_pitch as u64);
            let to = result + rect.to_offset as u64;
            let ends = [to, rect.to_pitch as u64, from, rect.row_bytes as u64];
            if ends.iter().any(|e| !e.is_multiple_of(UNIT)) {
                return None;
            }
            let (first, count) = match along {
                Along::Rows if from.is_multiple_of(pitch) && rect.row_bytes as u64 == pitch => {
                    (from / pitch, rect.rows as u64)
                }
                Along::Columns if from + rect.row_bytes as u64 <= pitch => {
                    (from / element, rect.row_bytes as u64 / element)
                }
                _ => return None,
            };
            *target = Target { to, pitch: rect.to_pitch as u64, first: first as u32, count: count as u32 };
        }
        Some(out)
    }

    /// As an argument of a kernel.
    pub(crate) fn words(&self) -> Vec<u64> {
        let of = self.of.iter().flat_map(|t| [t.to, t.pitch, u64::from(t.first) | u64::from(t.count) << 32]);
        of.chain([self.going, self.members]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::moves::Kind;
    use super::*;

    /// What reaches members' results when every member's kernel writes its operand by its targets.
    fn play(rows: usize, columns: usize, concat_dim: usize, members: usize) {
        let cut = |extent: usize, unit: usize| -> Vec<std::ops::Range<usize>> {
            let at = |m: usize| extent / unit * m / members * unit;
            (0..members).map(|m| at(m)..at(m + 1)).collect()
        };
        // Columns of two bytes, in units of sixteen.
        let (by_rows, by_columns) = (cut(rows, 1), cut(columns, 8));
        let (concat, split) = if concat_dim == 0 { (&by_rows, &by_columns) } else { (&by_columns, &by_rows) };
        let mut results: Vec<Vec<Option<(usize, usize)>>> = (0..members)
            .map(|m| {
                vec![None; if concat_dim == 0 { rows * split[m].len() } else { split[m].len() * columns }]
            })
            .collect();
        // Bases far enough apart to tell results by address.
        let bases: Vec<u64> = (0..members as u64).map(|m| (m + 1) << 32).collect();
        for me in 0..members {
            let Kind::Copy { to, .. } = Kind::all_to_all(me, (rows, columns), concat_dim, concat, split, 2)
            else {
                panic!("pieces change places")
            };
            let along = if concat_dim == 0 { Along::Columns } else { Along::Rows };
            let t = Targets::of(&to, &bases, along, 2, 64).expect("whole words");
            let (own_rows, own_columns) = if concat_dim == 0 {
                (by_rows[me].clone(), 0..columns)
            } else {
                (0..rows, by_columns[me].clone())
            };
            for (i, row) in own_rows.enumerate() {
                for (j, column) in own_columns.clone().enumerate() {
                    let at = if along == Along::Rows { i } else { j };
                    let wanted = |t: &&Target| (t.first..t.first + t.count).contains(&(at as u32));
                    let t = t.of.iter().find(wanted).expect("some member wants it");
                    let (down, across) = match along {
                        Along::Rows => (i - t.first as usize, j),
                        Along::Columns => (i, j - t.first as usize),
                    };
                    let address = t.to + down as u64 * t.pitch + 2 * across as u64;
                    let (member, place) =
                        ((address >> 32) as usize - 1, (address & 0xffff_ffff) as usize / 2);
                    assert_eq!(results[member][place].replace((row, column)), None);
                }
            }
        }
        for (m, result) in results.iter().enumerate() {
            let whole = |i: usize| match concat_dim {
                0 => (i / split[m].len(), split[m].start + i % split[m].len()),
                _ => (split[m].start + i / columns, i % columns),
            };
            assert!(result.iter().enumerate().all(|(i, at)| *at == Some(whole(i))), "member {m}");
        }
    }

    #[test]
    fn kernels_write_what_the_exchange_would_move() {
        for (rows, columns, members) in [(7, 32, 2), (12, 40, 4), (5, 24, 3)] {
            play(rows, columns, 0, members);
            play(rows, columns, 1, members);
        }
    }

    #[test]
    fn pieces_that_end_within_a_word_are_left_to_the_exchange() {
        let halves = [0..3, 3..6];
        let Kind::Copy { to, .. } = Kind::all_to_all(0, (4, 6), 0, &[0..2, 2..4], &halves, 2) else {
            panic!("pieces change places")
        };
        assert!(Targets::of(&to, &[0, 1 << 32], Along::Columns, 2, 0).is_none());
    }

    #[test]
    fn they_lie_as_the_kernels_read_them() {
        assert_eq!(size_of::<Targets>(), 16 * 24 + 16);
        assert_eq!(Targets::default().words().len() * 8, size_of::<Targets>());
    }
}
