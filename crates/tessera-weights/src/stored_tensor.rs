//! A tensor as it lies in a mapped weight file, with the scales that belong to it, or as a seed defines it.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

use crate::generator::Generator;
use crate::header::TensorEntry;
use crate::mapped_pages::release_pages;

/// Where one tensor comes from.
#[derive(Debug, Clone)]
pub(crate) struct StoredTensor {
    /// Path of the file, for messages.
    pub(crate) file: Arc<str>,
    content: TensorContent,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Factors of the elements: one for all, or one per row. Empty if there are none.
    scales: Arc<[f32]>,
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
        StoredTensor { file: Arc::clone(file), content, dtype, shape, scales: Arc::default() }
    }

    /// Returns the tensor with factors of its elements: one for all, or one per row.
    pub(crate) fn with_scales(&self, scales: Arc<[f32]>) -> StoredTensor {
        StoredTensor { scales, ..self.clone() }
    }

    /// Returns the factors of the elements, or none.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Multiplies elements that begin at a row by the scales of their rows.
    pub(crate) fn apply_scales(&self, elements: &mut [f32], first_row: usize, row_elements: usize) {
        match &self.scales[..] {
            [] => {}
            [one] => elements.iter_mut().for_each(|x| *x *= one),
            rows => {
                let scales = &rows[first_row..];
                for (row, scale) in elements.chunks_mut(row_elements.max(1)).zip(scales) {
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
        }
    }

    /// Returns an f32 tensor that is computed.
    pub(crate) fn generated(generator: Generator, shape: Vec<u64>) -> StoredTensor {
        let file = format!("synthetic:{}", generator.seed).into();
        let content = TensorContent::Generated(generator);
        StoredTensor { file, content, dtype: "F32".into(), shape, scales: Arc::default() }
    }

    /// Returns what computes the tensor; `None` if it lies in a file.
    pub(crate) fn generator(&self) -> Option<&Generator> {
        match &self.content {
            TensorContent::Mapped { .. } => None,
            TensorContent::Generated(generator) => Some(generator),
        }
    }

    /// Gives the pages of these bytes of the tensor back, if it lies in a mapped file.
    pub(crate) fn release(&self, bytes: Range<usize>) {
        if let TensorContent::Mapped { map, start, end } = &self.content {
            release_pages(map, start + bytes.start..(start + bytes.end).min(*end));
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
