//! One diagnostic, three renderings: text for a person, one JSON line for a program, a GitHub annotation.

use crate::{Diagnostic, Place, Severity};

/// How to write diagnostics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// For a person; reads well without colour.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
    /// GitHub workflow commands.
    Github,
}

/// Renders one diagnostic, with a trailing newline. `source` gives the text of a place's file where it is at hand.
#[must_use]
pub fn render(d: &Diagnostic, format: Format, source: &dyn Fn(&str) -> Option<String>) -> String {
    match format {
        Format::Text => text(d, source),
        Format::Json => json(d, source),
        Format::Github => github(d, source),
    }
}

/// Renders many, in order.
#[must_use]
pub fn render_all(ds: &[Diagnostic], format: Format, source: &dyn Fn(&str) -> Option<String>) -> String {
    ds.iter().map(|d| render(d, format, source)).collect()
}

fn word(s: Severity) -> &'static str {
    match s {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// 1-based line and column, and the line itself.
fn locate(place: &Place, source: &dyn Fn(&str) -> Option<String>) -> Option<(usize, usize, String)> {
    let span = place.span?;
    let text = source(&place.at)?;
    let start = span.start.min(text.len());
    let before = text.get(..start)?;
    let line = before.matches('\n').count();
    let column = before.len() - before.rfind('\n').map_or(0, |i| i + 1);
    Some((line + 1, column + 1, text.lines().nth(line).unwrap_or("").to_string()))
}

/// A person reads no more notes than this; JSON has them all.
const TEXT_NOTES: usize = 40;

fn text(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = format!("{}[{}]: {}\n", word(d.severity), d.code.id, d.message);
    for p in &d.places {
        match locate(p, source) {
            Some((line, column, code)) => {
                let width = p.span.map_or(1, |s| s.end.saturating_sub(s.start));
                let width = width.clamp(1, code.len().saturating_sub(column - 1).max(1));
                let gutter = " ".repeat(line.to_string().len());
                out += &format!("{gutter}--> {}:{line}:{column}\n", p.at);
                out += &format!("{line} | {code}\n");
                out += &format!("{gutter} | {}{} {}\n", " ".repeat(column - 1), "^".repeat(width), p.says);
            }
            None => out += &format!("  at {}: {}\n", p.at, p.says),
        }
    }
    for n in d.notes.iter().take(TEXT_NOTES) {
        out += &format!("  note: {n}\n");
    }
    if d.notes.len() > TEXT_NOTES {
        out += &format!("  and {} more (--format json has all)\n", d.notes.len() - TEXT_NOTES);
    }
    if let Some(h) = &d.hint {
        out += &format!("\nhint: {h}\n");
    }
    out
}

fn json(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let places: Vec<String> = d
        .places
        .iter()
        .map(|p| {
            let position = locate(p, source)
                .map_or(String::new(), |(line, column, _)| format!(",\"line\":{line},\"column\":{column}"));
            format!("{{\"at\":{},\"says\":{}{position}}}", quote(&p.at), quote(&p.says))
        })
        .collect();
    let notes: Vec<String> = d.notes.iter().map(|n| quote(n)).collect();
    format!(
        "{{\"code\":\"{}\",\"severity\":\"{}\",\"message\":{},\"places\":[{}],\"notes\":[{}],\"hint\":{}}}\n",
        d.code.id,
        word(d.severity),
        quote(&d.message),
        places.join(","),
        notes.join(","),
        d.hint.as_deref().map_or("null".to_string(), quote),
    )
}

fn github(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let escape = |s: &str| s.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let place = d.places.first();
    let position = place.map_or(String::new(), |p| match locate(p, source) {
        Some((line, column, _)) => format!("file={},line={line},col={column},", p.at),
        None => String::new(),
    });
    let says: String = d.places.iter().map(|p| format!("; {}: {}", p.at, p.says)).collect();
    format!(
        "::{} {position}title={}::{}\n",
        word(d.severity),
        d.code.id,
        escape(&format!("{}{says}", d.message))
    )
}

/// A JSON string literal.
fn quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Code, Span};

    static C: Code = Code { id: "T0999", title: "t", page: "p" };

    fn sample() -> Diagnostic {
        Diagnostic::error(&C, "all_reduce of a replicated value")
            .at_span("a.tir", "this one", Span { start: 6, end: 9 })
            .at("rank 1", "says \"no\"")
            .note("n")
            .hint("h")
    }

    #[test]
    fn text_points_at_the_line() {
        let out = render(&sample(), Format::Text, &|_| Some("first\nsec\n".into()));
        assert_eq!(
            out,
            "error[T0999]: all_reduce of a replicated value\n --> a.tir:2:1\n2 | sec\n  | ^^^ this one\n  at rank 1: says \"no\"\n  note: n\n\nhint: h\n"
        );
    }

    #[test]
    fn text_cuts_a_long_list_and_json_does_not() {
        let mut d = sample();
        d.notes = (0..43).map(|i| format!("#{i}#")).collect();
        let out = render(&d, Format::Text, &|_| None);
        assert!(out.contains("#39#") && !out.contains("#40#") && out.contains("and 3 more"));
        assert!(render(&d, Format::Json, &|_| None).contains("#42#"));
    }

    #[test]
    fn json_is_one_line_and_escaped() {
        let out = render(&sample(), Format::Json, &|_| None);
        assert_eq!(out.matches('\n').count(), 1);
        assert!(out.contains(r#""says":"says \"no\"""#));
    }
}
