//! Rank 0's side: it takes every rank's card, compares them, and hands out the table.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::card::{Card, Said, Table, Word, hear, say};
use super::{
    CUT_LIMIT, LINK_LIMIT, Peers, Rendezvous, T0758, Watch, handshake_until, links, list, listen, resolve,
    stopped,
};
use crate::driver::launcher::Interrupt;
use crate::driver::secure::{self, Claim, Credentials, Proved, Purpose};
use crate::driver::stream::Stream;
use crate::parity::T0740;
use crate::tripwire::T0757;

/// Handshakes under way at once; more connections wait.
const MAX_PENDING: usize = 64;
/// How often the door is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// A rank that has come.
struct Guest {
    stream: Box<dyn Stream>,
    card: Card,
    from: SocketAddr,
}

pub(super) fn lead(
    spec: &Rendezvous,
    watch: &Watch<'_>,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
) -> Result<Peers, Diagnostics> {
    let listener = match spec.bind {
        Some(ip) => listen(ip, spec.master.1).map_err(|d| vec![d])?,
        None => listen_at_master(spec).map_err(|d| vec![d])?,
    };
    let mut guests: BTreeMap<u32, Guest> = BTreeMap::new();
    let outcome = host(spec, watch, note, ready, &listener, &mut guests);
    if let Err(ds) = &outcome {
        let said: Vec<Said> = ds.iter().map(Said::of).collect();
        for guest in guests.values_mut() {
            let _ = say(&mut *guest.stream, &Word::Refused(said.clone()), handshake_until());
        }
    }
    let (links, table) = outcome?;
    let joined = guests.into_iter().map(|(rank, guest)| (rank, guest.stream)).collect();
    Ok(links.into_peers(spec, spec.session, table, joined))
}

fn listen_at_master(spec: &Rendezvous) -> Result<TcpListener, Diagnostic> {
    let addresses = resolve(spec).map_err(|e| {
        Diagnostic::error(&T0758, format!("the name `{}` does not resolve", spec.master.0))
            .at("system", e.to_string())
    })?;
    let mut last = None;
    for at in addresses {
        match listen(at.ip(), at.port()) {
            Ok(listener) => return Ok(listener),
            Err(d) => last = Some(d),
        }
    }
    Err(last.unwrap_or_else(|| Diagnostic::error(&T0758, "the master's name has no address")))
}

fn host(
    spec: &Rendezvous,
    watch: &Watch<'_>,
    note: &mut dyn FnMut(Diagnostic),
    ready: &mut dyn FnMut() -> Result<(), Diagnostics>,
    listener: &TcpListener,
    guests: &mut BTreeMap<u32, Guest>,
) -> Result<(links::Links, Table), Diagnostics> {
    let mut refused = Vec::new();
    {
        let mine = spec.claim(Purpose::Join, 0, 0, spec.session);
        let mut door = Door::new(listener, spec.credentials.clone(), mine);
        while guests.len() + 1 < spec.world as usize {
            match door.next() {
                Some(Ok((from, proved))) => welcome(spec, guests, from, proved)?,
                Some(Err(d)) => {
                    refused.push(d.message.clone());
                    refused.truncate(5);
                    note(d);
                }
                None => std::thread::sleep(LOOK),
            }
            still_here(guests)?;
            let missing = || list((1..spec.world).filter(|r| !guests.contains_key(r)));
            if let Some(d) = watch.over("ranks that are missing") {
                let d = d
                    .at("missing", format!("ranks {}", missing()))
                    .at("here", format!("ranks {}", list(std::iter::once(0).chain(guests.keys().copied()))))
                    .at(format!("listening at {}", spec.master()), format!("for {} s", spec.limit.as_secs()));
                return Err(vec![refused.iter().fold(d, |d, r| d.at("refused", r.clone()))]);
            }
        }
    }
    let found = compare(spec, guests);
    if !found.is_empty() {
        return Err(found);
    }
    let mut addresses = vec![String::new()];
    for guest in guests.values() {
        let ip = guest.card.address.as_deref().and_then(|a| a.parse().ok()).unwrap_or(guest.from.ip());
        addresses.push(SocketAddr::new(ip, guest.card.port).to_string());
    }
    let table = Table { addresses, told: spec.tells.clone() };
    let watch = Watch { stop: watch.stop, until: Instant::now() + LINK_LIMIT };
    for (rank, guest) in guests.iter_mut() {
        say(&mut *guest.stream, &Word::Table(table.clone()), watch.until).map_err(|e| left(*rank, &e))?;
    }
    let master = SocketAddr::from(([0, 0, 0, 0], 0));
    let made = links::make(spec, spec.session, &table, master, listener, &watch, note)?;
    for (rank, guest) in guests.iter_mut() {
        match hear(&mut *guest.stream, watch.until, Some(watch.stop)) {
            Ok(Word::Linked) => {}
            Ok(Word::Refused(said)) => return Err(said.into_iter().map(Said::into_diagnostic).collect()),
            Ok(_) => return Err(left(*rank, &ErrorKind::InvalidData.into())),
            Err(e) => return Err(left(*rank, &e)),
        }
    }
    ready()?;
    for (rank, guest) in guests.iter_mut() {
        say(&mut *guest.stream, &Word::Go, watch.until).map_err(|e| left(*rank, &e))?;
    }
    Ok((made, table))
}

fn left(rank: u32, e: &std::io::Error) -> Diagnostics {
    if e.kind() == ErrorKind::Interrupted {
        return vec![stopped(&format!("rank {rank}"))];
    }
    vec![
        Diagnostic::error(&T0758, format!("rank {rank} left before all ranks had met"))
            .at(format!("rank {rank}"), e.to_string())
            .hint(format!("rank {rank}'s terminal says why")),
    ]
}

/// A proved rank is taken in, or shows that the run cannot be.
fn welcome(
    spec: &Rendezvous,
    guests: &mut BTreeMap<u32, Guest>,
    from: SocketAddr,
    (proved, card): (Proved, Card),
) -> Result<(), Diagnostics> {
    let Claim { rank, world, .. } = proved.claim;
    let refuse = |mut stream: Box<dyn Stream>, d: Diagnostic| {
        let _ = say(&mut *stream, &Word::Refused(vec![Said::of(&d)]), handshake_until());
        Err(vec![d])
    };
    if world != spec.world {
        let d = Diagnostic::error(&T0757, format!("rank {rank} at {from} counts another number of ranks"))
            .at("rank 0", format!("WORLD_SIZE {}", spec.world))
            .at(format!("rank {rank}"), format!("WORLD_SIZE {world}"))
            .hint("start every rank with the same WORLD_SIZE");
        return refuse(proved.stream, d);
    }
    let taken = if rank == 0 {
        Some("this process".to_string())
    } else {
        guests.get(&rank).map(|g| g.from.to_string())
    };
    if rank >= spec.world || taken.is_some() {
        let d = match taken {
            Some(other) => {
                Diagnostic::error(&T0757, format!("two processes call themselves rank {rank} of {world}"))
                    .at("first", other)
                    .at("second", from.to_string())
            }
            None => {
                Diagnostic::error(&T0757, format!("a process at {from} calls itself rank {rank} of {world}"))
                    .at("allowed", format!("ranks 0 to {}", spec.world - 1))
            }
        };
        return refuse(proved.stream, d.hint("give every process a RANK of its own, counted from 0"));
    }
    guests.insert(rank, Guest { stream: proved.stream, card, from });
    Ok(())
}

/// A rank that waits says nothing; if it does, or its stream ends, it is gone.
fn still_here(guests: &mut BTreeMap<u32, Guest>) -> Result<(), Diagnostics> {
    for (rank, guest) in guests {
        match guest.stream.read(&mut [0]) {
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return Err(left(*rank, &e)),
            Ok(_) => return Err(left(*rank, &ErrorKind::UnexpectedEof.into())),
        }
    }
    Ok(())
}

/// What ranks hold differently, each as a key with its values and who holds them.
fn compare(spec: &Rendezvous, guests: &BTreeMap<u32, Guest>) -> Diagnostics {
    let own = spec.card(0);
    let cards: Vec<(u32, &Card)> =
        std::iter::once((0, &own)).chain(guests.iter().map(|(r, g)| (*r, &g.card))).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (_, card) in &cards {
        for (key, _) in &card.facts {
            if !keys.contains(&key.as_str()) {
                keys.push(key);
            }
        }
    }
    let fact = |card: &Card, key: &str| {
        card.facts.iter().find(|(k, _)| k == key).map_or("not set".to_string(), |(_, v)| v.clone())
    };
    let mut found = Vec::new();
    let mut judge = |code, key: &str, value: &dyn Fn(&Card) -> String| {
        let mut by: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for (rank, card) in &cards {
            by.entry(value(card)).or_default().push(*rank);
        }
        if by.len() > 1 {
            let d = Diagnostic::error(code, format!("ranks hold different values of `{key}`"));
            let d = by.iter().fold(d, |d, (value, ranks)| {
                let who = if ranks.len() == 1 { "rank" } else { "ranks" };
                d.at(format!("{who} {}", list(ranks.iter().copied())), value.clone())
            });
            found.push(d.hint("start every rank with the same plan, options and build"));
        }
    };
    for key in keys {
        judge(&T0740, key, &|card| fact(card, key));
    }
    judge(&T0757, "groups", &|card| card.lanes.clone());
    found
}

/// Takes connections, each through its handshake on a thread of its own, so that a slow stranger keeps nobody out.
struct Door<'a> {
    listener: &'a TcpListener,
    credentials: Credentials,
    mine: Claim,
    pending: Arc<AtomicUsize>,
    tell: std::sync::mpsc::SyncSender<Came>,
    came: Receiver<Came>,
}

type Came = Result<(SocketAddr, (Proved, Card)), Diagnostic>;

impl Door<'_> {
    fn new(listener: &TcpListener, credentials: Credentials, mine: Claim) -> Door<'_> {
        let (tell, came) = sync_channel(MAX_PENDING);
        Door { listener, credentials, mine, pending: Arc::default(), tell, came }
    }

    fn next(&mut self) -> Option<Came> {
        if self.pending.load(Ordering::Relaxed) < MAX_PENDING
            && let Ok((stream, from)) = self.listener.accept()
        {
            let (credentials, mine, tell) = (self.credentials.clone(), self.mine, self.tell.clone());
            let pending = Arc::clone(&self.pending);
            pending.fetch_add(1, Ordering::Relaxed);
            let spawned = std::thread::Builder::new().name("handshake".into()).spawn(move || {
                let came = shake(stream, &credentials, &mine).map(|guest| (from, guest));
                pending.fetch_sub(1, Ordering::Relaxed);
                let _ = tell.send(came);
            });
            if spawned.is_err() {
                self.pending.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.came.try_recv().ok()
    }
}

fn shake(
    stream: std::net::TcpStream,
    credentials: &Credentials,
    mine: &Claim,
) -> Result<(Proved, Card), Diagnostic> {
    let from = stream.peer_addr().map_or("an unknown address".into(), |a| a.to_string());
    let broken = |e: std::io::Error| {
        Diagnostic::error(&T0758, format!("a process at {from} did not say where it listens"))
            .at(from.clone(), e.to_string())
    };
    secure::tune(&stream, CUT_LIMIT).map_err(broken)?;
    let until = handshake_until();
    let mut proved = secure::accept(stream, credentials, mine, until)?;
    if proved.claim.purpose != Purpose::Join {
        return Err(broken(ErrorKind::InvalidData.into()));
    }
    match hear(&mut *proved.stream, until, None::<&Interrupt>) {
        Ok(Word::Card(card)) => Ok((proved, card)),
        Ok(_) => Err(broken(ErrorKind::InvalidData.into())),
        Err(e) => Err(broken(e)),
    }
}
