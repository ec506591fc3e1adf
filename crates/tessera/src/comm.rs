//! Which shared-memory arenas a plan's collectives need on one host, and each rank's ends of them.
//!
//! A pure function of the sealed plan, so that the launcher that makes the arenas and the ranks that attach to
//! them agree without a word about it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use tessera_base::{Code, Diagnostic};
use tessera_cpu::Group;
use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_ir::{Opcode, Program};
use tessera_mesh::{Axis, Rank};
use tessera_verify::SealedPlan;

/// Shared memory that cannot be had.
pub static T0017: Code = Code {
    id: "T0017",
    title: "shared memory for collectives cannot be set up",
    page: "Ranks of one host exchange data through anonymous shared memory, one arena for each group of ranks. The \
operating system refused to make or map one, or what a rank was handed is not the arena its plan needs. Limits on \
memory of a container are the usual reason.",
};

/// One arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Axis of the group.
    pub axis: Axis,
    /// Members, in order of their position.
    pub members: Vec<Rank>,
    /// Whether it is a sending pair of the axis, not a whole group.
    pub pair: bool,
    /// Size.
    pub layout: ArenaLayout,
}

/// Every arena that a plan needs, in a fixed order.
#[must_use]
pub fn groups(plan: &SealedPlan) -> Vec<GroupSpec> {
    let mesh = plan.mesh();
    // (axis, pair, members) to (largest contribution, most in flight).
    let mut needs: BTreeMap<(Axis, bool, Vec<Rank>), (u64, usize)> = BTreeMap::new();
    for rank in mesh.iter() {
        for phase in plan.phases() {
            let Some(p) = plan.program(phase, rank) else { continue };
            let coord = mesh.coord_of(rank);
            for (i, op) in p.collectives() {
                let Some(axis) = op.axis() else { continue };
                let members = match op.int("to").or(op.int("from")) {
                    Some(peer) => {
                        let other = mesh.rank_at(coord.with(axis, u32::try_from(peer).unwrap_or(0)));
                        let mut pair = vec![rank, other];
                        pair.sort();
                        (axis, true, pair)
                    }
                    None => (axis, false, mesh.group_of(rank, axis)),
                };
                let bytes = op.operands.first().map_or(0, |v| p.ty(*v).bytes().0);
                let need = needs.entry(members).or_insert((0, 0));
                need.0 = need.0.max(bytes);
                need.1 = need.1.max(in_flight(p, i));
            }
        }
    }
    needs
        .into_iter()
        .map(|((axis, pair, members), (bytes, flight))| GroupSpec {
            axis,
            pair,
            // One more than are ever in flight: a fast member may begin the next while a slow one still reads.
            layout: ArenaLayout {
                members: members.len(),
                slots: flight + 1,
                slot_bytes: bytes.max(4) as usize,
            },
            members,
        })
        .collect()
}

/// Collectives issued and not waited for when op `at` was issued, itself included.
fn in_flight(p: &Program, at: usize) -> usize {
    let waited: BTreeSet<_> = p.ops[..at]
        .iter()
        .filter(|o| o.opcode == Opcode::Wait)
        .flat_map(|o| o.operands.iter().copied())
        .collect();
    p.ops[..=at].iter().filter(|o| o.issue && !o.results.iter().any(|r| waited.contains(r))).count().max(1)
}

/// Makes every arena.
///
/// # Errors
/// T0017.
pub fn create(specs: &[GroupSpec]) -> Result<Vec<OwnedFd>, Diagnostic> {
    specs
        .iter()
        .map(|s| {
            Arena::create(s.layout)
                .map_err(|e| Diagnostic::error(&T0017, format!("group {:?}: {e}", s.members)))
        })
        .collect()
}

/// Indices of the arenas that a rank belongs to, in order.
pub fn of_rank(specs: &[GroupSpec], rank: Rank) -> impl Iterator<Item = usize> + '_ {
    specs.iter().enumerate().filter(move |(_, s)| s.members.contains(&rank)).map(|(i, _)| i)
}

/// A rank's ends of its arenas, from descriptors in the order of [`of_rank`].
///
/// # Errors
/// T0017.
pub fn attach(plan: &SealedPlan, rank: Rank, fds: Vec<OwnedFd>) -> Result<Vec<Group>, Diagnostic> {
    let specs = groups(plan);
    let mine: Vec<&GroupSpec> = of_rank(&specs, rank).map(|i| &specs[i]).collect();
    if mine.len() != fds.len() {
        return Err(Diagnostic::error(
            &T0017,
            format!("rank {rank} needs {} arenas and was given {}", mine.len(), fds.len()),
        ));
    }
    mine.into_iter()
        .zip(fds)
        .map(|(spec, fd)| {
            let at = spec.members.iter().position(|m| *m == rank).unwrap_or(0);
            let arena = Arena::attach(fd, spec.layout, at).map_err(|e| {
                Diagnostic::error(&T0017, format!("rank {rank}, group {:?}: {e}", spec.members))
            })?;
            let peer = spec.pair.then(|| plan.mesh().coord_of(spec.members[1 - at]).on(spec.axis));
            Ok(Group { axis: spec.axis, peer, arena })
        })
        .collect()
}
