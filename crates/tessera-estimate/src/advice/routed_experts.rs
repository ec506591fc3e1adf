//! Advice about routed experts: the effect of their routing, the cost of a capacity, remote
//! traffic, and experts in host memory.

use tessera_base::Bytes;
use tessera_base::random::Rng;
use tessera_cost::CollectiveOp;
use tessera_cost::moe::{
    self, ExchangeItem, ExchangeRounds, Routing, buffer_bytes, count_cold_experts, dispatch_bytes,
    expert_popularity, remote_share,
};
use tessera_cost::params::ExpertStorage;
use tessera_cost::tiers::{
    LayerTimes, choose_window, expert_hit_rate, sample_routing_trace, select_hot_experts, simulate_prefetch,
};
use tessera_ir::EvictionPolicy;
use tessera_ir::analytic_model::LayerOpKind;
use tessera_mesh::MemoryTier;
use tessera_plan::search::advice::{ExpertLayer, advise_experts};
use tessera_plan::search::{MemoryUse, SearchQuery, estimate_candidate};
use tessera_report::html::AdviceTable;

use super::{ExpertShape, MappingContext};
use crate::format::{format_ns, format_percent, owned_columns};

/// Seed of all random draws.
const SEED: u64 = 7;

pub(super) fn expert_advice(context: &MappingContext) -> Vec<AdviceTable> {
    let Some(shape) = context.expert_shape else { return Vec::new() };
    let mut out = vec![routing_table(context, &shape), capacity_table(context, &shape)];
    out.extend(locality_table(context, &shape));
    out.extend(length_table(context, &shape));
    out.extend(host_experts_table(context, &shape));
    out
}

/// Compares every named routing distribution with the one of the query.
fn routing_table(context: &MappingContext, s: &ExpertShape) -> AdviceTable {
    let l = &context.candidate.layout;
    let mut all = vec![Routing::Balanced, Routing::Random, Routing::PowerLaw(1.2)];
    all.extend((0..8).map(Routing::Workload));
    if !all.contains(&context.question.routing) {
        all.push(context.question.routing);
    }
    let mut q: SearchQuery = context.question.clone();
    let own = context.best.estimate.step_ns;
    let mut worst = (1.0, context.question.routing);
    let rows = all
        .into_iter()
        .map(|routing| {
            q.routing = routing;
            let load =
                moe::expert_load(s.experts, s.top_k, l.ep, context.exchange_tokens, routing, l.capacity_pct);
            let step = estimate_candidate(&q, context.candidate).map(|r| r.estimate.step_ns);
            if let Ok(ns) = step
                && ns / own > worst.0
            {
                worst = (ns / own, routing);
            }
            let here = if routing == context.question.routing { " (planned)" } else { "" };
            vec![
                format!("{}{here}", routing.name()),
                format!("{:.2}", load.slowest_over_mean),
                format!("{:.2}", load.std_over_mean),
                format_percent(load.dropped),
                step.map_or("does not fit".to_string(), |ns| format!("× {:.2}", ns / own)),
            ]
        })
        .collect();
    let note = if worst.0 > 1.005 {
        format!(
            "The plan assumes {} routing; under {} a step takes {:.2} times as long.",
            context.question.routing.name(),
            worst.1.name(),
            worst.0
        )
    } else {
        format!(
            "No routing makes a step longer than {}, which the plan assumes.",
            context.question.routing.name()
        )
    };
    let names = ["routing", "slowest rank / mean", "std / mean over experts", "dropped", "step"];
    AdviceTable {
        id: "routing",
        title: "Sensitivity to expert routing".into(),
        note,
        columns: owned_columns(&names),
        rows,
    }
}

fn capacity_table(context: &MappingContext, s: &ExpertShape) -> AdviceTable {
    let l = &context.candidate.layout;
    let query = ExpertLayer {
        experts: s.experts,
        top_k: s.top_k,
        ep: l.ep,
        tokens: context.exchange_tokens,
        width: s.hidden_size,
        wire: l.wire_precision,
        routing: context.question.routing,
        expert_bytes: s.params_per_rank * l.precision.element_bytes(),
    };
    let found = advise_experts(&query, &context.question.space.thresholds);
    let rows = found
        .capacity
        .points
        .iter()
        .filter(|p| p.pct <= 150 && (p.pct % 10 == 0 || p.pct == found.capacity.chosen.pct))
        .map(|p| {
            let mark = if p.pct == found.capacity.chosen.pct { " (advised)" } else { "" };
            vec![
                format!("{:.2}{mark}", f64::from(p.pct) / 100.0),
                format_percent(p.dropped),
                Bytes(p.peak_bytes as u64).to_string(),
                format!("{:.2}", p.slowest),
            ]
        })
        .collect();
    let plan_note = match l.capacity_pct {
        0 => "The plan drops no token".to_string(),
        pct => format!("The plan has a capacity of {:.2}", f64::from(pct) / 100.0),
    };
    let mut sentences = found.to_sentences();
    sentences.truncate(if l.ep > 1 { 2 } else { 0 });
    let note =
        format!("{plan_note}. {}", sentences.iter().map(|s| to_sentence(s)).collect::<Vec<_>>().join(" "));
    let names = ["capacity factor", "dropped", "dispatch buffers", "slowest rank / mean"];
    AdviceTable {
        id: "capacity",
        title: "Expert capacity".into(),
        note: note.trim_end().to_string(),
        columns: owned_columns(&names),
        rows,
    }
}

fn to_sentence(s: &str) -> String {
    let mut letters = s.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).chain(['.']).collect())
}

/// Estimates how much traffic stays local if the router prefers nearby experts.
fn locality_table(context: &MappingContext, s: &ExpertShape) -> Option<AdviceTable> {
    let (l, cluster) = (&context.candidate.layout, &context.machine.cluster);
    let domains = context.mesh_spans().ep.domains;
    let (place_name, devices) =
        if domains > 1 { ("switch domain", cluster.domain_size) } else { ("host", cluster.devices_per_host) };
    let local_ranks = (devices / l.expert_tp.max(1)).clamp(1, l.ep);
    if local_ranks == l.ep {
        return None;
    }
    let local = s.experts * u64::from(local_ranks) / u64::from(l.ep);
    let share = |penalty: f64| remote_share(s.experts, s.top_k, local, penalty, 1.0);
    let rows = [0.0, 0.5, 1.0, 2.0, 4.0]
        .into_iter()
        .map(|penalty| {
            let out = share(penalty);
            vec![
                format!("{penalty}"),
                format_percent(out),
                format!("{:.2} of {}", out * s.top_k as f64, s.top_k),
            ]
        })
        .collect();
    let inside = if domains > 1 {
        String::new()
    } else {
        " Within one domain all experts are equally distant, so a penalty only reduces traffic between hosts."
            .to_string()
    };
    Some(AdviceTable {
        id: "router-penalty",
        title: format!("A router that prefers experts in its own {place_name}"),
        note: format!(
            "{} of a token's experts are outside its {place_name}; a penalty of 1 on their logits (of unit scale) reduces that to {}.{inside}",
            format_percent(share(0.0)),
            format_percent(share(1.0))
        ),
        columns: owned_columns(&["penalty", "outside", "experts per token"]),
        rows,
    })
}

/// Compares sequences of mixed lengths in arrival order with sequences bucketed by length.
fn length_table(context: &MappingContext, s: &ExpertShape) -> Option<AdviceTable> {
    let l = &context.candidate.layout;
    let longest = context.question.job.query_tokens();
    let ranks = (l.ep * l.expert_tp / l.tp.max(1)) as usize;
    if l.ep == 1 || ranks < 2 || longest < 64 {
        return None;
    }
    let mut dice = Rng::new(SEED, [0x6c65_6e67, 0]);
    let min_length = longest / 16;
    let draw = |_| ExchangeItem {
        tokens: min_length + dice.next_below((longest - min_length + 1) as usize) as u64,
        kind: 0,
    };
    let items: Vec<ExchangeItem> = (0..(8 * ranks).min(512)).map(draw).collect();
    let own = context.exchange_tokens / f64::from(l.ep * l.expert_tp);
    let bytes = dispatch_bytes(own, s.hidden_size, context.expert_load().remote_copies, l.wire_precision);
    let op = CollectiveOp::AllToAll;
    let ns = context.machine.collective_cost(op, buffer_bytes(bytes, l.ep), context.mesh_spans().ep).ns
        / own.max(1.0);
    // Each rank sends its tp shard of a sequence.
    let ns = ns / f64::from(l.tp.max(1));
    let classes = [longest / 8, longest / 4, longest / 2, longest * 3 / 4];
    let orders = [
        ("in arrival order", ExchangeRounds::in_order(&items, ranks)),
        ("bucketed by length", ExchangeRounds::by_length_class(&items, ranks, &classes)),
    ];
    let wait = |r: &ExchangeRounds| r.longest_wait_ns(&items, ns);
    let note = format!(
        "With lengths distributed uniformly from {min_length} to {longest} tokens, bucketing by length would reduce the longest wait for an \
         all-to-all from {} to {}, over {} sequences on {ranks} replicas (simulated).",
        format_ns(wait(&orders[0].1)),
        format_ns(wait(&orders[1].1)),
        items.len()
    );
    let rows = orders
        .iter()
        .map(|(name, r)| {
            let total = format_ns(r.total_ns(&items, ns));
            vec![(*name).to_string(), r.rounds.len().to_string(), format_ns(wait(r)), total]
        })
        .collect();
    let names = ["sequences", "all-to-alls", "longest wait", "all dispatches of a layer"];
    Some(AdviceTable {
        id: "lengths",
        title: "Sequences of different lengths".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}

/// Estimates what it costs to keep only a part of the experts in device memory.
fn host_experts_table(context: &MappingContext, s: &ExpertShape) -> Option<AdviceTable> {
    let layers = fullest_stage_times(context)?;
    let shares = resident_shares(context);
    let is_planned = shares.len() > ASSUMED_SHARES.len();
    let popularity = expert_popularity(
        s.experts,
        s.top_k,
        context.candidate.layout.ep,
        context.exchange_tokens,
        context.question.routing,
        0,
    );
    let table: Vec<HostExpertsRow> =
        shares.iter().map(|share| simulate_host_experts(context, s, &popularity, &layers, *share)).collect();
    let note = host_experts_note(table.first()?, is_planned);
    let rows = table.iter().map(HostExpertsRow::to_cells).collect();
    let names = [
        "in device memory",
        "pinned per layer",
        "cold assignments",
        "fetched per layer",
        "stall, window 1",
        "2",
        "3",
        "LRU hits",
        "LRU + hotness",
        "LRU + forecast",
    ];
    Some(AdviceTable {
        id: "experts-on-host",
        title: "Experts in host memory".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}

/// Returns the layers of the fullest stage with their times. `fetch_ns` is 1 for a layer with
/// experts, and 0 for any other layer.
fn fullest_stage_times(context: &MappingContext) -> Option<Vec<LayerTimes>> {
    let stage = context.fullest_stage()?;
    let mut layers = Vec::new();
    for (stack, n) in context.question.work.stacks.iter().zip(context.layers_per_stack(stage)) {
        let (dense, routed) = context.price_layer(stack);
        let has = stack.ops.iter().any(|r| matches!(r.kind, LayerOpKind::Experts { .. }));
        let fetch_ns = if has { 1.0 } else { 0.0 };
        let times =
            LayerTimes { before_ns: dense.forward.total_ns(), after_ns: routed.forward.total_ns(), fetch_ns };
        layers.extend(std::iter::repeat_n(times, n as usize));
    }
    Some(layers)
}

/// Shares of the experts in device memory that every table has.
const ASSUMED_SHARES: [f64; 3] = [0.25, 0.5, 0.75];

/// Returns the assumed shares, after that of the plan if the plan keeps experts in host memory and
/// has another share.
fn resident_shares(context: &MappingContext) -> Vec<f64> {
    let mut shares = ASSUMED_SHARES.to_vec();
    if context.candidate.experts_at == ExpertStorage::Host {
        let bytes_in = |tier| {
            let key = (tier, MemoryUse::Experts);
            context.best.estimate.budget.bytes.get(&key).map_or(0.0, |b| b.0 as f64)
        };
        let own =
            bytes_in(MemoryTier::Hbm) / (bytes_in(MemoryTier::Hbm) + bytes_in(MemoryTier::Host)).max(1.0);
        if own < 1.0 && !shares.contains(&own) {
            shares.insert(0, own);
        }
    }
    shares
}

/// Simulates a stage with a share of its experts in device memory.
fn simulate_host_experts(
    context: &MappingContext,
    s: &ExpertShape,
    popularity: &[f64],
    layers: &[LayerTimes],
    share: f64,
) -> HostExpertsRow {
    let l = &context.candidate.layout;
    let expert_bytes = s.params_per_rank * l.precision.element_bytes();
    let hot = select_hot_experts(popularity, expert_bytes, share * s.experts as f64 * expert_bytes);
    let touched = count_cold_experts(
        s.experts,
        s.top_k,
        l.ep,
        context.exchange_tokens,
        context.question.routing,
        share,
    )
    .selected;
    let fetch_ns = context.machine.tier_fetch_ns(MemoryTier::Host, touched * expert_bytes);
    let layers: Vec<LayerTimes> =
        layers.iter().map(|x| LayerTimes { fetch_ns: x.fetch_ns * fetch_ns, ..*x }).collect();
    HostExpertsRow {
        resident_share: share,
        hot_count: hot.hot.len(),
        cold_share: hot.cold_share,
        fetched_bytes: touched * expert_bytes,
        stalls_ns: [1, 2, 3].map(|w| simulate_prefetch(&layers, w).stall_ns),
        window: choose_window(&layers, 3).window,
        hit_rates: simulate_hit_rates(context, s, share),
    }
}

fn host_experts_note(first: &HostExpertsRow, is_planned: bool) -> String {
    let placement = if is_planned {
        "The plan keeps some of its experts in host memory."
    } else {
        "All experts fit in device memory; the table applies to a smaller device or a larger model."
    };
    let hit_rates = match first.hit_rates {
        Some([lru, often, ahead]) => format!(
            "The hit rate is {} with LRU, {} with LRU and hotness, and {} with LRU and a forecast that is right in \
             8 of 10 cases (simulated).",
            format_percent(lru),
            format_percent(often),
            format_percent(ahead)
        ),
        None => "A batch needs more of a rank's experts than fit in device memory, so an LRU cache would not help."
            .to_string(),
    };
    format!(
        "{placement} With {:.0} % of the experts in device memory, {} of assignments need an expert from the host; a \
         prefetch window of {} layers leaves a stall of {} per forward. {hit_rates}",
        first.resident_share * 100.0,
        format_percent(first.cold_share),
        first.window,
        format_ns(first.stalls_ns[first.window - 1]),
    )
}

struct HostExpertsRow {
    resident_share: f64,
    hot_count: usize,
    cold_share: f64,
    fetched_bytes: f64,
    stalls_ns: [f64; 3],
    window: usize,
    hit_rates: Option<[f64; 3]>,
}

impl HostExpertsRow {
    fn to_cells(&self) -> Vec<String> {
        let mut row = vec![
            format_percent(self.resident_share),
            self.hot_count.to_string(),
            format_percent(self.cold_share),
            Bytes(self.fetched_bytes as u64).to_string(),
        ];
        row.extend(self.stalls_ns.iter().map(|ns| format_ns(*ns)));
        row.extend((0..3).map(|at| self.hit_rates.map_or("–".to_string(), |h| format_percent(h[at]))));
        row
    }
}

/// Returns the hit rates of LRU, of LRU with hotness, and of LRU with a forecast, on a short random
/// trace of one rank's experts. Returns `None` if one step needs more experts than fit.
fn simulate_hit_rates(context: &MappingContext, s: &ExpertShape, share: f64) -> Option<[f64; 3]> {
    let l = &context.candidate.layout;
    let local = s.experts.div_ceil(u64::from(l.ep)) as f64;
    let touched =
        count_cold_experts(s.experts, s.top_k, l.ep, context.exchange_tokens, context.question.routing, 0.0)
            .selected;
    // A large number of experts behaves like a smaller one with the same proportions.
    let simulated_experts = local.min(64.0);
    let (per_step, resident) =
        ((touched / local * simulated_experts).ceil() as usize, (simulated_experts * share) as usize);
    if per_step == 0 || per_step > resident {
        return None;
    }
    let popular = matches!(context.question.routing, Routing::PowerLaw(_) | Routing::Workload(1..=3 | 6 | 7));
    let exponent = if popular { 1.0 } else { 0.0 };
    let trace = sample_routing_trace(SEED, (simulated_experts as usize, per_step), 64, exponent, 16, 0.8);
    let rate = |keep, ahead| expert_hit_rate(&trace, resident, keep, ahead);
    Some([
        rate(EvictionPolicy::Lru, false),
        rate(EvictionPolicy::LruHotness, false),
        rate(EvictionPolicy::Lru, true),
    ])
}
