//! The OverlapScore of a run, which measures how well the two stages of a stream overlap.
//!
//! Stage 0 is the leader's own work for a chunk: context, decode, write. Stage 1 is the generator
//! on the mesh. Each stage is timed on its own clock and the period on the leader's, so no instants
//! of different clocks are compared. The *overlap ratio* of a device, the share of collective time
//! that other work hides, is a different measure.

use crate::record::{ChunkRecord, PipelineTimes};
use crate::stats::nearest_rank_quantile;

/// Minimum score of a stream that counts as overlapped.
pub const OVERLAP_GATE: f64 = 0.30;

/// Pipeline statistics of a run's chunks, without the first chunk of the run and of each scene,
/// which have nothing to overlap with.
#[derive(Debug, Clone, PartialEq)]
pub struct OverlapStats {
    /// Number of chunks behind these statistics.
    pub chunks: u32,
    /// Median of the chunks' [`overlap_score`].
    pub score: f64,
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
        let counted: Vec<(&ChunkRecord, &PipelineTimes)> = chunks
            .iter()
            .filter_map(|c| Some((c, c.pipeline.as_ref()?)))
            .filter(|(c, p)| c.chunk > 0 && !c.cut && p.period_ns > 0)
            .collect();
        if counted.is_empty() {
            return None;
        }
        let median = |of: &dyn Fn(&PipelineTimes) -> u64| {
            nearest_rank_quantile(&counted.iter().map(|(_, p)| of(p)).collect::<Vec<_>>(), 50)
        };
        let mut scores: Vec<f64> = counted.iter().map(|(_, p)| p.overlap_score()).collect();
        scores.sort_by(f64::total_cmp);
        let total =
            |of: &dyn Fn(&PipelineTimes) -> u64| counted.iter().map(|(_, p)| of(p) as f64).sum::<f64>();
        Some(OverlapStats {
            chunks: counted.len() as u32,
            score: scores[(scores.len() - 1) / 2],
            period_ns: median(&|p| p.period_ns),
            stage0_ns: median(&|p| p.stage0_ns),
            stage1_ns: median(&|p| p.stage1_ns),
            idle_ns: median(&|p| p.idle_ns),
            queue_in: counted.iter().map(|(c, _)| c.queue_in).max().unwrap_or(0),
            queue_out: counted.iter().map(|(c, _)| c.queue_out).max().unwrap_or(0),
            digest_share: total(&|p| p.digest_ns) / total(&|p| p.period_ns),
        })
    }

    /// Returns whether the score reaches [`OVERLAP_GATE`].
    #[must_use]
    pub fn passes_gate(&self) -> bool {
        self.score >= OVERLAP_GATE
    }
}

impl PipelineTimes {
    /// Returns the chunk's OverlapScore; see [`overlap_score`].
    #[must_use]
    pub fn overlap_score(&self) -> f64 {
        overlap_score(self.stage0_ns, self.stage1_ns, self.period_ns)
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

    #[test]
    fn a_run_is_the_median_of_its_chunks_without_the_first_of_a_scene() {
        let mut record = sample(5);
        assert_eq!(OverlapStats::from_chunks(&record.chunks), None, "no chunk has pipeline times");
        let pipeline_times = |period_ns, idle_ns| PipelineTimes {
            decided_ns: 0,
            ready_ns: 1,
            done_ns: 9,
            period_ns,
            stage0_ns: 200,
            stage1_ns: 800,
            idle_ns,
            digest_ns: 9,
        };
        for (chunk, period) in record.chunks.iter_mut().zip([0, 800, 1, 900, 1000]) {
            chunk.pipeline = Some(pipeline_times(period, period / 10));
        }
        record.chunks[2].cut = true;
        record.chunks[2].queue_out = 40;
        record.chunks[3].queue_out = 2;
        let o = OverlapStats::from_chunks(&record.chunks).unwrap();
        assert_eq!((o.chunks, o.score, o.period_ns, o.idle_ns), (3, 0.5, 900, 90));
        assert_eq!((o.queue_in, o.queue_out), (1, 2));
        assert!(o.passes_gate() && (o.digest_share - 0.01).abs() < 1e-12);
    }
}
