//! Checks of the rules of `ARCHITECTURE.md`, `STYLE.md` and the glossary that neither the compiler nor
//! Clippy checks, over the whole tree.
//!
//! Each check reads its table from the page itself, between markers, so that a page and its check
//! cannot disagree.

mod attr_lookups;
mod codes;
mod dependencies;
mod import_cycles;
mod length;
mod library;
mod lints;
mod manifest;
mod manual;
mod markdown;
mod module_tree;
mod page;
mod source;
mod text;
mod unsafe_code;
mod vocabulary;

use std::fmt;

use crate::tree::Tree;
pub(crate) use library::generated_files;

use page::{CrateRow, crate_rows, long_code, unsafe_files};

/// A violation of a rule, printed as `path:line: message`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    path: String,
    line: usize,
    message: String,
}

impl Problem {
    /// Creates a problem at a line of a file; line 0 stands for the whole file. The message ends
    /// with the fix.
    fn new(path: &str, line: usize, message: impl Into<String>) -> Problem {
        Problem { path: path.to_string(), line, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Runs all checks and returns the problems sorted by path and line.
pub(crate) fn find_problems(tree: &Tree) -> Vec<Problem> {
    let mut found = Vec::new();
    let sources = source::parse_sources(tree, &mut found);
    let table = crate_rows(tree, &mut found);
    dependencies::check(tree, &table, &mut found);
    manifest::check(tree, &mut found);
    unsafe_code::check(&sources, &unsafe_files(tree, &mut found), &mut found);
    lints::check(tree, &sources, &table, &mut found);
    import_cycles::check(&sources, &mut found);
    attr_lookups::check(&sources, &mut found);
    length::check(&sources, &long_code(tree, &mut found), &mut found);
    codes::check(tree, &sources, &mut found);
    text::check(tree, &mut found);
    manual::check(tree, &mut found);
    library::check(tree, &mut found);
    vocabulary::check(tree, &mut found);
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_project_is_tidy() {
        let tree = Tree::read(&crate::workspace_root()).unwrap();
        let found = find_problems(&tree);
        let lines: Vec<String> = found.iter().map(Problem::to_string).collect();
        assert!(found.is_empty(), "{} problem(s):\n{}", found.len(), lines.join("\n"));
    }
}
