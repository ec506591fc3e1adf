//! A sample of storms, that each planted bug is found, and that a seed is one run.

use tessera_storm::{Case, Plant, run};

#[test]
fn nothing_happens_that_must_not() {
    let (mut finished, mut failed) = (0, 0);
    for seed in 0..1_000 {
        let case = Case::random(seed);
        let outcome = run(&case, None, None);
        assert!(outcome.violations.is_empty(), "{case:?}\n{:#?}", outcome.violations);
        finished += u32::from(outcome.finished);
        failed += u32::from(outcome.failure.is_some());
    }
    // A storm that breaks nothing, and one that breaks everything, would show nothing.
    assert!(finished > 300 && failed > 100, "{finished} finished, {failed} failed");
}

#[test]
fn every_planted_bug_is_found() {
    for plant in Plant::ALL {
        let by = (0..1_000).find(|seed| !run(&Case::random(*seed), Some(plant), None).violations.is_empty());
        assert!(by.is_some(), "{} is not found", plant.name());
    }
}

#[test]
fn a_seed_is_one_run() {
    for seed in 0..60 {
        let case = Case::random(seed);
        assert_eq!(case, Case::random(seed));
        let (a, b) = (run(&case, None, None), run(&case, None, None));
        assert_eq!((a.trace, a.events), (b.trace, b.events), "seed {seed}");
    }
    let different: std::collections::BTreeSet<_> =
        (0..60).map(|seed| run(&Case::random(seed), None, None).trace).collect();
    assert!(different.len() > 55);
}
