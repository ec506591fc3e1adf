//! An engine that follows a benchmark's script instead of a program.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_runtime::driver::EngineFactory;
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall,
};
use tessera_runtime::wire::{PhaseCall, Tensors};
use tessera_runtime::{Digest, Parity};

use super::HarnessConfig;
use super::synthetic_stream::constant_tensor;
use super::timestamps::{TimestampSink, now_ns};

/// The behaviour of an engine in the denoise phase of a chunk. It does nothing in the other phases.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub enum EngineScript {
    /// Computes nothing, so that a call costs only its agreement.
    #[default]
    Nothing,
    /// Keeps a core busy for `ns` in each chunk.
    Compute {
        /// Time in nanoseconds for which the engine computes in each chunk.
        ns: u64,
    },
    /// Takes `step_ns` and reports progress. In one chunk one rank takes `slow_factor` times as
    /// long, while the others wait for it without progress, as inside a collective.
    SlowOnce {
        /// Duration of an ordinary step in nanoseconds.
        step_ns: u64,
        /// Factor by which the slow step takes longer.
        slow_factor: u32,
        /// Index of the chunk that contains the slow step.
        chunk: u32,
        /// The rank whose step is slow; the others wait for it.
        rank: u32,
        /// Whether the slow rank reports progress meanwhile.
        reports_progress: bool,
    },
}

impl EngineScript {
    /// Computes for the time of [`EngineScript::Compute`]; does nothing for the other scripts.
    pub(super) fn compute_only(self) {
        if let EngineScript::Compute { ns } = self {
            burn_cpu(Duration::from_nanos(ns));
        }
    }
}

pub(super) fn engine_factory(
    rank: u32,
    harness: &HarnessConfig,
    stamps: &Arc<TimestampSink>,
) -> EngineFactory {
    let scripted = ScriptedEngine {
        rank,
        script: harness.engine_script,
        programs: BTreeSet::new(),
        is_warm: false,
        chunk: 0,
        has_started: false,
        timestamps: Arc::clone(stamps),
    };
    Box::new(move || Ok((Box::new(scripted) as Box<dyn Engine>, Parity::default())))
}

struct ScriptedEngine {
    rank: u32,
    script: EngineScript,
    programs: BTreeSet<String>,
    is_warm: bool,
    chunk: u32,
    has_started: bool,
    timestamps: Arc<TimestampSink>,
}

impl Engine for ScriptedEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        _: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        if !self.is_warm {
            self.programs.insert(phase.program.clone());
        } else if !self.has_started {
            self.has_started = true;
            let now = now_ns();
            self.timestamps.with_timestamps(|s| s.engine_started.push(now));
        }
        let since = Instant::now();
        if self.is_warm && phase.program.starts_with("denoise") {
            self.run_denoise(progress);
        }
        Ok(PhaseReport {
            ns: since.elapsed().as_nanos() as u64,
            collectives: 1,
            trace: Digest::hash_bytes(phase.program.as_bytes()),
            compensated: 0,
            temporary_bytes: 0,
            classes: Vec::new(),
            op_times: None,
        })
    }

    fn program_count(&self) -> ProgramCount {
        let programs = self.programs.len() as u32;
        ProgramCount { loaded: programs, warmed: programs, new_since_warmup: 0 }
    }

    fn finish_warmup(&mut self) {
        self.is_warm = true;
    }

    fn reset(&mut self) {}

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        self.has_started = false;
        self.chunk += 1;
        constant_tensor("output")
            .map(|output| Tensors(vec![output]))
            .map_err(|d| EngineFault::local_failure(d.message))
    }

    fn audit_weights(&mut self) -> Option<tessera_runtime::engine::RehashResult> {
        None
    }

    fn audit_caches(&mut self, _: &ReadyCall) -> Vec<CacheFault> {
        Vec::new()
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}

impl ScriptedEngine {
    fn run_denoise(&self, progress: &(dyn Fn(u32) + Sync)) {
        match self.script {
            EngineScript::Nothing | EngineScript::Compute { .. } => self.script.compute_only(),
            EngineScript::SlowOnce { step_ns, slow_factor: times, chunk, rank, reports_progress: tells } => {
                let slow = chunk == self.chunk;
                let duration = Duration::from_nanos(step_ns) * if slow { times } else { 1 };
                let tells = !slow || (tells && rank == self.rank);
                let (since, interval) = (Instant::now(), Duration::from_nanos(step_ns) / PROGRESS_REPORTS);
                let mut mark = 0;
                while since.elapsed() < duration {
                    if tells {
                        mark += 1;
                        progress(mark);
                    }
                    std::thread::sleep(interval.min(duration.saturating_sub(since.elapsed())));
                }
            }
        }
    }
}

/// Number of progress reports of an ordinary step.
const PROGRESS_REPORTS: u32 = 20;

/// Keeps a core busy for a time.
pub fn burn_cpu(time: Duration) {
    let since = Instant::now();
    let mut x = 1.0_f64;
    while since.elapsed() < time {
        for _ in 0..1000 {
            x = std::hint::black_box(x * 1.000_000_1);
        }
    }
}
