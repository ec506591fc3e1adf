//! Places encoders on GPUs by their memory, without any GPU.

use std::path::PathBuf;

use tessera_models::{Umt5Config, VideoModel};
use tessera_plan::{DtypePolicy, Mapping, MediaPlacement};

use super::*;
use crate::plan::plan_model;
use crate::stream_options::TextOptions;
use crate::video_input::{VideoInput, VideoOrigin};
use crate::weights_origin::WeightsOrigin;

const TEXT: Encoder = Encoder {
    part: LeaderPart::Text,
    name: "the text encoder",
    flag: "--text-on",
    phases: &[TEXT_DEVICE_PHASE],
    on: EncoderDevice::Auto,
};
const VIDEO: Encoder = Encoder {
    part: LeaderPart::Video,
    name: "the encoder of the input video",
    flag: "--video-on",
    phases: &VIDEO_DEVICE_PHASES,
    on: EncoderDevice::Auto,
};

/// Bytes of a GiB.
const GIB: u64 = 1 << 30;

/// The GPU of a rank that needs 60 of 80 GiB, and one that decodes with 10 of 80 GiB.
fn gpus_of_leader() -> LeaderGpus {
    let memory =
        [(0, 60), (3, 10)].map(|(gpu, taken)| (gpu, GpuMemory { free: 80 * GIB, taken: taken * GIB }));
    LeaderGpus { own: Ok(0), pixels: Some(3), memory: memory.into() }
}

#[test]
fn an_encoder_must_fit_beside_what_else_runs_there() {
    let mut gpus = LeaderGpus { pixels: None, ..gpus_of_leader() };
    let refused = gpus.reserve_memory(&TEXT, 20 * GIB + 1).unwrap_err();
    assert_eq!(refused.code.id, "T0804");
    for part in ["20.00 GiB", "60.00 GiB of what else runs there", "GPU 0 has 80.00 GiB free"] {
        assert!(refused.message.contains(part), "{}", refused.message);
    }
    assert_eq!(gpus.reserve_memory(&TEXT, 20 * GIB).unwrap(), 0);
    let alone = BTreeMap::from([(0, GpuMemory { free: 0, taken: 0 })]);
    let refused = LeaderGpus { memory: alone, ..gpus }.reserve_memory(&TEXT, GIB).unwrap_err();
    assert!(!refused.message.contains("beside"), "{}", refused.message);
}

#[test]
fn two_encoders_must_fit_together() {
    let mut gpus = LeaderGpus { pixels: None, ..gpus_of_leader() };
    assert_eq!(gpus.reserve_memory(&VIDEO, 8 * GIB).unwrap(), 0);
    let refused = gpus.reserve_memory(&TEXT, 13 * GIB).unwrap_err();
    assert!(refused.message.contains("68.00 GiB of what else runs there"), "{}", refused.message);
    assert_eq!(gpus.reserve_memory(&TEXT, 12 * GIB).unwrap(), 0, "a refused encoder takes no memory");
}

#[test]
fn a_video_is_encoded_where_pixels_are_decoded_and_text_beside_the_rank() {
    let mut gpus = gpus_of_leader();
    assert_eq!(
        (gpus.reserve_memory(&VIDEO, 70 * GIB).unwrap(), gpus.reserve_memory(&TEXT, GIB).unwrap()),
        (3, 0)
    );
    let refused = gpus.reserve_memory(&VIDEO, 1).unwrap_err();
    assert!(refused.message.contains("80.00 GiB of what else runs there"), "{}", refused.message);
}

/// A model with a causal VAE and a UMT5 encoder whose files nobody reads.
fn model_with_encoders() -> Model {
    let wan = r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1,"in_dim":4,"out_dim":4,"text_len":4,"text_dim":8}"#;
    let stream = "[video]\nwidth = 64\nheight = 64\n[input]\nvideo = true\n[text]\nencoder = \"umt5\"\n[decoder]\n\
                  kind = \"wan_vae\"\n[decoder.vae]\nbase_dim = 4\nz_dim = 4\nlatents_mean = [0.0, 0.0, 0.0, 0.0]\n\
                  latents_std = [1.0, 1.0, 1.0, 1.0]\n";
    let umt5 = r#"{"model_type":"umt5","d_model":8,"d_kv":4,"d_ff":12,"num_heads":2,"num_layers":1,"vocab_size":11,
                   "relative_attention_num_buckets":8,"relative_attention_max_distance":20}"#;
    let mut video = VideoModel::parse(("config.json", wan), ("stream.toml", stream)).unwrap();
    video.set_text_encoder("umt5.json", Umt5Config::parse("umt5.json", umt5).unwrap()).unwrap();
    Model { name: "both".into(), dir: PathBuf::new(), video, weights: WeightsOrigin::default() }
}

fn plan_for(model: &Model, dtype: DtypePolicy, media: MediaPlacement) -> Plan {
    let mapping = Mapping { dtype, media, ..Mapping::default() };
    plan_model(&model.video, &model.name, "", &mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn options(text: EncoderDevice, video: EncoderDevice) -> StreamOptions {
    StreamOptions {
        video: Some(VideoInput { from: VideoOrigin::Feed, strength: 0.8, follows_motion: false }),
        video_on: video,
        text: TextOptions { on: text, unload: false },
        ..StreamOptions::default()
    }
}

#[test]
fn a_gpu_for_an_encoder_is_refused_if_the_ranks_run_on_cpus() {
    let model = model_with_encoders();
    let plan = plan_for(&model, DtypePolicy::F32, MediaPlacement::Leader);
    let place = |text, video| place_leader_programs(&plan, &model, &options(text, video), None);
    for device in [EncoderDevice::Auto, EncoderDevice::Cpu] {
        assert_eq!(place(device, device).unwrap(), (LeaderPlaces::default(), Vec::new()));
    }
    let refused = place(EncoderDevice::Gpu, EncoderDevice::Gpu).unwrap_err();
    let hints: Vec<&str> = refused.iter().filter_map(|d| d.hint.as_deref()).collect();
    assert!(refused.iter().all(|d| d.code.id == "T0018") && hints.len() == 2, "{refused:#?}");
    assert!(hints[0].contains("--video-on gpu") && hints[1].contains("--text-on gpu"), "{hints:?}");
    // Without a video nobody encodes frames.
    let without = StreamOptions { video: None, ..options(EncoderDevice::Auto, EncoderDevice::Gpu) };
    assert!(place_leader_programs(&plan, &model, &without, None).is_ok());
}

#[test]
fn gpus_have_kernels_for_both_encoders_in_every_place_of_the_pixels() {
    let model = model_with_encoders();
    for dtype in [DtypePolicy::F32, DtypePolicy::Bf16, DtypePolicy::Fp8] {
        for media in [MediaPlacement::Leader, MediaPlacement::Outside, MediaPlacement::Mesh] {
            let plan = plan_for(&model, dtype, media);
            for encoder in [VIDEO, TEXT] {
                let found = encoder.check_programs(&plan);
                assert!(found.is_ok(), "{} {dtype:?} {media:?}: {found:?}", encoder.name);
                let planned = encoder.device_bytes(&plan) - CudaBackend::overhead_bytes(0);
                assert!(planned > 0, "{} {dtype:?} {media:?}", encoder.name);
            }
        }
    }
}

#[test]
fn an_encoder_for_a_gpu_adds_nothing_to_the_memory_of_ranks_and_of_the_leaders_host() {
    let video = model_with_encoders();
    let mut plain = video.clone();
    plain.video.stream.takes_video = false;
    let [with, without] = [&video, &plain].map(|m| plan_for(m, DtypePolicy::Bf16, MediaPlacement::Leader));
    assert_eq!(with.memory_bytes(Rank(0))[..2], without.memory_bytes(Rank(0))[..2]);
    let on_cpu = LeaderMemory::from_phases(&with, |name| !name.ends_with(".device"));
    assert_eq!(LeaderMemory::from_plan(&with), on_cpu);
}
