//! Tests of the rules across ranks: each with a set of programs that violates the rule and a
//! similar one that does not.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use tessera_base::Diagnostics;
use tessera_ir::{Attr, Builder, DType, Opcode, Phase, Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard};
use tessera_verify::{check_phase, check_program};

/// Verifies one program per rank, each of which is correct by itself.
fn verify_ranks(programs: Vec<Program>) -> Diagnostics {
    for p in &programs {
        assert_clean(&check_program(p));
    }
    let mesh = programs[0].mesh;
    check_phase(&mesh, &roles(&programs), &phase(programs))
}

fn verify_built_ranks(mesh: Mesh, build: impl Fn(usize, &mut Builder)) -> Diagnostics {
    let ranks = mesh.world_size() as usize;
    let program = |r: usize| {
        let mut b = builder(&format!("r{r}"), mesh);
        build(r, &mut b);
        finish_program(b)
    };
    verify_ranks((0..ranks).map(program).collect())
}

fn broadcast(b: &mut Builder, axis: &str, root: i64, n: u64) {
    let x = b.add_input(&format!("x{n}"), f32s(&[n]));
    b.set_attr("axis", axis).set_attr("root", root).add_op(Opcode::Broadcast, &[x]);
}

fn gather(b: &mut Builder, axis: Axis, dim: usize) {
    let x = b.add_weight(&format!("g{axis}{dim}"), f32s(&[4, 4]).with_axis_layout(axis, shard(dim)));
    b.set_attr("axis", axis.name()).set_attr("dim", dim as u64).add_op(Opcode::AllGather, &[x]);
}

fn send(b: &mut Builder, axis: &str, to: i64, n: u64) {
    let x = b.add_input(&format!("x{n}"), f32s(&[n]));
    let t = b.set_attr("axis", axis).set_attr("to", to).add_issue(Opcode::Send, &[x]);
    b.add_wait(t, None);
}

fn recv(b: &mut Builder, axis: &str, from: i64, n: u64) {
    let t = b.set_attr("axis", axis).set_attr("from", from).add_recv(f32s(&[n]));
    b.add_wait(t, Some(f32s(&[n])));
}

#[test]
fn a_clean_set_passes() {
    assert_clean(&verify_ranks((0..4).map(|r| block(&format!("r{r}"), mesh("tp=4"), 5)).collect()));
}

#[test]
fn reverse_broadcasts_are_refused() {
    // First example of the MPI report: two broadcasts whose roots come in opposite order.
    let found = verify_built_ranks(mesh("tp=2"), |r, b| {
        broadcast(b, "tp", r as i64, 4);
        broadcast(b, "tp", 1 - r as i64, 4);
    });
    assert_only(&found, "T0305");
    assert!(
        diagnostic_text(&found).contains("rank 1 differs from rank 0 in the root at position 0"),
        "{}",
        diagnostic_text(&found)
    );
}

#[test]
fn cyclic_pairs_are_a_deadlock() {
    // Second example of the MPI report: three ranks, three pairs, and each rank starts with the
    // pair on its right.
    let ring = |last_receives_first: bool| {
        verify_built_ranks(mesh("tp=3"), |r, b| {
            let (next, before) = ((r as i64 + 1) % 3, (r as i64 + 2) % 3);
            if last_receives_first && r == 2 {
                recv(b, "tp", before, 4);
                send(b, "tp", next, 4);
            } else {
                send(b, "tp", next, 4);
                recv(b, "tp", before, 4);
            }
        })
    };
    let found = ring(false);
    assert_only(&found, "T0311");
    assert_eq!(found[0].labels.len(), 3, "{}", diagnostic_text(&found));
    assert_clean(&ring(true));
}

#[test]
fn t0301_ops_agree() {
    let program = |swap: bool| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            if swap && r == 1 {
                broadcast(b, "tp", 0, 4);
                gather(b, Axis::Tp, 0);
            } else {
                gather(b, Axis::Tp, 0);
                broadcast(b, "tp", 0, 4);
            }
        })
    };
    let found = program(true);
    assert_only(&found, "T0301");
    assert!(
        diagnostic_text(&found).contains("in the op at position 0 of the tp group of ranks 0, 1"),
        "{}",
        diagnostic_text(&found)
    );
    assert_clean(&program(false));
}

#[test]
fn t0302_shapes_and_layouts_agree() {
    let sizes =
        |n: u64| verify_built_ranks(mesh("tp=2"), |r, b| broadcast(b, "tp", 0, if r == 1 { n } else { 4 }));
    assert_only(&sizes(5), "T0302");
    assert_clean(&sizes(4));
    let layout = |split: bool| {
        verify_built_ranks(mesh("tp=2,pp=2"), |r, b| {
            let ty = f32s(&[4, 4]).with_axis_layout(Axis::Tp, shard(0));
            let ty = if split && r == 3 { ty.with_axis_layout(Axis::Pp, shard(1)) } else { ty };
            let x = b.add_weight("g", ty);
            b.set_attr("axis", "tp").set_attr("dim", 0i64).add_op(Opcode::AllGather, &[x]);
        })
    };
    let found = layout(true);
    assert_only(&found, "T0333");
    assert!(diagnostic_text(&found).contains("in the layout"), "{}", diagnostic_text(&found));
    assert_clean(&layout(false));
}

#[test]
fn t0302_uneven_exchanges_agree_on_the_global_extent() {
    // 5 tokens over 2 ranks become 3 heads of 2 over 2 ranks: every peer has a count of its own.
    let exchange = |extent: u64| {
        let mesh = mesh("tp=2");
        let program = |r: u32| {
            let extent = if r == 1 { extent } else { 5 };
            let s = Shard::new(0, extent, 1, 2).unwrap();
            let local = s.global_range(extent / 2, 2, r).1;
            let mut b = builder(&format!("stage0@tp{r}"), mesh);
            let x = b.add_weight("x", f32s(&[local, 6]).with_axis_layout(Axis::Tp, AxisLayout::Shard(s)));
            b.set_attr("axis", "tp").set_attr("concat", 0i64).set_attr("split", 1i64).set_attr("unit", 2i64);
            b.add_op(Opcode::AllToAll, &[x]);
            finish_program(b)
        };
        verify_ranks(vec![program(0), program(1)])
    };
    assert_clean(&exchange(5));
    // Both 7 and 5 rows leave uneven shards; the ranks disagree about the global extent.
    assert_only(&exchange(7), "T0302");
}

#[test]
fn t0303_dtypes_agree() {
    let dtypes = |d: DType| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            let x = b.add_weight("w", Type::new(if r == 1 { d } else { DType::Bf16 }, [4]));
            b.set_attr("axis", "tp").set_attr("root", 0i64).add_op(Opcode::Broadcast, &[x]);
        })
    };
    assert_only(&dtypes(DType::F32), "T0303");
    assert_clean(&dtypes(DType::Bf16));
}

#[test]
fn t0304_reductions_agree() {
    let reductions = |tree: bool| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            let x = b.add_weight("x", f32s(&[4, 4]).with_axis_layout(Axis::Tp, shard(1)));
            let w = b.add_weight("w", f32s(&[8, 4]).with_axis_layout(Axis::Tp, shard(1)));
            if tree && r == 1 {
                b.set_attr("segments", 2i64);
            }
            let p = b.add_op(Opcode::Matmul, &[x, w]);
            let reduction = if tree && r == 1 { "tree" } else { "sum" };
            b.set_attr("axis", "tp").set_attr("reduction", reduction).add_op(Opcode::AllReduce, &[p]);
        })
    };
    assert_only(&reductions(true), "T0304");
    assert_clean(&reductions(false));
}

#[test]
fn t0306_dims_agree() {
    let dims =
        |d: usize| verify_built_ranks(mesh("tp=2"), |r, b| gather(b, Axis::Tp, if r == 1 { d } else { 0 }));
    assert_only(&dims(1), "T0306");
    assert_clean(&dims(0));
}

#[test]
fn t0307_the_first_missing_op_is_named() {
    let missing = |at: Option<usize>| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            for i in 0..4 {
                if r != 1 || Some(i) != at {
                    broadcast(b, "tp", 0, 4 + i as u64);
                }
            }
        })
    };
    assert_clean(&missing(None));
    for at in 0..4 {
        let found = missing(Some(at));
        assert_only(&found, "T0307");
        let want = format!("rank 1 lacks broadcast over tp of f32[{}] at position {at}", 4 + at);
        assert!(diagnostic_text(&found).contains(&want), "{want}\n{}", diagnostic_text(&found));
    }
}

#[test]
fn t0307_t0308_sends_match_receives() {
    let pair = |sizes: &'static [u64]| {
        verify_built_ranks(mesh("pp=2"), |r, b| match r {
            0 => [4, 5].into_iter().for_each(|n| send(b, "pp", 1, n)),
            _ => sizes.iter().for_each(|n| recv(b, "pp", 0, *n)),
        })
    };
    assert_clean(&pair(&[4, 5]));
    assert_only(&pair(&[5, 4]), "T0308");
    assert_only(&pair(&[4]), "T0307");
    assert_only(&pair(&[]), "T0307");
    assert_only(&pair(&[4, 5, 6]), "T0307");
    // A receive without a send, reported from the receiver.
    assert_only(
        &verify_built_ranks(mesh("pp=2"), |r, b| {
            if r == 1 {
                recv(b, "pp", 0, 4)
            }
        }),
        "T0307",
    );
}

#[test]
fn t0309_a_rank_does_not_send_to_itself() {
    let mesh = mesh("pp=2");
    let program = |to: i64, role: &str| {
        let mut b = builder(role, mesh);
        send(&mut b, "pp", to, 4);
        finish_program(b)
    };
    assert_only(&verify_ranks(vec![program(0, "r0"), program(0, "r1")]), "T0309");
}

/// Two crossing groups: tp pairs {0,1} {2,3}, pp pairs {0,2} {1,3}.
fn verify_crossing_groups(order: [bool; 4], streams: bool) -> Diagnostics {
    verify_built_ranks(mesh("tp=2,pp=2"), |r, b| {
        let axes = if order[r] { [Axis::Tp, Axis::Pp] } else { [Axis::Pp, Axis::Tp] };
        let mut tickets = Vec::new();
        for axis in axes {
            let x = b.add_input("x", f32s(&[4]));
            if streams {
                b.set_stream(if axis == Axis::Tp { "comm" } else { "io" });
            }
            b.set_attr("axis", axis.name()).set_attr("root", 0i64);
            tickets.push(b.add_issue(Opcode::Broadcast, &[x]));
        }
        for t in tickets {
            b.add_wait(t, None);
        }
    })
}

#[test]
fn t0311_a_wait_cycle_through_streams_is_a_deadlock() {
    // Ranks 0 and 3 launch tp first, ranks 1 and 2 launch pp first: all of them wait.
    let found = verify_crossing_groups([true, false, false, true], false);
    assert_only(&found, "T0311");
    assert_eq!(found[0].labels.len(), 4, "{}", diagnostic_text(&found));
    assert_clean(&verify_crossing_groups([true; 4], false));
    // If only one rank differs, the others wait briefly and all complete.
    assert_clean(&verify_crossing_groups([true, true, true, false], false));
}

#[test]
fn false_cycles_of_a_role_are_resolved_by_rank() {
    // Ranks 0 and 2 share a program; treated as one rank, their two exchanges with rank 1 would
    // form a false cycle.
    let m = mesh("pp=3");
    let ends = {
        let mut b = builder("ends", m);
        send(&mut b, "pp", 1, 4);
        recv(&mut b, "pp", 1, 4);
        finish_program(b)
    };
    let middle = |late: bool| {
        let mut b = builder("middle", m);
        recv(&mut b, "pp", 0, 4);
        if late {
            send(&mut b, "pp", 2, 4);
            recv(&mut b, "pp", 2, 4);
        } else {
            recv(&mut b, "pp", 2, 4);
            send(&mut b, "pp", 2, 4);
        }
        send(&mut b, "pp", 0, 4);
        finish_program(b)
    };
    let roles = [("ends", vec![Rank(0), Rank(2)]), ("middle", vec![Rank(1)])];
    let roles = roles.map(|(role, ranks)| RoleRanks { role: role.into(), ranks });
    let check = |late| check_phase(&m, &roles, &phase(vec![ends.clone(), middle(late)]));
    assert_clean(&check(false));
    let found = check(true);
    assert_only(&found, "T0311");
    assert!(
        diagnostic_text(&found).contains("ranks 1, 2 wait for each other"),
        "{}",
        diagnostic_text(&found)
    );
}

#[test]
fn a_wait_cycle_among_thousands_of_ranks_is_found() {
    // A checkerboard of 4,096 ranks: white starts with tp, black with pp.
    let m = mesh("tp=64,pp=64");
    let program = |role: &str, axes: [&str; 2]| {
        let mut b = builder(role, m);
        axes.into_iter().for_each(|a| broadcast(&mut b, a, 0, 4));
        finish_program(b)
    };
    let color = |odd: u32| {
        let at = |r: &Rank| m.coord_of(*r).on_axis(Axis::Tp) + m.coord_of(*r).on_axis(Axis::Pp);
        m.iter().filter(|r| at(r) % 2 == odd).collect::<Vec<_>>()
    };
    let roles = [("white", color(0)), ("black", color(1))];
    let roles = roles.map(|(role, ranks)| RoleRanks { role: role.into(), ranks });
    let check = |black| {
        check_phase(&m, &roles, &phase(vec![program("white", ["tp", "pp"]), program("black", black)]))
    };
    assert_clean(&check(["tp", "pp"]));
    let found = check(["pp", "tp"]);
    assert_only(&found, "T0311");
    // The cycle has two ranks of one row and two of one column, or fewer if they share ranks.
    assert!(found[0].labels.len() <= 4, "{}", diagnostic_text(&found));
}

#[test]
fn t0312_streams_do_not_replace_a_launch_order() {
    let found = verify_crossing_groups([true, false, false, true], true);
    assert_only(&found, "T0312");
    assert_eq!(found[0].labels.len(), 4, "{}", diagnostic_text(&found));
    assert_clean(&verify_crossing_groups([true; 4], true));
}

#[test]
fn t0329_roles_cover_the_ranks() {
    let m = mesh("tp=2");
    let p = block("stage0", m, 1);
    let check = |ranks: &[u32]| {
        let roles = [RoleRanks { role: "stage0".into(), ranks: ranks.iter().map(|r| Rank(*r)).collect() }];
        check_phase(&m, &roles, &phase(vec![p.clone()]))
    };
    assert_clean(&check(&[0, 1]));
    for ranks in [&[0][..], &[0, 2], &[1, 0], &[0, 0, 1], &[]] {
        assert!(diagnostic_codes(&check(ranks)).iter().all(|c| *c == "T0329") && !check(ranks).is_empty());
    }
    let roles = [RoleRanks { role: "stage0".into(), ranks: vec![Rank(0), Rank(1)] }];
    assert_only(
        &check_phase(&m, &roles, &Phase { name: "denoise".into(), programs: vec![], slots: vec![] }),
        "T0329",
    );
    assert_only(&check_phase(&mesh("pp=2"), &roles, &phase(vec![p.clone()])), "T0329");
}

#[test]
fn t0331_uneven_shards_match_the_ranks() {
    let m = mesh("tp=2");
    let program = |role: &str, local: u64| {
        let s = Shard::new(0, 5, 1, 2).unwrap();
        let mut b = builder(role, m);
        b.add_weight("x", f32s(&[local, 6]).with_axis_layout(Axis::Tp, AxisLayout::Shard(s)));
        finish_program(b)
    };
    assert_clean(&verify_ranks(vec![program("r@tp0", 3), program("r@tp1", 2)]));
    // The role's name agrees with its shapes, but its rank has another position.
    assert_only(&verify_ranks(vec![program("r@tp1", 2), program("r@tp0", 3)]), "T0331");
    let one = [RoleRanks { role: "r0".into(), ranks: vec![Rank(0), Rank(1)] }];
    assert_only(&check_phase(&m, &one, &phase(vec![program("r0", 3)])), "T0331");
}

#[test]
fn t0332_roles_agree_about_inputs() {
    let read = |n: u64| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            b.add_input("x", f32s(&[if r == 1 { n } else { 4 }]));
        })
    };
    assert_only(&read(5), "T0332");
    assert_clean(&read(4));
}

#[test]
fn a_divergent_rank_is_reported_with_position_and_field() {
    // Eight ranks over two axes; one has a swapped or missing call, another dtype, group or root.
    let m = mesh("tp=4,pp=2");
    let program = |r: usize| {
        let mut b = builder(&format!("r{r}"), m);
        let x: Vec<_> = (0..6u64).map(|i| b.add_weight(&format!("x{i}"), f32s(&[4 + i]))).collect();
        for (i, x) in x.into_iter().enumerate() {
            b.set_attr("axis", if i % 3 == 2 { "pp" } else { "tp" }).set_attr("root", 0i64);
            b.add_op(Opcode::Broadcast, &[x]);
        }
        finish_program(b)
    };
    let set: Vec<Program> = (0..8).map(program).collect();
    assert_clean(&verify_ranks(set.clone()));
    let broadcasts: Vec<usize> = set[0]
        .ops
        .iter()
        .enumerate()
        .filter(|(_, o)| o.opcode == Opcode::Broadcast)
        .map(|(i, _)| i)
        .collect();
    let with = |rank: usize, change: &dyn Fn(&mut Program)| {
        let mut set = set.clone();
        change(&mut set[rank]);
        let m = set[0].mesh;
        check_phase(&m, &roles(&set), &phase(set))
    };
    let assert_text = |found: &Diagnostics, code: &str, words: &[&str]| {
        assert!(diagnostic_codes(found).contains(&code), "{code}: {}", diagnostic_text(found));
        for w in words {
            assert!(diagnostic_text(found).contains(w), "{w}: {}", diagnostic_text(found));
        }
    };
    // Positions of the tp group: ops 0, 1, 3, 4 of the six.
    let permuted = with(2, &|p| {
        // Swap the second and third call over tp.
        let (a, b) = (broadcasts[1], broadcasts[3]);
        let (x, y) = (p.ops[a].operands.clone(), p.ops[b].operands.clone());
        (p.ops[a].operands, p.ops[b].operands) = (y, x);
    });
    assert_text(
        &permuted,
        "T0302",
        &["rank 2 differs from rank 0", "count at position 1 of the tp group of ranks 0, 1, 2, 3"],
    );
    let dtype = with(5, &|p| {
        let v = p.ops[broadcasts[3]].operands[0].0 as usize;
        p.values[v].ty.dtype = DType::Bf16;
    });
    assert_text(
        &dtype,
        "T0303",
        &["rank 5 differs from rank 4", "dtype at position 2 of the tp group of ranks 4, 5, 6, 7"],
    );
    let root = with(5, &|p| drop(p.ops[broadcasts[3]].attrs.insert("root".into(), Attr::Int(3))));
    assert_text(
        &root,
        "T0305",
        &["rank 5 differs from rank 4", "root at position 2 of the tp group of ranks 4, 5, 6, 7"],
    );
    let group = with(6, &|p| drop(p.ops[broadcasts[0]].attrs.insert("axis".into(), "pp".into())));
    assert_text(&group, "T0307", &["rank 6 lacks", "position 0 of the tp group of ranks 4, 5, 6, 7"]);
    let short = with(3, &|p| {
        // Keep the value but drop the call, so that values stay in order.
        let op = &mut p.ops[broadcasts[4]];
        op.opcode = Opcode::Silu;
        op.attrs.clear();
    });
    assert_text(&short, "T0307", &["rank 3 lacks broadcast over tp of f32[8] at position 3"]);
}

#[test]
fn t0337_ranks_outside_the_mesh_have_their_own_roles() {
    let m = mesh("tp=2,outside=1");
    let program = |role: &str| finish_program(builder(role, m));
    let check = |names: [(&str, &[u32]); 2]| {
        let roles = names.map(|(role, ranks)| RoleRanks {
            role: role.into(),
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        });
        check_phase(&m, &roles, &phase(names.map(|(role, _)| program(role)).into()))
    };
    assert_clean(&check([("leader@out0", &[0]), ("r", &[1, 2])]));
    assert_only(&check([("leader", &[0]), ("r", &[1, 2])]), "T0337");
    assert_only(&check([("leader@out0", &[0, 1]), ("r", &[2])]), "T0337");
}

#[test]
fn subgroups_and_the_world_are_distinct_groups() {
    let m = mesh("tp=4,outside=1");
    let run = |subgroup_size: [Option<i64>; 2], root: i64| {
        let programs = (0..5).map(|r: usize| {
            let mut b = builder(&if r == 0 { "leader@out0".into() } else { format!("r{r}@tp{}", r - 1) }, m);
            let x = b.add_input("x", f32s(&[4]));
            b.set_attr("axis", "world")
                .set_attr("root", if r == 3 { root } else { 0 })
                .add_op(Opcode::Broadcast, &[x]);
            if r > 0 {
                b.set_attr("axis", "tp").set_attr("root", 0i64);
                if let Some(w) = subgroup_size[usize::from(r > 2)] {
                    b.set_attr("group_size", w);
                }
                b.add_op(Opcode::Broadcast, &[x]);
            }
            finish_program(b)
        });
        verify_ranks(programs.collect())
    };
    assert_clean(&run([None, None], 0));
    assert_clean(&run([Some(2), Some(2)], 0));
    assert_only(&run([None, None], 1), "T0305");
    // Half of the ranks call over the axis, half over its subgroups.
    assert_only(&run([Some(2), None], 0), "T0307");
}

#[test]
fn t0343_members_of_tp_compute_one_value() {
    let run = |swap: bool, through_pp: bool| {
        verify_built_ranks(mesh("tp=2,pp=2"), |r, b| {
            let (x, y) = (b.add_weight("x", f32s(&[4, 4])), b.add_weight("y", f32s(&[4, 4])));
            let mine = if swap && r == 3 { y } else { x };
            // Stage 0 sends the value that stage 1 uses in its collective.
            let value = match (through_pp, r < 2) {
                (false, _) => mine,
                (true, true) => {
                    let mine = if swap && r == 1 { y } else { x };
                    let t = b.set_attr("axis", "pp").set_attr("to", 1i64).add_issue(Opcode::Send, &[mine]);
                    b.add_wait(t, None);
                    return;
                }
                (true, false) => {
                    let t = b.set_attr("axis", "pp").set_attr("from", 0i64).add_recv(f32s(&[4, 4]));
                    b.add_wait(t, Some(f32s(&[4, 4]))).unwrap()
                }
            };
            let s = b.set_attr("axis", "tp").set_attr("dim", 0i64).add_op(Opcode::TakeShard, &[value]);
            b.set_attr("axis", "tp").set_attr("dim", 0i64).add_op(Opcode::AllGather, &[s]);
        })
    };
    assert_clean(&run(false, false));
    assert_clean(&run(false, true));
    let found = run(true, false);
    assert_only(&found, "T0343");
    assert!(
        diagnostic_text(&found).contains("weight \"x\"") && diagnostic_text(&found).contains("weight \"y\""),
        "{}",
        diagnostic_text(&found)
    );
    // The values differ on another stage and travel in a message.
    assert_only(&run(true, true), "T0343");
}

#[test]
fn t0344_members_agree_on_the_transport() {
    let of = |b: &mut Builder, via: Option<&str>| {
        via.map(|v| b.set_attr("transport", v));
    };
    let group = |vias: [Option<&str>; 2]| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            let x = b.add_input("x", f32s(&[4]));
            of(b, vias[r]);
            b.set_attr("axis", "tp").set_attr("root", 0i64).add_op(Opcode::Broadcast, &[x]);
        })
    };
    let pair = |vias: [Option<&str>; 2]| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            if r == 0 {
                let x = b.add_input("x", f32s(&[4]));
                of(b, vias[0]);
                let t = b.set_attr("axis", "tp").set_attr("to", 1i64).add_issue(Opcode::Send, &[x]);
                b.add_wait(t, None);
            } else {
                of(b, vias[1]);
                recv(b, "tp", 0, 4);
            }
        })
    };
    for alike in [None, Some("nccl"), Some("p2p")] {
        assert_clean(&group([alike; 2]));
        assert_clean(&pair([alike; 2]));
    }
    for differ in [[None, Some("nccl")], [Some("p2p"), None], [Some("p2p"), Some("nccl")]] {
        assert_only(&group(differ), "T0344");
        assert_only(&pair(differ), "T0344");
    }
}

#[test]
fn t0349_members_agree_on_the_algorithm() {
    let group = |tags: [Option<&str>; 2]| {
        verify_built_ranks(mesh("tp=2"), |r, b| {
            let x = partial(b, Axis::Tp);
            tags[r].map(|tag| b.set_attr("algorithm", tag));
            b.set_attr("axis", "tp").set_attr("reduction", "sum").add_op(Opcode::AllReduce, &[x]);
        })
    };
    for alike in [None, Some("tree"), Some("ring")] {
        assert_clean(&group([alike; 2]));
    }
    for differ in [[None, Some("tree")], [Some("ring"), None], [Some("ring"), Some("tree")]] {
        assert_only(&group(differ), "T0349");
    }
}

#[test]
fn t0329_diagnostics_per_role_are_limited() {
    let m = mesh("tp=64");
    let every: Vec<Rank> = m.iter().collect();
    let roles = ["r@tp0", "s"].map(|role| RoleRanks { role: role.into(), ranks: every.clone() });
    let programs = ["r@tp0", "s"].map(|role| finish_program(builder(role, m))).to_vec();
    let found = check_phase(&m, &roles, &phase(programs));
    assert_only(&found, "T0329");
    assert_eq!(found.len(), 8, "{}", diagnostic_text(&found));
}
