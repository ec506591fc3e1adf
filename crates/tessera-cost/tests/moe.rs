//! Loads of experts in closed form against routings that are drawn.

use tessera_base::random::Dice;
use tessera_cost::moe::{Routing, experts, popularity};
use tessera_mesh::split;

/// Means over drawn routings.
struct Drawn {
    slowest: f64,
    dropped: f64,
    active: f64,
    copies: f64,
    std_over_mean: f64,
}

/// Draws `trials` batches: popularities dealt to ranks anew each time, and for each token `top_k` different experts,
/// expert e with exactly its chance (systematic sampling along a shuffled order).
fn draw(
    (count, top_k, ep): (u64, u64, u32),
    tokens: u64,
    routing: Routing,
    capacity_pct: u32,
    trials: u32,
) -> Drawn {
    let mut rng = Dice::new(7, [1, 0]);
    let mut asked = popularity(count, top_k, ep, tokens as f64, routing, 0);
    let rank_of: Vec<usize> =
        (0..ep).flat_map(|r| std::iter::repeat_n(r as usize, split(count, ep, r).1 as usize)).collect();
    let n = count as usize;
    let even = tokens as f64 * top_k as f64 / count as f64;
    let capacity =
        if capacity_pct == 0 { u64::MAX } else { (even * f64::from(capacity_pct) / 100.0).ceil() as u64 };
    let mut sum = Drawn { slowest: 0.0, dropped: 0.0, active: 0.0, copies: 0.0, std_over_mean: 0.0 };
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
            let mut next = f64::from(rng.word()) / 4_294_967_296.0;
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
    Drawn {
        slowest: mean(sum.slowest),
        dropped: mean(sum.dropped),
        active: mean(sum.active),
        copies: mean(sum.copies),
        std_over_mean: mean(sum.std_over_mean),
    }
}

fn shuffle<T>(rng: &mut Dice, list: &mut [T]) {
    for i in (1..list.len()).rev() {
        list.swap(i, rng.below(i + 1));
    }
}

#[test]
fn closed_forms_agree_with_drawn_routings() {
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
        let drawn = draw(shape, tokens, routing, pct, trials);
        let load = experts(shape.0, shape.1, shape.2, tokens as f64, routing, pct);
        let pairs = [
            ("slowest", load.slowest, drawn.slowest, 0.06),
            ("dropped", 1.0 + load.dropped, 1.0 + drawn.dropped, 0.003),
            ("active", load.active, drawn.active, 0.12),
            ("copies", load.copies, drawn.copies, 0.07),
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
    // sqrt(E / kT) for balls in bins: 17.7 % at 128 tokens of 8 ranks, 3.1 % at 4096. A token's experts differ, which
    // takes a factor of sqrt(1 - k/E) off.
    for (tokens, published) in [(1024.0, 0.1768), (32768.0, 0.03125)] {
        let load = experts(256, 8, 8, tokens, Routing::Random, 0);
        let distinct = (1.0f64 - 8.0 / 256.0).sqrt();
        assert!((load.std_over_mean / (published * distinct) - 1.0).abs() < 1e-3, "{load:?}");
        assert!((load.std_over_mean / published - 1.0).abs() < 0.02, "{load:?}");
        // Ranks sum 32 experts each.
        assert!(
            (load.rank_std_over_mean / load.std_over_mean * 32.0f64.sqrt() - 1.0).abs() < 0.08,
            "{load:?}"
        );
    }
    let load = experts(256, 8, 8, 32768.0, Routing::Random, 0);
    assert!((load.copies * 8.0 / 7.0 - 5.295).abs() < 1e-3, "{load:?}");
}

#[test]
fn published_imbalance_of_a_power_law() {
    // Times of grouped products on H200 (256 experts, top 8, NVIDIA's collection for TensorRT-LLM) under alpha 1.2 over
    // even ones, one drawn routing each. At a constant rate time is load; the load of one drawing lies anywhere in a wide
    // band, whose mean is what a plan should count on.
    let mut dice = Dice::new(11, [4, 0]);
    for (ep, tokens, time) in [(8usize, 4096.0, 1.80), (32, 4096.0, 2.84), (32, 8192.0, 4.0)] {
        let range = 0.8f64 * tokens;
        let mut drawn: Vec<f64> = (0..1000)
            .map(|_| {
                let mut rows = vec![0.0f64; ep];
                for e in 0..256 {
                    let u = f64::from(dice.word()) / 4_294_967_296.0;
                    rows[e * ep / 256] += (1.0 + (range.powf(-0.2) - 1.0) * u).powi(-5);
                }
                rows.iter().copied().fold(0.0, f64::max) * ep as f64 / rows.iter().sum::<f64>()
            })
            .collect();
        drawn.sort_by(f64::total_cmp);
        let mean = drawn.iter().sum::<f64>() / 1000.0;
        let load = experts(256, 8, ep as u32, tokens, Routing::PowerLaw(1.2), 0).slowest;
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
    let load = |n, ep| experts(256, 8, ep, 32768.0, Routing::W(n), 0);
    assert_eq!(load(0, 8), experts(256, 8, 8, 32768.0, Routing::Balanced, 0));
    assert_eq!((load(0, 8).slowest, load(0, 8).std_over_mean), (1.0, 0.0));
    // 8 of 256 experts at 16: 376 parts, of which the first of 8 ranks has 8·16 + 24.
    assert!((load(1, 8).slowest - 152.0 / 376.0 * 8.0).abs() < 1e-3);
    // One of 8 ranks at 4: 4 parts of 11.
    assert!((load(2, 8).slowest - 32.0 / 11.0).abs() < 1e-3);
    assert_eq!(load(2, 8), load(6, 8));
    assert!((load(3, 8).slowest - 1.0).abs() < 1e-3 && load(3, 8).std_over_mean > 1.0);
    assert!((load(4, 8).slowest - 1.0).abs() < 1e-3 && (load(4, 8).busiest_link - 16.0 / 9.0).abs() < 1e-9);
    assert!((load(5, 8).slowest - 8.0 / 7.0).abs() < 1e-3);
    // 8 experts at 64: 760 parts, 512 + 24 on the first rank, one step in eight.
    assert!((load(7, 8).slowest - (7.0 + 536.0 / 760.0 * 8.0) / 8.0).abs() < 1e-3);
    // The list of experts and the few classes say the same.
    for n in 0..8 {
        let asked = popularity(256, 8, 8, 32768.0, Routing::W(n), 7 * u64::from(n == 7));
        assert!((asked.iter().sum::<f64>() - 8.0).abs() < 1e-9 && asked.iter().all(|a| *a <= 1.0));
        let first: f64 = asked[..32].iter().sum();
        if n != 7 {
            assert!((first - load(n, 8).slowest).abs() < 1e-3 || n == 5, "W{n}");
        }
    }
    // A rotating hotspot is even over a turn.
    let turn: f64 = (0..8).map(|s| popularity(256, 8, 8, 32768.0, Routing::W(6), s)[0]).sum();
    assert!((turn - 8.0 * 8.0 / 256.0).abs() < 1e-9);
}

#[test]
fn odd_shapes() {
    // 4096 over 9 ranks: 456 on the first, 455.1 in the mean.
    let load = experts(4096, 2, 9, 73728.0, Routing::Balanced, 0);
    assert!((load.slowest - 456.0 * 9.0 / 4096.0).abs() < 1e-3, "{load:?}");
    assert_eq!(experts(0, 0, 8, 100.0, Routing::Random, 0).rows, 0.0);
    assert_eq!(experts(64, 4, 8, 0.0, Routing::Random, 125).slowest, 1.0);
    // One token of a decode batch: eight of 256 experts, so one of 32 ranks has at least one row where the mean is 1/4.
    let one = experts(256, 8, 32, 1.0, Routing::Balanced, 0);
    assert_eq!((one.slowest, one.rows), (4.0, 0.25));
    for routing in [
        Routing::Balanced,
        Routing::Random,
        Routing::PowerLaw(1.2),
        Routing::W(1),
        Routing::W(5),
        Routing::W(7),
    ] {
        for ep in [1, 2, 7, 64, 100] {
            for (count, top_k) in [(8, 2), (64, 8), (4, 4)] {
                for tokens in [0.5, 1.0, 13.0, 1e6] {
                    for pct in [0, 100, 125] {
                        let l = experts(count, top_k, ep, tokens, routing, pct);
                        let sound = l.slowest >= 1.0
                            && l.slowest.is_finite()
                            && (0.0..=1.0).contains(&l.dropped)
                            && l.copies >= 0.0
                            && l.copies <= f64::from(ep - 1).min(top_k as f64) + 1e-9
                            && l.busiest_link >= 1.0
                            && l.active <= count as f64
                            && l.std_over_mean.is_finite();
                        assert!(sound, "{routing:?} {count} {top_k} {ep} {tokens} {pct}: {l:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn spellings() {
    for word in ["balanced", "random", "power:1.2", "w0", "w7"] {
        assert_eq!(Routing::named(word).map(Routing::name).as_deref(), Some(word));
    }
    for word in ["w8", "power:", "power:0", "power:nan", "even"] {
        assert_eq!(Routing::named(word), None);
    }
}
