//! The operator's manual: every page has its sections, and what a page claims is there: tripwires with their places,
//! drills, tests.
//!
//! Tripwires and drills are read from the reference pages that the code prints, so that a page of the manual is held to
//! the code.

use std::collections::BTreeMap;

use super::Problem;
use super::codes::ids;
use super::text::resolve;
use crate::tree::{File, Tree};

/// Where the pages are.
const MANUAL: &str = "docs/manual/";
/// Printed by `cargo run -p tessera-runtime --example reference tripwires`.
const TRIPWIRES: &str = "docs/reference/tripwires.md";
/// Printed from the table of drills.
const DRILLS: &str = "docs/reference/drills.md";
/// What every page has, in this order; [`MORE`] may follow.
const SECTIONS: [&str; 4] = ["Contract", "Tripwires", "Break-it tests", "Instrumentation"];
const MORE: &str = "Details";
/// Sentences before the first section.
const OPENING: usize = 3;
/// Longest section in lines, [`MORE`] aside: two screens.
const SCREENS: usize = 80;
/// Drills that a page runs.
const BREAKS: std::ops::RangeInclusive<usize> = 2..=4;
/// Marks of the two lists of a contract.
const LISTS: [&str; 2] = ["Must:", "Forbidden:"];

/// What a page is held to.
struct Known<'a> {
    tree: &'a Tree,
    /// Places and page of each tripwire.
    tripwires: BTreeMap<&'a str, (Vec<&'a str>, &'a str)>,
    /// The row of each drill; none while there is no page of drills.
    drills: Option<BTreeMap<&'a str, &'a str>>,
}

pub(super) fn check(tree: &Tree, found: &mut Vec<Problem>) {
    let pages: Vec<&File> = tree.files.iter().filter(|f| f.path.starts_with(MANUAL)).collect();
    if pages.is_empty() {
        return;
    }
    let known = Known { tree, tripwires: tripwires(tree), drills: drills(tree) };
    for page in &pages {
        commands(page, &known, found);
        if page.path != format!("{MANUAL}README.md") {
            check_page(page, &known, found);
        }
    }
    for (id, (_, stem)) in &known.tripwires {
        let path = format!("{MANUAL}{stem}.md");
        let sections = tree.text(&path).map(sections).unwrap_or_default();
        if !table(&sections, "Tripwires").iter().any(|row| row.cells[0] == *id) {
            found.push(Problem::new(&path, 0, format!("give {id} a row under Tripwires")));
        }
    }
}

fn check_page(page: &File, known: &Known<'_>, found: &mut Vec<Problem>) {
    let sections = sections(&page.text);
    let mut say = |line, says: String| found.push(Problem::new(&page.path, line, says));
    let names: Vec<&str> = sections.iter().map(|s| s.name).collect();
    if names.strip_suffix(&[MORE]).unwrap_or(&names) != SECTIONS {
        let want = SECTIONS.join(", ");
        return say(0, format!("the sections are {want}, then {MORE} or nothing; here {}", names.join(", ")));
    }
    let before = page.text.split("\n## ").next().unwrap_or_default();
    let opening: String = before.lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>().join(" ");
    let count = opening.split_whitespace().filter(|w| w.ends_with(['.', '!', '?'])).count();
    if count != OPENING {
        say(1, format!("{count} sentences before the first section: say it in {OPENING}"));
    }
    for s in sections.iter().filter(|s| s.name != MORE && s.lines.len() > SCREENS) {
        say(s.line, format!("{} has {} lines: at most {SCREENS}", s.name, s.lines.len()));
    }
    contract(&sections[0], known, &mut say);
    for row in table(&sections, "Tripwires") {
        tripwire(&page.path, &row, known, &mut say);
    }
    let runs: Vec<Row<'_>> = table(&sections, "Break-it tests");
    let several = |row: &Row<'_>| drills_run(row.cells[0]).len() != 1;
    if !BREAKS.contains(&runs.len()) || runs.iter().any(several) {
        let (least, most) = (BREAKS.start(), BREAKS.end());
        let says = format!("a row for each of {least} to {most} drills, its first cell `tessera drill ID`");
        say(sections[2].line, says);
    }
    for row in runs {
        signature(&row, known, &mut say);
    }
}

/// Each rule of the contract names what shows it: a drill, a test, or the code that refuses.
fn contract(section: &Section<'_>, known: &Known<'_>, say: &mut dyn FnMut(usize, String)) {
    let mut list = None;
    let mut counts = [0; LISTS.len()];
    let mut items: Vec<(usize, String)> = Vec::new();
    for (i, line) in section.lines.iter().enumerate() {
        let at = section.line + 1 + i;
        if let Some(n) = LISTS.iter().position(|l| line.trim() == *l) {
            list = Some(n);
        } else if let Some(text) = line.strip_prefix("- ") {
            match list {
                Some(n) => counts[n] += 1,
                None => say(at, format!("put the rule under {}", LISTS.join(" or "))),
            }
            items.push((at, text.to_string()));
        } else if line.starts_with("  ")
            && let Some((_, text)) = items.last_mut()
        {
            text.push(' ');
            text.push_str(line.trim());
        }
    }
    for (name, count) in LISTS.iter().zip(counts) {
        if count == 0 {
            say(section.line, format!("{} has no rule under {name}", section.name));
        }
    }
    for (at, text) in items {
        let proofs = proofs(&text);
        if proofs.is_empty() && ids(&text).next().is_none() {
            say(at, "name what shows this rule: drill `id`, test `name` or a code".to_string());
        }
        for (kind, name) in proofs {
            match kind {
                Proof::Drill => drill(name, at, known, say),
                Proof::Test => {
                    let head = format!("fn {name}(");
                    if !known.tree.sources().any(|f| f.text.contains(&head)) {
                        say(at, format!("no test `{name}`: correct the name"));
                    }
                }
            }
        }
    }
}

/// A row of Tripwires: code, place, what it asserts, file that raises it.
fn tripwire(page: &str, row: &Row<'_>, known: &Known<'_>, say: &mut dyn FnMut(usize, String)) {
    let [id, place, _, file] = row.cells[..] else {
        return say(row.line, "the row needs code, place, what it asserts, file".to_string());
    };
    let Some((places, _)) = known.tripwires.get(id) else {
        return say(row.line, format!("{id} is no tripwire of {TRIPWIRES}: correct the code"));
    };
    for place in place.split(", ").filter(|p| !places.contains(p)) {
        say(row.line, format!("{id} is not raised at `{place}`: {}", places.join(", ")));
    }
    let link = file.split_once("](").and_then(|(_, to)| to.split_once(')')).map(|(to, _)| to);
    let raises = link.and_then(|to| known.tree.text(&resolve(page, to)?)).is_some_and(|t| t.contains(id));
    if !raises {
        say(row.line, format!("link the file that raises {id}; this one does not speak of it"));
    }
}

/// What a break-it test promises is what the table of drills says.
fn signature(row: &Row<'_>, known: &Known<'_>, say: &mut dyn FnMut(usize, String)) {
    let told = row.cells[1..].join(" ");
    if let [run] = drills_run(row.cells[0])[..]
        && let Some(known) = known.drills.as_ref().and_then(|d| d.get(run))
    {
        for (_, code) in ids(&told).filter(|(_, code)| !known.contains(code)) {
            say(row.line, format!("`{run}` does not end with {code}: see {DRILLS}"));
        }
        if ids(known).next().is_some() && ids(&told).next().is_none() {
            say(row.line, format!("say with which code `{run}` ends: see {DRILLS}"));
        }
    }
}

/// Every command on the page that runs a drill.
fn commands(page: &File, known: &Known<'_>, found: &mut Vec<Problem>) {
    for (i, line) in page.text.lines().enumerate() {
        for id in drills_run(line) {
            drill(id, i + 1, known, &mut |at, says| found.push(Problem::new(&page.path, at, says)));
        }
    }
}

fn drill(id: &str, at: usize, known: &Known<'_>, say: &mut dyn FnMut(usize, String)) {
    let well_formed = id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if id.is_empty() || !well_formed {
        say(at, format!("`{id}` is no id of a drill: lower-case words joined by `-`"));
    } else if known.drills.as_ref().is_some_and(|d| !d.contains_key(id)) {
        say(at, format!("no drill `{id}` in {DRILLS}: correct the id"));
    }
}

/// Ids behind `tessera drill` in a line, up to an option or the end of the command. `ID` stands for any.
fn drills_run(line: &str) -> Vec<&str> {
    const COMMAND: &str = "tessera drill";
    let mut out = Vec::new();
    for (at, _) in line.match_indices(COMMAND) {
        let rest = line[at + COMMAND.len()..].split(['`', '#', '|', ';']).next().unwrap_or_default();
        let ids = rest.split_whitespace().take_while(|w| !w.starts_with('-'));
        out.extend(ids.filter(|w| *w != "ID"));
    }
    out
}

/// What may show a rule, a code aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proof {
    Drill,
    Test,
}

/// Names in back quotes behind the words drill, drills, test and tests, with those that follow them in a list.
fn proofs(text: &str) -> Vec<(Proof, &str)> {
    let mut out = Vec::new();
    let mut kind = None;
    for (i, piece) in text.split('`').enumerate() {
        if i % 2 == 1 {
            out.extend(kind.map(|k| (k, piece)));
            continue;
        }
        let word = piece.trim_end().rsplit(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        kind = match word.to_lowercase().as_str() {
            "drill" | "drills" => Some(Proof::Drill),
            "test" | "tests" => Some(Proof::Test),
            _ if matches!(piece.trim(), "," | "and" | ", and") => kind,
            _ => None,
        };
    }
    out
}

/// Places and page of every tripwire, by code.
fn tripwires(tree: &Tree) -> BTreeMap<&str, (Vec<&str>, &str)> {
    let rows = rows(tree.text(TRIPWIRES).unwrap_or_default().lines().zip(1..));
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

/// Every drill with its row; `None` while there is no page of them.
fn drills(tree: &Tree) -> Option<BTreeMap<&str, &str>> {
    let text = tree.text(DRILLS)?;
    Some(text.lines().filter_map(|l| Some((l.strip_prefix("| `")?.split('`').next()?, l))).collect())
}

/// A part of a page under a heading of the second level.
struct Section<'a> {
    name: &'a str,
    /// Of the heading.
    line: usize,
    lines: Vec<&'a str>,
}

fn sections(text: &str) -> Vec<Section<'_>> {
    let mut out: Vec<Section<'_>> = Vec::new();
    let mut fenced = false;
    for (line, number) in text.lines().zip(1..) {
        fenced ^= line.trim_start().starts_with("```");
        match (line.strip_prefix("## "), out.last_mut()) {
            (Some(name), _) if !fenced => {
                out.push(Section { name: name.trim(), line: number, lines: Vec::new() });
            }
            (_, Some(section)) => section.lines.push(line),
            _ => {}
        }
    }
    out
}

struct Row<'a> {
    cells: Vec<&'a str>,
    line: usize,
}

/// Rows of the tables of a section, without their heads.
fn table<'a>(sections: &[Section<'a>], name: &str) -> Vec<Row<'a>> {
    let Some(s) = sections.iter().find(|s| s.name == name) else { return Vec::new() };
    rows(s.lines.iter().copied().zip(s.line + 1..))
}

fn rows<'a>(lines: impl Iterator<Item = (&'a str, usize)>) -> Vec<Row<'a>> {
    let mut out = Vec::new();
    let mut head = 0;
    for (text, line) in lines {
        if !text.starts_with('|') {
            head = 0;
            continue;
        }
        head += 1;
        if head > 2 {
            out.push(Row { cells: text.trim().trim_matches('|').split('|').map(str::trim).collect(), line });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIRES: &str = "# T\n\n| code | what | place | page |\n| --- | --- | --- | --- |\n\
| T0101 | a | worker check, leader preflight | [a](../manual/a.md) |\n\
| T0102 | b | init parity | [a](../manual/a.md) |\n";
    const PAGE: &str = "# A\n\nOne here. Two here.\nThree here.\n\n## Contract\n\nMust:\n\n\
- One, over\n  two lines: drills `x-y` and `z`.\n- Two: test `a_test`.\n\nForbidden:\n\n- Three (T0101).\n\n\
## Tripwires\n\n| code | place | asserts | file |\n| --- | --- | --- | --- |\n\
| T0101 | worker check | a | [x.rs](../../x.rs) |\n| T0102 | init parity | b | [x.rs](../../x.rs) |\n\n\
## Break-it tests\n\n| run | breaks | expected |\n| --- | --- | --- |\n\
| `tessera drill x-y` | a | T0101, rank 1 |\n| `tessera drill z` | b | T0102 |\n\n## Instrumentation\n\nA.\n";
    const SOURCE: &str = "//! x\n// T0101 T0102\n#[test]\nfn a_test() {}\n";
    const TABLE: &str = "| id | code |\n| --- | --- |\n| `x-y` | T0101 |\n| `z` | T0102 |\n";

    fn said(page: &str, drills: Option<&str>) -> Vec<String> {
        let mut files =
            vec![("docs/manual/a.md", page), ("x.rs", SOURCE), ("docs/reference/tripwires.md", WIRES)];
        files.extend(drills.map(|d| (DRILLS, d)));
        let mut found = Vec::new();
        check(&Tree::of(&files), &mut found);
        found.into_iter().map(|p| p.to_string()).collect()
    }

    /// What is said when `from` is `to` on an otherwise good page.
    fn with(from: &str, to: &str) -> Vec<String> {
        assert!(PAGE.contains(from), "{from}");
        said(&PAGE.replacen(from, to, 1), Some(TABLE))
    }

    fn one(said: &[String], part: &str) {
        assert!(said.len() == 1 && said[0].contains(part), "{part}: {said:?}");
    }

    #[test]
    fn a_page_in_order_passes_with_and_without_a_table_of_drills() {
        assert_eq!(said(PAGE, Some(TABLE)), Vec::<String>::new());
        assert_eq!(said(PAGE, None), Vec::<String>::new());
        assert_eq!(said(&format!("{PAGE}\n## Details\n\nMore.\n"), None), Vec::<String>::new());
    }

    #[test]
    fn sections_and_their_order_are_fixed() {
        // Without its Tripwires a page lacks their rows too.
        let renamed = with("## Tripwires", "## Traps");
        assert!(renamed.len() == 3 && renamed[2].contains("give T0102 a row"), "{renamed:?}");
        let more = said(&format!("{PAGE}\n## Instrumentation\n\nAgain.\n"), None);
        one(&more, "the sections are Contract, Tripwires");
    }

    #[test]
    fn an_opening_has_three_sentences_and_a_section_two_screens() {
        one(&with("Two here.\n", "Two here. And more.\n"), "4 sentences before");
        one(&with("\nA.\n", &"\nA.\n".repeat(41)), "Instrumentation has 82 lines");
    }

    #[test]
    fn a_rule_names_what_shows_it_and_that_exists() {
        one(&with("Two: test `a_test`.", "Two."), "name what shows this rule");
        one(&with("test `a_test`", "test `b_test`"), "no test `b_test`");
        one(&with("drills `x-y` and `z`", "drills `x-y` and `w`"), "no drill `w`");
        let unlisted = with("Forbidden:\n\n- Three (T0101).\n", "");
        one(&unlisted, "no rule under Forbidden:");
    }

    #[test]
    fn a_tripwire_stands_at_its_places_and_in_its_file() {
        one(&with("| T0101 | worker check |", "| T0101 | init parity |"), "not raised at `init parity`");
        one(
            &with("| b | [x.rs](../../x.rs) |", "| b | [x.rs](../../y.rs) |"),
            "link the file that raises T0102",
        );
        let other = with("| T0102 | init parity | b |", "| T0103 | init parity | b |");
        assert!(other.len() == 2 && other[0].contains("T0103 is no tripwire"), "{other:?}");
        assert!(other[1].contains("give T0102 a row"), "{other:?}");
    }

    #[test]
    fn break_it_tests_are_two_to_four_drills_that_exist_with_their_codes() {
        one(&with("| `tessera drill z` | b | T0102 |\n", ""), "2 to 4 drills");
        one(&with("| `tessera drill z` |", "| `tessera drill z x-y` |"), "2 to 4 drills");
        one(&with("| b | T0102 |\n\n## I", "| b | T0101 |\n\n## I"), "`z` does not end with T0101");
        one(&with("| b | T0102 |\n\n## I", "| b | an end |\n\n## I"), "say with which code `z` ends");
        let unknown = with("\nA.\n", "\n`tessera drill w --list` and `tessera drill ID`\n");
        one(&unknown, "no drill `w`");
        one(&said(&PAGE.replacen("`z` |", "`Z` |", 1).replace("drill z", "drill Z"), None), "`Z` is no id");
    }

    #[test]
    fn a_list_of_proofs_ends_with_another_word() {
        let text = "Call `f`. Drills `a`, `b` and `c`, test `d`; see `e`.";
        let names: Vec<&str> = proofs(text).into_iter().map(|(_, n)| n).collect();
        assert_eq!(names, ["a", "b", "c", "d"]);
    }
}
