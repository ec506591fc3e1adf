//! Runs the conformance suite of the CPU backend on the GPU backend. Without a GPU the tests print
//! the reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used)]

mod gpu_ranks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

use gpu_ranks::{Link, TIMEOUT, TOO_FEW_GPUS, communicator_ends, find_gpus, open_ranks, options};
use tessera::{DtypePolicy, Mapping, Model, Overrides, PromptEncoder, plan};
use tessera_cpu::{CpuBackend, Pool};
use tessera_cuda::CudaBackend;
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, Scalar, WeightSource};
use tessera_filetests::{BackendUnderTest, Tolerance, dedicated_slots, run_conformance};
use tessera_ir::{OpKind, Program, Slots, parse_all};
use tessera_mesh::{Mesh, Rank};
use tessera_models::{
    TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TEXT_PHASE, TEXT_ROWS, TextEncoder, Umt5Config,
};
use tessera_tools::bench::SyntheticWeights;

fn filetests_root() -> PathBuf {
    std::env::var_os("TESSERA_FILETESTS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests"), PathBuf::from)
}

/// Reads every file of `filetests/`.
fn read_filetests() -> Vec<(String, String)> {
    let root = filetests_root();
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

#[test]
fn the_cuda_backend_matches_the_reference() {
    for link in [Link::Nccl, Link::PeerMemory] {
        compare_with_reference(link);
    }
}

fn compare_with_reference(link: Link) {
    let Some((found, count)) = find_gpus(1) else { return };
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| match mesh.iter().count() {
        // One rank has no link.
        1 if link == Link::PeerMemory => Err("one rank".to_string()),
        _ => open_ranks((&found, count), link, mesh, programs),
    };
    // The device sums in another order than the reference, and its transcendental functions are
    // accurate to a few units in the last place.
    let subject = BackendUnderTest {
        name: "cuda",
        open: &open,
        tolerance: Tolerance { relative: 1e-6 },
        peer_timeout: TIMEOUT,
        detects_mismatch: false,
    };
    let mut wrong = Vec::new();
    // Files run one by one to show progress: each takes as long as the driver and NCCL need to
    // start.
    for text in read_filetests() {
        let begun = Instant::now();
        let report = run_conformance(&subject, std::slice::from_ref(&text));
        if report.passed.len() + report.skipped.len() + report.failed.len() > 0 {
            println!("{}, {:.1} s: {report}", text.0, begun.elapsed().as_secs_f32());
        }
        let is_skipped = |why: &str| why.contains(TOO_FEW_GPUS) || why.contains("one rank");
        wrong.extend(report.failed.into_iter().filter(|(_, why)| !is_skipped(why)));
    }
    assert!(wrong.is_empty(), "{link:?}: {wrong:#?}");
}

/// The residual and its norm fuse into one launch; the ops after them do not.
const NORM_PROGRAM: &str = "program @p { %x = input : f32[64, 256] %y = input : f32[64, 256] %w = weight \"w\" : f32[256] \
    %s = toperator.gate_residual %x, %y : f32[64, 256] \
    %n = toperator.layer_norm %s, %w, %w {eps = 1e-6} : f32[64, 256] \
    %r = toperator.rms_norm %n, %w {eps = 1e-6} : f32[64, 256] \
    %z = toperator.add %s, %r : f32[64, 256] output \"z\", %z }";

#[test]
fn a_trace_covers_every_op_and_does_not_change_runs() {
    let Some((found, _)) = find_gpus(1) else { return };
    let mut program = parse_all(NORM_PROGRAM, "trace").unwrap().remove(0);
    program.capture_into("trace");
    let program = Arc::new(program);
    let values = program.values.len();
    let slots =
        Slots { slot_bytes: vec![1 << 20; values], value_slots: (0..values as u32).map(Some).collect() };
    let seat = MeshRank { mesh: program.mesh, rank: Rank(0) };
    let mut cuda = CudaBackend::open(&found.libraries, seat, Vec::new(), options(0)).unwrap();
    let loaded = cuda.load(&program, &slots, &mut SyntheticWeights::default()).unwrap();
    let x: Vec<f32> = (0..64 * 256).map(|i| (i % 97) as f32 / 97.0).collect();
    let inputs = BTreeMap::from([("x", &x[..]), ("y", &x[..])]);
    let call = CallData { scalars: BTreeMap::new(), inputs };
    // The program has not run yet, so the trace runs it first.
    cuda.trace_run(loaded, &call, &mut NoObserver).unwrap();
    cuda.run(loaded, &call, &mut NoObserver).unwrap();
    let (z, counts) = (cuda.output("z").unwrap().to_vec(), cuda.one_time_counts());
    for _ in 0..3 {
        let spans = cuda.trace_run(loaded, &call, &mut NoObserver).unwrap();
        let ops: Vec<usize> = spans.iter().flat_map(|s| s.ops.clone()).collect();
        let kinds = program.ops.iter().map(|o| o.opcode.table_row().kind).enumerate();
        assert_eq!(ops, kinds.filter(|(_, k)| *k != OpKind::Source).map(|(i, _)| i).collect::<Vec<_>>());
        assert!(spans.len() < ops.len(), "nothing is fused: {spans:?}");
        assert!(spans.iter().all(|s| s.stream == "compute" && 0.0 < s.begin_ns && s.begin_ns < s.end_ns));
        assert!(spans.windows(2).all(|w| w[0].end_ns <= w[1].begin_ns), "{spans:?}");
        assert_eq!(cuda.output("z").unwrap(), z);
        cuda.run(loaded, &call, &mut NoObserver).unwrap();
        assert_eq!(cuda.output("z").unwrap(), z);
    }
    assert_eq!(cuda.one_time_counts(), counts);
}

/// Both ranks gather the shards of both.
const GATHER_PROGRAM: &str = "program @p role(a) mesh(tp=2) { %x = input : f32[32] {tp: shard(0)} \
    %y = ttile.collective.all_gather %x {axis = \"tp\", dim = 0} output \"y\", %y }";

#[test]
fn a_replay_abandoned_by_a_peer_ends_and_frees_its_memory() {
    let Some((found, _)) = find_gpus(2) else { return };
    let program = Arc::new(parse_all(GATHER_PROGRAM, "gather").unwrap().remove(0));
    // The second iteration checks that the first one left both GPUs usable.
    for _ in 0..2 {
        let ends = communicator_ends(&found, &program.mesh, &[vec![program.clone()], vec![program.clone()]])
            .unwrap();
        let (tell, told) = mpsc::channel();
        let gave_up = Arc::new(Barrier::new(2));
        for (rank, ends) in program.mesh.iter().zip(ends) {
            let (found, program) = (Arc::clone(&found), Arc::clone(&program));
            let (gave_up, tell) = (Arc::clone(&gave_up), tell.clone());
            // The threads are not joined, so that a hung rank does not hang the test.
            std::thread::spawn(move || {
                let seat = MeshRank { mesh: program.mesh, rank };
                let mut cuda = CudaBackend::open(&found.libraries, seat, ends, options(rank.0)).unwrap();
                let loaded = cuda
                    .load(&program, &dedicated_slots(&program), &mut SyntheticWeights::default())
                    .unwrap();
                let x = [rank.0 as f32; 32];
                let call = CallData { scalars: BTreeMap::new(), inputs: BTreeMap::from([("x", &x[..])]) };
                // The first run launches the kernels and captures the graph; the second replays it.
                for _ in 0..2 {
                    cuda.run(loaded, &call, &mut NoObserver).unwrap();
                    assert_eq!(cuda.output("y").unwrap(), [[0.0; 32], [1.0; 32]].concat());
                }
                if rank.0 == 0 {
                    let end = cuda.run(loaded, &call, &mut NoObserver);
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

/// Rows of the prompts that the text encoders below read.
const TEXT_ROWS_READ: u64 = 160;

/// Writes a model folder: the DiT of wan-odd with the text encoder of fixtures/umt5.
fn write_text_model() -> tempfile::TempDir {
    let (dir, fixtures) = (tempfile::tempdir().unwrap(), filetests_root().join("../fixtures"));
    let config = std::fs::read_to_string(fixtures.join("wan-odd/config.json")).unwrap();
    let longer = config.replace("\"text_len\": 7", &format!("\"text_len\": {TEXT_ROWS_READ}"));
    std::fs::write(dir.path().join("config.json"), longer).unwrap();
    let stream = std::fs::read_to_string(fixtures.join("wan-odd/stream.toml")).unwrap();
    std::fs::write(dir.path().join("stream.toml"), stream.replace("\"words\"", "\"umt5\"")).unwrap();
    std::fs::copy(fixtures.join("wan-odd/model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    for folder in ["text_encoder", "tokenizer"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        for file in std::fs::read_dir(fixtures.join("umt5").join(folder)).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), dir.path().join(folder).join(file.file_name())).unwrap();
        }
    }
    dir
}

/// Encodes ids with the program of a phase, twice, and returns the rows of the prompt.
fn encode_ids(
    backend: &mut dyn Backend,
    (model, dtype, phase): (&Model, DtypePolicy, &str),
    source: &mut dyn WeightSource,
    length: usize,
) -> Vec<f32> {
    let mapping = Mapping { dtype, ..Mapping::default() };
    let plan = plan::plan_model(&model.video, &model.name, "", &mapping).unwrap();
    let program = Arc::new((**plan.sealed.rank_program(phase, Rank(0)).unwrap()).clone());
    let slots = plan.sealed.rank_slots(phase, Rank(0)).unwrap();
    let loaded = backend.load(&program, slots, source).unwrap();
    let ids: Vec<f32> =
        (0..TEXT_ROWS_READ as usize).map(|i| if i < length { (i * 37 % 1003) as f32 } else { 0.0 }).collect();
    let call = CallData {
        inputs: BTreeMap::from([(TEXT_IDS, &ids[..])]),
        scalars: BTreeMap::from([(TEXT_LENGTH, Scalar::I64(length as i64))]),
    };
    let mut run = || {
        backend.run(loaded, &call, &mut NoObserver).unwrap();
        let rows = backend.output(TEXT_ROWS).unwrap();
        rows[..length * rows.len() / ids.len()].to_vec()
    };
    let first = run();
    assert!(run() == first, "a replay of {phase} computes other bits");
    first
}

#[test]
fn a_text_encoder_on_a_gpu_agrees_with_the_cpu() {
    let Some((found, _)) = find_gpus(1) else { return };
    let dir = write_text_model();
    let small = Model::open(dir.path(), &Overrides::default()).unwrap();
    // Heads of 64, as the encoder of Wan has, use the tiled attention kernel.
    let mut wide = small.clone();
    wide.video.wan.text_dim = 256;
    let config =
        Umt5Config { layers: 2, d_model: 256, heads: 4, d_ff: 512, vocab_size: 1003, ..Umt5Config::xxl() };
    wide.video.stream.text = TextEncoder::Umt5;
    wide.video.set_text_encoder("a config", config).unwrap();
    let weights = |model: &Model| -> Box<dyn WeightSource> {
        match model.video.wan.text_dim {
            256 => Box::new(SyntheticWeights::default()),
            _ => match model.open_text_encoder().unwrap() {
                PromptEncoder::Umt5(files) => files,
                _ => panic!("a UMT5 encoder"),
            },
        }
    };
    let seat = MeshRank { mesh: Mapping::default().world_mesh().unwrap(), rank: Rank(0) };
    for (model, length) in [(&small, 1), (&small, 131), (&wide, 77), (&wide, 160)] {
        let mut cpu = CpuBackend::new(seat, Pool::new(2).unwrap(), Vec::new(), TIMEOUT);
        let of_cpu = (model, DtypePolicy::F32, TEXT_PHASE);
        let expected = encode_ids(&mut cpu, of_cpu, &mut *weights(model), length);
        let largest = expected.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for (dtype, limit) in [(DtypePolicy::F32, 1e-5), (DtypePolicy::Bf16, 2e-2)] {
            let mut gpu = CudaBackend::open(&found.libraries, seat, Vec::new(), options(0)).unwrap();
            let rows = encode_ids(&mut gpu, (model, dtype, TEXT_DEVICE_PHASE), &mut *weights(model), length);
            let error = rows.iter().zip(&expected).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest;
            println!("{} of {length} ids: {error:.1e}", dtype.name());
            assert!(!rows.iter().any(|x| x.is_nan()) && error <= limit, "{}: {error}", dtype.name());
        }
    }
}
