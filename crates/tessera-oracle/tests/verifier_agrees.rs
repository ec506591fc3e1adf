//! Tests the verifier against the simulation: it accepts no set that fails, and rejects a
//! completing set only for a reason listed in a table.
#![allow(clippy::unwrap_used)]

#[path = "../src/verifier.rs"]
mod verifier;

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::Program;
use tessera_mesh::{Group, Mesh, Rank};
use tessera_oracle::{
    ComparisonTable, EXACT, NOT_ABOUT_COMPLETION, ProgramSet, compare_set, shrink_set, to_filetest,
};

const SETS: u32 = 12_000;

#[test]
fn the_verifier_and_the_simulation_agree() {
    let mut table = ComparisonTable::new();
    for index in 0..SETS {
        let case = ProgramSet::generate_random(1, index);
        let programs = case.lower_programs().unwrap();
        let found = compare_set(&case.mesh, &programs, &verifier::verify_programs);
        if table.add_comparison(&case, &found).is_some() {
            let small = shrink_set(&case, &verifier::verify_programs);
            let programs = small.lower_programs().unwrap();
            let found = compare_set(&small.mesh, &programs, &verifier::verify_programs);
            panic!(
                "set {index}, {:?}:\n{}",
                found.codes,
                to_filetest(&programs, &found, "verifier and simulation disagree")
            );
        }
    }
    let shown = table.to_text();
    // Every outcome, every change and every exact code must occur often enough to be meaningful.
    let outcomes = ["completes", "hang", "race"].map(String::from);
    let fields = ["op", "dtype", "count", "reduction", "root"].map(|f| format!("mismatch in {f}"));
    for word in outcomes.iter().chain(&fields) {
        assert!(table.outcomes.get(word).is_some_and(|n| *n >= 40), "{word}\n{shown}");
    }
    for (name, q) in &table.changes {
        assert!(q.total_sets() >= 100, "{name}\n{shown}");
        assert!(*name == "(unchanged)" || q.rejected_fails >= 40, "{name}\n{shown}");
    }
    let unchanged = table.changes["(unchanged)"];
    assert_eq!(unchanged.accepted_completes, unchanged.total_sets(), "{shown}");
    for code in EXACT {
        // A verifier without this code would accept failing sets.
        assert!(table.rejected_by_one_code.get(code).is_some_and(|n| *n >= 20), "{code}\n{shown}");
    }
    assert!(table.rejected_by_one_code.get("T0316").is_some_and(|n| *n >= 200), "{shown}");
    for code in [
        "T0306", "T0309", "T0313", "T0314", "T0316", "T0318", "T0319", "T0333", "T0335", "T0337", "T0339",
        "T0343",
    ] {
        let seen = |of: &BTreeMap<&str, u64>| of.get(code).copied().unwrap_or(0);
        assert!(seen(&table.rejected_fails) + seen(&table.rejected_completes) > 0, "{code}\n{shown}");
    }
}

#[test]
fn every_kind_of_group_occurs() {
    let mut calls: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut sets: BTreeMap<&str, usize> = BTreeMap::new();
    for index in 0..4000 {
        let case = ProgramSet::generate_random(1, 2 * index);
        let mut see = |word| *sets.entry(word).or_default() += 1;
        let programs = case.lower_programs().unwrap();
        if case.mesh.outside_count() > 0 {
            see("outside");
        }
        let mut groups = BTreeMap::<i64, BTreeSet<Group>>::new();
        for (rank, (_, op)) in
            programs.iter().enumerate().flat_map(|(r, p)| p.collective_ops().map(move |c| (r, c)))
        {
            let group = op.comm_group().unwrap();
            let kind = match group {
                Group::Axis { subgroup_size: None, .. } => "axis",
                Group::Axis { subgroup_size: Some(_), .. } => "block",
                Group::World if case.mesh.contains(Rank(rank as u32)) => "world",
                Group::World => "world from outside",
            };
            *calls.entry((op.opcode.name(), kind)).or_default() += 1;
            if let Some(b) = op.batch_number() {
                groups.entry(b).or_default().insert(group);
            }
        }
        if groups.values().any(|g| g.len() > 1) {
            see("one launch over two groups");
        }
    }
    let pieces = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
    let values = ["broadcast", "send", "recv"];
    let wanted = |of: &[&'static str], kinds: &[&'static str]| -> Vec<(&'static str, &'static str)> {
        of.iter().flat_map(|o| kinds.iter().map(move |k| (*o, *k))).collect()
    };
    let everywhere = wanted(&values, &["axis", "block", "world", "world from outside"]);
    for key in [wanted(&pieces, &["axis", "block"]), everywhere, vec![("all_reduce", "world")]].concat() {
        assert!(calls.get(&key).is_some_and(|n| *n >= 50), "{key:?} in {calls:?}");
    }
    for word in ["outside", "one launch over two groups"] {
        assert!(sets.get(word).is_some_and(|n| *n >= 50), "{word} in {sets:?}");
    }
}

#[test]
fn a_leader_has_no_role_of_the_mesh() {
    let mesh = Mesh::new([2, 1, 1, 1]).unwrap().with_outside(1).unwrap();
    let text = |role: &str| {
        format!(
            "program @denoise role({role}) mesh(tp=2, outside=1) {{
               %x = input : f32[4]
               %y = ttile.collective.broadcast %x {{axis = \"world\", root = 0}}
             }}"
        )
    };
    let set: Vec<Program> =
        ["r0@out0", "r1", "r2"].iter().map(|r| tessera_ir::parse(&text(r), "p").unwrap()).collect();
    let set: Vec<Program> = set.into_iter().map(Program::without_spans).collect();
    assert_eq!(verifier::verify_programs(&mesh, &set), Vec::<&str>::new());
    assert_eq!(verifier::verify_with_roles(&mesh, &set, &|_, _| true), ["T0337"]);
}

#[test]
fn ranks_of_one_role_are_verified_like_separate_roles() {
    let mut shared = 0;
    for index in 0..3000 {
        let case = ProgramSet::generate_random(2, index);
        let programs = case.lower_programs().unwrap();
        if !programs.iter().skip(1).any(|p| verifier::share_role(&programs[0], p)) {
            continue;
        }
        let together = verifier::verify_programs(&case.mesh, &programs);
        let apart = verifier::verify_with_roles(&case.mesh, &programs, &|_, _| false);
        // Values are followed role by role, so splitting a role may change the conservative codes
        // but not the verdict.
        let through = |codes: &[&str]| codes.iter().all(|c| NOT_ABOUT_COMPLETION.contains(c));
        assert_eq!(through(&together), through(&apart), "set {index}: {together:?} against {apart:?}");
        shared += 1;
    }
    assert!(shared >= 300, "{shared}");
}

#[test]
fn the_library_does_not_depend_on_the_verifier() {
    let src = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in std::fs::read_dir(src).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        // The documentation of `lib.rs` mentions the verifier; comments are ignored.
        let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect();
        assert_eq!(code.contains("tessera_verify"), name == "verifier.rs", "{name}");
    }
}
