//! Compile traces: what `TORCH_TRACE` recorded of each rank's compiles.
//!
//! [`read_log`] reads one rank. [`compare_ranks`] compares the collectives of the compiled graphs, and
//! [`examine_activity`] counts breaks, recompiles and what else keeps a run from a steady state. A log
//! says what was compiled, in this order; it does not say what ran, and knows no eager collective.

mod activity;
mod budget;
mod collective;
mod compare;
mod compile_id;
mod doctor;
mod graph;
mod log;
mod order;
mod reasons;
mod records;
mod render;
mod run_logs;
mod sequence;

pub use activity::{Activity, ActivityKind, RankCounts};
pub use budget::{BUILTIN_BUDGET, Budget, BudgetLine, StructureRule};
pub use collective::{CallSite, CollectiveCall, TensorType};
pub use compare::{LIMITS, RankComparison, compare_ranks};
pub use compile_id::CompileId;
pub use doctor::{CompileReport, UNRECORDED, examine_activity};
pub use graph::{Direction, Graph};
pub use log::{Compile, RankLog, Stage, read_log};
pub use reasons::{GraphBreak, GuardedValue, Recompile};
pub use run_logs::RunLogs;
