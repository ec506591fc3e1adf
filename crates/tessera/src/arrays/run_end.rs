//! How a call of array programs ends: with its outputs, or with the run, by a failure, which the call that waits returns as
//! a diagnostic, or by an interrupt.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::wire::PhaseOpTimes;

use super::device_array::ArrayValues;
use crate::codes::T0092;

/// Ends a run of array programs from any thread: a call that waits returns T0092, and so does every later one.
#[derive(Clone)]
pub struct ArrayInterrupt(Arc<dyn Fn() + Send + Sync>);

impl ArrayInterrupt {
    pub(super) fn new(end_run: impl Fn() + Send + Sync + 'static) -> ArrayInterrupt {
        ArrayInterrupt(Arc::new(end_run))
    }

    /// Ends the run. Later requests have no effect.
    pub fn interrupt(&self) {
        (self.0)();
    }
}

impl fmt::Debug for ArrayInterrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ArrayInterrupt")
    }
}

/// What a call returns, with the times of the ops of each rank; none unless the run is traced.
pub(super) struct TimedOutputs {
    pub(super) outputs: BTreeMap<String, ArrayValues>,
    pub(super) op_times: Vec<(u32, PhaseOpTimes)>,
}

/// Why a call returns nothing.
pub(super) enum CallError {
    /// It was refused before it started, and the run continues.
    Refused(Diagnostics),
    /// It ended the run.
    Ended(Diagnostic),
}

/// Returns the diagnostic of a run that was interrupted.
pub(super) fn interrupted() -> Diagnostic {
    Diagnostic::error(&T0092, "the run was interrupted").with_hint("start the plan again")
}
