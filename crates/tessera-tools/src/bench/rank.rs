//! One rank of `bench dit`: opens its GPU, loads the weights once, and runs a forward for each
//! picture size.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tessera::Weights;
use tessera::clock::monotonic_ns;
use tessera::files::read_text_file;
use tessera::gpus::GpuDiscovery;
use tessera::{Model, cuda};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{CudaBackend, OneTimeCounts};
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, ProgramHandle, Scalar, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::denoising_steps;

use super::device_timer::UnsynchronisedTimer;
use super::synthetic_weights::{SyntheticWeights, global_normals};
use super::{
    BenchConfig, BenchPoint, COLLECTIVE_TIMEOUT, FORWARDS_PER_STEP, RankReport, TracedSpan, bench_error,
    build_points, print_line, share_communicator_ids,
};

/// Runs one rank, which executes the commands on its standard input until it closes.
///
/// # Errors
/// T0061 or another diagnostic if the rank cannot load or run.
pub fn rank_main(rank: u32, config_json: &str) -> Result<(), Diagnostics> {
    let began = Instant::now();
    let config: BenchConfig = serde_json::from_str(config_json)
        .map_err(|e| bench_error(format!("configuration of a rank: {e}")))?;
    let points = build_points(&config)?;
    let Some(first) = points.first() else { return Err(bench_error("there is no size to time")) };
    let rank = Rank(rank);
    let gpus = GpuDiscovery::discover();
    let world = first.plan.sealed.mesh().iter().count();
    cuda::check_gpus(&gpus, world)?;
    // The ids depend only on the mapping, not on the size.
    let ids = share_communicator_ids(&gpus, &first.plan.sealed, rank)?;
    let mut dit = BenchForwards::load_all(&gpus, &points, (rank, config.case), &ids)?;
    if config.case {
        dit.write_case_outputs(&config.model)?;
    }
    // Every rank runs each forward at least twice, since the first run captures it.
    for size_index in 0..dit.forwards.len() {
        dit.time_step(size_index)?;
    }
    let OneTimeCounts {
        kernels_compiled: compiled,
        graphs_captured: captured,
        slot_allocations: allocated,
        ..
    } = dit.backend.one_time_counts();
    for size_index in 0..dit.forwards.len() {
        dit.time_step(size_index)?;
    }
    let ready = RankReport {
        plans: points.iter().map(|p| p.plan.sealed.digest_hex()).collect(),
        planned: {
            let [weights, buffers, slots] = dit.backend.memory_bytes();
            let lanes = ids.len().min(tessera::communicators::communicator_specs(&first.plan.sealed).len());
            [weights, buffers, slots, CudaBackend::overhead_bytes(lanes)]
        },
        measured: dit.backend.process_memory().unwrap_or(0),
        transports: dit.backend.describe_transports(),
        load_s: began.elapsed().as_secs_f64(),
        counts: (compiled, captured, allocated),
    };
    print_line(&serde_json::to_string(&ready).unwrap_or_default());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let unknown = || bench_error(format!("rank {rank} received the unknown command {line:?}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).ok_or_else(unknown);
        let size_index = number(1)?;
        if size_index >= dit.forwards.len() {
            return Err(unknown());
        }
        match words[0] {
            "step" => print_line(&format!("{:.4}", dit.time_step(size_index)?)),
            "trace" => print_line(
                &serde_json::to_string(&dit.trace_forwards(size_index, number(2)?)?).unwrap_or_default(),
            ),
            "latent" => print_line(&dit.latent_bits(size_index)),
            _ => return Err(unknown()),
        }
    }
    Ok(())
}

/// The backend of one rank and, for each picture size, the denoising forward to time.
struct BenchForwards {
    backend: CudaBackend,
    forwards: Vec<SizeForward>,
    rank: Rank,
}

/// The denoising forward of one picture size: its loaded program, and the data of its calls.
struct SizeForward {
    program: ProgramHandle,
    scalars: Vec<(&'static str, Scalar)>,
    /// Each buffer's name in the plan and in the backend. Backend names include the size, because
    /// the sizes share one backend.
    buffer_names: Vec<(String, String)>,
    /// First row of the current chunk in the KV caches, and its number of rows.
    chunk_rows: (u64, u64),
}

impl BenchForwards {
    fn load_all(
        gpus: &GpuDiscovery,
        points: &[BenchPoint],
        (rank, case): (Rank, bool),
        ids: &[String],
    ) -> Result<BenchForwards, Diagnostics> {
        let Some(first) = points.first() else { return Err(bench_error("there is no size to time")) };
        let mut backend = cuda::open_cuda(gpus, &first.plan.sealed, rank, rank.0, ids, COLLECTIVE_TIMEOUT)
            .map_err(|d| vec![d])?;
        let mut case_weights =
            case.then(|| first.model.open_partial_weights("model.safetensors")).transpose()?;
        let inputs = case.then(|| first.model.open_partial_weights("inputs.safetensors")).transpose()?;
        let mut synthetic = SyntheticWeights::default();
        let source: &mut dyn WeightSource = match &mut case_weights {
            Some(weights) => weights,
            None => &mut synthetic,
        };
        // All forwards are loaded before any of them runs, so that the memory for temporaries is
        // allocated once at the maximum size.
        let forwards = points
            .iter()
            .map(|p| SizeForward::load_size(&mut backend, p, rank, source, inputs.as_ref()))
            .collect::<Result<_, _>>()?;
        Ok(BenchForwards { backend, forwards, rank })
    }

    /// Runs one step and returns its milliseconds.
    fn time_step(&mut self, size_index: usize) -> Result<f64, Diagnostics> {
        let call = self.forwards[size_index].call_data();
        // A run ends when the GPU has finished it.
        let time = UnsynchronisedTimer::start(monotonic_ns).synchronise(|| {
            (0..FORWARDS_PER_STEP).try_for_each(|_| {
                self.backend
                    .run(self.forwards[size_index].program, &call, &mut NoObserver)
                    .map_err(|f| fault_error(&f))
            })
        })?;
        Ok(time.elapsed_ns() as f64 / 1e6)
    }

    /// Runs `count` forwards of one size and returns the ops, stream, begin and end of each span.
    fn trace_forwards(
        &mut self,
        size_index: usize,
        count: usize,
    ) -> Result<Vec<Vec<TracedSpan>>, Diagnostics> {
        let (call, loaded) = (self.forwards[size_index].call_data(), self.forwards[size_index].program);
        (0..count)
            .map(|_| {
                let spans =
                    self.backend.trace_run(loaded, &call, &mut NoObserver).map_err(|f| fault_error(&f))?;
                Ok(spans.into_iter().map(|s| (s.ops, s.stream, s.begin_ns, s.end_ns)).collect())
            })
            .collect()
    }

    /// Returns this rank's bits of the predicted latent in hex.
    fn latent_bits(&self, size_index: usize) -> String {
        let buffer = self.forwards[size_index].buffer_names.iter().find(|(name, _)| name == "latent");
        let values = buffer.and_then(|(_, buffer)| self.backend.read_buffer(buffer)).unwrap_or_default();
        values.iter().map(|v| format!("{:08x}", v.to_bits())).collect()
    }

    /// Runs a reference case once and writes this rank's part of the outputs: the latent, and the
    /// rows of keys and values of this chunk.
    fn write_case_outputs(&mut self, case: &std::path::Path) -> Result<(), Diagnostics> {
        let Some(forward) = self.forwards.first() else { return Ok(()) };
        self.backend
            .run(forward.program, &forward.call_data(), &mut NoObserver)
            .map_err(|f| fault_error(&f))?;
        let folder = case.join("ours");
        let write_error = |e: std::io::Error| bench_error(format!("{}: {e}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(write_error)?;
        for (name, backend_name) in &forward.buffer_names {
            let Some(values) = self.backend.read_buffer(backend_name) else { continue };
            let (tensor, part) = match name.split('.').collect::<Vec<_>>()[..] {
                ["latent"] => ("x0".to_string(), &values[..]),
                ["kv", i, which] => {
                    let width = values.len() as u64 / (forward.chunk_rows.0 + forward.chunk_rows.1).max(1);
                    (format!("{which}.{i}"), &values[(forward.chunk_rows.0 * width) as usize..])
                }
                _ => continue,
            };
            let bytes: Vec<u8> = part.iter().flat_map(|v| v.to_le_bytes()).collect();
            std::fs::write(folder.join(format!("{tensor}.rank{}.f32", self.rank.0)), bytes)
                .map_err(write_error)?;
        }
        Ok(())
    }
}

impl SizeForward {
    fn load_size(
        backend: &mut CudaBackend,
        point: &BenchPoint,
        rank: Rank,
        source: &mut dyn WeightSource,
        inputs: Option<&Weights>,
    ) -> Result<SizeForward, Diagnostics> {
        let (sealed, model) = (&point.plan.sealed, &point.model);
        let (video, name) = (&model.video, point.phase_name());
        let (Some(program), Some(slots)) = (sealed.rank_program(&name, rank), sealed.rank_slots(&name, rank))
        else {
            return Err(bench_error(format!("the plan has no phase {name} for rank {rank}")));
        };
        let mut program = (**program).clone();
        let mut buffers = Vec::new();
        for b in &mut program.buffers {
            let scoped_name = format!("{}/{}", point.size, b.name);
            buffers.push((std::mem::replace(&mut b.name, scoped_name.clone()), scoped_name));
        }
        let mesh_rank = MeshRank { mesh: *sealed.mesh(), rank };
        let program = Arc::new(program);
        let loaded = backend.load(&program, slots, source).map_err(|d| vec![d])?;
        for ((name, backend_name), b) in buffers.iter().zip(&program.buffers) {
            let values = match inputs {
                Some(inputs) => case_buffer(inputs, name, &b.ty, &mesh_rank).map_err(|d| vec![d])?,
                None => global_normals(&format!("buffer {name}"), &b.ty, &mesh_rank),
            };
            if !backend.write_buffer(backend_name, &values) {
                return Err(bench_error(format!("buffer {name} does not accept its values")));
            }
        }
        let step = denoising_steps(&video.stream).into_iter().next_back();
        let (t, sigma) = step.map_or((500.0, 0.5), |s| (s.timestep, s.sigma));
        let (t, sigma) = match inputs {
            Some(inputs) => (inputs.read_tensor("t").map_err(|d| vec![d])?, read_case_sigma(model)?),
            None => (vec![t; video.stream.chunk_frames as usize], sigma),
        };
        let fill = point.context_frames();
        let chunk = (fill * video.frame_tokens(), video.chunk_tokens());
        let scalars = vec![
            ("t", Scalar::F32s(t)),
            ("sigma", Scalar::F32(sigma)),
            ("start", Scalar::I64(fill as i64)),
            ("row", Scalar::I64(chunk.0 as i64)),
        ];
        Ok(SizeForward { program: loaded, scalars, buffer_names: buffers, chunk_rows: chunk })
    }

    fn call_data(&self) -> CallData<'static> {
        CallData { scalars: self.scalars.iter().cloned().collect(), inputs: BTreeMap::new() }
    }
}

/// Returns this rank's slice of a buffer as the reference case defines it.
fn case_buffer(
    inputs: &Weights,
    name: &str,
    ty: &Type,
    mesh_rank: &MeshRank,
) -> Result<Vec<f32>, Diagnostic> {
    let global_shape = ty.layout.global_shape(&ty.shape, &mesh_rank.mesh);
    let values = match name.split('.').collect::<Vec<_>>()[..] {
        ["x"] => inputs.read_tensor("x")?,
        // The rows of the context, zero-padded to make room for the chunk.
        ["kv", i, which] => {
            let mut rows = inputs.read_tensor(&format!("context.{i}.{which}"))?;
            rows.resize(global_shape.iter().product::<u64>() as usize, 0.0);
            rows
        }
        ["cross", i, which] => inputs.read_tensor(&format!("text.{i}.{which}"))?,
        _ => vec![0.0; global_shape.iter().product::<u64>() as usize],
    };
    let ranges = ty.layout.global_ranges(&ty.shape, &mesh_rank.mesh, mesh_rank.coord());
    let [(row, rows), (column, columns)] = ranges[..] else { return Ok(values) };
    let row_width = global_shape[1] as usize;
    let part = |r: u64| &values[r as usize * row_width + column as usize..][..columns as usize];
    Ok((row..row + rows).flat_map(part).copied().collect())
}

fn read_case_sigma(model: &Model) -> Result<f32, Diagnostics> {
    let file = model.dir.join("case.json");
    let text = read_text_file(&file).map_err(|e| bench_error(format!("{}: {e}", file.display())))?;
    let case: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| bench_error(format!("{}: {e}", file.display())))?;
    let sigma = case.get("sigma").and_then(serde_json::Value::as_f64);
    sigma.map(|s| s as f32).ok_or_else(|| bench_error(format!("{} has no sigma", file.display())))
}

pub(super) fn fault_error(f: &Fault) -> Diagnostics {
    let (Fault::Failed(why)
    | Fault::Stalled(why)
    | Fault::Aborted(why)
    | Fault::Refused(why)
    | Fault::Poisoned(why)) = f;
    bench_error(why.clone())
}
