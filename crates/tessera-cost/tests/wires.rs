//! Sends and receives of every schedule: posted together between two turns they never wait in a circle, and posted one
//! after the other those of 1F1B do.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::knobs::Schedule;
use tessera_cost::schedule::{Op, Turn, Work, orders};

/// A message: what it carries, and where it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    from: u32,
    to: u32,
    gradient: bool,
    /// Piece of the receiver, and micro-batch.
    piece: u32,
    micro_batch: u32,
}

/// What a stage posts at once: it goes on when all of it is done.
type Batch = Vec<Message>;

/// Where an op's input comes from and its output goes to, written down apart from the simulation: the pieces of the
/// model in order, each with its stage.
fn neighbours(schedule: Schedule, p: u32, v: u32, stage: u32, op: Op) -> (Option<Message>, Option<Message>) {
    let gradient = op.work != Work::Forward;
    if op.work == Work::BackwardWeight {
        return (None, None);
    }
    let (at, count) = match (schedule, op.piece) {
        (Schedule::DualPipe, 1) => (p - 1 - stage, p),
        (Schedule::DualPipe, _) => (stage, p),
        _ => (op.piece * p + stage, p * v),
    };
    let home = |at: u32| match (schedule, op.piece) {
        (Schedule::DualPipe, 1) => (p - 1 - at, 1),
        (Schedule::DualPipe, _) => (at, 0),
        _ => (at % p, at / p),
    };
    let message = |from: u32, to: u32| {
        let ((from, _), (to, piece)) = (home(from), home(to));
        Message { from, to, gradient, piece, micro_batch: op.micro_batch }
    };
    let earlier = at.checked_sub(1);
    let later = (at + 1 < count).then_some(at + 1);
    let (source, target) = if gradient { (later, earlier) } else { (earlier, later) };
    (source.map(|s| message(s, at)), target.map(|t| message(at, t)))
}

/// Turns between which a stage posts nothing. Interleaved stages that have warmed up post once per forward and backward:
/// after each turn alone, two stages that send round the end of the pipeline would wait for each other. Gradients of
/// weights send nothing, so what the turn after them receives is posted before them.
fn rounds(schedule: Schedule, p: u32, v: u32, m: u32, stage: u32, turns: &[Turn]) -> Vec<Vec<Op>> {
    let ops = |t: &Turn| [Some(t.op), t.beside].into_iter().flatten();
    let warm = if m == p { m * v } else { ((p - 1 - stage) * 2 + (v - 1) * p).min(m * v) };
    let pairs = warm as usize..(2 * m * v - warm) as usize;
    let mut rounds: Vec<Vec<Op>> = Vec::new();
    for (k, turn) in turns.iter().enumerate() {
        let second = schedule == Schedule::Interleaved && pairs.contains(&k) && (k - pairs.start) % 2 == 1;
        let silent = |round: &Vec<Op>| round.iter().all(|op| op.work == Work::BackwardWeight);
        match rounds.last_mut() {
            Some(round) if second || silent(round) => round.extend(ops(turn)),
            _ => rounds.push(ops(turn).collect()),
        }
    }
    rounds
}

/// What each stage posts, in order: with `together`, the outputs of a round with the inputs of the next; else each send
/// and then each receive by itself.
fn posts(schedule: Schedule, p: u32, v: u32, m: u32, together: bool) -> Vec<Vec<Batch>> {
    let stage = |(stage, turns): (usize, Vec<Turn>)| {
        let rounds = rounds(schedule, p, v, m, stage as u32, &turns);
        let mut batches: Vec<Batch> = Vec::new();
        for k in 0..=rounds.len() {
            let sends = k.checked_sub(1).map(|before| rounds[before].clone()).unwrap_or_default();
            let receives = rounds.get(k).cloned().unwrap_or_default();
            let sends = sends.into_iter().filter_map(|op| neighbours(schedule, p, v, stage as u32, op).1);
            let receives =
                receives.into_iter().filter_map(|op| neighbours(schedule, p, v, stage as u32, op).0);
            let batch: Batch = sends.chain(receives).collect();
            if together {
                batches.push(batch)
            } else {
                batches.extend(batch.into_iter().map(|one| vec![one]))
            }
        }
        batches.retain(|b| !b.is_empty());
        batches
    };
    orders(schedule, p, v, m, false).into_iter().enumerate().map(stage).collect()
}

/// Plays the posts: a message is done when both ends have posted it. Says how many batches are left for good. With
/// `sends_wait` a stage goes on when its sends are done too, else when what it receives has come.
fn left(mut stages: Vec<Vec<Batch>>, sends_wait: bool) -> usize {
    stages.iter_mut().for_each(|s| s.reverse());
    let mut behind: BTreeSet<Message> = BTreeSet::new();
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
        // A message has two ends, each in the batch that its stage stands at.
        let mut posted: BTreeMap<Message, usize> = behind.iter().map(|m| (*m, 1)).collect();
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

fn arrangements() -> impl Iterator<Item = (Schedule, u32, u32, u32)> {
    Schedule::ALL.iter().flat_map(|&schedule| {
        (2..8u32).flat_map(move |p| (1..20u32).map(move |m| (p, m))).filter_map(
            move |(p, m)| match schedule {
                Schedule::Interleaved => (m < 5).then_some((schedule, p, 2 + m % 3, m * p)),
                Schedule::DualPipe => (p % 2 == 0 && m % 2 == 0 && m >= 2 * p).then_some((schedule, p, 1, m)),
                _ => Some((schedule, p, 1, m)),
            },
        )
    })
}

#[test]
fn sends_posted_with_the_next_receives_never_wait_in_a_circle() {
    let mut seen = 0;
    for (schedule, p, v, m) in arrangements() {
        let sends_wait = schedule != Schedule::DualPipe;
        assert_eq!(
            left(posts(schedule, p, v, m, true), sends_wait),
            0,
            "{} p={p} v={v} m={m}",
            schedule.name()
        );
        seen += 1;
    }
    assert!(seen > 300);
}

#[test]
fn two_directions_that_wait_for_their_sends_meet_in_the_middle() {
    assert!(left(posts(Schedule::DualPipe, 2, 1, 4, true), true) > 0);
}

#[test]
fn sends_that_wait_for_their_receiver_stop_one_forward_one_backward() {
    assert!(left(posts(Schedule::OneFOneB, 4, 1, 8, false), true) > 0);
    assert!(left(posts(Schedule::OneFOneB, 2, 1, 4, false), true) > 0);
    // With one micro-batch there is nothing to cross.
    assert_eq!(left(posts(Schedule::OneFOneB, 4, 1, 1, false), true), 0);
}

#[test]
fn between_two_stages_activations_and_gradients_each_arrive_in_the_order_they_were_sent() {
    for (schedule, p, v, m) in arrangements() {
        let mut sent: BTreeMap<(u32, u32, bool, u32), Vec<Message>> = BTreeMap::new();
        let mut received = sent.clone();
        for (stage, batches) in posts(schedule, p, v, m, true).into_iter().enumerate() {
            for message in batches.into_iter().flatten() {
                // Pieces that enter from either end have channels of their own.
                let way = if schedule == Schedule::DualPipe { message.piece } else { 0 };
                let channel = (message.from, message.to, message.gradient, way);
                let side = if message.from == stage as u32 { &mut sent } else { &mut received };
                side.entry(channel).or_default().push(message);
            }
        }
        assert_eq!(sent, received, "{} p={p} v={v} m={m}", schedule.name());
    }
}
