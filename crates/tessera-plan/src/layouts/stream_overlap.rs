//! Pairs of streams whose ops may run at the same time.

use std::collections::BTreeSet;

use tessera_base::{Diagnostic, closest_name, format_choices};
use tessera_ir::StreamKind;

use crate::codes::T0616;

/// Pairs of streams whose ops may run at the same time. Streams of any other pair are serialised.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamOverlap {
    /// Each pair in the order of [`StreamKind`].
    pairs: BTreeSet<(StreamKind, StreamKind)>,
}

impl StreamOverlap {
    /// Creates the overlap of these pairs of stream names. The order within a pair has no meaning.
    ///
    /// # Errors
    /// T0616 for an unknown stream, or for a stream paired with itself.
    pub fn new(pairs: &[(&str, &str)]) -> Result<StreamOverlap, Diagnostic> {
        let mut out = StreamOverlap::none();
        for (a, b) in pairs {
            let (first, second) = (parse_stream(a)?, parse_stream(b)?);
            if first == second {
                return Err(Diagnostic::error(&T0616, format!("stream {a} is paired with itself"))
                    .with_hint("name two streams; the ops of one stream run one after the other"));
            }
            out.pairs.insert((first.min(second), first.max(second)));
        }
        Ok(out)
    }

    /// Returns the overlap of every pair of streams.
    #[must_use]
    pub fn all() -> StreamOverlap {
        let with_later = |(i, a): (usize, &StreamKind)| {
            let a = *a;
            StreamKind::ALL[i + 1..].iter().map(move |b| (a, *b))
        };
        StreamOverlap { pairs: StreamKind::ALL.iter().enumerate().flat_map(with_later).collect() }
    }

    /// Returns the overlap of no pair: one op runs at a time.
    #[must_use]
    pub fn none() -> StreamOverlap {
        StreamOverlap::default()
    }

    /// Returns whether ops of two streams may run at the same time. Those of one stream never do.
    #[must_use]
    pub fn allows(&self, a: StreamKind, b: StreamKind) -> bool {
        self.pairs.contains(&(a.min(b), a.max(b)))
    }
}

fn parse_stream(name: &str) -> Result<StreamKind, Diagnostic> {
    StreamKind::parse(name).ok_or_else(|| {
        let names = StreamKind::ALL.map(StreamKind::name);
        let d = Diagnostic::error(&T0616, format!("unknown stream `{name}`"))
            .with_hint(format!("the streams are {}", format_choices(&names)));
        match closest_name(name, names) {
            Some(n) => d.with_note(format!("closest: `{n}`")),
            None => d,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_has_no_order_and_no_stream_overlaps_itself() {
        let overlap = StreamOverlap::new(&[("tp_collective", "compute")]).unwrap();
        assert!(overlap.allows(StreamKind::Compute, StreamKind::TpCollective));
        assert!(overlap.allows(StreamKind::TpCollective, StreamKind::Compute));
        assert!(!overlap.allows(StreamKind::A2a, StreamKind::Compute));
        for (i, a) in StreamKind::ALL.into_iter().enumerate() {
            for (j, b) in StreamKind::ALL.into_iter().enumerate() {
                assert_eq!(StreamOverlap::all().allows(a, b), i != j);
                assert!(!StreamOverlap::none().allows(a, b));
            }
        }
    }

    #[test]
    fn unknown_streams_and_pairs_of_one_stream_are_refused() {
        for pair in [("compute", "tp"), ("comm", "compute"), ("a2a", "a2a")] {
            assert_eq!(StreamOverlap::new(&[pair]).unwrap_err().code.id, "T0616");
        }
    }
}
