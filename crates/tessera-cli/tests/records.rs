//! Tests of `tessera record` and `tessera wire` on the run of a real stream.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::process::Output;

use support::{tessera_command, to_text};

fn run(args: &[&str]) -> Output {
    tessera_command(args).output().unwrap()
}

fn json_lines(o: &Output) -> Vec<serde_json::Value> {
    to_text(&o.stdout).lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn the_record_and_the_messages_of_a_run_can_be_checked_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let out = out.to_str().unwrap();
    let o = run(&[
        "stream",
        "fixtures/wan-odd",
        "--mesh",
        "tp=2",
        "--chunks",
        "4",
        "--cut-at",
        "3",
        "--wire-dump",
        "--prompt",
        "a red square",
        "--out",
        out,
        "--quiet",
        "--oversubscribe",
    ]);
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));

    let check = run(&["record", "check", out, "--format", "json"]);
    assert_eq!(check.status.code(), Some(0), "{}{}", to_text(&check.stdout), to_text(&check.stderr));
    let check = &json_lines(&check)[0];
    assert_eq!((check["valid"].as_bool(), check["chunks"].as_u64()), (Some(true), Some(4)));

    let startups = json_lines(&run(&["record", "startup", out, "--format", "json"]));
    assert_eq!(startups.len(), 2);
    for (rank, s) in startups.iter().enumerate() {
        assert_eq!(s["rank"].as_u64(), Some(rank as u64));
        assert_eq!(s["role"], format!("stage0@tp{rank}"));
        let keys: Vec<&str> = s["keys"].as_array().unwrap().iter().map(|k| k[0].as_str().unwrap()).collect();
        for key in ["backend", "kernels", "numerics", "threads", "tripwires off", "watchdogs"] {
            assert!(keys.contains(&key), "rank {rank} does not report {key}: {keys:?}");
        }
        assert!(s["tripwires"].as_array().unwrap().iter().any(|t| t == "T0743"));
        let report = &s["memory"];
        let bytes = |name: &str| report["memory"][name].as_u64().unwrap();
        assert!(bytes("planned_bytes") > 0 && bytes("peak_bytes") >= bytes("allocated_bytes"), "{report}");
        let phases = report["phases"].as_array().unwrap();
        assert!(phases.iter().any(|p| p["phase"].as_str().unwrap().starts_with("denoise")), "{report}");
        for p in phases {
            assert!(p["written_bytes"].as_u64() <= p["planned_bytes"].as_u64(), "{p}");
        }
    }

    let gates = run(&["record", "gates", out, "--format", "json"]);
    let gates = &json_lines(&gates)[0]["gates"];
    let verdict = |name: &str| {
        let gate = gates.as_array().unwrap().iter().find(|g| g["gate"] == name);
        gate.unwrap()["verdict"].as_str().unwrap().to_string()
    };
    for name in ["call ids", "cache epochs", "requests", "collectives that the plan lacks"] {
        assert_eq!(verdict(name), "pass", "{gates}");
    }
    assert_eq!(verdict("refusal of a bad envelope"), "n/a");
    // Packed weights are padded to whole panels, and the odd weights of this model are small.
    assert_eq!(verdict("allocated memory against the plan"), "fail", "{gates}");
    let record = fs::read_to_string(format!("{out}/record.jsonl")).unwrap();
    assert_eq!(record.matches("T0805: rank ").count(), 2, "{record}");
    assert_eq!(verdict("decision to commit, p50"), "not measured", "4 chunks are too few");

    let dump = run(&["wire", "dump", &format!("{out}/wire/rank-0.bin"), "--format", "json"]);
    assert_eq!(dump.status.code(), Some(0), "{}", to_text(&dump.stderr));
    let frames = json_lines(&dump);
    let mut at = 0;
    for frame in &frames {
        let range = |v: &serde_json::Value| (v[0].as_u64().unwrap(), v[1].as_u64().unwrap());
        let (header, meta) = (range(&frame["header"]["bytes"]), range(&frame["meta"]["bytes"]));
        assert_eq!((header.0, header.1), (at, meta.0), "the parts follow one another");
        at = meta.1;
        for tensor in frame["tensors"].as_array().unwrap() {
            let bytes = range(&tensor["bytes"]);
            assert_eq!(bytes.0, at);
            at = bytes.1;
        }
    }
    assert_eq!(at, fs::metadata(format!("{out}/wire/rank-0.bin")).unwrap().len());
    let envelopes: Vec<_> = frames.iter().filter(|f| f["header"]["kind"] == "Envelope").collect();
    let payloads: Vec<&str> = envelopes.iter().map(|f| f["meta"]["payload"].as_str().unwrap()).collect();
    assert!(payloads.contains(&"meta"), "{payloads:?}");
    let last = envelopes.last().unwrap();
    assert_eq!(last["meta"]["fields"]["header"]["action"], "Shutdown");
    assert_eq!(
        (last["meta"]["payload"].as_str(), last["tensors"].as_array().unwrap().len()),
        (Some("none"), 0)
    );

    // A record that someone changed is invalid, and so is a file that ends inside a frame.
    let record = format!("{out}/record.jsonl");
    let text = fs::read_to_string(&record).unwrap();
    let lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let evicted: Vec<u64> = lines.filter_map(|l| l["evicted_frames"].as_u64()).collect();
    assert_eq!(evicted, [0, 0, 3, 0], "the window holds two chunks, and the cut clears it");
    fs::write(&record, text.replacen("\"call_id\":", "\"call_number\":", 1)).unwrap();
    let check = run(&["record", "check", out]);
    assert_eq!(check.status.code(), Some(1));
    assert!(to_text(&check.stderr).contains("T0902"), "{}", to_text(&check.stderr));
    let mut bytes = fs::read(format!("{out}/wire/rank-0.bin")).unwrap();
    bytes.pop();
    let cut = format!("{out}/cut.bin");
    fs::write(&cut, bytes).unwrap();
    let o = run(&["wire", "dump", &cut]);
    assert_eq!(o.status.code(), Some(1));
    assert!(to_text(&o.stderr).contains("T0062"), "{}", to_text(&o.stderr));
    assert_eq!(run(&["wire", "dump", "no-such-file"]).status.code(), Some(2));
    assert_eq!(run(&["record", "check", "no-such-folder"]).status.code(), Some(2));
}

#[test]
fn a_plan_lists_the_sync_points_of_each_block_beside_the_analytic_count() {
    for (mesh, strategy, count) in
        [("tp=2", "ulysses", 4), ("tp=2", "megatron", 5), ("tp=2,pp=2", "megatron", 5)]
    {
        let o = run(&["plan", "models/demo", "--mesh", mesh, "--strategy", strategy, "--format", "json"]);
        assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
        let plan = &json_lines(&o)[0];
        assert_eq!(plan["analytic_block_sync_points"], count);
        let blocks: u64 =
            plan["blocks_per_stage"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
        let denoise: Vec<_> = plan["phases"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|p| p["name"].as_str().unwrap().starts_with("denoise"))
            .collect();
        assert!(!denoise.is_empty());
        for phase in denoise {
            let listed = vec![count; usize::try_from(blocks).unwrap()];
            assert_eq!(
                phase["block_sync_points"],
                serde_json::json!(listed),
                "{mesh} {strategy} {}",
                phase["name"]
            );
        }
    }
}

/// The memory of each rank after each chunk of a stream on two ranks.
fn chunk_memory(chunks: u32, more: &[&str]) -> Vec<Vec<serde_json::Value>> {
    chunk_memory_on("tp=2", chunks, more)
}

fn chunk_memory_on(mesh: &str, chunks: u32, more: &[&str]) -> Vec<Vec<serde_json::Value>> {
    let dir = tempfile::tempdir().unwrap();
    let (out, chunks) = (dir.path().join("run"), chunks.to_string());
    let fixed =
        ["stream", "fixtures/wan-even", "--mesh", mesh, "--steps", "1000", "--prompt", "a red square"];
    let rest = ["--chunks", &chunks, "--out", out.to_str().unwrap(), "--quiet", "--oversubscribe"];
    let o = run(&[&fixed[..], &rest, more].concat());
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    let record = fs::read_to_string(out.join("record.jsonl")).unwrap();
    assert!(!record.contains("T0805"), "{record}");
    let lines = record.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    lines
        .filter(|l| l["kind"] == "chunk")
        .map(|l| l["ranks"].as_array().unwrap().iter().map(|r| r["memory"].clone()).collect())
        .collect()
}

// proves: K-14
#[test]
fn memory_stays_as_planned_over_a_thousand_chunks() {
    let chunks = chunk_memory(1_000, &[]);
    assert_eq!(chunks.len(), 1_000);
    for rank in [0, 1] {
        let bytes = |chunk: usize, name: &str| chunks[chunk][rank][name].as_u64().unwrap();
        for name in ["allocated_bytes", "workspace_bytes", "peak_bytes", "unused_bytes"] {
            assert_eq!(bytes(999, name), bytes(50, name), "rank {rank}: {name}");
        }
        let deviation = bytes(999, "allocated_bytes") as f64 / bytes(999, "planned_bytes") as f64 - 1.0;
        assert!(deviation.abs() <= 0.05, "rank {rank}: {deviation}");
        // Every chunk reuses as many slots as the one before it.
        let reuses = |chunk: usize| bytes(chunk, "slot_reuses") - bytes(chunk - 1, "slot_reuses");
        assert!(reuses(999) > 0 && reuses(999) == reuses(500), "rank {rank}: {}", reuses(999));
    }
    let memory_at_depth = |depth: &str| {
        let queues = ["--d-in", depth, "--d-out", depth, "--max-outstanding", depth];
        chunk_memory(20, &queues).pop().unwrap()
    };
    assert_eq!(memory_at_depth("1"), memory_at_depth("4"), "calls in flight take no memory of a rank");
}

// proves: K-14
#[test]
fn the_budget_table_is_what_ranks_allocate() {
    let sizes = [1, 2];
    let table = run(&[
        "plan",
        "fixtures/wan-even",
        "--steps",
        "1000",
        "--strategy",
        "megatron",
        "--budget",
        "1,2",
        "--format",
        "json",
    ]);
    assert_eq!(table.status.code(), Some(0), "{}", to_text(&table.stderr));
    let rows: serde_json::Value = serde_json::from_slice(&table.stdout).unwrap();
    let mut measured = Vec::new();
    for (row, tp) in rows.as_array().unwrap().iter().zip(sizes) {
        let bytes = |name: &str| row[format!("{name}_bytes")].as_u64().unwrap();
        let kept: u64 = ["weights", "caches", "histories", "temporaries"].map(bytes).iter().sum();
        let all = kept + bytes("inputs") + bytes("exchange") + bytes("libraries");
        assert_eq!((row["tp"].as_u64(), bytes("total")), (Some(tp), all), "{row}");
        assert_eq!(bytes("exchange") > 0, tp > 1, "one rank exchanges nothing: {row}");
        let chunks = chunk_memory_on(&format!("tp={tp}"), 4, &["--strategy", "megatron"]);
        let fullest = chunks[3].iter().map(|rank| rank["allocated_bytes"].as_u64().unwrap()).max().unwrap();
        let deviation = fullest as f64 / kept as f64 - 1.0;
        assert!(deviation.abs() <= 0.05, "tp={tp}: {fullest} bytes of {kept}");
        measured.push((kept, fullest));
    }
    // The negative control: the row of another size is outside of the bound.
    let swapped = measured[0].1 as f64 / measured[1].0 as f64 - 1.0;
    assert!(swapped > 0.05, "{measured:?}");
}
