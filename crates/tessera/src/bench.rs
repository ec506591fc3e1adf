//! `bench dit`: the network alone on GPUs, one process a GPU, with weights that nobody trained.
//!
//! A step is what a chunk costs: five denoising forwards over three frames of context, twelve frames of video. The coordinator
//! starts a process for each rank, tells all of them at once to go, and takes the slowest.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_base::random::{DrawKey, normals};
use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cuda::{Counts, Cuda};
use tessera_device::{Backend, CallData, Fault, Loaded, Observer, Scalar, Seat, WeightSource, numbers};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::steps;

use crate::gpus::Gpus;
use crate::model::Weights;
use crate::{Mapping, Model, Overrides, Plan, cuda, plan};

/// A benchmark's rank that ended.
pub static T0061: Code = Code {
    id: "T0061",
    title: "a rank of a benchmark ended or fell silent",
    page: "`tessera bench dit` runs one process for each GPU. One of them ended, or said nothing for three minutes. Its last words \
follow; the other ranks were ended with it. Too little free memory on a GPU that others use is the usual reason: `tessera doctor` \
lists the GPUs, nvidia-smi who uses them.",
};

/// What is timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Asked {
    /// Folder with the model's config.
    pub model: PathBuf,
    /// How it is laid out; its text.
    pub mapping: String,
    /// Height and width of the picture in pixels, where not the model's own.
    pub size: Option<(u64, u64)>,
    /// Blocks, where not all.
    pub layers: Option<u64>,
    /// Whether the folder is a case: weights and inputs are its own, and what comes out is written beside them.
    pub case: bool,
    /// Least time of forwards before anything is timed: a GPU settles under its power limit.
    pub warm_s: f64,
}

/// What a rank says when it is ready.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    /// Digest of the plan.
    pub plan: String,
    /// Bytes by plan: weights, buffers, temporaries, and what context and libraries take.
    pub planned: [u64; 4],
    /// Bytes of the device that this process took, as the driver says.
    pub measured: u64,
    /// How ranks meet, by lane.
    pub ways: Vec<String>,
    /// Seconds from start to here.
    pub load_s: f64,
    /// What was compiled, captured and allocated before.
    pub counts: (u32, u32, u32),
}

/// A coordinator of ranks.
#[derive(Debug)]
pub struct Ranks {
    ranks: Vec<Running>,
    /// What each rank said of itself.
    pub ready: Vec<Ready>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    to: ChildStdin,
    from: Receiver<String>,
    rank: u32,
}

/// Longest silence of a rank while it loads 28 GB of weights or runs steps.
const SILENCE: Duration = Duration::from_secs(180);

/// Longest wait for a peer in one collective.
const PATIENCE: Duration = Duration::from_secs(30);

/// Forwards of a step.
pub const FORWARDS: usize = 5;

/// Frames of video that a step stands for.
pub const FRAMES: usize = 12;

impl Ranks {
    /// Starts a process for each rank of the mapping and waits until all are warm.
    ///
    /// # Errors
    /// What a rank refuses, T0061.
    pub fn start(asked: &Asked) -> Result<Ranks, Diagnostics> {
        let mapping = Mapping::parse("mapping", &asked.mapping)?;
        let world = mapping.world().map_err(|d| vec![*d])?.iter().count() as u32;
        // What is missing is said once, before any process starts.
        cuda::check(&Gpus::look(), world as usize)?;
        let orders = serde_json::to_string(asked).map_err(|e| one(format!("orders: {e}")))?;
        let program = std::env::current_exe().map_err(|e| one(format!("this program's path: {e}")))?;
        let mut ranks = Vec::new();
        for rank in 0..world {
            let mut child = Command::new(&program)
                .args(["bench-rank", &rank.to_string(), &orders])
                .envs(cuda::environment())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|e| one(format!("rank {rank} cannot be started: {e}")))?;
            let (to, out) = match (child.stdin.take(), child.stdout.take()) {
                (Some(to), Some(out)) => (to, out),
                _ => return Err(one(format!("rank {rank} has no pipes"))),
            };
            let (send, from) = channel();
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        return;
                    }
                }
            });
            ranks.push(Running { child, to, from, rank });
        }
        let mut all = Ranks { ranks, ready: Vec::new() };
        if world > 1 {
            // The first makes the names by which ranks find one another.
            let ids = all.ranks[0].answer()?;
            for r in &mut all.ranks[1..] {
                r.say(&ids)?;
            }
        }
        all.ready = all
            .ranks
            .iter_mut()
            .map(|r| {
                let line = r.answer()?;
                serde_json::from_str(&line).map_err(|e| one(format!("rank {} said {line:?}: {e}", r.rank)))
            })
            .collect::<Result<_, _>>()?;
        // Ranks step together or not at all, so it is not theirs to say when they are warm.
        let warm = Instant::now();
        while warm.elapsed().as_secs_f64() < asked.warm_s {
            all.steps(1)?;
        }
        Ok(all)
    }

    /// Runs steps on all ranks together: milliseconds of each, the slowest rank's.
    ///
    /// # Errors
    /// T0061.
    pub fn steps(&mut self, count: usize) -> Result<Vec<f64>, Diagnostics> {
        (0..count)
            .map(|_| {
                self.ask("step")?
                    .into_iter()
                    .try_fold(0.0, |most: f64, line| number(&line).map(|v| most.max(v)))
            })
            .collect()
    }

    /// What each rank answers to a word.
    ///
    /// # Errors
    /// T0061.
    pub fn ask(&mut self, word: &str) -> Result<Vec<String>, Diagnostics> {
        for r in &mut self.ranks {
            r.say(word)?;
        }
        self.ranks.iter_mut().map(Running::answer).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for r in &mut self.ranks {
            // One that has ended already has nothing to be ended.
            let _ = r.child.kill();
            let _ = r.child.wait();
        }
    }
}

impl Running {
    fn say(&mut self, word: &str) -> Result<(), Diagnostics> {
        let said = writeln!(self.to, "{word}").and_then(|()| self.to.flush());
        said.map_err(|e| one(format!("rank {} does not listen: {e}", self.rank)))
    }

    fn answer(&mut self) -> Result<String, Diagnostics> {
        match self.from.recv_timeout(SILENCE) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                Err(one(format!("rank {} said nothing for {} s", self.rank, SILENCE.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map(|s| s.to_string()).unwrap_or_default();
                Err(one(format!("rank {} ended: {status}", self.rank)))
            }
        }
    }
}

fn one(message: impl Into<String>) -> Diagnostics {
    vec![Diagnostic::error(&T0061, message)]
}

fn number(line: &str) -> Result<f64, Diagnostics> {
    line.parse().map_err(|_| one(format!("a rank said {line:?} where milliseconds were due")))
}

/// One rank: answers words on standard input until it ends.
///
/// # Errors
/// What cannot be loaded or run.
pub fn rank_main(rank: u32, orders: &str) -> Result<(), Diagnostics> {
    let began = Instant::now();
    let asked: Asked = serde_json::from_str(orders).map_err(|e| one(format!("orders: {e}")))?;
    let (model, plan) = planned(&asked)?;
    let rank = Rank(rank);
    let gpus = Gpus::look();
    let world = plan.sealed.mesh().iter().count();
    cuda::check(&gpus, world)?;
    // The first names the lanes, and whoever started it tells the others.
    let ids: Vec<String> = match (world, rank.0) {
        (1, _) => Vec::new(),
        (_, 0) => {
            let ids = cuda::lane_ids(&gpus, &plan.sealed).map_err(|d| vec![d])?;
            say(&ids.join(" "));
            ids
        }
        _ => {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map_err(|e| one(format!("no names of lanes: {e}")))?;
            line.split_whitespace().map(str::to_string).collect()
        }
    };
    let mut dit = Dit::load(&gpus, &model, &plan, (rank, asked.case), &ids)?;
    if asked.case {
        dit.written(&asked.model)?;
    }
    // At least twice, on every rank alike: the first captures.
    dit.step()?;
    let counts = dit.backend.counts();
    dit.step()?;
    let sealed = &plan.sealed;
    let Counts { compiled, captured, allocated } = counts;
    let ready = Ready {
        plan: sealed.digest_hex(),
        planned: {
            let [weights, buffers, slots] = dit.backend.memory();
            let lanes = ids.len().min(crate::comm::groups(sealed).len());
            [weights, buffers, slots, Cuda::overhead_bytes(lanes)]
        },
        measured: dit.backend.process_memory().unwrap_or(0),
        ways: dit.backend.ways(),
        load_s: began.elapsed().as_secs_f64(),
        counts: (compiled, captured, allocated),
    };
    say(&serde_json::to_string(&ready).unwrap_or_default());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.as_str() {
            "step" => say(&format!("{:.4}", dit.step()?)),
            "ops" => say(&serde_json::to_string(&dit.ops()?).unwrap_or_default()),
            "latent" => say(&dit.latent()),
            "counts" => say(&format!("{:?}", dit.backend.counts())),
            other => return Err(one(format!("rank {rank} does not know {other:?}"))),
        }
    }
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
}

/// The model and the plan that are timed.
///
/// # Errors
/// What is wrong with either.
pub fn planned(asked: &Asked) -> Result<(Model, Plan), Diagnostics> {
    let overrides = Overrides { recompute: Some(false), ..Overrides::default() };
    let mut model = Model::open(&asked.model, &overrides)?;
    if let Some((height, width)) = asked.size {
        let (s, patch) = (&mut model.video.stream, model.video.wan.patch);
        let cell = [s.stride[1] * patch[0], s.stride[2] * patch[1]];
        if height % cell[0] != 0 || width % cell[1] != 0 || height * width == 0 {
            return Err(one(format!(
                "{height}x{width} is not a whole number of tokens of {} × {}",
                cell[0], cell[1]
            )));
        }
        (s.height, s.width) = (height, width);
    }
    if let Some(layers) = asked.layers {
        model.video.wan.layers = layers.clamp(1, model.video.wan.layers);
    }
    let mapping = Mapping::parse("mapping", &asked.mapping)?;
    let plan = plan::make(&model.video, &model.name, "", &mapping)?;
    Ok((model, plan))
}

/// The denoising forward of one rank.
struct Dit {
    backend: Cuda,
    loaded: Loaded,
    scalars: Vec<(&'static str, Scalar)>,
    buffers: Vec<String>,
    /// First row and rows of this chunk in the caches.
    chunk: (u64, u64),
    rank: Rank,
}

struct Unwatched;
impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

impl Dit {
    fn load(
        gpus: &Gpus,
        model: &Model,
        plan: &Plan,
        (rank, case): (Rank, bool),
        ids: &[String],
    ) -> Result<Dit, Diagnostics> {
        let sealed = &plan.sealed;
        let video = &model.video;
        let fill = video.stream.window_frames - video.stream.chunk_frames;
        let name = format!("denoise.fill{fill}");
        let mut backend = cuda::open(gpus, sealed, rank, rank.0, ids, PATIENCE).map_err(|d| vec![d])?;
        let (Some(program), Some(slots)) = (sealed.program(&name, rank), sealed.slots(&name, rank)) else {
            return Err(one(format!("the plan has no {name} for rank {rank}")));
        };
        let program = Arc::new((**program).clone());
        let seat = Seat { mesh: *sealed.mesh(), rank };
        let mut given = case.then(|| model.some_weights("model.safetensors")).transpose()?;
        let inputs = case.then(|| model.some_weights("inputs.safetensors")).transpose()?;
        let mut made = Synthetic::default();
        let source: &mut dyn WeightSource = match &mut given {
            Some(weights) => weights,
            None => &mut made,
        };
        let loaded = backend.load(&program, slots, source).map_err(|d| vec![d])?;
        for b in &program.buffers {
            let values = match &inputs {
                Some(inputs) => held(inputs, &b.name, &b.ty, &seat).map_err(|d| vec![d])?,
                None => global_normals(&format!("buffer {}", b.name), &b.ty, &seat),
            };
            if !backend.write_buffer(&b.name, &values) {
                return Err(one(format!("buffer {} does not take what it should hold", b.name)));
            }
        }
        let step = steps(&video.stream).into_iter().next_back();
        let (t, sigma) = step.map_or((500.0, 0.5), |s| (s.timestep, s.sigma));
        let sigma = if case { case_sigma(model)? } else { sigma };
        let t = match &inputs {
            Some(inputs) => inputs.whole("t").map_err(|d| vec![d])?,
            None => vec![t; video.stream.chunk_frames as usize],
        };
        let buffers = program.buffers.iter().map(|b| b.name.clone()).collect();
        let chunk = (fill * video.frame_tokens(), video.chunk_tokens());
        let scalars = vec![
            ("t", Scalar::F32s(t)),
            ("sigma", Scalar::F32(sigma)),
            ("start", Scalar::I64(fill as i64)),
            ("row", Scalar::I64((fill * video.frame_tokens()) as i64)),
        ];
        Ok(Dit { backend, loaded, scalars, buffers, chunk, rank })
    }

    fn call(&self) -> CallData<'static> {
        CallData { scalars: self.scalars.iter().cloned().collect(), inputs: BTreeMap::new() }
    }

    /// Milliseconds of one step.
    fn step(&mut self) -> Result<f64, Diagnostics> {
        let call = self.call();
        let began = Instant::now();
        for _ in 0..FORWARDS {
            self.backend.run(self.loaded, &call, &mut Unwatched).map_err(|f| faulty(&f))?;
        }
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }

    /// Microseconds of each op of a forward, by kind of op: how many, and in all.
    fn ops(&mut self) -> Result<BTreeMap<String, (u32, f64)>, Diagnostics> {
        let call = self.call();
        self.backend.timed(self.loaded, &call, &mut Unwatched).map_err(|f| faulty(&f))
    }

    /// This rank's bits of the predicted latent.
    fn latent(&self) -> String {
        let values = self.backend.read_buffer("latent").unwrap_or_default();
        values.iter().map(|v| format!("{:08x}", v.to_bits())).collect()
    }

    /// Runs once and writes this rank's part of what came out: the latent, and this chunk's rows of keys and values.
    fn written(&mut self, case: &std::path::Path) -> Result<(), Diagnostics> {
        let call = self.call();
        self.backend.run(self.loaded, &call, &mut Unwatched).map_err(|f| faulty(&f))?;
        let folder = case.join("ours");
        let unwritten = |e: std::io::Error| one(format!("{}: {e}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(unwritten)?;
        for name in &self.buffers {
            let Some(values) = self.backend.read_buffer(name) else { continue };
            let (tensor, part) = match name.split('.').collect::<Vec<_>>()[..] {
                ["latent"] => ("x0".to_string(), &values[..]),
                ["kv", i, which] => {
                    let width = values.len() as u64 / (self.chunk.0 + self.chunk.1).max(1);
                    (format!("{which}.{i}"), &values[(self.chunk.0 * width) as usize..])
                }
                _ => continue,
            };
            let bytes: Vec<u8> = part.iter().flat_map(|v| v.to_le_bytes()).collect();
            std::fs::write(folder.join(format!("{tensor}.rank{}.f32", self.rank.0)), bytes)
                .map_err(unwritten)?;
        }
        Ok(())
    }
}

/// What a case holds in a buffer of this rank.
fn held(inputs: &Weights, name: &str, ty: &Type, seat: &Seat) -> Result<Vec<f32>, Diagnostic> {
    let whole = ty.layout.global(&ty.shape, &seat.mesh);
    let values = match name.split('.').collect::<Vec<_>>()[..] {
        ["x"] => inputs.whole("x")?,
        // The context's rows, and room for the chunk's.
        ["kv", i, which] => {
            let mut rows = inputs.whole(&format!("context.{i}.{which}"))?;
            rows.resize(whole.iter().product::<u64>() as usize, 0.0);
            rows
        }
        ["cross", i, which] => inputs.whole(&format!("text.{i}.{which}"))?,
        _ => vec![0.0; whole.iter().product::<u64>() as usize],
    };
    let ranges = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord());
    let [(row, rows), (column, columns)] = ranges[..] else { return Ok(values) };
    let all = whole[1] as usize;
    let part = |r: u64| &values[r as usize * all + column as usize..][..columns as usize];
    Ok((row..row + rows).flat_map(part).copied().collect())
}

fn case_sigma(model: &Model) -> Result<f32, Diagnostics> {
    let file = model.dir.join("case.json");
    let text = std::fs::read_to_string(&file).map_err(|e| one(format!("{}: {e}", file.display())))?;
    let case: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| one(format!("{}: {e}", file.display())))?;
    let sigma = case.get("sigma").and_then(serde_json::Value::as_f64);
    sigma.map(|s| s as f32).ok_or_else(|| one(format!("{} says no sigma", file.display())))
}

fn faulty(f: &Fault) -> Diagnostics {
    let (Fault::Failed(why) | Fault::Stalled(why) | Fault::Aborted(why) | Fault::Refused(why)) = f;
    one(why.clone())
}

/// Weights that nobody trained: normals of a tensor's name, small as trained ones are; norms near one.
#[derive(Debug, Clone, Default)]
pub struct Synthetic {
    /// Width of the rows of tensors that are scaled, by name: a tensor is read before its scales.
    inner: BTreeMap<String, u64>,
}

/// Size of a weight.
const DEVIATION: f32 = 0.02;

impl WeightSource for Synthetic {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic> {
        if load == Some("e4m3.scale") {
            // Of the rows that this vector scales, which are whole on the rank.
            let inner = self.inner.get(name).copied().unwrap_or(1);
            let rows =
                Type { dtype: tessera_ir::DType::F32, shape: vec![ty.shape[0], inner], layout: ty.layout };
            return self.read(name, &rows, None, seat).map(|w| numbers::scales_of(&w, inner as usize));
        }
        if load == Some("e4m3") {
            self.inner.insert(name.to_string(), ty.shape[1]);
            let mut w = self.read(name, ty, None, seat)?;
            numbers::over_scales(&mut w, ty.shape[1] as usize);
            return Ok(w);
        }
        let mut out = global_normals(name, ty, seat);
        let norm = name.contains("norm") && name.ends_with(".weight");
        let center = if norm { 1.0 } else { 0.0 };
        let parts: Vec<&mut [f32]> = out.chunks_mut(PIECE).collect();
        in_parallel(parts, &|part: &mut [f32]| part.iter_mut().for_each(|v| *v = center + DEVIATION * *v));
        Ok(out)
    }
}

/// This rank's piece of a tensor of standard normals that its name alone decides.
fn global_normals(name: &str, ty: &Type, seat: &Seat) -> Vec<f32> {
    let hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let key = DrawKey { seed: hash, chunk: 0, draw: 0 };
    let whole = ty.layout.global(&ty.shape, &seat.mesh);
    let ranges = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord());
    let mut out = vec![0.0; ty.elements() as usize];
    match (&ranges[..], &whole[..]) {
        // Only columns are cut: row by row.
        ([(row, _), (column, width)], [_, all]) if width != all => {
            let each = *width as usize;
            let rows: Vec<(usize, &mut [f32])> = out.chunks_mut(each.max(1)).enumerate().collect();
            in_parallel(rows, &|(r, part): (usize, &mut [f32])| {
                normals(key, (row + r as u64) * all + column, part);
            });
        }
        _ => {
            let inner: u64 = whole.iter().skip(1).product();
            fill_normals(key, ranges.first().map_or(0, |r| r.0 * inner), &mut out);
        }
    }
    out
}

/// Elements that one thread fills at a time.
const PIECE: usize = 1 << 20;

fn fill_normals(key: DrawKey, first: u64, out: &mut [f32]) {
    let pieces: Vec<(usize, &mut [f32])> = out.chunks_mut(PIECE).enumerate().collect();
    in_parallel(pieces, &|(i, part): (usize, &mut [f32])| normals(key, first + (i * PIECE) as u64, part));
}

fn in_parallel<T: Send>(mut work: Vec<T>, each: &(dyn Fn(T) + Sync)) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(work.len().max(1));
    let share = work.len().div_ceil(threads.max(1)).max(1);
    std::thread::scope(|s| {
        while !work.is_empty() {
            let part = work.split_off(work.len().saturating_sub(share));
            s.spawn(move || part.into_iter().for_each(each));
        }
    });
}

/// Digest of the bits that ranks hold of one tensor, by rows in order of rank; ranks that hold all of it count once.
#[must_use]
pub fn digest(parts: &[String]) -> String {
    let whole = match parts {
        [first, rest @ ..] if rest.iter().all(|r| r == first) => first.clone(),
        parts => parts.concat(),
    };
    blake3::hash(whole.as_bytes()).to_hex()[..16].to_string()
}

/// Median, and the tenth and ninetieth of a hundred.
#[must_use]
pub fn spread(times: &[f64]) -> (f64, f64, f64) {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| {
        sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0.0)
    };
    (at(0.5), at(0.1), at(0.9))
}
