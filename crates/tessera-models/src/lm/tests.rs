//! Compares counts with published ones.

use tessera_ir::analytic_model::{AnalyticModel, LayerOp, LayerOpKind, OpSharding};

use serde_json::json;

use super::{DecoderModel, LanguageModel};
use crate::zoo;

fn load_model(name: &str) -> AnalyticModel {
    zoo::find_model(name).unwrap().to_analytic_model(true)
}

/// Checks that two counts agree within half a per cent.
fn assert_near(counted: u64, published: f64) {
    let off = counted as f64 / published - 1.0;
    assert!(off.abs() <= 0.005, "{counted} against {published}: {:+.2} %", 100.0 * off);
}

#[test]
fn every_name_is_a_model() {
    for name in zoo::model_names() {
        assert_eq!(zoo::find_model(name).unwrap().name, name);
        assert!(load_model(name).parameter_count() > 0);
    }
    assert!(zoo::find_model("sr").is_none());
}

#[test]
fn parameters_are_the_published_ones() {
    for (name, billions) in [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v3", 671.0),
        ("gpt-3.6b", 3.56),
        ("gpt-7.5b", 7.5),
        ("gpt-18b", 18.4),
        ("gpt-39b", 39.1),
        ("gpt-76b", 76.1),
        ("gpt-146b", 145.6),
        ("gpt-310b", 310.1),
        ("gpt-530b", 529.6),
        ("gpt-1t", 1008.0),
    ] {
        assert_near(load_model(name).parameter_count(), billions * 1e9);
    }
    // Published with two digits: 1.7.
    assert_eq!(load_model("gpt-1.7b").parameter_count(), 1_652_230_656);
}

#[test]
fn active_parameters_are_the_published_ones() {
    // DeepSeek's own count of 36.7 and Qwen's count of 22 are rounded; an embedding lookup does no
    // work.
    assert_near(load_model("deepseek-v3").active_parameter_count(), 36.7e9);
    assert_eq!(load_model("deepseek-v3").active_parameter_count(), 36_625_618_432);
    assert_near(load_model("mixtral-8x7b").active_parameter_count() + 32_000 * 4096, 12.9e9);
    assert_eq!(load_model("qwen3-235b-a22b").active_parameter_count(), 22_190_763_520 - 151_936 * 4096);
    let dense = load_model("llama-3.1-8b");
    assert_eq!(dense.active_parameter_count(), dense.parameter_count() - 128_256 * 4096);
}

#[test]
fn cache_bytes_per_token() {
    for (name, bytes) in [
        ("llama-3.1-8b", 2 * 2 * 8 * 128 * 32),
        ("llama-3.1-70b", 2 * 2 * 8 * 128 * 80),
        ("llama-3.1-405b", 2 * 2 * 8 * 128 * 126),
        ("mixtral-8x7b", 2 * 2 * 8 * 128 * 32),
        ("qwen3-235b-a22b", 2 * 2 * 4 * 128 * 94),
        // 70,272 bytes is the figure of its release.
        ("deepseek-v3", 70_272),
        ("sr-moe", 2 * 2 * 8192 * 24),
        ("sr-moe-wide", 2 * 2 * 16_384 * 24),
    ] {
        assert_eq!(load_model(name).kv_cache_bytes(2.0).0, bytes, "{name}");
    }
}

fn kept_bytes(rows: &[LayerOp], cuts: &[OpSharding]) -> u64 {
    rows.iter().filter(|r| cuts.contains(&r.sharding)).map(|r| r.activation_bytes).sum()
}

#[test]
fn kept_bytes_of_a_layer_match_korthikanti_et_al() {
    for (name, h) in [("gpt-22b", 6144), ("gpt-175b", 12_288), ("gpt-530b", 20_480), ("gpt-1t", 25_600)] {
        let w = zoo::find_model(name).unwrap().to_analytic_model(false);
        let rows = &w.stacks[0].ops;
        assert_eq!(
            kept_bytes(rows, &[OpSharding::Replicated, OpSharding::Col]),
            10 * h,
            "the part that tp alone does not divide"
        );
        assert_eq!(
            kept_bytes(rows, &[OpSharding::Row, OpSharding::Heads]),
            24 * h,
            "the part that tp divides"
        );
        let share = |divided| {
            rows.iter()
                .map(|r| r.activation_bytes as f64 * r.sharding.activation_fraction(8, divided))
                .sum::<f64>()
        };
        assert_eq!(share(false), (10.0 + 24.0 / 8.0) * h as f64);
        assert_eq!(share(true), 34.0 / 8.0 * h as f64);
        let scores = rows.iter().find_map(|r| match r.kind {
            LayerOpKind::Attention { stored_score_bytes: scores_bytes, .. } => Some(scores_bytes),
            _ => None,
        });
        assert_eq!(scores, Some(5));
        // Outside the layers: a mask after the embedding; inputs of the final norm and head, and
        // four-byte logits.
        assert_eq!(kept_bytes(&w.ops_before_layers, &[OpSharding::Replicated]), h);
        assert_eq!(w.ops_after_layers.iter().map(|r| r.activation_bytes).sum::<u64>(), 4 * h + 4 * 51_200);
    }
}

#[test]
fn kept_bytes_of_a_gated_layer() {
    let rows = &load_model("llama-3.1-8b").stacks[0].ops;
    let (h, kv, inner, heads) = (4096, 1024, 14_336, 32);
    // Two norms and two matmuls read the residual stream; attention keeps q, k, v, its output and
    // one number per head.
    let attention = 2 * (h + 2 * kv) + 2 * h + 4 * heads;
    assert_eq!(rows.iter().map(|r| r.activation_bytes).sum::<u64>(), 8 * h + attention + 6 * inner);
}

#[test]
fn latent_attention_has_parts() {
    let w = load_model("deepseek-v3");
    let counts: Vec<_> = w.stacks.iter().map(|s| (s.name, s.count)).collect();
    assert_eq!(counts, [("dense", 3), ("experts", 58)]);
    let of = |name: &str| w.stacks[1].ops.iter().find(|r| r.name == name).unwrap();
    assert_eq!(of("attention.down").weight_count(), 7168 * (1536 + 512 + 64));
    assert_eq!(of("attention.q_up").weight_count(), 1536 * 128 * 192);
    assert_eq!(of("attention.kv_up").weight_count(), 512 * 128 * 256);
    assert_eq!(of("attention.out").weight_count(), 128 * 128 * 7168);
    assert_eq!(of("experts.ffn").weight_count(), 256 * 3 * 7168 * 2048);
    let LayerOpKind::Attention { qk, v, latent, .. } = of("attention.core").kind else { panic!() };
    let latent = latent.unwrap();
    assert_eq!((qk, v, latent.qk, latent.v), (192, 128, 576, 512));
    assert_eq!((w.kv_heads, w.routed_experts()), (1, Some((256, 8))));
}

#[test]
fn both_head_widths_of_sr_moe_are_models() {
    for (name, width) in [("sr-moe", 8192), ("sr-moe-wide", 16_384)] {
        let w = load_model(name);
        assert_eq!((w.hidden_size, w.heads, w.routed_experts()), (8192, 128, Some((4096, 2))));
        let qkv = w.stacks[0].ops.iter().find(|r| r.name == "attention.qkv").unwrap();
        assert_eq!(qkv.weight_count(), 8192 * 3 * width);
    }
}

const LLAMA: &str = r#"{"architectures":["LlamaForCausalLM"],"vocab_size":100,"hidden_size":64,"intermediate_size":96,
    "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"hidden_act":"silu","rope_theta":5e5,
    "rope_scaling":{"factor":8.0},"torch_dtype":"bfloat16","eos_token_id":[1,2],"use_cache":true}"#;

#[test]
fn mistakes_suggest_the_nearest_key() {
    let code = |text: &str| {
        let ds = LanguageModel::parse("config.json", text).unwrap_err();
        (ds[0].code.id, ds[0].message.clone(), ds[0].hint.clone().unwrap_or_default())
    };
    LanguageModel::parse("config.json", LLAMA).unwrap();
    let (id, _, hint) = code(&LLAMA.replace("LlamaForCausalLM", "LlamaForCausalLN"));
    assert_eq!((id, hint.as_str()), ("T0430", "did you mean `LlamaForCausalLM`?"));
    for other in ["[]", r#"["A","B"]"#, "7"] {
        assert_eq!(code(&LLAMA.replace(r#"["LlamaForCausalLM"]"#, other)).0, "T0430", "{other}");
    }
    let (id, message, hint) = code(&LLAMA.replace("num_key_value_heads", "num_key_value_head"));
    assert_eq!((id, hint.as_str()), ("T0002", "did you mean `num_key_value_heads`?"), "{message}");
    let (id, message, hint) = code(&LLAMA.replace("\"silu\"", "\"relu\""));
    assert_eq!((id, hint.as_str()), ("T0432", "accepted: \"silu\""));
    assert!(message.contains("hidden_act") && message.contains("relu"), "{message}");
    assert_eq!(code(&LLAMA.replace("\"num_key_value_heads\":2", "\"num_key_value_heads\":3")).0, "T0431");
    assert_eq!(code(&LLAMA.replace("\"vocab_size\":100", "\"vocab_size\":0")).0, "T0004");
    assert_eq!(code(&LLAMA.replace("\"vocab_size\":100,", "")).0, "T0003");
    assert_eq!(
        code(&LLAMA.replace("\"num_hidden_layers\":2", "\"num_hidden_layers\":4000000000")).0,
        "T0431"
    );
    assert_eq!(code(&LLAMA.replace("\"hidden_size\":64", "\"hidden_size\":4294967292")).0, "T0431");
    let windowed = LLAMA
        .replace("LlamaForCausalLM", "MistralForCausalLM")
        .replace("\"rope_theta\":5e5", "\"sliding_window\":4096");
    assert_eq!(code(&windowed).0, "T0432");
}

#[test]
fn experts_may_be_in_some_layers_only() {
    let text = r#"{"architectures":["Qwen3MoeForCausalLM"],"vocab_size":100,"hidden_size":64,"intermediate_size":96,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"hidden_act":"silu","head_dim":16,
        "num_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":32,"decoder_sparse_step":2,
        "mlp_only_layers":[3]}"#;
    let w = LanguageModel::parse("config.json", text).unwrap().to_analytic_model(true);
    let counts: Vec<_> = w.stacks.iter().map(|s| (s.name, s.count)).collect();
    assert_eq!(counts, [("dense", 1), ("experts", 1), ("dense", 3), ("experts", 1)]);
    let none = text.replace("[3]", "[1,3,5]");
    assert_eq!(LanguageModel::parse("config.json", &none).unwrap_err()[0].code.id, "T0431");
}

#[test]
fn another_routing_is_the_same_as_another_config() {
    for (name, experts, top_k) in [("deepseek-v3", 512, 6), ("sr-moe", 4096, 1), ("mixtral-8x7b", 16, 2)] {
        let model = zoo::find_model(name).unwrap();
        let mut other = model.clone();
        let routed = other.experts.as_mut().unwrap();
        (routed.count, routed.top_k) = (experts, top_k);
        assert_eq!(model.to_analytic_model(true).with_experts(experts, top_k), other.to_analytic_model(true));
    }
}

#[test]
fn qkv_is_column_sharded_and_experts_over_ranks() {
    for name in zoo::model_names() {
        for row in load_model(name).stacks.iter().flat_map(|s| &s.ops) {
            let cut = match row.name {
                "attention.qkv" | "attention.q_up" | "attention.kv_up" | "mlp.up" | "shared.up" => {
                    OpSharding::Col
                }
                "attention.core" | "attention.rope" | "attention.qk_norm" | "mlp.act" | "shared.act" => {
                    OpSharding::Heads
                }
                "attention.out" | "mlp.down" | "shared.down" => OpSharding::Row,
                "experts.ffn" | "experts.act" => OpSharding::Experts,
                _ => OpSharding::Replicated,
            };
            assert_eq!(row.sharding, cut, "{name}: {}", row.name);
        }
    }
}

fn deepseek_config(changes: &[(&str, serde_json::Value)]) -> String {
    let text = include_str!("../../zoo/deepseek-v3.json");
    let mut config: serde_json::Value = serde_json::from_str(text).unwrap();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    config.to_string()
}

#[test]
fn deepseek_runs_as_published_except_quantised_and_with_another_router() {
    let parse = |changes: &[_]| DecoderModel::parse("config.json", &deepseek_config(changes));
    let model = parse(&[]).unwrap();
    assert_eq!((model.heads, model.kv_heads, model.head_dim), (128, 1, 576));
    let gate = model.experts.as_ref().unwrap().gate;
    assert_eq!((gate.sigmoid, gate.groups, gate.keep_groups, gate.scale), (true, 8, 4, 2.5));
    // The layer that predicts a further token.
    assert!(model.is_left_out("model.layers.61.eh_proj.weight"));
    assert!(!model.is_left_out("model.layers.6.mlp.gate.weight") && !model.is_left_out("model.norm.weight"));
    for (key, value, code, words) in [
        ("quantization_config", json!({"quant_method": "fp8"}), "T0433", "quantised (method `fp8`)"),
        ("scoring_func", json!("softmax"), "T0433", "scores with a softmax"),
        ("topk_method", json!("greedy"), "T0433", "nothing corrects its choice"),
        ("qk_rope_head_dim", json!(63), "T0433", "odd number of columns"),
        ("n_group", json!(7), "T0431", "4 of 7 groups of 256 experts"),
        ("topk_group", json!(9), "T0431", "9 of 8 groups of 256 experts"),
        ("num_experts_per_tok", json!(129), "T0431", "129 experts of 128 in 4 groups"),
        ("routed_scaling_factor", json!(0.0), "T0431", "`routed_scaling_factor` is 0"),
    ] {
        let ds = parse(&[(key, value)]).unwrap_err();
        assert!(ds.len() == 1 && ds[0].code.id == code && ds[0].message.contains(words), "{key}: {ds:?}");
    }
}

// The numbers are those of transformers 5.24.
#[test]
fn yarn_frequencies_and_factors_are_those_of_transformers() {
    let scaling = json!({"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096});
    let text = deepseek_config(&[("rope_scaling", scaling), ("rope_theta", json!(10000))]);
    let deepseek = DecoderModel::parse("config.json", &text).unwrap();
    assert_eq!(deepseek.rotary.scaling.factor_of_rotated(), 1.0);
    assert!((deepseek.rotary.latent_score_factor - (0.1 * 40.0_f64.ln() + 1.0).powi(2)).abs() < 1e-12);
    let qwen = json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 256, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 128, "vocab_size": 9,
        "max_position_embeddings": 131072, "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}});
    let qwen = DecoderModel::parse("config.json", &qwen.to_string()).unwrap();
    assert!((qwen.rotary.scaling.factor_of_rotated() - 1.138_629_436_111_989).abs() < 1e-12);
    let of_deepseek = [
        (0, 1.0),
        (9, 0.074_989_415),
        (10, 0.056_234_13),
        (12, 0.026_879_36),
        (15, 0.008_334_509),
        (20, 0.000_790_569_4),
        (23, 3.333_803_4e-5),
        (31, 3.333_803_5e-6),
    ];
    let of_qwen = [
        (0, 1.0),
        (23, 0.006_978_306),
        (30, 0.001_064_361),
        (35, 0.000_246_258_4),
        (40, 4.445_698_5e-5),
        (63, 3.102_344_4e-7),
    ];
    for (model, pairs) in [(&deepseek, &of_deepseek[..]), (&qwen, &of_qwen)] {
        let found = model.rotary_frequencies();
        for (i, expected) in pairs {
            assert!((found[*i] / expected - 1.0).abs() < 2e-6, "pair {i}: {} against {expected}", found[*i]);
        }
    }
}
