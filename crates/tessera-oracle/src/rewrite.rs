//! Rewrites of a finished program: the errors of a lowering that omits an event or swaps two ops.

use std::collections::BTreeSet;

use tessera_ir::{Attr, Opcode, Program, StreamId, ValueId};
use tessera_mesh::Mesh;

use crate::planned_call::has_attribute;
use tessera_base::random::Rng;

/// One rewrite of one rank's program. The position is taken modulo the number of candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewrite {
    /// Change that the rewrite makes, such as a dropped event.
    pub kind: RewriteKind,
    rank: usize,
    at: usize,
    arg: usize,
}

/// Ways in which a [`Rewrite`] changes a lowered program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names describe the rewrites; `name` gives the text")]
pub enum RewriteKind {
    DropEvent,
    DropAfter,
    DropEvents,
    DropWait,
    RepeatWait,
    MoveStream,
    SwapOps,
    EarlyWrite,
    SwapGraph,
    OtherRole,
}

impl RewriteKind {
    /// Every kind of rewrite of a lowered program, in declaration order.
    pub const ALL: [RewriteKind; 10] = [
        RewriteKind::DropEvent,
        RewriteKind::DropAfter,
        RewriteKind::DropEvents,
        RewriteKind::DropWait,
        RewriteKind::RepeatWait,
        RewriteKind::MoveStream,
        RewriteKind::SwapOps,
        RewriteKind::EarlyWrite,
        RewriteKind::SwapGraph,
        RewriteKind::OtherRole,
    ];

    /// Returns the row label in the comparison table, such as `wait dropped`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RewriteKind::DropEvent => "event dropped from after",
            RewriteKind::DropAfter => "after dropped",
            RewriteKind::DropEvents => "a stream's events dropped",
            RewriteKind::DropWait => "wait dropped",
            RewriteKind::RepeatWait => "wait repeated",
            RewriteKind::MoveStream => "op on another stream",
            RewriteKind::SwapOps => "ops swapped",
            RewriteKind::EarlyWrite => "cache written earlier",
            RewriteKind::SwapGraph => "graph constant swapped",
            RewriteKind::OtherRole => "role in or outside the mesh",
        }
    }

    /// Returns whether the op table of this build has the attribute that the rewrite changes.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != RewriteKind::SwapGraph || has_attribute(Opcode::AllReduce, "graph")
    }
}

impl Rewrite {
    /// Sets which candidate op the rewrite changes: `at`, modulo the number of candidates.
    pub(crate) fn move_to(&mut self, at: usize) {
        self.at = at;
    }

    /// Draws a rewrite of one rank of a mesh.
    pub fn random(d: &mut Rng, mesh: &Mesh) -> Rewrite {
        let outside = |k: &RewriteKind| *k != RewriteKind::OtherRole || mesh.outside_count() > 0;
        let kinds = RewriteKind::ALL.into_iter().filter(|k| k.is_possible() && outside(k));
        let kinds: Vec<RewriteKind> = kinds.collect();
        Rewrite {
            kind: d.pick_one(&kinds),
            rank: d.next_below(mesh.world_size() as usize),
            at: d.next_below(1 << 16),
            arg: d.next_below(1 << 16),
        }
    }
}

/// Applies a rewrite to the programs of all ranks, if the one of its rank has a candidate op.
///
/// # Panics
/// Panics if there are fewer programs than the mesh of the rewrite has ranks.
pub fn apply_rewrite(e: &Rewrite, programs: &mut [Program]) {
    let p = &mut programs[e.rank];
    if e.kind == RewriteKind::OtherRole {
        match p.role.find("@out") {
            Some(at) => p.role.truncate(at),
            None => p.role += "@out0",
        }
        return;
    }
    let given =
        |p: &Program, i: usize| matches!(p.ops[i].opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
    let fitting: Vec<usize> = (0..p.ops.len())
        .filter(|i| match e.kind {
            RewriteKind::DropEvent | RewriteKind::DropAfter => !p.ops[*i].after.is_empty(),
            RewriteKind::DropEvents => p.ops[*i].opcode == Opcode::EventRecord,
            RewriteKind::DropWait | RewriteKind::RepeatWait => p.ops[*i].opcode == Opcode::Wait,
            RewriteKind::MoveStream => p.streams.len() > 1 && !given(p, *i),
            // Keep a definition before its use in most cases.
            RewriteKind::SwapOps => {
                let next = p.ops.get(i + 1).filter(|_| !given(p, *i) && !given(p, i + 1));
                let made = &p.ops[*i].results;
                next.is_some_and(|n| e.arg.is_multiple_of(8) || !n.used_values().any(|v| made.contains(&v)))
            }
            RewriteKind::EarlyWrite => p.ops[*i].opcode == Opcode::CacheWrite,
            RewriteKind::SwapGraph => p.ops[*i].opcode.is_collective(),
            RewriteKind::OtherRole => false,
        })
        .collect();
    if fitting.is_empty() {
        return;
    }
    let at = fitting[e.at % fitting.len()];
    let op = &mut p.ops[at];
    match e.kind {
        RewriteKind::DropEvent => drop(op.after.remove(e.arg % op.after.len())),
        RewriteKind::DropAfter => op.after.clear(),
        RewriteKind::DropEvents => {
            let stream = op.stream;
            let recorded = p.ops.iter().filter(|o| o.opcode == Opcode::EventRecord && o.stream == stream);
            let events: BTreeSet<ValueId> = recorded.flat_map(|o| o.results.iter().copied()).collect();
            p.ops.iter_mut().for_each(|o| o.after.retain(|e| !events.contains(e)));
        }
        RewriteKind::DropWait => remove_with_users(p, at),
        RewriteKind::RepeatWait => {
            let mut again = op.clone();
            for r in &mut again.results {
                let mut value = p.values[r.0 as usize].clone();
                value.name += ".again";
                *r = ValueId(p.values.len() as u32);
                p.values.push(value);
            }
            p.ops.insert(at + 1, again);
            renumber_values(p);
        }
        RewriteKind::MoveStream => {
            let n = p.streams.len();
            op.stream = StreamId(((op.stream.0 as usize + 1 + e.arg % (n - 1)) % n) as u32);
        }
        RewriteKind::SwapOps => {
            p.ops.swap(at, at + 1);
            renumber_values(p);
        }
        RewriteKind::EarlyWrite => {
            let op = p.ops.remove(at);
            let made = p.ops[..at].iter().rposition(|o| op.used_values().any(|v| o.results.contains(&v)));
            let first = made.map_or(0, |m| m + 1);
            // Insert the write after a view of the rows, if one exists, so that it precedes the use
            // of the view.
            let view = p.ops[..at]
                .iter()
                .rposition(|o| o.opcode == Opcode::CacheRead && o.buffer == op.buffer)
                .filter(|_| e.arg.is_multiple_of(2));
            let to = view.map_or(at.saturating_sub(1 + e.arg % 6), |v| v + 1);
            p.ops.insert(to.max(first), op);
        }
        RewriteKind::SwapGraph => {
            if op.attrs.remove("graph").is_none() || e.arg.is_multiple_of(2) {
                op.attrs.insert("graph".to_string(), Attr::Str(format!("g{}", e.arg % 3)));
            }
        }
        RewriteKind::OtherRole => {}
    }
}

/// Removes an op and all ops that depend on its results.
fn remove_with_users(p: &mut Program, at: usize) {
    let mut gone: BTreeSet<ValueId> = p.ops[at].results.iter().copied().collect();
    p.ops.remove(at);
    p.ops.retain_mut(|op| {
        op.after.retain(|e| !gone.contains(e));
        let reads = op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)).any(|v| gone.contains(v));
        if reads {
            gone.extend(op.results.iter().copied());
        }
        !reads
    });
    renumber_values(p);
}

/// Renumbers values in the order of their definitions.
pub(crate) fn renumber_values(p: &mut Program) {
    let order: Vec<ValueId> = p.ops.iter().flat_map(|o| o.results.iter().copied()).collect();
    let mut new = vec![ValueId(u32::MAX); p.values.len()];
    order.iter().enumerate().for_each(|(i, v)| new[v.0 as usize] = ValueId(i as u32));
    p.values = order.iter().map(|v| p.values[v.0 as usize].clone()).collect();
    for op in &mut p.ops {
        let keyed = op.keyed.iter_mut().map(|(_, v)| v);
        for v in op.operands.iter_mut().chain(&mut op.after).chain(&mut op.results).chain(keyed) {
            *v = new[v.0 as usize];
        }
    }
}

/// Merges an issue and an immediately following wait into one blocking op.
pub(crate) fn fuse_wait(p: &mut Program, issue: usize) {
    let Some(wait) = p.ops.get(issue + 1) else { return };
    if wait.opcode != Opcode::Wait || wait.operands != p.ops[issue].results || !wait.after.is_empty() {
        return;
    }
    let results = p.ops.remove(issue + 1).results;
    p.ops[issue].results = results;
    p.ops[issue].issue = false;
    renumber_values(p);
}
