//! Sends and receives of every schedule: posted together between two turns they never deadlock;
//! posted one after the other, those of 1F1B do.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::params::PipelineSchedule;
use tessera_cost::schedule::{StageOp, StageTurn, StageWork, stage_orders};

/// A message between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct StageMessage {
    from: u32,
    to: u32,
    gradient: bool,
    /// Model chunk of the receiver.
    model_chunk: u32,
    micro_batch: u32,
}

/// Messages that a stage posts at once; the stage continues when all of them are done.
type PostBatch = Vec<StageMessage>;

/// Returns the messages that carry an op's input and its output. The rule is written independently
/// of the simulation: the chunks of the model in order, each with its stage.
fn op_messages(
    schedule: PipelineSchedule,
    p: u32,
    v: u32,
    stage: u32,
    op: StageOp,
) -> (Option<StageMessage>, Option<StageMessage>) {
    let gradient = op.work != StageWork::Forward;
    if op.work == StageWork::BackwardWeight {
        return (None, None);
    }
    let (at, count) = match (schedule, op.model_chunk) {
        (PipelineSchedule::DualPipe, 1) => (p - 1 - stage, p),
        (PipelineSchedule::DualPipe, _) => (stage, p),
        _ => (op.model_chunk * p + stage, p * v),
    };
    let home = |at: u32| match (schedule, op.model_chunk) {
        (PipelineSchedule::DualPipe, 1) => (p - 1 - at, 1),
        (PipelineSchedule::DualPipe, _) => (at, 0),
        _ => (at % p, at / p),
    };
    let message = |from: u32, to: u32| {
        let ((from, _), (to, piece)) = (home(from), home(to));
        StageMessage { from, to, gradient, model_chunk: piece, micro_batch: op.micro_batch }
    };
    let earlier = at.checked_sub(1);
    let later = (at + 1 < count).then_some(at + 1);
    let (source, target) = if gradient { (later, earlier) } else { (earlier, later) };
    (source.map(|s| message(s, at)), target.map(|t| message(at, t)))
}

/// Groups turns between which a stage posts nothing. Interleaved stages post once per forward and
/// backward after warm-up: posting after each turn would deadlock two stages that send around the
/// end of the pipeline. Weight gradients send nothing, so the receives of the turn after them are
/// posted before them.
fn post_rounds(
    schedule: PipelineSchedule,
    p: u32,
    v: u32,
    m: u32,
    stage: u32,
    stage_turns: &[StageTurn],
) -> Vec<Vec<StageOp>> {
    let ops = |t: &StageTurn| [Some(t.op), t.paired].into_iter().flatten();
    let warm = if m == p { m * v } else { ((p - 1 - stage) * 2 + (v - 1) * p).min(m * v) };
    let pairs = warm as usize..(2 * m * v - warm) as usize;
    let mut rounds: Vec<Vec<StageOp>> = Vec::new();
    for (k, turn) in stage_turns.iter().enumerate() {
        let second =
            schedule == PipelineSchedule::Interleaved && pairs.contains(&k) && (k - pairs.start) % 2 == 1;
        let silent = |round: &Vec<StageOp>| round.iter().all(|op| op.work == StageWork::BackwardWeight);
        match rounds.last_mut() {
            Some(round) if second || silent(round) => round.extend(ops(turn)),
            _ => rounds.push(ops(turn).collect()),
        }
    }
    rounds
}

/// Returns the batches that each stage posts, in order: with `together`, the outputs of a round
/// with the inputs of the next one; otherwise each send and then each receive alone.
fn stage_posts(schedule: PipelineSchedule, p: u32, v: u32, m: u32, together: bool) -> Vec<Vec<PostBatch>> {
    let stage = |(stage, turns): (usize, Vec<StageTurn>)| {
        let rounds = post_rounds(schedule, p, v, m, stage as u32, &turns);
        let mut batches: Vec<PostBatch> = Vec::new();
        for k in 0..=rounds.len() {
            let sends = k.checked_sub(1).map(|before| rounds[before].clone()).unwrap_or_default();
            let receives = rounds.get(k).cloned().unwrap_or_default();
            let sends = sends.into_iter().filter_map(|op| op_messages(schedule, p, v, stage as u32, op).1);
            let receives =
                receives.into_iter().filter_map(|op| op_messages(schedule, p, v, stage as u32, op).0);
            let batch: PostBatch = sends.chain(receives).collect();
            if together {
                batches.push(batch)
            } else {
                batches.extend(batch.into_iter().map(|one| vec![one]))
            }
        }
        batches.retain(|b| !b.is_empty());
        batches
    };
    stage_orders(schedule, p, v, m, false).into_iter().enumerate().map(stage).collect()
}

/// Simulates the posts, where a message is done when both ends have posted it, and returns the
/// number of batches that never complete. With `sends_wait` a stage continues when its sends are
/// done too, otherwise as soon as its receives are done.
fn incomplete_batches(mut stages: Vec<Vec<PostBatch>>, sends_wait: bool) -> usize {
    stages.iter_mut().for_each(|s| s.reverse());
    let mut behind: BTreeSet<StageMessage> = BTreeSet::new();
    loop {
        let mut moved = false;
        if !sends_wait {
            for (stage, batches) in stages.iter_mut().enumerate() {
                while let Some(batch) = batches.last_mut() {
                    behind.extend(batch.iter().filter(|m| m.from == stage as u32));
                    batch.retain(|m| m.from != stage as u32);
                    if !batch.is_empty() {
                        break;
                    }
                    batches.pop();
                }
            }
        }
        // A message has two ends, each in the current batch of its stage.
        let mut posted: BTreeMap<StageMessage, usize> = behind.iter().map(|m| (*m, 1)).collect();
        for message in stages.iter().filter_map(|s| s.last()).flatten() {
            *posted.entry(*message).or_default() += 1;
        }
        for stage in &mut stages {
            if let Some(batch) = stage.last_mut() {
                let before = batch.len();
                batch.retain(|message| posted[message] < 2);
                moved |= batch.len() < before;
                if batch.is_empty() {
                    stage.pop();
                }
            }
        }
        if !moved {
            return stages.iter().map(Vec::len).sum();
        }
    }
}

fn schedules() -> impl Iterator<Item = (PipelineSchedule, u32, u32, u32)> {
    PipelineSchedule::ALL.into_iter().flat_map(|schedule| {
        (2..8u32).flat_map(move |p| (1..20u32).map(move |m| (p, m))).filter_map(
            move |(p, m)| match schedule {
                PipelineSchedule::Interleaved => (m < 5).then_some((schedule, p, 2 + m % 3, m * p)),
                PipelineSchedule::DualPipe => {
                    (p % 2 == 0 && m % 2 == 0 && m >= 2 * p).then_some((schedule, p, 1, m))
                }
                _ => Some((schedule, p, 1, m)),
            },
        )
    })
}

#[test]
fn sends_posted_with_the_next_receives_never_deadlock() {
    let mut seen = 0;
    for (schedule, p, v, m) in schedules() {
        let sends_wait = schedule != PipelineSchedule::DualPipe;
        assert_eq!(
            incomplete_batches(stage_posts(schedule, p, v, m, true), sends_wait),
            0,
            "{} p={p} v={v} m={m}",
            schedule.name()
        );
        seen += 1;
    }
    assert!(seen > 300);
}

#[test]
fn dual_pipe_deadlocks_if_it_waits_for_its_sends() {
    assert!(incomplete_batches(stage_posts(PipelineSchedule::DualPipe, 2, 1, 4, true), true) > 0);
}

#[test]
fn sends_posted_before_receives_deadlock_1f1b() {
    assert!(incomplete_batches(stage_posts(PipelineSchedule::OneFOneB, 4, 1, 8, false), true) > 0);
    assert!(incomplete_batches(stage_posts(PipelineSchedule::OneFOneB, 2, 1, 4, false), true) > 0);
    // A single micro-batch has no messages that cross.
    assert_eq!(incomplete_batches(stage_posts(PipelineSchedule::OneFOneB, 4, 1, 1, false), true), 0);
}

#[test]
fn between_two_stages_activations_and_gradients_each_arrive_in_the_order_they_were_sent() {
    for (schedule, p, v, m) in schedules() {
        let mut sent: BTreeMap<(u32, u32, bool, u32), Vec<StageMessage>> = BTreeMap::new();
        let mut received = sent.clone();
        for (stage, batches) in stage_posts(schedule, p, v, m, true).into_iter().enumerate() {
            for message in batches.into_iter().flatten() {
                // Model chunks that enter from either end have separate channels.
                let way = if schedule == PipelineSchedule::DualPipe { message.model_chunk } else { 0 };
                let channel = (message.from, message.to, message.gradient, way);
                let side = if message.from == stage as u32 { &mut sent } else { &mut received };
                side.entry(channel).or_default().push(message);
            }
        }
        assert_eq!(sent, received, "{} p={p} v={v} m={m}", schedule.name());
    }
}
