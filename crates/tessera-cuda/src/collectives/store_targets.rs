//! Destinations in peers' memory for a kernel that stores its result directly to the members of a
//! collective (communication fusion).

use super::copy_plan::CopyRect;
use super::kernel_launch::MAX_MEMBERS;
use crate::kernel_params::{KernelParam, ParamType};

/// Dim of the operand along which it is split among the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SplitDim {
    Rows,
    Columns,
}

/// Kernel argument with the layout of `Targets` in common.cuh.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Targets {
    by_member: [Target; MAX_MEMBERS],
    opened_flag: u64,
    members: u64,
}

/// One member's destination, with the layout of `Target` in common.cuh.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
struct Target {
    to: u64,
    pitch: u64,
    first: u32,
    count: u32,
}

/// Bytes of one store. The boundaries of every member's part must be multiples of this size.
const STORE_BYTES: u64 = 16;

impl Targets {
    /// Builds the destinations from each member's rectangle of the operand and result address.
    /// `opened_flag` is the address of the word that signals that results may be written. Returns
    /// `None` if the boundaries of a part are not multiples of 16 bytes.
    pub(super) fn from_rects(
        rects: &[CopyRect],
        results: &[u64],
        split_dim: SplitDim,
        element: u64,
        opened_flag: u64,
    ) -> Option<Targets> {
        let mut out = Targets { opened_flag, members: rects.len() as u64, ..Targets::default() };
        for (target, (rect, result)) in out.by_member.iter_mut().zip(rects.iter().zip(results)) {
            if rect.total_bytes() == 0 {
                continue;
            }
            let (from, pitch) = (rect.from_offset as u64, rect.from_pitch as u64);
            let to = result + rect.to_offset as u64;
            let ends = [to, rect.to_pitch as u64, from, rect.row_bytes as u64];
            if ends.iter().any(|e| !e.is_multiple_of(STORE_BYTES)) {
                return None;
            }
            let (first, count) = match split_dim {
                SplitDim::Rows if from.is_multiple_of(pitch) && rect.row_bytes as u64 == pitch => {
                    (from / pitch, rect.rows as u64)
                }
                SplitDim::Columns if from + rect.row_bytes as u64 <= pitch => {
                    (from / element, rect.row_bytes as u64 / element)
                }
                _ => return None,
            };
            *target = Target { to, pitch: rect.to_pitch as u64, first: first as u32, count: count as u32 };
        }
        Some(out)
    }
}

impl KernelParam for Targets {
    const TYPE: ParamType = ParamType::Value("Targets");
}

#[cfg(test)]
mod tests {
    use super::super::copy_plan::CollectiveKind;
    use super::*;

    /// Simulates all members' kernels storing their operands to their targets, and checks the
    /// results.
    fn simulate_stores(rows: usize, columns: usize, concat_dim: usize, members: usize) {
        let cut = |extent: usize, unit: usize| -> Vec<std::ops::Range<usize>> {
            let at = |m: usize| extent / unit * m / members * unit;
            (0..members).map(|m| at(m)..at(m + 1)).collect()
        };
        // Splits columns at multiples of 8: elements have 2 bytes, a store has 16.
        let (by_rows, by_columns) = (cut(rows, 1), cut(columns, 8));
        let (concat, split) = if concat_dim == 0 { (&by_rows, &by_columns) } else { (&by_columns, &by_rows) };
        let mut results: Vec<Vec<Option<(usize, usize)>>> = (0..members)
            .map(|m| {
                vec![None; if concat_dim == 0 { rows * split[m].len() } else { split[m].len() * columns }]
            })
            .collect();
        // The bases are far apart, so that an address identifies its result.
        let bases: Vec<u64> = (0..members as u64).map(|m| (m + 1) << 32).collect();
        for me in 0..members {
            let CollectiveKind::Copy { sends: to, .. } =
                CollectiveKind::all_to_all(me, (rows, columns), concat_dim, concat, split, 2)
            else {
                panic!("an all-to-all is a copy")
            };
            let along = if concat_dim == 0 { SplitDim::Columns } else { SplitDim::Rows };
            let t = Targets::from_rects(&to, &bases, along, 2, 64).expect("whole words");
            let (own_rows, own_columns) = if concat_dim == 0 {
                (by_rows[me].clone(), 0..columns)
            } else {
                (0..rows, by_columns[me].clone())
            };
            for (i, row) in own_rows.enumerate() {
                for (j, column) in own_columns.clone().enumerate() {
                    let at = if along == SplitDim::Rows { i } else { j };
                    let wanted = |t: &&Target| (t.first..t.first + t.count).contains(&(at as u32));
                    let t = t.by_member.iter().find(wanted).expect("some member wants it");
                    let (down, across) = match along {
                        SplitDim::Rows => (i - t.first as usize, j),
                        SplitDim::Columns => (i, j - t.first as usize),
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
    fn fused_stores_equal_the_all_to_all() {
        for (rows, columns, members) in [(7, 32, 2), (12, 40, 4), (5, 24, 3)] {
            simulate_stores(rows, columns, 0, members);
            simulate_stores(rows, columns, 1, members);
        }
    }

    #[test]
    fn unaligned_parts_are_not_fused() {
        let halves = [0..3, 3..6];
        let CollectiveKind::Copy { sends: to, .. } =
            CollectiveKind::all_to_all(0, (4, 6), 0, &[0..2, 2..4], &halves, 2)
        else {
            panic!("an all-to-all is a copy")
        };
        assert!(Targets::from_rects(&to, &[0, 1 << 32], SplitDim::Columns, 2, 0).is_none());
    }

    #[test]
    fn targets_have_the_kernel_layout() {
        assert_eq!(size_of::<Targets>(), 16 * 24 + 16);
    }
}
