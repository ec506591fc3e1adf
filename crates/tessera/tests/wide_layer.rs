//! One layer in the width of a published model against transformers. The weights are hashes of names and indices, so that
//! no file of several hundred megabytes is stored.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tessera::Mapping;
use tessera::generate::{LanguagePlan, LanguageSettings, TextModel, TokenOutput, TokenRun};
use tessera_weights::WeightFiles;

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm-wide").join(family)
}

/// Returns the bf16 values of a tensor, as `tools/fixtures/make_wide.py` computes them.
fn hash_tensor(name: &str, shape: &[usize]) -> Vec<u8> {
    let seed = name.bytes().fold(2_166_136_261_u32, |h, byte| (h ^ u32::from(byte)).wrapping_mul(16_777_619));
    let columns = if name == "model.embed_tokens.weight" { 1 } else { shape[shape.len() - 1] };
    let scale = (3.4 / (columns as f64).sqrt()).log2().floor().exp2() as f32;
    let element = |i: usize| {
        let mut x = (i as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed);
        x ^= x >> 16;
        x = x.wrapping_mul(0x7feb_352d);
        x ^= x >> 15;
        x = x.wrapping_mul(0x846c_a68b);
        x ^= x >> 16;
        let high = (x >> 24) as f32;
        let value = if shape.len() == 1 {
            1.0 + (high / 2.0).floor() / 128.0
        } else {
            (high - 127.5) / 128.0 * scale
        };
        // Exact, because no value has more than 8 significant bits.
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..shape.iter().product()).flat_map(element).collect()
}

/// Lists the tensors of a checkpoint.
fn list_tensors(model: &TextModel) -> Vec<(String, Vec<usize>)> {
    let m = &model.decoder;
    let [d, vocab, head, q, kv] =
        [m.extents.width, m.extents.vocab, m.head_dim, m.heads * m.head_dim, m.kv_heads * m.head_dim]
            .map(|n| n as usize);
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![vocab, d]),
        ("lm_head.weight".to_string(), vec![vocab, d]),
        ("model.norm.weight".to_string(), vec![d]),
    ];
    let mut add = |name: &str, shape: &[usize]| {
        tensors.push((format!("model.layers.0.{name}.weight"), shape.to_vec()));
    };
    add("input_layernorm", &[d]);
    add("post_attention_layernorm", &[d]);
    for (name, shape) in [("q", [q, d]), ("k", [kv, d]), ("v", [kv, d]), ("o", [d, q])] {
        add(&format!("self_attn.{name}_proj"), &shape);
    }
    add("self_attn.q_norm", &[head]);
    add("self_attn.k_norm", &[head]);
    let (prefixes, inner) = match &m.experts {
        Some(e) => ((0..e.count).map(|i| format!("mlp.experts.{i}")).collect(), e.inner as usize),
        None => (vec!["mlp".to_string()], m.extents.mlp.inner as usize),
    };
    for prefix in prefixes {
        for (part, shape) in [("gate", [inner, d]), ("up", [inner, d]), ("down", [d, inner])] {
            add(&format!("{prefix}.{part}_proj"), &shape);
        }
    }
    if let Some(e) = &m.experts {
        add("mlp.gate", &[e.count as usize, d]);
    }
    tensors
}

/// Writes the checkpoint of a family.
fn write_checkpoint(family: &str, dir: &Path) -> TextModel {
    std::fs::copy(folder(family).join("config.json"), dir.join("config.json")).unwrap();
    let model = TextModel::open(dir).unwrap();
    let tensors = list_tensors(&model);
    let data: Vec<Vec<u8>> = tensors.iter().map(|(name, shape)| hash_tensor(name, shape)).collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), bytes)| {
        (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    model
}

#[test]
fn a_layer_in_the_width_of_a_published_model_agrees_with_transformers_on_every_mesh() {
    for (family, meshes) in [
        ("qwen3", &["tp=1", "tp=2", "tp=4", "tp=3"][..]),
        ("qwen3-moe", &["tp=1", "tp=2,ep=2", "ep=3", "ep=4"]),
        ("qwen3-moe-top1", &["tp=1", "ep=2", "tp=2,ep=2"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = write_checkpoint(family, dir.path());
        let reference = WeightFiles::open_file(&folder(family).join("reference.safetensors")).unwrap();
        let reference = reference.resolve_as_is().unwrap();
        let expected = reference.read_whole_f32("logits").unwrap();
        let prompt: Vec<u32> =
            reference.read_whole_f32("prompt").unwrap().into_iter().map(|id| id as u32).collect();
        let largest = expected.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for mesh in meshes {
            let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
            // Pieces of 5 rows do not divide the prompt.
            let settings = LanguageSettings::new(64, 5, TokenOutput::Logits);
            let plan = Arc::new(LanguagePlan::new(&model.decoder, &mapping, settings).unwrap());
            let found = TokenRun::load(&plan, dir.path(), 1).unwrap().compute_logits(&prompt).unwrap();
            assert_eq!(found.len(), expected.len());
            let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
            println!("{family} {mesh}: {far:.1e} of the largest logit, {largest}");
            assert!(far <= 2e-5, "{family} {mesh}: {far:e} of the largest logit");
        }
    }
}
