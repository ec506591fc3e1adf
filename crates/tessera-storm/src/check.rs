//! What must never happen, looked for while it happens.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Diagnostics;
use tessera_runtime::engine::ReadyCall;
use tessera_runtime::sim::{Blow, Ending, Seen, Work};
use tessera_runtime::wire::{CallAction, Message};
use tessera_runtime::{Digest, FailureClass};

use crate::Case;

/// After the last thing that was done to a run, it is over within this, in nanoseconds: the longest watchdog, one that
/// starts when the first ends, and the time that a slow step may take.
const PATIENCE_NS: u64 = 90_000_000_000;

/// Something that must never happen.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Which rule, in a word.
    pub rule: &'static str,
    /// When, in nanoseconds of the made-up clock.
    pub at_ns: u64,
    /// What was seen.
    pub text: String,
}

/// How a case ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What must never happen and did.
    pub violations: Vec<Violation>,
    /// Digest of everything that happened: equal for equal runs.
    pub trace: Digest,
    /// Events.
    pub events: u64,
    /// Whether the run ended with every chunk delivered.
    pub finished: bool,
    /// Class and rank of its failure.
    pub failure: Option<(FailureClass, Option<u32>)>,
    /// Chunks that came out.
    pub emitted: u32,
}

impl Outcome {
    pub(crate) fn refused(found: &Diagnostics) -> Outcome {
        let text = found.iter().map(|d| d.message.as_str()).collect::<Vec<_>>().join("; ");
        Outcome {
            violations: vec![Violation { rule: "setup", at_ns: 0, text }],
            trace: Digest::default(),
            events: 0,
            finished: false,
            failure: None,
            emitted: 0,
        }
    }
}

/// Watches a run.
#[derive(Debug)]
pub(crate) struct Checker {
    case: Case,
    mesh: Vec<u32>,
    violations: Vec<Violation>,
    trace: Digest,
    events: u64,
    /// Ranks whose ready for a call left them.
    ready: BTreeMap<u64, BTreeSet<u32>>,
    /// Calls whose first ready passed, for the plant that forges the rest.
    first: BTreeSet<u64>,
    /// What the first rank ran as this call.
    ran: BTreeMap<u64, Digest>,
    last_run: BTreeMap<u32, u64>,
    fence: u32,
    last_chunk: Option<u32>,
    emitted: u32,
    /// When the last harmful thing took effect.
    last_harm_ns: u64,
}

impl Checker {
    pub(crate) fn new(case: &Case) -> Checker {
        Checker {
            mesh: case.mesh(),
            last_harm_ns: case.blows.iter().map(|(at, _)| *at).max().unwrap_or(0),
            case: case.clone(),
            violations: Vec::new(),
            trace: Digest::default(),
            events: 0,
            ready: BTreeMap::new(),
            first: BTreeSet::new(),
            ran: BTreeMap::new(),
            last_run: BTreeMap::new(),
            fence: 0,
            last_chunk: None,
            emitted: 0,
        }
    }

    /// Whether this call's first ready passes now.
    pub(crate) fn first_ready(&mut self, call_id: u64) -> bool {
        self.first.insert(call_id)
    }

    fn broken(&mut self, rule: &'static str, at_ns: u64, text: String) {
        // The first of a kind says it.
        if !self.violations.iter().any(|v| v.rule == rule) {
            self.violations.push(Violation { rule, at_ns, text });
        }
    }

    pub(crate) fn seen(&mut self, now_ns: u64, what: &Seen<'_>) {
        self.events += 1;
        self.follow(now_ns, what);
        match what {
            Seen::Sends(frame) => {
                if let Message::Ready(r) = &frame.message
                    && frame.from == frame.origin
                {
                    self.ready.entry(r.call_id).or_default().insert(frame.origin);
                }
            }
            Seen::Run { rank, call } => self.run(now_ns, *rank, call),
            Seen::Fence(epoch) => self.fence = (*epoch).max(self.fence),
            Seen::Studio { work: Work::Deliver { chunk, epoch }, emitted: true, waiting, .. } => {
                self.emitted += 1;
                if *epoch < self.fence {
                    let text =
                        format!("chunk {chunk} of epoch {epoch} came out behind the fence {}", self.fence);
                    self.broken("stale epoch", now_ns, text);
                }
                if self.last_chunk.is_some_and(|last| last >= *chunk) {
                    self.broken(
                        "order of output",
                        now_ns,
                        format!("chunk {chunk} after {:?}", self.last_chunk),
                    );
                }
                self.last_chunk = Some(*chunk);
                if *waiting > 6 {
                    self.broken("bounds", now_ns, format!("{waiting} pieces of work wait in the studio"));
                }
            }
            Seen::Call(record) => {
                let limits = Case::limits();
                if record.queued_out > limits.d_out || record.queued_in > limits.d_in {
                    let text = format!("{} requests and {} chunks wait", record.queued_in, record.queued_out);
                    self.broken("bounds", now_ns, text);
                }
                let mut outputs: Vec<Digest> = record.observed.values().map(|o| o.output).collect();
                outputs.dedup();
                if outputs.len() > 1 && record.plan.action == CallAction::Infer {
                    self.broken(
                        "equal results",
                        now_ns,
                        format!("call {} closed over {outputs:?}", record.call_id),
                    );
                }
            }
            _ => {}
        }
    }

    /// No rank enters a call's collectives unless every rank of the mesh has agreed to that very call.
    fn run(&mut self, now_ns: u64, rank: u32, call: &ReadyCall) {
        let id = call.call_id;
        let ready = self.ready.get(&id);
        let missing: Vec<u32> =
            self.mesh.iter().copied().filter(|r| !ready.is_some_and(|s| s.contains(r))).collect();
        if !missing.is_empty() {
            self.broken(
                "agreement",
                now_ns,
                format!("rank {rank} runs call {id}, ranks {missing:?} are not ready"),
            );
        }
        if self.last_run.insert(rank, id).is_some_and(|last| last >= id) {
            self.broken("monotone ids", now_ns, format!("rank {rank} runs call {id} again or late"));
        }
        let content = Digest::of(format!("{:?} {:?} {:?}", call.action, call.meta, call.inputs).as_bytes());
        if *self.ran.entry(id).or_insert(content) != content {
            self.broken("same call", now_ns, format!("rank {rank} runs another call {id} than a peer"));
        }
    }

    /// Folds what happened into a digest, without what would be long.
    fn follow(&mut self, now_ns: u64, what: &Seen<'_>) {
        let text = match what {
            Seen::Sends(f) => format!("{now_ns} {} {} {} {:?}", f.from, f.to, f.origin, f.message.kind()),
            Seen::Run { rank, call } => format!("{now_ns} run {rank} {}", call.call_id),
            Seen::Collectives { rank, call_id, phase } => format!("{now_ns} in {rank} {call_id} {phase}"),
            Seen::Call(r) => format!("{now_ns} call {}", r.call_id),
            Seen::Fence(e) => format!("{now_ns} fence {e}"),
            Seen::Studio { begun_ns, emitted, waiting, .. } => {
                format!("{now_ns} studio {begun_ns} {emitted} {waiting}")
            }
            Seen::Leaves { rank, failure } => {
                format!("{now_ns} leaves {rank} {:?}", failure.map(|f| (f.class, f.rank)))
            }
            Seen::Gone(rank) => format!("{now_ns} gone {rank}"),
        };
        let mut bytes = self.trace.0.to_vec();
        bytes.extend(text.bytes());
        self.trace = Digest::of(&bytes);
    }

    pub(crate) fn finish(mut self, ending: &Ending) -> Outcome {
        let end_ns = ending.gone_ns.unwrap_or(crate::LIMIT_NS);
        if !ending.left.is_empty() {
            // A stopped process is ended by its launcher; without one, whoever stopped it must.
            let stopped =
                |r: &u32| !self.case.launcher && self.case.blows.iter().any(|(_, b)| *b == Blow::Stop(*r));
            let left: Vec<u32> = ending.left.iter().copied().filter(|r| !stopped(r)).collect();
            if !left.is_empty() {
                self.broken("everybody ends", end_ns, format!("ranks {left:?} are left"));
            }
        }
        if ending.left.is_empty() && end_ns > self.last_harm_ns + PATIENCE_NS {
            self.broken(
                "bounded waits",
                end_ns,
                format!("over {} s after the last blow", end_ns / 1_000_000_000),
            );
        }
        let failure = ending.failure.as_ref();
        if self.case.harmless() && (failure.is_some() || !ending.finished) {
            let text = format!("nothing was wrong, and it ended with {failure:?}");
            self.broken("no false kill", end_ns, text);
        }
        if let Some((bound_ns, since_ns)) = self.case.bound()
            && failure.is_some()
            && end_ns > since_ns + bound_ns
        {
            let text = format!("{:.3} s after the blow", (end_ns - since_ns) as f64 / 1e9);
            self.broken("gone in time", end_ns, text);
        }
        if !ending.finished && failure.is_none() && self.mesh_has_leader_alive() {
            self.broken("a named end", end_ns, "it neither finished nor failed".into());
        }
        if let (Some(culprit), Some(f)) = (self.case.culprit(), failure)
            && culprit != 0
            && f.rank != Some(culprit)
        {
            self.broken("the right rank", end_ns, format!("rank {culprit} was struck, and it says {f}"));
        }
        Outcome {
            violations: self.violations,
            trace: self.trace,
            events: self.events,
            finished: ending.finished,
            failure: failure.map(|f| (f.class, f.rank)),
            emitted: self.emitted,
        }
    }

    /// Whether the leader's process lived to name an end.
    fn mesh_has_leader_alive(&self) -> bool {
        let struck = |b: &Blow| matches!(b, Blow::Kill(0) | Blow::Stop(0));
        !self.case.blows.iter().any(|(_, b)| struck(b))
    }
}
