//! Arbitrary bytes as the compile traces of a PyTorch run.

use tessera_torch::trace::{Budget, RunLogs, compare_ranks, examine_activity, read_log};

use super::check_renders;

/// Reads the bytes up to the first 0xFF as the log of rank 0, and the rest as that of rank 1. A log
/// beside a copy of itself must not differ from it.
pub(super) fn check_logs(bytes: &[u8]) {
    let (first, second) = bytes.split_at(bytes.iter().position(|b| *b == 0xff).unwrap_or(bytes.len()));
    examine_logs(first, second);
    examine_logs(second, first);
    for code in examine_logs(first, first) {
        assert!(!["T1413", "T1415", "T1416"].contains(&code), "a log differs from itself: {code}");
    }
}

/// Compares and examines two logs, and returns the codes of what differs.
fn examine_logs(first: &[u8], second: &[u8]) -> Vec<&'static str> {
    let mut logs = Vec::new();
    for (rank, bytes) in (0..).zip([first, second]) {
        match read_log("log", Some(rank), bytes) {
            Ok(log) => logs.push(log),
            Err(d) => check_renders(&[d], ""),
        }
    }
    let run = RunLogs::from_logs(logs, None).unwrap_or_else(|d| panic!("two ranks are refused: {d:?}"));
    let compared = compare_ranks(&run);
    check_renders(&compared.diagnostics, "");
    if let Ok(budget) = Budget::from_toml("budget.toml", "") {
        let report = examine_activity(&run, &budget);
        assert!(!report.to_text("log").is_empty() && report.to_json().is_object());
    }
    compared.diagnostics.iter().map(|d| d.code.id).collect()
}
