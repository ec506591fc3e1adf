//! The programs of a tiny decoder. They have the names, inputs and outputs of those of the causal VAE.

use tessera_ir::{Opcode, Program, ValueId};

use super::graph::{Kernel, MediaPhases, VaeBuilder, list_pieces};
use super::tiny::{
    FIRST_CONV, LAST_CONV, MEMORY_BLOCKS, PROGRAM_PREFIX, STAGES, TinyDecoderConfig, growth_layer,
    memory_block, stage_conv,
};
use crate::video_model::VideoModel;

/// The bound of the latents, which tanh approaches.
const LATENT_LIMIT: f64 = 3.0;

/// Builds the programs that decode the latents of a chunk in order, each with its number of latent frames.
pub(crate) fn tiny_decode_programs(
    m: &VideoModel,
    tiny: &TinyDecoderConfig,
    media: MediaPhases,
) -> Vec<Program> {
    let build = |(name, first, frames)| {
        decode_program(VaeBuilder::new(m, &m.stream.vae, name, media), tiny, first, frames)
    };
    list_pieces(m).into_iter().map(build).collect()
}

/// Builds a program that decodes `frames` latent frames of a chunk from frame `first` on. The first latent of
/// a scene passes all blocks like any other, and only its last frame is shown: the others precede the scene.
fn decode_program(mut v: VaeBuilder<'_>, tiny: &TinyDecoderConfig, first: u64, frames: u64) -> Program {
    let opens_scene = v.opens_scene();
    let z = v.emit_latent_grid(first, frames);
    v.graph.builder.set_attr("limit", LATENT_LIMIT);
    let z = v.graph.emit_op(Opcode::SoftClamp, &[z]);
    let x = v.emit_conv(&name_layer(FIRST_CONV), z, tiny.widths[0], Kernel::Space3);
    let mut x = v.graph.emit_op(Opcode::Relu, &[x]);
    for stage in 0..STAGES {
        for block in 0..MEMORY_BLOCKS {
            x = emit_memory_block(&mut v, &name_layer(memory_block(stage, block)), x, tiny.widths[stage]);
        }
        // The published order doubles rows and columns first. A convolution of single cells gives the same
        // values before that, from a quarter of the cells.
        let (grown, width) = (tiny.frames[stage], tiny.widths[stage]);
        let layer = format!("{}.conv", name_layer(growth_layer(stage)));
        x = v.emit_conv_without_bias(&layer, x, grown * width, Kernel::Point);
        if grown > 1 {
            v.graph.builder.set_attr("parts", grown);
            x = v.graph.emit_op(Opcode::ChannelsToFrames, &[x]);
        }
        if opens_scene && stage + 1 == STAGES {
            let last = v.frame_shape(x)[0] - 1;
            x = v.emit_rows(x, last, 1);
        }
        v.graph.builder.set_attr("scale", vec![2i64, 2]);
        x = v.graph.emit_op(Opcode::UpsampleNearest, &[x]);
        let layer = name_layer(stage_conv(stage));
        x = v.emit_conv_without_bias(&layer, x, tiny.widths[stage + 1], Kernel::Space3);
    }
    let x = v.graph.emit_op(Opcode::Relu, &[x]);
    let x = v.emit_conv(&name_layer(LAST_CONV), x, 3, Kernel::Space3);
    // Its pixels are 0 to 1, and those of all decoders here −1 to 1.
    let scale = v.graph.emit_weight(&format!("vae.{PROGRAM_PREFIX}pixel_scale"), &[3], "whole", 1);
    let shift = v.graph.emit_weight(&format!("vae.{PROGRAM_PREFIX}pixel_shift"), &[3], "whole", 1);
    let pixels = v.graph.emit_op(Opcode::ScaleShift, &[x, scale, shift]);
    v.finish_pixels(pixels, first)
}

/// Emits relu(convolutions(x, past) + x), where `past` is the frame before each frame of x.
fn emit_memory_block(v: &mut VaeBuilder<'_>, name: &str, x: ValueId, width: u64) -> ValueId {
    let y = v.emit_conv(&format!("{name}.conv.0"), x, width, Kernel::Space3Past);
    let y = v.graph.emit_op(Opcode::Relu, &[y]);
    let y = v.emit_conv(&format!("{name}.conv.2"), y, width, Kernel::Space3);
    let y = v.graph.emit_op(Opcode::Relu, &[y]);
    let y = v.emit_conv_sum(&format!("{name}.conv.4"), y, width, Kernel::Space3, Some(x));
    v.graph.emit_op(Opcode::Relu, &[y])
}

fn name_layer(position: usize) -> String {
    format!("{PROGRAM_PREFIX}decoder.{position}")
}
