//! Writes a trace for Perfetto and `chrome://tracing`: one process per rank, one thread per stream.

use crate::timeline::{Timeline, TimelineChunk, TimelineMark, TimelineSpan, stream_order};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Maximum number of span, chunk and mark events in a trace; a longer run keeps its beginning and
/// its end.
pub const MAX_EVENTS: usize = 100_000;

/// Returns the trace as JSON, with at most [`MAX_EVENTS`] events besides the metadata.
#[must_use]
pub fn trace_json(timeline: &Timeline) -> String {
    trace_json_within(timeline, MAX_EVENTS)
}

/// Returns the trace as JSON, with at most `limit` events besides the metadata. A longer run keeps
/// the first and the last `limit / 2` events, because a failure is at the end; `otherData.omitted`
/// reports the number of missing events.
#[must_use]
pub fn trace_json_within(timeline: &Timeline, limit: usize) -> String {
    let mut events: Vec<(u64, TraceEvent<'_>)> = Vec::new();
    for (span, straddles) in timeline.spans.iter().zip(find_straddling(timeline)) {
        match straddles {
            None => events.push((span.start_ns, TraceEvent::Span(span))),
            Some(id) => events.extend([
                (span.start_ns, TraceEvent::SpanBegin(span, id)),
                (span.end_ns, TraceEvent::SpanEnd(span, id)),
            ]),
        }
    }
    let name = timeline.generates.chunk_name();
    for c in &timeline.chunks {
        events.extend([
            (c.start_ns, TraceEvent::Begin(c, name)),
            (c.end_ns, TraceEvent::End(c, name)),
            (c.start_ns, TraceEvent::Queues(c)),
        ]);
    }
    events.extend(timeline.marks.iter().map(|m| (m.at_ns, TraceEvent::Mark(m))));
    events.sort_by_key(|e| e.0);

    let total = events.len();
    if total > limit {
        let head = limit.div_ceil(2);
        events.drain(head..total - (limit - head));
    }
    let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"otherData\":{");
    let _ = write!(out, "\"events\":{},\"events_recorded\":{total}", events.len());
    if total > limit {
        let _ = write!(
            out,
            ",\"omitted\":\"{} events between the first and the last were left out\"",
            total - limit
        );
    }
    out.push_str("},\"traceEvents\":[\n");
    let threads = ThreadIds::new(timeline);
    out.push_str(&metadata_events(timeline, &threads).join(",\n"));
    for (_, entry) in &events {
        out.push_str(",\n");
        entry.write(&mut out, &threads);
    }
    out.push_str("\n]}\n");
    out
}

/// Returns an id for each span that begins inside an earlier span of its lane and ends after it, in the order of the
/// timeline. Slices of a thread must nest, so such a span becomes a pair of asynchronous events.
fn find_straddling(timeline: &Timeline) -> Vec<Option<usize>> {
    let mut found = Vec::with_capacity(timeline.spans.len());
    for lane in timeline.spans_by_lane() {
        let mut open_ends: Vec<u64> = Vec::new();
        for span in lane {
            while open_ends.last().is_some_and(|end| *end <= span.start_ns) {
                open_ends.pop();
            }
            let straddles = open_ends.last().is_some_and(|end| *end < span.end_ns);
            if !straddles {
                open_ends.push(span.end_ns);
            }
            found.push(straddles.then_some(found.len()));
        }
    }
    found
}

enum TraceEvent<'a> {
    Span(&'a TimelineSpan),
    /// The two ends of a span that straddles another one, with its id.
    SpanBegin(&'a TimelineSpan, usize),
    SpanEnd(&'a TimelineSpan, usize),
    /// The two ends of a chunk, with the word for a chunk.
    Begin(&'a TimelineChunk, &'static str),
    End(&'a TimelineChunk, &'static str),
    Queues(&'a TimelineChunk),
    Mark(&'a TimelineMark),
}

impl TraceEvent<'_> {
    fn write(&self, out: &mut String, threads: &ThreadIds<'_>) {
        let (ph, pid, tid, at_ns, fields) = match self {
            // Chunks are asynchronous events because they overlap when the pipeline is full.
            TraceEvent::Begin(c, name) => ('b', 0, Some(0), c.start_ns, chunk_fields(c, name)),
            TraceEvent::End(c, name) => ('e', 0, Some(0), c.end_ns, chunk_fields(c, name)),
            TraceEvent::SpanBegin(s, id) => {
                let fields = format!("\"id\":{id},{}", span_fields(s));
                ('b', process_id(s.rank), Some(threads.thread_id(&s.stream)), s.start_ns, fields)
            }
            TraceEvent::SpanEnd(s, id) => {
                let fields = format!("\"id\":{id},{}", span_fields(s));
                ('e', process_id(s.rank), Some(threads.thread_id(&s.stream)), s.end_ns, fields)
            }
            TraceEvent::Span(s) => {
                ('X', process_id(s.rank), Some(threads.thread_id(&s.stream)), s.start_ns, span_fields(s))
            }
            TraceEvent::Queues(c) => {
                let (input, output) = c.queue_lengths;
                let fields = format!("\"name\":\"queues\",\"args\":{{\"in\":{input},\"out\":{output}}}");
                ('C', 0, None, c.start_ns, fields)
            }
            TraceEvent::Mark(m) => {
                let (name, detail) = (json_string(&m.label), json_string(&m.detail));
                let fields = format!("\"s\":\"g\",\"name\":{name},\"args\":{{\"detail\":{detail}}}");
                ('i', 0, Some(0), m.at_ns, fields)
            }
        };
        let tid = tid.map_or(String::new(), |tid| format!("\"tid\":{tid},"));
        let ts = format_micros(at_ns);
        let _ = write!(out, "{{\"ph\":\"{ph}\",\"pid\":{pid},{tid}\"ts\":{ts},{fields}}}");
    }
}

fn chunk_fields(c: &TimelineChunk, name: &str) -> String {
    format!(
        "\"id\":{0},\"cat\":\"chunk\",\"name\":\"{name} {0}\",\"args\":{{\"frames\":{1}}}",
        c.chunk, c.frames
    )
}

fn span_fields(s: &TimelineSpan) -> String {
    let waited = s.waits.as_ref().map(|waits| format!(",\"waited_us\":{}", format_micros(waits.total_ns)));
    format!(
        "\"dur\":{},\"name\":{},\"cat\":{},\"args\":{{\"chunk\":{},\"collectives\":{}{}}}",
        format_micros(s.end_ns.saturating_sub(s.start_ns)),
        json_string(&s.name),
        json_string(&s.stream),
        s.chunk,
        s.collectives,
        waited.unwrap_or_default()
    )
}

/// Returns the metadata events: names and sort order of processes and threads. Process 0 stands for
/// the run.
fn metadata_events(t: &Timeline, threads: &ThreadIds<'_>) -> Vec<String> {
    let meta = |pid: u64, tid: usize, what: &str, args: String| {
        format!("{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"{what}\",\"args\":{{{args}}}}}")
    };
    let mut out = vec![meta(0, 0, "process_name", "\"name\":\"run\"".into())];
    for r in &t.ranks {
        let pid = process_id(r.rank);
        out.push(meta(pid, 0, "process_name", format!("\"name\":{}", json_string(&r.name))));
        out.push(meta(pid, 0, "process_sort_index", format!("\"sort_index\":{pid}")));
    }
    for lane in t.spans_by_lane() {
        let (pid, tid) = (process_id(lane[0].rank), threads.thread_id(&lane[0].stream));
        let name = match t.stream_ids.get(&lane[0].stream) {
            Some(id) => format!("{} (stream {id})", lane[0].stream),
            None => lane[0].stream.clone(),
        };
        out.push(meta(pid, tid, "thread_name", format!("\"name\":{}", json_string(&name))));
        out.push(meta(pid, tid, "thread_sort_index", format!("\"sort_index\":{tid}")));
    }
    out
}

fn process_id(rank: u32) -> u64 {
    u64::from(rank) + 1
}

/// Thread ids of streams, the same on every rank: the numbers that the timeline states; without them known streams
/// first, then the others by name.
struct ThreadIds<'a> {
    stated: &'a BTreeMap<String, u32>,
    others: Vec<&'a str>,
}

impl<'a> ThreadIds<'a> {
    fn new(t: &'a Timeline) -> ThreadIds<'a> {
        let streams = t.spans_by_lane().map(|l| l[0].stream.as_str());
        let mut others: Vec<&str> = streams.filter(|s| stream_order(s) == stream_order("")).collect();
        others.sort_unstable();
        others.dedup();
        ThreadIds { stated: &t.stream_ids, others }
    }

    fn thread_id(&self, stream: &str) -> usize {
        if let Some(id) = self.stated.get(stream) {
            return *id as usize;
        }
        1 + stream_order(stream) + self.others.iter().position(|s| *s == stream).unwrap_or(0)
    }
}

/// Formats nanoseconds as microseconds with up to three decimals.
fn format_micros(ns: u64) -> String {
    match ns % 1000 {
        0 => (ns / 1000).to_string(),
        rest => format!("{}.{rest:03}", ns / 1000),
    }
}

fn json_string(s: &str) -> String {
    serde_json::Value::from(s).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn names_ranks_and_streams() {
        let text = trace_json(&Timeline::from_record(&sample(1)));
        for line in [
            r#"{"ph":"M","pid":2,"tid":0,"name":"process_name","args":{"name":"rank 1 · stage0"}}"#,
            r#"{"ph":"M","pid":1,"tid":6,"name":"thread_name","args":{"name":"decode"}}"#,
            r#"{"ph":"X","pid":2,"tid":1,"ts":9000,"dur":1000.250,"name":"clean","cat":"compute","args":{"chunk":0,"collectives":3}}"#,
            r#"{"ph":"b","pid":0,"tid":0,"ts":1000,"id":0,"cat":"chunk","name":"chunk 0","args":{"frames":12}}"#,
            r#"{"ph":"C","pid":0,"ts":1000,"name":"queues","args":{"in":1,"out":0}}"#,
            r#"{"ph":"i","pid":0,"tid":0,"ts":2000,"s":"g","name":"prompt","args":{"detail":"now </script> \"x\""}}"#,
        ] {
            assert!(text.contains(line), "{line}\nis not in\n{text}");
        }
        assert_eq!(text, trace_json(&Timeline::from_record(&sample(1))));
    }

    #[test]
    fn a_long_trace_keeps_both_ends() {
        let t = Timeline::from_record(&sample(50));
        let text = trace_json_within(&t, 11);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events: Vec<_> =
            json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] != "M").collect();
        assert_eq!(events.len(), 11);
        assert_eq!(events[0]["ts"], 1000);
        assert_eq!(events[10]["ts"], 501_000);
        assert_eq!(json["otherData"]["events_recorded"], 50 * 7 + 1);
        assert_eq!(json["otherData"]["omitted"], "340 events between the first and the last were left out");
        let whole: serde_json::Value = serde_json::from_str(&trace_json(&t)).unwrap();
        assert_eq!(whole["otherData"].get("omitted"), None);
    }

    #[test]
    fn stated_stream_ids_are_those_of_threads_and_overlapping_spans_are_asynchronous() {
        let mut t = Timeline::from_record(&sample(1));
        t.generates = crate::record::RunKind::Arrays;
        t.stream_ids = BTreeMap::from([("compute".to_string(), 12), ("decode".to_string(), 0)]);
        t.spans[2].start_ns -= 5;
        t.sort_and_name();
        let text = trace_json(&t);
        for line in [
            r#"{"ph":"M","pid":2,"tid":12,"name":"thread_name","args":{"name":"compute (stream 12)"}}"#,
            r#"{"ph":"M","pid":1,"tid":0,"name":"thread_name","args":{"name":"decode (stream 0)"}}"#,
            r#"{"ph":"X","pid":2,"tid":12,"ts":1000,"dur":4000,"name":"denoise.0""#,
            r#"{"ph":"b","pid":2,"tid":12,"ts":4999.995,"id":2,"dur":4000.005,"name":"denoise.1""#,
            r#"{"ph":"e","pid":2,"tid":12,"ts":9000,"id":2,"dur":4000.005,"name":"denoise.1""#,
            r#""name":"call 0""#,
        ] {
            assert!(text.contains(line), "{line}\nis not in\n{text}");
        }
    }

    #[test]
    fn unknown_streams_follow_known_ones() {
        let mut t = Timeline::from_record(&sample(1));
        t.spans[0].stream = "zeta".into();
        t.spans[1].stream = "alpha".into();
        t.sort_and_name();
        let threads = ThreadIds::new(&t);
        assert_eq!(
            (threads.thread_id("compute"), threads.thread_id("alpha"), threads.thread_id("zeta")),
            (1, 7, 8)
        );
    }
}
