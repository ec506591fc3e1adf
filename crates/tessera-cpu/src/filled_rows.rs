//! Contributions to an exchange of expert slots: only the rows that hold something travel.
//!
//! An expert has as many slots as the plan gives it, and a call fills some of them; the others are zeros by the meaning
//! of the ops that write them. A contribution names its filled rows in a bit mask and holds these rows alone, so the
//! bytes follow the routing while every shape stays that of the plan. A row counts as empty if all its bits are zero,
//! so the result has the bits of an exchange of all rows. The alternative, to pass the counts of the slots as an
//! operand, would tie the collective to the ops of experts, and a receiver would still need the counts of slots that
//! other members receive to find its own.

use tessera_ir::{Op, Opcode, Type};
use tessera_mesh::Axis;

use crate::collectives::Contribution;

/// Rows that one word of the mask describes.
const ROWS_PER_WORD: usize = 32;

/// Whether a collective exchanges tensors of at least three dims, as slots of experts [experts, slots, width] are, whose
/// empty rows need not travel. Other tensors of that rank keep their bits, and pay for the mask.
#[must_use]
pub fn exchanges_slots(op: &Op, operand: &Type) -> bool {
    op.opcode == Opcode::AllToAll
        && matches!(op.mesh_axis(), Some(Axis::Ep | Axis::Tp))
        && operand.shape.len() >= 3
}

/// Returns the number of mask words in front of a contribution of `rows` rows.
#[must_use]
pub fn mask_words(rows: usize) -> usize {
    rows.div_ceil(ROWS_PER_WORD)
}

/// Packs the rows of `width` elements that are not zeros behind their mask. `encode` turns a row into the words that
/// travel.
pub(crate) fn pack_rows(x: &[f32], width: usize, mut encode: impl FnMut(&[f32], &mut Vec<f32>)) -> Vec<f32> {
    let rows = x.chunks_exact(width.max(1));
    let mut mask = vec![0_u32; mask_words(rows.len())];
    let mut packed = vec![0.0; mask.len()];
    for (row, values) in rows.enumerate() {
        if values.iter().any(|x| x.to_bits() != 0) {
            mask[row / ROWS_PER_WORD] |= 1 << (row % ROWS_PER_WORD);
            encode(values, &mut packed);
        }
    }
    for (word, bits) in packed.iter_mut().zip(mask) {
        *word = f32::from_bits(bits);
    }
    packed
}

/// A contribution of packed rows, read as if it held every row.
#[derive(Debug)]
pub(crate) struct FilledRows<'a> {
    /// Number of filled rows before each row, and in all.
    filled_before: Vec<usize>,
    words: &'a [f32],
    width: usize,
}

impl<'a> FilledRows<'a> {
    /// Reads a contribution of `rows` rows of `width` words each. Returns `None` if its mask and its length differ.
    pub(crate) fn read(contribution: &'a [f32], rows: usize, width: usize) -> Option<FilledRows<'a>> {
        let (mask, words) = contribution.split_at_checked(mask_words(rows))?;
        let mut filled_before = Vec::with_capacity(rows + 1);
        let mut filled = 0;
        for row in 0..rows {
            filled_before.push(filled);
            filled += (mask[row / ROWS_PER_WORD].to_bits() >> (row % ROWS_PER_WORD) & 1) as usize;
        }
        filled_before.push(filled);
        (words.len() == filled * width).then_some(FilledRows { filled_before, words, width })
    }
}

impl Contribution for FilledRows<'_> {
    fn element_count(&self) -> usize {
        (self.filled_before.len() - 1) * self.width
    }

    /// Copies whole rows.
    fn copy_to(&self, out: &mut [f32], from: usize) {
        assert!(from.is_multiple_of(self.width) && out.len().is_multiple_of(self.width), "a part of a row");
        for (i, out) in out.chunks_exact_mut(self.width).enumerate() {
            let row = from / self.width + i;
            match self.filled_before[row] == self.filled_before[row + 1] {
                true => out.fill(0.0),
                false => {
                    out.copy_from_slice(&self.words[self.filled_before[row] * self.width..][..self.width])
                }
            }
        }
    }
}

/// Returns the words of those of the rows `parts` that a contribution holds, without its mask.
pub(crate) fn words_of_rows(
    packed: &[f32],
    rows: usize,
    width: usize,
    parts: &mut dyn Iterator<Item = usize>,
) -> usize {
    let mask = &packed[..mask_words(rows)];
    let is_filled = |row: &usize| mask[row / ROWS_PER_WORD].to_bits() >> (row % ROWS_PER_WORD) & 1 == 1;
    parts.filter(is_filled).count() * width
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy_row(row: &[f32], out: &mut Vec<f32>) {
        out.extend_from_slice(row);
    }

    #[test]
    fn rows_come_back_with_their_bits_and_empty_ones_do_not_travel() {
        let rows = 67;
        // Some rows are zeros, one holds a negative zero alone, which is not the bits of zero.
        let mut x = vec![0.0_f32; rows * 3];
        for row in [0, 31, 32, 40, 66] {
            x[row * 3 + row % 3] = row as f32 + 0.5;
        }
        x[50 * 3 + 1] = -0.0;
        let packed = pack_rows(&x, 3, copy_row);
        assert_eq!(packed.len(), 3 + 6 * 3);
        assert_eq!(words_of_rows(&packed, rows, 3, &mut (0..40)), 3 * 3);
        let read = FilledRows::read(&packed, rows, 3).map(|read| {
            let mut out = vec![f32::NAN; rows * 3];
            read.copy_to(&mut out, 0);
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert_eq!(read, Some(x.iter().map(|x| x.to_bits()).collect()));
        assert!(FilledRows::read(&packed[..packed.len() - 1], rows, 3).is_none(), "a row is missing");
        assert!(FilledRows::read(&packed[..2], rows, 3).is_none(), "a part of the mask is missing");
    }
}
