//! The HTML report of a plan that was estimated and not run: the chosen mapping, each rank's memory
//! and timeline, the gates, the accuracy of the estimate, and the reasons for which other mappings
//! were rejected.

use std::fmt::Write;

use tessera_base::{Bytes, Nanoseconds};

use super::{CSS, LOGO, RoleMemoryRow};
use crate::markup::{escape_text, format_count, format_plural};
use crate::svg::{self, Palette};
use crate::timeline::{TimeWindow, Timeline, phase_kind};

/// Maximum number of rows in a table of mappings.
pub const MAX_MAPPINGS: usize = 40;

/// Content of the report. Empty parts are left out.
#[derive(Debug, Clone, Default)]
pub struct EstimatePage {
    /// Version of tessera that computed the estimate.
    pub tessera: String,
    /// What is planned, such as `deepseek-v3 on 72 GPUs of gb200-nvl72`.
    pub title: String,
    /// Whether a mapping fits and whether its gates pass.
    pub verdict: EstimateVerdict,
    /// One sentence that recommends what to do.
    pub recommendation: String,
    /// Warnings, one sentence each.
    pub warnings: Vec<String>,
    /// The few headline numbers.
    pub headline_numbers: Vec<HeadlineNumber>,
    /// Properties of the chosen mapping: a key and its value.
    pub mapping_facts: Vec<(String, String)>,
    /// Breakdown of a step: a name and nanoseconds per part, in drawing order.
    pub step_parts: Vec<(String, f64)>,
    /// One sentence that explains the breakdown.
    pub step_parts_note: String,
    /// Memory use of the ranks.
    pub memory: Vec<RoleMemoryRow>,
    /// Checks of the plan that pass, warn or fail, and so determine the verdict.
    pub gates: Vec<PlanGate>,
    /// Timelines, each with a title and a sentence.
    pub timelines: Vec<TimelineChart>,
    /// Likely failure modes, and mitigations with their predicted effect.
    pub failure_modes: Vec<FailureModeAdvice>,
    /// Advice beyond the gates.
    pub advice: Vec<AdviceTable>,
    /// Column names of the table of mappings.
    pub mapping_columns: Vec<String>,
    /// Candidate mappings, the chosen one first.
    pub mappings: Vec<Vec<String>>,
    /// Number of mappings that the search considered.
    pub considered_count: u64,
    /// Why mappings were rejected: the reason, how many mappings, and one example in words.
    pub rejections: Vec<(String, u64, String)>,
    /// Where the figures come from, and which of them are estimates.
    pub accuracy_notes: Vec<String>,
    /// Text of the chosen mapping as a mapping.toml file.
    pub mapping: String,
    /// Command that reproduces this report.
    pub command: String,
}

/// Verdict on a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EstimateVerdict {
    /// The plan fits and its gates pass.
    #[default]
    Good,
    /// The plan fits, but a gate warns or fails.
    Warn,
    /// No mapping fits, so there is no plan to recommend.
    Rejected,
}

/// One of the few numbers that the report shows first and largest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeadlineNumber {
    /// The value, such as `12.4`.
    pub value: String,
    /// The unit, such as `ms`.
    pub unit: String,
    /// Description of the number.
    pub label: String,
}

/// A gate of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanGate {
    /// Question that the gate answers.
    pub title: String,
    /// Value with its unit.
    pub value: String,
    /// Limit of the value.
    pub limit: String,
    /// Outcome: pass, warn, fail or not applicable.
    pub verdict: GateVerdict,
    /// The arithmetic and the term that dominates it.
    pub explanation: String,
}

/// Outcome of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateVerdict {
    /// The value is within the limit.
    Pass,
    /// The value is close to the limit.
    Warn,
    /// The value exceeds the limit.
    Fail,
    /// The gate does not apply to the plan.
    NotApplicable,
}

/// A timeline to draw.
#[derive(Debug, Clone, Default)]
pub struct TimelineChart {
    /// Title that the report shows with the timeline.
    pub title: String,
    /// One sentence on how to read the drawing.
    pub note: String,
    /// Timeline that is drawn.
    pub timeline: Timeline,
}

/// A failure mode and its mitigations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureModeAdvice {
    /// Name of the failure mode.
    pub mode: String,
    /// Symptom that makes the failure mode likely.
    pub symptom: String,
    /// Mitigations: the change, and its predicted effect.
    pub mitigations: Vec<(String, String)>,
}

/// A table of advice and the conclusion from it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AdviceTable {
    /// Stable identifier for programs, in lowercase; the title may be reworded.
    pub id: &'static str,
    /// Title of the table.
    pub title: String,
    /// Conclusion from the table, in one or two sentences.
    pub note: String,
    /// Column headings, one for each cell of a row.
    pub columns: Vec<String>,
    /// Rows, each with one cell per column.
    pub rows: Vec<Vec<String>>,
}

/// Cell length in characters from which a column counts as text.
const MIN_TEXT_CHARS: usize = 24;

impl AdviceTable {
    /// Returns the indices of numeric columns: all but the first column and those with long cells.
    #[must_use]
    pub fn numeric_columns(&self) -> Vec<usize> {
        find_numeric_columns(&self.columns, &self.rows)
    }
}

fn find_numeric_columns(columns: &[String], rows: &[Vec<String>]) -> Vec<usize> {
    let wordy =
        |c: &usize| rows.iter().any(|r| r.get(*c).is_some_and(|s| s.chars().count() >= MIN_TEXT_CHARS));
    (1..columns.len()).filter(|c| !wordy(c)).collect()
}

/// Renders the report as one HTML file.
#[must_use]
pub fn render_estimate(page: &EstimatePage) -> String {
    let (class, word) = match page.verdict {
        EstimateVerdict::Good => ("good", "Fits"),
        EstimateVerdict::Warn => ("warn", "Fits, with warnings"),
        EstimateVerdict::Rejected => ("bad", "Rejected"),
    };
    let mut out = String::with_capacity(64 << 10);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <title>{0} · Tessera</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<p class=\"brow\">{LOGO}<span>Tessera plan, estimated</span></p>\n<h1>{0}</h1>\n\
         <p class=\"verdict {class}\"><span><b class=\"{class}\">{word}.</b> {1}</span></p>\n",
        escape_text(&page.title),
        escape_text(&page.recommendation)
    );
    for warning in &page.warnings {
        let _ = writeln!(
            out,
            "<p class=\"verdict warn\"><span><b class=\"warn\">Warning:</b> {}</span></p>",
            escape_text(warning)
        );
    }
    out.push_str("</header>\n");
    write_numbers(&mut out, &page.headline_numbers);
    write_facts(&mut out, &page.mapping_facts);
    write_step_parts(&mut out, page);
    write_timelines(&mut out, &page.timelines);
    if !page.memory.is_empty() {
        write_memory(&mut out, &page.memory);
    }
    write_gates(&mut out, &page.gates);
    write_failure_modes(&mut out, &page.failure_modes);
    write_advice(&mut out, &page.advice);
    write_mappings(&mut out, page);
    write_rejections(&mut out, page);
    write_accuracy(&mut out, page);
    let _ = write!(
        out,
        "<footer>Written by tessera {}. Every time on this page is an estimate.</footer>\n</main>\n</body>\n</html>\n",
        escape_text(&page.tessera)
    );
    out
}

fn write_numbers(out: &mut String, numbers: &[HeadlineNumber]) {
    if numbers.is_empty() {
        return;
    }
    out.push_str("<div class=\"hero solo\"><dl class=\"numbers\">");
    for n in numbers {
        let unit = if n.unit.is_empty() {
            String::new()
        } else {
            format!("<small>{}</small>", escape_text(&n.unit))
        };
        let _ = write!(
            out,
            "<div><dt>{}</dt><dd>{}{unit}</dd></div>",
            escape_text(&n.label),
            escape_text(&n.value)
        );
    }
    out.push_str("</dl></div>\n");
}

fn write_facts(out: &mut String, facts: &[(String, String)]) {
    if facts.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Mapping</h2>\n<dl class=\"facts\">\n");
    for (key, value) in facts {
        let _ = writeln!(out, "<div><dt>{}</dt><dd>{}</dd></div>", escape_text(key), escape_text(value));
    }
    out.push_str("</dl>\n</section>\n");
}

/// Writes the breakdown of a step: one stacked bar, then a table row for each part.
fn write_step_parts(out: &mut String, page: &EstimatePage) {
    let parts: Vec<&(String, f64)> = page.step_parts.iter().filter(|(_, ns)| *ns > 0.0).collect();
    let whole: f64 = parts.iter().map(|(_, ns)| ns).sum();
    if parts.is_empty() || !whole.is_finite() {
        return;
    }
    let _ = write!(
        out,
        "<section>\n<h2>Where the time goes</h2>\n<p class=\"note\">{}</p>\n<svg height=\"26\" role=\"img\" aria-label=\"parts of a step\">",
        escape_text(&page.step_parts_note)
    );
    let mut at = 0.0;
    for (i, (name, ns)) in parts.iter().enumerate() {
        let wide = ns / whole * 100.0;
        let _ = write!(
            out,
            "<rect class=\"p{}\" x=\"{at:.3}%\" width=\"{wide:.3}%\" height=\"26\"><title>{}: {}</title></rect>",
            i.min(8),
            escape_text(name),
            format_time(*ns)
        );
        at += wide;
    }
    out.push_str("</svg>\n<div class=\"scroll\"><table>\n<tbody>\n");
    for (i, (name, ns)) in parts.iter().enumerate() {
        let share = ns / whole * 100.0;
        let shown = if share < 0.5 { "&lt; 1".to_string() } else { format!("{share:.0}") };
        let _ = writeln!(
            out,
            "<tr><td><i class=\"dot b{0}\"></i>{1}</td><td>{2}</td><td>{shown} %<span class=\"meter\"><i class=\"b{0}\" style=\"width:{share:.1}%\"></i></span></td></tr>",
            i.min(8),
            escape_text(name),
            format_time(*ns)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_timelines(out: &mut String, drawings: &[TimelineChart]) {
    let drawings: Vec<&TimelineChart> = drawings.iter().filter(|d| !d.timeline.spans.is_empty()).collect();
    if drawings.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Timelines</h2>\n");
    for d in drawings {
        let t = &d.timeline;
        let start_ns = t.spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
        let end_ns = t.spans.iter().map(|s| s.end_ns).max().unwrap_or(0).max(start_ns + 1);
        let _ = write!(
            out,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n",
            escape_text(&d.title),
            escape_text(&d.note)
        );
        let palette = Palette::new(t);
        out.push_str(&palette.render_legend(|kind| t.spans.iter().any(|s| phase_kind(&s.name) == kind)));
        out.push_str(&svg::draw_lanes(t, TimeWindow { start_ns, end_ns }, &palette));
        if t.ranks.len() > svg::MAX_RANKS {
            let more = t.ranks.len() - svg::MAX_RANKS;
            let _ = writeln!(out, "<p class=\"note\">{more} more ranks are in the trace.</p>");
        }
    }
    out.push_str("</section>\n");
}

/// Writes the memory of the fullest rank: a row for each use and a column for each memory tier, so
/// that the table is only as wide as the number of tiers.
fn write_memory(out: &mut String, rows: &[RoleMemoryRow]) {
    let mut uses: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.bytes_by_use) {
        if !uses.contains(&name.as_str()) {
            uses.push(name);
        }
    }
    let line = |head: &str, cell: &dyn Fn(&RoleMemoryRow) -> String| -> String {
        let cells: String = rows.iter().map(|r| format!("<td>{}</td>", cell(r))).collect();
        format!("<tr><td>{}</td>{cells}</tr>\n", escape_text(head))
    };
    let heads: String = rows.iter().map(|r| format!("<th>{}</th>", escape_text(&r.role))).collect();
    let ranks = rows.first().map_or("", |r| r.ranks.as_str());
    let _ = write!(
        out,
        "<section>\n<h2>Memory</h2>\n<p class=\"note\">One rank, {}.</p>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n",
        escape_text(ranks)
    );
    let sum = |r: &RoleMemoryRow| r.bytes_by_use.iter().fold(0u64, |a, (_, b)| a.saturating_add(*b));
    for name in uses {
        out.push_str(&line(name, &|r| {
            let mut bytes = r.bytes_by_use.iter().filter(|(n, _)| n == name).map(|(_, b)| *b).peekable();
            match bytes.peek() {
                Some(_) => Bytes(bytes.fold(0, u64::saturating_add)).to_string(),
                None => "–".to_string(),
            }
        }));
    }
    out.push_str(&line("sum", &|r| Bytes(sum(r)).to_string()));
    if rows.iter().any(|r| r.capacity.is_some_and(|c| c > 0)) {
        out.push_str(&line("of capacity", &|r| {
            r.capacity.filter(|c| *c > 0).map_or("–".to_string(), |c| {
                let share = sum(r) as f64 / c as f64 * 100.0;
                let class = if share > 100.0 { "b4" } else { "b1" };
                let wide = share.min(100.0);
                format!(
                    "{share:.0} % of {}<span class=\"meter\"><i class=\"{class}\" style=\"width:{wide:.1}%\"></i></span>",
                    Bytes(c)
                )
            })
        }));
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_gates(out: &mut String, gates: &[PlanGate]) {
    if gates.is_empty() {
        return;
    }
    let of = |v| gates.iter().filter(|g| g.verdict == v).count();
    let _ = write!(
        out,
        "<section>\n<h2>Gates</h2>\n<p class=\"note\">{} pass, {} warn, {} fail, {} do not apply. Limits are indicative; all of them are in one file that can be replaced.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>gate</th><th>value</th><th>limit</th><th></th></tr></thead>\n<tbody>\n",
        of(GateVerdict::Pass),
        of(GateVerdict::Warn),
        of(GateVerdict::Fail),
        of(GateVerdict::NotApplicable)
    );
    for g in gates {
        let (class, word) = match g.verdict {
            GateVerdict::Pass => ("good", "pass"),
            GateVerdict::Warn => ("warn", "warn"),
            GateVerdict::Fail => ("bad", "fail"),
            GateVerdict::NotApplicable => ("", "n/a"),
        };
        let _ = writeln!(
            out,
            "<tr><td class=\"words\">{}<small>{}</small></td><td>{}</td><td>{}</td><td class=\"{class}\">{word}</td></tr>",
            escape_text(&g.title),
            escape_text(&g.explanation),
            escape_text(&g.value),
            escape_text(&g.limit)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_failure_modes(out: &mut String, failure_modes: &[FailureModeAdvice]) {
    if failure_modes.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Likely failure modes and mitigations</h2>\n");
    for r in failure_modes {
        let _ = write!(
            out,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n<div class=\"scroll\"><table>\n<tbody>\n",
            escape_text(&r.mode),
            escape_text(&r.symptom)
        );
        for (what, then) in &r.mitigations {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td class=\"words\">{}</td></tr>",
                escape_text(what),
                escape_text(then)
            );
        }
        out.push_str("</tbody>\n</table></div>\n");
    }
    out.push_str("</section>\n");
}

/// Writes the conclusions; the tables behind them are collapsed.
fn write_advice(out: &mut String, advice: &[AdviceTable]) {
    if advice.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Advice</h2>\n");
    for a in advice {
        let numbers = a.numeric_columns();
        let cell = |tag: &str, at: usize, words: &str| {
            let class = match (at > 0 && !numbers.contains(&at), tag) {
                (false, _) => "",
                (true, "th") => " class=\"l\"",
                (true, _) => " class=\"words\"",
            };
            format!("<{tag}{class}>{}</{tag}>", escape_text(words))
        };
        let line = |tag: &str, cells: &[String]| -> String {
            cells.iter().enumerate().map(|(at, words)| cell(tag, at, words)).collect()
        };
        let _ = write!(
            out,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n<details><summary>Table</summary><div class=\"scroll\"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n",
            escape_text(&a.title),
            escape_text(&a.note),
            line("th", &a.columns)
        );
        for row in &a.rows {
            let _ = writeln!(out, "<tr>{}</tr>", line("td", row));
        }
        out.push_str("</tbody>\n</table></div></details>\n");
    }
    out.push_str("</section>\n");
}

fn write_mappings(out: &mut String, page: &EstimatePage) {
    if page.mappings.is_empty() {
        return;
    }
    let numbers = find_numeric_columns(&page.mapping_columns, &page.mappings);
    let cell = |tag: &str, at: usize, words: &str| {
        let class = match (numbers.contains(&at), tag) {
            (true, _) => "",
            (false, "th") => " class=\"l\"",
            (false, _) => " class=\"words\"",
        };
        format!("<{tag}{class}>{}</{tag}>", escape_text(words))
    };
    let line = |tag: &str, cells: &[String]| -> String {
        cells.iter().enumerate().map(|(at, words)| cell(tag, at, words)).collect()
    };
    let heads = line("th", &page.mapping_columns);
    let _ = write!(
        out,
        "<section>\n<h2>Other mappings</h2>\n<p class=\"note\">The chosen mapping first, then mappings that are better in at least one metric.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
    );
    for row in page.mappings.iter().take(MAX_MAPPINGS) {
        let _ = writeln!(out, "<tr>{}</tr>", line("td", row));
    }
    out.push_str("</tbody>\n</table></div>\n");
    if page.mappings.len() > MAX_MAPPINGS {
        let more = format_plural((page.mappings.len() - MAX_MAPPINGS) as u64, "more");
        let _ = writeln!(out, "<p class=\"note\">{more} left out.</p>");
    }
    out.push_str("</section>\n");
}

fn write_rejections(out: &mut String, page: &EstimatePage) {
    if page.rejections.is_empty() {
        return;
    }
    let all: u64 = page.rejections.iter().map(|(_, n, _)| n).sum();
    let _ = write!(
        out,
        "<section>\n<h2>Rejected mappings</h2>\n<p class=\"note\">{} of {} mappings, each counted under its first reason.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>reason</th><th>mappings</th><th class=\"l\">example</th></tr></thead>\n<tbody>\n",
        format_count(all),
        format_count(page.considered_count)
    );
    for (reason, n, example) in &page.rejections {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td class=\"words\">{}</td></tr>",
            escape_text(reason),
            format_count(*n),
            escape_text(example)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_accuracy(out: &mut String, page: &EstimatePage) {
    out.push_str("<section>\n<h2>Accuracy and sources</h2>\n");
    for s in &page.accuracy_notes {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", escape_text(s));
    }
    if !page.mapping.is_empty() {
        let _ = writeln!(
            out,
            "<details><summary>mapping.toml</summary><pre>{}</pre></details>",
            escape_text(&page.mapping)
        );
    }
    if !page.command.is_empty() {
        let _ = writeln!(out, "<h3>Reproduce</h3>\n<pre class=\"run\">{}</pre>", escape_text(&page.command));
    }
    out.push_str("</section>\n");
}

fn format_time(ns: f64) -> String {
    Nanoseconds(ns.max(0.0).round() as u64).to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::TimelineSpan;

    fn page() -> EstimatePage {
        let span = |name: &str, stream: &str, start_ns, end_ns| TimelineSpan {
            rank: 0,
            stream: stream.into(),
            name: name.into(),
            chunk: 0,
            start_ns,
            end_ns,
            collectives: 0,
            waits: None,
        };
        let mut timeline = Timeline {
            spans: vec![span("attention", "compute", 0, 30), span("all_to_all", "a2a", 10, 50)],
            ..Timeline::default()
        };
        timeline.sort_and_name();
        EstimatePage {
            title: "a <model> on 72".into(),
            verdict: EstimateVerdict::Warn,
            recommendation: "one gate warns".into(),
            step_parts: vec![("gemm".into(), 3e6), ("waiting".into(), 1e6), ("none".into(), 0.0)],
            gates: vec![PlanGate {
                title: "overlap".into(),
                value: "0.50".into(),
                limit: "≥ 0.60".into(),
                verdict: GateVerdict::Fail,
                explanation: "all-gather is exposed".into(),
            }],
            timelines: vec![TimelineChart { title: "a layer".into(), note: "by stream".into(), timeline }],
            considered_count: 1_000,
            rejections: vec![("memory".into(), 900, "190 of 186 GB".into())],
            ..EstimatePage::default()
        }
    }

    #[test]
    fn the_report_shows_chosen_and_rejected_mappings() {
        let html = render_estimate(&page());
        for part in [
            "a &lt;model&gt; on 72",
            "Fits, with warnings.",
            "<rect class=\"p0\" x=\"0.000%\" width=\"75.000%\"",
            "0 pass, 0 warn, 1 fail, 0 do not apply",
            "900 of 1\u{202f}000 mappings",
            "190 of 186 GB",
            "all_to_all, chunk 0: 40 ns",
            "Every time on this page is an estimate",
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
        assert!(!html.contains("<td>none"), "a part of zero length is not listed");
        assert_eq!(html, render_estimate(&page()));
    }

    #[test]
    fn empty_sections_are_left_out() {
        let html = render_estimate(&EstimatePage::default());
        for part in
            ["Gates", "Memory", "Timelines", "Rejected mappings", "Other mappings", "Where the time goes"]
        {
            assert!(!html.contains(&format!("<h2>{part}")), "{part}");
        }
    }

    #[test]
    fn memory_has_a_column_per_tier_and_long_cells_wrap() {
        let row = |role: &str, items: &[(&str, u64)], capacity| RoleMemoryRow {
            role: role.into(),
            ranks: "the fullest".into(),
            bytes_by_use: items.iter().map(|(n, b)| ((*n).to_string(), *b)).collect(),
            capacity,
        };
        let memory = vec![
            row("hbm", &[("weights", 1 << 30), ("cache", 1 << 20)], Some(4 << 30)),
            row("host", &[("experts", 1 << 30)], None),
        ];
        let knobs = "striped, ring=2, zb-h2, micro-batch 1".to_string();
        let html = render_estimate(&EstimatePage {
            memory,
            warnings: vec!["groups leave <their> domain".into()],
            mapping_columns: vec!["mapping".into(), "step".into(), "knobs".into()],
            mappings: vec![vec!["tp=8".into(), "1.1 s".into(), knobs.clone()]],
            ..page()
        });
        for part in [
            "<th></th><th>hbm</th><th>host</th>",
            "<tr><td>weights</td><td>1.00 GiB</td><td>–</td></tr>",
            "<tr><td>experts</td><td>–</td><td>1.00 GiB</td></tr>",
            "<td>25 % of 4.00 GiB<span",
            "<b class=\"warn\">Warning:</b> groups leave &lt;their&gt; domain",
            &format!("<td>1.1 s</td><td class=\"words\">{knobs}</td>"),
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
    }

    #[test]
    fn advice_precedes_its_table() {
        assert!(!render_estimate(&page()).contains("<h2>Advice"));
        let sum = "44040192 numbers × 1 B × 58 layers".to_string();
        let advice = AdviceTable {
            id: "memory-formulas",
            title: "Memory <breakdown>".into(),
            note: "One rank.".into(),
            columns: vec!["term".into(), "bytes".into(), "sum".into()],
            rows: vec![vec!["experts".into(), "2.55 GB".into(), sum.clone()]],
        };
        assert_eq!(advice.numeric_columns(), [1]);
        let html = render_estimate(&EstimatePage { advice: vec![advice], ..page() });
        for part in [
            "<h2>Advice</h2>\n<h3>Memory &lt;breakdown&gt;</h3>\n<p class=\"note\">One rank.</p>\n<details>",
            "<th>term</th><th>bytes</th><th class=\"l\">sum</th>",
            &format!("<td>experts</td><td>2.55 GB</td><td class=\"words\">{sum}</td>"),
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
    }
}
