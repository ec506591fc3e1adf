//! The judge against what happens: it accepts nothing that fails, and refuses nothing that completes but for reasons
//! that stand in a table.
#![allow(clippy::unwrap_used)]

#[path = "../src/judge.rs"]
mod judge;

use tessera_oracle::{Case, EXACT, Rules, Table, compare, filetest, shrink};

const SETS: u32 = 20_000;

#[test]
fn the_judge_and_the_run_agree() {
    let rules = Rules::of(&judge::codes());
    let mut table = Table::new();
    for index in 0..SETS {
        let case = Case::random(1, index);
        let programs = case.programs().unwrap();
        let found = compare(&case.mesh, &programs, &judge::judge);
        if table.add(&case, &found, rules).is_some() {
            let small = shrink(&case, &judge::judge, rules);
            let programs = small.programs().unwrap();
            let found = compare(&small.mesh, &programs, &judge::judge);
            panic!("set {index}, {:?}:\n{}", found.codes, filetest(&programs, &found, "judge and run part"));
        }
    }
    let shown = table.show(rules);
    // Every way to fail, every change and every exact code was there often enough to mean something.
    let outcomes = ["completes", "hang", "race"].map(String::from);
    let fields = ["op", "dtype", "count", "reduction", "root"].map(|f| format!("mismatch in {f}"));
    for word in outcomes.iter().chain(&fields) {
        assert!(table.outcomes.get(word).is_some_and(|n| *n >= 40), "{word}\n{shown}");
    }
    for (name, q) in &table.changes {
        assert!(q.sum() >= 100, "{name}\n{shown}");
        assert!(*name == "(unchanged)" || q.refused_fails >= 40, "{name}\n{shown}");
    }
    let unchanged = table.changes["(unchanged)"];
    assert_eq!(unchanged.accepted_completes, unchanged.sum(), "{shown}");
    let raised = judge::codes();
    for code in EXACT.iter().filter(|c| raised.contains(c)) {
        // A judge that lacked it would be seen to accept what fails.
        assert!(table.alone.get(code).is_some_and(|n| *n >= 20), "{code}\n{shown}");
    }
    assert!(table.alone.get("T0316").is_some_and(|n| *n >= 200), "{shown}");
    for code in ["T0306", "T0313", "T0314", "T0316", "T0318", "T0319"] {
        let seen = |of: &std::collections::BTreeMap<&str, u64>| of.get(code).copied().unwrap_or(0);
        assert!(seen(&table.refused_fails) + seen(&table.refused_completes) > 0, "{code}\n{shown}");
    }
}

#[test]
fn ranks_of_one_role_are_judged_as_if_apart() {
    let mut shared = 0;
    for index in 0..3000 {
        let case = Case::random(2, index);
        let programs = case.programs().unwrap();
        if !programs.iter().skip(1).any(|p| judge::same(&programs[0], p)) {
            continue;
        }
        let together = judge::judge(&case.mesh, &programs);
        let apart = judge::judge_as(&case.mesh, &programs, &|_, _| false);
        assert_eq!(together.is_empty(), apart.is_empty(), "set {index}: {together:?} against {apart:?}");
        shared += 1;
    }
    assert!(shared >= 300, "{shared}");
}

#[test]
fn the_library_does_not_know_the_judge() {
    let src = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in std::fs::read_dir(src).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        // In `lib.rs` the first page speaks of it.
        let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
        assert_eq!(code.contains("tessera_verify"), name == "judge.rs", "{name}");
    }
}
