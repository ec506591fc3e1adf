//! Simulation of a schedule from its dependencies: a turn starts when its stage is free and its
//! input has arrived.

use super::MicroBatchTimes;
use super::order::{StageOp, StageTurn, StageWork, stage_orders};
use crate::params::PipelineSchedule;

/// One pass of a micro-batch through a model chunk of a stage, with its start and its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageSlot {
    /// Index of the pipeline stage that runs the op.
    pub stage: u32,
    /// Model chunk of the stage, as in [`StageOp::model_chunk`].
    pub model_chunk: u32,
    /// Micro-batch, as in [`StageOp::micro_batch`].
    pub micro_batch: u32,
    /// Which pass runs: forward, backward, or one half of backward.
    pub work: StageWork,
    /// Time at which the op starts, in nanoseconds.
    pub start_ns: f64,
    /// End time. Of two ops in one block the first takes its time first, and the results of both
    /// are available at the end of the block.
    pub end_ns: f64,
}

/// Simulates a schedule that [`check_schedule`](super::check_schedule()) accepts, with the times of
/// each stage; a send takes the sender's time. Slots are grouped by stage, in order of time.
#[must_use]
pub fn simulate_schedule(
    schedule: PipelineSchedule,
    interleave: u32,
    micro_batches: u32,
    paces: &[MicroBatchTimes],
) -> Vec<StageSlot> {
    let mut slots = Vec::new();
    run_schedule(schedule, interleave, micro_batches, paces, |slot| slots.push(slot));
    slots.sort_by(|a, b| {
        a.stage.cmp(&b.stage).then(a.start_ns.total_cmp(&b.start_ns)).then(a.end_ns.total_cmp(&b.end_ns))
    });
    slots
}

/// Simulates a schedule and returns its bubble, as the docs of [`super`] define it, in nanoseconds.
pub(super) fn bubble_ns(
    schedule: PipelineSchedule,
    interleave: u32,
    micro_batches: u32,
    paces: &[MicroBatchTimes],
) -> f64 {
    let mut spans = vec![(f64::INFINITY, 0.0f64); paces.len()];
    run_schedule(schedule, interleave, micro_batches, paces, |slot| {
        let span = &mut spans[slot.stage as usize];
        *span = (span.0.min(slot.start_ns), span.1.max(slot.end_ns));
    });
    let work = |pace: &MicroBatchTimes| f64::from(micro_batches) * pace.work_ns();
    if paces.iter().all(MicroBatchTimes::is_forward_only) {
        let start = spans.iter().map(|s| s.0).fold(f64::INFINITY, f64::min);
        let end = spans.iter().map(|s| s.1).fold(0.0, f64::max);
        return end - start - paces.iter().map(work).fold(0.0, f64::max);
    }
    let longest = spans.iter().map(|s| s.1 - s.0).fold(0.0, f64::max);
    longest - paces.iter().map(work).fold(0.0, f64::max)
}

fn run_schedule(
    schedule: PipelineSchedule,
    interleave: u32,
    micro_batches: u32,
    paces: &[MicroBatchTimes],
    mut slot: impl FnMut(StageSlot),
) {
    let stages = paces.len() as u32;
    let forward_only = paces.iter().all(MicroBatchTimes::is_forward_only);
    let orders = stage_orders(schedule, stages, interleave, micro_batches, forward_only);
    let pieces = if schedule == PipelineSchedule::DualPipe { 2 } else { interleave.max(1) };
    let route =
        MicroBatchRoute { stages, chunks: pieces, bidirectional: schedule == PipelineSchedule::DualPipe };
    let share = if schedule == PipelineSchedule::Interleaved { f64::from(pieces) } else { 1.0 };
    let result_index = |stage: u32, op: &StageOp, back: bool| {
        (((stage * pieces + op.model_chunk) * micro_batches + op.micro_batch) * 2 + u32::from(back)) as usize
    };
    let mut done = vec![f64::NAN; (stages * pieces * micro_batches * 2) as usize];
    // Time at which an op's input is available, or `None` if the input is not computed yet.
    let ready = |done: &[f64], stage: u32, op: &StageOp| -> Option<f64> {
        let from = match op.work {
            StageWork::BackwardWeight => return Some(done[result_index(stage, op, true)]),
            StageWork::Forward => route.upstream_of(stage, op.model_chunk),
            StageWork::Backward | StageWork::BackwardInput => route.downstream_of(stage, op.model_chunk),
        };
        let back = op.work != StageWork::Forward;
        let (time, send) = match from {
            None if !back => return Some(0.0),
            None => (done[result_index(stage, op, false)], 0.0),
            Some((peer, piece)) => (
                done[result_index(peer, &StageOp { model_chunk: piece, ..*op }, back)],
                paces[peer as usize].send_ns,
            ),
        };
        (!time.is_nan()).then_some(time + send)
    };
    let mut next = vec![0usize; stages as usize];
    let mut free = vec![0.0f64; stages as usize];
    let mut awake: Vec<u32> = (0..stages).rev().collect();
    while let Some(stage) = awake.pop() {
        let i = stage as usize;
        let pace = &paces[i];
        let takes = |op: &StageOp| match op.work {
            StageWork::Forward => pace.forward_ns / share,
            StageWork::Backward => (pace.backward_input_ns + pace.backward_weight_ns) / share,
            StageWork::BackwardInput => pace.backward_input_ns / share,
            StageWork::BackwardWeight => pace.backward_weight_ns / share,
        };
        while let Some(StageTurn { op, paired: beside }) = orders[i].get(next[i]) {
            let first = ready(&done, stage, op);
            let second = beside.as_ref().map_or(Some(0.0), |b| ready(&done, stage, b));
            let (Some(first), Some(second)) = (first, second) else { break };
            let start = free[i].max(first).max(second);
            let mut end = start;
            for op in [Some(op), beside.as_ref()].into_iter().flatten() {
                let start_ns = end;
                end += takes(op);
                let StageOp { work, model_chunk: piece, micro_batch } = *op;
                slot(StageSlot { stage, model_chunk: piece, micro_batch, work, start_ns, end_ns: end });
            }
            for op in [Some(op), beside.as_ref()].into_iter().flatten() {
                let to = match op.work {
                    StageWork::BackwardWeight => continue,
                    StageWork::Forward => route.downstream_of(stage, op.model_chunk),
                    StageWork::Backward | StageWork::BackwardInput => {
                        route.upstream_of(stage, op.model_chunk)
                    }
                };
                done[result_index(stage, op, op.work != StageWork::Forward)] = end;
                awake.extend(to.map(|t| t.0));
            }
            free[i] = end;
            next[i] += 1;
        }
    }
}

/// The path of a micro-batch over stages and model chunks.
struct MicroBatchRoute {
    stages: u32,
    chunks: u32,
    bidirectional: bool,
}

impl MicroBatchRoute {
    /// Returns the stage and chunk that send the forward input and receive the input gradients.
    fn upstream_of(&self, stage: u32, piece: u32) -> Option<(u32, u32)> {
        let last = self.stages - 1;
        match (self.bidirectional, piece) {
            (true, 1) => (stage < last).then(|| (stage + 1, piece)),
            (true, _) => (stage > 0).then(|| (stage - 1, piece)),
            (false, _) if stage > 0 => Some((stage - 1, piece)),
            (false, _) => (piece > 0).then(|| (last, piece - 1)),
        }
    }

    /// Returns the stage and chunk that receive the forward output and send its gradients.
    fn downstream_of(&self, stage: u32, piece: u32) -> Option<(u32, u32)> {
        let last = self.stages - 1;
        match (self.bidirectional, piece) {
            (true, 1) => (stage > 0).then(|| (stage - 1, piece)),
            (true, _) => (stage < last).then(|| (stage + 1, piece)),
            (false, _) if stage < last => Some((stage + 1, piece)),
            (false, _) => (piece + 1 < self.chunks).then_some((0, piece + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{
        bubble_ns as bubble, check_schedule, closed_form, peak_in_flight, peak_in_flight_on,
    };

    const SCHEDULES: &[PipelineSchedule] = &PipelineSchedule::ALL;

    /// A valid mapping with sends up to `sends` times the shortest work.
    fn any_schedule(sends: f64) -> impl Strategy<Value = (PipelineSchedule, u32, u32, u32, MicroBatchTimes)> {
        let pace = (0.2..4.0f64, 0.2..4.0f64, 0.2..4.0f64, 0.0..=sends);
        (0..SCHEDULES.len(), 2..8u32, 2..5u32, 1..25u32, pace, any::<bool>()).prop_map(
            |(s, p, v, m, (f, b, w, send), even)| {
                let schedule = SCHEDULES[s];
                let (p, v, m) = match schedule {
                    PipelineSchedule::Interleaved => (p, v, (m % 4 + 1) * p),
                    PipelineSchedule::DualPipe => (p / 2 * 2, 1, p / 2 * 4 + m / 2 * 2),
                    _ => (p, 1, m),
                };
                let b = if even { f } else { b };
                let pace = MicroBatchTimes {
                    forward_ns: f,
                    backward_input_ns: b,
                    backward_weight_ns: w,
                    send_ns: send * f.min(b).min(w),
                };
                (schedule, p, v, m, pace)
            },
        )
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * (1.0 + a.abs() + b.abs())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1500))]

        #[test]
        fn closed_forms_equal_the_simulated_schedule((s, p, v, m, pace) in any_schedule(2.0)) {
            prop_assert_eq!(check_schedule(s, p, v, m, 1000), Ok(()));
            let simulated = bubble_ns(s, v, m, &vec![pace; p as usize]);
            if let Some(closed) = closed_form(s, p, v, m, &pace) {
                prop_assert!(close(closed, simulated), "closed {closed}, simulated {simulated}");
            }
            prop_assert!(close(bubble(s, p, v, m, &pace), simulated));
        }

        #[test]
        fn forward_alone_has_a_closed_form_too((s, p, v, m, pace) in any_schedule(2.0)) {
            let pace = MicroBatchTimes { backward_input_ns: 0.0, backward_weight_ns: 0.0, ..pace };
            let simulated = bubble_ns(s, v, m, &vec![pace; p as usize]);
            prop_assert_eq!(closed_form(s, p, v, m, &pace).is_some(), s != PipelineSchedule::DualPipe);
            prop_assert!(close(bubble(s, p, v, m, &pace), simulated));
        }

        #[test]
        fn closed_forms_answer_for_sends_that_work_can_hide((s, p, v, m, pace) in any_schedule(0.3)) {
            let enough = match s { PipelineSchedule::ZbH1 => p, PipelineSchedule::ZbH2 => 2 * p - 1, _ => 1 };
            let pace = MicroBatchTimes { send_ns: pace.send_ns / f64::from(v), ..pace };
            prop_assert_eq!(closed_form(s, p, v, m, &pace).is_some(), m >= enough);
        }

        #[test]
        fn every_stage_op_runs_once_and_after_its_input((s, p, v, m, pace) in any_schedule(1.0)) {
            let slots = simulate_schedule(s, v, m, &vec![pace; p as usize]);
            let work: f64 = slots.iter().map(|x| x.end_ns - x.start_ns).sum();
            prop_assert!(close(work, f64::from(p * m) * pace.work_ns()));
            for pair in slots.windows(2).filter(|w| w[0].stage == w[1].stage) {
                prop_assert!(pair[0].end_ns <= pair[1].start_ns + 1e-9);
            }
        }

        #[test]
        fn a_stage_keeps_no_more_activations_than_stated((s, p, v, m, _) in any_schedule(0.3)) {
            let mut most = 0.0f64;
            for (at, stage) in stage_orders(s, p, v, m, false).iter().enumerate() {
                let mut here = 0.0f64;
                let mut kept = 0i64;
                for op in stage.iter().flat_map(|t| [Some(t.op), t.paired]).flatten() {
                    kept += i64::from(op.work == StageWork::Forward);
                    here = here.max(kept as f64 / f64::from(v));
                    kept -= i64::from(matches!(op.work, StageWork::Backward | StageWork::BackwardWeight));
                }
                prop_assert_eq!(kept, 0);
                let said = peak_in_flight_on(s, p, v, m, at as u32);
                let exact = matches!(s, PipelineSchedule::OneFOneB | PipelineSchedule::Interleaved);
                prop_assert!(if exact { close(here, said) } else { here <= said }, "stage {at}: keeps {here}, formula {said}");
                most = most.max(here);
            }
            prop_assert!(close(most, peak_in_flight(s, p, v, m)), "keeps {most}, formula {}", peak_in_flight(s, p, v, m));
        }

        #[test]
        fn a_faster_link_never_makes_a_bubble_longer((s, p, v, m, pace) in any_schedule(2.0), faster in 0.0..1.0f64) {
            let fast = MicroBatchTimes { send_ns: pace.send_ns * faster, ..pace };
            prop_assert!(bubble(s, p, v, m, &fast) <= bubble(s, p, v, m, &pace) + 1e-9);
        }
    }

    #[test]
    fn a_slow_stage_sets_the_pace() {
        let pace = |forward_ns| MicroBatchTimes { forward_ns, ..MicroBatchTimes::default() };
        let slots = simulate_schedule(PipelineSchedule::OneFOneB, 1, 10, &[pace(1.0), pace(5.0), pace(1.0)]);
        assert_eq!(slots.iter().map(|s| s.end_ns).fold(0.0, f64::max), 1.0 + 50.0 + 1.0);
    }
}
