//! `tessera.graph`: functions as logical programs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tessera::arrays::HostArray;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1504;
use tessera_ir::{Program, ValueId, print};
use tessera_mesh::{DimName, Layout};
use tessera_plan::layouts::LaidOutProgram;
use tessera_plan::precision::apply_dtype_policy_to_arrays;
use tessera_plan::{DtypePolicy, round_stochastically};

use crate::dtensor::DTensor;
use crate::errors::{OrRaise, raise_one};
use crate::mesh::Mesh;
use crate::trace::{ArraySpec, TraceState, Value, lock};

/// A logical program, the layouts of its sources, and the arrays that its weights hold.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Graph {
    pub(crate) program: Arc<Program>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) layouts: BTreeMap<String, Layout>,
    /// Names and shapes of the inputs, in the order of the function's parameters.
    pub(crate) inputs: Vec<(String, Vec<u64>)>,
    /// Names of the outputs, with the names and units of their dims.
    pub(crate) outputs: Vec<(String, Vec<DimName>, Vec<u64>)>,
    pub(crate) weights: BTreeMap<String, HostArray>,
    /// The call scalars, which are equal in every call.
    pub(crate) constants: BTreeMap<String, Vec<f32>>,
    /// Layouts that layers state for their operands.
    pub(crate) stated: BTreeMap<ValueId, Layout>,
    /// The precision in which matmuls read their operands.
    pub(crate) policy: DtypePolicy,
    /// The seed with which values are rounded stochastically where they become bf16 or e4m3, if they are.
    pub(crate) rounding_seed: Option<u64>,
    /// Whether a layer wants results whose bits do not depend on the mesh.
    pub(crate) is_deterministic: bool,
    /// Layouts in which outputs leave; others leave as they are.
    pub(crate) output_layouts: BTreeMap<String, Layout>,
    /// Whether the function returned one value, and no tuple.
    pub(crate) returns_one: bool,
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
        return Ok((vec![("out".to_string(), to_id(returned)?)], true));
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
        (name.clone(), dims, units)
    });
    let named = named.collect();
    let (policy, rounding_seed) = trace.policy();
    let TraceState {
        mut builder, mesh, layouts, inputs, weights, constants, stated, is_deterministic, ..
    } = trace;
    for (name, id) in &outputs {
        builder.add_output(name, *id);
    }
    let program = builder.finish().map_err(|errors| {
        let to_diagnostic = |e: tessera_ir::rules::RuleError| Diagnostic::error(e.code, e.message);
        crate::errors::raise(py, errors.into_iter().map(to_diagnostic).collect())
    })?;
    Ok(Graph {
        program: Arc::new(program),
        mesh,
        layouts,
        inputs,
        outputs: named,
        weights,
        constants,
        stated,
        policy,
        rounding_seed,
        is_deterministic,
        output_layouts: BTreeMap::new(),
        returns_one,
    })
}

#[pymethods]
impl Graph {
    /// Name of the program.
    #[getter]
    fn name(&self) -> &str {
        &self.program.name
    }

    /// Names of the inputs, in the order of the function's parameters.
    #[getter]
    fn inputs(&self) -> Vec<&str> {
        self.inputs.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// Names of the outputs.
    #[getter]
    fn outputs(&self) -> Vec<&str> {
        self.outputs.iter().map(|(name, ..)| name.as_str()).collect()
    }

    /// Names of the arrays that the function captured.
    #[getter]
    fn weights(&self) -> Vec<&str> {
        self.weights.keys().map(String::as_str).collect()
    }

    /// Returns the program in the text form that the command line reads.
    fn text(&self) -> String {
        print(&self.program)
    }

    fn __str__(&self) -> String {
        self.text()
    }

    fn __repr__(&self) -> String {
        format!("Graph({}, {} ops)", self.program.name, self.program.ops.len())
    }
}

impl Graph {
    /// Returns the program as the planner takes it: with the casts of its precision.
    pub(crate) fn laid_out(&self, py: Python<'_>) -> PyResult<LaidOutProgram> {
        let mut program = apply_dtype_policy_to_arrays(&self.program, self.policy).or_raise(py)?;
        if let Some(seed) = self.rounding_seed {
            round_stochastically(&mut program, seed);
        }
        // Casts give values other numbers, and their names stay.
        let find = |id: &ValueId| {
            let name = &self.program.value(*id).name;
            program.values.iter().position(|value| value.name == *name).map(|at| ValueId(at as u32))
        };
        let values = self.stated.iter().filter_map(|(id, layout)| Some((find(id)?, *layout))).collect();
        Ok(LaidOutProgram {
            sources: self.layouts.clone(),
            values,
            outputs: self.output_layouts.clone(),
            program,
        })
    }
}
