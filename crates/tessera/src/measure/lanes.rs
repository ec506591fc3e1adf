//! What exchanges between ranks take, through the arena that a stream's ranks use.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cost::CollectiveOp;
use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_cpu::collectives;
use tessera_cpu::exchange::CommFault;
use tessera_cpu::kernels::{Act, PackedWeight, Scratch, Weight, matmul};
use tessera_cpu::{Exchange, Pool};
use tessera_mesh::Reduction;

use super::T0048;
use super::kernels::{Timed, ramp};
use super::team::{Team, usual_ns};

/// What went round, the bytes of the full buffer, the members.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Meeting {
    pub(super) op: CollectiveOp,
    pub(super) bytes: f64,
    pub(super) members: usize,
}

/// Longest wait for a member that does not come.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time for a point here against that of a kernel: all members must be awake at once for a good turn.
const EXCHANGES: u32 = 3;
/// Waits for a member that sleeps.
const WAKES: usize = 40;
/// Until a waiting member has surely gone to sleep.
const ASLEEP: Duration = Duration::from_millis(2);

/// Every op over sizes and members.
pub(super) fn meetings(team: &Team, quick: bool) -> Result<Vec<Timed<Meeting>>, Diagnostic> {
    let sizes: &[usize] = if quick { &[16 << 10, 1 << 20] } else { &[4 << 10, 32 << 10, 256 << 10, 2 << 20] };
    let mut out = Vec::new();
    for members in groups(team.ranks) {
        for op in CollectiveOp::ALL {
            if op == CollectiveOp::SendRecv && members > 2 {
                continue;
            }
            for bytes in sizes {
                // Every member has a piece of whole rows for every other.
                let rows = members * members;
                let columns = (bytes / 4 / rows).max(1);
                let size = Meeting { op, bytes: (4 * rows * columns) as f64, members };
                out.push(Timed { size, ns: meet(EXCHANGES * team.budget, size, (rows, columns))? });
            }
        }
    }
    Ok(out)
}

/// Sizes of groups: twice as many each time, and all. Two where there is one rank alone: there is nothing smaller.
fn groups(ranks: usize) -> Vec<usize> {
    let most = ranks.max(2);
    let mut out: Vec<usize> =
        std::iter::successors(Some(2), |n| Some(n * 2)).take_while(|n| *n <= most).collect();
    if out.last() != Some(&most) {
        out.push(most);
    }
    out
}

/// Nanoseconds from one meeting to the next where nothing lies between, on the slowest member.
fn meet(budget: Duration, m: Meeting, shape: (usize, usize)) -> Result<f64, Diagnostic> {
    let turns = |begun: Instant| begun.elapsed() >= budget;
    // All members must meet equally often, so the first one says when it is over.
    let over = AtomicU64::new(u64::MAX);
    let all = together(m.members, 4 * shape.0 * shape.1, |me, lane| {
        let (x, mut y) = (contribution(m, me, shape), vec![0.0; shape.0 * shape.1]);
        let (mut best, begun) = (f64::INFINITY, Instant::now());
        for turn in 0u64.. {
            // A few at once, so that looking at the clock does not count.
            let look = Instant::now();
            for _ in 0..AT_ONCE {
                once(m, me, lane, &x, &mut y, shape)?;
            }
            if turn > 0 {
                best = best.min(look.elapsed().as_nanos() as f64 / AT_ONCE as f64);
            }
            if me == 0 && turn >= 3 && over.load(Ordering::SeqCst) == u64::MAX && turns(begun) {
                // The others are at most one turn ahead.
                over.store(turn + 2, Ordering::SeqCst);
            }
            if turn >= over.load(Ordering::SeqCst) {
                break;
            }
        }
        Ok(best)
    })?;
    Ok(all.into_iter().fold(1.0, f64::max))
}

/// Meetings between two looks at the clock.
const AT_ONCE: u64 = 4;

fn contribution(m: Meeting, me: usize, (rows, columns): (usize, usize)) -> Vec<f32> {
    let whole = rows * columns;
    match m.op {
        CollectiveOp::AllReduce | CollectiveOp::ReduceScatter | CollectiveOp::AllToAll => ramp(whole),
        CollectiveOp::AllGather => ramp(whole / m.members),
        CollectiveOp::Broadcast | CollectiveOp::SendRecv => ramp(if me == 0 { whole } else { 0 }),
    }
}

fn once(
    m: Meeting,
    me: usize,
    lane: &mut Exchange,
    x: &[f32],
    y: &mut [f32],
    (rows, columns): (usize, usize),
) -> Result<(), CommFault> {
    let ticket = lane.publish(0, x, Instant::now() + PATIENCE)?;
    lane.collect(ticket, Instant::now() + PATIENCE, |views| {
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
                // A row of each before, a run of each row after.
                let whole = (m.members, rows * columns);
                collectives::all_to_all(y, views, me, whole, 0, &parts(whole.0), &parts(whole.1));
            }
            CollectiveOp::Broadcast => collectives::receive(y, views, 0),
            CollectiveOp::SendRecv if me == 1 => collectives::receive(y, views, 0),
            CollectiveOp::SendRecv => {}
        }
    })
}

/// Nanoseconds from when one member comes to when another, which sleeps, has what it waited for: the median, so that
/// what a rank meets with is told and not its luck.
pub(super) fn wake(quick: bool) -> Result<f64, Diagnostic> {
    let (epoch, came) = (Instant::now(), AtomicU64::new(0));
    let now = || epoch.elapsed().as_nanos() as u64;
    let turns = if quick { WAKES / 4 } else { WAKES };
    let all = together(2, 64, |me, lane| {
        let mut late = Vec::new();
        for _ in 0..turns {
            if me == 0 {
                std::thread::sleep(ASLEEP);
                came.store(now(), Ordering::SeqCst);
            }
            lane.exchange(1, &[0.0; 4], Instant::now() + PATIENCE, |_| ())?;
            if me == 1 {
                late.push(now().saturating_sub(came.load(Ordering::SeqCst)) as f64);
            }
        }
        late.sort_by(f64::total_cmp);
        Ok(late.get(turns / 2).copied().unwrap_or(0.0))
    })?;
    Ok(all[1])
}

/// Share of an exchange's time that a product of the same rank hides, put between its beginning and the wait for it.
pub(super) fn hidden(team: &Team) -> Result<f64, Diagnostic> {
    const BYTES: usize = 1 << 20;
    let size = [256, 256, 256];
    let m = Meeting { op: CollectiveOp::AllReduce, bytes: BYTES as f64, members: 2 };
    let shape = (4, BYTES / 16);
    let exchange = meet(EXCHANGES * team.budget, m, shape)?;
    let pool = Pool::new(team.threads)
        .map_err(|e| Diagnostic::error(&T0048, format!("threads cannot be started: {e}")))?;
    let all = together(2, BYTES, |_, lane| {
        let ([m, n, k], pool, mut scratch) = (size, pool.clone(), Scratch::new());
        let (a, w, mut c) = (ramp(m * k), PackedWeight::new(&pool, &ramp(n * k), n, k), vec![0.0; m * n]);
        let (x, mut y) = (ramp(shape.0 * shape.1), vec![0.0; shape.0 * shape.1]);
        let mut product =
            || matmul(&pool, &mut scratch, &mut c, &a, Weight::Packed(&w), (m, n, k), None, Act::None, 1);
        let alone = usual_ns(team.budget / 2, &mut product);
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            lane.exchange(2, &[0.0; 4], Instant::now() + PATIENCE, |_| ())?;
            let begun = Instant::now();
            let ticket = lane.publish(3, &x, Instant::now() + PATIENCE)?;
            product();
            lane.collect(ticket, Instant::now() + PATIENCE, |v| {
                collectives::all_reduce(&mut y, v, Reduction::Sum)
            })?;
            best = best.min(begun.elapsed().as_nanos() as f64);
        }
        Ok(alone + exchange - best)
    })?;
    let hidden = all.into_iter().fold(f64::INFINITY, f64::min);
    Ok((hidden / exchange).clamp(0.0, 1.0))
}

/// Runs members on threads of their own over one arena; what each came to.
fn together(
    members: usize,
    bytes: usize,
    each: impl Fn(usize, &mut Exchange) -> Result<f64, CommFault> + Sync,
) -> Result<Vec<f64>, Diagnostic> {
    let failed = |why: String| Diagnostic::error(&T0048, format!("{members} members cannot meet: {why}"));
    let layout = ArenaLayout { members, slots: 2, slot_bytes: bytes.max(64) };
    let fd = Arena::create(layout).map_err(|e| failed(e.to_string()))?;
    let lanes: Vec<Exchange> = (0..members)
        .map(|me| Arena::attach(&fd, layout, me).map(Exchange::from).map_err(|e| failed(e.to_string())))
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
