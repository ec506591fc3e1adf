//! Bytes as hexadecimal text.

/// Returns two lower-case digits per byte.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_has_two_digits() {
        assert_eq!(to_hex(&[0, 7, 0xab, 0xff]), "0007abff");
    }
}
