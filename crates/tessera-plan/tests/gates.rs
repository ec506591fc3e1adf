//! Each gate at its boundary, and the words that name what decides.

use tessera_cost::moe::{Routing, experts};
use tessera_cost::tiers::{LayerTimes, Reads, Residency, prefetch, replay_cache};
use tessera_plan::search::gates::{
    ExchangeFacts, ExpertFacts, Gate, GateFacts, GroupFacts, MemoryFacts, ReplicaFacts, Verdict, gates,
};
use tessera_plan::search::thresholds::Thresholds;

fn judge(facts: &GateFacts, id: &str) -> Gate {
    gates(facts, &Thresholds::default()).into_iter().find(|g| g.id == id).expect("a gate of this name")
}

fn memory(activations: f64, cache: f64) -> GateFacts {
    let memory = MemoryFacts {
        device: 100e9,
        parameters: 40e9,
        activations,
        cache,
        activation_tokens: 4096.0,
        cache_tokens: 1e6,
        ..MemoryFacts::default()
    };
    GateFacts { training: true, memory, ..GateFacts::default() }
}

#[test]
fn activations_and_cache_warn_and_fail() {
    let at = |a, k| judge(&memory(a, k), "memory.activations-and-cache");
    assert_eq!(at(20e9, 29e9).verdict, Verdict::Pass);
    assert_eq!(at(20e9, 31e9).verdict, Verdict::Warn);
    let failed = at(20e9, 41e9);
    assert_eq!((failed.verdict, failed.limit), (Verdict::Fail, 0.6));
    // The term, the tokens and the headroom are named.
    for part in ["of which K decides", "× 4096 tokens", "× 1000000 tokens", "36.32 GiB are left"] {
        assert!(failed.says.contains(part), "{}", failed.says);
    }
    assert!(at(41e9, 20e9).says.contains("of which A decides"));
    let mut without = memory(20e9, 20e9);
    (without.memory.activation_tokens, without.memory.cache_tokens) = (0.0, 0.0);
    let unjudged = judge(&without, "memory.activations-and-cache");
    assert_eq!(unjudged.verdict, Verdict::NotApplicable);
    assert!(unjudged.says.contains("per token"));
    assert_eq!(failed.diagnostic().unwrap().code.id, "T1241");
    assert!(at(1e9, 1e9).diagnostic().is_none());
}

#[test]
fn recomputation_flips_at_half_the_parameters() {
    let at = |share: f64| judge(&memory(40e9 * share, 0.0), "memory.recompute");
    assert_eq!(at(0.49).verdict, Verdict::Pass);
    let over = at(0.51);
    assert_eq!(over.verdict, Verdict::Warn);
    assert!(over.says.contains("so recompute") && over.says.contains("0.51"), "{}", over.says);
    let mut done = memory(10e9, 0.0);
    (done.recomputes, done.memory.activations_plain) = (true, 30e9);
    assert_eq!(judge(&done, "memory.recompute").verdict, Verdict::Pass);
    done.training = false;
    assert_eq!(judge(&done, "memory.recompute").verdict, Verdict::NotApplicable);
}

#[test]
fn what_does_not_fit_names_the_largest() {
    let facts = memory(10e9, 60e9);
    let gate = judge(&facts, "memory.fits");
    assert_eq!(gate.verdict, Verdict::Fail);
    assert!(gate.says.contains("9.31 GiB too much; the largest are cache"), "{}", gate.says);
    let at = |cache| judge(&memory(10e9, cache), "memory.fits");
    assert_eq!(
        (at(44e9).verdict, at(46e9).verdict, at(50e9).verdict),
        (Verdict::Pass, Verdict::Warn, Verdict::Warn)
    );
    assert_eq!((at(44e9).limit, at(60e9).limit), (0.95, 1.0));
}

fn with_experts(count: u64, top_k: u64, ep: u32, tokens: f64, routing: Routing) -> GateFacts {
    let load = experts(count, top_k, ep, tokens, routing, 0);
    let experts = ExpertFacts {
        experts: count,
        top_k,
        ep,
        tokens,
        std_over_mean: load.std_over_mean,
        rank_std_over_mean: load.rank_std_over_mean,
        slowest: load.slowest,
        ..ExpertFacts::default()
    };
    GateFacts { experts: Some(experts), ..GateFacts::default() }
}

#[test]
fn density_of_experts() {
    let at = |ep| judge(&with_experts(4096, 2, ep, 65536.0, Routing::Random), "experts.density");
    assert_eq!((at(6).verdict, at(9).verdict, at(32).verdict), (Verdict::Pass, Verdict::Pass, Verdict::Pass));
    let thin = at(64);
    assert_eq!((thin.verdict, thin.value), (Verdict::Fail, 64.0));
    assert!(thin.says.contains("32 is the most"), "{}", thin.says);
    assert_eq!(
        judge(&with_experts(64, 2, 8, 65536.0, Routing::Random), "experts.density").verdict,
        Verdict::NotApplicable
    );
}

#[test]
fn balance_is_judged_where_it_can_be() {
    let at = |tokens, routing| judge(&with_experts(256, 8, 8, tokens, routing), "experts.balance");
    // 1024 rows an expert: an even router passes, a skewed one does not.
    assert_eq!(at(32768.0, Routing::Random).verdict, Verdict::Pass);
    assert_eq!(at(32768.0, Routing::PowerLaw(1.2)).verdict, Verdict::Fail);
    assert_eq!(at(32768.0, Routing::W(3)).verdict, Verdict::Fail);
    // 32 rows: 17.7 % by chance alone.
    let small = at(1024.0, Routing::Random);
    assert_eq!(small.verdict, Verdict::NotApplicable);
    assert!(small.says.contains("= 32.0 rows each") && small.says.contains("17.7 %"), "{}", small.says);
    // The scope begins at 100 rows.
    assert_ne!(at(3200.0, Routing::Random).verdict, Verdict::NotApplicable);
    assert_eq!(at(3199.0, Routing::Random).verdict, Verdict::NotApplicable);
}

#[test]
fn windows_of_prefetch() {
    let layers = vec![LayerTimes { before_ns: 300e3, after_ns: 300e3, fetch_ns: 500e3 }; 24];
    let at = |window: usize| {
        let mut facts = with_experts(256, 8, 8, 32768.0, Routing::Random);
        let stall = prefetch(&layers, window).stall_ns;
        facts.experts.as_mut().unwrap().prefetch = Some((window as u32, stall));
        judge(&facts, "experts.prefetch")
    };
    let verdicts: Vec<Verdict> = (1..=4).map(|w| at(w).verdict).collect();
    assert_eq!(verdicts, [Verdict::Fail, Verdict::Pass, Verdict::Pass, Verdict::Fail]);
    assert!(at(1).says.contains("waits 4800.0 µs"), "{}", at(1).says);
    let none = at(0);
    assert_eq!(none.verdict, Verdict::Fail);
    assert!(none.says.contains("before the router"), "{}", none.says);
}

#[test]
fn bursts_of_exchange() {
    let at = |bytes, ns| {
        let exchange = Some(ExchangeFacts { bytes, ns, line_bytes_per_s: 450e9 });
        judge(&GateFacts { exchange, ..GateFacts::default() }, "collectives.exchange")
    };
    // The published 4096 tokens over 8 ranks: 140 MB in 494 µs are 63 % of the line rate; 390 µs are 80 %.
    let measured = at(140.3e6, 494e3);
    assert_eq!(measured.verdict, Verdict::Fail);
    assert!((measured.value - 0.631).abs() < 1e-3);
    assert_eq!(at(140.3e6, 389e3).verdict, Verdict::Pass);
    assert_eq!(at(4e6, 35e3).verdict, Verdict::NotApplicable);
}

#[test]
fn overlap_bubbles_and_hits() {
    let overlap = |hidden_ns| {
        judge(&GateFacts { hidden_ns, collective_ns: 100.0, ..GateFacts::default() }, "collectives.overlap")
            .verdict
    };
    assert_eq!((overlap(60.0), overlap(50.0)), (Verdict::Pass, Verdict::Fail));
    let bubble = |bubbles: &[f64]| {
        judge(&GateFacts { bubbles: bubbles.to_vec(), ..GateFacts::default() }, "pipeline.bubble")
    };
    // The guide's drawing: three stages, four micro-batches, a third of it waiting.
    let drawn = bubble(&[0.2, 0.333, 0.3]);
    assert_eq!(drawn.verdict, Verdict::Fail);
    assert!(drawn.says.starts_with("stage 1 waits 33.3 %"), "{}", drawn.says);
    assert_eq!(bubble(&[0.09, 0.095]).verdict, Verdict::Pass);
    assert_eq!(bubble(&[0.0]).verdict, Verdict::NotApplicable);

    // Who is kept near decides whether a long context passes.
    let reads =
        Reads { seed: 5, segments: 128, steps: 400, steps_per_segment: 16, recent: 8, older: Some(4) };
    let verdict = |policy| {
        let cache_hits = Some(replay_cache(&reads, policy, 48, 48).hot(false));
        judge(&GateFacts { cache_hits, ..GateFacts::default() }, "cache.hits").verdict
    };
    assert_eq!(Residency::ALL.map(verdict), [Verdict::Fail, Verdict::Fail, Verdict::Pass]);
}

#[test]
fn domains_and_racks() {
    let group = |axis, domains| GroupFacts { axis, ranks: 16, domains };
    let domain = |groups: &[GroupFacts]| {
        judge(&GateFacts { groups: groups.to_vec(), ..GateFacts::default() }, "mesh.domain")
    };
    assert_eq!(domain(&[group("tp", 1), group("dp", 2)]).verdict, Verdict::Pass);
    let far = domain(&[group("tp", 1), group("ep", 2)]);
    assert_eq!(far.verdict, Verdict::Fail);
    assert!(far.says.contains("ep (16 ranks over 2 domains)") && !far.says.contains("tp"), "{}", far.says);
    let rack = |ranks, racks| {
        let replica = ReplicaFacts { copies: 2, ranks, racks, rack_devices: 72 };
        judge(&GateFacts { replica, ..GateFacts::default() }, "mesh.rack").verdict
    };
    assert_eq!((rack(72, 1), rack(72, 2), rack(144, 2)), (Verdict::Pass, Verdict::Fail, Verdict::Warn));
}

#[test]
fn a_limit_of_ones_own_flips_its_gate_alone() {
    let facts = GateFacts { hidden_ns: 50.0, collective_ns: 100.0, ..memory(20e9, 41e9) };
    let own = Thresholds::parse("own.toml", "[collectives]\noverlap_least = 0.4\n").unwrap();
    let changed: Vec<&str> = gates(&facts, &Thresholds::default())
        .iter()
        .zip(gates(&facts, &own))
        .filter(|(a, b)| a.verdict != b.verdict)
        .map(|(a, _)| a.id)
        .collect();
    assert_eq!(changed, ["collectives.overlap"]);
}
