//! What the code of rooms must not hold: I/O and clocks in pure ones, panics and prints in all, `unsafe` anywhere
//! but in a few files.

use super::page::Kind;
use super::rust::{Source, closing, words};
use super::{Problem, Room};

/// What gives other bytes for the same input, or reaches out of the process.
const IMPURE: &[&str] = &[
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
/// What no room asks for by itself: doors read files and the environment, and hand on typed values.
const OUTSIDE: &[&str] = &["std::env", "std::fs"];
/// The one room whose purpose is files.
const FILES: &str = "tessera-weights";
/// What names an impure thing without its path.
const IMPURE_NAMES: &[&str] = &["Instant::now", "SystemTime::now", "option_env!"];
/// What ends a process, or speaks past the diagnostics. `expect` with a text only: parsers have one of their own.
const BLUNT: &[&str] = &[
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

pub(super) fn check(
    sources: &[Source<'_>],
    table: &[Room],
    unsafe_files: &[String],
    found: &mut Vec<Problem>,
) {
    for s in sources {
        if let Some(room) = table.iter().find(|r| r.name == s.crate_name()) {
            let whole: &[&str] = match (room.pure, room.kind) {
                (true, _) => IMPURE,
                (false, Kind::Room) if room.name == FILES => &OUTSIDE[..1],
                (false, Kind::Room) => OUTSIDE,
                _ => &[],
            };
            reaching_out(s, whole, room.pure, found);
            if room.kind == Kind::Room {
                blunt(s, found);
            }
        }
        unsafety(s, unsafe_files, found);
    }
}

fn reaching_out(s: &Source<'_>, refused: &[&str], pure: bool, found: &mut Vec<Problem>) {
    let names = if pure { IMPURE_NAMES } else { &[] };
    let named = names.iter().flat_map(|n| s.code.match_indices(n).map(|(at, n)| (at, n.to_string())));
    let imported = std_paths(&s.code)
        .into_iter()
        .filter_map(|(at, path)| refused.iter().find(|p| begins(&path, p)).map(|p| (at, p.to_string())));
    for (at, what) in named.chain(imported).filter(|(at, _)| !s.in_test(*at)) {
        let says = format!(
            "`{what}` in `{}`{}: take the value as an argument and let a door or a driver ask for it",
            s.crate_name(),
            if pure { ", which is pure" } else { "" }
        );
        found.push(Problem::new(s.path, s.line(at), says));
    }
}

/// Whether a path is another or goes on from it.
fn begins(path: &str, with: &str) -> bool {
    path.strip_prefix(with).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// Every path into the standard library, those of grouped imports spelled out.
fn std_paths(code: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for at in words(code, "std") {
        if code[at..].starts_with("std::") {
            spell(code, at, String::new(), &mut out);
        }
    }
    out
}

fn spell(code: &str, at: usize, prefix: String, out: &mut Vec<(usize, String)>) {
    let name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let end = at + code[at..].find(|c| !name(c)).unwrap_or(code.len() - at);
    let path = format!("{prefix}{}", &code[at..end]);
    if !(path.ends_with("::") && code[end..].starts_with('{')) {
        out.push((at, path));
        return;
    }
    let group_end = closing(code, end);
    let mut i = end + 1;
    while i < group_end {
        if code[i..].starts_with(|c: char| c.is_alphanumeric() || c == '_') {
            spell(code, i, path.clone(), out);
            // On to the next element of this group, past a group of its own.
            while i < group_end && !code[i..].starts_with(',') {
                i = if code[i..].starts_with('{') { closing(code, i) } else { i + 1 };
            }
        } else {
            i += 1;
        }
    }
}

fn blunt(s: &Source<'_>, found: &mut Vec<Problem>) {
    for what in BLUNT {
        for (at, _) in s.code.match_indices(what).filter(|(at, _)| !s.in_test(*at)) {
            let inside = |c: char| c.is_alphanumeric() || c == '_';
            if !what.starts_with('.') && s.code[..at].ends_with(inside) {
                continue;
            }
            let says = format!(
                "`{}` in a room: return a `Diagnostic`, an error, or a value that cannot be missing",
                what.trim_end_matches('"')
            );
            found.push(Problem::new(s.path, s.line(at), says));
        }
    }
}

fn unsafety(s: &Source<'_>, allowed: &[String], found: &mut Vec<Problem>) {
    let lines: Vec<&str> = s.text.lines().collect();
    let code: Vec<&str> = s.code.lines().collect();
    let free = allowed.iter().any(|a| a == s.path);
    for at in words(&s.code, "unsafe") {
        let line = s.line(at);
        if !free {
            let says = "`unsafe` in a file that ARCHITECTURE.md does not list: find a safe way, or argue for a row there";
            found.push(Problem::new(s.path, line, says));
        } else if !has_note(&lines, &code, line - 1) {
            let says = "write above it `// SAFETY:` and why it holds (`# Safety` for an `unsafe fn`)";
            found.push(Problem::new(s.path, line, says));
        }
    }
    if !free && let Some((at, _)) = s.code.match_indices("allow(unsafe_code").next() {
        found.push(Problem::new(
            s.path,
            s.line(at),
            "`allow(unsafe_code)` where no unsafe may be: remove it",
        ));
    }
}

/// Whether a note on safety stands above the statement that holds line `at` (from 0).
fn has_note(lines: &[&str], code: &[&str], at: usize) -> bool {
    let mut i = at;
    // Up to the statement's first line. Attributes belong to what they stand on.
    while i > 0 {
        let before = code[i - 1].trim();
        let attribute = before.starts_with("#[") || before.starts_with("#![");
        if before.is_empty() || (!attribute && before.ends_with([';', '{', '}', ','])) {
            break;
        }
        i -= 1;
    }
    let commented = |l: &&&str| l.trim_start().starts_with("//");
    lines[..i]
        .iter()
        .rev()
        .take_while(commented)
        .chain([&lines[at]])
        .any(|l| l.contains("// SAFETY:") || l.contains("# Safety"))
}

#[cfg(test)]
mod tests {
    use super::super::rust::source;
    use super::*;

    fn room(pure: bool) -> Vec<Room> {
        vec![Room { name: "a".into(), kind: Kind::Room, may_use: None, pure, line: 1 }]
    }

    fn lines(text: &str, pure: bool, free: bool) -> Vec<usize> {
        let path = "crates/a/src/lib.rs";
        let allowed = if free { vec![path.to_string()] } else { vec![] };
        let mut found = Vec::new();
        check(&[source(path, text)], &room(pure), &allowed, &mut found);
        found.iter().map(|p| p.line).collect()
    }

    #[test]
    fn impure_paths_are_seen_through_groups() {
        let text = "use std::{collections::BTreeMap, time::{Duration, Instant}, fs};\nuse std::fmt;\n\
use std::fs_like;\n// std::fs\nlet s = \"std::env\";\n#[cfg(test)]\nmod tests { use std::fs; }\nlet t = std::env::var;\n";
        assert_eq!(lines(text, true, false), [1, 1, 8]);
        assert_eq!(lines(text, false, false), [1, 8]);
    }

    #[test]
    fn blunt_words_are_refused_outside_of_tests() {
        let text = "a.unwrap();\na.unwrap_or(1);\nself.expect(Token::Comma);\na.expect(\"b\");\n\
println!(\"x\");\nmy_println!(1);\n#[cfg(test)]\nmod t { fn f() { a.unwrap() } }\n";
        assert_eq!(lines(text, false, false), [1, 4, 5]);
    }

    #[test]
    fn unsafe_needs_a_listed_file_and_a_note() {
        let text = "// SAFETY: it holds.\nlet a =\n    f(unsafe { b });\nlet c = unsafe { d };\n\
/// # Safety\n/// As told.\n#[inline]\nunsafe fn e() {}\nlet f = x; // unsafe\n";
        assert_eq!(lines(text, false, true), [4]);
        assert_eq!(lines(text, false, false), [3, 4, 8]);
    }
}
