//! Tests of what `tessera stream` writes: latents, frames and where the record says that they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

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

/// Decodes the frames of a run that were written as PNGs, in order.
fn png_frames(out: &Path) -> Vec<u8> {
    let mut paths: Vec<_> = fs::read_dir(out.join("frames")).unwrap().map(|f| f.unwrap().path()).collect();
    paths.sort();
    let frames = paths.iter().flat_map(|path| {
        let file = std::io::BufReader::new(File::open(path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut rgb).unwrap();
        rgb
    });
    frames.collect()
}

#[test]
fn raw_frames_are_those_of_the_pngs_and_standard_output_holds_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let y4m = dir.path().join("clip.y4m");
    let args = ["stream", "models/demo", "--chunks", "2", "--png", "--raw", "-", "--oversubscribe"];
    let files = ["--out", out.to_str().unwrap(), "--y4m", y4m.to_str().unwrap()];
    let o = tessera_command(&[&args[..], &files].concat()).output().unwrap();
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(0), "{err}");
    let pngs = png_frames(&out);
    assert!(!pngs.is_empty() && o.stdout == pngs, "{} bytes, not {}", o.stdout.len(), pngs.len());
    assert!(err.contains("golden ") && err.contains("chunk 2/2"), "the summary is missing: {err}");
    let recorded = recorded_outputs(&out);
    let pipes = pairs(&[("raw", "-"), ("y4m", y4m.to_str().unwrap())]);
    assert_eq!(recorded[recorded.len() - 2..], pipes);
    let y4m = fs::read(&y4m).unwrap();
    let end_of_header = y4m.iter().position(|b| *b == b'\n').unwrap();
    assert!(y4m.starts_with(b"YUV4MPEG2 W128 H128 "), "{}", to_text(&y4m[..end_of_header]));
    let frames = pngs.len() / (128 * 128 * 3);
    assert_eq!(y4m.len(), end_of_header + 1 + frames * ("FRAME\n".len() + 128 * 128 * 3));
}

#[test]
fn an_inherited_descriptor_receives_the_frames() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let script = format!(
        "exec 3>'{}'; exec '{}' stream models/demo --chunks 1 --png --raw fd:3 --quiet --out '{}'",
        dir.path().join("frames.rgb").display(),
        env!("CARGO_BIN_EXE_tessera"),
        out.display()
    );
    let o = Command::new("bash").args(["-c", &script]).current_dir(support::repo_root()).output().unwrap();
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    assert!(fs::read(dir.path().join("frames.rgb")).unwrap() == png_frames(&out));
}

#[test]
fn a_reader_that_closes_its_pipe_ends_the_run_with_a_code() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = ["stream", "models/demo", "--chunks", "1000", "--raw", "-", "--quiet", "--oversubscribe"];
    let mut child = tessera_command(&[&args[..], &["--out", out.to_str().unwrap()]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut reader = child.stdout.take().unwrap();
    reader.read_exact(&mut vec![0; 100_000]).unwrap();
    drop(reader);
    let o = child.wait_with_output().unwrap();
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(17), "{err}");
    assert!(err.contains("T0043") && err.contains("closed its end after"), "{err}");
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("\"code\":\"T0043\""), "{record}");
}

#[test]
fn outputs_that_cannot_be_are_refused_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let taken = dir.path().join("taken.rgb");
    fs::write(&taken, "kept").unwrap();
    let taken = taken.to_str().unwrap();
    let cases: [(&[&str], &str, i32); 6] = [
        (&["models/demo", "--raw", "-"], "T0030", 2),
        (&["models/demo", "--raw", "fd:x"], "T0030", 2),
        (&["models/demo", "--raw", "fd:99"], "T0044", 1),
        (&["models/demo", "--raw", taken], "T0013", 1),
        (&["models/demo", "--raw", "fd:2", "--y4m", "fd:2"], "T0018", 1),
        (&["fixtures/wan-odd", "--prompt", "red", "--raw", "/dev/null"], "T0016", 1),
    ];
    for (more, code, status) in cases {
        let o = run_stream(&out, more);
        let text = to_text(&o.stdout) + &to_text(&o.stderr);
        assert!(text.contains(code), "{more:?}: {text}");
        assert_eq!(o.status.code(), Some(status), "{more:?}: {text}");
        assert!(!out.exists(), "{more:?} left a run folder");
    }
    assert_eq!(fs::read_to_string(taken).unwrap(), "kept");
}

#[test]
fn synthetic_weights_run_without_files_and_give_the_same_latents_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("bare");
    fs::create_dir(&model).unwrap();
    for name in ["config.json", "stream.toml"] {
        fs::copy(support::repo_root().join("fixtures/wan-odd").join(name), model.join(name)).unwrap();
    }
    let model = model.to_str().unwrap();
    let run = |name: &str, more: &[&str]| {
        let args = [&[model, "--chunks", "2", "--prompt", "any words at all"], more].concat();
        let o = stream_to(&dir.path().join(name), &args);
        let field = |field| json_field(&to_text(&o.stdout), field);
        (field("golden"), field("weights"))
    };
    let one = run("one", &["--weights", "synthetic:1"]);
    let split = run("split", &["--weights", "synthetic:1", "--mesh", "tp=2", "--poison"]);
    assert_eq!(one, split, "the mesh changes nothing");
    let other = run("other", &["--weights", "synthetic:2"]);
    assert!(one.0 != other.0 && one.1 != other.1, "the seed determines values and digest");
    let latents = fs::read(dir.path().join("one/latents.safetensors")).unwrap();
    let header = u64::from_le_bytes(*latents.first_chunk().unwrap()) as usize;
    let values = latents[8 + header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    let largest = values.map(f32::abs).fold(0.0, f32::max);
    assert!(largest.is_finite() && largest > 0.1, "largest value {largest}");

    let refused = run_stream(&dir.path().join("refused"), &[model, "--prompt", "red"]);
    assert_ne!(refused.status.code(), Some(0), "a model without files runs only on request");
    for (more, code) in [
        (&["--weights", "synthetic:x"][..], "T0030"),
        (&["--weights", "synthetic:1", "--weights-at", "1:fixtures/wan-odd"], "T0018"),
    ] {
        let o = run_stream(&dir.path().join("refused"), &[&[model, "--prompt", "red"], more].concat());
        let text = support::both_outputs(&o);
        assert!(text.contains(code) && o.status.code() != Some(0), "{more:?}: {text}");
    }
}
