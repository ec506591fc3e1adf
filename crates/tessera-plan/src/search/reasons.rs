//! Why an arrangement is refused: each rule of the search has a name, a code and a page.

use tessera_base::Code;

/// Axes do not multiply to the devices.
pub static T1201: Code = Code {
    id: "T1201",
    title: "axes do not multiply to the devices",
    page: "Every rank needs one device. The four axes tp, ep, pp and dp of one mesh multiply to the number of ranks; where \
attention and experts factor the same ranks in two ways, tp · replicas and expert_tp · ep · expert replicas must both be \
the ranks of a stage.\n\nThe message shows the product and the devices. The neighbours keep as many of the axes as \
possible; sometimes the same tp and ep do fit when experts fold the ranks of attention differently (another expert_tp).",
};
/// More stages than layers.
pub static T1202: Code = Code {
    id: "T1202",
    title: "more stages than layers",
    page: "A stage holds at least one layer. With several pieces per stage, each piece does. Use fewer stages or pieces.",
};
/// Heads cannot be cut over tp.
pub static T1203: Code = Code {
    id: "T1203",
    title: "heads cannot be cut over tp",
    page: "Each rank of tp needs at least one head of its own: a head is not divided. Pieces that differ by one are allowed \
unless uneven pieces were refused, and then the slowest rank counts. Where keys and values have fewer heads than tp has \
ranks, ranks share copies of them, which costs memory but no time.",
};
/// Experts cannot be dealt over ep.
pub static T1204: Code = Code {
    id: "T1204",
    title: "experts cannot be dealt over ep",
    page: "Each rank of ep needs at least one expert, and each rank of expert_tp a part of its inner width. A model without \
routed experts has nothing to deal: its ep is 1. Numbers that do not divide are allowed (some ranks hold one expert \
more) unless uneven pieces were refused.",
};
/// Batch does not feed every replica.
pub static T1205: Code = Code {
    id: "T1205",
    title: "batch does not feed every replica",
    page: "Each copy of the attention ranks takes its own sequences, and a micro-batch is a part of those. A replica without \
a sequence is idle; a micro-batch larger than a replica's share does not exist. Use fewer replicas (a larger tp or pp), a \
smaller micro-batch, or a larger batch.",
};
/// Schedule's own rule is broken.
pub static T1206: Code = Code {
    id: "T1206",
    title: "schedule's own rule is broken",
    page: "Interleaving needs stages, pieces and a number of micro-batches that the stages divide; schedules that split the \
backward pass belong to training; one that runs both directions needs an even number of stages. The message gives the \
rule and the numbers.",
};
/// This way to cut does not apply.
pub static T1207: Code = Code {
    id: "T1207",
    title: "this way to cut does not apply",
    page: "Schemes that divide tokens need at least one token per rank; schemes over heads need attention; a ring is a part \
of tp that divides it and is larger than one. Use more sequences per micro-batch, a smaller tp, or `megatron`, which asks \
for none of this.",
};
/// Context too short for a ring.
pub static T1208: Code = Code {
    id: "T1208",
    title: "context too short for a ring",
    page: "A ring pays when the piece of a context on each rank is long: keys and values travel while the last ones are used. \
With short pieces every step waits for the link. Use a smaller ring, or cut heads instead. The least piece is a \
threshold of the search and may be changed.",
};
/// Scores too large to reduce.
pub static T1209: Code = Code {
    id: "T1209",
    title: "scores too large to reduce",
    page: "rs_mm_ag writes the partial scores of all heads to memory so that they can be reduce-scattered; a fused kernel \
never does. Scores grow with queries times keys: for long contexts they would fill the memory. Use it for decoding or \
short contexts, another scheme elsewhere.",
};
/// Device has no units for this precision.
pub static T1210: Code = Code {
    id: "T1210",
    title: "device has no units for this precision",
    page: "The device of this cluster does not multiply numbers of this format. The message lists those it does.",
};
/// Fp4 is not for training.
pub static T1211: Code = Code {
    id: "T1211",
    title: "fp4 is not for training",
    page: "Gradients at fp4 lose more than a training run can repair without stochastic rounding and a recipe that this \
planner does not know. fp8 with f32 masters is the rule; allow fp4 explicitly to override it.",
};
/// Nothing to share the optimizer with.
pub static T1212: Code = Code {
    id: "T1212",
    title: "nothing to share the optimizer with",
    page: "Sharing optimizer state needs at least two replicas of the same weights, and an optimizer: inference has none. Leave it \
`replicated`, or use more replicas.",
};
/// This tier cannot hold it.
pub static T1213: Code = Code {
    id: "T1213",
    title: "this tier cannot hold it",
    page: "Training changes every weight and reads no cache: both stay in device memory. Old keys may lie on peers only where \
a domain has several devices; the host must have room for what it is given.",
};
/// Nothing to compute again.
pub static T1214: Code = Code {
    id: "T1214",
    title: "nothing to compute again",
    page: "Without a backward pass nothing is kept for it, so nothing needs to be computed again. Leave \
recomputation at `none`, or ask for training.",
};
/// Collective leaves the domain.
pub static T1215: Code = Code {
    id: "T1215",
    title: "collective leaves the domain",
    page: "The question forbids tp and ep to use links between domains of switches, where a rank has a tenth of the \
bandwidth. A group of ranks stays inside if its size divides the domain.",
};
/// Copy of the model straddles racks.
pub static T1216: Code = Code {
    id: "T1216",
    title: "copy of the model straddles racks",
    page: "With several copies of the model, each must stay in one rack: then only gradients cross. A copy's ranks must \
divide the devices of a rack. Lift the rule (replica_in_rack) for a model that needs more than a rack.",
};
/// Capacity drops too much.
pub static T1218: Code = Code {
    id: "T1218",
    title: "capacity drops too much",
    page: "Assignments beyond an expert's capacity are dropped: the token goes without that expert. That is less work, so a search that looked at time alone would always drop. The most that may be dropped is a limit of the search; a capacity that a person pins is not judged by it. A larger capacity, or a routing that is better balanced, drops less.",
};
/// Fullest rank has too little memory.
pub static T1217: Code = Code {
    id: "T1217",
    title: "fullest rank has too little memory",
    page: "The message gives the bytes that the fullest rank needs, the device's, and the largest term. Weights shrink with \
tp, ep and pp; activations with recomputation and smaller micro-batches; optimizer state by sharing it over replicas; the \
cache with tp, with more replicas, or on another tier.",
};

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $tag:literal $code:ident,)+) => {
        /// Why an arrangement is refused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)+ }

        impl Reason {
            /// All, in the order in which a search asks.
            pub const ALL: &'static [Reason] = &[$(Reason::$name,)+];

            /// Stable name, such as `heads`.
            #[must_use]
            pub fn id(self) -> &'static str {
                match self { $(Reason::$name => $tag,)+ }
            }

            /// The code that a diagnostic carries, with its page.
            #[must_use]
            pub fn code(self) -> &'static Code {
                match self { $(Reason::$name => &$code,)+ }
            }

            /// One line: what is wrong, in general.
            #[must_use]
            pub fn title(self) -> &'static str {
                self.code().title
            }
        }
    };
}

reasons! {
    /// Axes do not multiply to the devices.
    Ranks = "ranks" T1201,
    /// More stages than layers.
    Layers = "layers" T1202,
    /// Heads cannot be cut over tp.
    Heads = "heads" T1203,
    /// Experts cannot be dealt over ep.
    Experts = "experts" T1204,
    /// Batch does not feed every replica.
    Batch = "batch" T1205,
    /// Schedule's own rule is broken.
    Schedule = "schedule" T1206,
    /// This way to cut does not apply.
    Scheme = "scheme" T1207,
    /// Context too short for a ring.
    Context = "context" T1208,
    /// Scores too large to reduce.
    Logits = "logits" T1209,
    /// Device has no units for this precision.
    Precision = "precision" T1210,
    /// Fp4 is not for training.
    Fp4Training = "fp4_training" T1211,
    /// Nothing to share the optimizer with.
    Optimizer = "optimizer" T1212,
    /// This tier cannot hold it.
    Tier = "tier" T1213,
    /// Nothing to compute again.
    Recompute = "recompute" T1214,
    /// Collective leaves the domain.
    Domain = "domain" T1215,
    /// Copy of the model straddles racks.
    Rack = "rack" T1216,
    /// Capacity drops too much.
    Drops = "drops" T1218,
    /// Fullest rank has too little memory.
    Memory = "memory" T1217,
}
