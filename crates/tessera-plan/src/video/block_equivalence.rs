//! Shortens a model whose blocks are equivalent to a model with fewer blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use tessera_ir::{Attr, Op, Program, Type, ValueId};

use crate::LogicalModel;
use crate::ownership::{OpOwner, ProgramAnalysis};

/// Minimum blocks of a shortened model: the first block may read, and the last block may be,
/// something other than the interior ones.
pub(super) const MIN_BLOCKS: u64 = 3;

/// A model whose blocks from the second to the last but one are equivalent in every phase: op by op
/// equal, with equal shapes, reading their own values, the result of the last op of the previous
/// block, and values outside all blocks. Lowering depends on nothing else, so it treats each
/// interior block equally.
pub(super) struct EquivalentBlocks<'a> {
    logical: &'a LogicalModel,
    block_spans: Vec<Vec<Range<usize>>>,
}

impl<'a> EquivalentBlocks<'a> {
    /// Checks whether the interior blocks of a model are equivalent, so that a shortened model can
    /// stand for it. Returns `None` if they differ, or if the model has too few blocks to shorten.
    pub fn from_model(logical: &'a LogicalModel) -> Option<EquivalentBlocks<'a>> {
        if logical.blocks <= MIN_BLOCKS || !blocks_own_names(logical) {
            return None;
        }
        let phases = logical.phases.iter().map(|p| block_spans(p, logical.blocks)).collect::<Option<_>>()?;
        Some(EquivalentBlocks { logical, block_spans: phases })
    }

    /// Returns the model with `blocks` of its blocks, at least [`MIN_BLOCKS`] and at most all: the
    /// first ones and the last.
    pub fn shorten_to(&self, blocks: u64) -> LogicalModel {
        let l = self.logical;
        let phase = |(p, spans): (&Program, &Vec<Range<usize>>)| {
            if spans.is_empty() { p.clone() } else { drop_blocks(p, spans, blocks) }
        };
        LogicalModel {
            phases: l.phases.iter().zip(&self.block_spans).map(phase).collect(),
            calls: Vec::new(),
            heads: l.heads,
            head_dim: l.head_dim,
            hidden_size: l.hidden_size,
            ffn_size: l.ffn_size,
            tokens: l.tokens,
            blocks,
            experts: l.experts,
            decoder: l.decoder,
        }
    }
}

/// Returns the program without the blocks from `keep - 1` to the last but one. Readers of the last
/// dropped block read the last kept one before it instead.
fn drop_blocks(p: &Program, spans: &[Range<usize>], keep: u64) -> Program {
    let (kept, last) = (keep as usize - 2, spans.len() - 1);
    let dropped = spans[kept + 1].start..spans[last].start;
    let mut replacements: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for (from, to) in spans[last - 1].clone().zip(spans[kept].clone()) {
        replacements.extend(p.ops[from].results.iter().copied().zip(p.ops[to].results.iter().copied()));
    }
    let read = |v: &mut ValueId| *v = replacements.get(v).copied().unwrap_or(*v);
    let mut ops = Vec::with_capacity(p.ops.len() - dropped.len());
    for (i, op) in p.ops.iter().enumerate().filter(|(i, _)| !dropped.contains(i)) {
        let mut op = op.clone();
        if spans[last].contains(&i) {
            op.attrs.insert("at".to_string(), format!("block.{}", keep - 1).as_str().into());
            op.operands.iter_mut().for_each(read);
            op.keyed.iter_mut().for_each(|(_, v)| read(v));
        }
        ops.push(op);
    }
    Program {
        ops,
        name: p.name.clone(),
        dialect: p.dialect,
        role: p.role.clone(),
        mesh: p.mesh,
        streams: p.streams.clone(),
        buffers: p.buffers.clone(),
        values: p.values.clone(),
    }
}

/// Returns whether every weight, input and buffer of a block belongs to that block alone, in all
/// phases.
fn blocks_own_names(logical: &LogicalModel) -> bool {
    let mut whose: BTreeMap<(&str, &str), Option<u64>> = BTreeMap::new();
    logical.phases.iter().all(|p| {
        let owners = ProgramAnalysis::new(p).owners;
        p.ops.iter().zip(owners).all(|(op, owner)| {
            let block = if let OpOwner::Block(b) = owner { Some(b) } else { None };
            let named = op.name.as_deref().map(|n| (op.opcode.name(), n));
            let buffer = op.buffer.map(|b| ("buffer", p.buffer(b).name.as_str()));
            named.into_iter().chain(buffer).all(|name| *whose.entry(name).or_insert(block) == block)
        })
    })
}

/// Returns the op range of each block, empty if the phase has no blocks, or `None` if the blocks
/// are not equivalent.
fn block_spans(p: &Program, blocks: u64) -> Option<Vec<Range<usize>>> {
    let source = ProgramAnalysis::new(p);
    let mut spans: Vec<Range<usize>> = Vec::new();
    let mut block_of: Vec<Option<usize>> = vec![None; p.ops.len()];
    for (i, owner) in source.owners.iter().enumerate() {
        let OpOwner::Block(b) = *owner else { continue };
        let at = usize::try_from(b).ok()?;
        // Blocks must be consecutive, and the ops of each contiguous.
        let follows = spans.last().is_none_or(|s| s.end == i);
        match spans.len() {
            n if follows && at == n => spans.push(i..i + 1),
            n if follows && at + 1 == n => spans[at].end = i + 1,
            _ => return None,
        }
        block_of[i] = Some(at);
    }
    if spans.is_empty() {
        return Some(spans);
    }
    let last = (spans.len() as u64 == blocks).then(|| spans.len() - 1)?;
    for (i, op) in p.ops.iter().enumerate() {
        let makers = op.used_values().filter_map(|v| source.defs[v.0 as usize]);
        // A block may read only the last result of the previous block: then no value outlives its
        // block otherwise, and all stages pass on the same value.
        let is_reachable = |d: usize| match (block_of[i], block_of[d]) {
            (_, None) => true,
            (Some(here), Some(from)) => from == here || from + 1 == here && d + 1 == spans[from].end,
            (None, Some(from)) => from == last,
        };
        if !op.after.is_empty() || !makers.into_iter().all(is_reachable) {
            return None;
        }
    }
    let comparison = BlockComparison { program: p, defs: &source.defs, block_of: &block_of, spans: &spans };
    let equals_second = |at: usize| {
        let (one, other) = (spans[1].clone(), spans[at].clone());
        one.len() == other.len() && one.zip(other).all(|(i, j)| comparison.ops_equal(i, j))
    };
    // A stage that follows the first block is represented by one that follows an interior block.
    let (zeroth, first) = (spans[0].clone(), spans[1].clone());
    let begins_alike =
        zeroth.len() == first.len() && zeroth.zip(first).all(|(i, j)| comparison.signatures_equal(i, j));
    (begins_alike && (2..last).all(equals_second)).then_some(spans)
}

struct BlockComparison<'a> {
    program: &'a Program,
    defs: &'a [Option<usize>],
    block_of: &'a [Option<usize>],
    spans: &'a [Range<usize>],
}

/// The place of a value relative to the block that reads it, so that equivalent blocks have equal
/// references.
#[derive(PartialEq)]
enum RelativeValue {
    /// Number of blocks back, op index in that block, result index of that op.
    InBlock(usize, usize, usize),
    Outside(ValueId),
}

impl BlockComparison<'_> {
    /// Returns whether two ops of two blocks are equal, operands included, each relative to its own
    /// block.
    fn ops_equal(&self, i: usize, j: usize) -> bool {
        let (a, b) = (&self.program.ops[i], &self.program.ops[j]);
        self.signatures_equal(i, j)
            && a.used_values()
                .map(|v| self.relative_value(i, v))
                .eq(b.used_values().map(|v| self.relative_value(j, v)))
    }

    /// Returns whether two ops are equal apart from their operands.
    fn signatures_equal(&self, i: usize, j: usize) -> bool {
        let (a, b) = (&self.program.ops[i], &self.program.ops[j]);
        let types = |op: &Op| op.results.iter().map(|r| self.program.type_of(*r)).collect::<Vec<_>>();
        let keys = |op: &Op| op.keyed.iter().map(|(k, _)| *k).collect::<Vec<_>>();
        a.opcode == b.opcode
            && (a.issue, a.stream, a.name.is_some()) == (b.issue, b.stream, b.name.is_some())
            && keys(a) == keys(b)
            && types(a) == types(b)
            && static_attrs(a).eq(static_attrs(b))
            && self.buffer_signature(a) == self.buffer_signature(b)
    }

    /// Returns the properties of an op's buffer that a strategy reads: the family in its name,
    /// whether the name has a suffix, and its type.
    fn buffer_signature(&self, op: &Op) -> Option<(&str, bool, &Type)> {
        let b = op.buffer.map(|b| self.program.buffer(b))?;
        Some((b.name.split('.').next().unwrap_or_default(), b.name.contains('.'), &b.ty))
    }

    fn relative_value(&self, from: usize, v: ValueId) -> RelativeValue {
        let near = self.defs[v.0 as usize].and_then(|d| {
            let (here, there) = (self.block_of[from]?, self.block_of[d]?);
            let result = self.program.ops[d].results.iter().position(|r| *r == v)?;
            Some(RelativeValue::InBlock(here - there, d - self.spans[there].start, result))
        });
        near.unwrap_or(RelativeValue::Outside(v))
    }
}

fn static_attrs(op: &Op) -> impl Iterator<Item = (&String, &Attr)> {
    op.attrs.iter().filter(|(k, _)| *k != "at")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{Builder, DType, Opcode};

    /// Builds a model whose blocks are one matmul each, followed by an op that reads the last.
    fn chain_model(blocks: u64, width: impl Fn(u64) -> u64, from: impl Fn(u64) -> u64) -> LogicalModel {
        let mut b = Builder::new_logical("p");
        let mut made = vec![b.add_input("x", Type::new(DType::F32, [4, 8]))];
        for i in 0..blocks {
            let at = format!("block.{i}");
            b.set_attr("at", at.as_str());
            let w = b.add_weight(&format!("w.{i}"), Type::new(DType::F32, [width(i), 8]));
            b.set_attr("at", at.as_str());
            let y = b.add_op(Opcode::Matmul, &[made[from(i) as usize], w]);
            made.push(y);
        }
        b.set_attr("at", "last").add_output("y", made[made.len() - 1]);
        let p = b.finish().unwrap_or_else(|e| panic!("{e:?}"));
        LogicalModel {
            phases: vec![p],
            calls: vec![],
            heads: 1,
            head_dim: 8,
            hidden_size: 8,
            ffn_size: 8,
            tokens: 4,
            blocks,
            experts: 0,
            decoder: crate::DecoderPrecision::Exact,
        }
    }

    #[test]
    fn interior_blocks_are_dropped() {
        let l = chain_model(7, |_| 8, |i| i);
        let short = EquivalentBlocks::from_model(&l).unwrap().shorten_to(4);
        let p = &short.phases[0];
        let names: Vec<&str> =
            p.ops.iter().filter(|o| o.opcode == Opcode::Weight).filter_map(|o| o.name.as_deref()).collect();
        assert_eq!(names, ["w.0", "w.1", "w.2", "w.6"]);
        let (third, last) = (&p.ops[6], &p.ops[8]);
        assert_eq!(last.operands[0], third.results[0]);
        assert_eq!((last.placement_hint(), short.blocks), (Some("block.3"), 4));
        let all = EquivalentBlocks::from_model(&l).unwrap().shorten_to(7);
        assert_eq!(all.phases, l.phases);
    }

    #[test]
    fn different_blocks_are_not_equivalent() {
        assert!(EquivalentBlocks::from_model(&chain_model(3, |_| 8, |i| i)).is_none(), "too few");
        let other_width = chain_model(6, |i| if i == 5 { 4 } else { 8 }, |i| i);
        assert!(EquivalentBlocks::from_model(&other_width).is_some(), "the last block may differ");
        let mut middle = chain_model(6, |_| 8, |i| i);
        middle.phases[0].ops[6].attrs.insert("act".to_string(), "silu".into());
        assert!(EquivalentBlocks::from_model(&middle).is_none());
        let mut zeroth = chain_model(6, |_| 8, |i| i);
        zeroth.phases[0].ops[2].attrs.insert("act".to_string(), "silu".into());
        assert!(
            EquivalentBlocks::from_model(&zeroth).is_none(),
            "a stage after the first block would be represented wrongly"
        );
        let mut early = chain_model(6, |_| 8, |i| i);
        for block in 1..6 {
            let weight_before = early.phases[0].ops[2 * block - 1].results[0];
            early.phases[0].ops[2 * block + 2].operands[1] = weight_before;
        }
        assert!(
            EquivalentBlocks::from_model(&early).is_none(),
            "a value other than the block's last result lives into the next block"
        );
        let far = chain_model(6, |_| 8, |i| i.saturating_sub(u64::from(i == 4)));
        assert!(
            EquivalentBlocks::from_model(&far).is_none(),
            "one block reads the block before the previous one"
        );
        let mut shared = chain_model(6, |_| 8, |i| i);
        shared.phases.push(shared.phases[0].clone());
        assert!(EquivalentBlocks::from_model(&shared).is_some());
        shared.phases[1].ops[3].name = Some("w.3".to_string());
        assert!(EquivalentBlocks::from_model(&shared).is_none(), "the block uses a weight of another block");
    }
}
