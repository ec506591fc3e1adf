//! A stream from the binary: what it leaves, how it can be stopped, how it fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use support::{PATIENCE, command, ended, field, root, signal, text};

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// Streams and gives the JSON line of its result.
fn stream(out: &Path, more: &[&str]) -> String {
    let fixed = ["stream", "--out", out.to_str().unwrap(), "--format", "json", "--quiet", "--oversubscribe"];
    let o = run(&[&fixed, more].concat());
    assert_eq!(o.status.code(), Some(0), "{}{}", text(&o.stdout), text(&o.stderr));
    assert!(o.stderr.is_empty(), "{}", text(&o.stderr));
    text(&o.stdout)
}

#[test]
fn ranks_and_a_kept_plan_do_not_show_in_what_comes_out() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let what =
        ["--chunks", "3", "--prompt", "a red square", "--at", "1:square moves left", "--seed-at", "2:7"];
    let one = stream(&at("one"), &[&["fixtures/wan-odd"], &what[..]].concat());
    assert_eq!(field(&one, "chunks"), "3");
    assert_eq!(field(&one, "golden").len(), 64);
    let latents = fs::read(at("one").join("latents.f32")).unwrap();
    assert_eq!(latents.len(), 3 * 4 * 3 * 6 * 10 * 4, "three chunks of [4, 3, 6, 10] in f32");

    let plan = at("plan");
    let o = run(&["plan", "fixtures/wan-odd", "--mesh", "tp=2", "--out", plan.to_str().unwrap()]);
    assert_eq!(o.status.code(), Some(0), "{}", text(&o.stderr));
    let two = stream(&at("two"), &[&["--plan", plan.to_str().unwrap()], &what[..]].concat());
    assert_eq!(field(&one, "golden"), field(&two, "golden"));
    assert_eq!(latents, fs::read(at("two").join("latents.f32")).unwrap());

    let other = stream(&at("other"), &["fixtures/wan-odd", "--chunks", "3", "--prompt", "a red square"]);
    assert_ne!(field(&one, "golden"), field(&other, "golden"));
}

/// The golden hash of the demo model's first chunks, kept in the repository. Whoever changes it on purpose writes the
/// new one there and says why.
#[test]
fn three_fresh_processes_give_the_stored_hash_and_another_order_of_sums_does_not() {
    let stored = fs::read_to_string(root().join("golden/demo.txt")).unwrap();
    let stored: Vec<(&str, &str)> = stored.lines().filter_map(|l| l.split_once(' ')).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut n = 0;
    let mut golden = |more: &[&str]| {
        n += 1;
        let fixed = ["models/demo", "--chunks", "3", "--seed", "1"];
        field(&stream(&dir.path().join(n.to_string()), &[&fixed, more].concat()), "golden")
    };
    for (regime, hash) in &stored {
        for mesh in ["tp=1", "tp=2", "pp=2"] {
            assert_eq!(golden(&["--cache", regime, "--mesh", mesh]), *hash, "{regime} {mesh}");
        }
    }
    let invariant = ["--numerics", "mesh-invariant"];
    let tree = golden(&invariant);
    assert_eq!(golden(&[&invariant[..], &["--mesh", "tp=2", "--strategy", "megatron"]].concat()), tree);
    assert_ne!(tree, stored[0].1, "another order of sums is another result");
}

#[test]
fn without_gpus_a_benchmark_says_what_is_missing_once_before_any_process_starts() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("trace.json");
    let bench = |more: &[&str]| {
        let fixed = ["bench", "dit", "models/demo", "--size", "96x128,48x64", "--size", "64x64"];
        command(&[&fixed, more].concat()).env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    let trace = ["--mesh", "tp=2", "--trace", "3", "--trace-to", out.to_str().unwrap()];
    for more in [&[][..], &trace, &["--serve"], &["--format", "json"]] {
        let o = bench(more);
        let said = text(&o.stdout) + &text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{more:?}: {said}");
        assert!(["T1301", "T1302", "T1304"].iter().any(|c| said.contains(c)), "{more:?}: {said}");
        assert_eq!(said.matches("error").count(), 1, "{more:?}: {said}");
        assert!(!out.exists());
    }
    // What is wrong with the question comes first.
    for (more, status, word) in [
        (&["--trace", "--cluster", "hgx-h200", "--profile", "tesera"][..], 1, "T1105"),
        (&["--size", "48x64"], 1, "twice"),
        (&["--size", "48by64"], 2, "480x832"),
        (&["--serve", "--trace"], 2, "--trace"),
    ] {
        let o = bench(more);
        assert_eq!(o.status.code(), Some(status), "{more:?}: {}", text(&o.stderr));
        assert!(text(&o.stderr).contains(word), "{more:?}: {}", text(&o.stderr));
    }
}

#[test]
fn without_gpus_one_diagnostic_says_what_is_missing_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let stream = |more: &[&str]| {
        let fixed =
            ["stream", "models/demo", "--device", "cuda", "--mesh", "tp=2", "--out", out.to_str().unwrap()];
        // A machine that has GPUs hides them.
        command(&[&fixed, more].concat()).env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    for more in [&[][..], &["--dtype", "bf16"], &["--topology", "pp1", "--format", "json"]] {
        let o = stream(more);
        let said = text(&o.stdout) + &text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{more:?}: {said}");
        let codes = ["T1301", "T1302", "T1304"].map(|c| said.contains(c));
        assert!(codes.contains(&true), "{more:?}: {said}");
        assert_eq!(said.matches("error").count(), 1, "{more:?}: {said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{more:?}");
    }
    let o = run(&["drill", "--device", "cuda", "member-dies", "--keep", out.to_str().unwrap()]);
    if !text(&o.stdout).contains("member-dies") {
        assert_eq!(o.status.code(), Some(1), "{}", text(&o.stderr));
        assert!(!out.exists() && text(&o.stderr).contains("error[T130"), "{}", text(&o.stderr));
    }
}

#[test]
fn a_dtype_beyond_the_processors_kernels_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let at = out.to_str().unwrap();
    let bf16 = ["stream", "models/demo", "--dtype", "bf16", "--chunks", "2", "--quiet", "--out", at];
    let o = run(&[&bf16[..], &["--device", "cpu"]].concat());
    let said = text(&o.stderr);
    assert_eq!((o.status.code(), out.exists()), (Some(1), false), "{said}");
    assert_eq!(said.matches("error").count(), 1, "{said}");
    for word in ["T0801", "computes in f32", "dtype = \"bf16\"", "--dtype f32"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let o = run(&[&bf16[..], &["--device", "sim", "--mesh", "tp=2"]].concat());
    assert_eq!(o.status.code(), Some(0), "{}", text(&o.stderr));
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert_eq!(field(record.lines().next().unwrap(), "dtype"), "bf16");
}

#[test]
fn a_leader_outside_the_mesh_and_modelled_times_change_no_bit() {
    let stored = fs::read_to_string(root().join("golden/demo.txt")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (regime, hash) in stored.lines().filter_map(|l| l.split_once(' ')) {
        let clip = |name: &str, more: &[&str]| {
            let out = dir.path().join(format!("{regime}-{name}"));
            let fixed = ["models/demo", "--chunks", "3", "--seed", "1", "--cache", regime];
            let golden = field(&stream(&out, &[&fixed, more].concat()), "golden");
            assert_eq!(golden, hash, "{regime} {name}");
            (fs::read(out.join("clip.png")).unwrap(), fs::read_to_string(out.join("record.jsonl")).unwrap())
        };
        let (pictures, _) = clip("mesh", &["--mesh", "tp=2"]);
        let modelled = ["--model-decode", "20,40,5", "--model-generate", "100"];
        for (name, topology, mesh, world) in [("pp0", "pp0", "tp=1", 2), ("pp1", "pp1", "tp=2", 3)] {
            let more = [&["--topology", topology, "--mesh", mesh], &modelled[..]].concat();
            let (same, record) = clip(name, &more);
            assert!(same == pictures, "{regime} {name}: other pictures");
            let start = record.lines().next().unwrap();
            assert_eq!(field(start, "topology"), topology);
            assert_eq!(start.matches("\"rank\":").count(), world, "{start}");
            assert!(start.contains("\"role\":\"leader@out0\""), "{start}");
            let chunk = record.lines().find(|l| l.contains("\"kind\":\"chunk\"")).unwrap();
            assert_eq!(chunk.matches("\"rank\":").count(), world, "{chunk}");
        }
    }
}

#[test]
fn a_flush_drops_what_was_under_way_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let slow = ["--model-generate", "80", "--model-decode", "80"];
    let json = stream(&out, &[&["models/demo", "--chunks", "8", "--flush-at", "5"], &slow[..]].concat());
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    let dropped = record.matches("\"what\":\"dropped\"").count();
    let kept: usize = field(&json, "chunks").parse().unwrap();
    assert_eq!((kept + dropped, field(&json, "exit_code")), (8, "0".to_string()), "{json}");
    assert_eq!(field(&json, "dropped"), dropped.to_string());
    assert!((1..=5).contains(&dropped), "{dropped} dropped");
    assert!(record.lines().last().unwrap().contains("\"status\":\"complete\""));
    // The scene after it is one of its own, and nothing of the one before comes after it.
    let chunks: Vec<&str> = record.lines().filter(|l| l.contains("\"kind\":\"chunk\"")).collect();
    let epochs: Vec<String> = chunks.iter().map(|l| field(l, "cache_epoch")).collect();
    assert_eq!(epochs.len(), kept);
    assert!(epochs.is_sorted() && epochs.ends_with(&["1".to_string(), "1".to_string(), "1".to_string()]));
    let cuts: Vec<bool> = chunks.iter().map(|l| field(l, "cut") == "true").collect();
    assert_eq!(cuts.iter().filter(|c| **c).count(), 1, "{cuts:?}");
    assert!(cuts[kept - 3], "{cuts:?}");
}

#[test]
fn the_end_says_where_things_are() {
    let dir = tempfile::tempdir().unwrap();
    let model = root().join("fixtures/wan-odd");
    let mut c = command(&["stream", model.to_str().unwrap(), "--chunks", "2", "--prompt", "red"]);
    let o = c.current_dir(dir.path()).output().unwrap();
    let (out, err) = (text(&o.stdout), text(&o.stderr));
    assert_eq!(o.status.code(), Some(0), "{err}");
    assert!(out.starts_with("out/wan-odd-1: 2 chunks"), "{out}");
    for name in ["golden ", "out/wan-odd-1/latents.f32", "out/wan-odd-1/record.jsonl"] {
        assert!(out.contains(name), "no {name} in {out}");
    }
    assert!(err.contains("chunk 1/2") && err.contains("chunk 2/2") && err.contains("denoise"), "{err}");
}

/// Starts a stream that will not end by itself, and waits until a chunk is on disk.
fn endless(out: &Path) -> Child {
    let args = ["stream", "fixtures/wan-odd", "--mesh", "tp=2", "--oversubscribe", "--chunks", "1000000"];
    let child =
        command(&[&args[..], &["--prompt", "red", "--out", out.to_str().unwrap()]].concat()).spawn().unwrap();
    let begun = Instant::now();
    while fs::metadata(out.join("latents.f32")).map_or(0, |m| m.len()) == 0 {
        assert!(begun.elapsed() < PATIENCE, "no chunk was written");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Processes that were started for ranks by this process.
fn children(of: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|p| p.parse().ok()).collect()
}

#[test]
fn a_request_to_stop_leaves_a_whole_folder() {
    for name in ["INT", "TERM"] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let child = endless(&out);
        signal(child.id(), name);
        let o = ended(child);
        assert_eq!(o.status.code(), Some(130), "{name}: {}", text(&o.stderr));
        assert!(text(&o.stderr).contains("stopping after the chunk under way"), "{}", text(&o.stderr));
        assert!(text(&o.stdout).contains("stopped on request"), "{}", text(&o.stdout));
        let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
        assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
    }
}

/// As a container or a job's manager stops everything in it.
#[test]
fn a_request_that_reaches_ranks_too_drains() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = endless(&out);
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 2);
    ranks.iter().for_each(|r| signal(*r, "TERM"));
    signal(child.id(), "TERM");
    let o = ended(child);
    assert_eq!(o.status.code(), Some(130), "{}", text(&o.stderr));
    assert!(text(&o.stdout).contains("stopped on request"), "{}", text(&o.stdout));
    // Twice to a rank alone ends that rank.
    let out = dir.path().join("again");
    let child = endless(&out);
    let ranks = children(child.id());
    signal(ranks[1], "TERM");
    std::thread::sleep(Duration::from_millis(200));
    assert!(Path::new(&format!("/proc/{}", ranks[1])).exists(), "the first request ended it");
    signal(ranks[1], "TERM");
    let o = ended(child);
    assert_eq!(o.status.code(), Some(10), "{}", text(&o.stderr));
    assert!(text(&o.stderr).contains("killed by signal 15"), "{}", text(&o.stderr));
}

#[test]
fn a_second_request_to_stop_kills() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = endless(&out);
    let ranks = children(child.id());
    // It cannot drain.
    signal(ranks[0], "STOP");
    signal(child.id(), "INT");
    std::thread::sleep(Duration::from_millis(200));
    signal(child.id(), "INT");
    let o = ended(child);
    assert_eq!(o.status.code(), Some(130), "{}", text(&o.stderr));
    assert!(!text(&o.stderr).contains("failed["), "{}", text(&o.stderr));
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
}

#[test]
fn a_killed_rank_is_the_one_cause() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = endless(&out);
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 2);
    signal(ranks[1], "KILL");
    let o = ended(child);
    let err = text(&o.stderr);
    assert_eq!(o.status.code(), Some(10), "{err}");
    assert_eq!(err.matches("failed[").count(), 1, "{err}");
    assert!(err.contains("a rank died, rank 1") && err.contains("more: tessera explain T07"), "{err}");
    assert!(text(&o.stdout).contains("failed"), "{}", text(&o.stdout));
    assert!(ranks.iter().all(|p| !Path::new(&format!("/proc/{p}")).exists()), "a rank was left behind");
}
