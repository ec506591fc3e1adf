//! Compares the programs of a tiny decoder with PyTorch.

use std::fs;

use super::*;

const TINY: &str = "[decoder]\nkind = \"tiny\"\n[decoder.tiny]\nwidths = [12, 10, 6, 8]\n";
const PUBLISHED: &str = "[decoder]\nkind = \"tiny\"\n";

fn tiny_fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-decoder")
}

fn open(regime: &str, more: &str) -> VaeCase {
    VaeCase::with_decoder(&tiny_fixture(), regime, &format!("{TINY}{more}"))
}

#[test]
fn frames_streamed_in_three_chunks_equal_those_of_the_whole_video_in_pytorch() {
    let case = open("resident", "");
    let error = compare_pixels(&case, &mut case.load_codec());
    assert!(error <= 2e-5, "{error:e}");
}

#[test]
fn a_pytorch_file_and_a_safetensors_file_hold_the_same_decoder() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["expected.safetensors", "taew2_1.safetensors"] {
        fs::copy(tiny_fixture().join(name), dir.path().join(name)).unwrap();
    }
    let (torch, safetensors) = (open("resident", ""), VaeCase::with_decoder(dir.path(), "resident", TINY));
    let digest = |case: &VaeCase| case.open_weights().unwrap().content_digest(1);
    assert_eq!(digest(&torch), digest(&safetensors));
}

#[test]
fn a_new_scene_forgets_the_frames_before_it() {
    let case = open("resident", "");
    let mut codec = case.load_codec();
    let first = codec.decode_pixels(0, &case.chunk_latents(0), true).unwrap();
    codec.decode_pixels(1, &case.chunk_latents(1), false).unwrap();
    assert_eq!(codec.decode_pixels(2, &case.chunk_latents(0), true).unwrap(), first);
    let continued = codec.decode_pixels(3, &case.chunk_latents(0), false).unwrap();
    let picture = case.grid[0] * case.grid[1] * 64 * 3;
    // The later frames of the first latent are shown here, and the frame that both show has a past.
    let (again, opened) = (&continued[3 * picture..4 * picture], &first[..picture]);
    assert!(relative_error(again, opened) > 1e-2, "the history has no effect");
}

#[test]
fn the_anchor_of_a_tiny_decoder_s_frame_is_encoded_by_the_vae() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["expected.safetensors", "taew2_1.pth"] {
        fs::copy(tiny_fixture().join(name), dir.path().join(name)).unwrap();
    }
    let vae = VaeCase::open(&fixture(), "recompute");
    let table = vae_table(&vae.plan.video.stream.vae);
    let case = VaeCase::with_decoder(dir.path(), "recompute", &format!("{TINY}{table}"));
    // Without the VAE, the refusal says what it is for.
    let refused = case.open_weights().unwrap_err();
    assert!(refused[0].code.id == "T0070" && refused[0].notes[0].contains("no encoder"), "{refused:#?}");
    fs::create_dir(dir.path().join("vae")).unwrap();
    for name in ["config.json", "diffusion_pytorch_model.safetensors"] {
        fs::copy(fixture().join("vae").join(name), dir.path().join("vae").join(name)).unwrap();
    }
    let mut codec = case.load_codec();
    let error = compare_pixels(&case, &mut codec);
    assert!(error <= 2e-5, "{error:e}");
    let context = codec.build_context(2, &case.chunk_latents(2), false).unwrap();
    // The same frame, decoded without a context and encoded by the VAE alone.
    let mut decoder = case.load_codec();
    let decoded = (0..3).map(|i| decoder.decode_pixels(i, &case.chunk_latents(i as usize), i == 0).unwrap());
    let (last, picture) = (decoded.last().unwrap(), case.grid[0] * case.grid[1] * 64 * 3);
    let anchor = vae.load_codec().run_program("encode", "pixels", &last[3 * picture..][..picture], "latents");
    let anchor = anchor.unwrap();
    assert_eq!(f32_values(&context)[..anchor.len()], anchor[..]);
}

#[test]
fn tensors_that_do_not_fit_the_settings_are_named() {
    let case = VaeCase::with_decoder(
        &tiny_fixture(),
        "resident",
        "[decoder]\nkind = \"tiny\"\n[decoder.tiny]\nwidths = [12, 10, 6, 9]\n",
    );
    let refused = case.open_weights().unwrap_err();
    let text = format!("{refused:#?}");
    assert!(
        text.contains("T0506") && text.contains("decoder.20.weight") && text.contains("[9, 6, 3, 3]"),
        "{text}"
    );
    assert!(!text.contains("encoder.0"), "the file's encoder is no part of a decoder: {text}");
}

/// A decoder of the published widths; tools/fixtures/make_tiny.py says how to make one.
#[test]
#[ignore = "needs a folder that tools/fixtures/make_tiny.py has written"]
fn the_tiny_decoder_of_a_folder_equals_pytorch() {
    #[allow(clippy::disallowed_methods, reason = "the developer names a folder of their own")]
    let dir = std::env::var("TESSERA_TINY_FOLDER").expect("TESSERA_TINY_FOLDER names the folder");
    let case = VaeCase::with_decoder(Path::new(&dir), "resident", PUBLISHED);
    let error = compare_pixels(&case, &mut case.load_codec());
    println!("pixels {error:e}");
    assert!(error <= 2e-5, "{error:e}");
}
