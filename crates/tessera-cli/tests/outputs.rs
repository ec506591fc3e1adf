//! Tests of what `tessera stream` writes: latents, frames and where the record says that they are.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tessera_base::random::{DrawKey, fill_normals};

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
    let clip = fs::read(out.join("clip.png")).unwrap();
    assert!(clip.ends_with(b"IEND\xaeB`\x82"), "the clip is not complete");
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

/// Writes the noise that `seed` draws for the first step of each chunk, as [chunks, tokens, width].
fn write_seeded_noise(path: &Path, seed: u64, [chunks, tokens, width]: [usize; 3]) {
    let mut values = vec![0.0_f32; chunks * tokens * width];
    for (chunk, part) in (0..).zip(values.chunks_exact_mut(tokens * width)) {
        fill_normals(DrawKey { seed, chunk, draw: 0 }, 0, part);
    }
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let tensor = TensorView::new(safetensors::Dtype::F32, vec![chunks, tokens, width], &bytes).unwrap();
    safetensors::serialize_to_file([("noise", tensor)], None, path).unwrap();
}

#[test]
fn given_noise_that_equals_the_drawn_noise_gives_the_same_latents_on_any_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let noise = at("noise.safetensors");
    // wan-odd has 3 frames of 3 × 5 tokens of 2 × 2 cells with 4 channels.
    write_seeded_noise(Path::new(&noise), 7, [3, 45, 16]);
    let golden = |name: &str, more: &[&str]| {
        let fixed = ["fixtures/wan-odd", "--prompt", "a red square", "--seed", "7"];
        let o = stream_to(Path::new(&at(name)), &[&fixed, more].concat());
        json_field(&to_text(&o.stdout), "golden")
    };
    let three = ["--chunks", "3"];
    let drawn = golden("drawn", &three);
    for (name, mesh) in [("one", "tp=1"), ("two", "tp=2"), ("stages", "pp=2"), ("four", "tp=2,pp=2")] {
        let given = golden(name, &[&three[..], &["--noise", &noise, "--mesh", mesh]].concat());
        assert_eq!(given, drawn, "{mesh}");
    }
    let record = fs::read_to_string(dir.path().join("one/record.jsonl")).unwrap();
    assert!(record.contains("\"given noise\"") && record.contains("3 chunks, digest "), "{record}");
    let programs = fs::read_dir(dir.path().join("one/plan/programs")).unwrap();
    let names: Vec<String> = programs.map(|f| to_text(f.unwrap().file_name().as_encoded_bytes())).collect();
    assert!(names.iter().any(|n| n.starts_with("noise")), "the plan has no program of its own: {names:?}");

    // Another noise gives other latents.
    let other = at("other.safetensors");
    write_seeded_noise(Path::new(&other), 8, [3, 45, 16]);
    assert_ne!(golden("other", &[&three[..], &["--noise", &other]].concat()), drawn);
}

#[test]
fn noise_that_does_not_fit_the_plan_or_the_stream_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (noise, turned, with, without) = (at("noise"), at("turned"), at("with"), at("without"));
    write_seeded_noise(Path::new(&noise), 7, [2, 45, 16]);
    write_seeded_noise(Path::new(&turned), 7, [2, 16, 45]);
    for (folder, source) in [(&with, "call"), (&without, "seed")] {
        let plan = ["plan", "fixtures/wan-odd", "--noise-source", source, "--out", folder];
        let o = tessera_command(&plan).output().unwrap();
        assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    }
    let cases: [(&[&str], &str); 7] = [
        (&["--plan", &with], "T0018"),
        (&["--plan", &without, "--noise", &noise], "T0018"),
        (&["--plan", &with, "--noise", &noise, "--chunks", "3"], "T0027"),
        (&["fixtures/wan-odd", "--noise", &turned], "T0027"),
        (&["fixtures/wan-odd", "--noise", "/nowhere/at/all"], "T0508"),
        (&["--plan", &with, "--noise", &noise, "--device", "sim"], "T0040"),
        (&["--plan", &without, "--weights", "synthetic:1", "--device", "sim"], "T0040"),
    ];
    for (more, code) in cases {
        let two = ["--prompt", "red", "--chunks", "2"];
        let two = if more.contains(&"--chunks") { &two[..2] } else { &two[..] };
        let o = run_stream(&dir.path().join("run"), &[more, two].concat());
        let text = support::both_outputs(&o);
        assert!(text.contains(code), "{more:?}: {text}");
        assert!(matches!(o.status.code(), Some(1 | 2)), "{more:?}: {text}");
        assert!(!dir.path().join("run").exists(), "{more:?} left a run folder");
    }
    stream_to(
        &dir.path().join("run"),
        &["--plan", &with, "--noise", &noise, "--prompt", "red", "--chunks", "2"],
    );
}

/// Returns whether a program runs. A test that needs one that this machine lacks says so and ends.
fn has_program(program: &str, args: &[&str]) -> bool {
    let runs = Command::new(program).args(args).output().is_ok_and(|o| o.status.success());
    if !runs {
        eprintln!("skipped: `{program} {}` does not run here", args.join(" "));
    }
    runs
}

#[test]
fn the_reader_of_the_guide_returns_the_noise_layout_that_gives_the_run_again() {
    if !has_program("python3", &["-c", "import numpy"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    stream_to(&out, &["fixtures/wan-odd", "--prompt", "red", "--chunks", "2"]);
    let guide = fs::read_to_string(support::repo_root().join("docs/guides/outputs.md")).unwrap();
    let reader = guide.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let script = format!(
        "{reader}\nimport sys\nx = read_latents(sys.argv[1])\nassert x.shape == (2, 4, 3, 6, 10), x.shape\n\
         sys.stdout.buffer.write(np.ascontiguousarray(x).tobytes())"
    );
    let latents = out.join("latents.safetensors");
    let o = Command::new("python3").args(["-c", &script]).arg(&latents).output().unwrap();
    assert!(o.status.success(), "{}", to_text(&o.stderr));
    // The planar layout is read as noise, and so is the layout of the file: both are the same noise.
    let bytes = fs::read(&latents).unwrap();
    let parsed = SafeTensors::deserialize(&bytes).unwrap();
    let stored = parsed.tensor("latents").unwrap();
    let planar = TensorView::new(safetensors::Dtype::F32, vec![2, 4, 3, 6, 10], &o.stdout).unwrap();
    let golden = |name: &str, tensor: TensorView<'_>| {
        let file = dir.path().join(name);
        safetensors::serialize_to_file([("noise", tensor)], None, &file).unwrap();
        let file = file.to_str().unwrap();
        let args = ["fixtures/wan-odd", "--prompt", "red", "--chunks", "2", "--noise", file];
        json_field(&to_text(&stream_to(&dir.path().join(format!("{name}-run")), &args).stdout), "golden")
    };
    assert_eq!(golden("planar", planar), golden("stored", stored));
}

#[test]
fn ffmpeg_reads_the_frames_from_the_pipe_of_the_guide() {
    if !has_program("ffmpeg", &["-version"]) || !has_program("bash", &["-c", "true"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let script = format!(
        "set -eo pipefail; '{}' stream models/demo --chunks 1 --out '{}' --png --y4m - \
         | ffmpeg -loglevel error -i - -f rawvideo -pix_fmt rgb24 '{}'",
        env!("CARGO_BIN_EXE_tessera"),
        at("run"),
        at("read.rgb")
    );
    let o = Command::new("bash").args(["-c", &script]).current_dir(support::repo_root()).output().unwrap();
    assert!(o.status.success(), "{}", to_text(&o.stderr));
    let (read, written) = (fs::read(at("read.rgb")).unwrap(), png_frames(&dir.path().join("run")));
    assert_eq!(read.len(), written.len());
    let largest = read.iter().zip(&written).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    let sum: u64 = read.iter().zip(&written).map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
    let mean = sum as f64 / read.len() as f64;
    // Eight bits of luma and chroma in the limited range hold a color to within a few steps.
    assert!(largest <= 6 && mean < 1.5, "largest difference {largest}, mean {mean}");
}
