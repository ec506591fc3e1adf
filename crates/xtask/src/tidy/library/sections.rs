//! Checks the sections of topics, explainers and cards, and what a section of a ready page contains.

use super::super::Problem;
use super::super::markdown::{Section, find_links, resolve_link, split_sections};
use super::Library;
use super::topics::{TOPICS, check_rule_ids};
use crate::tree::Tree;

/// The sections of each kind of page, in this order.
const TOPIC_SECTIONS: [&str; 4] = ["What holds", "Here", "Rules", "Sources"];
const EXPLAINER_SECTIONS: [&str; 5] =
    ["The question", "The picture", "What must hold", "Break it", "Read on"];
const CARD_SECTIONS: [&str; 3] = ["Claims", "What it means here", "What it does not say"];
/// Minimum number of words of *What holds*: fewer explain nothing.
const MIN_WORDS: usize = 120;
/// The folder of the library. A link into it does not show how something is done here.
const LIBRARY: &str = "docs/library/";

/// Checks the sections of every page of the library that people write.
pub(super) fn check(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    for topic in &library.topics {
        let page = Page::new(tree, &topic.path, &topic.status);
        page.check_texts(found);
        // The sections of a page of the manual are checked with the manual.
        if !topic.path.starts_with(TOPICS) {
            continue;
        }
        page.check_names(&TOPIC_SECTIONS, found);
        check_rule_ids(tree, &topic.path, &library.rules, found);
        if page.is_ready {
            check_topic(&page, topic.rules.is_empty(), topic.claims.is_empty(), found);
        }
    }
    for explainer in &library.explainers {
        let page = Page::new(tree, &explainer.path, &explainer.status);
        page.check_texts(found);
        page.check_names(&EXPLAINER_SECTIONS, found);
        let has_command = |s: &&Section<'_>| s.text().contains("tessera ") || s.text().contains("cargo run");
        if let Some(picture) = page.section("The picture").filter(|s| page.is_ready && !has_command(s)) {
            let message = "name the command that draws the picture, such as `tessera plan …`";
            found.push(Problem::new(page.path, picture.line, message));
        }
    }
    for card in &library.cards {
        let page = Page::new(tree, &card.path, &card.status);
        page.check_texts(found);
        page.check_names(&CARD_SECTIONS, found);
    }
}

/// A page with its sections.
struct Page<'a> {
    path: &'a str,
    is_ready: bool,
    sections: Vec<Section<'a>>,
}

impl<'a> Page<'a> {
    fn new(tree: &'a Tree, path: &'a str, status: &str) -> Page<'a> {
        let sections = split_sections(tree.file_text(path).unwrap_or_default(), 2);
        Page { path, is_ready: status == "ready", sections }
    }

    fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// Checks the names and the order of the sections.
    fn check_names(&self, expected: &[&str], found: &mut Vec<Problem>) {
        let names: Vec<&str> = self.sections.iter().map(|s| s.name).collect();
        if names != expected {
            let message = format!("write the sections {}; found {}", expected.join(", "), names.join(", "));
            found.push(Problem::new(self.path, 0, message));
        }
    }

    /// Checks that the sections of a ready page have text.
    fn check_texts(&self, found: &mut Vec<Problem>) {
        for section in self.sections.iter().filter(|s| self.is_ready && s.text().trim().is_empty()) {
            let message = format!("{} is empty: write it, or set the status to draft", section.name);
            found.push(Problem::new(self.path, section.line, message));
        }
    }
}

/// Checks what the sections of a topic contain.
fn check_topic(page: &Page<'_>, lacks_rules: bool, lacks_claims: bool, found: &mut Vec<Problem>) {
    let mut report = |name: &str, is_wrong: &dyn Fn(&Section<'_>) -> bool, message: String| {
        if let Some(section) = page.section(name).filter(|s| is_wrong(s)) {
            found.push(Problem::new(page.path, section.line, message));
        }
    };
    let count_words = |s: &Section<'_>| s.text().split_whitespace().count();
    let words = page.section("What holds").map_or(0, count_words);
    let message = format!("What holds has {words} words: write at least {MIN_WORDS}");
    report("What holds", &|_| words < MIN_WORDS, message);
    let leads_out = |s: &Section<'_>| {
        let text = s.text();
        let targets =
            find_links(&text).iter().filter_map(|l| resolve_link(page.path, l.path)).collect::<Vec<_>>();
        targets.iter().any(|target| !target.starts_with(LIBRARY) && !target.contains(':'))
    };
    let message = "Here links nothing outside of the library: link code, a plan or a record".to_string();
    report("Here", &|s| !leads_out(s), message);
    report("Rules", &|_| lacks_rules, "Rules names no rule: name the nearest by its id".to_string());
    report("Sources", &|_| lacks_claims, "Sources links no claim: link the claims of cards".to_string());
}
