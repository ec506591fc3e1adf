//! Tests `tessera stream --device sim`: a simulated cluster in one process, without weights.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::both_outputs;

fn models_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn tessera_in(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
    command.args(args).current_dir(dir);
    for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    command.output().unwrap()
}

#[test]
fn a_plan_for_a_rack_runs_from_its_folder_alone() {
    let dir = tempfile::tempdir().unwrap();
    let model = models_dir().join("wan2.1-14b");
    let planned =
        tessera_in(&["plan", model.to_str().unwrap(), "--mesh", "tp=8,pp=9", "--out", "plan"], dir.path());
    assert!(planned.status.success(), "{}", both_outputs(&planned));
    // The model folder is absent where the plan runs.
    let seal = dir.path().join("plan/seal.json");
    let text =
        std::fs::read_to_string(&seal).unwrap().replace(model.to_str().unwrap(), "/nowhere/wan2.1-14b");
    std::fs::write(&seal, text).unwrap();
    let args =
        ["stream", "--plan", "plan", "--device", "sim", "--chunks", "3", "--out", "run", "--format", "json"];
    let ran = tessera_in(&args, dir.path());
    assert!(ran.status.success(), "{}", both_outputs(&ran));
    let json: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!((&json["chunks"], &json["golden"]), (&3.into(), &serde_json::Value::Null), "{json}");
    assert!(json["machine"].as_str().unwrap().starts_with("gb200-nvl72, profile "), "{json}");
    assert!(json["fps"].as_f64().unwrap() > 0.0 && json["pipeline"]["period_ns"].as_u64().unwrap() > 0);
    for file in ["record.jsonl", "trace.json", "report.html", "plan/seal.json"] {
        assert!(dir.path().join("run").join(file).exists(), "{file}");
    }
    assert!(!dir.path().join("run/clip.png").exists());
}

#[test]
fn a_planned_folder_is_simulated_on_the_machine_of_its_estimate() {
    let dir = tempfile::tempdir().unwrap();
    let model = models_dir().join("demo");
    let plan = ["plan", model.to_str().unwrap(), "--cluster", "laptop", "--mesh", "tp=2", "--out", "plan"];
    let planned = tessera_in(&plan, dir.path());
    assert!(planned.status.success(), "{}", both_outputs(&planned));
    let stream =
        ["stream", "--plan", "plan", "--device", "sim", "--chunks", "2", "--out", "run", "--format", "json"];
    let ran = tessera_in(&stream, dir.path());
    assert!(ran.status.success(), "{}", both_outputs(&ran));
    let json: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    // Without the estimate two ranks would run on hgx-h200.
    assert!(json["machine"].as_str().unwrap().starts_with("laptop, "), "{json}");

    // An estimate of an older build is refused by name; the run does not fall back to a default.
    let estimate = dir.path().join("plan/estimate.json");
    let text = std::fs::read_to_string(&estimate).unwrap().replacen("\"query\"", "\"asked\"", 1);
    std::fs::write(&estimate, text).unwrap();
    let refused = tessera_in(&[&stream[..5], &["--out", "again"]].concat(), dir.path());
    let text = both_outputs(&refused);
    assert!(!refused.status.success() && text.contains("T0051") && text.contains("older build"), "{text}");
}

#[test]
fn the_summary_states_that_there_is_no_clip() {
    let dir = tempfile::tempdir().unwrap();
    let model = models_dir().join("demo");
    let args = [
        "stream",
        model.to_str().unwrap(),
        "--mesh",
        "tp=2",
        "--device",
        "sim",
        "--chunks",
        "2",
        "--out",
        "run",
    ];
    // A cluster file instead of a catalog name.
    let laptop = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tessera-mesh/clusters/laptop.toml");
    std::fs::copy(laptop, dir.path().join("mine.toml")).unwrap();
    let ran = tessera_in(&[&args[..], &["--cluster", "mine.toml"]].concat(), dir.path());
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{}", both_outputs(&ran));
    assert!(
        text.contains(
            "simulated time on laptop, profile tessera; no values were computed, so there is no clip"
        ),
        "{text}"
    );
    assert!(text.contains("report.html") && !text.contains("clip.png") && !text.contains("golden"), "{text}");
}

#[test]
fn invalid_options_are_rejected_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let model = models_dir().join("demo");
    let base = ["stream", model.to_str().unwrap(), "--out", "run"];
    let sim = ["--device", "sim"];
    for (args, code, says) in [
        (vec!["--cluster", "hgx-h200"], "T0040", "--cluster requires --device sim"),
        ([&sim[..], &["--png"]].concat(), "T0040", "--png does not go with --device sim"),
        (
            [&sim[..], &["--min-generate-ms", "5"]].concat(),
            "T0040",
            "--min-generate-ms does not go with --device sim",
        ),
        ([&sim[..], &["--cluster", "hgx-h20"]].concat(), "T1104", "hgx-h200"),
        ([&sim[..], &["--profile", "torch"]].concat(), "T1105", "torch-2.11"),
        ([&sim[..], &["--cluster", "mine.toml"]].concat(), "T0046", "mine.toml cannot be read"),
    ] {
        let refused = tessera_in(&[&base[..], &args].concat(), dir.path());
        let text = both_outputs(&refused);
        assert!(!refused.status.success() && text.contains(code) && text.contains(says), "{args:?}: {text}");
        assert!(!dir.path().join("run").exists());
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
    command.args([&base[..], &sim].concat()).current_dir(dir.path());
    let places = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let refused = command.envs(places).output().unwrap();
    assert!(
        both_outputs(&refused).contains("T0068") && !refused.status.success(),
        "{}",
        both_outputs(&refused)
    );
}
