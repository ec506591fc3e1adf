//! The intermediate representation (IR): types, the op table with a shape rule and a sharding rule
//! per op, the text form with its parser, and a builder.
//!
//! Both dialects share these parts: `toperator` (logical, global shapes) and `ttile` (one role,
//! local shapes, explicit collectives). This library crate has no notion of models, strategies and
//! devices, and does not execute anything.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod analytic_model;
mod attr;
mod attr_kind;
mod builder;
mod bundle;
mod codes;
mod communicator;
mod cost;
mod expert_cache;
mod expert_names;
mod expert_tier;
mod fragment;
mod host_statement;
mod ids;
mod op_table;
pub mod op_traits;
mod op_view;
mod parse;
mod print;
mod program;
pub mod rules;
mod stream_kind;
mod types;
mod view_reader;

pub use attr::{Attr, Attrs};
pub use attr_kind::{
    Activation, CollectiveAlgorithm, CommAxis, RoundingMode, RouterScore, Transport, WIRE_BLOCK, WeightLoad,
    Wire,
};
pub use builder::Builder;
pub use bundle::{Bundle, Phase, RoleRanks, Slots};
pub use codes::CODES;
pub use communicator::{CommRoute, Communicator, TransferPeer};
pub use cost::{OpWorkload, op_workload};
pub use expert_cache::{CacheFetch, EvictionPolicy, ExpertCache};
pub use expert_names::{EVERY_EXPERT, ExpertTensorNames, name_experts};
pub use expert_tier::ExpertTier;
pub use fragment::{Fragment, FragmentOp, SpannedName, print_fragment};
pub use host_statement::{GroupStatement, HostStatement};
pub use ids::{BufferId, StreamId, ValueId};
pub use op_table::{
    AttrRow, CollectiveOp, ComputeOp, HINT_ATTRS, KeyedRow, OP_TABLE, OpByKind, OpKind, OpRow, OpView,
    Opcode, OrderOp, SinkOp, SourceOp, views,
};
pub use op_view::{Gate, PeerPosition, StochasticRounding};
pub use parse::{is_fragment, parse, parse_all, parse_fragment};
pub use print::{canonical_text, print, program_digest};
pub use program::{Buffer, CapturedGraph, Dialect, Op, Program, Value};
pub use stream_kind::StreamKind;
pub use types::{DType, Type};
pub use view_reader::ViewError;
