//! The queue of spans, and the task that sends them to the collector.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tessera_base::Diagnostic;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::collector::Answer;
use super::span::{Attributes, Span, to_request};
use super::{ShowWarning, TraceOptions};
use crate::backoff::wait_after;
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

/// Sends spans to a collector. Nobody waits for it: spans beyond the limit of the queue are dropped and counted.
#[derive(Debug)]
pub(crate) struct SpanExporter {
    options: TraceOptions,
    resource: Attributes,
    /// Spans that the collector has neither taken nor refused, oldest first.
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
            // A copy: spans that the collector does not take keep their places.
            let batch: Vec<Span> = self.lock().iter().take(MAX_BATCH_SPANS).cloned().collect();
            let sending = self.options.endpoint.post(to_request(&self.resource, &batch));
            let answer = timeout(REQUEST_LIMIT, sending).await;
            let count = batch.len() as u64;
            let what = match answer {
                Ok(Answer::Taken { rejected }) => {
                    self.lock().drain(..batch.len());
                    self.count("sent", count.saturating_sub(rejected));
                    self.count("rejected", rejected.min(count));
                    if is_away {
                        tracing::info!("the collector takes traces again");
                    }
                    (failures, is_away) = (0, false);
                    continue;
                }
                Ok(Answer::Refused(what)) => {
                    self.lock().drain(..batch.len());
                    self.count("rejected", count);
                    what
                }
                Ok(Answer::Busy(what)) => what,
                // The collector may have taken them. Two copies of a span have one id, of which a collector keeps one.
                Err(_) => format!("no answer for {} s", REQUEST_LIMIT.as_secs()),
            };
            if !std::mem::replace(&mut is_away, true) {
                self.warn_about(&what);
            }
            if self.closes.load(Ordering::Acquire) {
                break;
            }
            failures += 1;
            self.wait_until_closed(wait_after(failures)).await;
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

    /// Waits until the exporter is closed, but at most `longest`.
    async fn wait_until_closed(&self, longest: Duration) {
        let closing = async {
            while !self.closes.load(Ordering::Acquire) {
                self.changed.notified().await;
            }
        };
        // The caller asks again whether the exporter is closed, so that an elapsed time is no error.
        let _ = timeout(longest, closing).await;
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
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};

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

    /// An exporter to a port of this machine, and the numbers of its spans.
    fn new_exporter(port: u16) -> (SpanExporter, impl Fn(&'static str) -> u64) {
        let endpoint = CollectorEndpoint::from_address(&format!("http://127.0.0.1:{port}")).unwrap();
        let options = TraceOptions { endpoint, service: "s".into() };
        let counts: Family<SpanLabels, Counter> = Family::default();
        let exporter = SpanExporter::new(options, Vec::new(), counts.clone(), |_| {});
        (exporter, move |outcome| counts.get_or_create(&SpanLabels { outcome }).get())
    }

    #[test]
    fn spans_beyond_the_limit_are_dropped_and_counted() {
        let (exporter, count_of) = new_exporter(4318);
        exporter.push(spans(MAX_WAITING_SPANS - 10));
        exporter.push(spans(11));
        assert_eq!((exporter.lock().len(), count_of("dropped")), (MAX_WAITING_SPANS - 10, 11));
        exporter.push(spans(8));
        assert_eq!((exporter.lock().len(), count_of("dropped")), (MAX_WAITING_SPANS - 2, 11));
    }

    /// Reads a request of the exporter to its end.
    fn read_request(stream: &TcpStream) {
        let mut reader = BufReader::new(stream);
        let (mut line, mut bytes) = (String::new(), 0);
        while reader.read_line(&mut line).unwrap() > 2 {
            let header = line.to_ascii_lowercase();
            bytes = header.strip_prefix("content-length: ").map_or(bytes, |n| n.trim().parse().unwrap());
            line.clear();
        }
        reader.read_exact(&mut vec![0; bytes]).unwrap();
    }

    #[test]
    fn spans_keep_their_places_until_the_collector_has_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (exporter, count_of) = new_exporter(listener.local_addr().unwrap().port());
        exporter.push(spans(MAX_WAITING_SPANS));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let full = MAX_WAITING_SPANS;
                let less = full - MAX_BATCH_SPANS;
                for (status, waiting) in [("503 Busy", full), ("200 OK", full), ("400 No", less)] {
                    let (mut stream, _) = listener.accept().unwrap();
                    read_request(&stream);
                    assert_eq!(exporter.lock().len(), waiting, "before {status}");
                    // There is no room for one span more, because the batch keeps its own.
                    exporter.push(spans(full - waiting + 1));
                    assert_eq!(exporter.lock().len(), waiting, "before {status}");
                    if waiting == less {
                        exporter.close();
                    }
                    let answer =
                        format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            });
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(exporter.send_spans());
        });
        let batch = MAX_BATCH_SPANS as u64;
        assert_eq!([count_of("sent"), count_of("rejected"), exporter.lock().len() as u64], [batch, batch, 0]);
    }
}
