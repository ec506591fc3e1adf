//! The mesh and the machine of a plan: which mesh a program is planned for, and what a machine says about it.

use std::collections::{BTreeMap, BTreeSet};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tessera::arrays::{ArrayFunction, DeviceMesh};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cli::codes::{T1508, T1510};
use tessera_estimate::{ArrayQuery, ArraySearch, MachineModel, Objective, load_machine};
use tessera_ir::Bundle;
use tessera_mesh::{Axis, Mesh as Sizes, RankMap};
use tessera_plan::layouts::StreamOverlap;

use crate::errors::OrRaise;
use crate::mesh::Mesh;
use crate::planning::{name_in_catalog, parse_objective};
use crate::program::Graph;

/// The machine of an estimate that names none.
const DEFAULT_MACHINE: &str = "laptop";

/// What a caller states about the machine of a plan.
#[derive(Debug, Clone, Default)]
pub(crate) struct TargetRequest {
    pub(crate) mesh: Option<Mesh>,
    pub(crate) cluster: Option<String>,
    pub(crate) objective: Option<String>,
    pub(crate) devices: Option<u32>,
    /// Ranks of each host, in rank order; empty if none are stated.
    pub(crate) hosts: Vec<u32>,
}

/// The machine for which a plan was made.
#[derive(Debug)]
pub(crate) struct Target {
    /// The machine as the user named it.
    pub(crate) name: String,
    pub(crate) query: ArrayQuery,
    /// The meshes that were compared, if an objective was stated.
    pub(crate) search: Option<ArraySearch>,
}

/// Decides on which mesh functions are planned, and for which machine.
pub(crate) fn choose_target(
    py: Python<'_>,
    graphs: &[Graph],
    request: &TargetRequest,
    overlap: &StreamOverlap,
) -> PyResult<(Mesh, Option<Target>)> {
    let TargetRequest { mesh: stated, cluster, objective, devices, .. } = request.clone();
    if graphs.is_empty() {
        return Err(PyValueError::new_err("a plan needs a program"));
    }
    let objective = objective.map(|name| parse_objective(&name)).transpose().or_raise(py)?;
    check_request(cluster.is_some(), objective.is_some(), devices.is_some() && stated.is_some())
        .or_raise(py)?;
    if let Some(mesh) = &stated {
        graphs.iter().try_for_each(|graph| check_axes(graph, mesh)).or_raise(py)?;
    }
    let fixed = match (&stated, objective) {
        (Some(mesh), _) => Some(mesh.clone()),
        (None, Some(_)) => None,
        (None, None) => Some(find_common_mesh(graphs)?),
    };
    let Some(cluster) = cluster else {
        return fixed
            .map(|mesh| (mesh, None))
            .ok_or_else(|| PyValueError::new_err("a search needs a cluster"));
    };
    let machine = load_machine(name_in_catalog(&cluster), None, None).or_raise(py)?;
    let all = machine.cluster.device_count();
    let query = ArrayQuery {
        functions: graphs.iter().map(|graph| ArrayFunction::clone(&graph.function)).collect(),
        axes: list_axes(graphs, fixed.as_ref()),
        devices: fixed.as_ref().map_or(devices.unwrap_or(all), |mesh| mesh.mesh.mesh_size()),
        machine,
        objective: objective.unwrap_or(Objective::Latency),
        overlap: overlap.clone(),
    };
    // A stated mesh is planned as it is, also if the search finds no legal one: the plan then says why.
    let search = match (&fixed, objective) {
        (_, None) => None,
        (Some(_), Some(_)) => py.detach(|| query.search_meshes()).ok(),
        (None, Some(_)) => Some(py.detach(|| query.search_meshes()).or_raise(py)?),
    };
    let best = search.as_ref().and_then(|search| search.legal.first()).map(|cost| cost.mesh);
    let chosen = fixed.or_else(|| best.map(|mesh| name_mesh(&query.axes, mesh)));
    let Some(chosen) = chosen else { return Err(PyValueError::new_err("the search found no mesh")) };
    Ok((chosen, Some(Target { name: cluster, query, search })))
}

/// Wraps sizes of axes that no user named with their devices.
pub(crate) fn name_mesh(axes: &[Axis], mesh: Sizes) -> Mesh {
    let devices = RankMap::from_device_kind(&mesh, "rank").devices().to_vec();
    Mesh::from_device_mesh(DeviceMesh { axes: axes.to_vec(), mesh, devices })
}

/// Loads the machine of an estimate: one that is stated, that of the plan, or a default with enough racks for the ranks.
pub(crate) fn choose_machine(
    target: Option<&Target>,
    stated: Option<&str>,
    bundle: &Bundle,
) -> Result<(String, MachineModel), Diagnostics> {
    match (stated, target) {
        (None, Some(target)) => Ok((target.name.clone(), target.query.machine.clone())),
        _ => {
            let name = stated.unwrap_or(DEFAULT_MACHINE);
            let machine = load_machine(name_in_catalog(name), None, Some(bundle.mesh.mesh_size()))?;
            Ok((name.to_string(), machine))
        }
    }
}

/// Parses sizes of axes, such as `tp=12, ep=6`.
pub(crate) fn parse_sizes(sizes: BTreeMap<String, u32>) -> Result<BTreeMap<Axis, u32>, Diagnostic> {
    sizes.into_iter().map(|(name, size)| Ok((name.parse::<Axis>().map_err(|d| *d)?, size))).collect()
}

/// Checks that the parts of a request fit together.
///
/// # Errors
/// T1508.
fn check_request(
    has_cluster: bool,
    has_objective: bool,
    has_mesh_and_devices: bool,
) -> Result<(), Diagnostic> {
    let refuse = |message: &str, hint: &str| Err(Diagnostic::error(&T1508, message).with_hint(hint));
    if has_objective && !has_cluster {
        return refuse("an objective without a machine", "name a cluster, such as cluster=\"gb200-nvl72\"");
    }
    if has_mesh_and_devices {
        return refuse(
            "both a mesh and a number of devices",
            "leave devices out: a mesh has one rank for each device",
        );
    }
    Ok(())
}

/// Checks that a mesh names every axis that shards an array of a function.
///
/// # Errors
/// T1510.
fn check_axes(graph: &Graph, mesh: &Mesh) -> Result<(), Diagnostic> {
    let names = |axes: &mut dyn Iterator<Item = &Axis>| axes.map(|a| a.name()).collect::<Vec<_>>().join(", ");
    let sharded = graph.function.sharded_axes();
    let missing: Vec<Axis> =
        sharded.iter().filter(|axis| !mesh.named_axes().contains(axis)).copied().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let name = &graph.function.program.name;
    let what = format!(
        "arrays of `{name}` are sharded over {}, which the mesh does not have",
        names(&mut missing.iter())
    );
    Err(Diagnostic::error(&T1510, what)
        .with_label("the program", names(&mut sharded.iter()))
        .with_label("the mesh", mesh.describe())
        .with_hint("name the axis in the mesh, with size 1 if its arrays shall stay whole"))
}

/// Returns the mesh over which the arrays of all functions are distributed.
fn find_common_mesh(graphs: &[Graph]) -> PyResult<Mesh> {
    let meshes: Vec<Mesh> =
        graphs.iter().filter_map(|graph| graph.function.mesh.clone()).map(Mesh::from_device_mesh).collect();
    let Some(mesh) = meshes.first() else {
        return Err(PyValueError::new_err("no array of the program has a mesh: state mesh="));
    };
    match meshes.iter().find(|other| !other.is_same(mesh)) {
        None => Ok(mesh.clone()),
        Some(other) => Err(PyValueError::new_err(format!(
            "the arrays of the programs lie on mesh {} and on {}; state mesh=, or distribute them over one",
            mesh.describe(),
            other.describe()
        ))),
    }
}

/// Returns the axes that functions or a mesh name, in nesting order.
fn list_axes(graphs: &[Graph], mesh: Option<&Mesh>) -> Vec<Axis> {
    let traced =
        graphs.iter().filter_map(|graph| graph.function.mesh.as_ref()).flat_map(|mesh| mesh.axes.clone());
    let stated = mesh.into_iter().flat_map(|mesh| mesh.named_axes().to_vec());
    let sharded = graphs.iter().flat_map(|graph| graph.function.sharded_axes());
    traced.chain(stated).chain(sharded).collect::<BTreeSet<Axis>>().into_iter().collect()
}
