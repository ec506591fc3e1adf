//! A synthetic plan, and an engine that hashes its inputs into a few bytes: cheap, and equal on
//! every rank exactly if every rank had equal inputs.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::call_state::SessionSpec;
use crate::director::{DenoiseStep, StepList, StreamSpec};
use crate::engine::{AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall};
use crate::kv_cache::{CacheRegime, CacheSpec};
use crate::leader::LeaderConfig;
use crate::program_index::{ArgKind, InputSpec, ProgramIndex, ProgramInfo};
use crate::tripwire::Tripwires;
use crate::wire::{Dtype, PhaseCall, Tensor, Tensors};
use crate::{Digest, Limits, Parity};

/// Latent frames per chunk of the synthetic stream.
const CHUNK_FRAMES: u32 = 3;

/// Returns the settings of a leader of these ranks, with [`synthetic_programs`] and
/// [`synthetic_stream`].
#[must_use]
pub fn synthetic_config(
    ranks: Vec<u32>,
    regime: CacheRegime,
    limits: Limits,
    tripwires: Tripwires,
) -> LeaderConfig {
    LeaderConfig {
        hosts: None,
        output_groups: vec![ranks.clone()],
        ranks,
        plan: Digest::hash_bytes(b"the plan of a simulated run"),
        session: 7,
        build: "sim".into(),
        parity: Parity::default(),
        programs: Arc::new(synthetic_programs()),
        session_spec: SessionSpec::Video(synthetic_stream(regime)),
        limits,
        tripwires,
    }
}

/// Returns a stream of two denoise steps for [`synthetic_programs`].
fn synthetic_stream(regime: CacheRegime) -> StreamSpec {
    StreamSpec {
        cache: CacheSpec {
            regime,
            chunk_frames: CHUNK_FRAMES,
            window_frames: if regime == CacheRegime::Resident { 3 * CHUNK_FRAMES } else { 2 * CHUNK_FRAMES },
            sink_frames: 0,
            table_frames: 1024,
            tokens_per_frame: 4,
        },
        bias: 1.0,
        step_lists: vec![StepList::from_steps(vec![
            DenoiseStep { timestep: 1000.0, sigma: 1.0 },
            DenoiseStep { timestep: 500.0, sigma: 0.5 },
        ])],
    }
}

/// Returns programs for both regimes. The name of a program gives its number of collectives; see
/// [`collective_count`].
fn synthetic_programs() -> ProgramIndex {
    let place = vec![("start", ArgKind::I64), ("row", ArgKind::I64), ("t", ArgKind::F32s(CHUNK_FRAMES))];
    let draw = vec![("seed", ArgKind::I64), ("chunk", ArgKind::I64), ("draw", ArgKind::I64)];
    let mut rows: Vec<(String, Vec<(&str, ArgKind)>)> = vec![
        ("text".into(), vec![]),
        ("rebase".into(), vec![("shift", ArgKind::I64)]),
        ("recompute".into(), place.clone()),
        ("renoise".into(), draw),
        ("emit".into(), vec![]),
    ];
    for fill in [0, CHUNK_FRAMES, 2 * CHUNK_FRAMES] {
        rows.push((format!("denoise.fill{fill}"), place.clone()));
        rows.push((format!("clean.fill{fill}"), place.clone()));
    }
    ProgramIndex::new(rows.into_iter().map(|(name, scalars)| {
        let input = match name.as_str() {
            "text" => Some("text"),
            "recompute" => Some(crate::envelope_check::CONTEXT_TENSOR),
            _ => None,
        };
        let facts = ProgramInfo {
            collectives: collective_count(&name),
            trace: trace_digest(&name),
            scalars: scalars.into_iter().map(|(n, k)| (n.to_string(), k)).collect(),
            inputs: input
                .into_iter()
                .map(|n| InputSpec { name: n.into(), dtype: Dtype::F32, shape: vec![4] })
                .collect(),
        };
        (name, facts)
    }))
}

/// Returns the number of collectives of a program: the length of its name, or 0 for `renoise` and
/// `emit`.
fn collective_count(program: &str) -> u64 {
    if matches!(program, "renoise" | "emit") { 0 } else { program.len() as u64 }
}

fn trace_digest(program: &str) -> Digest {
    Digest::hash_bytes(program.as_bytes())
}

/// Returns a synthetic embedding of the `n`th prompt: four elements equal to `n`.
pub(super) fn prompt_tensor(n: u32) -> Option<Tensor> {
    Tensor::from_f32("text", &[4], &[n as f32; 4]).ok()
}

/// Returns a synthetic context: the first four elements of the previous chunk's output.
pub(super) fn context_tensor(previous: &Tensor) -> Option<Tensor> {
    let values = previous.to_f32()?;
    Tensor::from_f32(crate::envelope_check::CONTEXT_TENSOR, &[4], values.get(..4)?).ok()
}

/// An engine that reports the collectives and the trace of the program index for each program.
#[derive(Debug)]
pub struct HashEngine {
    programs: Arc<ProgramIndex>,
    state: Vec<u8>,
    ran: BTreeSet<String>,
    warmed: Option<u32>,
}

impl HashEngine {
    /// Creates an engine that has run nothing.
    #[must_use]
    pub fn new(programs: Arc<ProgramIndex>) -> HashEngine {
        HashEngine { programs, state: Vec::new(), ran: BTreeSet::new(), warmed: None }
    }
}

impl Engine for HashEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        _: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let facts = self.programs.get(&phase.program).map_err(|d| EngineFault::local_failure(d.message))?;
        self.ran.insert(phase.program.clone());
        let mut bytes = std::mem::take(&mut self.state);
        bytes.extend(crate::digest::canonical_bytes(phase));
        for tensor in facts.inputs.iter().filter_map(|i| inputs.get(&i.name)) {
            bytes.extend(tensor.data());
        }
        self.state = Digest::hash_bytes(&bytes).0.to_vec();
        Ok(PhaseReport { collectives: facts.collectives, trace: facts.trace, ..PhaseReport::default() })
    }

    fn reset(&mut self) {
        self.state.clear();
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        let values: Vec<f32> = self.state.iter().map(|b| f32::from(*b)).collect();
        Tensor::from_f32("output", &[values.len() as u64], &values)
            .map(|output| Tensors(vec![output]))
            .map_err(|d| EngineFault::local_failure(d.message))
    }

    fn program_count(&self) -> ProgramCount {
        let ran = self.ran.len() as u32;
        let warmed = self.warmed.unwrap_or(ran);
        ProgramCount { loaded: ran, warmed, new_since_warmup: ran - warmed }
    }

    fn finish_warmup(&mut self) {
        self.warmed = Some(self.ran.len() as u32);
    }

    fn audit_weights(&mut self) -> Option<crate::engine::RehashResult> {
        None
    }

    fn audit_caches(&mut self, _: &ReadyCall) -> Vec<CacheFault> {
        Vec::new()
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}
