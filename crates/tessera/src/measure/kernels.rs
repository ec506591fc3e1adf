//! What the CPU backend's kernels take over sizes: products, attention, passes over memory, an op by itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::kernels::{
    Act, Frames, PackedWeight, RopeSpec, RopeTables, Scratch, Weight, add, attention, bias_act, matmul,
    norm_modulate, rms_norm, rope,
};
use tessera_cpu::{Cpu, Pool};
use tessera_device::{Backend, CallData, Observer, Seat, WeightSource};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

use super::T0048;
use super::team::{Team, usual_ns};

/// One size of something, and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Timed<S> {
    pub(super) size: S,
    pub(super) ns: f64,
}

/// Rows, output and input features.
pub(super) type Product = [usize; 3];

/// Queries, keys, heads.
pub(super) type Seen = [usize; 3];

/// Width of a head in what is measured.
pub(super) const HEAD: usize = 64;
/// Columns of what passes go over.
const WIDTH: usize = 256;
/// Bytes of one operand that no cache of today holds.
const BEYOND_CACHES: usize = 64 << 20;

/// Bytes of the weights or caches of a small model.
const OF_A_MODEL: usize = 16 << 20;
/// Most sets of operands.
const MOST_SETS: usize = 64;

/// Sets of operands of so many numbers to go round: a model has many layers, and when one's turn comes again, others have taken
/// its place in the caches near a core.
fn sets(numbers: usize) -> usize {
    (OF_A_MODEL / (4 * numbers.max(1))).clamp(1, MOST_SETS)
}

pub(super) fn products(team: &Team, quick: bool) -> Result<Vec<Timed<Product>>, Diagnostic> {
    let (ms, ns, ks): (&[usize], &[usize], &[usize]) = if quick {
        (&[4, 64, 256], &[64, 512], &[64, 512])
    } else {
        (&[1, 8, 64, 192, 768], &[32, 128, 512, 1024], &[64, 128, 512, 1024])
    };
    let mut out = Vec::new();
    for m in ms {
        for n in ns {
            for k in ks {
                out.push(product(team, [*m, *n, *k])?);
            }
        }
    }
    Ok(out)
}

fn product(team: &Team, [m, n, k]: Product) -> Result<Timed<Product>, Diagnostic> {
    let ns = team.time(|_, pool| {
        let (x, bias, mut y) = (ramp(m * k), ramp(n), vec![0.0; m * n]);
        let packed: Vec<PackedWeight> =
            (0..sets(n * k)).map(|_| PackedWeight::new(pool, &ramp(n * k), n, k)).collect();
        let (pool, mut scratch, mut turn) = (pool.clone(), Scratch::new(), 0);
        move || {
            turn = (turn + 1) % packed.len();
            let w = Weight::Packed(&packed[turn]);
            matmul(&pool, &mut scratch, &mut y, &x, w, (m, n, k), Some(&bias), Act::None, 1);
        }
    })?;
    Ok(Timed { size: [m, n, k], ns })
}

pub(super) fn attentions(team: &Team, quick: bool) -> Result<Vec<Timed<Seen>>, Diagnostic> {
    let (queries, keys, heads): (&[usize], &[usize], &[usize]) =
        if quick { (&[16, 128], &[64, 512], &[2]) } else { (&[16, 64, 256], &[64, 256, 1024], &[1, 4]) };
    let mut out = Vec::new();
    for q in queries {
        for k in keys {
            for h in heads {
                out.push(seen(team, [*q, *k, *h])?);
            }
        }
    }
    Ok(out)
}

/// One query per sequence over keys and values that no cache holds: what reading them takes.
pub(super) fn one_query(team: &Team) -> Result<Timed<Seen>, Diagnostic> {
    let heads = 4;
    seen(team, [1, BEYOND_CACHES / 4 / (HEAD * heads), heads])
}

fn seen(team: &Team, [queries, keys, heads]: Seen) -> Result<Timed<Seen>, Diagnostic> {
    let width = heads * HEAD;
    let ns = team.time(|_, pool| {
        let (q, mut turn) = (ramp(queries * width), 0);
        let kv: Vec<_> =
            (0..sets(2 * keys * width)).map(|_| (ramp(keys * width), ramp(keys * width))).collect();
        let (pool, mut scratch, mut y) = (pool.clone(), Scratch::new(), vec![0.0; queries * width]);
        move || {
            turn = (turn + 1) % kv.len();
            let (k, v) = &kv[turn];
            attention(&pool, &mut scratch, &mut y, &q, k, v, (width, HEAD), None);
        }
    })?;
    Ok(Timed { size: [queries, keys, heads], ns })
}

/// Sums of two over sizes, by bytes read and written.
pub(super) fn plain_passes(team: &Team, quick: bool) -> Result<Vec<Timed<f64>>, Diagnostic> {
    let sizes: &[usize] = if quick { &[12, 16, 19, 22] } else { &[10, 12, 14, 16, 18, 20, 22] };
    sizes.iter().map(|log| sum(team, 1 << log)).collect()
}

/// The same beyond the caches.
pub(super) fn memory(team: &Team) -> Result<Timed<f64>, Diagnostic> {
    sum(team, BEYOND_CACHES / 4)
}

fn sum(team: &Team, len: usize) -> Result<Timed<f64>, Diagnostic> {
    let ns = team.time(|_, pool| {
        let (a, b, mut y) = (ramp(len), ramp(len), vec![0.0; len]);
        let pool = pool.clone();
        move || add(&pool, &mut y, &a, &b)
    })?;
    Ok(Timed { size: 3.0 * 4.0 * len as f64, ns })
}

/// Passes that compute on the way: norms, a rotation, an activation.
pub(super) fn working_passes(team: &Team, quick: bool) -> Result<Vec<Timed<f64>>, Diagnostic> {
    let mut out = Vec::new();
    for rows in rows(quick) {
        let (rows, len) = (*rows, rows * WIDTH);
        let bytes = |extra: usize| 4.0 * (2 * len + extra) as f64;
        let mut keep = |extra: usize, ns: f64| out.push(Timed { size: bytes(extra), ns });
        let norm = |_: usize, pool: &Pool| {
            let (x, w, mut y, pool) = (ramp(len), ramp(WIDTH), vec![0.0; len], pool.clone());
            move || rms_norm(&pool, &mut y, &x, &w, 1, 1e-6)
        };
        keep(WIDTH, team.time(norm)?);
        let modulated = |_: usize, pool: &Pool| {
            let (x, m, mut y, pool) = (ramp(len), ramp(6 * WIDTH), vec![0.0; len], pool.clone());
            let frames = Frames { first_row: 0, rows_per_frame: rows };
            move || norm_modulate(&pool, &mut y, &x, WIDTH, &m, 6, (0, 1), frames, 1e-6)
        };
        keep(6 * WIDTH, team.time(modulated)?);
        let turned = |_: usize, pool: &Pool| {
            let (x, mut y, pool) = (ramp(len), vec![0.0; len], pool.clone());
            let spec = RopeSpec { head_dim: HEAD, grid: [1, 1, rows], start: 0, frame_stride: 1 };
            let tables = RopeTables::new(spec);
            move || rope(&pool, &mut y, &x, WIDTH, 0, &tables)
        };
        keep(0, team.time(turned)?);
        let active = |_: usize, pool: &Pool| {
            let (x, b, mut y, pool) = (ramp(len), ramp(WIDTH), vec![0.0; len], pool.clone());
            move || bias_act(&pool, &mut y, &x, &b, Act::GeluTanh)
        };
        keep(WIDTH, team.time(active)?);
    }
    Ok(out)
}

fn rows(quick: bool) -> &'static [usize] {
    if quick { &[16, 256] } else { &[16, 64, 256, 1024] }
}

/// Ops of the program that shows what an op by itself takes.
const OPS: usize = 64;

struct NoWeights;

impl WeightSource for NoWeights {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &Seat) -> Result<Vec<f32>, Diagnostic> {
        Err(Diagnostic::error(&T0048, format!("a program without weights asks for `{name}`")))
    }
}

struct Unwatched;

impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

/// What the backend spends on one op beside its kernel: a program of the smallest ops.
pub(super) fn op_by_itself(budget: Duration) -> Result<f64, Diagnostic> {
    let mut text = "program @p role(r) mesh(tp=1) streams(compute) {\n%x0 = input : f32[1, 4]\n".to_string();
    for i in 0..OPS {
        text += &format!("%x{} = ttile.add %x{i}, %x{i} @compute\n", i + 1);
    }
    text += &format!("output \"y\", %x{OPS}\n}}\n");
    let own =
        |why: String| Diagnostic::error(&T0048, format!("the program of small ops does not run: {why}"));
    let program = parse_all(&text, "measure")
        .map_err(|ds| own(ds.first().map_or(String::new(), |d| d.message.clone())))?
        .into_iter()
        .next()
        .ok_or_else(|| own("it is empty".to_string()))?;
    let slots = Slots {
        bytes: program.values.iter().map(|v| if v.ty.is_token() { 4 } else { v.ty.bytes().0 }).collect(),
        of: (0..program.values.len() as u32).map(Some).collect(),
    };
    let seat = Seat { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = Cpu::new(seat, Pool::single(), Vec::new(), Duration::from_secs(1));
    let loaded = cpu.load(&Arc::new(program), &slots, &mut NoWeights)?;
    let x = [0.0; 4];
    let call = CallData { inputs: BTreeMap::from([("x0", &x[..])]), ..CallData::default() };
    let mut fault = None;
    let ns = usual_ns(budget, &mut || fault = fault.take().or(cpu.run(loaded, &call, &mut Unwatched).err()));
    match fault {
        Some(fault) => Err(own(format!("{fault:?}"))),
        None => Ok(ns / OPS as f64),
    }
}

/// Numbers that are neither all alike nor denormal.
pub(super) fn ramp(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 251) as f32 * 0.004 - 0.5).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_op_by_itself_takes_some_time() {
        assert!(op_by_itself(Duration::from_millis(1)).unwrap() > 0.0);
    }
}
