//! Changes to the list of collectives of one rank, or of all that take part in one meeting.

use tessera_ir::{DType, Opcode};
use tessera_mesh::{Group, Mesh, Rank};

use crate::set::{ALIKE, Call, Held, SHAPES, What, has_layout, holds, kinds, knows};
use tessera_base::random::Dice;

/// One change. Places are taken modulo what is there, so that it still means something in a smaller set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutation {
    /// What changes.
    pub kind: MutationKind,
    rank: usize,
    at: usize,
    arg: usize,
    /// The same change on every rank of the meeting: often harmless.
    everywhere: bool,
}

/// What changes in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "named by what they do; `name` has the words")]
pub enum MutationKind {
    Drop,
    Swap,
    Duplicate,
    OtherCount,
    OtherShape,
    OtherLayout,
    OtherDim,
    Regroup,
    OtherRoot,
    OtherReduction,
    OtherDtype,
    OtherPeer,
    SplitBatch,
    OtherGraph,
}

impl MutationKind {
    /// All of them.
    pub const ALL: [MutationKind; 14] = [
        MutationKind::Drop,
        MutationKind::Swap,
        MutationKind::Duplicate,
        MutationKind::OtherCount,
        MutationKind::OtherShape,
        MutationKind::OtherLayout,
        MutationKind::OtherDim,
        MutationKind::Regroup,
        MutationKind::OtherRoot,
        MutationKind::OtherReduction,
        MutationKind::OtherDtype,
        MutationKind::OtherPeer,
        MutationKind::SplitBatch,
        MutationKind::OtherGraph,
    ];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MutationKind::Drop => "call dropped",
            MutationKind::Swap => "calls swapped",
            MutationKind::Duplicate => "call repeated",
            MutationKind::OtherCount => "other count",
            MutationKind::OtherShape => "same count, other shape",
            MutationKind::OtherLayout => "other layout",
            MutationKind::OtherDim => "other tensor dim",
            MutationKind::Regroup => "other group",
            MutationKind::OtherRoot => "other root",
            MutationKind::OtherReduction => "other reduction",
            MutationKind::OtherDtype => "other dtype",
            MutationKind::OtherPeer => "other peer",
            MutationKind::SplitBatch => "batch split",
            MutationKind::OtherGraph => "other capture",
        }
    }

    /// Whether the op table of this build has what it changes.
    #[must_use]
    pub fn is_possible(self) -> bool {
        match self {
            MutationKind::SplitBatch => knows(Opcode::Send, "batch"),
            MutationKind::OtherGraph => knows(Opcode::AllReduce, "graph"),
            _ => true,
        }
    }
}

impl Mutation {
    /// Moves the change to another place.
    pub(crate) fn aim(&mut self, at: usize) {
        self.at = at;
    }

    pub(crate) fn random(d: &mut Dice, mesh: &Mesh) -> Mutation {
        let kinds: Vec<MutationKind> = MutationKind::ALL.into_iter().filter(|k| k.is_possible()).collect();
        Mutation {
            // An order is wrong in more ways than a constant.
            kind: if d.chance(1, 4) { MutationKind::Swap } else { d.pick(&kinds) },
            rank: d.below(mesh.ranks() as usize),
            at: d.below(1 << 16),
            arg: d.below(1 << 16),
            everywhere: d.chance(1, 4),
        }
    }
}

/// Changes the lists, if there is something to change.
pub(crate) fn apply(m: &Mutation, mesh: &Mesh, lists: &mut [Vec<Call>]) {
    let list = &lists[m.rank];
    let fitting: Vec<usize> = (0..list.len()).filter(|i| fits(m.kind, mesh, m.rank, list, *i)).collect();
    if fitting.is_empty() {
        return;
    }
    let at = fitting[m.at % fitting.len()];
    if !m.everywhere {
        change(m, mesh, m.rank, &mut lists[m.rank], at);
        return;
    }
    let salt = list[at].salt;
    for (rank, list) in lists.iter_mut().enumerate() {
        if let Some(at) = list.iter().position(|c| c.salt == salt)
            && fits(m.kind, mesh, rank, list, at)
        {
            change(m, mesh, rank, list, at);
        }
    }
}

fn fits(kind: MutationKind, mesh: &Mesh, rank: usize, list: &[Call], at: usize) -> bool {
    let c = &list[at];
    let pair = matches!(c.what, What::Send { .. } | What::Recv { .. });
    match kind {
        MutationKind::Swap => at + 1 < list.len(),
        MutationKind::OtherShape => c.shape < ALIKE,
        MutationKind::OtherLayout => {
            (pair || matches!(c.what, What::Broadcast { .. })) && holds(mesh, c.what, c.group).len() > 1
        }
        MutationKind::OtherDim => {
            matches!(c.what, What::AllGather { .. } | What::ReduceScatter { .. } | What::AllToAll { .. })
        }
        MutationKind::Regroup => groups(mesh, rank, c).len() > 1,
        MutationKind::OtherRoot => matches!(c.what, What::Broadcast { .. }),
        MutationKind::OtherReduction => {
            matches!(c.what, What::AllReduce { .. } | What::ReduceScatter { .. })
        }
        MutationKind::OtherPeer => pair,
        MutationKind::SplitBatch => c.batch.is_some(),
        _ => true,
    }
}

/// Every kind of group over which a rank can call this.
fn groups(mesh: &Mesh, rank: usize, c: &Call) -> Vec<Group> {
    let can = |g: &Group| mesh.position(Rank(rank as u32), *g).is_some() && has_layout(mesh, c.what, *g);
    kinds(mesh).into_iter().filter(can).collect()
}

fn change(m: &Mutation, mesh: &Mesh, rank: usize, list: &mut Vec<Call>, at: usize) {
    let here = |g: Group| mesh.position(Rank(rank as u32), g).unwrap_or(0) as usize;
    match m.kind {
        MutationKind::Drop => drop(list.remove(at)),
        MutationKind::Swap => list.swap(at, at + 1),
        MutationKind::Duplicate => {
            let to = (at + 1 + m.arg % 2).min(list.len());
            list.insert(to, list[at].clone());
        }
        _ => {}
    }
    let Some(c) = list.get_mut(at) else { return };
    let parts = mesh.group_size(c.group) as usize;
    let groups = groups(mesh, rank, c);
    match (m.kind, &mut c.what) {
        (MutationKind::OtherCount, _) => {
            let other: Vec<usize> = (0..SHAPES.len())
                .filter(|s| SHAPES[*s].iter().product::<u64>() != SHAPES[c.shape].iter().product::<u64>())
                .collect();
            c.shape = other[m.arg % other.len()];
        }
        (MutationKind::OtherShape, _) => c.shape = (c.shape + 1 + m.arg % (ALIKE - 1)) % ALIKE,
        (
            MutationKind::OtherDim,
            What::AllGather { dim } | What::ReduceScatter { dim, .. } | What::AllToAll { concat: dim, .. },
        ) => *dim = 1 - *dim,
        (MutationKind::OtherLayout, what) => {
            let others: Vec<_> = holds(mesh, *what, c.group).into_iter().filter(|h| *h != c.held).collect();
            c.held = others[m.arg % others.len()];
        }
        (MutationKind::Regroup, what) => {
            let now = groups.iter().position(|g| *g == c.group).unwrap_or(0);
            let to = groups[(now + 1 + m.arg % (groups.len() - 1)) % groups.len()];
            let parts = mesh.group_size(to) as usize;
            match what {
                What::Broadcast { root } => *root %= parts,
                What::Send { to: peer } | What::Recv { from: peer } => {
                    // The same rank where the group has it, else the next.
                    let ranks = mesh.members(Rank(rank as u32), c.group);
                    let same = ranks
                        .get(*peer)
                        .and_then(|r| mesh.members(Rank(rank as u32), to).iter().position(|o| o == r));
                    *peer = same.unwrap_or((here(to) + 1) % parts);
                }
                _ => {}
            }
            c.group = to;
            if !holds(mesh, *what, to).contains(&c.held) {
                c.held = Held::Whole;
            }
        }
        (MutationKind::OtherRoot, What::Broadcast { root }) => {
            *root = (*root + 1 + m.arg % (parts - 1)) % parts;
        }
        (MutationKind::OtherReduction, What::AllReduce { tree } | What::ReduceScatter { tree, .. }) => {
            *tree = !*tree
        }
        (MutationKind::OtherDtype, _) => {
            c.dtype = if c.dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
        }
        (MutationKind::OtherPeer, What::Send { to: peer } | What::Recv { from: peer }) => {
            // Now and then the rank itself.
            let own = (parts > 2 && !m.arg.is_multiple_of(4)).then_some(here(c.group));
            let others: Vec<usize> = (0..parts).filter(|p| Some(*p) != own && *p != *peer).collect();
            *peer = others[m.arg % others.len()];
        }
        (MutationKind::SplitBatch, _) => c.batch = c.batch.map(|b| b + 7),
        (MutationKind::OtherGraph, _) => {
            c.graph = match (c.graph, m.arg % 2) {
                (None, _) => Some(0),
                (Some(_), 0) => None,
                (Some(g), _) => Some(g + 1),
            };
        }
        _ => {}
    }
}
