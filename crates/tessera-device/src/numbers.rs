//! Numbers in narrower dtypes, bit by bit: to the nearest, ties to even. What a device holds after a conversion, and
//! what others compare it with.

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
        assert_eq!([1.0, 1.00390625, 1.01171875, -2.5].map(to), [1.0, 1.0, 1.015625, -2.5]);
        assert_eq!([f32::MAX, f32::INFINITY, 1e-45, -0.0].map(bf16), [0x7f80, 0x7f80, 0, 0x8000]);
        assert!(to(f32::from_bits(0x7f80_0001)).is_nan());
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
