//! The search over mappings of a video generator: what it finds by itself, and that its estimates are consistent.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeSet;

use tessera_base::Nanoseconds;
use tessera_cost::bars::Bar;
use tessera_cost::{Machine, Profile};
use tessera_ir::{Bundle, Phase, RoleRanks};
use tessera_mesh::{Axis, Rank, clusters};
use tessera_models::VideoModel;
use tessera_plan::search::Objective;
use tessera_plan::video::{
    Decode, Outcome, Pins, Question, Ranked, Studio, estimate, estimate_call, players, search, search_telling,
};
use tessera_plan::{DtypePolicy, Logical, Mapping, Strategy, Topology, lower};

use crate::support::logical;

mod support;

/// The 14B generator at 480×832 with four steps; its context is recomputed from the last chunk's pixels.
fn wan() -> Logical {
    let config = include_str!("../../../models/wan2.1-14b/config.json");
    let stream =
        include_str!("../../../models/wan2.1-14b/stream.toml").replace("\"resident\"", "\"recompute\"");
    logical(&VideoModel::parse(("config.json", config), ("stream.toml", &stream)).unwrap())
}

fn tiny() -> Logical {
    let config = r#"{"dim":60,"ffn_dim":104,"num_heads":5,"num_layers":6,"in_dim":4,"out_dim":4,"text_len":7,
        "text_dim":20,"freq_dim":32}"#;
    logical(
        &VideoModel::parse(("config.json", config), ("stream.toml", "[video]\nwidth = 80\nheight = 48\n"))
            .unwrap(),
    )
}

fn machine(cluster: &str, profile: &str) -> Machine {
    Machine::new(clusters::named(cluster).unwrap(), Profile::named(profile).unwrap())
}

/// Decode of three latents and encode of one frame as measured on one H200 with an eager decoder, in nanoseconds; the
/// encode at the decoder's rate.
fn measured_studio(coupled: bool, shardable: Option<f64>) -> Studio {
    Studio::of(3, 192e6, 12.9e6, coupled, shardable)
}

fn ask<'a>(logical: &'a Logical, machine: &'a Machine, devices: u32, studio: Studio) -> Question<'a> {
    Question {
        logical,
        call: "chunk.fill3",
        frames: 12,
        machine,
        devices,
        at_least: devices,
        objective: Objective::Throughput,
        studio,
        message_ns: 50_000.0,
        dtype: DtypePolicy::F32,
        pins: Pins::default(),
        keep: 1000,
    }
}

fn best(of: &Outcome, keep: impl Fn(&Ranked) -> bool) -> &Ranked {
    of.best.iter().find(|r| keep(r)).unwrap()
}

#[test]
fn a_dedicated_decode_rank_is_wrong_on_8_devices_when_chunks_are_coupled() {
    let (model, machine) = (wan(), machine("hgx-h200", "torch-2.11"));
    let outside = |r: &Ranked| r.mapping.topology != Topology::Mesh;

    let shared = search(&ask(&model, &machine, 8, measured_studio(true, Some(0.8))));
    let first = &shared.best[0];
    assert_eq!((first.mapping.topology, first.decode), (Topology::Mesh, Decode::AllHands));
    assert_eq!(
        (first.mapping.mesh.to_string().as_str(), first.mapping.strategy),
        ("tp=8", Strategy::Ulysses)
    );
    let dedicated = best(&shared, outside);
    assert!(first.fps > dedicated.fps, "{} against {}", first.fps, dedicated.fps);
    // Without sharing the decode, a rank of its own costs more than a fifth.
    let unshared = best(&shared, |r| r.decode == Decode::AnchorFirst);
    assert!(first.fps > 1.2 * unshared.fps, "{} against {}", first.fps, unshared.fps);

    // Where one rank must decode all, it had better be one that does not hold up seven others.
    let alone = search(&ask(&model, &machine, 8, measured_studio(true, None)));
    assert_eq!(alone.best[0].decode, Decode::AnchorFirst);
    assert!(outside(&alone.best[0]));

    // Uncoupled, it decodes beside the next chunk.
    let loose = search(&ask(&model, &machine, 8, measured_studio(false, None)));
    assert_eq!(loose.best[0].decode, Decode::Beside);
    for o in [&shared, &alone, &loose] {
        assert_eq!(o.considered, o.legal + o.refused.values().map(|r| r.count).sum::<u64>());
        for r in &o.best {
            assert!(
                r.mapping.contradictions().is_empty()
                    && Mapping::parse("m", &r.mapping.text()).unwrap() == r.mapping
            );
        }
    }
}

#[test]
fn ulysses_beats_megatron_for_the_14b_generator_from_2_devices_on() {
    let (model, machine) = (wan(), machine("hgx-h200", "torch-2.11"));
    for devices in [2, 4, 8] {
        let mut q = ask(&model, &machine, devices, Studio::NONE);
        q.pins =
            Pins { pp: Some(1), topology: Some(Topology::Mesh), outstanding: Some(2), ..Pins::default() };
        let found = search(&q);
        assert_eq!(found.best[0].mapping.strategy, Strategy::Ulysses, "on {devices}");
        let megatron = best(&found, |r| r.mapping.strategy == Strategy::Megatron);
        assert!(found.best[0].fps > megatron.fps);
    }
}

/// The same bundle with a role for every rank, so that each plays for itself.
fn one_by_one(b: &Bundle) -> Bundle {
    let ranks: Vec<(usize, Rank)> =
        b.roles.iter().enumerate().flat_map(|(i, r)| r.ranks.iter().map(move |x| (i, *x))).collect();
    let role = |(i, r): &(usize, Rank)| RoleRanks { role: b.roles[*i].role.clone(), ranks: vec![*r] };
    let phase = |p: &Phase| Phase {
        name: p.name.clone(),
        programs: ranks.iter().map(|(i, _)| p.programs[*i].clone()).collect(),
        memory: ranks.iter().map(|(i, _)| p.memory[*i].clone()).collect(),
    };
    Bundle {
        roles: ranks.iter().map(role).collect(),
        phases: b.phases.iter().map(phase).collect(),
        ..b.clone()
    }
}

#[test]
fn one_rank_of_a_role_tells_the_times_of_all() {
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
        let of_ranks = estimate_call(&one_by_one(&bundle), call, phases, &rack, true).unwrap();
        let world = bundle.mesh.ranks() as usize;
        assert_eq!(of_roles.players.len(), bundle.roles.len());
        assert_eq!(of_ranks.players.len(), world);
        uneven += usize::from(bundle.roles.len() > bundle.mesh.size(Axis::Pp) as usize);
        assert_eq!((of_roles.ns, &of_roles.phases), (of_ranks.ns, &of_ranks.phases), "{mesh}");
        let sorted = |mut bars: Vec<Bar>| {
            bars.sort_by(|a, b| {
                (a.rank, &a.lane).cmp(&(b.rank, &b.lane)).then(a.start_ns.total_cmp(&b.start_ns))
            });
            bars
        };
        assert_eq!(sorted(of_roles.expand()), sorted(of_ranks.expand()), "{mesh}");
        assert!(
            (of_roles.sent[0] - of_ranks.sent[0]).abs() < 1.0
                && (of_roles.flops - of_ranks.flops).abs() < 1.0
        );
        let lanes: BTreeSet<String> = of_roles.bars.iter().map(|b| b.lane.clone()).collect();
        assert!(lanes.contains("compute"));
        assert_eq!(lanes.contains("pp"), mesh.contains("pp"));
    }
    assert!(uneven >= 2, "roles of uneven shards are among them");
    // Where some ranks of a stage send to another host and others do not, every rank plays.
    let mut mapping = Mapping { mesh: "tp=5,pp=3".parse().unwrap(), ..Mapping::default() };
    let bundle = lower(&model, &mut mapping).unwrap();
    assert_eq!(players(&bundle, &rack.cluster).len(), bundle.roles.len());
    assert_eq!(players(&bundle, &clusters::named("hgx-h200").unwrap()).len(), 15);
}

#[test]
fn every_refusal_has_its_reason() {
    let (model, machine) = (tiny(), machine("hgx-h200", "torch-2.11"));
    let mut q = ask(&model, &machine, 8, Studio::NONE);
    q.at_least = 1;
    let out = search(&q);
    let codes: Vec<&str> = out.refused.keys().copied().collect();
    assert_eq!(codes, ["T0602", "T0603"], "five heads, six blocks");
    assert_eq!(out.considered, out.legal + out.refused.values().map(|r| r.count).sum::<u64>());
    assert_eq!(out.legal as usize, out.best.len());

    // Why this one?
    let mapping = Mapping { mesh: "tp=7,ep=2".parse().unwrap(), ..Mapping::default() };
    let why: Vec<&str> =
        estimate(&q, &mapping, Decode::OnMesh).unwrap_err().iter().map(|d| d.code.id).collect();
    assert_eq!(why, ["T0601", "T0602"]);
    let mapping = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
    let shared = estimate(&q, &mapping, Decode::AllHands).unwrap_err();
    assert_eq!(shared[0].code.id, "T1232");
    assert!(shared[0].message.contains("cannot be shared"), "{:?}", shared[0]);

    q.objective = Objective::Deadline(Nanoseconds(1));
    let late = search(&q);
    assert!(late.best.is_empty() && late.refused["T1231"].count == out.legal);
    let slowest = out.best.iter().map(|r| r.period.ns).fold(0.0, f64::max);
    q.objective = Objective::Deadline(Nanoseconds(slowest as u64 + 1));
    assert_eq!(search(&q).best[0].devices, 1, "the fewest devices in time");
}

#[test]
fn memory_decides_and_more_of_it_refuses_nothing() {
    let model = wan();
    let fits = |gigabytes: f64| {
        let mut cluster = clusters::named("hgx-h200").unwrap();
        cluster.device.memory_bytes.value = gigabytes * 1e9;
        let machine = Machine::new(cluster, Profile::named("torch-2.11").unwrap());
        let mut q = ask(&model, &machine, 8, Studio::NONE);
        q.pins = Pins { topology: Some(Topology::Mesh), outstanding: Some(2), ..Pins::default() };
        q.objective = Objective::Memory;
        let out = search(&q);
        let full = out.refused.get("T1230").map_or(0, |r| r.count);
        let legal: BTreeSet<String> =
            out.best.iter().map(|r| format!("{} {}", r.mapping.mesh, r.mapping.strategy.name())).collect();
        (full, legal, out)
    };
    let (full, few, _) = fits(20.0);
    assert!(full > 0 && !few.contains("tp=8 ulysses") && few.contains("tp=8 megatron"), "{few:?}");
    let (none, all, out) = fits(141.0);
    assert!(none == 0 && few.is_subset(&all));

    // Stages ease memory and let fewer ranks compute at once.
    let at = |mesh: &str| {
        best(&out, |r| r.mapping.mesh.to_string() == mesh && r.mapping.strategy == Strategy::Ulysses)
    };
    let (one, two, four) = (at("tp=8"), at("tp=4, pp=2"), at("tp=2, pp=4"));
    let kept = |r: &Ranked| r.memory.total().0;
    assert!(kept(one) > kept(two) && kept(two) > kept(four));
    assert!(one.computing > two.computing && two.computing > four.computing && four.computing > 2.0);
    assert_eq!(one.mapping.blocks, [40]);
    // Weights of 14.3 billion parameters in bf16.
    let weights = one.memory.weights.0 as f64;
    assert!((weights / 28.58e9 - 1.0).abs() < 0.001, "{weights}");
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
            let mut cluster = clusters::named("hgx-h200").unwrap();
            for link in &mut cluster.links {
                link.bytes_per_s.value *= factor;
            }
            let machine = Machine::new(cluster, Profile::named("torch-2.11").unwrap());
            let ns = estimate_call(&bundle, call, phases, &machine, false).unwrap().ns;
            assert!(ns <= before, "{mesh} at {factor}: {ns} after {before}");
            before = ns;
        }
    }
}

#[test]
fn groups_that_cross_hosts_are_counted_and_cost_more() {
    let model = wan();
    let (call, phases) = model.calls.iter().find(|c| c.0 == "chunk.fill3").unwrap();
    let mut mapping = Mapping { mesh: "tp=10".parse().unwrap(), ..Mapping::default() };
    let bundle = lower(&model, &mut mapping).unwrap();
    let on =
        |cluster: &str| estimate_call(&bundle, call, phases, &machine(cluster, "torch-2.11"), false).unwrap();
    let mut apart = clusters::named("gb200-nvl72").unwrap();
    apart.domain = 8;
    let apart = Machine::new(apart, Profile::named("torch-2.11").unwrap());
    let apart = estimate_call(&bundle, call, phases, &apart, false).unwrap();
    let rack = on("gb200-nvl72");
    assert!(rack.sent[1] == 0.0 && apart.sent[1] > 0.0);
    assert!((rack.sent[0] - apart.sent[0] - apart.sent[1]).abs() < 1e-6 * rack.sent[0], "the same bytes");
    assert!(apart.ns > rack.ns);
}

#[test]
fn the_demo_on_a_laptop_has_an_estimate() {
    let read = |f: &str| {
        std::fs::read_to_string(format!("{}/../../models/demo/{f}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let (config, stream) = (read("config.json"), read("stream.toml"));
    let model = logical(&VideoModel::parse(("config.json", &config), ("stream.toml", &stream)).unwrap());
    let machine = machine("laptop", "tessera");
    let mut q = ask(&model, &machine, 2, Studio::NONE);
    q.at_least = 1;
    let out = search(&q);
    assert!(out.best.iter().all(|r| r.call.ns > 0.0 && r.fps.is_finite()));
    assert!(out.best.iter().any(|r| r.mapping.mesh.to_string() == "tp=2"));
}

#[test]
fn what_a_search_finds_is_what_the_whole_model_gives() {
    let (model, machine) = (tiny(), machine("hgx-h200", "torch-2.11"));
    let mut q = ask(&model, &machine, 8, Studio::NONE);
    q.at_least = 1;
    let out = search(&q);
    let meshes: BTreeSet<String> = out.best.iter().map(|r| r.mapping.mesh.to_string()).collect();
    assert!(
        meshes.contains("tp=5") && meshes.contains("tp=3, pp=2") && meshes.contains("pp=6"),
        "{meshes:?}"
    );
    // The first has the bars of a chart, the others none.
    for found in &out.best {
        let mut whole = estimate(&q, &found.mapping, found.decode).unwrap();
        let mut found = found.clone();
        for call in [&mut whole.call, &mut found.call] {
            call.bars.clear();
            call.ops.clear();
        }
        assert_eq!(found, whole);
    }
    let mut told = Vec::new();
    let again = search_telling(&q, &mut |done, all| told.push((done, all)));
    assert_eq!(again, out);
    let all = told.len() - 1;
    assert_eq!(told, (0..=all).map(|done| (done, all)).collect::<Vec<_>>());
}
