//! Text, boxes and arrows of the standalone SVG drawings.
//!
//! Positions are pixels of a fixed width, so that labels and arrows align. A drawing has its own light
//! background, so it is legible on light and dark pages.

use std::fmt::Write;

use maud::html;

use crate::markup::replace_control_chars;

pub(crate) const WIDTH: i32 = 920;
pub(crate) const PADDING: i32 = 32;
/// Maximum width of a character of the fixed-width fonts, in pixels.
pub(crate) const MONO_CHAR_WIDTH: i32 = 8;

pub(crate) const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','Liberation Sans',Arial,sans-serif;fill:#1c1e22;font-size:13px}\
.h{font-size:18px;font-weight:600}.r{font-size:15px;font-weight:600}.s{fill:#646a73}.c{font-size:12px;fill:#646a73}\
.m{font-family:ui-monospace,'SF Mono',SFMono-Regular,Menlo,Consolas,'Liberation Mono','DejaVu Sans Mono',monospace}\
.b{font-weight:600}.x{fill:#b3392f}.card{fill:#fff;stroke:#d9d5cb}.lane{fill:#f3f1eb}\
.held{fill:#fff;stroke:#b3392f;stroke-width:1.6}.want{fill:#faf9f6;stroke:#8b9098;stroke-width:1.4;stroke-dasharray:5 4}\
.wait{fill:none;stroke:#b3392f;stroke-width:2}.then{fill:none;stroke:#8b9098;stroke-width:1.4}\
.pill{fill:#fff;stroke:#e7c4c0}.odd{fill:#fbeae8}.hair{stroke:#e5e2da}";

pub(crate) const HEADS: &str = "\
<marker id=\"w\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L10 5L0 10z\" fill=\"#b3392f\"/></marker>\
<marker id=\"t\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\"><path d=\"M0 0L10 5L0 10z\" fill=\"#8b9098\"/></marker>";

/// Draws the title and subtitle; returns the y position below them.
pub(crate) fn draw_heading(out: &mut String, title: &str, under: &str) -> i32 {
    let mut y = PADDING + 16;
    for (shown, full_text) in wrap_text(title, 76, 2) {
        draw_text(out, (PADDING, y), "h", &shown, full_text.as_deref());
        y += 25;
    }
    draw_label(out, (PADDING, y), "s", under, WIDTH - 2 * PADDING);
    y + 34
}

pub(crate) fn wrap_svg(title: &str, height: i32, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
         <title>{}</title>\n<style>{STYLE}</style>\n<defs>{HEADS}</defs>\n\
         <rect x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"12\" fill=\"#fff\" stroke=\"#d9d5cb\"/>\n{}</svg>\n",
        escape_xml(title),
        WIDTH - 1,
        height - 1,
        body.replace("<g>", "\n<g>")
            .replace("<path", "\n<path")
            .replace("<rect class=\"lane\"", "\n<rect class=\"lane\"")
            + "\n"
    )
}

/// Draws a text of at most `width` pixels; a longer text is shortened, and its tooltip has the full
/// text.
pub(crate) fn draw_label(out: &mut String, at: (i32, i32), class: &str, words: &str, width: i32) {
    let per = if class.contains('m') { MONO_CHAR_WIDTH } else { 7 };
    let (shown, cut) = fit_width(words, (width / per).max(1) as usize);
    draw_text(out, at, class, &shown, cut.then_some(words));
}

pub(crate) fn draw_text(
    out: &mut String,
    (x, y): (i32, i32),
    class: &str,
    shown: &str,
    full_text: Option<&str>,
) {
    let title = full_text.map_or(String::new(), |w| format!("<title>{}</title>", escape_xml(w)));
    let _ = write!(out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{title}{}</text>", escape_xml(shown));
}

pub(crate) fn draw_centred(out: &mut String, (x, y): (i32, i32), class: &str, words: &str) {
    let words = escape_xml(words);
    let _ = write!(out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"middle\">{words}</text>");
}

pub(crate) fn draw_rect(
    out: &mut String,
    class: &str,
    (x, y): (i32, i32),
    (width, height): (i32, i32),
    radius: i32,
) {
    let _ = write!(
        out,
        "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"{radius}\"/>"
    );
}

/// Draws an arrow of straight segments with rounded corners, from the first point to the last.
pub(crate) fn draw_elbow_arrow(out: &mut String, points: &[(i32, i32)]) {
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

/// Breaks a text into lines of at most `width` columns, at spaces if possible; the last line is
/// shortened if necessary.
pub(crate) fn wrap_text(words: &str, width: usize, max_lines: usize) -> Vec<(String, Option<String>)> {
    let mut lines = Vec::new();
    let mut rest = words.trim();
    while !rest.is_empty() {
        if lines.len() + 1 == max_lines || text_width(rest) <= width {
            let (shown, cut) = fit_width(rest, width);
            lines.push((shown, cut.then(|| words.to_string())));
            break;
        }
        let mut end = 0;
        let mut wide = 0;
        for (i, c) in rest.char_indices() {
            wide += char_width(c);
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

/// Returns at most `width` columns of a text, and whether it was shortened.
pub(crate) fn fit_width(words: &str, width: usize) -> (String, bool) {
    if text_width(words) <= width {
        return (words.to_string(), false);
    }
    let mut wide = 1;
    let kept = words.chars().take_while(|c| {
        wide += char_width(*c);
        wide <= width
    });
    (format!("{}…", kept.collect::<String>().trim_end()), true)
}

pub(crate) fn text_width(s: &str) -> usize {
    s.chars().map(char_width).sum()
}

/// East Asian scripts and emoji take two columns.
pub(crate) fn char_width(c: char) -> usize {
    if c as u32 >= 0x1100 && !(0x2000..0x2600).contains(&(c as u32)) { 2 } else { 1 }
}

/// Escapes a text for XML on a single line, without the characters that XML forbids.
pub(crate) fn escape_xml(s: &str) -> String {
    let line = s.replace(['\n', '\t'], " ").replace(['\u{fffe}', '\u{ffff}'], "\u{fffd}");
    replace_control_chars(html! { (line) }.into_string())
}
