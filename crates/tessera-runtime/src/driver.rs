//! Drivers run the state machines on real processes, sockets, threads and clocks.
//!
//! A launcher spawns every rank in its own process group. A rank's standard input is a socket to
//! the launcher. The first frame on that socket identifies the rank and carries its other
//! descriptors: the control sockets between ranks, and those that the application crate added. In
//! each rank, one control thread owns the state machines and polls every socket through a
//! [`Reactor`]; it never blocks on the engine or on a peer. On the way out, the control thread
//! aborts the engine, waits for a bounded time and exits. A watchdog thread, running from the
//! start, enforces the bound.

mod boundary;
mod byte_stream;
mod closed_peers;
mod engine_thread;
mod event_loop;
mod exit;
mod host_ranks;
mod launcher;
mod leader_process;
mod link;
mod local_rank;
mod media_thread;
mod mesh_leader_process;
mod reactor;
pub mod rendezvous;
mod request_intake;
pub mod secure;
mod system;
mod welcome;
mod worker_process;

use std::time::Duration;

pub use boundary::{Interceptor, MessageDirection};
pub use byte_stream::ByteStream;
pub use engine_thread::{EngineEvent, EngineFactory, EngineThread};
pub use exit::{exit_process, exit_without_handlers};
pub use host_ranks::{
    HOST_PROCESS_VARIABLE, HostRanksSpec, end_with_host_process, host_exit_status, run_host_ranks,
};
pub use launcher::{LaunchEvent, LaunchReport, LaunchSpec, RankExit, StopHandle, launch_ranks};
pub use leader_process::{LeaderParts, run_leader};
pub use link::{DisconnectReason, Frame, MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES};
pub use media_thread::{CallRequest, MediaPipelineFactory, StreamRequest};
pub use mesh_leader_process::{MeshLeaderParts, run_mesh_leader};
pub use reactor::{InboxSender, LinkId, Reactor, ReactorEvent, Waker};
pub use welcome::{JoinedRank, join_launch};
pub use worker_process::{WorkerParts, run_worker};

/// Interval between the clock ticks of the state machines.
pub(crate) const TICK_INTERVAL: Duration = Duration::from_millis(20);

/// The control links between ranks. Rank 0 is the leader in every topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ControlTopology {
    /// The leader also computes, and has a link to every rank.
    #[default]
    Mesh,
    /// The leader computes nothing and has one link, to rank 1. Rank 1 is the mesh leader and has a
    /// link to every other rank. A world of two ranks has no other ranks.
    ExternalLeader,
}

impl ControlTopology {
    /// Returns the control links of a world of `ranks` ranks, each as (leading rank, led rank).
    #[must_use]
    pub fn control_links(self, ranks: u32) -> Vec<(u32, u32)> {
        match self {
            ControlTopology::Mesh => (1..ranks).map(|r| (0, r)).collect(),
            ControlTopology::ExternalLeader => {
                (1..ranks.min(2)).map(|r| (0, r)).chain((2..ranks).map(|r| (1, r))).collect()
            }
        }
    }

    /// Returns the rank that directly leads `rank`, or `None` for the leader.
    #[must_use]
    pub fn leader_of(self, rank: u32) -> Option<u32> {
        match (self, rank) {
            (_, 0) => None,
            (ControlTopology::ExternalLeader, 2..) => Some(1),
            _ => Some(0),
        }
    }

    /// Returns the origins allowed in frames from the rank that directly leads `rank`: that rank
    /// itself and the ranks whose frames it forwards.
    pub(crate) fn upstream_origins(self, rank: u32) -> std::ops::RangeInclusive<u32> {
        0..=self.leader_of(rank).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::ControlTopology;

    #[test]
    fn every_rank_has_one_leader() {
        assert_eq!(ControlTopology::Mesh.control_links(3), [(0, 1), (0, 2)]);
        assert_eq!(ControlTopology::ExternalLeader.control_links(2), [(0, 1)]);
        assert_eq!(ControlTopology::ExternalLeader.control_links(4), [(0, 1), (1, 2), (1, 3)]);
        for topology in [ControlTopology::Mesh, ControlTopology::ExternalLeader] {
            for (upper, lower) in topology.control_links(9) {
                assert_eq!(topology.leader_of(lower), Some(upper));
            }
        }
        assert_eq!(ControlTopology::ExternalLeader.upstream_origins(3), 0..=1);
        assert_eq!(ControlTopology::ExternalLeader.upstream_origins(1), 0..=0);
    }
}
