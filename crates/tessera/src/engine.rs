//! A rank's engine: sealed programs on a backend, held to the sealed trace.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{Abort, Backend, CallData, Fault, Loaded, Observer, Scalar, WeightSource};
use tessera_ir::{DType, Opcode, Program};
use tessera_mesh::Rank;
use tessera_runtime::Digest;
use tessera_runtime::census::{ArgKind, Census, InputFacts, ProgramFacts};
use tessera_runtime::engine::{AbortHandle, Engine, EngineFault, FaultKind, PhaseReport, ProgramCount};
use tessera_runtime::wire::{Arg, Dtype, PhaseCall, Tensor, Tensors};
use tessera_verify::{SealedPlan, collective_line};

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
    /// Trace line of each collective, by op.
    lines: BTreeMap<usize, String>,
    scalars: BTreeSet<String>,
    inputs: BTreeSet<String>,
    trace: [u8; 32],
    whole: ProgramFacts,
    /// Shape of the latents, if this program puts them out.
    latents: Option<Vec<u64>>,
}

/// Runs a sealed plan's programs for one rank.
pub struct MeshEngine {
    backend: Box<dyn Backend>,
    phases: BTreeMap<String, Phase>,
    /// Shape of the chunk's latents where this rank puts them out.
    latents: Option<Vec<u64>>,
    count: ProgramCount,
    /// Programs that have run.
    ran: BTreeSet<String>,
    warm: bool,
}

impl MeshEngine {
    /// Loads every program of the rank.
    ///
    /// # Errors
    /// What the backend or the weights refuse.
    pub fn load(
        plan: &SealedPlan,
        rank: Rank,
        mut backend: Box<dyn Backend>,
        weights: &mut dyn WeightSource,
    ) -> Result<MeshEngine, Diagnostic> {
        let whole = census(plan);
        let mut phases = BTreeMap::new();
        let mut latents = None;
        for name in plan.phases().iter().filter(|p| !LEADER_PHASES.contains(&p.as_str())) {
            let (Some(program), Some(slots), Some(own)) =
                (plan.program(name, rank), plan.slots(name, rank), plan.census(name, rank))
            else {
                continue;
            };
            let program: Arc<Program> = Arc::new((**program).clone());
            let loaded = backend.load(&program, slots, weights)?;
            let lines = program
                .collectives()
                .filter_map(|(i, _)| collective_line(&program, i).map(|l| (i, l)))
                .collect();
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
                lines,
                scalars: names(Opcode::Call),
                inputs: names(Opcode::Input),
                trace: own.trace_digest,
                whole: whole.get(name)?.clone(),
                latents: shape,
            };
            phases.insert(name.clone(), phase);
        }
        let loaded = u32::try_from(phases.len()).unwrap_or(u32::MAX);
        let count = ProgramCount { loaded, ..ProgramCount::default() };
        Ok(MeshEngine { backend, phases, latents, count, ran: BTreeSet::new(), warm: false })
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

struct Trace<'a> {
    hash: blake3::Hasher,
    lines: &'a BTreeMap<usize, String>,
    progress: &'a (dyn Fn(u32) + Sync),
}

impl Observer for Trace<'_> {
    fn issued(&mut self, op: usize) {
        if let Some(line) = self.lines.get(&op) {
            self.hash.update(line.as_bytes());
            self.hash.update(b"\n");
        }
    }

    fn progress(&mut self, ops: u32) {
        (self.progress)(ops);
    }
}

impl Engine for MeshEngine {
    fn run(
        &mut self,
        call: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let Some(phase) = self.phases.get(&call.program) else {
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
        let mut trace = Trace { hash: blake3::Hasher::new(), lines: &phase.lines, progress };
        let (start, before) = (Instant::now(), self.backend.compensated());
        self.backend.run(phase.loaded, &data, &mut trace).map_err(|f| match f {
            Fault::Failed(text) => EngineFault::failed(text),
            Fault::Stalled(text) => EngineFault { kind: FaultKind::Stalled, ..EngineFault::failed(text) },
            Fault::Aborted(text) => EngineFault::aborted(text),
        })?;
        if self.ran.insert(call.program.clone()) {
            let new = if self.warm { &mut self.count.new_since_warmup } else { &mut self.count.warmed };
            *new += 1;
        }
        let seen = *trace.hash.finalize().as_bytes();
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
        Ok(PhaseReport {
            ns: u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
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
            return Ok(None);
        };
        Tensor::from_f32("latents", shape, values).map(Some).map_err(|d| EngineFault::failed(d.message))
    }

    fn programs(&self) -> ProgramCount {
        self.count
    }

    fn warmed(&mut self) {
        self.warm = true;
    }

    fn abort_handle(&self) -> AbortHandle {
        let abort: Abort = self.backend.abort();
        Arc::new(move || abort("the run ended"))
    }
}
