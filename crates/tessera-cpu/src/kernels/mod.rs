//! Kernels as plain functions on f32 slices, row-major, last dim fastest.
//!
//! Shapes are those that a verified program guarantees, so a wrong length is a defect of the caller and
//! panics. NaN passes through every kernel: hiding one would hide a fault.

mod attention;
mod elementwise;
mod matmul;
mod norm;
mod pixels;
mod rope;

pub use attention::{KeyBias, attention};
pub use elementwise::{add, bias_act, renoise, silu, time_embed, to_x0};
pub use matmul::{Act, PackedWeight, Weight, matmul};
pub use norm::{Frames, gate_residual, layer_norm, norm_modulate, rms_norm, rms_scale, row_square_sum};
pub use pixels::{PixelGeometry, depth_to_space_time, space_time_to_depth};
pub use rope::{RopeCache, RopeSpec, RopeTables, rope};

use crate::simd::Aligned;
use std::sync::{Mutex, PoisonError};

/// Memory that kernels reuse from call to call. One per thread of control; it grows to the largest call.
#[derive(Debug, Default)]
pub struct Scratch {
    packed: Aligned,
    staged: Aligned,
    spare: Mutex<Vec<Aligned>>,
}

impl Scratch {
    /// Empty; the first calls grow it.
    #[must_use]
    pub fn new() -> Scratch {
        Scratch::default()
    }
}

/// Lends a buffer of `len` elements to `f`, of unspecified content.
fn borrow_buffer<R>(spare: &Mutex<Vec<Aligned>>, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // A poisoned lock means that another block panicked; the buffers are still only buffers.
    let mut buffer = spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let result = f(buffer.take(len));
    spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    result
}
