//! Meshes and layouts: `tessera.dist.Mesh`, `ShardSpec` and `ReplicateSpec`.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tessera::arrays::{ArrayPlan, DeviceMesh};
use tessera_base::Diagnostic;
use tessera_mesh::{Axis, Coord, DimName, Rank, RankMap};

use crate::errors::OrRaise;
use tessera_cli::codes::T1501;

/// A mesh of devices with named axes.
#[pyclass(frozen, from_py_object, module = "tessera.dist", eq)]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mesh {
    pub(crate) mesh: tessera_mesh::Mesh,
    /// The axes that the user named, in nesting order.
    axes: Arc<[Axis]>,
    pub(crate) devices: Arc<[String]>,
}

#[pymethods]
impl Mesh {
    #[new]
    #[pyo3(signature = (axes, shape, devices=None))]
    fn new(
        py: Python<'_>,
        axes: Vec<String>,
        shape: BTreeMap<String, u32>,
        devices: Option<Vec<String>>,
    ) -> PyResult<Mesh> {
        Mesh::from_axes(py, axes, shape, devices)
    }

    /// Names of the axes; the first varies fastest from rank to rank.
    #[getter]
    fn axes(&self) -> Vec<&'static str> {
        self.axes.iter().map(|axis| axis.name()).collect()
    }

    /// Number of devices along each axis.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.by_axis(py, |axis| self.mesh.axis_size(axis))
    }

    /// Names of the devices, in rank order.
    #[getter]
    fn devices(&self) -> Vec<String> {
        self.devices.to_vec()
    }

    /// Number of devices.
    #[getter]
    fn size(&self) -> u32 {
        self.mesh.mesh_size()
    }

    fn __len__(&self) -> usize {
        self.mesh.mesh_size() as usize
    }

    /// Returns the position of a rank on each axis.
    fn coord<'py>(&self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyDict>> {
        let coord = self.coord_of(rank)?;
        self.by_axis(py, |axis| coord.on_axis(axis))
    }

    /// Returns the rank at a position; an axis that is not given has position 0.
    #[pyo3(signature = (**position))]
    fn rank(&self, py: Python<'_>, position: Option<BTreeMap<String, u32>>) -> PyResult<u32> {
        let mut coord = Coord::default();
        for (name, at) in position.unwrap_or_default() {
            let axis = name.parse::<Axis>().or_raise(py)?;
            let size = self.mesh.axis_size(axis);
            if at >= size {
                return Err(PyValueError::new_err(format!(
                    "{name} = {at}, but the axis has {size} positions"
                )));
            }
            coord = coord.with_axis(axis, at);
        }
        Ok(self.mesh.rank_at(coord).0)
    }

    fn __repr__(&self) -> String {
        format!("Mesh({}, {} devices)", self.mesh, self.mesh.mesh_size())
    }
}

impl Mesh {
    /// Creates a mesh from the axes and sizes that a user names.
    pub(crate) fn from_axes(
        py: Python<'_>,
        axes: Vec<String>,
        shape: BTreeMap<String, u32>,
        devices: Option<Vec<String>>,
    ) -> PyResult<Mesh> {
        let named = axes.iter().map(|name| name.parse::<Axis>()).collect::<Result<Vec<_>, _>>();
        let named = named.or_raise(py)?;
        check_axes(&axes, &named, &shape).or_raise(py)?;
        let size = |axis: Axis| shape.get(axis.name()).copied().unwrap_or(1);
        let mesh = tessera_mesh::Mesh::new(Axis::ALL.map(size)).or_raise(py)?;
        let devices = match devices {
            None => RankMap::from_device_kind(&mesh, "rank"),
            Some(devices) => RankMap::new(&mesh, devices).or_raise(py)?,
        };
        Ok(Mesh { mesh, axes: named.into(), devices: devices.devices().into() })
    }

    /// Returns the mesh with what the library knows of it.
    pub(crate) fn to_device_mesh(&self) -> DeviceMesh {
        DeviceMesh { axes: self.axes.to_vec(), mesh: self.mesh, devices: self.devices.to_vec() }
    }

    /// Wraps a mesh of the library.
    pub(crate) fn from_device_mesh(mesh: DeviceMesh) -> Mesh {
        Mesh { mesh: mesh.mesh, axes: mesh.axes.into(), devices: mesh.devices.into() }
    }

    /// Returns the mesh of a sealed plan; its axes are those with several ranks.
    pub(crate) fn from_plan(plan: &ArrayPlan) -> Mesh {
        let mesh = *plan.sealed.mesh();
        let axes: Vec<Axis> = mesh.active_axes().collect();
        let axes = if axes.is_empty() { vec![Axis::Tp] } else { axes };
        let devices = plan.sealed.rank_map().devices().to_vec();
        Mesh::from_device_mesh(DeviceMesh { axes, mesh, devices })
    }

    /// Returns the axes that the user named, in nesting order.
    pub(crate) fn named_axes(&self) -> &[Axis] {
        &self.axes
    }

    /// Returns the position of a rank.
    pub(crate) fn coord_of(&self, rank: u32) -> PyResult<Coord> {
        match rank < self.mesh.world_size() {
            true => Ok(self.mesh.coord_of(Rank(rank))),
            false => Err(PyValueError::new_err(format!(
                "rank {rank} of a mesh of {} ranks",
                self.mesh.world_size()
            ))),
        }
    }

    /// Returns whether two meshes have the same ranks on the same devices, whichever axes of one rank were named.
    pub(crate) fn is_same(&self, other: &Mesh) -> bool {
        self.mesh == other.mesh && self.devices == other.devices
    }

    /// Returns the sizes and the first and last device, for messages.
    pub(crate) fn describe(&self) -> String {
        match (self.devices.first(), self.devices.last()) {
            (Some(first), Some(last)) => format!("{}, devices {first} to {last}", self.mesh),
            _ => self.mesh.to_string(),
        }
    }

    /// Returns the devices of the ranks, in rank order.
    pub(crate) fn rank_map(&self, py: Python<'_>) -> PyResult<RankMap> {
        RankMap::new(&self.mesh, self.devices.to_vec()).or_raise(py)
    }

    fn by_axis<'py>(&self, py: Python<'py>, value: impl Fn(Axis) -> u32) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        self.axes.iter().try_for_each(|axis| dict.set_item(axis.name(), value(*axis)))?;
        Ok(dict)
    }
}

/// Checks that axes are named once, in nesting order, and that the shape has a size for each of them and no other.
fn check_axes(axes: &[String], named: &[Axis], shape: &BTreeMap<String, u32>) -> Result<(), Diagnostic> {
    let nesting = Axis::ALL.map(Axis::name).join(", ");
    if !named.is_sorted_by(|a, b| (*a as usize) < (*b as usize)) {
        return Err(Diagnostic::error(&T1501, format!("axes {axes:?} are not in the order {nesting}"))
            .with_note("the first axis varies fastest: with tp=12, ranks 0 to 11 are one tp group")
            .with_hint(format!("list each axis once, in the order {nesting}")));
    }
    let missing: Vec<&String> = axes.iter().filter(|axis| !shape.contains_key(*axis)).collect();
    let unknown: Vec<&String> = shape.keys().filter(|axis| !axes.contains(axis)).collect();
    if missing.is_empty() && unknown.is_empty() {
        return Ok(());
    }
    let mut diagnostic = Diagnostic::error(&T1501, "axes and shape name different axes");
    if !missing.is_empty() {
        diagnostic = diagnostic.with_label("axes", format!("the shape has no size for {missing:?}"));
    }
    if !unknown.is_empty() {
        diagnostic = diagnostic.with_label("shape", format!("{unknown:?} are not among the axes"));
    }
    Err(diagnostic.with_hint("give the shape one size per axis, such as shape={\"tp\": 12, \"ep\": 6}"))
}

/// A layout that is replicated over mesh axes.
#[pyclass(frozen, from_py_object, module = "tessera.dist", eq)]
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ReplicateSpec {
    axes: Vec<String>,
}

#[pymethods]
impl ReplicateSpec {
    #[new]
    #[pyo3(signature = (mesh_axes=Vec::new()))]
    fn new(py: Python<'_>, mesh_axes: Vec<String>) -> PyResult<ReplicateSpec> {
        for name in &mesh_axes {
            name.parse::<Axis>().or_raise(py)?;
        }
        Ok(ReplicateSpec { axes: mesh_axes })
    }

    /// Axes over which the tensor is replicated.
    #[getter]
    fn mesh_axes(&self) -> Vec<String> {
        self.axes.clone()
    }

    fn __repr__(&self) -> String {
        format!("ReplicateSpec(mesh_axes={:?})", self.axes)
    }
}

/// The layout of a tensor over a mesh, as the user wrote it.
#[derive(FromPyObject, Debug, Clone)]
pub(crate) enum Spec {
    Replicate(#[allow(dead_code, reason = "replication over any axes is one layout")] ReplicateSpec),
    Shard(ShardSpec),
}

impl Spec {
    /// Returns whether the spec calls the columns of an operand `head`.
    pub(crate) fn names_heads(&self) -> bool {
        self.shards().pairs().iter().any(|(dim, _)| matches!(dim, DimName::Head | DimName::Token))
    }

    /// Returns the spec that shards what this one shards.
    pub(crate) fn shards(&self) -> tessera_mesh::ShardSpec {
        match self {
            Spec::Replicate(_) => tessera_mesh::ShardSpec::REPLICATED,
            Spec::Shard(spec) => spec.spec.clone(),
        }
    }
}

/// A layout that shards named dims over mesh axes, and is replicated over the others.
#[pyclass(frozen, from_py_object, module = "tessera.dist", eq)]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ShardSpec {
    spec: tessera_mesh::ShardSpec,
    partition: Vec<String>,
    axes: Vec<String>,
}

#[pymethods]
impl ShardSpec {
    #[new]
    fn new(py: Python<'_>, partition: Vec<String>, mesh_axes: Vec<String>) -> PyResult<ShardSpec> {
        let [dims, axes] =
            [&partition, &mesh_axes].map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
        let spec = tessera_mesh::ShardSpec::new(&dims, &axes).or_raise(py)?;
        Ok(ShardSpec { spec, partition, axes: mesh_axes })
    }

    /// Names of the sharded dims.
    #[getter]
    fn partition(&self) -> Vec<String> {
        self.partition.clone()
    }

    /// Axes over which they are sharded, one for each dim.
    #[getter]
    fn mesh_axes(&self) -> Vec<String> {
        self.axes.clone()
    }

    fn __repr__(&self) -> String {
        format!("ShardSpec(partition={:?}, mesh_axes={:?})", self.partition, self.axes)
    }
}
