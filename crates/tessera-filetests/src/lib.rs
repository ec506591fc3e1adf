//! Runs `.tir` files that say themselves what is to be tested and what must come out.
//!
//! A file begins with comment lines `// key: value`; `filetests/README.md` lists the keys. What went wrong comes
//! back as sentences. [`conformance`] runs the evaluations on a backend. This room reads no files and no
//! environment and names no backend: its test binaries do, and write what [`bless`] returns.

mod conformance;
mod eval;
mod expected;
mod fragment;
mod header;
pub mod hostile;
mod judge;
mod slots;

pub use conformance::{Maker, Open, Report, Subject, Tolerance, conformance};
pub use slots::own_slots;

use tessera_base::{Diagnostic, Diagnostics, Severity};
use tessera_ir::{Dialect, Program, parse_all, print};

use header::{Header, Kind};

/// What begins the part of a file that [`bless`] writes.
const EXPECT: &str = "// expect:";

/// Runs one file; an empty list means that it passed. `name` stands in diagnostics.
#[must_use]
pub fn run(text: &str, name: &str) -> Vec<String> {
    match outcome(text, name) {
        Err(wrong) => wrong,
        Ok(None) => Vec::new(),
        Ok(Some(found)) => expected::compare(text, &found),
    }
}

/// The file with its expected output replaced by what comes out now; `None` when the file has none, or fails for
/// another reason.
#[must_use]
pub fn bless(text: &str, name: &str) -> Option<String> {
    let found = outcome(text, name).ok()??;
    let body = text.split(EXPECT).next().unwrap_or(text).trim_end();
    let lines: String = found.lines().map(|l| format!("// {l}").trim_end().to_string() + "\n").collect();
    Some(format!("{body}\n\n{EXPECT}\n{lines}"))
}

/// Everything but the comparison with the written output, which is returned.
fn outcome(text: &str, name: &str) -> Result<Option<String>, Vec<String>> {
    let header = Header::read(text)?;
    if header.kind == Kind::Fragment {
        return fragment::fragment(text, name);
    }
    let parsed = parse_all(text, name);
    let (programs, mut found) = match parsed {
        Ok(p) => (p, Vec::new()),
        Err(ds) => (Vec::new(), ds),
    };
    if found.is_empty() && header.kind == Kind::Check {
        found = judge::judge(&header, &programs);
    }
    let refused = found.iter().any(Diagnostic::is_error);
    let wrong = compare_diagnostics(text, &found);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    if refused {
        return Ok(None);
    }
    let unstable: Vec<String> = programs.iter().filter_map(|p| fixed_point(p).err()).collect();
    if !unstable.is_empty() {
        return Err(unstable);
    }
    let miscounted: Vec<String> = programs.iter().filter_map(|p| census(&header, p).err()).collect();
    if !miscounted.is_empty() {
        return Err(miscounted);
    }
    match header.kind {
        Kind::Parse | Kind::Check | Kind::Fragment => Ok(None),
        Kind::Print => Ok(Some(programs.iter().map(print).collect())),
        Kind::Eval => eval::eval(&header, &programs),
    }
}

/// The collectives of a role's program are those that the file names.
fn census(header: &Header, p: &Program) -> Result<(), String> {
    let Some(expected) = header.collectives.as_ref().filter(|_| p.dialect == Dialect::Role) else {
        return Ok(());
    };
    let found: Vec<&str> = p.collectives().map(|(_, op)| op.opcode.name()).collect();
    if found.iter().eq(expected.iter()) {
        return Ok(());
    }
    Err(format!("@{} of {} issues {found:?}, not {expected:?}", p.name, p.role))
}

/// Printing and reading back gives the same program, and the same text.
fn fixed_point(p: &Program) -> Result<(), String> {
    let text = print(p);
    let again = tessera_ir::parse(&text, "printed")
        .map_err(|d| format!("what @{} prints is refused: {}", p.name, d[0].message))?;
    if print(&again) != text {
        return Err(format!("@{} prints differently after reading back", p.name));
    }
    if again.without_spans() != p.clone().without_spans() {
        return Err(format!("@{} is another program after reading back", p.name));
    }
    Ok(())
}

/// `// error: T0212 words` at the end of a line expects a diagnostic that begins on it, with these words in its
/// message; several are separated by `;`. `// error-anywhere: …` on a line of its own expects one without a line.
fn compare_diagnostics(text: &str, found: &Diagnostics) -> Vec<String> {
    struct Expected<'a> {
        line: Option<usize>,
        severity: Severity,
        code: &'a str,
        words: &'a str,
        seen: bool,
    }
    let mut expected = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let marks = [
            ("// error:", Some(i + 1), Severity::Error),
            ("// warning:", Some(i + 1), Severity::Warning),
            ("// error-anywhere:", None, Severity::Error),
        ];
        for (mark, at, severity) in marks {
            let Some((_, list)) = line.split_once(mark) else { continue };
            for one in list.split(';') {
                let (code, words) = one.trim().split_once(' ').unwrap_or((one.trim(), ""));
                expected.push(Expected { line: at, severity, code, words: words.trim(), seen: false });
            }
        }
    }
    let mut wrong = Vec::new();
    for d in found {
        let start = d.places.first().and_then(|p| p.span).map(|s| s.start.min(text.len()));
        let line = start.and_then(|s| text.get(..s)).map(|t| t.matches('\n').count() + 1);
        let hit = expected.iter_mut().find(|e| {
            !e.seen
                && e.severity == d.severity
                && e.code == d.code.id
                && d.message.contains(e.words)
                && e.line.is_none_or(|l| Some(l) == line)
        });
        match hit {
            Some(e) => e.seen = true,
            None => {
                let line = line.map_or("no line".to_string(), |l| format!("line {l}"));
                wrong.push(format!("{line}: unexpected {}: {}", d.code.id, d.message));
            }
        }
    }
    for e in expected.iter().filter(|e| !e.seen) {
        let line = e.line.map_or("no line".to_string(), |l| format!("line {l}"));
        wrong.push(format!("{line}: expected {} {} did not come", e.code, e.words));
    }
    wrong
}
