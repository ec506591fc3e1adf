//! What the compiler does not check: the rules of `ARCHITECTURE.md` and `STYLE.md`, over the whole tree.
//!
//! The tables that a rule needs stand in those pages between markers and are read from there, so that a page
//! and its check cannot part.

mod arrows;
mod codes;
mod manifest;
mod manual;
mod page;
mod rooms;
mod rust;
mod text;
mod wording;

use std::fmt;

use crate::tree::Tree;
use page::{Room, long_files, rooms, unsafe_files};

/// Something to put right.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Problem {
    path: String,
    line: usize,
    says: String,
}

impl Problem {
    /// At a line of a file, or with line 0 at the file as a whole. `says` ends with what to do.
    fn new(path: &str, line: usize, says: impl Into<String>) -> Problem {
        Problem { path: path.to_string(), line, says: says.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.says),
            line => write!(f, "{}:{line}: {}", self.path, self.says),
        }
    }
}

/// Every problem, in order of path and line.
pub(crate) fn problems(tree: &Tree) -> Vec<Problem> {
    let sources = rust::sources(tree);
    let mut found = Vec::new();
    let table = rooms(tree, &mut found);
    arrows::check(tree, &table, &mut found);
    manifest::check(tree, &mut found);
    rooms::check(&sources, &table, &unsafe_files(tree, &mut found), &mut found);
    codes::check(tree, &sources, &mut found);
    text::check(tree, &long_files(tree, &mut found), &mut found);
    manual::check(tree, &mut found);
    wording::check(tree, &mut found);
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_project_is_tidy() {
        let tree = Tree::read(&crate::root()).unwrap();
        let found = problems(&tree);
        let shown: Vec<String> = found.iter().map(Problem::to_string).collect();
        assert!(found.is_empty(), "{} to put right:\n{}", found.len(), shown.join("\n"));
    }
}
