//! An engine that injects the armed fault.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tessera_models::NEXT_IDS;
use tessera_runtime::drill::{DrillFault, inject_call_fault};
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall, RehashResult,
    ReloadedWeights,
};
use tessera_runtime::program_index::ProgramIndex;
use tessera_runtime::wire::{CallAction, PhaseCall, ShardFingerprint, Tensor, Tensors};

use super::injector::FaultInjector;
use crate::engine::MeshEngine;

/// Beginning of the names of the caches in which a VAE keeps frames, rows and the anchor.
const VAE_CACHES: &str = "vae.";

/// A weights folder that does not exist.
const MISSING_WEIGHTS: &str = "/nonexistent/weights";

/// A [`MeshEngine`] that injects the armed fault on its rank and is transparent on the other ranks.
pub(crate) struct DrillEngine {
    inner: MeshEngine,
    injector: FaultInjector,
    programs: Arc<ProgramIndex>,
    /// Whether the current call is the one in which the fault is armed.
    in_armed_call: bool,
    warming_up: bool,
    warmed_up: bool,
    /// Programs whose warm-up was skipped.
    skipped: Vec<String>,
}

impl DrillEngine {
    pub(crate) fn new(
        inner: MeshEngine,
        injector: FaultInjector,
        programs: Arc<ProgramIndex>,
    ) -> DrillEngine {
        DrillEngine {
            inner,
            injector,
            programs,
            in_armed_call: false,
            warming_up: false,
            warmed_up: false,
            skipped: Vec::new(),
        }
    }

    fn fires_now(&self, fault: DrillFault) -> bool {
        let strikes = self.in_armed_call && self.injector.has_fault(fault);
        if strikes {
            self.injector.mark_fired();
        }
        strikes
    }

    /// Returns a fabricated report for a phase that the fault skips, or `None` if the phase must
    /// run. Only a phase without collectives can be skipped.
    fn skip_phase(&mut self, phase: &PhaseCall) -> Option<PhaseReport> {
        let skips = self.injector.has_fault(DrillFault::SkippedWarmUp)
            || self.injector.has_fault(DrillFault::NewProgram);
        if !skips || !self.warming_up || !self.skipped.is_empty() {
            return None;
        }
        let facts = self.programs.get(&phase.program).ok().filter(|f| f.collectives == 0)?;
        self.injector.mark_fired();
        self.skipped.push(phase.program.clone());
        Some(PhaseReport { trace: facts.trace, ..PhaseReport::default() })
    }

    /// Changes one element of the first weight that can be changed.
    fn mutate_weight(&mut self) {
        let names: Vec<String> = self.inner.weight_fingerprints().into_iter().map(|p| p.tensor).collect();
        let _ = names.iter().any(|name| self.inner.mutate_weight(name, 0, 0.125));
    }

    /// Changes the caches or the halos, if that is the fault.
    fn change_caches(&mut self) {
        if !self.in_armed_call {
            return;
        }
        let changed = if self.injector.has_fault(DrillFault::HistoryCleared) {
            self.inner.clear_caches(VAE_CACHES)
        } else if self.injector.has_fault(DrillFault::CachesLost) {
            self.inner.lose_caches();
            true
        } else if self.injector.has_fault(DrillFault::SwappedHalo) {
            self.inner.swap_halos()
        } else {
            false
        };
        if changed {
            self.injector.mark_fired();
        }
    }

    /// Flips the drawn bit, if that is the fault.
    fn flip_bit(&mut self) {
        let draw = self.injector.draw_place();
        let place = if self.fires_now(DrillFault::FlippedWeight) {
            self.inner.flip_weight_bit(draw)
        } else if self.fires_now(DrillFault::FlippedCache) {
            self.inner.flip_cache_bit(draw)
        } else {
            return;
        };
        self.injector.record_place(place.as_deref().unwrap_or("no place"));
    }
}

impl Engine for DrillEngine {
    fn begin_call(&mut self, call: &ReadyCall) {
        self.in_armed_call = call.call_id == self.injector.armed_fault().call;
        self.warming_up = call.action == CallAction::Warmup;
        // A process may always signal itself.
        let signal = |signal| {
            let _ = kill_process(getpid(), signal);
        };
        for fault in [DrillFault::LeaderDies, DrillFault::MeshLeaderDies, DrillFault::MemberDies] {
            if self.fires_now(fault) {
                signal(Signal::KILL);
            }
        }
        if self.fires_now(DrillFault::StoppedRank) {
            signal(Signal::STOP);
        }
        if self.fires_now(DrillFault::MutatedWeight) {
            self.mutate_weight();
        }
        self.flip_bit();
        self.change_caches();
        if self.fires_now(DrillFault::UndeclaredCapture) {
            self.inner.inject_undeclared_graph();
        }
        // A changed program first acts in this call, which the limit of the drill counts from.
        if self.in_armed_call && self.injector.changes_programs() {
            self.injector.mark_fired();
        }
        self.inner.begin_call(call);
    }

    fn tamper_call(&mut self, call: &mut ReadyCall) {
        let armed = *self.injector.armed_fault();
        if armed.rank == self.injector.rank() && inject_call_fault(&armed, call) {
            self.injector.mark_fired();
        }
    }

    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        if self.fires_now(DrillFault::StuckInLibrary) {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        if self.fires_now(DrillFault::StuckKernel) {
            self.inner.inject_hang();
        }
        if self.fires_now(DrillFault::PrivateReload) {
            self.inner.reload_weights(MISSING_WEIGHTS)?;
        }
        match self.skip_phase(phase) {
            Some(report) => Ok(report),
            None => self.inner.run(phase, inputs, progress),
        }
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        let mut outputs = self.inner.call_outputs()?;
        let flips = self.fires_now(DrillFault::PerturbedOutput);
        let samples = self.fires_now(DrillFault::SampledToken);
        let changed = match (flips, samples) {
            (true, _) => outputs.0.first_mut(),
            (_, true) => outputs.0.iter_mut().find(|tensor| tensor.name() == NEXT_IDS),
            _ => None,
        };
        if let Some(tensor) = changed {
            let mut data = tensor.data().to_vec();
            match (samples, data.first_chunk_mut::<4>()) {
                (true, Some(id)) => *id = (f32::from_le_bytes(*id) + 1.0).to_le_bytes(),
                _ => data.iter_mut().take(1).for_each(|b| *b ^= 1),
            }
            let entry = tensor.manifest_entry();
            *tensor = Tensor::new(tensor.name(), entry.dtype, &entry.shape, data)
                .map_err(|d| EngineFault::local_failure(d.message))?;
        }
        Ok(outputs)
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }

    fn weight_fingerprints(&self) -> Vec<ShardFingerprint> {
        self.inner.weight_fingerprints()
    }

    fn program_count(&self) -> ProgramCount {
        let mut count = self.inner.program_count();
        // The fault reports the skipped programs as warmed up.
        if self.injector.has_fault(DrillFault::NewProgram) && !self.warmed_up {
            count.warmed += u32::try_from(self.skipped.len()).unwrap_or(0);
        }
        count
    }

    fn finish_warmup(&mut self) {
        self.warmed_up = true;
        self.inner.finish_warmup();
    }

    fn rehash_weights(&mut self) -> Option<RehashResult> {
        self.inner.rehash_weights()
    }

    fn audit_weights(&mut self) -> Option<RehashResult> {
        self.inner.audit_weights()
    }

    fn audit_caches(&mut self, call: &ReadyCall) -> Vec<CacheFault> {
        self.inner.audit_caches(call)
    }

    fn remember_caches(&mut self, call: &ReadyCall) {
        self.inner.remember_caches(call);
    }

    fn reload_weights(&mut self, source: &str) -> Result<ReloadedWeights, EngineFault> {
        self.inner.reload_weights(source)
    }

    fn cpu_ns(&self) -> u64 {
        self.inner.cpu_ns()
    }
}
