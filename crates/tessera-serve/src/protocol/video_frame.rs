//! A frame of the input video, as the client in control sends it in a binary message.

/// First bytes of the message.
pub const VIDEO_FRAME_MAGIC: [u8; 4] = *b"TSV1";
/// Bytes of the header in front of the picture.
pub const VIDEO_FRAME_HEADER_BYTES: usize = 16;

/// Format of the picture: RGB, 8 bits per channel, row by row. A lossy one would hide from the sender what the ranks are given.
const RAW: u8 = 1;

/// The header of a frame of the input video. All numbers are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VideoFrameHeader {
    /// Width of the picture in pixels.
    pub width: u16,
    /// Height of the picture in pixels.
    pub height: u16,
}

impl VideoFrameHeader {
    /// Returns the bytes of the header.
    #[must_use]
    pub fn encode(&self) -> [u8; VIDEO_FRAME_HEADER_BYTES] {
        let mut bytes = [0; VIDEO_FRAME_HEADER_BYTES];
        bytes[..4].copy_from_slice(&VIDEO_FRAME_MAGIC);
        bytes[4] = RAW;
        bytes[8..10].copy_from_slice(&self.width.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.height.to_le_bytes());
        bytes[12..].copy_from_slice(&self.picture_bytes().to_le_bytes());
        bytes
    }

    /// Reads a binary message, and returns its header with the bytes of the picture. Returns `None` for what is no frame.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<(VideoFrameHeader, &[u8])> {
        let (head, picture) = message.split_first_chunk::<VIDEO_FRAME_HEADER_BYTES>()?;
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let header = VideoFrameHeader { width: u16_at(8), height: u16_at(10) };
        // Bytes that are 0 today may have a meaning in another version.
        (*head == header.encode() && picture.len() as u64 == u64::from(header.picture_bytes()))
            .then_some((header, picture))
    }

    /// Returns the number of bytes of the picture; more than 32 bits hold are none that any stream has.
    fn picture_bytes(&self) -> u32 {
        (u32::from(self.width) * u32::from(self.height)).saturating_mul(3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_the_bytes_that_the_reference_page_lists() {
        let header = VideoFrameHeader { width: 832, height: 3 };
        let bytes = header.encode();
        assert_eq!(bytes, *b"TSV1\x01\0\0\0\x40\x03\x03\0\x40\x1d\0\0");
        let message = [&bytes[..], &[7; 832 * 3 * 3]].concat();
        assert_eq!(VideoFrameHeader::decode(&message), Some((header, &message[16..])));
        for at in [0, 3, 4, 5, 7, 9, 12] {
            let mut other = message.clone();
            other[at] ^= 0x80;
            assert_eq!(VideoFrameHeader::decode(&other), None, "byte {at}");
        }
        assert_eq!(VideoFrameHeader::decode(&message[..message.len() - 1]), None);
        assert_eq!(VideoFrameHeader::decode(&[&message[..], &[0]].concat()), None);
        assert_eq!(VideoFrameHeader::decode(b"TSV1"), None);
        let largest = VideoFrameHeader { width: u16::MAX, height: u16::MAX };
        assert_eq!(VideoFrameHeader::decode(&largest.encode()), None);
    }
}
