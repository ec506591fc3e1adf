//! The state of calls of array programs. A program reads its weights and the inputs of its call, and leaves nothing
//! behind; the number of calls is state all the same, so that its digest shows how many each rank has run.

use serde::Serialize;
use tessera_base::Diagnostic;

use crate::Digest;
use crate::codes::{T0710, T0712};
use crate::wire::PhaseCall;

/// The calls of array programs so far, which are equal on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ArrayCallState {
    epoch: u32,
    /// Number of calls that ran a program; it continues across epochs.
    calls: u32,
    /// Whether a call has begun whose program has not run.
    due: bool,
}

impl ArrayCallState {
    /// Begins an epoch.
    ///
    /// # Errors
    /// T0712 after the last number.
    pub fn reset(&mut self) -> Result<(), Diagnostic> {
        self.epoch = next_number(self.epoch, "epoch")?;
        self.due = false;
        Ok(())
    }

    /// Begins the next call.
    ///
    /// # Errors
    /// T0710 if the program of the last call has not run, T0712 after the last number.
    pub fn begin_call(&mut self) -> Result<(), Diagnostic> {
        if self.due {
            return Err(self.transition_error("the last call ended before its program ran"));
        }
        self.calls = next_number(self.calls, "call")?;
        self.due = true;
        Ok(())
    }

    /// Applies the program of the call that has begun.
    ///
    /// # Errors
    /// T0710 if the call has run its program.
    pub fn apply_phase(&mut self, phase: &PhaseCall) -> Result<(), Diagnostic> {
        if !self.due {
            let what = format!("`{}` would be the second program of a call", phase.program);
            return Err(self.transition_error(&what));
        }
        self.due = false;
        Ok(())
    }

    /// Returns the number of resets so far.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the number of calls that ran a program, which is the index of the next one.
    #[must_use]
    pub fn next_call(&self) -> u32 {
        self.calls
    }

    /// Returns the digest of the whole state, which must be equal on the leader and on every rank.
    #[must_use]
    pub fn state_digest(&self) -> Digest {
        Digest::hash_value("arrays", self)
    }

    /// Returns epoch and call in one line, for diagnostics.
    #[must_use]
    pub fn describe(&self) -> String {
        format!("epoch {}, call {}", self.epoch, self.calls)
    }

    fn transition_error(&self, what: &str) -> Diagnostic {
        Diagnostic::error(&T0710, what.to_string()).with_label("this rank", self.describe())
    }
}

fn next_number(number: u32, what: &str) -> Result<u32, Diagnostic> {
    number.checked_add(1).ok_or_else(|| Diagnostic::error(&T0712, format!("no {what} follows {number}")))
}
