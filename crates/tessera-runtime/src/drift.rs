//! What ranks report of a call, compared with the plan and with each other.

use std::collections::BTreeMap;

use tessera_base::Code;

use crate::Digest;
use crate::wire::{CallMeta, Observed};

/// Different results.
pub(crate) static T0744: Code = Code {
    id: "T0744",
    title: "ranks drifted apart",
    page: "Every rank reports what it received and what it did: a digest of its inputs, generator passes, collectives, \
their trace, the cache state they led to, and the output. One of these differs from the plan or from the other ranks. \
The message names the first key that differs and the rank that stands alone.\n\nDifferent inputs are a fault of the \
exchange or of memory; different counts or traces are another code path; equal traces and different outputs are \
arithmetic: another library, device or weight file on that rank.",
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

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(output: u8) -> Observed {
        Observed {
            generator_calls: 0,
            collectives: 0,
            trace: Digest::of_trace([]),
            state: Digest::default(),
            output: Digest([output; 32]),
            compensated: 0,
            phase_ns: Vec::new(),
        }
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

    #[test]
    fn the_first_key_is_named_with_both_values() {
        let mut other = seen(0);
        (other.collectives, other.state) = (2, Digest::of(b"x"));
        let text = departs(None, Digest::default(), &other);
        assert_eq!(text.as_deref(), Some("collectives: planned 0, observed 2"));
        assert_eq!(departs(None, Digest::default(), &seen(9)), None);
    }
}
