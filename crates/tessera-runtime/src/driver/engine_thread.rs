//! The engine thread: it builds the engine, runs every call on it, and owns it until the process
//! ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use tessera_base::Diagnostic;

use crate::call_state::{CallState, CallStateSpec};
use crate::codes::T0745;
use crate::engine::{AbortHandle, CallReport, Engine, EngineFault, ReadyCall, run_call};
use crate::program_index::ProgramIndex;
use crate::tripwire::Tripwires;
use crate::wire::ShardFingerprint;
use crate::worker::load_failure;
use crate::{Failure, FailureClass, Parity};

/// Builds the engine on the engine thread and returns it with its entries for the parity table.
pub type EngineFactory = Box<dyn FnOnce() -> Result<(Box<dyn Engine>, Parity), Diagnostic> + Send>;

/// Events that the engine thread sends to the control thread.
pub enum EngineEvent {
    /// The factory built the engine, and the thread now waits for calls.
    Loaded {
        /// Makes the engine's blocked collectives return.
        abort: AbortHandle,
        /// The engine's entries for the parity table.
        parity: Parity,
        /// Fingerprints of the weight shards that the engine loaded.
        fingerprints: Vec<ShardFingerprint>,
    },
    /// The engine could not be built; the thread has ended.
    NotLoaded(Failure),
    /// The engine finished a call: its report, or the fault that ended it.
    CallEnded(Box<Result<CallReport, EngineFault>>),
}

/// The control thread's handle to the engine thread. The engine thread ends after this handle is
/// dropped and the running call has ended.
pub struct EngineThread {
    calls: SyncSender<Box<ReadyCall>>,
    progress: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl EngineThread {
    /// Starts the thread, which builds the engine and then waits for calls.
    ///
    /// # Errors
    /// Returns the operating system's error if no thread can be started.
    pub fn spawn(
        rank: u32,
        factory: EngineFactory,
        program_index: Arc<ProgramIndex>,
        state: CallStateSpec,
        tripwires: Tripwires,
        on_event: impl Fn(EngineEvent) + Send + 'static,
    ) -> std::io::Result<EngineThread> {
        let (calls, inbox) = sync_channel::<Box<ReadyCall>>(1);
        let mark = Arc::new(AtomicU64::new(0));
        let thread_progress = Arc::clone(&mark);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let built = catch_unwind(AssertUnwindSafe(factory));
            let (mut engine, parity) = match built {
                Ok(Ok(built)) => built,
                Ok(Err(d)) => return on_event(EngineEvent::NotLoaded(load_failure(rank, &d))),
                Err(panic) => {
                    let text = format!("the engine panicked while loading: {}", panic_text(&*panic));
                    let failure = Failure::new(FailureClass::Engine, Some(rank), &T0745, text);
                    return on_event(EngineEvent::NotLoaded(failure));
                }
            };
            let mut state = match CallState::new(state) {
                Ok(state) => state,
                Err(d) => return on_event(EngineEvent::NotLoaded(load_failure(rank, &d))),
            };
            let (abort, fingerprints) = (engine.abort_handle(), engine.weight_fingerprints());
            on_event(EngineEvent::Loaded { abort, parity, fingerprints });
            while let Ok(mut call) = inbox.recv() {
                engine.tamper_call(&mut call);
                let progress = |m: u64| thread_progress.store(m, Ordering::Relaxed);
                let call_result = catch_unwind(AssertUnwindSafe(|| {
                    run_call(engine.as_mut(), &call, &program_index, &mut state, &tripwires, &progress)
                }));
                let outcome = call_result.unwrap_or_else(|panic| {
                    Err(EngineFault::local_failure(format!("the engine panicked: {}", panic_text(&*panic))))
                });
                on_event(EngineEvent::CallEnded(Box::new(outcome)));
            }
        })?;
        Ok(EngineThread { calls, progress: mark, thread })
    }

    /// Ends the thread after the running call and waits until it has dropped the engine, and with it the memory of
    /// the engine's device.
    pub fn join(self) {
        drop(self.calls);
        // A panic of the engine was reported as the end of its call.
        let _ = self.thread.join();
    }

    /// Hands a call to the engine; returns false if the thread has ended or its queue is full. The
    /// queue holds one call, which suffices: the worker never hands over a second call before the
    /// first has ended.
    pub fn start_call(&self, call: Box<ReadyCall>) -> bool {
        self.progress.store(0, Ordering::Relaxed);
        self.calls.try_send(call).is_ok()
    }

    pub(crate) fn progress_counter(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string())
}
