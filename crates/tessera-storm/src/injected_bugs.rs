//! Known bugs, injected on purpose: a storm that does not find them is useless.

use tessera_runtime::sim::{SharedConfig, SimConfig, TICK_NS};
use tessera_runtime::{Limits, tripwire::Tripwires};

use crate::Scenario;

/// A known bug that a run can inject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedBug {
    /// The leader treats one rank's ready message as that of all ranks.
    CommitEarly,
    /// The media pipeline delivers every chunk, regardless of scene cuts in the meantime.
    MinEpochIgnored,
    /// Finished chunks may queue without a bound.
    OutputUnbounded,
    /// A duplicated envelope or commit is executed twice.
    RunTwice,
    /// No process checks its deadlines.
    NoDeadlines,
    /// A closed socket is ignored.
    DeathUnnoticed,
    /// A rank runs with another seed, and results are not compared.
    DriftUnnoticed,
    /// A watchdog treats a rank as stalled although its progress counter advances.
    ImpatientWatchdog,
}

impl InjectedBug {
    /// Every bug that a storm can inject.
    pub const ALL: [InjectedBug; 8] = [
        InjectedBug::CommitEarly,
        InjectedBug::MinEpochIgnored,
        InjectedBug::OutputUnbounded,
        InjectedBug::RunTwice,
        InjectedBug::NoDeadlines,
        InjectedBug::DeathUnnoticed,
        InjectedBug::DriftUnnoticed,
        InjectedBug::ImpatientWatchdog,
    ];

    /// Returns the bug's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            InjectedBug::CommitEarly => "commit-early",
            InjectedBug::MinEpochIgnored => "min-epoch-ignored",
            InjectedBug::OutputUnbounded => "output-unbounded",
            InjectedBug::RunTwice => "run-twice",
            InjectedBug::NoDeadlines => "no-deadlines",
            InjectedBug::DeathUnnoticed => "death-unnoticed",
            InjectedBug::DriftUnnoticed => "drift-unnoticed",
            InjectedBug::ImpatientWatchdog => "impatient-watchdog",
        }
    }

    fn disabled_tripwires(self) -> &'static [&'static str] {
        match self {
            InjectedBug::RunTwice => &["T0730", "T0707", "T0746", "T0712", "T0755"],
            InjectedBug::NoDeadlines => &["T0743"],
            InjectedBug::DeathUnnoticed => &["T0742"],
            InjectedBug::DriftUnnoticed => &["T0744", "T0747", "T0759"],
            InjectedBug::CommitEarly => &["T0755"],
            _ => &[],
        }
    }
}

/// Returns the configuration of a scenario's simulation.
pub(crate) fn sim_config(scenario: &Scenario, bug: Option<InjectedBug>) -> SimConfig {
    let limits = match bug {
        Some(InjectedBug::OutputUnbounded) => {
            Limits { d_out: Limits::MAX_DEPTH, ..Scenario::runtime_limits() }
        }
        Some(InjectedBug::ImpatientWatchdog) => {
            Limits { done_floor_ns: 100_000_000, done_factor: 1, ..Scenario::runtime_limits() }
        }
        _ => Scenario::runtime_limits(),
    };
    SimConfig {
        ranks: scenario.ranks,
        outside: scenario.outside,
        launcher: scenario.launcher,
        shared: SharedConfig::synthetic(scenario.regime),
        tick_ns: TICK_NS,
        limits,
        tripwires: Tripwires::disabling(bug.map_or(&[][..], InjectedBug::disabled_tripwires).iter().copied()),
        requests: scenario.requests.clone(),
        external_events: scenario.external_events.clone(),
    }
}
