//! The device memory of each role of a bundle, in the dtypes of its programs.

use std::collections::BTreeMap;

use tessera_base::Bytes;
use tessera_ir::{Bundle, Opcode};

/// Device memory of a rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankMemory {
    /// Bytes of the rank's shards of all weights; phases that load the same weight share it.
    pub weights: Bytes,
    /// Bytes of caches and latents.
    pub buffers: Bytes,
    /// Bytes of the tensors that a call brings; phases share an input of the same name.
    pub inputs: Bytes,
    /// Bytes of the slots of the largest phase.
    pub temporaries: Bytes,
}

impl RankMemory {
    /// Returns the sum of all fields.
    #[must_use]
    pub fn total_bytes(&self) -> Bytes {
        [self.weights, self.buffers, self.inputs, self.temporaries].into_iter().sum()
    }

    /// Returns the memory of a rank that also runs phases with weights and buffers of their own. Temporaries
    /// and inputs of one phase are free when the next one runs.
    pub(super) fn with_phases(&self, other: &RankMemory) -> RankMemory {
        RankMemory {
            weights: Bytes(self.weights.0 + other.weights.0),
            buffers: Bytes(self.buffers.0 + other.buffers.0),
            inputs: self.inputs.max(other.inputs),
            temporaries: self.temporaries.max(other.temporaries),
        }
    }
}

/// Returns the memory of one rank of each role, in the order of the bundle's roles.
#[must_use]
pub fn memory_by_role(bundle: &Bundle) -> Vec<RankMemory> {
    (0..bundle.roles.len()).map(|role| role_memory(bundle, role)).collect()
}

/// Returns the bytes of host memory that the experts with two tiers of a rank take, for the rank with the most.
#[must_use]
pub fn host_expert_bytes(bundle: &Bundle) -> Bytes {
    let of_role = |role: usize| {
        // Phases that read a weight of the same name share it.
        let mut experts = BTreeMap::new();
        for program in bundle.phases.iter().map(|phase| &phase.programs[role]) {
            for op in program.ops.iter().filter(|op| op.expert_tier().is_some()) {
                experts.extend(op.results.first().map(|v| (&op.name, program.type_of(*v).byte_size())));
            }
        }
        experts.into_values().sum()
    };
    (0..bundle.roles.len()).map(of_role).max().unwrap_or_default()
}

fn role_memory(bundle: &Bundle, role: usize) -> RankMemory {
    // Phases that read a tensor of the same name share it.
    let (mut weights, mut buffers, mut inputs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut temporaries = 0;
    for phase in &bundle.phases {
        let program = &phase.programs[role];
        for op in &program.ops {
            let (Some(name), Some(result)) = (op.name.as_deref(), op.results.first()) else { continue };
            let ty = program.type_of(*result);
            let bytes = ty.byte_size().0;
            match op.opcode {
                Opcode::Weight => weights.insert((name, op.weight_load()), op.weight_bytes(ty).0),
                Opcode::Input => inputs.insert(name, bytes),
                _ => None,
            };
        }
        buffers.extend(program.buffers.iter().map(|b| (b.name.as_str(), b.ty.byte_size().0)));
        temporaries = temporaries.max(phase.slots[role].total_bytes().0);
    }
    let sum = |of: BTreeMap<&str, u64>| Bytes(of.into_values().sum());
    RankMemory {
        weights: Bytes(weights.into_values().sum()),
        buffers: sum(buffers),
        inputs: sum(inputs),
        temporaries: Bytes(temporaries),
    }
}
