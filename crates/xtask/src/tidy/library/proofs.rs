//! Checks that the proof of a rule exists and that a test names the rules that it shows:
//! `// proves: D-03` stands above the test.

use std::collections::{BTreeMap, BTreeSet};

use super::super::Problem;
use super::codes_and_drills::is_shown;
use super::{Library, MAX_UNPROVEN, RULE_PAGES, Rule};
use crate::tree::{Tree, owning_crate};

/// How a source states which rules the next test shows.
const PROVES: &str = "// proves:";

/// A test with the rules that it names.
#[derive(Debug, PartialEq, Eq)]
struct ProvingTest {
    name: String,
    path: String,
    line: usize,
    rules: Vec<String>,
}

/// Checks both directions between rules and proofs.
pub(super) fn check(library: &Library, tree: &Tree, found: &mut Vec<Problem>) {
    let tests = read_proving_tests(tree, found);
    let mut named_by: BTreeMap<&str, Vec<&ProvingTest>> = BTreeMap::new();
    for test in &tests {
        named_by.entry(&test.name).or_default().push(test);
    }
    for rule in &library.rules {
        check_rule(rule, library, tree, &named_by, found);
    }
    for test in &tests {
        for id in &test.rules {
            let cites = |r: &Rule| r.id == *id && r.proof.tests.contains(&test.name);
            if !library.rules.iter().any(cites) {
                let message = format!(
                    "rule {id} does not name the test `{}`: name it there or correct the id",
                    test.name
                );
                found.push(Problem::new(&test.path, test.line, message));
            }
        }
    }
    let unproven: Vec<&str> =
        library.rules.iter().filter(|r| r.proof.missing.is_some()).map(|r| r.id.as_str()).collect();
    if unproven.len() > MAX_UNPROVEN {
        let message = format!(
            "{} rules have no proof ({}), at most {MAX_UNPROVEN} may: write a test for one",
            unproven.len(),
            unproven.join(", ")
        );
        found.push(Problem::new(RULE_PAGES[0].path, 0, message));
    }
}

/// Checks that all names in the proof of one rule exist, and that its tests name the rule.
fn check_rule(
    rule: &Rule,
    library: &Library,
    tree: &Tree,
    named_by: &BTreeMap<&str, Vec<&ProvingTest>>,
    found: &mut Vec<Problem>,
) {
    let mut report = |message: String| found.push(Problem::new(rule.page.path, rule.line, message));
    let proof = &rule.proof;
    let is_empty = proof.codes.is_empty()
        && proof.drills.is_empty()
        && proof.tests.is_empty()
        && proof.filetests.is_empty();
    let rests_on_codes =
        !is_empty && proof.drills.is_empty() && proof.tests.is_empty() && proof.filetests.is_empty();
    if rests_on_codes {
        report(format!(
            "{} rests on a code alone: name the drill, test or filetest in which it stops this fault",
            rule.id
        ));
    }
    if is_empty == proof.missing.is_none() {
        let id = &rule.id;
        report(format!("{id} needs a code, drill, test or filetest, or `(no proof: reason)`, and not both"));
    }
    for drill in proof.drills.iter().filter(|d| !library.drills.iter().any(|row| row.id == **d)) {
        report(format!("there is no drill `{drill}`: correct the id"));
    }
    for file in proof.filetests.iter().filter(|f| !tree.contains(&format!("filetests/{f}"))) {
        report(format!("there is no filetest `{file}`: write its path below filetests/"));
    }
    for code in proof.codes.iter().filter(|c| !is_shown(c, library, tree)) {
        report(format!("no drill, filetest or test shows {code}: write one, or name another proof"));
    }
    for test in &proof.tests {
        let names_rule = |t: &&ProvingTest| t.rules.contains(&rule.id);
        if !named_by.get(test.as_str()).is_some_and(|tests| tests.iter().any(names_rule)) {
            report(format!(
                "no test `{test}` has `{PROVES} {}` above it: add the line, or correct the name",
                rule.id
            ));
        }
    }
}

/// Reads the tests that name rules. The sources of this crate contain examples only.
fn read_proving_tests(tree: &Tree, found: &mut Vec<Problem>) -> Vec<ProvingTest> {
    let mut tests = Vec::new();
    for file in tree.rust_files().filter(|f| owning_crate(&f.path) != Some("xtask")) {
        let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
        for (i, line) in lines.iter().enumerate() {
            let Some(ids) = line.strip_prefix(PROVES) else { continue };
            let rules: Vec<String> = ids.split(',').map(|id| id.trim().to_string()).collect();
            let unique: BTreeSet<&String> = rules.iter().collect();
            match test_below(&lines[i + 1..]) {
                Some(name) if unique.len() == rules.len() => {
                    let (name, path) = (name.to_string(), file.path.clone());
                    tests.push(ProvingTest { name, path, line: i + 1, rules });
                }
                Some(_) => found.push(Problem::new(&file.path, i + 1, "name each rule once")),
                None => {
                    let message = format!("`{PROVES}` stands above no test: move it above `#[test]`");
                    found.push(Problem::new(&file.path, i + 1, message));
                }
            }
        }
    }
    tests
}

/// Returns the name of the test that begins with these lines: attributes and comments, then the
/// function.
fn test_below<'a>(lines: &[&'a str]) -> Option<&'a str> {
    let head = lines.iter().take_while(|l| l.starts_with("#[") || l.starts_with("//")).count();
    let is_test = lines[..head].contains(&"#[test]");
    let name = lines.get(head)?.strip_prefix("fn ")?.split('(').next()?;
    is_test.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proving_tests_have_a_name_and_rules() {
        let source =
            "//! x\n// proves: D-01, D-02\n#[test]\n#[ignore]\nfn a_test() {}\n// proves: D-03\nfn b() {}\n";
        let tree = Tree::from_files(&[("crates/a/src/lib.rs", source), ("crates/xtask/src/x.rs", source)]);
        let mut found = Vec::new();
        let tests = read_proving_tests(&tree, &mut found);
        assert_eq!(tests.len(), 1);
        assert_eq!((tests[0].name.as_str(), tests[0].line), ("a_test", 2));
        assert_eq!(tests[0].rules, ["D-01", "D-02"]);
        assert!(found.len() == 1 && found[0].message.contains("above no test"), "{found:?}");
    }

    /// Returns the messages for one rule, `D-01`, whose proof is the given text.
    fn messages(proof: &str, source: &str) -> Vec<String> {
        let page = format!("## Contract\n- **D-01** A rule ({proof}).\n");
        let drills = "| `a-drill` | T0701 | 1 | init parity | f | 3 s | [determinism](d.md) |\n";
        let tree = Tree::from_files(&[
            ("docs/reference/drills.md", drills),
            ("filetests/verify/a.tir", "// error: T0311 x\n"),
            ("crates/a/src/lib.rs", source),
        ]);
        let mut found = Vec::new();
        let library = Library {
            rules: super::super::parse::read_rules(RULE_PAGES[1], &page, &mut found),
            drills: super::super::codes_and_drills::read_drills(&tree),
            ..Library::default()
        };
        check(&library, &tree, &mut found);
        found.into_iter().map(|p| p.message).collect()
    }

    #[test]
    fn a_rule_and_its_proof_name_each_other() {
        let test = "//! x\n// proves: D-01\n#[test]\nfn a_test() {}\n";
        for proof in
            ["drill `a-drill`", "T0701, drill `a-drill`", "filetest `verify/a.tir`", "no proof: rare"]
        {
            assert_eq!(messages(proof, "//! x\n"), Vec::<String>::new(), "{proof}");
        }
        assert_eq!(messages("test `a_test`", test), Vec::<String>::new());
        for (proof, source, part) in [
            ("by hand", "//! x\n", "needs a code"),
            ("T0311", "//! x\n", "rests on a code alone"),
            ("drill `a-drill`; (no proof: rare)", "//! x\n", "and not both"),
            ("drill `b`", "//! x\n", "no drill `b`"),
            ("T0799, drill `a-drill`", "//! x\n", "shows T0799"),
            ("filetest `b.tir`", "//! x\n", "no filetest `b.tir`"),
            ("test `a_test`", "//! x\n#[test]\nfn a_test() {}\n", "above it"),
            ("drill `a-drill`", test, "does not name the test `a_test`"),
        ] {
            let found = messages(proof, source);
            assert!(found.len() == 1 && found[0].contains(part), "{proof}: {found:?}");
        }
    }
}
