//! Names and shapes of a UMT5 encoder's tensors, in the naming of Wan and in that of transformers.

use super::Umt5Config;

/// A tensor that the checkpoint of a text encoder must contain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Umt5Weight {
    /// Name in the program. Its prefix keeps it apart from the names of the DiT.
    pub name: String,
    /// Names in checkpoints: that of Wan, then that of transformers, then another one of transformers.
    pub aliases: Vec<String>,
    /// Extents of the tensor.
    pub shape: Vec<u64>,
}

/// Lists every tensor of the encoder in a fixed order.
#[must_use]
pub fn umt5_weights(c: &Umt5Config) -> Vec<Umt5Weight> {
    let (d, inner) = (c.d_model, c.inner_dim());
    let weight = |wan: String, transformers: String, shape: &[u64]| Umt5Weight {
        name: program_name(&wan),
        aliases: vec![wan, transformers],
        shape: shape.to_vec(),
    };
    let mut table = weight("token_embedding.weight".into(), "shared.weight".into(), &[c.vocab_size, d]);
    table.aliases.push("encoder.embed_tokens.weight".into());
    let mut out = vec![table];
    for i in 0..c.layers {
        let (wan, block) = (format!("blocks.{i}"), format!("encoder.block.{i}"));
        let (attention, dense) = (format!("{block}.layer.0"), format!("{block}.layer.1"));
        let mut push = |ours: &str, theirs: String, shape: &[u64]| {
            out.push(weight(format!("{wan}.{ours}.weight"), format!("{theirs}.weight"), shape));
        };
        push("norm1", format!("{attention}.layer_norm"), &[d]);
        for (name, shape) in [("q", [inner, d]), ("k", [inner, d]), ("v", [inner, d]), ("o", [d, inner])] {
            push(&format!("attn.{name}"), format!("{attention}.SelfAttention.{name}"), &shape);
        }
        push(
            "pos_embedding.embedding",
            format!("{attention}.SelfAttention.relative_attention_bias"),
            &[c.buckets, c.heads],
        );
        push("norm2", format!("{dense}.layer_norm"), &[d]);
        push("ffn.gate.0", format!("{dense}.DenseReluDense.wi_0"), &[c.d_ff, d]);
        push("ffn.fc1", format!("{dense}.DenseReluDense.wi_1"), &[c.d_ff, d]);
        push("ffn.fc2", format!("{dense}.DenseReluDense.wo"), &[d, c.d_ff]);
    }
    out.push(weight("norm.weight".into(), "encoder.final_layer_norm.weight".into(), &[d]));
    out
}

/// Returns the name in the program of a tensor with this name in a checkpoint of Wan.
pub(super) fn program_name(wan: &str) -> String {
    format!("text_encoder.{wan}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_xxl_encoder_has_its_published_size() {
        let count: u64 =
            umt5_weights(&Umt5Config::xxl()).iter().map(|w| w.shape.iter().product::<u64>()).sum();
        // 256384 · 4096 + 24 · (4 · 4096² + 3 · 4096 · 10240 + 32 · 64 + 2 · 4096) + 4096
        assert_eq!(count, 5_680_910_336);
    }
}
