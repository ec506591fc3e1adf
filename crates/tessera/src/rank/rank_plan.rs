//! What a rank needs of its plan and of its model, whatever the model generates.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_mesh::Rank;
use tessera_plan::Mapping;
use tessera_runtime::Limits;
use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::driver::ControlTopology;
use tessera_verify::SealedPlan;

use crate::faults::FaultInjector;
use crate::model::Model;
use crate::parity::ModelFacts;
use crate::plan::Plan;
use crate::rank_config::first_diagnostic;
use crate::rank_weights::RankWeights;
use crate::run_settings::{ranks_with_latents, run_limits, stream_spec};
use crate::shards::{WeightOpener, weight_opener};
use crate::weights_origin::WeightsOrigin;

/// A plan that ranks run.
pub(crate) trait RankPlan: Send + Sync + Sized + 'static {
    /// Where a rank finds the weights of its model.
    type WeightsPlace: Clone + Send + 'static;

    fn sealed(&self) -> &SealedPlan;

    fn mapping(&self) -> &Mapping;

    /// Returns what the calls compute.
    fn session_spec(&self) -> SessionSpec;

    /// Returns the bounds of queues and waits.
    fn limits(&self) -> Limits;

    /// Returns the forwards of the model in a call of the steady state; 0 if calls differ.
    fn forwards_per_call(&self) -> u64;

    /// Returns the groups of ranks whose outputs must be equal. The first rank of each sends them to the leader,
    /// and a rank in no group returns none.
    fn output_groups(&self) -> Vec<Vec<u32>>;

    /// Opens the weights of the model, with the changes of a drill.
    ///
    /// # Errors
    /// Returns why they cannot be opened.
    fn open_model(
        self: &Arc<Self>,
        place: Self::WeightsPlace,
        drill: Option<&FaultInjector>,
    ) -> Result<Box<dyn RankModel>, Diagnostic>;

    /// Returns the ranks that compute, ascending.
    fn computing_ranks(&self) -> Vec<Rank> {
        let mesh = *self.sealed().mesh();
        mesh.inner_ranks().collect()
    }

    /// Returns the topology of the control links between the leader and the ranks.
    fn control_topology(&self) -> ControlTopology {
        match self.mapping().topology.outside_ranks() {
            0 => ControlTopology::Mesh,
            _ => ControlTopology::ExternalLeader,
        }
    }
}

/// The opened model of a rank.
pub(crate) trait RankModel {
    /// Returns the weights that the programs read.
    fn weights(&mut self) -> &mut dyn WeightSource;

    /// Returns the facts that are compared across ranks, and the opener of other weights, if the model has one.
    ///
    /// # Errors
    /// Returns why a file cannot be read.
    fn into_facts(self: Box<Self>) -> Result<(ModelFacts, Option<WeightOpener>), Diagnostic>;
}

impl RankPlan for Plan {
    type WeightsPlace = (PathBuf, WeightsOrigin);

    fn sealed(&self) -> &SealedPlan {
        &self.sealed
    }

    fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn session_spec(&self) -> SessionSpec {
        SessionSpec::Video(stream_spec(self))
    }

    fn limits(&self) -> Limits {
        run_limits(self)
    }

    fn forwards_per_call(&self) -> u64 {
        // A steady chunk runs one forward per step and one that recomputes or caches the context. A synthetic delay is that
        // of the model's own steps.
        self.video.stream.steps.len() as u64 + 1
    }

    fn output_groups(&self) -> Vec<Vec<u32>> {
        vec![ranks_with_latents(self)]
    }

    fn open_model(
        self: &Arc<Plan>,
        (dir, origin): (PathBuf, WeightsOrigin),
        drill: Option<&FaultInjector>,
    ) -> Result<Box<dyn RankModel>, Diagnostic> {
        let mut model = Model::open_for_plan(&dir, self)?.with_weights(origin);
        if let Some(hand) = drill {
            hand.modify_model(&mut model)?;
        }
        let weights = RankWeights::open(&model, self).map_err(first_diagnostic)?;
        Ok(Box::new(VideoRankModel { plan: Arc::clone(self), model, weights }))
    }
}

struct VideoRankModel {
    plan: Arc<Plan>,
    model: Model,
    weights: RankWeights,
}

impl RankModel for VideoRankModel {
    fn weights(&mut self) -> &mut dyn WeightSource {
        &mut self.weights
    }

    fn into_facts(self: Box<Self>) -> Result<(ModelFacts, Option<WeightOpener>), Diagnostic> {
        let VideoRankModel { plan, model, weights } = *self;
        let facts = ModelFacts::read(&model, &weights.generator)?;
        Ok((facts, Some(weight_opener(plan, model, weights.generator))))
    }
}
