//! Traces of the stream, sent to an OpenTelemetry collector as OTLP over HTTP with JSON.
//!
//! [`stream_traces`] makes spans of what the server learns, [`exporter`] queues and sends them, and [`span`] writes them as the
//! protocol spells them. The stream waits for none of this.

mod collector;
pub(crate) mod exporter;
mod span;
pub(crate) mod stream_traces;

use tessera_base::Diagnostic;

pub use collector::CollectorEndpoint;

/// Shows a warning to the person who started the server.
pub type ShowWarning = fn(&Diagnostic);

/// Where traces go, and under which name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceOptions {
    /// Address of the collector.
    pub endpoint: CollectorEndpoint,
    /// `service.name` of the traces.
    pub service: String,
}
