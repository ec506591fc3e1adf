//! Fits curves to measurements by least squares of the logarithm, so that a relative error of 10 %
//! weighs the same for short and long times. This file reads no clock and no file.

/// A fitted curve and its errors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fitted<const N: usize> {
    /// Fitted parameters, all positive, in the order of the start values.
    pub params: [f64; N],
    /// Number of measured values to which the curve was fitted.
    pub point_count: usize,
    /// Mean of |curve / measured − 1|.
    pub mean_error: f64,
    /// Maximum of |curve / measured − 1|.
    pub max_error: f64,
}

/// Maximum number of iterations.
const MAX_ROUNDS: usize = 200;
/// Finite-difference step for slopes, in the logarithm of a parameter.
const SLOPE_STEP: f64 = 1e-4;
/// Maximum change of a parameter per iteration, in its logarithm.
const MAX_STEP: f64 = 1.0;

/// Fits the parameters of `curve`, all positive, to the measured values, starting from `start`,
/// with the Levenberg–Marquardt method on the logarithms of parameters and values. `curve` returns
/// one value per measured value.
pub fn fit_curve<const N: usize>(
    start: [f64; N],
    measured: &[f64],
    curve: impl Fn(&[f64; N]) -> Vec<f64>,
) -> Fitted<N> {
    let exp = |x: &[f64; N]| x.map(f64::exp);
    let residuals = |x: &[f64; N]| -> Vec<f64> {
        let predicted = curve(&exp(x));
        predicted.iter().zip(measured).map(|(c, m)| (c / m).max(f64::MIN_POSITIVE).ln()).collect()
    };
    let square = |r: &[f64]| r.iter().map(|x| x * x).sum::<f64>();
    let mut x = start.map(|v| v.max(f64::MIN_POSITIVE).ln());
    let mut r = residuals(&x);
    let mut damping = 1e-2;
    for _ in 0..MAX_ROUNDS {
        let slopes: Vec<Vec<f64>> = (0..N)
            .map(|p| {
                let mut moved = x;
                moved[p] += SLOPE_STEP;
                residuals(&moved).iter().zip(&r).map(|(a, b)| (a - b) / SLOPE_STEP).collect()
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
            let step = solve_linear(matrix, std::array::from_fn(|i| -dot(&slopes[i], &r)));
            let next: [f64; N] = std::array::from_fn(|i| x[i] + step[i].clamp(-MAX_STEP, MAX_STEP));
            let next_residuals = residuals(&next);
            if square(&next_residuals) < square(&r) {
                better = square(&r) - square(&next_residuals) > 1e-12 * square(&r);
                (x, r) = (next, next_residuals);
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
        params: exp(&x),
        point_count: measured.len(),
        mean_error: off.iter().sum::<f64>() / off.len().max(1) as f64,
        max_error: off.iter().copied().fold(0.0, f64::max),
    }
}

/// Solves a small linear system by elimination; a row without a pivot yields 0.
fn solve_linear<const N: usize>(mut a: [[f64; N]; N], mut b: [f64; N]) -> [f64; N] {
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
    fn noiseless_curve_is_recovered() {
        let xs = [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0];
        let curve = |p: &[f64; 3]| xs.iter().map(|x| p[0] + x * (x + p[2]) / x * p[1]).collect::<Vec<f64>>();
        let truth = [250.0, 3.0, 40.0];
        let found = fit_curve([1.0, 1.0, 1.0], &curve(&truth), curve);
        for (f, t) in found.params.iter().zip(truth) {
            assert!((f / t - 1.0).abs() < 0.02 || found.max_error < 1e-4, "{found:?}");
        }
        assert_eq!(found.point_count, 7);
    }

    #[test]
    fn undetermined_parameters_do_not_prevent_a_fit() {
        // Two parameters that only occur multiplied with each other.
        let xs = [1.0, 10.0, 100.0];
        let curve = |p: &[f64; 2]| xs.iter().map(|x| p[0] * p[1] * x).collect::<Vec<f64>>();
        let found = fit_curve([1.0, 1.0], &[6.0, 60.0, 600.0], curve);
        assert!(
            (found.params[0] * found.params[1] - 6.0).abs() < 1e-3 && found.max_error < 1e-3,
            "{found:?}"
        );
    }

    #[test]
    fn errors_are_relative_to_the_measurement() {
        // One constant through 1 and 4: in logarithms the middle is 2.
        let found = fit_curve([1.0], &[1.0, 4.0], |p| vec![p[0]; 2]);
        assert!((found.params[0] - 2.0).abs() < 1e-3, "{found:?}");
        assert!((found.max_error - 1.0).abs() < 1e-2 && (found.mean_error - 0.75).abs() < 1e-2, "{found:?}");
    }
}
