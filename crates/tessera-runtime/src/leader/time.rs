//! The leader's waits: heartbeats both ways, limits learned per program, and who is furthest behind.

use std::collections::{BTreeMap, VecDeque};

use super::{Action, Leader, Open, Peer, Stage, T0743};
use crate::FailureClass;
use crate::decide::CallPlan;
use crate::limits::ms;
use crate::wire::{CallAction, CallMeta, Heartbeat, Message};
use crate::worker::wants_context;

/// Quiet times that are remembered of a program.
const REMEMBERED: usize = 128;

/// Times without progress, by the program in which they were seen.
#[derive(Debug, Default)]
pub(super) struct Learned {
    quiet: BTreeMap<String, Ring>,
}

/// The latest quiet times of one program.
#[derive(Debug, Default)]
struct Ring {
    times: VecDeque<u64>,
    p99: u64,
}

impl Learned {
    fn add(&mut self, program: &str, quiet_ns: u64) {
        let ring = match self.quiet.get_mut(program) {
            Some(ring) => ring,
            None => self.quiet.entry(program.to_string()).or_default(),
        };
        if ring.times.len() == REMEMBERED {
            ring.times.pop_front();
        }
        ring.times.push_back(quiet_ns);
        let mut sorted: Vec<u64> = ring.times.iter().copied().collect();
        sorted.sort_unstable();
        let at = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
        ring.p99 = sorted.get(at).copied().unwrap_or(0);
    }

    /// The 99th percentile of what is remembered, 0 of nothing.
    fn p99(&self, program: &str) -> u64 {
        self.quiet.get(program).map_or(0, |ring| ring.p99)
    }
}

impl Leader {
    pub(super) fn tick(&mut self, now: u64, out: &mut Vec<Action>) {
        if now >= self.last_beat_ns + self.config.limits.heartbeat_ns {
            self.last_beat_ns = now;
            let beat = Heartbeat { mark: self.progress };
            out.push(Action::Report(Message::Heartbeat(beat.clone())));
            out.push(Action::Broadcast(Message::Heartbeat(beat)));
        }
        if let Some((failure, until)) = &self.echo
            && now >= *until
        {
            let failure = failure.clone();
            return self.fail(failure, out);
        }
        if self.armed(&T0743)
            && let Some((rank, text)) = self.stalled(now)
        {
            self.fail(self.here(FailureClass::Stall, Some(rank), &T0743, text), out);
        }
    }

    pub(super) fn heartbeat(&mut self, rank: u32, mark: u64) {
        let now = self.clock.now();
        let Some(peer) = self.peers.get_mut(&rank).filter(|p| p.mark != mark) else { return };
        let running = self.open.front().and_then(|o| o.committed_ns.map(|since| (o, since)));
        if let Some((open, since)) = running
            && let Some(program) = program_at(open.plan.meta.as_ref(), peer.mark)
        {
            self.learned.add(program, now.saturating_sub(peer.marked_ns.max(since)));
        }
        (peer.mark, peer.marked_ns) = (mark, now);
        self.progress += 1;
    }

    /// The time that an envelope allows between two marks. Twice the leader's own limit: the leader sees all marks
    /// and names the right rank, a worker alone can only end itself.
    pub(super) fn deadline_ms(&self, plan: &CallPlan) -> u32 {
        let programs = plan.meta.iter().flat_map(|m| m.phases.iter().map(|p| p.program.as_str()));
        let most = programs.map(|p| self.learned_limit(p)).max().unwrap_or(0);
        let limit = most.max(self.first_limit(plan.action)).saturating_mul(2);
        u32::try_from(limit / 1_000_000).unwrap_or(u32::MAX).max(1)
    }

    /// Longest time without progress of a rank at this mark of a call.
    fn quiet_limit_ns(&self, open: &Open, mark: u64) -> u64 {
        let program = program_at(open.plan.meta.as_ref(), mark);
        self.first_limit(open.plan.action).max(program.map_or(0, |p| self.learned_limit(p)))
    }

    /// The limit before anything was learned.
    fn first_limit(&self, action: CallAction) -> u64 {
        let limits = &self.config.limits;
        match action {
            // First runs compile, capture and touch memory.
            CallAction::Warmup => limits.done_floor_ns.saturating_mul(u64::from(limits.done_factor)),
            CallAction::Reload => limits.hello_ns,
            _ => limits.done_floor_ns,
        }
    }

    fn learned_limit(&self, program: &str) -> u64 {
        self.learned.p99(program).saturating_mul(u64::from(self.config.limits.done_factor))
    }

    /// How long a rank may take to answer the shutdown; one that has said nothing yet may be loading.
    fn stop_limit_ns(&self) -> u64 {
        let loading = self.peers.values().any(|p| !p.stopped && p.heard_ns.is_none());
        if loading { self.config.limits.hello_ns } else { self.config.limits.ready_ns }
    }

    /// The rank that is furthest behind a deadline, with words.
    fn stalled(&self, now: u64) -> Option<(u32, String)> {
        if let Some(found) = self.silent(now) {
            return Some(found);
        }
        let limits = &self.config.limits;
        let late = |since: u64, limit: u64| now.saturating_sub(since) > limit;
        let missing = |has: &dyn Fn(u32, &Peer) -> bool| -> Vec<u32> {
            self.peers.iter().filter(|(r, p)| !has(**r, p)).map(|(r, _)| *r).collect()
        };
        let blame = |ranks: Vec<u32>, what: String| {
            let rank = self.culprit(&ranks, now)?;
            Some((rank, format!("no {what} of ranks {ranks:?} within the limit")))
        };
        match self.stage {
            Stage::Hello { since_ns } if late(since_ns, limits.hello_ns) => {
                return blame(missing(&|r, _| self.hellos.contains_key(&r)), "hello".into());
            }
            Stage::Stopping { since_ns, .. } if late(since_ns, self.stop_limit_ns()) => {
                return blame(missing(&|_, p| p.stopped), "answer to the shutdown".into());
            }
            _ => {}
        }
        for open in &self.open {
            let waits = wants_context(&open.envelope) && !open.context_sent;
            if open.committed_ns.is_none() && !waits && late(open.sent_ns, limits.ready_ns) {
                let behind = missing(&|r, _| open.ready.contains(&r));
                if !behind.is_empty() {
                    return blame(behind, format!("ready for call {}", open.call_id()));
                }
            }
        }
        let running = self.open.front().filter(|o| o.committed_ns.is_some())?;
        let busy = || self.peers.iter().filter(|(r, _)| !running.done.contains_key(r));
        // Ranks that wait inside a collective for a slower one are quiet as long as it works, and have their own time
        // when it is done: what counts is the last progress of anybody. The one that came least far is named.
        let progress = self.peers.values().map(|p| p.marked_ns).max()?;
        let floor = self.first_limit(running.plan.action);
        if !late(progress, floor)
            || !busy().all(|(_, p)| late(progress, self.quiet_limit_ns(running, p.mark)))
        {
            return None;
        }
        let (rank, _) = busy().min_by_key(|(r, p)| (p.mark, **r))?;
        let rank = self.culprit(&[*rank], now)?;
        let p = self.peers.get(&rank)?;
        let marks: Vec<String> = busy().map(|(r, p)| format!("rank {r} in {}", place(p.mark))).collect();
        Some((
            rank,
            format!(
                "call {}, chunk {}: no progress of rank {rank} for {}, limit {}; {}",
                running.call_id(),
                running.plan.chunk,
                ms(now - p.marked_ns),
                ms(self.quiet_limit_ns(running, p.mark)),
                marks.join(", ")
            ),
        ))
    }

    /// Which of these late ranks is to blame: one that missed heartbeats before one that others keep waiting. It may
    /// also be kept from being heard by a rank that passes it on and has stopped, which is the lowest that missed them.
    fn culprit(&self, late: &[u32], now: u64) -> Option<u32> {
        let missed = 2 * self.config.limits.heartbeat_ns;
        let mut quiet = self
            .peers
            .iter()
            .filter(|(_, p)| !p.stopped && p.heard_ns.is_some_and(|at| now.saturating_sub(at) > missed));
        match quiet.clone().any(|(r, _)| late.contains(r)) {
            true => quiet.next().map(|(r, _)| *r),
            false => late.first().copied(),
        }
    }

    /// A rank of which nothing was heard. One that passes others on takes them with it, each a little later or
    /// earlier, and is the lowest of them.
    fn silent(&self, now: u64) -> Option<(u32, String)> {
        let limits = &self.config.limits;
        let quiet = |p: &Peer| p.heard_ns.map_or(0, |at| now.saturating_sub(at));
        let there = || self.peers.iter().filter(|(_, p)| !p.stopped);
        if !there().any(|(_, p)| quiet(p) > limits.stale_ns) {
            return None;
        }
        let nearly = limits.stale_ns.saturating_sub(2 * limits.heartbeat_ns);
        let (rank, p) = there().find(|(_, p)| quiet(p) > nearly)?;
        Some((*rank, format!("no sign of life of rank {rank} for {}", ms(quiet(p)))))
    }
}

/// The program that a rank is in at a mark; the first of the call before its first mark.
fn program_at(meta: Option<&CallMeta>, mark: u64) -> Option<&str> {
    let phase = usize::try_from((mark >> 32).saturating_sub(1)).ok()?;
    meta?.phases.get(phase).map(|p| p.program.as_str())
}

/// A mark in words.
fn place(mark: u64) -> String {
    match mark >> 32 {
        0 => "no phase".to_string(),
        phase => format!("phase {} at mark {}", phase - 1, mark & u64::from(u32::MAX)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_learns_its_own_limit_in_bounded_memory() {
        let mut learned = Learned::default();
        for i in 0..10_000u64 {
            learned.add("denoise.fill0", if i % 200 == 0 { 9_000 } else { 10 + i % 3 });
            learned.add("emit", 1);
        }
        assert_eq!(learned.quiet["denoise.fill0"].times.len(), REMEMBERED);
        assert_eq!((learned.p99("denoise.fill0"), learned.p99("emit"), learned.p99("text")), (12, 1, 0));
        learned.add("emit", 50);
        learned.add("emit", 60);
        assert_eq!(learned.p99("emit"), 50, "the second of 128");
    }
}
