//! Simulates how the two pipeline stages of a stream overlap for given stage times and queue
//! depths.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_base::random::Rng;

use super::{Frame, Sim, SimConfig, SimEvent, TICK_NS, World, synthetic_config};
use crate::Limits;
use crate::director::ChunkRequest;
use crate::engine::{MediaJob, ReadyCall};
use crate::kv_cache::CacheRegime;
use crate::program_index::PhaseKind;
use crate::tripwire::Tripwires;

/// Delay of a message between two processes of one host, in nanoseconds.
const HOP_NS: u64 = 50_000;

/// The durations of a chunk's stages, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTimes {
    /// The part that the next chunk waits for in the recompute regime: decoding the first latent
    /// and encoding the anchor.
    pub context_ns: u64,
    /// The rest of decoding, and writing.
    pub delivery_ns: u64,
    /// The generator: all forwards of a chunk.
    pub generate_ns: u64,
    /// Maximum variation of each duration from chunk to chunk, up or down, in percent.
    pub jitter_percent: u32,
}

/// The measured times of one chunk of a stream, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ChunkTimes {
    /// Index of the chunk in the stream, from 0.
    pub chunk: u32,
    /// Time of the media pipeline for the chunk.
    pub stage0_ns: u64,
    /// Time from commit to done.
    pub stage1_ns: u64,
    /// Time from the previous chunk's commit to this commit; 0 for the first chunk.
    pub period_ns: u64,
    /// Time for which the mesh was idle before this commit.
    pub idle_ns: u64,
    /// Time from the leader's decision to the delivery.
    pub latency_ns: u64,
    /// Number of chunks that were decided but not delivered when this chunk was done, including
    /// this one.
    pub undelivered: u32,
}

/// Streams `chunks` chunks over two ranks and a leader outside the mesh, and returns the times of
/// each chunk.
///
/// # Errors
/// The diagnostics of limits without bounds.
pub fn simulate_pipeline(
    stage_times: StageTimes,
    regime: CacheRegime,
    limits: &Limits,
    chunks: u32,
) -> Result<Vec<ChunkTimes>, Diagnostics> {
    let request = |k: u32| {
        let first = k == 0;
        (ChunkRequest { prompt_change: first, ..ChunkRequest::default() }, first.then_some(1))
    };
    let longest = stage_times.generate_ns.max(stage_times.context_ns).max(stage_times.delivery_ns);
    let limits = Limits { done_floor_ns: limits.done_floor_ns.max(4 * longest), ..limits.clone() };
    let setup = SimConfig {
        leader: synthetic_config(vec![1, 2], regime, limits, Tripwires::default()),
        launcher: true,
        tick_ns: TICK_NS,
        requests: (0..chunks).map(request).collect(),
        external_events: Vec::new(),
    };
    let world = PipelineWorld { stages: stage_times, ..PipelineWorld::default() };
    let mut sim = Sim::new(setup, world)?;
    let each = stage_times.generate_ns + stage_times.context_ns + stage_times.delivery_ns + 10 * HOP_NS;
    sim.run((u64::from(chunks) + 10) * each.saturating_mul(4) + 60_000_000_000);
    Ok(sim.world.times.into_values().filter(|t| t.latency_ns > 0).collect())
}

#[derive(Debug, Default)]
struct PipelineWorld {
    stages: StageTimes,
    times: BTreeMap<u32, ChunkTimes>,
    decided_ns: BTreeMap<u32, u64>,
    /// Commit and done times of the previous chunk.
    previous_call: Option<(u64, u64)>,
    delivered: u32,
}

impl PipelineWorld {
    /// Returns a duration with jitter that depends only on the chunk and on `what`, the kind of the
    /// duration.
    fn jittered_ns(&self, ns: u64, chunk: u32, what: u64) -> u64 {
        let jitter = u64::from(self.stages.jitter_percent);
        let percent = 100 - jitter + Rng::new(what, [chunk, 0]).next_below(2 * jitter as usize + 1) as u64;
        ns / 100 * percent
    }
}

impl World for PipelineWorld {
    fn deliver_frame(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        vec![(HOP_NS, frame)]
    }

    fn phase_ns(&mut self, _: u64, _: u32, call: &ReadyCall, phase: usize) -> u64 {
        let Some(meta) = &call.meta else { return 0 };
        let kind = PhaseKind::from_program(&meta.phases[phase].program);
        if !kind.is_some_and(PhaseKind::is_generator) {
            return 0;
        }
        let chunk = self.previous_call.map_or(0, |_| self.times.len() as u32);
        let passes = u64::from(meta.expected_generator_calls.max(1));
        self.jittered_ns(self.stages.generate_ns, chunk, 0) / passes
    }

    fn media_ns(&mut self, _: u64, work: &MediaJob) -> u64 {
        match work {
            MediaJob::EncodePrompt(_) => 0,
            MediaJob::Context { chunk, .. } => self.jittered_ns(self.stages.context_ns, chunk - 1, 1),
            MediaJob::Deliver { chunk, .. } => self.jittered_ns(self.stages.delivery_ns, *chunk, 2),
        }
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        0
    }

    fn observe_event(&mut self, now_ns: u64, what: SimEvent<'_>) {
        match what {
            SimEvent::CallFinished(record) if record.request.is_some() => {
                let chunk = record.plan.chunk;
                self.decided_ns.insert(chunk, record.decided_ns);
                let t = self.times.entry(chunk).or_default();
                t.chunk = chunk;
                t.stage1_ns = record.done_ns - record.committed_ns;
                if let Some((committed_ns, done_ns)) = self.previous_call {
                    t.period_ns = record.committed_ns - committed_ns;
                    t.idle_ns = record.committed_ns.saturating_sub(done_ns);
                }
                t.undelivered = chunk + 1 - self.delivered;
                self.previous_call = Some((record.committed_ns, record.done_ns));
            }
            // The first part of a chunk's decode belongs to the context of the next chunk.
            SimEvent::MediaJobFinished { work: MediaJob::Context { chunk, .. }, begun_ns, .. } => {
                self.times.entry(chunk - 1).or_default().stage0_ns += now_ns - begun_ns;
            }
            SimEvent::MediaJobFinished { work: MediaJob::Deliver { chunk, .. }, begun_ns, .. } => {
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

    fn period(stages: StageTimes, regime: CacheRegime, depth: u32) -> u64 {
        period_of(
            stages,
            regime,
            Limits { d_in: depth, d_out: depth, max_outstanding: depth, ..Limits::default() },
        )
    }

    fn period_of(stages: StageTimes, regime: CacheRegime, limits: Limits) -> u64 {
        let times = simulate_pipeline(stages, regime, &limits, 20).expect("legal limits");
        assert_eq!(times.len(), 20);
        let mut periods: Vec<u64> = times[4..18].iter().map(|t| t.period_ns).collect();
        periods.sort_unstable();
        periods[periods.len() / 2] / MS
    }

    // proves: V-02
    #[test]
    fn queue_depth_one_serializes_and_two_overlaps() {
        let stages = StageTimes {
            context_ns: 60 * MS,
            delivery_ns: 120 * MS,
            generate_ns: 400 * MS,
            jitter_percent: 0,
        };
        let [one, two, three] = [1, 2, 3].map(|d| period(stages, CacheRegime::Resident, d));
        assert!((520..530).contains(&one), "generator and the rest of decode alternate: {one}");
        assert!((400..410).contains(&two), "the generator alone: {two}");
        assert_eq!(two, three, "a greater depth hides no additional work");
    }

    // proves: V-02
    #[test]
    fn one_slot_for_results_serializes_and_one_open_call_costs_a_round() {
        let stages =
            StageTimes { context_ns: 1, delivery_ns: 200 * MS, generate_ns: 400 * MS, jitter_percent: 0 };
        let measure = |limits| {
            let times = simulate_pipeline(stages, CacheRegime::Resident, &limits, 20).expect("legal limits");
            (times[12].period_ns, times[12].idle_ns)
        };
        let (both, idle) = measure(Limits::default());
        assert!(both / MS == 400 && idle < MS, "two slots on both sides hide stage 0: {both}, {idle}");
        let (one_result, _) = measure(Limits { d_out: 1, ..Limits::default() });
        assert!((600..605).contains(&(one_result / MS)), "one slot for results: {one_result}");
        let (one_call, waited) = measure(Limits { max_outstanding: 1, ..Limits::default() });
        assert!(one_call / MS == 400 && one_call > both, "one open call: {one_call} against {both}");
        // Envelope and *ready*, one hop each, before the commit.
        assert!(waited >= idle + 2 * HOP_NS, "the mesh waits for the round: {waited} against {idle}");
    }

    // proves: V-05
    #[test]
    fn a_coupled_stream_waits_for_the_first_latent_and_no_longer() {
        let anchored = StageTimes {
            context_ns: 60 * MS,
            delivery_ns: 120 * MS,
            generate_ns: 400 * MS,
            jitter_percent: 0,
        };
        let whole = StageTimes { context_ns: 180 * MS, delivery_ns: MS, ..anchored };
        let stages = anchored;
        let (anchored, whole) =
            (period(anchored, CacheRegime::Recompute, 2), period(whole, CacheRegime::Recompute, 2));
        assert!((460..470).contains(&anchored), "{anchored}");
        // The next call is prepared only when the previous one is done, and its context still comes
        // before the delivery.
        let alone = Limits { d_in: 1, max_outstanding: 1, ..Limits::default() };
        let alone = period_of(stages, CacheRegime::Recompute, alone);
        assert!((460..470).contains(&alone), "{alone}");
        assert!((580..592).contains(&whole), "{whole}");
    }
}
