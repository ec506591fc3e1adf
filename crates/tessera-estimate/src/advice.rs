//! Advice about a chosen mapping beyond its gates: what other routings, capacities, context lengths
//! and stage counts would change. The note of each table states its conclusion; the advice never
//! changes the choice.

mod general;
mod kv_cache;
mod routed_experts;

use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{self, ExpertLoad};
use tessera_cost::params::{LayerLayout, TpScheme};
use tessera_cost::{GroupSpan, MachineModel};
use tessera_ir::analytic_model::{LayerOp, LayerOpKind, LayerStack, OpSharding};
use tessera_mesh::Precision;
use tessera_plan::search::{Candidate, Job, RankedCandidate, SearchQuery, StageAssignment};
use tessera_report::html::AdviceTable;

/// Returns the advice tables for a mapping that leaves `idle` devices unused. Tables that do not
/// apply are omitted.
pub(crate) fn build_advice(q: &SearchQuery, best: &RankedCandidate, idle: u32) -> Vec<AdviceTable> {
    let context = MappingContext::new(q, best, idle);
    let mut out = routed_experts::expert_advice(&context);
    out.extend(kv_cache::context_advice(&context));
    out.extend(general::general_advice(&context));
    out
}

/// The routed experts of a layer.
#[derive(Debug, Clone, Copy)]
struct ExpertShape {
    experts: u64,
    top_k: u64,
    /// Elements of a token's hidden state.
    hidden_size: u64,
    /// Parameters of one expert on one of the ranks that share it.
    params_per_rank: f64,
}

/// A mapping and the load of one of its micro-batches.
struct MappingContext<'a> {
    question: &'a SearchQuery,
    machine: &'a MachineModel,
    best: &'a RankedCandidate,
    candidate: &'a Candidate,
    idle_devices: u32,
    load: LayerLoad,
    expert_shape: Option<ExpertShape>,
    /// Tokens of all ranks in one expert exchange.
    exchange_tokens: f64,
}

impl<'a> MappingContext<'a> {
    fn new(question: &'a SearchQuery, best: &'a RankedCandidate, idle_devices: u32) -> MappingContext<'a> {
        let candidate = &best.candidate;
        let l = &candidate.layout;
        let tokens = f64::from(candidate.micro_batch) * question.job.query_tokens() as f64;
        let expert_shape = question.work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
            LayerOpKind::Experts { experts, top_k, k, n, matrices } => Some(ExpertShape {
                experts,
                top_k,
                hidden_size: k,
                params_per_rank: (k * n * matrices) as f64 / f64::from(l.expert_tp.max(1)),
            }),
            _ => None,
        });
        let load = LayerLoad {
            tokens,
            sequences: f64::from(candidate.micro_batch),
            keys: question.job.context_tokens() as f64,
            window: None,
            training: matches!(question.job, Job::Train { .. }),
            recompute: candidate.recompute,
        };
        let exchange_tokens = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp.max(1));
        MappingContext {
            question,
            machine: &question.machine,
            best,
            candidate,
            idle_devices,
            load,
            expert_shape,
            exchange_tokens,
        }
    }

    /// Returns the load of the experts under the plan's own routing and capacity.
    fn expert_load(&self) -> ExpertLoad {
        let l = &self.candidate.layout;
        self.expert_shape.map_or(ExpertLoad::NONE, |s| {
            moe::expert_load(
                s.experts,
                s.top_k,
                l.ep,
                self.exchange_tokens,
                self.question.routing,
                l.capacity_pct,
            )
        })
    }

    fn mesh_spans(&self) -> GroupSpans {
        let (l, cluster) = (&self.candidate.layout, &self.machine.cluster);
        GroupSpans {
            tp: GroupSpan::from_stride(l.tp, 1, cluster),
            expert_tp: GroupSpan::from_stride(l.expert_tp, 1, cluster),
            ep: GroupSpan::from_stride(l.ep, l.expert_tp, cluster),
        }
    }

    /// Prices one layer: its dense part, and its routed experts.
    fn price_layer(&self, stack: &LayerStack) -> (LayerCost, LayerCost) {
        let l = &self.candidate.layout;
        let (dense, routed): (Vec<LayerOp>, Vec<LayerOp>) =
            stack.ops.iter().cloned().partition(|r| r.sharding != OpSharding::Experts);
        let dense_layout =
            LayerLayout { expert_tp: 1, ep: 1, wire_precision: Precision::Bf16, capacity_pct: 0, ..*l };
        // tp shards an expert's tokens only under these schemes.
        let tp = if matches!(l.scheme, TpScheme::Megatron | TpScheme::RsMmAg) { l.tp } else { 1 };
        let expert_layout = LayerLayout { tp, ring: 1, scheme: TpScheme::Megatron, ..*l };
        let price = |rows: &[LayerOp], layout: &LayerLayout, load: &ExpertLoad| {
            layer_cost(self.machine, rows, layout, &self.load, &self.mesh_spans(), load)
        };
        (price(&dense, &dense_layout, &ExpertLoad::NONE), price(&routed, &expert_layout, &self.expert_load()))
    }

    /// Returns how many layers of each stack a stage has.
    fn layers_per_stack(&self, stage: &StageAssignment) -> Vec<f64> {
        let mut from = 0;
        let count_layers = |s: &LayerStack| {
            let (start, end) = (from, from + s.count);
            from = end;
            let overlap = |p: &std::ops::Range<u64>| p.end.min(end).saturating_sub(p.start.max(start));
            stage.chunks.iter().map(overlap).sum::<u64>() as f64
        };
        self.question.work.stacks.iter().map(count_layers).collect()
    }

    /// Returns the stage with the most layers.
    fn fullest_stage(&self) -> Option<&StageAssignment> {
        let layer_count = |s: &StageAssignment| s.chunks.iter().map(|p| p.end - p.start).sum::<u64>();
        self.best.stages.iter().rev().max_by_key(|s| layer_count(s))
    }

    fn is_training(&self) -> bool {
        self.load.training
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_cost::Profile;
    use tessera_cost::moe::Routing;
    use tessera_mesh::catalog;
    use tessera_models::zoo;
    use tessera_plan::search::{Objective, Pins, SearchOutcome, SearchSpace, search};

    use super::*;

    fn search_best(model: &str, job: Job, pins: &str) -> (SearchQuery, SearchOutcome) {
        let profile = Profile::builtin("torch-2.11").unwrap();
        let machine = MachineModel::new(catalog::get("hgx-h200").unwrap(), profile);
        let work = zoo::find_model(model).unwrap().to_analytic_model(true);
        let mut space = SearchSpace::for_job(&work, job, &machine.cluster);
        space.devices = 8;
        let (objective, routing) = (Objective::Throughput, Routing::Random);
        let q =
            SearchQuery { work, job, objective, machine, routing, pins: Pins::parse(pins).unwrap(), space };
        let outcome = search(&q);
        (q, outcome)
    }

    fn advice_for(model: &str, job: Job, pins: &str) -> Vec<AdviceTable> {
        let (q, outcome) = search_best(model, job, pins);
        build_advice(&q, &outcome.best_candidates[0], outcome.idle_devices)
    }

    fn find_by_title<'a>(all: &'a [AdviceTable], title: &str) -> &'a AdviceTable {
        all.iter().find(|a| a.title.starts_with(title)).unwrap()
    }

    /// Parses the number of a cell; times are returned in nanoseconds.
    fn parse_number(cell: &str) -> f64 {
        let words: Vec<&str> = cell.trim_start_matches(['×', '<', ' ']).split_whitespace().collect();
        let unit = match words.get(1) {
            Some(&"µs") => 1e3,
            Some(&"ms") => 1e6,
            Some(&"s") => 1e9,
            _ => 1.0,
        };
        words[0].trim_end_matches(',').parse::<f64>().unwrap() * unit
    }

    fn parse_column(a: &AdviceTable, at: usize) -> Vec<f64> {
        a.rows.iter().map(|r| parse_number(&r[at])).collect()
    }

    const DECODE: Job = Job::Decode { batch: 64, context: 32_768 };

    #[test]
    fn routing_and_capacity_tables_are_consistent() {
        let all = advice_for("mixtral-8x7b", DECODE, "ep=8,expert_tp=1");
        let routings = find_by_title(&all, "Sensitivity to expert routing");
        let slowest = parse_column(routings, 1);
        let named = |name: &str| routings.rows.iter().position(|r| r[0].starts_with(name)).unwrap();
        assert!(slowest.iter().all(|s| *s >= slowest[named("w0")]), "{routings:?}");
        assert_eq!(routings.rows[named("random (planned)")][4], "× 1.00");
        assert!(parse_number(&routings.rows[named("w2")][4]) > parse_number(&routings.rows[named("w0")][4]));

        let capacity = find_by_title(&all, "Expert capacity");
        let (dropped, bytes) = (parse_column(capacity, 1), parse_column(capacity, 2));
        assert!(dropped.windows(2).all(|w| w[1] <= w[0]) && dropped[0] > *dropped.last().unwrap());
        assert!(bytes.windows(2).all(|w| w[1] >= w[0]), "{bytes:?}");
        assert_eq!(capacity.rows.iter().filter(|r| r[0].contains("advised")).count(), 1);
    }

    #[test]
    fn a_wider_window_never_waits_longer_and_a_forecast_helps() {
        let prompts = Job::Prefill { batch: 16, sequence: 8192 };
        let tiers = |job| {
            find_by_title(&advice_for("mixtral-8x7b", job, "ep=8,expert_tp=1"), "Experts in host memory")
                .clone()
        };
        for t in [tiers(DECODE), tiers(prompts)] {
            for row in &t.rows {
                let waits: Vec<f64> = row[4..7].iter().map(|c| parse_number(c)).collect();
                assert!(waits.windows(2).all(|w| w[1] <= w[0] + 1.0), "{t:?}");
            }
            assert!(parse_column(&t, 2).windows(2).all(|w| w[1] <= w[0]));
        }
        // Long prompts compute for longer than fetching half of a layer's experts takes.
        let half = tiers(prompts).rows.into_iter().find(|r| r[0].starts_with("50")).unwrap();
        assert_eq!((parse_number(&half[5]), parse_number(&half[6])), (0.0, 0.0), "{half:?}");

        let few = advice_for(
            "deepseek-v3",
            Job::Decode { batch: 8, context: 4096 },
            "ep=8,expert_tp=1,precision=fp8,micro_batch=1",
        );
        let few = find_by_title(&few, "Experts in host memory");
        let hits: Vec<&Vec<String>> = few.rows.iter().filter(|r| r[7] != "–").collect();
        assert!(
            !hits.is_empty() && hits.iter().all(|r| parse_number(&r[9]) > parse_number(&r[7])),
            "{few:?}"
        );
    }

    #[test]
    fn bucketing_reduces_waits_and_penalties_keep_tokens_local() {
        let all =
            advice_for("mixtral-8x7b", Job::Prefill { batch: 16, sequence: 8192 }, "tp=1,ep=8,expert_tp=1");
        let lengths = find_by_title(&all, "Sequences");
        assert!(parse_column(lengths, 2)[1] < parse_column(lengths, 2)[0], "{lengths:?}");
        // The ranks of all eight experts are in one host, so no expert is remote.
        assert!(all.iter().all(|a| !a.title.starts_with("A router")));
        let (q, outcome) = search_best("mixtral-8x7b", DECODE, "ep=8,expert_tp=1");
        let mut context = MappingContext::new(&q, &outcome.best_candidates[0], 0);
        let mut small = q.machine.clone();
        small.cluster.devices_per_host = 2;
        context.machine = &small;
        let far = routed_experts::expert_advice(&context);
        let outside = parse_column(find_by_title(&far, "A router"), 1);
        assert_eq!(outside[0], 75.0);
        assert!(outside.windows(2).all(|w| w[1] < w[0]));
    }

    #[test]
    fn a_growing_context_spills_from_the_device() {
        let all = advice_for("llama-3.1-8b", Job::Decode { batch: 64, context: 131_072 }, "tp=8");
        let cache = find_by_title(&all, "KV cache");
        let fetch = parse_column(cache, 4);
        assert!(fetch.windows(2).all(|w| w[1] >= w[0]) && fetch[3] > 0.0, "{cache:?}");
        let near: Vec<f64> =
            cache.rows.iter().map(|r| r[5].split(" / ").next().unwrap().parse().unwrap()).collect();
        assert!(near.windows(2).all(|w| w[1] <= w[0]) && near[3] < 90.0);
        // A policy that counts reads keeps more of the popular segments than a window does.
        let last = cache.rows.last().unwrap();
        assert!(parse_number(&last[8]) >= parse_number(&last[6]), "{last:?}");
        assert!(cache.note.contains("below the limit of 90.0 %"), "{}", cache.note);
        let short = advice_for("llama-3.1-8b", Job::Decode { batch: 64, context: 2048 }, "tp=8");
        assert!(short.iter().all(|a| !a.title.starts_with("KV cache")));
    }

    #[test]
    fn every_model_has_the_general_tables() {
        let train = Job::Train { batch: 32, sequence: 4096 };
        for (job, pins) in [(train, "tp=2,pp=4,dp=1"), (Job::Decode { batch: 256, context: 2048 }, "tp=8")] {
            let (q, outcome) = search_best("llama-3.1-8b", job, pins);
            let best = &outcome.best_candidates[0];
            let all = build_advice(&q, best, outcome.idle_devices);
            assert!(all.iter().all(|a| a.rows.iter().all(|r| r.len() == a.columns.len())));
            assert_eq!(all.len(), 3, "the model has no experts and no long context");

            // Stages do not speed up one micro-batch, but they complete micro-batches more often.
            let stages = find_by_title(&all, "Effect of pipeline stages");
            let (one, every) = (parse_column(stages, 4), parse_column(stages, 5));
            assert!(one[1] >= one[0] && every.last().unwrap() < &every[0], "{stages:?}");

            // The sum from the formulas agrees with the estimate, except for embedding, head,
            // buffers and libraries.
            let memory = find_by_title(&all, "Memory from");
            let share = |term: &str| {
                memory.rows.iter().find(|r| r[0].starts_with(term)).map(|r| parse_number(&r[2])).unwrap()
            };
            let used: f64 = best.estimate.budget.bytes.values().map(|b| b.0 as f64).sum();
            let used = used / q.machine.cluster.device.memory_bytes.value * 100.0;
            // Chunks of a stage have different numbers of micro-batches in flight, which the
            // formulas ignore.
            assert!(share("total") < 1.03 * used && share("total") > 0.3 * used, "{used} {memory:?}");

            let limits = find_by_title(&all, "What limits");
            let decode = matches!(job, Job::Decode { .. });
            let attention = limits.rows.iter().find(|r| r[0] == "attention.core").unwrap();
            assert_eq!(attention[5] == "bandwidth-bound", decode, "{limits:?}");
        }
    }
}
