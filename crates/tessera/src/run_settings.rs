//! Settings of the runtime that follow from a plan alone, so that every rank derives the same.

use tessera_mesh::Axis;
use tessera_models::denoising_steps;
use tessera_runtime::Limits;
use tessera_runtime::director::{DenoiseStep, StreamSpec};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};

use crate::plan::Plan;

/// Returns the build identification that every rank reports.
pub(crate) fn build_id() -> String {
    format!("tessera {}", env!("CARGO_PKG_VERSION"))
}

/// Returns the limits of a plan's runs.
pub(crate) fn run_limits(plan: &Plan) -> Limits {
    Limits {
        d_in: plan.mapping.d_in,
        d_out: plan.mapping.d_out,
        max_outstanding: plan.mapping.max_outstanding,
        ..Limits::default()
    }
}

pub(crate) fn stream_spec(plan: &Plan) -> StreamSpec {
    let (s, wan) = (&plan.video.stream, &plan.video.wan);
    StreamSpec {
        cache: CacheSpec {
            regime: if s.recompute { CacheRegime::Recompute } else { CacheRegime::Resident },
            chunk_frames: s.chunk_frames as u32,
            window_frames: s.window_frames as u32,
            table_frames: wan.rope_frames as u32,
            tokens_per_frame: plan.video.frame_tokens() as u32,
        },
        bias: s.bias as f32,
        steps: denoising_steps(s)
            .into_iter()
            .map(|s| DenoiseStep { timestep: s.timestep, sigma: s.sigma })
            .collect(),
    }
}

/// Returns the ranks that output no latents: those after the first stage.
pub(crate) fn ranks_without_latents(plan: &Plan) -> Vec<u32> {
    let mesh = plan.sealed.mesh();
    plan.mesh_ranks().filter(|r| mesh.coord_of(*r).on_axis(Axis::Pp) > 0).map(|r| r.0).collect()
}
