//! Attention over the KV caches: keys and values per head, or one latent that all heads read.

use tessera_ir::{Attr, DType, Opcode, Type, ValueId};

use super::{DecoderBuilder, TokenPlaces};

/// Epsilon of the norms of latents, which no config states.
const LATENT_NORM_EPS: f64 = 1e-6;

/// The extents of latent attention.
pub(super) struct LatentExtents {
    pub(super) q_rank: Option<u64>,
    pub(super) kv_rank: u64,
    pub(super) nope: u64,
    pub(super) rope: u64,
    pub(super) v: u64,
}

impl DecoderBuilder<'_> {
    /// Emits attention with one KV head for each group of query heads.
    pub(super) fn emit_grouped_attention(
        &mut self,
        i: u64,
        a: ValueId,
        at: TokenPlaces,
        (qkv_bias, out_bias, qk_norm): (bool, bool, bool),
    ) -> ValueId {
        let m = self.model;
        let (hd, group) = (m.head_dim, m.heads / m.kv_heads);
        let n = format!("model.layers.{i}.self_attn");
        // A rank holds whole KV heads and the query heads that read them, or all KV heads and some query heads.
        let (q_part, kv_part, cache) = match self.cache.replicates_heads {
            true => (("col", hd), ("whole", 1), "kv_all"),
            false => (("col", group * hd), ("col", hd), "kv"),
        };
        let mut q = self.emit_linear(&format!("{n}.q_proj"), a, m.heads * hd, q_part, qkv_bias, None);
        let mut k = self.emit_linear(&format!("{n}.k_proj"), a, m.kv_heads * hd, kv_part, qkv_bias, None);
        let v = self.emit_linear(&format!("{n}.v_proj"), a, m.kv_heads * hd, kv_part, qkv_bias, None);
        if qk_norm {
            q = self.emit_head_norm(&format!("{n}.q_norm"), q);
            k = self.emit_head_norm(&format!("{n}.k_norm"), k);
        }
        let q = self.emit_rotary(q, hd, at);
        let k = self.emit_rotary(k, hd, at);
        let keys = self.cache_rows(&format!("{cache}.k.{i}"), k, at);
        let values = self.cache_rows(&format!("{cache}.v.{i}"), v, at);
        self.set_page_attrs(at);
        self.builder.set_attr("head_dim", hd);
        if let Some(window) = m.window {
            self.builder.set_attr("window", window);
        }
        let o = self.emit_op(Opcode::PagedAttention, &[q, keys, values]);
        self.emit_linear(&format!("{n}.o_proj"), o, m.extents.width, ("row", q_part.1), out_bias, None)
    }

    /// Emits latent attention in its absorbed form. The matrix that expands a latent to the keys of a head is
    /// applied to the query instead, and that of the values to the result, so attention reads the latents
    /// themselves: one row of `kv_rank + rope` columns per token, in place of a key and a value per head. Every
    /// rank of tp holds all latents and some of the heads.
    pub(super) fn emit_latent_attention(
        &mut self,
        i: u64,
        a: ValueId,
        at: TokenPlaces,
        e: &LatentExtents,
    ) -> ValueId {
        let (m, n) = (self.model, format!("model.layers.{i}.self_attn"));
        let (q_head, expanded) = (e.nope + e.rope, e.nope + e.v);
        let (from, name) = match e.q_rank {
            Some(rank) => {
                let c = self.emit_linear(&format!("{n}.q_a_proj"), a, rank, ("whole", 1), false, None);
                (self.emit_norm(&format!("{n}.q_a_layernorm"), c, LATENT_NORM_EPS), "q_b_proj")
            }
            None => (a, "q_proj"),
        };
        let q =
            self.emit_linear(&format!("{n}.{name}"), from, m.heads * q_head, ("col", q_head), false, None);
        let plain = self.emit_head_columns(q, q_head, 0, e.nope);
        let turned = self.emit_head_columns(q, q_head, e.nope, e.rope);
        let turned = self.emit_rotary(turned, e.rope, at);
        let expansion = format!("{n}.kv_b_proj.weight");
        let expansion = self.emit_weight(&expansion, &[m.heads * expanded, e.kv_rank], "col", expanded);
        self.builder.set_attr("transposed", Attr::Bool(true));
        let absorbed = self.emit_head_matmul(plain, expansion, expanded, (0, e.nope));
        let q = self.emit_head_join(absorbed, turned, e.kv_rank);

        let latent_row = e.kv_rank + e.rope;
        let name = format!("{n}.kv_a_proj_with_mqa");
        let row = self.emit_linear(&name, a, latent_row, ("whole", 1), false, None);
        let latent = self.emit_head_columns(row, latent_row, 0, e.kv_rank);
        let latent = self.emit_norm(&format!("{n}.kv_a_layernorm"), latent, LATENT_NORM_EPS);
        let turned = self.emit_head_columns(row, latent_row, e.kv_rank, e.rope);
        let turned = self.emit_rotary(turned, e.rope, at);
        let row = self.emit_head_join(latent, turned, e.kv_rank);
        let rows = self.cache_rows(&format!("latent.{i}"), row, at);

        self.set_page_attrs(at);
        let scale = m.rotary.latent_score_factor / (q_head as f64).sqrt();
        self.builder
            .set_attr("head_dim", latent_row)
            .set_attr("value_dim", e.kv_rank)
            .set_attr("scale", scale);
        let o = self.emit_op(Opcode::PagedAttention, &[q, rows, rows]);
        let o = self.emit_head_matmul(o, expansion, expanded, (e.nope, e.v));
        self.emit_linear(&format!("{n}.o_proj"), o, m.extents.width, ("row", e.v), false, None)
    }

    /// Writes rows to their pages of a cache, and returns the view of the whole cache.
    fn cache_rows(&mut self, name: &str, rows: ValueId, at: TokenPlaces) -> ValueId {
        let width = self.builder.type_of(rows).shape[1];
        let ty = Type::new(DType::F32, [self.cache.pages * self.cache.page_rows, width]);
        let buffer = self.builder.declare_buffer(name, ty);
        self.set_page_attrs(at);
        self.builder.set_attr("at", self.location.as_str());
        self.builder.write_buffer(buffer, rows);
        self.builder.set_attr("at", self.location.as_str());
        self.builder.read_buffer(buffer)
    }

    fn set_page_attrs(&mut self, at: TokenPlaces) {
        self.builder.set_attr("page_rows", self.cache.page_rows);
        self.builder.add_keyed("pages", at.pages);
        self.builder.add_keyed("start", at.start);
    }

    fn emit_rotary(&mut self, x: ValueId, head_dim: u64, at: TokenPlaces) -> ValueId {
        let rotary = &self.model.rotary;
        self.builder.set_attr("head_dim", head_dim).add_keyed("start", at.start);
        if rotary.interleaved {
            self.builder.set_attr("interleaved", Attr::Bool(true));
        }
        if rotary.scaling.factor_of_rotated() != 1.0 {
            self.builder.set_attr("scale", rotary.scaling.factor_of_rotated());
        }
        self.emit_op(Opcode::Rotary, &[x, at.frequencies])
    }

    fn emit_head_norm(&mut self, name: &str, x: ValueId) -> ValueId {
        let (eps, hd) = (self.model.norm_eps, self.model.head_dim);
        let w = self.emit_weight(&format!("{name}.weight"), &[hd], "whole", 1);
        self.builder.set_attr("eps", eps).set_attr("head_dim", hd);
        self.emit_op(Opcode::HeadNorm, &[x, w])
    }

    fn emit_head_columns(&mut self, x: ValueId, head_dim: u64, first: u64, columns: u64) -> ValueId {
        self.builder.set_attr("columns", columns).set_attr("first", first).set_attr("head_dim", head_dim);
        self.emit_op(Opcode::HeadColumns, &[x])
    }

    fn emit_head_join(&mut self, x: ValueId, y: ValueId, head_dim: u64) -> ValueId {
        self.builder.set_attr("head_dim", head_dim);
        self.emit_op(Opcode::HeadJoin, &[x, y])
    }

    /// Multiplies each head with rows of its part of `w`, of which it has `of`.
    fn emit_head_matmul(&mut self, x: ValueId, w: ValueId, of: u64, (first, rows): (u64, u64)) -> ValueId {
        self.builder.set_attr("head_rows", of).set_attr("first", first).set_attr("rows", rows);
        self.emit_op(Opcode::HeadMatmul, &[x, w])
    }
}
