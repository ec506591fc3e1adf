//! A dense array of f64 in row-major order.

use std::fmt;

pub(crate) type TensorResult = Result<Tensor, String>;

/// A tensor with extents and elements, the last dim fastest. A scalar has no extents and one
/// element.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f64>,
}

impl Tensor {
    /// Creates a tensor from its elements.
    ///
    /// # Panics
    /// If `data` does not have as many elements as `shape` requires.
    #[must_use]
    pub fn new(shape: &[usize], data: Vec<f64>) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), data.len(), "elements of a tensor {shape:?}");
        Tensor { shape: shape.to_vec(), data }
    }

    /// Creates a tensor of rank 0, with no extents and one element.
    #[must_use]
    pub fn scalar(x: f64) -> Tensor {
        Tensor::new(&[], vec![x])
    }

    /// Creates the tensor whose element at row-major index `i` is `f(i)`.
    #[must_use]
    pub fn from_fn(shape: &[usize], f: impl FnMut(usize) -> f64) -> Tensor {
        Tensor::new(shape, (0..shape.iter().product()).map(f).collect())
    }

    /// Creates a tensor with all elements equal.
    #[must_use]
    pub fn full(shape: &[usize], x: f64) -> Tensor {
        Tensor::from_fn(shape, |_| x)
    }

    /// Returns the extent of each dimension; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the elements in row-major order.
    #[must_use]
    pub fn data(&self) -> &[f64] {
        &self.data
    }

    /// Returns the elements for modification in place.
    pub fn data_mut(&mut self) -> &mut [f64] {
        &mut self.data
    }

    /// Returns row `i` of a matrix.
    #[must_use]
    pub fn row(&self, i: usize) -> &[f64] {
        let d = self.shape.last().copied().unwrap_or(1);
        &self.data[i * d..(i + 1) * d]
    }

    /// Returns the largest absolute difference; infinity if shapes differ or exactly one element is
    /// NaN.
    #[must_use]
    pub fn distance(&self, other: &Tensor) -> f64 {
        if self.shape != other.shape {
            return f64::INFINITY;
        }
        let far = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
        self.data
            .iter()
            .zip(&other.data)
            .map(far)
            .fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
    }

    /// Returns elements `start..start + len` of dim `dim`, or `None` if the range is out of bounds.
    #[must_use]
    pub fn slice(&self, dim: usize, start: usize, len: usize) -> Option<Tensor> {
        let extent = *self.shape.get(dim)?;
        if start.checked_add(len)? > extent {
            return None;
        }
        let inner: usize = self.shape[dim + 1..].iter().product();
        let mut shape = self.shape.clone();
        shape[dim] = len;
        let data = self
            .data
            .chunks_exact((extent * inner).max(1))
            .flat_map(|block| &block[start * inner..(start + len) * inner])
            .copied()
            .collect();
        Some(Tensor { shape, data })
    }

    /// Concatenates tensors along `dim`, or returns `None` if their other extents differ.
    #[must_use]
    pub fn concat(dim: usize, pieces: &[Tensor]) -> Option<Tensor> {
        let mut shape = pieces.first()?.shape.clone();
        let others = |s: &[usize]| {
            s.iter().enumerate().filter(|(i, _)| *i != dim).map(|(_, n)| *n).collect::<Vec<_>>()
        };
        if dim >= shape.len() || pieces.iter().any(|p| others(&p.shape) != others(&shape)) {
            return None;
        }
        shape[dim] = pieces.iter().map(|p| p.shape[dim]).sum();
        let outer: usize = shape[..dim].iter().product();
        let mut data = Vec::with_capacity(shape.iter().product());
        for o in 0..outer {
            for p in pieces {
                let run = p.data.len() / outer;
                data.extend_from_slice(&p.data[o * run..(o + 1) * run]);
            }
        }
        Some(Tensor { shape, data })
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.shape, self.data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_concatenate_to_the_original() {
        let t = Tensor::from_fn(&[3, 4, 2], |i| i as f64);
        for dim in 0..3 {
            let n = t.shape()[dim];
            let parts = [t.slice(dim, 0, 1).unwrap(), t.slice(dim, 1, n - 1).unwrap()];
            assert_eq!(Tensor::concat(dim, &parts).unwrap(), t);
        }
        assert_eq!(t.slice(1, 1, 2).unwrap().data()[..4], [2.0, 3.0, 4.0, 5.0]);
        assert!(t.slice(0, 2, 2).is_none() && t.slice(3, 0, 1).is_none());
    }

    #[test]
    fn distance_is_infinite_for_nan() {
        let t = |x| Tensor::new(&[1], vec![x]);
        assert_eq!(t(1.0).distance(&t(f64::NAN)), f64::INFINITY);
        assert_eq!(t(1.0).distance(&t(1.5)), 0.5);
        assert_eq!(t(1.0).distance(&Tensor::scalar(1.0)), f64::INFINITY);
    }
}
