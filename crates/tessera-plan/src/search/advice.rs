//! Advises on expert layers and long contexts: compares a plan's expert placement, capacity and
//! cache residency policy with better ones, in numbers.

use tessera_base::Bytes;
use tessera_cost::moe::{
    CapacitySweep, ExpertLoad, ExpertPlacement, Routing, expert_load, expert_popularity, placement_load,
    rebalance_experts, tune_capacity,
};
use tessera_cost::tiers::{KvResidency, SegmentReads, TierHits, replay_reads};
use tessera_mesh::Precision;

use super::gates::{GateInputs, GateResult, evaluate_gates};
use super::thresholds::Thresholds;

/// Size, sharding, batch and routing of one expert layer under a plan: the input of
/// [`advise_experts`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLayer {
    /// Number of routed experts in the layer, over all ranks.
    pub experts: u64,
    /// Routed experts that the router picks for each token.
    pub top_k: u64,
    /// Ranks that share the experts.
    pub ep: u32,
    /// Tokens of one micro-batch over all ranks of the ep group.
    pub tokens: f64,
    /// Hidden size of a token.
    pub width: u64,
    /// Precision in which dispatch sends tokens to their experts.
    pub wire: Precision,
    /// The model of how tokens choose experts.
    pub routing: Routing,
    /// Bytes that the weights of one expert of this layer take on one rank. A copy of the expert
    /// takes as many bytes.
    pub expert_bytes: f64,
}

/// The expert loads of a layer under the current placement and under alternatives.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertAdvice {
    /// Load with consecutive experts on each rank and unlimited capacity.
    pub contiguous: ExpertLoad,
    /// The same experts without copies, spread over the ranks by popularity.
    pub by_popularity: ExpertLoad,
    /// Spread by popularity with copies of the most popular experts: as many copies as ranks.
    pub with_copies: ExpertLoad,
    /// Memory that the copies need on one rank, for one layer.
    pub copies_bytes: Bytes,
    /// Drops and peak bytes by capacity, and the recommended capacity.
    pub capacity: CapacitySweep,
}

/// Maximum share of assignments that the recommended capacity may drop.
const MAX_DROPPED: f64 = 0.01;

/// Compares placements and capacities of an expert layer.
#[must_use]
pub fn advise_experts(layer: &ExpertLayer, limits: &Thresholds) -> ExpertAdvice {
    let popularity_by_rank =
        expert_popularity(layer.experts, layer.top_k, layer.ep, layer.tokens, layer.routing, 0);
    let ranks = layer.ep.max(1) as usize;
    let load = |placement: &ExpertPlacement| placement_load(placement, &popularity_by_rank, layer.tokens);
    let allowed = (limits.min_capacity_pct as u32, limits.max_capacity_pct as u32);
    ExpertAdvice {
        contiguous: expert_load(layer.experts, layer.top_k, layer.ep, layer.tokens, layer.routing, 0),
        by_popularity: load(&rebalance_experts(&popularity_by_rank, popularity_by_rank.len(), ranks, 1)),
        with_copies: load(&rebalance_experts(
            &popularity_by_rank,
            popularity_by_rank.len() + ranks,
            ranks,
            1,
        )),
        copies_bytes: Bytes(layer.expert_bytes.max(0.0) as u64),
        capacity: tune_capacity(
            (layer.experts, layer.top_k, layer.ep),
            layer.tokens,
            (layer.width, layer.wire),
            layer.routing,
            allowed,
            MAX_DROPPED,
        ),
    }
}

impl ExpertAdvice {
    /// Returns two sentences: the load of the slowest rank by placement, and the recommended
    /// capacity.
    #[must_use]
    pub fn to_sentences(&self) -> Vec<String> {
        let c = &self.capacity.chosen;
        let tie = self.capacity.tied_pct.map_or(String::new(), |pct| format!(", as few as one of {pct} %,"));
        vec![
            format!(
                "the slowest expert rank has {:.2} times the mean load; placed by popularity {:.2}, with one extra copy per \
                 rank ({} per layer) {:.2}",
                self.contiguous.slowest_over_mean,
                self.by_popularity.slowest_over_mean,
                self.copies_bytes,
                self.with_copies.slowest_over_mean
            ),
            format!(
                "a capacity of {} % drops {:.2} %{tie} and needs {} per dispatch; the slowest rank then has {:.2} times the mean",
                c.pct,
                c.dropped * 100.0,
                Bytes(c.peak_bytes as u64),
                c.slowest
            ),
        ]
    }
}

/// Replays a long context under each residency policy and returns the hits with the gate's result.
/// `room` and `peer_room` are in segments; `peer` states whether peers' memory counts as hot.
#[must_use]
pub fn advise_residency(
    reads: &SegmentReads,
    local_segments: usize,
    peer_segments: usize,
    peer: bool,
    limits: &Thresholds,
) -> Vec<(KvResidency, TierHits, GateResult)> {
    let evaluate = |policy: KvResidency| {
        let hits = replay_reads(reads, policy, local_segments, peer_segments);
        let facts = GateInputs { cache_hit_share: Some(hits.hot_share(peer)), ..GateInputs::default() };
        let gate = evaluate_gates(&facts, limits).into_iter().find(|g| g.id == "cache.hits");
        gate.map(|g| (policy, hits, g))
    };
    KvResidency::ALL.into_iter().filter_map(evaluate).collect()
}

#[cfg(test)]
mod tests {
    use tessera_base::GateStatus;

    use super::*;

    #[test]
    fn copies_of_the_hottest_are_worth_their_memory() {
        let asked = ExpertLayer {
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
            advice.with_copies.slowest_over_mean < advice.by_popularity.slowest_over_mean
                && advice.by_popularity.slowest_over_mean < advice.contiguous.slowest_over_mean
        );
        assert_eq!(advice.capacity.chosen.pct, 130);
        assert!(advice.to_sentences()[1].starts_with("a capacity of 130 %"), "{:?}", advice.to_sentences());
        let even = advise_experts(&ExpertLayer { routing: Routing::Random, ..asked }, &Thresholds::default());
        assert_eq!(even.capacity.chosen.pct, 110);
    }

    #[test]
    fn the_policy_decides_whether_a_long_context_passes() {
        let reads = SegmentReads {
            seed: 5,
            segments: 128,
            steps: 400,
            steps_per_segment: 16,
            recent: 8,
            older: Some(4),
        };
        let verdicts = |peer| {
            let all = advise_residency(&reads, 48, 48, peer, &Thresholds::default());
            all.into_iter().map(|(p, _, g)| (p.name(), g.status)).collect::<Vec<_>>()
        };
        let near = verdicts(false);
        assert_eq!(near[0], ("window", GateStatus::Fail));
        assert_eq!(near[2], ("hotness", GateStatus::Pass));
        assert_eq!(verdicts(true)[1], ("lru", GateStatus::Pass));
    }
}
