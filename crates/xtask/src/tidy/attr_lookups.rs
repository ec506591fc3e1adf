//! Checks that only `tessera-ir` looks up attributes and keyed operands of ops by name.
//!
//! A misspelt name reads as an absent attribute, and the caller's default then replaces the value
//! that the op has. The typed views of `tessera-ir` have no such default.

use proc_macro2::{Delimiter, TokenTree};

use super::Problem;
use super::source::{Source, first_line, is_group, is_punct, word};

/// The crate that owns the op table and reads ops by it.
const OWNER: &str = "tessera-ir";
/// Methods that take the name of an attribute or operand.
const LOOKUPS: &[&str] = &["float_attr", "int_attr", "ints_attr", "keyed_operand", "str_attr"];
/// The map of an op's attributes, and the methods of the map that look up a name.
const ATTR_MAP: &str = "attrs";
const MAP_LOOKUPS: &[&str] = &["contains_key", "get"];

/// Checks the code of all crates except the owner's, without tests.
pub(super) fn check(sources: &[Source<'_>], found: &mut Vec<Problem>) {
    for s in sources.iter().filter(|s| s.crate_name() != OWNER) {
        for (line, name) in s.find_tokens(lookup).filter(|(line, _)| !s.in_test(*line)) {
            let message = format!("`{name}` looks up by name: read the op through a view of {OWNER}");
            found.push(Problem::new(s.path, line, message));
        }
    }
}

/// Returns line and name of the lookup whose method name is the token at `i`.
fn lookup(list: &[TokenTree], i: usize) -> Option<(usize, String)> {
    let method = word(list, i)?;
    let is_after = |c: char| i > 0 && is_punct(list, i - 1, c);
    let is_called = is_group(list, i + 1, Delimiter::Parenthesis);
    let line = first_line(method.span());
    // A path such as `Op::int_attr` may be called or passed on.
    if LOOKUPS.iter().any(|l| method == l) && (is_after(':') || (is_after('.') && is_called)) {
        return Some((line, method.to_string()));
    }
    let is_of_map = i > 1 && word(list, i - 2).is_some_and(|map| map == ATTR_MAP);
    let is_map_lookup = MAP_LOOKUPS.iter().any(|l| method == l) && is_after('.') && is_called && is_of_map;
    is_map_lookup.then(|| (line, format!("{ATTR_MAP}.{method}")))
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;
    use crate::tree::Tree;

    fn problems(path: &str, text: &str) -> Vec<String> {
        let tree = Tree::from_files(&[(path, text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&sources, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_lookup_by_name_is_reported_outside_of_its_crate() {
        let text = "fn f(op: &Op) {\n    op.int_attr(\"a\");\n    op.attrs.get(\"a\");\n    op.attrs().len();\n    \
v.map(Op::str_attr);\n    assert!(op\n        .keyed_operand(\"a\"));\n    op.attrs.contains_key(\"a\");\n    map.get(\"a\");\n    \
op.attrs.insert(\"a\", 1);\n    let int_attr = 1;\n}\n#[cfg(test)]\nmod tests {\n    fn f() { op.int_attr(\"a\"); }\n}\n";
        let path = "crates/a/src/lib.rs";
        let lines: Vec<String> =
            problems(path, text).iter().map(|p| p.split(':').nth(1).unwrap_or_default().into()).collect();
        assert_eq!(lines, ["2", "3", "8", "5", "7"]);
        assert_eq!(problems("crates/tessera-ir/src/lib.rs", text), Vec::<String>::new());
    }
}
