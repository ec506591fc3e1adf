//! Experts over ranks: where tokens are routed, how results return, and how many tokens an expert accepts, on CPU
//! ranks and against one rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::Mapping;
use tessera::generate::{LanguagePlan, LanguageSettings, TextModel, TokenRun};
use tessera_ir::Opcode;
use tessera_mesh::Rank;
use tessera_models::TokenOutput;

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm").join(family)
}

/// Plans a model whose tokens choose `top_k` experts.
fn plan(family: &str, top_k: u64, mapping: &str) -> LanguagePlan {
    let mut model = TextModel::open(&folder(family)).unwrap().decoder;
    model.end_ids.clear();
    model.experts.as_mut().unwrap().top_k = top_k;
    let mapping = Mapping::parse("mapping.toml", mapping).unwrap_or_else(|ds| panic!("{mapping}: {ds:#?}"));
    let settings = LanguageSettings { sequences: 2, ..LanguageSettings::new(64, 25, TokenOutput::Logits) };
    LanguagePlan::new(&model, &mapping, settings).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"))
}

/// Returns the logits of a prompt, which calls of 25 rows read: three rows of a token group over 12.
fn logits(family: &str, top_k: u64, mapping: &str) -> Vec<f32> {
    let plan = Arc::new(plan(family, top_k, mapping));
    let prompt: Vec<u32> = (0..29).map(|i| (i * 29 + 3) % 61).collect();
    TokenRun::load(&plan, &folder(family), 1).unwrap().compute_logits(&prompt).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Returns the largest difference over the largest magnitude of `y`.
fn largest_difference(x: &[f32], y: &[f32]) -> f32 {
    let largest = y.iter().fold(0.0_f32, |m, y| m.max(y.abs()));
    x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max) / largest
}

#[test]
fn tokens_that_each_rank_routes_give_the_bits_of_one_rank() {
    for top_k in [1, 2, 4] {
        let alone = bits(&logits("qwen3-moe", top_k, ""));
        for mesh in ["ep = 1", "ep = 2", "ep = 3", "ep = 4", "ep = 2\npp = 2"] {
            for tokens in ["sharded", "replicated"] {
                let mapping = format!("[mesh]\n{mesh}\n[experts]\ntokens = \"{tokens}\"\n");
                let found = logits("qwen3-moe", top_k, &mapping);
                assert!(bits(&found) == alone, "{top_k} experts, {mesh}, {tokens}");
            }
        }
    }
}

#[test]
fn sums_per_rank_change_logits_by_rounding_alone() {
    let alone = logits("qwen3-moe", 4, "");
    for mesh in ["ep = 2", "ep = 4", "tp = 2\nep = 3"] {
        for tokens in ["sharded", "replicated"] {
            let keys = format!("tokens = \"{tokens}\"\ncombine = \"reduced\"");
            let found = logits("qwen3-moe", 4, &format!("[mesh]\n{mesh}\n[experts]\n{keys}\n"));
            let far = largest_difference(&found, &alone);
            assert!(far < 2e-5, "{mesh}, {tokens}: {far:e}");
        }
    }
}

#[test]
fn a_capacity_drops_the_same_tokens_on_every_mesh() {
    let keys =
        "[experts]\ntoken_groups = 12\ncapacity_factor = 0.7\nreroute_bytes = 256\nstatistics = true\n";
    let alone = logits("qwen3-moe", 2, keys);
    assert!(bits(&alone) != bits(&logits("qwen3-moe", 2, "")), "the capacity drops tokens");
    for mesh in ["ep = 2", "ep = 4", "ep = 3\npp = 2"] {
        for tokens in ["sharded", "replicated"] {
            let mapping = format!("[mesh]\n{mesh}\n{keys}tokens = \"{tokens}\"\n");
            assert!(bits(&logits("qwen3-moe", 2, &mapping)) == bits(&alone), "{mesh}, {tokens}");
        }
    }
}

#[test]
fn the_digest_of_a_plan_covers_the_groups_and_the_default_table_changes_none() {
    let digest = |mapping: &str| plan("qwen3-moe", 2, mapping).sealed.digest_hex();
    let plain = digest("");
    assert_eq!(digest("[experts]\ntokens = \"replicated\"\n"), plain);
    let groups = |n: u32| digest(&format!("[experts]\ntokens = \"sharded\"\ntoken_groups = {n}\n"));
    assert!(groups(2) != groups(4) && groups(2) != plain);
    let sealed = plan("qwen3-moe", 2, "[mesh]\nep = 3\n[experts]\ntokens = \"sharded\"\n").mapping;
    assert_eq!(sealed.experts.token_groups, Some(3));
}

#[test]
fn a_gate_that_penalises_distance_moves_choices_and_one_of_0_changes_no_bit() {
    let keys = |weight: f64| {
        format!(
            "[experts]\ntokens = \"sharded\"\nlocality_ranks = 1\ngate = \"topk_softmax_locality_penalized\"\n\
             locality_weight = {weight:?}\n"
        )
    };
    let plain = bits(&logits("qwen3-moe", 2, "[mesh]\nep = 3\n[experts]\ntokens = \"sharded\"\n"));
    assert!(bits(&logits("qwen3-moe", 2, &format!("[mesh]\nep = 3\n{}", keys(0.0)))) == plain);
    let near = bits(&logits("qwen3-moe", 2, &format!("[mesh]\nep = 3\n{}", keys(2.0))));
    assert!(near != plain, "a penalty of 2 moves choices");
    // A stage more changes no rank's distance to any expert. Groups of the ranks of one stage are those of ep.
    let term = "regularizer = { kind = \"topology_distance\", weight = 0.05, gradient = true }\n";
    let staged = format!("[mesh]\nep = 3\npp = 2\n{}{term}", keys(2.0));
    assert!(bits(&logits("qwen3-moe", 2, &staged)) == near);
}

#[test]
fn biases_and_draws_of_routers_give_the_same_bits_on_every_mesh() {
    let plain = bits(&logits("qwen3-moe", 2, ""));
    for keys in ["bias = [2.0, 0.0, -1.5, 0.5, 0.0, 1.0]", "top_k = 1.5\nseeds = { global = 3, ep = 4 }"] {
        let alone = bits(&logits("qwen3-moe", 2, &format!("[experts]\n{keys}\n")));
        assert!(alone != plain, "{keys}");
        for mesh in ["ep = 2", "ep = 3", "ep = 2\npp = 2"] {
            for tokens in ["sharded", "replicated"] {
                let mapping = format!("[mesh]\n{mesh}\n[experts]\ntokens = \"{tokens}\"\n{keys}\n");
                assert!(bits(&logits("qwen3-moe", 2, &mapping)) == alone, "{mesh}, {tokens}, {keys}");
            }
        }
    }
    let draw =
        |seeds: &str| bits(&logits("qwen3-moe", 2, &format!("[experts]\ntop_k = 1.5\nseeds = {seeds}\n")));
    assert!(draw("{ tp = 1 }") == draw("{ tp = 2 }"), "ranks of tp hold the same tokens");
    assert!(draw("{ ep = 1 }") != draw("{ ep = 2 }"));
}

#[test]
fn ranks_of_tp_with_whole_experts_compute_what_one_rank_computes() {
    let alone = logits("qwen3-moe", 2, "");
    for mesh in ["tp = 2", "tp = 3", "tp = 4", "tp = 2\npp = 2"] {
        let mapping = |keys: &str| format!("[mesh]\n{mesh}\n[experts]\naxis = \"tp\"\n{keys}");
        let found = logits("qwen3-moe", 2, &mapping(""));
        // Attention is divided by heads, so its sums over ranks round otherwise than those of one rank.
        let far = largest_difference(&found, &alone);
        assert!(far < 2e-5, "{mesh}: {far:e}");
        assert!(bits(&logits("qwen3-moe", 2, &mapping("tokens = \"sharded\"\n"))) == bits(&found), "{mesh}");
        let reduced = logits("qwen3-moe", 2, &mapping("tokens = \"sharded\"\ncombine = \"reduced\"\n"));
        assert!(largest_difference(&reduced, &alone) < 2e-5, "{mesh}");
    }
    let shapes = |mapping: &str| -> Vec<Vec<u64>> {
        let plan = plan("qwen3-moe", 2, mapping);
        let p = plan.sealed.rank_program(&plan.sealed.phase_names()[0], Rank(0)).unwrap();
        let experts = p.ops.iter().filter(|op| op.opcode == Opcode::Weight);
        let shapes = experts.map(|op| p.type_of(op.results[0]).shape.clone());
        shapes.filter(|shape| shape.len() == 3).collect()
    };
    let (whole, columns) = (shapes("[mesh]\ntp = 2\n[experts]\naxis = \"tp\"\n"), shapes("[mesh]\ntp = 2\n"));
    assert!(whole.iter().all(|shape| shape[0] == 3) && columns.iter().all(|shape| shape[0] == 6));
    let elements = |shapes: &[Vec<u64>]| shapes.iter().map(|s| s.iter().product::<u64>()).sum::<u64>();
    assert_eq!(elements(&whole), elements(&columns));
}

/// Choices that make the second expert of every layer the hottest.
const HOT: &str = "[[experts.choices]]\nlayer = 0\nexperts = [10, 90, 20, 5, 30, 5]\n\
                   [[experts.choices]]\nlayer = 1\nexperts = [1, 40, 1, 20, 1, 1]\n";

#[test]
fn copies_of_hot_experts_change_no_bit_of_ordered_sums() {
    let alone = bits(&logits("qwen3-moe", 2, ""));
    for mesh in ["ep = 1", "ep = 2", "ep = 3", "ep = 4", "ep = 2\npp = 2"] {
        for tokens in ["sharded", "replicated"] {
            for replicas in [0, 2, 3] {
                let keys = format!("tokens = \"{tokens}\"\nreplicas = {replicas}\n{HOT}");
                let found = logits("qwen3-moe", 2, &format!("[mesh]\n{mesh}\n[experts]\n{keys}"));
                assert!(bits(&found) == alone, "{mesh}, {tokens}, {replicas} copies");
            }
        }
    }
    let over_tp =
        |keys: &str| logits("qwen3-moe", 2, &format!("[mesh]\ntp = 2\n[experts]\naxis = \"tp\"\n{keys}"));
    assert!(bits(&over_tp(&format!("replicas = 2\n{HOT}"))) == bits(&over_tp("")));
    let reduced = format!("[mesh]\nep = 3\n[experts]\ncombine = \"reduced\"\nreplicas = 3\n{HOT}");
    assert!(largest_difference(&logits("qwen3-moe", 2, &reduced), &logits("qwen3-moe", 2, "")) < 2e-5);
}

#[test]
fn a_capacity_of_copies_drops_the_same_tokens_on_every_mesh() {
    let keys = |mesh: &str| {
        format!("[mesh]\n{mesh}\n[experts]\ntoken_groups = 12\ncapacity_factor = 0.7\nreplicas = 2\n{HOT}")
    };
    let alone = bits(&logits("qwen3-moe", 2, &keys("ep = 1")));
    assert!(alone != bits(&logits("qwen3-moe", 2, "")), "the capacity drops tokens");
    // A copy has slots beside those of the expert, and an expert without one keeps its own.
    let once = "[experts]\ntoken_groups = 12\ncapacity_factor = 0.7\n";
    assert!(alone != bits(&logits("qwen3-moe", 2, once)), "copies leave more tokens their experts");
    for mesh in ["ep = 2", "ep = 3", "ep = 4", "ep = 2\npp = 2"] {
        assert!(bits(&logits("qwen3-moe", 2, &keys(mesh))) == alone, "{mesh}");
    }
}

#[test]
fn a_plan_holds_a_matrix_for_each_place_and_refuses_choices_of_another_model() {
    let plan = plan("qwen3-moe", 2, &format!("[mesh]\nep = 2\n[experts]\nreplicas = 2\n{HOT}"));
    let weights = |rank| -> Vec<(String, u64)> {
        let p = plan.sealed.rank_program(&plan.sealed.phase_names()[0], Rank(rank)).unwrap();
        let ops = p.ops.iter().filter(|op| op.opcode == Opcode::Weight);
        let named = ops.map(|op| (op.name.clone().unwrap(), p.type_of(op.results[0]).shape[0]));
        named.filter(|(name, _)| name.contains("layers.0.mlp.experts") && name.contains("up_proj")).collect()
    };
    // Three places of 30 choices for expert 1; then 30, 20, 10, 5 and 5 go to the lighter rank, which has the lower
    // number if both are equal.
    let name = "model.layers.0.mlp.experts.{1,1,2,5,0,1,3,4}.up_proj.weight";
    assert_eq!(weights(0), [(name.to_string(), 4)]);
    assert_eq!(weights(1), weights(0));
    let mapping = "[mesh]\nep = 2\n[experts]\n[[experts.choices]]\nlayer = 1\nexperts = [1, 2]\n";
    let mapping = Mapping::parse("mapping.toml", mapping).unwrap();
    let model = TextModel::open(&folder("qwen3-moe")).unwrap().decoder;
    let ds =
        LanguagePlan::new(&model, &mapping, LanguageSettings::new(64, 25, TokenOutput::Logits)).unwrap_err();
    assert!(ds.iter().any(|d| d.code.id == "T0611" && d.message.contains("2 experts of 6")), "{ds:#?}");
}
