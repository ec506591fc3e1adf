//! Helpers that several tests of video plans share.

use tessera_models::{MediaPhases, VideoModel, build_phases, list_calls};
use tessera_plan::{DecoderPrecision, LogicalModel};

/// Returns the planner's input for a video model.
pub fn logical(m: &VideoModel) -> LogicalModel {
    LogicalModel {
        phases: build_phases(m, MediaPhases::BesideCalls),
        calls: list_calls(m, MediaPhases::BesideCalls),
        heads: m.wan.heads,
        head_dim: m.wan.head_dim(),
        hidden_size: m.wan.dim,
        ffn_size: m.wan.ffn_dim,
        tokens: m.chunk_tokens(),
        blocks: m.wan.layers,
        experts: 0,
        decoder: DecoderPrecision::Exact,
    }
}
