//! Renders the back map: from each rule to the checks, drills and tests that show it, from each code and
//! drill back to the rules, and from each explainer, topic and claim to its rules.

mod pages;

use std::fmt::Write as _;

use super::codes_and_drills::{filetests_of, pages_of};
use super::{Library, RULE_PAGES, Rule};
use crate::tree::Tree;

/// The generated page.
pub(super) const PATH: &str = "docs/library/backmap.md";

/// Renders the page. Writing to a `String` cannot fail, so the results of `writeln!` are dropped.
pub(super) fn render_page(library: &Library, tree: &Tree) -> String {
    let mut out = "# Back map\n\n\
This page leads from a rule to what shows that it holds, from a code, a drill, an explainer or a topic to its rules, and from a claim\n\
of an outside source to its users. `cargo xtask library` generates it from the pages, and `tessera explain D-03` prints one entry.\n\n"
        .to_string();
    out += &render_counts(library);
    out += &pages::render_counts(library);
    out += &pages::render_gaps(library);
    out += &render_unproven(library);
    out += &pages::render_questions(library);
    out += &pages::render_explainers(library);
    out += &pages::render_topics(library);
    out += &pages::render_claims(library);
    for page in RULE_PAGES {
        out += &render_rules(page.path, library, tree);
    }
    out += &render_codes(library, tree);
    out += &render_drills(library);
    out
}

fn render_counts(library: &Library) -> String {
    let mut out = "## Counts\n\n| page | status | rules | with a drill | with a test or filetest | by a code alone | without proof |\n\
| --- | --- | --- | --- | --- | --- | --- |\n"
        .to_string();
    let row = |name: &str, status: &str, rules: &[&Rule]| {
        let count = |is: fn(&Rule) -> bool| rules.iter().filter(|r| is(r)).count();
        let with_drill = count(|r| !r.proof.drills.is_empty());
        let with_test = count(has_test);
        let by_code = count(|r| r.proof.drills.is_empty() && !has_test(r) && !r.proof.codes.is_empty());
        let without = count(|r| r.proof.missing.is_some());
        format!(
            "| {name} | {status} | {} | {with_drill} | {with_test} | {by_code} | {without} |\n",
            rules.len()
        )
    };
    for (page, status) in RULE_PAGES.iter().zip(&library.statuses) {
        let rules: Vec<&Rule> = library.rules.iter().filter(|r| r.page == *page).collect();
        out += &row(&format!("[{}]({})", page.name(), link_to(page.path)), status, &rules);
    }
    out += &row("all", "", &library.rules.iter().collect::<Vec<_>>());
    let (codes, drills, symptoms) = (library.codes.len(), library.drills.len(), library.symptoms.len());
    let _ = writeln!(
        out,
        "\nCodes of the verifier and of the runtime: {codes}. Drills: {drills}. Symptoms: {symptoms}.\n"
    );
    out
}

fn has_test(rule: &Rule) -> bool {
    !rule.proof.tests.is_empty() || !rule.proof.filetests.is_empty()
}

fn render_unproven(library: &Library) -> String {
    let rules: Vec<&Rule> = library.rules.iter().filter(|r| r.proof.missing.is_some()).collect();
    let mut out =
        format!("## Rules without proof\n\nNothing shows that these {} rules hold.\n\n", rules.len());
    for rule in rules {
        let _ = writeln!(out, "- {}: {}.", rule.id, rule.proof.missing.as_deref().unwrap_or_default());
    }
    out + "\n"
}

fn render_rules(path: &str, library: &Library, tree: &Tree) -> String {
    let rules: Vec<&Rule> = library.rules.iter().filter(|r| r.page.path == path).collect();
    let name = rules.first().map_or(path, |r| r.page.name());
    let mut out = format!(
        "## Rules of {name}\n\n| rule | states | checks | drills | tests and filetests |\n| --- | --- | --- | --- | --- |\n"
    );
    for rule in rules {
        let proof = &rule.proof;
        let tests = proof.tests.iter().map(|t| format!("[{t}]({})", link_to(test_file(t, tree))));
        let filetests =
            proof.filetests.iter().map(|f| format!("[{f}]({})", link_to(&format!("filetests/{f}"))));
        let shown: Vec<String> = tests.chain(filetests).collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            rule.id,
            first_sentence(rule),
            checks_of(rule, library).join(", "),
            proof.drills.join(", "),
            shown.join(", ")
        );
    }
    out + "\n"
}

/// The codes of a rule and of its drills, each with the place that usually raises it.
fn checks_of(rule: &Rule, library: &Library) -> Vec<String> {
    let usual_place = |code: &str| library.codes.get(code).and_then(|row| row.places.split(", ").next());
    let of_codes = rule.proof.codes.iter().map(|c| usual_place(c).map_or(c.clone(), |p| format!("{c} {p}")));
    let own_drills = library.drills.iter().filter(|d| rule.proof.drills.contains(&d.id));
    let of_drills = own_drills.filter_map(|d| d.code.as_ref().map(|c| format!("{c} {}", d.place)));
    let mut checks: Vec<String> = of_codes.collect();
    for check in of_drills {
        let names_code = |c: &&String| c.split(' ').next() == check.split(' ').next();
        if !checks.contains(&check) && !checks.iter().take(rule.proof.codes.len()).any(|c| names_code(&c)) {
            checks.push(check);
        }
    }
    checks
}

/// The first sentence of a rule without its proof, marked if it names what must not happen.
fn first_sentence(rule: &Rule) -> String {
    let end = rule.text.find(". ").unwrap_or(rule.text.len());
    let sentence = rule.text[..end].trim_end_matches('.');
    let states_proof = |part: &str| {
        let part = part.trim_start_matches(['`', '—']);
        ["T0", "T1", "drill", "test", "filetest", "no proof", "the sealed plan"]
            .iter()
            .any(|p| part.starts_with(p))
    };
    let stated = match sentence.rsplit_once(" (") {
        Some((text, part)) if states_proof(part) => text,
        _ => sentence,
    };
    if rule.is_forbidden { format!("forbidden: {stated}") } else { stated.to_string() }
}

fn render_codes(library: &Library, tree: &Tree) -> String {
    let mut out = "## Codes\n\n| code | raised at | rules | drills | filetests | pages |\n| --- | --- | --- | --- | --- | --- |\n".to_string();
    for (code, row) in &library.codes {
        let rules: Vec<&str> = library.rules_of_code(code).map(|r| r.id.as_str()).collect();
        let drills = library.drills.iter().filter(|d| d.code.as_ref() == Some(code)).map(|d| d.id.as_str());
        let pages = pages_of(code, tree).map(|p| format!("[{}]({})", stem(p), link_to(p)));
        let _ = writeln!(
            out,
            "| {code} | {} | {} | {} | {} | {} |",
            row.places,
            rules.join(", "),
            drills.collect::<Vec<_>>().join(", "),
            filetests_of(code, tree).count(),
            pages.collect::<Vec<_>>().join(", ")
        );
    }
    out + "\n"
}

fn render_drills(library: &Library) -> String {
    let mut out = "## Drills\n\n| drill | ends with | rules |\n| --- | --- | --- |\n".to_string();
    for d in &library.drills {
        let end =
            d.code.as_ref().map_or("its gates".to_string(), |c| format!("{c}, {}, {}", d.rank, d.place));
        let rules: Vec<&str> = library.rules_of_drill(&d.id).map(|r| r.id.as_str()).collect();
        let _ = writeln!(out, "| {} | {end} | {} |", d.id, rules.join(", "));
    }
    out
}

/// The path of the file that contains a test.
pub(super) fn test_file<'a>(name: &str, tree: &'a Tree) -> &'a str {
    let head = format!("fn {name}(");
    let file = tree.rust_files().find(|f| f.text.contains(&head) && f.text.contains("// proves:"));
    file.map_or("", |f| f.path.as_str())
}

/// The link from the back map to a path from the root.
pub(super) fn link_to(path: &str) -> String {
    match path.strip_prefix("docs/") {
        Some(page) => format!("../{page}"),
        None => format!("../../{path}"),
    }
}

fn stem(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.strip_suffix(".md").unwrap_or(file)
}
