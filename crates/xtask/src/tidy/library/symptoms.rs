//! Reads the page of symptoms, from which `tessera explain` answers plain words.

use std::collections::BTreeMap;

use super::super::Problem;
use super::super::codes::find_ids;
use super::topics::TOPICS;
use super::{Library, RULE_PAGES};
use crate::tree::Tree;

/// The page of symptoms: one section for each.
pub(super) const PATH: &str = "docs/library/symptoms.md";

/// A problem as a person sees it, with the words for it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Symptom {
    pub(super) title: String,
    pub(super) line: usize,
    /// Lower-case words and phrases that find the symptom.
    pub(super) words: Vec<String>,
    pub(super) what: String,
    pub(super) first: String,
    pub(super) codes: Vec<String>,
    pub(super) drills: Vec<String>,
    /// Stems of pages with rules, and names of topics and explainers.
    pub(super) pages: Vec<String>,
}

/// Reads the sections of the page. Each has the list items Words, What, First, Codes, Drills and
/// Pages.
pub(super) fn read_symptoms(tree: &Tree, found: &mut Vec<Problem>) -> Vec<Symptom> {
    let mut symptoms: Vec<Symptom> = Vec::new();
    let mut items: Vec<(usize, String)> = Vec::new();
    for (line, number) in tree.file_text(PATH).unwrap_or_default().lines().zip(1..) {
        if let Some(title) = line.strip_prefix("## ") {
            symptoms.push(Symptom { title: title.to_string(), line: number, ..Symptom::default() });
        } else if let (Some(item), false) = (line.strip_prefix("- "), symptoms.is_empty()) {
            items.push((symptoms.len() - 1, item.to_string()));
        } else if let (Some(more), Some((_, item))) = (line.strip_prefix("  "), items.last_mut()) {
            *item = format!("{item} {more}");
        }
    }
    for (at, item) in items {
        let symptom = &mut symptoms[at];
        let Some((key, value)) = item.split_once(": ") else { continue };
        let list = || value.split(", ").map(|v| v.trim_matches('`').to_string()).collect();
        match key {
            "Words" => symptom.words = list(),
            "What" => symptom.what = value.to_string(),
            "First" => symptom.first = value.to_string(),
            "Codes" => symptom.codes = find_ids(value).map(|(_, id)| id.to_string()).collect(),
            "Drills" => symptom.drills = list(),
            "Pages" => symptom.pages = link_texts(value),
            _ => {
                let message =
                    format!("unknown item `{key}`: write Words, What, First, Codes, Drills or Pages");
                found.push(Problem::new(PATH, symptom.line, message));
            }
        }
    }
    symptoms
}

/// Returns the texts of the links `[text](target)`.
fn link_texts(value: &str) -> Vec<String> {
    value.split('[').skip(1).filter_map(|l| l.split(']').next()).map(str::to_string).collect()
}

/// Checks that each symptom can be found, says what to do, and names drills and pages that exist.
pub(super) fn check(library: &Library, found: &mut Vec<Problem>) {
    let mut used: BTreeMap<&str, &str> = BTreeMap::new();
    for s in &library.symptoms {
        let mut report = |message: String| found.push(Problem::new(PATH, s.line, message));
        if s.words.is_empty() || s.what.is_empty() || s.first.is_empty() || s.pages.is_empty() {
            report("a symptom needs the items Words, What, First and Pages".to_string());
        }
        for word in &s.words {
            let is_plain = word.chars().all(|c| c.is_lowercase() || c.is_ascii_digit() || c == ' ');
            if !is_plain {
                report(format!("write `{word}` in lower-case letters, digits and spaces"));
            }
            if let Some(other) = used.insert(word, &s.title) {
                report(format!("`{word}` also stands under \"{other}\": leave it at one of them"));
            }
        }
        for drill in s.drills.iter().filter(|d| !library.drills.iter().any(|row| row.id == **d)) {
            report(format!("there is no drill `{drill}`: correct the id"));
        }
        for page in s.pages.iter().filter(|p| !is_page(p, library)) {
            report(format!("`{page}` is no page with rules, no topic and no explainer: correct the name"));
        }
    }
}

/// Whether a name is that of a page with rules, or of a topic or an explainer of the library.
fn is_page(name: &str, library: &Library) -> bool {
    let topics = library.topics.iter().filter(|t| t.path.starts_with(TOPICS)).map(|t| t.name.as_str());
    let explainers = library.explainers.iter().map(|e| e.name.as_str());
    RULE_PAGES.iter().map(|p| p.name()).chain(topics).chain(explainers).any(|page| page == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_one_symptom() {
        let page = "# S\n\nText.\n\n## A run hangs\n\n- Words: hang,\n  no progress\n- What: It waits.\n- First: Look.\n\
- Codes: T0743\n- Drills: `stopped-rank`\n- Pages: [shutdown](../manual/shutdown.md)\n- Other: x\n";
        let mut found = Vec::new();
        let symptoms = read_symptoms(&Tree::from_files(&[(PATH, page)]), &mut found);
        assert_eq!(symptoms.len(), 1);
        let s = &symptoms[0];
        assert_eq!((s.title.as_str(), s.line), ("A run hangs", 5));
        assert_eq!(s.words, ["hang", "no progress"]);
        assert_eq!(
            (&s.codes[0], &s.drills[0], &s.pages[0]),
            (&"T0743".to_string(), &"stopped-rank".to_string(), &"shutdown".to_string(),)
        );
        assert!(found.len() == 1 && found[0].message.contains("`Other`"), "{found:?}");
    }
}
