//! Checks the diagnostic codes: each is defined once, has an explain page of some length, and is
//! listed by its crate.

use std::collections::{BTreeMap, BTreeSet};
use std::slice;

use proc_macro2::TokenTree;
use syn::LitStr;

use super::Problem;
use super::source::{Source, first_line, is_punct, split_groups, word};
use crate::tree::{Tree, owning_crate};

/// Minimum number of sentences of a page: what is wrong, and what to do.
const MIN_SENTENCES: usize = 2;

/// One `Code { id: …, page: … }` of a source.
struct Definition<'a> {
    path: &'a str,
    line: usize,
    id: String,
    page: String,
    in_test: bool,
}

/// Checks all definitions and all mentions of codes, in sources and pages.
pub(super) fn check(tree: &Tree, sources: &[Source<'_>], found: &mut Vec<Problem>) {
    // The codes in this crate are examples.
    let sources: Vec<&Source<'_>> = sources.iter().filter(|s| s.crate_name() != "xtask").collect();
    let mut definitions = Vec::new();
    let mut listed: BTreeSet<(&str, String)> = BTreeSet::new();
    for s in &sources {
        definitions.extend(s.find_tokens(definition).map(|(line, id, page)| Definition {
            path: s.path,
            line,
            id,
            page,
            in_test: s.in_test(line),
        }));
        listed.extend(s.find_tokens(listed_names).flatten().map(|id| (s.crate_name(), id)));
    }
    let mut defined: BTreeMap<&str, &Definition<'_>> = BTreeMap::new();
    for d in definitions.iter().filter(|d| !d.in_test) {
        if let Some(first) = defined.get(d.id.as_str()) {
            let message =
                format!("{} is also defined at {}:{}: choose another id", d.id, first.path, first.line);
            found.push(Problem::new(d.path, d.line, message));
            continue;
        }
        check_definition(d, &listed, found);
        defined.insert(&d.id, d);
    }
    let is_known_to_code = |id: &str| definitions.iter().any(|d| d.id == id);
    for s in &sources {
        report_unknown_ids(s.path, s.text, &is_known_to_code, found);
    }
    for f in tree.files.iter().filter(|f| f.path.ends_with(".md")) {
        report_unknown_ids(&f.path, &f.text, &|id| defined.contains_key(id), found);
    }
}

/// Checks the length of a code's page, and that its crate lists the code.
fn check_definition(d: &Definition<'_>, listed: &BTreeSet<(&str, String)>, found: &mut Vec<Problem>) {
    let mut report = |message| found.push(Problem::new(d.path, d.line, message));
    let sentences = d.page.split_inclusive(['.', '!', '?']).filter(|s| ends_sentence(s)).count();
    if sentences < MIN_SENTENCES {
        report(format!(
            "the page of {} has {sentences} sentence(s): state what is wrong and what to do",
            d.id
        ));
    }
    let owner = owning_crate(d.path).unwrap_or_default();
    if !listed.contains(&(owner, d.id.clone())) {
        report(format!("list {} in the CODES of `{owner}`", d.id));
    }
}

/// Reports the ids of a text that no definition has.
fn report_unknown_ids(path: &str, text: &str, is_known: &dyn Fn(&str) -> bool, found: &mut Vec<Problem>) {
    for (i, line) in text.lines().enumerate() {
        for (_, id) in find_ids(line).filter(|(_, id)| !is_known(id)) {
            found.push(Problem::new(path, i + 1, format!("code {id} is not defined: correct the id")));
        }
    }
}

/// Returns line, id and page of the definition whose field `id` has its name at the token at `i`.
fn definition(list: &[TokenTree], i: usize) -> Option<(usize, String, String)> {
    let id = field_text(list, i, "id")?;
    let page = (0..list.len()).find_map(|at| field_text(list, at, "page"))?;
    let is_code = find_ids(&id).any(|found| found == (0, id.as_str()));
    is_code.then(|| (first_line(list[i].span()), id, page))
}

/// Returns the contents of all string literals in the value of the field with the name at the token
/// at `i`, or `None` if no field of this name stands there.
fn field_text(list: &[TokenTree], i: usize, name: &str) -> Option<String> {
    let is_field = word(list, i).is_some_and(|n| n == name) && is_punct(list, i + 1, ':');
    let value = is_field.then(|| list[i + 2..].split(|t| is_punct(slice::from_ref(t), 0, ',')).next())??;
    let literals = all_tokens(value).into_iter().filter_map(|token| match token {
        TokenTree::Literal(literal) => syn::parse_str::<LitStr>(&literal.to_string()).ok(),
        _ => None,
    });
    Some(literals.map(|literal| literal.value()).collect())
}

/// Returns the names in the value of the constant `CODES` whose name is the token at `i`.
fn listed_names(list: &[TokenTree], i: usize) -> Option<Vec<String>> {
    let is_constant = i > 0 && word(list, i - 1)? == "const" && word(list, i)? == "CODES";
    let item = is_constant.then(|| list[i..].split(|t| is_punct(slice::from_ref(t), 0, ';')).next())??;
    let names = all_tokens(item).into_iter().filter(|token| matches!(token, TokenTree::Ident(_)));
    Some(names.map(|name| name.to_string()).collect())
}

/// Returns tokens and the contents of their groups.
fn all_tokens(tokens: &[TokenTree]) -> Vec<TokenTree> {
    split_groups(tokens.iter().cloned().collect()).concat()
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

/// Returns whether text up to a full stop is a sentence and not a part of a dotted name.
fn ends_sentence(text: &str) -> bool {
    text.ends_with(['.', '!', '?']) && text.split_whitespace().count() >= 3
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&tree, &sources, &mut found);
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
        assert!(found[0].contains("has 1 sentence(s)"));
        assert!(found[1].contains("list T0102"));
        assert!(found[2].contains("T0101 is also defined at crates/a/src/lib.rs:2"));
        assert!(found[3].contains("code T0103 is not defined"));
    }
}
