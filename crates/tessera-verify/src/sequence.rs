//! Every member of a group calls the same collectives, in the same order, with the same arguments.

use std::collections::HashMap;

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Mismatch, Step};

use crate::meet::{self, Meetings};
use crate::say;

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
    title: "members of a group disagree about the count",
    page: "The members call the same collective with tensors of different size. With NCCL that is undefined \
behaviour: a hang, a crash, or a silently wrong tail. Extents are local, except that a dim sharded over the group's \
own axis is shown with its global extent; uneven exchanges are right when that and the unit agree. Sends and receives show \
what the rank holds.\n\n\
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
would wait for it for ever. The message names the first call that is missing; among equal calls in a row it cannot know which one was \
skipped, and names the last. For a send without a receive, or a \
receive without a send, the other side is the one that lacks it.\n\n\
Typical causes: a role that skips an op for its layer range, a phase given to a subset of the ranks, or an early exit \
on one side of a pipeline.",
};
/// A send and its receive differ.
pub static T0308: Code = Code {
    id: "T0308",
    title: "send and receive do not match",
    page: "The n-th send from one rank to another over one group meets the n-th receive there. Their dtype and count must \
be equal; the receiver would otherwise read past the message, wait for the rest of it, or take bytes for another type.\n\n\
Check the order of the receives too: two swapped receives of different shapes show up here.",
};

/// Equal counts, other shapes.
pub static T0333: Code = Code {
    id: "T0333",
    title: "same count, but another shape or layout",
    page: "Both sides move the same number of elements of the same dtype, so nothing hangs and no library complains; but \
one side takes them for [4, 8] and the other for [8, 4], or for a piece of another dim. Rows arrive where columns \
belong, on some ranks only.\n\nGive both roles the same type. A program that means to reinterpret the bytes has no op for it.",
};
/// Captured here, eager there.
pub static T0334: Code = Code {
    id: "T0334",
    title: "collective is captured on one member and eager, or of another graph, on another",
    page: "Whether a collective is captured into a graph is a property that all members share: a rank that replays it and \
a rank that launches it eagerly use the communicator in two ways and wait for each other. Where all capture it, each must \
replay the graph of that same capture; graphs are compared by name (`graph = \"denoise\"`).\n\n\
The usual cause is a decision taken per rank: padding to a captured size from a local count, a capture that failed on \
one rank, or a flag that one host lacks. Decide once, in the plan.",
};

/// Carried by two means.
pub static T0344: Code = Code {
    id: "T0344",
    title: "members of a group disagree about what carries a collective",
    page: "`via` says by what a collective is moved: \"kernels\" over peers' memory, \"nccl\", or, where it is not written, the \
better of both. One member would wait in NCCL for another that waits in peers' memory: a hang, although op, type and count \
agree.\n\n\
Lower all roles with the same `[exchange]` of the mapping; in a program written by hand, write the same `via` on a send and its \
receive, and on every member's end of a collective.",
};

/// Who can say what the numbers of [`Meetings`] stand for.
pub(crate) trait Witness {
    /// What is compared.
    fn meetings(&self) -> &Meetings;
    /// The group of a line without its members: `tp`.
    fn group(&self, line: usize) -> String;
    /// A rank and what it runs.
    fn title(&self, rank: u32) -> String;
    /// A launch, for a picture.
    fn step(&self, rank: u32, at: usize) -> Step;
    /// A launch with everything that is compared.
    fn full(&self, rank: u32, at: usize) -> String;
    /// Adds the place of a launch.
    fn at(&self, d: Diagnostic, rank: u32, at: usize, says: String) -> Diagnostic;
    /// The first thing in which two launches differ, and its code.
    fn difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str);
}

/// Lines whose members do not launch the same.
pub(crate) fn check(w: &impl Witness) -> Diagnostics {
    let found = w.meetings().departures();
    let one = |(line, times): &(usize, usize)| {
        if w.meetings().lines[*line].pair { pair_differs(w, *line) } else { group_differs(w, *line, *times) }
    };
    found.iter().map(one).collect()
}

/// A member of a line with what it launches there.
struct Member<'a> {
    rank: u32,
    channel: Option<u32>,
    sequence: &'a [u32],
}

impl Member<'_> {
    /// Index of its n-th launch on the line.
    fn nth(&self, w: &impl Witness, n: usize) -> Option<usize> {
        w.meetings().scripts[w.meetings().role_of[self.rank as usize]].nth(self.channel?, n)
    }
}

fn members<'a>(w: &'a impl Witness, line: usize) -> Vec<Member<'a>> {
    let m = w.meetings();
    let one =
        |member: &meet::Member| Member { rank: member.0, channel: member.1, sequence: m.sequence(*member) };
    m.lines[line].members.iter().map(one).collect()
}

/// First position at which two sequences differ.
fn first_difference(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).position(|(x, y)| x != y).unwrap_or(a.len().min(b.len()))
}

fn group_differs(w: &impl Witness, line: usize, times: usize) -> Diagnostic {
    let all = members(w, line);
    // Most members are taken to be right, and among equals the lowest rank.
    let mut votes: HashMap<&[u32], usize> = HashMap::new();
    all.iter().for_each(|m| *votes.entry(m.sequence).or_default() += 1);
    let right = all.iter().max_by_key(|m| (votes[m.sequence], std::cmp::Reverse(m.rank)));
    let wrong = |r: &Member<'_>| all.iter().filter(|m| m.sequence != r.sequence).map(|m| m.rank).collect();
    let wrong: Vec<u32> = right.map(wrong).unwrap_or_default();
    let differs = |r: &Member<'_>| {
        let odd = all.iter().filter(|m| m.sequence != r.sequence);
        odd.min_by_key(|m| (first_difference(m.sequence, r.sequence), m.rank))
    };
    let (Some(right), Some(odd)) = (right, right.and_then(differs)) else {
        return Diagnostic::error(&T0301, "equal sequences compared as different");
    };
    let at = first_difference(right.sequence, odd.sequence);
    let ranks: Vec<u32> = all.iter().map(|m| m.rank).collect();
    let group = w.group(line);
    let whole = format!("position {at} of the {group} group of {}", say::numbers(&ranks));
    let place = |d: Diagnostic, m: &Member<'_>, note: &str| match m.nth(w, at) {
        Some(i) => w.at(d, m.rank, i, format!("{note}{}", w.full(m.rank, i))),
        None => d.at(w.title(m.rank), "its sequence ends before this"),
    };
    let (here, there) = (right.nth(w, at), odd.nth(w, at));
    let (mut d, field) = if right.sequence.len() == odd.sequence.len()
        && let (Some(a), Some(b)) = (here, there)
    {
        let (code, field) = w.difference((right.rank, a), (odd.rank, b));
        let message = format!("rank {} departs from rank {} in the {field} at {whole}", odd.rank, right.rank);
        (place(place(Diagnostic::error(code, message), right, ""), odd, ""), field)
    } else {
        // A shorter sequence lacks the other side's op at the first difference.
        let (lacks, has) =
            if odd.sequence.len() < right.sequence.len() { (odd, right) } else { (right, odd) };
        let missing = has.nth(w, at).map_or("a collective".to_string(), |i| w.step(has.rank, i).what);
        let d = Diagnostic::error(&T0307, format!("rank {} lacks {missing} at {whole}", lacks.rank));
        let d = place(place(d, has, "calls "), lacks, "has here ").note(format!(
            "rank {} calls {}, rank {} calls {} in all",
            has.rank,
            has.sequence.len(),
            lacks.rank,
            lacks.sequence.len()
        ));
        (d, "number of calls")
    };
    let side = |m: &Member<'_>, i: Option<usize>| (m.rank, i.map(|i| w.step(m.rank, i)));
    d = d.proof(Counterexample::Mismatch(Mismatch {
        group: format!("{group} of {}", say::numbers(&ranks)),
        position: at,
        field: field.to_string(),
        sides: [side(right, here), side(odd, there)],
    }));
    let agrees = |m: &&Member<'_>| m.rank != right.rank && m.sequence == right.sequence;
    let agree: Vec<u32> = all.iter().filter(agrees).map(|m| m.rank).collect();
    if !agree.is_empty() {
        let verb = if agree.len() == 1 { "agrees" } else { "agree" };
        d = d.note(format!("{} {verb} with rank {}", say::numbers(&agree), right.rank));
    }
    if wrong.len() > 1 {
        d = d.note(format!("{} of the group depart from rank {}", say::numbers(&wrong), right.rank));
    }
    if times > 1 {
        d = d.note(format!(
            "{} further groups of {group} with the same roles differ in the same way",
            times - 1
        ));
    }
    d
}

/// Sends from one rank to another against the receives there.
fn pair_differs(w: &impl Witness, line: usize) -> Diagnostic {
    let all = members(w, line);
    let [from, to] = &all[..] else {
        return Diagnostic::error(&T0308, "a pair without two sides");
    };
    let at = first_difference(from.sequence, to.sequence);
    let (sent, taken) = (from.nth(w, at), to.nth(w, at));
    let side = |m: &Member<'_>, i: Option<usize>| (m.rank, i.map(|i| w.step(m.rank, i)));
    let proof = |d: Diagnostic, field: &str| {
        d.proof(Counterexample::Mismatch(Mismatch {
            group: format!("{} from rank {} to rank {}", w.group(line), from.rank, to.rank),
            position: at,
            field: field.to_string(),
            sides: [side(from, sent), side(to, taken)],
        }))
    };
    if let (Some(a), Some(b)) = (sent, taken) {
        let (code, field) = w.difference((from.rank, a), (to.rank, b));
        let code = if [T0333.id, T0334.id, T0344.id].contains(&code.id) { code } else { &T0308 };
        let message = format!(
            "send {at} of rank {} to rank {} differs from its receive in the {field}",
            from.rank, to.rank
        );
        let d = w.at(Diagnostic::error(code, message), from.rank, a, w.full(from.rank, a));
        return proof(w.at(d, to.rank, b, w.full(to.rank, b)), field);
    }
    let (has, lacks, word) = if sent.is_some() { (from, to, "receive") } else { (to, from, "send") };
    let Some(i) = has.nth(w, at) else {
        return Diagnostic::error(&T0308, "equal pairs compared as different");
    };
    let op = w.step(has.rank, i).op;
    let message = format!("rank {} lacks the {word} that meets {op} {at} of rank {}", lacks.rank, has.rank);
    let d = w.at(Diagnostic::error(&T0307, message), has.rank, i, w.full(has.rank, i));
    proof(d.at(w.title(lacks.rank), format!("has {at} against {}", has.sequence.len())), "number of calls")
}
