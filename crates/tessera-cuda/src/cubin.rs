//! The headers of a cubin, which is an ELF file of 64 bits.

/// Returns whether the image contains everything that its headers name: the tables of segments and
/// sections, and their contents. The driver is given no length and reads as far as the headers say.
pub(crate) fn is_complete_cubin(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF\x02\x01") && check_tables(image).is_some()
}

/// Bytes of an entry in the table of segments and in the table of sections.
const SEGMENT_HEADER_BYTES: u64 = 56;
const SECTION_HEADER_BYTES: u64 = 64;
/// The type of a section without contents in the file.
const SECTION_WITHOUT_CONTENTS: u64 = 8;

/// Returns `None` if a table, a segment or a section exceeds the image.
fn check_tables(image: &[u8]) -> Option<()> {
    let segments = (read_number(image, 0x20, 8)?, read_number(image, 0x36, 2)?, read_number(image, 0x38, 2)?);
    let sections = (read_number(image, 0x28, 8)?, read_number(image, 0x3a, 2)?, read_number(image, 0x3c, 2)?);
    for header in table_entries(image, segments, SEGMENT_HEADER_BYTES)? {
        check_range(image, read_number(image, header + 0x08, 8)?, read_number(image, header + 0x20, 8)?)?;
    }
    for header in table_entries(image, sections, SECTION_HEADER_BYTES)? {
        if read_number(image, header + 0x04, 4)? != SECTION_WITHOUT_CONTENTS {
            check_range(image, read_number(image, header + 0x18, 8)?, read_number(image, header + 0x20, 8)?)?;
        }
    }
    Some(())
}

/// Returns the offsets of a table's entries, of which there may be none.
fn table_entries(
    image: &[u8],
    (offset, entry_bytes, count): (u64, u64, u64),
    expected_bytes: u64,
) -> Option<impl Iterator<Item = u64>> {
    if count > 0 {
        check_range(image, offset, entry_bytes * count)?;
        (entry_bytes == expected_bytes).then_some(())?;
    }
    Some((0..count).map(move |i| offset + i * entry_bytes))
}

fn check_range(image: &[u8], offset: u64, bytes: u64) -> Option<()> {
    (offset.checked_add(bytes)? <= image.len() as u64).then_some(())
}

/// Reads a little-endian number.
fn read_number(image: &[u8], offset: u64, bytes: usize) -> Option<u64> {
    let at = usize::try_from(offset).ok()?;
    let part = image.get(at..at.checked_add(bytes)?)?;
    Some(part.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with one section of 16 bytes between the header and the table of sections.
    fn image_with_a_section() -> Vec<u8> {
        let mut image = vec![0; 64 + 16 + 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[0x28..0x30].copy_from_slice(&80_u64.to_le_bytes());
        image[0x3a..0x3c].copy_from_slice(&64_u16.to_le_bytes());
        image[0x3c..0x3e].copy_from_slice(&1_u16.to_le_bytes());
        image[80 + 0x04] = 1;
        image[80 + 0x18..80 + 0x20].copy_from_slice(&64_u64.to_le_bytes());
        image[80 + 0x20..80 + 0x28].copy_from_slice(&16_u64.to_le_bytes());
        image
    }

    #[test]
    fn a_truncated_image_is_incomplete() {
        let image = image_with_a_section();
        assert!(is_complete_cubin(&image));
        for len in 0..image.len() {
            assert!(!is_complete_cubin(&image[..len]), "{len} of {} bytes", image.len());
        }
        let mut longer_section = image.clone();
        longer_section[80 + 0x20] = 81;
        assert!(!is_complete_cubin(&longer_section));
        // A section without contents may have any size.
        longer_section[80 + 0x04] = SECTION_WITHOUT_CONTENTS as u8;
        assert!(is_complete_cubin(&longer_section));
        assert!(!is_complete_cubin(b"{}"));
    }
}
