//! What must be equal on every rank before the first call, as one table.

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

/// Ranks differ in something that must be equal.
pub(crate) static T0740: Code = Code {
    id: "T0740",
    title: "ranks differ in a key that must be equal",
    page: "Before the first call every rank shows the leader its build, its plan digest and its parity table: \
versions, effective backends, device order, warm-up set. A key of the class `at init` must be equal on all ranks. \
One of them is not, so the ranks would run different code under the same plan.\n\nThe message names the key, the \
rank and both values. Start every rank from the same build, plan folder and environment.",
};

/// When a key is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ParityClass {
    /// Compared at the hello; a difference ends the run.
    AtInit,
    /// Carried and compared by every envelope.
    InEnvelope,
    /// Recorded; a difference is told and the run goes on.
    BestEffort,
}

/// One key of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityKey {
    /// Name such as `backend.matmul`.
    pub key: String,
    /// When it is compared.
    pub class: ParityClass,
    /// This rank's value.
    pub value: String,
}

/// A rank's keys, in ascending order of name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Parity {
    keys: Vec<ParityKey>,
}

impl Parity {
    /// Sorts the keys by name.
    #[must_use]
    pub fn new(mut keys: Vec<ParityKey>) -> Parity {
        keys.sort_by(|a, b| a.key.cmp(&b.key));
        Parity { keys }
    }

    /// Adds a key, or replaces the one of this name.
    #[must_use]
    pub fn with(self, key: impl Into<String>, class: ParityClass, value: impl Into<String>) -> Parity {
        let (key, mut keys) = (key.into(), self.keys);
        keys.retain(|k| k.key != key);
        keys.push(ParityKey { key, class, value: value.into() });
        Parity::new(keys)
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &[ParityKey] {
        &self.keys
    }

    /// Differences between the leader's table and a rank's: errors for keys compared at init, warnings for
    /// best-effort keys. A key that one side lacks differs.
    #[must_use]
    pub fn compare(&self, rank: u32, other: &Parity) -> Vec<Diagnostic> {
        let mut names: Vec<&str> = self.keys.iter().chain(&other.keys).map(|k| k.key.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let mut found = Vec::new();
        for name in names {
            let (a, b) = (self.get(name), other.get(name));
            if a == b {
                continue;
            }
            let class = a.into_iter().chain(b).map(|k| k.class).min();
            let message = format!("`{name}` differs between the leader and rank {rank}");
            let d = match class {
                Some(ParityClass::AtInit) => Diagnostic::error(&T0740, message),
                Some(ParityClass::BestEffort) => Diagnostic::warning(&T0740, message),
                _ => continue,
            };
            let says = |k: Option<&ParityKey>| k.map_or("not set".to_string(), |k| format!("`{}`", k.value));
            found.push(d.at("leader", says(a)).at(format!("rank {rank}"), says(b)));
        }
        found
    }

    fn get(&self, name: &str) -> Option<&ParityKey> {
        self.keys.iter().find(|k| k.key == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_decide_what_a_difference_means() {
        let a = Parity::default()
            .with("x", ParityClass::AtInit, "1")
            .with("y", ParityClass::BestEffort, "1")
            .with("z", ParityClass::InEnvelope, "1");
        let b = Parity::default()
            .with("x", ParityClass::AtInit, "2")
            .with("y", ParityClass::BestEffort, "2")
            .with("z", ParityClass::InEnvelope, "2")
            .with("extra", ParityClass::AtInit, "1");
        let found = a.compare(3, &b);
        let errors: Vec<_> = found.iter().filter(|d| d.is_error()).map(|d| d.message.as_str()).collect();
        assert_eq!(
            errors,
            ["`extra` differs between the leader and rank 3", "`x` differs between the leader and rank 3"]
        );
        assert_eq!(found.len(), 3);
        assert!(a.compare(1, &a).is_empty());
    }
}
