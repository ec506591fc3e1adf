//! Closed-form expert loads against sampled routings.

use tessera_base::random::Rng;
use tessera_cost::moe::{Routing, expert_load, expert_popularity};
use tessera_mesh::split_units;

/// Means over sampled routings.
struct SampledLoad {
    slowest: f64,
    dropped: f64,
    active: f64,
    copies: f64,
    std_over_mean: f64,
}

/// Samples `trials` batches. Each batch deals popularities to ranks anew and selects `top_k`
/// different experts per token, expert e with exactly its probability (systematic sampling along a
/// shuffled order).
fn sample_load(
    (count, top_k, ep): (u64, u64, u32),
    tokens: u64,
    routing: Routing,
    capacity_pct: u32,
    trials: u32,
) -> SampledLoad {
    let mut rng = Rng::new(7, [1, 0]);
    let mut asked = expert_popularity(count, top_k, ep, tokens as f64, routing, 0);
    let rank_of: Vec<usize> =
        (0..ep).flat_map(|r| std::iter::repeat_n(r as usize, split_units(count, ep, r).1 as usize)).collect();
    let n = count as usize;
    let even = tokens as f64 * top_k as f64 / count as f64;
    let capacity =
        if capacity_pct == 0 { u64::MAX } else { (even * f64::from(capacity_pct) / 100.0).ceil() as u64 };
    let mut sum = SampledLoad { slowest: 0.0, dropped: 0.0, active: 0.0, copies: 0.0, std_over_mean: 0.0 };
    for _ in 0..trials {
        shuffle(&mut rng, &mut asked);
        let mut order: Vec<usize> = (0..n).collect();
        shuffle(&mut rng, &mut order);
        let mut rows = vec![0u64; n];
        let mut reached = 0u64;
        for token in 0..tokens {
            if token % 8 == 0 {
                shuffle(&mut rng, &mut order);
            }
            let mut next = f64::from(rng.next_u32()) / 4_294_967_296.0;
            let (mut passed, mut seen) = (0.0, 0u128);
            for e in &order {
                passed += asked[*e];
                if passed > next {
                    next += 1.0;
                    rows[*e] += 1;
                    seen |= u128::from(rows[*e] <= capacity) << rank_of[*e];
                }
            }
            reached += u64::from(seen.count_ones());
        }
        let kept: Vec<f64> = rows.iter().map(|r| (*r).min(capacity) as f64).collect();
        let mut ranks = vec![(0.0, 0.0); ep as usize];
        for (e, k) in kept.iter().enumerate() {
            ranks[rank_of[e]].0 += k;
            ranks[rank_of[e]].1 += f64::from(u8::from(*k > 0.0));
        }
        let total: f64 = kept.iter().sum();
        let most = ranks.iter().copied().reduce(|a, b| if b.0 > a.0 { b } else { a }).unwrap_or_default();
        sum.slowest += most.0 * f64::from(ep) / total;
        sum.dropped += 1.0 - total / (tokens * top_k) as f64;
        sum.active += most.1;
        sum.copies += reached as f64 / tokens as f64 * f64::from(ep - 1) / f64::from(ep);
        let variance = rows.iter().map(|r| (*r as f64 - even).powi(2)).sum::<f64>() / count as f64;
        sum.std_over_mean += variance.sqrt() / even;
    }
    let mean = |x: f64| x / f64::from(trials);
    SampledLoad {
        slowest: mean(sum.slowest),
        dropped: mean(sum.dropped),
        active: mean(sum.active),
        copies: mean(sum.copies),
        std_over_mean: mean(sum.std_over_mean),
    }
}

fn shuffle<T>(rng: &mut Rng, list: &mut [T]) {
    for i in (1..list.len()).rev() {
        list.swap(i, rng.next_below(i + 1));
    }
}

#[test]
fn closed_forms_agree_with_sampled_routings() {
    let power = Routing::PowerLaw(1.2);
    let cases = [
        ((256, 8, 8), 1024, Routing::Random, 0),
        ((256, 8, 32), 256, Routing::Random, 0),
        ((256, 8, 32), 8, Routing::Random, 0),
        ((256, 8, 64), 1, Routing::Random, 0),
        ((8, 2, 8), 64, Routing::Random, 125),
        ((256, 8, 8), 512, Routing::Random, 110),
        ((128, 8, 8), 1024, power, 0),
        ((256, 8, 32), 1024, power, 0),
        ((256, 8, 64), 1024, power, 0),
        ((256, 8, 32), 64, power, 0),
        ((256, 8, 32), 512, power, 125),
        ((256, 8, 32), 1024, Routing::PowerLaw(1.01), 0),
        ((100, 4, 9), 512, power, 0),
    ];
    for (shape, tokens, routing, pct) in cases {
        let trials = (240_000 / (tokens * shape.0)).clamp(24, 800) as u32;
        let drawn = sample_load(shape, tokens, routing, pct, trials);
        let load = expert_load(shape.0, shape.1, shape.2, tokens as f64, routing, pct);
        let pairs = [
            ("slowest", load.slowest_over_mean, drawn.slowest, 0.06),
            ("dropped", 1.0 + load.dropped, 1.0 + drawn.dropped, 0.003),
            ("active", load.active_experts, drawn.active, 0.12),
            ("copies", load.remote_copies, drawn.copies, 0.07),
            ("std/mean", load.std_over_mean, drawn.std_over_mean, 0.06),
        ];
        for (what, closed, drawn, within) in pairs {
            let off = closed / drawn - 1.0;
            println!(
                "{shape:?} {tokens} {} {pct} {what}: {closed:.4} drawn {drawn:.4} ({:+.1} %)",
                routing.name(),
                off * 100.0
            );
            assert!(
                off.abs() < within,
                "{shape:?} {tokens} {} {pct} {what}: {closed} {drawn}",
                routing.name()
            );
        }
    }
}

#[test]
fn published_spread_of_even_routers() {
    // sqrt(E / kT) for balls in bins: 17.7 % at 128 tokens of 8 ranks, 3.1 % at 4096. A token's
    // experts are distinct, which reduces the spread by a factor of sqrt(1 - k/E).
    for (tokens, published) in [(1024.0, 0.1768), (32768.0, 0.03125)] {
        let load = expert_load(256, 8, 8, tokens, Routing::Random, 0);
        let distinct = (1.0f64 - 8.0 / 256.0).sqrt();
        assert!((load.std_over_mean / (published * distinct) - 1.0).abs() < 1e-3, "{load:?}");
        assert!((load.std_over_mean / published - 1.0).abs() < 0.02, "{load:?}");
        // Each rank sums 32 experts.
        assert!(
            (load.rank_std_over_mean / load.std_over_mean * 32.0f64.sqrt() - 1.0).abs() < 0.08,
            "{load:?}"
        );
    }
    let load = expert_load(256, 8, 8, 32768.0, Routing::Random, 0);
    assert!((load.remote_copies * 8.0 / 7.0 - 5.295).abs() < 1e-3, "{load:?}");
}

#[test]
fn published_imbalance_of_a_power_law() {
    // Times of grouped GEMMs on H200 (256 experts, top 8, NVIDIA's collection for TensorRT-LLM)
    // under alpha 1.2 over even ones, one sampled routing each. At a constant rate time equals
    // load. The load of one sample varies widely, and a plan should use the mean.
    let mut dice = Rng::new(11, [4, 0]);
    for (ep, tokens, time) in [(8usize, 4096.0, 1.80), (32, 4096.0, 2.84), (32, 8192.0, 4.0)] {
        let range = 0.8f64 * tokens;
        let mut drawn: Vec<f64> = (0..1000)
            .map(|_| {
                let mut rows = vec![0.0f64; ep];
                for e in 0..256 {
                    let u = f64::from(dice.next_u32()) / 4_294_967_296.0;
                    rows[e * ep / 256] += (1.0 + (range.powf(-0.2) - 1.0) * u).powi(-5);
                }
                rows.iter().copied().fold(0.0, f64::max) * ep as f64 / rows.iter().sum::<f64>()
            })
            .collect();
        drawn.sort_by(f64::total_cmp);
        let mean = drawn.iter().sum::<f64>() / 1000.0;
        let load = expert_load(256, 8, ep as u32, tokens, Routing::PowerLaw(1.2), 0).slowest_over_mean;
        println!(
            "ep {ep}, {tokens} tokens: load {load:.2}, drawn {mean:.2} ({:.2} to {:.2}), published time {time}",
            drawn[50], drawn[950]
        );
        assert!((load / mean - 1.0).abs() < 0.04, "{ep} {tokens}: {load} {mean}");
        assert!(drawn[50] < time && time < drawn[950], "{ep} {tokens}: {} {}", drawn[50], drawn[950]);
    }
}

#[test]
fn workloads_are_exact() {
    let load = |n, ep| expert_load(256, 8, ep, 32768.0, Routing::Workload(n), 0);
    assert_eq!(load(0, 8), expert_load(256, 8, 8, 32768.0, Routing::Balanced, 0));
    assert_eq!((load(0, 8).slowest_over_mean, load(0, 8).std_over_mean), (1.0, 0.0));
    // 8 of 256 experts at 16: 376 parts, of which the first of 8 ranks has 8·16 + 24.
    assert!((load(1, 8).slowest_over_mean - 152.0 / 376.0 * 8.0).abs() < 1e-3);
    // One of 8 ranks at 4: 4 parts of 11.
    assert!((load(2, 8).slowest_over_mean - 32.0 / 11.0).abs() < 1e-3);
    assert_eq!(load(2, 8), load(6, 8));
    assert!((load(3, 8).slowest_over_mean - 1.0).abs() < 1e-3 && load(3, 8).std_over_mean > 1.0);
    assert!(
        (load(4, 8).slowest_over_mean - 1.0).abs() < 1e-3
            && (load(4, 8).busiest_over_mean - 16.0 / 9.0).abs() < 1e-9
    );
    assert!((load(5, 8).slowest_over_mean - 8.0 / 7.0).abs() < 1e-3);
    // 8 experts at 64: 760 parts, 512 + 24 on the first rank, one step in eight.
    assert!((load(7, 8).slowest_over_mean - (7.0 + 536.0 / 760.0 * 8.0) / 8.0).abs() < 1e-3);
    // The list of experts and the classes agree.
    for n in 0..8 {
        let asked = expert_popularity(256, 8, 8, 32768.0, Routing::Workload(n), 7 * u64::from(n == 7));
        assert!((asked.iter().sum::<f64>() - 8.0).abs() < 1e-9 && asked.iter().all(|a| *a <= 1.0));
        let first: f64 = asked[..32].iter().sum();
        if n != 7 {
            assert!((first - load(n, 8).slowest_over_mean).abs() < 1e-3 || n == 5, "W{n}");
        }
    }
    // A rotating hotspot is even over a full rotation.
    let turn: f64 = (0..8).map(|s| expert_popularity(256, 8, 8, 32768.0, Routing::Workload(6), s)[0]).sum();
    assert!((turn - 8.0 * 8.0 / 256.0).abs() < 1e-9);
}

#[test]
fn uneven_sizes_are_sound() {
    // 4096 over 9 ranks: 456 on the first, a mean of 455.1.
    let load = expert_load(4096, 2, 9, 73728.0, Routing::Balanced, 0);
    assert!((load.slowest_over_mean - 456.0 * 9.0 / 4096.0).abs() < 1e-3, "{load:?}");
    assert_eq!(expert_load(0, 0, 8, 100.0, Routing::Random, 0).mean_rows, 0.0);
    assert_eq!(expert_load(64, 4, 8, 0.0, Routing::Random, 125).slowest_over_mean, 1.0);
    // One token of a decode batch selects eight of 256 experts, so at least one of 32 ranks has a
    // full row while the mean is 1/4.
    let one = expert_load(256, 8, 32, 1.0, Routing::Balanced, 0);
    assert_eq!((one.slowest_over_mean, one.mean_rows), (4.0, 0.25));
    for routing in [
        Routing::Balanced,
        Routing::Random,
        Routing::PowerLaw(1.2),
        Routing::Workload(1),
        Routing::Workload(5),
        Routing::Workload(7),
    ] {
        for ep in [1, 2, 7, 64, 100] {
            for (count, top_k) in [(8, 2), (64, 8), (4, 4)] {
                for tokens in [0.5, 1.0, 13.0, 1e6] {
                    for pct in [0, 100, 125] {
                        let l = expert_load(count, top_k, ep, tokens, routing, pct);
                        let sound = l.slowest_over_mean >= 1.0
                            && l.slowest_over_mean.is_finite()
                            && (0.0..=1.0).contains(&l.dropped)
                            && l.remote_copies >= 0.0
                            && l.remote_copies <= f64::from(ep - 1).min(top_k as f64) + 1e-9
                            && l.busiest_over_mean >= 1.0
                            && l.active_experts <= count as f64
                            && l.std_over_mean.is_finite();
                        assert!(sound, "{routing:?} {count} {top_k} {ep} {tokens} {pct}: {l:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn routing_names_round_trip() {
    for word in ["balanced", "random", "power:1.2", "w0", "w7"] {
        assert_eq!(Routing::from_name(word).map(Routing::name).as_deref(), Some(word));
    }
    for word in ["w8", "power:", "power:0", "power:nan", "even"] {
        assert_eq!(Routing::from_name(word), None);
    }
}
