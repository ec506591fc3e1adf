//! Runs `.tir` files that carry their own expectations.
//!
//! A file begins with comment lines `// key: value`; `filetests/README.md` lists the keys. Failures
//! are returned as sentences. [`run_conformance`] runs the evaluations on a backend. This crate
//! reads neither files nor the environment and names no backend; its test binaries do, and they
//! write the text that [`bless`] returns. [`language`] draws language models with their plans and runs them,
//! and [`experts`] single layers of experts.

#![forbid(unsafe_code)]

mod conformance;
mod eval;
mod expected;
pub mod experts;
mod fragment;
mod header;
pub mod hostile;
pub mod language;
mod slots;
mod verify;

pub use conformance::{
    BackendFactory, BackendUnderTest, ConformanceReport, OpenBackends, ReferenceWeights, Tolerance,
    run_conformance,
};
pub use slots::dedicated_slots;

use tessera_base::{Diagnostic, Diagnostics, Severity};
use tessera_ir::{Dialect, Program, parse_all, print};

use header::{Header, TestKind};

/// Beginning of the part of a file that [`bless`] writes.
const EXPECT_HEADING: &str = "// expect:";

/// Runs one file. An empty list means that it passed. Diagnostics refer to the file as `name`.
#[must_use]
pub fn run(text: &str, name: &str) -> Vec<String> {
    match run_checks(text, name) {
        Err(wrong) => wrong,
        Ok(None) => Vec::new(),
        Ok(Some(found)) => expected::compare_output(text, &found),
    }
}

/// Returns the file with its expected output replaced by the actual output, or `None` if the file
/// expects no output or fails for another reason.
#[must_use]
pub fn bless(text: &str, name: &str) -> Option<String> {
    let found = run_checks(text, name).ok()??;
    let body = text.split(EXPECT_HEADING).next().unwrap_or(text).trim_end();
    let lines: String = found.lines().map(|l| format!("// {l}").trim_end().to_string() + "\n").collect();
    Some(format!("{body}\n\n{EXPECT_HEADING}\n{lines}"))
}

/// Runs all checks except the comparison with the expected output, and returns the actual output.
fn run_checks(text: &str, name: &str) -> Result<Option<String>, Vec<String>> {
    let header = Header::read(text)?;
    if header.kind == TestKind::Fragment {
        return fragment::run_fragment_test(text, name);
    }
    let parsed = parse_all(text, name);
    let (programs, mut found) = match parsed {
        Ok(p) => (p, Vec::new()),
        Err(ds) => (Vec::new(), ds),
    };
    if found.is_empty() && header.kind == TestKind::Check {
        found = verify::verify_file(&header, &programs);
    }
    let rejected = found.iter().any(Diagnostic::is_error);
    let problems = compare_diagnostics(text, &found);
    if !problems.is_empty() {
        return Err(problems);
    }
    if rejected {
        return Ok(None);
    }
    let unstable: Vec<String> = programs.iter().filter_map(|p| check_round_trip(p).err()).collect();
    if !unstable.is_empty() {
        return Err(unstable);
    }
    let miscounted: Vec<String> =
        programs.iter().filter_map(|p| check_collectives(&header, p).err()).collect();
    if !miscounted.is_empty() {
        return Err(miscounted);
    }
    match header.kind {
        TestKind::Parse | TestKind::Check | TestKind::Fragment => Ok(None),
        TestKind::Print => Ok(Some(programs.iter().map(print).collect())),
        TestKind::Eval => eval::evaluate_file(&header, &programs),
    }
}

/// Checks that a role program issues the collectives that the file lists.
fn check_collectives(header: &Header, p: &Program) -> Result<(), String> {
    let Some(expected) = header.collectives.as_ref().filter(|_| p.dialect == Dialect::Role) else {
        return Ok(());
    };
    let found: Vec<&str> = p.collective_ops().map(|(_, op)| op.opcode.name()).collect();
    if found.iter().eq(expected.iter()) {
        return Ok(());
    }
    Err(format!("@{} of {} issues {found:?}, not {expected:?}", p.name, p.role))
}

/// Checks that printing and parsing gives the same program and the same text.
fn check_round_trip(p: &Program) -> Result<(), String> {
    let text = print(p);
    let again = tessera_ir::parse(&text, "printed")
        .map_err(|d| format!("the printed text of @{} is rejected: {}", p.name, d[0].message))?;
    if print(&again) != text {
        return Err(format!("the printed text of @{} changes after parsing and printing again", p.name));
    }
    if again.without_spans() != p.clone().without_spans() {
        return Err(format!("@{} changes after printing and parsing", p.name));
    }
    Ok(())
}

/// Compares diagnostics with the marks in the text.
///
/// `// error: T0212 words` at the end of a line expects a diagnostic that begins on this line and
/// whose message contains these words; `;` separates several. `// error-anywhere: …` on its own
/// line expects a diagnostic without a line.
fn compare_diagnostics(text: &str, found: &Diagnostics) -> Vec<String> {
    struct Expected<'a> {
        line: Option<usize>,
        severity: Severity,
        code: &'a str,
        words: &'a str,
        found: bool,
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
            for mark_text in list.split(';') {
                let (code, words) = mark_text.trim().split_once(' ').unwrap_or((mark_text.trim(), ""));
                expected.push(Expected { line: at, severity, code, words: words.trim(), found: false });
            }
        }
    }
    let mut problems = Vec::new();
    for d in found {
        let start = d.labels.first().and_then(|p| p.span).map(|s| s.start.min(text.len()));
        let line = start.and_then(|s| text.get(..s)).map(|t| t.matches('\n').count() + 1);
        let matching = expected.iter_mut().find(|e| {
            !e.found
                && e.severity == d.severity
                && e.code == d.code.id
                && d.message.contains(e.words)
                && e.line.is_none_or(|l| Some(l) == line)
        });
        match matching {
            Some(e) => e.found = true,
            None => {
                let line = line.map_or("no line".to_string(), |l| format!("line {l}"));
                problems.push(format!("{line}: unexpected {}: {}", d.code.id, d.message));
            }
        }
    }
    for e in expected.iter().filter(|e| !e.found) {
        let line = e.line.map_or("no line".to_string(), |l| format!("line {l}"));
        problems.push(format!("{line}: expected diagnostic {} {} is missing", e.code, e.words));
    }
    problems
}
