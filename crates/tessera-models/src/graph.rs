//! The logical programs of a causal video DiT: one per phase of a call.
//!
//! Each op has an attribute `at`: its block, or `first`, `last` or `all` for ops before, after or
//! outside the blocks, so that a mapping can split the blocks into stages. Tokens are ordered by
//! (frame, row, column), and the elements of a token by (row, column, channel) of the patch. The
//! residual stream is [tokens, dim].

use tessera_ir::{DType, Opcode, Program, Type, ValueId};

use crate::forward_pass::ForwardPass;
use crate::graph_builder::GraphBuilder;
use crate::umt5::encode_text_phases;
use crate::vae::{
    MediaPhases, decode_programs, encode_anchor_program, encode_video_programs, tiny_decode_programs,
};
use crate::video_model::{ContextRegime, VideoModel};
use crate::{PixelDecoder, PredictionTarget};

/// Builds every logical program that a stream may run, in a fixed order. The fill levels are the
/// numbers of latent frames already cached when a chunk begins: 0, one chunk, … up to a full window
/// minus one chunk. `media` states where a VAE's programs run.
///
/// # Panics
/// Never panics for a parsed [`VideoModel`], whose dimensions satisfy every rule used here.
#[must_use]
pub fn build_phases(m: &VideoModel, media: MediaPhases) -> Vec<Program> {
    let chunk = m.stream.chunk_frames;
    let fills: Vec<u64> = (0..m.stream.window_frames / chunk).map(|i| i * chunk).collect();
    let mut out = vec![text_phase(m), renoise_phase(m)];
    if m.stream.given_noise {
        out.push(noise_phase(m));
    }
    if m.stream.takes_video {
        out.push(video_phase(m));
    }
    match m.context_regime() {
        ContextRegime::Resident => {
            out.extend(fills.iter().map(|f| denoise_phase(m, *f)));
            out.extend(fills.iter().map(|f| refresh_phase(m, RefreshKind::Clean(*f))));
            out.push(rebase_phase(m));
            let recalled = if m.stream.recache { m.stream.ring_chunks() } else { 0 };
            out.extend((1..=recalled).map(|back| recall_phase(m, back)));
        }
        ContextRegime::Recompute => {
            out.push(refresh_phase(m, RefreshKind::Recompute));
            out.extend([denoise_phase(m, 0), denoise_phase(m, chunk)]);
        }
    }
    out.push(emit_phase(m));
    let needs_anchor = m.context_regime() == ContextRegime::Recompute;
    match m.stream.decoder {
        PixelDecoder::SpaceTimeDepth => {
            out.push(decode_phase(m));
            out.extend(needs_anchor.then(|| encode_phase(m)));
        }
        PixelDecoder::WanVae => out.extend(decode_programs(m, &m.stream.vae, media)),
        PixelDecoder::Tiny => out.extend(tiny_decode_programs(m, &m.stream.tiny, media)),
        PixelDecoder::None => {}
    }
    if m.stream.decoder.is_causal() {
        out.extend(needs_anchor.then(|| encode_anchor_program(m, &m.stream.vae, media)));
        if m.stream.takes_video {
            out.extend(encode_video_programs(m, &m.stream.vae));
        }
    }
    if let Some(encoder) = &m.text_encoder {
        out.extend(encode_text_phases(encoder, m.wan.text_len));
    }
    out
}

impl GraphBuilder<'_> {
    /// Emits x · wᵀ + b. `part` tells a strategy how it may shard the weight: by rows (`col`:
    /// output features), by columns (`row`: input features), or not at all (`whole`).
    fn emit_linear(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        part: &str,
        unit: u64,
        act: Option<&str>,
    ) -> ValueId {
        let k = self.builder.type_of(x).shape[1];
        let w = self.emit_weight(&format!("{name}.weight"), &[out, k], part, unit);
        let bias_part = if part == "col" { "col" } else { "whole" };
        let b = self.emit_weight(&format!("{name}.bias"), &[out], bias_part, unit);
        if let Some(act) = act {
            self.builder.set_attr("act", act);
        }
        self.builder.add_keyed("bias", b);
        self.emit_op(Opcode::Matmul, &[x, w])
    }

    fn emit_scalar(&mut self, name: &str, ty: Type) -> ValueId {
        self.builder.set_label(name).add_call_scalar(name, ty)
    }

    pub(crate) fn token_type(&self) -> Type {
        Type::new(DType::F32, [self.model.chunk_tokens(), self.model.wan.token_width()])
    }

    fn self_cache_type(&self) -> Type {
        Type::new(
            DType::F32,
            [self.model.stream.window_frames * self.model.frame_tokens(), self.model.wan.dim],
        )
    }

    fn cross_cache_type(&self) -> Type {
        Type::new(DType::F32, [self.model.wan.text_len, self.model.wan.dim])
    }

    fn head_dim(&mut self) -> u64 {
        self.model.wan.head_dim()
    }

    fn emit_rms_norm(&mut self, x: ValueId, name: &str) -> ValueId {
        let (d, hd, eps) = (self.model.wan.dim, self.head_dim(), self.model.wan.eps);
        let w = self.emit_weight(&format!("{name}.weight"), &[d], "col", hd);
        self.builder.set_attr("eps", eps);
        self.emit_op(Opcode::RmsNorm, &[x, w])
    }

    fn emit_norm_modulate(&mut self, x: ValueId, m: ValueId, shift: i64, scale: i64) -> ValueId {
        let (eps, rows) = (self.model.wan.eps, self.model.frame_tokens());
        self.builder
            .set_attr("shift", shift)
            .set_attr("scale", scale)
            .set_attr("eps", eps)
            .set_attr("frame_rows", rows);
        self.emit_op(Opcode::NormModulate, &[x, m])
    }

    fn emit_gate_residual(&mut self, x: ValueId, y: ValueId, m: ValueId, gate: i64) -> ValueId {
        let rows = self.model.frame_tokens();
        self.builder.set_attr("gate", gate).set_attr("frame_rows", rows);
        self.emit_op(Opcode::GateResidual, &[x, y, m])
    }

    fn emit_rope(&mut self, x: ValueId, start: ValueId) -> ValueId {
        let (hd, grid) =
            (self.head_dim(), self.model.stream.token_grid(&self.model.wan).map(|g| g as i64).to_vec());
        self.builder.set_attr("head_dim", hd).set_attr("grid", grid).add_keyed("start", start);
        self.emit_op(Opcode::Rope, &[x])
    }

    fn emit_attention(&mut self, q: ValueId, k: ValueId, v: ValueId) -> ValueId {
        let hd = self.head_dim();
        self.builder.set_attr("head_dim", hd);
        self.emit_op(Opcode::Attention, &[q, k, v])
    }

    /// Emits the per-frame time conditioning: (e [frames, dim], e0 [frames, 6·dim]).
    fn time_conditioning(&mut self) -> (ValueId, ValueId) {
        let (d, frames, width) =
            (self.model.wan.dim, self.model.stream.chunk_frames, self.model.wan.freq_dim);
        let t = self.emit_scalar("t", Type::new(DType::F32, [frames]));
        self.set_location("all");
        self.builder.set_attr("width", width);
        let s = self.emit_op(Opcode::TimeEmbed, &[t]);
        let h = self.emit_linear("time_embedding.0", s, d, "whole", 1, Some("silu"));
        let e = self.emit_linear("time_embedding.2", h, d, "whole", 1, None);
        let a = self.emit_op(Opcode::Silu, &[e]);
        let e0 = self.emit_linear("time_projection.1", a, 6 * d, "whole", 1, None);
        (e, e0)
    }

    /// Emits the modulations of all blocks under guidance, whose second pass reads them again. In its block
    /// each would take the slot of a larger value that has just ended, and keep it until then.
    fn emit_shared_modulations(&mut self, e0: ValueId) {
        if self.model.stream.guidance.is_none() {
            return;
        }
        for i in 0..self.model.wan.layers {
            self.set_location(&format!("block.{i}"));
            self.emit_modulation(&format!("blocks.{i}.modulation"), 6, e0);
        }
    }

    fn patch_embedding(&mut self, x: ValueId) -> ValueId {
        let (d, p) = (self.model.wan.dim, self.model.wan.token_width());
        self.set_location("first");
        self.builder.set_attr("load", "patch");
        let w = self.emit_weight("patch_embedding.weight", &[d, p], "whole", 1);
        let b = self.emit_weight("patch_embedding.bias", &[d], "whole", 1);
        self.builder.add_keyed("bias", b);
        self.emit_op(Opcode::Matmul, &[x, w])
    }

    /// Emits the writes of this chunk's keys and values of a block. Returns the modulated input and
    /// the per-frame modulation table.
    fn write_keys_values(
        &mut self,
        i: u64,
        x: ValueId,
        e0: ValueId,
        position: ChunkPosition,
        pass: ForwardPass,
    ) -> (ValueId, ValueId) {
        let (d, hd) = (self.model.wan.dim, self.head_dim());
        let n = format!("blocks.{i}");
        self.set_location(&format!("block.{i}"));
        let m = self.emit_modulation(&format!("{n}.modulation"), 6, e0);
        let a = self.emit_norm_modulate(x, m, 0, 1);
        let k = self.emit_linear(&format!("{n}.self_attn.k"), a, d, "col", hd, None);
        let k = self.emit_rms_norm(k, &format!("{n}.self_attn.norm_k"));
        let k = self.emit_rope(k, position.start);
        let v = self.emit_linear(&format!("{n}.self_attn.v"), a, d, "col", hd, None);
        let cache = self.self_cache_type();
        self.write_buffer(&pass.name_keys("kv", i), cache.clone(), k, Some(position.row));
        self.write_buffer(&pass.name_values("kv", i), cache, v, Some(position.row));
        (a, m)
    }

    /// Emits a whole block that attends to `frames` cached frames, including this chunk's.
    fn emit_block(
        &mut self,
        i: u64,
        x: ValueId,
        e0: ValueId,
        position: ChunkPosition,
        pass: ForwardPass,
    ) -> ValueId {
        let (d, hd, f, eps) =
            (self.model.wan.dim, self.head_dim(), self.model.wan.ffn_dim, self.model.wan.eps);
        let n = format!("blocks.{i}");
        // The query comes first, so that its sums of squares can share a collective with the keys'
        // sums.
        self.set_location(&format!("block.{i}"));
        let m = self.emit_modulation(&format!("{n}.modulation"), 6, e0);
        let a = self.emit_norm_modulate(x, m, 0, 1);
        let q = self.emit_linear(&format!("{n}.self_attn.q"), a, d, "col", hd, None);
        let k = self.emit_linear(&format!("{n}.self_attn.k"), a, d, "col", hd, None);
        let v = self.emit_linear(&format!("{n}.self_attn.v"), a, d, "col", hd, None);
        let q = self.emit_rms_norm(q, &format!("{n}.self_attn.norm_q"));
        let k = self.emit_rms_norm(k, &format!("{n}.self_attn.norm_k"));
        let q = self.emit_rope(q, position.start);
        let k = self.emit_rope(k, position.start);
        let cache = self.self_cache_type();
        self.write_buffer(&pass.name_keys("kv", i), cache.clone(), k, Some(position.row));
        self.write_buffer(&pass.name_values("kv", i), cache.clone(), v, Some(position.row));
        let rows = position.frames * self.model.frame_tokens();
        let ks = self.read_buffer(&pass.name_keys("kv", i), rows, cache.clone());
        let vs = self.read_buffer(&pass.name_values("kv", i), rows, cache);
        if let Some(bias) = position.bias {
            // The bias applies to past frames only: neither to the anchor nor to this chunk.
            let l = self.model.frame_tokens() as i64;
            let chunk = self.model.stream.chunk_frames as i64;
            self.builder.set_attr("bias_rows", vec![l, chunk * l]).add_keyed("bias", bias);
        }
        let o = self.emit_attention(q, ks, vs);
        let o = self.emit_linear(&format!("{n}.self_attn.o"), o, d, "row", hd, None);
        let x = self.emit_gate_residual(x, o, m, 2);

        let w = self.emit_weight(&format!("{n}.norm3.weight"), &[d], "whole", 1);
        let b = self.emit_weight(&format!("{n}.norm3.bias"), &[d], "whole", 1);
        self.builder.set_attr("eps", eps);
        let c = self.emit_op(Opcode::LayerNorm, &[x, w, b]);
        let q = self.emit_linear(&format!("{n}.cross_attn.q"), c, d, "col", hd, None);
        let q = self.emit_rms_norm(q, &format!("{n}.cross_attn.norm_q"));
        let cross = self.cross_cache_type();
        let len = self.model.wan.text_len;
        let k = self.read_buffer(&pass.name_keys("cross", i), len, cross.clone());
        let v = self.read_buffer(&pass.name_values("cross", i), len, cross);
        let o = self.emit_attention(q, k, v);
        let o = self.emit_linear(&format!("{n}.cross_attn.o"), o, d, "row", hd, None);
        let x = self.emit_op(Opcode::GateResidual, &[x, o]);

        let a = self.emit_norm_modulate(x, m, 3, 4);
        let h = self.emit_linear(&format!("{n}.ffn.0"), a, f, "col", 1, Some("gelu_tanh"));
        let y = self.emit_linear(&format!("{n}.ffn.2"), h, d, "row", 1, None);
        self.emit_gate_residual(x, y, m, 5)
    }

    /// Emits the writes of every block's keys and values of a prompt's rows.
    fn write_prompt(&mut self, rows: ValueId, pass: ForwardPass) {
        let (d, hd) = (self.model.wan.dim, self.model.wan.head_dim());
        let h = self.emit_linear("text_embedding.0", rows, d, "whole", 1, Some("gelu_tanh"));
        let c = self.emit_linear("text_embedding.2", h, d, "whole", 1, None);
        for i in 0..self.model.wan.layers {
            self.set_location(&format!("block.{i}"));
            let n = format!("blocks.{i}.cross_attn");
            let k = self.emit_linear(&format!("{n}.k"), c, d, "col", hd, None);
            let k = self.emit_rms_norm(k, &format!("{n}.norm_k"));
            let v = self.emit_linear(&format!("{n}.v"), c, d, "col", hd, None);
            let cross = self.cross_cache_type();
            self.write_buffer(&pass.name_keys("cross", i), cross.clone(), k, None);
            self.write_buffer(&pass.name_values("cross", i), cross, v, None);
        }
    }

    /// Emits all blocks and the output head.
    fn emit_forward(
        &mut self,
        x: ValueId,
        (e, e0): (ValueId, ValueId),
        position: ChunkPosition,
        pass: ForwardPass,
    ) -> ValueId {
        let mut h = x;
        for i in 0..self.model.wan.layers {
            h = self.emit_block(i, h, e0, position, pass);
        }
        self.output_head(h, e)
    }

    /// Emits the prediction of a denoising step: that of the prompt, moved away from that of the
    /// negative prompt under guidance. The last stage moves it, so that one tensor returns to the first.
    fn emit_prediction(&mut self, x: ValueId, time: (ValueId, ValueId), position: ChunkPosition) -> ValueId {
        let y = self.emit_forward(x, time, position, ForwardPass::Prompt);
        let Some(scale) = self.model.stream.guidance.as_ref().map(|g| g.scale) else { return y };
        let negative = self.emit_forward(x, time, position, ForwardPass::Negative);
        self.builder.set_attr("scale", scale);
        self.emit_op(Opcode::Guide, &[y, negative])
    }

    fn output_head(&mut self, x: ValueId, e: ValueId) -> ValueId {
        let p = self.model.wan.token_width();
        self.set_location("last");
        let m = self.emit_modulation("head.modulation", 2, e);
        let a = self.emit_norm_modulate(x, m, 0, 1);
        self.emit_linear("head.head", a, p, "whole", 1, None)
    }
}

/// The position of a chunk in the RoPE table and in the KV cache.
#[derive(Clone, Copy)]
struct ChunkPosition {
    /// RoPE position of the first frame.
    start: ValueId,
    /// First row of the KV cache that the chunk's keys and values occupy.
    row: ValueId,
    /// Number of attended frames, including this chunk's.
    frames: u64,
    /// Log of the weight of past frames, if the program takes it as a parameter.
    bias: Option<ValueId>,
}

/// Builds the keys and values of the prompt for every block's cross-attention. Under guidance the
/// input holds the rows of the negative prompt below those of the prompt: one tensor, whose digest the
/// ranks compare, and none that a call could lack.
fn text_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "text");
    let passes = ForwardPass::list_passes(m);
    g.set_location("all");
    let text =
        g.builder.set_label("text").add_input("text", Type::new(DType::F32, [m.text_rows(), m.wan.text_dim]));
    for (n, pass) in (0..).zip(passes) {
        g.set_location("all");
        let rows = match passes.len() {
            1 => text,
            _ => {
                g.builder.set_attr("row", n * m.wan.text_len).set_attr("rows", m.wan.text_len);
                g.emit_op(Opcode::TakeRows, &[text])
            }
        };
        g.write_prompt(rows, *pass);
    }
    g.finish()
}

/// Builds the next step's input: noise mixed into the last estimate.
fn renoise_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "renoise");
    let tokens = g.token_type();
    let sigma = g.emit_scalar("sigma", Type::scalar(DType::F32));
    let keys = ["seed", "chunk", "draw"].map(|k| (k, g.emit_scalar(k, Type::scalar(DType::I64))));
    let x0 = g.read_buffer("latent", tokens.shape[0], tokens.clone());
    g.builder.add_keyed("sigma", sigma);
    for (k, v) in keys {
        g.builder.add_keyed(k, v);
    }
    let x = g.emit_op(Opcode::Renoise, &[x0]);
    g.write_buffer("x", tokens, x, None);
    g.finish()
}

/// Takes the noise of a chunk's first denoising step from the call. That step has σ = 1, so its latents
/// are the noise alone.
fn noise_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "noise");
    let tokens = g.token_type();
    g.builder.set_attr("at", "first").set_attr("part", "tokens");
    let x = g.builder.set_label("noise").add_input("noise", tokens.clone());
    g.write_buffer("x", tokens, x, None);
    g.finish()
}

/// Takes the latents of an input video from the call, to which `renoise` adds the noise of the first step
/// that runs.
fn video_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "video");
    let tokens = g.token_type();
    g.builder.set_attr("at", "first").set_attr("part", "tokens");
    let x = g.builder.set_label("video").add_input("video", tokens.clone());
    g.write_buffer("latent", tokens, x, None);
    g.finish()
}

/// Builds one denoising step with `fill` frames of context in the cache.
fn denoise_phase(m: &VideoModel, fill: u64) -> Program {
    let mut g = GraphBuilder::new(m, &format!("denoise.fill{fill}"));
    let tokens = g.token_type();
    let sigma = (m.stream.prediction == PredictionTarget::Flow)
        .then(|| g.emit_scalar("sigma", Type::scalar(DType::F32)));
    let start = g.emit_scalar("start", Type::scalar(DType::I64));
    let row = g.emit_scalar("row", Type::scalar(DType::I64));
    let biased = m.context_regime() == ContextRegime::Recompute && fill > 0;
    let bias = biased.then(|| g.emit_scalar("bias", Type::scalar(DType::F32)));
    let at = ChunkPosition { start, row, frames: fill + m.stream.chunk_frames, bias };
    let time = g.time_conditioning();
    g.emit_shared_modulations(time.1);
    g.set_location("first");
    let x = g.read_buffer("x", tokens.shape[0], tokens.clone());
    let h = g.patch_embedding(x);
    let y = g.emit_prediction(h, time, at);
    g.set_location("first");
    let x0 = match sigma {
        Some(sigma) => {
            g.builder.add_keyed("sigma", sigma);
            g.emit_op(Opcode::ToX0, &[x, y])
        }
        None => y,
    };
    g.write_buffer("latent", tokens, x0, None);
    g.finish()
}

enum RefreshKind {
    /// After denoising: this chunk's final latents at t = 0, with `fill` frames of context.
    Clean(u64),
    /// Before denoising: three context latents at t = 0 into an empty cache.
    Recompute,
}

/// Builds a forward that only fills the KV cache: it ends with the last block's keys and values.
fn refresh_phase(m: &VideoModel, kind: RefreshKind) -> Program {
    let (name, fill) = match kind {
        RefreshKind::Clean(fill) => (format!("clean.fill{fill}"), fill),
        RefreshKind::Recompute => ("recompute".to_string(), 0),
    };
    let mut g = GraphBuilder::new(m, &name);
    let tokens = g.token_type();
    let start = g.emit_scalar("start", Type::scalar(DType::I64));
    let row = g.emit_scalar("row", Type::scalar(DType::I64));
    let at = ChunkPosition { start, row, frames: fill + m.stream.chunk_frames, bias: None };
    let (_, e0) = g.time_conditioning();
    g.emit_shared_modulations(e0);
    g.set_location("first");
    let x = match kind {
        RefreshKind::Clean(_) => g.read_buffer("latent", tokens.shape[0], tokens),
        RefreshKind::Recompute => {
            g.builder.set_attr("at", "first").set_attr("part", "tokens");
            g.builder.set_label("context").add_input("context", tokens)
        }
    };
    let x = g.patch_embedding(x);
    for pass in ForwardPass::list_passes(m) {
        let mut h = x;
        for i in 0..m.wan.layers - 1 {
            h = g.emit_block(i, h, e0, at, *pass);
        }
        g.write_keys_values(m.wan.layers - 1, h, e0, at, *pass);
    }
    g.finish()
}

/// Rotates every cached key that slides back by a number of frames, so that positions stay within the
/// RoPE table. The keys of the sink keep the positions of the first frames.
fn rebase_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "rebase");
    let shift = g.emit_scalar("shift", Type::scalar(DType::I64));
    let hd = m.wan.head_dim();
    let grid = m.stream.token_grid(&m.wan).map(|x| x as i64).to_vec();
    let sink = m.stream.sink_frames * m.frame_tokens();
    for (pass, i) in ForwardPass::list_passes(m).iter().flat_map(|p| (0..m.wan.layers).map(move |i| (p, i))) {
        g.set_location(&format!("block.{i}"));
        let (cache, keys) = (g.self_cache_type(), pass.name_keys("kv", i));
        if sink > 0 {
            g.builder.set_attr("row", sink);
        }
        let k = g.read_buffer(&keys, cache.shape[0] - sink, cache.clone());
        g.builder
            .set_attr("head_dim", hd)
            .set_attr("grid", grid.clone())
            .set_attr("frame_stride", 0i64)
            .add_keyed("start", shift);
        let k = g.emit_op(Opcode::Rope, &[k]);
        if sink > 0 {
            g.builder.set_attr("first_row", sink);
        }
        g.write_buffer(&keys, cache, k, None);
    }
    g.finish()
}

/// Returns the buffer with the latents of a recent chunk: number 0 is the oldest that the ring holds.
fn recent_buffer(i: u64) -> String {
    format!("recent{i}")
}

/// Takes the latents of the chunk that lies `back` chunks back, so that a clean forward can write its keys
/// and values again.
fn recall_phase(m: &VideoModel, back: u64) -> Program {
    let mut g = GraphBuilder::new(m, &format!("recall.back{back}"));
    let tokens = g.token_type();
    let buffer = recent_buffer(m.stream.ring_chunks() - back);
    let x = g.read_buffer(&buffer, tokens.shape[0], tokens.clone());
    g.write_buffer("latent", tokens, x, None);
    g.finish()
}

/// Outputs the chunk's latents to the host. For a recache they also become the newest of the recent
/// latents, of which the oldest is dropped.
fn emit_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "emit");
    let tokens = g.token_type();
    let kept = if m.stream.recache { m.stream.ring_chunks() } else { 0 };
    for i in 1..kept {
        let newer = g.read_buffer(&recent_buffer(i), tokens.shape[0], tokens.clone());
        g.write_buffer(&recent_buffer(i - 1), tokens.clone(), newer, None);
    }
    let x = g.read_buffer("latent", tokens.shape[0], tokens.clone());
    if kept > 0 {
        g.write_buffer(&recent_buffer(kept - 1), tokens, x, None);
    }
    g.builder.set_attr("at", "first");
    g.builder.add_output("latents", x);
    g.finish()
}

/// Decodes one latent frame to pixels, on the leader, which runs it for each latent frame of a
/// chunk in order. The next chunk's anchor waits only for the first frame.
fn decode_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "decode");
    g.set_location("leader");
    let frame = Type::new(DType::F32, [m.frame_tokens(), m.wan.token_width()]);
    let x = g.builder.set_label("latents").add_input("latents", frame);
    let [_, h, w] = m.stream.token_grid(&m.wan).map(|x| x as i64);
    g.builder.set_attr("grid", vec![1, h, w]);
    let pixels = video_op(&mut g, Opcode::DepthToSpaceTime, x);
    g.builder.set_attr("at", "leader");
    g.builder.add_output("pixels", pixels);
    g.finish()
}

/// Encodes one latent frame of pixels to latents, on the leader: the anchor repeats its one frame.
fn encode_phase(m: &VideoModel) -> Program {
    let mut g = GraphBuilder::new(m, "encode");
    let s = &m.stream;
    g.set_location("leader");
    let x = g
        .builder
        .set_label("pixels")
        .add_input("pixels", Type::new(DType::F32, [s.stride[0], s.height, s.width, 3]));
    let tokens = video_op(&mut g, Opcode::SpaceTimeToDepth, x);
    g.builder.set_attr("at", "leader");
    g.builder.add_output("latents", tokens);
    g.finish()
}

fn video_op(g: &mut GraphBuilder, opcode: Opcode, x: ValueId) -> ValueId {
    let stride = g.model.stream.stride.map(|x| x as i64).to_vec();
    let patch = g.model.wan.patch.map(|x| x as i64).to_vec();
    g.builder.set_attr("stride", stride).set_attr("patch", patch);
    g.emit_op(opcode, &[x])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::list_calls;
    use crate::expected_weights;
    use std::collections::BTreeSet;

    fn tiny(extra: &str) -> VideoModel {
        let config = r#"{"dim":60,"ffn_dim":104,"num_heads":5,"num_layers":2,"in_dim":4,"out_dim":4,"text_len":7,
            "text_dim":20,"freq_dim":32}"#;
        let stream = format!("[video]\nwidth = 80\nheight = 48\n{extra}");
        VideoModel::parse(("config.json", config), ("stream.toml", &stream)).unwrap()
    }

    #[test]
    fn every_weight_is_used_and_known() {
        for extra in ["", "[cache]\nmode = \"recompute\"\n"] {
            let m = tiny(extra);
            let mut used = BTreeSet::new();
            for p in build_phases(&m, MediaPhases::BesideCalls) {
                for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
                    used.insert(op.name.clone().unwrap());
                }
            }
            let known: BTreeSet<String> = expected_weights(&m.wan).into_iter().map(|w| w.name).collect();
            assert_eq!(used, known);
        }
    }

    #[test]
    fn given_noise_is_a_program_and_calls_of_its_own() {
        for regime in ["", "[cache]\nmode = \"recompute\"\n"] {
            let (drawn, given) = (tiny(regime), tiny(&format!("{regime}[noise]\nsource = \"call\"\n")));
            assert!(drawn.stream.to_toml().find("noise").is_none());
            let printed = crate::StreamConfig::parse("", &given.stream.to_toml(), &given.wan).unwrap();
            assert!(printed.given_noise, "the setting is part of the plan");
            let names = |m: &VideoModel| {
                build_phases(m, MediaPhases::BesideCalls).into_iter().map(|p| p.name).collect::<BTreeSet<_>>()
            };
            let more: Vec<String> = names(&given).difference(&names(&drawn)).cloned().collect();
            assert_eq!(more, ["noise"]);
            let calls =
                |m: &VideoModel| list_calls(m, MediaPhases::BesideCalls).into_iter().collect::<Vec<_>>();
            let drawn_calls: BTreeSet<String> = calls(&drawn).into_iter().map(|(name, _)| name).collect();
            for (name, phases) in calls(&given) {
                assert!(!drawn_calls.contains(&name), "{name} names two calls");
                let count = |phase: &str| phases.iter().filter(|p| *p == phase).count();
                assert_eq!((count("noise"), count("renoise")), (1, given.stream.steps.len() - 1));
            }
        }
    }

    #[test]
    fn a_video_begins_at_every_step_but_the_first() {
        let vae = "[decoder]\nkind = \"wan_vae\"\n[decoder.vae]\nz_dim = 4\nlatents_mean = [0.0, 0.0, 0.0, 0.0]\n\
                   latents_std = [1.0, 1.0, 1.0, 1.0]\n";
        for regime in ["", "[cache]\nmode = \"recompute\"\n"] {
            let (plain, video) =
                (tiny(&format!("{regime}{vae}")), tiny(&format!("{regime}[input]\nvideo = true\n{vae}")));
            assert!(plain.stream.to_toml().find("input").is_none());
            let printed = crate::StreamConfig::parse("", &video.stream.to_toml(), &video.wan).unwrap();
            assert!(printed.takes_video, "the setting is part of the plan");
            let beside = MediaPhases::BesideCalls;
            let names =
                |m: &VideoModel| build_phases(m, beside).into_iter().map(|p| p.name).collect::<BTreeSet<_>>();
            let more: Vec<String> = names(&video).difference(&names(&plain)).cloned().collect();
            let encoder = ["encode.open", "encode.open.device", "encode.rest", "encode.rest.device"];
            assert_eq!(more, [&encoder[..], &["video"]].concat());
            let (without, with) = (list_calls(&plain, beside), list_calls(&video, beside));
            let steps = video.stream.steps.len();
            assert_eq!(with.len(), without.len() * steps);
            for (name, phases) in &with {
                let count = |phase: &str| phases.iter().filter(|p| *p == phase).count();
                let step = name.split_once(".video").map(|(_, s)| s[..1].parse::<usize>().unwrap());
                assert_eq!(count("renoise"), steps - step.unwrap_or(0), "{name}");
                assert_eq!(count("video"), usize::from(step.is_some()), "{name}");
            }
            let calls: BTreeSet<&String> = with.iter().map(|(name, _)| name).collect();
            assert!(calls.len() == with.len() && without.iter().all(|(name, _)| calls.contains(name)));
        }
    }

    #[test]
    fn a_recache_is_programs_and_calls_of_its_own() {
        let window = "[cache]\nwindow_frames = 12\nsink = 3\n";
        let (kept, recached) = (tiny(window), tiny(&format!("{window}recache = true\n")));
        let names = |m: &VideoModel| {
            build_phases(m, MediaPhases::BesideCalls).into_iter().map(|p| p.name).collect::<BTreeSet<_>>()
        };
        let more: Vec<String> = names(&recached).difference(&names(&kept)).cloned().collect();
        assert_eq!(more, ["recall.back1", "recall.back2", "recall.back3"]);
        let calls = |m: &VideoModel| list_calls(m, MediaPhases::BesideCalls);
        let with_text: Vec<String> =
            calls(&recached).into_iter().map(|(name, _)| name).filter(|n| n.contains("text")).collect();
        assert_eq!(
            with_text,
            [
                "chunk.fill0.text",
                "chunk.fill3.text",
                "chunk.fill6.text.recache1",
                "chunk.fill9.text.recache2",
                "chunk.fill9.text.recache3",
                "chunk.fill9.text.recache3.rebase"
            ]
        );
        let find = |name: &str| calls(&recached).into_iter().find(|(n, _)| n == name).unwrap().1;
        assert_eq!(
            find("chunk.fill9.text.recache3.rebase")[..8],
            [
                "text",
                "recall.back3",
                "clean.fill3",
                "recall.back2",
                "clean.fill6",
                "recall.back1",
                "clean.fill9",
                "rebase"
            ]
        );
        let without_text =
            |m: &VideoModel| calls(m).into_iter().filter(|(n, _)| !n.contains("text")).collect::<Vec<_>>();
        assert_eq!(without_text(&recached), without_text(&kept));
    }

    /// Counts the ops of a kind in a program.
    fn count_ops(p: &Program, opcode: Opcode) -> usize {
        p.ops.iter().filter(|o| o.opcode == opcode).count()
    }

    #[test]
    fn guidance_runs_the_blocks_twice_with_caches_of_their_own() {
        for regime in
            ["", "[cache]\nmode = \"recompute\"\n", "[cache]\nwindow_frames = 12\nsink = 3\nrecache = true\n"]
        {
            let (plain, guided) = (tiny(regime), tiny(&format!("{regime}[guidance]\nscale = 3\n")));
            assert_eq!(
                list_calls(&plain, MediaPhases::BesideCalls),
                list_calls(&guided, MediaPhases::BesideCalls)
            );
            let phases = |m| build_phases(m, MediaPhases::BesideCalls);
            for (one, two) in phases(&plain).iter().zip(&phases(&guided)) {
                let name = &one.name;
                assert_eq!(name, &two.name);
                let doubled = ["text", "denoise", "clean", "recompute", "rebase"];
                let factor = if doubled.contains(&name.split('.').next().unwrap()) { 2 } else { 1 };
                for opcode in [Opcode::Attention, Opcode::CacheWrite, Opcode::Rope] {
                    let latents =
                        if opcode == Opcode::CacheWrite && name.starts_with("denoise") { 1 } else { 0 };
                    let own = count_ops(one, opcode) - latents;
                    assert_eq!(count_ops(two, opcode) - latents, factor * own, "{name}, {}", opcode.name());
                }
                for opcode in [Opcode::Weight, Opcode::Modulation, Opcode::TimeEmbed] {
                    assert_eq!(count_ops(two, opcode), count_ops(one, opcode), "{name}, {}", opcode.name());
                }
                assert_eq!(count_ops(two, Opcode::Guide), usize::from(name.starts_with("denoise")), "{name}");
                let buffers = |p: &Program| p.buffers.iter().map(|b| b.name.clone()).collect::<BTreeSet<_>>();
                let negative = buffers(two).difference(&buffers(one)).cloned().collect::<Vec<_>>();
                let caches = |p: &Program| buffers(p).iter().filter(|b| b.contains('.')).count();
                assert_eq!(negative.len(), (factor - 1) * caches(one), "{name}: {negative:?}");
                assert!(negative.iter().all(|b| b.contains(".negative.")), "{negative:?}");
            }
        }
    }

    #[test]
    fn each_regime_has_its_phases() {
        let names = |e: &str| {
            build_phases(&tiny(e), MediaPhases::BesideCalls).into_iter().map(|p| p.name).collect::<Vec<_>>()
        };
        assert_eq!(
            names(""),
            [
                "text",
                "renoise",
                "denoise.fill0",
                "denoise.fill3",
                "clean.fill0",
                "clean.fill3",
                "rebase",
                "emit"
            ]
        );
        assert_eq!(
            names("[cache]\nmode = \"recompute\"\n"),
            ["text", "renoise", "recompute", "denoise.fill0", "denoise.fill3", "emit"]
        );
    }
}
