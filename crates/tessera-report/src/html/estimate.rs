//! The HTML report of a plan that was estimated and not run: the chosen mapping, each rank's memory
//! and timeline, the gates, the accuracy of the estimate, and the reasons for which other mappings
//! were rejected.

use maud::{Markup, Render, html};
use tessera_base::{Bytes, GateStatus, Nanoseconds};

use super::RoleMemoryRow;
use super::layout::{
    HeadlineNumber, render_capacity_meter, render_collapsed_text, render_command, render_document,
    render_dot, render_facts, render_hero, render_list_section, render_note, render_section, render_share,
    render_table, render_timeline, render_title, render_verdict,
};
use super::plan::list_uses;
use crate::markup::{format_count, format_or_dash, format_plural};
use crate::svg;
use crate::timeline::{TimeWindow, Timeline};

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
    /// The numbers at the top of the page, such as step time and memory, in drawing order.
    pub headline_numbers: Vec<HeadlineNumber>,
    /// Properties of the chosen mapping: a key and its value.
    pub mapping_facts: Vec<(String, String)>,
    /// Breakdown of a step: a name and nanoseconds per part, in drawing order.
    pub step_parts: Vec<(String, f64)>,
    /// One sentence that explains the breakdown.
    pub step_parts_note: String,
    /// Memory of the fullest rank, one row per memory tier.
    pub memory: Vec<RoleMemoryRow>,
    /// Checks of the plan that pass, warn or fail, and so determine the verdict.
    pub gates: Vec<PlanGate>,
    /// Timelines, each with a title and a sentence.
    pub timelines: Vec<TimelineChart>,
    /// Likely failure modes, and mitigations with their predicted effect.
    pub failure_modes: Vec<FailureModeAdvice>,
    /// Tables on questions that no gate covers, such as the placement of the decoder.
    pub advice: Vec<AdviceTable>,
    /// Headings of the table of mappings, one for each cell of a row of `mappings`.
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

/// Whether a mapping fits, meets the deadline and passes its gates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EstimateVerdict {
    /// The plan fits and its gates pass.
    #[default]
    Good,
    /// The plan fits, but a gate warns or fails.
    Warn,
    /// No mapping fits, or none meets the deadline.
    Rejected,
}

/// One row of the table of gates, with its numbers formatted for the reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanGate {
    /// Question that the gate answers.
    pub title: String,
    /// Value with its unit; `–` if the gate does not apply.
    pub value: String,
    /// Limit that the value is compared with, with its unit.
    pub limit: String,
    /// Outcome: pass, warn, fail or not applicable.
    pub verdict: GateStatus,
    /// The arithmetic and the term that dominates it.
    pub explanation: String,
}

/// A timeline, and the title and note above it on the page.
#[derive(Debug, Clone, Default)]
pub struct TimelineChart {
    /// Title that the report shows with the timeline.
    pub title: String,
    /// One sentence on how to read the drawing.
    pub note: String,
    /// Spans and ranks to draw; a chart without spans is left out.
    pub timeline: Timeline,
}

/// A failure mode and its mitigations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureModeAdvice {
    /// Title of the failure mode's diagnostic code, such as `peak rank runs out of memory`.
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
    /// Heading of the table, such as `Decoder placement`.
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
        EstimateVerdict::Good => ("good", "Fits."),
        EstimateVerdict::Warn => ("warn", "Fits, with warnings."),
        EstimateVerdict::Rejected => ("bad", "Rejected."),
    };
    let header = html! {
        (render_title("Tessera plan, estimated", &page.title))
        (render_verdict(class, word, &page.recommendation))
        @for warning in &page.warnings { (render_verdict("warn", "Warning:", warning)) }
    };
    let charts: Vec<_> = page.timelines.iter().filter(|c| !c.timeline.spans.is_empty()).collect();
    let body = html! {
        @if !page.headline_numbers.is_empty() { (render_hero(None, &page.headline_numbers)) }
        (render_list_section("Mapping", &page.mapping_facts, render_mapping_facts))
        (render_step_parts(page))
        (render_list_section("Timelines", &charts, render_timelines))
        (render_list_section("Memory", &page.memory, render_memory))
        (render_list_section("Gates", &page.gates, render_gates))
        (render_list_section(
            "Likely failure modes and mitigations",
            &page.failure_modes,
            render_failure_modes,
        ))
        (render_list_section("Advice", &page.advice, render_advice))
        (render_list_section("Other mappings", &page.mappings, |_| render_mappings(page)))
        (render_list_section("Rejected mappings", &page.rejections, |_| render_rejections(page)))
        (render_section("Accuracy and sources", &render_accuracy(page)))
    };
    let footer = html! { "Written by tessera " (page.tessera) ". Every time on this page is an estimate." };
    render_document(&page.title, &header, &body, &footer)
}

fn render_mapping_facts(facts: &[(String, String)]) -> Markup {
    render_facts(facts.iter().map(|(name, value)| (name.as_str(), value.as_str(), false)))
}

/// Renders the breakdown of a step: one stacked bar, then a table row for each part.
fn render_step_parts(page: &EstimatePage) -> Markup {
    let parts = page.step_parts.iter().filter(|(_, ns)| *ns > 0.0);
    let whole: f64 = parts.clone().map(|(_, ns)| ns).sum();
    if whole <= 0.0 || !whole.is_finite() {
        return Markup::default();
    }
    let mut bars = html! {};
    let mut rows = html! {};
    let mut left = 0.0;
    for (i, (name, ns)) in parts.enumerate() {
        let (colour, percent) = (i.min(svg::COLOUR_COUNT - 1), ns / whole * 100.0);
        let time = Nanoseconds(ns.round() as u64);
        let (x, width) = (format!("{left:.3}%"), format!("{percent:.3}%"));
        html! {
            rect class={ "p" (colour) } x=(x) width=(width) height="26" { title { (name) ": " (time) } }
        }
        .render_to(&mut bars.0);
        html! {
            tr { td { (render_dot(colour)) (name) } td { (time) } td { (render_share(colour, percent)) } }
        }
        .render_to(&mut rows.0);
        left += percent;
    }
    let body = html! {
        (render_note(&page.step_parts_note))
        svg height="26" role="img" aria-label="parts of a step" { (bars) }
        (render_table(&html! {}, &rows))
    };
    render_section("Where the time goes", &body)
}

fn render_timelines(charts: &[&TimelineChart]) -> Markup {
    html! {
        @for chart in charts {
            @let spans = &chart.timeline.spans;
            @let start_ns = spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
            @let end_ns = spans.iter().map(|s| s.end_ns).fold(start_ns + 1, u64::max);
            h3 { (chart.title) }
            (render_note(&chart.note))
            (render_timeline(&chart.timeline, TimeWindow { start_ns, end_ns }))
        }
    }
}

/// Renders the memory of the fullest rank, with at least one tier: a row for each use and a column
/// for each memory tier, so that the table is only as wide as the number of tiers.
fn render_memory(tiers: &[RoleMemoryRow]) -> Markup {
    let rows = html! {
        @for name in list_uses(tiers) {
            tr { td { (name) } @for r in tiers { td { (format_or_dash(r.bytes_of(name))) } } }
        }
        tr { td { "sum" } @for r in tiers { td { (r.sum()) } } }
        @if tiers.iter().any(|r| r.percent_of_capacity().is_some()) {
            tr { td { "of capacity" } @for r in tiers { td { (render_share_of_capacity(r)) } } }
        }
    };
    html! {
        (render_note(html! { "One rank, " (tiers[0].ranks) "." }))
        (render_table(&html! { th {} @for r in tiers { th { (r.role) } } }, &rows))
    }
}

fn render_share_of_capacity(r: &RoleMemoryRow) -> Markup {
    html! {
        @if let (Some(percent), Some(capacity)) = (r.percent_of_capacity(), r.capacity) {
            (format_args!("{percent:.0} % of {}", Bytes(capacity))) (render_capacity_meter(percent))
        } @else { "–" }
    }
}

fn render_gates(gates: &[PlanGate]) -> Markup {
    let count = |v| gates.iter().filter(|g| g.verdict == v).count();
    let rows = html! {
        @for g in gates {
            @let word = g.verdict.name();
            @let class = match g.verdict {
                GateStatus::Pass => "good",
                GateStatus::Warn => "warn",
                GateStatus::Fail => "bad",
                GateStatus::NotApplicable | GateStatus::NotMeasured => "",
            };
            tr {
                td.words { (g.title) small { (g.explanation) } }
                td { (g.value) } td { (g.limit) } td class=(class) { (word) }
            }
        }
    };
    html! {
        (render_note(format_args!(
            "{} pass, {} warn, {} fail, {} do not apply. Limits are indicative; all of them are in one \
             file that can be replaced.",
            count(GateStatus::Pass),
            count(GateStatus::Warn),
            count(GateStatus::Fail),
            count(GateStatus::NotApplicable)
        )))
        (render_table(&html! { th { "gate" } th { "value" } th { "limit" } th {} }, &rows))
    }
}

fn render_failure_modes(failure_modes: &[FailureModeAdvice]) -> Markup {
    html! {
        @for f in failure_modes {
            h3 { (f.mode) }
            (render_note(&f.symptom))
            (render_table(&html! {}, &html! {
                @for (change, effect) in &f.mitigations { tr { td { (change) } td.words { (effect) } } }
            }))
        }
    }
}

/// Renders the conclusions; the tables behind them are collapsed.
fn render_advice(advice: &[AdviceTable]) -> Markup {
    html! {
        @for a in advice {
            @let numbers = a.numeric_columns();
            h3 { (a.title) }
            (render_note(&a.note))
            details {
                summary { "Table" }
                (render_text_table(&a.columns, &a.rows, |at| at > 0 && !numbers.contains(&at)))
            }
        }
    }
}

fn render_mappings(page: &EstimatePage) -> Markup {
    let numbers = find_numeric_columns(&page.mapping_columns, &page.mappings);
    let shown = &page.mappings[..page.mappings.len().min(MAX_MAPPINGS)];
    let omitted = page.mappings.len() - shown.len();
    html! {
        (render_note("The chosen mapping first, then mappings that are better in at least one metric."))
        (render_text_table(&page.mapping_columns, shown, |at| !numbers.contains(&at)))
        @if omitted > 0 {
            (render_note(format_args!("{} left out.", format_plural(omitted as u64, "more"))))
        }
    }
}

/// Renders a table of texts; cells of columns that `is_text` accepts wrap.
fn render_text_table(columns: &[String], rows: &[Vec<String>], is_text: impl Fn(usize) -> bool) -> Markup {
    let heads = html! {
        @for (at, name) in columns.iter().enumerate() { th class=[is_text(at).then_some("l")] { (name) } }
    };
    let rows = html! {
        @for row in rows {
            tr {
                @for (at, cell) in row.iter().enumerate() {
                    td class=[is_text(at).then_some("words")] { (cell) }
                }
            }
        }
    };
    render_table(&heads, &rows)
}

fn render_rejections(page: &EstimatePage) -> Markup {
    let count: u64 = page.rejections.iter().map(|(_, n, _)| n).sum();
    let rows = html! {
        @for (reason, n, example) in &page.rejections {
            tr { td { (reason) } td { (format_count(*n)) } td.words { (example) } }
        }
    };
    html! {
        (render_note(format_args!(
            "{} of {} mappings, each counted under its first reason.",
            format_count(count),
            format_count(page.considered_count)
        )))
        (render_table(&html! { th { "reason" } th { "mappings" } th.l { "example" } }, &rows))
    }
}

fn render_accuracy(page: &EstimatePage) -> Markup {
    html! {
        @for note in &page.accuracy_notes { (render_note(note)) }
        @if !page.mapping.is_empty() { (render_collapsed_text("mapping.toml", &page.mapping)) }
        @if !page.command.is_empty() { h3 { "Reproduce" } (render_command(&page.command)) }
    }
}

#[cfg(test)]
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
                verdict: GateStatus::Fail,
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
            "<h2>Advice</h2><h3>Memory &lt;breakdown&gt;</h3><p class=\"note\">One rank.</p><details>",
            "<th>term</th><th>bytes</th><th class=\"l\">sum</th>",
            &format!("<td>experts</td><td>2.55 GB</td><td class=\"words\">{sum}</td>"),
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
    }
}
