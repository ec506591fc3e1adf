//! Each rule about a single program: a program that breaks it, and its neighbour that does not.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use tessera_ir::{Attr, Builder, DType, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, Reduction, Shard, Uneven};
use tessera_verify::check_program;

fn two() -> Mesh {
    mesh("tp=2")
}

fn judge(build: impl FnOnce(&mut Builder)) -> tessera_base::Diagnostics {
    let mut b = builder("stage0", two());
    build(&mut b);
    check_program(&done(b))
}

fn changed(p: &Program, change: impl FnOnce(&mut Program)) -> tessera_base::Diagnostics {
    let mut p = p.clone();
    change(&mut p);
    check_program(&p)
}

#[test]
fn a_clean_block_passes() {
    clean(&check_program(&block("stage0", two(), 3)));
}

#[test]
fn t0309_a_send_needs_a_peer_on_the_axis() {
    let send = |to: i64| {
        let mut b = builder("stage0", two());
        let x = b.input("x", f32s(&[4]));
        let t = b.attr("axis", "tp").attr("to", 0i64).issue(Opcode::Send, &[x]);
        b.wait(t, None);
        changed(&done(b), |p| drop(p.ops[1].attrs.insert("to".into(), to.into())))
    };
    only(&send(2), "T0309");
    only(&send(-1), "T0309");
    clean(&send(1));
}

#[test]
fn t0310_a_group_needs_an_axis_with_ranks_and_a_root_on_it() {
    let broadcast = |axis: &str, root: i64| {
        let mut b = builder("stage0", two());
        let x = b.input("x", f32s(&[4]));
        b.attr("axis", axis).attr("root", 0i64).op(Opcode::Broadcast, &[x]);
        changed(&done(b), |p| drop(p.ops[1].attrs.insert("root".into(), root.into())))
    };
    only(&broadcast("ep", 0), "T0310");
    only(&broadcast("tp", 2), "T0310");
    clean(&broadcast("tp", 1));
}

#[test]
fn t0313_t0314_each_issue_is_waited_for_once() {
    let waits = |n: usize| {
        judge(|b| {
            let p = partial(b, Axis::Tp);
            b.attr("axis", "tp").attr("reduction", "sum");
            let t = b.issue(Opcode::AllReduce, &[p]);
            for _ in 0..n {
                b.wait(t, None);
            }
        })
    };
    only(&waits(0), "T0313");
    clean(&waits(1));
    only(&waits(2), "T0314");
}

#[test]
fn t0315_tokens_are_not_data() {
    let p = block("stage0", two(), 1);
    let at = |o: Opcode| p.ops.iter().position(|x| x.opcode == o).unwrap();
    let (issue, event) = (at(Opcode::AllReduce), at(Opcode::EventRecord));
    let ticket = p.ops[issue].results[0];
    let event = p.ops[event].results[0];
    only(&changed(&p, |p| p.ops[issue].after = vec![ValueId(0)]), "T0315");
    only(&changed(&p, |p| p.ops.last_mut().unwrap().operands = vec![ticket]), "T0315");
    assert!(codes(&changed(&p, |p| p.ops[issue + 1].operands = vec![event])).contains(&"T0315"));
    clean(&changed(&p, |p| p.ops[issue].after = vec![event]));
}

#[test]
fn t0316_values_cross_streams_behind_events() {
    let cross = |event: bool, direct: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[4, 4]));
            let y = b.op(Opcode::Silu, &[x]);
            if event {
                let e = b.op(Opcode::EventRecord, &[]);
                if direct {
                    b.after(e);
                } else {
                    // An earlier op of the reader's stream may carry the order.
                    b.stream("io").after(e).op(Opcode::Silu, &[x]);
                }
            }
            b.stream("io").op(Opcode::Silu, &[y]);
        })
    };
    only(&cross(false, true), "T0316");
    clean(&cross(true, true));
    clean(&cross(true, false));
    // An event recorded before the producer orders nothing.
    only(
        &judge(|b| {
            let x = b.input("x", f32s(&[4, 4]));
            let e = b.op(Opcode::EventRecord, &[]);
            let y = b.op(Opcode::Silu, &[x]);
            b.stream("io").after(e).op(Opcode::Silu, &[y]);
        }),
        "T0316",
    );
}

#[test]
fn t0316_a_wait_orders_its_own_stream_alone() {
    let read_on = |stream: &str| {
        judge(|b| {
            let p = partial(b, Axis::Tp);
            let y = reduce(b, p, Axis::Tp);
            b.stream(stream).op(Opcode::Silu, &[y]);
        })
    };
    clean(&read_on("compute"));
    only(&read_on("io"), "T0316");
}

#[test]
fn t0316_buffers_cross_streams_behind_events() {
    let write_then_read = |ordered: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[4, 8]));
            let cache = b.buffer("kv", f32s(&[8, 8]));
            b.write(cache, x);
            let e = b.op(Opcode::EventRecord, &[]);
            if ordered {
                b.after(e);
            }
            let view = b.stream("io").read(cache);
            b.stream("io").op(Opcode::Silu, &[view]);
        })
    };
    only(&write_then_read(false), "T0316");
    clean(&write_then_read(true));
    // The other way round: a write after a reader on another stream.
    let read_then_write = |ordered: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[4, 8]));
            let cache = b.buffer("kv", f32s(&[8, 8]));
            let view = b.read(cache);
            b.op(Opcode::Silu, &[view]);
            let e = b.op(Opcode::EventRecord, &[]);
            if ordered {
                b.after(e);
            }
            b.stream("io").write(cache, x);
        })
    };
    only(&read_then_write(false), "T0316");
    clean(&read_then_write(true));
}

#[test]
fn t0317_partial_values_do_not_escape() {
    let p = block("stage0", two(), 1);
    let term = p.ops.iter().find(|o| o.opcode == Opcode::Matmul).unwrap().results[0];
    clean(&check_program(&p));
    only(&changed(&p, |p| p.ops.last_mut().unwrap().operands = vec![term]), "T0317");
    let max = |reduction| {
        let p = block("stage0", two(), 1);
        changed(&p, |p| {
            let w = p.ops[0].results[0].0 as usize;
            p.values[w].ty = f32s(&[4, 4]).on(Axis::Tp, AxisLayout::partial(reduction));
        })
    };
    assert!(codes(&max(Reduction::Max)).contains(&"T0317"), "a source is never partial");
    let sent = |reduced: bool| {
        let mut b = builder("stage0", mesh("tp=2,pp=2"));
        let mut v = partial(&mut b, Axis::Tp);
        if reduced {
            v = reduce(&mut b, v, Axis::Tp);
        }
        let t = b.attr("axis", "pp").attr("to", 1i64).issue(Opcode::Send, &[v]);
        b.wait(t, None);
        check_program(&done(b))
    };
    only(&sent(false), "T0317");
    clean(&sent(true));
}

#[test]
fn t0211_rules_refuse_partial_operands() {
    let p = block("stage0", two(), 1);
    let product = p.ops.iter().find(|o| o.opcode == Opcode::Matmul).unwrap().results[0];
    let mut b = builder("stage0", two());
    let v = partial(&mut b, Axis::Tp);
    let y = reduce(&mut b, v, Axis::Tp);
    b.op(Opcode::Silu, &[y]);
    let q = done(b);
    clean(&check_program(&q));
    only(&changed(&q, |q| q.ops.last_mut().unwrap().operands = vec![product]), "T0211");
}

#[test]
fn t0318_no_write_under_a_view() {
    let program = |rows: i64, dynamic: bool, late: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[4, 8]));
            let row = b.call("row", i64s());
            let cache = b.buffer("kv", f32s(&[8, 8]));
            let view = b.attr("row", 8 - rows).attr("rows", rows).read(cache);
            if late {
                b.op(Opcode::Silu, &[view]);
            }
            if dynamic {
                b.key("row", row);
            }
            b.write(cache, x);
            if !late {
                b.op(Opcode::Silu, &[view]);
            }
        })
    };
    only(&program(6, false, false), "T0318");
    clean(&program(6, false, true));
    // Rows 4..8 are not rows 0..4; a row that is known only at the call may be any.
    clean(&program(4, false, false));
    only(&program(4, true, false), "T0318");
}

#[test]
fn t0318_a_view_in_flight_is_in_use_until_the_wait() {
    let program = |early: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[4, 8]));
            let x = b.attr("axis", "tp").attr("dim", 1i64).op(Opcode::TakeShard, &[x]);
            let cache = b.buffer("kv", f32s(&[4, 4]).on(Axis::Tp, shard(1)));
            let view = b.read(cache);
            let t = b.attr("axis", "tp").attr("dim", 1i64).issue(Opcode::AllGather, &[view]);
            if early {
                b.write(cache, x);
            }
            b.wait(t, None);
            if !early {
                b.write(cache, x);
            }
        })
    };
    only(&program(true), "T0318");
    clean(&program(false));
}

#[test]
fn t0319_t0320_values_are_defined_once_before_use() {
    let p = block("stage0", two(), 1);
    let last = p.ops.last().unwrap().operands[0];
    only(&changed(&p, |p| p.ops[2].operands[0] = last), "T0319");
    only(&changed(&p, |p| p.ops[2].operands[0] = ValueId(9999)), "T0319");
    only(&changed(&p, |p| p.ops[1].results = vec![ValueId(0)]).drain(..1).collect(), "T0320");
    clean(&check_program(&p));
}

#[test]
fn t0321_written_types_are_derived_again() {
    let p = block("stage0", two(), 1);
    let y = p.ops.last().unwrap().operands[0].0 as usize;
    let with = |ty: Type| changed(&p, |p| p.values[y].ty = ty);
    only(&with(f32s(&[4, 9])), "T0321");
    only(&with(Type::new(DType::Bf16, [4, 8])), "T0321");
    only(&with(f32s(&[4, 8]).on(Axis::Tp, shard(0))), "T0321");
    // An axis with one rank says nothing about where data lies.
    clean(&with(f32s(&[4, 8]).on(Axis::Ep, shard(0))));
    let input = |ty: Type| {
        judge(|b| {
            b.input("x", ty);
        })
    };
    only(&input(f32s(&[4]).on(Axis::Tp, shard(0))), "T0321");
    clean(&input(f32s(&[4])));
}

#[test]
fn t0322_malformed_programs_are_refused_and_never_panic() {
    fn cut(extent: Option<u64>, ways: Option<u32>) -> AxisLayout {
        let uneven = extent.map(|extent| tessera_mesh::Uneven { extent, unit: 1 });
        AxisLayout::Shard(Shard { dim: 0, uneven, ways })
    }
    let p = block("stage0", two(), 1);
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
        |p| p.values[0].ty = f32s(&[4]).on(Axis::Tp, shard(7)),
        |p| p.streams.clear(),
        |p| p.role = "stage0@tp9".into(),
        |p| p.streams[0] = "compute) {".into(),
        |p| p.streams[0] = "0".into(),
        |p| p.name = "denoise@tp1".into(),
        |p| p.name.clear(),
        |p| p.role = "r\u{e9}le".into(),
        |p| p.dialect = tessera_ir::Dialect::Logical,
        // pp has one rank, and a text says nothing about it.
        |p| p.values[0].ty = f32s(&[4]).on(Axis::Pp, cut(None, Some(2))),
        |p| p.values[0].ty = f32s(&[4]).on(Axis::Pp, cut(Some(7), None)),
        |p| p.values.push(p.values[0].clone()),
    ];
    for (i, change) in broken.into_iter().enumerate() {
        let found = changed(&p, change);
        assert!(codes(&found).contains(&"T0322"), "case {i}: {}", text(&found));
    }
    only(&changed(&p, |p| drop(p.ops[4].attrs.remove("axis"))), "T0215");
}

#[test]
fn t0323_call_scalars_stay_in_their_place() {
    let rope = |from_call: bool| {
        judge(|b| {
            let x = b.input("x", f32s(&[8, 8]));
            let start = if from_call { b.call("start", i64s()) } else { b.input("start", i64s()) };
            b.key("start", start)
                .attr("grid", vec![2i64, 2, 2])
                .attr("head_dim", 8i64)
                .op(Opcode::Rope, &[x]);
        })
    };
    clean(&rope(true));
    only(&rope(false), "T0323");
    let broadcast = |call: bool| {
        judge(|b| {
            let x = if call { b.call("t", f32s(&[4])) } else { b.input("t", f32s(&[4])) };
            b.attr("axis", "tp").attr("root", 0i64).op(Opcode::Broadcast, &[x]);
        })
    };
    only(&broadcast(true), "T0323");
    clean(&broadcast(false));
}

#[test]
fn a_scatter_over_no_dim_is_refused_by_the_rule() {
    let p = {
        let mut b = builder("stage0", two());
        let v = partial(&mut b, Axis::Tp);
        b.attr("axis", "tp").attr("dim", 0i64).attr("reduction", "sum").op(Opcode::ReduceScatter, &[v]);
        done(b)
    };
    clean(&check_program(&p));
    only(&changed(&p, |p| drop(p.ops[3].attrs.remove("dim"))), "T0215");
}

/// Programs that a damaged file could hold: whatever is changed, the judge answers.
#[test]
fn any_damage_is_answered() {
    let mut b = builder("stage0@tp1", mesh("tp=2,pp=2"));
    let v = partial(&mut b, Axis::Tp);
    let y = reduce(&mut b, v, Axis::Tp);
    let start = b.call("start", i64s());
    b.key("start", start).attr("grid", vec![2i64, 2, 1]).attr("head_dim", 4i64).op(Opcode::Rope, &[y]);
    let cache = b.buffer("kv", f32s(&[8, 8]));
    b.write(cache, y);
    let view = b.attr("row", 2i64).attr("rows", 4i64).read(cache);
    b.attr("head_dim", 4i64).op(Opcode::Attention, &[y, view, view]);
    let cut = b.attr("axis", "tp").attr("dim", 1i64).attr("unit", 2i64).op(Opcode::TakeShard, &[y]);
    b.attr("axis", "tp").attr("concat", 1i64).attr("split", 0i64).op(Opcode::AllToAll, &[cut]);
    let p = done(b);
    clean(&check_program(&p));
    let numbers = [i64::MIN, -2, -1, 0, 1, 3, 1 << 20, 1 << 40, i64::MAX];
    let mut answers = 0;
    for op in 0..p.ops.len() {
        for name in p.ops[op].attrs.keys() {
            for n in numbers {
                for a in [Attr::Int(n), Attr::Ints(vec![n; 3]), Attr::Float(n as f64), Attr::Bool(n > 0)] {
                    answers += changed(&p, |p| drop(p.ops[op].attrs.insert(name.clone(), a.clone()))).len();
                }
            }
        }
        for at in 0..p.ops[op].operands.len() {
            for v in (0..p.values.len() as u32 + 2).chain([u32::MAX]) {
                answers += changed(&p, |p| p.ops[op].operands[at] = ValueId(v)).len();
            }
        }
    }
    for v in 0..p.values.len() {
        for n in [0, 1, 3, 1 << 30, 1 << 46, u64::MAX] {
            for shape in [vec![], vec![n], vec![n, n], vec![4, n], vec![n, 8, n]] {
                answers += changed(&p, |p| p.values[v].ty.shape = shape).len();
            }
        }
        let blocks = Shard { dim: 0, uneven: None, ways: Some(u32::MAX) };
        let layouts = [
            shard(0),
            shard(usize::MAX),
            AxisLayout::partial(Reduction::Tree),
            AxisLayout::Shard(blocks),
            AxisLayout::Partial { reduction: Reduction::Sum, ways: Some(0) },
        ];
        let uneven = [(0, 0), (5, 1), (u64::MAX, 1), (1 << 46, 1 << 45)]
            .map(|(extent, unit)| Shard { dim: 0, uneven: Some(Uneven { extent, unit }), ways: None })
            .map(AxisLayout::Shard);
        for l in layouts.into_iter().chain(uneven) {
            answers += changed(&p, |p| p.values[v].ty.layout = p.values[v].ty.layout.with(Axis::Tp, l)).len();
        }
    }
    assert!(answers > 1000, "{answers}");
}

#[test]
fn t0335_a_graph_keeps_its_tickets_and_stands_together() {
    let graphs = |names: [&'static str; 3]| {
        judge(|b| {
            let p = partial(b, Axis::Tp);
            b.attr("axis", "tp").attr("reduction", "sum");
            let set = |b: &mut Builder, n: &'static str| {
                if !n.is_empty() {
                    b.attr("graph", n);
                }
            };
            set(b, names[0]);
            let t = b.issue(Opcode::AllReduce, &[p]);
            set(b, names[1]);
            let y = b.wait(t, None).unwrap();
            set(b, names[2]);
            b.op(Opcode::Silu, &[y]);
        })
    };
    clean(&graphs(["", "", ""]));
    clean(&graphs(["g", "g", ""]));
    clean(&graphs(["g", "g", "h"]));
    only(&graphs(["g", "h", ""]), "T0335");
    only(&graphs(["g", "", "g"]), "T0335");
    only(&graphs(["", "g", "g"]), "T0335");
}

#[test]
fn t0339_a_batch_is_one_launch() {
    let exchange = |numbers: [i64; 2], between: bool| {
        let mut b = builder("stage0", two());
        let x = b.weight("x", f32s(&[4]));
        b.attr("axis", "tp").attr("to", 1i64).attr("batch", numbers[0]);
        let s = b.issue(Opcode::Send, &[x]);
        if between {
            b.op(Opcode::Silu, &[x]);
        }
        b.attr("axis", "tp").attr("from", 1i64).attr("batch", numbers[1]);
        let r = b.recv(f32s(&[4]));
        b.wait(s, None);
        b.wait(r, Some(f32s(&[4])));
        check_program(&done(b))
    };
    clean(&exchange([1, 1], false));
    clean(&exchange([1, 2], true));
    only(&exchange([1, 1], true), "T0339");
    only(&exchange([0, 0], false), "T0339");
}
