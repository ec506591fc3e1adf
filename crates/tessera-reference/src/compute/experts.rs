//! Reference semantics of the ops that route tokens to experts.

use tessera_ir::{RouterScore, ValueId, views};

use super::{OpContext, TensorResult, activate, matrix_extents, vector_data};
use crate::Tensor;

pub(super) fn top_k_experts(cx: &OpContext<'_>, v: &views::TopKExperts) -> TensorResult {
    let logits = cx.tensor(v.logits)?;
    let ((tokens, experts), k) = (matrix_extents(logits)?, v.top_k as usize);
    let (groups, keep) = (v.groups as usize, v.keep_groups as usize);
    if !experts.is_multiple_of(groups) || keep > groups || k > experts / groups * keep {
        return Err(format!("{k} of {experts} experts in {keep} of {groups} groups"));
    }
    let correction = v.correction.map(|c| vector_data(cx.tensor(c)?, experts)).transpose()?;
    let position = cx.position(v.logits);
    let real = v.tokens.map_or(position.global[0], |n| n as usize);
    let scalars = |of: Option<ValueId>| of.map(|s| cx.tensor(s)).transpose();
    let (start, last) = (scalars(v.start)?, scalars(v.last)?);
    let brings_token = |t: usize| {
        let row = position.global_row(t);
        let (Some(start), Some(last)) = (start, last) else { return true };
        let rows = (real / start.data().len()).max(1);
        let (start, last) = (start.data().get(row / rows), last.data().get(row / rows));
        row < real && start.is_some_and(|s| *s >= 0.0) && last.is_some_and(|last| row as f64 <= *last)
    };
    let choose = |t: usize| -> Vec<usize> {
        let row = logits.row(t);
        let scores: Vec<f64> = match (correction, groups) {
            (None, 1) => row.to_vec(),
            _ => (0..experts).map(|e| score(v.score, row, e) + correction.map_or(0.0, |c| c[e])).collect(),
        };
        let group_of = |e: usize| e * groups / experts;
        let quality = |group: usize| {
            let mut of =
                (0..experts).filter(|e| group_of(*e) == group).map(|e| scores[e]).collect::<Vec<_>>();
            of.sort_by(|a, b| b.total_cmp(a));
            of.iter().take(2).sum::<f64>()
        };
        let kept = first_largest(0..groups, quality, keep);
        first_largest((0..experts).filter(|e| kept.contains(&group_of(*e))), |e| scores[e], k)
    };
    let chosen: Vec<Vec<usize>> = (0..tokens).map(choose).collect();
    Ok(Tensor::from_fn(
        &[tokens, k],
        |i| if brings_token(i / k) { chosen[i / k][i % k] as f64 } else { -1.0 },
    ))
}

/// Returns the `n` candidates of the largest values, largest first, ties to the lower candidate.
fn first_largest(of: impl Iterator<Item = usize>, value: impl Fn(usize) -> f64, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = of.collect();
    order.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
    order.truncate(n);
    order
}

/// Returns the score of expert `e` of a row of logits.
fn score(kind: RouterScore, row: &[f64], e: usize) -> f64 {
    match kind {
        RouterScore::Sigmoid => 1.0 / (1.0 + (-row[e]).exp()),
        RouterScore::Softmax => {
            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            (row[e] - top).exp() / row.iter().map(|x| (x - top).exp()).sum::<f64>()
        }
    }
}

pub(super) fn expert_weights(cx: &OpContext<'_>, v: &views::ExpertWeights) -> TensorResult {
    let (logits, chosen) = (cx.tensor(v.logits)?, cx.tensor(v.experts)?);
    let ((tokens, experts), (of, k)) = (matrix_extents(logits)?, matrix_extents(chosen)?);
    if of != tokens {
        return Err(format!("{of} rows of experts for {tokens} tokens"));
    }
    check_choices(chosen, experts)?;
    Ok(Tensor::from_fn(&[tokens, k], |i| {
        let (row, chosen) = (logits.row(i / k), chosen.row(i / k));
        let of = |e: f64| if e < 0.0 { 0.0 } else { score(v.score, row, e as usize) };
        let total = if v.renormalise { chosen.iter().map(|e| of(*e)).sum::<f64>() + 1e-20 } else { 1.0 };
        v.scale * of(chosen[i % k]) / total
    }))
}

pub(super) fn expert_tokens(cx: &OpContext<'_>, v: &views::ExpertTokens) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (tokens, d) = matrix_extents(x)?;
    Ok(Tensor::from_fn(&[v.rows as usize, d], |i| if i / d < tokens { x.data()[i] } else { 0.0 }))
}

pub(super) fn expert_gates(cx: &OpContext<'_>, v: &views::ExpertGates) -> TensorResult {
    let (gates, chosen) = (cx.tensor(v.gates)?, cx.tensor(v.experts)?);
    let ((tokens, experts), (of, k)) = (matrix_extents(gates)?, matrix_extents(chosen)?);
    if of != tokens {
        return Err(format!("{of} rows of experts for {tokens} tokens"));
    }
    check_experts(chosen, experts)?;
    Ok(Tensor::from_fn(&[tokens, k], |i| gates.row(i / k)[chosen.data()[i] as usize]))
}

pub(super) fn expert_reroute(cx: &OpContext<'_>, v: &views::ExpertReroute) -> TensorResult {
    let ranking = cx.tensor(v.ranking)?;
    let ((tokens, experts), k) = (matrix_extents(ranking)?, v.top_k as usize);
    check_choices(ranking, 1 << 24)?;
    let mut chosen = Tensor::from_fn(&[tokens, k], |i| ranking.row(i / k)[i % k]);
    let slots = slots_of(cx, v.ranking, &chosen, (v.capacity, v.group_tokens, v.tokens))?;
    let (size, first) = (v.group_tokens.map_or(tokens, |n| n as usize), cx.position(v.ranking).global_row(0));
    for group in 0..tokens.checked_div(size).unwrap_or(0) {
        let range = group * size * k..(group + 1) * size * k;
        // Experts that lost a choice have no free slot, so the number of their slots stays the same.
        let mut taken: Vec<f64> =
            range.clone().filter(|i| slots[*i] >= 0.0).map(|i| chosen.data()[i]).collect();
        let mut left = v.reroutes;
        let waits =
            |i: &usize| slots[*i] < 0.0 && chosen.data()[*i] >= 0.0 && !is_padding(first + i / k, v.tokens);
        for i in range.filter(waits).collect::<Vec<_>>() {
            let own = chosen.row(i / k).to_vec();
            let is_free = |e: &&f64| {
                **e >= 0.0
                    && !own.contains(*e)
                    && (taken.iter().filter(|t| t == e).count() as u64) < v.capacity
            };
            let Some(to) = ranking.row(i / k)[k..experts].iter().find(is_free).copied().filter(|_| left > 0)
            else {
                continue;
            };
            left -= 1;
            taken.push(to);
            chosen.data_mut()[i] = to;
        }
    }
    Ok(chosen)
}

pub(super) fn expert_slots(cx: &OpContext<'_>, v: &views::ExpertSlots) -> TensorResult {
    let chosen = cx.tensor(v.experts)?;
    let slots = slots_of(cx, v.experts, chosen, (v.capacity, v.group_tokens, v.tokens))?;
    Ok(Tensor::from_fn(chosen.shape(), |i| slots[i]))
}

/// Returns the slot of each choice, for a capacity, the tokens of a group and the number of tokens that are no
/// padding. The rows of `rows` are those of the tokens.
fn slots_of(
    cx: &OpContext<'_>,
    rows: ValueId,
    chosen: &Tensor,
    (capacity, group_tokens, real): (u64, Option<u64>, Option<u64>),
) -> Result<Vec<f64>, String> {
    let (tokens, k) = matrix_extents(chosen)?;
    let size = group_tokens.map_or(tokens, |n| n as usize).max(1);
    let first = cx.position(rows).global_row(0);
    let slot = |i: usize| {
        if is_padding(first + i / k, real) || chosen.data()[i] < 0.0 {
            return -1.0;
        }
        let start = i / k / size * size * k;
        let earlier = (start..i).filter(|j| chosen.data()[*j] == chosen.data()[i]);
        let before = earlier.filter(|j| !is_padding(first + j / k, real)).count();
        if before < capacity as usize { before as f64 } else { -1.0 }
    };
    Ok((0..tokens * k).map(slot).collect())
}

fn is_padding(row: usize, tokens: Option<u64>) -> bool {
    tokens.is_some_and(|n| row as u64 >= n)
}

pub(super) fn expert_counts(cx: &OpContext<'_>, v: &views::ExpertCounts) -> TensorResult {
    let (chosen, slots) = (cx.tensor(v.experts)?, cx.tensor(v.slots)?);
    let (tokens, k) = matrix_extents(chosen)?;
    check_choices(chosen, v.groups as usize)?;
    let size = v.group_tokens.map_or(tokens, |n| n as usize).max(1);
    let groups = if v.group_tokens.is_some() { tokens / size } else { 1 };
    let mut counts = Tensor::full(&[v.groups as usize, groups], 0.0);
    for (i, e) in chosen.data().iter().enumerate().filter(|(i, _)| slots.data()[*i] >= 0.0) {
        counts.data_mut()[*e as usize * groups + i / k / size] += 1.0;
    }
    Ok(counts)
}

pub(super) fn expert_statistics(cx: &OpContext<'_>, v: &views::ExpertStatistics) -> TensorResult {
    let (choices, experts, slots) = (cx.tensor(v.choices)?, cx.tensor(v.experts)?, cx.tensor(v.slots)?);
    let (_, k) = matrix_extents(choices)?;
    check_choices(choices, v.groups as usize)?;
    check_choices(experts, v.groups as usize)?;
    let first = cx.position(v.choices).global_row(0);
    let mut counts = Tensor::full(&[v.groups as usize, 4], 0.0);
    let is_choice = |i: &usize| !is_padding(first + i / k, v.tokens) && choices.data()[*i] >= 0.0;
    for i in (0..choices.data().len()).filter(is_choice) {
        let (chose, has, slot) = (choices.data()[i], experts.data()[i], slots.data()[i]);
        counts.data_mut()[chose as usize * 4] += 1.0;
        let (of, column) = match slot >= 0.0 {
            true if has == chose => (chose, 1),
            true => (has, 2),
            false => (chose, 3),
        };
        counts.data_mut()[of as usize * 4 + column] += 1.0;
    }
    Ok(counts)
}

pub(super) fn expert_pack(cx: &OpContext<'_>, v: &views::ExpertPack) -> TensorResult {
    let slots = cx.tensor(v.slots)?;
    pack(cx.tensor(v.x)?, cx.tensor(v.experts)?, slots, (v.groups, v.capacity, v.group_tokens))
}

pub(super) fn expert_pack_fused(cx: &OpContext<'_>, v: &views::ExpertPackFused) -> TensorResult {
    let chosen = cx.tensor(v.experts)?;
    let slots = slots_of(cx, v.experts, chosen, (v.capacity, v.group_tokens, v.tokens))?;
    let slots = Tensor::from_fn(chosen.shape(), |i| slots[i]);
    pack(cx.tensor(v.x)?, chosen, &slots, (v.groups, v.capacity, v.group_tokens))
}

/// Copies tokens to the slots of their experts, for a number of experts, a capacity and the tokens of a group.
fn pack(
    x: &Tensor,
    chosen: &Tensor,
    slots: &Tensor,
    (experts, capacity, group_tokens): (u64, u64, Option<u64>),
) -> TensorResult {
    let ((tokens, d), (of, k)) = (matrix_extents(x)?, matrix_extents(chosen)?);
    if of != tokens || slots.shape() != chosen.shape() {
        return Err(format!("experts {:?} and slots {:?} of {tokens} tokens", chosen.shape(), slots.shape()));
    }
    let (experts, capacity) = (experts as usize, capacity as usize);
    check_choices(chosen, experts)?;
    let size = group_tokens.map_or(tokens, |n| n as usize).max(1);
    let groups = if group_tokens.is_some() { tokens / size } else { 1 };
    let mut rows = Tensor::full(&[experts, groups * capacity, d], 0.0);
    for (i, (expert, slot)) in chosen.data().iter().zip(slots.data()).enumerate() {
        if *slot >= capacity as f64 {
            return Err(format!("slot {slot} of {capacity}"));
        }
        if *slot >= 0.0 {
            let to = (*expert as usize * groups + i / k / size) * capacity + *slot as usize;
            rows.data_mut()[to * d..][..d].copy_from_slice(x.row(i / k));
        }
    }
    Ok(rows)
}

/// Checks that each choice is an expert or −1, no expert.
fn check_choices(chosen: &Tensor, experts: usize) -> Result<(), String> {
    let is_choice = |e: &&f64| e.fract() == 0.0 && (-1.0..experts as f64).contains(*e);
    match chosen.data().iter().find(|e| !is_choice(e)) {
        Some(e) => Err(format!("{e} is none of {experts} experts")),
        None => Ok(()),
    }
}

fn check_experts(chosen: &Tensor, experts: usize) -> Result<(), String> {
    let is_expert = |e: &&f64| e.fract() == 0.0 && (0.0..experts as f64).contains(*e);
    match chosen.data().iter().find(|e| !is_expert(e)) {
        Some(e) => Err(format!("{e} is none of {experts} experts")),
        None => Ok(()),
    }
}

pub(super) fn grouped_matmul(cx: &OpContext<'_>, v: &views::GroupedMatmul) -> TensorResult {
    let (x, w, counts) = (cx.tensor(v.x)?, cx.tensor(v.w)?, cx.tensor(v.counts)?);
    let (&[groups, slots, k], &[w_groups, m, w_k]) = (x.shape(), w.shape()) else {
        return Err(format!("{:?} times {:?}", x.shape(), w.shape()));
    };
    let token_groups = counts.data().len() / groups.max(1);
    if (groups, k) != (w_groups, w_k) || counts.data().len() != groups * token_groups || token_groups == 0 {
        return Err(format!("{:?} times {:?}, counts {:?}", x.shape(), w.shape(), counts.shape()));
    }
    let capacity = (slots / token_groups).max(1);
    Ok(Tensor::from_fn(&[groups, slots, m], |i| {
        let (group, slot, column) = (i / (slots * m), i / m % slots, i % m);
        if (slot % capacity) as f64 >= counts.data()[group * token_groups + slot / capacity] {
            return 0.0;
        }
        let row = &x.data()[(group * slots + slot) * k..][..k];
        let weights = &w.data()[(group * m + column) * k..][..k];
        activate(v.act, row.iter().zip(weights).map(|(a, b)| a * b).sum())
    }))
}

pub(super) fn expert_places(cx: &OpContext<'_>, v: &views::ExpertPlaces) -> TensorResult {
    let experts = cx.tensor(v.experts)?;
    let (_, k) = matrix_extents(experts)?;
    let position = cx.position(v.experts);
    let first = position.start[0];
    let real = v.tokens.map_or(position.global[0], |n| n as usize);
    let start = v.start.map(|s| cx.tensor(s)).transpose()?.map_or(&[][..], |s| s.data());
    let begin = |row: usize| {
        let rows = (real / start.len().max(1)).max(1);
        start.get(row / rows).map_or(0, |at| at.max(0.0) as usize)
    };
    let mut out = Tensor::full(experts.shape(), -1.0);
    for (i, expert) in experts.data().iter().enumerate().filter(|(_, e)| **e >= 0.0) {
        let places: Vec<usize> =
            (0..v.residents.len()).filter(|p| v.residents[*p] as f64 == *expert).collect();
        let row = first + i / k;
        let at = places.get((row + begin(row)) % places.len().max(1));
        out.data_mut()[i] = *at.ok_or_else(|| format!("expert {expert} has no place"))? as f64;
    }
    Ok(out)
}

pub(super) fn expert_combine(cx: &OpContext<'_>, v: &views::ExpertCombine) -> TensorResult {
    let (y, experts) = (cx.tensor(v.y)?, cx.tensor(v.experts)?);
    let (slots, weights) = (cx.tensor(v.slots)?, cx.tensor(v.weights)?);
    let (tokens, k) = matrix_extents(experts)?;
    let &[held, all_slots, d] = y.shape() else {
        return Err(format!("{:?} are no slots of experts", y.shape()));
    };
    let size = v.group_tokens.map_or(tokens, |n| n as usize).max(1);
    let groups = if v.group_tokens.is_some() { tokens / size } else { 1 };
    let capacity = all_slots / groups.max(1);
    let (first, count) = (cx.position(v.y).global_row(0), cx.position(v.y).global[0]);
    let order = v.order.map(|o| cx.tensor(o)).transpose()?.unwrap_or(experts);
    if [slots, weights, order].iter().any(|t| t.shape() != experts.shape()) {
        return Err(format!(
            "experts {:?}, slots {:?}, weights {:?}",
            experts.shape(),
            slots.shape(),
            weights.shape()
        ));
    }
    let mut out = Tensor::full(&[tokens, d], 0.0);
    for t in 0..tokens {
        let mut choices: Vec<usize> = (t * k..(t + 1) * k).filter(|i| slots.data()[*i] >= 0.0).collect();
        choices.sort_by(|a, b| order.data()[*a].total_cmp(&order.data()[*b]));
        for i in choices {
            let (e, slot) = (experts.data()[i] as usize, slots.data()[i] as usize);
            if e >= count || slot >= capacity {
                return Err(format!("slot {slot} of expert {e} in {:?}", y.shape()));
            }
            // Another rank has the experts before the first and from the last of this one.
            let Some(e) = e.checked_sub(first).filter(|e| *e < held) else { continue };
            let from = (e * groups + t / size) * capacity + slot;
            for c in 0..d {
                out.data_mut()[t * d + c] += weights.data()[i] * y.data()[from * d + c];
            }
        }
    }
    Ok(out)
}
