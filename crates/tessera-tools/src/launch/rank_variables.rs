//! The variables of a rank: those that place it, and hints to NCCL and to thread pools. A hint never
//! replaces a value of the user.

use std::collections::BTreeMap;

use tessera::nccl_algorithms::NcclTags;
use tessera::stream_options::RunDevice;

use super::local_host::parse_core_list;
use super::{LaunchRequest, RankPlace, UNKNOWN};

/// Where the value of a variable comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VariableSource {
    /// The launch sets it, because it follows from the plan and the hosts.
    Set,
    /// The user has set it, and this value stays.
    Kept,
    /// It must be set, and only the user or the host knows the value.
    Open,
}

/// A variable of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankVariable {
    /// Name of the variable.
    pub name: &'static str,
    /// Its value, or for an open one, what is missing.
    pub value: String,
    /// Where the value comes from.
    pub source: VariableSource,
    /// Why the variable is set.
    pub reason: &'static str,
}

/// What the variables of a rank follow from, besides its place.
pub(super) struct LaunchFacts<'a> {
    pub leader_host: &'a str,
    pub world: u32,
    pub local_world: u32,
    pub uses_all_to_all: bool,
    /// The tags of the sums that NCCL carries.
    pub tags: NcclTags,
    /// Network device of the host, if it is known.
    pub network: Option<&'a str>,
    pub spans_hosts: bool,
}

/// Returns the variables of a rank, those that place it first.
pub(super) fn list_variables(
    request: &LaunchRequest<'_>,
    place: &RankPlace,
    facts: &LaunchFacts<'_>,
) -> Vec<RankVariable> {
    let set = |name, value: String, reason| RankVariable { name, value, source: VariableSource::Set, reason };
    let mut out = vec![
        set("RANK", place.rank.to_string(), "rank of the process"),
        set("WORLD_SIZE", facts.world.to_string(), "ranks of the plan"),
        set("LOCAL_RANK", place.local_rank.to_string(), "position on the host, which selects the GPU"),
        set("LOCAL_WORLD_SIZE", facts.local_world.to_string(), "ranks of the host, which share its cores"),
        set("MASTER_ADDR", facts.leader_host.to_string(), "host of rank 0"),
        set("MASTER_PORT", request.leader_port.to_string(), "port of rank 0"),
    ];
    let mut hint = |name: &'static str, value: Option<String>, reason| {
        out.push(keep_own(&request.environment, name, value, reason));
    };
    let secret = request.secret.as_ref().map(|path| path.display().to_string());
    hint("TESSERA_SECRET_FILE", secret, "proof that a process belongs to the run");
    if request.device != RunDevice::Cuda {
        return out;
    }
    let cores = parse_core_list(&place.cores).filter(|cores| !cores.is_empty());
    let threads = cores.map(|cores| cores.len().to_string());
    hint("OMP_NUM_THREADS", threads, "threads of libraries in a process, as many as the rank has cores");
    hint("CUDA_DEVICE_ORDER", Some("PCI_BUS_ID".to_string()), "numbers GPUs in the order of their ports");
    hint("NCCL_NVLS_ENABLE", Some("0".to_string()), "sums in the switch depend on earlier allocations");
    if facts.spans_hosts {
        let network = facts.network.map(str::to_string);
        hint("NCCL_SOCKET_IFNAME", network, "network device by which NCCL finds other hosts");
    }
    if let Some(setting) = facts.tags.nccl_setting() {
        let reason = "algorithm with which the plan tags every all-reduce over NCCL; needs NCCL 2.24";
        hint("NCCL_ALGO", Some(setting), reason);
    }
    if facts.uses_all_to_all {
        let two = || Some("2".to_string());
        hint("NCCL_MIN_NCHANNELS", two(), "all-to-all: at least two channels");
        hint("NCCL_MIN_NRINGS", two(), "the same for older versions of NCCL");
    }
    out
}

fn keep_own(
    environment: &BTreeMap<String, String>,
    name: &'static str,
    value: Option<String>,
    reason: &'static str,
) -> RankVariable {
    // An empty value is a value: the user may have cleared a default.
    let (value, source) = match (environment.get(name), value) {
        (Some(own), _) => (own.clone(), VariableSource::Kept),
        (None, Some(value)) => (value, VariableSource::Set),
        (None, None) => (UNKNOWN.to_string(), VariableSource::Open),
    };
    RankVariable { name, value, source, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_the_user_is_kept_even_if_it_is_empty() {
        let own = BTreeMap::from([("A".to_string(), String::new())]);
        let of = |name, value: Option<&str>| keep_own(&own, name, value.map(str::to_string), "");
        assert_eq!(
            (of("A", Some("2")).value.as_str(), of("A", Some("2")).source),
            ("", VariableSource::Kept)
        );
        assert_eq!(
            (of("B", Some("2")).value.as_str(), of("B", Some("2")).source),
            ("2", VariableSource::Set)
        );
        assert_eq!(of("B", None).source, VariableSource::Open);
    }
}
