//! Connects to other ranks. A handshake that fails because the listener was busy is retried; one
//! that shows different credentials is not.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use tessera_base::Diagnostic;

use super::{RendezvousSpec, UNREACHABLE_LIMIT, WaitLimit};
use crate::codes::T0758;
use crate::driver::secure::{self, AuthenticatedPeer, ConnectionPurpose, Refusal, RefusalKind};

/// Number of times that a peer may close the connection during the handshake. It does so if the
/// credentials differ, and also if strangers take all its places for handshakes.
const MAX_CLOSED_HANDSHAKES: u32 = 3;
/// Pause before the handshake is retried for the first time; it doubles with every try.
const FIRST_HANDSHAKE_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause between two tries.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The failed handshakes with one peer.
#[derive(Debug, Default)]
pub(super) struct HandshakeRetries {
    closed: u32,
    pause: Duration,
}

impl HandshakeRetries {
    /// Counts a refusal and returns the pause before the next try, or `None` if another try would
    /// fail too.
    pub(super) fn next_pause(&mut self, refusal: &Refusal) -> Option<Duration> {
        match refusal.kind {
            RefusalKind::Late | RefusalKind::Displaced => {}
            RefusalKind::Closed => self.closed += 1,
            RefusalKind::Invalid => return None,
        }
        self.pause = (self.pause * 2).clamp(FIRST_HANDSHAKE_PAUSE, MAX_PAUSE);
        (self.closed < MAX_CLOSED_HANDSHAKES).then_some(self.pause)
    }
}

/// Rank 0, as another rank reached it.
pub(super) struct ReachedMaster {
    /// Rank 0, with the stream of the rendezvous.
    pub(super) leader: AuthenticatedPeer,
    /// This rank's end of the connection.
    pub(super) own_address: SocketAddr,
    /// Rank 0's end of the connection.
    pub(super) address: SocketAddr,
}

/// Why a try did not reach rank 0.
enum FailedTry {
    /// The reason why there is no connection.
    Unconnected(String),
    /// The handshake failed.
    Refused(Refusal),
    /// Another try would fail too.
    Final(Diagnostic),
}

/// Connects to rank 0, and retries while no process listens there or answers.
pub(super) fn reach_master(spec: &RendezvousSpec, wait: &WaitLimit<'_>) -> Result<ReachedMaster, Diagnostic> {
    let mut pause = Duration::from_millis(50);
    let mut retries = HandshakeRetries::default();
    let mut tries = 0u32;
    let mut last_refusal = None;
    loop {
        tries += 1;
        let mut last_error = None;
        let mut next_pause = pause;
        match try_master(spec, wait) {
            Ok(reached) => return Ok(reached),
            Err(FailedTry::Final(d)) => return Err(d),
            Err(FailedTry::Unconnected(error)) => last_error = Some(error),
            Err(FailedTry::Refused(refusal)) => match retries.next_pause(&refusal) {
                None => return Err(refusal.to_diagnostic()),
                Some(pause) => {
                    next_pause = pause;
                    last_refusal = Some(refusal);
                }
            },
        }
        if let Some(d) = wait.check_expired(&format!("rank 0 at {}", spec.master_address())) {
            // A process that answered, even if only once, is the likelier cause.
            let refusal = last_refusal.filter(|_| !wait.is_stopped());
            let hint = "start rank 0 too, with the same MASTER_ADDR and MASTER_PORT";
            let d = refusal.map_or_else(|| d.with_hint(hint), |r| r.to_diagnostic());
            let tried = format!("tried {tries} times in {} s", spec.join_limit.as_secs());
            let d = d.with_label(format!("rank {}", spec.rank), tried);
            return Err(last_error.into_iter().fold(d, |d, error| d.with_label("last error", error)));
        }
        std::thread::sleep(next_pause.min(wait.time_left()));
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

fn try_master(spec: &RendezvousSpec, wait: &WaitLimit<'_>) -> Result<ReachedMaster, FailedTry> {
    let addresses = resolve_master(spec)
        .map_err(|e| FailedTry::Unconnected(format!("the name does not resolve: {e}")))?;
    let mut last_error = "the name resolves to no address".to_string();
    for at in addresses {
        let limit = wait.time_left().clamp(Duration::from_millis(1), Duration::from_secs(3));
        match TcpStream::connect_timeout(&at, limit) {
            Ok(stream) => return greet_master(spec, wait, stream, at),
            Err(e) => last_error = format!("{at}: {e}"),
        }
    }
    Err(FailedTry::Unconnected(last_error))
}

fn greet_master(
    spec: &RendezvousSpec,
    wait: &WaitLimit<'_>,
    stream: TcpStream,
    address: SocketAddr,
) -> Result<ReachedMaster, FailedTry> {
    let io = |e: std::io::Error| {
        FailedTry::Final(
            Diagnostic::error(&T0758, format!("the connection to rank 0 at {address} failed"))
                .with_label("system", e.to_string()),
        )
    };
    secure::tune_socket(&stream, UNREACHABLE_LIMIT).map_err(io)?;
    let own_address = stream.local_addr().map_err(io)?;
    let claim = spec.make_claim(ConnectionPurpose::Join, 0, 0, 0);
    let leader = secure::connect_peer(stream, &spec.credentials, &claim, wait.handshake_deadline())
        .map_err(FailedTry::Refused)?;
    // Rank 0 reports any other mismatch, because it sees all ranks.
    if leader.claim.rank != 0 || leader.claim.purpose != ConnectionPurpose::Join {
        return Err(FailedTry::Final(
            Diagnostic::error(&T0758, format!("the process that listens at {address} is not rank 0"))
                .with_label(address.to_string(), format!("claims to be {}", leader.claim)),
        ));
    }
    Ok(ReachedMaster { leader, own_address, address })
}

/// Returns the addresses to which the master's name resolves.
pub(super) fn resolve_master(spec: &RendezvousSpec) -> std::io::Result<Vec<SocketAddr>> {
    Ok((spec.master.0.as_str(), spec.master.1).to_socket_addrs()?.collect())
}
