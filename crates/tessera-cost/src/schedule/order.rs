//! The order in which each stage takes its turns. Dependencies are not looked at here: an order is a claim that
//! [`super::simulate`] shows to be possible.

use std::collections::VecDeque;

use crate::knobs::Schedule;

/// What is done for a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// Forward.
    Forward,
    /// Gradients of inputs and weights in one.
    Backward,
    /// Gradients of inputs alone.
    BackwardInput,
    /// Gradients of weights alone.
    BackwardWeight,
}

/// Work on one micro-batch by one piece of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Op {
    /// What is done.
    pub work: Work,
    /// Piece of the stage. Of interleaved schedules, piece 0 holds the earliest layers; of DualPipe, piece 0 serves the
    /// micro-batches that enter at the first stage, and piece 1 those that enter at the last.
    pub piece: u32,
    /// Micro-batch; of DualPipe, the count within its direction.
    pub micro_batch: u32,
}

/// One turn of a stage: an op, or a forward and a backward op run as one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// The op.
    pub op: Op,
    /// What is run together with it.
    pub beside: Option<Op>,
}

impl From<Op> for Turn {
    fn from(op: Op) -> Turn {
        Turn { op, beside: None }
    }
}

/// Turns of every stage, in order. Without a backward pass only its forward ops remain.
#[must_use]
pub fn orders(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    forward_only: bool,
) -> Vec<Vec<Turn>> {
    let of = |stage| match schedule {
        Schedule::OneFOneB => one_f_one_b(stages, micro_batches, stage),
        Schedule::Interleaved => interleaved(stages, interleave, micro_batches, stage),
        Schedule::ZbH1 => zero_bubble(stages, micro_batches, stage, 1),
        Schedule::ZbH2 => zero_bubble(stages, micro_batches, stage, 2),
        Schedule::DualPipe => dual_pipe(stages, micro_batches, stage),
    };
    let mut all: Vec<Vec<Turn>> = (0..stages).map(of).collect();
    if forward_only {
        for turns in &mut all {
            turns.retain(|t| t.op.work == Work::Forward);
            turns.iter_mut().for_each(|t| t.beside = None);
        }
    }
    all
}

fn op(work: Work, piece: u32, micro_batch: u32) -> Op {
    Op { work, piece, micro_batch }
}

/// Forwards until the pipeline below is full, then one forward and one backward in turn, then the backwards that are
/// left.
fn one_f_one_b(p: u32, m: u32, stage: u32) -> Vec<Turn> {
    let warm = (p - 1 - stage).min(m);
    alternate(m, warm, |k| op(Work::Forward, 0, k), |k| op(Work::Backward, 0, k))
}

/// Micro-batches go round in groups of `p`, each group through all pieces; backwards mirror that.
fn interleaved(p: u32, v: u32, m: u32, stage: u32) -> Vec<Turn> {
    let all = m * v;
    let warm = if m == p { all } else { ((p - 1 - stage) * 2 + (v - 1) * p).min(all) };
    let place = |k: u32| ((k % (p * v)) / p, k / (p * v) * p + k % p);
    let forward = |k| op(Work::Forward, place(k).0, place(k).1);
    let backward = |k| op(Work::Backward, v - 1 - place(k).0, place(k).1);
    alternate(all, warm, forward, backward)
}

fn alternate(count: u32, warm: u32, forward: impl Fn(u32) -> Op, backward: impl Fn(u32) -> Op) -> Vec<Turn> {
    let mut turns: Vec<Turn> = (0..warm).map(|k| forward(k).into()).collect();
    for k in warm..count {
        turns.extend([Turn::from(forward(k)), backward(k - warm).into()]);
    }
    turns.extend((count - warm..count).map(|k| Turn::from(backward(k))));
    turns
}

/// Like 1F1B with gradients of weights apart: later stages put off as many of them as keeps all stages at the same
/// number of kept micro-batches, and fill the end with them. `depth` 2 warms up twice as far.
fn zero_bubble(p: u32, m: u32, stage: u32, depth: u32) -> Vec<Turn> {
    let warm = (depth * (p - 1 - stage)).min(m);
    let put_off = depth * stage;
    let mut turns: Vec<Turn> = (0..warm).map(|k| op(Work::Forward, 0, k).into()).collect();
    for k in 0..m {
        if warm + k < m {
            turns.push(op(Work::Forward, 0, warm + k).into());
        }
        turns.push(op(Work::BackwardInput, 0, k).into());
        if k >= put_off {
            turns.push(op(Work::BackwardWeight, 0, k - put_off).into());
        }
    }
    turns.extend((m.saturating_sub(put_off)..m).map(|k| Turn::from(op(Work::BackwardWeight, 0, k))));
    turns
}

/// Half of the micro-batches enter at either end. A stage near an end sees its own direction first; stages of the
/// second half do as their mirror images with directions swapped.
fn dual_pipe(p: u32, m: u32, stage: u32) -> Vec<Turn> {
    let half = p / 2;
    let depth = stage.min(p - 1 - stage);
    let to_middle = half - depth - 1;
    let mut d = Directions { swapped: stage >= half, ..Directions::default() };
    for _ in 0..2 * to_middle {
        d.forward(0);
    }
    for _ in 0..=depth {
        d.forward(0);
        d.forward(1);
    }
    for _ in 0..to_middle {
        d.backward_input(1);
        d.weights();
        d.forward(1);
    }
    for i in 0..m / 2 + depth + 1 - p {
        if i == 0 && to_middle == 0 {
            // Nobody waits for the middle stages yet: apart, the forward is out earlier.
            d.forward(0);
            d.backward(1);
        } else {
            d.pair(0, 1);
        }
        d.pair(1, 0);
    }
    for _ in 0..to_middle {
        d.backward(1);
        d.pair(1, 0);
    }
    let mut apart = false;
    for i in 0..=depth {
        let turning = i == depth.div_ceil(2);
        apart |= turning && depth % 2 == 1;
        if apart {
            d.backward_input(1)
        } else {
            d.backward(1)
        }
        apart |= turning;
        if apart { d.backward_input(0) } else { d.backward(0) }
    }
    for _ in 0..to_middle {
        d.weights();
        d.backward_input(0);
    }
    for _ in 0..=depth {
        d.weights();
    }
    d.turns
}

#[derive(Default)]
struct Directions {
    swapped: bool,
    turns: Vec<Turn>,
    forwards: [u32; 2],
    backwards: [u32; 2],
    put_off: VecDeque<Op>,
}

impl Directions {
    fn next_forward(&mut self, way: usize) -> Op {
        self.forwards[way] += 1;
        op(Work::Forward, self.piece(way), self.forwards[way] - 1)
    }

    fn next_backward(&mut self, way: usize, work: Work) -> Op {
        self.backwards[way] += 1;
        op(work, self.piece(way), self.backwards[way] - 1)
    }

    fn piece(&self, way: usize) -> u32 {
        way as u32 ^ u32::from(self.swapped)
    }

    fn forward(&mut self, way: usize) {
        let op = self.next_forward(way);
        self.turns.push(op.into());
    }

    fn backward(&mut self, way: usize) {
        let op = self.next_backward(way, Work::Backward);
        self.turns.push(op.into());
    }

    fn backward_input(&mut self, way: usize) {
        let op = self.next_backward(way, Work::BackwardInput);
        self.turns.push(op.into());
        self.put_off.push_back(Op { work: Work::BackwardWeight, ..op });
    }

    fn weights(&mut self) {
        let op = self.put_off.pop_front();
        self.turns.extend(op.map(Turn::from));
    }

    fn pair(&mut self, forward: usize, backward: usize) {
        let op = self.next_forward(forward);
        let beside = Some(self.next_backward(backward, Work::Backward));
        self.turns.push(Turn { op, beside });
    }
}
