//! Arguments and grids of the elementwise kernels and of the row kernels that no neighbour shares.

use tessera_ir::{Activation, DType, Op, Type, ValueId, views};

use super::{activation_code, kernel_for_dtype};
use crate::driver::{CudaResult, cuda_failure};
use crate::exec::CudaBackend;
use crate::gemm::shape::GemmShape;
use crate::kernel_table::{
    ADD_BF16, ADD_F32, Add, BIAS_ACT_BF16, BIAS_ACT_F32, BMM, BiasAct, Bmm, CAST_BF16_F32, CAST_F32_BF16,
    Cast, MODULATION, Modulation, PUT_ROWS_2, PUT_ROWS_4, PUT_ROWS_16, PutRows, QUANTIZE, Quantize, RENOISE,
    ROPE_FRAME_TABLE, ROW_SQUARE_SUM, Renoise, RopeFrameTable, RowSquareSum, SMALL_GEMM, SOFTMAX_BF16,
    SOFTMAX_F32, SPACE_TO_DEPTH, SmallGemm, Softmax, SpaceToDepth, TIME_EMBED, TO_X0, TimeEmbed, ToX0,
};
use crate::kernels::KernelLaunch;

/// Words that each thread moves, as in elements.cu.
const WORDS_PER_THREAD: u64 = 4;

/// Columns of out per block of the GEMM for few rows, and its threads: one warp per column.
const SMALL_GEMM_COLUMNS: u64 = 8;
const SMALL_GEMM_THREADS: u32 = 256;

impl CudaBackend {
    pub(super) fn build_row_square_sum(
        &self,
        program: usize,
        v: &views::RowSquareSum,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let ty = self.programs[program].program.type_of(v.x);
        let args = RowSquareSum {
            rows: ty.shape[0] as i32,
            x: self.value_address(program, v.x)?.into(),
            y: self.optional_address(program, v.y)?.into(),
            out: self.value_address(program, result)?.into(),
            columns: 1 + i32::from(v.y.is_some()),
        };
        Ok(KernelLaunch::rows(ROW_SQUARE_SUM, (ty.shape[0], last_extent(ty), ty.dtype), args))
    }

    pub(super) fn build_quantize(
        &self,
        program: usize,
        v: &views::Quantize,
        results: &[ValueId],
    ) -> CudaResult<KernelLaunch> {
        let ty = self.programs[program].program.type_of(v.x);
        let args = Quantize {
            rows: ty.shape[0] as i32,
            x: self.value_address(program, v.x)?.into(),
            out: self.value_address(program, results[0])?.into(),
            scales: self.value_address(program, results[1])?.into(),
        };
        Ok(KernelLaunch::rows(QUANTIZE, (ty.shape[0], last_extent(ty), ty.dtype), args))
    }

    pub(super) fn build_add(
        &self,
        program: usize,
        v: &views::Add,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let elements = p.type_of(result).element_count();
        let args = Add {
            x: self.value_address(program, v.x)?.into(),
            y: self.value_address(program, v.y)?.into(),
            out: self.value_address(program, result)?.into(),
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(kernel_for_dtype(p.type_of(v.x), ADD_F32, ADD_BF16), elements, args))
    }

    /// Returns the launch of an activation, after a bias if there is one.
    pub(super) fn build_bias_act(
        &self,
        program: usize,
        (x, bias): (ValueId, Option<ValueId>),
        act: Option<Activation>,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let addresses = (
            self.value_address(program, x)?,
            self.optional_address(program, bias)?,
            self.value_address(program, result)?,
        );
        Ok(bias_act_launch(self.programs[program].program.type_of(x), addresses, activation_code(act)))
    }

    pub(super) fn build_time_embed(
        &self,
        program: usize,
        v: &views::TimeEmbed,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let ty = self.programs[program].program.type_of(result);
        let elements = ty.element_count();
        let args = TimeEmbed {
            t: self.value_address(program, v.timesteps)?.into(),
            out: self.value_address(program, result)?.into(),
            width: last_extent(ty) as i32,
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(TIME_EMBED, elements, args))
    }

    pub(super) fn build_renoise(
        &self,
        program: usize,
        v: &views::Renoise,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let at = |v: ValueId| self.value_address(program, v);
        let (ty, elements) = (p.type_of(v.x), p.type_of(result).element_count());
        let args = Renoise {
            x: at(v.x)?.into(),
            sigma: at(v.sigma)?.into(),
            seed: at(v.seed)?.into(),
            chunk: at(v.chunk)?.into(),
            draw: at(v.draw)?.into(),
            first: (self.first_global_row(ty, 0) * last_extent(ty)) as i64,
            out: at(result)?.into(),
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(RENOISE, elements, args))
    }

    pub(super) fn build_to_x0(
        &self,
        program: usize,
        v: &views::ToX0,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let elements = self.programs[program].program.type_of(result).element_count();
        let args = ToX0 {
            x: self.value_address(program, v.x)?.into(),
            flow: self.value_address(program, v.flow)?.into(),
            sigma: self.value_address(program, v.sigma)?.into(),
            out: self.value_address(program, result)?.into(),
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(TO_X0, elements, args))
    }

    /// Returns the launch that reorders pixels into latent tokens, or tokens into pixels if
    /// `is_inverse`.
    pub(super) fn build_space_to_depth(
        &self,
        program: usize,
        x: ValueId,
        result: ValueId,
        stride: [u64; 3],
        is_inverse: bool,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let pixels = p.type_of(if is_inverse { result } else { x });
        let elements = p.type_of(result).element_count();
        let args = SpaceToDepth {
            x: self.value_address(program, x)?.into(),
            out: self.value_address(program, result)?.into(),
            height: (pixels.shape[1] / stride[1]) as i32,
            width: (pixels.shape[2] / stride[2]) as i32,
            st: stride[0] as i32,
            sh: stride[1] as i32,
            sw: stride[2] as i32,
            inverse: i32::from(is_inverse),
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(SPACE_TO_DEPTH, elements, args))
    }

    pub(super) fn build_softmax(
        &self,
        program: usize,
        v: &views::Softmax,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let (ty, width) = (p.type_of(v.x), last_extent(p.type_of(v.x)));
        let args = Softmax {
            x: self.value_address(program, v.x)?.into(),
            out: self.value_address(program, result)?.into(),
            width: width as i32,
        };
        let kernel = kernel_for_dtype(ty, SOFTMAX_F32, SOFTMAX_BF16);
        let rows = p.type_of(result).element_count() / width.max(1);
        Ok(KernelLaunch::blocks(kernel, (rows, 256, 0), args))
    }

    pub(super) fn build_bmm(
        &self,
        program: usize,
        v: &views::Bmm,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let (shape, out) = (&p.type_of(v.x).shape, p.type_of(result));
        let args = Bmm {
            x: self.value_address(program, v.x)?.into(),
            y: self.value_address(program, v.y)?.into(),
            out: self.value_address(program, result)?.into(),
            n: shape[shape.len() - 2] as i32,
            k: last_extent(p.type_of(v.x)) as i32,
            m: last_extent(out) as i32,
            transposed: i32::from(v.transposed),
            scale: v.scale as f32,
            count: out.element_count() as i64,
        };
        Ok(KernelLaunch::elements(BMM, out.element_count(), args))
    }

    pub(super) fn build_cast(
        &self,
        program: usize,
        v: &views::Cast,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let kernel = match (p.type_of(v.x).dtype, p.type_of(result).dtype) {
            (DType::F32, DType::Bf16) => CAST_F32_BF16,
            (DType::Bf16, DType::F32) => CAST_BF16_F32,
            (a, b) => return cuda_failure(format!("no kernel casts from {a} to {b}")),
        };
        let elements = p.type_of(result).element_count();
        let args = Cast {
            x: self.value_address(program, v.x)?.into(),
            out: self.value_address(program, result)?.into(),
            n: elements as i64,
        };
        Ok(KernelLaunch::elements(kernel, elements, args))
    }

    /// Returns the launch that adds the embedding to `tables` consecutive modulation tables, starting
    /// with that of `first`, and stores the results consecutively from `result` on.
    pub(in crate::exec) fn build_modulation_launch(
        &self,
        program: usize,
        first: &views::Modulation,
        result: ValueId,
        tables: u64,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let at = |v: ValueId| self.value_address(program, v);
        let table_elements = p.type_of(result).element_count();
        let args = Modulation {
            tables: at(first.table)?.into(),
            embedding: at(first.embedding)?.into(),
            out: at(result)?.into(),
            table_columns: p.type_of(first.table).element_count() as i32,
            width: last_extent(p.type_of(first.embedding)) as i32,
            table_elements: table_elements as i32,
            n: (tables * table_elements) as i64,
        };
        Ok(KernelLaunch::elements(MODULATION, tables * table_elements, args))
    }

    /// Returns the launch that computes a call's table of frames.
    pub(in crate::exec) fn build_frame_table_launch(
        &self,
        program: usize,
        at: usize,
    ) -> CudaResult<KernelLaunch> {
        let own = &self.programs[program];
        let t = &own.rope_tables[at];
        let n = t.frames * t.frame_pairs();
        let args = RopeFrameTable {
            start: self.value_address(program, t.start)?.into(),
            stride: t.frame_stride as i32,
            pairs: t.frame_pairs() as i32,
            out: (own.call_area.device_address() + t.frame_table).into(),
            n: n as i32,
        };
        Ok(KernelLaunch::elements(ROPE_FRAME_TABLE, n, args))
    }

    /// Returns the launch of a cache write at the row index that device memory holds at `row`.
    pub(super) fn build_put_rows_launch(
        &self,
        program: usize,
        op: &Op,
        v: &views::CacheWrite,
        row: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let ty = self.programs[program].program.type_of(v.x);
        let row_bytes = ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes();
        let (kernel, word) = match row_bytes {
            b if b.is_multiple_of(16) => (PUT_ROWS_16, 16),
            b if b.is_multiple_of(4) => (PUT_ROWS_4, 4),
            _ => (PUT_ROWS_2, 2),
        };
        let n = ty.byte_size().0 / word;
        let args = PutRows {
            from: self.value_address(program, v.x)?.into(),
            to: self.write_address(program, op, v)?.into(),
            row: self.value_address(program, row)?.into(),
            words: (row_bytes / word) as i64,
            n: n as i64,
        };
        Ok(KernelLaunch::elements(kernel, n.div_ceil(WORDS_PER_THREAD), args))
    }

    /// Returns the launch of a matmul of few rows, whose result is at `out`.
    pub(super) fn build_small_gemm_launch(
        &self,
        program: usize,
        v: &views::Matmul,
        out: u64,
    ) -> CudaResult<KernelLaunch> {
        let shape = GemmShape::from_matmul(&self.programs[program].program, v);
        let args = SmallGemm {
            x: self.value_address(program, v.x)?.into(),
            w: self.value_address(program, v.w)?.into(),
            b: self.optional_address(program, v.bias)?.into(),
            out: out.into(),
            rows: shape.rows as i32,
            k: shape.inner as i32,
            m: shape.out_columns as i32,
            act: activation_code(v.act),
        };
        let blocks = shape.out_columns.div_ceil(SMALL_GEMM_COLUMNS);
        Ok(KernelLaunch::blocks(SMALL_GEMM, (blocks, SMALL_GEMM_THREADS, 0), args))
    }
}

/// Returns the launch that adds a bias, unless its address is 0, and applies an activation.
pub(super) fn bias_act_launch(ty: &Type, (x, bias, out): (u64, u64, u64), act: i32) -> KernelLaunch {
    let args = BiasAct {
        x: x.into(),
        b: bias.into(),
        out: out.into(),
        columns: last_extent(ty) as i32,
        act,
        n: ty.element_count() as i64,
    };
    KernelLaunch::elements(kernel_for_dtype(ty, BIAS_ACT_F32, BIAS_ACT_BF16), ty.element_count(), args)
}

/// Returns the extent of the last dim.
fn last_extent(ty: &Type) -> u64 {
    ty.shape.last().copied().unwrap_or(1)
}
