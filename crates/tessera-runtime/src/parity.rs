//! What must be equal on every rank before the first call, as one table.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_base::Code;

use crate::Digest;
use crate::census::Census;
use crate::tripwire::{T0757, Tripwires};
use crate::wire::{FIELDS, WIRE_VERSION};

/// Ranks differ in something that must be equal.
pub(crate) static T0740: Code = Code {
    id: "T0740",
    title: "ranks differ in a key that must be equal",
    page: "Before the first call every rank shows the leader its build, its plan digest and its parity table: \
versions, effective backends, device order, warm-up set. A key of the class `at init` must be equal on all ranks. \
One of them is not, so the ranks would run different code under the same plan.\n\nThe message lists every key that \
differs, each value with the ranks that hold it. Values are effective ones: what `auto` became on that rank. Start \
every rank from the same build, plan folder and environment.",
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

impl ParityClass {
    /// As in a table for people.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            ParityClass::AtInit => "at init",
            ParityClass::InEnvelope => "in envelope",
            ParityClass::BestEffort => "best effort",
        }
    }
}

/// One row of the table of keys.
#[derive(Debug, Clone, Copy)]
pub struct KeySpec {
    /// Name of the key.
    pub key: &'static str,
    /// When it is compared.
    pub class: ParityClass,
    /// Why it matters.
    pub why: &'static str,
    /// What a difference raises.
    pub checked: &'static Code,
}

const fn at_init(key: &'static str, why: &'static str) -> KeySpec {
    KeySpec { key, class: ParityClass::AtInit, why, checked: &T0740 }
}

const fn best_effort(key: &'static str, why: &'static str) -> KeySpec {
    KeySpec { key, class: ParityClass::BestEffort, why, checked: &T0740 }
}

/// Keys that ranks show at the hello. Those of the class `in envelope` are the [`FIELDS`] of the envelope.
#[rustfmt::skip]
pub static KEYS: &[KeySpec] = &[
    at_init("GPU", "Another GPU takes other kernels, and they decide the bits"),
    at_init("GPU libraries", "Libraries choose kernels by their version"),
    at_init("backend", "Another backend orders sums and collectives in its own way"),
    at_init("build", "One build, one meaning of every field and every op"),
    at_init("captured regions", "A region captured on one rank alone replays what its peers do not"),
    at_init("drill", "A fault that is armed on purpose is armed for everybody to see"),
    KeySpec { key: "groups", class: ParityClass::AtInit, why: "Groups made in another order, or another list of peers, pair up the wrong members", checked: &T0757 },
    at_init("modelled decoder", "A timed wait in place of the decoder changes what a run measures"),
    at_init("numerics", "Types of sums and accumulators decide the bits"),
    at_init("plan digest", "What a rank runs is compared with one sealed plan"),
    at_init("program set", "A program that one rank lacks is compiled there alone, in the middle of a call"),
    at_init("topology", "Who leads, who relays and who computes is decided once"),
    at_init("tripwires off", "A check that is switched off is switched off for everybody to see"),
    at_init("warm-up", "What was not run before the first request would be run first inside a call"),
    at_init("weights", "Equal inputs make equal outputs on equal weights only"),
    at_init("wire version", "Fields and their meaning are never guessed across versions"),
    best_effort("cpu model", "Explains a slow rank"),
    best_effort("host", "Explains a slow link"),
    best_effort("kernel version", "Explains other scheduling"),
    best_effort("kernels", "Instruction sets of the kernels; they agree to the bit, their speed does not"),
    best_effort("threads", "Explains a slow rank; results do not depend on it"),
];

/// A row of the whole table, for a reference page: key, class, why, code.
#[must_use]
pub fn key_table() -> Vec<(&'static str, ParityClass, &'static str, &'static str)> {
    let shown = KEYS.iter().map(|k| (k.key, k.class, k.why, k.checked.id));
    shown.chain(FIELDS.iter().map(|f| (f.name, ParityClass::InEnvelope, f.why, f.checked))).collect()
}

/// The row of a key. A key that the table lacks is compared at init.
fn code_of(key: &str) -> &'static Code {
    KEYS.iter().find(|k| k.key == key).map_or(&T0740, |k| k.checked)
}

/// Keys that every machine shows by itself.
pub(crate) fn identity(build: &str, plan: Digest, census: &Census, tripwires: &Tripwires) -> Parity {
    Parity::default()
        .set("build", build)
        .set("plan digest", format!("{plan:?}"))
        .set("wire version", WIRE_VERSION.to_string())
        .set("warm-up", census.warmup_digest().to_string())
        .set("tripwires off", tripwires.to_string())
}

/// One key of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityKey {
    /// Name such as `backend`.
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

    /// Adds a key of [`KEYS`] with the class that the table gives it.
    #[must_use]
    pub fn set(self, key: &str, value: impl Into<String>) -> Parity {
        let class = KEYS.iter().find(|k| k.key == key).map_or(ParityClass::AtInit, |k| k.class);
        self.with(key, class, value)
    }

    /// Takes over another table's keys; they win over those of the same name.
    #[must_use]
    pub fn join(self, other: &Parity) -> Parity {
        other.keys.iter().fold(self, |p, k| p.with(k.key.clone(), k.class, k.value.clone()))
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &[ParityKey] {
        &self.keys
    }

    fn get(&self, name: &str) -> Option<&ParityKey> {
        self.keys.iter().find(|k| k.key == name)
    }
}

/// A key that is not equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its name.
    pub key: String,
    /// Its class; the strictest if the ranks disagree about that too.
    pub class: ParityClass,
    /// What a difference raises.
    pub code: &'static Code,
    /// Each value with the ranks that hold it; `None` for ranks that do not set it.
    pub values: Vec<(Option<String>, Vec<u32>)>,
    /// Ranks outside the largest group; the group of the lowest rank wins a tie.
    pub odd: Vec<u32>,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`:", self.key)?;
        for (i, (value, ranks)) in self.values.iter().enumerate() {
            let comma = if i == 0 { "" } else { ";" };
            match value {
                Some(v) => write!(f, "{comma} `{v}` on {}", ranks_text(ranks))?,
                None => write!(f, "{comma} not set on {}", ranks_text(ranks))?,
            }
        }
        Ok(())
    }
}

/// Every key, except those of envelopes, in which the ranks differ. `observer` is the table of a leader that
/// runs no calls itself: it has a say in the keys that it sets and is not missed in the others.
#[must_use]
pub fn compare(ranks: &BTreeMap<u32, Parity>, observer: Option<(u32, &Parity)>) -> Vec<Difference> {
    let tables = || ranks.values().chain(observer.map(|(_, p)| p));
    let names: BTreeSet<&str> = tables().flat_map(|p| p.keys.iter().map(|k| k.key.as_str())).collect();
    let mut found = Vec::new();
    for name in names {
        let class = tables().filter_map(|p| p.get(name)).map(|k| k.class).min();
        let Some(class) = class.filter(|c| *c != ParityClass::InEnvelope) else { continue };
        let mut values: BTreeMap<Option<&str>, BTreeSet<u32>> = BTreeMap::new();
        for (rank, table) in ranks {
            values.entry(table.get(name).map(|k| k.value.as_str())).or_default().insert(*rank);
        }
        if let Some((rank, key)) = observer.and_then(|(r, p)| p.get(name).map(|k| (r, k))) {
            values.entry(Some(key.value.as_str())).or_default().insert(rank);
        }
        if values.len() < 2 {
            continue;
        }
        let winner = values.values().max_by_key(|r| (r.len(), std::cmp::Reverse(r.first().copied())));
        let winner = winner.cloned().unwrap_or_default();
        let odd: BTreeSet<u32> = values.values().flatten().copied().filter(|r| !winner.contains(r)).collect();
        found.push(Difference {
            key: name.to_string(),
            class,
            code: code_of(name),
            values: values.into_iter().map(|(v, r)| (v.map(String::from), r.into_iter().collect())).collect(),
            odd: odd.into_iter().collect(),
        });
    }
    found
}

/// `rank 2` or `ranks 0, 1, 3`.
fn ranks_text(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(x: &str) -> Parity {
        Parity::default().with("x", ParityClass::AtInit, x).with("y", ParityClass::BestEffort, x).with(
            "z",
            ParityClass::InEnvelope,
            x,
        )
    }

    #[test]
    fn the_minority_is_odd_over_all_ranks_and_classes_are_kept() {
        let mut ranks: BTreeMap<u32, Parity> = (0..5).map(|r| (r, table("1"))).collect();
        ranks.insert(3, table("2").with("extra", ParityClass::AtInit, "1"));
        let found = compare(&ranks, None);
        let keys: Vec<_> = found.iter().map(|d| (d.key.as_str(), d.class, d.odd.clone())).collect();
        let expected = [
            ("extra", ParityClass::AtInit, vec![3]),
            ("x", ParityClass::AtInit, vec![3]),
            ("y", ParityClass::BestEffort, vec![3]),
        ];
        assert_eq!(keys, expected);
        assert_eq!(found[1].to_string(), "`x`: `1` on ranks 0, 1, 2, 4; `2` on rank 3");
        assert_eq!(found[0].to_string(), "`extra`: not set on ranks 0, 1, 2, 4; `1` on rank 3");
        ranks.insert(3, table("1"));
        assert!(compare(&ranks, None).is_empty());
    }

    #[test]
    fn a_leader_outside_the_mesh_counts_where_it_says_something() {
        let ranks = BTreeMap::from([(1, table("1"))]);
        let leader = Parity::default().with("x", ParityClass::AtInit, "2");
        let found = compare(&ranks, Some((0, &leader)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].key.as_str(), found[0].odd.as_slice()), ("x", &[1][..]));
    }

    #[test]
    fn each_key_has_one_row_and_one_class() {
        let table = key_table();
        for (i, (key, ..)) in table.iter().enumerate() {
            // The plan is shown at the hello as a digest and named by every envelope: two keys.
            assert!(table[..i].iter().all(|(k, ..)| k != key), "{key}");
        }
        assert!(table.len() > KEYS.len() + 20);
        assert_eq!(Parity::default().set("threads", "2").keys()[0].class, ParityClass::BestEffort);
    }
}
