//! Mutations of the list of collectives of one rank, or of all ranks that take part in one
//! collective.

use tessera_ir::{DType, Opcode};
use tessera_mesh::{Group, Mesh, Rank};

use crate::planned_call::{
    CollectiveSpec, EQUAL_COUNT_SHAPES, PlannedCall, SHAPES, ValueSharding, group_kinds, has_attribute,
    has_layout, possible_shardings,
};
use tessera_base::random::Rng;

/// One mutation. Positions are taken modulo the number of candidates, so that the mutation also
/// applies to a smaller set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mutation {
    /// Change that the mutation makes, such as another root or a dropped call.
    pub kind: MutationKind,
    rank: usize,
    at: usize,
    arg: usize,
    /// Whether every rank with the same collective gets the same change. Such a change is often
    /// harmless, because the ranks still agree.
    everywhere: bool,
}

/// Ways in which a [`Mutation`] changes a rank's list of collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names describe the mutations; `name` gives the text")]
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
    /// Every kind of change to one rank's list of calls, in declaration order.
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

    /// Returns the row label in the comparison table, such as `call dropped`.
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

    /// Returns whether the op table of this build has the attribute that the mutation changes.
    #[must_use]
    pub fn is_possible(self) -> bool {
        match self {
            MutationKind::SplitBatch => has_attribute(Opcode::Send, "batch"),
            MutationKind::OtherGraph => has_attribute(Opcode::AllReduce, "graph"),
            _ => true,
        }
    }
}

impl Mutation {
    /// Sets which candidate the mutation changes: `at`, modulo the number of candidates.
    pub(crate) fn move_to(&mut self, at: usize) {
        self.at = at;
    }

    pub(crate) fn random(d: &mut Rng, mesh: &Mesh) -> Mutation {
        let kinds: Vec<MutationKind> = MutationKind::ALL.into_iter().filter(|k| k.is_possible()).collect();
        Mutation {
            // Swaps are more frequent, since an order can be wrong in more ways than an attribute.
            kind: if d.next_ratio(1, 4) { MutationKind::Swap } else { d.pick_one(&kinds) },
            rank: d.next_below(mesh.world_size() as usize),
            at: d.next_below(1 << 16),
            arg: d.next_below(1 << 16),
            everywhere: d.next_ratio(1, 4),
        }
    }
}

/// Changes one call of the mutation's rank, or the same operation on all ranks. Without a candidate
/// in that rank's list, nothing changes.
pub(crate) fn apply_mutation(m: &Mutation, mesh: &Mesh, lists: &mut [Vec<PlannedCall>]) {
    let list = &lists[m.rank];
    let fitting: Vec<usize> =
        (0..list.len()).filter(|i| is_candidate(m.kind, mesh, m.rank, list, *i)).collect();
    if fitting.is_empty() {
        return;
    }
    let at = fitting[m.at % fitting.len()];
    if !m.everywhere {
        change_call(m, mesh, m.rank, &mut lists[m.rank], at);
        return;
    }
    let salt = list[at].salt;
    for (rank, list) in lists.iter_mut().enumerate() {
        if let Some(at) = list.iter().position(|c| c.salt == salt)
            && is_candidate(m.kind, mesh, rank, list, at)
        {
            change_call(m, mesh, rank, list, at);
        }
    }
}

fn is_candidate(kind: MutationKind, mesh: &Mesh, rank: usize, list: &[PlannedCall], at: usize) -> bool {
    let c = &list[at];
    let pair = matches!(c.collective, CollectiveSpec::Send { .. } | CollectiveSpec::Recv { .. });
    match kind {
        MutationKind::Swap => at + 1 < list.len(),
        MutationKind::OtherShape => c.shape < EQUAL_COUNT_SHAPES,
        MutationKind::OtherLayout => {
            (pair || matches!(c.collective, CollectiveSpec::Broadcast { .. }))
                && possible_shardings(mesh, c.collective, c.group).len() > 1
        }
        MutationKind::OtherDim => {
            matches!(
                c.collective,
                CollectiveSpec::AllGather { .. }
                    | CollectiveSpec::ReduceScatter { .. }
                    | CollectiveSpec::AllToAll { .. }
            )
        }
        MutationKind::Regroup => possible_groups(mesh, rank, c).len() > 1,
        MutationKind::OtherRoot => matches!(c.collective, CollectiveSpec::Broadcast { .. }),
        MutationKind::OtherReduction => {
            matches!(c.collective, CollectiveSpec::AllReduce { .. } | CollectiveSpec::ReduceScatter { .. })
        }
        MutationKind::OtherPeer => pair,
        MutationKind::SplitBatch => c.batch.is_some(),
        _ => true,
    }
}

/// Returns every group over which a rank can make this call.
fn possible_groups(mesh: &Mesh, rank: usize, c: &PlannedCall) -> Vec<Group> {
    let can = |g: &Group| {
        mesh.group_position(Rank(rank as u32), *g).is_some() && has_layout(mesh, c.collective, *g)
    };
    group_kinds(mesh).into_iter().filter(can).collect()
}

fn change_call(m: &Mutation, mesh: &Mesh, rank: usize, list: &mut Vec<PlannedCall>, at: usize) {
    let here = |g: Group| mesh.group_position(Rank(rank as u32), g).unwrap_or(0) as usize;
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
    let groups = possible_groups(mesh, rank, c);
    match (m.kind, &mut c.collective) {
        (MutationKind::OtherCount, _) => {
            let other: Vec<usize> = (0..SHAPES.len())
                .filter(|s| SHAPES[*s].iter().product::<u64>() != SHAPES[c.shape].iter().product::<u64>())
                .collect();
            c.shape = other[m.arg % other.len()];
        }
        (MutationKind::OtherShape, _) => {
            c.shape = (c.shape + 1 + m.arg % (EQUAL_COUNT_SHAPES - 1)) % EQUAL_COUNT_SHAPES
        }
        (
            MutationKind::OtherDim,
            CollectiveSpec::AllGather { dim }
            | CollectiveSpec::ReduceScatter { dim, .. }
            | CollectiveSpec::AllToAll { concat: dim, .. },
        ) => *dim = 1 - *dim,
        (MutationKind::OtherLayout, what) => {
            let others: Vec<_> =
                possible_shardings(mesh, *what, c.group).into_iter().filter(|h| *h != c.sharding).collect();
            c.sharding = others[m.arg % others.len()];
        }
        (MutationKind::Regroup, what) => {
            let now = groups.iter().position(|g| *g == c.group).unwrap_or(0);
            let to = groups[(now + 1 + m.arg % (groups.len() - 1)) % groups.len()];
            let parts = mesh.group_size(to) as usize;
            match what {
                CollectiveSpec::Broadcast { root } => *root %= parts,
                CollectiveSpec::Send { to: peer } | CollectiveSpec::Recv { from: peer } => {
                    // Keep the same peer if the new group contains it, else take the next member.
                    let ranks = mesh.group_members(Rank(rank as u32), c.group);
                    let same = ranks
                        .get(*peer)
                        .and_then(|r| mesh.group_members(Rank(rank as u32), to).iter().position(|o| o == r));
                    *peer = same.unwrap_or((here(to) + 1) % parts);
                }
                _ => {}
            }
            c.group = to;
            if !possible_shardings(mesh, *what, to).contains(&c.sharding) {
                c.sharding = ValueSharding::Whole;
            }
        }
        (MutationKind::OtherRoot, CollectiveSpec::Broadcast { root }) => {
            *root = (*root + 1 + m.arg % (parts - 1)) % parts;
        }
        (
            MutationKind::OtherReduction,
            CollectiveSpec::AllReduce { tree } | CollectiveSpec::ReduceScatter { tree, .. },
        ) => *tree = !*tree,
        (MutationKind::OtherDtype, _) => {
            c.dtype = if c.dtype == DType::F32 { DType::Bf16 } else { DType::F32 };
        }
        (
            MutationKind::OtherPeer,
            CollectiveSpec::Send { to: peer } | CollectiveSpec::Recv { from: peer },
        ) => {
            // In a quarter of the cases the peer may be the rank itself.
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
