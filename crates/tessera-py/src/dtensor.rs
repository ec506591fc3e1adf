//! `tessera.dist.DTensor`: an array with a layout over a mesh.

use std::collections::BTreeMap;

use pyo3::basic::CompareOp;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tessera::T0099;
use tessera::arrays::{ArrayValues, CopyRule, DeviceTensor, HostArray};
use tessera_base::Diagnostic;
use tessera_cli::codes::T1502;
use tessera_mesh::{Axis, AxisLayout, DimName, Layout, Shard};

use crate::array_memory::{share_array, take_array};
use crate::device_memory::{find_gpus, import_device_tensor};
use crate::errors::{OrRaise, raise_one};
use crate::local_array::LocalArray;
use crate::mesh::{Mesh, Spec};

/// An array that is sharded or replicated over the devices of a mesh.
#[pyclass(frozen, from_py_object, module = "tessera.dist")]
#[derive(Debug, Clone)]
pub(crate) struct DTensor {
    pub(crate) values: ArrayValues,
    pub(crate) mesh: Mesh,
    pub(crate) layout: Layout,
    pub(crate) dims: Vec<DimName>,
    pub(crate) units: Vec<u64>,
}

/// Distributes an array over a mesh.
#[pyfunction]
#[pyo3(signature = (array, mesh, spec, *, dims=None, units=None, copy=None))]
pub(crate) fn distribute(
    array: &Bound<'_, PyAny>,
    mesh: Mesh,
    spec: Spec,
    dims: Option<Vec<String>>,
    units: Option<BTreeMap<String, u64>>,
    copy: Option<bool>,
) -> PyResult<DTensor> {
    let py = array.py();
    let rule = match copy {
        None => CopyRule::IfNeeded,
        Some(true) => CopyRule::Always,
        Some(false) => CopyRule::Never,
    };
    let source = match import_device_tensor(array)? {
        Some(tensor) => Source::Device(tensor),
        None => Source::Host(take_array(array, rule)?),
    };
    let (dims, units) = name_dims(py, source.shape().len(), dims, units.unwrap_or_default())?;
    let layout = to_layout(py, &spec, (source.shape(), &dims, &units), &mesh)?;
    let values = match source {
        Source::Host(array) => ArrayValues::Host(array),
        Source::Device(tensor) => {
            let map = mesh.rank_map(py)?;
            let place = (&mesh.mesh, &map, &layout);
            let gpus = find_gpus(py)?;
            ArrayValues::Device(py.detach(|| gpus.distribute(&tensor, place, rule)).or_raise(py)?)
        }
    };
    Ok(DTensor { values, mesh, layout, dims, units })
}

/// The array from which a tensor is made.
enum Source {
    Host(HostArray),
    Device(DeviceTensor),
}

impl Source {
    fn shape(&self) -> &[u64] {
        match self {
            Source::Host(array) => array.shape(),
            Source::Device(tensor) => &tensor.shape,
        }
    }
}

/// Returns the names of a tensor's dims, which are those of a weight by default, and the unit in which each is sharded.
pub(crate) fn name_dims(
    py: Python<'_>,
    count: usize,
    names: Option<Vec<String>>,
    units: BTreeMap<String, u64>,
) -> PyResult<(Vec<DimName>, Vec<u64>)> {
    let dims = match names {
        Some(names) => {
            let named = names.iter().map(|name| name.parse::<DimName>()).collect::<Result<Vec<_>, _>>();
            named.or_raise(py)?
        }
        None => DimName::of_weight(count).unwrap_or_default(),
    };
    if dims.len() != count {
        let message = match dims.is_empty() {
            true => format!("a tensor of {count} dims has no names by default"),
            false => format!("{} names for a tensor of {count} dims", dims.len()),
        };
        let hint = "name every dim, such as dims=(\"token\", \"hidden\")";
        return Err(raise_one(py, Diagnostic::error(&T1502, message).with_hint(hint)));
    }
    let known = |name: &String| dims.iter().any(|dim| dim.name() == name);
    if let Some(unknown) = units.keys().find(|name| !known(name)) {
        let names: Vec<&str> = dims.iter().map(|dim| dim.name()).collect();
        let message = format!("a unit of dim {unknown:?}, but the dims are {names:?}");
        return Err(raise_one(py, Diagnostic::error(&T1502, message)));
    }
    if let Some((name, _)) = units.iter().find(|(_, unit)| **unit == 0) {
        let message = format!("a unit of 0 elements for dim {name:?}");
        return Err(raise_one(py, Diagnostic::error(&T1502, message)));
    }
    let units = dims.iter().map(|dim| units.get(dim.name()).copied().unwrap_or(1)).collect();
    Ok((dims, units))
}

/// Returns the layout that a spec gives to a tensor of this shape, with these names and units of its dims.
pub(crate) fn to_layout(
    py: Python<'_>,
    spec: &Spec,
    (shape, dims, units): (&[u64], &[DimName], &[u64]),
    mesh: &Mesh,
) -> PyResult<Layout> {
    let shards = spec.shards();
    let mut layout = shards.to_layout(shape, dims, &mesh.mesh).or_raise(py)?;
    for (name, axis) in shards.pairs().iter().filter(|(_, axis)| mesh.mesh.axis_size(*axis) == 1) {
        // One rank shards nothing, but a function that is traced here may be planned for more.
        if let Some(dim) = dims.iter().position(|dim| dim == name) {
            let whole = Shard { dim, uneven: None, subgroup_size: None };
            layout = layout.with_axis(*axis, AxisLayout::Shard(whole));
        }
    }
    for axis in Axis::ALL {
        if let AxisLayout::Shard(shard) = layout.on_axis(axis)
            && units[shard.dim] > 1
        {
            let (extent, unit) = (shape[shard.dim], units[shard.dim]);
            let parts = mesh.mesh.axis_size(axis);
            let Some(whole) = Shard::new(shard.dim, extent, unit, parts) else {
                let message = format!(
                    "{extent} elements in units of {unit} cannot be shared by {parts} ranks of {axis}"
                );
                return Err(raise_one(py, Diagnostic::error(&T1502, message)));
            };
            layout = layout.with_axis(axis, AxisLayout::Shard(whole));
        }
    }
    Ok(layout)
}

#[pymethods]
impl DTensor {
    /// Extents of the whole tensor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.values.shape())
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        "float32"
    }

    /// The mesh over which the tensor is distributed.
    #[getter]
    fn mesh(&self) -> Mesh {
        self.mesh.clone()
    }

    /// Names of the dims.
    #[getter]
    fn dims<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.dims.iter().map(|dim| dim.name()))
    }

    /// The axis that shards each sharded dim.
    #[getter]
    fn sharding<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for axis in self.mesh.mesh.active_axes() {
            if let AxisLayout::Shard(shard) = self.layout.on_axis(axis) {
                dict.set_item(self.dims[shard.dim].name(), axis.name())?;
            }
        }
        Ok(dict)
    }

    /// Bytes that all devices of the mesh hold together.
    #[getter]
    fn total_bytes(&self) -> u64 {
        let local = |rank| {
            let coord = self.mesh.mesh.coord_of(rank);
            4 * self.layout.local_shape(self.values.shape(), &self.mesh.mesh, coord).iter().product::<u64>()
        };
        self.mesh.mesh.iter().map(local).sum()
    }

    /// Returns the extents of a rank's shard.
    fn local_shape<'py>(&self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.ranges_of(rank)?.into_iter().map(|(_, len)| len))
    }

    /// The kind of device in whose memory the shards lie: `"cpu"` or `"gpu"`.
    #[getter]
    fn device(&self) -> &'static str {
        match self.values {
            ArrayValues::Host(_) => "cpu",
            ArrayValues::Device(_) => "gpu",
        }
    }

    /// Returns a rank's shard, in the memory of this tensor.
    fn local(&self, rank: u32) -> PyResult<LocalArray> {
        let ranges = self.ranges_of(rank)?;
        match &self.values {
            ArrayValues::Host(array) => Ok(LocalArray::of_host(array.clone(), ranges)),
            ArrayValues::Device(array) => match array.shard(rank) {
                Some(shard) => Ok(LocalArray::of_device(shard.clone(), ranges)),
                None => Err(PyValueError::new_err(format!("rank {rank} has no shard of this tensor"))),
            },
        }
    }

    /// Returns the whole tensor as a read-only array: over the memory of this tensor, or a copy of the shards on GPUs.
    fn gather<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        share_array(py, &py.detach(|| self.values.gather()).or_raise(py)?)
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.to_local(py)?.to_numpy(py, dtype, copy)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.to_local(py)?.export(py, stream, max_version, dl_device, copy)
    }

    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        Ok(self.to_local(py)?.dlpack_device())
    }

    fn __richcmp__(&self, _other: &Bound<'_, PyAny>, _op: CompareOp) -> PyResult<bool> {
        self.__bool__()
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err("a DTensor has no truth value: gather() it and compare numbers"))
    }

    pub(crate) fn __repr__(&self) -> String {
        let dims = self.dims.iter().zip(self.values.shape()).map(|(dim, n)| format!("{}={n}", dim.name()));
        let dims: Vec<String> = dims.collect();
        let sharded = self.mesh.mesh.active_axes().filter_map(|axis| match self.layout.on_axis(axis) {
            AxisLayout::Shard(shard) => Some(format!("{} over {axis}", self.dims[shard.dim].name())),
            _ => None,
        });
        let sharded: Vec<String> = sharded.collect();
        let layout = if sharded.is_empty() { "replicated".to_string() } else { sharded.join(", ") };
        let place = if matches!(self.values, ArrayValues::Device(_)) { " on GPUs" } else { "" };
        format!("DTensor(float32, {}, {layout}, mesh {}{place})", dims.join(", "), self.mesh.mesh)
    }
}

impl DTensor {
    /// Returns whether two arrays are the same memory in the same shape, layout and names.
    pub(crate) fn is_same(&self, other: &DTensor) -> bool {
        let is_same_memory = match (&self.values, &other.values) {
            (ArrayValues::Host(a), ArrayValues::Host(b)) => std::ptr::eq(a.values(), b.values()),
            (ArrayValues::Device(a), ArrayValues::Device(b)) => a.is_same(b),
            _ => false,
        };
        is_same_memory
            && self.values.shape() == other.values.shape()
            && (self.layout, &self.dims, &self.units) == (other.layout, &other.dims, &other.units)
    }

    /// Returns the array in host memory, for what reads it there.
    ///
    /// # Errors
    /// T0099 for a tensor on GPUs.
    pub(crate) fn host_array(&self, reader: &str) -> Result<&HostArray, Diagnostic> {
        match &self.values {
            ArrayValues::Host(array) => Ok(array),
            ArrayValues::Device(_) => {
                let what = format!("{reader} read host memory, but the tensor lies on GPUs");
                Err(Diagnostic::error(&T0099, what).with_hint("distribute what gather() returns"))
            }
        }
    }

    /// Returns the whole tensor as one array.
    fn to_local(&self, py: Python<'_>) -> PyResult<LocalArray> {
        let ranges: Vec<(u64, u64)> = self.values.shape().iter().map(|extent| (0, *extent)).collect();
        match &self.values {
            ArrayValues::Host(array) => Ok(LocalArray::of_host(array.clone(), ranges)),
            ArrayValues::Device(array) => match array.wholes().next() {
                Some(whole) => Ok(LocalArray::of_device(whole.clone(), ranges)),
                None => {
                    let what = "no GPU has the whole tensor";
                    let hint =
                        "take the shard of a rank with local(rank), or copy all to the host with gather()";
                    Err(raise_one(py, Diagnostic::error(&T0099, what).with_hint(hint)))
                }
            },
        }
    }

    /// Returns the start and length of every dim of a rank's shard.
    pub(crate) fn ranges_of(&self, rank: u32) -> PyResult<Vec<(u64, u64)>> {
        let coord = self.mesh.coord_of(rank)?;
        let local = self.layout.local_shape(self.values.shape(), &self.mesh.mesh, coord);
        Ok(self.layout.global_ranges(&local, &self.mesh.mesh, coord))
    }
}
