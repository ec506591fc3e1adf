//! Reference semantics of the ops that route tokens to experts.

use tessera_ir::{RouterScore, views};

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
    Ok(Tensor::from_fn(&[tokens, k], |i| chosen[i / k][i % k] as f64))
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
    check_experts(chosen, experts)?;
    Ok(Tensor::from_fn(&[tokens, k], |i| {
        let (row, chosen) = (logits.row(i / k), chosen.row(i / k));
        let of = |e: f64| score(v.score, row, e as usize);
        let total = if v.renormalise { chosen.iter().map(|e| of(*e)).sum::<f64>() + 1e-20 } else { 1.0 };
        v.scale * of(chosen[i % k]) / total
    }))
}

pub(super) fn expert_slots(cx: &OpContext<'_>, v: &views::ExpertSlots) -> TensorResult {
    let chosen = cx.tensor(v.experts)?;
    matrix_extents(chosen)?;
    Ok(Tensor::from_fn(chosen.shape(), |i| {
        let before = chosen.data()[..i].iter().filter(|e| **e == chosen.data()[i]).count();
        if before < v.capacity as usize { before as f64 } else { -1.0 }
    }))
}

pub(super) fn expert_counts(cx: &OpContext<'_>, v: &views::ExpertCounts) -> TensorResult {
    let (chosen, slots) = (cx.tensor(v.experts)?, cx.tensor(v.slots)?);
    check_experts(chosen, v.groups as usize)?;
    Ok(Tensor::from_fn(&[v.groups as usize, 1], |e| {
        chosen.data().iter().zip(slots.data()).filter(|(c, slot)| **c == e as f64 && **slot >= 0.0).count()
            as f64
    }))
}

pub(super) fn expert_pack(cx: &OpContext<'_>, v: &views::ExpertPack) -> TensorResult {
    let (x, chosen, slots) = (cx.tensor(v.x)?, cx.tensor(v.experts)?, cx.tensor(v.slots)?);
    let ((tokens, d), (of, k)) = (matrix_extents(x)?, matrix_extents(chosen)?);
    if of != tokens || slots.shape() != chosen.shape() {
        return Err(format!("experts {:?} and slots {:?} of {tokens} tokens", chosen.shape(), slots.shape()));
    }
    let (groups, capacity) = (v.groups as usize, v.capacity as usize);
    check_experts(chosen, groups)?;
    let mut rows = Tensor::full(&[groups, capacity, d], 0.0);
    for (i, (expert, slot)) in chosen.data().iter().zip(slots.data()).enumerate() {
        if *slot >= capacity as f64 {
            return Err(format!("slot {slot} of {capacity}"));
        }
        if *slot >= 0.0 {
            let to = *expert as usize * capacity + *slot as usize;
            rows.data_mut()[to * d..][..d].copy_from_slice(x.row(i / k));
        }
    }
    Ok(rows)
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
    if (groups, k) != (w_groups, w_k) || counts.data().len() != groups {
        return Err(format!("{:?} times {:?}, counts {:?}", x.shape(), w.shape(), counts.shape()));
    }
    Ok(Tensor::from_fn(&[groups, slots, m], |i| {
        let (group, slot, column) = (i / (slots * m), i / m % slots, i % m);
        if slot as f64 >= counts.data()[group] {
            return 0.0;
        }
        let row = &x.data()[(group * slots + slot) * k..][..k];
        let weights = &w.data()[(group * m + column) * k..][..k];
        activate(v.act, row.iter().zip(weights).map(|(a, b)| a * b).sum())
    }))
}

pub(super) fn expert_combine(cx: &OpContext<'_>, v: &views::ExpertCombine) -> TensorResult {
    let (y, experts) = (cx.tensor(v.y)?, cx.tensor(v.experts)?);
    let (slots, weights) = (cx.tensor(v.slots)?, cx.tensor(v.weights)?);
    let (tokens, k) = matrix_extents(experts)?;
    let &[groups, capacity, d] = y.shape() else {
        return Err(format!("{:?} are no slots of experts", y.shape()));
    };
    if slots.shape() != experts.shape() || weights.shape() != experts.shape() {
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
        choices.sort_by(|a, b| experts.data()[*a].total_cmp(&experts.data()[*b]));
        for i in choices {
            let (e, slot) = (experts.data()[i] as usize, slots.data()[i] as usize);
            if e >= groups || slot >= capacity {
                return Err(format!("slot {slot} of expert {e} in {:?}", y.shape()));
            }
            for c in 0..d {
                out.data_mut()[t * d + c] += weights.data()[i] * y.data()[(e * capacity + slot) * d + c];
            }
        }
    }
    Ok(out)
}
