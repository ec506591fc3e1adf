//! Checks the operator's manual: every page has its sections, and every tripwire and drill that a
//! table or a command names exists.
//!
//! The check reads tripwires and drills from the reference pages that the code prints, so that it
//! compares the manual with the code.

use std::collections::BTreeMap;

use super::Problem;
use super::codes::find_ids;
use super::markdown::{Section, resolve_link, split_sections};
use super::page::{Row, table_rows};
use crate::tree::{File, Tree};

/// Prefix of the paths of the manual's pages.
const MANUAL: &str = "docs/manual/";
/// The page that `cargo run -p tessera-runtime --example reference tripwires` prints.
const TRIPWIRES: &str = "docs/reference/tripwires.md";
/// The page that is printed from the table of drills.
const DRILLS: &str = "docs/reference/drills.md";
/// The sections of every page, in this order. [`OPTIONAL_SECTION`] may follow.
const SECTIONS: [&str; 4] = ["Contract", "Tripwires", "Break-it tests", "Instrumentation"];
/// The page about compiled programs has sections of its own, each with rules.
const COMPILE: &str = "docs/manual/compile.md";
const COMPILE_SECTIONS: [&str; 4] = [
    "Invariants across ranks",
    "What to pin at init and what to carry in the envelope",
    "Tests that catch divergence early",
    "Patterns to avoid",
];
/// An optional last section, of any length.
const OPTIONAL_SECTION: &str = "Details";
/// Number of sentences before the first section.
const OPENING_SENTENCES: usize = 3;
/// Maximum number of lines of a section except [`OPTIONAL_SECTION`]: two screens.
const MAX_SECTION_LINES: usize = 80;
/// Number of drills in the section of break-it tests.
const BREAK_IT_TESTS: std::ops::RangeInclusive<usize> = 2..=4;
/// Headings of the two lists of a contract.
const CONTRACT_LISTS: [&str; 2] = ["Must:", "Forbidden:"];

/// The tripwires and drills of the reference pages, against which the manual is checked.
struct Facts<'a> {
    tree: &'a Tree,
    /// The places and the manual page of each tripwire, by code.
    tripwires: BTreeMap<&'a str, (Vec<&'a str>, &'a str)>,
    /// The row of each drill, by id; `None` if the page of drills does not exist.
    drills: Option<BTreeMap<&'a str, &'a str>>,
}

/// Checks every page of the manual, and that each tripwire has a row on the page that it names.
pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let pages: Vec<&File> = tree.files.iter().filter(|f| f.path.starts_with(MANUAL)).collect();
    if pages.is_empty() {
        return;
    }
    let facts = Facts { tree, tripwires: read_tripwires(tree), drills: read_drills(tree) };
    for page in &pages {
        let mut check = PageCheck { page, facts: &facts, found };
        for (number, line) in (1..).zip(page.text.lines()) {
            drill_ids(line).into_iter().for_each(|id| check.check_drill_id(number, id));
        }
        if page.path == COMPILE {
            check.check_compile_sections();
        } else if page.path != format!("{MANUAL}README.md") {
            check.check_sections();
        }
    }
    for (id, (_, stem)) in &facts.tripwires {
        let path = format!("{MANUAL}{stem}.md");
        let sections = tree.file_text(&path).map(|text| split_sections(text, 2)).unwrap_or_default();
        let tripwires = sections.iter().find(|s| s.name == "Tripwires");
        if !tripwires.is_some_and(|s| s.rows().iter().any(|row| row.cells[0] == *id)) {
            found.push(Problem::new(&path, 0, format!("add a row for {id} under Tripwires")));
        }
    }
}

/// The check of one page.
struct PageCheck<'c, 'a> {
    page: &'a File,
    facts: &'c Facts<'a>,
    found: &'c mut Vec<Problem>,
}

impl PageCheck<'_, '_> {
    fn report(&mut self, line: usize, message: impl Into<String>) {
        self.found.push(Problem::new(&self.page.path, line, message));
    }

    /// Checks the sections of the page about compiled programs. That its items are rules with proofs is
    /// checked with the rules.
    fn check_compile_sections(&mut self) {
        let sections = split_sections(&self.page.text, 2);
        if sections.iter().map(|s| s.name).ne(COMPILE_SECTIONS) {
            self.report(0, format!("write exactly the sections {}", COMPILE_SECTIONS.join(", ")));
        }
        for s in sections.iter().filter(|s| !s.lines.iter().any(|l| l.contains("**P-"))) {
            self.report(s.line, format!("{} has no rule", s.name));
        }
    }

    /// Checks the structure of the page and the content of its sections.
    fn check_sections(&mut self) {
        let sections = split_sections(&self.page.text, 2);
        let names: Vec<&str> = sections.iter().map(|s| s.name).collect();
        if names.strip_suffix(&[OPTIONAL_SECTION]).unwrap_or(&names) != SECTIONS {
            let (expected, actual) = (SECTIONS.join(", "), names.join(", "));
            let message =
                format!("write the sections {expected} and optionally {OPTIONAL_SECTION}; found {actual}");
            return self.report(0, message);
        }
        let opening = self.page.text.split("\n## ").next().unwrap_or_default();
        let words = opening.lines().filter(|l| !l.starts_with('#')).flat_map(str::split_whitespace);
        let count = words.filter(|w| w.ends_with(['.', '!', '?'])).count();
        if count != OPENING_SENTENCES {
            self.report(
                1,
                format!("{count} sentences before the first section: write exactly {OPENING_SENTENCES}"),
            );
        }
        for s in sections.iter().filter(|s| s.name != OPTIONAL_SECTION && s.lines.len() > MAX_SECTION_LINES) {
            let message =
                format!("{} has {} lines: the maximum is {MAX_SECTION_LINES}", s.name, s.lines.len());
            self.report(s.line, message);
        }
        let [contract, tripwires, tests, ..] = &sections[..] else { return };
        self.check_contract(contract);
        tripwires.rows().iter().for_each(|row| self.check_tripwire_row(row));
        let drills = tests.rows();
        let is_malformed = |row: &Row<'_>| drill_ids(row.cells[0]).len() != 1;
        if !BREAK_IT_TESTS.contains(&drills.len()) || drills.iter().any(is_malformed) {
            let (min, max) = (BREAK_IT_TESTS.start(), BREAK_IT_TESTS.end());
            let message = format!(
                "write {min} to {max} drills, one per row, with `tessera drill ID` in the first cell"
            );
            self.report(tests.line, message);
        }
        drills.iter().for_each(|row| self.check_expected_codes(row));
    }

    /// Checks that each rule of the contract stands in one of its two lists, and that no list is empty.
    /// The rules themselves are checked with their proofs.
    fn check_contract(&mut self, section: &Section<'_>) {
        let mut counts = [0; CONTRACT_LISTS.len()];
        let mut list = None;
        for (number, line) in (section.line + 1..).zip(&section.lines) {
            if let Some(n) = CONTRACT_LISTS.iter().position(|l| line.trim() == *l) {
                list = Some(n);
            } else if line.starts_with("- ") {
                match list {
                    Some(n) => counts[n] += 1,
                    None => {
                        self.report(number, format!("put the rule under {}", CONTRACT_LISTS.join(" or ")))
                    }
                }
            }
        }
        for (name, _) in CONTRACT_LISTS.iter().zip(counts).filter(|(_, count)| *count == 0) {
            self.report(section.line, format!("{} has no rule under {name}", section.name));
        }
    }

    /// Checks a row of Tripwires: code, place, asserted condition, file that raises the code.
    fn check_tripwire_row(&mut self, row: &Row<'_>) {
        let [id, place, _, file] = row.cells[..] else {
            return self.report(row.line, "the row needs code, place, asserted condition, file");
        };
        let Some((places, _)) = self.facts.tripwires.get(id) else {
            return self.report(row.line, format!("{TRIPWIRES} has no tripwire {id}: correct the code"));
        };
        for place in place.split(", ").filter(|p| !places.contains(p)) {
            let message = format!("{id} is not raised at `{place}`; its places are {}", places.join(", "));
            self.report(row.line, message);
        }
        let link = file.split_once("](").and_then(|(_, to)| to.split_once(')')).map(|(to, _)| to);
        let source = link.and_then(|to| self.facts.tree.file_text(&resolve_link(&self.page.path, to)?));
        if !source.is_some_and(|text| text.contains(id)) {
            let message = format!("link the file that raises {id}; this file does not mention the code");
            self.report(row.line, message);
        }
    }

    /// Checks that a break-it test promises the codes that the table of drills lists.
    fn check_expected_codes(&mut self, row: &Row<'_>) {
        let [drill] = drill_ids(row.cells[0])[..] else { return };
        let Some(expected) = self.facts.drills.as_ref().and_then(|d| d.get(drill)) else { return };
        let promised = row.cells[1..].join(" ");
        for (_, code) in find_ids(&promised).filter(|(_, code)| !expected.contains(code)) {
            self.report(row.line, format!("`{drill}` does not end with {code}: see {DRILLS}"));
        }
        if find_ids(expected).next().is_some() && find_ids(&promised).next().is_none() {
            self.report(row.line, format!("name the code with which `{drill}` ends: see {DRILLS}"));
        }
    }

    /// Checks that a drill id is well formed and exists.
    fn check_drill_id(&mut self, line: usize, id: &str) {
        let is_well_formed = id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if id.is_empty() || !is_well_formed {
            self.report(line, format!("`{id}` is not a drill id: write lower-case words joined by `-`"));
        } else if self.facts.drills.as_ref().is_some_and(|d| !d.contains_key(id)) {
            self.report(line, format!("{DRILLS} has no drill `{id}`: correct the id"));
        }
    }
}

/// Returns the ids after `tessera drill` in a line, up to an option or the end of the command. The
/// placeholder `ID` does not count.
pub(super) fn drill_ids(line: &str) -> Vec<&str> {
    const COMMAND: &str = "tessera drill";
    let mut out = Vec::new();
    for (at, _) in line.match_indices(COMMAND) {
        let rest = line[at + COMMAND.len()..].split(['`', '#', '|', ';']).next().unwrap_or_default();
        let ids = rest.split_whitespace().take_while(|w| !w.starts_with('-'));
        out.extend(ids.filter(|w| *w != "ID"));
    }
    out
}

/// Reads the places and the manual page of every tripwire, by code.
fn read_tripwires(tree: &Tree) -> BTreeMap<&str, (Vec<&str>, &str)> {
    let rows = table_rows((1..).zip(tree.file_text(TRIPWIRES).unwrap_or_default().lines()));
    rows.into_iter()
        .filter_map(|row| match row.cells[..] {
            [id, _, places, page] => {
                let stem = page.strip_prefix('[')?.split(']').next()?;
                Some((id, (places.split(", ").collect(), stem)))
            }
            _ => None,
        })
        .collect()
}

/// Reads the row of every drill, by id; `None` if the page of drills does not exist.
fn read_drills(tree: &Tree) -> Option<BTreeMap<&str, &str>> {
    let text = tree.file_text(DRILLS)?;
    Some(text.lines().filter_map(|l| Some((l.strip_prefix("| `")?.split('`').next()?, l))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRES: &str = "# T\n\n| code | what | place | page |\n| --- | --- | --- | --- |\n\
| T0101 | a | worker check, leader preflight | [a](../manual/a.md) |\n\
| T0102 | b | init parity | [a](../manual/a.md) |\n";
    const PAGE: &str = "# A\n\nOne here. Two here.\nThree here.\n\n## Contract\n\nMust:\n\n\
- One, over\n  two lines.\n- Two.\n\nForbidden:\n\n- Three.\n\n\
## Tripwires\n\n| code | place | asserts | file |\n| --- | --- | --- | --- |\n\
| T0101 | worker check | a | [x.rs](../../x.rs) |\n| T0102 | init parity | b | [x.rs](../../x.rs) |\n\n\
## Break-it tests\n\n| run | breaks | expected |\n| --- | --- | --- |\n\
| `tessera drill x-y` | a | T0101, rank 1 |\n| `tessera drill z` | b | T0102 |\n\n## Instrumentation\n\nA.\n";
    const SOURCE: &str = "//! x\n// T0101 T0102\n";
    const TABLE: &str = "| id | code |\n| --- | --- |\n| `x-y` | T0101 |\n| `z` | T0102 |\n";

    fn problems(page: &str, drills: Option<&str>) -> Vec<String> {
        let mut files =
            vec![("docs/manual/a.md", page), ("x.rs", SOURCE), ("docs/reference/tripwires.md", WIRES)];
        files.extend(drills.map(|d| (DRILLS, d)));
        let mut found = Vec::new();
        check(&Tree::from_files(&files), &mut found);
        found.into_iter().map(|p| p.to_string()).collect()
    }

    /// Returns the problems of the valid page after one replacement.
    fn problems_after(from: &str, to: &str) -> Vec<String> {
        assert!(PAGE.contains(from), "{from}");
        problems(&PAGE.replacen(from, to, 1), Some(TABLE))
    }

    fn assert_one(found: &[String], part: &str) {
        assert!(found.len() == 1 && found[0].contains(part), "{part}: {found:?}");
    }

    #[test]
    fn a_correct_page_passes_with_and_without_a_table_of_drills() {
        assert_eq!(problems(PAGE, Some(TABLE)), Vec::<String>::new());
        assert_eq!(problems(PAGE, None), Vec::<String>::new());
        assert_eq!(problems(&format!("{PAGE}\n## Details\n\nMore.\n"), None), Vec::<String>::new());
    }

    #[test]
    fn the_page_about_compiled_programs_has_its_four_sections_with_rules() {
        let page: String = COMPILE_SECTIONS.iter().map(|s| format!("## {s}\n\n- **P-01** x\n\n")).collect();
        let check_page = |text: &str| {
            let mut found = Vec::new();
            check(&Tree::from_files(&[(COMPILE, text)]), &mut found);
            found.into_iter().map(|p| p.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(check_page(&page), Vec::<String>::new());
        assert_one(&check_page(&format!("{page}## More\n\n- **P-02** y\n")), "write exactly the sections");
        assert_one(
            &check_page(&page.replacen("- **P-01** x", "Nothing.", 1)),
            "Invariants across ranks has no rule",
        );
    }

    #[test]
    fn sections_and_their_order_are_fixed() {
        // A page without the section Tripwires also lacks its rows.
        let renamed = problems_after("## Tripwires", "## Traps");
        assert!(renamed.len() == 3 && renamed[2].contains("add a row for T0102"), "{renamed:?}");
        let more = problems(&format!("{PAGE}\n## Instrumentation\n\nAgain.\n"), None);
        assert_one(&more, "write the sections Contract, Tripwires");
    }

    #[test]
    fn an_opening_has_three_sentences_and_a_section_at_most_two_screens() {
        assert_one(&problems_after("Two here.\n", "Two here. And more.\n"), "4 sentences before");
        assert_one(&problems_after("\nA.\n", &"\nA.\n".repeat(41)), "Instrumentation has 82 lines");
    }

    #[test]
    fn a_contract_has_rules_in_both_lists_and_nowhere_else() {
        let unlisted = problems_after("Forbidden:\n\n- Three.\n", "");
        assert_one(&unlisted, "no rule under Forbidden:");
        assert_one(
            &problems_after("Must:\n\n- One", "- Zero.\n\nMust:\n\n- One"),
            "put the rule under Must:",
        );
    }

    #[test]
    fn a_tripwire_has_its_places_and_its_file() {
        assert_one(
            &problems_after("| T0101 | worker check |", "| T0101 | init parity |"),
            "not raised at `init parity`",
        );
        assert_one(
            &problems_after("| b | [x.rs](../../x.rs) |", "| b | [x.rs](../../y.rs) |"),
            "link the file that raises T0102",
        );
        let other = problems_after("| T0102 | init parity | b |", "| T0103 | init parity | b |");
        assert!(other.len() == 2 && other[0].contains("has no tripwire T0103"), "{other:?}");
        assert!(other[1].contains("add a row for T0102"), "{other:?}");
    }

    #[test]
    fn break_it_tests_are_two_to_four_drills_that_exist_with_their_codes() {
        assert_one(&problems_after("| `tessera drill z` | b | T0102 |\n", ""), "2 to 4 drills");
        assert_one(&problems_after("| `tessera drill z` |", "| `tessera drill z x-y` |"), "2 to 4 drills");
        assert_one(
            &problems_after("| b | T0102 |\n\n## I", "| b | T0101 |\n\n## I"),
            "`z` does not end with T0101",
        );
        assert_one(
            &problems_after("| b | T0102 |\n\n## I", "| b | an end |\n\n## I"),
            "name the code with which `z` ends",
        );
        let unknown = problems_after("\nA.\n", "\n`tessera drill w --list` and `tessera drill ID`\n");
        assert_one(&unknown, "has no drill `w`");
        assert_one(
            &problems(&PAGE.replacen("`z` |", "`Z` |", 1).replace("drill z", "drill Z"), None),
            "`Z` is not a drill id",
        );
    }
}
