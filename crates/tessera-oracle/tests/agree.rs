//! One order of steps says what all orders say, and sets say the same as text and in a smaller form.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use tessera_ir::{Program, parse_all, print};
use tessera_mesh::Mesh;
use tessera_oracle::{Case, Violation, compare, explore, explore_all, shrink};

const SEED: u64 = 11;

#[test]
fn one_order_says_what_all_orders_say() {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for index in 0..6000 {
        let case = Case::small(SEED, index);
        let programs = case.programs().unwrap();
        let all: Vec<&Program> = programs.iter().collect();
        let Some(every) = explore_all(&case.mesh, &all, 1500) else { continue };
        let one = explore(&case.mesh, &all);
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
        let case = Case::random(SEED, 2 * index);
        let programs = case.programs().unwrap();
        let text: String = programs.iter().map(print).collect();
        let read = parse_all(&text, "p").unwrap_or_else(|e| panic!("set {index}\n{text}\n{e:?}"));
        let read: Vec<Program> = read.into_iter().map(Program::without_spans).collect();
        assert_eq!(read, programs);
    }
}

#[test]
fn a_seed_and_an_index_give_one_set() {
    let shown =
        |index| -> Vec<String> { Case::random(3, index).programs().unwrap().iter().map(print).collect() };
    assert_eq!(shown(5), shown(5));
    assert_ne!(shown(5), shown(7));
}

#[test]
fn a_disagreement_shrinks_to_what_it_needs() {
    // A judge that accepts everything is wrong about every failing set.
    let lenient = |_: &Mesh, _: &[Program]| Vec::new();
    let mut shrunk = 0;
    for index in (1..400).step_by(2) {
        let case = Case::random(SEED, index);
        let found = compare(&case.mesh, &case.programs().unwrap(), &lenient);
        if found.violation() != Some(Violation::AcceptedFails) {
            continue;
        }
        let small = shrink(&case, &lenient);
        let found = compare(&small.mesh, &small.programs().unwrap(), &lenient);
        assert_eq!(found.violation(), Some(Violation::AcceptedFails));
        assert!(small.meetings.len() <= 4, "set {index}: {small:?}");
        assert!((1..=2).contains(&(small.mutations.len() + small.edits.len())), "set {index}");
        shrunk += usize::from(small.meetings.len() < case.meetings.len());
    }
    assert!(shrunk > 10, "{shrunk}");
}
