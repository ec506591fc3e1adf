//! How well the two stages of a stream hide each other: the OverlapScore of a run, and the arithmetic of a filled
//! pipeline.
//!
//! Stage 0 is what the leader does for a chunk beside the mesh: context, decode, write. Stage 1 is the
//! generator. Each stage is timed on its own clock and the period on the leader's, so no clocks are compared. This is
//! not the *overlap ratio* of a device, which is hidden time of collectives over their time.

use crate::record::{Chunk, Pipeline};
use crate::stats::quantile;

/// Score from which a stream counts as overlapped.
pub const OVERLAP_GATE: f64 = 0.30;

/// A run's pipeline, over its chunks. The first chunk is left out, and the first of each scene: nothing runs beside
/// them yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Overlap {
    /// Chunks that were counted.
    pub chunks: u32,
    /// Median over the chunks of [`score`].
    pub score: f64,
    /// Median time from one commit to the next, in nanoseconds.
    pub period_ns: u64,
    /// Median of the leader's work for a chunk, in nanoseconds.
    pub stage0_ns: u64,
    /// Median from commit to the last rank's done, in nanoseconds.
    pub stage1_ns: u64,
    /// Median time that the mesh waited before a commit, in nanoseconds.
    pub idle_ns: u64,
    /// Most requests that waited when a chunk was done.
    pub queue_in: u32,
    /// Most finished chunks that waited when a chunk was done.
    pub queue_out: u32,
    /// Share of the periods that digests took, on the rank that spent most, from 0 to 1.
    pub digest_share: f64,
}

impl Overlap {
    /// From a record's chunks; none where no chunk tells its pipeline or only first chunks do.
    #[must_use]
    pub fn of(chunks: &[Chunk]) -> Option<Overlap> {
        let counted: Vec<(&Chunk, &Pipeline)> = chunks
            .iter()
            .filter_map(|c| Some((c, c.pipeline.as_ref()?)))
            .filter(|(c, p)| c.chunk > 0 && !c.cut && p.period_ns > 0)
            .collect();
        if counted.is_empty() {
            return None;
        }
        let median = |of: &dyn Fn(&Pipeline) -> u64| {
            quantile(&counted.iter().map(|(_, p)| of(p)).collect::<Vec<_>>(), 50)
        };
        let mut scores: Vec<f64> = counted.iter().map(|(_, p)| p.score()).collect();
        scores.sort_by(f64::total_cmp);
        let total = |of: &dyn Fn(&Pipeline) -> u64| counted.iter().map(|(_, p)| of(p) as f64).sum::<f64>();
        Some(Overlap {
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

    /// Whether the score reaches [`OVERLAP_GATE`].
    #[must_use]
    pub fn passes(&self) -> bool {
        self.score >= OVERLAP_GATE
    }
}

/// Time that one chunk saved by running its stages beside each other, over the most that could be saved:
/// max(0, stage0 + stage1 − period) / min(stage0, stage1). 0 when the stages take turns, 1 when the shorter one is
/// hidden altogether; 0 where there is nothing to hide.
#[must_use]
pub fn score(stage0_ns: u64, stage1_ns: u64, period_ns: u64) -> f64 {
    let shorter = stage0_ns.min(stage1_ns);
    if shorter == 0 {
        return 0.0;
    }
    let hidden = (stage0_ns.saturating_add(stage1_ns)).saturating_sub(period_ns);
    (hidden as f64 / shorter as f64).min(1.0)
}

/// Share of the time that `stages` stages work when `in_flight` items are under way between fill and drain:
/// B / (B + P − 1). 0 without items or stages.
#[must_use]
pub fn utilisation(stages: u32, in_flight: u32) -> f64 {
    if stages == 0 || in_flight == 0 {
        return 0.0;
    }
    f64::from(in_flight) / (f64::from(in_flight) + f64::from(stages) - 1.0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    #[test]
    fn the_score_of_hand_made_cases() {
        assert_eq!(score(200, 800, 1000), 0.0, "in turn");
        assert_eq!(score(200, 800, 800), 1.0, "the shorter stage is hidden");
        assert_eq!(score(200, 800, 900), 0.5);
        assert_eq!(score(200, 800, 1500), 0.0, "slower than in turn");
        assert_eq!(score(800, 200, 800), 1.0);
        assert_eq!(score(200, 800, 100), 1.0, "never above the whole");
        assert_eq!(score(0, 800, 800), 0.0, "nothing to hide");
    }

    #[test]
    fn a_filled_pipeline_works_all_the_time() {
        assert_eq!(utilisation(1, 1), 1.0);
        assert_eq!(utilisation(2, 1), 0.5);
        assert_eq!(utilisation(3, 4), 4.0 / 6.0);
        assert!(utilisation(3, 19) > 0.9 && utilisation(3, 17) < 0.9, "under 10 % of bubble");
        assert_eq!((utilisation(0, 4), utilisation(4, 0)), (0.0, 0.0));
    }

    #[test]
    fn a_run_is_the_median_of_its_chunks_without_the_first_of_a_scene() {
        let mut record = sample(5);
        assert_eq!(Overlap::of(&record.chunks), None, "nobody told");
        let tell = |period_ns, idle_ns| Pipeline {
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
            chunk.pipeline = Some(tell(period, period / 10));
        }
        record.chunks[2].cut = true;
        record.chunks[2].queue_out = 40;
        record.chunks[3].queue_out = 2;
        let o = Overlap::of(&record.chunks).unwrap();
        assert_eq!((o.chunks, o.score, o.period_ns, o.idle_ns), (3, 0.5, 900, 90));
        assert_eq!((o.queue_in, o.queue_out), (1, 2));
        assert!(o.passes() && (o.digest_share - 0.01).abs() < 1e-12);
    }
}
