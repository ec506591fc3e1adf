//! Repeated measurements, medians, quantiles and linear regression.

use std::time::Instant;

/// Returns the median. For an even count it is the lower of the two middle values, so that it is a
/// measured value. Returns zero for an empty slice.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the smallest value that at least a share `q` of the values does not exceed, which is a
/// measured value. Returns zero for an empty slice.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// Returns the smallest value, or zero for an empty slice.
pub fn min_value(values: &[f64]) -> f64 {
    values.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Returns the largest value, or zero for an empty slice.
pub fn max_value(values: &[f64]) -> f64 {
    values.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0)
}

/// Returns the slope of the least-squares line through points (x, y), or zero if the line is
/// undefined.
pub fn regression_slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let (mx, my) = points.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / n, b + y / n));
    let (xy, xx) =
        points.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + (x - mx) * (y - my), b + (x - mx) * (x - mx)));
    if xx > 0.0 { xy / xx } else { 0.0 }
}

/// Rounds to three decimal places.
pub fn round_to_millis(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

/// The durations of the repetitions of some work.
pub struct Rounds {
    /// Elapsed seconds of each repetition.
    pub seconds: Vec<f64>,
    /// CPU seconds of the thread in each repetition, without the time in which other threads use the
    /// core.
    pub cpu_seconds: Vec<f64>,
}

impl Rounds {
    /// Does the work `rounds` times, at least once, and returns its last result.
    pub fn measure<T>(rounds: u32, work: impl Fn() -> anyhow::Result<T>) -> anyhow::Result<(T, Rounds)> {
        let mut out = Rounds { seconds: Vec::new(), cpu_seconds: Vec::new() };
        loop {
            let (begun, cpu) = (Instant::now(), thread_seconds());
            let result = work()?;
            out.cpu_seconds.push(thread_seconds() - cpu);
            out.seconds.push(begun.elapsed().as_secs_f64());
            if out.seconds.len() >= rounds as usize {
                return Ok((result, out));
            }
        }
    }
}

/// Returns the CPU time of this thread in seconds.
pub fn thread_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Returns p50, p99, the maximum and the number of values.
pub fn percentiles_json(values: &[f64]) -> serde_json::Value {
    serde_json::json!({
        "n": values.len(),
        "p50": round_to_millis(quantile(values, 0.50)),
        "p99": round_to_millis(quantile(values, 0.99)),
        "max": round_to_millis(max_value(values)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_was_measured() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(&[]), min_value(&[]), max_value(&[])), (0.0, 0.0, 0.0));
        assert_eq!((min_value(&[4.0, 1.5, 3.0]), max_value(&[4.0, 1.5, 3.0])), (1.5, 4.0));
    }

    #[test]
    fn a_quantile_bounds_the_share_above_it() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            (quantile(&values, 0.5), quantile(&values, 0.99), quantile(&values, 1.0)),
            (50.0, 99.0, 100.0)
        );
        assert_eq!((quantile(&values[..50], 0.99), quantile(&[7.0], 0.01)), (50.0, 7.0));
    }

    #[test]
    fn a_line_has_its_slope() {
        assert_eq!(regression_slope(&[(0.0, 5.0), (1.0, 7.0), (2.0, 9.0)]), 2.0);
        assert_eq!((regression_slope(&[(3.0, 5.0)]), regression_slope(&[])), (0.0, 0.0));
    }
}
