//! A model that is counted and not run: stacks of equal layers, each a list of op rows with the cut that is natural
//! to each. What a planner estimates language models and training by, where a lowered program gives more than is
//! asked.

use tessera_base::Bytes;

/// A model as rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Name, for people.
    pub name: String,
    /// Width of the residual stream.
    pub width: u64,
    /// Words of the vocabulary.
    pub vocab: u64,
    /// Query heads of a layer; 0 without attention.
    pub heads: u64,
    /// Heads of keys and values that a rank may own by itself; 1 for one latent that all heads share.
    pub kv_heads: u64,
    /// Before the layers: the embedding.
    pub first: Vec<Row>,
    /// Layers in order: equal ones stand together.
    pub stacks: Vec<Stack>,
    /// After the layers: last norm and head.
    pub last: Vec<Row>,
    /// Whether the head reads the embedding's weights.
    pub tied: bool,
}

/// Equal layers in a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Stack {
    /// What they are, such as `dense` or `experts`.
    pub name: &'static str,
    /// How many.
    pub count: u64,
    /// The rows of one.
    pub rows: Vec<Row>,
}

/// One op of a layer, for any number of tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Name within the layer, such as `attention.qkv`.
    pub name: &'static str,
    /// What is done.
    pub op: RowOp,
    /// How the op divides over tp.
    pub cut: RowCut,
    /// Bytes that a token leaves behind for the backward pass at two bytes a number: inputs and masks that no earlier
    /// row has counted. What attention keeps per query and key stands in [`RowOp::Attention`].
    pub keep_bytes: u64,
}

/// How a row divides over tp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowCut {
    /// Every rank has all of it; its tokens may be divided (sequence parallel).
    Whole,
    /// By output features: needs whole tokens, gives a piece of the width.
    Col,
    /// By input features: gives a partial sum that is reduced over tp.
    Row,
    /// By heads: follows a `Col` row.
    Heads,
    /// Experts over the expert ranks, and each expert's inner width over the expert tp.
    Experts,
}

/// What a row does. Widths are in numbers per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RowOp {
    /// Tokens by `k`, times `k` by `n`.
    Matmul {
        /// Input features.
        k: u64,
        /// Output features.
        n: u64,
        /// Whether `n` biases are added.
        bias: bool,
    },
    /// Scores, softmax and values.
    Attention {
        /// Query heads.
        heads: u64,
        /// Heads of keys and values.
        kv_heads: u64,
        /// Width of a query head.
        qk: u64,
        /// Width of a value head.
        v: u64,
        /// Numbers that a token leaves in the cache, over all heads.
        cache: u64,
        /// Whether a query sees no later key.
        causal: bool,
        /// Bytes kept for the backward pass per head, query and key: 5 where scores are stored with a dropout mask, 0
        /// for a fused kernel.
        scores_bytes: u64,
    },
    /// Routed experts; router and shared experts are rows of their own.
    Experts {
        /// Routed experts of the layer.
        experts: u64,
        /// Experts that a token asks for.
        top_k: u64,
        /// Width of what goes in and comes out.
        k: u64,
        /// Inner width of one expert.
        n: u64,
        /// Matrices of an expert: 3 with a gate, else 2.
        matrices: u64,
    },
    /// One pass over memory: norms, residuals, activations, rotations.
    Pass {
        /// Numbers read.
        reads: u64,
        /// Numbers written.
        writes: u64,
        /// Weights, such as a norm's scale.
        weights: u64,
    },
    /// Rows of a table.
    Embed {
        /// Rows.
        rows: u64,
        /// Width.
        width: u64,
    },
}

impl Row {
    /// Weights of the row, in numbers.
    #[must_use]
    pub fn weights(&self) -> u64 {
        match self.op {
            RowOp::Matmul { k, n, bias } => k * n + if bias { n } else { 0 },
            RowOp::Experts { experts, k, n, matrices, .. } => experts * k * n * matrices,
            RowOp::Pass { weights, .. } => weights,
            RowOp::Embed { rows, width } => rows * width,
            RowOp::Attention { .. } => 0,
        }
    }
}

impl Work {
    /// Layers of all stacks.
    #[must_use]
    pub fn layers(&self) -> u64 {
        self.stacks.iter().map(|s| s.count).sum()
    }

    /// Routed experts of a layer that has some: how many, and how many a token asks for.
    #[must_use]
    pub fn experts(&self) -> Option<(u64, u64)> {
        self.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
            RowOp::Experts { experts, top_k, .. } => Some((experts, top_k)),
            _ => None,
        })
    }

    /// Weights of the whole model, in numbers; tied ones once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let rows = |rows: &[Row]| rows.iter().map(Row::weights).sum::<u64>();
        let head = if self.tied { self.vocab * self.width } else { 0 };
        let layers: u64 = self.stacks.iter().map(|s| s.count * rows(&s.rows)).sum();
        (rows(&self.first) + layers + rows(&self.last)).saturating_sub(head)
    }

    /// Cache bytes of one token over all layers, at this many bytes a number.
    #[must_use]
    pub fn cache_bytes(&self, bytes_per_number: f64) -> Bytes {
        let of = |r: &Row| match r.op {
            RowOp::Attention { cache, .. } => cache,
            _ => 0,
        };
        let numbers: u64 = self.stacks.iter().map(|s| s.count * s.rows.iter().map(of).sum::<u64>()).sum();
        Bytes((numbers as f64 * bytes_per_number).ceil() as u64)
    }
}
