//! Language models: dims from their own config, converted to op rows for estimates, and the programs of those
//! that run.

mod analytic_model;
mod config;
mod decoder;
mod graph;
mod rotary;
#[cfg(test)]
mod tests;

pub use decoder::{DecoderModel, ExpertGate, ExpertLayers, ExpertNames};
pub use graph::{
    IdSource, LOGITS, NEXT_IDS, PagedCache, ROTARY_FREQUENCIES, TokenBucket, TokenInput, TokenOutput,
    TokenPhase, build_token_phases, token_ids_name,
};

pub use rotary::{RotaryConfig, RotaryScaling};

/// Dimensions of a decoder-only language model.
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageModel {
    /// Name in reports: `_name_or_path` of the config, or else the architecture.
    pub name: String,
    /// Width of the residual stream.
    pub width: u64,
    /// Number of layers, without extra multi-token-prediction modules.
    pub layers: u64,
    /// Number of entries in the vocabulary: rows of the embedding table.
    pub vocab: u64,
    /// Whether the head shares the embedding's weights.
    pub tied_embedding: bool,
    /// Number of learned positions; 0 for rotary positions.
    pub learned_positions: u64,
    /// Kind of the norms on the residual stream, which determines their number of weights.
    pub norm: NormKind,
    /// Kind and sizes of attention, equal in all layers.
    pub attention: AttentionKind,
    /// Feed-forward of a dense layer.
    pub mlp: MlpConfig,
    /// Routed experts, if some layers have them.
    pub experts: Option<ExpertConfig>,
    /// Whether training uses dropout after each branch and after the embedding, whose masks must be
    /// kept.
    pub dropout: bool,
    /// Whether attention applies dropout to its scores.
    pub scores_dropout: bool,
}

/// Kind of a norm, by its learned parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm: one learned scale per feature, no shift.
    Rms,
    /// Layer norm: one learned scale and one learned shift per feature.
    Layer,
}

/// How queries share keys and values, which determines the bytes of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Grouped-query attention: several query heads share one KV head.
    Grouped {
        /// Number of query heads per layer.
        heads: u64,
        /// Number of KV heads, which the KV cache stores; divides `heads`.
        kv_heads: u64,
        /// Width of a query, key or value head.
        head_dim: u64,
        /// Whether the query, key and value matmuls add biases.
        qkv_bias: bool,
        /// Whether the output matmul adds a bias.
        out_bias: bool,
        /// Whether queries and keys are normalised per head.
        qk_norm: bool,
    },
    /// Multi-head latent attention: keys and values of all heads are expanded from one latent, and
    /// the KV cache stores only the latent.
    Latent {
        /// Number of query heads, each with its own expanded key and value.
        heads: u64,
        /// Rank of the low-rank query projection; `None` for a single matmul.
        q_rank: Option<u64>,
        /// Width of the latent, which the KV cache stores per token beside the rotary part of the
        /// keys.
        kv_rank: u64,
        /// Width of the non-rotary part of a query or key head.
        nope: u64,
        /// Width of the rotary part; all heads share the rotary part of the keys.
        rope: u64,
        /// Width of a value head.
        v: u64,
    },
}

impl AttentionKind {
    /// Returns the number of query heads.
    #[must_use]
    pub fn head_count(&self) -> u64 {
        match self {
            AttentionKind::Grouped { heads, .. } | AttentionKind::Latent { heads, .. } => *heads,
        }
    }
}

/// Dimensions of a dense feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpConfig {
    /// Width between the up and down projections.
    pub inner: u64,
    /// Whether a third matrix gates the activation.
    pub gated: bool,
    /// Whether the matmuls add biases.
    pub bias: bool,
}

/// Routed experts of a mixture-of-experts layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertConfig {
    /// Routed experts of a layer.
    pub count: u64,
    /// Number of routed experts that each token is sent to.
    pub top_k: u64,
    /// Inner width of one expert.
    pub inner: u64,
    /// Whether a third matrix gates the activation.
    pub gated: bool,
    /// Inner width of the shared experts that every token passes through; 0 for none.
    pub shared_inner: u64,
    /// Whether the router adds one learned bias per expert to its choice.
    pub router_bias: bool,
    /// Layers with a dense feed-forward instead of experts, ascending, from 0.
    pub dense_layers: Vec<u64>,
}
