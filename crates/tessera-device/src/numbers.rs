//! Numbers in narrower dtypes, bit by bit: to the nearest, ties to even. What a device holds after a conversion, and
//! what others compare it with. Scales of rows in e4m3, so that all who load a weight have the same.

/// Bits of the nearest bf16.
#[must_use]
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        // Rounding could carry a NaN into infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Bits of the nearest binary16; beyond 65504 infinity.
#[must_use]
pub fn f16(x: f32) -> u16 {
    const F16: Narrow = Narrow { mantissa: 10, least: -14 };
    let sign = ((x.to_bits() >> 31) as u16) << 15;
    if x.is_nan() {
        return sign | 0x7e00;
    }
    sign | F16.bits(x).min(0x7c00) as u16
}

/// Bits of the nearest e4m3 of at most ±448; a NaN stays one.
#[must_use]
pub fn e4m3(x: f32) -> u8 {
    const E4M3: Narrow = Narrow { mantissa: 3, least: -6 };
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    if x.is_nan() {
        return sign | 0x7f;
    }
    sign | E4M3.bits(x).min(0x7e) as u8
}

/// Largest number of e4m3.
pub const E4M3_MAX: f32 = 448.0;

/// The scale of a row in e4m3: its largest absolute value over [`E4M3_MAX`], 1 where all are 0.
#[must_use]
pub fn scale_of(row: &[f32]) -> f32 {
    match row.iter().fold(0.0f32, |most, x| most.max(x.abs())) {
        0.0 => 1.0,
        most => most / E4M3_MAX,
    }
}

/// What `load = "e4m3"` gives of whole rows of `width` numbers, before they are rounded to e4m3: each over its row's scale.
pub fn over_scales(rows: &mut [f32], width: usize) {
    for row in rows.chunks_mut(width.max(1)) {
        let scale = scale_of(row);
        row.iter_mut().for_each(|x| *x /= scale);
    }
}

/// What `load = "e4m3.scale"` gives of whole rows of `width` numbers.
#[must_use]
pub fn scales_of(rows: &[f32], width: usize) -> Vec<f32> {
    rows.chunks(width.max(1)).map(scale_of).collect()
}

/// A format of an implicit leading digit and gradual underflow.
struct Narrow {
    /// Digits behind the leading one.
    mantissa: i32,
    /// Exponent of the smallest normal number.
    least: i32,
}

impl Narrow {
    /// Bits without sign of the number nearest to |x|, exponents going on without an end.
    fn bits(&self, x: f32) -> u32 {
        let a = f64::from(x.abs());
        if a == 0.0 {
            return 0;
        }
        let exponent = (((a.to_bits() >> 52) as i32) - 1023).max(self.least);
        // In steps between neighbours: a power of two, so exact. What rounds up to the next exponent carries into its bits.
        let steps = (a * f64::powi(2.0, self.mantissa - exponent)).round_ties_even() as u32;
        (((exponent - self.least) as u32) << self.mantissa).saturating_add(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_go_to_the_even_neighbour() {
        let to = |x: f32| f32::from_bits(u32::from(bf16(x)) << 16);
        assert_eq!([1.0, 1.003_906_3, 1.011_718_8, -2.5].map(to), [1.0, 1.0, 1.015625, -2.5]);
        assert_eq!([f32::MAX, f32::INFINITY, 1e-45, -0.0].map(bf16), [0x7f80, 0x7f80, 0, 0x8000]);
        assert!(to(f32::from_bits(0x7f80_0001)).is_nan());
    }

    #[test]
    fn e4m3_ends_at_448() {
        let known = [
            (0.0, 0),
            (-0.0, 0x80),
            (1.0, 0x38),
            (-1.125, 0xb9),
            (448.0, 0x7e),
            (463.9, 0x7e),
            (1e30, 0x7e),
            (f32::NEG_INFINITY, 0xfe),
            (0.015_625, 0x08),
            (0.001_953_125, 0x01),
            (0.000_976_562_5, 0),
            (0.002_929_687_5, 2),
            (17.0, 0x58),
            (19.0, 0x5a),
        ];
        for (x, bits) in known {
            assert_eq!(e4m3(x), bits, "{x:e}");
        }
        assert_eq!(e4m3(f32::NAN) & 0x7f, 0x7f);
    }

    #[test]
    fn the_largest_of_a_row_becomes_the_largest_number() {
        let mut rows = [0.5, -3.5, 1.75, 0.0, 0.0, 0.0, 1.0, -2.0, 0.25];
        let scales = scales_of(&rows, 3);
        assert_eq!(scales, [3.5 / 448.0, 1.0, 2.0 / 448.0]);
        over_scales(&mut rows, 3);
        // The quotient may fall short of 448 by a digit of f32; what it is rounded to does not.
        let exact = [64.0, -448.0, 224.0, 0.0, 0.0, 0.0, 224.0, -448.0, 56.0];
        assert_eq!(rows.map(e4m3), exact.map(e4m3), "{rows:?}");
    }

    #[test]
    fn f16_is_the_format_of_ieee() {
        let known = [
            (0.0, 0),
            (-0.0, 0x8000),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65504.0, 0x7bff),
            (65519.0, 0x7bff),
            (65520.0, 0x7c00),
            (f32::INFINITY, 0x7c00),
            (6.103_515_6e-5, 0x0400),
            (5.960_464_5e-8, 0x0001),
            (2.980_232_2e-8, 0),
            (2.980_232_6e-8, 1),
            (0.333_251_95, 0x3555),
            (2049.0, 0x6800),
            (2051.0, 0x6802),
        ];
        for (x, bits) in known {
            assert_eq!(f16(x), bits, "{x:e}");
        }
    }
}
