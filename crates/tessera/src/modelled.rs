//! Waits that stand for work: how long decode, encode and the generator's passes would take on another machine.
//!
//! For measuring overlap where the real decoder is cheap. The real work is done all the same, and bits do not change: a
//! stage that ends early waits for the rest of its modelled time. Every rank announces the model, so that a run with one
//! is never taken for a run without.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_runtime::census::PhaseKind;
use tessera_runtime::engine::{
    AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall, Rehash, Reloaded,
};
use tessera_runtime::wire::{PhaseCall, ShardPrint, Tensor, Tensors};

/// Modelled times of a run; what is absent takes the time that it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Modelled {
    /// Of the leader's decode and encode.
    pub studio: Option<ModelledStudio>,
    /// Of all generator passes of a steady chunk together, in nanoseconds; each pass takes its share.
    pub generate_ns: Option<u64>,
}

impl Modelled {
    /// What every rank announces: `none`, or the times.
    #[must_use]
    pub fn announced(&self) -> String {
        let mut parts = Vec::new();
        if let Some(s) = self.studio {
            parts.push(format!("decode {} + {} ns, encode {} ns", s.first_ns, s.rest_ns, s.encode_ns));
        }
        if let Some(ns) = self.generate_ns {
            parts.push(format!("generate {ns} ns"));
        }
        if parts.is_empty() { "none".to_string() } else { parts.join(", ") }
    }
}

/// Modelled times of the leader's work on one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelledStudio {
    /// Decode of the chunk's first latent, in nanoseconds.
    pub first_ns: u64,
    /// Decode of its other latents, in nanoseconds.
    pub rest_ns: u64,
    /// Encode of the anchor, in nanoseconds.
    pub encode_ns: u64,
}

/// Waits until a stage that began at `begun` has lasted `ns`.
pub(crate) fn fill(begun: Instant, ns: u64) {
    std::thread::sleep(Duration::from_nanos(ns).saturating_sub(begun.elapsed()));
}

/// Longest sleep between two marks of progress, and before an abort is noticed.
const SLICE: Duration = Duration::from_millis(10);

/// Marks of a wait: above any count of ops of a program.
const WAITING: u32 = 1 << 31;

/// An engine whose generator passes last at least their modelled time.
pub(crate) struct ModelledEngine {
    inner: Box<dyn Engine>,
    pass_ns: u64,
    aborted: Arc<AtomicBool>,
}

impl ModelledEngine {
    /// `passes` is how many generator passes a steady chunk has.
    pub(crate) fn new(inner: Box<dyn Engine>, generate_ns: u64, passes: u64) -> ModelledEngine {
        ModelledEngine { inner, pass_ns: generate_ns / passes.max(1), aborted: Arc::default() }
    }

    fn wait(&self, begun: Instant, progress: &(dyn Fn(u32) + Sync)) {
        let whole = Duration::from_nanos(self.pass_ns);
        for mark in WAITING.. {
            let left = whole.saturating_sub(begun.elapsed());
            if left.is_zero() || self.aborted.load(Ordering::Relaxed) {
                return;
            }
            progress(mark);
            std::thread::sleep(left.min(SLICE));
        }
    }
}

impl Engine for ModelledEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let begun = Instant::now();
        let mut report = self.inner.run(phase, inputs, progress)?;
        if PhaseKind::of(&phase.program).is_some_and(PhaseKind::is_generator) {
            self.wait(begun, progress);
            report.ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
        Ok(report)
    }

    fn begin(&mut self, call: &ReadyCall) {
        self.inner.begin(call);
    }

    fn tampers(&mut self, call: &mut ReadyCall) {
        self.inner.tampers(call);
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn programs(&self) -> ProgramCount {
        self.inner.programs()
    }

    fn warmed(&mut self) {
        self.inner.warmed();
    }

    fn fingerprints(&self) -> Vec<ShardPrint> {
        self.inner.fingerprints()
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

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        self.inner.output()
    }

    fn abort_handle(&self) -> AbortHandle {
        let (inner, aborted) = (self.inner.abort_handle(), Arc::clone(&self.aborted));
        Arc::new(move || {
            aborted.store(true, Ordering::Relaxed);
            inner();
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_announced_in_whole_nanoseconds() {
        assert_eq!(Modelled::default().announced(), "none");
        let studio = Some(ModelledStudio { first_ns: 1, rest_ns: 2, encode_ns: 3 });
        assert_eq!(Modelled { studio, generate_ns: None }.announced(), "decode 1 + 2 ns, encode 3 ns");
        let both = Modelled { studio, generate_ns: Some(4) }.announced();
        assert_eq!(both, "decode 1 + 2 ns, encode 3 ns, generate 4 ns");
    }

    #[test]
    fn a_stage_lasts_its_time_and_not_twice() {
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        fill(begun, 30_000_000);
        let lasted = begun.elapsed();
        assert!(lasted >= Duration::from_millis(30), "{lasted:?}");
        fill(begun, 1);
    }
}
