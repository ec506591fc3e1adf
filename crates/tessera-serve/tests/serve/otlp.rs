//! Traces for an OpenTelemetry collector.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tessera_serve::{CollectorEndpoint, ServeOptions, TraceOptions};

use crate::client::{SocketClient, get};
use crate::restart::{kill_rank, rank_processes};
use crate::{TestServer, demo_stream, test_options};

/// Longest wait for spans.
const PATIENCE: Duration = Duration::from_secs(60);

/// A collector that hands the body of each request on, or answers none while it hangs.
struct Collector {
    address: String,
    hangs: Arc<AtomicBool>,
    requests: Receiver<Value>,
}

impl Collector {
    fn start(hangs: bool) -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = channel();
        let hangs = Arc::new(AtomicBool::new(hangs));
        let is_hanging = Arc::clone(&hangs);
        std::thread::spawn(move || {
            let mut unanswered = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let body = read_request(&mut stream);
                if is_hanging.load(Ordering::SeqCst) {
                    unanswered.push(stream);
                    continue;
                }
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
                if sender.send(body).is_err() {
                    return;
                }
            }
        });
        Collector { address, hangs, requests }
    }

    fn options(&self) -> TraceOptions {
        let endpoint = CollectorEndpoint::from_address(&self.address).unwrap();
        TraceOptions { endpoint, service: "demo stream".into() }
    }

    /// Takes requests until a span arrives for which something holds, and returns all spans.
    fn wait_for_span(&self, holds: impl Fn(&Value) -> bool) -> Vec<Value> {
        let (until, mut spans) = (Instant::now() + PATIENCE, Vec::new());
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let request = self.requests.recv_timeout(left).expect("the collector received the span");
            let resource = &request["resourceSpans"][0];
            assert_eq!(
                attribute(&resource["resource"], "service.name"),
                json!({ "stringValue": "demo stream" })
            );
            spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().iter().cloned());
            if spans.iter().any(&holds) {
                return spans;
            }
        }
    }
}

fn read_request(stream: &mut TcpStream) -> Value {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_ascii_lowercase()),
        }
    }
    assert_eq!(lines[0], "post /v1/traces http/1.1");
    assert!(lines.contains(&"content-type: application/json".to_string()), "{lines:?}");
    let length = lines.iter().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    serde_json::from_slice(&body).unwrap()
}

fn attribute(span: &Value, key: &str) -> Value {
    let attributes = span["attributes"].as_array().unwrap();
    attributes.iter().find(|a| a["key"] == key).map_or(Value::Null, |a| a["value"].clone())
}

fn number(span: &Value, key: &str) -> u64 {
    attribute(span, key)["intValue"].as_str().unwrap().parse().unwrap()
}

/// Returns start and end in nanoseconds since 1970.
fn times(span: &Value) -> (u64, u64) {
    let at = |key: &str| span[key].as_str().unwrap().parse().unwrap();
    (at("startTimeUnixNano"), at("endTimeUnixNano"))
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

fn is_named(name: &str) -> impl Fn(&&Value) -> bool {
    move |span| span["name"] == name
}

pub(crate) fn a_collector_receives_the_spans_of_chunks_changes_and_runs() {
    let (began, collector) = (now_ns(), Collector::start(false));
    let options = ServeOptions { traces: Some(collector.options()), ..test_options() };
    let server = TestServer::start_stream(demo_stream("tp=2"), options);
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|_| true);
    client.change(json!({ "prompt": "a green triangle moves up" }));
    let effect = client.wait_until("effect", |effect| effect["change"] == "prompt");
    let request = effect["request"].as_u64().unwrap();
    client.wait_for_frame(|frame| frame.request > request);
    kill_rank(*rank_processes().iter().max().unwrap());
    let code = client.wait_for("alarm")["code"].as_str().unwrap().to_string();
    client.wait_for_frame(|frame| frame.run == 2 && frame.request > 0);
    let mut spans =
        collector.wait_for_span(|span| span["name"] == "chunk" && number(span, "tessera.run") == 2);
    let metrics = get(server.at.address, "/metrics").text();
    assert!(metrics.contains("tessera_spans_total{outcome=\"sent\"} "), "{metrics}");
    assert!(!metrics.contains("outcome=\"dropped\""), "{metrics}");
    drop(client);
    server.stop().unwrap();
    spans.extend(collector.wait_for_span(|span| span["name"] == "run" && number(span, "tessera.run") == 2));
    let ended = now_ns();

    let chunks: BTreeMap<String, &Value> = spans
        .iter()
        .filter(is_named("chunk"))
        .map(|chunk| (chunk["traceId"].as_str().unwrap().to_string(), chunk))
        .collect();
    let mut of_first: Vec<u64> = chunks
        .values()
        .filter(|chunk| number(chunk, "tessera.run") == 1)
        .map(|chunk| number(chunk, "tessera.chunk"))
        .collect();
    of_first.sort_unstable();
    assert!(
        of_first.len() as u64 > request && of_first.iter().copied().eq(0..of_first.len() as u64),
        "{of_first:?}"
    );
    for chunk in chunks.values() {
        let (start, end) = times(chunk);
        assert!(began < start && start < end && end < ended, "{chunk}");
        assert_eq!((chunk["parentSpanId"].as_str(), number(chunk, "tessera.frames")), (Some(""), 12));
        assert_eq!(chunk["traceId"].as_str().map(str::len), Some(32));
    }
    let mut ranks = BTreeMap::new();
    for phase in spans.iter().filter(|span| span["parentSpanId"] != "") {
        let chunk = chunks[phase["traceId"].as_str().unwrap()];
        assert_eq!(phase["parentSpanId"], chunk["spanId"]);
        let ((from, to), (start, end)) = (times(chunk), times(phase));
        assert!(from <= start && start <= end && end <= to, "{phase} in {chunk}");
        *ranks.entry(number(phase, "tessera.rank")).or_insert(0) += 1;
    }
    assert!(ranks.len() == 2 && ranks.values().all(|phases| *phases >= chunks.len()), "{ranks:?}");
    let change = spans.iter().find(is_named("change prompt")).unwrap();
    assert_eq!(number(change, "tessera.request"), request);
    let linked = chunks[change["links"][0]["traceId"].as_str().unwrap()];
    assert_eq!(change["links"][0]["spanId"], linked["spanId"]);
    assert_eq!(number(linked, "tessera.request"), request);
    assert_eq!(linked["links"][0]["spanId"], change["spanId"]);
    let (accepted, shown) = times(change);
    assert!(accepted < shown && shown <= times(linked).1);
    let runs: Vec<&Value> = spans.iter().filter(is_named("run")).collect();
    assert_eq!(runs.iter().map(|run| number(run, "tessera.run")).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(number(runs[0], "tessera.chunks"), of_first.len() as u64);
    let alarm = &runs[0]["events"][0];
    assert_eq!(
        (alarm["name"].as_str(), attribute(alarm, "tessera.code")["stringValue"].as_str()),
        (Some("alarm"), Some(&*code))
    );
    assert_eq!((runs[0]["status"]["code"].as_u64(), runs[1]["status"]["code"].as_u64()), (Some(2), None));
}

/// Warnings of the server of the second test.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

pub(crate) fn a_collector_that_hangs_does_not_disturb_the_stream() {
    let collector = Collector::start(true);
    let options = ServeOptions { traces: Some(collector.options()), ..test_options() };
    let mut stream = demo_stream("tp=1");
    stream.warn = |d| WARNINGS.lock().unwrap().push(d.code.id.to_string());
    let server = TestServer::start_stream(stream, options);
    let mut client = SocketClient::join_in_control(server.at.address);
    let mut last = client.wait_for_frame(|_| true);
    let until = Instant::now() + PATIENCE;
    while WARNINGS.lock().unwrap().is_empty() {
        assert!(Instant::now() < until, "no warning");
        // Frames arrive while the collector hangs, and none is lost.
        let frame = client.wait_for_frame(|_| true);
        assert_eq!((frame.run, frame.number), (1, last.number + 1));
        last = frame;
    }
    assert!(last.request > 2, "{last:?}");
    collector.hangs.store(false, Ordering::SeqCst);
    // The spans that were sent in vain come again.
    let spans = collector
        .wait_for_span(|span| span["name"] == "chunk" && number(span, "tessera.request") > last.request);
    let mut chunks: Vec<u64> =
        spans.iter().filter(is_named("chunk")).map(|chunk| number(chunk, "tessera.chunk")).collect();
    chunks.sort_unstable();
    assert!(chunks.iter().copied().eq(0..chunks.len() as u64), "{chunks:?}");
    client.wait_for_frame(|frame| frame.request > last.request + 2);
    assert_eq!(*WARNINGS.lock().unwrap(), ["T1613"]);
    drop(client);
    server.stop().unwrap();
}
