//! The leader's failure handling: it ends a run once and records every open call.

use tessera_base::{Code, Diagnostics};

use super::{Action, Leader, LeaderStage};
use crate::codes::{T0707, T0742};
use crate::tripwire::CheckSite;
use crate::wire::{Abort, Message};
use crate::{Failure, FailureClass};

impl Leader {
    pub(super) fn handle_rank_gone(&mut self, rank: u32, how: &str, out: &mut Vec<Action>) {
        // A rank that has reported its failure or answered the shutdown may close its socket.
        if !self.is_armed(&T0742)
            || self.peers.get(&rank).is_none_or(|p| p.reported_failure || p.answered_shutdown)
        {
            return;
        }
        let stage_text = match self.open_calls.front() {
            Some(o) if o.committed_ns.is_some() => {
                format!("while call {} (chunk {}) ran", o.call_id(), o.plan.chunk)
            }
            Some(o) => format!("while call {} (chunk {}) was prepared", o.call_id(), o.plan.chunk),
            None => "between calls".to_string(),
        };
        let text = format!("rank {rank} is gone ({how}) {stage_text}");
        self.fail_run(self.leader_failure(FailureClass::RankDied, Some(rank), &T0742, text), out);
    }

    /// Fails the run because of a message at the wrong time, unless the tripwire is disabled.
    pub(super) fn protocol_violation(&mut self, rank: u32, text: String, out: &mut Vec<Action>) {
        self.trip_if_armed(FailureClass::Protocol, Some(rank), &T0707, text, out);
    }

    /// Fails the run unless the tripwire is disabled. Returns whether it failed the run.
    pub(super) fn trip_if_armed(
        &mut self,
        class: FailureClass,
        rank: Option<u32>,
        code: &'static Code,
        text: String,
        out: &mut Vec<Action>,
    ) -> bool {
        let armed = self.is_armed(code);
        if armed {
            self.fail_run(self.leader_failure(class, rank, code, text), out);
        }
        armed
    }

    /// Fails the run for a refusal that happens before anything is sent to a rank.
    pub(super) fn preflight_failed(&mut self, mut found: Diagnostics, out: &mut Vec<Action>) {
        self.config.tripwires.retain_armed(&mut found);
        if let Some(failure) = Failure::from_diagnostics(FailureClass::Preflight, None, &found) {
            self.fail_run(failure.with_site(CheckSite::Leader), out);
        }
    }

    /// Ends the run with its first failure; later failures are ignored.
    pub(super) fn fail_run(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if self.has_ended() {
            return;
        }
        self.stage = LeaderStage::Ended;
        for open in &self.open_calls {
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

    pub(super) fn is_armed(&self, code: &Code) -> bool {
        self.config.tripwires.is_armed(code)
    }

    pub(super) fn leader_failure(
        &self,
        class: FailureClass,
        rank: Option<u32>,
        code: &Code,
        text: impl Into<String>,
    ) -> Failure {
        Failure::new(class, rank, code, text).with_site(CheckSite::Leader)
    }
}
