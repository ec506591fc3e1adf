//! Rules of the ops that route tokens to experts with slots of fixed number.

use tessera_mesh::{Axis, AxisLayout, Layout, Shard};

use super::{RuleContext, RuleResult, multiply_extents, rule_error};
use crate::codes::{T0210, T0213, T0214, T0215};
use crate::{DType, Type, ValueId, views};

impl RuleContext<'_> {
    pub(super) fn expert_tokens_type(&self, v: &views::ExpertTokens) -> RuleResult<Type> {
        let [tokens, d] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        if v.rows < tokens {
            return rule_error(&T0215, format!("`rows` is {} for {tokens} tokens", v.rows));
        }
        Ok(Type::new(self.operands[0].dtype, [v.rows, d]))
    }

    pub(super) fn top_k_experts_type(&self, v: &views::TopKExperts) -> RuleResult<Type> {
        let [tokens, experts] = self.matrix_shape(0)?;
        let layout = self.token_layout(&[0])?;
        if !experts.is_multiple_of(v.groups) || v.keep_groups > v.groups {
            return rule_error(
                &T0215,
                format!("{} of {} groups of {experts} experts", v.keep_groups, v.groups),
            );
        }
        if v.last.is_some() != v.start.is_some() {
            return rule_error(&T0215, "`last` and `start` are stated together".to_string());
        }
        self.check_sequences_of_tokens(v.start, v.tokens)?;
        self.check_sequences_of_tokens(v.last, v.tokens)?;
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
        Ok(Type { dtype: DType::F32, shape: vec![tokens, v.top_k], layout })
    }

    pub(super) fn expert_weights_type(&self) -> RuleResult<Type> {
        let [tokens, experts] = self.matrix_shape(0)?;
        let [of, k] = self.choices_shape(&[1])?;
        self.token_layout(&[0, 1])?;
        if of != tokens || k > experts {
            return rule_error(
                &T0210,
                format!("experts {} of the logits {}", self.display_operand(1), self.display_operand(0)),
            );
        }
        Ok(self.operands[1].clone())
    }

    pub(super) fn expert_reroute_type(&self, v: &views::ExpertReroute) -> RuleResult<Type> {
        let [tokens, experts] = self.choices_shape(&[0])?;
        let layout = self.token_layout(&[0])?;
        self.group_count(0, v.group_tokens)?;
        if v.top_k > experts {
            return rule_error(&T0215, format!("`top_k` is {} of {experts} experts", v.top_k));
        }
        Ok(self.type_like_first([tokens, v.top_k], layout))
    }

    pub(super) fn expert_places_type(&self, v: &views::ExpertPlaces) -> RuleResult<Type> {
        self.choices_shape(&[0])?;
        self.token_layout(&[0])?;
        self.check_sequences_of_tokens(v.start, v.tokens)?;
        let experts = v.residents.iter().max().map_or(0, |last| last + 1);
        match (0..experts).find(|e| !v.residents.contains(e)) {
            Some(e) => rule_error(&T0215, format!("`residents` gives expert {e} no place")),
            None if experts == 0 => rule_error(&T0215, "`residents` names no expert".to_string()),
            None => Ok(self.operands[0].clone()),
        }
    }

    /// Checks that each sequence has equally many of the rows of the whole first operand, of which those from `tokens` on are
    /// padding, if the op reads a number of each sequence.
    pub(super) fn check_sequences_of_tokens(
        &self,
        numbers: Option<ValueId>,
        tokens: Option<u64>,
    ) -> RuleResult<()> {
        let rows = self.operands[0].layout.global_shape(&self.operands[0].shape, self.mesh)[0];
        match tokens.filter(|tokens| *tokens > rows) {
            Some(tokens) => rule_error(&T0215, format!("`tokens` is {tokens} of {rows} rows")),
            None => numbers.map_or(Ok(()), |of| self.check_sequences(of, tokens.unwrap_or(rows)).map(|_| ())),
        }
    }

    pub(super) fn expert_slots_type(&self, v: &views::ExpertSlots) -> RuleResult<Type> {
        self.choices_shape(&[0])?;
        self.token_layout(&[0])?;
        self.group_count(0, v.group_tokens)?;
        Ok(self.operands[0].clone())
    }

    pub(super) fn expert_counts_type(&self, v: &views::ExpertCounts) -> RuleResult<Type> {
        self.choices_shape(&[0, 1])?;
        let layout = self.token_layout(&[0, 1])?;
        let groups = self.group_count(0, v.group_tokens)?;
        Ok(Type { dtype: DType::F32, shape: vec![v.groups, groups], layout: move_shards(layout, 1) })
    }

    pub(super) fn expert_statistics_type(&self, v: &views::ExpertStatistics) -> RuleResult<Type> {
        self.choices_shape(&[0, 1, 2])?;
        self.token_layout(&[0, 1, 2])?;
        let layout = self.combine_layouts(&self.operand_layouts()[..1], |l| match l[0] {
            AxisLayout::Shard(tokens) => self.partial_layout(tokens),
            other => Some(other),
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![v.groups, 4], layout })
    }

    /// Infers the type of tokens that lie in the slots of experts. `choices` are the operands with one number per
    /// choice.
    pub(super) fn expert_pack_type(
        &self,
        choices: &[usize],
        (experts, capacity, group_tokens): (u64, u64, Option<u64>),
    ) -> RuleResult<Type> {
        let ([tokens, d], [of, _]) = (self.matrix_shape(0)?, self.choices_shape(choices)?);
        let layout = self.token_layout(&[0, 1])?;
        if of != tokens {
            return rule_error(
                &T0210,
                format!("experts {} of the tokens {}", self.display_operand(1), self.display_operand(0)),
            );
        }
        let slots = multiply_extents(&[self.group_count(0, group_tokens)?, capacity])?;
        Ok(self.type_like_first([experts, slots, d], move_shards(layout, 1)))
    }

    /// Returns the common shape of operands that say something of each choice of each token.
    pub(super) fn choices_shape(&self, operands: &[usize]) -> RuleResult<[u64; 2]> {
        let first = operands[0];
        let shape = self.matrix_shape(first)?;
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

    /// Returns the common layout of operands with one row per token: on each axis, tokens are replicated or sharded
    /// in equal parts.
    pub(super) fn token_layout(&self, operands: &[usize]) -> RuleResult<Layout> {
        let layouts: Vec<Layout> = operands.iter().map(|o| self.operands[*o].layout).collect();
        self.combine_layouts(&layouts, |l| match l[0] {
            _ if l.iter().any(|on| *on != l[0]) => None,
            AxisLayout::Replicated | AxisLayout::Shard(Shard { dim: 0, uneven: None, .. }) => Some(l[0]),
            _ => None,
        })
    }

    /// Returns the number of token groups on a rank.
    fn group_count(&self, tokens: usize, group_tokens: Option<u64>) -> RuleResult<u64> {
        let (rows, sharded) =
            (self.operands[tokens].shape[0], self.axis_that_shards(&self.operands[tokens].layout, 0));
        match (group_tokens, sharded) {
            (None, None) => Ok(1),
            (Some(n), _) if rows.is_multiple_of(n) => Ok(rows / n),
            (Some(n), _) => rule_error(
                &T0215,
                format!("`group_tokens` is {n}, which does not divide {}", self.display_operand(tokens)),
            ),
            (None, Some(axis)) => rule_error(
                &T0215,
                format!(
                    "{} is sharded over {axis}: `group_tokens` must state how many tokens share the slots of an expert",
                    self.display_operand(tokens)
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
        let fits = |n: &[u64]| n.len() == 2 && n[0] == groups && slots.is_multiple_of(n[1].max(1));
        if groups != w_groups || k != w_k || !fits(counts) {
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
            // Every rank has all experts, and the slots of some token groups.
            (S(x), R, S(counts)) if x == counts && x.dim == 1 && x.uneven.is_none() => Some(l[0]),
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

    pub(super) fn expert_combine_type(&self, v: &views::ExpertCombine) -> RuleResult<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let &[_, slots, d] = &self.operands[0].shape[..] else {
            return rule_error(&T0210, format!("{} are no slots of experts", self.display_operand(0)));
        };
        let [tokens, _] = self.choices_shape(&[1, 2, 3])?;
        if let Some(order) = v.order.map(|o| self.program.type_of(o)).filter(|t| *t != self.operands[1]) {
            return rule_error(
                &T0214,
                format!("`order` is {} for experts {}", order.display_on(self.mesh), self.display_operand(1)),
            );
        }
        let groups = self.group_count(1, v.group_tokens)?;
        if !slots.is_multiple_of(groups.max(1)) {
            return rule_error(
                &T0210,
                format!("{} are no slots of {groups} groups of tokens", self.display_operand(0)),
            );
        }
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            _ if l[2] != l[1] || l[3] != l[1] => None,
            (R | Partial { .. }, R) => Some(l[0]),
            (S(y), S(tokens)) if y.dim == 1 && tokens == (Shard { dim: 0, ..y }) && y.uneven.is_none() => {
                Some(l[1])
            }
            (S(experts), R) if experts.dim == 0 => self.partial_layout(experts),
            _ => None,
        })?;
        Ok(self.type_like_first([tokens, d], layout))
    }
}

/// Returns a layout with every shard on another dim.
fn move_shards(layout: Layout, dim: usize) -> Layout {
    Axis::ALL.into_iter().fold(layout, |layout, axis| match layout.on_axis(axis) {
        AxisLayout::Shard(shard) => layout.with_axis(axis, AxisLayout::Shard(Shard { dim, ..shard })),
        AxisLayout::Replicated | AxisLayout::Partial { .. } => layout,
    })
}
