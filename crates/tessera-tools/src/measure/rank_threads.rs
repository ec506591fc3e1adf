//! Concurrent ranks: threads that start together and repeat the same work until the time budget is
//! spent, so that a result is the performance of one rank while its neighbours do the same work.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cpu::Pool;

use crate::codes::T0048;

/// Minimum number of repetitions, after a warm-up that does not count.
const MIN_REPETITIONS: usize = 3;
/// Work shorter than this is repeated within one sample.
const MIN_SAMPLE_TIME: Duration = Duration::from_micros(40);

/// Number of ranks, and the threads of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RankThreads {
    pub(super) ranks: usize,
    pub(super) threads: usize,
    /// Minimum time spent on the samples of one measurement.
    pub(super) budget: Duration,
}

impl RankThreads {
    /// Runs the work that `make` creates for each rank, and returns the median nanoseconds of a
    /// repetition on the slowest rank. Ranks do not wait for each other in between.
    pub(super) fn time_on_all<W: FnMut()>(
        &self,
        make: impl Fn(usize, &Pool) -> W + Sync,
    ) -> Result<f64, Diagnostic> {
        let (begin, refused) = (Barrier::new(self.ranks), std::sync::Mutex::new(None));
        let each = |rank: usize| {
            let pool = Pool::new(self.threads);
            let mut work = match &pool {
                Ok(pool) => Some(make(rank, pool)),
                Err(e) => {
                    let mut first = refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    *first = Some(Diagnostic::error(&T0048, format!("threads cannot be started: {e}")));
                    None
                }
            };
            begin.wait();
            work.as_mut().map_or(0.0, |w| median_ns(self.budget, w))
        };
        let most = std::thread::scope(|scope| {
            let all: Vec<_> = (1..self.ranks).map(|r| scope.spawn(move || call_rank(&each, r))).collect();
            let first = each(0);
            all.into_iter().map(|t| t.join().unwrap_or(0.0)).fold(first, f64::max)
        });
        match refused.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(d) => Err(d),
            None => Ok(most),
        }
    }
}

fn call_rank(each: &(impl Fn(usize) -> f64 + Sync), rank: usize) -> f64 {
    each(rank)
}

/// Returns the median nanoseconds of a repetition within a time budget: the typical time rather
/// than the best one.
pub(super) fn median_ns(budget: Duration, work: &mut impl FnMut()) -> f64 {
    work();
    let mut at_once = 1u32;
    loop {
        let begun = Instant::now();
        (0..at_once).for_each(|_| work());
        if begun.elapsed() >= MIN_SAMPLE_TIME || at_once >= 1 << 16 {
            break;
        }
        at_once *= 2;
    }
    let (begun, mut turns) = (Instant::now(), Vec::new());
    while turns.len() < MIN_REPETITIONS || begun.elapsed() < budget {
        let turn = Instant::now();
        (0..at_once).for_each(|_| work());
        turns.push(turn.elapsed().as_nanos() as f64 / f64::from(at_once));
    }
    turns.sort_by(f64::total_cmp);
    turns[turns.len() / 2].max(1.0)
}
