//! Reference semantics of the ops that change what a router prefers.

use tessera_base::random::philox4x32;
use tessera_ir::{ValueId, views};

use super::{OpContext, TensorResult, matrix_extents};
use crate::Tensor;

pub(super) fn expert_locality(cx: &OpContext<'_>, v: &views::ExpertLocality) -> TensorResult {
    let logits = cx.tensor(v.logits)?;
    let (_, experts) = matrix_extents(logits)?;
    if v.expert_groups.len() != experts {
        return Err(format!("groups of {} experts for {experts}", v.expert_groups.len()));
    }
    let home = home_of_row(cx, v.logits, v.home_groups.len());
    Ok(Tensor::from_fn(logits.shape(), |i| {
        let is_far = v.expert_groups[i % experts] != v.home_groups[home(i / experts)];
        logits.data()[i] - if is_far { v.weight } else { 0.0 }
    }))
}

/// Returns a function from a row of a shard to the one of `homes` equal parts of the whole tensor in which it lies.
fn home_of_row<'a>(cx: &'a OpContext<'_>, rows: ValueId, homes: usize) -> impl Fn(usize) -> usize + 'a {
    let position = cx.position(rows);
    let part = position.global[0].div_ceil(homes).max(1);
    move |row| position.global_row(row) / part
}

/// What both ops of a distance read.
struct Distance<'a> {
    logits: &'a Tensor,
    distances: &'a [u64],
    expert_homes: &'a [u64],
    homes: usize,
    home: Box<dyn Fn(usize) -> usize + 'a>,
    /// Whether a row is no padding.
    is_token: Box<dyn Fn(usize) -> bool + 'a>,
    /// The weight, over the number of tokens.
    factor: f64,
}

impl<'a> Distance<'a> {
    fn new(
        cx: &'a OpContext<'_>,
        logits: ValueId,
        (distances, expert_homes): (&'a [u64], &'a [u64]),
        (tokens, weight): (Option<u64>, f64),
    ) -> Result<Distance<'a>, String> {
        let position = cx.position(logits);
        let (first, all) = (position.start[0] as u64, position.global[0] as u64);
        let real = tokens.map_or(all, |n| n.min(all));
        let homes = distances.len().isqrt();
        let tensor = cx.tensor(logits)?;
        if expert_homes.len() != matrix_extents(tensor)?.1 || expert_homes.iter().any(|h| *h >= homes as u64)
        {
            return Err(format!("homes {expert_homes:?} of experts, of {homes}"));
        }
        Ok(Distance {
            logits: tensor,
            distances,
            expert_homes,
            homes,
            home: Box::new(home_of_row(cx, logits, homes)),
            is_token: Box::new(move |row| first + (row as u64) < real),
            factor: weight / real as f64,
        })
    }

    fn distance(&self, row: usize, expert: usize) -> f64 {
        self.distances[(self.home)(row) * self.homes + self.expert_homes[expert] as usize] as f64
    }

    /// Returns the softmax of a row, and its mean distance.
    fn softmax_and_mean(&self, row: usize) -> (Vec<f64>, f64) {
        let logits = self.logits.row(row);
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|x| (x - top).exp()).sum();
        let p: Vec<f64> = logits.iter().map(|x| (x - top).exp() / total).collect();
        let mean = p.iter().enumerate().map(|(e, p)| p * self.distance(row, e)).sum();
        (p, mean)
    }
}

pub(super) fn expert_distance(cx: &OpContext<'_>, v: &views::ExpertDistance) -> TensorResult {
    let d = Distance::new(cx, v.logits, (&v.distances, &v.expert_homes), (v.tokens, v.weight))?;
    let (rows, _) = matrix_extents(d.logits)?;
    let sum: f64 = (0..rows).filter(|row| (d.is_token)(*row)).map(|row| d.softmax_and_mean(row).1).sum();
    Ok(Tensor::full(&[1], d.factor * sum))
}

pub(super) fn expert_distance_gradient(
    cx: &OpContext<'_>,
    v: &views::ExpertDistanceGradient,
) -> TensorResult {
    let d = Distance::new(cx, v.logits, (&v.distances, &v.expert_homes), (v.tokens, v.weight))?;
    let (rows, experts) = matrix_extents(d.logits)?;
    let mut out = Tensor::full(&[rows, experts], 0.0);
    for row in (0..rows).filter(|row| (d.is_token)(*row)) {
        let (p, mean) = d.softmax_and_mean(row);
        for (e, p) in p.iter().enumerate() {
            out.data_mut()[row * experts + e] = d.factor * p * (d.distance(row, e) - mean);
        }
    }
    Ok(out)
}

pub(super) fn expert_draw(cx: &OpContext<'_>, v: &views::ExpertDraw) -> TensorResult {
    let choices = cx.tensor(v.choices)?;
    let (_, k) = matrix_extents(choices)?;
    let position = cx.position(v.choices);
    let (first, real) = (position.start[0], v.tokens.map_or(position.global[0], |n| n as usize));
    let start = v.start.map(|s| cx.tensor(s)).transpose()?;
    let &[global, ep] = &v.seeds[..] else { return Err(format!("seeds {:?}", v.seeds)) };
    let is_kept = |row: usize| {
        let at = match start {
            None => row as u64,
            Some(start) => {
                let rows = (real / start.data().len()).max(1);
                (start.data()[row / rows].max(0.0) as u64) + (row % rows) as u64
            }
        };
        let counter = [at as u32, (at >> 32) as u32, v.layer as u32, (v.layer >> 32) as u32];
        let drawn = philox4x32(counter, [global as u32, ep as u32])[0];
        f64::from(drawn) / 4_294_967_296.0 < v.keep
    };
    Ok(Tensor::from_fn(choices.shape(), |i| {
        let row = first + i / k;
        if i % k + 1 < k || row >= real || is_kept(row) { choices.data()[i] } else { -1.0 }
    }))
}
