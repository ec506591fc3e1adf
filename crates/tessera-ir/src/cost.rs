//! Cost of an op on one rank: floating-point operations and minimum memory and link traffic.

use tessera_base::{Bytes, Flops};

use crate::{Op, Opcode, Program};

/// Cost of one op on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpWorkload {
    /// Floating-point operations: a multiply-add counts as two, an exponential or a sine as eight.
    pub flops: Flops,
    /// Memory traffic if each operand is read once and each result written once. Views cause no
    /// traffic.
    pub bytes: Bytes,
    /// Payload that a collective passes to the link: the local bytes of its operand.
    pub wire: Bytes,
}

/// Returns the cost of an op.
#[must_use]
pub fn op_workload(p: &Program, op: &Op) -> OpWorkload {
    let size = |i: usize| op.operands.get(i).map_or(0, |v| p.type_of(*v).element_count());
    let extent = |i: usize, d: usize| {
        op.operands.get(i).and_then(|v| p.type_of(*v).shape.get(d).copied()).unwrap_or(0)
    };
    let out: u64 = op.results.iter().map(|r| p.type_of(*r).element_count()).sum();
    let flops = match op.opcode {
        Opcode::Matmul => 2 * extent(0, 0) * extent(0, 1) * extent(1, 0),
        Opcode::Attention => {
            let (n, d, r) = (extent(0, 0), extent(0, 1), extent(1, 0));
            let heads = d / op.int_attr("head_dim").and_then(|h| u64::try_from(h).ok()).unwrap_or(d).max(1);
            4 * n * d * r + 10 * n * r * heads
        }
        Opcode::Softmax => 12 * out,
        Opcode::Bmm => {
            let k = op.operands.first().and_then(|v| p.type_of(*v).shape.last().copied()).unwrap_or(0);
            2 * out * k
        }
        // Assumes that no token is dropped at any of its experts.
        Opcode::MoeRoute => 2 * out * extent(0, 1) * op.int_attr("top_k").map_or(2, i64::unsigned_abs),
        Opcode::Renoise | Opcode::TimeEmbed => 16 * out,
        Opcode::Silu | Opcode::BiasAct => 10 * out,
        Opcode::LayerNorm | Opcode::NormModulate | Opcode::RmsNorm => 8 * out,
        Opcode::Rope | Opcode::RmsScale => 3 * out,
        Opcode::Add | Opcode::GateResidual | Opcode::Modulation | Opcode::ToX0 => 2 * out,
        Opcode::RowSquareSum => 2 * (size(0) + size(1)),
        Opcode::Cast => out,
        Opcode::Quantize => 3 * size(0),
        _ => 0,
    };
    let moves = !matches!(
        op.opcode,
        Opcode::CacheRead
            | Opcode::Weight
            | Opcode::Input
            | Opcode::Call
            | Opcode::EventRecord
            | Opcode::Output
    );
    let read: u64 =
        op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)).map(|v| p.type_of(*v).byte_size().0).sum();
    // A buffer that an op computes with is read in full, like an operand.
    let bank =
        op.buffer.filter(|_| op.opcode == Opcode::MoeRoute).map_or(0, |b| p.buffer(b).ty.byte_size().0);
    let written: u64 = op.results.iter().map(|r| p.type_of(*r).byte_size().0).sum();
    let wire = if op.opcode.is_collective() {
        op.operands.first().map_or(0, |v| p.type_of(*v).byte_size().0)
    } else {
        0
    };
    OpWorkload {
        flops: Flops(flops),
        bytes: Bytes(if moves { read + bank + written } else { 0 }),
        wire: Bytes(wire),
    }
}
