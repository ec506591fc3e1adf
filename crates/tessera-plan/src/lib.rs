//! The planner: a mapping and logical programs in, a bundle of role programs with their memory out.
//!
//! It gives each logical value a layout, inserts the collectives that the shard rules ask for, cuts everything
//! into local shapes and places temporaries. It knows no model by name, runs nothing, and never asks the judge:
//! what it makes is a claim until [`tessera_ir::Bundle`] is sealed by another room.

pub mod attention;
mod lower;
mod mapping;
mod memory;
mod order;
mod pieces;
pub mod precision;
mod roles;
pub mod search;
mod source;
mod stages;
mod strategy;
pub mod video;

pub use lower::{Logical, lower};
pub use mapping::{DtypePolicy, Mapping, Numerics, Strategy, Topology, Via};
pub use memory::place;
pub use stages::balance;

use tessera_base::Code;

/// Codes this room raises.
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
    &search::remedy::T1225,
    &search::remedy::T1226,
    &search::remedy::T1227,
    &search::remedy::T1228,
    &search::recipe::T1229,
    &video::T1230,
    &video::T1231,
    &video::T1232,
    &search::thresholds::T1240,
    &search::gates::T1241,
];
