//! Order of turns on each stage. This module ignores dependencies; [`super::simulate_schedule`]
//! shows that an order is feasible.

use std::collections::VecDeque;

use crate::params::PipelineSchedule;

/// The part of a training step that a stage runs for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StageWork {
    /// Forward pass of the chunk's layers.
    Forward,
    /// Input and weight gradients together.
    Backward,
    /// Input gradients only, which the preceding stage waits for.
    BackwardInput,
    /// Weight gradients only, which no other stage waits for.
    BackwardWeight,
}

/// Work on one micro-batch by one model chunk of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StageOp {
    /// Which pass runs: forward, backward, or one half of backward.
    pub work: StageWork,
    /// Model chunk of the stage. In interleaved schedules chunk 0 holds the earliest layers. In
    /// DualPipe chunk 0 serves the micro-batches that enter at the first stage, and chunk 1 those
    /// that enter at the last.
    pub model_chunk: u32,
    /// Micro-batch; in DualPipe its number within its direction.
    pub micro_batch: u32,
}

/// One entry in the order of a stage, which is called a turn: a single op, or a forward and a
/// backward op that run as one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageTurn {
    /// The single op, or the forward op of a block.
    pub op: StageOp,
    /// The backward op of a block; `None` for a single op.
    pub paired: Option<StageOp>,
}

impl From<StageOp> for StageTurn {
    fn from(op: StageOp) -> StageTurn {
        StageTurn { op, paired: None }
    }
}

/// Returns the turns of every stage, in order. With `forward_only`, only forward ops remain.
#[must_use]
pub fn stage_orders(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    forward_only: bool,
) -> Vec<Vec<StageTurn>> {
    let order_of_stage = |stage| match schedule {
        PipelineSchedule::OneFOneB => one_f_one_b_order(stages, micro_batches, stage),
        PipelineSchedule::Interleaved => interleaved_order(stages, interleave, micro_batches, stage),
        PipelineSchedule::ZbH1 => zero_bubble_order(stages, micro_batches, stage, 1),
        PipelineSchedule::ZbH2 => zero_bubble_order(stages, micro_batches, stage, 2),
        PipelineSchedule::DualPipe => dual_pipe_order(stages, micro_batches, stage),
    };
    let mut all: Vec<Vec<StageTurn>> = (0..stages).map(order_of_stage).collect();
    if forward_only {
        for turns in &mut all {
            turns.retain(|t| t.op.work == StageWork::Forward);
            turns.iter_mut().for_each(|t| t.paired = None);
        }
    }
    all
}

fn stage_op(work: StageWork, piece: u32, micro_batch: u32) -> StageOp {
    StageOp { work, model_chunk: piece, micro_batch }
}

/// Forwards until the later stages are full, then one forward and one backward alternately, then
/// the remaining backwards.
fn one_f_one_b_order(p: u32, m: u32, stage: u32) -> Vec<StageTurn> {
    let warm = (p - 1 - stage).min(m);
    alternate_turns(m, warm, |k| stage_op(StageWork::Forward, 0, k), |k| stage_op(StageWork::Backward, 0, k))
}

/// Micro-batches run in groups of `p`, each group through all model chunks; backwards mirror that
/// order.
fn interleaved_order(p: u32, v: u32, m: u32, stage: u32) -> Vec<StageTurn> {
    let all = m * v;
    let warm = if m == p { all } else { ((p - 1 - stage) * 2 + (v - 1) * p).min(all) };
    let chunk_and_micro_batch = |k: u32| ((k % (p * v)) / p, k / (p * v) * p + k % p);
    let forward = |k| stage_op(StageWork::Forward, chunk_and_micro_batch(k).0, chunk_and_micro_batch(k).1);
    let backward =
        |k| stage_op(StageWork::Backward, v - 1 - chunk_and_micro_batch(k).0, chunk_and_micro_batch(k).1);
    alternate_turns(all, warm, forward, backward)
}

fn alternate_turns(
    count: u32,
    warm: u32,
    forward: impl Fn(u32) -> StageOp,
    backward: impl Fn(u32) -> StageOp,
) -> Vec<StageTurn> {
    let mut turns: Vec<StageTurn> = (0..warm).map(|k| forward(k).into()).collect();
    for k in warm..count {
        turns.extend([StageTurn::from(forward(k)), backward(k - warm).into()]);
    }
    turns.extend((count - warm..count).map(|k| StageTurn::from(backward(k))));
    turns
}

/// As 1F1B with separate weight gradients. Later stages defer enough of them that all stages keep
/// the same number of micro-batches, and fill the drain phase with them. `depth` 2 warms up twice
/// as far.
fn zero_bubble_order(p: u32, m: u32, stage: u32, depth: u32) -> Vec<StageTurn> {
    let warm = (depth * (p - 1 - stage)).min(m);
    let deferred = depth * stage;
    let mut turns: Vec<StageTurn> = (0..warm).map(|k| stage_op(StageWork::Forward, 0, k).into()).collect();
    for k in 0..m {
        if warm + k < m {
            turns.push(stage_op(StageWork::Forward, 0, warm + k).into());
        }
        turns.push(stage_op(StageWork::BackwardInput, 0, k).into());
        if k >= deferred {
            turns.push(stage_op(StageWork::BackwardWeight, 0, k - deferred).into());
        }
    }
    turns.extend(
        (m.saturating_sub(deferred)..m).map(|k| StageTurn::from(stage_op(StageWork::BackwardWeight, 0, k))),
    );
    turns
}

/// Half of the micro-batches enter at either end. A stage near an end processes its own direction
/// first; stages of the second half mirror the first half with the directions swapped.
fn dual_pipe_order(p: u32, m: u32, stage: u32) -> Vec<StageTurn> {
    let half = p / 2;
    let depth = stage.min(p - 1 - stage);
    let to_middle = half - depth - 1;
    let mut d = DualPipeOrder { swapped: stage >= half, ..DualPipeOrder::default() };
    for _ in 0..2 * to_middle {
        d.push_forward(0);
    }
    for _ in 0..=depth {
        d.push_forward(0);
        d.push_forward(1);
    }
    for _ in 0..to_middle {
        d.push_backward_input(1);
        d.push_weights();
        d.push_forward(1);
    }
    for i in 0..m / 2 + depth + 1 - p {
        if i == 0 && to_middle == 0 {
            // No stage waits for the middle stages yet: as separate turns, the forward finishes
            // earlier.
            d.push_forward(0);
            d.push_backward(1);
        } else {
            d.push_pair(0, 1);
        }
        d.push_pair(1, 0);
    }
    for _ in 0..to_middle {
        d.push_backward(1);
        d.push_pair(1, 0);
    }
    let mut apart = false;
    for i in 0..=depth {
        let turning = i == depth.div_ceil(2);
        apart |= turning && depth % 2 == 1;
        if apart {
            d.push_backward_input(1)
        } else {
            d.push_backward(1)
        }
        apart |= turning;
        if apart { d.push_backward_input(0) } else { d.push_backward(0) }
    }
    for _ in 0..to_middle {
        d.push_weights();
        d.push_backward_input(0);
    }
    for _ in 0..=depth {
        d.push_weights();
    }
    d.turns
}

#[derive(Default)]
struct DualPipeOrder {
    swapped: bool,
    turns: Vec<StageTurn>,
    forwards: [u32; 2],
    backwards: [u32; 2],
    deferred: VecDeque<StageOp>,
}

impl DualPipeOrder {
    fn next_forward(&mut self, direction: usize) -> StageOp {
        self.forwards[direction] += 1;
        stage_op(StageWork::Forward, self.chunk_of(direction), self.forwards[direction] - 1)
    }

    fn next_backward(&mut self, direction: usize, work: StageWork) -> StageOp {
        self.backwards[direction] += 1;
        stage_op(work, self.chunk_of(direction), self.backwards[direction] - 1)
    }

    fn chunk_of(&self, direction: usize) -> u32 {
        direction as u32 ^ u32::from(self.swapped)
    }

    fn push_forward(&mut self, direction: usize) {
        let op = self.next_forward(direction);
        self.turns.push(op.into());
    }

    fn push_backward(&mut self, direction: usize) {
        let op = self.next_backward(direction, StageWork::Backward);
        self.turns.push(op.into());
    }

    fn push_backward_input(&mut self, direction: usize) {
        let op = self.next_backward(direction, StageWork::BackwardInput);
        self.turns.push(op.into());
        self.deferred.push_back(StageOp { work: StageWork::BackwardWeight, ..op });
    }

    fn push_weights(&mut self) {
        let op = self.deferred.pop_front();
        self.turns.extend(op.map(StageTurn::from));
    }

    fn push_pair(&mut self, forward: usize, backward: usize) {
        let op = self.next_forward(forward);
        let beside = Some(self.next_backward(backward, StageWork::Backward));
        self.turns.push(StageTurn { op, paired: beside });
    }
}
