//! Rules of the ops that route tokens to experts with slots of fixed number.

use tessera_mesh::{AxisLayout, Shard};

use super::{RuleContext, RuleResult, rule_error};
use crate::codes::{T0210, T0213, T0215};
use crate::{DType, Type, views};

impl RuleContext<'_> {
    pub(super) fn top_k_experts_type(&self, v: &views::TopKExperts) -> RuleResult<Type> {
        let [tokens, experts] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        if !experts.is_multiple_of(v.groups) || v.keep_groups > v.groups {
            return rule_error(
                &T0215,
                format!("{} of {} groups of {experts} experts", v.keep_groups, v.groups),
            );
        }
        let candidates = experts / v.groups * v.keep_groups;
        if v.top_k > candidates {
            let whose = if v.groups > 1 { " in the groups that are kept" } else { "" };
            return rule_error(&T0215, format!("`top_k` is {} of {candidates} experts{whose}", v.top_k));
        }
        if let Some(correction) =
            v.correction.map(|c| self.program.type_of(c)).filter(|t| t.shape != [experts])
        {
            return rule_error(
                &T0210,
                format!("`correction` is {} for {experts} experts", correction.display_on(self.mesh)),
            );
        }
        Ok(Type::new(DType::F32, [tokens, v.top_k]))
    }

    pub(super) fn expert_weights_type(&self) -> RuleResult<Type> {
        let [tokens, experts] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        let [of, k] = self.choices_shape(&[1])?;
        if of != tokens || k > experts {
            return rule_error(
                &T0210,
                format!("experts {} of the logits {}", self.display_operand(1), self.display_operand(0)),
            );
        }
        Ok(self.operands[1].clone())
    }

    pub(super) fn expert_slots_type(&self) -> RuleResult<Type> {
        self.choices_shape(&[0])?;
        Ok(self.operands[0].clone())
    }

    pub(super) fn expert_counts_type(&self, v: &views::ExpertCounts) -> RuleResult<Type> {
        self.choices_shape(&[0, 1])?;
        Ok(Type::new(DType::F32, [v.groups, 1]))
    }

    pub(super) fn expert_pack_type(&self, v: &views::ExpertPack) -> RuleResult<Type> {
        let ([tokens, d], [of, _]) = (self.matrix_shape(0)?, self.choices_shape(&[1, 2])?);
        self.check_replicated(0)?;
        if of != tokens {
            return rule_error(
                &T0210,
                format!("experts {} of the tokens {}", self.display_operand(1), self.display_operand(0)),
            );
        }
        Ok(Type::new(self.operands[0].dtype, [v.groups, v.capacity, d]))
    }

    /// Returns the common shape of operands that say something of each choice of each token.
    fn choices_shape(&self, operands: &[usize]) -> RuleResult<[u64; 2]> {
        let first = operands[0];
        let shape = self.matrix_shape(first)?;
        operands.iter().try_for_each(|operand| self.check_replicated(*operand))?;
        match operands
            .iter()
            .find(|o| self.operands[**o].shape != shape || self.operands[**o].dtype != DType::F32)
        {
            None => Ok(shape),
            Some(other) => rule_error(
                &T0210,
                format!(
                    "{} beside {}: expected equal matrices of f32",
                    self.display_operand(*other),
                    self.display_operand(first)
                ),
            ),
        }
    }

    pub(super) fn grouped_matmul_type(&self, v: &views::GroupedMatmul) -> RuleResult<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let (x, w, counts) = (&self.operands[0].shape, &self.operands[1].shape, &self.operands[2].shape);
        let (&[groups, slots, k], &[w_groups, m, w_k]) = (&x[..], &w[..]) else {
            return rule_error(
                &T0210,
                format!(
                    "x {} · w {}: expected stacks of matrices",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        };
        if groups != w_groups || k != w_k || counts[..] != [groups, 1] {
            return rule_error(
                &T0210,
                format!(
                    "x {} · w {} with counts {}",
                    self.display_operand(0),
                    self.display_operand(1),
                    self.display_operand(2)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(x), S(w), S(counts)) if x == w && w == counts && x.dim == 0 => Some(l[0]),
            (R, S(w), R) if w.dim == 1 => Some(S(Shard { dim: 2, ..w })),
            (S(x), S(w), R) if x == w && x.dim == 2 => self.partial_layout(x),
            _ => None,
        })?;
        let partial = self.mesh.active_axes().find(|a| matches!(layout.on_axis(*a), Partial { .. }));
        if let Some(axis) = partial.filter(|_| v.act.is_some()) {
            return rule_error(&T0213, format!("an activation of partial sums over {axis}"));
        }
        Ok(self.type_like_first([groups, slots, m], layout))
    }

    pub(super) fn expert_combine_type(&self) -> RuleResult<Type> {
        let &[_, _, d] = &self.operands[0].shape[..] else {
            return rule_error(&T0210, format!("{} are no slots of experts", self.display_operand(0)));
        };
        let [tokens, _] = self.choices_shape(&[1, 2, 3])?;
        let layout = self.combine_layouts(&self.operand_layouts()[..1], |l| match l[0] {
            AxisLayout::Replicated | AxisLayout::Partial { .. } => Some(l[0]),
            AxisLayout::Shard(_) => None,
        })?;
        Ok(self.type_like_first([tokens, d], layout))
    }
}
