//! Kernels of a language model: rotary embedding, causal attention over pages, and the choice of the next id.

use tessera_base::random::philox4x32;

use super::page_table::PageTable;
use super::{Scratch, borrow_buffer};
use crate::Pool;
use crate::simd::{exp, sum_lanes, vectorized};

/// Rotates the heads of `x[b·n, h·head_dim]` by their positions: channels i and i + m of each head, or 2·i and
/// 2·i + 1 if they are `interleaved`, by position · `frequencies[i]`, for m frequencies. `start` holds the position of the first of the n rows of each
/// sequence. Angles are computed in f64.
///
/// # Panics
/// Panics if the rows do not divide among the sequences.
pub fn rotate_heads(
    pool: &Pool,
    out: &mut [f32],
    x: &[f32],
    (width, head_dim): (usize, usize),
    (frequencies, scale, interleaved): (&[f32], f32, bool),
    start: &[f32],
) {
    assert!(out.len() == x.len() && x.len().is_multiple_of(width * start.len()));
    let (rows, m) = (x.len() / width / start.len(), frequencies.len());
    pool.for_each_block(out, width, 8 * x.len(), |row, out| {
        let position = f64::from(start[row / rows]) + (row % rows) as f64;
        let rotations: Vec<(f32, f32)> = frequencies
            .iter()
            .map(|f| {
                let (sin, cos) = (position * f64::from(*f)).sin_cos();
                ((cos * f64::from(scale)) as f32, (sin * f64::from(scale)) as f32)
            })
            .collect();
        let x = &x[row * width..][..width];
        for (out, x) in out.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim)) {
            for (i, (cos, sin)) in rotations.iter().enumerate() {
                let (first, second) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + m) };
                let (a, b) = (x[first], x[second]);
                out[first] = a * cos - b * sin;
                out[second] = b * cos + a * sin;
            }
            out[2 * m..].copy_from_slice(&x[2 * m..]);
        }
    });
}

/// The heads of queries, and which KV heads they read.
#[derive(Debug, Clone, Copy)]
pub struct GroupedHeads {
    /// Columns of a row of queries.
    pub q_width: usize,
    /// Columns of a row of keys.
    pub kv_width: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// First columns of each head of the values that count.
    pub value_dim: usize,
    /// Number of query heads and of KV heads of all ranks.
    pub total: (usize, usize),
    /// Number of the first query head and of the first KV head of this rank among them.
    pub first: (usize, usize),
    /// Factor of the scores.
    pub scale: f32,
}

impl GroupedHeads {
    /// Returns which of the rank's KV heads one of its query heads reads.
    fn kv_head(&self, head: usize) -> usize {
        (self.first.0 + head) * self.total.1 / self.total.0 - self.first.1
    }
}

/// The positions that a query may attend to.
#[derive(Debug, Clone, Copy)]
pub struct CausalWindow {
    /// Last positions that a query attends to; all if `None`.
    pub window: Option<usize>,
    /// First positions that a query attends to in any case.
    pub sink: usize,
}

/// Computes causal attention of `q[b·n, h·head_dim]` over keys and values in pages. Rows of absent sequences, and
/// those for which no position has a page, are zeros.
///
/// The bits of a row depend on its own query and keys alone, and neither on the batch nor on threads.
pub fn paged_attention(
    pool: &Pool,
    scratch: &Scratch,
    out: &mut [f32],
    [q, k, v]: [&[f32]; 3],
    heads: GroupedHeads,
    table: &PageTable<'_>,
    causal: CausalWindow,
) {
    let GroupedHeads { q_width, kv_width, head_dim, value_dim, .. } = heads;
    let rows = q.len() / q_width / table.sequence_count();
    // The rows that hold what each query attends to are the same for all heads.
    let attended: Vec<Vec<usize>> = (0..table.sequence_count() * rows)
        .map(|row| {
            let Some(first) = table.first_position(row / rows) else { return Vec::new() };
            let positions = PageTable::attended_positions(first + row % rows, causal.window, causal.sink);
            positions.filter_map(|p| table.row_of(row / rows, p)).collect()
        })
        .collect();
    let most = attended.iter().map(Vec::len).max().unwrap_or(0);
    let work = 4 * q_width * attended.iter().map(Vec::len).sum::<usize>();
    pool.for_each_block(out, value_dim, work, |i, out| {
        let (row, head) = (i / (q_width / head_dim), i % (q_width / head_dim));
        let at = &attended[row];
        let q = &q[row * q_width + head * head_dim..][..head_dim];
        borrow_buffer(&scratch.spare, most, |scores| {
            let column = heads.kv_head(head) * head_dim;
            attend_head(out, q, k, v, at, (kv_width, column, heads.scale), &mut scores[..at.len()]);
        });
    });
}

vectorized! {
    /// Attends from one head of a query to the rows `at` of keys and values. `places` are their width, the
    /// column at which the head begins, and the factor of the scores.
    fn attend_head(
        out: &mut [f32], q: &[f32], k: &[f32], v: &[f32], at: &[usize],
        places: (usize, usize, f32), scores: &mut [f32],
    ) {
        let (width, column, scale) = places;
        let head_dim = q.len();
        out.fill(0.0);
        if at.is_empty() {
            return;
        }
        let mut largest = f32::NEG_INFINITY;
        for (score, row) in scores.iter_mut().zip(at) {
            *score = dot(q, &k[row * width + column..][..head_dim]) * scale;
            // A NaN must stay: `f32::max` would drop it.
            largest = if *score > largest || score.is_nan() { *score } else { largest };
        }
        for score in scores.iter_mut() {
            *score = exp(*score - largest);
        }
        let total = sum_lanes(scores, |x| x);
        for (score, row) in scores.iter().zip(at) {
            let value_dim = out.len();
            for (out, v) in out.iter_mut().zip(&v[row * width + column..][..value_dim]) {
                *out = score.mul_add(*v, *out);
            }
        }
        for out in out.iter_mut() {
            *out /= total;
        }
    }
}

/// Multiplies element by element and adds: 16 running sums, then a binary tree.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..16 {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane = a.mul_add(*b, *lane);
    }
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// Copies the rows of each sequence to the rows of a pool in which their positions lie.
///
/// # Panics
/// Panics if the rows do not divide among the sequences.
pub fn write_pages(pool: &mut [f32], x: &[f32], width: usize, table: &PageTable<'_>) {
    let rows = x.len() / width / table.sequence_count();
    assert!(x.len() == rows * width * table.sequence_count());
    for (i, x) in x.chunks_exact(width).enumerate() {
        let first = table.first_position(i / rows);
        if let Some(row) = first.and_then(|first| table.row_of(i / rows, first + i % rows)) {
            pool[row * width..][..width].copy_from_slice(x);
        }
    }
}

/// How the next token of a sequence is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingRule {
    /// Divisor of the logits; 0 takes the largest one.
    pub temperature: f32,
    /// Largest number of candidates; 0 for all.
    pub top_k: usize,
    /// Probability that the candidates must reach together.
    pub top_p: f32,
    /// Seed of the sequence's draws.
    pub seed: u32,
    /// Number of the draw.
    pub draw: u32,
}

/// Returns the id that a rule chooses among these logits, of which there must be one. NaN is never chosen unless
/// all logits are NaN.
#[must_use]
pub fn sample_id(logits: &[f32], rule: SamplingRule) -> usize {
    let is_better = |a: usize, b: usize| logits[a] > logits[b] || (logits[b].is_nan() && !logits[a].is_nan());
    if rule.temperature <= 0.0 {
        return (0..logits.len()).reduce(|best, i| if is_better(i, best) { i } else { best }).unwrap_or(0);
    }
    let mut ids: Vec<usize> = (0..logits.len()).filter(|i| !logits[*i].is_nan()).collect();
    ids.sort_unstable_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if rule.top_k > 0 {
        ids.truncate(rule.top_k);
    }
    let Some(best) = ids.first().map(|i| f64::from(logits[*i])) else { return 0 };
    let weight = |i: &usize| ((f64::from(logits[*i]) - best) / f64::from(rule.temperature)).exp();
    let weights: Vec<f64> = ids.iter().map(weight).collect();
    let total: f64 = weights.iter().sum();
    let mut kept = 0.0;
    let enough = f64::from(rule.top_p) * total;
    let count = weights.iter().position(|w| {
        kept += w;
        kept >= enough
    });
    let count = count.map_or(weights.len(), |last| last + 1);
    let target = draw_uniform(rule.seed, rule.draw) * weights[..count].iter().sum::<f64>();
    let mut sum = 0.0;
    let chosen = weights[..count].iter().position(|w| {
        sum += w;
        sum > target
    });
    ids[chosen.unwrap_or(count - 1)]
}

/// Returns the uniform number of a draw, in [0, 1): 53 bits of a Philox block.
fn draw_uniform(seed: u32, draw: u32) -> f64 {
    let [low, high, ..] = philox4x32([draw, 0, 0, u32::from_be_bytes(*b"samp")], [seed, 0]);
    ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: SamplingRule = SamplingRule { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7, draw: 0 };

    #[test]
    fn greedy_takes_the_largest_logit_and_the_lower_id_of_equal_ones() {
        let greedy = SamplingRule { temperature: 0.0, ..RULE };
        assert_eq!(sample_id(&[0.0, 3.0, 3.0, -1.0], greedy), 1);
        assert_eq!(sample_id(&[f32::NAN, -3.0, f32::NAN], greedy), 1);
    }

    #[test]
    fn samples_have_the_probabilities_of_the_logits() {
        let logits = [0.0, 1.0, 2.0, -1.0];
        let draws = 20_000;
        let count = |rule: SamplingRule| {
            let mut counts = [0_u32; 4];
            (0..draws).for_each(|draw| counts[sample_id(&logits, SamplingRule { draw, ..rule })] += 1);
            counts.map(|n| f64::from(n) / f64::from(draws))
        };
        let softmax = |t: f64, ids: &[usize]| {
            let weights: Vec<f64> = (0..4)
                .map(|i| if ids.contains(&i) { (f64::from(logits[i]) / t).exp() } else { 0.0 })
                .collect();
            let total: f64 = weights.iter().sum();
            weights.into_iter().map(|w| w / total).collect::<Vec<_>>()
        };
        for (rule, expected) in [
            (RULE, softmax(1.0, &[0, 1, 2, 3])),
            (SamplingRule { temperature: 0.5, ..RULE }, softmax(0.5, &[0, 1, 2, 3])),
            (SamplingRule { top_k: 2, ..RULE }, softmax(1.0, &[1, 2])),
            // The two likeliest have 0.64 + 0.24 of the probability.
            (SamplingRule { top_p: 0.8, ..RULE }, softmax(1.0, &[1, 2])),
            (SamplingRule { top_p: 0.5, ..RULE }, softmax(1.0, &[2])),
        ] {
            let found = count(rule);
            let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 0.015, "{rule:?}: {found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn draws_of_other_seeds_differ() {
        let logits = vec![0.0; 1000];
        let ids = |seed| {
            (0..50).map(|draw| sample_id(&logits, SamplingRule { seed, draw, ..RULE })).collect::<Vec<_>>()
        };
        assert_eq!(ids(1), ids(1));
        assert_ne!(ids(1), ids(2));
    }
}
