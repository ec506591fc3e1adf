//! A schedule played by its dependencies alone: a turn starts when its stage is free and what it needs has come.

use super::Pace;
use super::order::{Op, Turn, Work, orders};
use crate::knobs::Schedule;

/// When a stage worked on what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    /// Stage.
    pub stage: u32,
    /// Piece of the stage, as in [`Op::piece`].
    pub piece: u32,
    /// Micro-batch, as in [`Op::micro_batch`].
    pub micro_batch: u32,
    /// What was done.
    pub work: Work,
    /// Start.
    pub start_ns: f64,
    /// End. Of two ops run as one block the first has its share first, and the results of both are there at the end.
    pub end_ns: f64,
}

/// Plays a [`legal`](super::legal()) schedule on stages of one pace.
#[must_use]
pub fn simulate(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &Pace,
) -> Vec<Slot> {
    simulate_uneven(schedule, interleave, micro_batches, &vec![*pace; stages as usize])
}

/// The same with a pace for each stage; a send takes the sender's time. Slots are grouped by stage and in order of time.
#[must_use]
pub fn simulate_uneven(schedule: Schedule, interleave: u32, micro_batches: u32, paces: &[Pace]) -> Vec<Slot> {
    let mut slots = Vec::new();
    play(schedule, interleave, micro_batches, paces, |slot| slots.push(slot));
    slots.sort_by(|a, b| {
        a.stage.cmp(&b.stage).then(a.start_ns.total_cmp(&b.start_ns)).then(a.end_ns.total_cmp(&b.end_ns))
    });
    slots
}

/// The bubble as the simulation has it.
pub(super) fn bubble_ns(schedule: Schedule, interleave: u32, micro_batches: u32, paces: &[Pace]) -> f64 {
    let mut spans = vec![(f64::INFINITY, 0.0f64); paces.len()];
    play(schedule, interleave, micro_batches, paces, |slot| {
        let span = &mut spans[slot.stage as usize];
        *span = (span.0.min(slot.start_ns), span.1.max(slot.end_ns));
    });
    let work = |pace: &Pace| f64::from(micro_batches) * pace.work_ns();
    if paces.iter().all(Pace::forward_only) {
        let start = spans.iter().map(|s| s.0).fold(f64::INFINITY, f64::min);
        let end = spans.iter().map(|s| s.1).fold(0.0, f64::max);
        return end - start - paces.iter().map(work).fold(0.0, f64::max);
    }
    let longest = spans.iter().map(|s| s.1 - s.0).fold(0.0, f64::max);
    longest - paces.iter().map(work).fold(0.0, f64::max)
}

fn play(schedule: Schedule, interleave: u32, micro_batches: u32, paces: &[Pace], mut slot: impl FnMut(Slot)) {
    let stages = paces.len() as u32;
    let forward_only = paces.iter().all(Pace::forward_only);
    let orders = orders(schedule, stages, interleave, micro_batches, forward_only);
    let pieces = if schedule == Schedule::DualPipe { 2 } else { interleave.max(1) };
    let route = Route { stages, pieces, two_ways: schedule == Schedule::DualPipe };
    let share = if schedule == Schedule::Interleaved { f64::from(pieces) } else { 1.0 };
    let place = |stage: u32, op: &Op, back: bool| {
        (((stage * pieces + op.piece) * micro_batches + op.micro_batch) * 2 + u32::from(back)) as usize
    };
    let mut done = vec![f64::NAN; (stages * pieces * micro_batches * 2) as usize];
    // When an op's input is there: none while it is not made yet.
    let ready = |done: &[f64], stage: u32, op: &Op| -> Option<f64> {
        let from = match op.work {
            Work::BackwardWeight => return Some(done[place(stage, op, true)]),
            Work::Forward => route.before(stage, op.piece),
            Work::Backward | Work::BackwardInput => route.after(stage, op.piece),
        };
        let back = op.work != Work::Forward;
        let (time, send) = match from {
            None if !back => return Some(0.0),
            None => (done[place(stage, op, false)], 0.0),
            Some((peer, piece)) => {
                (done[place(peer, &Op { piece, ..*op }, back)], paces[peer as usize].send_ns)
            }
        };
        (!time.is_nan()).then_some(time + send)
    };
    let mut next = vec![0usize; stages as usize];
    let mut free = vec![0.0f64; stages as usize];
    let mut awake: Vec<u32> = (0..stages).rev().collect();
    while let Some(stage) = awake.pop() {
        let i = stage as usize;
        let pace = &paces[i];
        let takes = |op: &Op| match op.work {
            Work::Forward => pace.forward_ns / share,
            Work::Backward => (pace.backward_input_ns + pace.backward_weight_ns) / share,
            Work::BackwardInput => pace.backward_input_ns / share,
            Work::BackwardWeight => pace.backward_weight_ns / share,
        };
        while let Some(Turn { op, beside }) = orders[i].get(next[i]) {
            let first = ready(&done, stage, op);
            let second = beside.as_ref().map_or(Some(0.0), |b| ready(&done, stage, b));
            let (Some(first), Some(second)) = (first, second) else { break };
            let start = free[i].max(first).max(second);
            let mut end = start;
            for op in [Some(op), beside.as_ref()].into_iter().flatten() {
                let start_ns = end;
                end += takes(op);
                let Op { work, piece, micro_batch } = *op;
                slot(Slot { stage, piece, micro_batch, work, start_ns, end_ns: end });
            }
            for op in [Some(op), beside.as_ref()].into_iter().flatten() {
                let to = match op.work {
                    Work::BackwardWeight => continue,
                    Work::Forward => route.after(stage, op.piece),
                    Work::Backward | Work::BackwardInput => route.before(stage, op.piece),
                };
                done[place(stage, op, op.work != Work::Forward)] = end;
                awake.extend(to.map(|t| t.0));
            }
            free[i] = end;
            next[i] += 1;
        }
    }
}

/// Where a micro-batch goes, as stage and piece.
struct Route {
    stages: u32,
    pieces: u32,
    two_ways: bool,
}

impl Route {
    /// Where its forward comes from, and its gradients go to.
    fn before(&self, stage: u32, piece: u32) -> Option<(u32, u32)> {
        let last = self.stages - 1;
        match (self.two_ways, piece) {
            (true, 1) => (stage < last).then(|| (stage + 1, piece)),
            (true, _) => (stage > 0).then(|| (stage - 1, piece)),
            (false, _) if stage > 0 => Some((stage - 1, piece)),
            (false, _) => (piece > 0).then(|| (last, piece - 1)),
        }
    }

    /// Where its forward goes to, and its gradients come from.
    fn after(&self, stage: u32, piece: u32) -> Option<(u32, u32)> {
        let last = self.stages - 1;
        match (self.two_ways, piece) {
            (true, 1) => (stage > 0).then(|| (stage - 1, piece)),
            (true, _) => (stage < last).then(|| (stage + 1, piece)),
            (false, _) if stage < last => Some((stage + 1, piece)),
            (false, _) => (piece + 1 < self.pieces).then_some((0, piece + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{bubble_ns as bubble, closed_form, in_flight, in_flight_on, legal};

    const SCHEDULES: &[Schedule] = Schedule::ALL;

    /// A legal arrangement; sends up to `sends` of the shortest work.
    fn arrangement(sends: f64) -> impl Strategy<Value = (Schedule, u32, u32, u32, Pace)> {
        let pace = (0.2..4.0f64, 0.2..4.0f64, 0.2..4.0f64, 0.0..=sends);
        (0..SCHEDULES.len(), 2..8u32, 2..5u32, 1..25u32, pace, any::<bool>()).prop_map(
            |(s, p, v, m, (f, b, w, send), even)| {
                let schedule = SCHEDULES[s];
                let (p, v, m) = match schedule {
                    Schedule::Interleaved => (p, v, (m % 4 + 1) * p),
                    Schedule::DualPipe => (p / 2 * 2, 1, p / 2 * 4 + m / 2 * 2),
                    _ => (p, 1, m),
                };
                let b = if even { f } else { b };
                let pace = Pace {
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
        fn closed_forms_equal_the_simulated_schedule((s, p, v, m, pace) in arrangement(2.0)) {
            prop_assert_eq!(legal(s, p, v, m, 1000), Ok(()));
            let simulated = bubble_ns(s, v, m, &vec![pace; p as usize]);
            if let Some(closed) = closed_form(s, p, v, m, &pace) {
                prop_assert!(close(closed, simulated), "closed {closed}, simulated {simulated}");
            }
            prop_assert!(close(bubble(s, p, v, m, &pace), simulated));
        }

        #[test]
        fn forward_alone_has_a_closed_form_too((s, p, v, m, pace) in arrangement(2.0)) {
            let pace = Pace { backward_input_ns: 0.0, backward_weight_ns: 0.0, ..pace };
            let simulated = bubble_ns(s, v, m, &vec![pace; p as usize]);
            prop_assert_eq!(closed_form(s, p, v, m, &pace).is_some(), s != Schedule::DualPipe);
            prop_assert!(close(bubble(s, p, v, m, &pace), simulated));
        }

        #[test]
        fn closed_forms_answer_for_sends_that_work_can_hide((s, p, v, m, pace) in arrangement(0.3)) {
            let enough = match s { Schedule::ZbH1 => p, Schedule::ZbH2 => 2 * p - 1, _ => 1 };
            let pace = Pace { send_ns: pace.send_ns / f64::from(v), ..pace };
            prop_assert_eq!(closed_form(s, p, v, m, &pace).is_some(), m >= enough);
        }

        #[test]
        fn every_turn_is_taken_once_and_after_its_input((s, p, v, m, pace) in arrangement(1.0)) {
            let slots = simulate(s, p, v, m, &pace);
            let work: f64 = slots.iter().map(|x| x.end_ns - x.start_ns).sum();
            prop_assert!(close(work, f64::from(p * m) * pace.work_ns()));
            for pair in slots.windows(2).filter(|w| w[0].stage == w[1].stage) {
                prop_assert!(pair[0].end_ns <= pair[1].start_ns + 1e-9);
            }
        }

        #[test]
        fn a_stage_keeps_no_more_than_is_said((s, p, v, m, _) in arrangement(0.3)) {
            let mut most = 0.0f64;
            for (at, stage) in orders(s, p, v, m, false).iter().enumerate() {
                let mut here = 0.0f64;
                let mut kept = 0i64;
                for op in stage.iter().flat_map(|t| [Some(t.op), t.beside]).flatten() {
                    kept += i64::from(op.work == Work::Forward);
                    here = here.max(kept as f64 / f64::from(v));
                    kept -= i64::from(matches!(op.work, Work::Backward | Work::BackwardWeight));
                }
                prop_assert_eq!(kept, 0);
                let said = in_flight_on(s, p, v, m, at as u32);
                let exact = matches!(s, Schedule::OneFOneB | Schedule::Interleaved);
                prop_assert!(if exact { close(here, said) } else { here <= said }, "stage {at}: {here}, {said} said");
                most = most.max(here);
            }
            prop_assert!(close(most, in_flight(s, p, v, m)), "{most} kept, {} said", in_flight(s, p, v, m));
        }

        #[test]
        fn a_faster_link_never_makes_a_bubble_longer((s, p, v, m, pace) in arrangement(2.0), faster in 0.0..1.0f64) {
            let fast = Pace { send_ns: pace.send_ns * faster, ..pace };
            prop_assert!(bubble(s, p, v, m, &fast) <= bubble(s, p, v, m, &pace) + 1e-9);
        }
    }

    #[test]
    fn a_slow_stage_sets_the_pace() {
        let pace = |forward_ns| Pace { forward_ns, ..Pace::default() };
        let slots = simulate_uneven(Schedule::OneFOneB, 1, 10, &[pace(1.0), pace(5.0), pace(1.0)]);
        assert_eq!(slots.iter().map(|s| s.end_ns).fold(0.0, f64::max), 1.0 + 50.0 + 1.0);
    }
}
