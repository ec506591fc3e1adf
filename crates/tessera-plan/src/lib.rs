//! The planner: turns a mapping and logical programs into a bundle of role programs with their
//! memory plan.
//!
//! It assigns a layout to each logical value, inserts the collectives that the sharding rules
//! require, computes local shapes and assigns temporaries to memory slots. The planner knows no
//! model by name, runs nothing and never calls the verifier: its output is unproven until another
//! crate seals the [`tessera_ir::Bundle`].

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod attention;
mod codes;
mod copy_op;
mod expert_map;
mod expert_placement;
mod expert_routing;
mod host_statement;
pub mod layouts;
mod logical_model;
mod lower;
mod mapping;
mod memory;
mod moe_route;
mod op_order;
mod ownership;
pub mod precision;
mod roles;
mod router_features;
mod row_chunks;
pub mod search;
mod stages;
mod stochastic_rounding;
mod strategy;
pub mod video;

pub use codes::CODES;
pub use expert_map::ExpertMap;
pub use expert_routing::EXPERT_STATISTICS;
pub use host_statement::state_hosts;
pub use logical_model::LogicalModel;
pub use lower::lower;
pub use mapping::{
    CapturePolicy, DtypePolicy, ExpertAxis, ExpertChoices, ExpertCombine, ExpertCopies, ExpertMapping,
    Mapping, MediaPlacement, Numerics, RegularizerKind, RouterGate, RouterMapping, RouterRegularizer,
    RouterSeeds, Strategy, TokenNumerics, TokenPlacement, TokenWire, Topology, Transport,
};
pub use memory::assign_slots;
pub use precision::DecoderPrecision;
pub use router_features::ROUTER_BIAS;
pub use stages::balance_stages;
pub use stochastic_rounding::round_stochastically;
