//! Rounds numbers to a narrower dtype: to nearest, ties to even, or stochastically.

use tessera_ir::DType;

/// The finite numbers of a floating-point dtype, as a subset of f64.
#[derive(Debug, Clone, Copy)]
pub struct Rounding {
    /// Bits of a normal number's significand, including the leading one.
    digits: i32,
    /// Exponent of the smallest normal number; subnormal numbers have the spacing of that exponent.
    min_exponent: i32,
    /// Largest finite number of the dtype; larger ones saturate or become infinity.
    max_value: f64,
    /// Whether larger numbers saturate; otherwise they become infinity.
    saturates: bool,
}

/// Returns the rounding to a dtype, or `None` for a dtype without floating-point numbers.
#[must_use]
pub fn rounding_to(to: DType) -> Option<Rounding> {
    let of = |digits, least, most, saturates| {
        Some(Rounding { digits, min_exponent: least, max_value: most, saturates })
    };
    match to {
        DType::F32 => of(24, -126, f64::from(f32::MAX), false),
        DType::F64 => of(53, -1022, f64::MAX, false),
        DType::Bf16 => of(8, -126, 255.0 * power_of_two(120), false),
        DType::F16 => of(11, -14, 65504.0, false),
        DType::E4m3 => of(4, -6, 448.0, true),
        DType::I64 | DType::Ticket | DType::Event => None,
    }
}

impl Rounding {
    /// Rounds to the nearest number of the dtype, ties to even; a number that is too large
    /// saturates or becomes infinity.
    #[must_use]
    pub fn round_nearest(&self, x: f64) -> f64 {
        if self.digits == 53 || x == 0.0 || !x.is_finite() {
            return if x.is_infinite() && self.saturates { self.max_value.copysign(x) } else { x };
        }
        let step = self.spacing_at(x);
        // Division and multiplication by a power of two are exact.
        let y = (x / step).round_ties_even() * step;
        match y.abs() > self.max_value {
            false => y,
            true if self.saturates => self.max_value.copysign(x),
            true => f64::INFINITY.copysign(x),
        }
    }

    /// Rounds to one of the two neighbours of a number: at the fraction f of their distance from the one nearer to 0, to the
    /// farther one if the word is below ⌊f · 2³²⌋. A number beyond the largest one of the dtype is rounded to nearest.
    #[must_use]
    pub fn round_by_word(&self, x: f64, word: u32) -> f64 {
        if x == 0.0 || x.abs() > self.max_value || x.is_nan() {
            return self.round_nearest(x);
        }
        let step = self.spacing_at(x);
        let steps = x.abs() / step;
        let threshold = (steps.fract() * 4_294_967_296.0).floor();
        let up = if f64::from(word) < threshold { 1.0 } else { 0.0 };
        ((steps.floor() + up) * step).copysign(x)
    }

    /// Returns the distance of the two neighbours of a number that is neither 0 nor infinite.
    fn spacing_at(&self, x: f64) -> f64 {
        let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
        power_of_two(exponent.max(self.min_exponent) - (self.digits - 1))
    }
}

/// Returns 2 to the power of a normal number's exponent.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(d: DType, x: f64) -> f64 {
        rounding_to(d).unwrap().round_nearest(x)
    }

    #[test]
    fn f32_rounds_like_the_processor() {
        let mut bits = 0x9e37_79b9_7f4a_7c15u64;
        let edges = [1e-45, 0.7e-45, 3.4028235677973366e38, 3.4028236e38, 1.0 + 1.0 / 16_777_216.0];
        let drawn = (0..20_000).map(|_| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Exponents around the range of f32, including subnormals and overflow.
            f64::from_bits((bits & 0x800f_ffff_ffff_ffff) | ((1023 - 155 + (bits >> 54) % 290) << 52))
        });
        for x in edges.into_iter().chain(drawn) {
            assert_eq!(to(DType::F32, x), f64::from(x as f32), "{x:e}");
        }
    }

    #[test]
    fn bf16_is_the_upper_half_of_f32() {
        for i in 0..20_000u32 {
            let x = f32::from_bits(i.wrapping_mul(214_013) ^ 0x3f80_0000);
            if !x.is_finite() {
                continue;
            }
            let bits = x.to_bits();
            let up = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
            assert_eq!(to(DType::Bf16, f64::from(x)), f64::from(f32::from_bits(up)), "{x:e}");
        }
        assert_eq!([1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].map(|x| to(DType::Bf16, x)), [1.0, 1.015625]);
    }

    #[test]
    fn a_word_decides_between_the_two_neighbours() {
        let by = |d: DType, x: f64, word: u32| rounding_to(d).unwrap().round_by_word(x, word);
        // 1.0 and 1.125 are neighbours in e4m3; 1.03125 lies at a quarter of their distance.
        let quarter = 1 << 30;
        assert_eq!([quarter - 1, quarter].map(|w| by(DType::E4m3, 1.031_25, w)), [1.125, 1.0]);
        assert_eq!([quarter - 1, quarter].map(|w| by(DType::E4m3, -1.031_25, w)), [-1.125, -1.0]);
        assert_eq!([0, u32::MAX].map(|w| by(DType::E4m3, 1.125, w)), [1.125, 1.125]);
        // Below 2^-6 the spacing is 2^-9, down to 0; the last step below 448 leads to it.
        assert_eq!([0, u32::MAX].map(|w| by(DType::E4m3, 0.001, w)), [0.001_953_125, 0.0]);
        assert_eq!([0, u32::MAX].map(|w| by(DType::E4m3, 447.0, w)), [448.0, 416.0]);
        assert_eq!([450.0, 1e9, -1e9].map(|x| by(DType::E4m3, x, 0)), [448.0, 448.0, -448.0]);
        let largest = f64::from(f32::from_bits(0x7f7f_0000));
        assert_eq!(by(DType::Bf16, largest * (1.0 + 1.0 / 4096.0), 0), largest);
        assert_eq!(by(DType::Bf16, f64::from(f32::MAX), 0), f64::INFINITY);
    }

    #[test]
    fn narrow_dtypes_overflow_and_saturate() {
        assert_eq!([65519.9, 65520.0].map(|x| to(DType::F16, x)), [65504.0, f64::INFINITY]);
        assert_eq!(
            [448.0, 463.0, 465.0, 1e9, -1e9].map(|x| to(DType::E4m3, x)),
            [448.0, 448.0, 448.0, 448.0, -448.0]
        );
        // Ties round to the even neighbour; below 2^-6 the spacing is 2^-9.
        assert_eq!([17.0, 19.0, 0.0029296875].map(|x| to(DType::E4m3, x)), [16.0, 20.0, 0.00390625]);
        assert!(rounding_to(DType::I64).is_none());
    }
}
