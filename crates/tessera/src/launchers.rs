//! Launchers recognised by the variables that they set: where this process is among the processes
//! that one of them started, and where rank 0 listens. The environment is an argument.
//!
//! A launcher starts one process per rank or one per host; [`share_ranks`] divides the ranks of a
//! plan among them. Tessera starts nothing on other hosts itself.

mod address;
mod host_list;
mod mpi;
mod rank_share;
mod slurm;
mod torchrun;
mod variables;
mod worker_set;

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics, named_enum};

use crate::codes::{T0034, T0067};
use variables::Variables;

pub use address::DEFAULT_PORT;
pub use host_list::{MAX_HOSTS, expand_hosts, split_outside_brackets};
pub use rank_share::{RankShare, share_of_host, share_ranks};

/// Variables by which a launcher is recognised, and those that would misplace a rank. A process removes
/// them before it starts ranks with variables of its own.
pub const LAUNCHER_VARIABLES: [&str; 23] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "SLURM_CPUS_PER_TASK",
    "LWS_LEADER_ADDRESS",
    "LWS_GROUP_SIZE",
    "LWS_WORKER_INDEX",
];

named_enum! {
    /// A launcher, in order of priority: if several set variables, the first one counts. A launcher
    /// that runs inside another one comes first, because its processes are the ones that join.
    pub enum Launcher {
        /// torchrun, recognised by TORCHELASTIC_RUN_ID
        Torchrun = "torchrun",
        /// RANK and WORLD_SIZE, set by a script or another launcher
        Script = "RANK and WORLD_SIZE",
        /// `mpirun` of Open MPI
        OpenMpi = "Open MPI",
        /// `mpirun` of MPICH, and others that speak PMI
        Mpich = "MPICH",
        /// `srun`
        Slurm = "Slurm",
        /// LeaderWorkerSet of Kubernetes, one process per pod
        LeaderWorkerSet = "LeaderWorkerSet",
    }
}

/// Where this process is among the processes that a launcher started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LauncherPlacement {
    /// The launcher whose variables count.
    pub launcher: Launcher,
    /// Index of this process, from 0.
    pub process: u32,
    /// Number of processes on all hosts.
    pub processes: u32,
    /// Index of this process on its host, if the launcher states it.
    pub local_process: Option<u32>,
    /// Number of processes on this host, if the launcher states it.
    pub local_processes: Option<u32>,
    /// Index of this host and number of hosts, if the launcher states them.
    pub host: Option<(u32, u32)>,
    /// Cores that the launcher gave to each process, if it did.
    pub cores: Option<u32>,
    /// Host name or address, and port, where rank 0 listens.
    pub leader: (String, u16),
    /// The variables that decided, with their values, in the order in which they were read.
    pub read: Vec<(String, String)>,
    /// Other launchers whose variables are set too.
    pub ignored: Vec<Launcher>,
}

impl LauncherPlacement {
    /// Returns what was recognised and from which variables, in one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let read: Vec<String> = self.read.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let host = self.host.map_or(String::new(), |(host, hosts)| format!(", host {host} of {hosts}"));
        let ignored = match self.ignored.as_slice() {
            [] => String::new(),
            others => {
                let names: Vec<&str> = others.iter().map(|l| l.name()).collect();
                format!("; variables of {} are set too and do not count", names.join(" and "))
            }
        };
        format!(
            "{}: process {} of {}{host}, rank 0 at {}:{} (read {}){ignored}",
            self.launcher.name(),
            self.process,
            self.processes,
            self.leader.0,
            self.leader.1,
            read.join(", "),
        )
    }
}

/// What a launcher states about a process, before the address of rank 0 is known.
struct ProcessPlace {
    process: u32,
    processes: u32,
    local_process: Option<u32>,
    local_processes: Option<u32>,
    host: Option<(u32, u32)>,
    cores: Option<u32>,
    /// Host of process 0, if the launcher states it.
    leader_host: Option<String>,
    /// Whether the launcher itself listens at MASTER_PORT.
    port_is_taken: bool,
}

impl ProcessPlace {
    fn new(process: u32, processes: u32) -> ProcessPlace {
        ProcessPlace {
            process,
            processes,
            local_process: None,
            local_processes: None,
            host: None,
            cores: None,
            leader_host: None,
            port_is_taken: false,
        }
    }
}

/// Finds the launcher that started this process, and the place of the process. `None` if no launcher
/// set its variables. `leader_port` replaces the port that the variables state.
///
/// # Errors
/// T0034 if a variable is missing, is no number, is out of range or contradicts another one of the
/// same launcher; T0067 if two launchers contradict each other.
pub fn find_placement(
    environment: &BTreeMap<String, String>,
    leader_port: Option<u16>,
) -> Result<Option<LauncherPlacement>, Diagnostics> {
    let set: Vec<Launcher> = Launcher::ALL.iter().copied().filter(|l| started_by(*l, environment)).collect();
    let Some((launcher, ignored)) = set.split_first() else { return Ok(None) };
    let mut variables = Variables::new(environment);
    let place = read_place(*launcher, &mut variables);
    let leader = address::find_leader(*launcher, place.as_ref(), leader_port, &mut variables);
    let (read, mut problems) = variables.finish();
    let (Some(place), Some(leader)) = (place, leader) else { return Err(problems) };
    problems.extend(check_range(&place, *launcher));
    problems
        .extend(ignored.iter().filter_map(|other| find_conflict((*launcher, &place), *other, environment)));
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(Some(LauncherPlacement {
        launcher: *launcher,
        process: place.process,
        processes: place.processes,
        local_process: place.local_process,
        local_processes: place.local_processes,
        host: place.host,
        cores: place.cores,
        leader,
        read,
        ignored: ignored.to_vec(),
    }))
}

fn started_by(launcher: Launcher, environment: &BTreeMap<String, String>) -> bool {
    let set = |name: &str| environment.get(name).is_some_and(|value| !value.trim().is_empty());
    match launcher {
        // MASTER_ADDR alone may be left over from another program; RANK or WORLD_SIZE concerns this
        // process.
        Launcher::Torchrun => set("TORCHELASTIC_RUN_ID") && (set("RANK") || set("WORLD_SIZE")),
        Launcher::Script => {
            (set("RANK") || set("WORLD_SIZE")) && !started_by(Launcher::Torchrun, environment)
        }
        Launcher::OpenMpi => set("OMPI_COMM_WORLD_RANK") || set("OMPI_COMM_WORLD_SIZE"),
        Launcher::Mpich => set("PMI_RANK") || set("PMI_SIZE"),
        Launcher::Slurm => slurm::is_task(environment),
        Launcher::LeaderWorkerSet => set("LWS_GROUP_SIZE") || set("LWS_WORKER_INDEX"),
    }
}

fn read_place(launcher: Launcher, variables: &mut Variables<'_>) -> Option<ProcessPlace> {
    match launcher {
        Launcher::Torchrun | Launcher::Script => torchrun::read_place(variables),
        Launcher::OpenMpi => mpi::read_open_mpi(variables),
        Launcher::Mpich => mpi::read_mpich(variables),
        Launcher::Slurm => slurm::read_place(variables),
        Launcher::LeaderWorkerSet => worker_set::read_place(variables),
    }
}

fn check_range(place: &ProcessPlace, launcher: Launcher) -> Diagnostics {
    let (index, count, local_index, local_count) = match launcher {
        Launcher::Torchrun | Launcher::Script => ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        Launcher::OpenMpi => (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        Launcher::Mpich => ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        Launcher::Slurm => ("SLURM_PROCID", slurm::TASKS[0], "SLURM_LOCALID", slurm::TASKS_PER_HOST[0]),
        Launcher::LeaderWorkerSet => {
            ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
        }
    };
    let mut problems = Vec::new();
    let mut require_below = |(name, value): (&str, u32), (limit_name, limit): (&str, u32), what: String| {
        if value >= limit {
            problems.push(
                Diagnostic::error(&T0034, what)
                    .with_label(name, value.to_string())
                    .with_label(limit_name, limit.to_string())
                    .with_hint("ranks and processes count from 0"),
            );
        }
    };
    let (process, processes) = (place.process, place.processes);
    let what = match launcher {
        Launcher::Torchrun | Launcher::Script => {
            format!("there is no rank {process} in a world of {processes}")
        }
        _ => format!("there is no process {process} among {processes}"),
    };
    require_below((index, process), (count, processes), what);
    if let (Some(local), Some(locals)) = (place.local_process, place.local_processes) {
        let what = format!("there is no process {local} among the {locals} of this host");
        require_below((local_index, local), (local_count, locals), what);
    }
    if let Some(local) = place.local_process {
        let what = format!("process {process} cannot have {local} processes of its host before it");
        require_below((local_index, local), (index, process.saturating_add(1)), what);
    }
    if let Some(locals) = place.local_processes {
        let what = format!("{locals} processes on this host are more than all {processes}");
        require_below((local_count, locals), (count, processes.saturating_add(1)), what);
    }
    problems
}

/// Returns T0067 if two launchers number the same processes differently. Different counts are no
/// conflict: the inner launcher then started other processes than the outer one.
fn find_conflict(
    (launcher, place): (Launcher, &ProcessPlace),
    other: Launcher,
    environment: &BTreeMap<String, String>,
) -> Option<Diagnostic> {
    // The agents of torchrun agree on an order of their own, and the daemons of Open MPI are tasks
    // of Slurm that are not its ranks.
    if matches!(launcher, Launcher::Torchrun | Launcher::OpenMpi) {
        return None;
    }
    let others = read_place(other, &mut Variables::new(environment))?;
    if others.processes != place.processes || others.process == place.process {
        return None;
    }
    Some(
        Diagnostic::error(
            &T0067,
            format!("two launchers give this process the indices {} and {}", place.process, others.process),
        )
        .with_label(launcher.name(), format!("process {} of {}", place.process, place.processes))
        .with_label(other.name(), format!("process {} of {}", others.process, others.processes))
        .with_hint(format!(
            "unset the variables of {}, or start this process with one launcher only",
            launcher.name()
        )),
    )
}
