//! Chooses the axis that helps a deadline: tensor parallelism, pipeline parallelism or replication.
//! The choice uses a few numbers that can be checked on paper. The search finds better mappings;
//! this choice explains their shape.

use tessera_cost::layer::{GroupSpans, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, expert_load};
use tessera_cost::op_cost::{RankShare, op_cost};
use tessera_cost::parallelism::{ParallelismChoice, ParallelismInputs, ShardedKernel, choose_parallelism};
use tessera_cost::params::{LayerLayout, Recompute, TpScheme};
use tessera_cost::{CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::{LayerOp, OpSharding};
use tessera_mesh::Precision;

use super::space::divisors;
use super::{Job, Objective, SearchQuery};

/// Returns the choice for one call of an inference workload with a deadline: all sequences of a
/// decode step, or one prompt. Returns `None` for other queries, or if no number of devices holds
/// the model.
#[must_use]
pub fn choose_axes(q: &SearchQuery) -> Option<ParallelismChoice> {
    let mut choice = choose_parallelism(&axis_facts(q)?)?;
    choice.reasons.extend(describe_roofline(q, choice.tp.max(2)));
    Some(choice)
}

/// Describes the maximum gain of tp: whether compute or memory bandwidth bounds the most frequent
/// layer.
fn describe_roofline(q: &SearchQuery, tp: u32) -> Option<String> {
    let m = &q.machine;
    let stack = q.work.stacks.iter().max_by_key(|s| s.count)?;
    let (layout, load) = (sharded_layout(q, matmul_precision(q), TpScheme::Megatron, 1), call_load(q));
    let share = RankShare::for_layer(&stack.ops, &layout, load.tokens);
    let routed = query_expert_load(q, &load);
    let mut kernel = ShardedKernel {
        flops: 0.0,
        replicated_bytes: 0.0,
        sharded_bytes: 0.0,
        flops_per_s: m.flops_per_s(layout.precision),
        bytes_per_s: m.cluster.device.memory_bytes_per_s.value,
    };
    for (at, r) in stack.ops.iter().enumerate() {
        let cost = op_cost(m, &stack.ops, at, &share, &layout, &load, &routed);
        kernel.flops += cost.forward.flops;
        if r.sharding == OpSharding::Replicated {
            kernel.replicated_bytes += cost.traffic_bytes
        } else {
            kernel.sharded_bytes += cost.traffic_bytes
        }
    }
    let bytes = kernel.replicated_bytes + kernel.sharded_bytes;
    Some(format!(
        "a layer is {}: {:.2} Gflop and {:.1} MB, of which tp shards {:.0} %; tp={tp} makes it at best {:.1} times faster",
        kernel.bottleneck_on(1),
        kernel.flops / 1e9,
        bytes / 1e6,
        kernel.sharded_bytes / bytes.max(1.0) * 100.0,
        kernel.tp_speedup(tp)
    ))
}

/// Returns the inputs of [`choose_axes`]: the time of one call by layer and by tp, the time of a
/// send, and the devices. Returns `None` for training, or without a deadline.
#[must_use]
pub fn axis_facts(q: &SearchQuery) -> Option<ParallelismInputs> {
    let Objective::Deadline(deadline) = q.objective else { return None };
    if matches!(q.job, Job::Train { .. }) {
        return None;
    }
    let (m, devices) = (&q.machine, q.space.devices);
    let whole = layer_times(q, 1);
    let admitted =
        |tp: &u32| *tp > 1 && u64::from(*tp) <= q.work.heads && q.work.heads.is_multiple_of(u64::from(*tp));
    let weights = q.work.parameter_count() as f64 * matmul_precision(q).element_bytes();
    let room = m.cluster.device.memory_bytes.value - m.reserved_bytes();
    let bytes = call_load(q).tokens * q.work.hidden_size as f64 * 2.0;
    Some(ParallelismInputs {
        deadline_ns: deadline.0 as f64,
        period_ns: f64::INFINITY,
        tp_ns: divisors(devices).filter(admitted).map(|tp| (tp, layer_times(q, tp).iter().sum())).collect(),
        part_ns: whole,
        send_ns: m
            .collective_cost(CollectiveOp::SendRecv, bytes, GroupSpan::from_stride(2, 1, &m.cluster))
            .ns,
        devices,
        min_devices: (weights / room.max(1.0)).ceil().max(1.0) as u32,
    })
}

fn matmul_precision(q: &SearchQuery) -> Precision {
    q.pins.precision.unwrap_or(Precision::Bf16)
}

/// Returns the load of one call: a prompt, or one token of every sequence.
fn call_load(q: &SearchQuery) -> LayerLoad {
    let sequences = if let Job::Decode { batch, .. } = q.job { batch } else { 1 };
    LayerLoad {
        tokens: (sequences * q.job.query_tokens()) as f64,
        sequences: sequences as f64,
        keys: q.job.context_tokens() as f64,
        window: q.attention_window().map(|w| w as f64),
        training: false,
        recompute: Recompute::None,
    }
}

/// Returns a layout that shards all matmuls over `tp` ranks, those of experts included.
fn sharded_layout(q: &SearchQuery, precision: Precision, scheme: TpScheme, tp: u32) -> LayerLayout {
    let wire = q.pins.wire.unwrap_or(Precision::Bf16);
    LayerLayout { tp, scheme, expert_tp: tp, precision, wire_precision: wire, ..LayerLayout::SINGLE_RANK }
}

fn query_expert_load(q: &SearchQuery, load: &LayerLoad) -> ExpertLoad {
    let of = |(n, k)| expert_load(n, k, 1, load.tokens, q.routing, 0);
    q.work.routed_experts().map_or(ExpertLoad::NONE, of)
}

/// Returns the forward time of each layer on `tp` ranks, under the faster of two schemes. The
/// embedding counts toward the first layer, the head toward the last.
fn layer_times(q: &SearchQuery, tp: u32) -> Vec<f64> {
    let (load, span) = (call_load(q), GroupSpan::from_stride(tp, 1, &q.machine.cluster));
    let (spans, routed) =
        (GroupSpans { tp: span, ep: GroupSpan::ONE, expert_tp: span }, query_expert_load(q, &load));
    let with = |scheme| {
        let layout = sharded_layout(q, matmul_precision(q), scheme, tp);
        let price = |rows: &[LayerOp]| {
            layer_cost(&q.machine, rows, &layout, &load, &spans, &routed).forward.total_ns()
        };
        let mut parts: Vec<f64> = Vec::new();
        for stack in &q.work.stacks {
            let ns = price(&stack.ops);
            parts.extend((0..stack.count).map(|_| ns));
        }
        if let Some(first) = parts.first_mut() {
            *first += price(&q.work.ops_before_layers);
        }
        if let Some(last) = parts.last_mut() {
            *last += price(&q.work.ops_after_layers);
        }
        parts
    };
    let (megatron, divided) = (with(TpScheme::Megatron), with(TpScheme::MegatronSequence));
    let sum = |parts: &[f64]| parts.iter().sum::<f64>();
    if sum(&divided) < sum(&megatron) { divided } else { megatron }
}
