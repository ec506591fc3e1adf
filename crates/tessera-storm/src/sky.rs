//! The weather of a case: how long things take, what becomes of frames, and the bug that was planted.

use std::fmt;

use tessera_base::random::Dice;
use tessera_runtime::engine::ReadyCall;
use tessera_runtime::sim::{Ending, Frame, STUCK, Seen, Work, World};
use tessera_runtime::wire::{CallAction, Message};

use crate::check::Checker;
use crate::{Case, Outcome, Plant};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// A world in which a case takes place.
pub(crate) struct Sky<'a> {
    case: Case,
    plant: Option<Plant>,
    dice: Dice,
    checker: Checker,
    trace: Option<&'a mut dyn FnMut(String)>,
}

impl fmt::Debug for Sky<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sky").field("case", &self.case).finish_non_exhaustive()
    }
}

impl<'a> Sky<'a> {
    pub(crate) fn new(
        case: &Case,
        plant: Option<Plant>,
        checker: Checker,
        trace: Option<&'a mut dyn FnMut(String)>,
    ) -> Sky<'a> {
        Sky { case: case.clone(), plant, dice: Dice::new(case.seed, [2, 0]), checker, trace }
    }

    pub(crate) fn finish(self, ending: &Ending) -> Outcome {
        self.checker.finish(ending)
    }

    /// Mostly short, sometimes long, never near a watchdog's limit.
    fn spread(&mut self, usual_ns: u64) -> u64 {
        let part = usual_ns / 2 + self.dice.below(usual_ns as usize + 1) as u64;
        match self.dice.below(200) {
            0 => part * 20,
            1..=8 => part * 4,
            _ => part,
        }
    }
}

impl World for Sky<'_> {
    fn carry(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        let delay = self.spread(100 * US);
        let mut out = Vec::new();
        if self.plant == Some(Plant::CommitEarly)
            && let (true, Message::Ready(r)) = (frame.up, &frame.message)
        {
            // As if this one were all of them; those that follow are the leader's own affair.
            let forged = self.case.mesh().into_iter().filter(|o| *o > frame.origin);
            let rest: Vec<Frame> = forged
                .map(|origin| Frame { origin, message: Message::Ready(r.clone()), ..frame.clone() })
                .collect();
            if self.checker.first_ready(r.call_id) {
                out.push((delay, frame));
                out.extend(rest.into_iter().map(|f| (delay, f)));
            }
            return out;
        }
        let n = self.case.frames_hurt as usize;
        let hurt = n > 0 && self.dice.chance(1, n) && !matches!(frame.message, Message::Heartbeat(_));
        match (hurt, self.dice.below(3)) {
            (true, 0) => {}
            (true, 1) => out.extend([(delay, frame.clone()), (delay + 50 * US, frame)]),
            // A frame that a network held back for long.
            (true, _) => out.push((delay + self.dice.below(4_000) as u64 * MS, frame)),
            _ => out.push((delay, frame)),
        }
        if self.plant == Some(Plant::RunTwice)
            && let [(at, frame)] = &out[..]
            && matches!(frame.message, Message::Commit(_) | Message::Envelope(_))
            && self.dice.chance(1, 8)
        {
            out.push((*at, frame.clone()));
        }
        out
    }

    fn phase_ns(&mut self, _: u64, rank: u32, call: &ReadyCall, _: usize) -> u64 {
        let usual = self.spread(4 * MS);
        match (self.case.stuck, self.case.slow) {
            (Some(stuck), _) if stuck == (rank, call.call_id) => STUCK,
            // Twenty times what was learned, with marks on the way.
            (_, Some(slow)) if slow == (rank, call.call_id) => usual * 20 + 6_000 * MS,
            _ => usual,
        }
    }

    fn studio_ns(&mut self, _: u64, work: &Work) -> u64 {
        self.spread(match work {
            Work::Text => 2 * MS,
            Work::Context { .. } => 5 * MS,
            Work::Deliver { .. } => 20 * MS,
        })
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        self.dice.below(700) as u64 * MS
    }

    fn meddle(&mut self, rank: u32, call: &mut ReadyCall) {
        if self.plant == Some(Plant::DriftUnnoticed)
            && call.action == CallAction::Infer
            && rank == self.case.mesh()[0]
            && let Some(meta) = &mut call.meta
        {
            // The same collectives over other numbers.
            for phase in &mut meta.phases {
                for (name, arg) in &mut phase.args {
                    if name == "seed" {
                        *arg = tessera_runtime::wire::Arg::I64(i64::MAX);
                    }
                }
            }
        }
    }

    fn writes(&mut self, epoch: u32, fence: u32) -> bool {
        epoch >= fence || self.plant == Some(Plant::FenceIgnored)
    }

    fn seen(&mut self, now_ns: u64, what: Seen<'_>) {
        if let Some(trace) = &mut self.trace {
            trace(format!("{:>12.3} ms  {what:?}", now_ns as f64 / 1e6));
        }
        self.checker.seen(now_ns, &what);
    }
}
