//! The simulated launcher: it supervises the processes as the launcher's driver does.

use super::process::ProcessState;
use super::{QueuedEvent, Sim, TICK_NS, World};
use crate::codes::{T0742, T0743};
use crate::wire::Message;
use crate::{Failure, FailureClass};

#[derive(Debug, Default)]
pub(super) struct LauncherState {
    /// Time of the leader's last report, in nanoseconds; `None` before the first one.
    last_message_ns: Option<u64>,
    failed: bool,
    ending_ns: Option<u64>,
}

impl<W: World> Sim<W> {
    /// Handles what the leader reports to its launcher.
    pub(super) fn receive_report(&mut self, message: Message) {
        match message {
            Message::Finished => self.finished = true,
            Message::Failed(_) => {
                if let Some(l) = &mut self.launcher {
                    l.failed = true;
                }
            }
            _ => {}
        }
        if let Some(l) = &mut self.launcher {
            l.last_message_ns = Some(self.now_ns);
        }
    }

    /// Simulates the launcher's supervision of its processes, like the launcher's driver.
    pub(super) fn tick_launcher(&mut self) {
        let now_ns = self.now_ns;
        self.schedule_event(TICK_NS, QueuedEvent::LauncherTick);
        let bad =
            self.processes.iter().find(|(_, p)| p.state == ProcessState::Exited && !p.clean).map(|(r, _)| *r);
        let leader_gone = self.processes.get(&0).is_none_or(|p| p.state == ProcessState::Exited);
        let (limits, finished) = (&self.config.leader.limits, self.finished);
        let Some(l) = &mut self.launcher else { return };
        let is_silent = limits.exceeded_silence_ns(l.last_message_ns, now_ns).is_some();
        let kills_now = is_silent && !l.failed && !finished && !leader_gone;
        if kills_now || l.failed || finished || bad.is_some() {
            l.ending_ns.get_or_insert(now_ns);
        }
        let late = l.ending_ns.is_some_and(|since| now_ns - since > limits.exit_limit_ns(finished));
        l.failed |= kills_now;
        if !kills_now && !late {
            return;
        }
        if self.failure.is_none() && !finished {
            let (class, rank, code) = match bad {
                Some(rank) if !kills_now => (FailureClass::RankDied, rank, &T0742),
                _ => (FailureClass::Stall, 0, &T0743),
            };
            self.failure = Some(Failure::new(class, Some(rank), code, "reported by the launcher"));
        }
        for rank in self.processes.keys().copied().collect::<Vec<_>>() {
            self.remove_process(rank);
        }
    }
}
