//! Traits that the application crate implements: the engine that runs phases on a rank, and the
//! media pipeline of the leader.

use std::sync::Arc;

use tessera_base::{Code, Diagnostic};

use crate::call_state::CallState;
pub use crate::codes::T0737;
use crate::codes::{T0712, T0745, T0747, T0751, T0754, T0771, T0772, T0773, T0785};
use crate::director::CallPlan;
use crate::program_index::{PhaseKind, ProgramIndex};
use crate::tripwire::Tripwires;
use crate::wire::{
    CallAction, CallMeta, CallObservation, OpClassWork, PhaseCall, PhaseOpTimes, RankMemory, Reload,
    ShardFingerprint, Tensor, Tensors, TokenEvent,
};
use crate::{Digest, FailureClass};

/// A callback that makes the blocked collectives of this rank return. Any thread may call it, at
/// any time and more than once.
pub type AbortHandle = Arc<dyn Fn() + Send + Sync>;

/// The measurements of one executed phase.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PhaseReport {
    /// Measured duration of the phase on this rank, in nanoseconds.
    pub ns: u64,
    /// Number of collectives that this rank issued during the phase.
    pub collectives: u64,
    /// Digest of the phase's collectives, which must equal that of its program in the program
    /// index.
    pub trace: Digest,
    /// Reductions over ranks whose terms cancelled and that were summed with compensation.
    pub compensated: u64,
    /// Bytes of temporaries that the phase wrote; 0 if the engine does not count them.
    pub temporary_bytes: u64,
    /// Work of the phase by class of op; empty if the engine does not time single ops.
    pub classes: Vec<OpClassWork>,
    /// Times of the phase's ops, if the run asks for them and the backend reports single ops.
    pub op_times: Option<PhaseOpTimes>,
}

/// Whether an engine fault originates on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineFaultKind {
    /// The cause is on this rank: its device, a kernel, or a check that failed.
    Failed,
    /// A collective reached its own deadline.
    Stalled,
    /// Another rank aborted the collective. This kind is never the cause of a run's failure.
    Aborted,
}

/// A fault after which an engine cannot continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFault {
    /// Whether the fault originates on this rank.
    pub kind: EngineFaultKind,
    /// Id of the diagnostic code, such as `T0745`; with `kind`, it determines the failure class.
    pub code: String,
    /// What went wrong, as readable text for the failure report.
    pub text: String,
}

impl EngineFault {
    /// Creates a failure of this rank with the engine code T0745.
    #[must_use]
    pub fn local_failure(text: impl Into<String>) -> EngineFault {
        EngineFault { kind: EngineFaultKind::Failed, code: T0745.id.to_string(), text: text.into() }
    }

    /// Creates a secondary fault: another rank's failure aborted this one.
    #[must_use]
    pub fn peer_abort(text: impl Into<String>) -> EngineFault {
        EngineFault { kind: EngineFaultKind::Aborted, code: T0745.id.to_string(), text: text.into() }
    }

    /// Creates the fault of a tripwire on this rank, with the tripwire's code.
    #[must_use]
    pub fn from_tripwire(code: &'static Code, text: impl Into<String>) -> EngineFault {
        EngineFault { kind: EngineFaultKind::Failed, code: code.id.to_string(), text: text.into() }
    }

    /// Returns the class with which the run ends.
    #[must_use]
    pub fn failure_class(&self) -> FailureClass {
        match self.kind {
            EngineFaultKind::Stalled => FailureClass::Stall,
            _ if DRIFT_CODES.iter().any(|c| c.id == self.code) => FailureClass::Drift,
            _ => FailureClass::Engine,
        }
    }
}

/// The codes of engine faults with which a rank departs from the others or from its own past.
const DRIFT_CODES: [&Code; 8] = [&T0712, &T0737, &T0747, &T0751, &T0754, &T0772, &T0773, &T0785];

/// How many programs an engine has loaded, has run in the warm-up, and has first compiled, captured
/// or run afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProgramCount {
    /// Programs that the engine has loaded, for information; the runtime compares only the other
    /// counts.
    pub loaded: u32,
    /// Distinct programs that ran, and were compiled or captured if the backend does so, before
    /// [`Engine::finish_warmup`].
    pub warmed: u32,
    /// Programs compiled, captured or first run after the warm-up.
    pub new_since_warmup: u32,
}

/// The result of a weight reload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReloadedWeights {
    /// Digest of the weights found at the source, computed like [`Reload::weights`].
    pub weights: Digest,
    /// Digests of this rank's shards, and possibly of other ranks' shards as this rank's source
    /// gives them.
    pub fingerprints: Vec<ShardFingerprint>,
}

/// Digests of one weight slice at load and now. After every call an engine hashes a part of its
/// weights again, to find bytes that changed in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RehashResult {
    /// A description of the tensor and its slice.
    pub label: String,
    /// Digest of the bytes when they were loaded.
    pub digest_at_load: Digest,
    /// Digest of the same bytes now; if it differs, the run ends with T0754.
    pub digest_now: Digest,
}

/// A difference between the caches that the last call left and those that the next one finds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CacheFault {
    /// The caches were emptied, and the call continues their scene (T0712).
    Lost(String),
    /// Caches have other contents (T0772).
    Changed(String),
}

impl CacheFault {
    /// Returns the code that the fault raises.
    #[must_use]
    pub fn code(&self) -> &'static Code {
        match self {
            CacheFault::Lost(_) => &T0712,
            CacheFault::Changed(_) => &T0772,
        }
    }
}

/// Executes verified programs on one rank. An engine is created on one thread and never moves to
/// another.
pub trait Engine {
    /// Announces a committed call before its first phase.
    fn begin_call(&mut self, _call: &ReadyCall) {}

    /// Runs one phase to completion. `inputs` are the call's tensors. `progress` takes a counter
    /// that grows within the phase; an engine calls it at its convenience, several times in a phase
    /// that is longer than the stall limit.
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault>;

    /// Lets a drill change a committed call before it runs on this rank. Other engines keep the
    /// default.
    fn tamper_call(&mut self, _call: &mut ReadyCall) {}

    /// Clears all cached state. The runtime calls it at a hard cut, before the first phase.
    fn reset(&mut self);

    /// Returns the outputs of the last call's phases, in order: the chunk's latents, and its pixels
    /// and the next chunk's anchor if the ranks decode. What several phases return under one name is one
    /// tensor, with the rows of each phase behind those of the phase before. Only ranks of the first stage return outputs,
    /// and their bytes are equal.
    fn call_outputs(&mut self) -> Result<Tensors, EngineFault>;

    /// Returns this rank's [`AbortHandle`]. The runtime calls it once, after loading.
    fn abort_handle(&self) -> AbortHandle;

    /// Returns the digests of this rank's weight shards. The runtime calls it once, after loading.
    fn weight_fingerprints(&self) -> Vec<ShardFingerprint> {
        Vec::new()
    }

    /// Returns the memory of this rank, with all its temporaries as unused; the runtime, which calls
    /// it after each call's phases, subtracts the largest phase.
    fn memory_use(&self) -> RankMemory {
        RankMemory::default()
    }

    /// Returns the program counts since loading. The runtime calls it after each call's phases.
    fn program_count(&self) -> ProgramCount;

    /// Ends the warm-up: programs that are compiled, captured or first run from now on count as
    /// new.
    fn finish_warmup(&mut self);

    /// Hashes the next part of the weights again, if a part is due after this call.
    fn rehash_weights(&mut self) -> Option<RehashResult> {
        None
    }

    /// Hashes all weights again at once, and returns a part that changed. There is no default: an
    /// engine around another one that forgot it would hide every change.
    fn audit_weights(&mut self) -> Option<RehashResult>;

    /// Compares the caches with those that the last call left, and with the scene that `call` continues.
    /// The runtime calls it before a call clears or computes anything. There is no default, as for
    /// [`Engine::audit_weights`].
    fn audit_caches(&mut self, call: &ReadyCall) -> Vec<CacheFault>;

    /// Remembers the caches as `call`, which ends now, leaves them for the next one.
    fn remember_caches(&mut self, _call: &ReadyCall) {}

    /// Replaces the weights with those at `source`. The runtime calls it between calls, on every
    /// rank. A reload cannot be undone.
    fn reload_weights(&mut self, source: &str) -> Result<ReloadedWeights, EngineFault> {
        Err(EngineFault::local_failure(format!("this engine cannot reload weights from `{source}`")))
    }

    /// Returns the CPU time of the calling thread in nanoseconds, or 0 if it is unknown. The
    /// runtime measures the cost of digests with it.
    fn cpu_ns(&self) -> u64 {
        0
    }
}

/// What the media pipeline made of the outputs of a call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Delivery {
    /// Frames of a chunk of a video, or ids that were generated.
    pub frames: u32,
    /// The ids that a call of tokens generated.
    pub ids: Vec<TokenEvent>,
}

impl Delivery {
    /// Creates the delivery of a chunk of a video.
    #[must_use]
    pub fn from_frames(frames: u32) -> Delivery {
        Delivery { frames, ids: Vec::new() }
    }
}

/// The text encoder and the VAE decoder of the leader, which run beside the lockstep: prompts in,
/// frames out. A media pipeline is created on one thread and never moves to another.
pub trait MediaPipeline {
    /// Encodes a prompt into the tensor `text`.
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, Diagnostic>;

    /// Encodes the tensor `context` of `chunk` from the output of the previous chunk. `opens_scene`
    /// tells whether that chunk is the first of its scene. The runtime calls it before that output
    /// is delivered, unless `chunk` is requested after the delivery.
    fn encode_context(
        &mut self,
        chunk: u32,
        previous: &Tensors,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic>;

    /// Writes a chunk, which it decodes unless its call has, and returns its number of frames.
    /// `opens_scene` states whether the chunk is the first of its scene. The runtime calls it once per
    /// chunk, in order.
    fn deliver_chunk(
        &mut self,
        chunk: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Delivery, Diagnostic>;

    /// Closes the output after the last chunk.
    fn finish_output(&mut self) -> Result<(), Diagnostic>;
}

/// A job of the leader's media pipeline, which runs one job at a time, in order of arrival.
#[derive(Debug, Clone, PartialEq)]
pub enum MediaJob {
    /// Encodes a request's new prompt into its text embedding.
    EncodePrompt(String),
    /// Makes the context of a chunk from the chunk before it.
    Context {
        /// Index of the chunk whose call waits for the context.
        chunk: u32,
        /// Outputs of the last finished chunk's call, from which the context is made.
        previous: Tensors,
        /// Whether the previous chunk is the first of its scene.
        opens_scene: bool,
    },
    /// Decodes and writes a chunk, unless its epoch is below the minimum by then.
    Deliver {
        /// Index of the chunk to decode and write.
        chunk: u32,
        /// Cache epoch of the chunk, which the pipeline compares with the minimum epoch.
        epoch: u32,
        /// What the chunk's call returned: its latents, and its pixels if the ranks decode.
        outputs: Tensors,
        /// Whether the chunk is the first of its scene.
        opens_scene: bool,
    },
}

/// A committed call as the engine's thread receives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadyCall {
    /// Id from the call's envelope; ids count the calls of all actions, from 1.
    pub call_id: u64,
    /// What the call does; the action determines whether `meta` or `reload` is present.
    pub action: CallAction,
    /// Index of the chunk that an `INFER` call generates; for other actions, of the next chunk.
    pub chunk: u32,
    /// Epoch of the KV caches in which the call runs; a hard cut, reset or reload begins another.
    pub cache_epoch: u32,
    /// Payload of an `INFER` or `WARMUP` call; `None` for any other action.
    pub meta: Option<CallMeta>,
    /// Source and digest of the weights to load; `None` unless the action is `RELOAD`.
    pub reload: Option<Reload>,
    /// Every tensor of the call, context included.
    pub inputs: Tensors,
}

impl ReadyCall {
    /// Creates the call of a plan for ranks that get no envelope.
    #[must_use]
    pub fn from_plan(call_id: u64, plan: &CallPlan, inputs: Tensors) -> ReadyCall {
        ReadyCall {
            call_id,
            action: plan.action,
            chunk: plan.chunk,
            cache_epoch: plan.cache_epoch,
            meta: plan.meta.clone(),
            reload: None,
            inputs,
        }
    }
}

/// The result of a finished call on one rank, which the worker sends to the leader.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CallReport {
    /// Counters, durations and digests, which the leader compares with the plan and across ranks.
    pub observed: CallObservation,
    /// The outputs of the call's phases, in order; empty if this rank returns none.
    pub outputs: Tensors,
    /// Shard digests of the weights that a reload loaded.
    pub fingerprints: Vec<ShardFingerprint>,
}

/// Runs a committed call and checks the engine against it: the number of forwards before each
/// generator phase, and collectives and trace after each phase. `state` follows the executed phases
/// rather than the announced ones.
pub fn run_call(
    engine: &mut dyn Engine,
    call: &ReadyCall,
    programs: &ProgramIndex,
    state: &mut CallState,
    tripwires: &Tripwires,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<CallReport, EngineFault> {
    let mut run = CallRun { call, state, tripwires, progress, generator_calls: 0 };
    let mut observed = CallObservation::default();
    let mut report = CallReport::default();
    engine.begin_call(call);
    let begun = engine.cpu_ns();
    run.check_caches(&engine.audit_caches(call))?;
    observed.digest_ns = engine.cpu_ns().saturating_sub(begun);
    run.begin_call(engine)?;
    if let Some(reload) = &call.reload {
        let loaded = engine.reload_weights(&reload.source)?;
        run.trip_unless(loaded.weights == reload.weights, &T0737, || {
            let (source, found, announced) = (&reload.source, loaded.weights, reload.weights);
            format!("`{source}` holds weights {found}, the leader announced {announced}")
        })?;
        observed.weights = loaded.weights;
        report.fingerprints = loaded.fingerprints;
    }
    let phases = call.meta.as_ref().map_or(&[][..], |m| &m.phases);
    let mut trace = Vec::with_capacity(phases.len());
    for (i, phase) in phases.iter().enumerate() {
        let phase_report = run.run_phase(engine, i, phase, programs)?;
        observed.collectives += phase_report.collectives;
        observed.compensated += phase_report.compensated;
        observed.phase_ns.push(phase_report.ns);
        observed.phase_bytes.push(phase_report.temporary_bytes);
        observed.phase_classes.push(phase_report.classes);
        observed.phase_op_times.extend(phase_report.op_times);
        trace.push((phase.program.as_str(), phase_report.trace));
    }
    run.check_call_end()?;
    observed.generator_calls = run.generator_calls;
    observed.trace = Digest::hash_trace(trace);
    observed.memory = engine.memory_use();
    let largest_phase = observed.phase_bytes.iter().max().copied().unwrap_or(0);
    observed.memory.unused_bytes = observed.memory.unused_bytes.saturating_sub(largest_phase);
    if call.action == CallAction::Warmup {
        observed.new_programs = engine.program_count().warmed;
        engine.finish_warmup();
        engine.reset();
    } else {
        observed.new_programs = engine.program_count().new_since_warmup;
    }
    if call.action == CallAction::Infer {
        report.outputs = engine.call_outputs()?;
    }
    let begun = engine.cpu_ns();
    observed.state = run.state.state_digest();
    if let Err(not_finite) = run.check_finite(&report.outputs) {
        run.audit_weights(engine)?;
        return Err(not_finite);
    }
    observed.output = report.outputs.digest();
    if call.action == CallAction::Infer
        && let Some(part) = engine.rehash_weights()
    {
        run.check_part(&part)?;
        observed.weights = part.digest_now;
    }
    engine.remember_caches(call);
    observed.digest_ns += engine.cpu_ns().saturating_sub(begun);
    report.observed = observed;
    Ok(report)
}

struct CallRun<'a> {
    call: &'a ReadyCall,
    state: &'a mut CallState,
    tripwires: &'a Tripwires,
    progress: &'a (dyn Fn(u64) + Sync),
    generator_calls: u32,
}

impl CallRun<'_> {
    /// Fails the call unless the condition holds or the tripwire is disabled.
    fn trip_unless(
        &self,
        holds: bool,
        code: &'static Code,
        text: impl FnOnce() -> String,
    ) -> Result<(), EngineFault> {
        if holds || !self.tripwires.is_armed(code) {
            return Ok(());
        }
        Err(EngineFault::from_tripwire(code, text()))
    }

    fn check_state(&self, result: Result<(), Diagnostic>) -> Result<(), EngineFault> {
        let Err(d) = result else { return Ok(()) };
        self.trip_unless(false, &T0747, || format!("{} ({})", d.message, d.code.id))
    }

    fn check_caches(&self, faults: &[CacheFault]) -> Result<(), EngineFault> {
        faults.iter().try_for_each(|fault| {
            let (CacheFault::Lost(text) | CacheFault::Changed(text)) = fault;
            self.trip_unless(false, fault.code(), || text.clone())
        })
    }

    fn expected_generator_calls(&self) -> u32 {
        self.call.meta.as_ref().map_or(0, |m| m.expected_generator_calls)
    }

    fn begin_call(&mut self, engine: &mut dyn Engine) -> Result<(), EngineFault> {
        match (self.call.action, &self.call.meta) {
            (CallAction::Infer, Some(meta)) => {
                if meta.resets_caches() {
                    engine.reset();
                }
                let begun = self.state.begin_call(&meta.work);
                self.check_state(begun)
            }
            (CallAction::Reset | CallAction::Reload, _) => {
                engine.reset();
                let reset = self.state.reset();
                self.check_state(reset)
            }
            _ => Ok(()),
        }
    }

    fn run_phase(
        &mut self,
        engine: &mut dyn Engine,
        i: usize,
        phase: &PhaseCall,
        programs: &ProgramIndex,
    ) -> Result<PhaseReport, EngineFault> {
        let name = phase.program.as_str();
        let facts = programs
            .get(name)
            .map_err(|d| EngineFault::from_tripwire(&T0747, format!("{} ({})", d.message, d.code.id)))?;
        if PhaseKind::from_program(name).is_some_and(PhaseKind::is_generator) {
            let (call, allowed) = (self.generator_calls + 1, self.expected_generator_calls());
            self.trip_unless(call <= allowed, &T0747, || {
                format!("phase {i} `{name}` would be generator call {call}, the envelope allows {allowed}")
            })?;
            self.generator_calls = call;
        }
        if self.call.action == CallAction::Infer {
            let applied = self.state.apply_phase(phase);
            self.check_state(applied)?;
        }
        let mark = |inner: u32| (self.progress)(((i as u64 + 1) << 32) | u64::from(inner));
        mark(0);
        let report = engine.run(phase, &self.call.inputs, &mark)?;
        let as_planned = report.collectives == facts.collectives && report.trace == facts.trace;
        self.trip_unless(as_planned, &T0747, || {
            format!(
                "phase {i} `{name}` issued {} collectives with trace {}, the plan holds {} with trace {}",
                report.collectives, report.trace, facts.collectives, facts.trace
            )
        })?;
        Ok(report)
    }

    /// Fails the call if any element of its outputs is NaN or infinite.
    fn check_finite(&self, outputs: &Tensors) -> Result<(), EngineFault> {
        outputs.0.iter().try_for_each(|output| self.check_output_finite(output))
    }

    fn check_output_finite(&self, output: &Tensor) -> Result<(), EngineFault> {
        let Some((count, first)) = output.find_nonfinite() else { return Ok(()) };
        self.trip_unless(false, &T0771, || {
            let (name, values) = (output.name(), output.to_f32().unwrap_or_default());
            let (id, chunk, all, value) = (self.call.call_id, self.call.chunk, values.len(), values[first]);
            format!(
                "call {id}, chunk {chunk}: {count} of {all} {name} are not finite, the first is element {first} with {value}; \
                 the output ends before chunk {chunk}"
            )
        })
    }

    fn check_part(&self, part: &RehashResult) -> Result<(), EngineFault> {
        self.trip_unless(part.digest_now == part.digest_at_load, &T0754, || {
            let RehashResult { label, digest_at_load, digest_now } = part;
            format!("{label} changed after loading: digest {digest_at_load} then, {digest_now} now")
        })
    }

    /// Hashes all weights again, because a changed weight is the likeliest cause of values that are not
    /// finite, and a collective spreads these to ranks whose weights are intact.
    fn audit_weights(&self, engine: &mut dyn Engine) -> Result<(), EngineFault> {
        engine.audit_weights().map_or(Ok(()), |part| self.check_part(&part))
    }

    fn check_call_end(&self) -> Result<(), EngineFault> {
        let (ran, expected) = (self.generator_calls, self.expected_generator_calls());
        self.trip_unless(ran == expected, &T0747, || {
            format!("the call ended after {ran} generator calls, the envelope requires {expected}")
        })
    }
}
