//! Random sets of programs: a list of meetings in one order for all ranks, which cannot fail, then changes to it.

use tessera_ir::{DType, HINTS, Opcode, Program};
use tessera_mesh::{Axis, Group, Mesh, Rank};

use crate::edit::{self, Edit};
use crate::lower::{self, Style};
use crate::mutate::{self, Mutation};
use tessera_base::random::Dice;

/// A set of programs before it is lowered. Everything else follows from these fields.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The ranks.
    pub mesh: Mesh,
    /// Streams of each program, 1 to 3.
    pub streams: usize,
    /// Whether ranks that call the same get the same program, as ranks of one role have.
    pub alike: bool,
    /// What meets, in order.
    pub meetings: Vec<Meeting>,
    /// Changes to the lists of single ranks.
    pub mutations: Vec<Mutation>,
    /// Changes to single programs.
    pub edits: Vec<Edit>,
}

/// One thing that some ranks do together.
#[derive(Debug, Clone, PartialEq)]
pub struct Meeting {
    /// Which ranks call what.
    pub parts: Vec<(usize, Call)>,
}

/// One collective of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Names the meeting: what is left open here is drawn from it, the same whatever else the set holds.
    pub(crate) salt: u32,
    pub(crate) group: Group,
    pub(crate) what: What,
    /// What a broadcast, send or receive moves.
    pub(crate) held: Held,
    /// Index into [`SHAPES`].
    pub(crate) shape: usize,
    pub(crate) dtype: DType,
    pub(crate) batch: Option<u32>,
    pub(crate) graph: Option<u32>,
}

/// Which collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the constants of the op table")]
pub enum What {
    AllReduce { tree: bool },
    AllGather { dim: usize },
    ReduceScatter { dim: usize, tree: bool },
    AllToAll { concat: usize, cut: Cut },
    Broadcast { root: usize },
    Send { to: usize },
    Recv { from: usize },
}

/// How the ranks hold a value that is handed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// Every rank all of it.
    Whole,
    /// Pieces of a dim over an axis or over each block of it.
    Pieces {
        /// The axis.
        axis: Axis,
        /// Positions of a block.
        ways: Option<u32>,
        /// The dim.
        dim: usize,
        /// Whether the first ranks hold more of it.
        uneven: bool,
    },
}

/// Where an exchange has uneven pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Nowhere.
    Even,
    /// Along the dim that is put together.
    Concat,
    /// Along the dim that is cut.
    Split,
}

/// Matrices that every axis divides: first those of 576 elements, then others.
pub(crate) const SHAPES: [[u64; 2]; 5] = [[12, 48], [24, 24], [48, 12], [12, 12], [12, 24]];
/// How many of [`SHAPES`] hold as many elements as the first.
pub(crate) const ALIKE: usize = 3;

/// Sizes of the axes, and ranks outside; the first are the smallest.
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
const MEETINGS_MAX: usize = 5;
const COLLECTIVES_MAX: usize = 6;

/// Whether the op table has this constant for an op.
pub(crate) fn knows(opcode: Opcode, constant: &str) -> bool {
    let row = opcode.row().attrs.iter();
    row.chain(HINTS).any(|a| a.trim_end_matches('?') == constant)
}

impl Case {
    /// Set number `index` of a seed; every second one is mutated.
    #[must_use]
    pub fn random(seed: u64, index: u32) -> Case {
        Case::sized(seed, index, MEETINGS_MAX, &MESHES)
    }

    /// A set small enough to visit every state of.
    #[must_use]
    pub fn small(seed: u64, index: u32) -> Case {
        Case::sized(seed, index, 2, &MESHES[..if index % 8 < 6 { 2 } else { 5 }])
    }

    fn sized(seed: u64, index: u32, most: usize, meshes: &[([u32; 4], u32)]) -> Case {
        let mut d = Dice::new(seed, [index, 0]);
        let (sizes, outside) = d.pick(meshes);
        let mesh = Mesh::new(sizes).and_then(|m| m.with_outside(outside)).unwrap_or_default();
        let mut case = Case {
            mesh,
            streams: 1 + d.below(3),
            alike: d.chance(1, 2),
            meetings: Vec::new(),
            mutations: Vec::new(),
            edits: Vec::new(),
        };
        // Stretches of meetings that are captured, each in a graph of its own.
        let mut graphs = 0;
        let mut graph = None;
        for _ in 0..1 + d.below(most) {
            if knows(Opcode::AllReduce, "graph") && d.chance(1, 4) {
                graphs += 1;
                graph = (graph.is_none() || d.chance(1, 2)).then_some(graphs);
            }
            let meeting = meeting(&mut d, &mesh, graph, case.meetings.len() as u32);
            let mut ranks = vec![0; mesh.ranks() as usize];
            case.meetings.iter().chain([&meeting]).flat_map(|m| &m.parts).for_each(|(r, _)| ranks[*r] += 1);
            if ranks.iter().all(|n| *n <= COLLECTIVES_MAX) {
                case.meetings.push(meeting);
            }
        }
        if index % 2 == 1 {
            for _ in 0..1 + d.below(3) {
                if d.chance(3, 5) {
                    case.mutations.push(Mutation::random(&mut d, &mesh));
                } else {
                    case.edits.push(Edit::random(&mut d, &mesh));
                }
            }
        }
        case
    }

    /// What each rank calls, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Vec<Call>> {
        let mut out = vec![Vec::new(); self.mesh.ranks() as usize];
        for (rank, call) in self.meetings.iter().flat_map(|m| &m.parts) {
            out[*rank].push(call.clone());
        }
        for m in &self.mutations {
            mutate::apply(m, &self.mesh, &mut out);
        }
        out
    }

    /// The programs, one per rank.
    ///
    /// # Errors
    /// What the rules of the IR refuse while building: a defect of the generator.
    pub fn programs(&self) -> Result<Vec<Program>, String> {
        let calls = self.calls();
        let style = Style { streams: self.streams, alike: self.alike };
        let lowered = calls.iter().enumerate().map(|(r, c)| lower::lower(&self.mesh, r, style, c));
        let mut programs = lowered.collect::<Result<Vec<Program>, String>>()?;
        for e in &self.edits {
            edit::apply(e, &mut programs);
        }
        Ok(programs)
    }
}

/// Every kind of group with more than one member: the axes, blocks of them, the world.
pub(crate) fn kinds(mesh: &Mesh) -> Vec<Group> {
    let blocks = |axis| mesh.cuts_of(axis).into_iter().map(move |w| Group::Axis { axis, ways: Some(w) });
    let of_axes = mesh.axes().flat_map(|a| std::iter::once(Group::of(a)).chain(blocks(a)));
    of_axes.chain([Group::World]).collect()
}

/// Whether the IR has a layout for this collective over this group.
pub(crate) fn has_layout(mesh: &Mesh, what: What, group: Group) -> bool {
    match (what, group) {
        (_, Group::Axis { .. }) | (What::Broadcast { .. } | What::Send { .. } | What::Recv { .. }, _) => true,
        // No op makes terms over two axes at once, and nobody outside holds any.
        (What::AllReduce { .. }, Group::World) => mesh.outside() == 0 && mesh.axes().count() == 1,
        (_, Group::World) => false,
    }
}

/// How a value may be held that is handed on over a group.
pub(crate) fn holds(mesh: &Mesh, what: What, group: Group) -> Vec<Held> {
    let mut out = vec![Held::Whole];
    let Group::Axis { axis: own, .. } = group else { return out };
    for kind in kinds(mesh) {
        let Group::Axis { axis, ways } = kind else { continue };
        if axis == own && matches!(what, What::Broadcast { .. }) {
            continue;
        }
        for (dim, uneven) in [(0, false), (1, false), (0, true), (1, true)] {
            out.push(Held::Pieces { axis, ways, dim, uneven });
        }
    }
    out
}

/// [`holds`] without pieces that differ between members.
fn holds_alike(d: &mut Dice, mesh: &Mesh, what: What, group: Group) -> Held {
    let mut all = holds(mesh, what, group);
    let own = |axis: Axis| matches!(group, Group::Axis { axis: own, .. } if own == axis);
    all.retain(|h| !matches!(h, Held::Pieces { axis, uneven: true, .. } if own(*axis)));
    if d.chance(2, 3) { Held::Whole } else { d.pick(&all) }
}

fn meeting(d: &mut Dice, mesh: &Mesh, graph: Option<u32>, number: u32) -> Meeting {
    let group = d.pick(&kinds(mesh));
    let parts = mesh.group_size(group) as usize;
    let call = |d: &mut Dice, what| Call {
        salt: d.word(),
        group,
        what,
        held: holds_alike(d, mesh, what, group),
        shape: d.below(SHAPES.len()),
        dtype: if d.chance(1, 4) { DType::Bf16 } else { DType::F32 },
        batch: None,
        graph,
    };
    let firsts = mesh.iter().filter(|r| mesh.position(*r, group) == Some(0));
    let groups: Vec<Vec<Rank>> = firsts.map(|r| mesh.members(r, group)).collect();
    let chosen = if d.chance(1, 2) { groups } else { vec![groups[d.below(groups.len())].clone()] };
    let batches = knows(Opcode::Send, "batch");
    let what = match d.below(9) {
        0 | 1 => What::AllReduce { tree: d.chance(1, 4) },
        2 => What::AllGather { dim: d.below(2) },
        3 => What::ReduceScatter { dim: d.below(2), tree: d.chance(1, 4) },
        4 => {
            let cut = d.pick(&[Cut::Even, Cut::Even, Cut::Concat, Cut::Split]);
            What::AllToAll { concat: d.below(2), cut }
        }
        5 => What::Broadcast { root: d.below(parts) },
        6 if batches => {
            let calls: Vec<Call> = (0..parts).map(|p| call(d, What::Send { to: (p + 1) % parts })).collect();
            return ring(&calls, &chosen, number);
        }
        _ => return exchange(d, mesh, &chosen, call, batches.then_some(number)),
    };
    let what = if has_layout(mesh, what, group) { what } else { What::Broadcast { root: d.below(parts) } };
    let call = call(d, what);
    Meeting { parts: chosen.iter().flatten().map(|r| (r.0 as usize, call.clone())).collect() }
}

/// Everyone to the next, in one launch.
fn ring(calls: &[Call], groups: &[Vec<Rank>], number: u32) -> Meeting {
    let mut out = Meeting { parts: Vec::new() };
    for group in groups {
        for (at, rank) in group.iter().enumerate() {
            let from = (at + group.len() - 1) % group.len();
            let sends = Call { batch: Some(number + 1), ..calls[at].clone() };
            let takes = Call { what: What::Recv { from }, batch: Some(number + 1), ..calls[from].clone() };
            let both = if sends.salt.is_multiple_of(2) { [sends, takes] } else { [takes, sends] };
            out.parts.extend(both.map(|c| (rank.0 as usize, c)));
        }
    }
    out
}

/// One rank of each group to another, once or twice, and maybe back, there over any group that has both.
fn exchange(
    d: &mut Dice,
    mesh: &Mesh,
    groups: &[Vec<Rank>],
    call: impl Fn(&mut Dice, What) -> Call,
    number: Option<u32>,
) -> Meeting {
    let mut out = Meeting { parts: Vec::new() };
    let parts = groups[0].len();
    let from = d.below(parts);
    let to = (from + 1 + d.below(parts - 1)) % parts;
    let (there, mut back) = (call(d, What::Send { to }), call(d, What::Send { to: from }));
    let (twice, both) = (d.chance(1, 4).then(|| call(d, What::Send { to })), d.chance(1, 2));
    let shared = |g: &Group| groups.iter().all(|m| mesh.members(m[to], *g).contains(&m[from]));
    let others: Vec<Group> = kinds(mesh).into_iter().filter(shared).collect();
    if d.chance(1, 3) {
        back.group = d.pick(&others);
        back.held = holds_alike(d, mesh, back.what, back.group);
    }
    let batch = number.filter(|_| d.chance(1, 2)).map(|n| n + 1);
    for g in groups {
        let (a, b): (Rank, Rank) = (g[from], g[to]);
        let at = |r: Rank, c: &Call| mesh.position(r, c.group).unwrap_or(0) as usize;
        let mut put = |r: Rank, c: &Call, sends: bool| {
            let peer = at(if r == a { b } else { a }, c);
            let what = if sends { What::Send { to: peer } } else { What::Recv { from: peer } };
            out.parts.push((r.0 as usize, Call { what, batch, ..c.clone() }));
        };
        put(a, &there, true);
        twice.iter().for_each(|c| put(a, c, true));
        if both {
            put(a, &back, false);
        }
        // Both may begin with the send where the two are one launch.
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
