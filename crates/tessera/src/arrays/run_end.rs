//! How a run of array programs ends: by a failure, which the call that waits returns as a diagnostic, or by an interrupt.

use std::fmt;
use std::sync::Arc;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_runtime::Failure;

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

/// Why a call returns nothing.
pub(super) enum CallError {
    /// It was refused before it started, and the run continues.
    Refused(Diagnostics),
    /// It ended the run.
    Ended(Diagnostic),
}

/// The codes that can end a run.
const TABLES: [&[&Code]; 9] = [
    crate::codes::CODES,
    tessera_cuda::CODES,
    tessera_device::CODES,
    tessera_ir::CODES,
    tessera_mesh::CODES,
    tessera_plan::CODES,
    tessera_runtime::CODES,
    tessera_verify::CODES,
    tessera_weights::CODES,
];

/// Returns the code with this id, if it can end a run.
pub(super) fn find_code(id: &str) -> Option<&'static Code> {
    TABLES.into_iter().flatten().find(|code| code.id == id).copied()
}

/// Converts the failure that ended a run to a diagnostic with the same code.
pub(super) fn failure_diagnostic(failure: &Failure) -> Diagnostic {
    let code = find_code(&failure.code).unwrap_or(&T0092);
    let d = Diagnostic::error(code, format!("{}: {}", failure.class.as_str(), failure.text));
    match failure.rank {
        Some(rank) => d.with_note(format!("rank {rank} deviated first")),
        None => d,
    }
}

/// Returns the diagnostic of a run that was interrupted.
pub(super) fn interrupted() -> Diagnostic {
    Diagnostic::error(&T0092, "the run was interrupted").with_hint("start the plan again")
}
