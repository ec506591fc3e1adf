//! A program of one role with its op times: the ops of each stream in order, and the dependencies of
//! each op.

use tessera_base::Diagnostic;
use tessera_device::{CommRoute, TimingModel};
use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::Mesh;

use crate::codes::T0810;

/// A program of one role as the simulated devices execute it: queues, dependencies and op times.
#[derive(Debug)]
pub(crate) struct TimedProgram {
    /// Phase and role, for messages.
    pub(crate) name: String,
    /// Dependencies and device work of each op, by op index.
    pub(crate) steps: Vec<TimedOp>,
    /// Ops of each stream, in order.
    pub(crate) queues: Vec<Vec<usize>>,
    /// For each op, the index of its stream in `queues`.
    pub(crate) op_streams: Vec<usize>,
    /// Host time of each launch that takes any, in program order, in nanoseconds.
    pub(crate) launch_times_ns: Vec<f64>,
    /// Launches of collectives, sends and receives in program order; [`TimedOp::collectives`] is a
    /// range of them.
    pub(crate) collectives: Vec<CollectiveLaunch>,
}

/// What one op waits for before it starts, and what it then does on the device.
#[derive(Debug)]
pub(crate) struct TimedOp {
    /// Number of host launches that must be complete before the op starts.
    pub(crate) required_launches: usize,
    /// Events that the op waits for, given by their recording ops.
    pub(crate) event_ops: Vec<usize>,
    /// For a wait: the op that issued the collective.
    pub(crate) issue_op: Option<usize>,
    /// Device work in nanoseconds; for a collective, the work before its transfer.
    pub(crate) work_ns: f64,
    /// Range of [`TimedProgram::collectives`] that this op launches, several in a batch. Empty for an op
    /// that an earlier op of its batch launches.
    pub(crate) collectives: std::ops::Range<usize>,
}

/// One launch of a collective, send or receive.
#[derive(Debug)]
pub(crate) struct CollectiveLaunch {
    pub(crate) op: usize,
    pub(crate) route: CommRoute,
    /// Duration after the arrival of the last member, in nanoseconds.
    pub(crate) duration_ns: f64,
    /// The properties on which all members must agree, encoded as one number.
    pub(crate) signature: u64,
    /// Text that identifies this launch in messages about mismatches and stalls.
    pub(crate) description: String,
}

impl TimedProgram {
    /// Converts a program and looks up its op times.
    pub(crate) fn new(
        p: &Program,
        mesh: &Mesh,
        timing: &dyn TimingModel,
    ) -> Result<TimedProgram, Diagnostic> {
        let name = format!("@{} of {}", p.name, if p.role.is_empty() { "no role" } else { &p.role });
        let refuse = |i: usize, why: &str| {
            Diagnostic::error(&T0810, format!("{} in {name}: {why}", p.ops[i].opcode.name()))
                .with_label(name.clone(), format!("op {i}"))
        };
        let mut timed = TimedProgram {
            name: name.clone(),
            steps: Vec::with_capacity(p.ops.len()),
            queues: vec![Vec::new(); p.streams.len()],
            op_streams: p.ops.iter().map(|op| op.stream.0 as usize).collect(),
            launch_times_ns: Vec::new(),
            collectives: Vec::new(),
        };
        let definitions = p.defining_ops();
        let batches = group_batches(p);
        for (i, op) in p.ops.iter().enumerate() {
            let Some(queue) = timed.queues.get_mut(op.stream.0 as usize) else {
                return Err(refuse(i, "is on a stream that the program does not declare"));
            };
            queue.push(i);
            let launch = timing.launch_ns(p, i);
            if launch > 0 {
                timed.launch_times_ns.push(launch as f64);
            }
            let recorded = |v: &tessera_ir::ValueId| {
                let at = definitions.get(v.0 as usize).copied().flatten();
                at.filter(|at| *at < i && p.ops[*at].opcode == Opcode::EventRecord)
            };
            let after: Option<Vec<usize>> = op.after.iter().map(recorded).collect();
            let after = after.ok_or_else(|| refuse(i, "waits for an event that no earlier op records"))?;
            let takes = match op.opcode {
                Opcode::Wait => {
                    let ticket = op.operands.first().and_then(|t| definitions.get(t.0 as usize).copied());
                    let issue = ticket.flatten().filter(|at| *at < i && p.ops[*at].opcode.is_collective());
                    Some(issue.ok_or_else(|| refuse(i, "waits for a collective that no earlier op issued"))?)
                }
                _ => None,
            };
            let first = timed.collectives.len();
            for at in batches.get(i).map_or(&[][..], Vec::as_slice) {
                let Some(route) = CommRoute::from_op(&p.ops[*at]) else {
                    return Err(refuse(*at, "names no group or no peer"));
                };
                timed.collectives.push(CollectiveLaunch {
                    op: *at,
                    route,
                    duration_ns: timing.collective_ns(p, *at, mesh) as f64,
                    signature: shared_signature(&p.ops[*at]),
                    description: format!("{} over {route}", p.ops[*at].opcode.name()),
                });
            }
            let meets = first..timed.collectives.len();
            // The first op of a batch packs the data of all its ops.
            let packed_ops = batches.get(i).map_or(&[][..], Vec::as_slice).iter();
            let work_ns = match op.opcode.is_collective() {
                true => packed_ops.map(|at| timing.op_ns(p, *at) as f64).sum(),
                false => timing.op_ns(p, i) as f64,
            };
            timed.steps.push(TimedOp {
                required_launches: timed.launch_times_ns.len(),
                event_ops: after,
                issue_op: takes,
                work_ns,
                collectives: meets,
            });
        }
        Ok(timed)
    }
}

/// Returns for each op the collectives that it launches: itself, and those that follow on its
/// stream with the same batch number.
fn group_batches(p: &Program) -> Vec<Vec<usize>> {
    let mut out = vec![Vec::new(); p.ops.len()];
    let mut open: Option<(i64, usize)> = None;
    for (i, op) in p.collective_ops() {
        let batch = op.batch_number().filter(|b| *b != 0);
        let joins =
            |(number, first): &(i64, usize)| Some(*number) == batch && p.ops[*first].stream == op.stream;
        open = match open.filter(joins) {
            Some(same) => Some(same),
            None => batch.map(|b| (b, i)),
        };
        out[open.map_or(i, |(_, first)| first)].push(i);
    }
    out
}

/// Encodes the properties that all members of a communicator share: the opcode, and the reduction
/// if there is one. A send and its receive count as one opcode; extents may differ because shards
/// may be uneven.
fn shared_signature(op: &Op) -> u64 {
    let opcode = if op.opcode == Opcode::Recv { Opcode::Send } else { op.opcode };
    let reduction = op.reduction().map_or(0, |r| 1 + r as u64);
    (opcode as u64) << 8 | reduction
}
