//! Streams a model with a tiny decoder in every place where it can run, and refuses files that do not fit.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tessera::checkpoint_report::CheckpointReport;
use tessera::{Mapping, MediaPlacement, Model, Overrides, SceneCut, WeightsBase, WeightsOrigin, local, plan};
use tessera_base::Diagnostics;
use tessera_models::PixelDecoder;
use tessera_runtime::driver::StreamRequest;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn decoder_file() -> PathBuf {
    fixtures().join("tiny-decoder/taew2_1.pth")
}

/// Makes a model folder of a generator fixture, with the VAE fixture and with `decoder` in its settings.
fn model_folder(dir: &Path, decoder: &str) -> PathBuf {
    let (model, generator) = (dir.join("model"), fixtures().join("wan-odd"));
    fs::create_dir_all(model.join("vae")).unwrap();
    for file in ["config.json", "model.safetensors", "vocab.txt", "text_encoder.safetensors"] {
        fs::copy(generator.join(file), model.join(file)).unwrap();
    }
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(fixtures().join("wan-vae/vae").join(file), model.join("vae").join(file)).unwrap();
    }
    let stream = fs::read_to_string(generator.join("stream.toml")).unwrap();
    fs::write(model.join("stream.toml"), stream.replace("kind = \"none\"", decoder)).unwrap();
    model
}

fn open(model: &Path, recompute: bool, decoder: Option<PathBuf>) -> Result<Model, Diagnostics> {
    let overrides = Overrides {
        recompute: Some(recompute),
        decoder_file: decoder,
        steps: Some(vec![1000.0, 500.0]),
        ..Overrides::default()
    };
    Model::open(model, &overrides)
}

/// Streams four chunks, of which the last begins a scene, and returns the pixels of each.
fn stream_pixels(model: &Model, mesh: &str, media: MediaPlacement) -> Result<Vec<Vec<f32>>, Diagnostics> {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), media, ..Mapping::default() };
    let plan = Arc::new(plan::plan_model(&model.video, &model.name, "", &mapping)?);
    let requests = (0..4).map(|chunk| StreamRequest {
        prompt: (chunk == 0).then(|| "a red square".to_string()),
        cut: if chunk == 3 { SceneCut::Ordered } else { SceneCut::None },
        ..StreamRequest::default()
    });
    let mut pixels = Vec::new();
    local::run(&plan, model, 1, requests, |chunk| pixels.push(chunk.pixels.to_vec()))?;
    Ok(pixels)
}

fn single(result: Result<impl Sized, Diagnostics>) -> tessera_base::Diagnostic {
    match result {
        Ok(_) => panic!("a refusal was expected"),
        Err(ds) => ds.into_iter().next().unwrap(),
    }
}

/// Returns pixels as the bytes of a frame, which is how ranks return them.
fn to_bytes(pixels: &[Vec<f32>]) -> Vec<Vec<u8>> {
    let byte = |x: &f32| ((x + 1.0) * 127.5).round() as u8;
    pixels.iter().map(|chunk| chunk.iter().map(byte).collect()).collect()
}

#[test]
fn a_tiny_decoder_gives_the_same_frames_wherever_it_runs() {
    let dir = TempDir::new().unwrap();
    let folder = model_folder(dir.path(), "kind = \"tiny\"");
    fs::copy(decoder_file(), folder.join("taew2_1.pth")).unwrap();
    fs::remove_dir_all(folder.join("vae")).unwrap();
    let model = open(&folder, false, None).unwrap();
    assert_eq!(model.video.stream.tiny.widths, [12, 10, 6, 8], "the file states its own dimensions");
    let leader = to_bytes(&stream_pixels(&model, "tp=1", MediaPlacement::Leader).unwrap());
    // A scene begins with one frame of its first latent.
    let frames: Vec<usize> = leader.iter().map(|chunk| chunk.len() / (48 * 80 * 3)).collect();
    assert_eq!(frames, [9, 12, 12, 9]);
    assert!(leader[0].iter().any(|x| *x > 5 && *x < 250), "all pixels are clamped");
    for (mesh, media) in [
        ("tp=2", MediaPlacement::Mesh),
        ("tp=3", MediaPlacement::Mesh),
        ("tp=2", MediaPlacement::Replicas),
        ("tp=2,pp=2", MediaPlacement::Mesh),
    ] {
        let ranks = to_bytes(&stream_pixels(&model, mesh, media).unwrap());
        assert!(ranks == leader, "{mesh} with media {}", media.name());
    }
}

#[test]
fn the_recompute_regime_encodes_the_frames_of_a_tiny_decoder_with_the_vae() {
    let dir = TempDir::new().unwrap();
    let folder = model_folder(dir.path(), "kind = \"wan_vae\"");
    let model = open(&folder, true, Some(decoder_file())).unwrap();
    assert_eq!(model.video.stream.decoder, PixelDecoder::Tiny);
    let leader = to_bytes(&stream_pixels(&model, "tp=1", MediaPlacement::Leader).unwrap());
    let ranks = to_bytes(&stream_pixels(&model, "tp=3", MediaPlacement::Mesh).unwrap());
    assert!(ranks == leader, "the frames depend on who decodes");
    let vae = open(&folder, true, None).unwrap();
    let other = to_bytes(&stream_pixels(&vae, "tp=1", MediaPlacement::Leader).unwrap());
    assert!(other != leader, "the file was not used");
    fs::remove_file(folder.join("vae/diffusion_pytorch_model.safetensors")).unwrap();
    let d = single(stream_pixels(&model, "tp=1", MediaPlacement::Leader));
    assert!(d.code.id == "T0070" && d.notes[0].contains("--cache resident"), "{d:#?}");
    // Without an anchor to encode the decoder is enough, and with synthetic weights no file is.
    let resident = open(&folder, false, Some(decoder_file())).unwrap();
    stream_pixels(&resident, "tp=1", MediaPlacement::Leader).unwrap();
    let synthetic = WeightsOrigin { base: WeightsBase::Synthetic(7), ..WeightsOrigin::default() };
    let model = model.with_weights(synthetic);
    let leader = stream_pixels(&model, "tp=1", MediaPlacement::Leader).unwrap();
    assert!(leader.iter().flatten().all(|x| x.is_finite()));
    let ranks = stream_pixels(&model, "tp=2", MediaPlacement::Mesh).unwrap();
    assert!(to_bytes(&ranks) == to_bytes(&leader));
}

#[test]
fn a_file_that_is_no_tiny_decoder_of_the_model_is_refused_by_name() {
    let dir = TempDir::new().unwrap();
    let folder = model_folder(dir.path(), "kind = \"tiny\"");
    let other = dir.path().join("taehv.pth");
    fs::copy(decoder_file(), &other).unwrap();
    for (file, code, says) in [
        (other, "T0081", "HunyuanVideo"),
        (fixtures().join("wan-odd/model.safetensors"), "T0415", "no tensor decoder.1.weight"),
        (dir.path().join("absent.pth"), "T05", "absent.pth"),
    ] {
        let d = single(open(&folder, false, Some(file)));
        assert!(d.code.id.starts_with(code) && format!("{d:?}").contains(says), "{d:#?}");
    }
    // Planning needs no files, and a stream is refused with the name of the one that it lacks.
    let model = open(&folder, false, None).unwrap();
    let d = single(stream_pixels(&model, "tp=1", MediaPlacement::Leader));
    assert!(d.code.id == "T0070" && d.labels[0].message.contains("taew2_1.pth"), "{d:#?}");
}

#[test]
fn a_report_says_what_the_file_of_a_tiny_decoder_is() {
    let report = CheckpointReport::inspect(&decoder_file()).unwrap();
    assert!(report.form.starts_with("a tiny decoder") && report.generator.is_none(), "{report:#?}");
    assert_eq!((report.parts[0].part, report.parts[0].form), ("tiny decoder", "PyTorch"));
    let d = &report.problems[0];
    assert!(d.code.id == "T0080" && d.labels[0].message.contains("latents of 4 channels"), "{d:#?}");
    assert!(d.hint.as_ref().unwrap().contains("--decoder"));
    let dir = TempDir::new().unwrap();
    let folder = model_folder(dir.path(), "kind = \"tiny\"\nfile = \"../small.pth\"");
    fs::copy(decoder_file(), dir.path().join("small.pth")).unwrap();
    let report = CheckpointReport::inspect(&folder).unwrap();
    assert!(report.problems.is_empty(), "{report:#?}");
    assert!(report.parts.iter().any(|p| p.part == "tiny decoder" && p.source.ends_with("small.pth")));
}
