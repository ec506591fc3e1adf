//! Checks what code must not contain: I/O and clocks in pure crates, panics and prints in library
//! crates, and `unsafe` outside of a few files.

use super::page::CrateKind;
use super::rust::{Source, closing_bracket, find_words};
use super::{CrateRow, Problem};

/// Paths of the standard library that depend on more than the input or have effects outside of the
/// process.
const IMPURE_PATHS: &[&str] = &[
    "std::fs",
    "std::env",
    "std::net",
    "std::os",
    "std::thread",
    "std::process",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::io::stdin",
    "std::io::stdout",
    "std::io::stderr",
];
/// Paths that no library crate uses: application crates read files and the environment and pass
/// typed values on.
const APPLICATION_PATHS: &[&str] = &["std::env", "std::fs"];
/// The only library crate that reads files.
const FILE_CRATE: &str = "tessera-weights";
/// Impure names that need no path of the standard library.
const IMPURE_NAMES: &[&str] = &["Instant::now", "SystemTime::now", "option_env!"];
/// Calls that panic or print instead of returning a diagnostic. `expect` counts only with a string
/// literal, because parsers have a method of that name.
const PANICS_AND_PRINTS: &[&str] = &[
    ".unwrap()",
    ".expect(\"",
    "todo!",
    "unimplemented!",
    "dbg!",
    "println!",
    "eprintln!",
    "print!",
    "eprint!",
];

/// Checks every source under the rules of its crate's row.
pub(super) fn check(
    sources: &[Source<'_>],
    table: &[CrateRow],
    unsafe_files: &[String],
    found: &mut Vec<Problem>,
) {
    for s in sources {
        if let Some(row) = table.iter().find(|r| r.name == s.crate_name()) {
            let banned_paths: &[&str] = match (row.pure, row.kind) {
                (true, _) => IMPURE_PATHS,
                (false, CrateKind::Library) if row.name == FILE_CRATE => &APPLICATION_PATHS[..1],
                (false, CrateKind::Library) => APPLICATION_PATHS,
                _ => &[],
            };
            check_paths(s, banned_paths, row.pure, found);
            if row.kind == CrateKind::Library {
                check_panics_and_prints(s, found);
            }
        }
        check_unsafe(s, unsafe_files, found);
    }
}

/// Reports the banned paths, and in pure crates the impure names, outside of tests.
fn check_paths(s: &Source<'_>, banned_paths: &[&str], pure: bool, found: &mut Vec<Problem>) {
    let names = if pure { IMPURE_NAMES } else { &[] };
    let named = names.iter().flat_map(|n| s.code.match_indices(n).map(|(at, n)| (at, n.to_string())));
    let imported = std_paths(&s.code).into_iter().filter_map(|(at, path)| {
        banned_paths.iter().find(|p| is_path_prefix(p, &path)).map(|p| (at, p.to_string()))
    });
    for (at, what) in named.chain(imported).filter(|(at, _)| !s.in_test(*at)) {
        let message = format!(
            "`{what}` in `{}`{}: take the value as an argument and let an application crate or a driver read it",
            s.crate_name(),
            if pure { ", which is pure" } else { "" }
        );
        found.push(Problem::new(s.path, s.line_number(at), message));
    }
}

/// Returns whether `path` equals `prefix` or lies below it.
fn is_path_prefix(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// Lists every path into the standard library with its offset, with grouped imports expanded.
fn std_paths(code: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for at in find_words(code, "std") {
        if code[at..].starts_with("std::") {
            expand_path(code, at, String::new(), &mut out);
        }
    }
    out
}

/// Appends the path that starts at `at`, and every path of its groups, each with `prefix` before
/// it.
fn expand_path(code: &str, at: usize, prefix: String, out: &mut Vec<(usize, String)>) {
    let name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let end = at + code[at..].find(|c| !name(c)).unwrap_or(code.len() - at);
    let path = format!("{prefix}{}", &code[at..end]);
    if !(path.ends_with("::") && code[end..].starts_with('{')) {
        out.push((at, path));
        return;
    }
    let group_end = closing_bracket(code, end);
    let mut i = end + 1;
    while i < group_end {
        if code[i..].starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            expand_path(code, i, path.clone(), out);
            // Skip to the next element of this group, past any nested group.
            while i < group_end && !code[i..].starts_with(',') {
                i = if code[i..].starts_with('{') { closing_bracket(code, i) } else { i + 1 };
            }
        } else {
            i += 1;
        }
    }
}

/// Reports calls in library code that panic or print.
fn check_panics_and_prints(s: &Source<'_>, found: &mut Vec<Problem>) {
    for what in PANICS_AND_PRINTS {
        for (at, _) in s.code.match_indices(what).filter(|(at, _)| !s.in_test(*at)) {
            let in_name = |c: char| c.is_alphanumeric() || c == '_';
            if !what.starts_with('.') && s.code[..at].ends_with(in_name) {
                continue;
            }
            let message = format!(
                "`{}` in a library crate: return a `Diagnostic` or an error, or use a type that rules the case out",
                what.trim_end_matches('"')
            );
            found.push(Problem::new(s.path, s.line_number(at), message));
        }
    }
}

/// Reports `unsafe` outside of the allowed files, and `unsafe` without a safety comment in them.
fn check_unsafe(s: &Source<'_>, allowed: &[String], found: &mut Vec<Problem>) {
    let lines: Vec<&str> = s.text.lines().collect();
    let code: Vec<&str> = s.code.lines().collect();
    let is_listed = allowed.iter().any(|a| a == s.path);
    for at in find_words(&s.code, "unsafe") {
        let line = s.line_number(at);
        if !is_listed {
            let message = "`unsafe` in a file that ARCHITECTURE.md does not list: write safe code, or add a row there with a reason";
            found.push(Problem::new(s.path, line, message));
        } else if !has_safety_comment(&lines, &code, line - 1) {
            let message = "add a comment `// SAFETY:` above it with the reason why it is sound (`# Safety` for an `unsafe fn`)";
            found.push(Problem::new(s.path, line, message));
        }
    }
    if !is_listed && let Some((at, _)) = s.code.match_indices("allow(unsafe_code").next() {
        found.push(Problem::new(
            s.path,
            s.line_number(at),
            "`allow(unsafe_code)` in a file that may not contain unsafe code: remove it",
        ));
    }
}

/// Returns whether a safety comment precedes the statement that contains line `at` (from 0).
fn has_safety_comment(lines: &[&str], code: &[&str], at: usize) -> bool {
    let mut i = at;
    // Go up to the statement's first line. An attribute belongs to the item below it.
    while i > 0 {
        let before = code[i - 1].trim();
        let is_attribute = before.starts_with("#[") || before.starts_with("#![");
        if before.is_empty() || (!is_attribute && before.ends_with([';', '{', '}', ','])) {
            break;
        }
        i -= 1;
    }
    let is_comment = |l: &&&str| l.trim_start().starts_with("//");
    lines[..i]
        .iter()
        .rev()
        .take_while(is_comment)
        .chain([&lines[at]])
        .any(|l| l.contains("// SAFETY:") || l.contains("# Safety"))
}

#[cfg(test)]
mod tests {
    use super::super::rust::parse_source;
    use super::*;

    fn table(pure: bool) -> Vec<CrateRow> {
        vec![CrateRow { name: "a".into(), kind: CrateKind::Library, may_use: None, pure, line: 1 }]
    }

    fn problem_lines(text: &str, pure: bool, is_listed: bool) -> Vec<usize> {
        let path = "crates/a/src/lib.rs";
        let allowed = if is_listed { vec![path.to_string()] } else { vec![] };
        let mut found = Vec::new();
        check(&[parse_source(path, text)], &table(pure), &allowed, &mut found);
        found.iter().map(|p| p.line).collect()
    }

    #[test]
    fn impure_paths_are_found_in_grouped_imports() {
        let text = "use std::{collections::BTreeMap, time::{Duration, Instant}, fs};\nuse std::fmt;\n\
use std::fs_like;\n// std::fs\nlet s = \"std::env\";\n#[cfg(test)]\nmod tests { use std::fs; }\nlet t = std::env::var;\n";
        assert_eq!(problem_lines(text, true, false), [1, 1, 8]);
        assert_eq!(problem_lines(text, false, false), [1, 8]);
    }

    #[test]
    fn panics_and_prints_are_rejected_outside_of_tests() {
        let text = "a.unwrap();\na.unwrap_or(1);\nself.expect(Token::Comma);\na.expect(\"b\");\n\
println!(\"x\");\nmy_println!(1);\n#[cfg(test)]\nmod t { fn f() { a.unwrap() } }\n";
        assert_eq!(problem_lines(text, false, false), [1, 4, 5]);
    }

    #[test]
    fn unsafe_needs_a_listed_file_and_a_safety_comment() {
        let text = "// SAFETY: it holds.\nlet a =\n    f(unsafe { b });\nlet c = unsafe { d };\n\
/// # Safety\n/// As documented.\n#[inline]\nunsafe fn e() {}\nlet f = x; // unsafe\n";
        assert_eq!(problem_lines(text, false, true), [4]);
        assert_eq!(problem_lines(text, false, false), [3, 4, 8]);
    }
}
