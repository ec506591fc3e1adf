//! The devices of all ranks: streams, events, launches and rendezvous on one clock.

mod events;
mod running_program;
mod stall;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use tessera_base::Diagnostic;
use tessera_device::TimingModel;
use tessera_ir::Program;
use tessera_mesh::{Mesh, Rank};

use crate::codes::T0810;
use crate::communicators::{CommunicatorIndex, CommunicatorTable};
use crate::timed_program::TimedProgram;

use events::{EventKind, ROUNDING_NS, TimeNs, ceil_ns};
use running_program::{RunningProgram, StreamState};

/// Handle of a loaded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimProgramId(usize);

/// A program that a rank has completed, and when.
#[derive(Debug, Clone, PartialEq)]
pub struct ProgramEnd {
    /// Rank on which the program ended.
    pub rank: Rank,
    /// The handle that [`SimDevices::load`] returned for the program.
    pub program: SimProgramId,
    /// The time at which the rank started the program, before its first host launch, in
    /// nanoseconds.
    pub start_ns: f64,
    /// The time at which the last stream and the host finished, in nanoseconds.
    pub end_ns: f64,
    /// Ops of the completed collectives, sends and receives, in launch order.
    pub completed_ops: Vec<usize>,
}

/// Completed work that no program contains, requested by [`SimDevices::occupy`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutsideWork {
    /// Rank whose device did the work.
    pub rank: Rank,
    /// The time at which the work got the device, in nanoseconds.
    pub start_ns: f64,
    /// The time at which the work released the device, in nanoseconds.
    pub end_ns: f64,
}

/// An interval in which a stream of a device was busy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BusyInterval {
    /// Rank whose device was busy.
    pub rank: Rank,
    /// Handle of the program that contains the op.
    pub program: SimProgramId,
    /// Index of the op in [`Program::ops`].
    pub op: usize,
    /// Index of the op's stream in [`Program::streams`].
    pub stream: usize,
    /// Whether the interval is a transfer rather than device work.
    pub transfer: bool,
    /// Start in nanoseconds; for a transfer, the arrival of its last member.
    pub start_ns: f64,
    /// Simulated time in nanoseconds at which the op or its transfer ended.
    pub end_ns: f64,
}

/// The simulated devices of all ranks of a mesh.
#[derive(Debug)]
pub struct SimDevices {
    mesh: Mesh,
    contention: f64,
    programs: Vec<Rc<TimedProgram>>,
    /// For each rank and each program that it has loaded, the communicators of the collective
    /// launches, in launch order.
    launch_routes: BTreeMap<(Rank, SimProgramId), Rc<Vec<CommunicatorIndex>>>,
    communicators: CommunicatorTable,
    states: Vec<RankDevice>,
    pending_launches: BTreeMap<(CommunicatorIndex, u64), MatchedLaunch>,
    now_ns: f64,
    /// Pending events by time and, at equal times, by the order of their creation.
    queue: BTreeMap<(TimeNs, u64), EventKind>,
    seq: u64,
    /// Ranks whose state changed at the current time.
    touched_ranks: BTreeSet<usize>,
    ended_programs: Vec<ProgramEnd>,
    ended_work: Vec<OutsideWork>,
    intervals: Option<Vec<BusyInterval>>,
}

/// The program of one rank, and the work and the transfers in progress on its device.
#[derive(Debug, Default)]
struct RankDevice {
    running: Option<RunningProgram>,
    /// Number of launches on each communicator in all programs that the rank has started. A program
    /// counts as a whole when it starts.
    launch_counts: BTreeMap<CommunicatorIndex, u64>,
    /// Number of transfers in progress; above 0, contention slows the device work down.
    active_transfers: u32,
    device_work: Option<DeviceWork>,
    /// Requests of [`SimDevices::occupy`] that wait for the device, oldest first: the time of the
    /// request and the duration of its work, both in nanoseconds.
    outside_work: VecDeque<(TimeNs, f64)>,
    /// Incremented with every new piece of work and every change of its speed, so that outdated
    /// end events are recognised.
    version: u64,
    /// Simulated time of the last activity on this rank, in nanoseconds.
    active_ns: f64,
}

/// The op, or the work outside programs, that a device executes; it executes one at a time.
#[derive(Debug)]
struct DeviceWork {
    /// `None` for work outside programs.
    op: Option<usize>,
    begun_ns: f64,
    /// Remaining work at `since_ns`, at full speed.
    remaining_ns: f64,
    since_ns: f64,
}

/// One matched launch of all members of a communicator.
#[derive(Debug, Default)]
struct MatchedLaunch {
    /// Rank and op of the members that have arrived.
    arrived: Vec<(usize, usize)>,
    duration_ns: f64,
    signature: Option<u64>,
    /// Members arrived with different collectives: the transfer never starts.
    mismatched: bool,
    begun_ns: Option<f64>,
}

impl SimDevices {
    /// Creates the devices of every rank of a mesh, idle at time 0. `contention` is
    /// [`TimingModel::contention_factor`].
    #[must_use]
    pub fn new(mesh: Mesh, contention: f64) -> SimDevices {
        SimDevices {
            mesh,
            contention: if contention > 1.0 { contention } else { 1.0 },
            programs: Vec::new(),
            launch_routes: BTreeMap::new(),
            communicators: CommunicatorTable::default(),
            states: (0..mesh.world_size()).map(|_| RankDevice::default()).collect(),
            pending_launches: BTreeMap::new(),
            now_ns: 0.0,
            queue: BTreeMap::new(),
            seq: 0,
            touched_ranks: BTreeSet::new(),
            ended_programs: Vec::new(),
            ended_work: Vec::new(),
            intervals: None,
        }
    }

    /// Records busy intervals of the streams from now on, for [`SimDevices::take_intervals`].
    pub fn start_recording(&mut self) {
        self.intervals.get_or_insert_with(Vec::new);
    }

    /// Returns the busy intervals since the last call, ordered by end; empty unless recording is
    /// on.
    pub fn take_intervals(&mut self) -> Vec<BusyInterval> {
        self.intervals.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Loads a program on the ranks of its role.
    ///
    /// # Errors
    /// T0810 if an op lacks a valid start dependency or a communicator.
    pub fn load(
        &mut self,
        program: &Program,
        ranks: &[Rank],
        timing: &dyn TimingModel,
    ) -> Result<SimProgramId, Diagnostic> {
        let script = TimedProgram::new(program, &self.mesh, timing)?;
        let loaded = SimProgramId(self.programs.len());
        for rank in ranks {
            let mut lanes = Vec::with_capacity(script.collectives.len());
            for meet in &script.collectives {
                let Some(communicator) = meet.route.communicator_of(&self.mesh, *rank) else {
                    let message = format!(
                        "{} in {}: rank {rank} has no such group or peer",
                        meet.description, script.name
                    );
                    return Err(Diagnostic::error(&T0810, message)
                        .with_label(script.name.clone(), format!("op {}", meet.op))
                        .with_label("mesh", self.mesh.to_string()));
                };
                lanes.push(self.communicators.find_or_insert(communicator));
            }
            self.launch_routes.insert((*rank, loaded), Rc::new(lanes));
        }
        self.programs.push(Rc::new(script));
        Ok(loaded)
    }

    /// Starts a program on a rank where it is loaded, at `at_ns` or now if that has passed. A rank
    /// runs one program at a time: if another one is still running then, this call has no effect.
    pub fn start_program(&mut self, at_ns: u64, rank: Rank, program: SimProgramId) {
        let at = (at_ns as f64).max(self.now_ns);
        self.push_event(at, EventKind::ProgramStart(rank.0 as usize, program));
    }

    /// Schedules `ns` nanoseconds of work outside any program on a rank. The work takes the whole
    /// device, as an op does: after the op that occupies it then, and before every op that becomes
    /// ready later. Two real kernels would share the device op by op; serialising them puts the
    /// same work on the device but fills no gap of either, so the result is an upper bound.
    pub fn occupy(&mut self, at_ns: u64, rank: Rank, ns: u64) {
        let at = (at_ns as f64).max(self.now_ns);
        self.push_event(at, EventKind::WorkRequest { rank: rank.0 as usize, ns });
    }

    /// Returns the work outside programs that ended since the last call, in order.
    pub fn take_ended_work(&mut self) -> Vec<OutsideWork> {
        std::mem::take(&mut self.ended_work)
    }

    /// Returns the time of the next event in whole nanoseconds, or `None` if no event is pending.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        self.first_event_ns().map(ceil_ns)
    }

    /// Advances the clock, and returns the programs that ended meanwhile, in order.
    pub fn advance_to(&mut self, to_ns: u64) -> Vec<ProgramEnd> {
        let until = to_ns as f64 + ROUNDING_NS;
        while let Some(at) = self.first_event_ns().filter(|at| *at <= until) {
            self.now_ns = at.max(self.now_ns);
            // Process all events of one time before their consequences, so that no result depends
            // on the order within that time.
            while let Some(due) = self.queue.first_entry().filter(|due| due.key().0.0 <= at) {
                let event = due.remove();
                self.handle_event(event);
            }
            self.settle_ranks();
        }
        self.now_ns = self.now_ns.max(to_ns as f64);
        std::mem::take(&mut self.ended_programs)
    }

    /// Returns the time of the last activity on a rank, in nanoseconds: `now_ns` while its device
    /// works, a transfer is in progress or its host launches. The value does not advance while a
    /// rank only waits.
    #[must_use]
    pub fn last_active_ns(&self, rank: Rank, now_ns: u64) -> u64 {
        let Some(state) = self.states.get(rank.0 as usize) else { return 0 };
        let launches =
            state.running.as_ref().is_some_and(|r| r.launched < r.timed_program.launch_times_ns.len());
        let active = state.device_work.is_some() || state.active_transfers > 0 || launches;
        if active { now_ns } else { state.active_ns as u64 }
    }

    fn push_event(&mut self, at_ns: f64, what: EventKind) {
        self.seq += 1;
        self.queue.insert((TimeNs(at_ns), self.seq), what);
    }

    fn first_event_ns(&self) -> Option<f64> {
        self.queue.first_key_value().map(|((at, _), _)| at.0)
    }

    fn handle_event(&mut self, what: EventKind) {
        match what {
            EventKind::ProgramStart(rank, program) => self.handle_start(rank, program),
            EventKind::WorkRequest { rank, ns } => {
                if let Some(state) = self.states.get_mut(rank) {
                    state.outside_work.push_back((TimeNs(self.now_ns), ns as f64));
                    self.touched_ranks.insert(rank);
                }
            }
            EventKind::HostLaunch(rank) => {
                if let Some(run) = self.states[rank].running.as_mut() {
                    run.launched += 1;
                    let next = run.timed_program.launch_times_ns.get(run.launched).copied();
                    if let Some(ns) = next {
                        self.push_event(self.now_ns + ns, EventKind::HostLaunch(rank));
                    }
                    self.touched_ranks.insert(rank);
                }
            }
            EventKind::WorkEnd { rank, version } if self.states[rank].version == version => {
                self.handle_work_end(rank)
            }
            EventKind::WorkEnd { .. } => {}
            EventKind::TransferEnd(lane, nth) => self.handle_transfer_end(lane, nth),
        }
    }

    fn handle_start(&mut self, rank: usize, program: SimProgramId) {
        let (Some(script), Some(route)) =
            (self.programs.get(program.0), self.launch_routes.get(&(Rank(rank as u32), program)))
        else {
            return;
        };
        let (script, state) = (Rc::clone(script), &mut self.states[rank]);
        if state.running.is_some() {
            return;
        }
        // The host's n-th launch on a communicator has sequence number n there, whenever its stream
        // reaches it.
        let nth = |lane: &CommunicatorIndex| {
            let n = state.launch_counts.entry(*lane).or_insert(0);
            *n += 1;
            (*lane, *n)
        };
        let places = route.iter().map(nth).collect();
        let first = script.launch_times_ns.first().copied();
        state.running = Some(RunningProgram::new(program, script, places, self.now_ns));
        if let Some(ns) = first {
            self.push_event(self.now_ns + ns, EventKind::HostLaunch(rank));
        }
        self.touched_ranks.insert(rank);
    }

    /// For each rank whose state has changed: advances its streams, assigns its device if that is
    /// free, and ends its program if no work is left.
    fn settle_ranks(&mut self) {
        while let Some(rank) = self.touched_ranks.pop_first() {
            self.states[rank].active_ns = self.now_ns;
            self.advance_streams(rank);
            self.assign_device(rank);
            self.end_if_complete(rank);
        }
    }

    /// Advances every stream of a rank as far as possible without the device.
    fn advance_streams(&mut self, rank: usize) {
        let mut moved = true;
        while std::mem::take(&mut moved) {
            let streams = self.states[rank].running.as_ref().map_or(0, |r| r.streams.len());
            for at in 0..streams {
                while let Some(op) = self.states[rank].running.as_ref().and_then(|r| r.next_startable(at)) {
                    moved = true;
                    let now = TimeNs(self.now_ns);
                    let Some(run) = self.states[rank].running.as_mut() else { return };
                    if run.timed_program.steps[op].work_ns > 0.0 {
                        run.streams[at].state = StreamState::Working;
                        run.ready.insert((now, op));
                        break;
                    }
                    self.complete_work(rank, at, op);
                }
            }
        }
    }

    /// Assigns a free device to the earliest request: an op, or work outside programs.
    fn assign_device(&mut self, rank: usize) {
        let state = &mut self.states[rank];
        if state.device_work.is_some() {
            return;
        }
        let first = state.running.as_ref().and_then(|r| r.ready.first()).map(|(since, _)| *since);
        let (op, left_ns) = match state
            .outside_work
            .pop_front_if(|(requested_ns, _)| first.is_none_or(|op| *requested_ns <= op))
        {
            Some((_, ns)) => (None, ns),
            None => {
                let Some(run) = state.running.as_mut() else { return };
                let Some((_, op)) = run.ready.pop_first() else { return };
                (Some(op), run.timed_program.steps[op].work_ns)
            }
        };
        state.device_work =
            Some(DeviceWork { op, begun_ns: self.now_ns, remaining_ns: left_ns, since_ns: self.now_ns });
        self.schedule_work_end(rank);
    }

    /// Schedules the end of a device's work at its present speed.
    fn schedule_work_end(&mut self, rank: usize) {
        let slow = self.slowdown_factor(rank);
        let state = &mut self.states[rank];
        state.version += 1;
        let version = state.version;
        if let Some(busy) = &state.device_work {
            let at = busy.since_ns + busy.remaining_ns * slow;
            self.push_event(at, EventKind::WorkEnd { rank, version });
        }
    }

    /// Returns the factor by which transfers now slow down a rank's device work; 1 without
    /// transfers.
    fn slowdown_factor(&self, rank: usize) -> f64 {
        if self.states[rank].active_transfers > 0 { self.contention } else { 1.0 }
    }

    fn handle_work_end(&mut self, rank: usize) {
        let Some(busy) = self.states[rank].device_work.take() else { return };
        self.touched_ranks.insert(rank);
        let Some(op) = busy.op else {
            let (rank, begun_ns, ended_ns) = (Rank(rank as u32), busy.begun_ns, self.now_ns);
            return self.ended_work.push(OutsideWork { rank, start_ns: begun_ns, end_ns: ended_ns });
        };
        let Some(run) = &self.states[rank].running else { return };
        let Some(at) = run.stream_of(op) else { return };
        self.record_interval(rank, op, false, busy.begun_ns);
        self.complete_work(rank, at, op);
    }

    /// Completes an op's own work: a collective now joins its rendezvous, any other op is done.
    fn complete_work(&mut self, rank: usize, stream: usize, op: usize) {
        let now_ns = self.now_ns;
        let Some(run) = self.states[rank].running.as_mut() else { return };
        let meets = run.timed_program.steps[op].collectives.clone();
        if meets.is_empty() {
            return run.finish_op(stream, op);
        }
        run.streams[stream].state = StreamState::Transferring(meets.len());
        let script = Rc::clone(&run.timed_program);
        let places: Vec<(CommunicatorIndex, u64)> = run.launch_keys[meets.clone()].to_vec();
        for (meet, place) in script.collectives[meets].iter().zip(places) {
            let m = self.pending_launches.entry(place).or_default();
            m.arrived.push((rank, meet.op));
            m.duration_ns = m.duration_ns.max(meet.duration_ns);
            m.mismatched |= *m.signature.get_or_insert(meet.signature) != meet.signature;
            if m.mismatched || m.arrived.len() < self.communicators.get(place.0).members.len() {
                continue;
            }
            m.begun_ns = Some(now_ns);
            let (ends, members) = (now_ns + m.duration_ns, m.arrived.clone());
            self.push_event(ends, EventKind::TransferEnd(place.0, place.1));
            for (member, _) in members {
                self.count_transfer(member, true);
            }
        }
    }

    /// Counts the start or end of a transfer of a rank; the speed of its current work may change.
    fn count_transfer(&mut self, rank: usize, begins: bool) {
        let (before, now_ns) = (self.slowdown_factor(rank), self.now_ns);
        let under_way = &mut self.states[rank].active_transfers;
        *under_way = if begins { *under_way + 1 } else { under_way.saturating_sub(1) };
        if self.slowdown_factor(rank) == before {
            return;
        }
        if let Some(busy) = &mut self.states[rank].device_work {
            busy.remaining_ns = (busy.remaining_ns - (now_ns - busy.since_ns) / before).max(0.0);
            busy.since_ns = now_ns;
            self.schedule_work_end(rank);
        }
    }

    fn handle_transfer_end(&mut self, lane: CommunicatorIndex, nth: u64) {
        let Some(m) = self.pending_launches.remove(&(lane, nth)) else { return };
        for (rank, op) in m.arrived {
            self.count_transfer(rank, false);
            self.record_interval(rank, op, true, m.begun_ns.unwrap_or(self.now_ns));
            self.touched_ranks.insert(rank);
            let Some(run) = self.states[rank].running.as_mut() else { continue };
            run.completed_ops.push(op);
            let Some(stream) = run.stream_of(op) else { continue };
            match run.streams[stream].state {
                StreamState::Transferring(left) if left > 1 => {
                    run.streams[stream].state = StreamState::Transferring(left - 1)
                }
                _ => {
                    let at = run.timed_program.queues[stream][run.streams[stream].next];
                    // The ops of a batch complete together.
                    let together = run.timed_program.steps[at].collectives.clone();
                    for i in together {
                        run.done[run.timed_program.collectives[i].op] = true;
                    }
                    run.finish_op(stream, at);
                }
            }
        }
    }

    fn record_interval(&mut self, rank: usize, op: usize, transfer: bool, start_ns: f64) {
        let end_ns = self.now_ns;
        let Some(run) = &self.states[rank].running else { return };
        if let (Some(bars), Some(stream)) = (&mut self.intervals, run.stream_of(op)) {
            let (rank, program) = (Rank(rank as u32), run.program);
            bars.push(BusyInterval { rank, program, op, stream, transfer, start_ns, end_ns });
        }
    }

    /// Ends a program that has no work left.
    fn end_if_complete(&mut self, rank: usize) {
        let Some(run) = self.states[rank].running.take_if(|r| r.is_complete()) else { return };
        let mut met = run.completed_ops;
        met.sort_unstable();
        self.ended_programs.push(ProgramEnd {
            rank: Rank(rank as u32),
            program: run.program,
            start_ns: run.begun_ns,
            end_ns: self.now_ns,
            completed_ops: met,
        });
    }
}
