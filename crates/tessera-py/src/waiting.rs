//! Waits that leave the interpreter free and answer Ctrl-C.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tessera_base::Diagnostics;

use crate::errors::OrRaise;

/// How often a waiting call looks for Ctrl-C.
const SIGNAL_PERIOD: Duration = Duration::from_millis(20);

/// How often a call looks whether another one has ended.
const LOCK_PERIOD: Duration = Duration::from_millis(1);

/// Runs work without the interpreter's lock, and `interrupt` as soon as Python has a signal to handle. The work ends before
/// this returns.
pub(crate) fn wait_for<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, Diagnostics> + Send,
    interrupt: impl Fn(),
) -> PyResult<Result<T, Diagnostics>> {
    std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        let worker = scope.spawn(move || {
            // The receiver waits for the result even after an interrupt.
            let _ = sender.send(work());
        });
        let receiver = Mutex::new(receiver);
        let mut raised = None;
        let outcome = loop {
            let outcome = py.detach(|| {
                receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNAL_PERIOD)
            });
            match outcome {
                Ok(result) => break Some(result),
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) => {
                    if let Err(e) = py.check_signals() {
                        interrupt();
                        raised.get_or_insert(e);
                    }
                }
            }
        };
        let has_panicked = worker.join().is_err();
        match (raised, outcome) {
            (Some(e), _) => Err(e),
            (None, Some(result)) if !has_panicked => Ok(result),
            (None, _) => Err(PyRuntimeError::new_err("a thread of Tessera panicked: this is a defect")),
        }
    })
}

/// Locks what another thread may hold for the time of a call.
pub(crate) fn lock_patiently<'a, T>(py: Python<'_>, mutex: &'a Mutex<T>) -> PyResult<MutexGuard<'a, T>> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                py.detach(|| std::thread::sleep(LOCK_PERIOD));
                py.check_signals()?;
            }
        }
    }
}

/// A run of processes that a Python object owns.
pub(crate) trait LiveRun: Sync {
    /// Kills the ranks.
    fn kill(&self);

    /// Ends the run and waits for its processes.
    ///
    /// # Errors
    /// The failure of the run, with its code.
    fn close(&self) -> Result<(), Diagnostics>;
}

/// Kills the ranks of a run that its caller leaves, and waits for their end. The caller leaves its failure, too.
pub(crate) fn abandon(py: Python<'_>, live: &impl LiveRun) {
    py.detach(|| {
        live.kill();
        let _ = live.close();
    });
}

/// Waits without the interpreter's lock; Ctrl-C ends the run and its processes.
pub(crate) fn wait_on<T: Send>(
    py: Python<'_>,
    live: &impl LiveRun,
    work: impl FnOnce() -> Result<T, Diagnostics> + Send,
) -> PyResult<T> {
    match wait_for(py, work, || live.kill()) {
        Ok(outcome) => outcome.or_raise(py),
        Err(interrupt) => {
            abandon(py, live);
            Err(interrupt)
        }
    }
}
