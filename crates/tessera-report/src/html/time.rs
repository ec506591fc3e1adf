//! The report's sections on time: a timeline of a few chunks, the duration of every chunk, and a
//! table of phases.

use maud::{Markup, html};
use tessera_base::Nanoseconds;

use super::layout::{render_dot, render_note, render_section, render_share, render_table, render_timeline};
use super::{DETAIL_CHUNKS, ReportPage, format_unbroken};
use crate::markup::{format_count, format_or_dash};
use crate::record::RunStatus;
use crate::stats::{ChunkTimeStats, PhaseStats};
use crate::svg::{self, Palette};
use crate::timeline::{TimeWindow, Timeline};

/// Renders the timelines; renders nothing for a run without chunks.
pub(super) fn render_time_section(
    page: &ReportPage<'_>,
    t: &Timeline,
    times: Option<&ChunkTimeStats>,
) -> Markup {
    let (Some(first), Some(last)) = (t.chunks.first(), t.chunks.last()) else { return Markup::default() };
    // A failed or unfinished run shows its last chunks, any other run its steady state.
    let broke = matches!(page.record.status(), RunStatus::Failed | RunStatus::Running);
    let window = if broke { t.tail_window(DETAIL_CHUNKS) } else { t.steady_window(DETAIL_CHUNKS) };
    let window = window.filter(|_| !t.spans.is_empty());
    let name = page.record.start.generates.chunk_name();
    let body = html! {
        @if let Some(w) = window {
            (render_detail_note(page, t, w, broke))
            (render_timeline(t, w))
        }
        @if t.chunks.len() > 1 {
            @let strip = svg::draw_strip(t, window);
            h3 { "Every " (name) }
            (render_note(describe_strip(page, t, (window.is_some(), strip.has_cut_bar), times)))
            (strip.drawing)
            p.ends { span { (name) " " (first.chunk) } span { (name) " " (last.chunk) } }
        }
    };
    render_section("Time", &body)
}

fn render_detail_note(page: &ReportPage<'_>, t: &Timeline, w: TimeWindow, broke: bool) -> Markup {
    render_note(html! {
        (if broke { "The last " } else { "A few " }) (page.record.start.generates.chunk_name()) "s"
        (if broke { "" } else { " in steady state" }) ", by rank and stream."
        @if t.spans.iter().any(|s| s.is_inside(w) && s.waits.is_some()) {
            " A thin line is a wait. The height of a bar is the share of its time in which its stream was busy."
        }
        @if let Some(href) = page.trace_href {
            " The whole run is in " a href=(href) { (href) } ", for ui.perfetto.dev."
        }
    })
}

fn describe_strip(
    page: &ReportPage<'_>,
    t: &Timeline,
    (has_detail, has_cut_bar): (bool, bool),
    times: Option<&ChunkTimeStats>,
) -> String {
    let kind = page.record.start.generates;
    let mut note = match svg::chunks_per_strip_bar(t.chunks.len()) {
        1 => format!("Each bar is a {}", kind.chunk_name()),
        n => format!("Each bar is the slowest of {n} {}s", kind.chunk_name()),
    };
    note += &format!(", from commit to last {}", kind.frame_name());
    if let Some(times) = times {
        note += &format!("; the dotted line is the median, {}", format_unbroken(times.median_ns));
    }
    let keys = [
        (has_detail, "the shaded part is shown in detail above"),
        (!t.marks.is_empty(), "red dots are events"),
        (has_cut_bar, "an amber bar is cut off at the top"),
    ];
    let keys: Vec<&str> = keys.iter().filter(|(shown, _)| *shown).map(|(_, key)| *key).collect();
    if !keys.is_empty() {
        note += &format!("; {}", keys.join(", "));
    }
    note + "."
}

/// Renders a table of phases by stream.
pub(super) fn render_phase_table(page: &ReportPage<'_>, t: &Timeline, phases: &[PhaseStats]) -> Markup {
    let palette = Palette::new(t);
    let has_waits = phases.iter().any(|r| r.wait_share.is_some());
    let heads = html! {
        th { "phase" } th { "count" } th { "median" } th { "95 %" }
        @if has_waits { th { "waiting" } }
        th { "collectives" } th { "share" }
    };
    let rows = html! {
        @for stream in phases.chunk_by(|a, b| a.stream == b.stream) {
            tr.group { td colspan=(if has_waits { 7 } else { 6 }) { (stream[0].stream) } }
            @for p in stream { (render_phase(p, palette.colour_class(&p.kind), has_waits)) }
        }
    };
    html! {
        (render_note(html! {
            "Over all ranks; shares are relative to the time recorded on the same stream."
            @if t.chunks.len() > 1 {
                " The first " (page.record.start.generates.chunk_name()) " is left out because it includes warm-up."
            }
        }))
        (render_table(&heads, &rows))
    }
}

fn render_phase(p: &PhaseStats, colour: usize, has_waits: bool) -> Markup {
    let collectives = match p.collective_range {
        (_, 0) => "–".to_string(),
        (low, high) if low == high => format_count(u64::from(low)),
        (low, high) => format!("{low}–{high}"),
    };
    html! {
        tr {
            td { (render_dot(colour)) (p.kind) }
            td { (format_count(p.count)) }
            td { (Nanoseconds(p.median_ns)) }
            td { (Nanoseconds(p.p95_ns)) }
            @if has_waits {
                td { (format_or_dash(p.wait_share.map(|share| format!("{:.0} %", share * 100.0)))) }
            }
            td { (collectives) }
            td { (render_share(colour, p.stream_share * 100.0)) }
        }
    }
}
