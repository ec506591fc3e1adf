//! Selects estimates worth keeping: the best few by the objective, and the Pareto front.

use super::{Candidate, Objective};

/// The metrics by which the search compares candidates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScoredCandidate {
    pub step_ns: f64,
    /// Tokens per second per device.
    pub rate: f64,
    /// Peak device memory of any rank, in bytes.
    pub bytes: f64,
    pub candidate: Candidate,
}

impl ScoredCandidate {
    /// Returns the sort key; smaller is better, and the second number breaks ties of the first.
    pub fn sort_key(&self, objective: Objective) -> (f64, f64) {
        match objective {
            Objective::Latency => (self.step_ns, self.bytes),
            Objective::Throughput => (-self.rate, self.bytes),
            Objective::Memory => (self.bytes, self.step_ns),
            Objective::Deadline(limit) => {
                let late = (self.step_ns - limit.0 as f64).max(0.0);
                // Late candidates sort behind all that meet the deadline, the least late first.
                if late > 0.0 { (late, self.bytes) } else { (-self.rate, self.bytes) }
            }
        }
    }

    /// Returns whether this candidate is better, by the objective and then by the order of
    /// candidates.
    pub fn is_better_than(&self, other: &ScoredCandidate, objective: Objective) -> bool {
        let (a, b) = (self.sort_key(objective), other.sort_key(objective));
        (a.0.total_cmp(&b.0)).then(a.1.total_cmp(&b.1)).then(self.candidate.cmp(&other.candidate)).is_lt()
    }

    /// Returns whether this candidate is strictly better by the objective alone.
    pub fn has_better_score(&self, other: &ScoredCandidate, objective: Objective) -> bool {
        self.sort_key(objective) < other.sort_key(objective)
    }

    /// Returns whether this candidate is at least as good in every metric.
    fn dominates(&self, other: &ScoredCandidate) -> bool {
        self.step_ns <= other.step_ns && self.rate >= other.rate && self.bytes <= other.bytes
    }
}

/// The best few candidates, best first.
#[derive(Debug)]
pub(super) struct TopCandidates {
    pub points: Vec<ScoredCandidate>,
    keep: usize,
    objective: Objective,
}

impl TopCandidates {
    pub fn new(keep: usize, objective: Objective) -> TopCandidates {
        TopCandidates { points: Vec::with_capacity(keep + 1), keep: keep.max(1), objective }
    }

    /// Returns whether [`TopCandidates::offer`] would keep the candidate.
    pub fn would_keep(&self, p: &ScoredCandidate) -> bool {
        self.points.len() < self.keep
            || self.points.last().is_some_and(|l| p.is_better_than(l, self.objective))
    }

    pub fn offer(&mut self, p: &ScoredCandidate) {
        if !self.would_keep(p) {
            return;
        }
        // Bit-identical metrics mean an equivalent candidate under another name: keep the smaller
        // name.
        let same = |q: &&mut ScoredCandidate| (q.step_ns, q.bytes) == (p.step_ns, p.bytes);
        if let Some(q) = self.points.iter_mut().find(same) {
            q.candidate = q.candidate.min(p.candidate);
            return;
        }
        let at = self.points.partition_point(|q| q.is_better_than(p, self.objective));
        self.points.insert(at, *p);
        self.points.truncate(self.keep);
    }
}

/// The Pareto front over step time, throughput and memory, ordered by step time. Of candidates with
/// equal metrics, the first in candidate order stays.
#[derive(Debug, Default)]
pub(super) struct ParetoFront {
    pub points: Vec<ScoredCandidate>,
}

impl ParetoFront {
    /// Returns whether a candidate on the front is at least as good in every metric.
    pub fn is_dominated(&self, p: &ScoredCandidate) -> bool {
        let faster = self.points.partition_point(|q| q.step_ns <= p.step_ns);
        self.points[..faster].iter().rev().any(|q| q.dominates(p))
    }

    pub fn offer(&mut self, p: &ScoredCandidate) {
        let faster = self.points.partition_point(|q| q.step_ns <= p.step_ns);
        // Search from the nearest step time: a neighbour is the most likely candidate to dominate.
        if let Some(q) = self.points[..faster].iter().rev().find(|q| q.dominates(p))
            && !(p.dominates(q) && p.candidate < q.candidate)
        {
            return;
        }
        self.points.retain(|q| !p.dominates(q));
        let at = self.points.partition_point(|q| (q.step_ns, q.bytes) < (p.step_ns, p.bytes));
        self.points.insert(at, *p);
    }

    /// Returns at most `show` candidates, evenly spaced, including both ends.
    pub fn sample_evenly(&self, show: usize) -> Vec<ScoredCandidate> {
        let n = self.points.len();
        if n <= show || show < 2 {
            return self.points.iter().take(show).copied().collect();
        }
        (0..show).map(|i| self.points[i * (n - 1) / (show - 1)]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_base::Nanoseconds;
    use tessera_cost::params::{
        ExpertStorage, KvCacheStorage, LayerLayout, OptimizerSharding, PipelineSchedule, Recompute,
    };

    fn point(step_ns: f64, bytes: f64, micro_batch: u32) -> ScoredCandidate {
        let candidate = Candidate {
            layout: LayerLayout::SINGLE_RANK,
            pp: 1,
            replicas: 1,
            expert_replicas: 1,
            schedule: PipelineSchedule::OneFOneB,
            interleave: 1,
            micro_batch,
            recompute: Recompute::None,
            optimizer: OptimizerSharding::Replicated,
            experts_at: ExpertStorage::Hbm,
            cache_at: KvCacheStorage::Hbm,
        };
        ScoredCandidate { step_ns, rate: 1e9 / step_ns, bytes, candidate }
    }

    #[test]
    fn a_front_keeps_what_nothing_beats_whatever_the_order() {
        let all = [
            point(3.0, 5.0, 1),
            point(1.0, 9.0, 2),
            point(2.0, 9.0, 3),
            point(4.0, 5.0, 4),
            point(5.0, 1.0, 6),
            point(5.0, 1.0, 5),
        ];
        let ids = |f: &ParetoFront| f.points.iter().map(|p| p.candidate.micro_batch).collect::<Vec<_>>();
        let (mut there, mut back) = (ParetoFront::default(), ParetoFront::default());
        all.iter().for_each(|p| there.offer(p));
        all.iter().rev().for_each(|p| back.offer(p));
        assert_eq!(ids(&there), [2, 1, 5]);
        assert_eq!(ids(&back), [2, 1, 5]);
        assert_eq!(
            there.sample_evenly(2).iter().map(|p| p.candidate.micro_batch).collect::<Vec<_>>(),
            [2, 5]
        );
    }

    #[test]
    fn the_best_are_in_order_and_a_deadline_prefers_those_in_time() {
        let mut best = TopCandidates::new(2, Objective::Deadline(Nanoseconds(3)));
        for p in [point(9.0, 1.0, 1), point(3.0, 5.0, 2), point(2.0, 8.0, 3), point(3.5, 0.5, 4)] {
            best.offer(&p);
        }
        let ids: Vec<_> = best.points.iter().map(|p| p.candidate.micro_batch).collect();
        assert_eq!(ids, [3, 2]);
    }
}
