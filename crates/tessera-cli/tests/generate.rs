//! `tessera generate` as a user runs it.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use support::{
    assert_ends_with, both_outputs, repo_root, run_tessera, send_signal, tessera_command, to_text,
    wait_for_end,
};

#[track_caller]
fn success_stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", both_outputs(output));
    to_text(&output.stdout)
}

#[test]
fn generate_continues_texts_on_every_mesh_and_names_what_does_not_fit() {
    let text = |more: &[&str]| {
        let args = ["generate", "models/tales", "--prompt", "The red circle", "--max-tokens", "120"];
        success_stdout(&run_tessera(&[&args[..], more].concat()))
    };
    let alone = text(&[]);
    assert!(alone.starts_with(" has a ring.") && alone.ends_with("The end.\n"), "{alone}");
    assert_eq!(text(&["--mesh", "tp=2"]), alone);
    // The template of the model writes the token of the beginning and joins messages with a space.
    let chat = ["generate", "models/tales", "--chat", "--system", "The red", "--prompt", "circle"];
    let chat = [&chat[..], &["--max-tokens", "120"]].concat();
    assert_eq!(success_stdout(&run_tessera(&chat)), alone);
    assert_ends_with(&["generate", "models/tales", "--prompt", "x", "--system", "y"], 2, &["--chat"]);
    let json: serde_json::Value =
        serde_json::from_str(&text(&["--prompt", "One day", "--format", "json"])).unwrap();
    assert_eq!(json["texts"][0]["text"].as_str().unwrap().to_string() + "\n", alone);
    assert_eq!(
        (json["texts"].as_array().unwrap().len(), json["texts"][0]["finish"].as_str()),
        (2, Some("end"))
    );
    let moe = |mesh: &'static str| {
        [
            "generate",
            "fixtures/lm/qwen3-moe",
            "--prompt-ids",
            "17,4",
            "--max-tokens",
            "9",
            "--oversubscribe",
            "--mesh",
            mesh,
        ]
    };
    assert_eq!(success_stdout(&run_tessera(&moe("ep=3"))), success_stdout(&run_tessera(&moe("ep=1"))));
    assert_eq!(success_stdout(&run_tessera(&moe("ep=4"))), success_stdout(&run_tessera(&moe("ep=1"))));
    let too_many = ["T0602", "ep = 7 leaves a rank without one of 6 experts", "1, 2, 3 or 6"];
    assert_ends_with(&moe("ep=7"), 1, &too_many);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mapping.toml");
    fs::write(&file, "[mesh]\nep = 4\n[experts]\ntokens = \"sharded\"\n").unwrap();
    let sharded = ["generate", "fixtures/lm/qwen3-moe", "--prompt-ids", "17,4", "--max-tokens", "9"];
    let sharded = [&sharded[..], &["--oversubscribe", "--mapping", file.to_str().unwrap()]].concat();
    assert_eq!(success_stdout(&run_tessera(&sharded)), success_stdout(&run_tessera(&moe("ep=1"))));
    let llama = |more: &[&'static str]| [&["generate", "fixtures/lm/llama"], more].concat();
    assert_ends_with(&llama(&["--prompt", "x"]), 2, &["T0030", "no tokenizer.json", "--prompt-ids"]);
    assert_ends_with(&llama(&["--prompt-ids", "1,999"]), 1, &["T0086", "id 999", "211 ids"]);
    assert_ends_with(&llama(&["--prompt-ids", "1", "--max-tokens", "600"]), 1, &["T0086", "601 positions"]);
    assert_ends_with(
        &llama(&["--prompt-ids", "1", "--mesh", "tp=7"]),
        1,
        &["T0602", "6 heads", "up to tp = 6"],
    );
    assert_ends_with(&llama(&["--prompt-ids", "1", "--mesh", "ep=2"]), 1, &["T0601", "no experts"]);
    assert_ends_with(&llama(&["--prompt-ids", "1", "--temperature", "-1"]), 2, &["--temperature"]);
    assert_ends_with(&["generate", "nowhere", "--prompt", "x"], 1, &["T0010", "nowhere"]);
    assert_ends_with(&["generate", "models/demo", "--prompt", "x"], 1, &["T0430", "LlamaForCausalLM"]);
}

#[test]
fn a_file_of_prompts_with_kinds_gives_the_texts_of_the_command_line_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("prompts.jsonl"), dir.path().join("out"));
    let prompts = ["The red circle", "One day", "The green square wants to", "The blue circle"];
    let kinds = [Some("tale"), Some("start"), None, Some("tale")];
    let line = |(prompt, kind): (&str, Option<&str>)| match kind {
        Some(kind) => serde_json::json!({"prompt": prompt, "kind": kind}).to_string() + "\n",
        None => serde_json::json!({"prompt": prompt}).to_string() + "\n",
    };
    fs::write(&file, prompts.into_iter().zip(kinds).map(line).collect::<String>()).unwrap();
    let more = ["--max-tokens", "12", "--format", "json"];
    let listed = prompts.iter().flat_map(|prompt| ["--prompt", prompt]);
    let args: Vec<&str> = ["generate", "models/tales"].into_iter().chain(listed).chain(more).collect();
    let alone = printed_json(&args);
    let from_file = ["generate", "models/tales", "--prompts", file.to_str().unwrap()];
    let found = printed_json(&[&from_file[..], &more, &["--out", out.to_str().unwrap()]].concat());
    let of_texts = |printed: &serde_json::Value, key: &str| -> Vec<serde_json::Value> {
        printed["texts"].as_array().unwrap().iter().map(|text| text[key].clone()).collect()
    };
    assert_eq!(of_texts(&found, "ids"), of_texts(&alone, "ids"));
    let expected = kinds.map(|kind| kind.map_or(serde_json::Value::Null, serde_json::Value::from));
    assert_eq!(of_texts(&found, "kind"), expected);
    // One call reads the four prompts without kinds, and one the prompts of each kind or of none.
    assert_eq!((&alone["prompts"]["calls"], &found["prompts"]["calls"]), (&1.into(), &3.into()));
    let lines = |name: &str| -> Vec<serde_json::Value> {
        let text = fs::read_to_string(out.join(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (texts, start) = (lines("text.jsonl"), lines("record.jsonl").remove(0));
    for (i, (prompt, kind)) in prompts.into_iter().zip(kinds).enumerate() {
        assert_eq!((texts[i]["prompt"].as_str(), texts[i]["kind"].as_str()), (Some(prompt), kind));
        let recorded = &start["prompts"][i];
        assert_eq!((recorded["text"].as_str(), recorded["kind"].as_str()), (Some(prompt), kind));
    }
}

#[test]
fn a_file_of_prompts_that_cannot_be_used_is_refused_with_the_lines_that_are_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompts.jsonl");
    let args = ["generate", "models/tales", "--prompts", file.to_str().unwrap()];
    assert_ends_with(&args, 1, &["T0095", "prompts.jsonl cannot be read"]);
    fs::write(&file, "{\"prompt\": \"x\"}\n{\"prompt\": 7}\n{\"text\": \"x\"}\n").unwrap();
    assert_ends_with(&args, 1, &["T0095", "line 2 of", "line 3 of", "unknown field `text`"]);
    fs::write(&file, "{\"prompt_ids\": [17, 4]}\n").unwrap();
    assert_ends_with(&[&args[..], &["--chat"]].concat(), 1, &["T0095", "--chat"]);
    for more in [["--prompt", "x"], ["--prompt-ids", "1"]] {
        assert_ends_with(&[&args[..], &more].concat(), 2, &["--prompts", "cannot be used with"]);
    }
    fs::write(&file, "{\"prompt_ids\": [17, 99999]}\n").unwrap();
    assert_ends_with(&args, 1, &["T0086", "id 99999"]);
}

#[test]
fn generate_names_a_missing_shard_and_a_tokenizer_of_another_model() {
    let dir = tempfile::tempdir().unwrap();
    let shards = dir.path().join("llama");
    copy_folder(&repo_root().join("fixtures/lm/llama"), &shards);
    let lost = fs::read_dir(&shards).unwrap().map(|f| f.unwrap().path());
    let lost = lost.filter(|p| p.to_string_lossy().contains("-of-")).max().unwrap();
    fs::remove_file(&lost).unwrap();
    let ids = ["generate", shards.to_str().unwrap(), "--prompt-ids", "1"];
    assert_ends_with(&ids, 1, &["T0501", &lost.file_name().unwrap().to_string_lossy()]);
    let other = dir.path().join("other");
    copy_folder(&repo_root().join("fixtures/lm/llama"), &other);
    fs::copy(repo_root().join("models/tales/tokenizer.json"), other.join("tokenizer.json")).unwrap();
    let text = ["generate", other.to_str().unwrap(), "--prompt", "x"];
    assert_ends_with(&text, 1, &["T0452", "has the id 895", "has 211 ids"]);
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(from).unwrap().map(|f| f.unwrap()).filter(|f| f.path().is_file()) {
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

/// A text that no test waits for.
fn long_text(out: &Path) -> Vec<String> {
    let args =
        ["generate", "fixtures/lm/llama", "--prompt-ids", "17,4", "--max-tokens", "500", "--mesh", "tp=2"];
    let folder = ["--oversubscribe", "--out", out.to_str().unwrap()];
    args.iter().chain(&folder).map(ToString::to_string).collect()
}

#[test]
fn a_run_leaves_a_record_whose_ids_are_those_of_any_other_mesh() {
    let dir = tempfile::tempdir().unwrap();
    let record = |mesh: &str| {
        let out = dir.path().join(mesh.replace('=', "-"));
        let args = ["generate", "fixtures/lm/qwen3-moe", "--prompt-ids", "17,4,9", "--max-tokens", "7"];
        let more = ["--prompt-rows", "2", "--oversubscribe", "--mesh", mesh, "--out", out.to_str().unwrap()];
        success_stdout(&run_tessera(&[&args[..], &more].concat()));
        let text = fs::read_to_string(out.join("record.jsonl")).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert!(out.join("flight/rank-1.jsonl").is_file() || mesh == "tp=1", "{mesh}");
        lines
    };
    let alone = record("tp=1");
    assert_eq!((alone[0]["generates"].as_str(), alone[0]["cache"].as_str()), (Some("text"), Some("pages")));
    let calls: Vec<_> = alone.iter().filter(|l| l["kind"] == "chunk").collect();
    let ids: u64 = calls.iter().map(|c| c["frames"].as_u64().unwrap()).sum();
    let end = alone.last().unwrap();
    assert_eq!((end["status"].as_str(), end["frames"].as_u64()), (Some("complete"), Some(ids)));
    // Two calls read the prompt, and the second of them chooses the first id.
    assert_eq!(calls.len() as u64, ids + 1);
    for mesh in ["tp=2", "ep=2", "pp=2"] {
        assert_eq!(record(mesh).last().unwrap()["golden"], end["golden"], "{mesh}");
    }
    let taken = dir.path().join("tp-1");
    let args = ["generate", "fixtures/lm/llama", "--prompt-ids", "1", "--out", taken.to_str().unwrap()];
    assert_ends_with(&args, 1, &["T0013", "already exists"]);
}

// What each router chose in every step, on ranks that share the experts, with several steps in a call.
#[test]
fn a_run_that_counts_its_experts_leaves_the_counts_of_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let count = |mesh: &str, ids_per_call: &str| {
        let name = format!("{}-{ids_per_call}", mesh.replace(" = ", "").replace('\n', "-"));
        let (file, out) = (dir.path().join(format!("{name}.toml")), dir.path().join(&name));
        let keys = "tokens = \"sharded\"\ntoken_groups = 6\ncapacity_factor = 0.5\nreroute_bytes = 64\nstatistics = true\n";
        fs::write(&file, format!("[mesh]\n{mesh}\n[experts]\n{keys}")).unwrap();
        let args =
            ["generate", "fixtures/lm/qwen3-moe", "--prompt-ids", "17,4,9,3,8,1,2,3", "--max-tokens", "9"];
        let more =
            ["--prompt-rows", "8", "--oversubscribe", "--format", "json", "--ids-per-call", ids_per_call];
        let files = ["--mapping", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let printed = printed_json(&[&args[..], &more, &files].concat());
        assert!(fs::read_to_string(out.join("report.html")).unwrap().contains("Expert load"), "{name}");
        let lines = fs::read_to_string(out.join("experts.jsonl")).unwrap();
        let steps: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        (printed["experts"].clone(), steps)
    };
    let (load, alone) = count("ep = 1", "1");
    // One call reads the prompt and chooses the first id; 8 steps follow.
    assert_eq!(alone.len(), 9);
    let sum = |layer: &serde_json::Value, column: &str| {
        layer[column].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>()
    };
    for (i, step) in alone.iter().enumerate() {
        let layers = step["layers"].as_object().unwrap();
        assert_eq!(layers.len(), 2, "{step}");
        for layer in layers.values() {
            // 2 experts for each of 8 rows of the prompt, or for one row.
            assert_eq!(sum(layer, "chosen"), if i == 0 { 3 * 8 } else { 3 }, "{step}");
            let rest = sum(layer, "kept") + sum(layer, "moved") + sum(layer, "dropped");
            assert_eq!(rest, sum(layer, "chosen"), "{step}");
        }
    }
    assert_eq!((load[0]["layer"].as_u64(), load[0]["chosen"].as_u64()), (Some(0), Some(3 * (8 + 8))));
    assert_eq!(load[0]["balance"].as_str(), Some("n/a"), "few choices vary by chance");
    for (mesh, ids_per_call) in [("ep = 1", "4"), ("ep = 2", "1"), ("ep = 3\npp = 2", "4")] {
        let (_, steps) = count(mesh, ids_per_call);
        let layers =
            |steps: &[serde_json::Value]| steps.iter().map(|s| s["layers"].clone()).collect::<Vec<_>>();
        assert_eq!(layers(&steps), layers(&alone), "{mesh}, {ids_per_call} ids per call");
    }
}

// The choices of one run decide which experts the next one copies, and where they are.
#[test]
fn copies_of_the_experts_that_a_run_chose_most_even_out_the_ranks_of_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, keys: &str| {
        let (file, out) = (dir.path().join(format!("{name}.toml")), dir.path().join(name));
        let bias = "bias = [4.0, 0.0, 0.0, 0.0, 0.0, 0.0]\n";
        fs::write(&file, format!("[mesh]\nep = 2\n[experts]\nstatistics = true\n{bias}{keys}")).unwrap();
        let args =
            ["generate", "fixtures/lm/qwen3-moe", "--prompt-ids", "17,4,9,3,8,1,2,3", "--max-tokens", "24"];
        let more = ["--prompt-rows", "8", "--oversubscribe", "--format", "json"];
        let files = ["--mapping", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
        printed_json(&[&args[..], &more, &files].concat())
    };
    let busiest = |printed: &serde_json::Value| -> Vec<f64> {
        let layers = printed["experts"].as_array().unwrap();
        layers.iter().map(|layer| layer["busiest_over_mean"].as_f64().unwrap()).collect()
    };
    // Every token chooses expert 0, which rank 0 has.
    let counted = run("counted", "");
    let copied = run("copied", "replicas = 2\nchoices_file = \"counted/experts.jsonl\"\n");
    assert_eq!(copied["texts"], counted["texts"]);
    let (before, after) = (busiest(&counted), busiest(&copied));
    assert!(before.iter().all(|x| *x > 1.15), "{before:?}");
    assert!(before.iter().zip(&after).all(|(before, after)| after < before), "{before:?} {after:?}");
    let lines = fs::read_to_string(dir.path().join("copied/experts.jsonl")).unwrap();
    let step: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    let residents = step["layers"]["0"]["residents"].as_array().unwrap();
    assert_eq!((residents.len(), residents.iter().filter(|e| **e == 0).count() > 1), (8, true), "{step}");
    // The file of a run with copies counts experts and no places, so it serves the next run as well.
    let again = run("again", "replicas = 2\nchoices_file = \"copied/experts.jsonl\"\n");
    assert_eq!(again["texts"], counted["texts"]);
    let file = dir.path().join("absent.toml");
    fs::write(&file, "[experts]\nchoices_file = \"absent.jsonl\"\n").unwrap();
    let args =
        ["generate", "fixtures/lm/qwen3-moe", "--prompt-ids", "1", "--mapping", file.to_str().unwrap()];
    assert_ends_with(&args, 2, &["T0030", "absent.jsonl", "experts.statistics"]);
}

#[test]
fn a_killed_rank_and_an_interrupt_end_every_process() {
    let dir = tempfile::tempdir().unwrap();
    let start = |out: &Path| {
        let args = long_text(out);
        let child = tessera_command(&args.iter().map(String::as_str).collect::<Vec<_>>()).spawn().unwrap();
        let begun = Instant::now();
        let has_begun = |record: &str| record.contains("\"kind\":\"chunk\"");
        while !fs::read_to_string(out.join("record.jsonl")).is_ok_and(|r| has_begun(&r)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no call ended");
            std::thread::sleep(Duration::from_millis(2));
        }
        child
    };
    let killed = dir.path().join("killed");
    let child = start(&killed);
    let ranks = rank_pids(child.id());
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    send_signal(ranks[1], "KILL");
    let output = wait_for_end(child);
    let text = both_outputs(&output);
    assert!(output.status.code().is_some_and(|c| (10..30).contains(&c)), "{text}");
    assert!(text.contains("T0742") && text.contains("rank 1") && text.contains("killed"), "{text}");
    assert!(ranks.iter().all(|pid| !Path::new(&format!("/proc/{pid}/cmdline")).exists()), "{ranks:?}");

    let stopped = dir.path().join("stopped");
    let child = start(&stopped);
    send_signal(child.id(), "INT");
    let output = wait_for_end(child);
    assert_eq!(output.status.code(), Some(130), "{}", both_outputs(&output));
    let ids = to_text(&output.stdout).split_whitespace().count();
    assert!((1..500).contains(&ids), "{ids} ids before the interrupt");
    let record = fs::read_to_string(stopped.join("record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("\"status\":\"interrupted\""), "{record}");
}

/// Returns the processes of ranks below a launcher, in rank order.
fn rank_pids(launcher: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Returns the JSON that a command prints.
fn printed_json(args: &[&str]) -> serde_json::Value {
    let output = run_tessera(args);
    serde_json::from_str(&to_text(&output.stdout))
        .unwrap_or_else(|e| panic!("{e}: {}", both_outputs(&output)))
}

#[test]
fn a_run_leaves_its_texts_the_estimate_beside_the_run_a_trace_and_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let experts = dir.path().join("mapping.toml");
    fs::write(&experts, "[mesh]\nep = 2\n[experts]\ntokens = \"sharded\"\n").unwrap();
    let args = [
        "generate",
        "fixtures/lm/qwen3-moe",
        "--prompt-ids",
        "17,4,9,3",
        "--max-tokens",
        "6",
        "--oversubscribe",
    ];
    let more = ["--prompt-rows", "2", "--format", "json", "--mapping", experts.to_str().unwrap()];
    let printed = printed_json(&[&args[..], &more, &["--out", out.to_str().unwrap()]].concat());
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap();
    let text: serde_json::Value = serde_json::from_str(&read("text.jsonl")).unwrap();
    assert_eq!((&text["ids"], text["prompt"].as_str()), (&printed["texts"][0]["ids"], Some("17 4 9 3")));
    let comparison: serde_json::Value = serde_json::from_str(&read("comparison.json")).unwrap();
    assert_eq!(comparison, printed["estimate"]);
    for (call, name, calls) in [(0, "part of a prompt", 1), (1, "decoding step", 4)] {
        let call = &comparison["calls"][call];
        assert_eq!((call["name"].as_str(), call["calls"].as_u64()), (Some(name), Some(calls)), "{call}");
        assert!(call["estimated_ns"].as_f64().unwrap() > 0.0 && call["measured_ns"].as_f64().unwrap() > 0.0);
        let classes = call["classes"].as_array().unwrap();
        let find = |name: &str| {
            classes.iter().find(|c| c["class"] == name).unwrap_or_else(|| panic!("{name}: {call}"))
        };
        for class in [
            "matmul",
            "expert matmul",
            "attention",
            "expert pack",
            "expert combine",
            "all_to_all ep",
            "leader",
        ] {
            let class = find(class);
            assert!(class["estimated_ns"].as_f64().unwrap() > 0.0, "{class}");
            assert!(class["measured_ns"].as_f64().unwrap() >= 0.0, "{class}");
        }
        assert!(find("all_to_all ep")["sent_bytes"].as_f64().unwrap() > 0.0);
        assert_eq!(find("matmul")["sent_bytes"].as_f64(), Some(0.0));
    }
    let report = read("report.html");
    for words in ["17 4 9 3", "Estimate beside the run", "all_to_all ep", "decoding step", "to the first id"]
    {
        assert!(report.contains(words), "no `{words}` in the report");
    }
    let trace: serde_json::Value = serde_json::from_str(&read("trace.json")).unwrap();
    let names: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["name"].as_str()).collect();
    assert!(
        names.iter().any(|n| n.starts_with("all_to_all")) && names.contains(&"tokens.b1.n2"),
        "{names:?}"
    );
    let flight = read("flight/rank-1.jsonl");
    assert!(flight.contains("\"sent\":"), "no bytes in {flight}");
    // The commands that examine a run read its plan.
    let folder = out.to_str().unwrap();
    let doctor = to_text(&run_tessera(&["doctor", folder]).stdout);
    assert!(doctor.contains("decoding step of 1 rows") && doctor.contains("exposed collectives"), "{doctor}");
    let autopsy = run_tessera(&["autopsy", folder]);
    assert_eq!(autopsy.status.code(), Some(0), "{}", both_outputs(&autopsy));
    assert!(!both_outputs(&autopsy).contains("the plan cannot be read"), "{}", both_outputs(&autopsy));
    // A plan that cannot be read is named.
    fs::remove_file(out.join("plan/language.json")).unwrap();
    assert!(both_outputs(&run_tessera(&["autopsy", folder])).contains("the plan cannot be read"));
    assert_ends_with(&["doctor", folder], 2, &["T0051", "cannot be examined"]);
}

#[test]
fn a_language_model_is_planned_with_its_estimate_and_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let folder = out.to_str().unwrap();
    let args = ["plan", "fixtures/lm/llama", "--mesh", "tp=2", "--positions", "64", "--prompt-rows", "8"];
    let planned = printed_json(&[&args[..], &["--out", folder, "--format", "json"]].concat());
    let calls = planned["estimate"]["calls"].as_array().unwrap();
    assert_eq!(calls.iter().map(|c| c["rows"].as_u64().unwrap()).collect::<Vec<_>>(), [8, 1]);
    let ns = |call: usize| calls[call]["estimated_ns"].as_f64().unwrap();
    assert!(ns(0) > ns(1) && ns(1) > 0.0, "{planned}");
    assert_eq!(planned["ids_per_second"].as_f64(), Some(1e9 / ns(1)));
    assert_eq!(planned["ranks"].as_array().unwrap().len(), 2);
    assert!(planned["ranks"][1]["caches_bytes"].as_u64().unwrap() > 0);
    assert!(success_stdout(&run_tessera(&["check", folder])).contains("verified"));
    let text = success_stdout(&run_tessera(&args));
    assert!(text.contains("decoding") && text.contains("ids/s") && text.contains("KV caches"), "{text}");
    let doctor = run_tessera(&["doctor", folder]);
    let text = both_outputs(&doctor);
    assert!(text.contains("part of a prompt of 8 rows") && text.contains("memory"), "{text}");
    assert_ends_with(
        &["plan", "models/demo", "--positions", "5"],
        2,
        &["T0030", "--positions", "language model"],
    );
    assert_ends_with(&["plan", "fixtures/lm/llama", "--topology", "pp1"], 2, &["T0030", "--topology"]);
    assert_ends_with(
        &["plan", "fixtures/lm/llama", "--positions", "100000"],
        1,
        &["T0086", "100000 positions"],
    );
}
