//! One diagnostic, three renderings: text for a person, one JSON line for a program, a GitHub annotation.

use crate::{Counterexample, Diagnostic, Link, Mismatch, Severity, Span, Step};

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
fn locate(
    at: &str,
    span: Option<Span>,
    source: &dyn Fn(&str) -> Option<String>,
) -> Option<(usize, usize, String)> {
    let span = span?;
    let text = source(at)?;
    let start = span.start.min(text.len());
    let before = text.get(..start)?;
    let line = before.matches('\n').count();
    let column = before.len() - before.rfind('\n').map_or(0, |i| i + 1);
    Some((line + 1, column + 1, text.lines().nth(line).unwrap_or("").to_string()))
}

/// Longest line for a person, in characters; JSON has all of it.
const TEXT_WIDE: usize = 1000;
/// A person reads no more notes than this; JSON has them all.
const TEXT_NOTES: usize = 40;
/// A person sees no more of a line than this many characters around the place.
const TEXT_LINE: usize = 200;

/// The part of a long line around byte `start`, and how many bytes were cut off before it.
fn around(code: &str, start: usize) -> (&str, usize) {
    if code.len() <= TEXT_LINE {
        return (code, 0);
    }
    let mut from = start.saturating_sub(TEXT_LINE / 4).min(code.len());
    while !code.is_char_boundary(from) {
        from -= 1;
    }
    let rest = &code[from..];
    let end = rest.char_indices().nth(TEXT_LINE).map_or(rest.len(), |(i, _)| i);
    (&rest[..end], from)
}

fn text(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = format!("{}[{}]: {}\n", word(d.severity), d.code.id, d.message);
    for p in &d.places {
        match locate(&p.at, p.span, source) {
            Some((line, column, code)) => {
                let (shown, cut) = around(&code, column - 1);
                let (before, marked) = shown.split_at_checked(column - 1 - cut).unwrap_or((shown, ""));
                let length = p.span.map_or(1, |s| s.end.saturating_sub(s.start));
                let marked = marked.char_indices().take_while(|(i, _)| *i < length);
                let (indent, width) = (before.chars().count(), marked.count().max(1));
                let gutter = " ".repeat(line.to_string().len());
                out += &format!("{gutter}--> {}:{line}:{column}\n", p.at);
                out += &format!("{line} | {shown}\n");
                out += &format!("{gutter} | {}{} {}\n", " ".repeat(indent), "^".repeat(width), p.says);
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
    printable(&out)
}

/// A file may hold anything, and a terminal obeys some of it; a name may be longer than anyone reads.
fn printable(text: &str) -> String {
    let line = |l: &str| -> String {
        let shown: String = l.chars().take(TEXT_WIDE).collect();
        let cut = if shown.len() < l.len() { "…" } else { "" };
        shown.chars().map(|c| if c.is_control() && c != '\t' { '·' } else { c }).collect::<String>() + cut
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn json(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let places: Vec<String> = d
        .places
        .iter()
        .map(|p| {
            let position = locate(&p.at, p.span, source)
                .map_or(String::new(), |(line, column, _)| format!(",\"line\":{line},\"column\":{column}"));
            format!("{{\"at\":{},\"says\":{}{position}}}", quote(&p.at), quote(&p.says))
        })
        .collect();
    let notes: Vec<String> = d.notes.iter().map(|n| quote(n)).collect();
    format!(
        "{{\"code\":\"{}\",\"severity\":\"{}\",\"message\":{},\"places\":[{}],\"notes\":[{}],\"hint\":{},\"counterexample\":{}}}\n",
        d.code.id,
        word(d.severity),
        quote(&d.message),
        places.join(","),
        notes.join(","),
        d.hint.as_deref().map_or("null".to_string(), quote),
        d.counterexample.as_deref().map_or("null".to_string(), |c| counterexample(c, source)),
    )
}

fn counterexample(c: &Counterexample, source: &dyn Fn(&str) -> Option<String>) -> String {
    match c {
        Counterexample::Circle(links) => {
            let link = |l: &Link| {
                format!(
                    "{{\"rank\":{},\"holds\":{},\"wants\":{}}}",
                    l.rank,
                    step(&l.holds, source),
                    step(&l.wants, source)
                )
            };
            let links: Vec<String> = links.iter().map(link).collect();
            format!("{{\"kind\":\"circle\",\"links\":[{}]}}", links.join(","))
        }
        Counterexample::Mismatch(Mismatch { group, position, field, sides }) => {
            let sides = sides.each_ref().map(|(rank, call)| {
                let call = call.as_ref().map_or("null".to_string(), |s| step(s, source));
                format!("{{\"rank\":{rank},\"call\":{call}}}")
            });
            format!(
                "{{\"kind\":\"mismatch\",\"group\":{},\"position\":{position},\"field\":{},\"sides\":[{}]}}",
                quote(group),
                quote(field),
                sides.join(",")
            )
        }
    }
}

fn step(s: &Step, source: &dyn Fn(&str) -> Option<String>) -> String {
    let ranks: Vec<String> = s.ranks.iter().map(u32::to_string).collect();
    let null = || "null".to_string();
    let line = s.source.as_ref().and_then(|(at, span)| locate(at, Some(*span), source));
    format!(
        "{{\"what\":{},\"op\":{},\"dtype\":{},\"shape\":{},\"ranks\":[{}],\"stream\":{},\"index\":{},\"file\":{},\"line\":{}}}",
        quote(&s.what),
        quote(&s.op),
        quote(&s.dtype),
        quote(&s.shape),
        ranks.join(","),
        quote(&s.stream),
        s.index,
        s.source.as_ref().map_or_else(null, |(at, _)| quote(at)),
        line.map_or_else(null, |(line, _, _)| line.to_string()),
    )
}

fn github(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let escape = |s: &str| s.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let place = d.places.first();
    let position = place.map_or(String::new(), |p| match locate(&p.at, p.span, source) {
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
    fn text_obeys_no_file() {
        let mut d = sample();
        d.message = format!("\u{1b}[2J{}", "x".repeat(5000));
        let out = render(&d, Format::Text, &|_| Some("first\ns\u{7}c\n".into()));
        assert!(!out.contains('\u{1b}') && !out.contains('\u{7}') && out.contains("·[2Jx"), "{out}");
        assert!(out.lines().all(|l| l.chars().count() <= TEXT_WIDE + 1));
    }

    #[test]
    fn json_is_one_line_and_escaped() {
        let out = render(&sample(), Format::Json, &|_| None);
        assert_eq!(out.matches('\n').count(), 1);
        assert!(out.contains(r#""says":"says \"no\"""#) && out.ends_with(",\"counterexample\":null}\n"));
    }

    fn call(op: &str, span: Option<Span>) -> Step {
        Step {
            what: format!("{op} over \"tp\""),
            op: op.into(),
            dtype: "bf16".into(),
            shape: "[4, 8]".into(),
            ranks: vec![0, 1],
            stream: "comm".into(),
            index: 3,
            source: span.map(|s| ("a.tir".into(), s)),
        }
    }

    #[test]
    fn json_has_the_circle_with_lines_where_the_text_is_at_hand() {
        let holds = call("recv", Some(Span { start: 6, end: 9 }));
        let link = Link { rank: 7, holds, wants: call("send", None) };
        let d = sample().proof(Counterexample::Circle(vec![link]));
        let held = |line: &str| {
            format!(
                "\"counterexample\":{{\"kind\":\"circle\",\"links\":[{{\"rank\":7,\"holds\":{{\"what\":\"recv over \\\"tp\\\"\",\
                 \"op\":\"recv\",\"dtype\":\"bf16\",\"shape\":\"[4, 8]\",\"ranks\":[0,1],\"stream\":\"comm\",\"index\":3,\
                 \"file\":\"a.tir\",\"line\":{line}}},\"wants\":{{"
            )
        };
        let out = render(&d, Format::Json, &|_| Some("first\nsec\n".into()));
        assert!(out.contains(&held("2")), "{out}");
        assert!(out.ends_with("\"index\":3,\"file\":null,\"line\":null}}]}}\n"), "{out}");
        assert!(render(&d, Format::Json, &|_| None).contains(&held("null")));
        assert_eq!(out.matches('\n').count(), 1);
    }

    #[test]
    fn json_has_both_sides_of_a_mismatch() {
        let d = sample().proof(Counterexample::Mismatch(Mismatch {
            group: "tp of ranks 0, 1".into(),
            position: 4,
            field: "dtype".into(),
            sides: [(0, Some(call("send", None))), (1, None)],
        }));
        let out = render(&d, Format::Json, &|_| None);
        let head = "{\"kind\":\"mismatch\",\"group\":\"tp of ranks 0, 1\",\"position\":4,\"field\":\"dtype\",\"sides\":[{\"rank\":0,\"call\":{\"what\"";
        assert!(out.contains(head), "{out}");
        assert!(out.ends_with("{\"rank\":1,\"call\":null}]}}\n"), "{out}");
        // A person reads places; the facts are for programs.
        assert_eq!(render(&d, Format::Text, &|_| None), render(&sample(), Format::Text, &|_| None));
    }

    #[test]
    fn text_shows_the_part_of_a_long_line_that_matters() {
        let mut line = "é".repeat(5000);
        line += "here";
        let start = line.len() - 4;
        let d = Diagnostic::error(&C, "m").at_span("a", "this", Span { start, end: start + 4 });
        let out = render(&d, Format::Text, &|_| Some(line.clone()));
        assert!(out.len() < 1000 && out.contains("here\n") && out.contains("^^^^ this"), "{out}");
        assert!(out.contains(&format!("a:1:{}", start + 1)), "{out}");
    }
}
