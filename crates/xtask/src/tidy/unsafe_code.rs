//! Checks where `unsafe` stands, and that foreign functions are declared `unsafe`.
//!
//! Clippy refuses an `unsafe` block without a `SAFETY` comment and an `unsafe fn` without a
//! `# Safety` section. It has no list of files, and it accepts a safe pointer to a foreign function.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenTree};

use super::Problem;
use super::page::{ARCHITECTURE, UnsafeFile};
use super::source::{Source, first_line, is_group, word};

/// Roots of a crate that forbid unsafe code for all its files.
const CRATE_ROOTS: [&str; 2] = ["lib.rs", "main.rs"];

/// Checks every source against the table of files that may hold `unsafe`.
pub(super) fn check(sources: &[Source<'_>], unsafe_files: &[UnsafeFile], found: &mut Vec<Problem>) {
    for s in sources {
        check_place(s, unsafe_files, found);
    }
    for row in unsafe_files {
        let holds_unsafe = |s: &Source<'_>| s.path == row.path && !unsafe_lines(s).is_empty();
        if !sources.iter().any(holds_unsafe) {
            let message = format!("{} holds no `unsafe`: remove the row", row.path);
            found.push(Problem::new(ARCHITECTURE, row.line, message));
        }
    }
    check_foreign_functions(sources, found);
}

/// Reports `unsafe` in a file without a row, and a crate without a row that does not forbid it.
fn check_place(s: &Source<'_>, unsafe_files: &[UnsafeFile], found: &mut Vec<Problem>) {
    if unsafe_files.iter().any(|row| row.path == s.path) {
        return;
    }
    for line in unsafe_lines(s) {
        let message = format!(
            "`unsafe` in a file that {ARCHITECTURE} does not list: write safe code, or add a row there with a reason"
        );
        found.push(Problem::new(s.path, line, message));
    }
    let crate_folder = format!("crates/{}/src/", s.crate_name());
    let is_root = s.path.strip_prefix(&crate_folder).is_some_and(|rest| CRATE_ROOTS.contains(&rest));
    let is_unsafe_crate = unsafe_files.iter().any(|row| row.path.starts_with(&crate_folder));
    if is_root && !is_unsafe_crate && !forbids_unsafe(s) {
        found.push(Problem::new(s.path, 0, "write `#![forbid(unsafe_code)]` at the top of the crate"));
    }
}

/// Returns the lines with `unsafe` or with an attribute that allows it, in macros too.
fn unsafe_lines(s: &Source<'_>) -> BTreeSet<usize> {
    let unsafe_line = |list: &[TokenTree], i: usize| {
        let name = word(list, i)?;
        let allows = (name == "allow" || name == "expect")
            && matches!(list.get(i + 1), Some(TokenTree::Group(g)) if g.to_string().contains("unsafe_code"));
        (name == "unsafe" || allows).then(|| first_line(name.span()))
    };
    s.find_tokens(unsafe_line).collect()
}

fn forbids_unsafe(s: &Source<'_>) -> bool {
    s.syntax.attrs.iter().any(|a| {
        a.path().is_ident("forbid")
            && a.meta.require_list().is_ok_and(|list| list.tokens.to_string().contains("unsafe_code"))
    })
}

/// Reports pointers to foreign functions and blocks of foreign functions that are not `unsafe`.
///
/// A safe declaration lets safe code pass any address to the library. A function *defined* here
/// with a foreign ABI may be safe.
fn check_foreign_functions(sources: &[Source<'_>], found: &mut Vec<Problem>) {
    for s in sources {
        for line in s.find_tokens(safe_foreign_declaration) {
            let message = "a foreign function without `unsafe`: write `unsafe extern`, and give each call a SAFETY comment";
            found.push(Problem::new(s.path, line, message));
        }
    }
}

/// Returns the line of a declaration without `unsafe` whose `extern` is the token at `i`.
fn safe_foreign_declaration(list: &[TokenTree], i: usize) -> Option<usize> {
    let is_word = |at: usize, text: &str| word(list, at).is_some_and(|name| name == text);
    if !is_word(i, "extern") || (i > 0 && is_word(i - 1, "unsafe")) {
        return None;
    }
    let after_abi = i + 1 + usize::from(matches!(list.get(i + 1), Some(TokenTree::Literal(_))));
    let is_block = is_group(list, after_abi, Delimiter::Brace);
    let is_pointer = is_word(after_abi, "fn") && is_group(list, after_abi + 1, Delimiter::Parenthesis);
    (is_block || is_pointer).then(|| first_line(list[i].span()))
}

#[cfg(test)]
mod tests {
    use super::super::source::parse_sources;
    use super::*;
    use crate::tree::Tree;

    const PATH: &str = "crates/a/src/lib.rs";

    fn problems(text: &str, is_listed: bool) -> Vec<String> {
        let tree = Tree::from_files(&[(PATH, text)]);
        let rows = if is_listed { vec![UnsafeFile { path: PATH.into(), line: 7 }] } else { Vec::new() };
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        for s in &sources {
            check_place(s, &rows, &mut found);
        }
        check_foreign_functions(&sources, &mut found);
        found.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn unsafe_needs_a_listed_file_and_other_crates_forbid_it() {
        let text = "#![forbid(unsafe_code)]\nfn a() { unsafe { b() } }\n// unsafe\nmacro_rules! m { () => { unsafe fn c() {} } }\n\
#[allow(unsafe_code)]\nfn d() { e(\"unsafe\") }\n";
        let found = problems(text, false);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].starts_with("crates/a/src/lib.rs:2") && found[1].contains("lib.rs:4"), "{found:?}");
        assert!(found[2].contains("lib.rs:5"), "{found:?}");
        assert_eq!(problems(text, true), Vec::<String>::new());
        let unforbidden = problems("fn a() {}\n", false);
        assert!(unforbidden.len() == 1 && unforbidden[0].contains("forbid(unsafe_code)"), "{unforbidden:?}");
    }

    #[test]
    fn a_row_of_a_file_without_unsafe_is_reported() {
        let tree = Tree::from_files(&[(PATH, "fn a() {}\n")]);
        let mut found = Vec::new();
        let sources = parse_sources(&tree, &mut found);
        check(&sources, &[UnsafeFile { path: PATH.into(), line: 7 }], &mut found);
        let is_stale =
            |p: &Problem| p.to_string().starts_with("ARCHITECTURE.md:7: crates/a/src/lib.rs holds no");
        assert!(found.iter().any(is_stale), "{found:?}");
    }

    #[test]
    fn a_foreign_function_is_unsafe() {
        let text = "type A = extern \"C\" fn(*mut u8) -> i32;\ntype B = unsafe extern \"C\" fn(*mut u8) -> i32;\n\
extern \"C\" fn callback(x: i32) {}\nunsafe extern \"C\" { fn c(); }\n\
macro_rules! table { ($($f:ident: ($($arg:ty),*))*) => { struct T { $($f: extern \"C\" fn($($arg),*),)* } } }\n";
        let lines: Vec<String> = problems(text, true);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("lib.rs:1:") && lines[1].contains("lib.rs:5:"), "{lines:?}");
    }
}
