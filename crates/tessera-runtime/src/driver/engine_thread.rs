//! The thread on which an engine lives from its making to the end of the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use tessera_base::Diagnostic;

use crate::cache::{Cache, CacheSpec};
use crate::census::Census;
use crate::engine::{AbortHandle, CallReport, Engine, EngineFault, ReadyCall, T0745, run_call};
use crate::tripwire::Tripwires;
use crate::wire::ShardPrint;
use crate::worker::load_failure;
use crate::{Failure, FailureClass, Parity};

/// Makes the engine on its own thread, with what it adds to the parity table.
pub type EngineFactory = Box<dyn FnOnce() -> Result<(Box<dyn Engine>, Parity), Diagnostic> + Send>;

/// What the thread tells.
pub enum EngineEvent {
    /// The engine is made.
    Loaded {
        /// Ends its collectives.
        abort: AbortHandle,
        /// What it adds to the parity table.
        parity: Parity,
        /// What it holds of the weights.
        fingerprints: Vec<ShardPrint>,
    },
    /// The engine could not be made; the thread has ended.
    NotLoaded(Failure),
    /// A call is over.
    Ended(Box<Result<CallReport, EngineFault>>),
}

/// The other end of an engine's thread, which lives until this is dropped and its call is over.
pub struct EngineThread {
    calls: SyncSender<Box<ReadyCall>>,
    mark: Arc<AtomicU64>,
}

impl EngineThread {
    /// Starts the thread, which makes the engine and then waits for calls.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn spawn(
        rank: u32,
        factory: EngineFactory,
        census: Arc<Census>,
        cache: CacheSpec,
        tripwires: Tripwires,
        tell: impl Fn(EngineEvent) + Send + 'static,
    ) -> std::io::Result<EngineThread> {
        let (calls, inbox) = sync_channel::<Box<ReadyCall>>(1);
        let mark = Arc::new(AtomicU64::new(0));
        let shared = Arc::clone(&mark);
        std::thread::Builder::new().name("engine".into()).spawn(move || {
            let made = catch_unwind(AssertUnwindSafe(factory));
            let (mut engine, parity) = match made {
                Ok(Ok(made)) => made,
                Ok(Err(d)) => return tell(EngineEvent::NotLoaded(load_failure(rank, &d))),
                Err(panic) => {
                    let text = format!("the engine panicked while loading: {}", panic_text(&*panic));
                    return tell(EngineEvent::NotLoaded(Failure::new(
                        FailureClass::Engine,
                        Some(rank),
                        &T0745,
                        text,
                    )));
                }
            };
            let mut cache = match Cache::new(cache) {
                Ok(cache) => cache,
                Err(d) => return tell(EngineEvent::NotLoaded(load_failure(rank, &d))),
            };
            let (abort, fingerprints) = (engine.abort_handle(), engine.fingerprints());
            tell(EngineEvent::Loaded { abort, parity, fingerprints });
            while let Ok(mut call) = inbox.recv() {
                engine.tampers(&mut call);
                let progress = |m: u64| shared.store(m, Ordering::Relaxed);
                let ran = catch_unwind(AssertUnwindSafe(|| {
                    run_call(engine.as_mut(), &call, &census, &mut cache, &tripwires, &progress)
                }));
                let outcome = ran.unwrap_or_else(|panic| {
                    Err(EngineFault::failed(format!("the engine panicked: {}", panic_text(&*panic))))
                });
                tell(EngineEvent::Ended(Box::new(outcome)));
            }
        })?;
        Ok(EngineThread { calls, mark })
    }

    /// Hands over a call; false if the thread is gone or has one waiting. Nobody hands over a second one before
    /// the first has ended, so the thread's queue of one has room.
    pub fn run(&self, call: Box<ReadyCall>) -> bool {
        self.mark.store(0, Ordering::Relaxed);
        self.calls.try_send(call).is_ok()
    }

    pub(crate) fn mark(&self) -> u64 {
        self.mark.load(Ordering::Relaxed)
    }
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string())
}
