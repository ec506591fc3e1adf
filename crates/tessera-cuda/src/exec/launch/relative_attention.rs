//! Attention with a bias by distance: the tiled kernel in bf16, or the plain one for f32 and other head
//! sizes.

use tessera_ir::{DType, ValueId, views};

use super::elementwise::kernel_for_dtype;
use super::site::LaunchSite;
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_table::{
    BucketStarts, MAX_BUCKETS_PER_DIRECTION, RELATIVE_ATTENTION_BF16, RELATIVE_ATTENTION_F32,
    RELATIVE_ATTENTION_TILED, RelativeAttention,
};
use crate::kernels::{HeadBlocks, KernelLaunch};

/// Queries of a block of the tiled kernel, and keys that it reads at a time; as in relative_attention.cu.
const TILE: u64 = 64;
/// Threads of a block of either kernel.
const THREADS: u32 = 128;
/// Tiles in shared memory of the tiled kernel: one of q, and two of k and of v.
const SHARED_TILES: u64 = 5;
/// Bytes by which a row in shared memory is longer than a head.
const ROW_PADDING_BYTES: u64 = 16;
/// Head sizes, in elements, that the tiled kernel supports are multiples of the first, up to the second.
const HEAD_STEP: u64 = 16;
const MAX_TILED_HEAD: u64 = 128;
/// Maximum head size, in elements, of the plain kernel.
const MAX_HEAD: u64 = 512;

/// Extents of an attention with a bias by distance.
#[derive(Debug, Clone, Copy)]
struct RelativeShape {
    dtype: DType,
    queries: u64,
    keys: u64,
    heads: u64,
    head: u64,
    buckets: u64,
    max_distance: u64,
}

/// Addresses of the operands q, k, v, table, length and out, and the row pitches of the first three in
/// elements.
#[derive(Debug, Clone, Copy)]
struct RelativeOperands {
    at: [u64; 6],
    pitches: [u64; 3],
}

pub(super) fn build_relative_attention(
    s: &LaunchSite<'_>,
    v: &views::RelativeAttention,
    out: ValueId,
) -> CudaResult<KernelLaunch> {
    let (q, table) = (s.p.type_of(v.q), s.p.type_of(v.table));
    if table.dtype != DType::F32 {
        return cuda_failure(format!("a table of biases in {}", table.dtype));
    }
    let shape = RelativeShape {
        dtype: q.dtype,
        queries: q.shape[0],
        keys: s.p.type_of(v.k).shape[0],
        heads: q.shape[1] / v.head_dim,
        head: v.head_dim,
        buckets: table.shape[0],
        max_distance: v.max_distance,
    };
    let operands = RelativeOperands {
        at: [s.at(v.q)?, s.at(v.k)?, s.at(v.v)?, s.at(v.table)?, s.at(v.length)?, s.at(out)?],
        pitches: [v.q, v.k, v.v].map(|v| s.row_pitch(v)),
    };
    relative_attention_launch(shape, operands)
}

fn relative_attention_launch(s: RelativeShape, operands: RelativeOperands) -> CudaResult<KernelLaunch> {
    if s.head > MAX_HEAD {
        return cuda_failure(format!("heads of {} elements, above {MAX_HEAD}", s.head));
    }
    if s.buckets > 2 * MAX_BUCKETS_PER_DIRECTION as u64 {
        return cuda_failure(format!("{} buckets, above {}", s.buckets, 2 * MAX_BUCKETS_PER_DIRECTION));
    }
    let ([q, k, v, table, length, out], pitches) = (operands.at, operands.pitches.map(|n| n as i32));
    let args = RelativeAttention {
        q: q.into(),
        k: k.into(),
        v: v.into(),
        table: table.into(),
        length: length.into(),
        out: out.into(),
        queries: s.queries as i32,
        keys: s.keys as i32,
        heads: s.heads as i32,
        head: s.head as i32,
        q_pitch: pitches[0],
        k_pitch: pitches[1],
        v_pitch: pitches[2],
        buckets: s.buckets as i32,
        starts: find_bucket_starts(s.buckets / 2, s.max_distance),
    };
    if uses_tiled_kernel(s.dtype, s.head) {
        let blocks = HeadBlocks {
            count: s.heads * s.queries.div_ceil(TILE),
            threads: THREADS,
            shared_bytes: tiled_shared_bytes(s.head, s.buckets),
        };
        return Ok(KernelLaunch::for_heads(RELATIVE_ATTENTION_TILED, s.head, blocks, args));
    }
    // One warp per query and head, which keeps its query in shared memory.
    let warps = u64::from(THREADS / 32);
    let blocks = HeadBlocks {
        count: (s.queries * s.heads).div_ceil(warps),
        threads: THREADS,
        shared_bytes: (warps * s.head * 4) as u32,
    };
    let kernel = kernel_for_dtype(s.dtype, RELATIVE_ATTENTION_F32, RELATIVE_ATTENTION_BF16);
    Ok(KernelLaunch::for_heads(kernel, 0, blocks, args))
}

fn uses_tiled_kernel(dtype: DType, head: u64) -> bool {
    dtype == DType::Bf16 && head.is_multiple_of(HEAD_STEP) && head <= MAX_TILED_HEAD
}

/// Returns the bytes of the tiles, of the head's column of the table, and of the biases of two tiles.
fn tiled_shared_bytes(head: u64, buckets: u64) -> u32 {
    (SHARED_TILES * TILE * (2 * head + ROW_PADDING_BYTES) + 4 * (buckets + 2 * TILE)) as u32
}

/// Returns the smallest distance of each bucket of one direction. Buckets that no distance reaches start
/// behind every distance.
fn find_bucket_starts(per_direction: u64, max_distance: u64) -> BucketStarts {
    let mut first = [i32::MAX; MAX_BUCKETS_PER_DIRECTION];
    for (bucket, first) in first.iter_mut().enumerate().take(per_direction as usize) {
        // The bucket grows with the distance, so the first distance is found by bisection.
        let (mut low, mut high) = (0_u64, i32::MAX as u64);
        while low < high {
            let middle = u64::midpoint(low, high);
            if bucket_of(middle, per_direction, max_distance) >= bucket as u64 {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        *first = low as i32;
    }
    BucketStarts { first }
}

/// Returns the bucket of a distance among those of its direction, as the op table defines it.
fn bucket_of(distance: u64, per_direction: u64, max_distance: u64) -> u64 {
    let exact = per_direction / 2;
    if distance < exact {
        return distance;
    }
    let in_units = |d: u64| (d as f64 / exact as f64).ln();
    let logarithmic = in_units(distance) / in_units(max_distance) * (per_direction - exact) as f64;
    (exact + logarithmic as u64).min(per_direction - 1)
}

#[cfg(test)]
mod tests {
    use tessera_device::dtype::to_bf16_bits;

    use super::*;
    use crate::device_memory::{DeviceMemory, copy_to_device, copy_to_host, widen_bf16};
    use crate::driver::{CudaEvent, CudaStream};
    use crate::kernels::KernelSet;
    use crate::test_gpu::open_test_gpu;

    #[test]
    fn the_starts_of_buckets_find_the_bucket_of_every_distance() {
        // The encoder of Wan, an odd number of buckets per direction, and buckets that nothing reaches.
        for (per_direction, max_distance) in [(16, 128), (5, 40), (2, 2), (128, 70), (64, 100_000)] {
            let starts = find_bucket_starts(per_direction, max_distance).first;
            for distance in 0..3000 {
                let found = starts[..per_direction as usize].partition_point(|s| *s as u64 <= distance) - 1;
                let expected = bucket_of(distance, per_direction, max_distance);
                assert_eq!(found as u64, expected, "{distance} of {per_direction}, {max_distance}");
            }
        }
        let umt5 = find_bucket_starts(16, 128).first;
        assert_eq!(umt5[..16], [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
    }

    #[test]
    fn only_heads_of_whole_steps_in_bf16_use_the_tiled_kernel() {
        let tiled = |head| uses_tiled_kernel(DType::Bf16, head);
        assert!(tiled(16) && tiled(64) && tiled(128) && !tiled(24) && !tiled(144));
        assert!(!uses_tiled_kernel(DType::F32, 64));
        // Four blocks of the encoder of Wan share a multiprocessor, which has 227 KiB.
        assert_eq!(tiled_shared_bytes(64, 32), 46_720);
    }

    /// Values that oscillate between `size` and `-size`, rounded to the dtype.
    fn oscillating(dtype: DType, n: u64, size: f32, seed: f32) -> Vec<f32> {
        let round = |x: f32| if dtype == DType::Bf16 { widen_bf16(to_bf16_bits(x)) } else { x };
        (0..n).map(|i| round(size * (i as f32 * 0.7331 + seed).sin())).collect()
    }

    fn upload(dtype: DType, values: &[f32]) -> DeviceMemory {
        let memory = DeviceMemory::new(4 * values.len()).unwrap();
        let bits: Vec<u16> = values.iter().map(|x| to_bf16_bits(*x)).collect();
        match dtype {
            DType::Bf16 => copy_to_device(memory.slice(0, bits.len()).unwrap(), &bits).unwrap(),
            _ => copy_to_device(memory.slice(0, values.len()).unwrap(), values).unwrap(),
        }
        memory
    }

    fn download(dtype: DType, memory: &DeviceMemory, n: usize) -> Vec<f32> {
        let (mut bits, mut values) = (vec![0_u16; n], vec![0.0_f32; n]);
        match dtype {
            DType::Bf16 => copy_to_host(&mut bits, memory.slice(0, n).unwrap()).unwrap(),
            _ => copy_to_host(&mut values, memory.slice(0, n).unwrap()).unwrap(),
        }
        if dtype == DType::Bf16 { bits.into_iter().map(widen_bf16).collect() } else { values }
    }

    /// Computes the attention in f64.
    fn reference(s: RelativeShape, [q, k, v, table]: [&[f32]; 4], length: usize) -> Vec<f64> {
        let (head, width) = (s.head as usize, (s.heads * s.head) as usize);
        let mut out = vec![0.0; s.queries as usize * width];
        for (i, h) in (0..s.queries as usize).flat_map(|i| (0..s.heads as usize).map(move |h| (i, h))) {
            let row = |x: &'_ [f32], j: usize| x[j * width + h * head..][..head].to_vec();
            let query = row(q, i);
            let scores: Vec<f64> = (0..length)
                .map(|j| {
                    let dot = query.iter().zip(row(k, j)).map(|(a, b)| f64::from(*a) * f64::from(b));
                    let offset = if j > i { s.buckets / 2 } else { 0 };
                    let bucket = offset + bucket_of(i.abs_diff(j) as u64, s.buckets / 2, s.max_distance);
                    dot.sum::<f64>() + f64::from(table[(bucket * s.heads) as usize + h])
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (j, weight) in weights.iter().enumerate() {
                let to = out[i * width + h * head..][..head].iter_mut();
                to.zip(row(v, j)).for_each(|(o, x)| *o += weight / sum * f64::from(x));
            }
        }
        out
    }

    #[test]
    fn results_match_the_reference_at_ragged_ends_and_short_lengths() {
        let Some(gpu) = open_test_gpu() else { return };
        let mut kernels = KernelSet::new(gpu.compiler, &gpu.capabilities).unwrap();
        let stream = CudaStream::new(false).unwrap();
        let heads =
            [(DType::Bf16, 64), (DType::Bf16, 16), (DType::Bf16, 128), (DType::Bf16, 6), (DType::F32, 6)];
        for ((dtype, head), length) in heads.into_iter().flat_map(|h| [1, 63, 64, 130, 157].map(|n| (h, n))) {
            let s = RelativeShape {
                dtype,
                queries: 131,
                keys: 157,
                heads: 3,
                head,
                buckets: 32,
                max_distance: 128,
            };
            let width = s.heads * s.head;
            let q = oscillating(dtype, s.queries * width, 1.5, 0.1);
            let mut k = oscillating(dtype, s.keys * width, 1.0, 0.2);
            let mut v = oscillating(dtype, s.keys * width, 1.0, 0.3);
            let table = oscillating(DType::F32, s.buckets * s.heads, 4.0, 0.4);
            let expected = reference(s, [&q, &k, &v, &table], length);
            // The rows behind the length must not be read.
            for x in [&mut k, &mut v] {
                x[length * width as usize..].fill(f32::NAN);
            }
            let on_device = [&q, &k, &v].map(|x| upload(dtype, x));
            let (bias, count) = (upload(DType::F32, &table), DeviceMemory::new(8).unwrap());
            copy_to_device(count.slice(0, 1).unwrap(), &[length as i64]).unwrap();
            let out = upload(dtype, &vec![f32::NAN; q.len()]);
            let [at_q, at_k, at_v] = on_device.each_ref().map(DeviceMemory::device_address);
            let at = [at_q, at_k, at_v, bias.device_address(), count.device_address(), out.device_address()];
            let launch = relative_attention_launch(s, RelativeOperands { at, pitches: [width; 3] }).unwrap();
            kernels.prepare_launch(&launch).unwrap();
            // SAFETY: the operands hold the shape's rows, and the stream is waited for below.
            #[allow(unsafe_code, reason = "a launch on the memory of this test")]
            unsafe { kernels.launch(&launch, &stream) }.unwrap();
            stream.spin_until_done(&CudaEvent::new().unwrap()).unwrap();
            let found = download(dtype, &out, q.len());
            let worst =
                found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            let limit = if dtype == DType::Bf16 { 1.5e-2 } else { 2e-6 };
            let has_nan = found.iter().any(|x| x.is_nan());
            assert!(!has_nan && worst < limit, "{dtype}, heads of {head}, {length} keys: {worst}");
        }
    }
}
