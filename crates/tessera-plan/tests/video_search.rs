//! Tests the search over mappings of a video generator: the best mappings, and the consistency of
//! its estimates.

#![allow(clippy::disallowed_methods, reason = "it reads a page of measurements")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeSet;

use tessera_base::Nanoseconds;
use tessera_cost::intervals::Interval;
use tessera_cost::{MachineModel, Profile};
use tessera_ir::{Bundle, Phase, RoleRanks};
use tessera_mesh::{Axis, Rank, catalog};
use tessera_models::VideoModel;
use tessera_plan::search::Objective;
use tessera_plan::video::{
    DecodePlacement, MappingQuery, MediaCosts, RankedMapping, VideoPins, VideoSearchResult, estimate_call,
    estimate_mapping, search_mappings, search_with_progress,
};
use tessera_plan::{DtypePolicy, LogicalModel, Mapping, Strategy, Topology, lower};

use crate::support::logical;

mod support;

/// The 14B generator at 480×832 with four steps; its context is recomputed from the pixels of the
/// last chunk.
fn wan_14b() -> LogicalModel {
    let config = include_str!("../../../models/wan2.1-14b/config.json");
    let stream =
        include_str!("../../../models/wan2.1-14b/stream.toml").replace("\"resident\"", "\"recompute\"");
    logical(&VideoModel::parse(("config.json", config), ("stream.toml", &stream)).unwrap())
}

fn tiny() -> LogicalModel {
    let config = r#"{"dim":60,"ffn_dim":104,"num_heads":5,"num_layers":6,"in_dim":4,"out_dim":4,"text_len":7,
        "text_dim":20,"freq_dim":32}"#;
    logical(
        &VideoModel::parse(("config.json", config), ("stream.toml", "[video]\nwidth = 80\nheight = 48\n"))
            .unwrap(),
    )
}

fn machine(cluster: &str, profile: &str) -> MachineModel {
    MachineModel::new(catalog::get(cluster).unwrap(), Profile::builtin(profile).unwrap())
}

/// Returns the costs of decoding three latents and encoding one frame, measured on one H200 with an
/// eager decoder; the encode runs at the decoder's rate.
fn measured_media_costs(coupled: bool, shardable: Option<f64>) -> MediaCosts {
    MediaCosts::from_chunk(3, 192e6, 12.9e6, coupled, shardable)
}

fn make_query<'a>(
    logical: &'a LogicalModel,
    machine: &'a MachineModel,
    devices: u32,
    media: MediaCosts,
) -> MappingQuery<'a> {
    MappingQuery {
        logical,
        call: "chunk.fill3",
        frames: 12,
        machine,
        devices,
        min_devices: devices,
        objective: Objective::Throughput,
        media,
        pixels: None,
        message_ns: 50_000.0,
        dtype: DtypePolicy::Bf16,
        pins: VideoPins::default(),
        max_results: 1000,
    }
}

fn find_best(of: &VideoSearchResult, keep: impl Fn(&RankedMapping) -> bool) -> &RankedMapping {
    of.best.iter().find(|r| keep(r)).unwrap()
}

// proves: V-11
#[test]
fn a_dedicated_decode_rank_is_wrong_on_8_devices_when_chunks_are_coupled() {
    let (model, machine) = (wan_14b(), machine("hgx-h200", "torch-2.11"));
    let outside = |r: &RankedMapping| r.mapping.topology != Topology::Mesh;

    let shared = search_mappings(&make_query(&model, &machine, 8, measured_media_costs(true, Some(0.8))));
    let first = &shared.best[0];
    assert_eq!((first.mapping.topology, first.decode), (Topology::Mesh, DecodePlacement::AllRanks));
    assert_eq!(
        (first.mapping.mesh.to_string().as_str(), first.mapping.strategy),
        ("tp=8", Strategy::Ulysses)
    );
    let dedicated = find_best(&shared, outside);
    assert!(first.fps > dedicated.fps, "{} against {}", first.fps, dedicated.fps);
    // Without a shared decode, a dedicated rank costs more than a fifth.
    let unshared = find_best(&shared, |r| r.decode == DecodePlacement::AnchorFirst);
    assert!(first.fps > 1.2 * unshared.fps, "{} against {}", first.fps, unshared.fps);

    // If one rank must decode alone, a rank outside the mesh is better than one that delays seven
    // others.
    let alone = search_mappings(&make_query(&model, &machine, 8, measured_media_costs(true, None)));
    assert_eq!(alone.best[0].decode, DecodePlacement::AnchorFirst);
    assert!(outside(&alone.best[0]));

    // For uncoupled chunks the rank decodes beside the next chunk.
    let loose = search_mappings(&make_query(&model, &machine, 8, measured_media_costs(false, None)));
    assert_eq!(loose.best[0].decode, DecodePlacement::Overlapped);
    for o in [&shared, &alone, &loose] {
        assert_eq!(o.considered, o.legal + o.rejected.values().map(|r| r.count).sum::<u64>());
        for r in &o.best {
            assert!(
                r.mapping.check_consistency().is_empty()
                    && Mapping::parse("m", &r.mapping.to_toml()).unwrap() == r.mapping
            );
        }
    }
}

#[test]
fn ulysses_beats_megatron_for_the_14b_generator_from_2_devices_on() {
    let (model, machine) = (wan_14b(), machine("hgx-h200", "torch-2.11"));
    for devices in [2, 4, 8] {
        let mut q = make_query(&model, &machine, devices, MediaCosts::NONE);
        q.pins = VideoPins {
            pp: Some(1),
            topology: Some(Topology::Mesh),
            outstanding: Some(2),
            ..VideoPins::default()
        };
        let found = search_mappings(&q);
        assert_eq!(found.best[0].mapping.strategy, Strategy::Ulysses, "on {devices}");
        let megatron = find_best(&found, |r| r.mapping.strategy == Strategy::Megatron);
        assert!(found.best[0].fps > megatron.fps);
    }
}

/// Returns the same bundle with one role per rank, so that each rank is simulated.
fn split_roles(b: &Bundle) -> Bundle {
    let ranks: Vec<(usize, Rank)> =
        b.roles.iter().enumerate().flat_map(|(i, r)| r.ranks.iter().map(move |x| (i, *x))).collect();
    let role = |(i, r): &(usize, Rank)| RoleRanks { role: b.roles[*i].role.clone(), ranks: vec![*r] };
    let phase = |p: &Phase| Phase {
        name: p.name.clone(),
        programs: ranks.iter().map(|(i, _)| p.programs[*i].clone()).collect(),
        slots: ranks.iter().map(|(i, _)| p.slots[*i].clone()).collect(),
    };
    Bundle {
        roles: ranks.iter().map(role).collect(),
        phases: b.phases.iter().map(phase).collect(),
        ..b.clone()
    }
}

#[test]
fn one_rank_represents_its_role() {
    let (model, rack) = (tiny(), machine("gb200-nvl72", "torch-2.11"));
    let (call, phases) = model.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
    let mut uneven = 0;
    for (mesh, strategy) in [
        ("tp=5", Strategy::Ulysses),
        ("tp=5,pp=3", Strategy::Megatron),
        ("tp=2,pp=2", Strategy::Megatron),
        ("tp=3,pp=2", Strategy::Ulysses),
        ("pp=6", Strategy::Ulysses),
    ] {
        let mut mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() };
        let bundle = lower(&model, &mut mapping).unwrap();
        let of_roles = estimate_call(&bundle, call, phases, &rack, true).unwrap();
        let of_ranks = estimate_call(&split_roles(&bundle), call, phases, &rack, true).unwrap();
        let world = bundle.mesh.world_size() as usize;
        assert_eq!(of_roles.rank_classes.len(), bundle.roles.len());
        assert_eq!(of_ranks.rank_classes.len(), world);
        uneven += usize::from(bundle.roles.len() > bundle.mesh.axis_size(Axis::Pp) as usize);
        assert_eq!((of_roles.ns, &of_roles.phases), (of_ranks.ns, &of_ranks.phases), "{mesh}");
        let sorted = |mut bars: Vec<Interval>| {
            bars.sort_by(|a, b| {
                (a.rank, &a.track).cmp(&(b.rank, &b.track)).then(a.start_ns.total_cmp(&b.start_ns))
            });
            bars
        };
        assert_eq!(
            sorted(of_roles.intervals_of_all_ranks()),
            sorted(of_ranks.intervals_of_all_ranks()),
            "{mesh}"
        );
        assert!(
            (of_roles.sent_bytes[0] - of_ranks.sent_bytes[0]).abs() < 1.0
                && (of_roles.flops - of_ranks.flops).abs() < 1.0
        );
        let lanes: BTreeSet<String> = of_roles.intervals.iter().map(|b| b.track.clone()).collect();
        assert!(lanes.contains("compute"));
        assert_eq!(lanes.contains("pp"), mesh.contains("pp"));
    }
    assert!(uneven >= 2, "the cases include roles of uneven shards");
    // If only some ranks of a stage send to another host, every rank is simulated.
    let mut mapping = Mapping { mesh: "tp=5,pp=3".parse().unwrap(), ..Mapping::default() };
    let bundle = lower(&model, &mut mapping).unwrap();
    let classes = |cluster| {
        let machine = machine(cluster, "torch-2.11");
        estimate_call(&bundle, call, phases, &machine, false).unwrap().rank_classes.len()
    };
    assert_eq!((classes("gb200-nvl72"), classes("hgx-h200")), (bundle.roles.len(), 15));
}

#[test]
fn every_rejection_has_a_reason() {
    let (model, machine) = (tiny(), machine("hgx-h200", "torch-2.11"));
    let mut q = make_query(&model, &machine, 8, MediaCosts::NONE);
    q.min_devices = 1;
    let out = search_mappings(&q);
    let codes: Vec<&str> = out.rejected.keys().copied().collect();
    assert_eq!(codes, ["T0602", "T0603"], "the model has five heads and six blocks");
    assert_eq!(out.considered, out.legal + out.rejected.values().map(|r| r.count).sum::<u64>());
    assert_eq!(out.legal as usize, out.best.len());

    // Estimates give the reason for a single mapping.
    let mapping = Mapping { mesh: "tp=7,ep=2".parse().unwrap(), ..Mapping::default() };
    let why: Vec<&str> = estimate_mapping(&q, &mapping, DecodePlacement::OnMesh)
        .unwrap_err()
        .iter()
        .map(|d| d.code.id)
        .collect();
    assert_eq!(why, ["T0601", "T0602"]);
    let mapping = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
    let shared = estimate_mapping(&q, &mapping, DecodePlacement::AllRanks).unwrap_err();
    assert_eq!(shared[0].code.id, "T1232");
    assert!(shared[0].message.contains("cannot be shared"), "{:?}", shared[0]);

    q.objective = Objective::Deadline(Nanoseconds(1));
    let late = search_mappings(&q);
    assert!(late.best.is_empty() && late.rejected["T1231"].count == out.legal);
    let slowest = out.best.iter().map(|r| r.period.ns).fold(0.0, f64::max);
    q.objective = Objective::Deadline(Nanoseconds(slowest as u64 + 1));
    assert_eq!(
        search_mappings(&q).best[0].devices,
        1,
        "the minimum number of devices that meets the deadline"
    );
}

#[test]
fn memory_limits_mappings_and_more_memory_rejects_none() {
    let model = wan_14b();
    let fits = |gigabytes: f64| {
        let mut cluster = catalog::get("hgx-h200").unwrap();
        cluster.device.memory_bytes.value = gigabytes * 1e9;
        let machine = MachineModel::new(cluster, Profile::builtin("torch-2.11").unwrap());
        let mut q = make_query(&model, &machine, 8, MediaCosts::NONE);
        q.pins = VideoPins { topology: Some(Topology::Mesh), outstanding: Some(2), ..VideoPins::default() };
        q.objective = Objective::Memory;
        let out = search_mappings(&q);
        let full = out.rejected.get("T1230").map_or(0, |r| r.count);
        let legal: BTreeSet<String> =
            out.best.iter().map(|r| format!("{} {}", r.mapping.mesh, r.mapping.strategy.name())).collect();
        (full, legal, out)
    };
    let (full, few, _) = fits(20.0);
    assert!(full > 0 && !few.contains("tp=8 ulysses") && few.contains("tp=8 megatron"), "{few:?}");
    let (none, all, out) = fits(141.0);
    assert!(none == 0 && few.is_subset(&all));

    // Stages reduce memory, and fewer ranks compute at the same time.
    let at = |mesh: &str| {
        find_best(&out, |r| r.mapping.mesh.to_string() == mesh && r.mapping.strategy == Strategy::Ulysses)
    };
    let (one, two, four) = (at("tp=8"), at("tp=4, pp=2"), at("tp=2, pp=4"));
    let kept = |r: &RankedMapping| r.memory.total_bytes().0;
    assert!(kept(one) > kept(two) && kept(two) > kept(four));
    assert!(
        one.computing_ranks > two.computing_ranks
            && two.computing_ranks > four.computing_ranks
            && four.computing_ranks > 2.0
    );
    assert_eq!(one.mapping.blocks, [40]);
    // The weights are 14.3 billion parameters in bf16, with those of the conditioning in f32.
    let weights = one.memory.weights.0 as f64;
    assert!((1.0..1.02).contains(&(weights / 28.58e9)), "{weights}");
}

#[test]
fn more_bandwidth_never_makes_a_mapping_slower() {
    let model = tiny();
    let (call, phases) = model.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
    for (mesh, strategy) in [
        ("tp=5", Strategy::Ulysses),
        ("tp=3", Strategy::Megatron),
        ("tp=2,pp=3", Strategy::Ulysses),
        ("pp=2", Strategy::Ulysses),
    ] {
        let mut mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() };
        let bundle = lower(&model, &mut mapping).unwrap();
        let mut before = f64::INFINITY;
        for factor in [0.01, 0.1, 0.5, 1.0, 2.0, 10.0] {
            let mut cluster = catalog::get("hgx-h200").unwrap();
            for link in &mut cluster.links {
                link.bytes_per_s.value *= factor;
            }
            let machine = MachineModel::new(cluster, Profile::builtin("torch-2.11").unwrap());
            let ns = estimate_call(&bundle, call, phases, &machine, false).unwrap().ns;
            assert!(ns <= before, "{mesh} at {factor}: {ns} after {before}");
            before = ns;
        }
    }
}

#[test]
fn groups_that_cross_hosts_are_counted_and_cost_more() {
    let model = wan_14b();
    let (call, phases) = model.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
    let mut mapping = Mapping { mesh: "tp=10".parse().unwrap(), ..Mapping::default() };
    let bundle = lower(&model, &mut mapping).unwrap();
    let on =
        |cluster: &str| estimate_call(&bundle, call, phases, &machine(cluster, "torch-2.11"), false).unwrap();
    let mut apart = catalog::get("gb200-nvl72").unwrap();
    apart.domain_size = 8;
    let apart = MachineModel::new(apart, Profile::builtin("torch-2.11").unwrap());
    let apart = estimate_call(&bundle, call, phases, &apart, false).unwrap();
    let rack = on("gb200-nvl72");
    assert!(rack.sent_bytes[1] == 0.0 && apart.sent_bytes[1] > 0.0);
    assert!(
        (rack.sent_bytes[0] - apart.sent_bytes[0] - apart.sent_bytes[1]).abs() < 1e-6 * rack.sent_bytes[0],
        "both send the same bytes"
    );
    assert!(apart.ns > rack.ns);
}

#[test]
fn the_demo_has_an_estimate_on_a_laptop() {
    let read = |f: &str| {
        std::fs::read_to_string(format!("{}/../../models/demo/{f}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let (config, stream) = (read("config.json"), read("stream.toml"));
    let model = logical(&VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap());
    let machine = machine("laptop", "tessera");
    let mut q = make_query(&model, &machine, 2, MediaCosts::NONE);
    q.min_devices = 1;
    let out = search_mappings(&q);
    assert!(out.best.iter().all(|r| r.call.ns > 0.0 && r.fps.is_finite()));
    assert!(out.best.iter().any(|r| r.mapping.mesh.to_string() == "tp=2"));
}

#[test]
fn search_results_equal_estimates_of_the_whole_model() {
    let (model, machine) = (tiny(), machine("hgx-h200", "torch-2.11"));
    let mut q = make_query(&model, &machine, 8, MediaCosts::NONE);
    q.min_devices = 1;
    let out = search_mappings(&q);
    let meshes: BTreeSet<String> = out.best.iter().map(|r| r.mapping.mesh.to_string()).collect();
    assert!(
        meshes.contains("tp=5") && meshes.contains("tp=3, pp=2") && meshes.contains("pp=6"),
        "{meshes:?}"
    );
    // Only the first result has the intervals of a chart.
    for found in &out.best {
        let mut whole = estimate_mapping(&q, &found.mapping, found.decode).unwrap();
        let mut found = found.clone();
        for call in [&mut whole.call, &mut found.call] {
            call.intervals.clear();
            call.interval_ops.clear();
        }
        assert_eq!(found, whole);
    }
    let mut progress = Vec::new();
    let again = search_with_progress(&q, &mut |done, all| progress.push((done, all)));
    assert_eq!(again, out);
    let all = progress.len() - 1;
    assert_eq!(progress, (0..=all).map(|done| (done, all)).collect::<Vec<_>>());
}
