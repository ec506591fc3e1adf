//! The reasons for which the search rejects a candidate: each constraint has a name, an error code
//! and a page.

use tessera_base::Code;

/// The axes do not multiply to the devices.
pub static T1201: Code = Code {
    id: "T1201",
    title: "axes do not multiply to the devices",
    page: "Every rank needs one device. The four axes tp, ep, pp and dp of one mesh multiply to the number of ranks; where \
attention and experts factor the same ranks differently, tp · replicas and expert_tp · ep · expert replicas must both equal \
the ranks of a stage.\n\nThe message shows the number of ranks and of devices. The neighbours keep as many of the axes as \
possible; sometimes the same tp and ep do fit if the experts fold the attention ranks differently (another expert_tp).",
};
/// There are more stages than layers.
pub static T1202: Code = Code {
    id: "T1202",
    title: "more stages than layers",
    page: "A stage holds at least one layer. With several model chunks per stage, each chunk does. Use fewer stages or chunks.",
};
/// The heads cannot be sharded over tp.
pub static T1203: Code = Code {
    id: "T1203",
    title: "cannot shard heads over tp",
    page: "Each rank of tp needs at least one whole attention head. Shards that differ by one head are allowed \
unless `strict` rejects uneven shards, and then the slowest rank determines the time. Where there are fewer KV heads than \
ranks of tp, ranks replicate them, which costs memory but no time.",
};
/// The experts cannot be sharded over ep.
pub static T1204: Code = Code {
    id: "T1204",
    title: "cannot shard experts over ep",
    page: "Each rank of ep needs at least one expert, and each rank of expert_tp a part of its inner width. A model without \
routed experts has ep = 1. Sizes that do not divide are allowed (some ranks hold one expert \
more) unless `strict` rejects uneven shards.",
};
/// The batch has too few sequences for the replicas.
pub static T1205: Code = Code {
    id: "T1205",
    title: "batch is too small for the replicas",
    page: "Each attention replica processes its own sequences, in micro-batches. A replica without \
a sequence is idle, and a micro-batch cannot exceed a replica's share. Use fewer replicas (a larger tp or pp), a \
smaller micro-batch, or a larger batch.",
};
/// A requirement of the pipeline schedule is violated.
pub static T1206: Code = Code {
    id: "T1206",
    title: "pipeline schedule does not apply",
    page: "Interleaving needs stages, model chunks and a number of micro-batches that the stages divide; schedules that split \
the backward pass require training; a bidirectional schedule needs an even number of stages. The message gives the \
requirement and the numbers.",
};
/// The tensor-parallel scheme does not apply.
pub static T1207: Code = Code {
    id: "T1207",
    title: "tensor-parallel scheme does not apply",
    page: "Schemes that shard tokens need at least one token per rank; schemes that shard heads need attention; the ring size \
divides tp and is larger than one. Use more sequences per micro-batch, a smaller tp, or `megatron`, which has none of \
these requirements.",
};
/// The context is too short for ring attention.
pub static T1208: Code = Code {
    id: "T1208",
    title: "context is too short for ring attention",
    page: "Ring attention pays off if each rank's shard of the context is long: the next keys and values travel during the \
compute on the current ones. With short shards every step waits for the link. Use a smaller ring, or shard heads instead. The \
minimum shard is a parameter of the search.",
};
/// The partial scores are too large to reduce.
pub static T1209: Code = Code {
    id: "T1209",
    title: "attention scores are too large to reduce",
    page: "rs_mm_ag writes the partial scores of all heads to memory so that they can be reduce-scattered; a fused attention \
kernel never does. Scores grow with queries times keys: for long contexts they would fill the memory. Use rs_mm_ag for \
decoding or short contexts, and another scheme elsewhere.",
};
/// The device does not support the precision.
pub static T1210: Code = Code {
    id: "T1210",
    title: "device does not support this precision",
    page: "The devices of this cluster have no matrix units for this format. The message lists the supported formats.",
};
/// fp4 is not enabled for training.
pub static T1211: Code = Code {
    id: "T1211",
    title: "fp4 is not enabled for training",
    page: "Gradients at fp4 lose more than a training run can repair without stochastic rounding and a recipe that this \
planner does not model. fp8 with f32 master weights is the rule; enable fp4 explicitly to override it.",
};
/// There is no optimizer state to shard.
pub static T1212: Code = Code {
    id: "T1212",
    title: "no optimizer state to shard",
    page: "Sharding the optimizer state needs at least two replicas of the same weights, and an optimizer: inference has none. \
Use `replicated`, or more replicas.",
};
/// The memory tier cannot hold the data.
pub static T1213: Code = Code {
    id: "T1213",
    title: "memory tier cannot hold this data",
    page: "Training updates every weight and reads no KV cache: both stay in device memory. Old keys may be placed on peers \
only in a domain of several devices; data placed on the host must fit there.",
};
/// There is nothing to recompute.
pub static T1214: Code = Code {
    id: "T1214",
    title: "nothing to recompute",
    page: "Without a backward pass no activations are saved, so recomputation has no effect. Set \
recomputation to `none`, or plan for training.",
};
/// A collective leaves the scale-up domain.
pub static T1215: Code = Code {
    id: "T1215",
    title: "collective leaves the scale-up domain",
    page: "The query forbids tp and ep to use links between scale-up domains, where a rank has a tenth of the \
bandwidth. A group of ranks stays inside if its size divides the domain.",
};
/// A model replica spans racks.
pub static T1216: Code = Code {
    id: "T1216",
    title: "model replica spans racks",
    page: "With several model replicas, each must stay in one rack, so that only gradients cross racks. The ranks of a replica \
must divide the devices of a rack. Disable the rule (replica_in_rack) for a model that needs more than one rack.",
};
/// The expert capacity drops too many tokens.
pub static T1218: Code = Code {
    id: "T1218",
    title: "expert capacity drops too many tokens",
    page: "Assignments beyond an expert's capacity are dropped: the token skips that expert. That is less work, so a search \
by time alone would always drop tokens. The search therefore limits the dropped share; a pinned capacity is exempt. A larger \
capacity or a better balanced routing drops less.",
};
/// The peak rank exceeds device memory.
pub static T1217: Code = Code {
    id: "T1217",
    title: "peak rank exceeds device memory",
    page: "The message gives the bytes that the peak rank needs, the device's memory, and the largest term. Weights shrink \
with tp, ep and pp; activations with recomputation and smaller micro-batches; optimizer state by sharding it over replicas; \
the KV cache with tp, with more replicas, or on another tier.",
};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $tag:literal $code:ident,)+) => {
        /// The reason for which the search rejects a candidate.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)+ }

        impl Reason {
            /// All reasons, in the order in which the search checks them.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)+];

            /// Returns the stable name, such as `heads`.
            #[must_use]
            pub fn id(self) -> &'static str {
                match self { $(Reason::$name => $tag,)+ }
            }

            /// Returns the code of the diagnostic, with its page.
            #[must_use]
            pub fn code(self) -> &'static Code {
                match self { $(Reason::$name => &$code,)+ }
            }

            /// Returns the title of the diagnostic.
            #[must_use]
            pub fn title(self) -> &'static str {
                self.code().title
            }
        }
    };
}

reasons! {
    /// The axes do not multiply to the devices.
    Ranks = "ranks" T1201,
    /// There are more stages than layers.
    Layers = "layers" T1202,
    /// The heads cannot be sharded over tp.
    Heads = "heads" T1203,
    /// The experts cannot be sharded over ep.
    Experts = "experts" T1204,
    /// The batch has too few sequences for the replicas.
    Batch = "batch" T1205,
    /// A requirement of the pipeline schedule is violated.
    PipelineSchedule = "schedule" T1206,
    /// The tensor-parallel scheme does not apply.
    TpScheme = "scheme" T1207,
    /// The context is too short for ring attention.
    Context = "context" T1208,
    /// The partial scores are too large to reduce.
    Logits = "logits" T1209,
    /// The device does not support the precision.
    Precision = "precision" T1210,
    /// fp4 is not enabled for training.
    Fp4Training = "fp4_training" T1211,
    /// There is no optimizer state to shard.
    OptimizerSharding = "optimizer" T1212,
    /// The memory tier cannot hold the data.
    Tier = "tier" T1213,
    /// There is nothing to recompute.
    Recompute = "recompute" T1214,
    /// A collective leaves the scale-up domain.
    Domain = "domain" T1215,
    /// A model replica spans racks.
    Rack = "rack" T1216,
    /// The expert capacity drops too many tokens.
    Drops = "drops" T1218,
    /// The peak rank exceeds device memory.
    Memory = "memory" T1217,
}
