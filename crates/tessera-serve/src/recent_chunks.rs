//! The latest chunks of a run as its record describes them, and whether the first ones have the digests of a recorded session.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tessera_report::overlap::OverlapStats;
use tessera_report::record::{ChunkRecord, RecordLine};

/// Chunks that are kept.
const KEPT_CHUNKS: usize = 32;
/// Chunks that the page draws.
const SHOWN_CHUNKS: usize = 6;
/// Most bytes of a record that one call reads.
const MAX_READ_BYTES: u64 = 4 << 20;

/// Reads a record while its run writes it.
#[derive(Debug)]
pub(crate) struct RecentChunks {
    path: PathBuf,
    /// Bytes of the file that were read.
    position: u64,
    /// Bytes of a line that is not whole.
    partial: Vec<u8>,
    chunks: VecDeque<ChunkRecord>,
    /// Digests that the first chunks must have.
    expected: Vec<String>,
    /// Number of chunks that were read.
    read: u32,
    /// The first chunk that has another digest.
    differing: Option<u32>,
}

/// The latest chunks, for drawing.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct ChunkTimeline {
    /// Oldest first.
    pub(crate) chunks: Vec<ChunkTimes>,
}

/// The times of one chunk, in milliseconds since the start of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct ChunkTimes {
    pub(crate) chunk: u32,
    pub(crate) request: Option<u64>,
    pub(crate) epoch: u32,
    pub(crate) prompt: String,
    pub(crate) cut: bool,
    /// Commit of the call, and the delivery of its last frame.
    pub(crate) span: (f64, f64),
    pub(crate) ranks: Vec<RankTimes>,
}

/// The phases of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RankTimes {
    pub(crate) rank: u32,
    pub(crate) phases: Vec<PhaseTimes>,
}

/// One phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PhaseTimes {
    pub(crate) name: String,
    pub(crate) stream: String,
    pub(crate) span: (f64, f64),
}

impl RecentChunks {
    /// Begins with an empty record, whose first chunks must have these digests of latents.
    pub(crate) fn new(path: &Path, expected: Vec<String>) -> RecentChunks {
        RecentChunks {
            path: path.to_path_buf(),
            position: 0,
            partial: Vec::new(),
            chunks: VecDeque::new(),
            expected,
            read: 0,
            differing: None,
        }
    }

    /// Returns the first of so many chunks that is not the expected one, or that the record lacks.
    pub(crate) fn first_difference(&self, chunks: u32) -> Option<u32> {
        self.differing.or((self.read < chunks).then_some(self.read))
    }

    /// Reads the lines that were added, and returns the number of their chunks. A record that cannot be read now is read later: it only serves people who look.
    pub(crate) fn read_new_lines(&mut self) -> usize {
        let before = self.read;
        let mut bytes = std::mem::take(&mut self.partial);
        let begun = bytes.len() as u64;
        let read = File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.position))?;
            file.take(MAX_READ_BYTES).read_to_end(&mut bytes)
        });
        self.position += read.map_or(bytes.len() as u64 - begun, |count| count as u64);
        let end = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        self.partial = bytes.split_off(end);
        for line in bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
            if let Ok(RecordLine::Chunk(chunk)) = serde_json::from_slice(line) {
                let expected = self.expected.get(self.read as usize);
                if expected.is_some_and(|digest| *digest != chunk.latents_digest) {
                    self.differing.get_or_insert(self.read);
                }
                self.read += 1;
                self.chunks.push_back(chunk);
            }
        }
        let surplus = self.chunks.len().saturating_sub(KEPT_CHUNKS);
        self.chunks.drain(..surplus);
        (self.read - before) as usize
    }

    /// Returns the newest chunks, oldest first: so many, or those that are kept.
    pub(crate) fn newest(&self, count: usize) -> impl Iterator<Item = &ChunkRecord> {
        self.chunks.iter().skip(self.chunks.len().saturating_sub(count))
    }

    /// Returns the OverlapScore of the kept chunks.
    pub(crate) fn overlap_score(&mut self) -> Option<f64> {
        OverlapStats::from_chunks(self.chunks.make_contiguous())?.score
    }

    /// Returns the times of the latest chunks.
    pub(crate) fn timeline(&self) -> ChunkTimeline {
        let from = self.chunks.len().saturating_sub(SHOWN_CHUNKS);
        ChunkTimeline { chunks: self.chunks.range(from..).map(times_of_chunk).collect() }
    }
}

fn times_of_chunk(record: &ChunkRecord) -> ChunkTimes {
    let ranks = record.ranks.iter().map(|rank| RankTimes {
        rank: rank.rank,
        phases: rank
            .phases
            .iter()
            .map(|phase| PhaseTimes {
                name: phase.name.clone(),
                stream: phase.stream.clone(),
                span: (to_ms(phase.start_ns), to_ms(phase.end_ns)),
            })
            .collect(),
    });
    ChunkTimes {
        chunk: record.chunk,
        request: record.request,
        epoch: record.cache_epoch,
        prompt: record.prompt.clone(),
        cut: record.cut,
        span: (to_ms(record.start_ns), to_ms(record.start_ns + record.wall_ns)),
        ranks: ranks.collect(),
    }
}

fn to_ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn line(chunk: u32) -> String {
        format!(
            r#"{{"kind":"chunk","chunk":{chunk},"call_id":1,"cache_epoch":1,"start_frame":0,"prompt":"a <b>","seed":1,"cut":false,"latents_digest":"","frames":12,"start_ns":1000000,"wall_ns":500000,"queue_in":0,"queue_out":0,"ranks":[{{"rank":0,"phases":[{{"name":"denoise.1","stream":"compute","start_ns":0,"end_ns":2000000,"collectives":0}}],"state_digest":"","trace_digest":""}}]}}"#
        ) + "\n"
    }

    #[test]
    fn lines_are_read_as_they_become_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.jsonl");
        let mut chunks = RecentChunks::new(&path, Vec::new());
        chunks.read_new_lines();
        assert!(chunks.timeline().chunks.is_empty());
        let mut file = std::fs::File::create(&path).unwrap();
        let second = line(1);
        let (half, rest) = second.split_at(90);
        write!(file, "{}{half}", line(0)).unwrap();
        chunks.read_new_lines();
        assert_eq!(chunks.chunks.back().map(|c| c.chunk), Some(0));
        write!(file, "{rest}").unwrap();
        chunks.read_new_lines();
        assert_eq!(chunks.chunks.back().map(|c| c.chunk), Some(1));
        (2..50).for_each(|chunk| write!(file, "{}", line(chunk)).unwrap());
        chunks.read_new_lines();
        let timeline = chunks.timeline();
        assert_eq!(timeline.chunks.iter().map(|c| c.chunk).collect::<Vec<_>>(), (44..50).collect::<Vec<_>>());
        assert_eq!(timeline.chunks[0].ranks[0].phases[0].span, (0.0, 2.0));
        assert_eq!(chunks.chunks.len(), KEPT_CHUNKS);
    }

    #[test]
    fn a_chunk_with_another_digest_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.jsonl");
        std::fs::write(&path, [line(0), line(1)].concat()).unwrap();
        let read = |digests: &[&str]| {
            let mut chunks = RecentChunks::new(&path, digests.iter().map(ToString::to_string).collect());
            chunks.read_new_lines();
            chunks
        };
        let same = read(&["", "", ""]);
        assert_eq!((same.first_difference(2), same.first_difference(3)), (None, Some(2)));
        assert_eq!(read(&["", "other"]).first_difference(2), Some(1));
    }
}
