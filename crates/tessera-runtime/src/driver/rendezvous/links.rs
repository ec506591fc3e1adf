//! Opens the links between pairs of ranks: the higher rank connects and the lower rank accepts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};

use super::connect::HandshakeRetries;
use super::handshakes::{HandshakeOutcome, HandshakePool, RefusalTally};
use super::messages::AddressTable;
use super::{RendezvousPeers, RendezvousSpec, UNREACHABLE_LIMIT, WaitLimit, format_ranks};
use crate::Digest;
use crate::codes::T0758;
use crate::driver::byte_stream::ByteStream;
use crate::driver::secure::{self, AuthenticatedPeer, Claim, ConnectionPurpose};

/// Handshakes whose outcome is taken before the wait is checked again.
const OUTCOMES_PER_TURN: usize = 64;
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
    // The peer's claim names the link that it wants; this side's claim is the same for every link.
    let own_claim = spec.make_claim(ConnectionPurpose::Control, u32::MAX, 0, session);
    let handshakes = HandshakePool::new(listener, spec.credentials.clone(), own_claim, |peer, _, _| Ok(peer));
    let tally = RefusalTally::default();
    let open = OpenLinks(BTreeMap::new());
    let mut opener = LinkOpener { spec, session, wait, to_accept, handshakes, tally, open };
    let opened = opener.open_all(connects, table, master, note);
    opener.tally.summarize().into_iter().for_each(note);
    opened.map(|()| opener.open)
}

/// The links of this rank while they are opened.
struct LinkOpener<'a> {
    spec: &'a RendezvousSpec,
    session: u64,
    wait: &'a WaitLimit<'a>,
    /// Links to higher ranks that these have not opened yet.
    to_accept: Vec<LinkKey>,
    handshakes: HandshakePool<'a, AuthenticatedPeer>,
    tally: RefusalTally,
    open: OpenLinks,
}

impl LinkOpener<'_> {
    /// Opens all links. The loop alternates between connecting and accepting, so that neither
    /// delays a peer's handshake.
    fn open_all(
        &mut self,
        connects: Vec<LinkKey>,
        table: &AddressTable,
        master: SocketAddr,
        note: &mut dyn FnMut(Diagnostic),
    ) -> Result<(), Diagnostics> {
        let mut queue = connects.into_iter();
        loop {
            let next = queue.next();
            if let Some(link) = next {
                self.connect(link, table, master)?;
            }
            self.accept_links(note);
            if next.is_none() && self.to_accept.is_empty() {
                return Ok(());
            }
            self.check_wait()?;
            if next.is_none() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

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

    /// Takes the connections whose handshake has ended. A failed one, or one for a link that the
    /// peer may not have, is closed and noted.
    fn accept_links(&mut self, note: &mut dyn FnMut(Diagnostic)) {
        for _ in 0..OUTCOMES_PER_TURN {
            if self.to_accept.is_empty() {
                return;
            }
            match self.handshakes.poll_next() {
                None => return,
                Some(HandshakeOutcome::Accepted(peer)) => self.keep_link(peer, note),
                Some(HandshakeOutcome::Refused(refusal)) => {
                    self.tally.count_refusal(refusal).into_iter().for_each(&mut *note);
                }
                Some(HandshakeOutcome::Failed(d)) => note(d),
            }
        }
    }

    fn keep_link(&mut self, peer: AuthenticatedPeer, note: &mut dyn FnMut(Diagnostic)) {
        let link = (peer.claim.purpose, peer.claim.communicator, peer.claim.rank);
        let wanted = self.to_accept.iter().position(|l| *l == link);
        match wanted.filter(|_| self.is_for_this_rank(&peer.claim)) {
            Some(i) => {
                self.to_accept.swap_remove(i);
                self.open.0.insert(link, peer.stream);
            }
            None => note(Diagnostic::warning(
                &T0758,
                format!("{} requested a link that it may not have; the link was closed", peer.claim),
            )),
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
    let mut retries = HandshakeRetries::default();
    let proved = loop {
        let limit = wait.time_left().clamp(Duration::from_millis(1), Duration::from_secs(10));
        let stream = TcpStream::connect_timeout(&at, limit)
            .map_err(|e| unreachable_peer(rank, &format!("{at}: {e}")))?;
        secure::tune_socket(&stream, UNREACHABLE_LIMIT)
            .map_err(|e| unreachable_peer(rank, &e.to_string()))?;
        let refusal = match secure::connect_peer(stream, &spec.credentials, claim, wait.handshake_deadline())
        {
            Ok(proved) => break proved,
            Err(refusal) => refusal,
        };
        let pause =
            retries.next_pause(&refusal).filter(|_| !wait.time_left().is_zero() && !wait.is_stopped());
        let pause = pause.ok_or_else(|| vec![refusal.to_diagnostic()])?;
        std::thread::sleep(pause.min(wait.time_left()));
    };
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
