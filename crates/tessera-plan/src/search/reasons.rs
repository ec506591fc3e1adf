//! The reasons for which the search rejects a candidate: each constraint has a name, an error code
//! and a page.

use tessera_base::Code;

use crate::codes::{
    T1201, T1202, T1203, T1204, T1205, T1206, T1207, T1208, T1209, T1210, T1211, T1212, T1213, T1214, T1215,
    T1216, T1217, T1218,
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

            /// Returns the diagnostic code of the failure mode, T1225 to T1228.
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
    /// The pipeline schedule needs training, or another number of stages, model chunks or
    /// micro-batches.
    PipelineSchedule = "schedule" T1206,
    /// The tensor-parallel scheme needs attention, more tokens per micro-batch, or another ring
    /// size.
    TpScheme = "scheme" T1207,
    /// The context is too short for ring attention.
    Context = "context" T1208,
    /// The partial scores are too large to reduce.
    Logits = "logits" T1209,
    /// The device does not support the precision.
    Precision = "precision" T1210,
    /// The candidate trains in fp4, which the search space does not allow.
    Fp4Training = "fp4_training" T1211,
    /// There is no optimizer state to shard: the workload is inference, or one rank alone holds the
    /// weights.
    OptimizerSharding = "optimizer" T1212,
    /// Data is placed outside device memory although the workload trains, has no routed experts to
    /// place there, or has no peer device.
    Tier = "tier" T1213,
    /// The candidate recomputes activations, but inference has no backward pass.
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
