//! Counts over many sets, and their text form.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use crate::compare::{CONSERVATIVE, Comparison, Disagreement, EXACT};
use crate::mutate::MutationKind;
use crate::outcome::ExecutionOutcome;
use crate::programs::ProgramSet;
use crate::rewrite::RewriteKind;

/// Results of the comparison on many sets.
#[derive(Debug, Clone, Default)]
pub struct ComparisonTable {
    /// Number of program sets that were both verified and simulated.
    pub sets: u64,
    /// Number of programs in these sets.
    pub programs: u64,
    /// Number of sets by outcome: `completes`, `hang`, `mismatch in …` and `race`.
    pub outcomes: BTreeMap<String, u64>,
    /// Number of sets by kind of change; a set with several changes counts for each.
    pub changes: BTreeMap<&'static str, VerdictCounts>,
    /// Number of failing sets that each code rejects.
    pub rejected_fails: BTreeMap<&'static str, u64>,
    /// Number of failing sets that only this code rejects: a verifier without the code would accept
    /// them.
    pub rejected_by_one_code: BTreeMap<&'static str, u64>,
    /// Number of completing sets that each code rejects.
    pub rejected_completes: BTreeMap<&'static str, u64>,
    /// Totals over all sets.
    pub all: VerdictCounts,
}

/// Numbers of sets by verdict and outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names give verdict and outcome")]
pub struct VerdictCounts {
    pub accepted_completes: u64,
    pub rejected_fails: u64,
    pub accepted_fails: u64,
    pub rejected_completes: u64,
}

impl ComparisonTable {
    /// Creates a table with every kind of change that this build can make, and no sets.
    #[must_use]
    pub fn new() -> ComparisonTable {
        let mutations = MutationKind::ALL.into_iter().filter(|k| k.is_possible()).map(MutationKind::name);
        let edits = RewriteKind::ALL.into_iter().filter(|k| k.is_possible()).map(RewriteKind::name);
        let changes = mutations.chain(edits).map(|n| (n, VerdictCounts::default())).collect();
        ComparisonTable { changes, ..ComparisonTable::default() }
    }

    /// Counts a set and returns its disagreement, if any.
    pub fn add_comparison(&mut self, set: &ProgramSet, comparison: &Comparison) -> Option<Disagreement> {
        self.sets += 1;
        self.programs += u64::from(set.mesh.world_size());
        let word = match &comparison.outcome {
            ExecutionOutcome::Mismatch { field, .. } => format!("mismatch in {field}"),
            o => o.kind().to_string(),
        };
        *self.outcomes.entry(word).or_default() += 1;
        self.all.count_set(comparison);
        let mutations = set.mutations.iter().map(|m| m.kind.name());
        for name in mutations.chain(set.rewrites.iter().map(|e| e.kind.name())) {
            self.changes.entry(name).or_default().count_set(comparison);
        }
        if set.mutations.is_empty() && set.rewrites.is_empty() {
            self.changes.entry("(unchanged)").or_default().count_set(comparison);
        }
        if let ([code], true) = (&comparison.codes[..], comparison.outcome.is_failure()) {
            *self.rejected_by_one_code.entry(code).or_default() += 1;
        }
        let by_code = if comparison.outcome.is_failure() {
            &mut self.rejected_fails
        } else {
            &mut self.rejected_completes
        };
        comparison.codes.iter().for_each(|c| *by_code.entry(c).or_default() += 1);
        comparison.disagreement()
    }

    /// Renders the numbers of sets by mutation, outcome and the verifier's codes as text tables.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_text(&mut out);
        out
    }

    fn write_text(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "{} sets, {} programs", self.sets, self.programs)?;
        for (word, n) in &self.outcomes {
            writeln!(out, "  {word:24} {n:>9}")?;
        }
        writeln!(out, "\n{:26} {:>9} {:>9} {:>9} {:>9}", "", "accepted", "rejected", "ACCEPTED", "rejected")?;
        writeln!(out, "{:26} {:>9} {:>9} {:>9} {:>9}", "", "completes", "fails", "FAILS", "completes")?;
        for (name, q) in self.changes.iter().chain([(&"all", &self.all)]) {
            let [a, b, c, d] =
                [q.accepted_completes, q.rejected_fails, q.accepted_fails, q.rejected_completes];
            writeln!(out, "{name:26} {a:>9} {b:>9} {c:>9} {d:>9}")?;
        }
        let tables = EXACT.iter().chain(CONSERVATIVE.iter().map(|(c, _)| c));
        let known: Vec<&str> = tables.copied().collect();
        let seen = self.rejected_fails.keys().chain(self.rejected_completes.keys()).copied();
        let mut others: Vec<&str> = seen.filter(|c| !known.contains(c)).collect();
        others.sort_unstable();
        others.dedup();
        writeln!(out, "\n{:26} {:>9} {:>10} {:>9}", "rejected exactly", "fails", "by it only", "COMPLETES")?;
        for code in EXACT.iter().copied().chain(others) {
            writeln!(out, "{}", self.code_line(code))?;
        }
        let head = "rejected to be safe";
        writeln!(out, "\n{head:26} {:>9} {:>10} {:>9}  although", "fails", "by it only", "completes")?;
        for (code, why) in CONSERVATIVE {
            writeln!(out, "{}  {why}", self.code_line(code))?;
        }
        Ok(())
    }

    /// Formats a code with the number of sets that it rejected.
    fn code_line(&self, code: &str) -> String {
        let n = |of: &BTreeMap<&str, u64>| of.get(code).copied().unwrap_or(0);
        let (fails, alone, completes) =
            (n(&self.rejected_fails), n(&self.rejected_by_one_code), n(&self.rejected_completes));
        format!("  {code:24} {fails:>9} {alone:>10} {completes:>9}")
    }
}

impl VerdictCounts {
    fn count_set(&mut self, found: &Comparison) {
        let cell = match (found.is_accepted(), found.outcome.is_failure()) {
            (true, false) => &mut self.accepted_completes,
            (false, true) => &mut self.rejected_fails,
            (true, true) => &mut self.accepted_fails,
            (false, false) => &mut self.rejected_completes,
        };
        *cell += 1;
    }

    /// Returns the number of sets, over all combinations of verdict and outcome.
    #[must_use]
    pub fn total_sets(&self) -> u64 {
        self.accepted_completes + self.rejected_fails + self.accepted_fails + self.rejected_completes
    }
}
