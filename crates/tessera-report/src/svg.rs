//! SVG drawings of a timeline: a lane per rank and stream, and a strip with the duration of every
//! chunk.
//!
//! Horizontal positions are percentages and text is not scaled, so a drawing is legible at any
//! width.

use crate::markup::escape_text;
use crate::stats;
use crate::timeline::{TimeWindow, Timeline, TimelineSpan, phase_kind};
use std::fmt::Write;
use tessera_base::Nanoseconds;

/// Maximum number of ranks whose lanes are drawn; the trace contains the others.
pub(crate) const MAX_RANKS: usize = 24;
/// Maximum number of bars in one lane.
const MAX_LANE_BARS: usize = 400;
/// A wait shorter than the window divided by this number is not drawn separately.
const MIN_WAIT_DIVISOR: u64 = 300;
/// Maximum number of event flags in the lanes.
const MAX_FLAGS: usize = 100;
/// Maximum number of bars in the strip; in longer runs several chunks share a bar.
const MAX_STRIP_BARS: usize = 240;

const LANE_HEIGHT: u32 = 20;
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

    /// Returns the colour index of a kind.
    pub(crate) fn colour_class(&self, kind: &str) -> usize {
        self.kinds.iter().find(|(k, _)| k == kind).map_or(COLOUR_COUNT - 1, |(_, c)| *c)
    }

    /// Renders the legend for the kinds that `shown` accepts.
    pub(crate) fn render_legend(&self, shown: impl Fn(&str) -> bool) -> String {
        let mut out = String::from("<ul class=\"legend\">");
        for (kind, class) in self.kinds.iter().filter(|(k, _)| shown(k)) {
            let _ = write!(out, "<li><i class=\"b{class}\"></i>{}</li>", escape_text(kind));
        }
        out + "</ul>\n"
    }
}

/// Number of colour classes `p0..` (fill) and `b0..` (background) in the style sheet.
const COLOUR_COUNT: usize = 9;

/// Draws the lanes of a window, with chunk names above and a time axis below.
pub(crate) fn draw_lanes(t: &Timeline, w: TimeWindow, palette: &Palette) -> String {
    let x = |at: u64| percent_of(at.clamp(w.start_ns, w.end_ns) - w.start_ns, w.end_ns - w.start_ns);
    let mut grounds = String::new();
    let mut names = String::new();
    // A chunk's background ends where the next one begins, because calls overlap when the pipeline
    // is full.
    let next = t.chunks.iter().skip(1).map(|c| c.start_ns).chain([w.end_ns]);
    for (c, next) in t.chunks.iter().zip(next).filter(|(c, next)| *next > w.start_ns && c.start_ns < w.end_ns)
    {
        let (from, wide) = (x(c.start_ns), rounded_width(x(c.start_ns), x(next)));
        if c.chunk.is_multiple_of(2) {
            let _ =
                write!(grounds, "<rect class=\"ground\" x=\"{from}%\" width=\"{wide}%\" height=\"100%\"/>");
        }
        let _ = write!(grounds, "<line class=\"edge\" x1=\"{from}%\" x2=\"{from}%\" y2=\"100%\"/>");
        if let Some(class) = label_class(wide, 26.0) {
            let word = if label_class(wide, 52.0) == Some("") { "chunk " } else { "" };
            let _ = write!(names, "<text{class} x=\"{from}%\" dx=\"5\" y=\"13\">{word}{}</text>", c.chunk);
        }
    }
    let flags: String = t
        .marks
        .iter()
        .filter(|m| (w.start_ns..=w.end_ns).contains(&m.at_ns))
        .take(MAX_FLAGS)
        .map(|m| format!("<line class=\"flag\" x1=\"{0}%\" x2=\"{0}%\" y2=\"100%\"/>", x(m.at_ns)))
        .collect();

    let mut out = format!(
        "<div class=\"lane\"><span></span><svg class=\"names\" height=\"18\">{grounds}{names}</svg></div>\n"
    );
    let mut rank = None;
    let mut ranks = 0;
    for lane in t.spans_by_lane() {
        if rank != Some(lane[0].rank) {
            rank = Some(lane[0].rank);
            ranks += 1;
            if ranks > MAX_RANKS {
                break;
            }
            let name = t.ranks.iter().find(|r| r.rank == lane[0].rank).map_or("", |r| r.name.as_str());
            let _ = writeln!(out, "<div class=\"rank\">{}</div>", escape_text(name));
        }
        let bars = draw_bars(lane, w, &x, palette);
        let _ = writeln!(
            out,
            "<div class=\"lane\"><span>{}</span><svg height=\"{LANE_HEIGHT}\">{grounds}{bars}{flags}</svg></div>",
            escape_text(&lane[0].stream)
        );
    }
    let _ = writeln!(
        out,
        "<div class=\"lane axis\"><span></span><svg height=\"20\">{}</svg></div>",
        draw_axis(w)
    );
    out
}

/// Draws the duration of every chunk as a strip and highlights `w`, the part that is drawn in
/// detail.
pub(crate) fn draw_strip(t: &Timeline, w: Option<TimeWindow>) -> String {
    let walls: Vec<u64> = t.chunks.iter().map(stats::chunk_wall_ns).collect();
    if walls.is_empty() {
        return String::new();
    }
    let per_bar = walls.len().div_ceil(MAX_STRIP_BARS);
    let bars = walls.len().div_ceil(per_bar);
    let median = stats::nearest_rank_quantile(&walls, 50);
    // A first chunk with warm-up may take a hundred times longer; its bar is cut off so that the
    // others stay visible.
    let top = median.saturating_mul(2).max(stats::nearest_rank_quantile(&walls[1..], 95)).max(1);
    let wide = 100.0 / bars as f64;
    let mut out = String::new();
    if let Some(w) = w {
        let inside: Vec<usize> = t
            .chunks
            .iter()
            .enumerate()
            .filter(|(_, c)| c.start_ns >= w.start_ns && c.start_ns < w.end_ns)
            .map(|(i, _)| i / per_bar)
            .collect();
        if let (Some(a), Some(b)) = (inside.first(), inside.last()) {
            let (from, to) = (*a as f64 * wide, (b + 1) as f64 * wide);
            let _ = write!(
                out,
                "<rect class=\"detail\" x=\"{}%\" width=\"{}%\" height=\"{STRIP_HEIGHT}\"/>",
                round_milli(from),
                round_milli(to - from)
            );
        }
    }
    for (i, group) in t.chunks.chunks(per_bar).enumerate() {
        let wall = group.iter().map(stats::chunk_wall_ns).max().unwrap_or(0);
        let height = (wall as f64 / top as f64).min(1.0) * (STRIP_HEIGHT - 12.0);
        let class = if wall > top { "bar tall" } else { "bar" };
        let name = match group {
            [one] => format!("chunk {}", one.chunk),
            _ => format!("slowest of chunks {} to {}", group[0].chunk, group[group.len() - 1].chunk),
        };
        let _ = write!(
            out,
            "<rect class=\"{class}\" x=\"{}%\" y=\"{}\" width=\"{}%\" height=\"{}\"><title>{name}: {}</title></rect>",
            round_milli(i as f64 * wide + wide * 0.08),
            round_milli(STRIP_HEIGHT - height),
            round_milli(wide * 0.84),
            round_milli(height),
            Nanoseconds(wall)
        );
    }
    let bar = |at_ns: u64| t.chunks.partition_point(|c| c.start_ns <= at_ns).saturating_sub(1) / per_bar;
    for group in t.marks.chunk_by(|a, b| bar(a.at_ns) == bar(b.at_ns)) {
        let x = round_milli(bar(group[0].at_ns) as f64 * wide + wide / 2.0);
        let more = if group.len() > 1 { format!(", and {} more", group.len() - 1) } else { String::new() };
        let _ = write!(
            out,
            "<circle class=\"flag\" cx=\"{x}%\" cy=\"5\" r=\"3\"><title>{}: {}{more}</title></circle>",
            escape_text(&group[0].label),
            escape_text(&group[0].detail)
        );
    }
    let y = round_milli(STRIP_HEIGHT - median as f64 / top as f64 * (STRIP_HEIGHT - 12.0));
    let _ = write!(out, "<line class=\"median\" x2=\"100%\" y1=\"{y}\" y2=\"{y}\"/>");
    format!(
        "<svg class=\"strip\" height=\"{STRIP_HEIGHT}\" role=\"img\" aria-label=\"time of every chunk\">{out}</svg>\n"
    )
}

/// Returns the number of chunks that share a bar of the strip.
pub(crate) fn chunks_per_strip_bar(chunks: usize) -> usize {
    chunks.div_ceil(MAX_STRIP_BARS).max(1)
}

fn draw_bars(lane: &[TimelineSpan], w: TimeWindow, x: &dyn Fn(u64) -> f64, palette: &Palette) -> String {
    let mut out = String::new();
    let mut previous = ("", 0);
    let mut odd = false;
    let inside = |s: &&TimelineSpan| s.end_ns >= w.start_ns && s.start_ns < w.end_ns;
    let wide = |s: &TimelineSpan| {
        let work = busy_intervals(s, w);
        work.iter().map(|(from, to)| rounded_width(x(*from), x(*to))).fold(0.0, f64::max)
    };
    // All bars of one name have a label, or none of them has.
    let mut narrowest: Vec<(&str, f64)> = Vec::new();
    for s in lane.iter().filter(inside).filter(|s| s.start_ns >= w.start_ns && s.end_ns <= w.end_ns) {
        match narrowest.iter_mut().find(|(name, _)| *name == s.name) {
            Some((_, least)) => *least = least.min(wide(s)),
            None => narrowest.push((&s.name, wide(s))),
        }
    }
    for s in lane.iter().filter(inside).take(MAX_LANE_BARS) {
        let kind = phase_kind(&s.name);
        // Two alternating tones separate the steps of a phase.
        odd = (kind, s.chunk) == previous && !odd;
        previous = (kind, s.chunk);
        let tone = if odd { " odd" } else { "" };
        let ops = match s.collectives {
            0 => String::new(),
            1 => ", 1 collective".to_string(),
            n => format!(", {n} collectives"),
        };
        let label = escape_text(&s.name);
        let waited = s.waits.as_ref().filter(|waits| waits.total_ns > 0);
        let waited = waited
            .map_or(String::new(), |waits| format!(", of which {} waiting", Nanoseconds(waits.total_ns)));
        let title = format!(
            "<title>{label}, chunk {}: {}{waited}{ops}</title>",
            s.chunk,
            Nanoseconds(s.end_ns - s.start_ns)
        );
        let (class, work) = (palette.colour_class(kind), busy_intervals(s, w));
        let rect = |from: u64, to: u64, y: f64, height: f64| {
            format!(
                "x=\"{}%\" y=\"{}\" width=\"{}%\" height=\"{}\" rx=\"1.5\"",
                x(from),
                round_milli(y),
                rounded_width(x(from), x(to)).max(0.05),
                round_milli(height)
            )
        };
        let full = 18.0;
        let height = full * busy_share(s, &work);
        if work[..] == [(s.start_ns, s.end_ns)] && height == full {
            let whole = rect(s.start_ns, s.end_ns, 1.0, full);
            let _ = write!(out, "<rect class=\"p{class}{tone}\" {whole}>{title}</rect>");
        } else {
            let _ = write!(out, "<g class=\"p{class}{tone}\">{title}");
            // An invisible rectangle gives the whole span its tooltip.
            let _ = write!(out, "<rect class=\"none\" {}/>", rect(s.start_ns, s.end_ns, 1.0, full));
            let _ = write!(out, "<rect class=\"idle\" {}/>", rect(s.start_ns, s.end_ns, 9.5, 1.0));
            for (from, to) in &work {
                let _ = write!(out, "<rect class=\"idle\" {}/>", rect(*from, *to, 1.0, full));
                let _ = write!(out, "<rect {}/>", rect(*from, *to, 1.0 + full - height, height));
            }
            out.push_str("</g>");
        }
        let least = narrowest.iter().find(|(name, _)| *name == s.name).map_or(0.0, |(_, least)| *least);
        let longest = work.iter().max_by_key(|(from, to)| (to - from, std::cmp::Reverse(*from)));
        if let Some((from, _)) = longest
            && let Some(class) = label_class(least.min(wide(s)), s.name.chars().count() as f64 * 6.3 + 9.0)
        {
            // A pale label would be illegible on the pale part of a bar.
            let class = match (class, height < 0.7 * full) {
                (class, false) => class,
                ("", true) => " class=\"ink\"",
                (_, true) => " class=\"ink wide\"",
            };
            let _ = write!(out, "<text{class} x=\"{}%\" dx=\"5\" y=\"14\">{label}</text>", x(*from));
        }
    }
    out
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

/// Returns the class of a label of `pixels` pixels in a bar of `wide` percent: an empty class if
/// the label fits everywhere, `wide` if it fits on wide pages only, and `None` if it never fits.
fn label_class(wide: f64, pixels: f64) -> Option<&'static str> {
    match wide / 100.0 {
        w if w * PHONE_WIDTH > pixels => Some(""),
        w if w * DESKTOP_WIDTH > pixels => Some(" class=\"wide\""),
        _ => None,
    }
}

fn draw_axis(w: TimeWindow) -> String {
    let length = w.end_ns - w.start_ns;
    let step = nice_step(length);
    let mut out = String::new();
    let mut at = w.start_ns.next_multiple_of(step);
    while at <= w.end_ns {
        let x = percent_of(at - w.start_ns, length);
        // A centred label at the very edge would overflow the drawing.
        let anchor = match x {
            x if x < 3.0 => "start",
            x if x > 94.0 => "end",
            _ => "middle",
        };
        let _ = write!(
            out,
            "<line x1=\"{x}%\" x2=\"{x}%\" y2=\"4\"/><text x=\"{x}%\" y=\"16\" text-anchor=\"{anchor}\">{}</text>",
            format_instant(at, step)
        );
        at += step;
    }
    out
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

fn percent_of(part: u64, whole: u64) -> f64 {
    round_milli(part as f64 / whole.max(1) as f64 * 100.0)
}

fn rounded_width(from: f64, to: f64) -> f64 {
    round_milli(to - from)
}

fn round_milli(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::record::StreamWaits;
    use crate::timeline::tests::sample;

    #[test]
    fn bars_cover_their_phases() {
        let t = Timeline::from_record(&sample(3));
        let w = t.steady_window(1).unwrap();
        let svg = draw_lanes(&t, w, &Palette::new(&t));
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
        let svg = draw_lanes(&t, w, &Palette::new(&t));
        for part in [
            "<g class=\"p1 odd\"><title>denoise.1, chunk 1: 4.0 ms, of which 3.0 ms waiting, 6 collectives</title>",
            "<rect class=\"idle\" x=\"40%\" y=\"9.5\" width=\"40%\" height=\"1\" rx=\"1.5\"/>",
            "<rect class=\"idle\" x=\"60%\" y=\"1\" width=\"20%\" height=\"18\" rx=\"1.5\"/>\
             <rect x=\"60%\" y=\"10\" width=\"20%\" height=\"9\" rx=\"1.5\"/></g>",
            "<text class=\"ink wide\" x=\"60%\" dx=\"5\" y=\"14\">denoise.1</text>",
        ] {
            assert!(svg.contains(part), "{part}\nis not in\n{svg}");
        }
        // A span without waits is one full bar, and a span that only waits has no bar.
        t.spans.iter_mut().for_each(|s| s.waits = Some(StreamWaits::default()));
        let span = t.spans.iter_mut().find(|s| s.chunk == 1 && s.name == "clean").unwrap();
        span.waits = Some(StreamWaits::from_busy_intervals(span.start_ns, span.end_ns, []));
        let svg = draw_lanes(&t, w, &Palette::new(&t));
        assert!(svg.contains("<rect class=\"p1 odd\" x=\"40%\" y=\"1\" width=\"40%\""), "{svg}");
        assert!(svg.contains("rx=\"1.5\"/></g></svg>"), "no bar and no label: {svg}");
    }

    #[test]
    fn the_axis_has_few_round_ticks() {
        let t = draw_axis(TimeWindow { start_ns: 11_000_000, end_ns: 51_000_000 });
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
        let svg = draw_strip(&t, t.steady_window(4));
        assert_eq!(svg.matches("class=\"bar").count(), 200);
        assert_eq!(svg.matches("bar tall").count(), 1);
        assert!(svg.contains("slowest of chunks 0 to 4: 910.0 ms"), "{svg}");
        assert!(svg.contains("class=\"detail\" x=\"0%\" width=\"0.5%\""));
        assert_eq!(draw_strip(&Timeline::default(), None), "");
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
            p.render_legend(|k| k == "kind2"),
            "<ul class=\"legend\"><li><i class=\"b6\"></i>kind2</li></ul>\n"
        );
        // Without a known kind, all colours are available.
        t.spans[0].name = "kind0.x".into();
        assert_eq!(Palette::new(&t).colour_class("kind0"), 0);
    }
}
