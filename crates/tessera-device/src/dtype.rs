//! Conversion to narrower dtypes with defined bits: round to nearest, ties to even. Devices store
//! these values after a conversion, and other components compare against them. The e4m3 row scales
//! are defined here too, so that every loader of a weight computes the same scales.

use tessera_ir::DType;

/// Returns the bits of the nearest bf16.
#[must_use]
pub fn to_bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        // Rounding could carry a NaN into infinity.
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Returns the bits of the nearest binary16. Magnitudes that round beyond 65504 become infinity.
#[must_use]
pub fn to_f16_bits(x: f32) -> u16 {
    const F16: NarrowFormat = NarrowFormat { mantissa_bits: 10, min_exponent: -14 };
    let sign = ((x.to_bits() >> 31) as u16) << 15;
    if x.is_nan() {
        return sign | 0x7e00;
    }
    sign | F16.round_to_bits(x).min(0x7c00) as u16
}

/// Returns the bits of the nearest e4m3 number, saturating at ±448. A NaN stays NaN.
#[must_use]
pub fn to_e4m3_bits(x: f32) -> u8 {
    const E4M3: NarrowFormat = NarrowFormat { mantissa_bits: 3, min_exponent: -6 };
    let sign = ((x.to_bits() >> 31) as u8) << 7;
    if x.is_nan() {
        return sign | 0x7f;
    }
    sign | E4M3.round_to_bits(x).min(0x7e) as u8
}

/// Returns the value of an e4m3 number.
#[must_use]
pub fn from_e4m3_bits(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 0xf), f32::from(bits & 7));
    let size = match exponent {
        15 if bits & 7 == 7 => f32::NAN,
        0 => mantissa / 512.0,
        e => (8.0 + mantissa) * 2.0f32.powi(e - 10),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

/// Largest finite e4m3 number.
pub const E4M3_MAX: f32 = 448.0;

/// Returns the e4m3 scale of a row: its largest absolute value over [`E4M3_MAX`], or 1 if all
/// values are 0.
#[must_use]
pub fn row_scale(row: &[f32]) -> f32 {
    match row.iter().fold(0.0f32, |max, x| max.max(x.abs())) {
        0.0 => 1.0,
        max => max / E4M3_MAX,
    }
}

/// Divides each row of `width` numbers by its scale: the values of `load = "e4m3"` before they are
/// rounded to e4m3.
pub fn divide_by_row_scales(rows: &mut [f32], width: usize) {
    for row in rows.chunks_mut(width.max(1)) {
        let scale = row_scale(row);
        row.iter_mut().for_each(|x| *x /= scale);
    }
}

/// Returns the scale of each row of `width` numbers: the values of `load = "e4m3.scale"`.
#[must_use]
pub fn row_scales(rows: &[f32], width: usize) -> Vec<f32> {
    rows.chunks(width.max(1)).map(row_scale).collect()
}

/// Returns a 32-bit word whose elements of this dtype are all NaN: the content of memory that holds
/// no value. The NaN is signalling where the dtype has signalling NaNs, so no arithmetic returns it.
#[must_use]
pub fn poison_word(dtype: DType) -> u32 {
    match dtype {
        DType::Bf16 => 0x7fa5_7fa5,
        DType::F16 => 0x7ca5_7ca5,
        // e4m3 has one NaN of each sign, and neither is signalling.
        DType::E4m3 => 0x7f7f_7f7f,
        DType::F64 => 0x7ff4_7ff4,
        _ => 0x7fa5_dead,
    }
}

/// A binary floating-point format with an implicit leading digit and gradual underflow.
struct NarrowFormat {
    /// Number of mantissa bits, without the implicit one.
    mantissa_bits: i32,
    /// Exponent of the smallest normal number.
    min_exponent: i32,
}

impl NarrowFormat {
    /// Returns the bits, without the sign, of the number nearest to |x| if exponents were
    /// unbounded.
    fn round_to_bits(&self, x: f32) -> u32 {
        let a = f64::from(x.abs());
        if a == 0.0 {
            return 0;
        }
        let exponent = (((a.to_bits() >> 52) as i32) - 1023).max(self.min_exponent);
        // The spacing of neighbouring numbers is a power of two, so the division is exact. A value
        // that rounds up to the next exponent carries into the exponent bits.
        let steps = (a * f64::powi(2.0, self.mantissa_bits - exponent)).round_ties_even() as u32;
        (((exponent - self.min_exponent) as u32) << self.mantissa_bits).saturating_add(steps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_a_poison_word_is_a_signalling_nan() {
        let f32_word = poison_word(DType::F32);
        assert!(f32::from_bits(f32_word).is_nan() && f32_word & 0x0040_0000 == 0);
        let f64_bits = u64::from(poison_word(DType::F64));
        let f64_bits = f64_bits << 32 | f64_bits;
        assert!(f64::from_bits(f64_bits).is_nan() && f64_bits >> 51 & 1 == 0);
        for (dtype, exponent, quiet) in [(DType::Bf16, 0x7f80, 0x40), (DType::F16, 0x7c00, 0x200)] {
            let word = poison_word(dtype);
            for half in [word & 0xffff, word >> 16] {
                assert!(half & exponent == exponent && half & quiet == 0, "{dtype}: {half:#x}");
                assert!(half & !(exponent | 0x8000) != 0, "{dtype}: {half:#x} is an infinity");
            }
        }
        assert_eq!(poison_word(DType::E4m3).to_le_bytes(), [to_e4m3_bits(f32::NAN); 4]);
    }

    #[test]
    fn bf16_rounds_ties_to_even() {
        let to = |x: f32| f32::from_bits(u32::from(to_bf16_bits(x)) << 16);
        assert_eq!([1.0, 1.003_906_3, 1.011_718_8, -2.5].map(to), [1.0, 1.0, 1.015625, -2.5]);
        assert_eq!([f32::MAX, f32::INFINITY, 1e-45, -0.0].map(to_bf16_bits), [0x7f80, 0x7f80, 0, 0x8000]);
        assert!(to(f32::from_bits(0x7f80_0001)).is_nan());
    }

    #[test]
    fn e4m3_saturates_at_448() {
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
            assert_eq!(to_e4m3_bits(x), bits, "{x:e}");
        }
        assert_eq!(to_e4m3_bits(f32::NAN) & 0x7f, 0x7f);
    }

    #[test]
    fn every_e4m3_number_keeps_its_bits() {
        for bits in (0..=255u8).filter(|b| b & 0x7f != 0x7f) {
            assert_eq!(to_e4m3_bits(from_e4m3_bits(bits)), bits, "{bits:#x}");
        }
        assert!(from_e4m3_bits(0x7f).is_nan() && from_e4m3_bits(0x7e) == E4M3_MAX);
    }

    #[test]
    fn the_row_maximum_maps_to_the_e4m3_maximum() {
        let mut rows = [0.5, -3.5, 1.75, 0.0, 0.0, 0.0, 1.0, -2.0, 0.25];
        let scales = row_scales(&rows, 3);
        assert_eq!(scales, [3.5 / 448.0, 1.0, 2.0 / 448.0]);
        divide_by_row_scales(&mut rows, 3);
        // The quotient may differ from 448 in the last f32 digit, but it rounds to 448.
        let exact = [64.0, -448.0, 224.0, 0.0, 0.0, 0.0, 224.0, -448.0, 56.0];
        assert_eq!(rows.map(to_e4m3_bits), exact.map(to_e4m3_bits), "{rows:?}");
    }

    #[test]
    fn f16_matches_ieee_binary16() {
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
            assert_eq!(to_f16_bits(x), bits, "{x:e}");
        }
    }
}
