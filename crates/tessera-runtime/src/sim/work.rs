//! A plan of made-up programs and an engine that folds what it is given into a few bytes: cheap, and equal on
//! every rank exactly when every rank got the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cache::{CacheSpec, Regime};
use crate::census::{ArgKind, Census, InputFacts, ProgramFacts};
use crate::decide::{Step, StreamSpec};
use crate::engine::{AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount};
use crate::wire::{Dtype, PhaseCall, Tensor, Tensors};
use crate::{Digest, Parity};

/// Latent frames of a chunk.
pub const CHUNK_FRAMES: u32 = 3;

/// What the ranks of a run hold: the programs of a plan, and the stream over them.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Digest of the plan.
    pub plan: Digest,
    /// The session, as in every envelope.
    pub session: u64,
    /// Build of every rank.
    pub build: String,
    /// What every rank shows at the hello.
    pub parity: Parity,
    /// The plan's programs.
    pub census: Arc<Census>,
    /// The stream.
    pub stream: StreamSpec,
    /// Ranks that put out no latents.
    pub silent: Vec<u32>,
}

impl Facts {
    /// Of a plan that is made up: [`census`] and [`stream`].
    #[must_use]
    pub fn made_up(regime: Regime) -> Facts {
        Facts {
            plan: Digest::of(b"the plan of a simulated run"),
            session: 7,
            build: "sim".into(),
            parity: Parity::default(),
            census: Arc::new(census()),
            stream: stream(regime),
            silent: Vec::new(),
        }
    }
}

/// The stream of two denoise steps that goes with [`census`].
#[must_use]
pub fn stream(regime: Regime) -> StreamSpec {
    StreamSpec {
        cache: CacheSpec {
            regime,
            chunk_frames: CHUNK_FRAMES,
            window_frames: if regime == Regime::Resident { 3 * CHUNK_FRAMES } else { 2 * CHUNK_FRAMES },
            table_frames: 1024,
            tokens_per_frame: 4,
        },
        bias: 1.0,
        steps: vec![Step { timestep: 1000.0, sigma: 1.0 }, Step { timestep: 500.0, sigma: 0.5 }],
    }
}

/// Programs of both regimes, each with as many collectives as its name has letters.
#[must_use]
pub fn census() -> Census {
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
    Census::new(rows.into_iter().map(|(name, scalars)| {
        let input = match name.as_str() {
            "text" => Some("text"),
            "recompute" => Some(crate::check::CONTEXT),
            _ => None,
        };
        let facts = ProgramFacts {
            collectives: collectives(&name),
            trace: trace(&name),
            scalars: scalars.into_iter().map(|(n, k)| (n.to_string(), k)).collect(),
            inputs: input
                .into_iter()
                .map(|n| InputFacts { name: n.into(), dtype: Dtype::F32, shape: vec![4] })
                .collect(),
        };
        (name, facts)
    }))
}

/// Collectives of a program; noise and the end of a chunk need none.
#[must_use]
pub fn collectives(program: &str) -> u64 {
    if matches!(program, "renoise" | "emit") { 0 } else { program.len() as u64 }
}

fn trace(program: &str) -> Digest {
    Digest::of(program.as_bytes())
}

/// The embedding of the `n`th prompt.
#[must_use]
pub fn text(n: u32) -> Option<Tensor> {
    Tensor::from_f32("text", &[4], &[n as f32; 4]).ok()
}

/// The context that follows from a chunk's output.
#[must_use]
pub fn context(previous: &Tensor) -> Option<Tensor> {
    let values = previous.to_f32()?;
    Tensor::from_f32(crate::check::CONTEXT, &[4], values.get(..4)?).ok()
}

/// The engine. It does what the census holds of each program, and no more.
#[derive(Debug)]
pub struct FoldEngine {
    census: Arc<Census>,
    state: Vec<u8>,
    ran: BTreeSet<String>,
    warmed: Option<u32>,
}

impl FoldEngine {
    /// An engine that has run nothing.
    #[must_use]
    pub fn new(census: Arc<Census>) -> FoldEngine {
        FoldEngine { census, state: Vec::new(), ran: BTreeSet::new(), warmed: None }
    }
}

impl Engine for FoldEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        _: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let facts = self.census.get(&phase.program).map_err(|d| EngineFault::failed(d.message))?;
        self.ran.insert(phase.program.clone());
        let mut bytes = std::mem::take(&mut self.state);
        bytes.extend(crate::digest::canonical_bytes(phase));
        for tensor in facts.inputs.iter().filter_map(|i| inputs.get(&i.name)) {
            bytes.extend(tensor.data());
        }
        self.state = Digest::of(&bytes).0.to_vec();
        Ok(PhaseReport { ns: 0, collectives: facts.collectives, compensated: 0, trace: facts.trace })
    }

    fn reset(&mut self) {
        self.state.clear();
    }

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        let values: Vec<f32> = self.state.iter().map(|b| f32::from(*b)).collect();
        Tensor::from_f32("output", &[values.len() as u64], &values)
            .map(Some)
            .map_err(|d| EngineFault::failed(d.message))
    }

    fn programs(&self) -> ProgramCount {
        let ran = self.ran.len() as u32;
        let warmed = self.warmed.unwrap_or(ran);
        ProgramCount { loaded: ran, warmed, new_since_warmup: ran - warmed }
    }

    fn warmed(&mut self) {
        self.warmed = Some(self.ran.len() as u32);
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}
