//! What could be done about a layer of experts or a long context, in numbers: better placements, capacities and policies
//! beside what a plan has.

use tessera_base::Bytes;
use tessera_cost::moe::{
    Capacity, ExpertLoad, Placement, Routing, experts, placed, popularity, rebalance, tune_capacity,
};
use tessera_cost::tiers::{CacheHits, Reads, Residency, replay_cache};
use tessera_mesh::Precision;

use super::gates::{Gate, GateFacts, gates};
use super::thresholds::Thresholds;

/// A layer of experts as a plan has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsAsked {
    /// Experts.
    pub experts: u64,
    /// Experts that a token asks for.
    pub top_k: u64,
    /// Ranks that they are dealt to.
    pub ep: u32,
    /// Tokens of one micro-batch over all ranks of the group.
    pub tokens: f64,
    /// Numbers of a token.
    pub width: u64,
    /// What they travel as.
    pub wire: Precision,
    /// How tokens choose.
    pub routing: Routing,
    /// Bytes of one expert.
    pub expert_bytes: f64,
}

/// What the layer comes to, and what it could.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsAdvice {
    /// Contiguous pieces, nothing dropped.
    pub plain: ExpertLoad,
    /// The same experts dealt by popularity.
    pub packed: ExpertLoad,
    /// With one further slot on every rank for copies of the hottest.
    pub copied: ExpertLoad,
    /// What those slots take on a rank.
    pub copies_bytes: Bytes,
    /// Capacities against drops and peak bytes, and the one to choose.
    pub capacity: Capacity,
}

/// Share of assignments that a capacity may drop where it is chosen for one.
const MOST_DROPPED: f64 = 0.01;

/// Weighs placements and capacities of a layer of experts.
#[must_use]
pub fn advise_experts(a: &ExpertsAsked, limits: &Thresholds) -> ExpertsAdvice {
    let asked = popularity(a.experts, a.top_k, a.ep, a.tokens, a.routing, 0);
    let ranks = a.ep.max(1) as usize;
    let load = |placement: &Placement| placed(placement, &asked, a.tokens);
    let allowed = (limits.capacity_least_pct as u32, limits.capacity_most_pct as u32);
    ExpertsAdvice {
        plain: experts(a.experts, a.top_k, a.ep, a.tokens, a.routing, 0),
        packed: load(&rebalance(&asked, asked.len(), ranks, 1)),
        copied: load(&rebalance(&asked, asked.len() + ranks, ranks, 1)),
        copies_bytes: Bytes(a.expert_bytes.max(0.0) as u64),
        capacity: tune_capacity(
            (a.experts, a.top_k, a.ep),
            a.tokens,
            (a.width, a.wire),
            a.routing,
            allowed,
            MOST_DROPPED,
        ),
    }
}

impl ExpertsAdvice {
    /// In sentences.
    #[must_use]
    pub fn says(&self) -> Vec<String> {
        let c = &self.capacity.chosen;
        vec![
            format!(
                "the slowest rank of the experts has {:.2} times the mean; dealt by popularity {:.2}, with one copy more a \
                 rank ({} a layer) {:.2}",
                self.plain.slowest, self.packed.slowest, self.copies_bytes, self.copied.slowest
            ),
            format!(
                "a capacity of {} % drops {:.2} % and needs {} for a dispatch; the slowest rank then has {:.2} times the mean",
                c.pct,
                c.dropped * 100.0,
                Bytes(c.peak_bytes as u64),
                c.slowest
            ),
        ]
    }
}

/// What each policy of residency hits on a long context, with its gate: `room` and `peer_room` in segments; `peer` says
/// whether peers' memory counts as hot.
#[must_use]
pub fn advise_residency(
    reads: &Reads,
    room: usize,
    peer_room: usize,
    peer: bool,
    limits: &Thresholds,
) -> Vec<(Residency, CacheHits, Gate)> {
    let judge = |policy: Residency| {
        let hits = replay_cache(reads, policy, room, peer_room);
        let facts = GateFacts { cache_hits: Some(hits.hot(peer)), ..GateFacts::default() };
        let gate = gates(&facts, limits).into_iter().find(|g| g.id == "cache.hits");
        gate.map(|g| (policy, hits, g))
    };
    Residency::ALL.into_iter().filter_map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::super::gates::Verdict;
    use super::*;

    #[test]
    fn copies_of_the_hottest_are_worth_their_memory() {
        let asked = ExpertsAsked {
            experts: 256,
            top_k: 8,
            ep: 32,
            tokens: 131_072.0,
            width: 7168,
            wire: Precision::Fp8,
            routing: Routing::PowerLaw(1.2),
            expert_bytes: 44e6,
        };
        let advice = advise_experts(&asked, &Thresholds::default());
        assert!(
            advice.copied.slowest < advice.packed.slowest && advice.packed.slowest < advice.plain.slowest
        );
        assert_eq!(advice.capacity.chosen.pct, 130);
        assert!(advice.says()[1].starts_with("a capacity of 130 %"), "{:?}", advice.says());
        let even =
            advise_experts(&ExpertsAsked { routing: Routing::Random, ..asked }, &Thresholds::default());
        assert_eq!(even.capacity.chosen.pct, 110);
    }

    #[test]
    fn the_policy_decides_whether_a_long_context_passes() {
        let reads =
            Reads { seed: 5, segments: 128, steps: 400, steps_per_segment: 16, recent: 8, older: Some(4) };
        let verdicts = |peer| {
            let all = advise_residency(&reads, 48, 48, peer, &Thresholds::default());
            all.into_iter().map(|(p, _, g)| (p.name(), g.verdict)).collect::<Vec<_>>()
        };
        let near = verdicts(false);
        assert_eq!(near[0], ("window", Verdict::Fail));
        assert_eq!(near[2], ("hotness", Verdict::Pass));
        assert_eq!(verdicts(true)[1], ("lru", Verdict::Pass));
    }
}
