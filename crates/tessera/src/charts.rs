//! Judges timelines that people drew: Gantt charts of a block by stream, or of a wave of micro-batches by stage.

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::audit::{BLOCK_INPUTS, Goals, block, wave};
use tessera_cost::bars::{Bar, Kind};
use tessera_report::gantt::{self, Chart, T0906};

use crate::files::read_text;

/// Whether a path names such a chart.
#[must_use]
pub fn is_chart(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "mmd")
}

/// What was found in a chart.
#[derive(Debug, Clone, Default)]
pub struct ChartFindings {
    /// Errors where it cannot be read, warnings where it misses its goals or cannot be true.
    pub diagnostics: Diagnostics,
    /// Its text.
    pub source: String,
    /// What can be measured on it, one sentence each.
    pub measured: Vec<String>,
}

/// Reads and judges a chart.
#[must_use]
pub fn check_chart(path: &Path) -> ChartFindings {
    let name = path.display().to_string();
    let source = match read_text(path, &T0906) {
        Ok(text) => text,
        Err(d) => return ChartFindings { diagnostics: vec![d], ..ChartFindings::default() },
    };
    match gantt::parse(&name, &source) {
        Ok(chart) => {
            let (diagnostics, measured) = judge(&name, &chart);
            ChartFindings { diagnostics, source, measured }
        }
        Err(diagnostics) => ChartFindings { diagnostics, source, ..ChartFindings::default() },
    }
}

fn judge(name: &str, chart: &Chart) -> (Vec<Diagnostic>, Vec<String>) {
    let goals = Goals::default();
    // A chart whose every section is a stage is one of a pipeline; any other shows streams, of the ranks that sections name.
    let stages = chart.sections.iter().all(|s| s.name.to_lowercase().starts_with("stage"));
    let bars = bars(chart, stages);
    if stages {
        if chart.left_out > 0 {
            let drawn = bars.len();
            let says = "the bubble of the whole is not seen";
            return (
                Vec::new(),
                vec![format!(
                    "{} of {} bars are left out: {says}",
                    chart.left_out,
                    drawn as u64 + chart.left_out
                )],
            );
        }
        let w = wave(&bars, goals);
        let worst = w.bubble.iter().copied().fold(0.0, f64::max);
        let needed = w.needed.map_or(String::new(), |n| {
            format!("; {n} micro-batches would bring it below {:.0} %", goals.bubble * 100.0)
        });
        let mut measured = vec![format!(
            "{} stages, {} micro-batches: the largest bubble is {:.0} % of {} units{needed}",
            w.stages,
            w.micro_batches,
            worst * 100.0,
            w.makespan_ns
        )];
        if !w.missing.is_empty() {
            measured.push(format!("{} bars are missing and were put in where they fit", w.missing.len()));
        }
        return (w.diagnostics(name), measured);
    }
    let b = block(&bars, BLOCK_INPUTS, goals);
    let mut measured = vec![format!(
        "overlap ratio {:.2} (goal {:.2}), {:.2} with packing counted",
        b.overlap.ratio(),
        goals.overlap,
        b.packed.ratio()
    )];
    if chart.left_out > 0 {
        measured.push(format!("{} bars are left out of the chart", chart.left_out));
    }
    (b.diagnostics(name), measured)
}

/// One unit of the chart is one nanosecond here: only ratios are taken.
fn bars(chart: &Chart, stages: bool) -> Vec<Bar> {
    let mut out = Vec::new();
    for (i, section) in chart.sections.iter().enumerate() {
        for b in &section.bars {
            out.push(Bar {
                rank: if stages { u32::try_from(i).unwrap_or(u32::MAX) } else { rank(&section.name) },
                lane: section.name.clone(),
                name: b.name.clone(),
                kind: match stages {
                    true => Kind::Compute,
                    // Launches bear the names of what they launch.
                    false if section.name.ends_with(" host") => Kind::Other,
                    false => Kind::of_name(&b.name),
                },
                start_ns: b.start as f64,
                end_ns: (b.start + b.length) as f64,
            });
        }
    }
    out
}

/// Whose stream a section is, such as `rank 3 compute`; of the one rank of the chart where none is named.
fn rank(section: &str) -> u32 {
    let name = section.to_lowercase();
    let number = name.strip_prefix("rank ").and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}
