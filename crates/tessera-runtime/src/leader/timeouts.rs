//! The leader's time limits: heartbeats in both directions, stall limits learned per program, and
//! the choice of the rank to blame.

use std::collections::{BTreeMap, VecDeque};

use super::{Action, Leader, LeaderStage, OpenCall, PeerStatus};
use crate::FailureClass;
use crate::codes::T0743;
use crate::director::CallPlan;
use crate::limits::format_ms;
use crate::wire::{CallAction, CallMeta, Heartbeat, Message};
use crate::worker::needs_context;

/// Number of intervals between two progress updates that are kept per program.
const QUIET_TIMES_KEPT: usize = 128;

/// Quiet intervals (those between two progress updates of a rank), by the program that it ran.
#[derive(Debug, Default)]
pub(super) struct QuietHistory {
    quiet: BTreeMap<String, QuietTimes>,
}

/// The latest quiet intervals of one program on any rank, in nanoseconds, oldest first.
#[derive(Debug, Default)]
struct QuietTimes {
    times: VecDeque<u64>,
    p99_ns: u64,
}

impl QuietHistory {
    fn record_quiet_time(&mut self, program: &str, quiet_ns: u64) {
        let ring = match self.quiet.get_mut(program) {
            Some(ring) => ring,
            None => self.quiet.entry(program.to_string()).or_default(),
        };
        if ring.times.len() == QUIET_TIMES_KEPT {
            ring.times.pop_front();
        }
        ring.times.push_back(quiet_ns);
        let mut sorted: Vec<u64> = ring.times.iter().copied().collect();
        sorted.sort_unstable();
        let at = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
        ring.p99_ns = sorted.get(at).copied().unwrap_or(0);
    }

    /// Returns the 99th percentile of the kept times, or 0 if there are none.
    fn p99_ns(&self, program: &str) -> u64 {
        self.quiet.get(program).map_or(0, |ring| ring.p99_ns)
    }
}

impl Leader {
    pub(super) fn handle_tick(&mut self, now: u64) {
        if now >= self.last_heartbeat_ns + self.config.limits.heartbeat_ns {
            self.last_heartbeat_ns = now;
            let beat = Heartbeat { progress: self.progress };
            self.actions.push(Action::Report(Message::Heartbeat(beat.clone())));
            self.actions.push(Action::Broadcast(Message::Heartbeat(beat)));
        }
        if let Some((failure, until)) = &self.secondary_failure
            && now >= *until
        {
            let failure = failure.clone();
            return self.fail_run(failure);
        }
        if self.is_armed(&T0743)
            && let Some((rank, text)) = self.find_stalled(now)
        {
            self.fail_run(self.leader_failure(FailureClass::Stall, Some(rank), &T0743, text));
        }
    }

    pub(super) fn handle_heartbeat(&mut self, rank: u32, progress: u64) {
        let now = self.clock.now_ns();
        let Some(peer) = self.peers.get_mut(&rank).filter(|p| p.progress != progress) else { return };
        let running = self.open_calls.front().and_then(|o| o.committed_ns.map(|since| (o, since)));
        if let Some((open, since)) = running
            && let Some(program) = program_at(open.plan.meta.as_ref(), peer.progress)
        {
            self.quiet_history
                .record_quiet_time(program, now.saturating_sub(peer.last_progress_ns.max(since)));
        }
        (peer.progress, peer.last_progress_ns) = (progress, now);
        self.progress += 1;
    }

    /// Returns the time between two progress updates that an envelope allows. It is twice the
    /// leader's own limit: the leader sees the progress of all ranks and names the right one, while
    /// a worker can only end itself.
    pub(super) fn deadline_ms(&self, plan: &CallPlan) -> u32 {
        let programs = plan.meta.iter().flat_map(|m| m.phases.iter().map(|p| p.program.as_str()));
        let max_learned = programs.map(|p| self.learned_limit_ns(p)).max().unwrap_or(0);
        let limit = max_learned.max(self.base_limit_ns(plan.action)).saturating_mul(2);
        u32::try_from(limit / 1_000_000).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the maximum time without progress for a rank at this progress in a call.
    fn quiet_limit_ns(&self, open: &OpenCall, progress: u64) -> u64 {
        let program = program_at(open.plan.meta.as_ref(), progress);
        self.base_limit_ns(open.plan.action).max(program.map_or(0, |p| self.learned_limit_ns(p)))
    }

    /// Returns the maximum quiet interval by the configured limits alone. Measured intervals can
    /// only raise it.
    fn base_limit_ns(&self, action: CallAction) -> u64 {
        let limits = &self.config.limits;
        match action {
            // A first run compiles and captures programs and touches memory.
            CallAction::Warmup => limits.done_floor_ns.saturating_mul(u64::from(limits.done_factor)),
            CallAction::Reload => limits.hello_ns,
            _ => limits.done_floor_ns,
        }
    }

    fn learned_limit_ns(&self, program: &str) -> u64 {
        self.quiet_history.p99_ns(program).saturating_mul(u64::from(self.config.limits.done_factor))
    }

    /// Returns the time that a rank may take to answer the shutdown. A rank that has sent nothing
    /// yet may still be loading.
    fn shutdown_limit_ns(&self) -> u64 {
        let loading = self.peers.values().any(|p| !p.answered_shutdown && p.last_message_ns.is_none());
        if loading { self.config.limits.hello_ns } else { self.config.limits.ready_ns }
    }

    /// Returns the rank to blame for a missed deadline, and a text.
    fn find_stalled(&self, now: u64) -> Option<(u32, String)> {
        if let Some(found) = self.find_silent(now) {
            return Some(found);
        }
        let limits = &self.config.limits;
        let late = |since: u64, limit: u64| now.saturating_sub(since) > limit;
        let missing = |has: &dyn Fn(u32, &PeerStatus) -> bool| -> Vec<u32> {
            self.peers.iter().filter(|(r, p)| !has(**r, p)).map(|(r, _)| *r).collect()
        };
        let blame = |ranks: Vec<u32>, what: String| {
            let rank = self.select_culprit(&ranks, now)?;
            Some((rank, format!("no {what} from ranks {ranks:?} within the limit")))
        };
        match self.stage {
            LeaderStage::Hello { since_ns } if late(since_ns, limits.hello_ns) => {
                return blame(missing(&|r, _| self.hellos.contains_key(&r)), "hello".into());
            }
            LeaderStage::Stopping { since_ns, .. } if late(since_ns, self.shutdown_limit_ns()) => {
                return blame(missing(&|_, p| p.answered_shutdown), "answer to the shutdown".into());
            }
            _ => {}
        }
        for open in &self.open_calls {
            let waits = needs_context(&open.envelope) && !open.context_sent;
            if open.committed_ns.is_none() && !waits && late(open.sent_ns, limits.ready_ns) {
                let behind = missing(&|r, _| open.ready.contains(&r));
                if !behind.is_empty() {
                    return blame(behind, format!("ready for call {}", open.call_id()));
                }
            }
        }
        let running = self.open_calls.front().filter(|o| o.committed_ns.is_some())?;
        let busy = || self.peers.iter().filter(|(r, _)| !running.done.contains_key(r));
        // Ranks that wait inside a collective for a slower rank are quiet while that rank works,
        // and need their own time afterwards. The limit is therefore compared with the last
        // progress of any rank, and the rank with the least progress is named.
        let progress = self.peers.values().map(|p| p.last_progress_ns).max()?;
        let floor = self.base_limit_ns(running.plan.action);
        if !late(progress, floor)
            || !busy().all(|(_, p)| late(progress, self.quiet_limit_ns(running, p.progress)))
        {
            return None;
        }
        let (rank, _) = busy().min_by_key(|(r, p)| (p.progress, **r))?;
        let rank = self.select_culprit(&[*rank], now)?;
        let p = self.peers.get(&rank)?;
        let positions: Vec<String> =
            busy().map(|(r, p)| format!("rank {r} in {}", format_progress(p.progress))).collect();
        Some((
            rank,
            format!(
                "call {}, chunk {}: rank {rank} made no progress for {}, limit {}; {}",
                running.call_id(),
                running.plan.chunk,
                format_ms(now - p.last_progress_ns),
                format_ms(self.quiet_limit_ns(running, p.progress)),
                positions.join(", ")
            ),
        ))
    }

    /// Selects the rank to blame among late ranks. Ranks that missed heartbeats come before ranks
    /// that others only wait for. A stopped relay also silences the ranks behind it, so the lowest
    /// rank that missed heartbeats is named.
    fn select_culprit(&self, late: &[u32], now: u64) -> Option<u32> {
        let missed = 2 * self.config.limits.heartbeat_ns;
        let mut quiet = self.peers.iter().filter(|(_, p)| {
            !p.answered_shutdown && p.last_message_ns.is_some_and(|at| now.saturating_sub(at) > missed)
        });
        match quiet.clone().any(|(r, _)| late.contains(r)) {
            true => quiet.next().map(|(r, _)| *r),
            false => late.first().copied(),
        }
    }

    /// Returns a rank that sent nothing for too long, and a text. A stopped relay silences the
    /// ranks behind it at slightly different times; it has the lowest rank of them.
    fn find_silent(&self, now: u64) -> Option<(u32, String)> {
        let limits = &self.config.limits;
        let quiet = |p: &PeerStatus| p.last_message_ns.map_or(0, |at| now.saturating_sub(at));
        let active = || self.peers.iter().filter(|(_, p)| !p.answered_shutdown);
        if !active().any(|(_, p)| quiet(p) > limits.stale_ns) {
            return None;
        }
        let almost_stale_ns = limits.stale_ns.saturating_sub(2 * limits.heartbeat_ns);
        let (rank, p) = active().find(|(_, p)| quiet(p) > almost_stale_ns)?;
        Some((*rank, format!("no heartbeat from rank {rank} for {}", format_ms(quiet(p)))))
    }
}

/// Returns the program that a rank runs at this progress, or the call's first program before any
/// progress.
fn program_at(meta: Option<&CallMeta>, progress: u64) -> Option<&str> {
    let phase = usize::try_from((progress >> 32).saturating_sub(1)).ok()?;
    meta?.phases.get(phase).map(|p| p.program.as_str())
}

/// Formats a heartbeat's progress counter as `phase 2 at progress 17` or `no phase`.
fn format_progress(progress: u64) -> String {
    match progress >> 32 {
        0 => "no phase".to_string(),
        phase => format!("phase {} at progress {}", phase - 1, progress & u64::from(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_learns_its_own_limit_in_bounded_memory() {
        let mut learned = QuietHistory::default();
        for i in 0..10_000u64 {
            learned.record_quiet_time("denoise.fill0", if i % 200 == 0 { 9_000 } else { 10 + i % 3 });
            learned.record_quiet_time("emit", 1);
        }
        assert_eq!(learned.quiet["denoise.fill0"].times.len(), QUIET_TIMES_KEPT);
        assert_eq!(
            (learned.p99_ns("denoise.fill0"), learned.p99_ns("emit"), learned.p99_ns("text")),
            (12, 1, 0)
        );
        learned.record_quiet_time("emit", 50);
        learned.record_quiet_time("emit", 60);
        assert_eq!(learned.p99_ns("emit"), 50, "the second largest of 128");
    }
}
