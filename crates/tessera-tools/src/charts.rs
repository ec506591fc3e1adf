//! Checks hand-drawn timelines: Gantt charts of a block by stream, or of a wave of micro-batches by
//! pipeline stage.

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_cost::timeline_lint::{BLOCK_INPUTS, TimelineGoals, lint_block, lint_pipeline};
use tessera_report::gantt::{self, GanttChart, T0906};

use tessera::files::read_text;

/// Returns whether a path has the extension of a Gantt chart.
#[must_use]
pub fn is_chart(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "mmd")
}

/// Diagnostics and measurements of one Gantt chart in Mermaid's notation.
#[derive(Debug, Clone, Default)]
pub struct ChartFindings {
    /// Errors if the chart cannot be read; warnings if it misses its goals or is impossible.
    pub diagnostics: Diagnostics,
    /// The text of the chart file, to which the spans refer; empty if the file cannot be read.
    pub source: String,
    /// The measurements taken from the chart, one sentence each.
    pub measured: Vec<String>,
}

/// Reads a chart and checks the bubbles of a pipeline if every section is named as a stage, and
/// otherwise the overlap of a block.
#[must_use]
pub fn check_chart(path: &Path) -> ChartFindings {
    let name = path.display().to_string();
    let source = match read_text(path, &T0906) {
        Ok(text) => text,
        Err(d) => return ChartFindings { diagnostics: vec![d], ..ChartFindings::default() },
    };
    match gantt::parse(&name, &source) {
        Ok(chart) => {
            let (diagnostics, measured) = lint_chart(&name, &chart);
            ChartFindings { diagnostics, source, measured }
        }
        Err(diagnostics) => ChartFindings { diagnostics, source, ..ChartFindings::default() },
    }
}

fn lint_chart(name: &str, chart: &GanttChart) -> (Vec<Diagnostic>, Vec<String>) {
    let goals = TimelineGoals::default();
    // If every section is named as a stage, the chart shows a pipeline. Otherwise it shows the
    // streams of the ranks that the sections name.
    let stages = chart.sections.iter().all(|s| s.name.to_lowercase().starts_with("stage"));
    let bars = chart_intervals(chart, stages);
    if stages {
        if chart.omitted_bars > 0 {
            let drawn = bars.len();
            let consequence = "the bubble of the whole wave is unknown";
            return (
                Vec::new(),
                vec![format!(
                    "{} of {} intervals are omitted from the chart: {consequence}",
                    chart.omitted_bars,
                    drawn as u64 + chart.omitted_bars
                )],
            );
        }
        let w = lint_pipeline(&bars, goals);
        let worst = w.stage_bubbles.iter().copied().fold(0.0, f64::max);
        let needed = w.min_micro_batches.map_or(String::new(), |n| {
            format!("; {n} micro-batches would bring it below {:.0} %", goals.max_bubble * 100.0)
        });
        let mut measured = vec![format!(
            "{} stages, {} micro-batches: the largest bubble is {:.0} % of {} units{needed}",
            w.stages,
            w.micro_batches,
            worst * 100.0,
            w.makespan_ns
        )];
        if !w.missing.is_empty() {
            measured
                .push(format!("{} intervals were missing and were inserted where they fit", w.missing.len()));
        }
        return (w.diagnostics(name), measured);
    }
    let b = lint_block(&bars, BLOCK_INPUTS, goals);
    let mut measured = vec![format!(
        "overlap ratio {:.2} (goal {:.2}), {:.2} with packing counted",
        b.overlap.ratio(),
        goals.min_overlap,
        b.overlap_with_packing.ratio()
    )];
    if chart.omitted_bars > 0 {
        measured.push(format!("{} intervals are omitted from the chart", chart.omitted_bars));
    }
    (b.diagnostics(name), measured)
}

/// Converts the chart to intervals. One unit of the chart becomes one nanosecond, since only ratios
/// are computed.
fn chart_intervals(chart: &GanttChart, stages: bool) -> Vec<Interval> {
    let mut out = Vec::new();
    for (i, section) in chart.sections.iter().enumerate() {
        for b in &section.bars {
            out.push(Interval {
                rank: if stages { u32::try_from(i).unwrap_or(u32::MAX) } else { section_rank(&section.name) },
                track: section.name.clone(),
                name: b.name.clone(),
                kind: match stages {
                    true => IntervalKind::Compute,
                    // A host section repeats the names of the kernels that it launches.
                    false if section.name.ends_with(" host") => IntervalKind::Other,
                    false => IntervalKind::from_name(&b.name),
                },
                start_ns: b.start as f64,
                end_ns: (b.start + b.length) as f64,
            });
        }
    }
    out
}

/// Parses the rank from a section name, for example `rank 3 compute`. A section without a rank
/// belongs to rank 0.
fn section_rank(section: &str) -> u32 {
    let name = section.to_lowercase();
    let number = name.strip_prefix("rank ").and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}
