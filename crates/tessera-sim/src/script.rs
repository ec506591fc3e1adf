//! A program of one role with its prices: what each stream does, in order, and what each op waits for.

use tessera_base::Diagnostic;
use tessera_device::Prices;
use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::Mesh;

use crate::T0810;
use crate::lanes::Way;

/// A priced program.
#[derive(Debug)]
pub(crate) struct Script {
    /// Phase and role, for messages.
    pub(crate) name: String,
    /// One step per op.
    pub(crate) steps: Vec<Step>,
    /// Ops of each stream, in order.
    pub(crate) queues: Vec<Vec<usize>>,
    /// Stream of each op.
    pub(crate) stream_of: Vec<usize>,
    /// Host time of each launch that takes any, in program order, in nanoseconds.
    pub(crate) launches: Vec<f64>,
    /// Launches of collectives in program order.
    pub(crate) meets: Vec<Meet>,
}

/// What an op does on its stream.
#[derive(Debug)]
pub(crate) struct Step {
    /// Launches of the host that must be over before it starts.
    pub(crate) launched: usize,
    /// Events, by the op that records each.
    pub(crate) after: Vec<usize>,
    /// Of a wait: the op that issued what it waits for.
    pub(crate) takes: Option<usize>,
    /// Work on the device, in nanoseconds; of a collective, before it meets.
    pub(crate) work_ns: f64,
    /// Of a collective: which of [`Script::meets`] its launch is, several where they are launched as one. Empty for one
    /// that is launched with an earlier one.
    pub(crate) meets: std::ops::Range<usize>,
}

/// One launch of a collective, send or receive.
#[derive(Debug)]
pub(crate) struct Meet {
    pub(crate) op: usize,
    pub(crate) way: Way,
    /// From when the last member is there, in nanoseconds.
    pub(crate) ns: f64,
    /// What the members must have in common, as one number.
    pub(crate) what: u64,
    /// In words.
    pub(crate) says: String,
}

impl Script {
    /// Reads a program and asks for its prices.
    pub(crate) fn new(p: &Program, mesh: &Mesh, prices: &dyn Prices) -> Result<Script, Diagnostic> {
        let name = format!("@{} of {}", p.name, if p.role.is_empty() { "no role" } else { &p.role });
        let refuse = |i: usize, why: &str| {
            Diagnostic::error(&T0810, format!("{} in {name}: {why}", p.ops[i].opcode.name()))
                .at(name.clone(), format!("op {i}"))
        };
        let mut script = Script {
            name: name.clone(),
            steps: Vec::with_capacity(p.ops.len()),
            queues: vec![Vec::new(); p.streams.len()],
            stream_of: p.ops.iter().map(|op| op.stream.0 as usize).collect(),
            launches: Vec::new(),
            meets: Vec::new(),
        };
        let definitions = p.definitions();
        let batches = batches(p);
        for (i, op) in p.ops.iter().enumerate() {
            let Some(queue) = script.queues.get_mut(op.stream.0 as usize) else {
                return Err(refuse(i, "stands on a stream that the program does not name"));
            };
            queue.push(i);
            let launch = prices.launch_ns(p, i);
            if launch > 0 {
                script.launches.push(launch as f64);
            }
            let recorded = |v: &tessera_ir::ValueId| {
                let at = definitions.get(v.0 as usize).copied().flatten();
                at.filter(|at| *at < i && p.ops[*at].opcode == Opcode::EventRecord)
            };
            let after: Option<Vec<usize>> = op.after.iter().map(recorded).collect();
            let after = after.ok_or_else(|| refuse(i, "comes after an event that no earlier op records"))?;
            let takes = match op.opcode {
                Opcode::Wait => {
                    let ticket = op.operands.first().and_then(|t| definitions.get(t.0 as usize).copied());
                    let issue = ticket.flatten().filter(|at| *at < i && p.ops[*at].opcode.is_collective());
                    Some(issue.ok_or_else(|| refuse(i, "waits for what no earlier op issued"))?)
                }
                _ => None,
            };
            let first = script.meets.len();
            for at in batches.get(i).map_or(&[][..], Vec::as_slice) {
                let Some(way) = Way::of(&p.ops[*at]) else {
                    return Err(refuse(*at, "names no group or no peer"));
                };
                script.meets.push(Meet {
                    op: *at,
                    way,
                    ns: prices.collective_ns(p, *at, mesh) as f64,
                    what: common(&p.ops[*at]),
                    says: says(&p.ops[*at]),
                });
            }
            let meets = first..script.meets.len();
            // Those that are launched as one are packed by the first of them.
            let packs = batches.get(i).map_or(&[][..], Vec::as_slice).iter();
            let work_ns = match op.opcode.is_collective() {
                true => packs.map(|at| prices.op_ns(p, *at) as f64).sum(),
                false => prices.op_ns(p, i) as f64,
            };
            script.steps.push(Step { launched: script.launches.len(), after, takes, work_ns, meets });
        }
        Ok(script)
    }
}

/// For each op the collectives that it launches: itself, and those behind it on its stream with the same batch number.
fn batches(p: &Program) -> Vec<Vec<usize>> {
    let mut out = vec![Vec::new(); p.ops.len()];
    let mut open: Option<(i64, usize)> = None;
    for (i, op) in p.collectives() {
        let batch = op.int("batch").filter(|b| *b != 0);
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

/// What every member of a lane gives alike: the op, and of a reduction which. A send and its receive are one thing; extents
/// may differ where shards are uneven.
fn common(op: &Op) -> u64 {
    let opcode = if op.opcode == Opcode::Recv { Opcode::Send } else { op.opcode };
    let reduction = op.reduction().map_or(0, |r| 1 + r as u64);
    (opcode as u64) << 8 | reduction
}

/// A collective for a person.
fn says(op: &Op) -> String {
    let over = op.group().map_or(String::new(), |g| format!(" over {g}"));
    let peer = match op.opcode {
        Opcode::Send => op.int("to").map_or(String::new(), |at| format!(" to position {at}")),
        Opcode::Recv => op.int("from").map_or(String::new(), |at| format!(" from position {at}")),
        _ => String::new(),
    };
    format!("{}{over}{peer}", op.opcode.name())
}
