//! The spans of a stream: one trace per delivered chunk, one per change, one per run.
//!
//! A trace for a whole run would never end, and no viewer opens one of a million spans. A run's number is an attribute of all spans
//! instead, and a change links to the chunk with its effect.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tessera_report::record::{ChunkRecord, PhaseRecord};

use super::TraceOptions;
use super::exporter::SpanExporter;
use super::span::{Attributes, Span, SpanContext, SpanEvent};
use crate::protocol::{Alarm, StreamFacts};

/// Most chunks whose record line has not appeared. The queues of the leader bound them, and this the memory.
const MAX_UNRECORDED_CHUNKS: usize = 64;
/// Most changes that wait for their chunk.
const MAX_WAITING_CHANGES: usize = 64;
/// How far the clock of a run may move against that of this host with each chunk.
const CLOCK_DRIFT_NS: i128 = 1_000_000;

/// Makes the spans of a stream and queues them for the collector.
#[derive(Debug)]
pub(crate) struct StreamTraces {
    exporter: Arc<SpanExporter>,
    run: Mutex<TracedRun>,
}

#[derive(Debug)]
struct TracedRun {
    number: u32,
    began_ns: u64,
    chunks: u32,
    /// When each chunk was delivered whose record line has not appeared.
    delivered: BTreeMap<u32, u64>,
    /// What to add to a time of the run's clock.
    clock_offset: Option<i128>,
    /// Changes whose chunk was not delivered.
    changes: Vec<WaitingChange>,
}

#[derive(Debug)]
struct WaitingChange {
    kind: &'static str,
    request: u64,
    accepted_ns: u64,
    answered_ns: u64,
}

impl StreamTraces {
    /// Creates the traces of a stream.
    pub(crate) fn new(exporter: Arc<SpanExporter>) -> StreamTraces {
        StreamTraces { exporter, run: Mutex::new(TracedRun::new(0, now_ns())) }
    }

    /// Returns what sends the spans.
    pub(crate) fn exporter(&self) -> &Arc<SpanExporter> {
        &self.exporter
    }

    /// Notes that a run begins.
    pub(crate) fn begin_run(&self, number: u32) {
        *self.lock() = TracedRun::new(number, now_ns());
    }

    /// Notes that the frames of a chunk are here.
    pub(crate) fn note_delivery(&self, chunk: u32) {
        let mut run = self.lock();
        run.chunks += 1;
        run.delivered.insert(chunk, now_ns());
        if run.delivered.len() > MAX_UNRECORDED_CHUNKS {
            run.delivered.pop_first();
        }
    }

    /// Notes that the leader has named the first request with a change. `waited` is the time since the change was requested.
    pub(crate) fn note_effect(&self, kind: &'static str, request: u64, waited: Duration) {
        let answered_ns = now_ns();
        let mut run = self.lock();
        let accepted_ns = answered_ns.saturating_sub(nanoseconds(waited));
        if run.changes.len() == MAX_WAITING_CHANGES {
            run.changes.remove(0);
        }
        run.changes.push(WaitingChange { kind, request, accepted_ns, answered_ns });
    }

    /// Queues the spans of a chunk that the record describes. A chunk that was not delivered here has none.
    pub(crate) fn add_chunk(&self, record: &ChunkRecord) {
        let mut run = self.lock();
        let Some(delivered_ns) = run.delivered.remove(&record.chunk) else { return };
        let spans = run.trace_chunk(record, delivered_ns);
        drop(run);
        self.exporter.push(spans);
    }

    /// Queues the span of the run, which has ended: with an alarm if it failed.
    pub(crate) fn end_run(&self, alarm: Option<&Alarm>) {
        let mut run = self.lock();
        let now = now_ns();
        let ended = std::mem::replace(&mut *run, TracedRun::new(0, now));
        drop(run);
        if ended.number > 0 {
            self.exporter.push(ended.into_spans(now, alarm));
        }
    }

    fn lock(&self) -> MutexGuard<'_, TracedRun> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns what all spans of a server have in common.
pub(crate) fn describe_resource(options: &TraceOptions, facts: &StreamFacts) -> Attributes {
    vec![
        ("service.name", options.service.as_str().into()),
        ("service.version", env!("CARGO_PKG_VERSION").into()),
        ("process.pid", std::process::id().into()),
        ("tessera.model", facts.model.as_str().into()),
        ("tessera.mesh", facts.mesh.as_str().into()),
        ("tessera.device", facts.device.into()),
        ("tessera.plan", facts.plan.as_str().into()),
    ]
}

impl TracedRun {
    fn new(number: u32, began_ns: u64) -> TracedRun {
        TracedRun {
            number,
            began_ns,
            chunks: 0,
            delivered: BTreeMap::new(),
            clock_offset: None,
            changes: Vec::new(),
        }
    }

    /// Returns the trace of a chunk and those of the changes that took effect with it.
    fn trace_chunk(&mut self, record: &ChunkRecord, delivered_ns: u64) -> Vec<Span> {
        let context = SpanContext::new_trace();
        let end_ns = record.start_ns + record.wall_ns;
        let offset = self.follow_clock(end_ns, delivered_ns);
        let at = |ns: u64| u64::try_from(i128::from(ns) + offset).unwrap_or(0);
        let request = record.request.unwrap_or(u64::from(record.chunk));
        let begins = |change: &mut WaitingChange| change.request <= request;
        let changes: Vec<Span> = self
            .changes
            .extract_if(.., begins)
            .map(|change| Span { links: vec![context], ..trace_change(self.number, &change, at(end_ns)) })
            .collect();
        let decided_ns = record.pipeline.map_or(record.start_ns, |p| p.decided_ns.min(record.start_ns));
        let chunk = Span {
            context,
            parent: None,
            name: "chunk".into(),
            start_ns: at(decided_ns),
            end_ns: at(end_ns),
            attributes: vec![
                ("tessera.run", self.number.into()),
                ("tessera.chunk", record.chunk.into()),
                ("tessera.request", request.into()),
                ("tessera.epoch", record.cache_epoch.into()),
                ("tessera.call", record.call_id.into()),
                ("tessera.cut", record.cut.into()),
                ("tessera.frames", record.frames.into()),
                ("tessera.queued_requests", record.queue_in.into()),
                ("tessera.queued_results", record.queue_out.into()),
            ],
            events: Vec::new(),
            links: changes.iter().map(|change| change.context).collect(),
            error: None,
        };
        let phases = record.ranks.iter().flat_map(|rank| rank.phases.iter().map(|phase| (rank.rank, phase)));
        let phases = phases.map(|(rank, phase)| Span {
            start_ns: at(phase.start_ns),
            end_ns: at(phase.end_ns),
            ..trace_phase(context, rank, phase)
        });
        std::iter::once(chunk).chain(phases).chain(changes).collect()
    }

    /// Returns what to add to times of the run's clock. A chunk is here some time after its last frame was written, so the
    /// smallest difference is the best one; it may grow slowly, because the clock of the host is adjusted.
    fn follow_clock(&mut self, end_ns: u64, delivered_ns: u64) -> i128 {
        let difference = i128::from(delivered_ns) - i128::from(end_ns);
        let offset = self.clock_offset.map_or(difference, |last| difference.min(last + CLOCK_DRIFT_NS));
        self.clock_offset = Some(offset);
        offset
    }

    /// Returns the span of the run, and those of changes without a chunk.
    fn into_spans(self, now: u64, alarm: Option<&Alarm>) -> Vec<Span> {
        let lost = self.changes.iter().map(|change| Span {
            error: Some("the run ended before a chunk with the change was delivered".into()),
            ..trace_change(self.number, change, now)
        });
        let alarm_event = |alarm: &Alarm| SpanEvent {
            name: "alarm",
            at_ns: now,
            attributes: vec![
                ("tessera.code", alarm.code.as_str().into()),
                ("tessera.title", alarm.title.as_str().into()),
                ("tessera.message", alarm.message.as_str().into()),
                ("tessera.restarts", alarm.restarts.into()),
            ],
        };
        let run = Span {
            context: SpanContext::new_trace(),
            parent: None,
            name: "run".into(),
            start_ns: self.began_ns,
            end_ns: now,
            attributes: vec![("tessera.run", self.number.into()), ("tessera.chunks", self.chunks.into())],
            events: alarm.map(alarm_event).into_iter().collect(),
            links: Vec::new(),
            error: alarm.map(|alarm| format!("{}: {}", alarm.code, alarm.message)),
        };
        std::iter::once(run).chain(lost).collect()
    }
}

/// Returns the span of a phase, without its times.
fn trace_phase(chunk: SpanContext, rank: u32, phase: &PhaseRecord) -> Span {
    let waits = phase.waits.as_ref().map(|waits| ("tessera.waits_ns", waits.total_ns.into()));
    let mut attributes = vec![
        ("tessera.rank", rank.into()),
        ("tessera.stream", phase.stream.as_str().into()),
        ("tessera.collectives", phase.collectives.into()),
    ];
    attributes.extend(waits);
    Span {
        context: chunk.new_span(),
        parent: Some(chunk),
        name: phase.name.clone(),
        start_ns: 0,
        end_ns: 0,
        attributes,
        events: Vec::new(),
        links: Vec::new(),
        error: None,
    }
}

/// Returns the span of a change until its chunk was delivered. It has no prompt: a collector may be read by people who may not
/// read prompts.
fn trace_change(run: u32, change: &WaitingChange, end_ns: u64) -> Span {
    let answer = SpanEvent { name: "requested", at_ns: change.answered_ns, attributes: Vec::new() };
    Span {
        context: SpanContext::new_trace(),
        parent: None,
        name: format!("change {}", change.kind),
        start_ns: change.accepted_ns,
        end_ns: end_ns.max(change.answered_ns),
        attributes: vec![("tessera.run", run.into()), ("tessera.request", change.request.into())],
        events: vec![answer],
        links: Vec::new(),
        error: None,
    }
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanoseconds)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
