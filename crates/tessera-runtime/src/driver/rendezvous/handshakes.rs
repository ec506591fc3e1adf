//! Accepts connections and runs their handshakes, so that strangers at the port can neither keep a
//! rank out nor fill the output.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;

use super::{UNREACHABLE_LIMIT, handshake_deadline};
use crate::codes::T0756;
use crate::driver::secure::{self, AuthenticatedPeer, Claim, Credentials, Refusal, RefusalKind};

/// Maximum handshakes in progress.
const MAX_HANDSHAKES: usize = 64;
/// Time after which a handshake in progress gives its place to a newer connection if all places are
/// taken. A rank needs two round trips.
const PLACE_TIME: Duration = Duration::from_millis(500);
/// Maximum connections accepted in one poll.
const ACCEPTS_PER_POLL: usize = 64;

/// Continues with a peer that has proved itself, before the deadline.
type Finish<T> = fn(AuthenticatedPeer, SocketAddr, Instant) -> Result<T, Diagnostic>;

/// The result of a connection: the accepted peer, or why there is none.
pub(super) enum HandshakeOutcome<T> {
    Accepted(T),
    /// The peer did not prove itself.
    Refused(Refusal),
    /// The peer proved itself and then failed.
    Failed(Diagnostic),
}

/// The connections to a listener whose handshakes are in progress, each on a thread of its own.
pub(super) struct HandshakePool<'a, T> {
    listener: &'a TcpListener,
    credentials: Credentials,
    own_claim: Claim,
    finish: Finish<T>,
    /// The handshakes in progress by number; lower numbers are older.
    pending: BTreeMap<u64, PendingHandshake>,
    accepted: u64,
    sender: Sender<(u64, HandshakeOutcome<T>)>,
    outcomes: Receiver<(u64, HandshakeOutcome<T>)>,
}

struct PendingHandshake {
    /// Another handle of the peer's socket, which can end the handshake.
    socket: TcpStream,
    since: Instant,
    proved: Arc<AtomicBool>,
    displaced: bool,
}

impl<'a, T: Send + 'static> HandshakePool<'a, T> {
    pub(super) fn new(
        listener: &'a TcpListener,
        credentials: Credentials,
        own_claim: Claim,
        finish: Finish<T>,
    ) -> HandshakePool<'a, T> {
        let (sender, outcomes) = channel();
        let pending = BTreeMap::new();
        HandshakePool { listener, credentials, own_claim, finish, pending, accepted: 0, sender, outcomes }
    }

    /// Accepts the connections that wait, and returns the outcome of a handshake that has ended, if
    /// any.
    pub(super) fn poll_next(&mut self) -> Option<HandshakeOutcome<T>> {
        for _ in 0..ACCEPTS_PER_POLL {
            let oldest = self.oldest_place();
            if self.taken_places() >= MAX_HANDSHAKES && oldest.is_none() {
                break;
            }
            let Ok((stream, from)) = self.listener.accept() else { break };
            if self.taken_places() >= MAX_HANDSHAKES
                && let Some(oldest) = oldest.and_then(|n| self.pending.get_mut(&n))
            {
                oldest.displaced = true;
                let _ = oldest.socket.shutdown(Shutdown::Both);
            }
            self.start_handshake(stream, from);
        }
        let (number, outcome) = self.outcomes.try_recv().ok()?;
        let displaced = self.pending.remove(&number).is_some_and(|p| p.displaced);
        Some(match outcome {
            HandshakeOutcome::Refused(mut refusal) if displaced && refusal.kind == RefusalKind::Closed => {
                refusal.kind = RefusalKind::Displaced;
                HandshakeOutcome::Refused(refusal)
            }
            other => other,
        })
    }

    fn taken_places(&self) -> usize {
        self.pending.values().filter(|p| !p.displaced).count()
    }

    /// Returns the oldest handshake that may lose its place. The threads of displaced handshakes
    /// count, too: while as many of them are ending, nobody else loses a place.
    fn oldest_place(&self) -> Option<u64> {
        if self.pending.len() >= 2 * MAX_HANDSHAKES {
            return None;
        }
        let (number, oldest) =
            self.pending.iter().find(|(_, p)| !p.displaced && !p.proved.load(Ordering::Acquire))?;
        (oldest.since.elapsed() >= PLACE_TIME).then_some(*number)
    }

    fn start_handshake(&mut self, stream: TcpStream, from: SocketAddr) {
        // Without a second handle or a thread the connection is dropped, and a rank tries again.
        let Ok(socket) = stream.try_clone() else { return };
        let proved = Arc::new(AtomicBool::new(false));
        let (credentials, own_claim, finish) = (self.credentials.clone(), self.own_claim, self.finish);
        let (number, sender, has_proved) = (self.accepted, self.sender.clone(), Arc::clone(&proved));
        let spawned = std::thread::Builder::new().name("handshake".into()).spawn(move || {
            // A socket that cannot be tuned fails in the handshake.
            let _ = secure::tune_socket(&stream, UNREACHABLE_LIMIT);
            let deadline = handshake_deadline();
            let outcome = match secure::accept_peer(stream, &credentials, &own_claim, deadline) {
                Err(refusal) => HandshakeOutcome::Refused(refusal),
                Ok(peer) => {
                    has_proved.store(true, Ordering::Release);
                    match finish(peer, from, deadline) {
                        Ok(accepted) => HandshakeOutcome::Accepted(accepted),
                        Err(d) => HandshakeOutcome::Failed(d),
                    }
                }
            };
            let _ = sender.send((number, outcome));
        });
        if spawned.is_ok() {
            let since = Instant::now();
            self.pending.insert(number, PendingHandshake { socket, since, proved, displaced: false });
            self.accepted += 1;
        }
    }
}

impl<T> Drop for HandshakePool<'_, T> {
    /// Ends the handshakes in progress, so that their threads end now and not at their deadline.
    fn drop(&mut self) {
        for handshake in self.pending.values() {
            let _ = handshake.socket.shutdown(Shutdown::Both);
        }
    }
}

/// Counts refusals by kind. The first one of a kind is reported at once and the others as one
/// number, so that the output does not grow with the number of strangers.
#[derive(Debug, Default)]
pub(super) struct RefusalTally {
    /// The kind, whether the peer sent a claim, the first refusal, and the number of further ones.
    kinds: BTreeMap<(RefusalKind, bool), (Refusal, u64)>,
}

impl RefusalTally {
    /// Counts a refusal, and returns its diagnostic if it is the first one of its kind.
    pub(super) fn count_refusal(&mut self, refusal: Refusal) -> Option<Diagnostic> {
        let kind = (refusal.kind, refusal.peer_claim.is_some());
        if let Some((_, further)) = self.kinds.get_mut(&kind) {
            *further += 1;
            return None;
        }
        let d = refusal.to_diagnostic();
        self.kinds.insert(kind, (refusal, 0));
        Some(d)
    }

    /// Returns one diagnostic for each kind of which more than one peer was refused.
    pub(super) fn summarize(&self) -> Vec<Diagnostic> {
        let repeated = self.kinds.values().filter(|(_, further)| *further > 0);
        repeated
            .map(|(first, further)| {
                Diagnostic::error(&T0756, describe_further(*further))
                    .with_label(format!("like {}", first.address), first.kind.describe())
            })
            .collect()
    }

    /// Returns the first refusal of each kind, with the number of further ones, as texts.
    pub(super) fn describe_kinds(&self) -> Vec<String> {
        let mut out = Vec::new();
        for (first, further) in self.kinds.values() {
            out.push(first.to_diagnostic().message);
            if *further > 0 {
                out.push(describe_further(*further));
            }
        }
        out
    }
}

fn describe_further(count: u64) -> String {
    let processes = if count == 1 { "process" } else { "processes" };
    format!("{count} more {processes} did not prove to belong to this run")
}
