//! The program that calls of ops write: symbolic values, the arrays that they capture, and the checks of every op.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tessera::arrays::HostArray;
use tessera_base::Diagnostic;
use tessera_cli::codes::{T1504, T1505};
use tessera_ir::{Builder, DType, Opcode, Type, ValueId};
use tessera_mesh::{DimName, Layout};
use tessera_plan::DtypePolicy;

use crate::array_memory::take_array;
use crate::dtensor::{DTensor, name_dims, to_layout};
use crate::errors::raise_one;
use crate::mesh::{Mesh, ReplicateSpec, Spec};
use crate::numeric::Numeric;

/// The shape and layout of an input, whose values come with each call.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Debug, Clone)]
pub(crate) struct ArraySpec {
    pub(crate) shape: Vec<u64>,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) layout: Layout,
    pub(crate) dims: Vec<DimName>,
    pub(crate) units: Vec<u64>,
}

#[pymethods]
impl ArraySpec {
    #[new]
    #[pyo3(signature = (shape, mesh=None, spec=None, *, dims=None, units=None))]
    fn new(
        py: Python<'_>,
        shape: Vec<u64>,
        mesh: Option<Mesh>,
        spec: Option<Spec>,
        dims: Option<Vec<String>>,
        units: Option<BTreeMap<String, u64>>,
    ) -> PyResult<ArraySpec> {
        let (dims, units) = name_dims(py, shape.len(), dims, units.unwrap_or_default())?;
        let spec = spec.unwrap_or(Spec::Replicate(ReplicateSpec::default()));
        let layout = match &mesh {
            Some(mesh) => to_layout(py, &spec, (&shape, &dims, &units), mesh)?,
            None if spec.shards() == tessera_mesh::ShardSpec::REPLICATED => Layout::REPLICATED,
            None => return Err(PyValueError::new_err("a sharded array needs a mesh")),
        };
        Ok(ArraySpec { shape, mesh, layout, dims, units })
    }

    /// Extents of the whole array.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }
}

/// A value of a program that is being traced.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Value {
    state: Arc<Mutex<TraceState>>,
    id: ValueId,
}

/// An operand of an op: a value of a program, or an array.
#[derive(FromPyObject, Clone)]
#[allow(clippy::large_enum_variant, reason = "an op has a few operands, and a box would need a conversion of its own")]
pub(crate) enum Operand {
    Value(Value),
    Array(DTensor),
}

impl From<DTensor> for Operand {
    fn from(array: DTensor) -> Operand {
        Operand::Array(array)
    }
}

/// A program under construction, with what its sources hold.
pub(crate) struct TraceState {
    pub(crate) builder: Builder,
    pub(crate) mesh: Option<Mesh>,
    pub(crate) layouts: BTreeMap<String, Layout>,
    pub(crate) inputs: Vec<(String, Vec<u64>)>,
    pub(crate) weights: BTreeMap<String, HostArray>,
    /// The call scalars, which are equal in every call.
    pub(crate) constants: BTreeMap<String, Vec<f32>>,
    /// Names and units of the dims of each value.
    dims: BTreeMap<ValueId, (Vec<DimName>, Vec<u64>)>,
    /// The layouts in which ops read values, where a layer states one.
    pub(crate) stated: BTreeMap<ValueId, Layout>,
    /// The precision that layers state.
    policy: Option<Numeric>,
    /// The arrays that became weights, by address and layout.
    captured: Vec<(usize, Layout, ValueId)>,
}

impl TraceState {
    pub(crate) fn new(name: &str) -> TraceState {
        TraceState {
            builder: Builder::new_logical(name),
            mesh: None,
            layouts: BTreeMap::new(),
            inputs: Vec::new(),
            weights: BTreeMap::new(),
            constants: BTreeMap::new(),
            dims: BTreeMap::new(),
            stated: BTreeMap::new(),
            policy: None,
            captured: Vec::new(),
        }
    }

    /// Returns the precision of the program.
    pub(crate) fn policy(&self) -> DtypePolicy {
        self.policy.as_ref().map_or(DtypePolicy::F32, Numeric::policy)
    }

    /// Notes the precision that a layer states; a program has one.
    pub(crate) fn state_policy(&mut self, py: Python<'_>, policy: &Numeric) -> PyResult<()> {
        match &self.policy {
            Some(known) if known.policy() != policy.policy() => {
                let diagnostic = Diagnostic::error(&T1505, "layers of one program state two precisions")
                    .with_label("first", known.name())
                    .with_label("second", policy.name())
                    .with_hint("state one policy, or trace two programs");
                Err(raise_one(py, diagnostic))
            }
            _ => {
                self.policy = Some(policy.clone());
                Ok(())
            }
        }
    }

    /// Adds an input.
    pub(crate) fn add_input(&mut self, py: Python<'_>, name: &str, spec: &ArraySpec) -> PyResult<ValueId> {
        self.join_mesh(py, spec.mesh.as_ref())?;
        let id = self.builder.add_input(name, Type::new(DType::F32, spec.shape.clone()));
        self.layouts.insert(name.to_string(), spec.layout);
        self.inputs.push((name.to_string(), spec.shape.clone()));
        self.dims.insert(id, (spec.dims.clone(), spec.units.clone()));
        Ok(id)
    }

    /// Adds an array as a weight, unless it is one already.
    fn add_weight(&mut self, py: Python<'_>, array: &DTensor) -> PyResult<ValueId> {
        let address = array.array.values().as_ptr() as usize;
        let known = self.captured.iter().find(|(a, layout, _)| (*a, *layout) == (address, array.layout));
        if let Some((_, _, id)) = known {
            return Ok(*id);
        }
        self.join_mesh(py, Some(&array.mesh))?;
        let id = self.push_weight("w", &array.array, array.layout);
        self.captured.push((address, array.layout, id));
        self.dims.insert(id, (array.dims.clone(), array.units.clone()));
        Ok(id)
    }

    fn push_weight(&mut self, prefix: &str, array: &HostArray, layout: Layout) -> ValueId {
        // The programs of a plan share their weights by name.
        let name = format!("{}.{prefix}{}", self.builder.program().name, self.weights.len());
        let id = self.builder.add_weight(&name, Type::new(DType::F32, array.shape().to_vec()));
        self.layouts.insert(name.clone(), layout);
        self.weights.insert(name, array.clone());
        id
    }

    /// Adds a scalar that has these numbers in every call.
    pub(crate) fn add_call_constant(&mut self, shape: &[u64], values: Vec<f32>) -> ValueId {
        let name = format!("{}.s{}", self.builder.program().name, self.constants.len());
        let id = self.builder.add_call_scalar(&name, Type::new(DType::F32, shape.to_vec()));
        self.constants.insert(name, values);
        id
    }

    /// Adds an array of numbers that the program holds on every rank.
    pub(crate) fn add_constant(&mut self, shape: &[u64], values: Vec<f32>) -> ValueId {
        self.push_weight("c", &HostArray::from_vec(shape.to_vec(), values), Layout::REPLICATED)
    }

    pub(crate) fn shape_of(&self, id: ValueId) -> &[u64] {
        &self.builder.type_of(id).shape
    }

    pub(crate) fn dims_of(&self, id: ValueId) -> (Vec<DimName>, Vec<u64>) {
        self.dims.get(&id).cloned().unwrap_or_else(|| {
            let count = self.shape_of(id).len();
            (DimName::of_weight(count).unwrap_or_default(), vec![1; count])
        })
    }

    pub(crate) fn set_dims(&mut self, id: ValueId, dims: (Vec<DimName>, Vec<u64>)) {
        self.dims.insert(id, dims);
    }

    fn join_mesh(&mut self, py: Python<'_>, mesh: Option<&Mesh>) -> PyResult<()> {
        match (&self.mesh, mesh) {
            (_, None) => {}
            (None, Some(mesh)) => self.mesh = Some(mesh.clone()),
            (Some(ours), Some(theirs)) if ours == theirs => {}
            (Some(ours), Some(theirs)) => {
                let diagnostic = Diagnostic::error(&T1504, "operands of two meshes in one program")
                    .with_label("first", ours.mesh.to_string())
                    .with_label("second", theirs.mesh.to_string())
                    .with_hint("distribute all arrays over one mesh");
                return Err(raise_one(py, diagnostic));
            }
        }
        Ok(())
    }

    /// Raises what a rule reported about the last op.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        match self.builder.errors().first() {
            None => Ok(()),
            Some(e) => Err(raise_one(py, Diagnostic::error(e.code, e.message.clone()))),
        }
    }
}

impl Value {
    /// Creates a value of a program.
    pub(crate) fn new(state: Arc<Mutex<TraceState>>, id: ValueId) -> Value {
        Value { state, id }
    }

    /// Returns the id of the value in a program, or `None` if it belongs to another one.
    pub(crate) fn id_in(&self, state: &Arc<Mutex<TraceState>>) -> Option<ValueId> {
        Arc::ptr_eq(&self.state, state).then_some(self.id)
    }

    pub(crate) fn state(&self) -> &Arc<Mutex<TraceState>> {
        &self.state
    }

    pub(crate) fn id(&self) -> ValueId {
        self.id
    }

    fn combine(
        &self,
        py: Python<'_>,
        opcode: Opcode,
        other: &Bound<'_, PyAny>,
        sign: f32,
    ) -> PyResult<Value> {
        if let Ok(Operand::Value(other)) = other.extract::<Operand>()
            && sign == 1.0
        {
            return emit(py, &self.state, &[Operand::Value(self.clone()), other.into()], |t, operands| {
                t.builder.add_op(opcode, operands)
            });
        }
        if let Ok(Operand::Value(other)) = other.extract::<Operand>() {
            let negated = other.combine(py, Opcode::Mul, (-1.0f32).into_pyobject(py)?.as_any(), 1.0)?;
            return self.combine(py, opcode, negated.into_pyobject(py)?.as_any(), 1.0);
        }
        if let Ok(Operand::Array(array)) = other.extract::<Operand>()
            && sign == 1.0
        {
            let operands = [Operand::Value(self.clone()), Operand::Array(array)];
            return emit(py, &self.state, &operands, |t, operands| t.builder.add_op(opcode, operands));
        }
        let shape = lock(&self.state).shape_of(self.id).to_vec();
        let numpy = py.import("numpy")?;
        let float32 = numpy.getattr("float32")?;
        let numbers = numpy.call_method1("asarray", (other, float32))?;
        let whole = numpy.call_method1("broadcast_to", (numbers, PyTuple::new(py, &shape)?));
        let whole = numpy.call_method1("ascontiguousarray", (whole?,))?.call_method0("copy")?;
        let constant: Vec<f32> = take_array(&whole)?.values().iter().map(|x| sign * x).collect();
        emit(py, &self.state, &[Operand::Value(self.clone())], |t, operands| {
            let constant = t.add_constant(&shape, constant);
            t.builder.add_op(opcode, &[operands[0], constant])
        })
    }
}

impl From<Value> for Operand {
    fn from(value: Value) -> Operand {
        Operand::Value(value)
    }
}

#[pymethods]
impl Value {
    /// numpy must not take over `array - value`.
    #[classattr]
    #[pyo3(name = "__array_ufunc__")]
    fn array_ufunc(py: Python<'_>) -> Py<PyAny> {
        py.None()
    }

    /// Extents of the value.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, lock(&self.state).shape_of(self.id))
    }

    fn __add__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Add, &other, 1.0)
    }

    fn __radd__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Add, &other, 1.0)
    }

    fn __sub__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Add, &other, -1.0)
    }

    fn __mul__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Mul, &other, 1.0)
    }

    fn __rmul__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Mul, &other, 1.0)
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err(
            "a traced value has no truth value: a program has no branches, so that every rank runs the same ops",
        ))
    }

    fn __repr__(&self) -> String {
        let state = lock(&self.state);
        format!("Value(float32{:?} of {})", state.shape_of(self.id), state.builder.program().name)
    }
}

/// Locks a trace. Only one thread traces at a time, and a panic leaves nothing half-done that matters.
pub(crate) fn lock(state: &Mutex<TraceState>) -> MutexGuard<'_, TraceState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds ops to a program. Arrays among the operands become weights of it.
pub(crate) fn emit(
    py: Python<'_>,
    state: &Arc<Mutex<TraceState>>,
    operands: &[Operand],
    add_ops: impl FnOnce(&mut TraceState, &[ValueId]) -> ValueId,
) -> PyResult<Value> {
    let mut trace = lock(state);
    let mut ids = Vec::new();
    for operand in operands {
        ids.push(match operand {
            Operand::Array(array) => trace.add_weight(py, array)?,
            Operand::Value(value) => value.id_in(state).ok_or_else(|| {
                let diagnostic = Diagnostic::error(&T1504, "a value of another program")
                    .with_hint("return values from the traced function, and pass arrays into another one");
                raise_one(py, diagnostic)
            })?,
        });
    }
    let result = add_ops(&mut trace, &ids);
    trace.check(py)?;
    if let Some(first) = ids.first()
        && !trace.dims.contains_key(&result)
        && trace.shape_of(*first).len() == trace.shape_of(result).len()
    {
        let dims = trace.dims_of(*first);
        trace.set_dims(result, dims);
    }
    drop(trace);
    Ok(Value::new(Arc::clone(state), result))
}
