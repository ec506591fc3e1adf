//! Attention by a kernel of this crate, for heads of 128 in bf16 on Hopper: tiles arrive by the copy engine, products by
//! warpgroup instructions. Measured against cuDNN in docs/design/0011.

#![allow(unsafe_code, reason = "maps of tensors for the copy engine")]

use cudarc::driver::sys;

use crate::attention::{At, Shape};
use crate::compile::Compiler;
use crate::driver::{Args, Done, Failed, Function, Module, Stream};
use crate::exchange::Targets;
use crate::kernels::COMMON;

const SOURCE: &str = include_str!("kernels/attention.cu");

/// Elements of a head.
const HEAD: u64 = 128;

/// How the kernel is cut: warpgroups that compute, keys of a tile, tiles in flight, whether warpgroups take turns.
#[derive(Debug, Clone, Copy)]
struct Cut {
    warpgroups: u64,
    keys: u64,
    stages: u64,
    in_turns: bool,
}

/// For long rows of keys: three warpgroups keep the tensor cores busy by themselves.
const LONG: Cut = Cut { warpgroups: 3, keys: 80, stages: 3, in_turns: false };
/// For few keys and few rows: a smaller tile of rows leaves less of the device idle.
const SHORT: Cut = Cut { warpgroups: 2, keys: 128, stages: 3, in_turns: true };

/// Keys and tiles of rows below which the short cut is the faster one.
const SHORT_KEYS: u64 = 1024;

/// The kernels of one device.
#[derive(Debug)]
pub(crate) struct Flash {
    long: Variant,
    short: Variant,
    multiprocessors: u64,
}

#[derive(Debug)]
struct Variant {
    cut: Cut,
    kernel: Function,
    shared_bytes: u32,
    _module: Module,
}

impl Flash {
    /// Compiles the kernels; none where the device has not the instructions.
    pub(crate) fn new(
        compiler: &mut Compiler,
        (major, minor): (i32, i32),
        multiprocessors: i32,
    ) -> Done<Option<Flash>> {
        if (major, minor) != (9, 0) {
            return Ok(None);
        }
        let (long, short) = (Variant::new(compiler, LONG)?, Variant::new(compiler, SHORT)?);
        Ok(Some(Flash { long, short, multiprocessors: multiprocessors.max(1) as u64 }))
    }

    /// Whether it does attention of this shape.
    pub(crate) fn fits(shape: &Shape) -> bool {
        shape.head == HEAD
    }

    /// Attention, with rows to `targets` instead of `at.out` where there are any.
    pub(crate) fn run(&self, s: Shape, at: At, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        let tiles = |v: &Variant| s.queries.div_ceil(64 * v.cut.warpgroups) * s.heads;
        let few = s.keys <= SHORT_KEYS && tiles(&self.long) < 4 * self.multiprocessors;
        let v = if few { &self.short } else { &self.long };
        let rows = 64 * v.cut.warpgroups;
        let args = Args::new()
            .map(map(at.q, s.queries, s.heads, rows)?)
            .map(map(at.k, s.keys, s.heads, v.cut.keys)?)
            .map(map(at.v, s.keys, s.heads, v.cut.keys)?)
            .at(at.out)
            .at(at.sums)
            .int(s.queries as i64)
            .int(s.keys as i64)
            .int(s.heads as i64)
            .words(targets.copied().unwrap_or_default().words());
        let blocks = tiles(v).min(self.multiprocessors) as u32;
        let threads = 128 * (v.cut.warpgroups as u32 + 1);
        stream.launch(v.kernel, [blocks, 1, 1], threads, v.shared_bytes, args)
    }
}

impl Variant {
    fn new(compiler: &mut Compiler, cut: Cut) -> Done<Variant> {
        let defines = [
            ("WGS", cut.warpgroups.to_string()),
            ("KEYS", cut.keys.to_string()),
            ("STAGES", cut.stages.to_string()),
            ("ORDERED", u8::from(cut.in_turns).to_string()),
        ];
        let module = compiler.module("attention", &format!("{COMMON}{SOURCE}"), &defines)?;
        let kernel = module.function("attention")?;
        // Q, as many tiles of K and of V as are in flight, and their barriers.
        let row_bytes = 2 * HEAD;
        let bytes =
            64 * cut.warpgroups * row_bytes + 2 * cut.stages * cut.keys * row_bytes + 16 + 32 * cut.stages;
        kernel.allow_shared(bytes as u32)?;
        Ok(Variant { cut, kernel, shared_bytes: bytes as u32, _module: module })
    }
}

/// Rows of all heads side by side, for boxes of one head's rows: a head is two halves of 64 elements, since the copy engine
/// swizzles no more than 128 bytes.
fn map(at: u64, rows: u64, heads: u64, box_rows: u64) -> Done<sys::CUtensorMap> {
    let dims = [HEAD / 2, rows, 2 * heads];
    let strides = [heads * HEAD * 2, HEAD];
    let (tile, steps) = ([HEAD as u32 / 2, box_rows as u32, 2], [1_u32; 3]);
    // SAFETY: the map is written before it is read; plain words have no invalid bits.
    let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: all arrays have as many entries as the map has dims, or one less for strides.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            at as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    made.result()
        .map_err(|e| Failed(format!("a map of {rows} rows of {heads} heads: {}", Failed::from(e))))?;
    Ok(map)
}
