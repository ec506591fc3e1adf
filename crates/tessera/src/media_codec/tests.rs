//! Compares the VAE's programs with diffusers, and the ways to decode a stream with each other.

mod tiny;

use std::path::{Path, PathBuf};

use tessera_base::Diagnostics;
use tessera_models::{VIDEO_DEVICE_PHASES, VaeConfig, WordEncoder};
use tessera_plan::{Mapping, MediaPlacement};
use tessera_runtime::wire::Dtype;
use tessera_weights::{WeightFiles, WeightSet};

use super::*;
use crate::leader_memory::LeaderMemory;
use crate::pixel_placement::place_pixels;
use crate::plan::plan_model;
use crate::text_encoder::PromptEncoder;
use crate::video_encoder::VideoEncoder;
use crate::weights_origin::WeightsBase;

/// A VAE with inputs and outputs that diffusers computed, and the plan of a generator of the same latents.
struct VaeCase {
    plan: Plan,
    dir: PathBuf,
    expected: WeightSet,
    channels: usize,
    /// Rows and columns of latents.
    grid: [usize; 2],
}

impl VaeCase {
    fn open(dir: &Path, regime: &str) -> VaeCase {
        VaeCase::open_with_width(dir, regime, None)
    }

    /// Opens a case, with more channels than the file's if a width is given.
    fn open_with_width(dir: &Path, regime: &str, base_dim: Option<u64>) -> VaeCase {
        let config = std::fs::read_to_string(dir.join("vae/config.json")).unwrap();
        let mut vae = VaeConfig::parse("vae/config.json", &config).unwrap();
        vae.base_dim = base_dim.unwrap_or(vae.base_dim);
        let decoder = format!("[input]\nvideo = true\n[decoder]\nkind = \"wan_vae\"\n{}", vae_table(&vae));
        VaeCase::with_decoder(dir, regime, &decoder)
    }

    /// Opens a folder whose decoder these settings describe.
    fn with_decoder(dir: &Path, regime: &str, decoder: &str) -> VaeCase {
        let expected =
            WeightFiles::open_file(&dir.join("expected.safetensors")).unwrap().resolve_as_is().unwrap();
        let shape = expected.tensor_shape("latents").unwrap().to_vec();
        let wan = format!(
            r#"{{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1,"in_dim":{0},"out_dim":{0},"text_len":2,"text_dim":1}}"#,
            shape[0]
        );
        let stream = format!(
            "[video]\nwidth = {}\nheight = {}\n[cache]\nmode = \"{regime}\"\n[text]\nencoder = \"words\"\n{decoder}",
            shape[3] * 8,
            shape[2] * 8,
        );
        let video = VideoModel::parse(("config.json", &wan), ("stream.toml", &stream)).unwrap();
        let plan = plan_model(&video, "vae", "", &Mapping::default()).unwrap_or_else(|ds| panic!("{ds:#?}"));
        let (channels, grid) = (shape[0] as usize, [shape[2] as usize, shape[3] as usize]);
        VaeCase { plan, dir: dir.to_path_buf(), expected, channels, grid }
    }

    fn load_codec(&self) -> MediaCodec {
        self.load_codec_from(WeightsBase::Files)
    }

    fn load_codec_from(&self, weights: WeightsBase) -> MediaCodec {
        let words = WordEncoder::new("a\n", vec![1.0], 1, 2).unwrap();
        let vae = self.open_weights_from(weights).unwrap_or_else(|ds| panic!("{ds:#?}"));
        let text = PromptRows::load(&self.plan, PromptEncoder::Words(words)).unwrap();
        let mut codec = MediaCodec::load(&self.plan, text, Some(vae), None).unwrap();
        codec.poison_temporaries();
        codec
    }

    fn open_weights(&self) -> Result<VaeWeights, Diagnostics> {
        self.open_weights_from(WeightsBase::Files)
    }

    fn open_weights_from(&self, weights: WeightsBase) -> Result<VaeWeights, Diagnostics> {
        let video = &self.plan.video;
        VaeWeights::open(&self.dir, &video.wan, &video.stream, weights)
    }

    fn load_encoder(&self) -> VideoEncoder {
        let vae = self.open_weights().unwrap();
        VideoEncoder::load(&self.plan, Some(vae), None).unwrap()
    }

    /// Returns frames [height, width, 3] of the file's video, whose planes are [3, frames, height, width].
    fn video_frames(&self, range: std::ops::Range<usize>) -> Vec<f32> {
        let (planes, frames) =
            (self.tensor("video"), self.expected.tensor_shape("video").unwrap()[1] as usize);
        let picture = self.grid[0] * self.grid[1] * 64;
        range
            .flat_map(|f| (0..picture).flat_map(move |i| [0, 1, 2].map(|c| (c * frames + f) * picture + i)))
            .map(|at| planes[at])
            .collect()
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        self.expected.read_whole_f32(name).unwrap()
    }

    /// Returns the latents of a chunk as the generator's tokens, from the tensor [C, F, H, W] of the file.
    fn chunk_latents(&self, chunk: usize) -> Tensors {
        let (all, frames) =
            (self.tensor("latents"), self.expected.tensor_shape("latents").unwrap()[1] as usize);
        let per_chunk = self.plan.video.stream.chunk_frames as usize;
        let tokens = self.to_tokens(&all, frames, chunk * per_chunk..(chunk + 1) * per_chunk);
        let video = &self.plan.video;
        let shape = [video.chunk_tokens(), video.wan.token_width()];
        Tensors(vec![Tensor::from_f32("latents", &shape, &tokens).unwrap()])
    }

    fn to_tokens(&self, latents: &[f32], frames: usize, range: std::ops::Range<usize>) -> Vec<f32> {
        let [h, w] = self.grid;
        let mut tokens = Vec::new();
        for (frame, row, column) in
            range.flat_map(|f| (0..h / 2).flat_map(move |y| (0..w / 2).map(move |x| (f, y, x))))
        {
            for (dy, dx) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let cell = (2 * row + dy) * w + 2 * column + dx;
                tokens.extend((0..self.channels).map(|c| latents[(c * frames + frame) * h * w + cell]));
            }
        }
        tokens
    }
}

fn vae_table(vae: &VaeConfig) -> String {
    format!(
        "[decoder.vae]\nbase_dim = {}\nz_dim = {}\ndim_mult = {:?}\nres_blocks = {}\ntemporal_downsample = {:?}\n\
         latents_mean = {:?}\nlatents_std = {:?}\n",
        vae.base_dim,
        vae.z_dim,
        vae.dim_mult,
        vae.res_blocks,
        vae.temporal_downsample,
        vae.latents_mean,
        vae.latents_std
    )
}

/// Returns the largest difference, as a part of the largest value.
fn relative_error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let far = found.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max);
    far / expected.iter().map(|x| f64::from(x.abs())).fold(0.0, f64::max)
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-vae")
}

/// Decodes all chunks in a regime, and compares the frames that the file holds and the anchor.
fn compare_with_diffusers(dir: &Path, regime: &str) -> [f64; 2] {
    let case = VaeCase::open(dir, regime);
    let mut codec = case.load_codec();
    let pixels = compare_pixels(&case, &mut codec);
    let mut anchor_error = 0.0;
    if regime == "recompute" {
        let (planes, picture) = (case.tensor("picture"), case.grid[0] * case.grid[1] * 64);
        let pixels: Vec<f32> =
            (0..picture).flat_map(|i| [0, 1, 2].map(|c| planes[c * picture + i])).collect();
        let encoded = codec.run_program("encode", "pixels", &pixels, "latents").unwrap();
        anchor_error = relative_error(&encoded, &case.to_tokens(&case.tensor("anchor"), 1, 0..1));
    }
    [pixels, anchor_error]
}

/// Decodes all chunks, with the anchors of the recompute regime between them, and returns the difference of the
/// frames that the file holds.
fn compare_pixels(case: &VaeCase, codec: &mut MediaCodec) -> f64 {
    let chunks = case.expected.tensor_shape("latents").unwrap()[1] / case.plan.video.stream.chunk_frames;
    let mut pixels = Vec::new();
    for chunk in 0..chunks as u32 {
        let latents = case.chunk_latents(chunk as usize);
        if case.plan.video.stream.recompute {
            codec.build_context(chunk, &latents, chunk == 0).unwrap();
        }
        let decoded = codec.decode_pixels(chunk, &latents, chunk == 0).unwrap();
        let frames = decoded.len() / (case.grid[0] * case.grid[1] * 64 * 3);
        assert_eq!(frames, if chunk == 0 { 9 } else { 12 });
        pixels.extend(decoded);
    }
    let (frames, expected) = (case.tensor("frames"), case.tensor("pixels"));
    let picture = case.grid[0] * case.grid[1] * 64;
    let found: Vec<f32> = (0..3)
        .flat_map(|colour| {
            let pixels = &pixels;
            frames.iter().flat_map(move |f| {
                pixels[*f as usize * picture * 3..][..picture * 3].iter().skip(colour).step_by(3).copied()
            })
        })
        .collect();
    relative_error(&found, &expected)
}

#[test]
fn streamed_decoding_and_the_anchor_equal_diffusers() {
    for regime in ["resident", "recompute"] {
        let [pixels, anchor] = compare_with_diffusers(&fixture(), regime);
        assert!(pixels <= 2e-5 && anchor <= 2e-5, "{regime}: pixels {pixels:e}, anchor {anchor:e}");
    }
}

/// Encodes the file's video in chunks of these frames, and returns the difference from diffusers, which
/// encodes it as a whole.
fn compare_encoded_video(dir: &Path, chunks: &[usize]) -> f64 {
    let case = VaeCase::open(dir, "resident");
    let mut encoder = case.load_encoder();
    let (mut tokens, mut done) = (Vec::new(), 0);
    for frames in chunks {
        let pixels = case.video_frames(done..done + frames);
        tokens.extend(encoder.encode_chunk(&pixels, done == 0).unwrap());
        done += frames;
    }
    let latents = case.expected.tensor_shape("encoded").unwrap()[1] as usize;
    relative_error(&tokens, &case.to_tokens(&case.tensor("encoded"), latents, 0..latents))
}

#[test]
fn a_video_that_is_encoded_in_chunks_equals_diffusers_on_the_whole() {
    for chunks in [&[13][..], &[9, 4], &[1, 12], &[1, 4, 4, 4]] {
        let error = compare_encoded_video(&fixture(), chunks);
        assert!(error <= 2e-5, "{chunks:?}: {error:e}");
    }
}

#[test]
fn an_encoded_scene_depends_on_its_own_frames_alone() {
    let case = VaeCase::open(&fixture(), "resident");
    let mut encoder = case.load_encoder();
    let first = encoder.encode_chunk(&case.video_frames(0..9), true).unwrap();
    let later = encoder.encode_chunk(&case.video_frames(9..13), false).unwrap();
    assert!(encoder.encode_chunk(&case.video_frames(0..9), true).unwrap() == first);
    assert!(encoder.encode_chunk(&case.video_frames(9..13), false).unwrap() == later);
    // Without the frames before it, the same group has another latent.
    encoder.encode_chunk(&case.video_frames(12..13), true).unwrap();
    let other = encoder.encode_chunk(&case.video_frames(9..13), false).unwrap();
    assert!(relative_error(&other, &later) > 1e-3, "the history has no effect");
    // Eight frames are no whole latents of an opening scene, and neither are three of a later one.
    for (frames, opens_scene) in [(0..8, true), (0..0, true), (0..3, false)] {
        let refused = encoder.encode_chunk(&case.video_frames(frames.clone()), opens_scene).unwrap_err();
        assert_eq!(refused.code.id, "T0016", "{frames:?}");
    }
}

#[test]
fn programs_for_a_gpu_encode_the_same_latents() {
    let case = VaeCase::open(&fixture(), "resident");
    let mut by_cpu = case.load_encoder();
    for phase in VIDEO_DEVICE_PHASES {
        let program = case.plan.sealed.rank_program(phase, Rank(0)).unwrap();
        assert!(program.captured_graph().unwrap().is_some(), "{phase} is captured");
    }
    // The plan computes in f32, so that a CPU can run what is meant for a GPU.
    let seat = MeshRank { mesh: *case.plan.sealed.mesh(), rank: Rank(0) };
    let backend = Box::new(open_cpu_backend(seat, CoreUse::All).unwrap());
    let vae = Some(case.open_weights().unwrap());
    let mut for_gpu = VideoEncoder::load_into(backend, &case.plan, VIDEO_DEVICE_PHASES, vae).unwrap();
    // A run before the first scene leaves nothing behind.
    for_gpu.warm_up(&case.plan).unwrap();
    for (frames, opens_scene) in [(0..9, true), (9..13, false), (0..1, true)] {
        let pixels = case.video_frames(frames.clone());
        let [a, b] = [&mut by_cpu, &mut for_gpu].map(|e| e.encode_chunk(&pixels, opens_scene).unwrap());
        assert!(a == b, "frames {frames:?}");
    }
}

/// A VAE that is too large to commit; tools/fixtures/make_vae.py says how to make one.
#[test]
#[ignore = "needs a folder that tools/fixtures/make_vae.py has written"]
fn the_vae_of_a_folder_equals_diffusers() {
    #[allow(clippy::disallowed_methods, reason = "the developer names a folder of their own")]
    let dir = std::env::var("TESSERA_VAE_FOLDER").expect("TESSERA_VAE_FOLDER names the folder");
    let [pixels, anchor] = compare_with_diffusers(Path::new(&dir), "recompute");
    let encoded = compare_encoded_video(Path::new(&dir), &[9, 4]);
    println!("pixels {pixels:e}, anchor {anchor:e}, encoded video {encoded:e}");
    assert!(
        pixels <= 2e-5 && anchor <= 2e-5 && encoded <= 2e-5,
        "pixels {pixels:e}, anchor {anchor:e}, encoded video {encoded:e}"
    );
}

#[test]
fn a_new_scene_forgets_the_frames_before_it() {
    let case = VaeCase::open(&fixture(), "resident");
    let mut codec = case.load_codec();
    let first = codec.decode_pixels(0, &case.chunk_latents(0), true).unwrap();
    codec.decode_pixels(1, &case.chunk_latents(1), false).unwrap();
    assert_eq!(codec.decode_pixels(2, &case.chunk_latents(0), true).unwrap(), first);
    let continued = codec.decode_pixels(3, &case.chunk_latents(0), false).unwrap();
    assert!(relative_error(&continued[..first.len()], &first) > 1e-2, "the history has no effect");
}

#[test]
fn a_late_context_does_not_decode_a_latent_twice() {
    let case = VaeCase::open(&fixture(), "recompute");
    let decode = |late: bool| {
        let mut codec = case.load_codec();
        codec.decode_pixels(0, &case.chunk_latents(0), true).unwrap();
        let latents = case.chunk_latents(1);
        let mut decoded = Vec::new();
        if late {
            decoded = codec.decode_pixels(1, &latents, false).unwrap();
        }
        let context = codec.build_context(1, &latents, false).unwrap();
        if !late {
            decoded = codec.decode_pixels(1, &latents, false).unwrap();
        }
        let next = codec.decode_pixels(2, &case.chunk_latents(2), false).unwrap();
        (decoded, context, next)
    };
    assert!(decode(false) == decode(true));
}

#[test]
fn programs_for_a_gpu_outside_of_the_mesh_decode_the_same_pixels() {
    let mut leader = VaeCase::open(&fixture(), "recompute");
    let mut by_leader = leader.load_codec();
    let outside = Mapping { media: MediaPlacement::Outside, ..Mapping::default() };
    leader.plan = plan_model(&leader.plan.video, "vae", "", &outside).unwrap();
    // The programs are those of a device, captured as graphs, and no call contains them.
    let decode = leader.plan.sealed.rank_program("decode.first", Rank(0)).unwrap();
    assert!(decode.captured_graph().unwrap().is_some(), "the decode is captured");
    let mut outside = leader.load_codec();
    for chunk in 0..2 {
        let latents = leader.chunk_latents(chunk);
        let opens = chunk == 0;
        let [a, b] = [&mut by_leader, &mut outside].map(|codec| {
            let context = codec.build_context(chunk as u32, &latents, opens).unwrap();
            (context, codec.decode_pixels(chunk as u32, &latents, opens).unwrap())
        });
        assert!(a == b, "chunk {chunk}");
    }
    // Nobody chooses a device for ranks on CPUs.
    assert_eq!(place_pixels(&leader.plan, None).unwrap(), None);
}

#[test]
fn the_leader_allocates_what_is_planned_for_its_programs() {
    // Packed weights are padded to whole panels of columns, which counts for the few channels of the fixture.
    let case = VaeCase::open_with_width(&fixture(), "recompute", Some(32));
    let codec = case.load_codec_from(WeightsBase::Synthetic(1));
    let planned = LeaderMemory::from_phases(&case.plan, |name| codec.loaded.contains_key(name));
    let allocated: u64 = codec.backend.memory_bytes().iter().sum();
    let deviation = allocated as f64 / planned.total_bytes() as f64 - 1.0;
    assert!(deviation.abs() <= 0.05, "{:?} bytes of {planned:?}", codec.backend.memory_bytes());
}

/// A call of a fast decoder returns the exact decode of a scene's first frame beside the frames.
#[test]
fn a_fast_decode_is_compared_with_the_exact_frame_which_is_not_delivered() {
    let mut codec = VaeCase::open(&fixture(), "resident").load_codec();
    let frames = |name: &str, count: usize, value: u8| {
        Tensor::new(name, Dtype::U8, &[count as u64, 2, 2, 3], vec![value; 12 * count]).unwrap()
    };
    let outputs = Tensors(vec![
        frames("pixels.exact", 1, 100),
        frames("pixels.first", 1, 101),
        frames("pixels.rest", 8, 50),
    ]);
    let delivered: Vec<&str> = delivered_pixels(&outputs).map(Tensor::name).collect();
    assert_eq!(delivered, ["pixels.first", "pixels.rest"]);
    let ratio = codec.check_fast_decode(0, &[101; 108], &outputs, true).unwrap();
    assert!((ratio.unwrap() - 48.13).abs() < 0.01);
    let other = Tensors(vec![frames("pixels.exact", 1, 200)]);
    let refused = codec.check_fast_decode(5, &[101; 108], &other, true).unwrap_err();
    assert_eq!(refused.code.id, "T0085");
    let ratio = codec.check_fast_decode(1, &[101; 108], &Tensors(Vec::new()), true).unwrap();
    assert_eq!(ratio, None, "an exact decoder has nothing to compare");
}
