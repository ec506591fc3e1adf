//! Floating-point operations of cost rows, independent of any layout.

use tessera_cost::layer::LayerLoad;
use tessera_cost::params::Recompute;
use tessera_ir::analytic_model::{AnalyticModel, LayerOp, LayerOpKind};

use super::{Job, SearchQuery};

/// Returns the useful operations of a step: matmuls and attention without recomputation, times
/// three in training.
pub(super) fn useful_flops(work: &AnalyticModel, q: &SearchQuery) -> f64 {
    let job = q.job;
    let rows = |rows: &[LayerOp]| row_flops_in_window(rows, job, q.attention_window());
    let layers: f64 = work.stacks.iter().map(|s| s.count as f64 * rows(&s.ops)).sum();
    let passes = if matches!(job, Job::Train { .. }) { 3.0 } else { 1.0 };
    passes
        * job.batch_size() as f64
        * job.query_tokens() as f64
        * (rows(&work.ops_before_layers) + layers + rows(&work.ops_after_layers))
}

/// Returns the floating-point operations per token of one forward pass through these rows.
pub(super) fn row_flops(rows: &[LayerOp], job: Job) -> f64 {
    row_flops_in_window(rows, job, None)
}

fn row_flops_in_window(rows: &[LayerOp], job: Job, window: Option<u64>) -> f64 {
    let queries = job.query_tokens() as f64;
    let load = LayerLoad {
        tokens: queries,
        sequences: 1.0,
        keys: job.context_tokens() as f64,
        window: window.map(|w| w as f64),
        training: false,
        recompute: Recompute::None,
    };
    let row = |r: &LayerOp| match r.kind {
        LayerOpKind::Matmul { k, n, .. } => 2.0 * (k * n) as f64,
        LayerOpKind::Experts { top_k, k, n, matrices, .. } => 2.0 * (top_k * k * n * matrices) as f64,
        LayerOpKind::Attention { heads, qk, v, causal, .. } => {
            2.0 * (heads * (qk + v)) as f64 * load.mean_visible_keys(queries, causal)
        }
        LayerOpKind::Elementwise { .. } | LayerOpKind::Embedding { .. } => 0.0,
    };
    rows.iter().map(row).sum()
}
