//! Gantt charts as Mermaid writes them, with whole units of time: read, judged by others, and written back in one
//! form.

use std::fmt::Write;

use tessera_base::{Code, Diagnostic, Diagnostics};

/// A chart that cannot be read.
pub static T0906: Code = Code {
    id: "T0906",
    title: "gantt chart cannot be read",
    page: "Read are Mermaid gantt charts with `dateFormat X` and bars of the form `name :id, start, length` in whole units, \
and charts with `dateFormat x` and bars of the form `name :id, start, 12ms`, where one millisecond of the axis is one unit: \
what `tessera plan` writes as timeline.mmd, and what Mermaid draws to scale. Besides bars there may be a title, an axisFormat \
and sections. Dates, `after` and other keywords of Mermaid are refused rather than guessed at, because a bar in the wrong \
place would change every ratio that is computed from the chart.",
};

/// Most bars of a chart.
pub const MAX_CHART_BARS: usize = 100_000;

/// A chart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chart {
    /// Its title; empty without.
    pub title: String,
    /// How lengths are written.
    pub lengths: Lengths,
    /// Labels of the axis as Mermaid formats them; empty without.
    pub axis: String,
    /// Bars that its writer left out, which a comment says.
    pub left_out: u64,
    /// Columns that a name takes before its colon; a longer name takes its own length and a blank.
    pub column: usize,
    /// Sections in order.
    pub sections: Vec<Section>,
}

/// How the length of a bar is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Lengths {
    /// `dateFormat X`, and a bare number.
    #[default]
    Bare,
    /// `dateFormat x`, and a number with `ms`: what follows the start without a unit would be an end to Mermaid.
    Milliseconds,
}

impl Lengths {
    fn format(self) -> &'static str {
        match self {
            Lengths::Bare => "X",
            Lengths::Milliseconds => "x",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Lengths::Bare => "",
            Lengths::Milliseconds => "ms",
        }
    }
}

/// What a comment says after the number of bars that are not there.
const LEFT_OUT: &str = " bars left out";

/// A section: one stream of one rank, or one stage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Section {
    /// Its name.
    pub name: String,
    /// Bars in order.
    pub bars: Vec<ChartBar>,
}

/// A bar.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChartBar {
    /// What it is.
    pub name: String,
    /// Its id in the chart.
    pub id: String,
    /// Where it begins, in the chart's unit.
    pub start: u64,
    /// How long it is, in the chart's unit.
    pub length: u64,
}

/// Whether a text is such a chart, fenced or not.
#[must_use]
pub fn is_gantt(text: &str) -> bool {
    body(text).find(|(_, line)| !line.starts_with("%%")).is_some_and(|(_, line)| line == "gantt")
}

/// Reads a chart. `file` is only named in diagnostics.
///
/// # Errors
/// T0906 for every line that is not understood.
pub fn parse(file: &str, source: &str) -> Result<Chart, Diagnostics> {
    let mut chart = Chart::default();
    let mut ds = Vec::new();
    let mut bars = 0;
    for (number, line) in body(source) {
        let mut refuse = |why: String| {
            ds.push(Diagnostic::error(&T0906, why).at(format!("{file}:{number}"), line.to_string()));
        };
        if line == "gantt" {
            continue;
        }
        if let Some(comment) = line.strip_prefix("%%") {
            let told = comment.trim().strip_suffix(LEFT_OUT).and_then(|n| n.parse().ok());
            chart.left_out = told.unwrap_or(chart.left_out);
        } else if let Some(format) = line.strip_prefix("dateFormat") {
            match [Lengths::Bare, Lengths::Milliseconds].into_iter().find(|l| l.format() == format.trim()) {
                Some(lengths) if bars == 0 => chart.lengths = lengths,
                Some(_) => refuse("a dateFormat after the first bar".to_string()),
                None => {
                    refuse(format!("dateFormat {} is not X or x, whole units of time", format.trim()));
                    // Every bar would be refused too, for the same reason.
                    break;
                }
            }
        } else if let Some(axis) = line.strip_prefix("axisFormat ") {
            chart.axis = axis.trim().to_string();
        } else if let Some(title) = line.strip_prefix("title ") {
            chart.title = title.trim().to_string();
        } else if let Some(name) = line.strip_prefix("section ") {
            chart.sections.push(Section { name: name.trim().to_string(), bars: Vec::new() });
        } else {
            match (bar(line, chart.lengths), chart.sections.last_mut()) {
                (Some(_), _) if bars >= MAX_CHART_BARS => {
                    refuse(format!("more than {MAX_CHART_BARS} bars"));
                    break;
                }
                (Some(b), Some(section)) => {
                    if bars == 0 {
                        chart.column = line.split(':').next().map_or(0, |s| s.chars().count());
                    }
                    section.bars.push(b);
                    bars += 1;
                }
                (Some(_), None) => refuse("a bar before the first section".to_string()),
                (None, _) => {
                    let unit = chart.lengths.unit();
                    refuse(format!("not a bar of the form `name :id, start, length{unit}`"));
                }
            }
        }
    }
    if bars == 0 && ds.is_empty() {
        ds.push(Diagnostic::error(&T0906, "a chart without bars").at(file, "no bar found"));
    }
    if ds.is_empty() { Ok(chart) } else { Err(ds) }
}

/// Lines that say something, with their numbers from 1.
fn body(source: &str) -> impl Iterator<Item = (usize, &str)> {
    source
        .lines()
        .enumerate()
        .map(|(i, l)| (i + 1, l.trim()))
        .filter(|(_, l)| !l.is_empty() && !l.starts_with("```"))
}

fn bar(line: &str, lengths: Lengths) -> Option<ChartBar> {
    let (name, rest) = line.split_once(':')?;
    let mut parts = rest.split(',').map(str::trim);
    let (id, start, length) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || name.trim().is_empty() || id.is_empty() || id.contains(' ') {
        return None;
    }
    let number = |s: &str| s.parse::<u64>().ok().filter(|n| *n < 1 << 53);
    Some(ChartBar {
        name: name.trim().to_string(),
        id: id.to_string(),
        start: number(start)?,
        length: number(length.strip_suffix(lengths.unit())?)?,
    })
}

/// The chart as text.
#[must_use]
pub fn print(chart: &Chart) -> String {
    let mut out = format!("gantt\n    dateFormat {}\n", chart.lengths.format());
    if !chart.axis.is_empty() {
        let _ = writeln!(out, "    axisFormat {}", chart.axis);
    }
    if !chart.title.is_empty() {
        let _ = writeln!(out, "    title {}", chart.title);
    }
    if chart.left_out > 0 {
        let _ = writeln!(out, "    %% {}{LEFT_OUT}", chart.left_out);
    }
    let unit = chart.lengths.unit();
    for s in &chart.sections {
        let _ = writeln!(out, "    section {}", s.name);
        for b in &s.bars {
            let pad = chart.column.saturating_sub(b.name.chars().count()).max(1);
            let pad = " ".repeat(pad);
            let _ = writeln!(out, "    {}{pad}:{}, {}, {}{unit}", b.name, b.id, b.start, b.length);
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const WAVE: &str = "gantt\n    dateFormat X\n    title wave\n    section Stage 0\n    MB0 :s0a, 0, 3\n    MB1 :s0b, 3, 3\n    section Stage 1\n    MB0 :s1a, 3, 3\n";

    #[test]
    fn what_is_read_is_written_back() {
        let chart = parse("w", WAVE).unwrap();
        assert_eq!(print(&chart), WAVE);
        assert_eq!(
            chart.sections[0].bars[1],
            ChartBar { name: "MB1".into(), id: "s0b".into(), start: 3, length: 3 }
        );
        let fenced = format!("```mermaid\n{WAVE}```\n");
        assert_eq!(parse("w", &fenced).unwrap(), chart);
        assert!(is_gantt(&fenced) && is_gantt(WAVE) && !is_gantt("graph TD\n"));
    }

    #[test]
    fn lengths_in_milliseconds_are_units_too() {
        let text = "gantt\n    dateFormat x\n    axisFormat %Q\n    title wave\n    %% 7 bars left out\n    section Stage 0\n    F0 :b0, 0, 3ms\n";
        let chart = parse("w", text).unwrap();
        assert_eq!((chart.sections[0].bars[0].length, chart.left_out), (3, 7));
        assert_eq!(print(&chart), text);
    }

    #[test]
    fn names_of_several_lengths_stand_in_a_column() {
        let text = "gantt\n    dateFormat X\n    section A\n    long name :a, 0, 1\n    short     :b, 1, 1\n";
        assert_eq!(print(&parse("w", text).unwrap()), text);
    }

    #[test]
    fn what_is_not_understood_is_refused_with_its_line() {
        for (text, line, says) in [
            ("gantt\ndateFormat YYYY\nsection A\nx :a, 0, 1\n", "w:2", "whole units"),
            ("gantt\nx :a, 0, 1\n", "w:2", "before the first section"),
            ("gantt\nsection A\nx :a, after b, 1\n", "w:3", "not a bar"),
            ("gantt\nsection A\nx :a, 0, -1\n", "w:3", "not a bar"),
            ("gantt\nsection A\n", "w", "without bars"),
            ("gantt\ndateFormat x\nsection A\nx :a, 0, 1\n", "w:4", "length"),
            ("gantt\nsection A\nx :a, 0, 1\ndateFormat x\n", "w:4", "after the first bar"),
        ] {
            let ds = parse("w", text).unwrap_err();
            assert_eq!(ds[0].code.id, "T0906");
            assert!(ds[0].message.contains(says), "{text}: {ds:?}");
            assert!(format!("{ds:?}").contains(line), "{text}: {ds:?}");
        }
    }
}
