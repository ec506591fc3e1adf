//! Kernels that route tokens to experts: the choice, the slots, one matmul per expert, and the weighted sum.

use tessera_ir::RouterScore;

use super::matmul::matmul;
use super::{Activation, MatmulWeight, Scratch};
use crate::Pool;

/// How a router chooses experts.
#[derive(Debug, Clone, Copy)]
pub struct ExpertChoice<'a> {
    /// What makes scores of logits.
    pub score: RouterScore,
    /// What is added to the score of each expert.
    pub correction: Option<&'a [f32]>,
    /// Groups of consecutive experts.
    pub groups: usize,
    /// Groups whose experts are candidates: those with the largest sums of their two best scores.
    pub keep_groups: usize,
}

/// Chooses the experts with the largest corrected scores of each row of `logits`, as many as `ids` has per row,
/// ties to the lower expert. Scores are computed in f64.
pub fn top_k_experts(
    ids: &mut [f32],
    logits: &[f32],
    (experts, k): (usize, usize),
    choice: ExpertChoice<'_>,
) {
    let mut scores = vec![0.0; experts];
    let mut order: Vec<usize> = Vec::new();
    for (ids, row) in ids.chunks_exact_mut(k).zip(logits.chunks_exact(experts)) {
        match (choice.correction, choice.groups) {
            // Logits have the order of their scores, without the ties of rounded scores.
            (None, 1) => scores.iter_mut().zip(row).for_each(|(s, x)| *s = f64::from(*x)),
            (correction, _) => {
                score_experts(&mut scores, row, choice.score);
                let correction = correction.unwrap_or_default().iter();
                scores.iter_mut().zip(correction).for_each(|(s, c)| *s += f64::from(*c));
            }
        }
        list_candidates(&mut order, &scores, choice);
        order.sort_unstable_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        ids.iter_mut().zip(&order).for_each(|(id, e)| *id = *e as f32);
    }
}

/// Lists the experts of the groups that are kept.
fn list_candidates(order: &mut Vec<usize>, scores: &[f64], choice: ExpertChoice<'_>) {
    order.clear();
    let size = scores.len() / choice.groups;
    let two_best = |group: &[f64]| {
        let worst = [f64::NEG_INFINITY; 2];
        let best = group.iter().fold(worst, |[first, second], s| match s.total_cmp(&first).is_gt() {
            true => [*s, first],
            false => [first, if s.total_cmp(&second).is_gt() { *s } else { second }],
        });
        if size == 1 { best[0] } else { best[0] + best[1] }
    };
    let mut groups: Vec<(usize, f64)> = scores.chunks_exact(size).map(two_best).enumerate().collect();
    groups.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    order.extend(groups.iter().take(choice.keep_groups).flat_map(|(g, _)| g * size..(g + 1) * size));
}

/// Computes the score of each expert.
fn score_experts(scores: &mut [f64], row: &[f32], score: RouterScore) {
    let logits = row.iter().map(|x| f64::from(*x));
    match score {
        RouterScore::Sigmoid => {
            scores.iter_mut().zip(logits).for_each(|(s, x)| *s = 1.0 / (1.0 + (-x).exp()));
        }
        RouterScore::Softmax => {
            let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
            scores.iter_mut().zip(logits).for_each(|(s, x)| *s = (x - largest).exp());
            let total: f64 = scores.iter().sum();
            scores.iter_mut().for_each(|s| *s /= total);
        }
    }
}

/// Returns the scores of each row of `logits` at the chosen experts times `scale`, divided by their sum with
/// `renormalise`. They are computed in f64.
pub fn expert_weights(
    weights: &mut [f32],
    logits: &[f32],
    chosen: &[f32],
    (experts, k): (usize, usize),
    (score, renormalise, scale): (RouterScore, bool, f64),
) {
    let mut scores = vec![0.0; experts];
    let rows = logits.chunks_exact(experts).zip(chosen.chunks_exact(k));
    for (weights, (row, chosen)) in weights.chunks_exact_mut(k).zip(rows) {
        score_experts(&mut scores, row, score);
        let total: f64 = match renormalise {
            // Scores of a sigmoid may all be 0.
            true => chosen.iter().map(|e| scores[*e as usize]).sum::<f64>() + 1e-20,
            false => 1.0,
        };
        weights.iter_mut().zip(chosen).for_each(|(w, e)| *w = (scale * scores[*e as usize] / total) as f32);
    }
}

/// Gives each choice the next slot of its expert, or −1 beyond the capacity.
pub fn expert_slots(slots: &mut [f32], chosen: &[f32], capacity: usize) {
    let experts = chosen.iter().fold(0, |n, e| n.max(*e as usize + 1));
    let mut next = vec![0_usize; experts];
    for (slot, e) in slots.iter_mut().zip(chosen) {
        let next = &mut next[*e as usize];
        *slot = if *next < capacity { *next as f32 } else { -1.0 };
        *next += 1;
    }
}

/// Counts the slots that each expert has given away.
pub fn expert_counts(counts: &mut [f32], chosen: &[f32], slots: &[f32]) {
    counts.fill(0.0);
    for (e, _) in chosen.iter().zip(slots).filter(|(_, slot)| **slot >= 0.0) {
        counts[*e as usize] += 1.0;
    }
}

/// Copies the rows of `x[tokens, d]` to the slots of their experts, `k` each, and fills the others with zeros.
pub fn expert_pack(
    rows: &mut [f32],
    x: &[f32],
    chosen: &[f32],
    slots: &[f32],
    (d, k, capacity): (usize, usize, usize),
) {
    rows.fill(0.0);
    for (i, (e, slot)) in chosen.iter().zip(slots).enumerate().filter(|(_, (_, slot))| **slot >= 0.0) {
        let to = (*e as usize * capacity + *slot as usize) * d;
        rows[to..][..d].copy_from_slice(&x[i / k * d..][..d]);
    }
}

/// Multiplies the filled slots of each group with the group's own weights, `x[groups, slots, k]` and
/// `w[groups, m, k]`; other slots are zeros.
pub fn grouped_matmul(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    [x, w, counts]: [&[f32]; 3],
    [slots, m, k]: [usize; 3],
    act: Option<Activation>,
) {
    for (group, count) in counts.iter().enumerate() {
        let (filled, empty) = out[group * slots * m..][..slots * m].split_at_mut(*count as usize * m);
        let (rows, w) = (&x[group * slots * k..][..*count as usize * k], &w[group * m * k..][..m * k]);
        if !filled.is_empty() {
            let extents = (*count as usize, m, k);
            matmul(pool, scratch, filled, rows, MatmulWeight::Plain(w), extents, None, act, 1);
        }
        empty.fill(0.0);
    }
}

/// Adds the weighted results of each token's experts, by ascending expert.
pub fn expert_combine(
    pool: &Pool,
    out: &mut [f32],
    y: &[f32],
    [experts, slots, weights]: [&[f32]; 3],
    (d, k, capacity): (usize, usize, usize),
) {
    let work = 2 * out.len() * k;
    pool.for_each_block(out, d, work, |t, out| {
        out.fill(0.0);
        let mut choices: Vec<usize> = (t * k..(t + 1) * k).filter(|i| slots[*i] >= 0.0).collect();
        choices.sort_unstable_by(|a, b| experts[*a].total_cmp(&experts[*b]));
        for i in choices {
            let row = &y[(experts[i] as usize * capacity + slots[i] as usize) * d..][..d];
            out.iter_mut().zip(row).for_each(|(out, y)| *out = weights[i].mul_add(*y, *out));
        }
    });
}
