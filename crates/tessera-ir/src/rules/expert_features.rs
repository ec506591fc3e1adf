//! Rules of the ops that change what a router prefers: penalties by distance, and choices that a draw leaves out.

use tessera_mesh::AxisLayout;

use super::{RuleContext, RuleResult, rule_error};
use crate::codes::T0215;
use crate::{DType, Type, views};

impl RuleContext<'_> {
    pub(super) fn expert_locality_type(&self, v: &views::ExpertLocality) -> RuleResult<Type> {
        let [_, experts] = self.matrix_shape(0)?;
        let layout = self.token_layout(&[0])?;
        check_length("expert_groups", &v.expert_groups, experts)?;
        Ok(Type { layout, ..self.operands[0].clone() })
    }

    /// Infers the type of a distance over all tokens.
    pub(super) fn expert_distance_type(&self, distances: &[u64], expert_homes: &[u64]) -> RuleResult<Type> {
        let [_, experts] = self.matrix_shape(0)?;
        check_length("expert_homes", expert_homes, experts)?;
        let homes = distances.len().isqrt();
        if homes * homes != distances.len() {
            return rule_error(
                &T0215,
                format!("`distances` has {} numbers, which is no square", distances.len()),
            );
        }
        if let Some(home) = expert_homes.iter().find(|home| **home >= homes as u64) {
            return rule_error(
                &T0215,
                format!("`expert_homes` names the home {home}, but `distances` knows {homes}"),
            );
        }
        self.token_layout(&[0])?;
        let layout = self.combine_layouts(&self.operand_layouts()[..1], |l| match l[0] {
            AxisLayout::Shard(tokens) => self.partial_layout(tokens),
            other => Some(other),
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![1], layout })
    }

    pub(super) fn expert_draw_type(&self, v: &views::ExpertDraw) -> RuleResult<Type> {
        self.choices_shape(&[0])?;
        self.token_layout(&[0])?;
        check_length("seeds", &v.seeds, 2)?;
        self.check_sequences_of_tokens(v.start, v.tokens)?;
        Ok(self.operands[0].clone())
    }
}

fn check_length(name: &str, list: &[u64], expected: u64) -> RuleResult<()> {
    match list.len() as u64 == expected {
        true => Ok(()),
        false => rule_error(&T0215, format!("`{name}` has {} numbers instead of {expected}", list.len())),
    }
}
