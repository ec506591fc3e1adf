//! An engine that breaks as it is told.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tessera_runtime::census::Census;
use tessera_runtime::drill::{Fault, meddle_call};
use tessera_runtime::engine::{
    AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall, Rehash, Reloaded,
};
use tessera_runtime::wire::{CallAction, PhaseCall, ShardPrint, Tensor, Tensors};

use super::hand::Hand;
use crate::engine::MeshEngine;

/// Folder that no weights lie in.
const NOWHERE: &str = "/nonexistent/weights";

/// A [`MeshEngine`] with a fault, or without one on the other ranks.
pub(super) struct DrillEngine {
    inner: MeshEngine,
    hand: Hand,
    census: Arc<Census>,
    /// Whether the armed call runs.
    now: bool,
    warming: bool,
    warm: bool,
    /// Programs that were not warmed up.
    skipped: Vec<String>,
}

impl DrillEngine {
    pub(super) fn new(inner: MeshEngine, hand: Hand, census: Arc<Census>) -> DrillEngine {
        DrillEngine { inner, hand, census, now: false, warming: false, warm: false, skipped: Vec::new() }
    }

    fn strikes(&self, fault: Fault) -> bool {
        let strikes = self.now && self.hand.has(fault);
        if strikes {
            self.hand.strike();
        }
        strikes
    }

    /// What a phase that is not run would have said, if it may be left out: it exchanges nothing.
    fn skips(&mut self, phase: &PhaseCall) -> Option<PhaseReport> {
        let skips = self.hand.has(Fault::SkippedWarmUp) || self.hand.has(Fault::NewProgram);
        if !skips || !self.warming || !self.skipped.is_empty() {
            return None;
        }
        let facts = self.census.get(&phase.program).ok().filter(|f| f.collectives == 0)?;
        self.hand.strike();
        self.skipped.push(phase.program.clone());
        Some(PhaseReport { ns: 0, collectives: 0, trace: facts.trace, compensated: 0 })
    }

    /// Changes one element of some weight.
    fn mutate(&mut self) {
        let names: Vec<String> = self.inner.fingerprints().into_iter().map(|p| p.tensor).collect();
        let _ = names.iter().any(|name| self.inner.mutate_weight(name, 0, 0.125));
    }
}

impl Engine for DrillEngine {
    fn begin(&mut self, call: &ReadyCall) {
        self.now = call.call_id == self.hand.armed().call;
        self.warming = call.action == CallAction::Warmup;
        // A signal to oneself is not refused.
        let signal = |signal| {
            let _ = kill_process(getpid(), signal);
        };
        for fault in [Fault::LeaderDies, Fault::MeshLeaderDies, Fault::MemberDies] {
            if self.strikes(fault) {
                signal(Signal::KILL);
            }
        }
        if self.strikes(Fault::StoppedRank) {
            signal(Signal::STOP);
        }
        if self.strikes(Fault::MutatedWeight) {
            self.mutate();
        }
        for fault in
            [Fault::ConditionalCollective, Fault::AdHocBroadcast, Fault::WrongGroup, Fault::WrongShape]
        {
            self.strikes(fault);
        }
        self.inner.begin(call);
    }

    fn tampers(&mut self, call: &mut ReadyCall) {
        let armed = *self.hand.armed();
        if armed.rank == self.hand.rank() && meddle_call(&armed, call) {
            self.hand.strike();
        }
    }

    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        if self.strikes(Fault::StuckInLibrary) {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        if self.strikes(Fault::StuckKernel) {
            self.inner.stick();
        }
        if self.strikes(Fault::PrivateReload) {
            self.inner.reload(NOWHERE)?;
        }
        match self.skips(phase) {
            Some(report) => Ok(report),
            None => self.inner.run(phase, inputs, progress),
        }
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        let output = self.inner.output()?;
        let Some(tensor) = output.as_ref().filter(|_| self.strikes(Fault::OtherOutput)) else {
            return Ok(output);
        };
        let mut data = tensor.data().to_vec();
        data.iter_mut().take(1).for_each(|b| *b ^= 1);
        let changed = Tensor::new(tensor.name(), tensor.spec().dtype, &tensor.spec().shape, data);
        changed.map(Some).map_err(|d| EngineFault::failed(d.message))
    }

    fn abort_handle(&self) -> AbortHandle {
        self.inner.abort_handle()
    }

    fn fingerprints(&self) -> Vec<ShardPrint> {
        self.inner.fingerprints()
    }

    fn programs(&self) -> ProgramCount {
        let mut count = self.inner.programs();
        // It says that all were warmed up.
        if self.hand.has(Fault::NewProgram) && !self.warm {
            count.warmed += u32::try_from(self.skipped.len()).unwrap_or(0);
        }
        count
    }

    fn warmed(&mut self) {
        self.warm = true;
        self.inner.warmed();
    }

    fn rehash(&mut self) -> Option<Rehash> {
        self.inner.rehash()
    }

    fn reload(&mut self, source: &str) -> Result<Reloaded, EngineFault> {
        self.inner.reload(source)
    }

    fn cpu_ns(&self) -> u64 {
        self.inner.cpu_ns()
    }
}
