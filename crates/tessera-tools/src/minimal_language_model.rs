//! A minimal language model with experts that is generated on demand, so that drills need no files of the project:
//! random weights, ids in place of text.

use std::path::Path;

use tessera::files::write_error;
use tessera::generate::TextModel;
use tessera_base::Diagnostics;

use crate::minimal_model::encode_safetensors;

/// A prompt of the model.
pub const PROMPT_IDS: [u32; 5] = [3, 14, 15, 9, 26];

const WIDTH: u64 = 32;
const LAYERS: u64 = 2;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const HEAD_DIM: u64 = WIDTH / HEADS;
const EXPERTS: u64 = 4;
const EXPERT_WIDTH: u64 = 32;
const VOCABULARY: u64 = 61;

/// First draw of the random tensors.
const FIRST_DRAW: u32 = 4000;

/// Writes the model into an existing folder and opens it.
///
/// # Errors
/// T0014 if a file cannot be written.
pub fn create_language_model(dir: &Path) -> Result<TextModel, Diagnostics> {
    let files = [
        ("config.json", config_json().into_bytes()),
        ("model.safetensors", encode_safetensors(tensors(), FIRST_DRAW)),
    ];
    for (name, bytes) in files {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|e| vec![write_error(&path, &e)])?;
    }
    TextModel::open(dir)
}

fn config_json() -> String {
    format!(
        r#"{{
  "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": {WIDTH},
  "intermediate_size": {EXPERT_WIDTH}, "num_hidden_layers": {LAYERS}, "num_attention_heads": {HEADS},
  "num_key_value_heads": {KV_HEADS}, "head_dim": {HEAD_DIM}, "num_local_experts": {EXPERTS}, "num_experts_per_tok": 2,
  "vocab_size": {VOCABULARY}, "max_position_embeddings": 65536, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
  "sliding_window": null, "tie_word_embeddings": false
}}
"#
    )
}

fn tensors() -> Vec<(String, Vec<u64>)> {
    let mut all = vec![("model.embed_tokens.weight".to_string(), vec![VOCABULARY, WIDTH])];
    for layer in 0..LAYERS {
        let mut add = |name: &str, shape: &[u64]| {
            all.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("input_layernorm", &[WIDTH]);
        add("self_attn.q_proj", &[HEADS * HEAD_DIM, WIDTH]);
        add("self_attn.k_proj", &[KV_HEADS * HEAD_DIM, WIDTH]);
        add("self_attn.v_proj", &[KV_HEADS * HEAD_DIM, WIDTH]);
        add("self_attn.o_proj", &[WIDTH, HEADS * HEAD_DIM]);
        add("post_attention_layernorm", &[WIDTH]);
        add("block_sparse_moe.gate", &[EXPERTS, WIDTH]);
        for expert in 0..EXPERTS {
            for (part, shape) in
                [("w1", [EXPERT_WIDTH, WIDTH]), ("w2", [WIDTH, EXPERT_WIDTH]), ("w3", [EXPERT_WIDTH, WIDTH])]
            {
                add(&format!("block_sparse_moe.experts.{expert}.{part}"), &shape);
            }
        }
    }
    all.push(("model.norm.weight".to_string(), vec![WIDTH]));
    all.push(("lm_head.weight".to_string(), vec![VOCABULARY, WIDTH]));
    all
}
