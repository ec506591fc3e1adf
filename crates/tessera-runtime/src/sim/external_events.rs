//! Events with a cause outside the protocol, and their effects on processes and links.

use std::collections::BTreeSet;

use super::process::ProcessState;
use super::{QueuedEvent, Sim, SimEvent, World};
use crate::leader;

/// An event with a cause outside the protocol: a signal, a user's request or a network partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExternalEvent {
    /// The process of this rank is killed; its sockets close after the frames already sent.
    Kill(u32),
    /// The process of this rank is stopped, as by SIGSTOP; its events wait until it continues.
    Stop(u32),
    /// The stopped process of this rank continues and handles the events that waited.
    Continue(u32),
    /// The launcher is killed; every process except the leader's dies with it.
    KillLauncher,
    /// The user requests a stop.
    Interrupt,
    /// From now on, nothing passes between these ranks and the others.
    Partition(BTreeSet<u32>),
}

impl<W: World> Sim<W> {
    pub(super) fn apply_external_event(&mut self, event: ExternalEvent) {
        match event {
            ExternalEvent::Kill(rank) => self.remove_process(rank),
            ExternalEvent::Stop(rank) => {
                if let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == ProcessState::Running) {
                    p.state = ProcessState::Stopped;
                }
            }
            ExternalEvent::Continue(rank) => {
                let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == ProcessState::Stopped)
                else {
                    return;
                };
                p.state = ProcessState::Running;
                for item in std::mem::take(&mut p.deferred) {
                    self.schedule_event(0, item);
                }
            }
            ExternalEvent::KillLauncher => {
                if self.launcher.take().is_some() {
                    for rank in self.processes.keys().copied().filter(|r| *r != 0).collect::<Vec<_>>() {
                        self.remove_process(rank);
                    }
                    // The parent-death signal wakes a stopped leader.
                    self.apply_external_event(ExternalEvent::Continue(0));
                    self.step_leader(leader::Event::LauncherGone);
                }
            }
            ExternalEvent::Interrupt => self.step_leader(leader::Event::Stop),
            ExternalEvent::Partition(side) => self.partition = Some(side),
        }
    }

    /// Removes a process. Its sockets close after the data that it had sent.
    pub(super) fn remove_process(&mut self, rank: u32) {
        let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state != ProcessState::Exited) else {
            return;
        };
        p.state = ProcessState::Exited;
        p.deferred.clear();
        self.world.observe_event(self.now_ns, SimEvent::Exited(rank));
        for to in self.linked_processes(rank) {
            let last = self.arrivals.get(&(rank, to)).copied().unwrap_or(0);
            let at = last.max(self.now_ns);
            self.schedule_event(at - self.now_ns, QueuedEvent::LinkClosed { from: rank, to });
        }
    }
}
