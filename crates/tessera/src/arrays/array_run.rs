//! A run of array programs: the loaded ranks of a plan, which run one program for each call.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_report::record::RunDevice;

use super::array_plan::ArrayPlan;
use super::call_log::ArrayRunLog;
use super::device_array::{ArrayValues, on_host};
use super::gpu_threads::refuse_device_inputs;
use super::host_array::HostArray;
use super::launch::ArrayProcessOptions;
use super::process_run::ProcessRun;
use super::run_end::{ArrayInterrupt, CallError, TimedOutputs};
use super::run_record::RankPlace;
use super::stream_ids::StreamIds;
use super::thread_run::ThreadRun;
use crate::clock::monotonic_ns;
use crate::codes::T0092;
use crate::files::write_file;
use crate::transfer_log::CallTransfers;

/// The loaded ranks of a plan. Dropping a run ends its threads or processes at once.
pub struct ArrayRun {
    plan: Arc<ArrayPlan>,
    ranks: Ranks,
    log: Arc<ArrayRunLog>,
    /// File for the trace of a run that is traced and has a folder.
    trace_file: Option<PathBuf>,
    /// Why the run has ended.
    ended: Option<Diagnostic>,
}

enum Ranks {
    Threads(Box<ThreadRun>),
    Processes(ProcessRun),
    /// The run has ended.
    Gone,
}

impl ArrayRun {
    /// Loads a plan on threads of this process, with `threads_per_rank` threads for each rank.
    ///
    /// # Errors
    /// T0091 if `weights` are not those of the plan, or why a rank cannot be loaded.
    pub fn start_threads(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        threads_per_rank: usize,
    ) -> Result<ArrayRun, Diagnostics> {
        ArrayRun::load_threads(plan, weights, threads_per_rank, None)
    }

    /// As [`ArrayRun::start_threads`], and the ranks time every op. [`ArrayRunLog::trace`] returns the times, with these
    /// numbers of streams.
    ///
    /// # Errors
    /// As [`ArrayRun::start_threads`].
    pub fn start_traced_threads(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        threads_per_rank: usize,
        stream_ids: StreamIds,
    ) -> Result<ArrayRun, Diagnostics> {
        ArrayRun::load_threads(plan, weights, threads_per_rank, Some(stream_ids))
    }

    /// Loads a plan on GPUs, one for each rank, on threads of this process. Calls read inputs in the memory of these GPUs
    /// without a copy through the host, and leave their outputs there. With numbers of streams the ranks time every step,
    /// and [`ArrayRunLog::trace`] returns the times. The wait for other users of the GPUs in this process ends once
    /// `is_cancelled` returns true.
    ///
    /// # Errors
    /// T0091 if `weights` are not those of the plan, T0098 for ranks that cannot exchange data as threads, or why a rank
    /// cannot be loaded.
    pub fn start_gpu_threads(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        trace: Option<StreamIds>,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<ArrayRun, Diagnostics> {
        plan.programs.check_weights(&weights)?;
        let ranks =
            Ranks::Threads(Box::new(ThreadRun::start_on_gpus(plan, weights, trace.is_some(), is_cancelled)?));
        let log = ArrayRunLog::begin(plan, (RankPlace::Threads, RunDevice::Cuda), trace);
        Ok(ArrayRun { plan: Arc::clone(plan), ranks, log, trace_file: None, ended: None })
    }

    /// Starts a process for each rank and waits until all are loaded and have run every program once.
    ///
    /// # Errors
    /// T0091 if `weights` are not those of the plan, what is wrong before anything was started, or the failure of a
    /// rank with its code. No process is left then.
    pub fn start_processes(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        options: ArrayProcessOptions,
    ) -> Result<ArrayRun, Diagnostics> {
        plan.programs.check_weights(&weights)?;
        let (device, stream_ids) = (options.device, options.trace.clone());
        let joins = options.rendezvous.is_some();
        let place = if joins { RankPlace::Joined } else { RankPlace::Processes };
        let trace_file = stream_ids.is_some().then(|| options.out.join(TRACE_FILE));
        let ranks = Ranks::Processes(ProcessRun::start(plan, &weights, options)?);
        let log = ArrayRunLog::begin(plan, (place, device), stream_ids);
        Ok(ArrayRun { plan: Arc::clone(plan), ranks, log, trace_file, ended: None })
    }

    /// Runs one program of the plan. Inputs and outputs are whole arrays in host memory.
    ///
    /// # Errors
    /// As [`ArrayRun::call_with`].
    pub fn call(
        &mut self,
        name: &str,
        inputs: &BTreeMap<String, HostArray>,
    ) -> Result<BTreeMap<String, HostArray>, Diagnostics> {
        let outputs = self.call_with(name, &on_host(inputs.clone()))?;
        let gathered = outputs.into_iter().map(|(name, array)| Ok((name, array.gather()?)));
        gathered.collect::<Result<_, Diagnostic>>().map_err(|d| vec![d])
    }

    /// Runs one program of the plan. Outputs are on the device of the ranks if they are threads.
    ///
    /// # Errors
    /// T0091 for a program or inputs that the plan does not have, T0099 for inputs in GPU memory that the ranks do not
    /// read; the run continues. Otherwise the failure that ended the run, with its code; every later call returns
    /// T0092.
    pub fn call_with(
        &mut self,
        name: &str,
        inputs: &BTreeMap<String, ArrayValues>,
    ) -> Result<BTreeMap<String, ArrayValues>, Diagnostics> {
        if let Some(cause) = &self.ended {
            let d = Diagnostic::error(&T0092, "the run has ended, so it takes no further call");
            return Err(vec![d.with_note(format!("it ended with {}: {}", cause.code.id, cause.message))]);
        }
        let program = self.plan.programs.get(name).map_err(|d| vec![d])?;
        let begun_ns = monotonic_ns();
        let request = program.make_request(inputs)?;
        let outcome = match &mut self.ranks {
            Ranks::Threads(run) => run.call(program, request, inputs),
            Ranks::Processes(run) => refuse_device_inputs(inputs)
                .map_err(CallError::Refused)
                .and_then(|()| run.call(program, request)),
            Ranks::Gone => Err(CallError::Refused(Vec::new())),
        };
        match outcome {
            Ok(TimedOutputs { outputs, op_times }) => {
                self.log.end_call(name, begun_ns, op_times);
                Ok(outputs)
            }
            Err(CallError::Refused(ds)) => Err(ds),
            Err(CallError::Ended(d)) => {
                self.ended = Some(d.clone());
                self.ranks = Ranks::Gone;
                // The cause of the end says more than a file that is missing, too.
                let _ = self.write_trace();
                Err(vec![d])
            }
        }
    }

    /// Returns the log of the calls, which stays readable after the end of the run.
    #[must_use]
    pub fn log(&self) -> Arc<ArrayRunLog> {
        Arc::clone(&self.log)
    }

    /// Returns a handle that ends the run from another thread, during a call too.
    #[must_use]
    pub fn interrupt_handle(&self) -> ArrayInterrupt {
        match &self.ranks {
            Ranks::Threads(run) => run.interrupt_handle(),
            Ranks::Processes(run) => run.interrupt_handle(),
            Ranks::Gone => ArrayInterrupt::new(|| {}),
        }
    }

    /// Returns what the ranks reported of the experts that they used and fetched, by call and rank: of the last
    /// [`super::REPORTED_CALLS`] calls of a run that has not ended.
    ///
    /// # Errors
    /// T0011 for a report that cannot be read.
    pub fn list_expert_transfers(&self) -> Result<Vec<CallTransfers>, Diagnostic> {
        match &self.ranks {
            Ranks::Threads(run) => Ok(run.list_transfers()),
            Ranks::Processes(run) => run.read_transfers(),
            Ranks::Gone => Ok(Vec::new()),
        }
    }

    /// Returns the process ids of the ranks, in rank order; empty if they are threads.
    #[must_use]
    pub fn process_ids(&self) -> &[u32] {
        match &self.ranks {
            Ranks::Processes(run) => run.process_ids(),
            Ranks::Threads(_) | Ranks::Gone => &[],
        }
    }

    /// Ends the run after its last call, and waits for its processes.
    ///
    /// # Errors
    /// The failure of a rank, with its code, or T0014 if the trace cannot be written. A run that a call has ended returned
    /// its failure there.
    pub fn close(mut self) -> Result<(), Diagnostics> {
        match std::mem::replace(&mut self.ranks, Ranks::Gone) {
            Ranks::Processes(run) => run.close().and(self.write_trace()).map_err(|d| vec![d]),
            Ranks::Threads(run) => {
                run.close();
                Ok(())
            }
            Ranks::Gone => Ok(()),
        }
    }

    fn load_threads(
        plan: &Arc<ArrayPlan>,
        weights: BTreeMap<String, HostArray>,
        threads_per_rank: usize,
        stream_ids: Option<StreamIds>,
    ) -> Result<ArrayRun, Diagnostics> {
        plan.programs.check_weights(&weights)?;
        let times_ops = stream_ids.is_some();
        let run = ThreadRun::start(plan, weights, threads_per_rank, times_ops)?;
        let log = ArrayRunLog::begin(plan, (RankPlace::Threads, RunDevice::Cpu), stream_ids);
        let ranks = Ranks::Threads(Box::new(run));
        Ok(ArrayRun { plan: Arc::clone(plan), ranks, log, trace_file: None, ended: None })
    }

    /// Writes the trace of a run that has a folder for it.
    fn write_trace(&self) -> Result<(), Diagnostic> {
        match (&self.trace_file, self.log.trace()) {
            (Some(file), Some(trace)) => write_file(file, trace.to_perfetto().as_bytes()),
            _ => Ok(()),
        }
    }
}

/// Name of the trace in the folder of a run.
const TRACE_FILE: &str = "trace.json";

impl fmt::Debug for ArrayRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = match &self.ranks {
            Ranks::Threads(_) => "threads",
            Ranks::Processes(_) => "processes",
            Ranks::Gone => "gone",
        };
        f.debug_struct("ArrayRun").field("ranks", &ranks).field("ended", &self.ended).finish_non_exhaustive()
    }
}
