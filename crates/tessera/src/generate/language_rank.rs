//! The plan and the model of a rank of a language model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_mesh::Axis;
use tessera_plan::Mapping;
use tessera_runtime::Limits;
use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::paged_cache::PagedCacheSpec;
use tessera_verify::SealedPlan;

use super::LanguagePlan;
use super::language_weights::{LanguagePlace, LanguageWeights};
use crate::faults::FaultInjector;
use crate::parity::ModelFacts;
use crate::rank::{RankModel, RankPlan};
use crate::rank_config::first_diagnostic;
use crate::shards::WeightOpener;

/// File of a model folder with its tokenizer.
pub(super) const TOKENIZER_FILE: &str = "tokenizer.json";

impl RankPlan for LanguagePlan {
    type WeightsPlace = LanguagePlace;

    fn sealed(&self) -> &SealedPlan {
        &self.sealed
    }

    fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    fn session_spec(&self) -> SessionSpec {
        SessionSpec::Text(self.paged_cache_spec())
    }

    fn limits(&self) -> Limits {
        let Mapping { d_in, d_out, max_outstanding, .. } = self.mapping;
        Limits { d_in, d_out, max_outstanding, ..Limits::default() }
    }

    fn forwards_per_call(&self) -> u64 {
        1
    }

    fn output_groups(&self) -> Vec<Vec<u32>> {
        let mesh = self.sealed.mesh();
        let mut stages = vec![Vec::new(); mesh.axis_size(Axis::Pp) as usize];
        for rank in self.computing_ranks() {
            stages[mesh.coord_of(rank).on_axis(Axis::Pp) as usize].push(rank.0);
        }
        stages
    }

    fn open_model(
        self: &Arc<LanguagePlan>,
        place: LanguagePlace,
        _: Option<&FaultInjector>,
    ) -> Result<Box<dyn RankModel>, Diagnostic> {
        let weights = LanguageWeights::open(&place, self).map_err(first_diagnostic)?;
        Ok(Box::new(LanguageRankModel { dir: place.dir, weights }))
    }
}

impl LanguagePlan {
    /// Returns the sizes of the caches as the lockstep knows them.
    pub(super) fn paged_cache_spec(&self) -> PagedCacheSpec {
        PagedCacheSpec {
            page_rows: self.cache.page_rows as u32,
            pages: self.cache.pages as u32,
            pages_per_sequence: self.cache.pages_per_sequence as u32,
        }
    }
}

struct LanguageRankModel {
    dir: PathBuf,
    weights: LanguageWeights,
}

impl RankModel for LanguageRankModel {
    fn weights(&mut self) -> &mut dyn WeightSource {
        &mut self.weights
    }

    fn into_facts(self: Box<Self>) -> Result<(ModelFacts, Option<WeightOpener>), Diagnostic> {
        Ok((read_facts(&self.weights, &self.dir)?, None))
    }
}

/// Reads the facts of a model that are compared across ranks.
pub(super) fn read_facts(weights: &LanguageWeights, dir: &Path) -> Result<ModelFacts, Diagnostic> {
    ModelFacts::of_language_model(weights.sample_digest(), &dir.join(TOKENIZER_FILE))
}
