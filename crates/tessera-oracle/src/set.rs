//! Random sets of programs: a list of meetings in one order for all ranks, which cannot fail, then changes to it.

use tessera_ir::{DType, HINTS, Opcode, Program};
use tessera_mesh::{Axis, Mesh, Rank};

use crate::dice::Dice;
use crate::edit::{self, Edit};
use crate::lower::{self, Style};
use crate::mutate::{self, Mutation};

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
    pub(crate) axis: Axis,
    pub(crate) what: What,
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

const MESHES: [[u32; 4]; 8] = [
    [2, 1, 1, 1],
    [3, 1, 1, 1],
    [4, 1, 1, 1],
    [2, 1, 2, 1],
    [2, 1, 2, 1],
    [2, 1, 1, 2],
    [1, 2, 2, 1],
    [1, 1, 3, 1],
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
        Case::sized(seed, index, 2, &MESHES[..if index % 8 < 6 { 1 } else { 4 }])
    }

    fn sized(seed: u64, index: u32, most: usize, meshes: &[[u32; 4]]) -> Case {
        let mut d = Dice::new(seed, [index, 0]);
        let mesh = Mesh::new(d.pick(meshes)).unwrap_or_default();
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

fn meeting(d: &mut Dice, mesh: &Mesh, graph: Option<u32>, number: u32) -> Meeting {
    let axes: Vec<Axis> = mesh.axes().collect();
    let axis = d.pick(&axes);
    let parts = mesh.size(axis) as usize;
    let call = |d: &mut Dice, what| Call {
        salt: d.word(),
        axis,
        what,
        shape: d.below(SHAPES.len()),
        dtype: if d.chance(1, 4) { DType::Bf16 } else { DType::F32 },
        batch: None,
        graph,
    };
    let groups = mesh.groups(axis);
    let chosen = if d.chance(1, 2) { groups } else { vec![groups[d.below(groups.len())].clone()] };
    let mut out = Meeting { parts: Vec::new() };
    let all = |m: &mut Meeting, c: Call| {
        for r in chosen.iter().flatten() {
            m.parts.push((r.0 as usize, c.clone()));
        }
    };
    match d.below(8) {
        0 | 1 => {
            let c = call(d, What::AllReduce { tree: false });
            let tree = d.chance(1, 4);
            all(&mut out, Call { what: What::AllReduce { tree }, ..c });
        }
        2 => {
            let dim = d.below(2);
            all(&mut out, call(d, What::AllGather { dim }));
        }
        3 => {
            let (dim, tree) = (d.below(2), d.chance(1, 4));
            all(&mut out, call(d, What::ReduceScatter { dim, tree }));
        }
        4 => {
            let (concat, cut) = (d.below(2), d.pick(&[Cut::Even, Cut::Even, Cut::Concat, Cut::Split]));
            all(&mut out, call(d, What::AllToAll { concat, cut }));
        }
        5 => {
            let root = d.below(parts);
            all(&mut out, call(d, What::Broadcast { root }));
        }
        _ => {
            let from = d.below(parts);
            let to = (from + 1 + d.below(parts - 1)) % parts;
            let (there, back) = (call(d, What::Send { to }), call(d, What::Send { to: from }));
            let both = d.chance(1, 2);
            let batch = (knows(Opcode::Send, "batch") && d.chance(1, 2)).then_some(number + 1);
            for g in &chosen {
                let (a, b): (Rank, Rank) = (g[from], g[to]);
                let mut put = |r: Rank, c: &Call, what| {
                    out.parts.push((r.0 as usize, Call { what, batch, ..c.clone() }));
                };
                put(a, &there, What::Send { to });
                if both {
                    put(a, &back, What::Recv { from: to });
                }
                // Both may begin with the send where the two are one launch.
                let send_first = both && batch.is_some() && there.salt % 2 == 0;
                if send_first {
                    put(b, &back, What::Send { to: from });
                }
                put(b, &there, What::Recv { from });
                if both && !send_first {
                    put(b, &back, What::Send { to: from });
                }
            }
        }
    }
    out
}
