//! Imbalanced workloads of experts: W0 to W7.

use tessera_filetests::experts::{Layer, normals};

/// A workload by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// W0: every expert gets as many choices as the others.
    Balanced,
    /// W1: all tokens choose the same few experts, which lie on several ranks.
    HotExperts,
    /// W2: all tokens choose experts of one rank.
    HotRank,
    /// W3: some experts of each rank get most choices.
    SpreadHot,
    /// W4: the tokens of the first groups choose freely; those of the others choose one expert.
    SourceRagged,
    /// W5: no token chooses an expert of the last rank.
    ZeroLoadRank,
    /// W6: the hot expert moves on from call to call.
    RotatingHotspot,
    /// W7: calls without imbalance, and one in which all tokens choose one expert first.
    Burst,
}

impl Workload {
    pub const ALL: [Workload; 8] = [
        Workload::Balanced,
        Workload::HotExperts,
        Workload::HotRank,
        Workload::SpreadHot,
        Workload::SourceRagged,
        Workload::ZeroLoadRank,
        Workload::RotatingHotspot,
        Workload::Burst,
    ];

    /// Returns the layer of a call, for experts in `ranks` equal parts.
    pub fn layer(self, call: usize, (tokens, experts, ranks, top_k): (usize, usize, usize, usize)) -> Layer {
        let each = experts / ranks;
        let noise = normals(100 + call as u64, tokens * experts);
        let logits = (0..tokens).map(|t| {
            let turn = |e: usize| (e + experts - t * top_k % experts) % experts < top_k;
            let bonus = |e: usize| match self {
                Workload::Balanced => 20.0 * f32::from(turn(e)),
                Workload::HotExperts => 20.0 * f32::from(e.is_multiple_of(each) && e / each < top_k.max(2)),
                Workload::HotRank => 20.0 * f32::from(e / each == 1 % ranks),
                Workload::SpreadHot => 3.0 * f32::from(e.is_multiple_of(each)),
                Workload::SourceRagged => 20.0 * f32::from(t >= tokens / 2 && e == 0),
                Workload::ZeroLoadRank => -20.0 * f32::from(e / each == ranks - 1),
                Workload::RotatingHotspot => 20.0 * f32::from(e == call % experts),
                Workload::Burst if call == 1 => 20.0 * f32::from(e == experts - 1),
                Workload::Burst => 20.0 * f32::from(turn(e)),
            };
            (0..experts).map(|e| noise[t * experts + e] + bonus(e)).collect()
        });
        Layer::new(experts, top_k, logits.collect())
    }
}
