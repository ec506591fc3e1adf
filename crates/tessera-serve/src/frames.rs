//! One frame of the video, encoded once for all clients that take it.

use std::sync::{Arc, OnceLock};

use axum::body::Bytes;
use jpeg_encoder::{ColorType, Encoder};

use crate::protocol::{FRAME_HEADER_BYTES, FrameFormat, FrameHeader};

/// Quality of JPEG frames, from 1 to 100.
const JPEG_QUALITY: u8 = 88;

/// A frame and its binary messages.
#[derive(Debug)]
pub(crate) struct Frame {
    header: FrameHeader,
    raw: Bytes,
    jpeg: OnceLock<Option<Bytes>>,
    /// Of the last frame of a chunk, if a client takes MP4.
    fragment: Option<FragmentMessages>,
}

/// The messages of a fragment: its initialisation segment, which a client needs once, and the fragment.
#[derive(Debug)]
struct FragmentMessages {
    initialisation: Bytes,
    fragment: Bytes,
}

impl Frame {
    /// Wraps the RGB bytes of a frame. The header states the raw picture.
    pub(crate) fn new(header: FrameHeader, rgb: &[u8]) -> Frame {
        Frame {
            raw: join_message(&header, FrameFormat::Raw, rgb),
            header,
            jpeg: OnceLock::new(),
            fragment: None,
        }
    }

    /// Adds the fragment that ends with this frame, which is the last one of its chunk.
    pub(crate) fn with_fragment(self, first_frame: u64, initialisation: &[u8], fragment: &[u8]) -> Frame {
        let header = FrameHeader { is_first: true, frame: first_frame, ..self.header };
        let first = FrameHeader { is_first: false, is_last: false, is_initialisation: true, ..header };
        let fragment = FragmentMessages {
            initialisation: join_message(&first, FrameFormat::Mp4, initialisation),
            fragment: join_message(&header, FrameFormat::Mp4, fragment),
        };
        Frame { fragment: Some(fragment), ..self }
    }

    pub(crate) fn header(&self) -> &FrameHeader {
        &self.header
    }

    /// Returns the RGB bytes.
    pub(crate) fn rgb(&self) -> &[u8] {
        &self.raw[FRAME_HEADER_BYTES..]
    }

    /// Returns the binary message in a format; `None` if the client takes no frames, if the picture is too large for it, or if the
    /// frame has no message of its own: a fragment goes with the last frame of its chunk.
    pub(crate) fn message(&self, format: FrameFormat) -> Option<Bytes> {
        match format {
            FrameFormat::None => None,
            FrameFormat::Raw => Some(self.raw.clone()),
            FrameFormat::Jpeg => self.jpeg_message().cloned(),
            FrameFormat::Mp4 => self.fragment.as_ref().map(|messages| messages.fragment.clone()),
        }
    }

    /// Returns the binary message that a client needs before the first other one in a format.
    pub(crate) fn initialisation(&self, format: FrameFormat) -> Option<Bytes> {
        let messages = self.fragment.as_ref().filter(|_| format == FrameFormat::Mp4)?;
        Some(messages.initialisation.clone())
    }

    /// Returns the picture as JPEG.
    pub(crate) fn jpeg(&self) -> Option<Bytes> {
        Some(self.jpeg_message()?.slice(FRAME_HEADER_BYTES..))
    }

    fn jpeg_message(&self) -> Option<&Bytes> {
        let encode = || {
            let mut jpeg = Vec::with_capacity(self.rgb().len() / 8);
            let FrameHeader { width, height, .. } = self.header;
            Encoder::new(&mut jpeg, JPEG_QUALITY).encode(self.rgb(), width, height, ColorType::Rgb).ok()?;
            Some(join_message(&self.header, FrameFormat::Jpeg, &jpeg))
        };
        self.jpeg.get_or_init(encode).as_ref()
    }
}

/// Returns the frames of a chunk that have a message of their own in a format; each takes a credit. A fragment goes with the last frame
/// of its chunk. A client that joined after the encoding began may find a chunk without one, and keeps its credit.
pub(crate) fn frames_in_format(frames: &[Arc<Frame>], format: FrameFormat) -> &[Arc<Frame>] {
    match format {
        FrameFormat::None => &[],
        FrameFormat::Raw | FrameFormat::Jpeg => frames,
        FrameFormat::Mp4 => {
            let has_fragment = frames.last().is_some_and(|last| last.fragment.is_some());
            if has_fragment { &frames[frames.len() - 1..] } else { &[] }
        }
    }
}

fn join_message(header: &FrameHeader, format: FrameFormat, picture: &[u8]) -> Bytes {
    let picture_bytes = u32::try_from(picture.len()).unwrap_or(u32::MAX);
    let header = FrameHeader { format, picture_bytes, ..*header };
    let mut message = Vec::with_capacity(FRAME_HEADER_BYTES + picture.len());
    message.extend_from_slice(&header.encode());
    message.extend_from_slice(picture);
    message.into()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn frame(request: u64, number: u64, is_last: bool) -> Frame {
        let header = FrameHeader {
            format: FrameFormat::Raw,
            is_first: false,
            is_last,
            is_initialisation: false,
            run: 1,
            epoch: 1,
            request,
            frame: number,
            delivered_us: 0,
            width: 16,
            height: 8,
            picture_bytes: 0,
        };
        Frame::new(header, &[200; 16 * 8 * 3])
    }

    #[test]
    fn a_frame_has_one_message_per_format() {
        let frame = frame(1, 2, true);
        let raw = frame.message(FrameFormat::Raw).unwrap();
        assert_eq!((raw.len(), raw[4]), (FRAME_HEADER_BYTES + 16 * 8 * 3, 1));
        let jpeg = frame.message(FrameFormat::Jpeg).unwrap();
        assert_eq!((jpeg[4], &jpeg[FRAME_HEADER_BYTES..FRAME_HEADER_BYTES + 2]), (2, &[0xff, 0xd8][..]));
        assert_eq!(frame.message(FrameFormat::None), None);
        // Encoded once: both messages are the same memory.
        assert_eq!(frame.message(FrameFormat::Jpeg).unwrap().as_ptr(), jpeg.as_ptr());
    }

    #[test]
    fn a_chunk_has_a_frame_for_each_message_that_a_client_gets() {
        let chunk = |last: Frame| [Arc::new(frame(1, 0, false)), Arc::new(last)];
        let plain = chunk(frame(1, 1, true));
        let encoded = chunk(frame(1, 1, true).with_fragment(0, b"start", b"fragment"));
        let taken = |frames: &[Arc<Frame>]| {
            [FrameFormat::Raw, FrameFormat::Jpeg, FrameFormat::Mp4, FrameFormat::None].map(|format| {
                let taken = frames_in_format(frames, format);
                assert!(taken.iter().all(|frame| frame.message(format).is_some()), "{format:?}");
                taken.len()
            })
        };
        assert_eq!(taken(&encoded), [2, 2, 1, 0]);
        // Nobody took MP4 when this chunk was encoded.
        assert_eq!(taken(&plain), [2, 2, 0, 0]);
        assert_eq!(taken(&[]), [0; 4]);
    }
}
