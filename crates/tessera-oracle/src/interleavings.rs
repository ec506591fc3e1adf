//! Exhaustive exploration of all interleavings, state by state: slow, and the reference for
//! [`crate::explore_one_order`].

use std::collections::HashSet;

use tessera_ir::Program;
use tessera_mesh::Mesh;

use crate::device_model::{CallMismatch, DeviceModel, ExecutionState, ExecutionStep};
use crate::one_order::{choose_outcome, race_of_buffer, race_of_value};
use crate::outcome::ExecutionOutcome;

/// Visits every reachable state, at most `limit` of them. Returns `None` beyond the limit, or if
/// two orders end in different states.
#[must_use]
pub fn explore_all_orders(mesh: &Mesh, programs: &[&Program], limit: usize) -> Option<ExecutionOutcome> {
    let machine = DeviceModel::new(mesh, programs);
    let mut seen: HashSet<ExecutionState> = HashSet::from([machine.start_state()]);
    let mut open = vec![machine.start_state()];
    let mut marks = EarlyStarts { early_read: None, early: HashSet::new() };
    let mut first: Option<CallMismatch> = None;
    let mut end: Option<ExecutionState> = None;
    while let Some(state) = open.pop() {
        let (steps, clash) = machine.possible_steps(&state);
        first = first.or(clash);
        if steps.is_empty() {
            if end.as_ref().is_some_and(|e| *e != state) {
                return None;
            }
            end = Some(state);
            continue;
        }
        for step in &steps {
            match step {
                ExecutionStep::RunOp(n) => marks.note_start(&machine, &state, *n),
                ExecutionStep::Launch(l) => {
                    machine.launches[*l].members.iter().for_each(|n| marks.note_start(&machine, &state, *n));
                }
                ExecutionStep::CompleteCalls(_) => {}
            }
            let mut next = state.clone();
            machine.take_step(&mut next, step);
            if !seen.contains(&next) {
                if seen.len() >= limit {
                    return None;
                }
                seen.insert(next.clone());
                open.push(next);
            }
        }
    }
    Some(choose_outcome(&machine, &end?, first, || {
        marks.early_read.clone().or_else(|| {
            let both =
                |(a, b): &&(usize, usize)| marks.early.contains(&(*a, *b)) && marks.early.contains(&(*b, *a));
            machine.conflicts.iter().find(both).map(|(a, b)| race_of_buffer(&machine, *a, *b))
        })
    }))
}

/// Ops that some order started too early.
struct EarlyStarts {
    early_read: Option<ExecutionOutcome>,
    /// Pairs (a, b): `a` started before `b` had finished.
    early: HashSet<(usize, usize)>,
}

impl EarlyStarts {
    fn note_start(&mut self, m: &DeviceModel<'_>, state: &ExecutionState, n: usize) {
        if self.early_read.is_none()
            && let Some((maker, v)) = m.nodes[n].reads.iter().find(|(maker, _)| !m.is_done(state, *maker))
        {
            self.early_read = Some(race_of_value(m, n, *maker, *v));
        }
        for (a, b) in &m.conflicts {
            if *a == n && !m.is_done(state, *b) {
                self.early.insert((*a, *b));
            }
            if *b == n && !m.is_done(state, *a) {
                self.early.insert((*b, *a));
            }
        }
    }
}
