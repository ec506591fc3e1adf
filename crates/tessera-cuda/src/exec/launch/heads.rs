//! Ops that work on the columns of each head: the choice and the joining of columns, and a matmul per head.

use tessera_ir::{DType, ValueId, views};

use super::elementwise::kernel_for_floats;
use super::site::{LaunchSite, last_extent};
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_params::DevicePtr;
use crate::kernel_table::{
    HEAD_MATMUL_BF16, HEAD_MATMUL_F32, HEAD_MATMUL_TRANSPOSED_BF16, HEAD_MATMUL_TRANSPOSED_F32, HeadMatmul,
    JOIN_HEADS_2, JOIN_HEADS_4, JOIN_HEADS_16, JoinHeads,
};
use crate::kernels::KernelLaunch;

type Built = CudaResult<KernelLaunch>;

/// Rows of x that a block of a matmul per head multiplies, its warps and its threads, as in heads.cu.
const HEAD_TILE: u64 = 8;
const HEAD_WARPS: u64 = 8;
const HEAD_THREADS: u32 = 256;

pub(super) fn build_head_columns(s: &LaunchSite<'_>, v: &views::HeadColumns, out: ValueId) -> Built {
    let part = HeadPart { of: v.x, pitch: v.head_dim, first: v.first, columns: v.columns };
    build_join(s, part, None, out)
}

pub(super) fn build_head_join(s: &LaunchSite<'_>, v: &views::HeadJoin, out: ValueId) -> Built {
    let heads = last_extent(s.p.type_of(v.x)) / v.head_dim;
    let more = last_extent(s.p.type_of(v.y)) / heads.max(1);
    let part = HeadPart { of: v.x, pitch: v.head_dim, first: 0, columns: v.head_dim };
    build_join(s, part, Some((v.y, more)), out)
}

/// Columns of each head of a value.
struct HeadPart {
    of: ValueId,
    /// Columns of a head.
    pitch: u64,
    first: u64,
    columns: u64,
}

/// Joins columns of each head of one value with those of another one, if there is one.
fn build_join(s: &LaunchSite<'_>, x: HeadPart, y: Option<(ValueId, u64)>, out: ValueId) -> Built {
    let ty = s.p.type_of(out);
    let more = y.map_or(0, |(_, columns)| columns);
    let bytes = [x.pitch, x.first, x.columns, more].map(|columns| columns * ty.dtype.element_bytes());
    let fits = |word: u64| bytes.iter().all(|b| b.is_multiple_of(word));
    let (kernel, word) = match ty.dtype {
        DType::F32 | DType::Bf16 if fits(16) => (JOIN_HEADS_16, 16),
        DType::F32 | DType::Bf16 if fits(4) => (JOIN_HEADS_4, 4),
        DType::Bf16 => (JOIN_HEADS_2, 2),
        other => return cuda_failure(format!("columns of heads in {other}")),
    };
    let n = ty.byte_size().0 / word;
    let [x_pitch, first, x_words, y_words] = bytes.map(|b| (b / word) as i32);
    let args = JoinHeads {
        x: s.at(x.of)?,
        y: y.map_or(Ok(DevicePtr::NULL), |(y, _)| s.at(y))?,
        out: s.at(out)?,
        x_pitch,
        first,
        x_words,
        y_words,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel, n, args).begin_early())
}

pub(super) fn build_head_matmul(s: &LaunchSite<'_>, v: &views::HeadMatmul, out: ValueId) -> Built {
    let (x, w) = (s.p.type_of(v.x), s.p.type_of(v.w));
    if !matches!(x.dtype, DType::F32 | DType::Bf16) {
        return cuda_failure(format!("a matmul per head in {}", x.dtype));
    }
    let (heads, width) = (w.shape[0] / v.head_rows, last_extent(w));
    let args = HeadMatmul {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        out: s.at(out)?,
        n: x.shape[0] as i32,
        heads: heads as i32,
        head_rows: v.head_rows as i32,
        first: v.first as i32,
        rows: v.rows as i32,
        width: width as i32,
    };
    let (kernel, blocks) = match v.transposed {
        false => {
            (kernel_for_floats(x.dtype, HEAD_MATMUL_F32, HEAD_MATMUL_BF16)?, v.rows.div_ceil(HEAD_WARPS))
        }
        true => {
            // A lane has as many columns as it can load at once.
            let most = 16 / x.dtype.element_bytes();
            let columns = 32 * if width.is_multiple_of(most) { most } else { 1 };
            let kernel = kernel_for_floats(x.dtype, HEAD_MATMUL_TRANSPOSED_F32, HEAD_MATMUL_TRANSPOSED_BF16)?;
            (kernel, width.div_ceil(columns))
        }
    };
    let grid = (x.shape[0].div_ceil(HEAD_TILE) * heads * blocks, HEAD_THREADS, 0);
    Ok(KernelLaunch::blocks(kernel, grid, args).begin_early())
}
