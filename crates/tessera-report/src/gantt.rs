//! Reader and writer of Mermaid gantt charts with integral time units; other crates check the
//! charts.

use std::fmt::Write;

use tessera_base::{Diagnostic, Diagnostics};

pub use crate::codes::T0906;

/// Maximum number of bars that [`parse`] accepts.
pub const MAX_CHART_BARS: usize = 100_000;

/// A Mermaid gantt chart with integral start times and lengths.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GanttChart {
    /// Title; empty if there is none.
    pub title: String,
    /// How the chart writes the lengths of bars, as its `dateFormat` line selects.
    pub length_notation: LengthNotation,
    /// Axis format for Mermaid; empty if there is none.
    pub axis_format: String,
    /// Number of bars that the writer left out, which a comment in the chart states.
    pub omitted_bars: u64,
    /// Column of the colon after a bar's name; a longer name is followed by one space.
    pub name_width: usize,
    /// Sections from top to bottom, in the order of the chart's text.
    pub sections: Vec<GanttSection>,
}

/// How a Mermaid Gantt chart writes the length of a bar; its `dateFormat` line selects the
/// notation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LengthNotation {
    /// `dateFormat X`, and a bare number.
    #[default]
    Bare,
    /// `dateFormat x`, and a number with `ms`: Mermaid takes a second number without a unit as the
    /// end of the bar.
    Milliseconds,
}

impl LengthNotation {
    fn date_format(self) -> &'static str {
        match self {
            LengthNotation::Bare => "X",
            LengthNotation::Milliseconds => "x",
        }
    }

    fn length_suffix(self) -> &'static str {
        match self {
            LengthNotation::Bare => "",
            LengthNotation::Milliseconds => "ms",
        }
    }
}

/// Text of the comment after the number of bars left out.
const OMITTED_SUFFIX: &str = " bars left out";

/// A section of a chart: one stream of one rank, or one pipeline stage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GanttSection {
    /// Name of the section, such as `rank 0 · lead decode`.
    pub name: String,
    /// Bars in the order of the chart's text.
    pub bars: Vec<GanttBar>,
}

/// One interval of a section, as a bar with integral start and length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GanttBar {
    /// Text on the bar, such as `denoise.0`. It contains no colon, which ends the name in the
    /// chart.
    pub name: String,
    /// Identifier of the bar for Mermaid, without spaces, such as `b7`.
    pub id: String,
    /// Start, in the chart's unit.
    pub start: u64,
    /// Length, in the chart's unit.
    pub length: u64,
}

/// Parses a chart. `file` is used in diagnostics only.
///
/// # Errors
/// T0906 for every line that cannot be parsed.
pub fn parse(file: &str, source: &str) -> Result<GanttChart, Diagnostics> {
    let mut chart = GanttChart::default();
    let mut ds = Vec::new();
    let mut bars = 0;
    for (number, line) in content_lines(source) {
        let mut refuse = |why: String| {
            ds.push(Diagnostic::error(&T0906, why).with_label(format!("{file}:{number}"), line.to_string()));
        };
        if line == "gantt" {
            continue;
        }
        if let Some(comment) = line.strip_prefix("%%") {
            let omitted = comment.trim().strip_suffix(OMITTED_SUFFIX).and_then(|n| n.parse().ok());
            chart.omitted_bars = omitted.unwrap_or(chart.omitted_bars);
        } else if let Some(format) = line.strip_prefix("dateFormat") {
            match [LengthNotation::Bare, LengthNotation::Milliseconds]
                .into_iter()
                .find(|l| l.date_format() == format.trim())
            {
                Some(lengths) if bars == 0 => chart.length_notation = lengths,
                Some(_) => refuse("dateFormat after the first bar".to_string()),
                None => {
                    refuse(format!("dateFormat {} is not supported: use X or x", format.trim()));
                    // Every bar would be rejected too, for the same reason.
                    break;
                }
            }
        } else if let Some(axis) = line.strip_prefix("axisFormat ") {
            chart.axis_format = axis.trim().to_string();
        } else if let Some(title) = line.strip_prefix("title ") {
            chart.title = title.trim().to_string();
        } else if let Some(name) = line.strip_prefix("section ") {
            chart.sections.push(GanttSection { name: name.trim().to_string(), bars: Vec::new() });
        } else {
            match (parse_bar(line, chart.length_notation), chart.sections.last_mut()) {
                (Some(_), _) if bars >= MAX_CHART_BARS => {
                    refuse(format!("more than {MAX_CHART_BARS} bars"));
                    break;
                }
                (Some(b), Some(section)) => {
                    if bars == 0 {
                        chart.name_width = line.split(':').next().map_or(0, |s| s.chars().count());
                    }
                    section.bars.push(b);
                    bars += 1;
                }
                (Some(_), None) => refuse("bar before the first section".to_string()),
                (None, _) => {
                    let unit = chart.length_notation.length_suffix();
                    refuse(format!("not a bar of the form `name :id, start, length{unit}`"));
                }
            }
        }
    }
    if bars == 0 && ds.is_empty() {
        ds.push(Diagnostic::error(&T0906, "chart without bars").with_label(file, "no bar found"));
    }
    if ds.is_empty() { Ok(chart) } else { Err(ds) }
}

/// Iterates over the lines with content, with their numbers from 1.
fn content_lines(source: &str) -> impl Iterator<Item = (usize, &str)> {
    source
        .lines()
        .enumerate()
        .map(|(i, l)| (i + 1, l.trim()))
        .filter(|(_, l)| !l.is_empty() && !l.starts_with("```"))
}

fn parse_bar(line: &str, lengths: LengthNotation) -> Option<GanttBar> {
    let (name, rest) = line.split_once(':')?;
    let mut parts = rest.split(',').map(str::trim);
    let (id, start, length) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || name.trim().is_empty() || id.is_empty() || id.contains(' ') {
        return None;
    }
    let number = |s: &str| s.parse::<u64>().ok().filter(|n| *n < 1 << 53);
    Some(GanttBar {
        name: name.trim().to_string(),
        id: id.to_string(),
        start: number(start)?,
        length: number(length.strip_suffix(lengths.length_suffix())?)?,
    })
}

/// Writes a chart as Mermaid text that [`parse`] accepts.
#[must_use]
pub fn print(chart: &GanttChart) -> String {
    let mut out = format!("gantt\n    dateFormat {}\n", chart.length_notation.date_format());
    if !chart.axis_format.is_empty() {
        let _ = writeln!(out, "    axisFormat {}", chart.axis_format);
    }
    if !chart.title.is_empty() {
        let _ = writeln!(out, "    title {}", chart.title);
    }
    if chart.omitted_bars > 0 {
        let _ = writeln!(out, "    %% {}{OMITTED_SUFFIX}", chart.omitted_bars);
    }
    let unit = chart.length_notation.length_suffix();
    for s in &chart.sections {
        let _ = writeln!(out, "    section {}", s.name);
        for b in &s.bars {
            let pad = chart.name_width.saturating_sub(b.name.chars().count()).max(1);
            let pad = " ".repeat(pad);
            let _ = writeln!(out, "    {}{pad}:{}, {}, {}{unit}", b.name, b.id, b.start, b.length);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAVE: &str = "gantt\n    dateFormat X\n    title wave\n    section Stage 0\n    MB0 :s0a, 0, 3\n    MB1 :s0b, 3, 3\n    section Stage 1\n    MB0 :s1a, 3, 3\n";

    #[test]
    fn charts_round_trip() {
        let chart = parse("w", WAVE).unwrap();
        assert_eq!(print(&chart), WAVE);
        assert_eq!(
            chart.sections[0].bars[1],
            GanttBar { name: "MB1".into(), id: "s0b".into(), start: 3, length: 3 }
        );
        let fenced = format!("```mermaid\n{WAVE}```\n");
        assert_eq!(parse("w", &fenced).unwrap(), chart);
    }

    #[test]
    fn lengths_in_milliseconds_are_units_too() {
        let text = "gantt\n    dateFormat x\n    axisFormat %Q\n    title wave\n    %% 7 bars left out\n    section Stage 0\n    F0 :b0, 0, 3ms\n";
        let chart = parse("w", text).unwrap();
        assert_eq!((chart.sections[0].bars[0].length, chart.omitted_bars), (3, 7));
        assert_eq!(print(&chart), text);
    }

    #[test]
    fn names_are_padded_to_a_column() {
        let text = "gantt\n    dateFormat X\n    section A\n    long name :a, 0, 1\n    short     :b, 1, 1\n";
        assert_eq!(print(&parse("w", text).unwrap()), text);
    }

    #[test]
    fn errors_name_the_line() {
        for (text, line, says) in [
            ("gantt\ndateFormat YYYY\nsection A\nx :a, 0, 1\n", "w:2", "is not supported"),
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
