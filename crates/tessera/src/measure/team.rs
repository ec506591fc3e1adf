//! Ranks that work at once: threads that begin together and repeat one thing until the time for it is over, so that
//! what is measured is what a rank gets while its neighbours do the same.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cpu::Pool;

use super::T0048;

/// Fewest repetitions, after one that is not counted.
const LEAST: usize = 3;
/// What is shorter is repeated between two looks at the clock.
const WORTH_A_LOOK: Duration = Duration::from_micros(40);

/// Ranks and the threads of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Team {
    pub(super) ranks: usize,
    pub(super) threads: usize,
    /// Time for one point.
    pub(super) budget: Duration,
}

impl Team {
    /// Nanoseconds of what `make` makes for each rank: the median of its repetitions, on the rank where that is most.
    /// Ranks do not wait for each other in between.
    pub(super) fn time<W: FnMut()>(
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
            work.as_mut().map_or(0.0, |w| usual_ns(self.budget, w))
        };
        let most = std::thread::scope(|scope| {
            let all: Vec<_> = (1..self.ranks).map(|r| scope.spawn(move || each_of(&each, r))).collect();
            let first = each(0);
            all.into_iter().map(|t| t.join().unwrap_or(0.0)).fold(first, f64::max)
        });
        match refused.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            Some(d) => Err(d),
            None => Ok(most),
        }
    }
}

fn each_of(each: &(impl Fn(usize) -> f64 + Sync), rank: usize) -> f64 {
    each(rank)
}

/// Nanoseconds of the median repetition within a time: what a run meets, not what it could meet at best.
pub(super) fn usual_ns(budget: Duration, work: &mut impl FnMut()) -> f64 {
    work();
    let mut at_once = 1u32;
    loop {
        let begun = Instant::now();
        (0..at_once).for_each(|_| work());
        if begun.elapsed() >= WORTH_A_LOOK || at_once >= 1 << 16 {
            break;
        }
        at_once *= 2;
    }
    let (begun, mut turns) = (Instant::now(), Vec::new());
    while turns.len() < LEAST || begun.elapsed() < budget {
        let turn = Instant::now();
        (0..at_once).for_each(|_| work());
        turns.push(turn.elapsed().as_nanos() as f64 / f64::from(at_once));
    }
    turns.sort_by(f64::total_cmp);
    turns[turns.len() / 2].max(1.0)
}
