//! One order of all steps, with what had to happen before each.

use tessera_ir::Program;
use tessera_mesh::Mesh;

use crate::machine::{Clash, Machine, State, Step};
use crate::outcome::Outcome;

/// Plays the programs, one per rank in order, and says what can come of them. One order of steps decides: see the
/// crate's first page for why.
#[must_use]
pub fn explore(mesh: &Mesh, programs: &[&Program]) -> Outcome {
    let machine = Machine::new(mesh, programs);
    let mut causes = Causes::new(&machine);
    let mut state = machine.start();
    let mut first: Option<Clash> = None;
    loop {
        let (steps, clash) = machine.steps(&state);
        first = first.or(clash);
        if steps.is_empty() {
            break;
        }
        // None of them takes the possibility of another away.
        for step in &steps {
            causes.note(&machine, step);
            machine.take(&mut state, step);
        }
    }
    let race = || {
        let reads = machine
            .nodes
            .iter()
            .enumerate()
            .filter(|(n, _)| causes.started[*n])
            .flat_map(|(n, node)| node.reads.iter().map(move |(maker, v)| (n, *maker, *v)));
        let early = reads.into_iter().find(|(n, maker, _)| !causes.finished_before(&machine, *maker, *n));
        let read = early.map(|(n, maker, v)| race_of_value(&machine, n, maker, v));
        read.or_else(|| {
            let both = machine.conflicts.iter().find(|(a, b)| {
                causes.started[*a]
                    && causes.started[*b]
                    && !causes.finished_before(&machine, *a, *b)
                    && !causes.finished_before(&machine, *b, *a)
            });
            both.map(|(a, b)| race_of_buffer(&machine, *a, *b))
        })
    };
    conclude(&machine, &state, first, race)
}

/// A clash outweighs a hang, and a hang a race: what never starts races with nothing.
pub(crate) fn conclude(
    machine: &Machine<'_>,
    end: &State,
    clash: Option<Clash>,
    race: impl FnOnce() -> Option<Outcome>,
) -> Outcome {
    let at = |n: usize| (machine.nodes[n].rank, machine.nodes[n].op);
    if let Some((a, b, field)) = clash {
        let trace = format!("  {}\n  {}", machine.describe(a), machine.describe(b));
        return Outcome::Mismatch { field, trace, at: at(b) };
    }
    if !machine.finished(end) {
        let (state, at) = machine.held(end);
        return Outcome::Hang { state, at };
    }
    race().unwrap_or(Outcome::Completes)
}

pub(crate) fn race_of_value(m: &Machine<'_>, reader: usize, maker: usize, v: tessera_ir::ValueId) -> Outcome {
    let rank = m.nodes[reader].rank;
    let trace = format!(
        "  {}\n  may read {} before this has finished\n  {}",
        m.describe(reader),
        m.value(rank, v),
        m.describe(maker)
    );
    Outcome::Race { trace, at: (rank, m.nodes[reader].op) }
}

pub(crate) fn race_of_buffer(m: &Machine<'_>, a: usize, b: usize) -> Outcome {
    let trace =
        format!("  {}\n  and this touch one buffer in either order\n  {}", m.describe(a), m.describe(b));
    Outcome::Race { trace, at: (m.nodes[b].rank, m.nodes[b].op) }
}

/// Per op, what has happened whenever it starts and whenever it meets: bits by op, a collective's bit being its
/// meeting.
struct Causes {
    words: usize,
    started: Vec<bool>,
    start: Vec<u64>,
    end: Vec<u64>,
}

impl Causes {
    fn new(m: &Machine<'_>) -> Causes {
        let words = m.nodes.len().div_ceil(64);
        let empty = vec![0; m.nodes.len() * words];
        Causes { words, started: vec![false; m.nodes.len()], start: empty.clone(), end: empty }
    }

    fn note(&mut self, m: &Machine<'_>, step: &Step) {
        match step {
            Step::Run(n) => {
                let set = self.conditions(m, *n, None);
                self.begin(*n, &set);
                self.finish(*n, set);
            }
            Step::Launch(l) => {
                let mut set = vec![0; self.words];
                if let Some(b) = m.launches[*l].before {
                    self.add_launch(m, b, &mut set);
                }
                for n in &m.launches[*l].members {
                    or(&mut set, &self.conditions(m, *n, Some(*l)));
                }
                m.launches[*l].members.iter().for_each(|n| self.begin(*n, &set));
            }
            Step::Meet(all) => {
                let mut set = vec![0; self.words];
                for n in all {
                    or(&mut set, &self.start[n * self.words..(n + 1) * self.words]);
                    set[n / 64] |= 1 << (n % 64);
                }
                all.iter().for_each(|n| self.finish(*n, set.clone()));
            }
        }
    }

    /// What has happened when an op's stream and events let it start.
    fn conditions(&self, m: &Machine<'_>, n: usize, launch: Option<usize>) -> Vec<u64> {
        let mut set = vec![0; self.words];
        let before = m.before(n).filter(|b| launch.is_none() || m.nodes[*b].launch != launch);
        for c in m.nodes[n].needs.iter().flatten().copied().chain(before) {
            match m.nodes[c].launch {
                Some(l) => self.add_launch(m, l, &mut set),
                None => or(&mut set, &self.end[c * self.words..(c + 1) * self.words]),
            }
        }
        set
    }

    fn add_launch(&self, m: &Machine<'_>, l: usize, set: &mut [u64]) {
        for c in &m.launches[l].members {
            or(set, &self.end[c * self.words..(c + 1) * self.words]);
        }
    }

    fn begin(&mut self, n: usize, set: &[u64]) {
        self.started[n] = true;
        self.start[n * self.words..(n + 1) * self.words].copy_from_slice(set);
    }

    fn finish(&mut self, n: usize, mut set: Vec<u64>) {
        set[n / 64] |= 1 << (n % 64);
        self.end[n * self.words..(n + 1) * self.words].copy_from_slice(&set);
    }

    /// Whether `a` has finished whenever `b` starts.
    fn finished_before(&self, m: &Machine<'_>, a: usize, b: usize) -> bool {
        let has = |n: &usize| self.start[b * self.words + n / 64] >> (n % 64) & 1 == 1;
        match m.nodes[a].launch {
            Some(l) => m.launches[l].members.iter().all(has),
            None => m.is_given(a) || has(&a),
        }
    }
}

fn or(a: &mut [u64], b: &[u64]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a |= b);
}
