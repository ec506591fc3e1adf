//! Builds the search question of a language query: finds the model, applies the recipe and the
//! defaults, and checks the prefetch hit rate.

use std::path::Path;

use tessera::files::read_text_file;
use tessera_base::{Diagnostic, Diagnostics, closest_name, format_choices};
use tessera_ir::analytic_model::AnalyticModel;
use tessera_models::{LanguageModel, zoo};
use tessera_plan::search::recipe::{self, Recipe};
use tessera_plan::search::{Job, Pins, SearchQuery, SearchSpace};

use crate::codes::{T0047, T0056};
use crate::defaults::{self, JobKind};
use crate::query::{LanguageQuery, ModelSource};

/// A search question with its recipe, its warnings and the kind of its attention.
pub(super) struct BuiltQuestion {
    pub(super) question: SearchQuery,
    pub(super) recipe: Option<Recipe>,
    pub(super) warnings: Diagnostics,
    pub(super) fused_attention: bool,
}

pub(super) fn build_question(asked: &LanguageQuery) -> Result<BuiltQuestion, Diagnostics> {
    build_question_for(asked, false)
}

/// Builds the question. With `other_mesh`, the question is about another mesh than the recipe's own,
/// so a recipe whose mesh is impossible still contributes its model, job and knobs instead of
/// failing.
pub(super) fn build_question_for(
    asked: &LanguageQuery,
    other_mesh: bool,
) -> Result<BuiltQuestion, Diagnostics> {
    let (recipe, model) = match &asked.model_source {
        ModelSource::Recipe(name) => {
            let mut r = recipe::require_recipe(name).map_err(|d| vec![*d])?;
            // A pinned axis overrides the recipe's.
            for (axis, pin) in
                r.axes.iter_mut().zip([asked.pins.tp, asked.pins.ep, asked.pins.pp, asked.pins.dp])
            {
                *axis = pin.unwrap_or(*axis);
            }
            (Some(r), find_zoo_model(r.model)?)
        }
        ModelSource::Zoo(name) => (None, find_zoo_model(name)?),
        ModelSource::Config(path) => (None, load_config(path)?),
    };
    let fused = !asked.machine.device_curves().attention.stores_scores;
    let work = model.to_analytic_model(fused);
    let (job, objective) = match recipe {
        Some(r) => (asked.job.unwrap_or(r.job), asked.objective.unwrap_or(r.objective)),
        None => {
            let usual =
                || defaults::job_with_defaults(JobKind::default(), None, None, &asked.machine, asked.devices);
            (asked.job.unwrap_or_else(usual), asked.objective.unwrap_or(defaults::DEFAULT_OBJECTIVE))
        }
    };
    let routing = asked.routing.unwrap_or(defaults::DEFAULT_ROUTING);
    let prefetch_hit_rate =
        asked.prefetch_hit_rate.map(|share| check_prefetch_hit_rate(share, &work, job)).transpose()?;
    let mut warnings = Vec::new();
    let mut question = match recipe {
        Some(r) => {
            let found = r.check(&work, &asked.machine.cluster, asked.devices, asked.strict);
            let broken = found.iter().any(Diagnostic::is_error);
            if broken && !other_mesh {
                return Err(found);
            }
            let mut q = r.to_query(work, asked.machine.clone(), routing, asked.strict);
            if broken {
                q.pins = Pins { tp: None, ep: None, pp: None, dp: None, ..q.pins };
                q.space.devices = asked.machine.cluster.device_count();
            } else {
                warnings = found;
            }
            q
        }
        None => {
            let mut space = SearchSpace::for_job(&work, job, &asked.machine.cluster);
            space.even_only = asked.strict;
            SearchQuery {
                work,
                job,
                objective,
                machine: asked.machine.clone(),
                routing,
                pins: Pins::default(),
                space,
            }
        }
    };
    (question.job, question.objective) = (job, objective);
    if let Some(n) = asked.devices {
        question.space.devices = n;
    }
    question.space.thresholds = asked.limits.clone();
    question.space.prefetch_hit_rate = prefetch_hit_rate.unwrap_or(question.space.prefetch_hit_rate);
    question.pins = asked.pins.or(&question.pins);
    Ok(BuiltQuestion { question, recipe, warnings, fused_attention: fused })
}

/// Checks that a prefetch hit rate lies in 0..=1 and applies to the model and the job.
fn check_prefetch_hit_rate(share: f64, work: &AnalyticModel, job: Job) -> Result<f64, Diagnostics> {
    let why = if !(0.0..=1.0).contains(&share) {
        format!("{share} is not between 0 and 1")
    } else if work.routed_experts().is_none() {
        format!("{} has no routed experts", work.name)
    } else if matches!(job, Job::Train { .. }) {
        "training keeps all experts in device memory".to_string()
    } else {
        return Ok(share);
    };
    let d = Diagnostic::error(&T0056, format!("the prefetch hit rate does not apply: {why}"))
        .with_label("prefetch hit rate", share.to_string());
    Err(vec![d.with_hint("omit it, or give a share such as 0.8 with a model that has routed experts")])
}

fn find_zoo_model(name: &str) -> Result<LanguageModel, Diagnostics> {
    zoo::find_model(name).ok_or_else(|| {
        let names: Vec<&str> = zoo::model_names().into_iter().collect();
        let d = Diagnostic::error(&T0047, format!("there is no model `{name}`"))
            .with_label("zoo", format_choices(&names));
        vec![match closest_name(name, names.iter().copied()) {
            Some(n) => d.with_hint(format!("did you mean `{n}`?")),
            None => d.with_hint("or give the path of a config.json"),
        }]
    })
}

fn load_config(path: &Path) -> Result<LanguageModel, Diagnostics> {
    let name = path.display().to_string();
    let text = read_text_file(path).map_err(|e| {
        vec![
            Diagnostic::error(&T0047, format!("{name} cannot be read: {e}"))
                .with_label(name.clone(), "this file"),
        ]
    })?;
    let model = LanguageModel::parse(&name, &text)?;
    // Users know a model by its folder name; many models share one class name.
    let folder = path.parent().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
    Ok(match folder {
        Some(folder) if path.file_name().is_some_and(|n| n == "config.json") => {
            LanguageModel { name: folder, ..model }
        }
        _ => model,
    })
}
