//! Writes the record of a run while it runs: each line describes something finished.
//!
//! A chunk's line is written once the chunk is on disk, so a record never claims more than the
//! folder holds.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::T0805;
pub use tessera_report::record::StartupMemory;
use tessera_report::record::{
    ChunkRecord, ClassWork, FailureCause, MEMORY_TOLERANCE_PERCENT, MemoryRecord, PhaseMemory, PhaseRecord,
    PipelineTimes, RankChunk, RankStartup, RecordLine, RunEnd, RunEvent, RunStatus,
};
pub(crate) use tessera_report::record_check::DROPPED_EVENT;
use tessera_runtime::leader::{CallRecord, RecordEntry};
use tessera_runtime::wire::{CallAction, CallMeta, CallObservation, OpClassWork};
use tessera_runtime::{Digest, Failure, FailureClass, Parity};
use tessera_verify::SealedPlan;

use crate::engine::mesh_phases;
use crate::files::{check_in_place, write_error};

/// Name of the record file in a run directory.
pub const RECORD_FILE: &str = "record.jsonl";

/// Appends lines to a run's record.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    path: PathBuf,
    file: File,
    clock: RecordClock,
    /// Chunks that every rank has finished but that are not yet delivered.
    finished: BTreeMap<u32, ChunkRecord>,
    /// Phases of the leader's own work on undelivered chunks.
    media_phases: BTreeMap<u32, Vec<PhaseRecord>>,
    /// Hash of all latents; `None` if the run computes no numbers.
    golden_hash: Option<blake3::Hasher>,
    chunks: u32,
    dropped: u32,
    frames: u64,
    /// Start of the first call and end of the last delivery, in nanoseconds.
    span: Option<(u64, u64)>,
    /// Commit and completion of the previous call on the leader's clock, in nanoseconds.
    previous_call: Option<(u64, u64)>,
    /// Intervals since the end of the last call in which the leader's own work occupied the device
    /// of a mesh rank. `None` if the leader has its own device or its device is unknown.
    shared_device_intervals: Option<Vec<(u64, u64)>>,
    /// Number of collectives of each phase on each rank, from the seal.
    collective_counts: BTreeMap<(String, u32), u32>,
    /// Role of each rank, from the seal.
    roles: BTreeMap<u32, String>,
    /// Bytes of weights, buffers and temporaries of each rank, from the seal, without the phases that
    /// the leader runs beside the mesh.
    planned_bytes: BTreeMap<u32, u64>,
    /// Bytes of the slots of each phase on each rank, from the seal.
    planned_slot_bytes: BTreeMap<(String, u32), u64>,
    /// Whether the end line is written; nothing follows it.
    ended: bool,
}

/// The clock of a record, in nanoseconds since the start of the run.
#[derive(Debug, Clone, Copy)]
enum RecordClock {
    Real(Instant),
    /// Current time of a simulated run, in nanoseconds.
    Simulated(u64),
}

/// The phases of each rank in a call, on the record's clock.
pub(crate) type PhasesByRank = BTreeMap<u32, Vec<PhaseRecord>>;

/// The settings in force at a chunk, and whether a hard cut or a reload precedes it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChunkSettings {
    pub(crate) prompt: String,
    pub(crate) seed: u64,
    pub(crate) cut: bool,
    /// Name of the list of denoise steps; `None` for that of the model.
    pub(crate) step_list: Option<String>,
    /// Attention bias on context keys; `None` for that of the plan.
    pub(crate) bias: Option<f32>,
    /// Source of the weights; `None` for those with which the run began.
    pub(crate) weights: Option<String>,
}

/// An interval of the leader's own work: `decode`, or `decode.first` and `decode.rest`, `encode`,
/// `write`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MediaInterval {
    pub(crate) name: &'static str,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
}

impl RecordWriter {
    /// Opens the record that the launcher created.
    pub(crate) fn open(dir: &Path) -> Result<RecordWriter, Diagnostic> {
        let path = dir.join(RECORD_FILE);
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| write_error(&path, &e))?;
        Ok(RecordWriter {
            path,
            file,
            clock: RecordClock::Real(Instant::now()),
            finished: BTreeMap::new(),
            media_phases: BTreeMap::new(),
            golden_hash: Some(blake3::Hasher::new()),
            chunks: 0,
            dropped: 0,
            frames: 0,
            span: None,
            previous_call: None,
            shared_device_intervals: None,
            collective_counts: BTreeMap::new(),
            roles: BTreeMap::new(),
            planned_bytes: BTreeMap::new(),
            planned_slot_bytes: BTreeMap::new(),
            ended: false,
        })
    }

    /// Opens the record of a simulated run, whose clock is set by
    /// [`RecordWriter::set_simulated_time`] and whose latents are not computed. `shares` states
    /// whether the leader's own work runs on the device of a mesh rank.
    pub(crate) fn open_simulated(dir: &Path, shares: bool) -> Result<RecordWriter, Diagnostic> {
        let intervals = shares.then(Vec::new);
        Ok(RecordWriter {
            clock: RecordClock::Simulated(0),
            golden_hash: None,
            shared_device_intervals: intervals,
            ..RecordWriter::open(dir)?
        })
    }

    /// Sets the clock of a simulated run.
    pub(crate) fn set_simulated_time(&mut self, now_ns: u64) {
        self.clock = RecordClock::Simulated(now_ns);
    }

    /// Takes the role and memory of each rank, and its collectives and slots in each phase, from the
    /// seal.
    pub(crate) fn set_plan(&mut self, plan: &SealedPlan) {
        for role in plan.roles() {
            self.roles.extend(role.ranks.iter().map(|r| (r.0, role.role.clone())));
        }
        for rank in plan.mesh().iter() {
            let slots = mesh_phases(plan).filter_map(|phase| plan.rank_slots(phase, rank));
            let temporaries = slots.map(|s| s.slot_bytes.iter().sum::<u64>()).max().unwrap_or(0);
            let kept = plan.rank_memory(rank).map_or(0, |m| m.weights.0 + m.buffers.0);
            self.planned_bytes.insert(rank.0, kept + temporaries);
        }
        for phase in plan.phase_names() {
            for rank in plan.mesh().iter() {
                let n = plan
                    .collective_digest(phase, rank)
                    .map_or(0, |c| u32::try_from(c.collectives).unwrap_or(u32::MAX));
                self.collective_counts.insert((phase.clone(), rank.0), n);
                let slots = plan.rank_slots(phase, rank).map_or(0, |s| s.slot_bytes.iter().sum());
                self.planned_slot_bytes.insert((phase.clone(), rank.0), slots);
            }
        }
    }

    /// Returns the number of settled requests: chunks on disk plus requests dropped for a cut.
    pub(crate) fn settled_requests(&self) -> u32 {
        self.chunks + self.dropped
    }

    /// Returns the nanoseconds since this writer was opened: the record's clock.
    pub(crate) fn now_ns(&self) -> u64 {
        match self.clock {
            RecordClock::Real(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            RecordClock::Simulated(now_ns) => now_ns,
        }
    }

    fn write_line(&mut self, line: &RecordLine) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        // Each line is one write, so that a killed process leaves at most one truncated line.
        self.file.write_all(line.to_json().as_bytes()).map_err(|e| write_error(&self.path, &e))
    }

    pub(crate) fn write_event(&mut self, event: &str, detail: &str) -> Result<(), Diagnostic> {
        let at_ns = self.now_ns();
        self.write_line(&RecordLine::Event(RunEvent {
            at_ns,
            event: event.into(),
            detail: detail.into(),
            startup: None,
            memory: None,
        }))
    }

    /// Returns the memory of a rank beside the plan's; `None` if its engine allocates none.
    fn memory_record(&self, rank: u32, observed: &CallObservation) -> Option<MemoryRecord> {
        let m = observed.memory;
        (m.allocated_bytes > 0).then(|| MemoryRecord {
            planned_bytes: self.planned_bytes.get(&rank).copied().unwrap_or(0),
            allocated_bytes: m.allocated_bytes,
            workspace_bytes: m.workspace_bytes,
            peak_bytes: m.peak_bytes,
            unused_bytes: m.unused_bytes,
            slot_reuses: m.slot_reuses,
        })
    }

    /// Records what each rank had allocated after the warm-up, and a note if it differs from the plan
    /// (T0805).
    fn write_startup_memory(&mut self, call: &CallRecord) -> Result<(), Diagnostic> {
        for (rank, observed) in &call.observed {
            let Some(memory) = self.memory_record(*rank, observed) else { continue };
            let names = call.plan.meta.iter().flat_map(|m| &m.phases).map(|p| &p.program);
            let phases = names.zip(&observed.phase_bytes).map(|(phase, written)| PhaseMemory {
                phase: phase.clone(),
                planned_bytes: self.planned_slot_bytes.get(&(phase.clone(), *rank)).copied().unwrap_or(0),
                written_bytes: *written,
            });
            let report = StartupMemory { rank: *rank, memory, phases: phases.collect() };
            let (planned, allocated) = (memory.planned_bytes, memory.allocated_bytes);
            let detail = format!(
                "rank {rank} allocated {allocated} bytes, {:+.1} % of the planned {planned} bytes",
                memory.deviation_percent()
            );
            if !memory.agrees_with_plan() {
                let id = T0805.id;
                self.write_event(
                    "note",
                    &format!("{id}: {detail}; the limit is {MEMORY_TOLERANCE_PERCENT} %"),
                )?;
            }
            self.write_line(&RecordLine::Event(RunEvent {
                at_ns: self.now_ns(),
                event: "memory".into(),
                detail,
                startup: None,
                memory: Some(report),
            }))?;
        }
        Ok(())
    }

    fn write_startup(&mut self, rank: u32, settings: &Parity, tripwires: &[&str]) -> Result<(), Diagnostic> {
        let role = self.roles.get(&rank).cloned().unwrap_or_default();
        let keys: Vec<_> = settings.keys().iter().map(|k| (k.key.clone(), k.value.clone())).collect();
        let armed = tripwires.len();
        let detail = format!("rank {rank}, role {role}: {} settings, {armed} armed tripwires", keys.len());
        let tripwires = tripwires.iter().map(ToString::to_string).collect();
        self.write_line(&RecordLine::Event(RunEvent {
            at_ns: self.now_ns(),
            event: "startup".into(),
            detail,
            startup: Some(RankStartup { rank, role, keys, tripwires }),
            memory: None,
        }))
    }

    /// Records an entry of the leader. A call and a delivered chunk have more to record than their
    /// entries hold, so [`Self::record_call`] and the media pipeline record those.
    pub(crate) fn record_entry(&mut self, entry: &RecordEntry) -> Result<(), Diagnostic> {
        match entry {
            RecordEntry::Call(_) | RecordEntry::Progress(_) => Ok(()),
            RecordEntry::Note(note) => self.write_event("note", note),
            RecordEntry::Startup { rank, settings, tripwires } => {
                self.write_startup(*rank, settings, tripwires)
            }
            RecordEntry::Failed(f) => self.write_event("failed", &f.text),
            RecordEntry::Dropped { request, epoch, why, .. } => {
                self.dropped += 1;
                self.write_event(DROPPED_EVENT, &format!("request {request}, of epoch {epoch}: {why}"))
            }
            RecordEntry::Lost { call_id, chunk, epoch, ready, done } => self.write_event(
                "lost",
                &format!("call {call_id}, chunk {chunk}, epoch {epoch}: ready {ready:?}, done {done:?}"),
            ),
        }
    }

    /// Records a call that every rank has finished. `settings` are those of its chunk; they are
    /// `None` for a call without a chunk and for a discarded call. Without `phases_by_rank`, phases
    /// are placed end to end from the call's commit, because ranks report durations, not
    /// timestamps.
    pub(crate) fn record_call(
        &mut self,
        call: &CallRecord,
        settings: Option<&ChunkSettings>,
        mut phases_by_rank: Option<PhasesByRank>,
    ) {
        let end = self.now_ns();
        let pipeline = self.pipeline_times(call, end);
        if call.plan.action == CallAction::Warmup {
            // If an event cannot be written, the first delivery fails too and reports the error.
            let _ = self.write_startup_memory(call);
        }
        let (Some(meta), Some(request), Some(settings)) = (&call.plan.meta, call.request, settings) else {
            return;
        };
        let chunk = call.plan.chunk;
        // If an event cannot be written, the delivery fails too and reports the error.
        if settings.cut {
            let _ = self.write_event("cut", &format!("chunk {chunk} begins epoch {}", call.plan.cache_epoch));
        }
        if let Some(shift) =
            meta.phases.iter().find(|p| p.program == "rebase").and_then(|p| p.int_arg("shift"))
        {
            let _ = self.write_event("rebase", &format!("chunk {chunk}: positions move by {shift} frames"));
        }
        if let Some(n) = call.observed.values().map(|o| o.compensated).max().filter(|n| *n > 0) {
            let _ = self
                .write_event("compensated sums", &format!("chunk {chunk}: {n} sums over ranks cancelled"));
        }
        let wall_ns = match self.clock {
            RecordClock::Real(_) => call.run_ns,
            RecordClock::Simulated(_) => call.done_ns.saturating_sub(call.committed_ns),
        };
        let start_ns = end.saturating_sub(wall_ns);
        self.span.get_or_insert((start_ns, end));
        let ranks = call
            .observed
            .iter()
            .map(|(rank, rank_times)| {
                let phases_by_rank = phases_by_rank.as_mut().map(|l| l.remove(rank).unwrap_or_default());
                let phases = phases_by_rank
                    .unwrap_or_else(|| self.phases_end_to_end(*rank, meta, rank_times, start_ns));
                RankChunk {
                    rank: *rank,
                    phases,
                    state_digest: rank_times.state.to_string(),
                    trace_digest: rank_times.trace.to_string(),
                    memory: self.memory_record(*rank, rank_times),
                }
            })
            .collect();
        let output = call.observed.values().next().map_or(String::new(), |o| o.output.to_string());
        let line = ChunkRecord {
            chunk,
            request: Some(request),
            call_id: call.call_id,
            cache_epoch: call.plan.cache_epoch,
            start_frame: u64::from(meta.start_frame()),
            prompt: settings.prompt.clone(),
            seed: settings.seed,
            cut: settings.cut,
            step_list: settings.step_list.clone(),
            bias: settings.bias,
            weights: settings.weights.clone(),
            evicted_frames: call.plan.evicted_frames,
            latents_digest: output,
            decoder_psnr_db: None,
            frames: 0,
            start_ns,
            wall_ns,
            queue_in: call.queued_in,
            queue_out: call.queued_out,
            ranks,
            pipeline: Some(pipeline),
        };
        self.finished.insert(chunk, line);
    }

    /// Places a rank's phases end to end from `start_ns`, by their durations.
    fn phases_end_to_end(
        &self,
        rank: u32,
        meta: &CallMeta,
        observed: &CallObservation,
        start_ns: u64,
    ) -> Vec<PhaseRecord> {
        let mut at = start_ns;
        let mut classes = observed.phase_classes.iter();
        let phases = meta.phases.iter().zip(&observed.phase_ns).map(|(p, ns)| {
            let begun = at;
            at += ns;
            PhaseRecord {
                classes: classes.next().into_iter().flatten().map(to_class_work).collect(),
                name: p.program.clone(),
                stream: "compute".into(),
                start_ns: begun,
                end_ns: at,
                collectives: self.collective_counts.get(&(p.program.clone(), rank)).copied().unwrap_or(0),
                waits: None,
            }
        });
        phases.collect()
    }

    /// Returns the times of a call that ended at `end`, on the record's clock. The leader's own
    /// work on the chunk is not known yet.
    fn pipeline_times(&mut self, call: &CallRecord, end: u64) -> PipelineTimes {
        let at = |ns: u64| end.saturating_sub(call.done_ns.saturating_sub(ns));
        let before = self.previous_call.replace((call.committed_ns, call.done_ns));
        let since = |ns: u64| call.committed_ns.saturating_sub(ns);
        // The leader's own work does not count as generator time, even if the generator waits for
        // it.
        let intervals = self.shared_device_intervals.as_mut().map(std::mem::take).unwrap_or_default();
        let overlaps = intervals.iter().map(|(from, to)| to.saturating_sub(call.committed_ns.max(*from)));
        let held_ns: u64 = overlaps.sum();
        PipelineTimes {
            decided_ns: at(call.decided_ns),
            ready_ns: at(call.ready_ns),
            done_ns: end,
            period_ns: before.map_or(0, |(committed, _)| since(committed)),
            stage0_ns: 0,
            stage1_ns: call.done_ns.saturating_sub(call.committed_ns).saturating_sub(held_ns),
            idle_ns: before.map_or(0, |(_, done)| since(done)),
            digest_ns: call.observed.values().map(|o| o.digest_ns).max().unwrap_or(0),
        }
    }

    /// Records the leader's own work on a chunk, outside the mesh.
    pub(crate) fn record_media_laps(&mut self, chunk: u32, laps: Vec<MediaInterval>) {
        let RecordClock::Real(start) = self.clock else { return };
        let ns = |at: Instant| u64::try_from(at.duration_since(start).as_nanos()).unwrap_or(u64::MAX);
        for lap in laps {
            self.record_media_interval(chunk, lap.name, ns(lap.begun), ns(lap.ended));
        }
    }

    /// Records one interval of the leader's own work, given on the record's clock.
    pub(crate) fn record_media_interval(&mut self, chunk: u32, name: &str, start_ns: u64, end_ns: u64) {
        if let Some(intervals) = &mut self.shared_device_intervals {
            intervals.push((start_ns, end_ns));
        }
        let (name, stream) = (name.into(), "decode".into());
        let phase = PhaseRecord { name, stream, start_ns, end_ns, ..PhaseRecord::default() };
        self.media_phases.entry(chunk).or_default().push(phase);
    }

    /// Checks that the record is still in the run directory.
    pub(crate) fn check_in_place(&self) -> Result<(), Diagnostic> {
        check_in_place(&self.file, &self.path)
    }

    /// Records that a chunk is on disk as `frames` frames.
    pub(crate) fn record_delivery(
        &mut self,
        chunk: u32,
        frames: u32,
        latents: &[u8],
        decoder_psnr_db: Option<f64>,
    ) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        let end = self.now_ns();
        if let Some(golden) = &mut self.golden_hash {
            golden.update(latents);
        }
        self.chunks += 1;
        self.frames += u64::from(frames);
        if let Some(span) = &mut self.span {
            span.1 = end;
        }
        let own = self.media_phases.remove(&chunk).unwrap_or_default();
        // Chunks are delivered in order, so entries of earlier chunks were discarded by a cut.
        self.media_phases.retain(|c, _| *c > chunk);
        self.finished.retain(|c, _| *c >= chunk);
        let Some(mut line) = self.finished.remove(&chunk) else { return Ok(()) };
        line.frames = frames;
        // JSON has no infinity; equal frames have no noise to state.
        line.decoder_psnr_db = decoder_psnr_db.filter(|ratio| ratio.is_finite());
        // The ranks' digest also covers pixels if they decode; a simulated run has no latents.
        if !latents.is_empty() {
            line.latents_digest = Digest::hash_bytes(latents).to_string();
        }
        line.wall_ns = end.saturating_sub(line.start_ns);
        if let Some(pipeline) = &mut line.pipeline {
            pipeline.stage0_ns = own.iter().map(|p| p.end_ns.saturating_sub(p.start_ns)).sum();
        }
        match line.ranks.first_mut().filter(|r| r.rank == 0) {
            Some(leader) => leader.phases.extend(own),
            // A leader outside the mesh holds no caches and issues no collectives.
            None => line.ranks.insert(
                0,
                RankChunk {
                    rank: 0,
                    phases: own,
                    state_digest: String::new(),
                    trace_digest: String::new(),
                    memory: None,
                },
            ),
        }
        self.write_line(&RecordLine::Chunk(line))
    }

    /// Writes the end line, once. `complete` states whether every requested chunk is on disk.
    pub(crate) fn write_end(&mut self, failure: Option<&Failure>, complete: bool) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        let wall_ns = self.span.map_or(0, |(a, b)| b.saturating_sub(a));
        let status = match (failure, complete) {
            (Some(_), _) => RunStatus::Failed,
            (None, true) => RunStatus::Complete,
            (None, false) => RunStatus::Interrupted,
        };
        let end = RunEnd {
            status,
            cause: failure.map(failure_cause),
            chunks: self.chunks,
            frames: self.frames,
            wall_ns,
            fps: if wall_ns == 0 { 0.0 } else { self.frames as f64 / (wall_ns as f64 / 1e9) },
            output_complete: complete && failure.is_none(),
            golden: self.golden_hash.as_ref().map_or(String::new(), |g| g.finalize().to_hex().to_string()),
        };
        self.write_line(&RecordLine::End(end))?;
        self.ended = true;
        self.file.sync_data().map_err(|e| write_error(&self.path, &e))
    }
}

/// Converts the work of a class to its form in the record.
fn to_class_work(work: &OpClassWork) -> ClassWork {
    let OpClassWork { class, ops, ns, sent_bytes } = work.clone();
    ClassWork { class, ops, ns, sent_bytes }
}

/// Converts a failure to its form in the record.
pub(crate) fn failure_cause(f: &Failure) -> FailureCause {
    FailureCause {
        class: class_name(f.class).into(),
        exit_code: u8::try_from(f.class.exit_code()).unwrap_or(u8::MAX),
        rank: f.rank,
        code: Some(f.code.clone()),
        message: f.text.clone(),
    }
}

fn class_name(class: FailureClass) -> &'static str {
    class.as_str()
}
