//! Reads the topics: pages of the library about one subject, and the pages of the manual that are a
//! topic as well.

use super::super::Problem;
use super::super::markdown::{read_comment, read_title, split_sections};
use super::references::{find_claims, find_rule_ids};
use super::tables::read_status;
use super::{Rule, rule_ids};
use crate::tree::{File, Tree};

/// The folder of the topics that are not pages of the manual.
pub(super) const TOPICS: &str = "docs/library/topics/";
/// The folder of the pages that may be a topic as well.
const MANUAL: &str = "docs/manual/";
/// Number of topics, which are 01, 02 and so on.
pub(super) const TOPIC_COUNT: usize = 24;

/// A topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Topic {
    /// Two digits, such as `05`.
    pub(super) number: String,
    /// Name such as `cuda-streams`.
    pub(super) name: String,
    pub(super) title: String,
    pub(super) path: String,
    pub(super) status: String,
    /// The rules that the section *Rules* names, or those of the page of the manual.
    pub(super) rules: Vec<String>,
    /// The claims that the page links.
    pub(super) claims: Vec<String>,
}

/// Reads all topics, ordered by number.
pub(super) fn read_topics(tree: &Tree, rules: &[Rule], found: &mut Vec<Problem>) -> Vec<Topic> {
    let mut topics = Vec::new();
    for file in tree.files.iter().filter(|f| is_topic_page(f)) {
        let Some((number, name)) = read_number(file, "topic", found) else { continue };
        let of_page = rules.iter().filter(|r| r.page.path == file.path).map(|r| r.id.clone());
        let sections = split_sections(&file.text, 2);
        let section = sections.iter().find(|s| s.name == "Rules");
        topics.push(Topic {
            number,
            name,
            title: read_title(&file.text).to_string(),
            status: read_status(&file.path, &file.text, found),
            rules: section.map_or(of_page.collect(), |s| find_rule_ids(&s.text())),
            claims: find_claims(&file.path, &file.text),
            path: file.path.clone(),
        });
    }
    topics.sort_by(|a, b| a.number.cmp(&b.number));
    topics
}

/// Whether a page has to be a topic, or says that it is one.
fn is_topic_page(file: &File) -> bool {
    let is_page = |folder: &str| file.path.starts_with(folder) && file.path.ends_with(".md");
    is_page(TOPICS) || is_page(MANUAL) && read_comment(&file.text, "topic").is_some()
}

/// Reads `<!-- key: 05 cuda-streams -->` and compares it with the name of the file, which is
/// `05-cuda-streams.md` outside of the manual.
pub(super) fn read_number(file: &File, key: &str, found: &mut Vec<Problem>) -> Option<(String, String)> {
    let (line, value) = read_comment(&file.text, key).unwrap_or((1, ""));
    let parts = value.split_once(' ').filter(|(number, name)| {
        number.len() == 2
            && number.bytes().all(|b| b.is_ascii_digit())
            && !name.is_empty()
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    });
    let Some((number, name)) = parts else {
        let message = format!("state number and name below the title: <!-- {key}: 05 name-of-it -->");
        found.push(Problem::new(&file.path, line, message));
        return None;
    };
    let expected = format!("/{number}-{name}.md");
    if !file.path.starts_with(MANUAL) && !file.path.ends_with(&expected) {
        let message = format!("`{number} {name}` is not the name of the file: rename one of them");
        found.push(Problem::new(&file.path, line, message));
    }
    Some((number.to_string(), name.to_string()))
}

/// Checks that each number is one topic, so that no page can vanish.
pub(super) fn check(topics: &[Topic], found: &mut Vec<Problem>) {
    let numbers = topics.iter().map(|t| (t.number.as_str(), t.path.as_str()));
    check_numbers("topic", TOPICS, TOPIC_COUNT, &numbers.collect::<Vec<_>>(), found);
}

/// Checks that the numbers 01 to `count` belong to one page each.
pub(super) fn check_numbers(
    kind: &str,
    folder: &str,
    count: usize,
    numbers: &[(&str, &str)],
    found: &mut Vec<Problem>,
) {
    for number in (1..=count).map(|n| format!("{n:02}")) {
        let paths: Vec<&str> = numbers.iter().filter(|(n, _)| **n == number).map(|(_, path)| *path).collect();
        match paths[..] {
            [] => {
                let message = format!("{kind} {number} is missing: restore its page");
                found.push(Problem::new(folder.trim_end_matches('/'), 0, message));
            }
            [_] => {}
            [first, ref others @ ..] => {
                for path in others {
                    let message = format!("{kind} {number} is also {first}: leave the number to one of them");
                    found.push(Problem::new(path, 0, message));
                }
            }
        }
    }
    let is_known = |n: &str| n.parse::<usize>().is_ok_and(|n| (1..=count).contains(&n));
    for (number, path) in numbers.iter().filter(|(n, _)| !is_known(n)) {
        let message = format!("{kind} {number} is not one of 01 to {count:02}: correct the number");
        found.push(Problem::new(path, 0, message));
    }
}

/// Reports the ids in a page that no rule has.
pub(super) fn check_rule_ids(tree: &Tree, path: &str, rules: &[Rule], found: &mut Vec<Problem>) {
    for (line, number) in tree.file_text(path).unwrap_or_default().lines().zip(1..) {
        for id in rule_ids(line).filter(|id| !rules.iter().any(|r| r.id == *id)) {
            found.push(Problem::new(path, number, format!("there is no rule {id}: correct the id")));
        }
    }
}
