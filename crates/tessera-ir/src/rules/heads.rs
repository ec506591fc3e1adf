//! Rules of the ops that work on the columns of each head.

use tessera_mesh::{AxisLayout, Shard, Uneven};

use super::{RuleContext, RuleResult, rule_error};
use crate::codes::T0210;
use crate::{Type, views};

/// Returns whether two dims are divided alike: the same ranks hold the same share of each.
pub(super) fn is_same_share(a: Shard, b: Shard) -> bool {
    a.subgroup_size == b.subgroup_size
        && match (a.uneven, b.uneven) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.unit > 0 && b.unit > 0 && a.extent.checked_mul(b.unit) == b.extent.checked_mul(a.unit)
            }
            _ => false,
        }
}

/// Returns the layout of columns in heads of `from` after each head got `to` columns.
pub(super) fn resize_heads(s: Shard, from: u64, to: u64) -> Option<AxisLayout> {
    let resize = |n: u64| n.is_multiple_of(from).then_some(n / from).and_then(|heads| heads.checked_mul(to));
    let uneven = match s.uneven {
        None => None,
        Some(u) if from == to => Some(u),
        Some(u) => Some(Uneven { extent: resize(u.extent)?, unit: resize(u.unit)? }),
    };
    Some(AxisLayout::Shard(Shard { uneven, ..s }))
}

impl RuleContext<'_> {
    pub(super) fn head_columns_type(&self, v: &views::HeadColumns) -> RuleResult<Type> {
        let [n, d] = self.matrix_shape(0)?;
        if !d.is_multiple_of(v.head_dim) || v.first + v.columns > v.head_dim {
            return rule_error(
                &T0210,
                format!(
                    "columns {} to {} of heads of {} in {}",
                    v.first,
                    v.first + v.columns,
                    v.head_dim,
                    self.display_operand(0)
                ),
            );
        }
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match l[0] {
            AxisLayout::Shard(s) if s.dim == 1 => resize_heads(s, v.head_dim, v.columns),
            AxisLayout::Replicated | AxisLayout::Shard(_) => Some(l[0]),
            AxisLayout::Partial { .. } => None,
        })?;
        Ok(self.type_like_first([n, d / v.head_dim * v.columns], layout))
    }

    pub(super) fn head_join_type(&self, v: &views::HeadJoin) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [rows, dy]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        let heads = d / v.head_dim;
        if n != rows || !d.is_multiple_of(v.head_dim) || heads == 0 || !dy.is_multiple_of(heads) || dy == 0 {
            return rule_error(
                &T0210,
                format!(
                    "{} in heads of {} and {}",
                    self.display_operand(0),
                    v.head_dim,
                    self.display_operand(1)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        let more = dy / heads;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(x), S(y)) if x.dim == 0 && x == y => Some(l[0]),
            (S(x), S(y)) if x.dim == 1 && resize_heads(y, more, v.head_dim) == Some(l[0]) => {
                resize_heads(x, v.head_dim, v.head_dim + more)
            }
            _ => None,
        })?;
        Ok(self.type_like_first([n, d + dy], layout))
    }

    pub(super) fn head_matmul_type(&self, v: &views::HeadMatmul) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [w_rows, width]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        let heads = w_rows / v.head_rows;
        let (k, out) = if v.transposed { (v.rows, width) } else { (width, v.rows) };
        let is_whole = w_rows.is_multiple_of(v.head_rows) && v.first + v.rows <= v.head_rows && heads > 0;
        if !is_whole || heads.checked_mul(k) != Some(d) {
            return rule_error(
                &T0210,
                format!(
                    "x {} · rows {} to {} of each {} of w {}",
                    self.display_operand(0),
                    v.first,
                    v.first + v.rows,
                    v.head_rows,
                    self.display_operand(1)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(x), R) if x.dim == 0 => Some(l[0]),
            (S(x), S(w)) if x.dim == 1 && w.dim == 0 => {
                let of_w = resize_heads(x, k, v.head_rows)?;
                (of_w == S(Shard { dim: 1, ..w })).then(|| resize_heads(x, k, out)).flatten()
            }
            _ => None,
        })?;
        Ok(self.type_like_first([n, heads * out], layout))
    }
}
