//! The Rust sources of the tree, parsed by `syn`, with test code separated from other code.
//!
//! A check walks the syntax tree where it needs names and items, and the tokens where it must also
//! see the bodies of macros, which the syntax tree keeps unparsed.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use proc_macro2::{Delimiter, Ident, Span, TokenStream, TokenTree};
use syn::Item;

use super::Problem;
use crate::tree::{Tree, owning_crate};

/// A source file and its syntax tree.
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    pub(super) text: &'a str,
    /// The tokens outside of all delimiters, and the contents of every delimited group.
    pub(super) token_lists: Vec<Vec<TokenTree>>,
    pub(super) syntax: syn::File,
    /// Lines, from 1, of code that is compiled for tests only.
    test_lines: Vec<RangeInclusive<usize>>,
}

impl Source<'_> {
    /// Returns whether a line, from 1, is compiled for tests only.
    pub(super) fn in_test(&self, line: usize) -> bool {
        self.test_lines.iter().any(|lines| lines.contains(&line))
    }

    /// Returns the name of the crate that contains the source.
    pub(super) fn crate_name(&self) -> &str {
        owning_crate(self.path).unwrap_or_default()
    }

    /// Iterates over what `find` returns for each token, given by its list and its index there.
    pub(super) fn find_tokens<'s, T>(
        &'s self,
        find: impl Fn(&'s [TokenTree], usize) -> Option<T>,
    ) -> impl Iterator<Item = T> {
        find_tokens(&self.token_lists, find)
    }

    /// Returns the number of lines that are not compiled for tests only.
    pub(super) fn code_line_count(&self) -> usize {
        let is_test_file = self.test_lines.first().is_some_and(|lines| *lines.end() == usize::MAX);
        let line_count = if is_test_file { 0 } else { self.text.lines().count() };
        (1..=line_count).filter(|line| !self.in_test(*line)).count()
    }

    /// Returns the folder in which the files of the source's child modules lie.
    pub(super) fn module_folder(&self) -> &str {
        match self.path.rsplit_once('/') {
            Some((folder, "lib.rs" | "main.rs" | "mod.rs")) => folder,
            _ => self.path.trim_end_matches(".rs"),
        }
    }
}

/// Parses every Rust source of the tree and reports those that are not Rust.
///
/// Files outside of `src` and separate test modules count as test code.
pub(super) fn parse_sources<'t>(tree: &'t Tree, found: &mut Vec<Problem>) -> Vec<Source<'t>> {
    let mut sources = Vec::new();
    for file in tree.rust_files() {
        match parse_source(&file.path, &file.text) {
            Ok(source) => sources.push(source),
            Err(e) => {
                let message = format!("the file is not valid Rust ({e}): correct it");
                found.push(Problem::new(&file.path, first_line(e.span()), message));
            }
        }
    }
    let test_files: BTreeSet<String> = sources.iter().flat_map(declared_test_modules).collect();
    for s in &mut sources {
        let is_test_module =
            |stem: &String| s.path == format!("{stem}.rs") || s.path.starts_with(&format!("{stem}/"));
        if s.path.split('/').nth(2) != Some("src") || test_files.iter().any(is_test_module) {
            s.test_lines = vec![1..=usize::MAX];
        }
    }
    sources
}

/// Returns the line, from 1, at which a span begins.
pub(super) fn first_line(span: Span) -> usize {
    span.start().line
}

/// Returns the word at an index of a list of tokens, or `None` for another token.
pub(super) fn word(list: &[TokenTree], at: usize) -> Option<&Ident> {
    match list.get(at)? {
        TokenTree::Ident(name) => Some(name),
        _ => None,
    }
}

/// Returns whether the token at an index is this punctuation.
pub(super) fn is_punct(list: &[TokenTree], at: usize, c: char) -> bool {
    matches!(list.get(at), Some(TokenTree::Punct(p)) if p.as_char() == c)
}

/// Returns whether the token at an index is a group in these delimiters.
pub(super) fn is_group(list: &[TokenTree], at: usize, delimiter: Delimiter) -> bool {
    matches!(list.get(at), Some(TokenTree::Group(g)) if g.delimiter() == delimiter)
}

/// Returns the tokens outside of all delimiters and the contents of every delimited group, in the
/// order in which they begin.
pub(super) fn split_groups(tokens: TokenStream) -> Vec<Vec<TokenTree>> {
    let mut lists = Vec::new();
    add_groups(tokens, &mut lists);
    lists
}

fn add_groups(tokens: TokenStream, lists: &mut Vec<Vec<TokenTree>>) {
    let list: Vec<TokenTree> = tokens.into_iter().collect();
    let groups: Vec<TokenStream> = list
        .iter()
        .filter_map(|token| match token {
            TokenTree::Group(group) => Some(group.stream()),
            _ => None,
        })
        .collect();
    lists.push(list);
    groups.into_iter().for_each(|group| add_groups(group, lists));
}

/// Parses a source and finds its test-only lines.
fn parse_source<'a>(path: &'a str, text: &'a str) -> syn::Result<Source<'a>> {
    let tokens: TokenStream = text.parse()?;
    let token_lists = split_groups(tokens.clone());
    let is_test_file = token_lists[0]
        .get(..3)
        .is_some_and(|head| is_punct(head, 0, '#') && is_punct(head, 1, '!') && is_test_condition(&head[2]));
    let test_lines = match is_test_file {
        true => vec![1..=usize::MAX],
        false => find_tokens(&token_lists, test_item_lines).collect(),
    };
    Ok(Source { path, text, token_lists, syntax: syn::parse2(tokens)?, test_lines })
}

/// Iterates over what `find` returns for each token, given by its list and its index there.
fn find_tokens<'s, T>(
    lists: &'s [Vec<TokenTree>],
    find: impl Fn(&'s [TokenTree], usize) -> Option<T>,
) -> impl Iterator<Item = T> {
    lists.iter().flat_map(move |list| (0..list.len()).filter_map(|i| find(list, i)).collect::<Vec<_>>())
}

/// Returns the lines of the item or statement under `#[cfg(test)]` whose `#` is the token at `i`.
fn test_item_lines(list: &[TokenTree], i: usize) -> Option<RangeInclusive<usize>> {
    if !is_punct(list, i, '#') || !is_test_condition(list.get(i + 1)?) {
        return None;
    }
    let end = list[i + 2..].iter().find_map(|token| match token {
        TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => Some(body.span_close()),
        TokenTree::Punct(p) if p.as_char() == ';' => Some(p.span()),
        _ => None,
    })?;
    Some(first_line(list[i].span())..=end.end().line)
}

/// Returns whether a token is the group of an attribute that restricts an item to tests.
fn is_test_condition(token: &TokenTree) -> bool {
    let TokenTree::Group(attribute) = token else { return false };
    // Most attributes are doc comments, which need not become text.
    let is_cfg =
        matches!(attribute.stream().into_iter().next(), Some(TokenTree::Ident(name)) if name == "cfg");
    let condition = if is_cfg { attribute.stream().to_string().replace(' ', "") } else { String::new() };
    condition == "cfg(test)" || condition.starts_with("cfg(all(test,")
}

/// Lists the paths, without `.rs`, of the modules that a source declares for tests only.
fn declared_test_modules(s: &Source<'_>) -> Vec<String> {
    let declared = |item: &Item| match item {
        Item::Mod(module) if module.content.is_none() && s.in_test(first_line(module.mod_token.span)) => {
            Some(format!("{}/{}", s.module_folder(), module.ident))
        }
        _ => None,
    };
    s.syntax.items.iter().filter_map(declared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_items_are_found_inline_and_in_separate_files() {
        let text = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nmod tests { fn b() {} }\nfn c() {}\n\
#[cfg(test)]\nuse x::{y, z};\nimpl D {\n    #[cfg(test)]\n    fn e() {}\n}\nmod f {\n    #[cfg(test)]\n    fn g() {}\n}\n";
        let s = parse_source("crates/a/src/lib.rs", text).unwrap();
        let test_lines: Vec<usize> = (1..=15).filter(|line| s.in_test(*line)).collect();
        assert_eq!(test_lines, [2, 3, 4, 6, 7, 9, 10, 13, 14]);
        assert_eq!(s.code_line_count(), 6);
        let tree = Tree::from_files(&[
            ("crates/a/src/lib.rs", "//! .\n#[cfg(test)]\nmod proofs;\n"),
            ("crates/a/src/proofs.rs", "fn p() {}"),
            ("crates/a/src/parse.rs", "#[cfg(test)]\nmod tests;\n"),
            ("crates/a/src/parse/tests.rs", "fn q() {}"),
            ("crates/a/src/other.rs", "#[cfg(not(test))]\nfn r() {}"),
            ("crates/a/tests/t.rs", "fn s() {}"),
        ]);
        let all: Vec<bool> = parse_sources(&tree, &mut Vec::new()).iter().map(|s| s.in_test(1)).collect();
        assert_eq!(all, [false, true, true, true, false, true]);
    }

    #[test]
    fn a_source_that_is_not_rust_is_reported_at_its_line() {
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", "fn a() {}\nfn ) {}\n")]);
        let mut found = Vec::new();
        assert!(parse_sources(&tree, &mut found).is_empty());
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains("not valid Rust"), "{}", found[0]);
    }
}
