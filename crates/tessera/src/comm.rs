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
use tessera_mesh::{Axis, Group as Members, Rank};
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
    let mut needs: BTreeMap<(Axis, bool, Vec<Rank>), Need> = BTreeMap::new();
    for phase in plan.phases() {
        for role in plan.roles() {
            let Some(p) = role.ranks.first().and_then(|r| plan.program(phase, *r)) else { continue };
            for ((axis, peer), need) in program_needs(p) {
                for rank in &role.ranks {
                    let members = match peer {
                        Some(peer) => {
                            let other = mesh.rank_at(mesh.coord_of(*rank).with(axis, peer));
                            vec![(*rank).min(other), (*rank).max(other)]
                        }
                        None => mesh.group_of(*rank, axis),
                    };
                    let most = needs.entry((axis, peer.is_some(), members)).or_default();
                    most.bytes = most.bytes.max(need.bytes);
                    most.flight = most.flight.max(need.flight);
                }
            }
        }
    }
    needs
        .into_iter()
        .map(|((axis, pair, members), Need { bytes, flight })| GroupSpec {
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

/// What a group asks of its arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Need {
    /// Largest contribution.
    bytes: u64,
    /// Most collectives from the oldest one not waited for to the one begun, both counted. Slots are taken in
    /// turn, so those waited for in between hold theirs too.
    flight: usize,
}

/// Collectives begun in one group so far, and those of them not waited for.
#[derive(Debug, Default)]
struct Begun {
    next: usize,
    open: BTreeSet<usize>,
}

/// Needs of a program by axis and, for a pair, the other end's position.
fn program_needs(p: &Program) -> BTreeMap<(Axis, Option<u32>), Need> {
    let mut needs: BTreeMap<(Axis, Option<u32>), Need> = BTreeMap::new();
    let mut begun: BTreeMap<(Axis, Option<u32>), Begun> = BTreeMap::new();
    let mut tickets = BTreeMap::new();
    for op in &p.ops {
        if op.opcode == Opcode::Wait
            && let Some((group, at)) = op.operands.first().and_then(|t| tickets.remove(t))
            && let Some(b) = begun.get_mut(&group)
        {
            b.open.remove(&at);
        }
        // The backend refuses what is over anything but a whole axis.
        let Some(Members::Axis { axis, ways: None }) = op.group() else { continue };
        if !op.opcode.is_collective() {
            continue;
        }
        let peer = op.int("to").or(op.int("from"));
        let group = (axis, peer.map(|k| u32::try_from(k).unwrap_or(0)));
        let b = begun.entry(group).or_default();
        let at = b.next;
        b.next += 1;
        let need = needs.entry(group).or_default();
        need.bytes = need.bytes.max(op.operands.first().map_or(0, |v| p.ty(*v).bytes().0));
        need.flight = need.flight.max(at + 1 - b.open.first().map_or(at, |oldest| *oldest));
        if let (true, Some(ticket)) = (op.issue, op.results.first()) {
            b.open.insert(at);
            tickets.insert(*ticket, (group, at));
        }
    }
    needs
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_group_counts_its_own_tickets_from_the_oldest_open_one() {
        let text = "program @p role(r) mesh(tp=2, pp=2) streams(compute, tp_collective) {
            %x = input : f32[4, 4] {tp: partial(sum)}
            %z = input : f32[2, 4]
            %a = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %s = ttile.collective.issue send %z {axis = \"pp\", to = 1} @tp_collective
            %b = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %u = ttile.collective.wait %b : f32[4, 4] @compute
            %c = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %v = ttile.collective.wait %a : f32[4, 4] @compute
            %w = ttile.collective.wait %c : f32[4, 4] @compute
            ttile.collective.wait %s @compute
        }";
        let p = tessera_ir::parse_all(text, "p").unwrap_or_else(|d| panic!("{d:#?}")).remove(0);
        let needs: Vec<_> = program_needs(&p).into_iter().collect();
        let tp = ((Axis::Tp, None), Need { bytes: 64, flight: 3 });
        let pp = ((Axis::Pp, Some(1)), Need { bytes: 32, flight: 1 });
        assert!(needs.len() == 2 && needs.contains(&tp) && needs.contains(&pp), "{needs:?}");
    }
}
