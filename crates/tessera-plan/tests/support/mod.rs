//! What several tests of plans of video models need.

use tessera_models::{VideoModel, calls, phases};
use tessera_plan::Logical;

/// A video model as the planner takes it.
pub fn logical(m: &VideoModel) -> Logical {
    Logical {
        phases: phases(m),
        calls: calls(m),
        heads: m.wan.heads,
        dim: m.wan.dim,
        ffn: m.wan.ffn_dim,
        tokens: m.chunk_tokens(),
        blocks: m.wan.layers,
    }
}
