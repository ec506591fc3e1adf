//! How many threads a kernel may use. Work is cut into blocks of fixed size, so the thread count never shows
//! in a result.

use std::sync::Arc;

use rayon::prelude::*;

/// Threads lent to kernels by a rank: one (the caller's own) or a pool that the rank owns.
#[derive(Debug, Clone)]
pub struct Pool {
    threads: Option<Arc<rayon::ThreadPool>>,
}

/// Below this much work, in flops or flop-sized steps, waking another thread costs more than it saves.
const WORTH_A_THREAD: usize = 400_000;

impl Pool {
    /// The caller's thread alone.
    #[must_use]
    pub fn single() -> Pool {
        Pool { threads: None }
    }

    /// `threads` threads, at least one.
    ///
    /// # Errors
    /// When the operating system refuses to start them.
    pub fn new(threads: usize) -> Result<Pool, rayon::ThreadPoolBuildError> {
        if threads <= 1 {
            return Ok(Pool::single());
        }
        let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
        Ok(Pool { threads: Some(Arc::new(builder.thread_name(|i| format!("tessera-cpu-{i}")).build()?)) })
    }

    /// Number of threads that work at once.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, |t| t.current_num_threads())
    }

    /// Runs `f` on a thread of the pool, so that the kernels it calls need not hand work over one by one.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }

    /// Calls `f(i, block)` for each consecutive block of `block` elements of `out`; `work` decides whether
    /// that is worth more than one thread.
    pub(crate) fn blocks<T, F>(&self, out: &mut [T], block: usize, work: usize, f: F)
    where
        T: Send,
        F: Fn(usize, &mut [T]) + Sync,
    {
        match &self.threads {
            Some(pool) if work >= WORTH_A_THREAD && out.len() > block => {
                pool.install(|| out.par_chunks_mut(block).enumerate().for_each(|(i, b)| f(i, b)));
            }
            _ => out.chunks_mut(block).enumerate().for_each(|(i, b)| f(i, b)),
        }
    }

    /// Whether `work` is worth more than one thread here.
    pub(crate) fn shares(&self, work: usize) -> bool {
        self.threads.is_some() && work >= WORTH_A_THREAD
    }
}
