//! The run time: config → model → plan → verify → run. Only this crate and `tessera-tools` name
//! concrete backends.
//!
//! [`Model`] reads a model folder, [`plan::plan_model`] plans and seals the model, [`Plan::write`]
//! and [`Plan::read`] store a plan in a folder, [`stream`] runs a plan as processes on this host,
//! [`join`] runs one rank that an external launcher started, and [`sim`] simulates a plan on another
//! machine.
//!
//! This crate does not know how a mapping is chosen (`tessera-estimate`), nor the tools that
//! measure and diagnose (`tessera-tools`). `ARCHITECTURE.md` lists the order of its modules.

// On macOS only the dynamic linker knows which file holds this code; `system/object_file.rs` calls it.
#![cfg_attr(not(any(target_os = "macos", test)), forbid(unsafe_code))]
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod admitted_settings;
pub mod arrays;
mod budget;
mod cache_audit;
pub mod check;
pub mod checkpoint;
pub mod checkpoint_report;
pub mod clock;
pub mod codes;
mod collective_guard;
pub mod communicators;
pub mod cuda;
mod decoder_check;
pub mod engine;
pub mod environment;
pub mod faults;
pub mod files;
pub mod flight;
pub mod frame_pipe;
mod frame_writer;
pub mod generate;
pub mod gpu_placement;
pub mod gpus;
pub mod group_traffic;
mod host_identity;
mod host_memory;
mod html_writer;
mod in_process_ranks;
pub mod join;
mod kernel_probe;
mod latents_file;
pub mod launchers;
mod leader_memory;
mod leader_placement;
mod leader_programs;
// No user needs it: the tests of this crate do, and the one that counts every allocation needs a
// process of its own.
#[doc(hidden)]
pub mod local;
pub mod machine_shape;
mod media_codec;
mod media_pipeline;
mod model;
pub mod nccl_algorithms;
mod noise_file;
mod op_clock;
pub mod opened_run;
mod parity;
mod pixel_placement;
pub mod plan;
mod plan_folder;
pub mod program_command;
mod prompt_rows;
mod rank;
mod rank_config;
mod rank_launch;
mod rank_orders;
mod rank_process;
mod rank_weights;
pub mod record;
pub mod rehearsal;
mod rgb;
pub mod run_dir;
mod run_dir_writer;
mod run_failure;
mod run_settings;
mod shard_copy;
pub mod shards;
pub mod sim;
mod stated_transports;
mod step_clock;
pub mod stream;
pub mod stream_control;
pub mod stream_options;
pub mod summary;
pub mod synthetic_delays;
pub mod system;
pub mod terminal;
mod text_encoder;
mod transfer_log;
mod vae_weights;
mod video_encoder;
pub mod video_feed;
mod video_file;
pub mod video_input;
mod video_strength;
mod weights_origin;
pub mod wire_dump;

pub use budget::{BudgetRow, memory_budget};
pub use codes::{CODES, T0099};
pub use leader_memory::LeaderMemory;
pub use model::{Model, Overrides, Weights};
pub use plan::Plan;
pub use rank_process::rank_main;
pub use run_settings::build_id;
pub use shards::preflight_reload;
pub use tessera_mesh::Mesh;
pub use tessera_models::DecoderQuality;
pub use tessera_plan::{DtypePolicy, Mapping, MediaPlacement, Numerics, Strategy, Topology, Transport};
pub use tessera_report::overlap::{OVERLAP_GATE, OverlapStats};
pub use tessera_runtime::director::SceneCut;
pub use tessera_runtime::driver::{
    HOST_PROCESS_VARIABLE, HostRanksSpec, StopHandle, StreamRequest, end_with_host_process, exit_process,
    exit_without_handlers, host_exit_status, run_host_ranks,
};
pub use tessera_runtime::{Failure, FailureClass};
pub use text_encoder::{EncodedPrompts, PromptEncoder, Umt5Files};
pub use weights_origin::{LoraFile, WeightChange, WeightsBase, WeightsOrigin};
