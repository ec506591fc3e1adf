//! A test harness of ranks over the runtime's drivers: real processes, sockets and state machines
//! around programs that do nothing or follow a benchmark's script.
//!
//! The programs are those of a stream in the resident regime with one denoise step. Timestamps are
//! of the monotonic clock, which all processes of a host share.

mod echo;
mod rank;
mod scripted_engine;
mod synthetic_stream;
pub mod timestamps;

pub use echo::FrameSizes;
pub use rank::rank_main;
pub use scripted_engine::{EngineScript, burn_cpu};
pub use synthetic_stream::one_call_limits;
pub use timestamps::{RankTimestamps, now_ns};

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tessera_runtime::driver::{
    ControlTopology, LaunchEvent, LaunchReport, LaunchSpec, StopHandle, launch_ranks,
};
use tessera_runtime::{Limits, Tripwires};

use crate::diagnostics_error;
use timestamps::timestamps_file;

/// Configuration of a run. The launcher passes it to every rank, as JSON in the payload.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HarnessConfig {
    /// Number of ranks; rank 0 is the leader.
    pub ranks: u32,
    /// Whether rank 0 is outside of the mesh, which rank 1 leads.
    pub leader_outside: bool,
    /// Number of chunks that the leader requests in the run.
    pub chunks: u32,
    /// Work of the engine on every rank of the mesh; an echo includes that of `Compute`.
    pub engine_script: EngineScript,
    /// Whether each rank also keeps a core busy.
    pub burn_in_background: bool,
    /// Whether the leader exchanges a bare message with all ranks before each request.
    pub echo: bool,
    /// Folder to which ranks write their timestamps.
    pub dir: PathBuf,
}

impl HarnessConfig {
    fn control_topology(&self) -> ControlTopology {
        if self.leader_outside { ControlTopology::ExternalLeader } else { ControlTopology::Mesh }
    }

    /// Returns the ranks of the mesh: all ranks, except rank 0 if the leader is outside.
    pub fn mesh_ranks(&self) -> std::ops::Range<u32> {
        u32::from(self.leader_outside)..self.ranks
    }
}

/// The outcome of a run, with the timestamps of the ranks that ended without an error.
pub struct HarnessRun {
    /// The launcher's account of how the run and its ranks ended.
    pub report: LaunchReport,
    /// Time from the start of the rank processes until all have ended.
    pub duration: Duration,
    /// Timestamps by rank; empty for a rank that wrote none.
    pub timestamps: Vec<RankTimestamps>,
}

/// Runs the ranks until the run ends.
pub fn run(config: &HarnessConfig, limits: &Limits) -> anyhow::Result<HarnessRun> {
    let this = std::env::current_exe()?.to_str().context("the path of this binary is not UTF-8")?.to_string();
    let mut extras: Vec<Vec<Arc<OwnedFd>>> = vec![Vec::new(); config.ranks as usize];
    if config.echo {
        for rank in 1..config.ranks as usize {
            let (leader, other) = UnixStream::pair()?;
            extras[0].push(Arc::new(leader.into()));
            extras[rank].push(Arc::new(other.into()));
        }
    }
    let spec = LaunchSpec {
        argv: vec![this, "harness-rank".into()],
        rank_count: config.ranks,
        topology: config.control_topology(),
        session: now_ns(),
        extra_fds: extras,
        payload: serde_json::to_vec(config)?,
        env: Vec::new(),
        limits: limits.clone(),
        tripwires: Tripwires::default(),
    };
    let begun = Instant::now();
    let report = launch_ranks(&spec, &StopHandle::default(), &mut |_: LaunchEvent<'_>| {})
        .map_err(diagnostics_error)?;
    let took = begun.elapsed();
    let read = |rank| {
        let text = std::fs::read(timestamps_file(&config.dir, rank)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    Ok(HarnessRun { report, duration: took, timestamps: (0..config.ranks).map(read).collect() })
}
