//! Drivers: the processes, sockets, threads and clocks under the machines.
//!
//! A launcher spawns every rank in a process group of its own. A rank's standard input is a socket to the
//! launcher; the first frame on it says who the rank is and carries the other descriptors: the control sockets
//! between ranks, and whatever the door added. In each rank one control thread owns the machines and polls every
//! socket through a [`Hub`]; it never waits for the engine or for a peer. When it must leave it aborts the engine,
//! waits a bounded time, and goes; a keeper thread that was there from the start sees to the bound.

mod engine_thread;
mod exit;
mod fds;
mod gate;
mod gone;
mod hub;
mod intake;
mod launcher;
mod leader_process;
mod link;
mod local_rank;
mod mesh_process;
pub mod rendezvous;
pub mod secure;
mod stream;
mod studio_thread;
mod worker_process;

use std::time::Duration;

pub use engine_thread::{EngineEvent, EngineFactory, EngineThread};
pub use exit::{exit, exit_at_once};
pub use fds::{Joined, join};
pub use gate::{Tap, Way};
pub use hub::{Hub, HubEvent, LinkId, Post, Waker};
pub use launcher::{Interrupt, LaunchEvent, LaunchReport, LaunchSpec, RankExit, launch};
pub use leader_process::{LeaderParts, RecordEntry, run_leader};
pub use link::{Frame, LinkEnd, OUT_BYTES, OUT_FRAMES};
pub use mesh_process::{MeshLeaderParts, run_mesh_leader};
pub use stream::Stream;
pub use studio_thread::{StreamRequest, StudioFactory};
pub use worker_process::{WorkerParts, run_worker};

use tessera_base::Code;

/// How often the machines are told that time passed.
pub(crate) const TICK: Duration = Duration::from_millis(20);

/// Which ranks speak with each other. Rank 0 leads in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Topology {
    /// The leader computes too and speaks with every rank.
    #[default]
    Mesh,
    /// The leader stands outside the mesh and speaks with rank 1, the mesh leader, which speaks with the other
    /// ranks. With two ranks there are no others.
    Outside,
}

impl Topology {
    /// Control links of a world of so many ranks: the rank that leads, then the one that is led.
    #[must_use]
    pub fn links(self, ranks: u32) -> Vec<(u32, u32)> {
        match self {
            Topology::Mesh => (1..ranks).map(|r| (0, r)).collect(),
            Topology::Outside => {
                (1..ranks.min(2)).map(|r| (0, r)).chain((2..ranks).map(|r| (1, r))).collect()
            }
        }
    }

    /// The rank that leads this one directly, if any does.
    #[must_use]
    pub fn leads(self, rank: u32) -> Option<u32> {
        match (self, rank) {
            (_, 0) => None,
            (Topology::Outside, 2..) => Some(1),
            _ => Some(0),
        }
    }

    /// Whose frames may come from the rank that leads this one: its own and those that it passes on.
    pub(crate) fn origins_above(self, rank: u32) -> std::ops::RangeInclusive<u32> {
        0..=self.leads(rank).unwrap_or(0)
    }
}

/// A session that could not be started.
pub(crate) static T0750: Code = Code {
    id: "T0750",
    title: "the ranks could not be started or joined",
    page: "A rank's process could not be spawned, or it did not receive its welcome: its rank, its session and the \
sockets that it shares with its peers. The text holds the system's own error. A rank is started by the launcher and not by \
hand; started by hand it finds no socket on its standard input.\n\nLimits on processes or open files are the usual \
reason on a busy host.",
};

#[cfg(test)]
mod tests {
    use super::Topology;

    #[test]
    fn every_rank_is_led_by_one() {
        assert_eq!(Topology::Mesh.links(3), [(0, 1), (0, 2)]);
        assert_eq!(Topology::Outside.links(2), [(0, 1)]);
        assert_eq!(Topology::Outside.links(4), [(0, 1), (1, 2), (1, 3)]);
        for topology in [Topology::Mesh, Topology::Outside] {
            for (upper, lower) in topology.links(9) {
                assert_eq!(topology.leads(lower), Some(upper));
            }
        }
        assert_eq!(Topology::Outside.origins_above(3), 0..=1);
        assert_eq!(Topology::Outside.origins_above(1), 0..=0);
    }
}
