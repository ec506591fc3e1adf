//! Formatting that the reports of all kinds of models share: durations, shares, counts and column
//! titles.

use tessera_base::Nanoseconds;

/// Smallest share of a step from which a difference is shown.
pub(crate) const MIN_SHARE_SHOWN: f64 = 0.002;

pub(crate) fn format_ns(ns: f64) -> String {
    Nanoseconds(ns.max(0.0).round() as u64).to_string()
}

pub(crate) fn format_amount(value: f64, unit: &str) -> String {
    let digits = if value.abs() >= 100.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}").trim_end().to_string()
}

/// Formats a count with its noun in singular or plural.
pub(crate) fn count_with_noun(n: u32, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

pub(crate) fn format_percent(share: f64) -> String {
    let share = share * 100.0;
    if share > 0.0 && share < 0.05 { "< 0.1 %".to_string() } else { format!("{share:.1} %") }
}

pub(crate) fn owned_columns(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_string()).collect()
}
