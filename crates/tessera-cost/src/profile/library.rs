//! What a library of collectives takes besides the wire: constants per op and algorithm, the same for every size.

/// Constants of a library.
#[derive(Debug, Clone, PartialEq)]
pub struct Library {
    /// Whole buffers added up on every rank.
    pub all_reduce: Lines,
    /// All-gather and reduce-scatter.
    pub gather: Lines,
    /// Every rank has a piece for every other.
    pub all_to_all: Lines,
    /// One rank's buffer to all.
    pub broadcast: Lines,
    /// One rank to one other.
    pub send: Lines,
    /// Added to every call that is not captured.
    pub eager_ns: f64,
    /// Share of the achievable rate of links between domains that collectives reach.
    pub out_rate: f64,
    /// Where the numbers come from.
    pub source: String,
}

/// The lines of one op by algorithm. An algorithm without lines is not offered. Of several lines the cheapest counts: a
/// library changes its protocol with the size.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lines {
    /// Every rank reads all others' buffers at once.
    pub one_shot: Vec<Line>,
    /// Up and down a tree.
    pub tree: Vec<Line>,
    /// Around a ring.
    pub ring: Vec<Line>,
    /// Pairwise exchange of pieces.
    pub direct: Vec<Line>,
    /// By the switches, on links with multicast alone.
    pub switch: Vec<Line>,
    /// Below this many bytes tree, from there on ring, whatever they cost; absent: the cheaper.
    pub ring_from_bytes: Option<f64>,
}

/// Time of one algorithm under one protocol: `base + hops · hop + (wire + own · piece) / (rate · achievable rate)`, with
/// `wire` the bytes that the busiest rank sends and `piece` an even share of the buffer. Between domains a hop takes at
/// least the link's latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Of any call.
    pub base_ns: f64,
    /// Of each step that waits for a neighbour.
    pub hop_ns: f64,
    /// Share of the achievable rate of links within a domain.
    pub rate: f64,
    /// What copying a rank's own piece costs beside sending it; 0 where it costs nothing.
    pub own: f64,
    /// Share of what the library reaches between domains: half for a protocol that sends a flag with each word.
    pub far: f64,
}
