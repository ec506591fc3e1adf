//! Ops that change what a router prefers.

use tessera_device::Fault;
use tessera_ir::{ValueId, views};

use super::{KernelInputs, KernelRun};
use crate::kernels::{self, ChoiceDraw, ExpertDistances, RowSpan};

/// Positions are whole numbers that f32 holds exactly.
const MAX_POSITION: f32 = (1 << 24) as f32;

impl KernelInputs<'_> {
    /// Returns where the rows of this rank lie in the whole tensor, of which `tokens` are no padding (all by default).
    pub(super) fn row_span(&self, v: ValueId, tokens: Option<u64>) -> RowSpan {
        let ty = self.type_of(v);
        let all = ty.layout.global_shape(&ty.shape, &self.placement.mesh)[0];
        RowSpan {
            first: self.global_row(v),
            all: all as usize,
            tokens: tokens.map_or(all, |n| n.min(all)) as usize,
        }
    }

    /// Returns the position at which each sequence begins, if the op reads it.
    pub(super) fn sequence_starts(&self, start: Option<ValueId>) -> Result<Option<&[f32]>, Fault> {
        let start = start.map(|s| self.values(s)).transpose()?;
        let is_position = |at: &&f32| at.fract() == 0.0 && (-1.0..MAX_POSITION).contains(*at);
        match start.unwrap_or_default().iter().find(|at| !is_position(at)) {
            Some(at) => Err(Fault::Failed(format!("a sequence begins at {at}"))),
            None => Ok(start),
        }
    }
}

impl KernelRun<'_> {
    pub(super) fn run_expert_locality(&mut self, v: &views::ExpertLocality) -> Result<(), Fault> {
        let x = &self.inputs;
        let groups = (&v.home_groups[..], &v.expert_groups[..]);
        kernels::expert_locality(self.out, x.values(v.logits)?, x.row_span(v.logits, None), groups, v.weight);
        Ok(())
    }

    pub(super) fn run_expert_distance(&mut self, v: &views::ExpertDistance) -> Result<(), Fault> {
        let x = &self.inputs;
        let distances = ExpertDistances { distances: &v.distances, expert_homes: &v.expert_homes };
        let span = x.row_span(v.logits, v.tokens);
        self.out[0] = kernels::expert_distance(x.values(v.logits)?, span, distances, v.weight);
        Ok(())
    }

    pub(super) fn run_expert_distance_gradient(
        &mut self,
        v: &views::ExpertDistanceGradient,
    ) -> Result<(), Fault> {
        let x = &self.inputs;
        let distances = ExpertDistances { distances: &v.distances, expert_homes: &v.expert_homes };
        let span = x.row_span(v.logits, v.tokens);
        kernels::expert_distance_gradient(self.out, x.values(v.logits)?, span, distances, v.weight);
        Ok(())
    }

    pub(super) fn run_expert_draw(&mut self, v: &views::ExpertDraw) -> Result<(), Fault> {
        let x = &self.inputs;
        let start = x.sequence_starts(v.start)?;
        let seeds = [v.seeds[0], v.seeds[1]];
        let draw = ChoiceDraw { keep: v.keep, layer: v.layer, seeds, start };
        kernels::expert_draw(
            self.out,
            x.values(v.choices)?,
            x.width(v.choices),
            x.row_span(v.choices, v.tokens),
            draw,
        );
        Ok(())
    }
}
