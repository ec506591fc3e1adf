//! A call as an estimate plays it: what every role does in every phase, step by step, with its prices.

use std::ops::Range;
use std::rc::Rc;

use tessera_cost::program::{Price, Priced};
use tessera_cost::{CollectiveOp, Machine};
use tessera_ir::{Bundle, Kind, Op, Opcode, Program, ValueId};
use tessera_mesh::{Group, Mesh, Rank};

/// What the ranks of a mesh do.
pub(super) struct Score {
    pub mesh: Mesh,
    /// Ranks of each role.
    pub roles: Vec<Vec<Rank>>,
    pub phases: Vec<Movement>,
}

/// A phase.
pub(super) struct Movement {
    pub name: String,
    /// What each role does, in the order of roles.
    pub parts: Vec<Part>,
}

/// What a role does in a phase: all steps, of which a range is played some times more than once.
#[derive(Clone)]
pub(super) struct Part {
    pub steps: Rc<[Step]>,
    pub again: Range<usize>,
    pub times: u64,
    /// What each step is called, where somebody looks at them.
    pub names: Option<Rc<[Called]>>,
}

/// What a step is called.
pub(super) struct Called {
    pub lane: String,
    pub name: String,
    /// Index of its op in the program.
    pub op: usize,
}

/// One op that is more than a name for what is there already.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Step {
    pub does: Does,
    pub stream: u8,
    /// At full speed.
    pub price: Price,
    /// The steps that it comes after, besides those of its stream: how many steps back each is.
    pub after: Vec<u32>,
    /// Bytes of its results: steps that are equal need equal slots.
    pub made: u64,
}

/// What a step is to the streams of its rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Does {
    /// A point on its stream that other steps come after.
    Point,
    /// Takes what an exchange has brought.
    Take,
    /// Meets other ranks; with `issue`, a later step takes what it brings.
    Exchange { whom: Whom, what: CollectiveOp, bytes: f64, issue: bool },
    /// Anything else.
    Work,
}

/// Who meets, seen from a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Whom {
    pub group: Option<Group>,
    pub way: Way,
}

/// How they meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    /// All of them.
    All,
    /// A send to one of them, who may be missing where a program is wrong.
    To(Option<Peer>),
    /// A receive from one.
    From(Option<Peer>),
}

/// A member of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Peer {
    At(usize),
    First,
    Previous,
    Next,
    Last,
}

impl Score {
    /// What a bundle says. `named` keeps what each step is called.
    pub fn of(bundle: &Bundle, machine: &Machine, named: bool) -> Score {
        let part = |program: &Program| {
            let (steps, at) = steps(program, machine);
            let names = named.then(|| {
                let defs = program.definitions();
                let lane = |op: &Op| program.streams.get(op.stream.0 as usize).cloned().unwrap_or_default();
                let ops = at.iter().map(|i| (*i, &program.ops[*i]));
                ops.map(|(i, op)| Called { lane: lane(op), name: called(program, &defs, op), op: i })
                    .collect()
            });
            Part { again: 0..0, times: 0, steps: steps.into(), names }
        };
        Score {
            mesh: bundle.mesh,
            roles: bundle.roles.iter().map(|r| r.ranks.clone()).collect(),
            phases: bundle
                .phases
                .iter()
                .map(|p| Movement { name: p.name.clone(), parts: p.programs.iter().map(part).collect() })
                .collect(),
        }
    }

    /// Index of a phase.
    pub fn phase(&self, name: &str) -> Option<usize> {
        self.phases.iter().position(|p| p.name == name)
    }
}

impl Part {
    /// How many steps are played.
    pub fn len(&self) -> usize {
        self.steps.len() + self.times as usize * self.again.len()
    }

    /// Indices of steps in the order in which they are played.
    pub fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let (again, times) = (self.again.clone(), self.times);
        let rest = again.end..self.steps.len();
        (0..again.end).chain((0..times).flat_map(move |_| again.clone())).chain(rest)
    }
}

impl Whom {
    pub fn of(op: &Op) -> Whom {
        let peer = |key| op.int(key).and_then(|at| usize::try_from(at).ok()).map(Peer::At);
        let way = match op.opcode {
            Opcode::Send => Way::To(peer("to")),
            Opcode::Recv => Way::From(peer("from")),
            _ => Way::All,
        };
        Whom { group: op.group(), way }
    }

    /// The ranks that meet, seen from one of them: of a send or receive the two ends, itself first.
    pub fn met(self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        let members = self.group.map_or_else(Vec::new, |g| mesh.members(rank, g));
        let (Way::To(peer) | Way::From(peer)) = self.way else { return members };
        let here = members.iter().position(|r| *r == rank);
        let at = |peer| match peer {
            Peer::At(at) => Some(at),
            Peer::First => Some(0),
            Peer::Previous => here?.checked_sub(1),
            Peer::Next => Some(here? + 1),
            Peer::Last => members.len().checked_sub(1),
        };
        let other = peer.and_then(at).and_then(|at| members.get(at));
        std::iter::once(rank).chain(other.copied()).collect()
    }
}

/// The steps of a program, and the op that each is.
pub(super) fn steps(program: &Program, machine: &Machine) -> (Vec<Step>, Vec<usize>) {
    let priced = Priced::of(machine, program, 1.0);
    let defs = program.definitions();
    let (mut out, mut at): (Vec<Step>, Vec<usize>) = (Vec::new(), Vec::new());
    let mut step_of: Vec<Option<usize>> = vec![None; program.ops.len()];
    for (i, (op, price)) in program.ops.iter().zip(&priced.ops).enumerate() {
        if op.opcode.row().kind == Kind::Source && op.after.is_empty() {
            continue;
        }
        let does = match op.opcode {
            Opcode::EventRecord => Does::Point,
            Opcode::Wait => Does::Take,
            _ => match priced.payload(i) {
                Some((what, bytes)) => Does::Exchange { whom: Whom::of(op), what, bytes, issue: op.issue },
                None => Does::Work,
            },
        };
        let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        let earlier = op.after.iter().chain(ticket);
        let back = |v: &ValueId| step_of[defs[v.0 as usize]?].map(|s| (out.len() - s) as u32);
        out.push(Step {
            does,
            stream: op.stream.0 as u8,
            price: *price,
            after: earlier.filter_map(back).collect(),
            made: op.results.iter().map(|r| program.ty(*r).bytes().0).sum(),
        });
        at.push(i);
        step_of[i] = Some(out.len() - 1);
    }
    (out, at)
}

/// What an op is called on a chart: its name and what it works with.
fn called(p: &Program, defs: &[Option<usize>], op: &Op) -> String {
    let maker = |v: &ValueId| defs[v.0 as usize].map(|d| &p.ops[d]);
    let weight = op.operands.iter().filter_map(maker).find(|o| o.opcode == Opcode::Weight);
    let buffer = op.buffer.or_else(|| op.operands.get(1).and_then(maker)?.buffer);
    let verb = op.opcode.name();
    match (weight.and_then(|w| w.name.as_deref()), buffer) {
        (Some(w), _) => format!("{verb} {}", w.trim_end_matches(".weight")),
        (None, Some(b)) => format!("{verb} {}", p.buffer(b).name),
        (None, None) => verb.to_string(),
    }
}
