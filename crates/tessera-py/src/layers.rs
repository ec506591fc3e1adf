//! `tessera.op`: layers as objects that are called on arrays or on traced values.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1503;
use tessera_ir::{Opcode, ValueId};
use tessera_mesh::{DimName, DimShards};

use crate::dtensor::to_layout;
use crate::eager::apply_eagerly;
use crate::errors::raise_one;
use crate::mesh::Spec;
use crate::numeric::{Numeric, numeric};
use crate::trace::{Operand, TraceState, Value, emit, lock};

/// A layer: an op with its attributes, without its weights.
#[pyclass(frozen, module = "tessera.op")]
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    kind: LayerKind,
    policy: Option<Numeric>,
}

#[derive(Debug, Clone)]
enum LayerKind {
    Linear { activation: Option<String> },
    LayerNorm { eps: f64 },
    RmsNorm { eps: f64 },
    Softmax { dim: Option<u64> },
    Silu,
    Relu,
    Embedding,
    FlashAttention(Box<FlashAttention>),
}

/// Attention of whole sequences.
#[derive(Debug, Clone)]
struct FlashAttention {
    heads: u64,
    head_dim: u64,
    sequences: u64,
    causal: bool,
    /// Layouts of q, k and v.
    layouts: [Option<Spec>; 3],
}

impl LayerKind {
    /// Returns the name of the constructor, and the smallest and largest number of operands.
    fn signature(&self) -> (&'static str, usize, usize) {
        match self {
            LayerKind::Linear { .. } => ("linear", 2, 3),
            LayerKind::LayerNorm { .. } => ("layer_norm", 3, 3),
            LayerKind::RmsNorm { .. } => ("rms_norm", 2, 2),
            LayerKind::Softmax { .. } => ("softmax", 1, 1),
            LayerKind::Silu => ("silu", 1, 1),
            LayerKind::Relu => ("relu", 1, 1),
            LayerKind::Embedding => ("embedding", 2, 2),
            LayerKind::FlashAttention(_) => ("flash_attention", 3, 3),
        }
    }

    /// Adds the ops of the layer.
    ///
    /// # Errors
    /// T1503 for operands that the layer does not take; the rules of the IR find others.
    fn add_ops(&self, t: &mut TraceState, operands: &[ValueId]) -> Result<ValueId, Diagnostic> {
        Ok(match self {
            LayerKind::Linear { activation } => add_linear(t, operands, activation.as_deref()),
            LayerKind::LayerNorm { eps } => {
                t.builder.set_attr("eps", *eps).add_op(Opcode::LayerNorm, operands)
            }
            LayerKind::RmsNorm { eps } => t.builder.set_attr("eps", *eps).add_op(Opcode::RmsNorm, operands),
            LayerKind::Softmax { dim } => {
                if let Some(dim) = dim {
                    t.builder.set_attr("dim", *dim);
                }
                t.builder.add_op(Opcode::Softmax, operands)
            }
            LayerKind::Silu => t.builder.add_op(Opcode::Silu, operands),
            LayerKind::Relu => t.builder.add_op(Opcode::Relu, operands),
            LayerKind::Embedding => {
                let y = t.builder.add_op(Opcode::Embed, operands);
                let (ids, table) = (t.dims_of(operands[0]), t.dims_of(operands[1]));
                if let ([tokens, ..], [_, width, ..]) = (&ids.0[..], &table.0[..]) {
                    t.set_dims(y, (vec![*tokens, *width], vec![ids.1[0], table.1[1]]));
                }
                y
            }
            LayerKind::FlashAttention(attention) => attention.add_ops(t, operands)?,
        })
    }
}

/// Adds act(x · wᵀ + bias) for x [tokens, in] and w [out, in].
fn add_linear(t: &mut TraceState, operands: &[ValueId], activation: Option<&str>) -> ValueId {
    if let Some(bias) = operands.get(2) {
        t.builder.add_keyed("bias", *bias);
    }
    if let Some(activation) = activation {
        t.builder.set_attr("act", activation);
    }
    let y = t.builder.add_op(Opcode::Matmul, &operands[..2]);
    let (x, w) = (t.dims_of(operands[0]), t.dims_of(operands[1]));
    if let ([tokens, ..], [out, ..]) = (&x.0[..], &w.0[..])
        && t.shape_of(y).len() == 2
    {
        t.set_dims(y, (vec![*tokens, *out], vec![x.1[0], w.1[0]]));
    }
    y
}

impl FlashAttention {
    /// Returns how the layer shards its operands of these shapes.
    fn find_shards(&self, py: Python<'_>, values: &[Value]) -> PyResult<Vec<(ValueId, DimShards)>> {
        let mut found = Vec::new();
        for (value, spec) in values.iter().zip(&self.layouts) {
            let Some(spec) = spec else { continue };
            let (mesh, shape) = {
                let trace = lock(value.state());
                (trace.mesh.clone(), trace.shape_of(value.id()).to_vec())
            };
            let Some(mesh) = mesh else { continue };
            // The columns of an operand are those of its heads, whatever its dims are called.
            let dims = match spec.names_heads() {
                true => [DimName::Token, DimName::Head],
                false => [DimName::Row, DimName::Col],
            };
            let units = [1, self.head_dim];
            let layout = to_layout(py, spec, (&shape, &dims, &units), &mesh)?;
            found.extend(DimShards::from_layout(&layout, &units).map(|shards| (value.id(), shards)));
        }
        Ok(found)
    }

    /// Checks the shapes of q, k and v.
    fn check_shapes(&self, t: &TraceState, operands: &[ValueId]) -> Result<(), Diagnostic> {
        let width = self.heads.checked_mul(self.head_dim);
        for (name, id) in ["q", "k", "v"].iter().zip(operands) {
            let shape = t.shape_of(*id);
            let [rows, columns] = *shape else {
                let message =
                    format!("{name} has the shape {shape:?}, and attention takes [tokens, heads · head_dim]");
                return Err(Diagnostic::error(&T1503, message));
            };
            if Some(columns) != width {
                let (heads, head_dim) = (self.heads, self.head_dim);
                let message = format!(
                    "{name} has {columns} columns, and {heads} heads of {head_dim} have another number"
                );
                return Err(Diagnostic::error(&T1503, message));
            }
            if !rows.is_multiple_of(self.sequences) {
                let message = format!(
                    "{name} has {rows} rows, which are no {} sequences of one length",
                    self.sequences
                );
                return Err(Diagnostic::error(&T1503, message));
            }
        }
        Ok(())
    }

    /// Adds attention. Causal attention is that over pages: a sequence is one page of its own rows.
    fn add_ops(&self, t: &mut TraceState, operands: &[ValueId]) -> Result<ValueId, Diagnostic> {
        self.check_shapes(t, operands)?;
        if !self.causal {
            return Ok(t.builder.set_attr("head_dim", self.head_dim).add_op(Opcode::Attention, operands));
        }
        let rows = t.shape_of(operands[0]).first().map_or(1, |rows| (rows / self.sequences).max(1));
        let pages = (0..self.sequences).map(|sequence| sequence as f32).collect();
        let pages = t.add_call_constant(&[self.sequences, 1], pages);
        let start = t.add_call_constant(&[self.sequences], vec![0.0; self.sequences as usize]);
        t.builder.set_attr("head_dim", self.head_dim).set_attr("page_rows", rows);
        t.builder.add_keyed("pages", pages).add_keyed("start", start);
        Ok(t.builder.add_op(Opcode::PagedAttention, operands))
    }
}

#[pymethods]
impl Layer {
    #[pyo3(signature = (*operands))]
    fn __call__(&self, py: Python<'_>, operands: Vec<Operand>) -> PyResult<Py<PyAny>> {
        let (name, least, most) = self.kind.signature();
        if !(least..=most).contains(&operands.len()) {
            let wants = if least == most { least.to_string() } else { format!("{least} or {most}") };
            return Err(PyTypeError::new_err(format!(
                "{name} takes {wants} operands, not {}",
                operands.len()
            )));
        }
        apply(py, &operands, |py, values| {
            let state = values[0].state();
            let shards = match &self.kind {
                LayerKind::FlashAttention(attention) => attention.find_shards(py, values)?,
                _ => Vec::new(),
            };
            let values: Vec<Operand> = values.iter().cloned().map(Operand::Value).collect();
            emit(py, state, &values, |t, ids| {
                self.policy.iter().try_for_each(|policy| t.state_policy(policy))?;
                shards.iter().try_for_each(|(id, shards)| t.state_shards(*id, shards))?;
                self.kind.add_ops(t, ids)
            })
        })
    }

    /// The precision of the layer, or `None` for f32.
    #[getter]
    fn policy(&self) -> Option<Numeric> {
        self.policy.clone()
    }

    fn __repr__(&self) -> String {
        format!("op.{}", self.kind.signature().0)
    }
}

/// Applies ops to operands: within the program that one of them belongs to, or at once if all are arrays.
pub(crate) fn apply(
    py: Python<'_>,
    operands: &[Operand],
    add_ops: impl FnOnce(Python<'_>, &[Value]) -> PyResult<Value>,
) -> PyResult<Py<PyAny>> {
    let state = operands.iter().find_map(|operand| match operand {
        Operand::Value(value) => Some(value.state().clone()),
        Operand::Array(_) => None,
    });
    let Some(state) = state else {
        return Ok(apply_eagerly(py, operands, add_ops)?.into_pyobject(py)?.into_any().unbind());
    };
    let mut values = Vec::new();
    for operand in operands {
        values.push(match operand {
            Operand::Value(value) => value.clone(),
            Operand::Array(_) => emit(py, &state, std::slice::from_ref(operand), |_, ids| Ok(ids[0]))?,
        });
    }
    Ok(add_ops(py, &values)?.into_pyobject(py)?.into_any().unbind())
}

/// Applies an op of two operands, the first of which is an array.
pub(crate) fn apply_binary(
    py: Python<'_>,
    opcode: Opcode,
    first: Operand,
    second: Bound<'_, PyAny>,
) -> PyResult<Py<PyAny>> {
    let second: Operand = second.extract()?;
    apply(py, &[first, second], |py, values| {
        let operands = [values[0].clone().into(), values[1].clone().into()];
        emit(py, values[0].state(), &operands, |t, ids| Ok(t.builder.add_op(opcode, ids)))
    })
}

/// Creates a linear layer: act(x · wᵀ + bias) of x [tokens, in], w [out, in] and bias [out].
#[pyfunction]
#[pyo3(signature = (*, activation=None, policy=None))]
fn linear(py: Python<'_>, activation: Option<String>, policy: Option<Numeric>) -> PyResult<Layer> {
    if let Some(name) = &activation
        && !["gelu_tanh", "silu"].contains(&name.as_str())
    {
        let diagnostic = Diagnostic::error(&T1503, format!("linear has no activation {name:?}"))
            .with_hint("use \"gelu_tanh\" or \"silu\", or call relu() on the result");
        return Err(raise_one(py, diagnostic));
    }
    Ok(Layer { kind: LayerKind::Linear { activation }, policy })
}

/// Creates a layer norm of rows, with a weight and a bias.
#[pyfunction]
#[pyo3(signature = (eps=1e-5))]
fn layer_norm(eps: f64) -> Layer {
    Layer { kind: LayerKind::LayerNorm { eps }, policy: None }
}

/// Creates an RMS norm of rows, with a weight.
#[pyfunction]
#[pyo3(signature = (eps=1e-6))]
fn rms_norm(eps: f64) -> Layer {
    Layer { kind: LayerKind::RmsNorm { eps }, policy: None }
}

/// Creates a softmax along one dim, by default the last.
#[pyfunction]
#[pyo3(signature = (dim=None))]
fn softmax(dim: Option<u64>) -> Layer {
    Layer { kind: LayerKind::Softmax { dim }, policy: None }
}

/// Creates x · sigmoid(x), element by element.
#[pyfunction]
fn silu() -> Layer {
    Layer { kind: LayerKind::Silu, policy: None }
}

/// Creates the larger of x and 0, element by element.
#[pyfunction]
fn relu() -> Layer {
    Layer { kind: LayerKind::Relu, policy: None }
}

/// Creates a lookup of table rows by ids, which are whole numbers in float32.
#[pyfunction]
fn embedding() -> Layer {
    Layer { kind: LayerKind::Embedding, policy: None }
}

/// Creates attention of q, k and v [tokens, heads · head_dim].
#[pyfunction]
#[pyo3(signature = (num_heads, head_dim, causal=false, policy=None, *, q_layout=None, k_layout=None, v_layout=None, sequences=1))]
#[allow(clippy::too_many_arguments, reason = "they are the keywords of the guide")]
fn flash_attention(
    py: Python<'_>,
    num_heads: u64,
    head_dim: u64,
    causal: bool,
    policy: Option<Numeric>,
    q_layout: Option<Spec>,
    k_layout: Option<Spec>,
    v_layout: Option<Spec>,
    sequences: u64,
) -> PyResult<Layer> {
    let refuse =
        |message: String, hint: &str| Err(raise_one(py, Diagnostic::error(&T1503, message).with_hint(hint)));
    if num_heads == 0 || head_dim == 0 || sequences == 0 {
        return refuse(
            "attention without a head, a column or a sequence".into(),
            "state sizes of at least 1",
        );
    }
    if !causal && sequences > 1 {
        return refuse(
            format!("{sequences} sequences in attention that is not causal"),
            "state causal=True, or call the layer once per sequence",
        );
    }
    let layouts = [q_layout, k_layout, v_layout];
    let attention = FlashAttention { heads: num_heads, head_dim, sequences, causal, layouts };
    Ok(Layer { kind: LayerKind::FlashAttention(Box::new(attention)), policy })
}

/// Adds the constructors of layers to the module.
pub(crate) fn add_constructors(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for function in [
        wrap_pyfunction!(numeric, module)?,
        wrap_pyfunction!(linear, module)?,
        wrap_pyfunction!(layer_norm, module)?,
        wrap_pyfunction!(rms_norm, module)?,
        wrap_pyfunction!(softmax, module)?,
        wrap_pyfunction!(silu, module)?,
        wrap_pyfunction!(relu, module)?,
        wrap_pyfunction!(embedding, module)?,
        wrap_pyfunction!(flash_attention, module)?,
    ] {
        module.add_function(function)?;
    }
    Ok(())
}
