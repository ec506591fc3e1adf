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

fn is_zero(n: &u64) -> bool {
    *n == 0
}
