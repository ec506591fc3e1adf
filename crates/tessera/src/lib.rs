//! The application crate: config → model → plan → verify → run. Only this crate names concrete
//! backends.
//!
//! [`Model`] reads a model folder, [`plan::plan_model`] plans and seals the model, [`Plan::write`]
//! and [`Plan::read`] store a plan in a folder, [`stream`] runs a plan as processes on this host,
//! [`local`] runs it as threads of this process, and [`sim`] simulates it on another machine.

pub mod autopsy;
pub mod bench;
pub mod bringup;
pub mod charts;
pub mod check;
mod collective_guard;
pub mod communicators;
pub mod cuda;
pub mod doctor;
pub mod drawings;
pub mod drill;
pub mod engine;
mod files;
mod flight;
pub mod gpus;
mod html_writer;
pub mod join;
pub mod local;
pub mod measure;
mod media_pipeline;
mod model;
mod parity;
pub mod plan;
mod rank;
mod record;
mod run_dir;
pub mod search;
pub mod shards;
pub mod sim;
pub mod stream;
pub mod summary;
pub mod synthetic_delays;
pub mod trace;

pub use model::{Model, Overrides, Weights};
pub use plan::Plan;
pub use rank::rank_main;
pub use shards::preflight_reload;
pub use tessera_mesh::Mesh;
pub use tessera_plan::{DtypePolicy, Mapping, Numerics, Strategy, Topology, Transport};
pub use tessera_report::overlap::OverlapStats;
pub use tessera_runtime::director::SceneCut;
pub use tessera_runtime::driver::{StopHandle, StreamRequest, exit_process, exit_without_handlers};
pub use tessera_runtime::{Failure, FailureClass};

use tessera_base::{Code, Registry};

/// Diagnostic codes of this crate.
pub const CODES: &[&Code] = &[
    &model::T0010,
    &plan::T0011,
    &plan::T0012,
    &files::T0013,
    &files::T0014,
    &stream::T0015,
    &model::T0016,
    &communicators::T0017,
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

/// Returns the registry of all diagnostic codes of this build.
#[must_use]
pub fn diagnostic_registry() -> Registry {
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
