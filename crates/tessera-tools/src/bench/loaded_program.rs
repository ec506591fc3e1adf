//! A program of a plan on a GPU, with the data of its calls, that a benchmark times or traces.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tessera::Plan;
use tessera::clock::monotonic_ns;
use tessera_base::Diagnostics;
use tessera_cuda::CudaBackend;
use tessera_device::{Backend, CallData, NoObserver, ProgramHandle, Scalar};
use tessera_ir::{Program, op_workload};
use tessera_mesh::Rank;

use super::bench_error;
use super::device_timer::UnsynchronisedTimer;
use super::rank::fault_error;
use super::synthetic_weights::SyntheticWeights;

/// A program of a rank, loaded with random weights.
pub(super) struct LoadedProgram {
    pub(super) program: Arc<Program>,
    handle: ProgramHandle,
    pub(super) inputs: BTreeMap<String, Vec<f32>>,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

/// Launches of one kind in a traced run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LaunchTotal {
    /// The ops of a launch, and the types of the first one's operands.
    pub launch: String,
    /// Launches of a run.
    pub count: f64,
    /// Milliseconds of these launches together.
    pub ms: f64,
}

impl LoadedProgram {
    /// Loads a phase of a plan, without data of calls.
    pub(super) fn load(
        backend: &mut CudaBackend,
        plan: &Plan,
        (phase, rank): (&str, Rank),
        weights: &mut SyntheticWeights,
    ) -> Result<LoadedProgram, Diagnostics> {
        let sealed = &plan.sealed;
        let found = sealed.rank_program(phase, rank).zip(sealed.rank_slots(phase, rank));
        let Some((program, slots)) = found else {
            let known = sealed.phase_names().join(", ");
            return Err(bench_error(format!("the plan has no phase `{phase}`; it has {known}")));
        };
        let program = Arc::new((**program).clone());
        let handle = backend.load(&program, slots, weights).map_err(|d| vec![d])?;
        Ok(LoadedProgram { program, handle, inputs: BTreeMap::new(), scalars: BTreeMap::new() })
    }

    /// Runs the program once and returns its milliseconds, with the copies of its inputs and outputs.
    pub(super) fn time_run(&self, backend: &mut CudaBackend) -> Result<f64, Diagnostics> {
        let call = self.call_data();
        // A run ends when the GPU has finished it.
        let time = UnsynchronisedTimer::start(monotonic_ns)
            .synchronise(|| backend.run(self.handle, &call, &mut NoObserver).map_err(|f| fault_error(&f)))?;
        Ok(time.elapsed_ns() as f64 / 1e6)
    }

    /// Traces `runs` runs, and returns the mean of the launches with the same ops and types, the longest
    /// first.
    pub(super) fn trace_launches(
        &self,
        backend: &mut CudaBackend,
        runs: usize,
    ) -> Result<Vec<LaunchTotal>, Diagnostics> {
        let mut totals: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for _ in 0..runs {
            let traced = backend.trace_run(self.handle, &self.call_data(), &mut NoObserver);
            for span in traced.map_err(|f| fault_error(&f))? {
                let total = totals.entry(self.name_launch(&span.ops)).or_default();
                total.0 += 1.0 / runs as f64;
                total.1 += (span.end_ns - span.begin_ns) / 1e6 / runs as f64;
            }
        }
        let mut all: Vec<LaunchTotal> =
            totals.into_iter().map(|(launch, (count, ms))| LaunchTotal { launch, count, ms }).collect();
        all.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Ok(all)
    }

    fn call_data(&self) -> CallData<'_> {
        CallData {
            inputs: self.inputs.iter().map(|(name, x)| (name.as_str(), &x[..])).collect(),
            scalars: self.scalars.iter().map(|(name, x)| (name.as_str(), x.clone())).collect(),
        }
    }

    fn name_launch(&self, ops: &[usize]) -> String {
        let p = &self.program;
        let names: Vec<&str> = ops.iter().map(|i| p.ops[*i].opcode.name()).collect();
        let operands = ops.first().map_or(&[][..], |i| &p.ops[*i].operands);
        let types: Vec<String> = operands.iter().map(|v| p.type_of(*v).display_on(&p.mesh)).collect();
        format!("{} {}", names.join(" + "), types.join(" "))
    }
}

/// Returns the floating-point operations of a run.
pub(super) fn count_flops(program: &Program) -> u64 {
    program.ops.iter().map(|op| op_workload(program, op).flops.0).sum()
}
