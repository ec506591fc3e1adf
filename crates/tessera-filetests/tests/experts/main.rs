//! Layers of experts on CPU ranks, against the reference evaluator and against plain loops: where tokens are routed,
//! how results return, which tokens find a slot, and what imbalance does.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

#[path = "../common/mod.rs"]
mod common;
mod oracle;
mod router;
mod routes;
mod run;
mod slowest_rank;
mod workloads;

use oracle::{RoutingRule, layer_output, route};
use proptest::prelude::*;
use run::{RunLayer, bits, relative_difference};
use tessera_filetests::experts::{Layer, normals};
use workloads::Workload;

/// Returns a layer with random logits.
fn random_layer(seed: u64, (tokens, experts, top_k): (usize, usize, usize)) -> Layer {
    let numbers = normals(seed, tokens * experts);
    Layer::new(experts, top_k, numbers.chunks(experts).map(<[f32]>::to_vec).collect())
}

fn mapping(mesh: &str, experts: &str) -> String {
    format!("[mesh]\n{mesh}\n[experts]\n{experts}\n")
}

#[test]
fn ordered_sums_have_the_bits_of_one_rank() {
    for top_k in [1, 2, 4] {
        // Six experts are uneven over four ranks, and thirteen tokens over any.
        let layer = random_layer(7, (13, 6, top_k));
        let alone = bits(&layer.result("")["y"]);
        for ep in [1, 2, 3, 4, 6] {
            for tokens in ["replicated", "sharded"] {
                let found = layer.result(&mapping(&format!("ep = {ep}"), &format!("tokens = \"{tokens}\"")));
                assert!(bits(&found["y"]) == alone, "ep = {ep}, {top_k} experts per token, {tokens}");
            }
        }
    }
}

#[test]
fn reduced_sums_differ_from_ordered_ones_by_rounding_alone() {
    for top_k in [1, 2, 4] {
        let layer = random_layer(8, (13, 6, top_k));
        let ordered: Vec<f64> = layer.result("")["sum"].iter().map(|x| f64::from(*x)).collect();
        for mesh in ["ep = 2", "ep = 3", "ep = 4", "tp = 2\nep = 2"] {
            for tokens in ["replicated", "sharded"] {
                let keys = format!("tokens = \"{tokens}\"\ncombine = \"reduced\"");
                let far = relative_difference(&layer.result(&mapping(mesh, &keys))["sum"], &ordered);
                assert!(far <= 1e-6, "{mesh}, {top_k} experts per token, {tokens}: {far:e}");
            }
        }
    }
}

#[test]
fn tokens_that_travel_as_e4m3_change_the_sum_by_less_than_five_per_cent() {
    let mut layer = random_layer(9, (12, 6, 2));
    layer.channels = 200;
    let exact: Vec<f64> = layer.result("")["sum"].iter().map(|x| f64::from(*x)).collect();
    let wire = "[mesh]\nep = 3\n[numerics]\ntokens = \"fp8_e4m3\"\n[experts]\ntokens = \"sharded\"\nwire = \"fp8\"\n";
    let bundle = layer.plan(wire);
    let found = &layer.run(&bundle)[0]["sum"];
    let far = relative_difference(found, &exact);
    println!("e4m3 on the wire: {far:.1e} of the largest element");
    assert!(far > 1e-4 && far < 0.05, "{far:e}");
    let reference = &layer.evaluate(&bundle)[0]["sum"];
    assert!(relative_difference(found, reference.data()) < 1e-5);
}

/// Checks a layer's sum and counts on CPU ranks and on the evaluator against plain loops.
fn check_routing(layer: &Layer, mesh: &str, tokens: &str, rule: RoutingRule) {
    let factor = rule.capacity_factor.map_or(String::new(), |f| format!("capacity_factor = {f:?}\n"));
    let text = mapping(
        mesh,
        &format!(
            "tokens = \"{tokens}\"\ntoken_groups = {}\n{factor}reroute_bytes = {}\nstatistics = true",
            rule.groups, rule.reroute_bytes
        ),
    );
    let expected = route(layer, rule);
    let (sum, counts) = (layer_output(layer, &expected), expected.counts.concat());
    let bundle = layer.plan(&text);
    for outputs in layer.run(&bundle) {
        let found: Vec<u64> = outputs["experts.0"].iter().map(|n| *n as u64).collect();
        assert_eq!(found, counts, "{text}");
        let far = relative_difference(&outputs["sum"], &sum);
        assert!(far < 1e-5, "{text}: {far:e}");
    }
    for outputs in layer.evaluate(&bundle) {
        let far = outputs["sum"].data().iter().zip(&sum).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far < 1e-9, "{text}: {far:e} from the evaluator");
    }
    let total = |column: usize| expected.counts.iter().map(|c| c[column]).sum::<u64>();
    assert_eq!(total(1) + total(2) + total(3), (layer.logits.len() * layer.top_k) as u64);
    assert_eq!(total(0), (layer.logits.len() * layer.top_k) as u64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn each_choice_is_kept_moved_or_dropped_as_plain_loops_say(
        seed in 0_u64..1000,
        tokens in 1_usize..20,
        experts in 2_usize..7,
        top_k in 1_usize..4,
        ep in 1_usize..4,
        per_rank in 1_usize..4,
        tenths in 1_u32..20,
        moves in 0_u64..4,
        sharded in proptest::bool::ANY,
    ) {
        let (top_k, ep) = (top_k.min(experts), ep.min(experts));
        let layer = random_layer(seed, (tokens, experts, top_k));
        let rule = RoutingRule {
            groups: ep * per_rank,
            capacity_factor: Some(f64::from(tenths) / 10.0),
            reroute_bytes: moves * 4 * layer.width() as u64,
        };
        let tokens = if sharded { "sharded" } else { "replicated" };
        check_routing(&layer, &format!("ep = {ep}"), tokens, rule);
    }
}

#[test]
fn which_tokens_are_dropped_depends_on_no_mesh() {
    let layer = random_layer(11, (23, 6, 2));
    let keys = "token_groups = 12\ncapacity_factor = 0.8\nreroute_bytes = 44\nstatistics = true\n";
    let alone = layer.result(&mapping("ep = 1", keys));
    for mesh in ["ep = 2", "ep = 3", "ep = 4", "ep = 6"] {
        for tokens in ["replicated", "sharded"] {
            let found = layer.result(&mapping(mesh, &format!("{keys}tokens = \"{tokens}\"")));
            assert!(found.iter().all(|(name, x)| bits(x) == bits(&alone[name])), "{mesh}, {tokens}");
        }
    }
    let dropped: f32 = alone["experts.0"].chunks(4).map(|counts| counts[3]).sum();
    assert!(dropped > 0.0, "the layer drops tokens");
}

#[test]
fn every_workload_ends_and_accounts_for_each_choice() {
    for workload in Workload::ALL {
        for call in 0..3 {
            for top_k in [1, 2] {
                let layer = workload.layer(call, (24, 8, 4, top_k));
                let bytes = 4 * layer.width() as u64;
                for (factor, moves) in [(None, 0), (Some(1.0), 0), (Some(1.25), 2)] {
                    let rule =
                        RoutingRule { groups: 4, capacity_factor: factor, reroute_bytes: moves * bytes };
                    check_routing(&layer, "ep = 4", "sharded", rule);
                }
            }
        }
    }
}

#[test]
fn the_bytes_of_an_exchange_follow_the_routing() {
    // Twelve tokens of one choice on four ranks with two experts each: three tokens of a rank, six token slots in all.
    let sent = |layer: &Layer| {
        let keys = "tokens = \"sharded\"\ntoken_groups = 4";
        layer.sent_bytes(&layer.plan(&mapping("ep = 4", keys)))
    };
    let layer = Workload::HotRank.layer(0, (12, 8, 4, 1));
    let row = 4 * layer.width() as u64;
    // Each rank has 8 · 3 slots of its tokens, and the owner of an expert 2 · 12: one word of a mask for each exchange.
    let masks = 2 * 4;
    // All tokens choose experts of rank 1, which sends their results back; its own three travel on no link.
    assert_eq!(sent(&layer), [masks + 3 * row, masks + 9 * row, masks + 3 * row, masks + 3 * row]);
    let balanced = sent(&Workload::Balanced.layer(0, (12, 8, 4, 1)));
    let total: u64 = balanced.iter().sum();
    assert!(total <= 4 * masks + 2 * 12 * row && total > 12 * row, "{balanced:?}");
    // Every slot, filled or not, would be 24 rows out and 24 back on each rank, without the quarter that stays.
    assert!(balanced.iter().all(|sent| *sent < 2 * 18 * row), "{balanced:?}");
}

#[test]
fn workloads_are_as_unequal_as_their_names_say() {
    let rule = RoutingRule { groups: 1, capacity_factor: None, reroute_bytes: 0 };
    let per_rank = |workload: Workload, call| {
        let counts = route(&workload.layer(call, (24, 8, 4, 2)), rule).counts;
        counts.chunks(2).map(|rank| rank.iter().map(|c| c[0]).sum::<u64>()).collect::<Vec<_>>()
    };
    assert_eq!(per_rank(Workload::Balanced, 0), [12, 12, 12, 12]);
    assert_eq!(per_rank(Workload::HotExperts, 0), [24, 24, 0, 0]);
    assert_eq!(per_rank(Workload::HotRank, 0), [0, 48, 0, 0]);
    assert_eq!(per_rank(Workload::ZeroLoadRank, 0)[3], 0);
    assert!(
        per_rank(Workload::RotatingHotspot, 0)[0] >= 24 && per_rank(Workload::RotatingHotspot, 2)[1] >= 24
    );
    assert!(per_rank(Workload::Burst, 1)[3] >= 24 && per_rank(Workload::Burst, 0) == [12, 12, 12, 12]);
    let spread = route(&Workload::SpreadHot.layer(0, (24, 8, 4, 2)), rule).counts;
    let hot: u64 = spread.iter().step_by(2).map(|c| c[0]).sum();
    assert!(hot > 40, "{hot} of 48 choices are of the hot expert of a rank");
    let ragged = Workload::SourceRagged.layer(0, (24, 8, 4, 1));
    let late = route(&ragged, rule).experts[12..].concat();
    assert!(late.iter().all(|e| *e == 0));
}
