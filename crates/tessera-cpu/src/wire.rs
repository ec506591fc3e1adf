//! Rows of numbers as e4m3 with one scale per block, as a collective sends them.
//!
//! A row travels as words of four e4m3 numbers, followed by the scales of its blocks. Words are moved and never
//! computed with, so that a transport of f32 keeps their bits.

use tessera_device::dtype::{from_e4m3_bits, to_e4m3_bits};
use tessera_ir::WIRE_BLOCK;

const LARGEST: f32 = 448.0;

/// Returns the words of a row of this width.
#[must_use]
pub fn words_per_row(width: usize) -> usize {
    width.div_ceil(4) + width.div_ceil(WIRE_BLOCK)
}

/// Encodes rows of this width. A scale is the largest magnitude of its block divided by 448, or 1 for a block of
/// zeros.
#[must_use]
pub fn encode_rows(x: &[f32], width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len() / width.max(1) * words_per_row(width));
    for row in x.chunks_exact(width.max(1)) {
        encode_row(row, &mut out);
    }
    out
}

/// Appends the words of a row, as [`encode_rows`] encodes it.
pub fn encode_row(row: &[f32], out: &mut Vec<f32>) {
    let scales = row.chunks(WIRE_BLOCK).map(block_scale);
    let mut bytes = row
        .chunks(WIRE_BLOCK)
        .zip(scales.clone())
        .flat_map(|(block, scale)| block.iter().map(move |x| to_e4m3_bits(x / scale)));
    for _ in 0..row.len().div_ceil(4) {
        let word = [0; 4].map(|_: u8| bytes.next().unwrap_or(0));
        out.push(f32::from_bits(u32::from_le_bytes(word)));
    }
    out.extend(scales);
}

fn block_scale(block: &[f32]) -> f32 {
    // A block whose scale is below the smallest number of f32 is a block of zeros.
    match block.iter().fold(0.0, |m: f32, x| m.max(x.abs())) / LARGEST {
        0.0 => 1.0,
        scale => scale,
    }
}

/// Decodes rows of this width from their words.
pub fn decode_rows(out: &mut [f32], words: &[f32], width: usize) {
    let rows = words.chunks_exact(words_per_row(width).max(1));
    for (row, words) in out.chunks_exact_mut(width.max(1)).zip(rows) {
        let (numbers, scales) = words.split_at(width.div_ceil(4));
        for (block, (out, scale)) in row.chunks_mut(WIRE_BLOCK).zip(scales).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                let at = block * WIRE_BLOCK + i;
                let byte = numbers[at / 4].to_bits().to_le_bytes()[at % 4];
                *out = from_e4m3_bits(byte) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize, width: usize) -> Vec<f32> {
        (0..count * width)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * 10.0_f32.powi((i % 5) as i32 - 3))
            .collect()
    }

    fn decode(words: &[f32], count: usize, width: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; count * width];
        decode_rows(&mut out, words, width);
        out
    }

    #[test]
    fn every_number_returns_within_half_a_step_of_e4m3() {
        for width in [3, 128, 130, 300] {
            let x = rows(5, width);
            let words = encode_rows(&x, width);
            assert_eq!(words.len(), 5 * words_per_row(width));
            let found = decode(&words, 5, width);
            for (row, found) in x.chunks(width).zip(found.chunks(width)) {
                for (block, found) in row.chunks(WIRE_BLOCK).zip(found.chunks(WIRE_BLOCK)) {
                    let scale = block_scale(block);
                    for (x, y) in block.iter().zip(found) {
                        // Normal numbers have three bits behind the point; the others are multiples of 2⁻⁹.
                        assert!((x - y).abs() <= x.abs() / 16.0 + scale * 0.5_f32.powi(10), "{x} became {y}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_corrupted_scale_changes_its_block_alone() {
        let (width, count) = (300, 4);
        let x = rows(count, width);
        let mut words = encode_rows(&x, width);
        let before = decode(&words, count, width);
        // The second scale of the third row.
        let at = 2 * words_per_row(width) + width.div_ceil(4) + 1;
        words[at] *= 2.0;
        let after = decode(&words, count, width);
        let block = 2 * width + WIRE_BLOCK..2 * width + 2 * WIRE_BLOCK;
        for i in 0..before.len() {
            let expected = if block.contains(&i) { 2.0 * before[i] } else { before[i] };
            assert_eq!(after[i], expected, "element {i}");
        }
        assert_ne!(before[block.clone()], after[block]);
    }
}
