//! What the planner hands to the judge: every phase's programs, one per role, and which ranks play the role.

use tessera_mesh::{Mesh, Rank, RankMap};

use crate::Program;

/// The ranks that run one program of each phase.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleRanks {
    /// Name, such as `stage0` or `stage1@tp2`.
    pub role: String,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
}

/// One phase of a call: a program for each role, in the order of [`Bundle::roles`].
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Name and variant, such as `denoise.fill3`.
    pub name: String,
    /// A program per role; a role that has nothing to do in the phase has an empty program.
    pub programs: Vec<Program>,
    /// Where each program keeps its temporaries, in the order of `programs`.
    pub memory: Vec<Slots>,
}

/// Places for a program's temporaries: values whose lives do not meet share a slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slots {
    /// Size of each slot in bytes.
    pub bytes: Vec<u64>,
    /// Slot of each value, by value id. `None` for what needs no memory of its own: tokens, weights, inputs,
    /// call scalars, and views of buffers.
    pub of: Vec<Option<u32>>,
}

impl Slots {
    /// Bytes of all slots together: the peak of the program's temporaries.
    #[must_use]
    pub fn total(&self) -> tessera_base::Bytes {
        tessera_base::Bytes(self.bytes.iter().sum())
    }
}

/// Everything a run may execute, not yet judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Bundle {
    /// Mesh.
    pub mesh: Mesh,
    /// Devices in rank order.
    pub rank_map: RankMap,
    /// Roles; together they cover every rank once.
    pub roles: Vec<RoleRanks>,
    /// Phases in a fixed order.
    pub phases: Vec<Phase>,
    /// Calls that may be made: lists of phase names, in order.
    pub calls: Vec<(String, Vec<String>)>,
    /// The mapping's canonical text: what a person reads and edits, without paths.
    pub mapping: String,
}

impl Bundle {
    /// Index of the role that a rank plays.
    #[must_use]
    pub fn role_of(&self, rank: Rank) -> Option<usize> {
        self.roles.iter().position(|r| r.ranks.contains(&rank))
    }

    /// A phase by name.
    #[must_use]
    pub fn phase(&self, name: &str) -> Option<&Phase> {
        self.phases.iter().find(|p| p.name == name)
    }
}
