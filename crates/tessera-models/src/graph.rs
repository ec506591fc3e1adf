//! The logical programs of a causal video generator: one per phase of a call.
//!
//! Each op carries `at`: the block it belongs to, or `first`, `last` or `all` for what stands before, after or
//! beside the blocks, so that a mapping can cut the blocks into stages. Token order is (frame, row, column);
//! inside a token (row, column, channel) of the patch. The residual stream is [tokens, dim].

use tessera_base::Diagnostics;
use tessera_ir::{Builder, DType, Opcode, Program, Type, ValueId};

use crate::{Decoder, Prediction, StreamConfig, WanConfig};

/// How context lives across chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Regime {
    /// Keys and values stay; a clean pass after denoising rewrites the chunk's rows.
    Resident,
    /// Keys and values are recomputed from three context latents before each chunk.
    Recompute,
}

/// A model and how it is streamed.
#[derive(Debug, Clone, PartialEq)]
pub struct VideoModel {
    /// Generator.
    pub wan: WanConfig,
    /// Stream.
    pub stream: StreamConfig,
}

impl VideoModel {
    /// Reads both config texts; the file names are only for diagnostics.
    ///
    /// # Errors
    /// Everything that is wrong with either.
    pub fn parse(config: (&str, &str), stream: (&str, &str)) -> Result<VideoModel, Diagnostics> {
        let wan = WanConfig::parse(config.0, config.1)?;
        let stream = StreamConfig::parse(stream.0, stream.1, &wan)?;
        Ok(VideoModel { wan, stream })
    }

    /// Regime of the cache.
    #[must_use]
    pub fn regime(&self) -> Regime {
        if self.stream.recompute { Regime::Recompute } else { Regime::Resident }
    }

    /// Tokens of one latent frame.
    #[must_use]
    pub fn frame_tokens(&self) -> u64 {
        let [_, h, w] = self.stream.grid(&self.wan);
        h * w
    }

    /// Tokens of one chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> u64 {
        self.stream.chunk_frames * self.frame_tokens()
    }
}

/// Every logical program that a stream may run, in a fixed order. Fill levels are the latent frames already in
/// the cache when a chunk begins: 0, one chunk, … up to a full window less one chunk.
///
/// # Panics
/// Never for a [`VideoModel`] that was parsed: its dimensions satisfy every rule used here.
#[must_use]
pub fn phases(m: &VideoModel) -> Vec<Program> {
    let chunk = m.stream.chunk_frames;
    let fills: Vec<u64> = (0..m.stream.window_frames / chunk).map(|i| i * chunk).collect();
    let mut out = vec![text(m), renoise(m)];
    match m.regime() {
        Regime::Resident => {
            out.extend(fills.iter().map(|f| denoise(m, *f)));
            out.extend(fills.iter().map(|f| refresh(m, Refresh::Clean(*f))));
            out.push(rebase(m));
        }
        Regime::Recompute => {
            out.push(refresh(m, Refresh::Recompute));
            out.extend([denoise(m, 0), denoise(m, chunk)]);
        }
    }
    out.push(emit(m));
    if m.stream.decoder == Decoder::SpaceTimeDepth {
        out.push(decode(m));
        if m.regime() == Regime::Recompute {
            out.push(encode(m));
        }
    }
    out
}

/// Every call that a stream may make: its name and its phases in order. A request that is not among them is
/// refused at admission.
#[must_use]
pub fn calls(m: &VideoModel) -> Vec<(String, Vec<String>)> {
    let chunk = m.stream.chunk_frames;
    let last = m.stream.window_frames - chunk;
    let mut out = Vec::new();
    for fill in (0..=last).step_by(chunk as usize) {
        for text in [true, false] {
            for rebase in [false, true] {
                let resident = m.regime() == Regime::Resident;
                // A scene begins with its prompt, and only a full resident window can run past the table.
                if (fill == 0 && !text) || (rebase && !(resident && fill == last && fill > 0)) {
                    continue;
                }
                let mut phases: Vec<String> = Vec::new();
                if text {
                    phases.push("text".into());
                }
                if rebase {
                    phases.push("rebase".into());
                }
                if !resident && fill > 0 {
                    phases.push("recompute".into());
                }
                for _ in 0..m.stream.steps.len() {
                    phases.extend(["renoise".into(), format!("denoise.fill{fill}")]);
                }
                if resident {
                    phases.push(format!("clean.fill{fill}"));
                }
                phases.push("emit".into());
                let name = format!(
                    "chunk.fill{fill}{}{}",
                    if text { ".text" } else { "" },
                    if rebase { ".rebase" } else { "" }
                );
                out.push((name, phases));
            }
        }
    }
    out
}

/// A program under construction, with the model at hand.
struct Graph<'a> {
    b: Builder,
    m: &'a VideoModel,
    at: String,
}

impl<'a> Graph<'a> {
    fn new(m: &'a VideoModel, name: &str) -> Graph<'a> {
        Graph { b: Builder::logical(name), m, at: "first".into() }
    }

    fn finish(self) -> Program {
        match self.b.finish() {
            Ok(p) => p,
            Err(e) => panic!("a parsed model breaks a rule of the op table: {}", e[0].message),
        }
    }

    fn at(&mut self, place: &str) {
        self.at = place.to_string();
    }

    fn op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        let at = self.at.clone();
        self.b.attr("at", at.as_str());
        self.b.op(opcode, operands)
    }

    fn weight(&mut self, name: &str, shape: &[u64], part: &str, unit: u64) -> ValueId {
        let at = self.at.clone();
        self.b.attr("at", at.as_str()).attr("part", part);
        if unit > 1 {
            self.b.attr("unit", unit);
        }
        self.b.label(name).weight(name, Type::new(DType::F32, shape))
    }

    /// x · wᵀ + b. `part` says how a strategy may cut the weight: by its rows (`col`: output features), by
    /// its columns (`row`: input features), or not at all.
    fn linear(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        part: &str,
        unit: u64,
        act: Option<&str>,
    ) -> ValueId {
        let k = self.b.ty(x).shape[1];
        let w = self.weight(&format!("{name}.weight"), &[out, k], part, unit);
        let bias_part = if part == "col" { "col" } else { "whole" };
        let b = self.weight(&format!("{name}.bias"), &[out], bias_part, unit);
        if let Some(act) = act {
            self.b.attr("act", act);
        }
        self.b.key("bias", b);
        self.op(Opcode::Matmul, &[x, w])
    }

    fn call(&mut self, name: &str, ty: Type) -> ValueId {
        self.b.label(name).call(name, ty)
    }

    fn read(&mut self, buffer: &str, rows: u64, ty: Type) -> ValueId {
        let at = self.at.clone();
        let whole = ty.shape[0];
        let buffer = self.b.buffer(buffer, ty);
        self.b.attr("at", at.as_str());
        if rows != whole {
            self.b.attr("rows", rows);
        }
        self.b.read(buffer)
    }

    fn write(&mut self, buffer: &str, ty: Type, value: ValueId, row: Option<ValueId>) {
        let at = self.at.clone();
        let buffer = self.b.buffer(buffer, ty);
        self.b.attr("at", at.as_str());
        if let Some(row) = row {
            self.b.key("row", row);
        }
        self.b.write(buffer, value);
    }

    fn tokens(&self) -> Type {
        Type::new(DType::F32, [self.m.chunk_tokens(), self.m.wan.token_width()])
    }

    fn self_cache(&self) -> Type {
        Type::new(DType::F32, [self.m.stream.window_frames * self.m.frame_tokens(), self.m.wan.dim])
    }

    fn cross_cache(&self) -> Type {
        Type::new(DType::F32, [self.m.wan.text_len, self.m.wan.dim])
    }

    fn heads(&mut self) -> u64 {
        self.m.wan.head_dim()
    }

    fn rms(&mut self, x: ValueId, name: &str) -> ValueId {
        let (d, hd, eps) = (self.m.wan.dim, self.heads(), self.m.wan.eps);
        let w = self.weight(&format!("{name}.weight"), &[d], "col", hd);
        self.b.attr("eps", eps);
        self.op(Opcode::RmsNorm, &[x, w])
    }

    fn norm_modulate(&mut self, x: ValueId, m: ValueId, shift: i64, scale: i64) -> ValueId {
        let (eps, rows) = (self.m.wan.eps, self.m.frame_tokens());
        self.b.attr("shift", shift).attr("scale", scale).attr("eps", eps).attr("frame_rows", rows);
        self.op(Opcode::NormModulate, &[x, m])
    }

    fn gate(&mut self, x: ValueId, y: ValueId, m: ValueId, gate: i64) -> ValueId {
        let rows = self.m.frame_tokens();
        self.b.attr("gate", gate).attr("frame_rows", rows);
        self.op(Opcode::GateResidual, &[x, y, m])
    }

    fn rope(&mut self, x: ValueId, start: ValueId) -> ValueId {
        let (hd, grid) = (self.heads(), self.m.stream.grid(&self.m.wan).map(|g| g as i64).to_vec());
        self.b.attr("head_dim", hd).attr("grid", grid).key("start", start);
        self.op(Opcode::Rope, &[x])
    }

    fn attention(&mut self, q: ValueId, k: ValueId, v: ValueId) -> ValueId {
        let hd = self.heads();
        self.b.attr("head_dim", hd);
        self.op(Opcode::Attention, &[q, k, v])
    }

    /// Time conditioning, per latent frame: (e [frames, dim], e0 [frames, 6·dim]).
    fn time(&mut self) -> (ValueId, ValueId) {
        let (d, frames, width) = (self.m.wan.dim, self.m.stream.chunk_frames, self.m.wan.freq_dim);
        let t = self.call("t", Type::new(DType::F32, [frames]));
        self.at("all");
        self.b.attr("width", width);
        let s = self.op(Opcode::TimeEmbed, &[t]);
        let h = self.linear("time_embedding.0", s, d, "whole", 1, Some("silu"));
        let e = self.linear("time_embedding.2", h, d, "whole", 1, None);
        let a = self.op(Opcode::Silu, &[e]);
        let e0 = self.linear("time_projection.1", a, 6 * d, "whole", 1, None);
        (e, e0)
    }

    fn patch(&mut self, x: ValueId) -> ValueId {
        let (d, p) = (self.m.wan.dim, self.m.wan.token_width());
        self.at("first");
        self.b.attr("load", "patch");
        let w = self.weight("patch_embedding.weight", &[d, p], "whole", 1);
        let b = self.weight("patch_embedding.bias", &[d], "whole", 1);
        self.b.key("bias", b);
        self.op(Opcode::Matmul, &[x, w])
    }

    /// Writes this chunk's keys and values of a block; the modulated input and the per-frame columns.
    fn keys(&mut self, i: u64, x: ValueId, e0: ValueId, at: Position) -> (ValueId, ValueId) {
        let (d, hd) = (self.m.wan.dim, self.heads());
        let n = format!("blocks.{i}");
        self.at(&format!("block.{i}"));
        let table = self.weight(&format!("{n}.modulation"), &[1, 6, d], "whole", 1);
        let m = self.op(Opcode::Modulation, &[table, e0]);
        let a = self.norm_modulate(x, m, 0, 1);
        let k = self.linear(&format!("{n}.self_attn.k"), a, d, "col", hd, None);
        let k = self.rms(k, &format!("{n}.self_attn.norm_k"));
        let k = self.rope(k, at.start);
        let v = self.linear(&format!("{n}.self_attn.v"), a, d, "col", hd, None);
        let cache = self.self_cache();
        self.write(&format!("kv.{i}.k"), cache.clone(), k, Some(at.row));
        self.write(&format!("kv.{i}.v"), cache, v, Some(at.row));
        (a, m)
    }

    /// A whole block over `frames` cached frames, this chunk's included.
    fn block(&mut self, i: u64, x: ValueId, e0: ValueId, at: Position) -> ValueId {
        let (d, hd, f, eps) = (self.m.wan.dim, self.heads(), self.m.wan.ffn_dim, self.m.wan.eps);
        let n = format!("blocks.{i}");
        // The query goes first so that its sums of squares can travel with the keys'.
        self.at(&format!("block.{i}"));
        let table = self.weight(&format!("{n}.modulation"), &[1, 6, d], "whole", 1);
        let m = self.op(Opcode::Modulation, &[table, e0]);
        let a = self.norm_modulate(x, m, 0, 1);
        let q = self.linear(&format!("{n}.self_attn.q"), a, d, "col", hd, None);
        let k = self.linear(&format!("{n}.self_attn.k"), a, d, "col", hd, None);
        let v = self.linear(&format!("{n}.self_attn.v"), a, d, "col", hd, None);
        let q = self.rms(q, &format!("{n}.self_attn.norm_q"));
        let k = self.rms(k, &format!("{n}.self_attn.norm_k"));
        let q = self.rope(q, at.start);
        let k = self.rope(k, at.start);
        let cache = self.self_cache();
        self.write(&format!("kv.{i}.k"), cache.clone(), k, Some(at.row));
        self.write(&format!("kv.{i}.v"), cache.clone(), v, Some(at.row));
        let rows = at.frames * self.m.frame_tokens();
        let ks = self.read(&format!("kv.{i}.k"), rows, cache.clone());
        let vs = self.read(&format!("kv.{i}.v"), rows, cache);
        if let Some(bias) = at.bias {
            // Past frames only: neither the anchor nor this chunk.
            let l = self.m.frame_tokens() as i64;
            let chunk = self.m.stream.chunk_frames as i64;
            self.b.attr("bias_rows", vec![l, chunk * l]).key("bias", bias);
        }
        let o = self.attention(q, ks, vs);
        let o = self.linear(&format!("{n}.self_attn.o"), o, d, "row", hd, None);
        let x = self.gate(x, o, m, 2);

        let w = self.weight(&format!("{n}.norm3.weight"), &[d], "whole", 1);
        let b = self.weight(&format!("{n}.norm3.bias"), &[d], "whole", 1);
        self.b.attr("eps", eps);
        let c = self.op(Opcode::LayerNorm, &[x, w, b]);
        let q = self.linear(&format!("{n}.cross_attn.q"), c, d, "col", hd, None);
        let q = self.rms(q, &format!("{n}.cross_attn.norm_q"));
        let cross = self.cross_cache();
        let len = self.m.wan.text_len;
        let k = self.read(&format!("cross.{i}.k"), len, cross.clone());
        let v = self.read(&format!("cross.{i}.v"), len, cross);
        let o = self.attention(q, k, v);
        let o = self.linear(&format!("{n}.cross_attn.o"), o, d, "row", hd, None);
        let x = self.op(Opcode::GateResidual, &[x, o]);

        let a = self.norm_modulate(x, m, 3, 4);
        let h = self.linear(&format!("{n}.ffn.0"), a, f, "col", 1, Some("gelu_tanh"));
        let y = self.linear(&format!("{n}.ffn.2"), h, d, "row", 1, None);
        self.gate(x, y, m, 5)
    }

    fn head(&mut self, x: ValueId, e: ValueId) -> ValueId {
        let (d, p) = (self.m.wan.dim, self.m.wan.token_width());
        self.at("last");
        let table = self.weight("head.modulation", &[1, 2, d], "whole", 1);
        let m = self.op(Opcode::Modulation, &[table, e]);
        let a = self.norm_modulate(x, m, 0, 1);
        self.linear("head.head", a, p, "whole", 1, None)
    }
}

/// Where a chunk stands.
#[derive(Clone, Copy)]
struct Position {
    /// First frame's rotary position.
    start: ValueId,
    /// First cache row.
    row: ValueId,
    /// Frames attended to, this chunk's included.
    frames: u64,
    /// Logarithm of the weight of past frames, if it is a parameter.
    bias: Option<ValueId>,
}

/// Keys and values of the prompt for every block's cross-attention.
fn text(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "text");
    let (d, hd) = (m.wan.dim, m.wan.head_dim());
    g.at("all");
    let x = g.b.label("text").input("text", Type::new(DType::F32, [m.wan.text_len, m.wan.text_dim]));
    let h = g.linear("text_embedding.0", x, d, "whole", 1, Some("gelu_tanh"));
    let c = g.linear("text_embedding.2", h, d, "whole", 1, None);
    for i in 0..m.wan.layers {
        g.at(&format!("block.{i}"));
        let n = format!("blocks.{i}.cross_attn");
        let k = g.linear(&format!("{n}.k"), c, d, "col", hd, None);
        let k = g.rms(k, &format!("{n}.norm_k"));
        let v = g.linear(&format!("{n}.v"), c, d, "col", hd, None);
        let cross = g.cross_cache();
        g.write(&format!("cross.{i}.k"), cross.clone(), k, None);
        g.write(&format!("cross.{i}.v"), cross, v, None);
    }
    g.finish()
}

/// The next step's input: noise mixed into the last estimate.
fn renoise(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "renoise");
    let tokens = g.tokens();
    let sigma = g.call("sigma", Type::scalar(DType::F32));
    let keys = ["seed", "chunk", "draw"].map(|k| (k, g.call(k, Type::scalar(DType::I64))));
    let x0 = g.read("latent", tokens.shape[0], tokens.clone());
    g.b.key("sigma", sigma);
    for (k, v) in keys {
        g.b.key(k, v);
    }
    let x = g.op(Opcode::Renoise, &[x0]);
    g.write("x", tokens, x, None);
    g.finish()
}

/// One denoising step with `fill` frames of context in the cache.
fn denoise(m: &VideoModel, fill: u64) -> Program {
    let mut g = Graph::new(m, &format!("denoise.fill{fill}"));
    let tokens = g.tokens();
    let sigma = (m.stream.prediction == Prediction::Flow).then(|| g.call("sigma", Type::scalar(DType::F32)));
    let start = g.call("start", Type::scalar(DType::I64));
    let row = g.call("row", Type::scalar(DType::I64));
    let biased = m.regime() == Regime::Recompute && fill > 0;
    let bias = biased.then(|| g.call("bias", Type::scalar(DType::F32)));
    let at = Position { start, row, frames: fill + m.stream.chunk_frames, bias };
    let (e, e0) = g.time();
    g.at("first");
    let x = g.read("x", tokens.shape[0], tokens.clone());
    let mut h = g.patch(x);
    for i in 0..m.wan.layers {
        h = g.block(i, h, e0, at);
    }
    let y = g.head(h, e);
    g.at("first");
    let x0 = match sigma {
        Some(sigma) => {
            g.b.key("sigma", sigma);
            g.op(Opcode::ToX0, &[x, y])
        }
        None => y,
    };
    g.write("latent", tokens, x0, None);
    g.finish()
}

enum Refresh {
    /// After denoising: this chunk's final latents at t = 0, with `fill` frames of context.
    Clean(u64),
    /// Before denoising: three context latents at t = 0 into an empty cache.
    Recompute,
}

/// A pass that only fills the cache: it ends with the last block's keys and values.
fn refresh(m: &VideoModel, kind: Refresh) -> Program {
    let (name, fill) = match kind {
        Refresh::Clean(fill) => (format!("clean.fill{fill}"), fill),
        Refresh::Recompute => ("recompute".to_string(), 0),
    };
    let mut g = Graph::new(m, &name);
    let tokens = g.tokens();
    let start = g.call("start", Type::scalar(DType::I64));
    let row = g.call("row", Type::scalar(DType::I64));
    let at = Position { start, row, frames: fill + m.stream.chunk_frames, bias: None };
    let (_, e0) = g.time();
    g.at("first");
    let x = match kind {
        Refresh::Clean(_) => g.read("latent", tokens.shape[0], tokens),
        Refresh::Recompute => {
            g.b.attr("at", "first").attr("part", "tokens");
            g.b.label("context").input("context", tokens)
        }
    };
    let mut h = g.patch(x);
    for i in 0..m.wan.layers - 1 {
        h = g.block(i, h, e0, at);
    }
    g.keys(m.wan.layers - 1, h, e0, at);
    g.finish()
}

/// Turns every cached key back by a number of frames, so that positions can go on past the rotary table.
fn rebase(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "rebase");
    let shift = g.call("shift", Type::scalar(DType::I64));
    let hd = m.wan.head_dim();
    let grid = m.stream.grid(&m.wan).map(|x| x as i64).to_vec();
    for i in 0..m.wan.layers {
        g.at(&format!("block.{i}"));
        let cache = g.self_cache();
        let k = g.read(&format!("kv.{i}.k"), cache.shape[0], cache.clone());
        g.b.attr("head_dim", hd).attr("grid", grid.clone()).attr("frame_stride", 0i64).key("start", shift);
        let k = g.op(Opcode::Rope, &[k]);
        g.write(&format!("kv.{i}.k"), cache, k, None);
    }
    g.finish()
}

/// Hands the chunk's latents to the host.
fn emit(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "emit");
    let tokens = g.tokens();
    let x = g.read("latent", tokens.shape[0], tokens);
    g.b.attr("at", "first");
    g.b.output("latents", x);
    g.finish()
}

/// One latent frame to pixels, on the leader: run for each latent of a chunk, in order. The first alone is what the
/// next chunk's anchor waits for.
fn decode(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "decode");
    g.at("leader");
    let frame = Type::new(DType::F32, [m.frame_tokens(), m.wan.token_width()]);
    let x = g.b.label("latents").input("latents", frame);
    let [_, h, w] = m.stream.grid(&m.wan).map(|x| x as i64);
    g.b.attr("grid", vec![1, h, w]);
    let pixels = video_op(&mut g, Opcode::DepthToSpaceTime, x);
    g.b.attr("at", "leader");
    g.b.output("pixels", pixels);
    g.finish()
}

/// One latent frame of pixels to latents, on the leader: the anchor repeats its one frame.
fn encode(m: &VideoModel) -> Program {
    let mut g = Graph::new(m, "encode");
    let s = &m.stream;
    g.at("leader");
    let x = g.b.label("pixels").input("pixels", Type::new(DType::F32, [s.stride[0], s.height, s.width, 3]));
    let tokens = video_op(&mut g, Opcode::SpaceTimeToDepth, x);
    g.b.attr("at", "leader");
    g.b.output("latents", tokens);
    g.finish()
}

fn video_op(g: &mut Graph, opcode: Opcode, x: ValueId) -> ValueId {
    let stride = g.m.stream.stride.map(|x| x as i64).to_vec();
    let patch = g.m.wan.patch.map(|x| x as i64).to_vec();
    g.b.attr("stride", stride).attr("patch", patch);
    g.op(opcode, &[x])
}

#[cfg(test)]
mod tests {
    use super::*;
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
            for p in phases(&m) {
                for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
                    used.insert(op.name.clone().unwrap());
                }
            }
            let known: BTreeSet<String> = expected_weights(&m.wan).into_iter().map(|w| w.name).collect();
            assert_eq!(used, known);
        }
    }

    #[test]
    fn each_regime_has_its_phases() {
        let names = |e: &str| phases(&tiny(e)).into_iter().map(|p| p.name).collect::<Vec<_>>();
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
