//! Checks that only `tessera-ir` looks up attributes and keyed operands of ops by name.
//!
//! A misspelt name reads as an absent attribute, and the caller's default then replaces the value
//! that the op has. The typed views of `tessera-ir` have no such default.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenTree};

use super::Problem;
use super::exceptions::{ATTR_LOOKUP_FILES, report_unneeded};
use super::source::{Source, first_line};

/// The crate that owns the op table and reads ops by it.
const OWNER: &str = "tessera-ir";
/// Methods that take the name of an attribute or operand.
const LOOKUPS: &[&str] = &["float_attr", "int_attr", "ints_attr", "keyed_operand", "str_attr"];
/// The map of an op's attributes, and the methods of the map that look up a name.
const ATTR_MAP: &str = "attrs";
const MAP_LOOKUPS: &[&str] = &["contains_key", "get"];

/// Checks the code of all crates except the owner's, without tests.
pub(super) fn check(sources: &[Source<'_>], found: &mut Vec<Problem>) {
    check_except(sources, ATTR_LOOKUP_FILES, found);
}

fn check_except(sources: &[Source<'_>], exceptions: &[&str], found: &mut Vec<Problem>) {
    let mut needed = BTreeSet::new();
    for s in sources.iter().filter(|s| s.crate_name() != OWNER) {
        for list in &s.token_lists {
            for (line, name) in (0..list.len()).filter_map(|i| lookup(list, i)) {
                if s.in_test(line) {
                    continue;
                }
                needed.insert(s.path.to_string());
                if !exceptions.contains(&s.path) {
                    let message = format!("`{name}` looks up by name: read the op through a view of {OWNER}");
                    found.push(Problem::new(s.path, line, message));
                }
            }
        }
    }
    report_unneeded("ATTR_LOOKUP_FILES", exceptions, &needed, found);
}

/// Returns line and name of the lookup whose method name is the token at `i`.
fn lookup(list: &[TokenTree], i: usize) -> Option<(usize, String)> {
    let word = |at: usize| match list.get(at) {
        Some(TokenTree::Ident(name)) => Some(name.to_string()),
        _ => None,
    };
    let method = word(i)?;
    let is_after = |c: char| matches!(i.checked_sub(1).map(|at| &list[at]), Some(TokenTree::Punct(p)) if p.as_char() == c);
    let is_called =
        matches!(list.get(i + 1), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
    // A path such as `Op::int_attr` may be called or passed on.
    let is_lookup = LOOKUPS.contains(&method.as_str()) && (is_after(':') || (is_after('.') && is_called));
    let is_map_lookup = MAP_LOOKUPS.contains(&method.as_str())
        && is_called
        && is_after('.')
        && i.checked_sub(2).and_then(word).as_deref() == Some(ATTR_MAP);
    let line = first_line(list[i].span());
    match (is_lookup, is_map_lookup) {
        (true, _) => Some((line, method)),
        (_, true) => Some((line, format!("{ATTR_MAP}.{method}"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;
    use crate::tree::Tree;

    fn problems(path: &str, text: &str, exceptions: &[&str]) -> Vec<String> {
        let tree = Tree::from_files(&[(path, text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check_except(&sources, exceptions, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_lookup_by_name_is_reported_outside_of_its_crate() {
        let text = "fn f(op: &Op) {\n    op.int_attr(\"a\");\n    op.attrs.get(\"a\");\n    op.attrs().len();\n    \
v.map(Op::str_attr);\n    assert!(op\n        .keyed_operand(\"a\"));\n    op.attrs.contains_key(\"a\");\n    map.get(\"a\");\n    \
op.attrs.insert(\"a\", 1);\n    let int_attr = 1;\n}\n#[cfg(test)]\nmod tests {\n    fn f() { op.int_attr(\"a\"); }\n}\n";
        let path = "crates/a/src/lib.rs";
        let lines: Vec<String> = problems(path, text, &[])
            .iter()
            .map(|p| p.split(':').nth(1).unwrap_or_default().into())
            .collect();
        assert_eq!(lines, ["2", "3", "8", "5", "7"]);
        assert_eq!(problems("crates/tessera-ir/src/lib.rs", text, &[]), Vec::<String>::new());
        assert_eq!(problems(path, text, &[path]), Vec::<String>::new());
        let unneeded = problems(path, "fn f() {}", &[path]);
        assert!(unneeded.len() == 1 && unneeded[0].contains("follows the rule"), "{unneeded:?}");
    }
}
