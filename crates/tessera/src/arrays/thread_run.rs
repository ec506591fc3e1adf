//! Calls of array programs on ranks that are threads of this process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::AllocationPermit;
use tessera_report::record::RunDevice;
use tessera_runtime::array_director::{ArrayDirector, ArrayRequest};
use tessera_runtime::engine::{AbortHandle, ReadyCall};
use tessera_runtime::wire::{CallMeta, Tensors};

use super::array_plan::ArrayPlan;
use super::array_weights::{ArrayWeightsPlace, HostWeights};
use super::device_array::{ArrayValues, on_host};
use super::gpu_threads::{GpuThreads, GpuUse, refuse_device_inputs};
use super::host_array::HostArray;
use super::run_end::{ArrayInterrupt, CallError, TimedOutputs, interrupted};
use crate::host_memory::check_host_memory;
use crate::in_process_ranks::{InProcessRanks, cause_of};
use crate::rank::RankContext;
use crate::rank_launch::prepare_device;
use crate::run_failure::find_code;
use crate::synthetic_delays::SyntheticDelays;
use crate::transfer_log::{CallTransfers, TransferMemory, TransferPlace};

/// The loaded ranks of a plan.
pub(super) struct ThreadRun {
    context: RankContext<ArrayPlan>,
    ranks: InProcessRanks,
    director: ArrayDirector,
    next_call: u64,
    transfers: TransferMemory,
    interrupted: Arc<AtomicBool>,
    /// The GPUs of the ranks; `None` if the ranks run on CPUs.
    gpus: Option<GpuThreads>,
}

impl ThreadRun {
    /// Loads the programs and weights on every rank, with `threads` threads each. The ranks time single ops if wanted.
    ///
    /// # Errors
    /// T0801 for an op that a CPU does not run, T0804 if the memory of this host does not suffice, or the error of a
    /// rank.
    pub(super) fn start(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        threads: usize,
        times_single_ops: bool,
    ) -> Result<ThreadRun, Diagnostics> {
        let one = |d: Diagnostic| vec![d];
        prepare_device(&plan.sealed, RunDevice::Cpu, plan.sealed.mesh().world_size())?;
        check_host_memory(&plan.sealed, 0).map_err(one)?;
        let place = ArrayWeightsPlace::Memory(Arc::new(HostWeights::new(weights)));
        let mut context = RankContext::new(Arc::clone(plan), SyntheticDelays::default());
        context.times_single_ops = times_single_ops;
        ThreadRun::load(context, &place, threads, None)
    }

    /// Loads the programs and weights of a plan on GPUs, one for each rank.
    ///
    /// # Errors
    /// T0098 for ranks that cannot exchange data as threads, T0801 for an op that a GPU does not run, what this host
    /// lacks, or the error of a rank.
    pub(super) fn start_on_gpus(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        times_single_ops: bool,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<ThreadRun, Diagnostics> {
        let gpus = GpuThreads::prepare(plan)?;
        let place = ArrayWeightsPlace::Memory(Arc::new(HostWeights::new(weights)));
        let (config, threads) = gpus.engine_config();
        let mut context =
            RankContext::new(Arc::clone(plan), SyntheticDelays::default()).with_gpu_threads(config, threads);
        context.times_single_ops = times_single_ops;
        // Loading allocates, and waits for no work of another GPU.
        let permit = AllocationPermit::acquire_unless(is_cancelled);
        if permit.is_none() {
            return Err(vec![interrupted()]);
        }
        ThreadRun::load(context, &place, 1, Some(gpus))
    }

    fn load(
        mut context: RankContext<ArrayPlan>,
        place: &ArrayWeightsPlace,
        threads: usize,
        gpus: Option<GpuThreads>,
    ) -> Result<ThreadRun, Diagnostics> {
        let transfers = TransferMemory::default();
        context.transfers = Some(TransferPlace::Memory(transfers.clone()));
        let ranks = InProcessRanks::start(&context, place, threads).map_err(|d| vec![with_cause(d)])?;
        Ok(ThreadRun {
            context,
            ranks,
            director: ArrayDirector::default(),
            next_call: 1,
            transfers,
            interrupted: Arc::default(),
            gpus,
        })
    }

    /// Returns a handle that ends the calls of this run.
    pub(super) fn interrupt_handle(&self) -> ArrayInterrupt {
        let (flag, aborts): (_, Vec<AbortHandle>) =
            (Arc::clone(&self.interrupted), self.ranks.abort_handles());
        ArrayInterrupt::new(move || {
            flag.store(true, Ordering::Release);
            aborts.iter().for_each(|abort| abort());
        })
    }

    /// Returns what the ranks reported of the experts that they used and fetched.
    pub(super) fn list_transfers(&self) -> Vec<CallTransfers> {
        self.transfers.list()
    }

    /// Plans a call as the leader of a run of processes does, and runs it on every rank. `inputs` are those of which
    /// the request carries the ones in host memory.
    pub(super) fn call(
        &mut self,
        program: &super::ArrayProgram,
        request: ArrayRequest,
        inputs: &BTreeMap<String, ArrayValues>,
    ) -> Result<TimedOutputs, CallError> {
        match &self.gpus {
            Some(gpus) => gpus.set_inputs(program, inputs),
            None => refuse_device_inputs(inputs),
        }
        .map_err(CallError::Refused)?;
        let planned = self.director.plan_arrays(&request.phase, &self.context.program_index);
        let planned = planned.and_then(|call| {
            let meta = call.meta.clone().ok_or_else(Vec::new)?;
            Ok((call, meta))
        });
        let (call, meta) = planned.map_err(|ds| {
            self.gpus.iter().for_each(GpuThreads::forget_inputs);
            CallError::Refused(ds)
        })?;
        let ready = ReadyCall::from_plan(self.next_call, &call, request.inputs);
        self.next_call += 1;
        let returned = self.run_call(&ready, &meta);
        // An interrupt ends the collectives of every rank, and the run: what they return then is not the cause.
        if self.interrupted.load(Ordering::Acquire) {
            return Err(CallError::Ended(interrupted()));
        }
        let groups = &self.context.plan.programs.output_groups;
        let outputs = returned.and_then(|outputs| match &self.gpus {
            Some(gpus) => gpus.take_outputs(program),
            None => program.assemble_outputs(&outputs, groups).map(on_host),
        });
        let outputs = outputs.map_err(|d| CallError::Ended(with_cause(d)))?;
        // A call of arrays has one phase.
        let of_phase = |(rank, times): (u32, Vec<_>)| times.into_iter().map(move |times| (rank, times));
        let op_times = self.ranks.take_op_times().into_iter().flat_map(of_phase).collect();
        Ok(TimedOutputs { outputs, op_times })
    }

    /// Ends the ranks and waits for them.
    pub(super) fn close(self) {
        self.ranks.close();
    }

    fn run_call(&mut self, ready: &ReadyCall, meta: &CallMeta) -> Result<Tensors, Diagnostic> {
        let is_cancelled = || self.interrupted.load(Ordering::Acquire);
        let in_use = self.gpus.as_ref().map(|gpus| gpus.begin_call(&is_cancelled));
        if is_cancelled() || in_use.as_ref().is_some_and(Option::is_none) {
            return Err(interrupted());
        }
        let begun = self.ranks.begin_call(ready);
        let ended = begun.and_then(|()| self.ranks.finish_call(meta));
        if ended.is_err() && self.gpus.is_some() {
            self.end_failed_ranks(in_use.flatten());
        }
        ended
    }

    /// Ends the ranks on GPUs after a call that failed. They have freed their memory when this returns.
    fn end_failed_ranks(&mut self, in_use: Option<GpuUse>) {
        // Others may allocate and free GPU memory only when no rank waits for a rank that has failed.
        match self.ranks.abort_call() {
            true => {
                drop(in_use);
                self.ranks.join_threads();
            }
            // A rank does not answer. Later calls on several GPUs must not meet it: they wait, and Ctrl-C ends them.
            false => std::mem::forget(in_use),
        }
    }
}

/// Replaces the code of a failed rank by that of the check that ended it.
fn with_cause(d: Diagnostic) -> Diagnostic {
    match cause_of(&d).and_then(find_code) {
        Some(code) => Diagnostic { code, ..d },
        None => d,
    }
}
