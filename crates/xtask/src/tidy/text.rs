//! Checks of text alone: first lines, links, and strings that belong to one machine
//! or to unfinished work.

use super::Problem;
use crate::tree::Tree;

/// Strings that no file of the project contains: paths of one machine and markers of unfinished
/// work. They are split here so that this file passes, too.
const BANNED_STRINGS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/tmp/tar", "get-"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
];

/// Checks first lines of Rust files, links of Markdown files, and banned strings of all.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    for f in tree.rust_files() {
        if !f.text.starts_with("//!") {
            found.push(Problem::new(
                &f.path,
                1,
                "begin the file with a `//!` comment that states its purpose",
            ));
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

    fn problems(files: &[(&str, &str)]) -> Vec<String> {
        let mut found = Vec::new();
        check(&Tree::from_files(files), &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn links_are_followed() {
        let page =
            "[a](../b.md#x) [c](d/) [e](f.md) [g](https://h) [i](#j) [k](../../l.md)\n```\n[m](n.md)\n```\n";
        let found = problems(&[("docs/a.md", page), ("b.md", ""), ("docs/d/x.md", "")]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("link to f.md") && found[1].contains("link to ../../l.md"));
    }

    #[test]
    fn a_source_starts_with_a_doc_comment() {
        assert_eq!(problems(&[("a.rs", "fn a() {}\n")]).len(), 1);
    }
}
