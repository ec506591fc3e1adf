//! What is worth keeping of many estimates: the best by one objective, and those that nothing beats in everything.

use super::{Candidate, Objective};

/// What a search compares of one candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub step_ns: f64,
    /// Tokens per second and device.
    pub rate: f64,
    /// Bytes of the fullest rank in device memory.
    pub bytes: f64,
    pub candidate: Candidate,
}

impl Point {
    /// Smaller is better; the second decides ties of the first.
    pub fn score(&self, objective: Objective) -> (f64, f64) {
        match objective {
            Objective::Latency => (self.step_ns, self.bytes),
            Objective::Throughput => (-self.rate, self.bytes),
            Objective::Memory => (self.bytes, self.step_ns),
            Objective::Deadline(limit) => {
                let late = (self.step_ns - limit.0 as f64).max(0.0);
                // Late ones stand behind all that are in time, the least late first.
                if late > 0.0 { (late, self.bytes) } else { (-self.rate, self.bytes) }
            }
        }
    }

    /// Whether this is better, by the objective and then by the candidates' own order.
    pub fn beats(&self, other: &Point, objective: Objective) -> bool {
        let (a, b) = (self.score(objective), other.score(objective));
        (a.0.total_cmp(&b.0)).then(a.1.total_cmp(&b.1)).then(self.candidate.cmp(&other.candidate)).is_lt()
    }

    /// Whether this is better by the objective alone.
    pub fn ahead(&self, other: &Point, objective: Objective) -> bool {
        self.score(objective) < other.score(objective)
    }

    /// Whether this is at least as good in everything.
    fn covers(&self, other: &Point) -> bool {
        self.step_ns <= other.step_ns && self.rate >= other.rate && self.bytes <= other.bytes
    }
}

/// The best few, best first.
#[derive(Debug)]
pub(super) struct Best {
    pub points: Vec<Point>,
    keep: usize,
    objective: Objective,
}

impl Best {
    pub fn new(keep: usize, objective: Objective) -> Best {
        Best { points: Vec::with_capacity(keep + 1), keep: keep.max(1), objective }
    }

    /// Whether a point would be kept.
    pub fn wants(&self, p: &Point) -> bool {
        self.points.len() < self.keep || self.points.last().is_some_and(|l| p.beats(l, self.objective))
    }

    pub fn offer(&mut self, p: &Point) {
        if !self.wants(p) {
            return;
        }
        // Equal to the last bit is the same arrangement under another name: the first name stays.
        let same = |q: &&mut Point| (q.step_ns, q.bytes) == (p.step_ns, p.bytes);
        if let Some(q) = self.points.iter_mut().find(same) {
            q.candidate = q.candidate.min(p.candidate);
            return;
        }
        let at = self.points.partition_point(|q| q.beats(p, self.objective));
        self.points.insert(at, *p);
        self.points.truncate(self.keep);
    }
}

/// Candidates that no other beats in step, rate and memory at once, in order of step. Of equals the first in the order
/// of candidates stays.
#[derive(Debug, Default)]
pub(super) struct Front {
    pub points: Vec<Point>,
}

impl Front {
    /// Whether some point is at least as good in everything.
    pub fn covered(&self, p: &Point) -> bool {
        let faster = self.points.partition_point(|q| q.step_ns <= p.step_ns);
        self.points[..faster].iter().rev().any(|q| q.covers(p))
    }

    pub fn offer(&mut self, p: &Point) {
        let faster = self.points.partition_point(|q| q.step_ns <= p.step_ns);
        // Nearest in step first: what covers a point most often is its neighbour.
        if let Some(q) = self.points[..faster].iter().rev().find(|q| q.covers(p))
            && !(p.covers(q) && p.candidate < q.candidate)
        {
            return;
        }
        self.points.retain(|q| !p.covers(q));
        let at = self.points.partition_point(|q| (q.step_ns, q.bytes) < (p.step_ns, p.bytes));
        self.points.insert(at, *p);
    }

    /// At most `show` of them, both ends among them, evenly spaced in between.
    pub fn shown(&self, show: usize) -> Vec<Point> {
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
    use tessera_cost::knobs::{CacheAt, ExpertsAt, Layout, Optimizer, Recompute, Schedule};

    fn point(step_ns: f64, bytes: f64, micro_batch: u32) -> Point {
        let candidate = Candidate {
            layout: Layout::WHOLE,
            pp: 1,
            replicas: 1,
            expert_replicas: 1,
            schedule: Schedule::OneFOneB,
            interleave: 1,
            micro_batch,
            recompute: Recompute::None,
            optimizer: Optimizer::Replicated,
            experts_at: ExpertsAt::Hbm,
            cache_at: CacheAt::Hbm,
        };
        Point { step_ns, rate: 1e9 / step_ns, bytes, candidate }
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
        let ids = |f: &Front| f.points.iter().map(|p| p.candidate.micro_batch).collect::<Vec<_>>();
        let (mut there, mut back) = (Front::default(), Front::default());
        all.iter().for_each(|p| there.offer(p));
        all.iter().rev().for_each(|p| back.offer(p));
        assert_eq!(ids(&there), [2, 1, 5]);
        assert_eq!(ids(&back), [2, 1, 5]);
        assert_eq!(there.shown(2).iter().map(|p| p.candidate.micro_batch).collect::<Vec<_>>(), [2, 5]);
    }

    #[test]
    fn the_best_are_in_order_and_a_deadline_prefers_those_in_time() {
        let mut best = Best::new(2, Objective::Deadline(Nanoseconds(3)));
        for p in [point(9.0, 1.0, 1), point(3.0, 5.0, 2), point(2.0, 8.0, 3), point(3.5, 0.5, 4)] {
            best.offer(&p);
        }
        let ids: Vec<_> = best.points.iter().map(|p| p.candidate.micro_batch).collect();
        assert_eq!(ids, [3, 2]);
    }
}
