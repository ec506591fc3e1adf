//! Tensors on the wire: a manifest entry and little-endian bytes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use xxhash_rust::xxh3::xxh3_64;

use super::{MAX_DIMS, MAX_TENSORS};
use crate::Digest;
use crate::codes::T0706;

/// Element types of tensors on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of an `f32`.
    Bf16,
    /// Signed 64-bit integers.
    I64,
    /// Bytes, such as those of pixels.
    U8,
}

impl Dtype {
    /// Returns the size of one element in bytes.
    #[must_use]
    pub fn element_bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
            Dtype::I64 => 8,
            Dtype::U8 => 1,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
        })
    }
}

/// The description of one tensor in a frame's manifest; the tensor bytes follow in its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name, such as `text` or `context`.
    pub name: String,
    /// Element type, which sets the bytes per element.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Length in bytes: number of elements times element size.
    pub bytes: u64,
    /// 64-bit XXH3 of the bytes; the receiver rejects bytes with another value (T0706).
    pub checksum: u64,
}

impl TensorSpec {
    /// Formats dtype and shape as `bf16[512, 4096]`.
    #[must_use]
    pub fn type_text(&self) -> String {
        format!("{}{:?}", self.dtype, self.shape)
    }

    /// Returns the length that follows from dtype and shape, or `None` on overflow or too many
    /// dims.
    fn implied_bytes(&self) -> Option<u64> {
        if self.shape.len() > MAX_DIMS {
            return None;
        }
        self.shape.iter().try_fold(self.dtype.element_bytes(), |n, d| n.checked_mul(*d))
    }
}

/// A tensor with its manifest entry. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    spec: TensorSpec,
    /// The bytes follow a frame's meta: the meta serializes the manifest entry alone, and the
    /// frame's decoder adds the bytes.
    #[serde(skip)]
    data: Arc<Vec<u8>>,
}

impl Tensor {
    /// Wraps little-endian bytes in row-major order.
    ///
    /// # Errors
    /// T0706 if the length does not follow from dtype and shape.
    pub fn new(
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        data: impl Into<Vec<u8>>,
    ) -> Result<Tensor, Diagnostic> {
        let data: Vec<u8> = data.into();
        let bytes = data.len() as u64;
        let spec = TensorSpec {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
            bytes,
            checksum: xxh3_64(&data),
        };
        check_length(&spec)?;
        Ok(Tensor { spec, data: Arc::new(data) })
    }

    /// Creates an `f32` tensor.
    ///
    /// # Errors
    /// T0706 if the number of values does not match the shape.
    pub fn from_f32(name: &str, shape: &[u64], values: &[f32]) -> Result<Tensor, Diagnostic> {
        let mut bytes = vec![0; 4 * values.len()];
        bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(to, v)| *to = v.to_le_bytes());
        Tensor::new(name, Dtype::F32, shape, bytes)
    }

    /// Returns this tensor with the rows of another one behind its own. The first extents add up.
    ///
    /// # Errors
    /// T0706 if dtypes or further extents differ, or if one of them is a scalar.
    pub fn with_rows_of(&self, other: &Tensor) -> Result<Tensor, Diagnostic> {
        let (a, b) = (&self.spec, &other.spec);
        match (&a.shape[..], &b.shape[..]) {
            ([rows, width @ ..], [more, other_width @ ..]) if a.dtype == b.dtype && width == other_width => {
                let shape: Vec<u64> = std::iter::once(rows + more).chain(width.iter().copied()).collect();
                Tensor::new(&a.name, a.dtype, &shape, [self.data(), other.data()].concat())
            }
            _ => Err(Diagnostic::error(&T0706, format!("rows of two types for the tensor `{}`", a.name))
                .with_label("first", a.type_text())
                .with_label("second", b.type_text())),
        }
    }

    /// Returns the values as `f32`, or `None` for an integer tensor.
    #[must_use]
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        match self.spec.dtype {
            Dtype::F32 => Some(self.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::Bf16 => Some(
                self.data
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
                    .collect(),
            ),
            Dtype::I64 | Dtype::U8 => None,
        }
    }

    /// Returns the number of values that are NaN or infinite, and the index of the first; `None` if all are
    /// finite, as integers are.
    #[must_use]
    pub fn find_nonfinite(&self) -> Option<(usize, usize)> {
        /// The upper half of an f32 is a bf16, and holds the whole exponent.
        const EXPONENT: u16 = 0x7f80;
        fn find<const N: usize>(values: &[[u8; N]]) -> Option<(usize, usize)> {
            let is_finite = |v: &[u8; N]| u16::from_le_bytes([v[N - 2], v[N - 1]]) & EXPONENT != EXPONENT;
            // A scan without an early end is vectorised, and usually no value is found.
            let count = values.iter().filter(|v| !is_finite(v)).count();
            (count > 0).then(|| (count, values.iter().position(|v| !is_finite(v)).unwrap_or(0)))
        }
        match self.spec.dtype {
            Dtype::F32 => find(self.data.as_chunks::<4>().0),
            Dtype::Bf16 => find(self.data.as_chunks::<2>().0),
            Dtype::I64 | Dtype::U8 => None,
        }
    }

    /// Returns the name in the manifest.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the manifest entry: name, element type, shape and length in bytes.
    #[must_use]
    pub fn manifest_entry(&self) -> &TensorSpec {
        &self.spec
    }

    /// Returns the little-endian bytes in row-major order.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}

/// The tensors of one frame or call, in manifest order.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tensors(pub Vec<Tensor>);

impl Tensors {
    /// Returns the tensor named `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|t| t.name() == name)
    }

    /// Returns the length of all tensors together in bytes, without the manifest.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.0.iter().map(|t| t.spec.bytes).sum()
    }

    /// Returns a digest of all tensors, in order; zeros if there are none. The digest of one tensor is that
    /// of its bytes. Of further tensors it covers the checksums: they may be pixels, 14 MB for a chunk of
    /// 480 × 832, and the next call waits for the digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        if self.0.is_empty() {
            return Digest::default();
        }
        let mut hash = blake3::Hasher::new();
        for (i, tensor) in self.0.iter().enumerate() {
            match i {
                0 => hash.update(tensor.data()),
                _ => hash.update(&tensor.spec.checksum.to_le_bytes()),
            };
        }
        Digest(*hash.finalize().as_bytes())
    }

    /// Splits a frame's payload into the bytes of the tensors, whose manifest was decoded from the
    /// frame's meta.
    pub(super) fn attach_payload(&mut self, payload: &[u8]) -> Result<(), Diagnostic> {
        self.check_manifest()?;
        let listed = self.0.iter().try_fold(0u64, |n, t| n.checked_add(t.spec.bytes));
        if listed != Some(payload.len() as u64) {
            return Err(Diagnostic::error(&T0706, "the manifest does not cover the tensor bytes")
                .with_label(
                    "manifest",
                    listed.map_or("more than 2^64 bytes".into(), |n| format!("{n} bytes")),
                )
                .with_label("frame", format!("{} bytes", payload.len())));
        }
        let mut rest = payload;
        for Tensor { spec, data } in &mut self.0 {
            // The conversion cannot truncate: an entry is at most the sum, and the sum is the
            // payload's length.
            let (bytes, tail) = rest.split_at(spec.bytes as usize);
            rest = tail;
            let found = xxh3_64(bytes);
            if found != spec.checksum {
                return Err(Diagnostic::error(
                    &T0706,
                    format!("the bytes of tensor `{}` do not match its checksum", spec.name),
                )
                .with_label("manifest", format!("checksum {:016x}", spec.checksum))
                .with_label("frame", format!("checksum {found:016x}")));
            }
            *data = Arc::new(bytes.to_vec());
        }
        Ok(())
    }

    /// Checks the number, names and lengths of the manifest's tensors.
    pub(super) fn check_manifest(&self) -> Result<(), Diagnostic> {
        if self.0.len() > MAX_TENSORS {
            return Err(Diagnostic::error(&T0706, "too many tensors in one manifest")
                .with_label("manifest", format!("{} tensors", self.0.len()))
                .with_label("limit", format!("{MAX_TENSORS} tensors")));
        }
        for (i, t) in self.0.iter().enumerate() {
            check_length(&t.spec)?;
            if self.0[..i].iter().any(|other| other.name() == t.name()) {
                return Err(Diagnostic::error(&T0706, format!("tensor `{}` is listed twice", t.name())));
            }
        }
        Ok(())
    }
}

fn check_length(spec: &TensorSpec) -> Result<(), Diagnostic> {
    let implied = spec.implied_bytes();
    if implied == Some(spec.bytes) {
        return Ok(());
    }
    let implied = implied.map_or("no possible length".to_string(), |n| format!("{n} bytes"));
    Err(Diagnostic::error(&T0706, format!("tensor `{}` has the wrong length", spec.name))
        .with_label("dtype and shape", format!("{} is {implied}", spec.type_text()))
        .with_label("actual length", format!("{} bytes", spec.bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_finite_are_found() {
        let mut values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let tensor = |values: &[f32]| Tensor::from_f32("x", &[values.len() as u64], values).unwrap();
        assert_eq!(tensor(&values).to_f32().as_ref(), Some(&values));
        assert_eq!(tensor(&values).find_nonfinite(), None);
        (values[999], values[992]) = (f32::NAN, f32::NEG_INFINITY);
        assert_eq!(tensor(&values).find_nonfinite(), Some((2, 992)));
        let halves = Tensor::new("x", Dtype::Bf16, &[3], vec![0x80, 0x3f, 0xc0, 0x7f, 0x80, 0xff]).unwrap();
        assert_eq!(halves.find_nonfinite(), Some((2, 1)));
        assert_eq!(Tensor::new("x", Dtype::U8, &[2], vec![0xff, 0xff]).unwrap().find_nonfinite(), None);
    }

    #[test]
    fn the_digest_covers_every_tensor() {
        let tensor = |name: &str, v: f32| Tensor::from_f32(name, &[1], &[v]).unwrap();
        let digest = |a: f32, b: f32| Tensors(vec![tensor("latents", a), tensor("pixels", b)]).digest();
        assert_ne!(digest(1.0, 2.0), digest(1.0, 3.0));
        assert_ne!(digest(1.0, 2.0), digest(0.5, 2.0));
        assert_eq!(
            Tensors(vec![tensor("latents", 1.0)]).digest().0,
            *blake3::hash(&1f32.to_le_bytes()).as_bytes()
        );
    }
}
