//! A simulated process: its state machines, the engine of its rank, and the effects of their
//! actions.

use std::sync::Arc;

use tessera_base::Diagnostics;

use super::{
    Frame, NEVER_ENDS, OPEN_ENDED, PROGRESS_INTERVAL_NS, QueuedEvent, Sim, SimConfig, SimEvent, World,
};
use crate::Failure;
use crate::call_state::CallState;
use crate::engine::{Engine, EngineFault, ReadyCall, run_call};
use crate::leader::{self, Leader, RecordEntry};
use crate::mesh_leader::{self, MeshLeader, MeshLeaderConfig};
use crate::program_index::ProgramIndex;
use crate::wire::Message;
use crate::worker::{self, Worker, WorkerConfig};

#[derive(Debug)]
pub(super) struct SimProcess {
    pub(super) state: ProcessState,
    /// Whether the process exited without a failure.
    pub(super) clean: bool,
    leader: Option<Leader>,
    relay: Option<MeshLeader>,
    rank: Option<SimRank>,
    /// Events that arrived while the process was stopped; it handles them when it continues.
    pub(super) deferred: Vec<QueuedEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessState {
    Running,
    Stopped,
    /// The process is exiting, which takes some time.
    Exiting,
    Exited,
}

/// The worker of a process: its state machine, its engine, and the call that it runs.
#[derive(Debug)]
struct SimRank {
    machine: Worker,
    engine: EngineBox,
    state: CallState,
    programs: Arc<ProgramIndex>,
    running: Option<ActiveCall>,
}

/// An engine with an opaque `Debug` form, because engines do not implement `Debug`.
struct EngineBox(Box<dyn Engine>);

impl std::fmt::Debug for EngineBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EngineBox")
    }
}

#[derive(Debug)]
struct ActiveCall {
    call: ReadyCall,
    phase: usize,
    begun_ns: u64,
    /// Duration of the current phase; 0 once the rank has entered the phase's collectives.
    duration_ns: u64,
}

impl SimProcess {
    /// Creates a process with the state machines that run in it.
    ///
    /// # Errors
    /// The diagnostics of the state machines.
    pub(super) fn from_config(
        config: &SimConfig,
        rank: u32,
        world: &mut impl World,
    ) -> Result<SimProcess, Diagnostics> {
        let in_mesh = config.mesh().contains(&rank);
        let relays = config.is_leader_outside() && rank == 1;
        let sim_rank = in_mesh.then(|| SimRank::from_config(config, rank, world)).transpose()?;
        let relay = relays.then(|| MeshLeader::new(mesh_leader_config(config, rank))).transpose()?;
        let leader = (rank == 0).then(|| Leader::new(config.leader.clone())).transpose()?;
        Ok(SimProcess {
            state: ProcessState::Running,
            clean: false,
            leader,
            relay,
            rank: sim_rank,
            deferred: Vec::new(),
        })
    }
}

fn mesh_leader_config(config: &SimConfig, rank: u32) -> MeshLeaderConfig {
    let leader = &config.leader;
    MeshLeaderConfig {
        rank,
        members: config.mesh()[1..].to_vec(),
        plan: leader.plan,
        programs: Arc::clone(&leader.programs),
        session_spec: leader.session_spec.clone(),
        limits: leader.limits.clone(),
        tripwires: leader.tripwires.clone(),
    }
}

fn worker_config(config: &SimConfig, rank: u32) -> WorkerConfig {
    let leader = &config.leader;
    WorkerConfig {
        rank,
        upstream_rank: u32::from(config.is_leader_outside() && rank > 1),
        plan: leader.plan,
        build: leader.build.clone(),
        parity: leader.parity.clone(),
        programs: Arc::clone(&leader.programs),
        session_spec: leader.session_spec.clone(),
        limits: leader.limits.clone(),
        sends_output: rank == config.mesh()[0],
        tripwires: leader.tripwires.clone(),
    }
}

impl SimRank {
    fn from_config(config: &SimConfig, rank: u32, world: &mut impl World) -> Result<SimRank, Diagnostics> {
        let programs = &config.leader.programs;
        Ok(SimRank {
            machine: Worker::new(worker_config(config, rank))?,
            engine: EngineBox(world.make_engine(rank, programs)),
            state: CallState::new(config.leader.session_spec.state_spec()).map_err(|d| vec![d])?,
            programs: Arc::clone(programs),
            running: None,
        })
    }

    /// Returns the engine's progress. A phase that is stuck or waits for its peers makes no
    /// progress; for an open-ended phase the world provides the time of its last activity.
    fn progress_counter(&self, now_ns: u64, active_ns: u64) -> u64 {
        let Some(r) = &self.running else { return 0 };
        let inner = match r.duration_ns {
            0 => u64::from(u32::MAX),
            NEVER_ENDS => 0,
            OPEN_ENDED => active_ns.saturating_sub(r.begun_ns) / PROGRESS_INTERVAL_NS,
            _ => now_ns.saturating_sub(r.begun_ns) / PROGRESS_INTERVAL_NS,
        };
        ((r.phase as u64 + 1) << 32) | inner
    }
}

impl<W: World> Sim<W> {
    fn running_process(&mut self, rank: u32) -> Option<&mut SimProcess> {
        self.processes.get_mut(&rank).filter(|p| p.state == ProcessState::Running)
    }

    pub(super) fn tick_process(&mut self, rank: u32) {
        if self.processes.get(&rank).is_none_or(|p| p.state == ProcessState::Exited) {
            return;
        }
        self.schedule_event(self.config.tick_ns, QueuedEvent::Tick(rank));
        if self.is_stopped(rank) {
            return;
        }
        if rank == 0 {
            self.step_leader(leader::Event::Tick);
        }
        self.step_relay(rank, mesh_leader::Event::Tick, None);
        let now_ns = self.now_ns;
        let active_ns = self.world.last_activity_ns(now_ns, rank);
        if let Some(sim_rank) = self.running_process(rank).and_then(|p| p.rank.as_ref()) {
            let mark = sim_rank.progress_counter(now_ns, active_ns);
            self.step_worker(rank, worker::Event::Tick { progress: mark });
        }
    }

    pub(super) fn finish_loading(&mut self, rank: u32) {
        self.step_worker(
            rank,
            worker::Event::EngineReady {
                parity: self.config.leader.parity.clone(),
                fingerprints: Vec::new(),
            },
        );
    }

    pub(super) fn receive_frame(&mut self, frame: Frame) {
        let (to, relays) = (frame.to, self.config.is_leader_outside() && frame.to == 1);
        match (frame.up, relays) {
            (true, true) => {
                let Frame { origin, message, .. } = frame.clone();
                self.step_relay(to, mesh_leader::Event::Up { origin, message }, Some(frame));
            }
            (false, true) => {
                self.step_relay(to, mesh_leader::Event::Down(frame.message.clone()), Some(frame));
            }
            (true, false) => {
                self.step_leader(leader::Event::Message { rank: frame.origin, message: frame.message });
            }
            (false, false) => self.step_worker(to, worker::Event::Message(frame.message)),
        }
    }

    pub(super) fn handle_closed_link(&mut self, from: u32, to: u32) {
        let how = || "its socket closed".to_string();
        match (to, self.config.is_leader_outside()) {
            (0, _) => self.step_leader(leader::Event::Gone { rank: from, how: how() }),
            (1, true) if from == 0 => self.step_relay(to, mesh_leader::Event::LeaderGone(how()), None),
            (1, true) => self.step_relay(to, mesh_leader::Event::Gone { rank: from, how: how() }, None),
            _ => self.step_worker(to, worker::Event::UpstreamGone(how())),
        }
    }

    // State machines.

    pub(super) fn step_leader(&mut self, event: leader::Event) {
        let now_ns = self.now_ns;
        let Some(machine) = self.running_process(0).and_then(|p| p.leader.as_mut()) else { return };
        let actions = machine.handle_event(now_ns, event);
        for action in actions {
            self.world.observe_action(now_ns, &action);
            match action {
                leader::Action::Broadcast(message) => self.broadcast_message(&message),
                leader::Action::Media(job) => self.enqueue_job(job),
                leader::Action::SetMinEpoch { epoch } => {
                    self.media.min_epoch = epoch;
                    self.world.observe_event(now_ns, SimEvent::MinEpochSet(epoch));
                }
                leader::Action::Record(RecordEntry::Call(record)) => {
                    self.world.observe_event(now_ns, SimEvent::CallFinished(&record))
                }
                leader::Action::Record(_) => {}
                leader::Action::Report(message) => self.receive_report(message),
                leader::Action::Exit(outcome) => {
                    if let Some(f) = &outcome {
                        self.failure.get_or_insert_with(|| f.clone());
                    }
                    self.begin_exit(0, outcome.as_ref());
                }
            }
        }
        let wants =
            self.running_process(0).and_then(|p| p.leader.as_ref()).map_or(0, Leader::request_capacity);
        if wants > 0 {
            self.pull_requests(wants);
        }
    }

    fn broadcast_message(&mut self, message: &Message) {
        let targets = if self.config.is_leader_outside() { vec![1] } else { self.config.mesh().to_vec() };
        for to in targets {
            self.send_frame(Frame { from: 0, to, origin: 0, up: false, message: message.clone() });
        }
    }

    fn step_relay(&mut self, rank: u32, event: mesh_leader::Event, frame: Option<Frame>) {
        let now_ns = self.now_ns;
        let Some(machine) = self.running_process(rank).and_then(|p| p.relay.as_mut()) else { return };
        let actions = machine.handle_event(now_ns, event);
        for action in actions {
            match action {
                mesh_leader::Action::ForwardDown => {
                    if let Some(f) = &frame {
                        self.forward_down(rank, f.origin, &f.message);
                    }
                }
                mesh_leader::Action::ForwardUp => {
                    if let Some(f) = &frame {
                        self.send_frame(Frame { from: rank, to: 0, ..f.clone() });
                    }
                }
                mesh_leader::Action::Down(message) => self.forward_down(rank, rank, &message),
                mesh_leader::Action::Up(message) => {
                    self.send_frame(Frame { from: rank, to: 0, origin: rank, up: true, message });
                }
                mesh_leader::Action::Exit(outcome) => self.begin_exit(rank, outcome.as_ref()),
            }
        }
    }

    /// Delivers a message to every member and to the rank's own worker.
    fn forward_down(&mut self, rank: u32, origin: u32, message: &Message) {
        for to in self.config.mesh().to_vec() {
            if to == rank {
                self.step_worker(rank, worker::Event::Message(message.clone()));
            } else {
                self.send_frame(Frame { from: rank, to, origin, up: false, message: message.clone() });
            }
        }
    }

    fn step_worker(&mut self, rank: u32, event: worker::Event) {
        let now_ns = self.now_ns;
        let Some(sim_rank) = self.running_process(rank).and_then(|p| p.rank.as_mut()) else { return };
        let actions = sim_rank.machine.handle_event(now_ns, event);
        for action in actions {
            match action {
                worker::Action::Send(message) => {
                    let to = self.upstream_process(rank);
                    self.send_frame(Frame { from: rank, to, origin: rank, up: true, message });
                }
                worker::Action::Run(call) => self.start_call(rank, *call),
                worker::Action::AbortEngine => self.abort_collectives(),
                worker::Action::Exit(outcome) => {
                    // Another state machine in this process ends it.
                    let alone =
                        self.processes.get(&rank).is_some_and(|p| p.leader.is_none() && p.relay.is_none());
                    if alone {
                        self.begin_exit(rank, outcome.as_ref());
                    }
                }
            }
        }
    }

    fn begin_exit(&mut self, rank: u32, failure: Option<&Failure>) {
        self.world.observe_event(self.now_ns, SimEvent::Exiting { rank, failure });
        if failure.is_some() {
            self.abort_collectives();
        }
        let limits = &self.config.leader.limits;
        let unwinds = self.world.exit_ns(rank).min(limits.unwind_ns + limits.reap_ns / 2);
        if let Some(p) = self.running_process(rank) {
            p.state = ProcessState::Exiting;
            p.clean = failure.is_none();
            self.schedule_event(unwinds, QueuedEvent::ProcessExits(rank));
        }
    }

    // The engine.

    fn start_call(&mut self, rank: u32, mut call: ReadyCall) {
        self.world.observe_event(self.now_ns, SimEvent::CallStarted { rank, call: &call });
        self.world.alter_call(rank, &mut call);
        let begun_ns = self.now_ns;
        if let Some(sim_rank) = self.running_process(rank).and_then(|p| p.rank.as_mut()) {
            sim_rank.running = Some(ActiveCall { call, phase: 0, begun_ns, duration_ns: 0 });
        }
        self.start_phase(rank);
    }

    fn start_phase(&mut self, rank: u32) {
        let now_ns = self.now_ns;
        let Some(p) = self.processes.get_mut(&rank) else { return };
        let Some(running) = p.rank.as_mut().and_then(|s| s.running.as_mut()) else { return };
        let (call_id, phase) = (running.call.call_id, running.phase);
        let phases = running.call.meta.as_ref().map_or(0, |m| m.phases.len());
        if phase == phases {
            return self.schedule_event(0, QueuedEvent::CallEnds { rank, call_id, fault: None });
        }
        let takes_ns = self.world.phase_ns(now_ns, rank, &running.call, phase);
        (running.begun_ns, running.duration_ns) = (now_ns, takes_ns.max(1));
        if takes_ns < OPEN_ENDED {
            self.schedule_event(takes_ns, QueuedEvent::PhaseEnds { rank, call_id, phase });
        }
    }

    pub(super) fn end_phase(&mut self, rank: u32, call_id: u64, phase: usize) {
        let Some(sim_rank) = self.running_process(rank).and_then(|p| p.rank.as_mut()) else { return };
        let Some(running) =
            sim_rank.running.as_mut().filter(|r| (r.call.call_id, r.phase) == (call_id, phase))
        else {
            return;
        };
        let open = std::mem::take(&mut running.duration_ns) == OPEN_ENDED;
        let program = running.call.meta.as_ref().map(|m| m.phases[phase].program.as_str());
        let facts = program.and_then(|p| sim_rank.programs.get(p).ok());
        // An open-ended phase includes its collectives.
        if open || facts.is_none_or(|f| f.collectives == 0) {
            return self.start_next_phase(rank);
        }
        self.world.observe_event(self.now_ns, SimEvent::CollectivesEntered { rank, call_id, phase });
        let inside = self.barriers.entry((call_id, phase)).or_default();
        inside.insert(rank);
        if inside.len() == self.config.mesh().len() {
            self.barriers.remove(&(call_id, phase));
            for rank in self.config.mesh().to_vec() {
                self.start_next_phase(rank);
            }
        }
    }

    /// Ends the phase that a rank runs, if its duration is [`OPEN_ENDED`].
    pub(super) fn end_open_phase(&mut self, rank: u32) {
        let Some(running) = self.processes.get(&rank).and_then(|p| p.rank.as_ref()?.running.as_ref()) else {
            return;
        };
        if running.duration_ns == OPEN_ENDED {
            let (call_id, phase) = (running.call.call_id, running.phase);
            self.schedule_event(0, QueuedEvent::PhaseEnds { rank, call_id, phase });
        }
    }

    fn start_next_phase(&mut self, rank: u32) {
        let running = self.processes.get_mut(&rank).and_then(|p| p.rank.as_mut()?.running.as_mut());
        if let Some(running) = running {
            running.phase += 1;
            self.start_phase(rank);
        }
    }

    /// Releases every rank that waits in a collective.
    fn abort_collectives(&mut self) {
        for ((call_id, _), inside) in std::mem::take(&mut self.barriers) {
            for rank in inside {
                let fault = Some(EngineFault::peer_abort("a peer aborted"));
                self.schedule_event(1_000, QueuedEvent::CallEnds { rank, call_id, fault });
            }
        }
    }

    pub(super) fn end_call(&mut self, rank: u32, call_id: u64, fault: Option<EngineFault>) {
        let tripwires = self.config.leader.tripwires.clone();
        let Some(sim_rank) = self.running_process(rank).and_then(|p| p.rank.as_mut()) else { return };
        let Some(running) = sim_rank.running.take_if(|r| r.call.call_id == call_id) else { return };
        let outcome = match fault {
            Some(fault) => Err(fault),
            None => {
                let engine: &mut dyn Engine = &mut *sim_rank.engine.0;
                run_call(engine, &running.call, &sim_rank.programs, &mut sim_rank.state, &tripwires, &|_| {})
            }
        };
        self.step_worker(rank, worker::Event::CallEnded(Box::new(outcome)));
    }
}
