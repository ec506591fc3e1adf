//! Tests a sample of storms, that storms find each injected bug, and that a seed determines one
//! run.

use tessera_storm::{InjectedBug, Scenario, run_scenario};

#[test]
fn no_invariant_is_violated() {
    let (mut finished, mut failed) = (0, 0);
    for seed in 0..1_000 {
        let case = Scenario::from_seed(seed);
        let outcome = run_scenario(&case, None, None);
        assert!(outcome.violations.is_empty(), "{case:?}\n{:#?}", outcome.violations);
        finished += u32::from(outcome.finished);
        failed += u32::from(outcome.failure.is_some());
    }
    // The sample must contain both runs that finish and runs that fail.
    assert!(finished > 300 && failed > 100, "{finished} finished, {failed} failed");
}

#[test]
fn every_injected_bug_is_found() {
    for bug in InjectedBug::iter_all() {
        let by = (0..1_000)
            .find(|seed| !run_scenario(&Scenario::from_seed(*seed), Some(bug), None).violations.is_empty());
        assert!(by.is_some(), "{} is not found", bug.name());
    }
}

#[test]
fn a_seed_determines_one_run() {
    for seed in 0..60 {
        let case = Scenario::from_seed(seed);
        assert_eq!(case, Scenario::from_seed(seed));
        let (a, b) = (run_scenario(&case, None, None), run_scenario(&case, None, None));
        assert_eq!((a.trace, a.events), (b.trace, b.events), "seed {seed}");
    }
    let different: std::collections::BTreeSet<_> =
        (0..60).map(|seed| run_scenario(&Scenario::from_seed(seed), None, None).trace).collect();
    assert!(different.len() > 55);
}
