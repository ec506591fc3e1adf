//! The metrics that `/metrics` shows in the text format of OpenMetrics. `docs/reference/serve-metrics.md` lists them.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::protocol::{StreamFacts, StreamState};

type FloatGauge = Gauge<f64, AtomicU64>;

/// The metrics of a server.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) chunks: Counter,
    pub(crate) frames: Counter,
    pub(crate) chunk_period: Histogram,
    pub(crate) call_time: Histogram,
    pub(crate) phase_time: Family<PhaseLabels, FloatGauge>,
    pub(crate) clients: Gauge,
    pub(crate) frames_sent: Family<FormatLabels, Counter>,
    pub(crate) frames_dropped: Counter,
    pub(crate) changes: Family<ChangeLabels, Counter>,
    pub(crate) change_wait: Histogram,
    pub(crate) runs: Counter,
    pub(crate) failures: Family<CodeLabels, Counter>,
    pub(crate) refused: Family<CodeLabels, Counter>,
    pub(crate) queued_requests: Gauge,
    pub(crate) queued_results: Gauge,
    pub(crate) overlap_score: FloatGauge,
    pub(crate) spans: Family<SpanLabels, Counter>,
    state: Family<StateLabels, Gauge>,
}

/// Labels of the time of a phase.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct PhaseLabels {
    pub(crate) phase: String,
}

/// Labels of sent frames.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FormatLabels {
    pub(crate) format: &'static str,
}

/// Labels of changes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ChangeLabels {
    pub(crate) change: &'static str,
    pub(crate) outcome: &'static str,
}

/// Labels of failures and refusals.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct CodeLabels {
    pub(crate) code: String,
}

/// Labels of spans.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct SpanLabels {
    pub(crate) outcome: &'static str,
}

/// Labels of the state of the stream.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

impl Metrics {
    /// Creates the metrics of a stream.
    pub(crate) fn new(facts: &StreamFacts) -> Metrics {
        let seconds = || Histogram::new(exponential_buckets(0.01, 1.6, 18));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("tessera"),
            chunks: Counter::default(),
            frames: Counter::default(),
            chunk_period: seconds(),
            call_time: seconds(),
            phase_time: Family::default(),
            clients: Gauge::default(),
            frames_sent: Family::default(),
            frames_dropped: Counter::default(),
            changes: Family::default(),
            change_wait: seconds(),
            runs: Counter::default(),
            failures: Family::default(),
            refused: Family::default(),
            queued_requests: Gauge::default(),
            queued_results: Gauge::default(),
            overlap_score: FloatGauge::default(),
            spans: Family::default(),
            state: Family::default(),
        };
        metrics.register(facts);
        metrics
    }

    /// Sets the state of the stream.
    pub(crate) fn set_state(&self, now: StreamState) {
        for state in StreamState::ALL {
            let labels = StateLabels { state: state.name() };
            self.state.get_or_create(&labels).set(i64::from(state == now));
        }
    }

    /// Returns the metrics as text.
    pub(crate) fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    fn register(&mut self, facts: &StreamFacts) {
        let Metrics { registry: r, .. } = self;
        let about = |name: &'static str, value: &str| (name, value.to_string());
        let info = [
            about("model", &facts.model),
            about("mesh", &facts.mesh),
            about("device", facts.device),
            about("plan", &facts.plan),
        ];
        r.register("stream", "The stream that the server runs", Info::new(info.to_vec()));
        r.register("chunks", "Chunks that the ranks delivered", self.chunks.clone());
        r.register("frames", "Frames that the ranks delivered", self.frames.clone());
        let h = "Seconds between the deliveries of two chunks";
        r.register("chunk_period_seconds", h, self.chunk_period.clone());
        let h = "Seconds from the decision about a call to its delivery";
        r.register("call_seconds", h, self.call_time.clone());
        let h = "Seconds of a phase of the latest chunk on the first rank";
        r.register("phase_seconds", h, self.phase_time.clone());
        r.register("clients", "Connected clients", self.clients.clone());
        r.register("frames_sent", "Frames that were sent to clients", self.frames_sent.clone());
        let h = "Frames that were dropped because a client did not take them";
        r.register("frames_dropped", h, self.frames_dropped.clone());
        r.register("changes", "Changes that clients requested", self.changes.clone());
        let h = "Seconds from a change to the answer of the leader that names its chunk";
        r.register("change_wait_seconds", h, self.change_wait.clone());
        r.register("runs", "Runs of the stream that were started", self.runs.clone());
        r.register("failures", "Runs that failed, by code", self.failures.clone());
        r.register("refused", "Requests and messages that were refused, by code", self.refused.clone());
        r.register("queued_requests", "Requests that wait at the leader", self.queued_requests.clone());
        r.register("queued_results", "Finished chunks that wait for delivery", self.queued_results.clone());
        r.register("overlap_score", "OverlapScore of the latest chunks", self.overlap_score.clone());
        r.register("spans", "Spans for the collector of traces, by outcome", self.spans.clone());
        r.register("stream_state", "1 for what the stream does now", self.state.clone());
    }
}
