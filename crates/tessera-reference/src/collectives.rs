//! Executes collectives: computes every member's result from all members' operands.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tessera_ir::{Attrs, CollectiveOp, DType, Op, OpByKind, OpView, Opcode, PeerPosition, WIRE_BLOCK, Wire};
use tessera_mesh::{Group, Mesh, Rank, Reduction, split_units};

use crate::error::OpError;
use crate::{EvalError, Tensor, rounding_to};

/// All collectives and transfers between ranks, finished or in flight.
#[derive(Debug, Default)]
pub(crate) struct CollectiveFabric {
    sequences: BTreeMap<FabricCommunicator, Vec<SequencePosition>>,
}

/// Identifies a communicator: a group with its members, or, if the flag is set, the sender and
/// receiver of transfers over the group.
type FabricCommunicator = (Group, Vec<Rank>, bool);

/// One position of a communicator's sequence: each member's contribution, and the results once all
/// have contributed.
#[derive(Debug)]
struct SequencePosition {
    contributions: Vec<Option<Contribution>>,
    results: Option<Vec<Tensor>>,
}

#[derive(Debug, Clone)]
struct Contribution {
    opcode: Opcode,
    /// All attributes as stated, because the members must state the same.
    attrs: Attrs,
    view: OpView,
    tensor: Option<Tensor>,
}

/// A handle to an issued collective: its communicator and position.
#[derive(Debug, Clone)]
pub(crate) struct CollectiveTicket {
    communicator: FabricCommunicator,
    position: usize,
    member: usize,
    opcode: Opcode,
}

/// Whether every member has contributed to a collective and, if so, the result of one member.
pub(crate) enum TicketState {
    /// A member has not contributed yet.
    Open,
    /// The result; `None` for a send.
    Done(Option<Tensor>),
}

impl CollectiveFabric {
    /// Adds a rank's operand to the next position of its communicator. `group` lists the members of
    /// `over` by position.
    pub(crate) fn issue_collective(
        &mut self,
        rank: Rank,
        group: Vec<Rank>,
        over: Group,
        op: &Op,
        view: &OpView,
        tensor: Option<Tensor>,
    ) -> Result<CollectiveTicket, OpError> {
        let peer = |key: &str, at: u64| {
            let peer = group.get(at as usize).copied();
            peer.ok_or_else(|| format!("`{key}` is not a position of the group"))
        };
        // A transfer involves two ranks, which have a communicator of their own per direction.
        let (members, direct) = match op.peer_position() {
            Some(PeerPosition::To(at)) => (vec![rank, peer("to", at)?], true),
            Some(PeerPosition::From(at)) => (vec![peer("from", at)?, rank], true),
            None => (group, false),
        };
        let member = match op.peer_position() {
            Some(PeerPosition::To(_)) => 0,
            Some(PeerPosition::From(_)) => 1,
            None => members.iter().position(|m| *m == rank).ok_or("is not a member of the group")?,
        };
        let brought = Contribution { opcode: op.opcode, attrs: op.attrs.clone(), view: view.clone(), tensor };
        let lane = (over, members, direct);
        let meetings = self.sequences.entry(lane.clone()).or_default();
        let position = match meetings.iter().position(|m| m.contributions[member].is_none()) {
            Some(p) => p,
            None => {
                meetings.push(SequencePosition { contributions: vec![None; lane.1.len()], results: None });
                meetings.len() - 1
            }
        };
        let meeting = &mut meetings[position];
        let other = meeting.contributions.iter().enumerate().find_map(|(i, b)| Some((i, b.as_ref()?)));
        if let Some((i, other)) = other
            && !direct
            && !other.agrees_with(&brought)
        {
            return Err(OpError::Group(EvalError::Mismatch {
                here: (lane.1[i], other.to_text(over)),
                there: (rank, brought.to_text(over)),
            }));
        }
        meeting.contributions[member] = Some(brought);
        if meeting.contributions.iter().all(Option::is_some) {
            let all: Vec<Contribution> = meeting.contributions.iter().flatten().cloned().collect();
            meeting.results = Some(compute_results(over, &all)?);
        }
        Ok(CollectiveTicket { communicator: lane, position, member, opcode: op.opcode })
    }

    /// Returns the ticket holder's result once all members have contributed to the collective.
    pub(crate) fn collective_state(&self, t: &CollectiveTicket) -> TicketState {
        let meeting = self.sequences.get(&t.communicator).and_then(|l| l.get(t.position));
        match meeting.and_then(|m| m.results.as_ref()) {
            None => TicketState::Open,
            Some(_) if t.opcode == Opcode::Send => TicketState::Done(None),
            Some(results) => TicketState::Done(results.get(t.member).cloned()),
        }
    }

    /// Describes a collective for an error: the op, its position in the communicator's sequence,
    /// and the members that have not issued it.
    pub(crate) fn describe_ticket(&self, t: &CollectiveTicket) -> String {
        let (over, members, _) = &t.communicator;
        let meeting = self.sequences.get(&t.communicator).and_then(|l| l.get(t.position));
        let missing: Vec<String> = members
            .iter()
            .enumerate()
            .filter(|(i, _)| meeting.is_none_or(|m| m.contributions[*i].is_none()))
            .map(|(_, r)| r.to_string())
            .collect();
        format!("{} number {} over {over}, rank {} missing", t.opcode.name(), t.position, missing.join(", "))
    }

    /// Returns a collective that some members issued and others never will.
    pub(crate) fn find_unfinished(&self) -> Option<CollectiveTicket> {
        self.sequences.iter().find_map(|(lane, meetings)| {
            let position = meetings.iter().position(|m| m.results.is_none())?;
            let (member, b) = meetings[position]
                .contributions
                .iter()
                .enumerate()
                .find_map(|(i, b)| Some((i, b.as_ref()?)))?;
            Some(CollectiveTicket { communicator: lane.clone(), position, member, opcode: b.opcode })
        })
    }
}

impl CollectiveTicket {
    pub(crate) fn issuing_rank(&self) -> Rank {
        self.communicator.1[self.member]
    }
}

impl Contribution {
    fn agrees_with(&self, other: &Contribution) -> bool {
        self.opcode == other.opcode && self.attrs == other.attrs
    }

    fn to_text(&self, over: Group) -> String {
        let attrs: Vec<String> = self.attrs.iter().map(|(k, v)| format!("{k}={v:?}")).collect();
        format!("{} over {over} {{{}}}", self.opcode.name(), attrs.join(", "))
    }
}

/// Computes the results of all members from all contributions, by position.
fn compute_results(over: Group, all: &[Contribution]) -> Result<Vec<Tensor>, String> {
    let n = all.len();
    let tensors: Vec<Tensor> = all.iter().filter_map(|b| b.tensor.clone()).collect();
    if tensors.is_empty() {
        return Err("no member contributed a tensor".to_string());
    }
    let shapes = || tensors.iter().map(|t| format!("{:?}", t.shape())).collect::<Vec<_>>().join(" and ");
    let OpByKind::Collective(view) = all[0].view.by_kind() else {
        return Err(format!("{} is not a collective", all[0].opcode.name()));
    };
    use CollectiveOp as C;
    match view {
        C::AllGather(_) | C::ReduceScatter(_) | C::AllToAll(_) | C::HaloExchange(_)
            if over == Group::World =>
        {
            Err("collectives over shards need a mesh axis, but the group is world".to_string())
        }
        C::AllReduce(v) => Ok(vec![reduce_terms(&tensors, v.reduction)?; n]),
        C::AllGather(v) => {
            if tensors.iter().any(|t| t.shape() != tensors[0].shape()) {
                return Err(format!("shards to gather have different shapes: {}", shapes()));
            }
            let whole = Tensor::concat(v.dim, &tensors)
                .ok_or_else(|| format!("no dim {} to gather: {}", v.dim, shapes()))?;
            Ok(vec![whole; n])
        }
        C::ReduceScatter(v) => {
            let (dim, whole) = (v.dim, reduce_terms(&tensors, v.reduction)?);
            let extent = *whole.shape().get(dim).ok_or_else(|| format!("no dim {dim}: {}", shapes()))?;
            if !extent.is_multiple_of(n) {
                return Err(format!("dim {dim} of extent {extent} is not divisible by {n} ranks"));
            }
            let each = extent / n;
            (0..n).map(|i| whole.slice(dim, i * each, each).ok_or_else(|| "slice".to_string())).collect()
        }
        C::AllToAll(v) => (0..n)
            .map(|to| {
                let sent = tensors.iter().map(|t| match v.wire {
                    Some(Wire::E4m3) => round_on_wire(t),
                    None => Cow::Borrowed(t),
                });
                let pieces: Option<Vec<Tensor>> =
                    sent.map(|t| take_shard(&t, v.split, v.unit as usize, n, to)).collect();
                pieces.and_then(|p| Tensor::concat(v.concat, &p))
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| {
                format!("invalid all_to_all of {}: split {}, concat {}", shapes(), v.split, v.concat)
            }),
        C::HaloExchange(_) => (0..n)
            .map(|at| exchange_rows(&tensors, at))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| format!("no rows of frames to exchange: {}", shapes())),
        C::Broadcast(v) => {
            let root = v.root;
            let from =
                tensors.get(root as usize).ok_or_else(|| format!("root {root} is not one of {n} ranks"))?;
            Ok(vec![from.clone(); n])
        }
        // The sender is the first member, and only it contributes a tensor.
        C::Send(_) | C::Recv(_) => Ok(vec![tensors[0].clone(); n]),
    }
}

/// Rounds each block of elements of the last dim to e4m3 with one scale in f32.
fn round_on_wire(t: &Tensor) -> Cow<'_, Tensor> {
    let width = t.shape().last().copied().unwrap_or(1).max(1);
    let (Some(f32), Some(e4m3)) = (rounding_to(DType::F32), rounding_to(DType::E4m3)) else {
        return Cow::Borrowed(t);
    };
    let mut out = t.clone();
    for block in out.data_mut().chunks_mut(width).flat_map(|row| row.chunks_mut(WIRE_BLOCK)) {
        let largest = block.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let scale = match f32.round_nearest(largest / 448.0) {
            0.0 => 1.0,
            scale => scale,
        };
        for x in block {
            *x = f32.round_nearest(e4m3.round_nearest(f32.round_nearest(*x / scale)) * scale);
        }
    }
    Cow::Owned(out)
}

/// Returns the last rows of the member before a member and the first rows of the one after it, for each
/// frame. Beyond the first and the last member the rows are zeros.
fn exchange_rows(tensors: &[Tensor], at: usize) -> Option<Tensor> {
    let mut shape = tensors[at].shape().to_vec();
    *shape.get_mut(1)? = 1;
    let zeros = || Tensor::full(&shape, 0.0);
    let above = match at.checked_sub(1) {
        Some(before) => tensors[before].slice(1, tensors[before].shape().get(1)?.checked_sub(1)?, 1)?,
        None => zeros(),
    };
    let below = match tensors.get(at + 1) {
        Some(after) => after.slice(1, 0, 1)?,
        None => zeros(),
    };
    Tensor::concat(1, &[above, below])
}

/// Explains that a rank is in no group on which an op works.
pub(crate) fn no_group_error(mesh: &Mesh, group: Group) -> String {
    format!("belongs to no group of {group} in mesh({mesh})")
}

/// Returns shard `at` of `parts` of a dim split in whole units; the first shards are one unit
/// longer if the units do not divide evenly. Returns `None` if the dim is not a multiple of the
/// unit.
pub(crate) fn take_shard(t: &Tensor, dim: usize, unit: usize, parts: usize, at: usize) -> Option<Tensor> {
    let extent = *t.shape().get(dim)?;
    if unit == 0 || !extent.is_multiple_of(unit) {
        return None;
    }
    let (start, len) =
        split_units((extent / unit) as u64, u32::try_from(parts).ok()?, u32::try_from(at).ok()?);
    t.slice(dim, start as usize * unit, len as usize * unit)
}

fn reduce_terms(tensors: &[Tensor], reduction: Reduction) -> Result<Tensor, String> {
    let mut out = tensors[0].clone();
    for t in &tensors[1..] {
        if t.shape() != out.shape() {
            return Err(format!(
                "terms to reduce have different shapes: {:?} and {:?}",
                out.shape(),
                t.shape()
            ));
        }
        for (o, x) in out.data_mut().iter_mut().zip(t.data()) {
            *o = match reduction {
                Reduction::Sum | Reduction::Tree => *o + x,
                Reduction::Max => o.max(*x),
            };
        }
    }
    Ok(out)
}
