//! The engine of one rank: runs the sealed programs on a backend and checks every collective
//! against the sealed trace.

mod device_arrays;
mod engine_backend;
mod injections;
mod phase_tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Code, Diagnostic};
use tessera_cuda::GpuCallArrays;
use tessera_device::{
    AbortFn, Backend, CallData, Fault, MeshRank, ProgramHandle, Scalar, T0803, WeightSource, describe_slice,
};
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, EngineFaultKind, PhaseReport, ProgramCount, ReadyCall,
    RehashResult, ReloadedWeights, T0737,
};
use tessera_runtime::parity::KERNEL_KEY;
use tessera_runtime::program_index::{ArgKind, InputSpec, PhaseKind, ProgramIndex, ProgramInfo};
use tessera_runtime::tripwire::{T0751, T0773, T0785};
use tessera_runtime::wire::{
    CallAction, Dtype, PhaseCall, RankMemory, ScalarArg, ShardFingerprint, Tensor, Tensors,
};
use tessera_runtime::{Digest, Failure, FailureClass, T0770, T0771};
use tessera_verify::SealedPlan;

pub use engine_backend::EngineBackend;
pub(crate) use phase_tensors::call_tensor_name;
use phase_tensors::{PhaseInput, PhaseOutput, add_output, collect_sources};

use crate::cache_audit::CacheAudit;
use crate::clock::monotonic_ns;
use crate::collective_guard::{ArmedGuards, CallPosition, CollectiveGuard, CollectiveSequence};
use crate::flight::FlightRecord;
use crate::kernel_probe::shorten_digest;
use crate::op_clock::OpTimes;
use crate::plan::is_leader_phase;
use crate::rgb::{PIXELS, PixelConverter};
use crate::shards::{WeightFingerprints, WeightOpener, thread_cpu_ns, to_shard_fingerprint};
use crate::step_clock::{RunBegin, op_times_from_steps};
use crate::synthetic_delays::ForwardDelay;
use crate::transfer_log::TransferLog;

/// Iterates over the phases that the ranks of the mesh run in calls.
pub(crate) fn mesh_phases(plan: &SealedPlan) -> impl Iterator<Item = &str> {
    plan.phase_names().iter().map(String::as_str).filter(|p| !is_leader_phase(plan, p))
}

/// Builds the program index of a sealed plan for the call envelope: for each phase, the facts of
/// all mesh ranks combined. A rank compares its own collective sequence with its own part of the
/// seal and then reports the combined facts, so that ranks of different roles can be compared.
#[must_use]
pub fn build_program_index(plan: &SealedPlan) -> ProgramIndex {
    let ranks: Vec<Rank> = plan.mesh().inner_ranks().collect();
    ProgramIndex::new(mesh_phases(plan).map(|phase| {
        let mut hash = blake3::Hasher::new();
        let mut facts = ProgramInfo::default();
        let mut scalars: BTreeMap<String, ArgKind> = BTreeMap::new();
        let mut inputs: BTreeMap<String, InputSpec> = BTreeMap::new();
        for rank in &ranks {
            if let Some(c) = plan.collective_digest(phase, *rank) {
                facts.collectives += c.collectives;
                hash.update(&c.trace_digest);
            }
            if let Some(p) = plan.rank_program(phase, *rank) {
                collect_sources(phase, p, &mut scalars, &mut inputs);
            }
        }
        facts.trace = Digest(*hash.finalize().as_bytes());
        facts.scalars = scalars.into_iter().collect();
        facts.inputs = inputs.into_values().collect();
        (phase.to_string(), facts)
    }))
}

struct LoadedPhase {
    loaded: ProgramHandle,
    /// Collectives that the phase may issue.
    sequence: CollectiveSequence,
    scalars: BTreeSet<String>,
    inputs: Vec<PhaseInput>,
    trace: [u8; 32],
    mesh_facts: ProgramInfo,
    outputs: Vec<PhaseOutput>,
    /// Names of the buffers that the program writes.
    written_buffers: BTreeSet<String>,
    op_times: OpTimes,
    program: Arc<Program>,
}

/// The checks that an engine makes, and not the worker that drives it.
pub(crate) const ENGINE_CHECKS: [&Code; 5] = [&T0737, &T0751, &T0770, &T0773, &T0785];

/// Runs the programs of a sealed plan for one rank.
pub struct MeshEngine {
    backend: EngineBackend,
    phases: BTreeMap<String, LoadedPhase>,
    pixels: PixelConverter,
    /// Outputs of the phases that the current call has run, in order.
    outputs: Vec<Tensor>,
    flight_record: Option<Arc<FlightRecord>>,
    times_single_ops: bool,
    delay: Option<ForwardDelay>,
    /// Inputs and outputs of calls in GPU memory; `None` if all are tensors of the calls.
    call_arrays: Option<Arc<GpuCallArrays>>,
    /// Where the transfers of experts are reported; `None` for a plan without any.
    transfer_log: Option<TransferLog>,
    /// Whether the engine rejects a collective or a capture outside the plan before it is launched, and
    /// a halo with wrong rows before it is read.
    guards: ArmedGuards,
    /// Whether every element of the loaded weights was found to be finite.
    weights_are_checked: bool,
    position: CallPosition,
    program_count: ProgramCount,
    /// Names of the programs that have run.
    executed: BTreeSet<String>,
    warmed_up: bool,
    /// Whether the current call is the warm-up.
    in_warmup: bool,
    /// Number of objects that the backend had compiled, captured or allocated when the warm-up ended.
    made_at_warmup: u64,
    weight_fingerprints: WeightFingerprints,
    /// What the caches held after the last call.
    caches: CacheAudit,
    /// Time spent in phases since the last rehash of weights, in nanoseconds.
    phases_ns: u64,
    /// CPU time of this thread when the output was returned, in nanoseconds; digests are computed
    /// afterwards.
    output_at_ns: u64,
}

impl MeshEngine {
    /// Loads every program of the rank and fingerprints its weights.
    ///
    /// # Errors
    /// Returns the error of the backend or of the weight source, or T0770 if a weight is not finite.
    pub fn load(
        plan: &SealedPlan,
        rank: Rank,
        backend: impl Into<EngineBackend>,
        weights: &mut dyn WeightSource,
    ) -> Result<MeshEngine, Diagnostic> {
        let mut engine = MeshEngine::load_modified(plan, rank, backend.into(), weights, &|_| true)?;
        engine.check_weights_finite()?;
        Ok(engine)
    }

    /// Checks that every element of the loaded weights is finite.
    ///
    /// # Errors
    /// Returns T0770.
    pub(crate) fn check_weights_finite(&mut self) -> Result<(), Diagnostic> {
        self.weights_are_checked = true;
        self.weight_fingerprints.check_finite()
    }

    /// Runs the GEMMs of the loaded programs that have kernels of their own, and returns parity keys
    /// with digests of their results.
    ///
    /// # Errors
    /// Returns the error of the backend.
    pub(crate) fn probe_gemms(&mut self) -> Result<Vec<(String, String)>, Diagnostic> {
        let probed = self.backend.probe_gemms()?.into_iter();
        Ok(probed.map(|(gemm, digest)| (format!("{KERNEL_KEY} {gemm}"), shorten_digest(digest))).collect())
    }

    /// Returns the checks of [`ENGINE_CHECKS`] that this engine does not make.
    pub(crate) fn unarmed_checks(&self) -> Vec<&'static Code> {
        let makes = |code: &Code| match code {
            c if *c == T0737 => self.weight_fingerprints.is_reload_guard_armed(),
            c if *c == T0751 => self.guards.collectives,
            c if *c == T0770 => self.weights_are_checked,
            c if *c == T0773 => self.guards.halos,
            _ => self.guards.captures,
        };
        ENGINE_CHECKS.into_iter().filter(|code| !makes(code)).collect()
    }

    /// Like [`MeshEngine::load`], but lets `modify` change this rank's copy of each program (for
    /// drills) and loads a program only if `modify` returns `true`. It leaves it to the caller to
    /// check that weights are finite. The engine still checks a modified program against the sealed
    /// one.
    ///
    /// # Errors
    /// Returns the error of the backend or of the weight source.
    pub(crate) fn load_modified(
        plan: &SealedPlan,
        rank: Rank,
        mut backend: EngineBackend,
        weights: &mut dyn WeightSource,
        modify: &dyn Fn(&mut Program) -> bool,
    ) -> Result<MeshEngine, Diagnostic> {
        let whole = build_program_index(plan);
        let mut phases = BTreeMap::new();
        let mut buffers = BTreeMap::new();
        let seat = MeshRank { mesh: *plan.mesh(), rank };
        for name in mesh_phases(plan) {
            let (Some(program), Some(slots), Some(own)) = (
                plan.rank_program(name, rank),
                plan.rank_slots(name, rank),
                plan.collective_digest(name, rank),
            ) else {
                continue;
            };
            let mut program: Program = (**program).clone();
            if !modify(&mut program) {
                continue;
            }
            let program = Arc::new(program);
            let loaded = backend.load(&program, slots, weights)?;
            for b in &program.buffers {
                buffers.entry(b.name.clone()).or_insert_with(|| describe_slice(&b.ty, None, &seat));
            }
            let sealed = plan.rank_program(name, rank).map_or(&*program, |p| p);
            let sequence = CollectiveSequence::new(name, plan.mesh(), rank, sealed, &program);
            let written = program.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
            let written = written.filter_map(|o| program.buffers.get(o.buffer?.0 as usize));
            let phase = LoadedPhase {
                loaded,
                sequence,
                scalars: named_ops(&program, Opcode::Call),
                inputs: PhaseInput::list(name, &program, &seat),
                trace: own.trace_digest,
                mesh_facts: whole.get(name)?.clone(),
                outputs: PhaseOutput::list(name, &program),
                written_buffers: written.map(|b| b.name.clone()).collect(),
                op_times: OpTimes::new(&program),
                program: Arc::clone(&program),
            };
            phases.insert(name.to_string(), phase);
        }
        let mut shards = WeightFingerprints::new(plan, rank);
        shards.fingerprint_loaded(&*backend, weights)?;
        let loaded = u32::try_from(phases.len()).unwrap_or(u32::MAX);
        let count = ProgramCount { loaded, ..ProgramCount::default() };
        Ok(MeshEngine {
            backend,
            pixels: open_converter(&phases)?,
            caches: CacheAudit::new(buffers, list_rebuilt_buffers(&phases)),
            phases,
            outputs: Vec::new(),
            program_count: count,
            executed: BTreeSet::new(),
            warmed_up: false,
            in_warmup: false,
            made_at_warmup: 0,
            weight_fingerprints: shards,
            phases_ns: 0,
            output_at_ns: 0,
            flight_record: None,
            times_single_ops: false,
            delay: None,
            call_arrays: None,
            transfer_log: None,
            guards: ArmedGuards { collectives: true, captures: true, halos: true },
            weights_are_checked: false,
            position: CallPosition::default(),
        })
    }

    /// Makes the engine write its phases and collectives to a flight record.
    pub(crate) fn set_flight_record(&mut self, flight: Option<Arc<FlightRecord>>) {
        self.flight_record = flight;
    }

    /// Makes the engine report the times of single ops.
    pub(crate) fn time_single_ops(&mut self, wanted: bool) {
        self.times_single_ops = wanted;
        self.backend.time_steps(wanted);
    }

    /// Makes generator forwards last at least a synthetic time.
    pub(crate) fn set_delay(&mut self, delay: Option<ForwardDelay>) {
        self.delay = delay;
    }

    /// Makes phases read the inputs that are in GPU memory there, and leave their outputs there.
    pub(crate) fn set_call_arrays(&mut self, arrays: Option<Arc<GpuCallArrays>>) {
        self.call_arrays = arrays;
    }

    /// Counts a program that has run for the first time.
    fn note_executed(&mut self, program: &str) {
        if !self.executed.contains(program) {
            self.executed.insert(program.to_string());
            let count = match self.warmed_up {
                true => &mut self.program_count.new_since_warmup,
                false => &mut self.program_count.warmed,
            };
            *count += 1;
        }
    }

    /// Makes the engine report the transfers of experts.
    pub(crate) fn set_transfer_log(&mut self, log: Option<TransferLog>) {
        self.transfer_log = log;
    }

    /// Arms or disarms the rejection of collectives (T0751) and of captured graphs (T0785) that the
    /// plan does not contain, and of wrong halos (T0773). The default is armed.
    pub(crate) fn arm_guards(&mut self, guards: ArmedGuards) {
        self.guards = guards;
    }

    /// Returns the backend, which states what it has loaded, joined and chosen.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Enables weight reloads: the engine opens new weights with `open`.
    #[must_use]
    pub fn with_weight_opener(mut self, open: WeightOpener) -> MeshEngine {
        self.weight_fingerprints.set_opener(open);
        self
    }

    /// Arms or disarms the rejection of weight reloads outside a RELOAD call. The default is armed.
    pub fn arm_reload_guard(&mut self, armed: bool) {
        self.weight_fingerprints.arm_reload_guard(armed);
    }

    /// Returns a digest of each buffer, by name and slice. Every buffer is read, so the flight
    /// record takes these digests only every few chunks, at the same chunks on all ranks. Equal
    /// slices have equal digests on all ranks; a shard of a cache is compared with the same shard
    /// of a replay.
    #[must_use]
    pub fn cache_fingerprints(&self) -> Vec<ShardFingerprint> {
        let fingerprints = self
            .caches
            .slices()
            .iter()
            .filter_map(|(name, slice)| self.backend.fingerprint_buffer(name, slice));
        fingerprints.map(to_shard_fingerprint).collect()
    }

    /// Returns the bytes of weights, buffers and temporaries.
    #[must_use]
    pub fn memory_bytes(&self) -> [u64; 3] {
        self.backend.memory_bytes()
    }
}

/// Returns the buffers that every call writes before it reads them: those of the recompute phase, which is the
/// first of each call but the first of a scene.
fn list_rebuilt_buffers(phases: &BTreeMap<String, LoadedPhase>) -> BTreeSet<String> {
    let recompute =
        phases.iter().filter(|(name, _)| PhaseKind::from_program(name) == Some(PhaseKind::Recompute));
    recompute.flat_map(|(_, phase)| phase.written_buffers.iter().cloned()).collect()
}

/// Opens a converter with threads if a phase outputs pixels.
fn open_converter(phases: &BTreeMap<String, LoadedPhase>) -> Result<PixelConverter, Diagnostic> {
    let mut outputs = phases.values().flat_map(|p| &p.outputs);
    match outputs.any(|output| output.tensor.starts_with(PIXELS)) {
        true => PixelConverter::new(),
        false => Ok(PixelConverter::single_thread()),
    }
}

/// Converts pixels to bytes. Fails if one is NaN or infinite, because no later check can see that in bytes.
fn pixel_bytes(pixels: &PixelConverter, name: &str, values: &[f32]) -> Result<Vec<u8>, EngineFault> {
    pixels.to_finite_rgb(values).map_err(|count| {
        let text = format!("{count} of {} {name} are not finite", values.len());
        EngineFault::from_tripwire(&T0771, text)
    })
}

/// Gives ranks that wait for this one the cause with the abort, because their report may reach the leader before this rank's.
fn tell_waiting_peers(backend: &EngineBackend, fault: &Fault) {
    if let Fault::Aborted(text) = fault {
        backend.abort_fn()(text);
    }
}

/// Converts a fault of the backend; `refusal` is the code of a rejected collective.
fn to_engine_fault(fault: Fault, refusal: &'static Code) -> EngineFault {
    match fault {
        Fault::Refused(text) => EngineFault::from_tripwire(refusal, text),
        Fault::Failed(text) => EngineFault::local_failure(text),
        Fault::Stalled(text) => {
            EngineFault { kind: EngineFaultKind::Stalled, ..EngineFault::local_failure(text) }
        }
        Fault::Aborted(text) => EngineFault::peer_abort(text),
        Fault::Poisoned(text) => EngineFault::from_tripwire(&T0803, text),
    }
}

/// Checks that a rank issued the collectives of the sealed plan, in their order.
fn check_trace(program: &str, issued: [u8; 32], sealed: [u8; 32]) -> Result<(), EngineFault> {
    if issued == sealed {
        return Ok(());
    }
    Err(EngineFault::local_failure(format!(
        "@{program} issued collectives with trace {}, but the sealed plan expects {} for this rank",
        Digest(issued),
        Digest(sealed)
    )))
}

/// Returns the names of a program's ops of one kind.
fn named_ops(p: &Program, opcode: Opcode) -> BTreeSet<String> {
    p.ops.iter().filter(|o| o.opcode == opcode).filter_map(|o| o.name.clone()).collect()
}

fn to_scalar(arg: &ScalarArg) -> Scalar {
    match arg {
        ScalarArg::I64(i) => Scalar::I64(*i),
        ScalarArg::F32(x) => Scalar::F32(x.get()),
        ScalarArg::F32s(xs) => Scalar::F32s(xs.iter().map(|x| x.get()).collect()),
    }
}

impl Engine for MeshEngine {
    fn begin_call(&mut self, call: &ReadyCall) {
        self.weight_fingerprints.begin_call(call.action);
        self.in_warmup = call.action == CallAction::Warmup;
        self.transfer_log.iter_mut().for_each(|log| log.begin_call(call.action));
        self.outputs.clear();
        self.position = CallPosition::from_call(call);
    }

    fn run(
        &mut self,
        call: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let Some(phase) = self.phases.get_mut(&call.program) else {
            return Err(EngineFault::local_failure(format!("this rank has no program @{}", call.program)));
        };
        let mut data = CallData::default();
        // Each stage reads its own scalars, so those of the other stages are skipped.
        for (name, arg) in call.args.iter().filter(|(n, _)| phase.scalars.contains(n)) {
            data.scalars.insert(name, to_scalar(arg));
        }
        let is_warmup = self.in_warmup;
        let arrays = self.call_arrays.as_ref();
        let on_host = |input: &&PhaseInput| !arrays.is_some_and(|arrays| arrays.has_input(&input.name));
        let tensors = phase.inputs.iter().filter(on_host);
        let tensors = tensors.map(|input| Ok((&input.name, input.read(inputs, is_warmup)?)));
        let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
        for (name, values) in &tensors {
            data.inputs.insert(name, values);
        }
        let mut guard = CollectiveGuard::begin_phase(
            &mut phase.sequence,
            &mut self.position,
            self.guards,
            self.flight_record.as_ref(),
            progress,
        );
        let (start, begin) = (Instant::now(), RunBegin::now());
        let before = self.backend.compensated_sums();
        let mut clock = phase.op_times.observe(&mut guard, self.times_single_ops);
        let run = self.backend.run(phase.loaded, &data, &mut clock);
        let end_ns = monotonic_ns();
        let classes = phase.op_times.add_up(end_ns);
        let op_times = match self.backend.take_step_times() {
            Some(steps) => Some(op_times_from_steps(&phase.program, &steps, begin)),
            None => phase.op_times.single_ops(end_ns),
        };
        run.inspect_err(|fault| tell_waiting_peers(&self.backend, fault))
            .map_err(|fault| to_engine_fault(fault, guard.refusal_code()))?;
        self.caches.note_written(&phase.written_buffers);
        // A report that nobody takes would grow with every run.
        let experts = self.backend.take_expert_report();
        if let Some(log) = &mut self.transfer_log {
            let appended = log.append(&call.program, experts);
            appended.map_err(|d| EngineFault::local_failure(d.message))?;
        }
        let issued_trace = guard.end_phase().map_err(|text| EngineFault::from_tripwire(&T0751, text))?;
        check_trace(&call.program, issued_trace, phase.trace)?;
        let outputs = if self.call_arrays.is_some() { &[][..] } else { &phase.outputs[..] };
        for PhaseOutput { name, tensor, shape } in outputs {
            let values = self.backend.output(name).unwrap_or_default();
            let output = match tensor.starts_with(PIXELS) {
                true => Tensor::new(tensor, Dtype::U8, shape, pixel_bytes(&self.pixels, tensor, values)?),
                false => Tensor::from_f32(tensor, shape, values),
            };
            let added = output.and_then(|output| add_output(&mut self.outputs, output));
            added.map_err(|d| EngineFault::local_failure(d.message))?;
        }
        let elapsed_ns = || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.phases_ns = self.phases_ns.saturating_add(elapsed_ns());
        if let Some(delay) = &self.delay {
            delay.wait_out(&call.program, start, progress);
        }
        let report = PhaseReport {
            ns: elapsed_ns(),
            collectives: phase.mesh_facts.collectives,
            trace: phase.mesh_facts.trace,
            compensated: self.backend.compensated_sums() - before,
            temporary_bytes: self.backend.memory_use().run_temporary_bytes,
            classes,
            op_times,
        };
        self.note_executed(&call.program);
        self.summarize_device_outputs(&call.program).map(|()| report)
    }

    fn reset(&mut self) {
        self.backend.reset_buffers();
        self.caches.note_reset(&*self.backend, self.position.epoch());
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        self.output_at_ns = thread_cpu_ns();
        Ok(Tensors(std::mem::take(&mut self.outputs)))
    }

    fn memory_use(&self) -> RankMemory {
        let used = self.backend.memory_use();
        RankMemory {
            allocated_bytes: used.allocated_bytes,
            workspace_bytes: used.workspace_bytes,
            peak_bytes: used.peak_bytes,
            unused_bytes: used.temporary_bytes,
            slot_reuses: used.slot_reuses,
        }
    }

    fn program_count(&self) -> ProgramCount {
        let made_since_warmup =
            if self.warmed_up { self.backend.setup_count().saturating_sub(self.made_at_warmup) } else { 0 };
        let new = u64::from(self.program_count.new_since_warmup) + made_since_warmup;
        ProgramCount { new_since_warmup: u32::try_from(new).unwrap_or(u32::MAX), ..self.program_count }
    }

    fn finish_warmup(&mut self) {
        self.warmed_up = true;
        self.made_at_warmup = self.backend.setup_count();
    }

    fn weight_fingerprints(&self) -> Vec<ShardFingerprint> {
        self.weight_fingerprints.as_slice().to_vec()
    }

    fn rehash_weights(&mut self) -> Option<RehashResult> {
        let digest_ns = thread_cpu_ns().saturating_sub(self.output_at_ns);
        self.weight_fingerprints.rehash(&mut *self.backend, std::mem::take(&mut self.phases_ns), digest_ns)
    }

    fn audit_weights(&mut self) -> Option<RehashResult> {
        self.weight_fingerprints.audit(&mut *self.backend)
    }

    fn audit_caches(&mut self, call: &ReadyCall) -> Vec<CacheFault> {
        self.caches.find_faults(&mut *self.backend, call)
    }

    fn remember_caches(&mut self, call: &ReadyCall) {
        self.caches.end_call(&mut *self.backend, call);
    }

    fn reload_weights(&mut self, source: &str) -> Result<ReloadedWeights, EngineFault> {
        let reloaded = self.weight_fingerprints.reload(&mut *self.backend, source).map_err(|d| {
            let Failure { code, text, .. } = Failure::from_diagnostic(FailureClass::Engine, None, &d);
            EngineFault { kind: EngineFaultKind::Failed, code, text }
        })?;
        self.caches.note_reset(&*self.backend, self.position.epoch());
        Ok(reloaded)
    }

    fn cpu_ns(&self) -> u64 {
        thread_cpu_ns()
    }

    fn abort_handle(&self) -> AbortHandle {
        let (abort, delay): (AbortFn, _) = (self.backend.abort_fn(), self.delay.clone());
        Arc::new(move || {
            delay.iter().for_each(ForwardDelay::abort);
            abort("the run ended");
        })
    }
}
