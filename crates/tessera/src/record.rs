//! The record of a run while it runs: lines that each say something finished.
//!
//! A chunk's line is written when the chunk is on disk, so a record never claims more than the folder holds.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_report::record::{Cause, Chunk, End, Event, Line, Phase, Pipeline, RankChunk, Status};
use tessera_runtime::leader::CallRecord;
use tessera_runtime::wire::CallMeta;
use tessera_runtime::{Failure, FailureClass};
use tessera_verify::SealedPlan;

use crate::files::unwritable;
use crate::studio::Lap;

/// File name in a run's folder.
pub(crate) const RECORD: &str = "record.jsonl";

/// What the event of a chunk that was given up for a cut is called.
pub(crate) const DROPPED: &str = "dropped";

/// Appends to a run's record.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    path: PathBuf,
    file: File,
    clock: Clock,
    /// Chunks that every rank has finished and that are not delivered.
    finished: BTreeMap<u32, Chunk>,
    /// The leader's own work on chunks that are not delivered.
    studio: BTreeMap<u32, Vec<Phase>>,
    /// Of all latents; none where none are computed.
    golden: Option<blake3::Hasher>,
    chunks: u32,
    dropped: u32,
    frames: u64,
    /// When the first call began and the last delivery ended.
    span: Option<(u64, u64)>,
    /// When the chunk before was committed and done, on the leader's clock.
    before: Option<(u64, u64)>,
    /// The leader's own work that had the device of a rank of the mesh, from when to when, since the last call ended; none
    /// where it has one of its own or nobody knows.
    held: Option<Vec<(u64, u64)>>,
    /// Collectives of each phase on each rank, from the seal.
    collectives: BTreeMap<(String, u32), u32>,
    /// Nothing follows the end.
    ended: bool,
}

/// What tells the time of a record, in nanoseconds since the run's start.
#[derive(Debug, Clone, Copy)]
enum Clock {
    Real(Instant),
    /// The instant at which a modelled run is.
    Modelled(u64),
}

/// What each rank did in a call, by the clock of the record.
pub(crate) type Laid = BTreeMap<u32, Vec<Phase>>;

/// What a chunk was asked to be.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) prompt: String,
    pub(crate) seed: u64,
    pub(crate) cut: bool,
}

impl RecordWriter {
    /// Opens the record that the launcher began.
    pub(crate) fn open(dir: &Path) -> Result<RecordWriter, Diagnostic> {
        let path = dir.join(RECORD);
        let file = OpenOptions::new().append(true).open(&path).map_err(|e| unwritable(&path, &e))?;
        Ok(RecordWriter {
            path,
            file,
            clock: Clock::Real(Instant::now()),
            finished: BTreeMap::new(),
            studio: BTreeMap::new(),
            golden: Some(blake3::Hasher::new()),
            chunks: 0,
            dropped: 0,
            frames: 0,
            span: None,
            before: None,
            held: None,
            collectives: BTreeMap::new(),
            ended: false,
        })
    }

    /// The same for a modelled run, whose clock is [`RecordWriter::at`] and whose latents are no numbers. `shares` says
    /// whether the leader's own work is done on the device of a rank of the mesh.
    pub(crate) fn modelled(dir: &Path, shares: bool) -> Result<RecordWriter, Diagnostic> {
        let held = shares.then(Vec::new);
        Ok(RecordWriter { clock: Clock::Modelled(0), golden: None, held, ..RecordWriter::open(dir)? })
    }

    /// Sets the clock of a modelled run.
    pub(crate) fn at(&mut self, now_ns: u64) {
        self.clock = Clock::Modelled(now_ns);
    }

    /// What the seal says of each phase on each rank.
    pub(crate) fn census(&mut self, plan: &SealedPlan) {
        for phase in plan.phases() {
            for rank in plan.mesh().iter() {
                let n =
                    plan.census(phase, rank).map_or(0, |c| u32::try_from(c.collectives).unwrap_or(u32::MAX));
                self.collectives.insert((phase.clone(), rank.0), n);
            }
        }
    }

    /// Requests that came to an end: chunks on disk, and those that were given up for a cut.
    pub(crate) fn settled(&self) -> u32 {
        self.chunks + self.dropped
    }

    /// A request was given up for a cut.
    pub(crate) fn dropped(&mut self, request: u64, epoch: u32, why: &str) -> Result<(), Diagnostic> {
        self.dropped += 1;
        self.event(DROPPED, &format!("request {request}, of epoch {epoch}: {why}"))
    }

    /// Nanoseconds since this writer began: the clock of the record.
    pub(crate) fn now_ns(&self) -> u64 {
        match self.clock {
            Clock::Real(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Clock::Modelled(now_ns) => now_ns,
        }
    }

    fn line(&mut self, line: &Line) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        // One write a line, so that a killed process leaves at most one cut line.
        self.file.write_all(line.to_json().as_bytes()).map_err(|e| unwritable(&self.path, &e))
    }

    pub(crate) fn event(&mut self, what: &str, detail: &str) -> Result<(), Diagnostic> {
        let at_ns = self.now_ns();
        self.line(&Line::Event(Event { at_ns, what: what.into(), detail: detail.into() }))
    }

    /// Every rank finished a call. `asked` is what its chunk was asked to be; none for a call without a chunk, and for one
    /// that is given up. Without `laid`, phases are laid end to end from the call's commit: ranks send durations, not
    /// clocks.
    pub(crate) fn call(&mut self, call: &CallRecord, asked: Option<&Asked>, mut laid: Option<Laid>) {
        let end = self.now_ns();
        let pipeline = self.pipeline(call, end);
        let (Some(meta), Some(request), Some(asked)) = (&call.plan.meta, call.request, asked) else { return };
        let chunk = call.plan.chunk;
        // What cannot be written here cannot be delivered either: the delivery reports it.
        if asked.cut {
            let _ = self.event("cut", &format!("chunk {chunk} begins epoch {}", call.plan.cache_epoch));
        }
        if let Some(shift) = meta.phases.iter().find(|p| p.program == "rebase").and_then(|p| p.int("shift")) {
            let _ = self.event("rebase", &format!("chunk {chunk}: positions move by {shift} frames"));
        }
        if let Some(n) = call.observed.values().map(|o| o.compensated).max().filter(|n| *n > 0) {
            let _ = self.event("compensated sums", &format!("chunk {chunk}: {n} sums over ranks cancelled"));
        }
        let wall_ns = match self.clock {
            Clock::Real(_) => call.run_ns,
            Clock::Modelled(_) => call.done_ns.saturating_sub(call.committed_ns),
        };
        let start_ns = end.saturating_sub(wall_ns);
        self.span.get_or_insert((start_ns, end));
        let ranks = call
            .observed
            .iter()
            .map(|(rank, seen)| {
                let laid = laid.as_mut().map(|l| l.remove(rank).unwrap_or_default());
                let phases = laid.unwrap_or_else(|| self.end_to_end(*rank, meta, &seen.phase_ns, start_ns));
                RankChunk {
                    rank: *rank,
                    phases,
                    state_digest: seen.state.to_string(),
                    trace_digest: seen.trace.to_string(),
                }
            })
            .collect();
        let output = call.observed.values().next().map_or(String::new(), |o| o.output.to_string());
        let line = Chunk {
            chunk,
            request: Some(request),
            call_id: call.call_id,
            cache_epoch: call.plan.cache_epoch,
            start_frame: u64::from(meta.start_frame),
            prompt: asked.prompt.clone(),
            seed: asked.seed,
            cut: asked.cut,
            latents_digest: output,
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

    /// A rank's phases from an instant on, by their durations.
    fn end_to_end(&self, rank: u32, meta: &CallMeta, durations: &[u64], start_ns: u64) -> Vec<Phase> {
        let mut at = start_ns;
        let phases = meta.phases.iter().zip(durations).map(|(p, ns)| {
            let begun = at;
            at += ns;
            Phase {
                name: p.program.clone(),
                stream: "compute".into(),
                start_ns: begun,
                end_ns: at,
                collectives: self.collectives.get(&(p.program.clone(), rank)).copied().unwrap_or(0),
                waits: None,
            }
        });
        phases.collect()
    }

    /// The instants of a call that ended at `end`, on the clock of the record. What the leader does for the chunk
    /// is not known yet.
    fn pipeline(&mut self, call: &CallRecord, end: u64) -> Pipeline {
        let at = |ns: u64| end.saturating_sub(call.done_ns.saturating_sub(ns));
        let before = self.before.replace((call.committed_ns, call.done_ns));
        let since = |ns: u64| call.committed_ns.saturating_sub(ns);
        // The leader's own work is not the generator's, also where the generator waits for it.
        let held = self.held.as_mut().map(std::mem::take).unwrap_or_default();
        let own = held.iter().map(|(from, to)| to.saturating_sub(call.committed_ns.max(*from)));
        let held_ns: u64 = own.sum();
        Pipeline {
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

    /// Work of the leader on a chunk, beside the mesh.
    pub(crate) fn studio(&mut self, chunk: u32, laps: Vec<Lap>) {
        let Clock::Real(start) = self.clock else { return };
        let ns = |at: Instant| u64::try_from(at.duration_since(start).as_nanos()).unwrap_or(u64::MAX);
        for lap in laps {
            self.lap(chunk, lap.name, ns(lap.begun), ns(lap.ended));
        }
    }

    /// The same, one piece between two instants of the record.
    pub(crate) fn lap(&mut self, chunk: u32, name: &str, start_ns: u64, end_ns: u64) {
        if let Some(held) = &mut self.held {
            held.push((start_ns, end_ns));
        }
        let (name, stream) = (name.into(), "decode".into());
        let phase = Phase { name, stream, start_ns, end_ns, ..Phase::default() };
        self.studio.entry(chunk).or_default().push(phase);
    }

    /// A chunk is on disk, as so many frames.
    pub(crate) fn delivered(&mut self, chunk: u32, frames: u32, latents: &[u8]) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        let end = self.now_ns();
        if let Some(golden) = &mut self.golden {
            golden.update(latents);
        }
        self.chunks += 1;
        self.frames += u64::from(frames);
        if let Some(span) = &mut self.span {
            span.1 = end;
        }
        let own = self.studio.remove(&chunk).unwrap_or_default();
        // Chunks come in order: what is left of earlier ones was discarded by a cut.
        self.studio.retain(|c, _| *c > chunk);
        self.finished.retain(|c, _| *c >= chunk);
        let Some(mut line) = self.finished.remove(&chunk) else { return Ok(()) };
        line.frames = frames;
        line.wall_ns = end.saturating_sub(line.start_ns);
        if let Some(pipeline) = &mut line.pipeline {
            pipeline.stage0_ns = own.iter().map(|p| p.end_ns.saturating_sub(p.start_ns)).sum();
        }
        match line.ranks.first_mut().filter(|r| r.rank == 0) {
            Some(leader) => leader.phases.extend(own),
            // A leader outside the mesh holds no caches and issues no collectives.
            None => line.ranks.insert(
                0,
                RankChunk { rank: 0, phases: own, state_digest: String::new(), trace_digest: String::new() },
            ),
        }
        self.line(&Line::Chunk(line))
    }

    /// Writes the end, once. `complete` says whether every chunk that was asked for is on disk.
    pub(crate) fn end(&mut self, failure: Option<&Failure>, complete: bool) -> Result<(), Diagnostic> {
        if self.ended {
            return Ok(());
        }
        let wall_ns = self.span.map_or(0, |(a, b)| b.saturating_sub(a));
        let status = match (failure, complete) {
            (Some(_), _) => Status::Failed,
            (None, true) => Status::Complete,
            (None, false) => Status::Interrupted,
        };
        let end = End {
            status,
            cause: failure.map(cause),
            chunks: self.chunks,
            frames: self.frames,
            wall_ns,
            fps: if wall_ns == 0 { 0.0 } else { self.frames as f64 / (wall_ns as f64 / 1e9) },
            output_complete: complete && failure.is_none(),
            golden: self.golden.as_ref().map_or(String::new(), |g| g.finalize().to_hex().to_string()),
        };
        self.line(&Line::End(end))?;
        self.ended = true;
        self.file.sync_data().map_err(|e| unwritable(&self.path, &e))
    }
}

/// A failure in the record's words.
pub(crate) fn cause(f: &Failure) -> Cause {
    Cause {
        class: class_name(f.class).into(),
        exit_code: u8::try_from(f.class.exit_code()).unwrap_or(u8::MAX),
        rank: f.rank,
        code: Some(f.code.clone()),
        message: f.text.clone(),
    }
}

fn class_name(class: FailureClass) -> &'static str {
    class.words()
}
