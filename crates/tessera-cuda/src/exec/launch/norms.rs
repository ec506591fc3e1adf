//! The kernels that norms share with their neighbours: residual adds with norms and quantization, and
//! RMS norms with RoPE and cache writes. Ops are given by their index and view.

use tessera_ir::{OpView, ValueId, views};

use super::site::{LaunchSite, last_extent, refuse_segments};
use crate::collectives::Targets;
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_params::DevicePtr;
use crate::kernel_table::{RESIDUAL_NORM, RESIDUAL_RMS, RMS_ROPE, ResidualNorm, ResidualRms, RmsRope};
use crate::kernels::KernelLaunch;

/// Eps of a launch without a norm, which the kernel does not use.
const UNUSED_EPS: f32 = 1e-6;

/// A norm that one kernel computes together with a residual add before it.
#[derive(Debug, Clone, Copy)]
pub(super) enum NormView<'a> {
    /// Weight and bias per column.
    Affine(&'a views::LayerNorm),
    /// Scale and shift per frame and column.
    Modulated(&'a views::NormModulate),
}

impl<'a> NormView<'a> {
    pub(super) fn from_op(view: &'a OpView) -> Option<NormView<'a>> {
        match view {
            OpView::LayerNorm(v) => Some(NormView::Affine(v)),
            OpView::NormModulate(v) => Some(NormView::Modulated(v)),
            _ => None,
        }
    }
}

/// An RMS norm, or its second half.
#[derive(Debug, Clone, Copy)]
pub(super) enum RmsView<'a> {
    Norm(&'a views::RmsNorm),
    /// A scaling by sums that ranks have reduced.
    Scale(&'a views::RmsScale),
}

impl<'a> RmsView<'a> {
    pub(super) fn from_op(view: &'a OpView) -> Option<RmsView<'a>> {
        match view {
            OpView::RmsNorm(v) => Some(RmsView::Norm(v)),
            OpView::RmsScale(v) => Some(RmsView::Scale(v)),
            _ => None,
        }
    }

    fn operand(self) -> ValueId {
        match self {
            RmsView::Norm(v) => v.x,
            RmsView::Scale(v) => v.x,
        }
    }
}

/// Builds a residual add, the norm of the sum and its quantization; the sum or the norm is present.
pub(super) fn build_residual_norm(
    s: &LaunchSite<'_>,
    sum: Option<(usize, &views::GateResidual)>,
    norm: Option<(usize, NormView<'_>)>,
    quantize: Option<usize>,
) -> CudaResult<KernelLaunch> {
    let result = |i: Option<usize>, k: usize| i.map(|i| s.p.ops[i].results[k]);
    let columns = |v: ValueId| last_extent(s.p.type_of(v)) as i32;
    let (add, sum) = sum.unzip();
    let (norm, norm_view) = norm.unzip();
    let (affine, modulated, eps) = match norm_view {
        Some(NormView::Affine(v)) => (Some(v), None, v.eps as f32),
        Some(NormView::Modulated(v)) => (None, Some(v), v.eps as f32),
        None => (None, None, UNUSED_EPS),
    };
    let Some(x) = sum.map(|v| v.x).or(affine.map(|v| v.x)).or(modulated.map(|v| v.x)) else {
        return cuda_failure("a step without a sum and a norm");
    };
    let ty = s.p.type_of(x);
    let (gates, m) = (sum.and_then(|v| v.m), modulated.map(|v| v.m));
    // If both ops define the first row, they agree. Without a frame numbering the kernel uses neither
    // of the two.
    let frame_rows = sum.and_then(|v| v.frame_rows).or(modulated.map(|v| v.frame_rows)).unwrap_or(1);
    let first_row = match (sum, modulated) {
        (Some(sum), _) if sum.m.is_some() || norm.is_none() => sum.first_row,
        (_, Some(v)) => v.first_row,
        _ => 0,
    };
    let args = ResidualNorm {
        rows: ty.shape[0] as i32,
        x: s.at(x)?,
        y: s.at_optional(sum.map(|v| v.y))?,
        gates: s.at_optional(gates)?,
        gate_columns: gates.map_or(0, columns),
        gate: sum.and_then(|v| v.gate).map_or(0, |block| block as i32),
        m: s.at_optional(m)?,
        m_columns: m.map_or(0, columns),
        shift: modulated.map_or(0, |v| v.shift as i32),
        scale: modulated.map_or(0, |v| v.scale as i32),
        w: s.at_optional(affine.map(|v| v.w))?,
        b: s.at_optional(affine.map(|v| v.b))?,
        total: s.at_optional(result(add, 0))?,
        out: s.at_optional(result(norm, 0).filter(|_| quantize.is_none()))?,
        quantized: s.at_optional(result(quantize, 0))?,
        scales: s.at_optional(result(quantize, 1))?,
        first_row: s.first_global_row(ty, first_row) as i32,
        frame_rows: frame_rows as i32,
        eps,
    };
    Ok(KernelLaunch::for_rows(RESIDUAL_NORM, (ty.shape[0], ty.shape[1], ty.dtype), args))
}

/// A sum, its RMS norm and the casts around them. The sum is given by its operands and its result, of which the
/// second operand may be what a cast reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResidualRmsOps<'a> {
    pub(super) sum: Option<(ValueId, ValueId, ValueId)>,
    pub(super) norm: &'a views::RmsNorm,
    pub(super) out: ValueId,
}

/// Builds the addition to the residual stream with the RMS norm of the sum.
pub(super) fn build_residual_rms(s: &LaunchSite<'_>, ops: &ResidualRmsOps<'_>) -> CudaResult<KernelLaunch> {
    let ty = s.p.type_of(ops.norm.x);
    refuse_segments(ops.norm.segments)?;
    // The operand goes to the parameter of its dtype.
    let by_dtype = |v: Option<ValueId>| {
        let is_narrow = v.is_some_and(|v| s.p.type_of(v).dtype != ty.dtype);
        if is_narrow { (None, v) } else { (v, None) }
    };
    let (y, narrow_y) = by_dtype(ops.sum.map(|(_, y, _)| y));
    let (out, narrow_out) = by_dtype(Some(ops.out));
    let args = ResidualRms {
        rows: ty.shape[0] as i32,
        x: s.at(ops.sum.map_or(ops.norm.x, |(x, ..)| x))?,
        y: s.at_optional(y)?,
        narrow_y: s.at_optional(narrow_y)?,
        w: s.at(ops.norm.w)?,
        total: s.at_optional(ops.sum.map(|(.., total)| total))?,
        out: s.at_optional(out)?,
        narrow_out: s.at_optional(narrow_out)?,
        eps: ops.norm.eps as f32,
    };
    Ok(KernelLaunch::for_rows(RESIDUAL_RMS, (ty.shape[0], ty.shape[1], ty.dtype), args).begin_early())
}

/// An RMS norm, a RoPE and a cache write, of which at least one is present.
pub(super) type RmsRopeOps<'a> =
    (Option<(usize, RmsView<'a>)>, Option<(usize, &'a views::Rope)>, Option<(usize, &'a views::CacheWrite)>);

/// Builds the launch of ops of which each reads the result of the one before.
pub(super) fn build_rms_rope(
    s: &LaunchSite<'_>,
    (norm, rope, write): RmsRopeOps<'_>,
    targets: Option<&Targets>,
) -> CudaResult<KernelLaunch> {
    let x = norm.map(|(_, v)| v.operand()).or(rope.map(|(_, v)| v.x)).or(write.map(|(_, v)| v.x));
    let last = rope.map(|(i, _)| i).or(norm.map(|(i, _)| i));
    let (Some(x), Some((out, to_row))) = (
        x,
        match (write, last) {
            (Some((i, v)), _) => Some((s.write_address(&s.p.ops[i], v)?, s.at_optional(v.row)?)),
            (None, Some(i)) => Some((s.at(s.p.ops[i].results[0])?, DevicePtr::NULL)),
            (None, None) => None,
        },
    ) else {
        return cuda_failure("a step without a norm, a RoPE and a cache write");
    };
    let ty = s.p.type_of(x);
    // Without a norm and a RoPE, the rows are copied.
    let mut args = RmsRope {
        rows: ty.shape[0] as i32,
        x: s.at(x)?,
        pitch: s.row_pitch(x) as i32,
        w: DevicePtr::NULL,
        sums: DevicePtr::NULL,
        sum_columns: 0,
        sum_column: 0,
        norm_columns: 1.0,
        eps: 0.0,
        out,
        to_row,
        head: 0,
        by_frame: DevicePtr::NULL,
        by_row: DevicePtr::NULL,
        by_column: DevicePtr::NULL,
        first_row: 0,
        height: 1,
        width: 1,
        has_positions: 0,
        targets: targets.copied().unwrap_or_default(),
    };
    match norm.map(|(_, v)| v) {
        None => {}
        Some(RmsView::Norm(v)) => {
            refuse_segments(v.segments)?;
            (args.w, args.norm_columns, args.eps) = (s.at(v.w)?, ty.shape[1] as f32, v.eps as f32);
        }
        Some(RmsView::Scale(v)) => {
            (args.w, args.norm_columns, args.eps) = (s.at(v.w)?, v.width as f32, v.eps as f32);
            args.sums = s.at(v.square_sums)?;
            args.sum_columns = s.p.type_of(v.square_sums).shape[1] as i32;
            args.sum_column = v.col as i32;
        }
    }
    if let Some((i, v)) = rope {
        args.first_row = s.first_global_row(ty, v.first_row) as i32;
        if let Some((t, area)) = s.rope_tables(i) {
            args.head = t.head_dim as i32;
            args.by_frame = (area + t.frame_table).into();
            args.by_row = (area + t.row_table).into();
            args.by_column = (area + t.column_table).into();
            (args.height, args.width) = (t.grid[0] as i32, t.grid[1] as i32);
            args.has_positions = i32::from(t.frame_stride != 0);
        }
    }
    Ok(KernelLaunch::for_rows(RMS_ROPE, (ty.shape[0], ty.shape[1], ty.dtype), args))
}
