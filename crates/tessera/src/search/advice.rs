//! What is worth knowing about a chosen mapping beyond its gates: what other routings, capacities, contexts and stages
//! would do to it. Each table begins with what follows from it; nothing here changes the choice.

mod cache;
mod experts;
mod general;

use tessera_cost::knobs::{Layout, Scheme};
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{self, ExpertLoad};
use tessera_cost::{Machine, Span};
use tessera_ir::work::{Row, RowCut, RowOp, Stack};
use tessera_mesh::Precision;
use tessera_plan::search::{Candidate, Job, Question, Ranked, StageShare};
use tessera_report::html::Advice;

/// Everything worth knowing about a mapping, `idle` devices left beside it. What does not arise is left out.
pub(super) fn advice(q: &Question, best: &Ranked, idle: u32) -> Vec<Advice> {
    let seen = Seen::new(q, best, idle);
    let mut out = experts::advice(&seen);
    out.extend(cache::advice(&seen));
    out.extend(general::advice(&seen));
    out
}

/// Routed experts of a layer.
#[derive(Debug, Clone, Copy)]
struct Shape {
    experts: u64,
    top_k: u64,
    /// Numbers of a token.
    width: u64,
    /// Numbers of one expert on a rank that has a piece of it.
    numbers: f64,
}

/// A mapping, and what one micro-batch of it brings.
struct Seen<'a> {
    q: &'a Question,
    m: &'a Machine,
    best: &'a Ranked,
    c: &'a Candidate,
    idle: u32,
    load: Load,
    shape: Option<Shape>,
    /// Tokens of all ranks that exchange.
    group: f64,
}

impl<'a> Seen<'a> {
    fn new(q: &'a Question, best: &'a Ranked, idle: u32) -> Seen<'a> {
        let c = &best.candidate;
        let l = &c.layout;
        let tokens = f64::from(c.micro_batch) * q.job.queries() as f64;
        let shape = q.work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
            RowOp::Experts { experts, top_k, k, n, matrices } => Some(Shape {
                experts,
                top_k,
                width: k,
                numbers: (k * n * matrices) as f64 / f64::from(l.expert_tp.max(1)),
            }),
            _ => None,
        });
        let load = Load {
            tokens,
            sequences: f64::from(c.micro_batch),
            keys: q.job.context() as f64,
            window: None,
            training: matches!(q.job, Job::Train { .. }),
            recompute: c.recompute,
        };
        let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp.max(1));
        Seen { q, m: &q.machine, best, c, idle, load, shape, group }
    }

    /// Load of the experts under the plan's own routing and capacity.
    fn routed(&self) -> ExpertLoad {
        let l = &self.c.layout;
        self.shape.map_or(ExpertLoad::NONE, |s| {
            moe::experts(s.experts, s.top_k, l.ep, self.group, self.q.routing, l.capacity_pct)
        })
    }

    fn spans(&self) -> Spans {
        let (l, cluster) = (&self.c.layout, &self.m.cluster);
        Spans {
            tp: Span::of(l.tp, 1, cluster),
            expert_tp: Span::of(l.expert_tp, 1, cluster),
            ep: Span::of(l.ep, l.expert_tp, cluster),
        }
    }

    /// One layer: what is not of routed experts, and what is.
    fn priced(&self, stack: &Stack) -> (LayerCost, LayerCost) {
        let l = &self.c.layout;
        let (dense, routed): (Vec<Row>, Vec<Row>) =
            stack.rows.iter().cloned().partition(|r| r.cut != RowCut::Experts);
        let plain = Layout { expert_tp: 1, ep: 1, wire: Precision::Bf16, capacity_pct: 0, ..*l };
        // Experts see tp only where it keeps tokens whole.
        let tp = if matches!(l.scheme, Scheme::Megatron | Scheme::RsMmAg) { l.tp } else { 1 };
        let dealt = Layout { tp, ring: 1, scheme: Scheme::Megatron, ..*l };
        let price = |rows: &[Row], layout: &Layout, load: &ExpertLoad| {
            layer(self.m, rows, layout, &self.load, &self.spans(), load)
        };
        (price(&dense, &plain, &ExpertLoad::NONE), price(&routed, &dealt, &self.routed()))
    }

    /// Layers of each stack on a stage.
    fn layers(&self, stage: &StageShare) -> Vec<f64> {
        let mut from = 0;
        let of = |s: &Stack| {
            let (start, end) = (from, from + s.count);
            from = end;
            let both = |p: &std::ops::Range<u64>| p.end.min(end).saturating_sub(p.start.max(start));
            stage.pieces.iter().map(both).sum::<u64>() as f64
        };
        self.q.work.stacks.iter().map(of).collect()
    }

    /// The stage with most layers.
    fn fullest(&self) -> Option<&StageShare> {
        let all = |s: &StageShare| s.pieces.iter().map(|p| p.end - p.start).sum::<u64>();
        self.best.stages.iter().rev().max_by_key(|s| all(s))
    }

    fn training(&self) -> bool {
        self.load.training
    }
}

fn columns(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_string()).collect()
}

fn percent(share: f64) -> String {
    let share = share * 100.0;
    if share > 0.0 && share < 0.05 { "< 0.1 %".to_string() } else { format!("{share:.1} %") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_cost::Profile;
    use tessera_cost::moe::Routing;
    use tessera_mesh::clusters;
    use tessera_models::zoo;
    use tessera_plan::search::{Objective, Outcome, Pins, Space, search};

    use super::*;

    fn asked(model: &str, job: Job, pins: &str) -> (Question, Outcome) {
        let profile = Profile::named("torch-2.11").unwrap();
        let machine = Machine::new(clusters::named("hgx-h200").unwrap(), profile);
        let work = zoo::named(model).unwrap().work(true);
        let mut space = Space::of(&work, job, &machine.cluster);
        space.devices = 8;
        let (objective, routing) = (Objective::Throughput, Routing::Random);
        let q = Question { work, job, objective, machine, routing, pins: Pins::parse(pins).unwrap(), space };
        let outcome = search(&q);
        (q, outcome)
    }

    fn told(model: &str, job: Job, pins: &str) -> Vec<Advice> {
        let (q, outcome) = asked(model, job, pins);
        advice(&q, &outcome.best[0], outcome.idle)
    }

    fn titled<'a>(all: &'a [Advice], title: &str) -> &'a Advice {
        all.iter().find(|a| a.title.starts_with(title)).unwrap()
    }

    /// A cell's number, times in nanoseconds.
    fn number(cell: &str) -> f64 {
        let words: Vec<&str> = cell.trim_start_matches(['×', '<', ' ']).split_whitespace().collect();
        let unit = match words.get(1) {
            Some(&"µs") => 1e3,
            Some(&"ms") => 1e6,
            Some(&"s") => 1e9,
            _ => 1.0,
        };
        words[0].trim_end_matches(',').parse::<f64>().unwrap() * unit
    }

    fn column(a: &Advice, at: usize) -> Vec<f64> {
        a.rows.iter().map(|r| number(&r[at])).collect()
    }

    const DECODE: Job = Job::Decode { batch: 64, context: 32_768 };

    #[test]
    fn routings_and_capacities_of_experts_in_numbers() {
        let all = told("mixtral-8x7b", DECODE, "ep=8,expert_tp=1");
        let routings = titled(&all, "If tokens");
        let slowest = column(routings, 1);
        let named = |name: &str| routings.rows.iter().position(|r| r[0].starts_with(name)).unwrap();
        assert!(slowest.iter().all(|s| *s >= slowest[named("w0")]), "{routings:?}");
        assert_eq!(routings.rows[named("random (planned)")][4], "× 1.00");
        assert!(number(&routings.rows[named("w2")][4]) > number(&routings.rows[named("w0")][4]));

        let capacity = titled(&all, "Capacity");
        let (dropped, bytes) = (column(capacity, 1), column(capacity, 2));
        assert!(dropped.windows(2).all(|w| w[1] <= w[0]) && dropped[0] > *dropped.last().unwrap());
        assert!(bytes.windows(2).all(|w| w[1] >= w[0]), "{bytes:?}");
        assert_eq!(capacity.rows.iter().filter(|r| r[0].contains("advised")).count(), 1);
    }

    #[test]
    fn a_wider_window_never_waits_longer_and_a_forecast_helps() {
        let prompts = Job::Prefill { batch: 16, sequence: 8192 };
        let tiers = |job| titled(&told("mixtral-8x7b", job, "ep=8,expert_tp=1"), "Experts on").clone();
        for t in [tiers(DECODE), tiers(prompts)] {
            for row in &t.rows {
                let waits: Vec<f64> = row[4..7].iter().map(|c| number(c)).collect();
                assert!(waits.windows(2).all(|w| w[1] <= w[0] + 1.0), "{t:?}");
            }
            assert!(column(&t, 2).windows(2).all(|w| w[1] <= w[0]));
        }
        // Long prompts compute longer than the fetch of half a layer's experts takes.
        let half = tiers(prompts).rows.into_iter().find(|r| r[0].starts_with("50")).unwrap();
        assert_eq!((number(&half[5]), number(&half[6])), (0.0, 0.0), "{half:?}");

        let few = told(
            "deepseek-v3",
            Job::Decode { batch: 8, context: 4096 },
            "ep=8,expert_tp=1,precision=fp8,micro_batch=1",
        );
        let few = titled(&few, "Experts on");
        let hits: Vec<&Vec<String>> = few.rows.iter().filter(|r| r[7] != "–").collect();
        assert!(!hits.is_empty() && hits.iter().all(|r| number(&r[9]) > number(&r[7])), "{few:?}");
    }

    #[test]
    fn mixed_lengths_wait_less_among_their_like_and_penalties_keep_tokens_near() {
        let all = told("mixtral-8x7b", Job::Prefill { batch: 16, sequence: 8192 }, "tp=1,ep=8,expert_tp=1");
        let lengths = titled(&all, "Sequences");
        assert!(column(lengths, 2)[1] < column(lengths, 2)[0], "{lengths:?}");
        // All eight experts' ranks stand in one host: nothing is far.
        assert!(all.iter().all(|a| !a.title.starts_with("A router")));
        let (q, outcome) = asked("mixtral-8x7b", DECODE, "ep=8,expert_tp=1");
        let mut seen = Seen::new(&q, &outcome.best[0], 0);
        let mut small = q.machine.clone();
        small.cluster.devices_per_host = 2;
        seen.m = &small;
        let far = experts::advice(&seen);
        let outside = column(titled(&far, "A router"), 1);
        assert_eq!(outside[0], 75.0);
        assert!(outside.windows(2).all(|w| w[1] < w[0]));
    }

    #[test]
    fn a_growing_context_leaves_the_device() {
        let all = told("llama-3.1-8b", Job::Decode { batch: 64, context: 131_072 }, "tp=8");
        let cache = titled(&all, "Keys");
        let fetch = column(cache, 4);
        assert!(fetch.windows(2).all(|w| w[1] >= w[0]) && fetch[3] > 0.0, "{cache:?}");
        let near: Vec<f64> =
            cache.rows.iter().map(|r| r[5].split(" / ").next().unwrap().parse().unwrap()).collect();
        assert!(near.windows(2).all(|w| w[1] <= w[0]) && near[3] < 90.0);
        // Who counts reads keeps more of what is popular than a window does.
        let last = cache.rows.last().unwrap();
        assert!(number(&last[8]) >= number(&last[6]), "{last:?}");
        assert!(cache.note.contains("below the limit of 90.0 %"), "{}", cache.note);
        let short = told("llama-3.1-8b", Job::Decode { batch: 64, context: 2048 }, "tp=8");
        assert!(short.iter().all(|a| !a.title.starts_with("Keys")));
    }

    #[test]
    fn every_model_has_its_sums() {
        let train = Job::Train { batch: 32, sequence: 4096 };
        for (job, pins) in [(train, "tp=2,pp=4,dp=1"), (Job::Decode { batch: 256, context: 2048 }, "tp=8")] {
            let (q, outcome) = asked("llama-3.1-8b", job, pins);
            let best = &outcome.best[0];
            let all = advice(&q, best, outcome.idle);
            assert!(all.iter().all(|a| a.rows.iter().all(|r| r.len() == a.columns.len())));
            assert_eq!(all.len(), 3, "no experts, no long context");

            // One item is no faster with stages; one of them leaves more often.
            let stages = titled(&all, "What stages");
            let (one, every) = (column(stages, 4), column(stages, 5));
            assert!(one[1] >= one[0] && every.last().unwrap() < &every[0], "{stages:?}");

            // By hand as much as the estimate has, but for its ends, buffers and libraries.
            let memory = titled(&all, "Memory");
            let share = |term: &str| {
                memory.rows.iter().find(|r| r[0].starts_with(term)).map(|r| number(&r[2])).unwrap()
            };
            let held: f64 = best.estimate.budget.bytes.values().map(|b| b.0 as f64).sum();
            let held = held / q.machine.cluster.device.memory_bytes.value * 100.0;
            // Pieces of a stage are under way in different numbers, which a sum by hand passes over.
            assert!(share("total") < 1.03 * held && share("total") > 0.3 * held, "{held} {memory:?}");

            let limits = titled(&all, "What limits");
            let decode = matches!(job, Job::Decode { .. });
            let attention = limits.rows.iter().find(|r| r[0] == "attention.core").unwrap();
            assert_eq!(attention[5] == "bandwidth-bound", decode, "{limits:?}");
        }
    }
}
