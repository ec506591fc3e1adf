//! The op rows of a language model, and what each leaves behind for the backward pass.
//!
//! Bytes kept are those of a training step at two bytes a number in which no kernel computes again what it could keep:
//! inputs of products, inputs of norms and activations, and masks of one byte. For a layer with biases, dropout and
//! an inner width of four times the width they add up to 34 bytes per token and number of the width, plus 5 per head,
//! query and key (Korthikanti et al., "Reducing activation recomputation in large transformer models").

use tessera_ir::work::{Latent, Row, RowCut, RowOp, Stack, Work, names};

use super::{Attention, LanguageModel, Mlp, Norm};

impl LanguageModel {
    /// The model as rows. `fused_attention` says whether the executor's attention keeps no scores for the backward pass,
    /// but four bytes per head and query: the logarithm of their sum.
    #[must_use]
    pub fn work(&self, fused_attention: bool) -> Work {
        let heads = self.attention.heads();
        let kv_heads = match self.attention {
            Attention::Grouped { kv_heads, .. } => kv_heads,
            Attention::Latent { .. } => 1,
        };
        Work {
            name: self.name.clone(),
            width: self.width,
            vocab: self.vocab,
            heads,
            kv_heads,
            first: self.first(),
            stacks: self.stacks(fused_attention),
            last: self.last(),
            tied: self.tied,
        }
    }

    fn first(&self) -> Vec<Row> {
        let d = self.width;
        let table = |name, cut, rows| Row { name, op: RowOp::Embed { rows, width: d }, cut, keep_bytes: 0 };
        let mut rows = vec![table("embed.tokens", RowCut::Row, self.vocab)];
        if self.positions > 0 {
            rows.push(table("embed.positions", RowCut::Whole, self.positions));
        }
        if self.dropout {
            rows.push(pass("embed.dropout", RowCut::Whole, [d, d + d / 2], 0, d));
        }
        rows
    }

    fn last(&self) -> Vec<Row> {
        let (d, v) = (self.width, self.vocab);
        vec![
            self.norm_row("head.norm"),
            product("head.logits", RowCut::Col, [d, v], false, 2 * d),
            // Logits are four bytes wide here, which is two numbers.
            pass("head.softmax", RowCut::Heads, [2 * v, 2 * v], 0, 4 * v),
        ]
    }

    /// Layers in order, equal neighbours together.
    fn stacks(&self, fused: bool) -> Vec<Stack> {
        let mut stacks: Vec<Stack> = Vec::new();
        for layer in 0..self.layers {
            let name = match &self.experts {
                Some(e) if !e.dense.contains(&layer) => "experts",
                _ => "dense",
            };
            match stacks.last_mut() {
                Some(s) if s.name == name => s.count += 1,
                _ => stacks.push(Stack { name, count: 1, rows: self.layer(name == "experts", fused) }),
            }
        }
        stacks
    }

    fn layer(&self, experts: bool, fused: bool) -> Vec<Row> {
        let mut rows = vec![self.norm_row("attention.norm")];
        match self.attention {
            Attention::Grouped { .. } => self.grouped(fused, &mut rows),
            Attention::Latent { .. } => self.latent(fused, &mut rows),
        }
        rows.push(self.add_row("attention.add"));
        if experts {
            self.routed(&mut rows);
        } else {
            rows.push(self.norm_row("mlp.norm"));
            self.feed_forward(["mlp.up", "mlp.act", "mlp.down"], self.mlp, 2 * self.width, &mut rows);
            rows.push(self.add_row("mlp.add"));
        }
        rows
    }

    fn norm_row(&self, name: &'static str) -> Row {
        let d = self.width;
        let weights = match self.norm {
            Norm::Rms => d,
            Norm::Layer => 2 * d,
        };
        pass(name, RowCut::Whole, [d, d], weights, 2 * d)
    }

    /// A branch comes back to the stream, through dropout if there is some: its mask is half a number wide.
    fn add_row(&self, name: &'static str) -> Row {
        let d = self.width;
        let mask = if self.dropout { d } else { 0 };
        pass(name, RowCut::Whole, [2 * d, d + mask / 2], 0, mask)
    }

    fn scores_bytes(&self, fused: bool) -> u64 {
        match (fused, self.scores_dropout) {
            (true, _) => 0,
            // The softmax's output, its mask, and what the mask left of it.
            (false, true) => 5,
            (false, false) => 2,
        }
    }

    fn grouped(&self, fused: bool, rows: &mut Vec<Row>) {
        let Attention::Grouped { heads, kv_heads, head_dim, qkv_bias, out_bias, qk_norm } = self.attention
        else {
            return;
        };
        let d = self.width;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        rows.push(product("attention.qkv", RowCut::Col, [d, q + 2 * kv], qkv_bias, 2 * d));
        let turned = [q + kv, q + kv];
        if qk_norm {
            rows.push(pass("attention.qk_norm", RowCut::Heads, turned, 2 * head_dim, 2 * (q + kv)));
        }
        if self.positions == 0 {
            rows.push(pass("attention.rope", RowCut::Heads, turned, 0, 0));
        }
        rows.push(Row {
            name: "attention.core",
            op: RowOp::Attention {
                heads,
                kv_heads,
                qk: head_dim,
                v: head_dim,
                cache: 2 * kv,
                causal: true,
                scores_bytes: self.scores_bytes(fused),
                latent: None,
            },
            cut: RowCut::Heads,
            keep_bytes: 2 * (q + 2 * kv) + if fused { 4 * heads } else { 0 },
        });
        rows.push(product("attention.out", RowCut::Row, [q, d], out_bias, 2 * q));
    }

    fn latent(&self, fused: bool, rows: &mut Vec<Row>) {
        let Attention::Latent { heads, q_rank, kv_rank, nope, rope, v } = self.attention else { return };
        let d = self.width;
        let q = heads * (nope + rope);
        let ranks = q_rank.unwrap_or(0) + kv_rank;
        // Both ways down read the same input, so they are one product; its weights are small and every rank has them.
        rows.push(product("attention.down", RowCut::Whole, [d, ranks + rope], false, 2 * d));
        rows.push(pass("attention.latent_norm", RowCut::Whole, [ranks, ranks], ranks, 2 * ranks));
        match q_rank {
            Some(rank) => rows.push(product("attention.q_up", RowCut::Col, [rank, q], false, 2 * rank)),
            None => rows.push(product("attention.q", RowCut::Col, [d, q], false, 0)),
        }
        rows.push(product("attention.kv_up", RowCut::Col, [kv_rank, heads * (nope + v)], false, 2 * kv_rank));
        rows.push(pass("attention.rope", RowCut::Heads, [q + rope, q + heads * rope], 0, 0));
        rows.push(Row {
            name: "attention.core",
            op: RowOp::Attention {
                heads,
                kv_heads: heads,
                qk: nope + rope,
                v,
                cache: kv_rank + rope,
                causal: true,
                scores_bytes: self.scores_bytes(fused),
                latent: Some(Latent { qk: kv_rank + rope, v: kv_rank }),
            },
            cut: RowCut::Heads,
            keep_bytes: 2 * (2 * q + heads * v) + if fused { 4 * heads } else { 0 },
        });
        rows.push(product("attention.out", RowCut::Row, [heads * v, d], false, 2 * heads * v));
    }

    /// Up, activation and down; `input` is what keeping the input takes, if no earlier row has counted it.
    fn feed_forward(&self, names: [&'static str; 3], mlp: Mlp, input: u64, rows: &mut Vec<Row>) {
        let (d, n) = (self.width, mlp.inner);
        let up = if mlp.gated { 2 * n } else { n };
        rows.push(product(names[0], RowCut::Col, [d, up], mlp.bias, input));
        rows.push(pass(names[1], RowCut::Heads, [up, n], 0, 2 * up));
        rows.push(product(names[2], RowCut::Row, [n, d], mlp.bias, 2 * n));
    }

    fn routed(&self, rows: &mut Vec<Row>) {
        let Some(e) = &self.experts else { return };
        let (d, n, k) = (self.width, e.inner, e.top_k);
        rows.push(self.norm_row("moe.norm"));
        // The norm's output is kept once, here, for router, shared experts and dispatch.
        rows.push(product(names::ROUTER, RowCut::Whole, [d, e.count], e.router_bias, 2 * d));
        // Four bytes a number: scores decide who computes what.
        rows.push(pass(names::GATE, RowCut::Whole, [2 * e.count, 2 * e.count], 0, 4 * e.count));
        if e.shared > 0 {
            let shared = Mlp { inner: e.shared, gated: e.gated, bias: false };
            self.feed_forward(["shared.up", "shared.act", "shared.down"], shared, 0, rows);
        }
        rows.push(pass(names::PACK, RowCut::Whole, [d, k * d], 0, 0));
        let up = if e.gated { 2 * n } else { n };
        rows.push(Row {
            name: "experts.ffn",
            op: RowOp::Experts { experts: e.count, top_k: k, k: d, n, matrices: if e.gated { 3 } else { 2 } },
            cut: RowCut::Experts,
            keep_bytes: k * (2 * d + 2 * n),
        });
        // A token's weight per expert enters here, before the way down, so that what comes back is only added up.
        rows.push(pass("experts.act", RowCut::Experts, [k * up, k * n], 0, k * 2 * up));
        rows.push(pass(names::UNPACK, RowCut::Whole, [k * d, d], 0, 0));
        rows.push(self.add_row("moe.add"));
    }
}

fn product(name: &'static str, cut: RowCut, [k, n]: [u64; 2], bias: bool, keep_bytes: u64) -> Row {
    Row { name, op: RowOp::Matmul { k, n, bias }, cut, keep_bytes }
}

fn pass(name: &'static str, cut: RowCut, [reads, writes]: [u64; 2], weights: u64, keep_bytes: u64) -> Row {
    Row { name, op: RowOp::Pass { reads, writes, weights }, cut, keep_bytes }
}
