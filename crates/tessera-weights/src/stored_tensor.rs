//! A tensor as it lies in a mapped weight file, with the scales that belong to it.

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
    /// Factors of the elements: one for all, or one per row. Empty if there are none.
    scales: Arc<[f32]>,
}

impl StoredTensor {
    /// Locates a tensor of a header in the mapped file that begins with the header.
    pub(crate) fn new(file: &Arc<str>, map: &Arc<Mmap>, t: TensorEntry) -> StoredTensor {
        let TensorEntry { dtype, shape, start, end } = t;
        let (file, map) = (Arc::clone(file), Arc::clone(map));
        StoredTensor { file, map, dtype, shape, start, end, scales: Arc::default() }
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

    /// Returns all bytes, row-major and little-endian.
    pub(crate) fn raw_bytes(&self) -> &[u8] {
        &self.map[self.start..self.end]
    }
}
