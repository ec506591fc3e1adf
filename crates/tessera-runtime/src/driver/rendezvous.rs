//! The rendezvous of ranks that no launcher started. Every rank connects to rank 0 and
//! authenticates itself. Rank 0 compares the ranks' parameters and sends everyone the addresses;
//! then every pair of ranks that needs a link opens one.
//!
//! Only an authenticated rank can make rank 0 give up. Rank 0 reports unauthenticated processes at
//! its port, one line for each kind and a count, and otherwise ignores them: a handshake that is
//! slow gives its place to newer connections.

mod connect;
mod gather;
mod handshakes;
mod links;
mod messages;

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::ControlTopology;
use super::byte_stream::ByteStream;
use super::launcher::StopHandle;
use super::secure::{Claim, ConnectionPurpose, Credentials, HANDSHAKE_LIMIT};
use crate::Digest;
use crate::codes::T0758;
use connect::ReachedMaster;
use messages::{RankInfo, RendezvousMessage, into_diagnostics, receive_message, send_message, send_refusal};

/// Maximum number of ranks in a rendezvous.
pub const MAX_WORLD: u32 = 1024;
/// Time limit for opening the links between ranks once all ranks have joined.
pub const LINK_LIMIT: Duration = Duration::from_secs(30);
/// A host that does not answer for this long counts as unreachable. The limit is shorter than the
/// shortest deadline of a call: if only the data link between two ranks is lost, both still send
/// heartbeats, and the leader would name one of them as the rank that made no progress.
pub const UNREACHABLE_LIMIT: Duration = Duration::from_secs(4);

/// The input of one rank to the rendezvous: its identity, the address of rank 0, its credentials,
/// and the values that must be equal on all ranks.
#[derive(Debug, Clone)]
pub struct RendezvousSpec {
    /// Rank of this process, from 0 to the world size less one.
    pub rank: u32,
    /// Number of ranks in the run, the same on each of them.
    pub world_size: u32,
    /// Where rank 0 listens: a host name or address, and a port.
    pub master: (String, u16),
    /// Address at which this rank listens. The default is the local address of its connection to
    /// rank 0; for rank 0, the master's address.
    pub bind: Option<IpAddr>,
    /// Secret or certificates by which the ranks authenticate each other.
    pub credentials: Credentials,
    /// Determines which pairs of ranks need a control link; the same on every rank.
    pub topology: ControlTopology,
    /// Members of each communicator of collectives, in the order in which every rank creates them.
    pub communicators: Vec<Vec<u32>>,
    /// Values that must be equal on every rank before links are opened, by name: the plan's digest,
    /// the build.
    pub parity_values: Vec<(String, String)>,
    /// The session, which rank 0 decides; the value of any other rank is ignored.
    pub session: u64,
    /// Payload that rank 0 sends to all other ranks once they have joined; the value of any other
    /// rank is ignored.
    pub leader_payload: Vec<u8>,
    /// How long this rank waits for the others.
    pub join_limit: Duration,
}

/// The result of the rendezvous: this rank's streams to its peers.
pub struct RendezvousPeers {
    /// The session that rank 0 decided.
    pub session: u64,
    /// Control links, in the order of [`super::JoinedRank::from_links`].
    pub control: Vec<Box<dyn ByteStream>>,
    /// The communicators of this rank: index, and a stream to each other member in the order of the
    /// member list.
    pub communicators: Vec<(usize, Vec<Box<dyn ByteStream>>)>,
    /// The address at which each rank listens; for rank 0, the master's address as this rank was
    /// given it.
    pub addresses: Vec<String>,
    /// Digest of the ranks' addresses and communicators: a parity key.
    pub digest: Digest,
    /// The bytes that rank 0 gave as [`RendezvousSpec::leader_payload`]; rank 0 gets them back too.
    pub leader_payload: Vec<u8>,
}

impl std::fmt::Debug for RendezvousPeers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RendezvousPeers(session {:016x}, {:?})", self.session, self.addresses)
    }
}

/// Joins the other ranks and returns the streams to them. `note` receives a diagnostic for the
/// first unauthenticated process of each kind, and one with the number of further ones at the end;
/// `stop` ends the wait. On rank 0, `ready` runs after all ranks have their links and before any of
/// them continues.
///
/// # Errors
/// T0756, T0757, T0758 or T0740, with the rank, the address and the values of both sides.
pub fn join_peers(
    spec: &RendezvousSpec,
    stop: &StopHandle,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
) -> Result<RendezvousPeers, Diagnostics> {
    let found = spec.check_spec();
    if !found.is_empty() {
        return Err(found);
    }
    let wait = WaitLimit { stop, deadline: Instant::now() + spec.join_limit };
    if spec.rank == 0 {
        gather::gather_ranks(spec, &wait, note, ready)
    } else {
        join_as_follower(spec, &wait, note)
    }
}

impl RendezvousSpec {
    fn check_spec(&self) -> Diagnostics {
        let mut found = Vec::new();
        if self.world_size == 0 || self.world_size > MAX_WORLD {
            found.push(
                Diagnostic::error(&T0758, "the world's size is out of range")
                    .with_label("world size", self.world_size.to_string())
                    .with_label("allowed", format!("1 to {MAX_WORLD}")),
            );
        } else if self.rank >= self.world_size {
            found.push(
                Diagnostic::error(
                    &T0758,
                    format!("there is no rank {} in a world of {}", self.rank, self.world_size),
                )
                .with_label("rank", self.rank.to_string())
                .with_label("world size", format!("{}: ranks 0 to {}", self.world_size, self.world_size - 1)),
            );
        }
        found
    }

    fn make_claim(
        &self,
        purpose: ConnectionPurpose,
        expected_peer: u32,
        communicator: u32,
        session: u64,
    ) -> Claim {
        Claim { purpose, rank: self.rank, expected_peer, world_size: self.world_size, communicator, session }
    }

    fn make_info(&self, port: u16) -> RankInfo {
        let address = self.bind.filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_string());
        RankInfo {
            parity_values: self.parity_values.clone(),
            communicators_digest: self.communicators_digest(),
            port,
            address,
        }
    }

    fn communicators_digest(&self) -> String {
        Digest::hash_value("lanes of a run", &self.communicators).to_string()
    }

    /// Returns the master's host and port as given, without resolving the name.
    fn master_address(&self) -> String {
        format!("{}:{}", self.master.0, self.master.1)
    }
}

/// The deadline of a wait, and the handle that can stop the wait.
struct WaitLimit<'a> {
    stop: &'a StopHandle,
    deadline: Instant,
}

impl WaitLimit<'_> {
    /// Returns the diagnostic that ends the wait, if the deadline has passed or a stop was
    /// requested.
    fn check_expired(&self, waited_for: &str) -> Option<Diagnostic> {
        if self.is_stopped() {
            return Some(stopped_diagnostic(waited_for));
        }
        let late = Instant::now() >= self.deadline;
        late.then(|| Diagnostic::error(&T0758, format!("timed out waiting for {waited_for}")))
    }

    fn is_stopped(&self) -> bool {
        self.stop.request_count() > 0
    }

    /// Returns the deadline of a handshake that starts now and may not outlast the wait.
    fn handshake_deadline(&self) -> Instant {
        handshake_deadline().min(self.deadline)
    }

    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

/// Builds the diagnostic of a wait that was stopped on request.
fn stopped_diagnostic(waited_for: &str) -> Diagnostic {
    Diagnostic::error(&T0758, format!("stopped on request while waiting for {waited_for}"))
}

/// Returns the deadline of a handshake that starts now.
fn handshake_deadline() -> Instant {
    Instant::now() + HANDSHAKE_LIMIT
}

/// Joins as a rank other than 0: sends rank 0 this rank's address, opens links to the ranks of the
/// address table that rank 0 returns, and waits for the start.
fn join_as_follower(
    spec: &RendezvousSpec,
    wait: &WaitLimit<'_>,
    note: &mut dyn FnMut(Diagnostic),
) -> Result<RendezvousPeers, Diagnostics> {
    let ReachedMaster { mut leader, own_address, address: master_address } =
        connect::reach_master(spec, wait).map_err(|d| vec![d])?;
    let session = leader.claim.session;
    let fail = |what: &str, e: &std::io::Error| {
        if e.kind() == ErrorKind::Interrupted {
            return vec![stopped_diagnostic("the other ranks")];
        }
        vec![
            Diagnostic::error(&T0758, format!("rank 0 left while {what}"))
                .with_label(format!("rank 0 at {}", spec.master_address()), e.to_string())
                .with_hint("the output of rank 0 shows the reason"),
        ]
    };
    let listener = listen_at(spec.bind.unwrap_or(own_address.ip()), 0).map_err(|d| vec![d])?;
    let port = listener.local_addr().map_err(|e| fail("this rank looked up its own address", &e))?.port();
    send_message(&mut *leader.stream, &RendezvousMessage::Info(spec.make_info(port)), wait.deadline)
        .map_err(|e| fail("this rank sent its address", &e))?;
    // The other ranks may connect late, so the wait is long; if rank 0 ends, the wait ends at once.
    let table = match receive_message(&mut *leader.stream, wait.deadline + LINK_LIMIT, Some(wait.stop)) {
        Ok(RendezvousMessage::Table(table)) => table,
        Ok(RendezvousMessage::Refused(refusal)) => return Err(into_diagnostics(refusal)),
        Ok(_) => return Err(fail("it was due to send the address table", &ErrorKind::InvalidData.into())),
        Err(e) => return Err(fail("this rank waited for the other ranks", &e)),
    };
    if table.addresses.len() != spec.world_size as usize {
        return Err(fail("it was due to send the address table", &ErrorKind::InvalidData.into()));
    }
    let wait = WaitLimit { stop: wait.stop, deadline: Instant::now() + LINK_LIMIT };
    let link_result = links::open_links(spec, session, &table, master_address, &listener, &wait, note);
    let links = match link_result {
        Ok(links) => links,
        Err(ds) => {
            send_refusal(&mut *leader.stream, &ds);
            return Err(ds);
        }
    };
    send_message(&mut *leader.stream, &RendezvousMessage::Linked, wait.deadline)
        .map_err(|e| fail("this rank opened its links", &e))?;
    match receive_message(&mut *leader.stream, wait.deadline + LINK_LIMIT, Some(wait.stop)) {
        Ok(RendezvousMessage::Start) => Ok(links.into_peers(spec, session, table, vec![(0, leader.stream)])),
        Ok(RendezvousMessage::Refused(refusal)) => Err(into_diagnostics(refusal)),
        Ok(_) => Err(fail("the other ranks opened their links", &ErrorKind::InvalidData.into())),
        Err(e) => Err(fail("the other ranks opened their links", &e)),
    }
}

/// Listens at an address; port 0 selects any free port.
fn listen_at(ip: IpAddr, port: u16) -> Result<TcpListener, Diagnostic> {
    let at = SocketAddr::new(ip, port);
    let listener = TcpListener::bind(at).and_then(|l| l.set_nonblocking(true).map(|()| l));
    listener.map_err(|e| {
        let d = Diagnostic::error(&T0758, format!("this rank cannot listen at {at}")).with_label("system", e.to_string());
        match e.kind() {
            ErrorKind::AddrInUse => d.with_hint("another run listens there: choose another MASTER_PORT, or end that run"),
            ErrorKind::AddrNotAvailable => {
                d.with_hint("this host does not have the address: start rank 0 on the host of MASTER_ADDR, or give --bind an address of this host")
            }
            _ => d,
        }
    })
}

/// Formats ranks as `0, 2, 5`.
fn format_ranks(ranks: impl IntoIterator<Item = u32>) -> String {
    let mut out = String::new();
    for r in ranks {
        let _ = write!(out, "{}{r}", if out.is_empty() { "" } else { ", " });
    }
    out
}
