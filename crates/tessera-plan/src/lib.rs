//! The planner: a mapping and logical programs in, a bundle of role programs with their memory out.
//!
//! It gives each logical value a layout, inserts the collectives that the shard rules ask for, cuts everything
//! into local shapes and places temporaries. It knows no model by name, runs nothing, and never asks the judge:
//! what it makes is a claim until [`tessera_ir::Bundle`] is sealed by another room.

mod lower;
mod mapping;
mod memory;
pub mod search;
mod stages;
mod strategy;

pub use lower::{Logical, lower};
pub use mapping::{Mapping, Numerics, Strategy, Topology};
pub use memory::place;
pub use stages::balance;

use tessera_base::Code;

/// Codes this room raises.
pub const CODES: &[&Code] =
    &[&mapping::T0601, &mapping::T0602, &mapping::T0603, &mapping::T0604, &mapping::T0605, &lower::T0606];
