//! What the door implements: the engine that runs phases on a rank, and the studio at the leader's ends.

use std::sync::Arc;

use tessera_base::{Code, Diagnostic};

use crate::cache::{Cache, Transition};
use crate::census::{Census, PhaseKind};
use crate::drift::T0754;
use crate::tripwire::{T0751, Tripwires};
use crate::wire::{CallAction, CallMeta, Observed, PhaseCall, Reload, ShardPrint, Tensor, Tensors};
use crate::{Digest, FailureClass};

/// A call that departs from its envelope.
pub(crate) static T0747: Code = Code {
    id: "T0747",
    title: "a rank departed from the call that it agreed to",
    page: "While a call runs, each rank counts its own generator passes and compares every phase's collectives and \
trace with the sealed plan. This rank was about to run one pass too many, ended with one too few, or issued \
collectives that the plan does not hold. It stopped at the phase boundary, before its peers could wait for a \
collective that never comes.\n\nThe phase named here is the first departure. The cause is in that rank's engine, not in \
the message exchange: compare its build and backend with those of the other ranks.",
};
/// The engine failed.
pub(crate) static T0745: Code = Code {
    id: "T0745",
    title: "an engine failed while loading or running a phase",
    page: "The device, a kernel or a collective of this rank returned an error. The text is the engine's own. The \
run ended on every rank, because a rank that leaves a call cannot rejoin it.\n\nOut of memory, a missing library and a lost \
device are the usual reasons; the text says which. A failure that only echoes another rank's is never shown as the \
cause.",
};
/// Other weights than were announced.
pub static T0737: Code = Code {
    id: "T0737",
    title: "other weights were loaded than the leader announced",
    page: "Weights change in a running session only by RELOAD: every rank finishes what it has, then all load the same \
weights between the same two calls and begin a new cache epoch. The envelope names the digest of the new weights. What this \
rank found at the source has another digest, or it was about to load outside such a call.\n\nThe ranks would go on \
with different weights, so the run ended before a call could use them. Compare the source on that rank's host with the \
others: a copy that is still under way, or a path that means another file there.",
};
/// A program that the warm-up should have run.
pub(crate) static T0752: Code = Code {
    id: "T0752",
    title: "a program was compiled, captured or run for the first time after the warm-up",
    page: "The warm-up runs every program of the plan once on every rank, so that nothing is compiled, captured or \
tuned while a stream runs: work that one rank does inside a call stalls the others and can choose another kernel than \
they have. This rank counted a new program in a later call.\n\nA program that is missing in the plan, a shape that \
depends on data, or a cache of compiled code that was evicted are the usual reasons.",
};
/// A rank that warmed up differently.
pub(crate) static T0753: Code = Code {
    id: "T0753",
    title: "a rank did not warm up as the others did",
    page: "The warm-up is one call that names every program of the plan. Each rank answers with the number of programs \
that it compiled, captured or ran in it, and all must have run all. This one ran fewer or more.\n\nIt skipped a \
program that it already had, or holds another set: compare its build, its backend and its cache of compiled code with \
those of the other ranks.",
};

/// Makes blocked collectives of this rank return. May be called from any thread, at any time, more than once.
pub type AbortHandle = Arc<dyn Fn() + Send + Sync>;

/// What one phase did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseReport {
    /// Duration in nanoseconds.
    pub ns: u64,
    /// Collectives issued.
    pub collectives: u64,
    /// Digest of the collective trace.
    pub trace: Digest,
    /// Sums over ranks whose terms cancelled and were added with compensation.
    pub compensated: u64,
}

/// Why an engine cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// This rank failed by itself.
    Failed,
    /// A collective ran into its own deadline.
    Stalled,
    /// A collective was aborted by somebody else: never the cause.
    Aborted,
}

/// An engine that cannot go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFault {
    /// Whose fault.
    pub kind: FaultKind,
    /// Id of a code.
    pub code: String,
    /// What happened.
    pub text: String,
}

impl EngineFault {
    /// A failure of this rank, with the code for engines.
    #[must_use]
    pub fn failed(text: impl Into<String>) -> EngineFault {
        EngineFault { kind: FaultKind::Failed, code: T0745.id.to_string(), text: text.into() }
    }

    /// The echo of another rank's failure.
    #[must_use]
    pub fn aborted(text: impl Into<String>) -> EngineFault {
        EngineFault { kind: FaultKind::Aborted, code: T0745.id.to_string(), text: text.into() }
    }

    /// A tripwire of this rank, with its code.
    #[must_use]
    pub fn tripped(code: &'static Code, text: impl Into<String>) -> EngineFault {
        EngineFault { kind: FaultKind::Failed, code: code.id.to_string(), text: text.into() }
    }

    /// The class with which the run ends.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self.kind {
            FaultKind::Stalled => FailureClass::Stall,
            _ if [&T0737, &T0747, &T0751, &T0754].iter().any(|c| c.id == self.code) => FailureClass::Drift,
            _ => FailureClass::Engine,
        }
    }
}

/// Programs of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProgramCount {
    /// Programs that it holds.
    pub loaded: u32,
    /// Different programs that ran, and were compiled or captured where they are, before [`Engine::warmed`].
    pub warmed: u32,
    /// Programs compiled, captured or first run since.
    pub new_since_warmup: u32,
}

/// What a reload found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reloaded {
    /// Digest of the weights as a whole.
    pub weights: Digest,
    /// What this rank holds of them, shard by shard.
    pub fingerprints: Vec<ShardPrint>,
}

/// A part of the weights that was hashed again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rehash {
    /// The tensor and its slice, in words.
    pub what: String,
    /// Digest of the bytes when they were loaded.
    pub loaded: Digest,
    /// Digest of the bytes now.
    pub now: Digest,
}

/// Runs verified programs on one rank. Lives on one thread and never leaves it.
pub trait Engine {
    /// A committed call begins: told before its first phase.
    fn begin(&mut self, _call: &ReadyCall) {}

    /// Runs one phase to its end. `inputs` are the call's tensors; `progress` takes a mark that grows within
    /// the phase, as often as is convenient: a phase longer than the stall limit needs several.
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault>;

    /// Lets a drill change a committed call before it runs on this rank; nothing else does.
    fn tampers(&mut self, _call: &mut ReadyCall) {}

    /// Forgets everything cached. Called at a hard cut, before the first phase.
    fn reset(&mut self);

    /// The latents of the chunk whose emit phase ran last: the same bytes on every rank that puts them out, which
    /// are those of the first stage.
    fn output(&mut self) -> Result<Option<Tensor>, EngineFault>;

    /// See [`AbortHandle`].
    fn abort_handle(&self) -> AbortHandle;

    /// What it holds of the weights, shard by shard. Asked once, after loading.
    fn fingerprints(&self) -> Vec<ShardPrint> {
        Vec::new()
    }

    /// Its programs so far.
    fn programs(&self) -> ProgramCount;

    /// The warm-up is over: what is compiled, captured or run for the first time from now on is new.
    fn warmed(&mut self);

    /// Hashes the next part of the weights again, if one is due after this call.
    fn rehash(&mut self) -> Option<Rehash> {
        None
    }

    /// Replaces the weights by those at `source`. Called between calls, on every rank alike, never to be undone.
    fn reload(&mut self, source: &str) -> Result<Reloaded, EngineFault> {
        Err(EngineFault::failed(format!("this engine cannot reload weights from `{source}`")))
    }

    /// CPU time of the calling thread in nanoseconds, to tell what digests cost; 0 if it is not known.
    fn cpu_ns(&self) -> u64 {
        0
    }
}

/// The leader's own work beside the lockstep: prompts in, frames out. Lives on one thread and never leaves it.
pub trait Studio {
    /// The embedding of a prompt, as the tensor `text`.
    fn text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic>;

    /// The tensor `context` of `chunk`, from the output of the chunk before it, which may have been its scene's
    /// first. Called before that output is delivered, unless `chunk` is asked for later than that.
    fn context(&mut self, chunk: u32, previous: &Tensor, opens_scene: bool) -> Result<Tensor, Diagnostic>;

    /// Decodes and writes a chunk; returns how many frames it became. Called once per chunk, in order.
    fn deliver(&mut self, chunk: u32, latents: &Tensor) -> Result<u32, Diagnostic>;

    /// Closes the output after the last chunk.
    fn finish(&mut self) -> Result<(), Diagnostic>;
}

/// A committed call, as the engine's thread receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyCall {
    /// Its id.
    pub call_id: u64,
    /// What it is for.
    pub action: CallAction,
    /// Chunk that it makes.
    pub chunk: u32,
    /// Epoch of the caches that it runs in.
    pub cache_epoch: u32,
    /// Payload of a chunk or of the warm-up.
    pub meta: Option<CallMeta>,
    /// Payload of a reload.
    pub reload: Option<Reload>,
    /// Every tensor of the call, context included.
    pub inputs: Tensors,
}

/// What running a call gave.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallReport {
    /// What was seen.
    pub observed: Observed,
    /// The chunk's latents.
    pub output: Option<Tensor>,
    /// What a reload loaded.
    pub fingerprints: Vec<ShardPrint>,
}

/// Runs a committed call and holds the engine to it: counts before each generator pass, collectives and trace
/// after each phase, and `cache` follows what ran rather than what was announced.
pub fn run_call(
    engine: &mut dyn Engine,
    call: &ReadyCall,
    census: &Census,
    cache: &mut Cache,
    tripwires: &Tripwires,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<CallReport, EngineFault> {
    let mut run = Run { call, cache, tripwires, progress, generator_calls: 0 };
    let mut observed = Observed::default();
    let mut report = CallReport::default();
    engine.begin(call);
    run.begin(engine)?;
    if let Some(reload) = &call.reload {
        let loaded = engine.reload(&reload.source)?;
        run.announced(reload, loaded.weights)?;
        observed.weights = loaded.weights;
        report.fingerprints = loaded.fingerprints;
    }
    let phases = call.meta.as_ref().map_or(&[][..], |m| &m.phases);
    let mut trace = Vec::with_capacity(phases.len());
    for (i, phase) in phases.iter().enumerate() {
        let seen = run.phase(engine, i, phase, census)?;
        observed.collectives += seen.collectives;
        observed.compensated += seen.compensated;
        observed.phase_ns.push(seen.ns);
        trace.push((phase.program.as_str(), seen.trace));
    }
    run.end()?;
    observed.generator_calls = run.generator_calls;
    observed.trace = Digest::of_trace(trace);
    if call.action == CallAction::Warmup {
        observed.new_programs = engine.programs().warmed;
        engine.warmed();
        engine.reset();
    } else {
        observed.new_programs = engine.programs().new_since_warmup;
    }
    if call.action == CallAction::Infer {
        report.output = engine.output()?;
    }
    let begun = engine.cpu_ns();
    observed.state = run.cache.digest();
    observed.output = report.output.as_ref().map_or(Digest::default(), |t| Digest::of(t.data()));
    if call.action == CallAction::Infer
        && let Some(part) = engine.rehash()
    {
        run.unchanged(&part)?;
        observed.weights = part.now;
    }
    observed.digest_ns = engine.cpu_ns().saturating_sub(begun);
    report.observed = observed;
    Ok(report)
}

/// A call under way.
struct Run<'a> {
    call: &'a ReadyCall,
    cache: &'a mut Cache,
    tripwires: &'a Tripwires,
    progress: &'a (dyn Fn(u64) + Sync),
    generator_calls: u32,
}

impl Run<'_> {
    /// Ends the call unless the tripwire is off.
    fn trip(&self, code: &'static Code, text: impl FnOnce() -> String) -> Result<(), EngineFault> {
        if self.tripwires.armed(code) { Err(EngineFault::tripped(code, text())) } else { Ok(()) }
    }

    fn cached(&self, done: Result<(), Diagnostic>) -> Result<(), EngineFault> {
        match done {
            Ok(()) => Ok(()),
            Err(d) => self.trip(&T0747, || format!("{} ({})", d.message, d.code.id)),
        }
    }

    fn expected(&self) -> u32 {
        self.call.meta.as_ref().map_or(0, |m| m.expected_generator_calls)
    }

    fn begin(&mut self, engine: &mut dyn Engine) -> Result<(), EngineFault> {
        match (self.call.action, &self.call.meta) {
            (CallAction::Infer, Some(meta)) => {
                if meta.reset_kv {
                    engine.reset();
                }
                let begun = self.cache.begin_call(meta.reset_kv);
                self.cached(begun)
            }
            (CallAction::Reset | CallAction::Reload, _) => {
                engine.reset();
                let reset = self.cache.apply(Transition::Reset);
                self.cached(reset)
            }
            _ => Ok(()),
        }
    }

    fn phase(
        &mut self,
        engine: &mut dyn Engine,
        i: usize,
        phase: &PhaseCall,
        census: &Census,
    ) -> Result<PhaseReport, EngineFault> {
        let name = phase.program.as_str();
        let facts = census
            .get(name)
            .map_err(|d| EngineFault::tripped(&T0747, format!("{} ({})", d.message, d.code.id)))?;
        if PhaseKind::of(name).is_some_and(PhaseKind::is_generator) {
            if self.generator_calls >= self.expected() {
                self.trip(&T0747, || {
                    format!(
                        "phase {i} `{name}` would be generator call {}, the envelope allows {}",
                        self.generator_calls + 1,
                        self.expected()
                    )
                })?;
            }
            self.generator_calls += 1;
        }
        if self.call.action == CallAction::Infer {
            let moved = self.cache.run_phase(phase);
            self.cached(moved)?;
        }
        let mark = |inner: u32| (self.progress)(((i as u64 + 1) << 32) | u64::from(inner));
        mark(0);
        let seen = engine.run(phase, &self.call.inputs, &mark)?;
        if seen.collectives != facts.collectives || seen.trace != facts.trace {
            self.trip(&T0747, || {
                format!(
                    "phase {i} `{name}` issued {} collectives with trace {}, the plan holds {} with trace {}",
                    seen.collectives, seen.trace, facts.collectives, facts.trace
                )
            })?;
        }
        Ok(seen)
    }

    fn end(&self) -> Result<(), EngineFault> {
        let (ran, expected) = (self.generator_calls, self.expected());
        if ran == expected {
            return Ok(());
        }
        self.trip(&T0747, || {
            format!("the call ended after {ran} generator calls, the envelope requires {expected}")
        })
    }

    fn announced(&self, reload: &Reload, found: Digest) -> Result<(), EngineFault> {
        if found == reload.weights {
            return Ok(());
        }
        self.trip(&T0737, || {
            format!("`{}` holds weights {found}, announced were {}", reload.source, reload.weights)
        })
    }

    fn unchanged(&self, part: &Rehash) -> Result<(), EngineFault> {
        if part.now == part.loaded {
            return Ok(());
        }
        self.trip(&T0754, || {
            format!("{} changed since it was loaded: {} then, {} now", part.what, part.loaded, part.now)
        })
    }
}
