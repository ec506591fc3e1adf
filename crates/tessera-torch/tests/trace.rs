//! Reads recorded compile traces and finds what was planted in each, and nothing else.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test reads its fixtures from files"
)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tessera_torch::trace::{Budget, RankComparison, RunLogs, compare_ranks, examine_activity, read_log};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces")
}

fn read_folder(folder: &Path) -> RunLogs {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let logs = files.iter().filter(|f| f.extension().is_some_and(|e| e == "log"));
    let logs = logs.map(|f| {
        let name = f.file_name().unwrap().to_string_lossy().into_owned();
        read_log(&name, None, std::fs::read(f).unwrap().as_slice()).unwrap()
    });
    RunLogs::from_logs(logs.collect(), None).unwrap()
}

fn list_codes(compared: &RankComparison) -> Vec<String> {
    let kind = |message: &str| message.split_once(": ").map_or(String::new(), |(_, kind)| format!(" {kind}"));
    compared.diagnostics.iter().map(|d| format!("{}{}", d.code.id, kind(&d.message))).collect()
}

/// Returns what was found in the form of `case.json`.
fn summarize(run: &RunLogs) -> Value {
    let report = examine_activity(run, &Budget::from_toml("budget.toml", "").unwrap());
    let activity = report.activity.iter().map(|a| {
        format!(
            "{} {:?} {} {}x at {}",
            a.kind.name(),
            a.ranks,
            a.compile,
            a.count,
            a.site.as_deref().unwrap_or("-")
        )
    });
    let fails = report.budget.iter().filter(|l| !l.passes()).map(|l| format!("{} {}", l.key, l.value));
    let applies =
        report.structure.iter().filter(|r| r.applies()).map(|r| format!("{}: {}", r.title, r.value));
    json!({
        "check": list_codes(&compare_ranks(run)),
        "activity": activity.collect::<Vec<_>>(),
        "budget_fails": fails.collect::<Vec<_>>(),
        "change_structure": applies.collect::<Vec<_>>(),
    })
}

#[test]
fn every_recorded_case_gives_what_was_planted_and_nothing_else() {
    let mut wrong = Vec::new();
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(fixtures()).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    cases.sort();
    assert!(cases.len() >= 15, "the recorded cases are missing");
    for case in cases {
        let file = case.join("case.json");
        let mut about: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let found = summarize(&read_folder(&case));
        if about["found"] != found {
            wrong.push(format!("{}: planted {}, found {found:#}", case.display(), about["planted"]));
            if std::env::var_os("TESSERA_BLESS").is_some() {
                about["found"] = found;
                std::fs::write(&file, format!("{about:#}\n")).unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
