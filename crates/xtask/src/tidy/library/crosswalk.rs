//! The crosswalk: each section of the design pages with the rules that it names, their topics, and what
//! shows that they hold.

use std::fmt::Write as _;

use super::super::Problem;
use super::super::markdown::{make_anchor, split_sections};
use super::super::page::{Row, marked_rows};
use super::backmap::{link_to, test_file};
use super::references::find_rule_ids;
use super::tables::README;
use super::{Library, Rule};
use crate::tree::Tree;

/// The generated page.
pub(super) const PATH: &str = "docs/library/crosswalk.md";

/// The sections of a design page that name their rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Every section.
    All,
    /// The sections below one section of the second level.
    Below(&'static str),
    /// One section.
    One(&'static str),
    /// Every section and the opening of a page that code prints, which cannot name rules. A table of
    /// [`README`] names them.
    Listed,
}

/// The pages that describe the design. A page that does not exist is a problem of the links to it.
const DESIGN_PAGES: [(&str, Scope); 5] = [
    ("docs/guides/lockstep.md", Scope::All),
    ("docs/reference/envelope.md", Scope::Listed),
    ("docs/manual/groups.md", Scope::Below("Details")),
    ("docs/manual/kv.md", Scope::One("The transition table")),
    ("docs/manual/shutdown.md", Scope::Below("Details")),
];

/// A section of a design page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DesignSection {
    pub(super) path: &'static str,
    pub(super) name: String,
    pub(super) line: usize,
    pub(super) rules: Vec<String>,
}

/// Reads the sections of the design pages, in the order of the pages.
pub(super) fn read_sections(tree: &Tree, found: &mut Vec<Problem>) -> Vec<DesignSection> {
    let mut out = Vec::new();
    for (path, scope) in DESIGN_PAGES {
        let Some(text) = tree.file_text(path) else { continue };
        let listed = if scope == Scope::Listed { read_listed_rules(path, tree, found) } else { Vec::new() };
        let begin = out.len();
        for level in 1..=3 {
            for section in
                split_sections(text, level).iter().filter(|s| is_chosen(text, scope, level, s.line))
            {
                let of_table =
                    listed.iter().find(|(name, _)| name == section.name).map(|(_, rules)| rules.clone());
                let rules = match scope {
                    Scope::Listed => of_table.unwrap_or_default(),
                    _ => find_rule_ids(&section.text()),
                };
                out.push(DesignSection { path, name: section.name.to_string(), line: section.line, rules });
            }
        }
        out[begin..].sort_by_key(|s| s.line);
        for (name, _) in listed.iter().filter(|(name, _)| !out[begin..].iter().any(|s| s.name == *name)) {
            found.push(Problem::new(README, 0, format!("{path} has no section `{name}`: correct the name")));
        }
    }
    out
}

/// Whether the heading at a line of a page belongs to a scope.
fn is_chosen(text: &str, scope: Scope, level: usize, line: usize) -> bool {
    let name = text.lines().nth(line - 1).unwrap_or_default().trim_start_matches('#').trim();
    match scope {
        Scope::All => level > 1,
        Scope::Listed => true,
        Scope::One(section) => name == section,
        Scope::Below(section) => {
            let parent = split_sections(text, 2).into_iter().rfind(|s| s.line < line);
            level == 3 && parent.is_some_and(|s| s.name == section)
        }
    }
}

/// Reads the rows of the table of [`README`] for one page: name of the section, and rules.
fn read_listed_rules(path: &str, tree: &Tree, found: &mut Vec<Problem>) -> Vec<(String, Vec<String>)> {
    let mut out = Vec::new();
    for Row { cells, line } in marked_rows(tree, README, "crosswalk", found) {
        match cells[..] {
            [page, section, rules] if page.trim_matches('`') == path => {
                out.push((section.to_string(), find_rule_ids(rules)));
            }
            [_, _, _] => {}
            _ => found.push(Problem::new(README, line, "the row needs page, section, rules")),
        }
    }
    out
}

/// Checks that every section names a rule, and that the rules exist.
pub(super) fn check(library: &Library, found: &mut Vec<Problem>) {
    for section in &library.design {
        let mut report = |message: String| found.push(Problem::new(section.path, section.line, message));
        let is_known = |id: &String| library.rules.iter().any(|r| r.id == *id);
        if section.rules.is_empty() {
            report(format!("{} names no rule: name the rules that hold it, such as D-01", section.name));
        }
        for id in section.rules.iter().filter(|id| !is_known(id)) {
            report(format!("there is no rule {id}: correct the id"));
        }
    }
}

/// Renders the page. Writing to a `String` cannot fail, so the results of `writeln!` are dropped.
pub(super) fn render_page(library: &Library, tree: &Tree) -> String {
    let mut out = "# Crosswalk\n\n\
This page leads from each section of the design pages to the rules that it names, to their topics, and to what shows that they\n\
hold. `cargo xtask library` generates it.\n"
        .to_string();
    let mut last = "";
    for section in &library.design {
        if section.path != last {
            let name = section.path.trim_start_matches("docs/").trim_end_matches(".md");
            let _ = write!(
                out,
                "\n## {name}\n\n| section | rules | topics | drills | tests and filetests |\n\
| --- | --- | --- | --- | --- |\n"
            );
            last = section.path;
        }
        let _ = writeln!(out, "{}", render_row(section, library, tree));
    }
    out
}

fn render_row(section: &DesignSection, library: &Library, tree: &Tree) -> String {
    let rules: Vec<&Rule> = library.rules.iter().filter(|r| section.rules.contains(&r.id)).collect();
    let topics = library.topics.iter().filter(|t| rules.iter().any(|r| t.rules.contains(&r.id)));
    let topics = topics.map(|t| format!("[{} {}]({})", t.number, t.name, link_to(&t.path)));
    let drills = rules.iter().flat_map(|r| &r.proof.drills).cloned();
    let tests = rules.iter().flat_map(|r| &r.proof.tests);
    let tests = tests.map(|t| format!("[{t}]({})", link_to(test_file(t, tree))));
    let filetests = rules.iter().flat_map(|r| &r.proof.filetests);
    let filetests = filetests.map(|f| format!("[{f}]({})", link_to(&format!("filetests/{f}"))));
    format!(
        "| [{}]({}#{}) | {} | {} | {} | {} |",
        section.name,
        link_to(section.path),
        make_anchor(&section.name),
        section.rules.join(", "),
        join_unique(topics),
        join_unique(drills),
        join_unique(tests.chain(filetests))
    )
}

/// Joins texts with commas in their order, each once.
fn join_unique(texts: impl Iterator<Item = String>) -> String {
    let mut unique: Vec<String> = Vec::new();
    for text in texts {
        if !unique.contains(&text) {
            unique.push(text);
        }
    }
    unique.join(", ")
}
