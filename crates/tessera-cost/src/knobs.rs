//! The words of an arrangement: everything that a planner may choose, each with its spelling.

use tessera_mesh::Precision;

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$vdoc])* $variant,)+ }

        impl $name {
            /// All, in the order in which a search tries them.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// Spelling.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }

            /// By its spelling.
            #[must_use]
            pub fn named(word: &str) -> Option<$name> {
                $name::ALL.iter().copied().find(|x| x.name() == word)
            }
        }
    };
}

words! {
    /// How tp cuts a layer.
    Scheme {
        /// Weights by column, then by row; an all-reduce per pair.
        Megatron = "megatron",
        /// The same with norms and residuals over tokens: reduce-scatter and all-gather in place of each all-reduce.
        MegatronSequence = "megatron_sp",
        /// Tokens over ranks, weights whole; heads around attention by all-to-all.
        Ulysses = "ulysses",
        /// Megatron over part of tp, and context over rings of the rest: keys and values travel, contiguous pieces.
        Ring = "ring",
        /// The same with tokens dealt out in turn, so that a causal mask is even.
        Striped = "striped",
        /// Keys and values by column: reduce-scatter of scores, local product, all-gather.
        RsMmAg = "rs_mm_ag",
    }
}

words! {
    /// Order of micro-batches over stages.
    Schedule {
        /// One forward, one backward.
        OneFOneB = "1f1b",
        /// The same over `interleave` pieces of layers per stage.
        Interleaved = "interleaved",
        /// Weight gradients fill the bubble, memory of 1F1B.
        ZbH1 = "zb-h1",
        /// Weight gradients fill the bubble, twice the memory.
        ZbH2 = "zb-h2",
        /// Both directions at once, parameters twice.
        DualPipe = "dualpipe",
    }
}

words! {
    /// What the backward pass computes again.
    Recompute {
        /// Nothing.
        None = "none",
        /// What attention keeps before its softmax.
        Attention = "attention",
        /// Every other layer, whole.
        EveryOther = "every_other",
        /// Every layer, whole.
        Full = "full",
    }
}

words! {
    /// Who holds the optimizer's state.
    Optimizer {
        /// Every replica all of it.
        Replicated = "replicated",
        /// Replicas share the state and the f32 masters.
        Sharded = "sharded",
        /// Replicas share weights and gradients too, gathered layer by layer.
        Full = "full_shard",
    }
}

words! {
    /// Where routed experts lie.
    ExpertsAt {
        /// All in device memory.
        Hbm = "hbm",
        /// The hottest in device memory, the others on the host, fetched ahead.
        Host = "host",
    }
}

words! {
    /// Where old keys and values lie.
    CacheAt {
        /// All in device memory.
        Hbm = "hbm",
        /// Old segments in the memory of other devices of the domain.
        Peer = "peer",
        /// Old segments on the host.
        Host = "host",
        /// Old segments are dropped: a window.
        Window = "window",
    }
}

/// How one layer is laid out over the ranks of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    /// Ranks of attention and dense rows.
    pub tp: u32,
    /// Of those, ranks of one ring of context; 1 but for [`Scheme::Ring`] and [`Scheme::Striped`]. Heads are cut over
    /// `tp / ring`.
    pub ring: u32,
    /// How tp cuts.
    pub scheme: Scheme,
    /// Ranks over which each expert's inner width is cut.
    pub expert_tp: u32,
    /// Ranks over which experts are dealt.
    pub ep: u32,
    /// Precision of products.
    pub precision: Precision,
    /// Precision of what experts are sent; combined results travel at bf16 unless this is.
    pub wire: Precision,
    /// Capacity of an expert in per cent of the even share; 0 drops nothing.
    pub capacity_pct: u32,
}

impl Layout {
    /// One rank, nothing cut.
    pub const WHOLE: Layout = Layout {
        tp: 1,
        ring: 1,
        scheme: Scheme::Megatron,
        expert_tp: 1,
        ep: 1,
        precision: Precision::Bf16,
        wire: Precision::Bf16,
        capacity_pct: 0,
    };
}
