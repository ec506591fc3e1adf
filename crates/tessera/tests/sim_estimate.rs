//! The modelled run against the planner's estimate: two implementations of streams, events and meetings over one set of
//! prices, and the same instants.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};

use tessera::sim::{ClusterPrices, HOP_NS, Machine, bundle, machine};
use tessera::stream::StreamOptions;
use tessera::summary::Summary;
use tessera::{Interrupt, Mapping, Model, Overrides, Plan, Strategy, Topology, plan};
use tessera_device::Prices;
use tessera_mesh::Rank;
use tessera_plan::video::{CallEstimate, estimate_call};
use tessera_report::record::{Chunk, Record};
use tessera_sim::Devices;

fn planned(model: &str, mesh: &str, strategy: Strategy, topology: Topology) -> Plan {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
    let model = Model::open(&dir, &Overrides { recompute: Some(false), ..Overrides::default() }).unwrap();
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, topology, ..Mapping::default() };
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

/// Model, mesh, strategy, topology, cluster, profile.
type Case = (&'static str, &'static str, Strategy, Topology, Option<&'static str>, Option<&'static str>);

#[test]
fn modelled_devices_end_each_phase_when_the_estimate_says() {
    use Strategy::{Megatron, Ulysses};
    let cases: [Case; 9] = [
        ("demo", "tp=2", Megatron, Topology::Mesh, None, None),
        ("demo", "tp=2", Ulysses, Topology::Mesh, Some("laptop"), None),
        ("demo", "pp=2", Ulysses, Topology::Mesh, None, Some("ideal")),
        ("demo", "tp=2,pp=3", Megatron, Topology::Pp1, None, None),
        ("wan2.1-1.3b", "tp=4", Ulysses, Topology::Mesh, Some("hgx-h100"), None),
        ("wan2.1-1.3b", "tp=3", Megatron, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=8", Ulysses, Topology::Mesh, None, None),
        ("wan2.1-14b", "tp=4,pp=4", Megatron, Topology::Mesh, Some("hgx-h200"), None),
        ("wan2.1-14b", "tp=8,pp=9", Ulysses, Topology::Mesh, None, Some("tessera")),
    ];
    for (model, mesh, strategy, topology, cluster, profile) in cases {
        let plan = planned(model, mesh, strategy, topology);
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
            "{model} {mesh} {strategy:?} on {}: {:.3} ms, off by {most:.1} ns over {ops} ops",
            prices.name(),
            estimate.ns / 1e6
        );
        // Prices are whole nanoseconds on one side; nothing else may differ.
        assert!(most <= ops as f64, "{model} {mesh}: off by {most} ns");
    }
}

fn streamed(plan: &Plan, prices: &ClusterPrices, out: PathBuf) -> Record {
    let options = StreamOptions { chunks: 5, prompt: "a red circle".into(), out, ..StreamOptions::default() };
    let machine = Machine { prices, name: prices.name() };
    let report = tessera::sim::run(plan, &options, machine, &Interrupt::default(), &mut |_| {}).unwrap();
    assert_eq!((report.exit_code, report.chunks), (0, 5), "{report:?}");
    Record::parse(&std::fs::read(options.out.join("record.jsonl")).unwrap()).unwrap()
}

#[test]
fn a_run_through_leader_and_workers_takes_the_estimate_and_the_way_of_its_messages() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("demo", "tp=2", Strategy::Megatron, Topology::Mesh),
        ("demo", "tp=2,pp=2", Strategy::Ulysses, Topology::Pp1),
        ("wan2.1-14b", "tp=8,pp=9", Strategy::Ulysses, Topology::Mesh),
    ];
    for (n, (model, mesh, strategy, topology)) in cases.into_iter().enumerate() {
        let plan = planned(model, mesh, strategy, topology);
        let (estimate, prices) = estimated(&plan, None, None);
        let record = streamed(&plan, &prices, dir.path().join(n.to_string()));
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
