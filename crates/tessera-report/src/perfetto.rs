//! A trace that Perfetto and `chrome://tracing` open: a process per rank, a thread per stream.

use crate::timeline::{ChunkSpan, Mark, Span, Timeline, stream_order};
use std::fmt::Write;

/// Most span, chunk and mark events of a trace; a longer run keeps its beginning and its end.
pub const MAX_EVENTS: usize = 100_000;

/// The trace as JSON, at most [`MAX_EVENTS`] events besides names.
#[must_use]
pub fn trace(timeline: &Timeline) -> String {
    trace_within(timeline, MAX_EVENTS)
}

/// The trace as JSON, at most `limit` events besides names. Where that cuts, half of them are the first and
/// half the last, because a failure is at the end; `otherData.cut` says so.
#[must_use]
pub fn trace_within(timeline: &Timeline, limit: usize) -> String {
    let mut events: Vec<(u64, Entry<'_>)> = Vec::new();
    events.extend(timeline.spans.iter().map(|s| (s.start_ns, Entry::Span(s))));
    for c in &timeline.chunks {
        events.extend([
            (c.start_ns, Entry::Begin(c)),
            (c.end_ns, Entry::End(c)),
            (c.start_ns, Entry::Queues(c)),
        ]);
    }
    events.extend(timeline.marks.iter().map(|m| (m.at_ns, Entry::Mark(m))));
    events.sort_by_key(|e| e.0);

    let total = events.len();
    if total > limit {
        let head = limit.div_ceil(2);
        events.drain(head..total - (limit - head));
    }
    let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"otherData\":{");
    let _ = write!(out, "\"events\":{},\"events_recorded\":{total}", events.len());
    if total > limit {
        let _ =
            write!(out, ",\"cut\":\"{} events between the first and the last were left out\"", total - limit);
    }
    out.push_str("},\"traceEvents\":[\n");
    let threads = Threads::new(timeline);
    out.push_str(&names(timeline, &threads).join(",\n"));
    for (_, entry) in &events {
        out.push_str(",\n");
        entry.write(&mut out, &threads);
    }
    out.push_str("\n]}\n");
    out
}

enum Entry<'a> {
    Span(&'a Span),
    Begin(&'a ChunkSpan),
    End(&'a ChunkSpan),
    Queues(&'a ChunkSpan),
    Mark(&'a Mark),
}

impl Entry<'_> {
    fn write(&self, out: &mut String, threads: &Threads<'_>) {
        // Chunks are asynchronous events, because they overlap when the pipeline is full.
        let mut chunk = |ph: char, at: u64, c: &ChunkSpan| {
            write!(
                out,
                "{{\"ph\":\"{ph}\",\"pid\":0,\"tid\":0,\"ts\":{},\"id\":{1},\"cat\":\"chunk\",\"name\":\"chunk {1}\",\"args\":{{\"frames\":{2}}}}}",
                micros(at),
                c.chunk,
                c.frames
            )
        };
        let _ = match self {
            Entry::Begin(c) => chunk('b', c.start_ns, c),
            Entry::End(c) => chunk('e', c.end_ns, c),
            Entry::Span(s) => write!(
                out,
                "{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"ts\":{},\"dur\":{},\"name\":{},\"cat\":{},\"args\":{{\"chunk\":{},\"collectives\":{}{}}}}}",
                pid(s.rank),
                threads.of(&s.stream),
                micros(s.start_ns),
                micros(s.end_ns.saturating_sub(s.start_ns)),
                quote(&s.name),
                quote(&s.stream),
                s.chunk,
                s.collectives,
                s.waits
                    .as_ref()
                    .map_or(String::new(), |waits| format!(",\"waited_us\":{}", micros(waits.ns)))
            ),
            Entry::Queues(c) => write!(
                out,
                "{{\"ph\":\"C\",\"pid\":0,\"ts\":{},\"name\":\"queues\",\"args\":{{\"in\":{},\"out\":{}}}}}",
                micros(c.start_ns),
                c.queues.0,
                c.queues.1
            ),
            Entry::Mark(m) => write!(
                out,
                "{{\"ph\":\"i\",\"pid\":0,\"tid\":0,\"ts\":{},\"s\":\"g\",\"name\":{},\"args\":{{\"detail\":{}}}}}",
                micros(m.at_ns),
                quote(&m.what),
                quote(&m.detail)
            ),
        };
    }
}

/// Metadata: what to call processes and threads, and their order. Process 0 is the run.
fn names(t: &Timeline, threads: &Threads<'_>) -> Vec<String> {
    let meta = |pid: u64, tid: usize, what: &str, args: String| {
        format!("{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"{what}\",\"args\":{{{args}}}}}")
    };
    let mut out = vec![meta(0, 0, "process_name", "\"name\":\"run\"".into())];
    for r in &t.ranks {
        out.push(meta(pid(r.rank), 0, "process_name", format!("\"name\":{}", quote(&r.name))));
        out.push(meta(pid(r.rank), 0, "process_sort_index", format!("\"sort_index\":{}", pid(r.rank))));
    }
    for lane in t.lanes() {
        let (pid, tid) = (pid(lane[0].rank), threads.of(&lane[0].stream));
        out.push(meta(pid, tid, "thread_name", format!("\"name\":{}", quote(&lane[0].stream))));
        out.push(meta(pid, tid, "thread_sort_index", format!("\"sort_index\":{tid}")));
    }
    out
}

fn pid(rank: u32) -> u64 {
    u64::from(rank) + 1
}

/// A thread number per stream, the same on every rank: known streams first, then the others by name.
struct Threads<'a> {
    others: Vec<&'a str>,
}

impl<'a> Threads<'a> {
    fn new(t: &'a Timeline) -> Threads<'a> {
        let streams = t.lanes().map(|l| l[0].stream.as_str());
        let mut others: Vec<&str> = streams.filter(|s| stream_order(s) == stream_order("")).collect();
        others.sort_unstable();
        others.dedup();
        Threads { others }
    }

    fn of(&self, stream: &str) -> usize {
        1 + stream_order(stream) + self.others.iter().position(|s| *s == stream).unwrap_or(0)
    }
}

/// Microseconds with the nanoseconds as decimals.
fn micros(ns: u64) -> String {
    match ns % 1000 {
        0 => (ns / 1000).to_string(),
        rest => format!("{}.{rest:03}", ns / 1000),
    }
}

fn quote(s: &str) -> String {
    serde_json::Value::from(s).to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn names_ranks_and_streams() {
        let text = trace(&Timeline::from_record(&sample(1)));
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
        assert_eq!(text, trace(&Timeline::from_record(&sample(1))));
    }

    #[test]
    fn a_long_run_keeps_both_ends_and_says_so() {
        let t = Timeline::from_record(&sample(50));
        let text = trace_within(&t, 11);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let events: Vec<_> =
            json["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] != "M").collect();
        assert_eq!(events.len(), 11);
        assert_eq!(events[0]["ts"], 1000);
        assert_eq!(events[10]["ts"], 501_000);
        assert_eq!(json["otherData"]["events_recorded"], 50 * 7 + 1);
        assert_eq!(json["otherData"]["cut"], "340 events between the first and the last were left out");
        let whole: serde_json::Value = serde_json::from_str(&trace(&t)).unwrap();
        assert_eq!(whole["otherData"].get("cut"), None);
    }

    #[test]
    fn streams_without_a_place_follow() {
        let mut t = Timeline::from_record(&sample(1));
        t.spans[0].stream = "zeta".into();
        t.spans[1].stream = "alpha".into();
        t.sort();
        let threads = Threads::new(&t);
        assert_eq!((threads.of("compute"), threads.of("alpha"), threads.of("zeta")), (1, 7, 8));
    }
}
