//! Checkpoints as they are published: every form of folder gives the same generator, and what cannot
//! stream is refused with its reason.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;
use tessera::checkpoint::{CheckpointFolder, Form, Part, Preset};
use tessera::checkpoint_report::{CheckpointReport, suggest_presets};
use tessera::{Model, Overrides};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{ExpectedWeight, PixelDecoder, StreamConfig, WanConfig, expected_weights};
use tessera_weights::ExpectedTensor;

/// A generator with one block, of the smallest width that can be derived from tensors.
const CONFIG: &str = r#"{"_class_name":"WanModel","model_type":"t2v","dim":128,"ffn_dim":16,"freq_dim":16,"in_dim":16,
    "out_dim":16,"num_heads":1,"num_layers":1,"text_dim":4096,"text_len":512}"#;
const DIFFUSERS_CONFIG: &str = r#"{"_class_name":"WanTransformer3DModel","attention_head_dim":128,"num_attention_heads":1,
    "ffn_dim":16,"freq_dim":16,"in_channels":16,"out_channels":16,"num_layers":1,"text_dim":4096}"#;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/torch-checkpoints").join(name)
}

fn wan() -> WanConfig {
    WanConfig::parse("c", CONFIG).unwrap()
}

fn expected() -> Vec<ExpectedTensor> {
    let tensor =
        |w: ExpectedWeight| ExpectedTensor { name: w.name, aliases: vec![w.diffusers_name], shape: w.shape };
    expected_weights(&wan()).into_iter().map(tensor).collect()
}

/// Writes the tensors that `choose` keeps, under the names that it gives. Values depend on the index.
fn write_generator(path: &Path, choose: impl Fn(&ExpectedWeight) -> Option<String>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let weights = expected_weights(&wan());
    let bytes = |i: usize, w: &ExpectedWeight| {
        vec![u8::try_from(i % 60).unwrap(); 2 * w.shape.iter().product::<u64>() as usize]
    };
    let data: Vec<Vec<u8>> = weights.iter().enumerate().map(|(i, w)| bytes(i, w)).collect();
    let views = weights.iter().zip(&data).filter_map(|(w, bytes)| {
        let shape = w.shape.iter().map(|n| *n as usize).collect();
        Some((choose(w)?, TensorView::new(Dtype::BF16, shape, bytes).unwrap()))
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn write_tensors(path: &Path, tensors: &[(&str, &[usize])]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let data: Vec<Vec<u8>> = tensors.iter().map(|(_, s)| vec![0; 2 * s.iter().product::<usize>()]).collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((n, s), b)| (*n, TensorView::new(Dtype::BF16, s.to_vec(), b).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Writes a full folder of an original release.
fn write_original(dir: &Path) {
    write(&dir.join("config.json"), CONFIG);
    write_generator(&dir.join("diffusion_pytorch_model.safetensors"), |w| Some(w.name.clone()));
    fs::copy(fixture("dtypes.pt"), dir.join("Wan2.1_VAE.pth")).unwrap();
    fs::copy(fixture("dtypes.pt"), dir.join("models_t5_umt5-xxl-enc-bf16.pth")).unwrap();
    write(&dir.join("google/umt5-xxl/tokenizer.json"), "{}");
}

/// Writes a full pipeline of diffusers, with the generator in two shards.
fn write_pipeline(dir: &Path) {
    write(&dir.join("model_index.json"), "{}");
    let transformer = dir.join("transformer");
    write(&transformer.join("config.json"), DIFFUSERS_CONFIG);
    let shard_of = |w: &ExpectedWeight| 1 + usize::from(w.name.starts_with("blocks."));
    let file = |shard: usize| format!("diffusion_pytorch_model-0000{shard}-of-00002.safetensors");
    for shard in [1, 2] {
        write_generator(&transformer.join(file(shard)), |w| {
            (shard_of(w) == shard).then(|| w.diffusers_name.clone())
        });
    }
    let map: Vec<String> = expected_weights(&wan())
        .iter()
        .map(|w| format!("\"{}\":\"{}\"", w.diffusers_name, file(shard_of(w))))
        .collect();
    let index = format!("{{\"weight_map\":{{{}}}}}", map.join(","));
    write(&transformer.join("diffusion_pytorch_model.safetensors.index.json"), &index);
    write_tensors(
        &dir.join("vae/diffusion_pytorch_model.safetensors"),
        &[("post_quant_conv.weight", &[16, 16])],
    );
    write_tensors(&dir.join("text_encoder/model.safetensors"), &[("shared.weight", &[4, 8])]);
    write(&dir.join("tokenizer/spiece.model"), "x");
}

fn recognise(path: &Path) -> CheckpointFolder {
    CheckpointFolder::recognise(path).unwrap()
}

fn with_preset(preset: Preset) -> Overrides {
    Overrides { preset: Some(preset), ..Overrides::default() }
}

fn single(result: Result<impl Sized, Diagnostics>) -> Diagnostic {
    let mut ds = result.err().unwrap();
    assert_eq!(ds.len(), 1, "{ds:#?}");
    ds.remove(0)
}

#[test]
fn every_form_of_one_generator_gives_the_same_weights_and_dimensions() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    write_original(&at("original"));
    write_pipeline(&at("pipeline"));
    let prefixed = |prefix: &'static str| move |w: &ExpectedWeight| Some(format!("{prefix}{}", w.name));
    write_generator(&at("krea/krea-realtime-video-14b.safetensors"), prefixed("model."));
    write_generator(&at("packed/model.safetensors"), prefixed("model.diffusion_model."));
    write_generator(&at("extra.safetensors"), |w| {
        Some(if w.name == "head.head.bias" { w.name.clone() } else { format!("model.{}", w.name) })
    });
    let unlike = recognise(&at("extra.safetensors")).open_part(Part::Generator, &expected());
    assert_eq!(single(unlike).code.id, "T0506", "a tensor without the others' prefix is not dropped");
    write(&at("tessera/config.json"), CONFIG);
    write(&at("tessera/stream.toml"), "preset = \"self-forcing\"\n");
    write_generator(&at("tessera/any-name.safetensors"), prefixed(""));
    let forms = [
        ("original", Form::OriginalWan),
        ("pipeline", Form::DiffusersPipeline),
        ("pipeline/transformer", Form::DiffusersTransformer),
        ("krea", Form::Checkpoint),
        ("krea/krea-realtime-video-14b.safetensors", Form::Checkpoint),
        ("packed", Form::Checkpoint),
        ("tessera", Form::Tessera),
    ];
    let mut digests = Vec::new();
    for (name, form) in forms {
        let found = recognise(&at(name));
        assert_eq!(found.form, form, "{name}");
        assert_eq!(found.read_wan_config().unwrap(), wan(), "{name}");
        digests.push(found.open_part(Part::Generator, &expected()).unwrap().content_digest(1));
    }
    assert!(digests.iter().all(|d| *d == digests[0]));
    for name in ["original", "pipeline", "pipeline/transformer"] {
        assert!(Part::PUBLISHED.iter().all(|part| recognise(&at(name)).part(*part).is_some()), "{name}");
    }
}

#[test]
fn a_checkpoint_borrows_vae_and_text_encoder_from_the_release_beside_it() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("checkpoints/self_forcing_dmd.safetensors");
    write_generator(&file, |w| Some(format!("generator_ema.model.{}", w.name)));
    let alone = recognise(&file);
    assert_eq!(alone.require(Part::Vae).unwrap_err().code.id, "T0070");
    write_original(&dir.path().join("wan_models/Wan2.1-T2V-1.3B"));
    let found = recognise(&file);
    let vae = &found.part(Part::Vae).unwrap().source;
    assert!(vae.ends_with("wan_models/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"), "{}", vae.display());
    assert!(found.part(Part::Tokenizer).is_some() && found.part(Part::TextEncoder).is_some());
    assert_eq!(found.open_generator().unwrap().prefix, "generator_ema.model.");
}

#[test]
fn a_checkpoint_of_pytorch_plans_and_opens_under_a_preset() {
    let dir = TempDir::new().unwrap();
    fs::copy(fixture("self_forcing.pt"), dir.path().join("self_forcing_dmd.pt")).unwrap();
    let config = r#"{"dim":12,"ffn_dim":8,"freq_dim":16,"in_dim":4,"out_dim":4,"num_heads":1,"num_layers":1,
        "text_dim":20,"text_len":7}"#;
    write(&dir.path().join("config.json"), config);
    // The tiny generator fits neither the VAE nor the text encoder of the preset.
    let parts = "[text]\nencoder = \"none\"\n[decoder]\nkind = \"none\"\n";
    let generator_only = dir.path().join("generator-only.toml");
    write(&generator_only, parts);
    let overrides = Overrides { stream_file: Some(generator_only), ..with_preset(Preset::SelfForcing) };
    let model = Model::open(dir.path(), &overrides).unwrap();
    assert_eq!((model.video.stream.window_frames, model.video.stream.width), (21, 832));
    let weights = model.open_weights().unwrap();
    let reference = tessera_weights::WeightFiles::open_file(&fixture("self_forcing.safetensors")).unwrap();
    let reference = reference.resolve_as_is().unwrap();
    for name in reference.tensor_names() {
        assert_eq!(weights.read_tensor(name).unwrap(), reference.read_whole_f32(name).unwrap(), "{name}");
    }
    let stream = dir.path().join("elsewhere.toml");
    write(&stream, &format!("preset = \"longlive\"\n[video]\nwidth = 160\nheight = 96\n{parts}"));
    let elsewhere = Overrides { stream_file: Some(stream), ..Overrides::default() };
    let model = Model::open(dir.path(), &elsewhere).unwrap();
    assert_eq!((model.video.stream.window_frames, model.video.stream.width), (12, 160));
    assert_eq!(single(Model::open(dir.path(), &Overrides::default())).code.id, "T0076");
    let wide = Overrides { stream_file: Some(fixture("none.toml")), ..Overrides::default() };
    assert_eq!(single(Model::open(dir.path(), &wide)).code.id, "T0010");
}

#[test]
fn a_release_is_refused_for_streaming_and_still_described() {
    let dir = TempDir::new().unwrap();
    write_original(dir.path());
    let d = single(Model::open(dir.path(), &with_preset(Preset::SelfForcing)));
    assert_eq!(d.code.id, "T0072");
    let report = CheckpointReport::inspect(dir.path()).unwrap();
    assert_eq!((report.parts.len(), report.missing.len()), (4, 0), "{report:#?}");
    assert_eq!(report.problems.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0072"]);
    assert!(report.next_command.is_none() && report.generator.unwrap().layers == 1);
    assert_eq!((report.parts[0].form, report.parts[1].form), ("safetensors", "PyTorch"));
    // The name of the weights says the same where the other parts were not downloaded.
    let alone = TempDir::new().unwrap();
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(dir.path().join(file), alone.path().join(file)).unwrap();
    }
    assert_eq!(single(Model::open(alone.path(), &with_preset(Preset::LongLive))).code.id, "T0072");
    // A class that names a causal model, or a stream config, says that the weights were replaced.
    write(&dir.path().join("config.json"), &CONFIG.replace("WanModel", "CausalWanModel"));
    Model::open(dir.path(), &with_preset(Preset::SelfForcing)).unwrap();
    write(&dir.path().join("config.json"), CONFIG);
    write(&dir.path().join("stream.toml"), "preset = \"self-forcing\"\n");
    Model::open(dir.path(), &Overrides::default()).unwrap();
}

#[test]
fn what_cannot_stream_is_refused_with_its_reason() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let preset = with_preset(Preset::SelfForcing);
    write_original(&at("wide"));
    write(&at("wide/config.json"), &CONFIG.replace("\"in_dim\":16", "\"in_dim\":36"));
    fs::remove_file(at("wide/Wan2.1_VAE.pth")).unwrap();
    write_tensors(&at("wide/Wan2.2_VAE.pth"), &[("conv2.weight", &[48, 48, 1, 1, 1])]);
    let patch: (&str, &[usize]) = ("model.patch_embedding.weight", &[128, 36, 1, 2, 2]);
    write_tensors(&at("i2v.safetensors"), &[patch]);
    write_tensors(&at("lora.safetensors"), &[("blocks.0.self_attn.q.lora_A.weight", &[4, 128])]);
    write_tensors(&at("two/a.safetensors"), &[patch]);
    write_tensors(&at("two/b.safetensors"), &[patch]);
    write(
        &at("pointer/model.safetensors"),
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n",
    );
    write(&at("partial/.cache/huggingface/download/x.incomplete"), "");
    write(&at("partial/transformer/config.json"), &DIFFUSERS_CONFIG.replace("WanT", "CausalWanT"));
    fs::create_dir(at("nothing")).unwrap();
    fs::copy(fixture("code.pt"), at("code.pt")).unwrap();
    for (name, code, says) in [
        ("i2v.safetensors", "T0073", "36 input channels"),
        ("lora.safetensors", "T0075", "1 of 1 tensors"),
        ("two", "T0077", "2 checkpoints"),
        ("pointer", "T0513", "99 bytes"),
        ("code.pt", "T0510", "nothing was executed"),
        ("nothing", "T0070", "expected"),
    ] {
        let d = single(Model::open(&at(name), &preset));
        assert!(
            d.code.id == code && d.labels[0].message.contains(says) && d.hint.is_some(),
            "{name}: {d:#?}"
        );
    }
    // The class of the config is read before its dimensions.
    let release = recognise(&at("wide"));
    assert_eq!(single(release.read_wan_config()).code.id, "T0073");
    assert_eq!(single(release.open_files(Part::Vae)).code.id, "T0074");
    let partial = Model::open(&at("partial"), &preset).unwrap();
    let d = single(partial.open_weights());
    assert!(d.code.id == "T0071" && d.labels[0].message.contains("x.incomplete"), "{d:#?}");
}

#[test]
fn a_missing_shard_and_a_missing_tensor_are_named() {
    let dir = TempDir::new().unwrap();
    write_pipeline(dir.path());
    fs::remove_file(dir.path().join("transformer/diffusion_pytorch_model-00002-of-00002.safetensors"))
        .unwrap();
    let d = single(recognise(dir.path()).open_part(Part::Generator, &expected()));
    assert!(d.code.id == "T0501" && d.notes[0].contains("00002-of-00002"), "{d:#?}");
    let file = dir.path().join("krea.safetensors");
    write_generator(&file, |w| (w.name != "head.head.bias").then(|| format!("model.{}", w.name)));
    let d = single(recognise(&file).open_part(Part::Generator, &expected()));
    assert!(d.notes.iter().any(|n| n.starts_with("missing: model.head.head.bias")), "{d:#?}");
}

#[test]
fn names_of_folders_move_their_preset_to_the_front() {
    let mut wan = wan();
    let first = |path: &str, wan: &WanConfig| suggest_presets(Path::new(path), wan).first().copied();
    assert_eq!(first("/m/self_forcing_dmd.pt", &wan), None);
    wan.dim = 1536;
    for (path, preset) in [
        ("/m/x.pt", Preset::SelfForcing),
        ("/m/LongLive-1.3B/models/longlive_base.pt", Preset::LongLive),
        ("/m/wan_causal_dmd_v2v/model.pt", Preset::StreamDiffusionV2),
        ("/m/checkpoints/self_forcing_dmd.pt", Preset::SelfForcing),
    ] {
        assert_eq!(first(path, &wan), Some(preset), "{path}");
    }
    wan.dim = 5120;
    assert_eq!(first("/m/krea-realtime-video-14b.safetensors", &wan), Some(Preset::KreaRealtime));
}

#[test]
fn a_report_on_the_demo_model_needs_nothing_more() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let report = CheckpointReport::inspect(&demo).unwrap();
    assert!(report.problems.is_empty() && report.missing.is_empty(), "{report:#?}");
    assert!(report.next_command.unwrap().starts_with("tessera stream "));
    assert_eq!(CheckpointReport::inspect(Path::new("/nowhere/at/all")).unwrap_err().code.id, "T0010");
}

#[test]
fn a_tiny_decoder_beside_a_checkpoint_is_a_part_and_no_second_generator() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let decoder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-decoder/taew2_1.pth");
    write_generator(&at("self_forcing_dmd.safetensors"), |w| Some(w.name.clone()));
    fs::copy(&decoder, at("taew2_1.pth")).unwrap();
    let found = recognise(dir.path());
    assert!(found.candidates.len() == 1 && found.part(Part::TinyDecoder).is_some(), "{found:#?}");
    // As the model itself it is refused, under whichever name.
    fs::copy(&decoder, at("other.pth")).unwrap();
    let d = single(Model::open(&at("other.pth"), &with_preset(Preset::SelfForcing)));
    assert!(d.code.id == "T0080" && d.labels[0].message.contains("4 channels"), "{d:#?}");
    // The generator of the preset has 16 channels of latents, which this decoder does not read.
    let overrides = Overrides { decoder_file: Some(decoder), ..with_preset(Preset::SelfForcing) };
    let d = single(Model::open(&at("self_forcing_dmd.safetensors"), &overrides));
    assert!(
        d.code.id == "T0415" && d.labels[0].message.contains("4 channels; the generator has 16"),
        "{d:#?}"
    );
}

#[test]
fn the_settings_of_a_tiny_decoder_survive_the_text_of_a_plan() {
    let wan = wan();
    let text = "preset = \"self-forcing\"\n[video]\nwidth = 160\nheight = 96\n[decoder]\nkind = \"tiny\"\n\
                file = \"a \\\"b\\\".pth\"\n[decoder.tiny]\nwidths = [8, 6, 4, 2]\nframes = [2, 1, 2]\n";
    let stream = StreamConfig::parse("s", text, &wan).unwrap();
    assert_eq!((stream.decoder, stream.first_chunk_frames()), (PixelDecoder::Tiny, 9));
    assert_eq!(StreamConfig::parse("t", &stream.to_toml(), &wan).unwrap(), stream);
    // Four frames of a latent are not the eight of three doublings.
    let ds = StreamConfig::parse("s", &text.replace("[2, 1, 2]", "[2, 2, 2]"), &wan).unwrap_err();
    assert!(ds[0].code.id == "T0411" && ds[0].message.contains("stride of [8, 8, 8]"), "{ds:#?}");
}
