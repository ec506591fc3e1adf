//! `tessera.graph.Plan`: a sealed plan of a program.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tessera::arrays::{ArrayPlan, HostArray};
use tessera::sim::to_bundle;
use tessera_estimate::load_machine;
use tessera_ir::{CollectiveOp, CommAxis, OpByKind, Program, print};
use tessera_mesh::{Axis, AxisLayout, Layout, Rank};
use tessera_plan::Mapping;
use tessera_plan::layouts::lower_by_layouts;
use tessera_plan::video::estimate_call;

use crate::dtensor::DTensor;
use crate::errors::OrRaise;
use crate::mesh::Mesh;
use crate::planning::name_in_catalog;
use crate::program::Graph;
use crate::settings::StreamSettings;

/// A sealed plan: a verified program for each rank of a mesh.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) graph: Graph,
    pub(crate) mesh: Mesh,
    pub(crate) plan: Arc<ArrayPlan>,
}

impl Plan {
    /// Plans a program and seals the result.
    pub(crate) fn from_graph(py: Python<'_>, graph: &Graph, mesh: Option<Mesh>) -> PyResult<Plan> {
        let mesh = match (mesh, &graph.mesh) {
            (Some(mesh), Some(ours)) if mesh != *ours => {
                let message = format!(
                    "the arrays of the program lie on mesh {}, not {}; distribute them over the mesh of the plan",
                    ours.mesh, mesh.mesh
                );
                return Err(PyValueError::new_err(message));
            }
            (Some(mesh), _) => mesh,
            (None, Some(mesh)) => mesh.clone(),
            (None, None) => {
                return Err(PyValueError::new_err("no array of the program has a mesh: state mesh="));
            }
        };
        let settings = StreamSettings::current();
        let rank_map = mesh.rank_map(py)?;
        let laid_out = graph.laid_out(py)?;
        let dtype = graph.policy;
        let plan = py.detach(|| {
            let bundle =
                lower_by_layouts(std::slice::from_ref(&laid_out), &mesh.mesh, rank_map, &settings.overlap)?;
            let mapping = Mapping { mesh: mesh.mesh, dtype, ..Mapping::default() };
            ArrayPlan::with_constants(bundle, &mapping, graph.constants.clone())
        });
        Ok(Plan { graph: graph.clone(), mesh, plan: Arc::new(plan.or_raise(py)?) })
    }

    /// Returns the program of a rank.
    fn program_of(&self, rank: u32) -> Option<&Program> {
        let sealed = &self.plan.sealed;
        let phase = sealed.phase_names().first()?;
        sealed.rank_program(phase, Rank(rank)).map(|program| &**program)
    }

    /// Returns the layout in which an output leaves.
    pub(crate) fn output_layout(&self, name: &str) -> Layout {
        let layout = self.program_of(0).and_then(|program| {
            let output = program
                .ops
                .iter()
                .find(|op| op.opcode == tessera_ir::Opcode::Output && op.name.as_deref() == Some(name))?;
            Some(program.type_of(*output.operands.first()?).layout)
        });
        layout.unwrap_or_default()
    }

    /// Wraps an output of a call.
    pub(crate) fn to_dtensor(&self, name: &str, array: HostArray) -> DTensor {
        let named = self.graph.outputs.iter().find(|(output, ..)| output == name);
        let (dims, units) = named.map(|(_, dims, units)| (dims.clone(), units.clone())).unwrap_or_default();
        DTensor { array, mesh: self.mesh.clone(), layout: self.output_layout(name), dims, units }
    }
}

#[pymethods]
impl Plan {
    /// The digest that every rank compares before a call.
    #[getter]
    fn digest(&self) -> String {
        self.plan.sealed.digest_hex()
    }

    /// The mesh of the plan.
    #[getter]
    fn mesh(&self) -> Mesh {
        self.mesh.clone()
    }

    /// The program before it was sharded.
    #[getter]
    fn graph(&self) -> Graph {
        self.graph.clone()
    }

    /// Returns the program of a rank in text form: every value with its layout, every collective and every wait.
    #[pyo3(signature = (rank=0))]
    fn text(&self, rank: u32) -> PyResult<String> {
        let message = || PyValueError::new_err(format!("the plan has no rank {rank}"));
        self.program_of(rank).map(print).ok_or_else(message)
    }

    /// Returns the collectives of a rank in order: op, axis, and bytes of the operand.
    #[pyo3(signature = (rank=0))]
    fn collectives(&self, rank: u32) -> Vec<(String, String, u64)> {
        let program = self.program_of(rank);
        program.into_iter().flat_map(list_collectives).collect()
    }

    /// Returns the bytes of weights, inputs and temporaries of each rank.
    fn memory(&self) -> Vec<[u64; 3]> {
        let mesh = self.plan.sealed.mesh();
        let memory = mesh.iter().map(|rank| self.plan.sealed.rank_memory(rank).unwrap_or_default());
        memory.map(|m| [m.weights.0, m.inputs.0, m.temporaries.0]).collect()
    }

    /// Says in words what each rank does.
    fn explain(&self) -> String {
        let mesh = self.plan.sealed.mesh();
        let mut text = format!("plan {} of `{}`\n", self.digest(), self.graph.program.name);
        text += &format!("  mesh {mesh}: {} ranks, proved free of deadlocks and drift\n", mesh.mesh_size());
        for (name, layout) in &self.graph.layouts {
            text += &format!("  source {name}: {}\n", describe_layout(layout));
        }
        for (name, ..) in &self.graph.outputs {
            text += &format!("  output {name}: {}\n", describe_layout(&self.output_layout(name)));
        }
        let collectives = self.collectives(0);
        text += &format!("  rank 0 issues {} collectives\n", collectives.len());
        for (op, axis, bytes) in collectives {
            text += &format!("    {op} over {axis}, {bytes} bytes\n");
        }
        if let Some([weights, inputs, temporaries]) = self.memory().into_iter().max() {
            text += &format!(
                "  the fullest rank holds {weights} bytes of weights, {inputs} of inputs and {temporaries} of temporaries\n"
            );
        }
        text
    }

    /// Estimates a call on a machine of the catalog: nanoseconds in total, nanoseconds of collectives that no compute
    /// hides, bytes that all ranks send, and floating-point operations of all ranks.
    #[pyo3(signature = (cluster="laptop"))]
    fn estimate(&self, py: Python<'_>, cluster: &str) -> PyResult<(f64, f64, f64, f64)> {
        let sealed = &self.plan.sealed;
        let machine =
            load_machine(name_in_catalog(cluster), None, Some(sealed.mesh().mesh_size())).or_raise(py)?;
        let phases = sealed.phase_names().to_vec();
        let call = phases.first().cloned().unwrap_or_default();
        let estimate = py.detach(|| estimate_call(&to_bundle(sealed), &call, &phases, &machine, false));
        let estimate = estimate.or_raise(py)?;
        Ok((estimate.ns, estimate.exposed_ns(), estimate.sent_bytes.iter().sum(), estimate.flops))
    }

    /// Says in words what each rank does, and how long a call takes on a machine of the catalog.
    #[pyo3(signature = (cluster="laptop"))]
    fn report(&self, py: Python<'_>, cluster: &str) -> PyResult<String> {
        let (ns, exposed, bytes, flops) = self.estimate(py, cluster)?;
        Ok(format!(
            "{}  estimate of a call on {cluster}: {:.1} us, of which {:.1} us wait for collectives; {:.0} bytes travel, {flops:.3e} \
             operations\n",
            self.explain(),
            ns / 1e3,
            exposed / 1e3,
            bytes
        ))
    }

    /// Proves the plan again from its programs alone, and returns its digest.
    fn verify(&self, py: Python<'_>) -> PyResult<String> {
        let graph = &self.graph;
        let again = Plan::from_graph(py, graph, Some(self.mesh.clone()))?;
        Ok(again.digest())
    }

    /// Writes the plan to a new folder, which `tessera check` and `Plan.load` read.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        self.plan.write(&folder).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("Plan({}, mesh {}, digest {})", self.graph.program.name, self.mesh.mesh, &self.digest()[..12])
    }
}

/// Returns the collectives of a program in order: op, axis, and bytes of the operand.
fn list_collectives(program: &Program) -> Vec<(String, String, u64)> {
    let collectives = program.collective_ops().map(|(_, op)| {
        let bytes = op.operands.first().map_or(0, |v| program.type_of(*v).byte_size().0);
        let axis = match op.view().as_ref().map(tessera_ir::OpView::by_kind) {
            Ok(OpByKind::Collective(collective)) => axis_name(&collective),
            _ => String::new(),
        };
        (op.opcode.name().to_string(), axis, bytes)
    });
    collectives.collect()
}

fn axis_name(collective: &CollectiveOp<'_>) -> String {
    let axis = match collective {
        CollectiveOp::AllReduce(v) => v.axis,
        CollectiveOp::AllGather(v) => v.axis,
        CollectiveOp::ReduceScatter(v) => v.axis,
        CollectiveOp::AllToAll(v) => v.axis,
        CollectiveOp::HaloExchange(v) => v.axis,
        CollectiveOp::Broadcast(v) => v.axis,
        CollectiveOp::Send(v) => v.axis,
        CollectiveOp::Recv(v) => v.axis,
    };
    match axis {
        CommAxis::Axis(axis) => axis.name().to_string(),
        CommAxis::World => "world".to_string(),
    }
}

fn describe_layout(layout: &Layout) -> String {
    let on_axes = Axis::ALL.into_iter().filter_map(|axis| match layout.on_axis(axis) {
        AxisLayout::Replicated => None,
        AxisLayout::Shard(shard) => Some(format!("dim {} over {axis}", shard.dim)),
        AxisLayout::Partial { .. } => Some(format!("partial over {axis}")),
    });
    let sharded: Vec<String> = on_axes.collect();
    if sharded.is_empty() { "replicated".to_string() } else { sharded.join(", ") }
}
