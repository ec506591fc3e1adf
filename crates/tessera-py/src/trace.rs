//! The program that calls of ops write: symbolic values, the arrays that they capture, and the checks of every op.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::basic::CompareOp;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tessera::arrays::{CopyRule, HostArray};
use tessera_base::Diagnostic;
use tessera_cli::codes::{T1504, T1505};
use tessera_ir::{Builder, DType, Opcode, Type, ValueId};
use tessera_mesh::{Axis, DimName, DimShards, Layout};
use tessera_plan::DtypePolicy;

use crate::array_memory::take_array;
use crate::dtensor::{DTensor, name_dims, to_layout};
use crate::errors::OrRaise;
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

impl From<&DTensor> for ArraySpec {
    fn from(array: &DTensor) -> ArraySpec {
        ArraySpec {
            shape: array.values.shape().to_vec(),
            mesh: Some(array.mesh.clone()),
            layout: array.layout,
            dims: array.dims.clone(),
            units: array.units.clone(),
        }
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
#[allow(
    clippy::large_enum_variant,
    reason = "an op has a few operands, and a box would need a conversion of its own"
)]
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
    pub(crate) weights: BTreeMap<String, HostArray>,
    /// The call scalars, which are equal in every call.
    pub(crate) constants: BTreeMap<String, Vec<f32>>,
    /// Names and units of the dims of each value.
    dims: BTreeMap<ValueId, (Vec<DimName>, Vec<u64>)>,
    /// How values are sharded where ops read them, where a layer states it.
    pub(crate) stated: BTreeMap<ValueId, DimShards>,
    /// Axes whose sizes the function has read.
    pub(crate) fixed_axes: BTreeSet<Axis>,
    /// The precision that layers state.
    policy: Option<Numeric>,
    /// Whether a layer wants results whose bits do not depend on the mesh.
    pub(crate) is_deterministic: bool,
    /// The arrays that became weights.
    captured: Vec<(DTensor, ValueId)>,
    /// Why no further op can be added.
    closed: Option<String>,
}

impl TraceState {
    pub(crate) fn new(name: &str) -> TraceState {
        TraceState {
            builder: Builder::new_logical(name),
            mesh: None,
            layouts: BTreeMap::new(),
            weights: BTreeMap::new(),
            constants: BTreeMap::new(),
            dims: BTreeMap::new(),
            stated: BTreeMap::new(),
            fixed_axes: BTreeSet::new(),
            policy: None,
            is_deterministic: false,
            captured: Vec::new(),
            closed: None,
        }
    }

    /// Ends the trace and returns what it wrote. Values that Python still holds find a closed trace.
    pub(crate) fn end(&mut self) -> TraceState {
        let closed = "its trace has ended".to_string();
        std::mem::replace(self, TraceState { closed: Some(closed), ..TraceState::new("ended") })
    }

    /// Returns the precision of the program, and the seed of stochastic rounding.
    pub(crate) fn policy(&self) -> (DtypePolicy, Option<u64>) {
        self.policy
            .as_ref()
            .map_or((DtypePolicy::F32, None), |policy| (policy.policy(), policy.rounding_seed()))
    }

    /// Notes the precision that a layer states; a program has one.
    ///
    /// # Errors
    /// T1505 if another layer states another one.
    pub(crate) fn state_policy(&mut self, policy: &Numeric) -> Result<(), Diagnostic> {
        match &self.policy {
            Some(known)
                if (known.policy(), known.rounding_seed()) != (policy.policy(), policy.rounding_seed()) =>
            {
                Err(Diagnostic::error(&T1505, "layers of one program state two precisions")
                    .with_label("first", known.describe())
                    .with_label("second", policy.describe())
                    .with_hint("state one policy, or trace two programs"))
            }
            _ => {
                self.is_deterministic |= policy.is_deterministic();
                self.policy = Some(policy.clone());
                Ok(())
            }
        }
    }

    /// States how a value is sharded where ops read it; a value has one layout.
    ///
    /// # Errors
    /// T1504 if another layer, or another operand, states another one.
    pub(crate) fn state_shards(&mut self, id: ValueId, shards: &DimShards) -> Result<(), Diagnostic> {
        match self.stated.insert(id, shards.clone()) {
            Some(known) if known != *shards => {
                Err(Diagnostic::error(&T1504, "a value is stated in two layouts")
                    .with_hint("state one layout for the operands that are the same value"))
            }
            _ => Ok(()),
        }
    }

    /// Adds an input.
    ///
    /// # Errors
    /// T1504 for another mesh than that of the program.
    pub(crate) fn add_input(&mut self, name: &str, spec: &ArraySpec) -> Result<ValueId, Diagnostic> {
        self.join_mesh(spec.mesh.as_ref())?;
        let id = self.builder.add_input(name, Type::new(DType::F32, spec.shape.clone()));
        self.layouts.insert(name.to_string(), spec.layout);
        self.dims.insert(id, (spec.dims.clone(), spec.units.clone()));
        Ok(id)
    }

    /// Adds an array as a weight, unless it is one already.
    fn add_weight(&mut self, array: &DTensor) -> Result<ValueId, Diagnostic> {
        self.join_mesh(Some(&array.mesh))?;
        let known = self.captured.iter().find(|(captured, _)| captured.is_same(array));
        if let Some((_, id)) = known {
            return Ok(*id);
        }
        let id = self.push_weight("w", array.host_array("plans")?, array.layout);
        self.captured.push((array.clone(), id));
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

    /// Returns the extents of a value; none for a value of a trace that has ended, which takes no op.
    pub(crate) fn shape_of(&self, id: ValueId) -> &[u64] {
        self.builder.program().values.get(id.0 as usize).map_or(&[], |value| &value.ty.shape)
    }

    pub(crate) fn dims_of(&self, id: ValueId) -> (Vec<DimName>, Vec<u64>) {
        self.dims.get(&id).cloned().unwrap_or_else(|| {
            let count = self.shape_of(id).len();
            (DimName::of_weight(count).unwrap_or_default(), vec![1; count])
        })
    }

    /// Returns the units in which the dims of inputs and weights are sharded, by name.
    pub(crate) fn units_of_sources(&self) -> BTreeMap<String, Vec<u64>> {
        let ops = self.builder.program().ops.iter();
        let named = ops.filter_map(|op| Some((op.name.clone()?, self.dims_of(*op.results.first()?).1)));
        named.filter(|(name, _)| self.layouts.contains_key(name)).collect()
    }

    pub(crate) fn set_dims(&mut self, id: ValueId, dims: (Vec<DimName>, Vec<u64>)) {
        self.dims.insert(id, dims);
    }

    fn join_mesh(&mut self, mesh: Option<&Mesh>) -> Result<(), Diagnostic> {
        let Some(theirs) = mesh else { return Ok(()) };
        let ours = self.mesh.get_or_insert_with(|| theirs.clone());
        match ours.is_same(theirs) {
            true => Ok(()),
            false => Err(Diagnostic::error(&T1504, "operands of two meshes in one program")
                .with_label("first", ours.describe())
                .with_label("second", theirs.describe())
                .with_hint("distribute all arrays over one mesh")),
        }
    }

    /// Returns what a rule reported about the last op. The ops of the function are wrong from then on.
    fn take_error(&mut self) -> Result<(), Diagnostic> {
        let Some(e) = self.builder.errors().first() else { return Ok(()) };
        let diagnostic = Diagnostic::error(e.code, e.message.clone());
        self.closed = Some(format!("it failed: {}", diagnostic.message));
        Err(diagnostic)
    }

    /// Returns an error if no further op can be added.
    fn check_open(&self) -> Result<(), Diagnostic> {
        match &self.closed {
            None => Ok(()),
            Some(why) => Err(Diagnostic::error(&T1504, format!("the program takes no further op: {why}"))
                .with_hint(
                    "use values only in the function that is traced, and trace it again after an error",
                )),
        }
    }

    /// Adds ops to the program. Arrays among the operands become weights of it.
    fn add_ops(
        &mut self,
        operands: &[TracedOperand],
        add_ops: impl FnOnce(&mut TraceState, &[ValueId]) -> Result<ValueId, Diagnostic>,
    ) -> Result<ValueId, Diagnostic> {
        self.check_open()?;
        let ids = operands.iter().map(|operand| match operand {
            TracedOperand::Value(id) => Ok(*id),
            TracedOperand::Array(array) => self.add_weight(array),
        });
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        let result = add_ops(self, &ids)?;
        self.take_error()?;
        if let Some(first) = ids.first()
            && !self.dims.contains_key(&result)
            && self.shape_of(*first).len() == self.shape_of(result).len()
        {
            let dims = self.dims_of(*first);
            self.set_dims(result, dims);
        }
        Ok(result)
    }
}

/// An operand of an op, within the program that the op is added to.
enum TracedOperand {
    Value(ValueId),
    Array(Box<DTensor>),
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

    /// Adds an op of this value and another operand, or of this value and numbers that are broadcast to its shape.
    fn combine(&self, py: Python<'_>, opcode: Opcode, other: &Bound<'_, PyAny>) -> PyResult<Value> {
        if let Ok(other) = other.extract::<Operand>() {
            let operands = [Operand::Value(self.clone()), other];
            return emit(py, &self.state, &operands, |t, ids| Ok(t.builder.add_op(opcode, ids)));
        }
        let shape = self.shape_now().or_raise(py)?;
        let numpy = py.import("numpy")?;
        let numbers = numpy.call_method1("asarray", (other, numpy.getattr("float32")?))?;
        let whole = numpy.call_method1("broadcast_to", (numbers, PyTuple::new(py, &shape)?))?;
        let constant = take_array(&whole, CopyRule::Always)?.values().to_vec();
        emit(py, &self.state, &[Operand::Value(self.clone())], |t, ids| {
            let constant = t.add_constant(&shape, constant);
            Ok(t.builder.add_op(opcode, &[ids[0], constant]))
        })
    }

    /// Returns the extents of the value, unless its trace has ended.
    fn shape_now(&self) -> Result<Vec<u64>, Diagnostic> {
        let trace = lock(&self.state);
        trace.check_open()?;
        Ok(trace.shape_of(self.id).to_vec())
    }

    fn negate(&self, py: Python<'_>) -> PyResult<Value> {
        self.combine(py, Opcode::Mul, (-1.0f32).into_pyobject(py)?.as_any())
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
        PyTuple::new(py, self.shape_now().or_raise(py)?)
    }

    fn __add__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Add, &other)
    }

    fn __radd__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Add, &other)
    }

    fn __sub__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        match other.extract::<Operand>() {
            Ok(Operand::Value(other)) => {
                self.combine(py, Opcode::Add, other.negate(py)?.into_pyobject(py)?.as_any())
            }
            Ok(Operand::Array(array)) => {
                let operand = [Operand::Array(array)];
                let other = emit(py, &self.state, &operand, |_, ids| Ok(ids[0]))?.negate(py)?;
                self.combine(py, Opcode::Add, other.into_pyobject(py)?.as_any())
            }
            Err(_) => self.combine(py, Opcode::Add, &other.neg()?),
        }
    }

    fn __rsub__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.negate(py)?.combine(py, Opcode::Add, &other)
    }

    fn __neg__(&self, py: Python<'_>) -> PyResult<Value> {
        self.negate(py)
    }

    fn __mul__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Mul, &other)
    }

    fn __rmul__(&self, py: Python<'_>, other: Bound<'_, PyAny>) -> PyResult<Value> {
        self.combine(py, Opcode::Mul, &other)
    }

    fn __richcmp__(&self, _other: &Bound<'_, PyAny>, _op: CompareOp) -> PyResult<bool> {
        self.__bool__()
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err(
            "a traced value has no truth value: a program has no branches, so that every rank runs the same ops",
        ))
    }

    fn __repr__(&self) -> String {
        let state = lock(&self.state);
        match state.check_open() {
            Ok(()) => {
                format!("Value(float32{:?} of {})", state.shape_of(self.id), state.builder.program().name)
            }
            Err(_) => "Value(of a trace that has ended)".to_string(),
        }
    }
}

/// Locks a trace. Only one thread traces at a time, and a panic leaves nothing half-done that matters.
pub(crate) fn lock(state: &Mutex<TraceState>) -> MutexGuard<'_, TraceState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds ops to a program. Arrays among the operands become weights of it.
///
/// Exceptions are made after the trace is unlocked, because making one runs Python.
pub(crate) fn emit(
    py: Python<'_>,
    state: &Arc<Mutex<TraceState>>,
    operands: &[Operand],
    add_ops: impl FnOnce(&mut TraceState, &[ValueId]) -> Result<ValueId, Diagnostic>,
) -> PyResult<Value> {
    let traced = operands.iter().map(|operand| match operand {
        Operand::Array(array) => Ok(TracedOperand::Array(Box::new(array.clone()))),
        Operand::Value(value) => value.id_in(state).map(TracedOperand::Value).ok_or_else(|| {
            Diagnostic::error(&T1504, "a value of another program")
                .with_hint("return values from the traced function, and pass arrays into another one")
        }),
    });
    let traced = traced.collect::<Result<Vec<_>, _>>().or_raise(py)?;
    let result = lock(state).add_ops(&traced, add_ops);
    Ok(Value::new(Arc::clone(state), result.or_raise(py)?))
}
