//! The ranks of a language model as threads of this process.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::engine::{AbortHandle, Engine, ReadyCall};
use tessera_runtime::wire::{CallAction, PhaseCall, Tensors};

use super::LanguagePlan;
use super::language_weights::LanguageWeights;
use crate::codes::{T0017, T0087};
use crate::communicators::{self, EndpointSources, JoinOrder};
use crate::engine::MeshEngine;
use crate::rank::build_cpu_backend;

/// Longest wait inside one collective. A rank that fails aborts the others, so it only ends the wait for a rank
/// that hangs.
const COLLECTIVE_PATIENCE: Duration = Duration::from_secs(600);

/// A call of one program, on every rank.
#[derive(Debug, Clone)]
pub(super) struct TokenCall {
    /// Number of the call, from 1.
    pub(super) id: u64,
    /// The program, and the scalars of the call.
    pub(super) phase: PhaseCall,
    /// The tensors of the call.
    pub(super) inputs: Tensors,
}

/// What a rank reports.
enum RankEvent {
    Loaded(Result<AbortHandle, Diagnostics>),
    Ended(Result<Tensors, Diagnostic>),
}

/// The ranks. Dropping this value ends them, even during a call.
pub(super) struct TokenRanks {
    calls: Vec<Sender<TokenCall>>,
    threads: Vec<JoinHandle<()>>,
    aborts: Vec<AbortHandle>,
    events: Receiver<(Rank, RankEvent)>,
    /// Whether no rank runs a call.
    is_idle: bool,
}

impl std::fmt::Debug for TokenRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenRanks({})", self.threads.len())
    }
}

impl TokenRanks {
    /// Loads the programs and weights of every rank, with `threads` threads each.
    ///
    /// # Errors
    /// The first error of a rank.
    pub(super) fn start(
        plan: &Arc<LanguagePlan>,
        dir: &Path,
        threads: usize,
    ) -> Result<TokenRanks, Diagnostics> {
        let specs = communicators::communicator_specs(&plan.sealed);
        let arenas = communicators::create_arenas(&specs).map_err(|d| vec![d])?;
        let (sender, events) = channel();
        let mut ranks =
            TokenRanks { calls: Vec::new(), threads: Vec::new(), aborts: Vec::new(), events, is_idle: false };
        for rank in plan.sealed.mesh().iter() {
            let own = communicators::indices_of_rank(&specs, rank)
                .map(|i| arenas[i].try_clone())
                .collect::<Result<Vec<OwnedFd>, _>>()
                .map_err(|e| vec![Diagnostic::error(&T0017, format!("shared memory: {e}"))])?;
            let (calls, received) = channel();
            let seat =
                RankSeat { plan: Arc::clone(plan), dir: dir.to_path_buf(), rank, threads, arenas: own };
            let sender = sender.clone();
            let report = move |event| {
                // The receiver is gone only if the run has ended.
                let _ = sender.send((rank, event));
            };
            let thread = std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn(move || seat.run(&received, &report))
                .map_err(|e| vec![Diagnostic::error(&T0017, format!("the thread of rank {rank}: {e}"))])?;
            ranks.threads.push(thread);
            ranks.calls.push(calls);
        }
        while ranks.aborts.len() < ranks.threads.len() {
            match ranks.next_event().map_err(|d| vec![d])? {
                (_, RankEvent::Loaded(Ok(abort))) => ranks.aborts.push(abort),
                (_, RankEvent::Loaded(Err(ds))) => return Err(ds),
                (rank, RankEvent::Ended(_)) => {
                    return Err(vec![rank_error(&T0087, rank, "ended a call that was not started")]);
                }
            }
        }
        ranks.is_idle = true;
        Ok(ranks)
    }

    /// Runs a call on every rank, and returns the outputs, which are equal on all ranks that have some.
    ///
    /// # Errors
    /// The failure of a rank, or T0087 if ranks differ.
    pub(super) fn run(&mut self, call: &TokenCall) -> Result<Tensors, Diagnostic> {
        self.is_idle = false;
        for (rank, calls) in self.calls.iter().enumerate() {
            if calls.send(call.clone()).is_err() {
                return Err(rank_error(&T0087, Rank(rank as u32), "has ended"));
            }
        }
        let mut outputs: BTreeMap<Rank, Tensors> = BTreeMap::new();
        for _ in 0..self.threads.len() {
            match self.next_event()? {
                (rank, RankEvent::Ended(result)) => outputs.insert(rank, result?),
                (rank, RankEvent::Loaded(_)) => return Err(rank_error(&T0087, rank, "loaded twice")),
            };
        }
        self.is_idle = true;
        outputs.retain(|_, o| !o.0.is_empty());
        let Some((first, expected)) = outputs.pop_first() else {
            return Err(Diagnostic::error(&T0087, format!("call {}: no rank has an output", call.id)));
        };
        match outputs.iter().find(|(_, o)| **o != expected) {
            None => Ok(expected),
            Some((rank, other)) => Err(Diagnostic::error(
                &T0087,
                format!(
                    "call {}, @{}: ranks {first} and {rank} have other outputs",
                    call.id, call.phase.program
                ),
            )
            .with_label(format!("rank {first}"), expected.digest().to_string())
            .with_label(format!("rank {rank}"), other.digest().to_string())),
        }
    }

    fn next_event(&self) -> Result<(Rank, RankEvent), Diagnostic> {
        self.events
            .recv_timeout(2 * COLLECTIVE_PATIENCE)
            .map_err(|_| Diagnostic::error(&T0087, "no rank answered"))
    }
}

impl Drop for TokenRanks {
    fn drop(&mut self) {
        if !self.is_idle {
            self.aborts.iter().for_each(|abort| abort());
        }
        self.calls.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has been reported as a missing answer.
            let _ = thread.join();
        }
    }
}

fn rank_error(code: &'static Code, rank: Rank, what: &str) -> Diagnostic {
    Diagnostic::error(code, format!("rank {rank} {what}"))
}

/// What a rank's thread begins with.
struct RankSeat {
    plan: Arc<LanguagePlan>,
    dir: PathBuf,
    rank: Rank,
    threads: usize,
    arenas: Vec<OwnedFd>,
}

impl RankSeat {
    fn run(self, calls: &Receiver<TokenCall>, report: &dyn Fn(RankEvent)) {
        let rank = self.rank;
        let mut engine = match self.load() {
            Ok(engine) => engine,
            Err(ds) => return report(RankEvent::Loaded(Err(ds))),
        };
        report(RankEvent::Loaded(Ok(engine.abort_handle())));
        while let Ok(call) = calls.recv() {
            let result = run_call(&mut engine, rank, &call);
            let has_failed = result.is_err();
            report(RankEvent::Ended(result));
            if has_failed {
                return;
            }
        }
    }

    fn load(self) -> Result<MeshEngine, Diagnostics> {
        let RankSeat { plan, dir, rank, threads, arenas } = self;
        let joined = (EndpointSources::Arenas(arenas), JoinOrder::OfPlan);
        let cpu = build_cpu_backend(&plan.sealed, rank, threads, joined, COLLECTIVE_PATIENCE)
            .map_err(|d| vec![d])?;
        let mut weights = LanguageWeights::open(&dir, &plan.model, &plan.sealed)?;
        MeshEngine::load(&plan.sealed, rank, Box::new(cpu), &mut weights).map_err(|d| vec![d])
    }
}

fn run_call(engine: &mut MeshEngine, rank: Rank, call: &TokenCall) -> Result<Tensors, Diagnostic> {
    engine.begin_call(&ReadyCall {
        call_id: call.id,
        action: CallAction::Infer,
        chunk: 0,
        cache_epoch: 0,
        meta: None,
        reload: None,
        inputs: Tensors::default(),
    });
    let ran = engine.run(&call.phase, &call.inputs, &|_| {}).and_then(|_| engine.call_outputs());
    ran.map_err(|fault| {
        Diagnostic::error(
            &T0087,
            format!("rank {rank}, call {}, @{}: {}", call.id, call.phase.program, fault.text),
        )
        .with_note(fault.code)
    })
}
