//! Finds mistakes with collectives in the source of a PyTorch program, without running it.
//!
//! A rule reports what it recognises, and prefers silence to a guess: a file without findings may still
//! hang. Names are resolved within one file.

mod causes;
mod module;
mod names;
mod parse;
mod rules;
mod sequences;
mod syntax;

use std::collections::BTreeSet;

use tessera_base::{Diagnostic, Diagnostics, Span};

use crate::codes::T1430;
use module::Module;
use rules::{Finder, find_conditional_collectives, find_misplaced_calls, find_missing_waits};

/// Bytes of the largest file that is read.
pub const FILE_LIMIT_BYTES: u64 = 1 << 20;

/// Findings that are reported for one file.
pub const FINDING_LIMIT: usize = 100;

/// The words of a comment that suppresses rules on its line: `# tessera: ignore T1435`.
const IGNORE: &str = "tessera: ignore ";

/// The findings in one file.
#[derive(Debug, Default)]
pub struct LintReport {
    /// What was found, in the order of the file.
    pub findings: Diagnostics,
    /// Findings that a comment on their line suppresses.
    pub suppressed: usize,
    /// Findings beyond [`FINDING_LIMIT`].
    pub omitted: usize,
}

/// Looks for mistakes in the text of a Python file; `name` stands in the findings.
///
/// What does not parse is a finding (T1430), and the rest of the file is read all the same.
#[must_use]
pub fn lint_python(name: &str, text: &str) -> LintReport {
    if text.len() as u64 > FILE_LIMIT_BYTES {
        return LintReport { findings: vec![too_large(name, text.len() as u64)], ..LintReport::default() };
    }
    let parsed = parse::parse_python(name, text);
    let module = Module::new(&parsed.body);
    let mut finder = Finder { module: &module, file: name, found: parsed.problems };
    find_misplaced_calls(&mut finder);
    find_conditional_collectives(&mut finder);
    find_missing_waits(&mut finder);
    let mut findings = finder.found;
    findings.sort_by_key(|d| (position(d), d.code.id));
    findings.dedup_by(|a, b| a.code == b.code && position(a) == position(b));
    let lines: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let ignored = list_ignored(&parsed.comments, &lines);
    let total = findings.len();
    let line = |d: &Diagnostic| line_of(&lines, position(d).start);
    findings.retain(|d| d.code == &T1430 || !ignored.contains(&(line(d), d.code.id)));
    let suppressed = total - findings.len();
    let omitted = findings.len().saturating_sub(FINDING_LIMIT);
    findings.truncate(FINDING_LIMIT);
    LintReport { findings, suppressed, omitted }
}

/// Returns the finding for a file above [`FILE_LIMIT_BYTES`].
#[must_use]
pub fn too_large(name: &str, bytes: u64) -> Diagnostic {
    let message = format!("{name} has {bytes} bytes, and files above {FILE_LIMIT_BYTES} bytes are not read");
    Diagnostic::error(&T1430, message).with_label(name, "generated code and data are not linted")
}

fn position(finding: &Diagnostic) -> Span {
    finding.labels.first().and_then(|l| l.span).unwrap_or_default()
}

/// Lists the line and the rule of each comment that suppresses one.
fn list_ignored(comments: &[(Span, String)], lines: &[usize]) -> BTreeSet<(usize, &'static str)> {
    let mut out = BTreeSet::new();
    for (span, comment) in comments {
        let Some((_, rules)) = comment.split_once(IGNORE) else { continue };
        let words = rules.split([',', ' ']).filter(|w| !w.is_empty());
        let known = words.map_while(|word| crate::CODES.iter().find(|c| c.id == word));
        out.extend(known.map(|c| (line_of(lines, span.start), c.id)));
    }
    out
}

/// Returns the line of a position, from the positions of the ends of lines.
fn line_of(lines: &[usize], offset: usize) -> usize {
    lines.partition_point(|end| *end < offset)
}
