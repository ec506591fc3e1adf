//! Maps of tensors, by which the copy engine brings boxes of them into shared memory.

#![allow(unsafe_code, reason = "the driver writes a map")]

use cudarc::driver::sys;

use crate::driver::{Done, Failed};

/// Elements of bf16 that a box is wide: the engine swizzles no more than 128 bytes.
pub(crate) const BOX_COLUMNS: u64 = 64;

/// A map of bf16 at an address: extents from the innermost dim on, bytes from one to the next of all dims but the innermost,
/// and a box's extents. What a box has beyond the extents is zeros.
pub(crate) fn map<const N: usize>(
    at: u64,
    extents: [u64; N],
    strides: &[u64],
    box_of: [u32; N],
) -> Done<sys::CUtensorMap> {
    assert_eq!(strides.len() + 1, N, "a map has a stride for each dim but the innermost");
    let steps = [1_u32; N];
    // SAFETY: the map is written before it is read; plain words have no invalid bits.
    let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: all arrays have as many entries as the map has dims, or one less for strides.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            N as u32,
            at as *mut std::ffi::c_void,
            extents.as_ptr(),
            strides.as_ptr(),
            box_of.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    let told = |e| Failed(format!("a map of {extents:?} in boxes of {box_of:?}: {}", Failed::from(e)));
    made.result().map_err(told)?;
    Ok(map)
}
