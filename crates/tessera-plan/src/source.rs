//! A logical program with what lowering asks of it at every op: who reads a value, which stages an op belongs to.

use tessera_ir::{Op, Program};

use crate::strategy::wanted_by_heads;

/// A logical program, and what is asked of it again and again.
pub(crate) struct Source<'a> {
    pub(crate) program: &'a Program,
    /// Definition site of each value.
    pub(crate) defs: Vec<Option<usize>>,
    /// The ops that read each value.
    pub(crate) readers: Vec<Vec<usize>>,
    /// Whose each op is.
    pub(crate) owners: Vec<Owner>,
    /// Whether every reader of an op's result wants it by heads.
    pub(crate) by_heads: Vec<bool>,
    /// Whether it is the leader's own.
    pub(crate) is_leaders: bool,
}

/// Which stages an op belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    First,
    Block(u64),
    Last,
    /// Every stage that needs it.
    All,
}

impl<'a> Source<'a> {
    pub(crate) fn of(program: &'a Program) -> Source<'a> {
        let owner = |op: &Op| match op.str("at") {
            Some("all") => Owner::All,
            Some("last") => Owner::Last,
            Some(at) => match at.strip_prefix("block.").and_then(|b| b.parse().ok()) {
                Some(block) => Owner::Block(block),
                None => Owner::First,
            },
            None => Owner::First,
        };
        let (defs, readers) = (program.definitions(), program.readers());
        Source {
            program,
            owners: program.ops.iter().map(owner).collect(),
            by_heads: (0..program.ops.len()).map(|i| wanted_by_heads(program, &readers, &defs, i)).collect(),
            defs,
            readers,
            is_leaders: is_leaders(program),
        }
    }
}

/// Whether a phase is the leader's own, wherever it stands: encode or decode.
fn is_leaders(p: &Program) -> bool {
    p.ops.iter().any(|o| o.str("at") == Some("leader"))
}
