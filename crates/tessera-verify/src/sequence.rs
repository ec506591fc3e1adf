//! Checks that every member of a group calls the same collectives in the same order with the same
//! arguments.

use std::collections::HashMap;

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Mismatch, RankCollective};

use crate::display;
use crate::matching::{self, LaunchSequences};

/// Diagnostic for different ops at one position.
pub static T0301: Code = Code {
    id: "T0301",
    title: "members of a group call different collectives",
    page: "At one position of a group's sequence one rank calls, say, an all_reduce and another an all_gather, or the ranks make \
the same calls in different orders. The communication library does not check this: the ranks hang, or exchange bytes \
with different meanings.\n\n\
The message names the first position that differs. All earlier calls agree. Compare the programs from \
that position on: one role has moved, inserted or omitted a call there.",
};
/// Diagnostic for different element counts.
pub static T0302: Code = Code {
    id: "T0302",
    title: "members of a group disagree about the count",
    page: "The members call the same collective with tensors of different size. With NCCL that is undefined \
behaviour: a hang, a crash, or a silently wrong tail. Extents are local, except that a dim sharded over the group's \
own axis is shown with its global extent; uneven exchanges are correct if this extent and the unit agree. Sends and receives \
show the local extents of the rank.\n\n\
Usually one role was lowered for another sequence length, batch or fill level.",
};
/// Diagnostic for different element types.
pub static T0303: Code = Code {
    id: "T0303",
    title: "members of a group disagree about the dtype",
    page: "One rank reduces or gathers bf16 and another f32, for instance after a cast on one side only. Libraries \
do not check dtypes: the result is garbage without an error, or a hang, since byte counts differ.",
};
/// Diagnostic for different reductions.
pub static T0304: Code = Code {
    id: "T0304",
    title: "members of a group disagree about the reduction",
    page: "One rank sums while another takes the maximum, or sums in another order. Byte counts agree, so nothing hangs \
and no debug mode of the usual libraries reports it: from here on the ranks simply hold different numbers.",
};
/// Diagnostic for different roots.
pub static T0305: Code = Code {
    id: "T0305",
    title: "members of a group disagree about the root",
    page: "A broadcast distributes the value of one member, the root, named by its position on the axis. If two members name \
different roots, each waits for the other to send, or both send: a hang.",
};
/// Diagnostic for different tensor dims or units.
pub static T0306: Code = Code {
    id: "T0306",
    title: "members of a group disagree about the tensor dim",
    page: "A gather, scatter or all-to-all moves shards of a named tensor dim. With different dims (or split units) on \
different members, byte counts may still agree, and rows land where columns belong.",
};
/// Diagnostic for a missing call of one member.
pub static T0307: Code = Code {
    id: "T0307",
    title: "a member of a group lacks a collective",
    page: "One member's sequence is shorter: somewhere it omits a collective that the others call, and they \
would wait forever. The message names the first missing call; among consecutive equal calls the skipped one \
is unknown, and the message names the last. For a send without a receive, or a \
receive without a send, the diagnostic names the other side.\n\n\
Typical causes: a role that skips an op for its layer range, a phase given to a subset of the ranks, or an early exit \
on one side of a pipeline.",
};
/// Diagnostic for a send and a receive that differ.
pub static T0308: Code = Code {
    id: "T0308",
    title: "send and receive do not match",
    page: "The n-th send from one rank to another over one group matches the n-th receive there. Their dtype and count must \
be equal; the receiver would otherwise read past the message, wait for the rest of it, or misinterpret the \
bytes as another type.\n\n\
Check the order of the receives too: two swapped receives of different shapes raise this diagnostic.",
};

/// Diagnostic for equal counts with different shapes or layouts.
pub static T0333: Code = Code {
    id: "T0333",
    title: "same count, but different shape or layout",
    page: "Both sides move the same number of elements of the same dtype, so nothing hangs and no library complains; but \
one side reads them as [4, 8] and the other as [8, 4], or as a shard of another dim. Rows land where columns \
belong, on some ranks only.\n\nGive both roles the same type. The IR has no op that reinterprets bytes.",
};
/// Diagnostic for a collective that members capture into different graphs, or that one member
/// launches eagerly.
pub static T0334: Code = Code {
    id: "T0334",
    title: "members of a group disagree about graph capture",
    page: "Either all members capture a collective into a graph or none does: a rank that replays the collective and \
a rank that launches it eagerly use the communicator in two ways and wait for each other. If all capture it, each must \
replay the graph of that same capture; graphs are compared by name (`graph = \"denoise\"`).\n\n\
The usual cause is a decision made per rank: padding to a captured size from a local count, a capture that failed on \
one rank, or a flag that is missing on one host. Decide once, in the plan.",
};

/// Diagnostic for members that use different transports.
pub static T0344: Code = Code {
    id: "T0344",
    title: "members of a group disagree about the transport of a collective",
    page: "`transport` names the transport of a collective: \"p2p\" for peer-to-peer kernels, \"nccl\", or, if omitted, the \
better of both. One member would wait in NCCL for another that waits in peer memory: a hang, although op, type and count \
agree.\n\n\
Lower all roles with the same `[collectives]` of the mapping; in a program written by hand, set the same `transport` on a send and its \
receive, and on the collective of every member.",
};

/// Source of the launches that [`LaunchSequences`] numbers: it names and describes them in
/// diagnostics.
pub(crate) trait SequenceSource {
    /// Returns the launches and communicators to compare.
    fn launch_sequences(&self) -> &LaunchSequences;
    /// Returns the name of a communicator's group without its members, such as `tp`.
    fn group_name(&self, communicator: usize) -> String;
    /// Returns the name of a rank and of its program or trace.
    fn rank_title(&self, rank: u32) -> String;
    /// Returns a launch in the form of a counterexample.
    fn launch_step(&self, rank: u32, at: usize) -> RankCollective;
    /// Describes a launch with all compared fields.
    fn describe_launch(&self, rank: u32, at: usize) -> String;
    /// Adds a label at a launch.
    fn with_launch_label(&self, d: Diagnostic, rank: u32, at: usize, label: String) -> Diagnostic;
    /// Returns the code and the name of the first field in which two launches differ.
    fn launch_difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str);
}

/// Returns one diagnostic per set of communicators whose members launch different sequences.
pub(crate) fn check(source: &impl SequenceSource) -> Diagnostics {
    let found = source.launch_sequences().find_divergences();
    let one = |(line, times): &(usize, usize)| {
        if source.launch_sequences().communicators[*line].is_pair {
            pair_divergence(source, *line)
        } else {
            group_divergence(source, *line, *times)
        }
    };
    found.iter().map(one).collect()
}

/// A member of a communicator with its launches there.
struct MemberSequence<'a> {
    rank: u32,
    endpoint: Option<u32>,
    sequence: &'a [u32],
}

impl MemberSequence<'_> {
    /// Returns the index of the member's n-th launch on the communicator.
    fn nth_launch(&self, w: &impl SequenceSource, n: usize) -> Option<usize> {
        w.launch_sequences().launches_by_role[w.launch_sequences().role_of[self.rank as usize]]
            .nth_launch(self.endpoint?, n)
    }
}

fn member_sequences<'a>(w: &'a impl SequenceSource, communicator: usize) -> Vec<MemberSequence<'a>> {
    let m = w.launch_sequences();
    let one = |member: &matching::RankEndpoint| MemberSequence {
        rank: member.0,
        endpoint: member.1,
        sequence: m.member_sequence(*member),
    };
    m.communicators[communicator].members.iter().map(one).collect()
}

/// Returns the first position at which two sequences differ.
fn first_difference(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).position(|(x, y)| x != y).unwrap_or(a.len().min(b.len()))
}

fn group_divergence(w: &impl SequenceSource, communicator: usize, group_count: usize) -> Diagnostic {
    let all = member_sequences(w, communicator);
    // The majority of the members, and among equals the lowest rank, is taken as the reference.
    let mut votes: HashMap<&[u32], usize> = HashMap::new();
    all.iter().for_each(|m| *votes.entry(m.sequence).or_default() += 1);
    let reference = all.iter().max_by_key(|m| (votes[m.sequence], std::cmp::Reverse(m.rank)));
    let wrong =
        |r: &MemberSequence<'_>| all.iter().filter(|m| m.sequence != r.sequence).map(|m| m.rank).collect();
    let wrong: Vec<u32> = reference.map(wrong).unwrap_or_default();
    let differs = |r: &MemberSequence<'_>| {
        let divergent = all.iter().filter(|m| m.sequence != r.sequence);
        divergent.min_by_key(|m| (first_difference(m.sequence, r.sequence), m.rank))
    };
    let (Some(reference), Some(divergent)) = (reference, reference.and_then(differs)) else {
        return Diagnostic::error(&T0301, "equal sequences compared as different");
    };
    let at = first_difference(reference.sequence, divergent.sequence);
    let ranks: Vec<u32> = all.iter().map(|m| m.rank).collect();
    let group = w.group_name(communicator);
    let position_text =
        format!("position {at} of the {group} group of {}", display::list_rank_numbers(&ranks));
    let label_call = |d: Diagnostic, m: &MemberSequence<'_>, note: &str| match m.nth_launch(w, at) {
        Some(i) => w.with_launch_label(d, m.rank, i, format!("{note}{}", w.describe_launch(m.rank, i))),
        None => d.with_label(w.rank_title(m.rank), "the sequence of this rank ends before this position"),
    };
    let (reference_launch, divergent_launch) = (reference.nth_launch(w, at), divergent.nth_launch(w, at));
    let (mut d, field) = if reference.sequence.len() == divergent.sequence.len()
        && let (Some(a), Some(b)) = (reference_launch, divergent_launch)
    {
        let (code, field) = w.launch_difference((reference.rank, a), (divergent.rank, b));
        let message = format!(
            "rank {} differs from rank {} in the {field} at {position_text}",
            divergent.rank, reference.rank
        );
        (label_call(label_call(Diagnostic::error(code, message), reference, ""), divergent, ""), field)
    } else {
        // The shorter sequence lacks the other side's op at the first difference.
        let (lacks, has) = if divergent.sequence.len() < reference.sequence.len() {
            (divergent, reference)
        } else {
            (reference, divergent)
        };
        let missing = has
            .nth_launch(w, at)
            .map_or("a collective".to_string(), |i| w.launch_step(has.rank, i).description);
        let d = Diagnostic::error(&T0307, format!("rank {} lacks {missing} at {position_text}", lacks.rank));
        let d = label_call(label_call(d, has, "calls "), lacks, "calls here ").with_note(format!(
            "in total, rank {} makes {} calls and rank {} makes {} calls",
            has.rank,
            has.sequence.len(),
            lacks.rank,
            lacks.sequence.len()
        ));
        (d, "number of calls")
    };
    let side = |m: &MemberSequence<'_>, i: Option<usize>| (m.rank, i.map(|i| w.launch_step(m.rank, i)));
    d = d.with_counterexample(Counterexample::Mismatch(Mismatch {
        group: format!("{group} of {}", display::list_rank_numbers(&ranks)),
        position: at,
        field: field.to_string(),
        sides: [side(reference, reference_launch), side(divergent, divergent_launch)],
    }));
    let agrees = |m: &&MemberSequence<'_>| m.rank != reference.rank && m.sequence == reference.sequence;
    let agree: Vec<u32> = all.iter().filter(agrees).map(|m| m.rank).collect();
    if !agree.is_empty() {
        let verb = if agree.len() == 1 { "agrees" } else { "agree" };
        d = d.with_note(format!(
            "{} {verb} with rank {}",
            display::list_rank_numbers(&agree),
            reference.rank
        ));
    }
    if wrong.len() > 1 {
        d = d.with_note(format!(
            "{} of the group differ from rank {}",
            display::list_rank_numbers(&wrong),
            reference.rank
        ));
    }
    if group_count > 1 {
        d = d.with_note(format!(
            "{} further groups of {group} with the same roles differ in the same way",
            group_count - 1
        ));
    }
    d
}

/// Compares the sends of one rank to another with the receives there.
fn pair_divergence(w: &impl SequenceSource, communicator: usize) -> Diagnostic {
    let all = member_sequences(w, communicator);
    let [from, to] = &all[..] else {
        return Diagnostic::error(&T0308, "a send/receive pair without two sides");
    };
    let at = first_difference(from.sequence, to.sequence);
    let (sent, received) = (from.nth_launch(w, at), to.nth_launch(w, at));
    let side = |m: &MemberSequence<'_>, i: Option<usize>| (m.rank, i.map(|i| w.launch_step(m.rank, i)));
    let proof = |d: Diagnostic, field: &str| {
        d.with_counterexample(Counterexample::Mismatch(Mismatch {
            group: format!("{} from rank {} to rank {}", w.group_name(communicator), from.rank, to.rank),
            position: at,
            field: field.to_string(),
            sides: [side(from, sent), side(to, received)],
        }))
    };
    if let (Some(a), Some(b)) = (sent, received) {
        let (code, field) = w.launch_difference((from.rank, a), (to.rank, b));
        let code = if [T0333.id, T0334.id, T0344.id].contains(&code.id) { code } else { &T0308 };
        let message = format!(
            "send {at} of rank {} to rank {} and its receive differ in the {field}",
            from.rank, to.rank
        );
        let d = w.with_launch_label(
            Diagnostic::error(code, message),
            from.rank,
            a,
            w.describe_launch(from.rank, a),
        );
        return proof(w.with_launch_label(d, to.rank, b, w.describe_launch(to.rank, b)), field);
    }
    let (has, lacks, missing_op) = if sent.is_some() { (from, to, "receive") } else { (to, from, "send") };
    let Some(i) = has.nth_launch(w, at) else {
        return Diagnostic::error(&T0308, "equal pairs compared as different");
    };
    let op = w.launch_step(has.rank, i).op;
    let message =
        format!("rank {} lacks the {missing_op} that matches {op} {at} of rank {}", lacks.rank, has.rank);
    let d =
        w.with_launch_label(Diagnostic::error(&T0307, message), has.rank, i, w.describe_launch(has.rank, i));
    proof(
        d.with_label(
            w.rank_title(lacks.rank),
            format!("has {at} matching calls, the peer {}", has.sequence.len()),
        ),
        "number of calls",
    )
}
