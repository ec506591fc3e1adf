//! Elementary functions in straight-line f32 arithmetic, so that loops over them vectorise and
//! every machine gives the same bits. The platform's `expf` and `tanhf` do neither.

/// Returns eˣ within 2 ulp for normal results. The result is 0 below −87.336 and stays at 2.4e38
/// above 88.376; NaN propagates.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOW: f32 = -87.336;
    const HIGH: f32 = 88.376;
    // Adding 1.5·2²³ rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let c = if x < LOW { LOW } else { x };
    let c = if c > HIGH { HIGH } else { c };
    let t = c.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    // ln 2 is split into two parts: the first has few bits, so n times it is exact.
    let r = n.mul_add(-0.693_359_4, c);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let y = p.mul_add(r * r, r) + 1.0;
    let scale = f32::from_bits(t.to_bits().wrapping_add(127) << 23);
    if x < LOW { 0.0 } else { y * scale }
}

/// Returns x · sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Returns x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), by 1 + tanh(u) = 2 sigmoid(2u).
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_PI: f32 = 1.595_769_2;
    let u = TWO_SQRT_2_PI * (0.044_715 * x * x).mul_add(x, x);
    x / (1.0 + exp(-u))
}

/// Returns the larger of x and 0; NaN stays NaN.
#[inline(always)]
pub fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// Returns limit · tanh(x / limit), by tanh(u) = 1 − 2 / (e²ᵘ + 1). That difference would lose the digits of a
/// small u, of which the Taylor series has all. No library function: its last bit would differ between hosts.
#[inline(always)]
pub fn soft_clamp(x: f32, limit: f32) -> f32 {
    const SERIES_BELOW: f32 = 0.25 * 0.25;
    let u = x / limit;
    let s = u * u;
    let p = s.mul_add(62.0 / 2835.0, -17.0 / 315.0);
    let p = s.mul_add(p, 2.0 / 15.0);
    let p = s.mul_add(p, -1.0 / 3.0);
    let series = (s * p).mul_add(u, u);
    let whole = 1.0 - 2.0 / (exp(2.0 * u) + 1.0);
    limit * if s < SERIES_BELOW { series } else { whole }
}

/// Sums `f(x)` over a row: 32 running sums, element i in sum i mod 32, then a binary tree.
#[inline(always)]
pub(crate) fn sum_lanes(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 32];
    let (whole, rest) = x.as_chunks::<32>();
    for c in whole {
        for l in 0..32 {
            lanes[l] += f(c[l]);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(rest) {
        *lane += f(*v);
    }
    let mut half = 16;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let w = want as f32;
        let ulp = f64::from(f32::from_bits(w.abs().to_bits() + 1)) - f64::from(w.abs());
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.3 + i as f32 * (175.6 / 2_000_000.0);
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
        }
        assert!(worst <= 2.0, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e4), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(1e4).is_finite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn a_soft_clamp_agrees_with_double_precision() {
        let mut worst = 0.0f64;
        for i in -200_000..=200_000 {
            let x = i as f32 * 1e-4;
            worst = worst.max(ulps(soft_clamp(x, 3.0), 3.0 * (f64::from(x) / 3.0).tanh()));
        }
        assert!(worst <= 8.0, "{worst}");
        assert_eq!([-1e6, 0.0, 1e6].map(|x| soft_clamp(x, 3.0)), [-3.0, 0.0, 3.0]);
        assert!(soft_clamp(f32::NAN, 3.0).is_nan());
    }

    #[test]
    fn activations_agree_with_double_precision() {
        for i in -40_000..40_000 {
            let x = i as f32 * 5e-4;
            let d = f64::from(x);
            let s = d / (1.0 + (-d).exp());
            assert!((f64::from(silu(x)) - s).abs() <= 4e-7 * s.abs().max(1e-30), "{x}");
            let g =
                0.5 * d * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (d + 0.044_715 * d * d * d)).tanh());
            // Deep in the tail, tanh itself cancels; there only the absolute value matters.
            assert!((f64::from(gelu_tanh(x)) - g).abs() <= 1e-6 * g.abs() + 1e-7, "{x}");
        }
        for x in [-1e30f32, -1e4, 1e4, 1e30] {
            assert!(silu(x).is_finite() && gelu_tanh(x.clamp(-1e12, 1e12)).is_finite());
        }
    }
}
