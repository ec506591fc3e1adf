//! Checks that a module with child modules is written as `foo.rs` beside `foo/`.
//!
//! With `foo/mod.rs`, an editor shows many tabs of one name, and a file moves when its first child
//! module is added. Below `tests/` cargo would take `foo.rs` for a test.

use std::collections::BTreeSet;

use super::Problem;
use super::exceptions::{MOD_FILES, report_unneeded};
use crate::tree::Tree;

/// Reports every `mod.rs` outside of `tests/`.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    check_except(tree, MOD_FILES, found);
}

fn check_except(tree: &Tree, exceptions: &[&str], found: &mut Vec<Problem>) {
    let mut needed = BTreeSet::new();
    for f in tree.rust_files() {
        let Some(module) = f.path.strip_suffix("/mod.rs").filter(|_| !f.path.contains("/tests/")) else {
            continue;
        };
        needed.insert(f.path.clone());
        if !exceptions.contains(&f.path.as_str()) {
            found.push(Problem::new(&f.path, 0, format!("move the file to {module}.rs")));
        }
    }
    report_unneeded("MOD_FILES", exceptions, &needed, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mod_file_is_allowed_below_tests_only() {
        let files =
            [("crates/a/src/b/mod.rs", ""), ("crates/a/tests/c/mod.rs", ""), ("crates/a/src/d.rs", "")];
        let problems = |exceptions: &[&str]| {
            let mut found = Vec::new();
            check_except(&Tree::from_files(&files), exceptions, &mut found);
            found.iter().map(Problem::to_string).collect::<Vec<_>>()
        };
        assert_eq!(problems(&[]), ["crates/a/src/b/mod.rs: move the file to crates/a/src/b.rs"]);
        assert_eq!(problems(&["crates/a/src/b/mod.rs"]), Vec::<String>::new());
        assert_eq!(problems(&["crates/a/src/b/mod.rs", "crates/a/src/e/mod.rs"]).len(), 1);
    }
}
