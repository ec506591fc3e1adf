//! The stream of the harness: programs that do nothing, and the configurations of its ranks.

use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::director::{DenoiseStep, StepList, StreamSpec};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::program_index::{ArgKind, InputSpec, ProgramIndex, ProgramInfo};
use tessera_runtime::wire::{Dtype, Tensor};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Limits, Parity, Tripwires};

use super::HarnessConfig;

/// Frames per chunk of the harness's small model; its window holds two chunks.
const CHUNK_FRAMES: u32 = 3;
/// Number of elements of the text embedding and of an output.
const TENSOR_ELEMENTS: usize = 8;

pub(super) fn plan_digest() -> Digest {
    Digest::hash_bytes(b"programs that do nothing")
}

pub(super) fn leader_config(harness: &HarnessConfig) -> LeaderConfig {
    LeaderConfig {
        ranks: harness.mesh_ranks().collect(),
        plan: plan_digest(),
        session: 0,
        build: build_label(),
        hosts: None,
        output_groups: vec![harness.mesh_ranks().collect()],
        parity: Parity::default(),
        programs: Arc::new(program_index()),
        session_spec: SessionSpec::Video(stream_spec()),
        limits: one_call_limits(),
        tripwires: Tripwires::default(),
    }
}

pub(super) fn worker_config(harness: &HarnessConfig, rank: u32) -> WorkerConfig {
    WorkerConfig {
        rank,
        upstream_rank: u32::from(harness.mesh_ranks().start == 1 && rank > 1),
        plan: plan_digest(),
        build: build_label(),
        parity: Parity::default(),
        programs: Arc::new(program_index()),
        session_spec: SessionSpec::Video(stream_spec()),
        limits: one_call_limits(),
        sends_output: harness.mesh_ranks().start == rank,
        tripwires: Tripwires::default(),
    }
}

pub(super) fn mesh_leader_config(harness: &HarnessConfig, rank: u32) -> MeshLeaderConfig {
    MeshLeaderConfig {
        rank,
        members: harness.mesh_ranks().skip(1).collect(),
        plan: plan_digest(),
        programs: Arc::new(program_index()),
        session_spec: SessionSpec::Video(stream_spec()),
        limits: one_call_limits(),
        tripwires: Tripwires::default(),
    }
}

/// Returns the default limits, with one call at a time: the next call is decided when no other is
/// in flight.
pub fn one_call_limits() -> Limits {
    Limits { d_in: 1, max_outstanding: 1, ..Limits::default() }
}

fn build_label() -> String {
    format!("bench {}", env!("CARGO_PKG_VERSION"))
}

pub(super) fn stream_spec() -> StreamSpec {
    StreamSpec {
        cache: CacheSpec {
            regime: CacheRegime::Resident,
            chunk_frames: CHUNK_FRAMES,
            window_frames: 2 * CHUNK_FRAMES,
            sink_frames: 0,
            table_frames: 1024,
            tokens_per_frame: 16,
        },
        bias: 1.0,
        step_lists: vec![StepList::from_steps(vec![DenoiseStep { timestep: 1000.0, sigma: 1.0 }])],
    }
}

fn program_index() -> ProgramIndex {
    let pass = [
        ("start", ArgKind::I64),
        ("row", ArgKind::I64),
        ("t", ArgKind::F32s(CHUNK_FRAMES)),
        ("sigma", ArgKind::F32),
    ];
    let draw =
        [("sigma", ArgKind::F32), ("seed", ArgKind::I64), ("chunk", ArgKind::I64), ("draw", ArgKind::I64)];
    let mut rows = vec![
        ("text".to_string(), &[][..]),
        ("rebase".to_string(), &[("shift", ArgKind::I64)][..]),
        ("renoise".to_string(), &draw[..]),
        ("emit".to_string(), &[][..]),
    ];
    for fill in [0, CHUNK_FRAMES] {
        rows.push((format!("denoise.fill{fill}"), &pass[..]));
        rows.push((format!("clean.fill{fill}"), &pass[..3]));
    }
    ProgramIndex::new(rows.into_iter().map(|(name, scalars)| {
        let text = InputSpec { name: "text".into(), dtype: Dtype::F32, shape: vec![TENSOR_ELEMENTS as u64] };
        let facts = ProgramInfo {
            collectives: 1,
            trace: Digest::hash_bytes(name.as_bytes()),
            scalars: scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect(),
            inputs: if name == "text" { vec![text] } else { Vec::new() },
        };
        (name, facts)
    }))
}

pub(super) fn constant_tensor(name: &str) -> Result<Tensor, Diagnostic> {
    Tensor::from_f32(name, &[TENSOR_ELEMENTS as u64], &[1.0; TENSOR_ELEMENTS])
}
