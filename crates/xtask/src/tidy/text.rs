//! Checks of text and file names alone: first lines, names of modules, links, the book's table of
//! contents, and strings that belong to one machine or to unfinished work.

use std::collections::BTreeSet;

use super::Problem;
use super::markdown::{Link, find_anchors, find_links, resolve_link};
use crate::tree::Tree;

/// The table of contents of the book of all pages below `docs/`.
const CONTENTS: &str = "docs/SUMMARY.md";

/// Strings that no file of the project contains: paths of one machine and markers of unfinished
/// work. They are split here so that this file passes, too.
const BANNED_STRINGS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/tmp/tar", "get-"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
];

/// Checks first lines and names of Rust files, links of Markdown files, the book's table of contents,
/// and banned strings of all files.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    for f in tree.rust_files() {
        if !f.text.starts_with("//!") {
            let message = "begin the file with a `//!` comment that states its purpose";
            found.push(Problem::new(&f.path, 1, message));
        }
        // With `foo/mod.rs`, a file moves when its first child module is added. Below `tests/`, cargo
        // would take `foo.rs` for a test.
        if let Some(module) = f.path.strip_suffix("/mod.rs").filter(|_| !f.path.contains("/tests/")) {
            found.push(Problem::new(&f.path, 0, format!("move the file to {module}.rs")));
        }
    }
    for f in &tree.files {
        for (i, line) in f.text.lines().enumerate() {
            if let Some(word) = BANNED_STRINGS.iter().find(|w| line.contains(**w)) {
                let message = format!("`{word}` means nothing on another machine: remove it");
                found.push(Problem::new(&f.path, i + 1, message));
            }
        }
    }
    check_page_links(tree, found);
    check_contents(tree, found);
}

/// Checks the links of all pages.
pub(super) fn check_page_links(tree: &Tree, found: &mut Vec<Problem>) {
    for f in tree.files.iter().filter(|f| f.path.ends_with(".md")) {
        check_links(tree, &f.path, &f.text, found);
    }
}

/// Reports the relative links of a page whose target does not exist, and those that name a heading
/// which the target does not have.
fn check_links(tree: &Tree, path: &str, text: &str, found: &mut Vec<Problem>) {
    for Link { line, path: target, anchor, .. } in find_links(text) {
        let is_elsewhere = target.contains("://") || target.starts_with("mailto:");
        if is_elsewhere {
            continue;
        }
        let page = if target.is_empty() { Some(path.to_string()) } else { resolve_link(path, target) };
        let Some(page) = page.filter(|to| tree.contains(to)) else {
            let message = format!("link to {target}, which does not exist: correct it");
            found.push(Problem::new(path, line, message));
            continue;
        };
        let headings = tree.file_text(&page).filter(|_| page.ends_with(".md")).map(find_anchors);
        if let (Some(anchor), Some(headings)) = (anchor, headings)
            && !headings.contains(anchor)
        {
            let message = format!("{page} has no heading #{anchor}: correct the link");
            found.push(Problem::new(path, line, message));
        }
    }
}

/// Reports the pages that the book's table of contents does not link: the book leaves them out.
fn check_contents(tree: &Tree, found: &mut Vec<Problem>) {
    let contents = tree.file_text(CONTENTS).unwrap_or_default();
    let linked: BTreeSet<String> =
        find_links(contents).iter().filter_map(|link| resolve_link(CONTENTS, link.path)).collect();
    let is_page = |path: &str| path.starts_with("docs/") && path.ends_with(".md") && path != CONTENTS;
    for f in tree.files.iter().filter(|f| is_page(&f.path) && !linked.contains(&f.path)) {
        found.push(Problem::new(&f.path, 0, format!("the page is not in the book: link it in {CONTENTS}")));
    }
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
        let page = "# J\n[a](../b.md#x) [c](d/) [e](f.md) [g](https://h) [i](#j) [k](../../l.md)\n```\n[m](n.md)\n```\n\
[o](../b.md#y) [p](#q) [r](../s.rs#L1) `[t](u.md)`\n";
        let contents = (CONTENTS, "- [a](a.md)\n- [x](d/x.md)\n");
        let found = problems(&[
            contents,
            ("docs/a.md", page),
            ("b.md", "## X\n"),
            ("docs/d/x.md", ""),
            ("s.rs", "//!"),
        ]);
        assert_eq!(
            found,
            [
                "docs/a.md:2: link to f.md, which does not exist: correct it",
                "docs/a.md:2: link to ../../l.md, which does not exist: correct it",
                "docs/a.md:6: b.md has no heading #y: correct the link",
                "docs/a.md:6: docs/a.md has no heading #q: correct the link",
            ]
        );
    }

    #[test]
    fn every_page_of_docs_is_in_the_book() {
        let contents = (CONTENTS, "# Summary\n\n[A](a.md)\n\n- [B](guides/b.md#top)\n");
        let pages = [
            contents,
            ("docs/a.md", ""),
            ("docs/guides/b.md", "# Top"),
            ("README.md", ""),
            ("docs/c.svg", ""),
        ];
        assert_eq!(problems(&pages), Vec::<String>::new());
        let with_unlisted: Vec<_> = pages.into_iter().chain([("docs/guides/c.md", "")]).collect();
        let expected = "docs/guides/c.md: the page is not in the book: link it in docs/SUMMARY.md";
        assert_eq!(problems(&with_unlisted), [expected]);
    }

    #[test]
    fn a_mod_file_is_allowed_below_tests_only() {
        let files = [
            ("crates/a/src/b/mod.rs", "//!"),
            ("crates/a/tests/c/mod.rs", "//!"),
            ("crates/a/src/d.rs", "//!"),
        ];
        assert_eq!(problems(&files), ["crates/a/src/b/mod.rs: move the file to crates/a/src/b.rs"]);
    }

    #[test]
    fn a_source_starts_with_a_doc_comment() {
        assert_eq!(problems(&[("a.rs", "fn a() {}\n")]).len(), 1);
    }
}
