//! Plans a language model: its programs, for few buckets, lowered to ranks and sealed.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::Bundle;
use tessera_mesh::{Axis, Mesh};
use tessera_models::{
    DecoderModel, IdSource, PagedCache, TokenBucket, TokenOutput, TokenPhase, build_token_phases,
};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, Strategy, lower};
use tessera_verify::{DeviceLimits, SealedPlan, seal};

use crate::codes::{T0011, T0086};
use crate::files::{StagedFolder, read_text};
use crate::plan_folder::{
    CONFIG_FILE, ModelNames, folder_name, from_json, read_sealed, to_json, write_sealed,
};

/// Positions of a page. Small pages waste few positions at the end of a sequence; a CPU looks up each once.
const PAGE_ROWS: u64 = 16;

/// Most ids that one call may decode. More would save little, and delay the texts.
const MAX_IDS_PER_CALL: u64 = 64;

/// The extents of a run, which fix every shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageSettings {
    /// Sequences that are generated at once.
    pub sequences: u64,
    /// Positions of the longest sequence, with its prompt.
    pub positions: u64,
    /// Rows of each prompt in a call that reads parts of prompts.
    pub prompt_rows: u64,
    /// Most prompts of which such a call reads a part.
    pub prompts_per_call: u64,
    /// Most ids of each sequence that one call decodes; 1 for programs that return logits.
    pub ids_per_call: u64,
    /// What the programs return.
    #[serde(with = "TokenOutputName")]
    pub output: TokenOutput,
}

/// A sealed plan of a language model.
#[derive(Debug)]
pub struct LanguagePlan {
    /// The model, as sealed.
    pub model: DecoderModel,
    /// The mapping, with the blocks of each stage that lowering fills in.
    pub mapping: Mapping,
    /// The verified programs of all phases and roles.
    pub sealed: SealedPlan,
    /// The extents of the run.
    pub settings: LanguageSettings,
    /// Extents of the KV caches.
    pub cache: PagedCache,
    /// The bucket that reads parts of prompts.
    pub prefill: TokenBucket,
    /// The bucket that decodes one id of each sequence.
    pub decode: TokenBucket,
}

impl LanguagePlan {
    /// Plans a model under a mapping and seals the result. The strategy is megatron: with few rows per call
    /// there are too few tokens to shard.
    ///
    /// # Errors
    /// T0086 if a sequence would exceed the model's positions or a mapping cannot run here, the reasons why the
    /// mapping does not fit the model, or what the verifier rejects.
    pub fn new(
        model: &DecoderModel,
        mapping: &Mapping,
        settings: LanguageSettings,
    ) -> Result<LanguagePlan, Diagnostics> {
        check_settings(model, settings)?;
        let mut mapping = Mapping { strategy: Strategy::Megatron, ..mapping.clone() };
        let logical = logical_model(model, &mapping.mesh, settings);
        let mut bundle: Bundle = lower(&logical, &mut mapping)?;
        bundle.mapping = sealed_text(&mapping, model, settings);
        let sealed = seal(bundle, &DeviceLimits::default())?;
        Ok(LanguagePlan::from_sealed(model.clone(), mapping, sealed, settings))
    }

    fn from_sealed(
        model: DecoderModel,
        mapping: Mapping,
        sealed: SealedPlan,
        settings: LanguageSettings,
    ) -> LanguagePlan {
        let [prefill, decode] = settings.buckets();
        LanguagePlan {
            cache: settings.cache(&model, &mapping.mesh),
            model,
            mapping,
            sealed,
            settings,
            prefill,
            decode,
        }
    }

    /// Writes the plan's files under `prefix` into a staged folder. `model_dir` is the folder of the model.
    ///
    /// # Errors
    /// T0014 if a file cannot be written.
    pub(super) fn write_into(
        &self,
        folder: &mut StagedFolder,
        prefix: &str,
        model_dir: &Path,
    ) -> Result<(), Diagnostic> {
        let names = ModelNames { model: folder_name(model_dir), model_dir: model_dir.display().to_string() };
        write_sealed(folder, prefix, (&self.sealed, &self.mapping), &names)?;
        folder.write(&format!("{prefix}{CONFIG_FILE}"), self.model.config.as_bytes())?;
        folder.write(&format!("{prefix}{SETTINGS_FILE}"), to_json(&self.settings).as_bytes())
    }

    /// Returns the bytes of weights, KV caches, inputs and temporaries of each rank, in rank order.
    #[must_use]
    pub fn rank_bytes(&self) -> Vec<[u64; 4]> {
        let memory = self.sealed.mesh().iter().map(|rank| self.sealed.rank_memory(rank).unwrap_or_default());
        memory.map(|m| [m.weights.0, m.buffers.0, m.inputs.0, m.temporaries.0]).collect()
    }

    /// Returns the programs of a call that decodes this many ids of each sequence, in order.
    #[must_use]
    pub fn decoding_phases(&self, ids: usize) -> Vec<TokenPhase> {
        self.settings.decoding_phases().take(ids).collect()
    }

    /// Returns whether a folder holds the plan of a language model.
    pub(crate) fn is_in(dir: &Path) -> bool {
        dir.join(SETTINGS_FILE).is_file()
    }

    /// Writes the plan into a new folder. `model_dir` is the folder of the model.
    ///
    /// # Errors
    /// T0014 if the folder exists or cannot be written.
    pub fn write(&self, dir: &Path, model_dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        self.write_into(&mut folder, "", model_dir)?;
        folder.commit()
    }

    /// Reads a plan folder and verifies it again; its digest must equal the sealed one.
    ///
    /// # Errors
    /// T0011, T0012, or what the verifier rejects.
    pub fn read(dir: &Path) -> Result<LanguagePlan, Diagnostics> {
        LanguagePlan::read_with_limits(dir, &DeviceLimits::default())
    }

    /// Like [`LanguagePlan::read`], with the limits of the machine that will run the plan.
    ///
    /// # Errors
    /// T0011, T0012, or what the verifier rejects.
    pub fn read_with_limits(dir: &Path, limits: &DeviceLimits) -> Result<LanguagePlan, Diagnostics> {
        let text = |name: &str| {
            let path = dir.join(name);
            read_text(&path, &T0011).map(|text| (path.display().to_string(), text)).map_err(|d| vec![d])
        };
        let (file, config) = text(CONFIG_FILE)?;
        let model = DecoderModel::parse(&file, &config)?;
        let (file, settings) = text(SETTINGS_FILE)?;
        let settings: LanguageSettings = from_json(&file, &settings)?;
        let read = read_sealed(dir, limits, &|mapping| sealed_text(mapping, &model, settings))?;
        Ok(LanguagePlan::from_sealed(model, read.mapping, read.sealed, settings))
    }
}

/// File of a plan folder with the extents of the run.
const SETTINGS_FILE: &str = "language.json";

impl LanguageSettings {
    /// Creates the extents of one text whose calls read a part of one prompt, or decode one id.
    #[must_use]
    pub fn new(positions: u64, prompt_rows: u64, output: TokenOutput) -> LanguageSettings {
        LanguageSettings {
            sequences: 1,
            positions,
            prompt_rows,
            prompts_per_call: 1,
            ids_per_call: 1,
            output,
        }
    }

    /// Returns the extents of the KV caches, which hold every sequence at its full length.
    fn cache(self, model: &DecoderModel, mesh: &Mesh) -> PagedCache {
        let pages_per_sequence = self.positions.div_ceil(PAGE_ROWS);
        PagedCache {
            page_rows: PAGE_ROWS,
            pages: pages_per_sequence * self.sequences,
            pages_per_sequence,
            replicates_heads: !model.is_latent() && u64::from(mesh.axis_size(Axis::Tp)) > model.kv_heads,
        }
    }

    /// Returns the programs of a call that decodes as many ids as a call may, in order.
    fn decoding_phases(self) -> impl Iterator<Item = TokenPhase> {
        let [_, bucket] = self.buckets();
        let keeps_ids = self.ids_per_call > 1;
        let phase = move |i| TokenPhase {
            bucket,
            ids: if i == 0 { IdSource::Call } else { IdSource::LastPhase },
            keeps_ids,
        };
        (0..self.ids_per_call).map(phase)
    }

    /// Returns every program of a plan.
    fn list_phases(self) -> Vec<TokenPhase> {
        let [prefill, decode] = self.buckets();
        let reads_prompts = (prefill != decode).then(|| TokenPhase::from_call(prefill));
        // Every phase behind the second one runs the program of the second.
        reads_prompts.into_iter().chain(self.decoding_phases().take(2)).collect()
    }

    /// Returns the calls that a plan admits: one reads parts of prompts, and for each number of ids up to the limit one
    /// decodes so many.
    fn list_calls(self) -> Vec<(String, Vec<String>)> {
        let names: Vec<String> = self.decoding_phases().map(|phase| phase.name()).collect();
        let [prefill, decode] = self.buckets();
        let reads_prompts = (prefill != decode).then(|| TokenPhase::from_call(prefill).name());
        let reads_prompts = reads_prompts.map(|name| (name.clone(), vec![name]));
        let decodes = (1..=names.len()).map(|ids| {
            let suffix = if ids == 1 { String::new() } else { format!(".x{ids}") };
            (format!("{}{suffix}", names[0]), names[..ids].to_vec())
        });
        reads_prompts.into_iter().chain(decodes).collect()
    }

    /// Returns the bucket that reads prompts and the one that decodes.
    fn buckets(self) -> [TokenBucket; 2] {
        let prefill = TokenBucket { sequences: self.prompts_per_call, rows: self.prompt_rows };
        [prefill, TokenBucket { sequences: self.sequences, rows: 1 }]
    }
}

/// Returns the canonical text that the seal covers besides the programs.
fn sealed_text(mapping: &Mapping, model: &DecoderModel, settings: LanguageSettings) -> String {
    format!("{}\n{}\n{}", mapping.to_toml(), model.config, to_json(&settings))
}

/// The names of [`TokenOutput`] in a file.
#[derive(Serialize, Deserialize)]
#[serde(remote = "TokenOutput", rename_all = "snake_case")]
enum TokenOutputName {
    Next,
    Logits,
}

fn check_settings(model: &DecoderModel, s: LanguageSettings) -> Result<(), Diagnostics> {
    let refuse = |message: String, hint: &str| Err(vec![Diagnostic::error(&T0086, message).with_hint(hint)]);
    if s.positions > model.max_positions {
        return refuse(
            format!("{} positions, but the model has {}", s.positions, model.max_positions),
            "shorten the prompt, or generate fewer tokens",
        );
    }
    if !(1..=s.sequences).contains(&s.prompts_per_call) {
        return refuse(
            format!("{} prompts per call of {} texts", s.prompts_per_call, s.sequences),
            "let a call read 1 prompt, or at most as many as there are texts",
        );
    }
    let most = if s.output == TokenOutput::Next { MAX_IDS_PER_CALL } else { 1 };
    if !(1..=most).contains(&s.ids_per_call) {
        return refuse(
            format!("{} ids per call, but such a plan decodes 1 to {most}", s.ids_per_call),
            "choose another number of ids per call",
        );
    }
    Ok(())
}

fn logical_model(m: &DecoderModel, mesh: &Mesh, settings: LanguageSettings) -> LogicalModel {
    let cache = settings.cache(m, mesh);
    LogicalModel {
        phases: build_token_phases(m, cache, &settings.list_phases(), settings.output),
        calls: settings.list_calls(),
        heads: if m.is_latent() || cache.replicates_heads { m.heads } else { m.kv_heads },
        head_dim: m.head_dim,
        hidden_size: m.extents.width,
        ffn_size: m.narrowest_feed_forward(),
        tokens: settings.buckets().iter().map(|b| b.sequences * b.rows).max().unwrap_or(1),
        blocks: m.extents.layers,
        experts: m.experts.as_ref().map_or(0, |e| e.count),
        decoder: DecoderPrecision::Exact,
    }
}
