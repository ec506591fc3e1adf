//! The device memory of each role of a bundle: in the dtypes of its programs, or in the executor's
//! precision if the programs are all f32.

use std::collections::BTreeMap;

use tessera_base::Bytes;
use tessera_ir::{Bundle, DType, Opcode, Type};
use tessera_mesh::Precision;

use crate::DtypePolicy;

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
}

/// Returns the memory of one rank of each role, in the order of the bundle's roles. If the
/// mapping's dtype is f32, f32 values are stored at `precision`, the executor's; otherwise at the
/// dtypes of the programs.
#[must_use]
pub fn memory_by_role(bundle: &Bundle, dtype: DtypePolicy, precision: Precision) -> Vec<RankMemory> {
    let precision = storage_precision(dtype, precision);
    (0..bundle.roles.len()).map(|role| role_memory(bundle, role, precision)).collect()
}

fn role_memory(bundle: &Bundle, role: usize, precision: Precision) -> RankMemory {
    let kept = |ty: &Type| {
        let full = ty.byte_size();
        if ty.dtype == DType::F32 { scale_to_precision(full, precision).0 } else { full.0 }
    };
    // Phases that read a tensor of the same name share it.
    let (mut weights, mut buffers, mut inputs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut temporaries = 0;
    for phase in &bundle.phases {
        let program = &phase.programs[role];
        for op in &program.ops {
            let (Some(name), Some(result)) = (op.name.as_deref(), op.results.first()) else { continue };
            let bytes = kept(program.type_of(*result));
            match op.opcode {
                Opcode::Weight => weights.insert((name, op.weight_load()), bytes),
                Opcode::Input => inputs.insert(name, bytes),
                _ => None,
            };
        }
        buffers.extend(program.buffers.iter().map(|b| (b.name.as_str(), kept(&b.ty))));
        temporaries = temporaries.max(phase.slots[role].total_bytes().0);
    }
    let sum = |of: BTreeMap<&str, u64>| Bytes(of.into_values().sum());
    RankMemory {
        weights: Bytes(weights.into_values().sum()),
        buffers: sum(buffers),
        inputs: sum(inputs),
        temporaries: scale_to_precision(Bytes(temporaries), precision),
    }
}

/// Returns the precision at which f32 values are stored: the executor's, `precision`, if the
/// mapping's dtype is f32, and f32 otherwise.
pub(super) fn storage_precision(dtype: DtypePolicy, precision: Precision) -> Precision {
    if dtype == DtypePolicy::F32 { precision } else { Precision::F32 }
}

/// Returns the bytes of f32 values when they are stored at a precision.
pub(super) fn scale_to_precision(full: Bytes, precision: Precision) -> Bytes {
    let scale = precision.element_bytes() / Precision::F32.element_bytes();
    Bytes((full.0 as f64 * scale).ceil() as u64)
}
