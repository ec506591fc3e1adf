//! The schedule of a call for simulation: the priced steps of every role in every phase.

use std::ops::Range;
use std::rc::Rc;

use tessera_cost::program_cost::{OpActivity, OpEstimate, ProgramEstimate, price_expert_fetches};
use tessera_cost::{Algorithm, CollectiveOp, MachineModel};
use tessera_ir::{Bundle, Op, OpKind, Opcode, Program, StreamKind, ValueId};
use tessera_mesh::{Group, Mesh, Rank};

/// The steps that every role of a mesh runs in every phase.
pub(super) struct CallSchedule {
    pub mesh: Mesh,
    /// Ranks of each role; every phase lists its steps in the same order of roles.
    pub roles: Vec<Vec<Rank>>,
    pub phases: Vec<PhaseSchedule>,
}

/// The steps of all roles in one phase.
pub(super) struct PhaseSchedule {
    pub name: String,
    /// Steps of each role, in the order of roles.
    pub roles: Vec<RoleSteps>,
}

/// The steps of a role in a phase, of which one range may repeat.
#[derive(Clone)]
pub(super) struct RoleSteps {
    pub steps: Rc<[ScheduledStep]>,
    pub repeat: Range<usize>,
    pub extra_repeats: u64,
    /// Label of each step, if a chart needs them.
    pub labels: Option<Rc<[StepLabel]>>,
}

/// The text that a chart shows for a step, and the op behind the step.
pub(super) struct StepLabel {
    pub lane: String,
    pub name: String,
    /// Index of the step's op in the program.
    pub op: usize,
}

/// One op with a cost or a dependency; ops that only name existing memory have no step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScheduledStep {
    pub effect: StepEffect,
    pub stream: u8,
    /// Cost of the op on its own device at full speed, without the transfer of a collective.
    pub price: OpEstimate,
    /// Distances, in steps backwards, to the steps that this step waits for in addition to its
    /// stream.
    pub dependencies: Vec<u32>,
    /// Bytes of the results: equal steps need equal slots.
    pub result_bytes: u64,
}

/// The effect of a step on the streams of its rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum StepEffect {
    /// Records an event on its stream.
    Event,
    /// Waits for the result of an issued collective.
    Wait,
    /// Communicates with other ranks; if `is_async`, a later step waits for the result.
    Communicate {
        peers: CommPeers,
        op: CollectiveOp,
        bytes: f64,
        /// The algorithm with which the op is tagged, if any.
        tag: Option<Algorithm>,
        is_async: bool,
    },
    /// Fetches experts from the second tier of memory on the stream `io`, once the step's own stream reaches it. The
    /// next step waits for them.
    Fetch {
        io: u8,
        /// Bytes of the experts.
        bytes: f64,
        /// Time of the transfer, in nanoseconds.
        ns: f64,
    },
    /// Occupies the rank's own device, without any communication with other ranks.
    Compute,
}

/// The ranks that take part in a communication: a group or, for a send or receive, two of its
/// members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CommPeers {
    pub group: Option<Group>,
    pub direction: CommDirection,
}

/// Whether a communication is a collective of its group, or a send to or a receive from one member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CommDirection {
    /// A collective of all members.
    Collective,
    /// A send to one member, which is `None` if the program is invalid.
    SendTo(Option<PeerPosition>),
    /// A receive from one member, which is `None` if the program is invalid.
    RecvFrom(Option<PeerPosition>),
}

/// A member of a group, by its index or by its place in a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PeerPosition {
    Index(usize),
    First,
    Previous,
    Next,
    Last,
}

impl CallSchedule {
    /// Creates the schedule of a bundle. `named` keeps the label of each step.
    pub fn from_bundle(bundle: &Bundle, machine: &MachineModel, named: bool) -> CallSchedule {
        let role_steps = |program: &Program| {
            let (steps, at) = schedule_steps(program, machine);
            let names = named.then(|| {
                let defs = program.defining_ops();
                let lane = |op: &Op| program.streams.get(op.stream.0 as usize).cloned().unwrap_or_default();
                let label = |(step, i): (&ScheduledStep, &usize)| {
                    let op = &program.ops[*i];
                    let name = op_label(program, &defs, op);
                    let (lane, name) = match step.effect {
                        StepEffect::Fetch { .. } => {
                            (StreamKind::Io.name().to_string(), format!("fetch for {name}"))
                        }
                        _ => (lane(op), name),
                    };
                    StepLabel { lane, name, op: *i }
                };
                steps.iter().zip(&at).map(label).collect()
            });
            RoleSteps { repeat: 0..0, extra_repeats: 0, steps: steps.into(), labels: names }
        };
        CallSchedule {
            mesh: bundle.mesh,
            roles: bundle.roles.iter().map(|r| r.ranks.clone()).collect(),
            phases: bundle
                .phases
                .iter()
                .map(|p| PhaseSchedule {
                    name: p.name.clone(),
                    roles: p.programs.iter().map(role_steps).collect(),
                })
                .collect(),
        }
    }

    /// Returns the index of the phase with this name in `phases`, or `None` without such a phase.
    pub fn phase_index(&self, name: &str) -> Option<usize> {
        self.phases.iter().position(|p| p.name == name)
    }
}

impl RoleSteps {
    /// Returns the number of steps including repetitions.
    pub fn len(&self) -> usize {
        self.steps.len() + self.extra_repeats as usize * self.repeat.len()
    }

    /// Iterates over the step indices in simulation order.
    pub fn step_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (again, times) = (self.repeat.clone(), self.extra_repeats);
        let rest = again.end..self.steps.len();
        (0..again.end).chain((0..times).flat_map(move |_| again.clone())).chain(rest)
    }
}

impl CommPeers {
    pub fn from_op(op: &Op) -> CommPeers {
        let index = |at| usize::try_from(at).ok().map(PeerPosition::Index);
        let direction = match op.peer_position() {
            Some(tessera_ir::PeerPosition::To(at)) => CommDirection::SendTo(index(at)),
            Some(tessera_ir::PeerPosition::From(at)) => CommDirection::RecvFrom(index(at)),
            None => CommDirection::Collective,
        };
        CommPeers { group: op.comm_group(), direction }
    }

    /// Returns the ranks that communicate, given one of them: all members of a collective; for a
    /// send or receive the two ends, `rank` first.
    pub fn participants(self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        let members = self.group.map_or_else(Vec::new, |g| mesh.group_members(rank, g));
        let (CommDirection::SendTo(peer) | CommDirection::RecvFrom(peer)) = self.direction else {
            return members;
        };
        let here = members.iter().position(|r| *r == rank);
        let at = |peer| match peer {
            PeerPosition::Index(at) => Some(at),
            PeerPosition::First => Some(0),
            PeerPosition::Previous => here?.checked_sub(1),
            PeerPosition::Next => Some(here? + 1),
            PeerPosition::Last => members.len().checked_sub(1),
        };
        let other = peer.and_then(at).and_then(|at| members.get(at));
        std::iter::once(rank).chain(other.copied()).collect()
    }
}

/// Returns the steps of a program, and the op index of each step. A fetch of experts has the op that waits for it.
pub(super) fn schedule_steps(program: &Program, machine: &MachineModel) -> (Vec<ScheduledStep>, Vec<usize>) {
    let priced = ProgramEstimate::new(machine, program, 1.0);
    let defs = program.defining_ops();
    let fetches = price_expert_fetches(machine, program);
    let io = program.streams.iter().position(|name| name == StreamKind::Io.name());
    let io = io.unwrap_or(program.streams.len()) as u8;
    let (mut out, mut at): (Vec<ScheduledStep>, Vec<usize>) = (Vec::new(), Vec::new());
    let mut step_of: Vec<Option<usize>> = vec![None; program.ops.len()];
    for (i, (op, price)) in program.ops.iter().zip(&priced.ops).enumerate() {
        if op.opcode.table_row().kind == OpKind::Source && op.after.is_empty() {
            continue;
        }
        let does = match op.opcode {
            Opcode::EventRecord => StepEffect::Event,
            Opcode::Wait => StepEffect::Wait,
            _ => match priced.transfer_payload(i) {
                Some((what, bytes)) => StepEffect::Communicate {
                    peers: CommPeers::from_op(op),
                    op: what,
                    bytes,
                    tag: op.algorithm_tag().map(Algorithm::from),
                    is_async: op.issue,
                },
                None => StepEffect::Compute,
            },
        };
        let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        let earlier = op.after.iter().chain(ticket);
        let back = |v: &ValueId| step_of[defs[v.0 as usize]?].map(|s| (out.len() - s) as u32);
        let stream = op.stream.0 as u8;
        let mut dependencies: Vec<u32> = earlier.filter_map(back).collect();
        if let Some(fetch) = fetches.iter().find(|fetch| fetch.reader == i) {
            out.push(ScheduledStep {
                effect: StepEffect::Fetch { io, bytes: fetch.bytes, ns: fetch.ns },
                stream,
                price: NO_DEVICE_WORK,
                // The fetch waits for what its reader waits for, and the reader for the fetch, one step back.
                dependencies: std::mem::replace(&mut dependencies, vec![1]),
                result_bytes: 0,
            });
            at.push(i);
        }
        out.push(ScheduledStep {
            effect: does,
            stream,
            price: *price,
            dependencies,
            result_bytes: op.results.iter().map(|r| program.type_of(*r).byte_size().0).sum(),
        });
        at.push(i);
        step_of[i] = Some(out.len() - 1);
    }
    (out, at)
}

/// The cost of a step that its own device has no part in.
const NO_DEVICE_WORK: OpEstimate =
    OpEstimate { activity: OpActivity::Nothing, ns: 0.0, throttled_ns: 0.0, launches: 0, flops: 0.0 };

/// Returns the name of an op for a chart: its opcode with the tag of its algorithm, and the weight or
/// buffer that it uses.
fn op_label(p: &Program, defs: &[Option<usize>], op: &Op) -> String {
    let maker = |v: &ValueId| defs[v.0 as usize].map(|d| &p.ops[d]);
    let weight = op.operands.iter().filter_map(maker).find(|o| o.opcode == Opcode::Weight);
    let buffer = op.buffer.or_else(|| op.operands.get(1).and_then(maker)?.buffer);
    let verb = op.timeline_name();
    match (weight.and_then(|w| w.name.as_deref()), buffer) {
        (Some(w), _) => format!("{verb} {}", w.trim_end_matches(".weight")),
        (None, Some(b)) => format!("{verb} {}", p.buffer(b).name),
        (None, None) => verb.to_string(),
    }
}
