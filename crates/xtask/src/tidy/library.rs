//! Checks the library: the rules of the operator's manual and of the guide to captured regions, and the
//! topics, explainers and cards that give their reasons.
//!
//! Each rule has an id, names what shows that it holds, is named back by it, and belongs to a topic. A
//! page is the only source of what it states. `cargo xtask library` renders the back map and the data of
//! `tessera explain` from the pages, and this check compares the files byte by byte.

mod backmap;
mod cards;
mod claims;
mod codes_and_drills;
mod crosswalk;
mod data;
mod embedded;
mod explainers;
mod parse;
mod proofs;
mod questions;
mod references;
mod sections;
mod symptoms;
mod tables;
#[cfg(test)]
mod tests;
mod topics;
mod wording;

use std::collections::BTreeMap;

use super::Problem;
use crate::tree::Tree;
use cards::Card;
use codes_and_drills::{CodeRow, DrillRow};
use crosswalk::DesignSection;
use explainers::Explainer;
use questions::Question;
use symptoms::Symptom;
use topics::Topic;

/// A page with rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RulePage {
    path: &'static str,
    /// The first letter of the page's rule ids.
    prefix: char,
    /// The section that contains the rules; `None` if the whole page does.
    section: Option<&'static str>,
}

impl RulePage {
    /// The file stem, by which `tessera explain` names the page.
    fn name(self) -> &'static str {
        let file = self.path.rsplit('/').next().unwrap_or(self.path);
        file.strip_suffix(".md").unwrap_or(file)
    }
}

const fn manual_page(path: &'static str, prefix: char) -> RulePage {
    RulePage { path, prefix, section: Some("Contract") }
}

/// The pages with rules. A page that is missing here or on disk is a problem, so none can vanish.
const RULE_PAGES: [RulePage; 10] = [
    manual_page("docs/manual/control-plane.md", 'C'),
    manual_page("docs/manual/determinism.md", 'D'),
    manual_page("docs/manual/groups.md", 'G'),
    manual_page("docs/manual/kv.md", 'K'),
    manual_page("docs/manual/overlap.md", 'O'),
    manual_page("docs/manual/replay.md", 'R'),
    manual_page("docs/manual/scheduling.md", 'V'),
    manual_page("docs/manual/shutdown.md", 'S'),
    RulePage { path: "docs/manual/compile.md", prefix: 'P', section: None },
    RulePage { path: "docs/guides/captured-regions.md", prefix: 'X', section: None },
];

/// Maximum number of rules that nothing shows. It may only become smaller.
const MAX_UNPROVEN: usize = 4;

/// What a rule names as its proof.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct ProofNames {
    codes: Vec<String>,
    drills: Vec<String>,
    tests: Vec<String>,
    /// Paths below `filetests/`.
    filetests: Vec<String>,
    /// The reason why nothing shows the rule: `(no proof: …)`.
    missing: Option<String>,
}

/// A rule with its id.
#[derive(Debug, Clone, Default)]
struct Rule {
    id: String,
    page: RulePage,
    line: usize,
    /// Whether the rule names something that must not happen.
    is_forbidden: bool,
    /// The sentence without the id, with the names of its proof.
    text: String,
    proof: ProofNames,
    /// The claims that give the reason: `Why: …`.
    claims: Vec<String>,
}

/// All rules, the pages that explain them, and the tables that they refer to.
#[derive(Default)]
struct Library {
    rules: Vec<Rule>,
    drills: Vec<DrillRow>,
    codes: BTreeMap<String, CodeRow>,
    symptoms: Vec<Symptom>,
    /// Status of each page with rules, in the order of [`RULE_PAGES`].
    statuses: Vec<String>,
    topics: Vec<Topic>,
    explainers: Vec<Explainer>,
    cards: Vec<Card>,
    questions: Vec<Question>,
    /// The sections of the design pages.
    design: Vec<DesignSection>,
}

impl Library {
    fn read(tree: &Tree, found: &mut Vec<Problem>) -> Library {
        let mut rules = Vec::new();
        for page in RULE_PAGES {
            match tree.file_text(page.path) {
                Some(text) => rules.extend(parse::read_rules(page, text, found)),
                None => found.push(Problem::new(page.path, 0, "restore this page, or retire its rules")),
            }
        }
        Library {
            topics: topics::read_topics(tree, &rules, found),
            explainers: explainers::read_explainers(tree, found),
            cards: cards::read_cards(tree, found),
            questions: questions::read_questions(tree),
            design: crosswalk::read_sections(tree, found),
            rules,
            drills: codes_and_drills::read_drills(tree),
            codes: codes_and_drills::read_codes(tree),
            symptoms: symptoms::read_symptoms(tree, found),
            statuses: tables::read_statuses(tree, found),
        }
    }

    /// The rules that name a code or one of the drills that end with it.
    fn rules_of_code<'a>(&'a self, code: &'a str) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(move |r| r.proof.codes.iter().any(|c| c == code))
    }

    fn rules_of_drill<'a>(&'a self, drill: &'a str) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(move |r| r.proof.drills.iter().any(|d| d == drill))
    }
}

/// Returns whether the project has the pages; a synthetic project of a test usually has none.
fn has_rule_pages(tree: &Tree) -> bool {
    RULE_PAGES.iter().any(|p| tree.file_text(p.path).is_some())
}

/// Runs every check of the rules.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    if !has_rule_pages(tree) {
        return;
    }
    let library = Library::read(tree, found);
    parse::check_ids(&library.rules, &tables::read_retired_ids(tree, found), found);
    proofs::check(&library, tree, found);
    codes_and_drills::check(&library, tree, found);
    symptoms::check(&library, found);
    questions::check(&library, found);
    crosswalk::check(&library, found);
    wording::check(tree, found);
    tables::check(tree, found);
    cards::check(&library.cards, tree, found);
    sections::check(&library, tree, found);
    topics::check(&library.topics, found);
    explainers::check(&library, tree, found);
    claims::check(&library, tree, found);
    for (path, text) in render_files(&library, tree) {
        if tree.file_text(path) != Some(text.as_str()) {
            found.push(Problem::new(path, 0, "the file is out of date: run `cargo xtask library`"));
        }
    }
}

/// Returns the generated files of the library as path and contents.
pub(crate) fn generated_files(tree: &Tree) -> Vec<(&'static str, String)> {
    render_files(&Library::read(tree, &mut Vec::new()), tree)
}

fn render_files(library: &Library, tree: &Tree) -> Vec<(&'static str, String)> {
    let mut files = vec![
        (backmap::PATH, backmap::render_page(library, tree)),
        (crosswalk::PATH, crosswalk::render_page(library, tree)),
        (crate::tree::LIBRARY_DATA, data::render_json(library)),
    ];
    let pages: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    let embedded = embedded::render_file(tree, &pages);
    files.extend(embedded.map(|text| (embedded::PATH, text)));
    files
}

/// Iterates over the rule ids in a text, such as `D-03`.
fn rule_ids(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('-').filter_map(|(at, _)| {
        let (start, end) = (at.checked_sub(1)?, at + 3);
        let id = text.get(start..end)?;
        let is_known = RULE_PAGES.iter().any(|p| id.starts_with(p.prefix));
        let has_digits = id.bytes().skip(2).all(|b| b.is_ascii_digit());
        let is_inside_word = |c: char| c.is_alphanumeric() || c == '-';
        let is_alone = !text[..start].ends_with(is_inside_word) && !text[end..].starts_with(is_inside_word);
        (is_known && has_digits && is_alone).then_some(id)
    })
}
