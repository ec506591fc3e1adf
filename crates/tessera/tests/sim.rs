//! Runs plans on a simulated machine, through the real leader and workers.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::time::Instant;

use tessera::sim::{HOP_LATENCY_NS, SimMachine};
use tessera::stream_options::{StreamEvent, StreamOptions, StreamReport};
use tessera::{Mapping, Model, Overrides, Plan, StopHandle, Strategy, Topology, WeightChange, plan};
use tessera_device::TimingModel;
use tessera_ir::{Program, op_workload};
use tessera_mesh::{Mesh, Rank};
use tessera_report::record::{ChunkRecord, RunDevice, RunRecord, RunStatus};

/// A machine with round figures: 10¹² operations and 100 GB per second, 5 µs per transfer.
#[derive(Debug, Clone, Copy)]
struct RoundPrices;

impl TimingModel for RoundPrices {
    fn op_ns(&self, p: &Program, op: usize) -> u64 {
        if p.ops[op].opcode.is_collective() { 0 } else { op_workload(p, &p.ops[op]).flops.0.div_ceil(1000) }
    }

    fn collective_ns(&self, p: &Program, op: usize, _: &Mesh) -> u64 {
        5_000 + op_workload(p, &p.ops[op]).wire.0.div_ceil(100)
    }

    fn contention_factor(&self) -> f64 {
        1.1
    }
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

fn plan_demo(model: &str, mapping: Mapping, recompute: bool) -> Plan {
    let overrides = Overrides { recompute: Some(recompute), ..Overrides::default() };
    let model = Model::open(&models().join(model), &overrides).unwrap();
    plan::plan_model(&model.video, &model.name, "", &mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn mapping(mesh: &str, strategy: Strategy, topology: Topology) -> Mapping {
    Mapping { mesh: mesh.parse().unwrap(), strategy, topology, ..Mapping::default() }
}

fn options(out: PathBuf, chunks: u32) -> StreamOptions {
    StreamOptions {
        chunks,
        prompt: "a red circle moves right".into(),
        out,
        command: vec!["tessera".into(), "stream".into()],
        ..StreamOptions::default()
    }
}

fn simulate(plan: &Plan, options: &StreamOptions) -> (StreamReport, RunRecord) {
    let machine = SimMachine { prices: &RoundPrices, name: "round, profile none" };
    let report = tessera::sim::run(plan, options, machine, &StopHandle::default(), &mut |_| {});
    let report = report.unwrap_or_else(|ds| panic!("{ds:#?}"));
    let bytes = std::fs::read(options.out.join("record.jsonl")).unwrap();
    (report, RunRecord::parse(&bytes).unwrap())
}

fn ends(c: &ChunkRecord, rank: u32) -> Vec<(String, u64)> {
    let rank = c.ranks.iter().find(|r| r.rank == rank).unwrap();
    rank.phases.iter().filter(|p| p.stream == "compute").map(|p| (p.name.clone(), p.end_ns)).collect()
}

#[test]
fn every_topology_and_regime_streams_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("tp=2", Strategy::Megatron, Topology::Mesh),
        ("tp=2", Strategy::Ulysses, Topology::Mesh),
        ("pp=2", Strategy::Ulysses, Topology::Mesh),
        ("tp=2,pp=2", Strategy::Megatron, Topology::Mesh),
        ("tp=1", Strategy::Ulysses, Topology::Pp0),
        ("tp=2", Strategy::Ulysses, Topology::Pp1),
    ];
    for (n, (mesh, strategy, topology)) in cases.into_iter().enumerate() {
        for recompute in [false, true] {
            let plan = plan_demo("demo", mapping(mesh, strategy, topology), recompute);
            let mut options = options(dir.path().join(format!("{n}-{recompute}")), 6);
            options.prompts_at = vec![(3, "a blue square moves left".into())];
            options.cuts_at = vec![4];
            let (report, record) = simulate(&plan, &options);
            let at = format!("{mesh} {strategy:?} {topology:?} recompute {recompute}");
            assert_eq!((report.exit_code, &report.failure, report.chunks), (0, &None, 6), "{at}");
            assert_eq!((report.golden, report.frames), (None, 6 * 12), "{at}");
            assert_eq!((record.start.device, record.status()), (RunDevice::Sim, RunStatus::Complete), "{at}");
            assert_eq!(record.start.machine.as_deref(), Some("round, profile none"));
            assert!(options.out.join("report.html").exists() && !options.out.join("clip.png").exists());
            let mut epochs: Vec<u32> = record.chunks.iter().map(|c| c.cache_epoch).collect();
            epochs.dedup();
            assert_eq!(epochs, [0, 1], "{at}");
            let mut before = 0;
            for c in &record.chunks {
                assert!(c.start_ns >= before, "{at}: a call begins when the previous one is done");
                // The done message follows the phases by one hop, or by two hops through the mesh
                // leader.
                let last = c.ranks.iter().flat_map(|r| &r.phases).filter(|p| p.stream == "compute");
                before = last.map(|p| p.end_ns).max().unwrap();
                assert!(
                    before <= c.pipeline.unwrap().done_ns
                        && c.pipeline.unwrap().done_ns <= before + 2 * HOP_LATENCY_NS
                );
                let mut digests: Vec<&str> = c.ranks.iter().map(|r| r.state_digest.as_str()).collect();
                digests.retain(|d| !d.is_empty());
                digests.dedup();
                assert_eq!(digests.len(), 1, "{at}: the cache state is equal on every rank");
            }
            let steady = record.chunks.iter().filter(|c| c.chunk == 1 || c.chunk == 2);
            let mut outputs: Vec<&String> = steady.map(|c| &c.latents_digest).collect();
            outputs.dedup();
            assert_eq!(outputs.len(), 2, "{at}: different chunks have different outputs");
        }
    }
}

#[test]
fn the_record_holds_what_each_stream_did_and_the_trace_its_ops() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("demo", mapping("tp=2", Strategy::Megatron, Topology::Mesh), false);
    let (_, record) = simulate(&plan, &options(dir.path().join("run"), 3));
    let last = record.chunks.last().unwrap();
    for rank in &last.ranks {
        let program = |name: &str| plan.sealed.collective_digest(name, Rank(rank.rank)).unwrap().collectives;
        let on = |stream: &str| {
            rank.phases.iter().filter(move |p| p.stream == stream).cloned().collect::<Vec<_>>()
        };
        let own: u64 = on("compute").iter().map(|p| program(&p.name)).sum();
        let seen: u32 = on("tp_collective").iter().map(|p| p.collectives).sum();
        assert!(own > 0 && u64::from(seen) == own, "rank {}: {seen} of {own}", rank.rank);
        for p in on("tp_collective") {
            let whole = on("compute").into_iter().find(|w| w.name == p.name && w.end_ns >= p.end_ns);
            assert!(whole.is_some_and(|w| w.start_ns <= p.start_ns), "{p:?} within its phase");
        }
    }
    let trace = std::fs::read_to_string(dir.path().join("run/trace.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let named = |name: &str| {
        let all = json["traceEvents"].as_array().unwrap().iter();
        all.filter(|e| e["name"].as_str().is_some_and(|n| n.starts_with(name))).count()
    };
    assert!(named("matmul blocks.0.") >= 2 * 3 && named("all_reduce over tp") > 0);
    let page = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(page.contains("Simulated time of round, profile none, no numbers computed"));
    assert!(page.contains("tp_collective"));
}

#[test]
fn two_runs_are_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("demo", mapping("tp=2,pp=2", Strategy::Ulysses, Topology::Pp1), true);
    let read = |name: &str, file: &str| std::fs::read(dir.path().join(name).join(file)).unwrap();
    for name in ["one", "two"] {
        simulate(&plan, &options(dir.path().join(name), 5));
    }
    for file in ["record.jsonl", "trace.json", "report.html"] {
        assert!(read("one", file) == read("two", file), "{file}");
    }
}

#[test]
fn a_rack_runs_fourteen_billion_parameters_on_a_laptop() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("wan2.1-14b", mapping("tp=8,pp=9", Strategy::Ulysses, Topology::Mesh), false);
    let begun = Instant::now();
    let (report, record) = simulate(&plan, &options(dir.path().join("run"), 4));
    println!("72 ranks, 4 chunks: {:.2} s", begun.elapsed().as_secs_f64());
    assert_eq!((report.chunks, report.failure), (4, None));
    let last = record.chunks.last().unwrap();
    assert_eq!(last.ranks.len(), 72);
    // The ranks of a stage end together.
    let clean: Vec<u64> =
        (0..72).map(|r| ends(last, r).iter().rfind(|(n, _)| n.starts_with("denoise")).unwrap().1).collect();
    for stage in clean.chunks(8) {
        assert!(stage.iter().all(|e| *e == stage[0]), "{stage:?}");
    }
    assert!(std::fs::metadata(dir.path().join("run/trace.json")).unwrap().len() < 64 << 20);
}

#[test]
fn a_flush_drops_what_was_asked_for_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("demo", mapping("tp=2", Strategy::Ulysses, Topology::Mesh), false);
    let mut options = options(dir.path().join("run"), 8);
    options.flushes_at = vec![4];
    let (report, record) = simulate(&plan, &options);
    assert_eq!((report.exit_code, record.status()), (0, RunStatus::Complete));
    assert_eq!(report.chunks + report.dropped, 8);
}

#[test]
fn a_request_to_stop_ends_at_a_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("wan2.1-1.3b", mapping("tp=2", Strategy::Ulysses, Topology::Mesh), false);
    let interrupt = StopHandle::default();
    let machine = SimMachine { prices: &RoundPrices, name: "round" };
    let options = options(dir.path().join("run"), 50);
    let asked = interrupt.clone();
    let mut seen = 0;
    let report = tessera::sim::run(&plan, &options, machine, &interrupt, &mut |e| {
        if matches!(e, StreamEvent::Chunk(_)) {
            seen += 1;
            asked.request_stop();
        }
    });
    let report = report.unwrap();
    assert!(
        report.interrupted && report.exit_code == 130 && report.chunks < 5 && seen == report.chunks,
        "{report:?}"
    );
}

#[test]
fn options_that_need_numbers_are_refused_together() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan_demo("demo", mapping("tp=2", Strategy::Ulysses, Topology::Mesh), false);
    let mut options = options(dir.path().join("run"), 2);
    options.outputs.png = true;
    options.weights_at = vec![(1, WeightChange::Folder("elsewhere".into()))];
    options.delays.generate_ns = Some(5);
    options.cuts_at = vec![7];
    let machine = SimMachine { prices: &RoundPrices, name: "round" };
    let refused =
        tessera::sim::run(&plan, &options, machine, &StopHandle::default(), &mut |_| {}).unwrap_err();
    let mut ids: Vec<&str> = refused.iter().map(|d| d.code.id).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["T0018", "T0040", "T0040", "T0040"]);
    assert!(!options.out.exists());
}
