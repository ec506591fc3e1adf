//! What each strategy asks of weights, buffers and inputs.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::{AxisLayout, DimName, Shard};

use crate::Strategy;
use crate::lower::T0606;

/// The `part` of a weight that nobody cuts.
const WHOLE: &str = "whole";

/// Hints of sources that no strategy knows.
pub(crate) fn unknown_parts(phases: &[Program]) -> Diagnostics {
    let mut ds = Vec::new();
    for (p, op) in phases.iter().flat_map(|p| p.ops.iter().map(move |op| (p, op))) {
        if let (Some(want), Some(part)) = (unknown_part(p, op), op.attrs.get("part")) {
            let name = op.name.as_deref().unwrap_or_default();
            ds.push(
                Diagnostic::error(
                    &T0606,
                    format!("part {part:?} of `{name}` is not one that a strategy can cut"),
                )
                .at(format!("@{}", p.name), format!("{} `{name}`", op.opcode.name()))
                .hint(want),
            );
        }
    }
    ds
}

/// Ops that no strategy cuts. Taken for ops that work row by row they might pass their rules and be slow or wrong.
pub(crate) fn without_strategy(phases: &[Program]) -> Diagnostics {
    let cut_by_none = |op: &&Op| matches!(op.opcode, Opcode::Softmax | Opcode::Dot | Opcode::MoeRoute);
    let refuse = |p: &Program, op: &Op| {
        Diagnostic::error(&T0606, format!("no strategy cuts {}", op.opcode.name()))
            .at(format!("@{}", p.name), "this phase")
            .hint("write the programs of the roles by hand and check them, or use attention and matmul")
    };
    phases.iter().flat_map(|p| p.ops.iter().filter(cut_by_none).map(move |op| refuse(p, op))).collect()
}

/// What a source's `part` may say, in words, if it says something else.
fn unknown_part(p: &Program, op: &Op) -> Option<&'static str> {
    op.attrs.get("part")?;
    let part = op.str("part").unwrap_or_default();
    let dims = op.results.first().map_or(0, |r| p.ty(*r).shape.len());
    let (fits, want) = match op.opcode {
        Opcode::Weight => {
            let cut = || part.parse::<DimName>().is_ok_and(|d| d.of(dims).is_some());
            (part == WHOLE || cut(), "a weight's part is `col`, `row`, `experts` or `whole`, of a dim it has")
        }
        Opcode::Input => (part == "tokens", "an input's part is `tokens`"),
        _ => (false, "only weights and inputs have a part"),
    };
    (!fits).then_some(want)
}

/// What a logical program says about how a source may be cut, and over how many ranks.
pub(crate) struct Cut {
    pub(crate) strategy: Strategy,
    pub(crate) tp: u32,
    /// Width of a head: attention's unit.
    pub(crate) head_dim: u64,
}

impl Cut {
    /// Layout over tp of a weight, by its `part`.
    pub(crate) fn weight(&self, op: &Op, shape: &[u64]) -> AxisLayout {
        let unit = op.int("unit").and_then(|u| u64::try_from(u).ok()).unwrap_or(1);
        if self.strategy == Strategy::Ulysses || self.tp == 1 {
            return AxisLayout::Replicated;
        }
        let part = op.str("part").filter(|p| *p != WHOLE).and_then(|p| p.parse::<DimName>().ok());
        match part.and_then(|p| p.of(shape.len())) {
            Some(dim) => self.shard(dim, shape[dim], unit),
            None => AxisLayout::Replicated,
        }
    }

    /// Layout over tp of a buffer. Buffers are named by what they hold: `kv.*` and `cross.*` keys and values of
    /// a block, anything else a latent's tokens.
    pub(crate) fn buffer(&self, name: &str, shape: &[u64]) -> AxisLayout {
        let family = name.split('.').next().unwrap_or(name);
        match (self.strategy, family) {
            (_, "kv") | (Strategy::Megatron, "cross") => self.shard(1, shape[1], self.head_dim),
            (Strategy::Megatron, _) | (_, "cross") => AxisLayout::Replicated,
            (Strategy::Ulysses, _) => self.tokens(shape),
        }
    }

    /// Tokens over tp.
    pub(crate) fn tokens(&self, shape: &[u64]) -> AxisLayout {
        match self.strategy {
            Strategy::Megatron => AxisLayout::Replicated,
            Strategy::Ulysses => self.shard(0, shape[0], 1),
        }
    }

    /// A value's heads over tp.
    pub(crate) fn heads(&self, width: u64) -> AxisLayout {
        self.shard(1, width, self.head_dim)
    }

    fn shard(&self, dim: usize, extent: u64, unit: u64) -> AxisLayout {
        if self.tp == 1 {
            return AxisLayout::Replicated;
        }
        // A mapping that leaves a rank without a unit was refused before lowering.
        Shard::of(dim, extent, unit, self.tp).map_or(AxisLayout::Replicated, AxisLayout::Shard)
    }
}

/// Whether every reader of a logical value wants it cut by heads: attention over a cache that is, or that
/// cache itself. Such a value's exchange can begin the moment it exists.
pub(crate) fn wanted_by_heads(
    p: &Program,
    readers: &[Vec<usize>],
    defs: &[Option<usize>],
    producer: usize,
) -> bool {
    let Some(v) = p.ops[producer].results.first() else { return false };
    let readers = &readers[v.0 as usize];
    !readers.is_empty()
        && readers.iter().map(|i| &p.ops[*i]).all(|o| match o.opcode {
            Opcode::CacheWrite => o.buffer.is_some_and(|b| p.buffer(b).name.starts_with("kv.")),
            Opcode::Attention => o.operands[0] == *v && reads_self_cache(p, defs[o.operands[1].0 as usize]),
            _ => false,
        })
}

/// Whether the op that makes a value reads a block's own keys and values.
pub(crate) fn reads_self_cache(p: &Program, maker: Option<usize>) -> bool {
    maker.and_then(|i| p.ops[i].buffer).is_some_and(|b| p.buffer(b).name.starts_with("kv."))
}
