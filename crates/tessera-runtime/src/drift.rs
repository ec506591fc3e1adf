//! Checks that compare what the ranks report about a call and about their weights with the plan and
//! with each other.

use std::collections::BTreeMap;

use crate::Digest;
use crate::wire::{CallMeta, CallObservation, ShardFingerprint};

/// Returns the first key in which a rank's observation differs from the call, with the planned and
/// the observed value.
pub(crate) fn find_deviation(
    meta: Option<&CallMeta>,
    predicted_state: Digest,
    observed: &CallObservation,
) -> Option<String> {
    let calls = meta.map_or(0, |m| m.expected_generator_calls);
    let collectives = meta.map_or(0, |m| m.expected_collectives);
    let trace = meta.map_or(Digest::hash_trace([]), |m| m.expected_trace_digest);
    let mismatch = |key: &str, planned: &dyn std::fmt::Display, observed: &dyn std::fmt::Display| {
        Some(format!("{key}: planned {planned}, observed {observed}"))
    };
    if observed.generator_calls != calls {
        mismatch("generator calls", &calls, &observed.generator_calls)
    } else if observed.collectives != collectives {
        mismatch("collectives", &collectives, &observed.collectives)
    } else if observed.trace != trace {
        mismatch("trace", &trace, &observed.trace)
    } else if observed.state != predicted_state {
        mismatch("cache state", &predicted_state, &observed.state)
    } else {
        None
    }
}

/// Returns the rank whose output differs from the majority of its group, and a text that names all ranks of
/// the group. Without a majority, as with two ranks, the outputs do not show which one is wrong, and no rank
/// is named.
pub(crate) fn find_output_mismatch(
    done: &BTreeMap<u32, CallObservation>,
    groups: &[Vec<u32>],
) -> Option<(Option<u32>, String)> {
    groups.iter().find_map(|group| find_mismatch_in_group(done, group))
}

fn find_mismatch_in_group(
    done: &BTreeMap<u32, CallObservation>,
    group: &[u32],
) -> Option<(Option<u32>, String)> {
    let mut votes: BTreeMap<Digest, Vec<u32>> = BTreeMap::new();
    for (rank, o) in done.iter().filter(|(r, _)| group.contains(r)) {
        votes.entry(o.output).or_default().push(*rank);
    }
    if votes.len() < 2 {
        return None;
    }
    let winner = votes.values().max_by_key(|ranks| ranks.len())?;
    let is_majority = votes.values().filter(|ranks| ranks.len() == winner.len()).count() == 1;
    let outlier = votes.values().filter(|ranks| *ranks != winner).flatten().min();
    let outlier = outlier.copied().filter(|_| is_majority);
    let group_texts: Vec<String> = votes.iter().map(|(d, ranks)| format!("ranks {ranks:?} {d}")).collect();
    Some((outlier, format!("output differs: {}", group_texts.join(", "))))
}

/// Returns the outlier rank and a text if the ranks' weights contradict each other. A rank may also
/// report slices that it does not hold, with the digests that its own files give.
#[must_use]
pub fn find_shard_mismatch(fingerprints: &BTreeMap<u32, Vec<ShardFingerprint>>) -> Option<(u32, String)> {
    type RanksByKey<K> = BTreeMap<K, Vec<u32>>;
    // The largest group wins. On a tie the group that holds the lowest rank wins.
    fn pick_outlier<K: Ord>(groups: &RanksByKey<K>) -> Option<u32> {
        let winner = groups.values().max_by_key(|r| (r.len(), std::cmp::Reverse(r[0])))?;
        let beside = groups.values().flatten().copied().filter(|r| !winner.contains(r)).min();
        beside.or_else(|| winner.iter().copied().max())
    }
    fn format_ranks(ranks: &[u32]) -> String {
        format!("rank {}", ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
    }
    let mut contents: BTreeMap<(&str, Digest), RanksByKey<&str>> = BTreeMap::new();
    let mut slices: BTreeMap<(&str, &str), RanksByKey<Digest>> = BTreeMap::new();
    for (rank, p) in fingerprints.iter().flat_map(|(rank, list)| list.iter().map(move |p| (*rank, p))) {
        slices.entry((&p.tensor, &p.slice)).or_default().entry(p.digest).or_default().push(rank);
        if !p.constant {
            contents.entry((&p.tensor, p.digest)).or_default().entry(&p.slice).or_default().push(rank);
        }
    }
    // A shard that was loaded twice also gives one slice two digests. The first message explains it
    // better.
    let mut twice = contents.iter().filter(|(_, groups)| groups.len() > 1);
    if let Some(((tensor, digest), groups)) = twice.next() {
        let listed: Vec<String> =
            groups.iter().map(|(slice, r)| format!("{slice} on {}", format_ranks(r))).collect();
        let (listed, more) = (listed.join(" and "), format_remaining(twice.count()));
        return Some((
            pick_outlier(groups)?,
            format!("`{tensor}`: equal bytes for different slices: {listed}, both {digest}{more}"),
        ));
    }
    let mut other = slices.iter().filter(|(_, groups)| groups.len() > 1);
    let ((tensor, slice), groups) = other.next()?;
    let listed: Vec<String> =
        groups.iter().map(|(digest, r)| format!("{digest} on {}", format_ranks(r))).collect();
    let (listed, more) = (listed.join(", "), format_remaining(other.count()));
    Some((
        pick_outlier(groups)?,
        format!("`{tensor}` {slice}: different bytes for one slice: {listed}{more}"),
    ))
}

fn format_remaining(count: usize) -> String {
    if count == 0 { String::new() } else { format!("; and {count} more slices with the same problem") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed_output(output: u8) -> CallObservation {
        CallObservation {
            trace: Digest::hash_trace([]),
            output: Digest([output; 32]),
            ..CallObservation::default()
        }
    }

    #[test]
    fn the_outlier_rank_is_named() {
        let done = |outputs: &[u8]| (0u32..).zip(outputs.iter().map(|o| observed_output(*o))).collect();
        let all = [vec![0, 1, 2, 3]];
        assert_eq!(find_output_mismatch(&done(&[5, 5, 5]), &all), None);
        assert_eq!(find_output_mismatch(&done(&[5, 6, 5]), &all).map(|(r, _)| r), Some(Some(1)));
        assert_eq!(find_output_mismatch(&done(&[6, 5, 5]), &all).map(|(r, _)| r), Some(Some(0)));
        let without_one = [vec![0, 2]];
        assert_eq!(
            find_output_mismatch(&done(&[5, 0, 5]), &without_one),
            None,
            "a rank without output differs from none"
        );
        let stages = [vec![0, 1], vec![2, 3]];
        assert_eq!(find_output_mismatch(&done(&[5, 5, 6, 6]), &stages), None, "stages have other outputs");
        let (odd, text) = find_output_mismatch(&done(&[5, 5, 6, 7]), &stages).expect("differ");
        assert!(odd.is_none() && text.contains("ranks [2]") && !text.contains("ranks [0"), "{text}");
        let (odd, text) = find_output_mismatch(&done(&[5, 6]), &all).expect("differ");
        assert!(odd.is_none() && text.contains("ranks [0]") && text.contains("ranks [1]"), "{text}");
        assert_eq!(find_output_mismatch(&done(&[5, 6, 5, 6]), &all).map(|(r, _)| r), Some(None));
    }

    fn shard_fingerprint(slice: &str, digest: u8, constant: bool) -> ShardFingerprint {
        let digest = Digest([digest; 32]);
        ShardFingerprint { tensor: "blocks.0.ffn.0.weight".into(), slice: slice.into(), digest, constant }
    }

    // proves: D-02
    #[test]
    fn equal_slices_must_match_and_distinct_slices_must_differ() {
        let shards = |own: [ShardFingerprint; 3]| {
            (0..).zip(own.map(|p| vec![p, shard_fingerprint("all", 9, false)])).collect()
        };
        let ok = [
            shard_fingerprint("[0..4]", 1, false),
            shard_fingerprint("[4..8]", 2, false),
            shard_fingerprint("[0..4]", 1, false),
        ];
        assert_eq!(find_shard_mismatch(&shards(ok.clone())), None);
        let mut other = ok.clone();
        other[2].digest = Digest([7; 32]);
        let (odd, text) = find_shard_mismatch(&shards(other)).expect("differ");
        assert!(odd == 2 && text.contains("blocks.0.ffn.0.weight") && text.contains("[0..4]"), "{text}");
        let mut twice = ok.clone();
        twice[1].digest = Digest([1; 32]);
        let (odd, text) = find_shard_mismatch(&shards(twice.clone())).expect("differ");
        assert!(odd == 1 && text.contains("[4..8] on rank 1") && text.contains("rank 0"), "{text}");
        for p in &mut twice {
            p.constant = true;
        }
        assert_eq!(find_shard_mismatch(&shards(twice)), None, "zeros are zeros");
    }

    #[test]
    fn the_first_key_is_named_with_both_values() {
        let mut other = observed_output(0);
        (other.collectives, other.state) = (2, Digest::hash_bytes(b"x"));
        let text = find_deviation(None, Digest::default(), &other);
        assert_eq!(text.as_deref(), Some("collectives: planned 0, observed 2"));
        assert_eq!(find_deviation(None, Digest::default(), &observed_output(9)), None);
    }
}
