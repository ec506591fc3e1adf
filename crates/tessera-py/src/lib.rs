//! The Python package `tessera`: arrays, programs, plans and runs for people who lay out models in Python, and the command
//! line of the same build.
//!
//! It converts arguments and results. Planning, verification and running are those of the Rust crates: no function here
//! computes a number of a model. The classes are private in `tessera._native`; `tessera.dist`, `tessera.op`,
//! `tessera.graph` and `tessera.runtime` name them for users.

#![warn(clippy::print_stderr, clippy::print_stdout)]

mod array_memory;
mod device_memory;
mod dlpack_abi;
mod dlpack_export;
mod dlpack_import;
mod dtensor;
mod dtensor_ops;
mod eager;
mod errors;
mod expert_tier;
mod files;
mod generate;
mod layers;
mod local_array;
mod mesh;
mod moe;
mod notebook;
mod numeric;
mod plan;
mod plan_estimate;
mod plan_target;
mod planning;
mod prefetch;
mod prefetch_report;
mod program;
mod session;
mod session_trace;
mod settings;
mod signature;
mod stream;
mod trace;
mod waiting;

use std::ffi::OsString;

use pyo3::prelude::*;
use tessera::program_command::ProgramCommand;

/// Runs the command line of `tessera` and returns its exit status. `executable` runs the same function with the
/// arguments that follow `leading`.
#[pyfunction]
fn run_command_line(
    py: Python<'_>,
    arguments: Vec<OsString>,
    executable: String,
    leading: Vec<String>,
) -> u8 {
    let program = ProgramCommand::from_interpreter(executable, leading);
    py.detach(|| tessera_cli::run(arguments, Ok(program)))
}

/// Returns the documentation of a diagnostic code, or `None` for an unknown one.
#[pyfunction]
fn explain_code(code: &str) -> Option<&'static str> {
    tessera_cli::explain_code(code)
}

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<mesh::Mesh>()?;
    module.add_class::<mesh::ReplicateSpec>()?;
    module.add_class::<mesh::ShardSpec>()?;
    module.add_class::<dtensor::DTensor>()?;
    module.add_class::<local_array::LocalArray>()?;
    module.add_class::<numeric::Numeric>()?;
    module.add_class::<layers::Layer>()?;
    module.add_class::<moe::Moe>()?;
    module.add_class::<moe::RouterMeta>()?;
    module.add_class::<trace::Value>()?;
    module.add_class::<trace::ArraySpec>()?;
    module.add_class::<program::Graph>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<plan_estimate::PlanEstimate>()?;
    module.add_class::<planning::Search>()?;
    module.add_class::<planning::Topology>()?;
    module.add_class::<session::Session>()?;
    module.add_class::<prefetch_report::PrefetchReport>()?;
    module.add_class::<prefetch_report::LayerPrefetch>()?;
    module.add_class::<prefetch_report::IoEvent>()?;
    module.add_class::<session_trace::SessionTrace>()?;
    module.add_class::<session_trace::TraceEvent>()?;
    module.add_class::<session_trace::SessionRecord>()?;
    module.add_class::<session_trace::CallRecord>()?;
    module.add_class::<stream::VideoChunk>()?;
    module.add_class::<stream::VideoStream>()?;
    module.add_class::<generate::TextStream>()?;
    for function in [
        wrap_pyfunction!(run_command_line, module)?,
        wrap_pyfunction!(explain_code, module)?,
        wrap_pyfunction!(dtensor::distribute, module)?,
        wrap_pyfunction!(program::trace, module)?,
        wrap_pyfunction!(plan::compile, module)?,
        wrap_pyfunction!(files::parse, module)?,
        wrap_pyfunction!(files::load, module)?,
        wrap_pyfunction!(files::load_plan, module)?,
        wrap_pyfunction!(moe::moe, module)?,
        wrap_pyfunction!(moe::set_router, module)?,
        wrap_pyfunction!(moe::set_router_regularizer, module)?,
        wrap_pyfunction!(planning::recipe, module)?,
        wrap_pyfunction!(planning::search, module)?,
        wrap_pyfunction!(planning::topology, module)?,
        wrap_pyfunction!(planning::plan_memory, module)?,
        wrap_pyfunction!(session::open_session, module)?,
        wrap_pyfunction!(stream::stream, module)?,
        wrap_pyfunction!(generate::generate, module)?,
        wrap_pyfunction!(prefetch::register_prefetch, module)?,
        wrap_pyfunction!(settings::set_stream_map, module)?,
        wrap_pyfunction!(settings::enable_overlap, module)?,
        wrap_pyfunction!(settings::stream_settings, module)?,
    ] {
        module.add_function(function)?;
    }
    layers::add_constructors(module)
}
