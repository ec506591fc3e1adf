//! The seam to a rank's flight record: what drivers tell it, in the words of the lockstep.
//!
//! The door keeps the record, because rooms write no files. Collectives and phases are told by the door's own engine;
//! what passes between leader and ranks is told from here, by the thread that owns the machines.

use crate::wire::Message;
use crate::{Failure, FailureClass};

/// Keeps the marks of one rank. Called from several threads; returns at once and never fails a run.
pub trait Sink: Send + Sync {
    /// Something happened on this rank.
    fn mark(&self, mark: Mark<'_>);
}

/// One step in the life of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark<'a> {
    /// The process joined its run.
    Joined,
    /// Programs and weights are loaded, and the leader was told.
    Hello,
    /// The leader decided a call and sent its envelope.
    Called {
        /// The call.
        call_id: u64,
        /// Chunk that it is for.
        chunk: u32,
        /// Epoch of the caches.
        epoch: u32,
    },
    /// This rank agreed to a call.
    Ready {
        /// The call.
        call_id: u64,
    },
    /// A call was committed: by the leader when it sends, by a rank when it hears of it.
    Commit {
        /// The call.
        call_id: u64,
    },
    /// This rank finished a call and said so.
    Done {
        /// The call.
        call_id: u64,
    },
    /// Something failed, here or elsewhere.
    Failed {
        /// The class, which says how the process ends.
        class: FailureClass,
        /// The rank that is said to have departed first.
        rank: Option<u32>,
        /// Id of a code.
        code: &'a str,
        /// What is said of it.
        text: &'a str,
        /// Whether it is known to be the echo of another failure.
        echo: bool,
    },
    /// The process is about to end by itself.
    Exit {
        /// Its exit status.
        status: i32,
    },
}

impl<'a> Mark<'a> {
    /// The mark of a failure that ends this rank.
    #[must_use]
    pub fn failed(f: &'a Failure) -> Mark<'a> {
        Mark::Failed { class: f.class, rank: f.rank, code: &f.code, text: &f.text, echo: false }
    }

    /// What a message means to the rank that sends it; `me` is that rank. Most mean nothing.
    #[must_use]
    pub fn sent(me: u32, message: &'a Message) -> Option<Mark<'a>> {
        Some(match message {
            Message::HelloAck(_) => Mark::Hello,
            Message::Envelope(e) => {
                Mark::Called { call_id: e.header.call_id, chunk: e.header.chunk, epoch: e.header.cache_epoch }
            }
            Message::Commit(c) => Mark::Commit { call_id: c.call_id },
            Message::Ready(r) => Mark::Ready { call_id: r.call_id },
            Message::Done(d) => Mark::Done { call_id: d.call_id },
            Message::Refused(r) => Mark::failed(&r.failure),
            Message::Fault(f) => Mark::Failed {
                class: f.failure.class,
                rank: Some(me).filter(|_| !f.secondary),
                code: &f.failure.code,
                text: &f.failure.text,
                echo: f.secondary,
            },
            Message::Abort(a) => Mark::failed(&a.failure),
            Message::Failed(f) => Mark::failed(f),
            _ => return None,
        })
    }

    /// What a message means to the rank that receives it.
    #[must_use]
    pub fn received(message: &'a Message) -> Option<Mark<'a>> {
        Some(match message {
            Message::Commit(c) => Mark::Commit { call_id: c.call_id },
            Message::Abort(a) => Mark::Failed {
                class: a.failure.class,
                rank: a.failure.rank,
                code: &a.failure.code,
                text: &a.failure.text,
                echo: true,
            },
            _ => return None,
        })
    }
}
