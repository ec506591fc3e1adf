//! Reads the seven questions of the manual with their answers.

use super::super::Problem;
use super::super::markdown::{find_links, split_sections};
use super::Library;
use super::references::find_names_after;
use crate::tree::Tree;

/// The page with the questions.
const PATH: &str = "docs/manual/README.md";
/// The section with the questions.
const SECTION: &str = "Seven questions";
/// Number of questions, which are Q1, Q2 and so on.
const QUESTION_COUNT: usize = 7;

/// A question that a team asks after its first distributed failure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Question {
    /// Id such as `Q1`.
    pub(super) id: String,
    pub(super) line: usize,
    pub(super) question: String,
    pub(super) answer: String,
    pub(super) drills: Vec<String>,
    /// Names of the pages with the full answer.
    pub(super) pages: Vec<String>,
}

/// Reads the table of questions: `Q1: …?`, the short answer, and links to the pages.
pub(super) fn read_questions(tree: &Tree) -> Vec<Question> {
    let sections = split_sections(tree.file_text(PATH).unwrap_or_default(), 2);
    let rows = sections.iter().find(|s| s.name == SECTION).map(|s| s.rows()).unwrap_or_default();
    let questions = rows.into_iter().filter_map(|row| match row.cells[..] {
        [question, answer, pages] => {
            let (id, question) = question.split_once(": ")?;
            Some(Question {
                id: id.to_string(),
                line: row.line,
                question: question.to_string(),
                answer: answer.to_string(),
                drills: find_names_after(answer, &["drill", "drills"]),
                pages: find_links(pages).iter().map(|l| l.text.to_string()).collect(),
            })
        }
        _ => None,
    });
    questions.collect()
}

/// Checks that every question exists and names a drill and a page with rules.
pub(super) fn check(library: &Library, found: &mut Vec<Problem>) {
    let ids: Vec<&str> = library.questions.iter().map(|q| q.id.as_str()).collect();
    let expected: Vec<String> = (1..=QUESTION_COUNT).map(|n| format!("Q{n}")).collect();
    if ids != expected {
        let message = format!("{SECTION} has the rows {}: write {}", ids.join(", "), expected.join(", "));
        found.push(Problem::new(PATH, 0, message));
    }
    for question in &library.questions {
        let mut report = |message: String| found.push(Problem::new(PATH, question.line, message));
        if question.drills.is_empty() || question.pages.is_empty() {
            report(format!("{} needs a drill and a page: name both", question.id));
        }
        for drill in question.drills.iter().filter(|d| !library.drills.iter().any(|row| row.id == **d)) {
            report(format!("there is no drill `{drill}`: correct the id"));
        }
    }
}
