//! Times collectives between ranks, through the shared-memory arena that the ranks of a stream use.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cost::CollectiveOp;
use tessera_cpu::Pool;
use tessera_cpu::arena::Arena;
use tessera_cpu::collectives;
use tessera_cpu::kernels::{MatmulWeight, PackedWeight, Scratch, matmul};
use tessera_cpu::transport::{CommFault, CommLayout, Transport};
use tessera_mesh::Reduction;

use super::kernels::{Timed, ramp_values};
use super::rank_threads::{RankThreads, median_ns};
use crate::codes::T0048;

/// A collective, the bytes of its full buffer, and its members.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CollectiveSize {
    pub(super) op: CollectiveOp,
    pub(super) bytes: f64,
    pub(super) members: usize,
}

/// Maximum wait for a member that does not arrive.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Time per point as a multiple of the kernels' budget: a good sample requires that all members run
/// at once.
const BUDGET_FACTOR: u32 = 3;
/// Number of measured wake-ups of a sleeping member; a quick measurement takes a quarter of them.
const WAKE_SAMPLES: usize = 40;
/// Time after which a waiting member is certainly asleep.
const SLEEP_TIME: Duration = Duration::from_millis(2);

/// Times every collective over sizes and group sizes.
pub(super) fn time_collectives(
    team: &RankThreads,
    quick: bool,
) -> Result<Vec<Timed<CollectiveSize>>, Diagnostic> {
    let sizes: &[usize] = if quick { &[16 << 10, 1 << 20] } else { &[4 << 10, 32 << 10, 256 << 10, 2 << 20] };
    let mut out = Vec::new();
    for members in group_sizes(team.ranks) {
        for op in CollectiveOp::ALL {
            if op == CollectiveOp::SendRecv && members > 2 {
                continue;
            }
            for bytes in sizes {
                // Every member has whole rows for every other member.
                let rows = members * members;
                let columns = (bytes / 4 / rows).max(1);
                let size = CollectiveSize { op, bytes: (4 * rows * columns) as f64, members };
                out.push(Timed {
                    size,
                    ns: time_collective(BUDGET_FACTOR * team.budget, size, (rows, columns))?,
                });
            }
        }
    }
    Ok(out)
}

/// Returns the group sizes: powers of two and all ranks. A single rank is measured with two
/// threads, the smallest possible group.
fn group_sizes(ranks: usize) -> Vec<usize> {
    let max_members = ranks.max(2);
    let mut out: Vec<usize> =
        std::iter::successors(Some(2), |n| Some(n * 2)).take_while(|n| *n <= max_members).collect();
    if out.last() != Some(&max_members) {
        out.push(max_members);
    }
    out
}

/// Returns the nanoseconds between two back-to-back collectives, on the slowest member.
fn time_collective(budget: Duration, m: CollectiveSize, shape: (usize, usize)) -> Result<f64, Diagnostic> {
    let budget_spent = |begun: Instant| begun.elapsed() >= budget;
    // All members must run equally many collectives, so the first member decides when to stop.
    let last_turn = AtomicU64::new(u64::MAX);
    let all = run_members(m.members, 4 * shape.0 * shape.1, |me, lane| {
        let (x, mut y) = (member_input(m, me, shape), vec![0.0; shape.0 * shape.1]);
        let (mut best, begun) = (f64::INFINITY, Instant::now());
        for turn in 0u64.. {
            // A sample consists of several collectives, so that reading the clock does not distort
            // it.
            let look = Instant::now();
            for _ in 0..COLLECTIVES_PER_SAMPLE {
                run_collective(m, me, lane, &x, &mut y, shape)?;
            }
            if turn > 0 {
                best = best.min(look.elapsed().as_nanos() as f64 / COLLECTIVES_PER_SAMPLE as f64);
            }
            if me == 0 && turn >= 3 && last_turn.load(Ordering::SeqCst) == u64::MAX && budget_spent(begun) {
                // The other members are at most one iteration ahead.
                last_turn.store(turn + 2, Ordering::SeqCst);
            }
            if turn >= last_turn.load(Ordering::SeqCst) {
                break;
            }
        }
        Ok(best)
    })?;
    Ok(all.into_iter().fold(1.0, f64::max))
}

/// Number of collectives between two readings of the clock; a sample is their mean time.
const COLLECTIVES_PER_SAMPLE: u64 = 4;

fn member_input(m: CollectiveSize, me: usize, (rows, columns): (usize, usize)) -> Vec<f32> {
    let whole = rows * columns;
    match m.op {
        CollectiveOp::AllReduce | CollectiveOp::ReduceScatter | CollectiveOp::AllToAll => ramp_values(whole),
        CollectiveOp::AllGather => ramp_values(whole / m.members),
        CollectiveOp::Broadcast | CollectiveOp::SendRecv => ramp_values(if me == 0 { whole } else { 0 }),
    }
}

fn run_collective(
    m: CollectiveSize,
    me: usize,
    lane: &mut dyn Transport,
    x: &[f32],
    y: &mut [f32],
    (rows, columns): (usize, usize),
) -> Result<(), CommFault> {
    let ticket = lane.publish(0, x, Instant::now() + TIMEOUT)?;
    lane.collect(ticket, Instant::now() + TIMEOUT, &mut |views| {
        let parts = |of: usize| -> Vec<_> {
            (0..m.members).map(|i| of / m.members * i..of / m.members * (i + 1)).collect()
        };
        match m.op {
            CollectiveOp::AllReduce => {
                collectives::all_reduce(y, views, Reduction::Sum);
            }
            CollectiveOp::ReduceScatter => {
                let mine = parts(rows)[me].clone();
                let out = &mut y[..mine.len() * columns];
                collectives::reduce_scatter(out, views, (rows, columns), 0, mine, Reduction::Sum);
            }
            CollectiveOp::AllGather => collectives::all_gather(y, views, (rows, columns), 0, &parts(rows)),
            CollectiveOp::AllToAll => {
                // A row from each member before, a contiguous range of each row after.
                let whole = (m.members, rows * columns);
                collectives::all_to_all(y, views, me, whole, 0, &parts(whole.0), &parts(whole.1));
            }
            CollectiveOp::Broadcast => collectives::copy_from_member(y, views, 0),
            CollectiveOp::SendRecv if me == 1 => collectives::copy_from_member(y, views, 0),
            CollectiveOp::SendRecv => {}
        }
    })
}

/// Returns the median nanoseconds from the arrival of one member until another member, which
/// sleeps, has the data. The median is the typical latency; a minimum would be luck.
pub(super) fn wake_latency(quick: bool) -> Result<f64, Diagnostic> {
    let (epoch, came) = (Instant::now(), AtomicU64::new(0));
    let now = || epoch.elapsed().as_nanos() as u64;
    let turns = if quick { WAKE_SAMPLES / 4 } else { WAKE_SAMPLES };
    let all = run_members(2, 64, |me, lane| {
        let mut late = Vec::new();
        for _ in 0..turns {
            if me == 0 {
                std::thread::sleep(SLEEP_TIME);
                came.store(now(), Ordering::SeqCst);
            }
            lane.publish_and_collect(1, &[0.0; 4], Instant::now() + TIMEOUT, &mut |_| ())?;
            if me == 1 {
                late.push(now().saturating_sub(came.load(Ordering::SeqCst)) as f64);
            }
        }
        late.sort_by(f64::total_cmp);
        Ok(late.get(turns / 2).copied().unwrap_or(0.0))
    })?;
    Ok(all[1])
}

/// Returns the share of a collective's time that a matmul of the same rank hides, if the rank
/// computes it between the start of the collective and the wait.
pub(super) fn overlap_share(team: &RankThreads) -> Result<f64, Diagnostic> {
    const BYTES: usize = 1 << 20;
    let size = [256, 256, 256];
    let m = CollectiveSize { op: CollectiveOp::AllReduce, bytes: BYTES as f64, members: 2 };
    let shape = (4, BYTES / 16);
    let exchange = time_collective(BUDGET_FACTOR * team.budget, m, shape)?;
    let pool = Pool::new(team.threads)
        .map_err(|e| Diagnostic::error(&T0048, format!("threads cannot be started: {e}")))?;
    let all = run_members(2, BYTES, |_, lane| {
        let ([m, n, k], pool, mut scratch) = (size, pool.clone(), Scratch::new());
        let (a, w, mut c) =
            (ramp_values(m * k), PackedWeight::new(&pool, &ramp_values(n * k), n, k), vec![0.0; m * n]);
        let (x, mut y) = (ramp_values(shape.0 * shape.1), vec![0.0; shape.0 * shape.1]);
        let mut multiply =
            || matmul(&pool, &mut scratch, &mut c, &a, MatmulWeight::Packed(&w), (m, n, k), None, None, 1);
        let matmul_ns = median_ns(team.budget / 2, &mut multiply);
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            lane.publish_and_collect(2, &[0.0; 4], Instant::now() + TIMEOUT, &mut |_| ())?;
            let begun = Instant::now();
            let ticket = lane.publish(3, &x, Instant::now() + TIMEOUT)?;
            multiply();
            lane.collect(ticket, Instant::now() + TIMEOUT, &mut |v| {
                collectives::all_reduce(&mut y, v, Reduction::Sum);
            })?;
            best = best.min(begun.elapsed().as_nanos() as f64);
        }
        Ok(matmul_ns + exchange - best)
    })?;
    let hidden = all.into_iter().fold(f64::INFINITY, f64::min);
    Ok((hidden / exchange).clamp(0.0, 1.0))
}

/// Runs members on their own threads over one arena, and returns the result of each.
fn run_members(
    members: usize,
    bytes: usize,
    each: impl Fn(usize, &mut dyn Transport) -> Result<f64, CommFault> + Sync,
) -> Result<Vec<f64>, Diagnostic> {
    let failed = |why: String| {
        Diagnostic::error(&T0048, format!("collectives of {members} members cannot run: {why}"))
    };
    let layout = CommLayout { members, slots: 2, slot_bytes: bytes.max(64) };
    let fd = Arena::create_memfd(layout).map_err(|e| failed(e.to_string()))?;
    let lanes: Vec<Arena> = (0..members)
        .map(|me| Arena::attach(&fd, layout, me).map_err(|e| failed(e.to_string())))
        .collect::<Result<_, _>>()?;
    let begin = Barrier::new(members);
    std::thread::scope(|scope| {
        let (each, begin) = (&each, &begin);
        let all: Vec<_> = lanes
            .into_iter()
            .enumerate()
            .map(|(me, mut lane)| {
                scope.spawn(move || {
                    begin.wait();
                    each(me, &mut lane)
                })
            })
            .collect();
        all.into_iter()
            .map(|t| match t.join() {
                Ok(Ok(ns)) => Ok(ns),
                Ok(Err(fault)) => Err(failed(fault.to_string())),
                Err(_) => Err(failed("a member ended early".to_string())),
            })
            .collect()
    })
}
