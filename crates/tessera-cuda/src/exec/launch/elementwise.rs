//! Arguments and grids of the elementwise kernels and of the row kernels that no neighbour shares.

use tessera_base::random::DrawKey;
use tessera_ir::{Activation, DType, Op, StochasticRounding, ValueId, views};
use tessera_mesh::AxisLayout;

use super::site::{LaunchSite, last_extent, refuse_segments, row_bytes};
use crate::driver::{CudaResult, cuda_failure};
use crate::exec::rope_tables::RopeTables;
use crate::gemm::shape::GemmShape;
use crate::kernel_params::Kernel;
use crate::kernel_table::{
    ADD_BF16, ADD_F32, Add, BIAS_ACT_BF16, BIAS_ACT_F32, BMM, BiasAct, Bmm, CAST_BF16_E4M3, CAST_BF16_F32,
    CAST_BY_WORD_BF16_E4M3, CAST_BY_WORD_F32_BF16, CAST_BY_WORD_F32_E4M3, CAST_F32_BF16, CAST_F32_E4M3, Cast,
    CastByWord, EMBED_BF16, EMBED_F32, Embed, GUIDE, Guide, MODULATION, MUL_BF16, MUL_F32, Modulation, Mul,
    PUT_ROWS_2, PUT_ROWS_4, PUT_ROWS_16, PutRows, QUANTIZE, QUANTIZE_BY_WORD, Quantize, QuantizeByWord,
    RENOISE, ROPE_FRAME_TABLE, ROW_SQUARE_SUM, Renoise, RopeFrameTable, RowSquareSum, SMALL_GEMM,
    SOFTMAX_BF16, SOFTMAX_F32, SPACE_TO_DEPTH, SmallGemm, Softmax, SpaceToDepth, TIME_EMBED, TO_X0,
    TimeEmbed, ToX0,
};
use crate::kernels::KernelLaunch;

/// Words that each thread moves, as in elements.cu.
const WORDS_PER_THREAD: u64 = 4;

/// Elements that each thread multiplies, as in elements.cu.
const ELEMENTS_PER_VECTOR: u64 = 8;

/// Columns of out per block of the GEMM for few rows, and its threads: one warp per column.
const SMALL_GEMM_COLUMNS: u64 = 8;
const SMALL_GEMM_THREADS: u32 = 256;

type Built = CudaResult<KernelLaunch>;

/// A function of one element, by its number in `activate` of elements.cu.
pub(super) struct PointwiseFunction(pub(super) i32);

impl PointwiseFunction {
    pub(super) const RELU: PointwiseFunction = PointwiseFunction(3);
}

impl From<Option<Activation>> for PointwiseFunction {
    fn from(act: Option<Activation>) -> PointwiseFunction {
        PointwiseFunction(match act {
            None => 0,
            Some(Activation::Silu) => 1,
            Some(Activation::GeluTanh) => 2,
        })
    }
}

pub(super) fn build_row_square_sum(s: &LaunchSite<'_>, v: &views::RowSquareSum, out: ValueId) -> Built {
    refuse_segments(v.segments)?;
    let ty = s.p.type_of(v.x);
    let args = RowSquareSum {
        rows: ty.shape[0] as i32,
        x: s.at(v.x)?,
        y: s.at_optional(v.y)?,
        out: s.at(out)?,
        columns: 1 + i32::from(v.y.is_some()),
    };
    Ok(KernelLaunch::for_rows(ROW_SQUARE_SUM, (ty.shape[0], last_extent(ty), ty.dtype), args))
}

pub(super) fn build_quantize(s: &LaunchSite<'_>, v: &views::Quantize, results: &[ValueId]) -> Built {
    let ty = s.p.type_of(v.x);
    let (out, scales) = (s.at(results[0])?, s.at(results[1])?);
    let (rows, x) = (ty.shape[0] as i32, s.at(v.x)?);
    let of_rows = (ty.shape[0], last_extent(ty), ty.dtype);
    let Some(draws) = v.stochastic_rounding() else {
        return Ok(KernelLaunch::for_rows(QUANTIZE, of_rows, Quantize { rows, x, out, scales }));
    };
    let (seed, seed_high, draw) = words_of_key(draws.key);
    let first_row = s.first_global_row(ty, draws.first_row) as i64;
    let args = QuantizeByWord { rows, x, out, scales, seed, seed_high, draw, first_row };
    Ok(KernelLaunch::for_rows(QUANTIZE_BY_WORD, of_rows, args))
}

pub(super) fn build_add(s: &LaunchSite<'_>, v: &views::Add, out: ValueId) -> Built {
    let n = s.p.type_of(out).element_count();
    let args = Add { x: s.at(v.x)?, y: s.at(v.y)?, out: s.at(out)?, n: n as i64 };
    Ok(KernelLaunch::elements(kernel_for_dtype(s.p.type_of(v.x).dtype, ADD_F32, ADD_BF16), n, args))
}

pub(super) fn build_mul(s: &LaunchSite<'_>, v: &views::Mul, out: ValueId) -> Built {
    let n = s.p.type_of(out).element_count();
    let args = Mul { x: s.at(v.x)?, y: s.at(v.y)?, out: s.at(out)?, n: n as i64 };
    let kernel = kernel_for_dtype(s.p.type_of(out).dtype, MUL_F32, MUL_BF16);
    Ok(KernelLaunch::elements(kernel, n.div_ceil(ELEMENTS_PER_VECTOR), args))
}

pub(super) fn build_embed(s: &LaunchSite<'_>, v: &views::Embed, out: ValueId) -> Built {
    let (table, n) = (s.p.type_of(v.table), s.p.type_of(out).element_count());
    let args = Embed {
        ids: s.at(v.ids)?,
        table: s.at(v.table)?,
        out: s.at(out)?,
        rows: table.shape[0] as i32,
        first_row: s.first_global_row(table, 0) as i32,
        table_rows: table.layout.global_shape(&table.shape, &s.p.mesh)[0] as i32,
        width: last_extent(table) as i32,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel_for_dtype(table.dtype, EMBED_F32, EMBED_BF16), n, args))
}

/// Builds a function of each element, after a bias if there is one.
pub(super) fn build_pointwise(
    s: &LaunchSite<'_>,
    x: ValueId,
    bias: Option<ValueId>,
    function: PointwiseFunction,
    out: ValueId,
) -> Built {
    let ty = s.p.type_of(x);
    let addresses = (s.at(x)?, s.at_optional(bias)?, s.at(out)?);
    Ok(bias_act_launch(ty.dtype, (ty.element_count(), last_extent(ty)), addresses, function))
}

pub(super) fn build_time_embed(s: &LaunchSite<'_>, v: &views::TimeEmbed, out: ValueId) -> Built {
    let ty = s.p.type_of(out);
    let n = ty.element_count();
    let args =
        TimeEmbed { t: s.at(v.timesteps)?, out: s.at(out)?, width: last_extent(ty) as i32, n: n as i64 };
    Ok(KernelLaunch::elements(TIME_EMBED, n, args))
}

pub(super) fn build_renoise(s: &LaunchSite<'_>, op: &Op, v: &views::Renoise) -> Built {
    let ty = s.p.type_of(v.x);
    let by_columns = |a| matches!(ty.layout.on_axis(a), AxisLayout::Shard(shard) if shard.dim != 0);
    if s.p.mesh.active_axes().any(by_columns) {
        return cuda_failure("noise for a value sharded by columns");
    }
    s.refuse_bf16(op, "renoise in bf16")?;
    let n = s.p.type_of(op.results[0]).element_count();
    let args = Renoise {
        x: s.at(v.x)?,
        sigma: s.at(v.sigma)?,
        seed: s.at(v.seed)?,
        chunk: s.at(v.chunk)?,
        draw: s.at(v.draw)?,
        first: (s.first_global_row(ty, 0) * last_extent(ty)) as i64,
        out: s.at(op.results[0])?,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(RENOISE, n, args))
}

pub(super) fn build_to_x0(s: &LaunchSite<'_>, v: &views::ToX0, out: ValueId) -> Built {
    let n = s.p.type_of(out).element_count();
    let args =
        ToX0 { x: s.at(v.x)?, flow: s.at(v.flow)?, sigma: s.at(v.sigma)?, out: s.at(out)?, n: n as i64 };
    Ok(KernelLaunch::elements(TO_X0, n, args))
}

pub(super) fn build_guide(s: &LaunchSite<'_>, v: &views::Guide, out: ValueId) -> Built {
    let n = s.p.type_of(out).element_count();
    let args = Guide { x: s.at(v.x)?, y: s.at(v.y)?, scale: v.scale, out: s.at(out)?, n: n as i64 };
    Ok(KernelLaunch::elements(GUIDE, n, args))
}

/// Builds the reordering of pixels into latent tokens, or of tokens into pixels if `is_inverse`.
pub(super) fn build_space_to_depth(
    s: &LaunchSite<'_>,
    (x, out): (ValueId, ValueId),
    stride: [u64; 3],
    is_inverse: bool,
) -> Built {
    let pixels = s.p.type_of(if is_inverse { out } else { x });
    let n = s.p.type_of(out).element_count();
    let args = SpaceToDepth {
        x: s.at(x)?,
        out: s.at(out)?,
        height: (pixels.shape[1] / stride[1]) as i32,
        width: (pixels.shape[2] / stride[2]) as i32,
        st: stride[0] as i32,
        sh: stride[1] as i32,
        sw: stride[2] as i32,
        inverse: i32::from(is_inverse),
        n: n as i64,
    };
    Ok(KernelLaunch::elements(SPACE_TO_DEPTH, n, args))
}

pub(super) fn build_softmax(s: &LaunchSite<'_>, v: &views::Softmax, out: ValueId) -> Built {
    let ty = s.p.type_of(v.x);
    if v.dim.is_some_and(|dim| dim + 1 != ty.shape.len()) {
        return cuda_failure("a softmax over a dim other than the last");
    }
    let width = last_extent(ty);
    let args = Softmax { x: s.at(v.x)?, out: s.at(out)?, width: width as i32 };
    let kernel = kernel_for_dtype(ty.dtype, SOFTMAX_F32, SOFTMAX_BF16);
    let rows = s.p.type_of(out).element_count() / width.max(1);
    Ok(KernelLaunch::blocks(kernel, (rows, 256, 0), args))
}

pub(super) fn build_bmm(s: &LaunchSite<'_>, v: &views::Bmm, out: ValueId) -> Built {
    let (shape, out_ty) = (&s.p.type_of(v.x).shape, s.p.type_of(out));
    let args = Bmm {
        x: s.at(v.x)?,
        y: s.at(v.y)?,
        out: s.at(out)?,
        n: shape[shape.len() - 2] as i32,
        k: shape[shape.len() - 1] as i32,
        m: last_extent(out_ty) as i32,
        transposed: i32::from(v.transposed),
        scale: v.scale as f32,
        count: out_ty.element_count() as i64,
    };
    Ok(KernelLaunch::elements(BMM, out_ty.element_count(), args))
}

/// Builds a cast to another dtype.
pub(super) fn build_cast(s: &LaunchSite<'_>, v: &views::Cast, out: ValueId) -> Built {
    if let Some(draws) = v.stochastic_rounding() {
        return build_cast_by_word(s, v.x, out, draws);
    }
    let n = s.p.type_of(out).element_count();
    let kernel = match (s.p.type_of(v.x).dtype, s.p.type_of(out).dtype) {
        (DType::F32, DType::Bf16) => CAST_F32_BF16,
        (DType::Bf16, DType::F32) => CAST_BF16_F32,
        (DType::F32, DType::E4m3) => CAST_F32_E4M3,
        (DType::Bf16, DType::E4m3) => CAST_BF16_E4M3,
        (a, b) => return cuda_failure(format!("no kernel casts from {a} to {b}")),
    };
    Ok(KernelLaunch::elements(kernel, n, Cast { x: s.at(v.x)?, out: s.at(out)?, n: n as i64 }))
}

/// Returns the lower and the upper half of a seed and the draw, as kernels take them.
fn words_of_key(key: DrawKey) -> (u32, u32, u32) {
    (key.seed as u32, (key.seed >> 32) as u32, key.draw)
}

/// Builds a cast by the words of a draw.
fn build_cast_by_word(s: &LaunchSite<'_>, x: ValueId, out: ValueId, draws: StochasticRounding) -> Built {
    let ty = s.p.type_of(x);
    let kernel = match (ty.dtype, s.p.type_of(out).dtype) {
        (DType::F32, DType::Bf16) => CAST_BY_WORD_F32_BF16,
        (DType::F32, DType::E4m3) => CAST_BY_WORD_F32_E4M3,
        (DType::Bf16, DType::E4m3) => CAST_BY_WORD_BF16_E4M3,
        (a, b) => return cuda_failure(format!("no kernel casts stochastically from {a} to {b}")),
    };
    let last = ty.shape.len().saturating_sub(1);
    let is_inner =
        |a| matches!(ty.layout.on_axis(a), AxisLayout::Shard(shard) if (1..last).contains(&shard.dim));
    if s.p.mesh.active_axes().any(is_inner) {
        return cuda_failure(
            "stochastic rounding of a value sharded over a dim that is neither the first nor the last",
        );
    }
    let whole = ty.layout.global_shape(&ty.shape, &s.p.mesh);
    let row_elements: u64 = whole.iter().skip(1).product();
    let column = if last == 0 { 0 } else { s.first_global_column(x) };
    let (seed, seed_high, draw) = words_of_key(draws.key);
    let args = CastByWord {
        x: s.at(x)?,
        out: s.at(out)?,
        seed,
        seed_high,
        draw,
        first: (s.first_global_row(ty, draws.first_row) * row_elements + column) as i64,
        width: ty.shape.last().copied().unwrap_or(1).max(1) as i64,
        pitch: whole.last().copied().unwrap_or(1) as i64,
        n: ty.element_count() as i64,
    };
    Ok(KernelLaunch::elements(kernel, ty.element_count(), args))
}

/// Builds the launch that adds the embedding to `tables` consecutive modulation tables, starting with
/// that of `first`, and stores the results consecutively from `out` on.
pub(super) fn build_modulation(
    s: &LaunchSite<'_>,
    first: &views::Modulation,
    out: ValueId,
    tables: u64,
) -> Built {
    let table_elements = s.p.type_of(out).element_count();
    let args = Modulation {
        tables: s.at(first.table)?,
        embedding: s.at(first.embedding)?,
        out: s.at(out)?,
        table_columns: s.p.type_of(first.table).element_count() as i32,
        width: last_extent(s.p.type_of(first.embedding)) as i32,
        table_elements: table_elements as i32,
        n: (tables * table_elements) as i64,
    };
    Ok(KernelLaunch::elements(MODULATION, tables * table_elements, args))
}

/// Builds the launch that computes a call's table of frames in the call area at `area`.
pub(in crate::exec) fn build_frame_table(s: &LaunchSite<'_>, t: &RopeTables, area: u64) -> Built {
    let n = t.frames * t.frame_pairs();
    let args = RopeFrameTable {
        start: s.at(t.start)?,
        stride: t.frame_stride as i32,
        pairs: t.frame_pairs() as i32,
        out: (area + t.frame_table).into(),
        n: n as i32,
    };
    Ok(KernelLaunch::elements(ROPE_FRAME_TABLE, n, args))
}

/// Builds a cache write at the row index that device memory holds at `row`.
pub(super) fn build_put_rows(s: &LaunchSite<'_>, op: &Op, v: &views::CacheWrite, row: ValueId) -> Built {
    let ty = s.p.type_of(v.x);
    let row_bytes = row_bytes(ty);
    let (kernel, word) = match row_bytes {
        b if b.is_multiple_of(16) => (PUT_ROWS_16, 16),
        b if b.is_multiple_of(4) => (PUT_ROWS_4, 4),
        _ => (PUT_ROWS_2, 2),
    };
    let n = ty.byte_size().0 / word;
    let (to, words) = (s.write_address(op, v)?, (row_bytes / word) as i64);
    let args = PutRows { from: s.at(v.x)?, to, row: s.at(row)?, words, n: n as i64 };
    Ok(KernelLaunch::elements(kernel, n.div_ceil(WORDS_PER_THREAD), args))
}

/// Builds a matmul of few rows.
pub(super) fn build_small_gemm(s: &LaunchSite<'_>, v: &views::Matmul, out: ValueId) -> Built {
    let shape = GemmShape::from_matmul(s.p, v);
    let args = SmallGemm {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        b: s.at_optional(v.bias)?,
        out: s.at(out)?,
        rows: shape.rows as i32,
        k: shape.inner as i32,
        m: shape.out_columns as i32,
        act: PointwiseFunction::from(v.act).0,
    };
    let blocks = shape.out_columns.div_ceil(SMALL_GEMM_COLUMNS);
    Ok(KernelLaunch::blocks(SMALL_GEMM, (blocks, SMALL_GEMM_THREADS, 0), args))
}

/// Returns the launch that adds a bias per column, unless its address is 0, and applies an activation.
pub(super) fn bias_act_launch(
    dtype: DType,
    (n, columns): (u64, u64),
    (x, bias, out): (u64, u64, u64),
    function: PointwiseFunction,
) -> KernelLaunch {
    let (columns, act) = (columns as i32, function.0);
    let args = BiasAct { x: x.into(), b: bias.into(), out: out.into(), columns, act, n: n as i64 };
    KernelLaunch::elements(kernel_for_dtype(dtype, BIAS_ACT_F32, BIAS_ACT_BF16), n, args)
}

/// Selects the f32 or the bf16 kernel of an op whose rule accepts other dtypes too.
///
/// # Errors
/// Another dtype.
pub(super) fn kernel_for_floats<P>(
    dtype: DType,
    single: Kernel<P>,
    half: Kernel<P>,
) -> CudaResult<Kernel<P>> {
    match dtype {
        DType::F32 | DType::Bf16 => Ok(kernel_for_dtype(dtype, single, half)),
        other => cuda_failure(format!("an operand in {other}, for which there is no kernel")),
    }
}

/// Selects the f32 or the bf16 kernel.
pub(super) fn kernel_for_dtype<P>(dtype: DType, single: Kernel<P>, half: Kernel<P>) -> Kernel<P> {
    if dtype == DType::Bf16 { half } else { single }
}
