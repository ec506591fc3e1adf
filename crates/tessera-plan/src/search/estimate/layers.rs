//! Computes the costs of a layout's layers, and of one send across a stage boundary.

use tessera_cost::layer::{GroupSpans, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, expert_load};
use tessera_cost::params::{LayerLayout, Recompute, TpScheme};
use tessera_cost::{CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::LayerOp;
use tessera_mesh::Precision;

use super::super::{Candidate, Job, SearchQuery};
use super::memo::Memo;
use super::{CostSummary, DenseKey, Estimator, LayoutCost};

/// Kinds under which the rows before and after all layers are memoized; layers have smaller kinds.
const FIRST_ROWS: u8 = 254;
const LAST_ROWS: u8 = 255;
/// Kind under which the rows of a tied head are memoized; layers have smaller kinds.
const TIED_HEAD: u8 = 253;

/// What the costs of all rows of one candidate depend on.
struct LayerInputs<'a> {
    c: &'a Candidate,
    load: LayerLoad,
    spans: GroupSpans,
    /// Tokens over all ranks of the experts' group.
    expert_tokens: f64,
}

impl LayerInputs<'_> {
    /// Returns the layout without the fields that only experts depend on, so that equal dense
    /// layers share a key.
    fn dense_layout(&self) -> LayerLayout {
        LayerLayout { expert_tp: 1, ep: 1, wire_precision: Precision::Bf16, capacity_pct: 0, ..self.c.layout }
    }

    fn dense_key(&self, kind: u8, recompute: Recompute) -> DenseKey {
        let l = &self.c.layout;
        (kind, l.tp, l.ring, l.scheme, l.precision, self.c.micro_batch, recompute, self.spans.tp.domains)
    }

    /// Returns the cost of rows before or after all layers, which nothing recomputes.
    fn end_cost(
        &self,
        q: &SearchQuery,
        memo: &mut Memo<DenseKey, CostSummary>,
        kind: u8,
        rows: &[LayerOp],
    ) -> CostSummary {
        let load = LayerLoad { recompute: Recompute::None, ..self.load };
        *memo.get_or_insert(self.dense_key(kind, Recompute::None), || {
            CostSummary::from_layer_cost(&layer_cost(
                &q.machine,
                rows,
                &self.dense_layout(),
                &load,
                &self.spans,
                &ExpertLoad::NONE,
            ))
        })
    }
}

impl Estimator<'_> {
    /// Computes the layer costs of a candidate's layout, micro-batch and recomputation policy.
    pub fn compute_layers(&mut self, c: &Candidate, out: &mut LayoutCost) {
        out.serial += 1;
        let l = &c.layout;
        let share = self.q.job.batch_size().div_ceil(u64::from(c.replicas));
        out.micro_batches =
            u32::try_from(share.div_ceil(u64::from(c.micro_batch.max(1)))).unwrap_or(u32::MAX);
        let tokens = f64::from(c.micro_batch) * self.q.job.query_tokens() as f64;
        let inputs = LayerInputs {
            c,
            load: LayerLoad {
                tokens,
                sequences: f64::from(c.micro_batch),
                keys: self.q.job.context_tokens() as f64,
                window: self.q.attention_window().map(|w| w as f64),
                training: matches!(self.q.job, Job::Train { .. }),
                recompute: c.recompute,
            },
            spans: self.group_spans(c),
            expert_tokens: tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp),
        };
        let expert_tokens = inputs.expert_tokens;
        out.expert_load = self.experts_and_top_k.map(|(n, k)| {
            let (routing, ep, cap) = (self.q.routing, l.ep, l.capacity_pct);
            *self.expert_loads.get_or_insert((ep, expert_tokens.to_bits(), cap), || {
                expert_load(n, k, ep, expert_tokens, routing, cap)
            })
        });
        out.chosen_splits.clear();
        self.compute_layer_kinds(&inputs, out);
        let (q, memo) = (self.q, &mut self.dense_costs);
        out.first_cost = inputs.end_cost(q, memo, FIRST_ROWS, &q.work.ops_before_layers);
        out.last_cost = inputs.end_cost(q, memo, LAST_ROWS, &q.work.ops_after_layers);
        out.tied_weights = if self.tied_head_rows.is_empty() {
            0.0
        } else {
            inputs.end_cost(q, memo, TIED_HEAD, &self.tied_head_rows).weights
        };

        let layers = self.kinds.layer_kinds.len() as u32;
        let saved_bytes =
            |(kind, c): (usize, &CostSummary)| self.kinds.count_layers(kind, 0, layers) * c.saved_bytes;
        out.saved_bytes = out.first_cost.saved_bytes + out.last_cost.saved_bytes;
        out.saved_bytes += out.layer_costs.iter().enumerate().map(saved_bytes).sum::<f64>();
        out.min_workspace_bytes =
            out.layer_costs.iter().map(|c| c.workspace_bytes).reduce(f64::min).unwrap_or(0.0);
        self.compute_stage_send(&inputs, out);
    }

    /// Computes the cost of one layer of each kind: its dense rows, and its routed experts if it has
    /// any.
    fn compute_layer_kinds(&mut self, inputs: &LayerInputs<'_>, out: &mut LayoutCost) {
        let (m, c, l) = (&self.q.machine, inputs.c, &inputs.c.layout);
        let LayerInputs { load, spans, .. } = inputs;
        let plain = inputs.dense_layout();
        out.layer_costs.clear();
        out.layer_ns.clear();
        for (kind, (dense, moe)) in self.rows_by_kind.iter().enumerate() {
            let kind = kind as u8;
            let cost = self.dense_costs.get_or_insert(inputs.dense_key(kind, c.recompute), || {
                CostSummary::from_layer_cost(&layer_cost(m, dense, &plain, load, spans, &ExpertLoad::NONE))
            });
            out.layer_costs.push(*cost);
            if let (false, Some(routed)) = (moe.is_empty(), &out.expert_load) {
                // Expert rows depend on tp only where tp keeps whole tokens: each rank then needs
                // all results.
                let keeps_whole_tokens = matches!(l.scheme, TpScheme::Megatron | TpScheme::RsMmAg);
                let (tp, micro_batch) = if keeps_whole_tokens { (l.tp, c.micro_batch) } else { (1, 0) };
                let layout = LayerLayout { tp, ring: 1, scheme: TpScheme::Megatron, ..*l };
                let key = (
                    kind,
                    (tp, micro_batch, l.expert_tp, l.ep),
                    (l.precision, l.wire_precision, l.capacity_pct),
                    inputs.expert_tokens.to_bits(),
                    c.recompute,
                    (spans.ep.domains, spans.expert_tp.domains),
                );
                let routed = self.expert_costs.get_or_insert(key, || {
                    CostSummary::from_layer_cost(&layer_cost(m, moe, &layout, load, spans, routed))
                });
                out.layer_costs[usize::from(kind)].add(routed);
            }
            out.layer_ns.push(out.layer_costs[usize::from(kind)].total.total_ns());
        }
    }

    /// Computes one send across a stage boundary in one direction.
    fn compute_stage_send(&mut self, inputs: &LayerInputs<'_>, out: &mut LayoutCost) {
        let (c, l, tokens) = (inputs.c, &inputs.c.layout, inputs.load.tokens);
        (out.send_ns, out.send_bytes, out.send_link_bytes) = (0.0, 0.0, [0.0; 3]);
        if c.pp <= 1 {
            return;
        }
        out.send_bytes = (tokens / f64::from(l.tp)).ceil() * self.q.work.hidden_size as f64 * 2.0;
        let domains = if self.crosses_domain(c.replica_stage_ranks() * c.pp) { 2 } else { 1 };
        let send =
            self.transfer_cost(CollectiveOp::SendRecv, out.send_bytes, GroupSpan { ranks: 2, domains });
        (out.send_ns, out.send_link_bytes) = (send.ns, send.sent_bytes);
        if matches!(l.scheme, TpScheme::Megatron | TpScheme::RsMmAg) && l.tp > 1 {
            // Each tp rank sends a shard, and the ranks of the next stage gather them.
            let whole_bytes = tokens * self.q.work.hidden_size as f64 * 2.0;
            let gather = self.transfer_cost(CollectiveOp::AllGather, whole_bytes, inputs.spans.tp);
            out.send_ns += gather.ns;
            (0..3).for_each(|i| out.send_link_bytes[i] += gather.sent_bytes[i]);
        }
    }
}
