//! Tests of streams on GPUs: compared with the CPU, compared with each other, and under faults.
//! Without enough GPUs a test prints that it did not run, and passes, unless `TESSERA_REQUIRE_GPUS`
//! says that they must be there.
//!
//! `TESSERA_BIN` and `TESSERA_ROOT` give the paths of the binary and of the repository if the test
//! runs on another machine than the one that built it.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tessera::cuda;
use tessera::gpus::GpuDiscovery;
use tessera_cuda::{REQUIRE_GPUS, assert_may_skip};

fn path_from_env(name: &str, else_: &str) -> PathBuf {
    std::env::var_os(name).map_or_else(|| PathBuf::from(else_), PathBuf::from)
}

fn repo_root() -> PathBuf {
    path_from_env("TESSERA_ROOT", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn tessera_command(args: &[&str]) -> Command {
    let mut c = Command::new(path_from_env("TESSERA_BIN", env!("CARGO_BIN_EXE_tessera")));
    c.current_dir(repo_root()).args(args);
    c
}

fn run_tessera(args: &[&str]) -> Output {
    tessera_command(args).output().unwrap()
}

/// Returns whether there is a GPU for each rank.
fn has_gpus(ranks: usize) -> bool {
    match cuda::check_gpus(&GpuDiscovery::discover(), ranks) {
        Ok(()) => true,
        Err(ds) => {
            let required = std::env::var(REQUIRE_GPUS).ok();
            assert_may_skip(required.as_deref(), ranks, &ds[0].message);
            println!("not run on {ranks} GPUs: {}", ds[0].message);
            false
        }
    }
}

/// Streams two chunks of a fixture without a decoder and returns their golden hash and latents.
fn stream_latents(out: &Path, more: &[&str]) -> (String, Vec<f32>) {
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
    let o = run_tessera(&[&fixed, more, &["--out", out.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&o.stdout).into_owned();
    assert_eq!(o.status.code(), Some(0), "{more:?}: {said}{}", String::from_utf8_lossy(&o.stderr));
    let json: serde_json::Value = serde_json::from_str(&said).unwrap();
    let bytes = std::fs::read(out.join("latents.safetensors")).unwrap();
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let latents = bytes[8 + header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (json["golden"].as_str().unwrap().to_string(), latents)
}

/// Returns the norm of the difference relative to the norm of the expected values.
fn relative_error(seen: &[f32], right: &[f32]) -> f64 {
    assert_eq!(seen.len(), right.len());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    let apart = norm(&mut seen.iter().zip(right).map(|(a, b)| f64::from(a - b)));
    apart / norm(&mut right.iter().map(|v| f64::from(*v)))
}

/// Numbers of ranks and their layouts.
const LAYOUTS: [(usize, &str); 10] = [
    (1, "--mesh tp=1"),
    (2, "--mesh tp=2"),
    (2, "--mesh tp=2 --transport p2p"),
    (2, "--mesh tp=2 --transport nccl"),
    (2, "--mesh tp=2 --strategy megatron"),
    (2, "--mesh tp=2 --strategy megatron --overlap-chunks 2"),
    (2, "--mesh pp=2"),
    (4, "--mesh tp=4"),
    (4, "--mesh tp=4 --strategy megatron --overlap-chunks 2"),
    (4, "--mesh tp=2,pp=2 --strategy megatron"),
];

/// Returns the layouts for which there are enough GPUs.
fn available_layouts() -> impl Iterator<Item = &'static str> {
    LAYOUTS.into_iter().filter(|(ranks, _)| has_gpus(*ranks)).map(|(_, layout)| layout)
}

/// Returns the options of a stream on GPUs.
fn gpu_args<'a>(model: &'a str, layout: &'a str, dtype: &'a str) -> Vec<&'a str> {
    [model, "--device", "cuda", "--dtype", dtype].into_iter().chain(layout.split(' ')).collect()
}

/// Copies the demo model without its decoder. Its rows are wide enough for the query, key and value
/// matmuls to be fused into one GEMM.
fn demo_without_decoder(dir: &Path) -> String {
    let (from, to) = (repo_root().join("models/demo"), dir.join("demo"));
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
fn gpu_streams_match_cpu_streams() {
    let dir = tempfile::tempdir().unwrap();
    let demo = demo_without_decoder(dir.path());
    for model in ["fixtures/wan-even", "fixtures/wan-odd", &demo] {
        let named = model.rsplit('/').next().unwrap();
        let at = |name: &str| dir.path().join(format!("{named}-{name}").replace(' ', "-"));
        let mut right = None;
        for layout in available_layouts() {
            let right = right.get_or_insert_with(|| stream_latents(&at("cpu"), &[model]).1);
            for (dtype, most) in [("f32", 1e-4), ("bf16", 2e-2)] {
                let (_, seen) =
                    stream_latents(&at(&format!("{layout}-{dtype}")), &gpu_args(model, layout, dtype));
                let apart = relative_error(&seen, right);
                println!("{model} {layout} {dtype}: {apart:.1e} from the CPU result in f32");
                assert!(apart <= most, "{model} {layout} {dtype}: {apart:e}, most {most:e}");
            }
        }
    }
}

#[test]
fn three_fresh_runs_on_gpus_give_one_hash() {
    let dir = tempfile::tempdir().unwrap();
    for layout in available_layouts() {
        let golden = |n: u32| {
            let out = dir.path().join(format!("{layout}-{n}").replace(' ', "-"));
            stream_latents(&out, &gpu_args("fixtures/wan-even", layout, "bf16")).0
        };
        let first = golden(0);
        assert_eq!([golden(1), golden(2)], [first.clone(), first], "{layout}");
    }
}

#[test]
fn every_kernel_of_a_gpu_run_is_probed_within_half_a_second() {
    if !has_gpus(1) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let demo = demo_without_decoder(dir.path());
    for dtype in ["f32", "bf16", "fp8"] {
        let args = gpu_args(&demo, "--mesh tp=1", dtype);
        // The first run compiles kernels that the second one finds in the cache.
        stream_latents(&dir.path().join(format!("{dtype}-first")), &args);
        let out = dir.path().join(dtype);
        stream_latents(&out, &args);
        let flight = std::fs::read_to_string(out.join("flight/rank-0.jsonl")).unwrap();
        let line = flight.lines().find(|l| l.contains("\"probed\"")).unwrap();
        let mark: serde_json::Value = serde_json::from_str(line.trim()).unwrap();
        let detail = mark["text"].as_str().unwrap();
        println!("{dtype}: {detail}");
        // The start-up report shows the key and the digest of each kernel.
        let record = std::fs::read_to_string(out.join("record.jsonl")).unwrap();
        let unprobed: Vec<&str> = record.split('"').filter(|text| text.contains("not probed: ")).collect();
        assert!(detail.contains(", 0 of them not probed, "), "{dtype}: {detail}: {unprobed:?}");
        let ms: f64 = detail.rsplit(' ').nth(1).unwrap().parse().unwrap();
        assert!(ms < 500.0, "{dtype}: {detail}");
        let fused = ["kernel: gemm ", " + rope(", " + norm_modulate("];
        let missing = fused.iter().find(|kernel| dtype != "f32" && !record.contains(**kernel));
        assert_eq!(missing, None, "{dtype}");
    }
}

#[test]
fn gpu_faults_end_as_expected_and_leave_the_gpus_usable() {
    if !has_gpus(2) {
        return;
    }
    let drills = ["conditional-collective", "wrong-shape", "member-dies", "stuck-kernel", "mutated-weight"];
    let o = run_tessera(&[&["drill", "--device", "cuda"], &drills[..]].concat());
    let said = String::from_utf8_lossy(&o.stdout).into_owned();
    println!("{said}");
    assert_eq!(o.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&o.stderr));
    let dir = tempfile::tempdir().unwrap();
    stream_latents(&dir.path().join("after"), &["fixtures/wan-even", "--device", "cuda", "--mesh", "tp=2"]);
}
