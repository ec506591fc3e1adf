//! Arrays of other libraries in GPU memory.

#![allow(unsafe_code, reason = "memory of other libraries")]

use std::sync::OnceLock;

use pyo3::prelude::*;
use tessera::T0099;
use tessera::arrays::{ArrayGpus, DeviceTensor};
use tessera_base::Diagnostic;

use crate::array_memory::refuse_dtype;
use crate::dlpack_abi::{DlType, GPU};
use crate::dlpack_import::{find_device, import_tensor};
use crate::errors::{OrRaise, raise_one};

/// The GPUs of this process, once an array has needed them: the driver shows the same ones until the process ends.
static GPUS: OnceLock<ArrayGpus> = OnceLock::new();

/// Finds the GPUs of this process.
///
/// # Errors
/// T1301 without a driver, T1302 if the driver returns an error.
pub(crate) fn find_gpus(py: Python<'_>) -> PyResult<&'static ArrayGpus> {
    if let Some(known) = GPUS.get() {
        return Ok(known);
    }
    let found = py.detach(ArrayGpus::discover).or_raise(py)?;
    Ok(GPUS.get_or_init(|| found))
}

/// Takes the tensor of an object in GPU memory, which it shares. Returns `None` for any other object.
///
/// # Errors
/// T1502 for another dtype, T0099 for negative strides, and the errors of [`find_gpus`].
pub(crate) fn import_device_tensor(value: &Bound<'_, PyAny>) -> PyResult<Option<DeviceTensor>> {
    let py = value.py();
    let Some((GPU, index)) = find_device(value)? else { return Ok(None) };
    let gpus = find_gpus(py)?;
    let device = index.unsigned_abs();
    let stream = py.detach(|| gpus.open_stream(device)).or_raise(py)?;
    let tensor = import_tensor(value, Some(stream.handle()))?;
    if tensor.dtype() != DlType::F32 {
        return Err(raise_one(py, refuse_dtype(&tensor.dtype().name())));
    }
    let (shape, strides) = (tensor.shape().to_vec(), tensor.strides().to_vec());
    let Some(span) = tensor.span() else {
        let what = format!("a tensor of shape {shape:?} and strides {strides:?} in GPU memory");
        return Err(raise_one(py, Diagnostic::error(&T0099, what).with_hint("make it contiguous first")));
    };
    let address = tensor.address();
    // SAFETY: the library hands out the memory of its tensor on this device until `tensor` is dropped. By the
    // protocol it has made the stream wait for the work that writes it, and the contract of `distribute` and of
    // calls excludes later writes.
    let values = unsafe { stream.wrap_memory(address, span, Box::new(tensor)) }.or_raise(py)?;
    Ok(Some(DeviceTensor { values, shape, strides, stream }))
}
