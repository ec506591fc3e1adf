//! Costs of a collective library beyond the wire time: constants per collective and algorithm,
//! independent of the size.

/// Latencies and rates of a collective library such as NCCL.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectiveLibrary {
    /// Cost lines of an all-reduce, by algorithm.
    pub all_reduce: AlgorithmLines,
    /// Cost lines that all-gather and reduce-scatter share.
    pub gather: AlgorithmLines,
    /// Cost lines of an all-to-all, by algorithm.
    pub all_to_all: AlgorithmLines,
    /// Cost lines of a broadcast, by algorithm.
    pub broadcast: AlgorithmLines,
    /// Cost lines of a point-to-point send and its receive, by algorithm.
    pub send: AlgorithmLines,
    /// Time added to every collective that the host launches itself instead of replaying it from a
    /// CUDA graph.
    pub eager_ns: f64,
    /// Share, at most 1, that collectives between domains reach of the achievable rate of the links.
    pub network_rate: f64,
    /// Origin of the numbers, as free text that a file must state.
    pub source: String,
}

/// Cost lines of one collective by algorithm. An algorithm without lines is not offered. Of several
/// lines the cheapest applies, because a library changes its protocol with the size.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AlgorithmLines {
    /// Every rank reads the buffers of all other ranks at once.
    pub one_shot: Vec<CostLine>,
    /// Reduction and broadcast over a tree.
    pub tree: Vec<CostLine>,
    /// Each rank passes shards to the next rank of a ring over all ranks.
    pub ring: Vec<CostLine>,
    /// Pairwise exchange of shards.
    pub direct: Vec<CostLine>,
    /// Reduction in the switches; only on links with multicast.
    pub switch: Vec<CostLine>,
    /// Size in bytes below which the tree is used and from which the ring is used, whatever they
    /// cost; without it the cheaper algorithm is used.
    pub ring_from_bytes: Option<f64>,
}

/// Linear cost of one algorithm with one protocol: `base + hops · hop + (wire + self_copy · shard)
/// / (rate · achievable rate)`, with `wire` the bytes that the busiest rank sends and `shard` an
/// even share of the buffer. Between domains a hop takes at least the link's latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostLine {
    /// Time that every call takes, whatever its size.
    pub base_ns: f64,
    /// Time of each step that waits for a neighbour.
    pub hop_ns: f64,
    /// Share that transfers reach of the achievable rate of links within a domain.
    pub rate_share: f64,
    /// Cost of copying a rank's own shard relative to sending it; 0 if the copy is free.
    pub self_copy: f64,
    /// Share of the library's rate between domains: half for a protocol that sends a flag with each
    /// word.
    pub network_share: f64,
}
