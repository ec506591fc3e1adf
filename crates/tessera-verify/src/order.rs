//! What must have finished when an op starts, on one rank: streams are first in, first out, and only events and
//! waits order one stream after another.

use tessera_base::{Code, Diagnostics};
use tessera_ir::{BufferId, Op, Opcode, Program, ValueId};

use crate::{graph, say};

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

/// Happens-before between the ops of one program, by one clock per op with a component per lane.
///
/// A lane is a stream, or the part of a captured graph that ran on a stream other than the one that the graph is
/// launched on: a graph is one launch on the stream of its first op, so the stream says nothing about the order of
/// such ops against those outside.
pub(crate) struct Order {
    lanes: usize,
    /// Position on its lane, from 1; 0 for what is there before the program starts. Launches issued as one share it.
    at: Vec<u32>,
    lane: Vec<u32>,
    /// Per op, the first op of those issued as one with it.
    launch: Vec<usize>,
    /// Per op and lane: how many ops of the lane have finished once the op has.
    done: Vec<u32>,
}

impl Order {
    /// Clocks of a well-formed program and its graphs.
    pub(crate) fn of(p: &Program, definitions: &[Option<usize>], runs: &[graph::Run]) -> Order {
        let (lane, lanes) = lanes(p, runs);
        let mut order = Order {
            lanes,
            at: vec![0; p.ops.len()],
            lane,
            launch: (0..p.ops.len()).collect(),
            done: vec![0; p.ops.len() * lanes],
        };
        // Ops that the next op of a lane comes after.
        let mut last: Vec<Vec<usize>> = vec![Vec::new(); lanes];
        // The same for the first op of those issued as one, with their number.
        let mut batch: Vec<Option<(i64, Vec<usize>)>> = vec![None; lanes];
        let mut earlier: Vec<usize> = Vec::new();
        let mut next_run = runs.iter().peekable();
        let mut open: Option<(&graph::Run, usize, Vec<usize>)> = None;
        for (i, op) in p.ops.iter().enumerate() {
            if say::is_given(op) {
                continue;
            }
            if let Some((run, launch, _)) = &open
                && i >= run.end
            {
                let inner = run.lanes.iter().flat_map(|l| last[*l as usize].clone());
                let all: Vec<usize> = inner.collect();
                last[*launch].extend(all);
                open = None;
            }
            if let Some(run) = next_run.next_if(|r| r.start == i) {
                let launch = order.lane[i] as usize;
                open = Some((run, launch, last[launch].clone()));
            }
            let on = order.lane[i] as usize;
            // A graph's other lanes begin when it is launched.
            if let Some((run, _, entry)) = &open
                && last[on].is_empty()
                && run.lanes.contains(&(on as u32))
            {
                last[on].clone_from(entry);
            }
            let number = say::batch(op);
            let mates = number.is_some_and(|b| batch[on].as_ref().is_some_and(|(n, _)| *n == b));
            earlier.clear();
            match &batch[on] {
                Some((_, before)) if mates => earlier.extend(before),
                _ => earlier.append(&mut last[on]),
            }
            let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
            let events = op.after.iter().chain(ticket).filter_map(|v| definitions[v.0 as usize]);
            for b in earlier.iter().copied().chain(events) {
                for l in 0..lanes {
                    order.done[i * lanes + l] = order.done[i * lanes + l].max(order.done[b * lanes + l]);
                }
            }
            if mates {
                let first = last[on].first().copied().unwrap_or(i);
                (order.at[i], order.launch[i]) = (order.at[first], order.launch[first]);
                last[on].push(i);
            } else {
                let of_lane = |e: &&usize| order.lane[**e] as usize == on;
                order.at[i] = earlier.iter().filter(of_lane).map(|e| order.at[*e]).max().unwrap_or(0) + 1;
                batch[on] = number.map(|b| (b, earlier.clone()));
                last[on].push(i);
            }
            order.done[i * lanes + on] = order.at[i];
        }
        order
    }

    /// Whether `a` has finished whenever `b` starts, `a` before `b` in program order.
    pub(crate) fn before(&self, a: usize, b: usize) -> bool {
        !self.together(a, b) && self.done[b * self.lanes + self.lane[a] as usize] >= self.at[a]
    }

    /// Whether two ops are issued as one.
    pub(crate) fn together(&self, a: usize, b: usize) -> bool {
        a != b && self.launch[a] == self.launch[b]
    }

    /// The lane of an op.
    pub(crate) fn lane(&self, op: usize) -> u32 {
        self.lane[op]
    }
}

/// Lane of every op, and how many there are.
fn lanes(p: &Program, runs: &[graph::Run]) -> (Vec<u32>, usize) {
    let mut lane: Vec<u32> = p.ops.iter().map(|o| o.stream.0).collect();
    let mut count = p.streams.len();
    for run in runs {
        let launch = p.ops[run.start].stream.0;
        for (i, op) in p.ops.iter().enumerate().take(run.end).skip(run.start) {
            if op.stream.0 != launch && !say::is_given(op) {
                lane[i] = run.lane_of(op.stream.0);
                count = count.max(lane[i] as usize + 1);
            }
        }
    }
    (lane, count)
}

/// Reads of values and buffers that no order makes safe.
pub(crate) fn check(p: &Program, definitions: &[Option<usize>], runs: &[graph::Run]) -> Diagnostics {
    let order = Order::of(p, definitions, runs);
    let mut out = values(p, &order, definitions);
    if !p.buffers.is_empty() {
        out.extend(buffers(p, &order, definitions));
        out.extend(views(p));
    }
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
                let what = format!("{} is read", say::value(p, *v));
                out.push(if order.together(d, i) {
                    let message = format!("{what} by an op that is issued as one with the op that makes it");
                    say::at_op(
                        say::refuse(&T0316, p, i, message),
                        p,
                        d,
                        "made here, once the whole batch is done",
                    )
                    .hint("issue the reader after the batch, in a batch of its own if need be")
                } else {
                    crossing(p, i, d, &what, "made here")
                });
            }
        }
    }
    out
}

/// The last accesses of one buffer per lane: writes, and everything that touches it.
#[derive(Clone)]
struct Accesses {
    writes: Vec<Option<usize>>,
    all: Vec<Option<usize>>,
}

fn buffers(p: &Program, order: &Order, definitions: &[Option<usize>]) -> Diagnostics {
    let mut out = Vec::new();
    let none = vec![None; order.lanes];
    let mut seen = vec![Accesses { writes: none.clone(), all: none }; p.buffers.len()];
    for (i, op) in p.ops.iter().enumerate() {
        let on = order.lane(i) as usize;
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
    let read = Some(&p.ops[definitions[v.0 as usize]?]).filter(|o| o.opcode == Opcode::CacheRead);
    read.and_then(|o| o.buffer)
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
        _ => {
            let first = number("first").unwrap_or(0);
            let written = op.operands.first().and_then(|v| p.ty(*v).shape.first().copied()).unwrap_or(all);
            (first, first.saturating_add(written))
        }
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
