//! The threads that a kernel may use. Work is split into blocks of fixed size, so the thread count
//! never affects a result.

use std::sync::Arc;

use rayon::prelude::*;

/// The threads that a rank lends to kernels: the caller's own thread, or a pool that the rank owns.
#[derive(Debug, Clone)]
pub struct Pool {
    threads: Option<Arc<rayon::ThreadPool>>,
}

/// Minimum work, in flops or operations of similar cost, for which waking another thread pays off.
const MIN_PARALLEL_WORK: usize = 400_000;

impl Pool {
    /// Returns a pool that uses the caller's thread alone.
    #[must_use]
    pub fn single_thread() -> Pool {
        Pool { threads: None }
    }

    /// Creates a pool of `threads` threads, at least one.
    ///
    /// # Errors
    /// Fails if the operating system cannot start them.
    pub fn new(threads: usize) -> Result<Pool, rayon::ThreadPoolBuildError> {
        if threads <= 1 {
            return Ok(Pool::single_thread());
        }
        let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
        Ok(Pool { threads: Some(Arc::new(builder.thread_name(|i| format!("tessera-cpu-{i}")).build()?)) })
    }

    /// Returns the number of threads that work at once.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.threads.as_ref().map_or(1, |t| t.current_num_threads())
    }

    /// Runs `f` on a thread of the pool, so that the kernels it calls need not enter the pool one
    /// by one.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Calls `f(i, block)` for each consecutive block of `block` elements of `out`. It uses several
    /// threads if `work` is large enough.
    pub fn for_each_block<T, F>(&self, out: &mut [T], block: usize, work: usize, f: F)
    where
        T: Send,
        F: Fn(usize, &mut [T]) + Sync,
    {
        match &self.threads {
            Some(pool) if work >= MIN_PARALLEL_WORK && out.len() > block => {
                pool.install(|| out.par_chunks_mut(block).enumerate().for_each(|(i, b)| f(i, b)));
            }
            _ => out.chunks_mut(block).enumerate().for_each(|(i, b)| f(i, b)),
        }
    }

    /// Returns whether `work` is large enough for more than one thread of this pool.
    pub(crate) fn should_parallelize(&self, work: usize) -> bool {
        self.threads.is_some() && work >= MIN_PARALLEL_WORK
    }
}
