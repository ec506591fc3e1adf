//! The counts of a campaign, as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::draw::FaultKind;
use super::verdict::{Defect, FaultResult};
use crate::BenchResult;
use crate::stats::{percentiles_json, quantile, round_to_millis};

/// Describes a result in one line.
pub fn describe_result(r: &FaultResult) -> String {
    let defects: Vec<String> = r.defects.iter().map(|(d, text)| format!("{}: {text}", d.name())).collect();
    let verdict = if defects.is_empty() { format!("ok: {}", r.outcome) } else { defects.join("; ") };
    format!(
        "{} {}: {}, rank {}, {}, gone after {:.2} s: {verdict}",
        r.fault.number,
        r.fault.layout.name(),
        r.fault.kind.name(),
        r.fault.rank,
        r.moment,
        r.seconds_until_gone
    )
}

/// Builds the tables and the numbers of a campaign.
pub fn summarize_results(
    seed: u64,
    parallel: usize,
    seconds: f64,
    unavailable: &[(FaultKind, String)],
    results: &[FaultResult],
) -> BenchResult {
    let by_kind =
        FaultKind::ALL.map(|kind| (kind, results.iter().filter(|r| r.fault.kind == kind).collect()));
    let by_kind: Vec<(FaultKind, Vec<&FaultResult>)> =
        by_kind.into_iter().filter(|(_, of): &(_, Vec<_>)| !of.is_empty()).collect();
    let caches = cache_table(results);
    let wrong = results.iter().filter(|r| !r.defects.is_empty()).count();
    let mut text = write_tables(&by_kind, &caches);
    let n = results.len();
    let _ = write!(
        text,
        "\n{n} faults in {seconds:.0} s, {parallel} at a time, seed {seed}: {wrong} with a defect"
    );
    for (kind, why) in unavailable {
        let _ = write!(text, "\nnot drawn: {}: {why}", kind.name());
    }
    let all: Vec<&FaultResult> = results.iter().collect();
    let defects = count_defects(&all);
    let defects = Defect::ALL.map(|d| (d.name(), defects.get(&d).copied().unwrap_or(0)));
    let not_drawn = unavailable.iter().map(|(k, why)| json!({"kind": k.name(), "why": why}));
    let places = caches.iter().map(|(place, [found, undetected, masked])| {
        json!({"place": place, "found": found, "undetected": undetected, "no_effect": masked})
    });
    let numbers = json!({
        "bench": "cpu-faults",
        "seed": seed,
        "parallel": parallel,
        "faults": n,
        "seconds": round_to_millis(seconds),
        "faults_with_defect": wrong,
        "defects": BTreeMap::from(defects),
        "not_drawn": not_drawn.collect::<Vec<_>>(),
        "layouts": count_by(results, |r| r.fault.layout.name()),
        "moments": count_by(results, |r| r.moment),
        "kinds": by_kind.iter().map(|(kind, of)| kind_numbers(*kind, of)).collect::<Vec<_>>(),
        "caches": places.collect::<Vec<_>>(),
        "runs": results.iter().map(FaultResult::to_json).collect::<Vec<_>>(),
    });
    BenchResult { text, numbers }
}

/// Writes a table of the kinds and, if bits of caches were flipped, a table of their places.
fn write_tables(by_kind: &[(FaultKind, Vec<&FaultResult>)], caches: &BTreeMap<String, [usize; 3]>) -> String {
    let mut text = String::from(
        "| fault | runs | detected p50 s | p99 s | gone p50 s | p99 s | max s | defects |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for (kind, of) in by_kind {
        // The time until a run with a harmless fault is complete says nothing about the fault.
        let known: Vec<f64> = of.iter().filter_map(|r| r.seconds_to_detection).collect();
        let gone = of.iter().filter(|r| r.outcome != "no effect" && r.outcome != "undetected");
        let gone: Vec<f64> = gone.filter(|_| !kind.is_harmless()).map(|r| r.seconds_until_gone).collect();
        let cell = |values: &[f64], q| {
            if values.is_empty() { "-".to_string() } else { format!("{:.2}", quantile(values, q)) }
        };
        let listed: Vec<String> =
            count_defects(of).iter().map(|(d, n)| format!("{n} {}", d.name())).collect();
        let listed = if listed.is_empty() { "0".to_string() } else { listed.join(", ") };
        let times =
            [cell(&known, 0.5), cell(&known, 0.99), cell(&gone, 0.5), cell(&gone, 0.99), cell(&gone, 1.0)];
        let _ = writeln!(text, "| {} | {} | {} | {listed} |", kind.name(), of.len(), times.join(" | "));
    }
    if !caches.is_empty() {
        text += "\n| cache with a flipped bit | runs | found | undetected, other output | no effect |\n";
        text += "| --- | --- | --- | --- | --- |\n";
    }
    for (place, [found, undetected, masked]) in caches {
        let runs = found + undetected + masked;
        let _ = writeln!(text, "| {place} | {runs} | {found} | {undetected} | {masked} |");
    }
    text
}

fn kind_numbers(kind: FaultKind, of: &[&FaultResult]) -> Value {
    let known: Vec<f64> = of.iter().filter_map(|r| r.seconds_to_detection).collect();
    let gone: Vec<f64> = of.iter().map(|r| r.seconds_until_gone).collect();
    let calls: Vec<f64> = of.iter().filter_map(|r| r.calls_to_detection).map(|n| n as f64).collect();
    let defects: BTreeMap<&str, usize> = count_defects(of).into_iter().map(|(d, n)| (d.name(), n)).collect();
    json!({
        "kind": kind.name(),
        "runs": of.len(),
        "seconds_to_detection": percentiles_json(&known),
        "seconds_until_gone": percentiles_json(&gone),
        "calls_to_detection": percentiles_json(&calls),
        "defects": defects,
    })
}

fn count_defects(results: &[&FaultResult]) -> BTreeMap<Defect, usize> {
    let mut out = BTreeMap::new();
    for (defect, _) in results.iter().flat_map(|r| &r.defects) {
        *out.entry(*defect).or_default() += 1;
    }
    out
}

fn count_by(
    results: &[FaultResult],
    key: impl Fn(&FaultResult) -> &'static str,
) -> BTreeMap<&'static str, usize> {
    let mut out = BTreeMap::new();
    for r in results {
        *out.entry(key(r)).or_default() += 1;
    }
    out
}

/// Counts the flipped cache bits by place: found, undetected with another output, without effect.
fn cache_table(results: &[FaultResult]) -> BTreeMap<String, [usize; 3]> {
    let mut out: BTreeMap<String, [usize; 3]> = BTreeMap::new();
    for r in results.iter().filter(|r| r.fault.kind == FaultKind::FlippedCache) {
        let at = match r.outcome.as_str() {
            "found" => 0,
            "undetected" => 1,
            "no effect" => 2,
            _ => continue,
        };
        // The caches of all layers count as one place.
        let name = r.place.as_deref().unwrap_or("unknown");
        let place: String =
            name.split(|c: char| c.is_ascii_digit()).filter(|s| !s.is_empty()).collect::<Vec<_>>().join("N");
        out.entry(place).or_default()[at] += 1;
    }
    out
}
