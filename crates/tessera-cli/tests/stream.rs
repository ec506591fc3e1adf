//! Tests of `tessera stream`: the files that it writes, how it stops, and how it fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use support::{TIMEOUT, json_field, repo_root, send_signal, tessera_command, to_text, wait_for_end};

fn run_stream(args: &[&str]) -> Output {
    tessera_command(args).output().unwrap()
}

/// Runs a stream and returns the JSON line of its result.
fn stream_json(out: &Path, more: &[&str]) -> String {
    let fixed = ["stream", "--out", out.to_str().unwrap(), "--format", "json", "--quiet", "--oversubscribe"];
    let o = run_stream(&[&fixed, more].concat());
    assert_eq!(o.status.code(), Some(0), "{}{}", to_text(&o.stdout), to_text(&o.stderr));
    assert!(o.stderr.is_empty(), "{}", to_text(&o.stderr));
    to_text(&o.stdout)
}

#[test]
fn results_are_independent_of_ranks_and_saved_plans() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let what =
        ["--chunks", "3", "--prompt", "a red square", "--at", "1:square moves left", "--seed-at", "2:7"];
    let one = stream_json(&at("one"), &[&["fixtures/wan-odd"], &what[..]].concat());
    assert_eq!(json_field(&one, "chunks"), "3");
    assert_eq!(json_field(&one, "golden").len(), 64);
    let latents = fs::read(at("one").join("latents.safetensors")).unwrap();
    assert_eq!(latents.len(), 4096 + 3 * 4 * 3 * 6 * 10 * 4, "three chunks of [4, 3, 6, 10] in f32");

    let plan = at("plan");
    let o = run_stream(&["plan", "fixtures/wan-odd", "--mesh", "tp=2", "--out", plan.to_str().unwrap()]);
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    let two = stream_json(&at("two"), &[&["--plan", plan.to_str().unwrap()], &what[..]].concat());
    assert_eq!(json_field(&one, "golden"), json_field(&two, "golden"));
    let on_two = fs::read(at("two").join("latents.safetensors")).unwrap();
    assert_eq!(latents[4096..], on_two[4096..], "the headers name different plans");

    let other = stream_json(&at("other"), &["fixtures/wan-odd", "--chunks", "3", "--prompt", "a red square"]);
    assert_ne!(json_field(&one, "golden"), json_field(&other, "golden"));
}

/// The golden hashes of the demo model's first chunks are stored in the repository. A change that
/// alters them on purpose stores the new hashes and explains why.
// proves: D-16
#[test]
fn three_fresh_processes_give_the_stored_hash_and_another_sum_order_does_not() {
    let stored = fs::read_to_string(repo_root().join("golden/demo.txt")).unwrap();
    let stored: Vec<(&str, &str)> = stored.lines().filter_map(|l| l.split_once(' ')).collect();
    let dir = tempfile::tempdir().unwrap();
    let mut n = 0;
    let mut golden = |more: &[&str]| {
        n += 1;
        let fixed = ["models/demo", "--chunks", "3", "--seed", "1"];
        json_field(&stream_json(&dir.path().join(n.to_string()), &[&fixed, more].concat()), "golden")
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

/// The stream passes the end of the window, changes its prompt in the sink, in a filling window and in a
/// full one whose positions move back, and cuts.
#[test]
fn a_sink_and_its_recaches_have_the_same_bits_on_every_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let window = "window_frames = 12\nsink = 3\npositions = 15\n";
    let settings = |name: &str, cache: &str| {
        let text = fs::read_to_string(repo_root().join("fixtures/wan-odd/stream.toml")).unwrap();
        let file = dir.path().join(name);
        fs::write(&file, text.replace("window_frames = 6\n", cache)).unwrap();
        file.to_str().unwrap().to_string()
    };
    let kept = settings("kept.toml", &format!("{window}recache = true\n"));
    let stale = settings("stale.toml", window);
    let mut n = 0;
    let mut golden = |file: &str, more: &[&str]| {
        n += 1;
        let out = dir.path().join(n.to_string());
        let prompts =
            ["--prompt", "a red square", "--at", "1:square", "--at", "3:moves left", "--at", "7:red"];
        let fixed = ["fixtures/wan-odd", "--stream", file, "--chunks", "10", "--cut-at", "8"];
        let json = stream_json(&out, &[&fixed, &prompts[..], more].concat());
        let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
        assert_eq!(record.matches("positions move by -").count(), 2, "{record}");
        json_field(&json, "golden")
    };
    let one = golden(&kept, &[]);
    for more in [&["--mesh", "tp=2"][..], &["--mesh", "pp=2"], &["--mesh", "tp=5", "--topology", "pp1"]] {
        assert_eq!(golden(&kept, more), one, "{more:?}");
    }
    assert_ne!(golden(&stale, &[]), one, "a new prompt changes the keys and values of earlier chunks");
}

#[test]
fn guidance_has_the_same_bits_on_every_mesh_and_differs_from_a_stream_without_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut n = 0;
    let mut golden = |more: &[&str]| {
        n += 1;
        let fixed = ["fixtures/wan-odd", "--chunks", "4", "--cut-at", "3", "--prompt", "a red square"];
        let changes = ["--at", "2:square moves"];
        let out = dir.path().join(n.to_string());
        json_field(&stream_json(&out, &[&fixed, &changes[..], more].concat()), "golden")
    };
    let guided = ["--guidance", "3", "--negative-prompt", "slowly left"];
    let one = golden(&guided);
    for mesh in [&["--mesh", "tp=2"][..], &["--mesh", "pp=2"], &["--mesh", "tp=5", "--topology", "pp1"]] {
        assert_eq!(golden(&[&guided, mesh].concat()), one, "{mesh:?}");
    }
    let plain = golden(&[]);
    let unconditional = golden(&["--guidance", "3"]);
    assert!(plain != one && unconditional != one && plain != unconditional);
    assert_eq!(golden(&["--guidance", "1"]), plain, "a scale of 1 has no effect");

    let settings = dir.path().join("guided.toml");
    let text = fs::read_to_string(repo_root().join("fixtures/wan-odd/stream.toml")).unwrap();
    let table = "[guidance]\nscale = 5\nnegative_prompt = \"slowly left\"\n";
    fs::write(&settings, format!("{text}{table}")).unwrap();
    let stream = ["--stream", settings.to_str().unwrap()];
    assert_ne!(golden(&stream), one, "the scale is another one");
    assert_eq!(golden(&[&stream[..], &["--guidance", "3"]].concat()), one, "the option overrides the file");
}

#[test]
fn bad_guidance_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    for (more, code, hint) in [
        (&["--guidance", "0"][..], "T0411", "distilled"),
        (&["--guidance", "-3"], "T0411", "distilled"),
        (&["--guidance", "NaN"], "T0411", "distilled"),
        (&["--guidance", "inf"], "T0411", "distilled"),
        (&["--negative-prompt", "left"], "T0411", "--guidance SCALE"),
        (&["--guidance", "3", "--negative-prompt", "blurry"], "T0421", "known words"),
    ] {
        let fixed =
            ["stream", "fixtures/wan-odd", "--prompt", "a red square", "--out", out.to_str().unwrap()];
        let o = run_stream(&[&fixed, more].concat());
        let said = to_text(&o.stdout) + &to_text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{more:?}: {said}");
        assert!(said.contains(code) && said.contains(hint), "{more:?}: {said}");
        assert!(!out.exists());
    }
}

#[test]
fn without_gpus_a_benchmark_reports_one_error_before_any_process_starts() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("trace.json");
    let bench = |more: &[&str]| {
        let fixed = ["bench", "dit", "models/demo", "--size", "96x128,48x64", "--size", "64x64"];
        tessera_command(&[&fixed, more].concat()).env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    let trace = ["--mesh", "tp=2", "--trace", "3", "--trace-to", out.to_str().unwrap()];
    for more in [&[][..], &trace, &["--serve"], &["--format", "json"]] {
        let o = bench(more);
        let said = to_text(&o.stdout) + &to_text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{more:?}: {said}");
        assert!(["T1301", "T1302", "T1304"].iter().any(|c| said.contains(c)), "{more:?}: {said}");
        assert_eq!(said.matches("error").count(), 1, "{more:?}: {said}");
        assert!(!out.exists());
    }
    // Errors of the request come first.
    for (more, status, word) in [
        (&["--trace", "--cluster", "hgx-h200", "--profile", "tesera"][..], 1, "T1105"),
        (&["--size", "48x64"], 1, "twice"),
        (&["--size", "48by64"], 2, "480x832"),
        (&["--serve", "--trace"], 2, "--trace"),
    ] {
        let o = bench(more);
        assert_eq!(o.status.code(), Some(status), "{more:?}: {}", to_text(&o.stderr));
        assert!(to_text(&o.stderr).contains(word), "{more:?}: {}", to_text(&o.stderr));
    }
}

#[test]
fn without_gpus_one_diagnostic_is_printed_and_no_file_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let stream = |more: &[&str]| {
        let fixed =
            ["stream", "models/demo", "--device", "cuda", "--mesh", "tp=2", "--out", out.to_str().unwrap()];
        // Hides the GPUs of a machine that has some.
        tessera_command(&[&fixed, more].concat()).env("CUDA_VISIBLE_DEVICES", "").output().unwrap()
    };
    for more in [&[][..], &["--dtype", "bf16"], &["--topology", "pp1", "--format", "json"]] {
        let o = stream(more);
        let said = to_text(&o.stdout) + &to_text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{more:?}: {said}");
        let codes = ["T1301", "T1302", "T1304"].map(|c| said.contains(c));
        assert!(codes.contains(&true), "{more:?}: {said}");
        assert_eq!(said.matches("error").count(), 1, "{more:?}: {said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{more:?}");
    }
    let o = run_stream(&["drill", "--device", "cuda", "member-dies", "--keep", out.to_str().unwrap()]);
    if !to_text(&o.stdout).contains("member-dies") {
        assert_eq!(o.status.code(), Some(1), "{}", to_text(&o.stderr));
        assert!(!out.exists() && to_text(&o.stderr).contains("error[T130"), "{}", to_text(&o.stderr));
    }
}

#[test]
fn a_model_runs_in_low_precision_on_cpus_and_on_the_simulated_machine() {
    let dir = tempfile::tempdir().unwrap();
    let bf16 = ["stream", "models/demo", "--dtype", "bf16", "--chunks", "2", "--quiet", "--mesh", "tp=2"];
    for device in ["cpu", "sim"] {
        let out = dir.path().join(device);
        let o = run_stream(&[&bf16[..], &["--device", device, "--out", out.to_str().unwrap()]].concat());
        assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
        let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
        assert_eq!(json_field(record.lines().next().unwrap(), "dtype"), "bf16");
    }
}

// proves: V-07
#[test]
fn a_leader_outside_the_mesh_and_synthetic_delays_change_no_bit() {
    let stored = fs::read_to_string(repo_root().join("golden/demo.txt")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (regime, hash) in stored.lines().filter_map(|l| l.split_once(' ')) {
        let clip = |name: &str, more: &[&str]| {
            let out = dir.path().join(format!("{regime}-{name}"));
            let fixed = ["models/demo", "--chunks", "3", "--seed", "1", "--cache", regime];
            let golden = json_field(&stream_json(&out, &[&fixed, more].concat()), "golden");
            assert_eq!(golden, hash, "{regime} {name}");
            (fs::read(out.join("clip.png")).unwrap(), fs::read_to_string(out.join("record.jsonl")).unwrap())
        };
        let (pictures, _) = clip("mesh", &["--mesh", "tp=2"]);
        let delays = ["--min-decode-ms", "20,40,5", "--min-generate-ms", "100"];
        for (name, topology, mesh, world) in [("pp0", "pp0", "tp=1", 2), ("pp1", "pp1", "tp=2", 3)] {
            let more = [&["--topology", topology, "--mesh", mesh], &delays[..]].concat();
            let (same, record) = clip(name, &more);
            assert!(same == pictures, "{regime} {name}: other pictures");
            let start = record.lines().next().unwrap();
            assert_eq!(json_field(start, "topology"), topology);
            assert_eq!(start.matches("\"rank\":").count(), world, "{start}");
            assert!(start.contains("\"role\":\"leader@out0\""), "{start}");
            let chunk = record.lines().find(|l| l.contains("\"kind\":\"chunk\"")).unwrap();
            assert_eq!(chunk.matches("\"rank\":").count(), world, "{chunk}");
        }
    }
}

// proves: O-14
#[test]
fn poisoned_memory_changes_no_bit_of_a_correct_run() {
    let stored = fs::read_to_string(repo_root().join("golden/demo.txt")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut n = 0;
    for (regime, hash) in stored.lines().filter_map(|l| l.split_once(' ')) {
        for more in [
            &["--mesh", "tp=2"][..],
            &["--mesh", "pp=2", "--topology", "pp1"],
            &["--mesh", "tp=2", "--strategy", "megatron", "--overlap-chunks", "2"],
        ] {
            let mut golden = |poison: &[&str]| {
                n += 1;
                let fixed = ["models/demo", "--chunks", "3", "--seed", "1", "--cache", regime];
                let out = dir.path().join(n.to_string());
                json_field(&stream_json(&out, &[&fixed, more, poison].concat()), "golden")
            };
            // The partial sums of Megatron are added in an order of their own.
            let plain = if more.contains(&"megatron") { golden(&[]) } else { hash.to_string() };
            assert_eq!(golden(&["--poison"]), plain, "{regime} {more:?}");
        }
    }
    let o = run_stream(&["stream", "models/demo", "--device", "sim", "--poison"]);
    assert!(o.status.code() == Some(2) && to_text(&o.stderr).contains("--poison"), "{}", to_text(&o.stderr));
}

// proves: R-05
#[test]
fn a_flush_drops_and_reports_chunks_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let slow = ["--min-generate-ms", "80", "--min-decode-ms", "80"];
    let json = stream_json(&out, &[&["models/demo", "--chunks", "8", "--flush-at", "5"], &slow[..]].concat());
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    let dropped = record.matches("\"event\":\"dropped\"").count();
    let kept: usize = json_field(&json, "chunks").parse().unwrap();
    assert_eq!((kept + dropped, json_field(&json, "exit_code")), (8, "0".to_string()), "{json}");
    assert_eq!(json_field(&json, "dropped"), dropped.to_string());
    assert!((1..=5).contains(&dropped), "{dropped} dropped");
    assert!(record.lines().last().unwrap().contains("\"status\":\"complete\""));
    // The flush starts a new scene, and no chunk of the old scene follows it.
    let chunks: Vec<&str> = record.lines().filter(|l| l.contains("\"kind\":\"chunk\"")).collect();
    let epochs: Vec<String> = chunks.iter().map(|l| json_field(l, "cache_epoch")).collect();
    assert_eq!(epochs.len(), kept);
    assert!(epochs.is_sorted() && epochs.ends_with(&["1".to_string(), "1".to_string(), "1".to_string()]));
    let cuts: Vec<bool> = chunks.iter().map(|l| json_field(l, "cut") == "true").collect();
    assert_eq!(cuts.iter().filter(|c| **c).count(), 1, "{cuts:?}");
    assert!(cuts[kept - 3], "{cuts:?}");
}

/// Copies the demo model and overwrites bytes of its weight file.
fn changed_demo(to: &Path, at: usize, change: impl Fn(&mut [u8])) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(repo_root().join("models/demo")).unwrap() {
        let from = entry.unwrap().path();
        fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
    }
    let file = to.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    change(&mut bytes[at..at + 2]);
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_weight_that_is_not_finite_ends_the_run_before_its_first_call() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("out"));
    changed_demo(&model, 558_776, |bf16| bf16.copy_from_slice(&[0xc0, 0x7f]));
    let (model, at) = (model.to_str().unwrap(), out.to_str().unwrap());
    let o = run_stream(&[
        "stream",
        model,
        "--mesh",
        "tp=2",
        "--chunks",
        "2",
        "-q",
        "--oversubscribe",
        "--out",
        at,
    ]);
    let said = to_text(&o.stdout) + &to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(16), "{said}");
    for part in ["T0770", "is NaN at [", "model/model.safetensors", ", rank "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    let end = record.lines().last().unwrap();
    assert_eq!(json_field(end, "output_complete"), "false");
    assert!(end.contains("T0770") && !record.contains("\"kind\":\"chunk\""), "{record}");
}

#[test]
fn a_digest_of_all_weights_is_recorded_on_every_mesh_and_a_plan_may_pin_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let digests = ["tp=1", "tp=2"].map(|mesh| {
        let fixed = ["models/demo", "--chunks", "1", "--mesh", mesh];
        let digest = json_field(&stream_json(&at(mesh), &fixed), "weights");
        let record = fs::read_to_string(at(mesh).join("record.jsonl")).unwrap();
        assert_eq!(json_field(record.lines().next().unwrap(), "weights"), digest);
        let report = fs::read_to_string(at(mesh).join("report.html")).unwrap();
        assert!(report.contains(&digest), "{mesh}");
        digest
    });
    assert!(digests[0] == digests[1] && digests[0].len() == 64, "{digests:?}");

    let plan = |name: &str, more: &[&str]| {
        let folder = at(name);
        let fixed = ["plan", "models/demo", "--mesh", "tp=2", "--out", folder.to_str().unwrap()];
        let o = run_stream(&[&fixed, more].concat());
        assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
        (folder, to_text(&o.stdout))
    };
    let (plain, _) = plan("plain", &[]);
    assert!(!fs::read_to_string(plain.join("mapping.toml")).unwrap().contains("weights"));
    let (pinned, summary) = plan("pinned", &["--pin-weights"]);
    assert!(summary.contains(&digests[0]), "{summary}");
    changed_demo(&at("other"), 558_776, |bf16| bf16[0] ^= 1);
    let (other, out) = (at("other"), at("out"));
    for (folder, model, status) in [
        (&pinned, "models/demo", 0),
        (&plain, other.to_str().unwrap(), 0),
        (&pinned, other.to_str().unwrap(), 1),
    ] {
        let _ = fs::remove_dir_all(&out);
        let folder = folder.to_str().unwrap();
        let fixed = ["stream", model, "--plan", folder, "--chunks", "1", "-q", "--oversubscribe", "--out"];
        let o = run_stream(&[&fixed[..], &[out.to_str().unwrap()]].concat());
        let said = to_text(&o.stderr);
        assert_eq!((o.status.code(), out.exists()), (Some(status), status == 0), "{said}");
        if status != 0 {
            assert!(said.contains("T0041") && said.contains(&digests[0]), "{said}");
            assert_eq!(said.matches("with digest").count(), 2, "{said}");
        }
    }
}

#[test]
fn the_summary_lists_the_output_files() {
    let dir = tempfile::tempdir().unwrap();
    let model = repo_root().join("fixtures/wan-odd");
    let mut c = tessera_command(&["stream", model.to_str().unwrap(), "--chunks", "2", "--prompt", "red"]);
    let o = c.current_dir(dir.path()).output().unwrap();
    let (out, err) = (to_text(&o.stdout), to_text(&o.stderr));
    assert_eq!(o.status.code(), Some(0), "{err}");
    assert!(out.starts_with("out/wan-odd-1: 2 chunks"), "{out}");
    for name in ["golden ", "out/wan-odd-1/latents.safetensors", "out/wan-odd-1/record.jsonl"] {
        assert!(out.contains(name), "no {name} in {out}");
    }
    assert!(err.contains("chunk 1/2") && err.contains("chunk 2/2") && err.contains("denoise"), "{err}");
}

/// Starts a stream that does not end by itself.
fn spawn_endless(out: &Path) -> Child {
    let args = ["stream", "fixtures/wan-odd", "--mesh", "tp=2", "--oversubscribe", "--chunks", "1000000"];
    tessera_command(&[&args[..], &["--prompt", "red", "--out", out.to_str().unwrap()]].concat())
        .spawn()
        .unwrap()
}

/// Starts a stream that does not end by itself, and waits until a chunk is on disk.
fn start_endless(out: &Path) -> Child {
    let child = spawn_endless(out);
    let begun = Instant::now();
    while fs::metadata(out.join("latents.safetensors")).map_or(0, |m| m.len()) <= 4096 {
        assert!(begun.elapsed() < TIMEOUT, "no chunk was written");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Returns the process ids of the ranks that a process has started. A child that has not executed its
/// program yet is none: the process that starts it waits for that, so to stop it would stop both.
fn child_pids(of: u32) -> Vec<u32> {
    let command_line = |pid: u32| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let list = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let children = list.split_whitespace().filter_map(|p| p.parse().ok());
    children
        .filter(|child| !matches!(command_line(*child), line if line.is_empty() || line == command_line(of)))
        .collect()
}

// proves: S-01
#[test]
fn a_stop_request_leaves_a_complete_run_folder() {
    for name in ["INT", "TERM"] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let child = start_endless(&out);
        send_signal(child.id(), name);
        let o = wait_for_end(child);
        assert_eq!(o.status.code(), Some(130), "{name}: {}", to_text(&o.stderr));
        assert!(to_text(&o.stderr).contains("stopping after the current chunk"), "{}", to_text(&o.stderr));
        assert!(to_text(&o.stdout).contains("stopped on request"), "{}", to_text(&o.stdout));
        let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
        assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
    }
}

/// Containers and job managers stop all processes at once.
#[test]
fn a_stop_request_to_ranks_too_drains() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = start_endless(&out);
    let ranks = child_pids(child.id());
    assert_eq!(ranks.len(), 2);
    ranks.iter().for_each(|r| send_signal(*r, "TERM"));
    send_signal(child.id(), "TERM");
    let o = wait_for_end(child);
    assert_eq!(o.status.code(), Some(130), "{}", to_text(&o.stderr));
    assert!(to_text(&o.stdout).contains("stopped on request"), "{}", to_text(&o.stdout));
    // A second request to one rank ends that rank.
    let out = dir.path().join("again");
    let child = start_endless(&out);
    let ranks = child_pids(child.id());
    send_signal(ranks[1], "TERM");
    std::thread::sleep(Duration::from_millis(200));
    assert!(Path::new(&format!("/proc/{}", ranks[1])).exists(), "the first request ended it");
    send_signal(ranks[1], "TERM");
    let o = wait_for_end(child);
    assert_eq!(o.status.code(), Some(10), "{}", to_text(&o.stderr));
    assert!(to_text(&o.stderr).contains("killed by signal 15"), "{}", to_text(&o.stderr));
}

#[test]
fn a_second_stop_request_kills() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = start_endless(&out);
    let ranks = child_pids(child.id());
    // A stopped rank cannot drain.
    send_signal(ranks[0], "STOP");
    send_signal(child.id(), "INT");
    std::thread::sleep(Duration::from_millis(200));
    send_signal(child.id(), "INT");
    let o = wait_for_end(child);
    assert_eq!(o.status.code(), Some(130), "{}", to_text(&o.stderr));
    assert!(!to_text(&o.stderr).contains("failed["), "{}", to_text(&o.stderr));
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
}

// proves: S-07, S-13
#[test]
fn a_killed_rank_is_the_only_cause() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = start_endless(&out);
    let ranks = child_pids(child.id());
    assert_eq!(ranks.len(), 2);
    send_signal(ranks[1], "KILL");
    let o = wait_for_end(child);
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(10), "{err}");
    assert_eq!(err.matches("failed[").count(), 1, "{err}");
    assert!(err.contains("a rank died, rank 1") && err.contains("more: tessera explain T07"), "{err}");
    assert!(to_text(&o.stdout).contains("failed"), "{}", to_text(&o.stdout));
    assert!(ranks.iter().all(|p| !Path::new(&format!("/proc/{p}")).exists()), "a rank was left behind");
}

// proves: S-16
#[test]
fn a_stopped_launcher_leaves_no_stopped_rank_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let child = start_endless(&out);
    let ranks = child_pids(child.id());
    send_signal(child.id(), "STOP");
    send_signal(ranks[1], "STOP");
    let o = wait_for_end(child);
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(11), "{err}");
    assert!(
        err.contains("a rank stalled, rank 1") && err.contains("the launching process was stopped"),
        "{err}"
    );
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("the launching process was stopped"), "{record}");
    assert!(ranks.iter().all(|p| !Path::new(&format!("/proc/{p}")).exists()), "a rank was left behind");
}

// proves: S-17
#[test]
fn a_rank_that_is_stopped_before_its_first_heartbeat_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let child = spawn_endless(&dir.path().join("run"));
    let ranks = loop {
        let ranks = child_pids(child.id());
        if ranks.len() == 2 {
            break ranks;
        }
    };
    send_signal(ranks[1], "STOP");
    let since = Instant::now();
    let o = wait_for_end(child);
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(11), "{err}");
    assert!(err.contains("a rank stalled, rank 1"), "{err}");
    assert!(since.elapsed() < Duration::from_secs(30), "the run waited for a rank that was loading");
}
