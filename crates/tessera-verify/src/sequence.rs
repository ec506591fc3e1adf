//! Checks that every member of a group calls the same collectives in the same order with the same
//! arguments.

use std::collections::HashMap;

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Mismatch, RankCollective};

use crate::codes::{T0301, T0307, T0308, T0333, T0334, T0344};
use crate::display;
use crate::matching::{self, LaunchSequences};

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
    /// Adds a label that locates a rank's launch `at` by program or trace and by stream.
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

/// A member of a communicator with the signatures of its launches on that communicator.
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

    /// Returns the member's side of a counterexample.
    fn mismatch_side(&self, w: &impl SequenceSource, launch: Option<usize>) -> (u32, Option<RankCollective>) {
        (self.rank, launch.map(|i| w.launch_step(self.rank, i)))
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
    let Some((reference, divergent)) = choose_compared_members(&all) else {
        return Diagnostic::error(&T0301, "equal sequences compared as different");
    };
    let at = first_difference(reference.sequence, divergent.sequence);
    let ranks: Vec<u32> = all.iter().map(|m| m.rank).collect();
    let group = w.group_name(communicator);
    let (d, field) = MemberDivergence {
        source: w,
        reference,
        divergent,
        at,
        position_text: format!(
            "position {at} of the {group} group of {}",
            display::list_rank_numbers(&ranks)
        ),
    }
    .describe();
    let d = d.with_counterexample(Counterexample::Mismatch(Mismatch {
        group: format!("{group} of {}", display::list_rank_numbers(&ranks)),
        position: at,
        field: field.to_string(),
        sides: [reference, divergent].map(|m| m.mismatch_side(w, m.nth_launch(w, at))),
    }));
    let d = with_majority_notes(d, &all, reference);
    if group_count <= 1 {
        return d;
    }
    d.with_note(format!(
        "{} further groups of {group} with the same roles differ in the same way",
        group_count - 1
    ))
}

/// Returns the reference and the member that differs from it first; `None` if all are equal.
fn choose_compared_members<'a>(
    all: &'a [MemberSequence<'a>],
) -> Option<(&'a MemberSequence<'a>, &'a MemberSequence<'a>)> {
    // The majority of the members, and among equals the lowest rank, is taken as the reference.
    let mut votes: HashMap<&[u32], usize> = HashMap::new();
    all.iter().for_each(|m| *votes.entry(m.sequence).or_default() += 1);
    let reference = all.iter().max_by_key(|m| (votes[m.sequence], std::cmp::Reverse(m.rank)))?;
    let divergent = all.iter().filter(|m| m.sequence != reference.sequence);
    Some((reference, divergent.min_by_key(|m| (first_difference(m.sequence, reference.sequence), m.rank))?))
}

/// Notes which other members agree with the reference and which differ from it.
fn with_majority_notes(
    mut d: Diagnostic,
    all: &[MemberSequence<'_>],
    reference: &MemberSequence<'_>,
) -> Diagnostic {
    let (agree, differ): (Vec<&MemberSequence<'_>>, Vec<_>) =
        all.iter().partition(|m| m.sequence == reference.sequence);
    let agree: Vec<u32> = agree.iter().map(|m| m.rank).filter(|rank| *rank != reference.rank).collect();
    let differ: Vec<u32> = differ.iter().map(|m| m.rank).collect();
    if !agree.is_empty() {
        let verb = if agree.len() == 1 { "agrees" } else { "agree" };
        d = d.with_note(format!(
            "{} {verb} with rank {}",
            display::list_rank_numbers(&agree),
            reference.rank
        ));
    }
    if differ.len() > 1 {
        d = d.with_note(format!(
            "{} of the group differ from rank {}",
            display::list_rank_numbers(&differ),
            reference.rank
        ));
    }
    d
}

/// Two members of a group and the first position at which their launches differ.
struct MemberDivergence<'a, S> {
    source: &'a S,
    reference: &'a MemberSequence<'a>,
    divergent: &'a MemberSequence<'a>,
    at: usize,
    /// The position and the group for messages.
    position_text: String,
}

impl<S: SequenceSource> MemberDivergence<'_, S> {
    /// Returns a diagnostic with both launches, and the name of the field in which they differ.
    fn describe(&self) -> (Diagnostic, &'static str) {
        let MemberDivergence { source, reference, divergent, at, position_text } = self;
        let same_length = reference.sequence.len() == divergent.sequence.len();
        if same_length
            && let (Some(a), Some(b)) =
                (reference.nth_launch(*source, *at), divergent.nth_launch(*source, *at))
        {
            let (code, field) = source.launch_difference((reference.rank, a), (divergent.rank, b));
            let message = format!(
                "rank {} differs from rank {} in the {field} at {position_text}",
                divergent.rank, reference.rank
            );
            let d = self.with_call_label(Diagnostic::error(code, message), reference, "");
            return (self.with_call_label(d, divergent, ""), field);
        }
        // The shorter sequence lacks the other side's op at the first difference.
        let (lacks, has) = if divergent.sequence.len() < reference.sequence.len() {
            (divergent, reference)
        } else {
            (reference, divergent)
        };
        (self.missing_launch(lacks, has), "number of calls")
    }

    /// Reports a launch of `has` that `lacks` does not make.
    fn missing_launch(&self, lacks: &MemberSequence<'_>, has: &MemberSequence<'_>) -> Diagnostic {
        let missing = has
            .nth_launch(self.source, self.at)
            .map_or("a collective".to_string(), |i| self.source.launch_step(has.rank, i).description);
        let message = format!("rank {} lacks {missing} at {}", lacks.rank, self.position_text);
        let d = self.with_call_label(Diagnostic::error(&T0307, message), has, "calls ");
        self.with_call_label(d, lacks, "calls here ").with_note(format!(
            "in total, rank {} makes {} calls and rank {} makes {} calls",
            has.rank,
            has.sequence.len(),
            lacks.rank,
            lacks.sequence.len()
        ))
    }

    /// Adds a label with a member's launch at the position, after `note`.
    fn with_call_label(&self, d: Diagnostic, m: &MemberSequence<'_>, note: &str) -> Diagnostic {
        let w = self.source;
        match m.nth_launch(w, self.at) {
            Some(i) => w.with_launch_label(d, m.rank, i, format!("{note}{}", w.describe_launch(m.rank, i))),
            None => d.with_label(w.rank_title(m.rank), "the sequence of this rank ends before this position"),
        }
    }
}

/// Compares the sends of one rank to another with the receives there.
fn pair_divergence(w: &impl SequenceSource, communicator: usize) -> Diagnostic {
    let all = member_sequences(w, communicator);
    let [from, to] = &all[..] else {
        return Diagnostic::error(&T0308, "a send/receive pair without two sides");
    };
    let at = first_difference(from.sequence, to.sequence);
    let (sent, received) = (from.nth_launch(w, at), to.nth_launch(w, at));
    let proof = |d: Diagnostic, field: &str| {
        d.with_counterexample(Counterexample::Mismatch(Mismatch {
            group: format!("{} from rank {} to rank {}", w.group_name(communicator), from.rank, to.rank),
            position: at,
            field: field.to_string(),
            sides: [from.mismatch_side(w, sent), to.mismatch_side(w, received)],
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
