//! The estimate of the slowest rank beside what ranks count, for the workloads W0 to W7 of the cost model.

use tessera_cost::moe::{CountedLoad, CountedPlace, Routing, expert_load, expert_popularity};
use tessera_filetests::experts::{Layer, draw_layer};

use crate::run::{RunLayer, bits};

/// Experts, experts per token, ranks and tokens: of the experts, two are hot.
const SHAPE: (usize, usize, usize, usize) = (64, 2, 4, 256);

/// Runs a layer on CPU ranks, and returns the rows that each place of an expert computes, and the dropped choices.
fn count_rows(layer: &Layer, keys: &str) -> (Vec<f64>, f64) {
    let text =
        format!("[mesh]\nep = {}\n[experts]\ntokens = \"sharded\"\nstatistics = true\n{keys}", SHAPE.2);
    let counts = layer.result(&text)["experts.0"].clone();
    let rows = counts.chunks(4).map(|c| f64::from(c[1] + c[2])).collect();
    (rows, counts.chunks(4).map(|c| f64::from(c[3])).sum())
}

#[test]
fn the_estimate_of_the_slowest_rank_is_near_what_ranks_count_under_every_workload() {
    let (experts, top_k, ep, tokens) = SHAPE;
    let place = |e| CountedPlace { rank: e * ep as u64 / experts as u64, share: 1.0 };
    let places: Vec<CountedPlace> = (0..experts as u64).map(place).collect();
    for number in 0..8 {
        let routing = Routing::Workload(number);
        // The hotspot of W6 comes to every rank, and W7 has a burst in one step of eight.
        let steps = if number >= 6 { 8 } else { 2 };
        for (capacity_pct, keys) in [(0, ""), (125, "token_groups = 4\ncapacity_factor = 1.25\n")] {
            let estimate =
                expert_load(experts as u64, top_k as u64, ep as u32, tokens as f64, routing, capacity_pct);
            let (mut slowest, mut dropped) = (0.0, 0.0);
            for step in 0..steps {
                let popularity =
                    expert_popularity(experts as u64, top_k as u64, ep as u32, tokens as f64, routing, step);
                let (rows, lost) = count_rows(&draw_layer(&popularity, (top_k, tokens), step as u32), keys);
                assert_eq!(
                    rows.iter().sum::<f64>() + lost,
                    (tokens * top_k) as f64,
                    "w{number}, step {step}"
                );
                let load = CountedLoad { computed: rows.clone(), chosen: rows, top_k: top_k as f64 };
                let mean = load.computed.iter().sum::<f64>() / ep as f64;
                slowest += load.busiest_over_mean(&places) * mean / steps as f64;
                dropped += lost / (tokens * top_k) as f64 / steps as f64;
            }
            let rows = estimate.slowest_rows();
            println!(
                "w{number}, capacity {capacity_pct} %: slowest rank {rows:.1} rows estimated, {slowest:.1} counted; dropped \
                 {:.3} estimated, {dropped:.3} counted",
                estimate.dropped
            );
            assert!((rows / slowest - 1.0).abs() <= 0.15, "w{number}: {rows} estimated, {slowest} counted");
            // The estimate of even choices is far from what unequal ones give.
            let even =
                expert_load(experts as u64, top_k as u64, ep as u32, tokens as f64, Routing::Balanced, 0);
            let is_uneven = [1, 2, 3, 5, 6, 7].contains(&number);
            let misses = (even.slowest_rows() / slowest - 1.0).abs() > 0.15;
            assert!(
                capacity_pct > 0 || is_uneven == misses,
                "w{number}: {} of even choices",
                even.slowest_rows()
            );
        }
    }
}

/// Copies beyond the first of each expert: one eighth of the experts.
const REPLICAS: usize = 8;

/// Returns the rows of the rank with the most, for places of which the ranks have equally many.
fn rows_of_slowest_rank(places: &[f64]) -> f64 {
    let ranks = places.chunks(places.len() / SHAPE.2);
    ranks.map(|own| own.iter().sum::<f64>()).fold(0.0, f64::max)
}

#[test]
fn copies_placed_by_counts_even_out_the_ranks_under_every_workload() {
    let (experts, top_k, ep, tokens) = SHAPE;
    let mean = (tokens * top_k) as f64 / ep as f64;
    for number in 0..8 {
        let popularity = |step| {
            let routing = Routing::Workload(number);
            expert_popularity(experts as u64, top_k as u64, ep as u32, tokens as f64, routing, step)
        };
        // The choices of one step place the experts of another one, which other tokens choose.
        let (counted, _) = count_rows(&draw_layer(&popularity(0), (top_k, tokens), 0), "");
        let choices =
            format!("replicas = {REPLICAS}\n[[experts.choices]]\nlayer = 0\nexperts = {counted:?}\n");
        let next = draw_layer(&popularity(0), (top_k, tokens), 1);
        let [in_order, placed] =
            ["", choices.as_str()].map(|keys| rows_of_slowest_rank(&count_rows(&next, keys).0));
        println!(
            "w{number}: slowest rank {in_order:.0} rows in order, {placed:.0} by counts; mean {mean:.0}"
        );
        assert!(placed <= 1.2 * mean, "w{number}: {placed} rows of {mean}");
        assert!(
            in_order < 1.2 * mean || placed < 0.85 * in_order,
            "w{number}: {placed} after {in_order} rows"
        );
        let sums = ["", choices.as_str()].map(|keys| {
            let mapping = format!("[mesh]\nep = {ep}\n[experts]\ntokens = \"sharded\"\n{keys}");
            bits(&next.result(&mapping)["sum"])
        });
        assert!(sums[0] == sums[1], "w{number}: copies change a sum");
    }
}
