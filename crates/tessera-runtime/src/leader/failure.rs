//! How the leader ends a run: once, with everything that was open written down.

use tessera_base::{Code, Diagnostics};

use super::{Action, Leader, Stage};
use crate::tripwire::Place;
use crate::wire::{Abort, Message};
use crate::worker::{T0707, T0742};
use crate::{Failure, FailureClass};

impl Leader {
    pub(super) fn gone(&mut self, rank: u32, how: &str, out: &mut Vec<Action>) {
        // A rank that said why it leaves, or answered the shutdown, may close its socket.
        if !self.armed(&T0742) || self.peers.get(&rank).is_none_or(|p| p.faulted || p.stopped) {
            return;
        }
        let place = match self.open.front() {
            Some(o) if o.committed_ns.is_some() => {
                format!("while call {} (chunk {}) ran", o.call_id(), o.plan.chunk)
            }
            Some(o) => format!("while call {} (chunk {}) was prepared", o.call_id(), o.plan.chunk),
            None => "between calls".to_string(),
        };
        let text = format!("rank {rank} is gone ({how}) {place}");
        self.fail(self.here(FailureClass::RankDied, Some(rank), &T0742, text), out);
    }

    /// A message that may not come now: the end, unless nobody checks.
    pub(super) fn protocol(&mut self, rank: u32, text: String, out: &mut Vec<Action>) {
        self.trip(FailureClass::Protocol, Some(rank), &T0707, text, out);
    }

    /// Ends the run unless the tripwire is off; whether it did.
    pub(super) fn trip(
        &mut self,
        class: FailureClass,
        rank: Option<u32>,
        code: &'static Code,
        text: String,
        out: &mut Vec<Action>,
    ) -> bool {
        let armed = self.armed(code);
        if armed {
            self.fail(self.here(class, rank, code, text), out);
        }
        armed
    }

    /// What the leader refuses before any rank hears of it.
    pub(super) fn preflight_failed(&mut self, mut found: Diagnostics, out: &mut Vec<Action>) {
        self.config.tripwires.filter(&mut found);
        if let Some(failure) = Failure::from_diagnostics(FailureClass::Preflight, None, &found) {
            self.fail(failure.at(Place::Leader), out);
        }
    }

    /// The first failure ends the run; what comes after it is not looked at.
    pub(super) fn fail(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if self.ended() {
            return;
        }
        self.stage = Stage::Ended;
        for open in &self.open {
            out.push(Action::Lost {
                call_id: open.call_id(),
                chunk: open.plan.chunk,
                epoch: open.plan.cache_epoch,
                ready: open.ready.iter().copied().collect(),
                done: open.done.keys().copied().collect(),
            });
        }
        out.push(Action::Broadcast(Message::Abort(Abort { failure: failure.clone() })));
        out.push(Action::Report(Message::Failed(failure.clone())));
        out.push(Action::Exit(Some(failure)));
    }

    pub(super) fn armed(&self, code: &Code) -> bool {
        self.config.tripwires.armed(code)
    }

    pub(super) fn here(
        &self,
        class: FailureClass,
        rank: Option<u32>,
        code: &Code,
        text: impl Into<String>,
    ) -> Failure {
        Failure::new(class, rank, code, text).at(Place::Leader)
    }
}
