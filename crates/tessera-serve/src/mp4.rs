//! Chunks as fragments of one MP4 video, for clients that play H.264.
//!
//! Every chunk begins with a key frame and is encoded without what came before, so that a client may miss chunks and join at any of
//! them. The encoder builds C++, and is part of the program only with the feature `h264`.

#[cfg(feature = "h264")]
mod boxes;
#[cfg(feature = "h264")]
mod encoder;

#[cfg(not(feature = "h264"))]
pub(crate) use absent::Mp4Encoder;
#[cfg(feature = "h264")]
pub(crate) use encoder::Mp4Encoder;

/// What stands in place of the encoder in a program without it.
#[cfg(not(feature = "h264"))]
mod absent {
    use axum::body::Bytes;

    /// There is none.
    #[derive(Debug)]
    pub(crate) enum Mp4Encoder {}

    impl Mp4Encoder {
        /// Returns no encoder.
        pub(crate) fn new(_size: (usize, usize), _frame_rate: (u32, u32)) -> Option<Mp4Encoder> {
            None
        }

        pub(crate) fn media_type(&self) -> &str {
            match *self {}
        }

        pub(crate) fn initialisation(&self) -> &Bytes {
            match *self {}
        }

        pub(crate) fn encode_chunk<'a>(
            &self,
            _first_frame: u64,
            _frames: impl Iterator<Item = &'a [u8]>,
        ) -> Option<Bytes> {
            match *self {}
        }
    }
}
