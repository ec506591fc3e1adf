//! The record of gates: what a run in performance mode must show before it starts. `tessera record
//! gates` and `tessera bringup` write one from the runs that they check.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera::clock::parse_utc;
use tessera::files;
use tessera::record::RECORD_FILE;
use tessera::run_dir::read_record;
use tessera_base::{Diagnostic, GateStatus};
use tessera_report::record::{RunHost, RunStatus};

use crate::codes::T0063;

/// Schema number of the file.
const SCHEMA: u32 = 1;

/// Gates, and the runs from which they were computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateRecord {
    schema: u32,
    /// The subcommand that computed the gates, such as `record gates`.
    source: String,
    runs: Vec<GatedRun>,
    gates: Vec<RecordedGate>,
}

/// A run from which gates were computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GatedRun {
    folder: String,
    plan: String,
    host: RunHost,
    started_at: String,
    is_complete: bool,
}

/// A gate with its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedGate {
    /// What the gate measures.
    pub gate: String,
    /// The value, or the reason why there is none.
    pub value: String,
    /// The name of a [`GateStatus`].
    pub verdict: String,
}

/// A run that is about to start in performance mode.
#[derive(Debug, Clone)]
pub struct PerformanceRun {
    /// Digest of the sealed plan, hex.
    pub plan: String,
    /// This executable, and the shape of this host for the device of the run.
    pub host: RunHost,
    /// Current time, in seconds since 1970.
    pub now_s: u64,
    /// Maximum age of each run behind the gates, in seconds.
    pub max_age_s: u64,
}

impl GateRecord {
    /// Makes the record of the gates of some run folders.
    ///
    /// # Errors
    /// The diagnostic of a folder whose `record.jsonl` cannot be read.
    pub fn from_runs(
        source: &str,
        folders: &[PathBuf],
        gates: Vec<RecordedGate>,
    ) -> Result<GateRecord, Diagnostic> {
        let open = |folder: &PathBuf| {
            let path = folder.join(RECORD_FILE);
            let missing = || {
                Diagnostic::error(
                    &T0063,
                    format!("{} holds no {RECORD_FILE} to take gates from", folder.display()),
                )
            };
            let record = read_record(&path).ok_or_else(missing)??;
            Ok(GatedRun {
                folder: folder.display().to_string(),
                is_complete: record.status() == RunStatus::Complete,
                plan: record.start.plan,
                host: record.start.host.map(|host| *host).unwrap_or_default(),
                started_at: record.start.started_at,
            })
        };
        let runs = folders.iter().map(open).collect::<Result<_, Diagnostic>>()?;
        Ok(GateRecord { schema: SCHEMA, source: source.to_string(), runs, gates })
    }

    /// Writes the record to a file, which may exist.
    ///
    /// # Errors
    /// T0014.
    pub fn write(&self, path: &Path) -> Result<(), Diagnostic> {
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        files::write_file(path, text.as_bytes())
    }

    /// Reads a record.
    ///
    /// # Errors
    /// T0063 for a file that cannot be read or is no gate record of this schema.
    pub fn read(path: &Path) -> Result<GateRecord, Diagnostic> {
        let text = files::read_text(path, &T0063)?;
        let refuse = |why: String| {
            Diagnostic::error(&T0063, format!("{} is no gate record", path.display()))
                .with_label(path.display().to_string(), why)
        };
        let record: GateRecord = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
        if record.schema != SCHEMA {
            return Err(refuse(format!("schema {}; this build reads {SCHEMA}", record.schema)));
        }
        Ok(record)
    }

    /// Returns why the gates do not allow a run: place and reason of everything that is wrong. The
    /// list is empty if a gate passes, every other gate passes or does not apply, and each run behind
    /// them completed with the same plan, build and machine within the maximum age.
    #[must_use]
    pub fn find_objections(&self, run: &PerformanceRun) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let passes = |name: GateStatus| self.gates.iter().any(|g| g.verdict == name.name());
        for g in &self.gates {
            let status = GateStatus::from_name(&g.verdict);
            if !matches!(status, Some(GateStatus::Pass | GateStatus::NotApplicable)) {
                out.push((format!("gate `{}`", g.gate), format!("{}: {}", g.verdict, g.value)));
            }
        }
        if !passes(GateStatus::Pass) {
            out.push((self.source.clone(), "no gate passes".to_string()));
        }
        if self.runs.is_empty() {
            out.push((self.source.clone(), "no run is behind the gates".to_string()));
        }
        for r in &self.runs {
            let mut object = |why: String| out.push((r.folder.clone(), why));
            for (what, theirs, ours) in [
                ("plan", &r.plan, &run.plan),
                ("build", &r.host.build, &run.host.build),
                ("machine", &r.host.machine_shape, &run.host.machine_shape),
            ] {
                if theirs != ours {
                    object(format!("the gates are of {what} `{theirs}`, this run has `{ours}`"));
                }
            }
            if !r.is_complete {
                object("this run did not complete".to_string());
            }
            match parse_utc(&r.started_at).and_then(|started| run.now_s.checked_sub(started)) {
                Some(age_s) if age_s <= run.max_age_s => {}
                Some(age_s) => object(format!(
                    "this run started at {}, {} h ago; the maximum age is {} h",
                    r.started_at,
                    age_s / 3600,
                    run.max_age_s / 3600
                )),
                None => {
                    object(format!("this run started at `{}`, which is no time in the past", r.started_at))
                }
            }
        }
        out
    }
}

/// Checks the gates of a run in performance mode, and returns what its record says about them.
/// `override_reason` starts the run although the gates do not allow it; then the refusal comes back as
/// a warning.
///
/// # Errors
/// T0063 with every reason, if there is no override.
pub fn check_performance_run(
    gate_record: Option<&Path>,
    override_reason: Option<&str>,
    run: &PerformanceRun,
) -> Result<(String, Option<Diagnostic>), Diagnostic> {
    let refusal = match gate_record {
        None => Some(
            Diagnostic::error(&T0063, "performance mode needs a gate record")
                .with_label("--performance", "--gate-record names no file"),
        ),
        Some(path) => match GateRecord::read(path) {
            Err(d) => Some(d),
            Ok(record) => {
                let objections = record.find_objections(run);
                let text = format!("the gates in {} do not allow this run", path.display());
                let refusal = Diagnostic::error(&T0063, text);
                let add = |d: Diagnostic, (place, why): (String, String)| d.with_label(place, why);
                (!objections.is_empty()).then(|| objections.into_iter().fold(refusal, add))
            }
        },
    };
    let Some(refusal) = refusal else {
        let path = gate_record.unwrap_or(Path::new(""));
        return Ok((format!("all gates of {} allow this run", path.display()), None));
    };
    let Some(reason) = override_reason else {
        return Err(refusal.with_hint(
            "record a run of this plan on this machine, then `tessera record gates RUN --gate-record FILE`; \
             `--override-gates REASON` starts the run anyway",
        ));
    };
    let objections = refusal.labels.iter().map(|l| format!("{}: {}", l.location, l.message));
    let found: Vec<String> = std::iter::once(refusal.message.clone()).chain(objections).collect();
    let mut warning = Diagnostic::warning(&T0063, format!("the gates are overridden: {reason}"));
    warning.labels.clone_from(&refusal.labels);
    Ok((format!("gates overridden: {reason}; {}", found.join("; ")), Some(warning)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
mod tests {
    use super::*;

    fn gate(name: &str, status: GateStatus) -> RecordedGate {
        RecordedGate { gate: name.to_string(), value: "1".to_string(), verdict: status.name().to_string() }
    }

    fn host() -> RunHost {
        RunHost { build: "b".to_string(), machine_shape: "m".to_string() }
    }

    fn green() -> GateRecord {
        let run = GatedRun {
            folder: "a".to_string(),
            plan: "p".to_string(),
            host: host(),
            started_at: "2026-11-21T00:00:00Z".to_string(),
            is_complete: true,
        };
        let gates = vec![gate("first", GateStatus::Pass), gate("second", GateStatus::NotApplicable)];
        GateRecord { schema: SCHEMA, source: "record gates".to_string(), runs: vec![run], gates }
    }

    fn this_run() -> PerformanceRun {
        PerformanceRun { plan: "p".to_string(), host: host(), now_s: 1_795_219_200 + 3600, max_age_s: 3600 }
    }

    /// Returns the objections after one change of the record or of the run.
    fn objections_after(change: impl Fn(&mut GateRecord, &mut PerformanceRun)) -> Vec<(String, String)> {
        let (mut record, mut run) = (green(), this_run());
        change(&mut record, &mut run);
        record.find_objections(&run)
    }

    fn assert_objects(place: &str, part: &str, change: impl Fn(&mut GateRecord, &mut PerformanceRun)) {
        let found = objections_after(change);
        assert!(found.len() == 1 && found[0].0 == place && found[0].1.contains(part), "{found:?}");
    }

    #[test]
    fn a_green_record_of_the_same_plan_build_and_machine_allows_a_run() {
        assert_eq!(objections_after(|_, _| {}), []);
    }

    #[test]
    fn a_gate_that_fails_warns_or_is_withheld_refuses_a_run() {
        for status in [GateStatus::Fail, GateStatus::Warn, GateStatus::NotMeasured] {
            assert_objects("gate `second`", status.name(), |r, _| r.gates[1] = gate("second", status));
        }
        assert_objects("gate `second`", "great", |r, _| r.gates[1].verdict = "great".to_string());
        assert_objects("record gates", "no gate passes", |r, _| {
            r.gates.remove(0);
        });
        assert_objects("record gates", "no run", |r, _| r.runs.clear());
    }

    #[test]
    fn another_plan_build_machine_or_an_unfinished_run_refuses_a_run() {
        assert_objects("a", "of plan `p`, this run has `q`", |_, run| run.plan = "q".to_string());
        assert_objects("a", "of build `b`", |_, run| run.host.build = "c".to_string());
        assert_objects("a", "of machine `m`", |_, run| run.host.machine_shape = "n".to_string());
        assert_objects("a", "did not complete", |r, _| r.runs[0].is_complete = false);
    }

    #[test]
    fn a_run_is_stale_after_its_maximum_age_and_never_from_the_future() {
        assert_objects("a", "1 h ago; the maximum age is 1 h", |_, run| run.now_s += 1);
        assert_objects("a", "no time in the past", |_, run| run.now_s -= 3601);
        assert_objects("a", "no time in the past", |r, _| r.runs[0].started_at = "now".to_string());
    }

    #[test]
    fn an_override_starts_the_run_and_names_every_objection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gates.json");
        green().write(&path).unwrap();
        let (detail, warning) = check_performance_run(Some(&path), Some("why"), &this_run()).unwrap();
        assert!(detail.starts_with("all gates of ") && warning.is_none(), "a green record needs no override");
        let other = PerformanceRun { plan: "q".to_string(), ..this_run() };
        let refused = check_performance_run(Some(&path), None, &other).unwrap_err();
        assert!(refused.is_error() && refused.labels.len() == 1, "{refused:?}");
        let (detail, warning) = check_performance_run(Some(&path), Some("a demo"), &other).unwrap();
        assert!(detail.contains("overridden: a demo") && detail.contains("this run has `q`"), "{detail}");
        assert!(warning.is_some_and(|w| !w.is_error() && w.message.contains("a demo")));
        assert!(check_performance_run(None, None, &this_run()).is_err(), "no record");
        std::fs::write(&path, "{}").unwrap();
        assert!(check_performance_run(Some(&path), None, &this_run()).is_err(), "no gate record");
        assert!(check_performance_run(Some(&dir.path().join("none")), None, &this_run()).is_err());
    }
}
