//! Layers over stages: contiguous pieces, the dearest as cheap as it can be.
//!
//! The cuts to choose from follow operations alone, with layers of experts weighed in several ways; which of them is
//! used follows the machine. As the choice is the least of a fixed few, a faster machine cannot end up with a worse one.

use tessera_ir::work::RowCut;

use super::Question;
use super::estimate::row_flops;

/// How much more than its operations a layer may cost against the head (recomputation, collectives), and a layer of
/// experts against another (dispatch, weights read for few rows).
const AGAINST_ENDS: [f64; 2] = [1.0, 1.3];
const AGAINST_OTHERS: [f64; 5] = [1.0, 0.5, 1.5, 2.0, 4.0];

/// What stages are balanced by.
#[derive(Debug)]
pub(super) struct Balance {
    /// Operations of one layer by kind, and whether it has experts.
    layers: Vec<(f64, bool)>,
    /// Operations before and after the layers.
    ends: (f64, f64),
}

impl Balance {
    pub fn of(q: &Question, kinds: &Kinds) -> Balance {
        let layer = |i: &usize| {
            let rows = &q.work.stacks[*i].rows;
            (row_flops(rows, q.job).max(1.0), rows.iter().any(|r| r.cut == RowCut::Experts))
        };
        Balance {
            layers: kinds.stacks.iter().map(layer).collect(),
            ends: (row_flops(&q.work.first, q.job), row_flops(&q.work.last, q.job)),
        }
    }

    /// Cuts over so many stages of so many pieces each, each cut once.
    pub fn cuts(&self, kinds: &Kinds, stages: u32, pieces: u32) -> Vec<Cut> {
        let mut out: Vec<Cut> = Vec::new();
        for ends in AGAINST_ENDS {
            for others in AGAINST_OTHERS {
                let weigh = |(flops, moe): &(f64, bool)| flops * ends * if *moe { others } else { 1.0 };
                let cost: Vec<f64> = self.layers.iter().map(weigh).collect();
                let mut borders = Vec::new();
                cut(kinds, &cost, self.ends, stages * pieces, &mut borders);
                if !out.iter().any(|c| c.borders == borders) {
                    out.push(Cut::new(kinds, stages, borders));
                }
            }
        }
        out
    }
}

/// Layers over stages. Stage s has the pieces s, s + stages, s + 2 · stages…
#[derive(Debug, Clone)]
pub(super) struct Cut {
    /// Borders of pieces, one more than there are pieces.
    pub borders: Vec<u32>,
    /// Layers of each kind, stage by stage.
    layers: Vec<f64>,
    kinds: usize,
    /// The first and the last stage, and of those between the first with each number of layers of each kind.
    pub unlike: Vec<u32>,
}

impl Cut {
    fn new(kinds: &Kinds, stages: u32, borders: Vec<u32>) -> Cut {
        let (n, stages) = (kinds.stacks.len(), stages as usize);
        let mut layers = vec![0.0; n * stages];
        for (piece, ends) in borders.windows(2).enumerate() {
            for kind in 0..n {
                layers[piece % stages * n + kind] += kinds.count(kind, ends[0], ends[1]);
            }
        }
        let of = |stage: usize| &layers[stage * n..][..n];
        let mut unlike: Vec<u32> = vec![0];
        for stage in 1..stages {
            let known = unlike[1..].iter().any(|s| of(*s as usize) == of(stage));
            if !known || stage + 1 == stages {
                unlike.push(stage as u32);
            }
        }
        Cut { borders, layers, kinds: n, unlike }
    }

    /// Layers of each kind on a stage.
    pub fn layers(&self, stage: u32) -> &[f64] {
        &self.layers[stage as usize * self.kinds..][..self.kinds]
    }

    /// Time of the stage that takes longest, by the time of one layer of each kind and of the ends.
    pub fn dearest(&self, cost: &[f64], ends: (f64, f64)) -> f64 {
        let (mut most, last) = (0.0_f64, self.unlike.last());
        for stage in &self.unlike {
            let mut sum: f64 = self.layers(*stage).iter().zip(cost).map(|(n, each)| n * each).sum();
            sum += if *stage == 0 { ends.0 } else { 0.0 };
            sum += if Some(stage) == last { ends.1 } else { 0.0 };
            most = most.max(sum);
        }
        most
    }
}

/// Which layers are alike, so that each is priced once.
#[derive(Debug)]
pub(super) struct Kinds {
    /// For each kind, one stack that has its rows.
    pub stacks: Vec<usize>,
    /// For each kind, how many of the first `n` layers are of it.
    before: Vec<Vec<u32>>,
    /// Kind of each layer.
    pub of: Vec<u8>,
    /// For each layer, the first layer after it of another kind.
    until: Vec<u32>,
}

impl Kinds {
    pub fn of(q: &Question) -> Kinds {
        let mut stacks: Vec<usize> = Vec::new();
        let mut of = Vec::new();
        for (i, stack) in q.work.stacks.iter().enumerate() {
            let known = stacks.iter().position(|s| q.work.stacks[*s].rows == stack.rows);
            let kind = known.unwrap_or_else(|| {
                stacks.push(i);
                stacks.len() - 1
            });
            of.extend(std::iter::repeat_n(kind as u8, usize::try_from(stack.count).unwrap_or(0)));
        }
        Kinds::new(stacks, of)
    }

    fn new(stacks: Vec<usize>, of: Vec<u8>) -> Kinds {
        let before = (0..stacks.len())
            .map(|k| {
                let mut n = 0;
                let ends = of.iter().map(|x| {
                    n += u32::from(usize::from(*x) == k);
                    n
                });
                std::iter::once(0).chain(ends).collect()
            })
            .collect();
        let mut until = vec![of.len() as u32; of.len()];
        for i in (0..of.len().saturating_sub(1)).rev() {
            until[i] = if of[i] == of[i + 1] { until[i + 1] } else { i as u32 + 1 };
        }
        Kinds { stacks, before, of, until }
    }

    /// Layers of a kind among `from..to`.
    pub fn count(&self, kind: usize, from: u32, to: u32) -> f64 {
        f64::from(self.before[kind][to as usize] - self.before[kind][from as usize])
    }
}

/// Cuts layers into `pieces` contiguous ones: `cuts` gets `pieces + 1` borders. `cost` is one layer's by kind; `first` and
/// `last` are what the first and the last piece bear besides. Every piece gets a layer; there must be enough.
fn cut(kinds: &Kinds, cost: &[f64], ends: (f64, f64), pieces: u32, cuts: &mut Vec<u32>) {
    let layers = kinds.of.len() as u32;
    let pieces = pieces.min(layers).max(1);
    let total = ends.0 + ends.1 + kinds.of.iter().map(|k| cost[usize::from(*k)]).sum::<f64>();
    let mut low = total / f64::from(pieces);
    let mut high = total;
    // What always fits: pieces as even as the number of layers allows.
    cuts.clear();
    cuts.extend((0..=pieces).map(|i| (u64::from(i) * u64::from(layers) / u64::from(pieces)) as u32));
    if pieces == 1 || pieces == layers {
        return;
    }
    let mut tried = Vec::with_capacity(cuts.len());
    for step in 0..12 {
        // The least there could be, then halves, then just below the best that was found: if that fails, it is the best.
        let limit = match step {
            0 => low * (1.0 + 1e-6),
            1..5 => 0.5 * (low + high.min(low * 2.0)),
            _ => high * (1.0 - 1e-6),
        };
        match fill(kinds, cost, ends, pieces, limit, &mut tried) {
            Some(dearest) => {
                high = dearest;
                std::mem::swap(cuts, &mut tried);
            }
            None if step >= 5 => break,
            None => low = limit,
        }
        if high <= low * (1.0 + 2e-6) {
            break;
        }
    }
}

/// Fills pieces in order, each as far as `limit` allows; the dearest, if the last one ends within it.
fn fill(
    kinds: &Kinds,
    cost: &[f64],
    (first, last): (f64, f64),
    pieces: u32,
    limit: f64,
    cuts: &mut Vec<u32>,
) -> Option<f64> {
    let layers = kinds.of.len() as u32;
    cuts.clear();
    cuts.push(0);
    let (mut at, mut dearest) = (0, 0.0_f64);
    for piece in 0..pieces {
        let most = layers - (pieces - 1 - piece);
        let ends = [if piece == 0 { first } else { 0.0 }, if piece + 1 == pieces { last } else { 0.0 }];
        let mut sum = ends[0] + ends[1];
        let begin = at;
        while at < most {
            // As many of a run of equal layers as the limit has room for, the piece's first whatever it costs.
            let each = cost[usize::from(kinds.of[at as usize])];
            let run = kinds.until[at as usize].min(most) - at;
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
        // A single layer, or the end, may be more than the limit.
        if sum > limit * (1.0 + 1e-9) {
            return None;
        }
        dearest = dearest.max(sum);
        cuts.push(at);
    }
    (at == layers).then_some(dearest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(of: &[u8]) -> Kinds {
        let n = usize::from(of.iter().max().copied().unwrap_or(0)) + 1;
        Kinds::new((0..n).collect(), of.to_vec())
    }

    /// The least possible dearest piece, by trying all borders.
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
                cut(&k, &cost, (first, last), pieces, &mut cuts);
                assert_eq!((cuts.len(), cuts[0], cuts[pieces as usize]), (pieces as usize + 1, 0, 11));
                assert!(cuts.windows(2).all(|w| w[0] < w[1]), "{cuts:?}");
                let sums: Vec<f64> = cuts
                    .windows(2)
                    .enumerate()
                    .map(|(i, w)| {
                        let ends = if i == 0 { first } else { 0.0 }
                            + if i + 1 == pieces as usize { last } else { 0.0 };
                        ends + k.count(0, w[0], w[1]) * cost[0] + k.count(1, w[0], w[1]) * cost[1]
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
