//! The intermediate representation (IR): types, the op table with a shape rule and a sharding rule
//! per op, the text form with its parser, and a builder.
//!
//! Both dialects share these parts: `toperator` (logical, global shapes) and `ttile` (one role,
//! local shapes, explicit collectives). This library crate has no notion of models, strategies and
//! devices, and does not execute anything.

pub mod analytic_model;
mod builder;
mod bundle;
mod cost;
mod fragment;
mod op_table;
mod parse;
mod print;
mod program;
pub mod rules;
mod types;

pub use builder::Builder;
pub use bundle::{Bundle, Phase, RoleRanks, Slots};
pub use cost::{OpWorkload, op_workload};
pub use fragment::{Fragment, FragmentOp, SpannedName, print_fragment};
pub use op_table::{HINT_ATTRS, OP_TABLE, OpKind, OpRow, Opcode};
pub use parse::{is_fragment, parse, parse_all, parse_fragment};
pub use print::{canonical_text, print, program_digest};
pub use program::{Attr, Attrs, Buffer, BufferId, Dialect, Op, Program, StreamId, Value, ValueId};
pub use types::{DType, Type};

use tessera_base::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[
    &parse::T0201,
    &parse::T0202,
    &parse::T0203,
    &parse::T0204,
    &parse::T0205,
    &fragment::T0206,
    &rules::T0210,
    &rules::T0211,
    &rules::T0212,
    &rules::T0213,
    &rules::T0214,
    &rules::T0215,
];
