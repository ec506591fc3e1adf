//! The numbers of an estimate that gates are about.

use tessera_cost::CollectiveOp;
use tessera_cost::knobs::{CacheAt, Recompute};
use tessera_cost::moe::{buffer_bytes, dispatch_bytes};
use tessera_ir::work::RowOp;
use tessera_mesh::{LinkClass, Tier};

use super::estimate::{Node, Pipe, Prices, Sum};
use super::gates::{
    ExchangeFacts, ExpertFacts, Gate, GateFacts, GroupFacts, MemoryFacts, ReplicaFacts, gates,
};
use super::{Candidate, Job, Use};

impl Prices<'_> {
    /// All gates of a candidate.
    pub(super) fn gates(&mut self, c: &Candidate, node: &Node, pipe: &Pipe, sum: &Sum) -> Vec<Gate> {
        let train = matches!(self.q.job, Job::Train { .. });
        let t = &sum.times;
        let spans = self.spans(c);
        let domains = |ranks, domains| (ranks, domains);
        let dp = self.copies_span(c, c.replicas);
        let groups = [
            ("tp", domains(c.layout.tp, spans.tp.domains)),
            ("ep", domains(c.layout.ep, spans.ep.domains)),
            ("pp", domains(c.pp, if self.crosses(c.unit() * c.pp) { 2 } else { 1 })),
            ("dp", domains(c.replicas, dp.domains)),
        ];
        let rack = self.q.machine.cluster.hosts_per_rack * self.q.machine.cluster.devices_per_host;
        let copy = c.unit() * c.pp;
        let within = copy <= rack && rack.is_multiple_of(copy) || self.rules.devices <= rack;
        let facts = GateFacts {
            training: train,
            recomputes: c.recompute != Recompute::None,
            memory: self.memory_facts(c, node, pipe, sum, train),
            experts: node.load.zip(self.q.work.experts()).map(|(load, (experts, top_k))| ExpertFacts {
                experts,
                top_k,
                ep: c.layout.ep,
                tokens: load.rows * f64::from(c.layout.ep) / top_k as f64 / (1.0 - load.dropped).max(1e-9),
                std_over_mean: load.std_over_mean,
                rank_std_over_mean: load.rank_std_over_mean,
                slowest: load.slowest,
                capacity_pct: c.layout.capacity_pct,
                dropped: load.dropped,
                prefetch: sum.prefetch,
            }),
            exchange: self.exchange(c, node),
            hidden_ns: (t.collective_ns - t.tp_ns - t.ep_ns - t.pp_dp_ns).max(0.0),
            collective_ns: t.collective_ns,
            bubbles: pipe
                .stages
                .iter()
                .map(|ns| {
                    let busy = f64::from(node.micro_batches) * ns;
                    let ends = t.optimizer_ns + t.fetch_ns + t.pp_dp_ns;
                    (1.0 - (busy + ends) / sum.step_ns).max(0.0)
                })
                .collect(),
            cache_hits: (!train && pipe.cache_bytes() > 0.0)
                .then(|| if c.cache_at == CacheAt::Window { 1.0 } else { 1.0 - sum.old_share }),
            groups: groups
                .into_iter()
                .filter(|(_, (ranks, _))| *ranks > 1)
                .map(|(axis, (ranks, domains))| GroupFacts { axis, ranks, domains })
                .collect(),
            replica: ReplicaFacts {
                copies: c.copies(),
                ranks: copy,
                racks: if within { 1 } else { copy.div_ceil(rack).max(2) },
                rack_devices: rack,
            },
        };
        gates(&facts, &self.q.space.limits)
    }

    fn memory_facts(
        &mut self,
        c: &Candidate,
        node: &Node,
        pipe: &Pipe,
        sum: &Sum,
        train: bool,
    ) -> MemoryFacts {
        let budget = sum.totals.budget();
        let here = |what: Use| budget.bytes.get(&(Tier::Hbm, what)).map_or(0.0, |b| b.0 as f64);
        let tokens = f64::from(c.micro_batch) * self.q.job.queries() as f64;
        let mut plain = here(Use::Activations);
        if train && c.recompute != Recompute::None {
            let whole = Candidate { recompute: Recompute::None, ..*c };
            let (mut n, mut p) = (Node::default(), Pipe::default());
            self.node(&whole, &mut n);
            self.pipe(&whole, &mut n, &mut p);
            plain = plain.max(p.kept_bytes());
        }
        let sequences = self.q.job.batch().div_ceil(u64::from(c.replicas)) as f64;
        MemoryFacts {
            device: self.q.machine.cluster.device.memory_bytes.value,
            parameters: here(Use::Weights) + here(Use::Experts),
            training: here(Use::Gradients) + here(Use::Optimizer),
            activations: here(Use::Activations),
            activations_plain: plain,
            cache: here(Use::Cache),
            other: here(Use::Buffers) + here(Use::Library),
            activation_tokens: if train { tokens * pipe.in_flight(node.micro_batches) } else { 0.0 },
            cache_tokens: if train { 0.0 } else { sequences * self.q.cached_tokens() as f64 },
        }
    }

    /// One dispatch of one layer.
    fn exchange(&self, c: &Candidate, node: &Node) -> Option<ExchangeFacts> {
        let load = node.load.filter(|_| c.layout.ep > 1)?;
        let (width, top_k) = self.q.work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
            RowOp::Experts { k, top_k, .. } => Some((k, top_k)),
            _ => None,
        })?;
        let ranks = f64::from(c.layout.ep * c.layout.expert_tp);
        let own = load.rows * f64::from(c.layout.ep) / top_k as f64 / (1.0 - load.dropped).max(1e-9) / ranks;
        let bytes = dispatch_bytes(own, width, load.copies * load.busiest_link, c.layout.wire);
        let span = self.spans(c).ep;
        let t = self.q.machine.collective(CollectiveOp::AllToAll, buffer_bytes(bytes, c.layout.ep), span);
        // Over several domains the slower links set the pace: what crosses them counts, against their rate.
        let class = if span.domains > 1 { LinkClass::Out } else { LinkClass::Domain };
        let bytes = if span.domains > 1 { t.sent[LinkClass::Out as usize] } else { bytes };
        let (ns, line_bytes_per_s) = (t.ns, self.q.machine.cluster.link(class).bytes_per_s.value);
        Some(ExchangeFacts { bytes, ns, line_bytes_per_s })
    }
}
