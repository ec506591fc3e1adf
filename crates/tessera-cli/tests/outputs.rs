//! Tests of what `tessera stream` writes: latents, frames and where the record says that they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;

use safetensors::SafeTensors;
use support::{json_field, tessera_command, to_text};

fn run_stream(out: &Path, more: &[&str]) -> Output {
    let fixed = ["stream", "--format", "json", "--quiet", "--oversubscribe", "--out", out.to_str().unwrap()];
    tessera_command(&[&fixed, more].concat()).output().unwrap()
}

/// Runs a stream that must succeed.
fn stream_to(out: &Path, more: &[&str]) -> Output {
    let o = run_stream(out, more);
    assert_eq!(o.status.code(), Some(0), "{}{}", to_text(&o.stdout), to_text(&o.stderr));
    o
}

/// Returns kind and destination of each output that the record of a run lists.
fn recorded_outputs(out: &Path) -> Vec<(String, String)> {
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    let start: serde_json::Value = serde_json::from_str(record.lines().next().unwrap()).unwrap();
    let outputs = start["outputs"].as_array().unwrap().iter();
    outputs.map(|o| (o["kind"].as_str().unwrap().into(), o["to"].as_str().unwrap().into())).collect()
}

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
}

#[test]
fn the_latents_beside_the_frames_are_those_of_the_golden_hash() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let o = stream_to(&out, &["models/demo", "--chunks", "2", "--latents", "--png"]);
    let bytes = fs::read(out.join("latents.safetensors")).unwrap();
    let latents = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = latents.tensor("latents").unwrap();
    assert_eq!(tensor.shape()[0], 2);
    assert_eq!(tensor.shape().len(), 7);
    let hash = blake3::hash(tensor.data()).to_hex().to_string();
    assert_eq!(hash, json_field(&to_text(&o.stdout), "golden"));
    assert_eq!(
        recorded_outputs(&out),
        pairs(&[("clip", "clip.png"), ("latents", "latents.safetensors"), ("png", "frames")])
    );
    // Without the flag a model with a decoder writes no latents.
    let plain = dir.path().join("plain");
    stream_to(&plain, &["models/demo", "--chunks", "1"]);
    assert!(!plain.join("latents.safetensors").exists());
    assert_eq!(recorded_outputs(&plain), pairs(&[("clip", "clip.png")]));
}
