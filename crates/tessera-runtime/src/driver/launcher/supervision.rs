//! Supervises the ranks of a launch until all have exited, and reports how the run ended.

use std::time::{Duration, Instant};

use tessera_base::Diagnostic;

use super::{LaunchEvent, LaunchReport, LaunchSpec, RankExit, RankProcesses, StopHandle};
use crate::codes::{T0742, T0743};
use crate::driver::TICK_INTERVAL;
use crate::driver::link::{DisconnectReason, Frame};
use crate::driver::reactor::{LinkId, ReactorEvent};
use crate::limits::{AwakeClock, format_ms};
use crate::tripwire::CheckSite;
use crate::wire::{Heartbeat, LAUNCHER, Message};
use crate::{Failure, FailureClass, Limits, Tripwires};

/// Forwards the leader's progress until every rank has exited. Ranks that stay too long are killed.
pub(super) fn supervise_ranks(
    spec: &LaunchSpec,
    stop: &StopHandle,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
    ranks: RankProcesses,
) -> LaunchReport {
    let mut supervision = Supervision::new(spec, stop, ranks);
    let start = Instant::now();
    let mut reaped = start;
    let mut clock = AwakeClock::default();
    let mut events = Vec::new();
    loop {
        supervision.ranks.reactor.wait_events(TICK_INTERVAL, &mut events);
        // Progress messages alone do not require a check of every child.
        let mut check_children = reaped.elapsed() >= TICK_INTERVAL;
        let now_ns = clock.advance_to(start.elapsed().as_nanos() as u64, spec.limits.heartbeat_ns);
        for event in events.drain(..) {
            check_children |= supervision.handle_event(event, now_ns, on_event);
        }
        if check_children {
            supervision.reap_exited();
            supervision.check_stopped_ranks(now_ns);
            reaped = Instant::now();
        }
        supervision.apply_stop_requests();
        supervision.send_heartbeat();
        supervision.check_leader_silence(now_ns);
        if supervision.end_if_exited() {
            return supervision.into_report();
        }
    }
}

/// The supervised ranks, and how far their run has come.
struct Supervision<'a> {
    limits: &'a Limits,
    tripwires: &'a Tripwires,
    stop: &'a StopHandle,
    ranks: RankProcesses,
    leader: LinkId,
    /// The first failure that the leader reported or that the launcher found.
    failure: Option<Failure>,
    /// Whether the leader reported that the run finished.
    finished: bool,
    leader_closed: bool,
    stop_sent: bool,
    killed: bool,
    all_gone: bool,
    first_abnormal: Option<RankExit>,
    last_message_ns: Option<u64>,
    ending_since: Option<Instant>,
    last_heartbeat: Instant,
}

impl Supervision<'_> {
    fn new<'a>(spec: &'a LaunchSpec, stop: &'a StopHandle, ranks: RankProcesses) -> Supervision<'a> {
        Supervision {
            limits: &spec.limits,
            tripwires: &spec.tripwires,
            stop,
            leader: ranks.list[0].link,
            ranks,
            failure: None,
            finished: false,
            leader_closed: false,
            stop_sent: false,
            killed: false,
            all_gone: false,
            first_abnormal: None,
            last_message_ns: None,
            ending_since: None,
            last_heartbeat: Instant::now(),
        }
    }

    /// Handles an event of the reactor. Returns whether a child may have ended.
    fn handle_event(
        &mut self,
        event: ReactorEvent,
        now_ns: u64,
        on_event: &mut dyn FnMut(LaunchEvent<'_>),
    ) -> bool {
        match event {
            ReactorEvent::Frame { link, frame } => {
                if link == self.leader {
                    self.handle_report(frame.decode_message(), now_ns, on_event);
                }
                false
            }
            ReactorEvent::Disconnected { link, reason } => {
                if link == self.leader {
                    self.leader_closed = true;
                    if let DisconnectReason::Broken(d) = reason {
                        self.handle_report(Err(d), now_ns, on_event);
                    }
                }
                true
            }
            ReactorEvent::FdReady(_) => true,
        }
    }

    /// Handles a message of the leader, or bytes of its link that are no message.
    fn handle_report(
        &mut self,
        message: Result<Message, Diagnostic>,
        now_ns: u64,
        on_event: &mut dyn FnMut(LaunchEvent<'_>),
    ) {
        self.last_message_ns = Some(now_ns);
        match message {
            Ok(Message::Progress(p)) => on_event(LaunchEvent::Progress(&p)),
            Ok(Message::Finished) => self.finished = true,
            Ok(Message::Failed(f)) => {
                // A stalled rank does not exit by itself.
                if let (FailureClass::Stall, Some(rank)) = (f.class, f.rank)
                    && rank > 0
                {
                    self.ranks.kill_rank(rank);
                }
                self.failure.get_or_insert(f);
            }
            Ok(_) => {}
            Err(d) => {
                self.leader_closed = true;
                self.failure.get_or_insert(Failure::from_diagnostic(FailureClass::Protocol, Some(0), &d));
            }
        }
    }

    fn reap_exited(&mut self) {
        self.all_gone = self.ranks.reap_exited();
        if self.first_abnormal.is_none_or(|exit| exit.signal.is_none()) {
            self.first_abnormal = self.ranks.first_abnormal_exit();
        }
    }

    /// Forwards the first request to stop to the leader, and kills the ranks on the second.
    fn apply_stop_requests(&mut self) {
        let requests = self.stop.request_count();
        if requests > 0 && !self.stop_sent {
            self.stop_sent = true;
            if let Ok(frame) = Frame::new(LAUNCHER, &Message::Stop) {
                self.ranks.reactor.send(self.leader, &frame);
            }
        }
        if requests > 1 && !self.killed {
            self.killed = true;
            self.ranks.kill_remaining();
        }
    }

    /// Sends the leader a heartbeat when one is due, so that its report of a failure can tell that
    /// the launcher was stopped.
    fn send_heartbeat(&mut self) {
        if self.last_heartbeat.elapsed().as_nanos() < u128::from(self.limits.heartbeat_ns) {
            return;
        }
        self.last_heartbeat = Instant::now();
        // A leader that does not read must not fill its queue.
        if let Ok(frame) = Frame::new(LAUNCHER, &Message::Heartbeat(Heartbeat { progress: 0 }))
            && self.ranks.reactor.is_idle(self.leader)
        {
            self.ranks.reactor.send(self.leader, &frame);
        }
    }

    /// Kills the ranks if one of them is stopped and no rank reports that. A rank that was stopped
    /// before its first heartbeat looks to the others like one that is still loading.
    fn check_stopped_ranks(&mut self, now_ns: u64) {
        // The leader, which sees the progress of all ranks, reports first.
        let limit_ns = self.limits.stale_ns + 2 * self.limits.heartbeat_ns;
        let stopped = self.ranks.find_stopped(now_ns, limit_ns);
        if self.failure.is_some() || self.finished || !self.tripwires.is_armed(&T0743) {
            return;
        }
        let Some(rank) = stopped else { return };
        let text = format!("the process of rank {rank} has been stopped for {}", format_ms(limit_ns));
        self.failure = Some(Failure::new(FailureClass::Stall, Some(rank), &T0743, text));
        self.ranks.kill_remaining();
    }

    /// Kills the ranks if the leader is silent for too long and has not reported an end.
    fn check_leader_silence(&mut self, now_ns: u64) {
        if self.failure.is_some() || self.finished || self.leader_closed {
            return;
        }
        let Some(limit_ns) = self.limits.exceeded_silence_ns(self.last_message_ns, now_ns) else { return };
        let text = format!("no sign of life of the leader for {}", format_ms(limit_ns));
        self.failure = Some(Failure::new(FailureClass::Stall, Some(0), &T0743, text));
        self.ranks.kill_remaining();
    }

    /// Returns whether all ranks have exited and the leader's report is complete. Kills the ranks
    /// that stay too long after the end of the run.
    fn end_if_exited(&mut self) -> bool {
        // The leader reports the end of any other rank: that rank may have acknowledged the
        // shutdown before.
        let leader_failed = self.first_abnormal.is_some_and(|exit| exit.rank == 0);
        if self.failure.is_some() || self.finished || self.leader_closed || leader_failed || self.all_gone {
            self.ending_since.get_or_insert_with(Instant::now);
        }
        let exit_limit = Duration::from_nanos(self.limits.exit_limit_ns(self.finished));
        let overdue = self.ending_since.is_some_and(|since| since.elapsed() > exit_limit);
        // If a socket outlives its process, another process inherited it; the launcher does not
        // wait for that socket to close.
        if self.all_gone && (self.leader_closed || overdue) {
            return true;
        }
        if overdue {
            self.ranks.kill_remaining();
        }
        false
    }

    fn into_report(self) -> LaunchReport {
        let requests = self.stop.request_count();
        let exits: Vec<RankExit> = self.ranks.list.iter().filter_map(|r| r.exit).collect();
        // A second stop signal that also reaches the ranks can end them before the launcher kills
        // them. That is no failure.
        let mut failure = self.failure.filter(|f| requests < 2 || f.class != FailureClass::RankDied);
        if failure.is_none() && !self.finished && requests < 2 {
            failure = Some(unreported_failure(self.first_abnormal, &exits));
        }
        if let Some(f) = &mut failure
            && let Some(exit) = exits.iter().find(|e| Some(e.rank) == f.rank)
        {
            f.text += &format!("; {}", exit.to_sentence());
        }
        LaunchReport { failure, exits, interrupted: requests > 0 }
    }
}

/// Builds the failure of a run whose leader died before it reported one. A rank that exited with a
/// failure status determines the failure class. The place is that of the check that detected the
/// failure: the workers, if one of them reported that its leader died, or if a rank other than the
/// leader failed; otherwise the leader.
fn unreported_failure(exit: Option<RankExit>, exits: &[RankExit]) -> Failure {
    let died = Some(FailureClass::RankDied.exit_code());
    match exit {
        Some(exit) => {
            let class = exit.status.and_then(FailureClass::from_exit_code).unwrap_or(FailureClass::RankDied);
            let text = format!("rank {} has ended and the leader reported no failure", exit.rank);
            let reported_by_worker = exit.rank != 0 || exits.iter().any(|e| e.rank != 0 && e.status == died);
            let place = if reported_by_worker { CheckSite::Worker } else { CheckSite::Leader };
            Failure::new(class, Some(exit.rank), &T0742, text).with_site(place)
        }
        None => {
            let text = "every rank exited with status 0 but the leader did not report that the run finished";
            Failure::new(FailureClass::RankDied, Some(0), &T0742, text)
        }
    }
}
