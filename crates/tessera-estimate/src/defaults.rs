//! Defaults of a planning query: machine, workload, batch size and sequence length. Application
//! crates pass `None` for options that the user did not give; only this file replaces them.

use tessera_cost::MachineModel;
use tessera_cost::moe::Routing;
use tessera_plan::search::{Job, Objective};

/// Default machine for models of the zoo and for recipes.
pub const DEFAULT_RACK: &str = "gb200-nvl72";
/// Default machine for a model from a folder or a file, such as the user's own language model or a
/// video model.
pub const DEFAULT_HOST: &str = "hgx-h200";
/// Default machine for ranks on CPUs.
pub const CPU_HOST: &str = "laptop";
/// Objective of a search for which none was chosen: throughput.
pub(crate) const DEFAULT_OBJECTIVE: Objective = Objective::Throughput;
/// Default routing: every token is an independent draw, which is the best that a router trained for
/// balance achieves.
pub(crate) const DEFAULT_ROUTING: Routing = Routing::Random;
/// Default number of tokens of a sequence, or in its cache.
const DEFAULT_TOKENS: u64 = 4096;

/// The kind of a workload, without its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JobKind {
    /// Runs training steps: forward, backward and optimizer.
    Train,
    /// Processes prompts up to the first token.
    Prefill,
    /// Generates one token for each sequence of a batch.
    #[default]
    Decode,
}

impl JobKind {
    /// Returns the default number of concurrent sequences per device.
    fn batch_per_device(self) -> u64 {
        match self {
            JobKind::Train => 16,
            JobKind::Prefill => 2,
            JobKind::Decode => 64,
        }
    }
}

/// Builds a job for `devices` devices, by default all devices of the machine. The default batch is
/// proportional to the number of devices, and the default sequence has 4,096 tokens.
#[must_use]
pub fn job_with_defaults(
    kind: JobKind,
    batch: Option<u64>,
    tokens: Option<u64>,
    machine: &MachineModel,
    devices: Option<u32>,
) -> Job {
    let devices = u64::from(devices.unwrap_or(machine.cluster.device_count()));
    let batch = batch.unwrap_or(kind.batch_per_device() * devices);
    let tokens = tokens.unwrap_or(DEFAULT_TOKENS);
    match kind {
        JobKind::Train => Job::Train { batch, sequence: tokens },
        JobKind::Prefill => Job::Prefill { batch, sequence: tokens },
        JobKind::Decode => Job::Decode { batch, context: tokens },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::machine::load_machine;

    #[test]
    fn default_batch_scales_with_devices() {
        let m = load_machine(DEFAULT_RACK, None, None).unwrap();
        assert_eq!(
            job_with_defaults(JobKind::Decode, None, None, &m, None),
            Job::Decode { batch: 64 * 72, context: 4096 }
        );
        let train = job_with_defaults(JobKind::Train, None, Some(8192), &m, Some(8));
        assert_eq!(train, Job::Train { batch: 128, sequence: 8192 });
        assert_eq!(
            job_with_defaults(JobKind::Prefill, Some(3), None, &m, Some(8)),
            Job::Prefill { batch: 3, sequence: 4096 }
        );
    }
}
