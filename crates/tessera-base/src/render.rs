//! Rendering of diagnostics as text, as one JSON line, or as a GitHub annotation.

use crate::{Counterexample, Diagnostic, Mismatch, RankCollective, Severity, Span, WaitEdge};

/// How [`render`] writes a diagnostic: for a person, for a program, or for GitHub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiagnosticFormat {
    /// Plain text for a terminal, readable without colour.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
    /// Workflow commands, which GitHub Actions shows as annotations.
    Github,
}

/// Renders one diagnostic, with a trailing newline. `source` returns the text of a file that a
/// label names, if it is available.
#[must_use]
pub fn render(d: &Diagnostic, format: DiagnosticFormat, source: &dyn Fn(&str) -> Option<String>) -> String {
    match format {
        DiagnosticFormat::Text => render_text(d, source),
        DiagnosticFormat::Json => render_json(d, source),
        DiagnosticFormat::Github => render_github(d, source),
    }
}

/// Renders several diagnostics in order.
#[must_use]
pub fn render_all(
    ds: &[Diagnostic],
    format: DiagnosticFormat,
    source: &dyn Fn(&str) -> Option<String>,
) -> String {
    ds.iter().map(|d| render(d, format, source)).collect()
}

fn severity_name(s: Severity) -> &'static str {
    match s {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// Returns the 1-based line and column of a span, and the text of its line.
fn locate_span(
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

/// Maximum line length in text output, in characters. JSON output is complete.
const MAX_LINE_CHARS: usize = 1000;
/// Maximum number of notes in text output. JSON output is complete.
const MAX_NOTES: usize = 40;
/// Maximum number of characters shown of a source line.
const EXCERPT_CHARS: usize = 200;

/// Returns the part of a long line around byte `start`, and how many bytes were dropped in front of
/// that part.
fn excerpt_around(code: &str, start: usize) -> (&str, usize) {
    if code.len() <= EXCERPT_CHARS {
        return (code, 0);
    }
    let mut from = start.saturating_sub(EXCERPT_CHARS / 4).min(code.len());
    while !code.is_char_boundary(from) {
        from -= 1;
    }
    let rest = &code[from..];
    let end = rest.char_indices().nth(EXCERPT_CHARS).map_or(rest.len(), |(i, _)| i);
    (&rest[..end], from)
}

fn render_text(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = format!("{}[{}]: {}\n", severity_name(d.severity), d.code.id, d.message);
    for p in &d.labels {
        match locate_span(&p.location, p.span, source) {
            Some((line, column, code)) => {
                let (shown, cut) = excerpt_around(&code, column - 1);
                let (before, marked) = shown.split_at_checked(column - 1 - cut).unwrap_or((shown, ""));
                let length = p.span.map_or(1, |s| s.end.saturating_sub(s.start));
                let marked = marked.char_indices().take_while(|(i, _)| *i < length);
                let (indent, width) = (before.chars().count(), marked.count().max(1));
                let gutter = " ".repeat(line.to_string().len());
                out += &format!("{gutter}--> {}:{line}:{column}\n", p.location);
                out += &format!("{line} | {shown}\n");
                out += &format!("{gutter} | {}{} {}\n", " ".repeat(indent), "^".repeat(width), p.message);
            }
            None => out += &format!("  at {}: {}\n", p.location, p.message),
        }
    }
    for n in d.notes.iter().take(MAX_NOTES) {
        out += &format!("  note: {n}\n");
    }
    if d.notes.len() > MAX_NOTES {
        out += &format!("  and {} more (--format json has all)\n", d.notes.len() - MAX_NOTES);
    }
    if let Some(h) = &d.hint {
        out += &format!("\nhint: {h}\n");
    }
    sanitize_text(&out)
}

/// Replaces control characters, which a terminal would interpret, and truncates overlong lines:
/// both can come from an untrusted file.
fn sanitize_text(text: &str) -> String {
    let line = |l: &str| -> String {
        let shown: String = l.chars().take(MAX_LINE_CHARS).collect();
        let cut = if shown.len() < l.len() { "…" } else { "" };
        shown.chars().map(|c| if c.is_control() && c != '\t' { '·' } else { c }).collect::<String>() + cut
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

fn render_json(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let labels: Vec<String> = d
        .labels
        .iter()
        .map(|p| {
            let position = locate_span(&p.location, p.span, source)
                .map_or(String::new(), |(line, column, _)| format!(",\"line\":{line},\"column\":{column}"));
            format!(
                "{{\"location\":{},\"message\":{}{position}}}",
                quote_json(&p.location),
                quote_json(&p.message)
            )
        })
        .collect();
    let notes: Vec<String> = d.notes.iter().map(|n| quote_json(n)).collect();
    format!(
        "{{\"code\":\"{}\",\"severity\":\"{}\",\"message\":{},\"labels\":[{}],\"notes\":[{}],\"hint\":{},\"counterexample\":{}}}\n",
        d.code.id,
        severity_name(d.severity),
        quote_json(&d.message),
        labels.join(","),
        notes.join(","),
        d.hint.as_deref().map_or("null".to_string(), quote_json),
        d.counterexample.as_deref().map_or("null".to_string(), |c| counterexample_json(c, source)),
    )
}

fn counterexample_json(c: &Counterexample, source: &dyn Fn(&str) -> Option<String>) -> String {
    match c {
        Counterexample::WaitCycle(edges) => {
            let edge_json = |e: &WaitEdge| {
                format!(
                    "{{\"rank\":{},\"blocked_in\":{},\"not_reached\":{}}}",
                    e.rank,
                    collective_json(&e.blocked_in, source),
                    collective_json(&e.not_reached, source)
                )
            };
            let edges: Vec<String> = edges.iter().map(edge_json).collect();
            format!("{{\"kind\":\"wait_cycle\",\"edges\":[{}]}}", edges.join(","))
        }
        Counterexample::Mismatch(Mismatch { group, position, field, sides }) => {
            let sides = sides.each_ref().map(|(rank, collective)| {
                let collective =
                    collective.as_ref().map_or("null".to_string(), |c| collective_json(c, source));
                format!("{{\"rank\":{rank},\"collective\":{collective}}}")
            });
            format!(
                "{{\"kind\":\"mismatch\",\"group\":{},\"position\":{position},\"field\":{},\"sides\":[{}]}}",
                quote_json(group),
                quote_json(field),
                sides.join(",")
            )
        }
    }
}

fn collective_json(s: &RankCollective, source: &dyn Fn(&str) -> Option<String>) -> String {
    let ranks: Vec<String> = s.ranks.iter().map(u32::to_string).collect();
    let null = || "null".to_string();
    let line = s.source.as_ref().and_then(|(at, span)| locate_span(at, Some(*span), source));
    format!(
        "{{\"description\":{},\"op\":{},\"dtype\":{},\"shape\":{},\"ranks\":[{}],\"stream\":{},\"index\":{},\"file\":{},\"line\":{}}}",
        quote_json(&s.description),
        quote_json(&s.op),
        quote_json(&s.dtype),
        quote_json(&s.shape),
        ranks.join(","),
        quote_json(&s.stream),
        s.index,
        s.source.as_ref().map_or_else(null, |(at, _)| quote_json(at)),
        line.map_or_else(null, |(line, _, _)| line.to_string()),
    )
}

fn render_github(d: &Diagnostic, source: &dyn Fn(&str) -> Option<String>) -> String {
    let escape = |s: &str| s.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let place = d.labels.first();
    let position = place.map_or(String::new(), |p| match locate_span(&p.location, p.span, source) {
        Some((line, column, _)) => format!("file={},line={line},col={column},", p.location),
        None => String::new(),
    });
    let label_text: String = d.labels.iter().map(|p| format!("; {}: {}", p.location, p.message)).collect();
    format!(
        "::{} {position}title={}::{}\n",
        severity_name(d.severity),
        d.code.id,
        escape(&format!("{}{label_text}", d.message))
    )
}

/// Returns `s` as a JSON string with its quotes; characters beyond ASCII stay as they are.
fn quote_json(s: &str) -> String {
    serde_json::Value::from(s).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Code, Span};

    static C: Code = Code { id: "T0999", title: "t", page: "p" };

    fn sample() -> Diagnostic {
        Diagnostic::error(&C, "all_reduce of a replicated value")
            .with_span_label("a.tir", "this one", Span { start: 6, end: 9 })
            .with_label("rank 1", "says \"no\"")
            .with_note("n")
            .with_hint("h")
    }

    #[test]
    fn text_shows_the_source_line() {
        let out = render(&sample(), DiagnosticFormat::Text, &|_| Some("first\nsec\n".into()));
        assert_eq!(
            out,
            "error[T0999]: all_reduce of a replicated value\n --> a.tir:2:1\n2 | sec\n  | ^^^ this one\n  at rank 1: says \"no\"\n  note: n\n\nhint: h\n"
        );
    }

    #[test]
    fn text_truncates_a_long_list_and_json_does_not() {
        let mut d = sample();
        d.notes = (0..43).map(|i| format!("#{i}#")).collect();
        let out = render(&d, DiagnosticFormat::Text, &|_| None);
        assert!(out.contains("#39#") && !out.contains("#40#") && out.contains("and 3 more"));
        assert!(render(&d, DiagnosticFormat::Json, &|_| None).contains("#42#"));
    }

    #[test]
    fn text_has_no_control_characters() {
        let mut d = sample();
        d.message = format!("\u{1b}[2J{}", "x".repeat(5000));
        let out = render(&d, DiagnosticFormat::Text, &|_| Some("first\ns\u{7}c\n".into()));
        assert!(!out.contains('\u{1b}') && !out.contains('\u{7}') && out.contains("·[2Jx"), "{out}");
        assert!(out.lines().all(|l| l.chars().count() <= MAX_LINE_CHARS + 1));
    }

    #[test]
    fn json_is_one_line_and_escaped() {
        let out = render(&sample(), DiagnosticFormat::Json, &|_| None);
        assert_eq!(out.matches('\n').count(), 1);
        assert!(out.contains(r#""message":"says \"no\"""#) && out.ends_with(",\"counterexample\":null}\n"));
    }

    fn collective(op: &str, span: Option<Span>) -> RankCollective {
        RankCollective {
            description: format!("{op} over \"tp\""),
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
    fn json_has_the_wait_cycle_with_line_numbers() {
        let blocked_in = collective("recv", Some(Span { start: 6, end: 9 }));
        let edge = WaitEdge { rank: 7, blocked_in, not_reached: collective("send", None) };
        let d = sample().with_counterexample(Counterexample::WaitCycle(vec![edge]));
        let edges_json = |line: &str| {
            format!(
                "\"counterexample\":{{\"kind\":\"wait_cycle\",\"edges\":[{{\"rank\":7,\"blocked_in\":{{\"description\":\"recv over \\\"tp\\\"\",\
                 \"op\":\"recv\",\"dtype\":\"bf16\",\"shape\":\"[4, 8]\",\"ranks\":[0,1],\"stream\":\"comm\",\"index\":3,\
                 \"file\":\"a.tir\",\"line\":{line}}},\"not_reached\":{{"
            )
        };
        let out = render(&d, DiagnosticFormat::Json, &|_| Some("first\nsec\n".into()));
        assert!(out.contains(&edges_json("2")), "{out}");
        assert!(out.ends_with("\"index\":3,\"file\":null,\"line\":null}}]}}\n"), "{out}");
        assert!(render(&d, DiagnosticFormat::Json, &|_| None).contains(&edges_json("null")));
        assert_eq!(out.matches('\n').count(), 1);
    }

    #[test]
    fn json_has_both_sides_of_a_mismatch() {
        let d = sample().with_counterexample(Counterexample::Mismatch(Mismatch {
            group: "tp of ranks 0, 1".into(),
            position: 4,
            field: "dtype".into(),
            sides: [(0, Some(collective("send", None))), (1, None)],
        }));
        let out = render(&d, DiagnosticFormat::Json, &|_| None);
        let head = "{\"kind\":\"mismatch\",\"group\":\"tp of ranks 0, 1\",\"position\":4,\"field\":\"dtype\",\"sides\":[{\"rank\":0,\"collective\":{\"description\"";
        assert!(out.contains(head), "{out}");
        assert!(out.ends_with("{\"rank\":1,\"collective\":null}]}}\n"), "{out}");
        // Text output shows labels; the counterexample is only in JSON.
        assert_eq!(
            render(&d, DiagnosticFormat::Text, &|_| None),
            render(&sample(), DiagnosticFormat::Text, &|_| None)
        );
    }

    #[test]
    fn text_shows_an_excerpt_of_a_long_line() {
        let mut line = "é".repeat(5000);
        line += "here";
        let start = line.len() - 4;
        let d = Diagnostic::error(&C, "m").with_span_label("a", "this", Span { start, end: start + 4 });
        let out = render(&d, DiagnosticFormat::Text, &|_| Some(line.clone()));
        assert!(out.len() < 1000 && out.contains("here\n") && out.contains("^^^^ this"), "{out}");
        assert!(out.contains(&format!("a:1:{}", start + 1)), "{out}");
    }
}
