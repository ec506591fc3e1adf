//! The tables of `ARCHITECTURE.md` and `STYLE.md` that tidy obeys.

use super::Problem;
use crate::tree::Tree;

/// The page with the tables of crates and of `unsafe`.
pub(super) const ARCHITECTURE: &str = "ARCHITECTURE.md";
/// The page with the table of long files.
pub(super) const STYLE: &str = "STYLE.md";

/// What a crate is for, which decides who may need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Holds a part of the work; needs rooms alone.
    Room,
    /// Where people and programs come in.
    Door,
    /// Serves those who work on the project; nothing but tests may need it.
    Workshop,
}

/// A row of the table of crates.
#[derive(Debug, Clone)]
pub(super) struct Room {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Crates it may use; `None` for any room, door or workshop.
    pub(super) may_use: Option<Vec<String>>,
    /// Whether the same input must give the same bytes: no I/O, environment, clock or thread.
    pub(super) pure: bool,
    pub(super) line: usize,
}

/// A row of the table of long files.
#[derive(Debug)]
pub(super) struct LongFile {
    pub(super) path: String,
    /// A list of like things may be as long as it must.
    pub(super) list: bool,
    pub(super) line: usize,
}

/// The crates of [`ARCHITECTURE`].
pub(super) fn rooms(tree: &Tree, found: &mut Vec<Problem>) -> Vec<Room> {
    let mut out = Vec::new();
    for (line, cells) in rows(tree, ARCHITECTURE, "crates", found) {
        let [name, kind, may_use, pure] = &cells[..] else {
            found.push(Problem::new(ARCHITECTURE, line, "the row needs crate, kind, may use, pure"));
            continue;
        };
        let kind = match kind.as_str() {
            "room" => Kind::Room,
            "door" => Kind::Door,
            "workshop" => Kind::Workshop,
            other => {
                let says = format!("`{other}` is no kind of crate: write room, door or workshop");
                found.push(Problem::new(ARCHITECTURE, line, says));
                continue;
            }
        };
        let words = |s: &str| s.split(',').map(|w| bare(w).to_string()).collect::<Vec<_>>();
        let may_use = match may_use.as_str() {
            "anything" => None,
            "nothing" => Some(Vec::new()),
            some => Some(words(some)),
        };
        out.push(Room { name: bare(name).to_string(), kind, may_use, pure: pure == "pure", line });
    }
    out
}

/// Files that may hold `unsafe`.
pub(super) fn unsafe_files(tree: &Tree, found: &mut Vec<Problem>) -> Vec<String> {
    let mut out = Vec::new();
    for (line, cells) in rows(tree, ARCHITECTURE, "unsafe", found) {
        let path = cells.first().map_or("", |c| bare(c)).to_string();
        if !tree.has(&path) {
            found.push(Problem::new(ARCHITECTURE, line, format!("{path} is not there: remove the row")));
        }
        out.push(path);
    }
    out
}

/// Files that may be long.
pub(super) fn long_files(tree: &Tree, found: &mut Vec<Problem>) -> Vec<LongFile> {
    let mut out = Vec::new();
    for (line, cells) in rows(tree, STYLE, "long", found) {
        match &cells[..] {
            [path, kind, reason] if !reason.is_empty() && matches!(kind.as_str(), "list" | "whole") => {
                out.push(LongFile { path: bare(path).to_string(), list: kind == "list", line });
            }
            _ => found.push(Problem::new(STYLE, line, "the row needs file, kind (whole or list) and reason")),
        }
    }
    out
}

/// Rows of the table between `<!-- tidy:NAME -->` and `<!-- /tidy:NAME -->`, with their line numbers.
fn rows(tree: &Tree, page: &str, name: &str, found: &mut Vec<Problem>) -> Vec<(usize, Vec<String>)> {
    let (open, close) = (format!("<!-- tidy:{name} -->"), format!("<!-- /tidy:{name} -->"));
    let text = tree.text(page).unwrap_or_default();
    let lines = || text.lines().enumerate();
    let from = lines().find(|(_, l)| l.trim() == open).map(|(i, _)| i);
    let to = lines().find(|(_, l)| l.trim() == close).map(|(i, _)| i);
    let (Some(from), Some(to)) = (from, to) else {
        found.push(Problem::new(page, 0, format!("put a table between `{open}` and `{close}`")));
        return Vec::new();
    };
    // The header and the line under it are for people.
    lines()
        .filter(|(i, l)| (from..to).contains(i) && l.starts_with('|'))
        .skip(2)
        .map(|(i, l)| (i + 1, l.trim().trim_matches('|').split('|').map(|c| c.trim().to_string()).collect()))
        .collect()
}

/// Without the back quotes, and without a link around it.
fn bare(cell: &str) -> &str {
    let cell = cell.trim();
    let cell = cell.strip_prefix('[').and_then(|c| c.split(']').next()).unwrap_or(cell);
    cell.trim_matches('`')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_and_a_bad_row_is_named() {
        let page = "<!-- tidy:crates -->\n\n| a | b | c | d |\n|---|---|---|---|\n\
| [`x`](crates/x) | room | `y`, `z` | pure |\n| `w` | barn | nothing | |\n<!-- /tidy:crates -->\n";
        let mut found = Vec::new();
        let table = rooms(&Tree::of(&[(ARCHITECTURE, page)]), &mut found);
        assert_eq!(table.len(), 1);
        assert_eq!((table[0].name.as_str(), table[0].pure), ("x", true));
        assert_eq!(table[0].may_use.as_deref(), Some(&["y".to_string(), "z".to_string()][..]));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 6);
        assert!(found[0].says.contains("barn"));
    }
}
