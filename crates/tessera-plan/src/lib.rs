//! The planner: turns a mapping and logical programs into a bundle of role programs with their
//! memory plan.
//!
//! It assigns a layout to each logical value, inserts the collectives that the sharding rules
//! require, computes local shapes and assigns temporaries to memory slots. The planner knows no
//! model by name, runs nothing and never calls the verifier: its output is unproven until another
//! crate seals the [`tessera_ir::Bundle`].

pub mod attention;
mod lower;
mod mapping;
mod memory;
mod op_order;
mod ownership;
pub mod precision;
mod roles;
mod row_chunks;
pub mod search;
mod stages;
mod strategy;
pub mod video;

pub use lower::{LogicalModel, lower};
pub use mapping::{DtypePolicy, Mapping, Numerics, Strategy, Topology, Transport};
pub use memory::assign_slots;
pub use stages::balance_stages;

use tessera_base::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[
    &mapping::T0601,
    &mapping::T0602,
    &mapping::T0603,
    &mapping::T0604,
    &mapping::T0605,
    &lower::T0606,
    &attention::T0607,
    &attention::T0608,
    &search::T1200,
    &search::T1201,
    &search::T1202,
    &search::T1203,
    &search::T1204,
    &search::T1205,
    &search::T1206,
    &search::T1207,
    &search::T1208,
    &search::T1209,
    &search::T1210,
    &search::T1211,
    &search::T1212,
    &search::T1213,
    &search::T1214,
    &search::T1215,
    &search::T1216,
    &search::T1217,
    &search::T1218,
    &search::recipe::T1220,
    &search::recipe::T1221,
    &search::recipe::T1222,
    &search::placement::T1223,
    &search::placement::T1224,
    &search::mitigation::T1225,
    &search::mitigation::T1226,
    &search::mitigation::T1227,
    &search::mitigation::T1228,
    &search::recipe::T1229,
    &video::T1230,
    &video::T1231,
    &video::T1232,
    &search::thresholds::T1240,
    &search::gates::T1241,
];
