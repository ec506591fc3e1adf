//! One rank of a stream whose ranks an external launcher (torchrun, Slurm, a shell) started, on one
//! host or on several. The rank meets the others at rank 0 and then runs like a launched rank.
//!
//! Every rank plans from its own arguments or reads its own copy of a plan; the ranks compare
//! digests before anything runs. Only rank 0 decides what to stream and writes the run directory;
//! the other ranks write only their flight record there.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::driver::rendezvous::{RendezvousPeers, RendezvousSpec, join_peers};
use tessera_runtime::driver::secure::{Credentials, Secret, TlsConfig};
use tessera_runtime::driver::{JoinedRank, StopHandle};
use tessera_runtime::wire::{Progress, Welcome};
use tessera_runtime::{Failure, FailureClass};

use crate::codes::{T0034, T0035};
use crate::communicators::{self, EndpointSources};
use crate::cuda::{self, GpuRankConfig};
use crate::files::read_file;
use crate::gpu_placement::position_on_host;
use crate::gpus::GpuDiscovery;
use crate::leader_placement::place_leader_programs;
use crate::model::Model;
use crate::plan::Plan;
use crate::rank::{
    LeaderEvent, LeaderEventHandler, RankContext, RankPlan, RankSetup, run_as_leader, run_follower,
};
use crate::rank_config::RankConfig;
use crate::rank_launch::new_session_id;
use crate::run_dir_writer::{close_run, write_run_dir};
use crate::run_settings::build_id;
use crate::stream::{self, ProgressTally};
use crate::stream_options::{ChunkProgress, RunDevice, StreamOptions, StreamReport};
use crate::synthetic_delays::SyntheticDelays;

/// Maximum size of a credentials file in bytes.
const MAX_CREDENTIAL_BYTES: u64 = 1 << 20;

/// The rank of this process in the run, and its credentials.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// Rank of this process in the world; rank 0 is the leader and owns the run directory.
    pub rank: u32,
    /// Number of ranks of the run on all hosts.
    pub world: u32,
    /// Host and port where rank 0 listens.
    pub master: (String, u16),
    /// Number of ranks on this host; they share its cores.
    pub local_world: u32,
    /// Index of this rank among the ranks of this host, if the launcher provides it.
    pub local_rank: Option<u32>,
    /// Cores of this rank alone, if the launcher gave each rank its own.
    pub cores: Option<u32>,
    /// Address of this host to listen on instead of the default.
    pub bind: Option<IpAddr>,
    /// File with the shared secret of the run.
    pub secret: Option<PathBuf>,
    /// Certificate files for TLS; `None` without TLS.
    pub tls: Option<TlsFiles>,
    /// Maximum time to wait for the other ranks.
    pub timeout: Duration,
}

/// Paths of the three PEM files for TLS.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// This rank's certificate, followed by its chain up to the authority.
    pub certificate: PathBuf,
    /// Private key of `certificate`; the file is rejected if every user of the host can access it.
    pub key: PathBuf,
    /// Certificates of the authority that all ranks trust.
    pub authority: PathBuf,
}

/// An event while a joined rank runs.
#[derive(Debug)]
pub enum JoinEvent {
    /// A connection from a stranger, or another condition worth reporting.
    Note(Diagnostic),
    /// All ranks have connected; the listening address of each, in rank order.
    Connected(Vec<String>),
    /// A chunk is on disk (rank 0 only).
    Chunk(ChunkProgress),
    /// The run failed (rank 0 only). The process exits soon.
    Failed(Failure),
}

/// The outcome of a joined rank.
#[derive(Debug)]
pub enum JoinReport {
    /// Outcome of rank 0, which owns the run directory.
    Leader(Box<StreamReport>),
    /// Outcome of another rank, with the failure that it observed.
    Rank(Option<Failure>),
    /// Another rank was stopped because rank 0 was interrupted twice.
    Interrupted,
}

/// Returns the failure class if `ds` contains a rejection that all ranks reached together.
#[must_use]
pub fn joint_failure_class(ds: &[Diagnostic]) -> Option<FailureClass> {
    ds.iter().find_map(|d| match d.code.id {
        "T0756" => Some(FailureClass::Peer),
        "T0740" | "T0757" => Some(FailureClass::Parity),
        _ => None,
    })
}

/// Runs one rank and blocks until the run is over.
///
/// # Errors
/// Returns everything that is wrong before anything was started or written, on this rank or, as
/// reported by rank 0, on another.
pub fn run(
    plan: Plan,
    model: &Model,
    options: &StreamOptions,
    join: &JoinOptions,
    interrupt: &StopHandle,
    on_event: &mut dyn FnMut(JoinEvent),
) -> Result<JoinReport, Diagnostics> {
    let on_gpus = options.device == RunDevice::Cuda;
    let mut spec = build_rendezvous(&plan, options.device, &options.delays, join)?;
    let first_rank_of_host = first_rank_of_host(join);
    // Rank 0 records the digest of its weights. If the plan pins weights, each host checks its files.
    let reads_all = join.rank == 0 || (plan.mapping.weights.is_some() && join.rank == first_rank_of_host);
    let digest = reads_all.then(|| model.start_digest());
    if on_gpus {
        // Covers this rank's device and the devices before it.
        let needed = position_on_host(plan.sealed.mesh(), first_rank_of_host, Rank(join.rank + 1)) as usize;
        let gpus = stream::find_gpus(&plan, options, needed)?;
        if let Some(gpus) = gpus.filter(|_| join.rank == 0) {
            let ids = cuda::create_communicator_ids(&gpus, &plan.sealed).map_err(|d| vec![d])?;
            spec.leader_payload = write_communicator_ids(&ids).map_err(|d| vec![d])?;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if join.rank == 0 {
        // The other ranks may be on other hosts, so rank 0 cannot check for oversubscription.
        let options = StreamOptions { oversubscribe: true, ..options.clone() };
        stream::check_stream(&plan, model, &options, spec.world_size, cores)?;
    }
    let places = (join.rank == 0).then(|| {
        let gpus = on_gpus.then(GpuDiscovery::discover);
        place_leader_programs(&plan, model, options, gpus.as_ref().map(|g| (g, first_rank_of_host)))
    });
    let places = places.transpose()?;
    let weights = digest.map_or(Ok(String::new()), |digest| digest.finish(&plan))?;
    let threads = match join.cores {
        Some(own) => cores.min(own as usize),
        None => cores / join.local_world.max(1) as usize,
    };
    let mut orders = RankConfig::from_options(&plan, model, options, threads.max(1)).map_err(|d| vec![d])?;
    if let Some((leader, notes)) = places {
        orders.leader = leader;
        notes.into_iter().for_each(|d| on_event(JoinEvent::Note(d)));
    }
    // The folder must exist before any rank continues: ranks that share a disk write their flight
    // records there.
    let mut folder = || write_run_dir(&plan, &orders, options, weights.clone()).map_err(|d| vec![d]);
    let peers = join_peers(&spec, interrupt, &mut |d| on_event(JoinEvent::Note(d)), &mut folder)?;
    if on_gpus {
        // Rank 0 created the NCCL ids of the communicators.
        let communicator_ids = read_communicator_ids(&peers).map_err(|d| vec![d])?;
        orders.gpus = Some(GpuRankConfig { communicator_ids, first_rank_of_host });
    }
    on_event(JoinEvent::Connected(peers.addresses.clone()));
    if join.rank == 0 {
        return run_rank_zero(&plan, &orders, options, &spec, peers, interrupt, on_event);
    }
    let setup = || Ok(setup_from_peers(Arc::new(plan), &orders.delays, &spec, peers));
    Ok(match run_follower(setup, &orders.settings(), orders.weights_place(), Rank(spec.rank))? {
        // No launcher started these ranks; only rank 0 sends this failure, when it is interrupted
        // twice.
        Some(f) if f.class == FailureClass::LauncherGone => JoinReport::Interrupted,
        failure => JoinReport::Rank(failure),
    })
}

/// Returns the first rank of this rank's host; launchers number the ranks of a host consecutively.
fn first_rank_of_host(join: &JoinOptions) -> u32 {
    let local = join.local_rank.unwrap_or(join.rank % join.local_world.max(1));
    join.rank.saturating_sub(local)
}

/// Returns the message with which rank 0 gives the other ranks the ids of the communicators of GPUs.
///
/// # Errors
/// T0034.
pub(crate) fn write_communicator_ids(ids: &[String]) -> Result<Vec<u8>, Diagnostic> {
    serde_json::to_vec(ids).map_err(|e| communicator_ids_error(&e))
}

/// Reads the ids of the communicators of GPUs from the message of rank 0.
///
/// # Errors
/// T0034.
pub(crate) fn read_communicator_ids(peers: &RendezvousPeers) -> Result<Vec<String>, Diagnostic> {
    serde_json::from_slice(&peers.leader_payload).map_err(|e| communicator_ids_error(&e))
}

fn communicator_ids_error(e: &serde_json::Error) -> Diagnostic {
    Diagnostic::error(&T0034, format!("cannot transfer the communicator ids from rank 0: {e}"))
        .with_hint("start every rank from the same build with the same --device")
}

fn run_rank_zero(
    plan: &Plan,
    orders: &RankConfig,
    options: &StreamOptions,
    spec: &RendezvousSpec,
    peers: RendezvousPeers,
    interrupt: &StopHandle,
    on_event: &mut dyn FnMut(JoinEvent),
) -> Result<JoinReport, Diagnostics> {
    let leader_plan = Plan::read(&orders.plan)?;
    let frame_pipes = options.outputs.open_pipes().map_err(|d| vec![d])?;
    let mut tally = ProgressTally::new(options.chunks);
    let (sender, receiver) = channel();
    let outcome = std::thread::scope(|s| {
        let leader_thread = s.spawn(move || {
            let arrive = || {
                let arrival = setup_from_peers(Arc::new(leader_plan), &orders.delays, spec, peers);
                Ok(RankSetup {
                    frame_pipes,
                    interrupt: Some(interrupt.clone()),
                    on_event: Some(forward_events(sender)),
                    ..arrival
                })
            };
            run_as_leader(arrive, orders)
        });
        // The loop ends when the leader drops the sender.
        for event in receiver {
            on_event(match event {
                OwnedLeaderEvent::Chunk(progress) => JoinEvent::Chunk(tally.count_chunk(&progress)),
                OwnedLeaderEvent::Failed(failure) => JoinEvent::Failed(failure),
            });
        }
        leader_thread.join()
    });
    let (failure, interrupted) = match outcome {
        Ok(Ok(failure)) => (failure, interrupt.is_stop_requested()),
        Ok(Err(ds)) => {
            (ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, Some(0), d)), false)
        }
        Err(panic) => std::panic::resume_unwind(panic),
    };
    Ok(JoinReport::Leader(Box::new(close_run(plan, options, failure, interrupted))))
}

enum OwnedLeaderEvent {
    Chunk(Progress),
    Failed(Failure),
}

fn forward_events(sender: Sender<OwnedLeaderEvent>) -> LeaderEventHandler {
    Box::new(move |what| {
        let _ = sender.send(match what {
            LeaderEvent::Chunk(progress) => OwnedLeaderEvent::Chunk(progress.clone()),
            LeaderEvent::Failed(failure) => OwnedLeaderEvent::Failed(failure.clone()),
        });
    })
}

/// Builds the setup of a rank that no launcher started.
pub(crate) fn setup_from_peers<P: RankPlan>(
    plan: Arc<P>,
    delays: &SyntheticDelays,
    spec: &RendezvousSpec,
    peers: RendezvousPeers,
) -> RankSetup<P> {
    let welcome = Welcome {
        rank: spec.rank,
        world_size: spec.world_size,
        session: peers.session,
        control_sockets: peers.control.len() as u32,
        extra_fds: 0,
        payload: Vec::new(),
    };
    RankSetup {
        joined: JoinedRank::from_links(welcome, Vec::new(), peers.control),
        communicators: EndpointSources::Streams(peers.communicators),
        context: RankContext::new(plan, *delays).with_peers(peers.digest),
        frame_pipes: Vec::new(),
        interrupt: None,
        on_event: None,
    }
}

/// Builds the rendezvous spec: everything that this rank knows before it meets the others.
pub(crate) fn build_rendezvous<P: RankPlan>(
    plan: &P,
    device: RunDevice,
    delays: &SyntheticDelays,
    join: &JoinOptions,
) -> Result<RendezvousSpec, Diagnostics> {
    let mut diagnostics = Vec::new();
    let sealed = plan.sealed();
    let ranks = sealed.mesh().world_size();
    if join.rank >= join.world {
        diagnostics.push(
            Diagnostic::error(&T0034, format!("there is no rank {} in a world of {}", join.rank, join.world))
                .with_label("RANK", join.rank.to_string())
                .with_label("WORLD_SIZE", join.world.to_string())
                .with_hint("ranks count from 0"),
        );
    }
    if ranks != join.world {
        diagnostics.push(
            Diagnostic::error(
                &T0034,
                format!("the plan is for {ranks} ranks and the world has {}", join.world),
            )
            .with_label("plan", format!("{} and {} ranks", sealed.mesh(), ranks))
            .with_label("WORLD_SIZE", join.world.to_string())
            .with_hint("give a --mesh with WORLD_SIZE ranks, the same on every rank"),
        );
    }
    let credentials = load_credentials(join).map_err(|d| diagnostics.push(d)).ok();
    let Some(credentials) = credentials.filter(|_| diagnostics.is_empty()) else { return Err(diagnostics) };
    // GPU ranks communicate on the GPUs, and simulated ranks within rank 0: they need no streams.
    let specs = match device {
        RunDevice::Cpu => communicators::communicator_specs(sealed),
        RunDevice::Cuda | RunDevice::Sim => Vec::new(),
    };
    Ok(RendezvousSpec {
        rank: join.rank,
        world_size: join.world,
        master: join.master.clone(),
        bind: join.bind,
        credentials,
        topology: plan.control_topology(),
        communicators: communicators::member_ranks(&specs),
        parity_values: vec![
            ("build".into(), build_id()),
            ("wire version".into(), tessera_runtime::wire::WIRE_VERSION.to_string()),
            ("plan digest".into(), sealed.digest_hex()),
            ("topology".into(), plan.mapping().topology.name().into()),
            ("synthetic delays".into(), delays.announced_text()),
            ("device".into(), device_name(device).into()),
        ],
        session: new_session_id(sealed),
        leader_payload: Vec::new(),
        join_limit: join.timeout,
    })
}

fn device_name(device: RunDevice) -> &'static str {
    match device {
        RunDevice::Cpu => "cpu",
        RunDevice::Cuda => "cuda",
        RunDevice::Sim => "sim",
    }
}

fn load_credentials(join: &JoinOptions) -> Result<Credentials, Diagnostic> {
    // An unusable file of this rank is not an authentication failure, so it gets its own code.
    let own = |d: Diagnostic| Diagnostic { code: &T0035, ..d };
    let secret = match &join.secret {
        Some(path) => {
            let read = read_credential_file(path, "secret", true)?;
            Some(Secret::new(&read).map_err(|d| own(d).with_label(path_text(path), "read"))?)
        }
        None => None,
    };
    match (&join.tls, secret) {
        (Some(files), secret) => {
            let tls = TlsConfig::new(
                &read_credential_file(&files.certificate, "certificate", false)?,
                &read_credential_file(&files.key, "key", true)?,
                &read_credential_file(&files.authority, "certificate of the authority", false)?,
            )
            .map_err(own)?;
            Ok(Credentials::Tls(tls, secret))
        }
        (None, Some(secret)) => Ok(Credentials::Secret(secret)),
        (None, None) => Err(Diagnostic::error(
            &T0034,
            "no secret or certificates were given to authenticate the ranks",
        )
        .with_hint(
            "give every rank the same --secret FILE, or certificates with --tls-cert, --tls-key and --tls-ca",
        )),
    }
}

/// Reads a small file. A `private` file must not be accessible to every user of the host.
fn read_credential_file(path: &Path, what: &str, private: bool) -> Result<Vec<u8>, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0035, format!("the {what} cannot be used")).with_label(path_text(path), why)
    };
    let io = |e: std::io::Error| refuse(e.to_string());
    let facts = std::fs::metadata(path).map_err(io)?;
    if !facts.is_file() || facts.len() > MAX_CREDENTIAL_BYTES {
        return Err(refuse(format!("not a regular file of at most {MAX_CREDENTIAL_BYTES} bytes")));
    }
    let mode = facts.permissions().mode();
    if private && mode & 0o007 != 0 {
        return Err(refuse(format!("mode {:04o}: every user of this host can access it", mode & 0o7777))
            .with_hint(format!("chmod 600 {}", path.display())));
    }
    read_file(path, MAX_CREDENTIAL_BYTES).map_err(io)
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}
