//! Tensors as they travel: a manifest entry and little-endian bytes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};
use xxhash_rust::xxh3::xxh3_64;

use super::{MAX_DIMS, MAX_TENSORS};

/// A tensor manifest and its bytes disagree.
pub(crate) static T0706: Code = Code {
    id: "T0706",
    title: "tensor manifest and tensor bytes disagree",
    page: "Every tensor that travels is listed in its frame's tensor_specs: name, dtype, shape, byte length and \
checksum. The receiver allocates from that list alone, in its order, and refuses a length that does not follow \
from dtype and shape, a name that occurs twice, and bytes whose checksum differs.\n\nA wrong checksum in one tensor \
with a right frame checksum means that the sender listed one tensor and sent another, or sent them in another \
order: a fault in the sender, not in the link.",
};

/// Element types that may travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of an `f32`.
    Bf16,
    /// Signed 64-bit integers.
    I64,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
            Dtype::I64 => 8,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::I64 => "i64",
        })
    }
}

/// One entry of a manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name, such as `text` or `context`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, outermost first.
    pub shape: Vec<u64>,
    /// Length in bytes: elements times the size of one.
    pub bytes: u64,
    /// xxh3 of the bytes.
    pub checksum: u64,
}

impl TensorSpec {
    /// `bf16[512, 4096]`.
    #[must_use]
    pub fn type_text(&self) -> String {
        format!("{}{:?}", self.dtype, self.shape)
    }

    /// Length that follows from dtype and shape; `None` on overflow or too many dims.
    fn implied_bytes(&self) -> Option<u64> {
        if self.shape.len() > MAX_DIMS {
            return None;
        }
        self.shape.iter().try_fold(self.dtype.bytes(), |n, d| n.checked_mul(*d))
    }
}

/// A tensor with its manifest entry. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    spec: TensorSpec,
    data: Arc<[u8]>,
}

impl Tensor {
    /// Wraps little-endian bytes, row-major. Refused if the length does not follow from dtype and shape.
    pub fn new(
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        data: impl Into<Arc<[u8]>>,
    ) -> Result<Tensor, Diagnostic> {
        let data = data.into();
        let bytes = data.len() as u64;
        let spec = TensorSpec {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
            bytes,
            checksum: xxh3_64(&data),
        };
        check_length(&spec)?;
        Ok(Tensor { spec, data })
    }

    /// An `f32` tensor.
    pub fn from_f32(name: &str, shape: &[u64], values: &[f32]) -> Result<Tensor, Diagnostic> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor::new(name, Dtype::F32, shape, bytes)
    }

    /// The values as `f32`; `None` for an integer tensor.
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
            Dtype::I64 => None,
        }
    }

    /// Name in the manifest.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The manifest entry.
    #[must_use]
    pub fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    /// Little-endian bytes, row-major.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }
}

/// The tensors of one frame or call, in manifest order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tensors(pub Vec<Tensor>);

impl Tensors {
    /// The tensor of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.iter().find(|t| t.name() == name)
    }

    /// The manifest.
    #[must_use]
    pub fn specs(&self) -> Vec<TensorSpec> {
        self.0.iter().map(|t| t.spec.clone()).collect()
    }

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|t| t.spec.bytes).sum()
    }

    /// Cuts a payload by its manifest.
    pub(super) fn cut(specs: Vec<TensorSpec>, payload: &[u8]) -> Result<Tensors, Diagnostic> {
        check_manifest(&specs)?;
        let listed = specs.iter().try_fold(0u64, |n, s| n.checked_add(s.bytes));
        if listed != Some(payload.len() as u64) {
            return Err(Diagnostic::error(&T0706, "the manifest does not cover the tensor bytes")
                .at("manifest", listed.map_or("more than 2^64 bytes".into(), |n| format!("{n} bytes")))
                .at("frame", format!("{} bytes", payload.len())));
        }
        let mut rest = payload;
        let mut tensors = Vec::with_capacity(specs.len());
        for spec in specs {
            // Every entry is at most the sum, and the sum is the payload's length.
            let (data, tail) = rest.split_at(spec.bytes as usize);
            rest = tail;
            let found = xxh3_64(data);
            if found != spec.checksum {
                return Err(Diagnostic::error(
                    &T0706,
                    format!("the bytes at the place of tensor `{}` are not its bytes", spec.name),
                )
                .at("manifest", format!("checksum {:016x}", spec.checksum))
                .at("frame", format!("checksum {found:016x}")));
            }
            tensors.push(Tensor { spec, data: data.into() });
        }
        Ok(Tensors(tensors))
    }
}

/// Count, names and lengths of a manifest.
pub(super) fn check_manifest(specs: &[TensorSpec]) -> Result<(), Diagnostic> {
    if specs.len() > MAX_TENSORS {
        return Err(Diagnostic::error(&T0706, "too many tensors in one manifest")
            .at("manifest", format!("{} tensors", specs.len()))
            .at("limit", format!("{MAX_TENSORS} tensors")));
    }
    for (i, spec) in specs.iter().enumerate() {
        check_length(spec)?;
        if specs[..i].iter().any(|s| s.name == spec.name) {
            return Err(Diagnostic::error(&T0706, format!("tensor `{}` is listed twice", spec.name)));
        }
    }
    Ok(())
}

fn check_length(spec: &TensorSpec) -> Result<(), Diagnostic> {
    let implied = spec.implied_bytes();
    if implied == Some(spec.bytes) {
        return Ok(());
    }
    let implied = implied.map_or("no possible length".to_string(), |n| format!("{n} bytes"));
    Err(Diagnostic::error(&T0706, format!("tensor `{}` has the wrong length", spec.name))
        .at("dtype and shape", format!("{} is {implied}", spec.type_text()))
        .at("length", format!("{} bytes", spec.bytes)))
}
