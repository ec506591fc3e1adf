//! A model that is counted and not run: stacks of equal layers, each a list of op rows with the cut that is natural
//! to each. What a planner estimates language models and training by, where a lowered program gives more than is
//! asked.

use tessera_base::Bytes;

/// Names of the rows around routed experts: what [`Work::routed`] changes with them.
pub mod names {
    /// Product that scores every expert.
    pub const ROUTER: &str = "moe.router";
    /// Softmax or sigmoid over all experts, at four bytes a number, and the choice.
    pub const GATE: &str = "moe.gate";
    /// A token copied once per expert that it asks for.
    pub const PACK: &str = "moe.pack";
    /// What its experts give, added up.
    pub const UNPACK: &str = "moe.unpack";
}

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
    /// row has counted. What attention keeps per query and key stands in [`RowOp::Attention`]. How a rank's share
    /// follows from the cut: [`RowCut::keep_share`].
    pub keep_bytes: u64,
}

/// How a row divides over tp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowCut {
    /// Every rank has all of its weights; its tokens may be divided (sequence parallel).
    Whole,
    /// By output features: needs whole tokens, gives a piece of the width.
    Col,
    /// By input features, or by the words of a table: gives a partial sum that is reduced over tp.
    Row,
    /// By heads, or by the features of the `Col` row that it follows.
    Heads,
    /// Experts over the expert ranks, and each expert's inner width over the expert tp. Numbers and bytes of such a
    /// row count all `top_k` copies of a token.
    Experts,
}

impl RowCut {
    /// Share of a row's kept bytes that one of `tp` ranks holds. What stands before a product by column is kept whole
    /// by every rank, unless tokens are divided: then it is kept in pieces and gathered again.
    ///
    /// For [`RowCut::Experts`] this is the share of an even routing over experts that are not cut: copies lie where
    /// their experts do. An expert tp cuts all that such rows keep but the inputs of a [`RowOp::Experts`] row, which
    /// are `2 · top_k · k` bytes and stand on each of its ranks.
    #[must_use]
    pub fn keep_share(self, tp: u32, tokens_divided: bool) -> f64 {
        match self {
            RowCut::Whole | RowCut::Col if !tokens_divided => 1.0,
            _ => 1.0 / f64::from(tp),
        }
    }
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
        /// Bytes kept for the backward pass per head, query and key: 5 where scores are stored with a dropout mask, 2
        /// where they are stored without, 0 for a fused kernel.
        scores_bytes: u64,
        /// Where keys and values of all heads come from one latent in the cache: the widths at which queries may meet
        /// that latent itself, which spares a decoding step the expansion of every cached token.
        latent: Option<Latent>,
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

/// Widths of attention on a shared latent: as if of one head of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// Width of a query head.
    pub qk: u64,
    /// Width of what a query head gathers.
    pub v: u64,
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

    /// The same model with another number of routed experts in each layer, or another number for each token.
    #[must_use]
    pub fn routed(&self, experts: u64, top_k: u64) -> Work {
        let mut work = self.clone();
        for row in work.stacks.iter_mut().flat_map(|s| {
            let was = s.rows.iter().find_map(|r| match r.op {
                RowOp::Experts { top_k, .. } => Some(top_k.max(1)),
                _ => None,
            });
            s.rows.iter_mut().map(move |r| (r, was))
        }) {
            let (row, Some(was)) = row else { continue };
            let name = row.name;
            match &mut row.op {
                RowOp::Experts { experts: e, top_k: k, .. } => (*e, *k) = (experts, top_k),
                RowOp::Matmul { n, .. } if name == names::ROUTER => *n = experts,
                RowOp::Pass { reads, writes, .. } if name == names::GATE => {
                    row.keep_bytes = 4 * experts;
                    (*reads, *writes) = (2 * experts, 2 * experts);
                }
                RowOp::Pass { writes, .. } if name == names::PACK => *writes = *writes / was * top_k,
                RowOp::Pass { reads, .. } if name == names::UNPACK => *reads = *reads / was * top_k,
                RowOp::Pass { reads, writes, .. } if row.cut == RowCut::Experts => {
                    (*reads, *writes) = (*reads / was * top_k, *writes / was * top_k);
                }
                _ => {}
            }
            if row.cut == RowCut::Experts {
                row.keep_bytes = row.keep_bytes / was * top_k;
            }
        }
        work
    }

    /// Weights of the whole model, in numbers; tied ones once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        let rows = |rows: &[Row]| rows.iter().map(Row::weights).sum::<u64>();
        let head = if self.tied { self.vocab * self.width } else { 0 };
        let layers: u64 = self.stacks.iter().map(|s| s.count * rows(&s.rows)).sum();
        (rows(&self.first) + layers + rows(&self.last)).saturating_sub(head)
    }

    /// Weights that one token meets, in numbers: of routed experts those it asks for, and no table that is only looked
    /// up.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        let of = |r: &Row| match r.op {
            RowOp::Embed { .. } => 0,
            RowOp::Experts { experts, top_k, .. } => r.weights() / experts * top_k,
            _ => r.weights(),
        };
        let rows = |rows: &[Row]| rows.iter().map(of).sum::<u64>();
        let layers: u64 = self.stacks.iter().map(|s| s.count * rows(&s.rows)).sum();
        rows(&self.first) + layers + rows(&self.last)
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
