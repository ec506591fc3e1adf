//! Every member of a group calls the same collectives, in the same order, with the same arguments.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::Opcode;
use tessera_mesh::{Axis, Rank};

use crate::phase::Ranks;
use crate::say;
use crate::trace::Signature;

/// Two ops at one position.
pub static T0301: Code = Code {
    id: "T0301",
    title: "members of a group call different collectives",
    page: "At one position of a group's sequence one rank calls, say, an all_reduce and another an all_gather, or the \
same calls stand in another order. The communication library does not check this: the ranks hang, or exchange bytes \
that mean different things.\n\n\
The message names the first position that differs. Everything before it agrees, so look at what each program does \
just before that op: an op moved, inserted or left out on one role.",
};
/// Counts, shapes or layouts differ.
pub static T0302: Code = Code {
    id: "T0302",
    title: "members of a group disagree about count or shape",
    page: "The members call the same collective with tensors of different size or layout. With NCCL that is undefined \
behaviour: a hang, a crash, or a silently wrong tail. Extents are local, except that a dim sharded over the group's \
own axis is shown with its global extent; uneven exchanges are right when that and the unit agree.\n\n\
Usually one role was lowered for another sequence length, batch or fill level.",
};
/// Element types differ.
pub static T0303: Code = Code {
    id: "T0303",
    title: "members of a group disagree about the dtype",
    page: "One rank reduces or gathers bf16 and another f32, for instance after a cast on one side only. Libraries \
take the bytes as they come: the result is garbage without an error, or a hang, since byte counts differ.",
};
/// Reductions differ.
pub static T0304: Code = Code {
    id: "T0304",
    title: "members of a group disagree about the reduction",
    page: "One rank sums while another takes the maximum, or sums in another order. Byte counts agree, so nothing hangs \
and no debug mode of the usual libraries notices: the ranks simply hold different numbers from here on.",
};
/// Roots differ.
pub static T0305: Code = Code {
    id: "T0305",
    title: "members of a group disagree about the root",
    page: "A broadcast takes the value of one member, the root, named by its position on the axis. If two members name \
two roots, each waits for the other to send, or both send: a hang.",
};
/// Tensor dims or units differ.
pub static T0306: Code = Code {
    id: "T0306",
    title: "members of a group disagree about the tensor dim",
    page: "A gather, scatter or exchange moves pieces of a named tensor dim. With different dims (or units of a split) on \
different members, byte counts may still agree, and rows arrive where columns belong.",
};
/// A member lacks a call.
pub static T0307: Code = Code {
    id: "T0307",
    title: "a member of a group lacks a collective",
    page: "One member's sequence is shorter: somewhere it does not call a collective that the others call, and they \
would wait for it for ever. The message names the first call that is missing. For a send without a receive, or a \
receive without a send, the other side is the one that lacks it.\n\n\
Typical causes: a role that skips an op for its layer range, a phase given to a subset of the ranks, or an early exit \
on one side of a pipeline.",
};
/// A send and its receive differ.
pub static T0308: Code = Code {
    id: "T0308",
    title: "send and receive do not match",
    page: "The n-th send from one rank to another meets the n-th receive there. Their dtype, local shape and layout must \
be equal; the receiver would otherwise read past the message or take bytes for another type.\n\n\
Check the order of the receives too: two swapped receives of different shapes show up here.",
};

/// What the comparison found: refusals, and where none, which collectives of the roles meet.
#[derive(Default)]
pub(crate) struct Matched {
    pub(crate) diagnostics: Diagnostics,
    /// Pairs ((role, item), (role, item)) that are one collective on some group. Sparse: enough to join all.
    pub(crate) meets: Vec<[(usize, usize); 2]>,
}

pub(crate) fn check(ranks: &Ranks<'_>) -> Matched {
    let mut out = Matched::default();
    for axis in ranks.mesh.axes() {
        groups(ranks, axis, &mut out);
        pairs(ranks, axis, &mut out);
    }
    out
}

fn groups(ranks: &Ranks<'_>, axis: Axis, out: &mut Matched) {
    let sequences: Vec<Vec<usize>> = ranks
        .traces
        .iter()
        .map(|t| {
            (0..t.len()).filter(|i| t[*i].signature.axis == axis && !t[*i].signature.is_pair()).collect()
        })
        .collect();
    // Roles with equal sequences share a class; ids follow the order of roles, so they are the same everywhere.
    let mut classes: HashMap<Vec<&Signature>, usize> = HashMap::new();
    let class: Vec<usize> = sequences
        .iter()
        .enumerate()
        .map(|(role, s)| {
            let key = s.iter().map(|i| &ranks.traces[role][*i].signature).collect();
            let next = classes.len();
            *classes.entry(key).or_insert(next)
        })
        .collect();
    let mut refused: BTreeMap<Vec<usize>, (Vec<Rank>, u32)> = BTreeMap::new();
    let mut joined = BTreeSet::new();
    for group in ranks.mesh.groups(axis) {
        let roles: Vec<usize> = group.iter().map(|r| ranks.role_of[r.0 as usize]).collect();
        if roles.iter().any(|r| class[*r] != class[roles[0]]) {
            let mut key = roles.clone();
            key.sort_unstable();
            key.dedup();
            refused.entry(key).or_insert((group, 0)).1 += 1;
            continue;
        }
        for r in &roles[1..] {
            if *r != roles[0] && joined.insert((roles[0], *r)) {
                let both = sequences[roles[0]].iter().zip(&sequences[*r]);
                out.meets.extend(both.map(|(a, b)| [(roles[0], *a), (*r, *b)]));
            }
        }
    }
    for (group, times) in refused.values() {
        out.diagnostics.push(group_differs(ranks, axis, group, &sequences, &class, *times));
    }
}

fn group_differs(
    ranks: &Ranks<'_>,
    axis: Axis,
    group: &[Rank],
    sequences: &[Vec<usize>],
    class: &[usize],
    times: u32,
) -> Diagnostic {
    let role = |r: Rank| ranks.role_of[r.0 as usize];
    // Most members are taken to be right, and among equals the lowest rank.
    let votes = |c: usize| group.iter().filter(|r| class[role(**r)] == c).count();
    let right = group.iter().copied().max_by_key(|r| (votes(class[role(*r)]), std::cmp::Reverse(*r)));
    let right = right.unwrap_or_default();
    let item = |r: Rank, at: usize| sequences[role(r)].get(at).map(|i| &ranks.traces[role(r)][*i].signature);
    let length = |r: Rank| sequences[role(r)].len();
    let first = |r: Rank| (0..).find(|at| item(r, *at) != item(right, *at)).unwrap_or(0);
    let wrong: Vec<Rank> = group.iter().copied().filter(|r| class[role(*r)] != class[role(right)]).collect();
    let Some(odd) = wrong.iter().copied().min_by_key(|r| (first(*r), *r)) else {
        return Diagnostic::error(&T0301, "equal sequences compared as different");
    };
    let at = first(odd);
    let mut agree: Vec<Rank> =
        group.iter().copied().filter(|r| class[role(*r)] == class[role(right)]).collect();
    let whole = format!("position {at} of the {axis} group of {}", say::ranks(group));
    let place = |d: Diagnostic, r: Rank, note: &str| match (item(r, at), sequences[role(r)].get(at)) {
        (Some(s), Some(i)) => ranks.at(d, r, *i, format!("{note}{}", full(s))),
        _ => d.at(
            format!("rank {r}, {}", say::title(&ranks.programs[role(r)])),
            "its sequence ends before this",
        ),
    };
    let mut d = match (item(right, at), item(odd, at)) {
        (a, b) if length(right) != length(odd) => {
            // A shorter sequence lacks the other side's op at the first difference.
            let (lacks, has, missing) =
                if length(odd) < length(right) { (odd, right, a) } else { (right, odd, b) };
            let what = missing.map_or("a collective".to_string(), Signature::short);
            let d = Diagnostic::error(&T0307, format!("rank {lacks} lacks {what} at {whole}"));
            place(place(d, has, "calls "), lacks, "has here ").note(format!(
                "rank {has} calls {}, rank {lacks} calls {} in all",
                length(has),
                length(lacks)
            ))
        }
        (Some(a), Some(b)) => {
            let (code, field) = difference(a, b);
            let message = format!("rank {odd} departs from rank {right} in the {field} at {whole}");
            place(place(Diagnostic::error(code, message), right, ""), odd, "")
        }
        _ => Diagnostic::error(&T0307, format!("rank {odd} lacks a collective at {whole}")),
    };
    agree.retain(|r| *r != right);
    if !agree.is_empty() {
        d = d.note(format!("{} agree with rank {right}", say::ranks(&agree)));
    }
    if wrong.len() > 1 {
        d = d.note(format!("{} of the group depart from rank {right}", say::ranks(&wrong)));
    }
    if times > 1 {
        d = d.note(format!(
            "{} further groups of {axis} with the same roles differ in the same way",
            times - 1
        ));
    }
    d
}

/// A signature with all its fields, for comparing two by eye.
fn full(s: &Signature) -> String {
    let mut out = format!("{} {{{}}}", s.short(), s.layout());
    if let Some(r) = s.root {
        out += &format!(" root {r}");
    }
    for (name, at) in &s.dims {
        out += &format!(" {name} {at}");
    }
    out
}

/// The first field that differs and its code.
fn difference(a: &Signature, b: &Signature) -> (&'static Code, &'static str) {
    if a.opcode != b.opcode {
        (&T0301, "op")
    } else if a.dtype != b.dtype {
        (&T0303, "dtype")
    } else if a.reduction != b.reduction {
        (&T0304, "reduction")
    } else if a.root != b.root {
        (&T0305, "root")
    } else if a.dims != b.dims {
        (&T0306, "tensor dim")
    } else if a.extents != b.extents {
        (&T0302, "shape")
    } else {
        (&T0302, "layout")
    }
}

/// Sends from every rank to every peer against the receives there.
fn pairs(ranks: &Ranks<'_>, axis: Axis, out: &mut Matched) {
    let by_peer = |opcode: Opcode| -> Vec<BTreeMap<u32, Vec<usize>>> {
        let one = |trace: &Vec<crate::trace::Item>| {
            let mut map: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
            for (i, item) in trace.iter().enumerate().filter(|(_, t)| t.signature.axis == axis) {
                if let (true, Some(k)) = (item.signature.opcode == opcode, item.signature.peer) {
                    map.entry(k).or_default().push(i);
                }
            }
            map
        };
        ranks.traces.iter().map(one).collect()
    };
    let (sends, recvs) = (by_peer(Opcode::Send), by_peer(Opcode::Recv));
    let mut compared = BTreeSet::new();
    for rank in ranks.mesh.iter() {
        let (coord, role) = (ranks.mesh.coord_of(rank), ranks.role_of[rank.0 as usize]);
        let here = coord.on(axis);
        let other = |k: u32| {
            let peer = ranks.mesh.rank_at(coord.with(axis, k));
            (peer, ranks.role_of[peer.0 as usize])
        };
        for (k, sent) in &sends[role] {
            let (peer, theirs) = other(*k);
            if compared.insert((role, *k, theirs, here)) {
                let taken = recvs[theirs].get(&here).map_or(&[][..], Vec::as_slice);
                pair(ranks, (rank, sent), (peer, taken), out);
            }
        }
        for (k, taken) in &recvs[role] {
            let (peer, theirs) = other(*k);
            if !sends[theirs].contains_key(&here) && compared.insert((theirs, here, role, *k)) {
                pair(ranks, (peer, &[]), (rank, taken), out);
            }
        }
    }
}

fn pair(ranks: &Ranks<'_>, from: (Rank, &[usize]), to: (Rank, &[usize]), out: &mut Matched) {
    let role = |r: Rank| ranks.role_of[r.0 as usize];
    let signature = |r: Rank, i: usize| &ranks.traces[role(r)][i].signature;
    for (at, (s, t)) in from.1.iter().zip(to.1).enumerate() {
        let (a, b) = (signature(from.0, *s), signature(to.0, *t));
        let data = |x: &Signature| (x.dtype, x.extents.clone(), x.layout);
        if data(a) != data(b) {
            let field = if a.dtype != b.dtype {
                "dtype"
            } else if a.extents != b.extents {
                "shape"
            } else {
                "layout"
            };
            let message = format!(
                "send {at} of rank {} to rank {} differs from its receive in the {field}",
                from.0, to.0
            );
            let d = ranks.at(Diagnostic::error(&T0308, message), from.0, *s, full(a));
            out.diagnostics.push(ranks.at(d, to.0, *t, full(b)));
            return;
        }
    }
    if from.1.len() != to.1.len() {
        let (has, lacks) = if from.1.len() > to.1.len() { (from, to) } else { (to, from) };
        let at = lacks.1.len();
        let word = if from.1.len() > to.1.len() { "receive" } else { "send" };
        let what = signature(has.0, has.1[at]);
        let message = format!(
            "rank {} lacks the {word} that meets {} {at} of rank {}",
            lacks.0,
            what.opcode.name(),
            has.0
        );
        let d = ranks.at(Diagnostic::error(&T0307, message), has.0, has.1[at], full(what));
        out.diagnostics.push(d.at(
            format!("rank {}, {}", lacks.0, say::title(&ranks.programs[role(lacks.0)])),
            format!("has {at} against {}", has.1.len()),
        ));
        return;
    }
    let both = from.1.iter().zip(to.1);
    out.meets.extend(both.map(|(s, t)| [(role(from.0), *s), (role(to.0), *t)]));
}
