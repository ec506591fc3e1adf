//! `tessera.runtime`: calls of sealed plans on ranks that are threads or processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tessera::arrays::{
    ArrayInterrupt, ArrayProcessOptions, ArrayRendezvous, ArrayRun, ArrayRunLog, ArrayValues, CopyRule,
    RunDevice, StreamIds,
};
use tessera::files::RunFolder;

use crate::array_memory::take_array;
use crate::device_memory::import_device_tensor;
use crate::dtensor::DTensor;
use crate::errors::OrRaise;
use crate::plan::Plan;
use crate::prefetch_report::PrefetchReport;
use crate::session_trace::{SessionRecord, SessionTrace};
use crate::signature::Signature;
use crate::waiting::{lock_patiently, wait_for};

/// The loaded ranks of a plan.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct Session {
    plan: Plan,
    run: Mutex<Option<ArrayRun>>,
    process_ids: Vec<u32>,
    interrupt: ArrayInterrupt,
    log: Arc<ArrayRunLog>,
    /// The thread that calls the ranks now. A signal handler runs on that thread, and may not wait for its call.
    caller: Mutex<Option<ThreadId>>,
    /// Number of threads that close the session. Calls of other threads then fail; otherwise they could keep the closing
    /// thread waiting.
    closing_threads: AtomicU32,
    /// The folder of a run of processes.
    folder: Mutex<Option<RunFolder>>,
    /// The process that loaded the ranks. A fork of it has no threads of theirs.
    process: u32,
}

/// Loads a plan on ranks.
#[pyfunction]
#[pyo3(signature = (
    plan, *, ranks="threads", device="cpu", threads_per_rank=1, out=None, oversubscribe=false, trace=false,
    rendezvous=None, secret=None, join_timeout=300.0
))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of a Python function")]
pub(crate) fn open_session(
    py: Python<'_>,
    plan: Plan,
    ranks: &str,
    device: &str,
    threads_per_rank: usize,
    out: Option<PathBuf>,
    oversubscribe: bool,
    trace: bool,
    rendezvous: Option<&str>,
    secret: Option<PathBuf>,
    join_timeout: f64,
) -> PyResult<Session> {
    let refuse = |message: String| Err(PyValueError::new_err(message));
    let device = parse_device(device)?;
    if threads_per_rank == 0 {
        return refuse("threads_per_rank = 0: a rank has at least one thread".into());
    }
    let trace_ids = trace.then(|| StreamIds::new(plan.stream_ids()));
    let meeting = read_rendezvous(ranks == "joined", rendezvous, secret, join_timeout)?;
    let weights = plan.weights();
    let shared = Arc::clone(&plan.plan);
    match ranks {
        "threads" if device == RunDevice::Cuda => {
            let is_cancelled = AtomicBool::new(false);
            let run = wait_for(
                py,
                || {
                    let is_cancelled = || is_cancelled.load(Ordering::Acquire);
                    ArrayRun::start_gpu_threads(&shared, weights, trace_ids, &is_cancelled)
                },
                || is_cancelled.store(true, Ordering::Release),
            )?;
            Ok(Session::new(plan, run.or_raise(py)?, None))
        }
        "threads" => {
            // Loading only copies weights, so an interrupt waits for its end.
            let load = || match trace_ids {
                None => ArrayRun::start_threads(&shared, weights, threads_per_rank),
                Some(ids) => ArrayRun::start_traced_threads(&shared, weights, threads_per_rank, ids),
            };
            let run = wait_for(py, load, || ())?;
            Ok(Session::new(plan, run.or_raise(py)?, None))
        }
        "processes" | "joined" => {
            let folder = RunFolder::new(out.as_deref(), "tessera-arrays").or_raise(py)?;
            let argv = rank_command(py)?;
            let options = ArrayProcessOptions {
                device,
                threads: Some(threads_per_rank),
                oversubscribe,
                trace: trace_ids,
                rendezvous: meeting,
                ..ArrayProcessOptions::new(argv, folder.path().to_path_buf())
            };
            let stop = options.stop.clone();
            let run = wait_for(
                py,
                || ArrayRun::start_processes(&shared, weights, options),
                || {
                    // The second request ends a start at once.
                    stop.request_stop();
                    stop.request_stop();
                },
            );
            Ok(Session::new(plan, run?.or_raise(py)?, Some(folder)))
        }
        _ => refuse(format!("ranks = {ranks:?}: they are \"threads\", \"processes\" or \"joined\"")),
    }
}

/// Returns where rank 0 meets ranks of other hosts.
fn read_rendezvous(
    is_joined: bool,
    rendezvous: Option<&str>,
    secret: Option<PathBuf>,
    join_timeout: f64,
) -> PyResult<Option<ArrayRendezvous>> {
    let refuse = |message: &str| Err(PyValueError::new_err(message.to_string()));
    match (is_joined, rendezvous, secret) {
        (false, None, None) => Ok(None),
        (false, ..) => refuse("rendezvous and secret belong to ranks=\"joined\""),
        (true, Some(text), Some(secret)) => {
            let Some(master) = ArrayRendezvous::parse_master(text) else {
                return refuse(
                    "rendezvous is the host and the port of rank 0, such as \"head.example:29500\"",
                );
            };
            let timeout = Duration::try_from_secs_f64(join_timeout).ok().filter(|t| !t.is_zero());
            let Some(timeout) = timeout else {
                return refuse("join_timeout is a positive number of seconds");
            };
            // The rank runs in another process, whose directory may differ.
            let secret = std::path::absolute(secret)?;
            Ok(Some(ArrayRendezvous { master, bind: None, secret, timeout }))
        }
        (true, ..) => {
            refuse("joined ranks need rendezvous=\"host:port\" and secret=, a file that every rank has")
        }
    }
}

/// Returns the command line of a rank's process: this interpreter's program with this package. The package is named by its place,
/// because a new interpreter need not find it: a program may have extended its search path.
pub(crate) fn rank_command(py: Python<'_>) -> PyResult<Vec<String>> {
    let python: String = py.import("sys")?.getattr("executable")?.extract()?;
    let package: String = py.import("tessera")?.getattr("__file__")?.extract()?;
    let program = std::path::absolute(package)?.with_file_name("__main__.py");
    Ok(vec![python, program.to_string_lossy().into_owned(), "rank".to_string()])
}

/// Parses the device of ranks.
pub(crate) fn parse_device(device: &str) -> PyResult<RunDevice> {
    match device {
        "cpu" => Ok(RunDevice::Cpu),
        "gpu" => Ok(RunDevice::Cuda),
        _ => Err(PyValueError::new_err(format!("device = {device:?}: it is \"cpu\" or \"gpu\""))),
    }
}

#[pymethods]
impl Session {
    /// Runs the only program of the plan once. Inputs are arrays or DTensors, in the order of the program's inputs or by
    /// name.
    #[pyo3(signature = (*arguments, **named))]
    fn __call__(
        &self,
        py: Python<'_>,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        self.run_program(py, self.plan.find_program(None)?, arguments, named)
    }

    /// Runs one program of the plan once.
    #[pyo3(signature = (program, *arguments, **named))]
    fn run(
        &self,
        py: Python<'_>,
        program: &str,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        self.run_program(py, self.plan.find_program(Some(program))?, arguments, named)
    }

    /// The plan that the ranks run.
    #[getter]
    fn plan(&self) -> Plan {
        self.plan.clone()
    }

    /// Process ids of the ranks, in rank order; empty if they are threads.
    #[getter]
    fn process_ids(&self) -> Vec<u32> {
        self.process_ids.clone()
    }

    /// Returns what the ranks did with the experts of registered layers, in the last calls.
    fn prefetch_report(&self, py: Python<'_>) -> PyResult<PrefetchReport> {
        let mut guard = lock_patiently(py, &self.run)?;
        let Some(run) = guard.as_mut() else {
            return Err(PyRuntimeError::new_err("the session is closed"));
        };
        let calls = py.detach(move || run.list_expert_transfers()).or_raise(py)?;
        Ok(PrefetchReport::new(calls, &self.plan.settings.ids))
    }

    /// The trace of the calls so far; it stays available after the end of the session.
    fn trace(&self, py: Python<'_>) -> PyResult<SessionTrace> {
        match py.detach(|| self.log.trace()) {
            Some(trace) => Ok(SessionTrace { trace }),
            None => Err(PyRuntimeError::new_err("the session is not traced: open it with trace=True")),
        }
    }

    /// The record of the calls so far; it stays available after the end of the session.
    fn record(&self, py: Python<'_>) -> SessionRecord {
        SessionRecord { record: py.detach(|| self.log.record()) }
    }

    /// Ends the ranks and waits for them. A signal handler that interrupts a call ends that call.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_called_here() {
            self.interrupt.interrupt();
            return Ok(());
        }
        self.closing_threads.fetch_add(1, Ordering::AcqRel);
        let guard = lock_patiently(py, &self.run);
        let mut guard = guard.inspect_err(|_| {
            self.closing_threads.fetch_sub(1, Ordering::AcqRel);
        })?;
        let run = guard.take();
        drop(guard);
        let Some(run) = run else { return Ok(()) };
        wait_for(py, || run.close(), || self.interrupt.interrupt())?.or_raise(py)?;
        self.remove_folder();
        Ok(())
    }

    fn __enter__(this: Py<Session>) -> Py<Session> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

impl Session {
    fn new(plan: Plan, run: ArrayRun, folder: Option<RunFolder>) -> Session {
        Session {
            plan,
            process_ids: run.process_ids().to_vec(),
            interrupt: run.interrupt_handle(),
            log: run.log(),
            run: Mutex::new(Some(run)),
            caller: Mutex::new(None),
            closing_threads: AtomicU32::new(0),
            folder: Mutex::new(folder),
            process: std::process::id(),
        }
    }

    /// Returns whether this process loaded the ranks, and no process of which it is a fork.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn is_called_here(&self) -> bool {
        let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
        *caller == Some(std::thread::current().id())
    }

    /// Removes a folder that nobody asked for.
    fn remove_folder(&self) {
        if let Some(folder) = self.folder.lock().unwrap_or_else(PoisonError::into_inner).take() {
            folder.close(false);
        }
    }

    fn run_program(
        &self,
        py: Python<'_>,
        program: &Signature,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let inputs = read_inputs(program, arguments, named)?;
        let outputs = self.call(py, program, &inputs)?;
        self.wrap_outputs(py, program, outputs)
    }

    /// Runs a program on the ranks.
    pub(crate) fn call(
        &self,
        py: Python<'_>,
        program: &Signature,
        inputs: &BTreeMap<String, ArrayValues>,
    ) -> PyResult<BTreeMap<String, ArrayValues>> {
        if !self.is_of_this_process() {
            let message =
                "the session belongs to the process of which this one is a fork: open another one here";
            return Err(PyRuntimeError::new_err(message));
        }
        if self.is_called_here() {
            let message = "a call of this session waits on this thread: a signal handler may close it only";
            return Err(PyRuntimeError::new_err(message));
        }
        let mut guard = lock_patiently(py, &self.run)?;
        let Some(run) = guard.as_mut().filter(|_| self.closing_threads.load(Ordering::Acquire) == 0) else {
            return Err(PyRuntimeError::new_err("the session is closed"));
        };
        let set_caller = |caller| *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = caller;
        set_caller(Some(std::thread::current().id()));
        let name = &program.name;
        let outputs = wait_for(py, || run.call_with(name, inputs), || self.interrupt.interrupt());
        set_caller(None);
        drop(guard);
        outputs?.or_raise(py)
    }

    fn wrap_outputs(
        &self,
        py: Python<'_>,
        program: &Signature,
        mut outputs: BTreeMap<String, ArrayValues>,
    ) -> PyResult<Py<PyAny>> {
        let mut wrapped = Vec::new();
        for output in &program.outputs {
            if let Some(array) = outputs.remove(&output.name) {
                wrapped.push(self.plan.to_dtensor(program, &output.name, array));
            }
        }
        match (program.returns_one, wrapped.pop()) {
            (true, Some(only)) => Ok(only.into_pyobject(py)?.into_any().unbind()),
            (_, last) => {
                wrapped.extend(last);
                Ok(PyTuple::new(py, wrapped)?.into_any().unbind())
            }
        }
    }
}

/// Returns the inputs of a program by name.
fn read_inputs(
    program: &Signature,
    arguments: &Bound<'_, PyTuple>,
    named: Option<&Bound<'_, PyDict>>,
) -> PyResult<BTreeMap<String, ArrayValues>> {
    let names = &program.inputs;
    if arguments.len() > names.len() {
        let message = format!("the program has {} inputs, not {}", names.len(), arguments.len());
        return Err(PyTypeError::new_err(message));
    }
    let mut inputs = BTreeMap::new();
    for ((name, _), value) in names.iter().zip(arguments) {
        inputs.insert(name.clone(), to_values(&value)?);
    }
    for (name, value) in named.into_iter().flatten() {
        let name: String = name.extract()?;
        if inputs.contains_key(&name) {
            return Err(PyTypeError::new_err(format!("input `{name}` is given twice")));
        }
        inputs.insert(name, to_values(&value)?);
    }
    Ok(inputs)
}

fn to_values(value: &Bound<'_, PyAny>) -> PyResult<ArrayValues> {
    if let Ok(array) = value.extract::<DTensor>() {
        return Ok(array.values);
    }
    let py = value.py();
    match import_device_tensor(value)? {
        Some(tensor) => Ok(ArrayValues::Device(py.detach(|| tensor.to_array()).or_raise(py)?)),
        // A call copies its inputs, so they stay as they are.
        None => Ok(ArrayValues::Host(take_array(value, CopyRule::Always)?)),
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            // The threads that a drop would wait for exist in the other process only.
            let run = self.run.lock().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(run);
            return;
        }
        drop(self.run.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.remove_folder();
    }
}
