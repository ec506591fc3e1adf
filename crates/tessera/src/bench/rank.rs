//! One rank of `bench dit`: its GPU, its weights once, and a forward for each size of the picture.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{Counts, Cuda};
use tessera_device::{Backend, CallData, Fault, Loaded, Observer, Scalar, Seat, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::steps;

use super::weights::{Synthetic, global_normals};
use super::{Asked, FORWARDS, PATIENCE, Point, Ready, Told, one, planned};
use crate::gpus::Gpus;
use crate::model::Weights;
use crate::{Model, cuda};

/// One rank: answers words on standard input until it ends.
///
/// # Errors
/// What cannot be loaded or run.
pub fn rank_main(rank: u32, orders: &str) -> Result<(), Diagnostics> {
    let began = Instant::now();
    let asked: Asked = serde_json::from_str(orders).map_err(|e| one(format!("orders: {e}")))?;
    let points = planned(&asked)?;
    let Some(first) = points.first() else { return Err(one("nothing to time")) };
    let rank = Rank(rank);
    let gpus = Gpus::look();
    let world = first.plan.sealed.mesh().iter().count();
    cuda::check(&gpus, world)?;
    // The first names the lanes, and whoever started it tells the others. They are the mapping's, whatever the size.
    let ids: Vec<String> = match (world, rank.0) {
        (1, _) => Vec::new(),
        (_, 0) => {
            let ids = cuda::lane_ids(&gpus, &first.plan.sealed).map_err(|d| vec![d])?;
            say(&ids.join(" "));
            ids
        }
        _ => {
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).map_err(|e| one(format!("no names of lanes: {e}")))?;
            line.split_whitespace().map(str::to_string).collect()
        }
    };
    let mut dit = Dit::load(&gpus, &points, (rank, asked.case), &ids)?;
    if asked.case {
        dit.written(&asked.model)?;
    }
    // At least twice, on every rank alike: the first captures.
    for at in 0..dit.forwards.len() {
        dit.step(at)?;
    }
    let Counts { compiled, captured, allocated, .. } = dit.backend.counts();
    for at in 0..dit.forwards.len() {
        dit.step(at)?;
    }
    let ready = Ready {
        plans: points.iter().map(|p| p.plan.sealed.digest_hex()).collect(),
        planned: {
            let [weights, buffers, slots] = dit.backend.memory();
            let lanes = ids.len().min(crate::comm::groups(&first.plan.sealed).len());
            [weights, buffers, slots, Cuda::overhead_bytes(lanes)]
        },
        measured: dit.backend.process_memory().unwrap_or(0),
        ways: dit.backend.ways(),
        load_s: began.elapsed().as_secs_f64(),
        counts: (compiled, captured, allocated),
    };
    say(&serde_json::to_string(&ready).unwrap_or_default());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let unknown = || one(format!("rank {rank} does not know {line:?}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).ok_or_else(unknown);
        let at = number(1)?;
        if at >= dit.forwards.len() {
            return Err(unknown());
        }
        match words[0] {
            "step" => say(&format!("{:.4}", dit.step(at)?)),
            "trace" => say(&serde_json::to_string(&dit.trace(at, number(2)?)?).unwrap_or_default()),
            "latent" => say(&dit.latent(at)),
            _ => return Err(unknown()),
        }
    }
    Ok(())
}

fn say(line: &str) {
    println!("{line}");
}

/// The denoising forwards of one rank.
struct Dit {
    backend: Cuda,
    forwards: Vec<Forward>,
    rank: Rank,
}

/// The forward of one size.
struct Forward {
    loaded: Loaded,
    scalars: Vec<(&'static str, Scalar)>,
    /// What its buffers are called, and what they are called in the backend: other sizes have others of the same names.
    buffers: Vec<(String, String)>,
    /// First row and rows of this chunk in the caches.
    chunk: (u64, u64),
}

struct Unwatched;
impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

impl Dit {
    fn load(
        gpus: &Gpus,
        points: &[Point],
        (rank, case): (Rank, bool),
        ids: &[String],
    ) -> Result<Dit, Diagnostics> {
        let Some(first) = points.first() else { return Err(one("nothing to time")) };
        let mut backend =
            cuda::open(gpus, &first.plan.sealed, rank, rank.0, ids, PATIENCE).map_err(|d| vec![d])?;
        let mut given = case.then(|| first.model.some_weights("model.safetensors")).transpose()?;
        let inputs = case.then(|| first.model.some_weights("inputs.safetensors")).transpose()?;
        let mut made = Synthetic::default();
        let source: &mut dyn WeightSource = match &mut given {
            Some(weights) => weights,
            None => &mut made,
        };
        // All of them before any runs: memory of temporaries is placed once, for whichever needs most.
        let forwards = points
            .iter()
            .map(|p| Forward::load(&mut backend, p, rank, source, inputs.as_ref()))
            .collect::<Result<_, _>>()?;
        Ok(Dit { backend, forwards, rank })
    }

    /// Milliseconds of one step.
    fn step(&mut self, at: usize) -> Result<f64, Diagnostics> {
        let call = self.forwards[at].call();
        let began = Instant::now();
        for _ in 0..FORWARDS {
            self.backend.run(self.forwards[at].loaded, &call, &mut Unwatched).map_err(|f| faulty(&f))?;
        }
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }

    /// So many traced forwards.
    fn trace(&mut self, at: usize, count: usize) -> Result<Vec<Vec<Told>>, Diagnostics> {
        let (call, loaded) = (self.forwards[at].call(), self.forwards[at].loaded);
        (0..count)
            .map(|_| {
                let spans = self.backend.traced(loaded, &call, &mut Unwatched).map_err(|f| faulty(&f))?;
                Ok(spans.into_iter().map(|s| (s.ops, s.stream, s.begin_ns, s.end_ns)).collect())
            })
            .collect()
    }

    /// This rank's bits of the predicted latent.
    fn latent(&self, at: usize) -> String {
        let held = self.forwards[at].buffers.iter().find(|(name, _)| name == "latent");
        let values = held.and_then(|(_, held)| self.backend.read_buffer(held)).unwrap_or_default();
        values.iter().map(|v| format!("{:08x}", v.to_bits())).collect()
    }

    /// Runs a case once and writes this rank's part of what came out: the latent, and this chunk's rows of keys and values.
    fn written(&mut self, case: &std::path::Path) -> Result<(), Diagnostics> {
        let Some(forward) = self.forwards.first() else { return Ok(()) };
        self.backend.run(forward.loaded, &forward.call(), &mut Unwatched).map_err(|f| faulty(&f))?;
        let folder = case.join("ours");
        let unwritten = |e: std::io::Error| one(format!("{}: {e}", folder.display()));
        std::fs::create_dir_all(&folder).map_err(unwritten)?;
        for (name, held) in &forward.buffers {
            let Some(values) = self.backend.read_buffer(held) else { continue };
            let (tensor, part) = match name.split('.').collect::<Vec<_>>()[..] {
                ["latent"] => ("x0".to_string(), &values[..]),
                ["kv", i, which] => {
                    let width = values.len() as u64 / (forward.chunk.0 + forward.chunk.1).max(1);
                    (format!("{which}.{i}"), &values[(forward.chunk.0 * width) as usize..])
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

impl Forward {
    fn load(
        backend: &mut Cuda,
        point: &Point,
        rank: Rank,
        source: &mut dyn WeightSource,
        inputs: Option<&Weights>,
    ) -> Result<Forward, Diagnostics> {
        let (sealed, model) = (&point.plan.sealed, &point.model);
        let (video, name) = (&model.video, point.phase());
        let (Some(program), Some(slots)) = (sealed.program(&name, rank), sealed.slots(&name, rank)) else {
            return Err(one(format!("the plan has no {name} for rank {rank}")));
        };
        let mut program = (**program).clone();
        let mut buffers = Vec::new();
        for b in &mut program.buffers {
            let held = format!("{}/{}", point.size, b.name);
            buffers.push((std::mem::replace(&mut b.name, held.clone()), held));
        }
        let seat = Seat { mesh: *sealed.mesh(), rank };
        let program = Arc::new(program);
        let loaded = backend.load(&program, slots, source).map_err(|d| vec![d])?;
        for ((name, held_as), b) in buffers.iter().zip(&program.buffers) {
            let values = match inputs {
                Some(inputs) => held(inputs, name, &b.ty, &seat).map_err(|d| vec![d])?,
                None => global_normals(&format!("buffer {name}"), &b.ty, &seat),
            };
            if !backend.write_buffer(held_as, &values) {
                return Err(one(format!("buffer {name} does not take what it should hold")));
            }
        }
        let step = steps(&video.stream).into_iter().next_back();
        let (t, sigma) = step.map_or((500.0, 0.5), |s| (s.timestep, s.sigma));
        let (t, sigma) = match inputs {
            Some(inputs) => (inputs.whole("t").map_err(|d| vec![d])?, case_sigma(model)?),
            None => (vec![t; video.stream.chunk_frames as usize], sigma),
        };
        let fill = point.fill();
        let chunk = (fill * video.frame_tokens(), video.chunk_tokens());
        let scalars = vec![
            ("t", Scalar::F32s(t)),
            ("sigma", Scalar::F32(sigma)),
            ("start", Scalar::I64(fill as i64)),
            ("row", Scalar::I64(chunk.0 as i64)),
        ];
        Ok(Forward { loaded, scalars, buffers, chunk })
    }

    fn call(&self) -> CallData<'static> {
        CallData { scalars: self.scalars.iter().cloned().collect(), inputs: BTreeMap::new() }
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
