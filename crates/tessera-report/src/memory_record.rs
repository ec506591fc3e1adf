//! The memory of ranks in a run's record: what they allocated, beside what the plan states.

use serde::{Deserialize, Serialize};

/// Memory of a rank's backend, measured at its allocations, beside the plan's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryRecord {
    /// Bytes of weights, buffers and temporaries in the sealed plan.
    pub planned_bytes: u64,
    /// Bytes that the backend allocated for them.
    pub allocated_bytes: u64,
    /// Bytes allocated beyond the plan: scratch memory, tables and copies of outputs.
    pub workspace_bytes: u64,
    /// Largest sum of allocated and workspace bytes since the start of the rank.
    pub peak_bytes: u64,
    /// Bytes allocated for temporaries that no phase of the call wrote.
    pub unused_bytes: u64,
    /// Results since the start of the rank that reused the memory of an earlier result.
    pub slot_reuses: u64,
}

/// Maximum deviation of allocated memory from the plan, in per cent.
pub const MEMORY_TOLERANCE_PERCENT: f64 = 5.0;

impl MemoryRecord {
    /// Returns by how many per cent the allocated bytes exceed the planned ones; negative if they
    /// are fewer. Without a plan, returns 0.
    #[must_use]
    pub fn deviation_percent(&self) -> f64 {
        match self.planned_bytes {
            0 => 0.0,
            planned => 100.0 * (self.allocated_bytes as f64 - planned as f64) / planned as f64,
        }
    }

    /// Returns whether allocated and planned bytes agree within [`MEMORY_TOLERANCE_PERCENT`].
    #[must_use]
    pub fn agrees_with_plan(&self) -> bool {
        self.deviation_percent().abs() <= MEMORY_TOLERANCE_PERCENT
    }
}

/// What a rank had allocated after the warm-up, which runs every program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartupMemory {
    /// Rank that allocated the memory.
    pub rank: u32,
    /// The rank's memory.
    pub memory: MemoryRecord,
    /// Temporaries of each phase, in order of the phases.
    pub phases: Vec<PhaseMemory>,
}

/// Temporaries of one phase on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseMemory {
    /// Name of the phase.
    pub phase: String,
    /// Bytes of the phase's slots in the sealed plan.
    pub planned_bytes: u64,
    /// Bytes of slots that the phase wrote.
    pub written_bytes: u64,
}
