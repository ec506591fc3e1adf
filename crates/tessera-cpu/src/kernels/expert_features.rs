//! Kernels that change what a router prefers: penalties by distance, and choices that a draw leaves out.

use tessera_base::random::philox4x32;
use tessera_ir::RouterScore;

use super::experts::score_experts;
use super::row_span::RowSpan;

/// Subtracts `weight` from the logits of experts outside of the token's locality group. The groups are those of the
/// homes of tokens, and of experts.
pub fn expert_locality(
    out: &mut [f32],
    logits: &[f32],
    span: RowSpan,
    (homes, experts): (&[u64], &[u64]),
    weight: f64,
) {
    let rows = out.chunks_exact_mut(experts.len()).zip(logits.chunks_exact(experts.len()));
    for (row, (out, logits)) in rows.enumerate() {
        let own = homes[span.home_of(row, homes.len())];
        for ((out, x), group) in out.iter_mut().zip(logits).zip(experts) {
            *out = if *group == own { *x } else { *x - weight as f32 };
        }
    }
}

/// The distances between homes, and the homes of experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertDistances<'a> {
    /// A number for each pair of homes.
    pub distances: &'a [u64],
    /// The home of each expert.
    pub expert_homes: &'a [u64],
}

impl ExpertDistances<'_> {
    /// Writes the softmax of a row of logits, and returns its mean distance from a home with the distances of that
    /// home.
    fn mean_distance(&self, p: &mut [f64], logits: &[f32], span: RowSpan, row: usize) -> (f64, &[u64]) {
        let homes = self.distances.len().isqrt();
        let from = &self.distances[span.home_of(row, homes) * homes..][..homes];
        score_experts(p, logits, RouterScore::Softmax);
        (p.iter().zip(self.expert_homes).map(|(p, home)| p * from[*home as usize] as f64).sum(), from)
    }
}

/// Returns `weight` times the mean distance of all tokens to the experts that their softmax prefers, as far as the
/// rows of this rank add to it. Sums are f64.
#[must_use]
pub fn expert_distance(logits: &[f32], span: RowSpan, distances: ExpertDistances<'_>, weight: f64) -> f32 {
    let experts = distances.expert_homes.len();
    let mut p = vec![0.0; experts];
    let own_tokens = span.tokens.saturating_sub(span.first);
    let rows = logits.chunks_exact(experts).enumerate().take(own_tokens);
    let sum: f64 = rows.map(|(row, logits)| distances.mean_distance(&mut p, logits, span, row).0).sum();
    (weight / span.tokens as f64 * sum) as f32
}

/// Computes the gradient of [`expert_distance`] with respect to the logits.
pub fn expert_distance_gradient(
    out: &mut [f32],
    logits: &[f32],
    span: RowSpan,
    distances: ExpertDistances<'_>,
    weight: f64,
) {
    let (experts, factor) = (distances.expert_homes.len(), weight / span.tokens as f64);
    let mut p = vec![0.0; experts];
    let rows = out.chunks_exact_mut(experts).zip(logits.chunks_exact(experts));
    for (row, (out, logits)) in rows.enumerate() {
        if span.first + row >= span.tokens {
            out.fill(0.0);
            continue;
        }
        let (mean, from) = distances.mean_distance(&mut p, logits, span, row);
        for ((out, p), home) in out.iter_mut().zip(&p).zip(distances.expert_homes) {
            *out = (factor * p * (from[*home as usize] as f64 - mean)) as f32;
        }
    }
}

/// Which last choices of tokens are kept.
#[derive(Debug, Clone, Copy)]
pub struct ChoiceDraw<'a> {
    /// Probability that a token keeps its last choice.
    pub keep: f64,
    /// Layer of the choices.
    pub layer: u64,
    /// The global seed and that of ep.
    pub seeds: [u64; 2],
    /// Position of the first row of each sequence; without it, positions are rows.
    pub start: Option<&'a [f32]>,
}

impl ChoiceDraw<'_> {
    /// Returns whether the token at a row of the whole tensor keeps its last choice.
    fn keeps_last_choice(&self, row: usize, span: RowSpan) -> bool {
        let at = match self.start {
            None => row as u64,
            Some(start) => {
                let (sequence, row) = span.sequence_of(row, start.len());
                start[sequence].max(0.0) as u64 + row as u64
            }
        };
        let counter = [at as u32, (at >> 32) as u32, self.layer as u32, (self.layer >> 32) as u32];
        let drawn = philox4x32(counter, self.seeds.map(|seed| seed as u32))[0];
        f64::from(drawn) / 4_294_967_296.0 < self.keep
    }
}

/// Copies choices, `k` per token, and replaces the last one of a token by −1 where the draw does not keep it.
pub fn expert_draw(out: &mut [f32], choices: &[f32], k: usize, span: RowSpan, draw: ChoiceDraw<'_>) {
    out.copy_from_slice(choices);
    for (i, row) in out.chunks_exact_mut(k).enumerate() {
        let at = span.first + i;
        if at < span.tokens
            && !draw.keeps_last_choice(at, span)
            && let Some(last) = row.last_mut()
        {
            *last = -1.0;
        }
    }
}
