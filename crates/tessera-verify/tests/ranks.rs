//! Each rule about programs of several ranks: a set that breaks it, and its neighbour that does not.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use tessera_base::Diagnostics;
use tessera_ir::{Attr, Builder, DType, Opcode, Phase, Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard};
use tessera_verify::{check_phase, check_program};

/// Judges one program per rank, each right by itself.
fn judge(programs: Vec<Program>) -> Diagnostics {
    for p in &programs {
        clean(&check_program(p));
    }
    let mesh = programs[0].mesh;
    check_phase(&mesh, &roles(&programs), &phase(programs))
}

fn each(mesh: Mesh, build: impl Fn(usize, &mut Builder)) -> Diagnostics {
    let ranks = mesh.ranks() as usize;
    let program = |r: usize| {
        let mut b = builder(&format!("r{r}"), mesh);
        build(r, &mut b);
        done(b)
    };
    judge((0..ranks).map(program).collect())
}

fn broadcast(b: &mut Builder, axis: &str, root: i64, n: u64) {
    let x = b.input(&format!("x{n}"), f32s(&[n]));
    b.attr("axis", axis).attr("root", root).op(Opcode::Broadcast, &[x]);
}

fn gather(b: &mut Builder, axis: Axis, dim: usize) {
    let x = b.weight(&format!("g{axis}{dim}"), f32s(&[4, 4]).on(axis, shard(dim)));
    b.attr("axis", axis.name()).attr("dim", dim as u64).op(Opcode::AllGather, &[x]);
}

fn send(b: &mut Builder, axis: &str, to: i64, n: u64) {
    let x = b.input(&format!("x{n}"), f32s(&[n]));
    let t = b.attr("axis", axis).attr("to", to).issue(Opcode::Send, &[x]);
    b.wait(t, None);
}

fn recv(b: &mut Builder, axis: &str, from: i64, n: u64) {
    let t = b.attr("axis", axis).attr("from", from).recv(f32s(&[n]));
    b.wait(t, Some(f32s(&[n])));
}

#[test]
fn a_clean_set_passes() {
    clean(&judge((0..4).map(|r| block(&format!("r{r}"), mesh("tp=4"), 5)).collect()));
}

#[test]
fn reverse_broadcasts_are_refused() {
    // The first classic of the MPI report: two broadcasts whose roots come in opposite order.
    let found = each(mesh("tp=2"), |r, b| {
        broadcast(b, "tp", r as i64, 4);
        broadcast(b, "tp", 1 - r as i64, 4);
    });
    only(&found, "T0305");
    assert!(
        text(&found).contains("rank 1 departs from rank 0 in the root at position 0"),
        "{}",
        text(&found)
    );
}

#[test]
fn cyclic_pairs_are_a_deadlock() {
    // The second classic: three ranks, three pairs, each rank starting with the pair on its right.
    let ring = |last_receives_first: bool| {
        each(mesh("tp=3"), |r, b| {
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
    only(&found, "T0311");
    assert_eq!(found[0].places.len(), 3, "{}", text(&found));
    clean(&ring(true));
}

#[test]
fn t0301_ops_agree() {
    let program = |swap: bool| {
        each(mesh("tp=2"), |r, b| {
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
    only(&found, "T0301");
    assert!(
        text(&found).contains("in the op at position 0 of the tp group of ranks 0, 1"),
        "{}",
        text(&found)
    );
    clean(&program(false));
}

#[test]
fn t0302_shapes_and_layouts_agree() {
    let sizes = |n: u64| each(mesh("tp=2"), |r, b| broadcast(b, "tp", 0, if r == 1 { n } else { 4 }));
    only(&sizes(5), "T0302");
    clean(&sizes(4));
    let layout = |split: bool| {
        each(mesh("tp=2,pp=2"), |r, b| {
            let ty = f32s(&[4, 4]).on(Axis::Tp, shard(0));
            let ty = if split && r == 3 { ty.on(Axis::Pp, shard(1)) } else { ty };
            let x = b.weight("g", ty);
            b.attr("axis", "tp").attr("dim", 0i64).op(Opcode::AllGather, &[x]);
        })
    };
    let found = layout(true);
    only(&found, "T0333");
    assert!(text(&found).contains("in the layout"), "{}", text(&found));
    clean(&layout(false));
}

#[test]
fn t0302_uneven_exchanges_agree_on_the_whole() {
    // 5 tokens over 2 ranks become 3 heads of 2 over 2 ranks: every peer has its own count.
    let exchange = |extent: u64| {
        let mesh = mesh("tp=2");
        let program = |r: u32| {
            let extent = if r == 1 { extent } else { 5 };
            let s = Shard::of(0, extent, 1, 2).unwrap();
            let local = s.range(extent / 2, 2, r).1;
            let mut b = builder(&format!("stage0@tp{r}"), mesh);
            let x = b.weight("x", f32s(&[local, 6]).on(Axis::Tp, AxisLayout::Shard(s)));
            b.attr("axis", "tp").attr("concat", 0i64).attr("split", 1i64).attr("unit", 2i64);
            b.op(Opcode::AllToAll, &[x]);
            done(b)
        };
        judge(vec![program(0), program(1)])
    };
    clean(&exchange(5));
    // Both 7 and 5 rows leave uneven pieces; the ranks differ about the whole.
    only(&exchange(7), "T0302");
}

#[test]
fn t0303_dtypes_agree() {
    let dtypes = |d: DType| {
        each(mesh("tp=2"), |r, b| {
            let x = b.weight("w", Type::new(if r == 1 { d } else { DType::Bf16 }, [4]));
            b.attr("axis", "tp").attr("root", 0i64).op(Opcode::Broadcast, &[x]);
        })
    };
    only(&dtypes(DType::F32), "T0303");
    clean(&dtypes(DType::Bf16));
}

#[test]
fn t0304_reductions_agree() {
    let reductions = |tree: bool| {
        each(mesh("tp=2"), |r, b| {
            let x = b.weight("x", f32s(&[4, 4]).on(Axis::Tp, shard(1)));
            let w = b.weight("w", f32s(&[8, 4]).on(Axis::Tp, shard(1)));
            if tree && r == 1 {
                b.attr("segments", 2i64);
            }
            let p = b.op(Opcode::Matmul, &[x, w]);
            let reduction = if tree && r == 1 { "tree" } else { "sum" };
            b.attr("axis", "tp").attr("reduction", reduction).op(Opcode::AllReduce, &[p]);
        })
    };
    only(&reductions(true), "T0304");
    clean(&reductions(false));
}

#[test]
fn t0306_dims_agree() {
    let dims = |d: usize| each(mesh("tp=2"), |r, b| gather(b, Axis::Tp, if r == 1 { d } else { 0 }));
    only(&dims(1), "T0306");
    clean(&dims(0));
}

#[test]
fn t0307_the_first_missing_op_is_named() {
    let missing = |at: Option<usize>| {
        each(mesh("tp=2"), |r, b| {
            for i in 0..4 {
                if r != 1 || Some(i) != at {
                    broadcast(b, "tp", 0, 4 + i as u64);
                }
            }
        })
    };
    clean(&missing(None));
    for at in 0..4 {
        let found = missing(Some(at));
        only(&found, "T0307");
        let want = format!("rank 1 lacks broadcast over tp of f32[{}] at position {at}", 4 + at);
        assert!(text(&found).contains(&want), "{want}\n{}", text(&found));
    }
}

#[test]
fn t0307_t0308_sends_meet_receives() {
    let pair = |sizes: &'static [u64]| {
        each(mesh("pp=2"), |r, b| match r {
            0 => [4, 5].into_iter().for_each(|n| send(b, "pp", 1, n)),
            _ => sizes.iter().for_each(|n| recv(b, "pp", 0, *n)),
        })
    };
    clean(&pair(&[4, 5]));
    only(&pair(&[5, 4]), "T0308");
    only(&pair(&[4]), "T0307");
    only(&pair(&[]), "T0307");
    only(&pair(&[4, 5, 6]), "T0307");
    // A receive that nobody sends to, seen from the receiver.
    only(
        &each(mesh("pp=2"), |r, b| {
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
        done(b)
    };
    only(&judge(vec![program(0, "r0"), program(0, "r1")]), "T0309");
}

/// Two groups that cross: tp pairs {0,1} {2,3}, pp pairs {0,2} {1,3}.
fn crossing(order: [bool; 4], streams: bool) -> Diagnostics {
    each(mesh("tp=2,pp=2"), |r, b| {
        let axes = if order[r] { [Axis::Tp, Axis::Pp] } else { [Axis::Pp, Axis::Tp] };
        let mut tickets = Vec::new();
        for axis in axes {
            let x = b.input("x", f32s(&[4]));
            if streams {
                b.stream(if axis == Axis::Tp { "comm" } else { "io" });
            }
            b.attr("axis", axis.name()).attr("root", 0i64);
            tickets.push(b.issue(Opcode::Broadcast, &[x]));
        }
        for t in tickets {
            b.wait(t, None);
        }
    })
}

#[test]
fn t0311_a_circle_through_streams_is_a_deadlock() {
    // 0 and 3 take tp first, 1 and 2 take pp first: everyone waits.
    let found = crossing([true, false, false, true], false);
    only(&found, "T0311");
    assert_eq!(found[0].places.len(), 4, "{}", text(&found));
    clean(&crossing([true; 4], false));
    // One contrary rank waits a little; nobody waits for ever.
    clean(&crossing([true, true, true, false], false));
}

#[test]
fn ranks_of_one_role_are_told_apart_before_a_refusal() {
    // Ranks 0 and 2 share a program; seen as one, their two talks with rank 1 would close a circle.
    let m = mesh("pp=3");
    let ends = {
        let mut b = builder("ends", m);
        send(&mut b, "pp", 1, 4);
        recv(&mut b, "pp", 1, 4);
        done(b)
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
        done(b)
    };
    let roles = [("ends", vec![Rank(0), Rank(2)]), ("middle", vec![Rank(1)])];
    let roles = roles.map(|(role, ranks)| RoleRanks { role: role.into(), ranks });
    let check = |late| check_phase(&m, &roles, &phase(vec![ends.clone(), middle(late)]));
    clean(&check(false));
    let found = check(true);
    only(&found, "T0311");
    assert!(text(&found).contains("ranks 1, 2 wait for each other"), "{}", text(&found));
}

#[test]
fn a_circle_among_thousands_of_ranks_is_found() {
    // A checkerboard of 4,096 ranks: white starts with tp, black with pp.
    let m = mesh("tp=64,pp=64");
    let program = |role: &str, axes: [&str; 2]| {
        let mut b = builder(role, m);
        axes.into_iter().for_each(|a| broadcast(&mut b, a, 0, 4));
        done(b)
    };
    let color = |odd: u32| {
        let at = |r: &Rank| m.coord_of(*r).on(Axis::Tp) + m.coord_of(*r).on(Axis::Pp);
        m.iter().filter(|r| at(r) % 2 == odd).collect::<Vec<_>>()
    };
    let roles = [("white", color(0)), ("black", color(1))];
    let roles = roles.map(|(role, ranks)| RoleRanks { role: role.into(), ranks });
    let check = |black| {
        check_phase(&m, &roles, &phase(vec![program("white", ["tp", "pp"]), program("black", black)]))
    };
    clean(&check(["tp", "pp"]));
    let found = check(["pp", "tp"]);
    only(&found, "T0311");
    // Two ranks of one row and two of one column, or fewer where a row and a column share them.
    assert!(found[0].places.len() <= 4, "{}", text(&found));
}

#[test]
fn t0312_streams_do_not_replace_a_launch_order() {
    let found = crossing([true, false, false, true], true);
    only(&found, "T0312");
    assert_eq!(found[0].places.len(), 4, "{}", text(&found));
    clean(&crossing([true; 4], true));
}

#[test]
fn t0329_roles_cover_the_ranks() {
    let m = mesh("tp=2");
    let p = block("stage0", m, 1);
    let check = |ranks: &[u32]| {
        let roles = [RoleRanks { role: "stage0".into(), ranks: ranks.iter().map(|r| Rank(*r)).collect() }];
        check_phase(&m, &roles, &phase(vec![p.clone()]))
    };
    clean(&check(&[0, 1]));
    for ranks in [&[0][..], &[0, 2], &[1, 0], &[0, 0, 1], &[]] {
        assert!(codes(&check(ranks)).iter().all(|c| *c == "T0329") && !check(ranks).is_empty());
    }
    let roles = [RoleRanks { role: "stage0".into(), ranks: vec![Rank(0), Rank(1)] }];
    only(
        &check_phase(&m, &roles, &Phase { name: "denoise".into(), programs: vec![], memory: vec![] }),
        "T0329",
    );
    only(&check_phase(&mesh("pp=2"), &roles, &phase(vec![p.clone()])), "T0329");
}

#[test]
fn t0331_uneven_pieces_are_the_ranks() {
    let m = mesh("tp=2");
    let program = |role: &str, local: u64| {
        let s = Shard::of(0, 5, 1, 2).unwrap();
        let mut b = builder(role, m);
        b.weight("x", f32s(&[local, 6]).on(Axis::Tp, AxisLayout::Shard(s)));
        done(b)
    };
    clean(&judge(vec![program("r@tp0", 3), program("r@tp1", 2)]));
    // The role's name agrees with its shapes, and its rank stands elsewhere.
    only(&judge(vec![program("r@tp1", 2), program("r@tp0", 3)]), "T0331");
    let one = [RoleRanks { role: "r0".into(), ranks: vec![Rank(0), Rank(1)] }];
    only(&check_phase(&m, &one, &phase(vec![program("r0", 3)])), "T0331");
}

#[test]
fn t0332_roles_agree_about_inputs() {
    let read = |n: u64| {
        each(mesh("tp=2"), |r, b| {
            b.input("x", f32s(&[if r == 1 { n } else { 4 }]));
        })
    };
    only(&read(5), "T0332");
    clean(&read(4));
}

#[test]
fn a_rank_that_departs_is_named_with_its_place_and_field() {
    // Eight ranks over two axes; one is permuted, short, of another dtype, group or reduction.
    let m = mesh("tp=4,pp=2");
    let program = |r: usize| {
        let mut b = builder(&format!("r{r}"), m);
        let x: Vec<_> = (0..6u64).map(|i| b.weight(&format!("x{i}"), f32s(&[4 + i]))).collect();
        for (i, x) in x.into_iter().enumerate() {
            b.attr("axis", if i % 3 == 2 { "pp" } else { "tp" }).attr("root", 0i64);
            b.op(Opcode::Broadcast, &[x]);
        }
        done(b)
    };
    let set: Vec<Program> = (0..8).map(program).collect();
    clean(&judge(set.clone()));
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
    let says = |found: &Diagnostics, code: &str, words: &[&str]| {
        assert!(codes(found).contains(&code), "{code}: {}", text(found));
        for w in words {
            assert!(text(found).contains(w), "{w}: {}", text(found));
        }
    };
    // Positions of the tp group: ops 0, 1, 3, 4 of the six.
    let permuted = with(2, &|p| {
        // The second and third call over tp change places.
        let (a, b) = (broadcasts[1], broadcasts[3]);
        let (x, y) = (p.ops[a].operands.clone(), p.ops[b].operands.clone());
        (p.ops[a].operands, p.ops[b].operands) = (y, x);
    });
    says(
        &permuted,
        "T0302",
        &["rank 2 departs from rank 0", "count at position 1 of the tp group of ranks 0, 1, 2, 3"],
    );
    let dtype = with(5, &|p| {
        let v = p.ops[broadcasts[3]].operands[0].0 as usize;
        p.values[v].ty.dtype = DType::Bf16;
    });
    says(
        &dtype,
        "T0303",
        &["rank 5 departs from rank 4", "dtype at position 2 of the tp group of ranks 4, 5, 6, 7"],
    );
    let root = with(5, &|p| drop(p.ops[broadcasts[3]].attrs.insert("root".into(), Attr::Int(3))));
    says(
        &root,
        "T0305",
        &["rank 5 departs from rank 4", "root at position 2 of the tp group of ranks 4, 5, 6, 7"],
    );
    let group = with(6, &|p| drop(p.ops[broadcasts[0]].attrs.insert("axis".into(), "pp".into())));
    says(&group, "T0307", &["rank 6 lacks", "position 0 of the tp group of ranks 4, 5, 6, 7"]);
    let short = with(3, &|p| {
        // Keep the value, lose the call: the values stay in order.
        let op = &mut p.ops[broadcasts[4]];
        op.opcode = Opcode::Silu;
        op.attrs.clear();
    });
    says(&short, "T0307", &["rank 3 lacks broadcast over tp of f32[8] at position 3"]);
}

#[test]
fn t0337_ranks_outside_the_mesh_play_their_own_roles() {
    let m = mesh("tp=2,outside=1");
    let program = |role: &str| done(builder(role, m));
    let check = |names: [(&str, &[u32]); 2]| {
        let roles = names.map(|(role, ranks)| RoleRanks {
            role: role.into(),
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        });
        check_phase(&m, &roles, &phase(names.map(|(role, _)| program(role)).into()))
    };
    clean(&check([("leader@out0", &[0]), ("r", &[1, 2])]));
    only(&check([("leader", &[0]), ("r", &[1, 2])]), "T0337");
    only(&check([("leader@out0", &[0, 1]), ("r", &[2])]), "T0337");
}

#[test]
fn blocks_and_the_world_are_groups_of_their_own() {
    let m = mesh("tp=4,outside=1");
    let run = |ways: [Option<i64>; 2], root: i64| {
        let programs = (0..5).map(|r: usize| {
            let mut b = builder(&if r == 0 { "leader@out0".into() } else { format!("r{r}@tp{}", r - 1) }, m);
            let x = b.input("x", f32s(&[4]));
            b.attr("axis", "world").attr("root", if r == 3 { root } else { 0 }).op(Opcode::Broadcast, &[x]);
            if r > 0 {
                b.attr("axis", "tp").attr("root", 0i64);
                if let Some(w) = ways[usize::from(r > 2)] {
                    b.attr("ways", w);
                }
                b.op(Opcode::Broadcast, &[x]);
            }
            done(b)
        });
        judge(programs.collect())
    };
    clean(&run([None, None], 0));
    clean(&run([Some(2), Some(2)], 0));
    only(&run([None, None], 1), "T0305");
    // Half of the ranks call over the axis, half over its blocks.
    only(&run([Some(2), None], 0), "T0307");
}

#[test]
fn t0343_members_of_tp_compute_one_thing() {
    let run = |swap: bool, through_pp: bool| {
        each(mesh("tp=2,pp=2"), |r, b| {
            let (x, y) = (b.weight("x", f32s(&[4, 4])), b.weight("y", f32s(&[4, 4])));
            let mine = if swap && r == 3 { y } else { x };
            // Stage 0 sends what stage 1 exchanges.
            let value = match (through_pp, r < 2) {
                (false, _) => mine,
                (true, true) => {
                    let mine = if swap && r == 1 { y } else { x };
                    let t = b.attr("axis", "pp").attr("to", 1i64).issue(Opcode::Send, &[mine]);
                    b.wait(t, None);
                    return;
                }
                (true, false) => {
                    let t = b.attr("axis", "pp").attr("from", 0i64).recv(f32s(&[4, 4]));
                    b.wait(t, Some(f32s(&[4, 4]))).unwrap()
                }
            };
            let s = b.attr("axis", "tp").attr("dim", 0i64).op(Opcode::TakeShard, &[value]);
            b.attr("axis", "tp").attr("dim", 0i64).op(Opcode::AllGather, &[s]);
        })
    };
    clean(&run(false, false));
    clean(&run(false, true));
    let found = run(true, false);
    only(&found, "T0343");
    assert!(
        text(&found).contains("weight \"x\"") && text(&found).contains("weight \"y\""),
        "{}",
        text(&found)
    );
    // The difference is made on another stage and travels in a message.
    only(&run(true, true), "T0343");
}

#[test]
fn t0344_members_name_one_carrier() {
    let of = |b: &mut Builder, via: Option<&str>| {
        via.map(|v| b.attr("via", v));
    };
    let group = |vias: [Option<&str>; 2]| {
        each(mesh("tp=2"), |r, b| {
            let x = b.input("x", f32s(&[4]));
            of(b, vias[r]);
            b.attr("axis", "tp").attr("root", 0i64).op(Opcode::Broadcast, &[x]);
        })
    };
    let pair = |vias: [Option<&str>; 2]| {
        each(mesh("tp=2"), |r, b| {
            if r == 0 {
                let x = b.input("x", f32s(&[4]));
                of(b, vias[0]);
                let t = b.attr("axis", "tp").attr("to", 1i64).issue(Opcode::Send, &[x]);
                b.wait(t, None);
            } else {
                of(b, vias[1]);
                recv(b, "tp", 0, 4);
            }
        })
    };
    for alike in [None, Some("nccl"), Some("kernels")] {
        clean(&group([alike; 2]));
        clean(&pair([alike; 2]));
    }
    for differ in [[None, Some("nccl")], [Some("kernels"), None], [Some("kernels"), Some("nccl")]] {
        only(&group(differ), "T0344");
        only(&pair(differ), "T0344");
    }
}

#[test]
fn t0329_is_told_of_a_few_ranks_of_a_role() {
    let m = mesh("tp=64");
    let every: Vec<Rank> = m.iter().collect();
    let roles = ["r@tp0", "s"].map(|role| RoleRanks { role: role.into(), ranks: every.clone() });
    let programs = ["r@tp0", "s"].map(|role| done(builder(role, m))).to_vec();
    let found = check_phase(&m, &roles, &phase(programs));
    only(&found, "T0329");
    assert_eq!(found.len(), 8, "{}", text(&found));
}
