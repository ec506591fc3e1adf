//! The mesh leader: the rank through which a leader outside the mesh speaks to its members.
//!
//! It passes frames on as they are, down from the leader and up from the ranks, and decides nothing. What it adds
//! is a preflight: it checks each envelope and context against a state of its own before a member sees it, and
//! lets no commit through before it has passed on every rank's ready. The rank's own worker beside it is one of
//! the ranks to it, the first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_base::{Code, Diagnostics};

use crate::cache::{Cache, CacheSpec};
use crate::census::Census;
use crate::check::{Local, check_context, check_envelope};
use crate::leader::T0743;
use crate::limits::{AwakeClock, ms};
use crate::tripwire::{Place, Tripwires};
use crate::wire::{Abort, CallAction, CallMeta, Context, Envelope, Fault, Heartbeat, Message, Refused};
use crate::worker::{T0707, T0742, T0749, refusal, wants_context};
use crate::{Digest, Failure, FailureClass, Limits};

/// A message that no member may see.
pub(crate) static T0755: Code = Code {
    id: "T0755",
    title: "the mesh leader stopped a message before a member saw it",
    page: "A leader outside the mesh speaks to one rank, which passes its messages on to the members. That rank checks \
every envelope and context against its own state first, and lets a commit through only after every member's ready has \
passed it. One of these did not hold. No member saw the message, so none of them was made to wait for a collective.\n\n\
The text holds the finding and its own code. The leader checks the same before it sends: a finding here is another build \
on one side, or a message that changed between the two.",
};

/// What a mesh leader must know before its first message.
#[derive(Debug, Clone)]
pub struct MeshLeaderConfig {
    /// This rank, which computes too.
    pub rank: u32,
    /// The other ranks of the mesh, in ascending order; none in a mesh of one.
    pub members: Vec<u32>,
    /// Digest of the sealed plan it holds.
    pub plan: Digest,
    /// The seal's programs.
    pub census: Arc<Census>,
    /// Sizes of the caches, from the seal.
    pub cache: CacheSpec,
    /// Bounds.
    pub limits: Limits,
    /// What is not checked.
    pub tripwires: Tripwires,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// A frame came from the leader.
    Down(Message),
    /// A frame came from a member, or from this rank's own worker.
    Up {
        /// The rank that made it; the driver has compared it with the link's.
        origin: u32,
        /// What it says.
        message: Message,
    },
    /// A member's socket closed or broke.
    Gone {
        /// The member.
        rank: u32,
        /// How, in words.
        how: String,
    },
    /// The leader's socket closed or broke.
    LeaderGone(String),
    /// The launcher's socket closed.
    LauncherGone,
    /// Something beside the relay failed: a frame that does not decode.
    Failed(Failure),
}

/// What to do.
#[derive(Debug)]
pub enum Action {
    /// Send this event's frame, byte by byte as it came, to every member, and hand its message to the own worker.
    ForwardDown,
    /// Send this event's frame, byte by byte as it came, to the leader.
    ForwardUp,
    /// Send a message of this rank to every member, and hand it to the own worker.
    Down(Message),
    /// Send a message of this rank to the leader.
    Up(Message),
    /// End the process; nothing follows.
    Exit(Option<Failure>),
}

/// The machine.
#[derive(Debug)]
pub struct MeshLeader {
    config: MeshLeaderConfig,
    clock: AwakeClock,
    /// When the leader was last heard of.
    heard_ns: u64,
    session: Option<u64>,
    last_call_id: u64,
    /// State after the last envelope that was passed on.
    predicted: Cache,
    open: BTreeMap<u64, Open>,
    peers: BTreeMap<u32, Peer>,
    /// Id of the shutdown and when it was passed on.
    stopping: Option<(u64, u64)>,
    /// The own worker's answer to it.
    own_done: Option<Message>,
    /// The mark of the own worker's latest heartbeat, and when it was passed on.
    beat: (u64, u64),
    ended: bool,
}

/// A call whose envelope was passed on.
#[derive(Debug, Default)]
struct Open {
    meta: Option<CallMeta>,
    waits_for_context: bool,
    committed: bool,
    ready: BTreeSet<u32>,
    done: BTreeSet<u32>,
}

#[derive(Debug, Default)]
struct Peer {
    /// It said why it leaves, or answered the shutdown.
    left: bool,
    stopped: bool,
}

impl MeshLeader {
    /// Refuses limits without bounds and impossible caches.
    pub fn new(config: MeshLeaderConfig) -> Result<MeshLeader, Diagnostics> {
        let mut found = config.limits.check();
        config.tripwires.filter(&mut found);
        if !found.is_empty() {
            return Err(found);
        }
        let predicted = Cache::new(config.cache).map_err(|d| vec![d])?;
        let ranks = config.members.iter().chain([&config.rank]);
        let peers = ranks.map(|r| (*r, Peer::default())).collect();
        Ok(MeshLeader {
            config,
            clock: AwakeClock::default(),
            heard_ns: 0,
            session: None,
            last_call_id: 0,
            predicted,
            open: BTreeMap::new(),
            peers,
            stopping: None,
            own_done: None,
            beat: (0, 0),
            ended: false,
        })
    }

    /// Takes one event.
    pub fn step(&mut self, now_ns: u64, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        let now = self.clock.advance(now_ns, self.config.limits.heartbeat_ns);
        match event {
            Event::Tick => self.tick(now, &mut out),
            Event::Down(message) => {
                self.heard_ns = now;
                self.down(&message, &mut out);
            }
            Event::Up { origin, message } => self.up(origin, &message, &mut out),
            Event::Gone { rank, how } => self.gone(rank, &how, &mut out),
            Event::LeaderGone(how) => {
                if self.armed(&T0742) && self.stopping.is_none() {
                    let text = format!("the leader is gone: {how}");
                    self.end(self.here(FailureClass::RankDied, Some(0), &T0742, text), &mut out);
                }
            }
            Event::LauncherGone => {
                if self.armed(&T0749) {
                    let text = "the launching process closed its socket";
                    self.end(self.here(FailureClass::LauncherGone, None, &T0749, text), &mut out);
                }
            }
            Event::Failed(failure) => self.fault(failure.at(Place::MeshLeader), &mut out),
        }
        out
    }

    /// Whether nothing more will come out of this machine.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    fn tick(&mut self, now: u64, out: &mut Vec<Action>) {
        // The own worker has ended: a rank that only waits for its members is alive.
        if self.own_done.is_some() && now >= self.beat.1 + self.config.limits.heartbeat_ns {
            self.beat.1 = now;
            out.push(Action::Up(Message::Heartbeat(Heartbeat { mark: self.beat.0 })));
        }
        if !self.armed(&T0743) {
            return;
        }
        let limits = &self.config.limits;
        // Half of the leader's patience: only here is it known who is missing.
        if let Some((_, since)) = self.stopping
            && now.saturating_sub(since) > limits.ready_ns / 2
        {
            let missing = |r: &&u32| self.peers.get(r).is_some_and(|p| !p.stopped);
            let missing: Vec<u32> = self.peers.keys().filter(missing).copied().collect();
            let text = format!("no answer to the shutdown of ranks {missing:?} within the limit");
            let rank = missing.first().copied();
            return self.fault(self.here(FailureClass::Stall, rank, &T0743, text), out);
        }
        let patience = if self.session.is_some() { limits.stale_ns } else { limits.hello_ns };
        let quiet = now.saturating_sub(self.heard_ns);
        if quiet > patience {
            let text = format!("nothing was heard of the leader for {}, limit {}", ms(quiet), ms(patience));
            self.end(self.here(FailureClass::Stall, Some(0), &T0743, text), out);
        }
    }

    fn down(&mut self, message: &Message, out: &mut Vec<Action>) {
        let stopped = match message {
            Message::Init(init) => {
                self.session = Some(init.session);
                None
            }
            Message::Envelope(e) => self.envelope(e).map(|f| (e.header.call_id, f)),
            Message::Context(c) => self.context(c).map(|f| (c.call_id, f)),
            Message::Commit(c) => self.commit(c.call_id).map(|f| (c.call_id, f)),
            Message::Heartbeat(_) => None,
            Message::Abort(a) => {
                out.push(Action::ForwardDown);
                out.push(Action::Exit(Some(a.failure.clone())));
                self.ended = true;
                return;
            }
            other => {
                let text = format!("a {:?} message came from the leader", other.kind());
                self.armed(&T0707).then(|| (0, self.here(FailureClass::Protocol, Some(0), &T0707, text)))
            }
        };
        match stopped {
            None => out.push(Action::ForwardDown),
            Some((call_id, failure)) => {
                out.push(Action::Up(Message::Refused(Refused { call_id, failure: failure.clone() })));
                self.end(failure, out);
            }
        }
    }

    fn envelope(&mut self, e: &Envelope) -> Option<Failure> {
        let id = e.header.call_id;
        let most = self.config.limits.max_outstanding as usize;
        if self.open.len() >= most && e.header.action != CallAction::Shutdown {
            let text =
                format!("envelope {id} came while {} calls are open, the limit is {most}", self.open.len());
            if let Some(failure) = self.stopped(FailureClass::Protocol, text) {
                return Some(failure);
            }
        }
        let local = Local {
            plan: self.config.plan,
            session: self.session.unwrap_or_default(),
            last_call_id: self.last_call_id,
            cache: &self.predicted,
            census: &self.config.census,
            open: self.open.len(),
            tripwires: &self.config.tripwires,
        };
        match check_envelope(e, &local) {
            Ok(after) => self.predicted = after,
            Err(found) => {
                if let Some(failure) = self.stop(&found) {
                    return Some(failure);
                }
            }
        }
        self.last_call_id = id;
        if e.header.action == CallAction::Shutdown {
            self.stopping = Some((id, self.clock.now()));
        } else {
            let open = Open { meta: e.meta.clone(), waits_for_context: wants_context(e), ..Open::default() };
            self.open.insert(id, open);
        }
        None
    }

    fn context(&mut self, c: &Context) -> Option<Failure> {
        let open = self.open.get_mut(&c.call_id).filter(|o| o.waits_for_context);
        let Some(open) = open else {
            let text = format!("context came for call {}, which does not wait for it", c.call_id);
            return self.stopped(FailureClass::Protocol, text);
        };
        open.waits_for_context = false;
        let (census, tripwires) = (&self.config.census, &self.config.tripwires);
        let found = open.meta.as_ref().and_then(|m| check_context(m, &c.tensors, census, tripwires).err());
        found.and_then(|found| self.stop(&found))
    }

    fn commit(&mut self, call_id: u64) -> Option<Failure> {
        let first = self.open.keys().next().copied();
        let text = match self.open.get(&call_id) {
            None => format!("commit of call {call_id}, which is not open"),
            Some(o) if o.committed => format!("a second commit of call {call_id}"),
            Some(_) if first != Some(call_id) => {
                format!("commit of call {call_id} before call {} is done", first.unwrap_or_default())
            }
            Some(o) => {
                let missing: Vec<u32> = self.peers.keys().copied().filter(|r| !o.ready.contains(r)).collect();
                if missing.is_empty() {
                    String::new()
                } else {
                    format!("commit of call {call_id} before ranks {missing:?} were ready")
                }
            }
        };
        let failure = if text.is_empty() { None } else { self.stopped(FailureClass::Protocol, text) };
        if let Some(open) = self.open.get_mut(&call_id) {
            open.committed = true;
        }
        failure
    }

    fn up(&mut self, origin: u32, message: &Message, out: &mut Vec<Action>) {
        let Some(peer) = self.peers.get_mut(&origin) else {
            let text = format!("a message came from rank {origin}, which is not of this mesh");
            if self.armed(&T0707) {
                self.fault(self.here(FailureClass::Protocol, Some(origin), &T0707, text), out);
            }
            return;
        };
        if let Message::Done(d) = message
            && self.stopping.is_some_and(|(id, _)| id == d.call_id)
        {
            (peer.stopped, peer.left) = (true, true);
            return self.stopped_rank(origin, message, out);
        }
        out.push(Action::ForwardUp);
        match message {
            Message::Ready(r) => {
                if let Some(open) = self.open.get_mut(&r.call_id) {
                    open.ready.insert(origin);
                }
            }
            Message::Done(d) => {
                if let Some(open) = self.open.get_mut(&d.call_id) {
                    open.done.insert(origin);
                    if open.done.len() == self.peers.len() {
                        self.open.remove(&d.call_id);
                    }
                }
            }
            Message::Refused(_) | Message::Fault(_) => peer.left = true,
            Message::Heartbeat(h) if origin == self.config.rank => self.beat = (h.mark, self.clock.now()),
            _ => {}
        }
    }

    /// A rank answered the shutdown. This rank's own answer goes last: to the leader it is there as long as it
    /// passes others on.
    fn stopped_rank(&mut self, origin: u32, message: &Message, out: &mut Vec<Action>) {
        if origin == self.config.rank {
            self.own_done = Some(message.clone());
        } else {
            out.push(Action::ForwardUp);
        }
        if self.peers.values().all(|p| p.stopped) {
            out.extend(self.own_done.take().map(Action::Up));
            out.push(Action::Exit(None));
            self.ended = true;
        }
    }

    /// The leader holds no socket to a member: it is told here.
    fn gone(&mut self, rank: u32, how: &str, out: &mut Vec<Action>) {
        if !self.armed(&T0742) || self.peers.get(&rank).is_none_or(|p| p.left) {
            return;
        }
        let call = self.open.iter().next();
        let place = match call {
            Some((id, o)) if o.committed => format!("while call {id} ran"),
            Some((id, _)) => format!("while call {id} was prepared"),
            None => "between calls".to_string(),
        };
        let text = format!("rank {rank} is gone ({how}) {place}");
        self.fault(self.here(FailureClass::RankDied, Some(rank), &T0742, text), out);
    }

    /// Findings about a message as the reason to stop it, if this tripwire is armed.
    fn stop(&self, found: &Diagnostics) -> Option<Failure> {
        let finding = refusal(Some(self.config.rank), Place::MeshLeader, found);
        self.stopped(finding.class, format!("[{}] {}", finding.code, finding.text))
    }

    fn stopped(&self, class: FailureClass, text: String) -> Option<Failure> {
        self.armed(&T0755).then(|| self.here(class, Some(self.config.rank), &T0755, text))
    }

    /// Tells the leader, then leaves with the members.
    fn fault(&mut self, failure: Failure, out: &mut Vec<Action>) {
        out.push(Action::Up(Message::Fault(Fault { failure: failure.clone(), secondary: false })));
        self.end(failure, out);
    }

    fn end(&mut self, failure: Failure, out: &mut Vec<Action>) {
        out.push(Action::Down(Message::Abort(Abort { failure: failure.clone() })));
        out.push(Action::Exit(Some(failure)));
        self.ended = true;
    }

    fn armed(&self, code: &Code) -> bool {
        self.config.tripwires.armed(code)
    }

    fn here(&self, class: FailureClass, rank: Option<u32>, code: &Code, text: impl Into<String>) -> Failure {
        Failure::new(class, rank, code, text).at(Place::MeshLeader)
    }
}
