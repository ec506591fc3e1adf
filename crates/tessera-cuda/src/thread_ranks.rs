//! Ranks of one plan that are threads of one process, each on a GPU of its own.
//!
//! They exchange tables on the host, where ranks of several processes use NCCL. Some calls of the driver, such as allocating and
//! freeing, may wait for the work of every GPU that has mapped the memory. If a rank made such a call while the kernels of
//! another wait for a kernel that the first has not launched, they would be in a deadlock; so would a rank that frees memory while the
//! set-up kernels of NCCL wait for its own. So a rank makes them only before any
//! rank has launched a program, or after all ranks have completed it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::CudaError;

/// What the ranks of one plan in one process share.
#[derive(Debug)]
pub struct ThreadRanks {
    count: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// The place of one rank among the ranks that are threads of this process.
#[derive(Debug, Clone)]
pub struct ThreadRank {
    /// All ranks of the plan.
    pub ranks: Arc<ThreadRanks>,
    /// Index of this rank among them.
    pub index: usize,
}

#[derive(Debug, Default)]
struct State {
    exchanges: BTreeMap<Vec<u8>, Exchange>,
    /// The ranks whose work may be on their devices.
    running: BTreeSet<usize>,
    is_aborted: bool,
}

/// An all-gather that some of its members have entered.
#[derive(Debug, Default)]
struct Exchange {
    tables: BTreeMap<usize, Vec<u8>>,
    /// All tables, once the last member has entered, and the number of members that have not read them.
    complete: Option<(Arc<Vec<Vec<u8>>>, usize)>,
}

/// Why a wait for other ranks ended early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WaitFailure {
    Aborted,
    /// The members that were missing after this time.
    TimedOut(Vec<usize>, Duration),
}

/// Names the exchange of all ranks; a group has the id of its communicator, which is longer.
const ALL_RANKS: &[u8] = b"all ranks";

impl ThreadRanks {
    /// Makes what `count` ranks share.
    #[must_use]
    pub fn new(count: usize) -> Arc<ThreadRanks> {
        Arc::new(ThreadRanks { count, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Gives each of `members` members the tables of all, in member order. Blocks until all have called it with the
    /// same key.
    pub(crate) fn all_gather(
        &self,
        key: &[u8],
        (member, members): (usize, usize),
        table: &[u8],
        timeout: Duration,
    ) -> Result<Arc<Vec<Vec<u8>>>, WaitFailure> {
        let deadline = Instant::now() + timeout;
        let missing = |state: &State| {
            let came = state.exchanges.get(key).map(|exchange| &exchange.tables);
            let has_come = |member: &usize| came.is_some_and(|came| came.contains_key(member));
            WaitFailure::TimedOut((0..members).filter(|member| !has_come(member)).collect(), timeout)
        };
        // A member may come back before another has read the tables of the exchange before.
        let is_free = |state: &State| state.exchanges.get(key).is_none_or(|e| e.complete.is_none());
        let mut state = self.wait_until(deadline, is_free, missing)?;
        let exchange = state.exchanges.entry(key.to_vec()).or_default();
        exchange.tables.insert(member, table.to_vec());
        if exchange.tables.len() == members {
            let tables = std::mem::take(&mut exchange.tables).into_values().collect();
            exchange.complete = Some((Arc::new(tables), members));
            self.changed.notify_all();
        }
        drop(state);
        let is_complete = |state: &State| state.exchanges.get(key).is_some_and(|e| e.complete.is_some());
        let mut state = self.wait_until(deadline, is_complete, missing)?;
        let complete = state.exchanges.get_mut(key).and_then(|e| e.complete.as_mut());
        let Some((tables, readers)) = complete else { return Err(WaitFailure::Aborted) };
        let tables = Arc::clone(tables);
        *readers -= 1;
        if *readers == 0 {
            state.exchanges.remove(key);
            self.changed.notify_all();
        }
        Ok(tables)
    }

    /// Ends all waits of all ranks on the host, now and later.
    pub fn abort(&self) {
        self.lock().is_aborted = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.lock().is_aborted
    }

    /// Waits until a condition holds, and fails if a rank aborts or the deadline passes before.
    fn wait_until(
        &self,
        deadline: Instant,
        holds: impl Fn(&State) -> bool,
        describe: impl Fn(&State) -> WaitFailure,
    ) -> Result<MutexGuard<'_, State>, WaitFailure> {
        let mut state = self.lock();
        loop {
            // A rank that has come as far as the others may end before they have noticed.
            if holds(&state) {
                return Ok(state);
            }
            if state.is_aborted {
                return Err(WaitFailure::Aborted);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(describe(&state));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl From<WaitFailure> for CudaError {
    fn from(why: WaitFailure) -> CudaError {
        CudaError(match why {
            WaitFailure::Aborted => "another rank of this process has ended the run".to_string(),
            WaitFailure::TimedOut(missing, waited) => {
                let list: Vec<String> = missing.iter().map(ToString::to_string).collect();
                let (list, seconds) = (list.join(", "), waited.as_secs());
                format!("members {list} did not come to the same point within {seconds} s")
            }
        })
    }
}

impl ThreadRank {
    /// Waits until every rank has come to the same point of its run.
    pub(crate) fn wait_for_all(&self, timeout: Duration) -> Result<(), WaitFailure> {
        let place = (self.index, self.ranks.count);
        self.ranks.all_gather(ALL_RANKS, place, &[], timeout).map(drop)
    }

    /// States that work of this rank may be on its device from now on.
    pub(crate) fn begin_run(&self) -> Result<(), WaitFailure> {
        let mut state = self.ranks.lock();
        // A rank that has ended waits for those that run, and not for one that comes later.
        if state.is_aborted {
            return Err(WaitFailure::Aborted);
        }
        state.running.insert(self.index);
        Ok(())
    }

    /// States that no work of this rank is on its device.
    pub(crate) fn end_run(&self) {
        self.ranks.lock().running.remove(&self.index);
        self.ranks.changed.notify_all();
    }

    /// Waits until no work of any rank is on its device, also after an abort.
    pub(crate) fn wait_until_idle(&self) {
        let state = self.ranks.lock();
        let is_busy = |state: &mut State| !state.running.is_empty();
        drop(self.ranks.changed.wait_while(state, is_busy));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn every_member_gets_the_tables_of_all_in_order_however_often() {
        let ranks = ThreadRanks::new(3);
        let member = |me: usize| {
            let gather = |round: u8| ranks.all_gather(b"group", (me, 3), &[me as u8, round], LONG).unwrap();
            (0..200).for_each(|round| {
                let expected: Vec<Vec<u8>> = (0..3).map(|member| vec![member, round]).collect();
                assert_eq!(*gather(round), expected);
            });
        };
        std::thread::scope(|scope| (0..3).for_each(|me| drop(scope.spawn(move || member(me)))));
        assert!(ranks.lock().exchanges.is_empty());
    }

    #[test]
    fn a_rank_that_ends_behind_an_exchange_takes_nothing_from_the_others() {
        for _ in 0..200 {
            let ranks = ThreadRanks::new(2);
            let [first, second] = [0, 1].map(|index| ThreadRank { ranks: Arc::clone(&ranks), index });
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| first.wait_for_all(LONG));
                assert_eq!(second.wait_for_all(LONG), Ok(()));
                ranks.abort();
                assert_eq!(waiting.join().unwrap(), Ok(()));
            });
        }
    }

    #[test]
    fn an_absent_member_is_a_timeout_and_an_abort_ends_every_wait() {
        let ranks = ThreadRanks::new(2);
        let refused = ranks.all_gather(b"group", (0, 2), &[], Duration::from_millis(1));
        assert_eq!(refused, Err(WaitFailure::TimedOut(vec![1], Duration::from_millis(1))));
        let rank = ThreadRank { ranks: Arc::clone(&ranks), index: 0 };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| rank.wait_for_all(LONG));
            ranks.abort();
            assert_eq!(waiting.join().unwrap(), Err(WaitFailure::Aborted));
        });
        assert_eq!(rank.wait_for_all(LONG), Err(WaitFailure::Aborted));
    }

    #[test]
    fn ranks_are_idle_once_the_last_has_ended_its_run() {
        let ranks = ThreadRanks::new(2);
        let [first, second] = [0, 1].map(|index| ThreadRank { ranks: Arc::clone(&ranks), index });
        assert_eq!(second.begin_run(), Ok(()));
        ranks.abort();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| first.wait_until_idle());
            assert!(!waiting.is_finished());
            second.end_run();
            waiting.join().unwrap();
        });
        first.wait_until_idle();
        assert_eq!(first.begin_run(), Err(WaitFailure::Aborted), "memory of the other rank may be gone");
    }
}
