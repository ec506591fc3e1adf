//! The report of planning by estimate, the same for every kind of model: terminal text, HTML page
//! and JSON.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::json;
use tessera_base::GateStatus;
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_report::html::{EstimatePage, EstimateVerdict, render_estimate};
use tessera_report::timeline::{RankName, Timeline, TimelineSpan};

/// The report of a search by estimate, with the contents of its output files.
#[derive(Debug, Clone)]
pub struct EstimateReport {
    /// Content of the HTML page, from which the terminal text is rendered as well.
    pub page: EstimatePage,
    /// Content of `estimate.json`: the query, the verdict and the ranked mappings.
    pub json: serde_json::Value,
    /// The estimated timeline; empty if no mapping fits.
    pub timeline: Timeline,
    /// Text of the environment file for NCCL and PyTorch.
    pub env_script: String,
    /// The table of ranks and devices, if a mapping fits.
    pub rank_table: Option<String>,
    /// The program of one layer's attention, if the mapping's scheme has one.
    pub attention_program: Option<String>,
}

/// Maximum number of mappings that a terminal shows; the page lists all of them.
const MAX_MAPPINGS: usize = 8;

impl EstimateReport {
    /// Returns whether a mapping fits and meets the deadline, if the objective is one.
    #[must_use]
    pub fn is_feasible(&self) -> bool {
        self.page.verdict != EstimateVerdict::Rejected
    }

    /// Returns whether a gate fails. A failed gate rejects no mapping.
    #[must_use]
    pub fn has_failed_gate(&self) -> bool {
        self.page.gates.iter().any(|g| g.verdict == GateStatus::Fail)
    }

    /// Copies the page's verdict, warnings, mitigations and advice tables into the JSON. A table
    /// keeps its id when its title is reworded; its cells are formatted as on the page, with units.
    pub(crate) fn export_page_json(&mut self) {
        let p = &self.page;
        let verdict = match p.verdict {
            EstimateVerdict::Good => "good",
            EstimateVerdict::Warn => "warns",
            EstimateVerdict::Rejected => "refused",
        };
        let action = |(what, then): &(String, String)| json!({"what": what, "detail": then});
        self.json["verdict"] = verdict.into();
        self.json["summary"] = p.recommendation.clone().into();
        self.json["warnings"] = p.warnings.clone().into();
        self.json["mitigations"] = p
            .failure_modes
            .iter()
            .map(|r| {
                let actions: Vec<_> = r.mitigations.iter().map(action).collect();
                json!({"mode": r.mode, "symptom": r.symptom, "actions": actions})
            })
            .collect();
        self.json["advice"] = p
            .advice
            .iter()
            .map(|a| json!({"id": a.id, "title": a.title, "note": a.note, "columns": a.columns, "rows": a.rows}))
            .collect();
    }

    /// Renders the page as one HTML file.
    #[must_use]
    pub fn to_html(&self) -> String {
        render_estimate(&self.page)
    }

    /// Renders the page as plain text for a terminal.
    #[must_use]
    pub fn to_text(&self) -> String {
        let p = &self.page;
        let mut out = format!("{}\n{}\n", p.title, p.recommendation);
        for w in &p.warnings {
            let _ = writeln!(out, "warning: {w}");
        }
        if !p.headline_numbers.is_empty() {
            let numbers: Vec<String> =
                p.headline_numbers.iter().map(|n| format!("{} {}, {}", n.value, n.unit, n.label)).collect();
            push_table(&mut out, "", numbers.into_iter().map(|n| vec![n]).collect(), &[]);
        }
        push_table(
            &mut out,
            "mapping",
            p.mapping_facts.iter().map(|(k, v)| vec![k.clone(), v.clone()]).collect(),
            &[],
        );
        let total_ns: f64 = p.step_parts.iter().map(|(_, ns)| ns).sum();
        let parts = p.step_parts.iter().filter(|(_, ns)| *ns > 0.0).map(|(name, ns)| {
            let ms = ns / 1e6;
            vec![name.clone(), format!("{ms:.3} ms"), format!("{:.1} %", ns / total_ns * 100.0)]
        });
        push_table(&mut out, "where the time goes", parts.collect(), &[1, 2]);
        let memory = p.memory.iter().map(|m| {
            let items: Vec<String> = m
                .bytes_by_use
                .iter()
                .map(|(name, bytes)| format!("{name} {}", tessera_base::Bytes(*bytes)))
                .collect();
            let all: u64 = m.bytes_by_use.iter().map(|(_, b)| b).sum();
            let of = m.capacity.map_or(String::new(), |c| format!(" of {}", tessera_base::Bytes(c)));
            vec![m.role.clone(), format!("{}{of}", tessera_base::Bytes(all)), items.join(", ")]
        });
        push_table(&mut out, "memory of the fullest rank", memory.collect(), &[1]);
        let gates = p.gates.iter().map(|g| {
            let word = match g.verdict {
                GateStatus::Fail => "FAIL",
                other => other.name(),
            };
            vec![word.to_string(), g.title.clone(), g.value.clone(), g.limit.clone()]
        });
        push_table(&mut out, "gates (tessera plan --out DIR shows the arithmetic)", gates.collect(), &[2, 3]);
        for r in &p.failure_modes {
            let actions = r.mitigations.iter().map(|(what, then)| vec![what.clone(), then.clone()]);
            push_table(&mut out, &format!("{}: {}", r.mode, r.symptom), actions.collect(), &[]);
        }
        for a in &p.advice {
            let mut rows = vec![a.columns.clone()];
            rows.extend(a.rows.iter().cloned());
            push_table(
                &mut out,
                &format!("worth knowing: {}\n  {}", a.title, a.note),
                rows,
                &a.numeric_columns(),
            );
        }
        if p.mappings.len() > 1 {
            let mut rows = vec![p.mapping_columns.clone()];
            rows.extend(p.mappings.iter().take(MAX_MAPPINGS).cloned());
            push_table(
                &mut out,
                "alternative mappings",
                rows,
                &(1..p.mapping_columns.len()).collect::<Vec<_>>(),
            );
        }
        let all: u64 = p.rejections.iter().map(|(_, n, _)| n).sum();
        let refused = p.rejections.iter().map(|(why, n, one)| vec![n.to_string(), why.clone(), one.clone()]);
        push_table(&mut out, &format!("refused: {all} of {}", p.considered_count), refused.collect(), &[0]);
        if !p.accuracy_notes.is_empty() {
            out.push('\n');
            for s in &p.accuracy_notes {
                let _ = writeln!(out, "{s}");
            }
        }
        out
    }
}

/// Converts intervals to a timeline; `stream_of` returns the stream of an interval.
pub fn intervals_to_timeline(bars: &[Interval], stream_of: impl Fn(&Interval) -> String) -> Timeline {
    let at = |ns: f64| ns.max(0.0).round() as u64;
    let spans = bars.iter().map(|b| TimelineSpan {
        rank: b.rank,
        stream: stream_of(b),
        name: b.name.clone(),
        chunk: 0,
        start_ns: at(b.start_ns),
        end_ns: at(b.end_ns).max(at(b.start_ns)),
        collectives: u32::from(b.kind == IntervalKind::Collective),
        waits: None,
    });
    let ranks: BTreeSet<u32> = bars.iter().map(|b| b.rank).collect();
    let mut t = Timeline {
        spans: spans.collect(),
        ranks: ranks.into_iter().map(|rank| RankName { rank, name: format!("rank {rank}") }).collect(),
        ..Timeline::default()
    };
    t.sort_and_name();
    t
}

/// Appends a titled table, with the columns `right` right-aligned.
fn push_table(out: &mut String, title: &str, rows: Vec<Vec<String>>, right: &[usize]) {
    if rows.is_empty() {
        return;
    }
    if title.is_empty() {
        out.push('\n');
    } else {
        let _ = write!(out, "\n{title}\n");
    }
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let wide: Vec<usize> = (0..columns)
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        let mut line = String::from(" ");
        for (c, cell) in row.iter().enumerate() {
            let pad = " ".repeat(wide[c].saturating_sub(cell.chars().count()));
            if right.contains(&c) {
                let _ = write!(line, " {pad}{cell} ");
            } else {
                let _ = write!(line, " {cell}{pad} ");
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}
