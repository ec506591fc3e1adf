//! Settings of the runtime that follow from a plan alone, so that every rank derives the same.

use std::sync::OnceLock;

use tessera_ir::op_workload;
use tessera_mesh::{Axis, Rank};
use tessera_models::SigmaStep;
use tessera_runtime::Limits;
use tessera_runtime::director::{DenoiseStep, StepList, StreamSpec};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};

use crate::plan::{Plan, has_cpu_variant, leader_phases};
use crate::system::open_object_file;

/// Returns the build that every rank reports: the version, and the digest of the file that this
/// code was loaded from. The file is the executable, or the shared object of a program that embeds
/// this crate. Two builds of one version differ in their digest.
#[must_use]
pub fn build_id() -> String {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let digest = DIGEST.get_or_init(|| match hash_object_file() {
        Ok(digest) => digest,
        // The text never equals that of another process: a build that nobody can compare is refused.
        Err(e) => format!("an unreadable object file, process {}: {e}", std::process::id()),
    });
    format!("tessera {}, {digest}", env!("CARGO_PKG_VERSION"))
}

/// Returns the first 16 hex digits of the BLAKE3 digest of the file that this code was loaded from.
fn hash_object_file() -> std::io::Result<String> {
    let mut hash = blake3::Hasher::new();
    let mut file = open_object_file(hash_object_file as *const () as usize)?;
    std::io::copy(&mut file, &mut hash)?;
    Ok(hash.finalize().to_hex()[..16].to_string())
}

/// Returns the limits of a plan's runs.
pub(crate) fn run_limits(plan: &Plan) -> Limits {
    Limits {
        d_in: plan.mapping.d_in,
        d_out: plan.mapping.d_out,
        max_outstanding: plan.mapping.max_outstanding,
        media_ns: media_limit_ns(plan),
        ..Limits::default()
    }
}

/// Rate below which the leader's programs on a CPU count as stalled, in operations per nanosecond: that of
/// one slow core.
const SLOWEST_FLOPS_PER_NS: u64 = 4;

/// Returns the time in which the media pipeline must answer: the default, or longer if the leader's own
/// programs have so much work that a slow CPU takes longer.
fn media_limit_ns(plan: &Plan) -> u64 {
    let on_cpu = leader_phases(&plan.sealed).filter(|name| !has_cpu_variant(name));
    let programs = on_cpu.filter_map(|name| plan.sealed.rank_program(name, Rank(0)));
    let work: u64 = programs.flat_map(|p| p.ops.iter().map(|op| op_workload(p, op).flops.0)).sum();
    Limits::default().media_ns.max(work / SLOWEST_FLOPS_PER_NS)
}

pub(crate) fn stream_spec(plan: &Plan) -> StreamSpec {
    let (s, wan) = (&plan.video.stream, &plan.video.wan);
    StreamSpec {
        cache: CacheSpec {
            regime: if s.recompute { CacheRegime::Recompute } else { CacheRegime::Resident },
            chunk_frames: s.chunk_frames as u32,
            window_frames: s.window_frames as u32,
            sink_frames: s.sink_frames as u32,
            table_frames: s.position_count(wan) as u32,
            tokens_per_frame: plan.video.frame_tokens() as u32,
        },
        bias: s.bias as f32,
        step_lists: s.all_step_lists().into_iter().map(|(name, steps)| to_step_list(name, &steps)).collect(),
    }
}

fn to_step_list(name: &str, steps: &[SigmaStep]) -> StepList {
    let steps = steps.iter().map(|s| DenoiseStep { timestep: s.timestep, sigma: s.sigma }).collect();
    StepList { name: name.to_string(), steps }
}

/// Returns the ranks that output latents: those of the first stage.
pub(crate) fn ranks_with_latents(plan: &Plan) -> Vec<u32> {
    let mesh = plan.sealed.mesh();
    plan.mesh_ranks().filter(|r| mesh.coord_of(*r).on_axis(Axis::Pp) == 0).map(|r| r.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_is_named_by_the_digest_of_the_file_that_holds_its_code() {
        let exe = std::fs::read(std::env::current_exe().expect("a path")).expect("an executable");
        let digest = &blake3::hash(&exe).to_hex()[..16];
        assert_eq!(build_id(), format!("tessera {}, {digest}", env!("CARGO_PKG_VERSION")));
    }
}
