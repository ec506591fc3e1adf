//! What the programs have in common that the leader runs outside the lockstep.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, ProgramHandle};
use tessera_ir::{Opcode, Program};

use crate::codes::T0016;
use crate::system::available_bytes;

/// Opens a CPU backend without communicators for programs of the leader.
///
/// # Errors
/// T0016 if its threads cannot start.
pub(crate) fn open_cpu_backend(seat: MeshRank, cores: CoreUse) -> Result<CpuBackend, Diagnostic> {
    let pool = match cores {
        CoreUse::One => Pool::single_thread(),
        CoreUse::All => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let failed = |e| Diagnostic::error(&T0016, format!("threads of the leader cannot start: {e}"));
            Pool::new(threads).map_err(failed)?
        }
    };
    let mut cpu = CpuBackend::new(seat, pool, Vec::new(), Duration::from_secs(1));
    available_bytes().into_iter().for_each(|bytes| cpu.limit_memory(bytes));
    Ok(cpu)
}

/// The cores that a program of the leader uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CoreUse {
    /// The calling thread alone.
    One,
    /// A thread per core: the stream waits for the program longer than for the cores that its ranks lack.
    All,
}

/// Runs a program once on zeros. On a GPU the first run captures a graph, for which no chunk should wait.
///
/// # Errors
/// T0016 if the run fails.
pub(crate) fn warm_up(
    backend: &mut dyn Backend,
    handle: ProgramHandle,
    program: &Program,
) -> Result<(), Diagnostic> {
    let inputs = program.ops.iter().filter(|op| op.opcode == Opcode::Input);
    let zeros: BTreeMap<&str, Vec<f32>> = inputs
        .filter_map(|op| {
            let values = program.type_of(*op.results.first()?).element_count() as usize;
            Some((op.name.as_deref()?, vec![0.0; values]))
        })
        .collect();
    let inputs = zeros.iter().map(|(name, values)| (*name, values.as_slice())).collect();
    let call = CallData { inputs, ..CallData::default() };
    let run = backend.run(handle, &call, &mut NoObserver);
    run.map_err(|f| {
        Diagnostic::error(&T0016, format!("{} before the first chunk: {}", program.name, fault_text(f)))
    })
}

/// Returns what a fault of a leader's program says, of whatever kind it is: the leader has no peers.
pub(crate) fn fault_text(fault: Fault) -> String {
    match fault {
        Fault::Failed(text)
        | Fault::Stalled(text)
        | Fault::Aborted(text)
        | Fault::Refused(text)
        | Fault::Poisoned(text) => text,
    }
}
