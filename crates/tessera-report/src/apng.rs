//! Encoders for PNG and animated PNG. The animation encoder receives one frame at a time; the
//! number of frames is unknown until the end.
//!
//! The clip is written to disk while it grows, so a run that dies keeps its frames: after any
//! frame, [`ApngStream::current_ending`] returns the bytes that would complete the file. Each frame
//! stores only the rectangle that changed. Compression is lossless and fast, because a chunk must
//! not wait for its frames to be encoded.

use tessera_base::Diagnostic;

use crate::codes::{T0903, T0904};

/// Bytes that overwrite a part of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePatch {
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// Bytes to write at the offset, over those already there.
    pub bytes: Vec<u8>,
}

/// The changes that complete a file after the frames so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApngEnding {
    /// Bytes to append after the last frame: the IEND chunk; empty if there is nothing to end.
    pub trailer: Vec<u8>,
    /// Overwrites of the animation control chunk near the file's start, with the final frame count.
    pub patch: Vec<FilePatch>,
}

/// Encodes an animated PNG frame by frame. It returns bytes, which the caller writes to the file.
#[derive(Debug)]
pub struct ApngStream {
    width: u32,
    height: u32,
    delay: (u16, u16),
    frames: u32,
    sequence: u32,
    last: Vec<u8>,
    scratch: Vec<u8>,
}

impl ApngStream {
    /// Starts an animation that loops for ever. Returns the encoder and the first bytes of the
    /// file.
    ///
    /// # Errors
    /// T0903 for a size or rate that cannot be encoded.
    pub fn new(
        width: u32,
        height: u32,
        fps_num: u32,
        fps_den: u32,
    ) -> Result<(ApngStream, Vec<u8>), Diagnostic> {
        frame_bytes(width, height)?;
        let delay = frame_delay(fps_num, fps_den)?;
        let mut header = SIGNATURE.to_vec();
        let mut ihdr = Vec::with_capacity(13);
        ihdr.extend(width.to_be_bytes());
        ihdr.extend(height.to_be_bytes());
        // 8 bits, RGB, deflate, adaptive filters, not interlaced.
        ihdr.extend([8, 2, 0, 0, 0]);
        push_chunk(&mut header, *b"IHDR", &ihdr);
        // The header declares one frame, so that a file that dies before its first ending still
        // opens.
        push_chunk(&mut header, *b"acTL", &animation_control(1));
        let stream = ApngStream {
            width,
            height,
            delay,
            frames: 0,
            sequence: 0,
            last: Vec::new(),
            scratch: Vec::new(),
        };
        Ok((stream, header))
    }

    /// Encodes the next frame, `width * height * 3` bytes of RGB. Returns the bytes to append to
    /// the file.
    ///
    /// # Errors
    /// T0904 for a wrong number of bytes.
    pub fn encode_frame(&mut self, rgb: &[u8]) -> Result<Vec<u8>, Diagnostic> {
        check_frame(rgb, self.width, self.height)?;
        let area = match self.frames {
            0 => PixelRect { x: 0, y: 0, w: self.width, h: self.height },
            _ => changed_rect(&self.last, rgb, self.width),
        };
        self.scratch.clear();
        let row = self.width as usize * 3;
        for y in area.y..area.y + area.h {
            let at = y as usize * row + area.x as usize * 3;
            self.scratch.extend_from_slice(&rgb[at..at + area.w as usize * 3]);
        }
        let png = encode_png(&self.scratch, area.w, area.h)?;
        let mut out = Vec::with_capacity(png.len() + 64);

        let mut control = Vec::with_capacity(26);
        control.extend(self.next_sequence().to_be_bytes());
        for n in [area.w, area.h, area.x, area.y] {
            control.extend(n.to_be_bytes());
        }
        control.extend(self.delay.0.to_be_bytes());
        control.extend(self.delay.1.to_be_bytes());
        // Dispose operation: none. Blend operation: source.
        control.extend([0, 0]);
        push_chunk(&mut out, *b"fcTL", &control);
        for data in image_data(&png) {
            if self.frames == 0 {
                push_chunk(&mut out, *b"IDAT", data);
            } else {
                let mut numbered = Vec::with_capacity(data.len() + 4);
                numbered.extend(self.next_sequence().to_be_bytes());
                numbered.extend_from_slice(data);
                push_chunk(&mut out, *b"fdAT", &numbered);
            }
        }
        self.frames += 1;
        self.last.clear();
        self.last.extend_from_slice(rgb);
        Ok(out)
    }

    /// Returns the number of frames so far.
    #[must_use]
    pub fn frame_count(&self) -> u32 {
        self.frames
    }

    /// Returns the changes that would complete the file now. To continue afterwards, write the next
    /// frame over the trailer.
    ///
    /// The ending is empty before the first frame: a PNG needs pixels, so the caller should delete
    /// the file.
    #[must_use]
    pub fn current_ending(&self) -> ApngEnding {
        if self.frames == 0 {
            return ApngEnding { trailer: Vec::new(), patch: Vec::new() };
        }
        let mut trailer = Vec::new();
        push_chunk(&mut trailer, *b"IEND", &[]);
        let mut control = Vec::new();
        push_chunk(&mut control, *b"acTL", &animation_control(self.frames));
        // The patch covers the chunk without its length and name: the numbers and the checksum.
        ApngEnding {
            trailer,
            patch: vec![FilePatch { offset: ANIMATION_CONTROL_OFFSET + 8, bytes: control.split_off(8) }],
        }
    }

    /// Ends the animation and returns the changes that complete the file.
    #[must_use]
    pub fn finish(self) -> ApngEnding {
        self.current_ending()
    }

    fn next_sequence(&mut self) -> u32 {
        let n = self.sequence;
        self.sequence += 1;
        n
    }
}

/// Encodes one image as a PNG file; `rgb` is `width * height * 3` bytes.
///
/// # Errors
/// T0903 for an impossible size, T0904 for a wrong number of bytes.
pub fn png_frame(rgb: &[u8], width: u32, height: u32) -> Result<Vec<u8>, Diagnostic> {
    check_frame(rgb, width, height)?;
    encode_png(rgb, width, height)
}

const SIGNATURE: [u8; 8] = [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n'];
/// Offset of the animation control chunk, after the signature and the header chunk.
const ANIMATION_CONTROL_OFFSET: u64 = 8 + 25;

#[derive(Debug, PartialEq, Eq)]
struct PixelRect {
    x: u32,
    y: u32,
    w: u32,
    h: u32,
}

/// Returns the smallest rectangle that contains every changed pixel; one pixel if nothing changed,
/// because a frame must not be empty.
fn changed_rect(old: &[u8], new: &[u8], width: u32) -> PixelRect {
    let row = width as usize * 3;
    let mut rows = None::<(usize, usize)>;
    let (mut left, mut right) = (row, 0);
    for (y, (a, b)) in old.chunks_exact(row).zip(new.chunks_exact(row)).enumerate() {
        if a == b {
            continue;
        }
        rows = Some((rows.map_or(y, |r| r.0), y));
        // Only pixels outside the current rectangle can widen it.
        if let Some(i) = a[..left].iter().zip(&b[..left]).position(|(p, q)| p != q) {
            left = i;
        }
        if let Some(i) = a[right..].iter().zip(&b[right..]).rposition(|(p, q)| p != q) {
            right += i + 1;
        }
    }
    let Some((top, bottom)) = rows else { return PixelRect { x: 0, y: 0, w: 1, h: 1 } };
    let (x, end) = (left / 3, right.div_ceil(3));
    PixelRect { x: x as u32, y: top as u32, w: (end - x) as u32, h: (bottom - top + 1) as u32 }
}

fn animation_control(frames: u32) -> [u8; 8] {
    let mut data = [0; 8];
    data[..4].copy_from_slice(&frames.to_be_bytes());
    data
}

/// Returns the duration of a frame as a fraction of a second.
fn frame_delay(fps_num: u32, fps_den: u32) -> Result<(u16, u16), Diagnostic> {
    let refused = || {
        Diagnostic::error(&T0903, "this frame rate cannot be encoded")
            .with_label("frame rate", format!("{fps_num}/{fps_den} frames per second"))
            .with_hint("use a positive rate such as 16/1 or 30000/1001")
    };
    if fps_num == 0 || fps_den == 0 {
        return Err(refused());
    }
    let (mut a, mut b) = (fps_num, fps_den);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    match (u16::try_from(fps_den / a), u16::try_from(fps_num / a)) {
        (Ok(num), Ok(den)) => Ok((num, den)),
        _ => Err(refused()),
    }
}

fn frame_bytes(width: u32, height: u32) -> Result<usize, Diagnostic> {
    let bytes = (width as usize).checked_mul(height as usize).and_then(|n| n.checked_mul(3));
    match bytes {
        Some(n)
            if n > 0 && width <= i32::MAX as u32 && height <= i32::MAX as u32 && n <= isize::MAX as usize =>
        {
            Ok(n)
        }
        _ => Err(Diagnostic::error(&T0903, "this image size cannot be encoded")
            .with_label("image", format!("{width} × {height} pixels"))),
    }
}

fn check_frame(rgb: &[u8], width: u32, height: u32) -> Result<(), Diagnostic> {
    let want = frame_bytes(width, height)?;
    if rgb.len() == want {
        return Ok(());
    }
    Err(Diagnostic::error(&T0904, "the frame has the wrong number of bytes")
        .with_label("frame", format!("{} bytes", rgb.len()))
        .with_label("image", format!("{width} × {height} × 3 = {want} bytes")))
}

fn encode_png(rgb: &[u8], width: u32, height: u32) -> Result<Vec<u8>, Diagnostic> {
    let mut out = Vec::with_capacity(rgb.len() / 2 + 128);
    let mut encoder = png::Encoder::new(&mut out, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    // Paeth for all rows: on moving images the result is nearly as small as with a filter chosen
    // per row, in a fraction of the time.
    encoder.set_filter(png::Filter::Paeth);
    let written = encoder.write_header().and_then(|mut w| {
        w.write_image_data(rgb)?;
        w.finish()
    });
    match written {
        Ok(()) => Ok(out),
        Err(e) => Err(Diagnostic::error(&T0903, "the image cannot be encoded")
            .with_label("image", format!("{width} × {height} pixels"))
            .with_note(e.to_string())),
    }
}

/// Iterates over the contents of the IDAT chunks of a PNG from [`encode_png`].
fn image_data(png: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = png.get(SIGNATURE.len()..).unwrap_or(&[]);
    std::iter::from_fn(move || {
        let head: &[u8; 8] = rest.first_chunk()?;
        let len = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let body = rest.get(8..8 + len)?;
        let name = [head[4], head[5], head[6], head[7]];
        rest = rest.get(12 + len..).unwrap_or(&[]);
        Some((name, body))
    })
    .filter(|(name, _)| name == b"IDAT")
    .map(|(_, body)| body)
}

fn push_chunk(out: &mut Vec<u8>, name: [u8; 4], data: &[u8]) {
    out.extend((data.len() as u32).to_be_bytes());
    let from = out.len();
    out.extend(name);
    out.extend_from_slice(data);
    let crc = crc32fast::hash(&out[from..]);
    out.extend(crc.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    /// Decodes a file with the png crate and composes its frames.
    fn decode(file: &[u8]) -> Vec<Vec<u8>> {
        let mut reader = png::Decoder::new(Cursor::new(file)).read_info().unwrap();
        let (width, height) = (reader.info().width, reader.info().height);
        let frames = reader.info().animation_control.unwrap().num_frames;
        let mut canvas = vec![0; (width * height * 3) as usize];
        let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
        let mut out = Vec::new();
        for _ in 0..frames {
            reader.next_frame(&mut buffer).unwrap();
            let f = *reader.info().frame_control.as_ref().unwrap();
            for y in 0..f.height {
                let from = (y * f.width * 3) as usize;
                let to = (((y + f.y_offset) * width + f.x_offset) * 3) as usize;
                let n = (f.width * 3) as usize;
                canvas[to..to + n].copy_from_slice(&buffer[from..from + n]);
            }
            out.push(canvas.clone());
        }
        reader.finish().unwrap();
        out
    }

    fn close(file: &[u8], ending: &ApngEnding) -> Vec<u8> {
        let mut file = file.to_vec();
        for p in &ending.patch {
            let at = p.offset as usize;
            file[at..at + p.bytes.len()].copy_from_slice(&p.bytes);
        }
        file.extend(&ending.trailer);
        file
    }

    /// Draws a noisy square that moves over a gradient; frame 3 repeats frame 2.
    fn picture(w: u32, h: u32, t: u32) -> Vec<u8> {
        let t = if t == 3 { 2 } else { t };
        let noise = |x: u32, y: u32| {
            (x.wrapping_mul(2_654_435_761) ^ y.wrapping_mul(40_503) ^ t.wrapping_mul(97)) >> 7
        };
        (0..h)
            .flat_map(|y| (0..w).map(move |x| (x, y)))
            .flat_map(|(x, y)| {
                let inside = x / 8 == t % (w / 8).max(1) && y < h / 2;
                let n = if inside { noise(x, y) as u8 } else { 0 };
                [(x * 255 / w) as u8 ^ n, (y * 255 / h) as u8, n]
            })
            .collect()
    }

    #[test]
    fn frames_come_back_exactly_after_any_ending() {
        for (w, h) in [(40, 24), (1, 1), (7, 3)] {
            let (mut stream, mut file) = ApngStream::new(w, h, 24, 1).unwrap();
            let mut want = Vec::new();
            for t in 0..6 {
                let rgb = picture(w, h, t);
                file.extend(stream.encode_frame(&rgb).unwrap());
                want.push(rgb);
                assert_eq!(decode(&close(&file, &stream.current_ending())), want, "{w}x{h}, frame {t}");
            }
            assert_eq!(stream.frame_count(), 6);
            assert_eq!(decode(&close(&file, &stream.finish())), want);
        }
    }

    #[test]
    fn a_file_without_an_ending_still_shows_its_first_frame() {
        let (mut stream, mut file) = ApngStream::new(16, 16, 8, 1).unwrap();
        for t in 0..3 {
            file.extend(stream.encode_frame(&picture(16, 16, t)).unwrap());
        }
        let mut reader = png::Decoder::new(Cursor::new(&file)).read_info().unwrap();
        let mut buffer = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut buffer).unwrap();
        assert_eq!(buffer, picture(16, 16, 0));
    }

    #[test]
    fn only_what_changed_is_stored() {
        let old = vec![0u8; 10 * 8 * 3];
        let mut new = old.clone();
        assert_eq!(changed_rect(&old, &new, 10), PixelRect { x: 0, y: 0, w: 1, h: 1 });
        new[(2 * 10 + 3) * 3 + 2] = 1;
        assert_eq!(changed_rect(&old, &new, 10), PixelRect { x: 3, y: 2, w: 1, h: 1 });
        new[(6 * 10 + 8) * 3] = 1;
        assert_eq!(changed_rect(&old, &new, 10), PixelRect { x: 3, y: 2, w: 6, h: 5 });
        new[(7 * 10) * 3 + 1] = 1;
        assert_eq!(changed_rect(&old, &new, 10), PixelRect { x: 0, y: 2, w: 9, h: 6 });

        let (mut stream, _) = ApngStream::new(128, 128, 24, 1).unwrap();
        stream.encode_frame(&picture(128, 128, 2)).unwrap();
        let same = stream.encode_frame(&picture(128, 128, 3)).unwrap();
        assert!(same.len() < 120, "{} bytes for an unchanged frame", same.len());
    }

    #[test]
    fn rates_are_fractions() {
        assert_eq!(frame_delay(24, 1).unwrap(), (1, 24));
        assert_eq!(frame_delay(30_000, 1001).unwrap(), (1001, 30_000));
        assert_eq!(frame_delay(200_000, 100_000).unwrap(), (1, 2));
        assert_eq!(frame_delay(0, 1).unwrap_err().code.id, "T0903");
        assert_eq!(frame_delay(100_003, 1).unwrap_err().code.id, "T0903");
    }

    #[test]
    fn refuses_wrong_sizes() {
        assert_eq!(ApngStream::new(0, 4, 1, 1).unwrap_err().code.id, "T0903");
        assert_eq!(ApngStream::new(u32::MAX, 4, 1, 1).unwrap_err().code.id, "T0903");
        let (mut stream, _) = ApngStream::new(4, 4, 1, 1).unwrap();
        assert_eq!(stream.encode_frame(&[0; 47]).unwrap_err().code.id, "T0904");
        assert!(stream.current_ending().trailer.is_empty());
        assert_eq!(png_frame(&[0; 3], 1, 2).unwrap_err().code.id, "T0904");
        assert!(png_frame(&[1, 2, 3], 1, 1).unwrap().starts_with(&SIGNATURE));
    }
}
