//! Checks the diagnostic codes: each is defined once, has an explain page of some length, and is
//! listed by its crate.

use std::collections::{BTreeMap, BTreeSet};

use super::Problem;
use super::rust::{Source, closing_bracket, find_words};
use crate::tree::{Tree, owning_crate};

/// Minimum number of sentences of a page: what is wrong, and what to do.
const MIN_SENTENCES: usize = 2;

/// The place and the explain page of one definition of a code.
struct Definition<'a> {
    path: &'a str,
    line: usize,
    page: String,
}

/// Checks all definitions and all mentions of codes, in sources and pages.
pub(super) fn check(tree: &Tree, sources: &[Source<'_>], found: &mut Vec<Problem>) {
    // The codes in this crate are examples.
    let sources: Vec<&Source<'_>> = sources.iter().filter(|s| s.crate_name() != "xtask").collect();
    let mut defined: BTreeMap<&str, Vec<Definition<'_>>> = BTreeMap::new();
    let mut test_only: BTreeSet<&str> = BTreeSet::new();
    let mut listed: BTreeSet<(&str, &str)> = BTreeSet::new();
    for s in &sources {
        for (at, id) in find_ids(&s.uncommented) {
            if !s.uncommented[..at].trim_end_matches('"').trim_end().ends_with("id:") {
                continue;
            }
            if s.in_test(at) {
                test_only.insert(id);
                continue;
            }
            let page = explain_page(s, at);
            defined.entry(id).or_default().push(Definition { path: s.path, line: s.line_number(at), page });
        }
        for at in find_words(&s.code, "CODES") {
            // `CODES: &[&Code] = &[&a::T0101];`
            let after = s.code[at..].trim_start_matches("CODES");
            if let Some((_, list)) = after.split_once('=').filter(|_| after.starts_with(':')) {
                let list = list.split(';').next().unwrap_or_default();
                listed.extend(find_ids(list).map(|(_, id)| (s.crate_name(), id)));
            }
        }
    }
    for (id, definitions) in &defined {
        let first = &definitions[0];
        for duplicate in &definitions[1..] {
            let message = format!("{id} is also defined at {}:{}: choose another id", first.path, first.line);
            found.push(Problem::new(duplicate.path, duplicate.line, message));
        }
        let sentences = first.page.split_inclusive(['.', '!', '?']).filter(|s| ends_sentence(s)).count();
        if sentences < MIN_SENTENCES {
            let message =
                format!("the page of {id} has {sentences} sentence(s): state what is wrong and what to do");
            found.push(Problem::new(first.path, first.line, message));
        }
        let owner = owning_crate(first.path).unwrap_or_default();
        if !listed.contains(&(owner, *id)) {
            found.push(Problem::new(first.path, first.line, format!("list {id} in the CODES of `{owner}`")));
        }
    }
    let is_known = |id: &str| defined.contains_key(id) || test_only.contains(id);
    for s in &sources {
        for (at, id) in find_ids(s.text).filter(|(_, id)| !is_known(id)) {
            found.push(Problem::new(
                s.path,
                s.line_number(at),
                format!("code {id} is not defined: correct the id"),
            ));
        }
    }
    for f in tree.files.iter().filter(|f| f.path.ends_with(".md")) {
        for (i, line) in f.text.lines().enumerate() {
            for (_, id) in find_ids(line).filter(|(_, id)| !defined.contains_key(id)) {
                found.push(Problem::new(&f.path, i + 1, format!("code {id} is not defined: correct the id")));
            }
        }
    }
}

/// Finds every code id (`T` and four digits, as a whole word) with its offset.
pub(super) fn find_ids(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices('T').map(|(at, _)| at).filter_map(move |at| {
        let id = text.get(at..at + 5)?;
        let is_boundary = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let is_word =
            is_boundary(text[..at].chars().next_back()) && is_boundary(text[at + 5..].chars().next());
        (is_word && id[1..].bytes().all(|b| b.is_ascii_digit())).then_some((at, id))
    })
}

/// Returns the explain page of the definition whose id is at offset `at`: every literal from
/// `page:` to the closing brace.
fn explain_page(s: &Source<'_>, at: usize) -> String {
    let Some(open) = s.code[..at].rfind('{') else { return String::new() };
    let body = &s.uncommented[open..closing_bracket(&s.code, open)];
    body.split_once("page:").map_or(String::new(), |(_, rest)| rest.replace(['"', '\\'], " "))
}

/// Returns whether text up to a full stop is a sentence and not a part of a dotted name.
fn ends_sentence(text: &str) -> bool {
    text.ends_with(['.', '!', '?']) && text.split_whitespace().count() >= 3
}

#[cfg(test)]
mod tests {
    use super::super::rust::parse_sources;
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", text)]);
        let mut found = Vec::new();
        check(&tree, &parse_sources(&tree), &mut found);
        found.into_iter().map(|p| p.message).collect()
    }

    const PAGE: &str = "page: \"It is wrong here. Do this instead.\" };\n";

    #[test]
    fn a_correct_code_passes() {
        let text = format!(
            "pub const CODES: &[&Code] = &[&x::T0101];\nstatic T0101: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}"
        );
        assert_eq!(problems(&text), Vec::<String>::new());
    }

    #[test]
    fn every_mistake_is_reported() {
        let text = format!(
            "pub const CODES: &[&Code] = &[&x::T0101];\n\
static T0101: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}\
static T0102: Code = Code {{ id: \"T0102\", title: \"t\", page: \"It is wrong.\" }};\n\
static B: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}// see T0103\n"
        );
        let found = problems(&text);
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("T0101 is also defined at crates/a/src/lib.rs:2"));
        assert!(found[1].contains("has 1 sentence(s)"));
        assert!(found[2].contains("list T0102"));
        assert!(found[3].contains("code T0103 is not defined"));
    }
}
