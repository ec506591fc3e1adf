//! What collectives do: from every member's operand to every member's result.

use std::collections::BTreeMap;

use tessera_ir::{Attr, Op, Opcode};
use tessera_mesh::{Group, Rank, split};

use crate::{Fault, Tensor};

/// Everything in flight between ranks.
#[derive(Debug, Default)]
pub(crate) struct Fabric {
    /// The sequence of collectives of each group, and of transfers from a rank to another.
    lanes: BTreeMap<Lane, Vec<Meeting>>,
}

/// A group with its members, or the two ranks of a transfer over it.
type Lane = (Group, Vec<Rank>, bool);

/// One position of a lane: what each member brought, and then what each takes.
#[derive(Debug)]
struct Meeting {
    brought: Vec<Option<Brought>>,
    results: Option<Vec<Tensor>>,
}

#[derive(Debug, Clone)]
struct Brought {
    opcode: Opcode,
    attrs: Vec<(String, Attr)>,
    tensor: Option<Tensor>,
}

/// What an issue leaves: its place in a lane.
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    lane: Lane,
    position: usize,
    member: usize,
    opcode: Opcode,
}

/// What is known of an issued collective.
pub(crate) enum State {
    /// Somebody has not come yet.
    Open,
    /// The result; nothing for a send.
    Done(Option<Tensor>),
}

impl Fabric {
    /// Brings a rank's operand to the next meeting of its lane. `group` are the members of `over`, by position.
    pub(crate) fn issue(
        &mut self,
        rank: Rank,
        group: Vec<Rank>,
        over: Group,
        op: &Op,
        tensor: Option<Tensor>,
    ) -> Result<Ticket, Result<Fault, String>> {
        let peer = |key: &str| {
            let at = op.int(key).and_then(|i| usize::try_from(i).ok());
            at.and_then(|i| group.get(i).copied())
                .ok_or_else(|| Err(format!("`{key}` is no member of the group")))
        };
        // A transfer concerns two ranks; its lane is theirs alone, in that direction.
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
                .ok_or_else(|| Err("is outside the group".to_string()))?,
        };
        let attrs = op.attrs.iter().filter(|(k, _)| !direct || matches!(k.as_str(), "axis" | "ways"));
        let brought = Brought {
            opcode: op.opcode,
            attrs: attrs.map(|(k, v)| (k.clone(), v.clone())).collect(),
            tensor,
        };
        let lane = (over, members, direct);
        let meetings = self.lanes.entry(lane.clone()).or_default();
        let position = match meetings.iter().position(|m| m.brought[member].is_none()) {
            Some(p) => p,
            None => {
                meetings.push(Meeting { brought: vec![None; lane.1.len()], results: None });
                meetings.len() - 1
            }
        };
        let meeting = &mut meetings[position];
        let other = meeting.brought.iter().enumerate().find_map(|(i, b)| Some((i, b.as_ref()?)));
        if let Some((i, other)) = other
            && !direct
            && !other.agrees(&brought)
        {
            return Err(Ok(Fault::Mismatch {
                here: (lane.1[i], other.show(over)),
                there: (rank, brought.show(over)),
            }));
        }
        meeting.brought[member] = Some(brought);
        if meeting.brought.iter().all(Option::is_some) {
            let all: Vec<Brought> = meeting.brought.iter().flatten().cloned().collect();
            meeting.results = Some(meet(over, &all).map_err(Err)?);
        }
        Ok(Ticket { lane, position, member, opcode: op.opcode })
    }

    /// Where an issued collective stands.
    pub(crate) fn state(&self, t: &Ticket) -> State {
        let meeting = self.lanes.get(&t.lane).and_then(|l| l.get(t.position));
        match meeting.and_then(|m| m.results.as_ref()) {
            None => State::Open,
            Some(_) if t.opcode == Opcode::Send => State::Done(None),
            Some(results) => State::Done(results.get(t.member).cloned()),
        }
    }

    /// In words: what is waited for, and who is missing.
    pub(crate) fn describe(&self, t: &Ticket) -> String {
        let (over, members, _) = &t.lane;
        let meeting = self.lanes.get(&t.lane).and_then(|l| l.get(t.position));
        let missing: Vec<String> = members
            .iter()
            .enumerate()
            .filter(|(i, _)| meeting.is_none_or(|m| m.brought[*i].is_none()))
            .map(|(_, r)| r.to_string())
            .collect();
        format!("{} number {} over {over}, rank {} missing", t.opcode.name(), t.position, missing.join(", "))
    }

    /// A collective that some members issued and others never will.
    pub(crate) fn unfinished(&self) -> Option<Ticket> {
        self.lanes.iter().find_map(|(lane, meetings)| {
            let position = meetings.iter().position(|m| m.results.is_none())?;
            let (member, b) =
                meetings[position].brought.iter().enumerate().find_map(|(i, b)| Some((i, b.as_ref()?)))?;
            Some(Ticket { lane: lane.clone(), position, member, opcode: b.opcode })
        })
    }
}

impl Ticket {
    /// The rank that issued it.
    pub(crate) fn rank(&self) -> Rank {
        self.lane.1[self.member]
    }
}

impl Brought {
    fn agrees(&self, other: &Brought) -> bool {
        self.opcode == other.opcode && self.attrs == other.attrs
    }

    fn show(&self, over: Group) -> String {
        let attrs: Vec<String> = self.attrs.iter().map(|(k, v)| format!("{k}={v:?}")).collect();
        format!("{} over {over} {{{}}}", self.opcode.name(), attrs.join(", "))
    }

    fn int(&self, name: &str) -> Result<usize, String> {
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

/// Results of all members, from what all brought, by position.
fn meet(over: Group, all: &[Brought]) -> Result<Vec<Tensor>, String> {
    let n = all.len();
    let first = &all[0];
    let tensors: Vec<Tensor> = all.iter().filter_map(|b| b.tensor.clone()).collect();
    if tensors.is_empty() {
        return Err("nobody brought a tensor".to_string());
    }
    let shapes = || tensors.iter().map(|t| format!("{:?}", t.shape())).collect::<Vec<_>>().join(" and ");
    match first.opcode {
        Opcode::AllGather | Opcode::ReduceScatter | Opcode::AllToAll if over == Group::World => {
            Err("over world no rank's piece of a dim is told by its layout".to_string())
        }
        Opcode::AllReduce => Ok(vec![reduce(&tensors, first.is_max())?; n]),
        Opcode::AllGather => {
            let dim = first.int("dim")?;
            if tensors.iter().any(|t| t.shape() != tensors[0].shape()) {
                return Err(format!("pieces to gather differ: {}", shapes()));
            }
            let whole = Tensor::concat(dim, &tensors)
                .ok_or_else(|| format!("no dim {dim} to gather: {}", shapes()))?;
            Ok(vec![whole; n])
        }
        Opcode::ReduceScatter => {
            let dim = first.int("dim")?;
            let whole = reduce(&tensors, first.is_max())?;
            let extent = *whole.shape().get(dim).ok_or_else(|| format!("no dim {dim}: {}", shapes()))?;
            if !extent.is_multiple_of(n) {
                return Err(format!("dim {dim} of extent {extent} over {n} ranks"));
            }
            let each = extent / n;
            (0..n).map(|i| whole.slice(dim, i * each, each).ok_or_else(|| "slice".to_string())).collect()
        }
        Opcode::AllToAll => {
            let (split_dim, concat) = (first.int("split")?, first.int("concat")?);
            let unit = first.int("unit").unwrap_or(1).max(1);
            (0..n)
                .map(|to| {
                    let pieces: Option<Vec<Tensor>> =
                        tensors.iter().map(|t| piece(t, split_dim, unit, n, to)).collect();
                    pieces.and_then(|p| Tensor::concat(concat, &p))
                })
                .collect::<Option<Vec<_>>>()
                .ok_or_else(|| format!("cannot exchange {}: split {split_dim}, concat {concat}", shapes()))
        }
        Opcode::Broadcast => {
            let root = first.int("root")?;
            let from = tensors.get(root).ok_or_else(|| format!("root {root} of {n} ranks"))?;
            Ok(vec![from.clone(); n])
        }
        // The sender's tensor is the only one brought.
        Opcode::Send => Ok(vec![tensors[0].clone(); n]),
        other => Err(format!("{} is no collective", other.name())),
    }
}

/// Piece `at` of `parts` of a dim cut in whole units; the first pieces are a unit longer where it does not divide.
pub(crate) fn piece(t: &Tensor, dim: usize, unit: usize, parts: usize, at: usize) -> Option<Tensor> {
    let extent = *t.shape().get(dim)?;
    if unit == 0 || !extent.is_multiple_of(unit) {
        return None;
    }
    let (start, len) = split((extent / unit) as u64, u32::try_from(parts).ok()?, u32::try_from(at).ok()?);
    t.slice(dim, start as usize * unit, len as usize * unit)
}

fn reduce(tensors: &[Tensor], max: bool) -> Result<Tensor, String> {
    let mut out = tensors[0].clone();
    for t in &tensors[1..] {
        if t.shape() != out.shape() {
            return Err(format!("terms to reduce differ: {:?} and {:?}", out.shape(), t.shape()));
        }
        for (o, x) in out.data_mut().iter_mut().zip(t.data()) {
            *o = if max { o.max(*x) } else { *o + x };
        }
    }
    Ok(out)
}
