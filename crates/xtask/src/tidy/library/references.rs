//! Finds what the text of a page refers to: rules, claims of cards, and drills.

use super::super::manual::drill_ids;
use super::super::markdown::{find_links, resolve_link, split_paragraphs};
use super::rule_ids;

/// The folder of the cards.
pub(super) const CARDS: &str = "docs/library/cards/";

/// A link to a claim of a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClaimLink {
    pub(super) line: usize,
    /// The text of the link, which repeats the id.
    pub(super) text: String,
    pub(super) id: String,
}

/// Returns the ids of the rules in a text in their order, each once. `P-15 to P-20` stands for all ids
/// between the two.
pub(super) fn find_rule_ids(text: &str) -> Vec<String> {
    let plain = text.replace(['*', '`'], "");
    let mut ids: Vec<String> = Vec::new();
    let mut last: Option<(&str, usize)> = None;
    for id in rule_ids(&plain) {
        // The ids are slices of the text, so their distance to its begin is their offset.
        let at = id.as_ptr() as usize - plain.as_ptr() as usize;
        let from = match last {
            Some((first, end)) if plain[end..at].trim() == "to" && first[..2] == id[..2] => {
                parse_number(first) + 1
            }
            _ => parse_number(id),
        };
        for id in (from..=parse_number(id)).map(|n| format!("{}{n:02}", &id[..2])) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        last = Some((id, at + id.len()));
    }
    ids
}

/// Returns the links of a page that lead to a claim.
pub(super) fn find_claim_links(page: &str, text: &str) -> Vec<ClaimLink> {
    let links = find_links(text).into_iter().filter_map(|link| {
        let path = resolve_link(page, link.path).filter(|path| path.starts_with(CARDS))?;
        let id = link.anchor.filter(|id| is_claim_id(id) && path.ends_with(".md"))?.to_string();
        Some(ClaimLink { line: link.line, text: link.text.to_string(), id })
    });
    links.collect()
}

/// Returns the ids of the claims that a page links, each once.
pub(super) fn find_claims(page: &str, text: &str) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    for link in find_claim_links(page, text) {
        if !ids.contains(&link.id) {
            ids.push(link.id);
        }
    }
    ids
}

/// Returns the drills that a page names, each with its line: the ids of `tessera drill`, and names in
/// back quotes after the word drill.
pub(super) fn find_drills(text: &str) -> Vec<(usize, String)> {
    let commands = (1..).zip(text.lines()).flat_map(|(number, line)| {
        drill_ids(line).into_iter().map(move |id| (number, id.to_string())).collect::<Vec<_>>()
    });
    let mut found: Vec<(usize, String)> = commands.collect();
    for (line, paragraph) in split_paragraphs(text) {
        let names = find_names_after(&paragraph, &["drill", "drills"]);
        found.extend(names.into_iter().map(|name| (line, name)));
    }
    found
}

/// Returns the names in back quotes after one of some words, including further names of the same list.
pub(super) fn find_names_after(text: &str, words: &[&str]) -> Vec<String> {
    let (mut names, mut is_list) = (Vec::new(), false);
    for (i, piece) in text.split('`').enumerate() {
        if i % 2 == 1 {
            if is_list {
                names.push(piece.to_string());
            }
            continue;
        }
        let word = piece.trim_end().rsplit(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        let continues = is_list && matches!(piece.trim(), "," | "and" | ", and");
        is_list = words.contains(&word.to_lowercase().as_str()) || continues;
    }
    names
}

/// Whether a text has the form of the id of a claim, such as `nccl-3`.
pub(super) fn is_claim_id(text: &str) -> bool {
    text.rsplit_once('-').is_some_and(|(prefix, number)| {
        let is_word = prefix.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        !prefix.is_empty() && is_word && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
    })
}

/// Returns the number of a rule id.
fn parse_number(id: &str) -> usize {
    id[2..].parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_rules_names_all_of_them() {
        assert_eq!(
            find_rule_ids("**P-15** to **P-17**, D-01, P-16 and X-02 to D-04"),
            ["P-15", "P-16", "P-17", "D-01", "X-02", "D-04"]
        );
    }

    #[test]
    fn claims_and_drills_of_a_page_are_found() {
        let page = "docs/library/topics/05-a.md";
        let text = "[nccl-3](../cards/n.md#nccl-3), [card](../cards/n.md), [x](../cards/n.md#claims)\n\
[nccl-3](../cards/n.md#nccl-3)\n\nThe drills `a-b` and\n`c` show it.\n```\ntessera drill d\n```\n";
        assert_eq!(find_claims(page, text), ["nccl-3"]);
        assert_eq!(find_claim_links(page, text).iter().map(|l| l.line).collect::<Vec<_>>(), [1, 2]);
        let drills = find_drills(text);
        assert_eq!(drills, [(7, "d".to_string()), (4, "a-b".to_string()), (4, "c".to_string())]);
    }
}
