//! What a question takes where nobody says: the machine, the job, its batch and the length of a sequence. Doors leave open
//! what they were not told, and this is the one place that fills it in.

use tessera_cost::Machine;
use tessera_cost::moe::Routing;
use tessera_plan::search::{Job, Objective};

/// Machine of a model of the zoo and of recipes.
pub const RACK: &str = "gb200-nvl72";
/// Machine of a model from a folder or a file: a language model of one's own, or a video model.
pub const HOST: &str = "hgx-h200";
/// What is wanted.
pub(super) const OBJECTIVE: Objective = Objective::Throughput;
/// What a router that is trained to balance gives at best: every token an independent draw.
pub(super) const ROUTING: Routing = Routing::Random;
/// Tokens of a sequence, or already in its cache.
const TOKENS: u64 = 4096;

/// What the ranks do, without its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JobKind {
    /// Steps of training.
    Train,
    /// Prompts in, first token out.
    Prefill,
    /// One token for each of many sequences.
    #[default]
    Decode,
}

impl JobKind {
    /// Sequences at once on each device.
    fn batch(self) -> u64 {
        match self {
            JobKind::Train => 16,
            JobKind::Prefill => 2,
            JobKind::Decode => 64,
        }
    }
}

/// A job on so many devices of a machine, all of them where absent: a batch for the number of devices, and sequences of 4,096
/// tokens.
#[must_use]
pub fn job(
    kind: JobKind,
    batch: Option<u64>,
    tokens: Option<u64>,
    machine: &Machine,
    devices: Option<u32>,
) -> Job {
    let devices = u64::from(devices.unwrap_or(machine.cluster.devices()));
    let batch = batch.unwrap_or(kind.batch() * devices);
    let tokens = tokens.unwrap_or(TOKENS);
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
    use crate::search::machine;

    #[test]
    fn what_nobody_says_follows_the_devices() {
        let m = machine(RACK, None, None).unwrap();
        assert_eq!(job(JobKind::Decode, None, None, &m, None), Job::Decode { batch: 64 * 72, context: 4096 });
        let train = job(JobKind::Train, None, Some(8192), &m, Some(8));
        assert_eq!(train, Job::Train { batch: 128, sequence: 8192 });
        assert_eq!(
            job(JobKind::Prefill, Some(3), None, &m, Some(8)),
            Job::Prefill { batch: 3, sequence: 4096 }
        );
    }
}
