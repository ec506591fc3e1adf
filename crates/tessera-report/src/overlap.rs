//! The OverlapScore of a run, which measures how well the two stages of a stream overlap.
//!
//! Stage 0 is the leader's own work for a chunk: context, decode, write. Stage 1 is the generator
//! on the mesh. Each stage is timed on its own clock and the period on the leader's, so no instants
//! of different clocks are compared. A chunk's period is the time from its commit to the next
//! chunk's commit, which the next chunk's record holds: its own stage 1 runs in that time. The *overlap ratio* of a device, the share of collective time
//! that other work hides, is a different measure.

use crate::markup::format_plural;
use crate::record::ChunkRecord;
use crate::stats::nearest_rank_quantile;

/// Minimum score of a stream that counts as overlapped.
pub const OVERLAP_GATE: f64 = 0.30;

/// Minimum number of chunks behind a score. The median of fewer depends on single chunks.
pub const SCORED_CHUNKS_MIN: u32 = 5;

/// Pipeline statistics of a run's chunks, without the last chunk of each scene, whose period ends
/// with the first commit of another scene or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct OverlapStats {
    /// Number of chunks behind these statistics.
    pub chunks: u32,
    /// Median of the chunks' [`overlap_score`]; `None` below [`SCORED_CHUNKS_MIN`] chunks.
    pub score: Option<f64>,
    /// Median time from one commit to the next, in nanoseconds.
    pub period_ns: u64,
    /// Median time of the leader's work for a chunk, in nanoseconds.
    pub stage0_ns: u64,
    /// Median time from a commit until the last rank reports the chunk done, in nanoseconds.
    pub stage1_ns: u64,
    /// Median time for which the mesh is idle before a commit, in nanoseconds.
    pub idle_ns: u64,
    /// Maximum number of requests that waited when a call finished.
    pub queue_in: u32,
    /// Maximum number of finished chunks in the output queue when a chunk was done.
    pub queue_out: u32,
    /// Share of the periods that digests took on the rank that spent the most time on them, from 0
    /// to 1.
    pub digest_share: f64,
}

impl OverlapStats {
    /// Computes the statistics of a record's chunks; `None` if no chunk with pipeline times counts.
    #[must_use]
    pub fn from_chunks(chunks: &[ChunkRecord]) -> Option<OverlapStats> {
        let counted: Vec<CountedChunk> = chunks.windows(2).filter_map(CountedChunk::from_pair).collect();
        if counted.is_empty() {
            return None;
        }
        let median = |of: &dyn Fn(&CountedChunk) -> u64| {
            nearest_rank_quantile(&counted.iter().map(of).collect::<Vec<_>>(), 50)
        };
        let mut scores: Vec<f64> =
            counted.iter().map(|c| overlap_score(c.stage0_ns, c.stage1_ns, c.period_ns)).collect();
        scores.sort_by(f64::total_cmp);
        let total = |of: &dyn Fn(&CountedChunk) -> u64| counted.iter().map(|c| of(c) as f64).sum::<f64>();
        let chunks = counted.len() as u32;
        Some(OverlapStats {
            chunks,
            score: (chunks >= SCORED_CHUNKS_MIN).then(|| scores[(scores.len() - 1) / 2]),
            period_ns: median(&|c| c.period_ns),
            stage0_ns: median(&|c| c.stage0_ns),
            stage1_ns: median(&|c| c.stage1_ns),
            idle_ns: median(&|c| c.idle_ns),
            queue_in: counted.iter().map(|c| c.queue_in).max().unwrap_or(0),
            queue_out: counted.iter().map(|c| c.queue_out).max().unwrap_or(0),
            digest_share: total(&|c| c.digest_ns) / total(&|c| c.period_ns),
        })
    }

    /// Returns whether the score reaches a gate; `None` if there is no score.
    #[must_use]
    pub fn passes_gate(&self, gate: f64) -> Option<bool> {
        self.score.map(|score| score >= gate)
    }

    /// Returns the score with the number of its chunks, or why it is withheld.
    #[must_use]
    pub fn describe_score(&self) -> String {
        let chunks = format_plural(u64::from(self.chunks), "chunk");
        match self.score {
            Some(score) => format!("OverlapScore {score:.2} over {chunks}"),
            None => format!("no OverlapScore: {chunks} counted, {SCORED_CHUNKS_MIN} needed"),
        }
    }
}

/// The times of one chunk between its commit and the next.
struct CountedChunk {
    period_ns: u64,
    stage0_ns: u64,
    stage1_ns: u64,
    idle_ns: u64,
    digest_ns: u64,
    queue_in: u32,
    queue_out: u32,
}

impl CountedChunk {
    /// Takes the stages of the first of two chunks and the period that the second one records.
    fn from_pair(pair: &[ChunkRecord]) -> Option<CountedChunk> {
        let [chunk, next] = pair else { return None };
        let (own, after) = (chunk.pipeline.as_ref()?, next.pipeline.as_ref()?);
        let adjacent = chunk.chunk.checked_add(1) == Some(next.chunk) && !next.cut && after.period_ns > 0;
        adjacent.then(|| CountedChunk {
            period_ns: after.period_ns,
            stage0_ns: own.stage0_ns,
            stage1_ns: own.stage1_ns,
            idle_ns: after.idle_ns,
            digest_ns: own.digest_ns,
            queue_in: chunk.queue_in.max(next.queue_in),
            queue_out: chunk.queue_out.max(next.queue_out),
        })
    }
}

/// Returns the time that one chunk saved by overlapping its stages, divided by the maximum possible
/// saving: max(0, stage0 + stage1 − period) / min(stage0, stage1). The result is 0 if the stages
/// run one after the other, 1 if the shorter stage is completely hidden, and 0 if there is nothing
/// to hide.
#[must_use]
pub fn overlap_score(stage0_ns: u64, stage1_ns: u64, period_ns: u64) -> f64 {
    let shorter = stage0_ns.min(stage1_ns);
    if shorter == 0 {
        return 0.0;
    }
    let hidden = (stage0_ns.saturating_add(stage1_ns)).saturating_sub(period_ns);
    (hidden as f64 / shorter as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::PipelineTimes;
    use crate::timeline::tests::sample;

    // proves: O-12
    #[test]
    fn the_score_of_known_cases() {
        assert_eq!(overlap_score(200, 800, 1000), 0.0, "sequential");
        assert_eq!(overlap_score(200, 800, 800), 1.0, "the shorter stage is hidden");
        assert_eq!(overlap_score(200, 800, 900), 0.5);
        assert_eq!(overlap_score(200, 800, 1500), 0.0, "slower than sequential");
        assert_eq!(overlap_score(800, 200, 800), 1.0);
        assert_eq!(overlap_score(200, 800, 100), 1.0, "never above 1");
        assert_eq!(overlap_score(0, 800, 800), 0.0, "nothing to hide");
    }

    fn pipeline_times(period_ns: u64, stage1_ns: u64) -> PipelineTimes {
        PipelineTimes {
            decided_ns: 0,
            ready_ns: 1,
            done_ns: 9,
            period_ns,
            stage0_ns: 200,
            stage1_ns,
            idle_ns: period_ns / 10,
            digest_ns: 9,
        }
    }

    // proves: V-04
    #[test]
    fn a_run_is_the_median_of_its_chunks_without_the_last_of_a_scene() {
        let mut record = sample(8);
        assert_eq!(OverlapStats::from_chunks(&record.chunks), None, "no chunk has pipeline times");
        for (chunk, period) in record.chunks.iter_mut().zip([0, 800, 1, 900, 1000, 900, 900, 900]) {
            chunk.pipeline = Some(pipeline_times(period, 800));
        }
        record.chunks[2].cut = true;
        record.chunks[3].queue_out = 2;
        let o = OverlapStats::from_chunks(&record.chunks).unwrap();
        assert_eq!((o.chunks, o.score, o.period_ns, o.idle_ns), (6, Some(0.5), 900, 90));
        assert_eq!((o.queue_in, o.queue_out), (1, 2));
        assert!((o.digest_share - 0.01).abs() < 1e-12);
        assert_eq!((o.passes_gate(0.5), o.passes_gate(0.51)), (Some(true), Some(false)));
        assert_eq!(o.describe_score(), "OverlapScore 0.50 over 6 chunks");
    }

    // proves: V-04
    #[test]
    fn a_period_is_scored_with_the_chunk_that_ran_in_it() {
        // Each period is as long as the stage 1 of the chunk before, so stage 0 is hidden completely.
        let mut record = sample(9);
        let stage1 = [400, 1600, 300, 1700, 400, 1500, 300, 1600, 400];
        for (i, chunk) in record.chunks.iter_mut().enumerate() {
            let period = if i == 0 { 0 } else { stage1[i - 1] };
            (chunk.cut, chunk.pipeline) = (false, Some(pipeline_times(period, stage1[i])));
        }
        assert_eq!(OverlapStats::from_chunks(&record.chunks).unwrap().score, Some(1.0));
        record.chunks[4].chunk = 40;
        assert_eq!(OverlapStats::from_chunks(&record.chunks).unwrap().chunks, 6, "a gap ends no period");
    }

    // proves: V-04
    #[test]
    fn a_score_of_too_few_chunks_is_withheld() {
        let mut record = sample(SCORED_CHUNKS_MIN);
        for chunk in &mut record.chunks {
            (chunk.cut, chunk.pipeline) = (false, Some(pipeline_times(800, 800)));
        }
        let o = OverlapStats::from_chunks(&record.chunks).unwrap();
        assert_eq!((o.chunks, o.score, o.passes_gate(0.0)), (4, None, None));
        assert_eq!(o.describe_score(), "no OverlapScore: 4 chunks counted, 5 needed");
    }
}
