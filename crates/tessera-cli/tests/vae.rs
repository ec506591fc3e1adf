//! Streams a model with a Wan VAE, and rejects folders whose VAE does not fit.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use support::{json_field, repo_root, run_for_text, to_text};

/// Makes a model folder of a generator fixture and the VAE fixture, with more lines of stream settings.
fn model_folder(dir: &Path, cache: &str) -> PathBuf {
    let (model, vae) = (dir.join("model"), dir.join("model/vae"));
    fs::create_dir_all(&vae).unwrap();
    let (generator, fixture) =
        (repo_root().join("fixtures/wan-odd"), repo_root().join("fixtures/wan-vae/vae"));
    for file in ["config.json", "model.safetensors", "vocab.txt", "text_encoder.safetensors"] {
        fs::copy(generator.join(file), model.join(file)).unwrap();
    }
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(fixture.join(file), vae.join(file)).unwrap();
    }
    let stream = fs::read_to_string(generator.join("stream.toml")).unwrap();
    let stream =
        stream.replace("kind = \"none\"", "kind = \"wan_vae\"").replace("mode = \"resident\"", cache);
    fs::write(model.join("stream.toml"), stream).unwrap();
    model
}

fn stream(model: &Path, out: &Path, more: &[&str]) -> (Option<i32>, String) {
    let fixed =
        ["stream", model.to_str().unwrap(), "--out", out.to_str().unwrap(), "--format", "json", "--quiet"];
    run_for_text(
        &[&fixed[..], &["--oversubscribe", "--chunks", "4", "--prompt", "a red square"], more].concat(),
    )
}

#[test]
fn a_stream_through_a_vae_gives_the_same_frames_on_every_mesh() {
    for cache in ["mode = \"resident\"", "mode = \"recompute\""] {
        let dir = tempfile::tempdir().unwrap();
        let model = model_folder(dir.path(), cache);
        let mut clips = Vec::new();
        for (name, mesh) in [
            ("one", &["--mesh", "tp=1"][..]),
            ("two", &["--mesh", "tp=2", "--strategy", "ulysses"]),
            ("outside", &["--mesh", "tp=1", "--topology", "pp0"]),
            ("device", &["--mesh", "tp=2", "--strategy", "ulysses", "--media", "outside"]),
        ] {
            let out = dir.path().join(name);
            let (code, text) = stream(&model, &out, &[mesh, &["--png", "--cut-at", "2"]].concat());
            assert_eq!(code, Some(0), "{cache} {name}: {text}");
            // A scene begins with one frame of its first latent: 9 frames, then 12, and so again after the cut.
            assert_eq!(json_field(&text, "frames"), "42", "{text}");
            assert_eq!(fs::read_dir(out.join("frames")).unwrap().count(), 42);
            clips.push(fs::read(out.join("clip.png")).unwrap());
        }
        assert!(clips.iter().all(|clip| *clip == clips[0]), "{cache}: the frames depend on the mesh");
    }
}

#[test]
fn ranks_that_decode_give_the_frames_of_the_leader() {
    // Six rows of latents over four ranks are 2, 2, 1 and 1.
    let leader = ("leader", &["--mesh", "tp=1"][..]);
    let uneven = ("uneven", &["--mesh", "tp=4", "--media", "mesh"][..]);
    let resident = [leader, uneven];
    let recompute = [
        leader,
        ("one", &["--mesh", "tp=1", "--media", "mesh"]),
        ("two", &["--mesh", "tp=2", "--media", "mesh"]),
        ("megatron", &["--mesh", "tp=3", "--strategy", "megatron", "--media", "mesh"]),
        uneven,
        ("stages", &["--mesh", "tp=2,pp=2", "--topology", "pp1", "--media", "mesh"]),
    ];
    for (cache, meshes) in [("mode = \"resident\"", &resident[..]), ("mode = \"recompute\"", &recompute)] {
        let dir = tempfile::tempdir().unwrap();
        let model = model_folder(dir.path(), cache);
        let mut clips = Vec::new();
        for (name, mesh) in meshes {
            let out = dir.path().join(name);
            let (code, text) = stream(&model, &out, &[mesh, &["--png", "--cut-at", "2"][..]].concat());
            assert_eq!(code, Some(0), "{cache} {name}: {text}");
            assert_eq!(json_field(&text, "frames"), "42", "{text}");
            let record = to_text(&fs::read(out.join("record.jsonl")).unwrap());
            let in_calls = record.contains("\"name\":\"decode.open\"");
            assert_eq!(in_calls, *name != "leader", "{name} decodes elsewhere");
            clips.push((*name, fs::read(out.join("clip.png")).unwrap()));
        }
        // Sums over shards of weights change the latents, so megatron has frames of its own.
        let differs = |(name, clip): &&(&str, Vec<u8>)| *name != "megatron" && *clip != clips[0].1;
        assert_eq!(clips.iter().find(differs).map(|(name, _)| *name), None, "{cache}");
    }
}

/// Replaces a model folder's VAE by the fixture of a tiny decoder.
fn use_tiny_decoder(model: &Path) {
    fs::remove_dir_all(model.join("vae")).unwrap();
    let fixture = repo_root().join("fixtures/tiny-decoder/taew2_1.pth");
    fs::copy(fixture, model.join("taew2_1.pth")).unwrap();
    let stream = fs::read_to_string(model.join("stream.toml")).unwrap();
    fs::write(model.join("stream.toml"), stream.replace("kind = \"wan_vae\"", "kind = \"tiny\"")).unwrap();
}

#[test]
fn a_tiny_decoder_of_the_folder_or_of_a_flag_gives_the_same_frames_on_every_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let model = model_folder(dir.path(), "mode = \"resident\"");
    let file = repo_root().join("fixtures/tiny-decoder/taew2_1.safetensors");
    let mut clips = Vec::new();
    for (name, options) in [
        ("leader", &["--mesh", "tp=1", "--decoder", file.to_str().unwrap()][..]),
        ("three", &["--mesh", "tp=3", "--media", "mesh"]),
    ] {
        if name == "three" {
            use_tiny_decoder(&model);
        }
        let out = dir.path().join(name);
        let (code, text) = stream(&model, &out, &[options, &["--png", "--cut-at", "2"]].concat());
        assert_eq!(code, Some(0), "{name}: {text}");
        assert_eq!(json_field(&text, "frames"), "42", "{text}");
        let record = to_text(&fs::read(out.join("record.jsonl")).unwrap());
        assert_eq!(record.contains("\"name\":\"decode.open\""), name == "three", "{name} decodes elsewhere");
        clips.push(fs::read(out.join("clip.png")).unwrap());
    }
    assert!(clips[0] == clips[1], "the frames depend on who decodes");
}

#[test]
fn inspect_says_what_a_tiny_decoder_s_file_is() {
    let dir = tempfile::tempdir().unwrap();
    let file = repo_root().join("fixtures/tiny-decoder/taew2_1.pth");
    let (status, text) = run_for_text(&["models", "inspect", file.to_str().unwrap()]);
    for word in ["a tiny decoder of latents", "PyTorch", "T0080", "latents of 4 channels", "--decoder"] {
        assert!(text.contains(word), "no `{word}` in {text}");
    }
    assert_eq!(status, Some(1), "a decoder alone cannot stream");
    let model = model_folder(dir.path(), "mode = \"resident\"");
    use_tiny_decoder(&model);
    let (status, text) = run_for_text(&["models", "inspect", model.to_str().unwrap()]);
    assert!(status == Some(0) && text.contains("tiny decoder") && text.contains("taew2_1.pth"), "{text}");
}

/// Six rows of latents over four ranks: ranks 1 and 2 have a neighbour on both sides.
#[test]
fn a_fault_in_the_history_or_the_halo_of_a_rank_ends_the_stream_and_names_the_rank() {
    let dir = tempfile::tempdir().unwrap();
    for (cache, faults) in [
        (
            "mode = \"resident\"",
            &[
                (
                    "history-cleared@2:4",
                    "T0772",
                    &["call 4, chunk 2", "`vae.", "dim 1 [", "changed after call 3"][..],
                ),
                ("swapped-halo@1:3", "T0773", &["call 3, chunk 1", "decode.first", "they are swapped"]),
                ("caches-lost@3:4", "T0712", &["continues epoch 0", "after 2 chunks", "hold 0 chunks"]),
                ("flipped-cache@0:3#5", "T0772", &["1 of "]),
                ("flipped-cache@2:5#6", "T0772", &["1 of "]),
            ][..],
        ),
        (
            "mode = \"recompute\"",
            &[
                ("history-cleared@1:3", "T0772", &["call 3, chunk 1", "`vae."]),
                ("swapped-halo@2:2", "T0773", &["call 2, chunk 0", "decode.open", "they are swapped"]),
                ("caches-lost@0:3", "T0712", &["after 1 chunks"]),
            ],
        ),
    ] {
        let model = model_folder(&dir.path().join(cache.replace(' ', "")), cache);
        for (fault, code, words) in faults {
            let out = model.with_extension(fault.replace(['@', ':', '#'], "-"));
            let mesh = ["--mesh", "tp=4", "--media", "mesh", "--arm-fault", fault];
            let (status, text) = stream(&model, &out, &mesh);
            let rank = &fault.split_once('@').unwrap().1[..1];
            assert_eq!(status, Some(14), "{fault}: {text}");
            assert!(text.contains(&format!(r#""code":"{code}","rank":{rank}"#)), "{fault}: {text}");
            for word in *words {
                assert!(text.contains(word), "{fault}: no `{word}` in {text}");
            }
            let record = to_text(&fs::read(out.join("record.jsonl")).unwrap());
            assert!(record.contains(r#"["cache checks","resets, contents, halos"]"#), "{record}");
        }
    }
}

#[test]
fn ranks_cannot_decode_for_a_model_without_a_vae() {
    let demo = repo_root().join("models/demo");
    let (status, text) = run_for_text(&["plan", demo.to_str().unwrap(), "--media", "mesh"]);
    assert!(status == Some(1) && text.contains("T0609") && text.contains("wan_vae"), "{status:?} {text}");
}

#[test]
fn a_vae_that_does_not_fit_is_rejected_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let model = model_folder(dir.path(), "mode = \"resident\"");
    let config = model.join("vae/config.json");
    let good = fs::read_to_string(&config).unwrap();
    let rejects = |what: &str, code: &str, words: &[&str]| {
        let out = dir.path().join("out");
        let (status, text) = stream(&model, &out, &["--mesh", "tp=1"]);
        assert!(status == Some(1) && text.contains(code), "{what}: {status:?} {text}");
        for word in words {
            assert!(text.contains(word), "{what}: no `{word}` in {text}");
        }
        assert!(!out.exists(), "{what} left a folder");
    };
    fs::write(&config, good.replace("\"dropout\"", "\"is_residual\": true, \"dropout\"")).unwrap();
    rejects("a VAE of Wan2.2", "T0414", &["is_residual is true"]);
    fs::write(&config, good.replace("\"z_dim\": 4", "\"z_dim\": 8")).unwrap();
    rejects("another number of latent channels", "T0411", &["4 latents_mean", "for 8 channels"]);
    fs::write(&config, good.replace("\"num_res_blocks\": 1", "\"num_res_blocks\": 2")).unwrap();
    rejects("a VAE with more blocks", "T0506", &["62 missing, 14 extra", "decoder.up_blocks.0.resnets.2"]);
    fs::write(&config, &good).unwrap();
    let weights = model.join("vae/diffusion_pytorch_model.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    rejects("half a file", "T05", &["diffusion_pytorch_model.safetensors"]);
    fs::remove_file(&weights).unwrap();
    rejects("a folder without weights", "T0070", &["the checkpoint has no VAE"]);
}

#[test]
fn the_digest_of_all_weights_covers_the_vae() {
    let dir = tempfile::tempdir().unwrap();
    let model = model_folder(dir.path(), "mode = \"resident\"");
    let digest = |name: &str| {
        let out = dir.path().join(name);
        let (status, text) = stream(&model, &out, &["--mesh", "tp=1"]);
        assert_eq!(status, Some(0), "{text}");
        json_field(&to_text(&fs::read(out.join("record.jsonl")).unwrap()), "weights")
    };
    let before = digest("before");
    let weights = model.join("vae/diffusion_pytorch_model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert_ne!(digest("after"), before);
}

#[test]
fn a_fast_decoder_is_refused_without_gpus_and_for_a_tiny_decoder() {
    let dir = tempfile::tempdir().unwrap();
    let model = model_folder(dir.path(), "mode = \"resident\"");
    let out = dir.path().join("out");
    for options in [&["--quality", "fast"][..], &["--quality", "fast", "--media", "mesh", "--mesh", "tp=2"]] {
        let (status, text) = stream(&model, &out, options);
        assert_eq!(status, Some(1), "{text}");
        for word in ["T0610", "e4m3 on GPUs", "--quality exact"] {
            assert!(text.contains(word), "no `{word}` in {text}");
        }
    }
    use_tiny_decoder(&model);
    let (status, text) = stream(&model, &out, &["--quality", "fast"]);
    assert!(status == Some(1) && text.contains("decoder.kind is tiny"), "{text}");
}
