//! Curves through what was measured: least squares of the logarithm, so that a small time that is off by a tenth
//! weighs as much as a large one. No clock, no file.

/// What was measured, and what a curve says of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fitted<const N: usize> {
    /// The curve's parameters.
    pub at: [f64; N],
    /// Points that it went through.
    pub points: usize,
    /// Mean of |curve / measured − 1|.
    pub mean: f64,
    /// Largest of them.
    pub worst: f64,
}

/// Rounds of improvement at most.
const ROUNDS: usize = 200;
/// Step by which a slope is felt, in the logarithm of a parameter.
const FEEL: f64 = 1e-4;
/// Furthest that one round moves a parameter, in its logarithm.
const STRIDE: f64 = 1.0;

/// Parameters, all above 0, for which `curve` is nearest to the measured values, from `start` on: Levenberg and
/// Marquardt's method in the logarithms of parameters and values. `curve` gives one value per measured one.
pub fn fit<const N: usize>(
    start: [f64; N],
    measured: &[f64],
    curve: impl Fn(&[f64; N]) -> Vec<f64>,
) -> Fitted<N> {
    let exp = |x: &[f64; N]| x.map(f64::exp);
    let rest = |x: &[f64; N]| -> Vec<f64> {
        let said = curve(&exp(x));
        said.iter().zip(measured).map(|(c, m)| (c / m).max(f64::MIN_POSITIVE).ln()).collect()
    };
    let square = |r: &[f64]| r.iter().map(|x| x * x).sum::<f64>();
    let mut x = start.map(|v| v.max(f64::MIN_POSITIVE).ln());
    let mut r = rest(&x);
    let mut damping = 1e-2;
    for _ in 0..ROUNDS {
        let slopes: Vec<Vec<f64>> = (0..N)
            .map(|p| {
                let mut moved = x;
                moved[p] += FEEL;
                rest(&moved).iter().zip(&r).map(|(a, b)| (a - b) / FEEL).collect()
            })
            .collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut better = false;
        while damping < 1e9 {
            let matrix: [[f64; N]; N] = std::array::from_fn(|i| {
                std::array::from_fn(|j| {
                    let own = if i == j { damping * (dot(&slopes[i], &slopes[i]) + 1e-9) } else { 0.0 };
                    dot(&slopes[i], &slopes[j]) + own
                })
            });
            let step = solve(matrix, std::array::from_fn(|i| -dot(&slopes[i], &r)));
            let next: [f64; N] = std::array::from_fn(|i| x[i] + step[i].clamp(-STRIDE, STRIDE));
            let there = rest(&next);
            if square(&there) < square(&r) {
                better = square(&r) - square(&there) > 1e-12 * square(&r);
                (x, r) = (next, there);
                damping = (damping / 4.0).max(1e-9);
                break;
            }
            damping *= 4.0;
        }
        if !better {
            break;
        }
    }
    let off: Vec<f64> = r.iter().map(|r| (r.exp() - 1.0).abs()).collect();
    Fitted {
        at: exp(&x),
        points: measured.len(),
        mean: off.iter().sum::<f64>() / off.len().max(1) as f64,
        worst: off.iter().copied().fold(0.0, f64::max),
    }
}

/// Solves a small system by elimination; a row without a pivot moves nothing.
fn solve<const N: usize>(mut a: [[f64; N]; N], mut b: [f64; N]) -> [f64; N] {
    for i in 0..N {
        let pivot = (i..N).max_by(|p, q| a[*p][i].abs().total_cmp(&a[*q][i].abs())).unwrap_or(i);
        a.swap(i, pivot);
        b.swap(i, pivot);
        if a[i][i].abs() < f64::MIN_POSITIVE {
            continue;
        }
        for j in i + 1..N {
            let by = a[j][i] / a[i][i];
            let above = a[i];
            for (x, above) in a[j].iter_mut().zip(above) {
                *x -= by * above;
            }
            b[j] -= by * b[i];
        }
    }
    let mut x = [0.0; N];
    for i in (0..N).rev() {
        let rest: f64 = (i + 1..N).map(|j| a[i][j] * x[j]).sum();
        x[i] = if a[i][i].abs() < f64::MIN_POSITIVE { 0.0 } else { (b[i] - rest) / a[i][i] };
    }
    x
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_without_noise_is_found_again() {
        let xs = [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0];
        let curve = |p: &[f64; 3]| xs.iter().map(|x| p[0] + x * (x + p[2]) / x * p[1]).collect::<Vec<f64>>();
        let truth = [250.0, 3.0, 40.0];
        let found = fit([1.0, 1.0, 1.0], &curve(&truth), curve);
        for (f, t) in found.at.iter().zip(truth) {
            assert!((f / t - 1.0).abs() < 0.02 || found.worst < 1e-4, "{found:?}");
        }
        assert_eq!(found.points, 7);
    }

    #[test]
    fn what_the_points_do_not_tell_does_not_stop_the_rest() {
        // Two parameters that only ever appear as a product.
        let xs = [1.0, 10.0, 100.0];
        let curve = |p: &[f64; 2]| xs.iter().map(|x| p[0] * p[1] * x).collect::<Vec<f64>>();
        let found = fit([1.0, 1.0], &[6.0, 60.0, 600.0], curve);
        assert!((found.at[0] * found.at[1] - 6.0).abs() < 1e-3 && found.worst < 1e-3, "{found:?}");
    }

    #[test]
    fn errors_are_shares_of_what_was_measured() {
        // One constant through 1 and 4: in logarithms the middle is 2.
        let found = fit([1.0], &[1.0, 4.0], |p| vec![p[0]; 2]);
        assert!((found.at[0] - 2.0).abs() < 1e-3, "{found:?}");
        assert!((found.worst - 1.0).abs() < 1e-2 && (found.mean - 0.75).abs() < 1e-2, "{found:?}");
    }
}
