//! Each rule on the files in `tests/lint`: a comment `# expect: T1435` names what must be found on its line,
//! and nothing else may be found.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, reason = "the cases are files")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use tessera_torch::lint::{FILE_LIMIT_BYTES, lint_python};

/// Returns the cases: name and text.
fn cases() -> Vec<(String, String)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lint");
    let paths = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let mut cases: Vec<(String, String)> = paths
        .map(|p| {
            let name = p.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read_to_string(p).unwrap())
        })
        .collect();
    cases.sort();
    cases
}

/// Returns the line and the code of each finding.
fn findings(name: &str, text: &str) -> BTreeSet<(usize, String)> {
    let line = |offset: usize| text[..offset].matches('\n').count() + 1;
    let report = lint_python(name, text);
    let at = |d: &tessera_base::Diagnostic| line(d.labels[0].span.unwrap_or_default().start);
    report.findings.iter().map(|d| (at(d), d.code.id.to_string())).collect()
}

fn expected(text: &str) -> BTreeSet<(usize, String)> {
    let lines = text.lines().enumerate().filter_map(|(i, l)| Some((i + 1, l.split_once("expect: ")?.1)));
    lines.flat_map(|(i, codes)| codes.split(", ").map(move |c| (i, c.to_string()))).collect()
}

#[test]
fn each_file_has_the_findings_that_its_comments_expect_and_no_others() {
    let mut wrong = Vec::new();
    for (name, text) in cases() {
        let (found, expected) = (findings(&name, &text), expected(&text));
        wrong.extend(expected.difference(&found).map(|(line, c)| format!("{name}:{line}: {c} not found")));
        wrong.extend(found.difference(&expected).map(|(line, c)| format!("{name}:{line}: {c} not expected")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_rule_has_a_case_that_it_finds() {
    let found: BTreeSet<String> =
        cases().iter().flat_map(|(_, text)| expected(text)).map(|(_, code)| code).collect();
    let rules = tessera_torch::CODES.iter().map(|c| c.id).filter(|id| ["T143", "T144"].contains(&&id[..4]));
    let unseen: Vec<&str> = rules.filter(|id| !found.contains(*id)).collect();
    assert!(unseen.is_empty(), "{unseen:?}");
}

#[test]
fn a_comment_suppresses_its_rule_on_its_line_and_is_counted() {
    let (_, text) = cases().into_iter().find(|(name, _)| name == "suppressed.py").unwrap();
    let report = lint_python("suppressed.py", &text);
    assert_eq!((report.suppressed, report.findings.len()), (1, 1));
}

#[test]
fn a_file_above_the_limit_is_refused() {
    let text = "x = 1\n".repeat(usize::try_from(FILE_LIMIT_BYTES).unwrap() / 6 + 1);
    let report = lint_python("big.py", &text);
    assert!(report.findings[0].message.contains("1048578 bytes"), "{:?}", report.findings);
}

#[test]
fn generated_programs_at_the_limit_end_in_time_and_report_a_bounded_number_of_findings() {
    let head = "import torch.distributed as dist\n";
    let room = usize::try_from(FILE_LIMIT_BYTES).unwrap() / 4 - 100;
    let repeat = |begin: &str, unit: &str| format!("{head}{begin}{}", unit.repeat(room / unit.len()));
    let doubled: String = (0..60).map(|i| format!("def f{i}():\n f{}()\n f{}()\n", i + 1, i + 1)).collect();
    let cases = [
        repeat("", "if rank == 0:\n dist.barrier()\n"),
        repeat("def f(rank):\n", " if rank == 0:\n  return\n dist.barrier()\n"),
        repeat("class A:\n", " def f(self):\n  self.a = rank\n  if self.a: dist.barrier()\n"),
        repeat("", "def f():\n g()\n"),
        repeat("", "x = x + x\nif x: dist.barrier()\n"),
        format!("{head}{doubled}def f60():\n dist.barrier()\nif rank == 0: f0()\n"),
    ];
    for text in cases {
        let report = lint_python("generated.py", &text);
        assert!(report.findings.len() <= 100, "{}", report.findings.len());
        assert!(report.omitted == 0 || report.findings.len() == 100);
    }
}

#[test]
fn deep_nesting_is_reported_and_not_followed() {
    for (open, close) in [("(", ")"), ("[", "]"), ("not ", ""), ("-", ""), ("f(", ")"), ("lambda: ", "")] {
        let text = format!("x = {}1{}\n", open.repeat(20_000), close.repeat(20_000));
        let report = lint_python("deep.py", &text);
        assert!(report.findings.iter().all(|d| d.code.id == "T1430"), "{open}: {:?}", report.findings);
    }
    let long_sum =
        format!("import torch.distributed as dist\nx = {}dist.get_rank()\n", "a + ".repeat(20_000));
    assert!(lint_python("long.py", &long_sum).findings.is_empty());
}

#[test]
fn a_group_of_blocks_that_is_nested_too_deeply_is_no_silence() {
    let text: String = (0..500).map(|i| format!("{}if x:\n", " ".repeat(i))).collect();
    let report = lint_python("deep.py", &text);
    assert!(report.findings.iter().any(|d| d.code.id == "T1430"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn any_text_gets_an_answer(text in "\\PC{0,400}|[a-z@():.,=\\[\\]'\"#\\n\\t +*{}-]{0,400}") {
        let _ = lint_python("any.py", &text);
    }

    #[test]
    fn a_damaged_program_gets_an_answer(
        case in 0usize..1000,
        edits in prop::collection::vec((0usize..100_000, any::<Option<char>>()), 1..20),
    ) {
        let cases = cases();
        let mut text: Vec<char> = cases[case % cases.len()].1.chars().collect();
        for (at, with) in edits {
            let at = at % text.len().max(1);
            match with {
                Some(c) => text.insert(at.min(text.len()), c),
                None if !text.is_empty() => drop(text.drain(at..(at + 20).min(text.len()))),
                None => {}
            }
        }
        let text: String = text.into_iter().collect();
        let _ = lint_python("damaged.py", &text);
    }
}
