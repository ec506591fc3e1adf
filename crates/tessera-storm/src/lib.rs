//! Storms: simulated runs of the whole runtime on a virtual clock, under delays, losses,
//! duplicates, kills, stalls and partitions.
//!
//! A seed determines one [`Scenario`], and a scenario one run, event by event. [`run_scenario`]
//! observes every event and reports violated invariants: a rank that enters collectives which
//! another rank will not join, a frame of a scene that is over, decreasing ids, an unbounded wait,
//! a process that never exits, a run that is ended without a fault, and a healthy rank that is
//! blamed. An [`InjectedBug`] adds a known bug, to show that the storm would have found it.
//!
//! This development crate observes the state machines only through their messages and actions, and
//! does not depend on how they decide.

#![forbid(unsafe_code)]

mod injected_bugs;
mod invariants;
mod scenario;
mod world;

pub use injected_bugs::InjectedBug;
pub use invariants::{InvariantViolation, StormOutcome};
pub use scenario::Scenario;

use invariants::InvariantChecker;
use tessera_runtime::sim::Sim;
use world::ScenarioWorld;

/// Maximum simulated duration of a run in nanoseconds.
pub const MAX_SIMULATED_NS: u64 = 400_000_000_000;

/// Runs a scenario, optionally with an injected bug. `trace` receives every event.
#[must_use]
pub fn run_scenario(
    scenario: &Scenario,
    bug: Option<InjectedBug>,
    trace: Option<&mut dyn FnMut(String)>,
) -> StormOutcome {
    let setup = injected_bugs::sim_config(scenario, bug);
    let world = ScenarioWorld::new(scenario, bug, InvariantChecker::new(scenario), trace);
    match Sim::new(setup, world) {
        Ok(mut sim) => {
            let ending = sim.run(MAX_SIMULATED_NS);
            sim.world.into_outcome(&ending)
        }
        Err(found) => StormOutcome::from_setup_errors(&found),
    }
}
