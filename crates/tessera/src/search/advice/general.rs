//! Sums for every model: memory by hand, what stages do to one item, and what limits the dearest rows.

use tessera_cost::knobs::{Layout, Optimizer};
use tessera_cost::pipeline::{Kernel, Limit, served, utilisation, utilisation_kept_full};
use tessera_cost::rows::{RowCost, Share, row};
use tessera_cost::schedule::{in_flight_on, parameter_copies};
use tessera_cost::{CollectiveOp, Span};
use tessera_ir::work::RowOp;
use tessera_mesh::{Precision, Tier};
use tessera_plan::search::budget::{GRADIENT, MASTER, MOMENTS, cache_share};
use tessera_plan::search::memory_table::{MemoryInputs, plan_memory};
use tessera_report::html::Advice;

use super::super::rows::ns_text;
use super::{Seen, columns, percent};

/// Rows that are shown, the dearest first.
const ROWS: usize = 6;

pub(super) fn advice(seen: &Seen) -> Vec<Advice> {
    [limits(seen), stages(seen), memory(seen)].into_iter().flatten().collect()
}

/// What limits the rows that take longest, and what twice the tp would change.
fn limits(seen: &Seen) -> Option<Advice> {
    let l = &seen.c.layout;
    let stack = seen.q.work.stacks.iter().max_by_key(|s| s.count)?;
    let routed = seen.routed();
    let priced = |layout: &Layout| -> Vec<RowCost> {
        let share = Share::of(&stack.rows, layout, seen.load.tokens);
        let of = |at| row(seen.m, &stack.rows, at, &share, layout, &seen.load, &routed);
        (0..stack.rows.len()).map(of).collect()
    };
    // The same tokens over twice the ranks.
    let wide = Layout { tp: l.tp * 2, expert_tp: l.expert_tp * 2, ..*l };
    let (now, then) = (priced(l), priced(&wide));
    let kernel = |c: &RowCost| Kernel {
        flops: c.forward.flops,
        whole_bytes: c.bytes,
        cut_bytes: 0.0,
        flops_per_s: seen.m.flops_per_s(l.precision),
        bytes_per_s: seen.m.cluster.device.memory_bytes_per_s.value,
    };
    let whole: f64 = now.iter().map(|c| c.forward.ns()).sum();
    let mut order: Vec<usize> = (0..now.len()).collect();
    order.sort_by(|a, b| now[*b].forward.ns().total_cmp(&now[*a].forward.ns()));
    order.truncate(ROWS);
    let bound = |at: &usize| kernel(&now[*at]).limit(1);
    let by_bytes: f64 =
        (0..now.len()).filter(|at| bound(at) == Limit::Bandwidth).map(|at| now[at].forward.ns()).sum();
    let peak = |costs: &[RowCost]| costs.iter().map(|c| kernel(c).ns(1)).sum::<f64>();
    let rows = order
        .iter()
        .map(|at| {
            let c = &now[*at];
            let faster = kernel(c).ns(1) / kernel(&then[*at]).ns(1).max(f64::MIN_POSITIVE);
            vec![
                stack.rows[*at].name.to_string(),
                ns_text(c.forward.ns()),
                percent(c.forward.ns() / whole.max(1e-9)),
                format!("{:.2} Gflop", c.forward.flops / 1e9),
                format!("{:.1} MB", c.bytes / 1e6),
                bound(at).to_string(),
                if faster < 1.05 { "no gain".to_string() } else { format!("× {faster:.1}") },
            ]
        })
        .collect();
    let note = format!(
        "{} of the computing time of a layer ({}, forward, one micro-batch) is limited by memory bandwidth. Twice the tp would make its \
         rows together {:.1} times faster at the device's peaks, collectives apart: rows whose bytes and operations it does not cut gain nothing.",
        percent(by_bytes / whole.max(1e-9)),
        stack.name,
        peak(&now) / peak(&then).max(f64::MIN_POSITIVE)
    );
    let names = ["row", "time", "share", "operations", "traffic", "limit", "twice the tp"];
    Some(Advice { id: "limits", title: "What limits a layer".into(), note, columns: columns(&names), rows })
}

/// One item and a stream of them, with stages and without.
fn stages(seen: &Seen) -> Option<Advice> {
    let (q, c) = (seen.q, seen.c);
    let layers = q.work.layers();
    if layers < 2 {
        return None;
    }
    let own: Vec<f64> = seen.best.stages.iter().map(|s| s.ns).collect();
    let whole: f64 = own.iter().sum();
    let pp = if c.pp > 1 { c.pp } else { 2 };
    let cut = if c.pp > 1 { own } else { vec![whole / 2.0; 2] };
    let tokens = (seen.load.tokens / f64::from(c.layout.tp.max(1))).ceil();
    let apart = Span::of(2, c.unit().max(1), &seen.m.cluster);
    let send = seen.m.collective(CollectiveOp::SendRecv, tokens * q.work.width as f64 * 2.0, apart).ns;
    let mut flight = vec![1, pp, seen.best.micro_batches.max(1)];
    flight.sort_unstable();
    flight.dedup();
    let mut rows = Vec::new();
    let mut line = |p: u32, b: u32, ns: &[f64]| {
        let s = served(ns, send, b);
        rows.push(vec![
            p.to_string(),
            b.to_string(),
            percent(utilisation(b, p)),
            percent(utilisation_kept_full(b, p)),
            ns_text(s.latency_ns),
            ns_text(s.period_ns),
        ]);
    };
    line(1, 1, &[whole]);
    flight.iter().for_each(|b| line(pp, *b, &cut));
    let (flat, deep) = (served(&[whole], send, 1), served(&cut, send, pp));
    let item = if seen.training() { "micro-batch, forward and backward," } else { "micro-batch" };
    let which = if c.pp > 1 { "The plan has" } else { "The plan has no stages;" };
    let note = format!(
        "{which} {pp} stages{}: one {item} takes {} instead of {}, so that stages gain nothing for a single one; with {pp} under way one \
         leaves every {}.",
        if c.pp > 1 { "" } else { " of the same ranks each would need twice the devices" },
        ns_text(deep.latency_ns),
        ns_text(flat.latency_ns),
        ns_text(deep.period_ns)
    );
    let names =
        ["stages P", "under way B", "busy, B/(B+P−1)", "busy if kept full", "one takes", "one leaves every"];
    Some(Advice { id: "stages", title: "What stages do".into(), note, columns: columns(&names), rows })
}

/// The memory sums by hand: P, A, K, E and H.
fn memory(seen: &Seen) -> Option<Advice> {
    let (q, c) = (seen.q, seen.c);
    let l = &c.layout;
    // In training the first stage holds most activations.
    let stage = if seen.training() { seen.best.stages.first() } else { seen.fullest() }?;
    let counts = seen.layers(stage);
    let layers: f64 = counts.iter().sum();
    let mut mean = Mean::default();
    for (stack, n) in q.work.stacks.iter().zip(&counts) {
        let (dense, routed) = seen.priced(stack);
        let share = n / layers.max(1.0);
        let cached = stack.rows.iter().map(|r| match r.op {
            RowOp::Attention { cache, .. } => cache,
            _ => 0,
        });
        mean.dense += share * dense.weights;
        mean.routed += share * routed.expert_weights;
        mean.kept += share * (dense.keep_bytes + routed.keep_bytes);
        mean.cached += share * cached.sum::<u64>() as f64;
    }
    let experts = seen.shape.map_or(0, |s| s.experts);
    let held = experts.div_ceil(u64::from(l.ep.max(1))).max(1) as f64;
    let tokens = seen.load.tokens;
    let flight = if seen.training() {
        in_flight_on(c.schedule, c.pp, c.interleave, seen.best.micro_batches, 0)
    } else {
        0.0
    };
    let sequences = q.job.batch().div_ceil(u64::from(c.replicas.max(1))) as f64;
    let inputs = MemoryInputs {
        parameters: mean.dense,
        bytes_per_parameter: bytes_each(seen, mean.dense, mean.routed),
        layers: layers as u64,
        activation_bytes: mean.kept / tokens.max(1.0),
        cache_bytes: mean.cached * l.precision.bytes().clamp(1.0, 2.0) * cache_share(q.work.kv_heads, l),
        experts,
        expert_parameters: mean.routed / held,
        device_bytes: seen.m.cluster.device.memory_bytes.value,
        tokens: tokens * flight,
        cached_tokens: if seen.training() { 0.0 } else { sequences * q.job.context() as f64 },
        // What is given is one rank's already.
        tp: 1,
        ep: l.ep,
    };
    let table = plan_memory(&inputs);
    let rows = table
        .iter()
        .filter(|line| line.bytes.0 > 0 || line.term.starts_with("left"))
        .map(|line| {
            let sum = line.sum.trim_end_matches(" / tp 1").to_string();
            vec![line.term.to_string(), line.bytes.to_string(), percent(line.share), sum]
        })
        .collect();
    let budget = &seen.best.estimate.budget.bytes;
    let tier = |t: Tier| budget.iter().filter(|((x, _), _)| *x == t).map(|(_, b)| b.0 as f64).sum::<f64>();
    let away = tier(Tier::Peer) + tier(Tier::Host);
    let note = format!(
        "One rank of a stage of {layers:.0} layers, after the cut; P, A and K are means over its layers. The estimate of the fullest rank is \
         {:.1} GB in device memory{}: it has embedding, head, buffers and libraries too.",
        tier(Tier::Hbm) / 1e9,
        if away > 0.0 { format!(" and {:.1} GB elsewhere", away / 1e9) } else { String::new() }
    );
    let names = ["term", "bytes", "of H", "sum"];
    Some(Advice {
        id: "memory-by-hand",
        title: "Memory by hand".into(),
        note,
        columns: columns(&names),
        rows,
    })
}

/// Of one layer of a rank, over the stage.
#[derive(Default)]
struct Mean {
    dense: f64,
    routed: f64,
    kept: f64,
    cached: f64,
}

/// Bytes of a parameter with what training adds, the mean over those inside and outside of experts.
fn bytes_each(seen: &Seen, dense: f64, routed: f64) -> f64 {
    let c = seen.c;
    let width = c.layout.precision.bytes();
    let copies = f64::from(parameter_copies(c.schedule, c.pp));
    if !seen.training() {
        return width;
    }
    let master = if c.layout.precision == Precision::F32 { 0.0 } else { MASTER };
    let each = |shards: u32| {
        let over = |on: bool| if on { f64::from(shards.max(1)) } else { 1.0 };
        let full = c.optimizer == Optimizer::Full;
        (width + GRADIENT) / over(full) + (MOMENTS + master) / over(c.optimizer != Optimizer::Replicated)
    };
    let all = (dense + routed).max(1.0);
    let mean = copies * (dense * each(c.replicas) + routed * each(c.expert_replicas)) / all;
    // It is read by people: three digits are enough.
    (mean * 1e3).round() / 1e3
}
