//! Tests programs in bf16 and fp8: which values are cast, that the ops equal those in f32, that
//! results do not depend on the mesh, and that the planned texts equal those in filetests/check,
//! which the verifier accepts there.

#![allow(clippy::disallowed_methods, reason = "it compares files with planned texts")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tessera_ir::{Bundle, DType, Op, OpKind, OpView, Opcode, Program, ValueId, print};
use tessera_models::{
    DecoderModel, PagedCache, TEXT_DEVICE_PHASE, TEXT_PHASE, TokenBucket, TokenOutput, TokenPhase,
    Umt5Config, VideoModel, build_token_phases,
};
use tessera_plan::{DecoderPrecision, DtypePolicy, LogicalModel, Mapping, Strategy, lower, precision};
use tessera_reference::Tensor;

use crate::run::{generator, max_difference};

#[path = "support/run.rs"]
mod run;
mod support;

fn plan(l: &LogicalModel, mesh: &str, strategy: Strategy, dtype: DtypePolicy) -> Bundle {
    let mut mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
    lower(l, &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

const MAPPINGS: [(&str, Strategy); 6] = [
    ("tp=1", Strategy::Ulysses),
    ("tp=2", Strategy::Ulysses),
    ("tp=2", Strategy::Megatron),
    ("pp=2", Strategy::Ulysses),
    ("tp=3,pp=2", Strategy::Ulysses),
    ("tp=3,pp=2", Strategy::Megatron),
];

/// Returns the dtypes of an op's operands, bias and results.
fn dtypes(p: &Program, op: &Op) -> Vec<DType> {
    let keyed = op.keyed.iter().filter(|(k, _)| *k == "bias").map(|(_, v)| v);
    op.operands.iter().chain(keyed).chain(&op.results).map(|v| p.type_of(*v).dtype).collect()
}

fn weight_of(p: &Program, op: &Op) -> String {
    let defs = p.defining_ops();
    defs[op.operands[1].0 as usize].and_then(|d| p.ops[d].name.clone()).unwrap()
}

#[test]
fn matmuls_are_rounded_and_long_lived_values_are_not() {
    for extra in ["", "[cache]\nmode = \"recompute\"\n[schedule]\nprediction = \"x0\"\n"] {
        let l = generator(2, 2, 14, extra);
        for phase in &l.phases {
            let p = precision::apply_dtype_policy(
                phase,
                DtypePolicy::Bf16,
                Strategy::Ulysses,
                DecoderPrecision::Exact,
            )
            .unwrap();
            for b in &p.buffers {
                let kept = if b.name.contains('.') { DType::Bf16 } else { DType::F32 };
                assert_eq!(b.ty.dtype, kept, "{} of @{}", b.name, p.name);
            }
            for op in &p.ops {
                let all = dtypes(&p, op);
                let expected = match op.opcode {
                    Opcode::Matmul if weight_of(&p, op).starts_with("time_") => [DType::F32; 4].to_vec(),
                    Opcode::Matmul => [DType::Bf16; 4].to_vec(),
                    Opcode::RmsNorm => vec![DType::Bf16, DType::F32, DType::Bf16],
                    Opcode::LayerNorm => vec![DType::Bf16, DType::F32, DType::F32, DType::Bf16],
                    Opcode::NormModulate => vec![DType::Bf16, DType::F32, DType::Bf16],
                    Opcode::GateResidual if all.len() == 4 => {
                        vec![DType::Bf16, DType::Bf16, DType::F32, DType::Bf16]
                    }
                    // A bias of scores is a call.
                    Opcode::Attention if all.len() == 5 => {
                        vec![DType::Bf16, DType::Bf16, DType::Bf16, DType::F32, DType::Bf16]
                    }
                    Opcode::GateResidual | Opcode::Attention | Opcode::Rope => vec![DType::Bf16; all.len()],
                    Opcode::Renoise | Opcode::ToX0 | Opcode::Modulation | Opcode::Output => {
                        vec![DType::F32; all.len()]
                    }
                    _ => continue,
                };
                assert_eq!(all, expected, "{} of @{}", op.opcode.name(), p.name);
            }
            // One cast per value and dtype, and only where an f32 value enters a matmul or a bf16
            // value leaves one.
            let casts: Vec<ValueId> =
                p.ops.iter().filter(|o| o.opcode == Opcode::Cast).map(|o| o.operands[0]).collect();
            assert_eq!(casts.len(), casts.iter().collect::<BTreeSet<_>>().len());
            let kind = p.name.split('.').next().unwrap();
            let want = BTreeMap::from([("text", 1), ("denoise", 2), ("clean", 1), ("recompute", 1)]);
            assert_eq!(casts.len(), want.get(kind).copied().unwrap_or(0), "@{}\n{}", p.name, print(&p));
        }
    }
}

/// Describes a program op by op without casts and scales, with every dtype f32; a reader of a cast
/// reads the cast's operand. Sources precede their first reader, which may be a cast, so the
/// description names them instead of numbering them.
fn describe_ops(p: &Program) -> Vec<String> {
    let defs = p.defining_ops();
    let mut number: BTreeMap<usize, usize> = BTreeMap::new();
    let mut out = Vec::new();
    let rounds = |op: &Op| matches!(op.opcode, Opcode::Cast | Opcode::Quantize);
    let is_source = |op: &Op| op.opcode.table_row().kind == OpKind::Source && op.opcode != Opcode::CacheRead;
    for (i, op) in p.ops.iter().enumerate() {
        if rounds(op) || is_source(op) {
            continue;
        }
        number.insert(i, out.len());
        let of_f32 =
            |v: &ValueId| p.type_of(*v).display_on(&p.mesh).replace("bf16", "f32").replace("e4m3", "f32");
        let made_by = |v: &ValueId| {
            let mut at = defs[v.0 as usize].unwrap();
            while rounds(&p.ops[at]) {
                at = defs[p.ops[at].operands[0].0 as usize].unwrap();
            }
            let by = &p.ops[at];
            if is_source(by) {
                format!("{:?} {}", by.name, of_f32(&by.results[0]))
            } else {
                number[&at].to_string()
            }
        };
        let keyed = op.keyed.iter().filter(|(k, _)| !k.ends_with("_scale")).map(|(_, v)| v);
        let read: Vec<String> = op.operands.iter().chain(keyed).map(made_by).collect();
        let types: Vec<String> = op.results.iter().map(of_f32).collect();
        let description = (op.opcode.name(), op.issue, &op.name, &op.attrs, op.stream, types, read);
        out.push(format!("{description:?}"));
    }
    out
}

#[test]
fn without_casts_the_program_equals_f32() {
    for extra in ["", "[cache]\nmode = \"recompute\"\n"] {
        let l = generator(5, 3, 14, extra);
        for (mesh, strategy) in MAPPINGS {
            let [f32, bf16, fp8] = DtypePolicy::ALL.map(|d| plan(&l, mesh, strategy, d));
            assert_eq!((&f32.roles, &f32.roles), (&bf16.roles, &fp8.roles));
            for (a, b) in f32.phases.iter().chain(&f32.phases).zip(bf16.phases.iter().chain(&fp8.phases)) {
                for (a, b) in a.programs.iter().zip(&b.programs) {
                    let (whole, rounded) = (describe_ops(a), describe_ops(b));
                    let differs = whole.iter().zip(&rounded).find(|(a, b)| a != b);
                    assert_eq!(differs, None, "@{} of {} over {mesh}", a.name, a.role);
                    assert_eq!(whole.len(), rounded.len());
                    // A stage sends the narrower of a value and its cast.
                    let sends = b.ops.iter().filter(|o| o.opcode == Opcode::Send);
                    let wide = sends.filter(|o| b.type_of(o.operands[0]).dtype == DType::F32).count();
                    assert_eq!(wide, 0, "@{} of {} over {mesh}", b.name, b.role);
                }
            }
        }
    }
}

#[test]
fn narrower_dtypes_need_less_memory() {
    let l = generator(4, 3, 14, "");
    for (mesh, strategy) in MAPPINGS {
        let bytes = |dtype| {
            let b = plan(&l, mesh, strategy, dtype);
            tessera_plan::video::memory_by_role(&b)
        };
        for (half, quarter) in bytes(DtypePolicy::Bf16).iter().zip(bytes(DtypePolicy::Fp8)) {
            assert!(quarter.weights < half.weights && quarter.buffers == half.buffers);
        }
        for (full, half) in bytes(DtypePolicy::F32).iter().zip(bytes(DtypePolicy::Bf16)) {
            let share = |a: tessera_base::Bytes, b: tessera_base::Bytes| b.0 as f64 / a.0 as f64;
            assert!((0.5..0.9).contains(&share(full.weights, half.weights)), "{full:?} {half:?}");
            assert!((0.5..0.9).contains(&share(full.buffers, half.buffers)), "{full:?} {half:?}");
            assert!((0.4..1.0).contains(&share(full.temporaries, half.temporaries)), "{full:?} {half:?}");
            assert_eq!(full.inputs, half.inputs, "inputs of a call stay f32");
        }
    }
}

/// Returns the latents after every phase of a chunk's call, on every rank.
fn latents(l: &LogicalModel, mesh: &str, strategy: Strategy, dtype: DtypePolicy) -> Vec<Tensor> {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
    run::latents(
        l,
        &mapping,
        &["text", "renoise", "denoise.fill0", "clean.fill0", "renoise", "denoise.fill3", "emit"],
    )
}

#[test]
fn sharded_programs_compute_the_same_as_unsharded_ones() {
    let l = generator(5, 2, 14, "");
    for dtype in DtypePolicy::ALL {
        // Quantization depends on the strategy, but on no mesh.
        let [ulysses, megatron] =
            [Strategy::Ulysses, Strategy::Megatron].map(|s| latents(&l, "tp=1", s, dtype).remove(0));
        assert!(ulysses.data().iter().any(|x| x.abs() > 0.1));
        assert_eq!(max_difference(&ulysses, &megatron) == 0.0, dtype != DtypePolicy::Fp8);
        for (mesh, strategy) in MAPPINGS {
            let whole = if strategy == Strategy::Megatron { &megatron } else { &ulysses };
            let cut = latents(&l, mesh, strategy, dtype);
            assert!(!cut.is_empty());
            for rank in &cut {
                assert!(
                    max_difference(whole, rank) < 1e-9,
                    "{mesh} {}: {}",
                    dtype.name(),
                    max_difference(whole, rank)
                );
            }
        }
    }
    // Only casts and scales round here, and they do round.
    let [f32, bf16, fp8] = DtypePolicy::ALL.map(|d| latents(&l, "tp=1", Strategy::Ulysses, d).remove(0));
    let [by_bf16, by_fp8] = [&bf16, &fp8].map(|x| max_difference(&f32, x));
    assert!((1e-6..1e-1).contains(&by_bf16) && (2.0 * by_bf16..0.5).contains(&by_fp8), "{by_bf16} {by_fp8}");
}

/// Returns the suffixes of the names of the weights whose matmuls run in e4m3, over all blocks and
/// phases.
fn e4m3_weights(l: &LogicalModel, strategy: Strategy) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for phase in &l.phases {
        let p = precision::apply_dtype_policy(phase, DtypePolicy::Fp8, strategy, DecoderPrecision::Exact)
            .unwrap();
        let mut quantized = BTreeSet::new();
        for op in &p.ops {
            match op.opcode {
                Opcode::Matmul if p.type_of(op.operands[0]).dtype == DType::E4m3 => {
                    let name = weight_of(&p, op);
                    out.insert(name.split('.').skip(2).collect::<Vec<_>>().join("."));
                    assert_eq!((op.keyed.len(), p.type_of(op.results[0]).dtype), (3, DType::Bf16), "{name}");
                }
                Opcode::Quantize => {
                    assert!(quantized.insert(op.operands[0]), "all readers share one quantization");
                    assert_eq!(p.type_of(op.operands[0]).dtype, DType::Bf16);
                }
                _ => {}
            }
        }
    }
    out
}

#[test]
fn matmuls_of_blocks_are_quantized() {
    let columns = ["self_attn.q", "self_attn.k", "self_attn.v", "cross_attn.q", "ffn.0"];
    let rows = ["self_attn.o", "cross_attn.o", "ffn.2"];
    let named = |of: &[&str]| of.iter().map(|n| format!("{n}.weight")).collect::<BTreeSet<_>>();
    for extra in ["", "[cache]\nmode = \"recompute\"\n"] {
        let l = generator(2, 3, 14, extra);
        assert_eq!(e4m3_weights(&l, Strategy::Ulysses), named(&[&columns[..], &rows].concat()));
        assert_eq!(
            e4m3_weights(&l, Strategy::Megatron),
            named(&columns),
            "no rank has whole rows of the others"
        );
    }
    // Queries, keys and values of a block read one value.
    let l = generator(2, 3, 14, "");
    let denoise = l.phases.iter().find(|p| p.name == "denoise.fill3").unwrap();
    let p =
        precision::apply_dtype_policy(denoise, DtypePolicy::Fp8, Strategy::Ulysses, DecoderPrecision::Exact)
            .unwrap();
    let count = |o| p.ops.iter().filter(|op| op.opcode == o).count();
    assert_eq!((count(Opcode::Quantize), count(Opcode::Cast)), (3 * 6, 2));
}

/// `TESSERA_BLESS=1` rewrites the files; review the difference.
#[test]
fn the_kept_texts_are_what_is_planned() {
    let l = generator(2, 1, 14, "");
    for (dtype, strategy) in [
        (DtypePolicy::Bf16, Strategy::Ulysses),
        (DtypePolicy::Bf16, Strategy::Megatron),
        (DtypePolicy::Fp8, Strategy::Ulysses),
        (DtypePolicy::Fp8, Strategy::Megatron),
    ] {
        let b = plan(&l, "tp=2", strategy, dtype);
        let mut text = format!(
            "// test: check\n// phases chunk: text denoise.fill3 clean.fill3\n// note: The planner emits these programs in {} \
             for tp=2 with the strategy {}.\n",
            dtype.name(),
            strategy.name()
        );
        for phase in b.phases.iter().filter(|p| ["text", "denoise.fill3", "clean.fill3"].contains(&&*p.name))
        {
            phase.programs.iter().for_each(|p| text += &print(p));
        }
        let name = format!("../../filetests/check/planned_{}_{}.tir", dtype.name(), strategy.name());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        if std::env::var_os("TESSERA_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{}", path.display());
    }
}

#[test]
fn a_text_encoder_for_a_device_keeps_the_sum_of_its_layers_in_f32() {
    let config = r#"{"dim":24,"ffn_dim":14,"num_heads":2,"num_layers":2,"in_dim":4,"out_dim":4,"text_len":3,
        "text_dim":5,"freq_dim":4}"#;
    let stream = "[video]\nwidth = 32\nheight = 16\n";
    let mut model = VideoModel::parse(("config.json", config), ("stream.toml", stream)).unwrap();
    let encoder = Umt5Config { layers: 2, d_model: 5, heads: 3, d_kv: 6, d_ff: 7, ..Umt5Config::xxl() };
    model.set_text_encoder("a config", encoder).unwrap();
    let l = support::logical(&model);
    for (dtype, rounded) in [(DtypePolicy::F32, DType::F32), (DtypePolicy::Bf16, DType::Bf16)] {
        let bundle = plan(&l, "tp=1", Strategy::Ulysses, dtype);
        let phase = |name: &str| &bundle.find_phase(name).unwrap().programs[0];
        let (cpu, device) = (phase(TEXT_PHASE), phase(TEXT_DEVICE_PHASE));
        assert!(cpu.values.iter().all(|v| v.ty.dtype != DType::Bf16) && cpu.captured_graph() == Ok(None));
        assert!(device.captured_graph().unwrap().is_some());
        for op in &device.ops {
            let expected = match op.opcode {
                Opcode::Matmul | Opcode::Mul => vec![rounded; 3],
                Opcode::RelativeAttention => vec![rounded, rounded, rounded, DType::F32, rounded],
                Opcode::Embed => vec![DType::F32, rounded, DType::F32],
                Opcode::Add | Opcode::RmsNorm => vec![DType::F32; 3],
                _ => continue,
            };
            assert_eq!(dtypes(device, op), expected, "{} under {}", op.opcode.name(), dtype.name());
        }
    }
}

#[test]
fn a_language_model_chooses_experts_and_ids_in_f32() {
    let config = r#"{"model_type":"qwen3_moe","architectures":["Qwen3MoeForCausalLM"],"hidden_size":16,
        "intermediate_size":24,"num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":4,
        "vocab_size":32,"max_position_embeddings":64,"rms_norm_eps":1e-6,"rope_theta":10000.0,"hidden_act":"silu",
        "num_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":8,"decoder_sparse_step":1,
        "norm_topk_prob":true,"tie_word_embeddings":false}"#;
    let model = DecoderModel::parse("config.json", config).unwrap();
    let cache = PagedCache { page_rows: 4, pages: 8, pages_per_sequence: 4, replicates_heads: false };
    let bucket = TokenBucket { sequences: 2, rows: 1 };
    let phase =
        build_token_phases(&model, cache, &[TokenPhase::from_call(bucket)], TokenOutput::Next).remove(0);
    let apply = precision::apply_dtype_policy;
    let p = apply(&phase, DtypePolicy::Bf16, Strategy::Megatron, DecoderPrecision::Exact).unwrap();
    let (single, half) = (DType::F32, DType::Bf16);
    assert!(p.buffers.iter().all(|b| b.ty.dtype == half), "caches hold bf16");
    let mut checked = BTreeSet::new();
    for op in &p.ops {
        let expected = match op.opcode {
            Opcode::Matmul if weight_of(&p, op).ends_with("mlp.gate.weight") => vec![single; 3],
            Opcode::Matmul => vec![half; 3],
            Opcode::HeadNorm | Opcode::Rotary => vec![half, single, half],
            Opcode::PagedAttention => vec![half; 4],
            Opcode::TopKExperts => vec![single; 2],
            Opcode::ExpertPack => vec![half, single, single, half],
            Opcode::GroupedMatmul => vec![half, half, single, half],
            Opcode::ExpertCombine => vec![half, single, single, single, half],
            Opcode::Sample | Opcode::Add | Opcode::RmsNorm => vec![single; dtypes(&p, op).len()],
            _ => continue,
        };
        assert_eq!(dtypes(&p, op), expected, "{} of {}", op.opcode.name(), p.name);
        checked.insert(op.opcode);
    }
    assert_eq!(checked.len(), 11, "{checked:?}");
    let tables: Vec<_> =
        p.ops.iter().filter(|op| op.opcode == Opcode::Embed).map(|op| dtypes(&p, op)).collect();
    // The second one takes rows of the sum of layers.
    assert_eq!(tables, [vec![single, half, single], vec![single; 3]]);
}

#[test]
fn caches_of_every_kind_of_attention_are_in_bf16() {
    for (family, replicates_heads, prefix) in
        [("llama", false, "kv."), ("qwen2", true, "kv_all."), ("deepseek-v3", false, "latent.")]
    {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/lm")
            .join(family)
            .join("config.json");
        let model = DecoderModel::parse(family, &std::fs::read_to_string(file).unwrap()).unwrap();
        let cache = PagedCache { page_rows: 4, pages: 8, pages_per_sequence: 4, replicates_heads };
        let phase = TokenPhase::from_call(TokenBucket { sequences: 2, rows: 1 });
        let logical = build_token_phases(&model, cache, &[phase], TokenOutput::Next).remove(0);
        let exact = DecoderPrecision::Exact;
        let p =
            precision::apply_dtype_policy(&logical, DtypePolicy::Bf16, Strategy::Megatron, exact).unwrap();
        assert!(!p.buffers.is_empty() && p.buffers.iter().all(|b| b.name.starts_with(prefix)), "{family}");
        assert!(p.buffers.iter().all(|b| b.ty.dtype == DType::Bf16), "{family}");
    }
}

const ARRAYS: &str = "program @p { %x = input : f32[4, 6] %w = weight \"w\" : f32[8, 6] %u = weight \"u\" : f32[5, 8] \
    %r = weight \"r\" : f32[3, 5] %k = weight \"k\" : f32[4, 3] %h = toperator.matmul %x, %w \
    %y = toperator.matmul %h, %u %a = toperator.matmul %x, %x %l = toperator.matmul %y, %r %m = toperator.add %l, %k \
    %e = toperator.top_k_experts %m {top_k = 2} output \"y\", %y output \"a\", %a output \"e\", %e }";

#[test]
fn a_program_of_arrays_multiplies_in_e4m3_and_chooses_experts_in_f32() {
    let p = tessera_ir::parse_all(ARRAYS, "test").unwrap().remove(0);
    let fp8 = precision::apply_dtype_policy_to_arrays(&p, DtypePolicy::Fp8).unwrap();
    let matmuls = fp8.ops.iter().filter(|op| op.opcode == Opcode::Matmul);
    let operands: Vec<DType> = matmuls.map(|op| fp8.type_of(op.operands[1]).dtype).collect();
    assert_eq!(operands, [DType::E4m3, DType::E4m3, DType::E4m3, DType::F32], "{}", print(&fp8));
    let quantized = fp8.ops.iter().filter(|op| op.opcode == Opcode::Quantize).count();
    assert_eq!(quantized, 2, "x once for both of its places, and h\n{}", print(&fp8));
    for policy in [DtypePolicy::F32, DtypePolicy::Bf16] {
        let p = precision::apply_dtype_policy_to_arrays(&p, policy).unwrap();
        assert!(p.ops.iter().all(|op| op.opcode != Opcode::Quantize), "{}", policy.name());
    }
}

#[test]
fn every_value_that_becomes_narrow_draws_by_a_number_of_its_own_and_weights_draw_nothing() {
    // A weight that a router and another matmul read is f32, and is cast for the latter.
    let more = "%t = weight \"t\" : f32[3, 8] %n = toperator.matmul %h, %t %f = toperator.top_k_experts %n {top_k = 1} \
        %z = toperator.matmul %t, %u output \"f\", %f output \"z\", %z }";
    let text = format!("{} {more}", ARRAYS.trim_end_matches('}'));
    let p = tessera_ir::parse_all(&text, "test").unwrap().remove(0);
    for policy in [DtypePolicy::Bf16, DtypePolicy::Fp8] {
        let mut p = precision::apply_dtype_policy_to_arrays(&p, policy).unwrap();
        let nearest = p.clone();
        tessera_plan::round_stochastically(&mut p, 9);
        let draws: Vec<u32> = p
            .ops
            .iter()
            .filter_map(|op| match op.view().unwrap() {
                OpView::Cast(v) => v.stochastic_rounding(),
                OpView::Quantize(v) => v.stochastic_rounding(),
                _ => None,
            })
            .map(|rounding| {
                assert_eq!((rounding.key.seed, rounding.first_row), (9, 0));
                rounding.key.draw
            })
            .collect();
        let expected = if policy == DtypePolicy::Fp8 { 3 } else { 1 };
        assert_eq!(draws, (0..expected).collect::<Vec<u32>>(), "{}", print(&p));
        let defs = p.defining_ops();
        for (op, before) in p.ops.iter().zip(&nearest.ops).filter(|(op, before)| op != before) {
            assert!(matches!(op.opcode, Opcode::Cast | Opcode::Quantize) && op.results == before.results);
            let from = defs[op.operands[0].0 as usize].map(|d| p.ops[d].opcode);
            assert_ne!(from, Some(Opcode::Weight));
        }
    }
}
