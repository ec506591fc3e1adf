//! The ranks of a sealed plan as threads of this process, with the engines and checks of a run of processes.
//!
//! Messages, heartbeats, per-call deadlines and the record are absent, because only processes need them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_mesh::Rank;
use tessera_runtime::Tripwires;
use tessera_runtime::driver::{EngineEvent, EngineFactory, EngineThread};
use tessera_runtime::engine::{AbortHandle, CallReport, ReadyCall};
use tessera_runtime::parity::{ParityClass, ParityDifference, compare_tables};
use tessera_runtime::wire::{CallMeta, PhaseOpTimes, Tensors};

use crate::codes::{T0017, T0087};
use crate::communicators;
use crate::rank::{RankContext, RankPlan};

/// Maximum wait for the next event of a rank. It only ends the wait for a hung rank; no slow
/// machine reaches it.
const EVENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// Longest wait for the ranks of a call that is aborted. A rank on a GPU may be compiling kernels.
const ABORT_TIMEOUT: Duration = Duration::from_secs(60);

/// The engine threads. Dropping this value ends them, even during a call.
pub(crate) struct InProcessRanks {
    threads: Vec<(Rank, EngineThread)>,
    aborts: Vec<AbortHandle>,
    events: Receiver<(u32, EngineEvent)>,
    output_groups: Vec<Vec<u32>>,
    /// The ranks that have not ended the current call.
    running: BTreeSet<u32>,
    /// Times of the ops of the last call on each rank, phase by phase; empty unless the ranks time single ops.
    op_times: BTreeMap<u32, Vec<PhaseOpTimes>>,
    /// Whether no rank runs a call.
    idle: bool,
}

impl InProcessRanks {
    /// Loads the programs and weights of every rank, with `threads` threads each.
    ///
    /// # Errors
    /// T0017 if a resource of this host is missing, or T0087 with the error of a rank.
    pub(crate) fn start<P: RankPlan>(
        context: &RankContext<P>,
        place: &P::WeightsPlace,
        threads: usize,
    ) -> Result<InProcessRanks, Diagnostic> {
        // Ranks on GPUs exchange data on the GPUs.
        let specs = match context.runs_on_gpus() {
            true => Vec::new(),
            false => communicators::communicator_specs(context.plan.sealed()),
        };
        let arenas = communicators::create_arenas(&specs)?;
        let share = |fd: &OwnedFd| {
            fd.try_clone().map_err(|e| Diagnostic::error(&T0017, format!("shared memory: {e}")))
        };
        let (sender, events) = channel();
        let mut ranks = InProcessRanks {
            threads: Vec::new(),
            aborts: Vec::new(),
            events,
            output_groups: context.plan.output_groups(),
            running: BTreeSet::new(),
            op_times: BTreeMap::new(),
            idle: false,
        };
        let load = |ranks: &mut InProcessRanks| {
            for rank in context.plan.computing_ranks() {
                let own_arenas = communicators::indices_of_rank(&specs, rank)
                    .map(|i| share(&arenas[i]))
                    .collect::<Result<Vec<_>, _>>()?;
                let factory = context.engine_factory(rank, place.clone(), threads, own_arenas);
                ranks.spawn(context, (rank, factory), sender.clone())?;
            }
            ranks.wait_for_loads(context)
        };
        // Loaded ranks may wait for one that does not come.
        load(&mut ranks).inspect_err(|_| context.abort_loads())?;
        ranks.idle = true;
        Ok(ranks)
    }

    fn spawn<P: RankPlan>(
        &mut self,
        context: &RankContext<P>,
        (rank, factory): (Rank, EngineFactory),
        sender: Sender<(u32, EngineEvent)>,
    ) -> Result<(), Diagnostic> {
        let forward = move |event| {
            let _ = sender.send((rank.0, event));
        };
        let thread = EngineThread::spawn(
            rank.0,
            factory,
            Arc::clone(&context.program_index),
            context.session_spec.state_spec(),
            Tripwires::default(),
            forward,
        )
        .map_err(|e| Diagnostic::error(&T0017, format!("the thread of rank {rank}: {e}")))?;
        self.threads.push((rank, thread));
        Ok(())
    }

    /// Waits until every rank is loaded or has failed to load, and compares the parity tables of the ranks.
    fn wait_for_loads<P: RankPlan>(&mut self, context: &RankContext<P>) -> Result<(), Diagnostic> {
        let (mut tables, mut failure) = (BTreeMap::new(), None);
        for _ in 0..self.threads.len() {
            let failed = match self.next_event()? {
                (rank, EngineEvent::Loaded { abort, parity, .. }) => {
                    self.aborts.push(abort);
                    tables.insert(rank.0, parity);
                    continue;
                }
                (rank, EngineEvent::NotLoaded(f)) => rank_error(rank, f.text).with_note(f.code),
                (rank, EngineEvent::CallEnded(_)) => rank_error(rank, "it ended a call that was not started"),
            };
            // The others may wait for this rank.
            context.abort_loads();
            failure.get_or_insert(failed);
        }
        let is_refused = |d: &ParityDifference| d.class != ParityClass::BestEffort;
        let difference = compare_tables(&tables, None).into_iter().find(is_refused);
        let refused = difference.map(|d| {
            let rank = Rank(d.outliers.first().copied().unwrap_or_default());
            rank_error(rank, format!("it differs from the other ranks in {d}")).with_note(d.code.id)
        });
        let Some(failure) = failure.or(refused) else { return Ok(()) };
        // The ranks that are loaded free their memory before the caller learns of the failure.
        self.join_threads();
        Err(failure)
    }

    /// Starts a call on every rank.
    ///
    /// # Errors
    /// T0087 if a rank has ended.
    pub(crate) fn begin_call(&mut self, call: &ReadyCall) -> Result<(), Diagnostic> {
        self.idle = false;
        for (rank, thread) in &self.threads {
            if !thread.start_call(Box::new(call.clone())) {
                return Err(rank_error(*rank, "its thread does not accept calls"));
            }
            self.running.insert(rank.0);
        }
        Ok(())
    }

    /// Makes every rank end its call, and waits until all have. Returns whether all have in time.
    pub(crate) fn abort_call(&mut self) -> bool {
        self.aborts.iter().for_each(|abort| abort());
        let deadline = Instant::now() + ABORT_TIMEOUT;
        while !self.running.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((rank, _)) = self.events.recv_timeout(left) else { return false };
            self.running.remove(&rank);
        }
        true
    }

    /// Ends the threads of ranks that have all ended their call, and waits until they have dropped their engines.
    pub(crate) fn join_threads(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        threads.into_iter().for_each(|(_, thread)| thread.join());
    }

    /// Waits for every rank, checks each report against the call and against the other reports, and
    /// returns the outputs of all groups.
    ///
    /// # Errors
    /// T0087 with the failure of a rank, or with its departure from the plan or from another rank.
    pub(crate) fn finish_call(&mut self, meta: &CallMeta) -> Result<Tensors, Diagnostic> {
        let mut reports: BTreeMap<u32, CallReport> = BTreeMap::new();
        while reports.len() < self.threads.len() {
            let (rank, event) = self.next_event()?;
            let EngineEvent::CallEnded(outcome) = event else {
                return Err(rank_error(rank, "it loaded twice"));
            };
            self.running.remove(&rank.0);
            reports.insert(rank.0, outcome.map_err(|f| rank_error(rank, f.text).with_note(f.code))?);
        }
        self.idle = true;
        for (rank, report) in &reports {
            let seen = &report.observed;
            if (seen.state, seen.trace) != (meta.predicted_state, meta.expected_trace_digest) {
                let what = "its trace or its call state differs from the plan";
                let planned = format!("state {}, trace {}", meta.predicted_state, meta.expected_trace_digest);
                return Err(rank_error(Rank(*rank), what)
                    .with_label("planned", planned)
                    .with_label("observed", format!("state {}, trace {}", seen.state, seen.trace)));
            }
        }
        let times = |report: &mut CallReport| std::mem::take(&mut report.observed.phase_op_times);
        self.op_times = reports.iter_mut().map(|(rank, report)| (*rank, times(report))).collect();
        let mut outputs = Tensors::default();
        for group in &self.output_groups {
            let mut members = group.iter().filter_map(|rank| Some((*rank, reports.remove(rank)?)));
            let Some((first, report)) = members.next() else { continue };
            for (rank, other) in members {
                let (here, there) = (report.observed.output, other.observed.output);
                if here != there {
                    return Err(rank_error(Rank(rank), "its outputs differ from another rank's")
                        .with_label(format!("rank {first}"), here.to_string())
                        .with_label(format!("rank {rank}"), there.to_string()));
                }
            }
            outputs.0.extend(report.outputs.0);
        }
        Ok(outputs)
    }

    /// Takes the times of the ops of the last call on each rank, phase by phase.
    pub(crate) fn take_op_times(&mut self) -> BTreeMap<u32, Vec<PhaseOpTimes>> {
        std::mem::take(&mut self.op_times)
    }

    /// Returns the handles that end the running call of each rank.
    pub(crate) fn abort_handles(&self) -> Vec<AbortHandle> {
        self.aborts.clone()
    }

    /// Ends the threads and waits until they have dropped their engines.
    pub(crate) fn close(mut self) {
        // A thread in a call may wait for a rank that is gone.
        if self.idle {
            self.join_threads();
        }
    }

    fn next_event(&self) -> Result<(Rank, EngineEvent), Diagnostic> {
        let event = self.events.recv_timeout(EVENT_TIMEOUT);
        event
            .map(|(rank, event)| (Rank(rank), event))
            .map_err(|_| Diagnostic::error(&T0087, format!("no rank answered for {EVENT_TIMEOUT:?}")))
    }
}

impl Drop for InProcessRanks {
    fn drop(&mut self) {
        if !self.idle {
            for abort in &self.aborts {
                abort();
            }
        }
    }
}

/// Returns the code of the check that ended a rank, which the note of its diagnostic names.
pub(crate) fn cause_of(d: &Diagnostic) -> Option<&str> {
    d.notes.first().map(String::as_str).filter(|_| d.code == &T0087)
}

fn rank_error(rank: Rank, text: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0087, format!("rank {rank}: {}", text.into()))
}
