//! Which ops of a program one launch computes, and which collectives run inside of other launches.
//!
//! The planners here decide from a program and its planned slots alone, so that tests run them
//! without a GPU.

pub(crate) mod comm_fusion;
pub(crate) mod horizontal_fusion;
pub(crate) mod kernel_fusion;
pub(crate) mod launch_step;
mod slot_check;

use tessera_ir::{Opcode, Program};

/// Returns whether the op writes rows of a matrix into a buffer whose rows have the same width.
fn writes_matrix_rows(p: &Program, j: usize) -> bool {
    let op = &p.ops[j];
    let Some(b) = op.buffer else { return false };
    let (from, to) = (p.type_of(op.operands[0]), &p.buffer(b).ty);
    op.opcode == Opcode::CacheWrite && from.shape.len() == 2 && from.shape[1..] == to.shape[1..]
}
