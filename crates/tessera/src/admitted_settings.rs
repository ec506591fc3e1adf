//! The values of a stream's settings that its plan admits: what may change while the stream runs.

use tessera_base::Diagnostic;
use tessera_models::ContextRegime;
pub use tessera_models::DEFAULT_STEP_LIST;

use crate::codes::T0054;
use crate::plan::Plan;

/// The settings of denoising and of the context that a plan admits.
#[derive(Debug, Clone)]
pub struct AdmittedSettings {
    model: String,
    /// Names of the lists of denoise steps, in the order of the plan.
    step_lists: Vec<String>,
    /// Whether programs of the plan read the attention bias of context keys.
    reads_bias: bool,
}

impl AdmittedSettings {
    /// Returns what a plan admits.
    #[must_use]
    pub fn from_plan(plan: &Plan) -> AdmittedSettings {
        let lists = plan.video.stream.all_step_lists();
        AdmittedSettings {
            model: plan.model.clone(),
            step_lists: lists.into_iter().map(|(name, _)| name.to_string()).collect(),
            reads_bias: plan.video.context_regime() == ContextRegime::Recompute,
        }
    }

    /// Returns the names of the lists of denoise steps, that of the model first.
    #[must_use]
    pub fn step_lists(&self) -> &[String] {
        &self.step_lists
    }

    /// Returns whether a stream may change its attention bias.
    #[must_use]
    pub fn reads_bias(&self) -> bool {
        self.reads_bias
    }

    /// Returns the index of a list of denoise steps.
    ///
    /// # Errors
    /// T0054 if the plan has none of this name.
    pub fn find_step_list(&self, name: &str) -> Result<u32, Diagnostic> {
        let at = self.step_lists.iter().position(|list| list == name);
        at.and_then(|at| u32::try_from(at).ok()).ok_or_else(|| {
            Diagnostic::error(&T0054, format!("the plan has no list of denoise steps `{name}`"))
                .with_label(&self.model, format!("has {}", self.step_lists.join(", ")))
                .with_hint(
                    "name one of them, or add the list to [schedule.lists] of stream.toml and plan again",
                )
        })
    }

    /// Checks an attention bias.
    ///
    /// # Errors
    /// T0054 if no program of the plan reads one, or if it is not above 0 and at most 1.
    pub fn check_bias(&self, bias: f32) -> Result<(), Diagnostic> {
        if !self.reads_bias {
            return Err(Diagnostic::error(&T0054, "no program of the plan reads an attention bias")
                .with_label(&self.model, "keeps its caches from chunk to chunk")
                .with_hint("plan with --cache recompute, whose context keys have a bias"));
        }
        if bias > 0.0 && bias <= 1.0 {
            return Ok(());
        }
        Err(Diagnostic::error(&T0054, format!("the attention bias {bias} is not above 0 and at most 1"))
            .with_hint("1 weighs context keys as the others, and a smaller number less"))
    }
}
