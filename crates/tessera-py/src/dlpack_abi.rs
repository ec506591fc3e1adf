//! The structs of DLPack 1.0, by which array libraries of one process hand each other memory, as dlpack.h declares
//! them.

use std::ffi::{CStr, c_void};

/// A capsule of this name holds a [`ManagedTensor`] that no consumer has taken.
pub(crate) const UNVERSIONED: &CStr = c"dltensor";
/// The name that a consumer gives the capsule of which it has taken the tensor.
pub(crate) const USED_UNVERSIONED: &CStr = c"used_dltensor";
/// As [`UNVERSIONED`], for a [`VersionedTensor`].
pub(crate) const VERSIONED: &CStr = c"dltensor_versioned";
/// As [`USED_UNVERSIONED`], for a [`VersionedTensor`].
pub(crate) const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// The version that this package writes. A reader understands every minor version of its major one.
pub(crate) const VERSION: DlVersion = DlVersion { major: 1, minor: 0 };

/// Flag: the consumer may not write the memory.
pub(crate) const READ_ONLY: u64 = 1;
/// Flag: the memory is a copy that the producer made for this tensor.
pub(crate) const IS_COPIED: u64 = 2;

/// Memory of this host.
pub(crate) const HOST: i32 = 1;
/// Memory of an NVIDIA GPU.
pub(crate) const GPU: i32 = 2;
/// Memory of this host that an NVIDIA GPU reads too.
pub(crate) const PINNED_HOST: i32 = 3;

/// Code of floating-point numbers of IEEE 754.
pub(crate) const FLOAT: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlVersion {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlDevice {
    /// Kind, such as [`HOST`].
    pub(crate) kind: i32,
    /// Index among the visible devices of the kind.
    pub(crate) index: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct DlType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    /// Numbers of an element, for vectors.
    pub(crate) lanes: u16,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: DlDevice,
    pub(crate) dim_count: i32,
    pub(crate) dtype: DlType,
    pub(crate) shape: *mut i64,
    /// Elements from one index of each dim to the next; null for a row-major tensor.
    pub(crate) strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub(crate) byte_offset: u64,
}

/// A tensor without a version and flags.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ManagedTensor {
    pub(crate) tensor: DlTensor,
    pub(crate) context: *mut c_void,
    /// Frees the tensor and this struct.
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// A tensor of DLPack 1.0 and later.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct VersionedTensor {
    pub(crate) version: DlVersion,
    pub(crate) context: *mut c_void,
    /// Frees the tensor and this struct.
    pub(crate) deleter: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    pub(crate) flags: u64,
    pub(crate) tensor: DlTensor,
}

impl DlType {
    pub(crate) const F32: DlType = DlType { code: FLOAT, bits: 32, lanes: 1 };

    /// Returns the name by which numpy and torch call the type.
    pub(crate) fn name(self) -> String {
        let kind = match self.code {
            0 => "int",
            1 => "uint",
            FLOAT => "float",
            3 => "opaque",
            4 => "bfloat",
            5 => "complex",
            6 => "bool",
            code => return format!("DLPack type {code} of {} bits", self.bits),
        };
        let vector = if self.lanes == 1 { String::new() } else { format!("x{}", self.lanes) };
        format!("{kind}{}{vector}", self.bits)
    }
}
