//! TMA descriptors (tensor maps), with which kernels load boxes of a tensor into shared memory.

#![allow(unsafe_code, reason = "the driver writes the descriptor")]

use cudarc::driver::sys;
use tessera_ir::DType;

use crate::driver::{CudaError, CudaResult};

/// Columns of bf16 per box: the swizzle covers at most 128 bytes.
pub(crate) const BOX_COLUMNS: u64 = 64;

/// Columns of e4m3 per box.
pub(crate) const E4M3_BOX_COLUMNS: u64 = 128;

/// Builds a TMA descriptor of a bf16 tensor. `extents` start with the innermost dim, `strides` are
/// in bytes and omit the innermost dim, and `box_of` holds a box's extents. Elements outside the
/// tensor are loaded as zeros.
pub(crate) fn encode_tensor_map<const N: usize>(
    address: u64,
    extents: [u64; N],
    strides: &[u64],
    box_extents: [u32; N],
) -> CudaResult<sys::CUtensorMap> {
    encode_strided_tensor_map(DType::Bf16, address, extents, strides, box_extents, [1; N])
}

/// Like [`encode_tensor_map`], for bf16 or e4m3, but a box holds every `steps`th element of each dim of
/// `box_extents`.
pub(crate) fn encode_strided_tensor_map<const N: usize>(
    dtype: DType,
    address: u64,
    extents: [u64; N],
    strides: &[u64],
    box_extents: [u32; N],
    steps: [u32; N],
) -> CudaResult<sys::CUtensorMap> {
    assert_eq!(strides.len() + 1, N, "a tensor map needs a stride for each dim but the innermost");
    let element = match dtype {
        DType::E4m3 => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        _ => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    // SAFETY: the driver writes the descriptor before it is read; plain integers have no invalid
    // bits.
    let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: all arrays have as many entries as the tensor has dims, `strides` one less.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            element,
            N as u32,
            address as *mut std::ffi::c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            box_extents.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    let to_error = |e| {
        CudaError(format!("tensor map of {extents:?} in boxes of {box_extents:?}: {}", CudaError::from(e)))
    };
    status.result().map_err(to_error)?;
    Ok(map)
}
