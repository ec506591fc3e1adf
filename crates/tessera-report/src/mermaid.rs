//! Renders a timeline as a Mermaid gantt chart, for pages that render Markdown and for tools that
//! measure charts.

use std::collections::BTreeSet;

use crate::gantt::{GanttBar, GanttChart, GanttSection, LengthNotation, print};
use crate::timeline::{TimeWindow, Timeline, TimelineSpan};

/// Maximum number of bars in a chart. Mermaid accepts texts of up to 50,000 characters, and its
/// layout is slow long before that.
pub const MAX_BARS: usize = 1200;

/// Windows shorter than this are drawn in nanoseconds, longer ones in microseconds.
const NANOSECOND_AXIS_LIMIT_NS: u64 = 10_000_000;

/// Returns a gantt chart of the spans that begin inside a window. One millisecond on the chart's
/// axis is one nanosecond or one microsecond of the run, because Mermaid has no finer unit; the
/// title names the unit. Beyond [`MAX_BARS`] bars, the spans that begin last are left out, on all
/// ranks alike.
#[must_use]
pub fn timeline_gantt(timeline: &Timeline, window: TimeWindow) -> String {
    print(&build_chart(timeline, window))
}

fn build_chart(timeline: &Timeline, window: TimeWindow) -> GanttChart {
    let inside = |s: &TimelineSpan| (window.start_ns..window.end_ns).contains(&s.start_ns);
    let mut starts: Vec<(u64, usize)> =
        timeline.spans.iter().enumerate().filter(|(_, s)| inside(s)).map(|(i, s)| (s.start_ns, i)).collect();
    starts.sort_unstable();
    let kept: BTreeSet<usize> = starts.iter().take(MAX_BARS).map(|(_, i)| *i).collect();
    let ends = kept.iter().map(|i| timeline.spans[*i].end_ns).max().unwrap_or(0);
    let (unit, unit_ns) = match ends.saturating_sub(window.start_ns) {
        0..NANOSECOND_AXIS_LIMIT_NS => ("nanoseconds", 1),
        _ => ("microseconds", 1000),
    };
    // Rounds to the nearest unit, so that consecutive bars stay adjacent.
    let at = |ns: u64| (ns.saturating_sub(window.start_ns) + unit_ns / 2) / unit_ns;
    let chunks: BTreeSet<u32> = kept.iter().map(|i| timeline.spans[*i].chunk).collect();
    let mut sections: Vec<GanttSection> = Vec::new();
    let mut lane = None;
    for (i, s) in timeline.spans.iter().enumerate().filter(|(i, _)| kept.contains(i)) {
        if lane.replace((s.rank, &s.stream)) != Some((s.rank, &s.stream)) {
            let name = section_name(s, timeline.rank_name(s.rank));
            sections.push(GanttSection { name, bars: Vec::new() });
        }
        let name = if chunks.len() > 1 { format!("{} {}", s.name, s.chunk) } else { s.name.clone() };
        let (start, end) = (at(s.start_ns), at(s.end_ns));
        let bar = GanttBar {
            name: sanitize_label(&name),
            id: format!("b{i}"),
            start,
            length: end.saturating_sub(start),
        };
        if let Some(section) = sections.last_mut() {
            section.bars.push(bar);
        }
    }
    GanttChart {
        title: format!("{unit} since {}", tessera_base::Nanoseconds(window.start_ns)),
        length_notation: LengthNotation::Milliseconds,
        axis_format: "%Q".to_string(),
        omitted_bars: (starts.len() - kept.len()) as u64,
        name_width: sections.iter().flat_map(|s| &s.bars).next().map_or(0, |b| b.name.chars().count() + 1),
        sections,
    }
}

/// Returns the section name, such as `rank 3 · lead compute`. It always contains the rank number,
/// whatever the rank's name, so that the reader can tell whose stream the section shows. A pipeline
/// stage has a single section.
fn section_name(s: &TimelineSpan, name: &str) -> String {
    let rank = format!("rank {}", s.rank);
    let whole = match name.strip_prefix(&rank) {
        Some(rest) if !rest.starts_with(|c: char| c.is_ascii_digit()) => format!("{name} {}", s.stream),
        _ if name.starts_with("stage ") && s.stream == "compute" => name.to_string(),
        _ if name.starts_with("stage ") => format!("{name} {}", s.stream),
        _ => format!("{rank} ({name}) {}", s.stream),
    };
    sanitize_label(&whole)
}

/// Replaces the characters that would end a Mermaid statement.
fn sanitize_label(s: &str) -> String {
    s.chars().map(|c| if c.is_control() || ":;#,%{}".contains(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gantt::parse;
    use crate::timeline::tests::sample;

    #[test]
    fn draws_a_window() {
        let t = Timeline::from_record(&sample(3));
        assert_eq!(
            timeline_gantt(&t, t.steady_window(1).unwrap()),
            "gantt\n    dateFormat x\n    axisFormat %Q\n    title microseconds since 11.0 ms\n    \
             section rank 0 · lead decode\n    decode :b1, 9000, 1000ms\n    \
             section rank 1 · stage0 compute\n    denoise.0 :b6, 0, 4000ms\n    denoise.1 :b7, 4000, 4000ms\n    \
             clean  :b8, 8000, 1000ms\n"
        );
    }

    #[test]
    fn is_bounded_and_read_back() {
        let t = Timeline::from_record(&sample(400));
        let text = timeline_gantt(&t, TimeWindow { start_ns: 0, end_ns: u64::MAX });
        assert_eq!(text.matches(" :b").count(), MAX_BARS);
        let chart = parse("t", &text).unwrap();
        assert_eq!((chart.omitted_bars, chart.sections.len()), (400, 2));
        assert_eq!(print(&chart), text);
        assert_eq!(sanitize_label("a:b;c%"), "a b c ");
    }

    #[test]
    fn a_stage_is_a_row_and_a_rank_keeps_its_number() {
        let span = |stream: &str| TimelineSpan {
            rank: 1,
            stream: stream.into(),
            name: "F0".into(),
            chunk: 0,
            start_ns: 0,
            end_ns: 1,
            collectives: 0,
            waits: None,
        };
        assert_eq!(section_name(&span("compute"), "stage 1"), "stage 1");
        assert_eq!(section_name(&span("a2a"), "rank 1 · lead"), "rank 1 · lead a2a");
        assert_eq!(
            section_name(&span("a2a"), "the rank with the most"),
            "rank 1 (the rank with the most) a2a"
        );
        assert_eq!(section_name(&span("a2a"), "rank 12"), "rank 1 (rank 12) a2a");
    }
}
