//! The position of a piece of text in its file.

/// A half-open byte range in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Span {
    /// Byte offset of the first byte in the text.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}
