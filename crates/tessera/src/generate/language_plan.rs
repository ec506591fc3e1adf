//! Plans a language model: its programs, for few buckets, lowered to ranks and sealed.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::Bundle;
use tessera_mesh::Axis;
use tessera_models::{
    DecoderModel, PagedCache, TokenBucket, TokenOutput, build_token_phases, token_phase_name,
};
use tessera_plan::{DecoderPrecision, DtypePolicy, LogicalModel, Mapping, Strategy, lower};
use tessera_verify::{DeviceLimits, SealedPlan, seal};

use crate::codes::T0086;

/// Positions of a page. Small pages waste few positions at the end of a sequence; a CPU looks up each once.
const PAGE_ROWS: u64 = 16;

/// The extents of a run, which fix every shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LanguageSettings {
    /// Sequences that are generated at once.
    pub sequences: u64,
    /// Positions of the longest sequence, with its prompt.
    pub positions: u64,
    /// Rows of a call that reads a part of a prompt.
    pub prompt_rows: u64,
    /// What the programs return.
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
    /// Extents of the KV caches.
    pub cache: PagedCache,
    /// The bucket that reads prompts, one sequence at a time.
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
        check_settings(model, mapping, settings)?;
        let pages_per_sequence = settings.positions.div_ceil(PAGE_ROWS);
        let cache = PagedCache {
            page_rows: PAGE_ROWS,
            pages: pages_per_sequence * settings.sequences,
            pages_per_sequence,
            replicates_heads: !model.is_latent()
                && u64::from(mapping.mesh.axis_size(Axis::Tp)) > model.kv_heads,
        };
        let prefill = TokenBucket { sequences: 1, rows: settings.prompt_rows };
        let decode = TokenBucket { sequences: settings.sequences, rows: 1 };
        let mut mapping = Mapping { strategy: Strategy::Megatron, ..mapping.clone() };
        let logical = logical_model(model, cache, &[prefill, decode], settings.output);
        let mut bundle: Bundle = lower(&logical, &mut mapping)?;
        bundle.mapping = format!("{}\n{model:?}\n{cache:?}", mapping.to_toml());
        let sealed = seal(bundle, &DeviceLimits::default())?;
        Ok(LanguagePlan { model: model.clone(), mapping, sealed, cache, prefill, decode })
    }
}

fn check_settings(model: &DecoderModel, mapping: &Mapping, s: LanguageSettings) -> Result<(), Diagnostics> {
    let refuse = |message: String, hint: &str| Err(vec![Diagnostic::error(&T0086, message).with_hint(hint)]);
    if s.positions > model.max_positions {
        return refuse(
            format!("{} positions, but the model has {}", s.positions, model.max_positions),
            "shorten the prompt, or generate fewer tokens",
        );
    }
    if mapping.dtype != DtypePolicy::F32 {
        return refuse(
            format!("dtype {} on CPUs, which compute in f32", mapping.dtype.name()),
            "leave out --dtype",
        );
    }
    Ok(())
}

fn logical_model(
    m: &DecoderModel,
    cache: PagedCache,
    buckets: &[TokenBucket],
    output: TokenOutput,
) -> LogicalModel {
    let mut buckets = buckets.to_vec();
    buckets.dedup();
    let calls = buckets.iter().map(|b| token_phase_name(*b)).map(|name| (name.clone(), vec![name])).collect();
    LogicalModel {
        phases: build_token_phases(m, cache, &buckets, output),
        calls,
        heads: if m.is_latent() || cache.replicates_heads { m.heads } else { m.kv_heads },
        head_dim: m.head_dim,
        hidden_size: m.extents.width,
        ffn_size: m.narrowest_feed_forward(),
        tokens: buckets.iter().map(|b| b.sequences * b.rows).max().unwrap_or(1),
        blocks: m.extents.layers,
        experts: m.experts.as_ref().map_or(0, |e| e.count),
        decoder: DecoderPrecision::Exact,
    }
}
