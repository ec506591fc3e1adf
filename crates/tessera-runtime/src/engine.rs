//! What the door implements: the engine that runs phases on a rank, and the studio at the leader's ends.

use std::sync::Arc;

use tessera_base::{Code, Diagnostic};

use crate::cache::{Cache, Transition};
use crate::census::{Census, PhaseKind};
use crate::wire::{CallAction, CallMeta, Observed, PhaseCall, Tensor, Tensors};
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

    fn departed(text: String) -> EngineFault {
        EngineFault { kind: FaultKind::Failed, code: T0747.id.to_string(), text }
    }

    /// The class with which the run ends.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self.kind {
            FaultKind::Stalled => FailureClass::Stall,
            _ if self.code == T0747.id => FailureClass::Drift,
            _ => FailureClass::Engine,
        }
    }
}

/// Runs verified programs on one rank. Lives on one thread and never leaves it.
pub trait Engine {
    /// Runs one phase to its end. `inputs` are the call's tensors; `progress` takes a mark that grows within
    /// the phase, as often as is convenient: a phase longer than the stall limit needs several.
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault>;

    /// Forgets everything cached. Called at a hard cut, before the first phase.
    fn reset(&mut self);

    /// The latents of the chunk whose emit phase ran last: the same bytes on every rank that puts them out, which
    /// are those of the first stage.
    fn output(&mut self) -> Result<Option<Tensor>, EngineFault>;

    /// See [`AbortHandle`].
    fn abort_handle(&self) -> AbortHandle;
}

/// The leader's own work beside the lockstep: prompts in, frames out. Lives on one thread and never leaves it.
pub trait Studio {
    /// The embedding of a prompt, as the tensor `text`.
    fn text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic>;

    /// The tensor `context` of `chunk`, from the output of the chunk before it. Called before that output is
    /// delivered.
    fn context(&mut self, chunk: u32, previous: &Tensor) -> Result<Tensor, Diagnostic>;

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
    /// Payload of a chunk.
    pub meta: Option<CallMeta>,
    /// Every tensor of the call, context included.
    pub inputs: Tensors,
}

/// What running a call gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallReport {
    /// What was seen.
    pub observed: Observed,
    /// The chunk's latents.
    pub output: Option<Tensor>,
}

/// Runs a committed call and holds the engine to it: counts before each generator pass, collectives and trace
/// after each phase, and `cache` follows what ran rather than what was announced.
pub fn run_call(
    engine: &mut dyn Engine,
    call: &ReadyCall,
    census: &Census,
    cache: &mut Cache,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<CallReport, EngineFault> {
    let refused = |d: Diagnostic| EngineFault {
        kind: FaultKind::Failed,
        code: T0747.id.to_string(),
        text: format!("{} ({})", d.message, d.code.id),
    };
    let reset = match (&call.meta, call.action) {
        (Some(meta), _) => meta.reset_kv,
        (None, action) => action == CallAction::Reset,
    };
    if reset {
        engine.reset();
    }
    let phases = call.meta.as_ref().map_or(&[][..], |m| &m.phases);
    let expected = call.meta.as_ref().map_or(0, |m| m.expected_generator_calls);
    if call.meta.is_some() {
        cache.begin_call(reset).map_err(refused)?;
    } else if reset {
        cache.apply(Transition::Reset).map_err(refused)?;
    }
    let (mut generator_calls, mut collectives, mut compensated) = (0, 0, 0);
    let mut trace = Vec::with_capacity(phases.len());
    let mut phase_ns = Vec::with_capacity(phases.len());
    for (i, phase) in phases.iter().enumerate() {
        let name = phase.program.as_str();
        let facts = census.get(name).map_err(refused)?;
        if PhaseKind::of(name).is_some_and(PhaseKind::is_generator) {
            if generator_calls == expected {
                return Err(EngineFault::departed(format!(
                    "phase {i} `{name}` would be generator call {}, the envelope allows {expected}",
                    generator_calls + 1
                )));
            }
            generator_calls += 1;
        }
        cache.run_phase(phase).map_err(refused)?;
        let mark = |inner: u32| progress(((i as u64 + 1) << 32) | u64::from(inner));
        mark(0);
        let report = engine.run(phase, &call.inputs, &mark)?;
        if report.collectives != facts.collectives || report.trace != facts.trace {
            return Err(EngineFault::departed(format!(
                "phase {i} `{name}` issued {} collectives with trace {}, the plan holds {} with trace {}",
                report.collectives, report.trace, facts.collectives, facts.trace
            )));
        }
        collectives += report.collectives;
        compensated += report.compensated;
        trace.push((name, report.trace));
        phase_ns.push(report.ns);
    }
    if generator_calls != expected {
        return Err(EngineFault::departed(format!(
            "the call ended after {generator_calls} generator calls, the envelope requires {expected}"
        )));
    }
    let output = if call.action == CallAction::Infer { engine.output()? } else { None };
    let observed = Observed {
        generator_calls,
        collectives,
        trace: Digest::of_trace(trace),
        state: cache.digest(),
        output: output.as_ref().map_or(Digest::default(), |t| Digest::of(t.data())),
        compensated,
        phase_ns,
    };
    Ok(CallReport { observed, output })
}
