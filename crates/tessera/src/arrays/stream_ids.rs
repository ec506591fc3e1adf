//! The numbers under which traces show the streams of a plan.

use std::collections::BTreeMap;

use tessera_ir::StreamKind;

/// A number for each stream, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamIds(BTreeMap<String, u32>);

impl StreamIds {
    /// Creates a map from the numbers of some streams. [`StreamIds::add_missing`] numbers the others.
    #[must_use]
    pub fn new(ids: BTreeMap<String, u32>) -> StreamIds {
        StreamIds(ids)
    }

    /// Gives each stream that has no number the smallest one that is left, in the order of `names`.
    pub(super) fn add_missing<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) {
        for name in names {
            if !self.0.contains_key(name) {
                // There are fewer streams than numbers.
                let free = (0..=u32::MAX).find(|id| !self.0.values().any(|used| used == id));
                self.0.insert(name.to_string(), free.unwrap_or_default());
            }
        }
    }

    /// Returns the numbers by name.
    #[must_use]
    pub fn by_name(&self) -> &BTreeMap<String, u32> {
        &self.0
    }
}

impl Default for StreamIds {
    /// Returns the numbers that hold unless a user states others.
    fn default() -> StreamIds {
        const ORDER: [StreamKind; 5] =
            [StreamKind::Compute, StreamKind::TpCollective, StreamKind::A2a, StreamKind::Io, StreamKind::Pp];
        StreamIds(ORDER.into_iter().map(|stream| stream.name().to_string()).zip(0..).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_left_out_gets_the_smallest_free_number() {
        let stated = [("compute", 1), ("tp_collective", 0), ("a2a", 3), ("io", 7)];
        let mut ids = StreamIds::new(stated.map(|(name, id)| (name.to_string(), id)).into());
        ids.add_missing(["pp", "compute", "side"]);
        assert_eq!((ids.by_name()["pp"], ids.by_name()["side"], ids.by_name()["compute"]), (2, 4, 1));
        let defaults = StreamIds::default();
        let numbers = StreamKind::ALL.map(|stream| defaults.by_name()[stream.name()]);
        assert_eq!(numbers, [0, 1, 4, 2, 3]);
    }
}
