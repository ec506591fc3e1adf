//! Reads IR text.

use tessera_base::{Code, Diagnostics};

use crate::Program;

/// Syntax.
pub static T0201: Code = Code { id: "T0201", title: "IR text cannot be read", page: "" };
/// Unknown op.
pub static T0202: Code = Code { id: "T0202", title: "unknown op", page: "" };
/// Operands or constants.
pub static T0203: Code = Code { id: "T0203", title: "operands or constants do not fit the op", page: "" };
/// Undefined or redefined names.
pub static T0204: Code = Code { id: "T0204", title: "name is undefined or defined twice", page: "" };
/// Written type differs from the inferred one.
pub static T0205: Code = Code { id: "T0205", title: "written type differs from what the op gives", page: "" };

/// One program.
pub fn parse(_text: &str, _file: &str) -> Result<Program, Diagnostics> {
    Err(vec![])
}

/// All programs of a file.
pub fn parse_all(_text: &str, _file: &str) -> Result<Vec<Program>, Diagnostics> {
    Err(vec![])
}
