//! Calls of array programs on ranks that are processes under a leader: all of them on this host, or rank 0 here and the
//! others on hosts that joined.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::array_director::ArrayRequest;
use tessera_runtime::driver::{LaunchEvent, LaunchSpec, StopHandle, launch_ranks};
use tessera_runtime::wire::{ArrayCall, ArrayOutputs, Message, PhaseCall};
use tessera_runtime::{Failure, FailureClass};

use super::array_link::ArrayLink;
use super::array_plan::ArrayPlan;
use super::array_program::ArrayProgram;
use super::device_array::on_host;
use super::host_array::HostArray;
use super::launch::{ArrayProcessOptions, prepare_launch, remove_weights_file};
use super::run_end::{ArrayInterrupt, CallError, TimedOutputs, interrupted};
use crate::codes::{T0017, T0092};
use crate::rank_launch::settle_launch;
use crate::run_dir_writer::close_record;
use crate::run_failure::failure_diagnostic;
use crate::transfer_log::{CallTransfers, read_transfers};

/// The processes of a plan, and the thread that launched them.
pub(super) struct ProcessRun {
    link: ArrayLink,
    stop: StopHandle,
    /// Returns how the run ended, after its last process; `None` once that was read.
    launch: Option<JoinHandle<LaunchEnd>>,
    pids: Vec<u32>,
    /// The run directory.
    out: PathBuf,
    last_call: u64,
}

/// How a launch ended, whose processes have all ended.
struct LaunchEnd {
    failure: Option<Failure>,
}

impl ProcessRun {
    /// Starts a process for each rank and waits until all are loaded.
    ///
    /// # Errors
    /// What is wrong before anything was started, or the failure of a rank.
    pub(super) fn start(
        plan: &Arc<ArrayPlan>,
        weights: &BTreeMap<String, HostArray>,
        options: ArrayProcessOptions,
    ) -> Result<ProcessRun, Diagnostics> {
        let one = |d: Diagnostic| vec![d];
        let (link, socket) = ArrayLink::pair().map_err(one)?;
        let spec = prepare_launch(plan, weights, &options, socket)?;
        let pids: Arc<Mutex<Vec<u32>>> = Arc::default();
        let (out, stop, known) = (options.out, options.stop, Arc::clone(&pids));
        let (folder, requests) = (out.clone(), stop.clone());
        // The kernel ties the ranks to the thread that spawns them, and this thread waits for them.
        let launch = std::thread::Builder::new()
            .name("array launch".into())
            .spawn(move || launch_and_settle(spec, &requests, &folder, &known))
            .map_err(|e| one(Diagnostic::error(&T0017, format!("the thread that launches ranks: {e}"))))?;
        let mut run = ProcessRun { link, stop, launch: Some(launch), pids: Vec::new(), out, last_call: 0 };
        let loaded = run.receive_outputs(0);
        remove_weights_file(&run.out);
        loaded.map_err(one)?;
        run.pids = pids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(run)
    }

    /// Sends a call to the leader and waits for its outputs.
    pub(super) fn call(
        &mut self,
        program: &ArrayProgram,
        request: ArrayRequest,
    ) -> Result<TimedOutputs, CallError> {
        let ArrayRequest { phase: PhaseCall { program: phase, .. }, inputs } = request;
        let number = self.last_call + 1;
        let call = Message::ArrayCall(ArrayCall { number, program: phase, inputs });
        let frame = self.link.encode(&call).map_err(|d| CallError::Refused(vec![d]))?;
        drop(call);
        self.last_call = number;
        let sent = self.link.send(&frame).map_err(|d| self.end_run(d));
        let received = sent.and_then(|()| self.receive_outputs(number)).map_err(CallError::Ended)?;
        let outputs = program.take_whole_outputs(&received.outputs).map_err(CallError::Ended)?;
        Ok(TimedOutputs { outputs: on_host(outputs), op_times: received.op_times })
    }

    /// Returns a handle that kills the processes.
    pub(super) fn interrupt_handle(&self) -> ArrayInterrupt {
        let stop = self.stop.clone();
        ArrayInterrupt::new(move || kill_ranks(&stop))
    }

    pub(super) fn process_ids(&self) -> &[u32] {
        &self.pids
    }

    /// Returns what the ranks reported of the experts that they used and fetched.
    ///
    /// # Errors
    /// T0011 for a report that cannot be read.
    pub(super) fn read_transfers(&self) -> Result<Vec<CallTransfers>, Diagnostic> {
        read_transfers(&self.out, self.pids.len() as u32)
    }

    /// Requests no further call, and waits for the last process.
    ///
    /// # Errors
    /// The failure that ended the run.
    pub(super) fn close(mut self) -> Result<(), Diagnostic> {
        self.link.finish_sending();
        match self.join_launch().and_then(|end| end.failure) {
            Some(failure) => Err(failure_diagnostic(&failure, &T0092)),
            None => Ok(()),
        }
    }

    /// Waits for the outputs of a call.
    fn receive_outputs(&mut self, expected: u64) -> Result<ArrayOutputs, Diagnostic> {
        match self.link.receive() {
            Ok(Some(Message::ArrayOutputs(outputs))) if outputs.number == expected => Ok(outputs),
            Ok(Some(message)) => {
                let what = format!("a {:?} message is not the answer to call {expected}", message.kind());
                Err(self.end_run(Diagnostic::error(&T0092, what)))
            }
            Ok(None) => Err(self.end_run(Diagnostic::error(&T0092, "the leader ended before the call"))),
            Err(d) => Err(self.end_run(d)),
        }
    }

    /// Ends the processes, and returns why the run ended: its failure, or else an interrupt, or else what this process
    /// found. A socket that closes shows that the processes have ended already.
    fn end_run(&mut self, found: Diagnostic) -> Diagnostic {
        let was_requested = self.stop.is_stop_requested();
        kill_ranks(&self.stop);
        match self.join_launch().and_then(|end| end.failure) {
            Some(failure) => failure_diagnostic(&failure, &T0092),
            None if was_requested => interrupted(),
            None => found,
        }
    }

    fn join_launch(&mut self) -> Option<LaunchEnd> {
        self.launch.take()?.join().ok()
    }
}

impl Drop for ProcessRun {
    fn drop(&mut self) {
        if self.launch.is_some() {
            kill_ranks(&self.stop);
            self.join_launch();
        }
    }
}

/// Requests a stop twice: the second request kills the ranks.
fn kill_ranks(stop: &StopHandle) {
    stop.request_stop();
    stop.request_stop();
}

/// Launches the ranks, waits for their end, and closes the record.
fn launch_and_settle(spec: LaunchSpec, stop: &StopHandle, out: &Path, pids: &Mutex<Vec<u32>>) -> LaunchEnd {
    let launched = launch_ranks(&spec, stop, &mut |event| {
        if let LaunchEvent::Started(started) = event {
            *pids.lock().unwrap_or_else(PoisonError::into_inner) = started.to_vec();
        }
    });
    let (failure, _) = settle_launch(launched, out);
    let (_, written) = close_record(out, failure.as_ref());
    let failure =
        failure.or_else(|| Some(Failure::from_diagnostic(FailureClass::Output, None, &written.err()?)));
    // The leader's end of the socket closes with the last descriptor, so a call that waits sees the end only now.
    drop(spec);
    LaunchEnd { failure }
}
