//! Launches the kernels that norms share with their neighbours: residual adds with norms and
//! quantization, and RMS norms with RoPE and cache writes.

use tessera_ir::{OpView, ValueId, views};

use crate::collectives::Targets;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::exec::{CudaBackend, PreparedProgram, RopeTables};
use crate::kernel_params::DevicePtr;
use crate::kernel_table::{RESIDUAL_NORM, RMS_ROPE, ResidualNorm, RmsRope};
use crate::kernels::KernelLaunch;

/// Eps of a launch without a norm, which the kernel does not use.
const UNUSED_EPS: f32 = 1e-6;

impl CudaBackend {
    pub(super) fn launch_residual_norm(
        &mut self,
        program: usize,
        add: Option<usize>,
        norm: Option<usize>,
        quantize: Option<usize>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let launch = self.build_residual_norm(program, add, norm, quantize)?;
        self.enqueue_launch(&launch, stream)
    }

    fn build_residual_norm(
        &self,
        program: usize,
        add: Option<usize>,
        norm: Option<usize>,
        quantize: Option<usize>,
    ) -> CudaResult<KernelLaunch> {
        let PreparedProgram { program: p, views, .. } = &self.programs[program];
        let result =
            |i: Option<usize>, k: usize| self.optional_address(program, i.map(|i| p.ops[i].results[k]));
        let sum = add.map(|i| residual_view(&views[i])).transpose()?;
        let norm_view = norm.map(|i| NormView::new(&views[i])).transpose()?;
        let Some(x) = sum.map(|v| v.x).or(norm_view.map(NormView::operand)) else {
            return cuda_failure("a step without a sum and a norm");
        };
        let ty = p.type_of(x);
        let (affine, modulated) = match norm_view {
            Some(NormView::Affine(v)) => (Some(v), None),
            Some(NormView::Modulated(v)) => (None, Some(v)),
            None => (None, None),
        };
        let columns = |v: Option<ValueId>| v.map_or(0, |v| p.type_of(v).shape.last().copied().unwrap_or(0));
        let (gates, m) = (sum.and_then(|v| v.m), modulated.map(|v| v.m));
        // If both ops define the first row, they agree. Without a frame numbering the kernel uses
        // neither of the two.
        let frame_rows = sum.and_then(|v| v.frame_rows).or(modulated.map(|v| v.frame_rows)).unwrap_or(1);
        let first_row = match (sum, norm_view) {
            (Some(sum), norm) if sum.m.is_some() || norm.is_none() => sum.first_row,
            (_, Some(NormView::Modulated(v))) => v.first_row,
            _ => 0,
        };
        let args = ResidualNorm {
            rows: ty.shape[0] as i32,
            x: self.value_address(program, x)?.into(),
            y: self.optional_address(program, sum.map(|v| v.y))?.into(),
            gates: self.optional_address(program, gates)?.into(),
            gate_columns: columns(gates) as i32,
            gate: sum.and_then(|v| v.gate).map_or(0, |block| block as i32),
            m: self.optional_address(program, m)?.into(),
            m_columns: columns(m) as i32,
            shift: modulated.map_or(0, |v| v.shift as i32),
            scale: modulated.map_or(0, |v| v.scale as i32),
            w: self.optional_address(program, affine.map(|v| v.w))?.into(),
            b: self.optional_address(program, affine.map(|v| v.b))?.into(),
            total: result(add, 0)?.into(),
            out: if quantize.is_some() { DevicePtr::NULL } else { result(norm, 0)?.into() },
            quantized: result(quantize, 0)?.into(),
            scales: result(quantize, 1)?.into(),
            first_row: self.first_global_row(ty, first_row) as i32,
            frame_rows: frame_rows as i32,
            eps: norm_view.map_or(UNUSED_EPS, NormView::eps),
        };
        let rows = (ty.shape[0], ty.shape[1], ty.dtype);
        Ok(KernelLaunch::rows(RESIDUAL_NORM, rows, args))
    }

    pub(super) fn launch_rms_rope(
        &mut self,
        program: usize,
        scale: Option<usize>,
        rope: Option<usize>,
        write: Option<usize>,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let launch = self.build_rms_rope(program, (scale, rope, write), targets)?;
        self.enqueue_launch(&launch, stream)
    }

    /// Returns the launch of an RMS norm or its scaling half, a RoPE and a cache write, of which at
    /// least one is present.
    fn build_rms_rope(
        &self,
        program: usize,
        (scale, rope, write): (Option<usize>, Option<usize>, Option<usize>),
        targets: Option<&Targets>,
    ) -> CudaResult<KernelLaunch> {
        let own = &self.programs[program];
        let PreparedProgram { program: p, views, .. } = own;
        let (Some(first), Some(last)) = (scale.or(rope).or(write), write.or(rope).or(scale)) else {
            return cuda_failure("a step without a norm, a RoPE and a cache write");
        };
        let x = p.ops[first].operands[0];
        let ty = p.type_of(x);
        let (out, row) = match write {
            Some(i) => {
                let v = write_view(&views[i])?;
                (self.write_address(program, &p.ops[i], v)?, self.optional_address(program, v.row)?)
            }
            None => (self.value_address(program, p.ops[last].results[0])?, 0),
        };
        let norm = match scale {
            None => NormArgs::default(),
            Some(i) => self.norm_args(program, &views[i], ty.shape[1])?,
        };
        let tables = rope.and_then(|i| own.rope_tables.iter().find(|t| t.op == i));
        let area = own.call_area.device_address();
        let table =
            |offset: fn(&RopeTables) -> u64| tables.map_or(DevicePtr::NULL, |t| (area + offset(t)).into());
        let first_row = match rope {
            Some(i) => self.first_global_row(ty, rope_view(&views[i])?.first_row),
            None => 0,
        };
        let args = RmsRope {
            rows: ty.shape[0] as i32,
            x: self.value_address(program, x)?.into(),
            pitch: self.row_pitch(program, x) as i32,
            w: norm.weight.into(),
            sums: norm.sums.into(),
            sum_columns: norm.sum_columns as i32,
            sum_column: norm.sum_column as i32,
            norm_columns: norm.columns,
            eps: norm.eps,
            out: out.into(),
            to_row: row.into(),
            head: tables.map_or(0, |t| t.head_dim as i32),
            by_frame: table(|t| t.frame_table),
            by_row: table(|t| t.row_table),
            by_column: table(|t| t.column_table),
            first_row: first_row as i32,
            height: tables.map_or(1, |t| t.grid[0] as i32),
            width: tables.map_or(1, |t| t.grid[1] as i32),
            has_positions: tables.map_or(0, |t| i32::from(t.frame_stride != 0)),
            targets: targets.copied().unwrap_or_default(),
        };
        let rows = (ty.shape[0], ty.shape[1], ty.dtype);
        Ok(KernelLaunch::rows(RMS_ROPE, rows, args))
    }

    /// Returns the arguments of an RMS norm, or of a scaling by sums that ranks have reduced, for rows
    /// of `width` elements.
    fn norm_args(&self, program: usize, norm: &OpView, width: u64) -> CudaResult<NormArgs> {
        match norm {
            OpView::RmsNorm(v) => Ok(NormArgs {
                weight: self.value_address(program, v.w)?,
                sums: 0,
                sum_columns: 0,
                sum_column: 0,
                columns: width as f32,
                eps: v.eps as f32,
            }),
            OpView::RmsScale(v) => Ok(NormArgs {
                weight: self.value_address(program, v.w)?,
                sums: self.value_address(program, v.square_sums)?,
                sum_columns: self.programs[program].program.type_of(v.square_sums).shape[1],
                sum_column: v.col,
                columns: v.width as f32,
                eps: v.eps as f32,
            }),
            _ => cuda_failure("an op in the place of an RMS norm"),
        }
    }
}

/// A norm that one kernel computes together with a residual add before it.
#[derive(Debug, Clone, Copy)]
enum NormView<'a> {
    /// Weight and bias per column.
    Affine(&'a views::LayerNorm),
    /// Scale and shift per frame and column.
    Modulated(&'a views::NormModulate),
}

impl<'a> NormView<'a> {
    fn new(view: &'a OpView) -> CudaResult<NormView<'a>> {
        match view {
            OpView::LayerNorm(v) => Ok(NormView::Affine(v)),
            OpView::NormModulate(v) => Ok(NormView::Modulated(v)),
            _ => cuda_failure("an op in the place of a norm"),
        }
    }

    fn operand(self) -> ValueId {
        match self {
            NormView::Affine(v) => v.x,
            NormView::Modulated(v) => v.x,
        }
    }

    fn eps(self) -> f32 {
        match self {
            NormView::Affine(v) => v.eps as f32,
            NormView::Modulated(v) => v.eps as f32,
        }
    }
}

/// Arguments of the norm in front of a rotary embedding; an absent weight is 0 and skips the norm.
#[derive(Debug)]
struct NormArgs {
    weight: u64,
    sums: u64,
    sum_columns: u64,
    sum_column: u64,
    columns: f32,
    eps: f32,
}

impl Default for NormArgs {
    fn default() -> NormArgs {
        NormArgs { weight: 0, sums: 0, sum_columns: 0, sum_column: 0, columns: 1.0, eps: 0.0 }
    }
}

fn residual_view(view: &OpView) -> CudaResult<&views::GateResidual> {
    if let OpView::GateResidual(v) = view { Ok(v) } else { cuda_failure("an op in the place of a sum") }
}

fn rope_view(view: &OpView) -> CudaResult<&views::Rope> {
    if let OpView::Rope(v) = view { Ok(v) } else { cuda_failure("an op in the place of a RoPE") }
}

fn write_view(view: &OpView) -> CudaResult<&views::CacheWrite> {
    if let OpView::CacheWrite(v) = view { Ok(v) } else { cuda_failure("an op in the place of a cache write") }
}
