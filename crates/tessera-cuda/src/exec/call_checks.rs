//! Checks the data of a call on the host, where a kernel could only read outside its operands.

use tessera_device::{CallData, Fault, Scalar};
use tessera_ir::{OpView, Opcode, Program, ValueId};

use super::PreparedProgram;

/// Checks the ids of a call that name rows of a table, and the lengths of its attentions with a bias by
/// distance.
pub(super) fn check_ids_and_lengths(program: &PreparedProgram, call: &CallData<'_>) -> Result<(), Fault> {
    let p = &*program.program;
    program.views.iter().try_for_each(|view| match view {
        OpView::Embed(v) => check_ids(p, v.ids, p.type_of(v.table).shape[0], call),
        OpView::RelativeAttention(v) => check_length(p, v.length, p.type_of(v.k).shape[0], call),
        _ => Ok(()),
    })
}

/// Ids that an op computes are not known here; the kernel yields NaN for those that name no row.
fn check_ids(p: &Program, ids: ValueId, rows: u64, call: &CallData<'_>) -> Result<(), Fault> {
    let Some(ids) = source_name(p, ids, Opcode::Input).and_then(|name| call.inputs.get(name)) else {
        return Ok(());
    };
    match ids.iter().find(|id| id.fract() != 0.0 || !(0.0..rows as f32).contains(*id)) {
        Some(id) => Err(Fault::Failed(format!("id {id} is not a row of a table with {rows} rows"))),
        None => Ok(()),
    }
}

fn check_length(p: &Program, length: ValueId, keys: u64, call: &CallData<'_>) -> Result<(), Fault> {
    let given = source_name(p, length, Opcode::Call).and_then(|name| call.scalars.get(name));
    match given {
        Some(Scalar::I64(n)) if !(1..=keys as i64).contains(n) => {
            Err(Fault::Failed(format!("`length` is {n}, but there are {keys} keys")))
        }
        _ => Ok(()),
    }
}

/// Returns the name of the input or the call scalar that a value is.
fn source_name(p: &Program, value: ValueId, opcode: Opcode) -> Option<&str> {
    let op = p.ops.iter().find(|op| op.opcode == opcode && op.results.first() == Some(&value))?;
    op.name.as_deref()
}
