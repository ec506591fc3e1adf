//! Rank 0's side of the rendezvous: it collects every rank's information, compares it, and sends
//! out the address table.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::connect::resolve_master;
use super::handshakes::{HandshakeOutcome, HandshakePool, RefusalTally};
use super::messages::{
    AddressTable, RankInfo, RendezvousMessage, into_diagnostics, receive_message, send_message, send_refusal,
};
use super::{
    LINK_LIMIT, RendezvousPeers, RendezvousSpec, WaitLimit, format_ranks, links, listen_at,
    stopped_diagnostic,
};
use crate::codes::{T0740, T0757, T0758};
use crate::driver::byte_stream::ByteStream;
use crate::driver::launcher::StopHandle;
use crate::driver::secure::{AuthenticatedPeer, Claim, ConnectionPurpose};

/// Interval at which the listener is polled.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// A rank other than 0 that has authenticated itself and sent its information.
struct JoinedPeer {
    stream: Box<dyn ByteStream>,
    info: RankInfo,
    address: SocketAddr,
}

pub(super) fn gather_ranks(
    spec: &RendezvousSpec,
    wait: &WaitLimit<'_>,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
) -> Result<RendezvousPeers, Diagnostics> {
    let listener = match spec.bind {
        Some(ip) => listen_at(ip, spec.master.1).map_err(|d| vec![d])?,
        None => listen_at_master(spec).map_err(|d| vec![d])?,
    };
    let mut joined_peers: BTreeMap<u32, JoinedPeer> = BTreeMap::new();
    let outcome = gather_and_link(spec, wait, note, ready, &listener, &mut joined_peers);
    if let Err(ds) = &outcome {
        joined_peers.values_mut().for_each(|guest| send_refusal(&mut *guest.stream, ds));
    }
    let (links, table) = outcome?;
    let joined = joined_peers.into_iter().map(|(rank, guest)| (rank, guest.stream)).collect();
    Ok(links.into_peers(spec, spec.session, table, joined))
}

fn listen_at_master(spec: &RendezvousSpec) -> Result<TcpListener, Diagnostic> {
    let addresses = resolve_master(spec).map_err(|e| {
        Diagnostic::error(&T0758, format!("the name `{}` does not resolve", spec.master.0))
            .with_label("system", e.to_string())
    })?;
    let mut last = None;
    for at in addresses {
        match listen_at(at.ip(), at.port()) {
            Ok(listener) => return Ok(listener),
            Err(d) => last = Some(d),
        }
    }
    Err(last.unwrap_or_else(|| Diagnostic::error(&T0758, "the master's name resolves to no address")))
}

fn gather_and_link(
    spec: &RendezvousSpec,
    wait: &WaitLimit<'_>,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
    listener: &TcpListener,
    joined: &mut BTreeMap<u32, JoinedPeer>,
) -> Result<(links::OpenLinks, AddressTable), Diagnostics> {
    let mut tally = RefusalTally::default();
    let gathered = gather_all(spec, wait, note, listener, joined, &mut tally);
    tally.summarize().into_iter().for_each(&mut *note);
    gathered?;
    let found = compare_ranks(spec, joined);
    if !found.is_empty() {
        return Err(found);
    }
    let mut addresses = vec![String::new()];
    for guest in joined.values() {
        let ip = guest.info.address.as_deref().and_then(|a| a.parse().ok()).unwrap_or(guest.address.ip());
        addresses.push(SocketAddr::new(ip, guest.info.port).to_string());
    }
    let table = AddressTable { addresses, leader_payload: spec.leader_payload.clone() };
    let wait = WaitLimit { stop: wait.stop, deadline: Instant::now() + LINK_LIMIT };
    for (rank, guest) in joined.iter_mut() {
        send_message(&mut *guest.stream, &RendezvousMessage::Table(table.clone()), wait.deadline)
            .map_err(|e| peer_left_diagnostic(*rank, &e))?;
    }
    let master = SocketAddr::from(([0, 0, 0, 0], 0));
    let open_links = links::open_links(spec, spec.session, &table, master, listener, &wait, note)?;
    for (rank, guest) in joined.iter_mut() {
        match receive_message(&mut *guest.stream, wait.deadline, Some(wait.stop)) {
            Ok(RendezvousMessage::Linked) => {}
            Ok(RendezvousMessage::Refused(refusal)) => return Err(into_diagnostics(refusal)),
            Ok(_) => return Err(peer_left_diagnostic(*rank, &ErrorKind::InvalidData.into())),
            Err(e) => return Err(peer_left_diagnostic(*rank, &e)),
        }
    }
    ready()?;
    for (rank, guest) in joined.iter_mut() {
        send_message(&mut *guest.stream, &RendezvousMessage::Start, wait.deadline)
            .map_err(|e| peer_left_diagnostic(*rank, &e))?;
    }
    Ok((open_links, table))
}

/// Waits until every rank has joined.
fn gather_all(
    spec: &RendezvousSpec,
    wait: &WaitLimit<'_>,
    note: &mut dyn FnMut(Diagnostic),
    listener: &TcpListener,
    joined: &mut BTreeMap<u32, JoinedPeer>,
    tally: &mut RefusalTally,
) -> Result<(), Diagnostics> {
    let own_claim = spec.make_claim(ConnectionPurpose::Join, 0, 0, spec.session);
    let mut handshakes = HandshakePool::new(listener, spec.credentials.clone(), own_claim, receive_info);
    while joined.len() + 1 < spec.world_size as usize {
        match handshakes.poll_next() {
            Some(HandshakeOutcome::Accepted(arrival)) => admit_rank(spec, joined, arrival)?,
            Some(HandshakeOutcome::Refused(refusal)) => {
                tally.count_refusal(refusal).into_iter().for_each(&mut *note);
            }
            Some(HandshakeOutcome::Failed(d)) => note(d),
            None => std::thread::sleep(ACCEPT_INTERVAL),
        }
        check_connected(joined)?;
        let missing = || format_ranks((1..spec.world_size).filter(|r| !joined.contains_key(r)));
        if let Some(d) = wait.check_expired("missing ranks") {
            let d = d
                .with_label("missing", format!("ranks {}", missing()))
                .with_label(
                    "joined",
                    format!("ranks {}", format_ranks(std::iter::once(0).chain(joined.keys().copied()))),
                )
                .with_label(
                    format!("listening at {}", spec.master_address()),
                    format!("for {} s", spec.join_limit.as_secs()),
                );
            return Err(vec![tally.describe_kinds().into_iter().fold(d, |d, r| d.with_label("refused", r))]);
        }
    }
    Ok(())
}

fn peer_left_diagnostic(rank: u32, e: &std::io::Error) -> Diagnostics {
    if e.kind() == ErrorKind::Interrupted {
        return vec![stopped_diagnostic(&format!("rank {rank}"))];
    }
    vec![
        Diagnostic::error(&T0758, format!("rank {rank} left before all ranks had joined"))
            .with_label(format!("rank {rank}"), e.to_string())
            .with_hint(format!("the output of rank {rank} shows the reason")),
    ]
}

/// Admits an authenticated rank, or fails the rendezvous if its claim contradicts the run.
fn admit_rank(
    spec: &RendezvousSpec,
    joined: &mut BTreeMap<u32, JoinedPeer>,
    Arrival { peer: proved, from, info: card }: Arrival,
) -> Result<(), Diagnostics> {
    let Claim { rank, world_size: world, .. } = proved.claim;
    let refuse = |mut stream: Box<dyn ByteStream>, d: Diagnostic| {
        send_refusal(&mut *stream, std::slice::from_ref(&d));
        Err(vec![d])
    };
    if world != spec.world_size {
        let d = Diagnostic::error(&T0757, format!("rank {rank} at {from} has another world size"))
            .with_label("rank 0", format!("WORLD_SIZE {}", spec.world_size))
            .with_label(format!("rank {rank}"), format!("WORLD_SIZE {world}"))
            .with_hint("start every rank with the same WORLD_SIZE");
        return refuse(proved.stream, d);
    }
    let taken = if rank == 0 {
        Some("this process".to_string())
    } else {
        joined.get(&rank).map(|g| g.address.to_string())
    };
    if rank >= spec.world_size || taken.is_some() {
        let d = match taken {
            Some(other) => {
                Diagnostic::error(&T0757, format!("two processes claim to be rank {rank} of {world}"))
                    .with_label("first", other)
                    .with_label("second", from.to_string())
            }
            None => {
                Diagnostic::error(&T0757, format!("a process at {from} claims to be rank {rank} of {world}"))
                    .with_label("allowed", format!("ranks 0 to {}", spec.world_size - 1))
            }
        };
        return refuse(proved.stream, d.with_hint("give every process its own RANK, counted from 0"));
    }
    joined.insert(rank, JoinedPeer { stream: proved.stream, info: card, address: from });
    Ok(())
}

/// Checks that every joined rank is still connected. A waiting rank sends nothing, so any input or
/// the end of the stream means that it has left.
fn check_connected(joined: &mut BTreeMap<u32, JoinedPeer>) -> Result<(), Diagnostics> {
    for (rank, guest) in joined {
        match guest.stream.read(&mut [0]) {
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(peer_left_diagnostic(*rank, &e)),
            Ok(_) => return Err(peer_left_diagnostic(*rank, &ErrorKind::UnexpectedEof.into())),
        }
    }
    Ok(())
}

/// Compares the ranks' values and returns one diagnostic per differing key, with its values and the
/// ranks that hold them.
fn compare_ranks(spec: &RendezvousSpec, joined: &BTreeMap<u32, JoinedPeer>) -> Diagnostics {
    let own = spec.make_info(0);
    let cards: Vec<(u32, &RankInfo)> =
        std::iter::once((0, &own)).chain(joined.iter().map(|(r, g)| (*r, &g.info))).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (_, card) in &cards {
        for (key, _) in &card.parity_values {
            if !keys.contains(&key.as_str()) {
                keys.push(key);
            }
        }
    }
    let fact = |card: &RankInfo, key: &str| {
        card.parity_values.iter().find(|(k, _)| k == key).map_or("not set".to_string(), |(_, v)| v.clone())
    };
    let mut found = Vec::new();
    let mut compare_key = |code, key: &str, value: &dyn Fn(&RankInfo) -> String| {
        let mut ranks_by_value: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (rank, card) in &cards {
            ranks_by_value.entry(value(card)).or_default().push(*rank);
        }
        if ranks_by_value.len() > 1 {
            let d = Diagnostic::error(code, format!("ranks hold different values of `{key}`"));
            let d = ranks_by_value.iter().fold(d, |d, (value, ranks)| {
                let who = if ranks.len() == 1 { "rank" } else { "ranks" };
                d.with_label(format!("{who} {}", format_ranks(ranks.iter().copied())), value.clone())
            });
            found.push(d.with_hint("start every rank with the same plan, options and build"));
        }
    };
    for key in keys {
        compare_key(&T0740, key, &|card| fact(card, key));
    }
    compare_key(&T0757, "groups", &|card| card.communicators_digest.clone());
    found
}

/// An authenticated rank that has sent its information.
struct Arrival {
    peer: AuthenticatedPeer,
    from: SocketAddr,
    info: RankInfo,
}

/// Receives the first message of an authenticated rank.
fn receive_info(
    mut peer: AuthenticatedPeer,
    from: SocketAddr,
    deadline: Instant,
) -> Result<Arrival, Diagnostic> {
    let broken = |e: std::io::Error| {
        Diagnostic::error(&T0758, format!("a process at {from} did not send its address"))
            .with_label(from.to_string(), e.to_string())
    };
    if peer.claim.purpose != ConnectionPurpose::Join {
        return Err(broken(ErrorKind::InvalidData.into()));
    }
    match receive_message(&mut *peer.stream, deadline, None::<&StopHandle>) {
        Ok(RendezvousMessage::Info(info)) => Ok(Arrival { peer, from, info }),
        Ok(_) => Err(broken(ErrorKind::InvalidData.into())),
        Err(e) => Err(broken(e)),
    }
}
