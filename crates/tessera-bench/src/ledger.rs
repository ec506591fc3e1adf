//! The ledger of baselines, `bench/ledger.json`: numbers of saved runs, and inherited numbers, which
//! nobody here measured. An inherited number is context and no baseline.

use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::BenchResult;

/// The ledger, relative to the workspace root.
const LEDGER: &str = "bench/ledger.json";
/// Difference below a baseline that counts as noise, in per cent.
const TOLERANCE_PERCENT: f64 = 5.0;

/// List the ledger of baselines, or compare a new number with one of them
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Compare a number with a measured baseline of which more is better, as ID=NUMBER; more than 5 % below is a
    /// regression
    #[arg(long, value_name = "ID=NUMBER")]
    compare: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ledger {
    entries: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    id: String,
    what: String,
    unit: String,
    #[serde(flatten)]
    origin: Origin,
}

/// Where a number comes from. A measured one is read from its run, so that the ledger cannot state another.
#[derive(Debug, Deserialize)]
#[serde(tag = "origin", rename_all = "lowercase", deny_unknown_fields)]
enum Origin {
    Inherited { value: f64, source: String },
    Measured { run: String, number: String },
}

/// Lists the ledger or compares a number with it.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    let text = std::fs::read_to_string(LEDGER)
        .with_context(|| format!("cannot read {LEDGER}: run this from the workspace root"))?;
    let ledger = read_ledger(&text)?;
    let runs = Path::new(crate::save::RUNS_DIR);
    if let Some(compared) = &args.compare {
        return compare(&ledger, runs, compared);
    }
    let mut lines = vec![
        "| id | number | unit | origin | what |".to_string(),
        "| --- | --- | --- | --- | --- |".to_string(),
    ];
    for entry in &ledger.entries {
        let (value, origin) = match &entry.origin {
            Origin::Inherited { value, source } => {
                (*value, format!("inherited, not measured here: {source}"))
            }
            Origin::Measured { run, .. } => (measured_value(entry, runs)?, format!("measured: {run}")),
        };
        lines.push(format!("| {} | {value} | {} | {origin} | {} |", entry.id, entry.unit, entry.what));
    }
    let numbers = serde_json::json!({"bench": "ledger", "entries": ledger.entries.len()});
    Ok(BenchResult { text: lines.join("\n"), numbers })
}

fn read_ledger(text: &str) -> anyhow::Result<Ledger> {
    serde_json::from_str(text).with_context(|| format!("{LEDGER} is invalid"))
}

/// Compares `ID=NUMBER` with a measured entry.
fn compare(ledger: &Ledger, runs: &Path, compared: &str) -> anyhow::Result<BenchResult> {
    let (id, number) = compared.split_once('=').context("--compare: write ID=NUMBER")?;
    let number: f64 = number.parse().with_context(|| format!("--compare: `{number}` is no number"))?;
    let entry = ledger.entries.iter().find(|e| e.id == id);
    let entry = entry.with_context(|| format!("{LEDGER} has no entry `{id}`"))?;
    if let Origin::Inherited { value, source } = &entry.origin {
        bail!(
            "{id}: {value} {} is inherited and was not measured here ({source}). It is no baseline: measure it, and \
             add the run to {LEDGER}",
            entry.unit
        );
    }
    let baseline = measured_value(entry, runs)?;
    let percent = (number / baseline - 1.0) * 100.0;
    let text = format!("{id}: {number} against {baseline} {} measured, {percent:+.1} %", entry.unit);
    if !percent.is_finite() || percent < -TOLERANCE_PERCENT {
        bail!("{text}: a regression, more than {TOLERANCE_PERCENT} % below");
    }
    let numbers = serde_json::json!({"bench": "ledger", "id": id, "number": number, "baseline": baseline});
    Ok(BenchResult { text, numbers })
}

/// Reads the number of a measured entry from the result of its run.
fn measured_value(entry: &Entry, runs: &Path) -> anyhow::Result<f64> {
    let Origin::Measured { run, number } = &entry.origin else {
        bail!("{} is not measured", entry.id);
    };
    let path = runs.join(run).join("result.json");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("{}: no {}", entry.id, path.display()))?;
    let result: serde_json::Value = serde_json::from_str(&text)?;
    let value = result.pointer(number).and_then(serde_json::Value::as_f64);
    value.with_context(|| format!("{}: {} has no number at {number}", entry.id, path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn committed() -> (Ledger, std::path::PathBuf) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let ledger = read_ledger(&std::fs::read_to_string(root.join(LEDGER)).unwrap()).unwrap();
        (ledger, root.join(crate::save::RUNS_DIR))
    }

    #[test]
    fn an_inherited_number_is_never_compared_as_if_it_was_measured_here() {
        let (ledger, runs) = committed();
        for id in ["pytorch-tp2-compile-fps", "pytorch-functional-collectives-breaks-removed"] {
            let refused = compare(&ledger, &runs, &format!("{id}=1000")).err().unwrap().to_string();
            assert!(refused.contains("inherited and was not measured here"), "{refused}");
        }
        // Negative control: a measured entry is compared, and a number below it is a regression.
        let same = compare(&ledger, &runs, "h200-14b-320x576-gpus2-fps=45.763").unwrap();
        assert!(same.text.contains("+0.0 %"), "{}", same.text);
        let lower = compare(&ledger, &runs, "h200-14b-320x576-gpus2-fps=40").err().unwrap().to_string();
        assert!(lower.contains("a regression"), "{lower}");
    }

    #[test]
    fn every_measured_entry_has_its_number_in_its_run_and_no_value_of_its_own() {
        let (ledger, runs) = committed();
        let measured = ledger.entries.iter().filter(|e| matches!(e.origin, Origin::Measured { .. }));
        assert!(measured.clone().count() > 0);
        measured.for_each(|e| assert!(measured_value(e, &runs).is_ok_and(f64::is_finite), "{}", e.id));
        let entry = |rest: &str| {
            read_ledger(&format!(r#"{{"entries": [{{"id": "a", "what": "b", "unit": "c", {rest}}}]}}"#))
        };
        assert!(entry(r#""origin": "inherited", "value": 1, "source": "s""#).is_ok());
        assert!(entry(r#""origin": "measured", "run": "r", "number": "/n", "value": 1"#).is_err());
        assert!(entry(r#""origin": "measured", "value": 1, "source": "s""#).is_err());
    }
}
