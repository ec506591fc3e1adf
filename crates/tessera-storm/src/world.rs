//! The simulated world of a scenario: durations, frame delivery, and the injected bug.

use std::fmt;

use tessera_base::random::Rng;
use tessera_runtime::engine::{MediaJob, ReadyCall};
use tessera_runtime::sim::{Frame, NEVER_ENDS, SimEvent, SimOutcome, World};
use tessera_runtime::wire::{CallAction, Message};

use crate::invariants::InvariantChecker;
use crate::{InjectedBug, Scenario, StormOutcome};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// Implements the simulation's environment for one scenario.
pub(crate) struct ScenarioWorld<'a> {
    scenario: Scenario,
    bug: Option<InjectedBug>,
    dice: Rng,
    checker: InvariantChecker,
    trace: Option<&'a mut dyn FnMut(String)>,
}

impl fmt::Debug for ScenarioWorld<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScenarioWorld").field("scenario", &self.scenario).finish_non_exhaustive()
    }
}

impl<'a> ScenarioWorld<'a> {
    pub(crate) fn new(
        scenario: &Scenario,
        bug: Option<InjectedBug>,
        checker: InvariantChecker,
        trace: Option<&'a mut dyn FnMut(String)>,
    ) -> ScenarioWorld<'a> {
        ScenarioWorld {
            scenario: scenario.clone(),
            bug,
            dice: Rng::new(scenario.seed, [2, 0]),
            checker,
            trace,
        }
    }

    pub(crate) fn into_outcome(self, ending: &SimOutcome) -> StormOutcome {
        self.checker.into_outcome(ending)
    }

    /// Draws a duration: mostly short, sometimes long, never near a watchdog's limit.
    fn random_delay(&mut self, usual_ns: u64) -> u64 {
        let part = usual_ns / 2 + self.dice.next_below(usual_ns as usize + 1) as u64;
        match self.dice.next_below(200) {
            0 => part * 20,
            1..=8 => part * 4,
            _ => part,
        }
    }
}

impl World for ScenarioWorld<'_> {
    fn deliver_frame(&mut self, _: u64, frame: Frame) -> Vec<(u64, Frame)> {
        let delay = self.random_delay(100 * US);
        let mut out = Vec::new();
        if self.bug == Some(InjectedBug::CommitEarly)
            && let (true, Message::Ready(r)) = (frame.up, &frame.message)
        {
            // Forge the ready messages of the other ranks from this one; later ones are dropped.
            let forged = self.scenario.mesh_ranks().into_iter().filter(|o| *o > frame.origin);
            let rest: Vec<Frame> = forged
                .map(|origin| Frame { origin, message: Message::Ready(r.clone()), ..frame.clone() })
                .collect();
            if self.checker.is_first_ready(r.call_id) {
                out.push((delay, frame));
                out.extend(rest.into_iter().map(|f| (delay, f)));
            }
            return out;
        }
        let n = self.scenario.frame_fault_period as usize;
        let hurt = n > 0 && self.dice.next_ratio(1, n) && !matches!(frame.message, Message::Heartbeat(_));
        match (hurt, self.dice.next_below(3)) {
            (true, 0) => {}
            (true, 1) => out.extend([(delay, frame.clone()), (delay + 50 * US, frame)]),
            // The network delays the frame for a long time.
            (true, _) => out.push((delay + self.dice.next_below(4_000) as u64 * MS, frame)),
            _ => out.push((delay, frame)),
        }
        if self.bug == Some(InjectedBug::RunTwice)
            && let [(at, frame)] = &out[..]
            && matches!(frame.message, Message::Commit(_) | Message::Envelope(_))
            && self.dice.next_ratio(1, 8)
        {
            out.push((*at, frame.clone()));
        }
        out
    }

    fn phase_ns(&mut self, _: u64, rank: u32, call: &ReadyCall, _: usize) -> u64 {
        let usual = self.random_delay(4 * MS);
        match (self.scenario.stuck_call, self.scenario.slow_call) {
            (Some(stuck), _) if stuck == (rank, call.call_id) => NEVER_ENDS,
            // Twenty times the learned duration, with progress on the way.
            (_, Some(slow)) if slow == (rank, call.call_id) => usual * 20 + 6_000 * MS,
            _ => usual,
        }
    }

    fn media_ns(&mut self, _: u64, work: &MediaJob) -> u64 {
        self.random_delay(match work {
            MediaJob::EncodePrompt(_) => 2 * MS,
            MediaJob::Context { .. } => 5 * MS,
            MediaJob::Deliver { .. } => 20 * MS,
        })
    }

    fn exit_ns(&mut self, _: u32) -> u64 {
        self.dice.next_below(700) as u64 * MS
    }

    fn alter_call(&mut self, rank: u32, call: &mut ReadyCall) {
        if self.bug == Some(InjectedBug::DriftUnnoticed)
            && call.action == CallAction::Infer
            && rank == self.scenario.mesh_ranks()[0]
            && let Some(meta) = &mut call.meta
        {
            // The same collectives, with different data.
            for phase in &mut meta.phases {
                for (name, arg) in &mut phase.args {
                    if name == "seed" {
                        *arg = tessera_runtime::wire::ScalarArg::I64(i64::MAX);
                    }
                }
            }
        }
    }

    fn should_write(&mut self, epoch: u32, fence: u32) -> bool {
        epoch >= fence || self.bug == Some(InjectedBug::MinEpochIgnored)
    }

    fn observe_event(&mut self, now_ns: u64, what: SimEvent<'_>) {
        if let Some(trace) = &mut self.trace {
            trace(format!("{:>12.3} ms  {what:?}", now_ns as f64 / 1e6));
        }
        self.checker.observe_event(now_ns, &what);
    }
}
