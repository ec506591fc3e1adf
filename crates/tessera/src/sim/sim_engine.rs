//! The engine of a rank on a simulated machine. It reports the phases that its device completed,
//! and hashes its inputs into the digest that replaces latents.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use tessera_runtime::Digest;
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall,
};
use tessera_runtime::program_index::ProgramIndex;
use tessera_runtime::sim::HashEngine;
use tessera_runtime::wire::{PhaseCall, Tensors};

/// A phase that a simulated device completed, with its duration `ns` in simulated nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FinishedPhase {
    pub(super) phase: String,
    pub(super) ns: u64,
    /// Digest of the phase's collectives, in launch order.
    pub(super) trace: [u8; 32],
}

/// Phases that a device completed and its engine has not reported yet, in order.
pub(super) type FinishedPhases = Rc<RefCell<VecDeque<FinishedPhase>>>;

/// An engine without numerics: it reports the phases that a simulated device has completed.
pub(super) struct SimEngine {
    fold: HashEngine,
    finished: FinishedPhases,
    /// Trace digest of each phase on this rank, from the seal.
    sealed_traces: BTreeMap<String, [u8; 32]>,
    /// Whether this rank outputs latents.
    has_output: bool,
}

impl SimEngine {
    pub(super) fn new(
        programs: &Arc<ProgramIndex>,
        sealed_traces: BTreeMap<String, [u8; 32]>,
        has_output: bool,
        finished: FinishedPhases,
    ) -> SimEngine {
        SimEngine { fold: HashEngine::new(Arc::clone(programs)), finished, sealed_traces, has_output }
    }
}

impl Engine for SimEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let name = &phase.program;
        let ran = self.finished.borrow_mut().pop_front().filter(|ran| ran.phase == *name);
        let ran =
            ran.ok_or_else(|| EngineFault::local_failure(format!("the device has not completed @{name}")))?;
        let sealed = self.sealed_traces.get(name).copied().unwrap_or_default();
        if ran.trace != sealed {
            return Err(EngineFault::local_failure(format!(
                "the collectives of @{name} have trace digest {}, but the sealed plan has {} for this rank",
                Digest(ran.trace),
                Digest(sealed)
            )));
        }
        Ok(PhaseReport { ns: ran.ns, ..self.fold.run(phase, inputs, progress)? })
    }

    fn reset(&mut self) {
        self.fold.reset();
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        if self.has_output { self.fold.call_outputs() } else { Ok(Tensors::default()) }
    }

    fn program_count(&self) -> ProgramCount {
        self.fold.program_count()
    }

    fn finish_warmup(&mut self) {
        self.fold.finish_warmup();
    }

    fn audit_weights(&mut self) -> Option<tessera_runtime::engine::RehashResult> {
        None
    }

    fn audit_caches(&mut self, _: &ReadyCall) -> Vec<CacheFault> {
        Vec::new()
    }

    fn abort_handle(&self) -> AbortHandle {
        self.fold.abort_handle()
    }
}
