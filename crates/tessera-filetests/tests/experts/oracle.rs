//! Routing with capacities as plain loops over whole tokens, which knows no op, plan or rank.

use tessera_filetests::experts::Layer;

/// How an oracle routes: the numbers that a mapping states.
#[derive(Debug, Clone, Copy)]
pub struct RoutingRule {
    pub groups: usize,
    /// Without it, every token finds a slot.
    pub capacity_factor: Option<f64>,
    pub reroute_bytes: u64,
}

/// The experts that computed each token, and the counts per expert.
#[derive(Debug)]
pub struct Routed {
    pub experts: Vec<Vec<usize>>,
    /// Chosen, kept, arrived from elsewhere, dropped.
    pub counts: Vec<[u64; 4]>,
    /// For each choice, the expert that it names at the end, with or without a slot: weights are shared among them.
    pub named: Vec<Vec<usize>>,
}

pub fn route(layer: &Layer, rule: RoutingRule) -> Routed {
    let (n, e, k) = (layer.logits.len(), layer.experts, layer.top_k);
    let size = n.div_ceil(rule.groups);
    let slots = match rule.capacity_factor {
        None => usize::MAX,
        Some(f) => (f * (size * k) as f64 / e as f64).ceil() as usize,
    };
    let mut out =
        Routed { experts: vec![Vec::new(); n], counts: vec![[0; 4]; e], named: vec![Vec::new(); n] };
    for first in (0..n).step_by(size) {
        let group = first..n.min(first + size);
        let preference: Vec<Vec<usize>> = group.clone().map(|t| falling(&layer.logits[t])).collect();
        let mut free = vec![slots; e];
        let mut homeless = Vec::new();
        for t in group.clone() {
            for (j, want) in preference[t - first].iter().take(k).enumerate() {
                out.counts[*want][0] += 1;
                out.named[t].push(*want);
                if free[*want] > 0 {
                    free[*want] -= 1;
                    out.counts[*want][1] += 1;
                    out.experts[t].push(*want);
                } else {
                    homeless.push((t, j, *want));
                }
            }
        }
        let mut budget = rule.reroute_bytes / (4 * layer.width() as u64);
        for (t, j, want) in homeless {
            let next =
                preference[t - first][k..].iter().find(|e| free[**e] > 0 && !out.experts[t].contains(e));
            match next {
                Some(to) if budget > 0 => {
                    budget -= 1;
                    free[*to] -= 1;
                    out.counts[*to][2] += 1;
                    out.experts[t].push(*to);
                    out.named[t][j] = *to;
                }
                _ => out.counts[want][3] += 1,
            }
        }
    }
    out
}

fn falling(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    order
}

/// Returns the weighted sums over the experts of each token, in f64.
pub fn layer_output(layer: &Layer, routed: &Routed) -> Vec<f64> {
    let (d, weights, x) = (layer.width(), layer.weights(), layer.tokens());
    let (up, down) = (&weights["experts.*.up"], &weights["experts.*.down"]);
    let inner = up.shape()[1];
    let mut out = Vec::new();
    for (t, experts) in routed.experts.iter().enumerate() {
        let x: Vec<f64> = x[t * d..][..d].iter().map(|x| f64::from(*x)).collect();
        let logit = |e: usize| f64::from(layer.logits[t][e]);
        let all: f64 = layer.logits[t].iter().map(|x| f64::from(*x).exp()).sum();
        let total: f64 = 1e-20 + routed.named[t].iter().map(|e| logit(*e).exp() / all).sum::<f64>();
        let mut sum = vec![0.0; d];
        for e in experts {
            let h: Vec<f64> = (0..inner)
                .map(|i| {
                    let row = &up.data()[(e * inner + i) * d..][..d];
                    let y: f64 = row.iter().zip(&x).map(|(a, b)| a * b).sum();
                    y / (1.0 + (-y).exp())
                })
                .collect();
            for (c, sum) in sum.iter_mut().enumerate() {
                let row = &down.data()[(e * d + c) * inner..][..inner];
                *sum += logit(*e).exp() / all / total * row.iter().zip(&h).map(|(a, b)| a * b).sum::<f64>();
            }
        }
        out.extend(sum);
    }
    out
}
