//! Rules of the ops that spell out attention and expert routing: softmax, batched matmul and the
//! fused expert routing op.
//!
//! `reduce_scatter → softmax → dot → all_gather` is correct only for some shardings but runs
//! without an error for all of them, so each message states what the ranks would have computed.

use tessera_mesh::{AxisLayout, Shard};

use super::{RuleContext, RuleResult, rule_error};
use crate::attr::Attr;
use crate::attr_kind::{AttrKind, Flag, QUANTIZED_TOKENS};
use crate::codes::{T0203, T0210, T0213, T0214, T0215};
use crate::{Attrs, Dialect, Type, views};

impl RuleContext<'_> {
    pub(super) fn softmax_type(&self, v: &views::Softmax) -> RuleResult<Type> {
        let Some(last) = self.operands[0].shape.len().checked_sub(1) else {
            return rule_error(
                &T0210,
                format!("softmax needs at least one dim, but the operand is {}", self.display_operand(0)),
            );
        };
        let dim = v.dim.unwrap_or(last);
        self.check_dim(dim)?;
        match self.axis_that_shards(&self.operands[0].layout, dim) {
            None => Ok(self.operands[0].clone()),
            Some(axis) => rule_error(
                &T0213,
                format!(
                    "softmax over dim {dim}, which is sharded over {axis}: each rank would normalise only its own shard"
                ),
            ),
        }
    }

    pub(super) fn bmm_type(&self, v: &views::Bmm) -> RuleResult<Type> {
        let rank = self.operands[0].shape.len();
        if rank < 2 || self.operands[1].shape.len() != rank {
            return rule_error(
                &T0210,
                format!(
                    "x {} · y {}: expected two matrices, or stacks of matrices with equal batch dims",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        let (rows, inner) = (rank - 2, rank - 1);
        let (y_inner, y_columns) = if v.transposed { (inner, rows) } else { (rows, inner) };
        // Compare global extents, so that mismatched shardings are reported as layout errors
        // instead of length errors.
        let whole = |i: usize| self.operands[i].layout.global_shape(&self.operands[i].shape, self.mesh);
        let (x, y) = (whole(0), whole(1));
        if x[..rows] != y[..rows] {
            return rule_error(
                &T0210,
                format!("batch dims differ: x {} · y {}", self.display_operand(0), self.display_operand(1)),
            );
        }
        if x[inner] != y[y_inner] {
            return rule_error(
                &T0210,
                format!(
                    "inner extents differ: x {} · y {}",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        }
        let cut = BmmDims { rows, inner, y_inner, y_columns };
        let mut shape = self.operands[0].shape.clone();
        shape[inner] = self.operands[1].shape[y_columns];
        let mut out = self.type_like_first(shape, tessera_mesh::Layout::REPLICATED);
        for axis in self.mesh.active_axes() {
            let (x, y) = (self.operands[0].layout.on_axis(axis), self.operands[1].layout.on_axis(axis));
            match self.bmm_layout(cut, x, y) {
                Ok(on) => out = out.with_axis_layout(axis, on),
                Err(why) => {
                    return rule_error(&T0214, format!("dot of x {x} and y {y} on {axis}: {why}"));
                }
            }
        }
        Ok(out)
    }

    /// Returns the layout of the result on one axis, or the reason why there is none.
    fn bmm_layout(&self, cut: BmmDims, x: AxisLayout, y: AxisLayout) -> Result<AxisLayout, String> {
        use AxisLayout::{Replicated as R, Shard as S};
        let BmmDims { rows, inner, y_inner, y_columns } = cut;
        match (x, y) {
            (R, R) => Ok(R),
            (S(a), S(b)) if a == b && a.dim < rows => Ok(x),
            (S(a), R) if a.dim == rows => Ok(x),
            (R, S(b)) if b.dim == y_columns => Ok(S(Shard { dim: inner, ..b })),
            (S(a), S(b)) if a.dim == inner && b == (Shard { dim: y_inner, ..a }) => {
                self.partial_layout(a).ok_or_else(|| "a sum in `segments` needs equal shards".to_string())
            }
            (S(a), S(b)) if a.dim == rows && b.dim == y_columns => Err(format!(
                "x is sharded by rows (dim {rows}) and y by columns (dim {y_columns}): each rank would compute only its diagonal \
block"
            )),
            (S(a), _) if a.dim == inner => Err(format!(
                "x is sharded over the contraction (dim {inner}), but y is not sharded equally (dim {y_inner})"
            )),
            (_, S(b)) if b.dim == y_inner => Err(format!(
                "y is sharded over the contraction (dim {y_inner}), but x is not sharded equally (dim {inner})"
            )),
            (S(a), _) if a.dim < rows => Err(format!(
                "x is sharded over batch dim {} and y is not sharded equally: a rank would pair batches that do not belong \
together",
                a.dim
            )),
            (_, S(b)) if b.dim < rows => Err(format!(
                "y is sharded over batch dim {} and x is not sharded equally: a rank would pair batches that do not belong \
together",
                b.dim
            )),
            _ => Err("this pair of layouts is not supported; gather one operand first".to_string()),
        }
    }

    pub(super) fn moe_route_type(&self, v: &views::MoeRoute) -> RuleResult<Type> {
        if self.program.dialect == Dialect::Role {
            return rule_error(
                &T0203,
                "is a logical op: the program of a role packs tokens, issues all_to_all and unpacks them explicitly",
            );
        }
        let ([tokens, d], [g_tokens, experts]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        let bank = self.buffer_type()?;
        let fits = |s: &[u64]| s.len() == 3 && s[0] == experts && s[2] == d;
        if g_tokens != tokens || !fits(&bank.shape) || bank.dtype != self.operands[0].dtype {
            return rule_error(
                &T0210,
                format!(
                    "x {} with weights {} and experts {}: expected [tokens, d], [tokens, experts] and [experts, d_out, d]",
                    self.display_operand(0),
                    self.display_operand(1),
                    bank.display_on(self.mesh)
                ),
            );
        }
        if v.top_k > experts {
            let absent = if self.op.states_attr("top_k") { "" } else { " and defaults to 2" };
            return rule_error(
                &T0215,
                format!("`top_k`, the experts per token, must be an integer from 1 to {experts}{absent}"),
            );
        }
        if let Some(why) = quantize_without_policy(&self.op.attrs) {
            return rule_error(&T0215, why);
        }
        Ok(self.type_like_first([tokens, bank.shape[1]], tessera_mesh::Layout::REPLICATED))
    }
}

/// Indices of the dims of a batched matmul's operands; x and the result share the row dim.
#[derive(Clone, Copy)]
struct BmmDims {
    rows: usize,
    inner: usize,
    y_inner: usize,
    y_columns: usize,
}

/// Returns why 8-bit tokens need a numerics policy, if the attributes of an op request them without
/// the one that allows them.
pub(crate) fn quantize_without_policy(attrs: &Attrs) -> Option<&'static str> {
    let quantized = attrs.get("quantize_fp8").and_then(Flag::parse) == Some(true);
    let allowed = attrs.get("policy") == Some(&Attr::Str(QUANTIZED_TOKENS.to_string()));
    (quantized && !allowed).then_some(
        "`quantize_fp8 = true` needs `policy = \"fp8_e4m3\"`: 8-bit tokens change the numbers, so a numerics policy \
must allow them by name",
    )
}
