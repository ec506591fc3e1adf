//! Counts over many sets, and the text that shows them.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use crate::compare::{CONSERVATIVE, Compared, EXACT, Violation};
use crate::edit::EditKind;
use crate::mutate::MutationKind;
use crate::outcome::Outcome;
use crate::set::Case;

/// What many sets came to.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// Sets.
    pub sets: u64,
    /// Programs in them.
    pub programs: u64,
    /// Sets by outcome, `completes`, `hang`, `mismatch in …` and `race`.
    pub outcomes: BTreeMap<String, u64>,
    /// Sets by what was changed; several changes count each.
    pub changes: BTreeMap<&'static str, Quadrants>,
    /// Sets refused and failing, by code.
    pub refused_fails: BTreeMap<&'static str, u64>,
    /// Sets failing and refused by one code alone: what a judge without it would accept.
    pub alone: BTreeMap<&'static str, u64>,
    /// Sets refused and completing, by code.
    pub refused_completes: BTreeMap<&'static str, u64>,
    /// All sets.
    pub all: Quadrants,
}

/// Sets by judgement and outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Quadrants {
    pub accepted_completes: u64,
    pub refused_fails: u64,
    pub accepted_fails: u64,
    pub refused_completes: u64,
}

impl Table {
    /// Every kind of change that this build can make, with no sets yet.
    #[must_use]
    pub fn new() -> Table {
        let mutations = MutationKind::ALL.into_iter().filter(|k| k.is_possible()).map(MutationKind::name);
        let edits = EditKind::ALL.into_iter().filter(|k| k.is_possible()).map(EditKind::name);
        let changes = mutations.chain(edits).map(|n| (n, Quadrants::default())).collect();
        Table { changes, ..Table::default() }
    }

    /// Counts a set; what is wrong with it, if anything.
    pub fn add(&mut self, case: &Case, found: &Compared) -> Option<Violation> {
        self.sets += 1;
        self.programs += u64::from(case.mesh.ranks());
        let word = match &found.outcome {
            Outcome::Mismatch { field, .. } => format!("mismatch in {field}"),
            o => o.kind().to_string(),
        };
        *self.outcomes.entry(word).or_default() += 1;
        self.all.count(found);
        let mutations = case.mutations.iter().map(|m| m.kind.name());
        for name in mutations.chain(case.edits.iter().map(|e| e.kind.name())) {
            self.changes.entry(name).or_default().count(found);
        }
        if case.mutations.is_empty() && case.edits.is_empty() {
            self.changes.entry("(unchanged)").or_default().count(found);
        }
        if let ([code], true) = (&found.codes[..], found.outcome.fails()) {
            *self.alone.entry(code).or_default() += 1;
        }
        let by_code =
            if found.outcome.fails() { &mut self.refused_fails } else { &mut self.refused_completes };
        found.codes.iter().for_each(|c| *by_code.entry(c).or_default() += 1);
        found.violation()
    }

    /// The table as text.
    #[must_use]
    pub fn show(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "{} sets, {} programs", self.sets, self.programs)?;
        for (word, n) in &self.outcomes {
            writeln!(out, "  {word:24} {n:>9}")?;
        }
        writeln!(out, "\n{:26} {:>9} {:>9} {:>9} {:>9}", "", "accepted", "refused", "ACCEPTED", "refused")?;
        writeln!(out, "{:26} {:>9} {:>9} {:>9} {:>9}", "", "completes", "fails", "FAILS", "completes")?;
        for (name, q) in self.changes.iter().chain([(&"all", &self.all)]) {
            let [a, b, c, d] = [q.accepted_completes, q.refused_fails, q.accepted_fails, q.refused_completes];
            writeln!(out, "{name:26} {a:>9} {b:>9} {c:>9} {d:>9}")?;
        }
        let tables = EXACT.iter().chain(CONSERVATIVE.iter().map(|(c, _)| c));
        let known: Vec<&str> = tables.copied().collect();
        let seen = self.refused_fails.keys().chain(self.refused_completes.keys()).copied();
        let mut others: Vec<&str> = seen.filter(|c| !known.contains(c)).collect();
        others.sort_unstable();
        others.dedup();
        writeln!(out, "\n{:26} {:>9} {:>10} {:>9}", "refused exactly", "fails", "by it only", "COMPLETES")?;
        for code in EXACT.iter().copied().chain(others) {
            writeln!(out, "{}", self.line(code))?;
        }
        let head = "refused to be safe";
        writeln!(out, "\n{head:26} {:>9} {:>10} {:>9}  although", "fails", "by it only", "completes")?;
        for (code, why) in CONSERVATIVE {
            writeln!(out, "{}  {why}", self.line(code))?;
        }
        Ok(())
    }

    /// A code and how many sets it refused.
    fn line(&self, code: &str) -> String {
        let n = |of: &BTreeMap<&str, u64>| of.get(code).copied().unwrap_or(0);
        let (fails, alone, completes) = (n(&self.refused_fails), n(&self.alone), n(&self.refused_completes));
        format!("  {code:24} {fails:>9} {alone:>10} {completes:>9}")
    }
}

impl Quadrants {
    fn count(&mut self, found: &Compared) {
        let cell = match (found.accepted(), found.outcome.fails()) {
            (true, false) => &mut self.accepted_completes,
            (false, true) => &mut self.refused_fails,
            (true, true) => &mut self.accepted_fails,
            (false, false) => &mut self.refused_completes,
        };
        *cell += 1;
    }

    /// Sets in all.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.accepted_completes + self.refused_fails + self.accepted_fails + self.refused_completes
    }
}
