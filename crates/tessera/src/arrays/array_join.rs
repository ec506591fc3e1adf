//! Ranks of array programs that meet over the network: rank 0, which the process of the calls launches on its own host, and
//! every other rank, which a command line starts on its own.
//!
//! Every rank reads its own copy of the plan and of the weights. The rendezvous compares the digests of the plan before
//! anything runs, and the ranks compare those of the weights.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};
use tessera_mesh::Rank;
use tessera_report::record::RunDevice;
use tessera_runtime::Failure;
use tessera_runtime::driver::rendezvous::{RendezvousPeers, RendezvousSpec, join_peers};
use tessera_runtime::driver::{JoinedRank, StopHandle};
use tessera_runtime::wire::Welcome;

use super::array_config::{ArrayConfig, ArrayRendezvous, JoinOrders};
use super::array_plan::ArrayPlan;
use crate::codes::{T0034, T0091};
use crate::communicators::EndpointSources;
use crate::cuda::GpuRankConfig;
use crate::files::RunFolder;
use crate::join::{JoinOptions, build_rendezvous, setup_from_peers};
use crate::rank::{RankContext, RankSetup, run_follower};
use crate::rank_launch::{check_device, choose_threads};
use crate::synthetic_delays::SyntheticDelays;
use crate::terminal::print_stderr;

/// A rank other than rank 0.
#[derive(Debug, Clone)]
pub struct ArrayRankOptions {
    /// Folder of the plan on this host.
    pub plan: PathBuf,
    /// Safetensors file with the weights on this host; `None` for a plan without weights.
    pub weights: Option<PathBuf>,
    /// Number of the rank, from 1.
    pub rank: u32,
    /// Where it meets the others.
    pub rendezvous: ArrayRendezvous,
    /// Kind of device, that of every rank of the run.
    pub device: RunDevice,
    /// Index of the rank among those of this host, which selects its GPU unless the mesh of the plan names one.
    pub local_rank: u32,
    /// Number of CPU threads; by default the cores of this host divided among all ranks.
    pub threads: Option<usize>,
    /// Folder for the flight record; a temporary one if nothing is named.
    pub out: Option<PathBuf>,
}

/// Joins the other ranks and runs until the leader ends the run. Returns the failure that ended it.
///
/// # Errors
/// What is wrong with the plan, T0091 if it has weights and none are given, T0034 or T0035 for the options, T0801 for an op
/// that the device does not run, what this host lacks for its GPU, T0740 or T0756 to T0758 from the rendezvous.
pub fn run_joined_rank(options: &ArrayRankOptions) -> Result<Option<Failure>, Diagnostics> {
    let plan = Arc::new(ArrayPlan::read(&options.plan)?);
    if options.weights.is_none() && plan.weights().next().is_some() {
        let d = Diagnostic::error(&T0091, "the plan has weights, and none are given");
        return Err(vec![
            d.with_hint("name the file with --weights, such as weights.safetensors of a saved function"),
        ]);
    }
    let first_rank_of_host = options.rank.checked_sub(options.local_rank).ok_or_else(|| {
        let what = format!("rank {} cannot be number {} on its host", options.rank, options.local_rank);
        vec![
            Diagnostic::error(&T0034, what)
                .with_hint("the ranks of a host count from 0, like the first rank of the run"),
        ]
    })?;
    check_device(&plan.sealed, options.device, options.local_rank + 1)?;
    let folder = RunFolder::new(options.out.as_deref(), "tessera-arrays").map_err(|d| vec![d])?;
    let mut config = ArrayConfig {
        plan: options.plan.clone(),
        digest: plan.sealed.digest_hex(),
        // A plan without weights opens no file.
        weights: options.weights.clone().unwrap_or_default(),
        out: folder.path().to_path_buf(),
        threads: choose_threads(plan.sealed.mesh(), options.threads, false).map_err(|d| vec![d])?,
        wire_dump: false,
        times_single_ops: false,
        gpus: None,
        rendezvous: Some(options.rendezvous.clone()),
    };
    let (spec, peers) = meet_ranks(&plan, (options.rank, options.device), &options.rendezvous, None)?;
    let orders: JoinOrders =
        serde_json::from_slice(&peers.leader_payload).map_err(|e| vec![orders_error(&e)])?;
    config.times_single_ops = orders.times_single_ops;
    if options.device == RunDevice::Cuda {
        let communicator_ids = orders.communicator_ids;
        config.gpus = Some(GpuRankConfig { communicator_ids, first_rank_of_host });
    }
    let setup = setup_from_peers(plan, &SyntheticDelays::default(), &spec, peers);
    let place = config.weights_place();
    let outcome = run_follower(|| Ok(setup), &config.settings(), place, Rank(options.rank));
    folder.close(!matches!(outcome, Ok(None)));
    outcome
}

/// Builds the setup of the leader, whose process a launcher started and which has met the other ranks. The sockets to the
/// launcher stay.
pub(crate) fn setup_leader(
    mut joined: JoinedRank,
    plan: Arc<ArrayPlan>,
    (spec, peers): (RendezvousSpec, RendezvousPeers),
) -> RankSetup<ArrayPlan> {
    let frame_pipes = std::mem::take(&mut joined.extra_fds);
    let welcome = Welcome {
        rank: spec.rank,
        world_size: spec.world_size,
        session: peers.session,
        control_sockets: peers.control.len() as u32,
        extra_fds: 0,
        payload: Vec::new(),
    };
    RankSetup {
        joined: joined.with_peers(welcome, peers.control),
        communicators: EndpointSources::Streams(peers.communicators),
        context: RankContext::new(plan, SyntheticDelays::default()).with_peers(peers.digest),
        frame_pipes,
        interrupt: None,
        on_event: None,
    }
}

/// Meets the other ranks of a plan. Rank 0 gives them its orders.
///
/// # Errors
/// T0034 or T0035 for the options, T0740 or T0756 to T0758 from the rendezvous.
pub(crate) fn meet_ranks(
    plan: &ArrayPlan,
    (rank, device): (u32, RunDevice),
    rendezvous: &ArrayRendezvous,
    orders: Option<&JoinOrders>,
) -> Result<(RendezvousSpec, RendezvousPeers), Diagnostics> {
    let ArrayRendezvous { master, bind, secret, timeout } = rendezvous.clone();
    let join = JoinOptions {
        rank,
        world: plan.sealed.mesh().world_size(),
        master,
        local_world: 1,
        local_rank: None,
        cores: None,
        bind,
        secret: Some(secret),
        tls: None,
        timeout,
    };
    let mut spec = build_rendezvous(plan, device, &SyntheticDelays::default(), &join)?;
    if let Some(orders) = orders {
        spec.leader_payload = serde_json::to_vec(orders).map_err(|e| vec![orders_error(&e)])?;
    }
    // Nobody but the operator of this host reads which strangers knocked.
    let mut note = |d: Diagnostic| print_stderr(&render_all(&[d], DiagnosticFormat::Text, &|_| None));
    let peers = join_peers(&spec, &StopHandle::default(), &mut note, &mut || Ok(()))?;
    Ok((spec, peers))
}

fn orders_error(e: &serde_json::Error) -> Diagnostic {
    Diagnostic::error(&T0034, format!("cannot transfer the orders of rank 0: {e}"))
        .with_hint("start every rank from the same build")
}
