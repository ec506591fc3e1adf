//! Checks the invariants of the runtime during a simulated run.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Diagnostics;
use tessera_runtime::engine::{MediaJob, ReadyCall};
use tessera_runtime::sim::{ExternalEvent, SimEvent, SimOutcome};
use tessera_runtime::wire::{CallAction, Message};
use tessera_runtime::{Digest, FailureClass};

use crate::Scenario;

/// Maximum time in nanoseconds from the last injected event to the end of a run: the longest
/// watchdog, a second one that starts when the first expires, and the duration of a slow step.
const MAX_RUN_AFTER_EVENT_NS: u64 = 90_000_000_000;

/// One violation of an invariant, with its simulated time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct InvariantViolation {
    /// Name of the invariant, such as `stale epoch`; `setup` if the simulation could not be set up.
    pub rule: &'static str,
    /// Simulated time in nanoseconds.
    pub at_ns: u64,
    /// The observation that contradicts the invariant, such as `ranks [1] are still running`.
    pub text: String,
}

/// The result of one simulated run of a scenario: its violations, and how the run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct StormOutcome {
    /// Violations of invariants during the run; empty if the scenario passed.
    pub violations: Vec<InvariantViolation>,
    /// Digest of all events: equal for equal runs.
    pub trace: Digest,
    /// Number of events that the trace digest covers.
    pub events: u64,
    /// Whether the run ended with every chunk delivered.
    pub finished: bool,
    /// Class and blamed rank of the run's failure.
    pub failure: Option<(FailureClass, Option<u32>)>,
    /// Number of chunks delivered.
    pub emitted: u32,
}

impl StormOutcome {
    pub(crate) fn from_setup_errors(found: &Diagnostics) -> StormOutcome {
        let text = found.iter().map(|d| d.message.as_str()).collect::<Vec<_>>().join("; ");
        StormOutcome {
            violations: vec![InvariantViolation { rule: "setup", at_ns: 0, text }],
            trace: Digest::default(),
            events: 0,
            finished: false,
            failure: None,
            emitted: 0,
        }
    }
}

/// Checks the invariants at every event of a simulated run, and keeps the first violation of each.
#[derive(Debug)]
pub(crate) struct InvariantChecker {
    scenario: Scenario,
    mesh: Vec<u32>,
    violations: Vec<InvariantViolation>,
    trace: Digest,
    events: u64,
    /// Time of the latest event in nanoseconds, and at last that of the end.
    now_ns: u64,
    /// Ranks that have sent their ready message, per call.
    ready: BTreeMap<u64, BTreeSet<u32>>,
    /// Calls whose first ready message was delivered; the injected bug forges the others.
    first_ready_calls: BTreeSet<u64>,
    /// Digest of the call's contents on the first rank that ran it.
    call_digests: BTreeMap<u64, Digest>,
    last_run: BTreeMap<u32, u64>,
    min_epoch: u32,
    last_chunk: Option<u32>,
    emitted: u32,
    /// Time of the last of the scenario's external events in nanoseconds; 0 if the scenario has
    /// none.
    last_event_ns: u64,
}

impl InvariantChecker {
    pub(crate) fn new(scenario: &Scenario) -> InvariantChecker {
        InvariantChecker {
            mesh: scenario.mesh_ranks(),
            last_event_ns: scenario.external_events.iter().map(|(at, _)| *at).max().unwrap_or(0),
            scenario: scenario.clone(),
            violations: Vec::new(),
            trace: Digest::default(),
            events: 0,
            now_ns: 0,
            ready: BTreeMap::new(),
            first_ready_calls: BTreeSet::new(),
            call_digests: BTreeMap::new(),
            last_run: BTreeMap::new(),
            min_epoch: 0,
            last_chunk: None,
            emitted: 0,
        }
    }

    /// Returns whether this is the first ready message of a call.
    pub(crate) fn is_first_ready(&mut self, call_id: u64) -> bool {
        self.first_ready_calls.insert(call_id)
    }

    fn report_violation(&mut self, rule: &'static str, text: impl Into<String>) {
        // Report each invariant once.
        if !self.violations.iter().any(|v| v.rule == rule) {
            self.violations.push(InvariantViolation { rule, at_ns: self.now_ns, text: text.into() });
        }
    }

    pub(crate) fn observe_event(&mut self, now_ns: u64, what: &SimEvent<'_>) {
        self.events += 1;
        self.now_ns = now_ns;
        self.fold_event(now_ns, what);
        match what {
            SimEvent::FrameSent(frame) => {
                if let Message::Ready(r) = &frame.message
                    && frame.from == frame.origin
                {
                    self.ready.entry(r.call_id).or_default().insert(frame.origin);
                }
            }
            SimEvent::CallStarted { rank, call } => self.check_call_start(*rank, call),
            SimEvent::MinEpochSet(epoch) => self.min_epoch = (*epoch).max(self.min_epoch),
            SimEvent::MediaJobFinished {
                work: MediaJob::Deliver { chunk, epoch, .. },
                emitted: true,
                waiting,
                ..
            } => {
                self.emitted += 1;
                if *epoch < self.min_epoch {
                    let text = format!(
                        "chunk {chunk} of epoch {epoch} was delivered after the minimum epoch became {}",
                        self.min_epoch
                    );
                    self.report_violation("stale epoch", text);
                }
                if self.last_chunk.is_some_and(|last| last >= *chunk) {
                    self.report_violation(
                        "output order",
                        format!("chunk {chunk} was delivered after {:?}", self.last_chunk),
                    );
                }
                self.last_chunk = Some(*chunk);
                if *waiting > 6 {
                    self.report_violation(
                        "bounds",
                        format!("{waiting} jobs are queued in the media pipeline"),
                    );
                }
            }
            SimEvent::CallFinished(record) => {
                let limits = Scenario::runtime_limits();
                if record.queued_out > limits.d_out || record.queued_in > limits.d_in {
                    let text =
                        format!("{} requests and {} chunks are queued", record.queued_in, record.queued_out);
                    self.report_violation("bounds", text);
                }
                let mut outputs: Vec<Digest> = record.observed.values().map(|o| o.output).collect();
                outputs.dedup();
                if outputs.len() > 1 && record.plan.action == CallAction::Infer {
                    self.report_violation(
                        "equal results",
                        format!("call {} closed with different outputs {outputs:?}", record.call_id),
                    );
                }
            }
            _ => {}
        }
    }

    /// Checks that no rank enters a call's collectives before every rank of the mesh has agreed to
    /// that call.
    fn check_call_start(&mut self, rank: u32, call: &ReadyCall) {
        let id = call.call_id;
        let ready = self.ready.get(&id);
        let missing: Vec<u32> =
            self.mesh.iter().copied().filter(|r| !ready.is_some_and(|s| s.contains(r))).collect();
        if !missing.is_empty() {
            self.report_violation(
                "agreement",
                format!("rank {rank} runs call {id}, but ranks {missing:?} are not ready"),
            );
        }
        if self.last_run.insert(rank, id).is_some_and(|last| last >= id) {
            self.report_violation(
                "monotone ids",
                format!("rank {rank} runs call {id} again or out of order"),
            );
        }
        let content =
            Digest::hash_bytes(format!("{:?} {:?} {:?}", call.action, call.meta, call.inputs).as_bytes());
        if *self.call_digests.entry(id).or_insert(content) != content {
            self.report_violation(
                "same call",
                format!("rank {rank} runs a different call {id} than its peers"),
            );
        }
    }

    /// Folds an event into the trace digest, without its bulky fields.
    fn fold_event(&mut self, now_ns: u64, what: &SimEvent<'_>) {
        let text = match what {
            SimEvent::FrameSent(f) => {
                format!("{now_ns} {} {} {} {:?}", f.from, f.to, f.origin, f.message.kind())
            }
            SimEvent::CallStarted { rank, call } => format!("{now_ns} run {rank} {}", call.call_id),
            SimEvent::CollectivesEntered { rank, call_id, phase } => {
                format!("{now_ns} in {rank} {call_id} {phase}")
            }
            SimEvent::CallFinished(r) => format!("{now_ns} call {}", r.call_id),
            SimEvent::MinEpochSet(e) => format!("{now_ns} fence {e}"),
            SimEvent::MediaJobFinished { begun_ns, emitted, waiting, .. } => {
                format!("{now_ns} media {begun_ns} {emitted} {waiting}")
            }
            SimEvent::Exiting { rank, failure } => {
                format!("{now_ns} leaves {rank} {:?}", failure.map(|f| (f.class, f.rank)))
            }
            SimEvent::Exited(rank) => format!("{now_ns} gone {rank}"),
        };
        let mut bytes = self.trace.0.to_vec();
        bytes.extend(text.bytes());
        self.trace = Digest::hash_bytes(&bytes);
    }

    pub(crate) fn into_outcome(mut self, ending: &SimOutcome) -> StormOutcome {
        let end_ns = ending.gone_ns.unwrap_or(crate::MAX_SIMULATED_NS);
        self.now_ns = end_ns;
        if !ending.left.is_empty() {
            // The launcher ends a stopped process; without a launcher the simulated user must do
            // so.
            let stopped = |r: &u32| {
                !self.scenario.launcher
                    && self.scenario.external_events.iter().any(|(_, b)| *b == ExternalEvent::Stop(*r))
            };
            let left: Vec<u32> = ending.left.iter().copied().filter(|r| !stopped(r)).collect();
            if !left.is_empty() {
                self.report_violation("every process exits", format!("ranks {left:?} are still running"));
            }
        }
        if ending.left.is_empty() && end_ns > self.last_event_ns + MAX_RUN_AFTER_EVENT_NS {
            self.report_violation(
                "bounded waits",
                format!(
                    "the run ended at {} s, too long after the last injected event",
                    end_ns / 1_000_000_000
                ),
            );
        }
        let failure = ending.failure.as_ref();
        if self.scenario.is_harmless() && (failure.is_some() || !ending.finished) {
            let text = format!("the scenario is harmless, but the run ended with {failure:?}");
            self.report_violation("no false positive", text);
        }
        if let Some((bound_ns, since_ns)) = self.scenario.exit_bound()
            && failure.is_some()
            && end_ns > since_ns + bound_ns
        {
            let text = format!("{:.3} s after the injected event", (end_ns - since_ns) as f64 / 1e9);
            self.report_violation("exit in time", text);
        }
        if !ending.finished && failure.is_none() && self.leader_survives() {
            self.report_violation("reported outcome", "the run neither finished nor failed");
        }
        if let (Some(culprit), Some(f)) = (self.scenario.expected_culprit(), failure)
            && culprit != 0
            && f.rank != Some(culprit)
        {
            self.report_violation("blamed rank", format!("rank {culprit} was hit, but the failure is {f}"));
        }
        StormOutcome {
            violations: self.violations,
            trace: self.trace,
            events: self.events,
            finished: ending.finished,
            failure: failure.map(|f| (f.class, f.rank)),
            emitted: self.emitted,
        }
    }

    /// Returns whether the leader's process lived long enough to report an outcome.
    fn leader_survives(&self) -> bool {
        let struck = |b: &ExternalEvent| matches!(b, ExternalEvent::Kill(0) | ExternalEvent::Stop(0));
        !self.scenario.external_events.iter().any(|(_, b)| struck(b))
    }
}
