//! Random sets of programs: a list of collectives in one order for all ranks, which cannot fail,
//! and changes to it.

use tessera_ir::{DType, Opcode, Program};
use tessera_mesh::{Axis, Group, Mesh, Rank};

use crate::lower::{self, SetStyle};
use crate::mutate::{self, Mutation};
use crate::planned_call::{
    CollectiveSpec, PlannedCall, SHAPES, UnevenDim, ValueSharding, group_kinds, has_attribute, has_layout,
    possible_shardings,
};
use crate::rewrite::{self, Rewrite};
use tessera_base::random::Rng;

/// A set of programs before lowering. These fields determine the programs.
#[derive(Debug, Clone, PartialEq)]
pub struct ProgramSet {
    /// Mesh of the set; each rank of its world gets a program.
    pub mesh: Mesh,
    /// Streams of each program, 1 to 3.
    pub streams: usize,
    /// Whether ranks with equal calls get equal programs, like ranks of one role.
    pub share_programs: bool,
    /// Collectives and transfers in the order in which each participating rank issues them.
    pub operations: Vec<JointOperation>,
    /// Mutations of the lists of calls: of one rank, or of all ranks that take part in an
    /// operation.
    pub mutations: Vec<Mutation>,
    /// Rewrites of single programs, applied after lowering.
    pub rewrites: Vec<Rewrite>,
}

/// One operation in which some ranks take part.
#[derive(Debug, Clone, PartialEq)]
pub struct JointOperation {
    /// Participating ranks with their calls.
    pub parts: Vec<(usize, PlannedCall)>,
}

/// Sizes of the axes, and the number of outside ranks; the smallest meshes come first.
const MESHES: [([u32; 4], u32); 13] = [
    ([2, 1, 1, 1], 0),
    ([1, 1, 1, 1], 1),
    ([2, 1, 1, 1], 1),
    ([3, 1, 1, 1], 0),
    ([4, 1, 1, 1], 0),
    ([2, 1, 2, 1], 0),
    ([2, 1, 2, 1], 0),
    ([2, 1, 1, 2], 0),
    ([1, 2, 2, 1], 0),
    ([1, 1, 3, 1], 0),
    ([1, 1, 4, 1], 0),
    ([3, 1, 1, 1], 1),
    ([1, 1, 2, 1], 1),
];
const MAX_OPERATIONS: usize = 5;
const MAX_CALLS_PER_RANK: usize = 6;

impl ProgramSet {
    /// Generates set number `index` of a seed; every second set is mutated.
    #[must_use]
    pub fn generate_random(seed: u64, index: u32) -> ProgramSet {
        ProgramSet::generate_sized(seed, index, MAX_OPERATIONS, &MESHES)
    }

    /// Generates a set small enough to visit all its states.
    #[must_use]
    pub fn generate_small(seed: u64, index: u32) -> ProgramSet {
        ProgramSet::generate_sized(seed, index, 2, &MESHES[..if index % 8 < 6 { 2 } else { 5 }])
    }

    fn generate_sized(seed: u64, index: u32, most: usize, meshes: &[([u32; 4], u32)]) -> ProgramSet {
        let mut d = Rng::new(seed, [index, 0]);
        let (sizes, outside) = d.pick_one(meshes);
        let mesh = Mesh::new(sizes).and_then(|m| m.with_outside(outside)).unwrap_or_default();
        let mut case = ProgramSet {
            mesh,
            streams: 1 + d.next_below(3),
            share_programs: d.next_ratio(1, 2),
            operations: Vec::new(),
            mutations: Vec::new(),
            rewrites: Vec::new(),
        };
        // Consecutive collectives may be captured, each run in a graph of its own.
        let mut graphs = 0;
        let mut graph = None;
        for _ in 0..1 + d.next_below(most) {
            if has_attribute(Opcode::AllReduce, "graph") && d.next_ratio(1, 4) {
                graphs += 1;
                graph = (graph.is_none() || d.next_ratio(1, 2)).then_some(graphs);
            }
            let meeting = generate_operation(&mut d, &mesh, graph, case.operations.len() as u32);
            let mut ranks = vec![0; mesh.world_size() as usize];
            case.operations.iter().chain([&meeting]).flat_map(|m| &m.parts).for_each(|(r, _)| ranks[*r] += 1);
            if ranks.iter().all(|n| *n <= MAX_CALLS_PER_RANK) {
                case.operations.push(meeting);
            }
        }
        if index % 2 == 1 {
            for _ in 0..1 + d.next_below(3) {
                if d.next_ratio(3, 5) {
                    case.mutations.push(Mutation::random(&mut d, &mesh));
                } else {
                    case.rewrites.push(Rewrite::random(&mut d, &mesh));
                }
            }
        }
        case
    }

    /// Returns the calls of each rank, in order.
    #[must_use]
    pub fn calls_by_rank(&self) -> Vec<Vec<PlannedCall>> {
        let mut out = vec![Vec::new(); self.mesh.world_size() as usize];
        for (rank, call) in self.operations.iter().flat_map(|m| &m.parts) {
            out[*rank].push(call.clone());
        }
        for m in &self.mutations {
            mutate::apply_mutation(m, &self.mesh, &mut out);
        }
        out
    }

    /// Lowers the set to one program per rank.
    ///
    /// # Errors
    /// The message of the IR rule that rejected a program, which is a defect of the generator.
    pub fn lower_programs(&self) -> Result<Vec<Program>, String> {
        let calls = self.calls_by_rank();
        let style = SetStyle { streams: self.streams, share_programs: self.share_programs };
        let lowered = calls.iter().enumerate().map(|(r, c)| lower::lower_rank(&self.mesh, r, style, c));
        let mut programs = lowered.collect::<Result<Vec<Program>, String>>()?;
        for e in &self.rewrites {
            rewrite::apply_rewrite(e, &mut programs);
        }
        Ok(programs)
    }
}

/// Picks one of [`possible_shardings`], but no uneven shards that differ between members.
fn pick_uniform_sharding(d: &mut Rng, mesh: &Mesh, what: CollectiveSpec, group: Group) -> ValueSharding {
    let mut all = possible_shardings(mesh, what, group);
    let own = |axis: Axis| matches!(group, Group::Axis { axis: own, .. } if own == axis);
    all.retain(|h| !matches!(h, ValueSharding::Shards { axis, uneven: true, .. } if own(*axis)));
    if d.next_ratio(2, 3) { ValueSharding::Whole } else { d.pick_one(&all) }
}

fn generate_operation(d: &mut Rng, mesh: &Mesh, graph: Option<u32>, number: u32) -> JointOperation {
    let group = d.pick_one(&group_kinds(mesh));
    let parts = mesh.group_size(group) as usize;
    let call = |d: &mut Rng, what| PlannedCall {
        salt: d.next_u32(),
        group,
        collective: what,
        sharding: pick_uniform_sharding(d, mesh, what, group),
        shape: d.next_below(SHAPES.len()),
        dtype: if d.next_ratio(1, 4) { DType::Bf16 } else { DType::F32 },
        batch: None,
        graph,
    };
    let firsts = mesh.iter().filter(|r| mesh.group_position(*r, group) == Some(0));
    let groups: Vec<Vec<Rank>> = firsts.map(|r| mesh.group_members(r, group)).collect();
    let chosen = if d.next_ratio(1, 2) { groups } else { vec![groups[d.next_below(groups.len())].clone()] };
    let batches = has_attribute(Opcode::Send, "batch");
    let what = match d.next_below(9) {
        0 | 1 => CollectiveSpec::AllReduce { tree: d.next_ratio(1, 4) },
        2 => CollectiveSpec::AllGather { dim: d.next_below(2) },
        3 => CollectiveSpec::ReduceScatter { dim: d.next_below(2), tree: d.next_ratio(1, 4) },
        4 => {
            let cut = d.pick_one(&[UnevenDim::Even, UnevenDim::Even, UnevenDim::Concat, UnevenDim::Split]);
            CollectiveSpec::AllToAll { concat: d.next_below(2), cut }
        }
        5 => CollectiveSpec::Broadcast { root: d.next_below(parts) },
        6 if batches => {
            let calls: Vec<PlannedCall> =
                (0..parts).map(|p| call(d, CollectiveSpec::Send { to: (p + 1) % parts })).collect();
            return ring_exchange(&calls, &chosen, number);
        }
        _ => return pair_exchange(d, mesh, &chosen, call, batches.then_some(number)),
    };
    let what = if has_layout(mesh, what, group) {
        what
    } else {
        CollectiveSpec::Broadcast { root: d.next_below(parts) }
    };
    let call = call(d, what);
    JointOperation { parts: chosen.iter().flatten().map(|r| (r.0 as usize, call.clone())).collect() }
}

/// Every member sends to the next one, in one batch.
fn ring_exchange(calls: &[PlannedCall], groups: &[Vec<Rank>], number: u32) -> JointOperation {
    let mut out = JointOperation { parts: Vec::new() };
    for group in groups {
        for (at, rank) in group.iter().enumerate() {
            let from = (at + group.len() - 1) % group.len();
            let sends = PlannedCall { batch: Some(number + 1), ..calls[at].clone() };
            let takes = PlannedCall {
                collective: CollectiveSpec::Recv { from },
                batch: Some(number + 1),
                ..calls[from].clone()
            };
            let both = if sends.salt.is_multiple_of(2) { [sends, takes] } else { [takes, sends] };
            out.parts.extend(both.map(|c| (rank.0 as usize, c)));
        }
    }
    out
}

/// One rank of each group sends to another, once or twice, and possibly receives a reply, over any
/// group that contains both.
fn pair_exchange(
    d: &mut Rng,
    mesh: &Mesh,
    groups: &[Vec<Rank>],
    call: impl Fn(&mut Rng, CollectiveSpec) -> PlannedCall,
    number: Option<u32>,
) -> JointOperation {
    let mut out = JointOperation { parts: Vec::new() };
    let parts = groups[0].len();
    let from = d.next_below(parts);
    let to = (from + 1 + d.next_below(parts - 1)) % parts;
    let (there, mut back) =
        (call(d, CollectiveSpec::Send { to }), call(d, CollectiveSpec::Send { to: from }));
    let (twice, both) =
        (d.next_ratio(1, 4).then(|| call(d, CollectiveSpec::Send { to })), d.next_ratio(1, 2));
    let shared = |g: &Group| groups.iter().all(|m| mesh.group_members(m[to], *g).contains(&m[from]));
    let others: Vec<Group> = group_kinds(mesh).into_iter().filter(shared).collect();
    if d.next_ratio(1, 3) {
        back.group = d.pick_one(&others);
        back.sharding = pick_uniform_sharding(d, mesh, back.collective, back.group);
    }
    let batch = number.filter(|_| d.next_ratio(1, 2)).map(|n| n + 1);
    for g in groups {
        let (a, b): (Rank, Rank) = (g[from], g[to]);
        let at = |r: Rank, c: &PlannedCall| mesh.group_position(r, c.group).unwrap_or(0) as usize;
        let mut put = |r: Rank, c: &PlannedCall, sends: bool| {
            let peer = at(if r == a { b } else { a }, c);
            let what =
                if sends { CollectiveSpec::Send { to: peer } } else { CollectiveSpec::Recv { from: peer } };
            out.parts.push((r.0 as usize, PlannedCall { collective: what, batch, ..c.clone() }));
        };
        put(a, &there, true);
        twice.iter().for_each(|c| put(a, c, true));
        if both {
            put(a, &back, false);
        }
        // Both sides may begin with a send if the two transfers are one batch.
        let send_first = both && batch.is_some() && there.salt.is_multiple_of(2);
        if send_first {
            put(b, &back, true);
        }
        put(b, &there, false);
        twice.iter().for_each(|c| put(b, c, false));
        if both && !send_first {
            put(b, &back, true);
        }
    }
    out
}
