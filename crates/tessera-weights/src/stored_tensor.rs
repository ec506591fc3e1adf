//! A tensor as it lies in a mapped weight file.

use std::sync::Arc;

use memmap2::Mmap;

use crate::header::TensorEntry;

/// The location of one tensor in a mapped file. The offsets are checked against the map's length.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    /// Path of the file, for messages.
    pub(crate) file: Arc<str>,
    map: Arc<Mmap>,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    start: usize,
    end: usize,
}

impl StoredTensor {
    /// Locates a tensor of a header in the mapped file that begins with the header.
    pub(crate) fn new(file: &Arc<str>, map: &Arc<Mmap>, t: TensorEntry) -> StoredTensor {
        let TensorEntry { dtype, shape, start, end } = t;
        StoredTensor { file: Arc::clone(file), map: Arc::clone(map), dtype, shape, start, end }
    }

    /// Returns all bytes, row-major and little-endian.
    pub(crate) fn raw_bytes(&self) -> &[u8] {
        &self.map[self.start..self.end]
    }
}
