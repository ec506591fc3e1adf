//! Known bugs, put in on purpose: a storm that does not find them finds nothing.

use tessera_runtime::sim::{Facts, Setup, TICK_NS};
use tessera_runtime::{Limits, tripwire::Tripwires};

use crate::Case;

/// A bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// The leader takes one rank's ready for everybody's.
    CommitEarly,
    /// The studio writes what it was handed, whatever cut came meanwhile.
    FenceIgnored,
    /// Finished chunks may pile up without a bound.
    OutputUnbounded,
    /// An envelope or a commit that comes twice is taken twice.
    RunTwice,
    /// Nobody looks at the clock.
    NoDeadlines,
    /// A closed socket means nothing.
    DeathUnnoticed,
    /// A rank runs with another seed, and nobody compares results.
    DriftUnnoticed,
    /// Marks that grow are taken for a stall all the same.
    ImpatientWatchdog,
}

impl Plant {
    /// Every one.
    pub const ALL: [Plant; 8] = [
        Plant::CommitEarly,
        Plant::FenceIgnored,
        Plant::OutputUnbounded,
        Plant::RunTwice,
        Plant::NoDeadlines,
        Plant::DeathUnnoticed,
        Plant::DriftUnnoticed,
        Plant::ImpatientWatchdog,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Plant::CommitEarly => "commit-early",
            Plant::FenceIgnored => "fence-ignored",
            Plant::OutputUnbounded => "output-unbounded",
            Plant::RunTwice => "run-twice",
            Plant::NoDeadlines => "no-deadlines",
            Plant::DeathUnnoticed => "death-unnoticed",
            Plant::DriftUnnoticed => "drift-unnoticed",
            Plant::ImpatientWatchdog => "impatient-watchdog",
        }
    }

    fn off(self) -> &'static [&'static str] {
        match self {
            Plant::RunTwice => &["T0730", "T0707", "T0746", "T0712", "T0755"],
            Plant::NoDeadlines => &["T0743"],
            Plant::DeathUnnoticed => &["T0742"],
            Plant::DriftUnnoticed => &["T0744", "T0747", "T0759"],
            Plant::CommitEarly => &["T0755"],
            _ => &[],
        }
    }
}

/// What the machines of a case are made with.
pub(crate) fn setup(case: &Case, plant: Option<Plant>) -> Setup {
    let limits = match plant {
        Some(Plant::OutputUnbounded) => Limits { d_out: Limits::MAX_DEPTH, ..Case::limits() },
        Some(Plant::ImpatientWatchdog) => {
            Limits { done_floor_ns: 100_000_000, done_factor: 1, ..Case::limits() }
        }
        _ => Case::limits(),
    };
    Setup {
        ranks: case.ranks,
        outside: case.outside,
        launcher: case.launcher,
        facts: Facts::made_up(case.regime),
        tick_ns: TICK_NS,
        limits,
        tripwires: Tripwires::off(plant.map_or(&[][..], Plant::off).iter().copied()),
        requests: case.requests.clone(),
        blows: case.blows.clone(),
    }
}
