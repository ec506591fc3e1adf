//! `tessera.runtime.SessionTrace` and `SessionRecord`: when the ranks of a session ran which op, and its calls.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use tessera::arrays::{ArrayRunRecord, ArrayTrace, ArrayTraceEvent, RunDevice};
use tessera::files::write_file;

use crate::errors::OrRaise;

/// The trace of the calls of a session.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct SessionTrace {
    pub(crate) trace: ArrayTrace,
}

/// An event of a trace.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct TraceEvent {
    event: ArrayTraceEvent,
}

/// What a session ran.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct SessionRecord {
    pub(crate) record: ArrayRunRecord,
}

/// A completed call of a session.
#[pyclass(frozen, get_all, module = "tessera.runtime")]
pub(crate) struct CallRecord {
    number: u64,
    program: String,
    start: f64,
    end: f64,
}

#[pymethods]
impl SessionTrace {
    /// The events in order of their start.
    #[getter]
    fn events(&self) -> Vec<TraceEvent> {
        self.trace.events.iter().map(|event| TraceEvent { event: event.clone() }).collect()
    }

    /// The record of the session when the trace was taken.
    #[getter]
    fn record(&self) -> SessionRecord {
        SessionRecord { record: self.trace.record.clone() }
    }

    /// The numbers of the streams, by name.
    #[getter]
    fn stream_ids(&self) -> BTreeMap<String, u32> {
        self.trace.stream_ids.by_name().clone()
    }

    /// By how many seconds the times of each joined rank may be off beside those of rank 0.
    #[getter]
    fn clock_errors(&self) -> BTreeMap<u32, f64> {
        self.trace.clock_errors_ns.iter().map(|(rank, error)| (*rank, to_seconds(*error))).collect()
    }

    /// Writes the trace as JSON for Perfetto and chrome://tracing.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| write_file(&path, self.trace.to_perfetto().as_bytes())).or_raise(py)
    }

    pub(crate) fn __repr__(&self) -> String {
        let (events, calls) = (self.trace.events.len(), self.trace.record.calls.len());
        format!("SessionTrace({events} events of {calls} calls on {} ranks)", self.trace.record.ranks)
    }
}

#[pymethods]
impl TraceEvent {
    #[getter]
    fn rank(&self) -> u32 {
        self.event.rank
    }

    /// Number of the call, from 1.
    #[getter]
    fn call(&self) -> u64 {
        self.event.call
    }

    #[getter]
    fn program(&self) -> &str {
        &self.event.program
    }

    /// Name of the op's stream.
    #[getter]
    fn stream(&self) -> &str {
        &self.event.stream
    }

    /// Number of the stream.
    #[getter]
    fn stream_id(&self) -> u32 {
        self.event.stream_id
    }

    /// Name of the op, or of the collective that is issued, in flight or waited for.
    #[getter]
    fn op(&self) -> &'static str {
        self.event.op
    }

    /// What the rank did: "compute", "issue", "in flight" or "wait".
    #[getter]
    fn kind(&self) -> &'static str {
        self.event.kind.name()
    }

    /// Index of the op in the program of the rank.
    #[getter]
    fn op_index(&self) -> u32 {
        self.event.op_index
    }

    /// Index of the op that issued the collective.
    #[getter]
    fn issued_by(&self) -> Option<u32> {
        self.event.issued_by
    }

    /// Start, in seconds since the ranks were loaded.
    #[getter]
    fn start(&self) -> f64 {
        to_seconds(self.event.start_ns)
    }

    /// End, in seconds since the ranks were loaded.
    #[getter]
    fn end(&self) -> f64 {
        to_seconds(self.event.end_ns)
    }

    fn __repr__(&self) -> String {
        let ArrayTraceEvent { rank, call, stream, stream_id, op, kind, .. } = &self.event;
        let (kind, start, end) = (kind.name(), self.start(), self.end());
        format!(
            "TraceEvent(rank={rank}, call={call}, stream={stream:?}, stream_id={stream_id}, op={op:?}, kind={kind:?}, \
             start={start:.9}, end={end:.9})"
        )
    }
}

#[pymethods]
impl SessionRecord {
    /// Digest of the plan.
    #[getter]
    fn plan_digest(&self) -> &str {
        &self.record.plan
    }

    /// Axes and sizes of the mesh.
    #[getter]
    fn mesh(&self) -> &str {
        &self.record.mesh
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> u32 {
        self.record.ranks
    }

    /// Where the ranks are: "threads" or "processes".
    #[getter]
    fn place(&self) -> &'static str {
        self.record.place.name()
    }

    /// Device of the ranks: "cpu" or "gpu".
    #[getter]
    fn device(&self) -> &'static str {
        match self.record.device {
            RunDevice::Cuda => "gpu",
            // No array program is simulated.
            RunDevice::Cpu | RunDevice::Sim => "cpu",
        }
    }

    /// The completed calls, oldest first.
    #[getter]
    fn calls(&self) -> Vec<CallRecord> {
        let calls = self.record.calls.iter().map(|call| CallRecord {
            number: call.number,
            program: call.program.clone(),
            start: to_seconds(call.start_ns),
            end: to_seconds(call.end_ns),
        });
        calls.collect()
    }

    /// Number of all completed calls.
    #[getter]
    fn call_count(&self) -> u64 {
        self.record.call_count
    }

    fn __repr__(&self) -> String {
        let ArrayRunRecord { plan, mesh, ranks, place, call_count, .. } = &self.record;
        format!(
            "SessionRecord(plan {}, mesh {mesh}, {ranks} {}, {call_count} calls)",
            plan.get(..12).unwrap_or(plan),
            place.name()
        )
    }
}

#[pymethods]
impl CallRecord {
    /// Duration in seconds, from the inputs to the outputs.
    #[getter]
    fn seconds(&self) -> f64 {
        self.end - self.start
    }

    fn __repr__(&self) -> String {
        format!(
            "CallRecord(number={}, program={:?}, seconds={:.9})",
            self.number,
            self.program,
            self.seconds()
        )
    }
}

fn to_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
