//! The plan and the weights of a rank that runs array programs.

use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_plan::Mapping;
use tessera_runtime::Limits;
use tessera_runtime::call_state::SessionSpec;
use tessera_verify::SealedPlan;

use super::array_plan::ArrayPlan;
use super::array_weights::{ArrayWeights, ArrayWeightsPlace};
use crate::faults::FaultInjector;
use crate::parity::ModelFacts;
use crate::rank::{RankModel, RankPlan};
use crate::rank_config::first_diagnostic;
use crate::shards::WeightOpener;

impl RankPlan for ArrayPlan {
    type WeightsPlace = ArrayWeightsPlace;

    fn sealed(&self) -> &SealedPlan {
        &self.sealed
    }

    fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn session_spec(&self) -> SessionSpec {
        SessionSpec::Arrays
    }

    fn limits(&self) -> Limits {
        let Mapping { d_in, d_out, max_outstanding, .. } = self.mapping;
        Limits { d_in, d_out, max_outstanding, ..Limits::default() }
    }

    fn forwards_per_call(&self) -> u64 {
        1
    }

    fn output_groups(&self) -> Vec<Vec<u32>> {
        self.programs.output_groups.clone()
    }

    fn open_model(
        self: &Arc<ArrayPlan>,
        place: ArrayWeightsPlace,
        _: Option<&FaultInjector>,
    ) -> Result<Box<dyn RankModel>, Diagnostic> {
        let weights = ArrayWeights::open(&place, &self.programs).map_err(first_diagnostic)?;
        Ok(Box::new(ArrayRankModel { weights }))
    }
}

struct ArrayRankModel {
    weights: ArrayWeights,
}

impl RankModel for ArrayRankModel {
    fn weights(&mut self) -> &mut dyn WeightSource {
        &mut self.weights
    }

    fn into_facts(self: Box<Self>) -> Result<(ModelFacts, Option<WeightOpener>), Diagnostic> {
        Ok((ModelFacts::of_arrays(self.weights.digest()), None))
    }
}
