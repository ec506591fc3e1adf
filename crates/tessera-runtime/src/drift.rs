//! What ranks report of a call and of their weights, compared with the plan and with each other.

use std::collections::BTreeMap;

use tessera_base::Code;

use crate::Digest;
use crate::wire::{CallMeta, Observed, ShardPrint};

/// Different results.
pub(crate) static T0744: Code = Code {
    id: "T0744",
    title: "ranks drifted apart",
    page: "Every rank reports what it did: generator passes, collectives, their trace, the cache state they led to, and \
the output. One of these differs from the plan or from the other ranks. The message names the first key that differs \
and the rank that stands alone.\n\nDifferent counts or traces are another code path; a different state is a reset or \
a call that only one rank saw; equal traces and different outputs are arithmetic: another library, device or weight file \
on that rank.",
};
/// Weights that are not what they must be.
pub static T0754: Code = Code {
    id: "T0754",
    title: "a rank holds other weights than it should",
    page: "Each rank shows a digest of every weight slice that it loaded. The same slice must have the same digest on \
every rank that holds it; two different slices of one tensor with one digest are refused too, unless all their elements \
are equal, because that is what a shard looks like that was loaded twice. While a run goes on each rank hashes its weights \
again, a part per call, and compares with what it loaded.\n\nThe message names the tensor, the slices and the ranks. \
A difference at the hello is another weight file or a wrong slice on that rank; a change later is memory that was \
written: a merge or a reload on one rank alone, a kernel out of bounds, or faulty memory.",
};
/// Inputs that are not what was sent.
pub(crate) static T0759: Code = Code {
    id: "T0759",
    title: "the inputs of a call differ on a rank",
    page: "Every rank answers with a digest of the header, meta and tensors of the call as they arrived there. This one \
is not the digest of what the leader sent. The call was not committed, so nothing ran on the wrong inputs.\n\nThe \
bytes changed between the leader's memory and that rank's, and their checksums were made after the change: faulty \
memory, or a program between the two that writes messages anew.",
};

/// The first key in which a rank departs from the call, with both values.
pub(crate) fn departs(meta: Option<&CallMeta>, after: Digest, seen: &Observed) -> Option<String> {
    let calls = meta.map_or(0, |m| m.expected_generator_calls);
    let collectives = meta.map_or(0, |m| m.expected_collectives);
    let trace = meta.map_or(Digest::of_trace([]), |m| m.expected_trace_digest);
    let differs = |key: &str, planned: &dyn std::fmt::Display, seen: &dyn std::fmt::Display| {
        Some(format!("{key}: planned {planned}, observed {seen}"))
    };
    if seen.generator_calls != calls {
        differs("generator calls", &calls, &seen.generator_calls)
    } else if seen.collectives != collectives {
        differs("collectives", &collectives, &seen.collectives)
    } else if seen.trace != trace {
        differs("trace", &trace, &seen.trace)
    } else if seen.state != after {
        differs("cache state", &after, &seen.state)
    } else {
        None
    }
}

/// The rank whose output stands alone. With two ranks there is no majority, and both are named.
pub(crate) fn outputs_differ(done: &BTreeMap<u32, Observed>, silent: &[u32]) -> Option<(u32, String)> {
    let mut votes: BTreeMap<Digest, Vec<u32>> = BTreeMap::new();
    for (rank, o) in done.iter().filter(|(r, _)| !silent.contains(r)) {
        votes.entry(o.output).or_default().push(*rank);
    }
    if votes.len() < 2 {
        return None;
    }
    // The largest group wins, then the one that holds the lowest rank.
    let winner = votes.values().max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks[0])))?.clone();
    let odd = done.keys().copied().find(|r| !winner.contains(r) && !silent.contains(r))?;
    let says: Vec<String> = votes.iter().map(|(d, ranks)| format!("ranks {ranks:?} {d}")).collect();
    Some((odd, format!("output differs: {}", says.join(", "))))
}

/// Where the ranks' weights contradict each other: the odd rank, with words. A rank may also print slices that it does
/// not hold, as its own files have them.
#[must_use]
pub fn shards_differ(prints: &BTreeMap<u32, Vec<ShardPrint>>) -> Option<(u32, String)> {
    type Groups<K> = BTreeMap<K, Vec<u32>>;
    // The largest group wins, then the one that holds the lowest rank.
    fn odd<K: Ord>(groups: &Groups<K>) -> Option<u32> {
        let winner = groups.values().max_by_key(|r| (r.len(), std::cmp::Reverse(r[0])))?;
        let beside = groups.values().flatten().copied().filter(|r| !winner.contains(r)).min();
        beside.or_else(|| winner.iter().copied().max())
    }
    fn on(ranks: &[u32]) -> String {
        format!("rank {}", ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
    }
    let mut contents: BTreeMap<(&str, Digest), Groups<&str>> = BTreeMap::new();
    let mut slices: BTreeMap<(&str, &str), Groups<Digest>> = BTreeMap::new();
    for (rank, p) in prints.iter().flat_map(|(rank, list)| list.iter().map(move |p| (*rank, p))) {
        slices.entry((&p.tensor, &p.slice)).or_default().entry(p.digest).or_default().push(rank);
        if !p.constant {
            contents.entry((&p.tensor, p.digest)).or_default().entry(&p.slice).or_default().push(rank);
        }
    }
    // A shard loaded twice is also other bytes for a slice; the first says what happened.
    let mut twice = contents.iter().filter(|(_, groups)| groups.len() > 1);
    if let Some(((tensor, digest), groups)) = twice.next() {
        let says: Vec<String> = groups.iter().map(|(slice, r)| format!("{slice} on {}", on(r))).collect();
        let (says, more) = (says.join(" and "), more(twice.count()));
        return Some((
            odd(groups)?,
            format!("`{tensor}`: equal bytes for different slices: {says}, both {digest}{more}"),
        ));
    }
    let mut other = slices.iter().filter(|(_, groups)| groups.len() > 1);
    let ((tensor, slice), groups) = other.next()?;
    let says: Vec<String> = groups.iter().map(|(digest, r)| format!("{digest} on {}", on(r))).collect();
    let (says, more) = (says.join(", "), more(other.count()));
    Some((odd(groups)?, format!("`{tensor}` {slice}: different bytes for one slice: {says}{more}")))
}

fn more(count: usize) -> String {
    if count == 0 { String::new() } else { format!("; and {count} more pieces likewise") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(output: u8) -> Observed {
        Observed { trace: Digest::of_trace([]), output: Digest([output; 32]), ..Observed::default() }
    }

    #[test]
    fn the_rank_that_stands_alone_is_named() {
        let done = |outputs: &[u8]| (0u32..).zip(outputs.iter().map(|o| seen(*o))).collect();
        assert_eq!(outputs_differ(&done(&[5, 5, 5]), &[]), None);
        assert_eq!(outputs_differ(&done(&[5, 6, 5]), &[]).map(|(r, _)| r), Some(1));
        assert_eq!(outputs_differ(&done(&[6, 5, 5]), &[]).map(|(r, _)| r), Some(0));
        assert_eq!(
            outputs_differ(&done(&[5, 0, 5]), &[1]),
            None,
            "a rank that puts nothing out differs from none"
        );
        let (odd, text) = outputs_differ(&done(&[5, 6]), &[]).expect("differ");
        assert!(odd == 1 && text.contains("ranks [0]") && text.contains("ranks [1]"), "{text}");
    }

    fn print(slice: &str, digest: u8, constant: bool) -> ShardPrint {
        let digest = Digest([digest; 32]);
        ShardPrint { tensor: "blocks.0.ffn.0.weight".into(), slice: slice.into(), digest, constant }
    }

    #[test]
    fn shards_must_be_the_same_where_they_are_one_slice_and_differ_where_they_are_two() {
        let shards = |own: [ShardPrint; 3]| (0..).zip(own.map(|p| vec![p, print("all", 9, false)])).collect();
        let ok = [print("[0..4]", 1, false), print("[4..8]", 2, false), print("[0..4]", 1, false)];
        assert_eq!(shards_differ(&shards(ok.clone())), None);
        let mut other = ok.clone();
        other[2].digest = Digest([7; 32]);
        let (odd, text) = shards_differ(&shards(other)).expect("differ");
        assert!(odd == 2 && text.contains("blocks.0.ffn.0.weight") && text.contains("[0..4]"), "{text}");
        let mut twice = ok.clone();
        twice[1].digest = Digest([1; 32]);
        let (odd, text) = shards_differ(&shards(twice.clone())).expect("differ");
        assert!(odd == 1 && text.contains("[4..8] on rank 1") && text.contains("rank 0"), "{text}");
        for p in &mut twice {
            p.constant = true;
        }
        assert_eq!(shards_differ(&shards(twice)), None, "zeros are zeros");
    }

    #[test]
    fn the_first_key_is_named_with_both_values() {
        let mut other = seen(0);
        (other.collectives, other.state) = (2, Digest::of(b"x"));
        let text = departs(None, Digest::default(), &other);
        assert_eq!(text.as_deref(), Some("collectives: planned 0, observed 2"));
        assert_eq!(departs(None, Digest::default(), &seen(9)), None);
    }
}
