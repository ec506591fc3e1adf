//! Layers under every layout: bytes sent, slowest ranks, kept and recomputed activations, and the
//! effect of overlap.

use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, Routing, dispatch_bytes, expert_load};
use tessera_cost::op_cost::{RankShare, op_cost};
use tessera_cost::params::{LayerLayout, Recompute, TpScheme};
use tessera_cost::profile::TpOverlap;
use tessera_cost::{GroupSpan, MachineModel, Profile};
use tessera_ir::analytic_model::{LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::{LinkClass, Precision, catalog};

const H: u64 = 4096;
const HEADS: u64 = 32;

fn matmul_op(name: &'static str, cut: OpSharding, k: u64, n: u64) -> LayerOp {
    LayerOp { name, kind: LayerOpKind::Matmul { k, n, bias: false }, sharding: cut, activation_bytes: 2 * k }
}

fn elementwise_op(cut: OpSharding, reads: u64, writes: u64) -> LayerOp {
    LayerOp {
        name: "pass",
        kind: LayerOpKind::Elementwise { reads, writes, weights: 0 },
        sharding: cut,
        activation_bytes: 2 * reads,
    }
}

fn attention_op(heads: u64, kv_heads: u64, scores_bytes: u64) -> LayerOp {
    let op = LayerOpKind::Attention {
        heads,
        kv_heads,
        qk: 128,
        v: 128,
        cache_width: 256 * kv_heads,
        causal: true,
        stored_score_bytes: scores_bytes,
        latent: None,
    };
    LayerOp {
        name: "attention.core",
        kind: op,
        sharding: OpSharding::Heads,
        activation_bytes: 2 * 128 * (heads + 2 * kv_heads),
    }
}

fn attention_block(heads: u64, kv_heads: u64, scores_bytes: u64) -> Vec<LayerOp> {
    vec![
        elementwise_op(OpSharding::Replicated, H, H),
        matmul_op("attention.qkv", OpSharding::Col, H, 128 * (heads + 2 * kv_heads)),
        attention_op(heads, kv_heads, scores_bytes),
        matmul_op("attention.out", OpSharding::Row, 128 * heads, H),
        elementwise_op(OpSharding::Replicated, 2 * H, H),
    ]
}

fn feed_forward() -> Vec<LayerOp> {
    vec![
        elementwise_op(OpSharding::Replicated, H, H),
        matmul_op("mlp.up", OpSharding::Col, H, 4 * H),
        elementwise_op(OpSharding::Heads, 4 * H, 4 * H),
        matmul_op("mlp.down", OpSharding::Row, 4 * H, H),
        elementwise_op(OpSharding::Replicated, 2 * H, H),
    ]
}

fn dense_layer() -> Vec<LayerOp> {
    [attention_block(HEADS, HEADS, 0), feed_forward()].concat()
}

fn routed_experts() -> Vec<LayerOp> {
    let kind = LayerOpKind::Experts { experts: 256, top_k: 8, k: H, n: 2048, matrices: 3 };
    vec![
        LayerOp {
            name: "experts.ffn",
            kind,
            sharding: OpSharding::Experts,
            activation_bytes: 8 * (2 * H + 2 * 2048),
        },
        elementwise_op(OpSharding::Experts, 8 * 4096, 8 * 2048),
    ]
}

fn machine() -> MachineModel {
    machine_with(|_| {})
}

fn machine_with(edit: impl Fn(&mut Profile)) -> MachineModel {
    let mut profile = Profile::builtin("megatron").expect("a profile");
    edit(&mut profile);
    MachineModel::new(catalog::get("gb200-nvl72").expect("a cluster"), profile)
}

fn layout(scheme: TpScheme, tp: u32) -> LayerLayout {
    let ring = if matches!(scheme, TpScheme::Ring | TpScheme::Striped) { tp } else { 1 };
    LayerLayout { tp, scheme, ring, ..LayerLayout::SINGLE_RANK }
}

fn spans(l: &LayerLayout) -> GroupSpans {
    let span_of = |ranks| GroupSpan { ranks, domains: 1 };
    GroupSpans { tp: span_of(l.tp), ep: span_of(l.ep), expert_tp: span_of(l.expert_tp) }
}

fn training_load(tokens: f64) -> LayerLoad {
    LayerLoad {
        tokens,
        sequences: 1.0,
        keys: tokens,
        window: None,
        training: true,
        recompute: Recompute::None,
    }
}

fn cost_of(m: &MachineModel, rows: &[LayerOp], l: &LayerLayout, load: &LayerLoad) -> LayerCost {
    layer_cost(m, rows, l, load, &spans(l), &ExpertLoad::NONE)
}

fn all_ns(c: &LayerCost) -> f64 {
    c.forward.total_ns() + c.backward_total().total_ns()
}

fn assert_close(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0), "{what}: {a} and {b}");
}

#[test]
fn megatron_sends_two_all_reduces_each_way_and_sequence_parallel_as_many_bytes() {
    let (m, tokens, tp) = (machine(), 8192.0, 8);
    let c = cost_of(&m, &dense_layer(), &layout(TpScheme::Megatron, tp), &training_load(tokens));
    let all_reduce = 2.0 * 7.0 / 8.0 * 2.0 * tokens * H as f64;
    assert_close(c.forward.sent_bytes[0], 2.0 * all_reduce, "forward");
    assert_close((c.backward_input + c.backward_weight).sent_bytes[0], 2.0 * all_reduce, "backward");

    let s = cost_of(&m, &dense_layer(), &layout(TpScheme::MegatronSequence, tp), &training_load(tokens));
    assert_close(s.forward.sent_bytes[0], c.forward.sent_bytes[0], "gathered and scattered");
    // Inputs of column-parallel matmuls are gathered once more.
    assert_close((s.backward_input + s.backward_weight).sent_bytes[0], 3.0 * all_reduce, "backward, divided");
    assert!(s.forward.memory_ns < c.forward.memory_ns && s.kept_bytes < c.kept_bytes);
}

#[test]
fn ulysses_sends_four_exchanges_and_keeps_whole_weights() {
    let (m, tokens, tp) = (machine(), 8192.0, 8);
    let c = cost_of(&m, &dense_layer(), &layout(TpScheme::Ulysses, tp), &training_load(tokens));
    let exchange = 7.0 / 8.0 * 2.0 * tokens / 8.0 * H as f64;
    assert_close(c.forward.sent_bytes[0], 4.0 * exchange, "forward");
    assert_close(c.backward_input.sent_bytes[0], 4.0 * exchange, "backward");
    let whole = cost_of(&m, &dense_layer(), &LayerLayout::SINGLE_RANK, &training_load(tokens));
    assert_close(c.weights, whole.weights, "weights");
    assert_close(c.weight_replicas, 8.0, "copies");
    assert_close(c.kept_bytes, whole.kept_bytes / 8.0, "kept");
    assert_close(c.forward.flops, whole.forward.flops / 8.0, "operations");

    // With fewer KV heads than ranks, each head goes to every rank that needs it.
    let few =
        cost_of(&m, &attention_block(HEADS, 2, 0), &layout(TpScheme::Ulysses, tp), &training_load(tokens));
    let kv = 7.0 / 8.0 * 2.0 * tokens / 8.0 * 8.0 * 128.0;
    assert_close(few.forward.sent_bytes[0], 2.0 * exchange + 2.0 * kv, "shared heads");
}

#[test]
fn parts_of_a_layer_add_up() {
    let m = machine();
    for scheme in TpScheme::ALL {
        let l = layout(scheme, 4);
        for recompute in [Recompute::None, Recompute::Attention, Recompute::EveryOther] {
            let load = LayerLoad { recompute, ..training_load(4096.0) };
            let whole = cost_of(&m, &dense_layer(), &l, &load);
            let sum = cost_of(&m, &attention_block(HEADS, HEADS, 0), &l, &load)
                + cost_of(&m, &feed_forward(), &l, &load);
            assert_close(all_ns(&whole), all_ns(&sum), scheme.name());
            assert_close(whole.weights, sum.weights, "weights");
        }
    }
}

#[test]
fn uneven_heads_take_what_the_fullest_rank_has() {
    let m = machine();
    for scheme in [TpScheme::Megatron, TpScheme::MegatronSequence, TpScheme::Ulysses] {
        // 128 heads over 12 ranks: the fullest rank has 11, as with 132 heads.
        let l = layout(scheme, 12);
        let of = |heads| {
            let rows = [
                matmul_op("attention.qkv", OpSharding::Col, H, 3 * 128 * heads),
                attention_op(heads, heads, 0),
            ];
            let share = RankShare::for_layer(&rows, &l, 6144.0);
            [0, 1].map(|at| {
                op_cost(&m, &rows, at, &share, &l, &training_load(6144.0), &ExpertLoad::NONE)
                    .forward
                    .compute_ns
            })
        };
        let (uneven, even) = (of(128), of(132));
        assert_close(uneven[1], even[1], scheme.name());
        if scheme == TpScheme::Ulysses {
            assert!(uneven[0] < even[0], "Ulysses shards its matmuls by tokens");
        } else {
            assert_close(uneven[0], even[0], "the matmul before");
        }
    }
}

#[test]
fn recomputation_trades_memory_for_time() {
    let m = machine();
    let l = layout(TpScheme::MegatronSequence, 8);
    let rows = [attention_block(HEADS, HEADS, 5), feed_forward()].concat();
    let of = |recompute| cost_of(&m, &rows, &l, &LayerLoad { recompute, ..training_load(4096.0) });
    let [none, some, every, full] =
        [Recompute::None, Recompute::Attention, Recompute::EveryOther, Recompute::Full].map(of);
    assert!(full.kept_bytes < some.kept_bytes && some.kept_bytes < none.kept_bytes);
    assert_close(none.kept_bytes - some.kept_bytes, 5.0 * 4.0 * 4096.0 * 4096.0, "scores of four heads");
    assert_close(every.kept_bytes, f64::midpoint(none.kept_bytes, full.kept_bytes), "half of the layers");
    assert_close(full.kept_bytes, 2.0 * 4096.0 / 8.0 * H as f64, "the input alone");
    assert_close(full.recompute.total_ns(), none.forward.total_ns(), "the whole forward pass again");
    assert_close(every.recompute.total_ns(), none.forward.total_ns() / 2.0, "half of it");
    assert!(some.recompute.total_ns() > 0.0 && some.recompute.total_ns() < none.forward.total_ns() / 2.0);
    assert_eq!(some.recompute.sent_bytes, [0.0; 3]);
    assert_close(full.working_bytes, none.kept_bytes, "one layer at a time holds all activations again");
}

#[test]
fn a_causal_ring_waits_for_its_last_piece_and_a_striped_one_does_not() {
    let m = machine();
    let load = training_load(65536.0);
    let of = |scheme| {
        let (rows, l) = (attention_block(HEADS, 8, 0), layout(scheme, 8));
        let share = RankShare::for_layer(&rows, &l, load.tokens);
        (
            op_cost(&m, &rows, 2, &share, &l, &load, &ExpertLoad::NONE).forward,
            cost_of(&m, &rows, &l, &load).forward,
        )
    };
    let ((ring, whole), (striped, _)) = (of(TpScheme::Ring), of(TpScheme::Striped));
    assert_close(striped.imbalance_ns, 0.0, "striped");
    assert_close(ring.compute_ns, striped.compute_ns, "the mean rank");
    // The last of eight shards attends to 15/16 of all pairs, the mean shard to half of them.
    let ratio = ring.imbalance_ns / ring.compute_ns;
    assert!((ratio - 0.875).abs() < 0.01, "{ratio}");
    // Seven blocks of keys and values, an eighth of the sequence each.
    assert_close(whole.sent_bytes[0], 7.0 * 2.0 * 8192.0 * 8.0 * 256.0, "around the ring");
}

#[test]
fn a_decoding_ring_moves_queries_and_leaves_the_cache_where_it_lies() {
    let m = machine();
    let load = LayerLoad {
        tokens: 4.0,
        sequences: 4.0,
        keys: 131_072.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let of = |tp| {
        let l = layout(TpScheme::Striped, tp);
        cost_of(&m, &[attention_op(HEADS, 8, 0)], &l, &load).forward
    };
    let (alone, ring) = (of(1), of(8));
    // Four queries of all heads are gathered; four results of all heads, with two f32 each, are
    // exchanged.
    assert_close(ring.sent_bytes[0], 7.0 / 8.0 * 2.0 * 4.0 * 32.0 * (128.0 + 132.0), "sent");
    assert!(ring.compute_ns < alone.compute_ns / 4.0, "{} of {}", ring.compute_ns, alone.compute_ns);
    assert_close(ring.imbalance_ns, 0.0, "even");
    // A new prompt has as many keys as queries, so keys travel.
    let prompt = LayerLoad {
        tokens: 8192.0,
        sequences: 1.0,
        keys: 8192.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let c = cost_of(&m, &[attention_op(HEADS, 8, 0)], &layout(TpScheme::Striped, 8), &prompt).forward;
    assert_close(c.sent_bytes[0], 7.0 * 2.0 * 1024.0 * 8.0 * 256.0, "blocks");
}

#[test]
fn scores_of_rs_mm_ag_are_what_is_written_out() {
    let c = cost_of(&machine(), &dense_layer(), &layout(TpScheme::RsMmAg, 8), &training_load(4096.0));
    assert_close(c.written_score_bytes, 2.0 * 4096.0 * 4096.0 * 32.0, "scores");
    assert!(c.forward.sent_bytes[0] > 7.0 / 8.0 * c.written_score_bytes);
    assert_close(
        cost_of(&machine(), &dense_layer(), &layout(TpScheme::Megatron, 8), &training_load(4096.0))
            .written_score_bytes,
        0.0,
        "none",
    );
}

#[test]
fn chunks_hide_transfers_only_where_they_keep_enough_rows() {
    let m = |tp: TpOverlap| machine_with(move |p| p.base.overlap.tp = tp);
    let l = layout(TpScheme::MegatronSequence, 8);
    let exposed = |m: &MachineModel, tokens: f64| {
        let part = cost_of(m, &dense_layer(), &l, &training_load(tokens)).forward;
        part.tp_exposed_ns / part.tp_ns
    };
    assert_close(exposed(&m(TpOverlap::Nothing), 8192.0), 1.0, "nothing hidden");
    assert_close(exposed(&m(TpOverlap::Backward), 8192.0), 1.0, "forward not hidden");
    assert!(exposed(&m(TpOverlap::Chunks), 8192.0) < 0.8);
    assert_close(exposed(&m(TpOverlap::Chunks), 2047.0), 1.0, "one chunk only");
    let backward = |m: &MachineModel| {
        cost_of(m, &dense_layer(), &l, &training_load(8192.0)).backward_total().tp_exposed_ns
    };
    assert!(backward(&m(TpOverlap::Backward)) < backward(&m(TpOverlap::Nothing)));
    assert!(backward(&m(TpOverlap::Chunks)) < backward(&m(TpOverlap::Backward)));
}

#[test]
fn the_slowest_rank_of_the_experts_is_waited_for() {
    let m = machine();
    let l = LayerLayout { ep: 8, ..LayerLayout::SINGLE_RANK };
    let tokens = 4096.0;
    let of = |routing, wire| {
        let load = expert_load(256, 8, 8, 8.0 * tokens, routing, 0);
        (
            layer_cost(
                &m,
                &routed_experts(),
                &LayerLayout { wire_precision: wire, ..l },
                &training_load(tokens),
                &spans(&l),
                &load,
            ),
            load,
        )
    };
    let (even, load) = of(Routing::Balanced, Precision::Bf16);
    assert_close(even.forward.imbalance_ns, 0.0, "balanced");
    let bytes = dispatch_bytes(tokens, H, load.remote_copies, Precision::Bf16);
    assert_close(even.forward.sent_bytes[0], 2.0 * bytes, "dispatch and combine");
    let (skewed, load) = of(Routing::PowerLaw(1.2), Precision::Bf16);
    assert!(load.slowest_over_mean > 1.2);
    let slower = (skewed.forward.compute_ns + skewed.forward.imbalance_ns) / even.forward.compute_ns;
    assert!(
        slower > 1.1 && slower <= load.slowest_over_mean * 1.05,
        "{slower} at {}",
        load.slowest_over_mean
    );
    // Narrow values one way, bf16 back: 1.03 and 2 bytes.
    let (narrow, load) = of(Routing::Balanced, Precision::Fp8);
    let sent = dispatch_bytes(tokens, H, load.remote_copies, Precision::Fp8) + bytes;
    assert_close(narrow.forward.sent_bytes[0], sent, "fp8 on the wire");
    assert!(narrow.forward.ep_ns < even.forward.ep_ns);
    assert_close(even.expert_weights, 256.0 / 8.0 * 3.0 * 2048.0 * H as f64, "weights");
    assert_close(even.weights, 0.0, "outside");
}

// proves: V-10
#[test]
fn a_memory_bound_row_gains_nothing_from_tp_unless_its_bytes_shrink() {
    let m = machine();
    let load = LayerLoad {
        tokens: 16.0,
        sequences: 16.0,
        keys: 32768.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    let at = |heads: u64, kv_heads: u64, tp: u32| {
        let rows = attention_block(heads, kv_heads, 0);
        let l = layout(TpScheme::Megatron, tp);
        let share = RankShare::for_layer(&rows, &l, load.tokens);
        op_cost(&m, &rows, 2, &share, &l, &load, &ExpertLoad::NONE)
    };
    // The only KV head lies on every rank.
    let (alone, eight) = (at(8, 1, 1), at(8, 1, 8));
    assert!(eight.traffic_bytes > 0.99 * alone.traffic_bytes);
    assert!(eight.forward.compute_ns > 0.95 * alone.forward.compute_ns);
    // Eight KV heads are distributed.
    let (alone, eight) = (at(HEADS, 8, 1), at(HEADS, 8, 8));
    assert_close(eight.traffic_bytes, alone.traffic_bytes / 8.0, "bytes");
    assert!(eight.forward.compute_ns < 0.2 * alone.forward.compute_ns);
}

#[test]
fn inference_keeps_nothing_and_has_no_backward_pass() {
    let load = LayerLoad {
        tokens: 64.0,
        sequences: 64.0,
        keys: 4096.0,
        window: None,
        training: false,
        recompute: Recompute::None,
    };
    for scheme in TpScheme::ALL {
        let c = cost_of(&machine(), &dense_layer(), &layout(scheme, 4), &load);
        assert_eq!((c.kept_bytes, c.backward_total().total_ns(), c.backward_total().flops), (0.0, 0.0, 0.0));
        assert!(c.forward.total_ns() > 0.0 && c.working_bytes > 0.0);
    }
}

#[test]
fn a_better_machine_is_never_slower() {
    let base = catalog::get("gb200-nvl72").expect("a cluster");
    let edits: [fn(&mut tessera_mesh::Cluster); 5] = [
        |c| c.links[LinkClass::Domain as usize].bytes_per_s.value *= 1.5,
        |c| c.links[LinkClass::Network as usize].bytes_per_s.value *= 1.5,
        |c| c.links[LinkClass::Domain as usize].latency_ns.value *= 0.5,
        |c| c.device.memory_bytes_per_s.value *= 1.5,
        |c| {
            for f in c.device.flops_per_s.iter_mut().flatten() {
                f.value *= 1.5;
            }
        },
    ];
    for hides in TpOverlap::ALL {
        let mut profile = Profile::builtin("megatron").expect("a profile");
        profile.base.overlap.tp = hides;
        let before = MachineModel::new(base.clone(), profile.clone());
        for edit in edits {
            let mut cluster = base.clone();
            edit(&mut cluster);
            let after = MachineModel::new(cluster, profile.clone());
            for scheme in TpScheme::ALL {
                for (tokens, tp) in
                    [1.0, 100.0, 3000.0, 40000.0].map(|t| [1, 2, 8, 12].map(|n| (t, n))).concat()
                {
                    let l = layout(scheme, tp);
                    let domains = if tp == 8 { 2 } else { 1 };
                    let spans = GroupSpans { tp: GroupSpan { ranks: tp, domains }, ..spans(&l) };
                    let of = |m| {
                        all_ns(&layer_cost(
                            m,
                            &dense_layer(),
                            &l,
                            &training_load(tokens),
                            &spans,
                            &ExpertLoad::NONE,
                        ))
                    };
                    let (a, b) = (of(&before), of(&after));
                    let name = scheme.name();
                    assert!(b <= a * (1.0 + 1e-12), "{name}, tp {tp}, {tokens} tokens: {a} then {b}");
                }
            }
        }
    }
}
