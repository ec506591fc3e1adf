//! Failures that end a run: each run ends with at most one failure, which has one class and one
//! exit status.

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

use crate::tripwire::{self, CheckSite};

/// Why a run ended. Each class has its own exit status between 10 and 29.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureClass {
    /// A process ended unexpectedly.
    RankDied,
    /// A rank is alive but makes no progress, or did not answer in time.
    Stall,
    /// A message arrived at the wrong process, at the wrong time, or in an invalid form.
    Protocol,
    /// Ranks have different plans, builds or settings.
    Parity,
    /// Ranks had the same plan and produced different results.
    Drift,
    /// The request or the plan was refused before any rank waited for it.
    Preflight,
    /// The device or a kernel failed.
    Engine,
    /// The output could not be decoded or written.
    Output,
    /// The process that started the ranks ended first, or a leader without a launcher was stopped
    /// twice.
    LauncherGone,
    /// A peer did not prove that it belongs to the run.
    Peer,
}

impl FailureClass {
    /// Every class, in order of exit status.
    pub const ALL: [FailureClass; 10] = [
        FailureClass::RankDied,
        FailureClass::Stall,
        FailureClass::Protocol,
        FailureClass::Parity,
        FailureClass::Drift,
        FailureClass::Preflight,
        FailureClass::Engine,
        FailureClass::Output,
        FailureClass::LauncherGone,
        FailureClass::Peer,
    ];

    /// Returns the exit status of a process that ends with this class.
    #[must_use]
    pub fn exit_code(self) -> i32 {
        10 + FailureClass::ALL.iter().position(|c| *c == self).unwrap_or(0) as i32
    }

    /// Returns the class of an exit status, if the status is one of these classes.
    #[must_use]
    pub fn from_exit_code(code: i32) -> Option<FailureClass> {
        usize::try_from(code - 10).ok().and_then(|i| FailureClass::ALL.get(i).copied())
    }

    /// Returns a phrase for messages, such as `a rank died`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            FailureClass::RankDied => "a rank died",
            FailureClass::Stall => "a rank stalled",
            FailureClass::Protocol => "the lockstep protocol was broken",
            FailureClass::Parity => "ranks have different plans or settings",
            FailureClass::Drift => "ranks drifted apart",
            FailureClass::Preflight => "refused before any rank waited",
            FailureClass::Engine => "an engine failed",
            FailureClass::Output => "the output could not be delivered",
            FailureClass::LauncherGone => "the launching process is gone",
            FailureClass::Peer => "a peer did not prove that it belongs to the run",
        }
    }
}

/// The single reason for the end of a run. A later failure never replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class, which fixes the exit status.
    pub class: FailureClass,
    /// The rank that deviated first, if one can be named.
    pub rank: Option<u32>,
    /// Site of the check that found the failure; the fault itself may have begun elsewhere.
    pub site: CheckSite,
    /// The id of the diagnostic code, for `tessera explain`.
    pub code: String,
    /// A description with the values of both sides.
    pub text: String,
}

/// Maximum bytes of a failure's text. The text is sent in a message, and a message over a limit
/// could not be sent at all.
const MAX_TEXT_BYTES: usize = 64 << 10;

impl Failure {
    /// Creates a failure with a code of this build, found at the primary site of the code's
    /// tripwire.
    #[must_use]
    pub fn new(class: FailureClass, rank: Option<u32>, code: &Code, text: impl Into<String>) -> Failure {
        let site = tripwire::primary_site(code);
        let mut text = text.into();
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        Failure { class, rank, site, code: code.id.to_string(), text }
    }

    /// Returns the same failure with another site.
    #[must_use]
    pub fn with_site(self, site: CheckSite) -> Failure {
        Failure { site, ..self }
    }

    /// Converts the first of several findings and appends the others to its text. Returns `None` if
    /// there are no findings.
    #[must_use]
    pub(crate) fn from_diagnostics(
        class: FailureClass,
        rank: Option<u32>,
        found: &[Diagnostic],
    ) -> Option<Failure> {
        let mut failure = Failure::from_diagnostic(class, rank, found.first()?);
        for d in &found[1..] {
            failure.text += &format!("; also [{}] {}", d.code.id, d.message);
        }
        Some(failure)
    }

    /// Converts a diagnostic into a failure with a plain text.
    #[must_use]
    pub fn from_diagnostic(class: FailureClass, rank: Option<u32>, d: &Diagnostic) -> Failure {
        let mut text = d.message.clone();
        for p in &d.labels {
            text += &format!("; {}: {}", p.location, p.message);
        }
        for n in &d.notes {
            text += &format!("; {n}");
        }
        if let Some(h) = &d.hint {
            text += &format!("; hint: {h}");
        }
        Failure::new(class, rank, d.code, text)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = self.rank.map_or(String::new(), |r| format!(" (rank {r})"));
        write!(f, "[{}] {}{rank}: {}", self.code, self.class.as_str(), self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: S-07
    #[test]
    fn classes_and_exit_codes_map_both_ways() {
        for (i, class) in FailureClass::ALL.into_iter().enumerate() {
            assert_eq!(class.exit_code(), 10 + i as i32);
            assert_eq!(FailureClass::from_exit_code(class.exit_code()), Some(class));
        }
        assert_eq!(FailureClass::LauncherGone.exit_code(), 18);
        assert_eq!(FailureClass::from_exit_code(9), None);
        assert_eq!(FailureClass::Peer.exit_code(), 19);
        assert_eq!(FailureClass::from_exit_code(20), None);
    }
}
