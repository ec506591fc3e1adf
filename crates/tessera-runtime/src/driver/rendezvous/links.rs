//! Links between pairs: of two ranks that need one, the higher connects and the lower accepts.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};

use super::card::Table;
use super::{CUT_LIMIT, Peers, Rendezvous, T0758, Watch, handshake_until, list};
use crate::Digest;
use crate::driver::secure::{self, Claim, Proved, Purpose};
use crate::driver::stream::Stream;

/// Handshakes under way at once.
const MAX_PENDING: usize = 64;
const LOOK: Duration = Duration::from_millis(5);

/// What a link is for, and with whom.
type Name = (Purpose, u32, u32);

/// Links made: by purpose, lane and peer.
pub(super) struct Links(BTreeMap<Name, Box<dyn Stream>>);

/// Makes this rank's links. Control links with rank 0 are the connections by which ranks joined.
pub(super) fn make(
    spec: &Rendezvous,
    session: u64,
    table: &Table,
    master: SocketAddr,
    listener: &TcpListener,
    watch: &Watch<'_>,
    note: &mut dyn FnMut(Diagnostic),
) -> Result<Links, Diagnostics> {
    let wanted = wanted(spec);
    let (connects, accepts): (Vec<Name>, Vec<Name>) = wanted.into_iter().partition(|(.., r)| *r < spec.rank);
    let mut links = Links(BTreeMap::new());
    let mine = |purpose, to, lane| spec.claim(purpose, to, lane, session);
    let ours = |c: &Claim| c.to == spec.rank && c.world == spec.world && c.session == session;
    let (tell, came) = channel::<Result<Proved, Diagnostic>>();
    let mut pending = 0;
    let mut queue = connects.into_iter();
    std::thread::scope(|scope| {
        let mut due: Vec<Name> = accepts;
        loop {
            // Connecting and accepting take turns: a peer's handshake waits for neither.
            let next = queue.next();
            let connecting = next.is_some();
            if let Some((purpose, lane, rank)) = next {
                let at = match rank {
                    0 => master,
                    r => {
                        table.addresses[r as usize].parse().map_err(|_| unreachable_peer(r, "no address"))?
                    }
                };
                let proved = open(spec, at, rank, &mine(purpose, rank, lane), watch)?;
                links.0.insert((purpose, lane, rank), proved.stream);
            }
            if pending < MAX_PENDING
                && !due.is_empty()
                && let Ok((stream, _)) = listener.accept()
            {
                pending += 1;
                let (tell, credentials) = (tell.clone(), &spec.credentials);
                // What the peer wants is in its claim; what this side claims is the same whatever it is.
                let claim = mine(Purpose::Control, u32::MAX, 0);
                scope.spawn(move || {
                    let _ = secure::tune(&stream, CUT_LIMIT);
                    let _ = tell.send(secure::accept(stream, credentials, &claim, handshake_until()));
                });
            }
            while let Ok(proved) = came.try_recv() {
                pending -= 1;
                match proved {
                    Ok(p) => {
                        let name = (p.claim.purpose, p.claim.lane, p.claim.rank);
                        match due.iter().position(|d| *d == name).filter(|_| ours(&p.claim)) {
                            Some(i) => {
                                due.swap_remove(i);
                                links.0.insert(name, p.stream);
                            }
                            None => note(Diagnostic::warning(
                                &T0758,
                                format!("{} asked for a link that is not its own; it was closed", p.claim),
                            )),
                        }
                    }
                    Err(d) => note(d),
                }
            }
            if !connecting && due.is_empty() {
                return Ok(());
            }
            let missing = || list(due.iter().map(|(.., r)| *r).collect::<std::collections::BTreeSet<_>>());
            if let Some(d) = watch.over("links from other ranks") {
                return Err(vec![
                    d.at(format!("rank {}", spec.rank), format!("waits for ranks {}", missing()))
                        .hint("ranks must reach each other directly: look at firewalls, or name an address with --bind"),
                ]);
            }
            if !connecting {
                std::thread::sleep(LOOK);
            }
        }
    })?;
    Ok(links)
}

impl Links {
    /// Sorts links, with the connections by which ranks joined, into what drivers take.
    pub(super) fn into_peers(
        mut self,
        spec: &Rendezvous,
        session: u64,
        table: Table,
        joined: Vec<(u32, Box<dyn Stream>)>,
    ) -> Peers {
        let mut direct: BTreeMap<u32, Box<dyn Stream>> = joined.into_iter().collect();
        let mut control = Vec::new();
        for (leads, led) in spec.topology.links(spec.world) {
            let other = match spec.rank {
                r if r == leads => led,
                r if r == led => leads,
                _ => continue,
            };
            let stream =
                if leads == 0 { direct.remove(&other) } else { self.0.remove(&(Purpose::Control, 0, other)) };
            control.extend(stream);
        }
        let mut lanes = Vec::new();
        for (i, members) in spec.lanes.iter().enumerate().filter(|(_, m)| m.contains(&spec.rank)) {
            let others = members.iter().filter(|m| **m != spec.rank);
            let streams = others.filter_map(|m| self.0.remove(&(Purpose::Lane, i as u32, *m))).collect();
            lanes.push((i, streams));
        }
        let mut addresses = table.addresses;
        if let Some(first) = addresses.first_mut() {
            *first = spec.master();
        }
        let others: Vec<&String> = addresses.iter().skip(1).collect();
        let told = table.told;
        let digest = Digest::of_value("peers of a run", &(spec.world, session, others, &spec.lanes, &told));
        Peers { session, control, lanes, addresses, digest, told }
    }
}

/// Links of this rank besides those by which ranks joined.
fn wanted(spec: &Rendezvous) -> Vec<Name> {
    let mut out = Vec::new();
    for (leads, led) in spec.topology.links(spec.world).into_iter().filter(|(leads, _)| *leads != 0) {
        if spec.rank == leads {
            out.push((Purpose::Control, 0, led));
        } else if spec.rank == led {
            out.push((Purpose::Control, 0, leads));
        }
    }
    for (i, members) in spec.lanes.iter().enumerate().filter(|(_, m)| m.contains(&spec.rank)) {
        out.extend(members.iter().filter(|m| **m != spec.rank).map(|m| (Purpose::Lane, i as u32, *m)));
    }
    out
}

fn open(
    spec: &Rendezvous,
    at: SocketAddr,
    rank: u32,
    claim: &Claim,
    watch: &Watch<'_>,
) -> Result<Proved, Diagnostics> {
    let limit = watch.left().clamp(Duration::from_millis(1), Duration::from_secs(10));
    let stream =
        TcpStream::connect_timeout(&at, limit).map_err(|e| unreachable_peer(rank, &format!("{at}: {e}")))?;
    secure::tune(&stream, CUT_LIMIT).map_err(|e| unreachable_peer(rank, &e.to_string()))?;
    let proved = secure::connect(stream, &spec.credentials, claim, handshake_until()).map_err(|d| vec![d])?;
    if proved.claim.rank != rank || proved.claim.session != claim.session {
        let who = format!("calls itself {} of session {:016x}", proved.claim, proved.claim.session);
        return Err(unreachable_peer(rank, &format!("who listens at {at} {who}")));
    }
    Ok(proved)
}

fn unreachable_peer(rank: u32, why: &str) -> Diagnostics {
    vec![
        Diagnostic::error(&T0758, format!("rank {rank} cannot be reached from this rank"))
            .at(format!("rank {rank}"), why.to_string())
            .hint("ranks must reach each other directly: look at firewalls, or name an address with --bind"),
    ]
}
