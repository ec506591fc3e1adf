//! The op rows of a language model, and the activations that each row keeps for the backward pass.
//!
//! The kept bytes are those of a training step with two bytes per element, without recomputation:
//! inputs of matmuls, inputs of norms and activations, and one-byte masks. For a layer with biases,
//! dropout and an inner width of four times the model width, they add up to 34 bytes per token and
//! unit of width, plus 5 per head, query and key (Korthikanti et al., "Reducing activation
//! recomputation in large transformer models").

use tessera_ir::analytic_model::{
    AnalyticModel, LatentWidths, LayerOp, LayerOpKind, LayerStack, OpSharding, names,
};

use super::{AttentionKind, LanguageModel, MlpConfig, NormKind};

impl LanguageModel {
    /// Converts the model to op rows. `fused_attention` states whether the executor's attention
    /// keeps, instead of the scores, four bytes per head and query for the backward pass: their
    /// log-sum-exp.
    #[must_use]
    pub fn to_analytic_model(&self, fused_attention: bool) -> AnalyticModel {
        let heads = self.attention.head_count();
        let kv_heads = match self.attention {
            AttentionKind::Grouped { kv_heads, .. } => kv_heads,
            AttentionKind::Latent { .. } => 1,
        };
        AnalyticModel {
            name: self.name.clone(),
            hidden_size: self.width,
            vocab_size: self.vocab,
            heads,
            kv_heads,
            ops_before_layers: self.embedding_ops(),
            stacks: self.layer_stacks(fused_attention),
            ops_after_layers: self.head_ops(),
            tied_embeddings: self.tied_embedding,
        }
    }

    fn embedding_ops(&self) -> Vec<LayerOp> {
        let d = self.width;
        let table = |name, cut, rows| LayerOp {
            name,
            kind: LayerOpKind::Embedding { rows, width: d },
            sharding: cut,
            activation_bytes: 0,
        };
        let mut rows = vec![table("embed.tokens", OpSharding::Row, self.vocab)];
        if self.learned_positions > 0 {
            rows.push(table("embed.positions", OpSharding::Replicated, self.learned_positions));
        }
        if self.dropout {
            rows.push(memory_bound_op("embed.dropout", OpSharding::Replicated, [d, d + d / 2], 0, d));
        }
        rows
    }

    fn head_ops(&self) -> Vec<LayerOp> {
        let (d, v) = (self.width, self.vocab);
        vec![
            self.norm_op("head.norm"),
            matmul_op("head.logits", OpSharding::Col, [d, v], false, 2 * d),
            // Logits are four bytes wide here, which counts as two elements.
            memory_bound_op("head.softmax", OpSharding::Heads, [2 * v, 2 * v], 0, 4 * v),
        ]
    }

    /// Groups consecutive equal layers, in order.
    fn layer_stacks(&self, fused: bool) -> Vec<LayerStack> {
        let mut stacks: Vec<LayerStack> = Vec::new();
        for layer in 0..self.layers {
            let name = match &self.experts {
                Some(e) if !e.dense_layers.contains(&layer) => "experts",
                _ => "dense",
            };
            match stacks.last_mut() {
                Some(s) if s.name == name => s.count += 1,
                _ => {
                    stacks.push(LayerStack { name, count: 1, ops: self.layer_ops(name == "experts", fused) })
                }
            }
        }
        stacks
    }

    fn layer_ops(&self, experts: bool, fused: bool) -> Vec<LayerOp> {
        let mut rows = vec![self.norm_op("attention.norm")];
        match self.attention {
            AttentionKind::Grouped { .. } => self.grouped_attention(fused, &mut rows),
            AttentionKind::Latent { .. } => self.latent_attention(fused, &mut rows),
        }
        rows.push(self.add_op("attention.add"));
        if experts {
            self.routed_experts(&mut rows);
        } else {
            rows.push(self.norm_op("mlp.norm"));
            self.feed_forward(["mlp.up", "mlp.act", "mlp.down"], self.mlp, 2 * self.width, &mut rows);
            rows.push(self.add_op("mlp.add"));
        }
        rows
    }

    fn norm_op(&self, name: &'static str) -> LayerOp {
        let d = self.width;
        let weights = match self.norm {
            NormKind::Rms => d,
            NormKind::Layer => 2 * d,
        };
        memory_bound_op(name, OpSharding::Replicated, [d, d], weights, 2 * d)
    }

    /// Adds a branch to the residual stream, through dropout if the model uses it: the mask is half
    /// an element wide.
    fn add_op(&self, name: &'static str) -> LayerOp {
        let d = self.width;
        let mask = if self.dropout { d } else { 0 };
        memory_bound_op(name, OpSharding::Replicated, [2 * d, d + mask / 2], 0, mask)
    }

    fn scores_bytes(&self, fused: bool) -> u64 {
        match (fused, self.scores_dropout) {
            (true, _) => 0,
            // The softmax's output, its mask, and the masked result.
            (false, true) => 5,
            (false, false) => 2,
        }
    }

    fn grouped_attention(&self, fused: bool, rows: &mut Vec<LayerOp>) {
        let AttentionKind::Grouped { heads, kv_heads, head_dim, qkv_bias, out_bias, qk_norm } =
            self.attention
        else {
            return;
        };
        let d = self.width;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        rows.push(matmul_op("attention.qkv", OpSharding::Col, [d, q + 2 * kv], qkv_bias, 2 * d));
        let qk_elements = [q + kv, q + kv];
        if qk_norm {
            rows.push(memory_bound_op(
                "attention.qk_norm",
                OpSharding::Heads,
                qk_elements,
                2 * head_dim,
                2 * (q + kv),
            ));
        }
        if self.learned_positions == 0 {
            rows.push(memory_bound_op("attention.rope", OpSharding::Heads, qk_elements, 0, 0));
        }
        rows.push(LayerOp {
            name: "attention.core",
            kind: LayerOpKind::Attention {
                heads,
                kv_heads,
                qk: head_dim,
                v: head_dim,
                cache_width: 2 * kv,
                causal: true,
                stored_score_bytes: self.scores_bytes(fused),
                latent: None,
            },
            sharding: OpSharding::Heads,
            activation_bytes: 2 * (q + 2 * kv) + if fused { 4 * heads } else { 0 },
        });
        rows.push(matmul_op("attention.out", OpSharding::Row, [q, d], out_bias, 2 * q));
    }

    fn latent_attention(&self, fused: bool, rows: &mut Vec<LayerOp>) {
        let AttentionKind::Latent { heads, q_rank, kv_rank, nope, rope, v } = self.attention else { return };
        let d = self.width;
        let q = heads * (nope + rope);
        let ranks = q_rank.unwrap_or(0) + kv_rank;
        // Both down-projections read the same input, so they are one matmul; its weights are small
        // and replicated on every rank.
        rows.push(matmul_op("attention.down", OpSharding::Replicated, [d, ranks + rope], false, 2 * d));
        rows.push(memory_bound_op(
            "attention.latent_norm",
            OpSharding::Replicated,
            [ranks, ranks],
            ranks,
            2 * ranks,
        ));
        match q_rank {
            Some(rank) => rows.push(matmul_op("attention.q_up", OpSharding::Col, [rank, q], false, 2 * rank)),
            None => rows.push(matmul_op("attention.q", OpSharding::Col, [d, q], false, 0)),
        }
        rows.push(matmul_op(
            "attention.kv_up",
            OpSharding::Col,
            [kv_rank, heads * (nope + v)],
            false,
            2 * kv_rank,
        ));
        rows.push(memory_bound_op("attention.rope", OpSharding::Heads, [q + rope, q + heads * rope], 0, 0));
        rows.push(LayerOp {
            name: "attention.core",
            kind: LayerOpKind::Attention {
                heads,
                kv_heads: heads,
                qk: nope + rope,
                v,
                cache_width: kv_rank + rope,
                causal: true,
                stored_score_bytes: self.scores_bytes(fused),
                latent: Some(LatentWidths { qk: kv_rank + rope, v: kv_rank }),
            },
            sharding: OpSharding::Heads,
            activation_bytes: 2 * (2 * q + heads * v) + if fused { 4 * heads } else { 0 },
        });
        rows.push(matmul_op("attention.out", OpSharding::Row, [heads * v, d], false, 2 * heads * v));
    }

    /// Adds up-projection, activation and down-projection; `input` is the cost of keeping the
    /// input, 0 if an earlier row includes it.
    fn feed_forward(&self, names: [&'static str; 3], mlp: MlpConfig, input: u64, rows: &mut Vec<LayerOp>) {
        let (d, n) = (self.width, mlp.inner);
        let up = if mlp.gated { 2 * n } else { n };
        rows.push(matmul_op(names[0], OpSharding::Col, [d, up], mlp.bias, input));
        rows.push(memory_bound_op(names[1], OpSharding::Heads, [up, n], 0, 2 * up));
        rows.push(matmul_op(names[2], OpSharding::Row, [n, d], mlp.bias, 2 * n));
    }

    fn routed_experts(&self, rows: &mut Vec<LayerOp>) {
        let Some(e) = &self.experts else { return };
        let (d, n, k) = (self.width, e.inner, e.top_k);
        rows.push(self.norm_op("moe.norm"));
        // The norm's output is kept once, here, for router, shared experts and dispatch.
        rows.push(matmul_op(names::ROUTER, OpSharding::Replicated, [d, e.count], e.router_bias, 2 * d));
        // Four bytes per element: the scores decide which rank computes which token.
        rows.push(memory_bound_op(
            names::GATE,
            OpSharding::Replicated,
            [2 * e.count, 2 * e.count],
            0,
            4 * e.count,
        ));
        if e.shared_inner > 0 {
            let shared = MlpConfig { inner: e.shared_inner, gated: e.gated, bias: false };
            self.feed_forward(["shared.up", "shared.act", "shared.down"], shared, 0, rows);
        }
        rows.push(memory_bound_op(names::PACK, OpSharding::Replicated, [d, k * d], 0, 0));
        let up = if e.gated { 2 * n } else { n };
        rows.push(LayerOp {
            name: "experts.ffn",
            kind: LayerOpKind::Experts {
                experts: e.count,
                top_k: k,
                k: d,
                n,
                matrices: if e.gated { 3 } else { 2 },
            },
            sharding: OpSharding::Experts,
            activation_bytes: k * (2 * d + 2 * n),
        });
        // A token's weight per expert is applied here, before the down-projection, so that the
        // combine is a plain sum.
        rows.push(memory_bound_op("experts.act", OpSharding::Experts, [k * up, k * n], 0, k * 2 * up));
        rows.push(memory_bound_op(names::UNPACK, OpSharding::Replicated, [k * d, d], 0, 0));
        rows.push(self.add_op("moe.add"));
    }
}

fn matmul_op(name: &'static str, cut: OpSharding, [k, n]: [u64; 2], bias: bool, keep_bytes: u64) -> LayerOp {
    LayerOp { name, kind: LayerOpKind::Matmul { k, n, bias }, sharding: cut, activation_bytes: keep_bytes }
}

fn memory_bound_op(
    name: &'static str,
    cut: OpSharding,
    [reads, writes]: [u64; 2],
    weights: u64,
    keep_bytes: u64,
) -> LayerOp {
    LayerOp {
        name,
        kind: LayerOpKind::Elementwise { reads, writes, weights },
        sharding: cut,
        activation_bytes: keep_bytes,
    }
}
