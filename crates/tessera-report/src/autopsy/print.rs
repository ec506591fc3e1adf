//! The report as text for a person and as JSON for a program.

use serde_json::{Value, json};

use super::say::seconds;
use super::{Agreement, Autopsy, Class, RunState};
use crate::flight::write_ranks;

/// Most rows of the tables of ranks and groups.
const MOST_ROWS: usize = 24;

impl Autopsy {
    /// For a person; `name` is what the run is called.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        let n = self.ranks.len();
        let state = match self.state {
            RunState::Complete => "complete",
            RunState::Interrupted => "stopped on request",
            RunState::Failed => "failed",
            RunState::Running => "running",
            RunState::Unfinished => "over, without an end line",
        };
        let mut out = format!("{name}: {state}, {n} rank{}\n\n", if n == 1 { "" } else { "s" });
        if self.findings.is_empty() {
            out += match self.state {
                RunState::Complete | RunState::Interrupted => {
                    "nothing wrong: every collective is the plan’s\n"
                }
                RunState::Running => "nothing wrong now: nobody waits longer than work takes\n",
                _ => "no culprit: the flight records name nobody\n",
            };
        }
        for f in &self.findings {
            out += &format!("cause: {}\n", f.says);
            f.evidence.iter().for_each(|e| out += &format!("  {}\n", e.replace('\n', "\n  ")));
            if !f.chain.is_empty() {
                out += "  who waits for whom:\n";
                f.chain.iter().for_each(|c| out += &format!("    {c}\n"));
            }
            out.push('\n');
        }
        if !self.record_says.is_empty() {
            out += &format!("{}\n", self.record_says);
        }
        out += &format!("next: {}\n", self.next);
        out += &self.tables();
        if !self.notes.is_empty() {
            out += "\nnotes\n";
            self.notes.iter().for_each(|n| out += &format!("  {n}\n"));
        }
        out
    }

    fn tables(&self) -> String {
        let mut out = String::new();
        let mut rows = vec![["rank", "state", "silent", "last word"].map(String::from)];
        for r in &self.ranks {
            let waits = match r.waits_for[..] {
                [] => String::new(),
                _ => format!(" for {}", write_ranks(&r.waits_for)),
            };
            let silent = r.silent_ns.map_or("–".to_string(), seconds);
            rows.push([r.rank.to_string(), r.state.clone() + &waits, silent, r.at.clone()]);
        }
        if rows.len() > 1 {
            out += "\n";
            out += &columns(&rows);
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
            let head = ["group", "rank", "its last collective", ""].map(String::from);
            out += "\n";
            out += &columns(&[vec![head], rows].concat());
        }
        out
    }

    /// For a program.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut v = serde_json::to_value(self).unwrap_or_else(|_| json!({}));
        v["culprits"] = json!(self.culprits());
        v
    }

    /// Whether something is wrong.
    #[must_use]
    pub fn is_wrong(&self) -> bool {
        let ended_badly = matches!(self.state, RunState::Failed | RunState::Unfinished);
        !self.findings.is_empty() || ended_badly || self.agreement == Agreement::Disagrees
    }
}

impl Class {
    /// Its name, as in JSON and in names of drawings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Class::Departed => "departed",
            Class::Failed => "failed",
            Class::Drifted => "drifted",
            Class::Refused => "refused",
            Class::HostSilent => "host_silent",
            Class::DeviceBehind => "device_behind",
            Class::NeverReached => "never_reached",
            Class::Cycle => "cycle",
            Class::Transport => "transport",
            Class::Launcher => "launcher",
        }
    }
}

fn columns(rows: &[[String; 4]]) -> String {
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let line = |r: &[String; 4]| {
        let cells: Vec<String> = r.iter().zip(&widths).map(|(c, w)| format!("{c:<w$}")).collect();
        format!("  {}", cells.join("  ")).trim_end().to_string() + "\n"
    };
    let mut out: String = rows.iter().take(MOST_ROWS + 1).map(line).collect();
    if rows.len() > MOST_ROWS + 1 {
        out += &format!("  … {} more\n", rows.len() - MOST_ROWS - 1);
    }
    out
}
