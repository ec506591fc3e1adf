//! Where collectives meet: which ranks share a lane, and what one of them calls it.

use std::fmt;
use std::ops::Range;

use tessera_ir::{Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout, Group, Mesh, Rank};

/// One sequence of collectives with a meeting place of its own: those of a group, or the transfers over a group from one
/// member to another. The order of lanes is the same on every rank.
///
/// A transfer's lane has one direction, so two members that both send first do not stand in each other's way.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane {
    /// Kind of group.
    pub over: Group,
    /// Whether it is of transfers.
    pub transfer: bool,
    /// Members by position; of transfers the sender and then the receiver. They meet in this order.
    pub members: Vec<Rank>,
}

/// A lane as ops name it: the same words on every rank of a role, which may be lanes of different ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Kind of group.
    pub over: Group,
    /// Other end of a transfer; none for what the whole group meets in.
    pub peer: Option<Peer>,
}

/// Other end of a transfer, by its position in the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// It takes.
    To(u32),
    /// It gives.
    From(u32),
}

/// What every member of a collective must agree on, in words.
#[must_use]
pub fn agreed(p: &Program, op: &Op) -> String {
    let ty = match (op.opcode, op.operands.first()) {
        (_, Some(v)) => Some(p.ty(*v)),
        (Opcode::Recv, None) => p.given(op).or(op.results.first().copied()).map(|v| p.ty(v)),
        _ => None,
    };
    let shape = ty.map(|t| (t.dtype, t.layout.global(&t.shape, &p.mesh)));
    match op.opcode {
        // The lane says who and where to.
        Opcode::Send | Opcode::Recv => format!("transfer {shape:?}"),
        other => format!("{} {:?} {shape:?} {:?}", other.name(), op.attrs, ty.map(|t| t.layout)),
    }
}

/// A shape as a matrix for what is cut by a dim: one cut by its first dim has long rows; one cut by a later dim, rows of that dim
/// and what follows.
#[must_use]
pub fn as_matrix(shape: &[u64], dim: usize) -> (usize, usize) {
    let (rows, columns) = shape.split_at(dim.max(1).min(shape.len()));
    (rows.iter().product::<u64>() as usize, columns.iter().product::<u64>() as usize)
}

/// The dim that a type is cut by over an axis, and the piece of every one of so many members along it in that matrix; no pieces
/// where it is not cut.
#[must_use]
pub fn pieces(ty: &Type, axis: Axis, members: u32) -> (usize, Vec<Range<usize>>) {
    let AxisLayout::Shard(shard) = ty.layout.on(axis) else { return (0, Vec::new()) };
    let local = ty.shape[shard.dim];
    let run = if shard.dim == 0 { 1 } else { ty.shape[shard.dim + 1..].iter().product::<u64>() as usize };
    let piece = |at: u32| {
        let (start, len) = shard.range(local, members, at);
        start as usize * run..(start + len) as usize * run
    };
    (shard.dim, (0..members).map(piece).collect())
}

impl Lane {
    /// How a member's ops name the lane; `None` where the lane has no such member or the mesh no such group.
    #[must_use]
    pub fn route(&self, mesh: &Mesh, member: usize) -> Option<Route> {
        let position = |at: usize| mesh.position(*self.members.get(at)?, self.over);
        position(member)?;
        let peer = match (self.transfer, member) {
            (false, _) => None,
            (true, 0) => Some(Peer::To(position(1)?)),
            (true, _) => Some(Peer::From(position(0)?)),
        };
        Some(Route { over: self.over, peer })
    }
}

impl Route {
    /// What an op names; `None` for one that is no collective, and where its constants name no group or peer.
    #[must_use]
    pub fn of(op: &Op) -> Option<Route> {
        if !op.opcode.is_collective() {
            return None;
        }
        let position = |key: &str| op.int(key).and_then(|at| u32::try_from(at).ok());
        let peer = match op.opcode {
            Opcode::Send => Some(Peer::To(position("to")?)),
            Opcode::Recv => Some(Peer::From(position("from")?)),
            _ => None,
        };
        Some(Route { over: op.group()?, peer })
    }

    /// The lane that a rank means by it; `None` where it is in no such group or the group has no such peer.
    #[must_use]
    pub fn lane(&self, mesh: &Mesh, rank: Rank) -> Option<Lane> {
        let group = mesh.members(rank, self.over);
        let member = |at: u32| group.get(at as usize).copied();
        let members = match self.peer {
            Some(Peer::To(at)) => vec![rank, member(at)?],
            Some(Peer::From(at)) => vec![member(at)?, rank],
            None => group,
        };
        (!members.is_empty()).then_some(Lane { over: self.over, transfer: self.peer.is_some(), members })
    }
}

impl fmt::Display for Route {
    /// `tp/2`, `world to position 1` or `pp from position 0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.peer {
            None => write!(f, "{}", self.over),
            Some(Peer::To(at)) => write!(f, "{} to position {at}", self.over),
            Some(Peer::From(at)) => write!(f, "{} from position {at}", self.over),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_finds_the_lane_that_another_member_means() {
        let mesh: Mesh = "tp=4, pp=2, outside=2".parse().unwrap();
        let block = Group::Axis { axis: Axis::Tp, ways: Some(2) };
        let routes = [Group::of(Axis::Pp), block, Group::World]
            .into_iter()
            .flat_map(|over| [None, Some(Peer::To(1)), Some(Peer::From(1))].map(|peer| Route { over, peer }));
        let mut seen = 0;
        for route in routes {
            for rank in mesh.iter() {
                let Some(lane) = route.lane(&mesh, rank) else {
                    assert!(route.over != Group::World && !mesh.contains(rank), "{route} of {rank}");
                    continue;
                };
                for (at, member) in lane.members.iter().enumerate() {
                    let theirs = lane.route(&mesh, at).unwrap();
                    assert_eq!(theirs.lane(&mesh, *member).unwrap(), lane, "{theirs} of {member}");
                }
                seen += 1;
            }
        }
        assert_eq!(seen, 3 * (8 + 8 + 10));
    }

    #[test]
    fn a_transfer_is_of_two_ranks_and_one_direction() {
        let mesh: Mesh = "tp=4, outside=1".parse().unwrap();
        let over = Group::Axis { axis: Axis::Tp, ways: Some(2) };
        let ranks = |route: Route, rank: u32| route.lane(&mesh, Rank(rank)).map(|l| l.members);
        let to = Route { over, peer: Some(Peer::To(1)) };
        let from = Route { over, peer: Some(Peer::From(1)) };
        assert_eq!(ranks(to, 3), Some(vec![Rank(3), Rank(4)]));
        assert_eq!(ranks(from, 3), Some(vec![Rank(4), Rank(3)]));
        assert_eq!(ranks(Route { over: Group::World, peer: to.peer }, 0), Some(vec![Rank(0), Rank(1)]));
        // Outside the mesh, beyond the block.
        assert_eq!(ranks(to, 0), None);
        assert_eq!(ranks(Route { over, peer: Some(Peer::To(2)) }, 1), None);
        assert_eq!([to, from].map(|r| r.to_string()), ["tp/2 to position 1", "tp/2 from position 1"]);
    }
}
