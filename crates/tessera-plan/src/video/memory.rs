//! What each role of a bundle keeps in the memory of a device: in the dtypes of its programs, or in the executor's precision
//! where they are all f32.

use std::collections::BTreeMap;

use tessera_base::Bytes;
use tessera_ir::{Bundle, DType, Opcode, Type};
use tessera_mesh::Precision;

use crate::DtypePolicy;

/// Bytes that a rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankBytes {
    /// Weights.
    pub weights: Bytes,
    /// Caches and latents.
    pub buffers: Bytes,
    /// What calls bring.
    pub inputs: Bytes,
    /// Slots of the largest phase.
    pub temporaries: Bytes,
}

impl RankBytes {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Bytes {
        [self.weights, self.buffers, self.inputs, self.temporaries].into_iter().sum()
    }
}

/// Bytes of one rank of each role, in the order of the bundle's roles. Where the mapping's dtype is f32, f32 values are kept
/// at `precision`, the executor's; otherwise the programs' types say what is kept.
#[must_use]
pub fn bytes_of_roles(bundle: &Bundle, dtype: DtypePolicy, precision: Precision) -> Vec<RankBytes> {
    let precision = kept_at(dtype, precision);
    (0..bundle.roles.len()).map(|role| bytes_of(bundle, role, precision)).collect()
}

fn bytes_of(bundle: &Bundle, role: usize, precision: Precision) -> RankBytes {
    let kept = |ty: &Type| {
        let full = ty.bytes();
        if ty.dtype == DType::F32 { at_precision(full, precision).0 } else { full.0 }
    };
    // One tensor of a name, whatever phases read it.
    let (mut weights, mut buffers, mut inputs) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut temporaries = 0;
    for phase in &bundle.phases {
        let program = &phase.programs[role];
        for op in &program.ops {
            let (Some(name), Some(result)) = (op.name.as_deref(), op.results.first()) else { continue };
            let bytes = kept(program.ty(*result));
            match op.opcode {
                Opcode::Weight => weights.insert((name, op.str("load")), bytes),
                Opcode::Input => inputs.insert(name, bytes),
                _ => None,
            };
        }
        buffers.extend(program.buffers.iter().map(|b| (b.name.as_str(), kept(&b.ty))));
        temporaries = temporaries.max(phase.memory[role].total().0);
    }
    let sum = |of: BTreeMap<&str, u64>| Bytes(of.into_values().sum());
    RankBytes {
        weights: Bytes(weights.into_values().sum()),
        buffers: sum(buffers),
        inputs: sum(inputs),
        temporaries: at_precision(Bytes(temporaries), precision),
    }
}

/// What f32 values are kept at.
pub(super) fn kept_at(dtype: DtypePolicy, precision: Precision) -> Precision {
    if dtype == DtypePolicy::F32 { precision } else { Precision::F32 }
}

/// Bytes of f32 values when they are kept at a precision.
pub(super) fn at_precision(full: Bytes, precision: Precision) -> Bytes {
    let scale = precision.bytes() / Precision::F32.bytes();
    Bytes((full.0 as f64 * scale).ceil() as u64)
}
