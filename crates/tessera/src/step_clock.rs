//! Converts the steps that a device ran to the times of the ops of a phase.

use std::collections::BTreeMap;
use std::time::Instant;

use tessera_cost::op_class::OpClass;
use tessera_device::{StepSpan, StepTimes};
use tessera_ir::{Opcode, Program, StreamId};
use tessera_runtime::wire::{CollectiveTimes, PhaseOpTimes};

use crate::clock::monotonic_ns;

/// When the host began a run, on both of its clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunBegin {
    instant: Instant,
    monotonic_ns: u64,
}

impl RunBegin {
    pub(crate) fn now() -> RunBegin {
        RunBegin { instant: Instant::now(), monotonic_ns: monotonic_ns() }
    }

    /// Returns when the device began the run, on the host's monotonic clock. The host knows when the device had ended, and
    /// the device how long it took.
    fn device_start_ns(self, steps: &StepTimes) -> u64 {
        let until_end = steps.finished.saturating_duration_since(self.instant).as_nanos();
        let until_end = u64::try_from(until_end).unwrap_or(u64::MAX);
        self.monotonic_ns.saturating_add(until_end.saturating_sub(steps.length_ns() as u64))
    }
}

/// Returns the times of a program's ops from those of the steps of a run.
///
/// A step with several ops is the time of the one whose class has most work; the others have none. The device waits for a collective
/// from the last step before the wait on the same stream.
pub(crate) fn op_times_from_steps(program: &Program, steps: &StepTimes, begin: RunBegin) -> PhaseOpTimes {
    let count = program.ops.len();
    let start_ns = begin.device_start_ns(steps);
    let (mut begins_ns, mut ends_ns) = (vec![0; count], vec![0; count]);
    let mut collectives = Vec::new();
    let classes = OpClass::of_program(program);
    for span in &steps.spans {
        let (begin, end) = (span.begin_ns as u64, span.end_ns as u64);
        for op in span.ops.iter().copied().filter(|op| program.ops[*op].opcode.is_collective()) {
            (begins_ns[op], ends_ns[op]) = (begin, end);
            collectives.push(CollectiveTimes {
                op: u32::try_from(op).unwrap_or(u32::MAX),
                issued_ns: begin,
                waiting_ns: begin,
                completed_ns: end,
            });
        }
        if let Some(op) = main_op(program, &classes, span) {
            (begins_ns[op], ends_ns[op]) = (begin, end);
        }
    }
    set_waits(program, &ends_ns, &mut collectives);
    PhaseOpTimes { start_ns, begins_ns, ends_ns, end_ns: steps.length_ns() as u64, collectives }
}

/// Returns the op of a step that stands for what it computes: the first one of the class with most work.
fn main_op(program: &Program, classes: &[Option<OpClass>], span: &StepSpan) -> Option<usize> {
    let computing = span.ops.iter().copied().filter(|op| !program.ops[*op].opcode.is_collective());
    computing.filter(|op| classes[*op].is_some()).min_by_key(|op| &classes[*op])
}

/// Sets when the stream of each wait began to wait.
fn set_waits(program: &Program, ends_ns: &[u64], collectives: &mut [CollectiveTimes]) {
    let issuers = program.defining_ops();
    let mut stream_ends: BTreeMap<StreamId, u64> = BTreeMap::new();
    for (op, end_ns) in program.ops.iter().zip(ends_ns) {
        let stream_end = stream_ends.entry(op.stream).or_default();
        *stream_end = (*stream_end).max(*end_ns);
        if op.opcode != Opcode::Wait {
            continue;
        }
        let issuer = op.operands.first().and_then(|ticket| issuers.get(ticket.0 as usize).copied().flatten());
        let times = collectives.iter_mut().find(|times| Some(times.op as usize) == issuer);
        if let Some(times) = times {
            times.waiting_ns = (*stream_end).min(times.completed_ns);
            *stream_end = (*stream_end).max(times.completed_ns);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use tessera_ir::parse_all;

    use super::*;

    const PROGRAM: &str = "program @p role(all) mesh(tp=2) streams(compute, tp_collective) { \
        %x = input : f32[4, 8] {tp: partial(sum)} \
        %u = input : f32[4, 8] \
        %t = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective \
        %a = ttile.silu %u \
        %b = ttile.silu %a \
        %y = ttile.collective.wait %t : f32[4, 8] \
        %z = ttile.silu %y output \"z\", %z output \"b\", %b }";

    fn span(ops: &[usize], begin_ns: f64, end_ns: f64) -> StepSpan {
        StepSpan { ops: ops.to_vec(), stream: String::new(), begin_ns, end_ns }
    }

    #[test]
    fn streams_overlap_and_a_wait_begins_with_the_end_of_its_stream() {
        let program = parse_all(PROGRAM, "p").unwrap().remove(0);
        let begin = RunBegin::now();
        let finished = begin.instant + Duration::from_nanos(1_000);
        let spans = vec![span(&[2], 10.0, 90.0), span(&[3, 4], 12.0, 50.0), span(&[6], 91.0, 100.0)];
        let times = op_times_from_steps(&program, &StepTimes { finished, spans }, begin);
        assert_eq!(times.start_ns, begin.monotonic_ns + 900);
        assert_eq!(times.begins_ns, [0, 0, 10, 12, 0, 0, 91, 0, 0]);
        assert_eq!(times.ends_ns, [0, 0, 90, 50, 0, 0, 100, 0, 0]);
        assert_eq!(times.end_ns, 100);
        let wait = CollectiveTimes { op: 2, issued_ns: 10, waiting_ns: 50, completed_ns: 90 };
        assert_eq!(times.collectives, [wait]);
    }

    #[test]
    fn a_collective_that_ended_before_its_wait_makes_nobody_wait() {
        let program = parse_all(PROGRAM, "p").unwrap().remove(0);
        let begin = RunBegin::now();
        let spans = vec![span(&[2], 10.0, 30.0), span(&[3, 4], 12.0, 50.0), span(&[6], 51.0, 60.0)];
        let times = op_times_from_steps(&program, &StepTimes { finished: begin.instant, spans }, begin);
        assert_eq!((times.collectives[0].waiting_ns, times.collectives[0].completed_ns), (30, 30));
    }
}
