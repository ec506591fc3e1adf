//! Ops that route tokens to experts.

use tessera_device::Fault;
use tessera_ir::{ValueId, views};

use super::{KernelInputs, KernelRun};
use crate::kernels::{self, GroupSlots, MatmulWeight, TokenGroups};

/// Some ops know no number of experts: whole numbers below this one are experts.
const MAX_EXPERTS: u64 = 1 << 24;

impl<'a> KernelInputs<'a> {
    /// Returns how tokens share the slots of experts. `choices` has a row per token; the others are the capacity, the
    /// tokens of a group (all by default), and the tokens of the whole tensor that are no padding (all by default).
    fn token_groups(
        &self,
        choices: ValueId,
        (capacity, group_tokens, tokens): (u64, Option<u64>, Option<u64>),
    ) -> TokenGroups {
        let rows = self.shape(choices)[0] as usize;
        let real = tokens.map_or(rows, |n| (n as usize).saturating_sub(self.global_row(choices)).min(rows));
        TokenGroups {
            size: group_tokens.map_or(rows, |n| n as usize).max(1),
            k: self.width(choices),
            capacity: capacity as usize,
            real,
        }
    }

    /// Returns the experts that tokens chose, each of which is one of `experts`, or −1 for none.
    fn chosen_experts(&self, v: ValueId, experts: u64) -> Result<&'a [f32], Fault> {
        let chosen = self.values(v)?;
        let is_expert = |e: &&f32| e.fract() == 0.0 && (-1.0..experts as f32).contains(*e);
        match chosen.iter().find(|e| !is_expert(e)) {
            Some(e) => Err(Fault::Failed(format!("{e} is none of {experts} experts"))),
            None => Ok(chosen),
        }
    }

    /// Returns the experts that tokens chose, where each choice must be an expert.
    fn each_an_expert(&self, v: ValueId, experts: u64) -> Result<&'a [f32], Fault> {
        let chosen = self.chosen_experts(v, experts)?;
        match chosen.iter().find(|e| **e < 0.0) {
            Some(e) => Err(Fault::Failed(format!("{e} is none of {experts} experts"))),
            None => Ok(chosen),
        }
    }

    /// Returns the slots of choices, each of which is −1 or one of `capacity`.
    fn chosen_slots(&self, v: ValueId, capacity: u64) -> Result<&'a [f32], Fault> {
        let slots = self.values(v)?;
        let is_slot = |s: &&f32| s.fract() == 0.0 && (-1.0..capacity as f32).contains(*s);
        match slots.iter().find(|s| !is_slot(s)) {
            Some(s) => Err(Fault::Failed(format!("{s} is none of {capacity} slots"))),
            None => Ok(slots),
        }
    }
}

impl KernelRun<'_> {
    pub(super) fn run_top_k_experts(&mut self, v: &views::TopKExperts) -> Result<(), Fault> {
        let x = &self.inputs;
        let extents = (x.width(v.logits), v.top_k as usize);
        let choice = kernels::ExpertChoice {
            score: v.score,
            correction: v.correction.map(|c| x.values(c)).transpose()?,
            groups: v.groups as usize,
            keep_groups: v.keep_groups as usize,
        };
        kernels::top_k_experts(self.out, x.values(v.logits)?, extents, choice);
        if let (Some(start), Some(last)) = (x.sequence_starts(v.start)?, v.last) {
            let span = x.row_span(v.logits, v.tokens);
            kernels::clear_absent_choices(self.out, extents.1, span, (start, x.values(last)?));
        }
        Ok(())
    }

    pub(super) fn run_expert_weights(&mut self, v: &views::ExpertWeights) -> Result<(), Fault> {
        let x = &self.inputs;
        let extents = (x.width(v.logits), x.width(v.experts));
        let chosen = x.chosen_experts(v.experts, extents.0 as u64)?;
        kernels::expert_weights(
            self.out,
            x.values(v.logits)?,
            chosen,
            extents,
            (v.score, v.renormalise, v.scale),
        );
        Ok(())
    }

    pub(super) fn run_expert_gates(&mut self, v: &views::ExpertGates) -> Result<(), Fault> {
        let x = &self.inputs;
        let extents = (x.width(v.gates), x.width(v.experts));
        let chosen = x.each_an_expert(v.experts, extents.0 as u64)?;
        kernels::expert_gates(self.out, x.values(v.gates)?, chosen, extents);
        Ok(())
    }

    pub(super) fn run_expert_reroute(&mut self, v: &views::ExpertReroute) -> Result<(), Fault> {
        let x = &self.inputs;
        let ranking = x.chosen_experts(v.ranking, MAX_EXPERTS)?;
        let groups = TokenGroups {
            k: v.top_k as usize,
            ..x.token_groups(v.ranking, (v.capacity, v.group_tokens, v.tokens))
        };
        kernels::expert_reroute(self.out, ranking, x.width(v.ranking), v.reroutes as usize, groups);
        Ok(())
    }

    pub(super) fn run_expert_slots(&mut self, v: &views::ExpertSlots) -> Result<(), Fault> {
        let x = &self.inputs;
        let chosen = x.chosen_experts(v.experts, MAX_EXPERTS)?;
        let groups = x.token_groups(v.experts, (v.capacity, v.group_tokens, v.tokens));
        kernels::expert_slots(self.out, chosen, groups);
        Ok(())
    }

    pub(super) fn run_expert_counts(&mut self, v: &views::ExpertCounts) -> Result<(), Fault> {
        let x = &self.inputs;
        let chosen = x.chosen_experts(v.experts, v.groups)?;
        let groups = x.token_groups(v.experts, (0, v.group_tokens, None));
        let extents = (self.out_ty.shape[1] as usize, groups.size * groups.k);
        kernels::expert_counts(self.out, chosen, x.values(v.slots)?, extents);
        Ok(())
    }

    pub(super) fn run_expert_statistics(&mut self, v: &views::ExpertStatistics) -> Result<(), Fault> {
        let x = &self.inputs;
        let groups = x.token_groups(v.choices, (0, None, v.tokens));
        let experts = [v.choices, v.experts].map(|value| x.chosen_experts(value, v.groups));
        let [choices, experts] = experts;
        let operands = [choices?, experts?, x.values(v.slots)?];
        kernels::expert_statistics(self.out, operands, groups.real * groups.k);
        Ok(())
    }

    pub(super) fn run_expert_pack(&mut self, v: &views::ExpertPack) -> Result<(), Fault> {
        let x = &self.inputs;
        let (chosen, slots) = (x.chosen_experts(v.experts, v.groups)?, x.chosen_slots(v.slots, v.capacity)?);
        let groups = x.token_groups(v.experts, (v.capacity, v.group_tokens, None));
        let extents = (x.width(v.x), (self.out_ty.shape[1] / v.capacity) as usize);
        kernels::expert_pack(self.out, x.values(v.x)?, chosen, slots, extents, groups);
        Ok(())
    }

    pub(super) fn run_expert_pack_fused(&mut self, v: &views::ExpertPackFused) -> Result<(), Fault> {
        let x = &self.inputs;
        let chosen = x.chosen_experts(v.experts, v.groups)?;
        let groups = x.token_groups(v.experts, (v.capacity, v.group_tokens, v.tokens));
        let extents = (x.width(v.x), (self.out_ty.shape[1] / v.capacity) as usize);
        kernels::expert_pack_fused(self.out, x.values(v.x)?, chosen, extents, groups);
        Ok(())
    }

    pub(super) fn run_grouped_matmul(&mut self, v: &views::GroupedMatmul) -> Result<(), Fault> {
        let x = &self.inputs;
        let (shape, counts) = (x.shape(v.x), x.values(v.counts)?);
        let capacity = shape[1] / x.shape(v.counts)[1].max(1);
        if let Some(n) = counts.iter().find(|n| n.fract() != 0.0 || !(0.0..=capacity as f32).contains(*n)) {
            return Err(Fault::Failed(format!("{n} of {capacity} slots")));
        }
        let extents = [shape[1] as usize, x.shape(v.w)[1] as usize, shape[2] as usize];
        if let Some(bank) = x.tiered_weight(v.w) {
            return self.multiply_tiered(v, bank, extents);
        }
        let (operands, w) = ([x.values(v.x)?, counts], x.group_weights(v.w)?);
        kernels::grouped_matmul(self.pool, self.scratch, self.out, operands, w, extents, v.act);
        Ok(())
    }

    /// Multiplies experts as their matrices arrive in fast memory, and returns each matrix after its use.
    fn multiply_tiered(
        &mut self,
        v: &views::GroupedMatmul,
        bank: usize,
        extents: [usize; 3],
    ) -> Result<(), Fault> {
        let (x, counts) = (self.inputs.values(v.x)?, self.inputs.values(v.counts)?);
        let token_groups = self.inputs.width(v.counts);
        let mut slots = GroupSlots { out: &mut *self.out, x, counts, token_groups, extents };
        let (needed, unused): (Vec<usize>, Vec<usize>) =
            (0..counts.len() / token_groups.max(1)).partition(|expert| slots.has_rows(*expert));
        unused.into_iter().for_each(|expert| slots.clear(expert));
        for used in self.tiers.begin_pass(bank, &needed)? {
            let matrix = self.tiers.lend_expert(bank, used)?;
            slots.multiply(self.pool, self.scratch, used.expert, MatmulWeight::Packed(&matrix), v.act);
            self.tiers.return_expert(bank, used, matrix);
        }
        self.tiers.end_pass(bank);
        Ok(())
    }

    pub(super) fn run_expert_places(&mut self, v: &views::ExpertPlaces) -> Result<(), Fault> {
        let x = &self.inputs;
        let experts = v.residents.iter().max().map_or(0, |last| last + 1);
        let chosen = x.chosen_experts(v.experts, experts)?;
        let span = x.row_span(v.experts, v.tokens);
        let start = x.sequence_starts(v.start)?;
        kernels::expert_places(self.out, chosen, x.width(v.experts), (span, start), &v.residents);
        Ok(())
    }

    pub(super) fn run_expert_combine(&mut self, v: &views::ExpertCombine) -> Result<(), Fault> {
        let x = &self.inputs;
        let (ty, tokens) = (x.type_of(v.y), x.shape(v.experts)[0]);
        let all = ty.layout.global_shape(&ty.shape, &x.placement.mesh)[0];
        let count = v.group_tokens.map_or(1, |n| tokens / n).max(1);
        let groups = x.token_groups(v.experts, (ty.shape[1] / count, v.group_tokens, None));
        let chosen = x.chosen_experts(v.experts, all)?;
        let slots = x.chosen_slots(v.slots, ty.shape[1] / count)?;
        let first = x.global_row(v.y);
        let extents = (ty.shape[2] as usize, count as usize, first..first + ty.shape[0] as usize);
        let order = v.order.map(|o| x.values(o)).transpose()?.unwrap_or(chosen);
        let operands = [chosen, slots, x.values(v.weights)?, order];
        kernels::expert_combine(self.pool, self.out, x.values(v.y)?, operands, extents, groups);
        Ok(())
    }
}
