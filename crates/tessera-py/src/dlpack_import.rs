//! Tensors of other libraries that arrive by DLPack.

#![allow(unsafe_code, reason = "structs and memory of other libraries")]

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use crate::dlpack_abi::{
    DlTensor, DlType, ManagedTensor, UNVERSIONED, USED_UNVERSIONED, USED_VERSIONED, VERSION, VERSIONED,
    VersionedTensor,
};

/// A tensor of another library, which calls the library's deleter once, when it is dropped.
#[derive(Debug)]
pub(crate) struct ImportedTensor {
    managed: Managed,
    shape: Vec<u64>,
    strides: Vec<i64>,
}

#[derive(Debug)]
enum Managed {
    Unversioned(NonNull<ManagedTensor>),
    Versioned(NonNull<VersionedTensor>),
}

// SAFETY: the struct behind the pointer belongs to this value alone and is only read; DLPack lets a consumer call
// the deleter on any thread, and `drop` holds the interpreter's lock during the call.
unsafe impl Send for ImportedTensor {}
// SAFETY: as above.
unsafe impl Sync for ImportedTensor {}

/// Returns the kind and the index of the device on which an object's memory lies; `None` if the object does not hand
/// it out by DLPack.
pub(crate) fn find_device(value: &Bound<'_, PyAny>) -> PyResult<Option<(i32, i32)>> {
    match value.hasattr("__dlpack__")? && value.hasattr("__dlpack_device__")? {
        true => Ok(Some(value.call_method0("__dlpack_device__")?.extract()?)),
        false => Ok(None),
    }
}

/// Takes the tensor of an object. On a GPU, `stream` is the handle of the stream that must wait for the values.
pub(crate) fn import_tensor(value: &Bound<'_, PyAny>, stream: Option<u64>) -> PyResult<ImportedTensor> {
    let py = value.py();
    let options = PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item("stream", stream)?;
    }
    let plain = options.copy()?;
    options.set_item("max_version", (VERSION.major, VERSION.minor))?;
    let capsule = match value.call_method("__dlpack__", (), Some(&options)) {
        // Libraries of DLPack before 1.0 do not know the argument.
        Err(e) if e.is_instance_of::<PyTypeError>(py) => value.call_method("__dlpack__", (), Some(&plain))?,
        capsule => capsule?,
    };
    ImportedTensor::take(&capsule.cast_into::<PyCapsule>()?)
}

impl ImportedTensor {
    fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<ImportedTensor> {
        let managed = if let Some(managed) = take_pointer(capsule, VERSIONED, USED_VERSIONED)? {
            Managed::Versioned(managed)
        } else if let Some(managed) = take_pointer(capsule, UNVERSIONED, USED_UNVERSIONED)? {
            Managed::Unversioned(managed)
        } else {
            return Err(PyBufferError::new_err("the DLPack capsule was consumed before, or holds no tensor"));
        };
        // From here on the deleter is called, also after an error.
        let mut taken = ImportedTensor { managed, shape: Vec::new(), strides: Vec::new() };
        if let Managed::Versioned(managed) = &taken.managed {
            // SAFETY: the version is the first field in every version, and the struct lives until the deleter is called.
            let version = unsafe { managed.as_ref() }.version;
            if version.major != VERSION.major {
                let (major, minor) = (version.major, version.minor);
                let message = format!("a tensor of DLPack {major}.{minor}, where 1.0 was asked for");
                return Err(PyBufferError::new_err(message));
            }
        }
        let tensor = *taken.as_tensor();
        let count = usize::try_from(tensor.dim_count)
            .map_err(|_| PyBufferError::new_err(format!("a tensor of {} dims", tensor.dim_count)))?;
        // SAFETY: DLPack promises `dim_count` extents, and strides unless the pointer is null.
        let (shape, strides) =
            unsafe { (copy_array(tensor.shape, count), copy_array(tensor.strides, count)) };
        let Some(shape) =
            shape.iter().flatten().map(|n| u64::try_from(*n).ok()).collect::<Option<Vec<u64>>>()
        else {
            return Err(PyBufferError::new_err(format!("a tensor of shape {shape:?}")));
        };
        taken.strides = strides.unwrap_or_else(|| row_major_strides(&shape));
        taken.shape = shape;
        Ok(taken)
    }

    /// Extents, outermost first.
    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Elements from one index of each dim to the next.
    pub(crate) fn strides(&self) -> &[i64] {
        &self.strides
    }

    pub(crate) fn dtype(&self) -> DlType {
        self.as_tensor().dtype
    }

    /// Returns the address of the first element.
    pub(crate) fn address(&self) -> u64 {
        let tensor = self.as_tensor();
        tensor.data as u64 + tensor.byte_offset
    }

    /// Returns whether the elements lie in row-major order without gaps.
    pub(crate) fn is_row_major(&self) -> bool {
        let expected = row_major_strides(&self.shape);
        let dims = self.shape.iter().zip(self.strides.iter().zip(&expected));
        self.shape.contains(&0) || dims.into_iter().all(|(n, (found, expected))| *n == 1 || found == expected)
    }

    /// Copies the elements of a tensor of f32 in host memory, in row-major order.
    ///
    /// # Safety
    /// The tensor must have this type and lie in host memory, and nobody may write it during the call.
    pub(crate) unsafe fn copy_values(&self) -> Vec<f32> {
        let count: u64 = self.shape.iter().product();
        let mut values = Vec::with_capacity(count as usize);
        let mut index = vec![0u64; self.shape.len()];
        for _ in 0..count {
            let steps = index.iter().zip(&self.strides).map(|(i, stride)| *i as i64 * stride);
            let at = (self.address() as *const f32).wrapping_offset(steps.sum::<i64>() as isize);
            // SAFETY: the index lies within the shape, so the element belongs to the tensor.
            values.push(unsafe { at.read_unaligned() });
            for dim in (0..index.len()).rev() {
                index[dim] += 1;
                if index[dim] < self.shape[dim] {
                    break;
                }
                index[dim] = 0;
            }
        }
        values
    }

    /// Returns the number of elements from the first to the last, with those between them; `None` if a stride is
    /// negative or the number exceeds every memory.
    pub(crate) fn span(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut steps = self.shape.iter().zip(&self.strides).map(|(extent, stride)| {
            usize::try_from(*stride).ok()?.checked_mul(usize::try_from(extent - 1).ok()?)
        });
        steps.try_fold(1usize, |all, step| all.checked_add(step?))
    }

    fn as_tensor(&self) -> &DlTensor {
        match &self.managed {
            // SAFETY: `take` took the struct from its capsule, and it lives until the deleter is called.
            Managed::Unversioned(managed) => unsafe { &managed.as_ref().tensor },
            // SAFETY: as above.
            Managed::Versioned(managed) => unsafe { &managed.as_ref().tensor },
        }
    }
}

impl Drop for ImportedTensor {
    fn drop(&mut self) {
        // A library may forget to take the interpreter's lock in its deleter. An interpreter that ends frees its memory
        // without it.
        let _ = Python::try_attach(|_| match &self.managed {
            // SAFETY: this value owns the struct, and uses it for the last time.
            Managed::Unversioned(managed) => unsafe {
                managed.as_ref().deleter.into_iter().for_each(|delete| delete(managed.as_ptr()));
            },
            // SAFETY: as above.
            Managed::Versioned(managed) => unsafe {
                managed.as_ref().deleter.into_iter().for_each(|delete| delete(managed.as_ptr()));
            },
        });
    }
}

/// Takes the pointer of a capsule of a name, and renames the capsule so that its destructor leaves the struct alone.
/// Returns `None` for a capsule of another name.
fn take_pointer<T>(
    capsule: &Bound<'_, PyCapsule>,
    name: &CStr,
    used: &'static CStr,
) -> PyResult<Option<NonNull<T>>> {
    let (py, raw) = (capsule.py(), capsule.as_ptr());
    // SAFETY: the object is a capsule, both names end with NUL, and `used` lives as long as the process.
    unsafe {
        if ffi::PyCapsule_IsValid(raw, name.as_ptr()) == 0 {
            return Ok(None);
        }
        let pointer = NonNull::new(ffi::PyCapsule_GetPointer(raw, name.as_ptr()));
        if pointer.is_none() || ffi::PyCapsule_SetName(raw, used.as_ptr()) != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(pointer.map(NonNull::cast))
    }
}

/// Copies an array of C; `None` if the pointer is null and the array is not empty.
///
/// # Safety
/// A pointer that is not null must be that of `count` numbers.
unsafe fn copy_array(at: *const i64, count: usize) -> Option<Vec<i64>> {
    match (at.is_null(), count) {
        (_, 0) => Some(Vec::new()),
        (true, _) => None,
        // SAFETY: the caller guarantees it.
        (false, _) => Some(unsafe { std::slice::from_raw_parts(at, count) }.to_vec()),
    }
}

/// Returns the strides of a row-major array without gaps, in elements.
pub(crate) fn row_major_strides(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim] as i64);
    }
    strides
}
