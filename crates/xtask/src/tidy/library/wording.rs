//! Looks for sentences that state an invariant without naming the rule or the code that holds it.

use super::super::Problem;
use super::super::codes::find_ids;
use super::super::markdown::split_paragraphs;
use super::rule_ids;
use crate::tree::Tree;

/// Phrases with which pages state what must be equal on all ranks.
const PHRASES: [&str; 6] = [
    "same on every rank",
    "must be equal",
    "identical across ranks",
    "stable across chunks",
    "every rank must",
    "must match on all",
];
/// The folders of the pages that are checked.
const FOLDERS: [&str; 4] =
    ["docs/manual/", "docs/guides/", "docs/library/topics/", "docs/library/explainers/"];

/// Reports the paragraphs of the pages that contain a phrase and neither a rule id nor a code.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let is_page = |p: &str| FOLDERS.iter().any(|folder| p.starts_with(folder)) && p.ends_with(".md");
    for file in tree.files.iter().filter(|f| is_page(&f.path)) {
        for (line, paragraph) in split_paragraphs(&file.text) {
            let phrase = PHRASES.iter().find(|p| paragraph.to_lowercase().contains(**p));
            if let Some(phrase) = phrase
                && rule_ids(&paragraph).next().is_none()
                && find_ids(&paragraph).next().is_none()
            {
                let message =
                    format!("\"{phrase}\" states an invariant: name its rule, such as D-01, or its code");
                found.push(Problem::new(&file.path, line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invariant_names_its_rule_or_its_code() {
        let page = "# A\nThe seed is the same on\nevery rank.\n\nIt must be equal (D-01).\n\n| every rank must | T0740 |\n\
- Identical across ranks.\n\n```\nmust be equal\n```\n";
        let mut found = Vec::new();
        check(&Tree::from_files(&[("docs/guides/a.md", page), ("docs/design/b.md", page)]), &mut found);
        let lines: Vec<usize> = found.iter().map(|p| p.line).collect();
        assert_eq!(lines, [2, 8]);
    }
}
