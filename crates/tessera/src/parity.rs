//! The parity facts that a rank reports before the first call. They are effective values: what was
//! loaded, not what was requested.

use tessera_cpu::kernels::vector_unit;
use tessera_ir::{CapturedGraph, Op};
use tessera_mesh::Rank;
use tessera_runtime::{Digest, Parity};
use tessera_verify::SealedPlan;

use crate::communicators;
use crate::engine::mesh_phases;
use crate::machine_shape::cpu_model;
use crate::plan::Plan;
use crate::synthetic_delays::SyntheticDelays;

/// Value of a fact that does not apply to a rank.
const NOT_APPLICABLE: &str = "none";

/// Returns all facts except those that the lockstep state machines add themselves. `programs` names
/// the programs that this rank has loaded, each with the graph into which its backend captures it; a
/// leader gives the programs that the plan declares ([`declared_programs`]). `gpus` states whether the
/// mesh runs on GPUs. `threads` is `None` if no CPU kernels run calls.
pub(crate) fn rank_parity(
    plan: &Plan,
    weights: [u8; 32],
    delays: &SyntheticDelays,
    programs: &[(&str, Option<CapturedGraph>)],
    (gpus, threads): (bool, Option<usize>),
) -> Parity {
    let parity = Parity::default()
        .with_known_key("backend", if gpus { "cuda" } else { "cpu" })
        .with_known_key("captured programs", describe_captures(programs))
        .with_known_key("drill", NOT_APPLICABLE)
        .with_known_key("groups", describe_groups(plan))
        .with_known_key(
            "numerics",
            format!("{} in {}, sums in f32", plan.mapping.numerics.name(), plan.mapping.dtype.name()),
        )
        .with_known_key("program set", describe_program_set(programs.iter().map(|(name, _)| *name)))
        .with_known_key("synthetic delays", delays.announced_text())
        .with_known_key("topology", plan.mapping.topology.name())
        .with_known_key("weights", Digest(weights).to_string())
        .with_known_key("cpu model", cpu_model())
        .with_known_key("host", read_line_or_unknown("/proc/sys/kernel/hostname"))
        .with_known_key("kernel version", read_line_or_unknown("/proc/sys/kernel/osrelease"));
    match threads {
        Some(n) => parity.with_known_key("kernels", vector_unit()).with_known_key("threads", n.to_string()),
        None => parity,
    }
}

/// Adds the digest of the peers to the `groups` fact of ranks that found each other by rendezvous.
pub(crate) fn add_peers_to_groups(parity: Parity, plan: &Plan, peers: Option<Digest>) -> Parity {
    match peers {
        None => parity,
        Some(peers) => parity.with_known_key("groups", format!("{}, peers {peers}", describe_groups(plan))),
    }
}

/// Describes a set of program names, independent of their order.
fn describe_program_set<'a>(programs: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = programs.into_iter().collect();
    names.sort_unstable();
    format!("{} programs, {}", names.len(), hash_texts(names))
}

/// Returns the programs of the mesh with the graphs that a plan declares for them. All roles of a
/// phase share the name of the graph.
pub(crate) fn declared_programs(plan: &SealedPlan) -> Vec<(&str, Option<CapturedGraph>)> {
    let ranks: Vec<Rank> = plan.mesh().iter().filter(|r| plan.mesh().contains(*r)).collect();
    let graph = |phase: &str| {
        let mut programs = ranks.iter().filter_map(|r| plan.rank_program(phase, *r));
        programs.find_map(|p| p.captured_graph().ok().flatten())
    };
    mesh_phases(plan).map(|phase| (phase, graph(phase))).collect()
}

/// Gives each program that launches nothing on this rank the graph that the plan declares for it on
/// other ranks: a stage without work in a phase has nothing to capture and differs from no peer.
pub(crate) fn count_idle_programs<'a>(
    plan: &SealedPlan,
    rank: Rank,
    mut programs: Vec<(&'a str, Option<CapturedGraph>)>,
) -> Vec<(&'a str, Option<CapturedGraph>)> {
    let is_idle = |name: &str| plan.rank_program(name, rank).is_some_and(|p| p.ops.iter().all(Op::is_source));
    let declared = declared_programs(plan);
    for (name, graph) in programs.iter_mut().filter(|(name, _)| is_idle(name)) {
        *graph = declared.iter().find(|(phase, _)| phase == name).and_then(|(_, graph)| graph.clone());
    }
    programs
}

/// Describes which programs are captured into which graphs. The number of ops differs between roles,
/// so every rank compares its own with the plan at each launch, and it is no part of this value.
fn describe_captures(programs: &[(&str, Option<CapturedGraph>)]) -> String {
    let mut pairs: Vec<(&str, &str)> =
        programs.iter().filter_map(|(name, g)| Some((*name, g.as_ref()?.name.as_str()))).collect();
    if pairs.is_empty() {
        return NOT_APPLICABLE.to_string();
    }
    pairs.sort_unstable();
    let renamed = pairs.iter().filter(|(name, graph)| name != graph).count();
    let of_others =
        if renamed == 0 { String::new() } else { format!(", {renamed} into graphs of other names") };
    let texts = pairs.iter().flat_map(|(name, graph)| [*name, *graph]).collect();
    format!("{} programs{of_others}, {}", pairs.len(), hash_texts(texts))
}

/// Describes the world, the mesh, and every group and pair that exchanges data, in the order in
/// which a rank creates them.
fn describe_groups(plan: &Plan) -> String {
    let mesh = plan.sealed.mesh();
    let communicators = communicators::communicator_specs(&plan.sealed);
    let mut parts = vec![mesh.to_string()];
    for spec in &communicators {
        let members: Vec<String> = spec.communicator.members.iter().map(ToString::to_string).collect();
        let kind = if spec.communicator.is_transfer { "transfers" } else { "group" };
        parts.push(format!("{kind} {} of {}", spec.communicator.group, members.join(" ")));
    }
    format!(
        "world of {}, mesh of {}, {} communicators, {}",
        mesh.world_size(),
        mesh.mesh_size(),
        communicators.len(),
        hash_texts(parts.iter().map(String::as_str).collect())
    )
}

/// Returns the first 16 hex digits of a digest of the texts, in order.
fn hash_texts(texts: Vec<&str>) -> String {
    let mut hash = blake3::Hasher::new();
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize().to_hex()[..16].to_string()
}

/// Returns the trimmed contents of a one-line file, or `unknown` if it cannot be read.
fn read_line_or_unknown(path: &str) -> String {
    std::fs::read_to_string(path).map_or("unknown".to_string(), |text| text.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_set_ignores_order_and_separates_names() {
        assert_eq!(describe_program_set(["b", "a"]), describe_program_set(["a", "b"]));
        assert!(describe_program_set(["a", "b"]).starts_with("2 programs, "));
        assert_ne!(describe_program_set(["ab", "c"]), describe_program_set(["a", "bc"]));
    }
}
