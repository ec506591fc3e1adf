//! Kernels that route tokens to experts: the choice, the slots, one matmul per expert, and the weighted sum.

use super::matmul::matmul;
use super::{Activation, MatmulWeight, Scratch};
use crate::Pool;

/// Chooses the experts with the largest of each row of `logits`, as many as `ids` has per row, ties to the lower
/// expert.
pub fn top_k_experts(ids: &mut [f32], logits: &[f32], (experts, k): (usize, usize)) {
    let mut order: Vec<usize> = Vec::new();
    for (ids, row) in ids.chunks_exact_mut(k).zip(logits.chunks_exact(experts)) {
        order.clear();
        order.extend(0..experts);
        order.sort_unstable_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        ids.iter_mut().zip(&order).for_each(|(id, e)| *id = *e as f32);
    }
}

/// Returns the softmax of each row of `logits` at the chosen experts, over all of them or over the chosen ones.
/// It is computed in f64.
pub fn expert_weights(
    weights: &mut [f32],
    logits: &[f32],
    chosen: &[f32],
    (experts, k): (usize, usize),
    renormalise: bool,
) {
    let rows = logits.chunks_exact(experts).zip(chosen.chunks_exact(k));
    for (weights, (row, chosen)) in weights.chunks_exact_mut(k).zip(rows) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let likelihood = |e: usize| (f64::from(row[e]) - f64::from(largest)).exp();
        let total: f64 = match renormalise {
            true => chosen.iter().map(|e| likelihood(*e as usize)).sum(),
            false => (0..experts).map(likelihood).sum(),
        };
        weights.iter_mut().zip(chosen).for_each(|(w, e)| *w = (likelihood(*e as usize) / total) as f32);
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
