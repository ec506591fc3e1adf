//! One rank of a stream whose ranks somebody else started, on one host or on several: it meets the others at rank 0,
//! and then does what a launched rank does.
//!
//! Every rank plans from its own arguments or reads its own copy of a plan; digests are compared before anything runs.
//! What to stream is rank 0's to say, and rank 0 alone writes the run's folder; others keep only their flight record there.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::driver::rendezvous::{Peers, Rendezvous, meet};
use tessera_runtime::driver::secure::{Credentials, Secret, Tls};
use tessera_runtime::driver::{Interrupt, Joined};
use tessera_runtime::wire::{Progress, Welcome};
use tessera_runtime::{Failure, FailureClass};

use crate::Model;
use crate::comm::{self, Lanes};
use crate::cuda::{self, OnGpus};
use crate::plan::Plan;
use crate::rank::{Arrival, Common, Orders, Tell, Told, follow, lead, links};
use crate::stream::{self, Device, StreamOptions, StreamReport, Tally};

/// A place in the world that does not add up.
pub static T0034: Code = Code {
    id: "T0034",
    title: "this process's place among the ranks does not add up",
    page: "With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, `tessera stream` is one rank of a run that somebody else \
started, such as torchrun, Slurm or a shell on each host. All four are needed: whole numbers with RANK below WORLD_SIZE, and \
the address and port where rank 0 listens. The plan must have as many ranks as the world, and a secret or certificates must \
be named, because the ranks' connections are open to the network.\n\nTo start all ranks on this host instead, unset the four.",
};
/// A file of the run's credentials that cannot be used.
pub static T0035: Code = Code {
    id: "T0035",
    title: "a file of the run's credentials cannot be used",
    page: "The secret of a run is a file of 32 bytes or more that every rank reads (`--secret FILE`), for instance from \
`head -c 32 /dev/urandom`. Certificates come as three PEM files: this rank's certificate, its key, and the certificate of the \
authority that all ranks believe (`--tls-cert`, `--tls-key`, `--tls-ca`); all three or none. A secret or a key that everybody \
on the host may read is refused: `chmod 600` it.",
};

/// Most bytes of a file of credentials.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Which place this process has among the ranks, and how it proves it.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub world: u32,
    /// Host and port where rank 0 listens.
    pub master: (String, u16),
    /// Ranks on this host, which share its cores.
    pub local_world: u32,
    /// This rank's place among them, where somebody says.
    pub local_rank: Option<u32>,
    /// Address of this host at which to listen instead.
    pub bind: Option<IpAddr>,
    /// File of the run's secret.
    pub secret: Option<PathBuf>,
    /// Files of certificates.
    pub tls: Option<TlsFiles>,
    /// How long the others are waited for.
    pub timeout: Duration,
}

/// Three PEM files.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// This rank's certificate, with what leads to the authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Certificates of the authority.
    pub authority: PathBuf,
}

/// What happens while a joined rank runs.
#[derive(Debug)]
pub enum JoinEvent {
    /// A stranger, or something else worth knowing.
    Note(Diagnostic),
    /// All ranks have met; where each listens, in order.
    Met(Vec<String>),
    /// Rank 0: a chunk is on disk.
    Chunk(stream::ChunkProgress),
    /// Rank 0: the run failed. The process has little time left.
    Failed(Failure),
}

/// How a joined rank ended.
#[derive(Debug)]
pub enum JoinReport {
    /// Rank 0, which has the run's folder.
    Leader(StreamReport),
    /// Another rank, and how the run failed for it.
    Rank(Option<Failure>),
    /// Another rank, cut off because rank 0 was asked twice to stop.
    Cut,
}

/// The class of a refusal that the ranks came to together, if they did.
#[must_use]
pub fn class(ds: &[Diagnostic]) -> Option<FailureClass> {
    ds.iter().find_map(|d| match d.code.id {
        "T0756" => Some(FailureClass::Peer),
        "T0740" | "T0757" => Some(FailureClass::Parity),
        _ => None,
    })
}

/// Runs one rank. Blocks until the run is over.
///
/// # Errors
/// What is wrong before anything was started or written, on this rank or, told by rank 0, on another.
pub fn run(
    plan: Plan,
    model: &Model,
    options: &StreamOptions,
    join: &JoinOptions,
    interrupt: &Interrupt,
    on: &mut dyn FnMut(JoinEvent),
) -> Result<JoinReport, Diagnostics> {
    let mut spec = rendezvous(&plan, options, join)?;
    let first = first_of_host(join);
    let on_gpus = options.device == Device::Cuda;
    if on_gpus {
        // This rank's device, and those before it.
        let needed = cuda::device(plan.sealed.mesh(), first, Rank(join.rank + 1)) as usize;
        let gpus = stream::gpus(&plan, options, needed)?;
        if let Some(gpus) = gpus.filter(|_| join.rank == 0) {
            let lanes = cuda::lane_ids(&gpus, &plan.sealed).map_err(|d| vec![d])?;
            spec.tells = serde_json::to_vec(&lanes).map_err(|e| vec![unheard(&e)])?;
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if join.rank == 0 {
        // Who shares these cores is not rank 0's to know.
        let options = StreamOptions { oversubscribe: true, ..options.clone() };
        stream::check(&plan, model, &options, spec.world, cores)?;
    }
    let threads = (cores / join.local_world.max(1) as usize).max(1);
    let mut orders = stream::orders(&plan, model, options, threads).map_err(|d| vec![d])?;
    // Before any rank goes on: on a disk that ranks share the others find the folder there.
    let mut folder = || stream::write_folder(&plan, &orders, options).map_err(|d| vec![d]);
    let peers = meet(&spec, interrupt, &mut |d| on(JoinEvent::Note(d)), &mut folder)?;
    if on_gpus {
        // Rank 0 made the names by which ranks meet on GPUs.
        let lanes = serde_json::from_slice(&peers.told).map_err(|e| vec![unheard(&e)])?;
        orders.gpus = Some(OnGpus { lanes, first });
    }
    on(JoinEvent::Met(peers.addresses.clone()));
    if join.rank == 0 {
        return leader(&plan, &orders, options, &spec, peers, interrupt, on);
    }
    let arrive = || Ok(arrival(Arc::new(plan), &orders, &spec, peers));
    Ok(match follow(arrive, &orders, Rank(spec.rank))? {
        // Nobody launched these ranks: only rank 0 says so, when it is told to leave at once.
        Some(f) if f.class == FailureClass::LauncherGone => JoinReport::Cut,
        failure => JoinReport::Rank(failure),
    })
}

/// First rank of this rank's host: a launcher gives a host's ranks one after another.
fn first_of_host(join: &JoinOptions) -> u32 {
    let local = join.local_rank.unwrap_or(join.rank % join.local_world.max(1));
    join.rank.saturating_sub(local)
}

fn unheard(e: &serde_json::Error) -> Diagnostic {
    Diagnostic::error(&T0034, format!("names of the lanes on GPUs do not travel from rank 0: {e}"))
        .hint("start every rank from the same build with the same --device")
}

fn leader(
    plan: &Plan,
    orders: &Orders,
    options: &StreamOptions,
    spec: &Rendezvous,
    peers: Peers,
    interrupt: &Interrupt,
    on: &mut dyn FnMut(JoinEvent),
) -> Result<JoinReport, Diagnostics> {
    let own = Plan::read(&orders.plan)?;
    let mut tally = Tally::new(options.chunks);
    let (told, hear) = channel();
    let outcome = std::thread::scope(|s| {
        let leads = s.spawn(move || {
            let arrive = || {
                let arrival = arrival(Arc::new(own), orders, spec, peers);
                Ok(Arrival { interrupt: Some(interrupt.clone()), tell: Some(teller(told)), ..arrival })
            };
            lead(arrive, orders)
        });
        // It ends with the leader, which holds the other end.
        for heard in hear {
            on(match heard {
                Heard::Chunk(progress) => JoinEvent::Chunk(tally.chunk(&progress)),
                Heard::Failed(failure) => JoinEvent::Failed(failure),
            });
        }
        leads.join()
    });
    let (failure, interrupted) = match outcome {
        Ok(Ok(failure)) => (failure, interrupt.asked()),
        Ok(Err(ds)) => {
            (ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, Some(0), d)), false)
        }
        Err(panic) => std::panic::resume_unwind(panic),
    };
    Ok(JoinReport::Leader(stream::close(plan, options, failure, interrupted)))
}

enum Heard {
    Chunk(Progress),
    Failed(Failure),
}

fn teller(told: Sender<Heard>) -> Tell {
    Box::new(move |what| {
        let _ = told.send(match what {
            Told::Chunk(progress) => Heard::Chunk(progress.clone()),
            Told::Failed(failure) => Heard::Failed(failure.clone()),
        });
    })
}

fn arrival(plan: Arc<Plan>, orders: &Orders, spec: &Rendezvous, peers: Peers) -> Arrival {
    let welcome = Welcome {
        rank: spec.rank,
        world: spec.world,
        session: peers.session,
        sockets: peers.control.len() as u32,
        extras: 0,
        payload: Vec::new(),
    };
    Arrival {
        joined: Joined::over(welcome, Vec::new(), peers.control),
        lanes: Lanes::Streams(peers.lanes),
        common: Common::new(plan, orders.modelled).among(peers.digest),
        interrupt: None,
        tell: None,
    }
}

/// What this rank knows before it meets the others.
fn rendezvous(plan: &Plan, options: &StreamOptions, join: &JoinOptions) -> Result<Rendezvous, Diagnostics> {
    let mut wrong = Vec::new();
    let ranks = plan.sealed.mesh().ranks();
    if join.rank >= join.world {
        wrong.push(
            Diagnostic::error(&T0034, format!("there is no rank {} in a world of {}", join.rank, join.world))
                .at("RANK", join.rank.to_string())
                .at("WORLD_SIZE", join.world.to_string())
                .hint("ranks count from 0"),
        );
    }
    if ranks != join.world {
        wrong.push(
            Diagnostic::error(
                &T0034,
                format!("the plan is for {ranks} ranks and the world has {}", join.world),
            )
            .at("plan", format!("{} and {} ranks", plan.sealed.mesh(), ranks))
            .at("WORLD_SIZE", join.world.to_string())
            .hint("give a --mesh of as many ranks, the same on every rank"),
        );
    }
    let credentials = credentials(join).map_err(|d| wrong.push(d)).ok();
    let Some(credentials) = credentials.filter(|_| wrong.is_empty()) else { return Err(wrong) };
    // Ranks on GPUs meet there.
    let on_gpus = options.device == Device::Cuda;
    let specs = if on_gpus { Vec::new() } else { comm::groups(&plan.sealed) };
    Ok(Rendezvous {
        rank: join.rank,
        world: join.world,
        master: join.master.clone(),
        bind: join.bind,
        credentials,
        topology: links(plan),
        lanes: comm::members(&specs),
        facts: vec![
            ("build".into(), format!("tessera {}", env!("CARGO_PKG_VERSION"))),
            ("wire version".into(), tessera_runtime::wire::WIRE_VERSION.to_string()),
            ("plan digest".into(), plan.sealed.digest_hex()),
            ("topology".into(), plan.mapping.topology.name().into()),
            ("modelled decoder".into(), options.modelled.announced()),
            ("device".into(), if on_gpus { "cuda" } else { "cpu" }.into()),
        ],
        session: stream::session(plan),
        tells: Vec::new(),
        limit: join.timeout,
    })
}

fn credentials(join: &JoinOptions) -> Result<Credentials, Diagnostic> {
    // A file that does not do is no stranger.
    let own = |d: Diagnostic| Diagnostic { code: &T0035, ..d };
    let secret = match &join.secret {
        Some(path) => {
            let read = read(path, "secret", true)?;
            Some(Secret::new(&read).map_err(|d| own(d).at(shown(path), "read"))?)
        }
        None => None,
    };
    match (&join.tls, secret) {
        (Some(files), secret) => {
            let tls = Tls::new(
                &read(&files.certificate, "certificate", false)?,
                &read(&files.key, "key", true)?,
                &read(&files.authority, "certificate of the authority", false)?,
            )
            .map_err(own)?;
            Ok(Credentials::Tls(tls, secret))
        }
        (None, Some(secret)) => Ok(Credentials::Secret(secret)),
        (None, None) => Err(Diagnostic::error(
            &T0034,
            "nothing is named by which ranks prove that they belong together",
        )
        .hint(
            "give every rank the same --secret FILE, or certificates by --tls-cert, --tls-key and --tls-ca",
        )),
    }
}

/// Reads a small file; of a private one, refuses what everybody may read.
fn read(path: &Path, what: &str, private: bool) -> Result<Vec<u8>, Diagnostic> {
    let refuse =
        |why: String| Diagnostic::error(&T0035, format!("the {what} cannot be used")).at(shown(path), why);
    let io = |e: std::io::Error| refuse(e.to_string());
    let facts = std::fs::metadata(path).map_err(io)?;
    if !facts.is_file() || facts.len() > MAX_FILE_BYTES {
        return Err(refuse(format!("no file of at most {MAX_FILE_BYTES} bytes")));
    }
    let mode = facts.permissions().mode();
    if private && mode & 0o007 != 0 {
        return Err(refuse(format!("mode {:04o}: everybody on this host may use it", mode & 0o7777))
            .hint(format!("chmod 600 {}", path.display())));
    }
    std::fs::read(path).map_err(io)
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
