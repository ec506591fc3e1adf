//! What an op costs on one rank: floating-point operations, and bytes that must move at least once.

use tessera_base::{Bytes, Flops};

use crate::{Op, Opcode, Program};

/// Work of one op on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts two, an exponential or a sine eight.
    pub flops: Flops,
    /// Operands read once, results written once. Views move nothing.
    pub bytes: Bytes,
    /// Payload a collective hands to the link: the operand's local bytes.
    pub wire: Bytes,
}

/// The cost of an op.
#[must_use]
pub fn cost(p: &Program, op: &Op) -> Cost {
    let size = |i: usize| op.operands.get(i).map_or(0, |v| p.ty(*v).elements());
    let extent =
        |i: usize, d: usize| op.operands.get(i).and_then(|v| p.ty(*v).shape.get(d).copied()).unwrap_or(0);
    let out: u64 = op.results.iter().map(|r| p.ty(*r).elements()).sum();
    let flops = match op.opcode {
        Opcode::Matmul => 2 * extent(0, 0) * extent(0, 1) * extent(1, 0),
        Opcode::Attention => {
            let (n, d, r) = (extent(0, 0), extent(0, 1), extent(1, 0));
            let heads = d / op.int("head_dim").and_then(|h| u64::try_from(h).ok()).unwrap_or(d).max(1);
            4 * n * d * r + 10 * n * r * heads
        }
        Opcode::Softmax => 12 * out,
        Opcode::Dot => {
            let k = op.operands.first().and_then(|v| p.ty(*v).shape.last().copied()).unwrap_or(0);
            2 * out * k
        }
        // Every token at every expert it asks for, none dropped.
        Opcode::MoeRoute => 2 * out * extent(0, 1) * op.int("top_k").map_or(2, i64::unsigned_abs),
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
        op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)).map(|v| p.ty(*v).bytes().0).sum();
    // A buffer that an op computes with is read like an operand.
    let bank = op.buffer.filter(|_| op.opcode == Opcode::MoeRoute).map_or(0, |b| p.buffer(b).ty.bytes().0);
    let written: u64 = op.results.iter().map(|r| p.ty(*r).bytes().0).sum();
    let wire =
        if op.opcode.is_collective() { op.operands.first().map_or(0, |v| p.ty(*v).bytes().0) } else { 0 };
    Cost {
        flops: Flops(flops),
        bytes: Bytes(if moves { read + bank + written } else { 0 }),
        wire: Bytes(wire),
    }
}
