//! Rules of the rows of a table by id, and of attention with a bias by distance.
//!
//! A text encoder, whose op the latter is, runs on one rank, the leader. Its rule accepts replicated operands
//! only.

use tessera_mesh::AxisLayout;

use super::{RuleContext, RuleResult, rule_error};
use crate::codes::{T0210, T0215};
use crate::{DType, Type, views};

impl RuleContext<'_> {
    pub(super) fn embed_type(&self) -> RuleResult<Type> {
        let [_, d] = self.matrix_shape(1)?;
        self.check_replicated(0)?;
        let layout = self.combine_layouts(&self.operand_layouts()[1..], |l| match l[0] {
            AxisLayout::Replicated => Some(AxisLayout::Replicated),
            AxisLayout::Shard(rows) if rows.dim == 0 => self.partial_layout(rows),
            _ => None,
        })?;
        match (&self.operands[0].shape[..], self.operands[0].dtype, self.operands[1].dtype) {
            (&[n], DType::F32, DType::F32 | DType::Bf16) => {
                Ok(Type { dtype: DType::F32, shape: vec![n, d], layout })
            }
            _ => rule_error(
                &T0210,
                format!(
                    "ids {} for the rows of {}: expected a vector of f32, and a matrix of f32 or bf16",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            ),
        }
    }

    pub(super) fn relative_attention_type(&self, v: &views::RelativeAttention) -> RuleResult<Type> {
        let (q, [buckets, heads]) = (self.matrix_shape(0)?, self.matrix_shape(3)?);
        [0, 1, 2, 3].into_iter().try_for_each(|operand| self.check_replicated(operand))?;
        [1, 2].into_iter().try_for_each(|operand| self.check_same_dtype(0, operand))?;
        self.check_vector_dtype(3, 0)?;
        let [k, values] = [self.matrix_shape(1)?, self.matrix_shape(2)?];
        if k[1] != q[1] || values != k || heads.checked_mul(v.head_dim) != Some(q[1]) {
            return rule_error(
                &T0210,
                format!(
                    "q {} k {} v {} with {heads} heads of {}",
                    self.display_operand(0),
                    self.display_operand(1),
                    self.display_operand(2),
                    v.head_dim
                ),
            );
        }
        if !buckets.is_multiple_of(2) || buckets < 4 {
            return rule_error(
                &T0210,
                format!(
                    "table {} has {buckets} buckets: expected an even number from 4, half of them for \
                     each direction",
                    self.display_operand(3)
                ),
            );
        }
        // The logarithmic buckets lie between the exact ones and this distance.
        if v.max_distance <= buckets / 4 {
            return rule_error(
                &T0215,
                format!(
                    "`max_distance` is {}, but the distances below {} have a bucket each",
                    v.max_distance,
                    buckets / 4
                ),
            );
        }
        Ok(self.operands[0].clone())
    }
}
