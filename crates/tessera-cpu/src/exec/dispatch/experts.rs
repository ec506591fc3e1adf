//! Ops that route tokens to experts.

use tessera_device::Fault;
use tessera_ir::{ValueId, views};

use super::{KernelInputs, KernelRun};
use crate::kernels;

impl<'a> KernelInputs<'a> {
    /// Returns the experts that tokens chose, each of which is one of `experts`.
    fn chosen_experts(&self, v: ValueId, experts: u64) -> Result<&'a [f32], Fault> {
        let chosen = self.values(v)?;
        let is_expert = |e: &&f32| e.fract() == 0.0 && (0.0..experts as f32).contains(*e);
        match chosen.iter().find(|e| !is_expert(e)) {
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

    pub(super) fn run_expert_slots(&mut self, v: &views::ExpertSlots) -> Result<(), Fault> {
        // The op knows no number of experts: whole numbers below 2^24 are.
        let chosen = self.inputs.chosen_experts(v.experts, 1 << 24)?;
        kernels::expert_slots(self.out, chosen, v.capacity as usize);
        Ok(())
    }

    pub(super) fn run_expert_counts(&mut self, v: &views::ExpertCounts) -> Result<(), Fault> {
        let chosen = self.inputs.chosen_experts(v.experts, v.groups)?;
        kernels::expert_counts(self.out, chosen, self.inputs.values(v.slots)?);
        Ok(())
    }

    pub(super) fn run_expert_pack(&mut self, v: &views::ExpertPack) -> Result<(), Fault> {
        let x = &self.inputs;
        let extents = (x.width(v.x), x.width(v.experts), v.capacity as usize);
        let (chosen, slots) = (x.chosen_experts(v.experts, v.groups)?, x.chosen_slots(v.slots, v.capacity)?);
        kernels::expert_pack(self.out, x.values(v.x)?, chosen, slots, extents);
        Ok(())
    }

    pub(super) fn run_grouped_matmul(&mut self, v: &views::GroupedMatmul) -> Result<(), Fault> {
        let x = &self.inputs;
        let (shape, counts) = (x.shape(v.x), x.values(v.counts)?);
        if let Some(n) = counts.iter().find(|n| n.fract() != 0.0 || !(0.0..=shape[1] as f32).contains(*n)) {
            return Err(Fault::Failed(format!("{n} of {} slots", shape[1])));
        }
        let extents = [shape[1] as usize, x.shape(v.w)[1] as usize, shape[2] as usize];
        let operands = [x.values(v.x)?, x.values(v.w)?, counts];
        kernels::grouped_matmul(self.pool, self.scratch, self.out, operands, extents, v.act);
        Ok(())
    }

    pub(super) fn run_expert_combine(&mut self, v: &views::ExpertCombine) -> Result<(), Fault> {
        let x = &self.inputs;
        let shape = x.shape(v.y);
        let chosen = x.chosen_experts(v.experts, shape[0])?;
        let slots = x.chosen_slots(v.slots, shape[1])?;
        let extents = (shape[2] as usize, x.width(v.experts), shape[1] as usize);
        kernels::expert_combine(
            self.pool,
            self.out,
            x.values(v.y)?,
            [chosen, slots, x.values(v.weights)?],
            extents,
        );
        Ok(())
    }
}
