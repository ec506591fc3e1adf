//! Communicators: the ordered ranks that match their launches with each other, and the way in which
//! ops refer to them.

use std::collections::BTreeMap;

use tessera_ir::{Op, Opcode, PeerPosition};
use tessera_mesh::{Group, Mesh, Rank};

/// The group and peer that an op names, the same on every rank of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaunchRoute {
    group: Group,
    peer: PeerSelector,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerSelector {
    All,
    To(u32),
    From(u32),
}

impl LaunchRoute {
    /// Reads the route of a collective; returns `None` if its attributes name no group or no peer.
    pub(crate) fn from_op(op: &Op) -> Option<LaunchRoute> {
        let peer = match (op.opcode, op.peer_position()) {
            (_, Some(PeerPosition::To(at))) => PeerSelector::To(u32::try_from(at).ok()?),
            (_, Some(PeerPosition::From(at))) => PeerSelector::From(u32::try_from(at).ok()?),
            (Opcode::Send | Opcode::Recv, None) => return None,
            (_, None) => PeerSelector::All,
        };
        Some(LaunchRoute { group: op.comm_group()?, peer })
    }
}

/// Position of a communicator in its [`CommunicatorTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CommunicatorIndex(pub(crate) usize);

/// Ranks that launch equally often on this communicator: the members of a group, or a sender and
/// its receiver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimCommunicator {
    pub(crate) group: Group,
    /// Whether the communicator carries sends from its first member to its second, and no
    /// collectives.
    transfer: bool,
    pub(crate) members: Vec<Rank>,
}

/// Every communicator that a program has referred to.
#[derive(Debug, Default)]
pub(crate) struct CommunicatorTable {
    communicators: Vec<SimCommunicator>,
    index: BTreeMap<SimCommunicator, CommunicatorIndex>,
}

impl CommunicatorTable {
    /// Finds the communicator of a rank's route; returns `None` if the rank is not in the group, or
    /// the group has no such peer.
    pub(crate) fn find_or_insert(
        &mut self,
        mesh: &Mesh,
        rank: Rank,
        way: LaunchRoute,
    ) -> Option<CommunicatorIndex> {
        let group = mesh.group_members(rank, way.group);
        let member = |at: u32| group.get(at as usize).copied();
        let (transfer, members) = match way.peer {
            PeerSelector::To(at) => (true, vec![rank, member(at)?]),
            PeerSelector::From(at) => (true, vec![member(at)?, rank]),
            PeerSelector::All => (false, group),
        };
        if members.is_empty() {
            return None;
        }
        let lane = SimCommunicator { group: way.group, transfer, members };
        let next = CommunicatorIndex(self.communicators.len());
        let id = *self.index.entry(lane.clone()).or_insert(next);
        if id == next {
            self.communicators.push(lane);
        }
        Some(id)
    }

    pub(crate) fn get(&self, id: CommunicatorIndex) -> &SimCommunicator {
        &self.communicators[id.0]
    }
}
