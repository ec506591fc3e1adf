//! `tessera.graph.Plan`: a sealed plan of a program.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tessera::arrays::{ArrayPlan, ArrayValues, HostArray};
use tessera::sim::to_bundle;
use tessera_base::Diagnostics;
use tessera_estimate::load_machine;
use tessera_ir::{Bundle, CollectiveOp, CommAxis, Op, OpByKind, Program, print};
use tessera_mesh::{Axis, AxisLayout, Layout, Rank, RankMap};
use tessera_plan::layouts::{LaidOutProgram, StreamOverlap, lower_by_layouts, lower_mesh_invariant};
use tessera_plan::video::estimate_call;
use tessera_plan::{DtypePolicy, Mapping, Numerics};

use crate::dtensor::DTensor;
use crate::errors::OrRaise;
use crate::mesh::Mesh;
use crate::planning::name_in_catalog;
use crate::program::Graph;
use crate::settings::StreamSettings;

/// A sealed plan: verified programs for each rank of a mesh.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Plan {
    /// The programs before they were sharded; at least one.
    pub(crate) graphs: Arc<[Graph]>,
    pub(crate) mesh: Mesh,
    pub(crate) plan: Arc<ArrayPlan>,
    /// The settings of streams with which the plan was made.
    pub(crate) settings: StreamSettings,
}

type LowerPrograms =
    fn(&[LaidOutProgram], &tessera_mesh::Mesh, RankMap, &StreamOverlap) -> Result<Bundle, Diagnostics>;

/// Plans several programs for one run, whose ranks load all of them.
#[pyfunction]
#[pyo3(signature = (*graphs, mesh=None))]
pub(crate) fn compile(py: Python<'_>, graphs: Vec<Graph>, mesh: Option<Mesh>) -> PyResult<Plan> {
    Plan::from_graphs(py, graphs, mesh)
}

impl Plan {
    /// Plans programs and seals the result.
    pub(crate) fn from_graphs(py: Python<'_>, graphs: Vec<Graph>, mesh: Option<Mesh>) -> PyResult<Plan> {
        Plan::with_settings(py, graphs, mesh, StreamSettings::current())
    }

    fn with_settings(
        py: Python<'_>,
        graphs: Vec<Graph>,
        mesh: Option<Mesh>,
        settings: StreamSettings,
    ) -> PyResult<Plan> {
        let mesh = choose_mesh(&graphs, mesh)?;
        let rank_map = mesh.rank_map(py)?;
        let laid_out = graphs.iter().map(|graph| graph.laid_out(py)).collect::<PyResult<Vec<_>>>()?;
        let mut dtypes = graphs.iter().map(|graph| graph.policy);
        let dtype = dtypes.next().unwrap_or(DtypePolicy::F32);
        if dtypes.any(|other| other != dtype) {
            return Err(PyValueError::new_err("the programs of a plan state one precision"));
        }
        let constants = graphs.iter().flat_map(|graph| graph.constants.clone()).collect();
        let plan = py.detach(|| {
            let (lower, numerics): (LowerPrograms, _) =
                match graphs.iter().any(|graph| graph.is_deterministic) {
                    true => (lower_mesh_invariant, Numerics::MeshInvariant),
                    false => (lower_by_layouts, Numerics::Standard),
                };
            let bundle = lower(&laid_out, &mesh.mesh, rank_map, &settings.overlap)?;
            let mapping = Mapping { mesh: mesh.mesh, dtype, numerics, ..Mapping::default() };
            ArrayPlan::with_constants(bundle, &mapping, constants)
        });
        Ok(Plan { graphs: graphs.into(), mesh, plan: Arc::new(plan.or_raise(py)?), settings })
    }

    /// Returns a program by its name; without one, the only program.
    pub(crate) fn find_graph(&self, name: Option<&str>) -> PyResult<&Graph> {
        let names = || self.graphs.iter().map(|g| g.program.name.as_str()).collect::<Vec<_>>().join(", ");
        match (name, &self.graphs[..]) {
            (None, [only]) => Ok(only),
            (None, _) => {
                Err(PyValueError::new_err(format!("the plan has the programs {}: name one", names())))
            }
            (Some(name), graphs) => graphs.iter().find(|g| g.program.name == name).ok_or_else(|| {
                PyValueError::new_err(format!("the plan has no program {name:?}; it has {}", names()))
            }),
        }
    }

    /// Returns a program of a rank.
    pub(crate) fn program_of(&self, graph: &Graph, rank: u32) -> Option<&Program> {
        let phase = format!("array.{}", graph.program.name);
        self.plan.sealed.rank_program(&phase, Rank(rank)).map(|program| &**program)
    }

    /// Returns the layout in which an output leaves.
    fn output_layout(&self, graph: &Graph, name: &str) -> Layout {
        let layout = self.program_of(graph, 0).and_then(|program| {
            let is_named =
                |op: &&Op| op.opcode == tessera_ir::Opcode::Output && op.name.as_deref() == Some(name);
            let output = program.ops.iter().find(is_named)?;
            Some(program.type_of(*output.operands.first()?).layout)
        });
        layout.unwrap_or_default()
    }

    /// Returns the numbers of the streams when the plan was made, by name.
    pub(crate) fn stream_ids(&self) -> BTreeMap<String, u32> {
        self.settings.ids.clone()
    }

    /// Returns every weight of the plan.
    pub(crate) fn weights(&self) -> BTreeMap<String, HostArray> {
        self.graphs.iter().flat_map(|graph| graph.weights.clone()).collect()
    }

    /// Wraps an output of a call.
    pub(crate) fn to_dtensor(&self, graph: &Graph, name: &str, values: ArrayValues) -> DTensor {
        let named = graph.outputs.iter().find(|(output, ..)| output == name);
        let (dims, units) = named.map(|(_, dims, units)| (dims.clone(), units.clone())).unwrap_or_default();
        DTensor { values, mesh: self.mesh.clone(), layout: self.output_layout(graph, name), dims, units }
    }

    fn explain_program(&self, graph: &Graph) -> String {
        let mut text = format!("  program `{}`\n", graph.program.name);
        for (name, layout) in &graph.layouts {
            text += &format!("    source {name}: {}\n", describe_layout(layout));
        }
        for (name, ..) in &graph.outputs {
            text += &format!("    output {name}: {}\n", describe_layout(&self.output_layout(graph, name)));
        }
        let collectives: Vec<_> = self.program_of(graph, 0).into_iter().flat_map(list_collectives).collect();
        let count = collectives.len();
        text += &format!("    rank 0 issues {count} collective{}\n", if count == 1 { "" } else { "s" });
        for (op, axis, bytes) in collectives {
            text += &format!("      {op} over {axis}, {bytes} bytes\n");
        }
        text
    }
}

/// Returns the mesh of a plan: the one that is stated, or that of the arrays.
fn choose_mesh(graphs: &[Graph], stated: Option<Mesh>) -> PyResult<Mesh> {
    if graphs.is_empty() {
        return Err(PyValueError::new_err("a plan needs a program"));
    }
    let mut meshes = graphs.iter().filter_map(|graph| graph.mesh.clone());
    let Some(mesh) = stated.or_else(|| meshes.next()) else {
        return Err(PyValueError::new_err("no array of the program has a mesh: state mesh="));
    };
    match graphs.iter().filter_map(|graph| graph.mesh.as_ref()).find(|ours| !ours.is_same(&mesh)) {
        None => Ok(mesh),
        Some(ours) => Err(PyValueError::new_err(format!(
            "the arrays of the program lie on mesh {}, not {}; distribute them over the mesh of the plan",
            ours.describe(),
            mesh.describe()
        ))),
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

    /// The numbers of the streams when the plan was made, by name.
    #[getter(stream_ids)]
    fn py_stream_ids(&self) -> BTreeMap<String, u32> {
        self.stream_ids()
    }

    /// The programs before they were sharded.
    #[getter]
    fn graphs(&self) -> Vec<Graph> {
        self.graphs.to_vec()
    }

    /// Returns a program of a rank in text form: every value with its layout, every collective and every wait. Without a
    /// name it is the only program.
    #[pyo3(signature = (rank=0, program=None))]
    fn text(&self, rank: u32, program: Option<&str>) -> PyResult<String> {
        let message = || PyValueError::new_err(format!("the plan has no rank {rank}"));
        self.program_of(self.find_graph(program)?, rank).map(print).ok_or_else(message)
    }

    /// Returns the collectives of a rank in order: op, axis, and bytes of the operand.
    #[pyo3(signature = (rank=0, program=None))]
    fn collectives(&self, rank: u32, program: Option<&str>) -> PyResult<Vec<(String, String, u64)>> {
        let message = || PyValueError::new_err(format!("the plan has no rank {rank}"));
        let program = self.program_of(self.find_graph(program)?, rank).ok_or_else(message)?;
        Ok(list_collectives(program))
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
        let mut text = format!("plan {}\n  mesh {mesh}: {} ranks", self.digest(), mesh.mesh_size());
        text += ", proved free of deadlocks and drift\n";
        self.graphs.iter().for_each(|graph| text += &self.explain_program(graph));
        if let Some([weights, inputs, temporaries]) = self.memory().into_iter().max() {
            text += &format!(
                "  the fullest rank holds {weights} bytes of weights, {inputs} of inputs and {temporaries} of temporaries\n"
            );
        }
        text
    }

    /// Estimates a call of every program on a machine of the catalog: nanoseconds in total, nanoseconds of collectives that no compute
    /// hides, bytes that all ranks send, and floating-point operations of all ranks.
    #[pyo3(signature = (cluster="laptop"))]
    fn estimate(&self, py: Python<'_>, cluster: &str) -> PyResult<(f64, f64, f64, f64)> {
        self.plan.check_one_tier().or_raise(py)?;
        let sealed = &self.plan.sealed;
        let machine =
            load_machine(name_in_catalog(cluster), None, Some(sealed.mesh().mesh_size())).or_raise(py)?;
        let phases = sealed.phase_names().to_vec();
        let call = "every program";
        let estimate = py.detach(|| estimate_call(&to_bundle(sealed), call, &phases, &machine, false));
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

    /// Plans and proves the programs again, under the settings with which the plan was made, and returns the digest.
    fn verify(&self, py: Python<'_>) -> PyResult<String> {
        let (graphs, settings) = (self.graphs.to_vec(), self.settings.clone());
        Ok(Plan::with_settings(py, graphs, Some(self.mesh.clone()), settings)?.digest())
    }

    /// Writes the plan to a new folder, which `tessera check` proves again. Weights are not part of a plan.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        self.plan.write(&folder).or_raise(py)
    }

    pub(crate) fn __repr__(&self) -> String {
        let names: Vec<&str> = self.graphs.iter().map(|graph| graph.program.name.as_str()).collect();
        format!("Plan({}, mesh {}, digest {})", names.join(", "), self.mesh.mesh, &self.digest()[..12])
    }
}

#[pymethods]
impl Graph {
    /// Shards the program over a mesh, and proves that its ranks can neither hang nor drift.
    #[pyo3(signature = (mesh=None))]
    fn compile(&self, py: Python<'_>, mesh: Option<Mesh>) -> PyResult<Plan> {
        Plan::from_graphs(py, vec![self.clone()], mesh)
    }
}

/// Returns the collectives of a program in order: op, axis, and bytes of the operand.
pub(crate) fn list_collectives(program: &Program) -> Vec<(String, String, u64)> {
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
