//! How ranks that nobody launched find each other: everybody connects to rank 0 and proves itself, rank 0 compares what
//! they hold and tells everybody where everybody is, and then each pair that needs one opens a link.
//!
//! Rank 0 gives up only on what a proved rank says. A stranger at its port is told of and otherwise ignored.

mod card;
mod gather;
mod links;

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use tessera_base::{Code, Diagnostic, Diagnostics};

use super::Topology;
use super::launcher::Interrupt;
use super::secure::{self, Claim, Credentials, HANDSHAKE_LIMIT, Proved, Purpose};
use super::stream::Stream;
use crate::Digest;
use card::{Card, Word, hear, say};

/// Ranks that did not meet.
pub(crate) static T0758: Code = Code {
    id: "T0758",
    title: "the ranks of a run did not all meet",
    page: "With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, a rank joins the others instead of starting them. Rank 0 \
listens at that address, every other rank connects there, and then ranks connect to each other. All of it has a limit \
(`--join-timeout`), and one of these steps did not come to its end: the port was taken, nobody listened, a rank never came, or \
one left again while the others were waited for.\n\nStart every rank, rank 0 too, with the same address, port and world size. \
Firewalls must let ranks reach each other on any port, not only rank 0's. A rank that failed by itself says why on its own \
terminal.",
};

/// Most ranks that can meet.
pub const MAX_WORLD: u32 = 1024;
/// Longest time for links between ranks once all have met.
pub const LINK_LIMIT: Duration = Duration::from_secs(30);
/// A host that does not answer for so long is cut off.
pub const CUT_LIMIT: Duration = Duration::from_secs(5);

/// What one rank knows before it meets the others.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// Where rank 0 listens: a host's name or address, and a port.
    pub master: (String, u16),
    /// Where this rank listens instead of at the address through which it reaches rank 0; of rank 0, instead of at
    /// the master's address.
    pub bind: Option<IpAddr>,
    /// What it can prove.
    pub credentials: Credentials,
    /// Which control links there are.
    pub topology: Topology,
    /// Members of each lane of collectives, in the order in which every rank makes them.
    pub lanes: Vec<Vec<u32>>,
    /// What must be equal on every rank before links are made, by name: the plan's digest, the build.
    pub facts: Vec<(String, String)>,
    /// The session, decided by rank 0; other ranks' is not looked at.
    pub session: u64,
    /// What rank 0 tells all others once they have met; of another rank, not looked at.
    pub tells: Vec<u8>,
    /// How long the others are waited for.
    pub limit: Duration,
}

/// Everything that a rank needs of its peers.
pub struct Peers {
    /// The session that rank 0 decided.
    pub session: u64,
    /// Control links, in the order of [`super::Joined::over`].
    pub control: Vec<Box<dyn Stream>>,
    /// Lanes that this rank is in: their index, and a stream to each other member in order of member.
    pub lanes: Vec<(usize, Vec<Box<dyn Stream>>)>,
    /// Where each rank listens; of rank 0, the master's address as it calls it.
    pub addresses: Vec<String>,
    /// Of who is where and in which lanes: a parity key.
    pub digest: Digest,
    /// What rank 0 told all.
    pub told: Vec<u8>,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Peers(session {:016x}, {:?})", self.session, self.addresses)
    }
}

/// Meets the other ranks. `note` is told of strangers; `stop` ends the wait. On rank 0 `ready` is asked once all have their
/// links, and before any of them goes on.
///
/// # Errors
/// T0756, T0757, T0758, T0740: who, where, and the numbers of both sides.
pub fn meet(
    spec: &Rendezvous,
    stop: &Interrupt,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
) -> Result<Peers, Diagnostics> {
    let found = spec.check();
    if !found.is_empty() {
        return Err(found);
    }
    let watch = Watch { stop, until: Instant::now() + spec.limit };
    if spec.rank == 0 { gather::lead(spec, &watch, note, ready) } else { follow(spec, &watch, note) }
}

impl Rendezvous {
    fn check(&self) -> Diagnostics {
        let mut found = Vec::new();
        if self.world == 0 || self.world > MAX_WORLD {
            found.push(
                Diagnostic::error(&T0758, "the world's size is out of range")
                    .at("world size", self.world.to_string())
                    .at("allowed", format!("1 to {MAX_WORLD}")),
            );
        } else if self.rank >= self.world {
            found.push(
                Diagnostic::error(
                    &T0758,
                    format!("there is no rank {} in a world of {}", self.rank, self.world),
                )
                .at("rank", self.rank.to_string())
                .at("world size", format!("{}: ranks 0 to {}", self.world, self.world - 1)),
            );
        }
        found
    }

    fn claim(&self, purpose: Purpose, to: u32, lane: u32, session: u64) -> Claim {
        Claim { purpose, rank: self.rank, to, world: self.world, lane, session }
    }

    fn card(&self, port: u16) -> Card {
        let address = self.bind.filter(|ip| !ip.is_unspecified()).map(|ip| ip.to_string());
        Card { facts: self.facts.clone(), lanes: self.lanes_digest(), port, address }
    }

    fn lanes_digest(&self) -> String {
        Digest::of_value("lanes of a run", &self.lanes).to_string()
    }

    /// The master as written.
    fn master(&self) -> String {
        format!("{}:{}", self.master.0, self.master.1)
    }
}

/// Until when, and whether somebody asked to stop.
struct Watch<'a> {
    stop: &'a Interrupt,
    until: Instant,
}

impl Watch<'_> {
    /// What ends a wait, if anything does by now.
    fn over(&self, waited_for: &str) -> Option<Diagnostic> {
        if self.stop.count() > 0 {
            return Some(stopped(waited_for));
        }
        let late = Instant::now() >= self.until;
        late.then(|| Diagnostic::error(&T0758, format!("{waited_for} did not come in time")))
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }
}

/// Somebody asked to stop.
fn stopped(waited_for: &str) -> Diagnostic {
    Diagnostic::error(&T0758, format!("stopped on request, waiting for {waited_for}"))
}

/// A handshake's own limit.
fn handshake_until() -> Instant {
    Instant::now() + HANDSHAKE_LIMIT
}

/// Another rank than 0.
fn follow(
    spec: &Rendezvous,
    watch: &Watch<'_>,
    note: &mut dyn FnMut(Diagnostic),
) -> Result<Peers, Diagnostics> {
    let (mut leader, here, there) = reach_master(spec, watch).map_err(|d| vec![d])?;
    let session = leader.claim.session;
    let fail = |what: &str, e: &std::io::Error| {
        if e.kind() == ErrorKind::Interrupted {
            return vec![stopped("the other ranks")];
        }
        vec![
            Diagnostic::error(&T0758, format!("rank 0 left while {what}"))
                .at(format!("rank 0 at {}", spec.master()), e.to_string())
                .hint("rank 0's terminal says why"),
        ]
    };
    let listener = listen(spec.bind.unwrap_or(here.ip()), 0).map_err(|d| vec![d])?;
    let port = listener.local_addr().map_err(|e| fail("an address was asked for", &e))?.port();
    say(&mut *leader.stream, &Word::Card(spec.card(port)), watch.until)
        .map_err(|e| fail("this rank said where it is", &e))?;
    // The others may come late; a rank 0 that is gone is seen at once.
    let table = match hear(&mut *leader.stream, watch.until + LINK_LIMIT, Some(watch.stop)) {
        Ok(Word::Table(table)) => table,
        Ok(Word::Refused(said)) => return Err(said.into_iter().map(|s| s.into_diagnostic()).collect()),
        Ok(_) => return Err(fail("a table was due", &ErrorKind::InvalidData.into())),
        Err(e) => return Err(fail("the others were waited for", &e)),
    };
    if table.addresses.len() != spec.world as usize {
        return Err(fail("a table was due", &ErrorKind::InvalidData.into()));
    }
    let watch = Watch { stop: watch.stop, until: Instant::now() + LINK_LIMIT };
    let made = links::make(spec, session, &table, there, &listener, &watch, note);
    let links = match made {
        Ok(links) => links,
        Err(ds) => {
            let said = Word::Refused(ds.iter().map(card::Said::of).collect());
            let _ = say(&mut *leader.stream, &said, handshake_until());
            return Err(ds);
        }
    };
    say(&mut *leader.stream, &Word::Linked, watch.until).map_err(|e| fail("links were made", &e))?;
    match hear(&mut *leader.stream, watch.until + LINK_LIMIT, Some(watch.stop)) {
        Ok(Word::Go) => Ok(links.into_peers(spec, session, table, vec![(0, leader.stream)])),
        Ok(Word::Refused(said)) => Err(said.into_iter().map(|s| s.into_diagnostic()).collect()),
        Ok(_) => Err(fail("the others made their links", &ErrorKind::InvalidData.into())),
        Err(e) => Err(fail("the others made their links", &e)),
    }
}

/// Connects to rank 0, again and again while nobody listens there.
fn reach_master(
    spec: &Rendezvous,
    watch: &Watch<'_>,
) -> Result<(Proved, SocketAddr, SocketAddr), Diagnostic> {
    let mut pause = Duration::from_millis(50);
    let mut last = "never tried".to_string();
    let mut tries = 0u32;
    loop {
        tries += 1;
        match resolve(spec) {
            Err(e) => last = format!("the name does not resolve: {e}"),
            Ok(addresses) => {
                for at in addresses {
                    let limit = watch.left().clamp(Duration::from_millis(1), Duration::from_secs(3));
                    match TcpStream::connect_timeout(&at, limit) {
                        Ok(stream) => return greet_master(spec, stream, at),
                        Err(e) => last = format!("{at}: {e}"),
                    }
                }
            }
        }
        if let Some(d) = watch.over(&format!("rank 0 at {}", spec.master())) {
            return Err(d
                .at(
                    format!("rank {}", spec.rank),
                    format!("tried {tries} times in {} s", spec.limit.as_secs()),
                )
                .at("last", last)
                .hint("start rank 0 too, with the same MASTER_ADDR and MASTER_PORT"));
        }
        std::thread::sleep(pause.min(watch.left()));
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

fn greet_master(
    spec: &Rendezvous,
    stream: TcpStream,
    at: SocketAddr,
) -> Result<(Proved, SocketAddr, SocketAddr), Diagnostic> {
    let io = |e: std::io::Error| {
        Diagnostic::error(&T0758, format!("the connection to rank 0 at {at} failed"))
            .at("system", e.to_string())
    };
    secure::tune(&stream, CUT_LIMIT).map_err(io)?;
    let here = stream.local_addr().map_err(io)?;
    let claim = spec.claim(Purpose::Join, 0, 0, 0);
    let leader = secure::connect(stream, &spec.credentials, &claim, handshake_until())?;
    // What else differs is rank 0's to tell, which sees all ranks.
    if leader.claim.rank != 0 || leader.claim.purpose != Purpose::Join {
        return Err(Diagnostic::error(&T0758, format!("who listens at {at} is not rank 0"))
            .at(at.to_string(), format!("calls itself {}", leader.claim)));
    }
    Ok((leader, here, at))
}

fn resolve(spec: &Rendezvous) -> std::io::Result<Vec<SocketAddr>> {
    Ok((spec.master.0.as_str(), spec.master.1).to_socket_addrs()?.collect())
}

/// Listens at one address; port 0 for any that is free.
fn listen(ip: IpAddr, port: u16) -> Result<TcpListener, Diagnostic> {
    let at = SocketAddr::new(ip, port);
    let listener = TcpListener::bind(at).and_then(|l| l.set_nonblocking(true).map(|()| l));
    listener.map_err(|e| {
        let d = Diagnostic::error(&T0758, format!("this rank cannot listen at {at}")).at("system", e.to_string());
        match e.kind() {
            ErrorKind::AddrInUse => d.hint("another run listens there: choose another MASTER_PORT, or end it"),
            ErrorKind::AddrNotAvailable => {
                d.hint("the address is not one of this host: rank 0 runs where MASTER_ADDR points, or --bind names an address of this host")
            }
            _ => d,
        }
    })
}

/// `0, 2, 5`.
fn list(ranks: impl IntoIterator<Item = u32>) -> String {
    let mut out = String::new();
    for r in ranks {
        let _ = write!(out, "{}{r}", if out.is_empty() { "" } else { ", " });
    }
    out
}
