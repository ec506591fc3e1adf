//! Tests that `tessera plan` reads what `tessera measure` writes.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use support::{run_tessera, to_text};

fn run_and_split(args: &[&str]) -> (Option<i32>, String, String) {
    let o = run_tessera(args);
    (o.status.code(), to_text(&o.stdout), to_text(&o.stderr))
}

#[test]
fn a_measured_machine_can_be_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let here = at("here");
    let measure = ["measure", "--ranks", "1", "--quick", "--format", "json", "--out", &here];
    let (status, out, err) = run_and_split(&measure);
    assert_eq!(status, Some(0), "{err}");
    assert!(err.contains("measuring matmuls"), "{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let curves: Vec<&str> =
        report["fits"].as_array().unwrap().iter().map(|f| f["curve"].as_str().unwrap()).collect();
    assert_eq!(
        curves,
        [
            "memory-bound elementwise kernels",
            "norm, RoPE and activation kernels",
            "matmuls",
            "attention",
            "all-reduce",
            "all-gather, reduce-scatter",
            "all-to-all",
            "broadcast",
            "send"
        ]
    );
    let open = report["not_measured"].to_string();
    assert!(open.contains("links between hosts") && open.contains("a single rank has no peer"), "{open}");
    let cluster = std::fs::read_to_string(dir.path().join("here/cluster.toml")).unwrap();
    assert!(
        cluster.contains("measured by tessera measure on ") && cluster.contains("measured = true"),
        "{cluster}"
    );

    let (cluster, profile) = (at("here/cluster.toml"), at("here/profile.toml"));
    let plan = ["plan", "models/demo", "--cluster", &cluster, "--profile", &profile, "--format", "json"];
    let (status, out, err) = run_and_split(&plan);
    assert_eq!(status, Some(0), "{err}");
    let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((plan["cluster"].as_str(), plan["profile"].as_str()), (Some("here"), Some("tessera-here")));
    assert!(plan["best"][0]["fps"].as_f64().unwrap() > 0.0, "{plan}");

    let (status, _, err) = run_and_split(&measure);
    assert_eq!(status, Some(1));
    assert!(err.contains("T0013") || err.is_empty(), "{err}");
}

#[test]
fn unsupported_measurements_are_rejected_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x").display().to_string();
    let (status, _, err) = run_and_split(&["measure", "--device", "cuda", "--out", &out]);
    assert_eq!(status, Some(2));
    assert!(err.contains("T0049") && err.contains("hgx-h200"), "{err}");
    let (status, _, err) = run_and_split(&["measure", "--ranks", "100000", "--out", &out]);
    assert_eq!(status, Some(1));
    assert!(err.contains("T0050") && err.contains("100000 ranks"), "{err}");
    let there = dir.path().display().to_string();
    let (status, _, err) = run_and_split(&["measure", "--out", &there]);
    assert_eq!(status, Some(1));
    assert!(err.contains("T0013") && !err.contains("measuring"), "{err}");
    assert!(!dir.path().join("x").exists());
}
