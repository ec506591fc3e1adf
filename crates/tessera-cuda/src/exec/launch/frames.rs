//! Ops on frames [t, h, w, c], channels last.

use tessera_ir::{DType, Type, ValueId, views};

use super::StepWork;
use super::attention::build_plain_attention;
use super::elementwise::kernel_for_dtype;
use super::site::{LaunchSite, last_extent};
use crate::conv::{ConvOperands, ConvSm90};
use crate::conv_shape::ConvShape;
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_params::Kernel;
use crate::kernel_table::{
    CLAMP_BF16, CLAMP_F32, CONV_BF16, CONV_F32, Clamp, FRAME_ATTENTION, FrameAttention,
    NORMALISE_CELLS_BF16_1X32, NORMALISE_CELLS_BF16_8X16, NORMALISE_CELLS_BF16_8X32,
    NORMALISE_CELLS_E4M3_8X16, NORMALISE_CELLS_E4M3_8X32, NORMALISE_CELLS_F32_1X32, NORMALISE_CELLS_F32_4X32,
    NormaliseCells, PATCH_CELLS_2, PATCH_CELLS_4, PatchCells, PlainConv, REPEAT_CELLS_2, REPEAT_CELLS_4,
    REPEAT_CELLS_16, RepeatCells, SCALE_SHIFT_BF16, SCALE_SHIFT_F32, SPLIT_CHANNELS_2, SPLIT_CHANNELS_4,
    SPLIT_CHANNELS_16, ScaleShift, SplitChannels,
};
use crate::kernels::{HeadBlocks, KernelLaunch};

type Built = CudaResult<KernelLaunch>;

/// A convolution that the sm90 kernel supports, and its plain launch for devices without that kernel.
#[derive(Debug)]
pub(in crate::exec) struct ConvWork {
    pub(in crate::exec) dtype: DType,
    pub(in crate::exec) shape: ConvShape,
    pub(in crate::exec) operands: ConvOperands,
    pub(in crate::exec) has_residual: bool,
    /// `None` for e4m3, which no plain kernel multiplies.
    pub(super) plain: Option<KernelLaunch>,
}

/// Cells of the result that one block of the plain kernel computes, and their channels, as in frames.cu.
const PLAIN_CELLS: u64 = 64;
const PLAIN_CHANNELS: u64 = 32;

/// Queries of a block of the attention kernel, and keys that it reads at a time; the heads that it supports
/// have a multiple of so many channels, up to as many as fit into registers. As in frame_attention.cu.
const ATTENTION_ROWS: u64 = 64;
const ATTENTION_CHANNEL_STEP: u64 = 32;
const MAX_ATTENTION_CHANNELS: u64 = 384;

/// Builds a convolution whose result, plus the residual if there is one, goes to `out`.
pub(super) fn build_conv(
    s: &LaunchSite<'_>,
    v: &views::Conv3d,
    made: ValueId,
    sum: Option<(ValueId, ValueId)>,
) -> CudaResult<StepWork> {
    let (dtype, shape) = (s.p.type_of(v.x).dtype, ConvShape::from_op(s.p, v, made));
    let (residual, out) = (sum.map(|(r, _)| r), sum.map_or(made, |(_, out)| out));
    let operands = ConvOperands {
        x: s.at(v.x)?,
        history: s.at_optional(v.history)?,
        halo: s.at_optional(v.halo)?,
        w: s.at(v.w)?,
        scale: s.at_optional(v.w_scale)?,
        bias: s.at_optional(v.bias)?,
        residual: s.at_optional(residual)?,
        out: s.at(out)?,
    };
    let has_residual = residual.is_some();
    if dtype == DType::E4m3 {
        let work = ConvWork { dtype, shape, operands, has_residual, plain: None };
        return match ConvSm90::is_supported(dtype, &shape) {
            true => Ok(StepWork::Conv(Box::new(work))),
            false => cuda_failure("a convolution in e4m3 of channels that are no multiple of 16"),
        };
    }
    let args = PlainConv {
        x: operands.x.into(),
        history: operands.history.into(),
        halo: operands.halo.into(),
        w: operands.w.into(),
        bias: operands.bias.into(),
        residual: operands.residual.into(),
        out: operands.out.into(),
        shape,
    };
    let blocks = shape.cell_count().div_ceil(PLAIN_CELLS) * shape.out_channels().div_ceil(PLAIN_CHANNELS);
    let plain = KernelLaunch::blocks(kernel_for_dtype(dtype, CONV_F32, CONV_BF16), (blocks, 256, 0), args);
    if !ConvSm90::is_supported(dtype, &shape) {
        return Ok(StepWork::Kernel(plain));
    }
    Ok(StepWork::Conv(Box::new(ConvWork { dtype, shape, operands, has_residual, plain: Some(plain) })))
}

/// Builds a norm over the channels of each cell, and SiLU after it if `silu` is its result.
pub(super) fn build_norm(s: &LaunchSite<'_>, v: &views::RmsNorm, out: ValueId, is_silu: bool) -> Built {
    super::site::refuse_segments(v.segments)?;
    let ty = s.p.type_of(v.x);
    let channels = last_extent(ty);
    let cells = ty.element_count() / channels.max(1);
    let (kernel, lanes) = match (ty.dtype, s.p.type_of(out).dtype, channels) {
        (DType::Bf16, DType::E4m3, c) if c % 8 == 0 && c <= 128 => (NORMALISE_CELLS_E4M3_8X16, 16),
        (DType::Bf16, DType::E4m3, c) if c % 8 == 0 => (NORMALISE_CELLS_E4M3_8X32, 32),
        (dtype, DType::E4m3, c) => {
            return cuda_failure(format!("a norm of {c} channels from {dtype} to e4m3"));
        }
        (DType::Bf16, _, c) if c % 8 == 0 && c <= 128 => (NORMALISE_CELLS_BF16_8X16, 16),
        (DType::Bf16, _, c) if c % 8 == 0 => (NORMALISE_CELLS_BF16_8X32, 32),
        (DType::Bf16, ..) => (NORMALISE_CELLS_BF16_1X32, 32),
        (_, _, c) if c % 4 == 0 => (NORMALISE_CELLS_F32_4X32, 32),
        _ => (NORMALISE_CELLS_F32_1X32, 32),
    };
    let args = NormaliseCells {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        out: s.at(out)?,
        channels: channels as i32,
        eps: v.eps as f32,
        is_silu: i32::from(is_silu),
        cells: cells as i64,
    };
    Ok(KernelLaunch::elements(kernel, cells * lanes, args))
}

/// Builds attention of the cells of a frame. No library supports a head of so many channels.
pub(super) fn build_attention(s: &LaunchSite<'_>, v: &views::Attention, out: ValueId) -> Built {
    let (q, k) = (s.p.type_of(v.q), s.p.type_of(v.k));
    let has_one_head = last_extent(q) == v.head_dim && q.shape == k.shape && v.bias.is_none();
    let fits = v.head_dim.is_multiple_of(ATTENTION_CHANNEL_STEP) && v.head_dim <= MAX_ATTENTION_CHANNELS;
    if q.dtype != DType::Bf16 || !has_one_head || !fits {
        return build_plain_attention(s, v, out);
    }
    let cells = q.element_count() / v.head_dim;
    let args =
        FrameAttention { q: s.at(v.q)?, k: s.at(v.k)?, v: s.at(v.v)?, out: s.at(out)?, cells: cells as i32 };
    let blocks = HeadBlocks {
        count: cells.div_ceil(ATTENTION_ROWS),
        threads: 256,
        // Queries, keys and values, whose rows are 8 elements longer than a head.
        shared_bytes: (3 * ATTENTION_ROWS * (v.head_dim + 8) * 2) as u32,
    };
    Ok(KernelLaunch::for_heads(FRAME_ATTENTION, v.head_dim, blocks, args))
}

pub(super) fn build_upsample(s: &LaunchSite<'_>, v: &views::UpsampleNearest, out: ValueId) -> Built {
    let ty = s.p.type_of(out);
    let (kernel, words) = word_kernel(ty, last_extent(ty), [REPEAT_CELLS_16, REPEAT_CELLS_4, REPEAT_CELLS_2]);
    let n = ty.element_count() / last_extent(ty).max(1) * words;
    let args = RepeatCells {
        x: s.at(v.x)?,
        out: s.at(out)?,
        height: ty.shape[1] as i32,
        width: ty.shape[2] as i32,
        row_scale: v.scale[0] as i32,
        column_scale: v.scale[1] as i32,
        words: words as i32,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel, n, args))
}

pub(super) fn build_channels_to_frames(
    s: &LaunchSite<'_>,
    v: &views::ChannelsToFrames,
    out: ValueId,
) -> Built {
    let ty = s.p.type_of(out);
    let kernels = [SPLIT_CHANNELS_16, SPLIT_CHANNELS_4, SPLIT_CHANNELS_2];
    let (kernel, words) = word_kernel(ty, last_extent(ty), kernels);
    let n = ty.element_count() / last_extent(ty).max(1) * words;
    let args = SplitChannels {
        x: s.at(v.x)?,
        out: s.at(out)?,
        parts: v.parts as i32,
        cells: (ty.shape[1] * ty.shape[2]) as i32,
        words: words as i32,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel, n, args))
}

/// Builds the conversion of a grid to the tokens of its patches, or its inverse.
pub(super) fn build_patches(
    s: &LaunchSite<'_>,
    (x, out): (ValueId, ValueId),
    [ph, pw]: [u64; 2],
    is_inverse: bool,
) -> Built {
    let grid = s.p.type_of(if is_inverse { out } else { x });
    let n = grid.element_count();
    let args = PatchCells {
        x: s.at(x)?,
        out: s.at(out)?,
        height: grid.shape[1] as i32,
        width: grid.shape[2] as i32,
        channels: grid.shape[3] as i32,
        ph: ph as i32,
        pw: pw as i32,
        inverse: i32::from(is_inverse),
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel_for_dtype(grid.dtype, PATCH_CELLS_4, PATCH_CELLS_2), n, args))
}

pub(super) fn build_scale_shift(s: &LaunchSite<'_>, v: &views::ScaleShift, out: ValueId) -> Built {
    let ty = s.p.type_of(out);
    let n = ty.element_count();
    let args = ScaleShift {
        x: s.at(v.x)?,
        scale: s.at(v.scale)?,
        shift: s.at(v.shift)?,
        out: s.at(out)?,
        channels: last_extent(ty) as i32,
        inverse: i32::from(v.inverse),
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel_for_dtype(ty.dtype, SCALE_SHIFT_F32, SCALE_SHIFT_BF16), n, args))
}

/// Builds the limitation of each element to ±`limit`, by tanh if `is_soft`.
pub(super) fn build_clamp(
    s: &LaunchSite<'_>,
    (x, out): (ValueId, ValueId),
    limit: f64,
    is_soft: bool,
) -> Built {
    let ty = s.p.type_of(out);
    let n = ty.element_count();
    let is_soft = i32::from(is_soft);
    let args = Clamp { x: s.at(x)?, out: s.at(out)?, limit: limit as f32, is_soft, n: n as i64 };
    Ok(KernelLaunch::elements(kernel_for_dtype(ty.dtype, CLAMP_F32, CLAMP_BF16), n, args))
}

/// Selects the kernel for the widest words that divide a run of elements, and returns the words of a
/// run.
fn word_kernel<P>(ty: &Type, run: u64, kernels: [Kernel<P>; 3]) -> (Kernel<P>, u64) {
    let bytes = run * ty.dtype.element_bytes();
    let [wide, single, half] = kernels;
    match bytes {
        b if b.is_multiple_of(16) => (wide, b / 16),
        b if b.is_multiple_of(4) => (single, b / 4),
        b => (half, b / 2),
    }
}
