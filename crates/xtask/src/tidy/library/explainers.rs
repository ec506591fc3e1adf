//! Reads the explainers, and checks that each leads to the topics and cards of its row in the table of
//! the library, and to rules and drills.

use super::super::Problem;
use super::super::markdown::{
    Section, find_links, read_comment, read_title, resolve_link, split_paragraphs, split_sections,
};
use super::super::page::{Row, marked_rows};
use super::Library;
use super::references::{CARDS, find_claims, find_drills, find_rule_ids};
use super::tables::{README, read_status};
use super::topics::{check_numbers, check_rule_ids, read_number};
use crate::tree::Tree;

/// The folder of the explainers.
pub(super) const EXPLAINERS: &str = "docs/library/explainers/";
/// Number of explainers, which are 01, 02 and so on.
pub(super) const EXPLAINER_COUNT: usize = 8;
/// The section that states invariants by the ids of their rules.
const INVARIANTS: &str = "What must hold";
/// The section that names drills.
const DRILLS: &str = "Break it";
/// Minimum number of rules of an explainer.
const MIN_RULES: usize = 2;

/// An explainer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Explainer {
    /// Two digits, such as `06`.
    pub(super) number: String,
    /// Name such as `failure-modes`.
    pub(super) name: String,
    pub(super) title: String,
    pub(super) path: String,
    pub(super) status: String,
    /// Numbers of the topics to which the page leads.
    pub(super) topics: Vec<String>,
    /// Names of the cards to which the page leads.
    pub(super) cards: Vec<String>,
    /// The rules that [`INVARIANTS`] names.
    pub(super) rules: Vec<String>,
    /// The drills that the page names.
    pub(super) drills: Vec<String>,
    /// The claims that the page links.
    pub(super) claims: Vec<String>,
}

/// Reads all explainers, ordered by number.
pub(super) fn read_explainers(tree: &Tree, found: &mut Vec<Problem>) -> Vec<Explainer> {
    let mut explainers = Vec::new();
    // The folder also has a page with questions to the explainers, whose name has no number.
    let is_page = |path: &str| {
        let name = path.strip_prefix(EXPLAINERS).unwrap_or_default();
        name.starts_with(|c: char| c.is_ascii_digit()) && name.ends_with(".md")
    };
    for file in tree.files.iter().filter(|f| is_page(&f.path)) {
        let Some((number, name)) = read_number(file, "explainer", found) else { continue };
        let mut read_list = |key: &str| match read_comment(&file.text, key) {
            Some((_, list)) => split_list(list),
            None => {
                let message = format!("repeat the row of {README} below the title: <!-- {key}: … -->");
                found.push(Problem::new(&file.path, 1, message));
                Vec::new()
            }
        };
        let (topics, cards) = (read_list("topics"), read_list("cards"));
        let mut drills: Vec<String> = Vec::new();
        for (_, drill) in find_drills(&file.text) {
            if !drills.contains(&drill) {
                drills.push(drill);
            }
        }
        let sections = split_sections(&file.text, 2);
        let invariants = sections.iter().find(|s| s.name == INVARIANTS);
        explainers.push(Explainer {
            number,
            name,
            title: read_title(&file.text).to_string(),
            status: read_status(&file.path, &file.text, found),
            topics,
            cards,
            rules: invariants.map(|s| find_rule_ids(&s.text())).unwrap_or_default(),
            drills,
            claims: find_claims(&file.path, &file.text),
            path: file.path.clone(),
        });
    }
    explainers.sort_by(|a, b| a.number.cmp(&b.number));
    explainers
}

/// Checks that every explainer exists once and leads where the table of the library says.
pub(super) fn check(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    let numbers = library.explainers.iter().map(|e| (e.number.as_str(), e.path.as_str()));
    check_numbers("explainer", EXPLAINERS, EXPLAINER_COUNT, &numbers.collect::<Vec<_>>(), found);
    check_table(library, tree, found);
    for explainer in &library.explainers {
        check_links(explainer, library, tree, found);
        check_rule_ids(tree, &explainer.path, &library.rules, found);
        let text = tree.file_text(&explainer.path).unwrap_or_default();
        let sections = split_sections(text, 2);
        if let (Some(section), true) =
            (sections.iter().find(|s| s.name == INVARIANTS), explainer.status == "ready")
        {
            check_invariants(explainer, section, found);
        }
        for (line, drill) in find_drills(text) {
            if !library.drills.iter().any(|row| row.id == drill) {
                let message = format!("there is no drill `{drill}`: correct the id");
                found.push(Problem::new(&explainer.path, line, message));
            }
        }
        if let Some(section) = sections.iter().find(|s| s.name == DRILLS)
            && explainer.status == "ready"
            && find_drills(&section.text()).is_empty()
        {
            let message = format!("{DRILLS} names no drill: write `tessera drill` with its id");
            found.push(Problem::new(&explainer.path, section.line, message));
        }
    }
}

/// Checks that the comments of the pages repeat the rows of the table, and the other way round.
fn check_table(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    let mut listed: Vec<String> = Vec::new();
    for Row { cells, line } in marked_rows(tree, README, "explainers", found) {
        let [name, topics, cards] = cells[..] else {
            found.push(Problem::new(README, line, "the row needs explainer, topics, cards"));
            continue;
        };
        listed.push(name.to_string());
        let Some(page) = library.explainers.iter().find(|e| format!("{} {}", e.number, e.name) == name)
        else {
            let message = format!("no page has `<!-- explainer: {name} -->`: write it, or correct the name");
            found.push(Problem::new(README, line, message));
            continue;
        };
        for (key, listed, own) in [("topics", topics, &page.topics), ("cards", cards, &page.cards)] {
            if split_list(listed) != *own {
                let message =
                    format!("the comment lists other {key} than {README}: write <!-- {key}: {listed} -->");
                found.push(Problem::new(&page.path, 1, message));
            }
        }
    }
    for page in &library.explainers {
        let name = format!("{} {}", page.number, page.name);
        if !listed.contains(&name) {
            let message = format!("add a row for `{name}` to the table of explainers in {README}");
            found.push(Problem::new(&page.path, 1, message));
        }
    }
}

/// Checks that the page links every topic and card of its comments.
fn check_links(explainer: &Explainer, library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    let text = tree.file_text(&explainer.path).unwrap_or_default();
    let links: Vec<String> =
        find_links(text).iter().filter_map(|l| resolve_link(&explainer.path, l.path)).collect();
    let mut report = |message: String| found.push(Problem::new(&explainer.path, 1, message));
    for number in &explainer.topics {
        match library.topics.iter().find(|t| t.number == *number) {
            Some(topic) if links.contains(&topic.path) => {}
            Some(topic) => report(format!("link topic {number}, which is {}", topic.path)),
            None => report(format!("there is no topic {number}: correct the comment")),
        }
    }
    for name in &explainer.cards {
        if !links.contains(&format!("{CARDS}{name}.md")) {
            report(format!("link the card {name}, which the comment lists"));
        }
    }
}

/// Checks that every list item, table row and sentence of the section names a rule. A paragraph that
/// ends with a colon introduces a list.
fn check_invariants(explainer: &Explainer, section: &Section<'_>, found: &mut Vec<Problem>) {
    if explainer.rules.len() < MIN_RULES {
        let message = format!("{INVARIANTS} names fewer than {MIN_RULES} rules: name them by their ids");
        found.push(Problem::new(&explainer.path, section.line, message));
    }
    let mut statements: Vec<(usize, String)> = Vec::new();
    for (line, paragraph) in split_paragraphs(&section.text()) {
        let line = section.line + line;
        if paragraph.starts_with('-') {
            statements.push((line, paragraph));
        } else if !paragraph.ends_with(':') && !paragraph.starts_with(['#', '|']) {
            statements.extend(paragraph.split_inclusive(". ").map(|sentence| (line, sentence.to_string())));
        }
    }
    statements.extend(section.rows().iter().map(|row| (row.line, row.cells.join(" "))));
    for (line, statement) in statements.iter().filter(|(_, s)| find_rule_ids(s).is_empty()) {
        let start: String = statement.chars().take(40).collect();
        let message = format!("\"{start}\" names no rule: add its id, or move the sentence elsewhere");
        found.push(Problem::new(&explainer.path, *line, message));
    }
}

/// Splits a list with commas.
fn split_list(list: &str) -> Vec<String> {
    list.split(',').map(|part| part.trim().to_string()).filter(|part| !part.is_empty()).collect()
}
