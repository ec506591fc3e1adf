//! Bars of an arrangement: some layers per rank and stream as they repeat, and the wave of micro-batches per stage.
//!
//! Both are played by the event engine of `tessera-cost` from the same rows and prices as the estimate, so what the estimate
//! adds up in closed form is seen here bar by bar. Where the two differ, the bars say why: transfers wait for slower
//! members, and stages wait for sends. Launches of the host are not drawn.

mod block;

use tessera_cost::bars::{Bar, Kind, Overlap, overlap};
use tessera_cost::knobs::{ExpertsAt, Recompute, Schedule, Scheme};
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{self, ExpertLoad, experts};
use tessera_cost::schedule::{Pace, Slot, Work as Turn, simulate_uneven};
use tessera_cost::{CollectiveOp, Span};
use tessera_ir::work::{Row, RowOp};
use tessera_mesh::Tier;

use super::{Candidate, Job, Question, Ranked, Use};

/// Charts of one arrangement.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// Forward pass of [`LAYERS`] equal layers in the steady state, from time 0. Lanes are the streams `compute`,
    /// `tp_collective`, `a2a` and `io`.
    pub block: Vec<Bar>,
    /// What each rank of `block` stands for: one rank, or a mean one and the slowest where loads are uneven.
    pub ranks: Vec<String>,
    /// What the layers are, such as `experts`.
    pub layer: &'static str,
    /// Overlap of the collectives in `block`.
    pub overlap: Overlap,
    /// Turns of every stage in one step of `drawn` micro-batches: `rank` is the stage, names are `F3`, `B3`, `W3` and so
    /// on, with the piece after a point where stages have several.
    pub wave: Vec<Bar>,
    /// Micro-batches drawn: all of the step's, or as many as show how it goes.
    pub drawn: u32,
    /// Share of the whole step, from the first start to the last end of its wave, that each stage waits.
    pub idle: Vec<f64>,
}

/// Layers drawn in a block.
pub const LAYERS: u32 = 2;

/// Most micro-batches drawn in a wave; longer steps only repeat.
pub const WAVE: u32 = 64;

/// Most micro-batches that waiting is measured over; with more, stages wait even less.
const MEASURED: u32 = 4096;

/// Draws a legal arrangement.
#[must_use]
pub fn timeline(q: &Question, ranked: &Ranked) -> Timeline {
    let scene = Scene::of(q, ranked);
    let stack = scene.stacks.iter().position(|s| s.experts).unwrap_or(0);
    let (block, ranks) =
        q.work.stacks.get(stack).map_or((Vec::new(), Vec::new()), |s| block::play(&scene, &s.rows));
    let c = &ranked.candidate;
    let paces: Vec<Pace> = (0..c.pp).map(|stage| scene.pace(ranked, stage as usize)).collect();
    let play = |micro_batches| simulate_uneven(c.schedule, c.interleave.max(1), micro_batches, &paces);
    let drawn = whole_rounds(c, ranked.micro_batches, WAVE);
    let wave: Vec<Bar> = play(drawn).iter().map(|s| bar(s, c)).collect();
    Timeline {
        overlap: overlap(&block, false),
        block,
        ranks,
        layer: q.work.stacks.get(stack).map_or("", |s| s.name),
        wave,
        drawn,
        idle: idle(&play(whole_rounds(c, ranked.micro_batches, MEASURED)), c.pp),
    }
}

/// As many of a step's micro-batches as are at most `most`, in numbers that the schedule admits.
fn whole_rounds(c: &Candidate, all: u32, most: u32) -> u32 {
    let few = if all > most { (most / c.pp * c.pp).max(c.pp) } else { all };
    // Two directions need an even number, and enough to fill both.
    if c.schedule == Schedule::DualPipe { (few / 2 * 2).max(2 * c.pp) } else { few }
}

/// What both charts are made from.
struct Scene<'a> {
    q: &'a Question,
    c: Candidate,
    load: Load,
    spans: Spans,
    experts: ExpertLoad,
    stacks: Vec<Stack>,
    /// Whether two micro-batches are under way at once on a rank.
    beside: bool,
    /// Fetch of the cold experts of one layer: those that a predictor names ahead, and the others.
    fetch_ns: [f64; 2],
}

struct Stack {
    cost: LayerCost,
    count: u64,
    experts: bool,
}

impl<'a> Scene<'a> {
    fn of(q: &'a Question, ranked: &Ranked) -> Scene<'a> {
        let c = ranked.candidate;
        let (l, cluster) = (&c.layout, &q.machine.cluster);
        let tokens = f64::from(c.micro_batch) * q.job.queries() as f64;
        let train = matches!(q.job, Job::Train { .. });
        let load = Load {
            tokens,
            sequences: f64::from(c.micro_batch),
            keys: q.job.context() as f64,
            window: q.window().map(|w| w as f64),
            training: train,
            recompute: c.recompute,
        };
        let spans = Spans {
            tp: Span::of(l.tp, 1, cluster),
            expert_tp: Span::of(l.expert_tp, 1, cluster),
            ep: Span::of(l.ep, l.expert_tp, cluster),
        };
        let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
        let routed = q.work.experts();
        let load_of = |(n, k)| experts(n, k, l.ep, group, q.routing, l.capacity_pct);
        let experts = routed.map_or(ExpertLoad::NONE, load_of);
        let stack = |s: &tessera_ir::work::Stack| Stack {
            cost: layer(&q.machine, &s.rows, l, &load, &spans, &experts),
            count: s.count,
            experts: s.rows.iter().any(|r| matches!(r.op, RowOp::Experts { .. })),
        };
        let two = if train { c.schedule == Schedule::DualPipe } else { ranked.micro_batches >= 2 * c.pp };
        let beside = two && q.machine.curves().overlap.exchanges;
        let fetch_ns = if train { [0.0; 2] } else { fetch_ns(q, ranked, group) };
        Scene {
            q,
            c,
            load,
            spans,
            experts,
            stacks: q.work.stacks.iter().map(stack).collect(),
            beside,
            fetch_ns,
        }
    }

    /// One micro-batch on a stage.
    fn pace(&self, ranked: &Ranked, stage: usize) -> Pace {
        let cost = self.stage(ranked, stage);
        let (input, weight) = if self.load.training {
            ((cost.recompute + cost.backward_input).ns(), cost.backward_weight.ns())
        } else {
            (0.0, 0.0)
        };
        Pace {
            forward_ns: cost.forward.ns(),
            backward_input_ns: input,
            backward_weight_ns: weight,
            send_ns: self.send_ns(),
        }
    }

    /// Everything that a stage does with one micro-batch.
    fn stage(&self, ranked: &Ranked, stage: usize) -> LayerCost {
        let mut sum = LayerCost::default();
        let Some(share) = ranked.stages.get(stage) else { return sum };
        let mut begin = 0;
        for stack in &self.stacks {
            let end = begin + stack.count;
            let here = |p: &std::ops::Range<u64>| p.end.min(end).saturating_sub(p.start.max(begin));
            let n = share.pieces.iter().map(here).sum::<u64>() as f64;
            sum.forward += stack.cost.forward * n;
            sum.backward_input += stack.cost.backward_input * n;
            sum.backward_weight += stack.cost.backward_weight * n;
            sum.recompute += stack.cost.recompute * n;
            begin = end;
        }
        let ends = Load { recompute: Recompute::None, ..self.load };
        let end = |rows: &[Row]| {
            layer(&self.q.machine, rows, &self.c.layout, &ends, &self.spans, &ExpertLoad::NONE)
        };
        if share.first {
            sum = sum + end(&self.q.work.first);
        }
        if share.last {
            sum = sum + end(&self.q.work.last);
        }
        sum
    }

    /// One send between stages: each rank of tp its piece, put together on the other side where tp keeps tokens whole.
    fn send_ns(&self) -> f64 {
        let (c, m) = (&self.c, &self.q.machine);
        if c.pp <= 1 {
            return 0.0;
        }
        let whole = self.load.tokens * self.q.work.width as f64 * 2.0;
        let piece = (self.load.tokens / f64::from(c.layout.tp)).ceil() * self.q.work.width as f64 * 2.0;
        let send = m.collective(CollectiveOp::SendRecv, piece, Span::of(2, c.unit(), &m.cluster)).ns;
        let divided = !matches!(c.layout.scheme, Scheme::Megatron | Scheme::RsMmAg);
        let gather = m.collective(CollectiveOp::AllGather, whole, self.spans.tp).ns;
        if divided || c.layout.tp == 1 { send } else { send + gather }
    }
}

/// Fetch of what one layer's batch of `group` tokens of all ranks asks of the experts that lie on the host: of those that a
/// predictor names before the router has, and of the others.
fn fetch_ns(q: &Question, ranked: &Ranked, group: f64) -> [f64; 2] {
    let c = &ranked.candidate;
    let at = |tier| ranked.estimate.budget.bytes.get(&(tier, Use::Experts)).map_or(0.0, |b| b.0 as f64);
    let cold = at(Tier::Host) / (at(Tier::Host) + at(Tier::Hbm)).max(1.0);
    if c.experts_at != ExpertsAt::Host || cold == 0.0 {
        return [0.0; 2];
    }
    let one = q.work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
        RowOp::Experts { experts, top_k, .. } => Some((experts, top_k, r.weights() as f64 / experts as f64)),
        _ => None,
    });
    let Some((count, top_k, numbers)) = one else { return [0.0; 2] };
    let asked = moe::cold(count, top_k, c.layout.ep, group, q.routing, 1.0 - cold).touched;
    let bytes = asked * numbers / f64::from(c.layout.expert_tp) * c.layout.precision.bytes();
    let named = q.space.forecast.clamp(0.0, 1.0);
    [named, 1.0 - named]
        .map(|share| if share > 0.0 { q.machine.tier_ns(Tier::Host, share * bytes) } else { 0.0 })
}

fn bar(slot: &Slot, c: &Candidate) -> Bar {
    let letter = match slot.work {
        Turn::Forward => 'F',
        Turn::Backward | Turn::BackwardInput => 'B',
        Turn::BackwardWeight => 'W',
    };
    let several = c.interleave > 1 || c.schedule == Schedule::DualPipe;
    let piece = if several { format!(".{}", slot.piece) } else { String::new() };
    Bar {
        rank: slot.stage,
        lane: format!("stage {}", slot.stage),
        name: format!("{letter}{}{piece}", slot.micro_batch),
        kind: Kind::Compute,
        start_ns: slot.start_ns,
        end_ns: slot.end_ns,
    }
}

/// Share of the time from the first start to the last end that each stage waits.
fn idle(slots: &[Slot], stages: u32) -> Vec<f64> {
    let start = slots.iter().map(|s| s.start_ns).fold(f64::INFINITY, f64::min);
    let span = slots.iter().map(|s| s.end_ns).fold(0.0, f64::max) - start;
    let mut busy = vec![0.0; stages as usize];
    for s in slots {
        busy[s.stage as usize] += s.end_ns - s.start_ns;
    }
    busy.iter().map(|b| if span > 0.0 { 1.0 - b / span } else { 0.0 }).collect()
}
