//! Attention scattered over heads: the judge seals the module that a planner makes, and it computes what whole
//! attention does.

#![allow(clippy::unwrap_used)]

use tessera_base::random::{DrawKey, normals};
use tessera_ir::{Attr, Builder, Bundle, DType, Opcode, Program, Type, parse_all, print};
use tessera_mesh::{Axis, Mesh};
use tessera_plan::attention::{AttentionShape, QLayout, rs_mm_ag};
use tessera_reference::{Call, Machine, Tensor};
use tessera_verify::{Limits, check_program, seal};

fn shape(tp: u32, heads: u64, kv_heads: u64, qk: u64) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        qk,
        v: 3,
        sequences: 2,
        tokens: 3,
        keys: 5,
        causal: false,
        dtype: DType::F32,
        tp,
    }
}

/// Ranks, heads, heads of keys and values, features: even; pieces of features that differ; copies of shared heads.
const SHAPES: &[(u32, u64, u64, u64)] = &[
    (2, 4, 4, 4),
    (3, 3, 3, 6),
    (3, 6, 6, 4),
    (4, 8, 8, 8),
    (4, 4, 4, 6),
    (2, 4, 2, 4),
    (4, 8, 2, 8),
    (3, 6, 1, 5),
];

fn both(s: &AttentionShape) -> [Bundle; 2] {
    [QLayout::Replicated, QLayout::Sharded].map(|q| rs_mm_ag(s, q).unwrap_or_else(|ds| panic!("{ds:#?}")))
}

fn program(bundle: &Bundle, rank: tessera_mesh::Rank) -> &Program {
    &bundle.phases[0].programs[bundle.role_of(rank).unwrap()]
}

fn normal(extents: [u64; 4], seed: u64) -> Tensor {
    let extents = extents.map(|e| e as usize);
    let mut x = vec![0.0f32; extents.iter().product()];
    normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&extents, x.into_iter().map(f64::from).collect())
}

/// Rows of `x` one head after another in `stacks` of the module, or back.
fn reshaped(x: &Tensor, to: [u64; 4], f: impl Fn([usize; 4]) -> [usize; 4]) -> Tensor {
    let (to, from) = (to.map(|e| e as usize), x.shape().to_vec());
    let index = |mut i: usize, e: &[usize]| {
        let mut out = [0; 4];
        for d in (0..4).rev() {
            (out[d], i) = (i % e[d], i / e[d]);
        }
        out
    };
    Tensor::from_fn(&to, |i| {
        let at = f(index(i, &to));
        x.data()[at.iter().zip(&from).fold(0, |n, (a, e)| n * e + a)]
    })
}

/// Softmax of scores of every query head by itself, all of it on one rank: [heads, sequences, tokens, v].
fn whole(s: &AttentionShape, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let each = |x: &Tensor, rows: u64, columns: u64| {
        let share = (s.heads / s.kv_heads) as usize;
        reshaped(x, [s.heads, s.sequences, rows, columns], |[h, b, r, c]| [h / share, b, r, c])
    };
    let mut b = Builder::logical("whole");
    let ty = |rows, columns| Type::new(s.dtype, [s.heads, s.sequences, rows, columns]);
    let (x, y, z) =
        (b.input("q", ty(s.tokens, s.qk)), b.input("k", ty(s.keys, s.qk)), b.input("v", ty(s.keys, s.v)));
    b.attr("transposed", Attr::Bool(true)).attr("scale", 1.0 / (s.qk as f64).sqrt());
    let scores = b.op(Opcode::Dot, &[x, y]);
    let p = b.op(Opcode::Softmax, &[scores]);
    let o = b.op(Opcode::Dot, &[p, z]);
    b.output("o", o);
    let p = b.finish().unwrap();
    let call = Call::default()
        .input("q", q.clone())
        .input("k", each(k, s.keys, s.qk))
        .input("v", each(v, s.keys, s.v));
    Machine::new(Mesh::default()).run(&[&p], &call).unwrap().remove(0).remove("o").unwrap()
}

/// A program that puts each rank's piece of an input into every buffer of `p`.
fn store(p: &Program) -> Program {
    let mut b = Builder::role("store", &p.role, p.mesh, &["compute"]);
    for buffer in &p.buffers {
        let x = b.input(
            &buffer.name,
            Type::new(buffer.ty.dtype, buffer.ty.layout.global(&buffer.ty.shape, &p.mesh)),
        );
        let tessera_mesh::AxisLayout::Shard(cut) = buffer.ty.layout.on(Axis::Tp) else {
            panic!("a whole buffer")
        };
        let piece = b.attr("axis", "tp").attr("dim", cut.dim as u64).op(Opcode::TakeShard, &[x]);
        let id = b.buffer(&buffer.name, buffer.ty.clone());
        b.write(id, piece);
    }
    b.finish().unwrap()
}

#[test]
fn the_module_is_whole_attention_on_every_rank() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        let s = shape(tp, heads, kv_heads, qk);
        let q = normal([heads, s.sequences, s.tokens, qk], 1);
        let k = normal([kv_heads, s.sequences, s.keys, qk], 2);
        let v = normal([kv_heads, s.sequences, s.keys, s.v], 3);
        let expected = whole(&s, &q, &k, &v);
        let stacks = s.stacks().unwrap();
        let (copies, group, tokens) =
            ((stacks / kv_heads) as usize, (heads / stacks) as usize, s.tokens as usize);
        let rows = group as u64 * s.tokens;
        let folded = reshaped(&q, [stacks, s.sequences, rows, qk], |[n, b, r, c]| {
            [n * group + r / tokens, b, r % tokens, c]
        });
        let copied = |x: &Tensor, c: u64| {
            reshaped(x, [stacks, s.sequences, s.keys, c], |[n, b, r, c]| [n / copies, b, r, c])
        };
        let call = Call::default()
            .input("Q", folded.clone())
            .input("q", folded)
            .input("kv.k", copied(&k, qk))
            .input("kv.v", copied(&v, s.v));
        let mut outputs = Vec::new();
        for bundle in both(&s) {
            let mut m = Machine::new(bundle.mesh);
            let programs: Vec<&Program> = bundle.mesh.iter().map(|r| program(&bundle, r)).collect();
            let stores: Vec<Program> = programs.iter().map(|p| store(p)).collect();
            m.run(&stores.iter().collect::<Vec<_>>(), &call).unwrap();
            let out = m.run(&programs, &call).unwrap();
            for o in &out {
                let o = reshaped(&o["O"], [heads, s.sequences, s.tokens, s.v], |[h, b, t, c]| {
                    [h / group, b, h % group * tokens + t, c]
                });
                assert!(o.distance(&expected) < 1e-12, "{s:?}: {}", o.distance(&expected));
            }
            outputs.push(out);
        }
        assert_eq!(outputs[0], outputs[1], "queries whole or cut: {s:?}");
    }
}

#[test]
fn the_judge_seals_it_and_its_text_reads_back() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        let s = shape(tp, heads, kv_heads, qk);
        for bundle in both(&s) {
            let text: String = bundle.phases[0].programs.iter().map(print).collect();
            let read: Vec<Program> =
                parse_all(&text, "attention.tir").unwrap().into_iter().map(|p| p.without_spans()).collect();
            assert_eq!(read, bundle.phases[0].programs);
            assert!(read.iter().flat_map(check_program).next().is_none());
            assert_eq!(bundle.roles.len(), if qk % u64::from(tp) == 0 { 1 } else { 2 });
            seal(bundle, &Limits::default()).unwrap_or_else(|ds| panic!("{ds:#?}\n{text}"));
        }
    }
}

#[test]
fn scores_are_scattered_and_outputs_gathered_and_nothing_else_travels() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        for bundle in both(&shape(tp, heads, kv_heads, qk)) {
            for p in &bundle.phases[0].programs {
                let ops: Vec<&tessera_ir::Op> = p.ops.iter().collect();
                let at = |opcode| ops.iter().position(|o| o.opcode == opcode).unwrap();
                let collectives: Vec<Opcode> =
                    ops.iter().map(|o| o.opcode).filter(|o| o.is_collective()).collect();
                assert_eq!(collectives, [Opcode::ReduceScatter, Opcode::AllGather]);
                let (scatter, gather) = (at(Opcode::ReduceScatter), at(Opcode::AllGather));
                let between: Vec<Opcode> = ops[scatter + 1..gather].iter().map(|o| o.opcode).collect();
                assert_eq!(between.iter().filter(|o| **o == Opcode::Dot).count(), 1);
                assert!(at(Opcode::Softmax) > scatter && at(Opcode::Softmax) < gather);
                for o in [ops[scatter], ops[gather]] {
                    assert_eq!((o.axis(), o.int("dim")), (Some(Axis::Tp), Some(0)), "over heads");
                    let travels = &p.values[o.operands[0].0 as usize].name;
                    assert!(["S_partial", "O_loc"].contains(&travels.as_str()), "{travels}");
                }
                // What a value is stands in its type.
                let on = |name: &str| {
                    let v = p.values.iter().find(|v| v.name == name).unwrap();
                    v.ty.layout.on(Axis::Tp).to_string()
                };
                assert_eq!(
                    ["S_partial", "S_rs", "P", "V_shard", "O_loc", "O"].map(on),
                    ["partial(sum)", "shard(0)", "shard(0)", "shard(0)", "shard(0)", "replicated"]
                );
            }
        }
    }
}

#[test]
fn another_dim_or_axis_in_one_op_is_refused() {
    let [bundle, _] = both(&AttentionShape { keys: 8, ..shape(4, 4, 4, 8) });
    let text = print(&bundle.phases[0].programs[0]);
    let codes = |edited: &str| -> Vec<&str> {
        assert_ne!(text, edited);
        match parse_all(edited, "edited") {
            Ok(ps) => ps.iter().flat_map(check_program).map(|d| d.code.id).collect(),
            Err(ds) => ds.iter().map(|d| d.code.id).collect(),
        }
    };
    // Over keys, with the types that follow from it: each rank would normalise its own piece.
    let keys = text.replacen("dim = 0, reduction", "dim = 3, reduction", 1);
    let keys = keys.replace("f32[1, 2, 3, 8] {tp: shard(0)}", "f32[4, 2, 3, 2] {tp: shard(3)}");
    assert!(codes(&keys).contains(&"T0213"), "{:?}", codes(&keys));
    for op in ["reduce_scatter %S_partial", "all_gather %O_loc"] {
        let renamed = format!("{op} {{axis = \"ep\"");
        assert!(!codes(&text.replacen(&format!("{op} {{axis = \"tp\""), &renamed, 1)).is_empty());
    }
}
