//! The progress of one rank through a program: its streams, its host launches and its completed
//! ops.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::SimProgramId;
use super::events::TimeNs;
use crate::communicators::CommunicatorIndex;
use crate::timed_program::TimedProgram;

/// Progress of one rank through the program that it executes.
#[derive(Debug)]
pub(super) struct RunningProgram {
    pub(super) program: SimProgramId,
    pub(super) timed_program: Rc<TimedProgram>,
    pub(super) begun_ns: f64,
    /// The communicator and sequence number of each collective launch.
    pub(super) launch_keys: Vec<(CommunicatorIndex, u64)>,
    pub(super) streams: Vec<StreamCursor>,
    /// Completed ops; an issue op is complete when its transfer is.
    pub(super) done: Vec<bool>,
    /// Number of completed host launches.
    pub(super) launched: usize,
    /// Ops that wait for the device, ordered by the time at which they became ready, then by
    /// program order.
    pub(super) ready: BTreeSet<(TimeNs, usize)>,
    pub(super) completed_ops: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StreamCursor {
    /// Index of the next op in the stream's queue.
    pub(super) next: usize,
    pub(super) state: StreamState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum StreamState {
    /// The next op waits for its dependencies.
    #[default]
    Blocked,
    /// The op waits for the device or occupies it.
    Working,
    /// The number of unfinished transfers of the op.
    Transferring(usize),
}

impl RunningProgram {
    /// Starts a timed program at `begun_ns`; no op has run.
    pub(super) fn new(
        program: SimProgramId,
        timed_program: Rc<TimedProgram>,
        launch_keys: Vec<(CommunicatorIndex, u64)>,
        begun_ns: f64,
    ) -> RunningProgram {
        RunningProgram {
            program,
            begun_ns,
            launch_keys,
            streams: vec![StreamCursor::default(); timed_program.queues.len()],
            done: vec![false; timed_program.steps.len()],
            launched: 0,
            ready: BTreeSet::new(),
            completed_ops: Vec::new(),
            timed_program,
        }
    }

    /// Returns the next op of a stream if all its dependencies are met.
    pub(super) fn next_startable(&self, stream: usize) -> Option<usize> {
        let s = self.streams[stream];
        let op =
            *self.timed_program.queues[stream].get(s.next).filter(|_| s.state == StreamState::Blocked)?;
        let step = &self.timed_program.steps[op];
        let free = step.required_launches <= self.launched
            && step.event_ops.iter().chain(&step.issue_op).all(|earlier| self.done[*earlier]);
        free.then_some(op)
    }

    pub(super) fn finish_op(&mut self, stream: usize, op: usize) {
        self.done[op] = true;
        self.streams[stream] =
            StreamCursor { next: self.streams[stream].next + 1, state: StreamState::Blocked };
    }

    pub(super) fn stream_of(&self, op: usize) -> Option<usize> {
        self.timed_program.op_streams.get(op).copied()
    }

    pub(super) fn is_complete(&self) -> bool {
        self.launched == self.timed_program.launch_times_ns.len()
            && self.streams.iter().zip(&self.timed_program.queues).all(|(s, queue)| s.next == queue.len())
    }
}
