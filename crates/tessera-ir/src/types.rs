//! What a value is: dtype, local shape, layout.

use std::fmt;

use tessera_base::Bytes;
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh};

/// Element type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary64.
    F64,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// FP8 with 4 exponent bits.
    E4m3,
    /// Signed 64-bit integer: call scalars.
    I64,
    /// What an issued collective leaves until it is waited for.
    Ticket,
    /// A point on a stream.
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

    /// Spelling in IR text.
    #[must_use]
    pub fn name(self) -> &'static str {
        DType::ALL[self as usize].1
    }

    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        DType::ALL[self as usize].2
    }

    /// The dtype of a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.iter().find(|d| d.1 == name).map(|d| d.0)
    }
}

/// Type of a value on one rank: `f32[90, 60] {tp: shard(1)}`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Local extents; empty for a scalar.
    pub shape: Vec<u64>,
    /// How the global tensor lies over the mesh.
    pub layout: Layout,
}

impl Type {
    /// A replicated tensor.
    #[must_use]
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Type {
        Type { dtype, shape: shape.into(), layout: Layout::REPLICATED }
    }

    /// A scalar.
    #[must_use]
    pub fn scalar(dtype: DType) -> Type {
        Type::new(dtype, [])
    }

    /// The same type with another layout on one axis.
    #[must_use]
    pub fn on(mut self, axis: Axis, layout: AxisLayout) -> Type {
        self.layout = self.layout.with(axis, layout);
        self
    }

    /// Number of elements on this rank.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes on this rank.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.elements() * self.dtype.bytes())
    }

    /// Whether this is a token of order rather than data.
    #[must_use]
    pub fn is_token(&self) -> bool {
        matches!(self.dtype, DType::Ticket | DType::Event)
    }

    /// The text of the type; the layout names every axis of the mesh with more than one rank.
    #[must_use]
    pub fn display(&self, mesh: &Mesh) -> String {
        let mut out = self.dtype.name().to_string();
        if !self.shape.is_empty() {
            let dims: Vec<String> = self.shape.iter().map(u64::to_string).collect();
            out += &format!("[{}]", dims.join(", "));
        }
        let axes: Vec<String> = mesh.axes().map(|a| format!("{a}: {}", self.layout.on(a))).collect();
        let scalar =
            self.shape.is_empty() && mesh.axes().all(|a| self.layout.on(a) == AxisLayout::Replicated);
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
    fn an_axis_of_one_rank_says_nothing() {
        let mesh: Mesh = "pp=2".parse().unwrap();
        let term = AxisLayout::partial(tessera_mesh::Reduction::Sum);
        let shown = |t: Type| [t.display(&mesh), t.clone().on(Axis::Tp, term).display(&mesh)];
        assert_eq!(shown(Type::scalar(DType::F32)), ["f32"; 2]);
        assert_eq!(shown(Type::new(DType::F32, [2])), ["f32[2] {pp: replicated}"; 2]);
        assert_eq!(shown(Type::scalar(DType::F32).on(Axis::Pp, term)), ["f32 {pp: partial(sum)}"; 2]);
    }
}
