//! The failure of a run as the diagnostic that a caller of the run receives.

use tessera_base::{Code, Diagnostic};
use tessera_runtime::Failure;

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
pub(crate) fn find_code(id: &str) -> Option<&'static Code> {
    TABLES.into_iter().flatten().find(|code| code.id == id).copied()
}

/// Converts the failure that ended a run to a diagnostic with the same code, or with `unknown` if no table has it.
pub(crate) fn failure_diagnostic(failure: &Failure, unknown: &'static Code) -> Diagnostic {
    let code = find_code(&failure.code).unwrap_or(unknown);
    let d = Diagnostic::error(code, format!("{}: {}", failure.class.as_str(), failure.text));
    match failure.rank {
        Some(rank) => d.with_note(format!("rank {rank} deviated first")),
        None => d,
    }
}
