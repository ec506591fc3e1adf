//! The world in which a modelled run takes place: devices under the engines, links of one length, a studio that works on the
//! leader's device, and the record.
//!
//! The leader's process has a thread for its engine and one for its studio, and nothing but the device keeps one from the
//! other. So what the studio decodes and encodes takes rank 0's device in the order in which the leader asks: the anchor
//! before the next call is committed, the rest before that call's first op. A rank 0 of the mesh computes when its device
//! is free again, and its peers wait for it in their first collective. That is what the planner's estimate counts too.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::Prices;
use tessera_mesh::Rank;
use tessera_report::record::{Phase, Waits};
use tessera_report::timeline::Span;
use tessera_runtime::Failure;
use tessera_runtime::census::{Census, InputFacts};
use tessera_runtime::check::CONTEXT;
use tessera_runtime::engine::{Engine, ReadyCall};
use tessera_runtime::leader::Action;
use tessera_runtime::sim::{Ending, Frame, OPEN, Seen, Work, World};
use tessera_runtime::wire::{Message, Progress, Tensor};
use tessera_sim::{Bar, Devices, Ended, Loaded, Occupied};
use tessera_verify::collective_lines;

use super::engine::{census, mesh_phases};
use super::ops::{Names, Ops};
use super::seat::{Ran, SimEngine, Told};
use super::{HOP_NS, broken};
use crate::plan::Plan;
use crate::rank::{Orders, silent};
use crate::record::{Laid, RecordWriter};
use crate::stream::{ChunkProgress, StreamEvent};

/// The world of a plan.
pub(super) struct Rack<'a> {
    plan: &'a Plan,
    orders: &'a Orders,
    on: &'a mut dyn FnMut(StreamEvent),
    devices: Devices,
    /// By phase and role.
    loaded: BTreeMap<(String, usize), Loaded>,
    programs: BTreeMap<Loaded, Part>,
    names: BTreeMap<Loaded, Names>,
    told: BTreeMap<Rank, Told>,
    inputs: Vec<InputFacts>,
    studio: Studio,
    record: RecordWriter,
    /// Phases of the call under way, by rank.
    laid: Laid,
    /// What streams were busy with in the phase under way, by rank.
    busy: BTreeMap<Rank, Vec<Bar>>,
    /// The same of the phases of this call that ended.
    bars: Vec<Bar>,
    ops: Ops,
    frames: u64,
    /// When the first chunk was delivered, and frames by then.
    first: Option<(u64, u64)>,
    /// What could not be written.
    broken: Option<Diagnostic>,
}

/// A loaded program.
struct Part {
    phase: String,
    /// The line of each collective in a trace, by op.
    lines: BTreeMap<usize, String>,
}

/// What the leader's own work takes, in nanoseconds.
#[derive(Debug, Default)]
struct Studio {
    /// Of a chunk's first latent.
    first_ns: u64,
    /// Of the others together.
    rest_ns: u64,
    encode_ns: u64,
    /// The chunk whose first latent is decoded and whose others are not.
    begun: Option<u32>,
    /// The pieces of the work under way.
    laps: Vec<(&'static str, u64)>,
    /// When the work had the device, once it has ended.
    had: Option<Occupied>,
}

impl fmt::Debug for Rack<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rack").field("plan", &self.plan.sealed.digest_hex()).finish_non_exhaustive()
    }
}

impl<'a> Rack<'a> {
    /// Loads every program of the plan on the devices of its role.
    pub(super) fn new(
        plan: &'a Plan,
        orders: &'a Orders,
        prices: &dyn Prices,
        mut record: RecordWriter,
        on: &'a mut dyn FnMut(StreamEvent),
    ) -> Result<Rack<'a>, Diagnostic> {
        let sealed = &plan.sealed;
        let mut devices = Devices::new(*sealed.mesh(), prices.contention());
        devices.record();
        let (mut loaded, mut programs, mut names) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for phase in mesh_phases(sealed) {
            for (at, role) in sealed.roles().iter().enumerate() {
                let Some(program) = role.ranks.first().and_then(|r| sealed.program(phase, *r)) else {
                    continue;
                };
                let id = devices.load(program, &role.ranks, prices)?;
                loaded.insert((phase.to_string(), at), id);
                let lines = collective_lines(program).into_iter().collect();
                programs.insert(id, Part { phase: phase.to_string(), lines });
                names.insert(id, Names::of(program));
            }
        }
        record.census(sealed);
        let facts = census(sealed);
        let mut inputs: Vec<InputFacts> = Vec::new();
        for phase in mesh_phases(sealed) {
            inputs.extend(facts.get(phase)?.inputs.iter().cloned());
        }
        Ok(Rack {
            orders,
            on,
            devices,
            loaded,
            programs,
            names,
            told: plan.mesh_ranks().map(|r| (r, Told::default())).collect(),
            inputs,
            studio: Studio::new(plan, orders, prices)?,
            record,
            laid: Laid::new(),
            busy: BTreeMap::new(),
            bars: Vec::new(),
            ops: Ops::default(),
            frames: 0,
            first: None,
            broken: None,
            plan,
        })
    }

    /// Closes the record: the failure, if there is one, and the ops for the trace.
    pub(super) fn finish(mut self, ending: &Ending, chunks: u32) -> (Option<Failure>, Vec<Span>) {
        let mut failure = ending.failure.clone().or_else(|| self.broken.as_ref().map(broken));
        if let Some(stalled) = self.devices.stalled() {
            let places = stalled.places.iter().map(|p| format!("{}: {}", p.at, p.says));
            let text = format!("{}: {}", stalled.message, places.collect::<Vec<_>>().join("; "));
            let wrote = self.record.event("stalled", &text);
            self.keep(wrote);
            failure.get_or_insert_with(|| broken(&stalled));
        }
        if let Some(f) = &failure {
            let wrote = self.record.event("failed", &f.text);
            self.keep(wrote);
        }
        let complete = self.record.settled() == chunks;
        if let Err(d) = self.record.end(failure.as_ref(), complete) {
            failure.get_or_insert_with(|| broken(&d));
        }
        (failure, self.ops.spans(&self.names))
    }

    /// Keeps the first thing that could not be written.
    fn keep(&mut self, wrote: Result<(), Diagnostic>) {
        if let Err(d) = wrote {
            self.broken.get_or_insert(d);
        }
    }

    /// A rank came to the end of a phase.
    fn ended(&mut self, e: &Ended, now_ns: u64) {
        let Some(part) = self.programs.get(&e.program) else { return };
        let begun_ns = e.begun_ns as u64;
        let mut hash = blake3::Hasher::new();
        for line in e.met.iter().filter_map(|op| part.lines.get(op)) {
            hash.update(line.as_bytes());
            hash.update(b"\n");
        }
        let trace = *hash.finalize().as_bytes();
        if let Some(told) = self.told.get(&e.rank) {
            let ns = now_ns.saturating_sub(begun_ns);
            told.borrow_mut().push_back(Ran { phase: part.phase.clone(), ns, trace });
        }
        let bars = self.busy.remove(&e.rank).unwrap_or_default();
        let streams = self.names.get(&e.program).map_or(&[][..], |n| &n.streams);
        let laid = self.laid.entry(e.rank.0).or_default();
        laid.extend(streams.iter().enumerate().filter_map(|(i, stream)| {
            let own = || bars.iter().filter(|b| b.stream == i);
            // The first stream stands for the phase; others for what they did in it.
            let (start_ns, end_ns) = match i {
                0 => (begun_ns, now_ns),
                _ => (
                    own().map(|b| b.start_ns).min_by(f64::total_cmp)?.round() as u64,
                    own().map(|b| b.end_ns).max_by(f64::total_cmp)?.round() as u64,
                ),
            };
            let collectives = own().filter(|b| b.transfer).count() as u32;
            let busy = own().map(|b| (b.start_ns.round() as u64, b.end_ns.round() as u64));
            let waits = Some(Waits::around(start_ns, end_ns, busy));
            let (name, stream) = (part.phase.clone(), stream.clone());
            Some(Phase { name, stream, start_ns, end_ns, collectives, waits })
        }));
        self.bars.extend(bars);
    }

    /// A placeholder of an input's shape, made of a few numbers again and again.
    fn placeholder(&self, name: &str, of: &[f32]) -> Option<Tensor> {
        let facts = self.inputs.iter().find(|i| i.name == name)?;
        let elements = facts.shape.iter().product::<u64>() as usize;
        let values: Vec<f32> = of.iter().copied().cycle().take(elements).collect();
        Tensor::from_f32(name, &facts.shape, &values).ok()
    }

    /// A chunk was delivered.
    fn progress(&mut self, now_ns: u64, p: &Progress) {
        self.frames += u64::from(p.frames);
        let (since_ns, before) = self.first.unwrap_or((0, 0));
        self.first.get_or_insert((now_ns, self.frames));
        let seconds = now_ns.saturating_sub(since_ns) as f64 / 1e9;
        (self.on)(StreamEvent::Chunk(ChunkProgress {
            chunk: p.chunk,
            chunks: self.orders.chunks,
            frames: self.frames,
            fps: if seconds > 0.0 { (self.frames - before) as f64 / seconds } else { 0.0 },
            phases: p.phases.clone(),
            queued_in: p.queued_in,
            queued_out: p.queued_out,
        }));
    }
}

impl World for Rack<'_> {
    fn carry(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        vec![(HOP_NS, frame)]
    }

    fn phase_ns(&mut self, now_ns: u64, rank: u32, call: &ReadyCall, phase: usize) -> u64 {
        let phase = call.meta.as_ref().and_then(|m| m.phases.get(phase));
        let role = self.plan.sealed.role_of(Rank(rank));
        let loaded = phase.zip(role).and_then(|(p, role)| self.loaded.get(&(p.program.clone(), role)));
        if let Some(loaded) = loaded {
            self.devices.begin(now_ns, Rank(rank), *loaded);
        }
        OPEN
    }

    fn studio_ns(&mut self, now_ns: u64, work: &Work) -> u64 {
        let ns = self.studio.begin(work);
        if ns == 0 {
            return 0;
        }
        self.devices.occupy(now_ns, Rank(0), ns);
        OPEN
    }

    fn studio_ended(&mut self) -> bool {
        self.studio.had = self.devices.take_freed().pop();
        self.studio.had.is_some()
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        0
    }

    fn engine(&mut self, rank: u32, census: &Arc<Census>) -> Box<dyn Engine> {
        let sealed = &self.plan.sealed;
        let trace = |phase: &str| Some((phase.to_string(), sealed.census(phase, Rank(rank))?.trace_digest));
        let traces = mesh_phases(sealed).filter_map(trace).collect();
        let told = self.told.entry(Rank(rank)).or_default();
        Box::new(SimEngine::new(census, traces, !silent(self.plan).contains(&rank), Rc::clone(told)))
    }

    fn next_ns(&mut self) -> Option<u64> {
        self.devices.next_ns()
    }

    fn advance(&mut self, now_ns: u64) -> Vec<u32> {
        let ended = self.devices.advance(now_ns);
        for bar in self.devices.take_bars() {
            self.busy.entry(bar.rank).or_default().push(bar);
        }
        ended.iter().for_each(|e| self.ended(e, now_ns));
        ended.iter().map(|e| e.rank.0).collect()
    }

    fn active_ns(&mut self, now_ns: u64, rank: u32) -> u64 {
        self.devices.active_ns(Rank(rank), now_ns)
    }

    fn text(&mut self, n: u32) -> Option<Tensor> {
        self.placeholder("text", &[n as f32])
    }

    fn context(&mut self, previous: &Tensor) -> Option<Tensor> {
        self.placeholder(CONTEXT, &previous.to_f32()?)
    }

    fn frames(&mut self) -> u32 {
        self.plan.video.stream.frames_per_chunk() as u32
    }

    fn leads(&mut self, now_ns: u64, action: &Action) {
        self.record.at(now_ns);
        let wrote = match action {
            Action::Report(Message::Progress(p)) => {
                self.progress(now_ns, p);
                Ok(())
            }
            Action::Dropped { request, epoch, why, .. } => self.record.dropped(*request, *epoch, why),
            Action::Lost { call_id, chunk, epoch, ready, done } => self.record.event(
                "lost",
                &format!("call {call_id}, chunk {chunk}, epoch {epoch}: ready {ready:?}, done {done:?}"),
            ),
            Action::Note(note) => self.record.event("note", note),
            _ => Ok(()),
        };
        self.keep(wrote);
    }

    fn seen(&mut self, now_ns: u64, what: Seen<'_>) {
        self.record.at(now_ns);
        match what {
            Seen::Call(call) => {
                let (laid, bars) = (std::mem::take(&mut self.laid), std::mem::take(&mut self.bars));
                let asked = call.request.filter(|_| !call.discarded).map(|r| self.orders.asked(r));
                self.record.call(call, asked.as_ref(), Some(laid));
                if call.request.is_some()
                    && let Some(rank) = self.ops.keep(call.plan.chunk, bars)
                {
                    let text =
                        format!("chunk {}: the trace shows ops of ranks below {rank}", call.plan.chunk);
                    let wrote = self.record.event("ops left out", &text);
                    self.keep(wrote);
                }
            }
            Seen::Studio { work, begun_ns, emitted, .. } => {
                let chunk = match work {
                    Work::Text => return,
                    // The first part of a chunk's decode is done on behalf of the next.
                    Work::Context { chunk, .. } => chunk.saturating_sub(1),
                    Work::Deliver { chunk, .. } => *chunk,
                };
                let had = self.studio.had.take();
                let begun_ns = had.map_or(begun_ns as f64, |o| o.begun_ns);
                let laps = std::mem::take(&mut self.studio.laps);
                let whole: u64 = laps.iter().map(|(_, ns)| ns).sum();
                // Beside a transfer it goes slower.
                let slow = (now_ns as f64 - begun_ns) / whole.max(1) as f64;
                let at = |done: u64| (begun_ns + done as f64 * slow).round() as u64;
                let mut done = 0;
                for (name, ns) in laps {
                    self.record.lap(chunk, name, at(done), at(done + ns));
                    done += ns;
                }
                if emitted && matches!(work, Work::Deliver { .. }) {
                    let frames = self.plan.video.stream.frames_per_chunk() as u32;
                    let wrote = self.record.delivered(chunk, frames, &[]);
                    self.keep(wrote);
                }
            }
            _ => {}
        }
    }
}

impl Studio {
    /// By the leader's own programs, or by what the command line says where that is longer.
    fn new(plan: &Plan, orders: &Orders, prices: &dyn Prices) -> Result<Studio, Diagnostic> {
        let (decode_ns, encode_ns) = (alone(plan, "decode", prices)?, alone(plan, "encode", prices)?);
        let others = plan.video.stream.chunk_frames.saturating_sub(1);
        let least = orders.modelled.studio;
        let at_least = |ns: u64, least_ns: Option<u64>| ns.max(least_ns.unwrap_or(0));
        Ok(Studio {
            first_ns: at_least(decode_ns, least.map(|m| m.first_ns)),
            rest_ns: at_least(decode_ns.saturating_mul(others), least.map(|m| m.rest_ns)),
            encode_ns: at_least(encode_ns, least.map(|m| m.encode_ns)),
            ..Studio::default()
        })
    }

    /// Begins a piece of work: how long it takes.
    fn begin(&mut self, work: &Work) -> u64 {
        self.laps = match work {
            // A scene's first latent is its own anchor.
            Work::Text | Work::Context { opens_scene: true, .. } => Vec::new(),
            Work::Context { chunk, .. } => {
                self.begun = chunk.checked_sub(1);
                vec![("decode.first", self.first_ns), ("encode", self.encode_ns)]
            }
            Work::Deliver { chunk, .. } => match self.begun.take_if(|c| c == chunk) {
                Some(_) => vec![("decode.rest", self.rest_ns)],
                None => vec![("decode", self.first_ns.saturating_add(self.rest_ns))],
            },
        };
        self.laps.iter().map(|(_, ns)| ns).sum()
    }
}

/// What a program of the leader takes on a device of its own; 0 where the plan has none of that name.
fn alone(plan: &Plan, phase: &str, prices: &dyn Prices) -> Result<u64, Diagnostic> {
    let Some(program) = plan.sealed.program(phase, Rank(0)) else { return Ok(0) };
    let mut devices = Devices::new(*plan.sealed.mesh(), prices.contention());
    let loaded = devices.load(program, &[Rank(0)], prices)?;
    devices.begin(0, Rank(0), loaded);
    let mut ns = 0;
    while let Some(at) = devices.next_ns() {
        ns = at;
        devices.advance(at);
    }
    Ok(ns)
}
