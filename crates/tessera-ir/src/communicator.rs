//! Communicators: which ranks take part in the same sequence of collectives, and how each of them
//! refers to that sequence.

use std::collections::BTreeSet;
use std::fmt;

use tessera_mesh::{Group, Mesh, Rank};

use crate::{Op, Opcode, PeerPosition};

/// An ordered sequence of collectives with its own rendezvous: the collectives of a group, or the
/// transfers from one member of a group to another. The order of communicators is the same on every
/// rank.
///
/// The communicator of a transfer has one direction, so two members that both send first do not
/// block each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Communicator {
    /// Kind of group whose collectives or transfers the communicator carries.
    pub group: Group,
    /// Whether the communicator carries point-to-point transfers.
    pub is_transfer: bool,
    /// Members by position; for transfers the sender, then the receiver. Ranks join the rendezvous
    /// in this order.
    pub members: Vec<Rank>,
}

/// A communicator relative to a rank, as ops name it. The ranks of a role share one route, which
/// can resolve to a different communicator on each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommRoute {
    /// Kind of group; the rank that resolves the route determines which one.
    pub group: Group,
    /// Other end of a transfer; `None` for a collective of the whole group.
    pub peer: Option<TransferPeer>,
}

/// Other end of a transfer, by its position in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TransferPeer {
    /// This rank sends to the member at this position.
    To(u32),
    /// This rank receives from the member at this position.
    From(u32),
}

impl Communicator {
    /// Returns how the ops of a member refer to this communicator; `None` if there is no such
    /// member or the mesh has no such group.
    #[must_use]
    pub fn member_route(&self, mesh: &Mesh, member: usize) -> Option<CommRoute> {
        let position = |at: usize| mesh.group_position(*self.members.get(at)?, self.group);
        position(member)?;
        let peer = match (self.is_transfer, member) {
            (false, _) => None,
            (true, 0) => Some(TransferPeer::To(position(1)?)),
            (true, _) => Some(TransferPeer::From(position(0)?)),
        };
        Some(CommRoute { group: self.group, peer })
    }
}

impl CommRoute {
    /// Returns the route that an op names; `None` if the op is not a collective, or if its
    /// attributes name no group or peer.
    #[must_use]
    pub fn from_op(op: &Op) -> Option<CommRoute> {
        if !op.opcode.is_collective() {
            return None;
        }
        let peer = match (op.opcode, op.peer_position()) {
            (_, Some(PeerPosition::To(at))) => Some(TransferPeer::To(u32::try_from(at).ok()?)),
            (_, Some(PeerPosition::From(at))) => Some(TransferPeer::From(u32::try_from(at).ok()?)),
            (Opcode::Send | Opcode::Recv, None) => return None,
            (_, None) => None,
        };
        Some(CommRoute { group: op.comm_group()?, peer })
    }

    /// Returns the communicator that the route denotes on a rank; `None` if the rank is in no such
    /// group, or the group has no such peer.
    #[must_use]
    pub fn communicator_of(&self, mesh: &Mesh, rank: Rank) -> Option<Communicator> {
        let group = mesh.group_members(rank, self.group);
        let member = |at: u32| group.get(at as usize).copied();
        let members = match self.peer {
            Some(TransferPeer::To(at)) => vec![rank, member(at)?],
            Some(TransferPeer::From(at)) => vec![member(at)?, rank],
            None => group,
        };
        (!members.is_empty()).then_some(Communicator {
            group: self.group,
            is_transfer: self.peer.is_some(),
            members,
        })
    }

    /// Returns the communicators that the route denotes on these ranks, each once.
    #[must_use]
    pub fn communicators_of(&self, mesh: &Mesh, ranks: &[Rank]) -> BTreeSet<Communicator> {
        ranks.iter().filter_map(|rank| self.communicator_of(mesh, *rank)).collect()
    }
}

impl fmt::Display for CommRoute {
    /// Writes `tp/2`, `world to position 1` or `pp from position 0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer {
            None => write!(f, "{}", self.group),
            Some(TransferPeer::To(at)) => write!(f, "{} to position {at}", self.group),
            Some(TransferPeer::From(at)) => write!(f, "{} from position {at}", self.group),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_mesh::Axis;

    use super::*;

    #[test]
    fn every_member_resolves_the_same_communicator() {
        let mesh: Mesh = "tp=4, pp=2, outside=2".parse().unwrap();
        let block = Group::Axis { axis: Axis::Tp, subgroup_size: Some(2) };
        let routes = [Group::whole_axis(Axis::Pp), block, Group::World].into_iter().flat_map(|over| {
            [None, Some(TransferPeer::To(1)), Some(TransferPeer::From(1))]
                .map(|peer| CommRoute { group: over, peer })
        });
        let mut seen = 0;
        for route in routes {
            for rank in mesh.iter() {
                let Some(lane) = route.communicator_of(&mesh, rank) else {
                    assert!(route.group != Group::World && !mesh.contains(rank), "{route} of {rank}");
                    continue;
                };
                for (at, member) in lane.members.iter().enumerate() {
                    let theirs = lane.member_route(&mesh, at).unwrap();
                    assert_eq!(theirs.communicator_of(&mesh, *member).unwrap(), lane, "{theirs} of {member}");
                }
                seen += 1;
            }
        }
        assert_eq!(seen, 3 * (8 + 8 + 10));
    }

    #[test]
    fn a_transfer_has_two_ranks_and_one_direction() {
        let mesh: Mesh = "tp=4, outside=1".parse().unwrap();
        let over = Group::Axis { axis: Axis::Tp, subgroup_size: Some(2) };
        let ranks = |route: CommRoute, rank: u32| route.communicator_of(&mesh, Rank(rank)).map(|l| l.members);
        let to = CommRoute { group: over, peer: Some(TransferPeer::To(1)) };
        let from = CommRoute { group: over, peer: Some(TransferPeer::From(1)) };
        assert_eq!(ranks(to, 3), Some(vec![Rank(3), Rank(4)]));
        assert_eq!(ranks(from, 3), Some(vec![Rank(4), Rank(3)]));
        assert_eq!(ranks(CommRoute { group: Group::World, peer: to.peer }, 0), Some(vec![Rank(0), Rank(1)]));
        // A rank outside the mesh, and a position beyond the subgroup.
        assert_eq!(ranks(to, 0), None);
        assert_eq!(ranks(CommRoute { group: over, peer: Some(TransferPeer::To(2)) }, 1), None);
        assert_eq!([to, from].map(|r| r.to_string()), ["tp/2 to position 1", "tp/2 from position 1"]);
    }
}
