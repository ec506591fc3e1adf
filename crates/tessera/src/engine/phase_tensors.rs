//! The tensors of a call as the program of a phase reads and returns them: whole in the call, and shards in the
//! program.

use std::collections::BTreeMap;

use tessera_device::MeshRank;
use tessera_ir::{DType, Opcode, Program};
use tessera_runtime::engine::EngineFault;
use tessera_runtime::program_index::{ArgKind, InputSpec, PhaseKind};
use tessera_runtime::wire::{Dtype, Tensor, Tensors};

use crate::shard_copy::ArrayShard;

/// Returns the name that an input or an output of a phase has among the tensors of a call. The names in array programs
/// are a user's choice, and several programs may choose the same, so those of a call name the program too.
pub(crate) fn call_tensor_name(phase: &str, name: &str) -> String {
    match PhaseKind::from_program(phase) {
        Some(PhaseKind::Array) => format!("{phase}.{name}"),
        _ => name.to_string(),
    }
}

/// Adds the scalars and the inputs that a program of a phase reads.
pub(super) fn collect_sources(
    phase: &str,
    p: &Program,
    scalars: &mut BTreeMap<String, ArgKind>,
    inputs: &mut BTreeMap<String, InputSpec>,
) {
    for op in &p.ops {
        let (Some(name), Some(v)) = (op.name.clone(), op.results.first()) else { continue };
        let ty = p.type_of(*v);
        match op.opcode {
            Opcode::Call => {
                let kind = match (ty.dtype, &ty.shape[..]) {
                    (DType::I64, _) => ArgKind::I64,
                    (_, []) => ArgKind::F32,
                    (_, shape) => ArgKind::F32s(shape.iter().product::<u64>() as u32),
                };
                scalars.insert(name, kind);
            }
            Opcode::Input => {
                let name = call_tensor_name(phase, &name);
                let shape = ty.layout.global_shape(&ty.shape, &p.mesh);
                inputs.insert(name.clone(), InputSpec { name, dtype: Dtype::F32, shape });
            }
            _ => {}
        }
    }
}

/// An input of the program of a phase.
pub(super) struct PhaseInput {
    /// Name in the program.
    pub(super) name: String,
    /// Name among the tensors of a call.
    tensor: String,
    /// Number of values that this rank reads.
    count: u64,
    /// The part of the tensor that this rank reads; `None` for the whole.
    shard: Option<ArrayShard>,
}

impl PhaseInput {
    /// Lists the inputs of a program of a rank.
    pub(super) fn list(phase: &str, program: &Program, seat: &MeshRank) -> Vec<PhaseInput> {
        let inputs = program.ops.iter().filter(|op| op.opcode == Opcode::Input);
        let inputs = inputs.filter_map(|op| {
            let (name, ty) = (op.name.clone()?, program.type_of(*op.results.first()?));
            let shard = (!ty.layout.is_replicated()).then(|| ArrayShard {
                whole: ty.layout.global_shape(&ty.shape, &seat.mesh),
                ranges: ty.layout.global_ranges(&ty.shape, &seat.mesh, seat.coord()),
            });
            Some(PhaseInput {
                tensor: call_tensor_name(phase, &name),
                name,
                count: ty.element_count(),
                shard,
            })
        });
        inputs.collect()
    }

    /// Copies the values that this rank reads out of the tensors of a call. A warm-up carries no arrays of array
    /// programs, whose values are zeros then.
    ///
    /// # Errors
    /// A failure of this rank if the tensor is missing, or has another shape than the one whose shards ranks read.
    pub(super) fn read(&self, inputs: &Tensors, is_warmup: bool) -> Result<Vec<f32>, EngineFault> {
        let fail = |text: String| Err(EngineFault::local_failure(text));
        let Some(tensor) = inputs.get(&self.tensor) else {
            if is_warmup && self.tensor != self.name {
                return Ok(vec![0.0; self.count as usize]);
            }
            return fail(format!("the call carries no tensor `{}`", self.tensor));
        };
        let Some(shard) = &self.shard else {
            return tensor.to_f32().map_or_else(
                || fail(format!("the tensor `{}` of the call holds integers", self.tensor)),
                Ok,
            );
        };
        let found = tensor.manifest_entry();
        if (found.dtype, &found.shape) != (Dtype::F32, &shard.whole) {
            let (expected, found) = (&shard.whole, found.type_text());
            return fail(format!(
                "ranks read shards of `{}`: f32{expected:?}, but the call carries {found}",
                self.tensor
            ));
        }
        let elements = shard.copy_from(tensor.data().as_chunks::<4>().0);
        Ok(elements.into_iter().map(f32::from_le_bytes).collect())
    }
}

/// An output of the program of a phase.
pub(super) struct PhaseOutput {
    /// Name in the program.
    pub(super) name: String,
    /// Name among the tensors of a call.
    pub(super) tensor: String,
    /// Extents on this rank: of its shard, if the output is sharded.
    pub(super) shape: Vec<u64>,
}

impl PhaseOutput {
    /// Lists the outputs of a program, in order.
    pub(super) fn list(phase: &str, program: &Program) -> Vec<PhaseOutput> {
        let outputs = program.ops.iter().filter(|op| op.opcode == Opcode::Output);
        let outputs = outputs.filter_map(|op| {
            let (name, shape) = (op.name.clone()?, program.type_of(*op.operands.first()?).shape.clone());
            Some(PhaseOutput { tensor: call_tensor_name(phase, &name), name, shape })
        });
        outputs.collect()
    }
}

/// Adds an output of a phase to those of its call: behind the rows of one with the same name, if there is one.
pub(super) fn add_output(outputs: &mut Vec<Tensor>, output: Tensor) -> Result<(), tessera_base::Diagnostic> {
    match outputs.iter_mut().find(|of_call| of_call.name() == output.name()) {
        Some(of_call) => *of_call = of_call.with_rows_of(&output)?,
        None => outputs.push(output),
    }
    Ok(())
}
