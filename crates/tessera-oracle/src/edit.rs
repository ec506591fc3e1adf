//! Changes to a program itself: what a lowering that forgets an event or mixes up two lines would write.

use std::collections::BTreeSet;

use tessera_ir::{Attr, Opcode, Program, StreamId, ValueId};
use tessera_mesh::Mesh;

use crate::set::knows;
use tessera_base::random::Dice;

/// One change to one rank's program. The place is taken modulo what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edit {
    /// What changes.
    pub kind: EditKind,
    rank: usize,
    at: usize,
    arg: usize,
}

/// What changes in a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "named by what they do; `name` has the words")]
pub enum EditKind {
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

impl EditKind {
    /// All of them.
    pub const ALL: [EditKind; 10] = [
        EditKind::DropEvent,
        EditKind::DropAfter,
        EditKind::DropEvents,
        EditKind::DropWait,
        EditKind::RepeatWait,
        EditKind::MoveStream,
        EditKind::SwapOps,
        EditKind::EarlyWrite,
        EditKind::SwapGraph,
        EditKind::OtherRole,
    ];

    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            EditKind::DropEvent => "event dropped from after",
            EditKind::DropAfter => "after dropped",
            EditKind::DropEvents => "a stream's events dropped",
            EditKind::DropWait => "wait dropped",
            EditKind::RepeatWait => "wait repeated",
            EditKind::MoveStream => "op on another stream",
            EditKind::SwapOps => "ops swapped",
            EditKind::EarlyWrite => "cache written earlier",
            EditKind::SwapGraph => "graph constant swapped",
            EditKind::OtherRole => "role in or outside the mesh",
        }
    }

    /// Whether the op table of this build has what it changes.
    #[must_use]
    pub fn is_possible(self) -> bool {
        self != EditKind::SwapGraph || knows(Opcode::AllReduce, "graph")
    }
}

impl Edit {
    /// Moves the change to another place.
    pub(crate) fn aim(&mut self, at: usize) {
        self.at = at;
    }

    pub(crate) fn random(d: &mut Dice, mesh: &Mesh) -> Edit {
        let outside = |k: &EditKind| *k != EditKind::OtherRole || mesh.outside() > 0;
        let kinds = EditKind::ALL.into_iter().filter(|k| k.is_possible() && outside(k));
        let kinds: Vec<EditKind> = kinds.collect();
        Edit {
            kind: d.pick(&kinds),
            rank: d.below(mesh.ranks() as usize),
            at: d.below(1 << 16),
            arg: d.below(1 << 16),
        }
    }
}

/// Changes a program, if there is something to change.
pub(crate) fn apply(e: &Edit, programs: &mut [Program]) {
    let p = &mut programs[e.rank];
    if e.kind == EditKind::OtherRole {
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
            EditKind::DropEvent | EditKind::DropAfter => !p.ops[*i].after.is_empty(),
            EditKind::DropEvents => p.ops[*i].opcode == Opcode::EventRecord,
            EditKind::DropWait | EditKind::RepeatWait => p.ops[*i].opcode == Opcode::Wait,
            EditKind::MoveStream => p.streams.len() > 1 && !given(p, *i),
            // What is made stays before what reads it, but for now and then.
            EditKind::SwapOps => {
                let next = p.ops.get(i + 1).filter(|_| !given(p, *i) && !given(p, i + 1));
                let made = &p.ops[*i].results;
                next.is_some_and(|n| e.arg.is_multiple_of(8) || !n.uses().any(|v| made.contains(&v)))
            }
            EditKind::EarlyWrite => p.ops[*i].opcode == Opcode::CacheWrite,
            EditKind::SwapGraph => p.ops[*i].opcode.is_collective(),
            EditKind::OtherRole => false,
        })
        .collect();
    if fitting.is_empty() {
        return;
    }
    let at = fitting[e.at % fitting.len()];
    let op = &mut p.ops[at];
    match e.kind {
        EditKind::DropEvent => drop(op.after.remove(e.arg % op.after.len())),
        EditKind::DropAfter => op.after.clear(),
        EditKind::DropEvents => {
            let stream = op.stream;
            let recorded = p.ops.iter().filter(|o| o.opcode == Opcode::EventRecord && o.stream == stream);
            let events: BTreeSet<ValueId> = recorded.flat_map(|o| o.results.iter().copied()).collect();
            p.ops.iter_mut().for_each(|o| o.after.retain(|e| !events.contains(e)));
        }
        EditKind::DropWait => remove(p, at),
        EditKind::RepeatWait => {
            let mut again = op.clone();
            for r in &mut again.results {
                let mut value = p.values[r.0 as usize].clone();
                value.name += ".again";
                *r = ValueId(p.values.len() as u32);
                p.values.push(value);
            }
            p.ops.insert(at + 1, again);
            renumber(p);
        }
        EditKind::MoveStream => {
            let n = p.streams.len();
            op.stream = StreamId(((op.stream.0 as usize + 1 + e.arg % (n - 1)) % n) as u32);
        }
        EditKind::SwapOps => {
            p.ops.swap(at, at + 1);
            renumber(p);
        }
        EditKind::EarlyWrite => {
            let op = p.ops.remove(at);
            let made = p.ops[..at].iter().rposition(|o| op.uses().any(|v| o.results.contains(&v)));
            let first = made.map_or(0, |m| m + 1);
            // Behind a view of the rows, if there is one, so that it comes before the view's use.
            let view = p.ops[..at]
                .iter()
                .rposition(|o| o.opcode == Opcode::CacheRead && o.buffer == op.buffer)
                .filter(|_| e.arg.is_multiple_of(2));
            let to = view.map_or(at.saturating_sub(1 + e.arg % 6), |v| v + 1);
            p.ops.insert(to.max(first), op);
        }
        EditKind::SwapGraph => {
            if op.attrs.remove("graph").is_none() || e.arg.is_multiple_of(2) {
                op.attrs.insert("graph".to_string(), Attr::Str(format!("g{}", e.arg % 3)));
            }
        }
        EditKind::OtherRole => {}
    }
}

/// Takes an op out, with everything that reads what it made.
fn remove(p: &mut Program, at: usize) {
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
    renumber(p);
}

/// Numbers values in the order of their definition.
pub(crate) fn renumber(p: &mut Program) {
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

/// Makes one blocking op of an issue and the wait that stands directly behind it.
pub(crate) fn fuse(p: &mut Program, issue: usize) {
    let Some(wait) = p.ops.get(issue + 1) else { return };
    if wait.opcode != Opcode::Wait || wait.operands != p.ops[issue].results || !wait.after.is_empty() {
        return;
    }
    let results = p.ops.remove(issue + 1).results;
    p.ops[issue].results = results;
    p.ops[issue].issue = false;
    renumber(p);
}
