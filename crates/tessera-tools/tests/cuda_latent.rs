//! Latent attention on GPUs: its ops beside the reference evaluator, and a whole model. What can be refused is checked
//! without a GPU. Without one, the other tests print the reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there
//! must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod gpu_ranks;
mod language_cases;

use std::sync::Arc;

use gpu_ranks::{Link, find_gpus, open_ranks};
use language_cases::{
    Attention, Case, CaseWriter, DTYPES, attention_case, find_differences, find_gpu, take_turn,
};
use tessera_cuda::CudaBackend;
use tessera_filetests::language;
use tessera_ir::{Opcode, Program};
use tessera_mesh::Mesh;
use tessera_models::{DecoderModel, TokenOutput};

/// Extents of a model with latent attention: the columns of a head of queries without and with rotation, those of a
/// head of values, and those of a latent.
#[derive(Debug, Clone, Copy)]
struct LatentHeads {
    rows: usize,
    heads: usize,
    nope: usize,
    rope: usize,
    v: usize,
    rank: usize,
}

/// The ops that work on the columns of each head, in the order in which a layer has them.
fn head_case(dtype: &'static str, h: LatentHeads) -> Case {
    let mut w = CaseWriter::new(dtype, format!("{h:?}"), 2);
    let (of, q_head) = (h.nope + h.v, h.nope + h.rope);
    w.operand("q", &[h.rows, h.heads * q_head]);
    w.operand("o", &[h.rows, h.heads * h.rank]);
    w.weight("expansion", dtype, &[h.heads * of, h.rank]);
    w.line(format!("%plain = toperator.head_columns %q {{columns = {}, head_dim = {q_head}}}", h.nope));
    w.line(format!(
        "%turned = toperator.head_columns %q {{columns = {}, first = {}, head_dim = {q_head}}}",
        h.rope, h.nope
    ));
    w.line(format!(
        "%absorbed = toperator.head_matmul %plain, %expansion {{head_rows = {of}, rows = {}, transposed = true}}",
        h.nope
    ));
    w.line(format!("%joined = toperator.head_join %absorbed, %turned {{head_dim = {}}}", h.rank));
    w.line(format!(
        "%values = toperator.head_matmul %o, %expansion {{first = {}, head_rows = {of}, rows = {}}}",
        h.nope, h.v
    ));
    for name in ["plain", "turned", "absorbed", "joined", "values"] {
        w.output(name);
    }
    w.finish("")
}

#[test]
fn columns_and_matmuls_of_heads_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    // The extents of DeepSeek-V3, others whose columns no vector divides, and rows that fill no tile.
    let deepseek = LatentHeads { rows: 1, heads: 16, nope: 128, rope: 64, v: 128, rank: 512 };
    let odd = LatentHeads { rows: 7, heads: 3, nope: 5, rope: 2, v: 9, rank: 11 };
    let shapes = [
        deepseek,
        LatentHeads { rows: 19, heads: 2, ..deepseek },
        odd,
        LatentHeads { rows: 8, heads: 5, rank: 12, ..odd },
        LatentHeads { rows: 4, nope: 8, rope: 4, v: 6, rank: 264, ..odd },
    ];
    let cases: Vec<Case> =
        DTYPES.iter().flat_map(|dtype| shapes.map(|shape| head_case(dtype, shape))).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn rotary_case(dtype: &'static str, (heads, head, pairs): (usize, usize, usize)) -> Case {
    let mut w = CaseWriter::new(dtype, format!("interleaved rotary of {heads} heads of {head}"), 2);
    w.operand("x", &[6, heads * head]);
    w.weight("frequencies", "f32", &[pairs]);
    w.scalar("start", &[2], &[&[0.0, 4099.0], &[77.0, 3.0]]);
    w.line(format!(
        "%r = toperator.rotary %x, %frequencies, start=%start {{head_dim = {head}, interleaved = true, scale = 1.25}}"
    ));
    w.output("r");
    w.finish("")
}

#[test]
fn interleaved_rotations_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    let shapes = [(3, 6, 3), (5, 64, 32), (1, 64, 32), (2, 9, 3)];
    let cases: Vec<Case> =
        DTYPES.iter().flat_map(|dtype| shapes.map(|shape| rotary_case(dtype, shape))).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn attention_over_latents_agrees_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    // One row of one sequence with the heads of one of eight ranks, over 700 latents of DeepSeek-V3.
    let deepseek = Attention {
        sequences: 1,
        rows: 1,
        heads: 16,
        kv_heads: 1,
        head: 576,
        page_rows: 16,
        pages: 48,
        fill: 700,
        value_dim: 512,
        is_latent: true,
        mask: ", scale = 0.07",
    };
    let small = Attention { head: 12, value_dim: 8, ..deepseek };
    let shapes = [
        deepseek,
        Attention { sequences: 3, heads: 128, pages: 40, fill: 500, ..deepseek },
        Attention { sequences: 2, rows: 37, heads: 5, page_rows: 8, pages: 25, fill: 140, ..deepseek },
        Attention { heads: 3, ..deepseek },
        small,
        Attention { sequences: 3, heads: 21, page_rows: 5, pages: 30, fill: 131, ..small },
        Attention { sequences: 2, rows: 9, heads: 3, head: 13, page_rows: 3, pages: 9, fill: 17, ..small },
        Attention { rows: 70, heads: 6, kv_heads: 2, head: 64, value_dim: 64, ..small },
        Attention { rows: 40, heads: 4, ..small },
        // Keys and values apart, in heads of either kernel.
        Attention { heads: 6, is_latent: false, ..deepseek },
        Attention { sequences: 2, rows: 5, heads: 6, kv_heads: 3, is_latent: false, ..small },
    ];
    let windows = Attention { rows: 9, mask: ", window = 23, sink = 5", ..small };
    let shapes = shapes.into_iter().chain([windows]);
    let cases: Vec<Case> =
        shapes.flat_map(|shape| DTYPES.map(|dtype| attention_case(dtype, shape))).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Returns a model like DeepSeek-V3 without experts, and its mapping to some ranks of tp. `sizes` are its width, the
/// number of its heads, and the columns of a latent, of a head of queries without and with rotation, and of values.
fn dense_model(sizes: [u64; 6], tp: u32, dtype: &str) -> language::Case {
    let [width, heads, rank, nope, rope, v] = sizes;
    let config = format!(
        "{{\"architectures\": [\"DeepseekV3ForCausalLM\"], \"hidden_act\": \"silu\", \"max_position_embeddings\": 64, \
         \"rms_norm_eps\": 1e-5, \"rope_theta\": 100.0, \"tie_word_embeddings\": false, \"vocab_size\": 48, \
         \"hidden_size\": {width}, \"num_hidden_layers\": 2, \"num_attention_heads\": {heads}, \"attention_bias\": false, \
         \"num_key_value_heads\": {heads}, \"intermediate_size\": {}, \"moe_intermediate_size\": 8, \"n_routed_experts\": 4, \
         \"num_experts_per_tok\": 2, \"n_shared_experts\": 1, \"n_group\": 2, \"topk_group\": 1, \"norm_topk_prob\": true, \
         \"routed_scaling_factor\": 1.5, \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \
         \"first_k_dense_replace\": 1, \"moe_layer_freq\": 1, \"q_lora_rank\": {}, \"kv_lora_rank\": {rank}, \
         \"qk_nope_head_dim\": {nope}, \"qk_rope_head_dim\": {rope}, \"v_head_dim\": {v}}}",
        2 * width,
        width / 2,
    );
    let mut model = DecoderModel::parse("config.json", &config).unwrap_or_else(|ds| panic!("{ds:#?}"));
    // A config must have a layer with experts.
    (model.experts, model.extents.experts) = (None, None);
    let mapping = format!("[mesh]\ntp = {tp}\n[numerics]\ndtype = \"{dtype}\"\n");
    language::Case { model, output: TokenOutput::Logits, mapping, experts: String::new() }
}

/// Small extents that neither vectors nor ranks divide, and those of DeepSeek-V3.
const ODD: [u64; 6] = [28, 3, 8, 5, 4, 6];
const DEEPSEEK: [u64; 6] = [7168, 128, 512, 128, 64, 128];

#[test]
fn no_op_of_a_dense_latent_model_is_refused() {
    for (sizes, dtype) in [(ODD, "f32"), (ODD, "bf16"), (DEEPSEEK, "f32"), (DEEPSEEK, "bf16")] {
        for tp in [1, 2] {
            let case = dense_model(sizes, tp, dtype);
            let bundle = case.lower(&case.mapping).unwrap_or_else(|ds| panic!("{ds:#?}"));
            let programs: Vec<&Program> = bundle.phases.iter().flat_map(|phase| &phase.programs).collect();
            let refused: Vec<_> = programs.iter().filter_map(|p| CudaBackend::find_unsupported(p)).collect();
            assert!(refused.is_empty(), "{sizes:?} {dtype}, tp {tp}: {refused:#?}");
            for opcode in [Opcode::HeadColumns, Opcode::HeadJoin, Opcode::HeadMatmul, Opcode::PagedAttention]
            {
                let has_op = |p: &&Program| p.ops.iter().any(|op| op.opcode == opcode);
                assert!(programs.iter().all(has_op), "{} is in no program", opcode.name());
            }
        }
    }
}

#[test]
fn a_dense_latent_model_on_gpus_computes_what_the_evaluator_computes() {
    let Some((found, count)) = find_gpus(1) else { return };
    let _turn = take_turn();
    let open =
        |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| open_ranks((&found, count), Link::Nccl, mesh, programs);
    for sizes in [ODD, [64, 6, 512, 16, 64, 24]] {
        let whole = dense_model(sizes, 1, "f32");
        let (weights, calls) = (whole.weights(3), whole.calls(3));
        let plan = |case: &language::Case| case.lower(&case.mapping).unwrap_or_else(|ds| panic!("{ds:#?}"));
        let expected = language::evaluate(&plan(&whole), &weights, &calls, whole.output_name());
        for tp in 1..=count.min(2) {
            let bundle = plan(&dense_model(sizes, tp, "f32"));
            let found = language::run_on_ranks(&open, &bundle, &weights, &calls, whole.output_name());
            let found = found.unwrap_or_else(|fault| panic!("{sizes:?}, tp {tp}: {fault:?}"));
            let far = language::measure_difference(&found, &expected);
            println!("{sizes:?}, tp {tp}: {far:.1e}");
            assert!(far < 5e-5, "{sizes:?}, tp {tp}: {far:e}");
        }
    }
}
