//! Names and shapes of a DiT's tensors, in the original naming with the diffusers name as alias.

use crate::WanConfig;

/// A tensor that the checkpoint must contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedWeight {
    /// Name in a checkpoint with the original naming.
    pub name: String,
    /// Name of the same tensor in a diffusers checkpoint; some names are equal in both.
    pub diffusers_name: String,
    /// Extents of the whole tensor, before sharding.
    pub shape: Vec<u64>,
}

/// Lists every tensor of the DiT in a fixed order.
#[must_use]
pub fn expected_weights(c: &WanConfig) -> Vec<ExpectedWeight> {
    let (d, f) = (c.dim, c.ffn_dim);
    let mut out = WeightList(Vec::new());
    out.push_weight(
        "patch_embedding.weight",
        "patch_embedding.weight",
        &[d, c.channels, 1, c.patch[0], c.patch[1]],
    );
    out.push_weight("patch_embedding.bias", "patch_embedding.bias", &[d]);
    out.push_linear("text_embedding.0", "condition_embedder.text_embedder.linear_1", d, c.text_dim);
    out.push_linear("text_embedding.2", "condition_embedder.text_embedder.linear_2", d, d);
    out.push_linear("time_embedding.0", "condition_embedder.time_embedder.linear_1", d, c.freq_dim);
    out.push_linear("time_embedding.2", "condition_embedder.time_embedder.linear_2", d, d);
    out.push_linear("time_projection.1", "condition_embedder.time_proj", 6 * d, d);
    for i in 0..c.layers {
        let b = format!("blocks.{i}");
        out.push_weight(&format!("{b}.modulation"), &format!("{b}.scale_shift_table"), &[1, 6, d]);
        for (ours, theirs) in [("self_attn", "attn1"), ("cross_attn", "attn2")] {
            for (p, q) in [("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")] {
                out.push_linear(&format!("{b}.{ours}.{p}"), &format!("{b}.{theirs}.{q}"), d, d);
            }
            for n in ["norm_q", "norm_k"] {
                out.push_weight(&format!("{b}.{ours}.{n}.weight"), &format!("{b}.{theirs}.{n}.weight"), &[d]);
            }
        }
        // Diffusers calls the affine norm before cross-attention norm2.
        out.push_weight(&format!("{b}.norm3.weight"), &format!("{b}.norm2.weight"), &[d]);
        out.push_weight(&format!("{b}.norm3.bias"), &format!("{b}.norm2.bias"), &[d]);
        out.push_linear(&format!("{b}.ffn.0"), &format!("{b}.ffn.net.0.proj"), f, d);
        out.push_linear(&format!("{b}.ffn.2"), &format!("{b}.ffn.net.2"), d, f);
    }
    out.push_weight("head.modulation", "scale_shift_table", &[1, 2, d]);
    out.push_linear("head.head", "proj_out", c.token_width(), d);
    out.0
}

struct WeightList(Vec<ExpectedWeight>);

impl WeightList {
    fn push_weight(&mut self, name: &str, diffusers: &str, shape: &[u64]) {
        self.0.push(ExpectedWeight {
            name: name.into(),
            diffusers_name: diffusers.into(),
            shape: shape.to_vec(),
        });
    }

    fn push_linear(&mut self, name: &str, diffusers: &str, rows: u64, cols: u64) {
        self.push_weight(&format!("{name}.weight"), &format!("{diffusers}.weight"), &[rows, cols]);
        self.push_weight(&format!("{name}.bias"), &format!("{diffusers}.bias"), &[rows]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter_count(text: &str) -> u64 {
        let c = WanConfig::parse("c", text).unwrap();
        expected_weights(&c).iter().map(|w| w.shape.iter().product::<u64>()).sum()
    }

    #[test]
    fn parameter_counts_match_published_sizes() {
        let small = parameter_count(r#"{"dim":1536,"ffn_dim":8960,"num_heads":12,"num_layers":30}"#);
        let large = parameter_count(r#"{"dim":5120,"ffn_dim":13824,"num_heads":40,"num_layers":40}"#);
        assert_eq!((small / 1_000_000, large / 1_000_000), (1418, 14288));
    }
}
