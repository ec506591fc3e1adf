//! Host memory that other libraries and Tessera share: an array that a user passes in, and an array that a run returns.

use std::sync::Arc;

use numpy::ndarray::{ArrayViewD, IxDyn};
use numpy::{
    PyArray, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::prelude::*;
use tessera::T0099;
use tessera::arrays::{CopyRule, HostArray};
use tessera_base::Diagnostic;
use tessera_cli::codes::T1502;

use crate::dlpack_abi::{DlType, HOST, PINNED_HOST};
use crate::dlpack_import::{ImportedTensor, find_device, import_tensor};
use crate::errors::raise_one;

/// The values of a numpy array that is read-only from now on.
///
/// numpy cannot forbid every later write: an older view, or `setflags(write=True)`, still reaches the memory. The
/// documentation of `distribute` asks the caller not to, as `torch.from_numpy` and every other owner of shared memory does.
struct FrozenArray {
    address: *const f32,
    len: usize,
    /// Keeps the memory alive.
    _owner: Py<PyAny>,
}

// SAFETY: the memory is only read, as long as the owner lives, and the owner's count is changed under the interpreter's
// lock by PyO3.
#[allow(unsafe_code, reason = "the address is the only field that is not Send and Sync by itself")]
unsafe impl Send for FrozenArray {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "the address is the only field that is not Send and Sync by itself")]
unsafe impl Sync for FrozenArray {}

impl AsRef<[f32]> for FrozenArray {
    #[allow(unsafe_code, reason = "the memory belongs to numpy")]
    fn as_ref(&self) -> &[f32] {
        // SAFETY: `freeze` checked that the array is contiguous and aligned and holds `len` numbers, made it read-only, and
        // refused memory whose owner offers to be written; `_owner` keeps the memory alive. The contract of `distribute`
        // excludes writes by other ways.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

/// The values of a tensor of another library, who keeps the promise not to write them.
struct ImportedValues {
    tensor: ImportedTensor,
    len: usize,
}

impl AsRef<[f32]> for ImportedValues {
    #[allow(unsafe_code, reason = "the memory belongs to another library")]
    fn as_ref(&self) -> &[f32] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `take_tensor` checked that the tensor holds `len` numbers in row-major order, aligned and in host
        // memory, and the tensor keeps it alive. The contract of `distribute` excludes writes.
        unsafe { std::slice::from_raw_parts(self.tensor.address() as *const f32, self.len) }
    }
}

/// Takes an array of f32 in host memory. A numpy array in row-major order that is shared becomes read-only.
///
/// # Errors
/// T1502 for another dtype, and for a copy that `rule` excludes; T0099 for an array in the memory of a device.
pub(crate) fn take_array(array: &Bound<'_, PyAny>, rule: CopyRule) -> PyResult<HostArray> {
    let py = array.py();
    if let Ok(untyped) = array.cast::<PyUntypedArray>() {
        return take_numpy(untyped, rule);
    }
    match find_device(array)? {
        Some((HOST | PINNED_HOST, _)) => take_tensor(py, import_tensor(array, None)?, rule),
        Some((kind, index)) => Err(raise_one(py, refuse_device(kind, index))),
        None => {
            let array = py.import("numpy")?.call_method1("asarray", (array,))?;
            take_numpy(&array.cast_into::<PyUntypedArray>()?, rule)
        }
    }
}

/// Returns the refusal of an array in the memory of a device where host memory is needed.
pub(crate) fn refuse_device(kind: i32, index: i32) -> Diagnostic {
    let what = format!(
        "an array in the memory of device {index} of DLPack kind {kind}, where host memory is needed"
    );
    Diagnostic::error(&T0099, what).with_hint("copy it to the host first")
}

/// Returns the refusal of an array of another dtype.
pub(crate) fn refuse_dtype(found: &str) -> Diagnostic {
    Diagnostic::error(&T1502, format!("an array of {found}, where programs take float32"))
        .with_hint("convert it to float32 first, such as with array.astype(numpy.float32) or tensor.float()")
}

fn refuse_copy(why: &str) -> Diagnostic {
    Diagnostic::error(&T1502, format!("the array needs a copy: {why}")).with_hint("leave out copy=False")
}

fn take_numpy(untyped: &Bound<'_, PyUntypedArray>, rule: CopyRule) -> PyResult<HostArray> {
    let py = untyped.py();
    if !untyped.dtype().is_equiv_to(&dtype::<f32>(py)) {
        return Err(raise_one(py, refuse_dtype(&untyped.dtype().to_string())));
    }
    let shape: Vec<u64> = untyped.shape().iter().map(|n| *n as u64).collect();
    let array = untyped.cast::<PyArrayDyn<f32>>()?;
    if rule != CopyRule::Always
        && let Some(frozen) = freeze(array)?
    {
        return Ok(HostArray::new(shape, Arc::new(frozen)));
    }
    if rule == CopyRule::Never {
        let why = "it is not in row-major order, or another array or buffer can write its memory";
        return Err(raise_one(py, refuse_copy(why)));
    }
    Ok(HostArray::from_vec(shape, copy_values(array)?))
}

#[allow(unsafe_code, reason = "the memory belongs to another library")]
fn take_tensor(py: Python<'_>, tensor: ImportedTensor, rule: CopyRule) -> PyResult<HostArray> {
    if tensor.dtype() != DlType::F32 {
        return Err(raise_one(py, refuse_dtype(&tensor.dtype().name())));
    }
    let shape = tensor.shape().to_vec();
    let is_aligned = tensor.address().is_multiple_of(align_of::<f32>() as u64);
    if rule != CopyRule::Always && tensor.is_row_major() && is_aligned {
        let len = shape.iter().product::<u64>() as usize;
        return Ok(HostArray::new(shape, Arc::new(ImportedValues { tensor, len })));
    }
    if rule == CopyRule::Never {
        return Err(raise_one(py, refuse_copy("it is not in row-major order, or not aligned")));
    }
    // SAFETY: the tensor is one of f32 in host memory; the caller of `distribute` writes it after the call at most.
    Ok(HostArray::from_vec(shape, unsafe { tensor.copy_values() }))
}

/// Copies the values of an array, in row-major order.
fn copy_values(array: &Bound<'_, PyArrayDyn<f32>>) -> PyResult<Vec<f32>> {
    let is_aligned = (array.data() as usize).is_multiple_of(align_of::<f32>());
    let readable = match is_aligned {
        true => array.clone(),
        // The numbers of an unaligned array cannot be read in place.
        false => array.call_method1("copy", ("C",))?.cast_into::<PyArrayDyn<f32>>()?,
    };
    let values = readable.try_readonly()?.as_array().iter().copied().collect();
    Ok(values)
}

/// Makes an array read-only and returns its memory; `None` if it is not in row-major order, or if another array that
/// owns the memory can still be written.
#[allow(unsafe_code, reason = "it reads the address of numpy's memory")]
fn freeze(array: &Bound<'_, PyArrayDyn<f32>>) -> PyResult<Option<FrozenArray>> {
    let is_aligned = (array.data() as usize).is_multiple_of(align_of::<f32>());
    if !array.is_c_contiguous() || !is_aligned || owner_is_writeable(array)? {
        return Ok(None);
    }
    array.getattr("flags")?.setattr("writeable", false)?;
    Ok(Some(FrozenArray {
        address: array.data(),
        len: array.len(),
        _owner: array.clone().into_any().unbind(),
    }))
}

/// Returns whether memory that an array views belongs to something that can write it.
fn owner_is_writeable(array: &Bound<'_, PyArrayDyn<f32>>) -> PyResult<bool> {
    let mut owner = array.getattr("base")?;
    while !owner.is_none() {
        let Ok(base) = owner.cast::<PyUntypedArray>() else {
            // Memory of another library is shared only if its buffer offers no writes; one without a buffer may have other
            // owners.
            let buffer = array.py().import("builtins")?.call_method1("memoryview", (&owner,));
            return match buffer {
                Ok(buffer) => Ok(!buffer.getattr("readonly")?.extract::<bool>()?),
                Err(_) => Ok(true),
            };
        };
        if base.getattr("flags")?.getattr("writeable")?.extract()? {
            return Ok(true);
        }
        owner = base.getattr("base")?;
    }
    Ok(false)
}

/// The memory of a result, which the arrays that numpy sees keep alive.
#[pyclass(frozen, module = "tessera._native")]
struct ResultMemory {
    array: HostArray,
}

/// Returns a read-only numpy array over the memory of an array, without a copy.
#[allow(unsafe_code, reason = "numpy reads memory that Tessera owns")]
pub(crate) fn share_array<'py>(py: Python<'py>, array: &HostArray) -> PyResult<Bound<'py, PyAny>> {
    let owner = Bound::new(py, ResultMemory { array: array.clone() })?;
    let shape: Vec<usize> = array.shape().iter().map(|n| *n as usize).collect();
    let values = owner.get().array.values();
    let view = ArrayViewD::from_shape(IxDyn(&shape), values)
        .map_err(|e| pyo3::exceptions::PyValueError::new_err(e.to_string()))?;
    // SAFETY: the view is of memory that `owner` holds and never moves or writes, and numpy keeps `owner` as the base
    // of the array.
    let shared = unsafe { PyArray::borrow_from_array(&view, owner.clone().into_any()) };
    shared.getattr("flags")?.setattr("writeable", false)?;
    Ok(shared.into_any())
}
