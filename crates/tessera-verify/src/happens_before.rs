//! Happens-before analysis of one rank's program: streams are first in, first out, and only events
//! and waits order one stream after another.

use tessera_base::Diagnostics;
use tessera_ir::{BufferId, Op, OpView, Opcode, Program, ValueId};

use crate::codes::{T0316, T0318};
use crate::{captured_graph, display};

/// The happens-before relation of one program's ops, as one vector clock per op with one component
/// per lane.
///
/// A lane is a stream, or the part of a captured graph on one stream other than its launch stream:
/// a graph is one launch on the stream of its first op, so for its other ops the stream implies no
/// order against ops outside the graph.
pub(crate) struct HappensBefore {
    lane_count: usize,
    /// Position of each op on its lane, from 1; 0 for ops that run before the program starts. Ops
    /// of one batch share a position.
    position: Vec<u32>,
    lane: Vec<u32>,
    /// Index of the first op of each op's batch; for an op without a batch, its own index.
    batch_first: Vec<usize>,
    /// Vector clocks: per op and lane, the number of the lane's ops that have finished once the op
    /// has.
    clocks: Vec<u32>,
}

impl HappensBefore {
    /// Computes the clocks of a well-formed program with its captured graphs.
    pub(crate) fn new(
        p: &Program,
        definitions: &[Option<usize>],
        runs: &[captured_graph::CapturedGraph],
    ) -> HappensBefore {
        let (lane, lanes) = assign_lanes(p, runs);
        let mut order = HappensBefore {
            lane_count: lanes,
            position: vec![0; p.ops.len()],
            lane,
            batch_first: (0..p.ops.len()).collect(),
            clocks: vec![0; p.ops.len() * lanes],
        };
        // Ops that the next op of each lane follows.
        let mut last: Vec<Vec<usize>> = vec![Vec::new(); lanes];
        // Ops that the current batch of each lane follows, with the batch number.
        let mut batch: Vec<Option<(i64, Vec<usize>)>> = vec![None; lanes];
        let mut earlier: Vec<usize> = Vec::new();
        let mut next_run = runs.iter().peekable();
        let mut open: Option<(&captured_graph::CapturedGraph, usize, Vec<usize>)> = None;
        for (i, op) in p.ops.iter().enumerate() {
            if op.is_source() {
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
            // The other lanes of a graph begin when the graph is launched.
            if let Some((run, _, entry)) = &open
                && last[on].is_empty()
                && run.lanes.contains(&(on as u32))
            {
                last[on].clone_from(entry);
            }
            let number = op.batch_number();
            let continues_batch = number.is_some_and(|b| batch[on].as_ref().is_some_and(|(n, _)| *n == b));
            earlier.clear();
            match &batch[on] {
                Some((_, before)) if continues_batch => earlier.extend(before),
                _ => earlier.append(&mut last[on]),
            }
            let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
            let events = op.after.iter().chain(ticket).filter_map(|v| definitions[v.0 as usize]);
            for b in earlier.iter().copied().chain(events) {
                for l in 0..lanes {
                    order.clocks[i * lanes + l] =
                        order.clocks[i * lanes + l].max(order.clocks[b * lanes + l]);
                }
            }
            if continues_batch {
                let first = last[on].first().copied().unwrap_or(i);
                (order.position[i], order.batch_first[i]) = (order.position[first], order.batch_first[first]);
                last[on].push(i);
            } else {
                let of_lane = |e: &&usize| order.lane[**e] as usize == on;
                order.position[i] =
                    earlier.iter().filter(of_lane).map(|e| order.position[*e]).max().unwrap_or(0) + 1;
                batch[on] = number.map(|b| (b, earlier.clone()));
                last[on].push(i);
            }
            order.clocks[i * lanes + on] = order.position[i];
        }
        order
    }

    /// Returns whether `a` has finished whenever `b` starts; `a` comes before `b` in program order.
    pub(crate) fn finishes_before(&self, a: usize, b: usize) -> bool {
        !self.same_batch(a, b) && self.clocks[b * self.lane_count + self.lane[a] as usize] >= self.position[a]
    }

    /// Returns whether two different ops are issued in one batch.
    pub(crate) fn same_batch(&self, a: usize, b: usize) -> bool {
        a != b && self.batch_first[a] == self.batch_first[b]
    }

    /// Returns the index of an op's lane: that of its stream, unless a captured graph gives the op
    /// a lane of its own.
    pub(crate) fn lane_of_op(&self, op: usize) -> u32 {
        self.lane[op]
    }
}

/// Returns the lane of every op, and the number of lanes.
fn assign_lanes(p: &Program, runs: &[captured_graph::CapturedGraph]) -> (Vec<u32>, usize) {
    let mut lane: Vec<u32> = p.ops.iter().map(|o| o.stream.0).collect();
    let mut count = p.streams.len();
    for run in runs {
        let launch = p.ops[run.start].stream.0;
        for (i, op) in p.ops.iter().enumerate().take(run.end).skip(run.start) {
            if op.stream.0 != launch && !op.is_source() {
                lane[i] = run.lane_of(op.stream.0);
                count = count.max(lane[i] as usize + 1);
            }
        }
    }
    (lane, count)
}

/// Checks that every access to values and buffers is ordered.
pub(crate) fn check(
    p: &Program,
    definitions: &[Option<usize>],
    runs: &[captured_graph::CapturedGraph],
) -> Diagnostics {
    let order = HappensBefore::new(p, definitions, runs);
    let mut out = check_values(p, &order, definitions);
    if !p.buffers.is_empty() {
        out.extend(check_buffers(p, &order, definitions));
        out.extend(check_views(p));
    }
    out
}

fn check_values(p: &Program, order: &HappensBefore, definitions: &[Option<usize>]) -> Diagnostics {
    let mut out = Vec::new();
    for (i, op) in p.ops.iter().enumerate() {
        for v in op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)) {
            if let Some(d) = definitions[v.0 as usize]
                && !p.type_of(*v).is_token()
                && !order.finishes_before(d, i)
            {
                let what = format!("{} is read", display::value_name(p, *v));
                out.push(if order.same_batch(d, i) {
                    let message =
                        format!("{what} by an op in the same batch as the op that produces the value");
                    display::with_op_label(
                        display::error_at_op(&T0316, p, i, message),
                        p,
                        d,
                        "the value is ready once the whole batch is done",
                    )
                    .with_hint("issue the reader after the batch, or in a batch of its own")
                } else {
                    unordered_access(p, i, d, &what, "produced here")
                });
            }
        }
    }
    out
}

/// The last accesses of one buffer per lane: the last write, and the last access of any kind.
#[derive(Clone)]
struct LastAccesses {
    writes: Vec<Option<usize>>,
    all: Vec<Option<usize>>,
}

fn check_buffers(p: &Program, order: &HappensBefore, definitions: &[Option<usize>]) -> Diagnostics {
    let mut out = Vec::new();
    let none = vec![None; order.lane_count];
    let mut seen = vec![LastAccesses { writes: none.clone(), all: none }; p.buffers.len()];
    for (i, op) in p.ops.iter().enumerate() {
        let on = order.lane_of_op(i) as usize;
        let viewed = op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v));
        for b in viewed.filter_map(|v| viewed_buffer(p, definitions, *v)) {
            seen[b.0 as usize].all[on] = Some(i);
        }
        let Some(b) = op.buffer else { continue };
        let accesses = &mut seen[b.0 as usize];
        let (earlier, word) = match op.opcode {
            Opcode::CacheWrite => (&accesses.all, "written"),
            _ => (&accesses.writes, "read"),
        };
        for e in earlier.iter().flatten().filter(|e| **e != i && !order.finishes_before(**e, i)) {
            out.push(unordered_access(
                p,
                i,
                *e,
                &format!("buffer @{} is {word}", p.buffer(b).name),
                "accessed here",
            ));
        }
        accesses.all[on] = Some(i);
        if op.opcode == Opcode::CacheWrite {
            accesses.writes[on] = Some(i);
        }
    }
    out
}

fn unordered_access(
    p: &Program,
    op: usize,
    earlier: usize,
    what: &str,
    there: &str,
) -> tessera_base::Diagnostic {
    let (a, b) = (display::stream_name(p, &p.ops[earlier]), display::stream_name(p, &p.ops[op]));
    let d = display::error_at_op(
        &T0316,
        p,
        op,
        format!("{what} on stream {b}, but nothing orders the op after stream {a}"),
    );
    display::with_op_label(d, p, earlier, format!("{there}: {}", display::describe_op(p, earlier)))
        .with_hint(format!("record an event on {a} after op {earlier} and start op {op} after that event"))
}

/// Returns the buffer that a value is a view of.
fn viewed_buffer(p: &Program, definitions: &[Option<usize>], v: ValueId) -> Option<BufferId> {
    let read = Some(&p.ops[definitions[v.0 as usize]?]).filter(|o| o.opcode == Opcode::CacheRead);
    read.and_then(|o| o.buffer)
}

/// Returns the first row and the end of the rows that a read or write accesses; a dynamic row may
/// be any row.
fn accessed_rows(p: &Program, op: &Op) -> (u64, u64) {
    let Some(b) = op.buffer else { return (0, 0) };
    let all = p.buffer(b).ty.shape.first().copied().unwrap_or(1);
    match op.view() {
        Ok(OpView::CacheRead(read)) => (read.row, read.row.saturating_add(read.rows.unwrap_or(all))),
        Ok(OpView::CacheWrite(write)) if write.row.is_none() && write.pages.is_none() => {
            let written = p.type_of(write.x).shape.first().copied().unwrap_or(all);
            (write.first_row, write.first_row.saturating_add(written))
        }
        _ => (0, all),
    }
}

fn check_views(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    let last = p.last_uses();
    // Live views by buffer, each as (op of the read, last use). Expired views are dropped, so that
    // the list stays short.
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
        let (w0, w1) = accessed_rows(p, op);
        for (read, end) in views.iter() {
            let (r0, r1) = accessed_rows(p, &p.ops[*read]);
            if w0 < r1 && r0 < w1 {
                let name = &p.buffer(b).name;
                let message = format!(
                    "rows {w0}..{w1} of @{name} are written while a view of rows {r0}..{r1} is in use"
                );
                let d =
                    display::with_op_label(display::error_at_op(&T0318, p, i, message), p, *read, "the view");
                out.push(display::with_op_label(
                    d,
                    p,
                    *end,
                    format!("last use of the view: {}", display::describe_op(p, *end)),
                ));
            }
        }
    }
    out
}
