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

/// Checks that a rule finds what the comments of its bad file expect, and nothing in its good file.
#[track_caller]
fn assert_rule(code: &str, stem: &str) {
    let cases = cases();
    let text = |kind: &str| {
        let name = format!("{stem}_{kind}.py");
        cases.iter().find(|(n, _)| *n == name).map(|(_, text)| text.clone()).unwrap()
    };
    let (bad, good) = (text("bad"), text("good"));
    assert!(expected(&bad).iter().any(|(_, c)| c == code), "{stem}_bad.py expects no {code}");
    assert_eq!((findings(stem, &bad), findings(stem, &good)), (expected(&bad), BTreeSet::new()));
}

// proves: P-16
#[test]
fn work_objects_that_are_kept_are_found() {
    assert_rule("T1431", "kept_work");
}

// proves: P-17
#[test]
fn groups_in_compiled_code_are_found() {
    assert_rule("T1432", "group");
}

// proves: P-15
#[test]
fn in_place_collectives_in_compiled_code_are_found() {
    assert_rule("T1433", "in_place");
}

// proves: P-20
#[test]
fn functional_collectives_in_eager_code_are_found() {
    assert_rule("T1434", "eager_functional");
}

// proves: P-22
#[test]
fn collectives_under_a_condition_on_the_rank_are_found() {
    assert_rule("T1435", "rank_condition");
}

// proves: P-23
#[test]
fn collectives_under_a_condition_on_own_data_are_found() {
    assert_rule("T1436", "data_condition");
}

// proves: P-24
#[test]
fn collectives_under_a_debug_switch_are_found() {
    assert_rule("T1437", "debug_switch");
}

// proves: P-25
#[test]
fn collectives_in_a_try_that_goes_on_are_found() {
    assert_rule("T1438", "try");
}

// proves: P-03
#[test]
fn reads_before_a_wait_are_found() {
    assert_rule("T1439", "early_read");
}

// proves: P-03
#[test]
fn dropped_results_are_found() {
    assert_rule("T1440", "dropped");
}

// proves: P-18
#[test]
fn side_effects_in_compiled_code_are_found() {
    assert_rule("T1441", "side_effect");
}

// proves: P-19
#[test]
fn reads_from_the_device_in_compiled_code_are_found() {
    assert_rule("T1442", "host_read");
}

// proves: P-27
#[test]
fn rings_in_which_all_ranks_send_first_are_found() {
    assert_rule("T1443", "send_order");
}

// proves: P-26
#[test]
fn collectives_for_each_item_of_one_rank_are_found() {
    assert_rule("T1444", "own_items");
}

#[test]
fn whole_programs_and_broken_files_have_the_findings_that_their_comments_expect() {
    let is_pair = |name: &str| name.ends_with("_bad.py") || name.ends_with("_good.py");
    for (name, text) in cases().into_iter().filter(|(name, _)| !is_pair(name)) {
        assert_eq!(findings(&name, &text), expected(&text), "{name}");
    }
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
