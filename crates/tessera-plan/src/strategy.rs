//! The sharding rules of each strategy for weights, buffers and inputs.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::op_traits::LoweringRule;
use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::{Axis, AxisLayout, DimName, Shard};

use crate::Strategy;
use crate::codes::T0606;

/// The `part` of a weight that stays whole.
const WHOLE: &str = "whole";

/// Reports `part` hints of sources that no strategy knows.
pub(crate) fn check_parts(phases: &[Program]) -> Diagnostics {
    let mut ds = Vec::new();
    for (p, op) in phases.iter().flat_map(|p| p.ops.iter().map(move |op| (p, op))) {
        if let (Some(want), Some(part)) = (expected_part(p, op), op.part_hint()) {
            let name = op.name.as_deref().unwrap_or_default();
            ds.push(
                Diagnostic::error(&T0606, format!("no strategy can shard part {part:?} of `{name}`"))
                    .with_label(format!("@{}", p.name), format!("{} `{name}`", op.opcode.name()))
                    .with_hint(want),
            );
        }
    }
    ds
}

/// Reports ops that no strategy can shard. As row-wise ops they might pass their rules and still be
/// slow or wrong.
pub(crate) fn check_opcodes(phases: &[Program]) -> Diagnostics {
    let cut_by_none = |op: &&Op| op.opcode.table_row().traits.lowering == LoweringRule::Refused;
    let refuse = |p: &Program, op: &Op| {
        Diagnostic::error(&T0606, format!("no strategy can shard {}", op.opcode.name()))
            .with_label(format!("@{}", p.name), "this phase")
            .with_hint("write the programs of the roles in text and check them, or use attention and matmul")
    };
    phases.iter().flat_map(|p| p.ops.iter().filter(cut_by_none).map(move |op| refuse(p, op))).collect()
}

/// Returns the legal values of a source's `part`, as text, if the source has another one.
fn expected_part(p: &Program, op: &Op) -> Option<&'static str> {
    let part = op.part_hint()?;
    let dims = op.results.first().map_or(0, |r| p.type_of(*r).shape.len());
    let (fits, want) = match op.opcode {
        Opcode::Weight => {
            let cut = || part.parse::<DimName>().is_ok_and(|d| d.dim_index(dims).is_some());
            (
                part == WHOLE || cut(),
                "a weight's part is `col`, `row`, `experts` or `whole`, and names a dim of the weight",
            )
        }
        Opcode::Input => (part == "tokens", "an input's part is `tokens`"),
        _ => (false, "only weights and inputs have a part"),
    };
    (!fits).then_some(want)
}

/// The rules by which a strategy shards sources, over a number of ranks.
pub(crate) struct ShardingRules {
    pub(crate) strategy: Strategy,
    pub(crate) tp: u32,
    /// The axis whose ranks have experts of their own, and their number.
    pub(crate) expert_axis: Axis,
    pub(crate) expert_ranks: u32,
    /// Width of a head: the unit of sharded heads.
    pub(crate) head_dim: u64,
}

impl ShardingRules {
    /// Returns the layout over tp of a weight, from its `part`.
    pub(crate) fn weight_layout(&self, op: &Op, shape: &[u64]) -> AxisLayout {
        let unit = op.unit_hint().unwrap_or(1);
        let has_whole_experts = shape.len() == 3 && self.expert_axis == Axis::Tp;
        if self.strategy == Strategy::Ulysses || self.tp == 1 || has_whole_experts {
            return AxisLayout::Replicated;
        }
        let part = op.part_hint().filter(|p| *p != WHOLE).and_then(|p| p.parse::<DimName>().ok());
        match part.and_then(|p| p.dim_index(shape.len())) {
            Some(dim) => self.shard_layout(dim, shape[dim], unit),
            None => AxisLayout::Replicated,
        }
    }

    /// Returns the layout of a weight over the axis of the experts: their matrices are sharded by expert.
    pub(crate) fn expert_layout(&self, shape: &[u64]) -> AxisLayout {
        match shape {
            [experts, _, _] if self.expert_ranks > 1 => Shard::new(0, *experts, 1, self.expert_ranks)
                .map_or(AxisLayout::Replicated, AxisLayout::Shard),
            _ => AxisLayout::Replicated,
        }
    }

    /// Returns the layout over tp of a buffer. The name of a buffer tells its content: `kv.*` and
    /// `cross.*` hold keys and values of a block, any other a latent's tokens.
    pub(crate) fn buffer_layout(&self, name: &str, shape: &[u64]) -> AxisLayout {
        let family = name.split('.').next().unwrap_or(name);
        match (self.strategy, family) {
            (_, "kv") | (Strategy::Megatron, "cross") => self.shard_layout(1, shape[1], self.head_dim),
            (Strategy::Megatron, _) | (_, "cross") => AxisLayout::Replicated,
            (Strategy::Ulysses, _) => self.token_layout(shape),
        }
    }

    /// Returns the layout over tp of a value with one row per token: sharded under ulysses,
    /// replicated under megatron.
    pub(crate) fn token_layout(&self, shape: &[u64]) -> AxisLayout {
        match self.strategy {
            Strategy::Megatron => AxisLayout::Replicated,
            Strategy::Ulysses => self.shard_layout(0, shape[0], 1),
        }
    }

    /// Returns the layout over tp of a value whose columns are sharded by whole heads.
    pub(crate) fn head_layout(&self, width: u64) -> AxisLayout {
        self.shard_layout(1, width, self.head_dim)
    }

    fn shard_layout(&self, dim: usize, extent: u64, unit: u64) -> AxisLayout {
        if self.tp == 1 {
            return AxisLayout::Replicated;
        }
        // `Mapping::check_fit` has already rejected a mapping that leaves a rank without a unit.
        Shard::new(dim, extent, unit, self.tp).map_or(AxisLayout::Replicated, AxisLayout::Shard)
    }
}

/// Returns whether every reader of a logical value needs it sharded by heads: attention over a
/// cache that is sharded so, or a write to that cache. The all-to-all of such a value can start as
/// soon as the value exists.
pub(crate) fn all_readers_want_heads(
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

/// Returns whether the op that produces a value reads a block's self-attention KV cache.
pub(crate) fn reads_self_cache(p: &Program, producer: Option<usize>) -> bool {
    producer.and_then(|i| p.ops[i].buffer).is_some_and(|b| p.buffer(b).name.starts_with("kv."))
}
