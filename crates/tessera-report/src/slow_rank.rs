//! Finds the rank for which the others of its role wait.
//!
//! Ranks in lockstep end every call together, whichever of them is slow. What differs is the time of the ops that need no
//! other rank: a slow host computes longer, and the others spend the difference in collectives. Only ranks of one role run
//! the same ops. GPUs report no time of single ops, so that nothing is found there.

use std::collections::BTreeMap;

use crate::record::{ChunkRecord, RankRole};
use crate::stats::nearest_rank_quantile;

/// How many times as long as the others a rank must compute to be named. Ranks that share a busy host differ by less.
const SLOW_RATIO: f64 = 1.3;
/// Chunks at the start of a run that do not count: the first calls touch memory for the first time.
const WARM_UP_CHUNKS: usize = 2;
/// Minimum number of chunks behind a finding.
const MIN_CHUNKS: usize = 5;

/// A rank that computes longer than the others of its role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowRank {
    /// Number of the slow rank.
    pub rank: u32,
    /// Mean time of its ops without collectives in a chunk, in nanoseconds.
    pub compute_ns: u64,
    /// Median of this time over the other ranks of its role.
    pub others_ns: u64,
    /// Number of other ranks of its role.
    pub others: u32,
}

impl SlowRank {
    /// Finds the rank that computes longest beside the others of its role, if it is slow.
    #[must_use]
    pub fn from_chunks(roles: &[RankRole], chunks: &[ChunkRecord]) -> Option<SlowRank> {
        let counted = chunks.get(WARM_UP_CHUNKS..).filter(|chunks| chunks.len() >= MIN_CHUNKS)?;
        let mut totals: BTreeMap<u32, u64> = BTreeMap::new();
        for rank in counted.iter().flat_map(|chunk| &chunk.ranks) {
            let classes = rank.phases.iter().flat_map(|phase| &phase.classes);
            let compute_ns: u64 = classes.filter(|class| !class.is_collective()).map(|class| class.ns).sum();
            *totals.entry(rank.rank).or_default() += compute_ns;
        }
        let mean_of = |rank: u32| totals.get(&rank).map_or(0, |total| total / counted.len() as u64);
        let found = roles.iter().filter_map(|role| {
            let same = roles.iter().filter(|other| other.role == role.role && other.rank != role.rank);
            let others: Vec<u64> = same.map(|other| mean_of(other.rank)).collect();
            if others.is_empty() {
                return None;
            }
            let (compute_ns, others_ns) = (mean_of(role.rank), nearest_rank_quantile(&others, 50));
            let is_slow = others_ns > 0 && compute_ns as f64 > SLOW_RATIO * others_ns as f64;
            is_slow.then_some(SlowRank {
                rank: role.rank,
                compute_ns,
                others_ns,
                others: others.len() as u32,
            })
        });
        found.max_by_key(|slow| slow.compute_ns - slow.others_ns)
    }

    /// Returns the finding as a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        let ms = |ns: u64| ns as f64 / 1e6;
        let (own, others) = (ms(self.compute_ns), ms(self.others_ns));
        let whom = match self.others {
            1 => "the other rank of its role".to_string(),
            n => format!("the {n} other ranks of its role"),
        };
        format!(
            "rank {} is slow: its ops take {own:.1} ms of a chunk and those of {whom} {others:.1} ms; the other ranks wait for it in collectives",
            self.rank
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class_work::ClassWork;
    use crate::record::{PhaseRecord, RankChunk};
    use crate::timeline::tests::sample;

    fn roles(names: &[&str]) -> Vec<RankRole> {
        (0..).zip(names).map(|(rank, role)| RankRole { rank, role: (*role).to_string() }).collect()
    }

    /// Chunks in which each rank computes for so many nanoseconds, and waits until all have computed.
    fn chunks(count: usize, compute_ns: &[u64]) -> Vec<ChunkRecord> {
        let work = |class: &str, ns: u64| ClassWork { class: class.to_string(), ops: 1, ns, sent_bytes: 0 };
        let longest = compute_ns.iter().copied().max().unwrap_or(0);
        let phase = |ns: u64| PhaseRecord {
            classes: vec![work("expert matmul", ns), work("all_to_all tp", longest - ns + 1)],
            ..PhaseRecord::default()
        };
        let mut chunk = sample(1).chunks.remove(0);
        let like = chunk.ranks[0].clone();
        let ranks = (0..).zip(compute_ns);
        chunk.ranks =
            ranks.map(|(rank, ns)| RankChunk { rank, phases: vec![phase(*ns)], ..like.clone() }).collect();
        vec![chunk; count]
    }

    #[test]
    fn the_rank_that_computes_longest_is_named_with_its_numbers() {
        let same = roles(&["stage0"; 4]);
        let slow = SlowRank::from_chunks(&same, &chunks(7, &[10, 11, 31, 10])).unwrap();
        assert_eq!(slow, SlowRank { rank: 2, compute_ns: 31, others_ns: 10, others: 3 });
        assert!(
            slow.describe()
                .starts_with("rank 2 is slow: its ops take 0.0 ms of a chunk and those of the 3 other")
        );
        assert_eq!(SlowRank::from_chunks(&same, &chunks(7, &[10, 11, 12, 10])), None);
        assert_eq!(SlowRank::from_chunks(&same, &chunks(6, &[10, 11, 31, 10])), None, "too few chunks");
    }

    #[test]
    fn ranks_of_other_roles_run_other_ops() {
        let stages = roles(&["stage0", "stage0", "stage1", "stage1"]);
        assert_eq!(SlowRank::from_chunks(&stages, &chunks(9, &[10, 10, 50, 50])), None);
        let slow = SlowRank::from_chunks(&stages, &chunks(9, &[10, 10, 50, 90])).unwrap();
        assert_eq!((slow.rank, slow.others_ns, slow.others), (3, 50, 1));
        assert_eq!(SlowRank::from_chunks(&roles(&["stage0"]), &chunks(9, &[10])), None);
    }

    #[test]
    fn gpus_report_no_ops() {
        assert_eq!(SlowRank::from_chunks(&roles(&["stage0"; 2]), &chunks(9, &[0, 0])), None);
    }
}
