//! The interface to a rank's flight record: drivers report lockstep events to a [`FlightSink`].
//!
//! The application crate writes the record, because library crates write no files. Its engine
//! reports collectives and phases itself; messages between leader and ranks are reported here, by
//! the thread that owns the state machines.

use crate::wire::Message;
use crate::{Failure, FailureClass};

/// Receives the events of one rank. Several threads call it. It returns at once and never fails a
/// run.
pub trait FlightSink: Send + Sync {
    /// Stores an event of this rank; the implementation adds the time.
    fn record_event(&self, mark: FlightEvent<'_>);
}

/// A step in the run of one rank: it joins, agrees to calls and finishes them, fails or exits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlightEvent<'a> {
    /// The process has its rank, session and links; its engine is not loaded yet.
    Joined,
    /// Programs and weights are loaded, and the hello was sent to the leader.
    Hello,
    /// The leader planned a call and sent its envelope.
    CallIssued {
        /// Id in the envelope; ids count the calls of all actions, from 1.
        call_id: u64,
        /// Index of the chunk that the call generates; for a call without a chunk, of the next
        /// chunk.
        chunk: u32,
        /// Cache epoch of the call; a call that makes a hard cut has the new epoch.
        epoch: u32,
    },
    /// This rank agreed to a call.
    Ready {
        /// Id of the call that this rank is ready to run.
        call_id: u64,
    },
    /// A call was committed: on the leader when it sends the commit, on a rank when it receives it.
    Commit {
        /// Id of the call, for which every rank has answered ready.
        call_id: u64,
    },
    /// This rank finished a call and reported it.
    Done {
        /// Id of the finished call; the answer to a shutdown counts as one.
        call_id: u64,
    },
    /// A failure on this rank or on another.
    Failed {
        /// The class, which determines the exit status.
        class: FailureClass,
        /// The rank that deviated first according to the failure.
        rank: Option<u32>,
        /// Id of the failure's diagnostic code, such as `T0742`.
        code: &'a str,
        /// Readable description of the failure.
        text: &'a str,
        /// Whether the failure is known to be caused by another failure.
        secondary: bool,
    },
    /// The process is about to exit by itself; a killed process records no exit.
    Exit {
        /// Exit status that the process returns to its parent.
        status: i32,
    },
}

impl<'a> FlightEvent<'a> {
    /// Creates the event of a failure that ends this rank.
    #[must_use]
    pub fn from_failure(f: &'a Failure) -> FlightEvent<'a> {
        FlightEvent::Failed { class: f.class, rank: f.rank, code: &f.code, text: &f.text, secondary: false }
    }

    /// Returns the event that a sent message means for its sender, `own_rank`. Most messages mean
    /// no event.
    #[must_use]
    pub fn from_sent(own_rank: u32, message: &'a Message) -> Option<FlightEvent<'a>> {
        Some(match message {
            Message::HelloAck(_) => FlightEvent::Hello,
            Message::Envelope(e) => FlightEvent::CallIssued {
                call_id: e.header.call_id,
                chunk: e.header.chunk,
                epoch: e.header.cache_epoch,
            },
            Message::Commit(c) => FlightEvent::Commit { call_id: c.call_id },
            Message::Ready(r) => FlightEvent::Ready { call_id: r.call_id },
            Message::Done(d) => FlightEvent::Done { call_id: d.call_id },
            Message::Refused(r) => FlightEvent::from_failure(&r.failure),
            Message::Fault(f) => FlightEvent::Failed {
                class: f.failure.class,
                // A rank may report another one, such as a leader that does not answer.
                rank: f.failure.rank.or(Some(own_rank)).filter(|_| !f.secondary),
                code: &f.failure.code,
                text: &f.failure.text,
                secondary: f.secondary,
            },
            Message::Abort(f) | Message::Failed(f) => FlightEvent::from_failure(f),
            _ => return None,
        })
    }

    /// Returns the event that a received message means for its receiver: a commit, or a failure for
    /// an abort. Other messages mean no event.
    #[must_use]
    pub fn from_received(message: &'a Message) -> Option<FlightEvent<'a>> {
        Some(match message {
            Message::Commit(c) => FlightEvent::Commit { call_id: c.call_id },
            Message::Abort(f) => FlightEvent::Failed {
                class: f.class,
                rank: f.rank,
                code: &f.code,
                text: &f.text,
                secondary: true,
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codes::T0743;
    use crate::wire::FaultReport;

    #[test]
    fn a_report_of_another_rank_blames_that_rank() {
        let blamed = |rank, secondary| {
            let failure = crate::Failure::new(FailureClass::Stall, rank, &T0743, "no message");
            let sent = Message::Fault(FaultReport { failure, secondary });
            match FlightEvent::from_sent(2, &sent) {
                Some(FlightEvent::Failed { rank, .. }) => rank,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(blamed(Some(0), false), Some(0));
        assert_eq!(blamed(None, false), Some(2));
        assert_eq!(blamed(Some(2), true), None, "the cause is elsewhere");
    }
}
