//! `tessera.op.moe`: a mixture of experts, its router and its regularizer.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::{PyException, PyRuntimeWarning, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyEllipsis;
use tessera_base::Diagnostic;
use tessera_cli::codes::{T1503, T1507};
use tessera_ir::{Attr, Opcode, ValueId};
use tessera_mesh::Axis;
use tessera_plan::ExpertMap;

use crate::errors::{OrRaise, raise_one};
use crate::expert_tier::LayerTier;
use crate::layers::apply;
use crate::mesh::Spec;
use crate::numeric::{MAX_SEED, Numeric};
use crate::trace::{Operand, TraceState, Value, emit, lock};

/// What a gate subtracts from the logit of an expert on another rank of `ep` than the token.
const LOCALITY_PENALTY: f64 = 0.05;

/// How scores become a choice of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gate {
    name: &'static str,
    score: &'static str,
    penalizes_distance: bool,
}

const GATES: [Gate; 3] = [
    Gate { name: "topk_softmax", score: "softmax", penalizes_distance: false },
    Gate { name: "topk_sigmoid", score: "sigmoid", penalizes_distance: false },
    Gate { name: "topk_softmax_locality_penalized", score: "softmax", penalizes_distance: true },
];

/// A mixture of experts. An expert is gate, up, SiLU and down.
#[pyclass(frozen, module = "tessera.op")]
pub(crate) struct Moe {
    experts: u64,
    /// Experts per token. With a fraction, each token draws whether it has one more than the whole number.
    top_k: f64,
    /// Seed of that draw.
    seed: u64,
    capacity_factor: f64,
    gate: Gate,
    policy: Option<Numeric>,
    router: Mutex<Option<Py<PyAny>>>,
    regularizer: Mutex<Option<f64>>,
    /// Where the experts lie in the programs that are traced with this layer.
    pub(crate) tier: LayerTier,
}

/// Creates a mixture of experts.
#[pyfunction]
#[pyo3(signature = (num_experts, top_k=None, capacity_factor=1.25, gate="topk_softmax", experts_layout=None, policy=None, *, seed=0))]
pub(crate) fn moe(
    num_experts: &Bound<'_, PyAny>,
    top_k: Option<f64>,
    capacity_factor: f64,
    gate: &str,
    experts_layout: Option<Spec>,
    policy: Option<Numeric>,
    seed: u64,
) -> PyResult<Moe> {
    let py = num_experts.py();
    let refuse =
        |message: String, hint: &str| Err(raise_one(py, Diagnostic::error(&T1503, message).with_hint(hint)));
    if num_experts.is_instance_of::<PyEllipsis>() {
        return refuse(
            "op.moe(...) with three dots, which stand for arguments in a text".into(),
            "write them out, such as op.moe(num_experts=4096, top_k=2)",
        );
    }
    let experts: u64 = num_experts.extract()?;
    let Some(top_k) = top_k else {
        return Err(PyTypeError::new_err("moe() misses the argument top_k"));
    };
    if !(1.0..=experts as f64).contains(&top_k) {
        return refuse(
            format!("top_k = {top_k} of {experts} experts"),
            "choose 1 expert per token, or up to all",
        );
    }
    if seed > MAX_SEED {
        return refuse(format!("seed = {seed} is above 2^40"), "choose a smaller seed");
    }
    if !(capacity_factor.is_finite() && capacity_factor > 0.0) {
        return refuse(
            format!("capacity_factor = {capacity_factor}"),
            "state a number above 0, such as 1.25",
        );
    }
    let Some(gate) = GATES.into_iter().find(|known| known.name == gate) else {
        let names = GATES.map(|known| known.name).join(", ");
        return refuse(format!("no gate is called {gate:?}"), &format!("use one of {names}"));
    };
    let shards_experts = |spec: &Spec| {
        let pairs = spec.shards();
        let mut pairs = pairs.pairs().iter();
        pairs.all(|(dim, axis)| dim.name() == "experts" && *axis == Axis::Ep)
    };
    if experts_layout.as_ref().is_some_and(|spec| !shards_experts(spec)) {
        return refuse(
            "experts_layout shards something else than the experts over ep".into(),
            "use ShardSpec(partition=(\"experts\",), mesh_axes=(\"ep\",)), or leave it out",
        );
    }
    Ok(Moe {
        experts,
        top_k,
        seed,
        capacity_factor,
        gate,
        policy,
        router: Mutex::new(None),
        regularizer: Mutex::new(None),
        tier: LayerTier::default(),
    })
}

/// Replaces the logits of a mixture of experts by what a function makes of them.
#[pyfunction]
pub(crate) fn set_router(layer: &Moe, router: Py<PyAny>) {
    *layer.router.lock().unwrap_or_else(PoisonError::into_inner) = Some(router);
}

/// Sets the term that a training loss adds for tokens whose experts are far away; a weight of 0 removes it.
#[pyfunction]
#[pyo3(signature = (layer, kind, weight))]
pub(crate) fn set_router_regularizer(py: Python<'_>, layer: &Moe, kind: &str, weight: f64) -> PyResult<()> {
    let refuse =
        |message: String, hint: &str| Err(raise_one(py, Diagnostic::error(&T1503, message).with_hint(hint)));
    if kind != "topology_distance" {
        return refuse(format!("no regularizer is called {kind:?}"), "use \"topology_distance\"");
    }
    if !(weight.is_finite() && weight >= 0.0) {
        return refuse(format!("a regularizer of weight {weight}"), "state a number of at least 0");
    }
    *layer.regularizer.lock().unwrap_or_else(PoisonError::into_inner) = (weight > 0.0).then_some(weight);
    Ok(())
}

#[pymethods]
impl Moe {
    /// Returns Σ weight · expert(x) over the chosen experts of each token of x [tokens, d], for a router [experts, d], gate
    /// and up [experts, inner, d] and down [experts, d, inner].
    fn __call__(
        &self,
        py: Python<'_>,
        x: Operand,
        router: Operand,
        gate: Operand,
        up: Operand,
        down: Operand,
    ) -> PyResult<Py<PyAny>> {
        apply(py, &[x, router, gate, up, down], |py, values| {
            let logits = self.add_logits(py, &values[..2])?;
            let operands: Vec<Operand> =
                [&values[0], &logits].into_iter().chain(&values[2..]).cloned().map(Operand::Value).collect();
            emit(py, values[0].state(), &operands, |t, ids| {
                self.tier.state_in_program(t, &ids[2..])?;
                Ok(self.add_experts(t, ids))
            })
        })
    }

    /// Returns the experts that each token of x [tokens, d] chooses, best first, as whole numbers [tokens, top_k].
    fn route(&self, py: Python<'_>, x: Operand, router: Operand) -> PyResult<Py<PyAny>> {
        apply(py, &[x, router], |py, values| {
            let logits = self.add_logits(py, values)?;
            emit(py, values[0].state(), &[logits.into()], |t, ids| Ok(self.add_choice(t, ids[0])))
        })
    }

    /// Returns counts per expert [experts, 4] for x [tokens, d]: tokens that chose it, those of them that have a slot, 0, and those
    /// that are dropped.
    fn count_tokens(&self, py: Python<'_>, x: Operand, router: Operand) -> PyResult<Py<PyAny>> {
        apply(py, &[x, router], |py, values| {
            let logits = self.add_logits(py, values)?;
            emit(py, values[0].state(), &[logits.into()], |t, ids| {
                let chosen = self.add_choice(t, ids[0]);
                let slots = self.add_slots(t, chosen);
                t.builder.set_attr("groups", self.experts);
                let counts = t.builder.add_op(Opcode::ExpertStatistics, &[chosen, chosen, slots]);
                t.set_dims(counts, (tessera_mesh::DimName::of_weight(2).unwrap_or_default(), vec![1, 1]));
                Ok(counts)
            })
        })
    }

    /// Returns the term of the loss [1] that the regularizer adds for x [tokens, d]; it is at least 0.
    fn regularizer_loss(&self, py: Python<'_>, x: Operand, router: Operand) -> PyResult<Py<PyAny>> {
        let Some(weight) = *self.regularizer.lock().unwrap_or_else(PoisonError::into_inner) else {
            let diagnostic = Diagnostic::error(&T1503, "this mixture of experts has no regularizer")
                .with_hint(
                    "set one with op.set_router_regularizer(layer, kind=\"topology_distance\", weight=0.05)",
                );
            return Err(raise_one(py, diagnostic));
        };
        apply(py, &[x, router], |py, values| {
            let operands: Vec<Operand> = values.iter().cloned().map(Operand::Value).collect();
            emit(py, values[0].state(), &operands, |t, ids| {
                let logits = self.add_plain_logits(t, ids)?;
                let ranks = expert_ranks(t)?;
                let homes = ExpertMap::ranks_of_experts(ranks, self.experts);
                let distances = (0..ranks).flat_map(|a| (0..ranks).map(move |b| i64::from(a != b)));
                t.builder.set_attr("distances", distances.collect::<Vec<i64>>());
                t.builder.set_attr("expert_homes", to_integers(&homes)).set_attr("weight", weight);
                let loss = t.builder.add_op(Opcode::ExpertDistance, &[logits]);
                t.set_dims(loss, (tessera_mesh::DimName::of_weight(1).unwrap_or_default(), vec![1]));
                Ok(loss)
            })
        })
    }

    /// The largest number of tokens that each expert takes of so many.
    fn capacity(&self, tokens: u64) -> u64 {
        let even = self.capacity_factor * tokens as f64 * self.top_k / self.experts as f64;
        (even.ceil() as u64).clamp(1, tokens.max(1))
    }

    /// The precision of the experts, or `None` for f32.
    #[getter]
    fn policy(&self) -> Option<Numeric> {
        self.policy.clone()
    }

    fn __repr__(&self) -> String {
        format!("moe(num_experts={}, top_k={}, gate={:?})", self.experts, self.top_k, self.gate.name)
    }
}

impl Moe {
    pub(crate) fn expert_count(&self) -> u64 {
        self.experts
    }

    /// Returns the largest number of experts of a token.
    pub(crate) fn most_experts(&self) -> u64 {
        self.top_k.ceil() as u64
    }

    /// Adds the logits of x and the router, as the gate and the user's function change them.
    fn add_logits(&self, py: Python<'_>, values: &[Value]) -> PyResult<Value> {
        let state = values[0].state();
        let operands: Vec<Operand> = values.iter().cloned().map(Operand::Value).collect();
        let logits = emit(py, state, &operands, |t, ids| {
            let logits = self.add_plain_logits(t, ids)?;
            if !self.gate.penalizes_distance {
                return Ok(logits);
            }
            let ranks = expert_ranks(t)?;
            if ranks == 1 {
                return Ok(logits);
            }
            let groups = ExpertMap::ranks_of_experts(ranks, self.experts);
            t.builder.set_attr("expert_groups", to_integers(&groups));
            t.builder.set_attr("home_groups", (0..i64::from(ranks)).collect::<Vec<i64>>());
            t.builder.set_attr("weight", LOCALITY_PENALTY);
            Ok(t.builder.add_op(Opcode::ExpertLocality, &[logits]))
        })?;
        // The function runs without the lock: it may set another router.
        let router =
            self.router.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|r| r.clone_ref(py));
        let Some(router) = router else { return Ok(logits) };
        let router = router.bind(py);
        let (tokens, ranks) = {
            let mut t = lock(state);
            (t.shape_of(logits.id()).first().copied().unwrap_or(0), expert_ranks(&mut t))
        };
        let ranks = ranks.or_raise(py)?;
        let meta = RouterMeta { tokens, experts: self.experts, ranks };
        if self.gate.penalizes_distance {
            self.warn_of_two_penalties(router, &meta)?;
        }
        let changed = router.call1((logits.clone(), meta))?;
        let found = changed.get_type().name()?.to_string();
        let changed = changed.extract::<Value>().ok().filter(|value| value.id_in(state).is_some());
        changed.ok_or_else(|| {
            let message = format!("the router returned a {found}, and no value that it made of the logits");
            raise_one(py, Diagnostic::error(&T1503, message).with_hint("return logits - bias, for example"))
        })
    }

    /// Warns that a penalized gate and a router both change the logits, and says by how much together.
    fn warn_of_two_penalties(&self, router: &Bound<'_, PyAny>, meta: &RouterMeta) -> PyResult<()> {
        let py = router.py();
        let numpy = py.import("numpy")?;
        let zeros = numpy.call_method1("zeros", ((meta.tokens, meta.experts), "float32"))?;
        // What the router makes of zeros is what it adds, if it adds anything.
        let added = router.call1((zeros, meta.clone()));
        let least = added.and_then(|added| numpy.call_method1("min", (added,))?.extract::<f64>());
        let together = match least {
            Ok(least) => format!("; together they subtract up to {:.4}", LOCALITY_PENALTY - least),
            // A router may take traced values only.
            Err(e) if e.is_instance_of::<PyException>(py) => String::new(),
            Err(e) => return Err(e),
        };
        let message = format!(
            "gate {:?} subtracts {LOCALITY_PENALTY} from the logits of experts on other ranks, and set_router changes them \
             again{together}",
            self.gate.name
        );
        let message = std::ffi::CString::new(message).unwrap_or_default();
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &message, 2)
    }

    /// Adds the logits of x [tokens, d] and the router [experts, d].
    fn add_plain_logits(&self, t: &mut TraceState, ids: &[ValueId]) -> Result<ValueId, Diagnostic> {
        self.policy.iter().try_for_each(|policy| t.state_policy(policy))?;
        let router = t.shape_of(ids[1]);
        if router.first() != Some(&self.experts) {
            let message =
                format!("the router has the shape {router:?}, and there are {} experts", self.experts);
            return Err(Diagnostic::error(&T1503, message).with_hint("give the router a row for each expert"));
        }
        Ok(t.builder.add_op(Opcode::Matmul, ids))
    }

    /// Adds the experts that tokens choose by their logits.
    fn add_choice(&self, t: &mut TraceState, logits: ValueId) -> ValueId {
        let b = &mut t.builder;
        b.set_attr("top_k", self.most_experts()).set_attr("score", self.gate.score);
        let chosen = b.add_op(Opcode::TopKExperts, &[logits]);
        let keep = self.top_k.fract();
        if keep == 0.0 {
            return chosen;
        }
        b.set_attr("keep", keep).set_attr("layer", 0_u64);
        b.set_attr("seeds", to_integers(&[self.seed, 0]));
        b.add_op(Opcode::ExpertDraw, &[chosen])
    }

    /// Adds the slots that experts give to the tokens that chose them.
    fn add_slots(&self, t: &mut TraceState, chosen: ValueId) -> ValueId {
        let tokens = t.shape_of(chosen).first().copied().unwrap_or(1);
        t.builder.set_attr("capacity", self.capacity(tokens)).add_op(Opcode::ExpertSlots, &[chosen])
    }

    /// Adds the choice of experts, their matmuls and the weighted sum.
    fn add_experts(&self, t: &mut TraceState, ids: &[ValueId]) -> ValueId {
        let [x, logits, gate, up, down] = ids else { return ids[0] };
        let tokens = t.shape_of(*x).first().copied().unwrap_or(1);
        let (experts, capacity) = (self.experts, self.capacity(tokens));
        let chosen = self.add_choice(t, *logits);
        t.builder.set_attr("score", self.gate.score).set_attr("renormalise", Attr::Bool(true));
        let weights = t.builder.add_op(Opcode::ExpertWeights, &[*logits, chosen]);
        let slots = self.add_slots(t, chosen);
        let b = &mut t.builder;
        let counts = b.set_attr("groups", experts).add_op(Opcode::ExpertCounts, &[chosen, slots]);
        b.set_attr("capacity", capacity).set_attr("groups", experts);
        let packed = b.add_op(Opcode::ExpertPack, &[*x, chosen, slots]);
        let rows = tokens.saturating_mul(self.most_experts()).min(experts.saturating_mul(capacity));
        let mut multiply = |x: ValueId, w: ValueId, act: Option<&str>| {
            if let Some(act) = act {
                b.set_attr("act", act);
            }
            b.set_attr("rows", rows).add_op(Opcode::GroupedMatmul, &[x, w, counts])
        };
        let opened = multiply(packed, *gate, Some("silu"));
        let raised = multiply(packed, *up, None);
        let inner = t.builder.add_op(Opcode::Mul, &[opened, raised]);
        let y = t.builder.set_attr("rows", rows).add_op(Opcode::GroupedMatmul, &[inner, *down, counts]);
        t.builder.add_op(Opcode::ExpertCombine, &[y, chosen, slots, weights])
    }
}

/// Returns the number of ranks that share the experts. The program may contain it from then on, so it runs with no other.
///
/// # Errors
/// T1503 if no operand of the program has a mesh yet.
fn expert_ranks(t: &mut TraceState) -> Result<u32, Diagnostic> {
    t.fixed_axes.insert(Axis::Ep);
    t.mesh.as_ref().map(|mesh| mesh.mesh.axis_size(Axis::Ep)).ok_or_else(|| {
        Diagnostic::error(&T1503, "the distance to experts depends on the mesh, and no operand has one yet")
            .with_hint("state the mesh in the ArraySpec of an input")
    })
}

fn to_integers(values: &[u64]) -> Vec<i64> {
    values.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX)).collect()
}

/// What a router may know besides the logits: the ranks of tokens and of experts.
#[pyclass(frozen, from_py_object, module = "tessera.op")]
#[derive(Clone)]
pub(crate) struct RouterMeta {
    tokens: u64,
    experts: u64,
    ranks: u32,
}

#[pymethods]
impl RouterMeta {
    /// Number of tokens of a call.
    #[getter]
    fn num_tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of experts.
    #[getter]
    fn num_experts(&self) -> u64 {
        self.experts
    }

    /// The rank of `ep` that holds each expert.
    #[getter]
    fn expert_to_group(&self) -> Vec<u64> {
        ExpertMap::ranks_of_experts(self.ranks, self.experts)
    }

    /// Returns the rank of `ep` on which a token is at home. Each rank is the home of ⌈tokens / ranks⌉ consecutive tokens;
    /// the last ranks may have fewer.
    fn group_of_token(&self, token: u64) -> PyResult<u64> {
        match token < self.tokens {
            true => Ok(self.home_of(token)),
            false => Err(PyValueError::new_err(format!("token {token} of {} tokens", self.tokens))),
        }
    }

    /// Returns cost(expert, group of the token) for each token and expert, as an array [tokens, experts].
    fn apply<'py>(&self, cost: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = cost.py();
        let numpy = py.import("numpy")?;
        let mut rows: Vec<Vec<f64>> = Vec::new();
        for group in 0..u64::from(self.ranks) {
            let mut row = Vec::new();
            for expert in 0..self.experts {
                row.push(cost.call1((expert, group)).and_then(|c| c.extract::<f64>()).map_err(|e| {
                    let token = group * self.tokens.div_ceil(u64::from(self.ranks));
                    let message =
                        format!("the cost of expert {expert} for token {token} (group {group}): {e}");
                    let raised = raise_one(py, Diagnostic::error(&T1507, message));
                    raised.set_cause(py, Some(e));
                    raised
                })?);
            }
            rows.push(row);
        }
        let groups: Vec<u64> = (0..self.tokens).map(|token| self.home_of(token)).collect();
        numpy.call_method1("asarray", (rows, "float32"))?.get_item(groups)
    }
}

impl RouterMeta {
    fn home_of(&self, token: u64) -> u64 {
        token / self.tokens.div_ceil(u64::from(self.ranks)).max(1)
    }
}
