//! The simulated world of a run: devices below the engines, links of equal latency, a media
//! pipeline that shares the leader's device, and the record.
//!
//! The leader's process has one thread for its engine and one for its media pipeline, and only the
//! device orders their work. The media pipeline therefore occupies rank 0's device in the order of
//! the leader's requests: the anchor before the next call is committed, the rest before that call's
//! first op. If rank 0 is part of the mesh, it computes when its device is free again, and its
//! peers wait for it in their first collective. The planner's estimate makes the same assumption.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::TimingModel;
use tessera_mesh::Rank;
use tessera_models::PixelDecoder;
use tessera_report::record::{PhaseRecord, StreamWaits};
use tessera_report::timeline::TimelineSpan;
use tessera_runtime::Failure;
use tessera_runtime::engine::{Engine, MediaJob, ReadyCall};
use tessera_runtime::envelope_check::CONTEXT_TENSOR;
use tessera_runtime::leader::Action;
use tessera_runtime::program_index::{InputSpec, ProgramIndex};
use tessera_runtime::sim::{Frame, OPEN_ENDED, SimEvent, SimOutcome, World};
use tessera_runtime::wire::{Message, Progress, Tensor};
use tessera_sim::{BusyInterval, OutsideWork, ProgramEnd, SimDevices, SimProgramId};
use tessera_verify::collective_lines;

use super::op_trace::{OpTrace, ProgramNames};
use super::sim_engine::{FinishedPhase, FinishedPhases, SimEngine};
use super::{HOP_LATENCY_NS, to_failure};
use crate::engine::{build_program_index, mesh_phases};
use crate::plan::{Plan, is_leader_phase};
use crate::rank_config::RankConfig;
use crate::record::{PhasesByRank, RecordWriter};
use crate::run_settings::ranks_with_latents;
use crate::stream_options::{ChunkProgress, StreamEvent};

/// The simulated devices, media pipeline and record of a plan, which the simulated runtime uses as
/// its [`World`].
pub(super) struct SimWorld<'a> {
    plan: &'a Plan,
    config: &'a RankConfig,
    on_event: &'a mut dyn FnMut(StreamEvent),
    devices: SimDevices,
    /// Loaded programs by phase and role index.
    loaded: BTreeMap<(String, usize), SimProgramId>,
    programs: BTreeMap<SimProgramId, LoadedProgram>,
    names: BTreeMap<SimProgramId, ProgramNames>,
    finished: BTreeMap<Rank, FinishedPhases>,
    inputs: Vec<InputSpec>,
    media: SimMedia,
    record: RecordWriter,
    /// Phases of the current call, by rank.
    phase_records: PhasesByRank,
    /// Busy intervals of the phase that each rank is running.
    phase_bars: BTreeMap<Rank, Vec<BusyInterval>>,
    /// Ops of this call's completed phases.
    call_bars: Vec<BusyInterval>,
    ops: OpTrace,
    frames: u64,
    /// Time at which the first chunk was delivered, and the number of frames by then.
    first_delivery: Option<(u64, u64)>,
    /// The first error while writing the record.
    write_error: Option<Diagnostic>,
}

/// Phase and collective trace lines of a program that the simulated devices have loaded.
struct LoadedProgram {
    phase: String,
    /// The trace line of each collective, by op index.
    trace_lines: BTreeMap<usize, String>,
}

/// Durations and state of the leader's media pipeline.
#[derive(Debug, Default)]
struct SimMedia {
    /// Decode time of a chunk's first latent, in nanoseconds.
    first_decode_ns: u64,
    /// Decode time of the remaining latents together, in nanoseconds.
    rest_decode_ns: u64,
    encode_ns: u64,
    /// The chunk of which only the first latent is decoded.
    partly_decoded: Option<u32>,
    /// The steps of the current work with their durations in nanoseconds.
    steps: Vec<(&'static str, u64)>,
    /// The interval in which the finished work occupied the device.
    occupied: Option<OutsideWork>,
}

impl fmt::Debug for SimWorld<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rack").field("plan", &self.plan.sealed.digest_hex()).finish_non_exhaustive()
    }
}

impl<'a> SimWorld<'a> {
    /// Loads every program of the plan on the devices of its role.
    pub(super) fn new(
        plan: &'a Plan,
        orders: &'a RankConfig,
        prices: &dyn TimingModel,
        mut record: RecordWriter,
        on: &'a mut dyn FnMut(StreamEvent),
    ) -> Result<SimWorld<'a>, Diagnostic> {
        let sealed = &plan.sealed;
        let mut devices = SimDevices::new(*sealed.mesh(), prices.contention_factor());
        devices.start_recording();
        let (mut loaded, mut programs, mut names) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for phase in mesh_phases(sealed) {
            for (at, role) in sealed.roles().iter().enumerate() {
                let Some(program) = role.ranks.first().and_then(|r| sealed.rank_program(phase, *r)) else {
                    continue;
                };
                let id = devices.load(program, &role.ranks, prices)?;
                loaded.insert((phase.to_string(), at), id);
                let lines = collective_lines(program).into_iter().collect();
                programs.insert(id, LoadedProgram { phase: phase.to_string(), trace_lines: lines });
                names.insert(id, ProgramNames::from_program(program));
            }
        }
        record.set_plan(sealed);
        let facts = build_program_index(sealed);
        let mut inputs: Vec<InputSpec> = Vec::new();
        for phase in mesh_phases(sealed) {
            inputs.extend(facts.get(phase)?.inputs.iter().cloned());
        }
        Ok(SimWorld {
            config: orders,
            on_event: on,
            devices,
            loaded,
            programs,
            names,
            finished: plan.mesh_ranks().map(|r| (r, FinishedPhases::default())).collect(),
            inputs,
            media: SimMedia::new(plan, orders, prices)?,
            record,
            phase_records: PhasesByRank::new(),
            phase_bars: BTreeMap::new(),
            call_bars: Vec::new(),
            ops: OpTrace::default(),
            frames: 0,
            first_delivery: None,
            write_error: None,
            plan,
        })
    }

    /// Closes the record. Returns the failure, if there is one, and the ops for the trace.
    pub(super) fn finish_record(
        mut self,
        ending: &SimOutcome,
        chunks: u32,
    ) -> (Option<Failure>, Vec<TimelineSpan>) {
        let mut failure = ending.failure.clone().or_else(|| self.write_error.as_ref().map(to_failure));
        if let Some(stalled) = self.devices.find_stall() {
            let places = stalled.labels.iter().map(|p| format!("{}: {}", p.location, p.message));
            let text = format!("{}: {}", stalled.message, places.collect::<Vec<_>>().join("; "));
            let wrote = self.record.write_event("stalled", &text);
            self.note_error(wrote);
            failure.get_or_insert_with(|| to_failure(&stalled));
        }
        if let Some(f) = &failure {
            let wrote = self.record.write_event("failed", &f.text);
            self.note_error(wrote);
        }
        let in_place = self.record.check_in_place();
        failure = failure.or_else(|| Some(to_failure(&in_place.err()?)));
        let complete = self.record.settled_requests() == chunks;
        if let Err(d) = self.record.write_end(failure.as_ref(), complete) {
            failure.get_or_insert_with(|| to_failure(&d));
        }
        (failure, self.ops.into_spans(&self.names))
    }

    /// Stores the first error while writing the record.
    fn note_error(&mut self, wrote: Result<(), Diagnostic>) {
        if let Err(d) = wrote {
            self.write_error.get_or_insert(d);
        }
    }

    /// Passes a completed phase to the rank's engine, and records the times of the phase's streams.
    fn finish_phase(&mut self, e: &ProgramEnd, now_ns: u64) {
        let Some(part) = self.programs.get(&e.program) else { return };
        let begun_ns = e.start_ns as u64;
        let mut hash = blake3::Hasher::new();
        for line in e.completed_ops.iter().filter_map(|op| part.trace_lines.get(op)) {
            hash.update(line.as_bytes());
            hash.update(b"\n");
        }
        let trace = *hash.finalize().as_bytes();
        if let Some(phases) = self.finished.get(&e.rank) {
            let ns = now_ns.saturating_sub(begun_ns);
            phases.borrow_mut().push_back(FinishedPhase { phase: part.phase.clone(), ns, trace });
        }
        let bars = self.phase_bars.remove(&e.rank).unwrap_or_default();
        let streams = self.names.get(&e.program).map_or(&[][..], |n| &n.streams);
        let laid = self.phase_records.entry(e.rank.0).or_default();
        laid.extend(streams.iter().enumerate().filter_map(|(i, stream)| {
            let own = || bars.iter().filter(|b| b.stream == i);
            // The first stream covers the whole phase; other streams cover only their own ops.
            let (start_ns, end_ns) = match i {
                0 => (begun_ns, now_ns),
                _ => (
                    own().map(|b| b.start_ns).min_by(f64::total_cmp)?.round() as u64,
                    own().map(|b| b.end_ns).max_by(f64::total_cmp)?.round() as u64,
                ),
            };
            let collectives = own().filter(|b| b.transfer).count() as u32;
            let busy = own().map(|b| (b.start_ns.round() as u64, b.end_ns.round() as u64));
            let waits = Some(StreamWaits::from_busy_intervals(start_ns, end_ns, busy));
            let (name, stream) = (part.phase.clone(), stream.clone());
            Some(PhaseRecord { name, stream, start_ns, end_ns, collectives, waits, classes: Vec::new() })
        }));
        self.call_bars.extend(bars);
    }

    /// Creates a placeholder with an input's shape by repeating a few values.
    fn placeholder_input(&self, name: &str, pattern: &[f32]) -> Option<Tensor> {
        let facts = self.inputs.iter().find(|i| i.name == name)?;
        let elements = facts.shape.iter().product::<u64>() as usize;
        let values: Vec<f32> = pattern.iter().copied().cycle().take(elements).collect();
        Tensor::from_f32(name, &facts.shape, &values).ok()
    }

    /// Reports a delivered chunk with the frames so far and the simulated frame rate.
    fn report_progress(&mut self, now_ns: u64, p: &Progress) {
        self.frames += u64::from(p.frames);
        let (since_ns, before) = self.first_delivery.unwrap_or((0, 0));
        self.first_delivery.get_or_insert((now_ns, self.frames));
        let seconds = now_ns.saturating_sub(since_ns) as f64 / 1e9;
        (self.on_event)(StreamEvent::Chunk(ChunkProgress {
            chunk: p.chunk,
            request: p.request,
            epoch: p.epoch,
            chunks: self.config.chunks,
            frames: self.frames,
            fps: if seconds > 0.0 { (self.frames - before) as f64 / seconds } else { 0.0 },
            phases: p.phases.clone(),
            queued_in: p.queued_in,
            queued_out: p.queued_out,
            call_ns: p.call_ns,
        }));
    }
}

impl World for SimWorld<'_> {
    fn deliver_frame(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        vec![(HOP_LATENCY_NS, frame)]
    }

    fn phase_ns(&mut self, now_ns: u64, rank: u32, call: &ReadyCall, phase: usize) -> u64 {
        let phase = call.meta.as_ref().and_then(|m| m.phases.get(phase));
        let role = self.plan.sealed.role_of(Rank(rank));
        let loaded = phase.zip(role).and_then(|(p, role)| self.loaded.get(&(p.program.clone(), role)));
        if let Some(loaded) = loaded {
            self.devices.start_program(now_ns, Rank(rank), *loaded);
        }
        OPEN_ENDED
    }

    fn media_ns(&mut self, now_ns: u64, work: &MediaJob) -> u64 {
        let ns = self.media.begin_work(work);
        if ns == 0 {
            return 0;
        }
        self.devices.occupy(now_ns, Rank(0), ns);
        OPEN_ENDED
    }

    fn media_job_ended(&mut self) -> bool {
        self.media.occupied = self.devices.take_ended_work().pop();
        self.media.occupied.is_some()
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        0
    }

    fn make_engine(&mut self, rank: u32, programs: &Arc<ProgramIndex>) -> Box<dyn Engine> {
        let sealed = &self.plan.sealed;
        let trace = |phase: &str| {
            Some((phase.to_string(), sealed.collective_digest(phase, Rank(rank))?.trace_digest))
        };
        let traces = mesh_phases(sealed).filter_map(trace).collect();
        let finished = self.finished.entry(Rank(rank)).or_default();
        Box::new(SimEngine::new(
            programs,
            traces,
            ranks_with_latents(self.plan).contains(&rank),
            Rc::clone(finished),
        ))
    }

    fn next_change_ns(&mut self) -> Option<u64> {
        self.devices.next_event_ns()
    }

    fn advance_open_phases(&mut self, now_ns: u64) -> Vec<u32> {
        let ended = self.devices.advance_to(now_ns);
        for bar in self.devices.take_intervals() {
            self.phase_bars.entry(bar.rank).or_default().push(bar);
        }
        ended.iter().for_each(|e| self.finish_phase(e, now_ns));
        ended.iter().map(|e| e.rank.0).collect()
    }

    fn last_activity_ns(&mut self, now_ns: u64, rank: u32) -> u64 {
        self.devices.last_active_ns(Rank(rank), now_ns)
    }

    fn prompt_embedding(&mut self, n: u32) -> Option<Tensor> {
        self.placeholder_input("text", &[n as f32])
    }

    fn make_context(&mut self, previous: &Tensor) -> Option<Tensor> {
        self.placeholder_input(CONTEXT_TENSOR, &previous.to_f32()?)
    }

    fn frames_per_chunk(&mut self) -> u32 {
        self.plan.video.stream.frames_per_chunk() as u32
    }

    fn observe_action(&mut self, now_ns: u64, action: &Action) {
        self.record.set_simulated_time(now_ns);
        let wrote = match action {
            Action::Report(Message::Progress(p)) => {
                self.report_progress(now_ns, p);
                Ok(())
            }
            Action::Record(entry) => self.record.record_entry(entry),
            _ => Ok(()),
        };
        self.note_error(wrote);
    }

    fn observe_event(&mut self, now_ns: u64, what: SimEvent<'_>) {
        self.record.set_simulated_time(now_ns);
        match what {
            SimEvent::CallFinished(call) => {
                let (laid, bars) =
                    (std::mem::take(&mut self.phase_records), std::mem::take(&mut self.call_bars));
                let settings =
                    call.request.filter(|_| !call.discarded).map(|r| self.config.chunk_settings(r));
                self.record.record_call(call, settings.as_ref(), Some(laid));
                if call.request.is_some()
                    && let Some(rank) = self.ops.push_chunk(call.plan.chunk, bars)
                {
                    let text =
                        format!("chunk {}: the trace shows ops of ranks below {rank}", call.plan.chunk);
                    let wrote = self.record.write_event("ops truncated", &text);
                    self.note_error(wrote);
                }
            }
            SimEvent::MediaJobFinished { work, begun_ns, emitted, .. } => {
                let chunk = match work {
                    MediaJob::EncodePrompt(_) => return,
                    // The first part of a chunk's decode is done on behalf of the next chunk.
                    MediaJob::Context { chunk, .. } => chunk.saturating_sub(1),
                    MediaJob::Deliver { chunk, .. } => *chunk,
                };
                let had = self.media.occupied.take();
                let begun_ns = had.map_or(begun_ns as f64, |o| o.start_ns);
                let laps = std::mem::take(&mut self.media.steps);
                let total_ns: u64 = laps.iter().map(|(_, ns)| ns).sum();
                // A concurrent transfer slows the work down.
                let slow = (now_ns as f64 - begun_ns) / total_ns.max(1) as f64;
                let at = |done: u64| (begun_ns + done as f64 * slow).round() as u64;
                let mut done = 0;
                for (name, ns) in laps {
                    self.record.record_media_interval(chunk, name, at(done), at(done + ns));
                    done += ns;
                }
                if emitted && let MediaJob::Deliver { opens_scene, .. } = work {
                    let stream = &self.plan.video.stream;
                    let frames = match opens_scene {
                        true => stream.first_chunk_frames(),
                        false => stream.frames_per_chunk(),
                    } as u32;
                    let wrote = self.record.record_delivery(chunk, frames, &[], None);
                    self.note_error(wrote);
                }
            }
            _ => {}
        }
    }
}

impl SimMedia {
    /// Takes the durations from the leader's own programs, or from the command line if those are
    /// longer.
    fn new(plan: &Plan, orders: &RankConfig, prices: &dyn TimingModel) -> Result<SimMedia, Diagnostic> {
        let encode_ns = program_ns(plan, "encode", prices)?;
        let others = plan.video.stream.chunk_frames.saturating_sub(1);
        let (first_ns, rest_ns) = match plan.video.stream.decoder {
            PixelDecoder::WanVae | PixelDecoder::Tiny => {
                (program_ns(plan, "decode.first", prices)?, program_ns(plan, "decode.rest", prices)?)
            }
            PixelDecoder::SpaceTimeDepth | PixelDecoder::None => {
                let decode_ns = program_ns(plan, "decode", prices)?;
                (decode_ns, decode_ns.saturating_mul(others))
            }
        };
        let delays = orders.delays.media;
        let at_least = |ns: u64, least_ns: Option<u64>| ns.max(least_ns.unwrap_or(0));
        Ok(SimMedia {
            first_decode_ns: at_least(first_ns, delays.map(|m| m.first_ns)),
            rest_decode_ns: at_least(rest_ns, delays.map(|m| m.rest_ns)),
            encode_ns: at_least(encode_ns, delays.map(|m| m.encode_ns)),
            ..SimMedia::default()
        })
    }

    /// Starts a media job and returns the sum of its steps' durations in nanoseconds.
    fn begin_work(&mut self, work: &MediaJob) -> u64 {
        self.steps = match work {
            // The first latent of a scene is its own anchor.
            MediaJob::EncodePrompt(_) | MediaJob::Context { opens_scene: true, .. } => Vec::new(),
            MediaJob::Context { chunk, .. } => {
                self.partly_decoded = chunk.checked_sub(1);
                vec![("decode.first", self.first_decode_ns), ("encode", self.encode_ns)]
            }
            MediaJob::Deliver { chunk, .. } => match self.partly_decoded.take_if(|c| c == chunk) {
                Some(_) => vec![("decode.rest", self.rest_decode_ns)],
                None => vec![("decode", self.first_decode_ns.saturating_add(self.rest_decode_ns))],
            },
        };
        self.steps.iter().map(|(_, ns)| ns).sum()
    }
}

/// Returns the duration of a leader program on an otherwise idle device, or 0 if the plan has no
/// such program.
fn program_ns(plan: &Plan, phase: &str, prices: &dyn TimingModel) -> Result<u64, Diagnostic> {
    let own = is_leader_phase(&plan.sealed, phase);
    let Some(program) = plan.sealed.rank_program(phase, Rank(0)).filter(|_| own) else { return Ok(0) };
    let mut devices = SimDevices::new(*plan.sealed.mesh(), prices.contention_factor());
    let loaded = devices.load(program, &[Rank(0)], prices)?;
    devices.start_program(0, Rank(0), loaded);
    let mut ns = 0;
    while let Some(at) = devices.next_event_ns() {
        ns = at;
        devices.advance_to(at);
    }
    Ok(ns)
}
