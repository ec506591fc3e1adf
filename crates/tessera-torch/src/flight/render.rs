//! The report as text and as JSON.

use serde_json::{Value, json};

use super::findings::{FaultKind, FlightFinding, FlightReport, RankWait, list_ranks};

/// Maximum number of lines of the wait graph.
const MAX_WAITS: usize = 24;

impl FlightReport {
    /// Returns whether the report accuses a rank.
    #[must_use]
    pub fn accuses(&self) -> bool {
        !self.findings.is_empty()
    }

    /// Formats the report as text; `name` is the display name of the folder.
    #[must_use]
    pub fn to_text(&self, name: &str) -> String {
        let n = self.ranks.len();
        let mut out =
            format!("{name}: Flight Recorder dumps of {n} rank{}\n\n", if n == 1 { "" } else { "s" });
        if self.findings.is_empty() {
            out += "no problem found: no rank departed from its peers\n\n";
        }
        for f in &self.findings {
            out += &f.to_text();
        }
        out += &self.waits_to_text();
        out += "notes\n";
        self.notes.iter().for_each(|n| out += &format!("  {n}\n"));
        out
    }

    /// Formats the wait graph, a line for all ranks that wait in the same way.
    fn waits_to_text(&self) -> String {
        let mut lines: Vec<(Vec<u32>, &RankWait)> = Vec::new();
        for w in self.waits.iter().filter(|w| !w.awaited.is_empty()) {
            let same = |(_, other): &&mut (Vec<u32>, &RankWait)| {
                (&other.awaited, &other.call, &other.group, &other.site)
                    == (&w.awaited, &w.call, &w.group, &w.site)
            };
            match lines.iter_mut().find(same) {
                Some((ranks, _)) => ranks.push(w.rank),
                None => lines.push((vec![w.rank], w)),
            }
        }
        if lines.is_empty() {
            return String::new();
        }
        let mut out = "wait graph\n".to_string();
        for (ranks, w) in lines.iter().take(MAX_WAITS) {
            let verb = if ranks.len() == 1 { "waits" } else { "wait" };
            let (ranks, awaited) = (list_ranks(ranks), list_ranks(&w.awaited));
            out += &format!("  {ranks} {verb} for {awaited} in {} of {}", w.call, w.group);
            out += &w.site.as_ref().map_or("\n".to_string(), |s| format!(", {s}\n"));
        }
        if lines.len() > MAX_WAITS {
            out += &format!("  and {} more\n", lines.len() - MAX_WAITS);
        }
        out + "\n"
    }

    /// Returns the report as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let findings: Vec<Value> = self.findings.iter().map(FlightFinding::to_json).collect();
        let waits = self.waits.iter().map(|w| {
            json!({"rank": w.rank, "awaited": w.awaited, "call": w.call, "group": w.group, "site": w.site})
        });
        json!({
            "findings": findings,
            "waits": waits.collect::<Vec<_>>(),
            "ranks": self.ranks,
            "missing": self.missing,
            "notes": self.notes,
        })
    }
}

impl FlightFinding {
    /// Returns the cause on one line, such as `rank 1: skipped a collective, at collective 7 of group 0`.
    #[must_use]
    pub fn summarise(&self) -> String {
        let (ranks, kind, n) = (list_ranks(&self.ranks), self.kind.name(), self.count.unwrap_or(1));
        match (self.kind, self.sequence) {
            (FaultKind::WaitCycle, _) if self.ranks.len() > 1 => format!("{ranks} {kind}"),
            (FaultKind::WaitCycle, _) => format!("{ranks} issued collectives in an order of its own"),
            (FaultKind::Skipped, Some(number)) if n > 1 => {
                format!("{ranks}: skipped {n} collectives, from collective {number} of {} on", self.group)
            }
            (FaultKind::Extra, Some(number)) if n > 1 => {
                format!(
                    "{ranks}: issued {n} extra collectives, from collective {number} of {} on",
                    self.group
                )
            }
            (_, Some(number)) => format!("{ranks}: {kind}, at collective {number} of {}", self.group),
            (_, None) => format!("{ranks}: {kind}, at a send or receive of {}", self.group),
        }
    }

    fn to_text(&self) -> String {
        let mut out = format!("cause: {} ({})\n", self.summarise(), self.certainty.name());
        for side in &self.sides {
            out += &format!("  {}: {} of {}", list_ranks(&side.ranks), side.call, side.group);
            out += &side.site.as_ref().map_or("\n".to_string(), |s| format!("\n    {s}\n"));
        }
        self.doubts.iter().for_each(|d| out += &format!("  but {d}\n"));
        out += &format!("next: {}\n\n", self.next_step());
        out
    }

    /// Returns what the user should do.
    #[must_use]
    pub fn next_step(&self) -> &'static str {
        match self.kind {
            FaultKind::Skipped | FaultKind::Extra => {
                "look for a condition on rank, data or a cache around this call: every rank must issue it, or none"
            }
            FaultKind::OtherOp => {
                "look at the branch that leads to these two lines: the ranks took different ones"
            }
            FaultKind::OtherShape => {
                "compare what the ranks' inputs were padded or bucketed to: the sizes must be agreed on before the call"
            }
            FaultKind::OtherDtype => "compare the ranks' autocast and precision settings around this call",
            FaultKind::WaitCycle => "issue the collectives of these groups in one order on every rank",
            FaultKind::HostSilent => {
                "look at what this rank's host does: py-spy dump --pid PID shows whether it reads data, compiles, or waits for a lock"
            }
            FaultKind::DeviceBehind => {
                "look at what this rank's device runs: a long kernel before the collective, or a clock that was lowered"
            }
            FaultKind::NoDump => {
                "look at the log and the host of this rank: a signal, dmesg for the OOM killer, nvidia-smi for Xid errors"
            }
        }
    }

    fn to_json(&self) -> Value {
        let sides = self
            .sides
            .iter()
            .map(|s| json!({"ranks": s.ranks, "call": s.call, "group": s.group, "site": s.site}));
        json!({
            "kind": self.kind.name(),
            "ranks": self.ranks,
            "certainty": self.certainty.name(),
            "doubts": self.doubts,
            "group": self.group,
            "sequence": self.sequence,
            "count": self.count,
            "sides": sides.collect::<Vec<_>>(),
            "next": self.next_step(),
        })
    }
}
