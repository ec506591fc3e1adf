//! Estimates of array programs whose experts lie in two tiers of memory, beside the same programs in one tier.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera::arrays::{ArrayFunction, lower_functions};
use tessera_cost::MachineModel;
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_estimate::{ArrayCost, ArrayQuery, check_fit, estimate_arrays, load_machine};
use tessera_ir::Bundle;
use tessera_mesh::{Axis, DimShard, DimShards, Mesh, RankMap};
use tessera_plan::layouts::StreamOverlap;
use tessera_plan::search::Objective;
use tessera_plan::video::estimate_call;

const EXPERTS: u64 = 6;
const TOKENS: u64 = 12;
/// Bytes of an expert over both weights.
const EXPERT_BYTES: f64 = 2.0 * 9.0 * 8.0 * 4.0;

/// A layer of experts, of which a token uses two, with the experts and the tokens over the named axes.
fn layer(resident: Option<u64>, axes: &[(&str, Axis)]) -> ArrayFunction {
    let tier = resident.map_or(String::new(), |resident| {
        format!(
            "{{tier_layer = 0, tier_policy = \"lru_hotness\", tier_resident = {resident}, tier_window = 1}} "
        )
    });
    let text = format!(
        "program @layer streams(compute) {{
  %x = input \"x\" : f32[{TOKENS}, 8]
  %router = weight \"router\" : f32[{EXPERTS}, 8]
  %up = weight \"up\" {tier}: f32[{EXPERTS}, 9, 8]
  %down = weight \"down\" {tier}: f32[{EXPERTS}, 8, 9]
  %l = toperator.matmul %x, %router @compute
  %e = toperator.top_k_experts %l {{top_k = 2}} @compute
  %w = toperator.expert_weights %l, %e {{renormalise = true}} @compute
  %s = toperator.expert_slots %e {{capacity = {TOKENS}}} @compute
  %c = toperator.expert_counts %e, %s {{groups = {EXPERTS}}} @compute
  %p = toperator.expert_pack %x, %e, %s {{capacity = {TOKENS}, groups = {EXPERTS}}} @compute
  %h = toperator.grouped_matmul %p, %up, %c {{act = \"silu\", rows = {rows}}} @compute
  %o = toperator.grouped_matmul %h, %down, %c {{rows = {rows}}} @compute
  %y = toperator.expert_combine %o, %e, %s, %w @compute
  output \"y\", %y @compute
}}
",
        rows = 2 * TOKENS
    );
    let mut function = ArrayFunction::from_text(&text, "layer.tir").unwrap_or_else(|ds| panic!("{ds:#?}"));
    for (name, axis) in axes {
        let shards = DimShards::from_pairs([(*axis, DimShard { dim: 0, unit: 1 })]);
        function.sources.insert((*name).to_string(), shards);
    }
    function
}

fn lower(mesh: &str, resident: Option<u64>, axes: &[(&str, Axis)]) -> Bundle {
    let mesh: Mesh = mesh.parse().unwrap();
    let rank_map = RankMap::from_device_kind(&mesh, "rank");
    let function = layer(resident, axes);
    lower_functions([&function], &mesh, rank_map, &StreamOverlap::none())
        .unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn machine() -> MachineModel {
    load_machine("gb200-nvl72", None, None).unwrap()
}

fn estimate(mesh: &str, resident: Option<u64>, axes: &[(&str, Axis)]) -> ArrayCost {
    estimate_arrays(&lower(mesh, resident, axes), &machine()).unwrap()
}

const OVER_EP: [(&str, Axis); 2] = [("up", Axis::Ep), ("down", Axis::Ep)];

#[test]
fn fewer_resident_experts_cost_more_and_all_of_them_cost_what_one_tier_costs() {
    let plain = estimate("ep=2", None, &OVER_EP);
    let costs: Vec<ArrayCost> = (1..=4).map(|resident| estimate("ep=2", Some(resident), &OVER_EP)).collect();
    // A rank has three of the experts, so room for a fourth changes nothing.
    assert_eq!(costs[2], plain);
    assert_eq!(costs[3], plain);
    assert_eq!((plain.fetch_wait_ns, plain.fetched_bytes), (0.0, 0.0));
    assert!(costs[0].ns > costs[1].ns && costs[1].ns > plain.ns, "{costs:#?}");
    for (cost, cold) in costs.iter().zip([2.0, 1.0]) {
        assert!((cost.ns - plain.ns - cost.fetch_wait_ns).abs() < 1e-6, "{cost:?} {plain:?}");
        let used = 1.0 - (1.0f64 - 2.0 / 6.0).powi(12);
        assert!((cost.fetched_bytes - cold * used * EXPERT_BYTES).abs() < 1e-6, "{cost:?}");
        assert!(cost.memory < plain.memory);
    }
}

#[test]
fn a_rank_fetches_for_the_tokens_that_reach_its_experts() {
    let bytes = |mesh: &str, axes: &[(&str, Axis)], (cold, tokens): (f64, i32)| {
        let found = estimate(mesh, Some(2), axes).fetched_bytes;
        let expected = cold * (1.0 - (1.0f64 - 2.0 / 6.0).powi(tokens)) * EXPERT_BYTES;
        assert!((found - expected).abs() < 1e-6, "{mesh}: {found} {expected}");
    };
    bytes("dp=1", &[], (4.0, 12));
    // An all-to-all brings the tokens of both ranks to the experts of each.
    bytes("ep=2", &[("up", Axis::Ep), ("down", Axis::Ep), ("x", Axis::Ep)], (1.0, 12));
    // Both ranks have all experts, and half of the tokens.
    bytes("dp=2", &[("x", Axis::Dp)], (4.0, 6));
}

#[test]
fn a_timeline_shows_a_fetch_between_the_routing_and_the_first_grouped_matmul() {
    let bundle = lower("ep=2", Some(1), &OVER_EP);
    let phases: Vec<String> = bundle.phases.iter().map(|phase| phase.name.clone()).collect();
    let call = estimate_call(&bundle, "layer", &phases, &machine(), true).unwrap();
    let fetched: Vec<&Interval> = call.intervals.iter().filter(|b| b.kind == IntervalKind::Fetch).collect();
    let [fetch] = fetched[..] else { panic!("{fetched:#?}") };
    assert_eq!((fetch.track.as_str(), fetch.name.as_str()), ("io", "fetch for grouped_matmul up"));
    let of_name =
        |name: &str| call.intervals.iter().find(|b| b.kind == IntervalKind::Compute && b.name == name);
    assert_eq!(of_name("grouped_matmul up").unwrap().start_ns, fetch.end_ns);
    // The fetch begins when the rows of the experts are packed, and the rank computes nothing meanwhile.
    let computed = call.intervals.iter().filter(|b| b.kind == IntervalKind::Compute);
    let ends: Vec<f64> = computed.map(|b| b.end_ns).filter(|end| *end <= fetch.end_ns).collect();
    assert!(ends.len() > 2 && ends.iter().all(|end| *end <= fetch.start_ns), "{ends:?} {fetch:?}");
    assert!(ends.contains(&fetch.start_ns), "{ends:?} {fetch:?}");
    assert!((fetch.duration_ns() - call.fetches.ns).abs() < 1e-6, "{fetch:?}");
}

#[test]
fn a_search_of_meshes_says_how_long_each_waits_for_experts() {
    let query = ArrayQuery {
        functions: vec![layer(Some(1), &OVER_EP)],
        axes: vec![Axis::Ep, Axis::Dp],
        machine: machine(),
        devices: 2,
        objective: Objective::Latency,
        overlap: StreamOverlap::none(),
    };
    let search = query.search_meshes().unwrap_or_else(|ds| panic!("{ds:#?}"));
    assert_eq!(search.legal.len(), 2);
    // A rank with all of the experts misses five of them, one with half of them misses two.
    let wait = |mesh: &str| {
        let cost = search.legal.iter().find(|cost| cost.mesh == mesh.parse().unwrap()).unwrap();
        cost.fetch_wait_ns
    };
    assert!(wait("ep=2") < wait("dp=2") && wait("ep=2") > 0.0);
    let table = query.describe_search(&search, &search.legal[0].mesh);
    assert!(table.matches("of experts in host memory").count() == 2, "{table}");
    let other = query.explain_mesh(&"ep=2".parse().unwrap(), &[(Axis::Dp, 2)].into()).unwrap();
    assert!(other.contains("waiting for experts") && other.contains("in total"), "{other}");
}

#[test]
fn a_machine_without_a_second_tier_refuses_experts_in_two() {
    let (tiers, plain) = (lower("ep=2", Some(1), &OVER_EP), lower("ep=2", None, &OVER_EP));
    let mut cluster = machine().cluster;
    cluster.host_bytes.value = 0.0;
    // A file can state that there is none.
    let cluster = tessera_mesh::Cluster::parse("cluster.toml", &cluster.to_toml()).unwrap();
    let one_tier = MachineModel::new(cluster, machine().profile);
    let refused = estimate_arrays(&tiers, &one_tier).unwrap_err();
    assert_eq!(refused.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0806"]);
    assert!(refused[0].message.contains("`up`"), "{refused:?}");
    assert_eq!(check_fit(&tiers, &one_tier).unwrap_err()[0].code.id, "T0806");
    assert!(estimate_arrays(&plain, &one_tier).is_ok() && check_fit(&plain, &one_tier).is_ok());
}

#[test]
fn experts_that_host_memory_does_not_hold_do_not_fit_but_have_an_estimate() {
    let bundle = lower("ep=2", Some(1), &OVER_EP);
    let mut small = machine();
    let needed = 3.0 * EXPERT_BYTES;
    small.cluster.host_bytes.value = needed;
    assert!(check_fit(&bundle, &small).is_ok());
    small.cluster.host_bytes.value = needed - 1.0;
    let refused = check_fit(&bundle, &small).unwrap_err();
    assert_eq!(refused.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T1217"]);
    assert!(refused[0].message.contains("host memory"), "{refused:?}");
    assert!(estimate_arrays(&bundle, &small).unwrap().fetched_bytes > 0.0);
}
