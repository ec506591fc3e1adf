//! The codes of the verifier and of the runtime, and the drills: where each is shown, and that each
//! stands on a page.

use std::collections::BTreeMap;

use super::super::Problem;
use super::super::codes::find_ids;
use super::Library;
use crate::tree::Tree;

/// The page that lists every drill.
const DRILLS: &str = "docs/reference/drills.md";
/// The page that lists every tripwire.
const TRIPWIRES: &str = "docs/reference/tripwires.md";
/// The files that define the codes, of which each must stand on a page, with the place that raises
/// them if they are no tripwires.
const CODE_FILES: [(&str, &str); 2] = [
    ("crates/tessera-verify/src/codes.rs", "verifier"),
    ("crates/tessera-runtime/src/codes.rs", "before a run"),
];

/// A row of the table of drills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DrillRow {
    pub(super) id: String,
    /// The code with which the drill ends; `None` for a measurement.
    pub(super) code: Option<String>,
    /// `rank 1`, or `no rank`.
    pub(super) rank: String,
    pub(super) place: String,
    pub(super) fault: String,
    /// Stem of the manual page.
    pub(super) page: String,
}

/// A code, the places that raise it, and its page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CodeRow {
    pub(super) places: String,
    /// Stem of the page that states what to do, which a tripwire has.
    pub(super) page: Option<String>,
}

/// Reads the rows of the page of drills, in its order.
pub(super) fn read_drills(tree: &Tree) -> Vec<DrillRow> {
    rows(tree, DRILLS)
        .filter_map(|cells| match cells[..] {
            [id, code, rank, place, fault, _, page] => Some(DrillRow {
                id: id.strip_prefix('`')?.strip_suffix('`')?.to_string(),
                code: find_ids(code).next().map(|(_, code)| code.to_string()),
                rank: if rank == "—" { "no rank".to_string() } else { format!("rank {rank}") },
                place: place.to_string(),
                fault: fault.to_string(),
                page: link_text(page)?,
            }),
            _ => None,
        })
        .collect()
}

/// Reads the codes of [`CODE_FILES`], and their places from the page of tripwires.
pub(super) fn read_codes(tree: &Tree) -> BTreeMap<String, CodeRow> {
    let mut codes = BTreeMap::new();
    for (path, place) in CODE_FILES {
        for line in tree.file_text(path).unwrap_or_default().lines() {
            // A definition in `codes!` begins with its id: `T0301: "title",`.
            if let Some((0, id)) = find_ids(line.trim()).next()
                && line.trim()[id.len()..].starts_with(": ")
            {
                codes.insert(id.to_string(), CodeRow { places: place.to_string(), page: None });
            }
        }
    }
    for cells in rows(tree, TRIPWIRES) {
        if let [id, _, places, page] = cells[..]
            && let Some(row) = codes.get_mut(id)
        {
            *row = CodeRow { places: places.to_string(), page: link_text(page) };
        }
    }
    codes
}

/// Iterates over the cells of every table row of a page.
fn rows<'a>(tree: &'a Tree, path: &str) -> impl Iterator<Item = Vec<&'a str>> {
    let lines = tree.file_text(path).unwrap_or_default().lines();
    lines
        .filter_map(|l| Some(l.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").map(str::trim).collect()))
}

/// Returns `text` of `[text](target)`.
fn link_text(link: &str) -> Option<String> {
    Some(link.strip_prefix('[')?.split_once(']')?.0.to_string())
}

/// Checks that every drill shows a rule, and that every code stands on a page.
pub(super) fn check(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    for drill in library.drills.iter().filter(|d| library.rules_of_drill(&d.id).next().is_none()) {
        let page = format!("docs/manual/{}.md", drill.page);
        found.push(Problem::new(&page, 0, format!("name the drill `{}` as the proof of a rule", drill.id)));
    }
    if library.codes.is_empty() && tree.contains(CODE_FILES[0].0) {
        let message = "no code was found here: adapt `read_codes` to the form of the definitions".to_string();
        found.push(Problem::new(CODE_FILES[0].0, 0, message));
    }
    for code in library.codes.keys().filter(|c| pages_of(c, tree).next().is_none()) {
        let message =
            format!("{code} stands on no page of docs/manual or docs/guides: state what it rejects");
        found.push(Problem::new("docs/manual/README.md", 0, message));
    }
}

/// The paths of the pages of the manual and of the guides that name a code.
pub(super) fn pages_of<'a>(code: &'a str, tree: &'a Tree) -> impl Iterator<Item = &'a str> {
    let is_page = |p: &str| p.starts_with("docs/manual/") || p.starts_with("docs/guides/");
    tree.files.iter().filter(move |f| is_page(&f.path) && f.text.contains(code)).map(|f| f.path.as_str())
}

/// The paths of the filetests that expect a code.
pub(super) fn filetests_of<'a>(code: &'a str, tree: &'a Tree) -> impl Iterator<Item = &'a str> {
    let files = tree.files.iter().filter(|f| f.path.starts_with("filetests/") && f.path.ends_with(".tir"));
    files.filter(move |f| f.text.contains(code)).map(|f| f.path.as_str())
}

/// Returns whether a drill ends with the code, a filetest expects it, or a test names it.
pub(super) fn is_shown(code: &str, library: &Library, tree: &Tree) -> bool {
    let names_it = |path: &str, text: &str| {
        let tests =
            if path.contains("/tests/") { Some(text) } else { text.split_once("#[cfg(test)]").map(|t| t.1) };
        tests.is_some_and(|t| t.contains(code))
    };
    library.drills.iter().any(|d| d.code.as_deref() == Some(code))
        || filetests_of(code, tree).next().is_some()
        || tree.rust_files().any(|f| names_it(&f.path, &f.text))
}
