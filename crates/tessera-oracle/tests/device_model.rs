//! Tests the device model on small sets with known outcomes.
#![allow(clippy::unwrap_used)]

use tessera_ir::{Attr, Program};
use tessera_oracle::{ExecutionOutcome, MismatchField, explore_all_orders, explore_one_order};

/// Parses the programs of one set, one per rank; `header` gives the mesh and the streams.
fn parse_set(header: &str, bodies: &[&str]) -> Vec<Program> {
    let text = |(i, b): (usize, &&str)| format!("program @p role(r{i}) {header} {{\n{b}\n}}\n");
    let one = |t: String| tessera_ir::parse(&t, "p").unwrap_or_else(|e| panic!("{t}\n{e:?}"));
    bodies.iter().enumerate().map(text).map(one).collect()
}

/// Simulates a set in one order and in all orders, which must agree.
fn simulate_set(programs: &[Program]) -> ExecutionOutcome {
    let all: Vec<&Program> = programs.iter().collect();
    let outcome = explore_one_order(&programs[0].mesh, &all);
    let every = explore_all_orders(&programs[0].mesh, &all, 200_000).expect("few enough states");
    assert_eq!(outcome.kind(), every.kind(), "{outcome}\nagainst\n{every}");
    outcome
}

fn outcome_kind(header: &str, bodies: &[&str]) -> &'static str {
    simulate_set(&parse_set(header, bodies)).kind()
}

fn mismatch_field(outcome: &ExecutionOutcome) -> Option<MismatchField> {
    match outcome {
        ExecutionOutcome::Mismatch { field, .. } => Some(*field),
        _ => None,
    }
}

/// Sets an attribute of a program's collective, even if the op table lacks the attribute.
fn set_attribute(p: &mut Program, collective: usize, name: &str, value: Attr) {
    let at = p.collective_ops().nth(collective).unwrap().0;
    p.ops[at].attrs.insert(name.to_string(), value);
}

const TWO: &str = "mesh(tp=2) streams(compute, comm, io)";

#[test]
fn reversed_broadcasts_differ_in_the_root() {
    let body = |first: u8, then: u8| {
        format!(
            "%x = input : f32[4] {{tp: replicated}}
             %a = ttile.collective.broadcast %x {{axis = \"tp\", root = {first}}} : f32[4] {{tp: replicated}}
             %b = ttile.collective.broadcast %x {{axis = \"tp\", root = {then}}} : f32[4] {{tp: replicated}}"
        )
    };
    let (a, b) = (body(0, 1), body(1, 0));
    assert_eq!(mismatch_field(&simulate_set(&parse_set(TWO, &[&a, &b]))), Some(MismatchField::Root));
    assert_eq!(outcome_kind(TWO, &[&a, &a]), "completes");
}

fn ring(rank: usize, ranks: usize, send_first: bool) -> String {
    let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let send = format!("ttile.collective.send %x {{axis = \"tp\", to = {to}}}");
    let recv =
        format!("%y = ttile.collective.recv {{axis = \"tp\", from = {from}}} : f32[4] {{tp: replicated}}");
    let both = if send_first { [send, recv] } else { [recv, send] };
    format!("%x = input : f32[4] {{tp: replicated}}\n{}", both.join("\n"))
}

#[test]
fn a_ring_of_three_pairs_needs_one_that_receives_first() {
    let bodies = |first: bool| [ring(0, 3, first), ring(1, 3, true), ring(2, 3, true)];
    let play = |b: [String; 3]| outcome_kind("mesh(tp=3)", &[&b[0], &b[1], &b[2]]);
    assert_eq!(play(bodies(true)), "hang");
    assert_eq!(play(bodies(false)), "completes");
}

#[test]
fn two_groups_complete_unless_orders_form_a_checkerboard() {
    let call = |axis: &str, stream: &str, n: usize| {
        format!("%t{n} = ttile.collective.issue broadcast %x {{axis = \"{axis}\", root = 0}} @{stream}")
    };
    for streams in [["compute", "compute"], ["compute", "comm"]] {
        let mut completes = 0;
        for bits in 0..16usize {
            let body = |rank: usize| {
                let mut axes = [("tp", streams[0]), ("pp", streams[1])];
                if bits >> rank & 1 == 1 {
                    axes.reverse();
                }
                let calls: Vec<String> = axes.iter().enumerate().map(|(n, (a, s))| call(a, s, n)).collect();
                format!(
                    "%x = input : f32[4] {{tp: replicated, pp: replicated}}
                     {}
                     %y0 = ttile.collective.wait %t0 : f32[4] {{tp: replicated, pp: replicated}}
                     %y1 = ttile.collective.wait %t1 : f32[4] {{tp: replicated, pp: replicated}}",
                    calls.join("\n")
                )
            };
            let bodies: Vec<String> = (0..4).map(body).collect();
            let refs: Vec<&str> = bodies.iter().map(String::as_str).collect();
            let found = outcome_kind("mesh(tp=2, pp=2) streams(compute, comm)", &refs);
            completes += usize::from(found == "completes");
            assert!(found != "race" && found != "mismatch");
        }
        assert_eq!(completes, 14, "streams do not change what launches first");
    }
}

/// Body of a program that computes a partial sum and reduces it.
const REDUCE: &str = "%x = weight \"x\" : f32[4, 4] {tp: shard(1)}
    %w = weight \"w\" : f32[4, 4] {tp: shard(1)}
    %p = ttile.matmul %x, %w : f32[4, 4] {tp: partial(sum)}
    %y = ttile.collective.all_reduce %p {axis = \"tp\", reduction = \"sum\"} : f32[4, 4] {tp: replicated}";

#[test]
fn a_sum_does_not_match_a_maximum() {
    let mut programs = parse_set(TWO, &[REDUCE, REDUCE]);
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
    set_attribute(&mut programs[1], 0, "reduction", Attr::Str("max".into()));
    assert_eq!(mismatch_field(&simulate_set(&programs)), Some(MismatchField::Reduction));
}

#[test]
fn captured_does_not_match_eager_or_another_graph() {
    let mut programs = parse_set(TWO, &[REDUCE, REDUCE]);
    set_attribute(&mut programs[0], 0, "graph", Attr::Str("a".into()));
    assert_eq!(mismatch_field(&simulate_set(&programs)), Some(MismatchField::Graph));
    set_attribute(&mut programs[1], 0, "graph", Attr::Str("b".into()));
    assert_eq!(mismatch_field(&simulate_set(&programs)), Some(MismatchField::Graph));
    set_attribute(&mut programs[1], 0, "graph", Attr::Str("a".into()));
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
}

#[test]
fn a_graph_forks_to_lanes_of_its_own() {
    let body = |before: &str, inside: &str, after: &str| {
        format!(
            "%x = weight \"x\" : f32[4] {{tp: replicated}}
             %z = ttile.silu %x : f32[4] {{tp: replicated}} @{before}
             %a = ttile.silu %x : f32[4] {{tp: replicated}} @compute
             %b = ttile.silu %{inside} : f32[4] {{tp: replicated}} @io
             %c = ttile.silu %b : f32[4] {{tp: replicated}} @{after}"
        )
    };
    let play = |before: &str, inside: &str, after: &str, captured: bool| {
        let text = body(before, inside, after);
        let mut programs = parse_set(TWO, &[&text, &text]);
        for p in programs.iter_mut().filter(|_| captured) {
            for op in &mut p.ops[2..4] {
                op.attrs.insert("graph".to_string(), Attr::Str("g".into()));
            }
        }
        self::simulate_set(&programs).kind()
    };
    // On plain streams, io reads the result of compute without an event; in a graph, lanes begin
    // after all ops before the graph.
    assert_eq!(play("compute", "z", "io", false), "race");
    assert_eq!(play("compute", "z", "compute", true), "completes");
    // The end of the graph holds back its launch stream and no other stream.
    assert_eq!(play("compute", "x", "io", false), "completes");
    assert_eq!(play("compute", "x", "io", true), "race");
    assert_eq!(play("compute", "x", "compute", false), "race");
    // Earlier ops on a lane's stream are not ordered before the lane.
    assert_eq!(play("io", "z", "io", false), "completes");
    assert_eq!(play("io", "z", "compute", true), "race");
}

/// Returns a body with sends and receives of one rank: all issued, then all waited for.
fn transfer_body(calls: &[(&str, usize, u64)]) -> String {
    let mut out = String::new();
    for (i, (word, peer, n)) in calls.iter().enumerate() {
        out += &match *word {
            "send" => format!(
                "%x{i} = weight \"x{i}\" : f32[{n}] {{tp: replicated}}
                 %t{i} = ttile.collective.issue send %x{i} {{axis = \"tp\", to = {peer}}} @comm\n"
            ),
            _ => format!("%t{i} = ttile.collective.issue recv {{axis = \"tp\", from = {peer}}} @comm\n"),
        };
    }
    for (i, (word, _, n)) in calls.iter().enumerate() {
        out += &match *word {
            "send" => format!("ttile.collective.wait %t{i}\n"),
            _ => format!("%y{i} = ttile.collective.wait %t{i} : f32[{n}] {{tp: replicated}}\n"),
        };
    }
    out
}

fn set_batch(mut programs: Vec<Program>, ranks: &[usize]) -> Vec<Program> {
    for r in ranks {
        for c in 0..programs[*r].collective_ops().count() {
            set_attribute(&mut programs[*r], c, "batch", Attr::Int(0));
        }
    }
    programs
}

#[test]
fn both_may_send_first_only_in_one_batch() {
    let bodies =
        [transfer_body(&[("send", 1, 4), ("recv", 1, 4)]), transfer_body(&[("send", 0, 4), ("recv", 0, 4)])];
    let programs = || parse_set(TWO, &[&bodies[0], &bodies[1]]);
    assert_eq!(simulate_set(&programs()).kind(), "hang");
    assert_eq!(simulate_set(&set_batch(programs(), &[0, 1])), ExecutionOutcome::Completes);
    // One batched side is enough: its receive is in flight together with its send.
    assert_eq!(simulate_set(&set_batch(programs(), &[0])), ExecutionOutcome::Completes);
}

#[test]
fn two_of_a_batch_to_one_peer_match_in_order() {
    let bodies =
        [transfer_body(&[("send", 1, 4), ("send", 1, 8)]), transfer_body(&[("recv", 0, 4), ("recv", 0, 8)])];
    assert_eq!(
        simulate_set(&set_batch(parse_set(TWO, &[&bodies[0], &bodies[1]]), &[0, 1])),
        ExecutionOutcome::Completes
    );
    let swapped = transfer_body(&[("recv", 0, 8), ("recv", 0, 4)]);
    let programs = set_batch(parse_set(TWO, &[&bodies[0], &swapped]), &[0, 1]);
    assert_eq!(mismatch_field(&simulate_set(&programs)), Some(MismatchField::Count));
}

#[test]
fn a_wait_inside_a_batch_blocks_its_own_batch() {
    let mut programs = parse_set(
        TWO,
        &[
            &transfer_body(&[("send", 1, 4), ("recv", 1, 4)]),
            &transfer_body(&[("recv", 0, 4), ("send", 0, 4)]),
        ],
    );
    assert_eq!(simulate_set(&set_batch(programs.clone(), &[0])), ExecutionOutcome::Completes);
    let p = &mut programs[0];
    let wait = p.ops.iter().position(|o| o.opcode == tessera_ir::Opcode::Wait).unwrap();
    let (mut moved, recv) = (p.ops.remove(wait), wait - 1);
    moved.stream = p.ops[recv].stream;
    p.ops.insert(recv, moved);
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
    assert_eq!(simulate_set(&set_batch(programs, &[0])).kind(), "hang");
}

#[test]
fn a_transfer_does_not_disturb_a_waiting_group_member() {
    let all = "%b = ttile.collective.broadcast %x {axis = \"tp\", root = 0} : f32[4] {tp: replicated}";
    let x = "%x = input : f32[4] {tp: replicated}";
    let bodies = [
        format!("{x}\n{all}"),
        format!("{x}\nttile.collective.send %x {{axis = \"tp\", to = 2}}\n{all}"),
        format!(
            "{x}\n%y = ttile.collective.recv {{axis = \"tp\", from = 1}} : f32[4] {{tp: replicated}}\n{all}"
        ),
    ];
    assert_eq!(outcome_kind("mesh(tp=3)", &[&bodies[0], &bodies[1], &bodies[2]]), "completes");
    // Without the receive the sender never reaches the broadcast.
    assert_eq!(outcome_kind("mesh(tp=3)", &[&bodies[0], &bodies[1], &bodies[0]]), "hang");
}

#[test]
fn different_ops_dtypes_and_counts_do_not_match() {
    let call = |op: &str, constants: &str, ty: &str, out: &str| {
        format!(
            "%x = weight \"x\" : {ty}\n%y = ttile.collective.{op} %x {{axis = \"tp\", {constants}}} : {out}"
        )
    };
    let broadcast = |ty: &str| call("broadcast", "root = 0", ty, ty);
    let gather = call("all_gather", "dim = 0", "f32[2, 4] {tp: shard(0)}", "f32[4, 4] {tp: replicated}");
    let a = broadcast("f32[4, 4] {tp: replicated}");
    let against = |b: &str| mismatch_field(&simulate_set(&parse_set(TWO, &[&a, b])));
    assert_eq!(against(&gather), Some(MismatchField::Op));
    assert_eq!(against(&broadcast("bf16[4, 4] {tp: replicated}")), Some(MismatchField::Dtype));
    assert_eq!(against(&broadcast("f32[4, 5] {tp: replicated}")), Some(MismatchField::Count));
    assert_eq!(against(&broadcast("f32[2, 8] {tp: replicated}")), None);
}

#[test]
fn an_uneven_exchange_is_counted_per_peer() {
    let exchange = |at: u64, extent: u64| {
        let rows = extent / 2 + u64::from(at < extent % 2);
        format!(
            "%x = weight \"x\" : f32[{rows}, 4] {{tp: shard(0, extent={extent}, unit=1)}}
             %y = ttile.collective.all_to_all %x {{axis = \"tp\", concat = 0, split = 1}} : f32[{extent}, 2] {{tp: shard(1)}}"
        )
    };
    let programs = |a: u64, b: u64| {
        let texts = [exchange(0, a), exchange(1, b)];
        let one = |i: usize| {
            let t = format!("program @p role(r{i}@tp{i}) {TWO} {{\n{}\n}}", texts[i]);
            tessera_ir::parse(&t, "p").unwrap_or_else(|e| panic!("{e:?}"))
        };
        vec![one(0), one(1)]
    };
    assert_eq!(simulate_set(&programs(7, 7)), ExecutionOutcome::Completes);
    assert_eq!(mismatch_field(&simulate_set(&programs(7, 5))), Some(MismatchField::Count));
}

/// A matmul on compute whose result another stream reads.
fn read_elsewhere(event: &str, after: &str) -> String {
    format!(
        "%x = weight \"x\" : f32[4, 4] {{tp: replicated}}
         %y = ttile.matmul %x, %x : f32[4, 4] {{tp: replicated}} @compute
         {event}
         %z = ttile.silu %y : f32[4, 4] {{tp: replicated}} @io {after}"
    )
}

#[test]
fn a_missing_event_is_a_race() {
    let (with, without) = (read_elsewhere("%e = event.record @compute", "after(%e)"), read_elsewhere("", ""));
    let early = "%x = weight \"x\" : f32[4, 4] {tp: replicated}
         %e = event.record @compute
         %y = ttile.matmul %x, %x : f32[4, 4] {tp: replicated} @compute
         %z = ttile.silu %y : f32[4, 4] {tp: replicated} @io after(%e)";
    assert_eq!(outcome_kind(TWO, &[&with, &with]), "completes");
    assert_eq!(outcome_kind(TWO, &[&with, &without]), "race");
    assert_eq!(outcome_kind(TWO, &[&with, early]), "race");
}

#[test]
fn a_result_is_ready_when_its_collective_has_finished() {
    let body = |reader: &str, before: &str| {
        format!(
            "%x = weight \"x\" : f32[4] {{tp: replicated}}
             %t = ttile.collective.issue broadcast %x {{axis = \"tp\", root = 0}} @comm
             {before}
             %y = ttile.collective.wait %t : f32[4] {{tp: replicated}} @compute
             %z = ttile.silu %y : f32[4] {{tp: replicated}} @{reader}"
        )
    };
    let play = |reader: &str| outcome_kind(TWO, &[&body(reader, ""), &body(reader, "")]);
    assert_eq!(play("compute"), "completes");
    // The reader follows the collective on its own stream, whatever the wait does.
    assert_eq!(play("comm"), "completes");
    assert_eq!(play("io"), "race");
    // The launch queue holds back the second collective until the first has finished.
    let second = "%t2 = ttile.collective.issue broadcast %x {axis = \"tp\", root = 1} @io";
    assert_eq!(outcome_kind(TWO, &[&body("io", second), &body("io", second)]), "completes");
}

#[test]
fn rows_of_a_buffer_race_only_where_they_overlap() {
    let body = |row: u64, after: &str| {
        format!(
            "buffer @kv : f32[8, 4] {{tp: replicated}}
             %x = weight \"x\" : f32[4, 4] {{tp: replicated}}
             cache.write @kv, %x @compute
             %e = event.record @compute
             %v = cache.read @kv {{row = {row}, rows = 4}} : f32[4, 4] {{tp: replicated}} @io {after}"
        )
    };
    let play = |row, after| outcome_kind(TWO, &[&body(row, after), &body(4, "")]);
    assert_eq!(play(4, ""), "completes");
    assert_eq!(play(3, ""), "race");
    assert_eq!(play(3, "after(%e)"), "completes");
}

#[test]
fn a_write_covers_rows_from_its_first_row() {
    let body = |row: u64| {
        format!(
            "buffer @kv : f32[8, 4] {{tp: replicated}}
             %x = weight \"x\" : f32[4, 4] {{tp: replicated}}
             cache.write @kv, %x {{first_row = 3}} @compute
             %v = cache.read @kv {{row = {row}, rows = 3}} : f32[3, 4] {{tp: replicated}} @io"
        )
    };
    assert_eq!(outcome_kind(TWO, &[&body(0), &body(0)]), "completes");
    assert_eq!(outcome_kind(TWO, &[&body(5), &body(0)]), "race");
}

#[test]
fn a_write_under_a_view_in_flight_is_a_race() {
    let body = |order: &[&str]| {
        let wait = "ttile.collective.wait %t @compute";
        let write = "cache.write @kv, %x @compute";
        let lines: Vec<&str> = order.iter().map(|w| if *w == "wait" { wait } else { write }).collect();
        format!(
            "buffer @kv : f32[4] {{tp: replicated}}
             %x = weight \"x\" : f32[4] {{tp: replicated}}
             %v = cache.read @kv : f32[4] {{tp: replicated}} @comm
             %t = ttile.collective.issue send %v {{axis = \"tp\", to = 1}} @comm
             {}",
            lines.join("\n")
        )
    };
    let takes = "%y = ttile.collective.recv {axis = \"tp\", from = 0} : f32[4] {tp: replicated}";
    assert_eq!(outcome_kind(TWO, &[&body(&["wait", "write"]), takes]), "completes");
    assert_eq!(outcome_kind(TWO, &[&body(&["write", "wait"]), takes]), "race");
}

#[test]
fn a_batch_does_not_span_a_graph_boundary() {
    let bodies =
        [transfer_body(&[("send", 1, 4), ("recv", 1, 4)]), transfer_body(&[("send", 0, 4), ("recv", 0, 4)])];
    let mut programs = set_batch(parse_set(TWO, &[&bodies[0], &bodies[1]]), &[0, 1]);
    for p in &mut programs {
        set_attribute(p, 0, "graph", Attr::Str("g".into()));
    }
    // The sends are captured, and the receives follow the graphs.
    assert_eq!(simulate_set(&programs).kind(), "hang");
    for p in &mut programs {
        set_attribute(p, 1, "graph", Attr::Str("g".into()));
    }
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
}

#[test]
fn outside_ranks_use_the_world_group_only() {
    let body = |axis: &str, root: u8| {
        format!(
            "%x = weight \"x\" : f32[4]
             %y = ttile.collective.broadcast %x {{axis = \"{axis}\", root = {root}}} : f32[4]"
        )
    };
    let (tp, world) = (body("tp", 0), body("world", 2));
    let header = "mesh(tp=2, outside=1)";
    assert_eq!(outcome_kind(header, &["", &tp, &tp]), "completes");
    assert_eq!(outcome_kind(header, &[&world, &world, &world]), "completes");
    assert_eq!(outcome_kind(header, &["", &world, &world]), "hang");
    assert_eq!(outcome_kind(header, &[&tp, &tp, &tp]), "hang");
    assert_eq!(
        mismatch_field(&simulate_set(&parse_set(header, &[&world, &body("world", 1), &world]))),
        Some(MismatchField::Root)
    );
}

#[test]
fn attributes_alone_determine_the_group() {
    let body = |axis: &str| {
        format!(
            "%x = weight \"x\" : f32[4] {{tp: replicated}}
             %y = ttile.collective.broadcast %x {{axis = \"{axis}\", root = 0}} : f32[4] {{tp: replicated}}"
        )
    };
    let tp = body("tp");
    let mut programs = parse_set("mesh(tp=4)", &[&tp, &tp, &tp, &tp]);
    for p in &mut programs[..2] {
        set_attribute(p, 0, "group_size", Attr::Int(2));
    }
    // Two members complete a subgroup of two, but the other ranks wait for them.
    assert_eq!(simulate_set(&programs).kind(), "hang");
    for p in &mut programs[2..] {
        set_attribute(p, 0, "group_size", Attr::Int(2));
    }
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
    for p in &mut programs {
        set_attribute(p, 0, "group_size", Attr::Int(4));
        set_attribute(p, 0, "axis", Attr::Str("world".into()));
    }
    assert_eq!(simulate_set(&programs), ExecutionOutcome::Completes);
}
