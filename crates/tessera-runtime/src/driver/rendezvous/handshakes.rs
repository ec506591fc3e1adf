//! Accepts connections and runs each handshake on its own thread, so that a slow stranger cannot
//! block the ranks.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use tessera_base::Diagnostic;

/// Maximum handshakes in progress; further connections wait in the listener's backlog.
const MAX_HANDSHAKES: usize = 64;

type Handshake<T> = Arc<dyn Fn(TcpStream, SocketAddr) -> Result<T, Diagnostic> + Send + Sync>;

pub(super) struct HandshakePool<'a, T> {
    listener: &'a TcpListener,
    handshake: Handshake<T>,
    pending: Arc<AtomicUsize>,
    sender: SyncSender<Result<T, Diagnostic>>,
    outcomes: Receiver<Result<T, Diagnostic>>,
}

impl<T: Send + 'static> HandshakePool<'_, T> {
    /// Creates a pool that runs `handshake` with every accepted connection and its peer's address.
    pub(super) fn new(
        listener: &TcpListener,
        handshake: impl Fn(TcpStream, SocketAddr) -> Result<T, Diagnostic> + Send + Sync + 'static,
    ) -> HandshakePool<'_, T> {
        let (sender, outcomes) = sync_channel(MAX_HANDSHAKES);
        HandshakePool { listener, handshake: Arc::new(handshake), pending: Arc::default(), sender, outcomes }
    }

    /// Accepts a waiting connection, if any, and starts its handshake.
    pub(super) fn accept_next(&self) {
        if self.pending.load(Ordering::Relaxed) >= MAX_HANDSHAKES {
            return;
        }
        let Ok((stream, from)) = self.listener.accept() else { return };
        let (handshake, sender) = (Arc::clone(&self.handshake), self.sender.clone());
        let pending = Arc::clone(&self.pending);
        pending.fetch_add(1, Ordering::Relaxed);
        let spawned = std::thread::Builder::new().name("handshake".into()).spawn(move || {
            let outcome = handshake(stream, from);
            pending.fetch_sub(1, Ordering::Relaxed);
            let _ = sender.send(outcome);
        });
        if spawned.is_err() {
            self.pending.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the outcome of a handshake that has ended.
    pub(super) fn next_outcome(&self) -> Option<Result<T, Diagnostic>> {
        self.outcomes.try_recv().ok()
    }
}
