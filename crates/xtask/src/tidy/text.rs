//! Rules about text alone: first lines, lengths, links, and words that belong to a machine or a day.

use super::Problem;
use super::page::{LongFile, STYLE};
use crate::tree::Tree;

/// A source longer than this has a row in `STYLE.md`.
const LONG: usize = 800;
/// A source longer than this is a list or is cut in two.
const TOO_LONG: usize = 1200;

/// What no file of the project says: paths of one machine, and promises. Split so that this file passes too.
const FOREIGN: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/tmp/tar", "get-"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
];

pub(super) fn check(tree: &Tree, long: &[LongFile], found: &mut Vec<Problem>) {
    for f in tree.sources() {
        if !f.text.starts_with("//!") {
            found.push(Problem::new(&f.path, 1, "begin the file with `//!` and what it is for"));
        }
        let lines = f.text.lines().count();
        let row = long.iter().find(|l| l.path == f.path);
        let says = match row {
            None if lines > LONG => {
                format!("{lines} lines: cut it along a seam, or give it a row and a reason in {STYLE}")
            }
            Some(row) if lines > TOO_LONG && !row.list => {
                format!("{lines} lines: only a list may be longer than {TOO_LONG}; cut it along a seam")
            }
            _ => continue,
        };
        found.push(Problem::new(&f.path, 0, says));
    }
    for row in long {
        if tree.text(&row.path).is_none_or(|t| t.lines().count() <= LONG) {
            let says = format!("{} is no longer than {LONG} lines: remove the row", row.path);
            found.push(Problem::new(STYLE, row.line, says));
        }
    }
    for f in &tree.files {
        for (i, line) in f.text.lines().enumerate() {
            if let Some(word) = FOREIGN.iter().find(|w| line.contains(**w)) {
                let says = format!(
                    "`{word}` means nothing to a reader elsewhere: say it in the project's own terms"
                );
                found.push(Problem::new(&f.path, i + 1, says));
            }
        }
        if f.path.ends_with(".md") {
            links(tree, &f.path, &f.text, found);
        }
    }
}

/// Relative links of a page that lead nowhere.
fn links(tree: &Tree, path: &str, text: &str, found: &mut Vec<Problem>) {
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
            match resolve(path, file) {
                Some(to) if tree.has(&to) => {}
                _ => found.push(Problem::new(
                    path,
                    i + 1,
                    format!("link to {target}, which is not there: correct it"),
                )),
            }
        }
    }
}

/// A link of a page as a path from the root; `None` where it leaves the project.
pub(super) fn resolve(page: &str, link: &str) -> Option<String> {
    let mut at: Vec<&str> = page.split('/').collect();
    at.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                at.pop()?;
            }
            name => at.push(name),
        }
    }
    Some(at.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(files: &[(&str, &str)], long: &[LongFile]) -> Vec<String> {
        let mut found = Vec::new();
        check(&Tree::of(files), long, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn links_are_followed() {
        let page =
            "[a](../b.md#x) [c](d/) [e](f.md) [g](https://h) [i](#j) [k](../../l.md)\n```\n[m](n.md)\n```\n";
        let said = said(&[("docs/a.md", page), ("b.md", ""), ("docs/d/x.md", "")], &[]);
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("link to f.md") && said[1].contains("link to ../../l.md"));
    }

    #[test]
    fn length_is_a_ratchet() {
        let row = |list| vec![LongFile { path: "a.rs".into(), list, line: 7 }];
        let of = |n: usize| format!("//! a\n{}", "x\n".repeat(n - 1));
        let told = |n: usize, long: &[LongFile]| said(&[("a.rs", &of(n))], long).len();
        assert_eq!((told(800, &[]), told(801, &[])), (0, 1));
        assert_eq!((told(801, &row(false)), told(1201, &row(false)), told(1201, &row(true))), (0, 1, 0));
        assert_eq!(
            said(&[("a.rs", &of(700))], &row(false)),
            ["STYLE.md:7: a.rs is no longer than 800 lines: remove the row"]
        );
    }

    #[test]
    fn a_source_says_what_it_is_for() {
        assert_eq!(said(&[("a.rs", "fn a() {}\n")], &[]).len(), 1);
    }
}
