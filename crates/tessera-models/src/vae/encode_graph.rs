//! The encoder of a causal VAE, and the programs that encode an input video with history, as the leader
//! receives its frames.

use tessera_ir::{DType, Opcode, Program, Type, ValueId};

use super::VaeConfig;
use super::graph::{ANCHOR_FRAME, BUFFER_FAMILY, Kernel, LatentScale, MediaPhases, Past, VaeBuilder};
use crate::video_model::VideoModel;

/// What the encoder does where it halves frames.
#[derive(Clone, Copy, PartialEq)]
enum FrameStep {
    /// The only frame passes unchanged.
    Pass,
    /// The first frame of a scene passes unchanged, and the next frames read it as their history.
    PassFirst,
    /// Every second frame of the history and x is convolved.
    Halve,
}

/// Names of the phases that encode a video in order on the leader's CPU: the first frame of a scene, and the
/// frames of each later latent.
pub const VIDEO_PHASES: [&str; 2] = ["encode.open", "encode.rest"];

/// Names of the same phases for a device of the leader's host.
pub const VIDEO_DEVICE_PHASES: [&str; 2] = ["encode.open.device", "encode.rest.device"];

/// Family of the history buffers of the phases for a device. A plan declares a buffer of one name with one
/// dtype, and those of the phases for a CPU stay f32 where a device has bf16.
const DEVICE_BUFFERS: &str = "vae.device.";

/// Builds the programs that encode a video in order, one latent at a time: for the leader's CPU, and for a
/// device of its host.
///
/// One latent per program serves the first chunk of a scene, which has one latent less to encode after the
/// first, and all others; no larger group divides both.
pub(crate) fn encode_video_programs(m: &VideoModel, vae: &VaeConfig) -> Vec<Program> {
    let [frames_per_latent, ..] = vae.stride();
    let steps = [(1, FrameStep::PassFirst), (frames_per_latent, FrameStep::Halve)];
    let places = [
        (VIDEO_PHASES, MediaPhases::BesideCalls, BUFFER_FAMILY),
        (VIDEO_DEVICE_PHASES, MediaPhases::BesideCallsOnDevice, DEVICE_BUFFERS),
    ];
    let mut programs = Vec::new();
    for (names, media, buffer_family) in places {
        for (name, (frames, step)) in names.into_iter().zip(steps) {
            let v = VaeBuilder { buffer_family, ..VaeBuilder::new(m, vae, name, media) };
            programs.push(encode_frames(v, frames, step));
        }
    }
    programs
}

fn encode_frames(mut v: VaeBuilder<'_>, frames: u64, step: FrameStep) -> Program {
    let stream = &v.graph.model.stream;
    let pixels = Type::new(DType::F32, [frames, stream.height, stream.width, 3]);
    let x = v.graph.builder.set_label("pixels").add_input("pixels", pixels);
    let tokens = emit_encoder(&mut v, x, step);
    v.finish("latents", tokens)
}

/// Builds the program that encodes one pixel frame on its own, as the first of a scene: the anchor of the
/// next chunk.
pub(crate) fn encode_anchor_program(m: &VideoModel, vae: &VaeConfig, media: MediaPhases) -> Program {
    let mut v = VaeBuilder { past: Past::None, ..VaeBuilder::new(m, vae, "encode", media) };
    let pixels = v.picture_type();
    let x = match media {
        MediaPhases::BesideCalls | MediaPhases::BesideCallsOnDevice => {
            v.graph.builder.set_label("pixels").add_input("pixels", pixels)
        }
        MediaPhases::InCalls => v.graph.read_buffer(ANCHOR_FRAME, 1, pixels),
    };
    let tokens = emit_encoder(&mut v, x, FrameStep::Pass);
    v.finish(if media == MediaPhases::InCalls { "anchor" } else { "latents" }, tokens)
}

/// Emits the encoder from the pixels of one latent to the tokens of the generator.
fn emit_encoder(v: &mut VaeBuilder<'_>, pixels: ValueId, step: FrameStep) -> ValueId {
    let vae = v.vae;
    let mut x = v.emit_conv("encoder.conv1", pixels, vae.base_dim, Kernel::Space3Time3);
    let mut block = 0;
    for (level, to) in vae.widths().into_iter().enumerate() {
        for _ in 0..vae.res_blocks {
            x = v.emit_residual(&format!("encoder.downsamples.{block}"), x, to);
            block += 1;
        }
        if let Some(halves_frames) = vae.temporal_downsample.get(level) {
            let at = format!("encoder.downsamples.{block}");
            x = v.emit_conv(&format!("{at}.resample.1"), x, to, Kernel::HalfSpace);
            let time = format!("{at}.time_conv");
            match step {
                FrameStep::Halve if *halves_frames => x = v.emit_conv(&time, x, to, Kernel::HalfTime),
                FrameStep::PassFirst if *halves_frames => v.write_history(&time, x, 1, None),
                _ => {}
            }
            block += 1;
        }
    }
    x = v.emit_middle("encoder", x);
    x = v.emit_head("encoder", x, 2 * vae.z_dim);
    let moments = v.emit_conv("conv1", x, 2 * vae.z_dim, Kernel::Point);
    // The first half of the channels is the mean of the distribution, which is the latent.
    v.graph.builder.set_attr("parts", 2u64);
    let halves = v.graph.emit_op(Opcode::ChannelsToFrames, &[moments]);
    let z = v.emit_rows(halves, 0, 1);
    let z = v.emit_latent_scale(z, LatentScale::Normalise);
    let patch = v.graph.model.wan.patch.map(|x| x as i64).to_vec();
    v.graph.builder.set_attr("patch", patch);
    v.graph.emit_op(Opcode::Patchify, &[z])
}
