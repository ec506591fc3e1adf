//! Drivers: the processes, sockets, threads and clocks under the machines.
//!
//! A launcher spawns every rank in a process group of its own. A rank's standard input is a socket to the
//! launcher; the first frame on it says who the rank is and carries the other descriptors: the control sockets
//! between leader and workers, and whatever the door added. In each rank one control thread owns the machines
//! and never waits for the engine; when it must leave it aborts the engine, waits a bounded time, and goes.

mod engine_thread;
mod exit;
mod fds;
mod launcher;
mod leader_process;
mod link;
mod studio_thread;
mod worker_process;

pub use engine_thread::{EngineEvent, EngineFactory, EngineThread};
pub use exit::exit;
pub use fds::{Joined, join};
pub use launcher::{Interrupt, LaunchEvent, LaunchReport, LaunchSpec, RankExit, launch};
pub use leader_process::{LeaderParts, RecordEntry, run_leader};
pub use studio_thread::{StreamRequest, StudioFactory};
pub use worker_process::{WorkerParts, run_worker};

use tessera_base::Code;

/// A session that could not be started.
pub(crate) static T0750: Code = Code {
    id: "T0750",
    title: "the ranks could not be started or joined",
    page: "A rank's process could not be spawned, or it did not receive its welcome: its rank, its session and the \
sockets that it shares with its peers. The text holds the system's own error. A rank is started by the launcher and not by \
hand; started by hand it finds no socket on its standard input.\n\nLimits on processes or open files are the usual \
reason on a busy host.",
};
