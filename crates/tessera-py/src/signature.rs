//! What a caller of a program must know of it: its inputs and outputs in order.

use tessera::arrays::{ArrayFunction, ArrayPlan, FunctionOutput};
use tessera_ir::{Opcode, Program};
use tessera_mesh::{DimName, Rank};

/// The name of the single output of a function that returns one array.
pub(crate) const ONLY_OUTPUT: &str = "out";

/// The inputs and outputs of a program of a plan.
#[derive(Debug, Clone)]
pub(crate) struct Signature {
    pub(crate) name: String,
    /// Names and whole shapes of the inputs, in order.
    pub(crate) inputs: Vec<(String, Vec<u64>)>,
    pub(crate) outputs: Vec<FunctionOutput>,
    /// Whether a call returns one array, and no tuple.
    pub(crate) returns_one: bool,
}

impl Signature {
    /// Returns the signature of a function.
    pub(crate) fn from_function(function: &ArrayFunction) -> Signature {
        Signature {
            name: function.program.name.clone(),
            inputs: function.inputs(),
            outputs: function.outputs.clone(),
            returns_one: function.returns_one,
        }
    }

    /// Returns the signatures of the programs of a plan. A plan names no dims: they have the names of weights.
    pub(crate) fn list_of_plan(plan: &ArrayPlan) -> Vec<Signature> {
        let names = plan.program_names().map(str::to_string);
        let signature = |name: String| {
            let program = find_program(plan, &name, 0)?;
            let arrays = |opcode| {
                program.ops.iter().filter(move |op| op.opcode == opcode).filter_map(|op| {
                    let value = op.results.first().or(op.operands.first())?;
                    let ty = program.type_of(*value);
                    Some((op.name.clone()?, ty.layout.global_shape(&ty.shape, &program.mesh)))
                })
            };
            let outputs = arrays(Opcode::Output).map(|(name, shape)| FunctionOutput {
                name,
                dims: DimName::of_weight(shape.len()).unwrap_or_default(),
                units: vec![1; shape.len()],
                shards: None,
            });
            let outputs: Vec<FunctionOutput> = outputs.collect();
            let returns_one = matches!(&outputs[..], [only] if only.name == ONLY_OUTPUT);
            Some(Signature { name, inputs: arrays(Opcode::Input).collect(), outputs, returns_one })
        };
        names.filter_map(signature).collect()
    }
}

/// Returns a program of a rank.
pub(crate) fn find_program<'a>(plan: &'a ArrayPlan, name: &str, rank: u32) -> Option<&'a Program> {
    plan.sealed.rank_program(&format!("array.{name}"), Rank(rank)).map(|program| &**program)
}
