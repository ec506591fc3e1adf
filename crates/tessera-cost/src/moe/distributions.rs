//! Probability distributions behind the load model: normal and skewed distributions, small counts,
//! and the expected maximum of many.

/// Ranks whose rows have the same distribution.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankGroup {
    /// Number of ranks that share the distribution.
    pub ranks: f64,
    /// Expected rows of one rank.
    pub mean: f64,
    /// Variance of the rows, as if ranks were independent.
    pub variance: f64,
    /// Skewness of the rows of one rank; below 0.001 the distribution counts as normal.
    pub skew: f64,
}

/// Returns the expected rows of the rank with the most rows.
///
/// Ranks are negatively correlated because their rows add up to a constant. For equal normal ranks
/// this is exactly compensated by leaving the constraint out of the variance too, and callers pass
/// that variance.
pub(super) fn expected_max(groups: &[RankGroup]) -> f64 {
    let top = groups.iter().fold(0.0f64, |m, g| m.max(g.mean));
    let widest = groups.iter().fold(0.0f64, |m, g| m.max(g.variance));
    if widest <= 1e-12 * top * top || top <= 0.0 {
        return top;
    }
    if top <= MAX_COUNTED_MEAN { counted_max(groups) } else { smooth_max(groups) }
}

/// Maximum mean for which whole rows matter, so that they are counted one by one.
const MAX_COUNTED_MEAN: f64 = 12.0;

/// [`expected_max`] for whole numbers: binomial, Poisson or negative binomial by mean and variance.
/// In these distributions the ratio of successive probabilities is a + b / j.
fn counted_max(groups: &[RankGroup]) -> f64 {
    struct CountDistribution {
        ranks: f64,
        a: f64,
        b: f64,
        chance: f64,
        below: f64,
    }
    let mut counts: Vec<CountDistribution> = groups
        .iter()
        .filter(|g| g.mean > 0.0)
        .map(|g| {
            let a = 1.0 - g.mean / g.variance.max(1e-3 * g.mean);
            let ln = if a.abs() < 1e-9 { -g.mean } else { g.mean * (1.0 - a) * (1.0 - a).ln() / a };
            let chance = ln.exp();
            CountDistribution { ranks: g.ranks, a, b: g.mean * (1.0 - a) - a, chance, below: chance }
        })
        .collect();
    let (mut sum, mut j) = (0.0, 0.0);
    // The longest tails end well before this bound.
    while j < 4096.0 {
        let all: f64 = counts.iter().map(|c| probability_power(c.below, c.ranks)).product();
        sum += 1.0 - all;
        if 1.0 - all < 1e-7 {
            break;
        }
        j += 1.0;
        for c in &mut counts {
            c.chance *= (c.a + c.b / j).max(0.0);
            c.below = (c.below + c.chance).min(1.0);
        }
    }
    sum
}

/// [`expected_max`] for practically continuous values: `hi` less the integral of the probability
/// that all ranks are below.
fn smooth_max(groups: &[RankGroup]) -> f64 {
    const POINTS: usize = 40;
    let deviation = |g: &RankGroup| g.variance.max(0.0).sqrt();
    // Below `lo` some rank almost certainly has more.
    let lo = groups.iter().fold(0.0f64, |m, g| {
        let z = normal_quantile(1e-6f64.powf(1.0 / g.ranks.max(1.0)));
        m.max(g.mean + deviation(g) * to_skewed(z, g.skew).max(-5.0))
    });
    let hi = groups.iter().fold(0.0f64, |m, g| {
        let reach = (2.0 * (1.0 + g.ranks).ln()).sqrt() + 3.0;
        m.max(g.mean + deviation(g) * to_skewed(reach, g.skew).max(reach))
    });
    let step = (hi - lo) / POINTS as f64;
    let below = |x: f64| -> f64 {
        let one = |g: &RankGroup| {
            let d = deviation(g).max(1e-6 * hi);
            probability_power(normal_cdf(from_skewed((x - g.mean) / d, g.skew)), g.ranks)
        };
        groups.iter().map(one).product()
    };
    let inner: f64 = (1..POINTS).map(|i| below(lo + step * i as f64)).sum();
    hi - step * (inner + 0.5 * (below(lo) + below(hi)))
}

/// Converts a normal deviate to a deviate of mean 0, variance 1 and this skewness: a gamma
/// distribution as the cube of a normal one (Wilson and Hilferty).
pub(super) fn to_skewed(z: f64, skew: f64) -> f64 {
    if skew < 1e-3 {
        return z;
    }
    let root = 1.0 - skew * skew / 36.0 + z * skew / 6.0;
    (root.max(0.0).powi(3) - 1.0) * 2.0 / skew
}

/// Returns the standard normal value that [`to_skewed`] maps to `y`.
fn from_skewed(y: f64, skew: f64) -> f64 {
    if skew < 1e-3 {
        return y;
    }
    let root = (1.0 + y * skew / 2.0).max(0.0).cbrt();
    (root - 1.0 + skew * skew / 36.0) * 6.0 / skew
}

/// Returns the probability that a normal deviate is below `z`; error below 1e-7 (Abramowitz and
/// Stegun 26.2.17).
pub(super) fn normal_cdf(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let above = normal_density(z) * series;
    if z < 0.0 { above } else { 1.0 - above }
}

/// Returns the quantile of the normal distribution; error below 5e-4 (Abramowitz and Stegun
/// 26.2.23).
fn normal_quantile(chance: f64) -> f64 {
    let tail = chance.min(1.0 - chance).max(1e-300);
    let t = (-2.0 * tail.ln()).sqrt();
    let z = t
        - (2.515_517 + t * (0.802_853 + t * 0.010_328))
            / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308)));
    if chance < 0.5 { -z } else { z }
}

fn normal_density(z: f64) -> f64 {
    0.398_942_280_401_432_7 * (-0.5 * z * z).exp()
}

fn probability_power(chance: f64, times: f64) -> f64 {
    match times {
        1.0 => chance,
        _ if chance <= 0.0 => 0.0,
        _ if chance >= 1.0 => 1.0,
        _ => (chance.ln() * times).exp(),
    }
}

/// Returns the mean and variance of rows of this mean and variance after clipping at `capacity`.
pub(super) fn clipped_moments(mean: f64, variance: f64, capacity: f64) -> (f64, f64) {
    let deviation = variance.max(0.0).sqrt();
    if deviation < 1e-9 || capacity > mean + 8.0 * deviation + 8.0 {
        return (mean.min(capacity), if mean > capacity { 0.0 } else { variance });
    }
    // First and second moment of the unused capacity.
    let (free, square) = if mean <= MAX_COUNTED_MEAN * 2.0 {
        counted_headroom(mean, variance, capacity)
    } else {
        let d = (capacity - mean) / deviation;
        let (below, at) = (normal_cdf(d), normal_density(d));
        (deviation * (d * below + at), variance * ((1.0 + d * d) * below + d * at))
    };
    ((capacity - free).min(mean), (square - free * free).max(0.0))
}

fn counted_headroom(mean: f64, variance: f64, capacity: f64) -> (f64, f64) {
    let a = 1.0 - mean / variance;
    let b = mean * (1.0 - a) - a;
    let ln = if a.abs() < 1e-9 { -mean } else { mean * (1.0 - a) * (1.0 - a).ln() / a };
    let (mut chance, mut j, mut free, mut square) = (ln.exp(), 0.0, 0.0, 0.0);
    while j < capacity {
        let y = capacity - j;
        free += chance * y;
        square += chance * y * y;
        j += 1.0;
        chance *= (a + b / j).max(0.0);
    }
    (free, square)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_two_and_of_many() {
        // E max of two independent N(0, 1) is 1/sqrt(pi); of 100, 2.50759 (tables of order
        // statistics).
        for (ranks, want) in [(2.0, 0.564_19), (8.0, 1.423_60), (100.0, 2.507_59)] {
            let got = expected_max(&[RankGroup { ranks, mean: 1000.0, variance: 100.0, skew: 0.0 }]);
            assert!(((got - 1000.0) / 10.0 - want).abs() < 2e-3, "{ranks}: {got}");
        }
        // 32 independent Poisson counts of mean 1/4, by their distribution function.
        let below = [0.778_801f64, 0.973_501, 0.997_839, 0.999_867, 0.999_993];
        let want: f64 = below.iter().map(|f| 1.0 - f.powi(32)).sum();
        let got = expected_max(&[RankGroup { ranks: 32.0, mean: 0.25, variance: 0.25, skew: 2.0 }]);
        assert!((got - want).abs() < 1e-3, "{got} {want}");
        // Both methods agree at the threshold between them.
        let at = |mean: f64| {
            expected_max(&[RankGroup { ranks: 16.0, mean, variance: mean, skew: mean.powf(-0.5) }])
        };
        let (below, above) =
            (at(MAX_COUNTED_MEAN) / MAX_COUNTED_MEAN, at(MAX_COUNTED_MEAN + 1e-9) / MAX_COUNTED_MEAN);
        assert!((below / above - 1.0).abs() < 0.01, "{below} {above}");
    }

    #[test]
    fn skew_round_trips() {
        for z in [-1.0, 0.0, 0.5, 3.0] {
            assert!((from_skewed(to_skewed(z, 0.8), 0.8) - z).abs() < 1e-9);
        }
    }

    #[test]
    fn clipping_removes_the_tail() {
        // Poisson of mean 4 clipped at 5, by its probabilities.
        let mut p = (-4.0f64).exp();
        let (mut mean, mut square, mut rest) = (0.0, 0.0, 1.0);
        for j in 0..5 {
            mean += p * f64::from(j);
            square += p * f64::from(j * j);
            rest -= p;
            p *= 4.0 / f64::from(j + 1);
        }
        let (mean, square) = (mean + 5.0 * rest, square + 25.0 * rest);
        let (got, variance) = clipped_moments(4.0, 4.0, 5.0);
        assert!((got - mean).abs() < 1e-9 && (variance - (square - mean * mean)).abs() < 1e-9);
        // A normal distribution clipped at its mean loses sigma / sqrt(2 pi).
        let (got, _) = clipped_moments(400.0, 400.0, 400.0);
        assert!((400.0 - got - 20.0 * 0.398_942).abs() < 1e-3);
    }
}
