//! What a rank shows of itself before the first call, as effective values: what was loaded, not what was asked for.

use tessera_cpu::kernels::vector_unit;
use tessera_runtime::{Digest, Parity};

use crate::comm;
use crate::modelled::Modelled;
use crate::plan::Plan;

/// A value that a rank has none of.
const NONE: &str = "none";

/// Everything but what the machines of lockstep show by themselves. `programs` are the names of those that this rank
/// holds ready; a leader outside the mesh names what it expects of the others. `gpus`: whether the mesh is on GPUs. `threads`
/// is absent where no kernel of the processors runs calls.
pub(crate) fn shown<'a>(
    plan: &Plan,
    weights: [u8; 32],
    modelled: &Modelled,
    programs: impl IntoIterator<Item = &'a str>,
    (gpus, threads): (bool, Option<usize>),
) -> Parity {
    let shown = Parity::default()
        .set("backend", if gpus { "cuda" } else { "cpu" })
        // Processors run a program op by op.
        .set("captured regions", if gpus { "every program" } else { NONE })
        .set("drill", NONE)
        .set("groups", groups(plan))
        .set("modelled decoder", modelled.announced())
        .set(
            "numerics",
            format!("{} in {}, sums in f32", plan.mapping.numerics.name(), plan.mapping.dtype.name()),
        )
        .set("program set", set(programs))
        .set("topology", plan.mapping.topology.name())
        .set("weights", Digest(weights).to_string())
        .set("cpu model", cpu_model())
        .set("host", line_of("/proc/sys/kernel/hostname"))
        .set("kernel version", line_of("/proc/sys/kernel/osrelease"));
    match threads {
        Some(n) => shown.set("kernels", vector_unit()).set("threads", n.to_string()),
        None => shown,
    }
}

/// The groups of ranks that found each other: with where they are.
pub(crate) fn groups_among(parity: Parity, plan: &Plan, peers: Option<Digest>) -> Parity {
    match peers {
        None => parity,
        Some(peers) => parity.set("groups", format!("{}, peers {peers}", groups(plan))),
    }
}

/// Names of programs, however they are ordered.
fn set<'a>(programs: impl IntoIterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = programs.into_iter().collect();
    names.sort_unstable();
    format!("{} programs, {}", names.len(), digest(names))
}

/// Who is in the world and in the mesh, and every group and pair that exchanges data, in the order in which a rank
/// makes them.
fn groups(plan: &Plan) -> String {
    let mesh = plan.sealed.mesh();
    let lanes = comm::groups(&plan.sealed);
    let mut parts = vec![mesh.to_string()];
    for spec in &lanes {
        let members: Vec<String> = spec.lane.members.iter().map(ToString::to_string).collect();
        let how = if spec.lane.transfer { "transfers" } else { "group" };
        parts.push(format!("{how} {} of {}", spec.lane.over, members.join(" ")));
    }
    format!(
        "world of {}, mesh of {}, {} lanes, {}",
        mesh.ranks(),
        mesh.inside(),
        lanes.len(),
        digest(parts.iter().map(String::as_str).collect())
    )
}

/// The head of a digest of some texts, in order.
fn digest(texts: Vec<&str>) -> String {
    let mut hash = blake3::Hasher::new();
    for text in texts {
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.finalize().to_hex()[..16].to_string()
}

/// The one line of a small file, if it can be read.
fn line_of(path: &str) -> String {
    std::fs::read_to_string(path).map_or("unknown".to_string(), |text| text.trim().to_string())
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':'));
    value.map_or("unknown".to_string(), |(_, v)| v.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_programs_has_no_order_and_names_do_not_run_together() {
        assert_eq!(set(["b", "a"]), set(["a", "b"]));
        assert!(set(["a", "b"]).starts_with("2 programs, "));
        assert_ne!(set(["ab", "c"]), set(["a", "bc"]));
    }
}
