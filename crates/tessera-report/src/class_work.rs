//! The work of a phase by class of op, as a record states it.

use serde::{Deserialize, Serialize};

/// Work of all ops of one class in a phase.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClassWork {
    /// Name of the class, such as `matmul` or `all_reduce tp`.
    pub class: String,
    /// Number of ops of the class that the phase ran.
    pub ops: u32,
    /// Time of these ops in nanoseconds, with waits for other ranks.
    pub ns: u64,
    /// Bytes that the rank passed to other ranks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sent_bytes: u64,
}

/// First words of the classes of collectives, behind which the axis stands.
const COLLECTIVES: [&str; 8] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "halo_exchange",
    "broadcast",
    "send",
    "recv",
];

impl ClassWork {
    /// Returns whether the class is that of a collective, whose time includes waits for other ranks.
    #[must_use]
    pub fn is_collective(&self) -> bool {
        self.class.split(' ').next().is_some_and(|word| COLLECTIVES.contains(&word))
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}
