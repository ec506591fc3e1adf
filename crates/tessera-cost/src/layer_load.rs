//! The load of one layer: the tokens that enter it and the keys that they attend to.

use crate::params::Recompute;

/// The tokens, sequences and keys of one call or micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerLoad {
    /// Tokens of one micro-batch of one replica, before sharding.
    pub tokens: f64,
    /// Sequences of the micro-batch; a decode step has one per token.
    pub sequences: f64,
    /// Keys of one sequence at the end of the call, cached and new.
    pub keys: f64,
    /// Size of the sliding window, in keys including the query's own; absent for full attention.
    pub window: Option<f64>,
    /// Whether a backward pass follows.
    pub training: bool,
    /// Activations that the backward pass recomputes; ignored for ops outside the layers.
    pub recompute: Recompute,
}

impl LayerLoad {
    /// Returns the number of keys of one sequence that its last query attends to.
    #[must_use]
    pub fn visible_keys(&self) -> f64 {
        self.window.map_or(self.keys, |w| w.clamp(1.0, self.keys.max(1.0)))
    }

    /// Returns the mean number of keys that one of the last `own` queries of a sequence attends to.
    #[must_use]
    pub fn mean_visible_keys(&self, own: f64, causal: bool) -> f64 {
        let (near, first) = (self.visible_keys(), self.keys - (own - 1.0).max(0.0));
        if !causal || first >= near {
            return near;
        }
        // Each query adds one key until the window is full.
        let rising = near - first;
        let full = self.keys - near + 1.0;
        (((rising * (first + near - 1.0) / 2.0) + full * near) / (rising + full)).max(1.0)
    }
}
