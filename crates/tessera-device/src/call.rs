//! What a call brings to a program, and whether it brings all that the program reads.

use std::collections::BTreeMap;

use tessera_base::Code;
use tessera_ir::{DType, Op, Opcode, Program};

use crate::Fault;

/// A call that does not bring what a program reads.
pub static T0802: Code = Code {
    id: "T0802",
    title: "call does not bring what the program reads",
    page: "A program reads its call scalars and input tensors by name. One is missing, has the wrong kind, or the wrong \
number of elements. Leader and worker validate envelopes against the plan before this can happen; seen here it means that \
the plan and the programs differ.",
};

/// A scalar of a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Scalar {
    /// A whole number.
    I64(i64),
    /// A number.
    F32(f32),
    /// One number per latent frame.
    F32s(Vec<f32>),
}

/// What a call brings to a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallData<'a> {
    /// Scalars by name.
    pub scalars: BTreeMap<&'a str, Scalar>,
    /// Whole tensors by name, row-major f32.
    pub inputs: BTreeMap<&'a str, &'a [f32]>,
}

/// Whether the call brings what a source op reads: there, of its kind, as many numbers as its type has.
///
/// # Errors
/// T0802 in a [`Fault::Failed`].
pub fn brought(p: &Program, op: &Op, call: &CallData<'_>) -> Result<(), Fault> {
    let (name, ty) = (op.name.as_deref().unwrap_or_default(), p.ty(op.results[0]));
    let fault = |found: &str| {
        let want = match (op.opcode, ty.dtype) {
            (Opcode::Call, DType::I64) => "a whole number".to_string(),
            _ => format!("{} numbers", ty.elements()),
        };
        let id = T0802.id;
        Err(Fault::Failed(format!("{id}: @{} reads {want} as `{name}`, the call brings {found}", p.name)))
    };
    let found = match (op.opcode, call.scalars.get(name), call.inputs.get(name)) {
        (Opcode::Input, _, Some(values)) => values.len(),
        (Opcode::Call, Some(Scalar::I64(_)), _) if ty.dtype == DType::I64 => return Ok(()),
        (Opcode::Call, Some(Scalar::I64(_)), _) => return fault("a whole number"),
        (Opcode::Call, Some(Scalar::F32(_)), _) if ty.dtype != DType::I64 => 1,
        (Opcode::Call, Some(Scalar::F32s(values)), _) if ty.dtype != DType::I64 => values.len(),
        (Opcode::Call, Some(_), _) => return fault("numbers that need not be whole"),
        _ => return fault("nothing"),
    };
    if found as u64 == ty.elements() { Ok(()) } else { fault(&found.to_string()) }
}
