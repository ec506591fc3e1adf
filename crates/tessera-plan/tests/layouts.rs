//! Array programs: which collectives the layouts of sources lead to, when they are issued and
//! waited for, and which programs and layouts are refused.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_ir::{Attr, Bundle, DType, OpView, Opcode, Program, StreamKind, WeightLoad, parse_all};
use tessera_mesh::{Axis, AxisLayout, DimName, Group, Layout, Mesh, RankMap, Reduction, Shard, ShardSpec};
use tessera_plan::layouts::{LaidOutProgram, StreamOverlap, lower_by_layouts, lower_mesh_invariant};

fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

fn logical(body: &str) -> Program {
    parse_all(&format!("program @p {{ {body} }}"), "test").unwrap_or_else(|ds| panic!("{ds:#?}")).remove(0)
}

/// Returns a program with the layout of a shard spec for each named weight.
fn laid_out(mesh: &Mesh, body: &str, specs: &[(&str, &[&str], &[&str])]) -> LaidOutProgram {
    let program = logical(body);
    let layout = |(name, dims, axes): &(&str, &[&str], &[&str])| {
        let op = program.ops.iter().find(|o| o.name.as_deref() == Some(name)).unwrap();
        let shape = &program.type_of(op.results[0]).shape;
        let names = DimName::of_weight(shape.len()).unwrap();
        let spec = ShardSpec::new(dims, axes).unwrap();
        (name.to_string(), spec.to_layout(shape, &names, mesh).unwrap())
    };
    let sources = specs.iter().map(layout).collect();
    LaidOutProgram { program, sources, values: BTreeMap::new(), outputs: BTreeMap::new() }
}

fn lower(mesh: &Mesh, p: LaidOutProgram, overlap: &StreamOverlap) -> Result<Bundle, Diagnostics> {
    lower_by_layouts(&[p], mesh, RankMap::from_device_kind(mesh, "cpu"), overlap)
}

fn lower_first(mesh: &Mesh, p: LaidOutProgram, overlap: &StreamOverlap) -> Program {
    lower(mesh, p, overlap).unwrap_or_else(|ds| panic!("{ds:#?}")).phases.remove(0).programs.remove(0)
}

fn collectives(p: &Program) -> Vec<&'static str> {
    p.collective_ops().map(|(_, op)| op.opcode.name()).collect()
}

/// Returns the names of the ops that are no sources, `issue` for an issued collective.
fn op_names(p: &Program) -> Vec<&'static str> {
    let ops = p.ops.iter().filter(|op| !op.is_source());
    ops.map(|op| if op.issue { "issue" } else { op.opcode.name() }).collect()
}

const TWO_LAYERS: &str = "%x = input \"x\" : f32[5, 6] %w1 = weight \"w1\" : f32[9, 6] %b1 = weight \"b1\" : f32[9] \
    %w2 = weight \"w2\" : f32[7, 9] %h = toperator.matmul %x, %w1 : f32[5, 9] \
    %a = toperator.bias_act %h, %b1 {act = \"silu\"} : f32[5, 9] \
    %y = toperator.matmul %a, %w2 : f32[5, 7] output \"y\", %y";

#[test]
fn a_column_parallel_and_a_row_parallel_matmul_need_one_all_reduce() {
    let col: (&[&str], &[&str]) = (&["col"], &["tp"]);
    let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
    for tp in ["tp=3", "tp=2"] {
        let mesh = mesh(tp);
        let specs = [("w1", col.0, col.1), ("b1", col.0, col.1), ("w2", row.0, row.1)];
        let p = laid_out(&mesh, TWO_LAYERS, &specs);
        let bundle = lower(&mesh, p, &StreamOverlap::all()).unwrap();
        // tp=2 does not divide 9 columns, so each rank has a role of its own.
        assert_eq!(bundle.roles.len(), if tp == "tp=3" { 1 } else { 2 });
        for p in &bundle.phases[0].programs {
            assert_eq!(collectives(p), ["all_reduce"]);
        }
    }
}

#[test]
fn a_bias_of_a_row_parallel_matmul_is_added_after_the_sum() {
    let body = "%x = input \"x\" : f32[5, 60] %w = weight \"w\" : f32[9, 60] %b = weight \"b\" : f32[9] \
        %y = toperator.matmul %x, %w, bias=%b {act = \"silu\"} : f32[5, 9] output \"y\", %y";
    let mesh = mesh("tp=3");
    let row = laid_out(&mesh, body, &[("x", &["row"], &["tp"]), ("w", &["row"], &["tp"])]);
    let p = lower_first(&mesh, row, &StreamOverlap::none());
    assert_eq!(op_names(&p), ["matmul", "event.record", "issue", "wait", "take_shard", "bias_act", "output"]);
    // A column-parallel one needs no sum, and stays fused.
    let col = laid_out(&mesh, body, &[("w", &["col"], &["tp"]), ("b", &["col"], &["tp"])]);
    let col = lower(&mesh, col, &StreamOverlap::none()).unwrap();
    assert_eq!(op_names(&col.phases[0].programs[0]), ["matmul", "output"]);
}

#[test]
fn a_sum_of_partial_sums_is_reduced_once() {
    let body = "%x = input \"x\" : f32[4, 6] %y = input \"y\" : f32[4, 6] %w = weight \"w\" : f32[8, 6] \
        %a = toperator.matmul %x, %w : f32[4, 8] %b = toperator.matmul %y, %w : f32[4, 8] \
        %s = toperator.add %a, %b : f32[4, 8] %t = toperator.silu %s : f32[4, 8] output \"t\", %t";
    let mesh = mesh("tp=2");
    let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
    let p = laid_out(&mesh, body, &[("x", row.0, row.1), ("y", row.0, row.1), ("w", row.0, row.1)]);
    // Half of the sum travels if the next op works on shards.
    let q = lower_first(&mesh, p.clone(), &StreamOverlap::all());
    assert_eq!(collectives(&q), ["reduce_scatter"]);
    let whole = BTreeMap::from([("t".to_string(), Layout::REPLICATED)]);
    let q = lower_first(&mesh, LaidOutProgram { outputs: whole, ..p }, &StreamOverlap::all());
    assert_eq!(collectives(&q), ["reduce_scatter", "all_gather"]);
}

/// A reduction over tp, an op that does not need it, and one that does.
const INDEPENDENT: &str = "%x = input \"x\" : f32[4, 6] %w = weight \"w\" : f32[7, 6] %z = input \"z\" : f32[4, 7] \
    %a = toperator.matmul %x, %w : f32[4, 7] %b = toperator.silu %z : f32[4, 7] \
    %c = toperator.add %a, %b : f32[4, 7] output \"c\", %c";

#[test]
fn a_collective_overlaps_compute_only_if_the_pair_is_allowed() {
    let mesh = mesh("tp=2");
    let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
    let p = || laid_out(&mesh, INDEPENDENT, &[("x", row.0, row.1), ("w", row.0, row.1)]);
    let overlap = StreamOverlap::new(&[("compute", "tp_collective")]).unwrap();
    let overlapped = lower_first(&mesh, p(), &overlap);
    assert_eq!(
        op_names(&overlapped),
        ["matmul", "event.record", "issue", "silu", "wait", "take_shard", "add", "output"]
    );
    // Half of the sum travels, because the reader may work on shards.
    assert_eq!(collectives(&overlapped), ["reduce_scatter"]);
    let streams: Vec<&str> =
        overlapped.ops.iter().map(|op| overlapped.streams[op.stream.0 as usize].as_str()).collect();
    let issue = overlapped.ops.iter().position(|op| op.issue).unwrap();
    assert_eq!(streams[issue], StreamKind::TpCollective.name());
    assert!(streams.iter().enumerate().all(|(i, s)| i == issue || *s == StreamKind::Compute.name()));
    for serial in [StreamOverlap::none(), StreamOverlap::new(&[("compute", "a2a")]).unwrap()] {
        let p = lower_first(&mesh, p(), &serial);
        assert_eq!(
            op_names(&p),
            ["matmul", "silu", "event.record", "issue", "wait", "take_shard", "add", "output"]
        );
    }
}

#[test]
fn collectives_of_two_streams_overlap_only_if_the_pair_is_allowed() {
    let body = "%x = input \"x\" : f32[4, 6] %w = weight \"w\" : f32[7, 6] \
        %y = input \"y\" : f32[4, 6] %v = weight \"v\" : f32[7, 6] \
        %a = toperator.matmul %x, %w : f32[4, 7] %b = toperator.matmul %y, %v : f32[4, 7] \
        %c = toperator.mul %a, %b : f32[4, 7] output \"c\", %c";
    let mesh = mesh("tp=2, ep=2");
    let tp: (&[&str], &[&str]) = (&["row"], &["tp"]);
    let ep: (&[&str], &[&str]) = (&["row"], &["ep"]);
    let specs = [("x", tp.0, tp.1), ("w", tp.0, tp.1), ("y", ep.0, ep.1), ("v", ep.0, ep.1)];
    let lowered = |pairs: &[(&str, &str)]| {
        let p = laid_out(&mesh, body, &specs);
        let p = lower_first(&mesh, p, &StreamOverlap::new(pairs).unwrap());
        let order = op_names(&p).into_iter().filter(|name| ["issue", "wait"].contains(name));
        order.collect::<Vec<_>>()
    };
    let with_compute = [("compute", "tp_collective"), ("compute", "a2a")];
    assert_eq!(lowered(&with_compute), ["issue", "wait", "issue", "wait"]);
    let all = [with_compute.as_slice(), &[("a2a", "tp_collective")]].concat();
    assert_eq!(lowered(&all), ["issue", "issue", "wait", "wait"]);
}

#[test]
fn a_sharded_weight_is_gathered_one_op_before_its_reader() {
    let body = "%x = input \"x\" : f32[30, 6] %v = weight \"v\" : f32[6, 6] %w = weight \"w\" : f32[6, 6] \
        %a = toperator.matmul %x, %v : f32[30, 6] %b = toperator.softmax %a : f32[30, 6] \
        %c = toperator.silu %b : f32[30, 6] %d = toperator.matmul %c, %w : f32[30, 6] output \"d\", %d";
    let mesh = mesh("dp=3");
    let weights = [("v", &["col"][..], &["dp"][..]), ("w", &["row"], &["dp"])];
    let mut p = laid_out(&mesh, body, &weights);
    let rows = AxisLayout::Shard(Shard::new(0, 30, 1, 3).unwrap());
    p.sources.insert("x".to_string(), Layout::REPLICATED.with_axis(Axis::Dp, rows));
    let p = lower_first(&mesh, p, &StreamOverlap::all());
    assert_eq!(
        op_names(&p),
        [
            "event.record",
            "issue",
            "wait",
            "matmul",
            "softmax",
            "event.record",
            "issue",
            "silu",
            "wait",
            "matmul",
            "output"
        ]
    );
    assert_eq!(collectives(&p), ["all_gather"; 2]);
}

#[test]
fn softmax_and_bmm_run_on_shards_of_their_batches() {
    let body = "%q = input \"q\" : f32[6, 5, 4] %k = input \"k\" : f32[6, 5, 4] %v = input \"v\" : f32[6, 5, 4] \
        %s = toperator.bmm %q, %k {scale = 0.5, transposed = true} : f32[6, 5, 5] \
        %a = toperator.softmax %s : f32[6, 5, 5] %o = toperator.bmm %a, %v : f32[6, 5, 4] output \"o\", %o";
    let mesh = mesh("tp=4");
    let spec = ShardSpec::new(&["head"], &["tp"]).unwrap();
    let dims = [DimName::Head, DimName::Token, DimName::Hidden];
    let layout = spec.to_layout(&[6, 5, 4], &dims, &mesh).unwrap();
    let sources = ["q", "k", "v"].map(|name| (name.to_string(), layout)).into();
    let p =
        LaidOutProgram { program: logical(body), sources, values: BTreeMap::new(), outputs: BTreeMap::new() };
    let bundle = lower(&mesh, p, &StreamOverlap::none()).unwrap();
    let ranks: Vec<_> = bundle.roles.iter().map(|r| (r.role.as_str(), r.ranks.len())).collect();
    assert_eq!(ranks, [("ranks@tp0", 2), ("ranks@tp2", 2)]);
    for (p, heads) in bundle.phases[0].programs.iter().zip([2, 1]) {
        assert_eq!(collectives(p), Vec::<&str>::new());
        let output = p.ops.iter().find(|o| o.opcode == Opcode::Output).unwrap();
        assert_eq!(p.type_of(output.operands[0]).shape, [heads, 5, 4]);
        assert_eq!(p.type_of(output.operands[0]).dtype, DType::F32);
    }
}

#[test]
fn several_programs_become_phases_and_calls_of_their_names() {
    let mesh = mesh("tp=2");
    let mut second = laid_out(
        &mesh,
        "%x = input \"x\" : f32[7] %y = toperator.silu %x : f32[7] output \"y\", %y",
        &[("x", &["col"], &["tp"])],
    );
    second.program.name = "q".to_string();
    let first = laid_out(&mesh, TWO_LAYERS, &[]);
    let map = RankMap::from_device_kind(&mesh, "cpu");
    let bundle =
        lower_by_layouts(&[first.clone(), second], &mesh, map.clone(), &StreamOverlap::all()).unwrap();
    let calls = ["p", "q"].map(|name| (name.to_string(), vec![name.to_string()]));
    assert_eq!(bundle.calls, calls);
    // The uneven input of the second program divides the roles of both.
    assert!(bundle.phases.iter().all(|p| p.programs.len() == 2 && p.slots.len() == 2));
    assert!(bundle.mapping.is_empty());
    let twice = lower_by_layouts(&[first.clone(), first], &mesh, map, &StreamOverlap::all()).unwrap_err();
    assert_eq!(twice.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0615"]);
}

#[test]
fn layouts_that_do_not_fit_are_refused_together() {
    let mesh = mesh("tp=2, ep=2");
    let on = |axis: Axis, l: AxisLayout| Layout::REPLICATED.with_axis(axis, l);
    let shard = |dim| AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size: None });
    let bad_sources = [
        ("w3", Layout::REPLICATED),
        ("x", on(Axis::Tp, shard(2))),
        // 9 columns have no even shards over 2.
        ("b1", on(Axis::Tp, shard(0))),
        ("w1", on(Axis::Tp, AxisLayout::new_partial(Reduction::Sum))),
        (
            "w2",
            on(Axis::Tp, AxisLayout::Shard(Shard::new(0, 7, 1, 2).unwrap()))
                .with_axis(Axis::Ep, AxisLayout::Shard(Shard::new(0, 7, 1, 2).unwrap())),
        ),
    ];
    let sources = bad_sources.map(|(name, layout)| (name.to_string(), layout)).into();
    let outputs = BTreeMap::from([("z".to_string(), Layout::REPLICATED)]);
    let p = LaidOutProgram { program: logical(TWO_LAYERS), sources, values: BTreeMap::new(), outputs };
    let found = lower(&mesh, p, &StreamOverlap::all()).unwrap_err();
    assert_eq!(found.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0614"; 6], "{found:#?}");
    for word in ["w3", "no dim 2", "9 elements", "partial(sum)", "both tp and ep", "output \"z\""] {
        assert_eq!(found.iter().filter(|d| d.message.contains(word)).count(), 1, "{word}: {found:#?}");
    }
}

#[test]
fn programs_that_ranks_cannot_run_are_refused() {
    let codes = |p: Program, mesh_text: &str| {
        let laid_out = LaidOutProgram {
            program: p,
            sources: BTreeMap::new(),
            values: BTreeMap::new(),
            outputs: BTreeMap::new(),
        };
        let found = lower(&mesh(mesh_text), laid_out, &StreamOverlap::all()).unwrap_err();
        found.iter().map(|d| d.code.id).collect::<Vec<_>>()
    };
    let fine = logical(TWO_LAYERS);
    assert_eq!(codes(fine.clone(), "tp=2, outside=1"), ["T0615"]);
    let role = Program { dialect: tessera_ir::Dialect::Role, ..fine.clone() };
    assert_eq!(codes(role, "tp=2"), ["T0615"]);
    let cache = logical(
        "buffer @b : f32[4, 4] %x = input \"x\" : f32[4, 4] cache.write @b, %x %y = cache.read @b : f32[4, 4] \
         output \"y\", %y",
    );
    assert_eq!(codes(cache, "tp=2"), ["T0615"]);
    let mut repeated = fine.clone();
    repeated.ops.push(repeated.ops[repeated.ops.len() - 1].clone());
    assert_eq!(codes(repeated, "tp=2"), ["T0615"]);
    // A matmul whose operands do not fit, and one with wrong attributes.
    let mut wrong = fine;
    let at = wrong.ops.iter().position(|o| o.opcode == Opcode::Matmul).unwrap();
    let x = wrong.ops[at].operands[0];
    wrong.ops[at].operands = vec![x, x];
    assert_eq!(codes(wrong, "tp=2"), ["T0615"]);
}

/// A layer of four experts over so many tokens.
fn experts(tokens: u64) -> String {
    format!(
        "%x = input \"x\" : f32[{tokens}, 6] %r = weight \"r\" : f32[4, 6] %g = weight \"g\" : f32[4, 5, 6] \
         %d = weight \"d\" : f32[4, 6, 5] %l = toperator.matmul %x, %r %c = toperator.top_k_experts %l {{top_k = 2}} \
         %w = toperator.expert_weights %l, %c %s = toperator.expert_slots %c {{capacity = 5}} \
         %n = toperator.expert_counts %c, %s {{groups = 4}} \
         %p = toperator.expert_pack %x, %c, %s {{capacity = 5, groups = 4}} \
         %h = toperator.grouped_matmul %p, %g, %n {{act = \"silu\", rows = 16}} \
         %o = toperator.grouped_matmul %h, %d, %n {{rows = 16}} \
         %y = toperator.expert_combine %o, %c, %s, %w output \"y\", %y"
    )
}

#[test]
fn sharded_tokens_reach_sharded_experts_by_all_to_all_within_ep() {
    let m = mesh("tp=2,ep=2");
    let by_ep: (&[&str], &[&str]) = (&["experts"], &["ep"]);
    let specs = [("x", &["col"][..], &["ep"][..]), ("g", by_ep.0, by_ep.1), ("d", by_ep.0, by_ep.1)];
    let p = lower_first(&m, laid_out(&m, &experts(8), &specs), &StreamOverlap::none());
    assert_eq!(collectives(&p), ["all_to_all"; 3], "rows, counts and results");
    let mut slots = Vec::new();
    for op in &p.ops {
        match op.view() {
            Ok(OpView::AllToAll(_)) => assert_eq!(op.comm_group(), Some(Group::whole_axis(Axis::Ep))),
            Ok(OpView::ExpertSlots(v)) => slots.push((v.group_tokens, v.capacity)),
            Ok(OpView::GroupedMatmul(v)) => {
                let ty = p.type_of(v.x);
                assert_eq!(
                    (&ty.shape[..2], v.rows),
                    (&[2, 6][..], 16),
                    "two experts, three slots of each rank"
                );
                assert_eq!(ty.layout.on_axis(Axis::Tp), AxisLayout::Replicated, "tp peers have equal rows");
            }
            _ => {}
        }
    }
    assert_eq!(slots, [(Some(4), 3)], "a rank's four tokens share ⌈5 / 2⌉ slots of an expert");
    let replicated = lower_first(&m, laid_out(&m, &experts(8), &specs[1..]), &StreamOverlap::none());
    assert_eq!(collectives(&replicated), ["all_reduce"]);
}

#[test]
fn tokens_in_unequal_shards_share_the_slots_of_an_expert() {
    let m = mesh("ep=2");
    let specs = [
        ("x", &["col"][..], &["ep"][..]),
        ("g", &["experts"][..], &["ep"][..]),
        ("d", &["experts"][..], &["ep"][..]),
    ];
    let p = lower_first(&m, laid_out(&m, &experts(7), &specs), &StreamOverlap::none());
    assert!(!collectives(&p).contains(&"all_to_all") && collectives(&p).contains(&"all_gather"));
    let slots = p.ops.iter().find_map(|op| match op.view() {
        Ok(OpView::ExpertSlots(v)) => Some((v.group_tokens, v.capacity)),
        _ => None,
    });
    assert_eq!(slots, Some((None, 5)));
}

#[test]
fn the_scales_of_a_quantized_weight_follow_its_rows_and_a_bias_its_sum() {
    let body = "%x = input \"x\" : f32[5, 6] %b = toperator.cast %x {to = \"bf16\"} \
        %q, %s = toperator.quantize %b {rounding = \"stochastic\", seed = 3, draw = 1} \
        %w = weight \"w\" {load = \"e4m3\"} : e4m3[8, 6] %v = weight \"w\" {load = \"e4m3.scale\"} : f32[8] \
        %k = weight \"k\" : bf16[8] %y = toperator.matmul %q, %w, bias=%k, x_scale=%s, w_scale=%v %z = toperator.cast %y {to = \"f32\"} output \"y\", %z";
    let m = mesh("tp=2");
    for (dim, moved) in [("col", vec![]), ("row", vec!["reduce_scatter"])] {
        let p = lower_first(&m, laid_out(&m, body, &[("w", &[dim], &["tp"])]), &StreamOverlap::none());
        assert_eq!(collectives(&p), moved, "sharded by {dim}");
        let scales = p.ops.iter().find(|op| op.weight_load() == Some(WeightLoad::E4m3Scale)).unwrap();
        assert_eq!(p.type_of(scales.results[0]).shape, [if dim == "col" { 4 } else { 8 }]);
    }
}

/// Returns the ops of the first role under mesh-invariant numerics, with the segments of each matmul and the reduction of
/// each collective.
fn invariant_ops(mesh: &Mesh, p: LaidOutProgram) -> Vec<String> {
    let ranks = RankMap::from_device_kind(mesh, "cpu");
    let bundle = lower_mesh_invariant(&[p], mesh, ranks, &StreamOverlap::none());
    let p = bundle.unwrap_or_else(|ds| panic!("{ds:#?}")).phases.remove(0).programs.remove(0);
    let shown = |op: &tessera_ir::Op| {
        let attr = |name: &str| match op.attrs.get(name) {
            Some(Attr::Int(number)) => format!(" {number}"),
            Some(Attr::Str(word)) => format!(" {word}"),
            _ => String::new(),
        };
        match op.opcode {
            Opcode::Matmul => Some(format!("matmul{}", attr("segments"))),
            o if o.is_collective() => Some(format!("{}{}", o.name(), attr("reduction"))),
            _ => None,
        }
    };
    p.ops.iter().filter_map(shown).collect()
}

#[test]
fn a_mesh_invariant_sum_is_split_only_where_a_tree_adds_whole_segments() {
    let row_parallel = |mesh: &Mesh, k: u64| {
        let body = format!(
            "%x = input \"x\" : f32[5, {k}] %w = weight \"w\" : f32[9, {k}] \
             %y = toperator.matmul %x, %w : f32[5, 9] output \"y\", %y"
        );
        let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
        laid_out(mesh, &body, &[("x", row.0, row.1), ("w", row.0, row.1)])
    };
    let ops = |tp: &str, k: u64| {
        let mesh = mesh(tp);
        invariant_ops(&mesh, row_parallel(&mesh, k))
    };
    assert_eq!(ops("tp=1", 24), ["matmul 8"]);
    assert_eq!(ops("tp=2", 24), ["matmul 4", "all_reduce tree"]);
    assert_eq!(ops("tp=8", 24), ["matmul 1", "all_reduce tree"]);
    // Three ranks would not have whole segments, and neither would four of an extent with two: x is gathered, and the
    // weight becomes column-parallel.
    assert_eq!(ops("tp=3", 24), ["all_gather", "all_to_all", "matmul 8"]);
    assert_eq!(ops("tp=2", 6), ["matmul 1", "all_reduce tree"]);
    assert_eq!(ops("tp=4", 20), ["matmul 1", "all_reduce tree"]);
    assert_eq!(ops("tp=4", 6), ["all_gather", "all_to_all", "matmul 2"]);
    // Columns need no sum between ranks, so they stay where they are.
    let mesh = mesh("tp=3");
    let body = "%x = input \"x\" : f32[5, 24] %w = weight \"w\" : f32[9, 24] \
        %y = toperator.matmul %x, %w : f32[5, 9] output \"y\", %y";
    assert_eq!(invariant_ops(&mesh, laid_out(&mesh, body, &[("w", &["col"], &["tp"])])), ["matmul 8"]);
}

#[test]
fn a_mesh_invariant_program_completes_a_sum_before_it_goes_on() {
    let body = "%x = input \"x\" : f32[4, 8] %y = input \"y\" : f32[4, 8] %w = weight \"w\" : f32[8, 8] \
        %a = toperator.matmul %x, %w : f32[4, 8] %b = toperator.matmul %y, %w : f32[4, 8] \
        %s = toperator.add %a, %b : f32[4, 8] output \"s\", %s";
    let mesh = mesh("tp=2");
    let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
    let p = laid_out(&mesh, body, &[("x", row.0, row.1), ("y", row.0, row.1), ("w", row.0, row.1)]);
    let ops = invariant_ops(&mesh, p.clone());
    let reductions = ops.iter().filter(|op| op.ends_with("tree")).count();
    assert_eq!(reductions, 2, "{ops:?}");
    assert_eq!(collectives(&lower_first(&mesh, p, &StreamOverlap::none())), ["all_reduce"]);
}

#[test]
fn a_mesh_invariant_sum_in_a_narrow_dtype_stays_whole() {
    let body = "%x = input \"x\" : bf16[5, 24] %w = weight \"w\" : bf16[9, 24] \
        %y = toperator.matmul %x, %w : bf16[5, 9] output \"y\", %y";
    let mesh = mesh("tp=2");
    let row: (&[&str], &[&str]) = (&["row"], &["tp"]);
    let p = laid_out(&mesh, body, &[("x", row.0, row.1), ("w", row.0, row.1)]);
    assert_eq!(invariant_ops(&mesh, p), ["all_gather", "all_to_all", "matmul"]);
}
