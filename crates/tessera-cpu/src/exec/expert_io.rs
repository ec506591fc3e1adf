//! The thread of the stream `io`: copies experts from host memory into the pools of a rank.
//!
//! The memory of a pool slot travels with its order and comes back with the answer, so one thread owns it at any time and
//! no lock guards a matrix. A pool slot has one order at most, which bounds the queue.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{ExpertBank, T0804};
use tessera_ir::{DType, StreamKind};

use crate::Pool;
use crate::kernels::{PackedWeight, round_to_dtype};

/// An order to fetch the matrix of an expert.
#[derive(Debug)]
pub(super) struct FetchOrder {
    /// Index of the weight and of its pool slot.
    pub(super) place: (usize, usize),
    /// Number of the expert among those of the rank.
    pub(super) expert: usize,
    /// Whether it was requested ahead of the run that uses it.
    pub(super) is_prefetch: bool,
    /// Whether the current run uses it.
    pub(super) is_due: bool,
    pub(super) source: Arc<dyn ExpertBank>,
    /// The dtype to which the elements are rounded.
    pub(super) dtype: DType,
    pub(super) memory: PackedWeight,
}

/// The answer to a [`FetchOrder`], with the memory of the pool slot.
#[derive(Debug)]
pub(super) struct FetchedExpert {
    pub(super) place: (usize, usize),
    pub(super) expert: usize,
    pub(super) is_prefetch: bool,
    pub(super) memory: PackedWeight,
    pub(super) begin: Instant,
    pub(super) end: Instant,
    /// Why the memory does not hold the matrix.
    pub(super) outcome: Result<(), Diagnostic>,
}

/// The thread that fetches. Dropping this value ends it after the current transfer.
#[derive(Debug)]
pub(super) struct ExpertIo {
    queue: Arc<FetchQueue>,
    answers: Receiver<FetchedExpert>,
    thread: Option<JoinHandle<()>>,
}

impl ExpertIo {
    /// Starts the thread.
    ///
    /// # Errors
    /// T0804 if the host has no room for it.
    pub(super) fn start() -> Result<ExpertIo, Diagnostic> {
        let (sender, answers) = channel();
        let queue = Arc::new(FetchQueue::default());
        let orders = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name(format!("tessera-{}", StreamKind::Io.name()))
            .spawn(move || run_fetches(&orders, &sender))
            .map_err(|e| Diagnostic::error(&T0804, format!("the thread that fetches experts: {e}")))?;
        Ok(ExpertIo { queue, answers, thread: Some(thread) })
    }

    pub(super) fn request(&self, order: FetchOrder) {
        self.queue.push(order);
    }

    /// Waits for the next answer; `None` if the thread has ended.
    pub(super) fn wait_for_answer(&self) -> Option<FetchedExpert> {
        self.answers.recv().ok()
    }

    /// Returns an answer that has arrived.
    pub(super) fn take_answer(&self) -> Option<FetchedExpert> {
        self.answers.try_recv().ok()
    }
}

impl Drop for ExpertIo {
    fn drop(&mut self) {
        self.queue.close();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing left to end.
            let _ = thread.join();
        }
    }
}

#[derive(Debug, Default)]
struct FetchQueue {
    orders: Mutex<Orders>,
    is_changed: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    /// Orders for the current run. They overtake the others, for which nothing waits yet.
    due: VecDeque<FetchOrder>,
    ahead: VecDeque<FetchOrder>,
    is_closed: bool,
}

impl FetchQueue {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, order: FetchOrder) {
        let mut orders = self.lock();
        match order.is_due {
            true => orders.due.push_back(order),
            false => orders.ahead.push_back(order),
        }
        self.is_changed.notify_one();
    }

    fn close(&self) {
        self.lock().is_closed = true;
        self.is_changed.notify_one();
    }

    /// Waits for the next order; `None` ends the thread. The wait ends with the backend, which closes the queue.
    fn pop(&self) -> Option<FetchOrder> {
        let mut orders = self.lock();
        loop {
            if orders.is_closed {
                return None;
            }
            let next = orders.due.pop_front().or_else(|| orders.ahead.pop_front());
            if next.is_some() {
                return next;
            }
            orders = self.is_changed.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn run_fetches(queue: &FetchQueue, answers: &Sender<FetchedExpert>) {
    let pool = Pool::single_thread();
    let mut elements = Vec::new();
    while let Some(order) = queue.pop() {
        let FetchOrder { place, expert, is_prefetch, source, dtype, mut memory, .. } = order;
        let begin = Instant::now();
        let (n, k) = memory.shape();
        elements.resize(n * k, 0.0);
        let outcome = source.read_rows(expert as u64, 0, &mut elements).map(|()| {
            round_to_dtype(&pool, &mut elements, dtype);
            memory.replace(&pool, &elements);
        });
        let answer =
            FetchedExpert { place, expert, is_prefetch, memory, begin, end: Instant::now(), outcome };
        if answers.send(answer).is_err() {
            return;
        }
    }
}
