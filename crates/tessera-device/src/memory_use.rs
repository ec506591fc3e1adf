//! The memory that a backend has allocated, as its own allocations count it.

/// Memory that a backend holds, measured at its allocations and not taken from a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Bytes allocated for what a plan states: weights, buffers and temporaries.
    pub allocated_bytes: u64,
    /// Bytes allocated beyond the plan: scratch memory of kernels, tables, and copies of outputs.
    pub workspace_bytes: u64,
    /// Largest sum of the two so far, in bytes.
    pub peak_bytes: u64,
    /// Bytes allocated for temporaries, which all programs share.
    pub temporary_bytes: u64,
    /// Bytes of temporaries that the last run wrote; a slot counts once, with the largest value that
    /// it held.
    pub run_temporary_bytes: u64,
    /// Number of results so far that an op wrote into memory that an earlier result of the same run
    /// had occupied.
    pub slot_reuses: u64,
}
