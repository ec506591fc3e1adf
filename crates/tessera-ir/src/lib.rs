//! The IR: types, the op table with one shape rule and one shard rule per op, text and its parser, a builder.
//!
//! Two dialects share everything: `toperator` (logical, global shapes) and `ttile` (one role, local shapes,
//! explicit collectives). This room knows no model, no strategy, no device, and runs nothing.

mod build;
mod bundle;
mod cost;
mod fragment;
mod ops;
mod parse;
mod print;
mod program;
pub mod rules;
mod types;
pub mod work;

pub use build::Builder;
pub use bundle::{Bundle, Phase, RoleRanks, Slots};
pub use cost::{Cost, cost};
pub use fragment::{Fragment, FragmentOp, Name, print_fragment};
pub use ops::{HINTS, Kind, OpRow, Opcode, TABLE};
pub use parse::{is_fragment, parse, parse_all, parse_fragment};
pub use print::{canonical, digest, print};
pub use program::{Attr, Attrs, Buffer, BufferId, Dialect, Op, Program, StreamId, Value, ValueId};
pub use types::{DType, Type};

use tessera_base::Code;

/// Codes this room raises.
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
