//! `Session.prefetch_report`: what the ranks of a session did with the experts of registered layers.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use tessera::arrays::{CallTransfers, LayerTransfers, TransferEvent};

/// What a session did with the experts of registered layers, in its last calls.
#[pyclass(frozen, module = "tessera.runtime")]
pub(crate) struct PrefetchReport {
    layers: Vec<LayerPrefetch>,
    events: Vec<IoEvent>,
}

#[pymethods]
impl PrefetchReport {
    /// One entry per call, rank and layer, in this order.
    #[getter]
    fn layers(&self) -> Vec<LayerPrefetch> {
        self.layers.clone()
    }

    /// The transfers of single matrices, by call and rank, in the order in which they ended.
    #[getter]
    fn events(&self) -> Vec<IoEvent> {
        self.events.clone()
    }

    /// Number of experts for whose transfer layers had to wait, because nothing had requested them before.
    #[getter]
    fn stalls(&self) -> u64 {
        self.layers.iter().map(|layer| layer.stalls).sum()
    }

    /// Number of used experts that lay in fast memory, or were on their way, when their layer started.
    #[getter]
    fn hits(&self) -> u64 {
        self.layers.iter().map(|layer| layer.hits).sum()
    }

    fn __repr__(&self) -> String {
        format!("PrefetchReport({} hits, {} stalls)", self.hits(), self.stalls())
    }
}

impl PrefetchReport {
    /// Converts the reports of ranks; `stream_ids` numbers the streams.
    pub(crate) fn new(calls: Vec<CallTransfers>, stream_ids: &BTreeMap<String, u32>) -> PrefetchReport {
        let mut report = PrefetchReport { layers: Vec::new(), events: Vec::new() };
        for CallTransfers { rank, call, program, layers, events } in calls {
            let program = program.strip_prefix("array.").unwrap_or(&program);
            let entry = |layer| LayerPrefetch::new((rank, call, program), layer);
            report.layers.extend(layers.into_iter().map(entry));
            report.events.extend(events.into_iter().map(|event| IoEvent::new(event, stream_ids)));
        }
        report
    }
}

/// What one rank did with the experts of one layer in one call.
#[pyclass(frozen, get_all, module = "tessera.runtime")]
#[derive(Clone)]
pub(crate) struct LayerPrefetch {
    call: u64,
    rank: u32,
    program: String,
    layer: u64,
    hits: u64,
    stalls: u64,
    prefetches: u64,
    prefetches_used: u64,
    prefetches_unused: u64,
    moved_bytes: u64,
    evicted: Vec<u64>,
    waited_ns: u64,
}

impl LayerPrefetch {
    fn new((rank, call, program): (u32, u64, &str), counts: LayerTransfers) -> LayerPrefetch {
        LayerPrefetch {
            call,
            rank,
            program: program.to_string(),
            layer: counts.layer,
            hits: counts.hits,
            stalls: counts.stalls,
            prefetches: counts.prefetches,
            prefetches_used: counts.prefetches_used,
            prefetches_unused: counts.prefetches_unused,
            moved_bytes: counts.moved_bytes,
            evicted: counts.evicted,
            waited_ns: counts.waited_ns,
        }
    }
}

#[pymethods]
impl LayerPrefetch {
    fn __repr__(&self) -> String {
        let LayerPrefetch { call, rank, layer, hits, stalls, evicted, .. } = self;
        format!(
            "LayerPrefetch(call={call}, rank={rank}, layer={layer}, hits={hits}, stalls={stalls}, evicted={evicted:?})"
        )
    }
}

/// A transfer of one matrix of an expert on a stream of a rank.
#[pyclass(frozen, get_all, module = "tessera.runtime")]
#[derive(Clone)]
pub(crate) struct IoEvent {
    rank: u32,
    call: u64,
    stream: String,
    stream_id: Option<u32>,
    op: String,
    start_ns: u64,
    end_ns: u64,
}

impl IoEvent {
    fn new(event: TransferEvent, stream_ids: &BTreeMap<String, u32>) -> IoEvent {
        let TransferEvent { rank, call, stream, op, start_ns, end_ns } = event;
        let stream_id = stream_ids.get(&stream).copied();
        IoEvent { rank, call, stream, stream_id, op, start_ns, end_ns }
    }
}

#[pymethods]
impl IoEvent {
    fn __repr__(&self) -> String {
        format!("IoEvent(call={}, rank={}, stream={:?}, op={:?})", self.call, self.rank, self.stream, self.op)
    }
}
