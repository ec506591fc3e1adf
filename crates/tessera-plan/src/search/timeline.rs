//! Draws the timeline of a candidate: a few layers in steady state per rank and stream, and the
//! wave of micro-batches per stage.
//!
//! The event engine of `tessera-cost` simulates both from the same cost rows as the estimate, so
//! the timeline shows interval by interval what the estimate sums in closed form. If the two
//! differ, the intervals show the reason: transfers wait for slower members, and stages wait for
//! sends. Host launches are not drawn.

mod block;

use tessera_cost::intervals::{Interval, IntervalKind, OverlapTotals, measure_overlap};
use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{self, ExpertLoad, expert_load};
use tessera_cost::params::{ExpertStorage, PipelineSchedule, Recompute, TpScheme};
use tessera_cost::schedule::{MicroBatchTimes, StageSlot, StageWork as Turn, simulate_schedule};
use tessera_cost::{CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::{LayerOp, LayerOpKind};
use tessera_mesh::MemoryTier;

use super::{Candidate, Job, MemoryUse, RankedCandidate, SearchQuery};

/// Two charts of a candidate: a few layers of one stage with their streams, and the micro-batches
/// of a step on all stages.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateTimeline {
    /// Forward pass of [`BLOCK_LAYERS`] equal layers in steady state, from time 0. The lanes are the
    /// streams `compute`, `tp_collective`, `a2a` and `io`.
    pub block_bars: Vec<Interval>,
    /// Description of each rank in `block_bars`: every rank, or a rank with the mean load and the
    /// slowest.
    pub rank_labels: Vec<String>,
    /// Name of the layers, such as `experts`.
    pub layer_name: &'static str,
    /// Overlap of the collectives in `block_bars`.
    pub overlap: OverlapTotals,
    /// Intervals of every stage in one step of `drawn_micro_batches`: `rank` is the stage, names
    /// are `F3`, `B3`, `W3` and so on, with the model chunk after a dot if stages have several.
    pub wave_bars: Vec<Interval>,
    /// Number of micro-batches drawn: all of the step's, or enough to show the pattern.
    pub drawn_micro_batches: u32,
    /// Share of the whole step, from the first start to the last end of its wave, that each stage
    /// is idle.
    pub idle_shares: Vec<f64>,
}

/// Number of consecutive layers in [`CandidateTimeline::block_bars`]; the layers simulated before
/// them are not drawn.
pub const BLOCK_LAYERS: u32 = 2;

/// Maximum number of micro-batches drawn in a wave; longer steps only repeat.
pub const MAX_WAVE_MICRO_BATCHES: u32 = 64;

/// Maximum number of micro-batches over which idle time is measured; with more, stages idle even
/// less.
const MAX_MEASURED_MICRO_BATCHES: u32 = 4096;

/// Simulates a few layers and one step of a legal candidate, and returns their intervals as charts.
#[must_use]
pub fn draw_timeline(q: &SearchQuery, ranked: &RankedCandidate) -> CandidateTimeline {
    let inputs = TimelineInputs::from_ranked(q, ranked);
    let stack = inputs.stacks.iter().position(|s| s.has_experts).unwrap_or(0);
    let (block, ranks) =
        q.work.stacks.get(stack).map_or((Vec::new(), Vec::new()), |s| block::simulate_block(&inputs, &s.ops));
    let c = &ranked.candidate;
    let paces: Vec<MicroBatchTimes> =
        (0..c.pp).map(|stage| inputs.stage_pace(ranked, stage as usize)).collect();
    let simulate = |micro_batches| simulate_schedule(c.schedule, c.interleave.max(1), micro_batches, &paces);
    let drawn = whole_rounds(c, ranked.micro_batches, MAX_WAVE_MICRO_BATCHES);
    let wave: Vec<Interval> = simulate(drawn).iter().map(|s| slot_bar(s, c)).collect();
    CandidateTimeline {
        overlap: measure_overlap(&block, false),
        block_bars: block,
        rank_labels: ranks,
        layer_name: q.work.stacks.get(stack).map_or("", |s| s.name),
        wave_bars: wave,
        drawn_micro_batches: drawn,
        idle_shares: idle_shares(
            &simulate(whole_rounds(c, ranked.micro_batches, MAX_MEASURED_MICRO_BATCHES)),
            c.pp,
        ),
    }
}

/// Rounds the number of micro-batches down to at most `most`, to a count that the schedule admits.
fn whole_rounds(c: &Candidate, all: u32, most: u32) -> u32 {
    let few = if all > most { (most / c.pp * c.pp).max(c.pp) } else { all };
    // A bidirectional schedule needs an even number, and enough to fill both directions.
    if c.schedule == PipelineSchedule::DualPipe { (few / 2 * 2).max(2 * c.pp) } else { few }
}

/// A candidate with its layer costs, from which the chart of a block and the chart of the wave are
/// computed.
struct TimelineInputs<'a> {
    q: &'a SearchQuery,
    c: Candidate,
    load: LayerLoad,
    spans: GroupSpans,
    expert_load: ExpertLoad,
    stacks: Vec<StackCost>,
    /// Whether a rank overlaps dispatch and combine of one micro-batch with the compute of another.
    overlaps_exchange: bool,
    /// Fetch time of the cold experts of one layer: those that a predictor names ahead, and the
    /// others.
    fetch_ns: [f64; 2],
}

struct StackCost {
    cost: LayerCost,
    count: u64,
    has_experts: bool,
}

impl<'a> TimelineInputs<'a> {
    fn from_ranked(q: &'a SearchQuery, ranked: &RankedCandidate) -> TimelineInputs<'a> {
        let c = ranked.candidate;
        let l = &c.layout;
        let tokens = f64::from(c.micro_batch) * q.job.query_tokens() as f64;
        let train = matches!(q.job, Job::Train { .. });
        let load = LayerLoad {
            tokens,
            sequences: f64::from(c.micro_batch),
            keys: q.job.context_tokens() as f64,
            window: q.attention_window().map(|w| w as f64),
            training: train,
            recompute: c.recompute,
        };
        let spans = GroupSpans::from_layout(l, &q.machine.cluster);
        let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
        let routed = q.work.routed_experts();
        let load_of = |(n, k)| expert_load(n, k, l.ep, group, q.routing, l.capacity_pct);
        let expert_load = routed.map_or(ExpertLoad::NONE, load_of);
        let stack = |s: &tessera_ir::analytic_model::LayerStack| StackCost {
            cost: layer_cost(&q.machine, &s.ops, l, &load, &spans, &expert_load),
            count: s.count,
            has_experts: s.ops.iter().any(|r| matches!(r.kind, LayerOpKind::Experts { .. })),
        };
        let two =
            if train { c.schedule == PipelineSchedule::DualPipe } else { ranked.micro_batches >= 2 * c.pp };
        let overlaps_exchange = two && q.machine.device_curves().overlap.overlaps_dispatch;
        let fetch_ns = if train { [0.0; 2] } else { fetch_ns(q, ranked, group) };
        TimelineInputs {
            q,
            c,
            load,
            spans,
            expert_load,
            stacks: q.work.stacks.iter().map(stack).collect(),
            overlaps_exchange,
            fetch_ns,
        }
    }

    /// Returns the times of one micro-batch on a stage.
    fn stage_pace(&self, ranked: &RankedCandidate, stage: usize) -> MicroBatchTimes {
        let cost = self.stage_cost(ranked, stage);
        let (input, weight) = if self.load.training {
            ((cost.recompute + cost.backward_input).total_ns(), cost.backward_weight.total_ns())
        } else {
            (0.0, 0.0)
        };
        MicroBatchTimes {
            forward_ns: cost.forward.total_ns(),
            backward_input_ns: input,
            backward_weight_ns: weight,
            send_ns: self.send_ns(),
        }
    }

    /// Returns the cost of one micro-batch on a stage.
    fn stage_cost(&self, ranked: &RankedCandidate, stage: usize) -> LayerCost {
        let mut sum = LayerCost::default();
        let Some(share) = ranked.stages.get(stage) else { return sum };
        let mut begin = 0;
        for stack in &self.stacks {
            let end = begin + stack.count;
            let here = |p: &std::ops::Range<u64>| p.end.min(end).saturating_sub(p.start.max(begin));
            let n = share.chunks.iter().map(here).sum::<u64>() as f64;
            sum.forward += stack.cost.forward * n;
            sum.backward_input += stack.cost.backward_input * n;
            sum.backward_weight += stack.cost.backward_weight * n;
            sum.recompute += stack.cost.recompute * n;
            begin = end;
        }
        let ends = LayerLoad { recompute: Recompute::None, ..self.load };
        let end = |rows: &[LayerOp]| {
            layer_cost(&self.q.machine, rows, &self.c.layout, &ends, &self.spans, &ExpertLoad::NONE)
        };
        if share.has_embedding {
            sum = sum + end(&self.q.work.ops_before_layers);
        }
        if share.has_head {
            sum = sum + end(&self.q.work.ops_after_layers);
        }
        sum
    }

    /// Returns the time of one send between stages: each tp rank sends its shard, and the receivers
    /// gather the shards if tp keeps whole tokens.
    fn send_ns(&self) -> f64 {
        let (c, m) = (&self.c, &self.q.machine);
        if c.pp <= 1 {
            return 0.0;
        }
        let whole = self.load.tokens * self.q.work.hidden_size as f64 * 2.0;
        let piece = (self.load.tokens / f64::from(c.layout.tp)).ceil() * self.q.work.hidden_size as f64 * 2.0;
        let send = m
            .collective_cost(
                CollectiveOp::SendRecv,
                piece,
                GroupSpan::from_stride(2, c.replica_stage_ranks(), &m.cluster),
            )
            .ns;
        let divided = !matches!(c.layout.scheme, TpScheme::Megatron | TpScheme::RsMmAg);
        let gather = m.collective_cost(CollectiveOp::AllGather, whole, self.spans.tp).ns;
        if divided || c.layout.tp == 1 { send } else { send + gather }
    }
}

/// Returns the time to fetch the host-resident experts that one layer needs for a batch of `group`
/// tokens of all ranks: those that a predictor names before the router runs, and the others.
fn fetch_ns(q: &SearchQuery, ranked: &RankedCandidate, group: f64) -> [f64; 2] {
    let c = &ranked.candidate;
    let at = |tier| ranked.estimate.budget.bytes.get(&(tier, MemoryUse::Experts)).map_or(0.0, |b| b.0 as f64);
    let cold = at(MemoryTier::Host) / (at(MemoryTier::Host) + at(MemoryTier::Hbm)).max(1.0);
    if c.experts_at != ExpertStorage::Host || cold == 0.0 {
        return [0.0; 2];
    }
    let one = q.work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
        LayerOpKind::Experts { experts, top_k, .. } => {
            Some((experts, top_k, r.weight_count() as f64 / experts as f64))
        }
        _ => None,
    });
    let Some((count, top_k, numbers)) = one else { return [0.0; 2] };
    let asked = moe::count_cold_experts(count, top_k, c.layout.ep, group, q.routing, 1.0 - cold).selected;
    let bytes = asked * numbers / f64::from(c.layout.expert_tp) * c.layout.precision.element_bytes();
    let named = q.space.prefetch_hit_rate.clamp(0.0, 1.0);
    [named, 1.0 - named]
        .map(|share| if share > 0.0 { q.machine.tier_fetch_ns(MemoryTier::Host, share * bytes) } else { 0.0 })
}

fn slot_bar(slot: &StageSlot, c: &Candidate) -> Interval {
    let letter = match slot.work {
        Turn::Forward => 'F',
        Turn::Backward | Turn::BackwardInput => 'B',
        Turn::BackwardWeight => 'W',
    };
    let several = c.interleave > 1 || c.schedule == PipelineSchedule::DualPipe;
    let piece = if several { format!(".{}", slot.model_chunk) } else { String::new() };
    Interval {
        rank: slot.stage,
        track: format!("stage {}", slot.stage),
        name: format!("{letter}{}{piece}", slot.micro_batch),
        kind: IntervalKind::Compute,
        start_ns: slot.start_ns,
        end_ns: slot.end_ns,
    }
}

/// Returns the share of the time from the first start to the last end that each stage is idle.
fn idle_shares(slots: &[StageSlot], stages: u32) -> Vec<f64> {
    let start = slots.iter().map(|s| s.start_ns).fold(f64::INFINITY, f64::min);
    let span = slots.iter().map(|s| s.end_ns).fold(0.0, f64::max) - start;
    let mut busy = vec![0.0; stages as usize];
    for s in slots {
        busy[s.stage as usize] += s.end_ns - s.start_ns;
    }
    busy.iter().map(|b| if span > 0.0 { 1.0 - b / span } else { 0.0 }).collect()
}
