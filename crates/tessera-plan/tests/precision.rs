//! Programs in bf16 and fp8: what is cast and what is not, the same ops as in f32, the same numbers however they are cut, and the
//! texts kept in filetests/check, which the judge accepts there.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tessera_ir::{Bundle, DType, Kind, Op, Opcode, Program, ValueId, print};
use tessera_plan::{DtypePolicy, Logical, Mapping, Strategy, lower, precision};
use tessera_reference::Tensor;

use crate::run::{farthest, generator};

#[path = "support/run.rs"]
mod run;
mod support;

fn plan(l: &Logical, mesh: &str, strategy: Strategy, dtype: DtypePolicy) -> Bundle {
    let mut mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
    lower(l, &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

const WAYS: [(&str, Strategy); 6] = [
    ("tp=1", Strategy::Ulysses),
    ("tp=2", Strategy::Ulysses),
    ("tp=2", Strategy::Megatron),
    ("pp=2", Strategy::Ulysses),
    ("tp=3,pp=2", Strategy::Ulysses),
    ("tp=3,pp=2", Strategy::Megatron),
];

/// Names of an op's operands, with what they are.
fn dtypes(p: &Program, op: &Op) -> Vec<DType> {
    let keyed = op.keyed.iter().filter(|(k, _)| *k == "bias").map(|(_, v)| v);
    op.operands.iter().chain(keyed).chain(&op.results).map(|v| p.ty(*v).dtype).collect()
}

fn weight_of(p: &Program, op: &Op) -> String {
    let defs = p.definitions();
    defs[op.operands[1].0 as usize].and_then(|d| p.ops[d].name.clone()).unwrap()
}

#[test]
fn products_are_rounded_and_what_must_last_is_not() {
    for extra in ["", "[cache]\nmode = \"recompute\"\n[schedule]\nprediction = \"x0\"\n"] {
        let l = generator(2, 2, 14, extra);
        for phase in &l.phases {
            let p = precision::apply(phase, DtypePolicy::Bf16, Strategy::Ulysses).unwrap();
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
            // One cast for a value and a dtype; none but where an f32 value enters products, or leaves them.
            let casts: Vec<ValueId> =
                p.ops.iter().filter(|o| o.opcode == Opcode::Cast).map(|o| o.operands[0]).collect();
            assert_eq!(casts.len(), casts.iter().collect::<BTreeSet<_>>().len());
            let kind = p.name.split('.').next().unwrap();
            let want = BTreeMap::from([("text", 1), ("denoise", 2), ("clean", 1), ("recompute", 1)]);
            assert_eq!(casts.len(), want.get(kind).copied().unwrap_or(0), "@{}\n{}", p.name, print(&p));
        }
    }
}

/// Op by op without casts and scales, every dtype f32; what reads a cast reads what was cast. Sources stand before what reads them
/// first, casts among those, so they are told by name.
fn plain(p: &Program) -> Vec<String> {
    let defs = p.definitions();
    let mut number: BTreeMap<usize, usize> = BTreeMap::new();
    let mut out = Vec::new();
    let rounds = |op: &Op| matches!(op.opcode, Opcode::Cast | Opcode::Quantize);
    let is_source = |op: &Op| op.opcode.row().kind == Kind::Source && op.opcode != Opcode::CacheRead;
    for (i, op) in p.ops.iter().enumerate() {
        if rounds(op) || is_source(op) {
            continue;
        }
        number.insert(i, out.len());
        let of_f32 = |v: &ValueId| p.ty(*v).display(&p.mesh).replace("bf16", "f32").replace("e4m3", "f32");
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
        let words = (op.opcode.name(), op.issue, &op.name, &op.attrs, op.stream, types, read);
        out.push(format!("{words:?}"));
    }
    out
}

#[test]
fn without_casts_it_is_the_program_in_f32() {
    for extra in ["", "[cache]\nmode = \"recompute\"\n"] {
        let l = generator(5, 3, 14, extra);
        for (mesh, strategy) in WAYS {
            let [f32, bf16, fp8] = DtypePolicy::ALL.map(|d| plan(&l, mesh, strategy, d));
            assert_eq!((&f32.roles, &f32.roles), (&bf16.roles, &fp8.roles));
            for (a, b) in f32.phases.iter().chain(&f32.phases).zip(bf16.phases.iter().chain(&fp8.phases)) {
                for (a, b) in a.programs.iter().zip(&b.programs) {
                    let (whole, rounded) = (plain(a), plain(b));
                    let differs = whole.iter().zip(&rounded).find(|(a, b)| a != b);
                    assert_eq!(differs, None, "@{} of {} over {mesh}", a.name, a.role);
                    assert_eq!(whole.len(), rounded.len());
                    // A stage sends the narrower of a value and its cast.
                    let sends = b.ops.iter().filter(|o| o.opcode == Opcode::Send);
                    let wide = sends.filter(|o| b.ty(o.operands[0]).dtype == DType::F32).count();
                    assert_eq!(wide, 0, "@{} of {} over {mesh}", b.name, b.role);
                }
            }
        }
    }
}

#[test]
fn fewer_bytes_are_kept() {
    let l = generator(4, 3, 14, "");
    for (mesh, strategy) in WAYS {
        let bytes = |dtype| {
            let b = plan(&l, mesh, strategy, dtype);
            tessera_plan::video::bytes_of_roles(&b, dtype, tessera_mesh::Precision::F32)
        };
        for (half, quarter) in bytes(DtypePolicy::Bf16).iter().zip(bytes(DtypePolicy::Fp8)) {
            assert!(quarter.weights < half.weights && quarter.buffers == half.buffers);
        }
        for (full, half) in bytes(DtypePolicy::F32).iter().zip(bytes(DtypePolicy::Bf16)) {
            let share = |a: tessera_base::Bytes, b: tessera_base::Bytes| b.0 as f64 / a.0 as f64;
            assert!((0.5..0.9).contains(&share(full.weights, half.weights)), "{full:?} {half:?}");
            assert!((0.5..0.9).contains(&share(full.buffers, half.buffers)), "{full:?} {half:?}");
            assert!((0.4..1.0).contains(&share(full.temporaries, half.temporaries)), "{full:?} {half:?}");
            assert_eq!(full.inputs, half.inputs, "what a call brings stays f32");
        }
    }
}

/// Latents after every phase of a chunk's call, on every rank.
fn latents(l: &Logical, mesh: &str, strategy: Strategy, dtype: DtypePolicy) -> Vec<Tensor> {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
    run::latents(
        l,
        &mapping,
        &["text", "renoise", "denoise.fill0", "clean.fill0", "renoise", "denoise.fill3", "emit"],
    )
}

#[test]
fn cut_programs_in_bf16_compute_what_the_whole_one_does() {
    let l = generator(5, 2, 14, "");
    for dtype in DtypePolicy::ALL {
        // What is quantized depends on the strategy, on no mesh.
        let [ulysses, megatron] =
            [Strategy::Ulysses, Strategy::Megatron].map(|s| latents(&l, "tp=1", s, dtype).remove(0));
        assert!(ulysses.data().iter().any(|x| x.abs() > 0.1));
        assert_eq!(farthest(&ulysses, &megatron) == 0.0, dtype != DtypePolicy::Fp8);
        for (mesh, strategy) in WAYS {
            let whole = if strategy == Strategy::Megatron { &megatron } else { &ulysses };
            let cut = latents(&l, mesh, strategy, dtype);
            assert!(!cut.is_empty());
            for rank in &cut {
                assert!(farthest(whole, rank) < 1e-9, "{mesh} {}: {}", dtype.name(), farthest(whole, rank));
            }
        }
    }
    // Casts and scales alone round here, and round they do.
    let [f32, bf16, fp8] = DtypePolicy::ALL.map(|d| latents(&l, "tp=1", Strategy::Ulysses, d).remove(0));
    let [by_bf16, by_fp8] = [&bf16, &fp8].map(|x| farthest(&f32, x));
    assert!((1e-6..1e-1).contains(&by_bf16) && (2.0 * by_bf16..0.5).contains(&by_fp8), "{by_bf16} {by_fp8}");
}

/// The last parts of weights' names whose products are in e4m3, over all blocks and phases.
fn in_e4m3(l: &Logical, strategy: Strategy) -> BTreeSet<String> {
    let mut out = BTreeSet::new();
    for phase in &l.phases {
        let p = precision::apply(phase, DtypePolicy::Fp8, strategy).unwrap();
        let mut quantized = BTreeSet::new();
        for op in &p.ops {
            match op.opcode {
                Opcode::Matmul if p.ty(op.operands[0]).dtype == DType::E4m3 => {
                    let name = weight_of(&p, op);
                    out.insert(name.split('.').skip(2).collect::<Vec<_>>().join("."));
                    assert_eq!((op.keyed.len(), p.ty(op.results[0]).dtype), (3, DType::Bf16), "{name}");
                }
                Opcode::Quantize => {
                    assert!(quantized.insert(op.operands[0]), "one for all who read it");
                    assert_eq!(p.ty(op.operands[0]).dtype, DType::Bf16);
                }
                _ => {}
            }
        }
    }
    out
}

#[test]
fn products_of_blocks_are_quantized() {
    let columns = ["self_attn.q", "self_attn.k", "self_attn.v", "cross_attn.q", "ffn.0"];
    let rows = ["self_attn.o", "cross_attn.o", "ffn.2"];
    let named = |of: &[&str]| of.iter().map(|n| format!("{n}.weight")).collect::<BTreeSet<_>>();
    for extra in ["", "[cache]\nmode = \"recompute\"\n"] {
        let l = generator(2, 3, 14, extra);
        assert_eq!(in_e4m3(&l, Strategy::Ulysses), named(&[&columns[..], &rows].concat()));
        assert_eq!(in_e4m3(&l, Strategy::Megatron), named(&columns), "no rank has whole rows of the others");
    }
    // Queries, keys and values of a block read one value.
    let l = generator(2, 3, 14, "");
    let denoise = l.phases.iter().find(|p| p.name == "denoise.fill3").unwrap();
    let p = precision::apply(denoise, DtypePolicy::Fp8, Strategy::Ulysses).unwrap();
    let count = |o| p.ops.iter().filter(|op| op.opcode == o).count();
    assert_eq!((count(Opcode::Quantize), count(Opcode::Cast)), (3 * 6, 2));
}

/// Rewritten by `TESSERA_BLESS=1`; look at the difference.
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
            "// test: check\n// phases chunk: text denoise.fill3 clean.fill3\n// note: as planned in {} for tp=2, {}\n",
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
