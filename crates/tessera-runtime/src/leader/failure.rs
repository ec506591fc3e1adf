//! The leader's failure handling: it ends a run once and records every open call.

use tessera_base::{Code, Diagnostic, Diagnostics};

use super::{Action, Leader, LeaderStage, RecordEntry};
use crate::codes::{T0707, T0742, T0771};
use crate::tripwire::CheckSite;
use crate::wire::Message;
use crate::{Failure, FailureClass};

impl Leader {
    pub(super) fn handle_rank_gone(&mut self, rank: u32, how: &str) {
        // A rank that has reported its failure or answered the shutdown may close its socket.
        if self.peers.get(&rank).is_none_or(|p| p.reported_failure || p.answered_shutdown) {
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
        self.trip_if_armed(FailureClass::RankDied, Some(rank), &T0742, text);
    }

    /// Fails the run because of a message at the wrong time, unless the tripwire is disabled.
    pub(super) fn protocol_violation(&mut self, rank: u32, text: impl Into<String>) {
        self.trip_if_armed(FailureClass::Protocol, Some(rank), &T0707, text);
    }

    /// Fails the run unless the tripwire is disabled. Returns whether it failed the run.
    pub(super) fn trip_if_armed(
        &mut self,
        class: FailureClass,
        rank: Option<u32>,
        code: &Code,
        text: impl Into<String>,
    ) -> bool {
        let armed = self.is_armed(code);
        if armed {
            self.fail_run(self.leader_failure(class, rank, code, text));
        }
        armed
    }

    /// Fails the run for a refusal that happens before anything is sent to a rank.
    pub(super) fn preflight_failed(&mut self, found: Diagnostics) {
        if let Err(found) = self.config.tripwires.check_findings(found)
            && let Some(failure) = Failure::from_diagnostics(FailureClass::Preflight, None, &found)
        {
            self.fail_run(failure.with_site(CheckSite::Leader));
        }
    }

    /// Ends the run because of what a request brought. No tripwire disables this: nothing could run instead.
    pub(super) fn fail_request(&mut self, d: &Diagnostic) {
        let failure = Failure::from_diagnostic(FailureClass::Preflight, Some(0), d);
        self.fail_run(failure.with_site(CheckSite::Leader));
    }

    /// Keeps a secondary failure until its cause arrives. Values that are not finite, reported by two
    /// ranks, blame neither: a collective gave them to both.
    pub(super) fn add_secondary(&mut self, failure: Failure, now: u64) {
        match &mut self.secondary_failure {
            None => self.secondary_failure = Some((failure, now + self.config.limits.blame_ns)),
            Some((first, _))
                if first.code == T0771.id && failure.code == first.code && failure.rank != first.rank =>
            {
                first.rank = None;
            }
            Some(_) => {}
        }
    }

    /// Ends the run with its first failure; later failures are ignored.
    pub(super) fn fail_run(&mut self, failure: Failure) {
        if self.has_ended() {
            return;
        }
        self.stage = LeaderStage::Ended;
        for open in &self.open_calls {
            self.actions.push(Action::Record(RecordEntry::Lost {
                call_id: open.call_id(),
                chunk: open.plan.chunk,
                epoch: open.plan.cache_epoch,
                ready: open.ready.iter().copied().collect(),
                done: open.done.keys().copied().collect(),
            }));
        }
        self.actions.push(Action::Broadcast(Message::Abort(failure.clone())));
        self.actions.push(Action::Report(Message::Failed(failure.clone())));
        self.actions.push(Action::Exit(Some(failure)));
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
