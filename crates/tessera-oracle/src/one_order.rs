//! Simulates one order of all steps and records the causes of each step.

use tessera_ir::Program;
use tessera_mesh::Mesh;

use crate::device_model::{CallMismatch, DeviceModel, ExecutionState, ExecutionStep};
use crate::outcome::ExecutionOutcome;

/// Simulates the programs, one per rank in order, and returns their outcome. One order of steps
/// suffices; the crate documentation explains why.
#[must_use]
pub fn explore_one_order(mesh: &Mesh, programs: &[&Program]) -> ExecutionOutcome {
    let machine = DeviceModel::new(mesh, programs);
    let mut causes = CausalHistory::new(&machine);
    let mut state = machine.start_state();
    let mut first: Option<CallMismatch> = None;
    loop {
        let (steps, clash) = machine.possible_steps(&state);
        first = first.or(clash);
        if steps.is_empty() {
            break;
        }
        // No step disables another.
        for step in &steps {
            causes.note_step(&machine, step);
            machine.take_step(&mut state, step);
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
    choose_outcome(&machine, &state, first, race)
}

/// Chooses the outcome: a mismatch takes precedence over a hang, and a hang over a race, since an
/// op that never starts does not race.
pub(crate) fn choose_outcome(
    machine: &DeviceModel<'_>,
    end: &ExecutionState,
    clash: Option<CallMismatch>,
    race: impl FnOnce() -> Option<ExecutionOutcome>,
) -> ExecutionOutcome {
    let at = |n: usize| (machine.nodes[n].rank, machine.nodes[n].op);
    if let Some((a, b, field)) = clash {
        let trace = format!("  {}\n  {}", machine.describe_op(a), machine.describe_op(b));
        return ExecutionOutcome::Mismatch { field, trace, at: at(b) };
    }
    if !machine.is_finished(end) {
        let (state, at) = machine.blocked_ranks(end);
        return ExecutionOutcome::Hang { state, at };
    }
    race().unwrap_or(ExecutionOutcome::Completes)
}

pub(crate) fn race_of_value(
    m: &DeviceModel<'_>,
    reader: usize,
    maker: usize,
    v: tessera_ir::ValueId,
) -> ExecutionOutcome {
    let rank = m.nodes[reader].rank;
    let trace = format!(
        "  {}\n  may read {} before this has finished\n  {}",
        m.describe_op(reader),
        m.value_name(rank, v),
        m.describe_op(maker)
    );
    ExecutionOutcome::Race { trace, at: (rank, m.nodes[reader].op) }
}

pub(crate) fn race_of_buffer(m: &DeviceModel<'_>, a: usize, b: usize) -> ExecutionOutcome {
    let trace = format!(
        "  {}\n  and this touch one buffer in either order\n  {}",
        m.describe_op(a),
        m.describe_op(b)
    );
    ExecutionOutcome::Race { trace, at: (m.nodes[b].rank, m.nodes[b].op) }
}

/// Sets of ops that have finished whenever an op starts or completes, as one bit per op.
struct CausalHistory {
    words: usize,
    started: Vec<bool>,
    start: Vec<u64>,
    end: Vec<u64>,
}

impl CausalHistory {
    fn new(m: &DeviceModel<'_>) -> CausalHistory {
        let words = m.nodes.len().div_ceil(64);
        let empty = vec![0; m.nodes.len() * words];
        CausalHistory { words, started: vec![false; m.nodes.len()], start: empty.clone(), end: empty }
    }

    fn note_step(&mut self, m: &DeviceModel<'_>, step: &ExecutionStep) {
        match step {
            ExecutionStep::RunOp(n) => {
                let set = self.start_conditions(m, *n, None);
                self.begin_op(*n, &set);
                self.finish_op(*n, set);
            }
            ExecutionStep::Launch(l) => {
                let mut set = vec![0; self.words];
                if let Some(b) = m.launches[*l].before {
                    self.add_launch(m, b, &mut set);
                }
                for n in &m.launches[*l].members {
                    union_into(&mut set, &self.start_conditions(m, *n, Some(*l)));
                }
                m.launches[*l].members.iter().for_each(|n| self.begin_op(*n, &set));
            }
            ExecutionStep::CompleteCalls(all) => {
                let mut set = vec![0; self.words];
                for n in all {
                    union_into(&mut set, &self.start[n * self.words..(n + 1) * self.words]);
                    set[n / 64] |= 1 << (n % 64);
                }
                all.iter().for_each(|n| self.finish_op(*n, set.clone()));
            }
        }
    }

    /// Returns the ops that have finished when an op's stream and events permit it to start.
    fn start_conditions(&self, m: &DeviceModel<'_>, n: usize, launch: Option<usize>) -> Vec<u64> {
        let mut set = vec![0; self.words];
        let before = m.previous_op(n).filter(|b| launch.is_none() || m.nodes[*b].launch != launch);
        for c in m.nodes[n].needs.iter().flatten().copied().chain(before) {
            match m.nodes[c].launch {
                Some(l) => self.add_launch(m, l, &mut set),
                None => union_into(&mut set, &self.end[c * self.words..(c + 1) * self.words]),
            }
        }
        set
    }

    fn add_launch(&self, m: &DeviceModel<'_>, l: usize, set: &mut [u64]) {
        for c in &m.launches[l].members {
            union_into(set, &self.end[c * self.words..(c + 1) * self.words]);
        }
    }

    fn begin_op(&mut self, n: usize, set: &[u64]) {
        self.started[n] = true;
        self.start[n * self.words..(n + 1) * self.words].copy_from_slice(set);
    }

    fn finish_op(&mut self, n: usize, mut set: Vec<u64>) {
        set[n / 64] |= 1 << (n % 64);
        self.end[n * self.words..(n + 1) * self.words].copy_from_slice(&set);
    }

    /// Returns whether `a` has finished whenever `b` starts.
    fn finished_before(&self, m: &DeviceModel<'_>, a: usize, b: usize) -> bool {
        let has = |n: &usize| self.start[b * self.words + n / 64] >> (n % 64) & 1 == 1;
        match m.nodes[a].launch {
            Some(l) => m.launches[l].members.iter().all(has),
            None => m.is_given(a) || has(&a),
        }
    }
}

fn union_into(a: &mut [u64], b: &[u64]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a |= b);
}
