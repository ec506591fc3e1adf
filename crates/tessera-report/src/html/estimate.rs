//! The page of a plan that was estimated and not run: what was chosen, what each rank holds and does when, which gates
//! pass, how sure that is, and why everything else was refused.

use std::fmt::Write;

use tessera_base::{Bytes, Nanoseconds};

use super::{CSS, LOGO, MemoryRow};
use crate::markup::{count, plural, text};
use crate::svg::{self, Palette};
use crate::timeline::{Timeline, Window, phase_kind};

/// Most rows of a table of mappings.
pub const MAX_MAPPINGS: usize = 40;

/// What the page shows. Empty parts are left out.
#[derive(Debug, Clone, Default)]
pub struct EstimatePage {
    /// Version of the program.
    pub tessera: String,
    /// What is planned, such as `deepseek-v3 on 72 GPUs of gb200-nvl72`.
    pub title: String,
    /// How it stands.
    pub standing: Standing,
    /// One sentence that says what to do.
    pub says: String,
    /// What must not be overlooked, a sentence each.
    pub warnings: Vec<String>,
    /// The few numbers to see first.
    pub numbers: Vec<Number>,
    /// What was chosen: a key and its value.
    pub facts: Vec<(String, String)>,
    /// Where a step goes: a name and nanoseconds, in the order to draw.
    pub parts: Vec<(String, f64)>,
    /// What is behind the parts, in a sentence.
    pub parts_note: String,
    /// What ranks hold.
    pub memory: Vec<MemoryRow>,
    /// Gates.
    pub gates: Vec<PlanGate>,
    /// Timelines, each with a title and a sentence.
    pub timelines: Vec<Drawing>,
    /// Failure modes that threaten, and remedies with their numbers.
    pub remedies: Vec<Remedy>,
    /// What is worth knowing beyond the gates.
    pub advice: Vec<Advice>,
    /// Columns of the table of mappings.
    pub columns: Vec<String>,
    /// Mappings worth weighing, the chosen one first.
    pub mappings: Vec<Vec<String>>,
    /// Mappings that were looked at.
    pub considered: u64,
    /// Why mappings were refused: reason, how many, one of them in words.
    pub refused: Vec<(String, u64, String)>,
    /// Where figures come from, and what is an estimate.
    pub sources: Vec<String>,
    /// The mapping's TOML.
    pub mapping: String,
    /// The command that gives this page again.
    pub command: String,
}

/// How a plan stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Standing {
    /// It fits and its gates pass.
    #[default]
    Good,
    /// It fits; a gate warns or fails.
    Warns,
    /// Nothing fits.
    Refused,
}

/// A number to see first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Number {
    /// Such as `12.4`.
    pub value: String,
    /// Such as `ms`.
    pub unit: String,
    /// What it is.
    pub label: String,
}

/// A gate of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanGate {
    /// What is asked.
    pub title: String,
    /// The value, with its unit.
    pub value: String,
    /// The limit.
    pub limit: String,
    /// `pass`, `warn`, `fail` or `not applicable`.
    pub verdict: GateVerdict,
    /// The arithmetic and the offending term.
    pub says: String,
}

/// What a gate comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateVerdict {
    /// It holds.
    Pass,
    /// Close.
    Warn,
    /// It does not hold.
    Fail,
    /// The question does not arise.
    Void,
}

/// A timeline to draw.
#[derive(Debug, Clone, Default)]
pub struct Drawing {
    /// Its title.
    pub title: String,
    /// A sentence on how to read it.
    pub note: String,
    /// What ran when.
    pub timeline: Timeline,
}

/// A failure mode and what may be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The failure mode.
    pub mode: String,
    /// Why it is suspected.
    pub sign: String,
    /// Remedies: what, and what it would come to.
    pub actions: Vec<(String, String)>,
}

/// A table that is worth knowing, and what follows from it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Advice {
    /// What programs know it by, in small letters: it stays when the title is worded otherwise.
    pub id: &'static str,
    /// Its title.
    pub title: String,
    /// What follows from it, in a sentence or two.
    pub note: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Rows of as many cells.
    pub rows: Vec<Vec<String>>,
}

/// Letters of a cell from which a column holds words.
const WORDS: usize = 24;

impl Advice {
    /// Columns that hold numbers: all but the first and those with words in them.
    #[must_use]
    pub fn numbers(&self) -> Vec<usize> {
        numbers_of(&self.columns, &self.rows)
    }
}

fn numbers_of(columns: &[String], rows: &[Vec<String>]) -> Vec<usize> {
    let wordy = |c: &usize| rows.iter().any(|r| r.get(*c).is_some_and(|s| s.chars().count() >= WORDS));
    (1..columns.len()).filter(|c| !wordy(c)).collect()
}

/// The page.
#[must_use]
pub fn estimate(page: &EstimatePage) -> String {
    let (class, word) = match page.standing {
        Standing::Good => ("good", "Fits"),
        Standing::Warns => ("warn", "Fits, with warnings"),
        Standing::Refused => ("bad", "Refused"),
    };
    let mut out = String::with_capacity(64 << 10);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <title>{0} · Tessera</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n\
         <header>\n<p class=\"brow\">{LOGO}<span>Tessera plan, estimated</span></p>\n<h1>{0}</h1>\n\
         <p class=\"verdict {class}\"><span><b class=\"{class}\">{word}.</b> {1}</span></p>\n",
        text(&page.title),
        text(&page.says)
    );
    for warning in &page.warnings {
        let _ = writeln!(
            out,
            "<p class=\"verdict warn\"><span><b class=\"warn\">Warning:</b> {}</span></p>",
            text(warning)
        );
    }
    out.push_str("</header>\n");
    numbers(&mut out, &page.numbers);
    facts(&mut out, &page.facts);
    parts(&mut out, page);
    drawings(&mut out, &page.timelines);
    if !page.memory.is_empty() {
        memory(&mut out, &page.memory);
    }
    gates(&mut out, &page.gates);
    remedies(&mut out, &page.remedies);
    advice(&mut out, &page.advice);
    mappings(&mut out, page);
    refused(&mut out, page);
    sources(&mut out, page);
    let _ = write!(
        out,
        "<footer>Written by tessera {}. Every time on this page is an estimate.</footer>\n</main>\n</body>\n</html>\n",
        text(&page.tessera)
    );
    out
}

fn numbers(out: &mut String, numbers: &[Number]) {
    if numbers.is_empty() {
        return;
    }
    out.push_str("<div class=\"hero solo\"><dl class=\"numbers\">");
    for n in numbers {
        let unit =
            if n.unit.is_empty() { String::new() } else { format!("<small>{}</small>", text(&n.unit)) };
        let _ = write!(out, "<div><dt>{}</dt><dd>{}{unit}</dd></div>", text(&n.label), text(&n.value));
    }
    out.push_str("</dl></div>\n");
}

fn facts(out: &mut String, facts: &[(String, String)]) {
    if facts.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Mapping</h2>\n<dl class=\"facts\">\n");
    for (key, value) in facts {
        let _ = writeln!(out, "<div><dt>{}</dt><dd>{}</dd></div>", text(key), text(value));
    }
    out.push_str("</dl>\n</section>\n");
}

/// Where a step goes: one bar, then a line for each part.
fn parts(out: &mut String, page: &EstimatePage) {
    let parts: Vec<&(String, f64)> = page.parts.iter().filter(|(_, ns)| *ns > 0.0).collect();
    let whole: f64 = parts.iter().map(|(_, ns)| ns).sum();
    if parts.is_empty() || !whole.is_finite() {
        return;
    }
    let _ = write!(
        out,
        "<section>\n<h2>Where the time goes</h2>\n<p class=\"note\">{}</p>\n<svg height=\"26\" role=\"img\" aria-label=\"parts of a step\">",
        text(&page.parts_note)
    );
    let mut at = 0.0;
    for (i, (name, ns)) in parts.iter().enumerate() {
        let wide = ns / whole * 100.0;
        let _ = write!(
            out,
            "<rect class=\"p{}\" x=\"{at:.3}%\" width=\"{wide:.3}%\" height=\"26\"><title>{}: {}</title></rect>",
            i.min(8),
            text(name),
            time(*ns)
        );
        at += wide;
    }
    out.push_str("</svg>\n<div class=\"scroll\"><table>\n<tbody>\n");
    for (i, (name, ns)) in parts.iter().enumerate() {
        let share = ns / whole * 100.0;
        let shown = if share < 0.5 { "&lt; 1".to_string() } else { format!("{share:.0}") };
        let _ = writeln!(
            out,
            "<tr><td><i class=\"dot b{0}\"></i>{1}</td><td>{2}</td><td>{shown} %<span class=\"meter\"><i class=\"b{0}\" style=\"width:{share:.1}%\"></i></span></td></tr>",
            i.min(8),
            text(name),
            time(*ns)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn drawings(out: &mut String, drawings: &[Drawing]) {
    let drawings: Vec<&Drawing> = drawings.iter().filter(|d| !d.timeline.spans.is_empty()).collect();
    if drawings.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Timelines</h2>\n");
    for d in drawings {
        let t = &d.timeline;
        let start_ns = t.spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
        let end_ns = t.spans.iter().map(|s| s.end_ns).max().unwrap_or(0).max(start_ns + 1);
        let _ = write!(out, "<h3>{}</h3>\n<p class=\"note\">{}</p>\n", text(&d.title), text(&d.note));
        let palette = Palette::new(t);
        out.push_str(&palette.legend(|kind| t.spans.iter().any(|s| phase_kind(&s.name) == kind)));
        out.push_str(&svg::lanes(t, Window { start_ns, end_ns }, &palette));
        if t.ranks.len() > svg::MAX_RANKS {
            let more = t.ranks.len() - svg::MAX_RANKS;
            let _ = writeln!(out, "<p class=\"note\">{more} more ranks are in the trace.</p>");
        }
    }
    out.push_str("</section>\n");
}

/// What the fullest rank holds: a line for each use, a column for each tier, so that it is as wide as there are tiers.
fn memory(out: &mut String, rows: &[MemoryRow]) {
    let mut uses: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().flat_map(|r| &r.items) {
        if !uses.contains(&name.as_str()) {
            uses.push(name);
        }
    }
    let line = |head: &str, cell: &dyn Fn(&MemoryRow) -> String| -> String {
        let cells: String = rows.iter().map(|r| format!("<td>{}</td>", cell(r))).collect();
        format!("<tr><td>{}</td>{cells}</tr>\n", text(head))
    };
    let heads: String = rows.iter().map(|r| format!("<th>{}</th>", text(&r.role))).collect();
    let ranks = rows.first().map_or("", |r| r.ranks.as_str());
    let _ = write!(
        out,
        "<section>\n<h2>Memory</h2>\n<p class=\"note\">One rank, {}.</p>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th></th>{heads}</tr></thead>\n<tbody>\n",
        text(ranks)
    );
    let sum = |r: &MemoryRow| r.items.iter().fold(0u64, |a, (_, b)| a.saturating_add(*b));
    for name in uses {
        out.push_str(&line(name, &|r| {
            let mut bytes = r.items.iter().filter(|(n, _)| n == name).map(|(_, b)| *b).peekable();
            match bytes.peek() {
                Some(_) => Bytes(bytes.fold(0, u64::saturating_add)).to_string(),
                None => "–".to_string(),
            }
        }));
    }
    out.push_str(&line("sum", &|r| Bytes(sum(r)).to_string()));
    if rows.iter().any(|r| r.capacity.is_some_and(|c| c > 0)) {
        out.push_str(&line("of what is there", &|r| {
            r.capacity.filter(|c| *c > 0).map_or("–".to_string(), |c| {
                let share = sum(r) as f64 / c as f64 * 100.0;
                let class = if share > 100.0 { "b4" } else { "b1" };
                let wide = share.min(100.0);
                format!(
                    "{share:.0} % of {}<span class=\"meter\"><i class=\"{class}\" style=\"width:{wide:.1}%\"></i></span>",
                    Bytes(c)
                )
            })
        }));
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn gates(out: &mut String, gates: &[PlanGate]) {
    if gates.is_empty() {
        return;
    }
    let of = |v| gates.iter().filter(|g| g.verdict == v).count();
    let _ = write!(
        out,
        "<section>\n<h2>Gates</h2>\n<p class=\"note\">{} pass, {} warn, {} fail, {} do not apply. Limits are indicative and stand in one file that may be replaced.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>gate</th><th>value</th><th>limit</th><th></th></tr></thead>\n<tbody>\n",
        of(GateVerdict::Pass),
        of(GateVerdict::Warn),
        of(GateVerdict::Fail),
        of(GateVerdict::Void)
    );
    for g in gates {
        let (class, word) = match g.verdict {
            GateVerdict::Pass => ("good", "pass"),
            GateVerdict::Warn => ("warn", "warn"),
            GateVerdict::Fail => ("bad", "fail"),
            GateVerdict::Void => ("", "n/a"),
        };
        let _ = writeln!(
            out,
            "<tr><td class=\"words\">{}<small>{}</small></td><td>{}</td><td>{}</td><td class=\"{class}\">{word}</td></tr>",
            text(&g.title),
            text(&g.says),
            text(&g.value),
            text(&g.limit)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn remedies(out: &mut String, remedies: &[Remedy]) {
    if remedies.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>What threatens, and what helps</h2>\n");
    for r in remedies {
        let _ = write!(
            out,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n<div class=\"scroll\"><table>\n<tbody>\n",
            text(&r.mode),
            text(&r.sign)
        );
        for (what, then) in &r.actions {
            let _ = writeln!(out, "<tr><td>{}</td><td class=\"words\">{}</td></tr>", text(what), text(then));
        }
        out.push_str("</tbody>\n</table></div>\n");
    }
    out.push_str("</section>\n");
}

/// What follows is seen, the tables behind it open on demand.
fn advice(out: &mut String, advice: &[Advice]) {
    if advice.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Worth knowing</h2>\n");
    for a in advice {
        let numbers = a.numbers();
        let cell = |tag: &str, at: usize, words: &str| {
            let class = match (at > 0 && !numbers.contains(&at), tag) {
                (false, _) => "",
                (true, "th") => " class=\"l\"",
                (true, _) => " class=\"words\"",
            };
            format!("<{tag}{class}>{}</{tag}>", text(words))
        };
        let line = |tag: &str, cells: &[String]| -> String {
            cells.iter().enumerate().map(|(at, words)| cell(tag, at, words)).collect()
        };
        let _ = write!(
            out,
            "<h3>{}</h3>\n<p class=\"note\">{}</p>\n<details><summary>Table</summary><div class=\"scroll\"><table>\n<thead><tr>{}</tr></thead>\n<tbody>\n",
            text(&a.title),
            text(&a.note),
            line("th", &a.columns)
        );
        for row in &a.rows {
            let _ = writeln!(out, "<tr>{}</tr>", line("td", row));
        }
        out.push_str("</tbody>\n</table></div></details>\n");
    }
    out.push_str("</section>\n");
}

fn mappings(out: &mut String, page: &EstimatePage) {
    if page.mappings.is_empty() {
        return;
    }
    let numbers = numbers_of(&page.columns, &page.mappings);
    let cell = |tag: &str, at: usize, words: &str| {
        let class = match (numbers.contains(&at), tag) {
            (true, _) => "",
            (false, "th") => " class=\"l\"",
            (false, _) => " class=\"words\"",
        };
        format!("<{tag}{class}>{}</{tag}>", text(words))
    };
    let line = |tag: &str, cells: &[String]| -> String {
        cells.iter().enumerate().map(|(at, words)| cell(tag, at, words)).collect()
    };
    let heads = line("th", &page.columns);
    let _ = write!(
        out,
        "<section>\n<h2>Other mappings</h2>\n<p class=\"note\">The chosen one first, then those that are better in something.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
    );
    for row in page.mappings.iter().take(MAX_MAPPINGS) {
        let _ = writeln!(out, "<tr>{}</tr>", line("td", row));
    }
    out.push_str("</tbody>\n</table></div>\n");
    if page.mappings.len() > MAX_MAPPINGS {
        let more = plural((page.mappings.len() - MAX_MAPPINGS) as u64, "more");
        let _ = writeln!(out, "<p class=\"note\">{more} left out.</p>");
    }
    out.push_str("</section>\n");
}

fn refused(out: &mut String, page: &EstimatePage) {
    if page.refused.is_empty() {
        return;
    }
    let all: u64 = page.refused.iter().map(|(_, n, _)| n).sum();
    let _ = write!(
        out,
        "<section>\n<h2>Refused</h2>\n<p class=\"note\">{} of {} mappings, each counted under the first reason that it met.</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>reason</th><th>mappings</th><th class=\"l\">one of them</th></tr></thead>\n<tbody>\n",
        count(all),
        count(page.considered)
    );
    for (reason, n, example) in &page.refused {
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td class=\"words\">{}</td></tr>",
            text(reason),
            count(*n),
            text(example)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn sources(out: &mut String, page: &EstimatePage) {
    out.push_str("<section>\n<h2>How sure this is</h2>\n");
    for s in &page.sources {
        let _ = writeln!(out, "<p class=\"note\">{}</p>", text(s));
    }
    if !page.mapping.is_empty() {
        let _ = writeln!(
            out,
            "<details><summary>Mapping as a file</summary><pre>{}</pre></details>",
            text(&page.mapping)
        );
    }
    if !page.command.is_empty() {
        let _ = writeln!(out, "<h3>Again</h3>\n<pre class=\"run\">{}</pre>", text(&page.command));
    }
    out.push_str("</section>\n");
}

fn time(ns: f64) -> String {
    Nanoseconds(ns.max(0.0).round() as u64).to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::Span;

    fn page() -> EstimatePage {
        let span = |name: &str, stream: &str, start_ns, end_ns| Span {
            rank: 0,
            stream: stream.into(),
            name: name.into(),
            chunk: 0,
            start_ns,
            end_ns,
            collectives: 0,
            waits: None,
        };
        let mut timeline = Timeline {
            spans: vec![span("attention", "compute", 0, 30), span("all_to_all", "a2a", 10, 50)],
            ..Timeline::default()
        };
        timeline.sort();
        EstimatePage {
            title: "a <model> on 72".into(),
            standing: Standing::Warns,
            says: "one gate warns".into(),
            parts: vec![("products".into(), 3e6), ("waiting".into(), 1e6), ("none".into(), 0.0)],
            gates: vec![PlanGate {
                title: "overlap".into(),
                value: "0.50".into(),
                limit: "≥ 0.60".into(),
                verdict: GateVerdict::Fail,
                says: "all-gather is exposed".into(),
            }],
            timelines: vec![Drawing { title: "a layer".into(), note: "by stream".into(), timeline }],
            considered: 1_000,
            refused: vec![("memory".into(), 900, "190 of 186 GB".into())],
            ..EstimatePage::default()
        }
    }

    #[test]
    fn a_page_says_what_was_chosen_and_what_was_not() {
        let html = estimate(&page());
        for part in [
            "a &lt;model&gt; on 72",
            "Fits, with warnings.",
            "<rect class=\"p0\" x=\"0.000%\" width=\"75.000%\"",
            "0 pass, 0 warn, 1 fail, 0 do not apply",
            "900 of 1\u{202f}000 mappings",
            "190 of 186 GB",
            "all_to_all, chunk 0: 40 ns",
            "Every time on this page is an estimate",
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
        assert!(!html.contains("<td>none"), "a part of no length is not listed");
        assert_eq!(html, estimate(&page()));
    }

    #[test]
    fn what_is_absent_is_left_out() {
        let html = estimate(&EstimatePage::default());
        for part in ["Gates", "Memory", "Timelines", "Refused", "Other mappings", "Where the time goes"] {
            assert!(!html.contains(&format!("<h2>{part}")), "{part}");
        }
    }

    #[test]
    fn tables_are_as_wide_as_there_are_tiers_and_long_cells_wrap() {
        let row = |role: &str, items: &[(&str, u64)], capacity| MemoryRow {
            role: role.into(),
            ranks: "the fullest".into(),
            items: items.iter().map(|(n, b)| ((*n).to_string(), *b)).collect(),
            capacity,
        };
        let memory = vec![
            row("hbm", &[("weights", 1 << 30), ("cache", 1 << 20)], Some(4 << 30)),
            row("host", &[("experts", 1 << 30)], None),
        ];
        let knobs = "striped, ring=2, zb-h2, micro-batch 1".to_string();
        let html = estimate(&EstimatePage {
            memory,
            warnings: vec!["groups leave <their> domain".into()],
            columns: vec!["mapping".into(), "step".into(), "knobs".into()],
            mappings: vec![vec!["tp=8".into(), "1.1 s".into(), knobs.clone()]],
            ..page()
        });
        for part in [
            "<th></th><th>hbm</th><th>host</th>",
            "<tr><td>weights</td><td>1.00 GiB</td><td>–</td></tr>",
            "<tr><td>experts</td><td>–</td><td>1.00 GiB</td></tr>",
            "<td>25 % of 4.00 GiB<span",
            "<b class=\"warn\">Warning:</b> groups leave &lt;their&gt; domain",
            &format!("<td>1.1 s</td><td class=\"words\">{knobs}</td>"),
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
    }

    #[test]
    fn what_is_worth_knowing_comes_before_its_table() {
        assert!(!estimate(&page()).contains("Worth knowing"));
        let sum = "44040192 numbers × 1 B × 58 layers".to_string();
        let advice = Advice {
            id: "memory-by-hand",
            title: "Memory <by hand>".into(),
            note: "One rank.".into(),
            columns: vec!["term".into(), "bytes".into(), "sum".into()],
            rows: vec![vec!["experts".into(), "2.55 GB".into(), sum.clone()]],
        };
        assert_eq!(advice.numbers(), [1]);
        let html = estimate(&EstimatePage { advice: vec![advice], ..page() });
        for part in [
            "<h2>Worth knowing</h2>\n<h3>Memory &lt;by hand&gt;</h3>\n<p class=\"note\">One rank.</p>\n<details>",
            "<th>term</th><th>bytes</th><th class=\"l\">sum</th>",
            &format!("<td>experts</td><td>2.55 GB</td><td class=\"words\">{sum}</td>"),
        ] {
            assert!(html.contains(part), "{part}\nis not in\n{html}");
        }
    }
}
