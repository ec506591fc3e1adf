//! Computes what each stage stores, for the stages that may have the peak memory.

use tessera_cost::schedule::peak_in_flight_on;

use super::super::Candidate;
use super::super::budget::{StageFootprint, cache_share};
use super::{Estimator, LayoutCost, PipelineCost, cache_element_bytes};

impl Estimator<'_> {
    /// Updates the footprints of the stages that may have the peak memory.
    pub(super) fn update_footprints(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        if out.footprints_key != (node.serial, out.split) {
            self.collect_footprints(c, node, out);
            out.footprints_key = (node.serial, out.split);
        }
        for (stage, h) in &mut out.footprints {
            h.in_flight = self.in_flight(c, node, *stage);
        }
        out.in_flight = self.in_flight(c, node, 0);
    }

    /// Collects the footprints of a split, independent of the schedule: one stage per distinct
    /// layer mix, without those that an earlier stage dominates. No schedule has more micro-batches
    /// in flight on a later stage.
    fn collect_footprints(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        let cut = &self.splits[out.split];
        (out.max_expert_layers, out.max_layers, out.max_cache_bytes) = (0.0, 0.0, 0.0);
        out.footprints.clear();
        let mut heaviest = -1.0;
        for &stage in &cut.distinct_stages {
            let h = self.stage_footprint(c, node, out.split, stage);
            let (mut moe, mut any) = (0.0, 0.0);
            for (kind, n) in cut.stage_layers(stage).iter().enumerate() {
                any += n;
                moe += if self.rows_by_kind[kind].1.is_empty() { 0.0 } else { *n };
            }
            out.max_expert_layers = out.max_expert_layers.max(moe);
            out.max_layers = out.max_layers.max(any);
            out.max_cache_bytes = out.max_cache_bytes.max(h.cache_bytes);
            if h.dense_weights + h.expert_weights > heaviest {
                (heaviest, out.heaviest) = (h.dense_weights + h.expert_weights, h);
            }
            if !out.footprints.iter().any(|(_, o)| dominates(o, &h)) {
                out.footprints.push((stage, h));
            }
        }
    }

    /// Returns the micro-batches whose activations a stage holds.
    pub(super) fn in_flight(&self, c: &Candidate, node: &LayoutCost, stage: u32) -> f64 {
        match self.is_training() {
            true => peak_in_flight_on(c.schedule, c.pp, c.interleave, node.micro_batches, stage),
            false => 0.0,
        }
    }

    /// Returns the footprint of one stage with nothing in flight.
    pub(super) fn stage_footprint(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        cut: usize,
        stage: u32,
    ) -> StageFootprint {
        let mut h = StageFootprint {
            send_bytes: node.send_bytes,
            weight_shards: f64::from(c.replicas),
            expert_shards: f64::from(c.expert_replicas),
            ..StageFootprint::default()
        };
        self.for_each_layer(c, node, cut, stage, |n, cost| {
            h.dense_weights += n * cost.weights;
            h.expert_weights += n * cost.expert_weights;
            h.saved_bytes += n * cost.saved_bytes;
            h.workspace_bytes = h.workspace_bytes.max(cost.workspace_bytes);
            h.layer_weights = h.layer_weights.max(cost.weights + cost.expert_weights);
            h.weight_shards = h.weight_shards.max(f64::from(c.replicas) * cost.weight_copies);
        });
        // A single stage holds the tied table only once.
        if c.pp == 1 {
            h.dense_weights -= node.tied_weights;
        }
        let cached = self.cache_bytes_per_element(c);
        for (n, numbers) in self.splits[cut].stage_layers(stage).iter().zip(&self.cache_elements) {
            h.cache_bytes += n * numbers * cached;
        }
        h
    }

    /// Returns the bytes on a rank, over all its sequences, for one cache element per token.
    fn cache_bytes_per_element(&self, c: &Candidate) -> f64 {
        if self.is_training() {
            return 0.0;
        }
        let sequences = self.q.job.batch_size().div_ceil(u64::from(c.replicas)) as f64;
        let tokens = sequences * self.q.cached_tokens() as f64;
        tokens * cache_element_bytes(c.layout.precision) * cache_share(self.q.work.kv_heads, &c.layout)
    }
}

/// Returns whether stage `a` holds at least as much of everything as stage `b`, at equal
/// micro-batches in flight.
fn dominates(a: &StageFootprint, b: &StageFootprint) -> bool {
    a.dense_weights >= b.dense_weights
        && a.expert_weights >= b.expert_weights
        && a.saved_bytes >= b.saved_bytes
        && a.workspace_bytes >= b.workspace_bytes
        && a.layer_weights >= b.layer_weights
        && a.cache_bytes >= b.cache_bytes
        && a.weight_shards <= b.weight_shards
}
