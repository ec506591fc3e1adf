//! Element types of weight files under their safetensors names: the readable ones, and the sizes of
//! all types that the format defines.

use std::fmt;

/// A readable element type. Elements are always little-endian on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FileDtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// 8 bits with 4 of exponent and 3 of mantissa, without infinities. Its values mean nothing without
    /// the scales beside them.
    E4m3,
}

impl FileDtype {
    /// Every element type that can be read from a file.
    const ALL: [FileDtype; 4] = [FileDtype::F32, FileDtype::F16, FileDtype::Bf16, FileDtype::E4m3];

    /// Returns the type with this safetensors name if it is readable.
    pub(crate) fn from_name(name: &str) -> Option<FileDtype> {
        FileDtype::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Returns the safetensors name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FileDtype::F32 => "F32",
            FileDtype::F16 => "F16",
            FileDtype::Bf16 => "BF16",
            FileDtype::E4m3 => "F8_E4M3",
        }
    }

    /// Returns the size of one element in bytes.
    pub(crate) fn byte_size(self) -> u64 {
        match self {
            FileDtype::F32 => 4,
            FileDtype::F16 | FileDtype::Bf16 => 2,
            FileDtype::E4m3 => 1,
        }
    }

    /// Returns the index and the value of the first element of `raw` that is NaN or infinite.
    pub(crate) fn find_nonfinite(self, raw: &[u8]) -> Option<(usize, f32)> {
        const PART_ELEMENTS: usize = 4096;
        let mut values = Vec::with_capacity(PART_ELEMENTS);
        raw.chunks(PART_ELEMENTS * self.byte_size() as usize).enumerate().find_map(|(part, bytes)| {
            values.clear();
            self.widen_to_f32(bytes, &mut values);
            let at = values.iter().position(|x| !x.is_finite())?;
            Some((part * PART_ELEMENTS + at, values[at]))
        })
    }

    /// Appends the elements of `raw` to `out`. Every value is exact, including NaN payloads of bf16
    /// and f32.
    pub(crate) fn widen_to_f32(self, raw: &[u8], out: &mut Vec<f32>) {
        match self {
            FileDtype::F32 => out.extend(raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
            FileDtype::F16 => {
                out.extend(raw.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()));
            }
            FileDtype::Bf16 => out.extend(
                raw.as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)),
            ),
            FileDtype::E4m3 => out.extend(raw.iter().map(|b| e4m3_to_f32(*b))),
        }
    }
}

/// Returns the value of an e4m3 number: bias 7, subnormals, and NaN where all other bits are set.
fn e4m3_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = ((byte >> 3) & 15, f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(i32::from(exponent) - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

impl fmt::Display for FileDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Returns the size in bits of one element of any type that the format defines, readable or not.
pub(crate) fn bit_size(name: &str) -> Option<u64> {
    Some(match name {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_number_lies_between_its_neighbours() {
        let mut values = Vec::new();
        FileDtype::E4m3.widen_to_f32(&(0..=255).collect::<Vec<u8>>(), &mut values);
        // The published extremes of the type: least subnormal, least normal, greatest.
        assert_eq!((values[1], values[8], values[0x7e]), (2f32.powi(-9), 2f32.powi(-6), 448.0));
        assert!(values[..0x7f].windows(2).all(|w| w[0] < w[1]));
        assert!(values[0x7f].is_nan() && values[0xff].is_nan());
        assert!((0..0x7f).all(|i| values[i + 128] == -values[i]));
        assert_eq!((values[0x38], values[0x80].to_bits()), (1.0, (-0f32).to_bits()));
        assert_eq!(FileDtype::E4m3.find_nonfinite(&[0, 0x7f]).map(|(at, _)| at), Some(1));
    }

    #[test]
    fn every_half_widens_exactly() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (mut f16, mut bf16) = (Vec::new(), Vec::new());
        FileDtype::F16.widen_to_f32(&all, &mut f16);
        FileDtype::Bf16.widen_to_f32(&all, &mut bf16);
        for bits in 0..=u16::MAX {
            let (h, b) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
            let (x, y) = (f16[usize::from(bits)], bf16[usize::from(bits)]);
            assert_eq!(h.is_nan(), x.is_nan());
            assert!(h.is_nan() || (half::f16::from_f32(x).to_bits() == bits && f64::from(x) == h.to_f64()));
            assert_eq!(y.to_bits(), u32::from(bits) << 16);
            assert!(b.is_nan() || y == b.to_f32());
        }
        assert_eq!((f16[0x3c00], bf16[0x3f80], f16[0x0001]), (1.0, 1.0, 2f32.powi(-24)));
    }
}
