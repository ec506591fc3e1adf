//! softmax(q · kᵀ / √head_dim + bias) · v, head by head, and the same with a bias by distance.
//!
//! Scores are stored transposed, keys by 32 queries: each query has a SIMD lane of its own, so
//! maximum, sum and both matmuls accumulate over the keys in one order, whatever the other queries,
//! heads or threads are.

mod distance_bias;

use super::{Scratch, borrow_buffer};
use crate::Pool;
use crate::simd::{
    BLOCK, LhsOperand, OutputTile, PANEL, RhsPanel, TILE_ROWS, exp, multiply_tile, pack_panel, vectorized,
};
pub use distance_bias::DistanceBias;
use std::ops::Range;

/// A constant that is added to the scores of some keys.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyBias {
    /// ln b, which multiplies the softmax weights of these keys by b.
    pub log_b: f32,
    /// The rows of k to which the bias applies.
    pub rows: Range<usize>,
}

/// Computes `out[N, dl]` from `q[N, dl]`, `k[R, dl]` and `v[R, dl]`; dl is a multiple of
/// `head_dim`.
///
/// # Panics
/// Panics if a length does not match or there are no keys.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    widths: (usize, usize),
    bias: Option<&KeyBias>,
) {
    let bias = bias.map_or(ScoreBias::None, ScoreBias::Keys);
    attend(pool, scratch, out, [q, k, v], widths, bias);
}

/// As [`attention`], with unscaled scores and a bias for each head and distance, which was expanded
/// for these numbers of queries and keys.
///
/// # Panics
/// Panics if a length does not match or there are no keys.
pub fn relative_attention(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    operands: [&[f32]; 3],
    widths: (usize, usize),
    bias: &DistanceBias,
) {
    attend(pool, scratch, out, operands, widths, ScoreBias::Distance(bias));
}

/// What an attention adds to its scores, and their scale.
#[derive(Debug, Clone, Copy)]
enum ScoreBias<'a> {
    /// The scores are q · k / √head_dim.
    None,
    /// As `None`, plus a constant for some keys.
    Keys(&'a KeyBias),
    /// The scores are q · k, plus a number for each head and distance.
    Distance(&'a DistanceBias),
}

fn attend(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    [q, k, v]: [&[f32]; 3],
    (dl, head_dim): (usize, usize),
    bias: ScoreBias<'_>,
) {
    let (n, keys) = (q.len() / dl, k.len() / dl);
    assert!(q.len() == n * dl && out.len() == q.len() && v.len() == k.len() && k.len() == keys * dl);
    assert!(
        dl.is_multiple_of(head_dim) && keys > 0,
        "attention over {keys} keys, {dl} by heads of {head_dim}"
    );
    if n == 0 {
        return;
    }
    let panels = head_dim.div_ceil(PANEL);
    let padded = panels * PANEL;
    let heads = dl / head_dim;
    let work = 4 * n * keys * dl;
    // Values are laid out `[heads, panels, keys, 32]`: each group of a few queries reads them once,
    // so strided access would cost.
    let values = scratch.packed.ensure_len(heads * padded * keys);
    pool.for_each_block(values, keys * PANEL, work / 16, |i, panel| {
        let column = i % panels * PANEL;
        let width = PANEL.min(head_dim - column);
        let first = i / panels * head_dim + column;
        for (to, from) in panel.chunks_exact_mut(PANEL).zip(v.chunks_exact(dl)) {
            to[..width].copy_from_slice(&from[first..first + width]);
            to[width..].fill(0.0);
        }
    });
    let inputs = AttentionInputs { k, values: scratch.packed.get(), dl, head_dim, keys, bias };
    let (blocks, spare) = (n.div_ceil(PANEL), &scratch.spare);
    // One part per (head, 32 queries), staged contiguously and copied out below.
    let part = PANEL * padded;
    let staged = scratch.staged.ensure_len(heads * blocks * part);
    pool.for_each_block(staged, part, work, |i, o| {
        let (head, first) = (i / blocks, i % blocks * PANEL);
        let rows = PANEL.min(n - first);
        borrow_buffer(spare, (head_dim + keys) * PANEL, |buffer| {
            let (queries, scores) = buffer.split_at_mut(head_dim * PANEL);
            pack_panel(&q[first * dl + head * head_dim..], dl, rows, head_dim, queries);
            let running_max = inputs.compute_scores(head, first, queries, scores);
            inputs.sum_weighted_values(head, rows, &running_max, scores, o);
        });
    });
    for (i, o) in scratch.staged.get().chunks_exact(part).enumerate() {
        let (head, first) = (i / blocks, i % blocks * PANEL);
        for r in 0..PANEL.min(n - first) {
            out[(first + r) * dl + head * head_dim..][..head_dim]
                .copy_from_slice(&o[r * padded..][..head_dim]);
        }
    }
}

/// The operands that every part of the output reads, with the values packed by head and panel.
struct AttentionInputs<'a> {
    k: &'a [f32],
    /// `[heads, panels, keys, 32]`.
    values: &'a [f32],
    dl: usize,
    head_dim: usize,
    keys: usize,
    bias: ScoreBias<'a>,
}

impl AttentionInputs<'_> {
    /// Computes the scores `[keys, 32]` of 32 packed queries, from number `first`, with all keys of a
    /// head, and returns the maximum of each query.
    fn compute_scores(&self, head: usize, first: usize, queries: &[f32], scores: &mut [f32]) -> [f32; PANEL] {
        let &AttentionInputs { k, dl, head_dim, keys, bias, .. } = self;
        let right = RhsPanel { data: queries, k_stride: PANEL };
        let scale = (head_dim as f32).sqrt().recip();
        let (log_b, biased) = match bias {
            ScoreBias::Keys(b) => (b.log_b, b.rows.clone()),
            ScoreBias::None | ScoreBias::Distance(_) => (0.0, 0..0),
        };
        let mut running_max = [f32::NEG_INFINITY; PANEL];
        for key in (0..keys).step_by(TILE_ROWS) {
            let left = LhsOperand { data: &k[key * dl + head * head_dim..], row_stride: dl, k_stride: 1 };
            let count = TILE_ROWS.min(keys - key);
            let data = &mut scores[key * PANEL..(key + count) * PANEL];
            let target = OutputTile { data, row_stride: PANEL, accumulate: false, bias: None };
            multiply_tile(count, left, right, head_dim, target);
            let data = &mut scores[key * PANEL..(key + count) * PANEL];
            match bias {
                ScoreBias::Distance(b) => b.add_to_scores(data, head, first, key, &mut running_max),
                _ => scale_scores(data, scale, log_b, biased.start, biased.end, key, &mut running_max),
            }
        }
        running_max
    }

    /// Replaces the scores by probabilities and writes the sums of the values, weighted by them, to
    /// the first `rows` rows of `o`.
    fn sum_weighted_values(
        &self,
        head: usize,
        rows: usize,
        running_max: &[f32; PANEL],
        scores: &mut [f32],
        o: &mut [f32],
    ) {
        let &AttentionInputs { values, head_dim, keys, .. } = self;
        let panels = head_dim.div_ceil(PANEL);
        let padded = panels * PANEL;
        // The probabilities of one block of keys are consumed while the L1 cache still contains
        // them.
        let mut sums = [0.0; PANEL];
        for key in (0..keys).step_by(BLOCK) {
            let count = BLOCK.min(keys - key);
            let weights = &mut scores[key * PANEL..(key + count) * PANEL];
            exp_scores(weights, running_max, &mut sums);
            for panel in 0..panels {
                let data = &values[((head * panels + panel) * keys + key) * PANEL..][..count * PANEL];
                let right = RhsPanel { data, k_stride: PANEL };
                for lane in (0..rows).step_by(TILE_ROWS) {
                    let left = LhsOperand { data: &weights[lane..], row_stride: 1, k_stride: PANEL };
                    let data = &mut o[lane * padded + panel * PANEL..];
                    let target = OutputTile { data, row_stride: padded, accumulate: key > 0, bias: None };
                    multiply_tile(TILE_ROWS.min(rows - lane), left, right, count, target);
                }
            }
        }
        for (row, sum) in o.chunks_exact_mut(padded).zip(&sums[..rows]) {
            let factor = sum.recip();
            row.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

vectorized! {
    /// Scales raw scores `[keys, 32]` of the keys from `first`, adds `log_b` to the scores of the
    /// keys `from..to`, and updates each lane's running maximum.
    fn scale_scores(
        scores: &mut [f32],
        factor: f32,
        log_b: f32,
        from: usize,
        to: usize,
        first: usize,
        running_max: &mut [f32; PANEL],
    ) {
        let (rows, _) = scores.as_chunks_mut::<PANEL>();
        let mut most = *running_max;
        for (i, row) in rows.iter_mut().enumerate() {
            let add = if first + i >= from && first + i < to { log_b } else { 0.0 };
            for l in 0..PANEL {
                row[l] = row[l].mul_add(factor, add);
                most[l] = if row[l] > most[l] { row[l] } else { most[l] };
            }
        }
        *running_max = most;
    }
}

vectorized! {
    /// Replaces scores `[keys, 32]` by unnormalised probabilities, and adds those to `sums`. The
    /// largest probability of a lane is 1.
    fn exp_scores(scores: &mut [f32], running_max: &[f32; PANEL], sums: &mut [f32; PANEL]) {
        let (rows, _) = scores.as_chunks_mut::<PANEL>();
        // Adds 64 keys at a time: one running sum over thousands of keys would lose the last bits.
        for block in rows.chunks_mut(64) {
            let mut part = [0.0f32; PANEL];
            for row in block {
                for l in 0..PANEL {
                    row[l] = exp(row[l] - running_max[l]);
                    part[l] += row[l];
                }
            }
            for l in 0..PANEL {
                sums[l] += part[l];
            }
        }
    }
}
