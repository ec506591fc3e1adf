//! Layers under every layout: bytes sent, slowest ranks, what is kept and computed again, what overlap is worth.

use tessera_cost::knobs::{Layout, Recompute, Scheme};
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{ExpertLoad, Routing, dispatch_bytes, experts};
use tessera_cost::profile::Hides;
use tessera_cost::rows::{Share, row};
use tessera_cost::{Machine, Profile, Span};
use tessera_ir::work::{Row, RowCut, RowOp};
use tessera_mesh::{LinkClass, Precision, clusters};

const H: u64 = 4096;
const HEADS: u64 = 32;

fn product(name: &'static str, cut: RowCut, k: u64, n: u64) -> Row {
    Row { name, op: RowOp::Matmul { k, n, bias: false }, cut, keep_bytes: 2 * k }
}

fn pass(cut: RowCut, reads: u64, writes: u64) -> Row {
    Row { name: "pass", op: RowOp::Pass { reads, writes, weights: 0 }, cut, keep_bytes: 2 * reads }
}

fn core(heads: u64, kv_heads: u64, scores_bytes: u64) -> Row {
    let op = RowOp::Attention {
        heads,
        kv_heads,
        qk: 128,
        v: 128,
        cache: 256 * kv_heads,
        causal: true,
        scores_bytes,
        latent: None,
    };
    Row { name: "attention.core", op, cut: RowCut::Heads, keep_bytes: 2 * 128 * (heads + 2 * kv_heads) }
}

fn attention(heads: u64, kv_heads: u64, scores_bytes: u64) -> Vec<Row> {
    vec![
        pass(RowCut::Whole, H, H),
        product("attention.qkv", RowCut::Col, H, 128 * (heads + 2 * kv_heads)),
        core(heads, kv_heads, scores_bytes),
        product("attention.out", RowCut::Row, 128 * heads, H),
        pass(RowCut::Whole, 2 * H, H),
    ]
}

fn feed_forward() -> Vec<Row> {
    vec![
        pass(RowCut::Whole, H, H),
        product("mlp.up", RowCut::Col, H, 4 * H),
        pass(RowCut::Heads, 4 * H, 4 * H),
        product("mlp.down", RowCut::Row, 4 * H, H),
        pass(RowCut::Whole, 2 * H, H),
    ]
}

fn dense() -> Vec<Row> {
    [attention(HEADS, HEADS, 0), feed_forward()].concat()
}

fn routed() -> Vec<Row> {
    let op = RowOp::Experts { experts: 256, top_k: 8, k: H, n: 2048, matrices: 3 };
    vec![
        Row { name: "experts.ffn", op, cut: RowCut::Experts, keep_bytes: 8 * (2 * H + 2 * 2048) },
        pass(RowCut::Experts, 8 * 4096, 8 * 2048),
    ]
}

fn machine() -> Machine {
    of(|_| {})
}

fn of(edit: impl Fn(&mut Profile)) -> Machine {
    let mut profile = Profile::named("megatron").expect("a profile");
    edit(&mut profile);
    Machine::new(clusters::named("gb200-nvl72").expect("a cluster"), profile)
}

fn layout(scheme: Scheme, tp: u32) -> Layout {
    let ring = if matches!(scheme, Scheme::Ring | Scheme::Striped) { tp } else { 1 };
    Layout { tp, scheme, ring, ..Layout::WHOLE }
}

fn spans(l: &Layout) -> Spans {
    let of = |ranks| Span { ranks, domains: 1 };
    Spans { tp: of(l.tp), ep: of(l.ep), expert_tp: of(l.expert_tp) }
}

fn train(tokens: f64) -> Load {
    Load { tokens, sequences: 1.0, keys: tokens, window: None, training: true, recompute: Recompute::None }
}

fn cost(m: &Machine, rows: &[Row], l: &Layout, load: &Load) -> LayerCost {
    layer(m, rows, l, load, &spans(l), &ExpertLoad::NONE)
}

fn all_ns(c: &LayerCost) -> f64 {
    c.forward.ns() + c.backward().ns()
}

fn near(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0), "{what}: {a} and {b}");
}

#[test]
fn megatron_sends_two_all_reduces_each_way_and_sequence_parallel_as_many_bytes() {
    let (m, tokens, tp) = (machine(), 8192.0, 8);
    let c = cost(&m, &dense(), &layout(Scheme::Megatron, tp), &train(tokens));
    let all_reduce = 2.0 * 7.0 / 8.0 * 2.0 * tokens * H as f64;
    near(c.forward.sent[0], 2.0 * all_reduce, "forward");
    near((c.backward_input + c.backward_weight).sent[0], 2.0 * all_reduce, "backward");

    let s = cost(&m, &dense(), &layout(Scheme::MegatronSequence, tp), &train(tokens));
    near(s.forward.sent[0], c.forward.sent[0], "gathered and scattered");
    // Inputs of products by column are gathered once more.
    near((s.backward_input + s.backward_weight).sent[0], 3.0 * all_reduce, "backward, divided");
    assert!(s.forward.memory_ns < c.forward.memory_ns && s.keep_bytes < c.keep_bytes);
}

#[test]
fn ulysses_sends_four_exchanges_and_keeps_whole_weights() {
    let (m, tokens, tp) = (machine(), 8192.0, 8);
    let c = cost(&m, &dense(), &layout(Scheme::Ulysses, tp), &train(tokens));
    let exchange = 7.0 / 8.0 * 2.0 * tokens / 8.0 * H as f64;
    near(c.forward.sent[0], 4.0 * exchange, "forward");
    near(c.backward_input.sent[0], 4.0 * exchange, "backward");
    let whole = cost(&m, &dense(), &Layout::WHOLE, &train(tokens));
    near(c.weights, whole.weights, "weights");
    near(c.weight_copies, 8.0, "copies");
    near(c.keep_bytes, whole.keep_bytes / 8.0, "kept");
    near(c.forward.flops, whole.forward.flops / 8.0, "operations");

    // Fewer heads of keys and values than ranks: each goes to every rank that needs it.
    let few = cost(&m, &attention(HEADS, 2, 0), &layout(Scheme::Ulysses, tp), &train(tokens));
    let kv = 7.0 / 8.0 * 2.0 * tokens / 8.0 * 8.0 * 128.0;
    near(few.forward.sent[0], 2.0 * exchange + 2.0 * kv, "shared heads");
}

#[test]
fn parts_of_a_layer_add_up() {
    let m = machine();
    for &scheme in Scheme::ALL {
        let l = layout(scheme, 4);
        for recompute in [Recompute::None, Recompute::Attention, Recompute::EveryOther] {
            let load = Load { recompute, ..train(4096.0) };
            let whole = cost(&m, &dense(), &l, &load);
            let sum = cost(&m, &attention(HEADS, HEADS, 0), &l, &load) + cost(&m, &feed_forward(), &l, &load);
            near(all_ns(&whole), all_ns(&sum), scheme.name());
            near(whole.weights, sum.weights, "weights");
        }
    }
}

#[test]
fn uneven_heads_take_what_the_fullest_rank_has() {
    let m = machine();
    for scheme in [Scheme::Megatron, Scheme::MegatronSequence, Scheme::Ulysses] {
        // 128 heads over 12 ranks: 11 on the fullest, as if there were 132.
        let l = layout(scheme, 12);
        let of = |heads| {
            let rows = [product("attention.qkv", RowCut::Col, H, 3 * 128 * heads), core(heads, heads, 0)];
            let share = Share::of(&rows, &l, 6144.0);
            [0, 1].map(|at| {
                row(&m, &rows, at, &share, &l, &train(6144.0), &ExpertLoad::NONE).forward.compute_ns
            })
        };
        let (uneven, even) = (of(128), of(132));
        near(uneven[1], even[1], scheme.name());
        if scheme == Scheme::Ulysses {
            assert!(uneven[0] < even[0], "its products are cut by tokens");
        } else {
            near(uneven[0], even[0], "the product before");
        }
    }
}

#[test]
fn recomputation_trades_memory_for_time() {
    let m = machine();
    let l = layout(Scheme::MegatronSequence, 8);
    let rows = [attention(HEADS, HEADS, 5), feed_forward()].concat();
    let of = |recompute| cost(&m, &rows, &l, &Load { recompute, ..train(4096.0) });
    let [none, some, every, full] =
        [Recompute::None, Recompute::Attention, Recompute::EveryOther, Recompute::Full].map(of);
    assert!(full.keep_bytes < some.keep_bytes && some.keep_bytes < none.keep_bytes);
    near(none.keep_bytes - some.keep_bytes, 5.0 * 4.0 * 4096.0 * 4096.0, "scores of four heads");
    near(every.keep_bytes, f64::midpoint(none.keep_bytes, full.keep_bytes), "half of the layers");
    near(full.keep_bytes, 2.0 * 4096.0 / 8.0 * H as f64, "the input alone");
    near(full.recompute.ns(), none.forward.ns(), "the whole forward pass again");
    near(every.recompute.ns(), none.forward.ns() / 2.0, "half of it");
    assert!(some.recompute.ns() > 0.0 && some.recompute.ns() < none.forward.ns() / 2.0);
    assert_eq!(some.recompute.sent, [0.0; 3]);
    near(full.working_bytes, none.keep_bytes, "one layer at a time is whole again");
}

#[test]
fn a_causal_ring_waits_for_its_last_piece_and_a_striped_one_does_not() {
    let m = machine();
    let load = train(65536.0);
    let of = |scheme| {
        let (rows, l) = (attention(HEADS, 8, 0), layout(scheme, 8));
        let share = Share::of(&rows, &l, load.tokens);
        (row(&m, &rows, 2, &share, &l, &load, &ExpertLoad::NONE).forward, cost(&m, &rows, &l, &load).forward)
    };
    let ((ring, whole), (striped, _)) = (of(Scheme::Ring), of(Scheme::Striped));
    near(striped.imbalance_ns, 0.0, "striped");
    near(ring.compute_ns, striped.compute_ns, "the mean rank");
    // The last of eight pieces sees 15/16 of all pairs, the mean piece half of them.
    let ratio = ring.imbalance_ns / ring.compute_ns;
    assert!((ratio - 0.875).abs() < 0.01, "{ratio}");
    // Seven blocks of keys and values, an eighth of the sequence each.
    near(whole.sent[0], 7.0 * 2.0 * 8192.0 * 8.0 * 256.0, "around the ring");
}

#[test]
fn a_decoding_ring_moves_queries_and_leaves_the_cache_where_it_lies() {
    let m = machine();
    let load = Load {
        tokens: 4.0,
        sequences: 4.0,
        keys: 131_072.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let of = |tp| {
        let l = layout(Scheme::Striped, tp);
        cost(&m, &[core(HEADS, 8, 0)], &l, &load).forward
    };
    let (alone, ring) = (of(1), of(8));
    // Four queries of all heads gathered; four results of all heads, with two f32 each, exchanged.
    near(ring.sent[0], 7.0 / 8.0 * 2.0 * 4.0 * 32.0 * (128.0 + 132.0), "sent");
    assert!(ring.compute_ns < alone.compute_ns / 4.0, "{} of {}", ring.compute_ns, alone.compute_ns);
    near(ring.imbalance_ns, 0.0, "even");
    // A prompt of its own has as many keys as queries: those travel.
    let prompt = Load {
        tokens: 8192.0,
        sequences: 1.0,
        keys: 8192.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let c = cost(&m, &[core(HEADS, 8, 0)], &layout(Scheme::Striped, 8), &prompt).forward;
    near(c.sent[0], 7.0 * 2.0 * 1024.0 * 8.0 * 256.0, "blocks");
}

#[test]
fn scores_of_rs_mm_ag_are_what_is_written_out() {
    let c = cost(&machine(), &dense(), &layout(Scheme::RsMmAg, 8), &train(4096.0));
    near(c.logits_bytes, 2.0 * 4096.0 * 4096.0 * 32.0, "scores");
    assert!(c.forward.sent[0] > 7.0 / 8.0 * c.logits_bytes);
    near(cost(&machine(), &dense(), &layout(Scheme::Megatron, 8), &train(4096.0)).logits_bytes, 0.0, "none");
}

#[test]
fn chunks_hide_transfers_only_where_they_keep_enough_rows() {
    let m = |tp: Hides| of(move |p| p.base.overlap.tp = tp);
    let l = layout(Scheme::MegatronSequence, 8);
    let exposed = |m: &Machine, tokens: f64| {
        let part = cost(m, &dense(), &l, &train(tokens)).forward;
        part.tp_exposed_ns / part.tp_ns
    };
    near(exposed(&m(Hides::Nothing), 8192.0), 1.0, "nothing hidden");
    near(exposed(&m(Hides::Backward), 8192.0), 1.0, "forward not hidden");
    assert!(exposed(&m(Hides::Chunks), 8192.0) < 0.8);
    near(exposed(&m(Hides::Chunks), 2047.0), 1.0, "one chunk only");
    let backward = |m: &Machine| cost(m, &dense(), &l, &train(8192.0)).backward().tp_exposed_ns;
    assert!(backward(&m(Hides::Backward)) < backward(&m(Hides::Nothing)));
    assert!(backward(&m(Hides::Chunks)) < backward(&m(Hides::Backward)));
}

#[test]
fn the_slowest_rank_of_the_experts_is_waited_for() {
    let m = machine();
    let l = Layout { ep: 8, ..Layout::WHOLE };
    let tokens = 4096.0;
    let of = |routing, wire| {
        let load = experts(256, 8, 8, 8.0 * tokens, routing, 0);
        (layer(&m, &routed(), &Layout { wire, ..l }, &train(tokens), &spans(&l), &load), load)
    };
    let (even, load) = of(Routing::Balanced, Precision::Bf16);
    near(even.forward.imbalance_ns, 0.0, "balanced");
    let bytes = dispatch_bytes(tokens, H, load.copies, Precision::Bf16);
    near(even.forward.sent[0], 2.0 * bytes, "dispatch and combine");
    let (skewed, load) = of(Routing::PowerLaw(1.2), Precision::Bf16);
    assert!(load.slowest > 1.2);
    let slower = (skewed.forward.compute_ns + skewed.forward.imbalance_ns) / even.forward.compute_ns;
    assert!(slower > 1.1 && slower <= load.slowest * 1.05, "{slower} at {}", load.slowest);
    // Narrow numbers one way, bf16 back: 1.03 and 2 bytes.
    let (narrow, load) = of(Routing::Balanced, Precision::Fp8);
    let sent = dispatch_bytes(tokens, H, load.copies, Precision::Fp8) + bytes;
    near(narrow.forward.sent[0], sent, "fp8 on the wire");
    assert!(narrow.forward.ep_ns < even.forward.ep_ns);
    near(even.expert_weights, 256.0 / 8.0 * 3.0 * 2048.0 * H as f64, "weights");
    near(even.weights, 0.0, "outside");
}

#[test]
fn a_memory_bound_row_gains_nothing_from_tp_unless_its_bytes_shrink() {
    let m = machine();
    let load = Load {
        tokens: 16.0,
        sequences: 16.0,
        keys: 32768.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let at = |heads: u64, kv_heads: u64, tp: u32| {
        let rows = attention(heads, kv_heads, 0);
        let l = layout(Scheme::Megatron, tp);
        let share = Share::of(&rows, &l, load.tokens);
        row(&m, &rows, 2, &share, &l, &load, &ExpertLoad::NONE)
    };
    // One head of keys and values lies on every rank.
    let (alone, eight) = (at(8, 1, 1), at(8, 1, 8));
    assert!(eight.bytes > 0.99 * alone.bytes);
    assert!(eight.forward.compute_ns > 0.95 * alone.forward.compute_ns);
    // Eight heads are dealt out.
    let (alone, eight) = (at(HEADS, 8, 1), at(HEADS, 8, 8));
    near(eight.bytes, alone.bytes / 8.0, "bytes");
    assert!(eight.forward.compute_ns < 0.2 * alone.forward.compute_ns);
}

#[test]
fn inference_keeps_nothing_and_has_no_backward_pass() {
    let load = Load {
        tokens: 64.0,
        sequences: 64.0,
        keys: 4096.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    for &scheme in Scheme::ALL {
        let c = cost(&machine(), &dense(), &layout(scheme, 4), &load);
        assert_eq!((c.keep_bytes, c.backward().ns(), c.backward().flops), (0.0, 0.0, 0.0));
        assert!(c.forward.ns() > 0.0 && c.working_bytes > 0.0);
    }
}

#[test]
fn a_better_machine_is_never_slower() {
    let base = clusters::named("gb200-nvl72").expect("a cluster");
    let edits: [fn(&mut tessera_mesh::Cluster); 5] = [
        |c| c.links[LinkClass::Domain as usize].bytes_per_s.value *= 1.5,
        |c| c.links[LinkClass::Out as usize].bytes_per_s.value *= 1.5,
        |c| c.links[LinkClass::Domain as usize].latency_ns.value *= 0.5,
        |c| c.device.memory_bytes_per_s.value *= 1.5,
        |c| {
            for f in c.device.flops_per_s.iter_mut().flatten() {
                f.value *= 1.5;
            }
        },
    ];
    for hides in Hides::ALL {
        let mut profile = Profile::named("megatron").expect("a profile");
        profile.base.overlap.tp = hides;
        let before = Machine::new(base.clone(), profile.clone());
        for edit in edits {
            let mut cluster = base.clone();
            edit(&mut cluster);
            let after = Machine::new(cluster, profile.clone());
            for &scheme in Scheme::ALL {
                for (tokens, tp) in
                    [1.0, 100.0, 3000.0, 40000.0].map(|t| [1, 2, 8, 12].map(|n| (t, n))).concat()
                {
                    let l = layout(scheme, tp);
                    let domains = if tp == 8 { 2 } else { 1 };
                    let spans = Spans { tp: Span { ranks: tp, domains }, ..spans(&l) };
                    let of = |m| all_ns(&layer(m, &dense(), &l, &train(tokens), &spans, &ExpertLoad::NONE));
                    let (a, b) = (of(&before), of(&after));
                    let name = scheme.name();
                    assert!(b <= a * (1.0 + 1e-12), "{name}, tp {tp}, {tokens} tokens: {a} then {b}");
                }
            }
        }
    }
}
