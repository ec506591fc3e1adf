//! Opens the links between pairs of ranks: the higher rank connects and the lower rank accepts.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};

use super::messages::AddressTable;
use super::{
    RendezvousPeers, RendezvousSpec, T0758, UNREACHABLE_LIMIT, WaitLimit, format_ranks, handshake_deadline,
};
use crate::Digest;
use crate::driver::byte_stream::ByteStream;
use crate::driver::secure::{self, AuthenticatedPeer, Claim, ConnectionPurpose};

/// Maximum handshakes in progress; further connections wait in the listener's backlog.
const MAX_HANDSHAKES: usize = 64;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Purpose, communicator and peer of a link.
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
    let wanted = required_links(spec);
    let (connects, accepts): (Vec<LinkKey>, Vec<LinkKey>) =
        wanted.into_iter().partition(|(.., r)| *r < spec.rank);
    let mut links = OpenLinks(BTreeMap::new());
    let mine = |purpose, to, lane| spec.make_claim(purpose, to, lane, session);
    let is_for_this_rank =
        |c: &Claim| c.expected_peer == spec.rank && c.world_size == spec.world_size && c.session == session;
    let (sender, handshakes) = channel::<Result<AuthenticatedPeer, Diagnostic>>();
    let mut pending = 0;
    let mut queue = connects.into_iter();
    std::thread::scope(|scope| {
        let mut to_accept: Vec<LinkKey> = accepts;
        loop {
            // The loop alternates between connecting and accepting, so that neither delays a peer's
            // handshake.
            let next = queue.next();
            let connecting = next.is_some();
            if let Some((purpose, lane, rank)) = next {
                let at = match rank {
                    0 => master,
                    r => {
                        table.addresses[r as usize].parse().map_err(|_| unreachable_peer(r, "no address"))?
                    }
                };
                let proved = open_link(spec, at, rank, &mine(purpose, rank, lane), wait)?;
                links.0.insert((purpose, lane, rank), proved.stream);
            }
            if pending < MAX_HANDSHAKES
                && !to_accept.is_empty()
                && let Ok((stream, _)) = listener.accept()
            {
                pending += 1;
                let (sender, credentials) = (sender.clone(), &spec.credentials);
                // The peer's claim names the link that it wants; this side's claim is the same for
                // every link.
                let claim = mine(ConnectionPurpose::Control, u32::MAX, 0);
                scope.spawn(move || {
                    let _ = secure::tune_socket(&stream, UNREACHABLE_LIMIT);
                    let _ =
                        sender.send(secure::accept_peer(stream, credentials, &claim, handshake_deadline()));
                });
            }
            while let Ok(proved) = handshakes.try_recv() {
                pending -= 1;
                match proved {
                    Ok(p) => {
                        let name = (p.claim.purpose, p.claim.communicator, p.claim.rank);
                        match to_accept.iter().position(|d| *d == name).filter(|_| is_for_this_rank(&p.claim))
                        {
                            Some(i) => {
                                to_accept.swap_remove(i);
                                links.0.insert(name, p.stream);
                            }
                            None => note(Diagnostic::warning(
                                &T0758,
                                format!(
                                    "{} requested a link that it may not have; the link was closed",
                                    p.claim
                                ),
                            )),
                        }
                    }
                    Err(d) => note(d),
                }
            }
            if !connecting && to_accept.is_empty() {
                return Ok(());
            }
            let missing = || {
                format_ranks(to_accept.iter().map(|(.., r)| *r).collect::<std::collections::BTreeSet<_>>())
            };
            if let Some(d) = wait.check_expired("links from other ranks") {
                return Err(vec![
                    d.with_label(format!("rank {}", spec.rank), format!("waits for ranks {}", missing()))
                        .with_hint("ranks must reach each other directly: check the firewalls, or give an address with --bind"),
                ]);
            }
            if !connecting {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    })?;
    Ok(links)
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
    let proved =
        secure::connect_peer(stream, &spec.credentials, claim, handshake_deadline()).map_err(|d| vec![d])?;
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
            .with_hint(
                "ranks must reach each other directly: check the firewalls, or give an address with --bind",
            ),
    ]
}
