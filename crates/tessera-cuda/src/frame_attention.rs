//! Attention with one head of many channels, in which the cells of a frame attend to each other.

#![allow(unsafe_code, reason = "launches of kernels on raw addresses")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use tessera_ir::{DType, Program, views};

use crate::compile::Compiler;
use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::kernel_params::{Bf16, DevicePtr, LoadedKernel, kernel_signatures};
use crate::kernels::COMMON;

const SOURCE: &str = include_str!("kernels/frame_attention.cu");

kernel_signatures! {
    FRAME_ATTENTION_TABLE:

    /// softmax(q · kᵀ · scale) · v for one head.
    FrameAttention {
        q: DevicePtr<Bf16>, k: DevicePtr<Bf16>, v: DevicePtr<Bf16>, out: DevicePtr<Bf16>, cells: i32,
    } = FRAME_ATTENTION "frame_attention";
}

// The next three constants must equal those of the kernel.

/// Queries per block, and keys per step.
const BLOCK_ROWS: u64 = 64;
const THREADS: u32 = 256;
/// Channels with which the accumulators fit into registers.
const MAX_CHANNELS: u64 = 384;

/// The kernels that were compiled for one device, by number of channels.
#[derive(Debug, Default)]
pub(crate) struct FrameAttentions {
    kernels: BTreeMap<u64, LoadedKernel<FrameAttention>>,
}

/// Extents of an attention within a frame, and the addresses of its operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameAttentionWork {
    pub(crate) cells: u64,
    pub(crate) channels: u64,
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) out: u64,
}

/// Returns whether the kernel supports an attention whose operands are frames.
pub(crate) fn is_supported(p: &Program, v: &views::Attention) -> bool {
    let (q, k) = (p.type_of(v.q), p.type_of(v.k));
    let channels = v.head_dim;
    q.dtype == DType::Bf16
        && q.shape.last() == Some(&channels)
        && q.shape == k.shape
        && v.bias.is_none()
        && channels.is_multiple_of(32)
        && channels <= MAX_CHANNELS
}

impl FrameAttentions {
    /// Compiles the kernel for a number of channels on first use.
    pub(crate) fn prepare_kernel(&mut self, compiler: &mut Compiler, channels: u64) -> CudaResult<()> {
        if let Entry::Vacant(place) = self.kernels.entry(channels) {
            let module =
                compiler.compile_module("frame_attention", &kernel_source(), &compile_defines(channels))?;
            let kernel = LoadedKernel::new(&module, FRAME_ATTENTION)?;
            kernel.set_max_shared_bytes(shared_bytes(channels))?;
            place.insert(kernel);
        }
        Ok(())
    }

    /// Launches an attention.
    ///
    /// # Safety
    /// Every operand must be device memory of cells × channels elements. All must stay allocated until
    /// the stream has completed the work; meanwhile no other stream may write the inputs or access the
    /// result.
    pub(crate) unsafe fn launch_attention(
        &self,
        work: &FrameAttentionWork,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let Some(kernel) = self.kernels.get(&work.channels) else {
            let what = format!("no attention kernel was compiled for {} channels", work.channels);
            return Err(CudaError(what));
        };
        let args = FrameAttention {
            q: work.q.into(),
            k: work.k.into(),
            v: work.v.into(),
            out: work.out.into(),
            cells: work.cells as i32,
        };
        let blocks = work.cells.div_ceil(BLOCK_ROWS) as u32;
        // SAFETY: the caller guarantees the operands; the kernel was compiled for these channels.
        unsafe { kernel.launch([blocks, 1, 1], THREADS, shared_bytes(work.channels), &args, stream) }
    }
}

/// Returns the bytes of queries, keys and values in shared memory, each with a padding of 8 elements.
fn shared_bytes(channels: u64) -> u32 {
    (3 * BLOCK_ROWS * (channels + 8) * 2) as u32
}

/// Returns the kernel's source.
pub(crate) fn kernel_source() -> String {
    format!("{COMMON}{SOURCE}")
}

/// Returns the kernel's macros.
pub(crate) fn compile_defines(channels: u64) -> [(&'static str, String); 1] {
    [("HEAD", channels.to_string())]
}
