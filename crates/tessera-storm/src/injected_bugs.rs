//! Known bugs, injected on purpose: a storm that does not find them is useless.

use tessera_runtime::sim::{SimConfig, TICK_NS, synthetic_config};
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

/// Each bug with its name on the command line and the tripwires that would catch it at once, which
/// are disabled; in the order of the variants.
const BUGS: [(InjectedBug, &str, &[&str]); 8] = [
    (InjectedBug::CommitEarly, "commit-early", &["T0755"]),
    (InjectedBug::MinEpochIgnored, "min-epoch-ignored", &[]),
    (InjectedBug::OutputUnbounded, "output-unbounded", &[]),
    (InjectedBug::RunTwice, "run-twice", &["T0730", "T0707", "T0746", "T0712", "T0755"]),
    (InjectedBug::NoDeadlines, "no-deadlines", &["T0743"]),
    (InjectedBug::DeathUnnoticed, "death-unnoticed", &["T0742"]),
    (InjectedBug::DriftUnnoticed, "drift-unnoticed", &["T0744", "T0747", "T0759"]),
    (InjectedBug::ImpatientWatchdog, "impatient-watchdog", &[]),
];

impl InjectedBug {
    /// Iterates over every bug that a storm can inject.
    pub fn iter_all() -> impl Iterator<Item = InjectedBug> {
        BUGS.iter().map(|(bug, ..)| *bug)
    }

    /// Returns the bug's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        BUGS[self as usize].1
    }
}

/// Returns the configuration of a scenario's simulation.
pub(crate) fn sim_config(scenario: &Scenario, bug: Option<InjectedBug>) -> SimConfig {
    let mut limits = Scenario::runtime_limits();
    match bug {
        Some(InjectedBug::OutputUnbounded) => limits.d_out = Limits::MAX_DEPTH,
        Some(InjectedBug::ImpatientWatchdog) => {
            (limits.done_floor_ns, limits.done_factor) = (100_000_000, 1);
        }
        _ => {}
    }
    let disabled = bug.map_or(&[][..], |bug| BUGS[bug as usize].2);
    let tripwires = Tripwires::disabling(disabled.iter().copied());
    SimConfig {
        leader: synthetic_config(scenario.mesh_ranks(), scenario.regime, limits, tripwires),
        launcher: scenario.launcher,
        tick_ns: TICK_NS,
        requests: scenario.requests.iter().copied().collect(),
        external_events: scenario.external_events.clone(),
    }
}
