//! The timeline as a Mermaid gantt, for a page that renders Markdown and for whoever measures charts.

use std::collections::BTreeSet;

use crate::gantt::{Chart, ChartBar, Lengths, Section, print};
use crate::timeline::{Span, Timeline, Window};

/// Most bars of a chart: Mermaid takes texts of 50,000 characters, and lays out slowly long before that.
pub const MAX_BARS: usize = 1200;

/// Windows shorter than this are drawn in nanoseconds, others in microseconds.
const FINE_NS: u64 = 10_000_000;

/// A gantt of the spans that begin inside a window. One millisecond on its axis is one nanosecond or microsecond of
/// the run, since Mermaid knows nothing finer; the title says which. Of more than [`MAX_BARS`] those that begin last are
/// left out, on all ranks alike.
#[must_use]
pub fn gantt(timeline: &Timeline, window: Window) -> String {
    print(&chart(timeline, window))
}

fn chart(timeline: &Timeline, window: Window) -> Chart {
    let inside = |s: &Span| (window.start_ns..window.end_ns).contains(&s.start_ns);
    let mut starts: Vec<(u64, usize)> =
        timeline.spans.iter().enumerate().filter(|(_, s)| inside(s)).map(|(i, s)| (s.start_ns, i)).collect();
    starts.sort_unstable();
    let kept: BTreeSet<usize> = starts.iter().take(MAX_BARS).map(|(_, i)| *i).collect();
    let ends = kept.iter().map(|i| timeline.spans[*i].end_ns).max().unwrap_or(0);
    let (unit, unit_ns) = match ends.saturating_sub(window.start_ns) {
        0..FINE_NS => ("nanoseconds", 1),
        _ => ("microseconds", 1000),
    };
    // Rounded to the nearest, so that bars that follow each other still do.
    let at = |ns: u64| (ns.saturating_sub(window.start_ns) + unit_ns / 2) / unit_ns;
    let chunks: BTreeSet<u32> = kept.iter().map(|i| timeline.spans[*i].chunk).collect();
    let mut sections: Vec<Section> = Vec::new();
    let mut lane = None;
    for (i, s) in timeline.spans.iter().enumerate().filter(|(i, _)| kept.contains(i)) {
        if lane.replace((s.rank, &s.stream)) != Some((s.rank, &s.stream)) {
            let name = timeline.ranks.iter().find(|r| r.rank == s.rank).map_or("", |r| r.name.as_str());
            sections.push(Section { name: section(s, name), bars: Vec::new() });
        }
        let name = if chunks.len() > 1 { format!("{} {}", s.name, s.chunk) } else { s.name.clone() };
        let (start, end) = (at(s.start_ns), at(s.end_ns));
        let bar =
            ChartBar { name: plain(&name), id: format!("b{i}"), start, length: end.saturating_sub(start) };
        if let Some(section) = sections.last_mut() {
            section.bars.push(bar);
        }
    }
    Chart {
        title: format!("{unit} since {}", tessera_base::Nanoseconds(window.start_ns)),
        lengths: Lengths::Milliseconds,
        axis: "%Q".to_string(),
        left_out: (starts.len() - kept.len()) as u64,
        column: sections.iter().flat_map(|s| &s.bars).next().map_or(0, |b| b.name.chars().count() + 1),
        sections,
    }
}

/// `rank 3 · lead compute`, whatever the rank is called, so that a reader of the chart knows whose stream it is. A stage has
/// one row.
fn section(s: &Span, name: &str) -> String {
    let rank = format!("rank {}", s.rank);
    let whole = match name.strip_prefix(&rank) {
        Some(rest) if !rest.starts_with(|c: char| c.is_ascii_digit()) => format!("{name} {}", s.stream),
        _ if name.starts_with("stage ") && s.stream == "compute" => name.to_string(),
        _ if name.starts_with("stage ") => format!("{name} {}", s.stream),
        _ => format!("{rank} ({name}) {}", s.stream),
    };
    plain(&whole)
}

/// Text that cannot end a Mermaid statement.
fn plain(s: &str) -> String {
    s.chars().map(|c| if c.is_control() || ":;#,%{}".contains(c) { ' ' } else { c }).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gantt::parse;
    use crate::timeline::tests::sample;

    #[test]
    fn draws_a_window() {
        let t = Timeline::from_record(&sample(3));
        assert_eq!(
            gantt(&t, t.steady(1).unwrap()),
            "gantt\n    dateFormat x\n    axisFormat %Q\n    title microseconds since 11.0 ms\n    \
             section rank 0 · lead decode\n    decode :b1, 9000, 1000ms\n    \
             section rank 1 · stage0 compute\n    denoise.0 :b6, 0, 4000ms\n    denoise.1 :b7, 4000, 4000ms\n    \
             clean  :b8, 8000, 1000ms\n"
        );
    }

    #[test]
    fn is_bounded_and_read_back() {
        let t = Timeline::from_record(&sample(400));
        let text = gantt(&t, Window { start_ns: 0, end_ns: u64::MAX });
        assert_eq!(text.matches(" :b").count(), MAX_BARS);
        let chart = parse("t", &text).unwrap();
        assert_eq!((chart.left_out, chart.sections.len()), (400, 2));
        assert_eq!(print(&chart), text);
        assert_eq!(plain("a:b;c%"), "a b c ");
    }

    #[test]
    fn a_stage_is_a_row_and_a_rank_keeps_its_number() {
        let span = |stream: &str| Span {
            rank: 1,
            stream: stream.into(),
            name: "F0".into(),
            chunk: 0,
            start_ns: 0,
            end_ns: 1,
            collectives: 0,
            waits: None,
        };
        assert_eq!(section(&span("compute"), "stage 1"), "stage 1");
        assert_eq!(section(&span("a2a"), "rank 1 · lead"), "rank 1 · lead a2a");
        assert_eq!(section(&span("a2a"), "the rank with the most"), "rank 1 (the rank with the most) a2a");
        assert_eq!(section(&span("a2a"), "rank 12"), "rank 1 (rank 12) a2a");
    }
}
