//! How a run ends badly: one failure, one class, one exit status.

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

use crate::tripwire::{self, Place};

/// Why a run ended. Each class has its own exit status between 10 and 29.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureClass {
    /// A process ended that should not have.
    RankDied,
    /// A rank lives but makes no progress, or did not answer in time.
    Stall,
    /// A message that may not arrive here, now, or in this form.
    Protocol,
    /// Ranks do not hold the same plan, build or settings.
    Parity,
    /// Ranks held the same plan and came to different results.
    Drift,
    /// The request or the plan was refused before any rank was made to wait.
    Preflight,
    /// The device or a kernel failed.
    Engine,
    /// The output could not be decoded or written.
    Output,
    /// The launching process went away.
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

    /// The exit status of a process that ends for this reason.
    #[must_use]
    pub fn exit_code(self) -> i32 {
        10 + FailureClass::ALL.iter().position(|c| *c == self).unwrap_or(0) as i32
    }

    /// The class of an exit status, if it is one of ours.
    #[must_use]
    pub fn from_exit_code(code: i32) -> Option<FailureClass> {
        usize::try_from(code - 10).ok().and_then(|i| FailureClass::ALL.get(i).copied())
    }

    /// A few words for a person.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            FailureClass::RankDied => "a rank died",
            FailureClass::Stall => "a rank stalled",
            FailureClass::Protocol => "the lockstep protocol was broken",
            FailureClass::Parity => "ranks do not hold the same plan or settings",
            FailureClass::Drift => "ranks drifted apart",
            FailureClass::Preflight => "refused before any rank was made to wait",
            FailureClass::Engine => "an engine failed",
            FailureClass::Output => "the output could not be delivered",
            FailureClass::LauncherGone => "the launching process is gone",
            FailureClass::Peer => "a peer did not prove that it belongs to the run",
        }
    }
}

/// The one reason for which a run ended. A later failure never replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The class, which fixes the exit status.
    pub class: FailureClass,
    /// The rank that departed first, where one can be named.
    pub rank: Option<u32>,
    /// Where it was found.
    pub place: Place,
    /// Id of the diagnostic's code, for `tessera explain`.
    pub code: String,
    /// What happened, with both sides' numbers.
    pub text: String,
}

/// Most bytes of a failure's text: it travels, and a message that is over a limit tells nobody anything.
const MAX_TEXT_BYTES: usize = 64 << 10;

impl Failure {
    /// A failure with a code of this build, found at the first place of its tripwire.
    #[must_use]
    pub fn new(class: FailureClass, rank: Option<u32>, code: &Code, text: impl Into<String>) -> Failure {
        let place = tripwire::first_place(code);
        let mut text = text.into();
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        Failure { class, rank, place, code: code.id.to_string(), text }
    }

    /// The same failure, found elsewhere.
    #[must_use]
    pub fn at(self, place: Place) -> Failure {
        Failure { place, ..self }
    }

    /// The first of several findings, with the others named beside it.
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

    /// Flattens a diagnostic into text that can travel.
    #[must_use]
    pub fn from_diagnostic(class: FailureClass, rank: Option<u32>, d: &Diagnostic) -> Failure {
        let mut text = d.message.clone();
        for p in &d.places {
            text += &format!("; {}: {}", p.at, p.says);
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
        write!(f, "[{}] {}{rank}: {}", self.code, self.class.words(), self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
