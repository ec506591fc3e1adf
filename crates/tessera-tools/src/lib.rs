//! The tools around a run: they verify traces and charts, inject faults, diagnose plans and runs,
//! measure a machine, benchmark the DiT, and check a bring-up.
//!
//! Each module is one tool and one verb of the command line, except [`charts`], [`drawings`] and
//! [`trace`], which `check` uses, [`compile_traces`], which `check` and `doctor` use, and
//! [`flight_dumps`], which `autopsy` uses, and [`minimal_model`], which drills stream. The run time ([`tessera`]) knows none of them.

#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod autopsy;
pub mod bench;
pub mod bringup;
pub mod charts;
pub mod codes;
pub mod compile_traces;
pub mod doctor;
pub mod drawings;
pub mod drill;
pub mod flight_dumps;
pub mod gate_record;
pub mod launch;
pub mod lint;
pub mod measure;
mod minimal_language_model;
pub mod minimal_model;
pub mod trace;
pub mod wire_dump;

pub use codes::CODES;
pub use tessera_report::record::RunHost;
pub use tessera_report::record_check;

use tessera_base::Registry;

/// Returns the registry of all diagnostic codes of the library and application crates; the binary
/// adds its own.
#[must_use]
pub fn diagnostic_registry() -> Registry {
    Registry::new(&[
        tessera_base::CODES,
        tessera::CODES,
        tessera_estimate::CODES,
        CODES,
        tessera_mesh::CODES,
        tessera_ir::CODES,
        tessera_verify::CODES,
        tessera_models::CODES,
        tessera_text::CODES,
        tessera_weights::CODES,
        tessera_cost::CODES,
        tessera_cuda::CODES,
        tessera_plan::CODES,
        tessera_runtime::CODES,
        tessera_device::CODES,
        tessera_sim::CODES,
        tessera_report::CODES,
        tessera_torch::CODES,
    ])
}
