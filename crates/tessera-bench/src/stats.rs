//! Medians, quantiles and lines through points.

/// The median; the lower of the two middle values of an even count, so that it is a value that was measured.
/// Zero for nothing.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The least value that is not below a share `q` of all values, so that it was measured. Zero for nothing.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
}

/// The smallest. Zero for nothing.
pub fn least(values: &[f64]) -> f64 {
    values.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// The largest. Zero for nothing.
pub fn most(values: &[f64]) -> f64 {
    values.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0)
}

/// Slope of the line of least squares through points (x, y). Zero where there is no line.
pub fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let (mx, my) = points.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + x / n, b + y / n));
    let (xy, xx) =
        points.iter().fold((0.0, 0.0), |(a, b), (x, y)| (a + (x - mx) * (y - my), b + (x - mx) * (x - mx)));
    if xx > 0.0 { xy / xx } else { 0.0 }
}

/// Three digits after the point.
pub fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

/// p50, p99 and the largest, with how many they are of.
pub fn spread(values: &[f64]) -> serde_json::Value {
    serde_json::json!({
        "n": values.len(),
        "p50": round(quantile(values, 0.50)),
        "p99": round(quantile(values, 0.99)),
        "max": round(most(values)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_was_measured() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(&[]), least(&[]), most(&[])), (0.0, 0.0, 0.0));
        assert_eq!((least(&[4.0, 1.5, 3.0]), most(&[4.0, 1.5, 3.0])), (1.5, 4.0));
    }

    #[test]
    fn a_quantile_leaves_no_more_above_than_it_says() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            (quantile(&values, 0.5), quantile(&values, 0.99), quantile(&values, 1.0)),
            (50.0, 99.0, 100.0)
        );
        assert_eq!((quantile(&values[..50], 0.99), quantile(&[7.0], 0.01)), (50.0, 7.0));
    }

    #[test]
    fn a_line_has_its_slope() {
        assert_eq!(slope(&[(0.0, 5.0), (1.0, 7.0), (2.0, 9.0)]), 2.0);
        assert_eq!((slope(&[(3.0, 5.0)]), slope(&[])), (0.0, 0.0));
    }
}
