//! Executes collectives: computes every member's result from all members' operands.

use std::collections::BTreeMap;

use tessera_ir::{Attr, Op, Opcode};
use tessera_mesh::{Group, Rank, split_units};

use crate::{EvalError, Tensor};

/// All collectives and transfers between ranks, finished or in flight.
#[derive(Debug, Default)]
pub(crate) struct CollectiveFabric {
    /// The sequence of collectives per communicator.
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
    attrs: Vec<(String, Attr)>,
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

/// The progress of an issued collective.
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
        tensor: Option<Tensor>,
    ) -> Result<CollectiveTicket, Result<EvalError, String>> {
        let peer = |key: &str| {
            let at = op.int_attr(key).and_then(|i| usize::try_from(i).ok());
            at.and_then(|i| group.get(i).copied())
                .ok_or_else(|| Err(format!("`{key}` is not a position of the group")))
        };
        // A transfer involves two ranks, which have a communicator of their own per direction.
        let (members, direct) = match op.opcode {
            Opcode::Send => (vec![rank, peer("to")?], true),
            Opcode::Recv => (vec![peer("from")?, rank], true),
            _ => (group, false),
        };
        let member = match op.opcode {
            Opcode::Send => 0,
            Opcode::Recv => 1,
            _ => members
                .iter()
                .position(|m| *m == rank)
                .ok_or_else(|| Err("is not a member of the group".to_string()))?,
        };
        let attrs = op.attrs.iter().filter(|(k, _)| !direct || matches!(k.as_str(), "axis" | "group_size"));
        let brought = Contribution {
            opcode: op.opcode,
            attrs: attrs.map(|(k, v)| (k.clone(), v.clone())).collect(),
            tensor,
        };
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
            return Err(Ok(EvalError::Mismatch {
                here: (lane.1[i], other.to_text(over)),
                there: (rank, brought.to_text(over)),
            }));
        }
        meeting.contributions[member] = Some(brought);
        if meeting.contributions.iter().all(Option::is_some) {
            let all: Vec<Contribution> = meeting.contributions.iter().flatten().cloned().collect();
            meeting.results = Some(compute_results(over, &all).map_err(Err)?);
        }
        Ok(CollectiveTicket { communicator: lane, position, member, opcode: op.opcode })
    }

    /// Returns the progress of an issued collective.
    pub(crate) fn collective_state(&self, t: &CollectiveTicket) -> TicketState {
        let meeting = self.sequences.get(&t.communicator).and_then(|l| l.get(t.position));
        match meeting.and_then(|m| m.results.as_ref()) {
            None => TicketState::Open,
            Some(_) if t.opcode == Opcode::Send => TicketState::Done(None),
            Some(results) => TicketState::Done(results.get(t.member).cloned()),
        }
    }

    /// Describes a collective and its missing members.
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
    /// Returns the rank that issued the collective.
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

    fn int_attr(&self, name: &str) -> Result<usize, String> {
        let found = self.attrs.iter().find(|(k, _)| k == name);
        match found {
            Some((_, Attr::Int(i))) => usize::try_from(*i).map_err(|_| format!("`{name}` is negative")),
            _ => Err(format!("`{name}` is missing")),
        }
    }

    fn is_max(&self) -> bool {
        self.attrs.iter().any(|(k, v)| k == "reduction" && *v == Attr::Str("max".to_string()))
    }
}

/// Computes the results of all members from all contributions, by position.
fn compute_results(over: Group, all: &[Contribution]) -> Result<Vec<Tensor>, String> {
    let n = all.len();
    let first = &all[0];
    let tensors: Vec<Tensor> = all.iter().filter_map(|b| b.tensor.clone()).collect();
    if tensors.is_empty() {
        return Err("no member contributed a tensor".to_string());
    }
    let shapes = || tensors.iter().map(|t| format!("{:?}", t.shape())).collect::<Vec<_>>().join(" and ");
    match first.opcode {
        Opcode::AllGather | Opcode::ReduceScatter | Opcode::AllToAll if over == Group::World => {
            Err("collectives over shards need a mesh axis, but the group is world".to_string())
        }
        Opcode::AllReduce => Ok(vec![reduce_terms(&tensors, first.is_max())?; n]),
        Opcode::AllGather => {
            let dim = first.int_attr("dim")?;
            if tensors.iter().any(|t| t.shape() != tensors[0].shape()) {
                return Err(format!("shards to gather have different shapes: {}", shapes()));
            }
            let whole = Tensor::concat(dim, &tensors)
                .ok_or_else(|| format!("no dim {dim} to gather: {}", shapes()))?;
            Ok(vec![whole; n])
        }
        Opcode::ReduceScatter => {
            let dim = first.int_attr("dim")?;
            let whole = reduce_terms(&tensors, first.is_max())?;
            let extent = *whole.shape().get(dim).ok_or_else(|| format!("no dim {dim}: {}", shapes()))?;
            if !extent.is_multiple_of(n) {
                return Err(format!("dim {dim} of extent {extent} is not divisible by {n} ranks"));
            }
            let each = extent / n;
            (0..n).map(|i| whole.slice(dim, i * each, each).ok_or_else(|| "slice".to_string())).collect()
        }
        Opcode::AllToAll => {
            let (split_dim, concat) = (first.int_attr("split")?, first.int_attr("concat")?);
            let unit = first.int_attr("unit").unwrap_or(1).max(1);
            (0..n)
                .map(|to| {
                    let pieces: Option<Vec<Tensor>> =
                        tensors.iter().map(|t| take_shard(t, split_dim, unit, n, to)).collect();
                    pieces.and_then(|p| Tensor::concat(concat, &p))
                })
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| {
                    format!("invalid all_to_all of {}: split {split_dim}, concat {concat}", shapes())
                })
        }
        Opcode::Broadcast => {
            let root = first.int_attr("root")?;
            let from = tensors.get(root).ok_or_else(|| format!("root {root} is not one of {n} ranks"))?;
            Ok(vec![from.clone(); n])
        }
        // Only the sender contributes a tensor.
        Opcode::Send => Ok(vec![tensors[0].clone(); n]),
        other => Err(format!("{} is not a collective", other.name())),
    }
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

fn reduce_terms(tensors: &[Tensor], max: bool) -> Result<Tensor, String> {
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
            *o = if max { o.max(*x) } else { *o + x };
        }
    }
    Ok(out)
}
