//! The report on compile activity as text and as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::activity::{Activity, ActivityKind, RankCounts};
use super::budget::{BudgetLine, StructureRule};
use super::doctor::{CompileReport, UNRECORDED};
use crate::flight::list_ranks;

/// Maximum number of findings of a class that the text lists. The JSON lists all.
const MAX_LISTED: usize = 20;

impl CompileReport {
    /// Returns whether every line of the budget passes.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.budget.iter().all(BudgetLine::passes)
    }

    /// Formats the report as text; `name` is the display name of the folder.
    #[must_use]
    pub fn to_text(&self, name: &str) -> String {
        let n = self.counts.len();
        let mut out = format!("{name}: compile traces of {n} rank{}\n", if n == 1 { "" } else { "s" });
        let mut sides: BTreeMap<RankCounts, Vec<u32>> = BTreeMap::new();
        for (rank, counts) in &self.counts {
            sides.entry(*counts).or_default().push(*rank);
        }
        for (c, ranks) in &sides {
            out += &format!(
                "  {}: graphs {}, graph breaks {}, recompiles {}, CUDA graphs recorded again {}, unlogged {}\n",
                list_ranks(ranks),
                c.graphs,
                c.breaks,
                c.recompiles,
                c.rerecords,
                c.unlogged
            );
        }
        for kind in ActivityKind::ALL {
            let found: Vec<&Activity> = self.activity.iter().filter(|a| a.kind == kind).collect();
            if found.is_empty() {
                continue;
            }
            out += &format!("\n{} ({})\n", kind.name(), kind.code().id);
            found.iter().take(MAX_LISTED).for_each(|a| out += &format!("  {}\n", a.to_line()));
            if found.len() > MAX_LISTED {
                out += &format!("  and {} more (--format json has all)\n", found.len() - MAX_LISTED);
            }
        }
        out += "\nbudget\n";
        self.budget.iter().for_each(|l| out += &format!("  {}\n", l.to_line()));
        out += "\nstop tuning, change structure\n";
        self.structure.iter().for_each(|r| out += &format!("  {}\n", r.to_line()));
        if !self.notes.is_empty() {
            out += "\nnotes\n";
            self.notes.iter().for_each(|n| out += &format!("  {n}\n"));
        }
        out += "\nnot recorded\n";
        UNRECORDED.iter().for_each(|u| out += &format!("  {u}\n"));
        out
    }

    /// Returns the report as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let counts = self.counts.iter().map(|(rank, c)| {
            json!({"rank": rank, "graphs": c.graphs, "breaks": c.breaks, "recompiles": c.recompiles,
                "rerecords": c.rerecords, "unlogged": c.unlogged})
        });
        let activity = self.activity.iter().map(|a| {
            json!({"class": a.kind.name(), "code": a.kind.code().id, "ranks": a.ranks, "compile": a.compile,
                "function": a.function, "site": a.site, "reason": a.reason, "count": a.count})
        });
        let budget = self.budget.iter().map(|l| {
            json!({"key": l.key, "title": l.title, "value": l.value, "limit": l.limit, "pass": l.passes(),
                "detail": l.detail})
        });
        let structure = self.structure.iter().map(|r| {
            json!({"rule": r.title, "value": r.value, "limit": r.limit, "applies": r.applies(),
                "detail": r.detail})
        });
        json!({
            "ranks": counts.collect::<Vec<_>>(),
            "activity": activity.collect::<Vec<_>>(),
            "budget": budget.collect::<Vec<_>>(),
            "pass": self.passes(),
            "structure": structure.collect::<Vec<_>>(),
            "notes": self.notes,
            "not_recorded": UNRECORDED,
        })
    }
}

impl Activity {
    fn to_line(&self) -> String {
        let words = [self.compile.as_str(), self.function.as_str()];
        let mut out = list_ranks(&self.ranks);
        words.iter().filter(|w| !w.is_empty()).for_each(|w| out += &format!(" {w}"));
        if let Some(site) = &self.site {
            out += &format!(" at {site}");
        }
        let times = if self.count == 1 { String::new() } else { format!(" ({} times)", self.count) };
        format!("{out}: {}{times}", self.reason)
    }
}

impl BudgetLine {
    fn to_line(&self) -> String {
        let verdict = if self.passes() { "pass" } else { "FAIL" };
        let detail = if self.detail.is_empty() { String::new() } else { format!(", {}", self.detail) };
        format!("{verdict}  {}: {} (limit {}){detail}", self.title, self.value, self.limit)
    }
}

impl StructureRule {
    fn to_line(&self) -> String {
        let verdict = if self.applies() { "yes" } else { "no " };
        let detail = if self.detail.is_empty() { String::new() } else { format!(": {}", self.detail) };
        format!("{verdict}  {}: {} (from {} on){detail}", self.title, self.value, self.limit)
    }
}
