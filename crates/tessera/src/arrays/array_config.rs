//! The configuration that the launcher of array programs sends to every rank.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_report::record::RunDevice;

use super::array_weights::ArrayWeightsPlace;
use crate::cuda::GpuRankConfig;
use crate::rank_config::RankSettings;

/// The configuration of every rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ArrayConfig {
    /// Folder of the sealed plan: `plan` in the run directory.
    pub(crate) plan: PathBuf,
    /// Digest of the sealed plan as hex digits; a rank that reads another plan fails with T0012.
    pub(crate) digest: String,
    /// Safetensors file with the weights, which every rank maps while it loads; the path is absolute.
    pub(crate) weights: PathBuf,
    /// Directory to which the run writes its record.
    pub(crate) out: PathBuf,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// Whether each rank writes the messages that it sends to a file.
    pub(crate) wire_dump: bool,
    /// Whether each rank reports the times of single ops with every call.
    pub(crate) times_single_ops: bool,
    /// GPU configuration of the ranks; `None` if they run on CPUs.
    pub(crate) gpus: Option<GpuRankConfig>,
    /// Where the leader meets the other ranks; `None` if the launcher starts all of them.
    pub(crate) rendezvous: Option<ArrayRendezvous>,
}

/// What rank 0 sends to the ranks that join it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinOrders {
    /// Ids of the communicators of GPUs, in plan order; empty on CPUs.
    pub(crate) communicator_ids: Vec<String>,
    /// Whether each rank reports the times of single ops with every call.
    pub(crate) times_single_ops: bool,
}

/// Where and how the ranks of a run meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayRendezvous {
    /// Host and port where rank 0 listens.
    pub master: (String, u16),
    /// Address of this host to listen on instead of the default.
    pub bind: Option<IpAddr>,
    /// File with the shared secret of the run.
    pub secret: PathBuf,
    /// Maximum time to wait for the other ranks.
    pub timeout: Duration,
}

impl ArrayRendezvous {
    /// Parses the host and the port of rank 0, as `head.example:29500` or `[::1]:29500`.
    #[must_use]
    pub fn parse_master(text: &str) -> Option<(String, u16)> {
        let (host, port) = text.rsplit_once(':')?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let is_host = !host.is_empty() && (bare.is_some() || !host.contains(':'));
        is_host.then_some(())?;
        Some((bare.unwrap_or(host).to_string(), port.parse().ok()?))
    }
}

impl ArrayConfig {
    /// Returns the kind of device on which the ranks run.
    pub(crate) fn device(&self) -> RunDevice {
        if self.gpus.is_some() { RunDevice::Cuda } else { RunDevice::Cpu }
    }

    /// Returns what rank 0 sends to the ranks of other hosts.
    pub(crate) fn join_orders(&self) -> JoinOrders {
        JoinOrders {
            communicator_ids: self.gpus.as_ref().map_or(Vec::new(), |gpus| gpus.communicator_ids.clone()),
            times_single_ops: self.times_single_ops,
        }
    }

    /// Returns where a rank finds the weights.
    pub(crate) fn weights_place(&self) -> ArrayWeightsPlace {
        ArrayWeightsPlace::File(self.weights.clone())
    }

    /// Returns the settings that do not depend on the kind of the model.
    pub(crate) fn settings(&self) -> RankSettings<'_> {
        RankSettings {
            out: &self.out,
            threads: self.threads,
            wire_dump: self.wire_dump,
            poison: false,
            times_single_ops: self.times_single_ops,
            gpus: self.gpus.as_ref(),
            drill: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_is_a_host_and_a_port() {
        let parse = ArrayRendezvous::parse_master;
        assert_eq!(parse("head.example:29500"), Some(("head.example".to_string(), 29_500)));
        assert_eq!(parse("[::1]:7"), Some(("::1".to_string(), 7)));
        for wrong in ["head.example", "head:", ":7", "::1:7", "head:70000", "head:-1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
