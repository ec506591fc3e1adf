//! Scripts of phases that every rank of a plan runs, and the tensors of fixtures.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

pub mod cases;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera::{Model, Plan, communicators, plan};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, MeshRank, NoObserver, ProgramHandle, Scalar};
use tessera_mesh::Rank;
use tessera_plan::{DtypePolicy, Mapping, Numerics, Strategy, Topology};
use tessera_weights::{WeightFiles, WeightSet};

/// Maximum absolute error against the reference, in f32.
pub const TOLERANCE: f32 = 2e-5;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Asserts that a model seals on tensor and pipeline ranks with every strategy, dtype and place of the leader.
pub fn assert_seals_under_every_policy(m: &Model) {
    for strategy in [Strategy::Ulysses, Strategy::Megatron] {
        for dtype in [DtypePolicy::F32, DtypePolicy::Bf16, DtypePolicy::Fp8] {
            // Row chunks overlap the all-reduces of megatron alone.
            let overlap_chunks = if strategy == Strategy::Megatron { 2 } else { 1 };
            for topology in [Topology::Mesh, Topology::Pp1] {
                let mesh = "tp=2,pp=3".parse().unwrap();
                let mapping =
                    Mapping { mesh, strategy, dtype, overlap_chunks, topology, ..Mapping::default() };
                plan::plan_model(&m.video, &m.name, "", &mapping)
                    .unwrap_or_else(|ds| panic!("{ds:#?}\n{}", mapping.to_toml()));
            }
        }
    }
}

/// Opens a file of tensors of a fixture.
pub fn open_tensors(path: &str) -> WeightSet {
    WeightFiles::open_file(&fixture(path)).unwrap().resolve_as_is().unwrap()
}

/// Reorders [C, F, H, W] to tokens [(f, h, w), (ph, pw, C)].
pub fn tokens(set: &WeightSet, name: &str) -> Vec<f32> {
    let shape: Vec<usize> = set.tensor_shape(name).unwrap().iter().map(|n| *n as usize).collect();
    let data = set.read_whole_f32(name).unwrap();
    let [c, f, h, w] = shape[..] else { panic!("{name} {shape:?}") };
    let mut out = Vec::with_capacity(data.len());
    for fi in 0..f {
        for (hi, wi) in (0..h / 2).flat_map(|y| (0..w / 2).map(move |x| (y, x))) {
            for (ph, pw) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                for ci in 0..c {
                    out.push(data[((ci * f + fi) * h + 2 * hi + ph) * w + 2 * wi + pw]);
                }
            }
        }
    }
    out
}

#[derive(Clone)]
pub enum ScriptStep {
    Phase {
        name: String,
        scalars: Vec<(&'static str, Scalar)>,
        inputs: Vec<(&'static str, Vec<f32>)>,
    },
    /// Sets the chunk's noisy or clean latents: buffer `x` or `latent`.
    Set(&'static str, Vec<f32>),
    /// Runs `emit` and keeps its output.
    Emit,
}

/// Runs a script on every rank of a plan, as threads, and returns what rank 0 emitted.
pub fn run_script(m: &Model, p: &Plan, script: &[ScriptStep]) -> Vec<Vec<f32>> {
    let specs = communicators::communicator_specs(&p.sealed);
    let fds = communicators::create_arenas(&specs).unwrap();
    let weights = m.open_weights().unwrap_or_else(|d| panic!("{d:#?}"));
    std::thread::scope(|scope| {
        let handles: Vec<_> = p
            .sealed
            .mesh()
            .iter()
            .map(|rank| {
                let mine = communicators::indices_of_rank(&specs, rank)
                    .map(|i| fds[i].try_clone().unwrap())
                    .collect();
                let mut weights = weights.clone();
                scope.spawn(move || {
                    let groups = communicators::attach_arenas(&p.sealed, rank, mine).unwrap();
                    let seat = MeshRank { mesh: *p.sealed.mesh(), rank };
                    let mut cpu =
                        CpuBackend::new(seat, Pool::single_thread(), groups, Duration::from_secs(20));
                    let mut loaded: BTreeMap<String, ProgramHandle> = BTreeMap::new();
                    for name in p.sealed.phase_names() {
                        let program = Arc::new((**p.sealed.rank_program(name, rank).unwrap()).clone());
                        let slots = p.sealed.rank_slots(name, rank).unwrap();
                        loaded.insert(name.clone(), cpu.load(&program, slots, &mut weights).unwrap());
                    }
                    let abort = cpu.abort_fn();
                    let out = run_script_on_rank(&mut cpu, &loaded, p, rank, script);
                    if out.is_err() {
                        abort("a rank of the test failed");
                    }
                    out.unwrap_or_else(|e| panic!("rank {rank}: {e:?}"))
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).next().unwrap()
    })
}

fn run_script_on_rank(
    cpu: &mut CpuBackend,
    loaded: &BTreeMap<String, ProgramHandle>,
    p: &Plan,
    rank: Rank,
    script: &[ScriptStep],
) -> Result<Vec<Vec<f32>>, tessera_device::Fault> {
    let mut out = Vec::new();
    for step in script {
        match step {
            ScriptStep::Set(buffer, data) => {
                let program = p.sealed.rank_program("denoise.fill0", rank).unwrap();
                if let Some(b) = program.buffers.iter().find(|b| b.name == *buffer) {
                    let ranges =
                        b.ty.layout.global_ranges(&b.ty.shape, &program.mesh, program.mesh.coord_of(rank));
                    let width = b.ty.shape[1] as usize;
                    let (start, len) = (ranges[0].0 as usize * width, ranges[0].1 as usize * width);
                    assert!(cpu.write_buffer(buffer, &data[start..start + len]));
                }
            }
            ScriptStep::Phase { name, scalars, inputs } => {
                let call = CallData {
                    scalars: scalars.iter().map(|(k, v)| (*k, v.clone())).collect(),
                    inputs: inputs.iter().map(|(k, v)| (*k, v.as_slice())).collect(),
                };
                cpu.run(loaded[name], &call, &mut NoObserver)?;
            }
            ScriptStep::Emit => {
                cpu.run(loaded["emit"], &CallData::default(), &mut NoObserver)?;
                out.push(cpu.output("latents").map(<[f32]>::to_vec).unwrap_or_default());
            }
        }
    }
    Ok(out)
}

pub fn plan_mesh(m: &Model, mesh: &str, strategy: Strategy, numerics: Numerics) -> Plan {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, numerics, ..Mapping::default() };
    plan::plan_model(&m.video, &m.name, "", &mapping).unwrap_or_else(|ds| panic!("{mesh}: {ds:#?}"))
}

pub fn max_error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Runs the phase `text` with the encoded rows of a prompt, padded with zeros.
pub fn text_step(m: &Model, set: &WeightSet, prompt: &str) -> ScriptStep {
    text_phase(padded_rows(m, set, prompt))
}

/// As [`text_step`], with the rows of a negative prompt below those of the prompt.
pub fn guided_text_step(m: &Model, prompt: (&WeightSet, &str), negative: (&WeightSet, &str)) -> ScriptStep {
    text_phase([padded_rows(m, prompt.0, prompt.1), padded_rows(m, negative.0, negative.1)].concat())
}

fn text_phase(rows: Vec<f32>) -> ScriptStep {
    ScriptStep::Phase { name: "text".into(), scalars: vec![], inputs: vec![("text", rows)] }
}

fn padded_rows(m: &Model, set: &WeightSet, prompt: &str) -> Vec<f32> {
    let mut rows = set.read_whole_f32(prompt).unwrap();
    rows.resize((m.video.wan.text_len * m.video.wan.text_dim) as usize, 0.0);
    rows
}
