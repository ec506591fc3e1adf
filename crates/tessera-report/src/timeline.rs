//! A timeline, of a run or of an estimate, which is the common input of all charts and traces.

use std::collections::BTreeMap;

use crate::record::{RunKind, RunRecord, StreamWaits};

/// The phases that ran on each stream of each rank, with the chunks and events of the run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Timeline {
    /// Ranks in ascending order, with their display names.
    pub ranks: Vec<RankName>,
    /// Chunks in order of their start.
    pub chunks: Vec<TimelineChunk>,
    /// Spans, sorted by rank, stream and start.
    pub spans: Vec<TimelineSpan>,
    /// Event marks in order of time.
    pub marks: Vec<TimelineMark>,
    /// Frames of the chunks between the first and the last that are not in `chunks`.
    pub omitted_frames: u64,
    /// What the run generates, which names its chunks.
    pub generates: RunKind,
    /// Numbers that the user of the run gave its streams; empty if nobody did.
    pub stream_ids: BTreeMap<String, u32>,
}

/// A rank and its display name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankName {
    /// Rank whose spans the charts show under the name.
    pub rank: u32,
    /// Display name, such as `rank 0 · stage0`.
    pub name: String,
}

/// Time of a chunk from commit to its last frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineChunk {
    /// Index of the chunk in the stream, from 0.
    pub chunk: u32,
    /// Number of pixel frames that the chunk adds to the clip.
    pub frames: u32,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// Time of the chunk's last frame, on the same clock.
    pub end_ns: u64,
    /// Number of calls in the input queue and of results in the output queue.
    pub queue_lengths: (u32, u32),
}

/// A phase that ran on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineSpan {
    /// Rank on which the phase ran, or for which it was estimated.
    pub rank: u32,
    /// Stream on which the phase ran, such as `compute`; [`stream_order`] sorts the streams.
    pub stream: String,
    /// Name of the phase, such as `denoise.fill3`; in an estimate and in a trace of ops, of the op.
    pub name: String,
    /// Chunk to which the phase belongs.
    pub chunk: u32,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// End on the same clock, never before the start.
    pub end_ns: u64,
    /// Number of collectives that the phase issued.
    pub collectives: u32,
    /// Times in which the phase's stream was idle; `None` if unknown.
    pub waits: Option<StreamWaits>,
}

/// An event at one instant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimelineMark {
    /// Time of the event, in nanoseconds since the run's start.
    pub at_ns: u64,
    /// Kind of event, in one or two words.
    pub label: String,
    /// What happened, in words for the reader, such as `chunk 4 begins epoch 2`.
    pub detail: String,
}

/// A half-open interval of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeWindow {
    /// First nanosecond inside the interval.
    pub start_ns: u64,
    /// One past the last.
    pub end_ns: u64,
}

impl Timeline {
    /// Converts a record: chunks, phases as spans, and events as marks, sorted into drawing order.
    #[must_use]
    pub fn from_record(record: &RunRecord) -> Timeline {
        let mut t = Timeline {
            omitted_frames: record.omitted.frames,
            generates: record.start.generates,
            ..Timeline::default()
        };
        for c in &record.chunks {
            t.chunks.push(TimelineChunk {
                chunk: c.chunk,
                frames: c.frames,
                start_ns: c.start_ns,
                end_ns: c.start_ns.saturating_add(c.wall_ns),
                queue_lengths: (c.queue_in, c.queue_out),
            });
            for r in &c.ranks {
                t.spans.extend(r.phases.iter().map(|p| TimelineSpan {
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
        t.marks.extend(record.events.iter().filter(|e| !e.is_startup_report()).map(|e| TimelineMark {
            at_ns: e.at_ns,
            label: e.event.clone(),
            detail: e.detail.clone(),
        }));
        for r in &record.start.ranks {
            t.ranks.push(RankName { rank: r.rank, name: format!("rank {} · {}", r.rank, r.role) });
        }
        t.sort_and_name();
        t
    }

    /// Sorts everything into drawing order and names the ranks that lack a name.
    pub fn sort_and_name(&mut self) {
        self.chunks.sort_by_key(|c| (c.start_ns, c.chunk));
        self.marks.sort_by_key(|m| m.at_ns);
        self.spans.sort_by(|a, b| {
            let key = |s: &TimelineSpan| (s.rank, stream_order(&s.stream));
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

    /// Returns the window of the first `chunks` steady chunks. Chunk 0 fills caches and pipelines
    /// and is left out if there are others.
    #[must_use]
    pub fn steady_window(&self, chunks: usize) -> Option<TimeWindow> {
        let skip = usize::from(self.chunks.len() > 1);
        self.chunk_window(skip, skip + chunks)
    }

    /// Returns the window of the last `chunks` chunks and of what follows them, up to twice their
    /// length: after a failure, the silence before the watchdog fires may be much longer than a
    /// chunk.
    #[must_use]
    pub fn tail_window(&self, chunks: usize) -> Option<TimeWindow> {
        let window = self.chunk_window(self.chunks.len().saturating_sub(chunks), self.chunks.len())?;
        let most = window.end_ns.saturating_add(window.end_ns - window.start_ns);
        Some(TimeWindow { end_ns: self.end_ns().clamp(window.end_ns, most), ..window })
    }

    /// Returns the end of the last span, chunk or mark.
    #[must_use]
    pub fn end_ns(&self) -> u64 {
        let spans = self.spans.iter().map(|s| s.end_ns);
        let chunks = self.chunks.iter().map(|c| c.end_ns);
        spans.chain(chunks).chain(self.marks.iter().map(|m| m.at_ns)).max().unwrap_or(0)
    }

    /// Iterates over the runs of spans that share a rank and a stream, in drawing order.
    pub fn spans_by_lane(&self) -> impl Iterator<Item = &[TimelineSpan]> {
        self.spans.chunk_by(|a, b| a.rank == b.rank && a.stream == b.stream)
    }

    /// Returns the display name of a rank; empty for an unknown rank.
    pub(crate) fn rank_name(&self, rank: u32) -> &str {
        self.ranks.iter().find(|r| r.rank == rank).map_or("", |r| r.name.as_str())
    }

    fn chunk_window(&self, from: usize, to: usize) -> Option<TimeWindow> {
        let chosen = self.chunks.get(from..to.min(self.chunks.len())).filter(|c| !c.is_empty())?;
        let start_ns = chosen.iter().map(|c| c.start_ns).min()?;
        let end_ns = chosen.iter().map(|c| c.end_ns).max()?;
        (end_ns > start_ns).then_some(TimeWindow { start_ns, end_ns })
    }
}

impl TimelineSpan {
    /// Returns whether any part of the span is inside a window.
    pub(crate) fn is_inside(&self, window: TimeWindow) -> bool {
        self.end_ns >= window.start_ns && self.start_ns < window.end_ns
    }
}

/// Returns the kind of a phase: its name up to the first dot. The phases of a language model, which read prompts or
/// decode, differ in their numbers alone and are kinds of their own.
#[must_use]
pub fn phase_kind(name: &str) -> &str {
    if is_text_phase(name) { name } else { name.split('.').next().unwrap_or(name) }
}

/// Returns whether a phase reads prompts or decodes.
pub(crate) fn is_text_phase(name: &str) -> bool {
    name.starts_with("tokens.")
}

/// Returns the sort position of a stream among the streams of a rank; unknown streams follow the
/// known ones.
#[must_use]
pub fn stream_order(stream: &str) -> usize {
    const ORDER: [&str; 6] = ["compute", "tp_collective", "a2a", "io", "control", "decode"];
    ORDER.iter().position(|s| *s == stream).unwrap_or(ORDER.len())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::{
        ChunkRecord, PhaseRecord, RankChunk, RankRole, RunEnd, RunEvent, RunStart, RunStatus, SCHEMA,
        ScheduledPrompt,
    };

    /// A complete run of two ranks with chunks of 10 ms, back to back from 1 ms on.
    pub(crate) fn sample(chunks: u32) -> RunRecord {
        let ms = 1_000_000;
        let phase = |name: &str, stream: &str, from: u64, to: u64, collectives| PhaseRecord {
            name: name.into(),
            stream: stream.into(),
            start_ns: from,
            end_ns: to,
            collectives,
            waits: None,
            classes: Vec::new(),
        };
        RunRecord {
            start: RunStart {
                generates: crate::record::RunKind::Video,
                schema: SCHEMA,
                tessera: "0.1.0".into(),
                host: Some(Box::default()),
                plan: "ab12".repeat(16),
                model: "demo".into(),
                mesh: "tp=2,pp=1".into(),
                strategy: "tp: ulysses".into(),
                numerics: "fast".into(),
                weights: String::new(),
                dtype: "f32".into(),
                cache: "resident".into(),
                topology: "pp0".into(),
                seed: u64::MAX,
                prompts: vec![ScheduledPrompt {
                    chunk: 0,
                    text: "a <b>red</b> kite & \"wind\"".into(),
                    kind: None,
                }],
                chunks: Some(chunks),
                fps: 16.0,
                width: 128,
                height: 96,
                steps: 2,
                command: vec!["tessera".into(), "stream".into(), "demo".into()],
                started_at: "2025-01-01T00:00:00Z".into(),
                status: RunStatus::Running,
                ranks: vec![
                    RankRole { rank: 0, role: "lead".into() },
                    RankRole { rank: 1, role: "stage0".into() },
                ],
                device: crate::record::RunDevice::Cpu,
                machine: None,
                outputs: Vec::new(),
            },
            chunks: (0..chunks)
                .map(|i| {
                    let t = ms + u64::from(i) * 10 * ms;
                    ChunkRecord {
                        chunk: i,
                        request: Some(u64::from(i)),
                        call_id: u64::from(i) + 1,
                        cache_epoch: 0,
                        start_frame: u64::from(i) * 12,
                        prompt: "a kite".into(),
                        seed: 7,
                        cut: i == 2,
                        step_list: None,
                        bias: None,
                        weights: None,
                        evicted_frames: 0,
                        decoder_psnr_db: None,
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
                                memory: None,
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
                                memory: None,
                            },
                        ],
                        pipeline: None,
                    }
                })
                .collect(),
            omitted: crate::record::OmittedChunks::default(),
            events: vec![RunEvent {
                at_ns: 2 * ms,
                event: "prompt".into(),
                detail: "now </script> \"x\"".into(),
                startup: None,
                memory: None,
            }],
            end: Some(RunEnd {
                status: RunStatus::Complete,
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
        let lanes: Vec<_> = t.spans_by_lane().map(|l| (l[0].rank, l[0].stream.as_str(), l.len())).collect();
        assert_eq!(lanes, [(0, "decode", 2), (1, "compute", 6)]);
        assert_eq!(t.ranks[1].name, "rank 1 · stage0");
        let starts: Vec<_> = t.spans.iter().filter(|s| s.rank == 1).map(|s| s.start_ns).collect();
        assert!(starts.is_sorted());
    }

    #[test]
    fn windows_leave_the_first_chunk_out() {
        let t = Timeline::from_record(&sample(9));
        assert_eq!(t.steady_window(4), Some(TimeWindow { start_ns: 11_000_000, end_ns: 51_000_000 }));
        assert_eq!(t.tail_window(4), Some(TimeWindow { start_ns: 51_000_000, end_ns: 91_000_000 }));
        let mut stalled = t.clone();
        stalled.marks.push(TimelineMark {
            at_ns: 5_000_000_000,
            label: "stall".into(),
            detail: String::new(),
        });
        assert_eq!(stalled.tail_window(4), Some(TimeWindow { start_ns: 51_000_000, end_ns: 131_000_000 }));
        assert_eq!(Timeline::from_record(&sample(1)).steady_window(4).unwrap().start_ns, 1_000_000);
        assert_eq!(Timeline::default().steady_window(4), None);
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
