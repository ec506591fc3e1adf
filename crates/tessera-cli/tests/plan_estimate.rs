//! Tests of the mapping search on the command line: recipes, language models and video models on
//! clusters that are not present.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use support::{repo_root, run_tessera};

/// Runs the binary, checks the exit status, and returns standard output.
#[track_caller]
fn run_with_status(status: i32, args: &[&str]) -> String {
    let o = run_tessera(args);
    let err = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(status), "{args:?}: {err}");
    String::from_utf8(o.stdout).unwrap()
}

/// Checks that the command fails with a status and with all these words on standard error.
#[track_caller]
fn assert_fails(status: i32, args: &[&str], words: &[&str]) -> String {
    let o = run_tessera(args);
    let err = String::from_utf8(o.stderr).unwrap();
    assert_eq!(o.status.code(), Some(status), "{args:?}: {err}");
    assert_contains(&err, words);
    err
}

#[track_caller]
fn assert_contains(text: &str, words: &[&str]) {
    for w in words {
        assert!(text.contains(w), "no `{w}` in:\n{text}");
    }
}

fn path_text(p: &Path) -> &str {
    p.to_str().unwrap()
}

/// Runs a search and returns its report. The exit status is 1 exactly if one of its gates fails.
#[track_caller]
fn run_report(args: &[&str]) -> String {
    let o = run_tessera(args);
    let page = String::from_utf8(o.stdout).unwrap();
    let fails = page.lines().any(|line| line.starts_with("  FAIL "));
    let err = String::from_utf8_lossy(&o.stderr);
    assert_eq!(o.status.code(), Some(i32::from(fails)), "{args:?}: {err}");
    page
}

/// Returns the report as JSON. The exit status is 1 exactly if one of its gates fails.
fn json_output(args: &[&str]) -> Value {
    let o = run_tessera(&[args, &["--format", "json"]].concat());
    let out = String::from_utf8(o.stdout).unwrap();
    let v: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}"));
    let gates = v["best"][0]["gates"].as_array().map_or(&[][..], Vec::as_slice);
    let fails = gates.iter().any(|g| g["status"] == "fail");
    assert_eq!(o.status.code(), Some(i32::from(fails)), "{args:?}");
    v
}

/// Checks that legal and rejected candidates add up to those considered.
#[track_caller]
fn assert_counts_add_up(v: &Value) {
    let n = |k: &str| v[k].as_u64().unwrap();
    let rejected = v["rejected"].as_array().unwrap();
    let counts: u64 = rejected.iter().map(|r| r["count"].as_u64().unwrap()).sum();
    assert_eq!(n("candidate_count"), n("legal_count") + counts, "{rejected:#?}");
    for r in rejected {
        assert!(r["count"].as_u64().unwrap() > 0 && !r["message"].as_str().unwrap().is_empty(), "{r}");
        let code = r["code"].as_str().unwrap();
        assert_contains(&run_with_status(0, &["explain", code]), &[code]);
    }
}

/// Returns the pins of the best candidate, by knob.
fn best_pins(v: &Value) -> Vec<(String, String)> {
    let pins = v["best"][0]["pins"].as_str().unwrap();
    pins.split(',').filter_map(|p| p.split_once('=')).map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

fn best_pin(v: &Value, knob: &str) -> String {
    best_pins(v).into_iter().find(|(k, _)| k == knob).map(|(_, v)| v).unwrap()
}

#[test]
fn every_recipe_is_planned_or_rejected_with_its_neighbours() {
    for (name, tp, ep) in
        [("A", "12", "6"), ("b", "8", "9"), ("sr-moe", "8", "9"), ("long-context", "12", "6")]
    {
        let v = json_output(&["plan", "--recipe", name]);
        assert_counts_add_up(&v);
        assert_eq!((v["devices"].as_u64(), v["idle_devices"].as_u64()), (Some(72), Some(0)), "{name}");
        let mesh = ["tp", "ep", "pp", "dp"].map(|k| best_pin(&v, k));
        assert_eq!(mesh, [tp, ep, "1", "1"], "{name}");
        assert_eq!(best_pin(&v, "capacity_pct"), "125");
        // One rack: no bytes leave it.
        assert!(v["best"][0]["link_bytes"].get("network").is_none(), "{name}");
    }
    for name in ["C", "throughput-training"] {
        assert_fails(
            1,
            &["plan", "--recipe", name],
            &[
                "T1220",
                "8·6·3·1 = 144 ranks, 72 devices",
                "(8,3,3,1) keeps tp, pp, dp",
                "(4,6,3,1) keeps ep, pp, dp",
                "(12,2,3,1)",
                "2 racks",
            ],
        );
    }
}

#[test]
fn recipes_of_144_ranks_build_on_two_racks_and_are_flagged() {
    for name in ["C", "throughput-training"] {
        let args = ["plan", "--recipe", name, "--devices", "144", "--pin", "scheme=megatron_sp"];
        let v = json_output(&args);
        assert_counts_add_up(&v);
        assert_eq!(v["devices"].as_u64(), Some(144));
        let mesh = ["tp", "ep", "pp", "dp"].map(|k| best_pin(&v, k));
        assert_eq!(mesh, ["8", "6", "3", "1"], "{name}");
        let gates = v["best"][0]["gates"].as_array().unwrap();
        let gate = |id: &str| gates.iter().find(|g| g["id"] == id).unwrap()["status"].as_str().unwrap();
        assert_eq!(gate("mesh.domain"), "fail", "some ep groups span both racks");
        assert!(v["best"][0]["link_bytes"]["network"].as_f64().unwrap() > 0.0);
        // A warning of the recipe in the text report.
        let page = run_report(&args);
        assert_contains(&page, &["T1223", "ep groups have members in several domains", "FAIL"]);
        // The largest loss comes first, with numbers.
        let third = page.lines().nth(2).unwrap();
        assert_contains(
            third,
            &["warning: ", "domain of 72 devices: ep (6 ranks over 2 domains)", "GB/s and not 900"],
        );
        assert_eq!(v["warnings"][0].as_str().map(|w| format!("warning: {w}")).as_deref(), Some(third));
    }
    // Micro-batches of one keep the bubble of three stages below the limit; the gate uses the same
    // share.
    let v = json_output(&[
        "plan",
        "--recipe",
        "throughput-training",
        "--devices",
        "144",
        "--pin",
        "scheme=ulysses",
    ]);
    assert_eq!(
        (best_pin(&v, "micro_batch"), best_pin(&v, "experts_at")),
        ("1".to_string(), "hbm".to_string())
    );
    let bubble =
        v["best"][0]["gates"].as_array().unwrap().iter().find(|g| g["id"] == "pipeline.bubble").unwrap();
    assert_eq!(bubble["status"], "pass", "{bubble}");
}

#[test]
fn uneven_heads_and_experts_are_estimated_or_rejected_if_strict() {
    let priced =
        ["128 heads over tp=12 are 10.67 each", "3.12 % longer", "4096 experts over ep=6 are 682.67 each"];
    assert_contains(&run_report(&["plan", "--recipe", "A"]), &priced);
    assert_fails(
        1,
        &["plan", "--recipe", "A", "--strict"],
        &["error[T1221]", "error[T1222]", priced[0], priced[2]],
    );
    assert_contains(
        &run_report(&["plan", "--recipe", "sr-moe"]),
        &["4096 experts over ep=9 are 455.11 each: 1 rank has 456"],
    );
}

#[test]
fn why_explains_one_mapping() {
    // A mesh other than the recipe's: its cost compared with the recipe's mesh.
    let out = run_with_status(0, &["plan", "--recipe", "sr-moe", "--why", "tp=12,ep=6"]);
    assert_contains(
        &out,
        &["tp=12,ep=6 on 72 devices of GB200 NVL72", "legal; ", "this  step", "best  step", "what it costs"],
    );
    assert_contains(&out, &["tp=12, ep=6, pp=1, dp=1", "tp=8, ep=9, pp=1, dp=1", "expert_tp=12"]);
    // Without a recipe, the knobs that these pins leave free are searched.
    let free = run_with_status(
        0,
        &["plan", "--model", "sr-moe", "--why", "tp=12,ep=6,precision=fp8,scheme=megatron"],
    );
    assert_contains(&free, &["legal; ", "better", "tp=12"]);

    let out = run_with_status(1, &["plan", "--recipe", "A", "--why", "tp=7,ep=9"]);
    assert_contains(
        &out,
        &[
            "refused",
            "T1201",
            "7·9·1·1 = 63 ranks, 72 devices",
            "legal neighbours, nearest first",
            "tp=8: step",
        ],
    );
    // A recipe that does not fit still provides its model, job and knobs.
    assert_contains(
        &run_with_status(0, &["plan", "--recipe", "C", "--why", "tp=12,ep=6,pp=1"]),
        &["legal; ", "tp=12", "ep=6"],
    );
    assert_fails(1, &["plan", "--recipe", "C"], &["T1220", "144 ranks"]);
    // Each rejection has one reason, and the requested pins are shown.
    let out = run_with_status(
        1,
        &[
            "plan",
            "--model",
            "llama-3.1-70b",
            "--cluster",
            "hgx-h200",
            "--why",
            "tp=1,pp=1,dp=8,precision=bf16",
        ],
    );
    assert_contains(&out, &["refused", "T1217", "exceeds device memory"]);
}

#[test]
fn counts_of_a_search_add_up() {
    let args = ["plan", "--model", "deepseek-v3", "--pin", "tp=8,pp=1,precision=fp8"];
    let v = json_output(&args);
    assert_counts_add_up(&v);
    assert!(v["candidate_count"].as_u64().unwrap() > 1000);
    assert_eq!((v["source"].as_str(), v["profile"].as_str()), (Some("op rows"), Some("torch-2.11")));
    assert_eq!((best_pin(&v, "tp"), best_pin(&v, "pp")), ("8".to_string(), "1".to_string()));
    // The text report gives the source and the uncertainty of its numbers.
    assert_contains(
        &run_report(&args),
        &["a step, ± ", "no program was lowered", "was not measured by this project"],
    );
    // The parts add up to the step.
    let e = &v["best"][0];
    let parts: f64 = e["parts_ns"].as_object().unwrap().values().map(|p| p.as_f64().unwrap()).sum();
    assert!((parts / e["step_ns"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{e:#}");
}

#[test]
fn an_estimate_folder_contains_report_numbers_timeline_and_hints() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("rack");
    let args = ["plan", "--recipe", "throughput-training", "--devices", "144", "--pin", "scheme=ulysses"];
    assert_contains(
        &run_report(&[&args[..], &["--out", path_text(&folder)]].concat()),
        &["report.html", "timeline.json", "env.sh"],
    );
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();

    let page = read("report.html");
    assert_contains(
        &page,
        &["<html", "Throughput training", "<svg", "T1223", "pipeline", "144 devices of GB200 NVL72"],
    );
    assert!(!page.contains("http://") && !page.contains("<script src"), "the report needs no network");
    assert_counts_add_up(&serde_json::from_str(&read("estimate.json")).unwrap());

    let trace: Value = serde_json::from_str(&read("timeline.json")).unwrap();
    let bars = trace["traceEvents"].as_array().unwrap();
    let bars: Vec<_> = bars.iter().filter(|e| e["ph"] == "X").collect();
    assert!(bars.len() >= 3 * 24 && bars.iter().all(|b| b["dur"].as_f64().unwrap() >= 0.0), "{}", bars.len());
    let chart = read("timeline.mmd");
    assert!(chart.starts_with("gantt\n") && chart.matches("section").count() >= 3, "{chart}");

    // The order of launch: each stage of 24 ranks in its rack, and the place of the last rank.
    let ranks = read("ranks.txt");
    let rows: Vec<Vec<&str>> =
        ranks.lines().filter(|l| !l.starts_with('#')).map(|l| l.split('\t').collect()).collect();
    assert_eq!(rows.len(), 1 + 144);
    assert_eq!(rows[0][..7], ["rank", "rack", "host", "socket", "device", "domain", "port"]);
    assert_eq!(rows[0][7..], ["dp", "pp", "tp", "expert_tp", "ep"]);
    assert_eq!(rows[72][..7], ["71", "0", "17", "1", "3", "0", "71"]);
    assert_eq!(rows[144][..7], ["143", "1", "17", "1", "3", "1", "71"]);
    assert_eq!((rows[49][8], rows[144][8], rows[144][9], rows[144][11]), ("1", "2", "7", "5"));

    assert_fails(1, &[&args[..], &["--out", path_text(&folder)]].concat(), &["T0013"]);
    // No plan was sealed, so the folder cannot be streamed.
    assert!(!folder.join("seal.json").exists());
    assert_fails(1, &["stream", "--plan", path_text(&folder)], &[path_text(&folder)]);

    let shell = |set: Option<&str>| {
        let mut sh = Command::new("sh");
        sh.args(["-c", ". ./env.sh; echo $NCCL_MIN_NCHANNELS"]).current_dir(&folder).env_clear();
        if let Some(v) = set {
            sh.env("NCCL_MIN_NCHANNELS", v);
        }
        String::from_utf8(sh.output().unwrap().stdout).unwrap()
    };
    assert_eq!((shell(None).trim(), shell(Some("8")).trim()), ("2", "8"), "a person's own value stays");
}

#[test]
fn the_same_query_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["estimate.json", "timeline.json", "timeline.mmd", "env.sh"];
    let ask = |name: &str, model: &[&str]| {
        let folder = dir.path().join(name);
        run_report(&[&["plan"], model, &["--out", path_text(&folder)]].concat());
        files.map(|f| fs::read(folder.join(f)).unwrap())
    };
    let rack = ["--recipe", "sr-moe"];
    assert!(ask("a", &rack) == ask("b", &rack));
    let video = ["models/demo", "--cluster", "laptop"];
    assert!(ask("c", &video) == ask("d", &video));
}

#[test]
fn charts_of_a_plan_are_read_by_check() {
    let dir = tempfile::tempdir().unwrap();
    let cold = ["--model", "deepseek-v3", "--cluster", "hgx-h200", "--devices", "8"];
    let cold = [&cold[..], &["--pin", "tp=1,ep=8,pp=1,experts_at=host,precision=bf16"]].concat();
    let step = ["--recipe", "throughput-training", "--devices", "144", "--pin", "scheme=ulysses"];
    let video = ["models/demo", "--cluster", "laptop", "--devices", "2"];
    let cases: [(&str, &[&str], &str); 5] = [
        ("block", &["--recipe", "sr-moe"], "overlap ratio 0."),
        ("cold", &cold, "overlap ratio"),
        ("named", &[&cold[..], &["--prefetch-hit-rate", "0.8"]].concat(), "overlap ratio"),
        ("wave", &step, "3 stages, "),
        ("video", &video, "overlap ratio"),
    ];
    let mut charts = Vec::new();
    for (name, asked, says) in cases {
        let folder = dir.path().join(name);
        run_report(&[&["plan"], asked, &["--out", path_text(&folder)]].concat());
        let chart = folder.join("timeline.mmd");
        let o = run_tessera(&["check", path_text(&chart)]);
        let (out, err) = (String::from_utf8(o.stdout).unwrap(), String::from_utf8(o.stderr).unwrap());
        assert_eq!(o.status.code(), Some(0), "{name}: {err}");
        assert_contains(&out, &[says]);
        // The chart shows possible work only: no device has two ops at once.
        assert!(
            !err.contains("T1117") && !err.contains("T1118") && !err.contains("missing"),
            "{name}: {err}"
        );
        charts.push(fs::read_to_string(&chart).unwrap());
    }
    // Without a predictor no expert is fetched before the router has run.
    assert!(charts[1].contains("fetch.experts of layer 0") && !charts[1].contains("prefetch"));
    assert!(
        charts[2].contains("fetch.experts of layer 0") && charts[2].contains("prefetch experts of layer 1")
    );
}

#[test]
fn prefetching_hides_the_fetches_that_it_predicts() {
    let cold = ["plan", "--model", "deepseek-v3", "--cluster", "hgx-h200", "--devices", "8"];
    let cold = [&cold[..], &["--pin", "tp=1,ep=8,pp=1,experts_at=host,precision=bf16"]].concat();
    let fetch = |more: &[&str]| {
        let v = json_output(&[&cold[..], more].concat());
        v["best"][0]["parts_ns"]["fetch"].as_f64().unwrap()
    };
    let (blind, seen) = (fetch(&[]), fetch(&["--prefetch-hit-rate", "0.8"]));
    assert!(seen < blind && fetch(&["--prefetch-hit-rate", "0"]) == blind, "{seen} {blind}");
    assert_contains(
        &run_report(&[&cold[..], &["--prefetch-hit-rate", "0.8"]].concat()),
        &["a predictor names 80 % of the cold ones"],
    );
}

#[test]
fn json_contains_the_numbers_of_the_report() {
    let page = run_report(&["plan", "--recipe", "B", "--routing", "power:1.2"]);
    let v = json_output(&["plan", "--recipe", "B", "--routing", "power:1.2"]);
    let dropped = v["best"][0]["dropped"].as_f64().unwrap() * 100.0;
    assert!(dropped > 50.0);
    let rate =
        format!("tokens/s, per device, of which {dropped:.1} % of the assignments to experts are dropped");
    assert_contains(&page, &[rate.as_str()]);
    assert_eq!(v["verdict"], "warns");
    assert_contains(&page, &[v["summary"].as_str().unwrap()]);
    let advice = v["advice"].as_array().unwrap();
    let ids: Vec<&str> = advice.iter().map(|a| a["id"].as_str().unwrap()).collect();
    for id in ["routing", "capacity", "memory-formulas", "limits"] {
        assert!(ids.contains(&id), "{ids:?}");
    }
    for a in advice {
        let columns = a["columns"].as_array().unwrap();
        let rows = a["rows"].as_array().unwrap();
        assert!(!rows.is_empty() && rows.iter().all(|r| r.as_array().unwrap().len() == columns.len()), "{a}");
        assert_contains(
            &page,
            &[&format!("worth knowing: {}", a["title"].as_str().unwrap()), a["note"].as_str().unwrap()],
        );
    }
    for r in v["mitigations"].as_array().unwrap() {
        assert_contains(&page, &[r["mode"].as_str().unwrap(), r["actions"][0]["what"].as_str().unwrap()]);
    }
    let video = json_output(&["plan", "models/demo", "--cluster", "laptop", "--devices", "2"]);
    assert!(video["verdict"] == "good" && video["advice"].is_array(), "{video:#}");
}

#[test]
fn exit_statuses_match_the_help() {
    let help = run_with_status(0, &["plan", "--help"]);
    let table = [
        "Exit status:\n  0  a plan",
        "\n  1  a gate of the report fails",
        "\n  2  the command line is wrong",
    ];
    assert_contains(&help, &table);
    // The request is valid, and the answer is no.
    assert_fails(1, &["plan", "--recipe", "C"], &["T1220"]);
    run_with_status(1, &["plan", "--recipe", "A", "--why", "tp=7,ep=9"]);
    run_with_status(
        1,
        &[
            "plan",
            "--model",
            "llama-3.1-70b",
            "--cluster",
            "hgx-h200",
            "--devices",
            "1",
            "--pin",
            "precision=bf16",
        ],
    );
    run_with_status(1, &["plan", "--recipe", "sr-moe", "--objective", "deadline=0.001ms"]);
    // A failed gate is a failed check; the report and its folder are complete.
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("plan");
    let out = ["--out", path_text(&folder)];
    let page = run_with_status(1, &[&["plan", "--recipe", "B", "--routing", "power:1.2"], &out[..]].concat());
    assert_contains(&page, &["  FAIL ", "gates failed: ", "timeline.json"]);
    assert!(folder.join("report.html").exists() && folder.join("timeline.json").exists());
    // The request is invalid.
    assert_fails(2, &["plan", "no/such/model"], &["T0010"]);
    assert_fails(2, &["plan", "no/such/model", "--cluster", "laptop"], &["T0047"]);
}

#[test]
fn pins_beyond_any_machine_are_rejected_with_their_product() {
    let why = |pins: &str, job: &str| {
        run_with_status(1, &["plan", "--model", "sr-moe", "--job", job, "--why", pins])
    };
    for job in ["decode", "train"] {
        let four = "tp=16777216,ep=16777216,pp=16777216,dp=16777216";
        assert_contains(&why(four, job), &["T1201", "= 79228162514264337593543950336 ranks, 72 devices"]);
        assert_contains(&why("expert_tp=16777216,ep=16777216,optimizer=full_shard", job), &["T1201"]);
        assert_contains(
            &why("pp=16777216,interleave=16777216,schedule=interleaved", job),
            &["T1201", "16777216 ranks"],
        );
    }
    let beyond = ["plan", "--model", "sr-moe", "--why", "tp=4294967295,ep=4294967295"];
    assert_fails(
        2,
        &beyond,
        &["T1200", "invalid value `4294967295` for knob `tp`", "from 1 to 16777216", "for knob `ep`"],
    );
}

#[test]
fn limits_come_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gates.toml");
    let overlap = |extra: &[&str]| {
        let v = json_output(&[&["plan", "--recipe", "B"], extra].concat());
        let gates = v["best"][0]["gates"].as_array().unwrap();
        let g = gates.iter().find(|g| g["id"] == "collectives.overlap").unwrap();
        (
            g["status"].as_str().unwrap().to_string(),
            g["value"].as_f64().unwrap(),
            g["threshold"].as_f64().unwrap(),
        )
    };
    let (was, value, limit) = overlap(&[]);
    assert_eq!(limit, 0.6);
    let (other, fails) =
        if was == "pass" { (value + 0.05, "fail") } else { ((value - 0.05).max(0.0), "pass") };
    fs::write(&file, format!("[collectives]\nmin_overlap = {other}\n")).unwrap();
    let (now, same, _) = overlap(&["--gates", path_text(&file)]);
    assert_eq!((now.as_str(), same), (fails, value), "the number stays, the verdict turns");

    fs::write(&file, "[collectives]\nmin_overlep = 0.4\n").unwrap();
    let unknown = ["min_overlep", "did you mean `collectives.min_overlap`?"];
    assert_fails(1, &["plan", "--recipe", "B", "--gates", path_text(&file)], &unknown);
}

#[test]
fn unknown_names_are_rejected_with_suggestions() {
    let rack = ["plan", "--model", "sr-moe"];
    let cases: [(i32, &[&str], &[&str]); 15] = [
        (2, &["--cluster", "gb200-nvl7"], &["T1104", "gb200-nvl72", "laptop"]),
        (2, &["--profile", "torch-2.1"], &["T1105", "torch-2.11", "ideal"]),
        (2, &["--pin", "schem=ulysses"], &["T1200", "did you mean `scheme`?"]),
        (2, &["--pin", "tp=x,ep=0"], &["invalid value `x` for knob `tp`", "invalid value `0` for knob `ep`"]),
        (2, &["--pin", "schedule=2f2b"], &["T1200", "2f2b", "1f1b"]),
        (2, &["--why", "tp"], &["T1200"]),
        (2, &["--why", ""], &["T0030", "needs at least one knob", "--why tp=8,pp=1"]),
        (2, &["--why", " , "], &["T0030", "needs at least one knob"]),
        (2, &["--prefetch-hit-rate", "1.5"], &["T0056", "1.5 is not between 0 and 1"]),
        (2, &["--prefetch-hit-rate", "-0.1"], &["T0056", "-0.1 is not between"]),
        (2, &["--prefetch-hit-rate", "nan"], &["T0056", "is not between"]),
        (2, &["--prefetch-hit-rate", "0.5", "--job", "train"], &["T0056", "training keeps all experts"]),
        (2, &["--objective", "speed"], &["T0030", "throughput, latency, memory", "deadline=40ms"]),
        (2, &["--routing", "w9"], &["T0030", "w0 to w7"]),
        (2, &["--recipe", "A"], &["T0030", "give one of them"]),
    ];
    for (status, options, words) in cases {
        assert_fails(status, &[&rack[..], options].concat(), words);
    }
    let dense = ["plan", "--model", "llama-3.1-8b", "--prefetch-hit-rate", "0.5"];
    assert_fails(2, &dense, &["T0056", "llama-3.1-8b has no routed experts"]);
    let video = ["plan", "models/demo", "--cluster", "laptop", "--prefetch-hit-rate", "0.5"];
    assert_fails(2, &video, &["T0030", "--prefetch-hit-rate does not apply to a video model"]);
    assert_fails(
        2,
        &["plan", "--model", "deepsek-v3"],
        &["T0047", "did you mean `deepseek-v3`?", "llama-3.1-8b"],
    );
    assert_fails(
        2,
        &["plan", "--recipe", "throughput"],
        &["T1229", "did you mean `throughput-training`?", "sr-moe"],
    );
    assert_fails(2, &["plan", "--cluster", "laptop"], &["T0031"]);
    assert_fails(
        2,
        &["plan", "models/demo", "--cluster", "laptop", "--pin", "strategy=ring"],
        &["T1200", "ulysses or megatron"],
    );
    assert_fails(
        2,
        &["plan", "models/demo", "--cluster", "laptop", "--pin", "ep=2"],
        &["T1200", "ep and dp are 1"],
    );
}

#[test]
fn invalid_files_are_rejected_with_the_location() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let p = dir.path().join(name);
        fs::write(&p, content).unwrap();
        p
    };
    let laptop = fs::read_to_string(repo_root().join("crates/tessera-mesh/clusters/laptop.toml")).unwrap();
    let mine = write("mine.toml", &laptop);
    run_with_status(0, &["plan", "models/demo", "--cluster", path_text(&mine), "--pin", "tp=2,pp=1"]);
    let wrong = write("wrong.toml", &laptop.replacen("[device]", "[device]\nmemory_byte = 3", 1));
    let unknown = ["memory_byte", "did you mean `device.memory_bytes`?", path_text(&wrong)];
    assert_fails(1, &["plan", "models/demo", "--cluster", path_text(&wrong)], &unknown);
    let gone = dir.path().join("gone.toml");
    assert_fails(2, &["plan", "models/demo", "--cluster", path_text(&gone)], &["T0046", path_text(&gone)]);
    assert_fails(2, &["plan", "--recipe", "B", "--gates", path_text(&gone)], &["T0046", path_text(&gone)]);

    let strange = r#"{"architectures": ["MambaForCausalLM"], "hidden_size": 4096}"#;
    let config = write("config.json", strange);
    let words = ["T0430", "MambaForCausalLM", "LlamaForCausalLM", path_text(&config)];
    assert_fails(1, &["plan", path_text(&config), "--cluster", "laptop"], &words);
    // A folder with config.json and without stream.toml is a language model too.
    assert_fails(1, &["plan", path_text(dir.path()), "--cluster", "laptop"], &words);
}

#[test]
fn the_chosen_mapping_can_be_streamed() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, run) = (dir.path().join("plan"), dir.path().join("run"));
    let out = run_with_status(
        0,
        &["plan", "models/demo", "--cluster", "laptop", "--devices", "2", "--out", path_text(&plan)],
    );
    assert_contains(&out, &["frames/s", "executor profile tessera at f32", "run it: tessera stream --plan"]);
    assert_contains(&fs::read_to_string(plan.join("report.html")).unwrap(), &["<svg", "frames/s"]);
    let digest = run_with_status(0, &["check", path_text(&plan)]);
    assert!(digest.contains("verified, digest "), "{digest}");

    // This machine may have fewer cores than the catalog's laptop.
    run_with_status(
        0,
        &["stream", "--plan", path_text(&plan), "--chunks", "2", "--oversubscribe", "--out", path_text(&run)],
    );
    for file in ["mapping.toml", "seal.json"] {
        let [a, b] = [&plan, &run.join("plan")].map(|d| fs::read(d.join(file)).unwrap());
        assert!(a == b, "{file} of the run is another");
    }
    let estimate: Value =
        serde_json::from_str(&fs::read_to_string(plan.join("estimate.json")).unwrap()).unwrap();
    assert_counts_add_up(&estimate);
    assert_eq!(estimate["source"], "lowered programs");
    let mesh = estimate["best"][0]["mesh"].as_str().unwrap();
    let (axis, size) = mesh.split_once('=').unwrap();
    let mapping = fs::read_to_string(run.join("plan/mapping.toml")).unwrap();
    assert!(mapping.contains(&format!("{axis} = {size}\n")), "{mesh} is not in:\n{mapping}");
}

#[test]
fn fourteen_billion_on_eight_devices_shard_tokens() {
    let rack = ["plan", "models/wan2.1-14b", "--cluster", "hgx-h200", "--devices", "8", "--pin", "tp=8,pp=1"];
    let v = json_output(&rack);
    assert_counts_add_up(&v);
    let best = &v["best"][0];
    assert_eq!((best["strategy"].as_str(), best["mesh"].as_str()), (Some("ulysses"), Some("tp=8")));
    let fps = |v: &Value| v["fps"].as_f64().unwrap();
    let other = v["best"].as_array().unwrap().iter().find(|r| r["strategy"] == "megatron").unwrap();
    assert!(fps(best) > 1.3 * fps(other), "{} against {}", fps(best), fps(other));

    let out = run_with_status(0, &[&rack[..], &["--why", "tp=8,pp=1,strategy=megatron"]].concat());
    assert_contains(&out, &["legal", "this  tp=8 megatron", "best  tp=8 ulysses", "frames/s"]);
    let none = [&rack[..], &["--why", "tp=9,pp=1"]].concat();
    assert_contains(&run_with_status(1, &none), &["refused", "8 devices or fewer"]);
}

#[test]
fn the_estimate_is_of_the_plan_that_is_sealed() {
    let dir = tempfile::tempdir().unwrap();
    for (name, options, error) in [
        ("bf16", &[][..], "± 40 %"),
        ("f32", &["--dtype", "f32"][..], "± 40 %"),
        ("fp8", &["--dtype", "fp8"], "± 40 %"),
    ] {
        let out = dir.path().join(name);
        let rack = ["plan", "models/wan2.1-14b", "--cluster", "gb200-nvl72", "--devices", "8"];
        let rest = ["--pin", "tp=8,pp=1,strategy=ulysses", "--out", path_text(&out)];
        let page = run_with_status(0, &[&rack[..], &rest, options].concat());
        let device = if name == "f32" { "" } else { " --device cuda" };
        let run = format!("run it: tessera stream --plan {}{device}, or", path_text(&out));
        assert_contains(&page, &[&format!("torch-2.11 at {name}"), error, &run]);

        let text = fs::read_to_string(out.join("estimate.json")).unwrap();
        let estimate: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(estimate["best"][0]["dtype"], name);
        let uses = |v: &Value, key: &str| v[key].as_u64().unwrap() as f64;
        let estimated = &estimate["best"][0]["memory"];
        let mapping = out.join("mapping.toml");
        let sealed = json_output(&["plan", "models/wan2.1-14b", "--mapping", path_text(&mapping)]);
        let ranks = sealed["ranks"].as_array().unwrap();
        let fullest = ranks.iter().max_by_key(|r| r["total_bytes"].as_u64()).unwrap();
        for key in ["weights_bytes", "buffers_bytes"] {
            assert_eq!(uses(estimated, key), uses(fullest, key), "{name} {key}");
        }
        // The estimate covers the phases of one call, and the plan covers all phases.
        let all = uses(fullest, "total_bytes");
        let parts = ["weights_bytes", "buffers_bytes", "inputs_bytes", "temporaries_bytes"];
        let sum: f64 = parts.iter().map(|key| uses(estimated, key)).sum();
        assert!((sum / all - 1.0).abs() < 0.02, "{name}: {sum} estimated, {all} sealed");
        assert_eq!(sum + uses(estimated, "executor_bytes"), uses(&estimate["best"][0], "bytes"));
    }
    // On a machine that was measured, the profile's own error holds.
    let measured =
        ["plan", "models/wan2.1-14b", "--cluster", "hgx-h200", "--devices", "8", "--pin", "tp=8,pp=1"];
    assert_contains(&run_with_status(0, &measured), &["± 10 %"]);
}

#[test]
fn hand_drawn_charts_are_measured() {
    let both = |file: &str| {
        let o = run_tessera(&["check", file]);
        assert_eq!(o.status.code(), Some(0), "warnings refuse nothing");
        String::from_utf8(o.stdout).unwrap() + &String::from_utf8(o.stderr).unwrap()
    };
    let block = both("filetests/charts/block.mmd");
    assert_contains(
        &block,
        &["overlap ratio 0.50 (goal 0.60), 0.40 with packing counted", "T1116", "T1117", "T1118"],
    );
    assert_contains(&block, &["FFN GEMM and Unpack + Experts are both drawn from 9 to 12"]);
    assert_contains(&block, &["RS logits starts 1 before its input QK^T GEMM ends"]);
    let wave = both("filetests/charts/wave.mmd");
    assert_contains(
        &wave,
        &["33 % of 18 units", "use 19 micro-batches or more", "3 bars are missing", "(p-1)/(m+p-1) = 2/6"],
    );
    assert_contains(&wave, &["Stage 1: MB3 belongs from 12 to 15", "Stage 2: MB3 belongs from 15 to 18"]);
}
