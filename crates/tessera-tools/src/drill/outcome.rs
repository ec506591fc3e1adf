//! How a drill ended, and whether that is the expected end.

use std::time::Duration;

use tessera_runtime::{CheckSite, Failure};

use super::overlap_sweep::MeasuredGate;
use super::table::{Drill, FailureSignature};

/// The observed end of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// The failure that the run reported, or that its record or a rank's error output names.
    Failure(ObservedFailure),
    /// The run ended without a failure.
    Completed,
    /// The run did not end by itself and was killed.
    Killed,
    /// The drill was a measurement and passes if all of these gates pass.
    Gates(Vec<MeasuredGate>),
}

/// The failure with which a drill's run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFailure {
    /// Diagnostic code of the failure, for example T0756.
    pub code: String,
    /// The rank that the failure names, or `None` if no rank deviated.
    pub rank: Option<u32>,
    /// The site of the check that found the failure.
    pub site: CheckSite,
    /// Message of the failure; for [`DrillKind::WrongSecret`](super::DrillKind::WrongSecret), the
    /// first line of rank 1's error output.
    pub text: String,
}

impl From<Failure> for ObservedFailure {
    fn from(f: Failure) -> ObservedFailure {
        ObservedFailure { code: f.code, rank: f.rank, site: f.site, text: f.text }
    }
}

/// One drill with the observed end of its run, the time that the run took, and what it left behind.
#[derive(Debug, Clone)]
pub struct DrillOutcome {
    /// The drill that ran, with the failure that it expects.
    pub drill: &'static Drill,
    /// How the run ended; [`DrillOutcome::matches_signature`] compares it with the expected
    /// failure.
    pub observed: Observation,
    /// Time from the fault to the end of the last process; for a measurement, its total time.
    pub elapsed: Duration,
    /// Maximum of `elapsed`: the limit of the drill, and an allowance if the ranks compute on GPUs.
    pub limit: Duration,
    /// Processes that outlived the run and were then killed.
    pub leftover_pids: Vec<u32>,
    /// Markdown table of the `depth-sweep` measurement; `None` for every other drill.
    pub table: Option<String>,
}

impl DrillOutcome {
    /// Returns whether the observed failure has the expected code, rank and site, or whether all
    /// gates of a measurement pass.
    #[must_use]
    pub fn matches_signature(&self) -> bool {
        match (&self.observed, self.drill.expected) {
            (Observation::Failure(seal), Some(FailureSignature { code, rank, site: place })) => {
                (seal.code.as_str(), seal.rank, seal.site) == (code, rank, place)
            }
            (Observation::Gates(gates), None) => !gates.is_empty() && gates.iter().all(|g| g.passes),
            _ => false,
        }
    }

    /// Returns whether the drill passes: it has the expected failure, ends within the limit and
    /// leaves no process behind.
    #[must_use]
    pub fn is_green(&self) -> bool {
        self.matches_signature() && self.leftover_pids.is_empty() && self.elapsed <= self.limit
    }
}
