//! An analytic model: stacks of identical layers, each a list of ops with their natural sharding
//! over tp. The planner estimates language models and training from it, because a lowered program
//! would contain more detail than these estimates need.

use tessera_base::Bytes;

/// Names of the ops around routed experts, which [`AnalyticModel::with_experts`] adjusts.
pub mod names {
    /// Matmul that computes the score of every expert.
    pub const ROUTER: &str = "moe.router";
    /// Softmax or sigmoid over all experts in four bytes per number, and the selection.
    pub const GATE: &str = "moe.gate";
    /// Copies each token once per selected expert.
    pub const PACK: &str = "moe.pack";
    /// Sums the outputs of a token's experts.
    pub const UNPACK: &str = "moe.unpack";
}

/// A model described by the costs of its ops. It can be estimated but not run.
#[derive(Debug, Clone, PartialEq)]
pub struct AnalyticModel {
    /// Name of the model in reports.
    pub name: String,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Entries of the vocabulary: rows of the embedding and columns of the output head.
    pub vocab_size: u64,
    /// Query heads per layer; 0 without attention.
    pub heads: u64,
    /// KV heads that can be distributed over ranks; 1 if all heads share one latent.
    pub kv_heads: u64,
    /// Ops before the layers: the embedding.
    pub ops_before_layers: Vec<LayerOp>,
    /// Layers in order, grouped into stacks of identical layers.
    pub stacks: Vec<LayerStack>,
    /// Ops after the layers: final norm and output head.
    pub ops_after_layers: Vec<LayerOp>,
    /// Whether the head shares the weights of the embedding.
    pub tied_embeddings: bool,
}

/// A sequence of identical layers.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerStack {
    /// Kind of the layers, such as `dense` or `experts`.
    pub name: &'static str,
    /// Number of identical layers in the stack.
    pub count: u64,
    /// Ops of each layer, in the order of the forward pass.
    pub ops: Vec<LayerOp>,
}

/// One op of a layer, for any number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOp {
    /// Name within the layer, such as `attention.qkv`.
    pub name: &'static str,
    /// Computation of the op, with the sizes that determine its cost.
    pub kind: LayerOpKind,
    /// How the op's weights or heads are split over tp, and thus which collective it needs.
    pub sharding: OpSharding,
    /// Activation bytes per token that the backward pass needs, at two bytes per number: inputs and
    /// masks that no earlier op has counted. The bytes that attention stores per query and key are
    /// in [`LayerOpKind::Attention`]. [`OpSharding::activation_fraction`] gives the share of a
    /// rank.
    pub activation_bytes: u64,
}

/// How ranks of tp share an op, or of ep and expert tp for routed experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpSharding {
    /// Weights are replicated; tokens may be sharded (sequence parallelism).
    Replicated,
    /// By output features: needs all tokens, and produces a shard of the width.
    Col,
    /// By input features, or by the entries of a table: produces a partial sum that is reduced over
    /// tp.
    Row,
    /// By heads, or by the features of the preceding `Col` op.
    Heads,
    /// Experts over the expert-parallel ranks, and the inner width of each expert over expert tp.
    /// The sizes and bytes of such an op count all `top_k` copies of a token.
    Experts,
}

impl OpSharding {
    /// Returns the fraction of an op's stored activation bytes that each of `tp` ranks holds. Every
    /// rank stores the whole input of a column-parallel matmul, unless tokens are sharded: then it
    /// stores its shard and gathers the input again.
    ///
    /// For [`OpSharding::Experts`] this is the fraction for balanced routing over experts without
    /// expert tp, because the copies are stored where their experts are. Expert tp divides
    /// everything that these ops store, except the inputs of a [`LayerOpKind::Experts`] op, which
    /// are `2 · top_k · k` bytes on each of its ranks.
    #[must_use]
    pub fn activation_fraction(self, tp: u32, tokens_divided: bool) -> f64 {
        match self {
            OpSharding::Replicated | OpSharding::Col if !tokens_divided => 1.0,
            _ => 1.0 / f64::from(tp),
        }
    }
}

/// Computation of an op. Widths are in numbers per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LayerOpKind {
    /// Matmul of tokens × `k` with `k` × `n`.
    Matmul {
        /// Input features.
        k: u64,
        /// Output features.
        n: u64,
        /// Whether a bias of `n` numbers is added.
        bias: bool,
    },
    /// Attention: scores, softmax and weighted values.
    Attention {
        /// Number of query heads, before sharding over tp.
        heads: u64,
        /// Number of key/value heads; fewer than `heads` under grouped-query attention.
        kv_heads: u64,
        /// Width of a query head.
        qk: u64,
        /// Width of a value head.
        v: u64,
        /// Numbers per token in the KV cache, over all heads.
        cache_width: u64,
        /// Whether a query attends only to keys up to its own position.
        causal: bool,
        /// Bytes stored for the backward pass per head, query and key: 5 if scores are stored with
        /// a dropout mask, 2 if they are stored without, 0 for a fused kernel.
        stored_score_bytes: u64,
        /// Head widths of attention directly on the latent, if the keys and values of all heads
        /// come from one latent in the cache. It spares a decoding step the expansion of every
        /// cached token.
        latent: Option<LatentWidths>,
    },
    /// Routed experts; the router and shared experts are separate ops.
    Experts {
        /// Routed experts per layer.
        experts: u64,
        /// Number of routed experts that each token is sent to.
        top_k: u64,
        /// Input and output width.
        k: u64,
        /// Inner width of an expert.
        n: u64,
        /// Matrices per expert: 3 with a gate, otherwise 2.
        matrices: u64,
    },
    /// A memory-bound kernel: norms, residuals, activations, RoPE.
    Elementwise {
        /// Numbers read from memory per token.
        reads: u64,
        /// Numbers written to memory per token.
        writes: u64,
        /// Number of weights, such as a norm's scale.
        weights: u64,
    },
    /// Lookup of table rows.
    Embedding {
        /// Rows of the table: entries of the vocabulary, or learned positions.
        rows: u64,
        /// Numbers per row: the width of the residual stream.
        width: u64,
    },
}

/// Head widths of attention on a shared latent, which acts as a single KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentWidths {
    /// Width of a query head.
    pub qk: u64,
    /// Width of a head's output.
    pub v: u64,
}

impl LayerOp {
    /// Returns the number of weights of the op.
    #[must_use]
    pub fn weight_count(&self) -> u64 {
        match self.kind {
            LayerOpKind::Matmul { k, n, bias } => k * n + if bias { n } else { 0 },
            LayerOpKind::Experts { experts, k, n, matrices, .. } => experts * k * n * matrices,
            LayerOpKind::Elementwise { weights, .. } => weights,
            LayerOpKind::Embedding { rows, width } => rows * width,
            LayerOpKind::Attention { .. } => 0,
        }
    }
}

impl AnalyticModel {
    /// Returns the number of layers in all stacks.
    #[must_use]
    pub fn layer_count(&self) -> u64 {
        self.stacks.iter().map(|s| s.count).sum()
    }

    /// Returns the number of routed experts per layer and of experts per token, from the first
    /// layer with routed experts.
    #[must_use]
    pub fn routed_experts(&self) -> Option<(u64, u64)> {
        self.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
            LayerOpKind::Experts { experts, top_k, .. } => Some((experts, top_k)),
            _ => None,
        })
    }

    /// Returns the same model with another number of routed experts per layer and of experts per
    /// token.
    #[must_use]
    pub fn with_experts(&self, experts: u64, top_k: u64) -> AnalyticModel {
        let mut work = self.clone();
        for row in work.stacks.iter_mut().flat_map(|s| {
            let was = s.ops.iter().find_map(|r| match r.kind {
                LayerOpKind::Experts { top_k, .. } => Some(top_k.max(1)),
                _ => None,
            });
            s.ops.iter_mut().map(move |r| (r, was))
        }) {
            let (row, Some(was)) = row else { continue };
            let name = row.name;
            match &mut row.kind {
                LayerOpKind::Experts { experts: e, top_k: k, .. } => (*e, *k) = (experts, top_k),
                LayerOpKind::Matmul { n, .. } if name == names::ROUTER => *n = experts,
                LayerOpKind::Elementwise { reads, writes, .. } if name == names::GATE => {
                    row.activation_bytes = 4 * experts;
                    (*reads, *writes) = (2 * experts, 2 * experts);
                }
                LayerOpKind::Elementwise { writes, .. } if name == names::PACK => {
                    *writes = *writes / was * top_k
                }
                LayerOpKind::Elementwise { reads, .. } if name == names::UNPACK => {
                    *reads = *reads / was * top_k
                }
                LayerOpKind::Elementwise { reads, writes, .. } if row.sharding == OpSharding::Experts => {
                    (*reads, *writes) = (*reads / was * top_k, *writes / was * top_k);
                }
                _ => {}
            }
            if row.sharding == OpSharding::Experts {
                row.activation_bytes = row.activation_bytes / was * top_k;
            }
        }
        work
    }

    /// Returns the number of weights of the whole model; tied weights count once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        let rows = |rows: &[LayerOp]| rows.iter().map(LayerOp::weight_count).sum::<u64>();
        let head = if self.tied_embeddings { self.vocab_size * self.hidden_size } else { 0 };
        let layers: u64 = self.stacks.iter().map(|s| s.count * rows(&s.ops)).sum();
        (rows(&self.ops_before_layers) + layers + rows(&self.ops_after_layers)).saturating_sub(head)
    }

    /// Returns the number of weights that one token uses: of routed experts only the selected ones,
    /// and no embedding table.
    #[must_use]
    pub fn active_parameter_count(&self) -> u64 {
        let active_weights = |r: &LayerOp| match r.kind {
            LayerOpKind::Embedding { .. } => 0,
            LayerOpKind::Experts { experts, top_k, .. } => r.weight_count() / experts * top_k,
            _ => r.weight_count(),
        };
        let rows = |rows: &[LayerOp]| rows.iter().map(active_weights).sum::<u64>();
        let layers: u64 = self.stacks.iter().map(|s| s.count * rows(&s.ops)).sum();
        rows(&self.ops_before_layers) + layers + rows(&self.ops_after_layers)
    }

    /// Returns the KV cache bytes of one token over all layers, at this many bytes per number.
    #[must_use]
    pub fn kv_cache_bytes(&self, bytes_per_number: f64) -> Bytes {
        let cache_numbers = |r: &LayerOp| match r.kind {
            LayerOpKind::Attention { cache_width: cache, .. } => cache,
            _ => 0,
        };
        let numbers: u64 =
            self.stacks.iter().map(|s| s.count * s.ops.iter().map(cache_numbers).sum::<u64>()).sum();
        Bytes((numbers as f64 * bytes_per_number).ceil() as u64)
    }
}
