//! Reads a folder of PyTorch compile traces, one file per rank.

use std::io::BufReader;
use std::path::{Path, PathBuf};

use tessera::files::{open_regular_file, read_text_file};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_estimate::codes::T0046;
use tessera_torch::codes::{T1410, T1425};
use tessera_torch::flight::list_ranks;
use tessera_torch::trace::{
    Budget, CompileReport, LIMITS, RankComparison, RunLogs, compare_ranks, examine_activity, read_log,
};

use crate::flight_dumps::find_dumps;

/// How PyTorch begins the names of compile traces.
const PREFIX: &str = "dedicated_log_torch_trace_";
/// Files that mark a folder as something of Tessera.
const OTHER_KINDS: &[&str] = &["seal.json", "record.jsonl", "estimate.json", "mapping.toml"];

/// Lists the compile traces of a folder, or `None` if it holds none.
///
/// # Errors
/// T1425 if the folder also holds a plan, a run or an estimate.
pub fn find_compile_traces(dir: &Path) -> Result<Option<Vec<PathBuf>>, Diagnostic> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
    let is_log = |name: &str| name.starts_with(PREFIX) && name.ends_with(".log");
    let logs = entries.filter(|e| e.file_name().to_str().is_some_and(is_log));
    let mut logs: Vec<PathBuf> = logs.map(|e| e.path()).collect();
    logs.sort();
    if logs.is_empty() {
        return Ok(None);
    }
    if let Some(other) = OTHER_KINDS.iter().find(|name| dir.join(name).exists()) {
        let message = format!("{} holds compile traces beside {other}", dir.display());
        return Err(Diagnostic::error(&T1425, message)
            .with_label(dir.display().to_string(), format!("{} compile traces, and {other}", logs.len()))
            .with_hint("move the files dedicated_log_torch_trace_… into a folder of their own"));
    }
    Ok(Some(logs))
}

/// Reads compile traces; `rank_count` is the number of ranks of the run, if the user gave it.
///
/// # Errors
/// T1410 for each file that cannot be read, T1411 if the files are not one per rank.
pub fn read_compile_traces(logs: &[PathBuf], rank_count: Option<u32>) -> Result<RunLogs, Diagnostics> {
    let (mut read, mut wrong) = (Vec::new(), Vec::new());
    for path in logs {
        let name = path.display().to_string();
        let file = open_regular_file(path).map_err(|e| {
            Diagnostic::error(&T1410, format!("{name} cannot be read")).with_label(&name, e.to_string())
        });
        let rank = path.file_name().and_then(|n| rank_of_name(n.to_str()?));
        match file.and_then(|file| read_log(&name, rank, BufReader::with_capacity(1 << 16, file))) {
            Ok(log) => read.push(log),
            Err(d) => wrong.push(d),
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    RunLogs::from_logs(read, rank_count).map_err(|d| vec![d])
}

/// Compares the collectives that the ranks compiled.
///
/// # Errors
/// As [`read_compile_traces`].
pub fn check_compile_traces(
    logs: &[PathBuf],
    rank_count: Option<u32>,
) -> Result<RankComparison, Diagnostics> {
    read_compile_traces(logs, rank_count).map(|run| compare_ranks(&run))
}

/// Counts what the ranks compiled, against the budget in a file or else the built-in one.
///
/// # Errors
/// As [`read_compile_traces`], and T0001 to T0004 for the budget.
pub fn examine_compile_traces(
    logs: &[PathBuf],
    rank_count: Option<u32>,
    budget: Option<&Path>,
) -> Result<CompileReport, Diagnostics> {
    let (name, text) = match budget {
        None => ("the built-in budget".to_string(), String::new()),
        Some(path) => {
            let name = path.display().to_string();
            let text = read_text_file(path).map_err(|e| {
                vec![
                    Diagnostic::error(&T0046, format!("{name} cannot be read: {e}"))
                        .with_label(&name, "this file"),
                ]
            })?;
            (name, text)
        }
    };
    let budget = Budget::from_toml(&name, &text)?;
    let mut report = read_compile_traces(logs, rank_count).map(|run| examine_activity(&run, &budget))?;
    if let Some(dir) = logs.first().and_then(|p| p.parent())
        && let Ok(Some(dumps)) = find_dumps(dir)
    {
        let ranks: Vec<u32> = dumps.keys().copied().collect();
        report.notes.push(format!(
            "the folder also holds Flight Recorder dumps of {}: tessera autopsy {}",
            list_ranks(&ranks),
            dir.display()
        ));
    }
    Ok(report)
}

/// Formats the result of a comparison without errors as one sentence.
#[must_use]
pub fn summarize_comparison(compared: &RankComparison) -> String {
    if compared.collectives == 0 {
        return format!("no collective in a compiled graph, so nothing to compare; {LIMITS}");
    }
    let count = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let verdict = match compared.diagnostics.len() {
        0 => "every rank compiled the same sequences".to_string(),
        n => format!("no difference is certain, and {} to read", count(n, "warning")),
    };
    format!(
        "{}, {}, {}: {verdict}; {LIMITS}",
        count(compared.ranks, "rank"),
        count(compared.collectives, "compiled collective"),
        count(compared.groups, "group"),
    )
}

/// Returns the rank in a name such as `dedicated_log_torch_trace_rank_3_x1y2z3.log`.
fn rank_of_name(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.strip_prefix("rank_")?.split('_').next()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_in_the_name_or_in_the_records() {
        assert_eq!(rank_of_name("dedicated_log_torch_trace_rank_12_ab_9.log"), Some(12));
        assert_eq!(rank_of_name("dedicated_log_torch_trace_ab12.log"), None);
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dedicated_log_torch_trace_rank_1_a.log");
        std::fs::write(&log, "V1123 22:10:58.5 1 a.py:1] {\"rank\": 1}\n").unwrap();
        let logs = find_compile_traces(dir.path()).unwrap().unwrap();
        assert_eq!(read_compile_traces(&logs, None).unwrap().missing_ranks(), [0]);
        std::fs::write(dir.path().join("rank_0"), b"\x80\x02N.").unwrap();
        let run = examine_compile_traces(&logs, None, None).unwrap();
        assert!(run.notes[0].contains("tessera autopsy"), "{:?}", run.notes);
        std::fs::write(dir.path().join("seal.json"), "{}").unwrap();
        assert_eq!(find_compile_traces(dir.path()).unwrap_err().code, &T1425);
        let empty = tempfile::tempdir().unwrap();
        assert!(find_compile_traces(empty.path()).unwrap().is_none());
        std::fs::write(&log, "nothing").unwrap();
        assert_eq!(read_compile_traces(&logs, None).unwrap_err()[0].code, &T1410);
    }
}
