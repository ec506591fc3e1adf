//! Runs a rank other than the leader: a worker, or the mesh leader, which also relays.

use tessera_base::Diagnostics;
use tessera_mesh::Rank;
use tessera_runtime::Failure;
use tessera_runtime::driver::{ControlTopology, MeshLeaderParts, WorkerParts, run_mesh_leader, run_worker};

use super::context::{RankSetup, report_refusal};
use super::rank_plan::RankPlan;
use crate::rank_config::RankSettings;

/// Runs a rank other than the leader.
pub(crate) fn run_follower<P: RankPlan>(
    arrive: impl FnOnce() -> Result<RankSetup<P>, Diagnostics>,
    settings: &RankSettings<'_>,
    place: P::WeightsPlace,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let RankSetup { joined, communicators: lanes, context: mut common, .. } = arrive()?;
    common.apply_settings(settings, rank);
    common.begin_flight(settings.out, joined.welcome.session, rank);
    let tap = match common.build_interceptor(rank) {
        Ok(tap) => tap,
        Err(d) => {
            let mut joined = joined;
            let outcome = report_refusal(&mut joined, vec![d]).map(Some);
            common.end_flight(&outcome);
            return outcome;
        }
    };
    let engine = common.engine_factory(rank, place, settings.threads, lanes);
    let (config, flight) = (common.worker_config(rank), common.flight_sink());
    // If the leader is outside the mesh, the first mesh rank relays its messages to the others.
    let outcome = if common.topology == ControlTopology::ExternalLeader
        && common.plan.computing_ranks().first() == Some(&rank)
    {
        let (relay, engine) = (common.mesh_leader_config(rank), (config, engine));
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: engine, flight, interceptor: tap },
        )
    } else {
        run_worker(
            joined,
            WorkerParts { config, engine, topology: common.topology, flight, interceptor: tap },
        )
    };
    common.end_flight(&outcome);
    outcome
}
