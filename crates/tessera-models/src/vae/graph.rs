//! The programs of a causal VAE, which the leader runs beside calls or the ranks run in them: frames are
//! values [t, h, w, c], channels last.
//!
//! A convolution over time reads the last frames of its input from a buffer of the plan, and the program
//! then writes the newest frames to it. At the start of a scene every buffer holds zeros, which is the
//! padding of the first frame.

use tessera_ir::{Attr, DType, Opcode, Program, Type, ValueId};

use super::VaeConfig;
use crate::DecoderQuality;
use crate::graph_builder::GraphBuilder;
use crate::video_model::{ContextRegime, VideoModel};

/// Frames of history that a convolution over three frames needs.
const HISTORY: u64 = 2;

/// ε of the norms: x / √(mean(x²) + ε). It only keeps a cell of zeros from dividing by zero; other cells are
/// divided by their L2 norm over √c.
const NORM_EPS: f64 = 1e-24;

/// The buffer with the frame of a chunk's first latent from which its call encodes the next anchor.
pub(super) const ANCHOR_FRAME: &str = "vae.anchor_frame";

/// The program that decodes the first latent of a scene exactly, beside the fast `decode.open`. It reads and
/// writes no history.
pub const EXACT_DECODE_PHASE: &str = "decode.exact";

/// Output of a call with the pixels of [`EXACT_DECODE_PHASE`].
pub const EXACT_PIXELS: &str = "pixels.exact";

/// Where the programs of pixels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaPhases {
    /// Beside the calls, on the leader, which passes latents and pixels in.
    BesideCalls,
    /// Like `BesideCalls`, on a device of the leader's host, with the dtypes of programs of ranks.
    BesideCallsOnDevice,
    /// At the end of each chunk's call. The programs read its latents from the buffer `latent`, and the
    /// frame of the anchor from a buffer.
    InCalls,
}

/// Builds the programs that decode the latents of a chunk in order, each with its number of latent
/// frames: `decode.open` the first latent of a scene, which is one pixel frame; `decode.first` the first of
/// a later chunk; `decode.rest` the others of any chunk.
///
/// The first latent of a chunk has a program of its own because the next chunk's anchor waits for it
/// alone.
pub(crate) fn decode_programs(m: &VideoModel, vae: &VaeConfig, media: MediaPhases) -> Vec<Program> {
    let build = |(name, first, frames)| decode_program(VaeBuilder::new(m, vae, name, media), first, frames);
    let exact = (m.stream.decoder_quality == DecoderQuality::Fast).then(|| {
        let v = VaeBuilder { past: Past::None, ..VaeBuilder::new(m, vae, EXACT_DECODE_PHASE, media) };
        decode_program(v, 0, 1)
    });
    exact.into_iter().chain(list_pieces(m).into_iter().map(build)).collect()
}

/// Lists the programs that decode a chunk, each with its first latent frame and their number.
pub(super) fn list_pieces(m: &VideoModel) -> Vec<(&'static str, u64, u64)> {
    let rest = m.stream.chunk_frames - 1;
    let mut pieces = vec![("decode.open", 0, 1), ("decode.first", 0, 1)];
    if rest > 0 {
        pieces.push(("decode.rest", 1, rest));
    }
    pieces
}

/// Builds a program that decodes `frames` latent frames of a chunk from frame `first` on. The first latent
/// of a scene passes the doubling of frames unchanged, and the history of these convolutions begins with
/// the second.
fn decode_program(mut v: VaeBuilder<'_>, first: u64, frames: u64) -> Program {
    let vae = v.vae;
    let opens_scene = v.opens_scene();
    let z = v.emit_latent_grid(first, frames);
    let z = v.emit_latent_scale(z, LatentScale::Denormalise);
    let z = v.emit_conv("conv2", z, vae.z_dim, Kernel::Point);
    let top = vae.widths().last().copied().unwrap_or(vae.base_dim);
    let x = v.emit_conv("decoder.conv1", z, top, Kernel::Space3Time3);
    let mut x = v.emit_middle("decoder", x);
    let mut block = 0;
    for (i, to) in vae.widths().into_iter().rev().enumerate() {
        for _ in 0..=vae.res_blocks {
            x = v.emit_residual(&format!("decoder.upsamples.{block}"), x, to);
            block += 1;
        }
        if let Some(doubles_frames) = vae.temporal_downsample.iter().rev().nth(i) {
            let at = format!("decoder.upsamples.{block}");
            if *doubles_frames && !opens_scene {
                x = v.emit_conv(&format!("{at}.time_conv"), x, 2 * to, Kernel::Time3);
                v.graph.builder.set_attr("parts", 2u64);
                x = v.graph.emit_op(Opcode::ChannelsToFrames, &[x]);
            }
            v.graph.builder.set_attr("scale", vec![2i64, 2]);
            x = v.graph.emit_op(Opcode::UpsampleNearest, &[x]);
            x = v.emit_conv(&format!("{at}.resample.1"), x, to / 2, Kernel::Space3);
            block += 1;
        }
    }
    let pixels = v.emit_head("decoder", x, 3);
    v.finish_pixels(pixels, first)
}

impl MediaPhases {
    /// Returns the location of the programs' ops.
    fn location(self) -> &'static str {
        match self {
            MediaPhases::BesideCalls => "leader",
            MediaPhases::BesideCallsOnDevice => "leader.device",
            MediaPhases::InCalls => "media",
        }
    }
}

/// Where the frames before those of a program come from.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Past {
    /// Buffers of the plan, which the program also updates.
    Buffers,
    /// There are none: the program begins a scene and leaves nothing behind.
    None,
}

/// The direction of the conversion between latents of the VAE and normalised ones of the generator.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum LatentScale {
    /// From the VAE to the generator.
    Normalise,
    /// From the generator to the VAE.
    Denormalise,
}

/// The extents, the steps and the padding of a convolution.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    /// 1×1×1.
    Point,
    /// 3×3×3, causal.
    Space3Time3,
    /// 3 frames, causal.
    Time3,
    /// 3×3 within a frame.
    Space3,
    /// 3×3 over a frame and the frame before it, whose weights are channels of one convolution in the file.
    Space3Past,
    /// 3×3 within a frame at every second row and column, with zeros behind the last row and column.
    HalfSpace,
    /// 3 frames, causal, at every second frame. The last frame before is the only one of its history.
    HalfTime,
}

impl Kernel {
    /// Frames of history that the convolution reads.
    fn history(self) -> u64 {
        match self {
            Kernel::Point | Kernel::Space3 | Kernel::HalfSpace => 0,
            Kernel::HalfTime | Kernel::Space3Past => 1,
            Kernel::Space3Time3 | Kernel::Time3 => HISTORY,
        }
    }

    /// Returns how the weights in the file become those of the convolution.
    fn weight_load(self) -> &'static str {
        match self {
            Kernel::Space3Past => "conv.past",
            Kernel::Point
            | Kernel::Space3Time3
            | Kernel::Time3
            | Kernel::Space3
            | Kernel::HalfSpace
            | Kernel::HalfTime => "conv",
        }
    }

    fn extents(self) -> [i64; 3] {
        match self {
            Kernel::Point => [1, 1, 1],
            Kernel::Space3Time3 => [3, 3, 3],
            Kernel::Time3 | Kernel::HalfTime => [3, 1, 1],
            Kernel::Space3 | Kernel::HalfSpace => [1, 3, 3],
            Kernel::Space3Past => [2, 3, 3],
        }
    }
}

pub(super) struct VaeBuilder<'a> {
    pub(super) graph: GraphBuilder<'a>,
    pub(super) vae: &'a VaeConfig,
    pub(super) past: Past,
    pub(super) media: MediaPhases,
    /// Prefix of the names of the history buffers.
    pub(super) buffer_family: &'static str,
}

/// Prefix of the history buffers of all phases but those that a plan also holds for a CPU.
pub(super) const BUFFER_FAMILY: &str = "vae.";

impl<'a> VaeBuilder<'a> {
    /// Creates a builder of a program with history.
    pub(super) fn new(
        m: &'a VideoModel,
        vae: &'a VaeConfig,
        name: &str,
        media: MediaPhases,
    ) -> VaeBuilder<'a> {
        let mut graph = GraphBuilder::new(m, name);
        graph.set_location(media.location());
        VaeBuilder { graph, vae, past: Past::Buffers, media, buffer_family: BUFFER_FAMILY }
    }

    /// Returns whether the program decodes the first latent of a scene.
    pub(super) fn opens_scene(&self) -> bool {
        ["decode.open", EXACT_DECODE_PHASE].contains(&self.graph.builder.program().name.as_str())
    }

    pub(super) fn finish(mut self, output: &str, value: ValueId) -> Program {
        self.graph.builder.set_attr("at", self.media.location());
        self.graph.builder.add_output(output, value);
        self.graph.finish()
    }

    pub(super) fn picture_type(&self) -> Type {
        let s = &self.graph.model.stream;
        Type::new(DType::F32, [1, s.height, s.width, 3])
    }

    /// Limits the pixels of a decoder to −1..=1 and ends its program, which began with this latent frame. In
    /// a call, the frame of the anchor stays in a buffer.
    pub(super) fn finish_pixels(mut self, x: ValueId, first: u64) -> Program {
        self.graph.builder.set_attr("limit", 1.0);
        let pixels = self.graph.emit_op(Opcode::Clamp, &[x]);
        match self.media {
            MediaPhases::BesideCalls | MediaPhases::BesideCallsOnDevice => self.finish("pixels", pixels),
            MediaPhases::InCalls if first > 0 => self.finish("pixels.rest", pixels),
            MediaPhases::InCalls if self.graph.builder.program().name == EXACT_DECODE_PHASE => {
                self.finish(EXACT_PIXELS, pixels)
            }
            MediaPhases::InCalls => {
                if self.graph.model.context_regime() == ContextRegime::Recompute && !self.opens_scene() {
                    let last = self.frame_shape(pixels)[0] - 1;
                    let frame = self.emit_rows(pixels, last, 1);
                    let picture = self.picture_type();
                    self.graph.write_buffer(ANCHOR_FRAME, picture, frame, None);
                }
                self.finish("pixels.first", pixels)
            }
        }
    }

    /// Emits latent frames [t, h, w, c] as the generator makes them.
    pub(super) fn emit_latent_grid(&mut self, first: u64, frames: u64) -> ValueId {
        let m = self.graph.model;
        let [_, h, w] = m.stream.token_grid(&m.wan).map(|x| x as i64);
        let x = self.emit_latents(first, frames);
        let patch = m.wan.patch.map(|x| x as i64).to_vec();
        self.graph.builder.set_attr("grid", vec![frames as i64, h, w]).set_attr("patch", patch);
        self.graph.emit_op(Opcode::Unpatchify, &[x])
    }

    /// Emits the tokens of latent frames: the program's input, or a part of the chunk's latents.
    fn emit_latents(&mut self, first: u64, frames: u64) -> ValueId {
        let frame_tokens = self.graph.model.frame_tokens();
        let (row, rows) = (first * frame_tokens, frames * frame_tokens);
        let whole = self.graph.token_type();
        match self.media {
            MediaPhases::BesideCalls | MediaPhases::BesideCallsOnDevice => {
                let tokens = Type::new(DType::F32, [rows, whole.shape[1]]);
                self.graph.builder.set_label("latents").add_input("latents", tokens)
            }
            MediaPhases::InCalls => {
                let latents = self.graph.read_buffer("latent", whole.shape[0], whole);
                self.emit_rows(latents, row, rows)
            }
        }
    }

    pub(super) fn frame_shape(&self, x: ValueId) -> [u64; 4] {
        match self.graph.builder.type_of(x).shape[..] {
            [t, h, w, c] => [t, h, w, c],
            // The builder has recorded why an op has no such result, and `finish` reports it.
            _ => [1; 4],
        }
    }

    pub(super) fn emit_rows(&mut self, x: ValueId, row: u64, rows: u64) -> ValueId {
        self.graph.builder.set_attr("row", row).set_attr("rows", rows);
        self.graph.emit_op(Opcode::TakeRows, &[x])
    }

    /// Emits the conversion between the generator's latents and the VAE's.
    pub(super) fn emit_latent_scale(&mut self, z: ValueId, scale: LatentScale) -> ValueId {
        let std = self.graph.emit_weight("vae.latents_std", &[self.vae.z_dim], "whole", 1);
        let mean = self.graph.emit_weight("vae.latents_mean", &[self.vae.z_dim], "whole", 1);
        if scale == LatentScale::Normalise {
            self.graph.builder.set_attr("inverse", Attr::Bool(true));
        }
        self.graph.emit_op(Opcode::ScaleShift, &[z, std, mean])
    }

    /// Emits a convolution to `out` channels, with its history if it covers several frames.
    pub(super) fn emit_conv(&mut self, name: &str, x: ValueId, out: u64, kernel: Kernel) -> ValueId {
        self.emit_conv_sum(name, x, out, kernel, None)
    }

    /// Emits a convolution whose layer has no bias.
    pub(super) fn emit_conv_without_bias(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        kernel: Kernel,
    ) -> ValueId {
        self.emit_conv_layer(name, x, (out, false), kernel, None)
    }

    /// Emits a convolution, and its sum with a residual if there is one.
    pub(super) fn emit_conv_sum(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        kernel: Kernel,
        residual: Option<ValueId>,
    ) -> ValueId {
        self.emit_conv_layer(name, x, (out, true), kernel, residual)
    }

    fn emit_conv_layer(
        &mut self,
        name: &str,
        x: ValueId,
        (out, has_bias): (u64, bool),
        kernel: Kernel,
        residual: Option<ValueId>,
    ) -> ValueId {
        let [kt, kh, kw] = kernel.extents();
        let c = self.frame_shape(x)[3];
        self.graph.builder.set_attr("load", kernel.weight_load());
        let w = self.graph.emit_weight(
            &format!("vae.{name}.weight"),
            &[out, (kt * kh * kw) as u64 * c],
            "whole",
            1,
        );
        let bias = has_bias.then(|| self.graph.emit_weight(&format!("vae.{name}.bias"), &[out], "whole", 1));
        let frames = kernel.history();
        let history = (frames > 0 && self.past == Past::Buffers).then(|| self.read_history(name, x, frames));
        let b = &mut self.graph.builder;
        b.set_attr("kernel", vec![kt, kh, kw]);
        if let Some(bias) = bias {
            b.add_keyed("bias", bias);
        }
        match history {
            Some(history) => drop(b.add_keyed("history", history)),
            None if frames > 0 => drop(b.set_attr("pad_frames", frames)),
            None => {}
        }
        match kernel {
            Kernel::Space3Time3 | Kernel::Space3 | Kernel::Space3Past => {
                b.set_attr("pad_before", 1u64).set_attr("pad_after", 1u64);
            }
            Kernel::HalfSpace => {
                b.set_attr("pad_after", 1u64).set_attr("stride", vec![1i64, 2, 2]);
            }
            Kernel::HalfTime => drop(b.set_attr("stride", vec![2i64, 1, 1])),
            Kernel::Point | Kernel::Time3 => {}
        }
        let y = self.graph.emit_op(Opcode::Conv3d, &[x, w]);
        // A sum that follows belongs between the two: the write replaces what the convolution reads, so a
        // backend cannot move the convolution behind it.
        let y = residual.map_or(y, |r| self.graph.emit_op(Opcode::Add, &[y, r]));
        if let Some(history) = history {
            self.write_history(name, x, frames, Some(history));
        }
        y
    }

    fn history_type(&self, x: ValueId, frames: u64) -> Type {
        let [_, h, w, c] = self.frame_shape(x);
        Type::new(DType::F32, [frames, h, w, c])
    }

    fn read_history(&mut self, name: &str, x: ValueId, frames: u64) -> ValueId {
        let ty = self.history_type(x, frames);
        self.graph.read_buffer(&format!("{}{name}", self.buffer_family), frames, ty)
    }

    /// Emits the write of the newest `kept` frames of x, or of the history and x if x has fewer.
    pub(super) fn write_history(&mut self, name: &str, x: ValueId, kept: u64, history: Option<ValueId>) {
        let (frames, ty) = (self.frame_shape(x)[0], self.history_type(x, kept));
        let buffer = format!("{}{name}", self.buffer_family);
        if frames >= kept {
            let last = match frames - kept {
                0 => x,
                row => self.emit_rows(x, row, kept),
            };
            self.graph.write_buffer(&buffer, ty, last, None);
            return;
        }
        if let Some(history) = history {
            let newest = self.emit_rows(history, frames, kept - frames);
            self.graph.write_buffer(&buffer, ty.clone(), newest, None);
        }
        self.graph.builder.set_attr("first_row", kept - frames);
        self.graph.write_buffer(&buffer, ty, x, None);
    }

    fn emit_norm(&mut self, name: &str, x: ValueId) -> ValueId {
        let c = self.frame_shape(x)[3];
        let gamma = self.graph.emit_weight(&format!("vae.{name}.gamma"), &[c], "whole", 1);
        self.graph.builder.set_attr("eps", NORM_EPS);
        self.graph.emit_op(Opcode::RmsNorm, &[x, gamma])
    }

    pub(super) fn emit_residual(&mut self, name: &str, x: ValueId, out: u64) -> ValueId {
        let shortcut = match self.frame_shape(x)[3] == out {
            true => x,
            false => self.emit_conv(&format!("{name}.shortcut"), x, out, Kernel::Point),
        };
        let mut y = x;
        for (norm, conv) in [(0, 2), (3, 6)] {
            y = self.emit_norm(&format!("{name}.residual.{norm}"), y);
            y = self.graph.emit_op(Opcode::Silu, &[y]);
            let residual = (conv == 6).then_some(shortcut);
            y = self.emit_conv_sum(&format!("{name}.residual.{conv}"), y, out, Kernel::Space3Time3, residual);
        }
        y
    }

    pub(super) fn emit_middle(&mut self, side: &str, x: ValueId) -> ValueId {
        let c = self.frame_shape(x)[3];
        let x = self.emit_residual(&format!("{side}.middle.0"), x, c);
        let x = self.emit_frame_attention(&format!("{side}.middle.1"), x);
        self.emit_residual(&format!("{side}.middle.2"), x, c)
    }

    /// Emits attention with one head in which the cells of each frame attend to each other.
    fn emit_frame_attention(&mut self, name: &str, x: ValueId) -> ValueId {
        let [t, h, w, c] = self.frame_shape(x);
        let y = self.emit_norm(&format!("{name}.norm"), x);
        let qkv = self.emit_conv(&format!("{name}.to_qkv"), y, 3 * c, Kernel::Point);
        self.graph.builder.set_attr("parts", 3u64);
        let parts = self.graph.emit_op(Opcode::ChannelsToFrames, &[qkv]);
        let ty = Type::new(DType::F32, [t, h, w, c]);
        let buffer = format!("{}{name}.frames{t}", self.buffer_family);
        let mut attended = parts;
        for frame in 0..t {
            let [q, k, v] = [0, 1, 2].map(|part| self.emit_rows(parts, 3 * frame + part, 1));
            self.graph.builder.set_attr("head_dim", c);
            attended = self.graph.emit_op(Opcode::Attention, &[q, k, v]);
            if t > 1 {
                self.graph.builder.set_attr("first_row", frame);
                self.graph.write_buffer(&buffer, ty.clone(), attended, None);
            }
        }
        if t > 1 {
            attended = self.graph.read_buffer(&buffer, t, ty);
        }
        self.emit_conv_sum(&format!("{name}.proj"), attended, c, Kernel::Point, Some(x))
    }

    pub(super) fn emit_head(&mut self, side: &str, x: ValueId, out: u64) -> ValueId {
        let x = self.emit_norm(&format!("{side}.head.0"), x);
        let x = self.graph.emit_op(Opcode::Silu, &[x]);
        self.emit_conv(&format!("{side}.head.2"), x, out, Kernel::Space3Time3)
    }
}
