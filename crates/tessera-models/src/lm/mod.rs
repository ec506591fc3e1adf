//! Language models as they are counted: dims from their own config, rows of ops for an estimate. They do not run.

mod config;
mod rows;
#[cfg(test)]
mod tests;

pub(crate) use config::{T0430, T0431, T0432};

/// Dimensions of a decoder-only language model.
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageModel {
    /// Name, for people.
    pub name: String,
    /// Width of the residual stream.
    pub width: u64,
    /// Layers. Further heads that predict several tokens at once are not counted.
    pub layers: u64,
    /// Words of the vocabulary.
    pub vocab: u64,
    /// Whether the head reads the embedding's weights.
    pub tied: bool,
    /// Learned positions; 0 for rotary ones.
    pub positions: u64,
    /// What every norm learns.
    pub norm: Norm,
    /// Attention of every layer.
    pub attention: Attention,
    /// Feed-forward of a dense layer.
    pub mlp: Mlp,
    /// Experts, if some layers have them.
    pub experts: Option<Experts>,
    /// Whether dropout leaves masks behind in training: after each branch and after the embedding.
    pub dropout: bool,
    /// Whether attention drops scores.
    pub scores_dropout: bool,
}

/// What a norm learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// A scale.
    Rms,
    /// A scale and a shift.
    Layer,
}

/// How queries find keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Groups of query heads share a head of keys and values.
    Grouped {
        /// Query heads.
        heads: u64,
        /// Heads of keys and values.
        kv_heads: u64,
        /// Width of every head.
        head_dim: u64,
        /// Whether query, key and value products add biases.
        qkv_bias: bool,
        /// Whether the product behind attention does.
        out_bias: bool,
        /// Whether queries and keys pass a norm per head.
        qk_norm: bool,
    },
    /// Keys and values of all heads are expanded from one latent, which is all that the cache holds.
    Latent {
        /// Query heads.
        heads: u64,
        /// Width that queries pass through; none for one product.
        q_rank: Option<u64>,
        /// Width of the latent.
        kv_rank: u64,
        /// Width of a query or key head without its rotary part.
        nope: u64,
        /// Width of the rotary part; that of the keys is shared by all heads.
        rope: u64,
        /// Width of a value head.
        v: u64,
    },
}

impl Attention {
    /// Query heads.
    #[must_use]
    pub fn heads(&self) -> u64 {
        match self {
            Attention::Grouped { heads, .. } | Attention::Latent { heads, .. } => *heads,
        }
    }
}

/// A feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mlp {
    /// Inner width.
    pub inner: u64,
    /// Whether a third matrix gates it.
    pub gated: bool,
    /// Whether products add biases.
    pub bias: bool,
}

/// Routed experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    /// Routed experts of a layer.
    pub count: u64,
    /// Experts that a token asks for.
    pub top_k: u64,
    /// Inner width of one.
    pub inner: u64,
    /// Whether a third matrix gates it.
    pub gated: bool,
    /// Inner width of what every token passes beside its experts; 0 for nothing.
    pub shared: u64,
    /// Whether the router corrects its choice by one learned number per expert.
    pub router_bias: bool,
    /// Layers that have a dense feed-forward in place of experts, ascending, from 0.
    pub dense: Vec<u64>,
}
