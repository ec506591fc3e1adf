//! `tessera.runtime`: calls of sealed plans on ranks that are threads or processes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyDict, PyTuple};
use tessera::arrays::{ArrayProcessOptions, ArrayRun, HostArray, RunDevice};
use tessera_base::Diagnostics;
use tessera_mesh::Layout;

use crate::array_memory::take_array;
use crate::dtensor::DTensor;
use crate::errors::OrRaise;
use crate::plan::Plan;
use crate::program::{Graph, finish};
use crate::trace::{ArraySpec, Operand, TraceState, Value, lock};

/// How often a waiting call looks for Ctrl-C.
const SIGNAL_PERIOD: Duration = Duration::from_millis(20);

/// Plans of single ops whose ranks stay loaded: the next call with the same shapes and layouts starts none.
const LOADED_OPS: usize = 8;

/// The loaded ranks of a plan.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct Session {
    plan: Plan,
    run: Mutex<Option<ArrayRun>>,
}

/// Loads a plan on ranks.
#[pyfunction]
#[pyo3(signature = (plan, *, ranks="threads", device="cpu", threads_per_rank=1, out=None, oversubscribe=false))]
pub(crate) fn open_session(
    py: Python<'_>,
    plan: Plan,
    ranks: &str,
    device: &str,
    threads_per_rank: usize,
    out: Option<PathBuf>,
    oversubscribe: bool,
) -> PyResult<Session> {
    let weights = plan.weights();
    let loaded = match ranks {
        "threads" if device != "cpu" => {
            let message = "ranks on GPUs are processes: state ranks=\"processes\"";
            return Err(PyValueError::new_err(message));
        }
        "threads" => {
            let plan = Arc::clone(&plan.plan);
            wait_for(py, || ArrayRun::start_threads(&plan, weights, threads_per_rank), || ())?
        }
        "processes" => {
            let device = match device {
                "cpu" => RunDevice::Cpu,
                "gpu" => RunDevice::Cuda,
                _ => {
                    let message = format!("device = {device:?}: it is \"cpu\" or \"gpu\"");
                    return Err(PyValueError::new_err(message));
                }
            };
            let options =
                ArrayProcessOptions { device, ..process_options(py, out, threads_per_rank, oversubscribe)? };
            let plan = Arc::clone(&plan.plan);
            wait_for(py, || ArrayRun::start_processes(&plan, weights, options), || ())?
        }
        _ => {
            let message = format!("ranks = {ranks:?}: they are \"threads\" or \"processes\"");
            return Err(PyValueError::new_err(message));
        }
    };
    Ok(Session { plan, run: Mutex::new(Some(loaded.or_raise(py)?)) })
}

/// Returns the options of a run whose ranks are processes of this interpreter's program.
fn process_options(
    py: Python<'_>,
    out: Option<PathBuf>,
    threads: usize,
    oversubscribe: bool,
) -> PyResult<ArrayProcessOptions> {
    let python: String = py.import("sys")?.getattr("executable")?.extract()?;
    let out = match out {
        Some(out) => out,
        None => py.import("tempfile")?.call_method1("mkdtemp", ("", "tessera-"))?.extract()?,
    };
    let argv = [&python, "-m", "tessera", "rank"].map(str::to_string).to_vec();
    Ok(ArrayProcessOptions { threads: Some(threads), oversubscribe, ..ArrayProcessOptions::new(argv, out) })
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
        self.run_graph(py, self.plan.find_graph(None)?, arguments, named)
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
        self.run_graph(py, self.plan.find_graph(Some(program))?, arguments, named)
    }

    /// The plan that the ranks run.
    #[getter]
    fn plan(&self) -> Plan {
        self.plan.clone()
    }

    /// Process ids of the ranks, in rank order; empty if they are threads.
    #[getter]
    fn process_ids(&self, py: Python<'_>) -> Vec<u32> {
        self.lock(py).as_ref().map_or_else(Vec::new, |run| run.process_ids().to_vec())
    }

    /// Ends the ranks and waits for them.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.lock(py).take() {
            None => Ok(()),
            Some(run) => py.detach(|| run.close()).or_raise(py),
        }
    }

    fn __enter__(this: Py<Session>) -> Py<Session> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<bool> {
        self.close(py)?;
        Ok(false)
    }
}

impl Session {
    /// Locks the run. Another thread may hold the lock during a call, so the wait leaves the interpreter free.
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, Option<ArrayRun>> {
        self.run.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    fn run_graph(
        &self,
        py: Python<'_>,
        graph: &Graph,
        arguments: &Bound<'_, PyTuple>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let inputs = read_inputs(graph, arguments, named)?;
        let outputs = self.call(py, graph, &inputs)?;
        self.wrap_outputs(py, graph, outputs)
    }

    fn call(
        &self,
        py: Python<'_>,
        graph: &Graph,
        inputs: &BTreeMap<String, HostArray>,
    ) -> PyResult<BTreeMap<String, HostArray>> {
        let mut guard = self.lock(py);
        let Some(run) = guard.as_mut() else {
            return Err(PyRuntimeError::new_err("the session is closed"));
        };
        let interrupt = run.interrupt_handle();
        wait_for(py, || run.call(&graph.program.name, inputs), || interrupt.interrupt())?.or_raise(py)
    }

    fn wrap_outputs(
        &self,
        py: Python<'_>,
        graph: &Graph,
        mut outputs: BTreeMap<String, HostArray>,
    ) -> PyResult<Py<PyAny>> {
        let mut wrapped = Vec::new();
        for (name, ..) in &graph.outputs {
            if let Some(array) = outputs.remove(name) {
                wrapped.push(self.plan.to_dtensor(graph, name, array));
            }
        }
        match (graph.returns_one, wrapped.pop()) {
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
    graph: &Graph,
    arguments: &Bound<'_, PyTuple>,
    named: Option<&Bound<'_, PyDict>>,
) -> PyResult<BTreeMap<String, HostArray>> {
    let names = &graph.inputs;
    if arguments.len() > names.len() {
        let message = format!("the program has {} inputs, not {}", names.len(), arguments.len());
        return Err(PyTypeError::new_err(message));
    }
    let mut inputs = BTreeMap::new();
    for ((name, _), value) in names.iter().zip(arguments) {
        inputs.insert(name.clone(), to_host_array(&value)?);
    }
    for (name, value) in named.into_iter().flatten() {
        let name: String = name.extract()?;
        if inputs.contains_key(&name) {
            return Err(PyTypeError::new_err(format!("input `{name}` is given twice")));
        }
        inputs.insert(name, to_host_array(&value)?);
    }
    Ok(inputs)
}

fn to_host_array(value: &Bound<'_, PyAny>) -> PyResult<HostArray> {
    match value.extract::<DTensor>() {
        Ok(array) => Ok(array.array),
        Err(_) => take_array(value),
    }
}

/// Runs work without the interpreter's lock, and `interrupt` as soon as Python has a signal to handle.
fn wait_for<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Diagnostics> + Send,
    interrupt: impl Fn(),
) -> PyResult<Result<T, Diagnostics>> {
    std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        scope.spawn(move || {
            // The receiver waits for the result even after an interrupt.
            let _ = sender.send(work());
        });
        let receiver = Mutex::new(receiver);
        let mut raised = None;
        loop {
            let outcome = py.detach(|| {
                receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_PERIOD)
            });
            match outcome {
                Ok(_) if raised.is_some() => break,
                Ok(result) => return Ok(result),
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(e) = py.check_signals()
                        && raised.is_none()
                    {
                        interrupt();
                        raised = Some(e);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    raised.get_or_insert_with(|| PyRuntimeError::new_err("the thread of a call panicked"));
                    break;
                }
            }
        }
        Err(raised.unwrap_or_else(|| PyRuntimeError::new_err("the call has no result")))
    })
}

/// The ranks of single ops, the least recently used first.
static LOADED: Mutex<Vec<(String, Arc<Session>)>> = Mutex::new(Vec::new());

/// Runs ops on arrays at once: as a program of its own, with the arrays as inputs.
pub(crate) fn apply_eagerly(
    py: Python<'_>,
    operands: &[Operand],
    add_ops: impl FnOnce(Python<'_>, &[Value]) -> PyResult<Value>,
) -> PyResult<DTensor> {
    let state = Arc::new(Mutex::new(TraceState::new("op")));
    let mut values = Vec::new();
    let mut inputs = BTreeMap::new();
    for operand in operands {
        let Operand::Array(array) = operand else {
            return Err(PyTypeError::new_err("a traced value outside of its trace"));
        };
        let name = format!("x{}", inputs.len());
        let id = lock(&state).add_input(py, &name, &ArraySpec::from(array))?;
        values.push(Value::new(Arc::clone(&state), id));
        inputs.insert(name, array.array.clone());
    }
    let result = add_ops(py, &values)?.id();
    let graph = finish(py, state, vec![("y".to_string(), result)], true)?;
    run_once(py, &Plan::from_graphs(py, vec![graph], None)?, inputs)
}

/// Returns an array in another layout.
pub(crate) fn redistribute(py: Python<'_>, array: &DTensor, layout: Layout) -> PyResult<DTensor> {
    let state = Arc::new(Mutex::new(TraceState::new("redistribute")));
    let id = lock(&state).add_input(py, "x", &ArraySpec::from(array))?;
    let mut graph = finish(py, state, vec![("y".to_string(), id)], true)?;
    graph.output_layouts.insert("y".to_string(), layout);
    run_once(
        py,
        &Plan::from_graphs(py, vec![graph], None)?,
        BTreeMap::from([("x".to_string(), array.array.clone())]),
    )
}

/// Runs a plan of one output whose ranks may still be loaded.
fn run_once(py: Python<'_>, plan: &Plan, inputs: BTreeMap<String, HostArray>) -> PyResult<DTensor> {
    let digest = plan.plan.sealed.digest_hex();
    let graph = plan.find_graph(None)?;
    let is_reusable = graph.weights.is_empty();
    let loaded = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = {
        let mut sessions = loaded();
        let found = sessions.iter().position(|(known, _)| is_reusable && *known == digest);
        found.map(|at| sessions.remove(at).1)
    };
    let session = match known {
        Some(session) => session,
        None => Arc::new(open_session(py, plan.clone(), "threads", "cpu", 1, None, true)?),
    };
    let outputs = session.call(py, graph, &inputs)?;
    if is_reusable {
        let mut sessions = loaded();
        sessions.push((digest, session));
        let surplus = sessions.len().saturating_sub(LOADED_OPS);
        let evicted: Vec<_> = sessions.drain(..surplus).collect();
        drop(sessions);
        py.detach(|| drop(evicted));
    }
    let (name, array) = outputs.into_iter().next().ok_or_else(|| PyRuntimeError::new_err("no output"))?;
    Ok(plan.to_dtensor(graph, &name, array))
}

impl From<&DTensor> for ArraySpec {
    fn from(array: &DTensor) -> ArraySpec {
        ArraySpec {
            shape: array.array.shape().to_vec(),
            mesh: Some(array.mesh.clone()),
            layout: array.layout,
            dims: array.dims.clone(),
            units: array.units.clone(),
        }
    }
}
