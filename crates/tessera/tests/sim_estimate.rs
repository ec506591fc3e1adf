//! The modelled run against the planner's estimate: two implementations of streams, events and meetings over one set of
//! prices, and the same instants.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};

use tessera::modelled::{Modelled, ModelledStudio};
use tessera::search::{VideoAsked, video};
use tessera::sim::{ClusterPrices, HOP_NS, Machine, bundle, machine};
use tessera::stream::StreamOptions;
use tessera::summary::Summary;
use tessera::{DtypePolicy, Interrupt, Mapping, Model, Overrides, Plan, Strategy, Topology, plan};
use tessera_device::Prices;
use tessera_mesh::Rank;
use tessera_plan::video::{CallEstimate, Decode, Pins, estimate_call};
use tessera_report::record::{Chunk, Record};
use tessera_sim::Devices;

fn opened(model: &str, recompute: bool) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
    Model::open(&dir, &Overrides { recompute: Some(recompute), ..Overrides::default() }).unwrap()
}

/// How tp cuts a block, and into how many pieces rows are cut.
type Cut = (Strategy, u32);

const ULYSSES: Cut = (Strategy::Ulysses, 1);
const MEGATRON: Cut = (Strategy::Megatron, 1);
const IN_PIECES: Cut = (Strategy::Megatron, 2);

fn planned(model: &str, mesh: &str, (strategy, pieces): Cut, topology: Topology) -> Plan {
    let model = opened(model, false);
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, pieces, topology, ..Mapping::default() };
    plan::make(&model.video, &model.name, "", &mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

/// The estimate of a plan's steady chunk, and what its programs take.
fn estimated(plan: &Plan, cluster: Option<&str>, profile: Option<&str>) -> (CallEstimate, ClusterPrices) {
    let machine = machine(cluster, profile, None, plan.sealed.mesh().ranks()).unwrap();
    let prices = ClusterPrices::of(plan, &machine).unwrap();
    let steady = Summary::of(plan).steady_call().map(|c| (c.name.clone(), c.phases.clone())).unwrap();
    let estimate = estimate_call(&bundle(&plan.sealed), &steady.0, &steady.1, &machine, false).unwrap();
    assert_eq!(estimate.pace, prices.pace());
    (estimate, prices)
}

/// Ends of the phases of the same chunk on modelled devices, each of the last rank to end it; every rank begins at 0.
fn played(plan: &Plan, prices: &ClusterPrices, phases: &[String]) -> Vec<f64> {
    let sealed = &plan.sealed;
    let mut devices = Devices::new(*sealed.mesh(), prices.contention());
    let mut loaded = Vec::new();
    for phase in phases {
        let roles = sealed.roles().iter().map(|role| {
            let program = sealed.program(phase, role.ranks[0]).unwrap();
            devices.load(program, &role.ranks, prices).unwrap()
        });
        loaded.push(roles.collect::<Vec<_>>());
    }
    let of = |rank: Rank, phase: usize| loaded[phase][sealed.role_of(rank).unwrap()];
    let mut at = vec![0; sealed.mesh().ranks() as usize];
    let mut ends = vec![0.0f64; phases.len()];
    plan.mesh_ranks().for_each(|r| devices.begin(0, r, of(r, 0)));
    while let Some(now) = devices.next_ns() {
        for e in devices.advance(now) {
            let phase = &mut at[e.rank.0 as usize];
            ends[*phase] = ends[*phase].max(e.ended_ns);
            *phase += 1;
            if *phase < phases.len() {
                devices.begin(now, e.rank, of(e.rank, *phase));
            }
        }
    }
    assert!(devices.stalled().is_none() && plan.mesh_ranks().all(|r| at[r.0 as usize] == phases.len()));
    ends
}

/// Chunks of a run; the window is full from the fourth on.
const CHUNKS: u32 = 7;
const STEADY: u32 = 4;

/// Model, mesh, cut, topology, cluster, profile.
type Case = (&'static str, &'static str, Cut, Topology, Option<&'static str>, Option<&'static str>);

#[test]
fn modelled_devices_end_each_phase_when_the_estimate_says() {
    let cases: [Case; 11] = [
        ("demo", "tp=2", MEGATRON, Topology::Mesh, None, None),
        ("demo", "tp=2", ULYSSES, Topology::Mesh, Some("laptop"), None),
        ("demo", "pp=2", ULYSSES, Topology::Mesh, None, Some("ideal")),
        ("demo", "tp=2,pp=3", MEGATRON, Topology::Pp1, None, None),
        ("wan2.1-1.3b", "tp=4", ULYSSES, Topology::Mesh, Some("hgx-h100"), None),
        ("wan2.1-1.3b", "tp=3", MEGATRON, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=8", ULYSSES, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=4,pp=4", MEGATRON, Topology::Mesh, Some("hgx-h200"), None),
        ("demo", "tp=2,pp=2", IN_PIECES, Topology::Pp1, None, None),
        ("wan2.1-14b", "tp=4", IN_PIECES, Topology::Mesh, Some("hgx-h200"), None),
        ("wan2.1-14b", "tp=8,pp=9", ULYSSES, Topology::Mesh, None, Some("tessera")),
    ];
    for (model, mesh, cut, topology, cluster, profile) in cases {
        let plan = planned(model, mesh, cut, topology);
        let (estimate, prices) = estimated(&plan, cluster, profile);
        let phases: Vec<String> = estimate.phases.iter().map(|p| p.name.clone()).collect();
        let ops: usize = phases
            .iter()
            .map(|p| {
                plan.sealed
                    .roles()
                    .iter()
                    .map(|r| plan.sealed.program(p, r.ranks[0]).unwrap().ops.len())
                    .sum::<usize>()
            })
            .sum();
        let ends = played(&plan, &prices, &phases);
        let mut most = 0.0f64;
        for (phase, end) in estimate.phases.iter().zip(&ends) {
            most = most.max((phase.end_ns - end).abs());
        }
        println!(
            "{model} {mesh} {cut:?} on {}: {:.3} ms, off by {most:.1} ns over {ops} ops",
            prices.name(),
            estimate.ns / 1e6
        );
        // Prices are whole nanoseconds on one side; nothing else may differ.
        assert!(most <= ops as f64, "{model} {mesh}: off by {most} ns");
    }
}

fn streamed(plan: &Plan, prices: &ClusterPrices, out: PathBuf, modelled: Modelled) -> Record {
    let (chunks, prompt) = (CHUNKS, "a red circle".into());
    let options = StreamOptions { chunks, prompt, out, modelled, ..StreamOptions::default() };
    let machine = Machine { prices, name: prices.name() };
    let report = tessera::sim::run(plan, &options, machine, &Interrupt::default(), &mut |_| {}).unwrap();
    assert_eq!((report.exit_code, report.chunks), (0, CHUNKS), "{report:?}");
    Record::parse(&std::fs::read(options.out.join("record.jsonl")).unwrap()).unwrap()
}

#[test]
fn a_run_through_leader_and_workers_takes_the_estimate_and_the_way_of_its_messages() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("demo", "tp=2", MEGATRON, Topology::Mesh),
        ("demo", "tp=2,pp=2", ULYSSES, Topology::Pp1),
        ("wan2.1-14b", "tp=8,pp=9", ULYSSES, Topology::Mesh),
    ];
    for (n, (model, mesh, cut, topology)) in cases.into_iter().enumerate() {
        let plan = planned(model, mesh, cut, topology);
        let (estimate, prices) = estimated(&plan, None, None);
        let record = streamed(&plan, &prices, dir.path().join(n.to_string()), Modelled::default());
        let steady: Vec<&Chunk> = record.chunks.iter().filter(|c| c.chunk >= 3).collect();
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
            // The commit reaches ranks at different times: one hop or, behind a mesh leader, two.
            let (least, most) = (estimate.ns, estimate.ns + 2.0 * HOP_NS as f64);
            println!("{model} {mesh}: {:.3} ms, estimate {:.3} ms", ns as f64 / 1e6, estimate.ns / 1e6);
            assert!(
                ns as f64 >= least - 1e4 && ns as f64 <= most + 1e4,
                "{model} {mesh}: {ns} ns of {least} to {most}"
            );
        }
    }
}

/// Who decodes, where the leader stands, ranks of tp and stages.
type Way = (Decode, Topology, u32, u32);

/// What a stream takes by estimate and by a modelled run: the period, from commit to the last pixel, and the generator alone.
#[derive(Debug, Clone, Copy)]
struct Paces {
    period_ns: [f64; 2],
    latency_ns: [f64; 2],
    generate_ns: [f64; 2],
}

/// A stream of the model with each decoder, planned through the door with everything pinned and run with the mapping found.
fn paces(way: Way, coupled: bool, outstanding: u32, studios: &[ModelledStudio], out: &Path) -> Vec<Paces> {
    let (decode, topology, tp, pp) = way;
    let model = opened("wan2.1-1.3b", coupled);
    let machine = machine(Some("hgx-h200"), Some("torch-2.11"), None, 8).unwrap();
    let mut asked = VideoAsked {
        model: &model,
        machine: machine.clone(),
        devices: Some(3),
        objective: None,
        dtype: DtypePolicy::F32,
        pins: Pins {
            tp: Some(tp),
            pp: Some(pp),
            strategy: Some(Strategy::Ulysses),
            pieces: None,
            topology: Some(topology),
            decode: Some(decode),
            outstanding: Some(outstanding),
        },
        decode_ns: None,
        encode_ns: None,
        whole_decode: false,
        command: String::new(),
    };
    let mut planned: Option<(Plan, ClusterPrices)> = None;
    let mut all = Vec::new();
    for (n, studio) in studios.iter().enumerate() {
        asked.decode_ns = Some((studio.first_ns + studio.rest_ns) as f64);
        asked.encode_ns = Some(studio.encode_ns as f64);
        let (sheet, mapping) = video(&asked, &mut |_, _| ()).unwrap();
        let best = &sheet.json["best"][0];
        assert_eq!((&best["decode"], &sheet.json["legal"]), (&decode.name().into(), &1.into()));
        let (plan, prices) = planned.get_or_insert_with(|| {
            let plan = plan::make(&model.video, &model.name, "", &mapping.unwrap()).unwrap();
            let prices = ClusterPrices::of(&plan, &machine).unwrap();
            (plan, prices)
        });
        let modelled = Modelled { studio: Some(*studio), generate_ns: None };
        let record = streamed(plan, prices, out.join(n.to_string()), modelled);
        // Nothing follows the last one, whose decode is in one piece.
        let steady: Vec<&Chunk> =
            record.chunks.iter().filter(|c| (STEADY..CHUNKS - 1).contains(&c.chunk)).collect();
        let mean =
            |of: fn(&Chunk) -> u64| steady.iter().map(|c| of(c) as f64).sum::<f64>() / steady.len() as f64;
        let estimate = |key: &str| best[key].as_f64().unwrap();
        all.push(Paces {
            period_ns: [estimate("period_ns"), mean(|c| c.pipeline.unwrap().period_ns)],
            // Of calls sent ahead the estimate counts the way through the queue too.
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
fn every_way_of_decoding_keeps_the_period_of_its_estimate() {
    let ms = |first: u64, encode: u64| ModelledStudio {
        first_ns: first * 1_000_000,
        rest_ns: 2 * first * 1_000_000,
        encode_ns: encode * 1_000_000,
    };
    let dir = tempfile::tempdir().unwrap();
    let close = |of: [f64; 2]| (of[1] / of[0] - 1.0).abs() < 0.02;
    // A decoder that is faster than the generator and, where a call is sent ahead, one that is slower.
    let studios = [ms(40, 15), ms(400, 60)];
    let ways = [
        ((Decode::OnMesh, Topology::Mesh, 2, 1), true),
        ((Decode::OnMesh, Topology::Mesh, 2, 1), false),
        ((Decode::OnMesh, Topology::Mesh, 1, 2), true),
        ((Decode::AnchorFirst, Topology::Pp0, 1, 1), true),
        ((Decode::AnchorFirst, Topology::Pp1, 2, 1), true),
        ((Decode::Beside, Topology::Pp0, 1, 1), false),
        ((Decode::Beside, Topology::Pp1, 2, 1), false),
    ];
    for (n, (way, coupled)) in ways.into_iter().enumerate() {
        for outstanding in [1, 2] {
            let out = dir.path().join(format!("{n}-{outstanding}"));
            std::fs::create_dir(&out).unwrap();
            for (slow, p) in paces(way, coupled, outstanding, &studios[..outstanding as usize], &out)
                .into_iter()
                .enumerate()
            {
                let at = format!("{way:?}, coupled {coupled}, {outstanding} under way, {:?}", studios[slow]);
                println!("{at}: {p:.0?}");
                assert!(close(p.period_ns) && close(p.generate_ns), "{at}: {p:?}");
                // Before a decoder that is too slow chunks queue, and the estimate's latency is of one that is not.
                let queues = way.0 != Decode::OnMesh && slow == 1;
                assert!(queues || close(p.latency_ns), "{at}: {p:?}");
            }
        }
    }
}

#[test]
fn the_models_own_decoder_takes_what_the_estimate_prices_it_at() {
    let model = opened("demo", true);
    let dir = tempfile::tempdir().unwrap();
    let plan = plan::make(&model.video, &model.name, "", &Mapping::default()).unwrap();
    for (n, profile) in ["torch-2.11", "ideal"].into_iter().enumerate() {
        let machine = machine(None, Some(profile), None, 1).unwrap();
        let prices = ClusterPrices::of(&plan, &machine).unwrap();
        let alone = |phase: &str| {
            let program = plan.sealed.program(phase, Rank(0)).unwrap();
            tessera_cost::program::Priced::of(&machine, program, 1.0).alone_ns()
        };
        let want = alone("decode") * model.video.stream.chunk_frames as f64 + alone("encode");
        let record = streamed(&plan, &prices, dir.path().join(n.to_string()), Modelled::default());
        for c in record.chunks.iter().filter(|c| (STEADY..CHUNKS - 1).contains(&c.chunk)) {
            let took = c.pipeline.unwrap().stage0_ns as f64;
            assert!(want > 0.0 && (took - want).abs() < 10.0, "{profile}: {took} ns, estimate {want} ns");
        }
    }
}
