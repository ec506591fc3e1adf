//! Stochastic rounding of the result of an op, by the places of its elements in the global tensor.

use tessera_ir::{StochasticRounding, ValueId};

use super::KernelRun;
use crate::kernels::round_by_words;

impl KernelRun<'_> {
    /// Rounds the result, which lies in the mesh as the operand `x` does, if the op states draws.
    pub(super) fn round_stochastically(&mut self, x: ValueId, draws: Option<StochasticRounding>) {
        let Some(draws) = draws else { return };
        let ty = self.inputs.type_of(x);
        let placement = &self.inputs.placement;
        let starts = ty.layout.global_ranges(&ty.shape, &placement.mesh, placement.coord());
        let whole = ty.layout.global_shape(&ty.shape, &placement.mesh);
        let Some((width, outer)) = ty.shape.split_last() else {
            return round_by_words(self.pool, self.out, 1, self.out_ty.dtype, draws.key, |_| draws.first_row);
        };
        let skipped = draws.first_row * whole.iter().skip(1).product::<u64>();
        // The index of the first element of a row, from the coordinates of the row in the dims before the last.
        let first_of_row = |row: usize| {
            let (mut rest, mut index, mut step) = (row as u64, 0, whole[outer.len()]);
            for dim in (0..outer.len()).rev() {
                index += (rest % outer[dim] + starts[dim].0) * step;
                rest /= outer[dim];
                step *= whole[dim];
            }
            skipped + index + starts[outer.len()].0
        };
        let width = *width as usize;
        round_by_words(self.pool, self.out, width, self.out_ty.dtype, draws.key, first_of_row);
    }
}
