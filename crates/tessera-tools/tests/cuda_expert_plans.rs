//! Checks without a GPU that the CUDA backend runs the programs of models with experts, whatever the mapping says of
//! their routing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeSet;

use tessera_cuda::CudaBackend;
use tessera_ir::{Bundle, Opcode};
use tessera_models::{DecoderModel, PagedCache, TokenBucket, TokenOutput, TokenPhase, build_token_phases};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, Strategy, lower};

const EXPERTS: u64 = 6;

const QWEN: &str = r#"{"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": true, "vocab_size": 32, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": false,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": false}"#;

const DEEPSEEK: &str = r#"{"architectures": ["DeepseekV3ForCausalLM"], "hidden_act": "silu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": false, "vocab_size": 32, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "attention_bias": false,
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 3, "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}"#;

/// Lowers a model for a bucket of prompts and one of decoding.
fn lower_model(config: &str, mapping: &str) -> Bundle {
    let model = DecoderModel::parse("config.json", config).unwrap_or_else(|ds| panic!("{ds:#?}"));
    let cache = PagedCache { page_rows: 4, pages: 8, pages_per_sequence: 4, replicates_heads: false };
    let buckets = [TokenBucket { sequences: 1, rows: 13 }, TokenBucket { sequences: 3, rows: 1 }];
    let phases = buckets.map(TokenPhase::from_call);
    let logical = LogicalModel {
        phases: build_token_phases(&model, cache, &phases, TokenOutput::Next),
        calls: phases.iter().map(TokenPhase::name).map(|name| (name.clone(), vec![name])).collect(),
        heads: if model.is_latent() { model.heads } else { model.kv_heads },
        head_dim: model.head_dim,
        hidden_size: model.extents.width,
        ffn_size: model.narrowest_feed_forward(),
        tokens: 13,
        blocks: model.extents.layers,
        experts: EXPERTS,
        decoder: DecoderPrecision::Exact,
    };
    let mut mapping =
        Mapping::parse("mapping.toml", mapping).unwrap_or_else(|ds| panic!("{mapping}: {ds:#?}"));
    mapping.strategy = Strategy::Megatron;
    lower(&logical, &mut mapping).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"))
}

#[test]
fn no_key_of_experts_makes_a_plan_that_gpus_refuse() {
    let all_of_one = "token_groups = 4\ncapacity_factor = 0.75\nreroute_bytes = 512\nstatistics = true";
    let sharded = "tokens = \"sharded\"";
    let routings = [
        "tokens = \"replicated\"".to_string(),
        "combine = \"reduced\"".to_string(),
        all_of_one.to_string(),
        format!("{sharded}\n{all_of_one}"),
        format!("{sharded}\n{all_of_one}\ncombine = \"reduced\"\nwire = \"fp8\""),
        format!("{sharded}\nreplicas = 2\n[[experts.choices]]\nlayer = 1\nexperts = [9, 1, 1, 5, 1, 1]"),
        format!("{sharded}\nbias = [0.5, 0, 0, -1, 0, 0]\ntop_k = 1.5"),
        format!("{sharded}\nlocality_ranks = 1\nbias_locality = 0.5"),
        format!(
            "{sharded}\nlocality_ranks = 1\nregularizer = {{ kind = \"topology_distance\", weight = 0.1, gradient = true }}"
        ),
    ];
    let gate = format!(
        "{sharded}\nlocality_ranks = 1\ngate = \"topk_softmax_locality_penalized\"\nlocality_weight = 0.5"
    );
    let mut seen = BTreeSet::new();
    for config in [QWEN, DEEPSEEK] {
        // Only a gate of softmax may be penalised.
        for routing in routings.iter().chain((config == QWEN).then_some(&gate)) {
            for (mesh, dtype) in [("ep = 2", "f32"), ("ep = 3\ntp = 2", "f32"), ("ep = 2", "bf16")] {
                let tokens = match routing.contains("wire") {
                    // Rows travel as e4m3 from f32.
                    true if dtype == "bf16" => continue,
                    true => "tokens = \"fp8_e4m3\"\n",
                    false => "",
                };
                // ep divides the number of groups.
                let routing = if mesh.contains("ep = 3") {
                    routing.replace("token_groups = 4", "token_groups = 6")
                } else {
                    routing.clone()
                };
                let mapping = format!(
                    "[mesh]\n{mesh}\n[numerics]\ndtype = \"{dtype}\"\n{tokens}[experts]\n{routing}\n"
                );
                let bundle = lower_model(config, &mapping);
                for p in bundle.phases.iter().flat_map(|phase| &phase.programs) {
                    let refused = CudaBackend::find_unsupported(p).map(|d| d.message);
                    assert_eq!(refused, None, "{mapping}");
                    seen.extend(p.ops.iter().map(|op| op.opcode));
                }
            }
        }
    }
    for opcode in [
        Opcode::TopKExperts,
        Opcode::ExpertWeights,
        Opcode::ExpertTokens,
        Opcode::ExpertPlaces,
        Opcode::ExpertLocality,
        Opcode::ExpertDistance,
        Opcode::ExpertDistanceGradient,
        Opcode::ExpertDraw,
        Opcode::ExpertReroute,
        Opcode::ExpertSlots,
        Opcode::ExpertCounts,
        Opcode::ExpertStatistics,
        Opcode::ExpertPack,
        Opcode::GroupedMatmul,
        Opcode::ExpertCombine,
        Opcode::AllToAll,
        Opcode::ReduceScatter,
    ] {
        assert!(seen.contains(&opcode), "{} is in no plan", opcode.name());
    }
}
