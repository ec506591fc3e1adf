//! Devices of all ranks: streams, events, launches and meetings on one clock.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::rc::Rc;

use tessera_base::Diagnostic;
use tessera_device::Prices;
use tessera_ir::Program;
use tessera_mesh::{Mesh, Rank};

use crate::lanes::{LaneId, Lanes};
use crate::script::Script;
use crate::{T0810, T0811};

/// Instants inside are not whole nanoseconds; one so little after a whole one is that one.
const CLOSE_NS: f64 = 1e-3;
/// Most ranks that a message about a standstill names.
const STALLED_SHOWN: usize = 12;

/// A loaded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Loaded(usize);

/// A rank came to the end of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// The rank.
    pub rank: Rank,
    /// The program.
    pub program: Loaded,
    /// When it began, in nanoseconds.
    pub begun_ns: f64,
    /// When its last stream, and its host, had nothing left to do, in nanoseconds.
    pub ended_ns: f64,
    /// Collectives, sends and receives that it went through, by op, in the order of their launch.
    pub met: Vec<usize>,
}

/// Work beside programs came to its end: see [`Devices::occupy`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occupied {
    /// The rank.
    pub rank: Rank,
    /// When it got the device, in nanoseconds.
    pub begun_ns: f64,
    /// When it gave it back, in nanoseconds.
    pub ended_ns: f64,
}

/// What a stream of a device was busy with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bar {
    /// The rank.
    pub rank: Rank,
    /// The program.
    pub program: Loaded,
    /// Index of the op.
    pub op: usize,
    /// Index of its stream.
    pub stream: usize,
    /// Whether data moved, rather than the device worked.
    pub transfer: bool,
    /// Start in nanoseconds; of a transfer, when its last member was there.
    pub start_ns: f64,
    /// End in nanoseconds.
    pub end_ns: f64,
}

/// All ranks of a world.
#[derive(Debug)]
pub struct Devices {
    mesh: Mesh,
    contention: f64,
    scripts: Vec<Rc<Script>>,
    /// Lane of each launch of a script on a rank.
    routes: BTreeMap<(Rank, Loaded), Rc<Vec<LaneId>>>,
    lanes: Lanes,
    seats: Vec<Seat>,
    meetings: BTreeMap<(LaneId, u64), Meeting>,
    now_ns: f64,
    queue: BinaryHeap<Reverse<Due>>,
    seq: u64,
    /// Ranks to which something happened at this instant.
    touched: BTreeSet<usize>,
    ended: Vec<Ended>,
    freed: Vec<Occupied>,
    bars: Option<Vec<Bar>>,
}

/// One rank.
#[derive(Debug, Default)]
struct Seat {
    run: Option<Run>,
    /// How often it launched on each lane.
    launched: BTreeMap<LaneId, u64>,
    /// Its transfers under way.
    transfers: u32,
    busy: Option<Busy>,
    /// Work beside programs that waits for the device, in the order of asking: since when, and how long it takes.
    beside: VecDeque<(Instant, f64)>,
    /// Grows with every piece of work and every change of its pace, so that an end that was put off is known.
    version: u64,
    /// When something last went on here.
    active_ns: f64,
}

/// A program under way.
#[derive(Debug)]
struct Run {
    program: Loaded,
    script: Rc<Script>,
    begun_ns: f64,
    /// Of each launch of a collective: where and as the how many-th.
    places: Vec<(LaneId, u64)>,
    streams: Vec<Stream>,
    /// Ops that are over: of an issue, its transfer.
    done: Vec<bool>,
    /// Launches of the host that are over.
    launched: usize,
    /// Ops that wait for the device, by when they could have had it and then in program order.
    ready: BTreeSet<(Instant, usize)>,
    met: Vec<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// Place in the stream's queue.
    next: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// The next op waits for what it comes after.
    #[default]
    Held,
    /// It waits for the device, or has it.
    Works,
    /// So many of its transfers are not over.
    Meets(usize),
}

/// Work that has the device.
#[derive(Debug)]
struct Busy {
    /// None for work beside programs.
    op: Option<usize>,
    begun_ns: f64,
    /// Work that is left at `since_ns`, at full pace.
    left_ns: f64,
    since_ns: f64,
}

/// One launch of every member of a lane.
#[derive(Debug, Default)]
struct Meeting {
    /// Rank and op of those who are there.
    there: Vec<(usize, usize)>,
    ns: f64,
    what: Option<u64>,
    /// Members came with different calls: it never begins.
    broken: bool,
    begun_ns: Option<f64>,
}

/// An instant in nanoseconds; never less than 0 and never no number.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Instant(f64);
impl Eq for Instant {}
impl PartialOrd for Instant {
    fn partial_cmp(&self, other: &Instant) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Instant {
    fn cmp(&self, other: &Instant) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Instant,
    seq: u64,
    what: What,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Begins(usize, Loaded),
    Occupies { rank: usize, ns: u64 },
    Launches(usize),
    WorkEnds { rank: usize, version: u64 },
    MeetingEnds(LaneId, u64),
}

impl Devices {
    /// Devices of every rank of a mesh's world, idle at instant 0. `contention` is [`Prices::contention`].
    #[must_use]
    pub fn new(mesh: Mesh, contention: f64) -> Devices {
        Devices {
            mesh,
            contention: if contention > 1.0 { contention } else { 1.0 },
            scripts: Vec::new(),
            routes: BTreeMap::new(),
            lanes: Lanes::default(),
            seats: (0..mesh.ranks()).map(|_| Seat::default()).collect(),
            meetings: BTreeMap::new(),
            now_ns: 0.0,
            queue: BinaryHeap::new(),
            seq: 0,
            touched: BTreeSet::new(),
            ended: Vec::new(),
            freed: Vec::new(),
            bars: None,
        }
    }

    /// Keeps what streams are busy with from now on, until [`Devices::take_bars`].
    pub fn record(&mut self) {
        self.bars.get_or_insert_with(Vec::new);
    }

    /// What streams were busy with since the last time, by end; empty unless they are kept.
    pub fn take_bars(&mut self) -> Vec<Bar> {
        self.bars.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Loads a program on the ranks of its role.
    ///
    /// # Errors
    /// T0810 where an op does not say when it may start or whom it meets.
    pub fn load(
        &mut self,
        program: &Program,
        ranks: &[Rank],
        prices: &dyn Prices,
    ) -> Result<Loaded, Diagnostic> {
        let script = Script::new(program, &self.mesh, prices)?;
        let loaded = Loaded(self.scripts.len());
        for rank in ranks {
            let mut lanes = Vec::with_capacity(script.meets.len());
            for meet in &script.meets {
                let Some(lane) = self.lanes.find(&self.mesh, *rank, meet.way) else {
                    let message = format!("{} in {}: rank {rank} meets nobody there", meet.says, script.name);
                    return Err(Diagnostic::error(&T0810, message)
                        .at(script.name.clone(), format!("op {}", meet.op))
                        .at("mesh", self.mesh.to_string()));
                };
                lanes.push(lane);
            }
            self.routes.insert((*rank, loaded), Rc::new(lanes));
        }
        self.scripts.push(Rc::new(script));
        Ok(loaded)
    }

    /// Has a rank begin a program that is loaded on it, now or later. A rank runs one at a time: one that has not come to
    /// the end of another by then is left alone.
    pub fn begin(&mut self, at_ns: u64, rank: Rank, program: Loaded) {
        let at = (at_ns as f64).max(self.now_ns);
        self.push(at, What::Begins(rank.0 as usize, program));
    }

    /// Has a rank do work of so many nanoseconds that belongs to no program, now or later. It takes the device whole, as an
    /// op does: after the op that has it then, and before every op that asks for it later. What two kernels would share op
    /// by op is served in turn here, which puts the same work on the device and fills no gap of either: an upper bound.
    pub fn occupy(&mut self, at_ns: u64, rank: Rank, ns: u64) {
        let at = (at_ns as f64).max(self.now_ns);
        self.push(at, What::Occupies { rank: rank.0 as usize, ns });
    }

    /// Work beside programs that ended since the last time, in order.
    pub fn take_freed(&mut self) -> Vec<Occupied> {
        std::mem::take(&mut self.freed)
    }

    /// When something next happens, in whole nanoseconds; nothing where all stands still.
    #[must_use]
    pub fn next_ns(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse(due)| whole(due.at.0))
    }

    /// Moves the clock, and gives the programs that ended on the way, in order.
    pub fn advance(&mut self, to_ns: u64) -> Vec<Ended> {
        let until = to_ns as f64 + CLOSE_NS;
        while let Some(at) = self.queue.peek().map(|Reverse(due)| due.at.0).filter(|at| *at <= until) {
            self.now_ns = at.max(self.now_ns);
            // All of an instant before anything follows from it, so that nothing depends on the order inside it.
            while self.queue.peek().is_some_and(|Reverse(due)| due.at.0 <= at) {
                if let Some(Reverse(due)) = self.queue.pop() {
                    self.take(due.what);
                }
            }
            self.settle();
        }
        self.now_ns = self.now_ns.max(to_ns as f64);
        std::mem::take(&mut self.ended)
    }

    /// Until when something went on at a rank, in nanoseconds: `now_ns`, while its device works, a transfer of it is under way
    /// or its host launches. A rank that only waits stays where it was.
    #[must_use]
    pub fn active_ns(&self, rank: Rank, now_ns: u64) -> u64 {
        let Some(seat) = self.seats.get(rank.0 as usize) else { return 0 };
        let launches = seat.run.as_ref().is_some_and(|r| r.launched < r.script.launches.len());
        let active = seat.busy.is_some() || seat.transfers > 0 || launches;
        if active { now_ns } else { seat.active_ns as u64 }
    }

    /// Why ranks have ops left though nothing is on its way.
    #[must_use]
    pub fn stalled(&self) -> Option<Diagnostic> {
        if !self.queue.is_empty() {
            return None;
        }
        let held: Vec<usize> = (0..self.seats.len()).filter(|r| self.seats[*r].run.is_some()).collect();
        let first = held.first()?;
        let mut d = Diagnostic::error(
            &T0811,
            format!("{} ranks wait for each other, rank {first} among them", held.len()),
        );
        for rank in held.iter().take(STALLED_SHOWN) {
            let Some(run) = &self.seats[*rank].run else { continue };
            d = d.at(format!("rank {rank} in {}", run.script.name), self.waits(*rank, run));
        }
        if held.len() > STALLED_SHOWN {
            d = d.note(format!("{} more ranks wait likewise", held.len() - STALLED_SHOWN));
        }
        Some(d)
    }

    /// What a rank waits for, in words.
    fn waits(&self, rank: usize, run: &Run) -> String {
        let open = run.script.meets.iter().zip(&run.places);
        let mut says = Vec::new();
        for (meet, (lane, nth)) in open {
            let Some(m) = self.meetings.get(&(*lane, *nth)) else { continue };
            if !m.there.iter().any(|(r, _)| *r == rank) {
                continue;
            }
            let members = &self.lanes.get(*lane).members;
            let missing: Vec<String> = members
                .iter()
                .filter(|r| !m.there.iter().any(|(there, _)| *there == r.0 as usize))
                .map(ToString::to_string)
                .collect();
            let why = if m.broken { "others came with another call".to_string() } else { String::new() };
            let why = if missing.is_empty() { why } else { format!("waits for rank {}", missing.join(", ")) };
            says.push(format!("{} (op {}): {why}", meet.says, meet.op));
        }
        if says.is_empty() { "stands before its first collective".to_string() } else { says.join("; ") }
    }

    fn push(&mut self, at_ns: f64, what: What) {
        self.seq += 1;
        self.queue.push(Reverse(Due { at: Instant(at_ns), seq: self.seq, what }));
    }

    fn take(&mut self, what: What) {
        match what {
            What::Begins(rank, program) => self.begins(rank, program),
            What::Occupies { rank, ns } => {
                if let Some(seat) = self.seats.get_mut(rank) {
                    seat.beside.push_back((Instant(self.now_ns), ns as f64));
                    self.touched.insert(rank);
                }
            }
            What::Launches(rank) => {
                if let Some(run) = self.seats[rank].run.as_mut() {
                    run.launched += 1;
                    let next = run.script.launches.get(run.launched).copied();
                    if let Some(ns) = next {
                        self.push(self.now_ns + ns, What::Launches(rank));
                    }
                    self.touched.insert(rank);
                }
            }
            What::WorkEnds { rank, version } if self.seats[rank].version == version => self.work_ends(rank),
            What::WorkEnds { .. } => {}
            What::MeetingEnds(lane, nth) => self.meeting_ends(lane, nth),
        }
    }

    fn begins(&mut self, rank: usize, program: Loaded) {
        let (Some(script), Some(route)) =
            (self.scripts.get(program.0), self.routes.get(&(Rank(rank as u32), program)))
        else {
            return;
        };
        let (script, seat) = (Rc::clone(script), &mut self.seats[rank]);
        if seat.run.is_some() {
            return;
        }
        // The n-th launch of the host on a lane is its n-th there, whenever its stream comes to it.
        let nth = |lane: &LaneId| {
            let n = seat.launched.entry(*lane).or_insert(0);
            *n += 1;
            (*lane, *n)
        };
        let places = route.iter().map(nth).collect();
        let first = script.launches.first().copied();
        seat.run = Some(Run {
            program,
            begun_ns: self.now_ns,
            places,
            streams: vec![Stream::default(); script.queues.len()],
            done: vec![false; script.steps.len()],
            launched: 0,
            ready: BTreeSet::new(),
            met: Vec::new(),
            script,
        });
        if let Some(ns) = first {
            self.push(self.now_ns + ns, What::Launches(rank));
        }
        self.touched.insert(rank);
    }

    /// Follows what the present instant brings until nothing more comes of it, then hands free devices out.
    fn settle(&mut self) {
        while let Some(rank) = self.touched.pop_first() {
            self.seats[rank].active_ns = self.now_ns;
            self.streams(rank);
            self.device(rank);
            self.over(rank);
        }
    }

    /// Takes every stream of a rank as far as it comes without the device.
    fn streams(&mut self, rank: usize) {
        let mut moved = true;
        while std::mem::take(&mut moved) {
            let streams = self.seats[rank].run.as_ref().map_or(0, |r| r.streams.len());
            for at in 0..streams {
                while let Some(op) = self.seats[rank].run.as_ref().and_then(|r| r.startable(at)) {
                    moved = true;
                    let now = Instant(self.now_ns);
                    let Some(run) = self.seats[rank].run.as_mut() else { return };
                    if run.script.steps[op].work_ns > 0.0 {
                        run.streams[at].state = State::Works;
                        run.ready.insert((now, op));
                        break;
                    }
                    self.worked(rank, at, op);
                }
            }
        }
    }

    /// Gives a free device to what could have had it first: an op, or work beside programs.
    fn device(&mut self, rank: usize) {
        let seat = &mut self.seats[rank];
        if seat.busy.is_some() {
            return;
        }
        let first = seat.run.as_ref().and_then(|r| r.ready.first()).map(|(since, _)| *since);
        let (op, left_ns) = match seat.beside.pop_front_if(|(asked, _)| first.is_none_or(|op| *asked <= op)) {
            Some((_, ns)) => (None, ns),
            None => {
                let Some(run) = seat.run.as_mut() else { return };
                let Some((_, op)) = run.ready.pop_first() else { return };
                (Some(op), run.script.steps[op].work_ns)
            }
        };
        seat.busy = Some(Busy { op, begun_ns: self.now_ns, left_ns, since_ns: self.now_ns });
        self.due(rank);
    }

    /// Puts down when a device's work ends at its present pace.
    fn due(&mut self, rank: usize) {
        let slow = self.slow(rank);
        let seat = &mut self.seats[rank];
        seat.version += 1;
        let version = seat.version;
        if let Some(busy) = &seat.busy {
            let at = busy.since_ns + busy.left_ns * slow;
            self.push(at, What::WorkEnds { rank, version });
        }
    }

    /// How much longer work takes on a rank's device now.
    fn slow(&self, rank: usize) -> f64 {
        if self.seats[rank].transfers > 0 { self.contention } else { 1.0 }
    }

    fn work_ends(&mut self, rank: usize) {
        let Some(busy) = self.seats[rank].busy.take() else { return };
        self.touched.insert(rank);
        let Some(op) = busy.op else {
            let (rank, begun_ns, ended_ns) = (Rank(rank as u32), busy.begun_ns, self.now_ns);
            return self.freed.push(Occupied { rank, begun_ns, ended_ns });
        };
        let Some(run) = &self.seats[rank].run else { return };
        let Some(at) = run.stream_of(op) else { return };
        self.bar(rank, op, false, busy.begun_ns);
        self.worked(rank, at, op);
    }

    /// An op's own work is over: a collective now meets, everything else is done.
    fn worked(&mut self, rank: usize, stream: usize, op: usize) {
        let now_ns = self.now_ns;
        let Some(run) = self.seats[rank].run.as_mut() else { return };
        let meets = run.script.steps[op].meets.clone();
        if meets.is_empty() {
            return run.finish(stream, op);
        }
        run.streams[stream].state = State::Meets(meets.len());
        let script = Rc::clone(&run.script);
        let places: Vec<(LaneId, u64)> = run.places[meets.clone()].to_vec();
        for (meet, place) in script.meets[meets].iter().zip(places) {
            let m = self.meetings.entry(place).or_default();
            m.there.push((rank, meet.op));
            m.ns = m.ns.max(meet.ns);
            m.broken |= *m.what.get_or_insert(meet.what) != meet.what;
            if m.broken || m.there.len() < self.lanes.get(place.0).members.len() {
                continue;
            }
            m.begun_ns = Some(now_ns);
            let (ends, members) = (now_ns + m.ns, m.there.clone());
            self.push(ends, What::MeetingEnds(place.0, place.1));
            for (member, _) in members {
                self.transfers(member, true);
            }
        }
    }

    /// A transfer of a rank begins or ends: the work under way there may change its pace.
    fn transfers(&mut self, rank: usize, begins: bool) {
        let (before, now_ns) = (self.slow(rank), self.now_ns);
        let under_way = &mut self.seats[rank].transfers;
        *under_way = if begins { *under_way + 1 } else { under_way.saturating_sub(1) };
        if self.slow(rank) == before {
            return;
        }
        if let Some(busy) = &mut self.seats[rank].busy {
            busy.left_ns = (busy.left_ns - (now_ns - busy.since_ns) / before).max(0.0);
            busy.since_ns = now_ns;
            self.due(rank);
        }
    }

    fn meeting_ends(&mut self, lane: LaneId, nth: u64) {
        let Some(m) = self.meetings.remove(&(lane, nth)) else { return };
        for (rank, op) in m.there {
            self.transfers(rank, false);
            self.bar(rank, op, true, m.begun_ns.unwrap_or(self.now_ns));
            self.touched.insert(rank);
            let Some(run) = self.seats[rank].run.as_mut() else { continue };
            run.met.push(op);
            let Some(stream) = run.stream_of(op) else { continue };
            match run.streams[stream].state {
                State::Meets(left) if left > 1 => run.streams[stream].state = State::Meets(left - 1),
                _ => {
                    let at = run.script.queues[stream][run.streams[stream].next];
                    // What was launched as one is over as one.
                    let together = run.script.steps[at].meets.clone();
                    for i in together {
                        run.done[run.script.meets[i].op] = true;
                    }
                    run.finish(stream, at);
                }
            }
        }
    }

    fn bar(&mut self, rank: usize, op: usize, transfer: bool, start_ns: f64) {
        let end_ns = self.now_ns;
        let Some(run) = &self.seats[rank].run else { return };
        if let (Some(bars), Some(stream)) = (&mut self.bars, run.stream_of(op)) {
            let (rank, program) = (Rank(rank as u32), run.program);
            bars.push(Bar { rank, program, op, stream, transfer, start_ns, end_ns });
        }
    }

    /// Ends a program that has nothing left.
    fn over(&mut self, rank: usize) {
        let Some(run) = self.seats[rank].run.take_if(|r| r.is_over()) else { return };
        let mut met = run.met;
        met.sort_unstable();
        self.ended.push(Ended {
            rank: Rank(rank as u32),
            program: run.program,
            begun_ns: run.begun_ns,
            ended_ns: self.now_ns,
            met,
        });
    }
}

impl Run {
    /// The next op of a stream, if nothing holds it.
    fn startable(&self, stream: usize) -> Option<usize> {
        let s = self.streams[stream];
        let op = *self.script.queues[stream].get(s.next).filter(|_| s.state == State::Held)?;
        let step = &self.script.steps[op];
        let free = step.launched <= self.launched
            && step.after.iter().chain(&step.takes).all(|earlier| self.done[*earlier]);
        free.then_some(op)
    }

    fn finish(&mut self, stream: usize, op: usize) {
        self.done[op] = true;
        self.streams[stream] = Stream { next: self.streams[stream].next + 1, state: State::Held };
    }

    /// The stream on which an op is, or was launched with another one.
    fn stream_of(&self, op: usize) -> Option<usize> {
        self.script.stream_of.get(op).copied()
    }

    fn is_over(&self) -> bool {
        self.launched == self.script.launches.len()
            && self.streams.iter().zip(&self.script.queues).all(|(s, queue)| s.next == queue.len())
    }
}

/// The whole nanosecond at or after an instant.
fn whole(ns: f64) -> u64 {
    (ns - CLOSE_NS).ceil().max(0.0) as u64
}
