//! Kernels that route tokens to experts: the choice, the slots, one matmul per expert, and the weighted sum.
//!
//! The slots of an expert belong to groups of consecutive tokens, in equal parts: `[experts, token groups, capacity]`.

use tessera_ir::RouterScore;

use super::matmul::matmul;
use super::row_span::RowSpan;
use super::{Activation, MatmulWeight, PackedWeight, Scratch};
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

/// Replaces the choices, `k` per token, of rows that bring no token by −1: rows behind the `last` one of their sequence,
/// rows of sequences that start at −1, and padding.
pub fn clear_absent_choices(ids: &mut [f32], k: usize, span: RowSpan, (start, last): (&[f32], &[f32])) {
    for (i, ids) in ids.chunks_exact_mut(k).enumerate() {
        let row = span.first + i;
        let (sequence, _) = span.sequence_of(row, start.len());
        let is_present = start.get(sequence).is_some_and(|at| *at >= 0.0);
        let is_within = last.get(sequence).is_some_and(|last| row as f32 <= *last);
        if row >= span.tokens || !is_present || !is_within {
            ids.fill(-1.0);
        }
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
pub(super) fn score_experts(scores: &mut [f64], row: &[f32], score: RouterScore) {
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

/// Returns the gate of each chosen expert.
pub fn expert_gates(out: &mut [f32], gates: &[f32], chosen: &[f32], (experts, k): (usize, usize)) {
    for (i, (out, e)) in out.iter_mut().zip(chosen).enumerate() {
        *out = gates[i / k * experts + *e as usize];
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
    let is_expert = |e: &&f32| **e >= 0.0;
    let rows = logits.chunks_exact(experts).zip(chosen.chunks_exact(k));
    for (weights, (row, chosen)) in weights.chunks_exact_mut(k).zip(rows) {
        score_experts(&mut scores, row, score);
        let total: f64 = match renormalise {
            // Scores of a sigmoid may all be 0.
            true => chosen.iter().filter(is_expert).map(|e| scores[*e as usize]).sum::<f64>() + 1e-20,
            false => 1.0,
        };
        for (w, e) in weights.iter_mut().zip(chosen) {
            *w = if *e < 0.0 { 0.0 } else { (scale * scores[*e as usize] / total) as f32 };
        }
    }
}

/// How the tokens of a rank share the slots of experts.
#[derive(Debug, Clone, Copy)]
pub struct TokenGroups {
    /// Tokens of a group, at least 1: each has slots of its own.
    pub size: usize,
    /// Choices of a token.
    pub k: usize,
    /// Slots that an expert gives to a group.
    pub capacity: usize,
    /// Tokens of this rank that are no padding.
    pub real: usize,
}

impl TokenGroups {
    /// Returns the index of a choice's slot among all slots of `groups` token groups, expert by expert.
    fn slot_index(&self, choice: usize, expert: usize, slot: usize, groups: usize) -> usize {
        (expert * groups + choice / self.k / self.size) * self.capacity + slot
    }

    /// Calls `f` for the choices of each group that are no padding.
    fn for_each_group(&self, choices: usize, mut f: impl FnMut(std::ops::Range<usize>)) {
        let (step, end) = (self.size * self.k, choices.min(self.real * self.k));
        (0..end).step_by(step.max(1)).for_each(|start| f(start..end.min(start + step)));
    }
}

/// Moves choices beyond the capacity of their experts to the next expert of each token's `ranking` that has a free
/// slot, at most `reroutes` of each group of tokens. `ranking` has `experts` per token.
pub fn expert_reroute(
    chosen: &mut [f32],
    ranking: &[f32],
    experts: usize,
    reroutes: usize,
    groups: TokenGroups,
) {
    let k = groups.k;
    for (chosen, ranking) in chosen.chunks_exact_mut(k).zip(ranking.chunks_exact(experts)) {
        chosen.copy_from_slice(&ranking[..k]);
    }
    let count = ranking.iter().fold(0, |n, e| n.max(*e as usize + 1));
    let (mut taken, mut waiting) = (vec![0_usize; count], Vec::new());
    groups.for_each_group(chosen.len(), |range| {
        taken.fill(0);
        waiting.clear();
        for i in range.filter(|i| chosen[*i] >= 0.0) {
            let taken = &mut taken[chosen[i] as usize];
            match *taken < groups.capacity {
                true => *taken += 1,
                false => waiting.push(i),
            }
        }
        let mut left = reroutes;
        for i in &waiting {
            if left == 0 {
                break;
            }
            let token = i / k;
            let own = token * k..(token + 1) * k;
            let next = ranking[token * experts..][..experts][k..].iter().find(|e| {
                **e >= 0.0 && taken[**e as usize] < groups.capacity && !chosen[own.clone()].contains(*e)
            });
            if let Some(to) = next {
                chosen[*i] = *to;
                taken[*to as usize] += 1;
                left -= 1;
            }
        }
    });
}

/// Gives each choice the next slot of its expert in its group of tokens, or −1 beyond the capacity.
pub fn expert_slots(slots: &mut [f32], chosen: &[f32], groups: TokenGroups) {
    slots.fill(-1.0);
    for_each_slot(chosen, groups, |i, slot| slots[i] = slot as f32);
}

/// Calls `f` with the index and the slot of each choice that finds one.
fn for_each_slot(chosen: &[f32], groups: TokenGroups, mut f: impl FnMut(usize, usize)) {
    let experts = chosen.iter().fold(0, |n, e| n.max(*e as usize + 1));
    let mut next = vec![0_usize; experts];
    groups.for_each_group(chosen.len(), |range| {
        next.fill(0);
        for i in range.filter(|i| chosen[*i] >= 0.0) {
            let next = &mut next[chosen[i] as usize];
            if *next < groups.capacity {
                f(i, *next);
            }
            *next += 1;
        }
    });
}

/// Counts the slots that each expert has given to each group of `group_choices` choices: `counts[experts, groups]`.
pub fn expert_counts(
    counts: &mut [f32],
    chosen: &[f32],
    slots: &[f32],
    (groups, group_choices): (usize, usize),
) {
    counts.fill(0.0);
    for (i, (e, _)) in chosen.iter().zip(slots).enumerate().filter(|(_, (_, slot))| **slot >= 0.0) {
        counts[*e as usize * groups + i / group_choices] += 1.0;
    }
}

/// Counts per expert the choices, those that kept it, those that moved to it, and those that found no slot.
pub fn expert_statistics(counts: &mut [f32], [choices, experts, slots]: [&[f32]; 3], real_choices: usize) {
    counts.fill(0.0);
    for i in (0..choices.len().min(real_choices)).filter(|i| choices[*i] >= 0.0) {
        let (chose, has) = (choices[i] as usize, experts[i] as usize);
        counts[chose * 4] += 1.0;
        let (of, column) = match slots[i] >= 0.0 {
            true if has == chose => (chose, 1),
            true => (has, 2),
            false => (chose, 3),
        };
        counts[of * 4 + column] += 1.0;
    }
}

/// Copies the rows of `x[tokens, d]` to the slots of their experts and fills the others with zeros. `count` is the
/// number of token groups.
pub fn expert_pack(
    rows: &mut [f32],
    x: &[f32],
    chosen: &[f32],
    slots: &[f32],
    (d, count): (usize, usize),
    groups: TokenGroups,
) {
    rows.fill(0.0);
    for (i, (e, slot)) in chosen.iter().zip(slots).enumerate().filter(|(_, (_, slot))| **slot >= 0.0) {
        let to = groups.slot_index(i, *e as usize, *slot as usize, count) * d;
        rows[to..][..d].copy_from_slice(&x[i / groups.k * d..][..d]);
    }
}

/// [`expert_pack`] with the slots of [`expert_slots`], in one pass over the choices.
pub fn expert_pack_fused(
    rows: &mut [f32],
    x: &[f32],
    chosen: &[f32],
    (d, count): (usize, usize),
    groups: TokenGroups,
) {
    rows.fill(0.0);
    for_each_slot(chosen, groups, |i, slot| {
        let to = groups.slot_index(i, chosen[i] as usize, slot, count) * d;
        rows[to..][..d].copy_from_slice(&x[i / groups.k * d..][..d]);
    });
}

/// The weights `[groups, m, k]` of a grouped matmul.
#[derive(Debug, Clone, Copy)]
pub enum GroupWeights<'a> {
    /// `[groups, m, k]`; every call packs the matrices again that it reads.
    Plain(&'a [f32]),
    /// One matrix `[m, k]` per group, packed once; faster, with the same bits.
    Packed(&'a [PackedWeight]),
}

impl<'a> GroupWeights<'a> {
    /// Returns the matrix of a group, which has `elements` elements.
    fn matrix_of_group(self, group: usize, elements: usize) -> MatmulWeight<'a> {
        match self {
            GroupWeights::Plain(w) => MatmulWeight::Plain(&w[group * elements..][..elements]),
            GroupWeights::Packed(matrices) => MatmulWeight::Packed(&matrices[group]),
        }
    }
}

/// Multiplies the filled slots of each group of `x[groups, slots, k]` with the group's own matrix; other slots are
/// zeros. The slots of a group belong to token groups in equal parts, each of which is filled from its start, as
/// `counts[groups, token groups]` says.
pub fn grouped_matmul(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    [x, counts]: [&[f32]; 2],
    w: GroupWeights<'_>,
    [slots, m, k]: [usize; 3],
    act: Option<Activation>,
) {
    let token_groups = counts.len() * slots * m / out.len().max(1);
    let mut slots_of_groups = GroupSlots { out, x, counts, token_groups, extents: [slots, m, k] };
    for group in 0..counts.len() / token_groups.max(1) {
        // An expert without rows needs no matrix.
        if slots_of_groups.has_rows(group) {
            slots_of_groups.multiply(pool, scratch, group, w.matrix_of_group(group, m * k), act);
        } else {
            slots_of_groups.clear(group);
        }
    }
}

/// The slots of a grouped matmul, whose groups are multiplied one by one, in any order.
#[derive(Debug)]
pub struct GroupSlots<'a> {
    /// `[groups, slots, m]`.
    pub out: &'a mut [f32],
    /// `[groups, slots, k]`.
    pub x: &'a [f32],
    /// `[groups, token groups]`.
    pub counts: &'a [f32],
    /// Token groups that share the slots of a group in equal parts.
    pub token_groups: usize,
    /// Slots of a group, m and k.
    pub extents: [usize; 3],
}

impl GroupSlots<'_> {
    /// Returns whether a slot of the group is filled.
    #[must_use]
    pub fn has_rows(&self, group: usize) -> bool {
        self.counts[group * self.token_groups..][..self.token_groups].iter().any(|count| *count > 0.0)
    }

    /// Multiplies the filled slots of a group with its matrix, and clears the others.
    pub fn multiply(
        &mut self,
        pool: &Pool,
        scratch: &mut Scratch,
        group: usize,
        w: MatmulWeight<'_>,
        act: Option<Activation>,
    ) {
        let [slots, m, k] = self.extents;
        let capacity = slots / self.token_groups.max(1);
        for part in group * self.token_groups..(group + 1) * self.token_groups {
            let count = self.counts[part] as usize;
            let (filled, empty) = self.out[part * capacity * m..][..capacity * m].split_at_mut(count * m);
            if !filled.is_empty() {
                let rows = &self.x[part * capacity * k..][..count * k];
                matmul(pool, scratch, filled, rows, w, (count, m, k), None, act, 1);
            }
            empty.fill(0.0);
        }
    }

    /// Clears the slots of a group.
    pub fn clear(&mut self, group: usize) {
        let [slots, m, _] = self.extents;
        self.out[group * slots * m..][..slots * m].fill(0.0);
    }
}

/// Returns the place of each choice, `k` per token, where `residents` is the expert of each place. The places of an
/// expert are used round robin, by the row of the token in the whole tensor plus the position at which its sequence begins.
pub fn expert_places(
    places: &mut [f32],
    chosen: &[f32],
    k: usize,
    (span, start): (RowSpan, Option<&[f32]>),
    residents: &[u64],
) {
    let mut of_experts: Vec<Vec<f32>> = Vec::new();
    for (place, expert) in residents.iter().enumerate() {
        let expert = *expert as usize;
        of_experts.resize_with(of_experts.len().max(expert + 1), Vec::new);
        of_experts[expert].push(place as f32);
    }
    for (token, (places, chosen)) in places.chunks_exact_mut(k).zip(chosen.chunks_exact(k)).enumerate() {
        let row = span.first + token;
        let begin = start.and_then(|start| start.get(span.sequence_of(row, start.len()).0));
        let turn = row + begin.map_or(0, |at| at.max(0.0) as usize);
        for (place, expert) in places.iter_mut().zip(chosen) {
            *place = match *expert < 0.0 {
                true => -1.0,
                false => {
                    let own = &of_experts[*expert as usize];
                    own[turn % own.len()]
                }
            };
        }
    }
}

/// Adds the weighted results of each token's experts, ascending by `order`. `y` has the slots of the experts `held`,
/// for `count` token groups; other experts add nothing.
pub fn expert_combine(
    pool: &Pool,
    out: &mut [f32],
    y: &[f32],
    [experts, slots, weights, order]: [&[f32]; 4],
    (d, count, held): (usize, usize, std::ops::Range<usize>),
    groups: TokenGroups,
) {
    let k = groups.k;
    let work = 2 * out.len() * k;
    pool.for_each_block(out, d, work, |t, out| {
        out.fill(0.0);
        let is_here = |i: &usize| slots[*i] >= 0.0 && held.contains(&(experts[*i] as usize));
        let mut choices: Vec<usize> = (t * k..(t + 1) * k).filter(is_here).collect();
        choices.sort_unstable_by(|a, b| order[*a].total_cmp(&order[*b]));
        for i in choices {
            let from = groups.slot_index(i, experts[i] as usize - held.start, slots[i] as usize, count);
            out.iter_mut().zip(&y[from * d..][..d]).for_each(|(out, y)| *out = weights[i].mul_add(*y, *out));
        }
    });
}
