//! Standalone SVG drawings of counterexamples: a cycle of waits, or two calls that do not match.

use std::fmt::Write;

use tessera_base::{Counterexample, Mismatch, RankCollective, Span, WaitEdge};

use crate::canvas::{
    PADDING, WIDTH, char_width, draw_centred, draw_elbow_arrow, draw_heading, draw_label, draw_rect,
    draw_text, escape_xml, fit_width, text_width, wrap_svg, wrap_text,
};

/// Draws a counterexample as a standalone SVG. `title` is its heading, usually the code and message
/// of the diagnostic.
#[must_use]
pub fn draw_counterexample(c: &Counterexample, title: &str) -> String {
    draw_counterexample_with_lines(c, title, &|_, _| None)
}

/// Draws a counterexample with line numbers: `line` returns the 1-based line of a span in a text,
/// if the text is available.
#[must_use]
pub fn draw_counterexample_with_lines(c: &Counterexample, title: &str, line: LineLookup<'_>) -> String {
    match c {
        Counterexample::WaitCycle(links) => draw_cycle(links, title, line),
        Counterexample::Mismatch(m) => draw_mismatch(m, title, line),
    }
}

/// Looks up the line of a span in a named text.
type LineLookup<'a> = &'a dyn Fn(&str, Span) -> Option<usize>;

/// Maximum number of lanes drawn of a cycle; the middle of a longer one is left out.
const MAX_LANES: usize = 12;
/// Number of lanes drawn before and after the omitted ones.
const EDGE_LANES: (usize, usize) = (5, 5);

const HELD_X: i32 = 124;
const BOX_W: i32 = 318;
const WANT_X: i32 = HELD_X + BOX_W + 64;
const BOX_H: i32 = 76;
const LANE_PAD: i32 = 9;
const LANE_H: i32 = BOX_H + 2 * LANE_PAD;
const BAND_H: i32 = 46;
const GAP: i32 = 46;
/// Horizontal position of the closing arrow.
const RETURN_X: i32 = WIDTH - PADDING - 14;

fn draw_cycle(links: &[WaitEdge], title: &str, line: LineLookup<'_>) -> String {
    let mut out = String::new();
    let mut y = draw_heading(
        &mut out,
        title,
        "Each rank is inside a call that the rank above must join first; the first rank waits for the last.",
    );
    draw_label(&mut out, (HELD_X, y), "c", "is inside, unfinished", BOX_W);
    draw_label(&mut out, (WANT_X, y), "c", "reaches only after that", BOX_W);
    y += 14 + GAP;
    let top = y;
    let rows = cycle_rows(links);
    let (held, want) = (HELD_X + BOX_W / 2, WANT_X + BOX_W / 2);
    let mut arrows = String::new();
    for (n, row) in rows.iter().enumerate() {
        let height = match row {
            CycleRow::Lane(link) => {
                draw_lane(&mut out, link, y, line);
                LANE_H
            }
            CycleRow::Band(hidden) => {
                draw_band(&mut out, hidden, y);
                BAND_H
            }
        };
        if n > 0 {
            // The arrow leads from this row's unfinished call up to the call that the previous row
            // has not reached.
            let (from, to) = (row.arrow_start(y), rows[n - 1].arrow_end(y - GAP));
            draw_elbow_arrow(
                &mut arrows,
                &[(held, from), (held, y - GAP / 2), (want, y - GAP / 2), (want, to)],
            );
            draw_wait_pill(
                &mut arrows,
                (held + want) / 2,
                y - GAP / 2,
                row.first_rank(),
                rows[n - 1].last_rank(),
            );
        }
        y += height + GAP;
    }
    let bottom = y - GAP;
    if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
        let (above, below) = (top - GAP / 2, bottom + GAP / 2);
        let path = [
            (held, first.arrow_start(top)),
            (held, above),
            (RETURN_X, above),
            (RETURN_X, below),
            (want, below),
            (want, last.arrow_end(bottom)),
        ];
        draw_elbow_arrow(&mut arrows, &path);
        draw_wait_pill(&mut arrows, (held + want) / 2, above, first.first_rank(), last.last_rank());
    }
    wrap_svg(title, bottom + GAP / 2 + PADDING, &(out + &arrows))
}

/// A row of the drawing: a lane, or a band that stands for omitted lanes.
enum CycleRow<'a> {
    Lane(&'a WaitEdge),
    Band(&'a [WaitEdge]),
}

impl CycleRow<'_> {
    fn links(&self) -> &[WaitEdge] {
        match self {
            CycleRow::Lane(link) => std::slice::from_ref(*link),
            CycleRow::Band(links) => links,
        }
    }

    fn first_rank(&self) -> u32 {
        self.links().first().map_or(0, |l| l.rank)
    }

    fn last_rank(&self) -> u32 {
        self.links().last().map_or(0, |l| l.rank)
    }

    /// Returns where an arrow leaves upwards from a row that begins at `y`.
    fn arrow_start(&self, y: i32) -> i32 {
        if matches!(self, CycleRow::Lane(_)) { y + LANE_PAD } else { y }
    }

    /// Returns where an arrow arrives from below at a row that ends at `y`.
    fn arrow_end(&self, y: i32) -> i32 {
        if matches!(self, CycleRow::Lane(_)) { y - LANE_PAD + 1 } else { y + 1 }
    }
}

fn cycle_rows(links: &[WaitEdge]) -> Vec<CycleRow<'_>> {
    if links.len() <= MAX_LANES {
        return links.iter().map(CycleRow::Lane).collect();
    }
    let (before, after) = (EDGE_LANES.0, links.len() - EDGE_LANES.1);
    let mut rows: Vec<CycleRow<'_>> = links[..before].iter().map(CycleRow::Lane).collect();
    rows.push(CycleRow::Band(&links[before..after]));
    rows.extend(links[after..].iter().map(CycleRow::Lane));
    rows
}

fn draw_lane(out: &mut String, l: &WaitEdge, y: i32, line: LineLookup<'_>) {
    let right = WANT_X + BOX_W + LANE_PAD - PADDING;
    draw_rect(out, "lane", (PADDING, y), (right, LANE_H), 8);
    let middle = y + LANE_H / 2;
    let name = l.rank.to_string();
    if name.len() <= 3 {
        draw_label(out, (PADDING + 14, middle + 5), "r", &format!("rank {name}"), HELD_X - PADDING - 14);
    } else {
        draw_text(out, (PADDING + 14, middle - 5), "r", "rank", None);
        draw_text(out, (PADDING + 14, middle + 15), "r", &name, None);
    }
    draw_call(out, &l.blocked_in, (HELD_X, y + LANE_PAD), "held", line);
    draw_call(out, &l.not_reached, (WANT_X, y + LANE_PAD), "want", line);
    let (from, to) = (HELD_X + BOX_W, WANT_X - 2);
    let _ = write!(out, "<path class=\"then\" d=\"M{from} {middle}H{to}\" marker-end=\"url(#t)\"/>");
}

fn draw_band(out: &mut String, hidden: &[WaitEdge], y: i32) {
    let right = WANT_X + BOX_W + LANE_PAD - PADDING;
    draw_rect(out, "want", (PADDING, y), (right, BAND_H), 8);
    let ranks: Vec<u32> = hidden.iter().map(|l| l.rank).collect();
    let words =
        format!("{} more ranks, each waiting for the one above: {}", hidden.len(), format_ranks(&ranks));
    draw_label(out, (HELD_X, y + BAND_H / 2 + 5), "s", &words, WANT_X + BOX_W - HELD_X);
}

/// Draws a call as a box with its name, its group and its position.
fn draw_call(out: &mut String, s: &RankCollective, (x, y): (i32, i32), class: &str, line: LineLookup<'_>) {
    let full =
        format!("{}, {}, stream {}, {}", s.description, format_members(s), s.stream, call_position(s, line));
    let _ = write!(out, "<g><title>{}</title>", escape_xml(&full));
    draw_rect(out, class, (x, y), (BOX_W, BOX_H), 6);
    let (name, rest) = split_call_name(s);
    let inner = BOX_W - 28;
    draw_label(out, (x + 14, y + 22), "m b", name, inner);
    draw_label(out, (x + 14, y + 41), "m c", rest, inner);
    // The line number matters most to a reader, then the ranks; other parts are shortened first.
    let mut room = (inner as usize / 6).saturating_sub(text_width(&short_position(s, line)));
    let mut parts = vec![short_position(s, line)];
    for words in [fit_width(&format!("stream {}", s.stream), 22).0, format_members(s)] {
        let (shown, _) = fit_width(&words, room.saturating_sub(3));
        if text_width(&shown) >= text_width(&words).min(9) {
            room -= text_width(&shown) + 3;
            parts.insert(0, shown);
        }
    }
    draw_text(out, (x + 14, y + 62), "c", &parts.join(" · "), None);
    out.push_str("</g>");
}

/// Splits a call into its name, including the arguments in parentheses, and the rest of its
/// description.
fn split_call_name(s: &RankCollective) -> (&str, &str) {
    let what = s.description.trim();
    match what.strip_prefix(s.op.as_str()) {
        Some(rest) if !s.op.is_empty() => {
            let end = rest.find(' ').unwrap_or(rest.len());
            (&what[..s.op.len() + end], rest[end..].trim())
        }
        _ => (s.op.as_str(), what),
    }
}

fn draw_mismatch(m: &Mismatch, title: &str, line: LineLookup<'_>) -> String {
    const LABEL_W: i32 = 92;
    const COLUMN_W: i32 = 364;
    const ROW_H: i32 = 34;
    let columns = [PADDING + LABEL_W, PADDING + LABEL_W + COLUMN_W + 36];
    let agreed = match m.position {
        0 => "the first call already differs".to_string(),
        1 => "position 0 agrees".to_string(),
        n => format!("positions 0 to {} agree", n - 1),
    };
    let mut out = String::new();
    let top = draw_heading(&mut out, title, &format!("{}, position {}; {agreed}", m.group, m.position)) + 8;
    let rows = mismatch_rows(m, line);
    let body = top + 44;
    let row_height = |row: &MismatchRow| ROW_H + (row.line_count() as i32 - 1) * 19;
    let tall: i32 = rows.iter().map(row_height).sum();
    for ((rank, call), x) in m.sides.iter().zip(columns) {
        let class = if call.is_some() { "card" } else { "want" };
        draw_rect(&mut out, class, (x, top), (COLUMN_W, tall + 52), 8);
        draw_label(&mut out, (x + 18, top + 29), "r", &format!("rank {rank}"), COLUMN_W - 36);
    }
    let mut y = body;
    let both_called = m.sides.iter().all(|s| s.1.is_some());
    for row in &rows {
        let height = row_height(row);
        if row.differs && both_called {
            draw_rect(&mut out, "odd", (PADDING, y), (columns[1] + COLUMN_W - PADDING, height), 6);
            draw_centred(&mut out, (columns[1] - 18, y + height / 2 + 6), "h x", "≠");
        }
        let class = if row.differs { "x b" } else { "s" };
        draw_label(&mut out, (PADDING + 12, y + 22), class, row.name, LABEL_W - 12);
        for (lines, x) in row.sides.iter().zip(columns) {
            for (i, (shown, full_text)) in lines.iter().enumerate() {
                let class = if row.differs { "m x b" } else { "m" };
                let at = (x + 18, y + 22 + 19 * i as i32);
                draw_text(&mut out, at, class, shown, full_text.as_deref());
            }
        }
        y += height;
    }
    for ((rank, _), x) in m.sides.iter().zip(columns).filter(|((_, call), _)| call.is_none()) {
        let (x, y) = (x + COLUMN_W / 2, body + tall / 2);
        draw_centred(&mut out, (x, y - 4), "h x", "no call");
        let words = format!("rank {rank} issues no call at position {}", m.position);
        draw_centred(&mut out, (x, y + 20), "s", &words);
    }
    wrap_svg(title, body + tall + 8 + PADDING, &out)
}

/// A row of a mismatch: its name and, per side, the lines to show, each with its full text if it
/// was shortened.
struct MismatchRow {
    name: &'static str,
    differs: bool,
    sides: Vec<Vec<(String, Option<String>)>>,
}

impl MismatchRow {
    fn line_count(&self) -> usize {
        self.sides.iter().map(Vec::len).max().unwrap_or(1).max(1)
    }
}

fn mismatch_rows(m: &Mismatch, line: LineLookup<'_>) -> Vec<MismatchRow> {
    let sides = [m.sides[0].1.as_ref(), m.sides[1].1.as_ref()];
    type Get<'a> = Box<dyn Fn(&RankCollective) -> String + 'a>;
    let all: Vec<(&'static str, &[&str], usize, Get<'_>)> = vec![
        ("op", &["op"], 1, Box::new(|s| s.op.clone())),
        ("dtype", &["dtype"], 1, Box::new(|s| s.dtype.clone())),
        ("shape", &["shape", "count"], 1, Box::new(|s| s.shape.clone())),
        ("ranks", &["ranks", "group", "members"], 2, Box::new(|s| format_ranks(&s.ranks))),
        ("stream", &["stream"], 1, Box::new(|s| s.stream.clone())),
        ("at", &[], 2, Box::new(|s| call_position(s, line))),
        ("call", &[], 4, Box::new(|s| s.description.clone())),
    ];
    let differ = |get: &Get<'_>| matches!(sides, [Some(a), Some(b)] if get(a) != get(b));
    // A property without a row of its own, such as a root, appears in the description of the call.
    let own = all.iter().position(|(_, fields, _, get)| fields.contains(&m.field.as_str()) && differ(get));
    let odd = own.unwrap_or(all.len() - 1);
    all.iter()
        .enumerate()
        .map(|(i, (name, _, max_lines, get))| MismatchRow {
            name,
            differs: i == odd && sides.iter().all(Option::is_some),
            sides: sides
                .iter()
                .map(|s| match s {
                    Some(s) if *name == "at" => position_lines(s, line),
                    Some(s) => wrap_text(&get(s), 40, *max_lines),
                    None => Vec::new(),
                })
                .collect(),
        })
        .collect()
}

fn draw_wait_pill(out: &mut String, x: i32, y: i32, waiter: u32, awaited: u32) {
    let words = format!("rank {waiter} waits for rank {awaited}");
    let wide = words.chars().count() as i32 * 7 + 20;
    draw_rect(out, "pill", (x - wide / 2, y - 12), (wide, 24), 12);
    draw_centred(out, (x, y + 5), "x", &words);
}

/// Formats the ranks of a call, such as `ranks 0, 1`.
fn format_members(s: &RankCollective) -> String {
    if let [one] = s.ranks[..] { format!("rank {one}") } else { format!("ranks {}", format_ranks(&s.ranks)) }
}

/// Formats ranks and abbreviates series of three or more: `0–7, 9, 11`.
fn format_ranks(ranks: &[u32]) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut rest = ranks;
    while let Some(&first) = rest.first() {
        let n = rest.windows(2).take_while(|w| w[0].checked_add(1) == Some(w[1])).count() + 1;
        if n >= 3 {
            out.push(format!("{first}–{}", rest[n - 1]));
        } else {
            out.extend(rest[..n].iter().map(u32::to_string));
        }
        rest = &rest[n..];
    }
    out.join(", ")
}

/// Formats the position of a call, such as `op 12 · stage0.tir:40`.
fn call_position(s: &RankCollective, line: LineLookup<'_>) -> String {
    match &s.source {
        Some((at, span)) => match line(at, *span) {
            Some(n) => format!("op {} · {at}:{n}", s.index),
            None => format!("op {} · {at}", s.index),
        },
        None => format!("op {}", s.index),
    }
}

/// Formats the position of a call on one line, or on two with the end of a long path, where the
/// file name is.
fn position_lines(s: &RankCollective, line: LineLookup<'_>) -> Vec<(String, Option<String>)> {
    let position = call_position(s, line);
    match position.split_once(" · ") {
        Some((op, file)) if text_width(&position) > 40 => {
            let mut wide = 1;
            let kept = file.chars().rev().take_while(|c| {
                wide += char_width(*c);
                wide <= 40
            });
            let kept = kept.count();
            let count = file.chars().count();
            let tail: String = file.chars().skip(count - kept).collect();
            let shown = if kept < count { format!("…{tail}") } else { tail };
            vec![(op.to_string(), None), (shown, (kept < count).then(|| file.to_string()))]
        }
        _ => vec![(position, None)],
    }
}

/// Formats the position of a call in short form: `op 12, line 40`.
fn short_position(s: &RankCollective, line: LineLookup<'_>) -> String {
    match s.source.as_ref().and_then(|(at, span)| line(at, *span)) {
        Some(n) => format!("op {}, line {n}", s.index),
        None => format!("op {}", s.index),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(op: &str, ranks: &[u32], index: usize) -> RankCollective {
        RankCollective {
            description: format!("{op} over tp of bf16[2160, 5120]"),
            op: op.split('(').next().unwrap_or_default().into(),
            dtype: "bf16".into(),
            shape: "[2160, 5120]".into(),
            ranks: ranks.to_vec(),
            stream: "comm".into(),
            index,
            source: Some(("programs/denoise.stage0.tir".into(), Span { start: index, end: index + 1 })),
        }
    }

    fn ring(n: u32) -> Counterexample {
        let pair = |a: u32, b: u32| if a < b { [a, b] } else { [b, a] };
        let link = |k: u32| WaitEdge {
            rank: k,
            blocked_in: call("send", &pair((k + n - 1) % n, k), 4),
            not_reached: call("send", &pair(k, (k + 1) % n), 5),
        };
        Counterexample::WaitCycle((0..n).map(link).collect())
    }

    fn mismatch_in(field: &str, other: Option<RankCollective>) -> Counterexample {
        Counterexample::Mismatch(Mismatch {
            group: "tp of ranks 0, 1".into(),
            position: 4,
            field: field.into(),
            sides: [(0, Some(call("all_reduce(sum)", &[0, 1], 12))), (1, other)],
        })
    }

    fn samples() -> Vec<(&'static str, String)> {
        let two = Counterexample::WaitCycle(vec![
            WaitEdge {
                rank: 0,
                blocked_in: call("all_reduce(sum)", &[0, 1], 12),
                not_reached: call("all_gather", &[0, 1, 2, 3], 14),
            },
            WaitEdge {
                rank: 1,
                blocked_in: call("all_gather", &[0, 1, 2, 3], 9),
                not_reached: call("all_reduce(sum)", &[0, 1], 13),
            },
        ]);
        let mut f32 = call("all_reduce(sum)", &[0, 1], 12);
        f32.dtype = "f32".into();
        f32.description = f32.description.replace("bf16", "f32");
        let mut long = call(
            &"a_very_long_name_of_an_op<&>".repeat(6),
            &(0..72).step_by(5).collect::<Vec<_>>(),
            123_456_789,
        );
        long.stream = "a stream with a name that goes on and on".into();
        long.source = Some(("/some/where/".repeat(12) + "rank-3.jsonl", Span::default()));
        let same = call("all_gather", &[0, 1], 3);
        let longs = Counterexample::WaitCycle(vec![
            WaitEdge { rank: 1000, blocked_in: long.clone(), not_reached: same.clone() },
            WaitEdge { rank: 70_000, blocked_in: same, not_reached: long.clone() },
        ]);
        let line = |_: &str, s: Span| Some(s.start + 40);
        let draw = |c: &Counterexample, title: &str| draw_counterexample_with_lines(c, title, &line);
        vec![
            ("cycle-2", draw(&two, "T0311: ranks 0, 1 wait for each other in a cycle")),
            ("cycle-3", draw(&ring(3), "T0311: ranks 0, 1, 2 wait for each other in a cycle")),
            ("cycle-8", draw(&ring(8), "T0311: ranks 0, 1, 2, 3, 4, 5, 6, 7 wait for each other in a cycle")),
            ("cycle-20", draw_counterexample(&ring(20), "T0311: 20 ranks wait for each other in a cycle")),
            (
                "mismatch-dtype",
                draw(&mismatch_in("dtype", Some(f32)), "T0303: rank 1 differs from rank 0 in the dtype"),
            ),
            (
                "mismatch-missing",
                draw(
                    &mismatch_in("op", None),
                    "T0307: rank 1 lacks a collective at position 4 of the tp group of ranks 0, 1",
                ),
            ),
            (
                "mismatch-long",
                draw(&mismatch_in("root", Some(long)), &"A title <that> goes on & on ".repeat(12)),
            ),
            ("cycle-long", draw(&longs, "T0311: ranks 1000, 70000 wait for each other in a cycle")),
        ]
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the drawings are compared with files")]
    fn drawings_match_the_golden_files() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counterexamples");
        for (name, svg) in samples() {
            let file = dir.join(format!("{name}.svg"));
            if std::env::var_os("BLESS").is_some() {
                std::fs::write(&file, &svg).unwrap();
            }
            assert_eq!(
                svg,
                std::fs::read_to_string(&file).unwrap(),
                "{name}: check the drawing, then keep it with BLESS=1"
            );
        }
    }

    #[test]
    fn text_is_escaped_and_every_tag_is_closed() {
        for (name, svg) in samples() {
            assert!(!svg.contains("<&>") && !svg.contains("<that>"), "{name}");
            let opened = svg.matches('<').count();
            let closed = svg.matches("</").count() * 2 + svg.matches("/>").count();
            assert_eq!(opened, closed, "{name}");
            assert!(svg.len() < 40_000, "{name}: {} bytes", svg.len());
        }
    }

    #[test]
    fn long_cycles_leave_out_the_middle() {
        let svg = draw_counterexample(&ring(20), "t");
        assert!(svg.contains("10 more ranks, each waiting for the one above: 5–14"), "{svg}");
        assert!(svg.contains("rank 15 waits for rank 14") && svg.contains("rank 0 waits for rank 19"));
        assert!(!svg.contains(">rank 7<"));
        assert_eq!(draw_counterexample(&ring(12), "t").matches("class=\"lane\"").count(), 12);
    }

    #[test]
    fn ranks_and_lines_are_short() {
        assert_eq!(format_ranks(&[0, 1, 2, 3, 5, 6, 9]), "0–3, 5, 6, 9");
        let lines: Vec<String> = wrap_text("one two three", 8, 2).into_iter().map(|l| l.0).collect();
        assert_eq!(lines, ["one two", "three"]);
        assert_eq!(fit_width("abcdef", 4), ("abc…".to_string(), true));
        // A list that ends at the largest rank must not overflow.
        assert_eq!(format_ranks(&[u32::MAX]), u32::MAX.to_string());
    }

    #[test]
    fn an_empty_cycle_is_drawn() {
        assert!(draw_counterexample(&Counterexample::WaitCycle(Vec::new()), "").starts_with("<svg"));
    }
}
