//! The door: config → model → plan → verify → run. The only place that names a backend.
//!
//! [`Model`] reads a model's folder, [`plan::make`] plans and seals it, [`Plan::write`] and [`Plan::read`] keep a
//! plan in a folder, [`stream`] runs it as processes on this host, [`local`] within this process, [`sim`] on a machine that is
//! not here.

pub mod autopsy;
pub mod bench;
pub mod bringup;
pub mod charts;
pub mod check;
pub mod comm;
pub mod cuda;
pub mod doctor;
pub mod drawings;
pub mod drill;
pub mod engine;
mod files;
mod flight;
pub mod gpus;
mod guard;
pub mod join;
pub mod local;
pub mod measure;
mod model;
pub mod modelled;
mod opened;
mod page;
mod parity;
pub mod plan;
mod rank;
mod record;
pub mod search;
pub mod shards;
pub mod sim;
pub mod stream;
mod studio;
pub mod summary;
pub mod trace;

pub use model::{Model, Overrides, Weights};
pub use plan::Plan;
pub use rank::rank_main;
pub use shards::preflight_reload;
pub use tessera_mesh::Mesh;
pub use tessera_plan::{DtypePolicy, Mapping, Numerics, Strategy, Topology, Via};
pub use tessera_report::overlap::Overlap;
pub use tessera_runtime::decide::Cut;
pub use tessera_runtime::driver::{Interrupt, StreamRequest, exit, exit_at_once};
pub use tessera_runtime::{Failure, FailureClass};

use tessera_base::{Code, Registry};

/// Codes this room raises.
pub const CODES: &[&Code] = &[
    &model::T0010,
    &plan::T0011,
    &plan::T0012,
    &files::T0013,
    &files::T0014,
    &stream::T0015,
    &model::T0016,
    &comm::T0017,
    &stream::T0018,
    &local::T0019,
    &trace::T0020,
    &trace::T0021,
    &trace::T0022,
    &trace::T0023,
    &trace::T0024,
    &check::T0025,
    &check::T0026,
    &trace::T0028,
    &drill::T0029,
    &join::T0034,
    &join::T0035,
    &autopsy::T0036,
    &sim::T0040,
    &bench::T0061,
    &bringup::T0045,
    &search::T0046,
    &search::T0047,
    &search::T0056,
    &measure::T0048,
    &measure::T0049,
    &measure::T0050,
    &doctor::T0051,
    &doctor::T0052,
    &doctor::T0053,
];

/// Every code of this build.
#[must_use]
pub fn registry() -> Registry {
    Registry::new(&[
        tessera_base::CODES,
        CODES,
        tessera_mesh::CODES,
        tessera_ir::CODES,
        tessera_verify::CODES,
        tessera_models::CODES,
        tessera_weights::CODES,
        tessera_cost::CODES,
        tessera_cuda::CODES,
        tessera_plan::CODES,
        tessera_runtime::CODES,
        tessera_device::CODES,
        tessera_sim::CODES,
        tessera_report::CODES,
    ])
}
