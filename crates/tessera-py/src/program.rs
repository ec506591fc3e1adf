//! `tessera.graph`: functions as logical programs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tessera::arrays::{ArrayFunction, FunctionOutput, HostArray};
use tessera::codes::T0097;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1504;
use tessera_ir::{ValueId, print};
use tessera_mesh::{DimShards, Layout};

use crate::dtensor::DTensor;
use crate::errors::{OrRaise, raise_one};
use crate::mesh::Mesh;
use crate::signature::ONLY_OUTPUT;
use crate::trace::{ArraySpec, TraceState, Value, lock};

/// A function as a logical program, and the arrays that its weights hold.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Graph {
    pub(crate) function: Arc<ArrayFunction>,
    pub(crate) weights: BTreeMap<String, HostArray>,
}

/// Traces a function into a program.
#[pyfunction]
#[pyo3(signature = (function, *arguments, name=None))]
pub(crate) fn trace(
    function: &Bound<'_, PyAny>,
    arguments: &Bound<'_, PyTuple>,
    name: Option<String>,
) -> PyResult<Graph> {
    let py = function.py();
    let name = match name {
        Some(name) => name,
        None => {
            let name = function.getattr("__name__").and_then(|n| n.extract::<String>());
            // A lambda has a name that no text of a program can hold.
            let is_word = |name: &String| {
                !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            };
            name.ok().filter(is_word).unwrap_or_else(|| "program".into())
        }
    };
    let parameters = name_parameters(function, arguments.len())?;
    let state = Arc::new(Mutex::new(TraceState::new(&name)));
    let mut values = Vec::new();
    for (parameter, argument) in parameters.iter().zip(arguments) {
        let spec = to_spec(&argument, parameter)?;
        let id = lock(&state).add_input(parameter, &spec);
        let id = id.or_raise(py)?;
        values.push(Value::new(Arc::clone(&state), id));
    }
    let returned = function.call1(PyTuple::new(py, values)?)?;
    let (outputs, returns_one) = read_outputs(&returned, &state)?;
    finish(py, state, outputs, returns_one)
}

/// Returns the names of a function's parameters, as many as there are arguments.
fn name_parameters(function: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<String>> {
    let signature = function.py().import("inspect")?.call_method1("signature", (function,))?;
    let names = signature.getattr("parameters")?.call_method0("keys")?;
    let names: Vec<String> = names.try_iter()?.map(|name| name?.extract()).collect::<PyResult<_>>()?;
    if names.len() < count {
        let message = format!("the function has {} parameters, but {count} arguments are given", names.len());
        return Err(PyTypeError::new_err(message));
    }
    Ok(names)
}

/// Returns the shape and layout of an input from an array or a spec.
fn to_spec(argument: &Bound<'_, PyAny>, parameter: &str) -> PyResult<ArraySpec> {
    if let Ok(spec) = argument.extract::<ArraySpec>() {
        return Ok(spec);
    }
    if let Ok(array) = argument.extract::<DTensor>() {
        return Ok(ArraySpec::from(&array));
    }
    let found = argument.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "`{parameter}` is a {found}, where trace takes a DTensor or a graph.ArraySpec"
    )))
}

/// Returns the values that a function returned, with their names.
fn read_outputs(
    returned: &Bound<'_, PyAny>,
    state: &Arc<Mutex<TraceState>>,
) -> PyResult<(Vec<(String, ValueId)>, bool)> {
    let py = returned.py();
    let to_id = |value: &Bound<'_, PyAny>| -> PyResult<ValueId> {
        let found = value.get_type().name()?.to_string();
        value.extract::<Value>().ok().and_then(|value| value.id_in(state)).ok_or_else(|| {
            let message = format!("a traced function returned a {found}, and no value of its own program");
            raise_one(py, Diagnostic::error(&T1504, message).with_hint("return what ops returned"))
        })
    };
    if returned.is_instance_of::<Value>() {
        return Ok((vec![(ONLY_OUTPUT.to_string(), to_id(returned)?)], true));
    }
    if let Ok(named) = returned.cast::<PyDict>() {
        let pairs = named.iter().map(|(name, value)| Ok((name.extract()?, to_id(&value)?)));
        return Ok((pairs.collect::<PyResult<_>>()?, false));
    }
    let Ok(values) = returned.try_iter() else { return Err(to_id(returned).err().unwrap_or_else(no_value)) };
    let pairs = values.enumerate().map(|(i, value)| Ok((format!("out{i}"), to_id(&value?)?)));
    Ok((pairs.collect::<PyResult<_>>()?, false))
}

fn no_value() -> PyErr {
    PyTypeError::new_err("a traced function returns a value, a tuple of values or a dict of values")
}

/// Ends a trace.
pub(crate) fn finish(
    py: Python<'_>,
    state: Arc<Mutex<TraceState>>,
    outputs: Vec<(String, ValueId)>,
    returns_one: bool,
) -> PyResult<Graph> {
    if outputs.is_empty() {
        let message = "a traced function returned no value";
        return Err(raise_one(py, Diagnostic::error(&T1504, message).with_hint("return what ops returned")));
    }
    let trace = lock(&state).end();
    let named = outputs.iter().map(|(name, id)| {
        let (dims, units) = trace.dims_of(*id);
        FunctionOutput { name: name.clone(), dims, units, shards: None }
    });
    let named = named.collect();
    let (dtype, rounding_seed) = trace.policy();
    let units = trace.units_of_sources();
    let TraceState {
        mut builder,
        mesh,
        layouts,
        weights,
        constants,
        stated,
        fixed_axes,
        is_deterministic,
        ..
    } = trace;
    for (name, id) in &outputs {
        builder.add_output(name, *id);
    }
    let program = builder.finish().map_err(|errors| {
        let to_diagnostic = |e: tessera_ir::rules::RuleError| Diagnostic::error(e.code, e.message);
        crate::errors::raise(py, errors.into_iter().map(to_diagnostic).collect())
    })?;
    let sources = layouts.iter().map(|(name, layout)| {
        let shards = to_shards(name, layout, units.get(name).map_or(&[], Vec::as_slice));
        Ok((name.clone(), shards.or_raise(py)?))
    });
    let sources = sources.collect::<PyResult<_>>()?;
    let function = ArrayFunction {
        program: Arc::new(program),
        mesh: mesh.map(|mesh| mesh.to_device_mesh()),
        sources,
        values: stated,
        outputs: named,
        returns_one,
        constants,
        dtype,
        rounding_seed,
        is_deterministic,
        fixed_axes,
    };
    Ok(Graph { function: Arc::new(function), weights })
}

/// Returns how a layout shards an array, on whatever mesh.
///
/// # Errors
/// T0097 for a layout that belongs to one mesh.
pub(crate) fn to_shards(name: &str, layout: &Layout, units: &[u64]) -> Result<DimShards, Diagnostic> {
    DimShards::from_layout(layout, units).ok_or_else(|| {
        Diagnostic::error(&T0097, format!("the layout of `{name}` belongs to one mesh"))
            .with_hint("distribute the array again")
    })
}

#[pymethods]
impl Graph {
    /// Name of the program.
    #[getter]
    fn name(&self) -> &str {
        &self.function.program.name
    }

    /// Names of the inputs, in the order of the function's parameters.
    #[getter]
    fn inputs(&self) -> Vec<String> {
        self.function.inputs().into_iter().map(|(name, _)| name).collect()
    }

    /// Names of the outputs.
    #[getter]
    fn outputs(&self) -> Vec<&str> {
        self.function.outputs.iter().map(|output| output.name.as_str()).collect()
    }

    /// Names of the arrays that the function captured.
    #[getter]
    fn weights(&self) -> Vec<String> {
        self.function.weights().into_iter().map(|(name, _)| name).collect()
    }

    /// The mesh over which the arrays were distributed.
    #[getter]
    fn mesh(&self) -> Option<Mesh> {
        self.function.mesh.clone().map(Mesh::from_device_mesh)
    }

    /// Returns the program in the text form that the command line reads.
    fn text(&self) -> String {
        print(&self.function.program)
    }

    /// Writes the function into a new folder: its program, how its arrays are sharded, and its weights unless they are to
    /// be given again.
    #[pyo3(signature = (folder, *, weights=true))]
    fn save(&self, py: Python<'_>, folder: PathBuf, weights: bool) -> PyResult<()> {
        let none = BTreeMap::new();
        let weights = if weights { &self.weights } else { &none };
        py.detach(|| self.function.write(&folder, weights)).or_raise(py)
    }

    fn __str__(&self) -> String {
        self.text()
    }

    fn __repr__(&self) -> String {
        format!("Graph({}, {} ops)", self.function.program.name, self.function.program.ops.len())
    }
}
