//! Rounds elements of tensors to their dtype and uploads them.

use tessera_device::{FingerprintHasher, dtype};
use tessera_ir::DType;

use crate::device_memory::{DeviceSlice, copy_to_device};
use crate::driver::CudaResult;

/// Elements per upload. Chunking lets the host convert one chunk while it hashes and uploads, and
/// avoids a second full copy of a tensor in host memory.
const UPLOAD_ELEMENTS: usize = 16 << 20;

/// Rounds elements to a dtype and uploads them.
pub(super) fn upload_rounded(to: DeviceSlice<'_, u8>, dtype: DType, data: &[f32]) -> CudaResult<()> {
    round_and_upload(to, dtype, data, None)
}

/// Uploads elements like [`upload_rounded`], and adds the uploaded bytes to a hash, which audits compare
/// with the device.
pub(super) fn round_and_upload(
    to: DeviceSlice<'_, u8>,
    dtype: DType,
    data: &[f32],
    mut hash: Option<&mut FingerprintHasher>,
) -> CudaResult<()> {
    let (width, mut bytes) = (dtype.element_bytes() as usize, Vec::new());
    for (i, part) in data.chunks(UPLOAD_ELEMENTS).enumerate() {
        bytes.resize(part.len() * width, 0);
        round_to_dtype(dtype, part, &mut bytes);
        // One core hashes while another uploads.
        std::thread::scope(|s| {
            if let Some(hash) = &mut hash {
                s.spawn(|| hash.update_raw(&bytes, dtype));
            }
            copy_to_device(to.sub_slice(i * UPLOAD_ELEMENTS * width, bytes.len())?, &bytes)
        })?;
    }
    Ok(())
}

/// Rounds elements to a dtype, little-endian, on all cores: one core would take half a minute for
/// 14 billion elements.
pub(super) fn round_to_dtype(dtype: DType, from: &[f32], to: &mut [u8]) {
    let width = dtype.element_bytes() as usize;
    let one = |from: &[f32], to: &mut [u8]| match dtype {
        DType::Bf16 => {
            to.as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(from)
                .for_each(|(o, v)| *o = dtype::to_bf16_bits(*v).to_le_bytes());
        }
        DType::E4m3 => to.iter_mut().zip(from).for_each(|(o, v)| *o = dtype::to_e4m3_bits(*v)),
        _ => to.as_chunks_mut::<4>().0.iter_mut().zip(from).for_each(|(o, v)| *o = v.to_le_bytes()),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = from.len().div_ceil(cores).max(64 << 10);
    if share >= from.len() {
        return one(from, to);
    }
    std::thread::scope(|s| {
        for (from, to) in from.chunks(share).zip(to.chunks_mut(share * width)) {
            s.spawn(move || one(from, to));
        }
    });
}
