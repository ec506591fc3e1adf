//! The GPU backend under the suite that the CPU backend passes. Where there is no GPU this says so and passes.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use tessera::bench::Synthetic;
use tessera::gpus::{Folder, Gpus};
use tessera_cuda::{Cuda, End, Options, unique_id};
use tessera_device::{Backend, CallData, Fault, Lane, Observer, Route, Seat};
use tessera_filetests::{Maker, Subject, Tolerance, conformance, own_slots};
use tessera_ir::{Kind, Program, Slots, parse_all};
use tessera_mesh::{Mesh, Rank};

/// A file wants more ranks than there are GPUs.
const TOO_FEW: &str = "too few GPUs";

const PATIENCE: Duration = Duration::from_secs(5);

/// How many GPUs are here, or why there are none.
fn gpus() -> Result<(Arc<Gpus>, u32), String> {
    let found = Gpus::look();
    let count = match &found.devices {
        Ok(d) if !d.gpus.is_empty() => d.gpus.len() as u32,
        Ok(_) => return Err("the driver tells of no GPU".to_string()),
        Err(d) => return Err(d.message.clone()),
    };
    Ok((Arc::new(found), count))
}

fn options(device: u32) -> Options {
    Options {
        device,
        kernels: Some(Arc::new(Folder(std::env::temp_dir().join("tessera-kernels")))),
        patience: PATIENCE,
        setup: Duration::from_secs(20),
        // Ranks are threads of one process here, whose memory is not handed around: they meet through NCCL.
        host: 0,
        graphs: true,
    }
}

/// Every file of `filetests/`.
fn texts() -> Vec<(String, String)> {
    let root = std::env::var_os("TESSERA_FILETESTS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests"), PathBuf::from);
    let (mut out, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(dir) = folders.pop() {
        for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "tir") {
                let name = path.strip_prefix(&root).unwrap().display().to_string();
                out.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    out.sort();
    out
}

/// Every rank's ends of the lanes that the programs use, by rank.
fn ends(found: &Gpus, mesh: &Mesh, programs: &[Vec<Arc<Program>>]) -> Result<Vec<Vec<End>>, String> {
    let mut lanes: Vec<Lane> = mesh
        .iter()
        .zip(programs)
        .flat_map(|(rank, programs)| programs.iter().map(move |p| (rank, p)))
        .flat_map(|(rank, p)| p.collectives().map(move |(_, op)| (rank, op)))
        .filter_map(|(rank, op)| Route::of(op)?.lane(mesh, rank))
        .collect();
    lanes.sort();
    lanes.dedup();
    let mut ends: Vec<Vec<End>> = mesh.iter().map(|_| Vec::new()).collect();
    for lane in lanes {
        let id = unique_id(&found.libraries).map_err(|d| d.message)?;
        for (me, rank) in lane.members.iter().enumerate() {
            let route = lane.route(mesh, me).ok_or("a lane without a group")?;
            ends[rank.0 as usize].push(End { route, id, me, members: lane.members.len() });
        }
    }
    Ok(ends)
}

#[test]
fn the_cuda_backend_means_what_the_reference_means() {
    let (found, count) = match gpus() {
        Ok(g) => g,
        Err(why) => return println!("not run: {why}"),
    };
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| -> Result<Vec<Maker<Cuda>>, String> {
        let ranks = mesh.iter().count();
        if ranks > count as usize {
            return Err(format!("{TOO_FEW}: {ranks} ranks, {count} GPUs"));
        }
        let ends = ends(&found, mesh, programs)?;
        let maker = |(device, ends): (u32, Vec<End>)| -> Maker<Cuda> {
            let found = Arc::clone(&found);
            Box::new(move |seat| {
                Cuda::open(&found.libraries, seat, ends, options(device)).map_err(|d| d.message)
            })
        };
        Ok(mesh.iter().map(|r| r.0).zip(ends).map(maker).collect())
    };
    // Sums are taken in another order than the reference's, and the device's transcendental functions are good to a few
    // units in the last place.
    let subject = Subject {
        name: "cuda",
        open: &open,
        tolerance: Tolerance { relative: 1e-6 },
        patience: PATIENCE,
        compares: false,
    };
    let mut wrong = Vec::new();
    // One by one, so that somebody who waits sees which: a file takes as long as the driver and NCCL take to start.
    for text in texts() {
        let begun = Instant::now();
        let report = conformance(&subject, std::slice::from_ref(&text));
        if report.passed.len() + report.skipped.len() + report.failed.len() > 0 {
            println!("{}, {:.1} s: {report}", text.0, begun.elapsed().as_secs_f32());
        }
        wrong.extend(report.failed.into_iter().filter(|(_, why)| !why.contains(TOO_FEW)));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A residual and its norm are one launch, and what follows is not.
const NORMS: &str = "program @p { %x = input : f32[64, 256] %y = input : f32[64, 256] %w = weight \"w\" : f32[256] \
    %s = toperator.gate_residual %x, %y : f32[64, 256] \
    %n = toperator.layer_norm %s, %w, %w {eps = 1e-6} : f32[64, 256] \
    %r = toperator.rms_norm %n, %w {eps = 1e-6} : f32[64, 256] \
    %z = toperator.add %s, %r : f32[64, 256] output \"z\", %z }";

#[derive(Debug)]
struct Unwatched;
impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

#[test]
fn a_trace_tells_of_every_step_and_leaves_runs_as_they_were() {
    let found = match gpus() {
        Ok((found, _)) => found,
        Err(why) => return println!("not run: {why}"),
    };
    let program = Arc::new(parse_all(NORMS, "trace").unwrap().remove(0));
    let values = program.values.len();
    let slots = Slots { bytes: vec![1 << 20; values], of: (0..values as u32).map(Some).collect() };
    let seat = Seat { mesh: program.mesh, rank: Rank(0) };
    let mut cuda = Cuda::open(&found.libraries, seat, Vec::new(), options(0)).unwrap();
    let loaded = cuda.load(&program, &slots, &mut Synthetic::default()).unwrap();
    let x: Vec<f32> = (0..64 * 256).map(|i| (i % 97) as f32 / 97.0).collect();
    let inputs = BTreeMap::from([("x", &x[..]), ("y", &x[..])]);
    let call = CallData { scalars: BTreeMap::new(), inputs };
    // Nobody has run it yet: the trace does so first.
    cuda.traced(loaded, &call, &mut Unwatched).unwrap();
    cuda.run(loaded, &call, &mut Unwatched).unwrap();
    let (z, counts) = (cuda.output("z").unwrap().to_vec(), cuda.counts());
    for _ in 0..3 {
        let spans = cuda.traced(loaded, &call, &mut Unwatched).unwrap();
        let ops: Vec<usize> = spans.iter().flat_map(|s| s.ops.clone()).collect();
        let kinds = program.ops.iter().map(|o| o.opcode.row().kind).enumerate();
        assert_eq!(ops, kinds.filter(|(_, k)| *k != Kind::Source).map(|(i, _)| i).collect::<Vec<_>>());
        assert!(spans.len() < ops.len(), "nothing is fused: {spans:?}");
        assert!(spans.iter().all(|s| s.stream == "compute" && 0.0 < s.begin_ns && s.begin_ns < s.end_ns));
        assert!(spans.windows(2).all(|w| w[0].end_ns <= w[1].begin_ns), "{spans:?}");
        assert_eq!(cuda.output("z").unwrap(), z);
        cuda.run(loaded, &call, &mut Unwatched).unwrap();
        assert_eq!(cuda.output("z").unwrap(), z);
    }
    assert_eq!(cuda.counts(), counts);
}

/// Pieces of both ranks on both.
const GATHER: &str = "program @p role(a) mesh(tp=2) { %x = input : f32[32] {tp: shard(0)} \
    %y = ttile.collective.all_gather %x {axis = \"tp\", dim = 0} output \"y\", %y }";

#[test]
fn a_replay_that_a_peer_leaves_alone_ends_and_frees_its_memory() {
    let (found, count) = match gpus() {
        Ok(g) => g,
        Err(why) => return println!("not run: {why}"),
    };
    if count < 2 {
        return println!("not run on one GPU");
    }
    let program = Arc::new(parse_all(GATHER, "gather").unwrap().remove(0));
    // The second time finds both GPUs as the first did.
    for _ in 0..2 {
        let ends = ends(&found, &program.mesh, &[vec![program.clone()], vec![program.clone()]]).unwrap();
        let (tell, told) = mpsc::channel();
        let gave_up = Arc::new(Barrier::new(2));
        for (rank, ends) in program.mesh.iter().zip(ends) {
            let (found, program) = (Arc::clone(&found), Arc::clone(&program));
            let (gave_up, tell) = (Arc::clone(&gave_up), tell.clone());
            // Not joined: a rank that hangs must not hang the test.
            std::thread::spawn(move || {
                let seat = Seat { mesh: program.mesh, rank };
                let mut cuda = Cuda::open(&found.libraries, seat, ends, options(rank.0)).unwrap();
                let loaded = cuda.load(&program, &own_slots(&program), &mut Synthetic::default()).unwrap();
                let x = [rank.0 as f32; 32];
                let call = CallData { scalars: BTreeMap::new(), inputs: BTreeMap::from([("x", &x[..])]) };
                // Once by itself and once as the graph that was captured then.
                for _ in 0..2 {
                    cuda.run(loaded, &call, &mut Unwatched).unwrap();
                    assert_eq!(cuda.output("y").unwrap(), [[0.0; 32], [1.0; 32]].concat());
                }
                if rank.0 == 0 {
                    let end = cuda.run(loaded, &call, &mut Unwatched);
                    assert!(matches!(end, Err(Fault::Stalled(_))), "{end:?}");
                    drop(cuda);
                    gave_up.wait();
                } else {
                    gave_up.wait();
                    drop(cuda);
                }
                tell.send(rank.0).unwrap();
            });
        }
        let mut gone: Vec<u32> =
            (0..2).map(|_| told.recv_timeout(Duration::from_secs(40)).unwrap()).collect();
        gone.sort_unstable();
        assert_eq!(gone, [0, 1]);
    }
}
