//! Storms: the whole runtime on a made-up clock, under delays, losses, duplicates, kills, stalls and partitions.
//!
//! One seed is one [`Case`], which is one run, event by event. [`run`] looks at everything that happens and reports
//! what must never: a rank in collectives that another will not join, a picture of a scene that is over, ids that
//! fall, a wait without an end, a process that stays, a run that is ended although nothing was wrong, and a healthy
//! rank that is blamed. A [`Plant`] puts a known bug in, to show that the storm would have found it.
//!
//! This workshop knows the machines by what they send and do, and nothing of how they decide.

mod case;
mod check;
mod plant;
mod sky;

pub use case::Case;
pub use check::{Outcome, Violation};
pub use plant::Plant;

use check::Checker;
use sky::Sky;
use tessera_runtime::sim::Sim;

/// Longest run of the made-up clock, in nanoseconds.
pub const LIMIT_NS: u64 = 400_000_000_000;

/// Runs a case, with a bug or without. `trace` is told every event.
#[must_use]
pub fn run(case: &Case, plant: Option<Plant>, trace: Option<&mut dyn FnMut(String)>) -> Outcome {
    let setup = plant::setup(case, plant);
    let sky = Sky::new(case, plant, Checker::new(case), trace);
    match Sim::new(setup, sky) {
        Ok(mut sim) => {
            let ending = sim.run(LIMIT_NS);
            sim.world.finish(&ending)
        }
        Err(found) => Outcome::refused(&found),
    }
}
