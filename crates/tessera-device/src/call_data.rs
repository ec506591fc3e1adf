//! The data that a call passes to a program, and the check that this data is complete.

use std::collections::BTreeMap;

use tessera_ir::{DType, Op, Opcode, Program};

use crate::Fault;
use crate::codes::T0802;

/// A scalar of a call, or one number per latent frame.
#[derive(Debug, Clone, PartialEq)]
pub enum Scalar {
    /// One integer for the whole call.
    I64(i64),
    /// One number for all latent frames.
    F32(f32),
    /// One number per latent frame.
    F32s(Vec<f32>),
}

/// The data that a call passes to a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CallData<'a> {
    /// Call scalars, by the name that the program's `call` ops give.
    pub scalars: BTreeMap<&'a str, Scalar>,
    /// Global input tensors by name, row-major f32.
    pub inputs: BTreeMap<&'a str, &'a [f32]>,
}

/// Checks that the call provides the value that a source op reads, with the right type and number
/// of elements.
///
/// # Errors
/// T0802 in a [`Fault::Failed`].
pub fn check_input(p: &Program, op: &Op, call: &CallData<'_>) -> Result<(), Fault> {
    let (name, ty) = (op.name.as_deref().unwrap_or_default(), p.type_of(op.results[0]));
    let fault = |found: &str| {
        let want = match (op.opcode, ty.dtype) {
            (Opcode::Call, DType::I64) => "an integer".to_string(),
            _ => format!("{} numbers", ty.element_count()),
        };
        let id = T0802.id;
        Err(Fault::Failed(format!(
            "{id}: @{} reads {want} as `{name}`, but the call provides {found}",
            p.name
        )))
    };
    let found = match (op.opcode, call.scalars.get(name), call.inputs.get(name)) {
        (Opcode::Input, _, Some(values)) => values.len(),
        (Opcode::Call, Some(Scalar::I64(_)), _) if ty.dtype == DType::I64 => return Ok(()),
        (Opcode::Call, Some(Scalar::I64(_)), _) => return fault("an integer"),
        (Opcode::Call, Some(Scalar::F32(_)), _) if ty.dtype != DType::I64 => 1,
        (Opcode::Call, Some(Scalar::F32s(values)), _) if ty.dtype != DType::I64 => values.len(),
        (Opcode::Call, Some(_), _) => return fault("floating-point numbers"),
        _ => return fault("nothing"),
    };
    if found as u64 == ty.element_count() { Ok(()) } else { fault(&found.to_string()) }
}
