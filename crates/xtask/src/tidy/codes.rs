//! Diagnostic codes: each defined once, with a page worth reading, and listed by its crate.

use std::collections::{BTreeMap, BTreeSet};

use super::Problem;
use super::rust::{Source, closing, words};
use crate::tree::{Tree, crate_of};

/// Fewest sentences of a page: what is wrong, and what to do.
const SENTENCES: usize = 2;

struct Definition<'a> {
    path: &'a str,
    line: usize,
    page: String,
}

pub(super) fn check(tree: &Tree, sources: &[Source<'_>], found: &mut Vec<Problem>) {
    // What this crate says of codes are examples.
    let sources: Vec<&Source<'_>> = sources.iter().filter(|s| s.crate_name() != "xtask").collect();
    let mut defined: BTreeMap<&str, Vec<Definition<'_>>> = BTreeMap::new();
    let mut for_tests: BTreeSet<&str> = BTreeSet::new();
    let mut listed: BTreeSet<(&str, &str)> = BTreeSet::new();
    for s in &sources {
        for (at, id) in ids(&s.uncommented) {
            if !s.uncommented[..at].trim_end_matches('"').trim_end().ends_with("id:") {
                continue;
            }
            if s.in_test(at) {
                for_tests.insert(id);
                continue;
            }
            let page = page(s, at);
            defined.entry(id).or_default().push(Definition { path: s.path, line: s.line(at), page });
        }
        for at in words(&s.code, "CODES") {
            // `CODES: &[&Code] = &[&a::T0101];`
            let after = s.code[at..].trim_start_matches("CODES");
            if let Some((_, list)) = after.split_once('=').filter(|_| after.starts_with(':')) {
                let list = list.split(';').next().unwrap_or_default();
                listed.extend(ids(list).map(|(_, id)| (s.crate_name(), id)));
            }
        }
    }
    for (id, places) in &defined {
        let first = &places[0];
        for again in &places[1..] {
            let says = format!("{id} is defined at {}:{} too: take a new id", first.path, first.line);
            found.push(Problem::new(again.path, again.line, says));
        }
        let sentences = first.page.split_inclusive(['.', '!', '?']).filter(|s| ends_sentence(s)).count();
        if sentences < SENTENCES {
            let says =
                format!("the page of {id} has {sentences} sentences: say what is wrong and what to do");
            found.push(Problem::new(first.path, first.line, says));
        }
        let room = crate_of(first.path).unwrap_or_default();
        if !listed.contains(&(room, *id)) {
            found.push(Problem::new(first.path, first.line, format!("list {id} in the CODES of `{room}`")));
        }
    }
    let known = |id: &str| defined.contains_key(id) || for_tests.contains(id);
    for s in &sources {
        for (at, id) in ids(s.text).filter(|(_, id)| !known(id)) {
            found.push(Problem::new(s.path, s.line(at), format!("no code {id} is defined: correct the id")));
        }
    }
    for f in tree.files.iter().filter(|f| f.path.ends_with(".md")) {
        for (i, line) in f.text.lines().enumerate() {
            for (_, id) in ids(line).filter(|(_, id)| !defined.contains_key(id)) {
                found.push(Problem::new(&f.path, i + 1, format!("no code {id} is defined: correct the id")));
            }
        }
    }
}

/// Every `T` with four digits that stands as a word.
pub(super) fn ids(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.match_indices('T').map(|(at, _)| at).filter_map(move |at| {
        let id = text.get(at..at + 5)?;
        let edge = |c: Option<char>| !c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let whole = edge(text[..at].chars().next_back()) && edge(text[at + 5..].chars().next());
        (whole && id[1..].bytes().all(|b| b.is_ascii_digit())).then_some((at, id))
    })
}

/// The page of the definition whose id stands at `at`: every literal from `page:` to the end of the braces.
fn page(s: &Source<'_>, at: usize) -> String {
    let Some(open) = s.code[..at].rfind('{') else { return String::new() };
    let body = &s.uncommented[open..closing(&s.code, open)];
    body.split_once("page:").map_or(String::new(), |(_, rest)| rest.replace(['"', '\\'], " "))
}

/// Whether a piece of text up to a stop is a sentence and not a piece of a name.
fn ends_sentence(piece: &str) -> bool {
    piece.ends_with(['.', '!', '?']) && piece.split_whitespace().count() >= 3
}

#[cfg(test)]
mod tests {
    use super::super::rust::sources;
    use super::*;

    fn said(text: &str) -> Vec<String> {
        let tree = Tree::of(&[("crates/a/src/lib.rs", text)]);
        let mut found = Vec::new();
        check(&tree, &sources(&tree), &mut found);
        found.into_iter().map(|p| p.says).collect()
    }

    const PAGE: &str = "page: \"It is wrong here. Do this instead.\" };\n";

    #[test]
    fn a_code_that_is_in_order_passes() {
        let text = format!(
            "pub const CODES: &[&Code] = &[&x::T0101];\nstatic T0101: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}"
        );
        assert_eq!(said(&text), Vec::<String>::new());
    }

    #[test]
    fn what_is_out_of_order_is_told() {
        let text = format!(
            "pub const CODES: &[&Code] = &[&x::T0101];\n\
static T0101: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}\
static T0102: Code = Code {{ id: \"T0102\", title: \"t\", page: \"It is wrong.\" }};\n\
static B: Code = Code {{ id: \"T0101\", title: \"t\", {PAGE}// see T0103\n"
        );
        let said = said(&text);
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[0].contains("T0101 is defined at crates/a/src/lib.rs:2 too"));
        assert!(said[1].contains("has 1 sentences"));
        assert!(said[2].contains("list T0102"));
        assert!(said[3].contains("no code T0103"));
    }
}
