//! Tests of the rules for a single program: each with a program that violates the rule and a
//! similar one that does not.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use tessera_ir::{Attr, Builder, DType, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, Reduction, Shard, Uneven};
use tessera_verify::check_program;

fn tp2_mesh() -> Mesh {
    mesh("tp=2")
}

fn verify_built(build: impl FnOnce(&mut Builder)) -> tessera_base::Diagnostics {
    let mut b = builder("stage0", tp2_mesh());
    build(&mut b);
    check_program(&finish_program(b))
}

fn verify_changed(p: &Program, change: impl FnOnce(&mut Program)) -> tessera_base::Diagnostics {
    let mut p = p.clone();
    change(&mut p);
    check_program(&p)
}

#[test]
fn a_clean_block_passes() {
    assert_clean(&check_program(&block("stage0", tp2_mesh(), 3)));
}

#[test]
fn t0309_a_send_needs_a_peer_on_the_axis() {
    let send = |to: i64| {
        let mut b = builder("stage0", tp2_mesh());
        let x = b.add_input("x", f32s(&[4]));
        let t = b.set_attr("axis", "tp").set_attr("to", 0i64).add_issue(Opcode::Send, &[x]);
        b.add_wait(t, None);
        verify_changed(&finish_program(b), |p| drop(p.ops[1].attrs.insert("to".into(), to.into())))
    };
    assert_only(&send(2), "T0309");
    // A negative position is no value of the attribute, on any axis.
    assert_only(&send(-1), "T0215");
    assert_clean(&send(1));
}

#[test]
fn t0310_a_group_needs_an_axis_with_ranks_and_a_root_on_it() {
    let broadcast = |axis: &str, root: i64| {
        let mut b = builder("stage0", tp2_mesh());
        let x = b.add_input("x", f32s(&[4]));
        b.set_attr("axis", axis).set_attr("root", 0i64).add_op(Opcode::Broadcast, &[x]);
        verify_changed(&finish_program(b), |p| drop(p.ops[1].attrs.insert("root".into(), root.into())))
    };
    assert_only(&broadcast("ep", 0), "T0310");
    assert_only(&broadcast("tp", 2), "T0310");
    assert_clean(&broadcast("tp", 1));
}

#[test]
fn t0313_t0314_each_issue_is_waited_for_once() {
    let waits = |n: usize| {
        verify_built(|b| {
            let p = partial(b, Axis::Tp);
            b.set_attr("axis", "tp").set_attr("reduction", "sum");
            let t = b.add_issue(Opcode::AllReduce, &[p]);
            for _ in 0..n {
                b.add_wait(t, None);
            }
        })
    };
    assert_only(&waits(0), "T0313");
    assert_clean(&waits(1));
    assert_only(&waits(2), "T0314");
}

#[test]
fn t0315_tokens_are_not_data() {
    let p = block("stage0", tp2_mesh(), 1);
    let at = |o: Opcode| p.ops.iter().position(|x| x.opcode == o).unwrap();
    let (issue, event) = (at(Opcode::AllReduce), at(Opcode::EventRecord));
    let ticket = p.ops[issue].results[0];
    let event = p.ops[event].results[0];
    assert_only(&verify_changed(&p, |p| p.ops[issue].after = vec![ValueId(0)]), "T0315");
    assert_only(&verify_changed(&p, |p| p.ops.last_mut().unwrap().operands = vec![ticket]), "T0315");
    assert!(
        diagnostic_codes(&verify_changed(&p, |p| p.ops[issue + 1].operands = vec![event])).contains(&"T0315")
    );
    assert_clean(&verify_changed(&p, |p| p.ops[issue].after = vec![event]));
}

#[test]
fn t0316_values_cross_streams_behind_events() {
    let cross = |event: bool, direct: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 4]));
            let y = b.add_op(Opcode::Silu, &[x]);
            if event {
                let e = b.add_op(Opcode::EventRecord, &[]);
                if direct {
                    b.start_after(e);
                } else {
                    // An earlier op of the reader's stream may carry the order.
                    b.set_stream("io").start_after(e).add_op(Opcode::Silu, &[x]);
                }
            }
            b.set_stream("io").add_op(Opcode::Silu, &[y]);
        })
    };
    assert_only(&cross(false, true), "T0316");
    assert_clean(&cross(true, true));
    assert_clean(&cross(true, false));
    // An event recorded before the producer does not order the reader after it.
    assert_only(
        &verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 4]));
            let e = b.add_op(Opcode::EventRecord, &[]);
            let y = b.add_op(Opcode::Silu, &[x]);
            b.set_stream("io").start_after(e).add_op(Opcode::Silu, &[y]);
        }),
        "T0316",
    );
}

#[test]
fn t0316_a_wait_orders_its_own_stream_alone() {
    let read_on = |stream: &str| {
        verify_built(|b| {
            let p = partial(b, Axis::Tp);
            let y = reduce(b, p, Axis::Tp);
            b.set_stream(stream).add_op(Opcode::Silu, &[y]);
        })
    };
    assert_clean(&read_on("compute"));
    assert_only(&read_on("io"), "T0316");
}

#[test]
fn t0316_buffers_cross_streams_behind_events() {
    let write_then_read = |ordered: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 8]));
            let cache = b.declare_buffer("kv", f32s(&[8, 8]));
            b.write_buffer(cache, x);
            let e = b.add_op(Opcode::EventRecord, &[]);
            if ordered {
                b.start_after(e);
            }
            let view = b.set_stream("io").read_buffer(cache);
            b.set_stream("io").add_op(Opcode::Silu, &[view]);
        })
    };
    assert_only(&write_then_read(false), "T0316");
    assert_clean(&write_then_read(true));
    // The converse: a write after a reader on another stream.
    let read_then_write = |ordered: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 8]));
            let cache = b.declare_buffer("kv", f32s(&[8, 8]));
            let view = b.read_buffer(cache);
            b.add_op(Opcode::Silu, &[view]);
            let e = b.add_op(Opcode::EventRecord, &[]);
            if ordered {
                b.start_after(e);
            }
            b.set_stream("io").write_buffer(cache, x);
        })
    };
    assert_only(&read_then_write(false), "T0316");
    assert_clean(&read_then_write(true));
}

#[test]
fn t0317_partial_values_do_not_escape() {
    let p = block("stage0", tp2_mesh(), 1);
    let term = p.ops.iter().find(|o| o.opcode == Opcode::Matmul).unwrap().results[0];
    assert_clean(&check_program(&p));
    assert_only(&verify_changed(&p, |p| p.ops.last_mut().unwrap().operands = vec![term]), "T0317");
    let max = |reduction| {
        let p = block("stage0", tp2_mesh(), 1);
        verify_changed(&p, |p| {
            let w = p.ops[0].results[0].0 as usize;
            p.values[w].ty = f32s(&[4, 4]).with_axis_layout(Axis::Tp, AxisLayout::new_partial(reduction));
        })
    };
    assert!(diagnostic_codes(&max(Reduction::Max)).contains(&"T0317"), "a source is never partial");
    let sent = |reduced: bool| {
        let mut b = builder("stage0", mesh("tp=2,pp=2"));
        let mut v = partial(&mut b, Axis::Tp);
        if reduced {
            v = reduce(&mut b, v, Axis::Tp);
        }
        let t = b.set_attr("axis", "pp").set_attr("to", 1i64).add_issue(Opcode::Send, &[v]);
        b.add_wait(t, None);
        check_program(&finish_program(b))
    };
    assert_only(&sent(false), "T0317");
    assert_clean(&sent(true));
}

#[test]
fn t0211_rules_refuse_partial_operands() {
    let p = block("stage0", tp2_mesh(), 1);
    let matmul = p.ops.iter().find(|o| o.opcode == Opcode::Matmul).unwrap().results[0];
    let mut b = builder("stage0", tp2_mesh());
    let v = partial(&mut b, Axis::Tp);
    let y = reduce(&mut b, v, Axis::Tp);
    b.add_op(Opcode::Silu, &[y]);
    let q = finish_program(b);
    assert_clean(&check_program(&q));
    assert_only(&verify_changed(&q, |q| q.ops.last_mut().unwrap().operands = vec![matmul]), "T0211");
}

#[test]
fn t0318_a_viewed_buffer_is_not_written() {
    let program = |rows: i64, dynamic: bool, late: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 8]));
            let row = b.add_call_scalar("row", i64s());
            let cache = b.declare_buffer("kv", f32s(&[8, 8]));
            let view = b.set_attr("row", 8 - rows).set_attr("rows", rows).read_buffer(cache);
            if late {
                b.add_op(Opcode::Silu, &[view]);
            }
            if dynamic {
                b.add_keyed("row", row);
            }
            b.write_buffer(cache, x);
            if !late {
                b.add_op(Opcode::Silu, &[view]);
            }
        })
    };
    assert_only(&program(6, false, false), "T0318");
    assert_clean(&program(6, false, true));
    // Rows 4..8 do not overlap rows 0..4; a row that is known only at the call may be any row.
    assert_clean(&program(4, false, false));
    assert_only(&program(4, true, false), "T0318");
}

#[test]
fn t0318_a_view_in_flight_is_in_use_until_the_wait() {
    let program = |early: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[4, 8]));
            let x = b.set_attr("axis", "tp").set_attr("dim", 1i64).add_op(Opcode::TakeShard, &[x]);
            let cache = b.declare_buffer("kv", f32s(&[4, 4]).with_axis_layout(Axis::Tp, shard(1)));
            let view = b.read_buffer(cache);
            let t = b.set_attr("axis", "tp").set_attr("dim", 1i64).add_issue(Opcode::AllGather, &[view]);
            if early {
                b.write_buffer(cache, x);
            }
            b.add_wait(t, None);
            if !early {
                b.write_buffer(cache, x);
            }
        })
    };
    assert_only(&program(true), "T0318");
    assert_clean(&program(false));
}

#[test]
fn t0319_t0320_values_are_defined_once_before_use() {
    let p = block("stage0", tp2_mesh(), 1);
    let last = p.ops.last().unwrap().operands[0];
    assert_only(&verify_changed(&p, |p| p.ops[2].operands[0] = last), "T0319");
    assert_only(&verify_changed(&p, |p| p.ops[2].operands[0] = ValueId(9999)), "T0319");
    assert_only(&verify_changed(&p, |p| p.ops[1].results = vec![ValueId(0)]).drain(..1).collect(), "T0320");
    assert_clean(&check_program(&p));
}

#[test]
fn t0321_written_types_are_derived_again() {
    let p = block("stage0", tp2_mesh(), 1);
    let y = p.ops.last().unwrap().operands[0].0 as usize;
    let with = |ty: Type| verify_changed(&p, |p| p.values[y].ty = ty);
    assert_only(&with(f32s(&[4, 9])), "T0321");
    assert_only(&with(Type::new(DType::Bf16, [4, 8])), "T0321");
    assert_only(&with(f32s(&[4, 8]).with_axis_layout(Axis::Tp, shard(0))), "T0321");
    // The layout on an axis of one rank is ignored.
    assert_clean(&with(f32s(&[4, 8]).with_axis_layout(Axis::Ep, shard(0))));
    let call = |ty: Type| {
        verify_built(|b| {
            b.add_call_scalar("x", ty);
        })
    };
    assert_only(&call(f32s(&[4]).with_axis_layout(Axis::Tp, shard(0))), "T0321");
    assert_clean(&call(f32s(&[4])));
    assert_clean(&verify_built(|b| {
        b.add_input("x", f32s(&[4]).with_axis_layout(Axis::Tp, shard(0)));
    }));
}

#[test]
fn t0322_malformed_programs_are_rejected_without_panic() {
    fn cut(extent: Option<u64>, subgroup_size: Option<u32>) -> AxisLayout {
        let uneven = extent.map(|extent| tessera_mesh::Uneven { extent, unit: 1 });
        AxisLayout::Shard(Shard { dim: 0, uneven, subgroup_size })
    }
    let p = block("stage0", tp2_mesh(), 1);
    let broken: Vec<fn(&mut Program)> = vec![
        |p| p.ops[2].operands.clear(),
        |p| p.ops[2].stream.0 = 77,
        |p| p.ops[2].results.clear(),
        |p| p.ops[0].name = None,
        |p| p.ops[2].buffer = Some(tessera_ir::BufferId(0)),
        |p| p.ops[2].issue = true,
        |p| drop(p.ops[2].attrs.insert("colour".into(), Attr::Int(1))),
        |p| p.values[0].ty.shape = vec![1 << 40, 1 << 40],
        |p| p.values[0].ty.shape = vec![0, 4],
        |p| p.values[0].ty = f32s(&[4]).with_axis_layout(Axis::Tp, shard(7)),
        |p| p.streams.clear(),
        |p| p.role = "stage0@tp9".into(),
        |p| p.streams[0] = "compute) {".into(),
        |p| p.streams[0] = "0".into(),
        |p| p.name = "denoise@tp1".into(),
        |p| p.name.clear(),
        |p| p.role = "r\u{e9}le".into(),
        |p| p.dialect = tessera_ir::Dialect::Logical,
        // The pp axis has one rank, and the text form omits its layout.
        |p| p.values[0].ty = f32s(&[4]).with_axis_layout(Axis::Pp, cut(None, Some(2))),
        |p| p.values[0].ty = f32s(&[4]).with_axis_layout(Axis::Pp, cut(Some(7), None)),
        |p| p.values.push(p.values[0].clone()),
    ];
    for (i, change) in broken.into_iter().enumerate() {
        let found = verify_changed(&p, change);
        assert!(diagnostic_codes(&found).contains(&"T0322"), "case {i}: {}", diagnostic_text(&found));
    }
    assert_only(&verify_changed(&p, |p| drop(p.ops[4].attrs.remove("axis"))), "T0215");
}

#[test]
fn t0323_call_scalars_have_permitted_uses_only() {
    let rope = |from_call: bool| {
        verify_built(|b| {
            let x = b.add_input("x", f32s(&[8, 8]));
            let start =
                if from_call { b.add_call_scalar("start", i64s()) } else { b.add_input("start", i64s()) };
            b.add_keyed("start", start)
                .set_attr("grid", vec![2i64, 2, 2])
                .set_attr("head_dim", 8i64)
                .add_op(Opcode::Rope, &[x]);
        })
    };
    assert_clean(&rope(true));
    assert_only(&rope(false), "T0323");
    let broadcast = |call: bool| {
        verify_built(|b| {
            let x = if call { b.add_call_scalar("t", f32s(&[4])) } else { b.add_input("t", f32s(&[4])) };
            b.set_attr("axis", "tp").set_attr("root", 0i64).add_op(Opcode::Broadcast, &[x]);
        })
    };
    assert_only(&broadcast(true), "T0323");
    assert_clean(&broadcast(false));
}

#[test]
fn a_scatter_over_no_dim_is_refused_by_the_rule() {
    let p = {
        let mut b = builder("stage0", tp2_mesh());
        let v = partial(&mut b, Axis::Tp);
        b.set_attr("axis", "tp")
            .set_attr("dim", 0i64)
            .set_attr("reduction", "sum")
            .add_op(Opcode::ReduceScatter, &[v]);
        finish_program(b)
    };
    assert_clean(&check_program(&p));
    assert_only(&verify_changed(&p, |p| drop(p.ops[3].attrs.remove("dim"))), "T0215");
}

/// The verifier returns diagnostics for any damaged program and never panics.
#[test]
fn any_damaged_program_is_checked_without_panic() {
    let mut b = builder("stage0@tp1", mesh("tp=2,pp=2"));
    let v = partial(&mut b, Axis::Tp);
    let y = reduce(&mut b, v, Axis::Tp);
    let start = b.add_call_scalar("start", i64s());
    b.add_keyed("start", start)
        .set_attr("grid", vec![2i64, 2, 1])
        .set_attr("head_dim", 4i64)
        .add_op(Opcode::Rope, &[y]);
    let cache = b.declare_buffer("kv", f32s(&[8, 8]));
    b.write_buffer(cache, y);
    let view = b.set_attr("row", 2i64).set_attr("rows", 4i64).read_buffer(cache);
    b.set_attr("head_dim", 4i64).add_op(Opcode::Attention, &[y, view, view]);
    let cut =
        b.set_attr("axis", "tp").set_attr("dim", 1i64).set_attr("unit", 2i64).add_op(Opcode::TakeShard, &[y]);
    b.set_attr("axis", "tp")
        .set_attr("concat", 1i64)
        .set_attr("split", 0i64)
        .add_op(Opcode::AllToAll, &[cut]);
    let p = finish_program(b);
    assert_clean(&check_program(&p));
    let numbers = [i64::MIN, -2, -1, 0, 1, 3, 1 << 20, 1 << 40, i64::MAX];
    let mut answers = 0;
    for op in 0..p.ops.len() {
        for name in p.ops[op].attrs.keys() {
            for n in numbers {
                for a in [Attr::Int(n), Attr::Ints(vec![n; 3]), Attr::Float(n as f64), Attr::Bool(n > 0)] {
                    answers +=
                        verify_changed(&p, |p| drop(p.ops[op].attrs.insert(name.clone(), a.clone()))).len();
                }
            }
        }
        for at in 0..p.ops[op].operands.len() {
            for v in (0..p.values.len() as u32 + 2).chain([u32::MAX]) {
                answers += verify_changed(&p, |p| p.ops[op].operands[at] = ValueId(v)).len();
            }
        }
    }
    for v in 0..p.values.len() {
        for n in [0, 1, 3, 1 << 30, 1 << 46, u64::MAX] {
            for shape in [vec![], vec![n], vec![n, n], vec![4, n], vec![n, 8, n]] {
                answers += verify_changed(&p, |p| p.values[v].ty.shape = shape).len();
            }
        }
        let blocks = Shard { dim: 0, uneven: None, subgroup_size: Some(u32::MAX) };
        let layouts = [
            shard(0),
            shard(usize::MAX),
            AxisLayout::new_partial(Reduction::Tree),
            AxisLayout::Shard(blocks),
            AxisLayout::Partial { reduction: Reduction::Sum, subgroup_size: Some(0) },
        ];
        let uneven = [(0, 0), (5, 1), (u64::MAX, 1), (1 << 46, 1 << 45)]
            .map(|(extent, unit)| Shard {
                dim: 0,
                uneven: Some(Uneven { extent, unit }),
                subgroup_size: None,
            })
            .map(AxisLayout::Shard);
        for l in layouts.into_iter().chain(uneven) {
            answers +=
                verify_changed(&p, |p| p.values[v].ty.layout = p.values[v].ty.layout.with_axis(Axis::Tp, l))
                    .len();
        }
    }
    assert!(answers > 1000, "{answers}");
}

#[test]
fn t0335_a_graph_is_contiguous_and_keeps_its_tickets() {
    let graphs = |names: [&'static str; 3]| {
        verify_built(|b| {
            let p = partial(b, Axis::Tp);
            b.set_attr("axis", "tp").set_attr("reduction", "sum");
            let set = |b: &mut Builder, n: &'static str| {
                if !n.is_empty() {
                    b.set_attr("graph", n);
                }
            };
            set(b, names[0]);
            let t = b.add_issue(Opcode::AllReduce, &[p]);
            set(b, names[1]);
            let y = b.add_wait(t, None).unwrap();
            set(b, names[2]);
            b.add_op(Opcode::Silu, &[y]);
        })
    };
    assert_clean(&graphs(["", "", ""]));
    assert_clean(&graphs(["g", "g", ""]));
    assert_clean(&graphs(["g", "g", "h"]));
    assert_only(&graphs(["g", "h", ""]), "T0335");
    assert_only(&graphs(["g", "", "g"]), "T0335");
    assert_only(&graphs(["", "g", "g"]), "T0335");
}

#[test]
fn t0339_a_batch_is_contiguous() {
    let exchange = |numbers: [i64; 2], between: bool| {
        let mut b = builder("stage0", tp2_mesh());
        let x = b.add_weight("x", f32s(&[4]));
        b.set_attr("axis", "tp").set_attr("to", 1i64).set_attr("batch", numbers[0]);
        let s = b.add_issue(Opcode::Send, &[x]);
        if between {
            b.add_op(Opcode::Silu, &[x]);
        }
        b.set_attr("axis", "tp").set_attr("from", 1i64).set_attr("batch", numbers[1]);
        let r = b.add_recv(f32s(&[4]));
        b.add_wait(s, None);
        b.add_wait(r, Some(f32s(&[4])));
        check_program(&finish_program(b))
    };
    assert_clean(&exchange([1, 1], false));
    assert_clean(&exchange([1, 2], true));
    assert_only(&exchange([1, 1], true), "T0339");
    assert_only(&exchange([0, 0], false), "T0339");
}

#[test]
fn t0345_tiers_of_experts_are_stated_whole_and_hold_at_most_all() {
    let check = |tiers: &str| {
        let text = format!(
            "program @p role(r) {{ %x = input : f32[6, 4] %l = input : f32[6, 5] \
             %g = weight \"g\" {{{tiers}}} : f32[5, 3, 4] %e = ttile.top_k_experts %l {{top_k = 2}} \
             %s = ttile.expert_slots %e {{capacity = 3}} %c = ttile.expert_counts %e, %s {{groups = 5}} \
             %p = ttile.expert_pack %x, %e, %s {{capacity = 3, groups = 5}} \
             %y = ttile.grouped_matmul %p, %g, %c {{rows = 12}} }}"
        );
        check_program(&tessera_ir::parse(&text, "tiers.tir").unwrap_or_else(|ds| panic!("{ds:#?}")))
    };
    let resident = |count: u32| {
        format!("tier_layer = 0, tier_policy = \"lru\", tier_resident = {count}, tier_window = 1")
    };
    assert_only(&check("tier_layer = 0, tier_resident = 2"), "T0345");
    assert_only(&check(&resident(6)), "T0345");
    assert_clean(&check(&resident(5)));
}
