//! Memory that numpy and Tessera share: an array that a user passes in, and an array that a run returns.

use std::sync::Arc;

use numpy::ndarray::{ArrayViewD, IxDyn};
use numpy::{
    PyArray, PyArrayDescrMethods, PyArrayDyn, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::prelude::*;
use tessera::arrays::HostArray;
use tessera_base::Diagnostic;
use tessera_cli::codes::T1502;

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

/// Takes an array of f32. Where it may be shared, an array in row-major order becomes read-only; any other is copied.
///
/// # Errors
/// T1502 for another dtype.
pub(crate) fn take_array(array: &Bound<'_, PyAny>, share: Sharing) -> PyResult<HostArray> {
    let py = array.py();
    let untyped = match array.cast::<PyUntypedArray>() {
        Ok(untyped) => untyped.clone(),
        Err(_) => py.import("numpy")?.call_method1("asarray", (array,))?.cast_into::<PyUntypedArray>()?,
    };
    if !untyped.dtype().is_equiv_to(&dtype::<f32>(py)) {
        let found = untyped.dtype().to_string();
        return Err(raise_one(
            py,
            Diagnostic::error(&T1502, format!("an array of {found}, where programs take float32"))
                .with_hint("convert it with array.astype(numpy.float32)"),
        ));
    }
    let shape: Vec<u64> = untyped.shape().iter().map(|n| *n as u64).collect();
    let array = untyped.cast::<PyArrayDyn<f32>>()?;
    match share {
        Sharing::IfPossible if let Some(frozen) = freeze(array)? => {
            Ok(HostArray::new(shape, Arc::new(frozen)))
        }
        Sharing::IfPossible | Sharing::Never => Ok(HostArray::from_vec(shape, copy_values(array)?)),
    }
}

/// Whether an array that is taken may share its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// It is shared and becomes read-only, if nothing else can write it.
    IfPossible,
    /// It is copied, and stays as it is.
    Never,
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
