//! Streams with LoRAs: from the start, changed between chunks, and files that do not fit.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use support::{json_field, run_for_text};

/// Width of the fixture's residual stream, and the rank of the LoRA.
const DIM: usize = 60;
const RANK: usize = 2;

/// Writes a LoRA for one matrix of `fixtures/wan-odd`, in the names of diffusers.
fn write_lora(path: &Path, module: &str, seed: usize) -> PathBuf {
    let values = (0..2 * RANK * DIM).map(|i| ((i * 31 + seed * 17) % 13) as f32 / 13.0 - 0.5);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let (down, up) = bytes.split_at(RANK * DIM * 4);
    let view = |shape: [usize; 2], bytes| TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap();
    let factors = [
        (format!("transformer.{module}.lora_A.weight"), view([RANK, DIM], down)),
        (format!("transformer.{module}.lora_B.weight"), view([DIM, RANK], up)),
    ];
    serialize_to_file(factors, None, path).unwrap();
    path.to_path_buf()
}

fn stream(out: &Path, more: &[&str]) -> (Option<i32>, String) {
    let fixed = ["stream", "fixtures/wan-odd", "--out", out.to_str().unwrap(), "--format", "json", "--quiet"];
    let common = ["--oversubscribe", "--chunks", "4", "--prompt", "a red square"];
    run_for_text(&[&fixed[..], &common, more].concat())
}

/// Returns the digest of a run's latents, and that of its weights at the start.
fn golden(dir: &Path, name: &str, more: &[&str]) -> (String, String) {
    let (status, text) = stream(&dir.join(name), more);
    assert_eq!(status, Some(0), "{name}: {text}");
    (json_field(&text, "golden"), json_field(&text, "weights"))
}

#[test]
fn a_lora_changes_the_stream_alike_on_every_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let lora = write_lora(&dir.path().join("a.safetensors"), "blocks.0.attn1.to_q", 1);
    let lora = lora.to_str().unwrap();
    let half = format!("{lora}:0.5");
    let one = ["--mesh", "tp=1"];
    let plain = golden(dir.path(), "plain", &one);
    let with = golden(dir.path(), "with", &[&one[..], &["--lora", lora]].concat());
    let weaker = golden(dir.path(), "weaker", &[&one[..], &["--lora", &half]].concat());
    let two = ["--mesh", "tp=5", "--strategy", "ulysses", "--lora", lora];
    assert_eq!(golden(dir.path(), "five", &two), with);
    assert!(plain.0 != with.0 && with.0 != weaker.0, "the LoRA has no effect");
    assert!(plain.1 != with.1 && with.1 != weaker.1, "the digest of the weights does not cover the LoRA");
    // Added twice at half strength, it is the whole LoRA up to rounding, and so has another digest.
    let twice = golden(dir.path(), "twice", &[&one[..], &["--lora", &half, "--lora", &half]].concat());
    assert_ne!(twice.1, with.1);
}

#[test]
fn loras_change_between_chunks_in_lockstep() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|n| dir.path().join(format!("{n}.safetensors")));
    write_lora(&a, "blocks.0.attn1.to_q", 1);
    write_lora(&b, "blocks.1.attn2.to_k", 2);
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    let run = |name: &str, more: &[&str]| {
        let (status, text) = stream(&dir.path().join(name), &[&["--mesh", "tp=5"][..], more].concat());
        assert_eq!(status, Some(0), "{name}: {text}");
        let file = fs::read(dir.path().join(name).join("latents.safetensors")).unwrap();
        // Four chunks of equal size end the file.
        let chunk = 4 * 3 * 6 * 10 * 4;
        file[file.len() - 4 * chunk..].chunks(chunk).map(<[u8]>::to_vec).collect::<Vec<_>>()
    };
    let changed = run("changed", &["--lora", a, "--lora-at", &format!("1:{b}:0.7"), "--lora-at", "2:none"]);
    let with_a = run("with-a", &["--lora", a, "--cut-at", "1", "--cut-at", "2"]);
    let with_b = run("with-b", &["--lora", &format!("{b}:0.7"), "--cut-at", "1", "--cut-at", "2"]);
    let plain = run("plain", &["--cut-at", "1", "--cut-at", "2"]);
    for (chunk, expected) in [&with_a, &with_b, &plain, &plain].into_iter().enumerate() {
        assert!(changed[chunk] == expected[chunk], "chunk {chunk}");
    }
    assert!(with_a[1] != with_b[1] && with_b[1] != plain[1]);
}

#[test]
fn a_lora_that_does_not_fit_ends_the_command_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let other = write_lora(&dir.path().join("o.safetensors"), "blocks.7.attn1.to_q", 1);
    let out = dir.path().join("out");
    for (more, code, words) in [
        (vec!["--lora", other.to_str().unwrap()], "T0514", "similar: blocks."),
        (vec!["--lora-at", &format!("2:{}", other.display())], "T0514", "blocks.7.attn1.to_q"),
        (vec!["--lora", "/nowhere/x.safetensors"], "T05", "/nowhere/x.safetensors"),
        (vec!["--lora", "x.safetensors:0"], "", "the strength is not a number other than 0"),
        (vec!["--lora-at", "1:none", "--weights-at", "1:fixtures/wan-odd"], "", "--weights-at or --lora-at"),
    ] {
        let (status, text) = stream(&out, &more);
        assert!(
            matches!(status, Some(1 | 2)) && text.contains(code) && text.contains(words),
            "{more:?}: {status:?} {text}"
        );
        assert!(!out.exists(), "{more:?}");
    }
}
