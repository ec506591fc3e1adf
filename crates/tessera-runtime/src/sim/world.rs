//! The interface between a simulation and its [`World`]: frames, media jobs, observed events and
//! durations.

use std::sync::Arc;

use super::fixture::{HashEngine, context_tensor, prompt_tensor};
use crate::Failure;
use crate::engine::{Engine, MediaJob, ReadyCall};
use crate::leader::{Action, CallRecord};
use crate::program_index::ProgramIndex;
use crate::wire::{Message, Tensor};

/// The duration of a phase that never ends and makes no progress.
pub const NEVER_ENDS: u64 = u64::MAX;
/// The duration of a phase that lasts until the world ends it, collectives included: see
/// [`World::advance_open_phases`].
pub const OPEN_ENDED: u64 = u64::MAX - 1;

/// A control message in transit, with the two ends of the link that carries it.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Rank of the process at the sending end of the link.
    pub from: u32,
    /// The receiving process. It equals the sender if leader and rank share the process.
    pub to: u32,
    /// The rank that made the message.
    pub origin: u32,
    /// Whether the frame travels towards the leader.
    pub up: bool,
    /// The control message that the frame carries.
    pub message: Message,
}

/// An event of the simulation, reported when it happens.
#[derive(Debug)]
pub enum SimEvent<'a> {
    /// A process sends a frame, also between two state machines of one process.
    FrameSent(&'a Frame),
    /// A rank starts a committed call; [`World::alter_call`] may change the call afterwards.
    CallStarted {
        /// Rank whose engine starts the call.
        rank: u32,
        /// The committed call, as the engine receives it.
        call: &'a ReadyCall,
    },
    /// A rank enters the collectives of a phase.
    CollectivesEntered {
        /// Rank that enters; it waits until every rank of the mesh has entered, or for an abort.
        rank: u32,
        /// Id of the call that the rank runs.
        call_id: u64,
        /// Index of the phase within the call.
        phase: usize,
    },
    /// Every rank has finished a call, and the leader recorded it.
    CallFinished(&'a CallRecord),
    /// The media pipeline no longer writes chunks of an epoch below this one.
    MinEpochSet(u32),
    /// The media pipeline finished its oldest job; the leader has not received the result yet.
    MediaJobFinished {
        /// The finished job: a prompt, a context or a delivery.
        work: &'a MediaJob,
        /// Start time, in nanoseconds.
        begun_ns: u64,
        /// Whether the job had a result: false for a chunk below the minimum epoch.
        emitted: bool,
        /// Number of jobs that wait behind it.
        waiting: usize,
    },
    /// A process begins to exit by itself; the exit takes at most [`World::exit_ns`].
    Exiting {
        /// Rank of the process; 0 is the leader's.
        rank: u32,
        /// The reason; `None` for a clean exit.
        failure: Option<&'a Failure>,
    },
    /// The process of this rank has exited or was killed.
    Exited(u32),
}

/// Determines how long operations take and what happens to frames. The simulation calls the methods
/// in a deterministic order.
pub trait World {
    /// Returns what arrives for a sent frame: a delay in nanoseconds and a frame for each arrival,
    /// or nothing for a lost frame.
    fn deliver_frame(&mut self, now_ns: u64, frame: Frame) -> Vec<(u64, Frame)>;
    /// Returns the duration of a phase on a rank in nanoseconds, without collectives;
    /// [`NEVER_ENDS`] for a phase that never ends, [`OPEN_ENDED`] for a phase that the world ends.
    fn phase_ns(&mut self, now_ns: u64, rank: u32, call: &ReadyCall, phase: usize) -> u64;
    /// Returns the duration of a media job in nanoseconds; [`OPEN_ENDED`] for a job that the world
    /// ends.
    fn media_ns(&mut self, now_ns: u64, job: &MediaJob) -> u64;
    /// Returns the time that a process takes to exit, in nanoseconds.
    fn exit_ns(&mut self, rank: u32) -> u64;
    /// May change a committed call before a rank's engine runs it, after its start was observed.
    fn alter_call(&mut self, _rank: u32, _call: &mut ReadyCall) {}
    /// Returns whether the media pipeline writes a chunk of this epoch.
    fn should_write(&mut self, epoch: u32, min_epoch: u32) -> bool {
        epoch >= min_epoch
    }
    /// Creates the engine of a rank; by default a [`HashEngine`].
    fn make_engine(&mut self, _rank: u32, programs: &Arc<ProgramIndex>) -> Box<dyn Engine> {
        Box::new(HashEngine::new(Arc::clone(programs)))
    }
    /// Returns the earliest time at which an open-ended phase may change, in nanoseconds. The
    /// simulation raises a time in the past to now.
    fn next_change_ns(&mut self) -> Option<u64> {
        None
    }
    /// Advances open-ended phases to now and returns the ranks whose phase ended.
    fn advance_open_phases(&mut self, _now_ns: u64) -> Vec<u32> {
        Vec::new()
    }
    /// Returns whether the open-ended media job has ended by now. The simulation calls it after
    /// [`World::advance_open_phases`].
    fn media_job_ended(&mut self) -> bool {
        false
    }
    /// Returns the time of the last activity in a rank's open-ended phase, in nanoseconds.
    fn last_activity_ns(&mut self, now_ns: u64, _rank: u32) -> u64 {
        now_ns
    }
    /// Returns the embedding of the `n`th prompt.
    fn prompt_embedding(&mut self, n: u32) -> Option<Tensor> {
        prompt_tensor(n)
    }
    /// Returns the context that follows from a chunk's output.
    fn make_context(&mut self, previous: &Tensor) -> Option<Tensor> {
        context_tensor(previous)
    }
    /// Returns the number of pixel frames of a delivered chunk.
    fn frames_per_chunk(&mut self) -> u32 {
        12
    }
    /// Observes an action of the leader before it takes effect.
    fn observe_action(&mut self, _now_ns: u64, _action: &Action) {}
    /// Observes an event of the simulation at the simulated time `now_ns`.
    fn observe_event(&mut self, now_ns: u64, what: SimEvent<'_>);
}
