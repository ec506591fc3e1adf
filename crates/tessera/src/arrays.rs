//! Programs of arrays: from a bundle to a sealed plan, and calls of its programs on ranks.
//!
//! [`ArrayPlan`] seals a bundle whose programs a user wrote. [`ArrayRun`] loads a plan on its ranks, which are threads of
//! this process or processes under a leader, on this host or on several, and calls its programs: each call runs one
//! program with whole arrays as inputs and outputs, of which each rank reads and returns its shards. Decisions, engines
//! and checks are those of every other run.

mod array_config;
mod array_experts;
mod array_function;
mod array_join;
mod array_leader;
mod array_link;
mod array_plan;
mod array_program;
mod array_rank;
mod array_run;
mod array_trace;
mod array_weights;
mod call_log;
mod clock_alignment;
mod device_array;
mod function_folder;
mod gpu_threads;
mod host_array;
mod launch;
mod process_run;
mod run_end;
mod run_record;
mod stream_ids;
mod thread_run;
mod trace_chart;

pub use crate::transfer_log::{CallTransfers, REPORTED_CALLS, TransferEvent};
pub(crate) use array_config::ArrayConfig;
pub use array_config::ArrayRendezvous;
pub use array_function::{ArrayFunction, DeviceMesh, FunctionOutput, lower_functions};
pub use array_join::{ArrayRankOptions, run_joined_rank};
pub(crate) use array_join::{meet_ranks, setup_leader};
pub(crate) use array_leader::run_array_leader;
pub use array_plan::{ArrayPlan, check_second_tier};
pub use array_program::{ArrayPort, ArrayProgram, check_weight_shapes};
pub use array_run::ArrayRun;
pub use array_trace::{ArrayTrace, ArrayTraceEvent, ArrayTraceKind};
pub use array_weights::read_weights_file;
pub use call_log::{ArrayRunLog, MAX_KEPT_CALLS, MAX_KEPT_OPS};
pub use device_array::{ArrayGpus, ArrayValues, CopyRule, DeviceArray, DeviceTensor};
pub use host_array::HostArray;
pub use launch::ArrayProcessOptions;
pub use run_end::ArrayInterrupt;
pub use run_record::{ArrayCallRecord, ArrayRunRecord, RankPlace};
pub use stream_ids::StreamIds;
pub use tessera_cuda::{GpuArray, GpuStream};
pub use tessera_device::LayerTransfers;
pub use tessera_report::record::RunDevice;
