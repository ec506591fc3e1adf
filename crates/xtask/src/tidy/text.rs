//! Checks of text alone: first lines, file lengths, links, and strings that belong to one machine
//! or to unfinished work.

use super::Problem;
use super::page::{LongFile, STYLE};
use crate::tree::Tree;

/// Number of lines above which a source needs a row in `STYLE.md`.
const LONG_LINES: usize = 800;
/// Number of lines above which a source must be a list or must be split.
const MAX_LINES: usize = 1200;

/// Strings that no file of the project contains: paths of one machine and markers of unfinished
/// work. They are split here so that this file passes, too.
const BANNED_STRINGS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/tmp/tar", "get-"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
];

/// Runs the checks over every file.
pub(super) fn check(tree: &Tree, long: &[LongFile], found: &mut Vec<Problem>) {
    for f in tree.rust_files() {
        if !f.text.starts_with("//!") {
            found.push(Problem::new(
                &f.path,
                1,
                "begin the file with a `//!` comment that states its purpose",
            ));
        }
        let lines = f.text.lines().count();
        let row = long.iter().find(|l| l.path == f.path);
        let message = match row {
            None if lines > LONG_LINES => {
                format!("{lines} lines: split the file, or add a row with a reason to {STYLE}")
            }
            Some(row) if lines > MAX_LINES && !row.is_list => {
                format!("{lines} lines: only a list may be longer than {MAX_LINES}; split the file")
            }
            _ => continue,
        };
        found.push(Problem::new(&f.path, 0, message));
    }
    for row in long {
        if tree.file_text(&row.path).is_none_or(|t| t.lines().count() <= LONG_LINES) {
            let message = format!("{} is not longer than {LONG_LINES} lines: remove the row", row.path);
            found.push(Problem::new(STYLE, row.line, message));
        }
    }
    for f in &tree.files {
        for (i, line) in f.text.lines().enumerate() {
            if let Some(word) = BANNED_STRINGS.iter().find(|w| line.contains(**w)) {
                let message = format!("`{word}` means nothing on another machine: remove it");
                found.push(Problem::new(&f.path, i + 1, message));
            }
        }
        if f.path.ends_with(".md") {
            check_links(tree, &f.path, &f.text, found);
        }
    }
}

/// Reports the relative links of a page whose target does not exist.
fn check_links(tree: &Tree, path: &str, text: &str, found: &mut Vec<Problem>) {
    let mut fenced = false;
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        for (_, rest) in line.match_indices("](").map(|(at, m)| (at, &line[at + m.len()..])) {
            let target =
                rest.split(')').next().unwrap_or_default().split_whitespace().next().unwrap_or_default();
            let file = target.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
                continue;
            }
            match resolve_link(path, file) {
                Some(to) if tree.contains(&to) => {}
                _ => found.push(Problem::new(
                    path,
                    i + 1,
                    format!("link to {target}, which does not exist: correct it"),
                )),
            }
        }
    }
}

/// Resolves a link of a page to a path from the root; `None` if it leaves the project.
pub(super) fn resolve_link(page: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(files: &[(&str, &str)], long: &[LongFile]) -> Vec<String> {
        let mut found = Vec::new();
        check(&Tree::from_files(files), long, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn links_are_followed() {
        let page =
            "[a](../b.md#x) [c](d/) [e](f.md) [g](https://h) [i](#j) [k](../../l.md)\n```\n[m](n.md)\n```\n";
        let found = problems(&[("docs/a.md", page), ("b.md", ""), ("docs/d/x.md", "")], &[]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("link to f.md") && found[1].contains("link to ../../l.md"));
    }

    #[test]
    fn the_length_limit_is_a_ratchet() {
        let row = |list| vec![LongFile { path: "a.rs".into(), is_list: list, line: 7 }];
        let source = |n: usize| format!("//! a\n{}", "x\n".repeat(n - 1));
        let count = |n: usize, long: &[LongFile]| problems(&[("a.rs", &source(n))], long).len();
        assert_eq!((count(800, &[]), count(801, &[])), (0, 1));
        assert_eq!((count(801, &row(false)), count(1201, &row(false)), count(1201, &row(true))), (0, 1, 0));
        assert_eq!(
            problems(&[("a.rs", &source(700))], &row(false)),
            ["STYLE.md:7: a.rs is not longer than 800 lines: remove the row"]
        );
    }

    #[test]
    fn a_source_starts_with_a_doc_comment() {
        assert_eq!(problems(&[("a.rs", "fn a() {}\n")], &[]).len(), 1);
    }
}
