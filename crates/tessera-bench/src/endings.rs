//! How the runs of a case ended after a fault, for the benchmarks that measure this.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::stats::{max_value, percentiles_json, quantile};

/// The ends of all repetitions of one case.
#[derive(Debug, Default)]
pub struct RunEndings {
    /// Time from the fault until all processes of the run were gone, by repetition.
    pub seconds_until_gone: Vec<f64>,
    /// Number of processes that outlived their run.
    pub left_behind: usize,
    /// Number of reports that named the right rank.
    pub named_correctly: u32,
    /// How often each outcome was reported.
    outcomes: BTreeMap<String, u32>,
}

impl RunEndings {
    /// Adds a run that took `took` from the fault until its end and left `left` processes.
    pub fn add_run(&mut self, took: Duration, left: usize) {
        self.seconds_until_gone.push(took.as_secs_f64());
        self.left_behind += left;
    }

    /// Adds a report of a run, and whether it names the right rank.
    pub fn add_report(&mut self, end: &str, code: Option<&str>, rank: Option<u64>, is_named_correctly: bool) {
        let rank = rank.map_or("no rank".to_string(), |r| format!("rank {r}"));
        let outcome = format!("{end}, {}, {rank}", code.unwrap_or("no code"));
        *self.outcomes.entry(outcome).or_default() += 1;
        self.named_correctly += u32::from(is_named_correctly);
    }

    /// Returns the heading of the lines that [`RunEndings::write_lines`] writes.
    pub fn heading(name_width: usize, named: &str) -> String {
        let what = "time until gone";
        format!(
            "{what:<name_width$} {:>4} {:>8} {:>8} {:>8}  left  {named}\n",
            "n", "p50 s", "p99 s", "max s"
        )
    }

    /// Writes a line with the times of the case, and one line per outcome. Each run makes
    /// `reports_per_run` reports.
    pub fn write_lines(&self, name: &str, name_width: usize, reports_per_run: usize, text: &mut String) {
        let times = &self.seconds_until_gone;
        let _ = writeln!(
            text,
            "{name:<name_width$} {:>4} {:>8.3} {:>8.3} {:>8.3}  {:>4}  {} of {}",
            times.len(),
            quantile(times, 0.5),
            quantile(times, 0.99),
            max_value(times),
            self.left_behind,
            self.named_correctly,
            reports_per_run * times.len()
        );
        for (outcome, count) in &self.outcomes {
            let _ = writeln!(text, "    {count:>4} x {outcome}");
        }
    }

    /// Returns the numbers of the case, of which the longest time may be `limit_s`.
    pub fn to_json(&self, limit_s: f64) -> Map<String, Value> {
        let fields = [
            ("seconds", percentiles_json(&self.seconds_until_gone)),
            ("limit_s", json!(limit_s)),
            ("within_limit", json!(max_value(&self.seconds_until_gone) <= limit_s)),
            ("orphans", json!(self.left_behind)),
            ("outcomes", json!(self.outcomes)),
        ];
        fields.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }
}
