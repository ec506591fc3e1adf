//! The ops, by name only; [`crate::OP_TABLE`] describes them.

/// An op of either dialect; its discriminant is the index of its row in [`crate::OP_TABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[rustfmt::skip]
#[allow(missing_docs, reason = "each row of the table documents its op")]
pub enum Opcode {
    Input, Call, Weight, CacheRead,
    Output, CacheWrite,
    Matmul, BiasAct, Add, Silu, Cast, Quantize,
    LayerNorm, Modulation, NormModulate, GateResidual,
    RmsNorm, RowSquareSum, RmsScale,
    Rope, Attention, Softmax, Bmm, MoeRoute, TimeEmbed, Renoise, ToX0,
    SpaceTimeToDepth, DepthToSpaceTime,
    TakeRows, TakeShard, Pad, Compact,
    AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Send, Recv,
    Wait, EventRecord,
}
