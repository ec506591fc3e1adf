//! Names and shapes of a generator's tensors, in the original naming with the diffusers name as alias.

use crate::WanConfig;

/// One tensor the checkpoint must hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedWeight {
    /// Original name.
    pub name: String,
    /// Name in a diffusers checkpoint.
    pub diffusers: String,
    /// Global shape.
    pub shape: Vec<u64>,
}

/// Every tensor of the generator, in a fixed order.
#[must_use]
pub fn expected_weights(c: &WanConfig) -> Vec<ExpectedWeight> {
    let (d, f) = (c.dim, c.ffn_dim);
    let mut out = List(Vec::new());
    out.add("patch_embedding.weight", "patch_embedding.weight", &[d, c.channels, 1, c.patch[0], c.patch[1]]);
    out.add("patch_embedding.bias", "patch_embedding.bias", &[d]);
    out.linear("text_embedding.0", "condition_embedder.text_embedder.linear_1", d, c.text_dim);
    out.linear("text_embedding.2", "condition_embedder.text_embedder.linear_2", d, d);
    out.linear("time_embedding.0", "condition_embedder.time_embedder.linear_1", d, c.freq_dim);
    out.linear("time_embedding.2", "condition_embedder.time_embedder.linear_2", d, d);
    out.linear("time_projection.1", "condition_embedder.time_proj", 6 * d, d);
    for i in 0..c.layers {
        let b = format!("blocks.{i}");
        out.add(&format!("{b}.modulation"), &format!("{b}.scale_shift_table"), &[1, 6, d]);
        for (ours, theirs) in [("self_attn", "attn1"), ("cross_attn", "attn2")] {
            for (p, q) in [("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")] {
                out.linear(&format!("{b}.{ours}.{p}"), &format!("{b}.{theirs}.{q}"), d, d);
            }
            for n in ["norm_q", "norm_k"] {
                out.add(&format!("{b}.{ours}.{n}.weight"), &format!("{b}.{theirs}.{n}.weight"), &[d]);
            }
        }
        // Diffusers calls the affine norm before cross-attention norm2.
        out.add(&format!("{b}.norm3.weight"), &format!("{b}.norm2.weight"), &[d]);
        out.add(&format!("{b}.norm3.bias"), &format!("{b}.norm2.bias"), &[d]);
        out.linear(&format!("{b}.ffn.0"), &format!("{b}.ffn.net.0.proj"), f, d);
        out.linear(&format!("{b}.ffn.2"), &format!("{b}.ffn.net.2"), d, f);
    }
    out.add("head.modulation", "scale_shift_table", &[1, 2, d]);
    out.linear("head.head", "proj_out", c.token_width(), d);
    out.0
}

struct List(Vec<ExpectedWeight>);

impl List {
    fn add(&mut self, name: &str, diffusers: &str, shape: &[u64]) {
        self.0.push(ExpectedWeight { name: name.into(), diffusers: diffusers.into(), shape: shape.to_vec() });
    }

    fn linear(&mut self, name: &str, diffusers: &str, rows: u64, cols: u64) {
        self.add(&format!("{name}.weight"), &format!("{diffusers}.weight"), &[rows, cols]);
        self.add(&format!("{name}.bias"), &format!("{diffusers}.bias"), &[rows]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(text: &str) -> u64 {
        let c = WanConfig::parse("c", text).unwrap();
        expected_weights(&c).iter().map(|w| w.shape.iter().product::<u64>()).sum()
    }

    #[test]
    fn published_sizes_come_out() {
        let small = parameters(r#"{"dim":1536,"ffn_dim":8960,"num_heads":12,"num_layers":30}"#);
        let large = parameters(r#"{"dim":5120,"ffn_dim":13824,"num_heads":40,"num_layers":40}"#);
        assert_eq!((small / 1_000_000, large / 1_000_000), (1418, 14288));
    }
}
