//! Checks the tables of the library: retired ids, units of work, the log, and the status of pages.

use std::collections::{BTreeMap, BTreeSet};

use super::super::Problem;
use super::super::markdown::read_comment;
use super::super::page::{Row, marked_rows};
use super::RULE_PAGES;
use crate::tree::Tree;

/// The page with the retired ids, and with the table of explainers.
pub(super) const README: &str = "docs/library/README.md";
/// The page with the units of work and the log of their progress.
const UNITS: &str = "docs/library/units.md";
/// What a page may be. A stub has headings only; a draft lacks parts.
const STATUSES: [&str; 3] = ["stub", "draft", "ready"];

/// Reads the ids that no page uses any more.
pub(super) fn read_retired_ids(tree: &Tree, found: &mut Vec<Problem>) -> Vec<String> {
    let rows = marked_rows(tree, README, "retired", found);
    rows.iter().filter_map(|row| row.cells.first().map(ToString::to_string)).collect()
}

/// Reads the status of each page with rules.
pub(super) fn read_statuses(tree: &Tree, found: &mut Vec<Problem>) -> Vec<String> {
    RULE_PAGES
        .iter()
        .map(|page| read_status(page.path, tree.file_text(page.path).unwrap_or_default(), found))
        .collect()
}

/// Reads the status of a page: `<!-- status: ready -->` below the title.
pub(super) fn read_status(path: &str, text: &str, found: &mut Vec<Problem>) -> String {
    match read_comment(text, "status").filter(|(_, status)| STATUSES.contains(status)) {
        Some((_, status)) => status.to_string(),
        None => {
            let message =
                format!("state the status below the title: <!-- status: {} -->", STATUSES.join(" | "));
            found.push(Problem::new(path, 1, message));
            STATUSES[0].to_string()
        }
    }
}

/// Checks the units of work and the log.
///
/// Two open units never share a file, so that two people never edit one page at the same time.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let mut open_files: BTreeMap<&str, &str> = BTreeMap::new();
    let mut units = BTreeSet::new();
    for Row { cells, line } in marked_rows(tree, UNITS, "units", found) {
        let mut report = |message: String| found.push(Problem::new(UNITS, line, message));
        let [unit, file, _, status] = cells[..] else {
            report("the row needs unit, file, owner, status".to_string());
            continue;
        };
        let file = file.trim_matches('`');
        units.insert(unit);
        match status {
            "open" => {
                if let Some(other) = open_files.insert(file, unit) {
                    report(format!(
                        "the open unit {other} has the same file {file}: finish one first, or join them"
                    ));
                }
            }
            "done" if tree.contains(file) => {}
            "done" => report(format!("{file} does not exist: correct the path, or set the unit to open")),
            other => report(format!("unknown status `{other}`: write open or done")),
        }
    }
    let mut last = "";
    for Row { cells, line } in marked_rows(tree, UNITS, "log", found) {
        let mut report = |message: String| found.push(Problem::new(UNITS, line, message));
        let [date, unit, ..] = cells[..] else {
            report("the row needs date, unit, change, owner, notes".to_string());
            continue;
        };
        if !is_date(date) || date < last {
            report(format!("`{date}`: write dates as 2026-01-31, the oldest first"));
        }
        if !units.contains(unit) {
            report(format!("the table of units has no unit {unit}: correct the name"));
        }
        last = date;
    }
}

/// Returns whether a text has the form of a date, such as 2026-01-31.
pub(super) fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let has_digits = |p: &&str| p.bytes().all(|b| b.is_ascii_digit());
    parts.iter().map(|p| p.len()).eq([4, 2, 2]) && parts.iter().all(has_digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_units_have_files_of_their_own_and_the_log_has_an_order() {
        let page = "<!-- tidy:units -->\n| unit | file | owner | status |\n|---|---|---|---|\n\
| a | `x.md` | | open |\n| b | `x.md` | | open |\n| c | `y.md` | | done |\n| d | `z.md` | | late |\n| f | `docs/x` | | done |\n<!-- /tidy:units -->\n\
<!-- tidy:log -->\n| date | unit | change | owner | notes |\n|---|---|---|---|---|\n\
| 2026-02-01 | a | c | o | n |\n| 2026-01-31 | e | c | o | n |\n<!-- /tidy:log -->\n";
        let mut found = Vec::new();
        check(&Tree::from_files(&[("docs/x/y.md", ""), (UNITS, page)]), &mut found);
        let messages: Vec<(usize, &str)> = found.iter().map(|p| (p.line, p.message.as_str())).collect();
        let expected = [
            (5, "the open unit a"),
            (6, "y.md does not exist"),
            (7, "unknown status"),
            (14, "`2026-01-31`"),
            (14, "no unit e"),
        ];
        assert_eq!(messages.len(), expected.len(), "{messages:?}");
        for ((line, message), (at, part)) in messages.iter().zip(expected) {
            assert!(*line == at && message.contains(part), "{messages:?}");
        }
    }
}
