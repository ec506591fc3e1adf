//! Compares the simulated run with the planner's estimate: two implementations of streams, events
//! and rendezvous must give the same times from the same prices.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};

use tessera::sim::{ClusterPrices, HOP_LATENCY_NS, SimMachine, to_bundle};
use tessera::stream_options::StreamOptions;
use tessera::summary::PlanSummary;
use tessera::synthetic_delays::{MediaDelays, SyntheticDelays};
use tessera::{DtypePolicy, Mapping, Model, Overrides, Plan, StopHandle, Strategy, Topology, plan};
use tessera_device::TimingModel;
use tessera_estimate::{VideoQuery, resolve_machine, search_video};
use tessera_mesh::Rank;
use tessera_plan::video::{CallEstimate, DecodePlacement, VideoPins, estimate_call};
use tessera_report::record::{ChunkRecord, RunRecord};
use tessera_sim::SimDevices;

fn open_model(model: &str, recompute: bool) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
    Model::open(&dir, &Overrides { recompute: Some(recompute), ..Overrides::default() }).unwrap()
}

/// The sharding strategy over tp, and the number of row chunks.
type TpSharding = (Strategy, u32);

const ULYSSES: TpSharding = (Strategy::Ulysses, 1);
const MEGATRON: TpSharding = (Strategy::Megatron, 1);
const MEGATRON_CHUNKED: TpSharding = (Strategy::Megatron, 2);

fn plan_split(model: &str, mesh: &str, (strategy, pieces): TpSharding, topology: Topology) -> Plan {
    let model = open_model(model, false);
    let mapping = Mapping {
        mesh: mesh.parse().unwrap(),
        strategy,
        overlap_chunks: pieces,
        topology,
        ..Mapping::default()
    };
    plan::plan_model(&model.video, &model.name, "", &mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

/// Estimates the steady chunk of a plan; returns the estimate and the prices of the plan's
/// programs.
fn estimate_plan(plan: &Plan, cluster: Option<&str>, profile: Option<&str>) -> (CallEstimate, ClusterPrices) {
    let machine = resolve_machine(cluster, profile, None, plan.sealed.mesh().world_size()).unwrap();
    let prices = ClusterPrices::from_plan(plan, &machine).unwrap();
    let steady =
        PlanSummary::from_plan(plan).steady_call().map(|c| (c.name.clone(), c.phases.clone())).unwrap();
    let estimate = estimate_call(&to_bundle(&plan.sealed), &steady.0, &steady.1, &machine, false).unwrap();
    assert_eq!(estimate.throttle_factor, prices.throttle_factor());
    (estimate, prices)
}

/// Simulates the same chunk and returns the end of each phase on the last rank to end it; every
/// rank begins at 0.
fn simulate_phases(plan: &Plan, prices: &ClusterPrices, phases: &[String]) -> Vec<f64> {
    let sealed = &plan.sealed;
    let mut devices = SimDevices::new(*sealed.mesh(), prices.contention_factor());
    let mut loaded = Vec::new();
    for phase in phases {
        let roles = sealed.roles().iter().map(|role| {
            let program = sealed.rank_program(phase, role.ranks[0]).unwrap();
            devices.load(program, &role.ranks, prices).unwrap()
        });
        loaded.push(roles.collect::<Vec<_>>());
    }
    let of = |rank: Rank, phase: usize| loaded[phase][sealed.role_of(rank).unwrap()];
    let mut at = vec![0; sealed.mesh().world_size() as usize];
    let mut ends = vec![0.0f64; phases.len()];
    plan.mesh_ranks().for_each(|r| devices.start_program(0, r, of(r, 0)));
    while let Some(now) = devices.next_event_ns() {
        for e in devices.advance_to(now) {
            let phase = &mut at[e.rank.0 as usize];
            ends[*phase] = ends[*phase].max(e.end_ns);
            *phase += 1;
            if *phase < phases.len() {
                devices.start_program(now, e.rank, of(e.rank, *phase));
            }
        }
    }
    assert!(devices.find_stall().is_none() && plan.mesh_ranks().all(|r| at[r.0 as usize] == phases.len()));
    ends
}

/// Chunks of a run; the window is full from the fourth chunk on.
const CHUNKS: u32 = 7;
const FIRST_STEADY_CHUNK: u32 = 4;

/// Model, mesh, cut, topology, cluster, profile.
type SimCase = (&'static str, &'static str, TpSharding, Topology, Option<&'static str>, Option<&'static str>);

#[test]
fn simulated_devices_end_each_phase_at_the_estimated_time() {
    let cases: [SimCase; 11] = [
        ("demo", "tp=2", MEGATRON, Topology::Mesh, None, None),
        ("demo", "tp=2", ULYSSES, Topology::Mesh, Some("laptop"), None),
        ("demo", "pp=2", ULYSSES, Topology::Mesh, None, Some("ideal")),
        ("demo", "tp=2,pp=3", MEGATRON, Topology::Pp1, None, None),
        ("wan2.1-1.3b", "tp=4", ULYSSES, Topology::Mesh, Some("hgx-h100"), None),
        ("wan2.1-1.3b", "tp=3", MEGATRON, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=8", ULYSSES, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=4,pp=4", MEGATRON, Topology::Mesh, Some("hgx-h200"), None),
        ("demo", "tp=2,pp=2", MEGATRON_CHUNKED, Topology::Pp1, None, None),
        ("wan2.1-14b", "tp=4", MEGATRON_CHUNKED, Topology::Mesh, Some("hgx-h200"), None),
        ("wan2.1-14b", "tp=8,pp=9", ULYSSES, Topology::Mesh, None, Some("tessera")),
    ];
    for (model, mesh, cut, topology, cluster, profile) in cases {
        let plan = plan_split(model, mesh, cut, topology);
        let (estimate, prices) = estimate_plan(&plan, cluster, profile);
        let phases: Vec<String> = estimate.phases.iter().map(|p| p.name.clone()).collect();
        let ops: usize = phases
            .iter()
            .map(|p| {
                plan.sealed
                    .roles()
                    .iter()
                    .map(|r| plan.sealed.rank_program(p, r.ranks[0]).unwrap().ops.len())
                    .sum::<usize>()
            })
            .sum();
        let ends = simulate_phases(&plan, &prices, &phases);
        let mut most = 0.0f64;
        for (phase, end) in estimate.phases.iter().zip(&ends) {
            most = most.max((phase.end_ns - end).abs());
        }
        println!(
            "{model} {mesh} {cut:?} on {}: {:.3} ms, off by {most:.1} ns over {ops} ops",
            prices.name(),
            estimate.ns / 1e6
        );
        // One side rounds prices to whole nanoseconds; nothing else may differ.
        assert!(most <= ops as f64, "{model} {mesh}: off by {most} ns");
    }
}

fn simulate_stream(plan: &Plan, prices: &ClusterPrices, out: PathBuf, delays: SyntheticDelays) -> RunRecord {
    let (chunks, prompt) = (CHUNKS, "a red circle".into());
    let options = StreamOptions { chunks, prompt, out, delays, ..StreamOptions::default() };
    let machine = SimMachine { prices, name: prices.name() };
    let report = tessera::sim::run(plan, &options, machine, &StopHandle::default(), &mut |_| {}).unwrap();
    assert_eq!((report.exit_code, report.chunks), (0, CHUNKS), "{report:?}");
    RunRecord::parse(&std::fs::read(options.out.join("record.jsonl")).unwrap()).unwrap()
}

#[test]
fn a_run_through_leader_and_workers_takes_the_estimate_plus_message_hops() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("demo", "tp=2", MEGATRON, Topology::Mesh),
        ("demo", "tp=2,pp=2", ULYSSES, Topology::Pp1),
        ("wan2.1-14b", "tp=8,pp=9", ULYSSES, Topology::Mesh),
    ];
    for (n, (model, mesh, cut, topology)) in cases.into_iter().enumerate() {
        let plan = plan_split(model, mesh, cut, topology);
        let (estimate, prices) = estimate_plan(&plan, None, None);
        let record =
            simulate_stream(&plan, &prices, dir.path().join(n.to_string()), SyntheticDelays::default());
        let steady: Vec<&ChunkRecord> = record.chunks.iter().filter(|c| c.chunk >= 3).collect();
        for chunk in steady {
            let names = |rank: usize| -> Vec<&str> {
                let own = chunk.ranks[rank].phases.iter().filter(|p| p.stream == "compute");
                own.map(|p| p.name.as_str()).collect()
            };
            let phases: Vec<&str> = estimate.phases.iter().map(|p| p.name.as_str()).collect();
            assert_eq!(names(1), phases, "the steady call is the one that was estimated");
            let last = chunk
                .ranks
                .iter()
                .flat_map(|r| &r.phases)
                .filter(|p| p.stream == "compute")
                .map(|p| p.end_ns);
            let ns = last.max().unwrap() - chunk.start_ns;
            // The commit reaches ranks at different times: after one hop or, behind a mesh leader,
            // two.
            let (least, most) = (estimate.ns, estimate.ns + 2.0 * HOP_LATENCY_NS as f64);
            println!("{model} {mesh}: {:.3} ms, estimate {:.3} ms", ns as f64 / 1e6, estimate.ns / 1e6);
            assert!(
                ns as f64 >= least - 1e4 && ns as f64 <= most + 1e4,
                "{model} {mesh}: {ns} ns of {least} to {most}"
            );
        }
    }
}

/// Decode placement, leader placement, tp size and number of stages.
type DecodeSetup = (DecodePlacement, Topology, u32, u32);

/// Times of a stream by estimate and by simulation: the period, the latency from commit to the last
/// pixel, and the generator alone.
#[derive(Debug, Clone, Copy)]
struct StreamTimes {
    period_ns: [f64; 2],
    latency_ns: [f64; 2],
    generate_ns: [f64; 2],
}

/// Plans a stream of the model with every search parameter pinned, for each decoder, and simulates
/// it with the resulting mapping.
fn measure_stream_times(
    setup: DecodeSetup,
    coupled: bool,
    outstanding: u32,
    delays: &[MediaDelays],
    out: &Path,
) -> Vec<StreamTimes> {
    let (decode, topology, tp, pp) = setup;
    let model = open_model("wan2.1-1.3b", coupled);
    let machine = resolve_machine(Some("hgx-h200"), Some("torch-2.11"), None, 8).unwrap();
    let mut asked = VideoQuery {
        model: &model,
        machine: machine.clone(),
        devices: Some(3),
        objective: None,
        dtype: Some(DtypePolicy::Bf16),
        pins: VideoPins {
            tp: Some(tp),
            pp: Some(pp),
            strategy: Some(Strategy::Ulysses),
            overlap_chunks: None,
            topology: Some(topology),
            decode: Some(decode),
            media: None,
            outstanding: Some(outstanding),
        },
        decode_ns: None,
        encode_ns: None,
        whole_decode: false,
        command: String::new(),
    };
    let mut planned: Option<(Plan, ClusterPrices)> = None;
    let mut all = Vec::new();
    for (n, media) in delays.iter().enumerate() {
        asked.decode_ns = Some((media.first_ns + media.rest_ns) as f64);
        asked.encode_ns = Some(media.encode_ns as f64);
        let (sheet, mapping) = search_video(&asked, &mut |_, _| ()).unwrap();
        let best = &sheet.json["best"][0];
        assert_eq!((&best["decode"], &sheet.json["legal_count"]), (&decode.name().into(), &1.into()));
        let (plan, prices) = planned.get_or_insert_with(|| {
            let plan = plan::plan_model(&model.video, &model.name, "", &mapping.unwrap()).unwrap();
            let prices = ClusterPrices::from_plan(&plan, &machine).unwrap();
            (plan, prices)
        });
        let delays = SyntheticDelays { media: Some(*media), generate_ns: None };
        let record = simulate_stream(plan, prices, out.join(n.to_string()), delays);
        // No call follows the last chunk, so its decode is not split.
        let steady: Vec<&ChunkRecord> =
            record.chunks.iter().filter(|c| (FIRST_STEADY_CHUNK..CHUNKS - 1).contains(&c.chunk)).collect();
        let mean = |of: fn(&ChunkRecord) -> u64| {
            steady.iter().map(|c| of(c) as f64).sum::<f64>() / steady.len() as f64
        };
        let estimate = |key: &str| best[key].as_f64().unwrap();
        all.push(StreamTimes {
            period_ns: [estimate("period_ns"), mean(|c| c.pipeline.unwrap().period_ns)],
            // For calls sent ahead, the estimate also counts the time in the queue.
            latency_ns: [
                estimate("latency_ns") - f64::from(outstanding - 1) * estimate("period_ns"),
                mean(|c| c.wall_ns),
            ],
            generate_ns: [estimate("call_ns"), mean(|c| c.pipeline.unwrap().stage1_ns)],
        });
    }
    all
}

#[test]
fn every_decode_setup_keeps_the_period_of_its_estimate() {
    let ms = |first: u64, encode: u64| MediaDelays {
        first_ns: first * 1_000_000,
        rest_ns: 2 * first * 1_000_000,
        encode_ns: encode * 1_000_000,
    };
    let dir = tempfile::tempdir().unwrap();
    let close = |of: [f64; 2]| (of[1] / of[0] - 1.0).abs() < 0.02;
    // The first decoder is faster than the generator; the second one, used if a call is sent ahead,
    // is slower.
    let decoders = [ms(40, 15), ms(400, 60)];
    let ways = [
        ((DecodePlacement::OnMesh, Topology::Mesh, 2, 1), true),
        ((DecodePlacement::OnMesh, Topology::Mesh, 2, 1), false),
        ((DecodePlacement::OnMesh, Topology::Mesh, 1, 2), true),
        ((DecodePlacement::AnchorFirst, Topology::Pp0, 1, 1), true),
        ((DecodePlacement::AnchorFirst, Topology::Pp1, 2, 1), true),
        ((DecodePlacement::Overlapped, Topology::Pp0, 1, 1), false),
        ((DecodePlacement::Overlapped, Topology::Pp1, 2, 1), false),
    ];
    for (n, (way, coupled)) in ways.into_iter().enumerate() {
        for outstanding in [1, 2] {
            let out = dir.path().join(format!("{n}-{outstanding}"));
            std::fs::create_dir(&out).unwrap();
            for (slow, p) in
                measure_stream_times(way, coupled, outstanding, &decoders[..outstanding as usize], &out)
                    .into_iter()
                    .enumerate()
            {
                let at = format!("{way:?}, coupled {coupled}, {outstanding} under way, {:?}", decoders[slow]);
                println!("{at}: {p:.0?}");
                assert!(close(p.period_ns) && close(p.generate_ns), "{at}: {p:?}");
                // Chunks queue before a decoder that is too slow, and the estimated latency
                // excludes that queue.
                let queues = way.0 != DecodePlacement::OnMesh && slow == 1;
                assert!(queues || close(p.latency_ns), "{at}: {p:?}");
            }
        }
    }
}

#[test]
fn the_models_own_decoder_takes_its_estimated_time() {
    let model = open_model("demo", true);
    let dir = tempfile::tempdir().unwrap();
    let plan = plan::plan_model(&model.video, &model.name, "", &Mapping::default()).unwrap();
    for (n, profile) in ["torch-2.11", "ideal"].into_iter().enumerate() {
        let machine = resolve_machine(None, Some(profile), None, 1).unwrap();
        let prices = ClusterPrices::from_plan(&plan, &machine).unwrap();
        let alone = |phase: &str| {
            let program = plan.sealed.rank_program(phase, Rank(0)).unwrap();
            tessera_cost::program_cost::ProgramEstimate::new(&machine, program, 1.0).standalone_ns()
        };
        let want = alone("decode") * model.video.stream.chunk_frames as f64 + alone("encode");
        let record =
            simulate_stream(&plan, &prices, dir.path().join(n.to_string()), SyntheticDelays::default());
        for c in record.chunks.iter().filter(|c| (FIRST_STEADY_CHUNK..CHUNKS - 1).contains(&c.chunk)) {
            let took = c.pipeline.unwrap().stage0_ns as f64;
            assert!(want > 0.0 && (took - want).abs() < 10.0, "{profile}: {took} ns, estimate {want} ns");
        }
    }
}
