//! A counterexample as a drawing that stands alone: who waits for whom in a circle, or two calls that do not meet.
//!
//! Positions are pixels of a fixed width, because labels and arrows must meet. The card brings its own light ground, so
//! it reads the same on light and dark pages.

use std::fmt::Write;

use tessera_base::{Counterexample, Link, Mismatch, Span, Step};

use crate::markup;

/// Draws a counterexample as a standalone SVG. `title` heads it, most often code and message of the diagnostic.
#[must_use]
pub fn counterexample(c: &Counterexample, title: &str) -> String {
    counterexample_with_lines(c, title, &|_, _| None)
}

/// The same, naming lines: `line` gives the 1-based line of a span of a text, where that is at hand.
#[must_use]
pub fn counterexample_with_lines(c: &Counterexample, title: &str, line: Lines<'_>) -> String {
    match c {
        Counterexample::Circle(links) => circle(links, title, line),
        Counterexample::Mismatch(m) => mismatch(m, title, line),
    }
}

/// Line of a span of a named text.
type Lines<'a> = &'a dyn Fn(&str, Span) -> Option<usize>;

/// Most lanes of a circle that are drawn; of longer ones the middle is left out.
const MAX_LANES: usize = 12;
/// Lanes drawn before and after what is left out.
const ENDS: (usize, usize) = (5, 5);

const WIDTH: i32 = 920;
const PAD: i32 = 32;
/// Pixels that a character of the fixed-width fonts takes, at most.
const MONO: i32 = 8;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif;fill:#1c1e22;font-size:13px}\
.h{font-size:18px;font-weight:600}.r{font-size:15px;font-weight:600}.s{fill:#646a73}.c{font-size:12px;fill:#646a73}\
.m{font-family:ui-monospace,'SF Mono',SFMono-Regular,Menlo,Consolas,'Liberation Mono','DejaVu Sans Mono',monospace}\
.b{font-weight:600}.x{fill:#b3392f}.card{fill:#fff;stroke:#d9d5cb}.lane{fill:#f3f1eb}\
.held{fill:#fff;stroke:#b3392f;stroke-width:1.6}.want{fill:#faf9f6;stroke:#8b9098;stroke-width:1.4;stroke-dasharray:5 4}\
.wait{fill:none;stroke:#b3392f;stroke-width:2}.then{fill:none;stroke:#8b9098;stroke-width:1.4}\
.pill{fill:#fff;stroke:#e7c4c0}.odd{fill:#fbeae8}.hair{stroke:#e5e2da}";

const HEADS: &str = "\
<marker id=\"w\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L10 5L0 10z\" fill=\"#b3392f\"/></marker>\
<marker id=\"t\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L10 5L0 10z\" fill=\"#8b9098\"/></marker>";

const HELD_X: i32 = 124;
const BOX_W: i32 = 318;
const WANT_X: i32 = HELD_X + BOX_W + 64;
const BOX_H: i32 = 76;
const LANE_PAD: i32 = 9;
const LANE_H: i32 = BOX_H + 2 * LANE_PAD;
const BAND_H: i32 = 46;
const GAP: i32 = 46;
/// Where the closing arrow runs down.
const RETURN_X: i32 = WIDTH - PAD - 14;

fn circle(links: &[Link], title: &str, line: Lines<'_>) -> String {
    let mut out = String::new();
    let mut y = head(
        &mut out,
        title,
        "Each rank is inside a call that the rank above must join first; the first waits for the last.",
    );
    label(&mut out, (HELD_X, y), "c", "is inside, unfinished", BOX_W);
    label(&mut out, (WANT_X, y), "c", "reaches only afterwards", BOX_W);
    y += 14 + GAP;
    let top = y;
    let rows = rows(links);
    let (held, want) = (HELD_X + BOX_W / 2, WANT_X + BOX_W / 2);
    let mut arrows = String::new();
    for (n, row) in rows.iter().enumerate() {
        let height = match row {
            Row::Lane(link) => {
                lane(&mut out, link, y, line);
                LANE_H
            }
            Row::Band(hidden) => {
                band(&mut out, hidden, y);
                BAND_H
            }
        };
        if n > 0 {
            // From this row's unfinished call up to what the row before has not reached.
            let (from, to) = (row.top(y), rows[n - 1].bottom(y - GAP));
            elbow(&mut arrows, &[(held, from), (held, y - GAP / 2), (want, y - GAP / 2), (want, to)]);
            pill(&mut arrows, (held + want) / 2, y - GAP / 2, row.first(), rows[n - 1].last());
        }
        y += height + GAP;
    }
    let bottom = y - GAP;
    if let (Some(first), Some(last)) = (rows.first(), rows.last()) {
        let (above, below) = (top - GAP / 2, bottom + GAP / 2);
        let path = [
            (held, first.top(top)),
            (held, above),
            (RETURN_X, above),
            (RETURN_X, below),
            (want, below),
            (want, last.bottom(bottom)),
        ];
        elbow(&mut arrows, &path);
        pill(&mut arrows, (held + want) / 2, above, first.first(), last.last());
    }
    finish(title, bottom + GAP / 2 + PAD, &(out + &arrows))
}

/// A lane, or a place where lanes are left out.
enum Row<'a> {
    Lane(&'a Link),
    Band(&'a [Link]),
}

impl Row<'_> {
    fn first(&self) -> u32 {
        match self {
            Row::Lane(l) => l.rank,
            Row::Band(ls) => ls.first().map_or(0, |l| l.rank),
        }
    }

    fn last(&self) -> u32 {
        match self {
            Row::Lane(l) => l.rank,
            Row::Band(ls) => ls.last().map_or(0, |l| l.rank),
        }
    }

    /// Where an arrow leaves upwards, of a row that begins at `y`.
    fn top(&self, y: i32) -> i32 {
        if matches!(self, Row::Lane(_)) { y + LANE_PAD } else { y }
    }

    /// Where an arrow arrives from below, of a row that ends at `y`.
    fn bottom(&self, y: i32) -> i32 {
        if matches!(self, Row::Lane(_)) { y - LANE_PAD + 1 } else { y + 1 }
    }
}

fn rows(links: &[Link]) -> Vec<Row<'_>> {
    if links.len() <= MAX_LANES {
        return links.iter().map(Row::Lane).collect();
    }
    let (before, after) = (ENDS.0, links.len() - ENDS.1);
    let mut rows: Vec<Row<'_>> = links[..before].iter().map(Row::Lane).collect();
    rows.push(Row::Band(&links[before..after]));
    rows.extend(links[after..].iter().map(Row::Lane));
    rows
}

fn lane(out: &mut String, l: &Link, y: i32, line: Lines<'_>) {
    let right = WANT_X + BOX_W + LANE_PAD - PAD;
    let _ = write!(
        out,
        "<rect class=\"lane\" x=\"{PAD}\" y=\"{y}\" width=\"{right}\" height=\"{LANE_H}\" rx=\"8\"/>"
    );
    let middle = y + LANE_H / 2;
    let name = l.rank.to_string();
    if name.len() <= 3 {
        label(out, (PAD + 14, middle + 5), "r", &format!("rank {name}"), HELD_X - PAD - 14);
    } else {
        titled(out, (PAD + 14, middle - 5), "r", "rank", None);
        titled(out, (PAD + 14, middle + 15), "r", &name, None);
    }
    step(out, &l.holds, (HELD_X, y + LANE_PAD), "held", line);
    step(out, &l.wants, (WANT_X, y + LANE_PAD), "want", line);
    let (from, to) = (HELD_X + BOX_W, WANT_X - 2);
    let _ = write!(out, "<path class=\"then\" d=\"M{from} {middle}H{to}\" marker-end=\"url(#t)\"/>");
}

fn band(out: &mut String, hidden: &[Link], y: i32) {
    let right = WANT_X + BOX_W + LANE_PAD - PAD;
    let _ = write!(
        out,
        "<rect class=\"want\" x=\"{PAD}\" y=\"{y}\" width=\"{right}\" height=\"{BAND_H}\" rx=\"8\"/>"
    );
    let ranks: Vec<u32> = hidden.iter().map(|l| l.rank).collect();
    let words = format!("{} more ranks, each waiting for the one above: {}", hidden.len(), list(&ranks));
    label(out, (HELD_X, y + BAND_H / 2 + 5), "s", &words, WANT_X + BOX_W - HELD_X);
}

/// A call as a box: its name, what it is over, and where it stands.
fn step(out: &mut String, s: &Step, (x, y): (i32, i32), class: &str, line: Lines<'_>) {
    let full = format!("{}, {}, stream {}, {}", s.what, among(s), s.stream, position(s, line));
    let _ = write!(
        out,
        "<g><title>{}</title><rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{BOX_W}\" height=\"{BOX_H}\" rx=\"6\"/>",
        escape(&full)
    );
    let (name, rest) = split(s);
    let inner = BOX_W - 28;
    label(out, (x + 14, y + 22), "m b", name, inner);
    label(out, (x + 14, y + 41), "m c", rest, inner);
    // The line is what a person looks for, then the ranks; the others give way.
    let mut room = (inner as usize / 6).saturating_sub(columns(&brief(s, line)));
    let mut parts = vec![brief(s, line)];
    for words in [fit(&format!("stream {}", s.stream), 22).0, among(s)] {
        let (shown, _) = fit(&words, room.saturating_sub(3));
        if columns(&shown) >= columns(&words).min(9) {
            room -= columns(&shown) + 3;
            parts.insert(0, shown);
        }
    }
    titled(out, (x + 14, y + 62), "c", &parts.join(" · "), None);
    out.push_str("</g>");
}

/// The call's name with what is in brackets, and the rest of its words.
fn split(s: &Step) -> (&str, &str) {
    let what = s.what.trim();
    match what.strip_prefix(s.op.as_str()) {
        Some(rest) if !s.op.is_empty() => {
            let end = rest.find(' ').unwrap_or(rest.len());
            (&what[..s.op.len() + end], rest[end..].trim())
        }
        _ => (s.op.as_str(), what),
    }
}

fn mismatch(m: &Mismatch, title: &str, line: Lines<'_>) -> String {
    const LABEL_W: i32 = 92;
    const COLUMN_W: i32 = 364;
    const ROW_H: i32 = 34;
    let columns = [PAD + LABEL_W, PAD + LABEL_W + COLUMN_W + 36];
    let agreed = match m.position {
        0 => "the first call already differs".to_string(),
        1 => "position 0 agrees".to_string(),
        n => format!("positions 0 to {} agree", n - 1),
    };
    let mut out = String::new();
    let top = head(&mut out, title, &format!("{}, position {}; {agreed}", m.group, m.position)) + 8;
    let rows = facts(m, line);
    let body = top + 44;
    let tall: i32 = rows.iter().map(|r| ROW_H + (r.lines() as i32 - 1) * 19).sum();
    for ((rank, call), x) in m.sides.iter().zip(columns) {
        let (class, height) = (if call.is_some() { "card" } else { "want" }, tall + 52);
        let _ = write!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{top}\" width=\"{COLUMN_W}\" height=\"{height}\" rx=\"8\"/>"
        );
        label(&mut out, (x + 18, top + 29), "r", &format!("rank {rank}"), COLUMN_W - 36);
    }
    let mut y = body;
    let whole = m.sides.iter().all(|s| s.1.is_some());
    for row in &rows {
        let height = ROW_H + (row.lines() as i32 - 1) * 19;
        let (class, name) = if row.odd { ("odd", "x b") } else { ("", "s") };
        if row.odd && whole {
            let wide = columns[1] + COLUMN_W - PAD;
            let _ = write!(
                out,
                "<rect class=\"{class}\" x=\"{PAD}\" y=\"{y}\" width=\"{wide}\" height=\"{height}\" rx=\"6\"/>"
            );
            let at = columns[1] - 18;
            let _ = write!(
                out,
                "<text class=\"h x\" x=\"{at}\" y=\"{}\" text-anchor=\"middle\">≠</text>",
                y + height / 2 + 6
            );
        }
        label(&mut out, (PAD + 12, y + 22), name, row.name, LABEL_W - 12);
        for (lines, x) in row.sides.iter().zip(columns) {
            for (i, (shown, whole)) in lines.iter().enumerate() {
                let class = if row.odd { "m x b" } else { "m" };
                let at = (x + 18, y + 22 + 19 * i as i32);
                titled(&mut out, at, class, shown, whole.as_deref());
            }
        }
        y += height;
    }
    for ((rank, _), x) in m.sides.iter().zip(columns).filter(|((_, call), _)| call.is_none()) {
        let (x, y) = (x + COLUMN_W / 2, body + tall / 2);
        let _ = write!(
            out,
            "<text class=\"h x\" x=\"{x}\" y=\"{}\" text-anchor=\"middle\">nothing here</text>\
             <text class=\"s\" x=\"{x}\" y=\"{}\" text-anchor=\"middle\">rank {rank} calls nothing at position {}</text>",
            y - 4,
            y + 20,
            m.position
        );
    }
    finish(title, body + tall + 8 + PAD, &out)
}

/// A row of a mismatch: its name and, per side, lines of what is shown with the whole where it was cut.
struct Fact {
    name: &'static str,
    odd: bool,
    sides: Vec<Vec<(String, Option<String>)>>,
}

impl Fact {
    fn lines(&self) -> usize {
        self.sides.iter().map(Vec::len).max().unwrap_or(1).max(1)
    }
}

fn facts(m: &Mismatch, line: Lines<'_>) -> Vec<Fact> {
    let sides = [m.sides[0].1.as_ref(), m.sides[1].1.as_ref()];
    type Get<'a> = Box<dyn Fn(&Step) -> String + 'a>;
    let all: Vec<(&'static str, &[&str], usize, Get<'_>)> = vec![
        ("op", &["op"], 1, Box::new(|s| s.op.clone())),
        ("dtype", &["dtype"], 1, Box::new(|s| s.dtype.clone())),
        ("shape", &["shape", "count"], 1, Box::new(|s| s.shape.clone())),
        ("ranks", &["ranks", "group", "members"], 2, Box::new(|s| list(&s.ranks))),
        ("stream", &["stream"], 1, Box::new(|s| s.stream.clone())),
        ("at", &[], 2, Box::new(|s| position(s, line))),
        ("call", &[], 4, Box::new(|s| s.what.clone())),
    ];
    let differ = |get: &Get<'_>| matches!(sides, [Some(a), Some(b)] if get(a) != get(b));
    // What has no row of its own, a root say, stands in the words of the call.
    let own = all.iter().position(|(_, fields, _, get)| fields.contains(&m.field.as_str()) && differ(get));
    let odd = own.unwrap_or(all.len() - 1);
    all.iter()
        .enumerate()
        .map(|(i, (name, _, most, get))| Fact {
            name,
            odd: i == odd && sides.iter().all(Option::is_some),
            sides: sides
                .iter()
                .map(|s| match s {
                    Some(s) if *name == "at" => place(s, line),
                    Some(s) => wrap(&get(s), 40, *most),
                    None => Vec::new(),
                })
                .collect(),
        })
        .collect()
}

/// Title and subtitle; gives the y below them.
fn head(out: &mut String, title: &str, under: &str) -> i32 {
    let mut y = PAD + 16;
    for (shown, whole) in wrap(title, 76, 2) {
        titled(out, (PAD, y), "h", &shown, whole.as_deref());
        y += 25;
    }
    label(out, (PAD, y), "s", under, WIDTH - 2 * PAD);
    y + 34
}

fn finish(title: &str, height: i32, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n<defs>{HEADS}</defs>\n\
         <rect x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"12\" fill=\"#fff\" stroke=\"#d9d5cb\"/>\n{}</svg>\n",
        escape(title),
        WIDTH - 1,
        height - 1,
        body.replace("<g>", "\n<g>")
            .replace("<path", "\n<path")
            .replace("<rect class=\"lane\"", "\n<rect class=\"lane\"")
            + "\n"
    )
}

/// A text of at most `width` pixels; what is longer is cut and stands whole in its tooltip.
fn label(out: &mut String, at: (i32, i32), class: &str, words: &str, width: i32) {
    let per = if class.contains('m') { MONO } else { 7 };
    let (shown, cut) = fit(words, (width / per).max(1) as usize);
    titled(out, at, class, &shown, cut.then_some(words));
}

fn titled(out: &mut String, (x, y): (i32, i32), class: &str, shown: &str, whole: Option<&str>) {
    let title = whole.map_or(String::new(), |w| format!("<title>{}</title>", escape(w)));
    let _ = write!(out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{title}{}</text>", escape(shown));
}

/// An arrow of straight pieces with round corners, from the first point to the last.
fn elbow(out: &mut String, points: &[(i32, i32)]) {
    const ROUND: i32 = 10;
    let mut d = String::new();
    for (i, &(x, y)) in points.iter().enumerate() {
        if i == 0 {
            let _ = write!(d, "M{x} {y}");
        } else if let Some(&next) = points.get(i + 1) {
            let toward = |(a, b): (i32, i32)| {
                let reach = |from: i32, to: i32| from + (to - from).clamp(-ROUND, ROUND);
                (reach(x, a), reach(y, b))
            };
            let (a, b) = (toward(points[i - 1]), toward(next));
            let _ = write!(d, "L{} {}Q{x} {y} {} {}", a.0, a.1, b.0, b.1);
        } else {
            let _ = write!(d, "L{x} {y}");
        }
    }
    let _ = write!(out, "<path class=\"wait\" d=\"{d}\" marker-end=\"url(#w)\"/>");
}

fn pill(out: &mut String, x: i32, y: i32, who: u32, whom: u32) {
    let words = format!("rank {who} waits for rank {whom}");
    let wide = words.chars().count() as i32 * 7 + 20;
    let _ = write!(
        out,
        "<rect class=\"pill\" x=\"{}\" y=\"{}\" width=\"{wide}\" height=\"24\" rx=\"12\"/>\
         <text class=\"x\" x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{words}</text>",
        x - wide / 2,
        y - 12,
        y + 5
    );
}

/// `ranks 0, 1`.
fn among(s: &Step) -> String {
    if let [one] = s.ranks[..] { format!("rank {one}") } else { format!("ranks {}", list(&s.ranks)) }
}

/// Ranks with stretches of three and more drawn together: `0–7, 9, 11`.
fn list(ranks: &[u32]) -> String {
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

/// Where a call stands: `op 12 · stage0.tir:40`.
fn position(s: &Step, line: Lines<'_>) -> String {
    match &s.source {
        Some((at, span)) => match line(at, *span) {
            Some(n) => format!("op {} · {at}:{n}", s.index),
            None => format!("op {} · {at}", s.index),
        },
        None => format!("op {}", s.index),
    }
}

/// The same on one line, or on two with the end of a long path: its name matters most.
fn place(s: &Step, line: Lines<'_>) -> Vec<(String, Option<String>)> {
    let whole = position(s, line);
    match whole.split_once(" · ") {
        Some((op, file)) if columns(&whole) > 40 => {
            let mut wide = 1;
            let kept = file.chars().rev().take_while(|c| {
                wide += columns_of(*c);
                wide <= 40
            });
            let kept = kept.count();
            let count = file.chars().count();
            let tail: String = file.chars().skip(count - kept).collect();
            let shown = if kept < count { format!("…{tail}") } else { tail };
            vec![(op.to_string(), None), (shown, (kept < count).then(|| file.to_string()))]
        }
        _ => vec![(whole, None)],
    }
}

/// `op 12, line 40`.
fn brief(s: &Step, line: Lines<'_>) -> String {
    match s.source.as_ref().and_then(|(at, span)| line(at, *span)) {
        Some(n) => format!("op {}, line {n}", s.index),
        None => format!("op {}", s.index),
    }
}

/// Lines of at most `width` characters, broken at spaces where there are any; the last one cut if need be.
fn wrap(words: &str, width: usize, most: usize) -> Vec<(String, Option<String>)> {
    let mut lines = Vec::new();
    let mut rest = words.trim();
    while !rest.is_empty() {
        if lines.len() + 1 == most || columns(rest) <= width {
            let (shown, cut) = fit(rest, width);
            lines.push((shown, cut.then(|| words.to_string())));
            break;
        }
        let mut end = 0;
        let mut wide = 0;
        for (i, c) in rest.char_indices() {
            wide += columns_of(c);
            if wide > width {
                break;
            }
            end = i + c.len_utf8();
        }
        let broken = rest[..end].rfind(' ').filter(|i| *i > 0).unwrap_or(end);
        let (line, left) = rest.split_at(broken);
        lines.push((line.to_string(), None));
        rest = left.trim_start();
    }
    lines
}

/// At most `width` columns of a text, and whether it was cut.
fn fit(words: &str, width: usize) -> (String, bool) {
    if columns(words) <= width {
        return (words.to_string(), false);
    }
    let mut wide = 1;
    let kept = words.chars().take_while(|c| {
        wide += columns_of(*c);
        wide <= width
    });
    (format!("{}…", kept.collect::<String>().trim_end()), true)
}

fn columns(s: &str) -> usize {
    s.chars().map(columns_of).sum()
}

/// Scripts of East Asia and pictures take two columns.
fn columns_of(c: char) -> usize {
    if c as u32 >= 0x1100 && !(0x2000..0x2600).contains(&(c as u32)) { 2 } else { 1 }
}

/// Escaped, without the two characters that XML forbids beside controls, and on one line.
fn escape(s: &str) -> String {
    let plain: String = s
        .chars()
        .map(|c| match c {
            '\n' | '\t' => ' ',
            '\u{fffe}' | '\u{ffff}' => '\u{fffd}',
            c => c,
        })
        .collect();
    markup::text(&plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(op: &str, ranks: &[u32], index: usize) -> Step {
        Step {
            what: format!("{op} over tp of bf16[2160, 5120]"),
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
        let link = |k: u32| Link {
            rank: k,
            holds: call("send", &pair((k + n - 1) % n, k), 4),
            wants: call("send", &pair(k, (k + 1) % n), 5),
        };
        Counterexample::Circle((0..n).map(link).collect())
    }

    fn differing(field: &str, other: Option<Step>) -> Counterexample {
        Counterexample::Mismatch(Mismatch {
            group: "tp of ranks 0, 1".into(),
            position: 4,
            field: field.into(),
            sides: [(0, Some(call("all_reduce(sum)", &[0, 1], 12))), (1, other)],
        })
    }

    fn samples() -> Vec<(&'static str, String)> {
        let two = Counterexample::Circle(vec![
            Link {
                rank: 0,
                holds: call("all_reduce(sum)", &[0, 1], 12),
                wants: call("all_gather", &[0, 1, 2, 3], 14),
            },
            Link {
                rank: 1,
                holds: call("all_gather", &[0, 1, 2, 3], 9),
                wants: call("all_reduce(sum)", &[0, 1], 13),
            },
        ]);
        let mut f32 = call("all_reduce(sum)", &[0, 1], 12);
        f32.dtype = "f32".into();
        f32.what = f32.what.replace("bf16", "f32");
        let mut long = call(
            &"a_very_long_name_of_an_op<&>".repeat(6),
            &(0..72).step_by(5).collect::<Vec<_>>(),
            123_456_789,
        );
        long.stream = "a stream with a name that goes on and on".into();
        long.source = Some(("/some/where/".repeat(12) + "rank-3.jsonl", Span::default()));
        let same = call("all_gather", &[0, 1], 3);
        let longs = Counterexample::Circle(vec![
            Link { rank: 1000, holds: long.clone(), wants: same.clone() },
            Link { rank: 70_000, holds: same, wants: long.clone() },
        ]);
        let line = |_: &str, s: Span| Some(s.start + 40);
        let draw = |c: &Counterexample, title: &str| counterexample_with_lines(c, title, &line);
        vec![
            ("circle-2", draw(&two, "T0311: ranks 0, 1 wait for each other in a circle")),
            ("circle-3", draw(&ring(3), "T0311: ranks 0, 1, 2 wait for each other in a circle")),
            (
                "circle-8",
                draw(&ring(8), "T0311: ranks 0, 1, 2, 3, 4, 5, 6, 7 wait for each other in a circle"),
            ),
            ("circle-20", counterexample(&ring(20), "T0311: 20 ranks wait for each other in a circle")),
            (
                "mismatch-dtype",
                draw(&differing("dtype", Some(f32)), "T0303: rank 1 departs from rank 0 in the dtype"),
            ),
            (
                "mismatch-missing",
                draw(
                    &differing("op", None),
                    "T0307: rank 1 lacks a collective at position 4 of the tp group of ranks 0, 1",
                ),
            ),
            (
                "mismatch-long",
                draw(&differing("root", Some(long)), &"A title <that> goes on & on ".repeat(12)),
            ),
            ("circle-long", draw(&longs, "T0311: ranks 1000, 70000 wait for each other in a circle")),
        ]
    }

    #[test]
    fn drawings_are_what_was_looked_at() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/counterexamples");
        for (name, svg) in samples() {
            let file = dir.join(format!("{name}.svg"));
            if std::env::var_os("BLESS").is_some() {
                std::fs::write(&file, &svg).unwrap();
            }
            assert_eq!(
                svg,
                std::fs::read_to_string(&file).unwrap(),
                "{name}: look at it, then keep it with BLESS=1"
            );
        }
    }

    #[test]
    fn nothing_escapes_and_every_tag_is_closed() {
        for (name, svg) in samples() {
            assert!(!svg.contains("<&>") && !svg.contains("<that>"), "{name}");
            let opened = svg.matches('<').count();
            let closed = svg.matches("</").count() * 2 + svg.matches("/>").count();
            assert_eq!(opened, closed, "{name}");
            assert!(svg.len() < 40_000, "{name}: {} bytes", svg.len());
        }
    }

    #[test]
    fn long_circles_leave_out_the_middle_and_say_how_much() {
        let svg = counterexample(&ring(20), "t");
        assert!(svg.contains("10 more ranks, each waiting for the one above: 5–14"), "{svg}");
        assert!(svg.contains("rank 15 waits for rank 14") && svg.contains("rank 0 waits for rank 19"));
        assert!(!svg.contains(">rank 7<"));
        assert_eq!(counterexample(&ring(12), "t").matches("class=\"lane\"").count(), 12);
    }

    #[test]
    fn ranks_and_lines_are_short() {
        assert_eq!(list(&[0, 1, 2, 3, 5, 6, 9]), "0–3, 5, 6, 9");
        let lines: Vec<String> = wrap("one two three", 8, 2).into_iter().map(|l| l.0).collect();
        assert_eq!(lines, ["one two", "three"]);
        assert_eq!(fit("abcdef", 4), ("abc…".to_string(), true));
        // What has no end is no reason to stop.
        assert_eq!(list(&[u32::MAX]), u32::MAX.to_string());
    }

    #[test]
    fn an_empty_circle_is_a_drawing_too() {
        assert!(counterexample(&Counterexample::Circle(Vec::new()), "").starts_with("<svg"));
    }
}
