//! Memory of Tessera that other libraries read by DLPack.

#![allow(unsafe_code, reason = "structs that other libraries read and free")]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::dlpack_abi::{
    DlDevice, DlTensor, DlType, IS_COPIED, ManagedTensor, READ_ONLY, UNVERSIONED, VERSION, VERSIONED,
    VersionedTensor,
};

/// Memory that leaves by DLPack: f32 elements, and what keeps them alive.
pub(crate) struct ExportedMemory {
    /// Address of the first element.
    pub(crate) address: u64,
    pub(crate) device: DlDevice,
    pub(crate) shape: Vec<u64>,
    /// Elements from one index of each dim to the next.
    pub(crate) strides: Vec<i64>,
    /// Dropped by the deleter, on any thread.
    pub(crate) owner: Box<dyn Any + Send + Sync>,
    /// Whether the memory was made for the consumer, who may write it.
    pub(crate) is_copy: bool,
}

/// What the deleter frees: the owner, and the arrays to which the tensor points.
struct Exported {
    shape: Vec<i64>,
    strides: Vec<i64>,
    #[allow(dead_code, reason = "keeps the memory alive")]
    owner: Box<dyn Any + Send + Sync>,
}

/// Makes the capsule of a tensor. A consumer of DLPack 1.0 or later learns by a flag whether it may write; one that
/// states no version gets a tensor without flags, and must not write either.
pub(crate) fn export_memory(
    py: Python<'_>,
    memory: ExportedMemory,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'_, PyAny>> {
    let flags = if memory.is_copy { IS_COPIED } else { READ_ONLY };
    let signed = |extents: &[u64]| extents.iter().map(|n| *n as i64).collect::<Vec<i64>>();
    let mut exported =
        Box::new(Exported { shape: signed(&memory.shape), strides: memory.strides, owner: memory.owner });
    let tensor = DlTensor {
        data: memory.address as *mut c_void,
        device: memory.device,
        dim_count: exported.shape.len() as i32,
        dtype: DlType::F32,
        shape: exported.shape.as_mut_ptr(),
        strides: exported.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(exported).cast::<c_void>();
    // The vectors keep their addresses when the box moves.
    match max_version {
        Some((major, _)) if major >= VERSION.major => {
            let deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)> = Some(delete_versioned);
            let managed = VersionedTensor { version: VERSION, context, deleter, flags, tensor };
            make_capsule(py, Box::new(managed), VERSIONED, destroy_versioned, delete_versioned)
        }
        _ => {
            let deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)> = Some(delete_unversioned);
            let managed = ManagedTensor { tensor, context, deleter };
            make_capsule(py, Box::new(managed), UNVERSIONED, destroy_unversioned, delete_unversioned)
        }
    }
}

fn make_capsule<'py, T>(
    py: Python<'py>,
    managed: Box<T>,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
    deleter: unsafe extern "C" fn(*mut T),
) -> PyResult<Bound<'py, PyAny>> {
    let raw = NonNull::from(Box::leak(managed));
    // SAFETY: the struct lives until its deleter is called, which the destructor does unless a consumer has; both
    // may run on any thread.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, raw.cast::<c_void>(), name, Some(destructor))
    };
    match capsule {
        Ok(capsule) => Ok(capsule.into_any()),
        Err(e) => {
            // SAFETY: no capsule refers to the struct, whose deleter this is.
            unsafe { deleter(raw.as_ptr()) };
            Err(e)
        }
    }
}

/// Frees a tensor; consumers call it once.
///
/// # Safety
/// The pointer must come from [`export_memory`], and be used for the last time.
unsafe extern "C" fn delete_versioned(managed: *mut VersionedTensor) {
    // SAFETY: the caller guarantees that both boxes were made by `export_memory` and are used no more.
    unsafe {
        let managed = Box::from_raw(managed);
        free_exported(Box::from_raw(managed.context.cast::<Exported>()));
    }
}

/// Frees a tensor without flags; consumers call it once.
///
/// # Safety
/// As [`delete_versioned`].
unsafe extern "C" fn delete_unversioned(managed: *mut ManagedTensor) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let managed = Box::from_raw(managed);
        free_exported(Box::from_raw(managed.context.cast::<Exported>()));
    }
}

/// Frees what a tensor points to. A Python object may own the memory; without the interpreter's lock it would be let go
/// at the next call of this package only.
fn free_exported(exported: Box<Exported>) {
    let mut exported = Some(exported);
    Python::try_attach(|_| drop(exported.take()));
}

/// Frees the tensor of a capsule that no consumer took.
///
/// # Safety
/// The interpreter calls it with a capsule of [`export_memory`].
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule; one whose tensor was taken has another name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// Frees the tensor without flags of a capsule that no consumer took.
///
/// # Safety
/// As [`destroy_versioned`].
unsafe extern "C" fn destroy_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `destroy_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete_unversioned(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()).cast());
        }
    }
}
