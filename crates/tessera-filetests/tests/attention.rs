//! Attention with reduce-scattered scores: the verifier seals the module that the planner emits,
//! and the module computes the same as unsharded attention.

#![allow(clippy::unwrap_used)]

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::{Attr, Builder, Bundle, DType, OpView, Opcode, Program, Type, parse_all, print};
use tessera_mesh::{Axis, Mesh};
use tessera_plan::attention::{AttentionShape, QLayout, rs_mm_ag};
use tessera_reference::{CallInputs, Evaluator, Tensor};
use tessera_verify::{DeviceLimits, check_program, seal};

fn attention_shape(tp: u32, heads: u64, kv_heads: u64, qk: u64) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        qk_dim: qk,
        v_dim: 3,
        sequences: 2,
        queries: 3,
        keys: 5,
        causal: false,
        dtype: DType::F32,
        tp,
    }
}

/// Ranks, heads, KV heads, head dim: even shards, uneven feature shards, and replicated KV heads.
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

fn both_q_layouts(s: &AttentionShape) -> [Bundle; 2] {
    [QLayout::Replicated, QLayout::Sharded].map(|q| rs_mm_ag(s, q).unwrap_or_else(|ds| panic!("{ds:#?}")))
}

fn program_of_rank(bundle: &Bundle, rank: tessera_mesh::Rank) -> &Program {
    &bundle.phases[0].programs[bundle.role_index(rank).unwrap()]
}

fn normal_tensor(extents: [u64; 4], seed: u64) -> Tensor {
    let extents = extents.map(|e| e as usize);
    let mut x = vec![0.0f32; extents.iter().product()];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&extents, x.into_iter().map(f64::from).collect())
}

/// Reorders `x` between head-major rows and the head stacks of the module.
fn reorder_rows(x: &Tensor, to: [u64; 4], f: impl Fn([usize; 4]) -> [usize; 4]) -> Tensor {
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

/// Computes unsharded attention on one rank, one query head at a time: [heads, sequences, tokens,
/// v].
fn unsharded_attention(s: &AttentionShape, q: &Tensor, k: &Tensor, v: &Tensor) -> Tensor {
    let each = |x: &Tensor, rows: u64, columns: u64| {
        let share = (s.heads / s.kv_heads) as usize;
        reorder_rows(x, [s.heads, s.sequences, rows, columns], |[h, b, r, c]| [h / share, b, r, c])
    };
    let mut b = Builder::new_logical("whole");
    let ty = |rows, columns| Type::new(s.dtype, [s.heads, s.sequences, rows, columns]);
    let (x, y, z) = (
        b.add_input("q", ty(s.queries, s.qk_dim)),
        b.add_input("k", ty(s.keys, s.qk_dim)),
        b.add_input("v", ty(s.keys, s.v_dim)),
    );
    b.set_attr("transposed", Attr::Bool(true)).set_attr("scale", 1.0 / (s.qk_dim as f64).sqrt());
    let scores = b.add_op(Opcode::Bmm, &[x, y]);
    let p = b.add_op(Opcode::Softmax, &[scores]);
    let o = b.add_op(Opcode::Bmm, &[p, z]);
    b.add_output("o", o);
    let p = b.finish().unwrap();
    let call = CallInputs::default()
        .with_input("q", q.clone())
        .with_input("k", each(k, s.keys, s.qk_dim))
        .with_input("v", each(v, s.keys, s.v_dim));
    Evaluator::new(Mesh::default()).run(&[&p], &call).unwrap().remove(0).remove("o").unwrap()
}

/// Builds a program that stores each rank's shard of an input in every buffer of `p`.
fn store_program(p: &Program) -> Program {
    let mut b = Builder::new_role("store", &p.role, p.mesh, &["compute"]);
    for buffer in &p.buffers {
        let x = b.add_input(
            &buffer.name,
            Type::new(buffer.ty.dtype, buffer.ty.layout.global_shape(&buffer.ty.shape, &p.mesh)),
        );
        let tessera_mesh::AxisLayout::Shard(cut) = buffer.ty.layout.on_axis(Axis::Tp) else {
            panic!("the buffer is not sharded")
        };
        let piece = b.set_attr("axis", "tp").set_attr("dim", cut.dim as u64).add_op(Opcode::TakeShard, &[x]);
        let id = b.declare_buffer(&buffer.name, buffer.ty.clone());
        b.write_buffer(id, piece);
    }
    b.finish().unwrap()
}

#[test]
fn the_module_equals_unsharded_attention_on_every_rank() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        let s = attention_shape(tp, heads, kv_heads, qk);
        let q = normal_tensor([heads, s.sequences, s.queries, qk], 1);
        let k = normal_tensor([kv_heads, s.sequences, s.keys, qk], 2);
        let v = normal_tensor([kv_heads, s.sequences, s.keys, s.v_dim], 3);
        let expected = unsharded_attention(&s, &q, &k, &v);
        let stacks = s.kv_stacks().unwrap();
        let (copies, group, tokens) =
            ((stacks / kv_heads) as usize, (heads / stacks) as usize, s.queries as usize);
        let rows = group as u64 * s.queries;
        let folded = reorder_rows(&q, [stacks, s.sequences, rows, qk], |[n, b, r, c]| {
            [n * group + r / tokens, b, r % tokens, c]
        });
        let copied = |x: &Tensor, c: u64| {
            reorder_rows(x, [stacks, s.sequences, s.keys, c], |[n, b, r, c]| [n / copies, b, r, c])
        };
        let call = CallInputs::default()
            .with_input("Q", folded.clone())
            .with_input("q", folded)
            .with_input("kv.k", copied(&k, qk))
            .with_input("kv.v", copied(&v, s.v_dim));
        let mut outputs = Vec::new();
        for bundle in both_q_layouts(&s) {
            let mut m = Evaluator::new(bundle.mesh);
            let programs: Vec<&Program> = bundle.mesh.iter().map(|r| program_of_rank(&bundle, r)).collect();
            let stores: Vec<Program> = programs.iter().map(|p| store_program(p)).collect();
            m.run(&stores.iter().collect::<Vec<_>>(), &call).unwrap();
            let out = m.run(&programs, &call).unwrap();
            for o in &out {
                let o = reorder_rows(&o["O"], [heads, s.sequences, s.queries, s.v_dim], |[h, b, t, c]| {
                    [h / group, b, h % group * tokens + t, c]
                });
                assert!(o.distance(&expected) < 1e-12, "{s:?}: {}", o.distance(&expected));
            }
            outputs.push(out);
        }
        assert_eq!(outputs[0], outputs[1], "replicated and sharded queries differ: {s:?}");
    }
}

#[test]
fn the_verifier_seals_it_and_its_text_parses_back() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        let s = attention_shape(tp, heads, kv_heads, qk);
        for bundle in both_q_layouts(&s) {
            let text: String = bundle.phases[0].programs.iter().map(print).collect();
            let read: Vec<Program> =
                parse_all(&text, "attention.tir").unwrap().into_iter().map(|p| p.without_spans()).collect();
            assert_eq!(read, bundle.phases[0].programs);
            assert!(read.iter().flat_map(check_program).next().is_none());
            assert_eq!(bundle.roles.len(), if qk % u64::from(tp) == 0 { 1 } else { 2 });
            seal(bundle, &DeviceLimits::default()).unwrap_or_else(|ds| panic!("{ds:#?}\n{text}"));
        }
    }
}

#[test]
fn only_a_scatter_of_scores_and_a_gather_of_outputs_communicate() {
    for (tp, heads, kv_heads, qk) in SHAPES.iter().copied() {
        for bundle in both_q_layouts(&attention_shape(tp, heads, kv_heads, qk)) {
            for p in &bundle.phases[0].programs {
                let ops: Vec<&tessera_ir::Op> = p.ops.iter().collect();
                let at = |opcode| ops.iter().position(|o| o.opcode == opcode).unwrap();
                let collectives: Vec<Opcode> =
                    ops.iter().map(|o| o.opcode).filter(|o| o.is_collective()).collect();
                assert_eq!(collectives, [Opcode::ReduceScatter, Opcode::AllGather]);
                let (scatter, gather) = (at(Opcode::ReduceScatter), at(Opcode::AllGather));
                let between: Vec<Opcode> = ops[scatter + 1..gather].iter().map(|o| o.opcode).collect();
                assert_eq!(between.iter().filter(|o| **o == Opcode::Bmm).count(), 1);
                assert!(at(Opcode::Softmax) > scatter && at(Opcode::Softmax) < gather);
                for o in [ops[scatter], ops[gather]] {
                    let dim = match o.view().unwrap() {
                        OpView::ReduceScatter(v) => v.dim,
                        OpView::AllGather(v) => v.dim,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!((o.mesh_axis(), dim), (Some(Axis::Tp), 0), "over heads");
                    let travels = &p.values[o.operands[0].0 as usize].name;
                    assert!(["S_partial", "O_loc"].contains(&travels.as_str()), "{travels}");
                }
                // The layout is part of a value's type.
                let on = |name: &str| {
                    let v = p.values.iter().find(|v| v.name == name).unwrap();
                    v.ty.layout.on_axis(Axis::Tp).to_string()
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
fn another_dim_or_axis_in_one_op_is_rejected() {
    let [bundle, _] = both_q_layouts(&AttentionShape { keys: 8, ..attention_shape(4, 4, 4, 8) });
    let text = print(&bundle.phases[0].programs[0]);
    let codes = |edited: &str| -> Vec<&str> {
        assert_ne!(text, edited);
        match parse_all(edited, "edited") {
            Ok(ps) => ps.iter().flat_map(check_program).map(|d| d.code.id).collect(),
            Err(ds) => ds.iter().map(|d| d.code.id).collect(),
        }
    };
    // Scattered over keys, with matching types: each rank would normalise only its own shard.
    let keys = text.replacen("dim = 0, reduction", "dim = 3, reduction", 1);
    let keys = keys.replace("f32[1, 2, 3, 8] {tp: shard(0)}", "f32[4, 2, 3, 2] {tp: shard(3)}");
    assert!(codes(&keys).contains(&"T0213"), "{:?}", codes(&keys));
    for op in ["reduce_scatter %S_partial", "all_gather %O_loc"] {
        let renamed = format!("{op} {{axis = \"ep\"");
        assert!(!codes(&text.replacen(&format!("{op} {{axis = \"tp\""), &renamed, 1)).is_empty());
    }
}
