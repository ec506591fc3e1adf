//! `tessera.dist.LocalArray`: the part of a DTensor that one rank holds, which other libraries read in its place.

#![allow(unsafe_code, reason = "streams of other libraries")]

use std::any::Any;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyTuple};
use tessera::T0099;
use tessera::arrays::{CopyRule, GpuArray, HostArray};
use tessera_base::Diagnostic;

use crate::array_memory::{share_array, take_array};
use crate::device_memory::find_gpus;
use crate::dlpack_abi::{DlDevice, GPU, HOST};
use crate::dlpack_export::{ExportedMemory, export_memory};
use crate::dlpack_import::row_major_strides;
use crate::errors::{OrRaise, raise_one};

/// The handle of the default stream that orders itself with all others, which a consumer means if it names none.
const LEGACY_DEFAULT_STREAM: u64 = 1;

/// The part of a DTensor that one rank holds.
#[pyclass(frozen, module = "tessera.dist")]
pub(crate) struct LocalArray {
    memory: LocalMemory,
    /// Start and length in each dim of the whole tensor.
    ranges: Vec<(u64, u64)>,
}

enum LocalMemory {
    /// The whole array, of which the part is a view.
    Host(HostArray),
    /// The part alone, in row-major order.
    Device(GpuArray),
}

#[pymethods]
impl LocalArray {
    /// Extents.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.extents())
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        "float32"
    }

    /// The device in whose memory the values lie, such as `"cpu"` or `"gpu:0"`.
    #[getter]
    fn device(&self) -> String {
        match &self.memory {
            LocalMemory::Host(_) => "cpu".to_string(),
            LocalMemory::Device(values) => format!("gpu:{}", values.device()),
        }
    }

    /// Returns the values as a read-only numpy array: over the memory of the tensor, or a copy of that of a GPU.
    fn to_host<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.memory {
            LocalMemory::Host(array) => {
                let slices = self.ranges.iter();
                let slices =
                    slices.map(|(start, len)| PySlice::new(py, *start as isize, (start + len) as isize, 1));
                share_array(py, array)?.get_item(PyTuple::new(py, slices)?)
            }
            LocalMemory::Device(values) => {
                let values = py.detach(|| values.copy_to_host()).or_raise(py)?;
                share_array(py, &HostArray::from_vec(self.extents().collect(), values))
            }
        }
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.extents().next();
        first.map(|n| n as usize).ok_or_else(|| PyTypeError::new_err("an array without dims has no length"))
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.to_numpy(py, dtype, copy)
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
        self.export(py, stream, max_version, dl_device, copy)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.dlpack_device()
    }

    fn __repr__(&self) -> String {
        let extents: Vec<String> = self.extents().map(|n| n.to_string()).collect();
        format!("LocalArray(float32, [{}], {})", extents.join(", "), self.device())
    }
}

impl LocalArray {
    /// Wraps a part of an array in host memory.
    pub(crate) fn of_host(array: HostArray, ranges: Vec<(u64, u64)>) -> LocalArray {
        LocalArray { memory: LocalMemory::Host(array), ranges }
    }

    /// Wraps a part that a GPU holds.
    pub(crate) fn of_device(values: GpuArray, ranges: Vec<(u64, u64)>) -> LocalArray {
        LocalArray { memory: LocalMemory::Device(values), ranges }
    }

    /// Returns kind and index of the device, by DLPack's numbers.
    pub(crate) fn dlpack_device(&self) -> (i32, i32) {
        match &self.memory {
            LocalMemory::Host(_) => (HOST, 0),
            LocalMemory::Device(values) => (GPU, values.device() as i32),
        }
    }

    /// Returns the values to numpy, which reads host memory alone. Numpy decides whether another dtype needs a copy,
    /// and refuses one where the caller excludes it.
    pub(crate) fn to_numpy<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let LocalMemory::Device(values) = &self.memory {
            let what =
                format!("the array lies in the memory of GPU {}, which numpy does not read", values.device());
            let hint = "copy it to the host with gather() or to_host()";
            return Err(raise_one(py, Diagnostic::error(&T0099, what).with_hint(hint)));
        }
        let options = PyDict::new(py);
        options.set_item("dtype", dtype)?;
        options.set_item("copy", copy)?;
        py.import("numpy")?.call_method("array", (self.to_host(py)?,), Some(&options))
    }

    /// Makes the DLPack capsule of the values, after the consumer's stream was made to wait for them.
    pub(crate) fn export<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let device = self.dlpack_device();
        if dl_device.is_some_and(|wanted| wanted != device) {
            let message = format!("the array lies on DLPack device {device:?}, and moves to no other");
            return Err(PyBufferError::new_err(message));
        }
        let is_copy = copy == Some(true);
        let shape: Vec<u64> = self.extents().collect();
        let (address, strides, owner) = match &self.memory {
            LocalMemory::Host(array) => {
                if stream.is_some_and(|stream| stream != -1) {
                    return Err(PyValueError::new_err("host memory has no streams: stream must be None"));
                }
                self.export_host(py, array, is_copy)?
            }
            LocalMemory::Device(values) => export_device(py, values, stream, is_copy, &shape)?,
        };
        let device = DlDevice { kind: device.0, index: device.1 };
        export_memory(py, ExportedMemory { address, device, shape, strides, owner, is_copy }, max_version)
    }

    fn export_host(
        &self,
        py: Python<'_>,
        array: &HostArray,
        is_copy: bool,
    ) -> PyResult<(u64, Vec<i64>, Box<dyn Any + Send + Sync>)> {
        let strides = row_major_strides(array.shape());
        let starts = self.ranges.iter().zip(&strides).map(|((start, _), stride)| start * *stride as u64);
        let first = starts.sum::<u64>() as usize;
        if !is_copy {
            let address = array.values().as_ptr().wrapping_add(first) as u64;
            return Ok((address, strides, Box::new(array.clone())));
        }
        let copied = take_array(&self.to_host(py)?, CopyRule::Always)?;
        let (address, strides) = (copied.values().as_ptr() as u64, row_major_strides(copied.shape()));
        Ok((address, strides, Box::new(copied)))
    }

    fn extents(&self) -> impl ExactSizeIterator<Item = u64> {
        self.ranges.iter().map(|(_, len)| *len)
    }
}

/// Returns the memory of a part on a GPU, or of a copy of it, which the consumer's stream waits for.
fn export_device(
    py: Python<'_>,
    values: &GpuArray,
    stream: Option<i64>,
    is_copy: bool,
    shape: &[u64],
) -> PyResult<(u64, Vec<i64>, Box<dyn Any + Send + Sync>)> {
    let waiting = match stream {
        None => Some(LEGACY_DEFAULT_STREAM),
        Some(-1) => None,
        Some(handle) if handle > 0 => Some(handle as u64),
        Some(other) => {
            let message = format!("stream = {other}: a stream is None, -1, 1, 2 or the handle of one");
            return Err(PyValueError::new_err(message));
        }
    };
    let exported = match is_copy {
        true => {
            let gpus = find_gpus(py)?;
            py.detach(|| gpus.copy_array(values)).or_raise(py)?
        }
        false => values.clone(),
    };
    if let Some(waiting) = waiting {
        // SAFETY: by the protocol the number is the handle of a stream of the consumer, which exists during the call.
        unsafe { exported.delay_stream(waiting) }.or_raise(py)?;
    }
    Ok((exported.address(), row_major_strides(shape), Box::new(exported)))
}
