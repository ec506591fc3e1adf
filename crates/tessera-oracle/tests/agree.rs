//! Tests that one order of steps gives the same outcome as all orders, and that sets survive
//! printing and shrinking.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use tessera_ir::{Program, parse_all, print};
use tessera_mesh::Mesh;
use tessera_oracle::{
    Disagreement, ProgramSet, compare_set, explore_all_orders, explore_one_order, shrink_set,
};

const SEED: u64 = 11;

#[test]
fn one_order_and_all_orders_have_equal_outcomes() {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for index in 0..6000 {
        let case = ProgramSet::generate_small(SEED, index);
        let programs = case.lower_programs().unwrap();
        let all: Vec<&Program> = programs.iter().collect();
        let Some(every) = explore_all_orders(&case.mesh, &all, 1500) else { continue };
        let one = explore_one_order(&case.mesh, &all);
        assert_eq!(one.kind(), every.kind(), "set {index}: {one}\nagainst {every}");
        *kinds.entry(one.kind()).or_default() += 1;
    }
    let least = [("completes", 1500), ("hang", 150), ("mismatch", 150), ("race", 50)];
    for (kind, n) in least {
        assert!(kinds.get(kind).is_some_and(|k| *k >= n), "{kinds:?}");
    }
    assert!(kinds.values().sum::<usize>() >= 3000, "{kinds:?}");
}

#[test]
fn the_text_of_a_set_reads_back() {
    for index in 0..300 {
        let case = ProgramSet::generate_random(SEED, 2 * index);
        let programs = case.lower_programs().unwrap();
        let text: String = programs.iter().map(print).collect();
        let read = parse_all(&text, "p").unwrap_or_else(|e| panic!("set {index}\n{text}\n{e:?}"));
        let read: Vec<Program> = read.into_iter().map(Program::without_spans).collect();
        assert_eq!(read, programs);
    }
}

#[test]
fn a_seed_and_an_index_give_one_set() {
    let shown = |index| -> Vec<String> {
        ProgramSet::generate_random(3, index).lower_programs().unwrap().iter().map(print).collect()
    };
    assert_eq!(shown(5), shown(5));
    assert_ne!(shown(5), shown(7));
}

#[test]
fn a_disagreement_shrinks_to_its_cause() {
    // A verifier that accepts everything is wrong about every failing set.
    let lenient = |_: &Mesh, _: &[Program]| Vec::new();
    let mut shrunk = 0;
    for index in (1..400).step_by(2) {
        let case = ProgramSet::generate_random(SEED, index);
        let found = compare_set(&case.mesh, &case.lower_programs().unwrap(), &lenient);
        if found.disagreement() != Some(Disagreement::AcceptedFails) {
            continue;
        }
        let small = shrink_set(&case, &lenient);
        let found = compare_set(&small.mesh, &small.lower_programs().unwrap(), &lenient);
        assert_eq!(found.disagreement(), Some(Disagreement::AcceptedFails));
        assert!(small.operations.len() <= 4, "set {index}: {small:?}");
        assert!((1..=2).contains(&(small.mutations.len() + small.rewrites.len())), "set {index}");
        shrunk += usize::from(small.operations.len() < case.operations.len());
    }
    assert!(shrunk > 10, "{shrunk}");
}
