//! How a stream's two stages overlap for given stage times and queue depths, on the made-up clock.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_base::random::Dice;

use super::{Facts, Frame, Seen, Setup, Sim, TICK_NS, Work, World};
use crate::Limits;
use crate::cache::Regime;
use crate::census::PhaseKind;
use crate::decide::{ChunkRequest, Cut};
use crate::engine::ReadyCall;
use crate::tripwire::Tripwires;

/// A message between two processes of one host.
const HOP_NS: u64 = 50_000;

/// How long the parts of a chunk take, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stages {
    /// What the next chunk waits for in the recompute regime: decode of the first latent, encode of the anchor.
    pub first_ns: u64,
    /// The rest of decode and write.
    pub rest_ns: u64,
    /// The generator, all passes of a chunk.
    pub generate_ns: u64,
    /// By how much each of these varies from chunk to chunk at most, up or down, in percent.
    pub jitter_percent: u32,
}

/// What one chunk of a stream took, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChunkTimes {
    /// The chunk.
    pub chunk: u32,
    /// The leader's own work for it.
    pub stage0_ns: u64,
    /// From commit to done.
    pub stage1_ns: u64,
    /// From the commit of the chunk before to this one's; 0 for the first.
    pub period_ns: u64,
    /// How long the mesh had waited when it was committed.
    pub idle_ns: u64,
    /// From the leader's decision to its delivery.
    pub latency_ns: u64,
    /// Chunks that were decided and not delivered, this one included, when it was done.
    pub held: u32,
}

/// Streams so many chunks over two ranks beside a leader outside the mesh, and tells what each took.
///
/// # Errors
/// Limits without bounds.
pub fn pipeline(
    stages: Stages,
    regime: Regime,
    limits: &Limits,
    chunks: u32,
) -> Result<Vec<ChunkTimes>, Diagnostics> {
    let request = |k: u32| {
        let first = k == 0;
        (ChunkRequest { prompt_change: first, seed: 0, cut: Cut::None }, first.then_some(1))
    };
    let longest = stages.generate_ns.max(stages.first_ns).max(stages.rest_ns);
    let setup = Setup {
        ranks: 2,
        outside: true,
        launcher: true,
        facts: Facts::made_up(regime),
        tick_ns: TICK_NS,
        limits: Limits { done_floor_ns: limits.done_floor_ns.max(4 * longest), ..limits.clone() },
        tripwires: Tripwires::default(),
        requests: (0..chunks).map(request).collect(),
        blows: Vec::new(),
    };
    let world = Stream { stages, ..Stream::default() };
    let mut sim = Sim::new(setup, world)?;
    let each = stages.generate_ns + stages.first_ns + stages.rest_ns + 10 * HOP_NS;
    sim.run((u64::from(chunks) + 10) * each.saturating_mul(4) + 60_000_000_000);
    Ok(sim.world.times.into_values().filter(|t| t.latency_ns > 0).collect())
}

#[derive(Debug, Default)]
struct Stream {
    stages: Stages,
    times: BTreeMap<u32, ChunkTimes>,
    decided_ns: BTreeMap<u32, u64>,
    /// Commit and done of the chunk before.
    before: Option<(u64, u64)>,
    delivered: u32,
}

impl Default for Stages {
    fn default() -> Stages {
        Stages { first_ns: 1, rest_ns: 1, generate_ns: 1, jitter_percent: 0 }
    }
}

impl Stream {
    /// A length that depends on the chunk and on what it is the length of, and on nothing else.
    fn varied(&self, ns: u64, chunk: u32, what: u64) -> u64 {
        let jitter = u64::from(self.stages.jitter_percent);
        let percent = 100 - jitter + Dice::new(what, [chunk, 0]).below(2 * jitter as usize + 1) as u64;
        ns / 100 * percent
    }
}

impl World for Stream {
    fn carry(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        vec![(HOP_NS, frame)]
    }

    fn phase_ns(&mut self, _: u64, _: u32, call: &ReadyCall, phase: usize) -> u64 {
        let Some(meta) = &call.meta else { return 0 };
        let kind = PhaseKind::of(&meta.phases[phase].program);
        if !kind.is_some_and(PhaseKind::is_generator) {
            return 0;
        }
        let chunk = self.before.map_or(0, |_| self.times.len() as u32);
        let passes = u64::from(meta.expected_generator_calls.max(1));
        self.varied(self.stages.generate_ns, chunk, 0) / passes
    }

    fn studio_ns(&mut self, _: u64, work: &Work) -> u64 {
        match work {
            Work::Text => 0,
            Work::Context { chunk, .. } => self.varied(self.stages.first_ns, chunk - 1, 1),
            Work::Deliver { chunk, .. } => self.varied(self.stages.rest_ns, *chunk, 2),
        }
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        0
    }

    fn seen(&mut self, now_ns: u64, what: Seen<'_>) {
        match what {
            Seen::Call(record) if record.request.is_some() => {
                let chunk = record.plan.chunk;
                self.decided_ns.insert(chunk, record.decided_ns);
                let t = self.times.entry(chunk).or_default();
                t.chunk = chunk;
                t.stage1_ns = record.done_ns - record.committed_ns;
                if let Some((committed_ns, done_ns)) = self.before {
                    t.period_ns = record.committed_ns - committed_ns;
                    t.idle_ns = record.committed_ns.saturating_sub(done_ns);
                }
                t.held = chunk + 1 - self.delivered;
                self.before = Some((record.committed_ns, record.done_ns));
            }
            // The first part of a chunk's decode is done on behalf of the next.
            Seen::Studio { work: Work::Context { chunk, .. }, begun_ns, .. } => {
                self.times.entry(chunk - 1).or_default().stage0_ns += now_ns - begun_ns;
            }
            Seen::Studio { work: Work::Deliver { chunk, .. }, begun_ns, .. } => {
                self.delivered += 1;
                let decided = self.decided_ns.remove(chunk).unwrap_or(now_ns);
                let t = self.times.entry(*chunk).or_default();
                t.stage0_ns += now_ns - begun_ns;
                t.latency_ns = now_ns - decided;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn period(stages: Stages, regime: Regime, depth: u32) -> u64 {
        period_of(
            stages,
            regime,
            Limits { d_in: depth, d_out: depth, max_outstanding: depth, ..Limits::default() },
        )
    }

    fn period_of(stages: Stages, regime: Regime, limits: Limits) -> u64 {
        let times = pipeline(stages, regime, &limits, 20).expect("legal limits");
        assert_eq!(times.len(), 20);
        let mut periods: Vec<u64> = times[4..18].iter().map(|t| t.period_ns).collect();
        periods.sort_unstable();
        periods[periods.len() / 2] / MS
    }

    #[test]
    fn one_place_in_the_queue_takes_turns_and_two_overlap() {
        let stages =
            Stages { first_ns: 60 * MS, rest_ns: 120 * MS, generate_ns: 400 * MS, jitter_percent: 0 };
        let [one, two, three] = [1, 2, 3].map(|d| period(stages, Regime::Resident, d));
        assert!((520..530).contains(&one), "generator and the rest of decode in turn: {one}");
        assert!((400..410).contains(&two), "the generator alone: {two}");
        assert_eq!(two, three, "more depth hides nothing more");
    }

    #[test]
    fn a_coupled_stream_waits_for_the_first_latent_and_no_longer() {
        let anchored =
            Stages { first_ns: 60 * MS, rest_ns: 120 * MS, generate_ns: 400 * MS, jitter_percent: 0 };
        let whole = Stages { first_ns: 180 * MS, rest_ns: MS, ..anchored };
        let stages = anchored;
        let (anchored, whole) = (period(anchored, Regime::Recompute, 2), period(whole, Regime::Recompute, 2));
        assert!((460..470).contains(&anchored), "{anchored}");
        // The next call is prepared only when the one before is done: its context goes first all the same.
        let alone = Limits { d_in: 1, max_outstanding: 1, ..Limits::default() };
        let alone = period_of(stages, Regime::Recompute, alone);
        assert!((460..470).contains(&alone), "{alone}");
        assert!((580..592).contains(&whole), "{whole}");
    }
}
