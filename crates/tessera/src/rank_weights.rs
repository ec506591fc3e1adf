//! The weights that a rank's programs read: the generator's, and those of the VAE if the ranks decode.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::Type;

use crate::model::{Model, Weights};
use crate::plan::{Plan, is_phase_of_calls};
use crate::vae_weights::{PROGRAM_PREFIX, VaeWeights};

/// The weights of a rank's programs.
pub(crate) struct RankWeights {
    pub(crate) generator: Weights,
    vae: Option<VaeWeights>,
}

impl RankWeights {
    /// Opens the weights of a model that the calls of a plan read.
    ///
    /// # Errors
    /// Returns why the weights of a part cannot be opened.
    pub(crate) fn open(model: &Model, plan: &Plan) -> Result<RankWeights, Diagnostics> {
        RankWeights::with_generator(model.open_weights()?, model, plan)
    }

    /// Combines the weights of a generator with those of the model's VAE, which no reload replaces.
    ///
    /// # Errors
    /// Returns why the weights of the VAE cannot be opened.
    pub(crate) fn with_generator(
        generator: Weights,
        model: &Model,
        plan: &Plan,
    ) -> Result<RankWeights, Diagnostics> {
        let decodes = is_phase_of_calls(&plan.sealed, "decode.first");
        let vae = if decodes { model.open_vae_weights()? } else { None };
        Ok(RankWeights { generator, vae })
    }

    fn source_of(&mut self, name: &str) -> &mut dyn WeightSource {
        match &mut self.vae {
            Some(vae) if name.starts_with(PROGRAM_PREFIX) => vae,
            _ => &mut self.generator,
        }
    }
}

impl WeightSource for RankWeights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        self.source_of(name).read(name, ty, load, rank)
    }

    fn check(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<(), Diagnostic> {
        self.source_of(name).check(name, ty, load, rank)
    }

    fn check_finite(&mut self, name: &str) -> Result<(), Diagnostic> {
        self.source_of(name).check_finite(name)
    }
}
