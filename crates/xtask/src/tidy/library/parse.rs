//! Reads the rules of a page, and checks that their ids are complete and never reused.

use std::collections::BTreeMap;

use super::super::Problem;
use super::super::codes::find_ids;
use super::references::{find_claims, find_names_after};
use super::{ProofNames, RULE_PAGES, Rule, RulePage, rule_ids};

/// Lines after which the rules name something that must not happen.
const FORBIDDEN_MARKERS: [&str; 3] = ["Forbidden:", "## Do not", "## Patterns to avoid"];
/// Lines after which they name something that must hold.
const MUST_MARKERS: [&str; 3] = ["Must:", "## Do", "## Graphs and communication libraries"];
/// What comes before the claims on which a rule rests.
const WHY: &str = " Why: ";

/// Reads the rules of a page. A rule is a list item or a table row that begins with its id in bold.
pub(super) fn read_rules(page: RulePage, text: &str, found: &mut Vec<Problem>) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let (mut in_scope, mut is_forbidden, mut is_open) = (page.section.is_none(), false, false);
    for (line, number) in text.lines().zip(1..) {
        if let (Some(heading), Some(section)) = (line.strip_prefix("## "), page.section) {
            in_scope = heading.trim() == section;
        }
        if FORBIDDEN_MARKERS.contains(&line) || MUST_MARKERS.contains(&line) {
            is_forbidden = FORBIDDEN_MARKERS.contains(&line);
        }
        if let (true, true, Some(rule)) = (is_open, line.starts_with("  "), rules.last_mut()) {
            rule.text = format!("{} {}", rule.text, line.trim());
            continue;
        }
        is_open = line.starts_with("- ") && in_scope;
        let Some(stated) = in_scope.then(|| statement(line)).flatten() else { continue };
        match split_id(page, &stated) {
            Some((id, text)) => {
                let (id, text) = (id.to_string(), text.to_string());
                rules.push(Rule { id, page, line: number, is_forbidden, text, ..Rule::default() });
            }
            None => {
                is_open = false;
                let message = format!("give the rule the next id of this page: **{}-NN**", page.prefix);
                found.push(Problem::new(page.path, number, message));
            }
        }
    }
    for rule in &mut rules {
        if let Some((text, why)) = rule.text.clone().split_once(WHY) {
            rule.claims = find_claims(page.path, why);
            if rule.claims.is_empty() {
                let message = format!("{} gives a reason without a claim: link the claim of a card", rule.id);
                found.push(Problem::new(page.path, rule.line, message));
            }
            rule.text = text.to_string();
        }
        rule.proof = read_proof(&rule.text);
    }
    rules
}

/// Returns a list item or a table row as one text, without the syntax of Markdown; `None` for other
/// lines, headers of tables included.
fn statement(line: &str) -> Option<String> {
    if let Some(item) = line.strip_prefix("- ") {
        return Some(item.to_string());
    }
    let cells: Vec<&str> = line.strip_prefix('|')?.trim_end_matches('|').split('|').map(str::trim).collect();
    match cells[..] {
        ["rule", ..] => None,
        [first, ..] if first.starts_with("---") => None,
        [id, text, proof] => {
            let (proof, why) = proof.split_once(WHY).unwrap_or((proof, ""));
            let proof = proof.trim_end_matches(['.', ' ']).replace(" (", ", ").replace(')', "");
            let why = if why.is_empty() { String::new() } else { format!("{WHY}{why}") };
            Some(format!("{id} {text} ({proof}){why}"))
        }
        _ => None,
    }
}

/// Splits `**D-03** text` into id and text.
fn split_id(page: RulePage, stated: &str) -> Option<(&str, &str)> {
    let (id, text) = stated.strip_prefix("**")?.split_once("** ")?;
    (id.starts_with(page.prefix) && rule_ids(id).next() == Some(id)).then_some((id, text))
}

/// Finds the names of the proof in a rule: codes, and names in back quotes after the words drill,
/// test and filetest, including further names of the same list.
fn read_proof(text: &str) -> ProofNames {
    let mut proof = ProofNames { codes: read_codes(text), ..ProofNames::default() };
    if let Some((_, reason)) = text.split_once("(no proof: ") {
        proof.missing = reason.split_once(')').map(|(reason, _)| reason.to_string());
    }
    proof.drills = find_names_after(text, &["drill", "drills"]);
    proof.tests = find_names_after(text, &["test", "tests"]);
    proof.filetests = find_names_after(text, &["filetest", "filetests"]);
    proof
}

/// Returns the codes of a rule. `T0301 to T0308` stands for all codes between the two.
fn read_codes(text: &str) -> Vec<String> {
    let mut codes: Vec<String> = Vec::new();
    let mut last_end = 0;
    for (at, id) in find_ids(text) {
        let number = |id: &str| id[1..].parse::<u32>().unwrap_or_default();
        let from = match codes.last() {
            Some(last) if text[last_end..at].trim() == "to" => number(last) + 1,
            _ => number(id),
        };
        codes.extend((from..=number(id)).map(|n| format!("T{n:04}")));
        last_end = at + id.len();
    }
    codes
}

/// Checks that the ids of each page are 1, 2, 3 and so on. An id that is no longer used is retired.
pub(super) fn check_ids(rules: &[Rule], retired: &[String], found: &mut Vec<Problem>) {
    let mut first: BTreeMap<&str, &Rule> = BTreeMap::new();
    for rule in rules {
        if let Some(other) = first.insert(&rule.id, rule) {
            let message =
                format!("{} is also the rule of line {}: take the next free id", rule.id, other.line);
            found.push(Problem::new(rule.page.path, rule.line, message));
        }
        if retired.contains(&rule.id) {
            let message = format!("{} is retired and is never used again: take the next free id", rule.id);
            found.push(Problem::new(rule.page.path, rule.line, message));
        }
    }
    for page in RULE_PAGES {
        let number = |id: &str| id.strip_prefix(page.prefix)?.strip_prefix('-')?.parse::<usize>().ok();
        let used: Vec<usize> = rules
            .iter()
            .map(|r| r.id.as_str())
            .chain(retired.iter().map(String::as_str))
            .filter_map(number)
            .collect();
        for n in (1..=used.iter().copied().max().unwrap_or_default()).filter(|n| !used.contains(n)) {
            let id = format!("{}-{n:02}", page.prefix);
            let message = format!("{id} is missing: list it under the retired ids in docs/library/README.md");
            found.push(Problem::new(page.path, 0, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: RulePage = RulePage { path: "docs/manual/a.md", prefix: 'D', section: Some("Contract") };

    fn read(text: &str) -> (Vec<Rule>, Vec<Problem>) {
        let mut found = Vec::new();
        (read_rules(PAGE, text, &mut found), found)
    }

    #[test]
    fn rules_are_list_items_of_their_section() {
        let text = "- **D-09** Not here.\n## Contract\n\nMust:\n\n- **D-01** One,\n  two (T0301 to T0303).\n\
\nForbidden:\n\n- **D-02** Three (drills `a` and `b`, test `c`; filetest `d.tir`).\n- Four.\n  More.\n## Next\n- Five.\n";
        let (rules, found) = read(text);
        assert_eq!(rules.len(), 2);
        assert_eq!((rules[0].text.as_str(), rules[0].is_forbidden), ("One, two (T0301 to T0303).", false));
        assert_eq!(rules[0].proof.codes, ["T0301", "T0302", "T0303"]);
        let proof = &rules[1].proof;
        assert!(rules[1].is_forbidden);
        assert_eq!(
            (&proof.drills[..], &proof.tests[..], &proof.filetests[..]),
            (&["a".to_string(), "b".to_string()][..], &["c".to_string()][..], &["d.tir".to_string()][..],)
        );
        assert!(found.len() == 1 && found[0].line == 12, "{found:?}");
    }

    #[test]
    fn rules_are_rows_of_a_table_and_may_lack_a_proof() {
        let page = RulePage { section: None, prefix: 'X', ..PAGE };
        let text = "## Do not\n\n| rule | do not | by |\n| --- | --- | --- |\n| **X-01** | wait | T0301 |\n\
| **X-02** | fail | no proof: rare |\n";
        let rules = read_rules(page, text, &mut Vec::new());
        assert!(rules.iter().all(|r| r.is_forbidden));
        assert_eq!(rules[0].text, "wait (T0301)");
        assert_eq!(rules[1].proof.missing.as_deref(), Some("rare"));
    }

    #[test]
    fn a_rule_ends_with_the_claims_that_give_its_reason() {
        let page = RulePage { section: None, ..PAGE };
        let text = "- **D-01** One (T0301). Why: [nccl-3](../library/cards/n.md#nccl-3) and\n  \
[async-1](../library/cards/a.md#async-1).\n| **D-02** | two | T0302. Why: [nccl-4](../library/cards/n.md#nccl-4). |\n\
- **D-03** Three (T0303). Why: it is so.\n";
        let mut found = Vec::new();
        let rules = read_rules(page, text, &mut found);
        let read: Vec<_> = rules.iter().map(|r| (r.text.as_str(), r.claims.join(" "))).collect();
        assert_eq!(read[0], ("One (T0301).", "nccl-3 async-1".to_string()));
        assert_eq!(read[1], ("two (T0302)", "nccl-4".to_string()));
        assert!(found.len() == 1 && found[0].message.contains("D-03 gives a reason"), "{found:?}");
    }

    #[test]
    fn ids_are_unique_complete_and_not_retired() {
        let text = "## Contract\n- **D-01** a\n- **D-01** b\n- **D-04** c\n- **D-05** d\n";
        let mut found = Vec::new();
        check_ids(&read(text).0, &["D-02".to_string(), "D-05".to_string()], &mut found);
        let messages: Vec<&str> = found.iter().map(|p| p.message.as_str()).collect();
        assert!(
            messages[0].contains("D-01 is also") && messages[1].contains("D-05 is retired"),
            "{messages:?}"
        );
        assert!(messages[2].starts_with("D-03 is missing") && messages.len() == 3, "{messages:?}");
    }
}
