//! The queue of spans, and the task that sends them to the collector.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tessera_base::Diagnostic;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::collector::Answer;
use super::span::{Attributes, Span, to_request};
use super::{ShowWarning, TraceOptions};
use crate::codes::T1613;
use crate::metrics::SpanLabels;

/// Most spans that wait for the collector: a minute of a small mesh.
const MAX_WAITING_SPANS: usize = 8192;
/// Most spans of a request.
const MAX_BATCH_SPANS: usize = 512;
/// Time for which spans are gathered.
const GATHERING_TIME: Duration = Duration::from_secs(1);
/// Longest time of a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// Wait after the first request that failed; each further one waits twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait between two requests.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Sends spans to a collector. Nobody waits for it: spans beyond the limit of the queue are dropped and counted.
#[derive(Debug)]
pub(crate) struct SpanExporter {
    options: TraceOptions,
    resource: Attributes,
    queue: Mutex<VecDeque<Span>>,
    changed: Notify,
    closes: AtomicBool,
    counts: Family<SpanLabels, Counter>,
    /// Shows a person a warning.
    warn: ShowWarning,
}

impl SpanExporter {
    /// Creates an exporter of spans of one resource.
    pub(crate) fn new(
        options: TraceOptions,
        resource: Attributes,
        counts: Family<SpanLabels, Counter>,
        warn: ShowWarning,
    ) -> SpanExporter {
        SpanExporter {
            options,
            resource,
            queue: Mutex::default(),
            changed: Notify::new(),
            closes: AtomicBool::new(false),
            counts,
            warn,
        }
    }

    /// Queues spans that belong together: all of them, or none if there is no room. Half of a trace would mislead.
    pub(crate) fn push(&self, spans: Vec<Span>) {
        let mut queue = self.lock();
        if queue.len() + spans.len() > MAX_WAITING_SPANS {
            self.count("dropped", spans.len() as u64);
            return;
        }
        queue.extend(spans);
        drop(queue);
        self.changed.notify_one();
    }

    /// Sends spans until the exporter is closed and nothing is left, or the collector takes nothing any more.
    pub(crate) async fn send_spans(&self) {
        let (mut failures, mut is_away) = (0, false);
        while self.wait_for_spans().await {
            let batch: Vec<Span> = {
                let mut queue = self.lock();
                let count = queue.len().min(MAX_BATCH_SPANS);
                queue.drain(..count).collect()
            };
            let sending = self.options.endpoint.post(to_request(&self.resource, &batch));
            let answer = timeout(REQUEST_LIMIT, sending).await;
            let count = batch.len() as u64;
            let what = match answer {
                Ok(Answer::Taken { rejected }) => {
                    self.count("sent", count.saturating_sub(rejected));
                    self.count("rejected", rejected.min(count));
                    if is_away {
                        tracing::info!("the collector takes traces again");
                    }
                    (failures, is_away) = (0, false);
                    continue;
                }
                Ok(Answer::Refused(what)) => {
                    self.count("rejected", count);
                    what
                }
                Ok(Answer::Busy(what)) => {
                    self.return_spans(batch);
                    what
                }
                Err(_) => {
                    // The collector may have taken them. Two copies of a span have one id, of which a collector keeps one.
                    self.return_spans(batch);
                    format!("no answer for {} s", REQUEST_LIMIT.as_secs())
                }
            };
            if !std::mem::replace(&mut is_away, true) {
                self.warn_about(&what);
            }
            if self.closes.load(Ordering::Acquire) {
                break;
            }
            self.wait_after_failure(failures).await;
            failures += 1;
        }
        let left = self.lock().drain(..).count();
        self.count("dropped", left as u64);
    }

    /// Lets [`SpanExporter::send_spans`] end after one more request per batch.
    pub(crate) fn close(&self) {
        self.closes.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// Waits until spans were gathered. Returns false if the exporter is closed and none are left.
    async fn wait_for_spans(&self) -> bool {
        loop {
            if !self.lock().is_empty() {
                break;
            }
            if self.closes.load(Ordering::Acquire) {
                return false;
            }
            self.changed.notified().await;
        }
        let gathers = || self.lock().len() < MAX_BATCH_SPANS && !self.closes.load(Ordering::Acquire);
        let gathering = async {
            while gathers() {
                self.changed.notified().await;
            }
        };
        // The end of the time is as good as a full batch.
        let _ = timeout(GATHERING_TIME, gathering).await;
        true
    }

    async fn wait_after_failure(&self, failures: u32) {
        let wait = (FIRST_WAIT * 2_u32.saturating_pow(failures)).min(LONGEST_WAIT);
        let closing = async {
            while !self.closes.load(Ordering::Acquire) {
                self.changed.notified().await;
            }
        };
        tokio::select! {
            () = sleep(wait) => {}
            () = closing => {}
        }
    }

    /// Puts spans back in front of the queue as far as there is room.
    fn return_spans(&self, batch: Vec<Span>) {
        let mut queue = self.lock();
        let room = MAX_WAITING_SPANS.saturating_sub(queue.len());
        let surplus = batch.len().saturating_sub(room);
        batch.into_iter().skip(surplus).rev().for_each(|span| queue.push_front(span));
        self.count("dropped", surplus as u64);
    }

    fn warn_about(&self, what: &str) {
        let at = self.options.endpoint.authority();
        let away = Diagnostic::warning(&T1613, format!("the collector at {at} takes no traces: {what}"));
        tracing::warn!(code = T1613.id, "{}", away.message);
        (self.warn)(&away.with_hint("the stream goes on; `tessera_spans` of /metrics counts what is lost"));
    }

    fn count(&self, outcome: &'static str, spans: u64) {
        if spans > 0 {
            self.counts.get_or_create(&SpanLabels { outcome }).inc_by(spans);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Span>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::CollectorEndpoint;
    use super::super::span::SpanContext;
    use super::*;

    fn spans(count: usize) -> Vec<Span> {
        let span = Span {
            context: SpanContext::new_trace(),
            parent: None,
            name: "chunk".into(),
            start_ns: 1,
            end_ns: 2,
            attributes: Vec::new(),
            events: Vec::new(),
            links: Vec::new(),
            error: None,
        };
        vec![span; count]
    }

    #[test]
    fn spans_beyond_the_limit_are_dropped_and_counted() {
        let endpoint = CollectorEndpoint::from_address("http://localhost:4318").unwrap();
        let options = TraceOptions { endpoint, service: "s".into() };
        let counts = Family::default();
        let exporter = SpanExporter::new(options, Vec::new(), counts.clone(), |_| {});
        let dropped = || counts.get_or_create(&SpanLabels { outcome: "dropped" }).get();
        exporter.push(spans(MAX_WAITING_SPANS - 10));
        exporter.push(spans(11));
        assert_eq!((exporter.lock().len(), dropped()), (MAX_WAITING_SPANS - 10, 11));
        exporter.push(spans(8));
        assert_eq!((exporter.lock().len(), dropped()), (MAX_WAITING_SPANS - 2, 11));
        // A batch that comes back finds two places.
        exporter.return_spans(spans(5));
        assert_eq!((exporter.lock().len(), dropped()), (MAX_WAITING_SPANS, 14));
    }
}
