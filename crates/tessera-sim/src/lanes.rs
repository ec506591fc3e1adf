//! Which ranks meet in a collective: lanes, and how the ops of a rank name them.

use std::collections::BTreeMap;

use tessera_ir::{Op, Opcode};
use tessera_mesh::{Group, Mesh, Rank};

/// How ops name a lane: the same words on every rank of a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Way {
    over: Group,
    peer: Peer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Everyone,
    To(u32),
    From(u32),
}

impl Way {
    /// What a collective names; nothing where its constants name no group or no peer.
    pub(crate) fn of(op: &Op) -> Option<Way> {
        let position = |key: &str| op.int(key).and_then(|at| u32::try_from(at).ok());
        let peer = match op.opcode {
            Opcode::Send => Peer::To(position("to")?),
            Opcode::Recv => Peer::From(position("from")?),
            _ => Peer::Everyone,
        };
        Some(Way { over: op.group()?, peer })
    }
}

/// Index of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneId(pub(crate) usize);

/// Ranks that launch the same number of times here: those of a group, or a sender and its receiver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) over: Group,
    /// One direction between two ranks.
    transfer: bool,
    pub(crate) members: Vec<Rank>,
}

/// Every lane that was named so far.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    index: BTreeMap<Lane, LaneId>,
}

impl Lanes {
    /// The lane that a rank means; nothing where it is no member of such a group, or the group has no such peer.
    pub(crate) fn find(&mut self, mesh: &Mesh, rank: Rank, way: Way) -> Option<LaneId> {
        let group = mesh.members(rank, way.over);
        let member = |at: u32| group.get(at as usize).copied();
        let (transfer, members) = match way.peer {
            Peer::To(at) => (true, vec![rank, member(at)?]),
            Peer::From(at) => (true, vec![member(at)?, rank]),
            Peer::Everyone => (false, group),
        };
        if members.is_empty() {
            return None;
        }
        let lane = Lane { over: way.over, transfer, members };
        let next = LaneId(self.lanes.len());
        let id = *self.index.entry(lane.clone()).or_insert(next);
        if id == next {
            self.lanes.push(lane);
        }
        Some(id)
    }

    pub(crate) fn get(&self, id: LaneId) -> &Lane {
        &self.lanes[id.0]
    }
}
