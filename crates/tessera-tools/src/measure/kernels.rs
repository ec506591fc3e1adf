//! Times the CPU backend's kernels over sizes: matmuls, attention, elementwise and norm kernels,
//! and the overhead of one op.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::kernels::{
    Activation, FrameIndexing, MatmulWeight, PackedWeight, RopeSpec, RopeTables, Scratch, add, attention,
    bias_act, matmul, norm_modulate, rms_norm, rope,
};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, MeshRank, NoObserver, WeightSource};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

use super::rank_threads::{RankThreads, median_ns};
use crate::codes::T0048;

/// A size and its time in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Timed<S> {
    pub(super) size: S,
    pub(super) ns: f64,
}

/// Rows, output features and input features of a matmul.
pub(super) type MatmulSize = [usize; 3];

/// Queries, keys and heads of an attention.
pub(super) type AttentionSize = [usize; 3];

/// Head dimension of all measurements.
pub(super) const HEAD_DIM: usize = 64;
/// Columns of the elementwise measurements.
const WIDTH: usize = 256;
/// Bytes of one operand that exceeds every current cache.
const UNCACHED_BYTES: usize = 64 << 20;

/// Bytes of the weights or KV caches of a small model.
const MODEL_BYTES: usize = 16 << 20;
/// Maximum number of operand sets through which a measurement cycles.
const MAX_SETS: usize = 64;

/// Returns the number of operand sets to cycle through, for operands of `numbers` elements. A model
/// has many layers, and when a layer runs again, the others have evicted its operands from the
/// caches of a core.
fn operand_sets(numbers: usize) -> usize {
    (MODEL_BYTES / (4 * numbers.max(1))).clamp(1, MAX_SETS)
}

pub(super) fn time_matmuls(team: &RankThreads, quick: bool) -> Result<Vec<Timed<MatmulSize>>, Diagnostic> {
    let (ms, ns, ks): (&[usize], &[usize], &[usize]) = if quick {
        (&[4, 64, 256], &[64, 512], &[64, 512])
    } else {
        (&[1, 8, 64, 192, 768], &[32, 128, 512, 1024], &[64, 128, 512, 1024])
    };
    let mut out = Vec::new();
    for m in ms {
        for n in ns {
            for k in ks {
                out.push(time_matmul(team, [*m, *n, *k])?);
            }
        }
    }
    Ok(out)
}

fn time_matmul(team: &RankThreads, [m, n, k]: MatmulSize) -> Result<Timed<MatmulSize>, Diagnostic> {
    let ns = team.time_on_all(|_, pool| {
        let (x, bias, mut y) = (ramp_values(m * k), ramp_values(n), vec![0.0; m * n]);
        let packed: Vec<PackedWeight> =
            (0..operand_sets(n * k)).map(|_| PackedWeight::new(pool, &ramp_values(n * k), n, k)).collect();
        let (pool, mut scratch, mut turn) = (pool.clone(), Scratch::new(), 0);
        move || {
            turn = (turn + 1) % packed.len();
            let w = MatmulWeight::Packed(&packed[turn]);
            matmul(&pool, &mut scratch, &mut y, &x, w, (m, n, k), Some(&bias), None, 1);
        }
    })?;
    Ok(Timed { size: [m, n, k], ns })
}

pub(super) fn time_attentions(
    team: &RankThreads,
    quick: bool,
) -> Result<Vec<Timed<AttentionSize>>, Diagnostic> {
    let (queries, keys, heads): (&[usize], &[usize], &[usize]) =
        if quick { (&[16, 128], &[64, 512], &[2]) } else { (&[16, 64, 256], &[64, 256, 1024], &[1, 4]) };
    let mut out = Vec::new();
    for q in queries {
        for k in keys {
            for h in heads {
                out.push(time_attention(team, [*q, *k, *h])?);
            }
        }
    }
    Ok(out)
}

/// Times one query over keys and values that exceed every cache: the cost of reading them.
pub(super) fn time_single_query(team: &RankThreads) -> Result<Timed<AttentionSize>, Diagnostic> {
    let heads = 4;
    time_attention(team, [1, UNCACHED_BYTES / 4 / (HEAD_DIM * heads), heads])
}

fn time_attention(
    team: &RankThreads,
    [queries, keys, heads]: AttentionSize,
) -> Result<Timed<AttentionSize>, Diagnostic> {
    let width = heads * HEAD_DIM;
    let ns = team.time_on_all(|_, pool| {
        let (q, mut turn) = (ramp_values(queries * width), 0);
        let kv: Vec<_> = (0..operand_sets(2 * keys * width))
            .map(|_| (ramp_values(keys * width), ramp_values(keys * width)))
            .collect();
        let (pool, mut scratch, mut y) = (pool.clone(), Scratch::new(), vec![0.0; queries * width]);
        move || {
            turn = (turn + 1) % kv.len();
            let (k, v) = &kv[turn];
            attention(&pool, &mut scratch, &mut y, &q, k, v, (width, HEAD_DIM), None);
        }
    })?;
    Ok(Timed { size: [queries, keys, heads], ns })
}

/// Times additions of two arrays over sizes, in bytes read and written.
pub(super) fn time_adds(team: &RankThreads, quick: bool) -> Result<Vec<Timed<f64>>, Diagnostic> {
    let sizes: &[usize] = if quick { &[12, 16, 19, 22] } else { &[10, 12, 14, 16, 18, 20, 22] };
    sizes.iter().map(|log| time_add(team, 1 << log)).collect()
}

/// Times an addition of arrays that exceed the caches.
pub(super) fn time_memory(team: &RankThreads) -> Result<Timed<f64>, Diagnostic> {
    time_add(team, UNCACHED_BYTES / 4)
}

fn time_add(team: &RankThreads, len: usize) -> Result<Timed<f64>, Diagnostic> {
    let ns = team.time_on_all(|_, pool| {
        let (a, b, mut y) = (ramp_values(len), ramp_values(len), vec![0.0; len]);
        let pool = pool.clone();
        move || add(&pool, &mut y, &a, &b)
    })?;
    Ok(Timed { size: 3.0 * 4.0 * len as f64, ns })
}

/// Times norm, RoPE and activation kernels.
pub(super) fn time_compute_kernels(team: &RankThreads, quick: bool) -> Result<Vec<Timed<f64>>, Diagnostic> {
    let mut out = Vec::new();
    for rows in row_counts(quick) {
        let (rows, len) = (*rows, rows * WIDTH);
        let bytes = |extra: usize| 4.0 * (2 * len + extra) as f64;
        let mut keep = |extra: usize, ns: f64| out.push(Timed { size: bytes(extra), ns });
        let norm = |_: usize, pool: &Pool| {
            let (x, w, mut y, pool) = (ramp_values(len), ramp_values(WIDTH), vec![0.0; len], pool.clone());
            move || rms_norm(&pool, &mut y, &x, &w, 1, 1e-6)
        };
        keep(WIDTH, team.time_on_all(norm)?);
        let modulated = |_: usize, pool: &Pool| {
            let (x, m, mut y, pool) =
                (ramp_values(len), ramp_values(6 * WIDTH), vec![0.0; len], pool.clone());
            let frames = FrameIndexing { first_row: 0, rows_per_frame: rows };
            move || norm_modulate(&pool, &mut y, &x, WIDTH, &m, 6, (0, 1), frames, 1e-6)
        };
        keep(6 * WIDTH, team.time_on_all(modulated)?);
        let rotated = |_: usize, pool: &Pool| {
            let (x, mut y, pool) = (ramp_values(len), vec![0.0; len], pool.clone());
            let spec = RopeSpec { head_dim: HEAD_DIM, grid: [1, 1, rows], start: 0, frame_stride: 1 };
            let tables = RopeTables::new(spec);
            move || rope(&pool, &mut y, &x, WIDTH, 0, &tables)
        };
        keep(0, team.time_on_all(rotated)?);
        let active = |_: usize, pool: &Pool| {
            let (x, b, mut y, pool) = (ramp_values(len), ramp_values(WIDTH), vec![0.0; len], pool.clone());
            move || bias_act(&pool, &mut y, &x, &b, Some(Activation::GeluTanh))
        };
        keep(WIDTH, team.time_on_all(active)?);
    }
    Ok(out)
}

fn row_counts(quick: bool) -> &'static [usize] {
    if quick { &[16, 256] } else { &[16, 64, 256, 1024] }
}

/// Number of ops in the program that measures the overhead per op.
const OP_COUNT: usize = 64;

struct NoWeights;

impl WeightSource for NoWeights {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Err(Diagnostic::error(&T0048, format!("a program without weights reads `{name}`")))
    }
}

/// Measures the backend's overhead per op with a program of minimal ops.
pub(super) fn op_overhead(budget: Duration) -> Result<f64, Diagnostic> {
    let mut text = "program @p role(r) mesh(tp=1) streams(compute) {\n%x0 = input : f32[1, 4]\n".to_string();
    for i in 0..OP_COUNT {
        text += &format!("%x{} = ttile.add %x{i}, %x{i} @compute\n", i + 1);
    }
    text += &format!("output \"y\", %x{OP_COUNT}\n}}\n");
    let own =
        |why: String| Diagnostic::error(&T0048, format!("the program of minimal ops does not run: {why}"));
    let program = parse_all(&text, "measure")
        .map_err(|ds| own(ds.first().map_or(String::new(), |d| d.message.clone())))?
        .into_iter()
        .next()
        .ok_or_else(|| own("the program is empty".to_string()))?;
    let slots = Slots {
        slot_bytes: program
            .values
            .iter()
            .map(|v| if v.ty.is_token() { 4 } else { v.ty.byte_size().0 })
            .collect(),
        value_slots: (0..program.values.len() as u32).map(Some).collect(),
    };
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
    let loaded = cpu.load(&Arc::new(program), &slots, &mut NoWeights)?;
    let x = [0.0; 4];
    let call = CallData { inputs: BTreeMap::from([("x0", &x[..])]), ..CallData::default() };
    let mut fault = None;
    let ns =
        median_ns(budget, &mut || fault = fault.take().or(cpu.run(loaded, &call, &mut NoObserver).err()));
    match fault {
        Some(fault) => Err(own(format!("{fault:?}"))),
        None => Ok(ns / OP_COUNT as f64),
    }
}

/// Returns values that are neither all equal nor denormal.
pub(super) fn ramp_values(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 251) as f32 * 0.004 - 0.5).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_op_by_itself_takes_some_time() {
        assert!(op_overhead(Duration::from_millis(1)).unwrap() > 0.0);
    }
}
