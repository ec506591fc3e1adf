//! `tessera.dist.DTensor`: an array with a layout over a mesh.

use std::collections::BTreeMap;

use pyo3::basic::CompareOp;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyTuple};
use tessera::arrays::HostArray;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1502;
use tessera_mesh::{Axis, AxisLayout, DimName, Layout, Shard};

use crate::array_memory::{Sharing, share_array, take_array};
use crate::errors::{OrRaise, raise_one};
use crate::mesh::{Mesh, Spec};

/// An array that is sharded or replicated over the devices of a mesh.
#[pyclass(frozen, from_py_object, module = "tessera.dist")]
#[derive(Debug, Clone)]
pub(crate) struct DTensor {
    pub(crate) array: HostArray,
    pub(crate) mesh: Mesh,
    pub(crate) layout: Layout,
    pub(crate) dims: Vec<DimName>,
    pub(crate) units: Vec<u64>,
}

/// Distributes an array over a mesh.
#[pyfunction]
#[pyo3(signature = (array, mesh, spec, *, dims=None, units=None))]
pub(crate) fn distribute(
    array: &Bound<'_, PyAny>,
    mesh: Mesh,
    spec: Spec,
    dims: Option<Vec<String>>,
    units: Option<BTreeMap<String, u64>>,
) -> PyResult<DTensor> {
    let py = array.py();
    let array = take_array(array, Sharing::IfPossible)?;
    let (dims, units) = name_dims(py, array.shape().len(), dims, units.unwrap_or_default())?;
    let layout = to_layout(py, &spec, (array.shape(), &dims, &units), &mesh)?;
    Ok(DTensor { array, mesh, layout, dims, units })
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
    let mut layout = spec.shards().to_layout(shape, dims, &mesh.mesh).or_raise(py)?;
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
        PyTuple::new(py, self.array.shape())
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
        for axis in Axis::ALL {
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
            4 * self.layout.local_shape(self.array.shape(), &self.mesh.mesh, coord).iter().product::<u64>()
        };
        self.mesh.mesh.iter().map(local).sum()
    }

    /// Returns the extents of a rank's shard.
    fn local_shape<'py>(&self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.ranges_of(rank)?.into_iter().map(|(_, len)| len))
    }

    /// Returns a rank's shard, as a read-only view of the memory of this tensor.
    fn local<'py>(&self, py: Python<'py>, rank: u32) -> PyResult<Bound<'py, PyAny>> {
        let ranges = self.ranges_of(rank)?;
        let slices =
            ranges.iter().map(|(start, len)| PySlice::new(py, *start as isize, (start + len) as isize, 1));
        share_array(py, &self.array)?.get_item(PyTuple::new(py, slices)?)
    }

    /// Returns the whole tensor, as a read-only array over the memory of this tensor.
    fn gather<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        share_array(py, &self.array)
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // numpy decides whether another dtype needs a copy, and refuses one where the caller excludes it.
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        py.import("numpy")?.call_method("array", (share_array(py, &self.array)?,), Some(&options))
    }

    #[pyo3(signature = (**options))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        options: Option<Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        share_array(py, &self.array)?.call_method("__dlpack__", (), options.as_ref())
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        share_array(py, &self.array)?.call_method0("__dlpack_device__")
    }

    fn __richcmp__(&self, _other: &Bound<'_, PyAny>, _op: CompareOp) -> PyResult<bool> {
        self.__bool__()
    }

    fn __bool__(&self) -> PyResult<bool> {
        Err(PyTypeError::new_err("a DTensor has no truth value: gather() it and compare numbers"))
    }

    fn __repr__(&self) -> String {
        let dims = self.dims.iter().zip(self.array.shape()).map(|(dim, n)| format!("{}={n}", dim.name()));
        let dims: Vec<String> = dims.collect();
        let sharded = Axis::ALL.into_iter().filter_map(|axis| match self.layout.on_axis(axis) {
            AxisLayout::Shard(shard) => Some(format!("{} over {axis}", self.dims[shard.dim].name())),
            _ => None,
        });
        let sharded: Vec<String> = sharded.collect();
        let layout = if sharded.is_empty() { "replicated".to_string() } else { sharded.join(", ") };
        format!("DTensor(float32, {}, {layout}, mesh {})", dims.join(", "), self.mesh.mesh)
    }
}

impl DTensor {
    /// Returns whether two arrays are the same memory in the same shape, layout and names.
    pub(crate) fn is_same(&self, other: &DTensor) -> bool {
        std::ptr::eq(self.array.values(), other.array.values())
            && self.array.shape() == other.array.shape()
            && (self.layout, &self.dims, &self.units) == (other.layout, &other.dims, &other.units)
    }

    /// Returns the start and length of every dim of a rank's shard.
    fn ranges_of(&self, rank: u32) -> PyResult<Vec<(u64, u64)>> {
        let coord = self.mesh.coord_of(rank)?;
        let local = self.layout.local_shape(self.array.shape(), &self.mesh.mesh, coord);
        Ok(self.layout.global_ranges(&local, &self.mesh.mesh, coord))
    }
}
