//! Separates calls whose GPUs wait for each other from driver calls that allocate or free GPU memory.
//!
//! While ranks that are threads of this process run a call, the kernels of one rank may wait for kernels that another rank has not
//! launched. A thread of the application that allocates or frees GPU memory may then wait for the first rank, and hold a lock of
//! the driver that the second one needs. So such a thread waits until the call has ended. Memory that is released
//! during the call is freed after it.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Frees memory that was released.
pub(crate) type DeferredFree = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Lock {
    /// Number of threads that have a permit.
    permits: usize,
    has_call: bool,
    /// The threads that wait, by the numbers that they drew, and whether each waits for a call. No thread goes before a call
    /// with a smaller number, and no call before a thread with a smaller number.
    waiting: BTreeMap<u64, bool>,
    next_number: u64,
    deferred: Vec<DeferredFree>,
}

static LOCK: Mutex<Lock> = Mutex::new(Lock {
    permits: 0,
    has_call: false,
    waiting: BTreeMap::new(),
    next_number: 0,
    deferred: Vec::new(),
});
static CHANGED: Condvar = Condvar::new();

/// Permission to allocate and free GPU memory, until this value is dropped.
#[derive(Debug)]
#[must_use]
pub struct AllocationPermit(());

/// Marks a running call of ranks that are threads on several GPUs. No other thread has a permit or such a call until this value is
/// dropped.
#[derive(Debug)]
#[must_use]
pub struct ExclusiveCall(());

impl AllocationPermit {
    /// Waits until no call of several GPUs runs in this process, and no earlier one waits to run.
    pub fn acquire() -> AllocationPermit {
        loop {
            if let Some(permit) = AllocationPermit::acquire_unless(&|| false) {
                return permit;
            }
        }
    }

    /// As [`AllocationPermit::acquire`]; returns `None` once the caller no longer wants to wait.
    pub fn acquire_unless(is_cancelled: &dyn Fn() -> bool) -> Option<AllocationPermit> {
        let must_wait = |lock: &Lock, number| lock.has_call || lock.has_waiting_call_before(number);
        wait_in_line(false, must_wait, is_cancelled)?.permits += 1;
        Some(AllocationPermit(()))
    }

    /// Waits until no call of several GPUs runs. A call that waits to run waits for this permit too, because it may already wait
    /// for a thread that waits for the caller: a backend is dropped when the load of its plan fails.
    pub(crate) fn acquire_to_drop() -> AllocationPermit {
        let waited = CHANGED.wait_while(lock(), |lock| lock.has_call);
        waited.unwrap_or_else(PoisonError::into_inner).permits += 1;
        AllocationPermit(())
    }
}

impl ExclusiveCall {
    /// Waits until no other thread has a permit or such a call, and no thread that came earlier waits. Returns `None` once the
    /// caller no longer wants to wait.
    pub fn begin_unless(is_cancelled: &dyn Fn() -> bool) -> Option<ExclusiveCall> {
        let must_wait = |lock: &Lock, number| {
            lock.has_call || lock.permits > 0 || lock.waiting.range(..number).next().is_some()
        };
        wait_in_line(true, must_wait, is_cancelled)?.has_call = true;
        Some(ExclusiveCall(()))
    }
}

impl Lock {
    fn has_waiting_call_before(&self, number: u64) -> bool {
        self.waiting.range(..number).any(|(_, is_call)| *is_call)
    }
}

/// Frees memory now, or after the running call of several GPUs, if there is one. Never waits for that call, which may wait
/// for the thread that releases the memory.
pub(crate) fn free_between_calls(free: DeferredFree) {
    let mut lock = lock();
    if lock.has_call {
        lock.deferred.push(free);
        return;
    }
    lock.permits += 1;
    drop(lock);
    let permit = AllocationPermit(());
    free();
    drop(permit);
}

impl Drop for AllocationPermit {
    fn drop(&mut self) {
        lock().permits -= 1;
        CHANGED.notify_all();
    }
}

impl Drop for ExclusiveCall {
    fn drop(&mut self) {
        let mut lock = lock();
        lock.has_call = false;
        let deferred = std::mem::take(&mut lock.deferred);
        drop(lock);
        CHANGED.notify_all();
        deferred.into_iter().for_each(free_between_calls);
    }
}

/// Time after which a waiting thread checks whether its caller still wants to wait.
const CANCEL_PERIOD: Duration = Duration::from_millis(50);

/// Waits for a call or a permit while a condition holds for the number of this thread.
fn wait_in_line(
    is_call: bool,
    must_wait: impl Fn(&Lock, u64) -> bool,
    is_cancelled: &dyn Fn() -> bool,
) -> Option<MutexGuard<'static, Lock>> {
    let mut lock = lock();
    let number = lock.next_number;
    lock.next_number += 1;
    lock.waiting.insert(number, is_call);
    while must_wait(&lock, number) {
        if is_cancelled() {
            lock.waiting.remove(&number);
            CHANGED.notify_all();
            return None;
        }
        lock = CHANGED.wait_timeout(lock, CANCEL_PERIOD).unwrap_or_else(PoisonError::into_inner).0;
    }
    lock.waiting.remove(&number);
    CHANGED.notify_all();
    Some(lock)
}

fn lock() -> MutexGuard<'static, Lock> {
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The lock is one of the process, so one test uses all of it.
    #[test]
    fn calls_of_several_gpus_exclude_each_other_and_all_permits() {
        let (calls, permits) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let freed = Arc::new(AtomicUsize::new(0));
        let add_one = |count: Arc<AtomicUsize>| -> DeferredFree {
            Box::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            })
        };
        let call = || {
            for _ in 0..200 {
                let call = ExclusiveCall::begin_unless(&|| false);
                assert_eq!((calls.fetch_add(1, Ordering::SeqCst), permits.load(Ordering::SeqCst)), (0, 0));
                let (before, count) = (freed.load(Ordering::SeqCst), Arc::clone(&freed));
                free_between_calls(add_one(count));
                assert_eq!(freed.load(Ordering::SeqCst), before, "memory is freed after the call");
                calls.fetch_sub(1, Ordering::SeqCst);
                drop(call);
            }
        };
        let allocate = |acquire: fn() -> AllocationPermit| {
            for _ in 0..200 {
                let permit = acquire();
                permits.fetch_add(1, Ordering::SeqCst);
                assert_eq!(calls.load(Ordering::SeqCst), 0);
                permits.fetch_sub(1, Ordering::SeqCst);
                drop(permit);
            }
        };
        std::thread::scope(|scope| {
            for acquire in [AllocationPermit::acquire, AllocationPermit::acquire_to_drop] {
                scope.spawn(call);
                scope.spawn(move || allocate(acquire));
            }
        });
        let running = ExclusiveCall::begin_unless(&|| false);
        assert!(AllocationPermit::acquire_unless(&|| true).is_none());
        assert!(ExclusiveCall::begin_unless(&|| true).is_none());
        drop(running);
        assert_eq!(freed.load(Ordering::SeqCst), 400);
        let count = Arc::clone(&freed);
        free_between_calls(add_one(count));
        assert_eq!(freed.load(Ordering::SeqCst), 401, "without a call, memory is freed at once");
        // Calls in a loop do not keep a permit waiting.
        let has_permit = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let calls = [(); 2].map(|()| {
                scope.spawn(|| {
                    while !has_permit.load(Ordering::SeqCst) {
                        drop(ExclusiveCall::begin_unless(&|| false));
                    }
                })
            });
            drop(AllocationPermit::acquire());
            has_permit.store(true, Ordering::SeqCst);
            assert!(calls.into_iter().all(|call| call.join().is_ok()));
        });
        // A call that waits keeps new permits out, but not those of backends that are dropped.
        let permit = AllocationPermit::acquire();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ExclusiveCall::begin_unless(&|| false).is_some());
            while lock().waiting.is_empty() {
                std::thread::yield_now();
            }
            assert!(AllocationPermit::acquire_unless(&|| true).is_none());
            drop(AllocationPermit::acquire_to_drop());
            drop(permit);
            assert!(waiting.join().is_ok_and(|has_run| has_run));
        });
    }
}
