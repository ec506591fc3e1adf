//! The autopsy report as text and as JSON.

use serde_json::{Value, json};

use super::phrases::format_seconds;
use super::{Autopsy, AutopsyRunState, RecordAgreement};
use crate::flight::write_ranks;

/// Maximum number of rows in the tables of ranks and groups.
const MAX_TABLE_ROWS: usize = 24;

impl Autopsy {
    /// Formats the report as text; `name` is the display name of the run.
    #[must_use]
    pub fn to_text(&self, name: &str) -> String {
        let n = self.ranks.len();
        let state = match self.state {
            AutopsyRunState::Complete => "complete",
            AutopsyRunState::Interrupted => "stopped on request",
            AutopsyRunState::Failed => "failed",
            AutopsyRunState::Running => "running",
            AutopsyRunState::Unfinished => "ended without an end line",
        };
        let mut out = format!("{name}: {state}, {n} rank{}\n\n", if n == 1 { "" } else { "s" });
        if self.findings.is_empty() {
            out += match self.state {
                AutopsyRunState::Complete | AutopsyRunState::Interrupted => {
                    "no problem found: all collectives match the plan\n"
                }
                AutopsyRunState::Running => {
                    "no problem found: no rank has waited longer than work explains\n"
                }
                _ => "no cause found: the flight records name no rank\n",
            };
        }
        for f in &self.findings {
            out += &format!("cause: {}\n", f.summary);
            f.evidence.iter().for_each(|e| out += &format!("  {}\n", e.replace('\n', "\n  ")));
            if !f.chain.is_empty() {
                out += "  chain of waits:\n";
                f.chain.iter().for_each(|c| out += &format!("    {c}\n"));
            }
            out.push('\n');
        }
        if !self.record_comparison.is_empty() {
            out += &format!("{}\n", self.record_comparison);
        }
        out += &format!("next: {}\n", self.next_step);
        out += &self.render_tables();
        if !self.notes.is_empty() {
            out += "\nnotes\n";
            self.notes.iter().for_each(|n| out += &format!("  {n}\n"));
        }
        out
    }

    fn render_tables(&self) -> String {
        let mut out = String::new();
        let mut rows = vec![["rank", "state", "silent", "last event"].map(String::from)];
        for r in &self.ranks {
            let waits = match r.waits_for[..] {
                [] => String::new(),
                _ => format!(" for {}", write_ranks(&r.waits_for)),
            };
            let silent = r.silent_ns.map_or("–".to_string(), format_seconds);
            rows.push([r.rank.to_string(), r.state.clone() + &waits, silent, r.last_event.clone()]);
        }
        if rows.len() > 1 {
            out += "\n";
            out += &align_columns(&rows);
        }
        let rows: Vec<[String; 4]> = self
            .groups
            .iter()
            .flat_map(|g| {
                g.reached.iter().enumerate().map(move |(i, (rank, at))| {
                    let name = if i == 0 { g.group.clone() } else { String::new() };
                    [name, rank.to_string(), at.clone(), String::new()]
                })
            })
            .collect();
        if !rows.is_empty() {
            let head = ["group", "rank", "last collective", ""].map(String::from);
            out += "\n";
            out += &align_columns(&[vec![head], rows].concat());
        }
        out
    }

    /// Returns the report as JSON, with the ranks that the findings name under `culprits`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut v = serde_json::to_value(self).unwrap_or_else(|_| json!({}));
        v["culprits"] = json!(self.culprits());
        v
    }

    /// Returns whether the autopsy found a problem.
    #[must_use]
    pub fn has_problem(&self) -> bool {
        let ended_badly = matches!(self.state, AutopsyRunState::Failed | AutopsyRunState::Unfinished);
        !self.findings.is_empty() || ended_badly || self.agreement == RecordAgreement::Disagrees
    }
}

fn align_columns(rows: &[[String; 4]]) -> String {
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let line = |r: &[String; 4]| {
        let cells: Vec<String> = r.iter().zip(&widths).map(|(c, w)| format!("{c:<w$}")).collect();
        format!("  {}", cells.join("  ")).trim_end().to_string() + "\n"
    };
    let mut out: String = rows.iter().take(MAX_TABLE_ROWS + 1).map(line).collect();
    if rows.len() > MAX_TABLE_ROWS + 1 {
        out += &format!("  … {} more\n", rows.len() - MAX_TABLE_ROWS - 1);
    }
    out
}
