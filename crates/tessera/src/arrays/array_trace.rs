//! The trace of a run of array programs: when each op ran on each rank, and on which stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::Rank;
use tessera_report::perfetto::trace_json;
use tessera_report::record::RunKind;
use tessera_report::timeline::{RankName, Timeline, TimelineChunk, TimelineSpan};
use tessera_runtime::wire::{CollectiveTimes, PhaseOpTimes};

use super::array_plan::ArrayPlan;
use super::array_program::PHASE_PREFIX;
use super::clock_alignment::ClockOffset;
use super::run_record::{ArrayRunRecord, TimedCall};
use super::stream_ids::StreamIds;

/// The trace of the calls that a run keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayTrace {
    /// The record of the run.
    pub record: ArrayRunRecord,
    /// Numbers of the streams.
    pub stream_ids: StreamIds,
    /// The events in order of their start. Those of a rank at one instant are in program order.
    pub events: Vec<ArrayTraceEvent>,
    /// By how many nanoseconds the times of a rank may be off beside those of rank 0, for ranks that joined over
    /// hosts; empty for the ranks of one host.
    pub clock_errors_ns: BTreeMap<u32, u64>,
}

/// What a rank did during an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ArrayTraceKind {
    /// It ran an op that needs no other rank.
    Compute,
    /// It issued a collective: other ranks may read its part from the end on.
    Issue,
    /// A collective was in flight, from its issue to the end of the wait.
    InFlight,
    /// It waited for the other ranks, and took the result of the collective.
    Wait,
}

/// An event of a trace. Times are nanoseconds since the ranks were loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayTraceEvent {
    /// Rank that ran the op.
    pub rank: u32,
    /// Number of the call, from 1.
    pub call: u64,
    /// Name of the program.
    pub program: Arc<str>,
    /// Name of the op's stream in the plan.
    pub stream: Arc<str>,
    /// Number of the stream.
    pub stream_id: u32,
    /// Name of the op, with the tag of its algorithm; that of its collective for every event of a collective.
    pub op: &'static str,
    /// What the rank did.
    pub kind: ArrayTraceKind,
    /// Index of the op in the program of the rank.
    pub op_index: u32,
    /// Index of the op that issued the collective; `None` for compute.
    pub issued_by: Option<u32>,
    /// Start of the event.
    pub start_ns: u64,
    /// End of the event, never before the start.
    pub end_ns: u64,
}

impl ArrayTraceKind {
    /// Returns the name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ArrayTraceKind::Compute => "compute",
            ArrayTraceKind::Issue => "issue",
            ArrayTraceKind::InFlight => "in flight",
            ArrayTraceKind::Wait => "wait",
        }
    }
}

impl ArrayTrace {
    /// Returns the trace in the format of Perfetto and `chrome://tracing`: a process for each rank, and a thread for each
    /// stream, whose number is that of the stream.
    #[must_use]
    pub fn to_perfetto(&self) -> String {
        trace_json(&self.to_timeline())
    }

    /// Returns the trace as the timeline of a chart.
    #[must_use]
    pub fn to_timeline(&self) -> Timeline {
        let call_number = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let ranks = (0..self.record.ranks).map(|rank| RankName { rank, name: format!("rank {rank}") });
        let chunks = self.record.calls.iter().map(|call| TimelineChunk {
            chunk: call_number(call.number),
            frames: 0,
            start_ns: call.start_ns,
            end_ns: call.end_ns,
            queue_lengths: (0, 0),
        });
        let spans = self.events.iter().map(|event| TimelineSpan {
            rank: event.rank,
            stream: event.stream.to_string(),
            name: event.describe(),
            chunk: call_number(event.call),
            start_ns: event.start_ns,
            end_ns: event.end_ns,
            collectives: u32::from(event.kind == ArrayTraceKind::Issue),
            waits: None,
        });
        let mut timeline = Timeline {
            ranks: ranks.collect(),
            chunks: chunks.collect(),
            spans: spans.collect(),
            generates: RunKind::Arrays,
            stream_ids: self.stream_ids.by_name().clone(),
            ..Timeline::default()
        };
        timeline.sort_and_name();
        timeline
    }
}

impl ArrayTraceEvent {
    /// Returns the op, with what the rank did of a collective.
    pub(super) fn describe(&self) -> String {
        match self.kind {
            ArrayTraceKind::Compute => self.op.to_string(),
            kind => format!("{} {}", self.op, kind.name()),
        }
    }
}

/// Returns the events of calls of a plan whose ranks were loaded at a time of the monotonic clock. `offsets` are those of the
/// ranks' clocks in each call; none if they have the clock of the caller.
pub(super) fn expand_ops(
    plan: &ArrayPlan,
    ids: &StreamIds,
    loaded_ns: u64,
    calls: &[TimedCall],
    offsets: &[BTreeMap<u32, ClockOffset>],
) -> Vec<ArrayTraceEvent> {
    let mut events = Vec::new();
    for (at, call) in calls.iter().enumerate() {
        let phase = format!("{PHASE_PREFIX}{}", call.record.program);
        for (rank, times) in &call.op_times {
            let Some(program) = plan.sealed.rank_program(&phase, Rank(*rank)) else { continue };
            let offset = offsets.get(at).and_then(|of_call| of_call.get(rank)).copied().unwrap_or_default();
            let base_ns = times.start_ns.saturating_add_signed(offset.offset_ns).saturating_sub(loaded_ns);
            let number = call.record.number;
            let name = Arc::from(call.record.program.as_str());
            let streams = program.streams.iter().map(|stream| Arc::from(stream.as_str())).collect();
            let list = EventList { number, rank: *rank, name, streams, program, times, ids, base_ns };
            events.extend(list.events());
        }
    }
    events.sort_by_key(|event| (event.start_ns, event.rank, event.op_index));
    events
}

/// The ops of one rank in one call.
struct EventList<'a> {
    /// Number of the call.
    number: u64,
    rank: u32,
    /// Name of the program.
    name: Arc<str>,
    /// Names of the program's streams.
    streams: Vec<Arc<str>>,
    program: &'a Program,
    times: &'a PhaseOpTimes,
    ids: &'a StreamIds,
    /// Start of the first op, in nanoseconds since the ranks were loaded.
    base_ns: u64,
}

impl EventList<'_> {
    fn events(&self) -> Vec<ArrayTraceEvent> {
        let on_device = !self.times.ends_ns.is_empty();
        let ends: Vec<u64> = match on_device {
            true => self.times.ends_ns.clone(),
            false => self.times.begins_ns.iter().skip(1).copied().chain([self.times.end_ns]).collect(),
        };
        let collectives: BTreeMap<u32, &CollectiveTimes> =
            self.times.collectives.iter().map(|times| (times.op, times)).collect();
        let issuers = self.program.defining_ops();
        let mut events = Vec::new();
        for ((index, op), (begin, end)) in
            (0..).zip(&self.program.ops).zip(self.times.begins_ns.iter().copied().zip(ends))
        {
            let issuer = match op.opcode {
                o if o.is_collective() => Some(index),
                Opcode::Wait => {
                    let ticket =
                        op.operands.first().and_then(|v| issuers.get(v.0 as usize).copied().flatten());
                    ticket.and_then(|issue| u32::try_from(issue).ok())
                }
                _ => None,
            };
            match issuer.and_then(|issuer| collectives.get(&issuer)) {
                Some(times) if op.opcode == Opcode::Wait => {
                    let during = (times.waiting_ns, times.completed_ns);
                    events.push(self.event(index, op, (ArrayTraceKind::Wait, Some(times.op)), during));
                }
                Some(times) => {
                    let mut add = |kind, during| {
                        events.push(self.event(index, op, (kind, Some(times.op)), during));
                    };
                    add(ArrayTraceKind::Issue, (begin, times.issued_ns));
                    add(ArrayTraceKind::InFlight, (times.issued_ns, times.completed_ns));
                    if !op.issue {
                        add(ArrayTraceKind::Wait, (times.waiting_ns, times.completed_ns));
                    }
                }
                None if op.is_source() || op.opcode == Opcode::EventRecord => {}
                // The kernel of another op runs it.
                None if on_device && begin == end => {}
                None => events.push(self.event(index, op, (ArrayTraceKind::Compute, None), (begin, end))),
            }
        }
        events
    }

    fn event(
        &self,
        op_index: u32,
        op: &Op,
        (kind, issued_by): (ArrayTraceKind, Option<u32>),
        (start_ns, end_ns): (u64, u64),
    ) -> ArrayTraceEvent {
        let stream = self.streams.get(op.stream.0 as usize).cloned().unwrap_or_else(|| Arc::from("compute"));
        let named = issued_by.and_then(|issuer| self.program.ops.get(issuer as usize)).unwrap_or(op);
        ArrayTraceEvent {
            rank: self.rank,
            call: self.number,
            program: Arc::clone(&self.name),
            stream_id: self.ids.by_name().get(&*stream).copied().unwrap_or_default(),
            stream,
            op: named.timeline_name(),
            kind,
            op_index,
            issued_by,
            start_ns: self.base_ns + start_ns,
            end_ns: self.base_ns + end_ns.max(start_ns),
        }
    }
}
