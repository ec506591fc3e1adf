//! A model with fewer blocks, where its blocks are alike.

use std::collections::BTreeMap;
use std::ops::Range;

use tessera_ir::{Attr, Op, Program, Type, ValueId};

use crate::Logical;
use crate::source::{Owner, Source};

/// Fewest blocks that a shortened model has: the first may read and the last may be something else than those between.
pub(super) const FEWEST: u64 = 3;

/// A model whose blocks from the second to the last but one are alike in every phase: op by op the same, of the same
/// shapes, reading their own values, what the last op of the block before made, and what stands outside all blocks.
/// Lowering sees no more of them than that, so it says the same of each.
pub(super) struct Alike<'a> {
    logical: &'a Logical,
    phases: Vec<Vec<Range<usize>>>,
}

impl<'a> Alike<'a> {
    /// None where blocks differ, or are so few that none can be left out.
    pub fn of(logical: &'a Logical) -> Option<Alike<'a>> {
        if logical.blocks <= FEWEST || !own_names(logical) {
            return None;
        }
        let phases = logical.phases.iter().map(|p| blocks_of(p, logical.blocks)).collect::<Option<_>>()?;
        Some(Alike { logical, phases })
    }

    /// The model with `blocks` of its blocks, at least [`FEWEST`] and at most all: the first ones and the last.
    pub fn shortened(&self, blocks: u64) -> Logical {
        let l = self.logical;
        let phase = |(p, spans): (&Program, &Vec<Range<usize>>)| {
            if spans.is_empty() { p.clone() } else { without(p, spans, blocks) }
        };
        Logical {
            phases: l.phases.iter().zip(&self.phases).map(phase).collect(),
            calls: Vec::new(),
            heads: l.heads,
            dim: l.dim,
            ffn: l.ffn,
            tokens: l.tokens,
            blocks,
        }
    }
}

/// The program without the blocks from `keep - 1` to the last but one. What read the last of those reads the last that is
/// kept before.
fn without(p: &Program, spans: &[Range<usize>], keep: u64) -> Program {
    let (kept, last) = (keep as usize - 2, spans.len() - 1);
    let dropped = spans[kept + 1].start..spans[last].start;
    let mut instead: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for (from, to) in spans[last - 1].clone().zip(spans[kept].clone()) {
        instead.extend(p.ops[from].results.iter().copied().zip(p.ops[to].results.iter().copied()));
    }
    let read = |v: &mut ValueId| *v = instead.get(v).copied().unwrap_or(*v);
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

/// Whether every weight, input and buffer that a block uses is its own, in all phases.
fn own_names(logical: &Logical) -> bool {
    let mut whose: BTreeMap<(&str, &str), Option<u64>> = BTreeMap::new();
    logical.phases.iter().all(|p| {
        let owners = Source::of(p).owners;
        p.ops.iter().zip(owners).all(|(op, owner)| {
            let block = if let Owner::Block(b) = owner { Some(b) } else { None };
            let named = op.name.as_deref().map(|n| (op.opcode.name(), n));
            let buffer = op.buffer.map(|b| ("buffer", p.buffer(b).name.as_str()));
            named.into_iter().chain(buffer).all(|name| *whose.entry(name).or_insert(block) == block)
        })
    })
}

/// The ops of each block, none where the phase has no blocks. `None` where they are not alike.
fn blocks_of(p: &Program, blocks: u64) -> Option<Vec<Range<usize>>> {
    let source = Source::of(p);
    let mut spans: Vec<Range<usize>> = Vec::new();
    let mut block_of: Vec<Option<usize>> = vec![None; p.ops.len()];
    for (i, owner) in source.owners.iter().enumerate() {
        let Owner::Block(b) = *owner else { continue };
        let at = usize::try_from(b).ok()?;
        // Blocks stand one behind another, each in one piece.
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
        let makers = op.uses().filter_map(|v| source.defs[v.0 as usize]);
        // Of the block before only what its last op made: nothing lives longer than a block, and all stages hand on the same.
        let near = |d: usize| match (block_of[i], block_of[d]) {
            (_, None) => true,
            (Some(here), Some(from)) => from == here || from + 1 == here && d + 1 == spans[from].end,
            (None, Some(from)) => from == last,
        };
        if !op.after.is_empty() || !makers.into_iter().all(near) {
            return None;
        }
    }
    let facts = Facts { p, defs: &source.defs, block_of: &block_of, spans: &spans };
    let like_the_second = |at: usize| {
        let (one, other) = (spans[1].clone(), spans[at].clone());
        one.len() == other.len() && one.zip(other).all(|(i, j)| facts.same(i, j))
    };
    // A stage behind the first block is stood for by one behind a block in the middle.
    let (zeroth, first) = (spans[0].clone(), spans[1].clone());
    let begins_alike = zeroth.len() == first.len() && zeroth.zip(first).all(|(i, j)| facts.same_op(i, j));
    (begins_alike && (2..last).all(like_the_second)).then_some(spans)
}

struct Facts<'a> {
    p: &'a Program,
    defs: &'a [Option<usize>],
    block_of: &'a [Option<usize>],
    spans: &'a [Range<usize>],
}

/// Where a value stands, seen from a block.
#[derive(PartialEq)]
enum Seen {
    /// So many blocks back, result of the op at a place in that block.
    Near(usize, usize, usize),
    Outside(ValueId),
}

impl Facts<'_> {
    /// Whether two ops of two blocks are the same, each seen from its own.
    fn same(&self, i: usize, j: usize) -> bool {
        let (a, b) = (&self.p.ops[i], &self.p.ops[j]);
        self.same_op(i, j) && a.uses().map(|v| self.seen(i, v)).eq(b.uses().map(|v| self.seen(j, v)))
    }

    /// The same, whatever they read.
    fn same_op(&self, i: usize, j: usize) -> bool {
        let (a, b) = (&self.p.ops[i], &self.p.ops[j]);
        let types = |op: &Op| op.results.iter().map(|r| self.p.ty(*r)).collect::<Vec<_>>();
        let keys = |op: &Op| op.keyed.iter().map(|(k, _)| *k).collect::<Vec<_>>();
        a.opcode == b.opcode
            && (a.issue, a.stream, a.name.is_some()) == (b.issue, b.stream, b.name.is_some())
            && keys(a) == keys(b)
            && types(a) == types(b)
            && constants(a).eq(constants(b))
            && self.buffer(a) == self.buffer(b)
    }

    /// What a buffer is to a strategy.
    fn buffer(&self, op: &Op) -> Option<(&str, bool, &Type)> {
        let b = op.buffer.map(|b| self.p.buffer(b))?;
        Some((b.name.split('.').next().unwrap_or_default(), b.name.contains('.'), &b.ty))
    }

    fn seen(&self, from: usize, v: ValueId) -> Seen {
        let near = self.defs[v.0 as usize].and_then(|d| {
            let (here, there) = (self.block_of[from]?, self.block_of[d]?);
            let result = self.p.ops[d].results.iter().position(|r| *r == v)?;
            Some(Seen::Near(here - there, d - self.spans[there].start, result))
        });
        near.unwrap_or(Seen::Outside(v))
    }
}

fn constants(op: &Op) -> impl Iterator<Item = (&String, &Attr)> {
    op.attrs.iter().filter(|(k, _)| *k != "at")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{Builder, DType, Opcode};

    /// Blocks of one product each and a last op that reads them.
    fn chain(blocks: u64, width: impl Fn(u64) -> u64, from: impl Fn(u64) -> u64) -> Logical {
        let mut b = Builder::logical("p");
        let mut made = vec![b.input("x", Type::new(DType::F32, [4, 8]))];
        for i in 0..blocks {
            let at = format!("block.{i}");
            b.attr("at", at.as_str());
            let w = b.weight(&format!("w.{i}"), Type::new(DType::F32, [width(i), 8]));
            b.attr("at", at.as_str());
            let y = b.op(Opcode::Matmul, &[made[from(i) as usize], w]);
            made.push(y);
        }
        b.attr("at", "last").output("y", made[made.len() - 1]);
        let p = b.finish().unwrap_or_else(|e| panic!("{e:?}"));
        Logical { phases: vec![p], calls: vec![], heads: 1, dim: 8, ffn: 8, tokens: 4, blocks }
    }

    #[test]
    fn blocks_in_the_middle_are_left_out() {
        let l = chain(7, |_| 8, |i| i);
        let short = Alike::of(&l).unwrap().shortened(4);
        let p = &short.phases[0];
        let names: Vec<&str> =
            p.ops.iter().filter(|o| o.opcode == Opcode::Weight).filter_map(|o| o.name.as_deref()).collect();
        assert_eq!(names, ["w.0", "w.1", "w.2", "w.6"]);
        let (third, last) = (&p.ops[6], &p.ops[8]);
        assert_eq!(last.operands[0], third.results[0]);
        assert_eq!((last.str("at"), short.blocks), (Some("block.3"), 4));
        let all = Alike::of(&l).unwrap().shortened(7);
        assert_eq!(all.phases, l.phases);
    }

    #[test]
    fn blocks_that_differ_are_not_alike() {
        assert!(Alike::of(&chain(3, |_| 8, |i| i)).is_none(), "too few");
        let other_width = chain(6, |i| if i == 5 { 4 } else { 8 }, |i| i);
        assert!(Alike::of(&other_width).is_some(), "the last may be another");
        let mut middle = chain(6, |_| 8, |i| i);
        middle.phases[0].ops[6].attrs.insert("act".to_string(), "silu".into());
        assert!(Alike::of(&middle).is_none());
        let mut zeroth = chain(6, |_| 8, |i| i);
        zeroth.phases[0].ops[2].attrs.insert("act".to_string(), "silu".into());
        assert!(Alike::of(&zeroth).is_none(), "what stands behind it would be stood for wrongly");
        let mut early = chain(6, |_| 8, |i| i);
        for block in 1..6 {
            let weight_before = early.phases[0].ops[2 * block - 1].results[0];
            early.phases[0].ops[2 * block + 2].operands[1] = weight_before;
        }
        assert!(Alike::of(&early).is_none(), "a value that is not the block's last lives into the next");
        let far = chain(6, |_| 8, |i| i.saturating_sub(u64::from(i == 4)));
        assert!(Alike::of(&far).is_none(), "one reads the block before the last");
        let mut shared = chain(6, |_| 8, |i| i);
        shared.phases.push(shared.phases[0].clone());
        assert!(Alike::of(&shared).is_some());
        shared.phases[1].ops[3].name = Some("w.3".to_string());
        assert!(Alike::of(&shared).is_none(), "a weight of another block");
    }
}
