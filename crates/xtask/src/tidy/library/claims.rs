//! Checks that every claim has a user, that every rule about a library of others rests on a claim, and
//! that every rule belongs to a topic.

use super::super::Problem;
use super::references::{find_claim_links, is_claim_id};
use super::{Library, Rule};
use crate::tree::Tree;

/// Words after which a rule rests on what an outside source says.
const OUTSIDE_WORDS: [&str; 7] =
    ["NCCL", "CUDA", "PyTorch", "torch", "Dynamo", "Inductor", "functional collective"];

/// A rule, topic or explainer that links a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User<'a> {
    pub(super) kind: &'static str,
    /// Id of the rule, or number of the topic or explainer.
    pub(super) id: &'a str,
}

/// Returns the users of a claim: rules, then topics, then explainers.
pub(super) fn find_users<'a>(claim: &str, library: &'a Library) -> Vec<User<'a>> {
    let has = |claims: &[String]| claims.iter().any(|c| c == claim);
    let rules = library.rules.iter().filter(|r| has(&r.claims)).map(|r| User { kind: "rule", id: &r.id });
    let topics =
        library.topics.iter().filter(|t| has(&t.claims)).map(|t| User { kind: "topic", id: &t.number });
    let explainers = library.explainers.iter().filter(|e| has(&e.claims));
    let explainers = explainers.map(|e| User { kind: "explainer", id: &e.number });
    rules.chain(topics).chain(explainers).collect()
}

/// Checks the use of every claim, and the claims and topics of every rule.
pub(super) fn check(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    for card in &library.cards {
        for claim in card.claims.iter().filter(|c| find_users(&c.id, library).is_empty()) {
            let message = format!("no rule, topic or explainer uses {}: link it or remove it", claim.id);
            found.push(Problem::new(&card.path, claim.line, message));
        }
    }
    for rule in &library.rules {
        check_rule(rule, library, found);
    }
    // The check of links reports a claim that does not exist.
    for file in tree.files.iter().filter(|f| f.path.starts_with("docs/") && f.path.ends_with(".md")) {
        for link in find_claim_links(&file.path, &file.text) {
            if is_claim_id(&link.text) && link.text != link.id {
                let message = format!("the text {} leads to {}: correct one of them", link.text, link.id);
                found.push(Problem::new(&file.path, link.line, message));
            }
        }
    }
}

/// Checks the claims of a rule, and that a topic has it.
fn check_rule(rule: &Rule, library: &Library, found: &mut Vec<Problem>) {
    let mut report = |message: String| found.push(Problem::new(rule.page.path, rule.line, message));
    let claims = library.cards.iter().flat_map(|c| &c.claims);
    for claim in claims.filter(|c| rule.claims.contains(&c.id) && !c.is_read_again()) {
        let (rule, claim) = (&rule.id, &claim.id);
        report(format!("{rule} rests on {claim}, which nobody read again: read it, or link another claim"));
    }
    if let Some(word) = find_outside_word(&rule.text).filter(|_| rule.claims.is_empty()) {
        let id = &rule.id;
        report(format!("{id} speaks of {word} and rests on no source: end it with `Why: ` and a claim"));
    }
    if !library.topics.iter().any(|t| t.rules.contains(&rule.id)) {
        report(format!("no topic has {}: name it in the section Rules of the nearest topic", rule.id));
    }
}

/// Returns the word of [`OUTSIDE_WORDS`] in a rule. Targets of links and names of tests and files, which
/// stand in back quotes in lower case, are no words.
fn find_outside_word(text: &str) -> Option<&'static str> {
    let prose: String = text
        .split("](")
        .enumerate()
        .map(|(i, part)| {
            let after_target = part.split_once(')').map_or("", |(_, rest)| rest);
            if i == 0 { part } else { after_target }
        })
        .collect();
    OUTSIDE_WORDS.into_iter().find(|word| {
        prose.match_indices(word).any(|(at, _)| {
            let is_inside_word = |c: char| c.is_alphanumeric() || c == '_';
            let end = &prose[at + word.len()..];
            !prose[..at].ends_with(is_inside_word) && !end.starts_with(char::is_alphanumeric)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_outside_libraries_are_found_in_prose() {
        assert_eq!(find_outside_word("With `NCCL_GRAPH_MIXING_SUPPORT=0` it"), Some("NCCL"));
        assert_eq!(find_outside_word("call a functional collective in `torch.compile`"), Some("torch"));
        assert_eq!(find_outside_word("functional collectives"), None);
        assert_eq!(
            find_outside_word("see [x](../crates/tessera-torch/CUDA.rs), test `a_torch_b`, torches"),
            None
        );
    }
}
