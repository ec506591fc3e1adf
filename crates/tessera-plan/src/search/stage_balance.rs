//! Splits layers over pipeline stages: contiguous model chunks, so that the slowest is as fast as
//! possible.
//!
//! The candidate splits depend on operation counts alone, with expert layers weighted in several
//! ways. The machine decides which of them is used. As the choice is the minimum over a fixed few,
//! a faster machine cannot end up with a worse one.

use tessera_ir::analytic_model::OpSharding;

use super::SearchQuery;
use super::flops::row_flops;

/// Factors by which a layer may cost more than its operation count relative to the head
/// (recomputation, collectives), and an expert layer relative to a dense one (dispatch, weights
/// read for few rows).
const LAYER_TO_HEAD_FACTORS: [f64; 2] = [1.0, 1.3];
const EXPERT_TO_DENSE_FACTORS: [f64; 5] = [1.0, 0.5, 1.5, 2.0, 4.0];

/// The operation counts by which layers are split over stages.
#[derive(Debug)]
pub(super) struct StageBalancer {
    /// Operations of one layer by kind, and whether it has experts.
    layer_flops: Vec<(f64, bool)>,
    /// Operations before and after the layers.
    end_flops: (f64, f64),
}

impl StageBalancer {
    pub fn from_query(q: &SearchQuery, kinds: &LayerKinds) -> StageBalancer {
        let layer = |i: &usize| {
            let rows = &q.work.stacks[*i].ops;
            (row_flops(rows, q.job).max(1.0), rows.iter().any(|r| r.sharding == OpSharding::Experts))
        };
        StageBalancer {
            layer_flops: kinds.example_stacks.iter().map(layer).collect(),
            end_flops: (
                row_flops(&q.work.ops_before_layers, q.job),
                row_flops(&q.work.ops_after_layers, q.job),
            ),
        }
    }

    /// Returns the distinct splits over `stages` stages of `chunks` model chunks each.
    pub fn candidate_splits(&self, kinds: &LayerKinds, stages: u32, chunks: u32) -> Vec<StageSplit> {
        let mut out: Vec<StageSplit> = Vec::new();
        for ends in LAYER_TO_HEAD_FACTORS {
            for others in EXPERT_TO_DENSE_FACTORS {
                let weigh = |(flops, moe): &(f64, bool)| flops * ends * if *moe { others } else { 1.0 };
                let cost: Vec<f64> = self.layer_flops.iter().map(weigh).collect();
                let mut borders = Vec::new();
                split_layers(kinds, &cost, self.end_flops, stages * chunks, &mut borders);
                if !out.iter().any(|c| c.boundaries == borders) {
                    out.push(StageSplit::new(kinds, stages, borders));
                }
            }
        }
        out
    }
}

/// A split of the layers over stages. Stage s holds the model chunks s, s + stages, s + 2 · stages…
#[derive(Debug, Clone)]
pub(super) struct StageSplit {
    /// First layer of each model chunk, followed by the number of layers: one entry more than there
    /// are model chunks.
    pub boundaries: Vec<u32>,
    /// Number of layers of each kind, stage by stage.
    layer_counts: Vec<f64>,
    kind_count: usize,
    /// The first and the last stage and, for each distinct layer mix in between, the first stage
    /// with it.
    pub distinct_stages: Vec<u32>,
}

impl StageSplit {
    fn new(kinds: &LayerKinds, stages: u32, boundaries: Vec<u32>) -> StageSplit {
        let (n, stages) = (kinds.example_stacks.len(), stages as usize);
        let mut layer_counts = vec![0.0; n * stages];
        for (piece, ends) in boundaries.windows(2).enumerate() {
            for kind in 0..n {
                layer_counts[piece % stages * n + kind] += kinds.count_layers(kind, ends[0], ends[1]);
            }
        }
        let counts_on = |stage: usize| &layer_counts[stage * n..][..n];
        let mut distinct_stages: Vec<u32> = vec![0];
        for stage in 1..stages {
            let known = distinct_stages[1..].iter().any(|s| counts_on(*s as usize) == counts_on(stage));
            if !known || stage + 1 == stages {
                distinct_stages.push(stage as u32);
            }
        }
        StageSplit { boundaries, layer_counts, kind_count: n, distinct_stages }
    }

    /// Returns the number of layers of each kind on a stage.
    pub fn stage_layers(&self, stage: u32) -> &[f64] {
        &self.layer_counts[stage as usize * self.kind_count..][..self.kind_count]
    }

    /// Returns the time of the slowest stage, given the time of one layer of each kind and of the
    /// ends.
    pub fn slowest_stage_ns(&self, cost: &[f64], ends: (f64, f64)) -> f64 {
        let (mut slowest_ns, last) = (0.0_f64, self.distinct_stages.last());
        for stage in &self.distinct_stages {
            let mut sum: f64 = self.stage_layers(*stage).iter().zip(cost).map(|(n, each)| n * each).sum();
            sum += if *stage == 0 { ends.0 } else { 0.0 };
            sum += if Some(stage) == last { ends.1 } else { 0.0 };
            slowest_ns = slowest_ns.max(sum);
        }
        slowest_ns
    }
}

/// The equivalence classes of layers, so that each is costed once.
#[derive(Debug)]
pub(super) struct LayerKinds {
    /// For each kind, the index of one stack with its rows.
    pub example_stacks: Vec<usize>,
    /// For each kind, its number of layers among the first `n` layers.
    prefix_counts: Vec<Vec<u32>>,
    /// For each layer in model order, its kind: an index into `example_stacks`.
    pub layer_kinds: Vec<u8>,
    /// For each layer, the first later layer of another kind.
    run_ends: Vec<u32>,
}

impl LayerKinds {
    pub fn from_query(q: &SearchQuery) -> LayerKinds {
        let mut stacks: Vec<usize> = Vec::new();
        let mut layer_kinds = Vec::new();
        for (i, stack) in q.work.stacks.iter().enumerate() {
            let known = stacks.iter().position(|s| q.work.stacks[*s].ops == stack.ops);
            let kind = known.unwrap_or_else(|| {
                stacks.push(i);
                stacks.len() - 1
            });
            layer_kinds.extend(std::iter::repeat_n(kind as u8, usize::try_from(stack.count).unwrap_or(0)));
        }
        LayerKinds::from_layers(stacks, layer_kinds)
    }

    fn from_layers(example_stacks: Vec<usize>, layer_kinds: Vec<u8>) -> LayerKinds {
        let prefix_counts = (0..example_stacks.len())
            .map(|k| {
                let mut n = 0;
                let ends = layer_kinds.iter().map(|x| {
                    n += u32::from(usize::from(*x) == k);
                    n
                });
                std::iter::once(0).chain(ends).collect()
            })
            .collect();
        let mut run_ends = vec![layer_kinds.len() as u32; layer_kinds.len()];
        for i in (0..layer_kinds.len().saturating_sub(1)).rev() {
            run_ends[i] = if layer_kinds[i] == layer_kinds[i + 1] { run_ends[i + 1] } else { i as u32 + 1 };
        }
        LayerKinds { example_stacks, prefix_counts, layer_kinds, run_ends }
    }

    /// Returns the number of layers of a kind in `from..to`.
    pub fn count_layers(&self, kind: usize, from: u32, to: u32) -> f64 {
        f64::from(self.prefix_counts[kind][to as usize] - self.prefix_counts[kind][from as usize])
    }
}

/// Splits layers into `chunks` contiguous chunks and writes `chunks + 1` entries to `boundaries`.
/// `cost` is the cost of one layer by kind; `ends` are the extra costs of the first and the last
/// chunk. Every chunk gets at least one layer, so there must be enough.
fn split_layers(kinds: &LayerKinds, cost: &[f64], ends: (f64, f64), chunks: u32, boundaries: &mut Vec<u32>) {
    let layers = kinds.layer_kinds.len() as u32;
    let chunks = chunks.min(layers).max(1);
    let total = ends.0 + ends.1 + kinds.layer_kinds.iter().map(|k| cost[usize::from(*k)]).sum::<f64>();
    let mut low = total / f64::from(chunks);
    let mut high = total;
    // Start from a split that always works: chunks as even as the number of layers allows.
    boundaries.clear();
    boundaries.extend((0..=chunks).map(|i| (u64::from(i) * u64::from(layers) / u64::from(chunks)) as u32));
    if chunks == 1 || chunks == layers {
        return;
    }
    let mut tried = Vec::with_capacity(boundaries.len());
    for step in 0..12 {
        // Try the lower bound, then bisect, then try just below the best found: if that fails, the
        // best is optimal.
        let limit = match step {
            0 => low * (1.0 + 1e-6),
            1..5 => 0.5 * (low + high.min(low * 2.0)),
            _ => high * (1.0 - 1e-6),
        };
        match fill_chunks(kinds, cost, ends, chunks, limit, &mut tried) {
            Some(dearest) => {
                high = dearest;
                std::mem::swap(boundaries, &mut tried);
            }
            None if step >= 5 => break,
            None => low = limit,
        }
        if high <= low * (1.0 + 2e-6) {
            break;
        }
    }
}

/// Fills chunks in order, each up to `limit`. Returns the cost of the largest chunk if the last one
/// stays within the limit.
fn fill_chunks(
    kinds: &LayerKinds,
    cost: &[f64],
    (first, last): (f64, f64),
    chunks: u32,
    limit: f64,
    boundaries: &mut Vec<u32>,
) -> Option<f64> {
    let layers = kinds.layer_kinds.len() as u32;
    boundaries.clear();
    boundaries.push(0);
    let (mut at, mut dearest) = (0, 0.0_f64);
    for piece in 0..chunks {
        let max_end = layers - (chunks - 1 - piece);
        let ends = [if piece == 0 { first } else { 0.0 }, if piece + 1 == chunks { last } else { 0.0 }];
        let mut sum = ends[0] + ends[1];
        let begin = at;
        while at < max_end {
            // Take as many layers of an equal run as the limit has room for, but always the chunk's
            // first layer.
            let each = cost[usize::from(kinds.layer_kinds[at as usize])];
            let run = kinds.run_ends[at as usize].min(max_end) - at;
            let take = if sum + each * f64::from(run) <= limit {
                run
            } else {
                (((limit - sum) / each.max(1e-9)).max(0.0) as u32).min(run).max(u32::from(at == begin))
            };
            sum += f64::from(take) * each;
            at += take;
            if take < run {
                break;
            }
        }
        // A single layer or the head may exceed the limit.
        if sum > limit * (1.0 + 1e-9) {
            return None;
        }
        dearest = dearest.max(sum);
        boundaries.push(at);
    }
    (at == layers).then_some(dearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(of: &[u8]) -> LayerKinds {
        let n = usize::from(of.iter().max().copied().unwrap_or(0)) + 1;
        LayerKinds::from_layers((0..n).collect(), of.to_vec())
    }

    /// Returns the minimum cost of the largest chunk, by exhaustive search over the boundaries.
    fn least(cost: &[f64], pieces: usize, first: f64, last: f64) -> f64 {
        fn go(cost: &[f64], pieces: usize, extra: f64, last: f64) -> f64 {
            if pieces == 1 {
                return cost.iter().sum::<f64>() + extra + last;
            }
            (1..=cost.len() + 1 - pieces)
                .map(|n| (cost[..n].iter().sum::<f64>() + extra).max(go(&cost[n..], pieces - 1, 0.0, last)))
                .fold(f64::INFINITY, f64::min)
        }
        go(cost, pieces, first, last)
    }

    #[test]
    fn pieces_are_whole_contiguous_and_as_even_as_any() {
        let of = [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
        let k = kinds(&of);
        let mut cuts = Vec::new();
        for pieces in 1..=11 {
            for (first, last) in [(0.0, 0.0), (0.5, 4.0), (7.0, 1.0)] {
                let cost = [1.0, 2.5];
                split_layers(&k, &cost, (first, last), pieces, &mut cuts);
                assert_eq!((cuts.len(), cuts[0], cuts[pieces as usize]), (pieces as usize + 1, 0, 11));
                assert!(cuts.windows(2).all(|w| w[0] < w[1]), "{cuts:?}");
                let sums: Vec<f64> = cuts
                    .windows(2)
                    .enumerate()
                    .map(|(i, w)| {
                        let ends = if i == 0 { first } else { 0.0 }
                            + if i + 1 == pieces as usize { last } else { 0.0 };
                        ends + k.count_layers(0, w[0], w[1]) * cost[0]
                            + k.count_layers(1, w[0], w[1]) * cost[1]
                    })
                    .collect();
                let all: Vec<f64> = of.iter().map(|x| cost[usize::from(*x)]).collect();
                let best = least(&all, pieces as usize, first, last);
                let dearest = sums.iter().fold(0.0, |a: f64, b| a.max(*b));
                assert!(dearest <= best + 0.02, "{pieces} pieces: {dearest} against {best}, {cuts:?}");
            }
        }
    }
}
