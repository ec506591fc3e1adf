//! One process: the machines in it, the engine of its rank, and what their actions do to the rest.

use std::sync::Arc;

use super::{Frame, Item, MARK_NS, OPEN, STUCK, Seen, Sim, Work, World};
use crate::Failure;
use crate::cache::Cache;
use crate::census::Census;
use crate::engine::{Engine, EngineFault, ReadyCall, run_call};
use crate::leader::{self, Leader};
use crate::mesh_leader::{self, MeshLeader};
use crate::wire::Message;
use crate::worker::{self, Worker};

#[derive(Debug)]
pub(super) struct Process {
    pub(super) state: State,
    /// Whether it ended as it should.
    pub(super) clean: bool,
    leader: Option<Leader>,
    relay: Option<MeshLeader>,
    seat: Option<Seat>,
    /// What came while it was stopped.
    pub(super) stored: Vec<Item>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Runs,
    Stopped,
    /// It has decided to end and takes its time.
    Leaves,
    Gone,
}

/// A rank's place in the mesh.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) machine: Worker,
    pub(super) engine: Fitted,
    pub(super) cache: Cache,
    pub(super) census: Arc<Census>,
    pub(super) running: Option<Running>,
}

/// An engine; what is in it is its own affair.
pub(super) struct Fitted(pub(super) Box<dyn Engine>);

impl std::fmt::Debug for Fitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fitted")
    }
}

#[derive(Debug)]
pub(super) struct Running {
    call: ReadyCall,
    phase: usize,
    begun_ns: u64,
    /// Length of the phase under way; 0 once its collectives are entered.
    takes_ns: u64,
}

impl Process {
    pub(super) fn new(leader: Option<Leader>, relay: Option<MeshLeader>, seat: Option<Seat>) -> Process {
        Process { state: State::Runs, clean: false, leader, relay, seat, stored: Vec::new() }
    }
}

impl Seat {
    /// How far the engine has come; a phase that is stuck, and one that waits for its peers, show nothing new. Of an open
    /// phase the world knows until when something went on, in nanoseconds.
    fn mark(&self, now_ns: u64, active_ns: u64) -> u64 {
        let Some(r) = &self.running else { return 0 };
        let inner = match r.takes_ns {
            0 => u64::from(u32::MAX),
            STUCK => 0,
            OPEN => active_ns.saturating_sub(r.begun_ns) / MARK_NS,
            _ => now_ns.saturating_sub(r.begun_ns) / MARK_NS,
        };
        ((r.phase as u64 + 1) << 32) | inner
    }
}

impl<W: World> Sim<W> {
    fn runs(&mut self, rank: u32) -> Option<&mut Process> {
        self.processes.get_mut(&rank).filter(|p| p.state == State::Runs)
    }

    pub(super) fn tick(&mut self, rank: u32) {
        if self.processes.get(&rank).is_none_or(|p| p.state == State::Gone) {
            return;
        }
        self.push(self.tick_ns, Item::Tick(rank));
        if self.stopped(rank) {
            return;
        }
        if rank == 0 {
            self.leader(leader::Event::Tick);
        }
        self.relay(rank, mesh_leader::Event::Tick, None);
        let now_ns = self.now_ns;
        let active_ns = self.world.active_ns(now_ns, rank);
        if let Some(seat) = self.runs(rank).and_then(|p| p.seat.as_ref()) {
            let mark = seat.mark(now_ns, active_ns);
            self.worker(rank, worker::Event::Tick { mark });
        }
    }

    pub(super) fn loaded(&mut self, rank: u32) {
        self.worker(
            rank,
            worker::Event::EngineReady { parity: self.parity.clone(), fingerprints: Vec::new() },
        );
    }

    pub(super) fn arrives(&mut self, frame: Frame) {
        let (to, relays) = (frame.to, self.outside && frame.to == 1);
        match (frame.up, relays) {
            (true, true) => {
                let Frame { origin, message, .. } = frame.clone();
                self.relay(to, mesh_leader::Event::Up { origin, message }, Some(frame));
            }
            (false, true) => {
                self.relay(to, mesh_leader::Event::Down(frame.message.clone()), Some(frame));
            }
            (true, false) => {
                self.leader(leader::Event::Message { rank: frame.origin, message: frame.message });
            }
            (false, false) => self.worker(to, worker::Event::Message(frame.message)),
        }
    }

    pub(super) fn closed(&mut self, from: u32, to: u32) {
        let how = || "its socket closed".to_string();
        match (to, self.outside) {
            (0, _) => self.leader(leader::Event::Gone { rank: from, how: how() }),
            (1, true) if from == 0 => self.relay(to, mesh_leader::Event::LeaderGone(how()), None),
            (1, true) => self.relay(to, mesh_leader::Event::Gone { rank: from, how: how() }, None),
            _ => self.worker(to, worker::Event::LeaderGone(how())),
        }
    }

    // The machines.

    pub(super) fn leader(&mut self, event: leader::Event) {
        let now_ns = self.now_ns;
        let Some(machine) = self.runs(0).and_then(|p| p.leader.as_mut()) else { return };
        let actions = machine.step(now_ns, event);
        for action in actions {
            self.world.leads(now_ns, &action);
            match action {
                leader::Action::Broadcast(message) => self.broadcast(&message),
                leader::Action::MakeContext { chunk, previous, opens_scene } => {
                    self.command(Work::Context { chunk, previous, opens_scene });
                }
                leader::Action::Deliver { chunk, epoch, .. } => self.command(Work::Deliver { chunk, epoch }),
                leader::Action::Fence { epoch } => {
                    self.studio.fence = epoch;
                    self.world.seen(now_ns, Seen::Fence(epoch));
                }
                leader::Action::Record(record) => self.world.seen(now_ns, Seen::Call(&record)),
                leader::Action::Report(message) => self.report(message),
                leader::Action::Dropped { .. } | leader::Action::Lost { .. } | leader::Action::Note(_) => {}
                leader::Action::Exit(outcome) => {
                    if let Some(f) = &outcome {
                        self.failure.get_or_insert_with(|| f.clone());
                    }
                    self.leaves(0, outcome.as_ref());
                }
            }
        }
        let wants = self.runs(0).and_then(|p| p.leader.as_ref()).map_or(0, Leader::wants);
        if wants > 0 {
            self.intake(wants);
        }
    }

    fn broadcast(&mut self, message: &Message) {
        let targets = if self.outside { vec![1] } else { self.mesh.clone() };
        for to in targets {
            self.send(Frame { from: 0, to, origin: 0, up: false, message: message.clone() });
        }
    }

    fn report(&mut self, message: Message) {
        let now_ns = self.now_ns;
        match message {
            Message::Finished => self.finished = true,
            Message::Failed(_) => {
                if let Some(l) = &mut self.launcher {
                    l.failed = true;
                }
            }
            _ => {}
        }
        if let Some(l) = &mut self.launcher {
            l.heard_ns = now_ns.max(1);
        }
    }

    fn relay(&mut self, rank: u32, event: mesh_leader::Event, frame: Option<Frame>) {
        let now_ns = self.now_ns;
        let Some(machine) = self.runs(rank).and_then(|p| p.relay.as_mut()) else { return };
        let actions = machine.step(now_ns, event);
        for action in actions {
            match action {
                mesh_leader::Action::ForwardDown => {
                    if let Some(f) = &frame {
                        self.down(rank, f.origin, &f.message);
                    }
                }
                mesh_leader::Action::ForwardUp => {
                    if let Some(f) = &frame {
                        self.send(Frame { from: rank, to: 0, ..f.clone() });
                    }
                }
                mesh_leader::Action::Down(message) => self.down(rank, rank, &message),
                mesh_leader::Action::Up(message) => {
                    self.send(Frame { from: rank, to: 0, origin: rank, up: true, message });
                }
                mesh_leader::Action::Exit(outcome) => self.leaves(rank, outcome.as_ref()),
            }
        }
    }

    /// To every member, and to the rank's own worker.
    fn down(&mut self, rank: u32, origin: u32, message: &Message) {
        for to in self.mesh.clone() {
            if to == rank {
                self.worker(rank, worker::Event::Message(message.clone()));
            } else {
                self.send(Frame { from: rank, to, origin, up: false, message: message.clone() });
            }
        }
    }

    fn worker(&mut self, rank: u32, event: worker::Event) {
        let now_ns = self.now_ns;
        let Some(seat) = self.runs(rank).and_then(|p| p.seat.as_mut()) else { return };
        let actions = seat.machine.step(now_ns, event);
        for action in actions {
            match action {
                worker::Action::Send(message) => {
                    let to = self.parent(rank);
                    self.send(Frame { from: rank, to, origin: rank, up: true, message });
                }
                worker::Action::Run(call) => self.begins(rank, *call),
                worker::Action::AbortEngine => self.aborts(),
                worker::Action::Exit(outcome) => {
                    // Where another machine shares the process, that one ends it.
                    let alone =
                        self.processes.get(&rank).is_some_and(|p| p.leader.is_none() && p.relay.is_none());
                    if alone {
                        self.leaves(rank, outcome.as_ref());
                    }
                }
            }
        }
    }

    fn leaves(&mut self, rank: u32, failure: Option<&Failure>) {
        self.world.seen(self.now_ns, Seen::Leaves { rank, failure });
        if failure.is_some() {
            self.aborts();
        }
        let unwinds = self.world.exit_ns(rank).min(self.limits.unwind_ns + self.limits.reap_ns / 2);
        if let Some(p) = self.runs(rank) {
            p.state = State::Leaves;
            p.clean = failure.is_none();
            self.push(unwinds, Item::Ends(rank));
        }
    }

    // The engine.

    fn begins(&mut self, rank: u32, mut call: ReadyCall) {
        self.world.seen(self.now_ns, Seen::Run { rank, call: &call });
        self.world.meddle(rank, &mut call);
        let begun_ns = self.now_ns;
        if let Some(seat) = self.runs(rank).and_then(|p| p.seat.as_mut()) {
            seat.running = Some(Running { call, phase: 0, begun_ns, takes_ns: 0 });
        }
        self.phase_begins(rank);
    }

    fn phase_begins(&mut self, rank: u32) {
        let now_ns = self.now_ns;
        let Some(p) = self.processes.get_mut(&rank) else { return };
        let Some(running) = p.seat.as_mut().and_then(|s| s.running.as_mut()) else { return };
        let (call_id, phase) = (running.call.call_id, running.phase);
        let phases = running.call.meta.as_ref().map_or(0, |m| m.phases.len());
        if phase == phases {
            return self.push(0, Item::CallEnds { rank, call_id, fault: None });
        }
        let takes_ns = self.world.phase_ns(now_ns, rank, &running.call, phase);
        (running.begun_ns, running.takes_ns) = (now_ns, takes_ns.max(1));
        if takes_ns < OPEN {
            self.push(takes_ns, Item::PhaseEnds { rank, call_id, phase });
        }
    }

    pub(super) fn phase_ends(&mut self, rank: u32, call_id: u64, phase: usize) {
        let Some(seat) = self.runs(rank).and_then(|p| p.seat.as_mut()) else { return };
        let Some(running) = seat.running.as_mut().filter(|r| (r.call.call_id, r.phase) == (call_id, phase))
        else {
            return;
        };
        let open = std::mem::take(&mut running.takes_ns) == OPEN;
        let program = running.call.meta.as_ref().map(|m| m.phases[phase].program.as_str());
        let facts = program.and_then(|p| seat.census.get(p).ok());
        // An open phase ends with its collectives behind it.
        if open || facts.is_none_or(|f| f.collectives == 0) {
            return self.next_phase(rank);
        }
        self.world.seen(self.now_ns, Seen::Collectives { rank, call_id, phase });
        let inside = self.barriers.entry((call_id, phase)).or_default();
        inside.insert(rank);
        if inside.len() == self.mesh.len() {
            self.barriers.remove(&(call_id, phase));
            for rank in self.mesh.clone() {
                self.next_phase(rank);
            }
        }
    }

    /// The world says that a rank came to the end of its open phase.
    pub(super) fn open_ends(&mut self, rank: u32) {
        let Some(running) = self.processes.get(&rank).and_then(|p| p.seat.as_ref()?.running.as_ref()) else {
            return;
        };
        if running.takes_ns == OPEN {
            let (call_id, phase) = (running.call.call_id, running.phase);
            self.push(0, Item::PhaseEnds { rank, call_id, phase });
        }
    }

    fn next_phase(&mut self, rank: u32) {
        let running = self.processes.get_mut(&rank).and_then(|p| p.seat.as_mut()?.running.as_mut());
        if let Some(running) = running {
            running.phase += 1;
            self.phase_begins(rank);
        }
    }

    /// Releases every rank that waits in a collective.
    fn aborts(&mut self) {
        for ((call_id, _), inside) in std::mem::take(&mut self.barriers) {
            for rank in inside {
                let fault = Some(EngineFault::aborted("a peer aborted"));
                self.push(1_000, Item::CallEnds { rank, call_id, fault });
            }
        }
    }

    pub(super) fn call_ends(&mut self, rank: u32, call_id: u64, fault: Option<EngineFault>) {
        let tripwires = self.tripwires.clone();
        let Some(seat) = self.runs(rank).and_then(|p| p.seat.as_mut()) else { return };
        let Some(running) = seat.running.take_if(|r| r.call.call_id == call_id) else { return };
        let outcome = match fault {
            Some(fault) => Err(fault),
            None => {
                let engine: &mut dyn Engine = &mut *seat.engine.0;
                run_call(engine, &running.call, &seat.census, &mut seat.cache, &tripwires, &|_| {})
            }
        };
        self.worker(rank, worker::Event::CallEnded(outcome));
    }
}
