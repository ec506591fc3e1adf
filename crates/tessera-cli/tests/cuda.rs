//! Streams on GPUs from the binary: against the processors, against themselves, and under faults. Where there are no GPUs, or
//! too few, this says so and passes.
//!
//! `TESSERA_BIN` and `TESSERA_ROOT` name the binary and the project's folder where the test does not run where it was built.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tessera::cuda;
use tessera::gpus::Gpus;

fn told(name: &str, else_: &str) -> PathBuf {
    std::env::var_os(name).map_or_else(|| PathBuf::from(else_), PathBuf::from)
}

fn root() -> PathBuf {
    told("TESSERA_ROOT", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn command(args: &[&str]) -> Command {
    let mut c = Command::new(told("TESSERA_BIN", env!("CARGO_BIN_EXE_tessera")));
    c.current_dir(root()).args(args);
    c
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// Whether so many ranks find a GPU each.
fn here(ranks: usize) -> bool {
    match cuda::check(&Gpus::look(), ranks) {
        Ok(()) => true,
        Err(ds) => {
            println!("not run on {ranks}: {}", ds[0].message);
            false
        }
    }
}

/// Golden hash and latents of two chunks of a fixture without a decoder.
fn stream(out: &Path, more: &[&str]) -> (String, Vec<f32>) {
    let fixed = [
        "stream",
        "--chunks",
        "2",
        "--prompt",
        "a red square",
        "--format",
        "json",
        "--quiet",
        "--oversubscribe",
    ];
    let o = run(&[&fixed, more, &["--out", out.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&o.stdout).into_owned();
    assert_eq!(o.status.code(), Some(0), "{more:?}: {said}{}", String::from_utf8_lossy(&o.stderr));
    let json: serde_json::Value = serde_json::from_str(&said).unwrap();
    let bytes = std::fs::read(out.join("latents.f32")).unwrap();
    let latents = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (json["golden"].as_str().unwrap().to_string(), latents)
}

/// The norm of the difference against the norm of what is right.
fn relative(seen: &[f32], right: &[f32]) -> f64 {
    assert_eq!(seen.len(), right.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut seen.iter().zip(right).map(|(a, b)| f64::from(a - b)));
    apart / norm(&mut right.iter().map(|v| f64::from(*v)))
}

/// Ranks, and how they are laid out.
const LAYOUTS: [(usize, &str); 10] = [
    (1, "--mesh tp=1"),
    (2, "--mesh tp=2"),
    (2, "--mesh tp=2 --via kernels"),
    (2, "--mesh tp=2 --via nccl"),
    (2, "--mesh tp=2 --strategy megatron"),
    (2, "--mesh tp=2 --strategy megatron --pieces 2"),
    (2, "--mesh pp=2"),
    (4, "--mesh tp=4"),
    (4, "--mesh tp=4 --strategy megatron --pieces 2"),
    (4, "--mesh tp=2,pp=2 --strategy megatron"),
];

/// The layouts for which there are GPUs.
fn layouts() -> impl Iterator<Item = &'static str> {
    LAYOUTS.into_iter().filter(|(ranks, _)| here(*ranks)).map(|(_, layout)| layout)
}

/// The options of a stream on GPUs.
fn on_gpus<'a>(model: &'a str, layout: &'a str, dtype: &'a str) -> Vec<&'a str> {
    [model, "--device", "cuda", "--dtype", dtype].into_iter().chain(layout.split(' ')).collect()
}

/// The demo without its decoder: rows wide enough for query, key and value to be one product.
fn demo_in_latents(dir: &Path) -> String {
    let (from, to) = (root().join("models/demo"), dir.join("demo"));
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors", "text_encoder.safetensors", "vocab.txt"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let stream = std::fs::read_to_string(from.join("stream.toml")).unwrap();
    let (before, decoder) = stream.split_once("[decoder]").unwrap();
    assert_eq!(decoder.trim(), "kind = \"space_time_depth\"");
    std::fs::write(to.join("stream.toml"), format!("{before}[decoder]\nkind = \"none\"\n")).unwrap();
    to.to_str().unwrap().to_string()
}

#[test]
fn what_gpus_stream_is_what_processors_stream() {
    let dir = tempfile::tempdir().unwrap();
    let demo = demo_in_latents(dir.path());
    for model in ["fixtures/wan-even", "fixtures/wan-odd", &demo] {
        let named = model.rsplit('/').next().unwrap();
        let at = |name: &str| dir.path().join(format!("{named}-{name}").replace(' ', "-"));
        let mut right = None;
        for layout in layouts() {
            let right = right.get_or_insert_with(|| stream(&at("cpu"), &[model]).1);
            for (dtype, most) in [("f32", 1e-4), ("bf16", 2e-2)] {
                let (_, seen) = stream(&at(&format!("{layout}-{dtype}")), &on_gpus(model, layout, dtype));
                let apart = relative(&seen, right);
                println!("{model} {layout} {dtype}: {apart:.1e} from the processors' in f32");
                assert!(apart <= most, "{model} {layout} {dtype}: {apart:e}, most {most:e}");
            }
        }
    }
}

#[test]
fn three_fresh_runs_on_gpus_give_one_hash() {
    let dir = tempfile::tempdir().unwrap();
    for layout in layouts() {
        let golden = |n: u32| {
            let out = dir.path().join(format!("{layout}-{n}").replace(' ', "-"));
            stream(&out, &on_gpus("fixtures/wan-even", layout, "bf16")).0
        };
        let first = golden(0);
        assert_eq!([golden(1), golden(2)], [first.clone(), first], "{layout}");
    }
}

#[test]
fn faults_on_gpus_end_as_they_must_and_the_gpus_are_usable_after_each() {
    if !here(2) {
        return;
    }
    let drills = ["conditional-collective", "wrong-shape", "member-dies", "stuck-kernel", "mutated-weight"];
    let o = run(&[&["drill", "--device", "cuda"], &drills[..]].concat());
    let said = String::from_utf8_lossy(&o.stdout).into_owned();
    println!("{said}");
    assert_eq!(o.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&o.stderr));
    let dir = tempfile::tempdir().unwrap();
    stream(&dir.path().join("after"), &["fixtures/wan-even", "--device", "cuda", "--mesh", "tp=2"]);
}
