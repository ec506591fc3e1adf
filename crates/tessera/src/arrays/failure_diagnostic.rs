//! How a run of array programs ended, as a diagnostic of the call that waits for it.

use tessera_base::{Code, Diagnostic};
use tessera_runtime::Failure;

use crate::codes::T0092;

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
