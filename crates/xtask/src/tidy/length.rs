//! Checks the lengths of files and functions against the table in `ARCHITECTURE.md`.
//!
//! A long file usually hides two subjects, and a long function hides steps without names. The row of
//! an exception states why this one has only one.

use proc_macro2::{Delimiter, TokenTree};

use super::Problem;
use super::page::{ARCHITECTURE, LongCode};
use super::source::{Source, first_line, is_group, is_punct, word};

/// Maximum number of lines of a source without its tests.
const MAX_FILE_LINES: usize = 600;
/// Maximum number of lines of a function, from its `fn` to its closing brace.
const MAX_FUNCTION_LINES: usize = 80;

/// Checks all code except tests against the table of the page.
pub(super) fn check(sources: &[Source<'_>], table: &[LongCode], found: &mut Vec<Problem>) {
    let mut needed = vec![false; table.len()];
    for s in sources {
        let file = std::iter::once((0, None, s.code_line_count(), MAX_FILE_LINES));
        let functions = s.find_tokens(function).filter(|(line, ..)| !s.in_test(*line));
        let functions = functions.map(|(line, name, lines)| (line, Some(name), lines, MAX_FUNCTION_LINES));
        for (line, function, lines, limit) in file.chain(functions).filter(|(.., lines, limit)| lines > limit)
        {
            match table.iter().position(|row| row.path == s.path && row.function == function) {
                Some(row) => needed[row] = true,
                None => {
                    let what = function.map_or("the file".to_string(), |f| format!("`{f}`"));
                    let message = format!(
                        "{what} has {lines} lines, {limit} are allowed: split it, or add a row with a reason to {ARCHITECTURE}"
                    );
                    found.push(Problem::new(s.path, line, message));
                }
            }
        }
    }
    for (row, _) in table.iter().zip(needed).filter(|(_, needed)| !needed) {
        let what = row.function.as_ref().map_or(row.path.clone(), |f| format!("`{f}` of {}", row.path));
        found.push(Problem::new(ARCHITECTURE, row.line, format!("{what} is not too long: remove the row")));
    }
}

/// Returns first line, name and number of lines of the function with a body whose `fn` is the token
/// at `i`.
fn function(list: &[TokenTree], i: usize) -> Option<(usize, String, usize)> {
    let name = word(list, i).filter(|keyword| *keyword == "fn").and_then(|_| word(list, i + 1))?;
    let ends = |at: &usize| is_punct(list, *at, ';') || is_group(list, *at, Delimiter::Brace);
    let TokenTree::Group(body) = list.get((i..list.len()).find(ends)?)? else { return None };
    let first = first_line(list[i].span());
    Some((first, name.to_string(), body.span_close().end().line + 1 - first))
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;
    use crate::tree::Tree;

    const PATH: &str = "crates/a/src/a.rs";

    fn row(function: Option<&str>) -> LongCode {
        LongCode { path: PATH.into(), function: function.map(String::from), line: 7 }
    }

    fn problems(text: &str, table: &[LongCode]) -> Vec<String> {
        let tree = Tree::from_files(&[(PATH, text)]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&sources, table, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_file_has_at_most_600_lines_without_its_tests() {
        let file = |n: usize| format!("//! a\n{}", "const _: () = ();\n".repeat(n - 1));
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "const _: () = ();\n".repeat(600));
        assert_eq!(problems(&(file(600) + &tests), &[]), Vec::<String>::new());
        assert!(problems(&file(601), &[])[0].contains("the file has 601 lines"));
        assert_eq!(problems(&file(601), &[row(None)]), Vec::<String>::new());
        assert_eq!(
            problems(&file(600), &[row(None)]),
            ["ARCHITECTURE.md:7: crates/a/src/a.rs is not too long: remove the row"]
        );
    }

    #[test]
    fn a_function_has_at_most_80_lines() {
        let function =
            |n: usize| format!("/// Doc.\n#[inline]\npub fn f() {{\n{}}}\n", "a();\n".repeat(n - 2));
        assert_eq!(problems(&function(80), &[]), Vec::<String>::new());
        assert!(problems(&function(81), &[])[0].starts_with("crates/a/src/a.rs:3: `f` has 81 lines"));
        assert!(problems(&format!("impl A {{\n{}}}\n", function(81)), &[])[0].contains("`f` has 81"));
        assert!(problems(&format!("trait A {{\n{}}}\n", function(81).replace("pub ", "")), &[]).len() == 1);
        assert_eq!(problems(&function(81), &[row(Some("f"))]), Vec::<String>::new());
        assert!(problems(&function(80), &[row(Some("f"))])[0].contains("`f` of crates/a/src/a.rs is not"));
        let test = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", function(81));
        assert_eq!(problems(&test, &[]), Vec::<String>::new());
    }
}
