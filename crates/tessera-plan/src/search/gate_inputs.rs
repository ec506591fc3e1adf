//! Derives the inputs of the gates from an estimate.

use tessera_cost::CollectiveOp;
use tessera_cost::moe::{buffer_bytes, dispatch_bytes};
use tessera_cost::params::{KvCacheStorage, Recompute};
use tessera_ir::analytic_model::LayerOpKind;
use tessera_mesh::{LinkClass, MemoryTier};

use super::estimate::{Estimator, LayoutCost, PipelineCost, StepCost};
use super::gates::{
    ExchangeGateInputs, ExpertGateInputs, GateInputs, GateResult, GroupGateInputs, MemoryGateInputs,
    ReplicaGateInputs, evaluate_gates,
};
use super::{Candidate, Job, MemoryUse};

impl Estimator<'_> {
    /// Derives the inputs of all gates from a candidate's costs and evaluates the gates.
    pub(super) fn evaluate_gates(
        &mut self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &PipelineCost,
        sum: &StepCost,
    ) -> Vec<GateResult> {
        let train = matches!(self.q.job, Job::Train { .. });
        let t = &sum.breakdown;
        let spans = self.group_spans(c);
        let domains = |ranks, domains| (ranks, domains);
        let dp = self.replica_span(c, c.replicas);
        let groups = [
            ("tp", domains(c.layout.tp, spans.tp.domains)),
            ("ep", domains(c.layout.ep, spans.ep.domains)),
            ("pp", domains(c.pp, if self.crosses_domain(c.replica_stage_ranks() * c.pp) { 2 } else { 1 })),
            ("dp", domains(c.replicas, dp.domains)),
        ];
        let rack = self.q.machine.cluster.hosts_per_rack * self.q.machine.cluster.devices_per_host;
        let copy = c.replica_stage_ranks() * c.pp;
        let within = copy <= rack && rack.is_multiple_of(copy) || self.constraints.devices <= rack;
        let idle_shares = self.idle_shares(c, node, pipe, t, node.micro_batches);
        let most_idle = self.q.space.thresholds.max_bubble;
        let facts = GateInputs {
            training: train,
            recomputes: c.recompute != Recompute::None,
            memory: self.memory_inputs(c, node, pipe, sum, train),
            experts: node.expert_load.zip(self.q.work.routed_experts()).map(|(load, (experts, top_k))| {
                ExpertGateInputs {
                    experts,
                    top_k,
                    ep: c.layout.ep,
                    tokens: load.mean_rows * f64::from(c.layout.ep)
                        / top_k as f64
                        / (1.0 - load.dropped).max(1e-9),
                    std_over_mean: load.std_over_mean,
                    rank_std_over_mean: load.rank_std_over_mean,
                    slowest_over_mean: load.slowest_over_mean,
                    capacity_pct: c.layout.capacity_pct,
                    dropped_share: load.dropped,
                    prefetch: sum.prefetch,
                }
            }),
            dispatch: self.dispatch_inputs(c, node),
            hidden_ns: (t.collective_ns - t.tp_ns - t.ep_ns - t.pp_dp_ns).max(0.0),
            collective_ns: t.collective_ns,
            micro_batches: idle_shares
                .iter()
                .any(|share| *share >= most_idle)
                .then(|| (node.micro_batches, self.find_micro_batches(c, node, pipe, t, most_idle))),
            idle_shares,
            cache_hit_share: (!train && pipe.max_cache_bytes() > 0.0)
                .then(|| if c.cache_at == KvCacheStorage::Window { 1.0 } else { 1.0 - sum.old_cache_share }),
            axis_groups: groups
                .into_iter()
                .filter(|(_, (ranks, _))| *ranks > 1)
                .map(|(axis, (ranks, domains))| GroupGateInputs { axis, ranks, domains })
                .collect(),
            replicas: ReplicaGateInputs {
                replica_count: c.model_replicas(),
                ranks_per_replica: copy,
                racks_per_replica: if within { 1 } else { copy.div_ceil(rack).max(2) },
                rack_devices: rack,
            },
        };
        evaluate_gates(&facts, &self.q.space.thresholds)
    }

    fn memory_inputs(
        &mut self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &PipelineCost,
        sum: &StepCost,
        train: bool,
    ) -> MemoryGateInputs {
        let budget = sum.memory.to_budget();
        let here = |what: MemoryUse| budget.bytes.get(&(MemoryTier::Hbm, what)).map_or(0.0, |b| b.0 as f64);
        let tokens = f64::from(c.micro_batch) * self.q.job.query_tokens() as f64;
        let mut plain = here(MemoryUse::Activations);
        if train && c.recompute != Recompute::None {
            let whole = Candidate { recompute: Recompute::None, ..*c };
            let (mut n, mut p) = (LayoutCost::default(), PipelineCost::default());
            self.compute_layers(&whole, &mut n);
            self.compute_pipeline(&whole, &mut n, &mut p);
            plain = plain.max(p.max_saved_bytes());
        }
        let sequences = self.q.job.batch_size().div_ceil(u64::from(c.replicas)) as f64;
        MemoryGateInputs {
            device_bytes: self.q.machine.cluster.device.memory_bytes.value,
            parameter_bytes: here(MemoryUse::Weights) + here(MemoryUse::Experts),
            training_bytes: here(MemoryUse::Gradients) + here(MemoryUse::OptimizerSharding),
            activation_bytes: here(MemoryUse::Activations),
            unrecomputed_activation_bytes: plain,
            cache_bytes: here(MemoryUse::Cache),
            other_bytes: here(MemoryUse::Buffers) + here(MemoryUse::Library),
            activation_tokens: if train { tokens * pipe.in_flight_of(node.micro_batches) } else { 0.0 },
            cache_tokens: if train { 0.0 } else { sequences * self.q.cached_tokens() as f64 },
        }
    }

    /// Returns the size and duration of one layer's dispatch.
    fn dispatch_inputs(&self, c: &Candidate, node: &LayoutCost) -> Option<ExchangeGateInputs> {
        let load = node.expert_load.filter(|_| c.layout.ep > 1)?;
        let (width, top_k) = self.q.work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
            LayerOpKind::Experts { k, top_k, .. } => Some((k, top_k)),
            _ => None,
        })?;
        let ranks = f64::from(c.layout.ep * c.layout.expert_tp);
        let own =
            load.mean_rows * f64::from(c.layout.ep) / top_k as f64 / (1.0 - load.dropped).max(1e-9) / ranks;
        let bytes =
            dispatch_bytes(own, width, load.remote_copies * load.busiest_over_mean, c.layout.wire_precision);
        let span = self.group_spans(c).ep;
        let t =
            self.q.machine.collective_cost(CollectiveOp::AllToAll, buffer_bytes(bytes, c.layout.ep), span);
        // Across several domains the slower links set the pace: count the bytes that cross them,
        // against their rate.
        let class = if span.domains > 1 { LinkClass::Network } else { LinkClass::Domain };
        let bytes = if span.domains > 1 { t.sent_bytes[LinkClass::Network as usize] } else { bytes };
        let (ns, line_bytes_per_s) = (t.ns, self.q.machine.cluster.link_spec(class).bytes_per_s.value);
        Some(ExchangeGateInputs { bytes, ns, line_bytes_per_s })
    }
}
