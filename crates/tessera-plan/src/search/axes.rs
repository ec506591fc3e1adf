//! Which axis helps a deadline: the choice between cutting products, cutting layers and copying the model, made from a few
//! numbers that a person can check by hand. The search finds better arrangements; this says why they look as they do.

use tessera_cost::knobs::{Layout, Recompute, Scheme};
use tessera_cost::layer::{Load, Spans, layer};
use tessera_cost::moe::{ExpertLoad, experts};
use tessera_cost::pipeline::{Choice, Facts, Kernel, decide};
use tessera_cost::rows::{Share, row};
use tessera_cost::{CollectiveOp, Span};
use tessera_ir::work::{Row, RowCut};
use tessera_mesh::Precision;

use super::space::divisors;
use super::{Job, Objective, Question};

/// The choice for one call of an inference job with a deadline: all sequences of a decoding step, or one prompt. None for
/// other questions, or where no number of devices holds the model.
#[must_use]
pub fn axes(q: &Question) -> Option<Choice> {
    let mut choice = decide(&facts(q)?)?;
    choice.says.extend(roofline(q, choice.tp.max(2)));
    Some(choice)
}

/// What cutting products can gain at best: whether operations or bytes limit the layer that there is most of.
fn roofline(q: &Question, tp: u32) -> Option<String> {
    let m = &q.machine;
    let stack = q.work.stacks.iter().max_by_key(|s| s.count)?;
    let (layout, load) = (one(q, precision(q), Scheme::Megatron, 1), load(q));
    let share = Share::of(&stack.rows, &layout, load.tokens);
    let routed = routed(q, &load);
    let mut kernel = Kernel {
        flops: 0.0,
        whole_bytes: 0.0,
        cut_bytes: 0.0,
        flops_per_s: m.flops_per_s(layout.precision),
        bytes_per_s: m.cluster.device.memory_bytes_per_s.value,
    };
    for (at, r) in stack.rows.iter().enumerate() {
        let cost = row(m, &stack.rows, at, &share, &layout, &load, &routed);
        kernel.flops += cost.forward.flops;
        if r.cut == RowCut::Whole { kernel.whole_bytes += cost.bytes } else { kernel.cut_bytes += cost.bytes }
    }
    let bytes = kernel.whole_bytes + kernel.cut_bytes;
    Some(format!(
        "a layer is {}: {:.2} Gflop and {:.1} MB, {:.0} % of which tp divides; tp={tp} makes it at best {:.1} times faster",
        kernel.limit(1),
        kernel.flops / 1e9,
        bytes / 1e6,
        kernel.cut_bytes / bytes.max(1.0) * 100.0,
        kernel.gain(tp)
    ))
}

/// The numbers that [`axes`] is made from.
#[must_use]
pub fn facts(q: &Question) -> Option<Facts> {
    let Objective::Deadline(deadline) = q.objective else { return None };
    if matches!(q.job, Job::Train { .. }) {
        return None;
    }
    let (m, devices) = (&q.machine, q.space.devices);
    let whole = parts(q, 1);
    let admitted =
        |tp: &u32| *tp > 1 && u64::from(*tp) <= q.work.heads && q.work.heads.is_multiple_of(u64::from(*tp));
    let weights = q.work.parameters() as f64 * precision(q).bytes();
    let room = m.cluster.device.memory_bytes.value - m.reserved_bytes();
    let bytes = load(q).tokens * q.work.width as f64 * 2.0;
    Some(Facts {
        deadline_ns: deadline.0 as f64,
        period_ns: f64::INFINITY,
        tp_ns: divisors(devices).filter(admitted).map(|tp| (tp, parts(q, tp).iter().sum())).collect(),
        part_ns: whole,
        send_ns: m.collective(CollectiveOp::SendRecv, bytes, Span::of(2, 1, &m.cluster)).ns,
        devices,
        least_devices: (weights / room.max(1.0)).ceil().max(1.0) as u32,
    })
}

fn precision(q: &Question) -> Precision {
    q.pins.precision.unwrap_or(Precision::Bf16)
}

/// One call: a prompt, or one token of every sequence.
fn load(q: &Question) -> Load {
    let sequences = if let Job::Decode { batch, .. } = q.job { batch } else { 1 };
    Load {
        tokens: (sequences * q.job.queries()) as f64,
        sequences: sequences as f64,
        keys: q.job.context() as f64,
        window: q.window().map(|w| w as f64),
        training: false,
        recompute: Recompute::None,
    }
}

/// All products cut over `tp` ranks, those of experts too.
fn one(q: &Question, precision: Precision, scheme: Scheme, tp: u32) -> Layout {
    let wire = q.pins.wire.unwrap_or(Precision::Bf16);
    Layout { tp, scheme, expert_tp: tp, precision, wire, ..Layout::WHOLE }
}

fn routed(q: &Question, load: &Load) -> ExpertLoad {
    let of = |(n, k)| experts(n, k, 1, load.tokens, q.routing, 0);
    q.work.experts().map_or(ExpertLoad::NONE, of)
}

/// Forward time of each layer on `tp` ranks; the ends go with the first and the last layer. Of two ways to cut, the
/// faster.
fn parts(q: &Question, tp: u32) -> Vec<f64> {
    let (load, span) = (load(q), Span::of(tp, 1, &q.machine.cluster));
    let (spans, routed) = (Spans { tp: span, ep: Span::ONE, expert_tp: span }, routed(q, &load));
    let with = |scheme| {
        let layout = one(q, precision(q), scheme, tp);
        let price = |rows: &[Row]| layer(&q.machine, rows, &layout, &load, &spans, &routed).forward.ns();
        let mut parts: Vec<f64> = Vec::new();
        for stack in &q.work.stacks {
            let ns = price(&stack.rows);
            parts.extend((0..stack.count).map(|_| ns));
        }
        if let Some(first) = parts.first_mut() {
            *first += price(&q.work.first);
        }
        if let Some(last) = parts.last_mut() {
            *last += price(&q.work.last);
        }
        parts
    };
    let (megatron, divided) = (with(Scheme::Megatron), with(Scheme::MegatronSequence));
    let sum = |parts: &[f64]| parts.iter().sum::<f64>();
    if sum(&divided) < sum(&megatron) { divided } else { megatron }
}
