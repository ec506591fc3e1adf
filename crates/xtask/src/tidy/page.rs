//! Reads the tables of `ARCHITECTURE.md` and the glossary that configure tidy.

use super::Problem;
use crate::tree::Tree;

/// The page with the tables of crates, of `unsafe` and of long code.
pub(super) const ARCHITECTURE: &str = "ARCHITECTURE.md";
/// The page with the table of banned words.
pub(super) const GLOSSARY: &str = "docs/glossary.md";

/// The kind of a crate, which decides which crates may depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CrateKind {
    /// Implements a part of Tessera and depends on library crates only.
    Library,
    /// Offers an entry point to people and programs.
    Application,
    /// Serves the project's developers; only tests may depend on it.
    Development,
}

/// A row of the table of crates in [`ARCHITECTURE`]: what a crate is, and what it may depend on.
#[derive(Debug, Clone)]
pub(super) struct CrateRow {
    pub(super) name: String,
    pub(super) kind: CrateKind,
    /// Workspace crates that it may use; `None` allows all of them.
    pub(super) may_use: Option<Vec<String>>,
    /// Whether the same input must give the same bytes, without I/O, environment, clocks or
    /// threads.
    pub(super) pure: bool,
    pub(super) line: usize,
}

/// A row of the table of files that may contain `unsafe`.
#[derive(Debug)]
pub(super) struct UnsafeFile {
    pub(super) path: String,
    pub(super) line: usize,
}

/// A row of the table of long files and functions.
#[derive(Debug)]
pub(super) struct LongCode {
    pub(super) path: String,
    /// Name of the long function; `None` if the file is long.
    pub(super) function: Option<String>,
    pub(super) line: usize,
}

/// A row of a Markdown table.
#[derive(Debug)]
pub(super) struct Row<'a> {
    pub(super) cells: Vec<&'a str>,
    pub(super) line: usize,
}

/// Reads the table of crates of [`ARCHITECTURE`].
pub(super) fn crate_rows(tree: &Tree, found: &mut Vec<Problem>) -> Vec<CrateRow> {
    let mut out = Vec::new();
    for Row { cells, line } in marked_rows(tree, ARCHITECTURE, "crates", found) {
        let [name, kind, may_use, pure] = cells[..] else {
            found.push(Problem::new(ARCHITECTURE, line, "the row needs crate, kind, may use, pure"));
            continue;
        };
        let kind = match kind {
            "library" => CrateKind::Library,
            "application" => CrateKind::Application,
            "development" => CrateKind::Development,
            other => {
                let message =
                    format!("unknown kind of crate `{other}`: write library, application or development");
                found.push(Problem::new(ARCHITECTURE, line, message));
                continue;
            }
        };
        let may_use = match may_use {
            "anything" => None,
            "nothing" => Some(Vec::new()),
            list => Some(list.split(',').map(strip_markup).collect()),
        };
        out.push(CrateRow { name: strip_markup(name), kind, may_use, pure: pure == "pure", line });
    }
    out
}

/// Reads the list of files that may contain `unsafe`.
pub(super) fn unsafe_files(tree: &Tree, found: &mut Vec<Problem>) -> Vec<UnsafeFile> {
    let rows = marked_rows(tree, ARCHITECTURE, "unsafe", found);
    rows.iter().map(|row| UnsafeFile { path: strip_markup(row.cells[0]), line: row.line }).collect()
}

/// Reads the list of files and functions that may be long.
pub(super) fn long_code(tree: &Tree, found: &mut Vec<Problem>) -> Vec<LongCode> {
    let mut out = Vec::new();
    for Row { cells, line } in marked_rows(tree, ARCHITECTURE, "long", found) {
        match cells[..] {
            [path, function, reason] if !reason.is_empty() => {
                let function = Some(strip_markup(function)).filter(|f| !f.is_empty());
                out.push(LongCode { path: strip_markup(path), function, line });
            }
            _ => found.push(Problem::new(
                ARCHITECTURE,
                line,
                "the row needs file, function (or nothing) and reason",
            )),
        }
    }
    out
}

/// Reads the rows of the table between `<!-- tidy:NAME -->` and `<!-- /tidy:NAME -->`.
pub(super) fn marked_rows<'t>(
    tree: &'t Tree,
    page: &str,
    name: &str,
    found: &mut Vec<Problem>,
) -> Vec<Row<'t>> {
    let (open, close) = (format!("<!-- tidy:{name} -->"), format!("<!-- /tidy:{name} -->"));
    let text = tree.file_text(page).unwrap_or_default();
    let Some((before, table)) =
        text.split_once(&open).and_then(|(before, rest)| Some((before, rest.split_once(&close)?.0)))
    else {
        found.push(Problem::new(page, 0, format!("put a table between `{open}` and `{close}`")));
        return Vec::new();
    };
    table_rows((before.lines().count() + 1..).zip(table.lines()))
}

/// Collects the rows of all tables in numbered lines, without their headers.
pub(super) fn table_rows<'a>(lines: impl Iterator<Item = (usize, &'a str)>) -> Vec<Row<'a>> {
    let mut out = Vec::new();
    let mut table_line = 0;
    for (line, text) in lines {
        table_line = if text.starts_with('|') { table_line + 1 } else { 0 };
        // The header and the separator below it hold no data.
        if table_line > 2 {
            out.push(Row { cells: text.trim().trim_matches('|').split('|').map(str::trim).collect(), line });
        }
    }
    out
}

/// Returns a cell without its back quotes and without a link around it.
fn strip_markup(cell: &str) -> String {
    let cell = cell.trim();
    let cell = cell.strip_prefix('[').and_then(|c| c.split(']').next()).unwrap_or(cell);
    cell.trim_matches('`').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_needs_a_reason() {
        let page = "<!-- tidy:long -->\n| a | b | c |\n|---|---|---|\n| `x.rs` | `f` | why |\n| `y.rs` | | why |\n\
| `z.rs` | | |\n<!-- /tidy:long -->\n";
        let mut found = Vec::new();
        let table = long_code(&Tree::from_files(&[(ARCHITECTURE, page)]), &mut found);
        let rows: Vec<_> = table.iter().map(|r| (r.path.as_str(), r.function.as_deref())).collect();
        assert_eq!(rows, [("x.rs", Some("f")), ("y.rs", None)]);
        assert!(found.len() == 1 && found[0].line == 6, "{found:?}");
    }

    #[test]
    fn a_table_is_read_and_a_bad_row_is_reported() {
        let page = "<!-- tidy:crates -->\n\n| a | b | c | d |\n|---|---|---|---|\n\
| [`x`](crates/x) | library | `y`, `z` | pure |\n| `w` | barn | nothing | |\n<!-- /tidy:crates -->\n";
        let mut found = Vec::new();
        let table = crate_rows(&Tree::from_files(&[(ARCHITECTURE, page)]), &mut found);
        assert_eq!(table.len(), 1);
        assert_eq!((table[0].name.as_str(), table[0].pure), ("x", true));
        assert_eq!(table[0].may_use.as_deref(), Some(&["y".to_string(), "z".to_string()][..]));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line, 6);
        assert!(found[0].message.contains("barn"));
    }
}
