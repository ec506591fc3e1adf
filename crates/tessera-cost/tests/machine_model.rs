//! Properties of the cost model for any hardware numbers (better hardware is never slower, more
//! work is never faster, bytes are conserved, crossing domains never helps), and the accuracy of
//! its collectives against published times.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use proptest::prelude::*;
use tessera_cost::{Algorithm, AttentionWork, CollectiveOp, GroupSpan, MachineModel, Profile};
use tessera_mesh::{LinkClass, MemoryTier, Precision, catalog};

fn machine(cluster: &str, profile: &str) -> MachineModel {
    MachineModel::new(catalog::get(cluster).unwrap(), Profile::builtin(profile).unwrap())
}

fn any_machine() -> impl Strategy<Value = MachineModel> {
    let clusters = prop::sample::select(catalog::cluster_names().collect::<Vec<_>>());
    let profiles = prop::sample::select(Profile::builtin_names().collect::<Vec<_>>());
    (clusters, profiles, 1..5_u32, any::<bool>()).prop_map(|(c, p, racks, multicast)| {
        let mut cluster = catalog::get(c).unwrap().with_racks(racks);
        cluster.links[0].multicast = multicast;
        MachineModel::new(cluster, Profile::builtin(p).unwrap())
    })
}

/// Domains that divide the ranks.
fn any_span() -> impl Strategy<Value = GroupSpan> {
    (1..9_u32, 1..9_u32).prop_map(|(near, domains)| GroupSpan { ranks: near * domains, domains })
}

fn any_op() -> impl Strategy<Value = CollectiveOp> {
    prop::sample::select(CollectiveOp::ALL.to_vec())
}

fn bytes() -> impl Strategy<Value = f64> {
    (0.0..30.0_f64).prop_map(|x| x.exp2().ceil())
}

fn span_for(op: CollectiveOp, span: GroupSpan) -> GroupSpan {
    match op {
        CollectiveOp::SendRecv => GroupSpan { ranks: 2, domains: span.domains.min(2) },
        _ => span,
    }
}

proptest! {
    #[test]
    fn more_bandwidth_is_never_slower(
        m in any_machine(), op in any_op(), span in any_span(), b in bytes(), link in 0..2_usize, factor in 1.0..20.0_f64,
    ) {
        let span = span_for(op, span);
        let mut faster = m.cluster.clone();
        faster.links[link].bytes_per_s.value *= factor;
        let faster = MachineModel::new(faster, m.profile.clone());
        prop_assert!(faster.collective_cost(op, b, span).ns <= m.collective_cost(op, b, span).ns * (1.0 + 1e-12));
        let mut sooner = m.cluster.clone();
        sooner.links[link].latency_ns.value /= factor;
        let sooner = MachineModel::new(sooner, m.profile.clone());
        prop_assert!(sooner.collective_cost(op, b, span).ns <= m.collective_cost(op, b, span).ns * (1.0 + 1e-12));
    }

    #[test]
    fn more_bytes_are_never_faster(m in any_machine(), op in any_op(), span in any_span(), b in bytes(), factor in 1.0..9.0_f64) {
        let span = span_for(op, span);
        prop_assert!(m.collective_cost(op, b, span).ns <= m.collective_cost(op, b * factor, span).ns * (1.0 + 1e-12));
        for tier in MemoryTier::ALL {
            prop_assert!(m.tier_fetch_ns(tier, b) <= m.tier_fetch_ns(tier, b * factor));
        }
        prop_assert!(m.memory_bound_ns(b) <= m.memory_bound_ns(b * factor));
    }

    #[test]
    fn a_crossing_never_helps(m in any_machine(), op in any_op(), ranks in 2..65_u32, domains in 2..9_u32, b in bytes()) {
        let ranks = if op == CollectiveOp::SendRecv { 2 } else { ranks };
        let across = GroupSpan { ranks, domains: domains.min(ranks) };
        let within = GroupSpan { ranks, domains: 1 };
        prop_assert!(m.collective_cost(op, b, within).ns < m.collective_cost(op, b, across).ns);
        prop_assert_eq!(m.collective_cost(op, b, within).sent_bytes[LinkClass::Network as usize], 0.0);
    }

    #[test]
    fn bytes_are_conserved_per_algorithm_and_link(m in any_machine(), op in any_op(), span in any_span(), b in bytes()) {
        let span = span_for(op, span);
        prop_assume!(span.ranks > 1);
        let (n, d) = (f64::from(span.ranks), f64::from(span.domains));
        for algorithm in Algorithm::ALL {
            let Some(t) = m.collective_cost_with(algorithm, op, b, span) else { continue };
            let [near, far, host] = t.sent_bytes.map(|x| x * if op == CollectiveOp::SendRecv { 1.0 } else { n });
            prop_assert_eq!(host, 0.0);
            // Minimum bytes over all ranks: every rank's shard to every other rank once. Sums move
            // by shard too; an all-reduce moves shards twice.
            let once = (n - 1.0) * b;
            let (total, out) = match (op, algorithm) {
                (CollectiveOp::SendRecv, _) => (b, if d > 1.0 { b } else { 0.0 }),
                (CollectiveOp::AllReduce, Algorithm::OneShot) => (n * once, 0.0),
                (CollectiveOp::AllReduce, Algorithm::Switch) => (n * b, 0.0),
                (CollectiveOp::AllReduce, Algorithm::Tree) => (2.0 * once, 2.0 * (d - 1.0) * b),
                (CollectiveOp::AllReduce, Algorithm::Ring) => {
                    (2.0 * once, if d > 1.0 { 2.0 * d * (n - 1.0) / n * b } else { 0.0 })
                }
                (CollectiveOp::AllReduce, Algorithm::Direct) => (2.0 * once, 2.0 * (n - n / d) * b),
                (CollectiveOp::AllReduce, _) => (2.0 * once, 2.0 * (d - 1.0) * b),
                (CollectiveOp::AllGather | CollectiveOp::ReduceScatter, Algorithm::Ring) => {
                    (once, if d > 1.0 { d * (n - 1.0) / n * b } else { 0.0 })
                }
                (CollectiveOp::AllGather | CollectiveOp::ReduceScatter, Algorithm::Direct) => (once, (n - n / d) * b),
                (CollectiveOp::AllGather | CollectiveOp::ReduceScatter, _) => (once, (d - 1.0) * b),
                // Shards that change the domain also change the rank within the domain once.
                (CollectiveOp::AllToAll, Algorithm::Hierarchical) => ((n - d) * b + (n - n / d) * b, (n - n / d) * b),
                (CollectiveOp::AllToAll, _) => (once, (n - n / d) * b),
                (CollectiveOp::Broadcast, _) => (once, (d - 1.0) * b),
            };
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
            prop_assert!(close(near + far, total), "{algorithm:?}: {near} + {far} for {total}");
            if op != CollectiveOp::AllReduce || algorithm != Algorithm::Hierarchical {
                prop_assert!(close(far, out), "{algorithm:?}: {far} for {out} between domains");
            } else {
                // Between domains it may use a ring, which then has one rank per domain.
                prop_assert!(far <= 2.0 * d * b * (1.0 + 1e-9));
            }
        }
    }

    #[test]
    fn gemm_and_attention_times_grow_with_size(
        m in any_machine(), a in (1.0..5000.0_f64, 1.0..9000.0_f64, 1.0..9000.0_f64), dim in 0..3_usize, factor in 1.0..8.0_f64,
        p in prop::sample::select(Precision::ALL.to_vec()),
    ) {
        let mut b = [a.0, a.1, a.2];
        b[dim] *= factor;
        let less = m.gemm_ns(a.0, a.1, a.2, p);
        prop_assert!(less <= m.gemm_ns(b[0], b[1], b[2], p) * (1.0 + 1e-12));
        let curve = m.device_curves().gemm_curve(p);
        prop_assert!(curve.efficiency(a.0, a.1, a.2) <= curve.efficiency(b[0], b[1], b[2]) * (1.0 + 1e-12));
        prop_assert!(m.grouped_gemm_ns(8.0, a.0, a.1, a.2, p) <= m.grouped_gemm_ns(8.0, b[0], b[1], b[2], p) * (1.0 + 1e-12));
        let attention = |queries, keys, heads| {
            m.attention_ns(&AttentionWork {
                queries, keys, heads, kv_heads: 1.0, qk: 128.0, v: 128.0, causal: false, precision: p,
                key_bytes: 256.0 * p.element_bytes(),
            })
        };
        prop_assert!(attention(a.0, a.1, a.2) <= attention(b[0], b[1], b[2]) * (1.0 + 1e-12));
        let mut better = m.cluster.clone();
        better.device.memory_bytes_per_s.value *= factor;
        for peak in better.device.flops_per_s.iter_mut().flatten() {
            peak.value *= factor;
        }
        let better = MachineModel::new(better, m.profile.clone());
        prop_assert!(better.gemm_ns(a.0, a.1, a.2, p) <= less * (1.0 + 1e-12));
    }

    #[test]
    fn span_covers_the_worst_placed_group(ranks in 1..17_u32, stride in 1..17_u32, racks in 1..6_u32) {
        let cluster = catalog::get("hgx-h200").unwrap().with_racks(racks);
        let block = ranks * stride;
        let blocks = cluster.device_count() / block;
        prop_assume!(blocks > 0);
        let mut worst = 1;
        for start in (0..blocks).flat_map(|b| (0..stride).map(move |j| b * block + j)) {
            let mut domains: Vec<u32> = (0..ranks).map(|i| (start + i * stride) / cluster.domain_size).collect();
            domains.dedup();
            worst = worst.max(domains.len() as u32);
        }
        let span = GroupSpan::from_stride(ranks, stride, &cluster);
        prop_assert_eq!(span.ranks, ranks);
        prop_assert!(span.domains >= worst, "{:?} for {}", span, worst);
        // Exact if whole blocks fit and reach every position that they can take.
        if cluster.domain_size.is_multiple_of(block) || stride >= cluster.domain_size || block.is_multiple_of(cluster.domain_size) {
            prop_assert_eq!(span.domains, worst);
        }
    }
}

#[test]
fn within_a_rack_is_faster_at_every_size() {
    let m = MachineModel::new(
        catalog::get("gb200-nvl72").unwrap().with_racks(2),
        Profile::builtin("torch-2.11").unwrap(),
    );
    let mut size = 1024.0;
    while size <= 1024.0 * 1024.0 * 1024.0 {
        for ranks in [2, 8, 72] {
            let within = m.collective_cost(CollectiveOp::AllToAll, size, GroupSpan { ranks, domains: 1 });
            let across = m.collective_cost(CollectiveOp::AllToAll, size, GroupSpan { ranks, domains: 2 });
            assert!(within.ns < across.ns, "{size} bytes over {ranks}");
        }
        size *= 2.0;
    }
}

#[test]
fn two_levels_send_less_between_domains() {
    let m = machine("hgx-h200", "torch-2.11");
    let span = GroupSpan { ranks: 16, domains: 2 };
    let out =
        |a, op| m.collective_cost_with(a, op, 1e6, span).map(|t| t.sent_bytes[LinkClass::Network as usize]);
    for op in [CollectiveOp::AllReduce, CollectiveOp::AllGather, CollectiveOp::ReduceScatter] {
        let flat = out(Algorithm::Ring, op).unwrap();
        let levels = out(Algorithm::Hierarchical, op).unwrap();
        assert!(levels < flat, "{op:?}: {levels} for {flat}");
    }
}

#[test]
fn tree_for_small_ring_for_large_and_threshold_overrides() {
    let span = GroupSpan { ranks: 8, domains: 1 };
    let m = machine("hgx-h200", "tessera");
    let cost =
        |m: &MachineModel, a, b| m.collective_cost_with(a, CollectiveOp::AllReduce, b, span).unwrap().ns;
    assert!(cost(&m, Algorithm::Tree, 1e3) < cost(&m, Algorithm::Ring, 1e3));
    assert!(cost(&m, Algorithm::Ring, 1e9) < cost(&m, Algorithm::Tree, 1e9));
    let mut profile = m.profile.clone();
    let hopper = profile.families.get_mut("hopper").unwrap();
    hopper.library.all_reduce.ring_from_bytes = Some(1e6);
    let forced = MachineModel::new(m.cluster.clone(), profile);
    let tag = |b| forced.collective_cost(CollectiveOp::AllReduce, b, span).algorithm;
    assert_eq!((tag(1e6 - 1.0), tag(1e6)), (Algorithm::Tree, Algorithm::Ring));
}

/// Returns the error of an estimate against a published time, as a share.
fn relative_error(m: &MachineModel, op: CollectiveOp, bytes: f64, ranks: u32, domains: u32, us: f64) -> f64 {
    let priced = m.collective_cost(op, bytes, GroupSpan { ranks, domains }).ns;
    (priced / (us * 1e3) - 1.0).abs()
}

/// Returns a model with the fitted cost lines of NCCL, without the project's own algorithms.
fn nccl_machine(cluster: &str, racks: u32) -> MachineModel {
    let mut profile = Profile::builtin("tessera").unwrap();
    for curves in profile.families.values_mut() {
        curves.library.all_reduce.one_shot.clear();
        curves.library.all_reduce.direct.clear();
    }
    MachineModel::new(catalog::get(cluster).unwrap().with_racks(racks), profile)
}

#[test]
fn cost_lines_match_published_points_outside_the_fit() {
    const MIB: f64 = 1024.0 * 1024.0;
    let rate = |bytes: f64, busbw: f64, factor: f64| bytes * factor / busbw / 1e3;
    // H200, 4 devices at 512 MiB by their bus bandwidths: all-reduce 348, all-gather 317,
    // reduce-scatter 311, all-to-all 319.
    let m = nccl_machine("hgx-h200", 1);
    for (op, busbw, factor) in [
        (CollectiveOp::AllReduce, 348.0, 1.5),
        (CollectiveOp::AllGather, 317.0, 0.75),
        (CollectiveOp::ReduceScatter, 311.0, 0.75),
        (CollectiveOp::AllToAll, 319.0, 0.75),
    ] {
        let e = relative_error(&m, op, 512.0 * MIB, 4, 1, rate(512.0 * MIB, busbw, factor));
        assert!(e < 0.06, "{op:?}: {e}");
    }
    assert!(relative_error(&m, CollectiveOp::AllReduce, 4096.0, 4, 1, 9.5) < 0.1);
    // GB200, 4 devices: all-reduce 628, all-gather 564, all-to-all 488 GB/s at 512 MiB; 16.1, 12.0,
    // 10.8 µs at 4 KiB.
    let m = nccl_machine("gb200-nvl72", 1);
    for (op, busbw, factor, small) in [
        (CollectiveOp::AllReduce, 628.0, 1.5, 16.1),
        (CollectiveOp::AllGather, 564.0, 0.75, 12.0),
        (CollectiveOp::AllToAll, 488.0, 0.75, 10.8),
    ] {
        let e = relative_error(&m, op, 512.0 * MIB, 4, 1, rate(512.0 * MIB, busbw, factor));
        assert!(e < 0.08, "{op:?}: {e}");
        let e = relative_error(&m, op, 4096.0, 4, 1, small);
        assert!(e < 0.12, "{op:?}: {e}");
    }
    // All-to-alls of experts through NCCL: 4096 tokens of 7168 bf16 values to 8 of 256 experts, on
    // GB200 within a rack and on H100 hosts over InfiniBand.
    let bytes = 4096.0 * 8.0 * 7168.0 * 2.0;
    for (ranks, us) in [(8, 735.0), (16, 743.0), (32, 769.0), (64, 930.0)] {
        let e = relative_error(&m, CollectiveOp::AllToAll, bytes, ranks, 1, us);
        assert!(e < 0.15, "{ranks} ranks of a rack: {e}");
    }
    let m = nccl_machine("hgx-h100", 8);
    for (ranks, us) in [(8, 1265.0), (16, 5774.0), (32, 8059.0), (64, 9164.0)] {
        let e = relative_error(&m, CollectiveOp::AllToAll, bytes, ranks, ranks / 8, us);
        assert!(e < 0.05, "{ranks} ranks of hosts: {e}");
    }
}

#[test]
fn switch_reduction_matches_a_full_rack() {
    let gib = 1024.0 * 1024.0 * 1024.0;
    let mut m = nccl_machine("gb200-nvl72", 1);
    let plain = m.collective_cost(CollectiveOp::AllReduce, 8.0 * gib, GroupSpan { ranks: 72, domains: 1 });
    m.cluster.links[0].multicast = true;
    let m = MachineModel::new(m.cluster, m.profile);
    let span = GroupSpan { ranks: 72, domains: 1 };
    let t = m.collective_cost(CollectiveOp::AllReduce, 8.0 * gib, span);
    assert_eq!(t.algorithm, Algorithm::Switch);
    assert!(t.ns < plain.ns && plain.algorithm == Algorithm::Ring);
    // Bus bandwidths over 72 ranks; the hop time is fitted to the first. Sizes are 512 MiB, 1, 2,
    // 4, 8 GiB.
    for (size, busbw, bar) in
        [(0.5, 586.0, 0.02), (1.0, 681.0, 0.02), (2.0, 758.0, 0.02), (4.0, 839.0, 0.05), (8.0, 840.0, 0.03)]
    {
        let us = size * gib * 2.0 * 71.0 / 72.0 / busbw / 1e3;
        let e = relative_error(&m, CollectiveOp::AllReduce, size * gib, 72, 1, us);
        assert!(e < bar, "{size} GiB: {e}");
    }
}

#[test]
fn a_device_without_units_for_a_format_computes_at_the_next_wider() {
    let m = machine("hgx-a100", "megatron");
    assert_eq!(m.compute_precision(Precision::Fp4), Precision::Bf16);
    assert_eq!(m.flops_per_s(Precision::Fp8), 312e12);
    assert_eq!(machine("laptop", "tessera").compute_precision(Precision::Bf16), Precision::F32);
    assert_eq!(machine("gb200-nvl72", "torch-2.11").compute_precision(Precision::Fp4), Precision::Fp4);
    // Few rows still read weights of half the bytes in half the time.
    let m = machine("hgx-a100", "torch-2.11");
    assert!(m.gemm_ns(1.0, 8192.0, 8192.0, Precision::Fp8) < m.gemm_ns(1.0, 8192.0, 8192.0, Precision::Bf16));
}
