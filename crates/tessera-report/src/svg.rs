//! SVG drawings of a timeline: a lane per rank and stream, and a strip with the duration of every
//! chunk.
//!
//! Horizontal positions are percentages and text is not scaled, so a drawing is legible at any
//! width.

use maud::{Markup, Render, html};
use tessera_base::Nanoseconds;

use crate::stats;
use crate::timeline::{TimeWindow, Timeline, TimelineChunk, TimelineSpan, is_text_phase, phase_kind};

/// Maximum number of ranks whose lanes are drawn; the trace contains the others.
pub(crate) const MAX_RANKS: usize = 24;
/// Maximum number of bars drawn in one lane; later bars of the window are left out.
const MAX_LANE_BARS: usize = 400;
/// A wait shorter than the window divided by this number is not drawn separately.
const MIN_WAIT_DIVISOR: u64 = 300;
/// Maximum number of event flags in the lanes.
const MAX_FLAGS: usize = 100;
/// Maximum number of bars in the strip; in longer runs several chunks share a bar.
const MAX_STRIP_BARS: usize = 240;

const LANE_HEIGHT: u32 = 20;
/// Height of a bar in a lane.
const BAR_HEIGHT: f64 = 18.0;
const STRIP_HEIGHT: f64 = 72.0;
/// Lane widths in pixels for which labels are chosen: on a desktop and on a phone. The style sheet
/// hides desktop labels on pages with narrower lanes.
const DESKTOP_WIDTH: f64 = 840.0;
const PHONE_WIDTH: f64 = 300.0;

/// Maps each kind of phase to a colour class.
#[derive(Debug)]
pub(crate) struct Palette {
    kinds: Vec<(String, usize)>,
}

impl Palette {
    /// Assigns colours: kinds that occur in every run have fixed colours, other kinds take the free
    /// ones in order of appearance.
    pub(crate) fn new(t: &Timeline) -> Palette {
        const FIXED: [&str; 5] = ["recompute", "denoise", "clean", "encode", "decode"];
        let mut kinds: Vec<(String, usize)> = Vec::new();
        // A timeline without any fixed kind can use all colours.
        let known = |s: &TimelineSpan| FIXED.iter().any(|f| phase_kind(&s.name).starts_with(f));
        let mut free = if t.spans.iter().any(known) { FIXED.len() } else { 0 };
        for s in &t.spans {
            let kind = phase_kind(&s.name);
            if kinds.iter().any(|(k, _)| k == kind) {
                continue;
            }
            let class = FIXED.iter().position(|f| kind.starts_with(f)).unwrap_or_else(|| {
                free += 1;
                (free - 1).min(COLOUR_COUNT - 1)
            });
            kinds.push((kind.to_string(), class));
        }
        kinds.sort_by_key(|k| k.1);
        Palette { kinds }
    }

    /// Returns the number of a kind's colour class, below `COLOUR_COUNT`; an unknown kind gets the
    /// last class.
    pub(crate) fn colour_class(&self, kind: &str) -> usize {
        self.kinds.iter().find(|(k, _)| k == kind).map_or(COLOUR_COUNT - 1, |(_, c)| *c)
    }

    /// Renders the legend for the kinds that `is_shown` accepts.
    pub(crate) fn render_legend(&self, is_shown: impl Fn(&str) -> bool) -> Markup {
        html! {
            ul.legend {
                @for (kind, class) in self.kinds.iter().filter(|(k, _)| is_shown(k)) {
                    li { i class={ "b" (class) } {} (kind) }
                }
            }
        }
    }
}

/// Number of colour classes `p0..` (fill) and `b0..` (background) in the style sheet.
pub(crate) const COLOUR_COUNT: usize = 9;

/// Draws the lanes of a window, with chunk names above and a time axis below.
pub(crate) fn draw_lanes(t: &Timeline, w: TimeWindow, palette: &Palette) -> Markup {
    let (grounds, names) = draw_chunks(t, w);
    let marks = t.marks.iter().filter(|m| (w.start_ns..=w.end_ns).contains(&m.at_ns)).take(MAX_FLAGS);
    let flags = html! {
        @for x in marks.map(|m| percent_in(w, m.at_ns)) {
            line.flag x1=(Percent(x)) x2=(Percent(x)) y2="100%" {}
        }
    };
    let lanes: Vec<&[TimelineSpan]> = t.spans_by_lane().collect();
    let ranks = lanes.chunk_by(|a, b| a[0].rank == b[0].rank).take(MAX_RANKS);
    html! {
        div.lane { span {} svg.names height="18" { (grounds) (names) } }
        @for lanes in ranks {
            div.rank { (t.rank_name(lanes[0][0].rank)) }
            @for lane in lanes {
                div.lane {
                    span { (lane[0].stream) }
                    svg height=(LANE_HEIGHT) { (grounds) (draw_bars(lane, w, palette)) (flags) }
                }
            }
        }
        div.lane.axis { span {} svg height="20" { (draw_axis(w)) } }
    }
}

/// Draws the backgrounds of the chunks and their names.
fn draw_chunks(t: &Timeline, w: TimeWindow) -> (Markup, Markup) {
    let (mut grounds, mut names) = (html! {}, html! {});
    // A chunk's background ends where the next one begins, because calls overlap when the pipeline
    // is full.
    let next = t.chunks.iter().skip(1).map(|c| c.start_ns).chain([w.end_ns]);
    for (c, next) in t.chunks.iter().zip(next).filter(|(c, next)| *next > w.start_ns && c.start_ns < w.end_ns)
    {
        let x = percent_in(w, c.start_ns);
        let width = percent_in(w, next) - x;
        html! {
            @if c.chunk.is_multiple_of(2) {
                rect.ground x=(Percent(x)) width=(Percent(width)) height="100%" {}
            }
            line.edge x1=(Percent(x)) x2=(Percent(x)) y2="100%" {}
        }
        .render_to(&mut grounds.0);
        if let Some(fit) = LabelFit::new(width, 26.0) {
            let is_wide = LabelFit::new(width, 52.0) == Some(LabelFit::Everywhere);
            let word = is_wide.then(|| t.generates.chunk_name().to_string() + " ");
            html! { text class=[fit.class(true)] x=(Percent(x)) dx="5" y="13" { (word.unwrap_or_default()) (c.chunk) } }
                .render_to(&mut names.0);
        }
    }
    (grounds, names)
}

/// The durations of all chunks as a drawing.
pub(crate) struct ChunkStrip {
    pub(crate) drawing: Markup,
    /// Whether a bar is taller than the drawing.
    pub(crate) has_cut_bar: bool,
}

/// Draws the duration of every chunk as a strip and highlights `w`, the part that is drawn in
/// detail.
pub(crate) fn draw_strip(t: &Timeline, w: Option<TimeWindow>) -> ChunkStrip {
    let walls: Vec<u64> = t.chunks.iter().map(stats::chunk_wall_ns).collect();
    if walls.is_empty() {
        return ChunkStrip { drawing: Markup::default(), has_cut_bar: false };
    }
    let per_bar = chunks_per_strip_bar(walls.len());
    let slowest: Vec<u64> = walls.chunks(per_bar).filter_map(|walls| walls.iter().max().copied()).collect();
    let median = stats::nearest_rank_quantile(&walls, 50);
    // A first chunk with warm-up may take a hundred times longer; its bar is cut off so that the
    // others stay visible.
    let top = median.saturating_mul(2).max(stats::nearest_rank_quantile(&walls[1..], 95)).max(1);
    let height_of = |ns: u64| (ns as f64 / top as f64).min(1.0) * (STRIP_HEIGHT - 12.0);
    let step = 100.0 / slowest.len() as f64;
    let median_y = round_milli(STRIP_HEIGHT - height_of(median));
    let bar_at = |at_ns: u64| t.chunks.partition_point(|c| c.start_ns <= at_ns).saturating_sub(1) / per_bar;
    let drawing = html! {
        svg.strip height=(STRIP_HEIGHT) role="img" aria-label={ "time of every " (t.generates.chunk_name()) } {
            @if let Some((first, last)) = w.and_then(|w| chunks_inside(t, w)) {
                @let (from, to) = ((first / per_bar) as f64 * step, (last / per_bar + 1) as f64 * step);
                rect.detail x=(Percent(from)) width=(Percent(to - from)) height=(STRIP_HEIGHT) {}
            }
            @for (i, (chunks, wall)) in t.chunks.chunks(per_bar).zip(&slowest).enumerate() {
                @let height = height_of(*wall);
                rect class=(if *wall > top { "bar tall" } else { "bar" })
                    x=(Percent(i as f64 * step + step * 0.08)) y=(round_milli(STRIP_HEIGHT - height))
                    width=(Percent(step * 0.84)) height=(round_milli(height)) {
                    title { (name_chunks(t, chunks)) ": " (Nanoseconds(*wall)) }
                }
            }
            @for marks in t.marks.chunk_by(|a, b| bar_at(a.at_ns) == bar_at(b.at_ns)) {
                @let x = bar_at(marks[0].at_ns) as f64 * step + step / 2.0;
                circle.flag cx=(Percent(x)) cy="5" r="3" {
                    title {
                        (marks[0].label) ": " (marks[0].detail)
                        @if marks.len() > 1 { ", and " (marks.len() - 1) " more" }
                    }
                }
            }
            line.median x2="100%" y1=(median_y) y2=(median_y) {}
        }
    };
    ChunkStrip { drawing, has_cut_bar: slowest.iter().any(|wall| *wall > top) }
}

/// Returns the positions of the first and the last chunk that begin inside a window.
fn chunks_inside(t: &Timeline, w: TimeWindow) -> Option<(usize, usize)> {
    let is_inside = |c: &TimelineChunk| c.start_ns >= w.start_ns && c.start_ns < w.end_ns;
    Some((t.chunks.iter().position(is_inside)?, t.chunks.iter().rposition(is_inside)?))
}

fn name_chunks(t: &Timeline, chunks: &[TimelineChunk]) -> String {
    let name = t.generates.chunk_name();
    match chunks {
        [one] => format!("{name} {}", one.chunk),
        _ => format!("slowest of {name}s {} to {}", chunks[0].chunk, chunks[chunks.len() - 1].chunk),
    }
}

/// Returns the number of chunks that share a bar of the strip.
pub(crate) fn chunks_per_strip_bar(chunks: usize) -> usize {
    chunks.div_ceil(MAX_STRIP_BARS).max(1)
}

fn draw_bars(lane: &[TimelineSpan], w: TimeWindow, palette: &Palette) -> Markup {
    let mut out = html! {};
    let mut previous = ("", 0);
    let mut odd = false;
    let shown = || lane.iter().filter(|s| s.is_inside(w));
    // All bars of one name have a label, or none of them has.
    let mut narrowest: Vec<(&str, f64)> = Vec::new();
    for s in shown().filter(|s| s.start_ns >= w.start_ns && s.end_ns <= w.end_ns) {
        let width = widest_bar(s, w);
        match narrowest.iter_mut().find(|(name, _)| *name == s.name) {
            Some((_, least)) => *least = least.min(width),
            None => narrowest.push((&s.name, width)),
        }
    }
    for s in shown().take(MAX_LANE_BARS) {
        let kind = phase_kind(&s.name);
        // Two alternating tones separate the steps of a phase.
        odd = (kind, s.chunk) == previous && !odd;
        previous = (kind, s.chunk);
        let class = format!("p{}{}", palette.colour_class(kind), if odd { " odd" } else { "" });
        let least = narrowest.iter().find(|(name, _)| *name == s.name).map_or(0.0, |(_, least)| *least);
        draw_bar(s, w, &class, least).render_to(&mut out.0);
    }
    out
}

/// Draws a span with its label, which is left out unless it fits into a bar of `least` percent too.
fn draw_bar(s: &TimelineSpan, w: TimeWindow, class: &str, least: f64) -> Markup {
    let work = busy_intervals(s, w);
    let height = BAR_HEIGHT * busy_share(s, &work);
    let whole = (s.start_ns, s.end_ns);
    let rect = |class: Option<&str>, (from, to): (u64, u64), y: f64, height: f64, title: &Markup| {
        let (from, to) = (percent_in(w, from), percent_in(w, to));
        html! {
            rect class=[class] x=(Percent(from)) y=(round_milli(y)) width=(Percent((to - from).max(0.05)))
                height=(round_milli(height)) rx="1.5" { (title) }
        }
    };
    let (title, none) = (draw_tooltip(s), html! {});
    let longest = work.iter().max_by_key(|(from, to)| (to - from, std::cmp::Reverse(*from)));
    let label_width = s.name.chars().count() as f64 * 6.3 + 9.0;
    let fit = LabelFit::new(least.min(widest_bar(s, w)), label_width);
    html! {
        @if work[..] == [whole] && height == BAR_HEIGHT {
            (rect(Some(class), whole, 1.0, BAR_HEIGHT, &title))
        } @else {
            g class=(class) {
                (title)
                // An invisible rectangle gives the whole span its tooltip.
                (rect(Some("none"), whole, 1.0, BAR_HEIGHT, &none))
                (rect(Some("idle"), whole, 9.5, 1.0, &none))
                @for busy in &work {
                    (rect(Some("idle"), *busy, 1.0, BAR_HEIGHT, &none))
                    (rect(None, *busy, 1.0 + BAR_HEIGHT - height, height, &none))
                }
            }
        }
        @if let (Some((from, _)), Some(fit)) = (longest, fit) {
            // A pale label would be illegible on the pale part of a bar.
            @let (class, x) = (fit.class(height >= 0.7 * BAR_HEIGHT), Percent(percent_in(w, *from)));
            text class=[class] x=(x) dx="5" y="14" { (s.name) }
        }
    }
}

fn draw_tooltip(s: &TimelineSpan) -> Markup {
    html! {
        title {
            (s.name) ", " (if is_text_phase(&s.name) { "call" } else { "chunk" }) " " (s.chunk) ": " (Nanoseconds(s.end_ns - s.start_ns))
            @if let Some(waits) = s.waits.as_ref().filter(|waits| waits.total_ns > 0) {
                ", of which " (Nanoseconds(waits.total_ns)) " waiting"
            }
            @match s.collectives {
                0 => {}
                1 => ", 1 collective"
                n => { ", " (n) " collectives" }
            }
        }
    }
}

/// Returns the width of the longest busy interval of a span, in percent of the window.
fn widest_bar(s: &TimelineSpan, w: TimeWindow) -> f64 {
    let widths = busy_intervals(s, w).into_iter().map(|(from, to)| percent_in(w, to) - percent_in(w, from));
    widths.map(round_milli).fold(0.0, f64::max)
}

/// Returns the busy intervals of a span: the span without the waits that are long enough to be
/// visible in the window, or all of it if the waits are unknown.
fn busy_intervals(s: &TimelineSpan, w: TimeWindow) -> Vec<(u64, u64)> {
    let is_visible = |(from, to): &&(u64, u64)| {
        to.saturating_sub(*from).saturating_mul(MIN_WAIT_DIVISOR) >= w.end_ns - w.start_ns
    };
    let waits = s.waits.iter().flat_map(|waits| waits.longest.iter().filter(is_visible));
    let ends = waits.clone().map(|(_, to)| *to);
    let begins = waits.map(|(from, _)| *from).chain([s.end_ns]);
    let out: Vec<(u64, u64)> =
        [s.start_ns].into_iter().chain(ends).zip(begins).filter(|(from, to)| to > from).collect();
    // A span of zero length is still drawn.
    if out.is_empty() && s.waits.is_none() { vec![(s.start_ns, s.end_ns)] } else { out }
}

/// Returns the share of the busy intervals in which the stream had work, from 0 to 1.
fn busy_share(s: &TimelineSpan, work: &[(u64, u64)]) -> f64 {
    let shown: u64 = work.iter().map(|(from, to)| to - from).sum();
    let apart = (s.end_ns - s.start_ns).saturating_sub(shown);
    let short = s.waits.as_ref().map_or(0, |waits| waits.total_ns.saturating_sub(apart));
    let share = 1.0 - (short as f64 / shown.max(1) as f64).min(1.0);
    // A smaller gap is not visible.
    if share > 0.97 { 1.0 } else { share }
}

/// The pages on which a label fits into its bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LabelFit {
    Everywhere,
    WidePages,
}

impl LabelFit {
    /// Compares a label of `pixels` pixels with a bar of `percent` percent; returns `None` if the
    /// label never fits.
    fn new(percent: f64, pixels: f64) -> Option<LabelFit> {
        match percent / 100.0 {
            share if share * PHONE_WIDTH > pixels => Some(LabelFit::Everywhere),
            share if share * DESKTOP_WIDTH > pixels => Some(LabelFit::WidePages),
            _ => None,
        }
    }

    fn class(self, is_pale: bool) -> Option<&'static str> {
        match (self, is_pale) {
            (LabelFit::Everywhere, true) => None,
            (LabelFit::WidePages, true) => Some("wide"),
            (LabelFit::Everywhere, false) => Some("ink"),
            (LabelFit::WidePages, false) => Some("ink wide"),
        }
    }
}

fn draw_axis(w: TimeWindow) -> Markup {
    let step = nice_step(w.end_ns - w.start_ns);
    let first = w.start_ns.next_multiple_of(step);
    html! {
        @for at in (first..=w.end_ns).step_by(step as usize) {
            @let x = percent_in(w, at);
            line x1=(Percent(x)) x2=(Percent(x)) y2="4" {}
            // A centred label at the very edge would overflow the drawing.
            @let anchor = match x {
                x if x < 3.0 => "start",
                x if x > 94.0 => "end",
                _ => "middle",
            };
            text x=(Percent(x)) y="16" text-anchor=(anchor) { (format_instant(at, step)) }
        }
    }
}

/// Returns a tick distance of 1, 2 or 5 times a power of ten that gives at most five ticks.
fn nice_step(length: u64) -> u64 {
    let mut power = 1u64;
    loop {
        for step in [power, power.saturating_mul(2), power.saturating_mul(5)] {
            if length / step <= 4 {
                return step;
            }
        }
        power = power.saturating_mul(10);
    }
}

/// Formats an instant with no more digits than the tick distance needs.
fn format_instant(at: u64, step: u64) -> String {
    let (unit, name) = match step {
        1_000_000_000.. => (1_000_000_000, "s"),
        1_000_000.. => (1_000_000, "ms"),
        1_000.. => (1_000, "µs"),
        _ => (1, "ns"),
    };
    if name == "ms" && at >= 10_000_000_000 {
        return format!("{}.{:03} s", at / 1_000_000_000, at / 1_000_000 % 1000);
    }
    format!("{}\u{202f}{name}", crate::markup::format_count(at / unit))
}

/// Returns the position of an instant in a window, in percent.
fn percent_in(w: TimeWindow, at_ns: u64) -> f64 {
    let part = at_ns.clamp(w.start_ns, w.end_ns) - w.start_ns;
    round_milli(part as f64 / (w.end_ns - w.start_ns).max(1) as f64 * 100.0)
}

/// A length in percent of a drawing's width.
struct Percent(f64);

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}%", round_milli(self.0))
    }
}

fn round_milli(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::StreamWaits;
    use crate::timeline::tests::sample;

    #[test]
    fn bars_cover_their_phases() {
        let t = Timeline::from_record(&sample(3));
        let w = t.steady_window(1).unwrap();
        let svg = draw_lanes(&t, w, &Palette::new(&t)).into_string();
        for part in [
            r#"<div class="rank">rank 1 · stage0</div>"#,
            r#"<rect class="p1" x="0%" y="1" width="40%" height="18" rx="1.5"><title>denoise.0, chunk 1: 4.0 ms, 6 collectives</title></rect>"#,
            r#"<rect class="p1 odd" x="40%" y="1" width="40%""#,
            r#"<rect class="p2" x="80%" y="1" width="10.003%""#,
            r#"<text class="wide" x="80%" dx="5" y="14">clean</text>"#,
            r#"<text x="0%" dx="5" y="13">chunk 1</text>"#,
        ] {
            assert!(svg.contains(part), "{part}\nis not in\n{svg}");
        }
        assert!(!svg.contains("chunk 2"));
    }

    #[test]
    fn waits_are_drawn_as_lines() {
        let mut t = Timeline::from_record(&sample(3));
        let ms = 1_000_000;
        let span = t.spans.iter_mut().find(|s| s.chunk == 1 && s.name == "denoise.1").unwrap();
        // From 15 to 19 ms: one of the two waits is drawn separately, and the rest is half of the
        // remaining time.
        span.waits = Some(StreamWaits { total_ns: 3 * ms, longest: vec![(15 * ms, 17 * ms)] });
        let w = t.steady_window(1).unwrap();
        let svg = draw_lanes(&t, w, &Palette::new(&t)).into_string();
        for part in [
            "<g class=\"p1 odd\"><title>denoise.1, chunk 1: 4.0 ms, of which 3.0 ms waiting, 6 collectives</title>",
            "<rect class=\"idle\" x=\"40%\" y=\"9.5\" width=\"40%\" height=\"1\" rx=\"1.5\"></rect>",
            "<rect class=\"idle\" x=\"60%\" y=\"1\" width=\"20%\" height=\"18\" rx=\"1.5\"></rect>\
             <rect x=\"60%\" y=\"10\" width=\"20%\" height=\"9\" rx=\"1.5\"></rect></g>",
            "<text class=\"ink wide\" x=\"60%\" dx=\"5\" y=\"14\">denoise.1</text>",
        ] {
            assert!(svg.contains(part), "{part}\nis not in\n{svg}");
        }
        // A span without waits is one full bar, and a span that only waits has no bar.
        t.spans.iter_mut().for_each(|s| s.waits = Some(StreamWaits::default()));
        let span = t.spans.iter_mut().find(|s| s.chunk == 1 && s.name == "clean").unwrap();
        span.waits = Some(StreamWaits::from_busy_intervals(span.start_ns, span.end_ns, []));
        let svg = draw_lanes(&t, w, &Palette::new(&t)).into_string();
        assert!(svg.contains("<rect class=\"p1 odd\" x=\"40%\" y=\"1\" width=\"40%\""), "{svg}");
        assert!(svg.contains("rx=\"1.5\"></rect></g></svg>"), "no bar and no label: {svg}");
    }

    #[test]
    fn the_axis_has_few_round_ticks() {
        let t = draw_axis(TimeWindow { start_ns: 11_000_000, end_ns: 51_000_000 }).into_string();
        assert_eq!(t.matches("<text").count(), 4);
        assert!(t.contains(r#"<text x="22.5%" y="16" text-anchor="middle">20 "#), "{t}");
        assert_eq!(
            (nice_step(1), nice_step(40), nice_step(90_000), nice_step(u64::MAX)),
            (1, 10, 20_000, 5_000_000_000_000_000_000)
        );
        assert_eq!(format_instant(12_345_000_000, 5_000_000), "12.345 s");
    }

    #[test]
    fn the_strip_is_bounded_and_cuts_tall_bars() {
        let mut t = Timeline::from_record(&sample(1000));
        t.chunks[0].end_ns += 900_000_000;
        let strip = draw_strip(&t, t.steady_window(4));
        assert!(strip.has_cut_bar);
        let svg = strip.drawing.into_string();
        assert_eq!(svg.matches("class=\"bar").count(), 200);
        assert_eq!(svg.matches("bar tall").count(), 1);
        assert!(svg.contains("slowest of chunks 0 to 4: 910.0 ms"), "{svg}");
        assert!(svg.contains("class=\"detail\" x=\"0%\" width=\"0.5%\""));
        assert_eq!(draw_strip(&Timeline::default(), None).drawing.0, "");
    }

    #[test]
    fn known_kinds_keep_their_colour() {
        let mut t = Timeline::from_record(&sample(1));
        assert_eq!(Palette::new(&t).colour_class("decode"), 4);
        // One known kind among unknown ones: the fixed colours stay reserved.
        for (i, s) in t.spans.iter_mut().enumerate().skip(1) {
            s.name = format!("kind{i}.x");
        }
        let p = Palette::new(&t);
        assert_eq!((p.colour_class("kind1"), p.colour_class("stranger")), (5, 8));
        assert_eq!(
            p.render_legend(|k| k == "kind2").0,
            "<ul class=\"legend\"><li><i class=\"b6\"></i>kind2</li></ul>"
        );
        // Without a known kind, all colours are available.
        t.spans[0].name = "kind0.x".into();
        assert_eq!(Palette::new(&t).colour_class("kind0"), 0);
    }
}
