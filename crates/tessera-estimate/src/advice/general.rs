//! Tables for every model: memory from closed formulas, the effect of pipeline stages on one
//! micro-batch, and what limits the most expensive rows.

use tessera_cost::op_cost::{OpCost, RankShare, op_cost};
use tessera_cost::parallelism::{
    Bottleneck, ShardedKernel, batch_utilisation, full_utilisation, pipeline_rate,
};
use tessera_cost::params::{LayerLayout, OptimizerSharding};
use tessera_cost::schedule::{parameter_copies, peak_in_flight_on};
use tessera_cost::{CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::LayerOpKind;
use tessera_mesh::{MemoryTier, Precision};
use tessera_plan::search::budget::{GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, cache_share};
use tessera_plan::search::memory_table::{MemoryPlanInputs, plan_memory};
use tessera_report::html::AdviceTable;

use super::MappingContext;
use crate::format::{format_ns, format_percent, owned_columns};

/// Maximum number of ops in a table, the most expensive first.
const MAX_ROWS: usize = 6;

pub(super) fn general_advice(context: &MappingContext) -> Vec<AdviceTable> {
    [bottleneck_table(context), pipeline_table(context), memory_terms(context)]
        .into_iter()
        .flatten()
        .collect()
}

/// Shows what limits the most expensive rows, and how much twice the tp would speed them up.
fn bottleneck_table(context: &MappingContext) -> Option<AdviceTable> {
    let l = &context.candidate.layout;
    let stack = context.question.work.stacks.iter().max_by_key(|s| s.count)?;
    let routed = context.expert_load();
    let priced = |layout: &LayerLayout| -> Vec<OpCost> {
        let share = RankShare::for_layer(&stack.ops, layout, context.load.tokens);
        let cost = |at| op_cost(context.machine, &stack.ops, at, &share, layout, &context.load, &routed);
        (0..stack.ops.len()).map(cost).collect()
    };
    // The same tokens on twice the ranks.
    let wide = LayerLayout { tp: l.tp * 2, expert_tp: l.expert_tp * 2, ..*l };
    let (now, with_twice_tp) = (priced(l), priced(&wide));
    let kernel = |c: &OpCost| ShardedKernel {
        flops: c.forward.flops,
        replicated_bytes: c.traffic_bytes,
        sharded_bytes: 0.0,
        flops_per_s: context.machine.flops_per_s(l.precision),
        bytes_per_s: context.machine.cluster.device.memory_bytes_per_s.value,
    };
    let total_ns: f64 = now.iter().map(|c| c.forward.total_ns()).sum();
    let mut order: Vec<usize> = (0..now.len()).collect();
    order.sort_by(|a, b| now[*b].forward.total_ns().total_cmp(&now[*a].forward.total_ns()));
    order.truncate(MAX_ROWS);
    let bound = |at: &usize| kernel(&now[*at]).bottleneck_on(1);
    let by_bytes: f64 = (0..now.len())
        .filter(|at| bound(at) == Bottleneck::Bandwidth)
        .map(|at| now[at].forward.total_ns())
        .sum();
    let peak = |costs: &[OpCost]| costs.iter().map(|c| kernel(c).duration_ns(1)).sum::<f64>();
    let rows = order
        .iter()
        .map(|at| {
            let c = &now[*at];
            let faster =
                kernel(c).duration_ns(1) / kernel(&with_twice_tp[*at]).duration_ns(1).max(f64::MIN_POSITIVE);
            vec![
                stack.ops[*at].name.to_string(),
                format_ns(c.forward.total_ns()),
                format_percent(c.forward.total_ns() / total_ns.max(1e-9)),
                format!("{:.2} Gflop", c.forward.flops / 1e9),
                format!("{:.1} MB", c.traffic_bytes / 1e6),
                bound(at).to_string(),
                if faster < 1.05 { "no gain".to_string() } else { format!("× {faster:.1}") },
            ]
        })
        .collect();
    let note = format!(
        "{} of the compute time of a layer ({}, forward, one micro-batch) is limited by memory bandwidth. At the device's peaks and without \
         collectives, twice the tp would make the layer {:.1} times faster: rows whose bytes and operations are not sharded gain nothing.",
        format_percent(by_bytes / total_ns.max(1e-9)),
        stack.name,
        peak(&now) / peak(&with_twice_tp).max(f64::MIN_POSITIVE)
    );
    let names = ["row", "time", "share", "operations", "traffic", "limit", "twice the tp"];
    Some(AdviceTable {
        id: "limits",
        title: "What limits a layer".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}

/// Compares latency and throughput with and without pipeline stages.
fn pipeline_table(context: &MappingContext) -> Option<AdviceTable> {
    let (q, c) = (context.question, context.candidate);
    let layers = q.work.layer_count();
    if layers < 2 {
        return None;
    }
    let own: Vec<f64> = context.best.stages.iter().map(|s| s.micro_batch_ns).collect();
    let total_ns: f64 = own.iter().sum();
    let pp = if c.pp > 1 { c.pp } else { 2 };
    let stage_ns = if c.pp > 1 { own } else { vec![total_ns / 2.0; 2] };
    let tokens = (context.load.tokens / f64::from(c.layout.tp.max(1))).ceil();
    let stage_span = GroupSpan::from_stride(2, c.replica_stage_ranks().max(1), &context.machine.cluster);
    let send = context
        .machine
        .collective_cost(CollectiveOp::SendRecv, tokens * q.work.hidden_size as f64 * 2.0, stage_span)
        .ns;
    let mut in_flight_counts = vec![1, pp, context.best.micro_batches.max(1)];
    in_flight_counts.sort_unstable();
    in_flight_counts.dedup();
    let mut rows = Vec::new();
    let mut push_row = |p: u32, b: u32, ns: &[f64]| {
        let s = pipeline_rate(ns, send, b);
        rows.push(vec![
            p.to_string(),
            b.to_string(),
            format_percent(batch_utilisation(b, p)),
            format_percent(full_utilisation(b, p)),
            format_ns(s.latency_ns),
            format_ns(s.period_ns),
        ]);
    };
    push_row(1, 1, &[total_ns]);
    in_flight_counts.iter().for_each(|b| push_row(pp, *b, &stage_ns));
    let (flat, deep) = (pipeline_rate(&[total_ns], send, 1), pipeline_rate(&stage_ns, send, pp));
    let item = if context.is_training() { "micro-batch, forward and backward," } else { "micro-batch" };
    let which = if c.pp > 1 { "The plan has" } else { "The plan has no pipeline stages;" };
    let note = format!(
        "{which} {pp} stages{}: one {item} takes {} instead of {}, so stages do not reduce latency; with {pp} in flight one \
         completes every {}.",
        if c.pp > 1 { "" } else { " of the same ranks each would need twice the devices" },
        format_ns(deep.latency_ns),
        format_ns(flat.latency_ns),
        format_ns(deep.period_ns)
    );
    let names = [
        "stages P",
        "in flight B",
        "utilisation, B/(B+P−1)",
        "utilisation if kept full",
        "latency",
        "period",
    ];
    Some(AdviceTable {
        id: "stages",
        title: "Effect of pipeline stages".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}

/// Builds the table of a rank's memory by formula; [`MemoryPlanInputs`] defines P, A, K, E and H.
fn memory_terms(context: &MappingContext) -> Option<AdviceTable> {
    let (q, c) = (context.question, context.candidate);
    let l = &c.layout;
    // In training the first stage holds the most activations.
    let stage = if context.is_training() { context.best.stages.first() } else { context.fullest_stage() }?;
    let counts = context.layers_per_stack(stage);
    let layers: f64 = counts.iter().sum();
    let mut mean = LayerMeans::default();
    for (stack, n) in q.work.stacks.iter().zip(&counts) {
        let (dense, routed) = context.price_layer(stack);
        let share = n / layers.max(1.0);
        let cached = stack.ops.iter().map(|r| match r.kind {
            LayerOpKind::Attention { cache_width: cache, .. } => cache,
            _ => 0,
        });
        mean.dense_params += share * dense.weights;
        mean.expert_params += share * routed.expert_weights;
        mean.activation_bytes += share * (dense.kept_bytes + routed.kept_bytes);
        mean.kv_elements += share * cached.sum::<u64>() as f64;
    }
    let experts = context.expert_shape.map_or(0, |s| s.experts);
    let experts_per_rank = experts.div_ceil(u64::from(l.ep.max(1))).max(1) as f64;
    let tokens = context.load.tokens;
    let flight = if context.is_training() {
        peak_in_flight_on(c.schedule, c.pp, c.interleave, context.best.micro_batches, 0)
    } else {
        0.0
    };
    let sequences = q.job.batch_size().div_ceil(u64::from(c.replicas.max(1))) as f64;
    let inputs = MemoryPlanInputs {
        parameters: mean.dense_params,
        bytes_per_parameter: bytes_per_parameter(context, mean.dense_params, mean.expert_params),
        layers: layers as u64,
        activation_bytes: mean.activation_bytes / tokens.max(1.0),
        cache_bytes: mean.kv_elements
            * l.precision.element_bytes().clamp(1.0, 2.0)
            * cache_share(q.work.kv_heads, l),
        experts,
        expert_parameters: mean.expert_params / experts_per_rank,
        device_bytes: context.machine.cluster.device.memory_bytes.value,
        tokens: tokens * flight,
        cached_tokens: if context.is_training() { 0.0 } else { sequences * q.job.context_tokens() as f64 },
        // The inputs are already those of one rank.
        tp: 1,
        ep: l.ep,
    };
    let table = plan_memory(&inputs);
    let rows = table
        .iter()
        .filter(|line| line.bytes.0 > 0 || line.term.starts_with("left"))
        .map(|line| {
            let sum = line.formula.trim_end_matches(" / tp 1").to_string();
            vec![line.term.to_string(), line.bytes.to_string(), format_percent(line.share), sum]
        })
        .collect();
    let budget = &context.best.estimate.budget.bytes;
    let tier =
        |t: MemoryTier| budget.iter().filter(|((x, _), _)| *x == t).map(|(_, b)| b.0 as f64).sum::<f64>();
    let other_tiers = tier(MemoryTier::Peer) + tier(MemoryTier::Host);
    let note = format!(
        "One rank of a stage of {layers:.0} layers, after sharding; P, A and K are means over its layers. The estimate of the fullest rank is \
         {:.1} GB in device memory{}: it also includes embedding, head, buffers and libraries.",
        tier(MemoryTier::Hbm) / 1e9,
        if other_tiers > 0.0 {
            format!(" and {:.1} GB in other tiers", other_tiers / 1e9)
        } else {
            String::new()
        }
    );
    let names = ["term", "bytes", "of H", "sum"];
    Some(AdviceTable {
        id: "memory-formulas",
        title: "Memory from closed formulas".into(),
        note,
        columns: owned_columns(&names),
        rows,
    })
}

/// Means over the layers of a stage, on one rank.
#[derive(Default)]
struct LayerMeans {
    dense_params: f64,
    expert_params: f64,
    activation_bytes: f64,
    kv_elements: f64,
}

/// Returns the bytes per parameter, including training state, averaged over parameters inside and
/// outside of experts.
fn bytes_per_parameter(context: &MappingContext, dense: f64, routed: f64) -> f64 {
    let c = context.candidate;
    let width = c.layout.precision.element_bytes();
    let copies = f64::from(parameter_copies(c.schedule, c.pp));
    if !context.is_training() {
        return width;
    }
    let master = if c.layout.precision == Precision::F32 { 0.0 } else { MASTER_BYTES };
    let each = |shards: u32| {
        let over = |on: bool| if on { f64::from(shards.max(1)) } else { 1.0 };
        let full = c.optimizer == OptimizerSharding::Full;
        (width + GRADIENT_BYTES) / over(full)
            + (MOMENTS_BYTES + master) / over(c.optimizer != OptimizerSharding::Replicated)
    };
    let all = (dense + routed).max(1.0);
    let mean = copies * (dense * each(c.replicas) + routed * each(c.expert_replicas)) / all;
    // The value is for display: three decimals are enough.
    (mean * 1e3).round() / 1e3
}
