//! A tensor as it lies in a mapped weight file, or as a seed defines it.

use std::sync::Arc;

use memmap2::Mmap;

use crate::generator::Generator;
use crate::header::TensorEntry;

/// Where one tensor comes from.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    /// Path of the file, for messages.
    pub(crate) file: Arc<str>,
    content: TensorContent,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
}

#[derive(Debug, Clone)]
enum TensorContent {
    /// Bytes of a mapped file. The offsets are checked against the map's length.
    Mapped {
        map: Arc<Mmap>,
        start: usize,
        end: usize,
    },
    Generated(Generator),
}

impl StoredTensor {
    /// Locates a tensor of a header in the mapped file that begins with the header.
    pub(crate) fn new(file: &Arc<str>, map: &Arc<Mmap>, t: TensorEntry) -> StoredTensor {
        let TensorEntry { dtype, shape, start, end } = t;
        let content = TensorContent::Mapped { map: Arc::clone(map), start, end };
        StoredTensor { file: Arc::clone(file), content, dtype, shape }
    }

    /// Returns an f32 tensor that is computed.
    pub(crate) fn generated(generator: Generator, shape: Vec<u64>) -> StoredTensor {
        let file = format!("synthetic:{}", generator.seed).into();
        StoredTensor { file, content: TensorContent::Generated(generator), dtype: "F32".into(), shape }
    }

    /// Returns what computes the tensor; `None` if it lies in a file.
    pub(crate) fn generator(&self) -> Option<&Generator> {
        match &self.content {
            TensorContent::Mapped { .. } => None,
            TensorContent::Generated(generator) => Some(generator),
        }
    }

    /// Returns all bytes, row-major and little-endian; none for a tensor that is computed.
    pub(crate) fn raw_bytes(&self) -> &[u8] {
        match &self.content {
            TensorContent::Mapped { map, start, end } => &map[*start..*end],
            TensorContent::Generated(_) => &[],
        }
    }
}
