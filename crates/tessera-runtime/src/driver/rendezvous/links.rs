//! Opens the links between pairs of ranks: the higher rank connects and the lower rank accepts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};

use super::messages::AddressTable;
use super::{
    RendezvousPeers, RendezvousSpec, UNREACHABLE_LIMIT, WaitLimit, format_ranks, handshake_deadline,
};
use crate::Digest;
use crate::codes::T0758;
use crate::driver::byte_stream::ByteStream;
use crate::driver::secure::{self, AuthenticatedPeer, Claim, ConnectionPurpose};

/// Maximum handshakes in progress; further connections wait in the listener's backlog.
const MAX_HANDSHAKES: usize = 64;
const POLL_INTERVAL: Duration = Duration::from_millis(5);
const DIRECT_REACH_HINT: &str =
    "ranks must reach each other directly: check the firewalls, or give an address with --bind";

/// Purpose, communicator (0 for a control link) and peer rank of a link.
type LinkKey = (ConnectionPurpose, u32, u32);

/// The open links, by purpose, communicator and peer.
pub(super) struct OpenLinks(BTreeMap<LinkKey, Box<dyn ByteStream>>);

/// Opens this rank's links. Control links with rank 0 reuse the connections of the rendezvous.
pub(super) fn open_links(
    spec: &RendezvousSpec,
    session: u64,
    table: &AddressTable,
    master: SocketAddr,
    listener: &TcpListener,
    wait: &WaitLimit<'_>,
    note: &mut dyn FnMut(Diagnostic),
) -> Result<OpenLinks, Diagnostics> {
    let (connects, to_accept): (Vec<LinkKey>, Vec<LinkKey>) =
        required_links(spec).into_iter().partition(|(.., r)| *r < spec.rank);
    let (sender, handshakes) = channel();
    let open = OpenLinks(BTreeMap::new());
    let mut opener = LinkOpener { spec, session, wait, to_accept, pending: 0, sender, handshakes, open };
    let mut queue = connects.into_iter();
    std::thread::scope(|scope| -> Result<(), Diagnostics> {
        loop {
            // The loop alternates between connecting and accepting, so that neither delays a peer's
            // handshake.
            let next = queue.next();
            if let Some(link) = next {
                opener.connect(link, table, master)?;
            }
            opener.accept_next(listener, scope);
            opener.take_handshakes(note);
            if next.is_none() && opener.to_accept.is_empty() {
                return Ok(());
            }
            opener.check_wait()?;
            if next.is_none() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    })?;
    Ok(opener.open)
}

/// The links of this rank while they are opened.
struct LinkOpener<'a> {
    spec: &'a RendezvousSpec,
    session: u64,
    wait: &'a WaitLimit<'a>,
    /// Links to higher ranks that these have not opened yet.
    to_accept: Vec<LinkKey>,
    /// Number of accepted connections whose handshake is in progress.
    pending: usize,
    sender: Sender<Result<AuthenticatedPeer, Diagnostic>>,
    handshakes: Receiver<Result<AuthenticatedPeer, Diagnostic>>,
    open: OpenLinks,
}

impl<'a> LinkOpener<'a> {
    /// Opens a link to a lower rank.
    fn connect(
        &mut self,
        link: LinkKey,
        table: &AddressTable,
        master: SocketAddr,
    ) -> Result<(), Diagnostics> {
        let (purpose, lane, rank) = link;
        let at = match rank {
            0 => master,
            r => table.addresses[r as usize].parse().map_err(|_| unreachable_peer(r, "no address"))?,
        };
        let claim = self.spec.make_claim(purpose, rank, lane, self.session);
        let proved = open_link(self.spec, at, rank, &claim, self.wait)?;
        self.open.0.insert(link, proved.stream);
        Ok(())
    }

    /// Accepts a waiting connection, if any, and starts its handshake on a thread of its own.
    fn accept_next<'scope>(&mut self, listener: &TcpListener, scope: &'scope Scope<'scope, '_>)
    where
        'a: 'scope,
    {
        if self.pending >= MAX_HANDSHAKES || self.to_accept.is_empty() {
            return;
        }
        let Ok((stream, _)) = listener.accept() else { return };
        self.pending += 1;
        let (sender, credentials) = (self.sender.clone(), &self.spec.credentials);
        // The peer's claim names the link that it wants; this side's claim is the same for every
        // link.
        let claim = self.spec.make_claim(ConnectionPurpose::Control, u32::MAX, 0, self.session);
        scope.spawn(move || {
            let _ = secure::tune_socket(&stream, UNREACHABLE_LIMIT);
            let proved = secure::accept_peer(stream, credentials, &claim, handshake_deadline());
            let _ = sender.send(proved.map_err(|refusal| refusal.to_diagnostic()));
        });
    }

    /// Takes the connections whose handshake has ended. A failed one, or one for a link that the
    /// peer may not have, is closed and noted.
    fn take_handshakes(&mut self, note: &mut dyn FnMut(Diagnostic)) {
        while let Ok(proved) = self.handshakes.try_recv() {
            self.pending -= 1;
            match proved {
                Ok(peer) => {
                    let link = (peer.claim.purpose, peer.claim.communicator, peer.claim.rank);
                    let wanted = self.to_accept.iter().position(|l| *l == link);
                    match wanted.filter(|_| self.is_for_this_rank(&peer.claim)) {
                        Some(i) => {
                            self.to_accept.swap_remove(i);
                            self.open.0.insert(link, peer.stream);
                        }
                        None => note(Diagnostic::warning(
                            &T0758,
                            format!(
                                "{} requested a link that it may not have; the link was closed",
                                peer.claim
                            ),
                        )),
                    }
                }
                Err(d) => note(d),
            }
        }
    }

    fn is_for_this_rank(&self, claim: &Claim) -> bool {
        claim.expected_peer == self.spec.rank
            && claim.world_size == self.spec.world_size
            && claim.session == self.session
    }

    /// Returns an error with the missing ranks if the wait for links has expired.
    fn check_wait(&self) -> Result<(), Diagnostics> {
        let Some(d) = self.wait.check_expired("links from other ranks") else { return Ok(()) };
        let missing = format_ranks(self.to_accept.iter().map(|(.., r)| *r).collect::<BTreeSet<_>>());
        Err(vec![
            d.with_label(format!("rank {}", self.spec.rank), format!("waits for ranks {missing}"))
                .with_hint(DIRECT_REACH_HINT),
        ])
    }
}

impl OpenLinks {
    /// Sorts the links and the connections of the rendezvous into the form that the drivers take.
    pub(super) fn into_peers(
        mut self,
        spec: &RendezvousSpec,
        session: u64,
        table: AddressTable,
        joined: Vec<(u32, Box<dyn ByteStream>)>,
    ) -> RendezvousPeers {
        let mut direct: BTreeMap<u32, Box<dyn ByteStream>> = joined.into_iter().collect();
        let mut control = Vec::new();
        for (leads, led) in spec.topology.control_links(spec.world_size) {
            let other = match spec.rank {
                r if r == leads => led,
                r if r == led => leads,
                _ => continue,
            };
            let stream = if leads == 0 {
                direct.remove(&other)
            } else {
                self.0.remove(&(ConnectionPurpose::Control, 0, other))
            };
            control.extend(stream);
        }
        let mut lanes = Vec::new();
        for (i, members) in spec.communicators.iter().enumerate().filter(|(_, m)| m.contains(&spec.rank)) {
            let others = members.iter().filter(|m| **m != spec.rank);
            let streams = others
                .filter_map(|m| self.0.remove(&(ConnectionPurpose::Communicator, i as u32, *m)))
                .collect();
            lanes.push((i, streams));
        }
        let mut addresses = table.addresses;
        if let Some(first) = addresses.first_mut() {
            *first = spec.master_address();
        }
        let others: Vec<&String> = addresses.iter().skip(1).collect();
        let told = table.leader_payload;
        let digest = Digest::hash_value(
            "peers of a run",
            &(spec.world_size, session, others, &spec.communicators, &told),
        );
        RendezvousPeers { session, control, communicators: lanes, addresses, digest, leader_payload: told }
    }
}

/// Lists the links of this rank that the rendezvous has not opened yet.
fn required_links(spec: &RendezvousSpec) -> Vec<LinkKey> {
    let mut out = Vec::new();
    for (leads, led) in
        spec.topology.control_links(spec.world_size).into_iter().filter(|(leads, _)| *leads != 0)
    {
        if spec.rank == leads {
            out.push((ConnectionPurpose::Control, 0, led));
        } else if spec.rank == led {
            out.push((ConnectionPurpose::Control, 0, leads));
        }
    }
    for (i, members) in spec.communicators.iter().enumerate().filter(|(_, m)| m.contains(&spec.rank)) {
        out.extend(
            members
                .iter()
                .filter(|m| **m != spec.rank)
                .map(|m| (ConnectionPurpose::Communicator, i as u32, *m)),
        );
    }
    out
}

fn open_link(
    spec: &RendezvousSpec,
    at: SocketAddr,
    rank: u32,
    claim: &Claim,
    wait: &WaitLimit<'_>,
) -> Result<AuthenticatedPeer, Diagnostics> {
    let limit = wait.time_left().clamp(Duration::from_millis(1), Duration::from_secs(10));
    let stream =
        TcpStream::connect_timeout(&at, limit).map_err(|e| unreachable_peer(rank, &format!("{at}: {e}")))?;
    secure::tune_socket(&stream, UNREACHABLE_LIMIT).map_err(|e| unreachable_peer(rank, &e.to_string()))?;
    let proved = secure::connect_peer(stream, &spec.credentials, claim, handshake_deadline())
        .map_err(|refusal| vec![refusal.to_diagnostic()])?;
    if proved.claim.rank != rank || proved.claim.session != claim.session {
        let who = format!("claims to be {} of session {:016x}", proved.claim, proved.claim.session);
        return Err(unreachable_peer(rank, &format!("the process that listens at {at} {who}")));
    }
    Ok(proved)
}

fn unreachable_peer(rank: u32, why: &str) -> Diagnostics {
    vec![
        Diagnostic::error(&T0758, format!("rank {rank} cannot be reached from this rank"))
            .with_label(format!("rank {rank}"), why.to_string())
            .with_hint(DIRECT_REACH_HINT),
    ]
}
