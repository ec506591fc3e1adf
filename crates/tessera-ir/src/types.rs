//! The type of a value: dtype, local shape and layout.

use std::fmt;

use tessera_base::Bytes;
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh};

/// Element type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE binary32, 4 bytes.
    F32,
    /// IEEE binary64, 8 bytes.
    F64,
    /// bfloat16: the exponent range of f32 with 7 stored mantissa bits.
    Bf16,
    /// IEEE binary16: 5 exponent and 10 stored mantissa bits.
    F16,
    /// FP8 with 4 exponent and 3 mantissa bits.
    E4m3,
    /// Signed 64-bit integer, used for call scalars.
    I64,
    /// Token that an issued collective returns for its wait.
    Ticket,
    /// Token of a recorded point on a stream.
    Event,
}

impl DType {
    const ALL: [(DType, &'static str, u64); 8] = [
        (DType::F32, "f32", 4),
        (DType::F64, "f64", 8),
        (DType::Bf16, "bf16", 2),
        (DType::F16, "f16", 2),
        (DType::E4m3, "e4m3", 1),
        (DType::I64, "i64", 8),
        (DType::Ticket, "ticket", 0),
        (DType::Event, "event", 0),
    ];

    /// Returns the name used in IR text.
    #[must_use]
    pub fn name(self) -> &'static str {
        DType::ALL[self as usize].1
    }

    /// Returns the bytes of one element.
    #[must_use]
    pub fn element_bytes(self) -> u64 {
        DType::ALL[self as usize].2
    }

    /// Parses the name used in IR text.
    #[must_use]
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.iter().find(|d| d.1 == name).map(|d| d.0)
    }
}

/// Type of a value on one rank: `f32[90, 60] {tp: shard(1)}`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Type {
    /// Format of each element, or the kind of token.
    pub dtype: DType,
    /// Local extents; empty for a scalar.
    pub shape: Vec<u64>,
    /// Layout of the global tensor over the mesh.
    pub layout: Layout,
}

impl Type {
    /// Creates the type of a replicated tensor.
    #[must_use]
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Type {
        Type { dtype, shape: shape.into(), layout: Layout::REPLICATED }
    }

    /// Creates the type of a scalar.
    #[must_use]
    pub fn scalar(dtype: DType) -> Type {
        Type::new(dtype, [])
    }

    /// Returns the same type with another layout on one axis.
    #[must_use]
    pub fn with_axis_layout(mut self, axis: Axis, layout: AxisLayout) -> Type {
        self.layout = self.layout.with_axis(axis, layout);
        self
    }

    /// Returns the number of elements on this rank.
    #[must_use]
    pub fn element_count(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the bytes on this rank.
    #[must_use]
    pub fn byte_size(&self) -> Bytes {
        Bytes(self.element_count() * self.dtype.element_bytes())
    }

    /// Returns whether this is an ordering token without data.
    #[must_use]
    pub fn is_token(&self) -> bool {
        matches!(self.dtype, DType::Ticket | DType::Event)
    }

    /// Formats the type as IR text; the layout lists every mesh axis with more than one rank.
    #[must_use]
    pub fn display_on(&self, mesh: &Mesh) -> String {
        let mut out = self.dtype.name().to_string();
        if !self.shape.is_empty() {
            let dims: Vec<String> = self.shape.iter().map(u64::to_string).collect();
            out += &format!("[{}]", dims.join(", "));
        }
        let axes: Vec<String> =
            mesh.active_axes().map(|a| format!("{a}: {}", self.layout.on_axis(a))).collect();
        let scalar = self.shape.is_empty()
            && mesh.active_axes().all(|a| self.layout.on_axis(a) == AxisLayout::Replicated);
        if !axes.is_empty() && !scalar {
            out += &format!(" {{{}}}", axes.join(", "));
        }
        out
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_of_size_one_is_omitted() {
        let mesh: Mesh = "pp=2".parse().unwrap();
        let term = AxisLayout::new_partial(tessera_mesh::Reduction::Sum);
        let shown =
            |t: Type| [t.display_on(&mesh), t.clone().with_axis_layout(Axis::Tp, term).display_on(&mesh)];
        assert_eq!(shown(Type::scalar(DType::F32)), ["f32"; 2]);
        assert_eq!(shown(Type::new(DType::F32, [2])), ["f32[2] {pp: replicated}"; 2]);
        assert_eq!(
            shown(Type::scalar(DType::F32).with_axis_layout(Axis::Pp, term)),
            ["f32 {pp: partial(sum)}"; 2]
        );
    }
}
