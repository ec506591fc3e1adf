//! What must have finished when an op starts, on one rank: streams are first in, first out, and only events and
//! waits order one stream after another.

use tessera_base::{Code, Diagnostics};
use tessera_ir::{BufferId, Op, Opcode, Program, ValueId};

use crate::say;

/// Data crosses streams without an order.
pub static T0316: Code = Code {
    id: "T0316",
    title: "data crosses streams without an event",
    page: "Ops on one stream run one after the other; ops on two streams run whenever they like. A value made on \
stream A and read on stream B needs an `event.record` on A after the producer, and the reader, or an earlier op of B, \
`after` that event. The wait for a collective orders its stream after the collective in the same way. Buffers need the \
same between a write and every other access from another stream.\n\n\
Without it the reader usually sees the right bytes and now and then old ones: the kind of error that no test finds. \
Record an event after the first place and put it into `after(…)` of the second.",
};
/// A view outlived by a write.
pub static T0318: Code = Code {
    id: "T0318",
    title: "buffer written while a view of it is in use",
    page: "`cache.read` gives a view: no bytes are copied, so a later `cache.write` to the same rows changes the value \
under its readers. A collective's operand counts as in use until its wait. A write whose row is a call scalar may hit \
any row.\n\nMove the write after the last use, or copy the rows first.",
};

/// Happens-before between the ops of one program, by one clock per op with a component per stream.
pub(crate) struct Order {
    streams: usize,
    /// Position on its stream, from 1; 0 for what is there before the program starts.
    at: Vec<u32>,
    stream: Vec<usize>,
    /// Per op and stream: how many ops of the stream have finished once the op has.
    done: Vec<u32>,
}

impl Order {
    /// Clocks of a well-formed program.
    pub(crate) fn of(p: &Program, definitions: &[Option<usize>]) -> Order {
        let streams = p.streams.len();
        let mut order = Order {
            streams,
            at: vec![0; p.ops.len()],
            stream: p.ops.iter().map(|o| o.stream.0 as usize).collect(),
            done: vec![0; p.ops.len() * streams],
        };
        let mut last: Vec<Option<usize>> = vec![None; streams];
        for (i, op) in p.ops.iter().enumerate() {
            if say::is_given(op) {
                continue;
            }
            let on = order.stream[i];
            let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
            let before = op.after.iter().chain(ticket).filter_map(|v| definitions[v.0 as usize]);
            for b in last[on].into_iter().chain(before) {
                for s in 0..streams {
                    order.done[i * streams + s] =
                        order.done[i * streams + s].max(order.done[b * streams + s]);
                }
            }
            order.at[i] = last[on].map_or(1, |l| order.at[l] + 1);
            order.done[i * streams + on] = order.at[i];
            last[on] = Some(i);
        }
        order
    }

    /// Whether `a` has finished whenever `b` starts, `a` before `b` in program order.
    pub(crate) fn before(&self, a: usize, b: usize) -> bool {
        self.done[b * self.streams + self.stream[a]] >= self.at[a]
    }
}

/// Reads of values and buffers that no order makes safe.
pub(crate) fn check(p: &Program, definitions: &[Option<usize>]) -> Diagnostics {
    let order = Order::of(p, definitions);
    let mut out = values(p, &order, definitions);
    out.extend(buffers(p, &order, definitions));
    out.extend(views(p));
    out
}

fn values(p: &Program, order: &Order, definitions: &[Option<usize>]) -> Diagnostics {
    let mut out = Vec::new();
    for (i, op) in p.ops.iter().enumerate() {
        for v in op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)) {
            if let Some(d) = definitions[v.0 as usize]
                && !p.ty(*v).is_token()
                && !order.before(d, i)
            {
                out.push(crossing(p, i, d, &format!("{} is read", say::value(p, *v)), "made here"));
            }
        }
    }
    out
}

/// The last accesses of one buffer per stream: writes, and everything that touches it.
#[derive(Clone)]
struct Accesses {
    writes: Vec<Option<usize>>,
    all: Vec<Option<usize>>,
}

fn buffers(p: &Program, order: &Order, definitions: &[Option<usize>]) -> Diagnostics {
    let mut out = Vec::new();
    let none = vec![None; p.streams.len()];
    let mut seen = vec![Accesses { writes: none.clone(), all: none }; p.buffers.len()];
    for (i, op) in p.ops.iter().enumerate() {
        let on = op.stream.0 as usize;
        let viewed = op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v));
        for b in viewed.filter_map(|v| view_of(p, definitions, *v)) {
            seen[b.0 as usize].all[on] = Some(i);
        }
        let Some(b) = op.buffer else { continue };
        let accesses = &mut seen[b.0 as usize];
        let (earlier, word) = match op.opcode {
            Opcode::CacheWrite => (&accesses.all, "written"),
            _ => (&accesses.writes, "read"),
        };
        for e in earlier.iter().flatten().filter(|e| **e != i && !order.before(**e, i)) {
            out.push(crossing(
                p,
                i,
                *e,
                &format!("buffer @{} is {word}", p.buffer(b).name),
                "touches it here",
            ));
        }
        accesses.all[on] = Some(i);
        if op.opcode == Opcode::CacheWrite {
            accesses.writes[on] = Some(i);
        }
    }
    out
}

fn crossing(p: &Program, op: usize, earlier: usize, what: &str, there: &str) -> tessera_base::Diagnostic {
    let (a, b) = (say::stream(p, &p.ops[earlier]), say::stream(p, &p.ops[op]));
    let d = say::refuse(
        &T0316,
        p,
        op,
        format!("{what} on stream {b} with nothing that orders it after stream {a}"),
    );
    say::at_op(d, p, earlier, format!("{there}: {}", say::describe(p, earlier)))
        .hint(format!("record an event on {a} after op {earlier} and start op {op} after it"))
}

/// The buffer that a value is a view of.
fn view_of(p: &Program, definitions: &[Option<usize>], v: ValueId) -> Option<BufferId> {
    p.ops[definitions[v.0 as usize]?].buffer
}

/// First row and end of the rows that a read or write touches; a dynamic row may be any.
fn rows(p: &Program, op: &Op) -> (u64, u64) {
    let Some(b) = op.buffer else { return (0, 0) };
    let all = p.buffer(b).ty.shape.first().copied().unwrap_or(1);
    let number = |name: &str| op.int(name).and_then(|i| u64::try_from(i).ok());
    match op.opcode {
        Opcode::CacheRead => {
            let row = number("row").unwrap_or(0);
            (row, row.saturating_add(number("rows").unwrap_or(all)))
        }
        _ if op.key("row").is_some() => (0, all),
        _ => (0, op.operands.first().and_then(|v| p.ty(*v).shape.first().copied()).unwrap_or(all)),
    }
}

fn views(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    let last = p.last_uses();
    // Views in use, by buffer: (op of the read, last use). Dropped once past, so that the list stays short.
    let mut open: Vec<Vec<(usize, usize)>> = vec![Vec::new(); p.buffers.len()];
    for (i, op) in p.ops.iter().enumerate() {
        let Some(b) = op.buffer else { continue };
        let views = &mut open[b.0 as usize];
        views.retain(|(_, end)| *end >= i);
        if op.opcode == Opcode::CacheRead {
            if let Some(end) = last[op.results[0].0 as usize] {
                views.push((i, end));
            }
            continue;
        }
        let (w0, w1) = rows(p, op);
        for (read, end) in views.iter() {
            let (r0, r1) = rows(p, &p.ops[*read]);
            if w0 < r1 && r0 < w1 {
                let name = &p.buffer(b).name;
                let message = format!(
                    "rows {w0}..{w1} of @{name} are written while a view of rows {r0}..{r1} is in use"
                );
                let d = say::at_op(say::refuse(&T0318, p, i, message), p, *read, "the view");
                out.push(say::at_op(d, p, *end, format!("its last use: {}", say::describe(p, *end))));
            }
        }
    }
    out
}
