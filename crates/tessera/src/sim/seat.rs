//! A rank's engine on a modelled machine: it tells what its device went through, and folds what it was told into the
//! digest that stands for latents.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use tessera_runtime::Digest;
use tessera_runtime::census::Census;
use tessera_runtime::engine::{AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount};
use tessera_runtime::sim::FoldEngine;
use tessera_runtime::wire::{PhaseCall, Tensor, Tensors};

/// A phase that came to its end on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ran {
    pub(super) phase: String,
    pub(super) ns: u64,
    /// Of the collectives that it went through, in the order of their launch.
    pub(super) trace: [u8; 32],
}

/// Phases that a device ended and its engine has not told yet, in order.
pub(super) type Told = Rc<RefCell<VecDeque<Ran>>>;

/// The engine.
pub(super) struct SimEngine {
    fold: FoldEngine,
    told: Told,
    /// Trace of each phase on this rank, from the seal.
    sealed: BTreeMap<String, [u8; 32]>,
    /// Whether this rank puts out latents.
    puts_out: bool,
}

impl SimEngine {
    pub(super) fn new(
        census: &Arc<Census>,
        sealed: BTreeMap<String, [u8; 32]>,
        puts_out: bool,
        told: Told,
    ) -> SimEngine {
        SimEngine { fold: FoldEngine::new(Arc::clone(census)), told, sealed, puts_out }
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
        let ran = self.told.borrow_mut().pop_front().filter(|ran| ran.phase == *name);
        let ran = ran.ok_or_else(|| EngineFault::failed(format!("the device has not run @{name}")))?;
        let sealed = self.sealed.get(name).copied().unwrap_or_default();
        if ran.trace != sealed {
            return Err(EngineFault::failed(format!(
                "@{name} went through collectives with trace {}, the sealed plan holds {} for this rank",
                Digest(ran.trace),
                Digest(sealed)
            )));
        }
        Ok(PhaseReport { ns: ran.ns, ..self.fold.run(phase, inputs, progress)? })
    }

    fn reset(&mut self) {
        self.fold.reset();
    }

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        if self.puts_out { self.fold.output() } else { Ok(None) }
    }

    fn programs(&self) -> ProgramCount {
        self.fold.programs()
    }

    fn warmed(&mut self) {
        self.fold.warmed();
    }

    fn abort_handle(&self) -> AbortHandle {
        self.fold.abort_handle()
    }
}
