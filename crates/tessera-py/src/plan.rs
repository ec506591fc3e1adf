//! `tessera.graph.Plan`: a sealed plan of a program.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tessera::arrays::{ArrayPlan, ArrayValues, HostArray, lower_functions};
use tessera::sim::to_bundle;
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cli::codes::T1508;
use tessera_estimate::{ArrayCost, check_fit, estimate_arrays};
use tessera_ir::{CollectiveOp, CommAxis, OpByKind, Opcode, Program, print};
use tessera_mesh::{Axis, AxisLayout, Layout};
use tessera_plan::{DtypePolicy, Mapping, Numerics};

use crate::dtensor::DTensor;
use crate::errors::{OrRaise, raise_one};
use crate::mesh::Mesh;
use crate::plan_estimate::PlanEstimate;
use crate::plan_target::{Target, TargetRequest, choose_machine, choose_target, parse_sizes};
use crate::program::Graph;
use crate::settings::StreamSettings;
use crate::signature::{Signature, find_program};

/// A sealed plan: verified programs for each rank of a mesh.
#[pyclass(frozen, from_py_object, module = "tessera.graph")]
#[derive(Clone)]
pub(crate) struct Plan {
    /// The functions from which the plan was made; none if it was read from a folder.
    graphs: Arc<[Graph]>,
    pub(crate) signatures: Arc<[Signature]>,
    /// The weights of a plan that was read from a folder; those of others belong to their functions.
    loaded_weights: Arc<BTreeMap<String, HostArray>>,
    pub(crate) mesh: Mesh,
    pub(crate) plan: Arc<ArrayPlan>,
    /// The settings of streams with which the plan was made.
    pub(crate) settings: StreamSettings,
    target: Option<Arc<Target>>,
}

/// Plans several programs for one run, whose ranks load all of them.
#[pyfunction]
#[pyo3(signature = (*graphs, mesh=None, cluster=None, objective=None, devices=None, hosts=Vec::new()))]
pub(crate) fn compile(
    py: Python<'_>,
    graphs: Vec<Graph>,
    mesh: Option<Mesh>,
    cluster: Option<String>,
    objective: Option<String>,
    devices: Option<u32>,
    hosts: Vec<u32>,
) -> PyResult<Plan> {
    Plan::with_target(py, graphs, TargetRequest { mesh, cluster, objective, devices, hosts })
}

impl Plan {
    /// Plans programs for the mesh of their arrays and seals the result.
    pub(crate) fn from_graphs(py: Python<'_>, graphs: Vec<Graph>) -> PyResult<Plan> {
        Plan::with_target(py, graphs, TargetRequest::default())
    }

    fn with_target(py: Python<'_>, graphs: Vec<Graph>, request: TargetRequest) -> PyResult<Plan> {
        let settings = StreamSettings::current();
        let (mesh, target) = choose_target(py, &graphs, &request, &settings.overlap)?;
        let rank_map = mesh.rank_map(py)?;
        let mut dtypes = graphs.iter().map(|graph| graph.function.dtype);
        let dtype = dtypes.next().unwrap_or(DtypePolicy::F32);
        if dtypes.any(|other| other != dtype) {
            return Err(PyValueError::new_err("the programs of a plan state one precision"));
        }
        let constants = graphs.iter().flat_map(|graph| graph.function.constants.clone()).collect();
        let plan = py.detach(|| {
            let functions = graphs.iter().map(|graph| &*graph.function);
            let numerics = match functions.clone().any(|function| function.is_deterministic) {
                true => Numerics::MeshInvariant,
                false => Numerics::Standard,
            };
            let bundle = lower_functions(functions, &mesh.mesh, rank_map, &settings.overlap)?;
            if let Some(target) = &target {
                check_fit(&bundle, &target.query.machine)?;
            }
            let hosts = request.hosts;
            let mapping = Mapping { mesh: mesh.mesh, dtype, numerics, hosts, ..Mapping::default() };
            let inconsistent = mapping.check_consistency();
            if !inconsistent.is_empty() {
                return Err(inconsistent);
            }
            ArrayPlan::with_constants(bundle, &mapping, constants)
        });
        Ok(Plan {
            signatures: graphs.iter().map(|graph| Signature::from_function(&graph.function)).collect(),
            graphs: graphs.into(),
            loaded_weights: Arc::default(),
            mesh,
            plan: Arc::new(plan.or_raise(py)?),
            settings,
            target: target.map(Arc::new),
        })
    }

    /// Wraps a plan that was read from a folder, with its weights. Its streams have the numbers of the settings of now.
    pub(crate) fn from_sealed(plan: Arc<ArrayPlan>, weights: BTreeMap<String, HostArray>) -> Plan {
        Plan {
            graphs: Arc::default(),
            signatures: Signature::list_of_plan(&plan).into(),
            loaded_weights: Arc::new(weights),
            mesh: Mesh::from_plan(&plan),
            plan,
            settings: StreamSettings::current(),
            target: None,
        }
    }

    /// Returns a program by its name; without one, the only program.
    pub(crate) fn find_program(&self, name: Option<&str>) -> PyResult<&Signature> {
        let names = || self.signatures.iter().map(|s| s.name.as_str()).collect::<Vec<_>>().join(", ");
        match (name, &self.signatures[..]) {
            (None, [only]) => Ok(only),
            (None, _) => {
                Err(PyValueError::new_err(format!("the plan has the programs {}: name one", names())))
            }
            (Some(name), signatures) => signatures.iter().find(|s| s.name == name).ok_or_else(|| {
                PyValueError::new_err(format!("the plan has no program {name:?}; it has {}", names()))
            }),
        }
    }

    /// Returns a program of a rank.
    pub(crate) fn program_of(&self, signature: &Signature, rank: u32) -> Option<&Program> {
        find_program(&self.plan, &signature.name, rank)
    }

    /// Returns the arrays of a kind that a program of rank 0 names, each with its layout.
    fn list_layouts(&self, signature: &Signature, opcodes: &[Opcode]) -> Vec<(String, Layout)> {
        let program = self.program_of(signature, 0);
        let ops = program.into_iter().flat_map(|program| program.ops.iter().map(move |op| (program, op)));
        let named = ops.filter(|(_, op)| opcodes.contains(&op.opcode)).filter_map(|(program, op)| {
            let value = op.results.first().or(op.operands.first())?;
            Some((op.name.clone()?, program.type_of(*value).layout))
        });
        named.collect()
    }

    /// Returns the layout in which an output leaves.
    fn output_layout(&self, signature: &Signature, name: &str) -> Layout {
        let outputs = self.list_layouts(signature, &[Opcode::Output]);
        outputs.into_iter().find(|(output, _)| output == name).map(|(_, layout)| layout).unwrap_or_default()
    }

    /// Returns the numbers of the streams when the plan was made, by name.
    pub(crate) fn stream_ids(&self) -> BTreeMap<String, u32> {
        self.settings.ids.clone()
    }

    /// Returns every weight of the plan that is known.
    pub(crate) fn weights(&self) -> BTreeMap<String, HostArray> {
        let captured = self.graphs.iter().flat_map(|graph| graph.weights.clone());
        captured
            .chain(self.loaded_weights.iter().map(|(name, array)| (name.clone(), array.clone())))
            .collect()
    }

    /// Wraps an output of a call.
    pub(crate) fn to_dtensor(&self, signature: &Signature, name: &str, values: ArrayValues) -> DTensor {
        let named = signature.outputs.iter().find(|output| output.name == name);
        let (dims, units) = named.map(|o| (o.dims.clone(), o.units.clone())).unwrap_or_default();
        DTensor { values, mesh: self.mesh.clone(), layout: self.output_layout(signature, name), dims, units }
    }

    fn explain_program(&self, signature: &Signature) -> String {
        let mut text = format!("  program `{}`\n", signature.name);
        for (name, layout) in self.list_layouts(signature, &[Opcode::Input, Opcode::Weight]) {
            text += &format!("    source {name}: {}\n", describe_layout(&layout));
        }
        for (name, layout) in self.list_layouts(signature, &[Opcode::Output]) {
            text += &format!("    output {name}: {}\n", describe_layout(&layout));
        }
        let collectives: Vec<_> =
            self.program_of(signature, 0).into_iter().flat_map(list_collectives).collect();
        let count = collectives.len();
        text += &format!("    rank 0 issues {count} collective{}\n", if count == 1 { "" } else { "s" });
        for (op, axis, bytes) in collectives {
            text += &format!("      {op} over {axis}, {bytes} bytes\n");
        }
        text
    }

    /// Estimates a call of every program on a machine, and returns it with the machine's name.
    fn estimate_on(&self, cluster: Option<&str>) -> Result<(String, ArrayCost), Diagnostics> {
        let bundle = to_bundle(&self.plan.sealed);
        let (name, machine) = choose_machine(self.target.as_deref(), cluster, &bundle)?;
        Ok((name, estimate_arrays(&bundle, &machine)?))
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

    /// The path between the ranks of each group, by the name of the group; none unless the plan states hosts.
    #[getter]
    fn group_paths(&self) -> BTreeMap<String, String> {
        let groups = self.plan.sealed.hosts().into_iter().flat_map(|stated| &stated.groups);
        groups.map(|group| (group.communicator.to_string(), group.path.name().to_string())).collect()
    }

    /// The numbers of the streams when the plan was made, by name.
    #[getter(stream_ids)]
    fn py_stream_ids(&self) -> BTreeMap<String, u32> {
        self.stream_ids()
    }

    /// The programs before they were sharded; none for a plan that was read from a folder.
    #[getter]
    fn graphs(&self) -> Vec<Graph> {
        self.graphs.to_vec()
    }

    /// Returns a program of a rank in text form: every value with its layout, every collective and every wait. Without a
    /// name it is the only program.
    #[pyo3(signature = (rank=0, program=None))]
    fn text(&self, rank: u32, program: Option<&str>) -> PyResult<String> {
        let message = || PyValueError::new_err(format!("the plan has no rank {rank}"));
        self.program_of(self.find_program(program)?, rank).map(print).ok_or_else(message)
    }

    /// Returns the collectives of a rank in order: op, axis, and bytes of the operand.
    #[pyo3(signature = (rank=0, program=None))]
    fn collectives(&self, rank: u32, program: Option<&str>) -> PyResult<Vec<(String, String, u64)>> {
        let message = || PyValueError::new_err(format!("the plan has no rank {rank}"));
        let program = self.program_of(self.find_program(program)?, rank).ok_or_else(message)?;
        Ok(list_collectives(program))
    }

    /// Returns the bytes of weights, inputs and temporaries of each rank.
    fn memory(&self) -> Vec<[u64; 3]> {
        let mesh = self.plan.sealed.mesh();
        let memory = mesh.iter().map(|rank| self.plan.sealed.rank_memory(rank).unwrap_or_default());
        memory.map(|m| [m.weights.0, m.inputs.0, m.temporaries.0]).collect()
    }

    /// Returns the names and whole shapes of the weights.
    #[getter]
    fn weight_shapes(&self) -> BTreeMap<String, Vec<u64>> {
        self.plan.weights().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
    }

    /// Says in words what each rank does, and why the plan has this mesh if an objective was stated.
    fn explain(&self) -> String {
        let mesh = self.plan.sealed.mesh();
        let mut text = format!("plan {}\n  mesh {mesh}: {} ranks", self.digest(), mesh.mesh_size());
        text += ", proved free of deadlocks and drift\n";
        self.signatures.iter().for_each(|signature| text += &self.explain_program(signature));
        if let Some([weights, inputs, temporaries]) = self.memory().into_iter().max() {
            text += &format!(
                "  the fullest rank holds {weights} bytes of weights, {inputs} of inputs and {temporaries} of temporaries\n"
            );
        }
        if let Some(target) = &self.target
            && let Some(search) = &target.search
        {
            text += &target.query.describe_search(search, mesh);
        }
        text
    }

    /// Says what the sizes of a mesh would cost, or which constraints they break: `why(tp=12, ep=6)`. Axes without a size
    /// have one rank.
    #[pyo3(signature = (**sizes))]
    fn why(&self, py: Python<'_>, sizes: Option<BTreeMap<String, u32>>) -> PyResult<String> {
        let Some(target) = &self.target else {
            let message = "the plan was made for no machine, so no mesh can be compared";
            let hint = "compile with cluster=, such as cluster=\"gb200-nvl72\"";
            return Err(raise_one(py, Diagnostic::error(&T1508, message).with_hint(hint)));
        };
        let sizes = parse_sizes(sizes.unwrap_or_default()).or_raise(py)?;
        py.detach(|| target.query.explain_mesh(&self.mesh.mesh, &sizes)).or_raise(py)
    }

    /// Estimates a call of every program on a machine of the catalog. Without a name it is the machine of the plan, or else a
    /// laptop.
    #[pyo3(signature = (cluster=None))]
    fn estimate(&self, py: Python<'_>, cluster: Option<&str>) -> PyResult<PlanEstimate> {
        let (_, cost) = py.detach(|| self.estimate_on(cluster)).or_raise(py)?;
        Ok(cost.into())
    }

    /// Says in words what each rank does, and how long a call takes on a machine of the catalog.
    #[pyo3(signature = (cluster=None))]
    fn report(&self, py: Python<'_>, cluster: Option<&str>) -> PyResult<String> {
        let (name, cost) = py.detach(|| self.estimate_on(cluster)).or_raise(py)?;
        let mut text = format!(
            "{}  estimate of a call on {name}: {:.1} us, of which {:.1} us wait for collectives; {:.0} bytes travel, {:.3e} \
             operations\n",
            self.explain(),
            cost.ns / 1e3,
            cost.exposed_ns / 1e3,
            cost.sent_bytes,
            cost.flops
        );
        if cost.fetched_bytes > 0.0 {
            text += &format!(
                "    of the time, {:.1} us wait for experts: a rank fetches {:.0} bytes from host memory\n",
                cost.fetch_wait_ns / 1e3,
                cost.fetched_bytes
            );
        }
        Ok(text)
    }

    /// Runs the verifier over the programs again, and returns what it proves, a sentence for each property.
    fn verify(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let proved = py.detach(|| self.plan.verify_again()).or_raise(py)?;
        Ok(proved.iter().map(ToString::to_string).collect())
    }

    /// Returns the digest, and the parts that it covers by name. Two plans have one digest if these are equal.
    fn seal(&self) -> (String, BTreeMap<String, String>) {
        (self.digest(), self.plan.sealed.covered_parts().into_iter().collect())
    }

    /// Writes the plan to a new folder, which `tessera check` proves again. Weights are not part of a plan.
    fn save(&self, py: Python<'_>, folder: PathBuf) -> PyResult<()> {
        self.plan.write(&folder).or_raise(py)
    }

    pub(crate) fn __repr__(&self) -> String {
        let names: Vec<&str> = self.signatures.iter().map(|signature| signature.name.as_str()).collect();
        format!("Plan({}, mesh {}, digest {})", names.join(", "), self.mesh.mesh, &self.digest()[..12])
    }
}

#[pymethods]
impl Graph {
    /// Shards the program over a mesh, and proves that its ranks can neither hang nor drift. Without a mesh it is that of
    /// the arrays, or, with an objective, the best one of a machine.
    #[pyo3(signature = (mesh=None, cluster=None, objective=None, devices=None, hosts=Vec::new()))]
    fn compile(
        &self,
        py: Python<'_>,
        mesh: Option<Mesh>,
        cluster: Option<String>,
        objective: Option<String>,
        devices: Option<u32>,
        hosts: Vec<u32>,
    ) -> PyResult<Plan> {
        let request = TargetRequest { mesh, cluster, objective, devices, hosts };
        Plan::with_target(py, vec![self.clone()], request)
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
