//! The table of keys that must be equal on every rank before the first call.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_base::Code;
use tessera_base::record_keys::TRANSPORT_KEY;

use crate::Digest;
use crate::codes::{T0740, T0757, T0775};
use crate::program_index::ProgramIndex;
use crate::tripwire::{TRIPWIRES, Tripwires};
use crate::wire::{ENVELOPE_FIELDS, WIRE_VERSION};

/// When a key is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ParityClass {
    /// Compared at the hello; a difference ends the run.
    AtInit,
    /// Carried by every envelope and compared by every rank.
    InEnvelope,
    /// Recorded; a difference is reported and the run continues.
    BestEffort,
    /// Compared at the hello among the ranks that report the key; a difference ends the run.
    AtInitIfReported,
}

impl ParityClass {
    /// Returns the name that tables show, such as `at init`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ParityClass::AtInit => "at init",
            ParityClass::InEnvelope => "in envelope",
            ParityClass::BestEffort => "best effort",
            ParityClass::AtInitIfReported => "at init, if reported",
        }
    }

    /// Returns whether a difference found at the hello ends the run.
    #[must_use]
    pub fn ends_run(self) -> bool {
        matches!(self, ParityClass::AtInit | ParityClass::AtInitIfReported)
    }
}

/// A row of [`KEYS`]: a property of a rank that is compared, and what a difference means.
#[derive(Debug, Clone, Copy)]
pub struct ParityKeySpec {
    /// Name of the key in tables and messages, such as `backend`. A row whose name ends with a colon
    /// describes every key that begins with it, such as `kernel: matmul …`.
    pub key: &'static str,
    /// When the key is compared, and whether a difference ends the run.
    pub class: ParityClass,
    /// Why ranks must agree on the key, or what a difference explains; shown on the reference page.
    pub why: &'static str,
    /// Code that a difference raises; a key of the class `best effort` never raises its code.
    pub code: &'static Code,
}

const fn at_init(key: &'static str, why: &'static str) -> ParityKeySpec {
    ParityKeySpec { key, class: ParityClass::AtInit, why, code: &T0740 }
}

const fn best_effort(key: &'static str, why: &'static str) -> ParityKeySpec {
    ParityKeySpec { key, class: ParityClass::BestEffort, why, code: &T0740 }
}

/// Prefix of the keys of kernel probes: the op with its types and attributes follows.
pub const KERNEL_KEY: &str = "kernel:";

/// Key of the host of a rank: its name and its boot.
pub const HOST_KEY: &str = "host";

/// The keys that ranks send with the hello. The keys of the class `in envelope` are the envelope's
/// [`FIELDS`].
#[rustfmt::skip]
pub static KEYS: &[ParityKeySpec] = &[
    at_init("GPU", "Another GPU selects other kernels, and kernels determine the bits"),
    at_init("GPU libraries", "Libraries select kernels by their version"),
    at_init("LoRAs", "File, strength and digest of every LoRA in order: a LoRA that one rank adds alone gives it other weights"),
    at_init("backend", "Another backend orders sums and collectives differently"),
    at_init("build", "Version and digest of the file that holds the code: fields and ops have one meaning per build"),
    ParityKeySpec { key: "cache checks", class: ParityClass::AtInitIfReported, why: "Which faults of its caches a rank can find between calls and in halos, and which checks its backend does not offer", code: &T0740 },
    at_init("captured programs", "The graph of each program, as the backend captures it: a program captured on one rank alone replays operations that its peers do not run"),
    ParityKeySpec { key: "communicator:", class: ParityClass::AtInitIfReported, why: "The memory or the NCCL id that the members of a communicator share: members that hold different ones never meet", code: &T0757 },
    at_init("drill", "Every rank announces an armed fault"),
    at_init("engine checks off", "A check that one rank's engine does not make would let its faults pass there alone"),
    at_init("environment:", "Variables that select algorithms, such as `NCCL_ALGO`, change the order of sums; [the list](environment.md)"),
    ParityKeySpec { key: "groups", class: ParityClass::AtInit, why: "Groups created in another order, or another list of peers, pair up the wrong members", code: &T0757 },
    ParityKeySpec { key: KERNEL_KEY, class: ParityClass::AtInitIfReported, why: "A probe of each kernel on fixed inputs: equal programs give equal outputs only on kernels that compute the same bits", code: &T0775 },
    at_init("numerics", "Accumulator and reduction dtypes determine the bits"),
    at_init("plan digest", "Every rank's execution is compared with one sealed plan"),
    at_init("program set", "A program that one rank lacks is compiled there alone, in the middle of a call"),
    ParityKeySpec { key: "route:", class: ParityClass::AtInitIfReported, why: "The implementation that a backend has chosen for a class of shapes; ranks that choose for the same class choose the same", code: &T0740 },
    at_init("synthetic delays", "A timed wait in place of a stage's work changes the measurements of a run"),
    ParityKeySpec { key: "tokenizer", class: ParityClass::AtInitIfReported, why: "Only the leader tokenizes, but a rank whose folder holds another tokenizer was given another model, and would encode other prompts as the leader", code: &T0740 },
    at_init("topology", "The leading, relaying and computing ranks are fixed for the run"),
    ParityKeySpec { key: TRANSPORT_KEY, class: ParityClass::AtInitIfReported, why: "How the members of a communicator exchange data, and what the plan states: members that differ wait in two places", code: &T0757 },
    at_init("tripwires off", "Every rank announces its disabled checks"),
    at_init("warm-up", "A program that the warm-up skips would run for the first time inside a call"),
    at_init("weights", "Equal inputs give equal outputs only with equal weights"),
    at_init("wire version", "The meaning of fields is never guessed across versions"),
    best_effort("cpu model", "Explains a slow rank"),
    best_effort(HOST_KEY, "Name and boot of the host: explains a slow link, and is compared with the hosts that the plan states (T0777)"),
    best_effort("kernel version", "Explains different scheduling"),
    best_effort("kernels", "Instruction sets of the CPU kernels; they are bit-identical but differ in speed"),
    best_effort("other environment:", "Variables of GPU libraries whose effect is unknown explain a difference"),
    best_effort("threads", "Explains a slow rank; results do not depend on the thread count"),
    best_effort("watchdogs", "Explains a rank that waits longer, or gives up sooner, than its peers"),
];

/// Returns the rows of the complete table, including the envelope's fields, for a reference page:
/// key, class, reason, code.
#[must_use]
pub fn parity_key_table() -> Vec<(&'static str, ParityClass, &'static str, &'static str)> {
    let shown = KEYS.iter().map(|k| (k.key, k.class, k.why, k.code.id));
    shown
        .chain(ENVELOPE_FIELDS.iter().map(|f| (f.name, ParityClass::InEnvelope, f.reason, f.codes)))
        .collect()
}

/// Returns the row that describes a key. A key without a row is compared at init.
fn find_spec(key: &str) -> Option<&'static ParityKeySpec> {
    KEYS.iter().find(|k| k.key == key || (k.key.ends_with(':') && key.starts_with(k.key)))
}

/// Returns the keys that every process sets itself.
pub(crate) fn identity_keys(
    build: &str,
    plan: Digest,
    programs: &ProgramIndex,
    tripwires: &Tripwires,
) -> Parity {
    Parity::default()
        .with_known_key("build", build)
        .with_known_key("plan digest", format!("{plan:?}"))
        .with_known_key("wire version", WIRE_VERSION.to_string())
        .with_known_key("warm-up", programs.warmup_digest().to_string())
        .with_known_key("tripwires off", tripwires.to_string())
}

/// One property of a rank, such as its backend, that is compared with the other ranks' values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParityKey {
    /// The key's name, such as `backend`.
    pub key: String,
    /// Class that this rank gives the key; if ranks give different ones, the strictest applies.
    pub class: ParityClass,
    /// Effective value on this rank, such as what `auto` resolved to.
    pub value: String,
}

/// The keys of a rank, in ascending order of name.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Parity {
    keys: Vec<ParityKey>,
}

impl Parity {
    /// Creates a table and sorts its keys by name.
    #[must_use]
    pub fn new(mut keys: Vec<ParityKey>) -> Parity {
        keys.sort_by(|a, b| a.key.cmp(&b.key));
        Parity { keys }
    }

    /// Adds a key, or replaces the key of that name.
    #[must_use]
    pub fn with_key(self, key: impl Into<String>, class: ParityClass, value: impl Into<String>) -> Parity {
        let (key, mut keys) = (key.into(), self.keys);
        keys.retain(|k| k.key != key);
        keys.push(ParityKey { key, class, value: value.into() });
        Parity::new(keys)
    }

    /// Adds a key of [`KEYS`] with its class from that table.
    #[must_use]
    pub fn with_known_key(self, key: &str, value: impl Into<String>) -> Parity {
        let class = find_spec(key).map_or(ParityClass::AtInit, |k| k.class);
        self.with_key(key, class, value)
    }

    /// Adds the keys of another table; they replace keys of the same name.
    #[must_use]
    pub fn merge(self, other: &Parity) -> Parity {
        other.keys.iter().fold(self, |p, k| p.with_key(k.key.clone(), k.class, k.value.clone()))
    }

    /// Returns every key of the table with its class and value.
    #[must_use]
    pub fn keys(&self) -> &[ParityKey] {
        &self.keys
    }

    /// Returns the codes of the tripwires that this table does not announce as disabled, in the
    /// process or in its engine.
    pub(crate) fn armed_tripwires(&self) -> Vec<&'static str> {
        let off = ["tripwires off", "engine checks off"].map(|name| self.get(name));
        let off: BTreeSet<&str> = off.iter().flatten().flat_map(|k| k.value.split(", ")).collect();
        TRIPWIRES.iter().map(|t| t.code.id).filter(|id| !off.contains(id)).collect()
    }

    fn get(&self, name: &str) -> Option<&ParityKey> {
        self.keys.iter().find(|k| k.key == name)
    }
}

/// Returns the host of each rank that reports one.
#[must_use]
pub fn reported_hosts(ranks: &BTreeMap<u32, Parity>) -> BTreeMap<u32, String> {
    let host = |(rank, table): (&u32, &Parity)| Some((*rank, table.get(HOST_KEY)?.value.clone()));
    ranks.iter().filter_map(host).collect()
}

/// A key that differs between ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParityDifference {
    /// Name of the key, which need not be in [`KEYS`].
    pub key: String,
    /// Class of the key; the strictest class if the ranks set different classes.
    pub class: ParityClass,
    /// Code from [`KEYS`], or T0740 for another key; not raised in the class `best effort`.
    pub code: &'static Code,
    /// Each value with the ranks that hold it; `None` for ranks that do not set the key.
    pub values: Vec<(Option<String>, Vec<u32>)>,
    /// Ranks outside the largest group. On a tie the group of the lowest rank counts as the
    /// largest.
    pub outliers: Vec<u32>,
}

impl std::fmt::Display for ParityDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`:", self.key)?;
        for (i, (value, ranks)) in self.values.iter().enumerate() {
            let comma = if i == 0 { "" } else { ";" };
            match value {
                Some(v) => write!(f, "{comma} `{v}` on {}", format_ranks(ranks))?,
                None => write!(f, "{comma} not set on {}", format_ranks(ranks))?,
            }
        }
        Ok(())
    }
}

/// Returns every key in which the ranks differ, except the keys of envelopes. `observer` is the
/// table of a leader that runs no calls itself: the keys that it sets are compared, and its other
/// keys do not count as missing.
#[must_use]
pub fn compare_tables(
    ranks: &BTreeMap<u32, Parity>,
    observer: Option<(u32, &Parity)>,
) -> Vec<ParityDifference> {
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
        if class == ParityClass::AtInitIfReported {
            values.remove(&None);
        }
        if let Some((rank, key)) = observer.and_then(|(r, p)| p.get(name).map(|k| (r, k))) {
            values.entry(Some(key.value.as_str())).or_default().insert(rank);
        }
        if values.len() < 2 {
            continue;
        }
        let winner = values.values().max_by_key(|r| (r.len(), std::cmp::Reverse(r.first().copied())));
        let winner = winner.cloned().unwrap_or_default();
        let outliers: BTreeSet<u32> =
            values.values().flatten().copied().filter(|r| !winner.contains(r)).collect();
        found.push(ParityDifference {
            key: name.to_string(),
            class,
            code: find_spec(name).map_or(&T0740, |k| k.code),
            values: values.into_iter().map(|(v, r)| (v.map(String::from), r.into_iter().collect())).collect(),
            outliers: outliers.into_iter().collect(),
        });
    }
    found
}

/// Formats `rank 2` or `ranks 0, 1, 3`.
fn format_ranks(ranks: &[u32]) -> String {
    let list: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(x: &str) -> Parity {
        Parity::default()
            .with_key("x", ParityClass::AtInit, x)
            .with_key("y", ParityClass::BestEffort, x)
            .with_key("z", ParityClass::InEnvelope, x)
    }

    #[test]
    fn the_minority_is_odd_over_all_ranks_and_classes_are_kept() {
        let mut ranks: BTreeMap<u32, Parity> = (0..5).map(|r| (r, table("1"))).collect();
        ranks.insert(3, table("2").with_key("extra", ParityClass::AtInit, "1"));
        let found = compare_tables(&ranks, None);
        let keys: Vec<_> = found.iter().map(|d| (d.key.as_str(), d.class, d.outliers.clone())).collect();
        let expected = [
            ("extra", ParityClass::AtInit, vec![3]),
            ("x", ParityClass::AtInit, vec![3]),
            ("y", ParityClass::BestEffort, vec![3]),
        ];
        assert_eq!(keys, expected);
        assert_eq!(found[1].to_string(), "`x`: `1` on ranks 0, 1, 2, 4; `2` on rank 3");
        assert_eq!(found[0].to_string(), "`extra`: not set on ranks 0, 1, 2, 4; `1` on rank 3");
        ranks.insert(3, table("1"));
        assert!(compare_tables(&ranks, None).is_empty());
    }

    #[test]
    fn a_kernel_is_compared_among_the_ranks_that_run_it() {
        let key = "kernel: silu(f32[3])";
        let probe = |digest: &str| Parity::default().with_known_key(key, digest);
        let mut ranks = BTreeMap::from([(0, Parity::default()), (1, probe("a")), (2, probe("a"))]);
        assert!(compare_tables(&ranks, None).is_empty());
        ranks.insert(3, probe("b"));
        let found = compare_tables(&ranks, None);
        assert_eq!(found[0].to_string(), "`kernel: silu(f32[3])`: `a` on ranks 1, 2; `b` on rank 3");
        assert!(found[0].class.ends_run());
        assert_eq!((found[0].code.id, found[0].outliers.as_slice()), ("T0775", &[3][..]));
    }

    #[test]
    fn a_check_that_only_the_engine_leaves_out_is_not_armed() {
        let table = Parity::default().with_known_key("tripwires off", "T0740");
        let both = table.clone().with_known_key("engine checks off", "T0751, T0785");
        let lost: Vec<&str> =
            table.armed_tripwires().into_iter().filter(|id| !both.armed_tripwires().contains(id)).collect();
        assert_eq!(lost, ["T0751", "T0785"]);
        assert!(!table.armed_tripwires().contains(&"T0740"));
    }

    #[test]
    fn an_observer_counts_only_for_its_own_keys() {
        let ranks = BTreeMap::from([(1, table("1"))]);
        let leader = Parity::default().with_key("x", ParityClass::AtInit, "2");
        let found = compare_tables(&ranks, Some((0, &leader)));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].key.as_str(), found[0].outliers.as_slice()), ("x", &[1][..]));
    }

    #[test]
    fn each_key_has_one_row_and_one_class() {
        let table = parity_key_table();
        for (i, (key, ..)) in table.iter().enumerate() {
            // The envelope's plan field and the key `plan digest` of the hello are two keys.
            assert!(table[..i].iter().all(|(k, ..)| k != key), "{key}");
        }
        assert!(table.len() > KEYS.len() + 20);
        assert_eq!(Parity::default().with_known_key("threads", "2").keys()[0].class, ParityClass::BestEffort);
    }
}
