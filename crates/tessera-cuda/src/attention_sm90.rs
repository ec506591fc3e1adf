//! FlashAttention kernels for bf16 heads of 128 on Hopper: they load tiles with TMA and multiply
//! with wgmma. docs/design/0011 compares them with cuDNN.

#![allow(unsafe_code, reason = "launches of kernels on raw addresses")]

use cudarc::driver::sys::CUtensorMap;

use crate::attention_cudnn::{AttentionOperands, AttentionShape};
use crate::capabilities::{ATTENTION_FAMILY, Capabilities};
use crate::collectives::Targets;
use crate::compile::Compiler;
use crate::driver::{CudaResult, CudaStream};
use crate::kernel_params::{Bf16, DevicePtr, LoadedKernel, kernel_signatures};
use crate::kernels::{COMMON, HOPPER};
use crate::tensor_map::{BOX_COLUMNS, encode_tensor_map};

const SOURCE: &str = include_str!("kernels/attention_sm90.cu");

kernel_signatures! {
    ATTENTION_TABLE:

    /// softmax(q · kᵀ · scale) · v for all heads; `lse` is null unless log-sum-exps are stored.
    FlashAttention {
        q_map: CUtensorMap, k_map: CUtensorMap, v_map: CUtensorMap, out: DevicePtr<Bf16>,
        lse: DevicePtr<f32>, rows: i32, keys: i32, heads: i32, long_heads: i32, targets: Targets,
    } = FLASH_ATTENTION "attention";
}

/// Head size, number of compute warpgroups and rows per warpgroup; attention_sm90.cu has the same
/// constants.
const HEAD_SIZE: u64 = 128;
const COMPUTE_WARPGROUPS: u64 = 3;
const WARPGROUP_ROWS: u64 = 64;

/// A tiling of the keys: keys per tile, pipeline stages, and k-slices of 16 columns of Q that stay
/// in registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyTiling {
    tile_keys: u64,
    stages: u64,
    q_reg_slices: u64,
    /// Relative time per key, padding keys of the last tile included, in hundredths of the first
    /// tiling's.
    relative_key_time: u64,
}

pub(crate) const TILINGS: [KeyTiling; 2] = [
    KeyTiling { tile_keys: 80, stages: 3, q_reg_slices: 2, relative_key_time: 100 },
    // More tiles for the same number of keys, but fewer padding keys in the last one.
    KeyTiling { tile_keys: 64, stages: 4, q_reg_slices: 4, relative_key_time: 102 },
];

/// The compiled sm_90 attention kernels of one device, one per [`KeyTiling`].
#[derive(Debug)]
pub(crate) struct AttentionSm90 {
    variants: [TilingKernel; 2],
    multiprocessors: u64,
}

#[derive(Debug)]
struct TilingKernel {
    tiling: KeyTiling,
    kernel: LoadedKernel<FlashAttention>,
    shared_bytes: u32,
}

impl AttentionSm90 {
    /// Compiles the kernels. Returns `None` if the device does not support them.
    pub(crate) fn new(
        compiler: &mut Compiler,
        capabilities: &Capabilities,
    ) -> CudaResult<Option<AttentionSm90>> {
        if !capabilities.supports(&ATTENTION_FAMILY) {
            return Ok(None);
        }
        let [one, other] = TILINGS.map(|cut| TilingKernel::new(compiler, cut));
        let variants = [one?, other?];
        Ok(Some(AttentionSm90 { variants, multiprocessors: u64::from(capabilities.multiprocessors.max(1)) }))
    }

    /// Returns whether the kernels support this shape: they support any shape with heads of
    /// [`HEAD_SIZE`].
    pub(crate) fn is_supported(shape: &AttentionShape) -> bool {
        shape.head_size == HEAD_SIZE
    }

    /// Launches attention. Rows are stored to `targets`, if given, instead of `operands.out`.
    ///
    /// # Safety
    /// Every operand must be device memory of the shape's extent, and so must the parts of the result
    /// at `targets`. All must stay allocated until the stream has completed the work; meanwhile no
    /// other stream may write the inputs or access the results.
    pub(crate) unsafe fn launch_attention(
        &self,
        s: AttentionShape,
        operands: AttentionOperands,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let v = &self.variants[fastest_tiling(s.keys)];
        let rows = COMPUTE_WARPGROUPS * WARPGROUP_ROWS;
        let long_heads = self.choose_long_heads(s.queries, s.heads);
        let args = FlashAttention {
            q_map: head_rows_map(operands.q, s.queries, s.heads, rows)?,
            k_map: head_rows_map(operands.k, s.keys, s.heads, v.tiling.tile_keys)?,
            v_map: head_rows_map(operands.v, s.keys, s.heads, v.tiling.tile_keys)?,
            out: operands.out.into(),
            lse: operands.lse.into(),
            rows: s.queries as i32,
            keys: s.keys as i32,
            heads: s.heads as i32,
            long_heads: long_heads as i32,
            targets: targets.copied().unwrap_or_default(),
        };
        let tiles = active_warpgroups(s.queries, s.heads, long_heads).len() as u64;
        let blocks = tiles.min(self.multiprocessors) as u32;
        let threads = 128 * (COMPUTE_WARPGROUPS as u32 + 1);
        // SAFETY: the caller guarantees the operands; the kernel was compiled for this tiling and
        // keeps inside the shape.
        unsafe { v.kernel.launch([blocks, 1, 1], threads, v.shared_bytes, &args, stream) }
    }

    /// Returns the number of heads that use the longer tiles which minimises the last block's
    /// finish time. Blocks process tiles round robin.
    fn choose_long_heads(&self, queries: u64, heads: u64) -> u64 {
        let finish_time = |long_heads: &u64| {
            let mut busy = vec![0; self.multiprocessors as usize];
            for (i, warpgroups) in active_warpgroups(queries, heads, *long_heads).iter().enumerate() {
                busy[i % self.multiprocessors as usize] += RELATIVE_TILE_TIME[*warpgroups as usize];
            }
            busy.into_iter().max().unwrap_or(0)
        };
        (0..=heads).rev().min_by_key(finish_time).unwrap_or(heads)
    }
}

/// Returns the index of the fastest tiling. The choice depends on the number of keys alone, because
/// a row's bits depend on the tiling and must be the same on one GPU and on several.
fn fastest_tiling(keys: u64) -> usize {
    usize::from(TILINGS[1].relative_time(keys) < TILINGS[0].relative_time(keys))
}

/// Relative time of a tile by its number of active warpgroups, in hundredths of a full tile's:
/// warpgroups share the tensor cores.
const RELATIVE_TILE_TIME: [u32; 4] = [0, 60, 80, 100];

/// Returns the number of active warpgroups of each tile, in schedule order.
fn active_warpgroups(queries: u64, heads: u64, long_heads: u64) -> Vec<u64> {
    let head_tiles = |max_warpgroups: u64| {
        let rows = WARPGROUP_ROWS * max_warpgroups;
        (0..queries.div_ceil(rows))
            .map(move |i| (queries - i * rows).div_ceil(WARPGROUP_ROWS).min(max_warpgroups))
    };
    let longer = (0..long_heads).flat_map(|_| head_tiles(COMPUTE_WARPGROUPS));
    longer.chain((long_heads..heads).flat_map(|_| head_tiles(COMPUTE_WARPGROUPS - 1))).collect()
}

impl TilingKernel {
    fn new(compiler: &mut Compiler, tiling: KeyTiling) -> CudaResult<TilingKernel> {
        let module = compiler.compile_module("attention", &kernel_source(), &tiling.compile_defines())?;
        let kernel = LoadedKernel::new(&module, FLASH_ATTENTION)?;
        // Q, the stages of K and V, and their mbarriers.
        let row_bytes = 2 * HEAD_SIZE;
        let bytes = COMPUTE_WARPGROUPS * WARPGROUP_ROWS * row_bytes
            + 2 * tiling.stages * tiling.tile_keys * row_bytes
            + 16
            + 32 * tiling.stages;
        kernel.set_max_shared_bytes(bytes as u32)?;
        Ok(TilingKernel { tiling, kernel, shared_bytes: bytes as u32 })
    }
}

impl KeyTiling {
    /// Returns the preprocessor macros that compile the kernel for this tiling, as names and
    /// values.
    pub(crate) fn compile_defines(self) -> [(&'static str, String); 3] {
        [("KEYS", self.tile_keys), ("STAGES", self.stages), ("Q_REG_SLICES", self.q_reg_slices)]
            .map(|(k, v)| (k, v.to_string()))
    }

    fn relative_time(self, keys: u64) -> u64 {
        keys.next_multiple_of(self.tile_keys) * self.relative_key_time
    }
}

/// Returns the CUDA source to compile: the code shared by all kernels, that for Hopper, and this
/// kernel.
pub(crate) fn kernel_source() -> String {
    format!("{COMMON}{HOPPER}{SOURCE}")
}

/// Builds a TMA descriptor of rows with all heads side by side. A box holds rows of one head as two
/// halves of 64 columns.
fn head_rows_map(at: u64, rows: u64, heads: u64, box_rows: u64) -> CudaResult<CUtensorMap> {
    let halves = [BOX_COLUMNS, rows, 2 * heads];
    encode_tensor_map(
        at,
        halves,
        &[heads * HEAD_SIZE * 2, HEAD_SIZE],
        [BOX_COLUMNS as u32, box_rows as u32, 2],
    )
}

#[cfg(test)]
mod tests {
    use tessera_device::dtype::to_bf16_bits;

    use super::*;
    use crate::device_memory::{DeviceMemory, copy_to_device, copy_to_host, widen_bf16};
    use crate::driver::CudaEvent;
    use crate::test_gpu::open_test_gpu;

    #[test]
    fn the_fastest_tiling_is_chosen() {
        // The video model at both sizes, the text, the images, and a single tile of each kind.
        for (keys, of_tile) in [(9360, 80), (4320, 80), (512, 64), (257, 80), (64, 64), (80, 80), (1, 64)] {
            assert_eq!(TILINGS[fastest_tiling(keys)].tile_keys, of_tile, "{keys} keys");
        }
    }

    #[test]
    fn tiles_cover_every_row_once() {
        for (queries, heads, long_heads) in [(1, 1, 1), (72, 3, 1), (4680, 40, 37), (2160, 5, 0)] {
            let tiles = active_warpgroups(queries, heads, long_heads);
            assert!(tiles.iter().all(|warpgroups| (1..=3).contains(warpgroups)));
            assert_eq!(tiles.iter().sum::<u64>(), queries.div_ceil(64) * heads);
        }
    }

    const HEADS: usize = 2;
    const WIDTH: usize = HEADS * HEAD_SIZE as usize;

    /// Returns rows of all heads; the values oscillate between `size` and `-size`.
    fn oscillating_rows(n: usize, size: f32, seed: f32) -> Vec<f32> {
        (0..n * WIDTH).map(|i| widen_bf16(to_bf16_bits(size * (i as f32 * 0.7331 + seed).sin()))).collect()
    }

    /// Returns keys whose magnitude falls towards the last one. The last keys form the tile that is
    /// processed first, so its row maximum is far below the final one.
    fn decreasing_keys(n: usize) -> Vec<f32> {
        let row = |i: usize| 1.0 - (i / WIDTH) as f32 / n as f32;
        oscillating_rows(n, 2.0, 0.2)
            .iter()
            .enumerate()
            .map(|(i, k)| widen_bf16(to_bf16_bits(k * row(i))))
            .collect()
    }

    fn scores(q: &[f32], k: &[f32], head: usize) -> Vec<f64> {
        let columns = head * 128..(head + 1) * 128;
        let score = |k: &[f32]| {
            let pairs = q[columns.clone()].iter().zip(&k[columns.clone()]);
            pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() / 128_f64.sqrt()
        };
        k.chunks(WIDTH).map(score).collect()
    }

    fn largest(scores: &[f64]) -> f64 {
        scores.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Computes attention of every head in f64.
    fn reference_attention(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; q.len()];
        for (q, out) in q.chunks(WIDTH).zip(out.chunks_mut(WIDTH)) {
            for (head, out) in out.chunks_mut(128).enumerate() {
                let scores = scores(q, k, head);
                let exponentials: Vec<f64> = scores.iter().map(|s| (s - largest(&scores)).exp()).collect();
                let sum: f64 = exponentials.iter().sum();
                for (c, out) in out.iter_mut().enumerate() {
                    let of_row = |row: &[f32]| f64::from(row[head * 128 + c]);
                    let terms = exponentials.iter().zip(v.chunks(WIDTH)).map(|(p, row)| p * of_row(row));
                    *out = (terms.sum::<f64>() / sum) as f32;
                }
            }
        }
        out
    }

    const QUERIES: usize = 300;
    /// Numbers of keys that select each tiling and leave a ragged end.
    const KEYS: [usize; 2] = [185, 235];
    /// Magnitudes of q, with the range of exponents (base 2) of the largest score relative to the
    /// first tile's maximum: no rescaling, rescaling, and overflow of f32.
    const SIZES: [(f32, std::ops::Range<f64>); 4] =
        [(1.0, 0.0..20.0), (2.5, 25.0..95.0), (20.0, 101.0..500.0), (300.0, 500.0..9000.0)];

    #[test]
    fn sizes_cover_every_rescaling_case() {
        for (keys, (size, exponents)) in KEYS.into_iter().flat_map(|keys| SIZES.map(|of| (keys, of))) {
            let (q, k) = (oscillating_rows(QUERIES, size, 0.1), decreasing_keys(keys));
            let tile = TILINGS[fastest_tiling(keys as u64)].tile_keys as usize;
            let known = (keys - 1) / tile * tile;
            let excess = |q: &[f32]| {
                let scores = scores(q, &k, 0);
                (largest(&scores) - largest(&scores[known..])) * std::f64::consts::LOG2_E
            };
            let highest = q.chunks(WIDTH).map(excess).fold(0.0, f64::max);
            assert!(exponents.contains(&highest), "{keys} keys, q of {size}: two to the {highest}");
        }
    }

    #[test]
    fn results_match_the_reference_and_are_row_invariant() {
        let Some(mut gpu) = open_test_gpu() else { return };
        let Some(mut flash) = AttentionSm90::new(&mut gpu.compiler, &gpu.capabilities).unwrap() else {
            eprintln!("skipped: not a Hopper GPU");
            return;
        };
        let on_device = |x: &[f32]| {
            let memory = DeviceMemory::new(2 * x.len()).unwrap();
            let bits: Vec<u16> = x.iter().map(|x| to_bf16_bits(*x)).collect();
            copy_to_device(memory.slice(0, bits.len()).unwrap(), &bits).unwrap();
            memory
        };
        let stream = CudaStream::new(false).unwrap();
        for (keys, (size, _)) in KEYS.into_iter().flat_map(|keys| SIZES.map(|of| (keys, of))) {
            let (q, k, v) = (
                oscillating_rows(QUERIES, size, 0.1),
                decreasing_keys(keys),
                oscillating_rows(keys, 1.0, 0.3),
            );
            let [at_q, at_k, at_v] = [&q, &k, &v].map(|x| on_device(x));
            let run = |flash: &AttentionSm90, skip: usize| {
                let out = on_device(&vec![f32::NAN; q.len()]);
                let n = QUERIES - skip;
                let (queries, keys) = (n as u64, keys as u64);
                let s = AttentionShape {
                    queries,
                    keys,
                    heads: HEADS as u64,
                    head_size: HEAD_SIZE,
                    stores_lse: false,
                };
                let from = at_q.device_address() + (2 * skip * WIDTH) as u64;
                let at = AttentionOperands {
                    q: from,
                    k: at_k.device_address(),
                    v: at_v.device_address(),
                    out: out.device_address(),
                    lse: 0,
                };
                // SAFETY: the operands hold the shape's rows, and the stream is waited for below.
                unsafe { flash.launch_attention(s, at, None, &stream) }.unwrap();
                stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
                let mut result = vec![0_u16; n * WIDTH];
                let len = result.len();
                copy_to_host(&mut result, out.slice(0, len).unwrap()).unwrap();
                result
            };
            let context = format!("{keys} keys, q of {size}");
            let all = run(&flash, 0);
            assert!(all.iter().all(|x| widen_bf16(*x).is_finite()), "{context}: some values are not finite");
            let error = |(result, want): (&u16, f32)| (widen_bf16(*result) - want).abs();
            let worst = all.iter().zip(reference_attention(&q, &k, &v)).map(error).fold(0.0, f32::max);
            assert!(worst < 0.02, "{context}: the largest error is {worst}");
            for skip in [1, 37, 64] {
                assert!(
                    run(&flash, skip) == all[skip * WIDTH..],
                    "{context}: the bits change without the first {skip} rows"
                );
            }
            // A single block processes all tiles, so every tile uses three warpgroups.
            let multiprocessors = std::mem::replace(&mut flash.multiprocessors, 1);
            assert!(run(&flash, 0) == all, "{context}: the bits change with longer tiles");
            flash.multiprocessors = multiprocessors;
        }
    }
}
