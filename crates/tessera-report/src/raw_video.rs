//! Uncompressed video for other programs: bare RGB frames and YUV4MPEG2.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// An uncompressed format of video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RawFormat {
    /// Frames of `width * height * 3` bytes of RGB, one after the other, without a header.
    Rgb24,
    /// YUV4MPEG2 with full chroma: BT.601 matrix and limited range, which readers assume.
    Y4m,
}

impl RawFormat {
    /// Returns the bytes before the first frame. `fps` is a fraction of integers.
    #[must_use]
    pub fn header(self, (width, height): (u32, u32), (fps_num, fps_den): (u32, u32)) -> Vec<u8> {
        match self {
            RawFormat::Rgb24 => Vec::new(),
            RawFormat::Y4m => {
                format!("YUV4MPEG2 W{width} H{height} F{fps_num}:{fps_den} Ip A1:1 C444\n").into_bytes()
            }
        }
    }

    /// Encodes a frame, given as bytes of RGB.
    #[must_use]
    pub fn encode_frame(self, rgb: &[u8]) -> Cow<'_, [u8]> {
        match self {
            RawFormat::Rgb24 => Cow::Borrowed(rgb),
            RawFormat::Y4m => Cow::Owned(encode_y4m(rgb)),
        }
    }
}

/// Rows of the BT.601 matrix for Y, Cb and Cr of 8-bit RGB, scaled by 2¹⁶ and by the limited range:
/// 219/255 for Y, 224/255 for Cb and Cr. Each row of Cb and Cr sums to 0, so grey has no color.
const BT601: [[i32; 3]; 3] = [[16829, 33039, 6416], [-9714, -19070, 28784], [28784, -24103, -4681]];
const OFFSETS: [i32; 3] = [16, 128, 128];

fn encode_y4m(rgb: &[u8]) -> Vec<u8> {
    let mut out = b"FRAME\n".to_vec();
    out.reserve(rgb.len());
    for (row, offset) in BT601.iter().zip(OFFSETS) {
        out.extend(rgb.as_chunks::<3>().0.iter().map(|pixel| {
            let sum: i32 = row.iter().zip(pixel).map(|(a, v)| a * i32::from(*v)).sum();
            (offset + ((sum + (1 << 15)) >> 16)).clamp(0, 255) as u8
        }));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns Y, Cb and Cr by the definition of BT.601 in reals.
    fn reference(rgb: [u8; 3]) -> [f64; 3] {
        let [r, g, b] = rgb.map(|v| f64::from(v) / 255.0);
        let y = 0.299 * r + 0.587 * g + 0.114 * b;
        [16.0 + 219.0 * y, 128.0 + 224.0 * (b - y) / 1.772, 128.0 + 224.0 * (r - y) / 1.402]
    }

    #[test]
    fn y4m_planes_are_within_rounding_of_the_definition() {
        let pixels: Vec<[u8; 3]> =
            (0..729_u32).map(|i| [i % 9, i / 9 % 9, i / 81].map(|v| (v * 255 / 8) as u8)).collect();
        let frame = RawFormat::Y4m.encode_frame(pixels.as_flattened()).into_owned();
        let planes = frame.strip_prefix(b"FRAME\n").unwrap();
        assert_eq!(planes.len(), 3 * pixels.len());
        for (i, pixel) in pixels.iter().enumerate() {
            for (plane, expected) in reference(*pixel).iter().enumerate() {
                let found = f64::from(planes[plane * pixels.len() + i]);
                assert!((found - expected).abs() < 0.51, "{pixel:?}: {found}, not {expected}");
            }
        }
    }

    #[test]
    fn the_header_states_size_and_rate_and_bare_frames_have_none() {
        let header = RawFormat::Y4m.header((832, 480), (16, 1));
        assert_eq!(header, b"YUV4MPEG2 W832 H480 F16:1 Ip A1:1 C444\n");
        assert!(RawFormat::Rgb24.header((832, 480), (16, 1)).is_empty());
        assert_eq!(&*RawFormat::Rgb24.encode_frame(&[1, 2, 3]), [1, 2, 3]);
    }
}
