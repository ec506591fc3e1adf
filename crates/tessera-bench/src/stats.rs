//! Medians.

/// The median; the lower of the two middle values of an even count, so that it is a value that was measured.
/// Zero for nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// The smallest. Zero for nothing.
pub fn least(values: &[f64]) -> f64 {
    values.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// Three digits after the point.
pub fn round(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_was_measured() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.0);
        assert_eq!((median(&[]), least(&[])), (0.0, 0.0));
        assert_eq!(least(&[4.0, 1.5, 3.0]), 1.5);
    }
}
