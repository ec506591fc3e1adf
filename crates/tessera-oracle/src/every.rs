//! Every order of all steps, state by state: slow, and the measure of [`crate::explore`].

use std::collections::HashSet;

use tessera_ir::Program;
use tessera_mesh::Mesh;

use crate::machine::{Clash, Machine, State, Step};
use crate::outcome::Outcome;
use crate::run::{conclude, race_of_buffer, race_of_value};

/// Visits every state that some order of steps reaches, at most `limit` of them; `None` beyond that, or where two
/// orders end in different states.
#[must_use]
pub fn explore_all(mesh: &Mesh, programs: &[&Program], limit: usize) -> Option<Outcome> {
    let machine = Machine::new(mesh, programs);
    let mut seen: HashSet<State> = HashSet::from([machine.start()]);
    let mut open = vec![machine.start()];
    let mut marks = Marks { read: None, early: HashSet::new() };
    let mut first: Option<Clash> = None;
    let mut end: Option<State> = None;
    while let Some(state) = open.pop() {
        let (steps, clash) = machine.steps(&state);
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
                Step::Run(n) => marks.starts(&machine, &state, *n),
                Step::Launch(l) => {
                    machine.launches[*l].members.iter().for_each(|n| marks.starts(&machine, &state, *n));
                }
                Step::Meet(_) => {}
            }
            let mut next = state.clone();
            machine.take(&mut next, step);
            if !seen.contains(&next) {
                if seen.len() >= limit {
                    return None;
                }
                seen.insert(next.clone());
                open.push(next);
            }
        }
    }
    Some(conclude(&machine, &end?, first, || {
        marks.read.clone().or_else(|| {
            let both =
                |(a, b): &&(usize, usize)| marks.early.contains(&(*a, *b)) && marks.early.contains(&(*b, *a));
            machine.conflicts.iter().find(both).map(|(a, b)| race_of_buffer(&machine, *a, *b))
        })
    }))
}

/// What was seen to start too early in some order.
struct Marks {
    read: Option<Outcome>,
    /// (a, b): `a` started when `b` had not finished.
    early: HashSet<(usize, usize)>,
}

impl Marks {
    fn starts(&mut self, m: &Machine<'_>, state: &State, n: usize) {
        if self.read.is_none()
            && let Some((maker, v)) = m.nodes[n].reads.iter().find(|(maker, _)| !m.done(state, *maker))
        {
            self.read = Some(race_of_value(m, n, *maker, *v));
        }
        for (a, b) in &m.conflicts {
            if *a == n && !m.done(state, *b) {
                self.early.insert((*a, *b));
            }
            if *b == n && !m.done(state, *a) {
                self.early.insert((*b, *a));
            }
        }
    }
}
