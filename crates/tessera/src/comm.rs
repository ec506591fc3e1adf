//! Which lanes a plan's collectives need, and each rank's ends of them: arenas of shared memory on one host, streams
//! among ranks that joined.
//!
//! A pure function of the sealed plan, so that the launcher that makes the arenas and the ranks that attach to
//! them agree without a word about it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Result as IoResult};
use std::os::fd::{BorrowedFd, OwnedFd};

use tessera_base::{Code, Diagnostic};
use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_cpu::tcp::{Tcp, Wire};
use tessera_cpu::{End, Exchange};
use tessera_device::{Lane, Route};
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;
use tessera_runtime::driver::Stream;
use tessera_verify::SealedPlan;

/// Shared memory that cannot be had.
pub static T0017: Code = Code {
    id: "T0017",
    title: "shared memory for collectives cannot be set up",
    page: "Ranks of one host exchange data through anonymous shared memory, one arena for each group of ranks \
and one for each sender with its receiver. The operating system refused to make or map one, or what a rank was handed \
is not the arena its plan needs. Limits on memory of a container are the usual reason.",
};

/// One arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// What it is for, and whose.
    pub lane: Lane,
    /// Size.
    pub layout: ArenaLayout,
}

/// Every arena that a plan needs, in a fixed order.
#[must_use]
pub fn groups(plan: &SealedPlan) -> Vec<GroupSpec> {
    let mesh = plan.mesh();
    let mut needs: BTreeMap<Lane, Need> = BTreeMap::new();
    for phase in plan.phases() {
        for role in plan.roles() {
            let Some(p) = role.ranks.first().and_then(|r| plan.program(phase, *r)) else { continue };
            for (route, need) in program_needs(p) {
                for lane in role.ranks.iter().filter_map(|r| route.lane(mesh, *r)) {
                    let most = needs.entry(lane).or_default();
                    most.bytes = most.bytes.max(need.bytes);
                    most.flight = most.flight.max(need.flight);
                }
            }
        }
    }
    needs
        .into_iter()
        .map(|(lane, Need { bytes, flight })| GroupSpec {
            // One more than are ever in flight: a fast member may begin the next while a slow one still reads.
            layout: ArenaLayout {
                members: lane.members.len(),
                slots: flight + 1,
                slot_bytes: bytes.max(4) as usize,
            },
            lane,
        })
        .collect()
}

/// What a lane asks of its arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Need {
    /// Largest contribution.
    bytes: u64,
    /// Most collectives from the oldest one not waited for to the one begun, both counted. Slots are taken in
    /// turn, so those waited for in between hold theirs too.
    flight: usize,
}

/// Collectives begun in one lane so far, and those of them not waited for.
#[derive(Debug, Default)]
struct Begun {
    next: usize,
    open: BTreeSet<usize>,
}

/// Needs of a program by the lanes as its ops name them.
fn program_needs(p: &Program) -> BTreeMap<Route, Need> {
    let mut needs: BTreeMap<Route, Need> = BTreeMap::new();
    let mut begun: BTreeMap<Route, Begun> = BTreeMap::new();
    let mut tickets = BTreeMap::new();
    for op in &p.ops {
        if op.opcode == Opcode::Wait
            && let Some((route, at)) = op.operands.first().and_then(|t| tickets.remove(t))
            && let Some(b) = begun.get_mut(&route)
        {
            b.open.remove(&at);
        }
        let Some(route) = Route::of(op) else { continue };
        let b = begun.entry(route).or_default();
        let at = b.next;
        b.next += 1;
        let need = needs.entry(route).or_default();
        need.bytes = need.bytes.max(op.operands.first().map_or(0, |v| p.ty(*v).bytes().0));
        need.flight = need.flight.max(at + 1 - b.open.first().map_or(at, |oldest| *oldest));
        if let (true, Some(ticket)) = (op.issue, op.results.first()) {
            b.open.insert(at);
            tickets.insert(*ticket, (route, at));
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
        .map(|s| Arena::create(s.layout).map_err(|e| Diagnostic::error(&T0017, format!("{}: {e}", who(s)))))
        .collect()
}

/// Indices of the arenas that a rank belongs to, in order.
pub fn of_rank(specs: &[GroupSpec], rank: Rank) -> impl Iterator<Item = usize> + '_ {
    specs.iter().enumerate().filter(move |(_, s)| s.lane.members.contains(&rank)).map(|(i, _)| i)
}

/// What a rank's ends are made of.
pub enum Lanes {
    /// Descriptors of arenas, in the order of [`of_rank`].
    Memory(Vec<OwnedFd>),
    /// Lanes by index in that order, each with a stream to every other member in order of member.
    Streams(Vec<(usize, Vec<Box<dyn Stream>>)>),
}

impl From<Vec<OwnedFd>> for Lanes {
    fn from(fds: Vec<OwnedFd>) -> Lanes {
        Lanes::Memory(fds)
    }
}

/// A rank's ends of its arenas, from descriptors in the order of [`of_rank`].
///
/// # Errors
/// T0017.
pub fn attach(plan: &SealedPlan, rank: Rank, fds: Vec<OwnedFd>) -> Result<Vec<End>, Diagnostic> {
    attach_lanes(plan, rank, Lanes::Memory(fds))
}

/// A rank's ends of its lanes.
///
/// # Errors
/// T0017.
pub fn attach_lanes(plan: &SealedPlan, rank: Rank, lanes: Lanes) -> Result<Vec<End>, Diagnostic> {
    let specs = groups(plan);
    let mine: Vec<usize> = of_rank(&specs, rank).collect();
    let given: Vec<Given> = match lanes {
        Lanes::Memory(fds) => fds.into_iter().map(Given::Arena).collect(),
        Lanes::Streams(lanes) => {
            let named: Vec<usize> = lanes.iter().map(|(i, _)| *i).collect();
            if named != mine {
                return Err(Diagnostic::error(
                    &T0017,
                    format!("rank {rank} is in lanes {mine:?} and was given lanes {named:?}"),
                ));
            }
            lanes.into_iter().map(|(_, streams)| Given::Streams(streams)).collect()
        }
    };
    if mine.len() != given.len() {
        return Err(Diagnostic::error(
            &T0017,
            format!("rank {rank} needs {} arenas and was given {}", mine.len(), given.len()),
        ));
    }
    mine.into_iter()
        .zip(given)
        .map(|(i, given)| {
            let spec = &specs[i];
            let failed = |why: &str| Diagnostic::error(&T0017, format!("rank {rank}, {}: {why}", who(spec)));
            let at = spec.lane.members.iter().position(|m| *m == rank).unwrap_or(0);
            let route =
                spec.lane.route(plan.mesh(), at).ok_or_else(|| failed("the mesh has no such group"))?;
            let exchange = given.exchange(spec.layout, at).map_err(|e| failed(&e.to_string()))?;
            Ok(End { route, exchange })
        })
        .collect()
}

/// Members of every lane, in order.
#[must_use]
pub fn members(specs: &[GroupSpec]) -> Vec<Vec<u32>> {
    specs.iter().map(|s| s.lane.members.iter().map(|m| m.0).collect()).collect()
}

enum Given {
    Arena(OwnedFd),
    Streams(Vec<Box<dyn Stream>>),
}

impl Given {
    fn exchange(self, layout: ArenaLayout, at: usize) -> Result<Exchange, tessera_cpu::arena::ArenaError> {
        match self {
            Given::Arena(fd) => Arena::attach(fd, layout, at).map(Exchange::from),
            Given::Streams(streams) => {
                let wire = |s| Some(Box::new(Link(s)) as Box<dyn Wire>);
                let mut wires: Vec<_> = streams.into_iter().map(wire).collect();
                wires.insert(at.min(wires.len()), None);
                Tcp::new(layout, at, wires).map(Exchange::from)
            }
        }
    }
}

/// A driver's stream, as a backend takes it.
struct Link(Box<dyn Stream>);

impl Wire for Link {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        self.0.read(into)
    }

    fn write(&mut self, from: &[u8]) -> IoResult<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> IoResult<bool> {
        match self.0.flush() {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn close(&mut self) {
        // What is under it may be more than a socket; the socket alone is told.
        let _ = rustix::net::shutdown(self.0.fd(), rustix::net::Shutdown::Write);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

fn who(spec: &GroupSpec) -> String {
    let ranks: Vec<String> = spec.lane.members.iter().map(Rank::to_string).collect();
    let what = if spec.lane.transfer { "transfers" } else { "group" };
    format!("{what} over {} of ranks {}", spec.lane.over, ranks.join(", "))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_device::Peer;
    use tessera_ir::{Bundle, Phase, RoleRanks, Slots};
    use tessera_mesh::{Axis, Group, RankMap};
    use tessera_verify::{Limits, seal};

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
        let route = |axis, peer| Route { over: Group::of(axis), peer };
        let tp = (route(Axis::Tp, None), Need { bytes: 64, flight: 3 });
        let pp = (route(Axis::Pp, Some(Peer::To(1))), Need { bytes: 32, flight: 1 });
        assert!(needs.len() == 2 && needs.contains(&tp) && needs.contains(&pp), "{needs:?}");
    }
    /// A plan of one phase; values keep to slots of their own.
    fn sealed(text: &str) -> SealedPlan {
        let programs = tessera_ir::parse_all(text, "p").unwrap_or_else(|d| panic!("{d:#?}"));
        let mesh = programs[0].mesh;
        let names: Vec<&str> = programs.iter().map(|p| p.role.as_str()).collect();
        let slots = |p: &Program| Slots {
            bytes: p.values.iter().map(|v| if v.ty.is_token() { 4 } else { v.ty.bytes().0 }).collect(),
            of: (0..p.values.len() as u32).map(Some).collect(),
        };
        let bundle = Bundle {
            mesh,
            rank_map: RankMap::logical(&mesh, "cpu"),
            roles: RoleRanks::by_name(&mesh, &names),
            phases: vec![Phase {
                name: programs[0].name.clone(),
                memory: programs.iter().map(slots).collect(),
                programs,
            }],
            calls: vec![("call".to_string(), vec!["p".to_string()])],
            mapping: String::new(),
        };
        seal(bundle, &Limits::default()).unwrap_or_else(|d| panic!("{d:#?}"))
    }

    #[test]
    fn a_plan_of_the_world_of_blocks_and_of_transfers_has_a_lane_for_each() {
        let head = "mesh(tp=4, outside=1)";
        let given = "ttile.collective.broadcast %x {axis = \"world\", root = 0}";
        let mut text = format!(
            "program @p role(leader@out0) {head} {{
                %x = input : f32[4, 4]
                %given = {given}
                output \"given\", %given
            }}\n"
        );
        for at in 0..4 {
            let beside = 1 - at % 2;
            text += &format!(
                "program @p role(r@tp{at}) {head} {{
                    %x = input : f32[4, 4]
                    %given = {given}
                    %own = ttile.take_shard %given {{axis = \"tp\", dim = 0, ways = 2}}
                    %s = ttile.collective.issue send %own {{axis = \"tp\", batch = 1, to = {beside}, ways = 2}}
                    %r = ttile.collective.issue recv {{axis = \"tp\", batch = 1, from = {beside}, ways = 2}}
                    ttile.collective.wait %s
                    %theirs = ttile.collective.wait %r : f32[2, 4] {{tp: shard(0, ways=2)}}
                    %all = ttile.collective.all_gather %theirs {{axis = \"tp\", dim = 0, ways = 2}}
                    output \"all\", %all
                }}\n"
            );
        }
        let plan = sealed(&text);
        let specs = groups(&plan);
        let lanes: Vec<String> = specs.iter().map(who).collect();
        assert_eq!(
            lanes,
            [
                "group over tp/2 of ranks 1, 2",
                "group over tp/2 of ranks 3, 4",
                "transfers over tp/2 of ranks 1, 2",
                "transfers over tp/2 of ranks 2, 1",
                "transfers over tp/2 of ranks 3, 4",
                "transfers over tp/2 of ranks 4, 3",
                "group over world of ranks 0, 1, 2, 3, 4",
            ]
        );
        let bytes: Vec<usize> = specs.iter().map(|s| s.layout.slot_bytes).collect();
        assert_eq!(bytes, [32, 32, 32, 32, 32, 32, 64]);
        let fds = create(&specs).unwrap();
        for rank in plan.mesh().iter() {
            let mine = of_rank(&specs, rank).map(|i| fds[i].try_clone().unwrap()).collect();
            let ends = attach(&plan, rank, mine).unwrap();
            let program = plan.program("p", rank).unwrap();
            let named: BTreeSet<Route> = program.ops.iter().filter_map(Route::of).collect();
            assert_eq!(ends.iter().map(|e| e.route).collect::<BTreeSet<_>>(), named);
            assert_eq!(ends.len(), if rank == Rank(0) { 1 } else { 4 });
        }
    }
}
