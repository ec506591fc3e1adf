//! Whole arrays in the memory of the calling process.

use std::fmt;
use std::sync::Arc;

/// A whole array of f32 in row-major order. Cheap to clone; the clones keep the memory alive.
#[derive(Clone)]
pub struct HostArray {
    shape: Vec<u64>,
    values: Arc<dyn AsRef<[f32]> + Send + Sync>,
}

impl HostArray {
    /// Wraps values that another owner may hold too.
    ///
    /// # Panics
    /// If the number of values is not that of the shape.
    #[must_use]
    pub fn new(shape: Vec<u64>, values: Arc<dyn AsRef<[f32]> + Send + Sync>) -> HostArray {
        let count = values.as_ref().as_ref().len() as u64;
        assert!(
            shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)) == Some(count),
            "{count} values in an array of shape {shape:?}"
        );
        HostArray { shape, values }
    }

    /// Creates an array from its values.
    ///
    /// # Panics
    /// If the number of values is not that of the shape.
    #[must_use]
    pub fn from_vec(shape: Vec<u64>, values: Vec<f32>) -> HostArray {
        HostArray::new(shape, Arc::new(values))
    }

    /// Returns the extents, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the values in row-major order.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        self.values.as_ref().as_ref()
    }
}

impl fmt::Debug for HostArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "f32{:?}", self.shape)
    }
}

impl PartialEq for HostArray {
    /// Compares shapes and bits, so that NaN equals itself and 0 differs from −0.
    fn eq(&self, other: &HostArray) -> bool {
        let bits = |array: &HostArray| array.values().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        self.shape == other.shape && bits(self) == bits(other)
    }
}
