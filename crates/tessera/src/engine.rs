//! A rank's engine: sealed programs on a backend, held to the sealed trace.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{Abort, Backend, CallData, Fault, Loaded, Scalar, Seat, WeightSource, slice_words};
use tessera_ir::{DType, Opcode, Program};
use tessera_mesh::Rank;
use tessera_runtime::census::{ArgKind, Census, InputFacts, ProgramFacts};
use tessera_runtime::engine::{
    AbortHandle, Engine, EngineFault, FaultKind, PhaseReport, ProgramCount, ReadyCall, Rehash, Reloaded,
};
use tessera_runtime::tripwire::T0751;
use tessera_runtime::wire::{Arg, Dtype, PhaseCall, ShardPrint, Tensor, Tensors};
use tessera_runtime::{Digest, Failure, FailureClass};
use tessera_verify::SealedPlan;

use crate::flight::FlightRecord;
use crate::guard::{At, Guard, Sequence};
use crate::shards::{OpenWeights, Shards, print, thread_ns};

/// Phases that the leader runs beside the lockstep.
pub(crate) const LEADER_PHASES: [&str; 2] = ["decode", "encode"];

/// Phases that ranks of the mesh run in calls.
pub(crate) fn mesh_phases(plan: &SealedPlan) -> impl Iterator<Item = &str> {
    plan.phases().iter().map(String::as_str).filter(|p| !LEADER_PHASES.contains(p))
}

/// What a sealed plan's programs add up to over all ranks of the mesh, for the envelope. A rank compares its own sequence
/// with its own part of the seal and then answers with these, so that ranks of different roles can be compared.
#[must_use]
pub fn census(plan: &SealedPlan) -> Census {
    let ranks: Vec<Rank> = plan.mesh().iter().filter(|r| plan.mesh().contains(*r)).collect();
    Census::new(plan.phases().iter().filter(|p| !LEADER_PHASES.contains(&p.as_str())).map(|phase| {
        let mut hash = blake3::Hasher::new();
        let mut facts = ProgramFacts::default();
        let mut scalars: BTreeMap<String, ArgKind> = BTreeMap::new();
        let mut inputs: BTreeMap<String, InputFacts> = BTreeMap::new();
        for rank in &ranks {
            if let Some(c) = plan.census(phase, *rank) {
                facts.collectives += c.collectives;
                hash.update(&c.trace_digest);
            }
            if let Some(p) = plan.program(phase, *rank) {
                collect_sources(p, &mut scalars, &mut inputs);
            }
        }
        facts.trace = Digest(*hash.finalize().as_bytes());
        facts.scalars = scalars.into_iter().collect();
        facts.inputs = inputs.into_values().collect();
        (phase.clone(), facts)
    }))
}

fn collect_sources(
    p: &Program,
    scalars: &mut BTreeMap<String, ArgKind>,
    inputs: &mut BTreeMap<String, InputFacts>,
) {
    for op in &p.ops {
        let (Some(name), Some(v)) = (op.name.clone(), op.results.first()) else { continue };
        let ty = p.ty(*v);
        match op.opcode {
            Opcode::Call => {
                let kind = match (ty.dtype, &ty.shape[..]) {
                    (DType::I64, _) => ArgKind::I64,
                    (_, []) => ArgKind::F32,
                    (_, shape) => ArgKind::F32s(shape.iter().product::<u64>() as u32),
                };
                scalars.insert(name, kind);
            }
            Opcode::Input => {
                inputs.insert(name.clone(), InputFacts { name, dtype: Dtype::F32, shape: ty.shape.clone() });
            }
            _ => {}
        }
    }
}

struct Phase {
    loaded: Loaded,
    /// Collectives that it may issue.
    sequence: Sequence,
    scalars: BTreeSet<String>,
    inputs: BTreeSet<String>,
    trace: [u8; 32],
    whole: ProgramFacts,
    /// Shape of the latents, if this program puts them out.
    latents: Option<Vec<u64>>,
}

/// An engine's backend.
pub enum Held {
    /// It goes with the engine.
    Owned(Box<dyn Backend>),
    /// It stays until the process ends, and the system takes back what it held: for one that would wait for its device or for
    /// other ranks as it goes.
    Kept(&'static mut dyn Backend),
}

impl<B: Backend + 'static> From<Box<B>> for Held {
    fn from(backend: Box<B>) -> Held {
        Held::Owned(backend)
    }
}

impl Deref for Held {
    type Target = dyn Backend;

    fn deref(&self) -> &Self::Target {
        match self {
            Held::Owned(backend) => &**backend,
            Held::Kept(backend) => &**backend,
        }
    }
}

impl DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Held::Owned(backend) => &mut **backend,
            Held::Kept(backend) => &mut **backend,
        }
    }
}

/// Runs a sealed plan's programs for one rank.
pub struct MeshEngine {
    backend: Held,
    phases: BTreeMap<String, Phase>,
    /// Shape of the chunk's latents where this rank puts them out.
    latents: Option<Vec<u64>>,
    flight: Option<Arc<FlightRecord>>,
    /// Whether a collective that the plan does not hold is refused before it is issued.
    armed: bool,
    at: At,
    count: ProgramCount,
    /// Programs that have run.
    ran: BTreeSet<String>,
    warm: bool,
    /// What the backend had made when the warm-up was over.
    made: u64,
    shards: Shards,
    /// Every buffer, and which slice of it is here.
    buffers: BTreeMap<String, String>,
    /// Time of the phases since weights were last looked at.
    phases_ns: u64,
    /// When the output was handed out, in this thread's CPU time: digests follow.
    output_at_ns: u64,
}

impl MeshEngine {
    /// Loads every program of the rank, and takes the fingerprints of its weights.
    ///
    /// # Errors
    /// What the backend or the weights refuse.
    pub fn load(
        plan: &SealedPlan,
        rank: Rank,
        backend: impl Into<Held>,
        weights: &mut dyn WeightSource,
    ) -> Result<MeshEngine, Diagnostic> {
        MeshEngine::load_changed(plan, rank, backend.into(), weights, &|_| {})
    }

    /// The same with this rank's copy of each program changed before it is loaded, for a drill: what it runs is held to
    /// the sealed one all the same.
    ///
    /// # Errors
    /// What the backend or the weights refuse.
    pub(crate) fn load_changed(
        plan: &SealedPlan,
        rank: Rank,
        mut backend: Held,
        weights: &mut dyn WeightSource,
        change: &dyn Fn(&mut Program),
    ) -> Result<MeshEngine, Diagnostic> {
        let whole = census(plan);
        let mut phases = BTreeMap::new();
        let mut latents = None;
        let mut buffers = BTreeMap::new();
        let seat = Seat { mesh: *plan.mesh(), rank };
        for name in plan.phases().iter().filter(|p| !LEADER_PHASES.contains(&p.as_str())) {
            let (Some(program), Some(slots), Some(own)) =
                (plan.program(name, rank), plan.slots(name, rank), plan.census(name, rank))
            else {
                continue;
            };
            let mut program: Program = (**program).clone();
            change(&mut program);
            let program = Arc::new(program);
            let loaded = backend.load(&program, slots, weights)?;
            for b in &program.buffers {
                buffers.entry(b.name.clone()).or_insert_with(|| slice_words(&b.ty, None, &seat));
            }
            let sealed = plan.program(name, rank).map_or(&*program, |p| p);
            let sequence = Sequence::new(name, plan.mesh(), rank, sealed, &program);
            let names = |opcode| {
                program
                    .ops
                    .iter()
                    .filter(|o| o.opcode == opcode)
                    .filter_map(|o| o.name.clone())
                    .collect::<BTreeSet<_>>()
            };
            let out = program
                .ops
                .iter()
                .find(|o| o.opcode == Opcode::Output && o.name.as_deref() == Some("latents"));
            let shape = out.map(|o| program.ty(o.operands[0]).shape.clone());
            latents = latents.or(shape.clone());
            let phase = Phase {
                loaded,
                sequence,
                scalars: names(Opcode::Call),
                inputs: names(Opcode::Input),
                trace: own.trace_digest,
                whole: whole.get(name)?.clone(),
                latents: shape,
            };
            phases.insert(name.clone(), phase);
        }
        let mut shards = Shards::new(plan, rank);
        shards.take(&*backend, weights)?;
        let loaded = u32::try_from(phases.len()).unwrap_or(u32::MAX);
        let count = ProgramCount { loaded, ..ProgramCount::default() };
        Ok(MeshEngine {
            backend,
            phases,
            latents,
            count,
            ran: BTreeSet::new(),
            warm: false,
            made: 0,
            shards,
            buffers,
            phases_ns: 0,
            output_at_ns: 0,
            flight: None,
            armed: true,
            at: At::default(),
        })
    }

    /// Writes what it issues into a flight record.
    pub(crate) fn record(&mut self, flight: Option<Arc<FlightRecord>>) {
        self.flight = flight;
    }

    /// Arms or disarms the refusal of collectives that the plan does not hold; armed unless told otherwise.
    pub fn guard(&mut self, armed: bool) {
        self.armed = armed;
    }

    /// Lets the engine exchange its weights for those that `open` finds.
    #[must_use]
    pub fn reloads(mut self, open: OpenWeights) -> MeshEngine {
        self.shards.opens(open);
        self
    }

    /// Arms or disarms the refusal of a reload outside of a RELOAD; armed unless told otherwise.
    pub fn guard_reload(&mut self, armed: bool) {
        self.shards.guard(armed);
    }

    /// Sets one element of a weight in memory, behind the back of its fingerprint: a fault for drills, nothing else
    /// calls it. `false` when there is no such element.
    pub fn mutate_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.backend.write_weight(name, index, value)
    }

    /// Has every run from now on begin with work that never ends: a fault for drills. Returns only where the backend has
    /// work of its own; where the thread that calls is what works, it works from here on.
    pub(crate) fn stick(&mut self) {
        while !self.backend.stick() {
            std::hint::spin_loop();
        }
    }

    /// Digests of what each buffer holds, by name and slice: for a flight record, on a cadence of chunks that is the
    /// same on all ranks, since it reads every buffer. Equal slices are equal on all ranks; a shard of a cache is
    /// compared with the same shard of a replay.
    #[must_use]
    pub fn cache_contents(&self) -> Vec<ShardPrint> {
        let held =
            self.buffers.iter().filter_map(|(name, slice)| self.backend.fingerprint_buffer(name, slice));
        held.map(print).collect()
    }

    /// Names of the programs that are loaded.
    pub(crate) fn program_names(&self) -> impl Iterator<Item = &str> {
        self.phases.keys().map(String::as_str)
    }

    /// Bytes held: weights, buffers, temporaries.
    #[must_use]
    pub fn memory(&self) -> [u64; 3] {
        self.backend.memory()
    }
}

impl Engine for MeshEngine {
    fn begin(&mut self, call: &ReadyCall) {
        self.shards.begin(call.action);
        self.at = At::call(call);
    }

    fn run(
        &mut self,
        call: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let Some(phase) = self.phases.get_mut(&call.program) else {
            return Err(EngineFault::failed(format!("this rank holds no program @{}", call.program)));
        };
        let mut data = CallData::default();
        // Ranks of other stages read other scalars; each takes its own.
        for (name, arg) in call.args.iter().filter(|(n, _)| phase.scalars.contains(n)) {
            let scalar = match arg {
                Arg::I64(i) => Scalar::I64(*i),
                Arg::F32(x) => Scalar::F32(x.get()),
                Arg::F32s(xs) => Scalar::F32s(xs.iter().map(|x| x.get()).collect()),
            };
            data.scalars.insert(name, scalar);
        }
        let mut tensors = Vec::new();
        for name in &phase.inputs {
            let values = inputs.get(name).and_then(Tensor::to_f32);
            tensors.push(
                values.ok_or_else(|| EngineFault::failed(format!("the call brings no tensor `{name}`")))?,
            );
        }
        for (name, values) in phase.inputs.iter().zip(&tensors) {
            data.inputs.insert(name, values);
        }
        let flight = self.flight.as_ref();
        let mut guard = Guard::begin(&mut phase.sequence, &mut self.at, self.armed, flight, progress);
        let (start, before) = (Instant::now(), self.backend.compensated());
        self.backend.run(phase.loaded, &data, &mut guard).map_err(|f| match f {
            Fault::Refused(text) => EngineFault::tripped(&T0751, text),
            Fault::Failed(text) => EngineFault::failed(text),
            Fault::Stalled(text) => EngineFault { kind: FaultKind::Stalled, ..EngineFault::failed(text) },
            Fault::Aborted(text) => EngineFault::aborted(text),
        })?;
        if self.ran.insert(call.program.clone()) {
            let new = if self.warm { &mut self.count.new_since_warmup } else { &mut self.count.warmed };
            *new += 1;
        }
        let seen = guard.end().map_err(|text| EngineFault::tripped(&T0751, text))?;
        if seen != phase.trace {
            return Err(EngineFault::failed(format!(
                "@{} issued collectives with trace {}, the sealed plan holds {} for this rank",
                call.program,
                Digest(seen),
                Digest(phase.trace)
            )));
        }
        if phase.latents.is_some() {
            self.latents.clone_from(&phase.latents);
        }
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.phases_ns = self.phases_ns.saturating_add(ns);
        Ok(PhaseReport {
            ns,
            collectives: phase.whole.collectives,
            trace: phase.whole.trace,
            compensated: self.backend.compensated() - before,
        })
    }

    fn reset(&mut self) {
        self.backend.reset();
    }

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        let (Some(shape), Some(values)) = (&self.latents, self.backend.output("latents")) else {
            self.output_at_ns = thread_ns();
            return Ok(None);
        };
        let output = Tensor::from_f32("latents", shape, values);
        self.output_at_ns = thread_ns();
        output.map(Some).map_err(|d| EngineFault::failed(d.message))
    }

    fn programs(&self) -> ProgramCount {
        let since = if self.warm { self.backend.made().saturating_sub(self.made) } else { 0 };
        let new = u64::from(self.count.new_since_warmup) + since;
        ProgramCount { new_since_warmup: u32::try_from(new).unwrap_or(u32::MAX), ..self.count }
    }

    fn warmed(&mut self) {
        self.warm = true;
        self.made = self.backend.made();
    }

    fn fingerprints(&self) -> Vec<ShardPrint> {
        self.shards.prints().to_vec()
    }

    fn rehash(&mut self) -> Option<Rehash> {
        let digest_ns = thread_ns().saturating_sub(self.output_at_ns);
        self.shards.rehash(&mut *self.backend, std::mem::take(&mut self.phases_ns), digest_ns)
    }

    fn reload(&mut self, source: &str) -> Result<Reloaded, EngineFault> {
        self.shards.reload(&mut *self.backend, source).map_err(|d| {
            let Failure { code, text, .. } = Failure::from_diagnostic(FailureClass::Engine, None, &d);
            EngineFault { kind: FaultKind::Failed, code, text }
        })
    }

    fn cpu_ns(&self) -> u64 {
        thread_ns()
    }

    fn abort_handle(&self) -> AbortHandle {
        let abort: Abort = self.backend.abort();
        Arc::new(move || abort("the run ended"))
    }
}
