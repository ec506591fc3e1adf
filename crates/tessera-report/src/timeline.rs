//! One neutral timeline, of a run or of an estimate, that every drawing is made from.

use crate::record::{Record, Waits};

/// What ran when, on which stream of which rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Timeline {
    /// Ranks in order, with the names to show.
    pub ranks: Vec<RankName>,
    /// Chunks in order of their start.
    pub chunks: Vec<ChunkSpan>,
    /// Spans, sorted by rank, stream order, start.
    pub spans: Vec<Span>,
    /// Marks in order of time.
    pub marks: Vec<Mark>,
    /// Frames of chunks between the first and the last that are not here.
    pub left_out_frames: u64,
}

/// A rank and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankName {
    /// Rank of the process.
    pub rank: u32,
    /// Such as `rank 0 · stage0`.
    pub name: String,
}

/// A chunk from commit to last frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkSpan {
    /// Index in the stream.
    pub chunk: u32,
    /// Frames it gave.
    pub frames: u32,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// End, same clock.
    pub end_ns: u64,
    /// Calls waiting to enter, results waiting to leave.
    pub queues: (u32, u32),
}

/// A phase on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Rank of the process.
    pub rank: u32,
    /// Stream.
    pub stream: String,
    /// Phase.
    pub name: String,
    /// Chunk it belongs to.
    pub chunk: u32,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// End, same clock, never before the start.
    pub end_ns: u64,
    /// Collectives issued in it.
    pub collectives: u32,
    /// When its stream had nothing to do in it; none where nobody knows.
    pub waits: Option<Waits>,
}

/// A moment worth a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// When, in nanoseconds since the run's start.
    pub at_ns: u64,
    /// What, in one or two words.
    pub what: String,
    /// The rest.
    pub detail: String,
}

/// A stretch of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First nanosecond.
    pub start_ns: u64,
    /// One past the last.
    pub end_ns: u64,
}

impl Timeline {
    /// The timeline of a recorded run.
    #[must_use]
    pub fn from_record(record: &Record) -> Timeline {
        let mut t = Timeline { left_out_frames: record.left_out.frames, ..Timeline::default() };
        for c in &record.chunks {
            t.chunks.push(ChunkSpan {
                chunk: c.chunk,
                frames: c.frames,
                start_ns: c.start_ns,
                end_ns: c.start_ns.saturating_add(c.wall_ns),
                queues: (c.queue_in, c.queue_out),
            });
            for r in &c.ranks {
                t.spans.extend(r.phases.iter().map(|p| Span {
                    rank: r.rank,
                    stream: p.stream.clone(),
                    name: p.name.clone(),
                    chunk: c.chunk,
                    start_ns: p.start_ns,
                    end_ns: p.end_ns.max(p.start_ns),
                    collectives: p.collectives,
                    waits: p.waits.clone(),
                }));
            }
        }
        t.marks.extend(record.events.iter().map(|e| Mark {
            at_ns: e.at_ns,
            what: e.what.clone(),
            detail: e.detail.clone(),
        }));
        for r in &record.start.ranks {
            t.ranks.push(RankName { rank: r.rank, name: format!("rank {} · {}", r.rank, r.role) });
        }
        t.sort();
        t
    }

    /// Puts a timeline built by hand into the order that the drawings need, and names ranks that lack a name.
    pub fn sort(&mut self) {
        self.chunks.sort_by_key(|c| (c.start_ns, c.chunk));
        self.marks.sort_by_key(|m| m.at_ns);
        self.spans.sort_by(|a, b| {
            let key = |s: &Span| (s.rank, stream_order(&s.stream));
            (key(a), &a.stream, a.start_ns, a.end_ns).cmp(&(key(b), &b.stream, b.start_ns, b.end_ns))
        });
        let mut known: Vec<u32> = self.ranks.iter().map(|r| r.rank).collect();
        for s in &self.spans {
            if !known.contains(&s.rank) {
                known.push(s.rank);
                self.ranks.push(RankName { rank: s.rank, name: format!("rank {}", s.rank) });
            }
        }
        self.ranks.sort_by_key(|r| r.rank);
    }

    /// The first few steady chunks: chunk 0 fills caches and pipelines and is left out where others exist.
    #[must_use]
    pub fn steady(&self, chunks: usize) -> Option<Window> {
        let skip = usize::from(self.chunks.len() > 1);
        self.window(skip, skip + chunks)
    }

    /// The last few chunks and what follows them, for as long again at most: after a failure the silence
    /// before the watchdog may be much longer than a chunk.
    #[must_use]
    pub fn tail(&self, chunks: usize) -> Option<Window> {
        let window = self.window(self.chunks.len().saturating_sub(chunks), self.chunks.len())?;
        let most = window.end_ns.saturating_add(window.end_ns - window.start_ns);
        Some(Window { end_ns: self.end_ns().clamp(window.end_ns, most), ..window })
    }

    /// Where the last span, chunk or mark ends.
    #[must_use]
    pub fn end_ns(&self) -> u64 {
        let spans = self.spans.iter().map(|s| s.end_ns);
        let chunks = self.chunks.iter().map(|c| c.end_ns);
        spans.chain(chunks).chain(self.marks.iter().map(|m| m.at_ns)).max().unwrap_or(0)
    }

    /// Runs of spans that share a rank and a stream, in drawing order.
    pub fn lanes(&self) -> impl Iterator<Item = &[Span]> {
        self.spans.chunk_by(|a, b| a.rank == b.rank && a.stream == b.stream)
    }

    fn window(&self, from: usize, to: usize) -> Option<Window> {
        let chosen = self.chunks.get(from..to.min(self.chunks.len())).filter(|c| !c.is_empty())?;
        let start_ns = chosen.iter().map(|c| c.start_ns).min()?;
        let end_ns = chosen.iter().map(|c| c.end_ns).max()?;
        (end_ns > start_ns).then_some(Window { start_ns, end_ns })
    }
}

/// Kind of a phase: its name up to the first dot.
#[must_use]
pub fn phase_kind(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// Place of a stream among the streams of a rank; unknown ones follow the known ones.
#[must_use]
pub fn stream_order(stream: &str) -> usize {
    const ORDER: [&str; 6] = ["compute", "tp_collective", "a2a", "io", "control", "decode"];
    ORDER.iter().position(|s| *s == stream).unwrap_or(ORDER.len())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::record::{Chunk, End, Event, Phase, PromptAt, RankChunk, RankRole, SCHEMA, Start, Status};

    /// A complete run of two ranks: chunks of 10 ms, back to back from 1 ms on.
    pub(crate) fn sample(chunks: u32) -> Record {
        let ms = 1_000_000;
        let phase = |name: &str, stream: &str, from: u64, to: u64, collectives| Phase {
            name: name.into(),
            stream: stream.into(),
            start_ns: from,
            end_ns: to,
            collectives,
            waits: None,
        };
        Record {
            start: Start {
                schema: SCHEMA,
                tessera: "0.1.0".into(),
                plan: "ab12".repeat(16),
                model: "demo".into(),
                mesh: "tp=2,pp=1".into(),
                strategy: "tp: ulysses".into(),
                numerics: "fast".into(),
                dtype: "f32".into(),
                cache: "resident".into(),
                topology: "pp0".into(),
                seed: u64::MAX,
                prompts: vec![PromptAt { chunk: 0, text: "a <b>red</b> kite & \"wind\"".into() }],
                chunks: Some(chunks),
                fps: 16.0,
                width: 128,
                height: 96,
                steps: 2,
                command: vec!["tessera".into(), "stream".into(), "demo".into()],
                started_at: "2025-01-01T00:00:00Z".into(),
                status: Status::Running,
                ranks: vec![
                    RankRole { rank: 0, role: "lead".into() },
                    RankRole { rank: 1, role: "stage0".into() },
                ],
                device: crate::record::Device::Cpu,
                machine: None,
            },
            chunks: (0..chunks)
                .map(|i| {
                    let t = ms + u64::from(i) * 10 * ms;
                    Chunk {
                        chunk: i,
                        request: Some(u64::from(i)),
                        call_id: u64::from(i) + 1,
                        cache_epoch: 0,
                        start_frame: u64::from(i) * 12,
                        prompt: "a kite".into(),
                        seed: 7,
                        cut: i == 2,
                        latents_digest: "00ff".into(),
                        frames: 12,
                        start_ns: t,
                        wall_ns: 10 * ms,
                        queue_in: 1,
                        queue_out: 0,
                        ranks: vec![
                            RankChunk {
                                rank: 0,
                                phases: vec![phase("decode", "decode", t + 9 * ms, t + 10 * ms, 0)],
                                state_digest: "aa".into(),
                                trace_digest: "bb".into(),
                            },
                            RankChunk {
                                rank: 1,
                                phases: vec![
                                    phase("denoise.0", "compute", t, t + 4 * ms, 6),
                                    phase("denoise.1", "compute", t + 4 * ms, t + 8 * ms, 6),
                                    phase("clean", "compute", t + 8 * ms, t + 9 * ms + 250, 3),
                                ],
                                state_digest: "cc".into(),
                                trace_digest: "dd".into(),
                            },
                        ],
                        pipeline: None,
                    }
                })
                .collect(),
            left_out: crate::record::LeftOut::default(),
            events: vec![Event {
                at_ns: 2 * ms,
                what: "prompt".into(),
                detail: "now </script> \"x\"".into(),
            }],
            end: Some(End {
                status: Status::Complete,
                cause: None,
                chunks,
                frames: u64::from(chunks) * 12,
                wall_ns: ms + u64::from(chunks) * 10 * ms,
                fps: 1090.909,
                output_complete: true,
                golden: "feed".into(),
            }),
            truncated: false,
        }
    }

    #[test]
    fn lanes_are_by_rank_then_stream_then_time() {
        let t = Timeline::from_record(&sample(2));
        let lanes: Vec<_> = t.lanes().map(|l| (l[0].rank, l[0].stream.as_str(), l.len())).collect();
        assert_eq!(lanes, [(0, "decode", 2), (1, "compute", 6)]);
        assert_eq!(t.ranks[1].name, "rank 1 · stage0");
        let starts: Vec<_> = t.spans.iter().filter(|s| s.rank == 1).map(|s| s.start_ns).collect();
        assert!(starts.is_sorted());
    }

    #[test]
    fn windows_leave_the_first_chunk_out() {
        let t = Timeline::from_record(&sample(9));
        assert_eq!(t.steady(4), Some(Window { start_ns: 11_000_000, end_ns: 51_000_000 }));
        assert_eq!(t.tail(4), Some(Window { start_ns: 51_000_000, end_ns: 91_000_000 }));
        let mut stalled = t.clone();
        stalled.marks.push(Mark { at_ns: 5_000_000_000, what: "stall".into(), detail: String::new() });
        assert_eq!(stalled.tail(4), Some(Window { start_ns: 51_000_000, end_ns: 131_000_000 }));
        assert_eq!(Timeline::from_record(&sample(1)).steady(4).unwrap().start_ns, 1_000_000);
        assert_eq!(Timeline::default().steady(4), None);
    }

    #[test]
    fn ranks_without_a_name_get_one() {
        let mut record = sample(1);
        record.start.ranks.clear();
        let t = Timeline::from_record(&record);
        assert_eq!(t.ranks[0].name, "rank 0");
        assert_eq!(t.ranks.len(), 2);
    }
}
